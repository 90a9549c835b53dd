// SPDX-License-Identifier: GPL-2.0

//! The input is a configuration and events that belong to no program: whatever follows what, a
//! trace takes it, and no event has more bytes than the room that the unit keeps for it.
//!
//! `tools/testing/soft_pt_host/fuzz/run 60 events` runs it.

#![no_main]
#![expect(dead_code, reason = "the tests use more of the shared files")]

#[path = "../../src/events.rs"]
mod events;
#[path = "../../../../../samples/rust/soft_pt/packet.rs"]
mod packet;
#[path = "../../../../../samples/rust/soft_pt/trace.rs"]
mod trace;

use events::{
    Event,
    Teller, //
};
use libfuzzer_sys::fuzz_target;
use packet::ExecMode;
use trace::Config;

fuzz_target!(|data: &[u8]| {
    let Some((&flags, events)) = data.split_first() else {
        return;
    };
    let mut teller = Teller::new(Config {
        tsc: flags & 1 != 0,
        branch: flags & 4 == 0,
        ret_compression: flags & 2 != 0,
        psb_period: 256 << (flags >> 6),
    });
    // One byte says what happens, and eight where; the addresses are often near each other.
    let mut last = 0u64;
    for event in events.chunks_exact(9) {
        let mut word = [0; 8];
        word.copy_from_slice(&event[1..]);
        let word = u64::from_le_bytes(word);
        let ip = match event[0] >> 6 {
            0 => word,
            1 => last.wrapping_add(word & 0xff),
            2 => last & !0xffff | word & 0xffff,
            _ => last & !0xffff_ffff | word & 0xffff_ffff,
        };
        let exec = match (event[0] >> 4) & 3 {
            0 => ExecMode::Bits32,
            _ => ExecMode::Bits64,
        };
        teller.tell(match event[0] & 15 {
            0 => Event::Start,
            1 | 2 => Event::Enable(ip, exec),
            3..=5 => Event::Conditional(word & 1 != 0),
            6 => Event::Call(ip),
            7 => Event::Indirect(ip),
            8 => Event::IndirectCall(ip, last),
            9 => Event::Ret(ip),
            10 => Event::FarExit,
            11 => Event::FarTransfer(ip, exec),
            12 => Event::AsyncExit(ip),
            13 => Event::AsyncTransfer(last, ip),
            14 => Event::Sync(ip, exec),
            _ if word & 7 == 0 => Event::Overflow,
            _ => Event::Flush,
        });
        last = ip;
    }
    assert_eq!(teller.out.psbs.len(), teller.psbs.len());
});
