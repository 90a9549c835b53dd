// SPDX-License-Identifier: GPL-2.0

//! The input is a format, positions and a ring of anything: what the selftests' reader makes of it
//! is records or an error.
//!
//! `tools/testing/soft_pt_host/fuzz/run 60 record` runs it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use perf_aux::record::{
    Data,
    Format,
    Record, //
};
use std::sync::atomic::AtomicU64;

fuzz_target!(|input: (u64, u64, u16, [u64; 4], &[u8])| {
    let (tail, head, order, format, bytes) = input;
    let words = 1usize << (order % 10);
    let ring: Vec<AtomicU64> = bytes
        .chunks(8)
        .map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        })
        .chain(std::iter::repeat(0))
        .take(words)
        .map(AtomicU64::new)
        .collect();
    let format = Format {
        sample_type: format[0],
        read_format: format[1],
        regs_user: format[2],
        regs_intr: format[3],
        id_all: order & 0x8000 != 0,
    };
    let Some(data) = Data::new(&ring) else {
        panic!("{words} words are a ring");
    };
    let mut tail = tail;
    // From any positions, then from ones that could be.
    let _ = data.record(tail, head);
    tail &= !7;
    let head = tail.wrapping_add((head % (8 * words as u64 + 1)) & !7);
    while let Ok(Some(raw)) = data.record(tail, head) {
        assert_eq!(usize::from(raw.size()), raw.bytes().len());
        if let Ok(Record::Sample(sample)) = Record::parse(&raw, &format) {
            let aux = sample.aux.map_or(0, |aux| aux.len());
            assert!(aux + sample.raw.len() + sample.stack_user.len() <= raw.bytes().len());
        }
        tail = tail.wrapping_add(raw.size().into());
    }
});
