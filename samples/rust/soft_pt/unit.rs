// SPDX-License-Identifier: GPL-2.0

//! The trace unit of an event: steps in, bytes in the AUX area out.
//!
//! It is in place of the registers of the hardware. All of it runs with interrupts off on the CPU
//! that the event is on.

use crate::{
    config::Config,
    filter::Filter,
    packet::{
        ExecMode,
        Output, //
    },
    trace::{
        Clock,
        Trace,
        MAX_EVENT, //
    }, //
};
use kernel::{
    perf::{
        step::{
            self,
            Insn,
            Interest,
            Kind,
            Mode,
            Step, //
        },
        AuxFlag,
        AuxOutput,
        Pmu,
        SampleOutput, //
    },
    sync::atomic::{
        ordering::Relaxed,
        Atomic, //
    }, //
};

/// The most bytes that one step puts into the AUX area: a retired instruction and a PSB+ behind it,
/// or the begin of a flow with a PSB+ ahead of it, or what is held back at the end; and an overflow
/// ahead of it.
pub(crate) const MAX_STEP: u64 = 3 * MAX_EVENT as u64;

/// A trace unit.
pub(crate) struct Unit {
    trace: Trace,
    /// The unit is configured, and a transaction open.
    configured: bool,
    open: Open,
}

/// What a unit is configured to.
struct Open {
    config: Config,
    filter: Filter,
    mode: ExecMode,
    /// What is to be written begins with a PSB+.
    restart: bool,
    /// The flow came to where the trace is to end (IA32_RTIT_STATUS.Stopped), or it can not come to
    /// any place that is traced. Nothing changes that while the transaction is open. Set, too,
    /// while the unit is not configured.
    stopped: bool,
    /// A sample was taken since the last step.
    sampled: bool,
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
#[inline(always)]
fn is_at_border(filter: &Filter, trace: &Trace, from: u64, insn: Insn, to: u64) -> bool {
    !trace.context_on() || (branched(from, insn, to) && (filter.stops_at(to) || !filter.admits(to)))
}

fn clock() -> Clock {
    Clock {
        tsc: step::timestamp(),
        cbr: step::bus_ratio(),
    }
}

impl Open {
    #[inline(always)]
    fn retire(&mut self, out: &mut impl Output, trace: &mut Trace, from: u64, insn: Insn, to: u64) {
        if self.sampled {
            self.part_sample(out, trace, from);
        }
        if !self.filter.is_none() && is_at_border(&self.filter, trace, from, insn, to) {
            return self.cross(out, trace, from, insn, to);
        }
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
    fn cross(&mut self, out: &mut impl Output, trace: &mut Trace, from: u64, insn: Insn, to: u64) {
        if !branched(from, insn, to) {
            return;
        }
        let next = from.wrapping_add(u64::from(insn.len));
        match insn.kind {
            _ if !trace.context_on() => {}
            Kind::Conditional => trace.leave(out, None),
            Kind::Call | Kind::IndirectCall => {
                trace.call(next);
                trace.leave(out, Some(to));
            }
            Kind::Return | Kind::Far | Kind::InterruptReturn => trace.leave_by_return(out, to),
            Kind::Jump | Kind::IndirectJump => trace.leave(out, Some(to)),
            _ => trace.async_leave(out, from, to),
        }
        if self.filter.stops_at(to) {
            self.stop(out, trace);
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
    fn part_sample(&mut self, out: &mut impl Output, trace: &mut Trace, from: u64) {
        self.sampled = false;
        if self.config.trace.tsc && trace.context_on() {
            trace.async_exit(out, from);
            trace.enable(out, from, clock(), self.mode);
        }
    }

    #[inline(never)]
    fn enter(&mut self, out: &mut impl Output, trace: &mut Trace, ip: u64, mode: Mode) {
        self.mode = match mode {
            Mode::Bits64 => ExecMode::Bits64,
            Mode::Bits32 => ExecMode::Bits32,
        };
        // Here the flow is parted anyway.
        self.sampled = false;
        if self.restart {
            self.restart = false;
            trace.start(out, clock());
        }
        if self.filter.stops_at(ip) {
            self.stop(out, trace);
        } else if self.filter.admits(ip) {
            trace.enable(out, ip, clock(), self.mode);
        }
    }

    /// Ends the trace, for as long as the transaction is open.
    fn stop(&mut self, out: &mut impl Output, trace: &mut Trace) {
        trace.stop(out);
        self.stopped = true;
    }

    /// Whether the `pattern` source counts the instruction at `from`.
    #[inline]
    fn counts(&mut self, from: u64) -> bool {
        self.stopped = self.filter.stops_at(from);
        !self.stopped && self.filter.admits(from)
    }
}

/// The flow was lost.
#[cold]
fn lose<P: Pmu>(aux: &mut AuxOutput<'_, P>, trace: &mut Trace)
where
    for<'a> AuxOutput<'a, P>: Output,
{
    trace.overflow(aux);
    aux.flag(AuxFlag::Partial.into());
}

impl Unit {
    pub(crate) const fn new() -> Self {
        Self {
            trace: Trace::new(),
            configured: false,
            open: Open {
                config: Config::NONE,
                filter: Filter::none(),
                mode: ExecMode::Bits64,
                restart: false,
                stopped: true,
                sampled: false,
            },
        }
    }

    /// Configures the unit, and writes the PSB+ that every trace begins with; for a trace that is
    /// `paused`, the PSB+ waits until there is something to trace. A unit that is configured goes
    /// on as it was.
    pub(crate) fn start(
        &mut self,
        out: &mut impl Output,
        config: Config,
        filter: Filter,
        paused: bool,
    ) {
        if self.configured {
            // What follows is to decode without what was before.
            self.open.restart = true;
            return;
        }
        self.trace.configure(config.trace);
        if !config.pattern && !paused {
            self.trace.start(out, clock());
        }
        self.configured = true;
        self.open = Open {
            config,
            filter,
            mode: ExecMode::Bits64,
            restart: paused,
            stopped: filter.is_nowhere(),
            sampled: false,
        };
    }

    /// The transaction is about to be closed.
    pub(crate) fn stop(&mut self, out: &mut impl Output) {
        self.configured = false;
        self.open.stopped = true;
        self.trace.flush(out);
    }

    /// Writes the end of the trace into a sample.
    #[inline]
    pub(crate) fn snapshot<P: Pmu>(
        &mut self,
        aux: &mut AuxOutput<'_, P>,
        out: &mut SampleOutput<'_>,
    ) where
        for<'a> AuxOutput<'a, P>: Output,
    {
        // In full-trace mode the area belongs to its reader.
        if !self.configured || !aux.overwrite() {
            return;
        }
        self.trace.flush(aux);
        // If the data buffer does not take it all, the record is lost, which its reader is told.
        let _ = out.copy_aux(aux, out.left());
        self.open.sampled = true;
    }

    /// Steps were missed.
    #[cold]
    pub(crate) fn miss<P: Pmu>(&mut self, aux: &mut AuxOutput<'_, P>)
    where
        for<'a> AuxOutput<'a, P>: Output,
    {
        if !self.open.stopped && !self.open.config.pattern {
            lose(aux, &mut self.trace);
        }
    }

    /// Writes what `step` is to be told of. Returns which steps are of interest next.
    #[inline(always)]
    pub(crate) fn step<P>(&mut self, aux: &mut AuxOutput<'_, P>, step: Step) -> Interest
    where
        P: Pmu<Aux = Atomic<u64>>,
        for<'a> AuxOutput<'a, P>: Output,
    {
        let Self { trace, open, .. } = self;
        if open.stopped {
            return Interest::Nothing;
        }
        if open.config.pattern {
            // One word per instruction, with the number of such words before it.
            if let Step::Retire { from, .. } = step {
                if open.counts(from) {
                    // Nobody else counts while this does.
                    let word = aux.data().map_or(0, |words| {
                        let word = words.load(Relaxed);
                        words.store(word.wrapping_add(1), Relaxed);
                        word
                    });
                    Output::put(aux, &word.to_le_bytes());
                }
            }
        } else {
            match step {
                Step::Retire { from, insn, to } => open.retire(aux, trace, from, insn, to),
                Step::Enter { ip, mode } => open.enter(aux, trace, ip, mode),
                Step::Exit => trace.far_exit(aux),
                Step::Leave { from } => trace.async_exit(aux, from),
                Step::Lost => lose(aux, trace),
            }
        }
        if open.stopped {
            Interest::Nothing
        } else if open.config.pattern {
            Interest::All
        } else {
            Interest::Branches
        }
    }
}
