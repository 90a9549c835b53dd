// SPDX-License-Identifier: GPL-2.0

//! Rust PMU that belongs to packages, not to CPUs ("uncore").
//!
//! It counts a made-up clock of the package, whose speed is a module-wide constant that can be read
//! in sysfs. It has events of CPUs only; the core has each moved when its CPU goes offline:
//!
//! ```text
//! perf stat -a -e package_clock/ticks/ --per-socket -I 1000
//! ```

use core::num::NonZero;
use kernel::{
    fmt,
    nmi::NmiLike,
    perf::{
        Attr,
        Attribute,
        AttributeGroup,
        Capabilities,
        Capability,
        Context,
        Event,
        Field,
        Pmu,
        Registration,
        Scope,
        Word, //
    },
    prelude::*,
    time::{
        Instant,
        Monotonic, //
    }, //
};

module! {
    type: PackageModule,
    name: "rust_pmu_uncore",
    authors: ["The perf AUX sampling project"],
    description: "Rust PMU that belongs to packages",
    license: "GPL",
}

/// Only counts one thing.
const EVENT: Field = Field::new(c"event", Word::Config, 0, 7).at_most(0);
/// How many ticks make one count, less one.
const DIVIDER: Field = Field::new(c"divider", Word::Config1, 0, 15);

struct PackageClock {
    zero: Instant<Monotonic>,
    /// Nanoseconds per tick.
    tick: u64,
}

impl PackageClock {
    fn show_tick(&self, out: &mut dyn fmt::Write) -> fmt::Result {
        write!(out, "{}", self.tick)
    }
}

#[vtable]
impl Pmu for PackageClock {
    /// Nanoseconds per count.
    type Data = NonZero<u64>;
    type State = ();
    type Aux = ();

    const CONTEXT: Context = Context::Uncore(Scope::Package);

    const CAPABILITIES: Capabilities = Capabilities::none()
        .with(Capability::NoInterrupt)
        .with(Capability::NoExclude);

    const FORMAT: &'static [Field] = &[EVENT, DIVIDER];

    // The hardware that this stands for has counters of 48 bits.
    const COUNTER_BITS: u32 = 48;

    const GROUPS: &'static [AttributeGroup<Self>] = &[
        AttributeGroup {
            name: Some(c"events"),
            attributes: &[Attribute::new(c"ticks", c"event=0")],
        },
        AttributeGroup {
            name: Some(c"caps"),
            attributes: &[
                Attribute::show(c"tick_ns", Self::show_tick),
                // Only of use where it isn't the clock itself.
                Attribute::new(c"divided", c"1").visible_if(|clock| clock.tick > 1),
            ],
        },
    ];

    fn event_init(&self, attr: &Attr<'_>) -> Result<(NonZero<u64>, ())> {
        let nanos = self.tick * (attr.get(&DIVIDER) + 1);
        Ok((NonZero::new(nanos).ok_or(EINVAL)?, ()))
    }

    fn read(&self, event: &Event<Self>, _cx: &NmiLike<'_>) -> u64 {
        (self.zero.elapsed().as_nanos() as u64 / *event.data()) & ((1 << Self::COUNTER_BITS) - 1)
    }
}

#[pin_data]
struct PackageModule {
    #[pin]
    _pmu: Registration<PackageClock>,
}

impl kernel::InPlaceModule for PackageModule {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _pmu <- Registration::new(
                c"package_clock",
                PackageClock {
                    zero: Instant::now(),
                    tick: 10,
                },
            ),
        })
    }
}
