// SPDX-License-Identifier: GPL-2.0

//! The AUX area itself: its records and flags, its limits, and its coming and going.

use super::inject::Injector;
use super::source::Source;
use perf_aux::abi;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::notify;
use perf_aux::record::Record;
use perf_aux::ring::{
    page_size,
    Aux,
    AuxMode,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    skip,
    Ctx,
    Event,
    Outcome,
    Result,
    Stop,
    Test, //
};
use std::fs;
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("area.snapshot.no_empty_records", snapshot_records),
    Test::new("area.full.records_add_up", full_records),
    Test::new("area.full.bytes", full_bytes),
    Test::new("area.full.truncated", truncated).limit(120),
    Test::new("area.full.child_wakes_parent", child_wakes_parent).limit(120),
    Test::new("area.full.watermark", watermark),
    Test::new("area.map.refused", map_refused),
    Test::new("area.map.failed_allocation", failed_allocation).limit(120),
    Test::new("area.map.accounting", accounting),
    Test::new("area.unmap_while_written", unmap_while_written).limit(180),
    Test::new("area.close_while_written", close_while_written),
    Test::new("area.psb.in_every_sample", psb_in_every_sample).limit(120),
    Test::new("area.psb.distance", psb_distance).limit(120),
];

const SOON: Duration = Duration::from_secs(20);
const TRUNCATED: u64 = abi::PERF_AUX_FLAG_TRUNCATED as u64;
const OVERWRITE: u64 = abi::PERF_AUX_FLAG_OVERWRITE as u64;
const PARTIAL: u64 = abi::PERF_AUX_FLAG_PARTIAL as u64;

/// A leader on its own, switched off.
struct Area {
    aux: Aux,
    ring: Ring,
    event: Event,
}

impl Area {
    fn new(source: &Source, pages: usize, mode: AuxMode) -> Result<Self> {
        Self::of(0, source, pages, mode)
    }

    /// The same of another process.
    fn of(pid: i32, source: &Source, pages: usize, mode: AuxMode) -> Result<Self> {
        let event = source.pmu.event(source.config).pid(pid).open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, pages, mode)?;
        Ok(Area { aux, ring, event })
    }

    /// The AUX records that came: offset, size, flags.
    fn records(&mut self) -> Result<Vec<(u64, u64, u64)>> {
        let records = self.ring.drain()?;
        Ok(records
            .into_iter()
            .filter_map(|record| match record {
                Record::Aux {
                    offset,
                    size,
                    flags,
                } => Some((offset, size, flags)),
                _ => None,
            })
            .collect())
    }
}

/// A snapshot area has no records that say nothing but OVERWRITE; its position is `aux_head`,
/// inside the area.
fn snapshot_records(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut area = Area::new(&source, 16, AuxMode::Snapshot)?;
    let mut heads = Vec::new();
    for cycle in 0..20 {
        area.event.enable()?;
        source.spin(1000 + cycle * 10);
        area.event.disable()?;
        let head = area.ring.aux_head();
        check!(
            head < area.aux.size() as u64,
            "aux_head {head:#x} of an area of {:#x}",
            area.aux.size()
        );
        heads.push(head);
        for (offset, size, flags) in area.records()? {
            check!(
                size != 0 || flags & !OVERWRITE != 0,
                "an AUX record at {offset:#x} of no bytes with flags {flags:#x}"
            );
            check!(
                flags & OVERWRITE != 0,
                "flags {flags:#x} of a record of a snapshot area"
            );
        }
    }
    heads.dedup();
    check!(
        heads.len() >= 15,
        "aux_head had only {} values in 20 cycles",
        heads.len()
    );
    Ok(())
}

/// A writable area's records never say OVERWRITE, follow each other, and add up to `aux_head`.
fn full_records(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut area = Area::new(&source, 64, AuxMode::Full)?;
    let mut end = 0;
    for cycle in 0..20 {
        area.event.enable()?;
        source.spin(200);
        area.event.disable()?;
        for (offset, size, flags) in area.records()? {
            check_eq!(offset, end, "offset of an AUX record in cycle {cycle}");
            check_eq!(
                flags & (OVERWRITE | TRUNCATED | PARTIAL),
                0,
                "flags in cycle {cycle}"
            );
            end += size;
        }
        check_eq!(area.ring.aux_head(), end, "aux_head after cycle {cycle}");
        area.ring.set_aux_tail(end);
    }
    check!(end > 0, "nothing was written");
    Ok(())
}

/// Waits for another task's event to wake the reader, and switches it on again meanwhile.
///
/// A full area stops its event by an interrupt which comes to that task's CPU after the reader was
/// woken. Whoever makes room and switches the event on before it comes has done so in vain.
fn wait_full(event: &Event, what: &str) -> Outcome {
    let end = Instant::now() + SOON;
    while notify::wait(event, Duration::from_millis(100))? != notify::Wake::Ready {
        check!(Instant::now() < end, "no {what} in {SOON:?}");
        event.enable()?;
    }
    Ok(())
}

/// Every byte that a record of a writable area tells of is the source's, also across many laps.
fn full_bytes(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !source.pattern {
        skip!("{} has no pattern source", source.pmu.name());
    }
    let mut child = Child::spinning(None)?;
    let mut area = Area::of(child.pid(), &source, 4, AuxMode::Full)?;
    let laps = 16;
    let mut word = 0u64;
    area.event.enable()?;
    child.go()?;
    while word * 8 < (laps * area.aux.size()) as u64 {
        wait_full(&area.event, &format!("half an area, at word {word:#x}"))?;
        for (offset, size, flags) in area.records()? {
            check_eq!(offset, word * 8, "offset of a record");
            for bytes in area.aux.bytes(offset, size as usize).chunks(8) {
                check_eq!(bytes, word.to_le_bytes(), "bytes of word {word:#x}");
                word += 1;
            }
            area.ring.set_aux_tail(offset + size);
            if flags & TRUNCATED != 0 {
                // The event stopped because this process was too slow. It goes on from here.
                area.event.enable()?;
            }
        }
    }
    Ok(())
}

/// A full area stops its event once, with TRUNCATED and one wake-up, on every CPU; it goes on when
/// there is room.
fn truncated(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for cpu in load::cpus()? {
        load::pin(cpu)?;
        let mut area = Area::new(&source, 2, AuxMode::Full)?;
        let mut told = 0;
        for round in 0..3 {
            area.event.enable()?;
            let mut flags = Vec::new();
            let full = load::spin_until(SOON, || {
                for (offset, size, flag) in area.records().unwrap_or_default() {
                    flags.push(flag);
                    told = told.max(offset + size);
                }
                flags.last().is_some_and(|flag| flag & TRUNCATED != 0)
            });
            check!(
                full,
                "no TRUNCATED in {SOON:?} on CPU {cpu}, round {round}: flags {flags:?}"
            );
            check_eq!(
                notify::poll(&area.event, Duration::ZERO)? & libc::POLLIN,
                libc::POLLIN,
                "poll when full"
            );
            let (head, count) = (area.ring.aux_head(), area.event.count()?);
            load::spin(20_000);
            check_eq!(
                area.ring.aux_head(),
                head,
                "aux_head once full on CPU {cpu}"
            );
            check_eq!(area.event.count()?, count, "count once full on CPU {cpu}");
            check_eq!(area.records()?, [], "records once full on CPU {cpu}");
            check_eq!(
                notify::poll(&area.event, Duration::ZERO)?,
                0,
                "poll again when full"
            );
            check_eq!(
                head,
                told,
                "aux_head and the end of what the records told of"
            );
            check!(
                head as usize <= (round + 1) * area.aux.size(),
                "aux_head {head:#x} with {} bytes of room given so far",
                (round + 1) * area.aux.size()
            );
            check_eq!(
                flags.iter().filter(|flag| **flag & TRUNCATED != 0).count(),
                1,
                "TRUNCATED records in {flags:?}"
            );
            area.ring.set_aux_tail(head);
        }
    }
    Ok(())
}

/// A child that fills the area which it inherited wakes the parent, each time.
fn child_wakes_parent(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let cpus = load::cpus()?;
    let cpu = cpus[0];
    // The parent has to be somewhere else, or it would fill the area as well.
    if cpus.len() < 2 {
        skip!("needs two CPUs");
    }
    load::pin(cpus[1])?;
    let event = source
        .pmu
        .event(source.config)
        .inherit()
        .cpu(cpu as i32)
        .open()?;
    let ring = Ring::map(&event, 8)?;
    let _aux = ring.map_aux(&event, 4, AuxMode::Full)?;
    event.enable()?;
    let mut child = Child::spinning(Some(cpu))?;
    child.go()?;
    let mut head = 0;
    for wake in 0..10 {
        wait_full(&event, &format!("wake-up {wake} by the child"))?;
        let now = ring.aux_head();
        check!(now >= head, "aux_head went from {head:#x} to {now:#x}");
        head = now;
        ring.set_aux_tail(head);
        event.enable()?;
    }
    check!(head > 0, "woken ten times for nothing");
    Ok(())
}

/// `aux_watermark` wakes the reader before the area is full.
fn watermark(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mark = page_size() as u64;
    let event = source
        .pmu
        .event(source.config)
        .aux_watermark(mark as u32)
        .open()?;
    let mut ring = Ring::map(&event, 8)?;
    let area = ring.map_aux(&event, 16, AuxMode::Full)?;
    event.enable()?;
    // In between are a few hundred instructions, each of which may be a word in the area.
    let end = Instant::now() + SOON;
    let mut woken = false;
    while !woken && Instant::now() < end {
        load::spin(1 << 5);
        woken = notify::poll(&event, Duration::ZERO)? & libc::POLLIN != 0;
    }
    let head = ring.aux_head();
    event.disable()?;
    check!(woken, "no wake-up in {SOON:?}");
    // A PMU may round to what its output allows, but half of the area is where it would wake up
    // anyhow.
    check!(
        head >= mark && head < area.size() as u64 / 2,
        "woken up at {head} bytes with a watermark of {mark}"
    );
    for record in ring.drain()? {
        if let Record::Aux { flags, .. } = record {
            check_eq!(flags & TRUNCATED, 0, "TRUNCATED before the area was full");
        }
    }
    Ok(())
}

/// Areas that can't be: each is refused, and a good one works after all of them.
fn map_refused(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let event = source.pmu.event(source.config).open()?;
    let ring = Ring::map(&event, 8)?;
    let page = page_size();
    let behind = 9 * page as u64;
    let bad: [(&str, u64, usize); 5] = [
        ("three pages", behind, 3 * page),
        ("an offset inside the data pages", 8 * page as u64, 4 * page),
        ("an offset of one page", page as u64, page),
        ("twelve pages", behind, 12 * page),
        ("zero offset", 0, 16 * page),
    ];
    for (what, offset, length) in bad {
        let result = ring.map_aux_at(&event, offset, length, AuxMode::Snapshot);
        let errno = result.err().and_then(|error| error.errno());
        check!(
            matches!(errno, Some(libc::EINVAL | libc::ENOMEM)),
            "errno of an area with {what}: {errno:?}"
        );
    }
    let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
    // A second mapping must be the same place and size.
    for (what, offset, length) in [
        ("another size", behind, 8 * page),
        ("another offset", behind + 16 * page as u64, 16 * page),
    ] {
        let result = ring.map_aux_at(&event, offset, length, AuxMode::Snapshot);
        let errno = result.err().and_then(|error| error.errno());
        check_eq!(
            errno,
            Some(libc::EINVAL),
            "errno of a second mapping of {what}"
        );
    }
    let again = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
    event.enable()?;
    source.spin_till_traced(2000, &aux);
    event.disable()?;
    check!(
        aux.all().iter().any(|byte| *byte != 0),
        "nothing was written after the refusals"
    );
    check!(aux.all() == again.all(), "two mappings of one area differ");
    Ok(())
}

/// Memory that this process has pinned, in KiB.
fn pinned() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")
        .map_err(|e| perf_aux::Error::from_io("reading /proc/self/status", &e))?;
    Ok(status
        .lines()
        .find_map(|line| line.strip_prefix("VmPin:"))
        .and_then(|line| line.split_whitespace().next()?.parse().ok())
        .unwrap_or(0))
}

/// Each allocation of the set-up fails once: all is given back, and the next try works.
fn failed_allocation(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let injector = Injector::new()?;
    let event = source.pmu.event(source.config).open()?;
    let ring = Ring::map(&event, 8)?;
    let before = pinned()?;
    let (all, failed) = injector.each(
        &[libc::ENOMEM],
        || ring.map_aux(&event, 16, AuxMode::Snapshot),
        |nth| {
            check_eq!(
                pinned()?,
                before,
                "pinned memory after allocation {nth} failed"
            );
            let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
            event.enable()?;
            source.spin_till_traced(500, &aux);
            event.disable()?;
            check!(
                aux.all().iter().any(|byte| *byte != 0),
                "nothing was traced after allocation {nth} failed"
            );
            Ok(())
        },
    )?;
    ctx.diag(format_args!("{failed} of {all} allocations are needed"));
    check!(failed > 0, "no allocation of the set-up failed");
    Ok(())
}

/// Mapping and unmapping leaves the accounting of locked and pinned memory where it was.
fn accounting(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let before = pinned()?;
    for round in 0..200 {
        let mode = match round % 2 {
            0 => AuxMode::Snapshot,
            _ => AuxMode::Full,
        };
        let mut area = Area::new(&source, 1 << (round % 6), mode)?;
        area.event.enable()?;
        load::spin(50);
        if round % 3 == 0 {
            area.event.disable()?;
        }
        area.records()?;
    }
    check_eq!(pinned()?, before, "pinned memory in KiB after 200 areas");
    // Enough for every page of the limit to be lost if each round had kept one.
    for _ in 0..50 {
        Area::new(&source, 64, AuxMode::Snapshot)?;
    }
    check_eq!(pinned()?, before, "pinned memory in KiB after 50 more");
    Ok(())
}

/// CPU-wide tracing at full rate, while the area is mapped and unmapped, in both orders of the two
/// mappings.
fn unmap_while_written(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("CPU-wide events need root");
    }
    let mut children = Vec::new();
    let mut events = Vec::new();
    for cpu in load::cpus()? {
        let mut child = Child::spinning(Some(cpu))?;
        child.go()?;
        children.push(child);
        events.push(
            source
                .pmu
                .event(source.config)
                .pid(-1)
                .cpu(cpu as i32)
                .open()?,
        );
    }
    for round in 0..ctx.rounds(500) {
        let mut areas = Vec::new();
        for event in &events {
            let ring = Ring::map(event, 1)?;
            let aux = ring.map_aux(event, 4, [AuxMode::Snapshot, AuxMode::Full][round % 2])?;
            event.enable()?;
            areas.push((ring, aux));
        }
        std::thread::sleep(Duration::from_millis(2));
        for (ring, aux) in areas {
            match round / 2 % 2 {
                0 => drop((aux, ring)),
                _ => {
                    drop(ring);
                    drop(aux);
                }
            }
        }
        for event in &events {
            event.disable()?;
        }
    }
    // The events still work.
    for event in &events {
        let ring = Ring::map(event, 1)?;
        let aux = ring.map_aux(event, 4, AuxMode::Snapshot)?;
        event.enable()?;
        let mut some = false;
        for _ in 0..200 {
            std::thread::sleep(Duration::from_millis(10));
            some |= aux.all().iter().any(|byte| *byte != 0);
            if some {
                break;
            }
        }
        event.disable()?;
        check!(some, "nothing was written after all the unmapping");
    }
    Ok(())
}

/// The descriptor closed first, the mappings later.
fn close_while_written(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for _ in 0..100 {
        let Area { aux, ring, event } = Area::new(&source, 4, AuxMode::Snapshot)?;
        event.enable()?;
        load::spin(100);
        drop(event);
        load::spin(100);
        let _ = aux.bytes(0, 8);
        drop(ring);
        load::spin(10);
        drop(aux);
    }
    Ok(())
}

/// The packet that decoders begin at.
const PSB: [u8; 16] = [
    0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82,
];

fn psbs(bytes: &[u8]) -> Vec<usize> {
    (0..bytes.len().saturating_sub(PSB.len() - 1))
        .filter(|at| bytes[*at..].starts_with(&PSB))
        .collect()
}

/// The PMU as a source of Intel PT packets with the shortest PSB period, which is 2 KiB.
fn packets(ctx: &Ctx) -> std::result::Result<Source, Stop> {
    let mut source = Source::new(ctx)?;
    let Some(period) = source.pmu.config("psb_period", 0)? else {
        skip!("{} has no psb_period", source.pmu.name());
    };
    let field =
        |name| -> std::result::Result<u64, Stop> { Ok(source.pmu.config(name, 1)?.unwrap_or(0)) };
    let config = period | field("pt")? | field("branch")? | field("tsc")?;
    source.config = config;
    source.pattern = false;
    Ok(source)
}

/// Once the area is full, each sample of 4096 bytes has a place where decoding can begin.
fn psb_in_every_sample(ctx: &Ctx) -> Outcome {
    let source = packets(ctx)?;
    let mut group = source.setup().open()?;
    let (mut samples, mut without) = (0, 0);
    for sample in group.sample(350, Duration::from_secs(60))? {
        let aux = sample.aux.unwrap_or_default();
        // Up to the first full sample there are zeros in front.
        if aux.len() == 4096 && aux[..16] != [0; 16] {
            samples += 1;
            without += u32::from(psbs(&aux).is_empty());
        }
    }
    check!(
        samples >= 100,
        "only {samples} samples of a full 4096 bytes"
    );
    check_eq!(without, 0, "samples without a PSB, of {samples}");
    Ok(())
}

/// In a full trace a PSB comes at least every period and 256 bytes.
fn psb_distance(ctx: &Ctx) -> Outcome {
    let source = packets(ctx)?;
    let area = Area::new(&source, 64, AuxMode::Full)?;
    // The position is published when the trace is switched off.
    for _ in 0..200 {
        area.event.enable()?;
        load::spin(20_000);
        area.event.disable()?;
        if area.ring.aux_head() > area.aux.size() as u64 / 4 {
            break;
        }
    }
    let length = area.ring.aux_head().min(area.aux.size() as u64) as usize;
    check!(
        length >= area.aux.size() / 4,
        "a trace of only {length} bytes"
    );
    let trace = area.aux.bytes(0, length);
    let places = psbs(&trace);
    check!(
        places.len() >= length / (2048 + 256),
        "{} PSBs in {length} bytes",
        places.len()
    );
    check_eq!(
        places.first(),
        Some(&0),
        "place of the first PSB of {length} bytes"
    );
    let longest = places
        .windows(2)
        .map(|pair| pair[1] - pair[0])
        .max()
        .unwrap_or(0);
    check!(
        longest <= 2048 + 256,
        "{longest} bytes from one PSB to the next"
    );
    Ok(())
}
