// SPDX-License-Identifier: GPL-2.0

//! The events of a flow, told to a trace, and what packets have to say of them.

use crate::{
    packet::{
        ExecMode,
        Output,
        MAX_PACKET,
        PSB_LEN, //
    },
    trace::{
        Clock,
        Config,
        Trace,
        MAX_EVENT, //
    },
};

/// A thing that a trace is told.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    Start,
    Enable(u64, ExecMode),
    Conditional(bool),
    Call(u64),
    Indirect(u64),
    IndirectCall(u64, u64),
    Ret(u64),
    FarExit,
    FarTransfer(u64, ExecMode),
    AsyncExit(u64),
    AsyncTransfer(u64, u64),
    Flush,
    Sync(u64, ExecMode),
    Overflow,
}

/// What a packet says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Packet {
    Psb,
    Time(u64),
    Ratio(u8),
    Mode(u8),
    PsbIp(u64),
    PsbEnd,
    Enabled(u64),
    /// A TNT: the oldest of so many bits is uppermost.
    Tnt(u8, u32),
    To(u64),
    From(u64),
    Disabled,
    Lost,
}

/// What happened, as far as packets have to say it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fact {
    Branch(bool),
    Called(u64),
    IndirectTo(u64),
    Returned(u64),
    /// Everything so far has to be there now.
    Flushed,
    /// This packet has to come.
    Says(Packet),
}

/// Collects packets, and where the PSBs are.
#[derive(Default)]
pub(crate) struct Recorder {
    pub(crate) bytes: Vec<u8>,
    pub(crate) psbs: Vec<usize>,
}

impl Output for Recorder {
    fn put(&mut self, bytes: &[u8]) {
        assert!(!bytes.is_empty() && bytes.len() <= MAX_PACKET);
        if bytes.len() == PSB_LEN {
            self.psbs.push(self.bytes.len());
        }
        self.bytes.extend_from_slice(bytes);
    }
}

/// Where a PSB is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Psb {
    /// The offset in the trace.
    pub(crate) offset: usize,
    /// The number of facts before it.
    pub(crate) facts: usize,
}

/// Tells a trace events, and notes what has to be in it.
pub(crate) struct Teller {
    pub(crate) config: Config,
    pub(crate) trace: Trace,
    pub(crate) out: Recorder,
    pub(crate) facts: Vec<Fact>,
    pub(crate) psbs: Vec<Psb>,
    tsc: u64,
    exec: Option<ExecMode>,
}

impl Teller {
    pub(crate) fn new(config: Config) -> Self {
        let mut trace = Trace::new();
        trace.configure(config);
        Self {
            config,
            trace,
            out: Recorder::default(),
            tsc: 0x00ff_ffff_ffff_0000,
            exec: None,
            facts: vec![],
            psbs: vec![],
        }
    }

    fn says(&mut self, packet: Packet) {
        self.facts.push(Fact::Says(packet));
    }

    fn psb(&mut self) {
        self.psbs.push(Psb {
            offset: self.out.psbs[self.psbs.len()],
            facts: self.facts.len(),
        });
        self.exec = None;
        self.says(Packet::Psb);
        if self.config.tsc {
            self.time();
        }
        self.says(Packet::Ratio(0x20));
    }

    fn time(&mut self) {
        self.says(Packet::Time(self.tsc & ((1 << 56) - 1)));
    }

    fn mode(&mut self, exec: ExecMode) {
        if self.exec != Some(exec) {
            self.exec = Some(exec);
            self.says(Packet::Mode(match exec {
                ExecMode::Bits16 => 0b00,
                ExecMode::Bits64 => 0b01,
                ExecMode::Bits32 => 0b10,
            }));
        }
    }

    /// Tells an event, unless it can't happen now.
    pub(crate) fn tell(&mut self, event: Event) {
        let on = self.trace.context_on();
        let possible = match event {
            Event::Start | Event::Enable(..) => !on,
            Event::Overflow => true,
            _ => on,
        };
        if !possible {
            return;
        }
        let before = self.out.bytes.len();
        let psbs = self.out.psbs.len();
        self.tsc += 0x1234;
        let clock = Clock {
            tsc: self.tsc,
            cbr: 0x20,
        };
        let (trace, out) = (&mut self.trace, &mut self.out);
        match event {
            Event::Start => trace.start(out, clock),
            Event::Enable(ip, exec) => trace.enable(out, ip, clock, exec),
            Event::Conditional(taken) => trace.conditional(out, taken),
            Event::Call(return_ip) => trace.call(return_ip),
            Event::Indirect(to) => trace.indirect(out, to),
            Event::IndirectCall(to, return_ip) => trace.indirect_call(out, to, return_ip),
            Event::Ret(to) => trace.ret(out, to),
            Event::FarExit => trace.far_exit(out),
            Event::FarTransfer(to, exec) => trace.far_transfer(out, to, exec),
            Event::AsyncExit(from) => trace.async_exit(out, from),
            Event::AsyncTransfer(from, to) => trace.async_transfer(out, from, to),
            Event::Flush => trace.flush(out),
            Event::Sync(ip, exec) => trace.sync(out, ip, clock, exec),
            Event::Overflow => trace.overflow(out),
        }
        assert!(self.out.bytes.len() - before <= MAX_EVENT);
        self.note(event, self.out.psbs.len() != psbs);
    }

    /// Notes what an event means.
    fn note(&mut self, event: Event, with_psb: bool) {
        let flow = self.config.branch;
        match event {
            Event::Start => {
                self.psb();
                self.says(Packet::PsbEnd);
            }
            Event::Enable(ip, exec) => {
                if with_psb {
                    self.psb();
                    self.says(Packet::PsbEnd);
                } else if self.config.tsc {
                    self.time();
                }
                if flow {
                    self.mode(exec);
                    self.says(Packet::Enabled(ip));
                }
            }
            Event::Sync(ip, exec) => {
                self.psb();
                if flow {
                    self.mode(exec);
                    self.says(Packet::PsbIp(ip));
                }
                self.says(Packet::PsbEnd);
            }
            Event::Overflow => {
                self.says(Packet::Lost);
                self.exec = None;
            }
            _ if !flow => {}
            Event::Conditional(taken) => self.facts.push(Fact::Branch(taken)),
            Event::Call(return_ip) => self.facts.push(Fact::Called(return_ip)),
            Event::Indirect(to) => self.facts.push(Fact::IndirectTo(to)),
            Event::IndirectCall(to, return_ip) => {
                self.facts.push(Fact::Called(return_ip));
                self.facts.push(Fact::IndirectTo(to));
            }
            Event::FarExit => self.says(Packet::Disabled),
            Event::FarTransfer(to, exec) => {
                self.mode(exec);
                self.says(Packet::To(to));
            }
            Event::AsyncExit(from) => {
                self.says(Packet::From(from));
                self.says(Packet::Disabled);
            }
            Event::AsyncTransfer(from, to) => {
                self.says(Packet::From(from));
                self.says(Packet::To(to));
            }
            Event::Ret(to) => self.facts.push(Fact::Returned(to)),
            Event::Flush => self.facts.push(Fact::Flushed),
        }
    }
}
