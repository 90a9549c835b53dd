// SPDX-License-Identifier: GPL-2.0

//! `perf_output_copy()` and `perf_output_copy_aux()` for a module, to which they are not exported.

#[allow(dead_code, reason = "AUX sampling in Rust uses the rest")]
#[path = "../sampling/copy.rs"]
mod copy;

use self::copy::{
    copy_aux,
    Output, //
};
use super::bindings;

/// Appends `bytes`. Returns how many of them.
#[inline]
pub(super) fn output_copy(handle: *mut bindings::perf_output_handle, bytes: &[u8]) -> usize {
    // SAFETY: The callers pass the handle of a `SampleOutput`, whose output is open.
    unsafe { Output::new(handle) }.put(bytes);
    bytes.len()
}

/// Appends what lies in the AUX area from `from` up to `to`. Returns how many bytes that was, which
/// may be none.
#[inline]
pub(super) fn output_copy_aux(
    aux: *mut bindings::perf_output_handle,
    handle: *mut bindings::perf_output_handle,
    from: usize,
    to: usize,
) -> usize {
    // SAFETY: The callers pass the handle of an open `AuxOutput` and that of a `SampleOutput`.
    let copied = unsafe { copy_aux(aux, handle, from as u64, to as u64) };
    copied.map_or(0, |copied| copied as usize)
}
