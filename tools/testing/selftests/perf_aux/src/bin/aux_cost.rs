// SPDX-License-Identifier: GPL-2.0

//! What a sample's AUX field costs in C, in Rust, and as a plain `memcpy()` of the kernel.
//!
//! The sampled event is a page fault with period 1 in a traced program. One fault is timed by the
//! time stamp counter, with an AUX field and without; the difference is what the field costs. A
//! kernel with `CONFIG_PERF_AUX_RUST_COMPARE` has both variants, which take turns. What `memcpy()`
//! takes is told by the KUnit case `cost_of_memcpy` of the same kernel.
//!
//! With `instructions`, for QEMU's `-icount shift=0,sleep=off` and one CPU, the counter counts
//! instructions; with `time` it is converted to nanoseconds. Standard output is one JSON object a
//! line.

use perf_aux::abi;
use perf_aux::group::{
    AuxGroup,
    Setup, //
};
use perf_aux::load::{
    timestamp,
    FaultingPage, //
};
use perf_aux::sys::{
    KernelLog,
    Pmu,
    Variant, //
};
use perf_aux::{
    Attr,
    Error,
    Result, //
};
use serde_json::{
    json,
    Value, //
};
use std::fs;
use std::process::ExitCode;

const KUNIT: &str = "/sys/kernel/debug/kunit/rust_perf_sampling/run";
const SIZES: [u32; 7] = [0, 8, 64, 1024, 4096, 16384, 61440];

/// How often the variants take turns, and how many faults each turn has.
const TURNS: usize = 20;
const FAULTS: usize = 50;

/// A sorted set of figures.
struct Figures(Vec<f64>);

impl Figures {
    fn new(mut all: Vec<f64>) -> Self {
        all.sort_by(f64::total_cmp);
        Figures(all)
    }

    /// The figure below which `part` of all are.
    fn quantile(&self, part: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        self.0
            .get((part * last as f64) as usize)
            .copied()
            .unwrap_or(f64::NAN)
    }

    fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

/// The variants, by the kernel's names and by those of the rows.
const VARIANTS: [(&str, &str); 2] = [("Rust", "rust"), ("C", "c")];
type Pair<T> = [T; 2];

fn open(pmu: &Pmu, size: Option<u32>) -> Result<AuxGroup> {
    let plain = abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME;
    let mut sampler = Attr::software(abi::PERF_COUNT_SW_PAGE_FAULTS)
        .sample_period(1)
        .user_only()
        .wakeup_events(1 << 30)
        .sample_type(plain.into());
    if let Some(size) = size {
        sampler = sampler
            .sample_type((plain | abi::PERF_SAMPLE_AUX).into())
            .aux_sample_size(size);
    }
    let config = pmu
        .config("pattern", 1)?
        .ok_or_else(|| Error::new(format!("{} has no test source", pmu.name())))?;
    Setup {
        sampler,
        aux_pages: 64,
        sampler_pages: 64,
        ..Setup::new(pmu, config)
    }
    .open()
}

/// Times faults whose samples have an AUX field of this size, or none.
fn faults(pmu: &Pmu, page: &FaultingPage, size: Option<u32>) -> Result<Pair<Figures>> {
    let mut group = open(pmu, size)?;
    let mut all = [Vec::new(), Vec::new()];
    for turn in 0..2 * TURNS {
        let variant = turn % 2;
        let _variant = Variant::choose(VARIANTS[variant].0)?;
        group.leader.enable()?;
        for fault in 0..FAULTS {
            let time = page.touch();
            // The last sample stays, to be looked at.
            if fault + 1 < FAULTS {
                group.ring.set_tail(group.ring.head());
            }
            // The area may be too young for the first few.
            if turn >= 2 {
                all[variant].push(time as f64);
            }
        }
        group.leader.disable()?;
        let samples = group.samples()?;
        let last = samples
            .last()
            .map(|sample| sample.aux.as_ref().map(Vec::len));
        if last != Some(size.filter(|size| *size > 0).map(|size| size as usize))
            && last != Some(Some(size.unwrap_or(0) as usize))
        {
            return Err(Error::new(format!(
                "a sample that should have {size:?} AUX bytes has {last:?}"
            )));
        }
    }
    Ok(all.map(Figures::new))
}

/// The cycles that the kernel's `memcpy()` takes, per size.
fn memcpy() -> Result<Vec<(u32, f64)>> {
    let mut log = KernelLog::from_now().ok_or_else(|| Error::new("no /dev/kmsg".to_owned()))?;
    fs::write(KUNIT, "1")
        .map_err(|e| Error::new(format!("{KUNIT}: {e}; is CONFIG_KUNIT_DEBUGFS on?")))?;
    let lines = log.lines();
    Ok(lines
        .iter()
        .filter_map(|line| {
            // "…: memcpy of 64 bytes: 37 cycles"
            let (_, rest) = line.split_once("memcpy of ")?;
            let numbers: Vec<u32> = rest
                .split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse().ok())
                .collect();
            match numbers[..] {
                [bytes, cycles, ..] => Some((bytes, cycles.into())),
                _ => None,
            }
        })
        .collect())
}

/// Cycles of the time stamp counter per nanosecond.
fn cycles_per_ns() -> f64 {
    let start = (std::time::Instant::now(), timestamp());
    std::thread::sleep(std::time::Duration::from_millis(200));
    let cycles = timestamp() - start.1;
    cycles as f64 / start.0.elapsed().as_nanos() as f64
}

fn run() -> Result<()> {
    let instructions = match std::env::args().nth(1).as_deref() {
        Some("instructions") => true,
        Some("time") => false,
        _ => return Err(Error::new("say \"instructions\" or \"time\"".to_owned())),
    };
    let unit = if instructions { 1.0 } else { cycles_per_ns() };
    let name = std::env::args()
        .nth(2)
        .unwrap_or_else(|| "intel_pt".to_owned());
    let pmu = Pmu::find(&name)?.ok_or_else(|| Error::new(format!("there is no PMU {name}")))?;
    if Variant::names() != VARIANTS.map(|(name, _)| name) {
        return Err(Error::new(
            "the kernel has one variant only (no CONFIG_PERF_AUX_RUST_COMPARE)".to_owned(),
        ));
    }
    let page = FaultingPage::new()?;
    let memcpy = memcpy()?;

    let row = |bytes: u32, variant: &str, figures: Value| {
        let mut row = json!({ "what": "AUX sample", "bytes": bytes, "variant": variant });
        if let (Some(row), Value::Object(figures)) = (row.as_object_mut(), figures) {
            row.extend(figures);
        }
        println!("{row}");
    };
    let round = |figure: f64| (figure / unit).round();
    let without = faults(&pmu, &page, None)?;
    for size in SIZES {
        let plain = match memcpy.iter().find(|(bytes, _)| *bytes == size) {
            Some((_, cycles)) => *cycles,
            None if size == 0 => 0.0,
            None => return Err(Error::new(format!("{KUNIT} says nothing of {size} bytes"))),
        };
        let with = faults(&pmu, &page, Some(size))?;
        let cost =
            |variant: usize, part: f64| with[variant].quantile(part) - without[variant].median();
        let c_overhead = cost(1, 0.5) - plain;
        if instructions {
            row(
                size,
                "memcpy",
                json!({ "instructions": plain, "overhead": 0 }),
            );
        } else {
            row(size, "memcpy", json!({ "ns_median": round(plain) }));
        }
        for (variant, (_, name)) in VARIANTS.into_iter().enumerate() {
            let median = cost(variant, 0.5);
            row(
                size,
                name,
                if instructions {
                    json!({
                        "instructions": median,
                        "overhead": median - plain,
                        "ratio_to_c": ((median - plain) / c_overhead * 1000.0).round() / 1000.0,
                    })
                } else {
                    json!({
                        "ns_median": round(median),
                        "ns_quartiles": [round(cost(variant, 0.25)), round(cost(variant, 0.75))],
                    })
                },
            );
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("aux_cost: {error}");
            ExitCode::FAILURE
        }
    }
}
