// SPDX-License-Identifier: GPL-2.0

//! Code that runs with interrupts off, and code that can interrupt even that.
//!
//! C header: [`include/linux/irqflags.h`](srctree/include/linux/irqflags.h)
//!
//! Switching interrupts off keeps out everything but NMIs, and exceptions that are entered like
//! one: a debug exception on a kernel address, for instance. Code in such a context must not wait
//! for what it has interrupted, so it can take no lock that other contexts take. "NMI" below stands
//! for all of them.
//!
//! - [`NmiLike`] and [`IrqsOff`] prove to the callee what it may do. A function that takes one can
//!   only be called where the proof exists.
//! - [`CpuLocal`] is a value per CPU, shared by all contexts of that CPU.
//! - [`NmiCell`] gives `&mut` access to one visitor at a time, and turns the others away instead of
//!   letting them wait.

use crate::{
    bindings,
    cpu::{
        nr_cpu_ids,
        CpuId, //
    },
    prelude::*,
    sync::atomic::{
        ordering::{
            Acquire,
            Release, //
        },
        Atomic, //
    },
    types::NotThreadSafe, //
};
use core::{
    cell::UnsafeCell,
    marker::PhantomData,
    ops::Deref, //
};

/// Proof that interrupts are off on this CPU, possibly because the code runs in an NMI.
///
/// Whoever holds one must not sleep, allocate, print, or take a lock that is also taken elsewhere.
///
/// # Invariants
///
/// While a value of this type exists, interrupts are off and the code stays on its CPU.
pub struct NmiLike<'a>(PhantomData<&'a ()>, NotThreadSafe);

impl NmiLike<'_> {
    /// # Safety
    ///
    /// Interrupts must be off for as long as the returned value exists.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // INVARIANT: The caller promises that interrupts are off; with them off there is neither
        // preemption nor migration.
        Self(PhantomData, NotThreadSafe)
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
    /// in an NMI.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        // SAFETY: By the safety requirements of this function.
        // INVARIANT: By the safety requirements of this function.
        Self(unsafe { NmiLike::new() })
    }
}

impl<'a> Deref for IrqsOff<'a> {
    type Target = NmiLike<'a>;

    #[inline(always)]
    fn deref(&self) -> &NmiLike<'a> {
        &self.0
    }
}

/// Calls `f` with interrupts off, and then leaves them as they were before.
///
/// It can be called in any context; in an NMI interrupts are off already and stay so.
/// [`local_interrupt_disable`](crate::interrupt::local_interrupt_disable) is no substitute: on a
/// kernel without preemption it does nothing.
///
/// # Examples
///
/// ```
/// use kernel::nmi::{irqs_off, CpuLocal};
///
/// let numbers = CpuLocal::new(|cpu| Ok(cpu))?;
/// let (here, number) = irqs_off(|cx| {
///     (kernel::cpu::CpuId::current().as_u32(), numbers.get(cx).copied())
/// });
/// assert_eq!(number, Some(here));
/// # Ok::<(), Error>(())
/// ```
#[inline(always)]
pub fn irqs_off<R>(f: impl FnOnce(&NmiLike<'_>) -> R) -> R {
    // SAFETY: The flags are restored below, on the same CPU since nothing in between can sleep.
    let flags = unsafe { bindings::local_irq_save() };
    // SAFETY: Interrupts are off until `f` has returned, which the reference does not outlive.
    let result = f(&unsafe { NmiLike::new() });
    // SAFETY: The flags are those that `local_irq_save()` has returned.
    unsafe { bindings::local_irq_restore(flags) };
    result
}

/// One CPU's value, on cache lines of its own.
#[repr(align(64))]
struct Slot<T>(T);

/// A value per possible CPU.
///
/// All contexts of a CPU share its value, so what they change in it is an atomic or in an
/// [`NmiCell`].
pub struct CpuLocal<T> {
    slots: KVVec<Slot<T>>,
}

impl<T> CpuLocal<T> {
    /// Makes the values by calling `init` with the number of each possible CPU.
    pub fn new(mut init: impl FnMut(u32) -> Result<T>) -> Result<Self> {
        let mut slots = KVVec::with_capacity(nr_cpu_ids() as usize, GFP_KERNEL)?;
        for cpu in 0..nr_cpu_ids() {
            slots.push(Slot(init(cpu)?), GFP_KERNEL)?;
        }
        Ok(Self { slots })
    }

    /// This CPU's value. There is one for each CPU that can run code, so [`None`] does not occur in
    /// practice; it is here so that no panic can be reached from an NMI.
    #[inline(always)]
    pub fn get<'a>(&'a self, _cx: &'a NmiLike<'_>) -> Option<&'a T> {
        self.slots
            .get(CpuId::current().as_u32() as usize)
            .map(|slot| &slot.0)
    }
}

/// A value that is visited by one context at a time.
///
/// A visitor that comes while another one is there, be it on another CPU or one that it has
/// interrupted, is turned away: it gets [`None`] and has to do without.
///
/// # Examples
///
/// ```
/// use kernel::nmi::NmiCell;
///
/// let cell = NmiCell::new(1);
/// assert_eq!(cell.with(|value| core::mem::replace(value, 2)), Some(1));
/// // Who comes in between has to do without.
/// assert_eq!(cell.with(|_| cell.with(|value| *value)), Some(None));
/// assert_eq!(cell.with(|value| *value), Some(2));
/// # Ok::<(), Error>(())
/// ```
pub struct NmiCell<T> {
    busy: Atomic<bool>,
    value: UnsafeCell<T>,
}

// SAFETY: `busy` lets one context at a time reach the value, and orders its visits.
unsafe impl<T: Send> Sync for NmiCell<T> {}

impl<T> NmiCell<T> {
    /// A cell that nobody visits.
    pub const fn new(value: T) -> Self {
        Self {
            busy: Atomic::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Calls `f` with the value, unless somebody else is at it.
    #[inline(always)]
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        if self.busy.xchg(true, Acquire) {
            return None;
        }
        // SAFETY: The flag was clear, so no context holds a reference; it is set now, so none gets
        // one until it is cleared below.
        let result = f(unsafe { &mut *self.value.get() });
        self.busy.store(false, Release);
        Some(result)
    }
}
