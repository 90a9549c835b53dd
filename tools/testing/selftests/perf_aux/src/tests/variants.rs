// SPDX-License-Identifier: GPL-2.0

//! What can go wrong with the AUX field of a sample, in each variant of AUX sampling that the
//! kernel has.

use super::faults::Pages;
use super::sample::{
    self,
    by_fault,
    PLAIN, //
};
use super::source::Source;
use perf_aux::abi;
use perf_aux::group::Setup;
use perf_aux::load;
use perf_aux::record::Record;
use perf_aux::ring::{
    AuxMode,
    Ring, //
};
use perf_aux::sys::{
    self,
    Variant, //
};
use perf_aux::{
    check,
    check_eq,
    skip,
    Attr,
    Ctx,
    Outcome,
    Test, //
};

pub const TESTS: &[Test] = &[
    Test::new("variants.full_stack", |ctx| {
        in_each(ctx, "sample.size.full_stack")
    }),
    Test::new("variants.writable_area", |ctx| {
        in_each(ctx, "sample.writable_area")
    }),
    Test::new("variants.no_area", |ctx| in_each(ctx, "sample.no_area")),
    Test::new("variants.area_mapped_again", |ctx| {
        in_each(ctx, "sample.area_mapped_again")
    }),
    Test::new("variants.throttled", |ctx| {
        in_each(ctx, "sample.bytes.throttled")
    })
    .limit(120),
    Test::new("variants.leader_out_first", leader_out_first),
    Test::new("variants.registers_beside_full_stack", registers).limit(120),
    Test::new("variants.nothing_old", nothing_old),
];

/// Runs a test of the group `sample.*` in each variant.
fn in_each(ctx: &Ctx, name: &str) -> Outcome {
    for variant in Variant::names() {
        let _variant = Variant::choose(variant)?;
        ctx.diag(format_args!("{name} in {variant}"));
        for test in sample::TESTS.iter().filter(|test| test.name == name) {
            (test.run)(ctx)?;
        }
    }
    Ok(())
}

/// A group is scheduled out leader first. A breakpoint on what schedules out the sibling in front
/// of it overflows when the leader is not there any more: its sample has no AUX data.
fn leader_out_first(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("a breakpoint in the kernel needs root");
    }
    let Some(address) = sys::kernel_symbol("task_clock_event_del")? else {
        skip!("/proc/kallsyms has no address of task_clock_event_del");
    };
    for variant in Variant::names() {
        let _variant = Variant::choose(variant)?;
        let group = source.setup().open()?;
        let _clock = Attr::task_clock(0).group(&group.leader).open()?;
        let event = Attr::exec_breakpoint(address, 1)
            .exclude_user()
            .exclude_hv()
            .sample_type(PLAIN.into())
            .aux_sample_size(4096)
            .group(&group.leader)
            .open()?;
        let mut ring = Ring::map(&event, 16)?;
        let mut samples = 0;
        for _ in 0..20 {
            group.run(|| load::spin(1000))?;
            for record in ring.drain()? {
                if let Record::Sample(sample) = record {
                    samples += 1;
                    check_eq!(
                        sample.aux.as_deref(),
                        Some(&[][..]),
                        "AUX bytes without a leader, in {variant}"
                    );
                }
            }
        }
        check!(samples > 0, "the breakpoint never overflowed, in {variant}");
    }
    Ok(())
}

/// A stack dump leaves room for the registers at the interrupt, which come after it, whether there
/// is AUX data or not.
fn registers(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for variant in Variant::names() {
        let _variant = Variant::choose(variant)?;
        for (aux, stack) in [(0, 65_528), (0, 65_504), (4096, 65_528), (4096, 65_400)] {
            let mut group = source.setup().open()?;
            let mut fields = abi::PERF_SAMPLE_IP
                | abi::PERF_SAMPLE_TID
                | abi::PERF_SAMPLE_REGS_USER
                | abi::PERF_SAMPLE_STACK_USER
                | abi::PERF_SAMPLE_REGS_INTR;
            if aux > 0 {
                fields |= abi::PERF_SAMPLE_AUX;
            }
            let event = by_fault(aux)
                .sample_type(fields.into())
                .sample_regs_user(0xff)
                .sample_regs_intr(0xff)
                .sample_stack_user(stack)
                .group(&group.leader)
                .open()?;
            let mut ring = Ring::map(&event, 64)?;
            let mut memory = Pages::new(2)?;
            group.run(|| {
                memory.fault();
                memory.fault();
            })?;
            group.samples()?;
            let mut samples = 0;
            for record in ring.drain()? {
                let Record::Sample(sample) = record else {
                    continue;
                };
                samples += 1;
                check!(
                    sample.size > 65_000 && sample.size % 8 == 0,
                    "header.size {} with {stack} of stack, {aux} of AUX, in {variant}",
                    sample.size
                );
            }
            check!(samples >= 2, "{samples} samples of 2 page faults");
        }
    }
    Ok(())
}

/// Whatever a PMU does in a snapshot, there is nothing in an AUX field that the ring held before.
/// Stack dumps of another event, in the same ring, are what there is.
fn nothing_old(ctx: &Ctx) -> Outcome {
    const OLD: u8 = 0xa5;
    const BYTES: usize = 8192;

    let source = Source::new(ctx)?;
    for variant in Variant::names() {
        let _variant = Variant::choose(variant)?;
        for mode in [AuxMode::Snapshot, AuxMode::Full] {
            let setup = Setup {
                mode,
                sampler: by_fault(BYTES as u32),
                // Five records of the same size are not a lap.
                sampler_pages: 16,
                ..source.setup()
            };
            // A PMU may refuse some.
            let Ok(mut group) = setup.open() else {
                continue;
            };
            let dumper = by_fault(0)
                .sample_type(
                    (abi::PERF_SAMPLE_IP
                        | abi::PERF_SAMPLE_TID
                        | abi::PERF_SAMPLE_TIME
                        | abi::PERF_SAMPLE_STACK_USER)
                        .into(),
                )
                .sample_stack_user(BYTES as u32)
                .open()?;
            dumper.set_output(&group.sampler)?;
            let mut memory = Pages::new(250)?;
            let (mut dumped, mut samples) = (false, 0);
            for _ in 0..50 {
                let old = std::hint::black_box([OLD; 2 * BYTES]);
                dumper.enable()?;
                memory.fault();
                memory.fault();
                memory.fault();
                dumper.disable()?;
                let ring = group.ring.all();
                dumped |= ring.windows(64).any(|bytes| bytes == [OLD; 64]);
                group.ring.set_tail(group.ring.head());
                group.run(|| {
                    memory.fault();
                    memory.fault();
                })?;
                std::hint::black_box(&old);
                for sample in group.samples()? {
                    samples += 1;
                    let aux = sample.aux.unwrap_or_default();
                    check!(
                        !aux.windows(64).any(|bytes| bytes == [OLD; 64]),
                        "old bytes in an AUX field of {} bytes, {mode:?} in {variant}",
                        aux.len()
                    );
                }
            }
            check!(dumped, "no stack dump in the ring");
            check!(samples >= 50, "{samples} samples");
        }
    }
    Ok(())
}
