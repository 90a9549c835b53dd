// SPDX-License-Identifier: GPL-2.0

//! The input is a program, the weather and the ways its branches go; flow decoders have to follow
//! the run from every PSB on.
//!
//! `tools/testing/soft_pt_host/fuzz/run 60 flow` runs it. As in the tests, `KERNEL_SRC`
//! adds perf's decoder.

#![no_main]
#![expect(dead_code, reason = "the tests use more of the shared files")]

#[path = "../../src/events.rs"]
mod events;
#[path = "../../src/follow.rs"]
mod follow;
#[path = "../../src/libipt.rs"]
mod libipt;
#[path = "../../../../../samples/rust/soft_pt/packet.rs"]
mod packet;
#[cfg(perf_decoder)]
#[path = "../../src/perf.rs"]
mod perf;
#[path = "../../src/program.rs"]
mod program;
#[path = "../../../../../samples/rust/soft_pt/trace.rs"]
mod trace;

use follow::follow;
use libfuzzer_sys::fuzz_target;
use program::{
    BlockSpec,
    End,
    Program,
    Weather, //
};
use trace::Config;

/// Takes numbers from the input, and zeros after its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&byte, rest)) => {
                self.0 = rest;
                byte
            }
            None => 0,
        }
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn block(&mut self) -> BlockSpec {
        let section = self.byte();
        let body = (0..section >> 6).map(|_| self.byte()).collect();
        let end = match self.byte() % 11 {
            0 => End::Jcc(self.word()),
            1 => End::JccShort(self.word()),
            2 => End::Jmp(self.word()),
            3 => End::JmpIndirect(self.byte()),
            4 => End::Call(self.word()),
            5 => End::CallNext,
            6 => End::CallIndirect(self.byte()),
            7 => End::Ret(self.byte()),
            8 => End::Syscall,
            9 => End::Int,
            _ => End::Iret,
        };
        BlockSpec { section, body, end }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let flags = input.byte();
    let config = Config {
        tsc: flags & 1 != 0,
        branch: true,
        ret_compression: flags & 2 != 0,
        psb_period: 256 << (flags >> 6),
    };
    let weather = Weather {
        async_events: input.byte(),
        odd_returns: input.byte(),
        overflows: flags & 4 != 0,
    };
    let blocks: Vec<BlockSpec> = (0..=input.byte()).map(|_| input.block()).collect();
    let choices: Vec<u32> = input
        .0
        .chunks_exact(4)
        .map(|bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        .collect();

    let program = Program::new(&blocks);
    let run = program.run(config, weather, &choices);
    for psb in &run.told.psbs {
        if let Err(error) = follow(
            &program,
            &run,
            &run.told.out.bytes[psb.offset..],
            psb.offset,
        ) {
            panic!("{error}");
        }
    }
});
