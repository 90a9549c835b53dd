// SPDX-License-Identifier: GPL-2.0

//! What an event may ask the PMU for: the fields of IA32_RTIT_CTL, and one of our own.

use crate::trace;
use kernel::{
    perf::{
        Attr,
        Field,
        Word, //
    },
    prelude::*, //
};

/// The user has set the other fields on purpose; without it, `BRANCH` counts as set.
const PT: Field = Field::new(c"pt", Word::Config, 0, 0);
/// MTCEn. Must be clear, as on hardware without MTC packets, which has the field too.
const MTC: Field = Field::new(c"mtc", Word::Config, 9, 9).at_most(0);
/// TSCEn.
const TSC: Field = Field::new(c"tsc", Word::Config, 10, 10);
/// DisRETC.
const NORETCOMP: Field = Field::new(c"noretcomp", Word::Config, 11, 11);
/// BranchEn.
const BRANCH: Field = Field::new(c"branch", Word::Config, 13, 13);
/// MTCFreq. This and the next one are there for perf, which then says that 0 is what is valid.
const MTC_PERIOD: Field = Field::new(c"mtc_period", Word::Config, 14, 17).at_most(0);
/// CycThresh.
const CYC_THRESH: Field = Field::new(c"cyc_thresh", Word::Config, 19, 22).at_most(0);
/// PSBFreq: log2 of the PSB period in units of 2 KiB.
const PSB_PERIOD: Field = Field::new(c"psb_period", Word::Config, 24, 27).at_most(5);
/// Not of the hardware: counter values in place of packets.
const PATTERN: Field = Field::new(c"pattern", Word::Config, 63, 63);

pub(crate) const FORMAT: &[Field] = &[
    PT, MTC, TSC, NORETCOMP, BRANCH, MTC_PERIOD, CYC_THRESH, PSB_PERIOD, PATTERN,
];

/// What an event asks the unit for.
#[derive(Clone, Copy)]
pub(crate) struct Config {
    pub(crate) trace: trace::Config,
    pub(crate) pattern: bool,
}

impl Config {
    /// What nobody has asked for.
    pub(crate) const NONE: Self = Self {
        trace: trace::Config::NONE,
        pattern: false,
    };

    pub(crate) fn new(attr: &Attr<'_>) -> Result<Self> {
        let is_set = |field| attr.get(field) != 0;
        if is_set(&BRANCH) && !is_set(&PT) {
            return Err(EINVAL);
        }
        Ok(Self {
            trace: trace::Config {
                tsc: is_set(&TSC),
                branch: is_set(&BRANCH) || !is_set(&PT),
                ret_compression: !is_set(&NORETCOMP),
                psb_period: 2048 << attr.get(&PSB_PERIOD),
            },
            pattern: is_set(&PATTERN),
        })
    }
}
