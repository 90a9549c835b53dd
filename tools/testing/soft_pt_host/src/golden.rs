// SPDX-License-Identifier: GPL-2.0

//! The bytes of each packet and of each event, written down by hand.
//!
//! The packets are those of the kernel's own test of a decoder (`tools/perf/arch/x86/tests/
//! intel-pt-test.c`) that this encoder makes, from the other side.

use crate::{
    events::Recorder,
    packet::{
        self,
        ExecMode,
        IpPacket, //
    },
    trace::{
        Clock,
        Config,
        Trace,
        MAX_EVENT, //
    },
};

const PSB: [u8; 16] = [
    0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82,
];
const TSC: [u8; 8] = [0x19, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23];
const CBR: [u8; 4] = [0x02, 0x03, 0x20, 0x00];
const PSBEND: [u8; 2] = [0x02, 0x23];
const MODE64: [u8; 2] = [0x99, 0x01];
const MODE32: [u8; 2] = [0x99, 0x02];
const PGD: [u8; 1] = [0x01];

const CLOCK: Clock = Clock {
    tsc: 0x0123_4567_89ab_cdef,
    cbr: 0x20,
};

const CONFIG: Config = Config {
    tsc: true,
    branch: true,
    ret_compression: true,
    psb_period: 2048,
};

/// The bytes that `write` puts out, which must be as many as it says.
fn packet(write: impl Fn(&mut Recorder) -> usize) -> Vec<u8> {
    let mut out = Recorder::default();
    let len = write(&mut out);
    assert_eq!(len, out.bytes.len());
    out.bytes
}

#[test]
fn psb() {
    assert_eq!(packet(packet::psb), PSB);
}

#[test]
fn psbend() {
    assert_eq!(packet(packet::psbend), PSBEND);
}

#[test]
fn tsc() {
    assert_eq!(
        packet(|out| packet::tsc(out, 0)),
        [0x19, 0, 0, 0, 0, 0, 0, 0]
    );
    assert_eq!(
        packet(|out| packet::tsc(out, 0xff07_0605_0403_0201)),
        [0x19, 1, 2, 3, 4, 5, 6, 7]
    );
}

#[test]
fn cbr() {
    assert_eq!(
        packet(|out| packet::cbr(out, 0x12)),
        [0x02, 0x03, 0x12, 0x00]
    );
}

#[test]
fn mode_exec() {
    assert_eq!(
        packet(|out| packet::mode_exec(out, ExecMode::Bits16)),
        [0x99, 0x00]
    );
    assert_eq!(
        packet(|out| packet::mode_exec(out, ExecMode::Bits64)),
        [0x99, 0x01]
    );
    assert_eq!(
        packet(|out| packet::mode_exec(out, ExecMode::Bits32)),
        [0x99, 0x02]
    );
}

#[test]
fn trace_stop() {
    assert_eq!(packet(packet::trace_stop), [0x02, 0x83]);
}

#[test]
fn ovf() {
    assert_eq!(packet(packet::ovf), [0x02, 0xf3]);
}

#[test]
fn tnt() {
    assert_eq!(packet(|out| packet::tnt(out, 0b10)), [0x04]);
    assert_eq!(packet(|out| packet::tnt(out, 0b11)), [0x06]);
    assert_eq!(packet(|out| packet::tnt(out, 0b100_0000)), [0x80]);
    assert_eq!(packet(|out| packet::tnt(out, 0b111_1111)), [0xfe]);
    assert_eq!(packet(|out| packet::tnt(out, 0b101_1010)), [0xb4]);
}

/// Every form of every packet with an IP.
#[test]
fn ip() {
    let opcodes = [
        (IpPacket::Tip, 0x0d),
        (IpPacket::TipPge, 0x11),
        (IpPacket::TipPgd, 0x01),
        (IpPacket::Fup, 0x1d),
    ];
    for (kind, opcode) in opcodes {
        let ip = |ip, last| packet(|out| packet::ip(out, kind, ip, last));

        assert_eq!(packet(|out| packet::ip_suppressed(out, kind)), [opcode]);
        // IPBytes 001b: the low 16 bits.
        assert_eq!(ip(0x0201, Some(0)), [opcode | 0x20, 1, 2]);
        assert_eq!(
            ip(0x7f12_3456_0201, Some(0x7f12_3456_ffff)),
            [opcode | 0x20, 1, 2]
        );
        // The same address again needs them too.
        assert_eq!(
            ip(0x7f12_3456_0201, Some(0x7f12_3456_0201)),
            [opcode | 0x20, 1, 2]
        );
        // IPBytes 010b: the low 32 bits.
        assert_eq!(ip(0x0403_0201, Some(0)), [opcode | 0x40, 1, 2, 3, 4]);
        assert_eq!(
            ip(0x7f12_0403_0201, Some(0x7f12_0503_0201)),
            [opcode | 0x40, 1, 2, 3, 4]
        );
        // IPBytes 011b: the low 48 bits, sign-extended.
        assert_eq!(
            ip(0x0605_0403_0201, Some(0)),
            [opcode | 0x60, 1, 2, 3, 4, 5, 6]
        );
        assert_eq!(
            ip(0xffff_8605_0403_0201, Some(0)),
            [opcode | 0x60, 1, 2, 3, 4, 5, 0x86]
        );
        assert_eq!(ip(0x0201, None), [opcode | 0x60, 1, 2, 0, 0, 0, 0]);
        // IPBytes 100b: the low 48 bits.
        assert_eq!(
            ip(0x0007_0605_0403_0201, Some(0x0007_0000_0000_0000)),
            [opcode | 0x80, 1, 2, 3, 4, 5, 6]
        );
        assert_eq!(
            ip(0x8605_0403_0201, Some(0x1000)),
            [opcode | 0x80, 1, 2, 3, 4, 5, 0x86]
        );
        // IPBytes 110b: all.
        assert_eq!(
            ip(0x0807_0605_0403_0201, Some(0)),
            [opcode | 0xc0, 1, 2, 3, 4, 5, 6, 7, 8]
        );
        assert_eq!(
            ip(0x0807_0605_0403_0201, None),
            [opcode | 0xc0, 1, 2, 3, 4, 5, 6, 7, 8]
        );
    }
}

/// A trace and its output, for one event after the other.
struct Unit {
    trace: Trace,
    out: Recorder,
}

impl Unit {
    fn new(config: Config) -> Self {
        let mut unit = Self {
            trace: Trace::new(),
            out: Recorder::default(),
        };
        unit.trace.configure(config);
        unit
    }

    /// A unit that is in the middle of a trace; the last IP is 0x401000.
    fn tracing(config: Config) -> Self {
        let mut unit = Self::new(config);
        unit.expect(&[&[]], |trace, out| {
            trace.start(out, CLOCK);
            trace.enable(out, 0x40_1000, CLOCK, ExecMode::Bits64);
            out.bytes.clear();
        });
        assert!(unit.trace.context_on());
        unit
    }

    /// Lets something happen, which must put out these packets.
    #[track_caller]
    fn expect(&mut self, packets: &[&[u8]], event: impl FnOnce(&mut Trace, &mut Recorder)) {
        self.out.bytes.clear();
        event(&mut self.trace, &mut self.out);
        assert_eq!(
            format!("{:02x?}", self.out.bytes),
            format!("{:02x?}", packets.concat())
        );
    }

    #[track_caller]
    fn nothing(&mut self, event: impl FnOnce(&mut Trace, &mut Recorder)) {
        self.expect(&[], event);
    }
}

#[test]
fn begins_with_psb_and_time() {
    let mut unit = Unit::new(CONFIG);
    unit.expect(&[&PSB, &TSC, &CBR, &PSBEND], |t, out| t.start(out, CLOCK));
    assert!(!unit.trace.context_on());
    // Compressed against the zero that a PSB makes Last IP.
    unit.expect(
        &[&TSC, &MODE64, &[0x51, 0x00, 0x10, 0x40, 0x00]],
        |t, out| t.enable(out, 0x40_1000, CLOCK, ExecMode::Bits64),
    );
    assert!(unit.trace.context_on());
}

#[test]
fn leaves_out_what_is_not_asked_for() {
    let mut unit = Unit::new(Config {
        tsc: false,
        ..CONFIG
    });
    let clock = Clock { tsc: 1, cbr: 0 };
    unit.expect(&[&PSB, &PSBEND], |t, out| t.start(out, clock));
    unit.expect(&[&MODE64, &[0x31, 0x00, 0x10]], |t, out| {
        t.enable(out, 0x1000, clock, ExecMode::Bits64);
    });
}

#[test]
fn says_nothing_before_it_is_enabled() {
    let mut unit = Unit::new(CONFIG);
    unit.trace.start(&mut unit.out, CLOCK);
    unit.nothing(|t, out| {
        t.conditional(out, true);
        t.call(0x1000);
        t.indirect(out, 0x1000);
        t.indirect_call(out, 0x1000, 0x2000);
        t.ret(out, 0x1000);
        t.far_exit(out);
        t.far_transfer(out, 0x1000, ExecMode::Bits32);
        t.async_exit(out, 0x1000);
        t.async_transfer(out, 0x1000, 0x2000);
        t.leave(out, Some(0x1000));
        t.leave(out, None);
        t.leave_by_return(out, 0x1000);
        t.async_leave(out, 0x1000, 0x2000);
        t.flush(out);
        t.sync(out, 0x1000, CLOCK, ExecMode::Bits64);
    });
    assert!(!unit.trace.sync_due());
}

#[test]
fn a_second_enable_says_nothing() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| t.enable(out, 0x40_2000, CLOCK, ExecMode::Bits32));
}

#[test]
fn six_branches_to_a_packet() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| {
        for taken in [true, false, true, true, false] {
            t.conditional(out, taken);
        }
    });
    unit.expect(&[&[0b1101_1010]], |t, out| t.conditional(out, true));
    unit.nothing(|t, out| t.flush(out));
    unit.nothing(|t, out| t.conditional(out, false));
    unit.expect(&[&[0b0000_0100]], |t, out| t.flush(out));
    unit.nothing(|t, out| t.flush(out));
}

#[test]
fn an_indirect_branch_with_nothing_before_it_goes_out() {
    let mut unit = Unit::tracing(CONFIG);
    unit.expect(&[&[0x2d, 0x34, 0x12]], |t, out| t.indirect(out, 0x40_1234));
    unit.expect(&[&[0x4d, 0x78, 0x56, 0x34, 0x12]], |t, out| {
        t.indirect_call(out, 0x1234_5678, 0x40_1239);
    });
}

#[test]
fn tips_are_deferred_until_the_tnt_is_full() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| {
        t.conditional(out, true);
        t.indirect(out, 0x40_2000);
        t.conditional(out, false);
        t.conditional(out, true);
        t.indirect_call(out, 0x50_3000, 0x40_2002);
        t.conditional(out, true);
        t.conditional(out, true);
    });
    unit.expect(
        &[
            &[0b1101_1110],
            &[0x2d, 0x00, 0x20],
            &[0x4d, 0x00, 0x30, 0x50, 0x00],
        ],
        // The return belongs to the call.
        |t, out| t.ret(out, 0x40_2002),
    );
}

#[test]
fn no_more_than_eight_tips_are_deferred() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| {
        t.conditional(out, true);
        for to in 1..=8 {
            t.indirect(out, 0x40_1000 + to);
        }
    });
    let deferred: Vec<[u8; 3]> = (1..=8).map(|to| [0x2d, to, 0x10]).collect();
    unit.expect(
        &[&[0x06], deferred.concat().as_slice(), &[0x2d, 0x09, 0x10]],
        |t, out| t.indirect(out, 0x40_1009),
    );
}

#[test]
fn a_return_that_is_not_compressed_defers_nothing() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| {
        t.conditional(out, true);
        t.indirect(out, 0x40_2000);
    });
    unit.expect(
        &[&[0x06], &[0x2d, 0x00, 0x20], &[0x2d, 0x00, 0x30]],
        |t, out| t.ret(out, 0x40_3000),
    );
}

#[test]
fn returns() {
    let mut unit = Unit::tracing(CONFIG);
    // Compressed, innermost first.
    unit.nothing(|t, out| {
        t.call(0x40_1005);
        t.call(0x40_1105);
        t.ret(out, 0x40_1105);
        t.ret(out, 0x40_1005);
    });
    unit.expect(&[&[0b0000_1110]], |t, out| t.flush(out));
    // There is no call left.
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));
    // Another return address: nothing below is trusted any more.
    unit.expect(&[&[0x2d, 0x06, 0x11]], |t, out| {
        t.call(0x40_1005);
        t.call(0x40_1105);
        t.ret(out, 0x40_1106);
    });
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));
}

#[test]
fn the_return_stack_holds_the_youngest_64_calls() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, _| (0..100).for_each(|call| t.call(0x40_1000 + call)));
    unit.expect(&[&[0xfe; 10], &[0x3e]], |t, out| {
        (36..100)
            .rev()
            .for_each(|call| t.ret(out, 0x40_1000 + call));
        t.flush(out);
    });
    unit.expect(&[&[0x2d, 35, 0x10]], |t, out| t.ret(out, 0x40_1000 + 35));
}

#[test]
fn returns_without_compression() {
    let mut unit = Unit::tracing(Config {
        ret_compression: false,
        ..CONFIG
    });
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| {
        t.call(0x40_1005);
        t.ret(out, 0x40_1005);
    });
}

#[test]
fn a_psb_ends_what_is_compressed() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| {
        t.call(0x40_1005);
        t.conditional(out, true);
        t.indirect(out, 0x40_2000);
    });
    let fup = [0x7d, 0x00, 0x20, 0x40, 0x00, 0x00, 0x00];
    unit.expect(
        &[
            &[0x06],
            &[0x2d, 0x00, 0x20],
            &PSB,
            &TSC,
            &CBR,
            &MODE64,
            &fup,
            &PSBEND,
        ],
        |t, out| t.sync(out, 0x40_2000, CLOCK, ExecMode::Bits64),
    );
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));
}

#[test]
fn system_calls() {
    let mut unit = Unit::tracing(CONFIG);
    unit.expect(&[&[0x04], &PGD], |t, out| {
        t.call(0x40_1005);
        t.conditional(out, false);
        t.far_exit(out);
    });
    assert!(!unit.trace.context_on());
    // The mode is known, and so is the upper half of the IP.
    unit.expect(&[&TSC, &[0x31, 0x02, 0x10]], |t, out| {
        t.enable(out, 0x40_1002, CLOCK, ExecMode::Bits64);
    });
    // So is the call.
    unit.nothing(|t, out| t.ret(out, 0x40_1005));
}

#[test]
fn far_transfers() {
    let mut unit = Unit::tracing(CONFIG);
    unit.expect(&[&[0x06], &[0x2d, 0x00, 0x20]], |t, out| {
        t.conditional(out, true);
        t.far_transfer(out, 0x40_2000, ExecMode::Bits64);
    });
    unit.expect(&[&MODE32, &[0x2d, 0x00, 0x30]], |t, out| {
        t.far_transfer(out, 0x40_3000, ExecMode::Bits32);
    });
    unit.expect(&[&[0x01], &TSC, &MODE64, &[0x31, 0x00, 0x40]], |t, out| {
        t.far_exit(out);
        t.enable(out, 0x40_4000, CLOCK, ExecMode::Bits64);
    });
}

/// perf takes a far return for one of a near call, libipt does not.
#[test]
fn no_compressed_return_behind_a_far_transfer() {
    let mut unit = Unit::tracing(CONFIG);
    unit.expect(
        &[&[0x2d, 0x00, 0x20], &[0x2d, 0x05, 0x10], &[0x06]],
        |t, out| {
            t.call(0x40_1005);
            t.far_transfer(out, 0x40_2000, ExecMode::Bits64);
            t.ret(out, 0x40_1005);
            t.call(0x40_1015);
            t.ret(out, 0x40_1015);
            t.flush(out);
        },
    );
}

#[test]
fn asynchronous_events() {
    let mut unit = Unit::tracing(CONFIG);
    unit.expect(
        &[&[0x06], &[0x3d, 0x00, 0x20], &[0x2d, 0x00, 0x30]],
        |t, out| {
            t.conditional(out, true);
            t.async_transfer(out, 0x40_2000, 0x40_3000);
        },
    );
    unit.expect(
        &[&[0x04], &[0x2d, 0x05, 0x30], &[0x3d, 0x00, 0x40], &PGD],
        |t, out| {
            t.conditional(out, false);
            t.indirect(out, 0x40_3005);
            t.async_exit(out, 0x40_4000);
        },
    );
    assert!(!unit.trace.context_on());
}

#[test]
fn an_overflow_ends_what_is_compressed() {
    let mut unit = Unit::tracing(CONFIG);
    unit.expect(&[&[0x02, 0xf3]], |t, out| {
        t.call(0x40_1005);
        t.conditional(out, true);
        t.indirect(out, 0x40_2000);
        t.overflow(out);
    });
    assert!(!unit.trace.context_on());
    unit.expect(
        &[&TSC, &MODE64, &[0x71, 0x00, 0x20, 0x40, 0x00, 0x00, 0x00]],
        |t, out| t.enable(out, 0x40_2000, CLOCK, ExecMode::Bits64),
    );
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));
}

#[test]
fn without_branches_there_is_only_time() {
    let mut unit = Unit::new(Config {
        branch: false,
        ..CONFIG
    });
    unit.expect(&[&PSB, &TSC, &CBR, &PSBEND], |t, out| t.start(out, CLOCK));
    unit.expect(&[&TSC], |t, out| {
        t.enable(out, 0x40_1000, CLOCK, ExecMode::Bits64);
    });
    unit.nothing(|t, out| {
        (0..6).for_each(|_| t.conditional(out, true));
        t.call(0x40_1005);
        t.indirect_call(out, 0x40_2000, 0x40_1007);
        t.indirect(out, 0x40_3000);
        t.ret(out, 0x40_1007);
        t.far_transfer(out, 0x40_1000, ExecMode::Bits32);
        t.async_transfer(out, 0x40_1000, 0x40_2000);
        t.flush(out);
    });
    unit.expect(&[&PSB, &TSC, &CBR, &PSBEND], |t, out| {
        t.sync(out, 0x40_1000, CLOCK, ExecMode::Bits64);
    });
    unit.nothing(|t, out| t.far_exit(out));
    unit.expect(&[&TSC], |t, out| {
        t.enable(out, 0x40_1000, CLOCK, ExecMode::Bits64);
    });
    unit.nothing(|t, out| t.async_exit(out, 0x40_1000));
}

#[test]
fn configure_forgets_everything() {
    let mut unit = Unit::tracing(CONFIG);
    unit.trace.call(0x40_1005);
    unit.trace.conditional(&mut unit.out, true);
    unit.trace.indirect(&mut unit.out, 0x40_2000);
    unit.trace.configure(CONFIG);
    assert!(!unit.trace.context_on());
    unit.nothing(|t, out| t.flush(out));
    unit.expect(&[&PSB, &TSC, &CBR, &PSBEND], |t, out| t.start(out, CLOCK));
    unit.expect(
        &[&TSC, &MODE64, &[0x51, 0x00, 0x10, 0x40, 0x00]],
        |t, out| t.enable(out, 0x40_1000, CLOCK, ExecMode::Bits64),
    );
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));
}

/// A PSB that is due when the flow begins again comes without an IP of its own: libipt takes no FUP
/// in a PSB+ that a TIP.PGE follows.
#[test]
fn a_due_psb_comes_with_enable() {
    let mut unit = Unit::tracing(Config {
        psb_period: 64,
        ..CONFIG
    });
    assert!(unit.trace.sync_due());
    unit.trace.far_exit(&mut unit.out);
    assert!(!unit.trace.sync_due());
    unit.expect(
        &[
            &PSB,
            &TSC,
            &CBR,
            &PSBEND,
            &MODE64,
            &[0x51, 0x00, 0x20, 0x40, 0x00],
        ],
        |t, out| t.enable(out, 0x40_2000, CLOCK, ExecMode::Bits64),
    );
}

/// The event that puts out most.
#[test]
fn max_event() {
    let mut unit = Unit::tracing(CONFIG);
    unit.trace.conditional(&mut unit.out, true);
    for at in 1..=8u64 {
        // Only the full form says these.
        unit.trace.indirect(&mut unit.out, at << 56);
    }
    unit.out.bytes.clear();
    unit.trace
        .sync(&mut unit.out, 1 << 55, CLOCK, ExecMode::Bits64);
    assert_eq!(unit.out.bytes.len(), MAX_EVENT);
}

/// What leaves the addresses that are traced says where to, unless the code tells; what was held
/// back comes first, and the flow may come back at once.
#[test]
fn leaves_for_what_is_not_traced() {
    let mut unit = Unit::tracing(CONFIG);
    unit.nothing(|t, out| t.conditional(out, true));
    unit.expect(&[&[0b110], &[0x21, 0x00, 0x20]], |t, out| {
        t.leave(out, Some(0x40_2000));
    });
    assert!(!unit.trace.context_on());
    unit.expect(&[&TSC, &[0x31, 0x08, 0x10]], |t, out| {
        t.enable(out, 0x40_1008, CLOCK, ExecMode::Bits64);
    });
    unit.expect(&[&PGD], |t, out| t.leave(out, None));
    unit.expect(&[&TSC, &[0x31, 0x10, 0x10]], |t, out| {
        t.enable(out, 0x40_1010, CLOCK, ExecMode::Bits64);
    });
    unit.expect(&[&[0x3d, 0x18, 0x10], &[0x21, 0x00, 0x30]], |t, out| {
        t.async_leave(out, 0x40_1018, 0x40_3000);
    });
    unit.expect(&[&[0x02, 0x83]], |t, out| t.stop(out));
    assert!(!unit.trace.context_on());
}

/// A return that leaves makes the next ones plain: decoders don't agree on what is on their stacks
/// then. A call that leaves doesn't.
#[test]
fn leaves_by_call_and_return() {
    let mut unit = Unit::tracing(CONFIG);
    let back = |unit: &mut Unit, ip| {
        unit.trace
            .enable(&mut unit.out, ip, CLOCK, ExecMode::Bits64);
    };
    unit.nothing(|t, _| t.call(0x40_1005));
    unit.expect(&[&[0x21, 0x00, 0x20]], |t, out| {
        t.call(0x40_1105);
        t.leave(out, Some(0x40_2000));
    });
    // The callee's return isn't traced; that of the caller finds the callee's entry on top.
    back(&mut unit, 0x40_1105);
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));

    unit.nothing(|t, _| t.call(0x40_1005));
    unit.nothing(|t, _| t.call(0x40_1205));
    unit.expect(&[&[0x21, 0x00, 0x30]], |t, out| {
        t.leave_by_return(out, 0x40_3000);
    });
    back(&mut unit, 0x40_1205);
    unit.expect(&[&[0x2d, 0x05, 0x10]], |t, out| t.ret(out, 0x40_1005));
}
