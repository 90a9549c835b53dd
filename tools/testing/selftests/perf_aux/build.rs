// SPDX-License-Identifier: GPL-2.0

//! Builds the C programs of the documentation, for the tests that run them.

use std::env;
use std::path::Path;
use std::process::Command;

const PROGRAMS: [&str; 3] = ["overflow_signal", "overflow_poll", "overflow_refresh"];

fn main() {
    let cc = env::var_os("CC").unwrap_or_else(|| "cc".into());
    let Some(folder) = env::var_os("OUT_DIR") else {
        return;
    };
    println!("cargo::rerun-if-env-changed=CC");
    for program in PROGRAMS {
        let source = format!("{program}.c");
        println!("cargo::rerun-if-changed={source}");
        let built = Command::new(&cc)
            .args(["-O2", "-Wall", "-Werror", &source, "-o"])
            .arg(Path::new(&folder).join(program))
            .status();
        // A machine without a C compiler can run everything else.
        if !built.is_ok_and(|status| status.success()) {
            println!(
                "cargo::warning={source} could not be built with {cc:?}: its test will be skipped"
            );
        }
    }
}
