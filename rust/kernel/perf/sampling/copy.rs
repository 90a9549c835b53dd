// SPDX-License-Identifier: GPL-2.0

//! Copying straight into the data pages.

use crate::{
    page::{
        PAGE_SHIFT,
        PAGE_SIZE, //
    },
    perf::{
        bindings,
        ring::{
            Ring,
            Run,
            Runs, //
        }, //
    },
    prelude::*, //
};

/// Where the pages of a ring are.
///
/// # Invariants
///
/// `first` points to an array of as many pointers as `ring` has pages. Each points to a page of the
/// ring's page size. All this stays so while the value exists.
#[derive(Clone, Copy)]
struct Pages {
    first: *const *mut c_void,
    ring: Ring,
}

impl Pages {
    /// The address of the page.
    ///
    /// # Safety
    ///
    /// `page` must be less than the ring's number of pages.
    #[inline(always)]
    unsafe fn address(&self, page: u64) -> *mut u8 {
        // SAFETY: By the safety requirements and the type invariants.
        unsafe { (*self.first.add(page as usize)).cast() }
    }

    /// Whether the page after `page` follows it in memory.
    ///
    /// # Safety
    ///
    /// `page + 1` must be less than the ring's number of pages.
    #[inline(always)]
    unsafe fn joined(&self, page: u64) -> bool {
        // SAFETY: By the safety requirements.
        let (this, next) = unsafe { (self.address(page), self.address(page.wrapping_add(1))) };
        next == this.wrapping_add(self.ring.page_size() as usize)
    }

    /// The runs of the `len` bytes from `from` on.
    #[inline(always)]
    fn runs(self, from: u64, len: u64) -> Runs<impl Fn(u64) -> bool> {
        self.ring.runs(from, len, move |page| {
            // SAFETY: `Ring::runs` asks about pages of the ring that are not its last.
            unsafe { self.joined(page) }
        })
    }

    /// The address of a run.
    ///
    /// # Safety
    ///
    /// The run must be one of the ring's.
    #[inline(always)]
    unsafe fn place(&self, run: Run) -> *mut u8 {
        // SAFETY: By the safety requirements, the page is one of the ring's and the offset is
        // inside of it.
        unsafe { self.address(run.page).add(run.offset as usize) }
    }
}

/// The AUX area of a buffer.
pub(super) struct Area(Pages);

impl Area {
    /// The area of `rb`, or [`None`] if it has none.
    ///
    /// # Safety
    ///
    /// `rb` must be valid, and the caller must have an AUX transaction open on it for as long as
    /// the value exists.
    #[inline(always)]
    pub(super) unsafe fn new(rb: *const bindings::perf_buffer) -> Option<Self> {
        // SAFETY: The transaction keeps the AUX area, so that these fields do not change.
        let (first, pages) = unsafe { ((*rb).aux_pages, (*rb).aux_nr_pages) };
        // INVARIANT: The array has `aux_nr_pages` pointers to pages.
        (pages != 0).then(|| {
            Self(Pages {
                first,
                ring: Ring::new(pages as u32, PAGE_SHIFT as u32),
            })
        })
    }

    /// How many bytes there are from `from` up to `to`.
    #[inline(always)]
    pub(super) fn distance(&self, from: u64, to: u64) -> u64 {
        self.0.ring.distance(from, to)
    }
}

/// A record that is being written.
///
/// # Invariants
///
/// `handle` is between `perf_output_begin()` and `perf_output_end()`.
pub(super) struct Output<'a> {
    handle: &'a mut bindings::perf_output_handle,
}

impl<'a> Output<'a> {
    /// # Safety
    ///
    /// `handle` must be between `perf_output_begin()` and `perf_output_end()` for `'a`, and nobody
    /// else may use it while a method of the value runs.
    #[inline(always)]
    pub(super) unsafe fn new(handle: *mut bindings::perf_output_handle) -> Self {
        // INVARIANT: By the safety requirements.
        Self {
            // SAFETY: By the safety requirements.
            handle: unsafe { &mut *handle },
        }
    }

    #[inline(always)]
    pub(super) fn as_raw(&mut self) -> *mut bindings::perf_output_handle {
        self.handle
    }

    #[inline(always)]
    fn pages(&self) -> Pages {
        let rb = self.handle.rb;
        // SAFETY: The record's buffer exists until `perf_output_end()`, and its data pages with it.
        let (first, pages, order) = unsafe {
            #[cfg(CONFIG_PERF_USE_VMALLOC)]
            let order = (*rb).page_order as u32;
            #[cfg(not(CONFIG_PERF_USE_VMALLOC))]
            let order = 0;
            ((&raw const (*rb).data_pages).cast(), (*rb).nr_pages, order)
        };
        // INVARIANT: `data_pages` has `nr_pages` pointers to pages of this order. There is at least
        // one, or `perf_output_begin()` had failed.
        Pages {
            first,
            ring: Ring::new(pages as u32, PAGE_SHIFT as u32 + order),
        }
    }

    /// Where in the ring the next byte goes.
    #[inline(always)]
    fn position(&self, pages: &Pages) -> u64 {
        // `handle.size` is what is left of the page. The sum is at most the size of the ring.
        u64::from(self.handle.page as u32)
            .wrapping_add(1)
            .wrapping_mul(pages.ring.page_size())
            .wrapping_sub(self.handle.size as u64)
    }

    /// Goes to `at`, an offset in the ring.
    #[inline(always)]
    fn seek(&mut self, pages: &Pages, at: u64) {
        let page = at / pages.ring.page_size();
        let offset = at % pages.ring.page_size();
        self.handle.page = page as c_int;
        self.handle.size = pages.ring.page_size().wrapping_sub(offset) as usize;
        // SAFETY: `at` is less than the size of the ring.
        self.handle.__bindgen_anon_2.addr = unsafe {
            pages
                .place(Run {
                    page,
                    offset,
                    len: 0,
                })
                .cast()
        };
    }

    /// Appends the `len` bytes of the AUX area from `from` on.
    #[inline(always)]
    pub(super) fn copy(&mut self, area: &Area, from: u64, len: u64) {
        let mut runs = area.0.runs(from, len);
        match runs.next() {
            // Mostly one run is all there is.
            Some(run) if run.len == len => {
                // SAFETY: The run is one of the area's, and AUX pages are not data pages.
                unsafe { self.append(area.0.place(run), run.len as usize) };
            }
            _ => self.copy_runs(area.0.first, area.0.ring.pages() as u32, from, len),
        }
    }

    /// [`Output::copy`] of more than one run. The area comes in its parts, which fit into
    /// registers.
    #[inline(never)]
    fn copy_runs(&mut self, first: *const *mut c_void, pages: u32, from: u64, len: u64) {
        // INVARIANT: The caller has the parts from an `Area`.
        let aux = Pages {
            first,
            ring: Ring::new(pages, PAGE_SHIFT as u32),
        };
        for run in aux.runs(from, len) {
            // SAFETY: The run is one of the area's, and AUX pages are not data pages.
            unsafe { self.append(aux.place(run), run.len as usize) };
        }
    }

    /// Appends `len` bytes from `source` on.
    ///
    /// # Safety
    ///
    /// The bytes must be readable and not lie in data pages.
    #[inline(always)]
    unsafe fn append(&mut self, mut source: *const u8, len: usize) {
        // SAFETY: Outputs use the `addr` variant of the union; it points to `size` more bytes of a
        // data page.
        let mut target: *mut u8 = unsafe { self.handle.__bindgen_anon_2.addr }.cast();
        let mut room = self.handle.size;
        let mut left = len;
        if left >= room {
            // Up to the end of this page and of those that follow. One that is filled is turned,
            // so that there always is room for the next byte.
            let pages = self.pages();
            let mut page = self.handle.page as u64;
            while left >= room {
                // SAFETY: There are `left` bytes, by the safety requirements, and `room` bytes up
                // to the end of the page.
                unsafe { core::ptr::copy_nonoverlapping(source, target, room) };
                source = source.wrapping_add(room);
                left = left.wrapping_sub(room);
                page = pages.ring.next(page);
                // SAFETY: The page is one of the ring's.
                target = unsafe { pages.address(page) };
                room = pages.ring.page_size() as usize;
            }
            self.handle.page = page as c_int;
        }
        // SAFETY: As above; what is left is less than the room.
        unsafe { core::ptr::copy_nonoverlapping(source, target, left) };
        self.handle.size = room.wrapping_sub(left);
        self.handle.__bindgen_anon_2.addr = target.wrapping_add(left).cast();
    }

    /// Appends `bytes`.
    #[cfg(PERF_IN_MODULE)]
    pub(super) fn put(&mut self, bytes: &[u8]) {
        // SAFETY: The bytes are there, and a slice can not be of a ring that user space reads.
        unsafe { self.append(bytes.as_ptr(), bytes.len()) };
    }

    /// Appends `len` zeros.
    #[inline(always)]
    pub(super) fn zero(&mut self, len: u64) {
        let pages = self.pages();
        let mut out = pages.runs(self.position(&pages), len);
        for run in out.by_ref() {
            // SAFETY: The run is one of the ring's, contiguous for its length.
            unsafe { core::ptr::write_bytes(pages.place(run), 0, run.len as usize) };
        }
        let end = out.at();
        self.seek(&pages, end);
    }

    /// Remembers where the next byte goes.
    #[inline(always)]
    pub(super) fn mark(&self) -> Mark {
        Mark {
            page: self.handle.page,
            size: self.handle.size,
            // SAFETY: Outputs of records use the `addr` variant of the union.
            addr: unsafe { self.handle.__bindgen_anon_2.addr },
        }
    }

    /// Goes back to where `mark` was taken; what was written since will be written over.
    #[inline(always)]
    pub(super) fn rewind(&mut self, mark: Mark) {
        self.handle.page = mark.page;
        self.handle.size = mark.size;
        self.handle.__bindgen_anon_2.addr = mark.addr;
    }
}

/// Appends what lies in the AUX area from `from` up to `to` to a record; the whole area if they are
/// the same. Both are counted round the area.
///
/// Returns how many bytes that was, or [`None`] if there is no area.
///
/// # Safety
///
/// `aux_handle` must be an open AUX transaction of this CPU, and `handle` an open output with room
/// for as many bytes.
#[inline(always)]
pub(in super::super) unsafe fn copy_aux(
    aux_handle: *mut bindings::perf_output_handle,
    handle: *mut bindings::perf_output_handle,
    from: u64,
    to: u64,
) -> Option<u64> {
    // SAFETY: By the safety requirements.
    let (area, mut out) = unsafe { (Area::new((*aux_handle).rb)?, Output::new(handle)) };
    let len = area.distance(from, to);
    out.copy(&area, from, len);
    Some(len)
}

/// A place in a record, see [`Output::mark`].
pub(super) struct Mark {
    page: c_int,
    size: usize,
    addr: *mut c_void,
}

const _: () = assert!(1 << PAGE_SHIFT == PAGE_SIZE);
