// SPDX-License-Identifier: GPL-2.0

//! The selftest of `soft_pt`, a PMU like Intel PT that single-steps: what the unmodified perf tool
//! decodes must be what programs did, and programs must not notice.
//!
//! - [`tests::oracle`]: the trace against a ptrace stepper, instruction by instruction.
//! - [`tests::record`]: every sampler and every way of recording.
//! - [`tests::pause`]: AUX pause and resume.
//! - [`tests::filter`]: address filters.
//! - [`tests::situation`]: programs in which single-stepping could show or do harm.
//! - [`tests::code`]: code that changes.
//! - [`tests::stress`]: tracing that goes on and off under a busy program.
//! - [`tests::density`]: how many bytes that takes.
//! - [`tests::refuse`]: what the PMU must refuse.
//!
//! perf records a PMU only if it is named `intel_pt` and CPUID says Intel, so most tests skip when
//! the module was loaded by another name. On a machine with real `intel_pt` they run, too.

#![deny(unsafe_op_in_unsafe_fn)]

mod density;
#[path = "../../../soft_pt_host/src/fewest.rs"]
mod fewest;
mod image;
mod libipt;
mod perf;
mod stepper;
mod tests;

use std::process::ExitCode;

fn main() -> ExitCode {
    perf_aux::ktap::main(
        "soft_pt",
        &[
            tests::oracle::TESTS,
            tests::record::TESTS,
            tests::pause::TESTS,
            tests::filter::TESTS,
            tests::situation::TESTS,
            tests::code::TESTS,
            tests::stress::TESTS,
            tests::density::TESTS,
            tests::refuse::TESTS,
            tests::idle::TESTS,
        ],
    )
}
