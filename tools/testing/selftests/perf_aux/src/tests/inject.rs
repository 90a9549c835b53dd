// SPDX-License-Identifier: GPL-2.0

//! Every allocation of every set-up fails once: the error is the right one, all that was made is
//! taken back, and the next try works.
//!
//! `/proc/thread-self/fail-nth` chooses the allocation: the n-th from now on that this thread makes
//! in the kernel. Which there are is found by going on until one is never reached.

use super::source::Source;
use perf_aux::ring::{
    AuxMode,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    skip,
    Ctx,
    Error,
    Outcome,
    Result,
    Stop,
    Test, //
};
use std::fs::{
    self,
    File,
    OpenOptions, //
};
use std::os::unix::fs::FileExt;

pub const TESTS: &[Test] = &[
    Test::new("inject.open", open).limit(120),
    Test::new("inject.open_sampler", open_sampler).limit(120),
    Test::new("inject.ring", ring).limit(120),
    Test::new("inject.area", area).limit(120),
];

/// Makes one allocation of this thread fail.
pub struct Injector {
    file: File,
    knobs: Vec<(String, String)>,
}

impl Injector {
    /// Skips where the kernel can't do it, or this process may not ask for it.
    pub fn new() -> std::result::Result<Self, Stop> {
        const FAIL_NTH: &str = "/proc/thread-self/fail-nth";
        let Ok(file) = OpenOptions::new().read(true).write(true).open(FAIL_NTH) else {
            skip!("no {FAIL_NTH}: the kernel has no CONFIG_FAULT_INJECTION");
        };
        let mut injector = Injector {
            file,
            knobs: Vec::new(),
        };
        let mut some = false;
        for knob in ["failslab", "fail_page_alloc"] {
            // Allocations that may wait are included, also those of one page, and failures are
            // silent: their backtraces would look like faults of the kernel.
            for (file, value) in [
                ("ignore-gfp-wait", "N"),
                ("min-order", "0"),
                ("verbose", "0"),
            ] {
                let path = format!("/sys/kernel/debug/{knob}/{file}");
                let Ok(old) = fs::read_to_string(&path) else {
                    continue;
                };
                some |= fs::write(&path, value).is_ok();
                injector.knobs.push((path, old));
            }
        }
        if !some {
            skip!("no failslab or fail_page_alloc in /sys/kernel/debug");
        }
        Ok(injector)
    }

    fn arm(&self, nth: u32) -> Result<()> {
        self.file
            .write_all_at(nth.to_string().as_bytes(), 0)
            .map_err(|e| Error::from_io("writing to fail-nth", &e))
    }

    /// Whether the allocation that was to fail has been reached.
    fn disarm(&self) -> Result<bool> {
        let mut text = [0; 16];
        let length = self
            .file
            .read_at(&mut text, 0)
            .map_err(|e| Error::from_io("reading fail-nth", &e))?;
        let left = String::from_utf8_lossy(&text[..length]).trim().to_owned();
        self.arm(0)?;
        Ok(left == "0")
    }

    /// Does `set_up` once with each of its allocations failing, and `after` behind each. A failure
    /// must have one of the given errors; it may also be got over. Returns how many there were.
    pub fn each<T>(
        &self,
        errors: &[i32],
        mut set_up: impl FnMut() -> Result<T>,
        mut after: impl FnMut(u32) -> Outcome,
    ) -> std::result::Result<(u32, u32), Stop> {
        let mut failed = 0;
        for nth in 1..20_000 {
            self.arm(nth)?;
            let result = set_up();
            let reached = self.disarm()?;
            match result {
                Ok(_) if !reached => {
                    check!(nth > 1, "there was no allocation at all");
                    return Ok((nth - 1, failed));
                }
                // What was made is in the way of another one.
                Ok(made) => drop(made),
                Err(error) => {
                    check!(
                        reached && error.errno().is_some_and(|errno| errors.contains(&errno)),
                        "with allocation {nth} failing ({reached}): {error}"
                    );
                    failed += 1;
                }
            }
            after(nth)?;
        }
        perf_aux::fail!("no end of allocations")
    }
}

impl Drop for Injector {
    fn drop(&mut self) {
        let _ = self.arm(0);
        for (path, old) in &self.knobs {
            let _ = fs::write(path, old.trim_end());
        }
    }
}

/// Runs the test of a set-up, and says how many allocations it has.
fn each<T>(
    ctx: &Ctx,
    what: &str,
    set_up: impl FnMut() -> Result<T>,
    after: impl FnMut(u32) -> Outcome,
) -> Outcome {
    let injector = Injector::new()?;
    let fds = sys::open_fds()?;
    let (all, failed) = injector.each(&[libc::ENOMEM], set_up, after)?;
    ctx.diag(format_args!(
        "{what}: {all} allocations, without {failed} of them it failed"
    ));
    check!(failed > 0, "{what} never failed");
    check_eq!(sys::open_fds()?, fds, "open descriptors after {what}");
    Ok(())
}

/// The group still takes samples, and they are right.
fn works(source: &Source) -> Outcome {
    let mut group = source.setup().open()?;
    let samples = group.sample(2, std::time::Duration::from_secs(20))?;
    check!(samples.len() >= 2, "{} samples", samples.len());
    source.check_all(&samples)
}

fn open(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    each(
        ctx,
        "opening an event",
        || source.pmu.event(source.config).open(),
        |_| {
            source.pmu.event(source.config).open()?;
            Ok(())
        },
    )?;
    works(&source)
}

fn open_sampler(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let setup = source.setup();
    let leader = setup.leader.open()?;
    let sampler = setup.sampler.clone().group(&leader);
    each(ctx, "opening a sampler", || sampler.open(), |_| Ok(()))?;
    drop(leader);
    works(&source)
}

fn ring(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let event = source.pmu.event(source.config).open()?;
    each(
        ctx,
        "mapping a data ring",
        || Ring::map(&event, 8),
        |_| {
            Ring::map(&event, 8)?;
            Ok(())
        },
    )?;
    drop(event);
    works(&source)
}

fn area(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    for mode in [AuxMode::Snapshot, AuxMode::Full] {
        for pages in [1, 16] {
            let event = source.pmu.event(source.config).open()?;
            let ring = Ring::map(&event, 8)?;
            each(
                ctx,
                &format!("mapping {pages} AUX pages, {mode:?}"),
                || ring.map_aux(&event, pages, mode),
                |_| {
                    let aux = ring.map_aux(&event, pages, mode)?;
                    event.enable()?;
                    source.spin_till_traced(200, &aux);
                    event.disable()?;
                    check!(
                        aux.all().iter().any(|byte| *byte != 0),
                        "nothing was traced"
                    );
                    let head = ring.aux_head();
                    ring.set_aux_tail(head);
                    Ok(())
                },
            )?;
        }
    }
    works(&source)
}
