// SPDX-License-Identifier: GPL-2.0

//! Rust PMU that counts and takes samples.
//!
//! It counts nanoseconds (`event=0`) or microseconds (`event=1`) of a task or a CPU, and there are
//! only two counters per CPU, so that the core has more events take turns:
//!
//! ```text
//! perf stat -e clock/ns/,clock/us/ -- PROGRAM
//! perf record -e clock/ns/ -c 1000000 -- PROGRAM      # each millisecond
//! perf record -e clock/ns/ -F 1000 -- PROGRAM         # a thousand times a second
//! ```

use core::num::NonZero;
use kernel::{
    nmi::{
        CpuLocal,
        IrqsOff,
        NmiLike, //
    },
    perf::{
        Attr,
        Attribute,
        AttributeGroup,
        Context,
        Event,
        Field,
        OnCpu,
        Pmu,
        Registration,
        Start,
        Word, //
    },
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    },
    time::{
        Delta,
        Instant,
        Monotonic, //
    }, //
};

module! {
    type: ClockModule,
    name: "rust_pmu_clock",
    authors: ["The perf AUX sampling project"],
    description: "Rust PMU that counts and takes samples",
    license: "GPL",
}

/// What to count: 0 for nanoseconds, 1 for microseconds.
const EVENT: Field = Field::new(c"event", Word::Config, 0, 7).at_most(1);

/// How many events can be on a CPU at once.
const COUNTERS: u32 = 2;

struct Clock {
    zero: Instant<Monotonic>,
    /// How many events are on each CPU.
    taken: CpuLocal<Atomic<u32>>,
}

impl Clock {
    fn new() -> Result<Self> {
        Ok(Self {
            zero: Instant::now(),
            taken: CpuLocal::new(|_| Ok(Atomic::new(0)))?,
        })
    }

    /// The time until the sampling period is over.
    fn left(event: &OnCpu<Self>) -> Delta {
        let nanos = event.period_left().saturating_mul(event.data().get());
        Delta::from_nanos(i64::try_from(nanos).unwrap_or(i64::MAX))
    }
}

#[vtable]
impl Pmu for Clock {
    /// How many nanoseconds a count is.
    type Data = NonZero<u64>;
    type State = ();
    type Aux = ();

    const CONTEXT: Context = Context::Hardware;

    const FORMAT: &'static [Field] = &[EVENT];

    const GROUPS: &'static [AttributeGroup<Self>] = &[AttributeGroup {
        name: Some(c"events"),
        attributes: &[
            Attribute::new(c"ns", c"event=0"),
            Attribute::new(c"us", c"event=1"),
        ],
    }];

    fn event_init(&self, attr: &Attr<'_>) -> Result<(NonZero<u64>, ())> {
        let nanos = if attr.get(&EVENT) == 0 { 1 } else { 1000 };
        Ok((NonZero::new(nanos).ok_or(EINVAL)?, ()))
    }

    fn add(&self, _event: &OnCpu<Self>, cx: &IrqsOff<'_>) -> Result {
        let taken = self.taken.get(cx).ok_or(ENODEV)?;
        if taken.load(Relaxed) == COUNTERS {
            return Err(EBUSY);
        }
        taken.add(1u32, Relaxed);
        Ok(())
    }

    fn del(&self, _event: &OnCpu<Self>, cx: &IrqsOff<'_>) {
        if let Some(taken) = self.taken.get(cx) {
            taken.fetch_sub(1u32, Relaxed);
        }
    }

    fn start(&self, event: &OnCpu<Self>, how: Start<'_>) {
        if let (Start::Run(cx), true) = (how, event.is_sampling()) {
            event.start_timer(Self::left(event), cx);
        }
    }

    fn read(&self, event: &Event<Self>, _cx: &NmiLike<'_>) -> u64 {
        self.zero.elapsed().as_nanos() as u64 / *event.data()
    }

    fn timer(&self, event: &OnCpu<Self>, cx: &IrqsOff<'_>) -> Option<Delta> {
        // The core may stop the event in there; then the timer ends whatever is returned.
        event.overflow(cx);
        Some(Self::left(event))
    }
}

#[pin_data]
struct ClockModule {
    #[pin]
    _pmu: Registration<Clock>,
}

impl kernel::InPlaceModule for ClockModule {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _pmu <- Registration::new(c"clock", Clock::new()?),
        })
    }
}
