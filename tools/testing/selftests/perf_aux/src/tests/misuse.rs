// SPDX-License-Identifier: GPL-2.0

//! PMUs whose drivers do everything wrong that compiles (`misuse/rust_pmu_misuse.rs`): nothing
//! happens that the kernel warns of, and what is none of a driver's business stays right.
//!
//! The runner fails a test whose kernel log has a warning. A driver that is let in where it must
//! not be logs a line of its own, which is looked for here.

use perf_aux::abi;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::ring::{
    Aux,
    AuxMode,
    Ring, //
};
use perf_aux::sys::{
    self,
    module_refcount,
    KernelLog,
    Pmu, //
};
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
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("misuse.every_way", every_way).limit(300),
    Test::new("misuse.unprivileged", unprivileged).limit(300),
    Test::new("misuse.on_a_cpu", on_a_cpu).limit(120),
    Test::new("misuse.counts_in_start", counts_in_start),
    Test::new("misuse.one_ring", one_ring),
    Test::new("misuse.two_pmus", two_pmus),
    // It is gone after that.
    Test::new("misuse.removed_while_mapped", removed_while_mapped),
];

const MODULE: &str = "rust_pmu_misuse";

/// The bit of `wrong` by which `event_init` fails at times.
const INIT: u64 = 1 << 7;

/// The lines that the drivers log when they were let in.
struct Complaints(Option<KernelLog>);

impl Complaints {
    fn from_now() -> Self {
        Complaints(KernelLog::from_now())
    }

    fn check_none(&mut self) -> Outcome {
        let lines = self.0.as_mut().map(KernelLog::lines).unwrap_or_default();
        match lines.iter().find(|line| line.contains(MODULE)) {
            Some(line) => fail!("{line}"),
            None => Ok(()),
        }
    }
}

/// Something to do for all kinds of events: system calls, user mode, and switches of tasks.
fn work(rounds: u64) {
    for round in 0..rounds {
        // SAFETY: Changes nothing.
        unsafe { libc::getppid() };
        load::spin(200);
        if round % 16 == 0 {
            std::thread::yield_now();
        }
    }
}

/// What a driver does with an event that `attr` asks for, and with what belongs to it.
fn try_one(attr: &Attr, wrong: u64, mode: AuxMode) -> Outcome {
    let event = match attr.open() {
        Ok(event) => event,
        Err(error) if wrong & INIT != 0 && error.errno() == Some(libc::ENOSPC) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let ring = Ring::map(&event, 4)?;
    let aux = ring.map_aux(&event, 4, mode)?;
    let sampler = Attr::task_clock(50_000)
        .user_only()
        .sample_type(u64::from(abi::PERF_SAMPLE_AUX | abi::PERF_SAMPLE_IP))
        .aux_sample_size(8192)
        .group(&event)
        .open()?;
    sampler.set_output(&event)?;
    let clock = Attr::cpu_clock(70_000).user_only();
    let pauser = match wrong & 1 {
        0 => clock.aux_pause(),
        _ => clock.aux_resume(),
    };
    let _pauser = pauser.group(&event).open()?;
    event.enable()?;
    for _ in 0..3 {
        work(30);
        ring.set_aux_tail(ring.aux_head());
        check_eq!(event.read()?.len(), 1, "words of a read");
        event.disable()?;
        check!(
            mode == AuxMode::Full || ring.aux_head() < aux.size() as u64,
            "aux_head {:#x} of a snapshot area of {:#x}",
            ring.aux_head(),
            aux.size()
        );
        event.enable()?;
    }
    if wrong & 4 != 0 {
        drop(aux);
        work(10);
        drop(ring);
    } else {
        drop(ring);
        work(10);
        drop(aux);
    }
    Ok(())
}

/// Every mixture of misdeeds, with the area mapped either way.
fn all(ctx: &Ctx, attr: impl Fn(&Pmu, u64) -> Attr) -> Outcome {
    let pmu = Pmu::needed("misuse_chaos")?;
    let mut complaints = Complaints::from_now();
    for wrong in 0..256 {
        for mode in [AuxMode::Snapshot, AuxMode::Full] {
            let period = match wrong & 3 {
                1 | 3 => 1,
                2 => 3000,
                _ => 0,
            };
            let attr = attr(&pmu, wrong).sample_period(period);
            try_one(&attr, wrong, mode).map_err(|error| match error {
                Stop::Fail(what) => Stop::Fail(format!("wrong {wrong:#x}, {mode:?}: {what}")),
                other => other,
            })?;
        }
        if wrong % 16 == 0 {
            let event = attr(&pmu, wrong & !INIT).inherit().open()?;
            event.enable()?;
            let mut child = Child::new(|| {
                work(100);
                0
            })?;
            child.go()?;
            check_eq!(child.wait()?, 0, "exit status of a child, wrong {wrong:#x}");
        }
    }
    ctx.diag("256 mixtures of misdeeds, each with both kinds of area");
    complaints.check_none()
}

fn every_way(ctx: &Ctx) -> Outcome {
    all(ctx, |pmu, wrong| {
        Attr::new(pmu.kind(), wrong).disabled().user_only()
    })
}

/// The same by a user without privileges.
fn unprivileged(ctx: &Ctx) -> Outcome {
    if !sys::is_root() {
        skip!("this user has none anyway");
    }
    let pmu = Pmu::needed("misuse_chaos")?;
    let mut complaints = Complaints::from_now();
    let mut child = Child::new(|| {
        if sys::become_nobody().is_err() {
            return 2;
        }
        for wrong in 0..256u64 {
            let attr = Attr::new(pmu.kind(), wrong).disabled().user_only();
            for mode in [AuxMode::Snapshot, AuxMode::Full] {
                if try_one(&attr.clone().sample_period(wrong & 1), wrong, mode).is_err() {
                    return 3;
                }
            }
        }
        0
    })?;
    child.go()?;
    check_eq!(child.wait()?, 0, "exit status of the user");
    ctx.diag("256 mixtures of misdeeds as nobody");
    complaints.check_none()
}

/// Events of a whole CPU.
fn on_a_cpu(_: &Ctx) -> Outcome {
    if !sys::is_root() {
        skip!("an event of a CPU needs root");
    }
    let pmu = Pmu::needed("misuse_chaos")?;
    let mut complaints = Complaints::from_now();
    load::pin(0)?;
    for wrong in 0..INIT {
        let attr = Attr::new(pmu.kind(), wrong).disabled().pid(-1).cpu(0);
        let event = attr.sample_period(wrong & 1).open()?;
        let ring = Ring::map(&event, 4)?;
        let aux = ring.map_aux(&event, 4, AuxMode::Full)?;
        event.enable()?;
        work(20);
        ring.set_aux_tail(ring.aux_head());
        work(20);
        check_eq!(event.read()?.len(), 1, "words of a read");
        drop((aux, ring));
        work(10);
        event.disable()?;
    }
    complaints.check_none()
}

/// A counter that comes to the end of a period while it is being started has counted nothing by
/// then, whatever it shows.
fn counts_in_start(_: &Ctx) -> Outcome {
    let pmu = Pmu::needed("misuse_early")?;
    let event = Attr::new(pmu.kind(), 0)
        .disabled()
        .sample_period(1 << 30)
        .open()?;
    for round in 0..10 {
        event.enable()?;
        work(10);
        let on = event.count()?;
        event.disable()?;
        let off = event.count()?;
        // It counts how often it is read.
        check!(
            off > on && off < 1 << 20,
            "a count of {on}, then {off}, in round {round}"
        );
    }
    Ok(())
}

fn shared() -> Result<(Pmu, Event, Ring, Aux), Stop> {
    let pmu = Pmu::needed("misuse_shared")?;
    let event = Attr::new(pmu.kind(), 0).disabled().open()?;
    let ring = Ring::map(&event, 4)?;
    let aux = ring.map_aux(&event, 4, AuxMode::Full)?;
    Ok((pmu, event, ring, aux))
}

/// Two events of a PMU that takes any number share a ring: one of them has the transaction.
fn one_ring(_: &Ctx) -> Outcome {
    let (pmu, first, ring, aux) = shared()?;
    let second = Attr::new(pmu.kind(), 0).disabled().open()?;
    second.set_output(&first)?;
    for (on, beside) in [(&first, &second), (&second, &first)] {
        let before = ring.aux_head();
        on.enable()?;
        beside.enable()?;
        work(200);
        beside.disable()?;
        on.disable()?;
        let head = ring.aux_head();
        // Each start writes a word of six letters.
        check!(
            head > before && (head - before) % 6 == 0,
            "{} bytes by two events of one ring",
            head - before
        );
        let size = (head - before) as usize;
        let bytes = aux.bytes(before, size);
        check!(
            bytes.chunks(6).all(|word| word == b"shared"),
            "the two events have written {:?}",
            String::from_utf8_lossy(&bytes)
        );
        ring.set_aux_tail(head);
    }
    Ok(())
}

/// Two PMUs behind one ring: neither the area nor the transaction of one is the other's.
fn two_pmus(_: &Ctx) -> Outcome {
    let chaos = Pmu::needed("misuse_chaos")?;
    let (_, owner, ring, aux) = shared()?;
    let between = Attr::cpu_clock(0).user_only().disabled().open()?;
    between.set_output(&owner)?;
    let event = Attr::new(chaos.kind(), 0).disabled().open()?;
    // A kernel that is not mended lets it.
    let refused = event.set_output(&between).is_err();
    event.enable()?;
    owner.enable()?;
    work(200);
    owner.disable()?;
    event.disable()?;
    let head = ring.aux_head();
    check!(head > 0, "the ring's own event has written nothing");
    let bytes = aux.bytes(0, head as usize);
    check!(
        bytes.chunks(6).all(|word| word == b"shared"),
        "another PMU has written to the area (refused: {refused})"
    );
    Ok(())
}

/// A registration is dropped while it has an event, and an AUX area of it is mapped: the event is
/// over, the area stays, and the module with it.
fn removed_while_mapped(_: &Ctx) -> Outcome {
    let boxed = Pmu::needed("misuse_box")?;
    let control = Pmu::needed("misuse_control")?;
    let idle = module_refcount(MODULE)?;
    let event = Attr::new(boxed.kind(), 0).disabled().open()?;
    let ring = Ring::map(&event, 4)?;
    let aux = ring.map_aux(&event, 4, AuxMode::Full)?;
    event.enable()?;
    work(100);
    event.disable()?;
    let head = ring.aux_head();
    check!(head > 0, "nothing was written");
    event.enable()?;

    drop(Attr::new(control.kind(), 0).open()?);
    let gone = load::spin_until(Duration::from_secs(60), || {
        matches!(Pmu::find("misuse_box"), Ok(None))
    });
    check!(gone, "the PMU is still there");
    work(100);
    let bytes = aux.bytes(0, head as usize);
    check!(
        bytes.chunks(6).all(|word| word == b"shared"),
        "the area has changed"
    );
    check!(event.read().is_ok(), "the event can't be read any more");
    check!(event.set_period(1).is_err(), "the event goes on");
    check!(
        module_refcount(MODULE)? > idle,
        "the module could go while an area of it is mapped"
    );
    drop(event);
    drop(ring);
    check!(
        module_refcount(MODULE)? > idle,
        "the module could go while an area of it is mapped, without an event"
    );
    drop(aux);
    check_eq!(module_refcount(MODULE)?, idle, "use count at the end");
    Ok(())
}
