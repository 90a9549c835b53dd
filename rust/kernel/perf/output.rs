// SPDX-License-Identifier: GPL-2.0

//! The part of a sample record that a PMU fills in.

use super::{
    bindings,
    AuxOutput,
    Pmu, //
};
use crate::{
    nmi::NmiLike,
    prelude::*, //
};
use core::marker::PhantomData;

/// The `data` of a sample's AUX field, of a size that the core has fixed.
///
/// What the driver does not write is filled with zeros when the callback returns, so that a reader
/// never sees what was in the data buffer before.
///
/// # Invariants
///
/// `handle` is valid and its output is open for at least `left` more bytes.
pub struct SampleOutput<'a> {
    handle: *mut bindings::perf_output_handle,
    left: usize,
    _cx: PhantomData<&'a NmiLike<'a>>,
}

#[cfg(PERF_IN_MODULE)]
mod direct;
#[cfg(PERF_IN_MODULE)]
use self::direct::{
    output_copy,
    output_copy_aux, //
};

// The two below are not generic, so that they are compiled into the kernel: what they call is not
// exported to modules.

#[cfg(not(PERF_IN_MODULE))]
#[inline(never)]
fn output_copy(handle: *mut bindings::perf_output_handle, bytes: &[u8]) -> usize {
    // SAFETY: The callers pass the handle of a `SampleOutput`, which is valid; `bytes` is a slice
    // of less than 64 KiB.
    let left =
        unsafe { bindings::perf_output_copy(handle, bytes.as_ptr().cast(), bytes.len() as u32) };
    bytes.len() - left as usize
}

/// Returns how many bytes were copied, which may be none.
#[cfg(not(PERF_IN_MODULE))]
#[inline(never)]
fn output_copy_aux(
    aux: *mut bindings::perf_output_handle,
    handle: *mut bindings::perf_output_handle,
    from: usize,
    to: usize,
) -> usize {
    #[cfg(CONFIG_PERF_AUX_RUST)]
    if super::sampling::is_chosen() {
        // SAFETY: As below.
        let copied =
            unsafe { super::sampling::copy::copy_aux(aux, handle, from as u64, to as u64) };
        return copied.map_or(0, |copied| copied as usize);
    }
    // SAFETY: The callers pass the handle of an open `AuxOutput` and that of a `SampleOutput`.
    let copied = unsafe { bindings::perf_output_copy_aux(aux, handle, from, to) };
    usize::try_from(copied).unwrap_or(0)
}

static ZEROS: [u8; 256] = [0; 256];

impl<'a> SampleOutput<'a> {
    /// # Safety
    ///
    /// `handle` must be valid for `'a`, with an open output of at least `size` more bytes.
    #[inline]
    pub(super) unsafe fn new(
        handle: *mut bindings::perf_output_handle,
        size: usize,
        _cx: &'a NmiLike<'a>,
    ) -> Self {
        // INVARIANT: By the safety requirements of this function.
        Self {
            handle,
            left: size,
            _cx: PhantomData,
        }
    }

    /// How many bytes are still to be written.
    #[inline]
    pub fn left(&self) -> usize {
        self.left
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    ///
    /// `ENOSPC`, with nothing written, if there is no room for all of them. `EFAULT` if the data
    /// buffer took only some.
    pub fn copy(&mut self, bytes: &[u8]) -> Result {
        if bytes.len() > self.left {
            return Err(ENOSPC);
        }
        let copied = output_copy(self.handle, bytes);
        // INVARIANT: As many bytes fewer may follow as were copied now.
        self.left -= copied;
        if copied < bytes.len() {
            return Err(EFAULT);
        }
        Ok(())
    }

    /// Appends `size` zeros.
    ///
    /// # Errors
    ///
    /// As [`SampleOutput::copy`].
    pub fn zero(&mut self, mut size: usize) -> Result {
        if size > self.left {
            return Err(ENOSPC);
        }
        while size > 0 {
            let chunk = ZEROS.get(..size).unwrap_or(&ZEROS);
            self.copy(chunk)?;
            size -= chunk.len();
        }
        Ok(())
    }

    /// Appends the last `size` bytes of the trace.
    ///
    /// # Errors
    ///
    /// `ENOSPC`, with nothing written, if `size` is more than there is room for or than the area
    /// has. `EBUSY`, with nothing written, if the area belongs to its reader, as in full-trace
    /// mode, or if the transaction has ended. `EFAULT` if the data buffer took only some of the
    /// bytes.
    #[inline]
    pub fn copy_aux<P: Pmu>(&mut self, aux: &mut AuxOutput<'_, P>, size: usize) -> Result {
        if !aux.is_open() || !aux.overwrite() {
            return Err(EBUSY);
        }
        if size > self.left || size as u64 > aux.size() {
            return Err(ENOSPC);
        }
        if size == 0 {
            return Ok(());
        }
        let to = aux.head();
        let from = to.wrapping_sub(size as u64);
        let copied = output_copy_aux(aux.as_raw(), self.handle, from as usize, to as usize);
        // INVARIANT: As many bytes fewer may follow as were copied now.
        self.left = self.left.saturating_sub(copied);
        if copied == 0 {
            return Err(EFAULT);
        }
        Ok(())
    }

    /// Fills up what was not written.
    #[inline]
    pub(super) fn finish(mut self) {
        if self.left > 0 {
            // If even this fails, the data buffer went away, and with it the record.
            let _ = self.zero(self.left);
        }
    }
}
