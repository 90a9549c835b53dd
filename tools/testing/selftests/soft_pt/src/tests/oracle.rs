// SPDX-License-Identifier: GPL-2.0

//! The decoded trace of a program against the list that a ptrace stepper makes of it.

use std::path::Path;

use perf_aux::{
    check,
    check_eq,
    fail,
    ring::{
        AuxMode,
        Ring, //
    },
    skip,
    Ctx,
    Outcome,
    Stop,
    Test, //
};

use crate::{
    image::Image,
    libipt,
    perf::{
        self,
        program,
        Scratch,
        Script, //
    },
    stepper,
    tests::{
        failed,
        pmu_for_perf,
        waiting, //
    }, //
};

pub const TESTS: &[Test] = &[
    Test::new(
        "oracle.stepper_agrees_with_itself",
        stepper_agrees_with_itself,
    )
    .limit(120),
    Test::new("oracle.instructions", instructions).limit(180),
    Test::new(
        "oracle.instructions_without_ret_compression",
        without_ret_compression,
    )
    .limit(180),
    Test::new("oracle.instructions_on_one_cpu", on_one_cpu).limit(180),
    Test::new("oracle.instructions_by_libipt", by_libipt).limit(120),
    Test::new("oracle.speed", speed).limit(180),
];

/// Rounds of the program; each is about 4,500 instructions in each of two threads.
fn rounds() -> usize {
    rounds_here(4)
}

/// How many rounds of the program a test runs that usually runs so many. On a kernel for debugging
/// a step by ptrace takes so long that one has to do.
pub(super) fn rounds_here(usually: usize) -> usize {
    match perf_aux::sys::slowness() {
        1 => usually,
        _ => 1,
    }
}

fn step() -> Result<stepper::Steps, Stop> {
    step_rounds(rounds())
}

/// What the stepper sees of so many rounds.
pub(super) fn step_rounds(rounds: usize) -> Result<stepper::Steps, Stop> {
    let steps = stepper::step(&program("flow")?, &[&rounds.to_string()]).map_err(failed)?;
    check_eq!(steps.status, 0, "status of the stepped program");
    check_eq!(steps.threads.len(), 2, "threads");
    // One fault in each round; the signal from a system call comes where any address may come.
    steps.check(rounds).map_err(failed)?;
    Ok(steps)
}

fn stepper_agrees_with_itself(ctx: &Ctx) -> Outcome {
    let (one, two) = (step()?, step()?);
    check_eq!(one.stdout, two.stdout, "output");
    let untraced =
        perf::run(std::process::Command::new(program("flow")?).arg(rounds().to_string()))?;
    check_eq!(one.stdout, untraced.stdout, "output");
    for (n, (one, two)) in one.threads.iter().zip(&two.threads).enumerate() {
        compare(&format!("thread {n}"), one, two, None)?;
        ctx.diag(format!("thread {n}: {} instructions", one.len()));
    }
    Ok(())
}

/// Fails at the first place where the two lists differ.
pub(super) fn compare(what: &str, got: &[u64], want: &[u64], image: Option<&Image>) -> Outcome {
    if got == want {
        return Ok(());
    }
    let at = got.iter().zip(want).take_while(|(a, b)| a == b).count();
    let around = |list: &[u64]| {
        list[at.saturating_sub(4).min(list.len())..(at + 5).min(list.len())]
            .iter()
            .map(|ip| match image.and_then(|image| image.instruction(*ip)) {
                Some(instruction) => format!("{ip:#x} ({:?})", instruction.mnemonic()),
                None => format!("{ip:#x}"),
            })
            .collect::<Vec<_>>()
            .join(" ")
    };
    fail!(
        "{what}: {} instructions, expected {}; the first difference is at number {at}\n got {}\nwant {}",
        got.len(),
        want.len(),
        around(got),
        around(want),
    )
}

/// The instructions of each thread that perf decodes, in the order of the threads' making.
pub(super) fn decoded(data: &Path) -> Result<Vec<(i32, Vec<u64>)>, Stop> {
    let mut threads: Vec<(i32, Vec<u64>)> = Vec::new();
    let script = Script::read(data, "i1ie", perf::Step::FIELDS, |line| {
        let Some(step) = perf::Step::of_line(line) else {
            return Ok(());
        };
        match threads.iter_mut().find(|(tid, _)| *tid == step.tid) {
            Some((_, list)) => list.push(step.ip),
            None => threads.push((step.tid, vec![step.ip])),
        }
        Ok(())
    })?;
    script.expect_no_errors()?;
    threads.sort();
    Ok(threads)
}

/// The trace has as many threads as were recorded, and in each of them those of the stepped
/// instructions that `wanted` picks, of which there are some.
pub(super) fn compare_threads(
    ctx: &Ctx,
    data: &Path,
    steps: &stepper::Steps,
    recorded: usize,
    wanted: impl Fn(&[u64]) -> Vec<u64>,
) -> Outcome {
    let threads = decoded(data)?;
    check_eq!(threads.len(), recorded, "threads in the trace");
    for (n, ((_, got), all)) in threads.iter().zip(&steps.threads).enumerate() {
        let want = wanted(all);
        check!(!want.is_empty(), "thread {n} ran nothing that is wanted");
        compare(&format!("thread {n}"), got, &want, Some(&steps.image))?;
        ctx.diag(format!(
            "thread {n}: {} instructions of {}, all equal",
            got.len(),
            all.len()
        ));
    }
    Ok(())
}

fn trace_equals_steps(ctx: &Ctx, event: &str) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = step()?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record.args(["-m", ",16M", "-e", event, "--"]);
    record.arg(program("flow")?).arg(rounds().to_string());
    let ran = perf::run_record(&mut record)?;
    check_eq!(ran.ended, perf::SUCCESS, "end of the recorded program");
    check_eq!(ran.stdout, steps.stdout, "output of the recorded program");
    compare_threads(ctx, &data, &steps, steps.threads.len(), <[u64]>::to_vec)
}

fn instructions(ctx: &Ctx) -> Outcome {
    trace_equals_steps(ctx, "intel_pt//u")
}

fn without_ret_compression(ctx: &Ctx) -> Outcome {
    trace_equals_steps(ctx, "intel_pt/noretcomp=1/u")
}

/// Both threads on one CPU, so that each is switched out and in.
fn on_one_cpu(ctx: &Ctx) -> Outcome {
    perf_aux::load::pin(0)?;
    trace_equals_steps(ctx, "intel_pt//u")
}

/// The first thread again, its packets taken from the ring and decoded by Intel's library.
fn by_libipt(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let path = program("flow")?;
    if libipt::decode(&[], &path).is_none() {
        skip!("no libipt.so.2");
    }
    let steps = step()?;
    let want = &steps.threads[0];
    for (name, config) in [("", 0), ("noretcomp", 1), ("tsc", 1)] {
        let config = match name {
            "" => config,
            _ => match pmu.config(name, config)? {
                Some(config) => config,
                None => continue,
            },
        };
        let child = waiting(rounds())?;
        let event = pmu.event(config).pid(child.pid()).enable_on_exec().open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 2048, AuxMode::Full)?;
        check_eq!(child.wait()?, 0, "exit code of the traced program");
        let trace = aux.bytes(0, ring.aux_head() as usize);
        check!(
            trace.len() < aux.size(),
            "the trace does not fit into the area"
        );
        let got = match libipt::decode(&trace, &path) {
            Some(got) => got.map_err(failed)?,
            None => skip!("no libipt.so.2"),
        };
        compare(
            &format!("config {config:#x}"),
            &got,
            want,
            Some(&steps.image),
        )?;
        ctx.diag(format!(
            "config {config:#x}: {} instructions in {} bytes, all equal",
            got.len(),
            trace.len()
        ));
    }
    Ok(())
}

/// How much faster than a ptrace stepper the trace has to be, in any loop.
const FASTER: f64 = 20.0;

/// Instructions per second, traced and by a ptrace stepper, as `step_cost` measures them.
fn speed(ctx: &Ctx) -> Outcome {
    ctx.pmu()?;
    let ran = perf::run(std::process::Command::new(program("step_cost")?).arg("speed"))?;
    check_eq!(ran.ended, perf::SUCCESS, "end of step_cost: {}", ran.stderr);
    for line in ran.stderr.lines() {
        ctx.diag(line);
    }
    let ratios: Vec<f64> = ran
        .stdout
        .lines()
        .filter(|line| line.contains("traced to ptrace"))
        .filter_map(|line| {
            let (_, ratio) = line.split_once("\"ratio\":")?;
            ratio.split([',', '}']).next()?.parse().ok()
        })
        .collect();
    check!(!ratios.is_empty(), "step_cost says: {}", ran.stdout);
    for ratio in ratios {
        check!(ratio > FASTER, "only {ratio} times as fast as ptrace");
    }
    Ok(())
}
