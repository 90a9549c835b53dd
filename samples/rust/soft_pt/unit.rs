// SPDX-License-Identifier: GPL-2.0

//! The trace unit of a CPU: steps in, bytes in the AUX area out.
//!
//! It is in place of the registers and the output mechanism of the hardware. All of it runs with
//! interrupts off on the unit's own CPU. An NMI that comes while the unit is at work can't use it:
//! a sample it takes then has zeros in its AUX field.

use crate::{
    filter::Filter,
    packet::{
        ExecMode,
        Output, //
    },
    pmu::{
        Config,
        SoftPt, //
    },
    trace::{
        Clock,
        Trace,
        MAX_EVENT, //
    },
};
use core::mem;
use kernel::{
    perf::{
        step::{
            self,
            Handler,
            Insn,
            Interest,
            Kind,
            Mode,
            Step, //
        },
        AuxFlag,
        AuxOutput,
        CpuLocal,
        IrqsOff,
        NmiLike,
        SampleOutput, //
    },
    prelude::*,
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    }, //
};

/// The most bytes that one step puts into the AUX area: a retired instruction and a PSB+ behind it,
/// or the begin of a flow with a PSB+ ahead of it, or what is held back at the end.
const MAX_STEP: u64 = 2 * MAX_EVENT as u64;

/// The units of all CPUs.
pub(crate) struct Units(CpuLocal<Unit>);

struct Unit {
    /// An event is on this CPU.
    taken: bool,
    trace: Trace,
    open: Option<Open>,
}

/// What exists while a transaction is open.
struct Open {
    config: Config,
    filter: Filter,
    mode: ExecMode,
    /// What is to be written begins with a PSB+.
    restart: bool,
    /// The flow came to where the trace is to end (IA32_RTIT_STATUS.Stopped), or it can not come to
    /// any place that is traced. Nothing changes that while the transaction is open.
    stopped: bool,
    /// A sample was taken since the last step.
    sampled: bool,
    ring: Ring,
}

/// The AUX area, as a place to put bytes one after the other.
struct Ring {
    output: AuxOutput<SoftPt>,
    /// Where the next byte goes, and where the first one of this transaction went.
    head: u64,
    begin: u64,
    /// The head up to which there is room.
    limit: u64,
    /// A step can be written without more ado as long as the head is below this: there is room for
    /// it, and user space does not yet want to know.
    ready_below: u64,
    /// The number of the next word of the `pattern` source.
    word: u64,
}

impl Output for Ring {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        self.output.write(self.head, bytes);
        self.head = self.head.wrapping_add(bytes.len() as u64);
    }
}

impl Ring {
    fn new(output: AuxOutput<SoftPt>) -> Self {
        let head = output.head();
        let (limit, wakeup) = if output.overwrite() {
            (u64::MAX, u64::MAX)
        } else {
            (head.saturating_add(output.space()), output.wakeup())
        };
        Self {
            word: output.aux().words.load(Relaxed),
            output,
            head,
            begin: head,
            limit,
            ready_below: limit.saturating_add(1).saturating_sub(MAX_STEP).min(wakeup),
        }
    }

    fn has_room(&self) -> bool {
        self.limit.saturating_sub(self.head) >= MAX_STEP
    }

    /// Whether a step can be written without more ado.
    #[inline]
    fn is_ready(&self) -> bool {
        self.head < self.ready_below
    }

    /// Makes the ring ready: tells user space what there is, and finds out what it has read. If
    /// there is no room even then, the trace is truncated, and the ring is gone.
    fn renew(self, cx: &NmiLike<'_>) -> Option<Self> {
        let (written, head) = self.save();
        let mut ring = Self::new(self.output.renew(written, head, cx)?);
        if !ring.has_room() {
            ring.output.flag(AuxFlag::Truncated.into());
            ring.output.end(0, head);
            return None;
        }
        Some(ring)
    }

    fn end(self) {
        let (written, head) = self.save();
        self.output.end(written, head);
    }

    /// Notes how far the `pattern` source has got. Returns what the end of the transaction is told.
    fn save(&self) -> (u64, u64) {
        self.output.aux().words.store(self.word, Relaxed);
        (self.head.wrapping_sub(self.begin), self.head)
    }
}

/// What belongs to an AUX area for as long as it is mapped.
pub(crate) struct Buffer {
    /// How many words the `pattern` source has written.
    words: Atomic<u64>,
}

impl Buffer {
    pub(crate) fn new() -> Result<KBox<Self>> {
        let words = Atomic::new(0);
        Ok(KBox::new(Self { words }, GFP_KERNEL)?)
    }
}

/// Whether an instruction that has retired took the flow elsewhere. A call of the next instruction
/// did, too.
#[inline]
fn branched(from: u64, insn: Insn, to: u64) -> bool {
    match insn.kind {
        Kind::Conditional => to != from.wrapping_add(u64::from(insn.len)),
        Kind::Jump
        | Kind::Call
        | Kind::IndirectJump
        | Kind::IndirectCall
        | Kind::Return
        | Kind::Far
        | Kind::InterruptReturn => true,
        // What goes elsewhere without being a branch, such as an aborted transaction.
        _ => to.wrapping_sub(from) > u64::from(Insn::MAX_LEN),
    }
}

/// Whether the instruction that has retired isn't traced, or is the last one that is.
#[inline]
fn is_at_border(filter: &Filter, trace: &Trace, from: u64, insn: Insn, to: u64) -> bool {
    if filter.is_none() {
        return false;
    }
    !trace.context_on() || (branched(from, insn, to) && (filter.stops_at(to) || !filter.admits(to)))
}

fn clock() -> Clock {
    Clock {
        tsc: step::timestamp(),
        cbr: step::bus_ratio(),
    }
}

impl Open {
    #[inline]
    fn step(&mut self, trace: &mut Trace, step: Step) {
        if self.stopped {
            return;
        }
        match step {
            Step::Retire { from, .. } if self.config.pattern => self.count(from),
            Step::Retire { from, insn, to } => self.retire(trace, from, insn, to),
            _ if self.config.pattern => {}
            Step::Enter { ip, mode } => self.enter(trace, ip, mode),
            Step::Exit => trace.far_exit(&mut self.ring),
            Step::Leave { from } => trace.async_exit(&mut self.ring, from),
            Step::Lost => {
                trace.overflow(&mut self.ring);
                self.ring.output.flag(AuxFlag::Partial.into());
            }
        }
    }

    #[inline]
    fn retire(&mut self, trace: &mut Trace, from: u64, insn: Insn, to: u64) {
        if self.sampled {
            self.part_sample(trace, from);
        }
        if is_at_border(&self.filter, trace, from, insn, to) {
            return self.cross(trace, from, insn, to);
        }
        let out = &mut self.ring;
        let next = from.wrapping_add(u64::from(insn.len));
        match insn.kind {
            Kind::Conditional => trace.conditional(out, to != next),
            // A call of the next instruction only reads the instruction pointer.
            Kind::Call if to != next => return trace.call(next),
            Kind::IndirectJump => trace.indirect(out, to),
            Kind::IndirectCall => trace.indirect_call(out, to, next),
            Kind::Return => trace.ret(out, to),
            Kind::Far | Kind::InterruptReturn => trace.far_transfer(out, to, self.mode),
            // What goes elsewhere without being a branch, such as an aborted transaction.
            Kind::Other if insn.may_branch(from, to) => trace.async_transfer(out, from, to),
            _ => return,
        }
        if trace.sync_due() {
            trace.sync(out, to, clock(), self.mode);
        }
    }

    /// An instruction [at a border](is_at_border) has retired.
    #[inline(never)]
    fn cross(&mut self, trace: &mut Trace, from: u64, insn: Insn, to: u64) {
        if !branched(from, insn, to) {
            return;
        }
        let out = &mut self.ring;
        let next = from.wrapping_add(u64::from(insn.len));
        match insn.kind {
            _ if !trace.context_on() => {}
            Kind::Conditional => trace.leave(out, None),
            Kind::Call | Kind::IndirectCall => {
                trace.call(next);
                trace.leave(out, Some(to));
            }
            Kind::Return => trace.leave_by_return(out, to),
            Kind::Jump | Kind::IndirectJump | Kind::Far | Kind::InterruptReturn => {
                trace.leave(out, Some(to));
            }
            _ => trace.async_leave(out, from, to),
        }
        if self.filter.stops_at(to) {
            self.stop(trace);
        } else if self.filter.admits(to) {
            trace.enable(out, to, clock(), self.mode);
        }
    }

    /// A sample was taken before the instruction at `from`.
    ///
    /// A decoder takes branches for as old as the last time stamp, and the first one behind a time
    /// stamp for as old as those before. So that it tells what came after the sample from what led
    /// to it, there is a break, as there is when the hardware is stopped for the sample.
    #[inline(never)]
    fn part_sample(&mut self, trace: &mut Trace, from: u64) {
        self.sampled = false;
        if self.config.trace.tsc && trace.context_on() {
            trace.async_exit(&mut self.ring, from);
            trace.enable(&mut self.ring, from, clock(), self.mode);
        }
    }

    #[inline(never)]
    fn enter(&mut self, trace: &mut Trace, ip: u64, mode: Mode) {
        self.mode = match mode {
            Mode::Bits64 => ExecMode::Bits64,
            Mode::Bits32 => ExecMode::Bits32,
        };
        // Here the flow is parted anyway.
        self.sampled = false;
        if self.restart {
            self.restart = false;
            trace.start(&mut self.ring, clock());
        }
        if self.filter.stops_at(ip) {
            self.stop(trace);
        } else if self.filter.admits(ip) {
            trace.enable(&mut self.ring, ip, clock(), self.mode);
        }
    }

    /// Ends the trace, for as long as the transaction is open.
    fn stop(&mut self, trace: &mut Trace) {
        trace.stop(&mut self.ring);
        self.stopped = true;
    }

    /// The `pattern` source: one word per instruction, with the number of such words before it.
    #[inline]
    fn count(&mut self, from: u64) {
        self.stopped = self.filter.stops_at(from);
        if self.stopped || !self.filter.admits(from) {
            return;
        }
        let word = self.ring.word;
        self.ring.put(&word.to_le_bytes());
        self.ring.word = word.wrapping_add(1);
    }
}

impl Units {
    pub(crate) fn new() -> Result<Self> {
        Ok(Self(CpuLocal::new(|_| {
            Ok(Unit {
                taken: false,
                trace: Trace::new(),
                open: None,
            })
        })?))
    }

    /// Takes this CPU's unit for an event; returns whether it was free.
    pub(crate) fn take(&self, cx: &IrqsOff<'_>) -> bool {
        self.0
            .with(cx, |unit| !mem::replace(&mut unit.taken, true))
            .unwrap_or(false)
    }

    /// The event that took this CPU's unit is done with it.
    pub(crate) fn release(&self, cx: &IrqsOff<'_>) {
        self.0.with(cx, |unit| unit.taken = false);
    }

    /// Whether a transaction is open on this CPU.
    pub(crate) fn is_open(&self, cx: &IrqsOff<'_>) -> bool {
        self.0
            .with(cx, |unit| {
                if let Some(open) = &mut unit.open {
                    // What follows a pause is to decode without what was before.
                    open.restart = true;
                }
                unit.open.is_some()
            })
            .unwrap_or(false)
    }

    /// Configures this CPU's unit to write to `output`, and writes the PSB+ that every trace begins
    /// with; for a trace that is `paused`, the PSB+ waits until there is something to trace.
    pub(crate) fn open(
        &self,
        config: Config,
        filter: Filter,
        output: AuxOutput<SoftPt>,
        paused: bool,
        cx: &IrqsOff<'_>,
    ) {
        self.0.with(cx, |unit| {
            let mut ring = Ring::new(output);
            if !ring.is_ready() {
                match ring.renew(cx) {
                    Some(renewed) => ring = renewed,
                    None => return,
                }
            }
            unit.trace.configure(config.trace);
            if !config.pattern && !paused {
                unit.trace.start(&mut ring, clock());
            }
            unit.open = Some(Open {
                config,
                filter,
                mode: ExecMode::Bits64,
                restart: paused,
                stopped: filter.is_nowhere(),
                sampled: false,
                ring,
            });
        });
    }

    /// Closes the transaction of this CPU's unit, if one is open.
    pub(crate) fn close(&self, cx: &IrqsOff<'_>) {
        self.0.with(cx, |unit| {
            if let Some(mut open) = unit.open.take() {
                unit.trace.flush(&mut open.ring);
                open.ring.end();
            }
        });
    }

    /// Writes the end of this CPU's trace into a sample.
    #[inline]
    pub(crate) fn snapshot(&self, out: &mut SampleOutput<'_>, cx: &NmiLike<'_>) {
        self.0.with(cx, |unit| {
            let Some(open) = &mut unit.open else { return };
            let ring = &mut open.ring;
            // In full-trace mode the area belongs to its reader.
            if !ring.output.overwrite() {
                return;
            }
            unit.trace.flush(ring);
            let size = out.left();
            // If the data buffer does not take it all, the record is lost, which its reader is
            // told.
            let _ = out.copy_aux(&mut ring.output, size, ring.head);
            open.sampled = true;
        });
    }
}

impl Handler for Units {
    #[inline]
    fn step(&self, step: Step, cx: &NmiLike<'_>) -> Interest {
        self.0
            .with(cx, |unit| {
                if !unit.open.as_ref().is_some_and(|open| open.ring.is_ready()) {
                    unit.renew(cx);
                }
                match &mut unit.open {
                    Some(open) => {
                        open.step(&mut unit.trace, step);
                        if open.stopped {
                            Interest::Nothing
                        } else if open.config.pattern {
                            Interest::All
                        } else {
                            Interest::Branches
                        }
                    }
                    None => Interest::Nothing,
                }
            })
            .unwrap_or(Interest::All)
    }
}

impl Unit {
    #[inline(never)]
    fn renew(&mut self, cx: &NmiLike<'_>) {
        self.open = self.open.take().and_then(|open| {
            let ring = open.ring.renew(cx)?;
            Some(Open { ring, ..open })
        });
    }
}
