// SPDX-License-Identifier: GPL-2.0

//! Performance monitoring units (PMUs).
//!
//! C header: [`include/linux/perf_event.h`](srctree/include/linux/perf_event.h)
//!
//! A driver describes its unit by implementing [`Pmu`] and makes it known to the perf core by
//! creating a pinned [`Registration`]. From then on user space opens [`Event`]s of the PMU with
//! `perf_event_open(2)`, and the perf core calls the driver back.
//! `Documentation/rust/perf.rst` is the guide.
//!
//! # Vocabulary
//!
//! - **Event**: what one `perf_event_open(2)` call made, for one task, one CPU, or both. The core
//!   *adds* an event to a CPU when its task is switched in and *deletes* it when the task leaves;
//!   in between it may *stop* and *start* it.
//! - **Counter**: what the PMU counts in. An event's count is the sum of what the counter has
//!   gained while the event ran.
//! - **Overflow**: a sampling period is over, and the event takes a sample.
//! - **Data buffer**: the ring that user space maps first; it holds records.
//! - **AUX area**: a second ring, mapped behind the data buffer, that the PMU itself fills with
//!   bytes only it (and its decoder) understands, for instance an instruction trace.
//! - **Snapshot mode** (the C code's `overwrite`): user space mapped the AUX area read-only. The
//!   PMU goes round and round; nothing is ever full. The other mode is **full trace**: user space
//!   consumes, and when it does not, the trace is truncated.
//! - **AUX transaction**: the time between `perf_aux_output_begin()` and `perf_aux_output_end()`,
//!   during which the PMU may write the AUX area. It belongs to the abstraction, which lends it to
//!   the driver as an [`AuxOutput`].
//! - **AUX sample**: the last bytes of the AUX area, copied into a sample record of *another* event
//!   of the group (`PERF_SAMPLE_AUX`, `attr.aux_sample_size`). The core asks the PMU for them with
//!   [`Pmu::snapshot_aux`].
//!
//! # The life of an event on a CPU
//!
//! ```text
//!                       add                       start(Run)
//!   ┌─────────┐ ───────────────────▶ ┌────────┐ ─────────────▶ ┌─────────┐
//!   │ off CPU │                      │ closed │                │ running │
//!   └─────────┘ ◀─────────────────── └────────┘ ◀───────────── └─────────┘
//!                       del               ▲      stop(Update)     │   ▲
//!                                         │            stop(Keep) │   │ start(Run, Restart)
//!                                         │                       ▼   │
//!                                         │                     ┌─────────┐
//!                                         └──────────────────── │ stopped │
//!                                              stop(Update)     └─────────┘
//! ```
//!
//! The abstraction keeps the state (`hw.state`) and calls the driver only for what changes it. What
//! else it does:
//!
//! - `closed` to `running`: it opens the AUX transaction first. Without one (no AUX area, no room)
//!   an event of a PMU that has AUX areas stays closed, and the driver isn't called.
//! - to `closed`: it has the driver stop, brings the count up to date, cancels the event's timer
//!   and ends the transaction. `del` comes for a closed event.
//!
//! While an event runs, other events of its group may pause its trace and resume it
//! ([`Stop::Pause`], [`Start::Resume`]). That is no state of its own, since it also changes while
//! the event is stopped; an event that starts is told behind its `Start::Run`.
//!
//! # Contexts
//!
//! | callback | interrupts | may be NMI | may sleep | proof handed to the driver |
//! |---|---|---|---|---|
//! | [`Pmu::event_init`] | on | no | yes | none |
//! | [`Pmu::setup_aux`] | on | no | yes | none |
//! | [`Pmu::validate_filters`] | on | no | yes | none |
//! | [`Pmu::add`], [`Pmu::del`] | off | no | no | [`IrqsOff`] |
//! | [`Pmu::timer`] | off | no | no | [`IrqsOff`] |
//! | [`Start::Run`], [`Stop::Update`] | off | no | no | [`IrqsOff`] |
//! | [`Pmu::read`] | off | yes | no | [`NmiLike`] |
//! | [`Pmu::snapshot_aux`] | off | yes | no | [`NmiLike`] |
//! | [`Start::Restart`], [`Stop::Keep`] | off | yes | no | [`NmiLike`] |
//! | [`Stop::Pause`], [`Start::Resume`] | off | yes | no | [`NmiLike`] |
//!
//! "NMI" stands for every context that can interrupt code which runs with interrupts off; see
//! [`nmi`](crate::nmi), where the proofs are. Such a context may come in the middle of any other
//! callback. So [`OnCpu::with_state`] turns it away if it has interrupted code that is there
//! already. What must get through goes into atomics of [`Pmu::Data`].
//!
//! [`IrqsOff`]: crate::nmi::IrqsOff
//! [`NmiLike`]: crate::nmi::NmiLike

mod aux;
mod bindings;
mod current;
mod event;
mod field;
mod filter;
mod output;
mod pmu;
mod registration;
#[cfg(any(CONFIG_PERF_AUX_RUST, PERF_IN_MODULE))]
mod ring;
#[cfg(CONFIG_PERF_AUX_RUST)]
mod sampling;
#[cfg(all(
    CONFIG_X86_64,
    CONFIG_USER_RETURN_NOTIFIER,
    CONFIG_UPROBES,
    CONFIG_TRACEPOINTS
))]
pub mod step;
mod sysfs;
mod timer;

pub use self::{
    aux::{
        AuxFlag,
        AuxFlags,
        AuxOutput, //
    },
    current::Current,
    event::{
        Attr,
        Event,
        OnCpu, //
    },
    field::{
        Field,
        Word, //
    },
    filter::{
        AddressFilter,
        AddressFilters,
        AddressRange,
        FilterAction, //
    },
    output::SampleOutput,
    pmu::{
        Capabilities,
        Capability,
        Context,
        Pmu,
        Scope,
        Start,
        Stop, //
    },
    registration::Registration,
    sysfs::{
        Attribute,
        AttributeGroup, //
    },
};
