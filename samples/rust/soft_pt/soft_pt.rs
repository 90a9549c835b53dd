// SPDX-License-Identifier: GPL-2.0

//! `soft_pt`: a PMU like Intel Processor Trace, on any x86-64 processor.
//!
//! It follows the user-mode flow of control of tasks by single-stepping them, and writes it down in
//! Intel PT's packets into the AUX area of a perf event. So the tools for Intel PT work without the
//! hardware; the `perf` tool in particular, since the PMU takes the name that it looks for,
//! `intel_pt`, unless the driver of the hardware has it.
//!
//! ```text
//!    perf core ──▶ pmu ◀── config (what an event may ask for)
//!                   │ ▲
//!                   │ └─── kernel::perf::step (one step of a task at a time)
//!                   ▼
//!                  unit (one per event) ──▶ trace (PT state) ──▶ packet ──▶ AUX area
//!                    └─── filter
//! ```
//!
//! See `Documentation/admin-guide/perf/soft-pt.rst` for what it can do and what it can't.

// In a kernel without `kernel::perf` this crate brings it along, and stands in for `kernel`.
#[cfg(PERF_IN_MODULE)]
extern crate kernel as linux;
#[cfg(PERF_IN_MODULE)]
extern crate self as kernel;
#[cfg(PERF_IN_MODULE)]
#[path = "../../../tools/stock/kernel.rs"]
mod home;
// Names that lead to macros have to be told before macros are expanded.
#[cfg(PERF_IN_MODULE)]
pub use home::{
    impl_flags,
    prelude,
    *, //
};

use kernel::{
    perf::{
        step,
        Registration, //
    },
    prelude::*, //
};

mod config;
mod filter;
mod packet;
mod pmu;
mod trace;
mod unit;

module! {
    type: SoftPtModule,
    name: "soft_pt",
    authors: ["The perf AUX sampling project"],
    description: "A PMU like Intel PT that single-steps",
    license: "GPL",
}

// Empty: a name of `NAMES`.
kernel::string_param!(NAME, "soft_pt", "name", c"");

/// What the PMU is called unless the user says: the name that tools look for or, where the driver
/// of the hardware has that, its own.
const NAMES: [&CStr; 2] = [c"intel_pt", c"soft_pt"];

struct SoftPtModule {
    _pmu: Pin<KBox<Registration<pmu::SoftPt>>>,
}

/// Registers the PMU by a name.
fn register(name: &CStr) -> Result<Pin<KBox<Registration<pmu::SoftPt>>>> {
    let pmu = KBox::try_pin_init(Registration::new(name, pmu::SoftPt::new()?), GFP_KERNEL)?;
    pr_info!("the PMU is called {}\n", name);
    if name == NAMES[0] && step::vendor() != *b"GenuineIntel" {
        pr_warn!("the processor isn't GenuineIntel: unless patched, perf record traces nothing\n");
    }
    Ok(pmu)
}

impl kernel::Module for SoftPtModule {
    fn init(_module: &'static ThisModule) -> Result<Self> {
        #[cfg(PERF_IN_MODULE)]
        home::check_kernel()?;
        let given = NAME.get();
        let pmu = if given.is_empty() {
            match register(NAMES[0]) {
                Err(error) if error == EEXIST => register(NAMES[1])?,
                registered => registered?,
            }
        } else {
            register(given)?
        };
        Ok(Self { _pmu: pmu })
    }
}
