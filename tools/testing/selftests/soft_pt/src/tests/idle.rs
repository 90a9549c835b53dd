// SPDX-License-Identifier: GPL-2.0

//! What the module costs while nothing is traced.

use perf_aux::{
    check,
    check_eq,
    load,
    skip,
    sys::{
        self,
        is_root, //
    },
    Attr,
    Ctx,
    Event,
    Outcome,
    Stop,
    Test, //
};

pub const TESTS: &[Test] = &[Test::new("idle.no_probes", no_probes)];

/// Counts how often a CPU comes by the stepper's probe of the scheduler.
fn counter(cpu: usize) -> Result<Event, Stop> {
    if !is_root() {
        skip!("a breakpoint in the kernel needs root");
    }
    let probe =
        |name: &str, _: Option<&str>| name.contains("step4task") && name.ends_with("on_switch");
    let address = match sys::find_kernel_symbol(probe)? {
        Some(name) => sys::kernel_symbol(&name)?,
        None => None,
    };
    let Some(address) = address else {
        skip!("/proc/kallsyms does not tell the address of the stepper's probe");
    };
    let attr = Attr::exec_breakpoint(address, 1 << 40);
    Ok(attr
        .exclude_user()
        .exclude_hv()
        .pid(-1)
        .cpu(cpu as i32)
        .open()?)
}

/// How often this task's CPU comes by while the task sleeps again and again.
fn hits(counter: &Event) -> Result<u64, Stop> {
    let before = counter.count()?;
    for _ in 0..100 {
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    Ok(counter.count()? - before)
}

/// The scheduler's tracepoint has a probe of the stepper only while an event of the PMU exists.
fn no_probes(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    load::pin(0)?;
    let counter = counter(0)?;
    counter.enable()?;
    for round in 0..3 {
        check_eq!(
            hits(&counter)?,
            0,
            "probes run without an event, round {round}"
        );
        let first = pmu.event(0).open()?;
        let second = pmu.event(0).open().ok();
        let with = hits(&counter)?;
        check!(
            with >= 50,
            "{with} probes run while an event exists, round {round}"
        );
        drop(first);
        if second.is_some() {
            let with = hits(&counter)?;
            check!(
                with >= 50,
                "{with} probes run with one event left, round {round}"
            );
        }
    }
    Ok(())
}
