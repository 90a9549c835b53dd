// SPDX-License-Identifier: GPL-2.0

//! Programs in which single-stepping could show or do harm: each runs untraced and traced, must do
//! the same, and its trace must decode without an error and hold what the program says it did.

use std::{
    collections::BTreeMap,
    path::Path,
    process::Command, //
};

use perf_aux::{
    check,
    check_eq,
    fail,
    skip,
    Ctx,
    Outcome,
    Stop,
    Test, //
};

use crate::{
    perf::{
        self,
        program,
        Ran,
        Scratch,
        Script, //
    },
    tests::pmu_for_perf, //
};

/// Tests `situation NAME` under `perf record`, children included.
macro_rules! traced {
    ($name:literal) => {
        Test::new(concat!("situation.", $name), |ctx| traced(ctx, $name, true)).limit(90)
    };
}

/// Tests one that does what can't be traced, which its trace must say.
macro_rules! traced_with_gaps {
    ($name:literal) => {
        Test::new(concat!("situation.", $name), |ctx| with_gaps(ctx, $name)).limit(90)
    };
}

/// The same with the children left out of the trace.
macro_rules! traced_alone {
    ($name:literal) => {
        Test::new(concat!("situation.", $name, ".children_untraced"), |ctx| {
            traced(ctx, $name, false)
        })
        .limit(90)
    };
}

/// Tests a situation that starts and stops the trace of itself.
macro_rules! tracing_itself {
    ($name:literal) => {
        Test::new(concat!("situation.", $name), |ctx| {
            tracing_itself(ctx, $name)
        })
    };
}

pub const TESTS: &[Test] = &[
    traced!("pushf"),
    traced!("popf"),
    traced!("iret"),
    traced!("syscall-r11"),
    traced!("int80"),
    traced!("vsyscall"),
    traced!("vdso"),
    traced!("mov-ss"),
    traced!("rep"),
    traced!("cpuid"),
    traced!("compat-code"),
    traced!("stack-loads"),
    traced_with_gaps!("many-stack-loads"),
    traced!("lss"),
    traced!("far"),
    traced_with_gaps!("segment-base"),
    traced_with_gaps!("execute-only"),
    traced!("user-dispatch"),
    traced!("shadow-stack"),
    traced!("own-tf"),
    traced!("own-tf-by-iret"),
    traced!("own-tf-by-sigreturn"),
    traced!("own-tf-syscall"),
    traced!("int3"),
    traced!("icebp"),
    traced!("signal-fault"),
    traced!("signal-syscall"),
    traced!("signal-irq"),
    traced!("signal-nested"),
    traced!("signal-no-return"),
    traced!("page-faults"),
    traced!("syscall-restart"),
    traced!("rseq-abort"),
    traced!("fork"),
    traced_alone!("fork"),
    traced!("vfork"),
    traced_alone!("vfork"),
    traced!("clone"),
    traced_alone!("clone"),
    traced!("thread"),
    traced_alone!("thread"),
    traced!("spawn"),
    traced_alone!("spawn"),
    traced!("exec"),
    traced!("core-dump"),
    traced_alone!("core-dump"),
    traced!("kill"),
    traced_alone!("kill"),
    traced!("exit-with-threads"),
    traced_alone!("exit-with-threads"),
    traced!("migrate"),
    traced!("ping-pong"),
    traced_alone!("ping-pong"),
    traced!("ptrace-getregs"),
    traced_alone!("ptrace-getregs"),
    traced!("ptrace-singlestep"),
    traced_alone!("ptrace-singlestep"),
    traced!("ptrace-detach"),
    traced_alone!("ptrace-detach"),
    traced!("ptrace-setregs"),
    traced!("ptrace-breakpoint"),
    traced_alone!("ptrace-breakpoint"),
    traced!("uprobe-emulated"),
    traced!("uprobe-stepped"),
    traced!("uprobe-syscall"),
    traced!("uprobe-call"),
    traced!("uretprobe"),
    traced!("exec-breakpoint"),
    tracing_itself!("stop-before-popf"),
    tracing_itself!("stop-before-iret"),
    tracing_itself!("stop-in-handler"),
    Test::new("situation.sampled_flags", sampled_flags).limit(90),
    Test::new("situation.every_one_is_tested", every_one_is_tested),
];

/// `churn` is run by the stress tests, `dlopen` by those of filters.
const ELSEWHERE: &[&str] = &["churn", "dlopen"];

fn every_one_is_tested(_: &Ctx) -> Outcome {
    let list = perf::run(Command::new(program("situation")?).arg("--list"))?;
    for name in list.stdout.lines().filter(|name| !ELSEWHERE.contains(name)) {
        let test = format!("situation.{name}");
        check!(
            TESTS.iter().any(|known| known.name == test),
            "no test {test}"
        );
    }
    Ok(())
}

/// What the program must do again when traced: its output but for what is meant for the trace.
fn behaviour(ran: &Ran) -> (String, String) {
    let lines = ran
        .stdout
        .lines()
        .filter(|line| !line.starts_with("reaches "));
    let output = lines.fold(String::new(), |all, line| all + line + "\n");
    (ran.ended.clone(), output)
}

/// The branches that the program says it made, by target.
fn claims(stdout: &str) -> BTreeMap<u64, usize> {
    let mut claims = BTreeMap::new();
    for line in stdout.lines() {
        let claim = line.strip_prefix("reaches 0x").and_then(|rest| {
            let (address, count) = rest.split_once(' ')?;
            let address = u64::from_str_radix(address, 16).ok()?;
            Some((address, count.parse::<usize>().ok()?))
        });
        if let Some((address, count)) = claim {
            *claims.entry(address).or_default() += count;
        }
    }
    claims
}

/// Runs the situation untraced; skips if this machine lacks what it needs.
fn untraced(name: &str) -> Result<Ran, Stop> {
    let ran = perf::run(Command::new(program("situation")?).arg(name))?;
    match ran.ended.as_str() {
        perf::SUCCESS => Ok(ran),
        "exit status: 4" => skip!("{}", ran.stdout.trim()),
        _ => fail!("untraced: {ran:?}"),
    }
}

fn traced(ctx: &Ctx, name: &str, children: bool) -> Outcome {
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let got = record(ctx, name, children, &data, perf::run_record)?;
    // A child that is not traced makes the same branches unseen.
    let claims = if children {
        claims(&got.stdout)
    } else {
        BTreeMap::new()
    };
    expect_trace(ctx, &data, claims)
}

/// Samples of the flags show what the program would see.
fn sampled_flags(ctx: &Ctx) -> Outcome {
    const TF: u64 = 1 << 8;

    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record.args(["-m", ",16M", "-e", "intel_pt//u"]);
    record.args(["-e", "cpu-clock:u", "-c", "100000", "--user-regs=FLAGS"]);
    record.arg("--").arg(program("situation")?).arg("popf");
    perf::run_record(&mut record)?;

    let (mut samples, mut trapping) = (0, 0);
    let mut script = Command::new("perf");
    script.args(["script", "-f", "--no-itrace", "-F", "sw:event,uregs", "-i"]);
    let ran = perf::run(script.arg(&data))?;
    for line in ran.stdout.lines() {
        let flags = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("FLAGS:0x"))
            .and_then(|flags| u64::from_str_radix(flags, 16).ok());
        if let Some(flags) = flags {
            samples += 1;
            trapping += u64::from(flags & TF != 0);
        }
    }
    ctx.diag(format!("{samples} samples"));
    check!(samples > 0, "no sample with flags: {ran:?}");
    check_eq!(trapping, 0, "samples with TF");
    Ok(())
}

/// Traces the situation, which must do as it does untraced, to `data`.
fn record(
    ctx: &Ctx,
    name: &str,
    children: bool,
    data: &Path,
    run: fn(&mut Command) -> Result<Ran, Stop>,
) -> Result<Ran, Stop> {
    pmu_for_perf(ctx)?;
    let want = untraced(name)?;
    let mut record = perf::record(data);
    record.args(["-m", ",16M", "-e", "intel_pt//u"]);
    if !children {
        record.arg("--no-inherit");
    }
    record.arg("--").arg(program("situation")?).arg(name);
    let got = run(&mut record)?;
    check_eq!(
        behaviour(&got),
        behaviour(&want),
        "end and output when traced"
    );
    Ok(got)
}

fn with_gaps(ctx: &Ctx, name: &str) -> Outcome {
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    // perf warns of the gaps.
    record(ctx, name, true, &data, perf::run)?;
    let script = Script::read_lossy(&data, "be", perf::Branch::FIELDS, |_| Ok(()))?;
    ctx.diag(format!("{} gaps", script.errors.len()));
    check!(!script.errors.is_empty(), "no gap in the trace");
    for error in &script.errors {
        check!(error.contains("Overflow packet"), "{error}");
    }
    Ok(())
}

fn expect_trace(ctx: &Ctx, data: &Path, claims: BTreeMap<u64, usize>) -> Outcome {
    let mut seen: BTreeMap<u64, usize> = claims.keys().map(|address| (*address, 0)).collect();
    let mut branches = 0;
    // Where each thread left the trace.
    let mut left: BTreeMap<i32, u64> = BTreeMap::new();
    let script = Script::read(data, "be", perf::Branch::FIELDS, |line| {
        let Some(branch) = perf::Branch::of_line(line) else {
            return Ok(());
        };
        branches += 1;
        if branch.to == 0 {
            left.insert(branch.tid, branch.from);
            return Ok(());
        }
        let left = left.remove(&branch.tid);
        // Going on where the trace was left is no second arrival there.
        if branch.from != 0 || left != Some(branch.to) {
            if let Some(count) = seen.get_mut(&branch.to) {
                *count += 1;
            }
        }
        Ok(())
    })?;
    ctx.diag(format!("{branches} branches decoded"));
    script.expect_no_errors()?;
    check!(branches > 0, "no branch decoded");
    for (address, count) in claims {
        check_eq!(
            seen[&address],
            count,
            "branches to {address:#x} in the trace"
        );
    }
    Ok(())
}

fn tracing_itself(ctx: &Ctx, name: &str) -> Outcome {
    let pmu = ctx.pmu()?;
    let want = untraced(name)?;
    let got = perf::run(Command::new(program("situation")?).args([name, pmu.name()]))?;
    check_eq!(
        behaviour(&got),
        behaviour(&want),
        "end and output when traced"
    );
    Ok(())
}
