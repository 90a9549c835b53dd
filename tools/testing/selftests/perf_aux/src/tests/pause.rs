// SPDX-License-Identifier: GPL-2.0

//! AUX pause and resume (`attr.aux_action`): who may ask for it, from where it works, and that
//! nothing is traced meanwhile.
//!
//! Where there is a source that counts instructions, the words that a test finds in the AUX area
//! are the instructions that its events let through.

use super::faults::{
    faults,
    Pages, //
};
use super::source::Source;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::record::Record;
use perf_aux::ring::{
    Aux,
    AuxMode,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    fail,
    skip,
    Attr,
    Ctx,
    Event,
    Outcome,
    Stop,
    Test, //
};
use std::arch::asm;
use std::fs;
use std::os::fd::AsRawFd;
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("pause.refused", refused),
    Test::new("pause.start_paused", start_paused),
    Test::new("pause.from_page_fault", |ctx| each_way(ctx, Place::Fault)),
    Test::new("pause.from_clock", |ctx| each_way(ctx, Place::Clock)),
    Test::new("pause.from_user_breakpoint", |ctx| {
        each_way(ctx, Place::UserBreakpoint)
    }),
    Test::new("pause.from_kernel_breakpoint", |ctx| {
        each_way(ctx, Place::KernelBreakpoint)
    }),
    Test::new("pause.survives_disable", survives_disable),
    Test::new("pause.samples", samples),
    Test::new("pause.one_task_of_two", one_task_of_two).limit(120),
    Test::new("pause.leader_closed_first", leader_closed_first),
    Test::new("pause.area_unmapped_first", area_unmapped_first),
    Test::new("pause.races", races).limit(120),
];

/// The source, if its PMU can be paused.
fn source(ctx: &Ctx) -> Result<Source, Stop> {
    let source = Source::new(ctx)?;
    let leader = source.pmu.event(source.config).aux_start_paused();
    match leader.open() {
        Ok(_) => Ok(source),
        Err(error) if error.errno() == Some(libc::EOPNOTSUPP) => {
            skip!("{} can't be paused", source.pmu.name())
        }
        Err(error) => Err(error.into()),
    }
}

fn clock() -> Attr {
    Attr::cpu_clock(1_000_000).user_only()
}

fn expect_errno(attr: &Attr, errno: i32, what: &str) -> Outcome {
    match attr.open() {
        Ok(_) => fail!("{what}: opened"),
        Err(error) => check_eq!(error.errno(), Some(errno), "errno, {what}"),
    }
    Ok(())
}

/// Only a member of a group whose leader's PMU can be paused may pause it, and only such a leader
/// may start paused.
fn refused(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    let fds = sys::open_fds()?;
    let leader = source.pmu.event(source.config).open()?;
    let plain = Attr::cpu_clock(0).user_only().disabled().open()?;
    let both = clock().aux_pause().aux_resume();
    expect_errno(&both.group(&leader), libc::EINVAL, "pause and resume")?;
    for (name, action) in [
        ("pause", Attr::aux_pause as fn(Attr) -> Attr),
        ("resume", Attr::aux_resume),
    ] {
        let event = || action(clock());
        expect_errno(&event(), libc::EINVAL, &format!("{name}, no group"))?;
        expect_errno(
            &event().group(&plain),
            libc::EINVAL,
            &format!("{name} of a leader that can't"),
        )?;
        expect_errno(
            &action(source.pmu.event(source.config)),
            libc::EINVAL,
            &format!("{name} of itself"),
        )?;
        expect_errno(
            &event().aux_output().group(&leader),
            libc::EOPNOTSUPP,
            &format!("{name} with aux_output"),
        )?;
        event().group(&leader).open()?;
    }
    expect_errno(
        &clock().aux_start_paused(),
        libc::EOPNOTSUPP,
        "start paused, a PMU that can't be",
    )?;
    drop((leader, plain));
    check_eq!(sys::open_fds()?, fds, "open descriptors");
    Ok(())
}

/// A loop of `2 * rounds` instructions in user mode.
fn rounds(rounds: u64) {
    // SAFETY: Counts a register down.
    unsafe {
        asm!("2: dec {n}", "jnz 2b", n = inout(reg) rounds.max(1) => _, options(nomem, nostack))
    };
}

/// A thousand such rounds, and so many more that a source which a timer writes gets its time.
fn some_rounds(source: &Source) {
    rounds(1000);
    source.spin(0);
}

/// Where the breakpoints that resume and pause are. Far enough from anything else that is run.
#[inline(never)]
extern "C" fn resume_here() {
    // SAFETY: No effect.
    unsafe { asm!("nop", options(nomem, nostack)) };
}

#[inline(never)]
extern "C" fn pause_here() {
    // SAFETY: No effect.
    unsafe { asm!("nop", "nop", options(nomem, nostack)) };
}

/// A leader with a writable area that starts paused, switched off.
struct Paused {
    aux: Aux,
    ring: Ring,
    leader: Event,
    by_instruction: bool,
}

impl Paused {
    fn new(source: &Source) -> Result<Self, Stop> {
        Self::of(source, source.pmu.event(source.config))
    }

    fn of(source: &Source, leader: Attr) -> Result<Self, Stop> {
        let leader = leader.aux_start_paused().open()?;
        let ring = Ring::map(&leader, 8)?;
        let aux = ring.map_aux(&leader, 1024, AuxMode::Full)?;
        Ok(Paused {
            aux,
            ring,
            leader,
            by_instruction: source.by_instruction,
        })
    }

    /// Runs `work` with the leader switched on. Returns by how many bytes the trace has grown.
    fn run(&self, work: impl FnOnce()) -> Result<u64, Stop> {
        let before = self.ring.aux_head();
        self.leader.enable()?;
        work();
        self.leader.disable()?;
        let grown = self.ring.aux_head() - before;
        self.ring.set_aux_tail(self.ring.aux_head());
        Ok(grown)
    }

    /// Fails unless the trace has grown by at least so many instructions, as far as it tells.
    fn check_some(&self, grown: u64, least: u64, what: &str) -> Outcome {
        let least = if self.by_instruction { 8 * least } else { 1 };
        check!(
            grown >= least,
            "{grown} bytes of trace {what}, expected {least} or more"
        );
        Ok(())
    }
}

/// An event that starts paused writes nothing at all, nor does it make records, however often it is
/// switched on; the area stays as it was mapped.
fn start_paused(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    let mut paused = Paused::new(&source)?;
    for round in 0..20 {
        let grown = paused.run(|| rounds(10_000 * round))?;
        check_eq!(grown, 0, "bytes of trace in round {round}");
    }
    check!(
        paused.aux.all().iter().all(|byte| *byte == 0),
        "bytes in the AUX area"
    );
    for record in paused.ring.drain()? {
        if let Record::Aux { size, flags, .. } = record {
            fail!("an AUX record of {size} bytes, flags {flags:#x}");
        }
    }
    // The same area is good for a trace.
    let _resumer = Place::Fault.open(End::Resume, &paused.leader)?;
    let mut memory = Pages::new(1)?;
    let grown = paused.run(|| {
        memory.fault();
        some_rounds(&source);
    })?;
    paused.check_some(grown, 2000, "after a resume")
}

/// What resumes and pauses, and hence in which context of the kernel it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A task that is in the kernel, interrupts on.
    Fault,
    /// A timer's interrupt.
    Clock,
    /// A debug exception from user mode.
    UserBreakpoint,
    /// A debug exception from kernel mode, which is like an NMI.
    KernelBreakpoint,
}

/// The address of a function of the kernel.
fn kernel_address(name: &str) -> Result<u64, Stop> {
    if !sys::is_root() {
        skip!("only root may see the addresses of the kernel and set breakpoints there");
    }
    let symbols = fs::read_to_string("/proc/kallsyms")
        .map_err(|e| perf_aux::Error::from_io("reading /proc/kallsyms", &e))?;
    let address = symbols.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let address = u64::from_str_radix(words.next()?, 16).ok()?;
        (words.nth(1)? == name).then_some(address)
    });
    match address {
        None | Some(0) => skip!("/proc/kallsyms does not tell the address of {name}"),
        Some(address) => Ok(address),
    }
}

impl Place {
    /// The event that resumes or pauses its leader.
    fn event(self, end: End) -> Result<Attr, Stop> {
        let event = match self {
            Place::Fault => faults(1).with(|attr| attr.set_disabled(0)),
            Place::Clock => Attr::cpu_clock(500_000).user_only(),
            Place::UserBreakpoint => {
                let at = match end {
                    End::Resume => resume_here as usize,
                    End::Pause => pause_here as usize,
                };
                Attr::exec_breakpoint(at as u64, 1).user_only()
            }
            Place::KernelBreakpoint => {
                let name = match end {
                    End::Resume => "__x64_sys_getppid",
                    End::Pause => "__x64_sys_getpgid",
                };
                Attr::exec_breakpoint(kernel_address(name)?, 1)
                    .exclude_user()
                    .exclude_hv()
            }
        };
        Ok(match end {
            End::Resume => event.aux_resume(),
            End::Pause => event.aux_pause(),
        })
    }

    /// The same, as a member of this leader's group.
    fn open(self, end: End, leader: &Event) -> Result<Event, Stop> {
        Ok(self.event(end)?.group(leader).open()?)
    }

    /// Makes it overflow, more than once, since an emulated breakpoint may be passed over.
    fn trigger(self, end: End, memory: &mut Pages) {
        for _ in 0..20 {
            match (self, end) {
                (Place::Fault, _) => {
                    memory.fault();
                }
                (Place::Clock, _) => {
                    load::spin_for(Duration::from_millis(1));
                }
                (Place::UserBreakpoint, End::Resume) => resume_here(),
                (Place::UserBreakpoint, End::Pause) => pause_here(),
                // SAFETY: No preconditions.
                (Place::KernelBreakpoint, End::Resume) => unsafe {
                    libc::syscall(libc::SYS_getppid);
                },
                // SAFETY: As above.
                (Place::KernelBreakpoint, End::Pause) => unsafe {
                    libc::syscall(libc::SYS_getpgid, 0);
                },
            }
        }
    }
}

/// The two things that an event can do to the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Resume,
    Pause,
}

/// More than what a test's own steps between two places take, and less than what it lets run
/// meanwhile.
const LONG: u64 = 200_000;

/// Resuming and pausing from one context, each with the other end in a task.
fn each_way(ctx: &Ctx, place: Place) -> Outcome {
    let source = source(ctx)?;
    let other = match place {
        Place::Fault => Place::UserBreakpoint,
        _ => Place::Fault,
    };
    for (resume, pause) in [(place, other), (other, place)] {
        let paused = Paused::new(&source)?;
        let resumer = resume.open(End::Resume, &paused.leader)?;
        let mut memory = Pages::new(100)?;

        let grown = paused.run(|| {
            resume.trigger(End::Resume, &mut memory);
            some_rounds(&source);
        })?;
        paused.check_some(grown, 2000, &format!("resumed by {resume:?}"))?;

        // From here on it is paused again and again, and never resumed.
        drop(resumer);
        let _pauser = pause.open(End::Pause, &paused.leader)?;
        let grown = paused.run(|| {
            pause.trigger(End::Pause, &mut memory);
            rounds(LONG);
        })?;
        ctx.diag(format!(
            "resumed by {resume:?}, paused by {pause:?}: {grown} bytes until then"
        ));
        if source.by_instruction {
            check!(
                grown < 8 * LONG,
                "{grown} bytes of trace, of which {LONG} rounds came after the pause by {pause:?}"
            );
        }
        let grown = paused.run(|| rounds(LONG))?;
        check_eq!(grown, 0, "bytes of trace after a pause by {pause:?}");
    }
    Ok(())
}

/// Whether the trace is paused outlives that the event is switched off.
fn survives_disable(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    let paused = Paused::new(&source)?;
    let _resumer = Place::UserBreakpoint.open(End::Resume, &paused.leader)?;
    let _pauser = Place::UserBreakpoint.open(End::Pause, &paused.leader)?;
    let mut memory = Pages::new(1)?;
    for round in 0..10 {
        let grown = paused.run(|| rounds(LONG))?;
        check_eq!(grown, 0, "bytes while paused, round {round}");
        let grown = paused.run(|| {
            Place::UserBreakpoint.trigger(End::Resume, &mut memory);
            source.spin(0);
        })?;
        paused.check_some(grown, 1, "when resumed")?;
        let grown = paused.run(|| some_rounds(&source))?;
        paused.check_some(grown, 2000, "still resumed")?;
        paused.run(|| Place::UserBreakpoint.trigger(End::Pause, &mut memory))?;
    }
    Ok(())
}

fn exit() -> ! {
    std::process::exit(1)
}

/// Samples of a trace that is paused: those bytes that there are, and all of them of the model.
fn samples(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    let mut setup = source.setup();
    setup.leader = setup.leader.aux_start_paused();
    let mut group = setup.open()?;
    let _resumer = Place::UserBreakpoint.open(End::Resume, &group.leader)?;
    let _pauser = Place::UserBreakpoint.open(End::Pause, &group.leader)?;
    let mut memory = Pages::new(1)?;
    group.run(|| load::spin_for(Duration::from_millis(50)))?;
    for sample in group.samples()? {
        check!(
            sample.aux.iter().flatten().all(|byte| *byte == 0),
            "trace in a sample before the first resume"
        );
    }
    for round in 0..10 {
        group.run(|| {
            Place::UserBreakpoint.trigger(End::Resume, &mut memory);
            load::spin_for(Duration::from_millis(20));
            Place::UserBreakpoint.trigger(End::Pause, &mut memory);
            load::spin_for(Duration::from_millis(20));
        })?;
        let samples = group.samples()?;
        check!(!samples.is_empty(), "no samples in round {round}");
        source.check_all(&samples)?;
        let last = samples.last().and_then(|sample| sample.aux.as_ref());
        check!(
            last.is_some_and(|aux| aux.iter().any(|byte| *byte != 0)),
            "no trace in the last sample of round {round}, which was taken while paused"
        );
    }
    Ok(())
}

/// An event and its copy in a child are paused each on its own, also when one task is switched for
/// the other directly, with which the kernel may swap their events.
fn one_task_of_two(ctx: &Ctx) -> Outcome {
    const TURNS: u64 = 50;
    const PARENT: u64 = 100_000;

    let source = source(ctx)?;
    source.needs_instructions()?;
    // Mapping an inherited event needs a CPU; and only on one CPU are they switched directly.
    let cpu = load::cpus()?[0];
    load::pin(cpu)?;
    let (child_waits, child_goes) = load::pipe()?;
    let (parent_waits, parent_goes) = load::pipe()?;
    let turn = |wait: &std::os::fd::OwnedFd| {
        let mut byte = 0u8;
        // SAFETY: One byte of live memory.
        unsafe { libc::read(wait.as_raw_fd(), (&raw mut byte).cast(), 1) == 1 }
    };
    let pass = |go: &std::os::fd::OwnedFd| {
        // SAFETY: As above.
        unsafe { libc::write(go.as_raw_fd(), [1u8].as_ptr().cast(), 1) == 1 }
    };
    let mut parent = Child::new(|| {
        let child = Child::new(|| {
            // The only one that resumes.
            Place::UserBreakpoint
                .trigger(End::Resume, &mut Pages::new(1).unwrap_or_else(|_| exit()));
            for _ in 0..TURNS {
                if !turn(&child_waits) || !pass(&parent_goes) {
                    return 1;
                }
            }
            0
        });
        let Ok(mut child) = child else { return 2 };
        if child.go().is_err() {
            return 3;
        }
        for _ in 0..TURNS {
            rounds(PARENT);
            if !pass(&child_goes) || !turn(&parent_waits) {
                return 4;
            }
        }
        child.wait().unwrap_or(5)
    })?;
    let leader = source.pmu.event(source.config).inherit();
    let leader = leader.pid(parent.pid()).cpu(cpu as i32);
    let paused = Paused::of(&source, leader)?;
    let resumer = Place::UserBreakpoint.event(End::Resume)?;
    let resumer = resumer.inherit().pid(parent.pid()).cpu(cpu as i32);
    let _resumer = resumer.group(&paused.leader).open()?;
    paused.leader.enable()?;
    parent.go()?;
    check_eq!(parent.wait()?, 0, "exit status of the parent");
    paused.leader.disable()?;
    let words = paused.ring.aux_head() / 8;
    ctx.diag(format!("{words} instructions traced"));
    check!(
        words > TURNS,
        "only {words} instructions of the child traced"
    );
    // Of one turn of the parent there would be twice as many.
    check!(
        words < PARENT,
        "{words} instructions traced, of which the child has a few hundred a turn: \
         there are the parent's among them"
    );
    Ok(())
}

/// When the leader is closed nothing is left to be resumed or paused.
fn leader_closed_first(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    for place in [Place::Fault, Place::Clock, Place::UserBreakpoint] {
        let paused = Paused::new(&source)?;
        let resumer = place.open(End::Resume, &paused.leader)?;
        let pauser = Place::Clock.open(End::Pause, &paused.leader)?;
        let mut memory = Pages::new(100)?;
        paused.leader.enable()?;
        place.trigger(End::Resume, &mut memory);
        let Paused {
            aux, ring, leader, ..
        } = paused;
        drop(leader);
        place.trigger(End::Resume, &mut memory);
        drop((aux, ring));
        place.trigger(End::Resume, &mut memory);
        drop(pauser);
        place.trigger(End::Resume, &mut memory);
        drop(resumer);
    }
    // The PMU is as good as ever.
    start_paused(ctx)
}

/// When the AUX area is unmapped first, an event without one is resumed and paused.
fn area_unmapped_first(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    for place in [Place::Fault, Place::Clock, Place::UserBreakpoint] {
        let paused = Paused::new(&source)?;
        let _resumer = place.open(End::Resume, &paused.leader)?;
        let _pauser = Place::Clock.open(End::Pause, &paused.leader)?;
        let mut memory = Pages::new(100)?;
        let Paused {
            aux, ring, leader, ..
        } = paused;
        leader.enable()?;
        place.trigger(End::Resume, &mut memory);
        drop(aux);
        place.trigger(End::Resume, &mut memory);
        let aux = ring.map_aux(&leader, 16, AuxMode::Snapshot)?;
        leader.disable()?;
        leader.enable()?;
        place.trigger(End::Resume, &mut memory);
        drop(ring);
        place.trigger(End::Resume, &mut memory);
        drop(aux);
        place.trigger(End::Resume, &mut memory);
        leader.disable()?;
    }
    start_paused(ctx)
}

/// Everything at once: resumes and pauses from all contexts, samples in between, and the leader on
/// and off. What is sampled is of the model all the time.
fn races(ctx: &Ctx) -> Outcome {
    let source = source(ctx)?;
    let mut setup = source.setup();
    setup.leader = setup.leader.aux_start_paused();
    setup.sampler = Attr::cpu_clock(310_000)
        .user_only()
        .sample_type(setup.sampler.raw().sample_type)
        .aux_sample_size(1024);
    let mut group = setup.open()?;
    let mut events = Vec::new();
    let mut kernel = true;
    for (attr, action) in [
        (
            Attr::cpu_clock(137_000).user_only(),
            Attr::aux_resume as fn(Attr) -> Attr,
        ),
        (Attr::cpu_clock(211_000).user_only(), Attr::aux_pause),
        (Attr::task_clock(173_000).user_only(), Attr::aux_resume),
        (faults(1).with(|attr| attr.set_disabled(0)), Attr::aux_pause),
    ] {
        events.push(action(attr).group(&group.leader).open()?);
    }
    for end in [End::Resume, End::Pause] {
        match Place::KernelBreakpoint.open(end, &group.leader) {
            Ok(event) => events.push(event),
            Err(Stop::Skip(why)) => {
                kernel = false;
                ctx.diag(format!("without breakpoints in the kernel: {why}"));
            }
            Err(stop) => return Err(stop),
        }
    }
    let mut memory = Pages::new(10_000)?;
    let end = Instant::now() + Duration::from_secs(10);
    let (mut cycles, mut seen) = (0u64, 0);
    while Instant::now() < end {
        group.leader.enable()?;
        for step in 0..20 {
            rounds(50 + 37 * ((cycles + step) % 11));
            if step % 3 == 0 {
                memory.fault();
            }
            if kernel {
                // SAFETY: No preconditions.
                unsafe {
                    libc::syscall(libc::SYS_getppid);
                    libc::syscall(libc::SYS_getpgid, 0);
                }
            }
        }
        if cycles % 2 == 0 {
            load::spin_for(Duration::from_millis(2));
        }
        group.leader.disable()?;
        let samples = group.samples()?;
        source.check_all(&samples)?;
        seen += samples.len();
        cycles += 1;
    }
    ctx.diag(format!("{cycles} cycles, {seen} samples"));
    check!(seen > 20, "only {seen} samples in {cycles} cycles");
    drop(events);
    Ok(())
}
