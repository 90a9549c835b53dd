// SPDX-License-Identifier: GPL-2.0

//! One module per subject, one test per fact.

mod area;
mod attr;
mod differential;
mod document;
mod faults;
mod fuzz;
mod hostile;
mod inject;
mod link;
mod misuse;
mod module;
mod nested;
mod notify;
mod pause;
mod pmu;
mod privilege;
mod race;
mod redirect;
mod sample;
mod source;
mod stack;
mod variants;

use perf_aux::Test;

/// Every test, in the order they run.
pub const SUITES: &[&[Test]] = &[
    attr::TESTS,
    notify::TESTS,
    document::TESTS,
    link::TESTS,
    sample::TESTS,
    differential::TESTS,
    variants::TESTS,
    stack::TESTS,
    nested::TESTS,
    area::TESTS,
    hostile::TESTS,
    privilege::TESTS,
    inject::TESTS,
    race::TESTS,
    fuzz::TESTS,
    pause::TESTS,
    redirect::TESTS,
    pmu::TESTS,
    misuse::TESTS,
    // Last, because it unloads the PMU and a failure to load it again would make the others skip.
    module::TESTS,
];
