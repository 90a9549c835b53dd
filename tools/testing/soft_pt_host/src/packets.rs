// SPDX-License-Identifier: GPL-2.0

//! An independent packet decoder reads back the events that went in.
//!
//! Here the events belong to no program: any event may follow any other, with any addresses.

use crate::{
    events::{
        Event,
        Fact,
        Packet,
        Teller, //
    },
    packet::ExecMode,
    trace::Config,
};
use iptr_decoder::{
    utils::reconstruct_ip_and_update_last,
    DecodeOptions,
    DecoderContext,
    HandlePacket,
    IpReconstructionPattern, //
};
use proptest::prelude::*;
use std::{
    collections::VecDeque,
    convert::Infallible,
    num::NonZero, //
};

/// Takes the packets apart.
#[derive(Default)]
struct Reader {
    packets: Vec<Packet>,
    last_ip: u64,
    in_psb: bool,
}

impl Reader {
    fn ip(&mut self, pattern: IpReconstructionPattern) -> Option<u64> {
        reconstruct_ip_and_update_last(&mut self.last_ip, pattern).then_some(self.last_ip)
    }

    fn known_ip(&mut self, pattern: IpReconstructionPattern) -> u64 {
        self.ip(pattern).expect("an IP")
    }
}

impl HandlePacket for Reader {
    type Error = Infallible;

    fn at_decode_begin(&mut self) -> Result<(), Infallible> {
        *self = Self::default();
        Ok(())
    }

    fn on_short_tnt_packet(
        &mut self,
        _context: &DecoderContext,
        byte: NonZero<u8>,
        highest_bit: u32,
    ) -> Result<(), Infallible> {
        assert!(!self.in_psb && highest_bit != 0);
        self.packets.push(Packet::Tnt(byte.get() >> 1, highest_bit));
        Ok(())
    }

    fn on_tip_packet(
        &mut self,
        _context: &DecoderContext,
        pattern: IpReconstructionPattern,
    ) -> Result<(), Infallible> {
        assert!(!self.in_psb);
        let to = self.known_ip(pattern);
        self.packets.push(Packet::To(to));
        Ok(())
    }

    fn on_tip_pgd_packet(
        &mut self,
        _context: &DecoderContext,
        pattern: IpReconstructionPattern,
    ) -> Result<(), Infallible> {
        assert!(!self.in_psb && self.ip(pattern).is_none());
        self.packets.push(Packet::Disabled);
        Ok(())
    }

    fn on_tip_pge_packet(
        &mut self,
        _context: &DecoderContext,
        pattern: IpReconstructionPattern,
    ) -> Result<(), Infallible> {
        assert!(!self.in_psb);
        let ip = self.known_ip(pattern);
        self.packets.push(Packet::Enabled(ip));
        Ok(())
    }

    fn on_fup_packet(
        &mut self,
        _context: &DecoderContext,
        pattern: IpReconstructionPattern,
    ) -> Result<(), Infallible> {
        let ip = self.known_ip(pattern);
        self.packets.push(if self.in_psb {
            Packet::PsbIp(ip)
        } else {
            Packet::From(ip)
        });
        Ok(())
    }

    fn on_mode_packet(
        &mut self,
        _context: &DecoderContext,
        leaf_id: u8,
        mode: u8,
    ) -> Result<(), Infallible> {
        assert_eq!(leaf_id, 0);
        self.packets.push(Packet::Mode(mode));
        Ok(())
    }

    fn on_tsc_packet(&mut self, _context: &DecoderContext, tsc: u64) -> Result<(), Infallible> {
        self.packets.push(Packet::Time(tsc));
        Ok(())
    }

    fn on_cbr_packet(&mut self, _context: &DecoderContext, ratio: u8) -> Result<(), Infallible> {
        assert!(self.in_psb);
        self.packets.push(Packet::Ratio(ratio));
        Ok(())
    }

    fn on_ovf_packet(&mut self, _context: &DecoderContext) -> Result<(), Infallible> {
        assert!(!self.in_psb);
        self.packets.push(Packet::Lost);
        // What Last IP is now depends on the decoder.
        self.last_ip = 0xdead_dead_dead_dead;
        Ok(())
    }

    fn on_psb_packet(&mut self, _context: &DecoderContext) -> Result<(), Infallible> {
        assert!(!self.in_psb);
        self.in_psb = true;
        self.last_ip = 0;
        self.packets.push(Packet::Psb);
        Ok(())
    }

    fn on_psbend_packet(&mut self, _context: &DecoderContext) -> Result<(), Infallible> {
        assert!(self.in_psb);
        self.in_psb = false;
        self.packets.push(Packet::PsbEnd);
        Ok(())
    }
}

/// The packets from offset `begin` on.
fn read(bytes: &[u8], begin: usize) -> VecDeque<Packet> {
    let mut reader = Reader::default();
    let mut options = DecodeOptions::default();
    options.sync(false);
    match iptr_decoder::decode(&bytes[begin..], options, &mut reader) {
        Ok(()) => reader.packets.into(),
        Err(error) => panic!("no packets: {error}"),
    }
}

/// A decoder that knows which kind of branch comes next, as one with the program does.
#[derive(Default)]
struct Follower {
    packets: VecDeque<Packet>,
    /// What is left of the TNT in progress.
    tnt: Vec<bool>,
    /// The calls as perf keeps them: any return takes one off.
    perf: Vec<u64>,
    /// The calls as libipt keeps them: only a compressed return takes one off, and a PSB none.
    libipt: VecDeque<u64>,
}

impl Follower {
    fn branch(&mut self) -> Option<bool> {
        if self.tnt.is_empty() {
            if let Some(&Packet::Tnt(bits, count)) = self.packets.front() {
                self.packets.pop_front();
                self.tnt = (0..count).map(|bit| (bits >> bit) & 1 != 0).collect();
            }
        }
        self.tnt.pop()
    }

    fn follow(&mut self, fact: Fact) -> Result<(), String> {
        match fact {
            Fact::Branch(taken) => match self.branch() {
                Some(found) if found == taken => Ok(()),
                found => Err(format!("found {found:?}, then {:x?}", self.packets.front())),
            },
            Fact::Called(return_ip) => {
                self.perf.push(return_ip);
                self.libipt.push_back(return_ip);
                if self.libipt.len() > 64 {
                    self.libipt.pop_front();
                }
                Ok(())
            }
            // With bits left in the TNT, it is a deferred TIP.
            Fact::IndirectTo(to) => self.says(Packet::To(to)),
            Fact::Flushed => Ok(()),
            Fact::Returned(to) => {
                let perf = self.perf.pop();
                match self.branch() {
                    Some(true) => {
                        let libipt = self.libipt.pop_back();
                        if perf == Some(to) && libipt == Some(to) {
                            Ok(())
                        } else {
                            Err(format!("perf goes to {perf:x?}, libipt to {libipt:x?}"))
                        }
                    }
                    Some(false) => Err("a return isn't taken".into()),
                    None => self.says(Packet::To(to)),
                }
            }
            Fact::Says(packet) => {
                if !self.tnt.is_empty() {
                    return Err(format!("{} bits left", self.tnt.len()));
                }
                if packet == Packet::Psb {
                    self.perf.clear();
                }
                self.says(packet)
            }
        }
    }

    fn says(&mut self, packet: Packet) -> Result<(), String> {
        match self.packets.pop_front() {
            Some(found) if found == packet => Ok(()),
            found => Err(format!("found {found:x?}")),
        }
    }

    /// Follows packets, which must say these facts and nothing else.
    fn follow_all(packets: VecDeque<Packet>, facts: &[Fact]) -> Result<(), String> {
        let mut follower = Self {
            packets,
            ..Self::default()
        };
        for (at, &fact) in facts.iter().enumerate() {
            follower
                .follow(fact)
                .map_err(|error| format!("fact {at}, {fact:x?}: {error}"))?;
        }
        match follower.packets.front() {
            None => Ok(()),
            Some(packet) => Err(format!("found {packet:x?} at the end")),
        }
    }
}

fn exec() -> impl Strategy<Value = ExecMode> {
    prop_oneof![
        4 => Just(ExecMode::Bits64),
        1 => Just(ExecMode::Bits32),
        1 => Just(ExecMode::Bits16),
    ]
}

/// Addresses near to each other and far from each other, in 64 bits.
fn ip() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..0x1_0000u64).prop_map(|low| 0x7f12_3456_0000 | low),
        2 => any::<u32>().prop_map(|low| 0x7f12_0000_0000 | u64::from(low)),
        2 => any::<u32>().prop_map(u64::from),
        1 => (0..1u64 << 48).prop_map(|low| low),
        1 => (0..1u64 << 47).prop_map(|low| low | 0xffff_8000_0000_0000),
        1 => (0..1u64 << 48).prop_map(|low| low | 0x00ab_0000_0000_0000),
        1 => any::<u64>(),
    ]
}

/// An event, which for a return depends on the calls before.
#[derive(Clone, Copy, Debug)]
enum Random {
    Event(Event),
    /// A return to the address at this depth of the calls, or to another one.
    Ret(usize, u64),
}

impl Random {
    fn event(self, calls: &mut Vec<u64>) -> Event {
        match self {
            Self::Event(event) => {
                if let Event::Call(return_ip) | Event::IndirectCall(_, return_ip) = event {
                    calls.push(return_ip);
                }
                event
            }
            Self::Ret(depth, other) => {
                let at = calls.len().checked_sub(depth + 1);
                let to = at.map_or(other, |at| calls[at]);
                calls.truncate(at.unwrap_or(0));
                Event::Ret(to)
            }
        }
    }
}

fn event() -> impl Strategy<Value = Random> {
    let event = prop_oneof![
        1 => Just(Event::Start),
        6 => (ip(), exec()).prop_map(|(ip, exec)| Event::Enable(ip, exec)),
        40 => any::<bool>().prop_map(Event::Conditional),
        16 => ip().prop_map(Event::Call),
        8 => ip().prop_map(Event::Indirect),
        4 => (ip(), ip()).prop_map(|(to, return_ip)| Event::IndirectCall(to, return_ip)),
        2 => Just(Event::FarExit),
        1 => (ip(), exec()).prop_map(|(to, exec)| Event::FarTransfer(to, exec)),
        1 => ip().prop_map(Event::AsyncExit),
        1 => (ip(), ip()).prop_map(|(from, to)| Event::AsyncTransfer(from, to)),
        1 => Just(Event::Flush),
        1 => (ip(), exec()).prop_map(|(ip, exec)| Event::Sync(ip, exec)),
        1 => Just(Event::Overflow),
    ];
    prop_oneof![
        80 => event.prop_map(Random::Event),
        20 => ip().prop_map(|other| Random::Ret(0, other)),
        1 => (0..80usize, ip()).prop_map(|(depth, other)| Random::Ret(depth, other)),
    ]
}

/// Also one event many times over, and what no mixture has: calls to any depth, and back.
fn events() -> impl Strategy<Value = Vec<Random>> {
    let some = prop_oneof![
        8 => event().prop_map(|event| vec![event]),
        1 => (event(), 1..100usize).prop_map(|(event, times)| vec![event; times]),
        1 => (ip(), 50..150u64).prop_map(|(ip, depth)| {
            let calls = (0..depth).map(|call| Event::Call(ip.wrapping_add(call * 5)));
            calls.map(Random::Event).collect()
        }),
        1 => (ip(), 50..150usize).prop_map(|(other, depth)| vec![Random::Ret(0, other); depth]),
    ];
    prop::collection::vec(some, 0..200).prop_map(|events| events.concat())
}

fn config() -> impl Strategy<Value = Config> {
    (
        any::<bool>(),
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.8),
        0..5u32,
    )
        .prop_map(|(tsc, branch, ret_compression, psb)| Config {
            tsc,
            branch,
            ret_compression,
            psb_period: 128 << psb,
        })
}

proptest! {
    /// The packets say what happened, no more and no less, from every PSB on.
    #[test]
    fn say_what_happened(config in config(), events in events()) {
        let mut teller = Teller::new(config);
        let mut calls = vec![];
        teller.tell(Event::Start);
        for random in events {
            let event = random.event(&mut calls);
            if matches!(event, Event::Overflow) {
                // What is held back would be lost, and not be read back.
                teller.tell(Event::Flush);
            }
            teller.tell(event);
            if teller.trace.sync_due() {
                teller.tell(Event::Sync(0x7f12_3456_789a, ExecMode::Bits64));
            }
        }
        teller.tell(Event::Flush);
        for psb in &teller.psbs {
            let packets = read(&teller.out.bytes, psb.offset);
            let followed = Follower::follow_all(packets, &teller.facts[psb.facts..]);
            prop_assert!(followed.is_ok(), "from {:#x}: {:?}", psb.offset, followed);
        }
    }
}
