// SPDX-License-Identifier: GPL-2.0

//! `soft_pt`: a PMU like Intel Processor Trace, on any x86-64 processor.
//!
//! It follows the user-mode flow of control of tasks by single-stepping them, and writes it down in
//! Intel PT's packets into the AUX area of a perf event. So the tools for Intel PT work without the
//! hardware; the `perf` tool in particular, if the PMU goes by the name it looks for
//! (`insmod soft_pt.ko name=intel_pt`).
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

kernel::string_param!(NAME, "soft_pt", "name", c"soft_pt");

#[pin_data]
struct SoftPtModule {
    #[pin]
    _pmu: Registration<pmu::SoftPt>,
}

impl kernel::InPlaceModule for SoftPtModule {
    fn init(_module: &'static ThisModule) -> impl PinInit<Self, Error> {
        try_pin_init!(Self {
            _pmu <- {
                #[cfg(PERF_IN_MODULE)]
                home::check_kernel()?;
                if NAME.get() == c"intel_pt" && step::vendor() != *b"GenuineIntel" {
                    pr_warn!("this processor isn't GenuineIntel: perf record traces nothing\n");
                }
                Registration::new(NAME.get(), pmu::SoftPt::new()?)
            },
        })
    }
}
