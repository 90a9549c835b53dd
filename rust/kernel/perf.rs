// SPDX-License-Identifier: GPL-2.0

//! Performance monitoring units (PMUs) with an AUX area.
//!
//! C header: [`include/linux/perf_event.h`](srctree/include/linux/perf_event.h)
//!
//! A driver describes its unit by implementing [`Pmu`] and makes it known to the perf core by
//! creating a pinned [`Registration`]. From then on user space opens [`Event`]s of the PMU with
//! `perf_event_open(2)`, and the perf core calls the driver back.
//!
//! # Vocabulary
//!
//! - **Event**: what one `perf_event_open(2)` call made, for one task, one CPU, or both. The core
//!   *adds* an event to a CPU when its task is switched in and *deletes* it when the task leaves;
//!   in between it may *stop* and *start* it.
//! - **Data buffer**: the ring that user space maps first; it holds records.
//! - **AUX area**: a second ring, mapped behind the data buffer, that the PMU itself fills with
//!   bytes only it (and its decoder) understands, for instance an instruction trace.
//! - **Snapshot mode** (the C code's `overwrite`): user space mapped the AUX area read-only. The
//!   PMU goes round and round; nothing is ever full. The other mode is **full trace**: user space
//!   consumes, and when it does not, the trace is truncated.
//! - **AUX transaction**: the time between `perf_aux_output_begin()` and `perf_aux_output_end()`,
//!   during which the PMU may write the AUX area. Here it is a value, [`AuxOutput`], which can not
//!   be left open by accident.
//! - **AUX sample**: the last bytes of the AUX area, copied into a sample record of *another* event
//!   of the group (`PERF_SAMPLE_AUX`, `attr.aux_sample_size`). The core asks the PMU for them with
//!   [`Pmu::snapshot_aux`].
//!
//! # The life of an event on a CPU
//!
//! ```text
//!                 add(start: false)                    start(Run)
//!   ┌─────────┐ ────────────────────▶ ┌─────────┐ ──────────────────▶ ┌─────────┐
//!   │ off CPU │                       │ stopped │                     │ running │
//!   └─────────┘ ◀──────────────────── └─────────┘ ◀────────────────── └─────────┘
//!        ▲               del                         stop(Update)       │   ▲
//!        │                                           stop(Keep)         │   │
//!        └──────────────────────────────────────────────────────────────┘   │
//!        │                         del                                      │
//!        └──────────────────────────────────────────────────────────────────┘
//!                                add(start: true)
//! ```
//!
//! While an event runs, other events of its group may pause its trace and resume it
//! ([`Stop::Pause`], [`Start::Resume`]). That is no state of its own, since it also changes while
//! the event is stopped; an event that starts has to ask ([`Event::aux_paused`]).
//!
//! # Contexts
//!
//! | callback | interrupts | may be NMI | may sleep | proof handed to the driver |
//! |---|---|---|---|---|
//! | [`Pmu::event_init`], [`Pmu::validate_filters`], [`Pmu::setup_aux`] | on | no | yes | none |
//! | [`Pmu::add`], [`Pmu::del`], [`Start::Run`], [`Stop::Update`] | off | no | no | [`IrqsOff`] |
//! | [`Stop::Keep`], [`Pmu::snapshot_aux`] | off | yes | no | [`NmiLike`] |
//! | [`Stop::Pause`], [`Start::Resume`] | off | yes | no | [`NmiLike`] |
//!
//! "NMI" above stands for every context that can interrupt code which runs with interrupts off: a
//! real NMI, and a debug exception on a kernel address. State that is shared between such a context
//! and the rest of a driver goes into a [`CpuLocal`], which refuses the nested visitor.

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
