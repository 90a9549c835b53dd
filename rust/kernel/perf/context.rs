// SPDX-License-Identifier: GPL-2.0

//! Proofs of the context that code runs in, and the per-CPU state such code may touch.

use crate::{
    cpu::{
        nr_cpu_ids,
        CpuId, //
    },
    interrupt::LocalInterruptDisabled,
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    },
    types::NotThreadSafe, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ops::Deref, //
};

/// A compiler barrier, C's `barrier()`.
///
/// It orders accesses of one CPU as seen by a context that interrupts it, which is all that code
/// guarded against NMIs needs.
#[inline(always)]
pub(super) fn barrier() {
    // An inline assembly block that does not say `nomem` may touch all memory, so that the compiler
    // moves no access across it.
    //
    // SAFETY: The block is empty.
    unsafe { core::arch::asm!("", options(nostack, preserves_flags)) };
}

/// Proof that interrupts are off on this CPU, possibly because the code runs in an NMI.
///
/// Whoever holds one must not sleep, allocate, take a lock or print.
///
/// # Invariants
///
/// While a value of this type exists, interrupts are off and the code stays on its CPU.
pub struct NmiLike<'a>(PhantomData<&'a ()>, NotThreadSafe);

impl NmiLike<'_> {
    /// # Safety
    ///
    /// Interrupts must be off for as long as the returned value exists.
    #[inline]
    pub(super) unsafe fn new() -> Self {
        // INVARIANT: The caller promises that interrupts are off; with them off there is neither
        // preemption nor migration.
        Self(PhantomData, NotThreadSafe)
    }
}

impl<'a> From<&'a LocalInterruptDisabled> for NmiLike<'a> {
    #[inline]
    fn from(_: &'a LocalInterruptDisabled) -> Self {
        // SAFETY: Interrupts are off for as long as the token exists.
        unsafe { Self::new() }
    }
}

/// Proof that interrupts are off on this CPU and that the code does not run in an NMI.
///
/// # Invariants
///
/// Those of [`NmiLike`]; besides, no code that holds an [`IrqsOff`] has interrupted other code that
/// ran with interrupts off.
pub struct IrqsOff<'a>(NmiLike<'a>);

impl IrqsOff<'_> {
    /// # Safety
    ///
    /// Interrupts must be off for as long as the returned value exists, and the caller must not be
    /// in an NMI or in a debug exception from kernel mode.
    #[inline]
    pub(super) unsafe fn new() -> Self {
        // SAFETY: By the safety requirements of this function.
        // INVARIANT: By the safety requirements of this function.
        Self(unsafe { NmiLike::new() })
    }
}

impl<'a> Deref for IrqsOff<'a> {
    type Target = NmiLike<'a>;

    #[inline]
    fn deref(&self) -> &NmiLike<'a> {
        &self.0
    }
}

/// One CPU's share of a [`CpuLocal`], on cache lines of its own.
#[repr(align(64))]
struct Slot<T> {
    busy: Atomic<bool>,
    value: UnsafeCell<T>,
}

/// A value per possible CPU, visited with interrupts off by one context at a time.
///
/// Code with interrupts off can still be interrupted by an NMI that wants the same CPU's value.
/// [`CpuLocal::with`] turns that visitor away instead of handing out a second mutable reference:
/// the visitor gets [`None`] and has to do without.
///
/// # Examples
///
/// ```
/// use kernel::{
///     interrupt::local_interrupt_disable,
///     perf::{CpuLocal, NmiLike}, //
/// };
///
/// let counters = CpuLocal::new(|cpu| Ok(cpu))?;
/// let irqs = local_interrupt_disable();
/// let cx = NmiLike::from(&irqs);
///
/// let cpu = counters.with(&cx, |counter| *counter);
/// assert_eq!(cpu, Some(kernel::cpu::CpuId::current().as_u32()));
///
/// // Who comes in between has to do without.
/// let nested = counters.with(&cx, |_| counters.with(&cx, |counter| *counter));
/// assert_eq!(nested, Some(None));
/// # Ok::<(), Error>(())
/// ```
pub struct CpuLocal<T> {
    slots: KVVec<Slot<T>>,
}

// SAFETY: Each value is only reached from its own CPU, or through `&mut self`; moving to another
// CPU's context between visits is what `T: Send` allows.
unsafe impl<T: Send> Sync for CpuLocal<T> {}
// SAFETY: Owning the `CpuLocal` is owning its values, which are `Send`.
unsafe impl<T: Send> Send for CpuLocal<T> {}

impl<T> CpuLocal<T> {
    /// Makes the values by calling `init` with the number of each possible CPU.
    pub fn new(mut init: impl FnMut(u32) -> Result<T>) -> Result<Self> {
        let mut slots = KVVec::with_capacity(nr_cpu_ids() as usize, GFP_KERNEL)?;
        for cpu in 0..nr_cpu_ids() {
            slots.push(
                Slot {
                    busy: Atomic::new(false),
                    value: UnsafeCell::new(init(cpu)?),
                },
                GFP_KERNEL,
            )?;
        }
        Ok(Self { slots })
    }

    /// Calls `f` with this CPU's value, unless the code that is being interrupted already has it.
    #[inline]
    pub fn with<R>(&self, cx: &NmiLike<'_>, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        let _ = cx;
        let slot = self.slots.get(CpuId::current().as_u32() as usize)?;

        // Only this CPU gets here, and contexts nest: a nested visitor leaves the flag as it found
        // it, so a plain load and a plain store with compiler barriers are enough.
        if slot.busy.load(Relaxed) {
            return None;
        }
        slot.busy.store(true, Relaxed);
        barrier();
        // SAFETY: `cx` shows that this code stays on its CPU. The flag was clear, so no context on
        // this CPU holds a reference; it is set now, so none gets one until it is cleared below.
        let result = f(unsafe { &mut *slot.value.get() });
        barrier();
        slot.busy.store(false, Relaxed);
        Some(result)
    }
}
