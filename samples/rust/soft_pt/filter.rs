// SPDX-License-Identifier: GPL-2.0

//! Which addresses are traced: IA32_RTIT_ADDRn_A and _B, and what IA32_RTIT_CTL makes of them.
//!
//! What happens at the borders of the ranges is in the Intel SDM, volume 3, chapter "Intel
//! Processor Trace", sections "Filtering by IP" and "Filter Enable (FilterEn)". Addresses are
//! compared where a taken branch or an event lands. So code that runs across a border from one
//! instruction to the next is traced, or not, as before until it branches.

/// How many ranges there are.
pub(crate) const MAX_RANGES: usize = 4;

/// What a range is for (ADDRn_CFG).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// What is in none of the ranges with this action isn't traced (FilterEn).
    Filter,
    /// The trace ends where such a range is entered (TraceStop).
    Stop,
}

/// A range of addresses, with its last one.
#[derive(Clone, Copy)]
struct Range {
    action: Action,
    first: u64,
    last: u64,
}

/// The ranges of a trace.
///
/// # Invariants
///
/// `len` is at most [`MAX_RANGES`].
#[derive(Clone, Copy)]
pub(crate) struct Filter {
    ranges: [Range; MAX_RANGES],
    len: usize,
    /// A range for filtering was set, be it one of no addresses.
    filters: bool,
}

impl Filter {
    /// All addresses are traced.
    pub(crate) const fn none() -> Self {
        let nothing = Range {
            action: Action::Filter,
            first: 0,
            last: 0,
        };
        // INVARIANT: 0 is less.
        Self {
            ranges: [nothing; MAX_RANGES],
            len: 0,
            filters: false,
        }
    }

    /// Adds a range, with its first and last address; [`None`] for one that is nowhere as yet.
    pub(crate) fn add(&mut self, action: Action, addresses: Option<(u64, u64)>) {
        self.filters |= action == Action::Filter;
        if let (Some((first, last)), Some(slot)) = (addresses, self.ranges.get_mut(self.len)) {
            *slot = Range {
                action,
                first,
                last,
            };
            // INVARIANT: There was a slot.
            self.len = self.len.wrapping_add(1);
        }
    }

    /// Whether there are no ranges at all.
    #[inline]
    pub(crate) fn is_none(&self) -> bool {
        !self.filters && self.len == 0
    }

    /// Whether there is no address that is traced, nor one at which the trace ends.
    pub(crate) fn is_nowhere(&self) -> bool {
        self.filters && self.len == 0
    }

    #[inline]
    fn is_in(&self, ip: u64, action: Action) -> bool {
        self.ranges
            .iter()
            .take(self.len)
            .any(|range| range.action == action && range.first <= ip && ip <= range.last)
    }

    /// Whether the trace ends here.
    #[inline]
    pub(crate) fn stops_at(&self, ip: u64) -> bool {
        self.is_in(ip, Action::Stop)
    }

    /// Whether the instruction here is traced.
    #[inline]
    pub(crate) fn admits(&self, ip: u64) -> bool {
        !self.filters || self.is_in(ip, Action::Filter)
    }
}
