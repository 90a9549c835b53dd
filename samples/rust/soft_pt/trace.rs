// SPDX-License-Identifier: GPL-2.0

//! The packet generator: the events of one program's flow in, Intel Processor Trace packets out.
//!
//! A [`Trace`] is what a logical processor's trace unit is in the Intel SDM, volume 3, chapter
//! "Intel Processor Trace": it knows what a decoder knows after every packet so far, and says no
//! more than that decoder needs. It allocates nothing, can't fail, and doesn't look at time or
//! memory by itself, so it runs in any context, and on the host for the tests.
//!
//! # Vocabulary
//!
//! - *Context*: on while the traced program's user mode runs, off while the kernel does or while
//!   the program is at addresses that aren't traced (ContextEn and FilterEn in the SDM). Branches
//!   are only reported while it is on.
//! - *PSB+*: a PSB, what a decoder has to know to begin there, and a PSBEND.
//! - *Compressed return*: a return to just behind the call it belongs to is one taken bit.
//! - *Deferred TIP*: a TIP that comes after a TNT with branches that are younger (section "Deferred
//!   TIPs"), so that a TNT need not be written before it is full.
//!
//! # States
//!
//! ```text
//!                  far_exit(), async_exit(), leave(), ...
//!                     +--------------------------+
//!                     v                          |
//! configure() --> context off ---- enable() --> context on --+ conditional(), call(),
//!  then start()       ^                          |  ^        | indirect(), ret(), ..., sync()
//!                     +-------- overflow() ------+  +--------+
//! ```
//!
//! A call that its state doesn't allow writes nothing.
//!
//! # What decoders differ in
//!
//! The return stack is kept to what the decoders in use agree on, which is less than the SDM
//! allows. At a return that isn't compressed the SDM and perf take an entry off their stack,
//! libipt doesn't. So such a return empties ours: what was below could be read back wrong. So does
//! each far branch: perf takes an entry off at a far return and puts one on at a far call, the SDM
//! and libipt do neither.
//! Nothing but a PSB empties theirs; a pair of TIP.PGD and TIP.PGE leaves them and ours alone.
//!
//! A return that finds a bit in the TNT is compressed to every decoder, so one that isn't waits for
//! nothing: the TNT and the deferred TIPs go out before its TIP.

use crate::packet::{
    self,
    ExecMode,
    IpPacket,
    Output, //
};
use core::mem;

/// How many TIPs are deferred at most. More would save little: at most the rest of one TNT's byte
/// for so many TIPs.
const MAX_DEFERRED: usize = 8;

/// The most bytes that one method call puts into its output.
pub(crate) const MAX_EVENT: usize = packet::TNT_LEN
    + MAX_DEFERRED * packet::MAX_IP_LEN
    + packet::PSB_LEN
    + packet::TSC_LEN
    + packet::CBR_LEN
    + packet::MODE_EXEC_LEN
    + packet::MAX_IP_LEN
    + packet::PSBEND_LEN;

/// How far before the end of a PSB period the next PSB is due, held-back packets counted. It is
/// asked for at each entry to user mode, and after each other event that may write. Between two
/// such questions there are at most an exit from user mode and an entry, or an entry and two IP
/// packets, or two events of two IP packets each. So the distance from one PSB to the next stays
/// within the period.
const SYNC_MARGIN: usize =
    4 * packet::MAX_IP_LEN + packet::TSC_LEN + packet::MODE_EXEC_LEN + packet::TNT_LEN;

/// What to trace, as in IA32_RTIT_CTL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Config {
    /// TSCEn: TSC packets.
    pub(crate) tsc: bool,
    /// BranchEn: the packets that tell the flow.
    pub(crate) branch: bool,
    /// Not DisRETC: compressed returns.
    pub(crate) ret_compression: bool,
    /// PSBFreq: the most bytes from one PSB to the next.
    pub(crate) psb_period: u64,
}

impl Config {
    /// Nothing.
    pub(crate) const NONE: Self = Self {
        tsc: false,
        branch: false,
        ret_compression: false,
        psb_period: 0,
    };
}

/// The time at an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// The time-stamp counter.
    pub(crate) tsc: u64,
    /// The core:bus ratio, 0 where it isn't known.
    pub(crate) cbr: u8,
}

/// The return addresses of the youngest calls, up to the 64 that the SDM gives a decoder (section
/// "Target IP (TIP) Packet", "Indirect Transfer Compression for Returns").
///
/// # Invariants
///
/// The `len` entries before `top`, modulo the size, are on the stack of every decoder which
/// began at the last PSB or earlier, uppermost and in the same order.
struct ReturnStack {
    ips: [u64; Self::SIZE],
    top: usize,
    len: usize,
}

impl ReturnStack {
    const SIZE: usize = 64;

    const fn new() -> Self {
        // INVARIANT: There are no entries.
        Self {
            ips: [0; Self::SIZE],
            top: 0,
            len: 0,
        }
    }

    #[inline]
    fn clear(&mut self) {
        // INVARIANT: There are no entries.
        self.len = 0;
    }

    #[inline]
    fn push(&mut self, ip: u64) {
        // INVARIANT: The decoder pushes at the same instruction. The oldest entry is given up
        // where a decoder could have given it up.
        self.ips[self.top % Self::SIZE] = ip;
        self.top = self.top.wrapping_add(1) % Self::SIZE;
        if self.len < Self::SIZE {
            self.len += 1;
        }
    }

    /// Takes off the youngest entry if it is `ip`, else all entries.
    #[inline]
    fn pop(&mut self, ip: u64) -> bool {
        let youngest = self.top.wrapping_sub(1) % Self::SIZE;
        if self.len == 0 || self.ips[youngest] != ip {
            self.clear();
            return false;
        }
        // INVARIANT: The decoder takes its youngest entry too, because the return is compressed.
        self.top = youngest;
        self.len -= 1;
        true
    }
}

/// The state of one trace.
///
/// # Invariants
///
/// While `context` is off, `tnt` is [`Trace::NO_TNT`]. While that is so, `deferred_len` is 0.
pub(crate) struct Trace {
    config: Config,
    context: bool,
    /// Branches not yet written: one bit each, the oldest uppermost, below a set bit.
    tnt: u8,
    /// The targets of TIPs not yet written.
    deferred: [u64; MAX_DEFERRED],
    deferred_len: usize,
    /// The address in the last IP packet; `None` where a decoder may not know it.
    last_ip: Option<u64>,
    /// What the last MODE.Exec said; `None` if there was none since the last PSB.
    exec: Option<ExecMode>,
    returns: ReturnStack,
    /// The bytes written since the last PSB began.
    since_psb: u64,
    /// The number of those at which the next PSB is due.
    psb_due: u64,
}

impl Trace {
    const NO_TNT: u8 = 1;
    /// The start bit of a full short TNT.
    const FULL_TNT: u8 = 1 << 6;

    /// A trace that writes nothing until it is configured and started.
    pub(crate) const fn new() -> Self {
        // INVARIANT: `context` is off, and nothing is held back.
        Self {
            config: Config::NONE,
            context: false,
            tnt: Self::NO_TNT,
            deferred: [0; MAX_DEFERRED],
            deferred_len: 0,
            last_ip: None,
            exec: None,
            returns: ReturnStack::new(),
            since_psb: 0,
            psb_due: 0,
        }
    }

    /// Takes over a new configuration and forgets everything else.
    pub(crate) fn configure(&mut self, config: Config) {
        self.config = config;
        self.psb_due = config.psb_period.saturating_sub(SYNC_MARGIN as u64);
        self.since_psb = 0;
        self.lose();
    }

    /// Whether the traced program's flow is being reported.
    #[inline]
    pub(crate) fn context_on(&self) -> bool {
        self.context
    }

    /// Begins a piece of trace, with the context off: PSB+.
    pub(crate) fn start<O: Output>(&mut self, out: &mut O, clock: Clock) {
        self.lose();
        self.psb(out, clock);
        self.wrote(packet::psbend(out));
    }

    /// The program's user mode begins or goes on at `ip`: TIP.PGE, with the time and, where it is
    /// new to a decoder, the mode. The context turns on.
    ///
    /// A PSB that is due comes with it, so a caller needs no [`sync`](Self::sync) here.
    pub(crate) fn enable<O: Output>(&mut self, out: &mut O, ip: u64, clock: Clock, exec: ExecMode) {
        if self.context {
            return;
        }
        if self.since_psb >= self.psb_due {
            self.psb(out, clock);
            self.wrote(packet::psbend(out));
        } else if self.config.tsc {
            self.wrote(packet::tsc(out, clock.tsc));
        }
        self.context = true;
        if self.config.branch {
            self.mode(out, exec);
            self.ip(out, IpPacket::TipPge, ip);
        }
    }

    /// A conditional branch.
    #[inline(always)]
    pub(crate) fn conditional<O: Output>(&mut self, out: &mut O, taken: bool) {
        if !self.tells_flow() {
            return;
        }
        self.tnt = (self.tnt << 1) | u8::from(taken);
        if self.tnt >= Self::FULL_TNT {
            self.flush(out);
        }
    }

    /// A direct near call, which a decoder follows by itself: only notes where it returns to.
    ///
    /// Not for a call to its own next instruction: decoders don't expect such a call to return.
    #[inline(always)]
    pub(crate) fn call(&mut self, return_ip: u64) {
        if self.config.ret_compression && self.tells_flow() {
            self.returns.push(return_ip);
        }
    }

    /// An indirect near jump: TIP.
    #[inline(always)]
    pub(crate) fn indirect<O: Output>(&mut self, out: &mut O, to: u64) {
        if !self.tells_flow() {
            return;
        }
        if self.tnt != Self::NO_TNT {
            if let Some(deferred) = self.deferred.get_mut(self.deferred_len) {
                *deferred = to;
                self.deferred_len = self.deferred_len.wrapping_add(1);
                return;
            }
            self.flush(out);
        }
        self.ip(out, IpPacket::Tip, to);
    }

    /// An indirect near call: TIP.
    #[inline(always)]
    pub(crate) fn indirect_call<O: Output>(&mut self, out: &mut O, to: u64, return_ip: u64) {
        self.call(return_ip);
        self.indirect(out, to);
    }

    /// A near return: one taken bit if it goes to just behind its call, else TIP.
    #[inline(always)]
    pub(crate) fn ret<O: Output>(&mut self, out: &mut O, to: u64) {
        if self.config.ret_compression && self.returns.pop(to) {
            self.conditional(out, true);
        } else if self.tells_flow() {
            self.flush(out);
            self.ip(out, IpPacket::Tip, to);
        }
    }

    /// An instruction that leaves user mode, such as SYSCALL: TIP.PGD. The context turns off.
    pub(crate) fn far_exit<O: Output>(&mut self, out: &mut O) {
        if self.tells_flow() {
            self.flush(out);
            self.wrote(packet::ip_suppressed(out, IpPacket::TipPgd));
        }
        self.context = false;
    }

    /// A far transfer that stays in user mode, such as IRET: TIP, with the mode where it is new.
    pub(crate) fn far_transfer<O: Output>(&mut self, out: &mut O, to: u64, exec: ExecMode) {
        self.returns.clear();
        if self.tells_flow() {
            self.flush(out);
            self.mode(out, exec);
            self.ip(out, IpPacket::Tip, to);
        }
    }

    /// The flow left user mode before the instruction at `from`, by an interrupt, a fault or the
    /// end of the trace: FUP, TIP.PGD. The context turns off.
    pub(crate) fn async_exit<O: Output>(&mut self, out: &mut O, from: u64) {
        if self.tells_flow() {
            self.flush(out);
            self.ip(out, IpPacket::Fup, from);
            self.wrote(packet::ip_suppressed(out, IpPacket::TipPgd));
        }
        self.context = false;
    }

    /// A branch left the addresses that are traced: TIP.PGD, with the target. The context turns
    /// off, and may be on again by [`enable`](Self::enable) without a visit to the kernel.
    ///
    /// `to` is [`None`] for a conditional branch, whose target the code tells.
    pub(crate) fn leave<O: Output>(&mut self, out: &mut O, to: Option<u64>) {
        if self.tells_flow() {
            self.flush(out);
            match to {
                Some(to) => self.ip(out, IpPacket::TipPgd, to),
                None => self.wrote(packet::ip_suppressed(out, IpPacket::TipPgd)),
            }
        }
        self.context = false;
    }

    /// A return or a far branch left the addresses that are traced: TIP.PGD. The context turns off.
    pub(crate) fn leave_by_return<O: Output>(&mut self, out: &mut O, to: u64) {
        // The return stacks of decoders differ after this.
        self.returns.clear();
        self.leave(out, Some(to));
    }

    /// What leaves the addresses that are traced is no instruction: FUP, TIP.PGD. The context turns
    /// off.
    pub(crate) fn async_leave<O: Output>(&mut self, out: &mut O, from: u64, to: u64) {
        if self.tells_flow() {
            self.flush(out);
            self.ip(out, IpPacket::Fup, from);
        }
        self.leave(out, Some(to));
    }

    /// The flow, whose context is off now, came to where the trace is to end: TraceStop.
    pub(crate) fn stop<O: Output>(&mut self, out: &mut O) {
        self.wrote(packet::trace_stop(out));
    }

    /// The flow went from before the instruction at `from` to `to`, and no instruction did it: FUP,
    /// TIP.
    pub(crate) fn async_transfer<O: Output>(&mut self, out: &mut O, from: u64, to: u64) {
        if self.tells_flow() {
            self.flush(out);
            self.ip(out, IpPacket::Fup, from);
            self.ip(out, IpPacket::Tip, to);
        }
    }

    /// Writes what is still held back, so that the output is complete up to the last event.
    #[inline(always)]
    pub(crate) fn flush<O: Output>(&mut self, out: &mut O) {
        if self.tnt != Self::NO_TNT {
            self.wrote(packet::tnt(out, self.tnt));
            // INVARIANT: Both are set.
            self.tnt = Self::NO_TNT;
            let deferred_len = mem::replace(&mut self.deferred_len, 0);
            for index in 0..deferred_len {
                if let Some(&to) = self.deferred.get(index) {
                    self.ip(out, IpPacket::Tip, to);
                }
            }
        }
    }

    /// Whether to [`sync`](Self::sync) now. To be asked after the events of each instruction that
    /// has any, a direct call aside.
    #[inline]
    pub(crate) fn sync_due(&self) -> bool {
        let held_back = (self.deferred_len as u64).wrapping_mul(packet::MAX_IP_LEN as u64);
        self.context && self.since_psb.wrapping_add(held_back) >= self.psb_due
    }

    /// Gives decoders a place to begin, before the instruction at `ip`: PSB+.
    pub(crate) fn sync<O: Output>(&mut self, out: &mut O, ip: u64, clock: Clock, exec: ExecMode) {
        if !self.context {
            return;
        }
        self.flush(out);
        self.psb(out, clock);
        if self.config.branch {
            self.mode(out, exec);
            // perf 7.3 reads this FUP ahead, and takes the Last IP from before the PSB for it.
            self.last_ip = None;
            self.ip(out, IpPacket::Fup, ip);
        }
        self.wrote(packet::psbend(out));
    }

    /// Packets were lost from here on: OVF. The context turns off, to be on again by
    /// [`enable`](Self::enable).
    pub(crate) fn overflow<O: Output>(&mut self, out: &mut O) {
        self.wrote(packet::ovf(out));
        self.lose();
    }

    #[inline]
    fn tells_flow(&self) -> bool {
        self.context && self.config.branch
    }

    #[inline]
    fn wrote(&mut self, len: usize) {
        self.since_psb = self.since_psb.wrapping_add(len as u64);
    }

    /// Assumes nothing any more about what a decoder knows.
    fn lose(&mut self) {
        // INVARIANT: All are set.
        self.context = false;
        self.tnt = Self::NO_TNT;
        self.deferred_len = 0;
        self.last_ip = None;
        self.exec = None;
        self.returns.clear();
    }

    /// A PSB and the time: the head of a PSB+.
    fn psb<O: Output>(&mut self, out: &mut O, clock: Clock) {
        self.since_psb = 0;
        self.last_ip = Some(0);
        self.exec = None;
        self.returns.clear();
        self.wrote(packet::psb(out));
        if self.config.tsc {
            self.wrote(packet::tsc(out, clock.tsc));
        }
        if clock.cbr != 0 {
            self.wrote(packet::cbr(out, clock.cbr));
        }
    }

    fn mode<O: Output>(&mut self, out: &mut O, exec: ExecMode) {
        if self.exec != Some(exec) {
            self.exec = Some(exec);
            self.wrote(packet::mode_exec(out, exec));
        }
    }

    #[inline]
    fn ip<O: Output>(&mut self, out: &mut O, packet: IpPacket, ip: u64) {
        let len = packet::ip(out, packet, ip, self.last_ip);
        self.last_ip = Some(ip);
        self.wrote(len);
    }
}
