// SPDX-License-Identifier: GPL-2.0

//! Events, as a PMU driver sees them.

use super::{
    bindings,
    IrqsOff,
    NmiLike,
    Pmu, //
};
use crate::{
    prelude::*,
    types::Opaque, //
};
use core::marker::PhantomData;

/// A `struct perf_event` of the PMU `P`.
///
/// # Invariants
///
/// The event's `pmu` is the one inside a `Registration<P>`, and `P::event_init` is running for it
/// or has succeeded.
#[repr(transparent)]
pub struct Event<P>(Opaque<bindings::perf_event>, PhantomData<P>);

impl<P: Pmu> Event<P> {
    /// # Safety
    ///
    /// `ptr` must be a valid event for `'a`, and the type invariants must hold for it.
    #[inline]
    pub(super) unsafe fn from_raw<'a>(ptr: *mut bindings::perf_event) -> &'a Self {
        // SAFETY: `Event` is a transparent wrapper; the rest is the caller's promise.
        unsafe { &*ptr.cast() }
    }

    #[inline]
    pub(super) fn as_raw(&self) -> *mut bindings::perf_event {
        self.0.get()
    }

    #[inline]
    fn attr(&self) -> &bindings::perf_event_attr {
        // SAFETY: The event is valid, and its attributes do not change while callbacks run, but for
        // fields that have no accessor here (`sample_period`, `disabled`, `enable_on_exec`).
        unsafe { &(*self.as_raw()).attr }
    }

    /// `attr.config`: what user space asked for, laid out as the PMU's `format/` files say.
    #[inline]
    pub fn config(&self) -> u64 {
        self.attr().config
    }

    /// Whether the fields for which the PMU defines no meaning (`config1` to `config4`) are zero.
    pub fn only_config(&self) -> bool {
        let attr = self.attr();
        // SAFETY: All variants of the unions are plain integers of the size of the union.
        let (config1, config2) =
            unsafe { (attr.__bindgen_anon_3.config1, attr.__bindgen_anon_4.config2) };
        config1 == 0 && config2 == 0 && attr.config3 == 0 && attr.config4 == 0
    }

    /// `attr.exclude_kernel`: kernel mode is not to be observed.
    #[inline]
    pub fn exclude_kernel(&self) -> bool {
        self.attr().exclude_kernel() != 0
    }

    /// `attr.exclude_user`: user mode is not to be observed.
    #[inline]
    pub fn exclude_user(&self) -> bool {
        self.attr().exclude_user() != 0
    }

    /// `attr.exclude_hv`: the hypervisor is not to be observed.
    #[inline]
    pub fn exclude_hv(&self) -> bool {
        self.attr().exclude_hv() != 0
    }

    /// `attr.aux_sample_size`, in bytes: the event itself wants AUX samples of its leader.
    #[inline]
    pub fn aux_sample_size(&self) -> u32 {
        self.attr().aux_sample_size
    }

    /// The CPU the event is bound to, or [`None`] when it follows its task everywhere.
    #[inline]
    pub fn cpu(&self) -> Option<u32> {
        // SAFETY: The event is valid and `cpu` does not change after creation.
        u32::try_from(unsafe { (*self.as_raw()).cpu }).ok()
    }

    /// Whether another event of the group has paused the trace, or none has resumed one that starts
    /// paused (`attr.aux_start_paused`).
    ///
    /// The answer changes before [`Stop::Pause`](super::Stop::Pause) and
    /// [`Start::Resume`](super::Start::Resume) say so, which may interrupt whoever asks.
    #[inline]
    pub fn aux_paused(&self) -> bool {
        let hw = self.as_raw();
        // SAFETY: The event is valid. It is one with an AUX area, hence uses this variant of the
        // union; the core writes it on the CPU the event is on, or before it is on any.
        unsafe {
            core::ptr::read_volatile(
                &raw const (*hw).hw.__bindgen_anon_1.__bindgen_anon_2.aux_paused,
            ) != 0
        }
    }

    /// Whether the core considers the event stopped (`PERF_HES_STOPPED`).
    #[inline]
    pub fn stopped(&self) -> bool {
        self.hw_state() & bindings::PERF_HES_STOPPED as c_int != 0
    }

    #[inline]
    fn hw_state(&self) -> c_int {
        // SAFETY: The event is valid; `hw.state` is an int that is only written on the CPU the
        // event is on, or before it is on any.
        unsafe { core::ptr::read_volatile(&raw const (*self.as_raw()).hw.state) }
    }

    /// Says that the event is stopped.
    ///
    /// Only the CPU that the event is on may say so, which the tokens of its callbacks show.
    #[inline]
    pub fn set_stopped(&self, _cx: &NmiLike<'_>) {
        self.set_hw_state(self.hw_state() | bindings::PERF_HES_STOPPED as c_int);
    }

    /// Says that the event is stopped and has no AUX transaction open.
    #[inline]
    pub fn set_closed(&self, _cx: &NmiLike<'_>) {
        self.halt();
    }

    /// Says that the event runs.
    #[inline]
    pub fn set_running(&self, _cx: &IrqsOff<'_>) {
        self.set_hw_state(0);
    }

    #[inline]
    pub(super) fn halt(&self) {
        let closed = bindings::PERF_HES_STOPPED | bindings::PERF_HES_UPTODATE;
        self.set_hw_state(closed as c_int);
    }

    #[inline]
    fn set_hw_state(&self, state: c_int) {
        // SAFETY: As in `hw_state`.
        unsafe { core::ptr::write_volatile(&raw mut (*self.as_raw()).hw.state, state) };
    }

    /// Whether `other` is the same event.
    #[inline]
    pub fn is(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}
