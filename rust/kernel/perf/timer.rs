// SPDX-License-Identifier: GPL-2.0

//! The timer that each event of a PMU can have.

#[cfg(not(PERF_IN_MODULE))]
pub(super) use self::hrtimer::Timer;

/// Nothing: this build of the abstractions offers no timers.
#[cfg(PERF_IN_MODULE)]
pub(super) struct Timer<P>(core::marker::PhantomData<P>);

#[cfg(PERF_IN_MODULE)]
impl<P> Timer<P> {
    pub(super) fn new() -> Self {
        Self(core::marker::PhantomData)
    }

    pub(super) fn disarm(&self) {}

    pub(super) fn cancel(&self, _cx: &crate::nmi::IrqsOff<'_>) {}
}

#[cfg(not(PERF_IN_MODULE))]
mod hrtimer {
    use crate::{
        nmi::IrqsOff,
        perf::{
            bindings,
            event::Private,
            registration::Registration,
            OnCpu,
            Pmu, //
        },
        sync::atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        time::Delta,
        types::Opaque, //
    };
    use core::{
        marker::PhantomData,
        ptr, //
    };

    const MODE: bindings::hrtimer_mode = bindings::hrtimer_mode_HRTIMER_MODE_REL_PINNED_HARD;

    /// A timer that interrupts the CPU its event is on.
    ///
    /// # Invariants
    ///
    /// If `P` has a timer, `timer` is set up, from [`Timer::init`] on, and `event` is the event
    /// that the timer belongs to. It is queued or runs only while that event is on the CPU on which
    /// it was started.
    pub(crate) struct Timer<P: Pmu> {
        timer: Opaque<bindings::hrtimer>,
        event: *mut bindings::perf_event,
        /// The driver has asked for it since the event was last stopped.
        armed: Atomic<bool>,
        _pmu: PhantomData<P>,
    }

    impl<P: Pmu> Timer<P> {
        pub(crate) fn new() -> Self {
            Self {
                timer: Opaque::uninit(),
                event: ptr::null_mut(),
                armed: Atomic::new(false),
                _pmu: PhantomData,
            }
        }

        /// Sets the timer up, in its place in the `Private` of `event`.
        ///
        /// # Safety
        ///
        /// `this` must be that place, valid and not to be moved again.
        pub(crate) unsafe fn init(this: *mut Self, event: *mut bindings::perf_event) {
            if P::HAS_TIMER {
                // SAFETY: By the safety requirements.
                // INVARIANT: The timer is set up and not started.
                unsafe {
                    (*this).event = event;
                    bindings::hrtimer_setup(
                        Opaque::cast_into(&raw const (*this).timer),
                        Some(Self::run),
                        bindings::CLOCK_MONOTONIC as bindings::clockid_t,
                        MODE,
                    );
                }
            }
        }

        /// # Safety
        ///
        /// To be called by the timer code, in a hardware interrupt.
        unsafe extern "C" fn run(timer: *mut bindings::hrtimer) -> bindings::hrtimer_restart {
            // SAFETY: The timer is the one in a `Timer<P>`.
            let this = unsafe { crate::container_of!(Opaque::cast_from(timer), Self, timer) };
            // SAFETY: By the type invariants, the event is on this CPU: whatever takes it off
            // cancels the timer, and can't run here before this interrupt has returned.
            let (event, cx) = unsafe { (OnCpu::<P>::from_raw((*this).event), IrqsOff::new()) };
            let armed = &event.private().timer.armed;
            let next = if armed.load(Relaxed) {
                // SAFETY: The event is one of a `Registration<P>`.
                let driver = unsafe { Registration::<P>::driver_of(event.as_raw()) };
                driver.timer(event, &cx)
            } else {
                None
            };
            // SAFETY: The timer is set up; only this CPU starts it.
            let queued = unsafe { (*timer).is_queued };
            match next {
                // The event may have been stopped and started, and the timer with it, meanwhile.
                Some(next) if event.is_running() && !queued => {
                    armed.store(true, Relaxed);
                    // SAFETY: The timer is not queued, and its callback is running.
                    unsafe {
                        let now = bindings::hrtimer_cb_get_time(timer);
                        bindings::hrtimer_forward(timer, now, next.as_nanos().max(MIN));
                    }
                    bindings::hrtimer_restart::HRTIMER_RESTART
                }
                _ => bindings::hrtimer_restart::HRTIMER_NORESTART,
            }
        }

        fn start(&self, after: Delta) {
            self.armed.store(true, Relaxed);
            // SAFETY: The timer is set up, by the type invariants.
            unsafe {
                bindings::hrtimer_start_range_ns(
                    self.timer.get(),
                    after.as_nanos().max(MIN),
                    0,
                    MODE,
                );
            }
        }

        /// The event is stopped. In an NMI the timer can't be cancelled; it finds out.
        #[inline(always)]
        pub(crate) fn disarm(&self) {
            if P::HAS_TIMER {
                self.armed.store(false, Relaxed);
            }
        }

        /// The event is stopped, or taken off the CPU.
        #[inline(always)]
        pub(crate) fn cancel(&self, _cx: &IrqsOff<'_>) {
            if P::HAS_TIMER {
                self.armed.store(false, Relaxed);
                // SAFETY: The timer is set up, by the type invariants. Its callback does not run,
                // since it would on this CPU.
                unsafe { bindings::hrtimer_try_to_cancel(self.timer.get()) };
            }
        }
    }

    impl<P: Pmu> Drop for Timer<P> {
        fn drop(&mut self) {
            if P::HAS_TIMER && !self.event.is_null() {
                // SAFETY: The timer is set up, by the type invariants; this may sleep.
                unsafe { bindings::hrtimer_cancel(self.timer.get()) };
            }
        }
    }

    /// The shortest time, in ns, which is that of the core's own clock events: an interrupt takes
    /// some time by itself.
    const MIN: i64 = 10_000;

    impl<P: Pmu> OnCpu<P> {
        /// Has [`Pmu::timer`] called on this CPU, `after` so long, but at least 10 µs; in place of
        /// what was asked for before. The timer ends when the event is stopped, and can only be
        /// started while the event [runs](OnCpu::is_running).
        ///
        /// A PMU without [`Pmu::timer`] can't ask for one: that does not compile.
        pub fn start_timer(&self, after: Delta, _cx: &IrqsOff<'_>) {
            const { assert!(P::HAS_TIMER, "the PMU has no `timer` callback") };
            if self.is_running() {
                let private: &Private<P> = self.private();
                private.timer.start(after);
            }
        }
    }
}
