// SPDX-License-Identifier: GPL-2.0

//! How many bytes a trace takes, against the fewest that the format allows, and how far apart its
//! PSBs are.
//!
//! The model of the fewest is in [`fewest`](crate::fewest).

use crate::{
    events::{
        Fact,
        Packet,
        Teller, //
    },
    fewest::{
        fewest,
        tnt,
        Returns,
        Saying, //
    },
    flow::{
        blocks,
        choices,
        weather,
        Choices, //
    },
    program::{
        BlockSpec,
        End,
        Program,
        Weather, //
    },
    trace::Config,
};
use proptest::prelude::*;

/// The facts as the model wants them.
fn sayings(facts: &[Fact]) -> impl Iterator<Item = Saying> + '_ {
    let before = [None].into_iter().chain(facts.iter().map(Some));
    facts.iter().zip(before).map(|(&fact, before)| match fact {
        // Behind a FUP it is where something asynchronous went.
        Fact::Says(Packet::To(ip)) if !matches!(before, Some(Fact::Says(Packet::From(_)))) => {
            Saying::Far(ip)
        }
        Fact::Branch(_) => Saying::Branch,
        Fact::Called(return_ip) => Saying::Call(return_ip),
        Fact::IndirectTo(to) => Saying::Indirect(to),
        Fact::Returned(to) => Saying::Return(to),
        Fact::Flushed => Saying::Packet(0),
        Fact::Says(packet) => match packet {
            Packet::Psb => Saying::Psb,
            Packet::Lost => Saying::Overflow,
            Packet::Time(_) => Saying::Packet(8),
            Packet::Ratio(_) => Saying::Packet(4),
            Packet::Mode(_) | Packet::PsbEnd => Saying::Packet(2),
            Packet::Disabled => Saying::Packet(1),
            Packet::Enabled(ip) | Packet::PsbIp(ip) | Packet::To(ip) | Packet::From(ip) => {
                Saying::Ip(ip)
            }
            Packet::Tnt(..) => unreachable!("no event says this"),
        },
    })
}

/// The distances between the PSBs of a trace that was started once, up to its end.
fn distances(told: &Teller) -> Vec<usize> {
    let offsets = told.psbs.iter().map(|psb| psb.offset);
    let next = offsets.clone().skip(1).chain([told.out.bytes.len()]);
    offsets.zip(next).map(|(psb, next)| next - psb).collect()
}

/// Nothing asynchronous happens.
const FAIR: Weather = Weather {
    async_events: 0,
    odd_returns: 0,
    overflows: false,
};

const CONFIG: Config = Config {
    tsc: true,
    branch: true,
    ret_compression: true,
    psb_period: 2048,
};

/// All ways to put bits into short TNTs of up to 6 and long ones of up to 47.
#[test]
fn long_tnts_save_nothing() {
    let mut fewest = vec![0];
    for bits in 1..2000usize {
        let short = fewest[bits.saturating_sub(6)] + 1;
        let long = fewest[bits.saturating_sub(47)] + 8;
        fewest.push(short.min(long));
        assert_eq!(tnt(bits), fewest[bits]);
        assert!(short <= long);
    }
}

/// How often blocks end in which way.
type Ends = [(usize, fn(u16) -> End)];

/// A program with blocks that end like this.
fn mixture(ends: &Ends) -> Program {
    let numbers = Choices::new(1, 40_000).numbers();
    let ends: Vec<fn(u16) -> End> = ends
        .iter()
        .flat_map(|&(times, end)| vec![end; times])
        .collect();
    let blocks: Vec<BlockSpec> = numbers
        .chunks_exact(4)
        .map(|numbers| BlockSpec {
            // Most of a program's code is near to the rest of it.
            section: if numbers[0] % 8 == 0 { 1 } else { 0 },
            body: numbers[1].to_le_bytes()[..numbers[1] as usize % 4].to_vec(),
            end: ends[numbers[2] as usize % ends.len()](numbers[3] as u16),
        })
        .collect();
    Program::new(&blocks)
}

/// On mixtures of branches as programs have them.
#[test]
fn close_to_the_fewest_bytes() {
    let mixtures: [(&str, &Ends); 4] = [
        (
            "sort",
            &[
                (60, End::Jcc),
                (20, End::JccShort),
                (10, End::Call),
                (10, |n| End::Ret(n as u8)),
                (1, |n| End::CallIndirect(n as u8)),
            ],
        ),
        (
            "interpreter",
            &[
                (40, End::Jcc),
                (20, |n| End::JmpIndirect(n as u8)),
                (5, End::Call),
                (5, |n| End::CallIndirect(n as u8)),
                (10, |n| End::Ret(n as u8)),
            ],
        ),
        (
            "dispatch",
            &[(10, End::Jcc), (30, |n| End::JmpIndirect(n as u8))],
        ),
        (
            "system calls",
            &[
                (40, End::Jcc),
                (10, End::Call),
                (10, |n| End::Ret(n as u8)),
                (4, |_| End::Syscall),
            ],
        ),
    ];
    for (name, ends) in mixtures {
        let program = mixture(ends);
        let run = program.run(CONFIG, FAIR, &Choices::new(2, 200_000).numbers());
        let bytes = run.told.out.bytes.len();
        let fewest = fewest(sayings(&run.told.facts), Returns::Sdm).total();
        let branches = run
            .told
            .facts
            .iter()
            .filter(|fact| matches!(fact, Fact::Branch(_) | Fact::Returned(_)))
            .count();
        println!(
            "{name}: {bytes} bytes, {:.2} % over the fewest, {:.2} per branch, {:.1} per 1000 instructions",
            (bytes as f64 / fewest as f64 - 1.0) * 100.0,
            bytes as f64 / branches as f64,
            bytes as f64 / run.steps.len() as f64 * 1000.0,
        );
        assert!(bytes >= fewest, "{name}: the model isn't the fewest");
        assert!(
            bytes * 100 <= fewest * 105,
            "{name}: {bytes}, fewest {fewest}"
        );
    }
}

/// A PSB comes within each period, and not much before its end.
#[test]
fn psbs_are_a_period_apart() {
    let program = mixture(&[
        (40, End::Jcc),
        (20, |n| End::JmpIndirect(n as u8)),
        (5, End::Call),
        (5, |n| End::Ret(n as u8)),
        (1, |_| End::Syscall),
    ]);
    let choices = Choices::new(3, 200_000).numbers();
    for psb in 0..6 {
        let psb_period = 2048 << psb;
        let run = program.run(
            Config {
                psb_period,
                ..CONFIG
            },
            FAIR,
            &choices,
        );
        let mut distances = distances(&run.told);
        let last = distances.pop();
        assert!(distances.len() > 2);
        let near = psb_period as usize - 128..=psb_period as usize;
        assert!(
            distances.iter().all(|distance| near.contains(distance)),
            "{distances:?}"
        );
        assert!(last <= Some(psb_period as usize));
    }
}

proptest! {
    /// On any program.
    #[test]
    fn never_far_from_the_fewest_bytes(
        blocks in blocks(),
        tsc in any::<bool>(),
        ret_compression in any::<bool>(),
        async_events in 0..8u8,
        choices in choices(),
    ) {
        let config = Config { tsc, ret_compression, ..CONFIG };
        let weather = Weather { async_events, ..FAIR };
        let run = Program::new(&blocks).run(config, weather, &choices.numbers());
        let bytes = run.told.out.bytes.len();
        let returns = if ret_compression { Returns::Agreed } else { Returns::None };
        let fewest = fewest(sayings(&run.told.facts), returns).total();
        prop_assert!(bytes >= fewest, "{bytes}, fewest {fewest}");
        prop_assert!(bytes * 100 <= fewest * 105, "{bytes}, fewest {fewest}");
    }

    /// A PSB comes within each period, whatever happens.
    #[test]
    fn psbs_are_within_a_period(
        blocks in blocks(),
        psb in 0..3u32,
        weather in weather(),
        choices in choices(),
    ) {
        let psb_period = 512 << psb;
        let config = Config { psb_period, ..CONFIG };
        let run = Program::new(&blocks).run(config, weather, &choices.numbers());
        for distance in distances(&run.told) {
            prop_assert!(distance as u64 <= psb_period);
        }
    }
}
