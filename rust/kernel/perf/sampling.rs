// SPDX-License-Identifier: GPL-2.0

//! AUX sampling: a sample that carries the end of another event's AUX area.
//!
//! C header: [`kernel/events/internal.h`](srctree/kernel/events/internal.h)
//!
//! This is the perf core's half, which `CONFIG_PERF_AUX_RUST` puts in place of the C functions
//! `perf_prepare_sample_aux()`, `perf_aux_sample_output()`, `perf_pmu_snapshot_aux()` and
//! `perf_output_copy_aux()`. The other half is the PMU's, see [`Pmu::snapshot_aux`].
//!
//! # Vocabulary
//!
//! - **Sampled event**: the one that overflows and makes a record. `attr.aux_sample_size` says how
//!   much it wants.
//! - **Sampler**: its group leader, `perf_event::aux_event`, whose PMU fills the AUX area.
//! - **Snapshot**: the PMU's copying the last bytes of the area into the record.
//!
//! # The life of an AUX sample
//!
//! ```text
//!   overflow of the sampled event
//!     │
//!     ├─ prepare: how many bytes? ── perf_aux_rust_prepare() ── Sampler::ready(), Want::settle()
//!     │
//!     ├─ perf_output_begin(): the record has its size now, and nothing can change it
//!     │
//!     └─ output: exactly so many ─── perf_aux_rust_output()
//!          │  interrupts off
//!          │    Sampler::ready() once more
//!          │    aux_in_sampling = 1
//!          │      pmu->snapshot_aux() ── perf_output_copy_aux() ── perf_aux_rust_copy()
//!          │    aux_in_sampling = 0
//!          │  interrupts on
//!          └─ zeros for what the snapshot left
//! ```
//!
//! Interrupts may be on between the two halves, so that what was true in the first may have changed
//! in the second: the sampler may have been disabled, or its AUX area unmapped.
//!
//! # Contexts
//!
//! Anything from a task to an NMI. Both halves run under RCU: `perf_event_output()` and its like
//! hold the lock around all of it. An NMI can come at any point, and make a whole sample of its
//! own; if a snapshot of the same area is under way, its size is 0.
//!
//! [`Pmu::snapshot_aux`]: super::Pmu::snapshot_aux

pub(super) mod copy;
mod guard;
mod size;
#[cfg(CONFIG_KUNIT = "y")]
mod tests;

use self::{
    copy::{
        copy_aux,
        Mark,
        Output, //
    },
    guard::InSampling,
    size::Want, //
};
use super::bindings;
use crate::{
    cpu::CpuId,
    nmi::{
        irqs_off,
        NmiLike, //
    },
    page::PAGE_SIZE,
    prelude::*, //
};
use core::{
    marker::PhantomData,
    ptr::NonNull, //
};

/// The event whose AUX area is sampled.
///
/// # Invariants
///
/// `event` is valid for `'a`, since an RCU read-side critical section lasts that long.
#[derive(Clone, Copy)]
struct Sampler<'a> {
    event: NonNull<bindings::perf_event>,
    _rcu: PhantomData<&'a ()>,
}

impl<'a> Sampler<'a> {
    /// The sampler of `event`, if it has one.
    ///
    /// # Safety
    ///
    /// `event` must be valid, in an RCU read-side critical section that lasts for `'a`.
    #[inline(always)]
    unsafe fn of(event: *const bindings::perf_event) -> Option<Self> {
        // SAFETY: The event is valid. The link can be cut at any time, hence the volatile read.
        let sampler = unsafe { (&raw const (*event).aux_event).read_volatile() };
        // INVARIANT: The link holds a reference until it is cut, and events are freed after a grace
        // period.
        Some(Self {
            event: NonNull::new(sampler)?,
            _rcu: PhantomData,
        })
    }

    /// The buffer with the AUX area, if a snapshot can be taken of it here and now.
    ///
    /// That is so when the sampler runs on this CPU, and has an AUX transaction open in snapshot
    /// mode. Without a transaction the PMU has nothing to copy from; in full-trace mode the area is
    /// not a ring of what came last.
    #[inline(always)]
    fn ready(&self) -> Option<NonNull<bindings::perf_buffer>> {
        let event = self.event.as_ptr();
        let active = bindings::perf_event_state_PERF_EVENT_STATE_ACTIVE;
        // SAFETY: The event is valid, and so is its parent, which an inherited event holds a
        // reference to. A buffer is freed after a grace period. All this is by the type invariants.
        unsafe {
            if (&raw const (*event).state).read_volatile() != active
                || (&raw const (*event).oncpu).read_volatile() as u32 != CpuId::current().as_u32()
            {
                return None;
            }
            let parent = (*event).parent;
            let event = if parent.is_null() { event } else { parent };
            let rb = NonNull::new((&raw const (*event).rb).read_volatile())?;
            let open = (&raw const (*rb.as_ptr()).aux_nest).read_volatile() != 0;
            (open && (*rb.as_ptr()).aux_overwrite != 0).then_some(rb)
        }
    }

    /// The size of the AUX area, if a sample can be taken of it; else 0.
    #[inline(always)]
    fn area(&self) -> u64 {
        let Some(rb) = self.ready() else {
            return 0;
        };
        // SAFETY: The buffer is valid, see `ready`.
        unsafe {
            if (&raw const (*rb.as_ptr()).aux_in_sampling).read_volatile() != 0 {
                return 0;
            }
            let pages = (&raw const (*rb.as_ptr()).aux_nr_pages).read_volatile();
            u64::from(pages as u32).wrapping_mul(PAGE_SIZE as u64)
        }
    }

    /// Has the PMU append the last `size` bytes of the AUX area.
    ///
    /// Returns how many it appended. If that is 0 it may have appended some all the same.
    ///
    /// The PMU's `start` and `stop` run with interrupts off. The callback may interrupt them only
    /// as an NMI does, for which it is made, so interrupts are off here too.
    #[inline(always)]
    fn snapshot(&self, out: &mut Output<'_>, size: u64, cx: &NmiLike<'_>) -> u64 {
        let Some(rb) = self.ready() else {
            return 0;
        };
        // SAFETY: `ready` has found the event to be active, hence its PMU to be there, and
        // interrupts are off, so that it stays so.
        let Some(snapshot_aux) = (unsafe { (*(*self.event.as_ptr()).pmu).snapshot_aux }) else {
            return 0;
        };
        // SAFETY: The buffer is valid for longer than this function runs, see `ready`.
        let Some(guard) =
            (unsafe { InSampling::enter(&raw mut (*rb.as_ptr()).aux_in_sampling, cx) })
        else {
            return 0;
        };
        // SAFETY: The event is active on this CPU, and the output is open.
        let copied = unsafe { snapshot_aux(self.event.as_ptr(), out.as_raw(), size as usize) };
        drop(guard);

        // Errors are negative. A PMU that claims to have appended too much is not to be believed.
        u64::try_from(copied)
            .ok()
            .filter(|copied| *copied <= size)
            .unwrap_or(0)
    }
}

/// Settles the size of a sample's AUX field, and accounts for it.
///
/// # Safety
///
/// To be called by `perf_prepare_sample()`, after all other fields are accounted for.
#[export]
unsafe extern "C" fn perf_aux_rust_prepare(
    data: *mut bindings::perf_sample_data,
    event: *mut bindings::perf_event,
) {
    // SAFETY: The caller prepares `data` for `event`: both are valid, `data` is its own, and it
    // holds the RCU lock.
    let (data, event, sampler) = unsafe { (&mut *data, &*event, Sampler::of(event)) };
    match sampler {
        Some(sampler) if event.attr.aux_sample_size != 0 => prepare(data, event, sampler),
        _ => settle(data, event, 0),
    }
}

/// Settles the size for a sampler that is there.
#[inline(never)]
fn prepare(
    data: &mut bindings::perf_sample_data,
    event: &bindings::perf_event,
    sampler: Sampler<'_>,
) {
    settle(data, event, sampler.area());
}

/// Settles the size, with an AUX area of `area` bytes.
#[inline(always)]
fn settle(data: &mut bindings::perf_sample_data, event: &bindings::perf_event, area: u64) {
    // The sum of all fields without any of AUX. Only `dyn_size` can be large, and it is the sum of
    // sizes of things in memory.
    let fixed = (size_of::<bindings::perf_event_header>() as u64)
        .wrapping_add(u64::from(event.header_size))
        .wrapping_add(u64::from(event.id_header_size));
    let dumps_stack = event.attr.sample_type
        & u64::from(bindings::perf_event_sample_format_PERF_SAMPLE_STACK_USER)
        != 0;
    let grant = Want {
        record: fixed.wrapping_add(data.dyn_size),
        stack: if dumps_stack { data.stack_user_size } else { 0 },
        asked: event.attr.aux_sample_size,
        area,
    }
    .settle();
    if dumps_stack {
        data.stack_user_size = grant.stack;
    }
    data.dyn_size = grant.record.wrapping_sub(fixed);
    data.aux_size = grant.aux;
}

/// Appends the AUX data to a record: exactly as many bytes as were prepared, whatever happened
/// since.
///
/// # Safety
///
/// To be called by `perf_output_sample()`, with a `handle` that has room for them.
#[export]
unsafe extern "C" fn perf_aux_rust_output(
    event: *mut bindings::perf_event,
    handle: *mut bindings::perf_output_handle,
    data: *mut bindings::perf_sample_data,
) {
    // SAFETY: The caller outputs `data` of `event`, under RCU.
    let (data, sampler) = unsafe { (&*data, Sampler::of(event)) };
    // PMUs that make up their samples without preparing them have nothing here.
    if data.sample_flags & u64::from(bindings::perf_event_sample_format_PERF_SAMPLE_AUX) == 0 {
        return;
    }
    let size = data.aux_size;
    // SAFETY: By the safety requirements.
    let mut out = unsafe { Output::new(handle) };
    let mark = out.mark();

    let mut copied = 0;
    if let Some(sampler) = sampler {
        copied = irqs_off(|cx| sampler.snapshot(&mut out, size, cx));
    }
    if copied < size {
        fill(out, mark, copied, size);
    }
}

/// Appends zeros for what is missing of `size` bytes.
#[cold]
fn fill(mut out: Output<'_>, mark: Mark, copied: u64, size: u64) {
    if copied == 0 {
        out.rewind(mark);
    }
    out.zero(size.wrapping_sub(copied));
}

/// [`copy_aux`] for PMUs that are written in C; `-EFAULT` if there is no area.
///
/// # Safety
///
/// To be called by `perf_output_copy_aux()`, under the requirements of [`copy_aux`].
#[export]
unsafe extern "C" fn perf_aux_rust_copy(
    aux_handle: *mut bindings::perf_output_handle,
    handle: *mut bindings::perf_output_handle,
    from: c_ulong,
    to: c_ulong,
) -> c_long {
    // SAFETY: By the safety requirements.
    match unsafe { copy_aux(aux_handle, handle, from as u64, to as u64) } {
        Some(len) => len as c_long,
        None => EFAULT.to_errno() as c_long,
    }
}

/// Whether AUX sampling is done here, and not by the C functions.
#[inline(always)]
pub(super) fn is_chosen() -> bool {
    #[cfg(CONFIG_PERF_AUX_RUST_COMPARE)]
    // SAFETY: The key is never freed, and its counter is read at once.
    unsafe {
        (&raw const bindings::perf_aux_rust_key.key.enabled.counter).read_volatile() > 0
    }
    #[cfg(not(CONFIG_PERF_AUX_RUST_COMPARE))]
    true
}
