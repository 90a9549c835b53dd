// SPDX-License-Identifier: GPL-2.0

//! The input is a ring, a range of it and which of its pages follow each other: the runs of the
//! range are its bytes, in order, and each run is contiguous in memory.
//!
//! `tools/testing/soft_pt_host/fuzz/run 60 rings` runs it.

#![no_main]
#![expect(dead_code, reason = "the kernel uses more of the shared file")]

#[path = "../../../../../rust/kernel/perf/ring.rs"]
mod ring;

use libfuzzer_sys::fuzz_target;
use ring::Ring;

fuzz_target!(|input: (u8, u8, u64, u64, [u64; 4])| {
    let (order, shift, from, len, joins) = input;
    // Pages of 16 bytes and more, so that ranges are of many pages.
    let (pages, shift) = (1u32 << (order % 9), 4 + u32::from(shift % 9));
    let ring = Ring::new(pages, shift);
    let page = 1u64 << shift;
    let size = u64::from(pages) * page;
    assert_eq!(ring.size(), size);
    assert_eq!(
        ring.distance(from, from.wrapping_add(len)),
        match len % size {
            0 => size,
            rest => rest,
        }
    );
    let len = len % (size + 1);
    let joined = |page: u64| (joins[page as usize / 64 % 4] >> (page % 64)) & 1 != 0;

    let mut at = from % size;
    let mut left = len;
    for run in ring.runs(from, len, joined) {
        assert!(run.len > 0 && run.len <= left);
        assert_eq!(run.page * page + run.offset, at);
        assert!(run.offset < page && at + run.len <= size);
        let last = (at + run.len - 1) / page;
        assert!((run.page..last).all(joined), "{run:?} is not contiguous");
        at = (at + run.len) % size;
        left -= run.len;
    }
    assert_eq!(left, 0);
});
