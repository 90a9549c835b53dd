// SPDX-License-Identifier: GPL-2.0

//! The programs that the documentation shows do what it says. They lie beside this program, or
//! where it was built.

use perf_aux::{
    check,
    check_eq,
    skip,
    Ctx,
    Error,
    Outcome,
    Stop,
    Test, //
};
use std::path::Path;
use std::process::Command;

pub const TESTS: &[Test] = &[
    Test::new("document.signal", signal),
    Test::new("document.poll", poll),
    Test::new("document.refresh", refresh),
];

/// The lines that one of the programs prints.
fn run(name: &str) -> Result<Vec<String>, Stop> {
    let own = std::env::current_exe().map_err(|e| Error::from_io("finding this program", &e))?;
    let places = [
        own.with_file_name(name),
        Path::new(env!("OUT_DIR")).join(name),
    ];
    let Some(path) = places.iter().find(|path| path.exists()) else {
        skip!("{} is not built", places[0].display());
    };
    let output = Command::new(path)
        .output()
        .map_err(|e| Error::from_io(format!("running {}", path.display()), &e))?;
    check!(
        output.status.success(),
        "{name}: {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().map(str::to_owned).collect())
}

fn signal(_: &Ctx) -> Outcome {
    let lines = run("overflow_signal")?;
    check_eq!(lines.len(), 5, "lines");
    for (i, line) in lines.iter().enumerate() {
        check!(
            line.starts_with(&format!("overflow {} of fd ", i + 1)) && line.ends_with(": POLL_IN"),
            "line {line:?}"
        );
    }
    Ok(())
}

fn poll(_: &Ctx) -> Outcome {
    let lines = run("overflow_poll")?;
    check_eq!(lines.len(), 6, "lines");
    check_eq!(lines[0], "without a ring buffer: POLLHUP", "first line");
    for (i, line) in lines[1..].iter().enumerate() {
        check!(
            line.starts_with(&format!("wake-up {}: POLLIN, ", i + 1)),
            "line {line:?}"
        );
    }
    Ok(())
}

fn refresh(_: &Ctx) -> Outcome {
    let lines = run("overflow_refresh")?;
    let expected = [1, 2].map(|round| {
        ["POLL_IN", "POLL_IN", "POLL_HUP"].map(|code| format!("round {round}: {code}"))
    });
    check_eq!(lines, expected.concat(), "lines");
    Ok(())
}
