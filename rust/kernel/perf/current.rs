// SPDX-License-Identifier: GPL-2.0

//! PMUs that do one event per CPU at a time, and the way from a CPU to its event.

use super::{
    bindings,
    Event,
    OnCpu,
    Pmu, //
};
use crate::{
    nmi::{
        CpuLocal,
        NmiLike, //
    },
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    }, //
};
use core::{
    marker::PhantomData,
    ptr, //
};

/// The event that is on each CPU, of a PMU that does one at a time there.
///
/// A driver makes one, shares it with its interrupt handlers, and gives it to the abstraction by
/// [`Pmu::current`]. Then an event that comes to a CPU where there is one already is refused
/// (`EBUSY`; the core tries again later), and handlers find the event for as long as it is on the
/// CPU, in whatever context.
///
/// # Invariants
///
/// What is not null is an event of a `Registration<P>` that is on the slot's CPU.
pub struct Current<P: Pmu> {
    slots: CpuLocal<Atomic<*mut bindings::perf_event>>,
    _pmu: PhantomData<fn() -> P>,
}

// SAFETY: The pointers are used on the CPU of their slot only.
unsafe impl<P: Pmu> Send for Current<P> {}
// SAFETY: As above.
unsafe impl<P: Pmu> Sync for Current<P> {}

impl<P: Pmu> Current<P> {
    /// No event on any CPU.
    pub fn new() -> Result<Arc<Self>> {
        let slots = CpuLocal::new(|_| Ok(Atomic::new(ptr::null_mut())))?;
        // INVARIANT: All pointers are null.
        Ok(Arc::new(
            Self {
                slots,
                _pmu: PhantomData,
            },
            GFP_KERNEL,
        )?)
    }

    /// The event on this CPU, if there is one.
    #[inline(always)]
    pub fn event<'a>(&'a self, cx: &'a NmiLike<'_>) -> Option<&'a OnCpu<P>> {
        let event = self.slots.get(cx)?.load(Relaxed);
        if event.is_null() {
            return None;
        }
        // SAFETY: By the type invariants. It stays on this CPU while interrupts are off, which is
        // how long `cx` can exist.
        Some(unsafe { OnCpu::from_raw(event) })
    }

    /// Takes this CPU for `event`; returns whether it was free.
    pub(super) fn take(&self, event: &Event<P>, cx: &NmiLike<'_>) -> bool {
        match self.slots.get(cx) {
            Some(slot) if slot.load(Relaxed).is_null() => {
                // INVARIANT: The caller is about to put the event on this CPU.
                slot.store(event.as_raw(), Relaxed);
                true
            }
            _ => false,
        }
    }

    /// The event is about to leave this CPU.
    pub(super) fn release(&self, cx: &NmiLike<'_>) {
        if let Some(slot) = self.slots.get(cx) {
            slot.store(ptr::null_mut(), Relaxed);
        }
    }
}
