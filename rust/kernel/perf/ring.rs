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
/// `pages` is a power of two, and the size in bytes is less than `2^62`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ring {
    pages: u64,
    shift: u32,
}

impl Ring {
    /// A ring of `pages` pages of `1 << shift` bytes, or [`None`] if there can't be such a ring.
    #[inline]
    pub(crate) const fn new(pages: u64, shift: u32) -> Option<Self> {
        // `is_power_of_two()` counts bits, which takes the kernel's baseline CPU twenty
        // instructions.
        if pages == 0 || pages & pages.wrapping_sub(1) != 0 || pages >= 1 << 62 >> shift {
            return None;
        }
        // INVARIANT: By the check above.
        Some(Self { pages, shift })
    }

    /// How many pages it has.
    #[inline]
    pub(crate) const fn pages(&self) -> u64 {
        self.pages
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
        let page_size = self.ring.page_size();
        let page = self.at >> self.ring.shift;
        let offset = self.at & page_size.wrapping_sub(1);

        // No sum below can overflow: all are at most the size of the ring, bar `left`, which is
        // only compared and subtracted from.
        let mut len = page_size.wrapping_sub(offset);
        let mut next = page.wrapping_add(1);
        while len < most && next < self.ring.pages && (self.joined)(next.wrapping_sub(1)) {
            next = next.wrapping_add(1);
            len = len.wrapping_add(page_size);
        }
        let len = len.min(most);

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
