// SPDX-License-Identifier: GPL-2.0

//! How many bytes a trace takes, against the fewest that the format allows, and how far apart its
//! PSBs are.
//!
//! The model of the fewest is told what happened and where the PSBs are. It may defer any number of
//! TIPs, use long TNTs, and compress every return that can be read back.

use crate::{
    events::{
        Fact,
        Packet,
        Teller, //
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
use std::collections::VecDeque;

/// The fewest bytes of TNTs that hold so many bits.
fn tnt(bits: usize) -> usize {
    let mut fewest = vec![0];
    for bits in 1..=bits {
        let short = fewest[bits.saturating_sub(6)] + 1;
        let long = fewest[bits.saturating_sub(47)] + 8;
        fewest.push(short.min(long));
    }
    fewest[bits]
}

/// The fewest bytes of a packet with this IP.
fn ip(ip: u64, last: Option<u64>) -> usize {
    let sign_extended = ((ip << 16) as i64 >> 16) as u64;
    let forms = [
        (
            3,
            last.is_some_and(|last| last & !0xffff | ip & 0xffff == ip),
        ),
        (
            5,
            last.is_some_and(|last| last & !0xffff_ffff | ip & 0xffff_ffff == ip),
        ),
        (7, sign_extended == ip),
        (7, last.is_some_and(|last| last >> 48 == ip >> 48)),
        (9, true),
    ];
    forms
        .into_iter()
        .filter_map(|(len, fits)| fits.then_some(len))
        .min()
        .expect("the last form always fits")
}

/// Which returns can be read back.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Returns {
    /// Those that the SDM allows to compress.
    Sdm,
    /// Those of them that perf and libipt read alike, see [`trace`](crate::trace).
    Agreed,
}

/// The fewest bytes that say all this.
fn fewest(config: Config, facts: &[Fact], returns: Returns) -> usize {
    let mut total = 0;
    let mut bits = 0;
    let mut last_ip = None;
    let mut calls = VecDeque::new();
    let with_ip = |to: u64, last_ip: &mut Option<u64>| {
        let len = ip(to, *last_ip);
        *last_ip = Some(to);
        len
    };
    for &fact in facts {
        match fact {
            Fact::Branch(_) => bits += 1,
            Fact::Called(return_ip) => {
                calls.push_back(return_ip);
                if calls.len() > 64 {
                    calls.pop_front();
                }
            }
            Fact::IndirectTo(to) => total += with_ip(to, &mut last_ip),
            Fact::Returned(to) => {
                if calls.pop_back() == Some(to) && config.ret_compression {
                    bits += 1;
                } else {
                    if returns == Returns::Agreed {
                        calls.clear();
                    }
                    total += tnt(std::mem::take(&mut bits));
                    total += with_ip(to, &mut last_ip);
                }
            }
            Fact::Flushed => total += tnt(std::mem::take(&mut bits)),
            Fact::Says(packet) => {
                total += tnt(std::mem::take(&mut bits));
                total += match packet {
                    Packet::Psb => {
                        last_ip = Some(0);
                        calls.clear();
                        16
                    }
                    Packet::Time(_) => 8,
                    Packet::Ratio(_) => 4,
                    Packet::Mode(_) | Packet::PsbEnd => 2,
                    Packet::Disabled => 1,
                    Packet::Lost => {
                        last_ip = None;
                        calls.clear();
                        2
                    }
                    Packet::Enabled(ip) | Packet::PsbIp(ip) | Packet::To(ip) | Packet::From(ip) => {
                        with_ip(ip, &mut last_ip)
                    }
                    Packet::Tnt(..) => unreachable!("no event says this"),
                };
            }
        }
    }
    total + tnt(bits)
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

#[test]
fn long_tnts_save_nothing() {
    for bits in 0..1000 {
        assert_eq!(tnt(bits), bits.div_ceil(6));
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
        let fewest = fewest(CONFIG, &run.told.facts, Returns::Sdm);
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
        let fewest = fewest(config, &run.told.facts, Returns::Agreed);
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
