// SPDX-License-Identifier: GPL-2.0

//! A small safe layer over `perf_event_open(2)`, made for testing the kernel.
//!
//! Vocabulary, as in the kernel's own documentation:
//!
//! - An *event* is one file descriptor of `perf_event_open()`. Events form *groups*; the first one
//!   is the *leader*.
//! - The *data ring* is the mapping at offset 0 of an event: one *user page* with positions, then
//!   `2^n` pages of records.
//! - The *AUX area* is a second mapping of the same event, which the PMU itself fills. Mapped
//!   read-only it is a *snapshot* area, overwritten for ever; mapped writable it is filled once and
//!   continued as user space moves `aux_tail`.
//! - The *sampler* is a group member with [`Attr::aux_sample_size`]: each of its samples carries
//!   the latest bytes of the leader's AUX area.
//!
//! Modules, from the pure to the privileged:
//!
//! - [`record`]: finding and parsing records in ring memory, on any contents, without a kernel.
//! - [`event`], [`ring`], [`group`]: opening events, mapping them, the usual group of an AUX leader
//!   and its sampler.
//! - [`notify`]: `poll(2)` and signal-driven overflow notification.
//! - [`load`]: child processes to be observed.
//! - [`sys`]: procfs and sysfs: PMUs, module use counts, sysctls, the kernel log.
//! - [`ktap`]: the test runner.
//!
//! Nothing here panics on what it reads from the kernel, and each [`Error`] says what was
//! attempted.

#![deny(missing_docs)]
#![deny(unsafe_op_in_unsafe_fn)]

pub mod error;
pub mod event;
pub mod group;
pub mod ktap;
pub mod load;
pub mod notify;
pub mod record;
pub mod ring;
pub mod sys;

pub use error::{
    Error,
    Result, //
};
pub use event::{
    Attr,
    Event, //
};
pub use ktap::{
    Ctx,
    Outcome,
    Stop,
    Test, //
};
pub use perf_event_open_sys::bindings as abi;
