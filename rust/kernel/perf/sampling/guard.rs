// SPDX-License-Identifier: GPL-2.0

//! What keeps other contexts out while a snapshot is taken.

use crate::{
    nmi::NmiLike,
    prelude::*,
    sync::barrier::barrier, //
};
use core::marker::PhantomData;

/// A snapshot of a buffer's AUX area is being taken on this CPU.
///
/// A context that interrupts this one finds `perf_buffer::aux_in_sampling` set, and takes no sample
/// of the same area. Only this CPU looks at the flag: all samplers of a buffer are bound to one CPU
/// or to one task.
///
/// # Invariants
///
/// `*flag` was clear when the value was made, and is set until it is dropped.
pub(super) struct InSampling<'a> {
    flag: *mut c_int,
    _cx: PhantomData<&'a NmiLike<'a>>,
}

impl<'a> InSampling<'a> {
    /// Sets the flag; [`None`] if an outer context has set it.
    ///
    /// # Safety
    ///
    /// `flag` must point to the `aux_in_sampling` of a buffer that exists throughout `'a`.
    #[inline(always)]
    pub(super) unsafe fn enter(flag: *mut c_int, _cx: &'a NmiLike<'a>) -> Option<Self> {
        // SAFETY: `flag` is valid by the safety requirements. Contexts on one CPU nest, and each
        // leaves the flag as it found it, so a plain load and a plain store are enough.
        unsafe {
            if flag.read_volatile() != 0 {
                return None;
            }
            flag.write_volatile(1);
        }
        // The callback may be anything, also code that the compiler can see: nothing of it may be
        // done before the flag is set, or after it is cleared.
        barrier();
        // INVARIANT: The flag was clear and is set now; whoever interrupts this code and sees it
        // set leaves it alone.
        Some(Self {
            flag,
            _cx: PhantomData,
        })
    }
}

impl Drop for InSampling<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        barrier();
        // SAFETY: The buffer exists, by the safety requirements of `enter`.
        unsafe { self.flag.write_volatile(0) };
    }
}
