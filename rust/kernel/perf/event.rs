// SPDX-License-Identifier: GPL-2.0

//! Events, as a PMU driver sees them.
//!
//! An event has three views, by what may be done with it when:
//!
//! - [`Attr`]: what user space asks for, while the event is made.
//! - [`Event`]: an event that exists. It may be on any CPU, or on none.
//! - [`OnCpu`]: an event that is on this CPU, with interrupts off, so that it stays there. Only
//!   here a driver gets at what changes: its own [`Pmu::State`], the AUX transaction, the timer.

use super::{
    aux::{
        AuxOutput,
        Transaction, //
    },
    bindings,
    field::Field,
    filter::Synced,
    registration::STOPPED,
    timer::Timer,
    Pmu, //
};
use crate::{
    nmi::NmiCell,
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    },
    types::{
        NotThreadSafe,
        Opaque, //
    }, //
};
use core::marker::PhantomData;

/// What the abstraction keeps per event, in `pmu_private`. It is made in `event_init` and goes with
/// the event.
pub(super) struct Private<P: Pmu> {
    pub(super) timer: Timer<P>,
    pub(super) data: P::Data,
    pub(super) cell: NmiCell<Changing<P>>,
    pub(super) ranges: Synced,
    /// The core is in `perf_event_overflow()` for this event on the CPU that the event is on.
    pub(super) in_overflow: Atomic<bool>,
}

/// What changes while an event is on a CPU.
pub(super) struct Changing<P: Pmu> {
    pub(super) state: P::State,
    pub(super) transaction: Transaction,
}

/// The attributes of an event that is being made (`struct perf_event_attr`).
///
/// What the PMU's declared [fields](Pmu::FORMAT) do not allow has been refused already.
///
/// # Invariants
///
/// The pointer is that of a valid event whose `event_init` is running.
pub struct Attr<'a>(*mut bindings::perf_event, PhantomData<&'a ()>);

/// Reads a flag of `struct perf_event_attr`, of which the core may change others meanwhile.
macro_rules! flag {
    ($event:expr, $flag:ident) => {
        // SAFETY: By the type invariants the event is valid, hence its attributes are.
        (unsafe { bindings::perf_event_attr::$flag(&raw const (*$event).attr) }) != 0
    };
}

impl Attr<'_> {
    /// # Safety
    ///
    /// The type invariants must hold for `event`.
    pub(super) unsafe fn new(event: *mut bindings::perf_event) -> Self {
        // INVARIANT: By the safety requirements of this function.
        Self(event, PhantomData)
    }

    /// The value of a field.
    pub fn get(&self, field: &Field) -> u64 {
        // SAFETY: By the type invariants.
        unsafe { field.of(self.0) }
    }

    /// `exclude_kernel`: kernel mode is not to be observed.
    pub fn exclude_kernel(&self) -> bool {
        flag!(self.0, exclude_kernel_raw)
    }

    /// `exclude_user`: user mode is not to be observed.
    pub fn exclude_user(&self) -> bool {
        flag!(self.0, exclude_user_raw)
    }

    /// `exclude_hv`: the hypervisor is not to be observed.
    pub fn exclude_hv(&self) -> bool {
        flag!(self.0, exclude_hv_raw)
    }

    /// `exclude_idle`: nothing is to be observed while the CPU is idle.
    pub fn exclude_idle(&self) -> bool {
        flag!(self.0, exclude_idle_raw)
    }

    /// `inherit`: the event is also one of the tasks that its task makes.
    pub fn inherit(&self) -> bool {
        flag!(self.0, inherit_raw)
    }

    /// Whether the event takes samples, by period or by frequency (`is_sampling_event()`).
    pub fn is_sampling(&self) -> bool {
        // SAFETY: By the type invariants.
        unsafe { is_sampling(self.0) }
    }

    /// `aux_sample_size`, in bytes: the event itself wants AUX samples of its group's leader.
    pub fn aux_sample_size(&self) -> u32 {
        // SAFETY: By the type invariants.
        unsafe { (*self.0).attr.aux_sample_size }
    }

    /// The CPU that the event is bound to, or [`None`] when it follows its task everywhere.
    pub fn cpu(&self) -> Option<u32> {
        // SAFETY: By the type invariants.
        unsafe { cpu(self.0) }
    }

    /// Whether the event is one of a task. The other kind is one of a CPU.
    pub fn is_per_task(&self) -> bool {
        // SAFETY: By the type invariants.
        unsafe { !(*self.0).hw.target.is_null() || (*self.0).cpu < 0 }
    }
}

/// # Safety
///
/// `event` must be valid.
#[inline]
unsafe fn is_sampling(event: *mut bindings::perf_event) -> bool {
    // SAFETY: By the safety requirements. `ioctl(2)` changes the period, but never from or to 0.
    let period =
        unsafe { (&raw const (*event).attr.__bindgen_anon_1.sample_period).read_volatile() };
    period != 0
}

/// # Safety
///
/// `event` must be valid.
#[inline]
unsafe fn cpu(event: *mut bindings::perf_event) -> Option<u32> {
    // SAFETY: By the safety requirements; for an event with a scope the core moves it, so what is
    // read may be old.
    u32::try_from(unsafe { (&raw const (*event).cpu).read_volatile() }).ok()
}

/// What `event` has for sampling. Events of this crate's PMUs use no other variant of the union.
///
/// # Safety
///
/// `event` must be valid.
#[inline(always)]
unsafe fn sampling(
    event: *mut bindings::perf_event,
) -> *mut bindings::hw_perf_event__bindgen_ty_2__bindgen_ty_1 {
    // SAFETY: By the safety requirements. A pointer to a union is one to any of its variants.
    unsafe { (&raw mut (*event).hw.__bindgen_anon_2).cast() }
}

/// What a counter of `bits` bits has gained since it was `prev`, which becomes what `read` returns.
///
/// An interrupt or another CPU may do the same at any point in here. Each count is gained once.
#[inline]
fn gained(prev: &Atomic<i64>, bits: u32, mut read: impl FnMut() -> u64) -> u64 {
    // Not for ever, since a driver can have `read` itself lead to here.
    for _ in 0..4 {
        let before = prev.load(Relaxed);
        // After `before`, and again if that has changed: a value older than `before` would look as
        // if the counter had gone round.
        let now = read();
        if prev.cmpxchg(before, now as i64, Relaxed).is_ok() {
            return now.wrapping_sub(before as u64) & (u64::MAX >> (64 - bits));
        }
    }
    // Others have counted until a moment ago; the rest is gained next time.
    0
}

/// A `struct perf_event` of the PMU `P`.
///
/// # Invariants
///
/// The event's `pmu` is the one inside a `Registration<P>`, and its `pmu_private` points to a
/// `Private<P>` that is not freed before the event's `destroy` callback.
#[repr(transparent)]
pub struct Event<P>(Opaque<bindings::perf_event>, PhantomData<P>);

impl<P: Pmu> Event<P> {
    /// # Safety
    ///
    /// `ptr` must be a valid event for `'a`, and the type invariants must hold for it.
    #[inline(always)]
    pub(super) unsafe fn from_raw<'a>(ptr: *mut bindings::perf_event) -> &'a Self {
        // SAFETY: `Event` is a transparent wrapper; the rest is the caller's promise.
        unsafe { &*ptr.cast() }
    }

    #[inline(always)]
    pub(super) fn as_raw(&self) -> *mut bindings::perf_event {
        self.0.get()
    }

    #[inline(always)]
    pub(super) fn private(&self) -> &Private<P> {
        // SAFETY: By the type invariants.
        unsafe { &*(*self.as_raw()).pmu_private.cast::<Private<P>>() }
    }

    /// What [`Pmu::event_init`] has made of the attributes.
    #[inline(always)]
    pub fn data(&self) -> &P::Data {
        &self.private().data
    }

    /// The CPU that the event is bound to, or [`None`] when it follows its task everywhere.
    #[inline]
    pub fn cpu(&self) -> Option<u32> {
        // SAFETY: The event is valid.
        unsafe { cpu(self.as_raw()) }
    }

    /// Whether the event takes samples.
    #[inline]
    pub fn is_sampling(&self) -> bool {
        // SAFETY: The event is valid.
        unsafe { is_sampling(self.as_raw()) }
    }

    /// Adds to the event's count, in any context.
    #[inline]
    pub fn add_count(&self, more: u64) {
        // SAFETY: The event is valid, and its count is only accessed atomically.
        unsafe { Atomic::<i64>::from_ptr((&raw mut (*self.as_raw()).count).cast()) }
            .add(more as i64, Relaxed);
        self.left().add((more as i64).wrapping_neg(), Relaxed);
    }

    /// What is left of the sampling period (`hw.period_left`).
    #[inline]
    fn left(&self) -> &Atomic<i64> {
        // SAFETY: As in `add_count`.
        unsafe { Atomic::from_ptr((&raw mut (*sampling(self.as_raw())).period_left).cast()) }
    }

    /// The counter value up to which the event's count is right (`hw.prev_count`).
    #[inline]
    fn prev_count(&self) -> &Atomic<i64> {
        // SAFETY: As in `add_count`.
        unsafe { Atomic::from_ptr((&raw mut (*self.as_raw()).hw.prev_count).cast()) }
    }

    /// Says that the PMU's counter counts from `now` on.
    #[inline]
    pub(super) fn count_from(&self, now: u64) {
        self.prev_count().store(now as i64, Relaxed);
    }

    /// Adds what the PMU's counter, which `read` reads, has counted. Callers may interrupt each
    /// other.
    #[inline]
    pub(super) fn count_to(&self, read: impl FnMut() -> u64) {
        self.add_count(gained(self.prev_count(), P::COUNTER_BITS, read));
    }

    #[inline(always)]
    pub(super) fn hw_state(&self) -> u32 {
        // SAFETY: The event is valid; `hw.state` is an int that is only written on the CPU the
        // event is on, or before it is on any.
        unsafe { (&raw const (*self.as_raw()).hw.state).read_volatile() as u32 }
    }

    /// Whether `other` is the same event.
    #[inline]
    pub fn is(&self, other: &Self) -> bool {
        core::ptr::eq(self, other)
    }
}

/// An event that is on this CPU, and stays there for as long as this reference to it exists.
///
/// # Invariants
///
/// Those of [`Event`]. `add` was called for it on this CPU and `del` has not returned, and
/// interrupts are off, so that it does not return.
#[repr(transparent)]
pub struct OnCpu<P>(Event<P>, NotThreadSafe);

impl<P> core::ops::Deref for OnCpu<P> {
    type Target = Event<P>;

    #[inline(always)]
    fn deref(&self) -> &Event<P> {
        &self.0
    }
}

impl<P: Pmu> OnCpu<P> {
    /// # Safety
    ///
    /// The type invariants must hold for `ptr`, for `'a`.
    #[inline(always)]
    pub(super) unsafe fn from_raw<'a>(ptr: *mut bindings::perf_event) -> &'a Self {
        // SAFETY: `OnCpu` is a transparent wrapper of a transparent wrapper; the rest is the
        // caller's promise.
        unsafe { &*ptr.cast() }
    }

    /// Calls `f` with the driver's state of the event. [`None`] if this has interrupted code that
    /// is at it.
    #[inline(always)]
    pub fn with_state<R>(&self, f: impl FnOnce(&mut P::State) -> R) -> Option<R> {
        self.private().cell.with(|inner| f(&mut inner.state))
    }

    /// Calls `f` with the driver's state of the event and its AUX transaction. [`None`] if no
    /// transaction is open, or if this has interrupted code that is at them.
    #[inline(always)]
    pub fn with_aux<R>(
        &self,
        f: impl FnOnce(&mut P::State, &mut AuxOutput<'_, P>) -> R,
    ) -> Option<R> {
        self.private()
            .cell
            .with(|inner| {
                let Changing { state, transaction } = inner;
                let mut output = AuxOutput::new(transaction)?;
                Some(f(state, &mut output))
            })
            .flatten()
    }

    /// Whether the event runs (`PERF_HES_STOPPED` is not in `hw.state`): it was started and not
    /// stopped since. A trace that is paused runs.
    #[inline(always)]
    pub fn is_running(&self) -> bool {
        self.hw_state() & STOPPED == 0
    }

    /// Whether another event of the group has paused the trace, or none has resumed one that starts
    /// paused (`attr.aux_start_paused`).
    ///
    /// The answer changes before [`Stop::Pause`](super::Stop::Pause) and
    /// [`Start::Resume`](super::Start::Resume) say so, which may interrupt whoever asks.
    #[inline]
    pub fn aux_paused(&self) -> bool {
        let hw = self.as_raw();
        // SAFETY: The event is valid. Events of this crate's PMUs use no other variant of the
        // union; the core writes it on the CPU the event is on, or before it is on any.
        unsafe {
            (&raw const (*hw).hw.__bindgen_anon_1.__bindgen_anon_2.aux_paused).read_volatile() != 0
        }
    }

    /// The length of the current sampling period (`hw.sample_period`), in what the event counts.
    /// For an event with a frequency the core changes it as needed, between a stop and a start.
    #[inline]
    pub fn sample_period(&self) -> u64 {
        // SAFETY: The event is valid, and its period changes on the CPU that it is on.
        unsafe { (&raw const (*self.as_raw()).hw.sample_period).read_volatile() }
    }

    /// How much has to be counted until the sampling period is over (`hw.period_left`). It is 1 if
    /// the period was over when the event was stopped: the sample is still to be taken.
    ///
    /// A driver sets its counter or timer to this, when it starts an event that takes samples and
    /// when an [overflow](Self::overflow) has returned.
    #[inline]
    pub fn period_left(&self) -> u64 {
        // To the core 0 says that a period is to begin, of another length for instance.
        if self.left().load(Relaxed) == 0 {
            self.begin_period();
        }
        self.left().load(Relaxed).max(1) as u64
    }

    /// The sampling period is over, and the next one begins. What came late is taken off it, unless
    /// that is more than all of it.
    #[inline]
    fn begin_period(&self) {
        let period = i64::try_from(self.sample_period()).unwrap_or(i64::MAX);
        let mut left = self.left().load(Relaxed).saturating_add(period);
        if left <= 0 {
            left = period.max(1);
        }
        self.left().store(left, Relaxed);
        // SAFETY: The event is valid, and only this CPU writes the field.
        unsafe { (*sampling(self.as_raw())).last_period = period as u64 };
    }

    #[inline(always)]
    pub(super) fn set_hw_state(&self, state: u32) {
        // SAFETY: As in `hw_state`.
        unsafe { (&raw mut (*self.as_raw()).hw.state).write_volatile(state as c_int) };
    }

    /// Changes the state from `old` to `new`, unless an NMI has changed it.
    #[inline]
    pub(super) fn replace_hw_state(&self, old: u32, new: u32) {
        // SAFETY: As in `hw_state`.
        let state = unsafe { Atomic::<i32>::from_ptr(&raw mut (*self.as_raw()).hw.state) };
        let _ = state.cmpxchg(old as i32, new as i32, Relaxed);
    }
}

#[cfg(not(PERF_IN_MODULE))]
mod overflow {
    //! The end of a sampling period.

    use super::*;
    use crate::{
        nmi::NmiLike,
        perf::Registration, //
    };

    /// Takes a sample of where this interrupt has come, unless `event` excludes that. Returns
    /// whether the core has stopped the event. Not generic, so that it is compiled into the kernel.
    ///
    /// # Safety
    ///
    /// `event` must be valid.
    #[inline(never)]
    unsafe fn overflow(event: *mut bindings::perf_event) -> bool {
        // SAFETY: The registers are those that this interrupt has saved, or null.
        let regs = unsafe { bindings::get_irq_regs() };
        if regs.is_null() {
            return false;
        }
        // SAFETY: The registers are valid until the interrupt returns.
        let user = unsafe { bindings::user_mode(regs) } != 0;
        // What `perf_exclude_event()` and the clock events of the core look at.
        // SAFETY: There always is a current task.
        let idle = || unsafe { bindings::is_idle_task(bindings::get_current()) };
        if (user && flag!(event, exclude_user_raw))
            || (!user && flag!(event, exclude_kernel_raw))
            || (flag!(event, exclude_idle_raw) && idle())
        {
            return false;
        }
        // SAFETY: The event is valid and on this CPU, and the sample is this function's own.
        unsafe {
            let period = (*sampling(event)).last_period;
            let mut sample = core::mem::MaybeUninit::<bindings::perf_sample_data>::uninit();
            bindings::perf_sample_data_init(sample.as_mut_ptr(), 0, period);
            bindings::perf_event_overflow(event, sample.as_mut_ptr(), regs) != 0
        }
    }

    impl<P: Pmu> OnCpu<P> {
        /// A sampling period is over: takes a sample, of where the current interrupt has come. To
        /// be called from a hardware interrupt, [`Pmu::timer`] among them; elsewhere it does
        /// nothing. Returns whether the core has stopped the event, since it takes too many.
        ///
        /// If the PMU [reads](Pmu::read) a counter, that decides whether the period is over. What
        /// the event excludes is not sampled.
        ///
        /// The core may stop the event and start it again in here: then the driver is called by
        /// [`Stop::Keep`](super::super::Stop::Keep) and
        /// [`Start::Restart`](super::super::Start::Restart), which are for any context.
        pub fn overflow(&self, cx: &NmiLike<'_>) -> bool {
            let in_overflow = &self.private().in_overflow;
            // One that is being started has counted nothing.
            if self.hw_state() != 0 || !self.is_sampling() || in_overflow.xchg(true, Relaxed) {
                return false;
            }
            let mut stopped = false;
            if P::HAS_READ {
                // SAFETY: The event is one of a `Registration<P>`.
                let driver = unsafe { Registration::<P>::driver_of(self.as_raw()) };
                self.count_to(|| driver.read(self, cx));
            }
            let over = self.left().load(Relaxed) <= 0;
            if over {
                self.begin_period();
            }
            if over || !P::HAS_READ {
                // SAFETY: The event is valid.
                stopped = unsafe { overflow(self.as_raw()) };
            }
            in_overflow.store(false, Relaxed);
            stopped
        }
    }
}

#[cfg(not(PERF_IN_MODULE))]
#[macros::kunit_tests(rust_perf_event)]
mod tests {
    use super::*;

    #[test]
    fn what_a_counter_gains() {
        let prev = Atomic::new(0xfff0i64);
        assert_eq!(gained(&prev, 16, || 0xfff8), 8);
        // Once round.
        assert_eq!(gained(&prev, 16, || 4), 12);
        assert_eq!(gained(&prev, 16, || 4), 0);
        let prev = Atomic::new(-1i64);
        assert_eq!(gained(&prev, 64, || 9), 10);
    }

    #[test]
    fn what_an_interrupt_finds_is_gained_once() {
        for bits in [8, 48, 64] {
            let (prev, counter) = (Atomic::new(100i64), Atomic::new(100u64));
            let read = || counter.fetch_add(10, Relaxed) + 10;
            let mut calls = 0;
            let mut inner = 0;
            let outer = gained(&prev, bits, || {
                calls += 1;
                match calls {
                    // It comes before the counter is read,
                    1 => inner += gained(&prev, bits, read),
                    // and behind that.
                    2 => {
                        let now = read();
                        inner += gained(&prev, bits, read);
                        return now;
                    }
                    _ => {}
                }
                read()
            });
            assert_eq!(calls, 3);
            assert_eq!(outer + inner, counter.load(Relaxed) - 100);
        }
    }

    #[test]
    fn a_read_that_never_ends_alone_ends() {
        let prev = Atomic::new(0i64);
        let mut now = 0;
        let gain = gained(&prev, 64, || {
            now += 1;
            prev.store(now, Relaxed);
            now as u64 + 1
        });
        assert_eq!((gain, prev.load(Relaxed)), (0, now));
    }
}
