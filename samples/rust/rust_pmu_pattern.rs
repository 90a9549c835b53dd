// SPDX-License-Identifier: GPL-2.0

//! Rust PMU with an AUX area.
//!
//! A timer writes the numbers 0, 1, 2, … into the AUX area, as 64-bit little-endian words, while
//! the event runs. So the bytes that a reader must find are known:
//!
//! ```text
//! perf record -e pattern// -- sleep 1                                          # full trace
//! perf record -e '{pattern//,task-clock/aux-sample-size=64/}' -- PROGRAM       # AUX samples
//! ```

use kernel::{
    nmi::{
        IrqsOff,
        NmiLike, //
    },
    perf::{
        Attr,
        Attribute,
        AttributeGroup,
        Capabilities,
        Capability,
        Current,
        Event,
        Field,
        OnCpu,
        Pmu,
        Registration,
        SampleOutput,
        Start,
        Word, //
    },
    prelude::*,
    sync::{
        atomic::{
            ordering::Relaxed,
            Atomic, //
        },
        Arc, //
    },
    time::Delta, //
};

module! {
    type: PatternModule,
    name: "rust_pmu_pattern",
    authors: ["The perf AUX sampling project"],
    description: "Rust PMU with an AUX area",
    license: "GPL",
}

kernel::string_param!(NAME, "rust_pmu_pattern", "name", c"pattern");

/// The time between two words, in microseconds; 0 stands for [`INTERVAL_DEFAULT`].
const INTERVAL: Field = Field::new(c"interval", Word::Config, 0, 31);
const INTERVAL_DEFAULT: u64 = 100;

/// The size of a word.
const WORD: u64 = 8;

struct Pattern {
    current: Arc<Current<Self>>,
}

#[vtable]
impl Pmu for Pattern {
    /// The time between two words.
    type Data = Delta;
    type State = ();
    /// The next word of the area.
    type Aux = Atomic<u64>;

    const CAPABILITIES: Capabilities = Capabilities::none()
        .with(Capability::Exclusive)
        .with(Capability::AuxPause);

    const FORMAT: &'static [Field] = &[INTERVAL];

    const GROUPS: &'static [AttributeGroup<Self>] = &[AttributeGroup {
        name: Some(c"caps"),
        // By this the selftests know what is in the area.
        attributes: &[Attribute::new(c"pattern", c"1")],
    }];

    fn current(&self) -> Option<Arc<Current<Self>>> {
        Some(self.current.clone())
    }

    fn event_init(&self, attr: &Attr<'_>) -> Result<(Delta, ())> {
        let micros = match attr.get(&INTERVAL) {
            0 => INTERVAL_DEFAULT,
            micros => micros,
        };
        Ok((Delta::from_micros(micros as i64), ()))
    }

    fn setup_aux(&self, _event: &Event<Self>, _size: u64, _overwrite: bool) -> Result<Self::Aux> {
        Ok(Atomic::new(0))
    }

    fn start(&self, event: &OnCpu<Self>, how: Start<'_>) {
        // A pause leaves the timer alone.
        if let Start::Run(cx) = how {
            event.start_timer(*event.data(), cx);
        }
    }

    fn timer(&self, event: &OnCpu<Self>, cx: &IrqsOff<'_>) -> Option<Delta> {
        if !event.aux_paused() {
            let room = event.with_aux(|(), aux| {
                if !aux.reserve(WORD, cx) {
                    return false;
                }
                let word = aux.data().map_or(0, |next| next.fetch_add(1, Relaxed));
                aux.put(&word.to_le_bytes())
            });
            if room == Some(false) {
                return None;
            }
        }
        Some(*event.data())
    }

    fn snapshot_aux(&self, event: &OnCpu<Self>, out: &mut SampleOutput<'_>, _cx: &NmiLike<'_>) {
        // What is not copied is zeroed: in full-trace mode, and in an NMI that interrupts `timer`.
        event.with_aux(|(), aux| out.copy_aux(aux, out.left()));
    }
}

#[pin_data]
struct PatternModule {
    #[pin]
    _pmu: Registration<Pattern>,
}

impl kernel::InPlaceModule for PatternModule {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _pmu <- Registration::new(
                NAME.get(),
                Pattern {
                    current: Current::new()?,
                },
            ),
        })
    }
}
