// SPDX-License-Identifier: GPL-2.0

//! What one traced instruction costs.
//!
//! Loops of known make are run untraced, traced, and under a ptrace stepper, in turns in the same
//! boot. What is measured is the loop alone: the program is there already, and the clock is read
//! on both sides of the loop.
//!
//! In QEMU with `-icount shift=0,sleep=off` and one CPU the time-stamp counter counts instructions,
//! so that the cost of a step is a number of instructions ("guest instructions"). Elsewhere only
//! the ratios of one run mean anything.
//!
//! Standard output has one JSON object per line, standard error the same for people.

use perf_aux::{
    load::pin,
    ring::{
        AuxMode,
        Ring, //
    },
    sys::Pmu,
    Attr,
    Error,
    Result, //
};
use std::{
    arch::{
        global_asm,
        x86_64::_rdtsc, //
    },
    hint::black_box,
    process::ExitCode,
    ptr,
    time::Instant, //
};

// Each loop takes the number of rounds, 0 included.
global_asm!(
    // Conditional branches, every second instruction.
    ".globl step_cost_branches",
    "step_cost_branches:",
    "inc %rdi",
    "jmp 2f",
    "1: test $3, %edi",
    "jz 2f",
    "test $5, %edi",
    "jnz 2f",
    "xor %eax, %eax",
    "2: dec %rdi",
    "jnz 1b",
    "ret",
    // Straight code of common instructions, with one branch in 32.
    ".globl step_cost_straight",
    "step_cost_straight:",
    "inc %rdi",
    "jmp 2f",
    ".globl step_cost_straight_round",
    "step_cost_straight_round:",
    "1: .rept 5",
    "lea 8(%rdi,%rsi,2), %rax",
    "mov %rax, -8(%rsp)",
    "add $3, %eax",
    "movzbl %al, %ecx",
    "mov -8(%rsp), %rdx",
    "xor %rcx, %rdx",
    ".endr",
    "2: dec %rdi",
    "jnz 1b",
    "ret",
    // A dispatch: an indirect jump, an indirect call and its return, a call and its return.
    ".globl step_cost_indirect",
    "step_cost_indirect:",
    "inc %rdi",
    "lea 4f(%rip), %rsi",
    "lea 5f(%rip), %rdx",
    "jmp 2f",
    "1: jmp *%rsi",
    "ud2",
    "4: call *%rdx",
    "call 5f",
    "2: dec %rdi",
    "jnz 1b",
    "ret",
    "5: ret",
    options(att_syntax),
);

type Loop = extern "C" fn(u64) -> u64;

extern "C" {
    static step_cost_straight_round: u8;
    fn step_cost_branches(rounds: u64) -> u64;
    fn step_cost_straight(rounds: u64) -> u64;
    fn step_cost_indirect(rounds: u64) -> u64;
}

extern "C" fn branches(rounds: u64) -> u64 {
    // SAFETY: The function only counts.
    unsafe { step_cost_branches(rounds) }
}

extern "C" fn straight(rounds: u64) -> u64 {
    // SAFETY: The function only counts, and writes below the stack pointer.
    unsafe { step_cost_straight(rounds) }
}

extern "C" fn indirect(rounds: u64) -> u64 {
    // SAFETY: The function only counts.
    unsafe { step_cost_indirect(rounds) }
}

/// What a compiler makes of a sort: insertion sorts of a few numbers.
extern "C" fn sort(rounds: u64) -> u64 {
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut numbers = [0u64; 10];
    for _ in 0..rounds {
        for number in &mut numbers {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            *number = seed;
        }
        for i in 1..numbers.len() {
            let mut j = i;
            while j > 0 && numbers[j - 1] > numbers[j] {
                numbers.swap(j - 1, j);
                j -= 1;
            }
        }
        seed ^= numbers[5];
    }
    seed
}

/// Runs the loop, by a call that the compiler knows nothing about.
fn run(work: Loop, rounds: u64) -> u64 {
    black_box(work)(black_box(rounds))
}

fn now() -> u64 {
    // SAFETY: The instruction exists on every x86-64 CPU.
    unsafe { _rdtsc() }
}

/// Ticks of the time-stamp counter while the loop runs.
fn ticks(work: Loop, rounds: u64) -> u64 {
    let start = now();
    run(work, rounds);
    now() - start
}

/// How a loop is recorded.
struct Variant {
    name: &'static str,
    attr: Attr,
    /// An address filter.
    filter: Option<String>,
    /// The loop is to be in the trace.
    traced: bool,
}

impl Variant {
    /// All that the event's configuration says.
    fn all(name: &'static str, attr: Attr) -> Self {
        Self {
            name,
            attr,
            filter: None,
            traced: true,
        }
    }

    /// Ticks of the loop while it is recorded, with an AUX area that is a snapshot.
    fn ticks(&self, work: Loop, rounds: u64) -> Result<u64> {
        let event = self.attr.open()?;
        if let Some(filter) = &self.filter {
            event.set_filter(filter)?;
        }
        let ring = Ring::map(&event, 1)?;
        let _aux = ring.map_aux(&event, 64, AuxMode::Snapshot)?;
        event.enable()?;
        let time = ticks(work, rounds);
        event.disable()?;
        if self.traced && ring.aux_head() == 0 {
            return Err(Error::new("nothing was traced"));
        }
        Ok(time)
    }
}

/// How many instructions are traced, by the words that the `pattern` source writes.
fn steps(pmu: &Pmu, work: Loop, rounds: u64) -> Result<u64> {
    let pattern = pmu
        .config("pattern", 1)?
        .ok_or_else(|| Error::new("the PMU has no pattern source"))?;
    let event = pmu.event(pattern).open()?;
    let ring = Ring::map(&event, 1)?;
    let aux = ring.map_aux(&event, 1024, AuxMode::Full)?;
    event.enable()?;
    ticks(work, rounds);
    event.disable()?;
    let bytes = ring.aux_head();
    if bytes >= aux.size() as u64 {
        return Err(Error::new("the pattern does not fit into the AUX area"));
    }
    Ok(bytes / 8)
}

fn failed<T>(what: &str) -> Result<T> {
    Err(Error::last_os(what.to_owned()))
}

fn wait_stopped(pid: i32) -> Result<()> {
    let mut status = 0;
    // SAFETY: waitpid() writes one status.
    if unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) } != pid {
        return failed("waitpid");
    }
    match libc::WIFSTOPPED(status) {
        true => Ok(()),
        false => Err(Error::new(format!("the stepped child ended: {status:#x}"))),
    }
}

/// Makes so many steps as a debugger does: PTRACE_SINGLESTEP, waitpid(), PTRACE_GETREGS. Returns
/// the address after the last.
fn step(pid: i32, count: usize) -> Result<u64> {
    // SAFETY: All zeros is a value of this plain data.
    let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    for _ in 0..count {
        // SAFETY: The request takes numbers.
        if unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, pid, 0usize, 0usize) } < 0 {
            return failed("PTRACE_SINGLESTEP");
        }
        wait_stopped(pid)?;
        // SAFETY: The request writes one `user_regs_struct`.
        if unsafe { libc::ptrace(libc::PTRACE_GETREGS, pid, 0usize, &raw mut regs) } < 0 {
            return failed("PTRACE_GETREGS");
        }
    }
    Ok(regs.rip)
}

/// The least ticks of a ptrace stepper for [`PTRACE_STEPS`], with the child on one CPU.
fn stepped(work: Loop, cpu: usize) -> Result<u64> {
    // SAFETY: This process has one thread, so the child may do anything.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return failed("fork");
    }
    if pid == 0 {
        let pinned = pin(cpu).is_ok();
        // SAFETY: Plain numbers.
        unsafe {
            if !pinned || libc::ptrace(libc::PTRACE_TRACEME, 0, 0usize, 0usize) < 0 {
                libc::_exit(1);
            }
            libc::raise(libc::SIGSTOP);
            run(work, u64::MAX >> 1);
            libc::_exit(0)
        }
    }
    let result = wait_stopped(pid).and_then(|()| {
        while step(pid, 1)? != work as usize as u64 {}
        least(TIMES, || {
            let start = now();
            step(pid, PTRACE_STEPS)?;
            Ok(now() - start)
        })
    });
    // SAFETY: The child is ours and not waited for yet.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, ptr::null_mut(), libc::__WALL);
    }
    result
}

/// The loops, each with the rounds that make some 100,000 instructions.
const LOOPS: [(&str, Loop, u64); 4] = [
    ("branches", branches, 14_000),
    ("straight code", straight, 3_100),
    ("indirect branches", indirect, 12_500),
    ("sort", sort, 300),
];

/// The least of so many times.
fn least(times: usize, mut time: impl FnMut() -> Result<u64>) -> Result<u64> {
    (0..times).try_fold(u64::MAX, |least, _| Ok(least.min(time()?)))
}

/// Counts of instructions hardly vary.
const COUNTS: usize = 5;

/// How many times the rounds of a traced loop one runs that isn't stepped.
const PAUSED: u64 = 100;

/// What recording adds to an instruction of the loop, of which `rounds` have `steps`; and how many
/// times as long the loop takes.
fn cost(variant: &Variant, work: Loop, rounds: u64, steps: u64) -> Result<(f64, f64)> {
    let all = least(COUNTS, || variant.ticks(work, rounds))?;
    let none = least(COUNTS, || variant.ticks(work, 0))?;
    let untraced = least(COUNTS, || Ok(ticks(work, rounds)))?;
    let added = all.saturating_sub(none).saturating_sub(untraced);
    Ok((added as f64 / steps as f64, all as f64 / untraced as f64))
}

/// What a debug exception costs that leads to nothing but a count.
fn exception() -> Result<f64> {
    const HITS: u64 = 10_000;
    let address = &raw const step_cost_straight_round as u64;
    let event = Attr::exec_breakpoint(address, 0)
        .user_only()
        .disabled()
        .open()?;
    let time = |rounds: u64| -> Result<u64> {
        event.enable()?;
        let time = ticks(straight, rounds);
        event.disable()?;
        Ok(time)
    };
    let before = event.count()?;
    time(HITS)?;
    let hits = event.count()? - before;
    if hits != HITS {
        return Err(Error::new(format!(
            "{hits} breakpoints hit, expected {HITS}"
        )));
    }
    let all = least(COUNTS, || time(HITS))?;
    let none = least(COUNTS, || time(0))?;
    let untraced = least(COUNTS, || Ok(ticks(straight, HITS)))?;
    Ok((all.saturating_sub(none).saturating_sub(untraced)) as f64 / HITS as f64)
}

fn pmu() -> Result<Pmu> {
    for name in ["intel_pt", "soft_pt"] {
        if let Some(pmu) = Pmu::find(name)? {
            return Ok(pmu);
        }
    }
    Err(Error::new("there is no PMU called intel_pt or soft_pt"))
}

/// Instructions of the guest for each step.
fn instructions(pmu: &Pmu) -> Result<()> {
    let field = |name: &str, value: u64| {
        pmu.config(name, value)?
            .ok_or_else(|| Error::new(format!("the PMU has no {name}")))
    };
    let own = std::env::current_exe()
        .map_err(|error| Error::new(format!("the path of this program: {error}")))?;
    let variants = [
        Variant::all("packets", pmu.event(0)),
        Variant::all("no packets", pmu.event(field("pt", 1)?)),
        Variant::all("pattern", pmu.event(field("pattern", 1)?)),
        Variant {
            filter: Some(format!("filter 0/1@{}", own.display())),
            traced: false,
            ..Variant::all("outside of a filter", pmu.event(0))
        },
    ];
    let paused = Variant {
        traced: false,
        ..Variant::all("paused", pmu.event(0).aux_start_paused())
    };
    let exception = exception()?;
    eprintln!(
        "{:<20} {:<20} {exception:8.1}",
        "debug exception", "breakpoint"
    );
    println!(
        r#"{{"what":"debug exception","variant":"counting breakpoint","instructions":{exception:.1}}}"#
    );
    for (what, work, rounds) in LOOPS {
        let steps = steps(pmu, work, rounds)? - steps(pmu, work, 0)?;
        for variant in &variants {
            let (cost, _) = cost(variant, work, rounds, steps)?;
            let variant = variant.name;
            eprintln!("{what:<20} {variant:<20} {cost:8.1}");
            println!(
                r#"{{"what":"{what}","variant":"{variant}","steps":{steps},"instructions":{cost:.1}}}"#
            );
        }
        // Long, so that what little there is, which comes with timer ticks and the like, is seen.
        let steps = steps * PAUSED;
        let (cost, ratio) = cost(&paused, work, rounds * PAUSED, steps)?;
        eprintln!(
            "{what:<20} {:<20} {cost:8.1} {ratio:.4} times untraced",
            "paused"
        );
        println!(
            r#"{{"what":"{what}","variant":"paused","steps":{steps},"instructions":{cost:.1},"ratio":{ratio:.4}}}"#
        );
    }
    Ok(())
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Steps that are timed at once under ptrace, and the part of a loop that is when traced. Both take
/// about a millisecond, so that the least of many times is one in which nothing else ran.
const PTRACE_STEPS: usize = 8;
const TRACED_PART: u64 = 200;
const TIMES: usize = 40;
/// How much more the untraced loop runs than the traced one.
const UNTRACED: u64 = 200;
/// Rounds of all three, of which the median is reported.
const ROUNDS: usize = 9;

/// Instructions per second, and the ratios to a ptrace stepper and to the same untraced.
fn speed(pmu: &Pmu) -> Result<()> {
    let cpus = perf_aux::load::cpus()?;
    let (Some(&own), Some(&other)) = (cpus.first(), cpus.last()) else {
        return Err(Error::new("no CPU"));
    };
    pin(own)?;
    // An event that is there all the time spares the kernel to patch the switch for task events out
    // and in again.
    let _held = Attr::software(perf_aux::abi::PERF_COUNT_SW_DUMMY).open()?;
    let (since, begin) = (Instant::now(), now());
    for (what, work, rounds) in LOOPS {
        let steps = steps(pmu, work, rounds)? - steps(pmu, work, 0)?;
        let part = (rounds / TRACED_PART).max(1);
        let (mut traced, mut untraced, mut ptraced) = (vec![], vec![], vec![]);
        let (mut to_ptrace, mut to_untraced) = (vec![], vec![]);
        for _ in 0..ROUNDS {
            // On one CPU, or on one each: whichever is faster.
            let by_ptrace = stepped(work, own)?.min(stepped(work, other)?);
            let event = pmu.event(0).open()?;
            let ring = Ring::map(&event, 1)?;
            let _aux = ring.map_aux(&event, 64, AuxMode::Snapshot)?;
            event.enable()?;
            let by_trace = least(TIMES, || Ok(ticks(work, part)))?;
            event.disable()?;
            if ring.aux_head() == 0 {
                return Err(Error::new("nothing was traced"));
            }
            let bare = least(TIMES, || Ok(ticks(work, part * UNTRACED)))?;

            let per_tick = |steps: u64, ticks: u64| steps as f64 / ticks as f64;
            let by_ptrace = per_tick(PTRACE_STEPS as u64, by_ptrace);
            let by_trace = per_tick(steps * part / rounds, by_trace);
            let bare = per_tick(steps * part / rounds * UNTRACED, bare);
            to_ptrace.push(by_trace / by_ptrace);
            to_untraced.push(bare / by_trace);
            traced.push(by_trace);
            untraced.push(bare);
            ptraced.push(by_ptrace);
        }
        let per_second = (now() - begin) as f64 / since.elapsed().as_secs_f64();
        let lowest = to_ptrace.iter().copied().fold(f64::MAX, f64::min);
        let highest = to_ptrace.iter().copied().fold(0f64, f64::max);
        let [traced, untraced, ptraced] =
            [traced, untraced, ptraced].map(|per_tick| median(per_tick) * per_second);
        let (to_ptrace, to_untraced) = (median(to_ptrace), median(to_untraced));
        eprintln!(
            "{what:<18} {traced:8.0}/s traced, {ptraced:6.0}/s by ptrace, {untraced:.1e}/s untraced; \
             {to_ptrace:6.1} times ptrace ({lowest:.1} to {highest:.1}), 1/{to_untraced:.0} of untraced"
        );
        for (variant, per_second) in [
            ("traced", traced),
            ("ptrace", ptraced),
            ("untraced", untraced),
        ] {
            println!(r#"{{"what":"{what}","variant":"{variant}","per_second":{per_second:.0}}}"#);
        }
        println!(
            r#"{{"what":"{what}","variant":"traced to ptrace","ratio":{to_ptrace:.1},"least":{lowest:.1},"most":{highest:.1}}}"#
        );
        println!(r#"{{"what":"{what}","variant":"untraced to traced","ratio":{to_untraced:.1}}}"#);
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result =
        pmu().and_then(
            |pmu| match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["instructions"] => instructions(&pmu),
                ["speed"] => speed(&pmu),
                _ => Err(Error::new("usage: step_cost instructions|speed")),
            },
        );
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("step_cost: {error}");
            ExitCode::FAILURE
        }
    }
}
