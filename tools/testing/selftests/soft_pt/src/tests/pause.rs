// SPDX-License-Identifier: GPL-2.0

//! AUX pause and resume: what is traced is what runs in between, it decodes, and the rest costs
//! nothing.

use std::path::Path;

use perf_aux::{
    check,
    check_eq,
    load::{
        self,
        Child, //
    },
    ring::{
        AuxMode,
        Ring, //
    },
    Ctx,
    Outcome,
    Stop,
    Test, //
};

use crate::{
    image::Symbol,
    perf::{
        self,
        program,
        Scratch, //
    },
    tests::{
        oracle,
        pmu_for_perf,
        record::{
            check_samples,
            tracefs,
            Place,
            Uprobe, //
        },
        symbol_of,
        traps, //
    }, //
};

pub const TESTS: &[Test] = &[
    Test::new("pause.cost_while_paused", cost_while_paused).limit(150),
    Test::new("pause.cost_of_a_function", cost_of_a_function).limit(300),
    Test::new("pause.function", |ctx| function(ctx, &[])).limit(150),
    Test::new("pause.function_per_thread", |ctx| {
        function(ctx, &["--per-thread"])
    })
    .limit(150),
    Test::new("pause.function_sampled", function_sampled).limit(150),
    Test::new("pause.function_in_snapshot", function_in_snapshot).limit(150),
];

/// Rounds of the program where it is stepped, too.
fn rounds() -> usize {
    oracle::rounds_here(2)
}

const ENTRY: &str = "soft_pt_selftest:entry";
const RETURN: &str = "soft_pt_selftest:return";

/// Probes at the entry and the return of a function of `flow`, and where that is.
struct Probes {
    function: Symbol,
    _entry: Uprobe,
    _return: Uprobe,
}

impl Probes {
    fn new() -> Result<Self, Stop> {
        tracefs()?;
        let function = symbol_of("flow", "flow_oddities")?;
        let path = program("flow")?;
        Ok(Probes {
            function,
            _entry: Uprobe::at(ENTRY, &path, function.offset)?,
            _return: Uprobe::at_return(RETURN, &path, function.offset)?,
        })
    }

    /// A group in which the one resumes the trace and the other pauses it.
    fn group(more: &str) -> String {
        format!(
            "{{intel_pt/aux-action=start-paused/u,{ENTRY}/aux-action=resume/,\
             {RETURN}/aux-action=pause/{more}}}"
        )
    }

    /// What of a program's instructions is traced. That at the entry is not: the probe resumes the
    /// trace in the course of it.
    fn of<'a>(&'a self, steps: &'a [u64]) -> impl Iterator<Item = u64> + 'a {
        let Symbol { address, size, .. } = self.function;
        let traced = address + 1..address + size;
        steps.iter().copied().filter(move |ip| traced.contains(ip))
    }
}

fn record(data: &Path, group: &str, options: &[&str], rounds: usize) -> Result<perf::Ran, Stop> {
    let mut record = perf::record(data);
    record.args(options).args(["-e", group, "--"]);
    record.arg(program("flow")?).arg(rounds.to_string());
    let ran = perf::run_record(&mut record)?;
    check_eq!(
        ran.ended,
        perf::SUCCESS,
        "end of the recorded program, {}",
        ran.stderr
    );
    Ok(ran)
}

/// With resume at the entry of a function and pause at its return, the trace is the function's
/// instructions and no others, in each of two threads that share a CPU.
fn function(ctx: &Ctx, options: &[&str]) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = oracle::step_rounds(rounds())?;
    let probes = Probes::new()?;
    // There is an event per CPU, and each is paused on its own.
    load::pin(load::cpus()?[0])?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let options = [&["-m", ",4M"], options].concat();
    let ran = record(&data, &Probes::group(""), &options, rounds())?;
    check_eq!(ran.stdout, steps.stdout, "output of the recorded program");
    // Without inheritance the second thread is not recorded.
    let recorded = match options.contains(&"--per-thread") {
        true => 1,
        false => steps.threads.len(),
    };
    oracle::compare_threads(ctx, &data, &steps, recorded, |all| probes.of(all).collect())
}

/// The same in a snapshot area, of which the latest is left.
fn function_in_snapshot(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let steps = oracle::step_rounds(rounds())?;
    let probes = Probes::new()?;
    load::pin(load::cpus()?[0])?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let options = ["-Se", "-m", ",64K", "--per-thread"];
    record(&data, &Probes::group(""), &options, rounds())?;
    let threads = oracle::decoded(&data)?;
    check_eq!(threads.len(), 1, "threads in the trace");
    let want: Vec<u64> = probes.of(&steps.threads[0]).collect();
    oracle::compare("snapshot", &threads[0].1, &want, Some(&steps.image))?;
    ctx.diag(format!("{} instructions, all equal", want.len()));
    Ok(())
}

/// Samples whose trace is what was traced before, with pauses in it.
fn function_sampled(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let _probes = Probes::new()?;
    load::pin(load::cpus()?[0])?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let more = ",cpu-clock/aux-sample-size=4096,period=1000000/u";
    record(&data, &Probes::group(more), &["-m", "8M"], 300)?;
    let path = program("flow")?.to_string_lossy().into_owned();
    check_samples(ctx, &data, &path, Place::Anywhere)
}

/// A program recorded paused is not stepped.
fn cost_while_paused(ctx: &Ctx) -> Outcome {
    const ROUNDS: u64 = 20_000;

    let pmu = ctx.pmu()?;
    let work = || {
        load::spin(ROUNDS);
        0
    };
    let traced = |paused: bool| {
        traps::of(Child::new(work)?, |child| {
            let attr = pmu.event(0).pid(child.pid());
            let event = match paused {
                true => attr.aux_start_paused().open()?,
                false => attr.open()?,
            };
            let ring = Ring::map(&event, 8)?;
            let aux = ring.map_aux(&event, 1024, AuxMode::Full)?;
            event.enable()?;
            Ok((event, ring, aux))
        })
    };
    let running = traced(false)?;
    check!(
        running >= ROUNDS,
        "{running} traps of a traced program in {ROUNDS} rounds of its loop"
    );
    check_eq!(traced(true)?, 0, "traps of a program recorded paused");
    ctx.diag(format!("{running} traps when not paused"));
    Ok(())
}

/// What it costs to trace one function of a program is its share of what it costs to trace the
/// whole, apart from the probes.
fn cost_of_a_function(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let rounds = rounds();
    let steps = oracle::step_rounds(rounds)?;
    let probes = Probes::new()?;
    let cpu = load::cpus()?[0];
    load::pin(cpu)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let count = |list: &dyn Fn(&Vec<u64>) -> usize| steps.threads.iter().map(list).sum::<usize>();
    let inside = count(&|steps| probes.of(steps).count()) as u64;
    let all = count(&Vec::len) as u64;

    let counter = traps::counter(-1, cpu as i32)?;
    let traps = |group: &str| -> Result<u64, Stop> {
        let before = counter.count()?;
        record(&data, group, &["-m", "1M,4M"], rounds)?;
        Ok(counter.count()? - before)
    };
    let whole = traps("intel_pt//u")?;
    let with_probes = traps(&format!("{{{ENTRY},{RETURN}}}"))?;
    let function = traps(&Probes::group(""))?;
    ctx.diag(format!(
        "{whole} traps with all traced, {with_probes} with the probes, {function} with the \
         function traced; {inside} of {all} instructions are its own"
    ));
    check!(
        whole >= all / 2,
        "{whole} traps of {all} instructions that are all traced"
    );
    // The probes step the instruction that they replace, and resume in the course of it.
    let most = with_probes + inside + inside / 10;
    check!(
        function <= most,
        "{function} traps with the function traced, expected {most} or fewer"
    );
    Ok(())
}
