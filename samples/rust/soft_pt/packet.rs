// SPDX-License-Identifier: GPL-2.0

//! Intel Processor Trace packets.
//!
//! Each function writes one packet to an [`Output`] and returns how many bytes it took. What a
//! packet means, and when it is due, is [`trace`](crate::trace)'s part.
//!
//! The format is that of the Intel SDM, volume 3, chapter "Intel Processor Trace", section
//! "Trace Packets and Data Types"; the doc line of each packet names its definition there. All
//! multi-byte fields are little endian.
//!
//! # Vocabulary
//!
//! - *TNT*: taken/not-taken, one bit per conditional branch or compressed return.
//! - *IP packet*: TIP, TIP.PGE, TIP.PGD or FUP, which differ in the opcode only.
//! - *Last IP*: the address in the last IP packet that had one. Upper bytes that an address shares
//!   with it are left out.
//!
//! The long TNT packet isn't here: it carries 47 bits in 8 bytes, and 8 short ones carry 48.

/// The most bytes one packet takes.
#[allow(dead_code, reason = "the host's tests check it")]
pub(crate) const MAX_PACKET: usize = PSB_LEN;

/// The length of a PSB.
pub(crate) const PSB_LEN: usize = 16;
/// The length of a PSBEND.
pub(crate) const PSBEND_LEN: usize = 2;
/// The length of a TSC packet.
pub(crate) const TSC_LEN: usize = 8;
/// The length of a CBR packet.
pub(crate) const CBR_LEN: usize = 4;
/// The length of a MODE.Exec packet.
pub(crate) const MODE_EXEC_LEN: usize = 2;
/// The length of a short TNT packet.
pub(crate) const TNT_LEN: usize = 1;
/// The most bytes an IP packet takes.
pub(crate) const MAX_IP_LEN: usize = 9;

/// Where packets go, in order.
pub(crate) trait Output {
    /// Appends the bytes of one packet, at most [`MAX_PACKET`].
    fn put(&mut self, bytes: &[u8]);
}

/// How the processor reads code: the address and operand size that CS and EFER select.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExecMode {
    /// 16-bit code, CS.L = 0 and CS.D = 0.
    #[allow(dead_code, reason = "the PMU does not tell it from 32-bit code")]
    Bits16,
    /// 64-bit code, CS.L = 1.
    Bits64,
    /// 32-bit code, CS.L = 0 and CS.D = 1.
    Bits32,
}

/// The packets that carry an instruction pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum IpPacket {
    /// "Target IP (TIP) Packet": where an indirect branch, a return or a far transfer went.
    Tip = 0x0d,
    /// "Packet Generation Enable (TIP.PGE) Packet": where the flow begins or goes on.
    TipPge = 0x11,
    /// "Packet Generation Disable (TIP.PGD) Packet": the flow leaves what is traced.
    TipPgd = 0x01,
    /// "Flow Update (FUP) Packet": where the flow was when something asynchronous came.
    Fup = 0x1d,
}

/// "Packet Stream Boundary (PSB) Packet": where a decoder can begin.
#[inline]
pub(crate) fn psb<O: Output>(out: &mut O) -> usize {
    out.put(&[
        0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02, 0x82, 0x02,
        0x82,
    ]);
    PSB_LEN
}

/// "PSBEND Packet": the end of the state that follows a PSB.
#[inline]
pub(crate) fn psbend<O: Output>(out: &mut O) -> usize {
    out.put(&[0x02, 0x23]);
    PSBEND_LEN
}

/// "Timestamp Counter (TSC) Packet": the low 56 bits of the time-stamp counter.
#[inline]
pub(crate) fn tsc<O: Output>(out: &mut O, tsc: u64) -> usize {
    out.put(&((tsc << 8) | 0x19).to_le_bytes());
    TSC_LEN
}

/// "Core:Bus Ratio (CBR) Packet": the core clock in multiples of the bus clock.
#[inline]
pub(crate) fn cbr<O: Output>(out: &mut O, ratio: u8) -> usize {
    out.put(&[0x02, 0x03, ratio, 0x00]);
    CBR_LEN
}

/// "MODE Packets", MODE.Exec: how the code from the next IP packet on is to be read.
#[inline]
pub(crate) fn mode_exec<O: Output>(out: &mut O, mode: ExecMode) -> usize {
    out.put(&[
        0x99,
        match mode {
            ExecMode::Bits16 => 0b00,
            ExecMode::Bits64 => 0b01,
            ExecMode::Bits32 => 0b10,
        },
    ]);
    MODE_EXEC_LEN
}

/// "Taken/Not-taken (TNT) Packet", short: 1 to 6 branches.
///
/// `bits` holds one bit per branch, the oldest uppermost, below a set bit that marks the start.
#[inline]
pub(crate) fn tnt<O: Output>(out: &mut O, bits: u8) -> usize {
    out.put(&[bits << 1]);
    TNT_LEN
}

/// "Overflow (OVF) Packet": packets were lost here.
#[inline]
pub(crate) fn ovf<O: Output>(out: &mut O) -> usize {
    out.put(&[0x02, 0xf3]);
    2
}

/// "TraceStop Packet": a range was entered that ends the trace.
pub(crate) fn trace_stop<O: Output>(out: &mut O) -> usize {
    out.put(&[0x02, 0x83]);
    2
}

/// An IP packet without an address (IPBytes 000b): the IP is in code that isn't traced, or the code
/// tells it.
#[inline]
pub(crate) fn ip_suppressed<O: Output>(out: &mut O, packet: IpPacket) -> usize {
    out.put(&[packet as u8]);
    1
}

/// An IP packet with as few bytes of `ip` as Last IP allows; `None` stands for a Last IP that the
/// decoder may not know. The forms are those of table "FUP/TIP IP Reconstruction".
#[inline]
pub(crate) fn ip<O: Output>(out: &mut O, packet: IpPacket, ip: u64, last: Option<u64>) -> usize {
    let [b0, b1, b2, b3, b4, b5, b6, b7] = ip.to_le_bytes();
    let op = |ip_bytes: u8| (ip_bytes << 5) | packet as u8;
    // The bits in which the address differs from Last IP.
    let new = last.map_or(u64::MAX, |last| last ^ ip);

    if new >> 16 == 0 {
        out.put(&[op(0b001), b0, b1]);
        3
    } else if new >> 32 == 0 {
        out.put(&[op(0b010), b0, b1, b2, b3]);
        5
    } else if (((ip << 16) as i64) >> 16) as u64 == ip {
        out.put(&[op(0b011), b0, b1, b2, b3, b4, b5]);
        7
    } else if new >> 48 == 0 {
        out.put(&[op(0b100), b0, b1, b2, b3, b4, b5]);
        7
    } else {
        out.put(&[op(0b110), b0, b1, b2, b3, b4, b5, b6, b7]);
        9
    }
}
