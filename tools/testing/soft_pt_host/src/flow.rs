// SPDX-License-Identifier: GPL-2.0

//! Flow decoders follow a run exactly, from any PSB on.

use crate::{
    follow::follow,
    program::{
        BlockSpec,
        End,
        Program,
        Weather, //
    },
    trace::Config,
};
use proptest::prelude::*;

pub(crate) fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        6 => any::<u16>().prop_map(End::Jcc),
        4 => any::<u16>().prop_map(End::JccShort),
        2 => any::<u16>().prop_map(End::Jmp),
        2 => any::<u8>().prop_map(End::JmpIndirect),
        4 => any::<u16>().prop_map(End::Call),
        1 => Just(End::CallNext),
        2 => any::<u8>().prop_map(End::CallIndirect),
        5 => any::<u8>().prop_map(End::Ret),
        1 => Just(End::Syscall),
        1 => Just(End::Int),
        1 => Just(End::Iret),
    ]
}

pub(crate) fn blocks() -> impl Strategy<Value = Vec<BlockSpec>> {
    prop::collection::vec(
        (any::<u8>(), prop::collection::vec(any::<u8>(), 0..4), end())
            .prop_map(|(section, body, end)| BlockSpec { section, body, end }),
        1..200,
    )
}

pub(crate) fn config() -> impl Strategy<Value = Config> {
    (any::<bool>(), any::<bool>(), 0..4u32).prop_map(|(tsc, ret_compression, psb)| Config {
        tsc,
        branch: true,
        ret_compression,
        // The module's periods begin at 2 KiB. Shorter ones put a PSB next to more events.
        psb_period: 256 << psb,
    })
}

pub(crate) fn weather() -> impl Strategy<Value = Weather> {
    (0..24u8, 0..48u8, any::<bool>()).prop_map(|(async_events, odd_returns, overflows)| Weather {
        async_events,
        odd_returns,
        overflows,
    })
}

/// A run's choices, so many blocks long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choices {
    seed: u64,
    blocks: usize,
}

impl Choices {
    pub(crate) fn new(seed: u64, blocks: usize) -> Self {
        Self { seed, blocks }
    }

    /// Steele et al., "Fast Splittable Pseudorandom Number Generators" (SplitMix).
    pub(crate) fn numbers(self) -> Vec<u32> {
        let mut state = self.seed;
        let mut number = || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = state;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z >> 32) as u32
        };
        (0..self.blocks).map(|_| number()).collect()
    }
}

pub(crate) fn choices() -> impl Strategy<Value = Choices> {
    (any::<u64>(), 0..2000usize).prop_map(|(seed, blocks)| Choices::new(seed, blocks))
}

proptest! {
    /// From every PSB of a trace.
    #[test]
    fn from_any_psb(
        blocks in blocks(),
        config in config(),
        weather in weather(),
        choices in choices(),
    ) {
        let program = Program::new(&blocks);
        let run = program.run(config, weather, &choices.numbers());
        prop_assert_eq!(run.told.psbs[0].offset, 0);
        for psb in &run.told.psbs {
            let followed = follow(&program, &run, &run.told.out.bytes[psb.offset..], psb.offset);
            prop_assert_eq!(followed, Ok(()));
        }
    }

    /// From what is left in a ring of any size, in which new bytes took the place of old ones.
    #[test]
    fn from_a_ring(
        blocks in blocks(),
        config in config(),
        weather in weather(),
        choices in choices(),
        size in 64..8192usize,
    ) {
        let program = Program::new(&blocks);
        let run = program.run(config, weather, &choices.numbers());
        let cut = run.told.out.bytes.len().saturating_sub(size);
        prop_assert_eq!(follow(&program, &run, &run.told.out.bytes[cut..], cut), Ok(()));
    }
}
