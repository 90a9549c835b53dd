// SPDX-License-Identifier: GPL-2.0

//! The PMU: what an event may ask for, and when it runs.
//!
//! As in the driver for the hardware, the whole configuration is done when an AUX transaction is
//! opened; a restart within one only lets the unit go on. The states of an event on a CPU are those
//! of `kernel::perf`, and "running" and "stopped" have a transaction open if there is an AUX area
//! with room.
//!
//! A trace that is paused differs from one that is not in that the tasks are not stepped; the unit
//! isn't told. As on the hardware, what is traced after a pause goes on where the trace ended, and
//! a PSB comes when its period is over.

use crate::{
    filter::{
        Action,
        Filter,
        MAX_RANGES, //
    },
    trace,
    unit::{
        Buffer,
        Units, //
    }, //
};
use kernel::{
    bits::genmask_u64,
    perf::{
        self,
        step::Stepper,
        AddressFilters,
        Attribute,
        AttributeGroup,
        AuxOutput,
        Capabilities,
        Capability,
        Event,
        FilterAction,
        IrqsOff,
        NmiLike,
        SampleOutput,
        Start,
        Stop, //
    },
    prelude::*,
    sync::Arc, //
};

/// The bits of `attr.config`: those of IA32_RTIT_CTL, and one of our own.
mod config {
    /// The user has set the bits below on purpose; without it, `BRANCH` counts as set.
    pub(super) const PT: u64 = 1 << 0;
    /// TSCEn.
    pub(super) const TSC: u64 = 1 << 10;
    /// DisRETC.
    pub(super) const NORETCOMP: u64 = 1 << 11;
    /// BranchEn.
    pub(super) const BRANCH: u64 = 1 << 13;
    /// PSBFreq: log2 of the PSB period in units of 2 KiB.
    pub(super) const PSB_PERIOD_SHIFT: u32 = 24;
    /// Not of the hardware: counter values in place of packets.
    pub(super) const PATTERN: u64 = 1 << 63;
}

const PSB_PERIOD: u64 = genmask_u64(24..=27);
const PSB_PERIOD_MAX: u64 = 5;

/// What an event asks the unit for.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) trace: trace::Config,
    pub(crate) pattern: bool,
}

impl Config {
    fn new(config: u64) -> Result<Self> {
        let known = config::PT
            | config::TSC
            | config::NORETCOMP
            | config::BRANCH
            | PSB_PERIOD
            | config::PATTERN;
        let on_purpose = config & config::PT != 0;
        let branch = config & config::BRANCH != 0;
        let psb_period = (config & PSB_PERIOD) >> config::PSB_PERIOD_SHIFT;

        if config & !known != 0 || (branch && !on_purpose) || psb_period > PSB_PERIOD_MAX {
            return Err(EINVAL);
        }
        Ok(Self {
            trace: trace::Config {
                tsc: config & config::TSC != 0,
                branch: branch || !on_purpose,
                ret_compression: config & config::NORETCOMP == 0,
                psb_period: 2048 << psb_period,
            },
            pattern: config & config::PATTERN != 0,
        })
    }
}

/// What the event's address filters leave to be traced.
fn filter_of(event: &Event<SoftPt>, cx: &IrqsOff<'_>) -> Filter {
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

/// The driver.
pub(crate) struct SoftPt {
    units: Arc<Units>,
    stepper: Stepper,
}

impl SoftPt {
    pub(crate) fn new() -> Result<Self> {
        let units = Arc::new(Units::new()?, GFP_KERNEL)?;
        Ok(Self {
            stepper: Stepper::new(units.clone())?,
            units,
        })
    }

    /// Runs `event`, opening a transaction if there is none.
    fn run(&self, event: &Event<Self>, cx: &IrqsOff<'_>) {
        if self.units.is_open(cx) {
            event.set_running(cx);
        } else {
            let config = Config::new(event.config());
            let (Ok(config), Some(output)) = (config, AuxOutput::begin(event, cx)) else {
                event.set_closed(cx);
                return;
            };
            event.set_running(cx);
            let filter = filter_of(event, cx);
            self.units
                .open(config, filter, output, event.aux_paused(), cx);
        }
        self.stepper.arm(cx);
        self.stepper.pause_if(|| event.aux_paused(), cx);
    }

    /// Stops `event` and closes the transaction.
    fn close(&self, event: &Event<Self>, cx: &IrqsOff<'_>) {
        self.stepper.disarm(cx);
        self.units.close(cx);
        event.set_closed(cx);
    }
}

#[vtable]
impl perf::Pmu for SoftPt {
    type Aux = KBox<Buffer>;

    const CAPABILITIES: Capabilities = Capabilities::none()
        .with(Capability::Exclusive)
        .with(Capability::InstructionTrace)
        .with(Capability::AuxPreferLarge)
        .with(Capability::AuxPause);

    const GROUPS: &'static [AttributeGroup] = &[
        AttributeGroup {
            name: c"format",
            attributes: &[
                Attribute::new(c"pt", c"config:0"),
                // Must be clear, as on hardware without MTC packets, which has the field too.
                Attribute::new(c"mtc", c"config:9"),
                Attribute::new(c"tsc", c"config:10"),
                Attribute::new(c"noretcomp", c"config:11"),
                Attribute::new(c"branch", c"config:13"),
                Attribute::new(c"psb_period", c"config:24-27"),
                Attribute::new(c"pattern", c"config:63"),
            ],
        },
        AttributeGroup {
            name: c"caps",
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
        },
    ];

    const ADDRESS_FILTERS: u32 = MAX_RANGES as u32;

    fn event_init(&self, event: &Event<Self>) -> Result {
        Config::new(event.config())?;
        if !event.only_config() || event.exclude_user() {
            return Err(EINVAL);
        }
        // Only user mode can be stepped.
        if !event.exclude_kernel() {
            return Err(EOPNOTSUPP);
        }
        Ok(())
    }

    fn add(&self, event: &Event<Self>, start: bool, cx: &IrqsOff<'_>) -> Result {
        if !self.units.take(cx) {
            return Err(EBUSY);
        }
        event.set_closed(cx);
        if start {
            self.run(event, cx);
        }
        Ok(())
    }

    fn del(&self, event: &Event<Self>, cx: &IrqsOff<'_>) {
        self.close(event, cx);
        self.units.release(cx);
    }

    fn start(&self, event: &Event<Self>, how: Start<'_>) {
        match how {
            Start::Run(cx) => self.run(event, cx),
            // One that is stopped has nowhere to trace to.
            Start::Resume(_) if event.stopped() => {}
            Start::Resume(cx) => self.stepper.resume(cx),
        }
    }

    fn stop(&self, event: &Event<Self>, how: Stop<'_>) {
        match how {
            Stop::Update(cx) => self.close(event, cx),
            Stop::Keep(cx) => {
                // In this order, so that no NMI resumes what is paused here.
                event.set_stopped(cx);
                self.stepper.pause(cx);
            }
            Stop::Pause(cx) => self.stepper.pause(cx),
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

    fn setup_aux(
        &self,
        _event: &Event<Self>,
        _area: perf::AuxArea,
        _overwrite: bool,
    ) -> Result<Self::Aux> {
        Buffer::new()
    }

    #[inline]
    fn snapshot_aux(&self, _event: &Event<Self>, out: &mut SampleOutput<'_>, cx: &NmiLike<'_>) {
        self.stepper.catch_up(cx);
        self.units.snapshot(out, cx);
    }
}
