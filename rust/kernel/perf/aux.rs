// SPDX-License-Identifier: GPL-2.0

//! The AUX area, and the transactions that fill it.

use super::{
    bindings,
    Event,
    NmiLike,
    Pmu, //
};
use crate::{
    impl_flags,
    page::PAGE_SIZE,
    prelude::*,
    types::ForeignOwnable, //
};
use core::{
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr::NonNull, //
};

impl_flags!(
    /// What is to be said about an AUX transaction (`PERF_AUX_FLAG_*`).
    ///
    /// `OVERWRITE` is missing: the perf core sets it itself.
    #[derive(Debug, Clone, Default, Copy, PartialEq, Eq)]
    pub struct AuxFlags(u32);

    /// One thing to say about an AUX transaction.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum AuxFlag {
        /// Bytes were dropped because there was no room for them. The core stops the event and
        /// wakes user space up.
        Truncated = bindings::PERF_AUX_FLAG_TRUNCATED,

        /// The bytes have a hole.
        Partial = bindings::PERF_AUX_FLAG_PARTIAL,

        /// The bytes collide with those of another event.
        Collision = bindings::PERF_AUX_FLAG_COLLISION,
    }
);

/// The pages of an AUX area.
///
/// The pages are not contiguous in memory, and user space reads them while they are written; so the
/// area hands out no references. It is written through [`AuxOutput::write`].
///
/// # Invariants
///
/// `pages` points to an array of `nr_pages` kernel addresses of whole pages, valid until the PMU's
/// `free_aux` callback returns. `nr_pages` is a power of two.
#[derive(Clone, Copy)]
pub struct AuxArea {
    pages: NonNull<*mut c_void>,
    nr_pages: usize,
}

// SAFETY: An `AuxArea` names memory that belongs to no CPU and no task.
unsafe impl Send for AuxArea {}
// SAFETY: `&AuxArea` only offers the size.
unsafe impl Sync for AuxArea {}

impl AuxArea {
    /// # Safety
    ///
    /// `pages` must be valid for reads of `nr_pages` pointers to pages, until `free_aux` returns.
    pub(super) unsafe fn new(pages: *mut *mut c_void, nr_pages: usize) -> Result<Self> {
        // The perf core only maps AUX areas whose size is a power of two.
        if !nr_pages.is_power_of_two() {
            return Err(EINVAL);
        }
        // INVARIANT: By the safety requirements of this function and the check above.
        Ok(Self {
            pages: NonNull::new(pages).ok_or(EINVAL)?,
            nr_pages,
        })
    }

    /// The size in bytes, a power of two.
    #[inline]
    pub fn size(&self) -> u64 {
        self.nr_pages as u64 * PAGE_SIZE as u64
    }

    /// Copies `bytes` to the place `at`, counted round the area.
    ///
    /// # Safety
    ///
    /// The caller must be the only writer of the area, and the area's `free_aux` must not have been
    /// called.
    #[inline(always)]
    unsafe fn write(&self, at: u64, bytes: &[u8]) {
        let place = (at & (self.size() - 1)) as usize;
        let offset = place & (PAGE_SIZE - 1);
        if bytes.len() > PAGE_SIZE - offset {
            // SAFETY: As for this call.
            unsafe { self.write_apart(at, bytes) };
            return;
        }
        // SAFETY: `place` is less than the size of the area, so its page number is less than
        // `nr_pages`, and the array is valid by the type invariants. The bytes from `offset` on are
        // inside of the page, which is valid for writes until `free_aux`, and which nobody else
        // writes, by the safety requirements of this function.
        unsafe {
            let page = *self.pages.as_ptr().add(place / PAGE_SIZE);
            let to = page.cast::<u8>().add(offset);
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }

    /// The same for what does not fit into one page. Apart, so that what does fit is a store or two
    /// where its length is known.
    ///
    /// # Safety
    ///
    /// That of [`write`](Self::write).
    #[inline(never)]
    unsafe fn write_apart(&self, mut at: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = PAGE_SIZE - (at as usize & (PAGE_SIZE - 1));
            let (now, later) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
            // SAFETY: As for this call.
            unsafe { self.write(at, now) };
            at = at.wrapping_add(now.len() as u64);
            bytes = later;
        }
    }
}

/// An open AUX transaction: the right to write the AUX area of an event.
///
/// Ending it publishes what was written. A transaction that is dropped is ended with nothing
/// written. In snapshot mode a transaction starts anywhere in the area, and its end says where.
///
/// The transaction belongs to the CPU that opened it: keep it in a [`CpuLocal`](super::CpuLocal),
/// and end it from [`Stop::Update`](super::Stop::Update) and [`Pmu::del`].
///
/// # Invariants
///
/// `perf_aux_output_begin()` has filled in `handle`, and `perf_aux_output_end()` was not called
/// since. `area` is the AUX area of the handle's buffer.
pub struct AuxOutput<P: Pmu> {
    handle: bindings::perf_output_handle,
    area: AuxArea,
    overwrite: bool,
    _pmu: PhantomData<P>,
}

// SAFETY: The handle points to objects that it keeps alive itself. That it is used on one CPU only
// is a matter of the driver's logic that the core checks; no memory safety depends on it.
unsafe impl<P: Pmu> Send for AuxOutput<P> {}

/// Opens a transaction. Not generic, so that it is compiled into the kernel, to which `struct
/// perf_buffer` is private.
///
/// # Safety
///
/// `event` must be valid.
#[inline(never)]
unsafe fn begin(
    handle: &mut bindings::perf_output_handle,
    event: *mut bindings::perf_event,
) -> Option<(AuxArea, bool)> {
    // SAFETY: `handle` is there to be filled in, and the event is valid. If the pointer returned is
    // not null (`setup_aux` never gives the core a null pointer), the handle keeps its buffer
    // alive, and with it the AUX area.
    unsafe {
        if bindings::perf_aux_output_begin(handle, event).is_null() {
            return None;
        }
        let rb = handle.rb;
        // INVARIANT: As `AuxArea::new`; the core has checked the size.
        let area = NonNull::new((*rb).aux_pages).map(|pages| AuxArea {
            pages,
            nr_pages: (*rb).aux_nr_pages as usize,
        });
        match area {
            Some(area) => Some((area, (*rb).aux_overwrite != 0)),
            None => {
                bindings::perf_aux_output_end(handle, 0);
                None
            }
        }
    }
}

impl<P: Pmu> AuxOutput<P> {
    /// Opens a transaction on the AUX area of `event` (its parent's, when it is inherited).
    ///
    /// Returns [`None`] when there is no AUX area, when it is being unmapped, or when it is full;
    /// in the last case the core has disabled the event and woken up its owner.
    #[inline]
    pub fn begin(event: &Event<P>, _cx: &NmiLike<'_>) -> Option<Self> {
        let mut handle = pin_init::zeroed();
        // SAFETY: The event is valid.
        let (area, overwrite) = unsafe { begin(&mut handle, event.as_raw()) }?;
        // INVARIANT: The transaction was opened just now.
        Some(Self {
            handle,
            area,
            overwrite,
            _pmu: PhantomData,
        })
    }

    /// What [`Pmu::setup_aux`] returned for this area.
    #[inline]
    pub fn aux(&self) -> <P::Aux as ForeignOwnable>::Borrowed<'_> {
        // SAFETY: The handle is open by the type invariants, so the event is set and the pointer is
        // the one that `setup_aux` gave, which is not freed before the transaction ends.
        unsafe { P::Aux::borrow(bindings::perf_get_aux((&raw const self.handle).cast_mut())) }
    }

    /// Where the transaction starts. In snapshot mode an offset in the area, else a running count
    /// of bytes.
    #[inline]
    pub fn head(&self) -> u64 {
        // SAFETY: An AUX handle uses the `head` variant of the union.
        (unsafe { self.handle.__bindgen_anon_2.head }) as u64
    }

    /// In full-trace mode, how many bytes may be written; in snapshot mode, 0.
    #[inline]
    pub fn space(&self) -> u64 {
        self.handle.size as u64
    }

    /// In full-trace mode, the running count of bytes at which user space wants to be woken up.
    #[inline]
    pub fn wakeup(&self) -> u64 {
        self.handle.wakeup as u64
    }

    /// Whether user space mapped the area read-only.
    #[inline]
    pub fn overwrite(&self) -> bool {
        self.overwrite
    }

    /// The AUX area.
    #[inline]
    pub fn area(&self) -> &AuxArea {
        &self.area
    }

    /// Adds something to say about this transaction.
    #[inline]
    pub fn flag(&mut self, flags: AuxFlags) {
        // SAFETY: The handle is open by the type invariants.
        unsafe { bindings::perf_aux_output_flag(&mut self.handle, u64::from(u32::from(flags))) };
    }

    /// Leaves out the next `size` bytes.
    ///
    /// # Errors
    ///
    /// `ENOSPC` if there are fewer.
    #[inline]
    pub fn skip(&mut self, size: usize) -> Result {
        // SAFETY: The handle is open by the type invariants.
        crate::error::to_result(unsafe { bindings::perf_aux_output_skip(&mut self.handle, size) })
    }

    /// Copies `bytes` into the area from `at` on, going round at its end.
    ///
    /// In full-trace mode the bytes must be among the [`space`](Self::space) from
    /// [`head`](Self::head) on. Readers are told of them when the transaction ends.
    #[inline(always)]
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        // SAFETY: The transaction is open: the core lets one exist at a time per buffer, and does
        // not free the AUX area before it has ended.
        unsafe { self.area.write(at, bytes) };
    }

    /// Ends the transaction.
    ///
    /// `size` is how many bytes were written, and `head` where the trace ends now. The core uses
    /// the former in full-trace mode and the latter, as an offset in the area, in snapshot mode.
    #[inline]
    pub fn end(self, size: u64, head: u64) {
        ManuallyDrop::new(self).close(size, head);
    }

    /// Ends the transaction and opens another for the same event, which has the room that user
    /// space has made in the meantime.
    ///
    /// When that fails, the event counts as stopped.
    pub fn renew(self, size: u64, head: u64, _cx: &NmiLike<'_>) -> Option<Self> {
        let event = self.handle.event;
        self.end(size, head);

        let mut handle = pin_init::zeroed();
        // SAFETY: The event is on this CPU, or there would not have been a transaction; so it is
        // valid until the CPU has taken it off, which it can't while this code runs.
        match unsafe { begin(&mut handle, event) } {
            // INVARIANT: The transaction was opened just now.
            Some((area, overwrite)) => Some(Self {
                handle,
                area,
                overwrite,
                _pmu: PhantomData,
            }),
            None => {
                // SAFETY: As above; an `AuxOutput<P>` is only opened for an `Event<P>`.
                unsafe { Event::<P>::from_raw(event) }.halt();
                None
            }
        }
    }

    #[inline]
    fn close(&mut self, size: u64, head: u64) {
        let size = if self.overwrite {
            self.handle.__bindgen_anon_2.head = (head & (self.area.size() - 1)) as usize;
            0
        } else {
            size as usize
        };
        // SAFETY: The handle is open by the type invariants; the callers do not use it any more.
        unsafe { bindings::perf_aux_output_end(&mut self.handle, size) };
    }

    #[inline]
    pub(super) fn as_raw(&mut self) -> *mut bindings::perf_output_handle {
        &mut self.handle
    }
}

impl<P: Pmu> Drop for AuxOutput<P> {
    fn drop(&mut self) {
        // In snapshot mode the position stays where the core said it was.
        self.close(0, self.head());
    }
}
