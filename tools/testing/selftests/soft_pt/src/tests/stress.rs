// SPDX-License-Identifier: GPL-2.0

//! Tracing that goes on and off, or away for good, under a program that is busy: no program may
//! ever get a trap of the tracer's.

use std::{
    process::{
        Command,
        Stdio, //
    },
    time::{
        Duration,
        Instant, //
    }, //
};

use perf_aux::{
    check,
    check_eq,
    load::pin,
    ring::{
        Aux,
        AuxMode,
        Ring, //
    },
    sys::Pmu,
    Ctx,
    Event,
    Outcome,
    Stop,
    Test, //
};

use crate::perf::{
    io,
    program, //
};

pub const TESTS: &[Test] = &[
    Test::new("stress.on_and_off", on_and_off).limit(90),
    Test::new(
        "stress.close_while_contexts_swap",
        close_while_contexts_swap,
    )
    .limit(120),
    Test::new("stress.kill_while_traced", kill_while_traced).limit(60),
    Test::new("stress.on_and_off_slowly", slowly).limit(90),
];

/// The trace of a task and its children on one CPU.
struct Trace {
    event: Event,
    ring: Ring,
    _aux: Aux,
}

impl Trace {
    fn open(pmu: &Pmu, pid: i32, cpu: i32) -> Result<Self, Stop> {
        let event = pmu.event(0).pid(pid).cpu(cpu).inherit().open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
        Ok(Trace {
            event,
            ring,
            _aux: aux,
        })
    }
}

fn situation(args: &[&str]) -> Result<std::process::Child, Stop> {
    let path = program("situation")?;
    Command::new(&path)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(io(path.display()))
}

/// Waits for the program, which must have found nothing wrong.
fn expect_success(child: std::process::Child, what: &str) -> Outcome {
    let output = child.wait_with_output().map_err(io(what))?;
    check!(
        output.status.success(),
        "{what}: {}, {}",
        output.status,
        String::from_utf8_lossy(&output.stdout)
    );
    Ok(())
}

fn on_both_cpus(pmu: &Pmu, pid: i32) -> Result<Vec<Trace>, Stop> {
    perf_aux::load::cpus()?
        .into_iter()
        .map(|cpu| Trace::open(pmu, pid, cpu as i32))
        .collect()
}

fn toggle(ctx: &Ctx, longest_us: u64) -> Outcome {
    let pmu = ctx.pmu()?;
    let mut random = ctx.random();
    let mut child = situation(&["churn", "10"])?;
    let traces = on_both_cpus(&pmu, child.id() as i32)?;
    let (mut toggles, mut moved, mut last) = (0u64, 0u64, vec![0; traces.len()]);
    while child.try_wait().map_err(io("wait"))?.is_none() {
        for trace in &traces {
            trace.event.enable()?;
        }
        std::thread::sleep(Duration::from_micros(random.below(longest_us)));
        for (trace, last) in traces.iter().zip(&mut last) {
            trace.event.disable()?;
            let head = trace.ring.aux_head();
            moved += u64::from(head != *last);
            *last = head;
        }
        std::thread::sleep(Duration::from_micros(random.below(longest_us / 2)));
        toggles += 1;
    }
    expect_success(child, "the traced program")?;
    ctx.diag(format!(
        "{toggles} times on and off, trace moved {moved} times"
    ));
    check!(
        moved > toggles / 4,
        "the trace moved only {moved} times in {toggles}"
    );
    Ok(())
}

fn on_and_off(ctx: &Ctx) -> Outcome {
    toggle(ctx, 3000)
}

/// Longer pieces, so that most instructions are stepped.
fn slowly(ctx: &Ctx) -> Outcome {
    toggle(ctx, 200_000)
}

/// Two clones on one CPU wake each other, so that perf swaps their contexts instead of stopping
/// and starting the event; then the event goes away under them.
fn close_while_contexts_swap(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let mut random = ctx.random();
    const ROUNDS: u32 = 60;
    for round in 0..ROUNDS {
        let mut child = situation(&["ping-pong", "wait"])?;
        let trace = Trace::open(&pmu, child.id() as i32, 0)?;
        trace.event.enable()?;
        // Its standard input ends here, for which it waits.
        drop(child.stdin.take());
        std::thread::sleep(Duration::from_micros(random.below(60_000)));
        drop(trace);
        expect_success(child, &format!("the traced program in round {round}"))?;
    }
    Ok(())
}

/// Traced tasks that are killed, with the event open and closed right after.
fn kill_while_traced(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let mut random = ctx.random();
    pin(0)?;
    let start = Instant::now();
    let mut rounds = 0;
    while start.elapsed() < Duration::from_secs(10) {
        let mut child = situation(&["churn", "30"])?;
        let traces = on_both_cpus(&pmu, child.id() as i32)?;
        for trace in &traces {
            trace.event.enable()?;
        }
        std::thread::sleep(Duration::from_micros(random.below(100_000)));
        child.kill().map_err(io("kill"))?;
        if rounds % 2 == 0 {
            drop(traces);
        }
        let status = child.wait().map_err(io("wait"))?;
        check_eq!(
            std::os::unix::process::ExitStatusExt::signal(&status),
            Some(libc::SIGKILL),
            "the signal that ended the program"
        );
        rounds += 1;
    }
    ctx.diag(format!("{rounds} programs killed"));
    Ok(())
}
