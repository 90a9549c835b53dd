// SPDX-License-Identifier: GPL-2.0

//! Things that happen to a group from one side while another is at work on it. What is checked
//! afterwards is that it still works; that samples were right all the time; and, as in every test,
//! that the kernel had nothing to complain about.

use super::source::Source;
use perf_aux::group::{
    AuxGroup,
    Setup, //
};
use perf_aux::ktap::Random;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::ring::{
    AuxMode,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    skip,
    Ctx,
    Error,
    Outcome,
    Result,
    Stop,
    Test, //
};
use std::fs;
use std::sync::atomic::{
    AtomicPtr,
    AtomicU64,
    Ordering, //
};
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("race.calls", calls).limit(120),
    Test::new("race.close_leader_first", close_leader_first).limit(120),
    Test::new("race.shared_descriptor", shared_descriptor).limit(120),
    Test::new("race.family", family).limit(180),
    Test::new("race.signals", signals).limit(120),
    Test::new("race.migration", migration).limit(120),
    Test::new("race.debugger", debugger).limit(120),
    Test::new("race.cpu_goes_away", cpu_goes_away).limit(180),
];

const SOON: Duration = Duration::from_secs(20);

/// A child that does a little of everything: user mode, system calls, faults, sleep.
fn busy_child(cpu: Option<usize>) -> Result<Child> {
    Child::new(move || {
        if cpu.is_some_and(|cpu| load::pin(cpu).is_err()) {
            return 1;
        }
        loop {
            load::spin(200);
            if let Ok(mut memory) = super::faults::Pages::new(4) {
                while memory.fault() {}
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    })
}

/// The group of a child, on any CPU.
fn group_of(source: &Source, child: &Child, period_ns: u64) -> Result<AuxGroup> {
    let base = source.setup();
    Setup {
        leader: base.leader.clone().pid(child.pid()),
        sampler: base
            .sampler
            .clone()
            .pid(child.pid())
            .sample_period(period_ns)
            .aux_sample_size(1024),
        ..base
    }
    .open()
}

/// Every sample is empty, or has what it asked for, and that is right.
fn check_samples(source: &Source, group: &mut AuxGroup) -> std::result::Result<usize, Stop> {
    let samples = group.samples()?;
    for sample in &samples {
        let aux = sample.aux.as_ref().map_or(0, Vec::len);
        check!(aux == 1024 || aux == 0, "AUX bytes of a sample: {aux}");
        source.check(sample)?;
    }
    Ok(samples.len())
}

/// A new group on this task still works.
fn check_works(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut group = source.setup().open()?;
    let samples = group.sample(3, SOON)?;
    check!(samples.len() >= 3, "{} samples afterwards", samples.len());
    source.check_all(&samples)
}

/// ENABLE, DISABLE, REFRESH, RESET, PAUSE_OUTPUT and SET_OUTPUT in any order on both events, while
/// the child of which they are runs on another CPU.
fn calls(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    let cpus = load::cpus()?;
    load::pin(cpus[0])?;
    let mut child = busy_child(cpus.last().copied())?;
    let mut group = group_of(&source, &child, 1_000_000)?;
    child.go()?;
    group.leader.enable()?;
    let end = Instant::now() + ctx.time(Duration::from_secs(4));
    let (mut made, mut samples) = (0, 0);
    while Instant::now() < end {
        for _ in 0..20 {
            let event = match random.below(2) {
                0 => &group.leader,
                _ => &group.sampler,
            };
            // What is refused is as good as what is not.
            let _ = match random.below(12) {
                0..=3 => event.enable(),
                4 => event.disable(),
                5 => event.enable_group(),
                6 => event.disable_group(),
                7 => event.refresh(random.below(4) as u32),
                8 => event.reset(),
                9 => event.pause_output(random.below(2) == 0),
                10 => group.sampler.set_output(&group.leader),
                _ => event.read().map(|_| ()),
            };
            made += 1;
            if random.below(3) == 0 {
                std::thread::sleep(Duration::from_micros(random.below(2000)));
            }
        }
        let _ = group.sampler.pause_output(false);
        samples += check_samples(&source, &mut group)?;
        group.leader_ring.set_tail(group.leader_ring.head());
    }
    ctx.diag(format_args!("{made} calls, {samples} samples"));
    check!(samples > 0, "no sample among {made} calls");
    drop((group, child));
    check_works(ctx)
}

/// The leader is closed, or its area unmapped, under a sampler that goes on.
fn close_leader_first(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    for round in 0..ctx.rounds(60) {
        let mut child = busy_child(None)?;
        let AuxGroup {
            aux,
            leader_ring,
            ring,
            sampler,
            leader,
        } = group_of(&source, &child, 500_000)?;
        leader.enable()?;
        child.go()?;
        std::thread::sleep(Duration::from_micros(random.below(10_000)));
        match round % 3 {
            0 => drop((leader, leader_ring, aux)),
            1 => drop((aux, leader, leader_ring)),
            _ => drop((leader_ring, aux, leader)),
        }
        let _ = sampler.enable();
        std::thread::sleep(Duration::from_micros(random.below(5_000)));
        drop((sampler, ring));
    }
    check_works(ctx)
}

/// Two processes have the same descriptors and mappings of their own; one is killed in the middle
/// of using them.
fn shared_descriptor(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    let mut traced = busy_child(None)?;
    let mut group = group_of(&source, &traced, 1_000_000)?;
    traced.go()?;
    let mut samples = 0;
    for _ in 0..ctx.rounds(40) {
        let (leader, sampler) = (&group.leader, &group.sampler);
        let mut user = Child::new(|| loop {
            // Mappings are not inherited, but can be made from the descriptor.
            let Ok(ring) = Ring::map(leader, 8) else {
                return 1;
            };
            let _aux = ring.map_aux(leader, 16, AuxMode::Snapshot);
            let _ = leader.enable();
            let _ring = Ring::map(sampler, 64);
            std::thread::sleep(Duration::from_micros(200));
            let _ = leader.disable();
            let _ = sampler.enable();
        })?;
        user.go()?;
        let end = Instant::now() + Duration::from_micros(random.below(20_000));
        while Instant::now() < end {
            group.leader.enable()?;
            samples += check_samples(&source, &mut group)?;
            group.leader_ring.set_tail(group.leader_ring.head());
        }
        user.signal(libc::SIGKILL)?;
        drop(user);
        // What is left of it is in order.
        group.leader.enable()?;
        samples += check_samples(&source, &mut group)?;
    }
    group.leader.enable()?;
    let end = Instant::now() + SOON;
    while samples == 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
        samples += check_samples(&source, &mut group)?;
    }
    check!(samples > 0, "no sample from two users of one descriptor");
    drop((group, traced));
    check_works(ctx)
}

/// Families of processes fork, exec, exit and get killed, all traced by inheritance.
fn family(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    let base = source.setup();
    let cpus = load::cpus()?;
    let (mut samples, mut families) = (0, 0);
    let end = Instant::now() + ctx.time(Duration::from_secs(6));
    while Instant::now() < end {
        let seed = random.any();
        let mut root = Child::new(move || {
            // SAFETY: no preconditions.
            unsafe { libc::setpgid(0, 0) };
            grow(seed, 0);
            0
        })?;
        let mut groups = Vec::new();
        for cpu in &cpus {
            let setup = Setup {
                leader: base
                    .leader
                    .clone()
                    .pid(root.pid())
                    .cpu(*cpu as i32)
                    .inherit(),
                sampler: base
                    .sampler
                    .clone()
                    .pid(root.pid())
                    .cpu(*cpu as i32)
                    .inherit()
                    .sample_period(1_000_000)
                    .aux_sample_size(1024),
                ..base.clone()
            };
            let group = setup.open()?;
            group.leader.enable()?;
            groups.push(group);
        }
        let pid = root.pid();
        root.go()?;
        std::thread::sleep(Duration::from_micros(20_000 + random.below(150_000)));
        if random.below(3) == 0 {
            groups.pop();
        }
        // SAFETY: the group is the child's, which is not reaped yet.
        unsafe { libc::kill(-pid, libc::SIGKILL) };
        drop(root);
        for group in &mut groups {
            samples += check_samples(&source, group)?;
        }
        drop(groups);
        families += 1;
    }
    ctx.diag(format_args!("{families} families, {samples} samples"));
    check!(samples > 0, "no sample of {families} families");
    check_works(ctx)
}

/// One member of a family: has children of its own, for a while.
fn grow(seed: u64, depth: u32) {
    let mut random = Random::new(seed);
    for _ in 0..12 {
        load::spin(random.below(2000));
        if depth > 3 {
            continue;
        }
        let what = random.below(5);
        let child = random.any();
        // SAFETY: the process has one thread. The child ends by `_exit` or exec, so it runs nothing
        // that its parent registered.
        let pid = unsafe { libc::fork() };
        match pid {
            0 => {
                if what == 0 {
                    let argv = [c"true".as_ptr(), std::ptr::null()];
                    // SAFETY: a string and a list that end as exec wants it.
                    unsafe { libc::execv(c"/bin/true".as_ptr(), argv.as_ptr()) };
                } else {
                    grow(child, depth + 1);
                }
                // SAFETY: no preconditions.
                unsafe { libc::_exit(0) };
            }
            1.. => {
                // SAFETY: the child is not reaped before.
                unsafe {
                    if what == 1 {
                        libc::kill(pid, libc::SIGKILL);
                    }
                    if what != 2 {
                        libc::waitpid(pid, std::ptr::null_mut(), 0);
                    }
                }
            }
            _ => {}
        }
    }
}

/// What the handlers of the child of [`signals`] count, in memory that its parent sees.
#[repr(C)]
struct Counts {
    ready: AtomicU64,
    handled: AtomicU64,
    stray: AtomicU64,
}

static COUNTS: AtomicPtr<Counts> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn on_signal(signal: libc::c_int) {
    // SAFETY: set to a live mapping before the handler was.
    let counts = unsafe { &*COUNTS.load(Ordering::Relaxed) };
    match signal {
        libc::SIGTRAP => counts.stray.fetch_add(1, Ordering::Relaxed),
        _ => counts.handled.fetch_add(1, Ordering::Relaxed),
    };
}

/// Signals from a timer and from another process hit a task that is stepped, with the tracing going
/// on and off at random. It handles all of them, and never one that nobody sent.
fn signals(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !source.pattern {
        skip!(
            "{} has no pattern source to count steps by",
            source.pmu.name()
        );
    }
    let mut random = ctx.random();
    // SAFETY: a new shared mapping touches no existing memory, and is zeroed, as counts are.
    let memory = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if memory == libc::MAP_FAILED {
        return Err(Error::last_os("mmap of a page").into());
    }
    COUNTS.store(memory.cast(), Ordering::Relaxed);
    // SAFETY: as mapped above; it stays until the process ends.
    let counts = unsafe { &*memory.cast::<Counts>() };
    let cpus = load::cpus()?;
    load::pin(cpus[0])?;
    let other = cpus.last().copied();
    let mut child = Child::new(move || {
        let every = libc::timeval {
            tv_sec: 0,
            tv_usec: 3000,
        };
        let timer = libc::itimerval {
            it_interval: every,
            it_value: every,
        };
        // SAFETY: the handler only counts; the timer is live.
        unsafe {
            let handler = on_signal as *const () as usize;
            for signal in [libc::SIGTRAP, libc::SIGALRM, libc::SIGUSR1] {
                libc::signal(signal, handler);
            }
            libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut());
        }
        if other.is_some_and(|cpu| load::pin(cpu).is_err()) {
            return 1;
        }
        counts.ready.store(1, Ordering::Relaxed);
        loop {
            load::spin(500);
            // SAFETY: no preconditions.
            unsafe { libc::getppid() };
        }
    })?;
    let mut group = group_of(&source, &child, 1_000_000)?;
    child.go()?;
    // A signal that comes before its handler would end the child.
    let ready = load::spin_until(Duration::from_secs(10), || {
        counts.ready.load(Ordering::Relaxed) == 1
    });
    check!(ready, "the child did not come to its loop");
    let wanted = ctx.rounds(100_000) as u64;
    let (mut steps, mut toggles, mut sent) = (0, 0, 0);
    while steps < wanted {
        child.check_alive()?;
        group.leader.enable()?;
        std::thread::sleep(Duration::from_micros(random.below(10_000)));
        for _ in 0..random.below(4) {
            child.signal(libc::SIGUSR1)?;
            sent += 1;
        }
        if random.below(2) == 0 {
            group.leader.disable()?;
            toggles += 1;
        }
        for sample in group.samples()? {
            steps = source.check(&sample)?.unwrap_or(0).max(steps);
        }
        let stray = counts.stray.load(Ordering::Relaxed);
        check_eq!(
            stray,
            0,
            "stray traps, after {steps} steps and {toggles} toggles"
        );
    }
    let handled = counts.handled.load(Ordering::Relaxed);
    ctx.diag(format_args!(
        "{steps} steps, {toggles} times off, {sent} signals sent, {handled} handled"
    ));
    check!(handled > 10, "{handled} signals were handled");
    child.check_alive()?;
    Ok(())
}

/// A task that is moved from CPU to CPU while it is traced and sampled.
fn migration(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    let cpus = load::cpus()?;
    if cpus.len() < 2 {
        skip!("needs two CPUs");
    }
    let mut child = Child::spinning(None)?;
    let mut group = group_of(&source, &child, 1_000_000)?;
    group.leader.enable()?;
    child.go()?;
    let (mut moves, mut samples) = (0, Vec::new());
    let end = Instant::now() + ctx.time(Duration::from_secs(3));
    while Instant::now() < end {
        move_to(child.pid(), cpus[random.below(cpus.len() as u64) as usize])?;
        moves += 1;
        std::thread::sleep(Duration::from_micros(random.below(3000)));
        samples.extend(group.samples()?);
    }
    group.leader.disable()?;
    samples.extend(group.samples()?);
    ctx.diag(format_args!("{moves} moves, {} samples", samples.len()));
    check!(samples.len() > 20, "{} samples", samples.len());
    for sample in &samples {
        let aux = sample.aux.as_ref().map_or(0, Vec::len);
        check_eq!(aux, 1024, "AUX bytes of a sample");
    }
    source.check_all(&samples)
}

/// Moves another process to a CPU.
fn move_to(pid: libc::pid_t, cpu: usize) -> Result<()> {
    // SAFETY: a CPU set is plain data, and the CPU is one of those that there are.
    let ret = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(pid, size_of::<libc::cpu_set_t>(), &set)
    };
    if ret < 0 {
        return Err(Error::last_os(format!("moving {pid} to CPU {cpu}")));
    }
    Ok(())
}

/// A debugger attaches to a traced task, steps it and lets it go, over and over. The task never
/// sees a trap, and the trace goes on.
fn debugger(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    let mut child = Child::spinning(None)?;
    let pid = child.pid();
    let mut group = group_of(&source, &child, 1_000_000)?;
    group.leader.enable()?;
    child.go()?;
    let ptrace = |request, data: usize| -> Result<()> {
        // SAFETY: none of the requests used here takes an address.
        let ret = unsafe { libc::ptrace(request, pid, 0, data) };
        if ret < 0 {
            return Err(Error::last_os(format!("ptrace({request}, {pid})")));
        }
        Ok(())
    };
    let stopped = |by: i32| -> Outcome {
        let mut status = 0;
        // SAFETY: `status` is live.
        let ret = unsafe { libc::waitpid(pid, &mut status, libc::__WALL) };
        check!(
            ret == pid && libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == by,
            "the traced task has status {status:#x}, expected a stop by signal {by}"
        );
        Ok(())
    };
    let (mut rounds, mut steps) = (0, 0);
    let end = Instant::now() + ctx.time(Duration::from_secs(4));
    while Instant::now() < end {
        ptrace(libc::PTRACE_ATTACH, 0)?;
        stopped(libc::SIGSTOP)?;
        for _ in 0..random.below(30) {
            ptrace(libc::PTRACE_SINGLESTEP, 0)?;
            stopped(libc::SIGTRAP)?;
            steps += 1;
            if random.below(10) == 0 {
                let _ = match random.below(2) {
                    0 => group.leader.disable(),
                    _ => group.leader.enable(),
                };
            }
        }
        ptrace(libc::PTRACE_DETACH, 0)?;
        group.leader.enable()?;
        std::thread::sleep(Duration::from_micros(random.below(5000)));
        check_samples(&source, &mut group)?;
        rounds += 1;
    }
    ctx.diag(format_args!("{rounds} debuggers, {steps} steps"));
    let end = Instant::now() + SOON;
    let mut samples = 0;
    while samples == 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
        samples = check_samples(&source, &mut group)?;
    }
    check!(samples > 0, "no sample after {rounds} debuggers");
    // It is still there, and not stopped.
    child.check_alive()?;
    Ok(())
}

/// A CPU is taken away and given back under the events that are on it.
fn cpu_goes_away(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("taking a CPU away needs root");
    }
    let cpus = load::cpus()?;
    let Some(cpu) = cpus.last().copied().filter(|cpu| *cpu > 0) else {
        skip!("needs two CPUs");
    };
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/online");
    let online = |value: &str| {
        fs::write(&file, value)
            .map_err(|e| Error::from_io(format!("writing {value} to {file}"), &e))
    };
    if fs::read_to_string(&file).is_err() {
        skip!("no {file}");
    }
    let base = source.setup();
    for round in 0..ctx.rounds(6) {
        let mut child = busy_child(None)?;
        // Of the CPU in one round, of a task that runs there in the next.
        let (pid, on) = match round % 2 {
            0 => (-1, cpu as i32),
            _ => (child.pid(), -1),
        };
        let setup = Setup {
            leader: base.leader.clone().pid(pid).cpu(on),
            sampler: base
                .sampler
                .clone()
                .pid(pid)
                .cpu(on)
                .sample_period(1_000_000)
                .aux_sample_size(1024),
            ..base.clone()
        };
        let mut group = setup.open()?;
        group.leader.enable()?;
        child.go()?;
        let _ = move_to(child.pid(), cpu);
        std::thread::sleep(Duration::from_millis(50));
        online("0")?;
        let mut away = || -> Outcome {
            let errno = base
                .leader
                .clone()
                .pid(-1)
                .cpu(cpu as i32)
                .open()
                .err()
                .and_then(|error| error.errno());
            check!(
                matches!(errno, Some(libc::ENODEV | libc::EBUSY)),
                "errno of an event of a CPU that is away: {errno:?}"
            );
            std::thread::sleep(Duration::from_millis(50));
            check_samples(&source, &mut group)?;
            Ok(())
        };
        let result = away();
        online("1")?;
        result?;
        let _ = group.leader.disable();
        let _ = group.leader.enable();
        std::thread::sleep(Duration::from_millis(50));
        check_samples(&source, &mut group)?;
        drop((group, child));
        // A new one has the CPU as before.
        let mut child = Child::spinning(Some(cpu))?;
        let mut group = Setup {
            leader: base.leader.clone().pid(child.pid()),
            sampler: base.sampler.clone().pid(child.pid()),
            ..base.clone()
        }
        .open()?;
        group.leader.enable()?;
        child.go()?;
        let end = Instant::now() + SOON;
        let mut samples = Vec::new();
        while samples.len() < 3 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
            samples.extend(group.samples()?);
        }
        check!(
            samples.len() >= 3,
            "{} samples on the CPU that came back",
            samples.len()
        );
        source.check_all(&samples)?;
    }
    Ok(())
}
