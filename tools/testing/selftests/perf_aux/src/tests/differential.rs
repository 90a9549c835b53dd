// SPDX-License-Identifier: GPL-2.0

//! The same events twice, once with AUX sampling in C and once in Rust: every byte has to be the
//! same.
//!
//! The traced code is the same both times, and samples come from page faults that it makes, so with
//! the `pattern` source the AUX area is the same at each sample. What is different for other
//! reasons (the time, the numbers of the events, how long they ran, pointers on the stack) is
//! blanked out before the records are compared; where the ring can't be taken apart into records
//! the format has no such field, and all of its bytes are compared.

use super::faults::faults;
use super::source::Source;
use perf_aux::abi;
use perf_aux::group::Setup;
use perf_aux::ktap::Random;
use perf_aux::load::{
    self,
    FaultingPage, //
};
use perf_aux::record::Record;
use perf_aux::ring::{
    AuxMode,
    Ring, //
};
use perf_aux::sys::Variant;
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

pub const TESTS: &[Test] = &[
    Test::new("differential.records", records).limit(180),
    Test::new("differential.rings", rings).limit(180),
    Test::new("differential.writable_areas", writable_areas).limit(180),
];

/// Fields whose bytes are those of the moment.
const MOMENT: u32 = abi::PERF_SAMPLE_TIME
    | abi::PERF_SAMPLE_ID
    | abi::PERF_SAMPLE_STREAM_ID
    | abi::PERF_SAMPLE_IDENTIFIER
    | abi::PERF_SAMPLE_READ
    | abi::PERF_SAMPLE_STACK_USER;
/// Fields whose bytes are the same whenever the same code runs.
const SAME: u32 = abi::PERF_SAMPLE_IP
    | abi::PERF_SAMPLE_TID
    | abi::PERF_SAMPLE_ADDR
    | abi::PERF_SAMPLE_CALLCHAIN
    | abi::PERF_SAMPLE_CPU
    | abi::PERF_SAMPLE_PERIOD
    | abi::PERF_SAMPLE_REGS_USER
    | abi::PERF_SAMPLE_WEIGHT
    | abi::PERF_SAMPLE_DATA_SRC
    | abi::PERF_SAMPLE_TRANSACTION
    | abi::PERF_SAMPLE_DATA_PAGE_SIZE
    | abi::PERF_SAMPLE_CODE_PAGE_SIZE
    | abi::PERF_SAMPLE_REGS_INTR;

/// One arrangement of events and what is done under it.
#[derive(Clone, Debug)]
struct Case {
    aux_pages: usize,
    mode: AuxMode,
    ring_pages: usize,
    overwrite: bool,
    backward: bool,
    sample_type: u32,
    asked: u32,
    stack: u32,
    read_format: u64,
    /// What is done before each fault.
    work: Vec<u64>,
    /// The records are read after so many faults.
    batch: usize,
}

/// What came of it.
#[derive(PartialEq, Eq)]
struct Outcomes {
    head: u64,
    aux_head: u64,
    aux: Vec<u8>,
    ring: Vec<u8>,
    records: Vec<Record>,
}

impl Case {
    fn random(random: &mut Random, fields: u32) -> Self {
        let asked = match random.below(6) {
            0 => random.below(64),
            1 => 4096,
            2 => 65_528 + random.below(16),
            3 => u32::MAX.into(),
            _ => random.below(65_536),
        };
        let faults = 1 + random.below(12);
        Case {
            aux_pages: 1 << random.below(6),
            mode: AuxMode::Snapshot,
            ring_pages: 1 << random.below(7),
            overwrite: false,
            backward: false,
            sample_type: abi::PERF_SAMPLE_AUX | (random.any() as u32 & fields),
            asked: asked as u32,
            stack: match random.below(4) {
                0 => 65_528 - random.below(80) as u32 * 8,
                _ => random.below(65_536 / 8) as u32 * 8,
            },
            read_format: random.below(16),
            work: (0..faults)
                .map(|_| {
                    let most = [8, 100, 1500][random.below(3) as usize];
                    random.below(most)
                })
                .collect(),
            batch: 1 + random.below(6) as usize,
        }
    }

    fn sampler(&self) -> Attr {
        faults(1)
            .with(|attr| {
                attr.set_disabled(0);
                attr.set_exclude_callchain_kernel(1);
                attr.set_write_backward(self.backward.into());
            })
            .sample_type(self.sample_type.into())
            .aux_sample_size(self.asked)
            .read_format(self.read_format)
            // Stack pointer and instruction pointer; others may hold addresses of the heap.
            .sample_regs_user((1 << 7) | (1 << 8))
            .sample_regs_intr((1 << 7) | (1 << 8))
            .sample_stack_user(self.stack)
    }

    fn run(&self, source: &Source) -> Result<Outcomes, Stop> {
        let page = FaultingPage::new()?;
        let leader = Setup {
            aux_pages: self.aux_pages,
            ..source.setup()
        };
        let events = leader.leader.open()?;
        let leader_ring = Ring::map(&events, leader.leader_pages)?;
        let aux = leader_ring.map_aux(&events, self.aux_pages, self.mode)?;
        let sampler = self.sampler().group(&events).open()?;
        let mut ring = match self.overwrite {
            true => Ring::map_read_only(&sampler, self.ring_pages)?,
            false => Ring::map(&sampler, self.ring_pages)?,
        };
        let parsed = !self.overwrite && !self.backward;
        let mut records = Vec::new();
        for batch in self.work.chunks(self.batch) {
            events.enable()?;
            for rounds in batch {
                load::spin(*rounds);
                page.fault();
            }
            events.disable()?;
            if parsed {
                records.extend(ring.drain()?.into_iter().map(blank));
            }
        }
        Ok(Outcomes {
            head: ring.head(),
            aux_head: leader_ring.aux_head(),
            aux: aux.all(),
            ring: match parsed {
                true => Vec::new(),
                false => ring.all(),
            },
            records,
        })
    }

    /// Runs it in one variant.
    fn run_in(&self, variant: &'static str, source: &Source) -> Result<Outcomes, Stop> {
        let _variant = Variant::choose(variant)?;
        self.run(source)
    }

    /// Runs it in both variants and compares.
    fn compare(&self, source: &Source) -> Outcome {
        let c = self.run_in("C", source)?;
        let rust = self.run_in("Rust", source)?;
        check_eq!(rust.aux_head, c.aux_head, "aux_head of {self:?}");
        check!(rust.aux == c.aux, "AUX areas differ for {self:?}");
        check_eq!(rust.head, c.head, "data_head of {self:?}");
        check_eq!(rust.records.len(), c.records.len(), "records of {self:?}");
        for (n, (rust, c)) in rust.records.iter().zip(&c.records).enumerate() {
            check!(
                rust == c,
                "record {n} of {self:?}\nin Rust: {rust:?}\nin C: {c:?}"
            );
            if let Record::Sample(sample) = rust {
                source.check(sample)?;
            }
        }
        let first = rust
            .ring
            .iter()
            .zip(&c.ring)
            .position(|(rust, c)| rust != c);
        check!(
            first.is_none(),
            "the rings differ at byte {first:?} for {self:?}"
        );
        Ok(())
    }
}

/// Takes out what belongs to the moment.
fn blank(mut record: Record) -> Record {
    match &mut record {
        Record::Sample(sample) => {
            sample.id = 0;
            sample.stream_id = 0;
            sample.time = 0;
            sample.read.iter_mut().for_each(|value| *value = 0);
            sample.stack_user.fill(0);
        }
        Record::Lost { id, .. } | Record::Throttle { id } | Record::Unthrottle { id } => *id = 0,
        _ => {}
    }
    record
}

/// Runs `cases` random cases that `change` has a say in.
fn both(ctx: &Ctx, cases: usize, fields: u32, change: impl Fn(&mut Case, &mut Random)) -> Outcome {
    let source = Source::new(ctx)?;
    source.needs_instructions()?;
    if Variant::names().len() < 2 {
        skip!("the kernel has one variant of AUX sampling (CONFIG_PERF_AUX_RUST_COMPARE is off)");
    }
    load::pin(load::cpus()?[0])?;
    // What is touched for the first time faults, which would be one more sample.
    Case::random(&mut ctx.random(), 0).run(&source)?;
    let mut random = ctx.random();
    let mut samples = 0;
    for _ in 0..cases {
        let mut case = Case::random(&mut random, fields);
        change(&mut case, &mut random);
        samples += case.work.len();
        case.compare(&source)?;
    }
    ctx.diag(format_args!("{cases} cases with {samples} page faults"));
    Ok(())
}

/// Any mix of fields, sizes and positions, in a ring that is read.
fn records(ctx: &Ctx) -> Outcome {
    both(ctx, ctx.rounds(80), SAME | MOMENT, |_, _| {})
}

/// Rings that are overwritten and rings that are written backward, which may be smaller than a
/// sample: the whole ring, byte by byte.
fn rings(ctx: &Ctx) -> Outcome {
    both(ctx, ctx.rounds(80), SAME, |case, random| {
        (case.overwrite, case.backward) = match random.below(3) {
            0 => (true, false),
            1 => (true, true),
            _ => (false, true),
        };
        case.ring_pages = 1 << random.below(5);
    })
}

/// Areas that are mapped writable, of which there is nothing to sample.
fn writable_areas(ctx: &Ctx) -> Outcome {
    both(ctx, ctx.rounds(40), SAME | MOMENT, |case, random| {
        case.mode = AuxMode::Full;
        // Large enough never to be full: the event would be switched off some time after.
        case.aux_pages = 64;
        case.work = case.work.iter().map(|_| random.below(50)).collect();
    })
}
