// SPDX-License-Identifier: GPL-2.0

//! The program as it is run, on what perf 7.3 printed of tools/vm/calls.c.

use std::{fs, path::PathBuf, process::Command};

fn run(args: &[&str], svg: &str) -> (bool, String, PathBuf) {
    let svg = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(svg);
    let output = Command::new(env!("CARGO_BIN_EXE_branch_flamegraph"))
        .args(args)
        .arg("-o")
        .arg(&svg)
        .output()
        .unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), errors, svg)
}

#[test]
fn draws() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/calls.script");
    let (ok, errors, svg) = run(&["--text", text, "-f", "collatz"], "draws.svg");
    assert!(ok, "{errors}");
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.contains("The branches into collatz"));
    assert!(svg.contains("collatz+0x") && svg.contains("<svg"));
}

#[test]
fn says_what_is_wrong() {
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/calls.script");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml");
    for (args, says) in [
        (
            vec!["--text", text, "-f", "nowhere"],
            "no sample is in nowhere",
        ),
        (vec!["--text", source], "Cargo.toml: line 1:"),
        (vec!["--text", "/nonexistent"], "/nonexistent: No such file"),
        (vec!["/nonexistent"], "/nonexistent: No such file"),
        (vec!["--text", text, "-d", "0"], "--depth"),
    ] {
        let (ok, errors, svg) = run(&args, "wrong.svg");
        assert!(!ok && errors.contains(says), "{args:?}: {errors}");
        assert!(!svg.exists(), "{args:?} made a file");
    }
}
