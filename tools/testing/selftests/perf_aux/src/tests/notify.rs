// SPDX-License-Identifier: GPL-2.0

//! Overflow notification: {signal, poll} × {with, without a ring buffer}, and
//! `PERF_EVENT_IOC_REFRESH` in each.
//!
//! Two kinds of overflow are used. The clock overflows by time, so counts of it are compared with
//! the event's own count, which a busy machine changes in the same way. Page faults overflow
//! exactly when the test makes one, so these counts are exact.

use super::faults::{
    faults,
    Pages, //
};
use super::privilege;
use super::source::Source;
use perf_aux::abi;
use perf_aux::group::Setup;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::notify::{
    self,
    Overflow,
    Signal,
    Wake,
    POLL_HUP,
    POLL_IN, //
};
use perf_aux::record::Record;
use perf_aux::ring::{
    page_size,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    skip,
    Attr,
    Ctx,
    Event,
    Outcome,
    Result,
    Test, //
};
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("notify.signal.nommap.clock", |_| signal_by_clock(None)),
    Test::new("notify.signal.mmap.clock", |_| signal_by_clock(Some(16))),
    Test::new("notify.signal.nommap.exact", |_| signal_exact(None)),
    Test::new("notify.signal.mmap.exact", |_| signal_exact(Some(16))),
    Test::new("notify.signal.child", signal_of_a_child),
    Test::new("notify.signal.inherited", signal_of_an_inherited_event),
    Test::new("notify.signal.unprivileged", signal_unprivileged),
    Test::new("notify.poll.nommap.hup", poll_without_a_buffer),
    Test::new("notify.poll.nommap.is_an_error_here", wait_without_a_buffer),
    Test::new("notify.poll.mmap.clock", poll_by_clock),
    Test::new("notify.poll.mmap.exact", |_| poll_exact(1)),
    Test::new("notify.poll.mmap.wakeup_events", |_| poll_exact(3)),
    Test::new("notify.poll.mmap.no_wakeup_asked", poll_without_wakeup),
    Test::new("notify.poll.mmap.watermark", poll_by_watermark),
    Test::new("notify.poll.mmap.exited_task", poll_of_an_exited_task),
    Test::new("notify.poll.unprivileged", poll_unprivileged),
    Test::new("notify.poll.set_output", poll_of_a_redirected_event),
    Test::new("notify.refresh.signal.nommap", |_| refresh_signals(None)),
    Test::new("notify.refresh.signal.mmap", |_| refresh_signals(Some(16))),
    Test::new("notify.refresh.signal.nommap.group", |ctx| {
        refresh_in_group(ctx, false)
    }),
    Test::new("notify.refresh.signal.mmap.group", |ctx| {
        refresh_in_group(ctx, true)
    }),
    Test::new("notify.refresh.poll.mmap", refresh_polls),
    Test::new("notify.refresh.poll.nommap", refresh_polls_without_a_buffer),
    Test::new("notify.refresh.adds_up", refresh_adds_up),
    Test::new("notify.refresh.zero_is_no_limit", refresh_zero),
    Test::new("notify.refresh.refused", refresh_refused),
    Test::new("notify.nommap.then_mmap", map_later),
    Test::new("notify.nommap.prepares_nothing", prepares_nothing),
    Test::new("notify.nommap.every_field", every_field_without_a_buffer),
    Test::new(
        "notify.nommap.inherited.parent_mapped",
        inherited_writes_to_the_parent,
    ),
    Test::new(
        "notify.nommap.every_field.unprivileged",
        every_field_unprivileged,
    ),
    Test::new("notify.nommap.no_snapshot", no_snapshot_without_a_buffer),
];

const PERIOD: Duration = Duration::from_millis(10);
const SOON: Duration = Duration::from_secs(10);
const QUIET: Duration = Duration::from_millis(200);
const POLLIN: i16 = libc::POLLIN;
const POLLHUP: i16 = libc::POLLHUP;

fn clock() -> Attr {
    Attr::task_clock(PERIOD.as_nanos() as u64)
        .user_only()
        .disabled()
        .sample_type((abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME).into())
        .wakeup_events(1)
}

fn mapped(event: &Event, pages: Option<usize>) -> Result<Option<Ring>> {
    pages.map(|pages| Ring::map(event, pages)).transpose()
}

/// Fetches one signal per period of another process's clock and compares their number with the
/// count.
fn signal_by_clock(pages: Option<usize>) -> Outcome {
    let mut child = Child::spinning(None)?;
    let event = clock().pid(child.pid()).open()?;
    let _ring = mapped(&event, pages)?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    event.enable()?;
    child.go()?;
    let mut got = 0;
    while got < 20 {
        let Some(overflow) = signal.next(SOON)? else {
            break;
        };
        check_eq!(
            overflow,
            Overflow {
                code: POLL_IN,
                fd: event.fd()
            },
            "signal {got}"
        );
        got += 1;
    }
    event.disable()?;
    got += signal.codes(1000, QUIET)?.len() as u64;
    let periods = event.count()? / PERIOD.as_nanos() as u64;
    check!(
        got >= 20,
        "{got} signals, then none for {SOON:?}, in {periods} periods"
    );
    // A late timer stands for all the periods that it missed, so there may be fewer signals but
    // never more.
    check!(got <= periods + 1, "{got} signals in {periods} periods");
    check!(
        got * 5 >= periods,
        "only {got} signals in {periods} periods"
    );
    Ok(())
}

/// Every overflow is one signal: the number of page faults divided by the period, exactly.
fn signal_exact(pages: Option<usize>) -> Outcome {
    for period in [1, 2, 7] {
        let event = faults(period).open()?;
        let mut ring = mapped(&event, pages)?;
        let signal = Signal::new(0)?;
        signal.attach(&event)?;
        let mut memory = Pages::new(100)?;
        event.enable()?;
        while memory.fault() {}
        event.disable()?;
        let count = event.count()?;
        check!(count >= 100, "{count} faults counted of at least 100");
        let codes = signal.codes(1000, QUIET)?;
        check_eq!(
            codes.len() as u64,
            count / period,
            "signals of {count} faults at period {period}"
        );
        check!(codes.iter().all(|code| *code == POLL_IN), "codes {codes:?}");
        if let Some(ring) = &mut ring {
            check_eq!(
                ring.drain()?.len() as u64,
                count / period,
                "samples at period {period}"
            );
        }
    }
    Ok(())
}

/// The owner of the descriptor is signalled, not the process that is observed.
fn signal_of_a_child(_: &Ctx) -> Outcome {
    let mut child = Child::new(|| match Pages::new(50) {
        Ok(mut memory) => {
            while memory.fault() {}
            0
        }
        Err(_) => 1,
    })?;
    let event = faults(5).pid(child.pid()).open()?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    event.enable()?;
    child.go()?;
    check_eq!(child.wait()?, 0, "the child's exit status");
    let (codes, count) = (signal.codes(1000, QUIET)?, event.count()?);
    check!(count >= 50, "{count} faults counted of at least 50");
    check_eq!(codes.len() as u64, count / 5, "signals of {count} faults");
    Ok(())
}

/// Overflows of an inherited event signal the owner of the event it was inherited from, with no
/// buffer anywhere.
fn signal_of_an_inherited_event(_: &Ctx) -> Outcome {
    let event = faults(1).inherit().open()?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    event.enable()?;
    let child = Child::new(|| match Pages::new(40) {
        Ok(mut memory) => {
            while memory.fault() {}
            0
        }
        Err(_) => 1,
    })?;
    check_eq!(child.wait()?, 0, "the child's exit status");
    event.disable()?;
    let (codes, count) = (signal.codes(4000, QUIET)?, event.count()?);
    check!(count >= 40, "{count} faults counted of at least 40");
    // Parent and child may overflow at the same moment on two CPUs, where the one signal stands for
    // both.
    check!(
        codes.len() as u64 <= count && codes.len() >= 40,
        "{} signals of {count} faults",
        codes.len()
    );
    Ok(())
}

/// Runs `work` as a user who may do nothing special, under each `perf_event_paranoid` level.
fn as_nobody(work: impl Fn() -> Outcome + Copy) -> Outcome {
    if !sys::is_root() {
        return work();
    }
    privilege::at_each_level(|_| work())
}

/// Signals need no privilege.
fn signal_unprivileged(_: &Ctx) -> Outcome {
    as_nobody(|| {
        signal_exact(None)?;
        signal_exact(Some(1))
    })
}

/// Neither does polling, with a limit or without.
fn poll_unprivileged(ctx: &Ctx) -> Outcome {
    as_nobody(|| {
        poll_without_a_buffer(ctx)?;
        poll_exact(1)?;
        refresh_polls(ctx)?;
        refresh_polls_without_a_buffer(ctx)
    })
}

/// Neither does any field that there is without privilege.
fn every_field_unprivileged(ctx: &Ctx) -> Outcome {
    as_nobody(|| every_field_without_a_buffer(ctx))
}

/// Without a buffer poll has nothing to wait for: POLLHUP at once, each time, overflows or not.
fn poll_without_a_buffer(_: &Ctx) -> Outcome {
    let event = faults(1).open()?;
    let mut memory = Pages::new(50)?;
    for round in 0..100 {
        if round == 50 {
            event.enable()?;
        }
        if round >= 50 {
            memory.fault();
        }
        // One that may not wait says the same as one that may.
        for limit in [Duration::ZERO, SOON] {
            check_eq!(
                notify::poll(&event, limit)?,
                POLLHUP,
                "poll {round} for {limit:?}"
            );
        }
    }
    Ok(())
}

/// This crate makes an error of the case in which a loop around poll would spin.
fn wait_without_a_buffer(_: &Ctx) -> Outcome {
    let event = clock().open()?;
    match notify::wait(&event, SOON) {
        Err(error) => check!(error.to_string().contains("POLLHUP"), "{error}"),
        Ok(wake) => perf_aux::fail!("waiting without a buffer: {wake:?}"),
    }
    let _ring = Ring::map(&event, 1)?;
    check_eq!(
        notify::wait(&event, QUIET)?,
        Wake::Timeout,
        "wait once mapped"
    );
    Ok(())
}

/// With a buffer poll wakes about once per period and waits in between.
fn poll_by_clock(_: &Ctx) -> Outcome {
    let mut child = Child::spinning(None)?;
    let event = clock().pid(child.pid()).open()?;
    let mut ring = Ring::map(&event, 16)?;
    event.enable()?;
    child.go()?;
    let (mut wakes, mut samples) = (0, 0);
    while wakes < 20 {
        check_eq!(notify::poll(&event, SOON)? & POLLIN, POLLIN, "poll {wakes}");
        wakes += 1;
        samples += ring.drain()?.len() as u64;
    }
    event.disable()?;
    samples += ring.drain()?.len() as u64;
    let periods = event.count()? / PERIOD.as_nanos() as u64;
    check!(wakes <= samples, "{wakes} wake-ups with {samples} samples");
    check!(
        samples <= periods + 1,
        "{samples} samples in {periods} periods"
    );
    check!(
        samples * 5 >= periods,
        "only {samples} samples in {periods} periods"
    );
    Ok(())
}

/// POLLIN once per `wakeup_events` overflows, and 0 in between.
fn poll_exact(wakeup_events: u32) -> Outcome {
    let event = faults(1).wakeup_events(wakeup_events).open()?;
    let mut ring = Ring::map(&event, 16)?;
    let mut memory = Pages::new(120)?;
    let mut samples = 0;
    check_eq!(
        notify::poll(&event, Duration::ZERO)?,
        0,
        "poll before the first overflow"
    );
    for fault in 0..120u64 {
        // The event is on for nothing but the fault, so that no other fault of this process counts.
        event.enable()?;
        memory.fault();
        event.disable()?;
        let now = samples + ring.drain()?.len() as u64;
        check!(now > samples, "fault {fault} made no sample");
        let due = now / u64::from(wakeup_events) > samples / u64::from(wakeup_events);
        samples = now;
        let revents = notify::poll(&event, Duration::ZERO)?;
        check_eq!(revents & POLLIN != 0, due, "POLLIN after {samples} samples");
        check_eq!(revents & POLLHUP, 0, "POLLHUP after {samples} samples");
        check_eq!(
            notify::poll(&event, Duration::ZERO)?,
            0,
            "poll again after {samples} samples"
        );
    }
    check_eq!(samples, event.count()?, "samples");
    Ok(())
}

/// With `wakeup_events` 0 the buffer wakes poll when it is half full; a signal still comes with
/// every overflow.
fn poll_without_wakeup(_: &Ctx) -> Outcome {
    let event = faults(1).wakeup_events(0).open()?;
    let mut ring = Ring::map(&event, 1)?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    let mut memory = Pages::new(400)?;
    let sample = 8 + 16;
    let half = (page_size() / 2) as u64;
    event.enable()?;
    loop {
        if !memory.fault() {
            perf_aux::fail!("no wake-up in {} bytes", ring.head());
        }
        let head = ring.head();
        let revents = notify::poll(&event, Duration::ZERO)?;
        check_eq!(
            revents & POLLIN != 0,
            head > half,
            "POLLIN with {head} of {} bytes filled",
            page_size()
        );
        if revents != 0 {
            break;
        }
    }
    event.disable()?;
    let samples = ring.drain()?.len() as u64;
    check_eq!(ring.tail(), samples * sample, "bytes of {samples} samples");
    check_eq!(signal.codes(1000, QUIET)?.len() as u64, samples, "signals");
    Ok(())
}

/// With `watermark` the wake-up comes with a number of bytes.
fn poll_by_watermark(_: &Ctx) -> Outcome {
    let watermark = 240;
    let event = faults(1)
        .wakeup_events(watermark)
        .with(|attr| attr.set_watermark(1))
        .open()?;
    let ring = Ring::map(&event, 1)?;
    let mut memory = Pages::new(100)?;
    event.enable()?;
    let mut wakes = 0;
    while memory.fault() {
        let head = ring.head();
        if notify::poll(&event, Duration::ZERO)? & POLLIN != 0 {
            wakes += 1;
            check!(
                head > wakes * u64::from(watermark),
                "wake-up {wakes} with {head} bytes, watermark {watermark}"
            );
        }
        check!(
            head <= (wakes + 1) * u64::from(watermark) + 24,
            "{wakes} wake-ups with {head} bytes, watermark {watermark}"
        );
    }
    check!(wakes >= 5, "{wakes} wake-ups");
    Ok(())
}

/// Once the task is gone poll answers POLLHUP even with a buffer.
fn poll_of_an_exited_task(_: &Ctx) -> Outcome {
    let mut child = Child::new(|| 0)?;
    let event = clock().pid(child.pid()).open()?;
    let _ring = Ring::map(&event, 1)?;
    event.enable()?;
    check_eq!(
        notify::poll(&event, QUIET)?,
        0,
        "poll of an event whose task waits"
    );
    child.go()?;
    check_eq!(child.wait()?, 0, "the child's exit status");
    check_eq!(
        notify::poll(&event, SOON)? & POLLHUP,
        POLLHUP,
        "poll of an event whose task is gone"
    );
    check!(
        notify::wait(&event, SOON).is_err(),
        "waiting for a task that is gone is no error"
    );
    Ok(())
}

/// An event with its output sent to another's buffer polls that buffer.
fn poll_of_a_redirected_event(_: &Ctx) -> Outcome {
    let target = faults(1 << 40).open()?;
    let _ring = Ring::map(&target, 4)?;
    let event = faults(1).open()?;
    check_eq!(
        notify::poll(&event, Duration::ZERO)?,
        POLLHUP,
        "poll before PERF_EVENT_IOC_SET_OUTPUT"
    );
    event.set_output(&target)?;
    check_eq!(
        notify::poll(&event, Duration::ZERO)?,
        0,
        "poll before the first overflow"
    );
    let mut memory = Pages::new(1)?;
    event.enable()?;
    memory.fault();
    event.disable()?;
    check_eq!(
        notify::poll(&event, Duration::ZERO)? & POLLIN,
        POLLIN,
        "poll after it"
    );
    Ok(())
}

/// `PERF_EVENT_IOC_REFRESH` of `n`: n - 1 times POLL_IN, then POLL_HUP with the event off, again
/// and again.
fn refresh_signals(pages: Option<usize>) -> Outcome {
    let event = faults(1).open()?;
    let mut ring = mapped(&event, pages)?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    let mut memory = Pages::new(200)?;
    let mut total = 0;
    for n in [3u32, 1, 5, 2] {
        event.refresh(n)?;
        for _ in 0..20 {
            memory.fault();
        }
        check_eq!(signal.codes(1000, QUIET)?, codes(n), "codes of refresh {n}");
        total += u64::from(n);
        check_eq!(
            event.count()?,
            total,
            "count after refresh {n}: the event is off"
        );
        if let Some(ring) = &mut ring {
            check_eq!(ring.drain()?.len(), n as usize, "samples of refresh {n}");
        }
    }
    Ok(())
}

fn codes(n: u32) -> Vec<i32> {
    let mut codes = vec![POLL_IN; n as usize];
    codes[n as usize - 1] = POLL_HUP;
    codes
}

/// The same for the sampler of an AUX group: the leader goes on when the sampler is off.
fn refresh_in_group(ctx: &Ctx, map: bool) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup::new(&source.pmu, 0);
    let leader = setup.leader.open()?;
    let leader_ring = Ring::map(&leader, 8)?;
    let _aux = leader_ring.map_aux(&leader, 16, setup.mode)?;
    let sampler = faults(1)
        .sample_type((abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_AUX).into())
        .aux_sample_size(512)
        .group(&leader)
        .open()?;
    let mut ring = mapped(&sampler, map.then_some(16))?;
    let signal = Signal::new(0)?;
    signal.attach(&sampler)?;
    let mut memory = Pages::new(200)?;
    leader.enable()?;
    let (mut total, mut head) = (0, leader_ring.aux_head());
    for n in [3u32, 1, 5, 2] {
        sampler.refresh(n)?;
        for _ in 0..20 {
            memory.fault();
        }
        check_eq!(signal.codes(1000, QUIET)?, codes(n), "codes of refresh {n}");
        total += u64::from(n);
        check_eq!(
            sampler.count()?,
            total,
            "count after refresh {n}: the sampler is off"
        );
        if let Some(ring) = &mut ring {
            let samples = ring
                .drain()?
                .into_iter()
                .filter(|record| matches!(record, Record::Sample(_)))
                .count();
            check_eq!(samples, n as usize, "samples of refresh {n}");
        }
        source.spin(0);
        // The position is published when the leader stops.
        leader.disable()?;
        let now = leader_ring.aux_head();
        check!(now != head, "the leader wrote nothing during refresh {n}");
        head = now;
        leader.enable()?;
    }
    leader.disable()?;
    Ok(())
}

/// For poll every overflow that REFRESH allows is POLLIN, the last one too; then it waits, as the
/// event is off.
fn refresh_polls(_: &Ctx) -> Outcome {
    let event = faults(1).open()?;
    let _ring = Ring::map(&event, 16)?;
    let mut memory = Pages::new(100)?;
    let mut polls = Vec::with_capacity(16);
    // The first round only brings in what this code itself touches, whose faults would count.
    for n in [8u32, 3, 1, 3] {
        event.disable()?;
        polls.clear();
        event.refresh(n)?;
        for _ in 0..n + 2 {
            memory.fault();
            polls.push(notify::poll(&event, Duration::ZERO)? & (POLLIN | POLLHUP));
        }
        let mut expected = vec![POLLIN; n as usize];
        expected.extend([0, 0]);
        if n != 8 {
            check_eq!(
                polls,
                expected,
                "polls after each of the overflows of refresh {n}, and after"
            );
        }
    }
    Ok(())
}

/// REFRESH does not make poll without a buffer any better.
fn refresh_polls_without_a_buffer(_: &Ctx) -> Outcome {
    let event = faults(1).open()?;
    let mut memory = Pages::new(10)?;
    event.refresh(2)?;
    for i in 0..4 {
        check_eq!(
            notify::poll(&event, SOON)?,
            POLLHUP,
            "poll after {i} faults"
        );
        memory.fault();
    }
    check_eq!(
        event.count()?,
        2,
        "count: the event is off after two overflows"
    );
    Ok(())
}

/// Each REFRESH adds to what is left.
fn refresh_adds_up(_: &Ctx) -> Outcome {
    let event = faults(1).open()?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    let mut memory = Pages::new(50)?;
    event.refresh(2)?;
    event.refresh(3)?;
    while memory.fault() {}
    check_eq!(
        signal.codes(100, QUIET)?,
        codes(5),
        "codes of refresh 2 and 3"
    );
    check_eq!(event.count()?, 5, "count");
    Ok(())
}

/// REFRESH of 0 adds nothing: with no limit pending the event is simply switched on.
fn refresh_zero(_: &Ctx) -> Outcome {
    let event = faults(1).open()?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    let mut memory = Pages::new(30)?;
    event.refresh(0)?;
    while memory.fault() {}
    event.disable()?;
    let codes = signal.codes(100, QUIET)?;
    check!(
        codes.len() >= 30 && codes.iter().all(|code| *code == POLL_IN),
        "codes {codes:?}"
    );
    Ok(())
}

/// Inherited events and events that don't sample have no REFRESH.
fn refresh_refused(_: &Ctx) -> Outcome {
    for (what, attr) in [
        ("an inherited event", faults(1).inherit()),
        ("an event without a period", faults(0)),
    ] {
        let event = attr.open()?;
        let errno = event.refresh(1).err().and_then(|error| error.errno());
        check_eq!(errno, Some(libc::EINVAL), "errno of refreshing {what}");
        let mut memory = Pages::new(5)?;
        memory.fault();
        check_eq!(
            event.count()?,
            0,
            "count of {what} whose refresh was refused"
        );
    }
    Ok(())
}

/// An event that ran without a buffer works as any other once it is mapped, and again when it is
/// unmapped.
fn map_later(_: &Ctx) -> Outcome {
    let event = faults(1).open()?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    let mut memory = Pages::new(300)?;
    let mut signals = 0;
    for round in 0..10 {
        event.enable()?;
        for _ in 0..5 {
            memory.fault();
        }
        event.disable()?;
        signals += signal.codes(1000, Duration::from_millis(20))?.len() as u64;
        check_eq!(signals, event.count()?, "signals unmapped, round {round}");
        check_eq!(
            notify::poll(&event, Duration::ZERO)?,
            POLLHUP,
            "poll unmapped, round {round}"
        );

        let mut ring = Ring::map(&event, 4)?;
        check_eq!(ring.head(), 0, "bytes in a new ring");
        check_eq!(
            notify::poll(&event, Duration::ZERO)?,
            0,
            "poll of a new ring"
        );
        let before = event.count()?;
        event.enable()?;
        for _ in 0..5 {
            memory.fault();
        }
        event.disable()?;
        let faults = event.count()? - before;
        check_eq!(
            ring.drain()?.len() as u64,
            faults,
            "samples mapped, round {round}"
        );
        check_eq!(
            notify::poll(&event, Duration::ZERO)? & POLLIN,
            POLLIN,
            "poll mapped, round {round}"
        );
        signals += signal.codes(1000, Duration::from_millis(20))?.len() as u64;
        check_eq!(signals, event.count()?, "signals mapped, round {round}");
    }
    Ok(())
}

/// With no buffer to write to, its own or its parent's, the kernel does not even begin to prepare a
/// sample.
fn prepares_nothing(_: &Ctx) -> Outcome {
    const FUNCTION: &std::ffi::CStr = c"perf_prepare_sample";
    if !sys::is_root() {
        skip!("kprobes need root");
    }
    let Some(kprobe) = sys::Pmu::find("kprobe")? else {
        skip!("no kprobe PMU");
    };
    let calls = match Attr::new(kprobe.kind(), 0)
        .inherit()
        .with(|attr| attr.kprobe_func = FUNCTION.as_ptr() as u64)
        .open()
    {
        Ok(event) => event,
        Err(error) => skip!("no kprobe on {FUNCTION:?}: {error}"),
    };
    // A timer overflows in an interrupt. Inside of a software event, such as a page fault, the
    // kprobe would not count.
    let work = || -> Result<u8> {
        load::spin_for(PERIOD * 10);
        Child::new(|| {
            load::spin_for(PERIOD * 10);
            0
        })?
        .wait()
    };
    let cpu = load::cpus()?[0];
    load::pin(cpu)?;
    let event = clock().inherit().cpu(cpu as i32).open()?;
    for map in [false, true, false] {
        let mut ring = mapped(&event, map.then_some(64))?;
        let (before, time) = (calls.count()?, event.count()?);
        event.enable()?;
        check_eq!(work()?, 0, "the child's exit status");
        event.disable()?;
        let (calls, time) = (calls.count()? - before, event.count()? - time);
        check!(
            time > 5 * PERIOD.as_nanos() as u64,
            "only {time} ns were counted"
        );
        let expected = match &mut ring {
            Some(ring) => ring.drain()?.len() as u64,
            None => 0,
        };
        check_eq!(expected > 0, map, "samples in {time} ns");
        check_eq!(
            calls,
            expected,
            "samples prepared in {time} ns, mapped: {map}"
        );
    }
    Ok(())
}

/// Notification does not depend on what the samples would have held.
fn every_field_without_a_buffer(_: &Ctx) -> Outcome {
    let event = faults(1)
        .sample_type(
            (abi::PERF_SAMPLE_IP
                | abi::PERF_SAMPLE_TID
                | abi::PERF_SAMPLE_TIME
                | abi::PERF_SAMPLE_ADDR
                | abi::PERF_SAMPLE_READ
                | abi::PERF_SAMPLE_CALLCHAIN
                | abi::PERF_SAMPLE_CPU
                | abi::PERF_SAMPLE_PERIOD
                | abi::PERF_SAMPLE_REGS_USER
                | abi::PERF_SAMPLE_STACK_USER
                | abi::PERF_SAMPLE_IDENTIFIER
                | abi::PERF_SAMPLE_DATA_PAGE_SIZE)
                .into(),
        )
        .sample_regs_user(0xff)
        .sample_stack_user(8192)
        .with(|attr| attr.set_exclude_callchain_kernel(1))
        .open()?;
    let signal = Signal::new(0)?;
    signal.attach(&event)?;
    let mut memory = Pages::new(60)?;
    event.enable()?;
    for _ in 0..30 {
        memory.fault();
    }
    event.disable()?;
    check_eq!(
        signal.codes(1000, QUIET)?.len() as u64,
        event.count()?,
        "signals unmapped"
    );
    let mut ring = Ring::map(&event, 128)?;
    let before = event.count()?;
    event.enable()?;
    for _ in 0..30 {
        memory.fault();
    }
    event.disable()?;
    let faults = event.count()? - before;
    let records = ring.drain()?;
    check_eq!(records.len() as u64, faults, "samples");
    for record in &records {
        let Record::Sample(sample) = record else {
            perf_aux::fail!("{record:?} is not a sample");
        };
        check!(
            sample.ip != 0 && sample.addr != 0 && sample.time != 0,
            "{sample:?}"
        );
        check!(
            sample.regs_user.is_some() && !sample.stack_user.is_empty(),
            "{sample:?}"
        );
    }
    check_eq!(
        signal.codes(1000, QUIET)?.len() as u64,
        faults,
        "signals mapped"
    );
    Ok(())
}

/// An inherited event has no buffer of its own, its samples go to the parent's: they must not be
/// skipped.
fn inherited_writes_to_the_parent(_: &Ctx) -> Outcome {
    // Mapping an inherited event needs a CPU, and then everything has to happen there.
    let cpu = load::cpus()?[0];
    load::pin(cpu)?;
    let event = faults(1).inherit().cpu(cpu as i32).open()?;
    let mut ring = Ring::map(&event, 64)?;
    event.enable()?;
    let child = Child::new(|| match Pages::new(40) {
        Ok(mut memory) => {
            while memory.fault() {}
            0
        }
        Err(_) => 1,
    })?;
    let pid = child.pid() as u32;
    check_eq!(child.wait()?, 0, "the child's exit status");
    event.disable()?;
    let count = event.count()?;
    let records = ring.drain()?;
    let samples = |of: Option<u32>| {
        records
            .iter()
            .filter(
                |record| matches!(record, Record::Sample(s) if of.is_none_or(|pid| s.pid == pid)),
            )
            .count()
    };
    check!(
        samples(Some(pid)) >= 40,
        "{} samples of the child",
        samples(Some(pid))
    );
    check_eq!(samples(None) as u64, count, "samples");
    Ok(())
}

/// With no buffer for the sampler the trace goes on untouched and the sampler signals as ever.
fn no_snapshot_without_a_buffer(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let setup = Setup::new(&pmu, 0);
    let leader = setup.leader.open()?;
    let leader_ring = Ring::map(&leader, 8)?;
    let _aux = leader_ring.map_aux(&leader, 16, setup.mode)?;
    let sampler = setup.sampler.group(&leader).open()?;
    let signal = Signal::new(0)?;
    signal.attach(&sampler)?;
    leader.enable()?;
    let mut got = 0;
    load::spin_until(SOON, || {
        got += usize::from(matches!(signal.next(Duration::ZERO), Ok(Some(_))));
        got == 20
    });
    check_eq!(got, 20, "signals");
    // Once the sampler has its buffer, its samples are whole.
    let mut ring = Ring::map(&sampler, 64)?;
    load::spin_until(SOON, || ring.head() > 9 * 4096);
    leader.disable()?;
    let mut bytes = 0;
    for record in ring.drain()? {
        if let Record::Sample(sample) = record {
            bytes += sample.aux.map_or(0, |aux| aux.len());
        }
    }
    check!(bytes >= 8 * 4096, "{bytes} bytes of samples once mapped");
    Ok(())
}
