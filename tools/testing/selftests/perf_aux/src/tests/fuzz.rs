// SPDX-License-Identifier: GPL-2.0

//! Random calls on the surface of AUX sampling: attributes, groups, mappings, ioctls, children.
//!
//! A sequence of calls is a process of its own, which may end in any way but hang. What it does is
//! decided by its seed alone, so a fault of the kernel can be tried again:
//!
//! ```text
//! perf_aux --filter fuzz --seed <the seed that the failure tells>
//! ```

use super::source::Source;
use perf_aux::abi;
use perf_aux::ktap::Random;
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
    Mapping,
    Ring, //
};
use perf_aux::sys::{
    self,
    KernelLog,
    Pmu, //
};
use perf_aux::{
    check,
    Attr,
    Ctx,
    Event,
    Outcome,
    Test, //
};
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("fuzz.calls", |ctx| sequences(ctx, false)).limit(120),
    Test::new("fuzz.records", |ctx| sequences(ctx, true)).limit(120),
];

/// Calls of one sequence.
const CALLS: u64 = 40;

/// Random sequences, which must leave the kernel in good order; `records` takes all that is written
/// apart meanwhile, and it must be well formed.
fn sequences(ctx: &Ctx, records: bool) -> Outcome {
    let source = Source::new(ctx)?;
    let formats = formats(&source.pmu);
    let end = Instant::now() + ctx.time(Duration::from_secs(5));
    let mut log = KernelLog::from_now();
    let mut sequences = 0;
    let (mut opened, mut traced, mut parsed) = (0, 0, 0);
    while Instant::now() < end || sequences < 12 {
        let seed = ctx.seed().wrapping_add(sequences);
        let mut sequence = Sequence::new(&source, &formats, seed, records);
        let child = Child::new(move || sequence.run())?;
        // How it ended is its own affair. A status tells how far it got.
        if let Ok(status) = child.wait() {
            let reached = |bit: u8| u64::from(status & bit != 0);
            opened += reached(OPENED);
            traced += reached(TRACED);
            parsed += reached(PARSED);
            check!(
                status & MALFORMED == 0,
                "with --seed {seed} a record is not well formed, see above"
            );
        }
        sequences += 1;
        if let Some(fault) = log.as_mut().and_then(|log| log.faults().into_iter().next()) {
            perf_aux::fail!("with --seed {seed} the kernel says: {fault}");
        }
    }
    ctx.diag(format_args!(
        "{sequences} sequences; {opened} opened an AUX event, {traced} traced, {parsed} read samples"
    ));
    // Random calls that never get anywhere test nothing.
    check!(
        opened * 4 > sequences && traced * 8 > sequences,
        "of {sequences} sequences {opened} opened an AUX event, and {traced} traced"
    );
    check!(
        !records || parsed * 8 > sequences,
        "of {sequences} sequences {parsed} read samples"
    );
    let mut group = source.setup().open()?;
    let samples = group.sample(3, Duration::from_secs(20))?;
    check!(samples.len() >= 3, "{} samples afterwards", samples.len());
    source.check_all(&samples)
}

/// Bits of `attr.config` that the PMU has a meaning for.
fn formats(pmu: &Pmu) -> Vec<u64> {
    ["pattern", "pt", "tsc", "noretcomp", "branch", "psb_period"]
        .iter()
        .filter_map(|field| pmu.config(field, 1).ok().flatten())
        .collect()
}

/// How far a sequence got, in its status.
const OPENED: u8 = 1;
const TRACED: u8 = 2;
const PARSED: u8 = 4;
const MALFORMED: u8 = 8;

/// A ring that a sequence has mapped.
struct Mapped {
    /// Whose it is, by its place in [`Sequence::events`].
    event: usize,
    ring: Ring,
    /// The sequence has written into its control page, which says nothing any more.
    scribbled: bool,
}

/// Takes all records of an event out of its ring, and checks them. Returns how many samples there
/// were.
fn read(ring: &mut Ring, event: &Event) -> perf_aux::Result<usize> {
    let attr = event.attr();
    let has_id =
        attr.sample_type & u64::from(abi::PERF_SAMPLE_ID | abi::PERF_SAMPLE_IDENTIFIER) != 0;
    let mut samples = 0;
    for record in ring.drain()? {
        let Record::Sample(sample) = record else {
            continue;
        };
        samples += 1;
        if has_id && sample.id != event.id()? {
            return Err(perf_aux::Error::new("a sample of another event"));
        }
        if sample.aux.map_or(0, |aux| aux.len()) > attr.aux_sample_size as usize {
            return Err(perf_aux::Error::new("more AUX bytes than asked for"));
        }
    }
    Ok(samples)
}

/// One process's calls, and what they made.
struct Sequence {
    random: Random,
    pmu: Pmu,
    formats: Vec<u64>,
    events: Vec<Event>,
    rings: Vec<Mapped>,
    areas: Vec<Aux>,
    mappings: Vec<Mapping>,
    children: Vec<Child>,
    /// Whether records are taken apart. Each ring has the records of one event then.
    records: bool,
    reached: u8,
}

impl Sequence {
    fn new(source: &Source, formats: &[u64], seed: u64, records: bool) -> Self {
        Sequence {
            random: Random::new(seed),
            pmu: source.pmu.clone(),
            formats: formats.to_vec(),
            events: Vec::new(),
            rings: Vec::new(),
            areas: Vec::new(),
            mappings: Vec::new(),
            children: Vec::new(),
            records,
            reached: 0,
        }
    }

    fn run(&mut self) -> u8 {
        // SAFETY: no preconditions. A notification must not end the sequence, and nothing may keep
        // it from ending.
        unsafe {
            libc::signal(libc::SIGIO, libc::SIG_IGN);
            libc::alarm(60);
        }
        if sys::is_root() && self.random.below(3) == 0 {
            let _ = sys::become_nobody();
        }
        for _ in 0..CALLS {
            match self.random.below(20) {
                0..=5 => self.open(),
                6..=8 => self.map(),
                9 => self.unmap(),
                10..=12 => self.ioctl(),
                13 => self.scribble(),
                14 => self.close(),
                15 => self.look(),
                16 => self.children(),
                17 => self.elsewhere(),
                _ => {
                    self.work();
                    if self.records {
                        self.look();
                    }
                }
            }
            self.note();
        }
        self.look();
        self.reached
    }

    /// Notes whether there is a trace.
    fn note(&mut self) {
        let traced = |aux: &Aux| aux.bytes(0, 64).iter().any(|byte| *byte != 0);
        if self.areas.iter().any(traced) {
            self.reached |= TRACED;
        }
    }

    fn event(&mut self) -> Option<&Event> {
        let n = self.random.below(self.events.len() as u64) as usize;
        self.events.get(n)
    }

    /// One of the values, mostly; or any.
    fn mostly(&mut self, values: &[u64]) -> u64 {
        match self.random.below(24) {
            0 => self.random.any(),
            1 => 1 << self.random.below(64),
            n => values[(n as usize + self.random.below(64) as usize) % values.len()],
        }
    }

    fn attr(&mut self) -> Attr {
        let aux = self.random.below(2) == 0;
        let mut attr = if aux {
            let mut config = 0;
            for n in 0..self.formats.len() {
                if self.random.below(3) == 0 {
                    config |= self.formats[n];
                }
            }
            if self.random.below(16) == 0 {
                config ^= self.random.any();
            }
            self.pmu.event(config)
        } else {
            match self.random.below(8) {
                0 => Attr::exec_breakpoint(load::spin as *const () as u64, 1),
                1 => Attr::new(self.random.below(12) as u32, self.random.below(12)),
                2..=4 => Attr::software(abi::PERF_COUNT_SW_PAGE_FAULTS),
                _ => Attr::software(self.random.below(12) as u32),
            }
        };
        let period = match attr.raw().config {
            config if config == u64::from(abi::PERF_COUNT_SW_PAGE_FAULTS) => {
                self.mostly(&[1, 1, 2, 7])
            }
            _ => self.mostly(&[1, 7, 200_000, 1_000_000]),
        };
        // The last has all but PERF_SAMPLE_BRANCH_STACK, which software events refuse.
        let sample_type = self.mostly(&[0, 1, 0x10_0007, 0x10_0000, 0x11_0047, 0x11_77ff]);
        let asked = self.mostly(&[0, 8, 64, 4096, 65_535]);
        let watermark = self.mostly(&[0, 1, 4096]);
        let stack = self.mostly(&[0, 64, 65_528]);
        attr = attr
            .user_only()
            .sample_period(period)
            .sample_type(sample_type & ((1 << 25) - 1))
            .read_format(self.random.below(32))
            .sample_regs_user(0xff)
            .sample_regs_intr(0xff)
            .sample_stack_user(stack as u32)
            .aux_watermark(watermark as u32);
        if !aux || self.random.below(8) == 0 {
            attr = attr.aux_sample_size(asked as u32);
        }
        if aux && self.random.below(4) != 0 {
            // A tracer that samples itself is refused, which is tried often enough above.
            attr = attr.sample_period(0).sample_type(0);
        }
        // The bits one by one: disabled, inherit, pinned, exclusive, and so on.
        for bit in 0..40 {
            if self.random.below(80) == 0 {
                attr = attr.with(|attr| {
                    let set = attr._bitfield_1.get_bit(bit);
                    attr._bitfield_1.set_bit(bit, !set);
                });
            }
        }
        if self.random.below(24) == 0 {
            let size = self.mostly(&[0, 64, 72, 80, 96, 104, 112, 120, 128, 136, 4096]);
            attr = attr.with(|attr| attr.size = size as u32);
        }
        if self.random.below(12) == 0 {
            let actions = self.random.below(8) as u32;
            attr = match actions {
                1 => attr.aux_start_paused(),
                2 => attr.aux_pause(),
                3 => attr.aux_resume(),
                _ => attr,
            };
        }
        // A clock faster than the machine can answer it would leave it no time for anything else.
        let interval = 200_000 + self.random.below(2_000_000);
        let frequency = 1 + self.random.below(2000);
        attr.with(|attr| {
            if attr.freq() != 0 {
                attr.__bindgen_anon_1.sample_freq = frequency;
            } else if attr.type_ == abi::PERF_TYPE_SOFTWARE && attr.config < 2 {
                attr.__bindgen_anon_1.sample_period = interval;
            }
        })
    }

    fn open(&mut self) {
        let mut attr = self.attr();
        let aux = attr.raw().type_ == self.pmu.kind();
        let children: Vec<i32> = self.children.iter().map(Child::pid).collect();
        attr = match self.random.below(16) {
            0 => attr.pid(-1).cpu(self.random.below(3) as i32),
            1 if !children.is_empty() => attr.pid(children[0]),
            2 => attr.cpu(self.random.below(4) as i32 - 1),
            3 => attr.pid(self.random.below(100) as i32 - 1),
            _ => attr,
        };
        let mut flags = match self.random.below(8) {
            0 => self.random.below(16) as u32,
            _ => 0,
        };
        if self.records {
            flags &= !abi::PERF_FLAG_FD_OUTPUT;
        }
        attr = attr.flags(flags);
        let odd = self.random.below(8) == 0;
        // A sampler mostly belongs to a tracer.
        let leader = match self.random.below(8) {
            0 => self.event(),
            1 => None,
            _ if aux => None,
            _ => {
                let kind = self.pmu.kind();
                self.events
                    .iter()
                    .rev()
                    .find(|event| event.attr().type_ == kind)
            }
        };
        match leader {
            Some(leader) => attr = attr.group(leader),
            // Without a tracer there is nothing to ask for.
            None if odd => (),
            None => attr = attr.aux_sample_size(0),
        }
        if self.events.len() > 12 {
            self.close();
        }
        if let Ok(event) = attr.open() {
            if aux {
                self.reached |= OPENED;
            }
            self.events.push(event);
            if self.random.below(4) != 0 {
                self.set_up(aux);
            }
        }
    }

    /// All that the last event needs for tracing, or for its samples.
    fn set_up(&mut self, aux: bool) {
        let n = self.events.len() - 1;
        let event = &self.events[n];
        let Ok(ring) = Ring::map(event, 1 << self.random.below(4)) else {
            return;
        };
        if aux {
            let mode = match self.random.below(3) {
                0 => AuxMode::Full,
                _ => AuxMode::Snapshot,
            };
            let aux = ring.map_aux(event, 1 << self.random.below(5), mode);
            self.areas.extend(aux);
        }
        let _ = event.enable();
        self.push_ring(n, ring);
    }

    fn push_ring(&mut self, event: usize, ring: Ring) {
        self.rings.push(Mapped {
            event,
            ring,
            scribbled: false,
        });
    }

    fn map(&mut self) {
        if self.events.is_empty() {
            return;
        }
        let n = self.random.below(self.events.len() as u64) as usize;
        let page = page_size();
        if self.random.below(2) == 0 {
            if let Ok(ring) = Ring::map(&self.events[n], 1 << self.random.below(6)) {
                self.push_ring(n, ring);
            }
            return;
        }
        let pages = self.mostly(&[1, 2, 4, 16, 64, 3]) % 128;
        let mode = match self.random.below(3) {
            0 => AuxMode::Full,
            _ => AuxMode::Snapshot,
        };
        let odd = self.random.below(8) == 0;
        let offset = self.random.below(128);
        let of_event = self.rings.iter().find(|mapped| mapped.event == n);
        match of_event {
            Some(mapped) if !odd => {
                if let Ok(aux) = mapped.ring.map_aux(&self.events[n], pages as usize, mode) {
                    self.areas.push(aux);
                }
            }
            _ => {
                let mapping = Mapping::new(
                    &self.events[n],
                    offset * page as u64,
                    pages as usize * page,
                    mode == AuxMode::Full,
                );
                self.mappings.extend(mapping);
            }
        }
    }

    fn unmap(&mut self) {
        match self.random.below(3) {
            0 if !self.areas.is_empty() => {
                let n = self.random.below(self.areas.len() as u64) as usize;
                self.areas.swap_remove(n);
            }
            1 if !self.rings.is_empty() => {
                let n = self.random.below(self.rings.len() as u64) as usize;
                self.rings.swap_remove(n);
            }
            _ if !self.mappings.is_empty() => {
                let n = self.random.below(self.mappings.len() as u64) as usize;
                self.mappings.swap_remove(n);
            }
            _ => {}
        }
    }

    fn ioctl(&mut self) {
        let what = self.random.below(16);
        let arg = self.random.below(5);
        let other = self.random.below(self.events.len() as u64) as usize;
        let filters = [
            "",
            "filter",
            "filter main",
            "start 0/16@/bin/true",
            "stop 1@",
            "tracestop",
        ];
        let Some(event) = self.event() else { return };
        let _ = match what {
            0..=3 => event.enable(),
            4 => event.disable(),
            5 | 6 => event.enable_group(),
            7 => event.disable_group(),
            8 => event.refresh(arg as u32),
            9 => event.reset(),
            10 => event.pause_output(arg & 1 == 0),
            11 => event.set_filter(filters[arg as usize % filters.len()]),
            12 => event.id().map(|_| ()),
            13 => {
                // Neither a period nor a descriptor that means anything, or a number that does.
                for request in [
                    abi::PERIOD,
                    abi::SET_BPF,
                    abi::QUERY_BPF,
                    abi::MODIFY_ATTRIBUTES,
                ] {
                    // SAFETY: the kernel takes the argument for the address of what it reads or
                    // writes; nothing of this process is there.
                    unsafe { libc::ioctl(event.fd(), u64::from(request), arg) };
                }
                Ok(())
            }
            _ => match self.events.get(other) {
                Some(target) if !self.records => self.events[0].set_output(target),
                _ => Ok(()),
            },
        };
    }

    fn scribble(&mut self) {
        let (word, value) = (self.random.below(512), self.mostly(&[0, 4096, 8192]));
        let n = self.random.below(self.rings.len() as u64) as usize;
        let Some(mapped) = self.rings.get(n) else {
            return;
        };
        mapped.ring.scribble(
            if word < 256 {
                128 + word as usize % 8
            } else {
                word as usize
            },
            value,
        );
        let event = mapped.event;
        for mapped in &mut self.rings {
            mapped.scribbled |= mapped.event == event;
        }
    }

    fn close(&mut self) {
        if !self.events.is_empty() {
            let n = self.random.below(self.events.len() as u64) as usize;
            self.events.remove(n);
            self.rings.retain(|mapped| mapped.event != n);
            for mapped in &mut self.rings {
                mapped.event -= usize::from(mapped.event > n);
            }
        }
    }

    fn look(&mut self) {
        if let Some(event) = self.event() {
            let _ = event.read();
            let _ = notify::poll(event, Duration::ZERO);
        }
        for mapped in &mut self.rings {
            let (ring, event) = (&mut mapped.ring, &self.events[mapped.event]);
            if self.records && !mapped.scribbled && event.attr().write_backward() == 0 {
                self.reached |= match read(ring, event) {
                    Ok(0) => 0,
                    Ok(_) => PARSED,
                    Err(fault) => {
                        println!("# {fault}, of {:?}", event.attr());
                        MALFORMED
                    }
                };
            }
            ring.set_tail(ring.head());
            ring.set_aux_tail(ring.aux_head());
        }
    }

    fn children(&mut self) {
        if self.children.len() < 3 && self.random.below(2) == 0 {
            if let Ok(mut child) = Child::spinning(None) {
                let _ = child.go();
                self.children.push(child);
            }
        } else if !self.children.is_empty() {
            self.children.remove(0);
        }
    }

    /// What changes where the task runs, and whether its events do.
    fn elsewhere(&mut self) {
        let disable = self.random.below(2) == 0;
        let cpu = self.random.below(2) as usize;
        let _ = load::pin(cpu);
        // SAFETY: these take no further arguments.
        unsafe {
            if disable {
                libc::prctl(libc::PR_TASK_PERF_EVENTS_DISABLE);
            }
            libc::prctl(libc::PR_TASK_PERF_EVENTS_ENABLE);
        }
    }

    fn work(&mut self) {
        load::spin(self.random.below(300));
        if let Ok(mut memory) = super::faults::Pages::new(3) {
            while memory.fault() {}
        }
    }
}
