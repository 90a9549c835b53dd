// SPDX-License-Identifier: GPL-2.0

//! Samples in the middle of samples.
//!
//! A breakpoint on something of the kernel that is executed, read or written while a snapshot is
//! taken overflows right there, in a debug exception, which comes as an NMI does. It has an event
//! of the same group, so it asks for a snapshot of the area that one is being taken of. It must get
//! an AUX field of size 0, the interrupted sample must not notice, and the guard must be clear
//! behind it: the next sample is a whole one.

use super::faults::Pages;
use super::sample::{
    by_fault,
    check_sizes,
    PLAIN, //
};
use super::source::Source;
use perf_aux::abi;
use perf_aux::group::{
    AuxGroup,
    Setup, //
};
use perf_aux::load;
use perf_aux::record::{
    Record,
    Sample, //
};
use perf_aux::ring::{
    page_size,
    Ring, //
};
use perf_aux::sys::{
    self,
    kernel_symbol,
    Pmu,
    Variant, //
};
use perf_aux::{
    check,
    check_eq,
    skip,
    Attr,
    Ctx,
    Event,
    Outcome,
    Result,
    Stop,
    Test, //
};
use std::ffi::CString;
use std::fs;
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("nested.execution", execution).limit(120),
    Test::new("nested.execution.in_interrupt", execution_in_interrupt).limit(120),
    Test::new("nested.data", data).limit(120),
    Test::new("nested.probe", probe).limit(120),
    Test::new("nested.failed_snapshot", failed_snapshot),
    Test::new("nested.every_step", every_step).limit(120),
    Test::new("nested.nmi", nmi).limit(120),
];

/// The name of the PMU's `snapshot_aux`, which is called in the middle of each snapshot.
fn callback(source: &Source) -> std::result::Result<String, Stop> {
    let module = source.pmu.module();
    let wanted = |name: &str, of: Option<&str>| match &module {
        Some(module) => {
            of == Some(module) && name.contains("VTable") && name.contains("snapshot_aux")
        }
        None => name == "pt_event_snapshot_aux",
    };
    match sys::find_kernel_symbol(wanted)? {
        Some(name) => Ok(name),
        None => skip!(
            "/proc/kallsyms has no snapshot_aux of {}",
            source.pmu.name()
        ),
    }
}

const ASKED: u32 = 4096;
const FAULTS: usize = 100;

/// The address of a function of the kernel, for a breakpoint there.
fn function(name: &str) -> std::result::Result<u64, Stop> {
    if !sys::is_root() {
        skip!("a breakpoint in the kernel needs root");
    }
    match kernel_symbol(name)? {
        Some(address) => Ok(address),
        None => skip!("/proc/kallsyms has no address of {name}"),
    }
}

/// An event that interrupts the others of its group.
struct Nested {
    event: Event,
    ring: Ring,
}

impl Nested {
    fn open(attr: Attr, group: &AuxGroup) -> Result<Self> {
        let event = attr
            .sample_type(PLAIN.into())
            .aux_sample_size(ASKED)
            .group(&group.leader)
            .open()?;
        let ring = Ring::map(&event, 512)?;
        Ok(Nested { event, ring })
    }

    fn samples(&mut self) -> Result<Vec<Sample>> {
        let mut samples = Vec::new();
        for record in self.ring.drain()? {
            match record {
                Record::Sample(sample) => samples.push(*sample),
                Record::Lost { lost, .. } => {
                    return Err(perf_aux::Error::new(format!("{lost} nested samples lost")))
                }
                _ => {}
            }
        }
        Ok(samples)
    }
}

/// How long the AUX field of a sample is.
fn aux_len(sample: &Sample) -> Option<usize> {
    sample.aux.as_ref().map(Vec::len)
}

/// Takes samples by page faults.
fn sample_faults(group: &mut AuxGroup, faults: usize) -> Result<Vec<Sample>> {
    let mut memory = Pages::new(faults)?;
    let mut samples = Vec::new();
    let room = 2 * usize::from(u16::MAX);
    group.leader.enable()?;
    for fault in 0..faults {
        load::spin(fault as u64 % 7);
        memory.fault();
        if group.filled() + room > group.ring.data_bytes() {
            group.leader.disable()?;
            samples.extend(group.samples()?);
            group.leader.enable()?;
        }
    }
    group.leader.disable()?;
    samples.extend(group.samples()?);
    Ok(samples)
}

/// Runs `sample`, which gives the outer samples, in each variant of the kernel with the event that
/// `nested` describes in the group. Returns the nested samples of all, after checking that there is
/// one for every so many outer ones, and the outer ones as if there were no others.
fn interrupted(
    source: &Source,
    setup: &Setup,
    nested: impl Fn(&AuxGroup) -> std::result::Result<Attr, Stop>,
    sample: impl Fn(&mut AuxGroup) -> Result<Vec<Sample>>,
    check_nested: impl Fn(&Variant, &[Sample], usize) -> Outcome,
) -> Outcome {
    for name in Variant::names() {
        let variant = Variant::choose(name)?;
        let mut group = setup.open()?;
        let mut inner = Nested::open(nested(&group)?, &group)?;
        let mut outer = sample(&mut group)?;
        let samples = inner.samples()?;
        check!(
            outer.len() >= FAULTS / 2,
            "only {} samples with {name}",
            outer.len()
        );
        check_nested(&variant, &samples, outer.len())?;
        // What comes later is whole too, with the other event and without it.
        outer.extend(sample(&mut group)?);
        inner.samples()?;
        inner.event.disable()?;
        outer.extend(sample(&mut group)?);
        check_eq!(
            inner.samples()?.len(),
            0,
            "nested samples once switched off"
        );
        check_sizes(&outer, ASKED, setup.aux_pages * page_size())?;
        source.check_all(&outer)?;
    }
    Ok(())
}

/// Every nested sample came at `address`, and has an AUX field without anything in it.
fn all_empty(samples: &[Sample], outer: usize, address: Option<u64>) -> Outcome {
    check!(
        samples.len() >= outer,
        "{} nested samples in {outer} samples",
        samples.len()
    );
    for sample in samples {
        check_eq!(aux_len(sample), Some(0), "AUX bytes of a nested sample");
        if let Some(address) = address {
            check_eq!(sample.ip, address, "address of a nested sample");
        }
    }
    Ok(())
}

/// An instruction of the copy, as the kernel's only variant and as either of two.
fn execution(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = Setup {
        sampler: by_fault(ASKED),
        ..source.setup()
    };
    let copy = function(&callback(&source)?)?;
    interrupted(
        &source,
        &setup,
        |_| Ok(Attr::exec_breakpoint(copy, 1)),
        |group| sample_faults(group, FAULTS),
        |_, samples, outer| all_empty(samples, outer, Some(copy)),
    )
}

/// The same in samples that are taken in an interrupt, which come at any place.
fn execution_in_interrupt(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = source.setup();
    let copy = function(&callback(&source)?)?;
    interrupted(
        &source,
        &setup,
        |_| Ok(Attr::exec_breakpoint(copy, 1)),
        |group| group.sample(FAULTS, Duration::from_secs(20)),
        |_, samples, outer| all_empty(samples, outer, Some(copy)),
    )
}

/// A variable that is read in the middle of a snapshot, and outside of it too: a sample from there
/// is a whole one.
fn data(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("a breakpoint in the kernel needs root");
    }
    let Some(key) = kernel_symbol("perf_aux_rust_key")? else {
        skip!("no variable that a snapshot reads is known (CONFIG_PERF_AUX_RUST_COMPARE is off)");
    };
    let setup = Setup {
        sampler: by_fault(ASKED),
        ..source.setup()
    };
    interrupted(
        &source,
        &setup,
        |_| Ok(Attr::data_breakpoint(key & !7, true, 1)),
        |group| sample_faults(group, FAULTS / 2),
        |_, samples, outer| {
            let empty = samples
                .iter()
                .filter(|sample| aux_len(sample) == Some(0))
                .count();
            check!(
                empty >= outer,
                "{empty} nested samples in the snapshots of {outer} samples"
            );
            for sample in samples {
                check!(
                    matches!(aux_len(sample), Some(0 | 4096)),
                    "AUX bytes of a nested sample: {:?}",
                    aux_len(sample)
                );
                source.check(sample)?;
            }
            Ok(())
        },
    )
}

/// One page fault, and its sample.
fn sample_one(group: &mut AuxGroup) -> Result<Vec<Sample>> {
    let mut memory = Pages::new(1)?;
    group.run(|| {
        load::spin(3);
        memory.fault()
    })?;
    group.samples()
}

/// A probe, which comes as a trap or as a call, in the place of the breakpoint.
fn probe(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("a kernel probe needs root");
    }
    let Some(kprobe) = Pmu::find("kprobe")? else {
        skip!("the kernel has no probes as events");
    };
    // By interrupts, since a probe has no event in the middle of another software event's.
    let setup = source.setup();
    let name = CString::new(callback(&source)?).unwrap_or_default();
    interrupted(
        &source,
        &setup,
        |_| {
            Ok(Attr::new(kprobe.kind(), 0).sample_period(1).with(|attr| {
                attr.__bindgen_anon_3.kprobe_func = name.as_ptr() as u64;
                attr.__bindgen_anon_4.probe_offset = 0;
            }))
        },
        |group| group.sample(FAULTS, Duration::from_secs(20)),
        |_, samples, outer| all_empty(samples, outer, None),
    )
}

/// A snapshot that the PMU can't take, since it is just ending its transaction: the sample has
/// zeros, and the guard is clear behind it.
fn failed_snapshot(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !source.pattern {
        skip!("not known when {} can't take a snapshot", source.pmu.name());
    }
    let end = function("perf_aux_output_end")?;
    let setup = Setup {
        sampler: by_fault(ASKED),
        ..source.setup()
    };
    for name in Variant::names() {
        let _variant = Variant::choose(name)?;
        let mut group = setup.open()?;
        let mut inner = Nested::open(Attr::exec_breakpoint(end, 1), &group)?;
        let mut outer = Vec::new();
        for round in 0..50 {
            outer.extend(sample_one(&mut group)?);
            let failed = inner.samples()?;
            check!(
                !failed.is_empty(),
                "no sample at the end of the transaction in round {round}"
            );
            for sample in failed {
                check!(
                    sample.aux == Some(vec![0; ASKED as usize]),
                    "{:?} AUX bytes of a snapshot that failed, or not all of them zero",
                    aux_len(&sample)
                );
            }
        }
        check!(outer.len() >= 50, "{} samples", outer.len());
        check_sizes(&outer, ASKED, setup.aux_pages * page_size())?;
        source.check_all(&outer)?;
    }
    Ok(())
}

/// A sample, taken as in an NMI, at each and every step of the traced task.
fn every_step(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    source.needs_instructions()?;
    // What the stepper reads each instruction with, in the middle of its work.
    let read = function("__get_user_8")?;
    let wanted = ctx.rounds(5_000);
    let setup = Setup {
        sampler: Attr::exec_breakpoint(read, 1)
            .sample_type(PLAIN.into())
            .aux_sample_size(256),
        ..source.setup()
    };
    for name in Variant::names() {
        let _variant = Variant::choose(name)?;
        let mut group = setup.open()?;
        let (mut samples, mut last, mut start) = (0, 0, None);
        while samples < wanted {
            group.run(|| load::spin(50))?;
            let new = group.samples()?;
            check!(!new.is_empty(), "no sample, after {samples}");
            check_sizes(&new, 256, setup.aux_pages * page_size())?;
            source.check_all(&new)?;
            if let Some(first) = new.first() {
                let first = source.check(first)?.unwrap_or(0);
                check!(first >= last, "a sample at word {first} after {last}");
                start.get_or_insert(first);
                last = source.check(&new[new.len() - 1])?.unwrap_or(0);
            }
            samples += new.len();
        }
        // A word a step. Some steps have no sample: the kernel throttles events that are so many.
        let steps = last - start.unwrap_or(0);
        check!(
            steps < 4 * samples as u64,
            "only {samples} samples in {steps} steps"
        );
        ctx.diag(format_args!(
            "{samples} samples with {name}, at word {last}"
        ));
    }
    Ok(())
}

/// Samples in interrupts that can't be masked, if any come: who makes them is not for this process
/// to say. `tools/vm/run --nmi RATE` has the VM get some.
fn nmi(ctx: &Ctx) -> Outcome {
    const ID: &str = "/sys/kernel/tracing/events/nmi/nmi_handler/id";
    let source = Source::new(ctx)?;
    let id = fs::read_to_string(ID)
        .ok()
        .and_then(|id| id.trim().parse().ok());
    let Some(id) = id else {
        skip!("no {ID}, or it can't be read");
    };
    let setup = Setup {
        // Each handler that is asked whether the interrupt is its own makes a sample.
        sampler: Attr::new(abi::PERF_TYPE_TRACEPOINT, id)
            .sample_period(1)
            .sample_type(PLAIN.into())
            .aux_sample_size(1024),
        ..source.setup()
    };
    let cpus = load::cpus()?;
    let wanted = ctx.rounds(20).div_ceil(cpus.len());
    for name in Variant::names() {
        let _variant = Variant::choose(name)?;
        let mut group = setup.open()?;
        let (mut samples, mut full) = (0, 0);
        let mut without = Vec::new();
        for &cpu in &cpus {
            load::pin(cpu)?;
            let before = samples;
            let end = Instant::now() + ctx.time(Duration::from_secs(5));
            while samples - before < wanted && Instant::now() < end {
                for sample in group.sample(1, Duration::from_secs(1))? {
                    // If the PMU was at work it can't give its trace; the sample has zeros then.
                    let aux = sample.aux.as_deref().unwrap_or_default();
                    check!(
                        aux.len() == 1024 || aux.is_empty(),
                        "AUX bytes of a sample in an NMI: {}",
                        aux.len()
                    );
                    full += u32::from(source.check(&sample)?.unwrap_or(1) > 0);
                    samples += 1;
                }
            }
            if samples == before {
                without.push(cpu);
            }
        }
        if samples == 0 {
            skip!("no NMI came");
        }
        ctx.diag(format_args!(
            "{samples} samples with {name}, {full} of them with a trace"
        ));
        check!(without.is_empty(), "none of them on the CPUs {without:?}");
        check!(full > 0, "none of {samples} samples had a trace");
    }
    Ok(())
}
