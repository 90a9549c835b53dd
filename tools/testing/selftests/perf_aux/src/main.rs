// SPDX-License-Identifier: GPL-2.0

//! The selftests of AUX area sampling and overflow notification. `--help` lists the options.

mod tests;

use std::process::ExitCode;

fn main() -> ExitCode {
    perf_aux::ktap::main("perf_aux", tests::SUITES)
}
