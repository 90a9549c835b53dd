// SPDX-License-Identifier: GPL-2.0

//! The AUX field of samples: how long it is and what is in it.

use super::faults::{
    faults,
    Pages, //
};
use super::source::Source;
use perf_aux::abi;
use perf_aux::group::{
    AuxGroup,
    Setup, //
};
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::record::{
    Record,
    Sample, //
};
use perf_aux::ring::{
    page_size,
    AuxMode,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    skip,
    Attr,
    Ctx,
    Outcome,
    Stop,
    Test, //
};
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("sample.size", size).limit(120),
    Test::new("sample.size.none_asked", none_asked),
    Test::new("sample.size.mixed_fields", mixed_fields).limit(120),
    Test::new("sample.size.full_stack", full_stack),
    Test::new("sample.bytes", bytes).limit(180),
    Test::new("sample.bytes.every_position", every_position).limit(120),
    Test::new("sample.bytes.clock", by_clock),
    Test::new("sample.bytes.enabled_again", enabled_again),
    Test::new("sample.bytes.inherited", inherited),
    Test::new("sample.bytes.every_cpu", every_cpu).limit(120),
    Test::new("sample.bytes.throttled", throttled),
    Test::new("sample.beside_others", beside_others),
    Test::new("sample.no_area", no_area),
    Test::new("sample.writable_area", writable_area),
    Test::new("sample.area_mapped_again", area_mapped_again),
    Test::new("sample.group_enabled_again", group_enabled_again),
    Test::new("sample.sampler_joins_running_leader", sampler_joins),
    Test::new("sample.split_records", split_records).limit(120),
    Test::new("sample.full_ring", full_ring),
    Test::new("sample.shared_ring", shared_ring),
];

const SOON: Duration = Duration::from_secs(20);
pub const PLAIN: u32 =
    abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME | abi::PERF_SAMPLE_AUX;

/// A sampler that takes its samples when the test makes a page fault.
pub fn by_fault(aux_sample_size: u32) -> Attr {
    faults(1)
        .with(|attr| attr.set_disabled(0))
        .sample_type(PLAIN.into())
        .aux_sample_size(aux_sample_size)
}

/// A group that samples by page faults, and `faults` of these, with a little work in between.
fn sample_by_fault(
    setup: &Setup,
    faults: usize,
    work: impl Fn(usize),
) -> Result<Vec<Sample>, Stop> {
    let mut memory = Pages::new(faults)?;
    let mut group = setup.open()?;
    let mut samples = Vec::new();
    // The largest sample, and one more that the test did not mean to take.
    let room = 2 * usize::from(u16::MAX);
    group.leader.enable()?;
    for fault in 0..faults {
        work(fault);
        memory.fault();
        if group.filled() + room > group.ring.data_bytes() {
            // Samples are taken apart untraced, which is much faster and makes no samples.
            group.leader.disable()?;
            samples.extend(group.samples()?);
            group.leader.enable()?;
        }
    }
    group.leader.disable()?;
    samples.extend(group.samples()?);
    check!(
        samples.len() >= faults,
        "{} samples of {faults} page faults",
        samples.len()
    );
    Ok(samples)
}

/// How long the AUX field has to be: what was asked for, what the record has room for, or the area,
/// whichever is least.
fn expected_size(sample: &Sample, asked: u32, area: usize) -> usize {
    let aux = sample.aux.as_ref().map_or(0, Vec::len);
    let room = usize::from(u16::MAX) - (usize::from(sample.size) - aux);
    let rounded = room.min(asked as usize) / 8 * 8;
    rounded.min(area)
}

pub fn check_sizes(samples: &[Sample], asked: u32, area: usize) -> Outcome {
    for sample in samples {
        let aux = sample.aux.as_ref().map_or(0, Vec::len);
        check_eq!(
            aux,
            expected_size(sample, asked, area),
            "AUX bytes with {asked} asked, an area of {area}, header.size {}",
            sample.size
        );
        check!(
            sample.size <= 65528 && sample.size % 8 == 0,
            "header.size {}",
            sample.size
        );
    }
    Ok(())
}

/// Any size may be asked for; what is given is clamped to the record and the area, in whole words.
fn size(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for asked in [0, 1, 7, 8, 9, 4095, 65535, 65536, 0x7fff_ffff, 0xffff_ffff] {
        for pages in [1, 2, 16, 512] {
            let setup = Setup {
                sampler: by_fault(asked),
                aux_pages: pages,
                ..source.setup()
            };
            let samples = sample_by_fault(&setup, 4, |_| {
                load::spin(200);
            })?;
            check_sizes(&samples, asked, pages * page_size())?;
            source.check_all(&samples)?;
        }
    }
    Ok(())
}

/// The field without a size, and a size without the field, are both allowed and give nothing.
fn none_asked(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup {
        sampler: by_fault(0),
        ..source.setup()
    };
    for sample in sample_by_fault(&setup, 10, |_| {})? {
        check_eq!(
            sample.aux.as_deref(),
            Some(&[][..]),
            "AUX bytes with no size asked"
        );
    }
    let setup = Setup {
        sampler: by_fault(4096).sample_type((PLAIN & !abi::PERF_SAMPLE_AUX).into()),
        ..source.setup()
    };
    for sample in sample_by_fault(&setup, 10, |_| {})? {
        check_eq!(sample.aux, None, "AUX bytes without the field");
    }
    Ok(())
}

/// Every field that software can fill, at random together: records are well formed and what is left
/// is used.
fn mixed_fields(ctx: &Ctx) -> Outcome {
    const FIELDS: u32 = abi::PERF_SAMPLE_IP
        | abi::PERF_SAMPLE_TID
        | abi::PERF_SAMPLE_TIME
        | abi::PERF_SAMPLE_ADDR
        | abi::PERF_SAMPLE_READ
        | abi::PERF_SAMPLE_CALLCHAIN
        | abi::PERF_SAMPLE_ID
        | abi::PERF_SAMPLE_CPU
        | abi::PERF_SAMPLE_PERIOD
        | abi::PERF_SAMPLE_STREAM_ID
        | abi::PERF_SAMPLE_RAW
        | abi::PERF_SAMPLE_REGS_USER
        | abi::PERF_SAMPLE_STACK_USER
        | abi::PERF_SAMPLE_WEIGHT
        | abi::PERF_SAMPLE_DATA_SRC
        | abi::PERF_SAMPLE_IDENTIFIER
        | abi::PERF_SAMPLE_TRANSACTION
        | abi::PERF_SAMPLE_REGS_INTR
        | abi::PERF_SAMPLE_DATA_PAGE_SIZE
        | abi::PERF_SAMPLE_CODE_PAGE_SIZE;
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    for _ in 0..40 {
        let sample_type = abi::PERF_SAMPLE_AUX | (random.any() as u32 & FIELDS);
        let asked = [64, 4096, 60_000, 65_535][random.below(4) as usize];
        let stack = random.below(65_528 / 8) as u32 * 8;
        let read_format = random.below(16);
        let setup = Setup {
            sampler: by_fault(asked)
                .sample_type(sample_type.into())
                .read_format(read_format)
                .sample_regs_user(0xfff)
                .sample_regs_intr(0xff)
                .sample_stack_user(stack)
                .with(|attr| attr.set_exclude_callchain_kernel(1)),
            ..source.setup()
        };
        ctx.diag(format_args!(
            "sample_type {sample_type:#x}, read_format {read_format:#x}, aux_sample_size {asked}, stack {stack}"
        ));
        let samples = sample_by_fault(&setup, 4, |_| {
            load::spin(500);
        })?;
        check_sizes(&samples, asked, 16 * page_size())?;
        source.check_all(&samples)?;
    }
    Ok(())
}

/// The largest stack dump there is takes all the room of a record, and the record is still one.
fn full_stack(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for stack in [65_528, 65_520, 65_000, 32_768] {
        for asked in [8, 4096, 65_535] {
            let setup = Setup {
                sampler: by_fault(asked)
                    .sample_type(
                        (PLAIN | abi::PERF_SAMPLE_REGS_USER | abi::PERF_SAMPLE_STACK_USER).into(),
                    )
                    .sample_regs_user(0xff)
                    .sample_stack_user(stack),
                ..source.setup()
            };
            let samples = sample_by_fault(&setup, 4, |_| {})?;
            check_sizes(&samples, asked, 16 * page_size())?;
            source.check_all(&samples)?;
        }
    }
    Ok(())
}

/// The latest bytes, before the first lap of the area, across its end, and the area as a whole.
fn bytes(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for pages in [1, 2, 16] {
        let area = pages * page_size();
        for asked in [8, 64, 4096, area as u32] {
            let setup = Setup {
                sampler: by_fault(asked),
                aux_pages: pages,
                ..source.setup()
            };
            // From nothing written up to about three laps, in steps that no power of two divides.
            let laps = 3 * area as u64 / 8;
            let rounds = laps / 40;
            let samples = sample_by_fault(&setup, 40, |fault| {
                load::spin(if fault == 0 {
                    0
                } else {
                    rounds / 8 + fault as u64 % 7
                });
            })?;
            check_sizes(&samples, asked, area)?;
            source.check_all(&samples)?;
            if source.by_instruction {
                let last = samples
                    .last()
                    .map(|sample| source.check(sample))
                    .transpose()?;
                let last = last.flatten().unwrap_or(0);
                check!(
                    last * 8 > area as u64,
                    "{last} words written: not even one lap of {area} bytes"
                );
            }
        }
    }
    Ok(())
}

/// Samples at every position of a one-page area relative to its end.
fn every_position(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    source.needs_instructions()?;
    let words = page_size() / 8;
    for asked in [64, 4096] {
        let setup = Setup {
            sampler: by_fault(asked),
            aux_pages: 1,
            ..source.setup()
        };
        let mut seen = vec![false; words];
        for round in 0..20 {
            let samples = sample_by_fault(&setup, 200, |fault| {
                load::spin((fault * 7 + round) as u64 % 31);
            })?;
            source.check_all(&samples)?;
            for sample in &samples {
                let now = source.check(sample)?.unwrap_or(0);
                seen[now as usize % words] = true;
            }
        }
        let size = asked as usize / 8;
        let missing = (0..words).filter(|at| !seen[*at]).count();
        // The places where the copy takes another way: at the end of the area and a sample's length
        // behind it.
        let edges = [
            0,
            1,
            words - 1,
            size % words,
            (size + 1) % words,
            (size + words - 1) % words,
        ];
        let missed: Vec<usize> = edges.into_iter().filter(|at| !seen[*at]).collect();
        ctx.diag(format_args!(
            "samples of {asked} bytes: {missing} of {words} positions without one, {} of the edges",
            missed.len()
        ));
        check!(
            missing < words / 4,
            "{missing} of {words} positions had no sample"
        );
    }
    Ok(())
}

/// The same with a timer, which comes in the middle of anything.
fn by_clock(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut group = source.setup().open()?;
    let samples = group.sample(200, SOON)?;
    check!(
        samples.len() >= 200,
        "{} samples in {SOON:?}",
        samples.len()
    );
    check_sizes(&samples, 4096, 16 * page_size())?;
    source.check_all(&samples)
}

/// Switching the group off and on continues the trace where it was.
fn enabled_again(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup {
        sampler: by_fault(4096),
        ..source.setup()
    };
    let mut memory = Pages::new(200)?;
    let mut group = setup.open()?;
    let mut samples = Vec::new();
    for _ in 0..40 {
        group.leader.enable()?;
        for _ in 0..4 {
            load::spin(50);
            memory.fault();
        }
        group.leader.disable()?;
        let new = group.samples()?;
        check!(new.len() >= 4, "{} samples of 4 page faults", new.len());
        samples.extend(new);
    }
    check_sizes(&samples, 4096, 16 * page_size())?;
    source.check_all(&samples)
}

/// A child's samples go to the parent's ring and hold the trace of the area that both write to.
fn inherited(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    // Mapping an inherited event needs a CPU, and then everything has to happen there.
    let cpu = load::cpus()?[0];
    load::pin(cpu)?;
    let base = source.setup();
    let setup = Setup {
        leader: base.leader.clone().inherit().cpu(cpu as i32),
        sampler: by_fault(4096).inherit().cpu(cpu as i32),
        sampler_pages: 256,
        ..base
    };
    let mut group = setup.open()?;
    let work = || match Pages::new(20) {
        Ok(mut memory) => {
            while memory.fault() {
                load::spin(100);
            }
            0
        }
        Err(_) => 1,
    };
    for round in 0..3 {
        group.leader.enable()?;
        let child = Child::new(work)?;
        let pid = child.pid() as u32;
        check_eq!(child.wait()?, 0, "the child's exit status");
        group.leader.disable()?;
        let samples = group.samples()?;
        let of_child = samples.iter().filter(|sample| sample.pid == pid).count();
        check!(
            of_child >= 20,
            "{of_child} samples of child {round}, which made 20 page faults"
        );
        for sample in &samples {
            source.check(sample)?;
            let aux = sample.aux.as_ref().map_or(0, Vec::len);
            check_eq!(aux, 4096, "AUX bytes of a sample of process {}", sample.pid);
        }
    }
    Ok(())
}

/// One group per CPU, all at once, each with a trace of its own.
fn every_cpu(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("CPU-wide events need root");
    }
    let mut groups = Vec::new();
    let mut children = Vec::new();
    for cpu in load::cpus()? {
        let base = source.setup();
        let setup = Setup {
            leader: base.leader.clone().pid(-1).cpu(cpu as i32),
            sampler: base.sampler.clone().pid(-1).cpu(cpu as i32),
            ..base
        };
        groups.push((cpu, setup.open()?));
        children.push(Child::spinning(Some(cpu))?);
    }
    for ((_, group), child) in groups.iter().zip(&mut children) {
        group.leader.enable()?;
        child.go()?;
    }
    let end = std::time::Instant::now() + SOON;
    let enough = 40 * 4096;
    while std::time::Instant::now() < end && groups.iter().any(|(_, group)| group.filled() < enough)
    {
        std::thread::sleep(Duration::from_millis(50));
    }
    for (_, group) in &groups {
        group.leader.disable()?;
    }
    for (cpu, group) in &mut groups {
        let samples = group.samples()?;
        check!(
            samples.len() >= 39,
            "{} samples on CPU {cpu} in {SOON:?}",
            samples.len()
        );
        check_sizes(&samples, 4096, 16 * page_size())?;
        source.check_all(&samples)?;
    }
    Ok(())
}

/// A sampler that is held back for being too fast takes its leader with it; what comes after is
/// still right.
fn throttled(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("setting kernel.perf_event_max_sample_rate needs root");
    }
    let _rate = sys::Sysctl::set("kernel/perf_event_max_sample_rate", 100)?;
    let base = source.setup();
    let setup = Setup {
        sampler: base.sampler.clone().sample_period(20_000),
        ..base
    };
    let mut group = setup.open()?;
    let mut samples = Vec::new();
    let (mut throttles, mut after) = (0, 0);
    for _ in 0..20 {
        let half = group.ring.data_bytes() / 2;
        group.run(|| load::spin_until(Duration::from_millis(200), || group.filled() > half))?;
        // It is the leader whose ring tells of the whole group being held back.
        let told = group.leader_ring.drain()?;
        throttles += told
            .iter()
            .filter(|record| matches!(record, Record::Throttle { .. }))
            .count();
        let new = group.samples()?;
        after += if throttles > 0 { new.len() } else { 0 };
        samples.extend(new);
        if throttles >= 3 && after >= 20 {
            break;
        }
    }
    if throttles == 0 {
        skip!("the sampler was never throttled: {} samples", samples.len());
    }
    check!(
        after >= 20,
        "{after} samples after {throttles} times of being throttled"
    );
    for sample in &samples {
        let aux = sample.aux.as_ref().map_or(0, Vec::len);
        check!(aux == 4096 || aux == 0, "AUX bytes of a sample: {aux}");
    }
    source.check_all(&samples)
}

/// Without an area of the leader, and without even a ring of it, there is nothing to sample.
fn no_area(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for with_ring in [false, true] {
        let leader = source.pmu.event(source.config).open()?;
        let _ring = match with_ring {
            true => Some(Ring::map(&leader, 8)?),
            false => None,
        };
        let sampler = by_fault(4096).group(&leader).open()?;
        let mut ring = Ring::map(&sampler, 64)?;
        let mut memory = Pages::new(100)?;
        leader.enable()?;
        while memory.fault() {}
        leader.disable()?;
        let mut samples = 0;
        for record in ring.drain()? {
            if let Record::Sample(sample) = record {
                samples += 1;
                check_eq!(
                    sample.aux.as_deref(),
                    Some(&[][..]),
                    "AUX bytes with a ring: {with_ring}"
                );
            }
        }
        check!(samples >= 100, "{samples} samples of 100 page faults");
    }
    Ok(())
}

/// A writable area belongs to its reader: its sampler gets nothing, and never what the ring held
/// before.
fn writable_area(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup {
        sampler: by_fault(4096),
        mode: AuxMode::Full,
        // Few enough pages for many laps of the ring, so that it holds older samples everywhere.
        sampler_pages: 4,
        ..source.setup()
    };
    // A PMU may also refuse to set up such a pair.
    let mut group = match setup.open() {
        Ok(group) => group,
        Err(error) if error.errno() == Some(libc::EINVAL) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let mut memory = Pages::new(200)?;
    let mut samples = 0;
    for _ in 0..100 {
        group.run(|| {
            memory.fault();
            memory.fault();
        })?;
        for sample in group.samples()? {
            samples += 1;
            let aux = sample.aux.unwrap_or_default();
            check!(
                aux.is_empty(),
                "{} AUX bytes of a writable area, {} of them not zero",
                aux.len(),
                aux.iter().filter(|byte| **byte != 0).count()
            );
        }
        let head = group.leader_ring.aux_head();
        group.leader_ring.set_aux_tail(head);
    }
    check!(samples >= 200, "{samples} samples of 200 page faults");
    Ok(())
}

/// The area goes and comes while the sampler runs: each sample is of the area of its moment, or
/// zeros, or empty.
fn area_mapped_again(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    // Another process is traced, so that this one is not slowed down.
    let mut child = Child::spinning(None)?;
    let base = source.setup();
    let setup = Setup {
        leader: base.leader.clone().pid(child.pid()),
        sampler: base
            .sampler
            .clone()
            .pid(child.pid())
            .sample_period(2_000_000),
        ..base
    };
    let AuxGroup {
        leader,
        leader_ring,
        aux,
        mut ring,
        sampler: _sampler,
    } = setup.open()?;
    leader.enable()?;
    child.go()?;
    let mut area = Some(aux);
    let (mut samples, mut filled) = (0, 0);
    for phase in 0..120 {
        if phase % 2 == 1 {
            drop(area.take());
        } else if area.is_none() {
            area = Some(leader_ring.map_aux(&leader, 16, AuxMode::Snapshot)?);
            // A running leader finds its new area only when it is started again.
            if phase % 6 == 0 {
                leader.disable()?;
                leader.enable()?;
            }
        }
        std::thread::sleep(Duration::from_millis(20));
        for record in ring.drain()? {
            if let Record::Sample(sample) = record {
                source.check(&sample)?;
                let aux = sample.aux.unwrap_or_default();
                samples += 1;
                filled += u32::from(aux.iter().any(|byte| *byte != 0));
            }
        }
    }
    leader.disable()?;
    check!(samples >= 60, "{samples} samples");
    check!(
        filled >= 10,
        "{filled} of {samples} samples had anything in them"
    );
    Ok(())
}

/// DISABLE and ENABLE of the whole group, again and again: samples arrive in every cycle.
fn group_enabled_again(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut group = source.setup().open()?;
    for cycle in 0..12 {
        group.leader.enable_group()?;
        // Without a system call, and not for long: a context switch would start the sampler after
        // all.
        load::spin_for(Duration::from_millis(150));
        group.leader.disable_group()?;
        let samples = group.samples()?;
        check!(!samples.is_empty(), "no sample in cycle {cycle}");
        source.check_all(&samples)?;
    }
    Ok(())
}

/// A sampler that is opened when its leader already runs starts at once.
fn sampler_joins(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = source.setup();
    for round in 0..6 {
        let leader = setup.leader.open()?;
        let leader_ring = Ring::map(&leader, 8)?;
        let _aux = leader_ring.map_aux(&leader, 16, AuxMode::Snapshot)?;
        leader.enable()?;
        let sampler = setup.sampler.clone().group(&leader).open()?;
        let mut ring = Ring::map(&sampler, 64)?;
        load::spin_for(Duration::from_millis(150));
        leader.disable()?;
        let samples = ring.drain()?;
        check!(!samples.is_empty(), "no sample in round {round}");
    }
    Ok(())
}

/// Several events that overflow at the same page fault: the sample of each has its own fields,
/// sizes and bytes, whichever comes first.
fn beside_others(ctx: &Ctx) -> Outcome {
    const FAULTS: usize = 20;
    let source = Source::new(ctx)?;
    let plain = PLAIN | abi::PERF_SAMPLE_ID;
    let mut samplers = [
        by_fault(4096).sample_type(plain.into()),
        by_fault(64).sample_type((plain | abi::PERF_SAMPLE_ADDR).into()),
        // With the field and no size; and without either, which is the shortest record.
        by_fault(0).sample_type(plain.into()),
        by_fault(0).sample_type(abi::PERF_SAMPLE_ID.into()),
        by_fault(256)
            .sample_type((plain | abi::PERF_SAMPLE_REGS_USER | abi::PERF_SAMPLE_STACK_USER).into())
            .sample_regs_user(0xff)
            .sample_stack_user(512),
    ];
    for _ in 0..2 {
        let setup = source.setup();
        let leader = setup.leader.open()?;
        let leader_ring = Ring::map(&leader, 8)?;
        let _aux = leader_ring.map_aux(&leader, 16, AuxMode::Snapshot)?;
        let mut opened = Vec::new();
        for sampler in &samplers {
            let event = sampler.clone().group(&leader).open()?;
            let ring = Ring::map(&event, 64)?;
            opened.push((event, ring));
        }
        let mut memory = Pages::new(FAULTS)?;
        leader.enable()?;
        for _ in 0..FAULTS {
            load::spin(100);
            memory.fault();
        }
        leader.disable()?;
        for (event, ring) in &mut opened {
            let (attr, id) = (event.attr(), event.id()?);
            let has = |field: u32| attr.sample_type & u64::from(field) != 0;
            let mut samples = Vec::new();
            for record in ring.drain()? {
                if let Record::Sample(sample) = record {
                    samples.push(*sample);
                }
            }
            check!(
                samples.len() >= FAULTS,
                "{} samples of {FAULTS} page faults",
                samples.len()
            );
            for sample in &samples {
                check_eq!(sample.id, id, "id of a sample");
                check_eq!(sample.addr != 0, has(abi::PERF_SAMPLE_ADDR), "an address");
            }
            check_sizes(&samples, attr.aux_sample_size, 16 * page_size())?;
            if has(abi::PERF_SAMPLE_AUX) {
                source.check_all(&samples)?;
            }
        }
        // The last that was opened takes its sample first.
        samplers.reverse();
    }
    Ok(())
}

/// A ring of two pages, in which every other sample is split by the end.
fn split_records(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup {
        sampler: by_fault(4096),
        sampler_pages: 2,
        ..source.setup()
    };
    let samples = sample_by_fault(&setup, 1000, |_| {})?;
    check_sizes(&samples, 4096, 16 * page_size())?;
    source.check_all(&samples)
}

/// A ring that nobody reads loses records whole, and says so.
fn full_ring(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup {
        sampler: by_fault(4096),
        sampler_pages: 4,
        ..source.setup()
    };
    let mut group = setup.open()?;
    let mut memory = Pages::new(120)?;
    for _ in 0..3 {
        group.run(|| {
            for _ in 0..30 {
                memory.fault();
            }
        })?;
        let samples = group.samples()?;
        check!(
            !samples.is_empty() && samples.len() < 5,
            "{} samples in four pages",
            samples.len()
        );
        check_sizes(&samples, 4096, 16 * page_size())?;
        source.check_all(&samples)?;
    }
    group.run(|| memory.fault())?;
    let lost: u64 = group
        .ring
        .drain()?
        .iter()
        .map(|record| match record {
            Record::Lost { lost, .. } => *lost,
            _ => 0,
        })
        .sum();
    check!(
        lost > 0,
        "90 page faults in a ring for three samples, and none lost"
    );
    Ok(())
}

/// The sampler's output sent to the leader's ring: all records of both are well formed.
fn shared_ring(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let base = source.setup();
    // Identifiers tell whose record it is; the leader has no sample of its own.
    let id = u64::from(abi::PERF_SAMPLE_IDENTIFIER);
    let leader = base
        .leader
        .clone()
        .sample_type(id)
        .with(|attr| attr.set_sample_id_all(1))
        .open()?;
    let mut ring = Ring::map(&leader, 64)?;
    let _aux = ring.map_aux(&leader, 16, AuxMode::Snapshot)?;
    let sampler = by_fault(4096)
        .sample_type(u64::from(PLAIN) | id)
        .with(|attr| attr.set_sample_id_all(1))
        .group(&leader)
        .open()?;
    sampler.set_output(&leader)?;
    let (of_leader, of_sampler, sampler_id) = (leader.format(), sampler.format(), sampler.id()?);
    let mut memory = Pages::new(100)?;
    let mut samples = Vec::new();
    for _ in 0..10 {
        leader.enable()?;
        for _ in 0..10 {
            memory.fault();
        }
        leader.disable()?;
        let records = ring.drain_as(|raw| {
            let id = match raw.kind() {
                abi::PERF_RECORD_SAMPLE => raw.bytes().get(8..16),
                _ => raw.bytes().last_chunk::<8>().map(|chunk| &chunk[..]),
            };
            match id == Some(&sampler_id.to_ne_bytes()[..]) {
                true => of_sampler,
                false => of_leader,
            }
        })?;
        for record in records {
            if let Record::Sample(sample) = record {
                check_eq!(sample.id, sampler_id, "id of a sample");
                samples.push(*sample);
            }
        }
    }
    leader.disable()?;
    check!(
        samples.len() >= 90,
        "{} samples of 100 page faults",
        samples.len()
    );
    check_sizes(&samples, 4096, 16 * page_size())?;
    source.check_all(&samples)
}
