// SPDX-License-Identifier: GPL-2.0

//! The fewest bytes in which the format can say what a trace has to say.
//!
//! The model is told what happened, with the packets that somebody else decided on: when there is a
//! PSB+ and what is in it, a time stamp, the begin and the end of the flow. These count as they
//! are, with the shortest IP. What is left to choose is how to write the branches between, and
//! there the model is free: it defers any number of TIPs, so that each TNT but the last before one
//! of those packets is full, and compresses every return that can be read back.
//!
//! This file knows nothing of the encoder. The selftest of the real thing is built with it too.

use std::collections::VecDeque;

/// Something that a trace has to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Saying {
    /// Which way a conditional branch went.
    Branch,
    /// Nothing by itself: a near call that returns to this address.
    Call(u64),
    /// Where an indirect jump or call went.
    Indirect(u64),
    /// Where a near return went.
    Return(u64),
    /// A PSB.
    Psb,
    /// An OVF.
    Overflow,
    /// A packet of so many bytes. Of none, it says that all so far has to be there now.
    Packet(usize),
    /// A packet with this address.
    Ip(u64),
    /// The same of a far branch, at which decoders' return stacks part.
    Far(u64),
}

/// Which returns can be read back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Returns {
    /// None.
    None,
    /// Those that the SDM allows to compress.
    Sdm,
    /// Those of them that perf and libipt read alike: an uncompressed return empties the stack.
    Agreed,
}

/// The fewest bytes of TNTs that hold so many bits.
///
/// A short TNT holds up to 6 bits in one byte, a long one up to 47 in eight. In place of any long
/// one, eight short ones hold 48. So the fewest are short ones, all but the last full.
pub(crate) fn tnt(bits: usize) -> usize {
    bits.div_ceil(6)
}

/// The fewest bytes of a packet with this IP.
pub(crate) fn ip(ip: u64, last: Option<u64>) -> usize {
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

/// Bytes by what they are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bytes {
    /// TNTs.
    pub(crate) tnt: usize,
    /// TIPs of indirect branches and returns.
    pub(crate) tip: usize,
    /// All other packets.
    pub(crate) other: usize,
}

impl Bytes {
    /// The sum.
    pub(crate) fn total(&self) -> usize {
        self.tnt + self.tip + self.other
    }
}

/// The fewest bytes that say all this.
pub(crate) fn fewest(sayings: impl IntoIterator<Item = Saying>, returns: Returns) -> Bytes {
    let mut bytes = Bytes::default();
    let mut bits = 0;
    let mut last_ip = None;
    let mut calls = VecDeque::new();
    let with_ip = |to: u64, last_ip: &mut Option<u64>| {
        let len = ip(to, *last_ip);
        *last_ip = Some(to);
        len
    };
    for saying in sayings {
        match saying {
            Saying::Branch => bits += 1,
            Saying::Call(return_ip) => {
                calls.push_back(return_ip);
                if calls.len() > 64 {
                    calls.pop_front();
                }
                continue;
            }
            Saying::Indirect(to) => bytes.tip += with_ip(to, &mut last_ip),
            Saying::Return(to) => {
                if calls.pop_back() == Some(to) && returns != Returns::None {
                    bits += 1;
                    continue;
                }
                if returns == Returns::Agreed {
                    calls.clear();
                }
                bytes.tnt += tnt(std::mem::take(&mut bits));
                bytes.tip += with_ip(to, &mut last_ip);
            }
            _ => {
                if matches!(saying, Saying::Far(_)) && returns == Returns::Agreed {
                    calls.clear();
                }
                bytes.tnt += tnt(std::mem::take(&mut bits));
            }
        }
        match saying {
            Saying::Psb => {
                bytes.other += 16;
                last_ip = Some(0);
                calls.clear();
            }
            Saying::Overflow => {
                bytes.other += 2;
                last_ip = None;
                calls.clear();
            }
            Saying::Packet(len) => bytes.other += len,
            Saying::Far(to) | Saying::Ip(to) => bytes.other += with_ip(to, &mut last_ip),
            _ => {}
        }
    }
    bytes.tnt += tnt(bits);
    bytes
}
