// SPDX-License-Identifier: GPL-2.0

//! The PMUs of `samples/rust` that have no AUX area: `clock`, which counts and takes samples, and
//! `package_clock`, which belongs to packages. What they show is what `kernel::perf` does for any
//! PMU of their kinds.

use perf_aux::abi;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::notify::{
    Signal,
    POLL_HUP,
    POLL_IN, //
};
use perf_aux::record::{
    Record,
    Sample, //
};
use perf_aux::ring::Ring;
use perf_aux::sys::{
    self,
    Pmu,
    Sysctl, //
};
use perf_aux::{
    check,
    check_eq,
    skip,
    Attr,
    Ctx,
    Error,
    Event,
    Outcome,
    Stop,
    Test, //
};
use std::fs;
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("pmu.fields", fields),
    Test::new("pmu.counts", counts),
    Test::new("pmu.inherited", inherited),
    Test::new("pmu.takes_turns", takes_turns),
    Test::new("pmu.period", period),
    Test::new("pmu.values", values),
    Test::new("pmu.frequency", frequency),
    Test::new("pmu.throttled", throttled),
    Test::new("pmu.throttled_group", throttled_group),
    Test::new("pmu.excluded", excluded),
    Test::new("pmu.refresh", refresh),
    Test::new("pmu.uncore.refused", uncore_refused),
    Test::new("pmu.uncore.files", uncore_files),
    Test::new("pmu.uncore.other_cpu", uncore_other_cpu),
    Test::new("pmu.uncore.migrates", uncore_migrates).limit(60),
];

const SOON: Duration = Duration::from_secs(30);
const TIMES: u64 =
    (abi::PERF_FORMAT_TOTAL_TIME_ENABLED | abi::PERF_FORMAT_TOTAL_TIME_RUNNING) as u64;
const NS: u64 = 0;
const US: u64 = 1;

/// An event of `clock` on the calling thread, switched off.
fn clock(what: u64) -> Result<Attr, Stop> {
    Ok(Attr::new(Pmu::needed("clock")?.kind(), what).disabled())
}

/// What is in no field, or more than a field allows, is refused; the files say where fields are.
fn fields(_: &Ctx) -> Outcome {
    let pmu = Pmu::needed("clock")?;
    for (file, text) in [("format/event", "config:0-7"), ("events/us", "event=1")] {
        check_eq!(pmu.file(file)?, Some(text.to_owned()), "{file}");
    }
    for (what, bit) in (0..64).map(|bit| (1u64 << bit, bit)) {
        let wanted = (bit > 0).then_some(libc::EINVAL);
        check_eq!(clock(what)?.refusal(), wanted, "errno of config bit {bit}");
        type Set = fn(&mut abi::perf_event_attr, u64);
        let words: [(&str, Set); 4] = [
            ("config1", |attr, word| attr.__bindgen_anon_3.config1 = word),
            ("config2", |attr, word| attr.__bindgen_anon_4.config2 = word),
            ("config3", |attr, word| attr.config3 = word),
            ("config4", |attr, word| attr.config4 = word),
        ];
        for (name, set) in words {
            let attr = clock(NS)?.with(|attr| set(attr, what));
            check_eq!(
                attr.refusal(),
                Some(libc::EINVAL),
                "errno of {name} bit {bit}"
            );
        }
    }
    check_eq!(clock(2)?.refusal(), Some(libc::EINVAL), "errno of event 2");
    check_eq!(
        clock(0xff)?.refusal(),
        Some(libc::EINVAL),
        "errno of event 255"
    );
    Ok(())
}

/// Two counters of one time agree with each other and with the kernel's, start at zero, and stand
/// still while they are off.
fn counts(_: &Ctx) -> Outcome {
    let group = u64::from(abi::PERF_FORMAT_GROUP) | TIMES;
    let ns = clock(NS)?.read_format(group).open()?;
    let us = Attr::new(Pmu::needed("clock")?.kind(), US)
        .group(&ns)
        .open()?;
    let task = Attr::software(abi::PERF_COUNT_SW_TASK_CLOCK)
        .group(&ns)
        .open()?;
    let read_all = || -> Result<(u64, u64, u64, u64), Stop> {
        match ns.read()?[..] {
            [3, _, running, ns, us, task] => Ok((running, ns, us, task)),
            ref other => perf_aux::fail!("a group read of {other:?}"),
        }
    };
    let read = || read_all().map(|(running, ns, us, _)| (running, ns, us));
    check_eq!(read()?, (0, 0, 0), "counts at first");
    ns.enable()?;
    let mut last = (0, 0, 0);
    for round in 0..20 {
        load::spin(500_000);
        let now = read()?;
        check!(
            now.1 > last.1 && now.2 >= last.2,
            "counts {now:?} after {last:?}"
        );
        // Both are read one right after the other, and count for as long as they run.
        let (running, ns, us) = now;
        check!(
            us <= ns / 1000 + 1 + running / 10_000 && us >= ns / 2000,
            "{us} microseconds beside {ns} nanoseconds in round {round}"
        );
        last = now;
    }
    ns.disable()?;
    let off = read_all()?;
    let (_, nanos, _, task_nanos) = off;
    check!(
        task_nanos > nanos / 2 && task_nanos < 2 * nanos,
        "{nanos} nanoseconds beside {task_nanos} of task-clock"
    );
    load::spin(500_000);
    check_eq!(read_all()?, off, "counts while they are off");
    ns.reset()?;
    check_eq!(read()?.1, 0, "count after a reset");
    drop((us, task));
    Ok(())
}

/// The count of a child that ended is in its parent's, if that is inherited.
fn inherited(_: &Ctx) -> Outcome {
    let open = |inherit: bool| -> Result<Event, Stop> {
        let attr = clock(NS)?;
        let event = if inherit { attr.inherit() } else { attr }.open()?;
        event.enable()?;
        Ok(event)
    };
    let mut child_work = Vec::new();
    for inherit in [false, true] {
        let event = open(inherit)?;
        let mut child = Child::new(|| {
            load::spin(20_000_000);
            0
        })?;
        child.go()?;
        check_eq!(child.wait()?, 0, "exit status of the child");
        event.disable()?;
        child_work.push(event.count()?);
    }
    let [own, both] = child_work[..] else {
        perf_aux::fail!("two counts were taken");
    };
    // The parent slept while the child span.
    check!(
        both > 2 * own,
        "{both} nanoseconds with the child's, {own} without"
    );
    Ok(())
}

/// Four events on two counters take turns, and each says for how long it had one.
fn takes_turns(_: &Ctx) -> Outcome {
    let events = (0..4)
        .map(|n| Ok(clock(n % 2)?.read_format(TIMES).open()?))
        .collect::<Result<Vec<_>, Stop>>()?;
    for event in &events {
        event.enable()?;
    }
    let times = || -> Result<Vec<(u64, u64, u64)>, Stop> {
        events
            .iter()
            .map(|event| match event.read()?[..] {
                [count, enabled, running] => Ok((count, enabled, running)),
                ref other => perf_aux::fail!("a read of {other:?}"),
            })
            .collect()
    };
    let all_ran = load::spin_until(SOON, || {
        times().is_ok_and(|times| times.iter().all(|&(count, _, _)| count > 0))
    });
    check!(all_ran, "not all of four events had a turn: {:?}", times()?);
    for (count, enabled, running) in times()? {
        check!(
            running < enabled,
            "an event of four on two counters ran {running} of {enabled} ns, and counted {count}"
        );
    }
    // Two alone have a counter each, all the time.
    drop(events);
    let two = (0..2)
        .map(|_| Ok(clock(NS)?.read_format(TIMES).open()?))
        .collect::<Result<Vec<_>, Stop>>()?;
    for event in &two {
        event.enable()?;
    }
    load::spin(5_000_000);
    for event in &two {
        event.disable()?;
        let words = event.read()?;
        check_eq!(words.get(1), words.get(2), "time enabled and time running");
    }
    Ok(())
}

fn samples(ring: &mut Ring) -> Result<Vec<Sample>, Stop> {
    Ok(ring
        .drain()?
        .into_iter()
        .filter_map(|record| match record {
            Record::Sample(sample) => Some(*sample),
            _ => None,
        })
        .collect())
}

const FIELDS: u64 = (abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_PERIOD) as u64;

/// Samples of a period come no more often than the period is counted, and each says which it was.
fn period(_: &Ctx) -> Outcome {
    for (what, period) in [(NS, 1_000_000), (US, 1_000), (US, 3_333)] {
        let event = clock(what)?
            .sample_period(period)
            .sample_type(FIELDS)
            .open()?;
        let mut ring = Ring::map(&event, 16)?;
        event.enable()?;
        let mut all = Vec::new();
        let mut failed = None;
        let enough = load::spin_until(SOON, || {
            match samples(&mut ring) {
                Ok(new) => all.extend(new),
                Err(error) => failed = Some(error),
            }
            all.len() >= 50 || failed.is_some()
        });
        if let Some(error) = failed {
            return Err(error);
        }
        event.disable()?;
        all.extend(samples(&mut ring)?);
        let count = event.count()?;
        check!(enough, "{} samples, count {count}", all.len());
        check!(
            all.len() as u64 <= count / period,
            "{} samples of {period} in a count of {count}",
            all.len()
        );
        for sample in &all {
            check_eq!(sample.period, period, "period of a sample");
        }
        // The period can be changed.
        event.set_period(2 * period)?;
        event.enable()?;
        let changed = load::spin_until(SOON, || {
            samples(&mut ring).is_ok_and(|new| new.iter().any(|sample| sample.period == 2 * period))
        });
        check!(changed, "no sample of a period of {}", 2 * period);
    }
    Ok(())
}

/// A sample is taken when another period has been counted, and has the count of that moment. None
/// is lost when the event is switched off just then.
fn values(_: &Ctx) -> Outcome {
    const PERIOD: u64 = 2_000_000;
    let event = clock(NS)?
        .sample_period(PERIOD)
        .sample_type(FIELDS | u64::from(abi::PERF_SAMPLE_READ))
        .open()?;
    let mut ring = Ring::map(&event, 16)?;
    event.enable()?;
    let mut all = Vec::new();
    let enough = load::spin_until(SOON, || {
        for _ in 0..20 {
            if event.disable().and_then(|()| event.enable()).is_err() {
                return true;
            }
        }
        all.extend(samples(&mut ring).unwrap_or_default());
        all.len() >= 50
    });
    event.disable()?;
    all.extend(samples(&mut ring)?);
    check!(enough, "{} samples", all.len());
    // What comes late is taken off the next period, unless it is later than that.
    let mut due = PERIOD;
    for sample in &all {
        let [count] = sample.read[..] else {
            perf_aux::fail!("a sample has {:?} for a count", sample.read);
        };
        check!(
            count >= due,
            "a sample at a count of {count}, which was due at {due}"
        );
        due = PERIOD + if count - due < PERIOD { due } else { count };
    }
    let count = event.count()?;
    let last = all.last().map_or(0, |sample| sample.read[0]);
    check!(count >= last, "count {count} after a sample at {last}");
    Ok(())
}

/// With a frequency the core finds the period.
fn frequency(_: &Ctx) -> Outcome {
    let attr = clock(NS)?.sample_type(FIELDS).with(|attr| {
        attr.set_freq(1);
        attr.__bindgen_anon_1.sample_freq = 1000;
    });
    let event = attr.open()?;
    let mut ring = Ring::map(&event, 16)?;
    event.enable()?;
    let mut all = Vec::new();
    let found = load::spin_until(SOON, || {
        all.extend(samples(&mut ring).unwrap_or_default());
        // From 1, where the core begins, to within a factor of two.
        all.iter()
            .rev()
            .take(10)
            .all(|sample: &Sample| (500_000..2_000_000).contains(&sample.period))
            && all.len() > 50
    });
    event.disable()?;
    check!(
        found,
        "after {} samples the period is {:?} ns, of 1000 Hz",
        all.len(),
        all.last().map(|sample| sample.period)
    );
    Ok(())
}

/// An event that takes too many samples is held back, told so, and goes on.
fn throttled(_: &Ctx) -> Outcome {
    if !sys::is_root() {
        skip!("setting the greatest sample rate needs root");
    }
    let _rate = Sysctl::set("kernel/perf_event_max_sample_rate", "1000")?;
    let event = clock(NS)?
        .sample_period(10_000)
        .sample_type(FIELDS)
        .open()?;
    let mut ring = Ring::map(&event, 16)?;
    event.enable()?;
    let (mut held, mut on, mut taken) = (0, 0, 0);
    let enough = load::spin_until(SOON, || {
        for record in ring.drain().unwrap_or_default() {
            match record {
                Record::Throttle { .. } => held += 1,
                Record::Unthrottle { .. } => on += 1,
                Record::Sample(_) => taken += 1,
                _ => {}
            }
        }
        held >= 5 && on >= 5
    });
    check!(
        enough,
        "held back {held} times, went on {on} times, in {taken} samples"
    );
    let before = event.count()?;
    load::spin(3_000_000);
    check!(event.count()? > before, "the count stands still");
    Ok(())
}

/// The members of a group that is held back keep what they had counted.
fn throttled_group(_: &Ctx) -> Outcome {
    if !sys::is_root() {
        skip!("setting the greatest sample rate needs root");
    }
    let _rate = Sysctl::set("kernel/perf_event_max_sample_rate", "1000")?;
    let leader = clock(NS)?
        .sample_period(200_000)
        .sample_type(FIELDS)
        .read_format(abi::PERF_FORMAT_GROUP.into())
        .open()?;
    let member = Attr::new(Pmu::needed("clock")?.kind(), NS)
        .group(&leader)
        .open()?;
    let mut ring = Ring::map(&leader, 16)?;
    leader.enable()?;
    let mut held = 0;
    let enough = load::spin_until(SOON, || {
        for record in ring.drain().unwrap_or_default() {
            held += u32::from(matches!(record, Record::Throttle { .. }));
        }
        held >= 20
    });
    leader.disable()?;
    check!(enough, "held back {held} times");
    // Both start and stop together. The leader's count is read at each overflow, the member's only
    // when it is stopped.
    match leader.read()?[..] {
        [2, all, part] => check!(
            part > all / 2 && all > part / 2,
            "a group that was held back {held} times has counted {all} and {part} nanoseconds"
        ),
        ref other => perf_aux::fail!("a group read of {other:?}"),
    }
    drop(member);
    Ok(())
}

/// What an event excludes is not sampled.
fn excluded(_: &Ctx) -> Outcome {
    const KERNEL: u64 = 1 << 63;
    for kernel in [false, true] {
        let attr = clock(NS)?.sample_period(200_000).sample_type(FIELDS);
        let attr = if kernel {
            attr.exclude_user()
        } else {
            attr.user_only()
        };
        let event = match attr.open() {
            Err(error) if error.errno() == Some(libc::EACCES) => {
                skip!("this user may not sample the kernel")
            }
            event => event?,
        };
        let mut ring = Ring::map(&event, 16)?;
        event.enable()?;
        let mut all = Vec::new();
        let enough = load::spin_until(SOON, || {
            // Half of the time in the kernel.
            for _ in 0..200 {
                let _ = fs::metadata("/proc/self/status");
            }
            all.extend(samples(&mut ring).unwrap_or_default());
            all.len() >= 20
        });
        event.disable()?;
        check!(enough, "{} samples", all.len());
        for sample in &all {
            check_eq!(
                sample.ip & KERNEL != 0,
                kernel,
                "whether {:#x} is in the kernel, which alone was {}",
                sample.ip,
                if kernel { "wanted" } else { "excluded" }
            );
        }
    }
    Ok(())
}

/// After as many overflows as were asked for, the event is off, and the last signal says so.
fn refresh(_: &Ctx) -> Outcome {
    let signal = Signal::new(0)?;
    let event = clock(NS)?
        .sample_period(500_000)
        .sample_type(FIELDS)
        .wakeup_events(1)
        .open()?;
    let mut ring = Ring::map(&event, 16)?;
    signal.attach(&event)?;
    event.refresh(3)?;
    let mut all = Vec::new();
    let enough = load::spin_until(SOON, || {
        all.extend(samples(&mut ring).unwrap_or_default());
        all.len() >= 3
    });
    check!(enough, "{} samples of three", all.len());
    load::spin(5_000_000);
    all.extend(samples(&mut ring)?);
    check_eq!(all.len(), 3, "samples after three were asked for");
    let codes = signal.codes(4, Duration::from_secs(1))?;
    // Overflows of one interrupt, which comes late, have one signal.
    let (last, before) = codes.split_last().unwrap_or((&0, &[]));
    check!(
        *last == POLL_HUP && before.len() < 3 && before.iter().all(|code| *code == POLL_IN),
        "codes of the signals {codes:?}"
    );
    let count = event.count()?;
    load::spin(500_000);
    check_eq!(event.count()?, count, "count of an event that is off");
    Ok(())
}

/// An event of the package's clock on a CPU.
fn package(cpu: usize) -> Result<Attr, Stop> {
    if !sys::is_root() {
        skip!("an event of a CPU needs root");
    }
    let pmu = Pmu::needed("package_clock")?;
    Ok(Attr::new(pmu.kind(), 0).pid(-1).cpu(cpu as i32))
}

fn uncore_refused(_: &Ctx) -> Outcome {
    let attr = package(0)?;
    check_eq!(attr.refusal(), None, "errno of an event of a CPU");
    for (what, attr) in [
        ("a task", attr.clone().pid(0).cpu(-1)),
        ("a task on a CPU", attr.clone().pid(0)),
        ("samples", attr.clone().sample_period(1000)),
    ] {
        check_eq!(attr.refusal(), Some(libc::EINVAL), "errno of {what}");
    }
    let excluded = attr.user_only();
    check_eq!(
        excluded.refusal(),
        Some(libc::EINVAL),
        "errno of user mode only"
    );
    Ok(())
}

/// Files whose text is known when they are read, and that are there or not.
fn uncore_files(_: &Ctx) -> Outcome {
    let pmu = Pmu::needed("package_clock")?;
    for (file, text) in [
        ("format/divider", Some("config1:0-15")),
        ("caps/tick_ns", Some("10")),
        ("caps/divided", Some("1")),
        ("caps/none", None),
    ] {
        check_eq!(pmu.file(file)?, text.map(str::to_owned), "{file}");
    }
    check!(pmu.file("cpumask")?.is_some(), "there is no cpumask");
    Ok(())
}

/// An event counts while its task runs elsewhere, and can be read from there.
fn uncore_other_cpu(_: &Ctx) -> Outcome {
    let plain = package(0)?.open()?;
    let divided = package(0)?.with(|attr| attr.__bindgen_anon_3.config1 = 9);
    let divided = divided.open()?;
    let cpus = load::cpus()?;
    for cpu in cpus {
        load::pin(cpu)?;
        let before = (plain.count()?, divided.count()?);
        load::spin(3_000_000);
        let after = (plain.count()?, divided.count()?);
        check!(
            after.0 > before.0 && after.1 >= before.1,
            "counts {after:?} after {before:?}, read on CPU {cpu}"
        );
        check!(
            after.1 <= after.0 / 10 + 1 + after.0 / 100,
            "{} divided by ten is not {}",
            after.0,
            after.1
        );
    }
    Ok(())
}

/// `online` of a CPU, set back on drop.
struct Offline(String);

impl Offline {
    fn new(cpu: usize) -> Result<Self, Stop> {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        fs::write(&path, "0").map_err(|e| Error::from_io(format!("writing {path}"), &e))?;
        Ok(Offline(path))
    }
}

impl Drop for Offline {
    fn drop(&mut self) {
        let _ = fs::write(&self.0, "1");
    }
}

/// When its CPU goes offline, the event continues on another CPU of the package.
fn uncore_migrates(_: &Ctx) -> Outcome {
    let pmu = Pmu::needed("package_clock")?;
    let mask = |pmu: &Pmu| -> Result<Vec<usize>, Stop> {
        let text = pmu.file("cpumask")?.unwrap_or_default();
        let cpus = text.split(',').map(|cpu| cpu.parse().ok()).collect();
        let cpus: Option<Vec<usize>> = cpus;
        cpus.ok_or_else(|| Stop::Fail(format!("cpumask is {text:?}")))
    };
    let package_of = |cpu: usize| {
        let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id");
        fs::read_to_string(file).ok()
    };
    let cpus = load::cpus()?;
    let before = mask(&pmu)?;
    // One in the mask, which can go, with another one in its package.
    let Some(cpu) = before.iter().copied().find(|&cpu| {
        let online = format!("/sys/devices/system/cpu/cpu{cpu}/online");
        let others = cpus
            .iter()
            .filter(|&&other| other != cpu && package_of(other) == package_of(cpu));
        fs::exists(online).unwrap_or(false) && others.count() > 0
    }) else {
        skip!("no package whose CPU in {before:?} can go offline while another one stays");
    };
    let event = package(cpu)?.open()?;
    load::spin(1_000_000);
    let count = event.count()?;
    check!(count > 0, "nothing is counted on CPU {cpu}");
    let offline = Offline::new(cpu)?;
    let after = mask(&pmu)?;
    check!(
        !after.contains(&cpu) && after.len() == before.len(),
        "cpumask was {before:?} and is {after:?} without CPU {cpu}"
    );
    let moved = event.count()?;
    load::spin(1_000_000);
    let on = event.count()?;
    check!(
        moved >= count && on > moved,
        "counts {count}, {moved}, {on} around CPU {cpu}'s going offline"
    );
    drop(offline);
    load::spin(1_000_000);
    check!(event.count()? > on, "the count stands still");
    Ok(())
}
