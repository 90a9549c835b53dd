// SPDX-License-Identifier: GPL-2.0

//! Page faults as overflows: they come exactly when a test makes them.

use perf_aux::abi;
use perf_aux::ring::page_size;
use perf_aux::{
    Attr,
    Result, //
};

/// An event that overflows with each `period`-th page fault of the calling thread.
pub fn faults(period: u64) -> Attr {
    Attr::software(abi::PERF_COUNT_SW_PAGE_FAULTS)
        .sample_period(period)
        .user_only()
        .disabled()
        .sample_type((abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID).into())
        .wakeup_events(1)
}

/// Memory whose pages fault once each when touched.
pub struct Pages {
    base: *mut u8,
    pages: usize,
    touched: usize,
}

impl Pages {
    /// Maps this many pages.
    pub fn new(pages: usize) -> Result<Self> {
        // SAFETY: a new private mapping touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                pages * page_size(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(perf_aux::Error::last_os(format!("mmap of {pages} pages")));
        }
        // One fault must be one page. Without this, a huge page could come with the first of them.
        // SAFETY: the range was just mapped.
        unsafe { libc::madvise(base, pages * page_size(), libc::MADV_NOHUGEPAGE) };
        Ok(Pages {
            base: base.cast(),
            pages,
            touched: 0,
        })
    }

    /// Makes one fault; false when no page is left.
    pub fn fault(&mut self) -> bool {
        if self.touched == self.pages {
            return false;
        }
        // SAFETY: inside the mapping, by the check above.
        unsafe { self.base.add(self.touched * page_size()).write_volatile(1) };
        self.touched += 1;
        true
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our own mapping, not used any more.
        unsafe { libc::munmap(self.base.cast(), self.pages * page_size()) };
    }
}
