// SPDX-License-Identifier: GPL-2.0

//! What keeps other contexts out while a snapshot is taken.

use crate::{
    perf::{
        bindings,
        NmiLike, //
    },
    prelude::*,
    sync::barrier::barrier,
    types::NotThreadSafe, //
};
use core::marker::PhantomData;

/// Interrupts are off until this is dropped; then they are as they were before.
///
/// This works in an NMI too, where they are off already and stay so. `kernel::interrupt` does not:
/// it keeps the flags to return to in a per-CPU variable that an NMI could find half-updated.
pub(super) struct IrqsSaved {
    flags: c_ulong,
    _here: NotThreadSafe,
}

impl IrqsSaved {
    /// Switches interrupts off.
    #[inline(always)]
    pub(super) fn save() -> Self {
        Self {
            // SAFETY: `drop` restores the flags, on the same CPU since the value is not `Send`.
            flags: unsafe { bindings::local_irq_save() },
            _here: NotThreadSafe,
        }
    }

    /// The fact as a token.
    #[inline(always)]
    pub(super) fn token(&self) -> NmiLike<'_> {
        // SAFETY: Interrupts are off for as long as `self` exists, which the token can not outlive.
        unsafe { NmiLike::new() }
    }
}

impl Drop for IrqsSaved {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: The flags are those that `local_irq_save()` returned.
        unsafe { bindings::local_irq_restore(self.flags) };
    }
}

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
