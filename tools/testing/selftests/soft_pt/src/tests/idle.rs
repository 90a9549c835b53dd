// SPDX-License-Identifier: GPL-2.0

//! What the module costs while nothing is traced.

use perf_aux::{
    check,
    check_eq,
    load,
    Ctx,
    Event,
    Outcome,
    Stop,
    Test, //
};

use crate::tests::traps;

pub const TESTS: &[Test] = &[Test::new("idle.no_probes", no_probes)];

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
    let counter = traps::calls("4task", "on_switch", |attr| attr.pid(-1).cpu(0))?;
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
