// SPDX-License-Identifier: GPL-2.0

//! Draws the branches that led into a function as a flame graph (SVG).
//!
//! The input is what `perf script` makes of a recording with AUX samples: each sample with the
//! branches before it, the newest first. perf decodes; nothing here knows the format of a trace.
//! The bottom of the graph is the function, each frame above it a branch, and above that the one
//! before. A frame is as wide as there are samples that came its way.

mod paths;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use inferno::flamegraph;
use paths::{Paths, FIELDS};
use std::{
    fs::File,
    io::{self, BufRead, BufReader, BufWriter, IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

/// Draws the branches that led into a function, as perf's AUX samples have them, as a flame graph.
#[derive(Parser)]
#[command(version)]
struct Options {
    /// The function; if none is given, the one with the most samples
    #[arg(short, long)]
    function: Option<String>,
    /// Branches before each sample
    #[arg(
        short,
        long,
        default_value_t = 16,
        value_parser = clap::value_parser!(u16).range(1..=1024)
    )]
    depth: u16,
    /// Where the SVG goes
    #[arg(short, long, default_value = "branches.svg")]
    output: PathBuf,
    /// The recording; "perf script" is run on it
    #[arg(default_value = "perf.data", conflicts_with = "text")]
    recording: PathBuf,
    /// Read what "perf script --itrace=L16 -F ip,sym,symoff,dso,brstacksym" has printed instead
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

/// An error message with the file that it is about.
fn of<E: std::fmt::Display>(path: &Path) -> impl FnOnce(E) -> String + '_ {
    move |error| format!("{}: {error}", path.display())
}

/// A bar over `bytes`, or where the end isn't known a count of what was read.
fn progress(bytes: Option<u64>) -> Result<ProgressBar, String> {
    let (bar, style) = match bytes {
        Some(bytes) => (
            ProgressBar::new(bytes),
            "{wide_bar} {bytes} of {total_bytes}, {eta} left",
        ),
        None => (
            ProgressBar::new_spinner(),
            "{spinner} {bytes} of perf script in {elapsed}",
        ),
    };
    bar.set_style(ProgressStyle::with_template(style).map_err(|error| error.to_string())?);
    Ok(bar)
}

/// Reads samples to the end.
fn read(input: impl io::Read, bytes: Option<u64>, depth: u16) -> Result<Paths, String> {
    let bar = progress(bytes)?;
    let mut paths = Paths::new(depth.into());
    for (number, line) in BufReader::new(bar.wrap_read(input)).lines().enumerate() {
        let line = line.map_err(|error| format!("line {}: {error}", number + 1))?;
        paths
            .add(&line)
            .map_err(|error| format!("line {}: {error}", number + 1))?;
    }
    bar.finish_and_clear();
    Ok(paths)
}

/// The samples of a recording, decoded by perf.
fn perf_script(recording: &Path, depth: u16) -> Result<Paths, String> {
    File::open(recording).map_err(of(recording))?;
    let mut perf = Command::new("perf")
        .args(["script", "-F", FIELDS, &format!("--itrace=L{depth}"), "-i"])
        .arg(recording)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("perf can not be run: {error}"))?;
    let paths = perf.stdout.take().map(|out| read(out, None, depth));
    let status = perf.wait().map_err(|error| error.to_string())?;
    // perf fails too when nobody reads the rest of what it writes.
    let paths = paths.ok_or("perf script has no output")??;
    if !status.success() {
        return Err(format!("perf script failed ({status}); it says why above"));
    }
    Ok(paths)
}

fn run(options: &Options) -> Result<(), String> {
    let paths = match &options.text {
        Some(text) => {
            let file = File::open(text).map_err(of(text))?;
            let bytes = file.metadata().map_err(of(text))?.len();
            read(file, Some(bytes), options.depth).map_err(of(text))?
        }
        None => perf_script(&options.recording, options.depth)?,
    };
    let function = paths.function(options.function.as_deref())?;
    let stacks = paths.stacks(function);
    let samples: u64 = stacks.values().sum();

    let mut style = flamegraph::Options::default();
    style.title = format!("The branches into {function}");
    style.subtitle = Some(format!("{samples} of {} samples", paths.samples()));
    style.name_type = "Branch:".into();
    let lines: Vec<String> = stacks
        .iter()
        .map(|(stack, count)| format!("{stack} {count}"))
        .collect();
    let file = File::create(&options.output).map_err(of(&options.output))?;
    let mut svg = BufWriter::new(file);
    flamegraph::from_lines(&mut style, lines.iter().map(String::as_str), &mut svg)
        .map_err(of(&options.output))?;
    svg.flush().map_err(of(&options.output))?;
    if io::stderr().is_terminal() {
        eprintln!(
            "{function}: {samples} samples in {}",
            options.output.display()
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
