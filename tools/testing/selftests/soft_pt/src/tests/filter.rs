// SPDX-License-Identifier: GPL-2.0

//! Address filters: the trace is what runs in their ranges, as the hardware would have it, and what
//! can't be done is refused.

// Most filters here have one range.
#![allow(clippy::single_range_in_vec_init)]

use std::{
    ops::Range,
    path::{
        Path,
        PathBuf, //
    },
    process::Command, //
};

use perf_aux::{
    check,
    check_eq,
    fail,
    load::{
        self,
        Child, //
    },
    ring::{
        AuxMode,
        Ring, //
    },
    skip,
    sys::is_root,
    Ctx,
    Event,
    Outcome,
    Stop,
    Test, //
};

use crate::{
    image::{
        Flow,
        Image, //
    },
    perf::{
        self,
        program,
        Branch,
        Scratch,
        Script, //
    },
    stepper::Steps,
    tests::{
        oracle,
        pmu_for_perf,
        record::{
            check_samples,
            Place, //
        },
        symbol_of,
        traps, //
    }, //
};

pub const TESTS: &[Test] = &[
    Test::new("filter.function", |ctx| traced(ctx, &[], &function()?)).limit(150),
    Test::new("filter.function_per_thread", |ctx| {
        traced(ctx, &["--per-thread"], &function()?)
    })
    .limit(150),
    Test::new("filter.function_without_ret_compression", |ctx| {
        traced_by(ctx, "intel_pt/noretcomp=1/u", &[], &function()?)
    })
    .limit(150),
    Test::new("filter.file", |ctx| traced(ctx, &[], &file()?)).limit(150),
    Test::new("filter.four", |ctx| traced(ctx, &[], &four()?)).limit(150),
    Test::new("filter.middle", |ctx| traced(ctx, &[], &middle()?)).limit(150),
    Test::new("filter.stop", stop).limit(150),
    Test::new("filter.stop_in_filter", stop_in_filter).limit(150),
    Test::new("filter.exec", exec).limit(180),
    Test::new("filter.dlopen", dlopen).limit(150),
    Test::new("filter.sampled", sampled).limit(150),
    Test::new("filter.cost_nowhere", cost_nowhere).limit(150),
    Test::new("filter.cost_outside", cost_outside).limit(150),
    Test::new("filter.refused", refused),
    Test::new("filter.refused_by_perf", refused_by_perf),
];

/// Rounds of the program where it is stepped, too.
fn rounds() -> usize {
    oracle::rounds_here(2)
}

/// A range of `flow`, with its first address and that behind it.
type Addresses = Range<u64>;

/// Filters of `flow`, as perf wants them and as they are in memory.
struct Filters {
    text: String,
    ranges: Vec<Addresses>,
}

fn flow() -> Result<String, Stop> {
    Ok(program("flow")?.to_string_lossy().into_owned())
}

fn function_range(name: &str) -> Result<Addresses, Stop> {
    let symbol = symbol_of("flow", name)?;
    check!(symbol.size != 0, "flow does not tell the size of {name}");
    Ok(symbol.address..symbol.address + symbol.size)
}

fn function() -> Result<Filters, Stop> {
    Ok(Filters {
        text: format!("filter flow_oddities @ {}", flow()?),
        ranges: vec![function_range("flow_oddities")?],
    })
}

/// The whole of the program.
fn file() -> Result<Filters, Stop> {
    Ok(Filters {
        text: format!("filter * @ {}", flow()?),
        ranges: vec![0..u64::MAX],
    })
}

/// A range as perf wants it by number, which is its place in the file.
fn in_file(range: &Addresses) -> Result<String, Stop> {
    let symbol = symbol_of("flow", "flow_oddities")?;
    let offset = range.start - (symbol.address - symbol.offset);
    let size = range.end - range.start;
    Ok(format!("{offset:#x} / {size:#x} @{}", flow()?))
}

/// Filters by number.
fn numbers(ranges: Vec<Addresses>) -> Result<Filters, Stop> {
    let text = ranges
        .iter()
        .map(|range| Ok(format!("filter {}", in_file(range)?)))
        .collect::<Result<Vec<String>, Stop>>()?;
    Ok(Filters {
        text: text.join(","),
        ranges,
    })
}

/// Four ranges, of which two overlap and two touch.
fn four() -> Result<Filters, Stop> {
    let Range { start, end } = function_range("flow_oddities")?;
    let restorer = function_range("flow_restorer")?;
    let middle = start + (end - start) / 2;
    numbers(vec![
        restorer,
        start..middle,
        start + 8..middle - 4,
        middle..end,
    ])
}

/// The middle of a function, which is entered and left by jumps, and by going on.
fn middle() -> Result<Filters, Stop> {
    let Range { start, end } = function_range("flow_oddities")?;
    let third = (end - start) / 3;
    numbers(vec![start + third..end - third])
}

/// Which of the instructions that a thread runs are traced. Addresses are compared where a branch
/// that is taken lands, and where the kernel goes on; not from one instruction to the next.
fn admitted(steps: &[u64], image: &Image, ranges: &[Addresses]) -> Vec<u64> {
    let mut on = false;
    let mut last = None;
    let mut traced = Vec::new();
    for &ip in steps {
        if lands(last, ip, image) {
            on = ranges.iter().any(|range| range.contains(&ip));
        }
        if on {
            traced.push(ip);
        }
        last = Some(ip);
    }
    traced
}

/// Whether the flow got to `ip` otherwise than by going on from the instruction before.
fn lands(last: Option<u64>, ip: u64, image: &Image) -> bool {
    let Some(instruction) = last.and_then(|last| image.instruction(last)) else {
        return true;
    };
    let goes_on = matches!(
        image.flow(instruction.ip()),
        Some(Flow::Next | Flow::Either(_))
    );
    !(goes_on && instruction.next_ip() == ip)
}

fn record(
    data: &Path,
    event: &str,
    filter: &str,
    options: &[&str],
    command: &[String],
) -> Result<perf::Ran, Stop> {
    let mut record = perf::record(data);
    record
        .args(["-m", ",4M", "-e", event, "--filter", filter])
        .args(options)
        .arg("--")
        .args(command);
    let ran = perf::run_record(&mut record)?;
    check_eq!(
        ran.ended,
        perf::SUCCESS,
        "end of the recorded program, {}",
        ran.stderr
    );
    Ok(ran)
}

fn workload(rounds: usize) -> Result<Vec<String>, Stop> {
    Ok(vec![flow()?, rounds.to_string()])
}

fn traced(ctx: &Ctx, options: &[&str], filters: &Filters) -> Outcome {
    traced_by(ctx, "intel_pt//u", options, filters)
}

/// The trace of `flow` with these filters is what the stepper saw in their ranges.
fn traced_by(ctx: &Ctx, event: &str, options: &[&str], filters: &Filters) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = oracle::step_rounds(rounds())?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let command = workload(rounds())?;
    let ran = record(&data, event, &filters.text, options, &command)?;
    check_eq!(ran.stdout, steps.stdout, "output of the recorded program");
    let recorded = match options.contains(&"--per-thread") {
        // Without inheritance the second thread is not recorded.
        true => 1,
        false => steps.threads.len(),
    };
    oracle::compare_threads(ctx, &data, &steps, recorded, |all| {
        admitted(all, &steps.image, &filters.ranges)
    })
}

/// Where the trace ends, the first time.
fn until(steps: &Steps, range: &Addresses) -> Result<Vec<u64>, Stop> {
    let all = &steps.threads[0];
    match all.iter().position(|ip| range.contains(ip)) {
        Some(at) => Ok(all[..at].to_vec()),
        None => fail!("the program was never in the range"),
    }
}

/// The trace ends when the range is entered. When the event is started again, which it is when the
/// task is switched in, the trace goes on; but never in the range.
fn check_stopped(threads: &[(i32, Vec<u64>)], want: &[u64], range: &Addresses) -> Outcome {
    let Some((_, got)) = threads.first() else {
        fail!("nothing was traced");
    };
    let until = got.get(..want.len()).unwrap_or(got);
    oracle::compare("up to the stop", until, want, None)?;
    match got.iter().find(|ip| range.contains(ip)) {
        Some(ip) => fail!("{ip:#x} was traced, where the trace had to stop"),
        None => Ok(()),
    }
}

fn stop(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = oracle::step_rounds(rounds())?;
    let range = function_range("flow_oddities")?;
    let want = until(&steps, &range)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let filter = format!("tracestop flow_oddities @ {}", flow()?);
    let command = workload(rounds())?;
    record(&data, "intel_pt//u", &filter, &["--per-thread"], &command)?;
    let threads = oracle::decoded(&data)?;
    check_stopped(&threads, &want, &range)?;
    ctx.diag(format!(
        "{} instructions up to the stop, {} in all",
        want.len(),
        threads[0].1.len()
    ));
    Ok(())
}

/// The trace ends in the middle of a range that is traced.
fn stop_in_filter(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = oracle::step_rounds(rounds())?;
    let whole = function_range("flow_oddities")?;
    // The label that is jumped to last in the function, and all behind it.
    let last = steps.threads[0]
        .windows(2)
        .filter(|pair| whole.contains(&pair[1]) && lands(Some(pair[0]), pair[1], &steps.image))
        .map(|pair| pair[1])
        .max();
    let Some(last) = last else {
        fail!("no jump in the function");
    };
    let range = last..whole.end;
    let until = until(&steps, &range)?;
    let want = admitted(&until, &steps.image, std::slice::from_ref(&whole));
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let filter = format!(
        "filter flow_oddities @ {},tracestop {}",
        flow()?,
        in_file(&range)?
    );
    let command = workload(rounds())?;
    record(&data, "intel_pt//u", &filter, &["--per-thread"], &command)?;
    let threads = oracle::decoded(&data)?;
    check_stopped(&threads, &want, &range)?;
    check!(
        threads[0].1.iter().all(|ip| whole.contains(ip)),
        "instructions outside of the filter"
    );
    ctx.diag(format!("{} instructions up to the stop", want.len()));
    Ok(())
}

/// A filter of a file that is mapped only when a child runs it, twice.
fn exec(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = oracle::step_rounds(rounds())?;
    let filters = function()?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let line = format!("{0} {1}; exec {0} {1}", flow()?, rounds());
    let command = ["sh".into(), "-c".into(), line];
    record(&data, "intel_pt//u", &filters.text, &[], &command)?;
    let mut threads = oracle::decoded(&data)?;
    // The shell becomes the second of the two.
    check_eq!(
        threads.len(),
        2 * steps.threads.len(),
        "threads in the trace"
    );
    let want: Vec<Vec<u64>> = steps
        .threads
        .iter()
        .map(|all| admitted(all, &steps.image, &filters.ranges))
        .collect();
    for list in want.iter().chain(&want) {
        let Some(at) = threads.iter().position(|(_, got)| got == list) else {
            fail!("no thread has the trace that one of the program's has to have");
        };
        threads.remove(at);
    }
    Ok(())
}

/// A filter of a library that the program loads by itself.
fn dlopen(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let situation = program("situation")?.to_string_lossy().into_owned();
    let ran = perf::run(Command::new(&situation).arg("dlopen"))?;
    if ran.ended != perf::SUCCESS {
        skip!("{}", ran.stdout.trim());
    }
    let place = |word: &str| -> Result<u64, Stop> {
        let line = ran.stdout.lines().find_map(|line| line.strip_prefix(word));
        line.and_then(|text| text.trim().parse().ok())
            .ok_or_else(|| Stop::Fail(format!("no {word} in {}", ran.stdout)))
    };
    let library = ran
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("library "));
    let Some(library) = library.map(PathBuf::from) else {
        fail!("no library in {}", ran.stdout);
    };
    let calls = place("calls ")?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let filter = format!("filter adler32_z @ {}", library.display());
    let command = [situation, "dlopen".into()];
    record(&data, "intel_pt//u", &filter, &[], &command)?;

    let mut branches = Vec::new();
    let script = Script::read(&data, "be", Branch::FIELDS, |line| {
        if let Some(branch) = Branch::of_line(line) {
            branches.push(branch);
        }
        Ok(())
    })?;
    script.expect_no_errors()?;
    ctx.diag(format!("{calls} calls, {} branches", branches.len()));
    let Some(entry) = branches.first().map(|branch| branch.to) else {
        fail!("nothing decoded");
    };
    let entered = branches.iter().filter(|branch| branch.to == entry).count();
    check_eq!(entered as u64, calls, "entries to the function");
    check!(
        branches
            .iter()
            .all(|branch| branch.from == 0 || branch.from.abs_diff(entry) < 4096),
        "branches from elsewhere than the function at {entry:#x}"
    );
    Ok(())
}

/// AUX samples of a trace with a filter.
fn sampled(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let filters = function()?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record
        .args(["-m", "8M", "-e", "intel_pt//u", "--filter", &filters.text])
        .args([
            "-e",
            "cpu-clock/aux-sample-size=4096,period=2000000/u",
            "--",
        ])
        .args(workload(20)?);
    let ran = perf::run_record(&mut record)?;
    check_eq!(ran.ended, perf::SUCCESS, "end of perf, {}", ran.stderr);
    check_samples(ctx, &data, &flow()?, Place::Anywhere)
}

/// An event of a child that is about to compute, with a filter and an area.
fn filtered(ctx: &Ctx, child: &Child, filter: &str) -> Result<impl Sized, Stop> {
    let event = ctx.pmu()?.event(0).pid(child.pid()).open()?;
    event.set_filter(filter)?;
    let ring = Ring::map(&event, 8)?;
    let aux = ring.map_aux(&event, 1024, AuxMode::Full)?;
    event.enable()?;
    Ok((event, ring, aux))
}

/// What a traced program does here.
fn spin() -> u8 {
    load::spin(ROUNDS);
    0
}

const ROUNDS: u64 = 20_000;

/// Traps of a program that is traced with a filter.
fn traps_of(ctx: &Ctx, filter: &str) -> Result<u64, Stop> {
    traps::of(Child::new(spin)?, |child| filtered(ctx, child, filter))
}

/// Traps of one that is traced with a filter which lets all of it through.
fn traps_inside(ctx: &Ctx) -> Result<u64, Stop> {
    let own = own_program()?;
    let inside = traps_of(ctx, &format!("filter 0/{}@{own}", u32::MAX))?;
    check!(
        inside >= ROUNDS,
        "{inside} traps of a traced program in {ROUNDS} rounds of its loop"
    );
    Ok(inside)
}

fn own_program() -> Result<String, Stop> {
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(perf::io("/proc/self/maps"))?;
    let own = std::env::current_exe().map_err(perf::io("own path"))?;
    let own = own.to_string_lossy().into_owned();
    check!(maps.contains(&own), "own program is not mapped");
    Ok(own)
}

/// A program that has none of the files of the filters is not stepped, but for where it starts.
fn cost_nowhere(ctx: &Ctx) -> Outcome {
    traps_inside(ctx)?;
    let nowhere = traps_of(ctx, &format!("filter 0/4096@{}", flow()?))?;
    check!(
        nowhere < 10,
        "{nowhere} traps of a program that has no file of the filters"
    );
    Ok(())
}

/// Outside of the ranges a program is stepped, too, but not more than in them.
fn cost_outside(ctx: &Ctx) -> Outcome {
    let inside = traps_inside(ctx)?;
    let own = own_program()?;
    for filter in [
        format!("filter 0/1@{own},filter 0x1000/1@{own}"),
        "filter 0x1000/1".into(),
    ] {
        let outside = traps_of(ctx, &filter)?;
        ctx.diag(format!("{outside} traps with {filter:?}, {inside} inside"));
        check!(
            outside <= inside + inside / 100,
            "{outside} traps outside of {filter:?}, {inside} inside"
        );
    }
    Ok(())
}

/// What the kernel refuses, by which errno.
fn refused(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let Some(most) = pmu.file("nr_addr_filters")? else {
        fail!("{} has no nr_addr_filters", pmu.name());
    };
    let most: usize = most
        .parse()
        .map_err(|e| Stop::Fail(format!("nr_addr_filters {most:?}: {e}")))?;
    check_eq!(most, 4, "nr_addr_filters");
    let flow = flow()?;
    let many = |n: usize| vec![format!("filter 0/4096@{flow}"); n].join(",");
    let event = pmu.event(0).open()?;
    let expect = |event: &Event, filter: &str, errno: i32| -> Outcome {
        match event.set_filter(filter) {
            Ok(()) => fail!("{filter:?} was taken"),
            Err(error) => check_eq!(error.errno(), Some(errno), "errno of {filter:?}"),
        }
        Ok(())
    };
    let round = || -> Outcome {
        for (filter, errno) in [
            // Of the core.
            ("nonsense".into(), libc::EINVAL),
            ("filter".into(), libc::EINVAL),
            (format!("filter 0x10@{flow}"), libc::EINVAL),
            (format!("filter 0x10/0@{flow}"), libc::EINVAL),
            ("filter 0/4096@/nonexistent".into(), libc::ENOENT),
            ("filter 0/4096@/".into(), libc::EINVAL),
            // Of the PMU, as of the driver for the hardware.
            (format!("start 0x10@{flow}"), libc::EOPNOTSUPP),
            (format!("start 0x10/16@{flow}"), libc::EOPNOTSUPP),
            (format!("stop 0x10@{flow}"), libc::EOPNOTSUPP),
            (many(most + 1), libc::EOPNOTSUPP),
            (many(200 / flow.len().max(1) + most + 1), libc::EOPNOTSUPP),
        ] {
            expect(&event, &filter, errno)?;
        }
        if pmu.module().as_deref() == Some("soft_pt") {
            for filter in [
                "filter 0xffffffff81000000/4096",
                "filter 0xffff888000000000/1,filter 0x1000/16",
                "filter 0x7ffffffffffffff0/0x20",
                "filter 0xfffffffffffffff0/0x20",
                "stop 0xffffffff81000000/4096",
            ] {
                expect(&event, filter, libc::EINVAL)?;
            }
        }
        Ok(())
    };
    round()?;
    for good in [
        many(most),
        format!("filter 0/8192@{flow},filter 4096/8192@{flow},stop 0/100@{flow}"),
        format!("stop 0/4096@{flow}"),
        format!("filter 0/18446744073709551615@{flow}"),
        "filter 0x1000/0x1000".into(),
        "filter 0/1".into(),
    ] {
        if good.contains("18446744073709551615") && pmu.module().as_deref() == Some("soft_pt") {
            expect(&event, &good, libc::EINVAL)?;
            continue;
        }
        event.set_filter(&good)?;
        // What is refused then leaves it alone.
        round()?;
    }
    // An event that goes from program to program can't have a filter of one's file.
    if is_root() {
        let everyone = pmu.event(0).pid(-1).cpu(0);
        drop(event);
        let everyone = everyone.open()?;
        expect(&everyone, &many(1), libc::EOPNOTSUPP)?;
        everyone.set_filter("filter 0x1000/0x1000")?;
    }
    Ok(())
}

/// What perf refuses itself, and what it says when the kernel does.
fn refused_by_perf(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let flow = flow()?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let five = vec![format!("filter flow_oddities @ {flow}"); 5].join(",");
    for (filter, says) in [
        (
            format!("filter no_such_function @ {flow}"),
            "no_such_function",
        ),
        ("filter main @ /nonexistent".into(), "/nonexistent"),
        (five, "exceeds maximum (4)"),
        (
            format!("start flow_oddities @ {flow}"),
            "Operation not supported",
        ),
        (
            format!("stop flow_oddities @ {flow}"),
            "Operation not supported",
        ),
    ] {
        let mut record = perf::record(&data);
        record
            .args(["-e", "intel_pt//u", "--filter", &filter, "--"])
            .args(workload(1)?);
        let ran = perf::run(&mut record)?;
        check!(ran.ended != perf::SUCCESS, "{filter}: recorded");
        check!(
            ran.stderr.contains(says),
            "{filter}: perf does not say {says:?} but\n{}",
            ran.stderr
        );
    }
    Ok(())
}
