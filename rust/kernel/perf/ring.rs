// SPDX-License-Identifier: GPL-2.0

//! The arithmetic of rings made of pages.
//!
//! Both of perf's rings, the data pages and the AUX area, are a power of two of pages that need not
//! lie together in memory. A range of such a ring is a sequence of [`Run`]s: pieces each of which
//! is contiguous in memory, so that one `memcpy` can do it.
//!
//! This is pure logic on 64-bit numbers: no kernel types, no memory is touched. The same file is
//! tested on the host.

/// A ring of `pages` pages of `1 << shift` bytes.
///
/// # Invariants
///
/// `pages` is not 0, and the size in bytes is less than `2^62`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pages: u64,
    shift: u32,
}

impl Ring {
    /// The ring of `pages` pages, at least one, of `1 << shift` bytes each.
    ///
    /// `pages` is a power of two, as `perf_mmap()` sees to. If it were not, some pages would never
    /// be used, and none that is not there.
    #[inline]
    pub(crate) const fn new(pages: u32, shift: u32) -> Self {
        // INVARIANT: By the above.
        Self {
            pages: pages as u64,
            shift,
        }
    }

    /// How many pages it has.
    #[inline]
    pub(crate) const fn pages(&self) -> u64 {
        self.pages
    }

    /// The page that comes after `page`.
    #[inline]
    pub(crate) const fn next(&self, page: u64) -> u64 {
        page.wrapping_add(1) & self.pages.wrapping_sub(1)
    }

    /// The size of one page.
    #[inline]
    pub(crate) const fn page_size(&self) -> u64 {
        1 << self.shift
    }

    /// The size in bytes.
    #[inline]
    pub(crate) const fn size(&self) -> u64 {
        self.pages << self.shift
    }

    /// Where `position`, counted round the ring any number of times, lies in it.
    #[inline]
    pub(crate) const fn offset(&self, position: u64) -> u64 {
        position & self.size().wrapping_sub(1)
    }

    /// How many bytes there are from `from` up to `to`, counted round the ring.
    ///
    /// At least one: a range that ends where it starts is the whole ring.
    #[inline]
    pub(crate) const fn distance(&self, from: u64, to: u64) -> u64 {
        match self.offset(to.wrapping_sub(from)) {
            0 => self.size(),
            len => len,
        }
    }

    /// The runs of the `len` bytes from `from` on.
    ///
    /// `joined` says of a page whether the one after it follows it in memory. It is not asked about
    /// the last page of the ring.
    #[inline]
    pub(crate) const fn runs<J: Fn(u64) -> bool>(&self, from: u64, len: u64, joined: J) -> Runs<J> {
        // INVARIANT: `offset` is less than the ring's size.
        Runs {
            ring: *self,
            at: self.offset(from),
            left: len,
            joined,
        }
    }
}

/// A contiguous piece of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The page it starts in.
    pub(crate) page: u64,
    /// Where in that page.
    pub(crate) offset: u64,
    /// How many bytes it has.
    pub(crate) len: u64,
}

/// What is left of a range of a ring.
///
/// # Invariants
///
/// `at` is less than the ring's size.
#[derive(Debug, Clone)]
pub(crate) struct Runs<J> {
    ring: Ring,
    at: u64,
    left: u64,
    joined: J,
}

impl<J> Runs<J> {
    /// Where the rest starts.
    #[inline]
    pub(crate) const fn at(&self) -> u64 {
        self.at
    }
}

impl<J: Fn(u64) -> bool> Runs<J> {
    /// The next run, of at most `max` bytes.
    #[inline]
    pub(crate) fn next_upto(&mut self, max: u64) -> Option<Run> {
        let most = self.left.min(max);
        if most == 0 {
            return None;
        }
        let page = self.at >> self.ring.shift;
        let offset = self.at & self.ring.page_size().wrapping_sub(1);

        // The page of the last byte, as far as the ring goes. More bytes than 64 bits can count
        // would make it too small, and the run shorter than it could be.
        let last = self.at.wrapping_add(most).wrapping_sub(1) >> self.ring.shift;
        let last = last.min(self.ring.pages.wrapping_sub(1));
        let mut end = page.wrapping_add(1);
        while end <= last && (self.joined)(end.wrapping_sub(1)) {
            end = end.wrapping_add(1);
        }
        let len = (end << self.ring.shift).wrapping_sub(self.at).min(most);

        // INVARIANT: `offset` is less than the ring's size.
        self.at = self.ring.offset(self.at.wrapping_add(len));
        self.left = self.left.wrapping_sub(len);
        Some(Run { page, offset, len })
    }
}

impl<J: Fn(u64) -> bool> Iterator for Runs<J> {
    type Item = Run;

    #[inline]
    fn next(&mut self) -> Option<Run> {
        self.next_upto(u64::MAX)
    }
}
