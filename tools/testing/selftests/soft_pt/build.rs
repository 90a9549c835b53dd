// SPDX-License-Identifier: GPL-2.0

//! Links `flow` without a C runtime and at a fixed address.

fn main() {
    for arg in [
        "-nostartfiles",
        "-nostdlib",
        "-static",
        "-no-pie",
        "-Wl,--build-id",
    ] {
        println!("cargo:rustc-link-arg-bin=flow={arg}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
