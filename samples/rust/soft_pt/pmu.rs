// SPDX-License-Identifier: GPL-2.0

//! The PMU: what it says of itself, and when it runs.
//!
//! As in the driver for the hardware, the whole configuration is done when an AUX transaction is
//! opened; a restart within one only lets the unit go on.
//!
//! A trace that is paused differs from one that is not in that the tasks are not stepped; the unit
//! isn't told. As on the hardware, what is traced after a pause goes on where the trace ended, and
//! a PSB comes when its period is over.

use crate::{
    config::{
        Config,
        FORMAT, //
    },
    filter::{
        Action,
        Filter,
        MAX_RANGES, //
    },
    packet,
    unit::{
        Unit,
        MAX_STEP, //
    }, //
};
use kernel::{
    nmi::{
        IrqsOff,
        NmiLike, //
    },
    perf::{
        self,
        step::{
            Handler,
            Interest,
            Step,
            Stepper,
            Stepping, //
        },
        AddressFilters,
        Attr,
        Attribute,
        AttributeGroup,
        AuxOutput,
        Capabilities,
        Capability,
        Current,
        Event,
        Field,
        FilterAction,
        OnCpu,
        SampleOutput,
        Start,
        Stop, //
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

/// The driver.
pub(crate) struct SoftPt {
    current: Arc<Current<Self>>,
    stepper: Arc<Stepper>,
}

/// What belongs to an event.
pub(crate) struct Traced {
    config: Config,
    stepping: Stepping,
    /// A step came while the unit was at work on another.
    missed: Atomic<bool>,
}

/// Takes steps to the unit of the event on this CPU.
struct Steps(Arc<Current<SoftPt>>);

impl SoftPt {
    pub(crate) fn new() -> Result<Self> {
        let current = Current::new()?;
        let steps = Arc::new(Steps(current.clone()), GFP_KERNEL)?;
        Ok(Self {
            stepper: Stepper::new(steps)?,
            current,
        })
    }
}

impl packet::Output for AuxOutput<'_, SoftPt> {
    #[inline(always)]
    fn put(&mut self, bytes: &[u8]) {
        // There is room: each step begins with a reservation for the most that it can write.
        AuxOutput::put(self, bytes);
    }
}

/// What the event's address filters leave to be traced.
fn filter_of(event: &OnCpu<SoftPt>, cx: &IrqsOff<'_>) -> Filter {
    let mut filter = Filter::none();
    for range in event.address_ranges(cx) {
        let action = match range.action {
            FilterAction::Filter => Action::Filter,
            FilterAction::Stop | FilterAction::Start => Action::Stop,
        };
        filter.add(action, range.addresses);
    }
    filter
}

impl Handler for Steps {
    #[inline]
    fn step(&self, step: Step, cx: &NmiLike<'_>) -> Interest {
        let Some(event) = self.0.event(cx) else {
            return Interest::Nothing;
        };
        let missed = &event.data().missed;
        let interest = event.with_aux(|unit, aux| {
            if !aux.reserve(MAX_STEP, cx) {
                return Interest::Nothing;
            }
            if missed.load(Relaxed) {
                missed.store(false, Relaxed);
                unit.miss(aux);
            }
            unit.step(aux, step)
        });
        match interest {
            Some(interest) => interest,
            None if !event.is_running() => Interest::Nothing,
            None => {
                missed.store(true, Relaxed);
                Interest::All
            }
        }
    }
}

#[vtable]
impl perf::Pmu for SoftPt {
    type Data = Traced;
    type State = Unit;
    /// How many words the `pattern` source has written to the area.
    type Aux = Atomic<u64>;

    const CAPABILITIES: Capabilities = Capabilities::none()
        .with(Capability::Exclusive)
        .with(Capability::InstructionTrace)
        .with(Capability::AuxPreferLarge)
        .with(Capability::AuxPause);

    const FORMAT: &'static [Field] = FORMAT;

    const GROUPS: &'static [AttributeGroup<Self>] = &[AttributeGroup {
        name: Some(c"caps"),
        attributes: &[
            Attribute::new(c"psb_cyc", c"0"),
            Attribute::new(c"psb_periods", c"3f"),
            Attribute::new(c"mtc", c"0"),
            Attribute::new(c"mtc_periods", c"0"),
            Attribute::new(c"cycle_thresholds", c"0"),
            Attribute::new(c"topa_output", c"1"),
            Attribute::new(c"topa_multiple_entries", c"1"),
            Attribute::new(c"single_range_output", c"0"),
            Attribute::new(c"output_subsys", c"0"),
            Attribute::new(c"payloads_lip", c"0"),
            Attribute::new(c"cr3_filtering", c"0"),
            Attribute::new(c"ip_filtering", c"1"),
            Attribute::new(c"num_address_ranges", c"4"),
            Attribute::new(c"ptwrite", c"0"),
            Attribute::new(c"power_event_trace", c"0"),
            Attribute::new(c"event_trace", c"0"),
            Attribute::new(c"tnt_disable", c"0"),
        ],
    }];

    const ADDRESS_FILTERS: u32 = MAX_RANGES as u32;

    fn current(&self) -> Option<Arc<Current<Self>>> {
        Some(self.current.clone())
    }

    fn event_init(&self, attr: &Attr<'_>) -> Result<(Traced, Unit)> {
        let config = Config::new(attr)?;
        // Only user mode can be stepped. One that would have the kernel traced too gets what there
        // is: that is what everybody types first.
        if attr.exclude_user() {
            return Err(EINVAL);
        }
        let traced = Traced {
            config,
            stepping: self.stepper.enable()?,
            missed: Atomic::new(false),
        };
        Ok((traced, Unit::new()))
    }

    fn start(&self, event: &OnCpu<Self>, how: Start<'_>) {
        let Traced {
            config, stepping, ..
        } = event.data();
        match how {
            Start::Run(cx) => {
                let filter = filter_of(event, cx);
                let paused = event.aux_paused();
                let ready = event.with_aux(|unit, aux| {
                    aux.reserve(MAX_STEP, cx) && {
                        unit.start(aux, *config, filter, paused);
                        true
                    }
                });
                if ready == Some(true) {
                    stepping.arm(cx);
                }
            }
            Start::Restart(cx) | Start::Resume(cx) => stepping.resume(cx),
        }
    }

    fn stop(&self, event: &OnCpu<Self>, how: Stop<'_>) {
        let stepping = &event.data().stepping;
        match how {
            Stop::Update(cx) => {
                stepping.disarm(cx);
                event.with_aux(|unit, aux| unit.stop(aux));
            }
            Stop::Keep(cx) | Stop::Pause(cx) => stepping.pause(cx),
        }
    }

    fn validate_filters(filters: &AddressFilters<'_>) -> Result {
        /// The upper half of the addresses is the kernel's.
        const LAST_USER: u64 = u64::MAX >> 1;

        for filter in filters.iter() {
            // As on the hardware, there are only ranges, and none that starts the trace.
            if filter.size == 0 || filter.action == FilterAction::Start {
                return Err(EOPNOTSUPP);
            }
            match filter.offset.checked_add(filter.size - 1) {
                Some(last) if last <= LAST_USER => {}
                _ => return Err(EINVAL),
            }
        }
        Ok(())
    }

    fn setup_aux(&self, _event: &Event<Self>, _size: u64, _overwrite: bool) -> Result<Self::Aux> {
        Ok(Atomic::new(0))
    }

    /// A sample that is taken while the unit is at work has zeros in its AUX field.
    #[inline]
    fn snapshot_aux(&self, event: &OnCpu<Self>, out: &mut SampleOutput<'_>, cx: &NmiLike<'_>) {
        event.data().stepping.catch_up(cx);
        event.with_aux(|unit, aux| unit.snapshot(aux, out));
    }
}
