// SPDX-License-Identifier: GPL-2.0

//! Ring arithmetic against a model that takes one byte at a time, and sample sizes against the
//! rules.

use crate::{
    ring::{
        Ring,
        Run, //
    },
    size::{
        Want,
        RECORD_MAX, //
    },
};
use proptest::prelude::*;

const SHIFT: u32 = 12;
const PAGE: u64 = 1 << SHIFT;

/// The runs of a range, when the pages follow each other in memory as `joined` says.
fn runs(ring: Ring, from: u64, len: u64, joined: impl Fn(u64) -> bool) -> Vec<Run> {
    ring.runs(from, len, joined).collect()
}

/// What every list of runs has to be: the bytes of the range, in order, in as few runs as can be.
fn check(ring: Ring, from: u64, len: u64, joined: impl Fn(u64) -> bool) {
    let runs = runs(ring, from, len, &joined);
    let mut at = from % ring.size();
    let mut left = len;
    for (i, run) in runs.iter().enumerate() {
        assert_eq!(run.page * PAGE + run.offset, at);
        assert!(run.offset < PAGE && run.len > 0 && run.len <= left);
        let last = (at + run.len - 1) / PAGE;
        assert!(
            last * PAGE < ring.size(),
            "a run goes past the end: {run:?}"
        );
        assert!((run.page..last).all(&joined), "{run:?} is not contiguous");
        at += run.len;
        left -= run.len;
        if i + 1 < runs.len() {
            assert_eq!(at % PAGE, 0, "{run:?} ends in the middle of a page");
            let page = at / PAGE;
            assert!(
                at == ring.size() || !joined(page - 1),
                "{run:?} ends before page {page}, which follows it"
            );
        }
        at %= ring.size();
    }
    assert_eq!(left, 0);
}

fn pages() -> impl Strategy<Value = u32> {
    (0..=21u32).prop_map(|order| 1 << order)
}

proptest! {
    #[test]
    fn runs_are_the_range(
        pages in pages(),
        from in any::<u64>(),
        len in 0..=66_000u64,
        seed in any::<u64>(),
        dense in 0..4u32,
    ) {
        let ring = Ring::new(pages, SHIFT);
        // Some pages follow each other, in a pattern that the seed makes.
        let joined = |page: u64| match dense {
            0 => false,
            3 => true,
            _ => (page.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed).count_ones() % 4 < dense + 1,
        };
        check(ring, from, len, joined);
    }

    // No buffer has such rings; if one had, its pages would still be all that is touched.
    #[test]
    fn no_page_that_is_not_there(
        pages in 1..=u32::MAX,
        from in any::<u64>(),
        len in 0..=66_000u64,
        joined in any::<bool>(),
    ) {
        let ring = Ring::new(pages, SHIFT);
        prop_assert!(ring.offset(from) < ring.size());
        prop_assert!(ring.next(ring.offset(from) / PAGE) < u64::from(pages));
        for run in runs(ring, from, len, |_| joined) {
            prop_assert!(run.offset < PAGE);
            prop_assert!(run.page * PAGE + run.offset + run.len <= ring.size());
        }
    }

    #[test]
    fn a_whole_ring(order in 0..=9u32, from in any::<u64>(), joined in any::<bool>()) {
        let ring = Ring::new(1 << order, SHIFT);
        let len = ring.distance(from, from);
        prop_assert_eq!(len, ring.size());
        check(ring, from, len, |_| joined);
    }

    #[test]
    fn distance_is_the_way_round(pages in pages(), from in any::<u64>(), len in any::<u64>()) {
        let ring = Ring::new(pages, SHIFT);
        let len = len % ring.size() + 1;
        prop_assert_eq!(ring.distance(from, from.wrapping_add(len)), len);
        // Offsets do as well as running counts.
        let to = from.wrapping_add(len) % ring.size();
        prop_assert_eq!(ring.distance(from % ring.size(), to), len);
    }

    #[test]
    fn limited_runs_are_the_same_bytes(
        order in 0..=5u32,
        from in any::<u64>(),
        len in 0..=70_000u64,
        limits in prop::collection::vec(0..=9_000u64, 1..50),
    ) {
        let ring = Ring::new(1 << order, SHIFT);
        let mut some = ring.runs(from, len, |page| page % 3 != 0);
        let mut at = from % ring.size();
        let mut left = len;
        for limit in limits.iter().cycle().take(1_000) {
            prop_assert_eq!(some.at(), at);
            match some.next_upto(*limit) {
                Some(run) => {
                    prop_assert_eq!(run.page * PAGE + run.offset, at);
                    prop_assert!(run.len > 0 && run.len <= *limit);
                    at = (at + run.len) % ring.size();
                    left -= run.len;
                }
                None => prop_assert!(*limit == 0 || left == 0),
            }
        }
    }

    #[test]
    fn settled_sizes_keep_the_rules(
        others in (1..=8_300u64).prop_map(|words| words * 8),
        stack in (0..=8_191u64).prop_map(|words| words * 8),
        asked in prop_oneof![0..=70_000u32, any::<u32>()],
        area in prop_oneof![Just(0), pages().prop_map(|pages| u64::from(pages) * PAGE)],
    ) {
        let want = Want { record: others + stack, stack, asked, area };
        let grant = want.settle();
        prop_assert_eq!(grant.record, others + grant.stack + 8 + grant.aux);
        prop_assert_eq!(grant.record % 8, 0);
        prop_assert_eq!(grant.aux % 8, 0);
        prop_assert!(grant.aux <= u64::from(asked) && grant.aux <= area);
        prop_assert!(grant.stack <= stack && (grant.stack > 0 || stack == 0));
        // It fits if it can, and has all that there is room for.
        let least = others + stack.min(8) + 8;
        prop_assert!(grant.record <= RECORD_MAX.max(least));
        if others + stack + 8 <= RECORD_MAX {
            prop_assert_eq!(grant.stack, stack);
            let room = RECORD_MAX - (others + stack + 8);
            prop_assert_eq!(grant.aux, room.min(u64::from(asked)).min(area) & !7);
        } else {
            prop_assert_eq!(grant.aux, 0);
        }
    }
}

#[test]
fn beyond_4_gib() {
    let ring = Ring::new(1 << 21, SHIFT);
    assert_eq!(ring.size(), 1 << 33);
    let run = |page, offset, len| Run { page, offset, len };
    assert_eq!(
        runs(ring, (1 << 33) - 4104, 4112, |_| false),
        [
            run((1 << 21) - 2, 4088, 8),
            run((1 << 21) - 1, 0, 4096),
            run(0, 0, 8),
        ]
    );
    assert_eq!(
        runs(ring, (7 << 33) + (1 << 32) - 16, 32, |_| true),
        [run((1 << 20) - 1, 4080, 32)]
    );
}

#[test]
fn a_ring_knows_its_size() {
    let ring = Ring::new(16, 12);
    assert_eq!((ring.size(), ring.page_size()), (16 * 4096, 4096));
    assert_eq!((ring.pages(), ring.next(7), ring.next(15)), (16, 8, 0));
}
