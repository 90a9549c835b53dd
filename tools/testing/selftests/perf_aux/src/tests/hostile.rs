// SPDX-License-Identifier: GPL-2.0

//! A program that writes nonsense where only the kernel and a well-behaved reader write: the
//! positions in the user page. At worst it loses its own trace and its own samples.

use super::sample::by_fault;
use super::source::Source;
use perf_aux::abi;
use perf_aux::group::Setup;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::record::Record;
use perf_aux::ring::{
    page_size,
    Aux,
    AuxMode,
    Ring, //
};
use perf_aux::{
    check,
    check_eq,
    skip,
    Ctx,
    Event,
    Outcome,
    Stop,
    Test, //
};
use std::mem::offset_of;
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("hostile.aux_tail", aux_tail).limit(120),
    Test::new("hostile.data_tail", data_tail),
    Test::new("hostile.user_page", user_page).limit(120),
    Test::new("hostile.aux_place", aux_place),
];

const KNOWN: u64 = (abi::PERF_AUX_FLAG_TRUNCATED
    | abi::PERF_AUX_FLAG_OVERWRITE
    | abi::PERF_AUX_FLAG_PARTIAL) as u64;

/// The trace of a child that spins on another CPU, if there is one.
struct Victim {
    aux: Aux,
    ring: Ring,
    event: Event,
    _child: Child,
}

impl Victim {
    fn new(source: &Source, pages: usize, mode: AuxMode) -> std::result::Result<Self, Stop> {
        let cpus = load::cpus()?;
        load::pin(cpus[0])?;
        let mut child = Child::spinning(cpus.last().copied())?;
        let event = source.pmu.event(source.config).pid(child.pid()).open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, pages, mode)?;
        event.enable()?;
        child.go()?;
        Ok(Victim {
            aux,
            ring,
            event,
            _child: child,
        })
    }

    /// What is in the ring is well formed, and says nothing impossible.
    fn check_records(&mut self) -> std::result::Result<usize, Stop> {
        let records = self.ring.drain()?;
        for record in &records {
            if let Record::Aux { size, flags, .. } = record {
                check!(
                    *size <= self.aux.size() as u64,
                    "a record of {size} bytes of an area of {}",
                    self.aux.size()
                );
                check_eq!(flags & !KNOWN, 0, "unknown flags of a record");
            }
        }
        Ok(records.len())
    }

    /// With the positions put right the trace goes on.
    fn check_goes_on(&mut self, mode: AuxMode) -> Outcome {
        self.event.disable()?;
        self.ring.set_tail(self.ring.head());
        self.ring.set_aux_tail(self.ring.aux_head());
        let (head, before) = (self.ring.aux_head(), self.aux.all());
        self.event.enable()?;
        std::thread::sleep(Duration::from_millis(100));
        self.event.disable()?;
        check!(
            self.aux.all() != before,
            "the trace did not go on from {head:#x}"
        );
        let records = self.check_records()?;
        check!(
            mode == AuxMode::Snapshot || records > 0 && self.ring.aux_head() != head,
            "{records} records, aux_head still {head:#x}"
        );
        Ok(())
    }
}

/// A position that is near the right one, or far off.
fn nonsense(random: &mut perf_aux::ktap::Random, near: u64, size: usize) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => near.wrapping_add(random.below(64)),
        3 => near.wrapping_sub(random.below(64)),
        4 => near.wrapping_add(size as u64),
        5 => near.wrapping_sub(size as u64 + random.below(4096)),
        6 => 1 << random.below(64),
        _ => random.any(),
    }
}

/// The reader's position in a writable area is anything: the trace goes on, stops or is truncated.
fn aux_tail(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    for pages in [1, 4] {
        let mut victim = Victim::new(&source, pages, AuxMode::Full)?;
        for round in 0..ctx.rounds(300) {
            let near = victim.ring.aux_head();
            let tail = nonsense(&mut random, near, victim.aux.size());
            victim.ring.set_aux_tail(tail);
            std::thread::sleep(Duration::from_micros(random.below(500)));
            victim.check_records()?;
            if round % 8 == 0 {
                victim.event.enable()?;
            }
        }
        victim.check_goes_on(AuxMode::Full)?;
    }
    Ok(())
}

/// The reader's position in a ring of samples is anything: samples are lost or overwritten, and
/// well formed once it is right again.
fn data_tail(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    let setup = Setup {
        sampler: by_fault(1000),
        sampler_pages: 4,
        ..source.setup()
    };
    let mut group = setup.open()?;
    for _ in 0..ctx.rounds(100) {
        let tail = nonsense(&mut random, group.ring.head(), group.ring.data_bytes());
        group.ring.set_tail(tail);
        let faults = 1 + random.below(6) as usize;
        let mut memory = super::faults::Pages::new(faults)?;
        group.run(|| while memory.fault() {})?;
        group.ring.set_tail(group.ring.head());
        let mut memory = super::faults::Pages::new(2)?;
        group.run(|| while memory.fault() {})?;
        let samples = group.samples()?;
        check!(samples.len() >= 2, "{} samples of 2", samples.len());
        source.check_all(&samples)?;
    }
    Ok(())
}

/// Every word of both user pages is anything, while samples are taken of the area.
fn user_page(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    for mode in [AuxMode::Full, AuxMode::Snapshot] {
        let victim = Victim::new(&source, 4, mode)?;
        let end = Instant::now() + ctx.time(Duration::from_secs(2));
        while Instant::now() < end {
            for _ in 0..100 {
                let near = victim.ring.aux_head();
                let value = nonsense(&mut random, near, victim.aux.size());
                // Half of them go where the positions are.
                let word = match random.below(2) {
                    0 => random.below(Ring::CONTROL_WORDS as u64) as usize,
                    _ => 128 + random.below(8) as usize,
                };
                victim.ring.scribble(word, value);
            }
            if random.below(4) == 0 {
                victim.event.disable()?;
            }
            victim.event.enable()?;
        }
        // Nobody can tell any more where the kernel is. With new mappings it begins anew.
        let Victim {
            aux,
            ring,
            event,
            _child,
        } = victim;
        event.disable()?;
        drop((aux, ring));
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 4, mode)?;
        Victim {
            aux,
            ring,
            event,
            _child,
        }
        .check_goes_on(mode)?;
    }
    Ok(())
}

/// Where an area is said to be counts when it is mapped and never again.
fn aux_place(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut random = ctx.random();
    if offset_of!(abi::perf_event_mmap_page, aux_offset) % 8 != 0 {
        skip!("the field is not aligned");
    }
    let at = offset_of!(abi::perf_event_mmap_page, aux_offset) / 8;
    let event = source.pmu.event(source.config).open()?;
    let ring = Ring::map(&event, 8)?;
    for round in 0..ctx.rounds(100) {
        let aux = ring.map_aux(&event, 4, AuxMode::Snapshot)?;
        event.enable()?;
        ring.scribble(at, nonsense(&mut random, 9 * page_size() as u64, 4096));
        ring.scribble(at + 1, nonsense(&mut random, 4 * page_size() as u64, 4096));
        source.spin_till_traced(100, &aux);
        event.disable()?;
        check!(
            aux.all().iter().any(|byte| *byte != 0),
            "nothing was traced in round {round}"
        );
        // A second mapping of another size is refused, whatever the user page says.
        let other = ring.map_aux_at(
            &event,
            9 * page_size() as u64,
            8 * page_size(),
            AuxMode::Snapshot,
        );
        check_eq!(
            other.err().and_then(|error| error.errno()),
            Some(libc::EINVAL),
            "errno of a mapping of another size"
        );
        drop(aux);
    }
    Ok(())
}
