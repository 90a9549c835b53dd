// SPDX-License-Identifier: GPL-2.0

//! Random programs, and a run of one as the events of its flow.
//!
//! A program is x86 code that is never executed: [`Program::run`] walks it and decides by itself
//! which way each branch goes, as a traced processor would, and tells a trace the events. What
//! happened is noted as [`Step`]s, which is what a decoder has to find in the trace.

use crate::{
    events::{
        Event,
        Teller, //
    },
    packet::ExecMode,
    trace::Config,
};
use std::collections::{
    BTreeMap,
    HashMap, //
};

/// Where code lies: the distances between the sections call for every form of IP compression.
const SECTIONS: [(u64, ExecMode); 8] = [
    (0x0040_1000, ExecMode::Bits64),
    (0x7f12_3456_7000, ExecMode::Bits64),
    (0x7f12_3457_fff0, ExecMode::Bits64),
    (0x7f12_9456_7000, ExecMode::Bits64),
    (0xffff_ffff_ff60_0000, ExecMode::Bits64),
    (0x00ab_1234_5678_9000, ExecMode::Bits64),
    (0x00ab_7777_5678_9000, ExecMode::Bits64),
    (0x0804_8000, ExecMode::Bits32),
];

/// How a basic block ends. Targets are numbers of blocks, taken modulo their count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// Jcc with a 32-bit displacement.
    Jcc(u16),
    /// Jcc, LOOP or JRCXZ with an 8-bit displacement.
    JccShort(u16),
    /// A direct jump.
    Jmp(u16),
    /// An indirect jump, in one of several encodings.
    JmpIndirect(u8),
    /// A direct call.
    Call(u16),
    /// A direct call of the next instruction.
    CallNext,
    /// An indirect call, in one of several encodings.
    CallIndirect(u8),
    /// A near return, in one of several encodings.
    Ret(u8),
    /// SYSCALL, or INT in 32-bit code.
    Syscall,
    /// INT.
    Int,
    /// IRET, which stays in user mode.
    Iret,
}

/// A basic block before it has an address.
#[derive(Clone, Debug)]
pub(crate) struct BlockSpec {
    pub(crate) section: u8,
    pub(crate) body: Vec<u8>,
    pub(crate) end: End,
}

/// What an instruction does to the flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Other,
    Jcc { to: u64 },
    Jmp { to: u64 },
    JmpIndirect,
    Call { to: u64 },
    CallNext,
    CallIndirect,
    Ret,
    Syscall,
    Int,
    Iret,
}

impl Kind {
    /// Whether such an instruction may need a packet. Only after those, and where the flow begins,
    /// the unit looks whether a PSB is due.
    fn may_write(self) -> bool {
        !matches!(
            self,
            Kind::Other | Kind::Jmp { .. } | Kind::Call { .. } | Kind::CallNext
        )
    }
}

/// An instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Insn {
    pub(crate) len: u8,
    pub(crate) kind: Kind,
    pub(crate) exec: ExecMode,
}

/// A program in memory.
pub(crate) struct Program {
    code: BTreeMap<u64, Vec<u8>>,
    insns: HashMap<u64, Insn>,
    /// The addresses of all blocks, by how their code is to be read.
    blocks64: Vec<u64>,
    blocks32: Vec<u64>,
}

/// A thing that happened in a run, or that a decoder says happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The flow begins or goes on here.
    Enabled(u64),
    /// An instruction was executed.
    Insn(u64, ExecMode),
    /// The last instruction left what is traced.
    Disabled,
    /// The flow left what is traced before this address.
    AsyncDisabled(u64),
    /// The flow went from before one address to another.
    AsyncBranch(u64, u64),
    /// Something was lost.
    Overflow,
}

/// A run of a program.
pub(crate) struct Run {
    pub(crate) told: Teller,
    pub(crate) steps: Vec<Step>,
    /// For each PSB, the number of steps before it.
    pub(crate) psb_steps: Vec<usize>,
}

/// What a run is made of besides the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    /// In how many of 256 blocks something asynchronous happens.
    pub(crate) async_events: u8,
    /// In how many of 256 returns the return address was changed.
    pub(crate) odd_returns: u8,
    /// Whether packets get lost.
    pub(crate) overflows: bool,
}

/// Instructions that don't branch, 64-bit code.
const BODY64: [&[u8]; 12] = [
    &[0x90],
    &[0x48, 0x89, 0xc8],
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0x66, 0x0f, 0x1f, 0x84, 0x00, 0xe8, 0xc3, 0xff, 0xe0],
    &[0x48, 0x8d, 0x04, 0x25, 0x0f, 0x05, 0xcd, 0x80],
    &[0x31, 0xc0],
    &[0xf3, 0xa4],
    &[0x48, 0xb8, 0xe9, 0xeb, 0x74, 0x02, 0x82, 0x02, 0x82, 0xc3],
    &[0x0f, 0xa2],
    &[0x9c],
    &[0xc5, 0xf8, 0x77],
    &[0xc4, 0xe2, 0x7d, 0x18, 0x05, 0xe8, 0xe9, 0xc3, 0x74],
];

/// Instructions that don't branch, 32-bit code.
const BODY32: [&[u8]; 6] = [
    &[0x90],
    &[0x89, 0xc8],
    &[0x40],
    &[0x0f, 0x1f, 0x44, 0x00, 0x00],
    &[0xb8, 0xe9, 0xeb, 0x74, 0xc3],
    &[0xf3, 0xa4],
];

const JMP_INDIRECT: [&[u8]; 4] = [
    &[0xff, 0xe0],
    &[0xff, 0x25, 0x01, 0x02, 0x03, 0x04],
    &[0x3e, 0xff, 0xe0],
    &[0xf2, 0xff, 0xe0],
];

const CALL_INDIRECT: [&[u8]; 3] = [
    &[0xff, 0xd0],
    &[0xff, 0x15, 0x01, 0x02, 0x03, 0x04],
    &[0x3e, 0xff, 0xd0],
];

const RET: [&[u8]; 4] = [&[0xc3], &[0xc2, 0x08, 0x00], &[0xf3, 0xc3], &[0xf2, 0xc3]];

fn pick<'a>(from: &[&'a [u8]], which: u8) -> &'a [u8] {
    from[usize::from(which) % from.len()]
}

/// Whether a block's end is told by a packet, so that a circle through it shows in the trace.
fn shows(end: End) -> bool {
    !matches!(end, End::Jmp(_) | End::Call(_) | End::CallNext)
}

impl Program {
    /// Lays the blocks out in memory.
    pub(crate) fn new(specs: &[BlockSpec]) -> Self {
        let mut program = Self {
            code: BTreeMap::new(),
            insns: HashMap::new(),
            blocks64: Vec::new(),
            blocks32: Vec::new(),
        };
        for (number, (base, exec)) in SECTIONS.into_iter().enumerate() {
            let mut blocks: Vec<&BlockSpec> = specs
                .iter()
                .filter(|spec| usize::from(spec.section) % SECTIONS.len() == number)
                .collect();
            // What the flow can fall into at the end of the section.
            let last = BlockSpec {
                section: 0,
                body: vec![],
                end: End::JmpIndirect(0),
            };
            blocks.push(&last);
            program.section(base, exec, &blocks);
        }
        program
    }

    fn section(&mut self, base: u64, exec: ExecMode, specs: &[&BlockSpec]) {
        let wide = exec == ExecMode::Bits64;
        // The addresses of the blocks, from the sizes of the ones before.
        let mut starts = Vec::new();
        let mut at = base;
        for spec in specs {
            starts.push(at);
            at += spec
                .body
                .iter()
                .map(|&which| {
                    if wide {
                        pick(&BODY64, which)
                    } else {
                        pick(&BODY32, which)
                    }
                })
                .map(|bytes| bytes.len() as u64)
                .sum::<u64>();
            at += match spec.end {
                End::Jcc(_) => 6,
                End::JccShort(_) => 2,
                End::Jmp(_) | End::Call(_) | End::CallNext => 5,
                End::JmpIndirect(which) => pick(&JMP_INDIRECT, which).len() as u64,
                End::CallIndirect(which) => pick(&CALL_INDIRECT, which).len() as u64,
                End::Ret(which) => pick(&RET, which).len() as u64,
                End::Syscall | End::Int => 2,
                End::Iret => 1 + u64::from(wide),
            };
        }

        let any = |which: u16| starts[usize::from(which) % starts.len()];
        // A place that a direct branch from block `own` may go to without a circle of branches
        // that no packet tells.
        let told = |own: usize, which: u16| {
            let first = usize::from(which) % starts.len();
            let at = (first..starts.len())
                .find(|&at| at > own || shows(specs[at].end))
                .unwrap_or(starts.len() - 1);
            starts[at]
        };

        let mut code = Vec::new();
        for (own, spec) in specs.iter().enumerate() {
            for &which in &spec.body {
                let bytes = if wide {
                    pick(&BODY64, which)
                } else {
                    pick(&BODY32, which)
                };
                self.insn(base, &mut code, exec, bytes, Kind::Other);
            }
            let ip = base + code.len() as u64;
            let rel32 = |to: u64, len: u64| (to.wrapping_sub(ip + len) as u32).to_le_bytes();
            let (bytes, kind): (Vec<u8>, Kind) = match spec.end {
                End::Jcc(which) => {
                    let to = any(which);
                    let cc = (which >> 8) as u8 & 0xf;
                    (
                        [&[0x0f, 0x80 | cc], &rel32(to, 6)[..]].concat(),
                        Kind::Jcc { to },
                    )
                }
                End::JccShort(which) => {
                    let near: Vec<u64> = starts
                        .iter()
                        .copied()
                        .filter(|&to| i8::try_from(to.wrapping_sub(ip + 2) as i64).is_ok())
                        .collect();
                    // The next block is always in reach.
                    let to = near[usize::from(which) % near.len()];
                    let op = match (which >> 8) & 0x1f {
                        cc @ 0..16 => 0x70 | cc as u8,
                        loops => 0xe0 | loops as u8 & 3,
                    };
                    (vec![op, to.wrapping_sub(ip + 2) as u8], Kind::Jcc { to })
                }
                End::Jmp(which) => {
                    let to = told(own, which);
                    ([&[0xe9], &rel32(to, 5)[..]].concat(), Kind::Jmp { to })
                }
                End::JmpIndirect(which) => (pick(&JMP_INDIRECT, which).to_vec(), Kind::JmpIndirect),
                End::Call(which) => {
                    let to = told(own, which);
                    let kind = if to == ip + 5 {
                        Kind::CallNext
                    } else {
                        Kind::Call { to }
                    };
                    ([&[0xe8], &rel32(to, 5)[..]].concat(), kind)
                }
                End::CallNext => (vec![0xe8, 0, 0, 0, 0], Kind::CallNext),
                End::CallIndirect(which) => {
                    (pick(&CALL_INDIRECT, which).to_vec(), Kind::CallIndirect)
                }
                End::Ret(which) => (pick(&RET, which).to_vec(), Kind::Ret),
                End::Syscall if wide => (vec![0x0f, 0x05], Kind::Syscall),
                End::Syscall | End::Int => (vec![0xcd, 0x80], Kind::Int),
                End::Iret if wide => (vec![0x48, 0xcf], Kind::Iret),
                End::Iret => (vec![0xcf], Kind::Iret),
            };
            self.insn(base, &mut code, exec, &bytes, kind);
        }
        assert_eq!(base + code.len() as u64, at);
        self.code.insert(base, code);
        if wide {
            self.blocks64.extend(starts);
        } else {
            self.blocks32.extend(starts);
        }
    }

    fn insn(&mut self, base: u64, code: &mut Vec<u8>, exec: ExecMode, bytes: &[u8], kind: Kind) {
        self.insns.insert(
            base + code.len() as u64,
            Insn {
                len: bytes.len() as u8,
                kind,
                exec,
            },
        );
        code.extend_from_slice(bytes);
    }

    /// The instruction that begins at `ip`.
    #[cfg(perf_decoder)]
    pub(crate) fn insn_at(&self, ip: u64) -> Option<Insn> {
        self.insns.get(&ip).copied()
    }

    /// Copies code from `ip` on and returns how many bytes there were.
    pub(crate) fn read(&self, ip: u64, buf: &mut [u8]) -> usize {
        let Some((base, code)) = self.code.range(..=ip).next_back() else {
            return 0;
        };
        let code = usize::try_from(ip - base)
            .ok()
            .and_then(|offset| code.get(offset..))
            .unwrap_or_default();
        let len = code.len().min(buf.len());
        buf[..len].copy_from_slice(&code[..len]);
        len
    }

    /// Runs the program for as long as there are `choices`.
    pub(crate) fn run(&self, config: Config, weather: Weather, choices: &[u32]) -> Run {
        let mut runner = Runner {
            program: self,
            weather,
            run: Run {
                told: Teller::new(config),
                steps: vec![],
                psb_steps: vec![],
            },
            stack: vec![],
        };
        runner.all(choices);
        runner.run
    }
}

struct Runner<'a> {
    program: &'a Program,
    weather: Weather,
    run: Run,
    /// The return addresses in the program's memory.
    stack: Vec<u64>,
}

impl Runner<'_> {
    fn tell(&mut self, event: Event) {
        self.run.told.tell(event);
        let psbs = self.run.told.psbs.len();
        self.run.psb_steps.resize(psbs, self.run.steps.len());
    }

    fn enable(&mut self, ip: u64) {
        self.tell(Event::Enable(ip, self.exec(ip)));
        self.run.steps.push(Step::Enabled(ip));
    }

    fn async_exit(&mut self, ip: u64) {
        self.tell(Event::AsyncExit(ip));
        self.run.steps.push(Step::AsyncDisabled(ip));
    }

    fn exec(&self, ip: u64) -> ExecMode {
        self.program.insns[&ip].exec
    }

    /// Any block that can be gone to from code of this mode without a change of it.
    fn block(&self, exec: ExecMode, choice: u32) -> u64 {
        let blocks = match exec {
            ExecMode::Bits32 => &self.program.blocks32,
            _ => &self.program.blocks64,
        };
        blocks[choice as usize % blocks.len()]
    }

    /// Any block at all.
    fn far_block(&self, choice: u32) -> u64 {
        let exec = if choice % 8 == 0 {
            ExecMode::Bits32
        } else {
            ExecMode::Bits64
        };
        self.block(exec, choice >> 3)
    }

    fn all(&mut self, choices: &[u32]) {
        self.tell(Event::Start);
        let mut choices = choices.iter().copied();
        let mut ip = self.far_block(choices.next().unwrap_or(0));
        self.enable(ip);
        while let Some(choice) = choices.next() {
            ip = self.run_block(ip, choice, &mut choices);
        }
        self.async_exit(ip);
    }

    /// Runs up to and including the next branch; returns where it went.
    fn run_block(
        &mut self,
        mut ip: u64,
        choice: u32,
        choices: &mut impl Iterator<Item = u32>,
    ) -> u64 {
        // Something asynchronous happens before one of the block's instructions.
        let mut until_event =
            ((choice as u8) < self.weather.async_events).then_some((choice >> 8) & 7);
        loop {
            if until_event == Some(0) {
                until_event = None;
                ip = self.something(ip, choices.next().unwrap_or(0));
            }
            until_event = until_event.map(|left| left - 1);

            let insn = self.program.insns[&ip];
            self.run.steps.push(Step::Insn(ip, insn.exec));
            let next = ip + u64::from(insn.len);
            let branch = insn.kind != Kind::Other;
            ip = self.execute(insn, next, choice >> 11);
            if insn.kind.may_write() && self.run.told.trace.sync_due() {
                self.tell(Event::Sync(ip, self.exec(ip)));
            }
            if branch {
                return ip;
            }
        }
    }

    fn execute(&mut self, insn: Insn, next: u64, choice: u32) -> u64 {
        match insn.kind {
            Kind::Other => next,
            Kind::Jcc { to } => {
                let taken = choice & 1 != 0;
                self.tell(Event::Conditional(taken));
                if taken {
                    to
                } else {
                    next
                }
            }
            Kind::Jmp { to } => to,
            Kind::JmpIndirect => {
                let to = self.block(insn.exec, choice);
                self.tell(Event::Indirect(to));
                to
            }
            Kind::Call { to } => {
                self.stack.push(next);
                self.tell(Event::Call(next));
                to
            }
            Kind::CallNext => {
                // What it pushes is taken off by a POP in real code.
                next
            }
            Kind::CallIndirect => {
                let to = self.block(insn.exec, choice);
                self.stack.push(next);
                self.tell(Event::IndirectCall(to, next));
                to
            }
            Kind::Ret => {
                let odd = (choice as u8) < self.weather.odd_returns;
                let to = match self.stack.pop() {
                    Some(to) if !odd && self.exec(to) == insn.exec => to,
                    _ => self.block(insn.exec, choice >> 8),
                };
                self.tell(Event::Ret(to));
                to
            }
            Kind::Syscall | Kind::Int => {
                self.tell(Event::FarExit);
                self.run.steps.push(Step::Disabled);
                // Mostly the kernel comes back, sometimes to a signal handler.
                let to = if choice % 8 != 0 {
                    next
                } else {
                    self.far_block(choice >> 3)
                };
                self.enable(to);
                to
            }
            Kind::Iret => {
                let to = self.far_block(choice);
                self.tell(Event::FarTransfer(to, self.exec(to)));
                to
            }
        }
    }

    /// Lets something happen before the instruction at `ip`; returns where the flow goes on.
    fn something(&mut self, ip: u64, choice: u32) -> u64 {
        let exec = self.exec(ip);
        let choice = (choice % 8, choice >> 3);
        match choice {
            // An interrupt.
            (0 | 1, _) => {
                self.async_exit(ip);
                self.enable(ip);
                ip
            }
            // A signal.
            (2, choice) => {
                self.async_exit(ip);
                let to = self.far_block(choice);
                self.enable(to);
                to
            }
            (3, choice) => {
                let to = self.block(exec, choice);
                self.tell(Event::AsyncTransfer(ip, to));
                self.run.steps.push(Step::AsyncBranch(ip, to));
                to
            }
            // The trace is stopped and started again.
            (4, _) => {
                self.async_exit(ip);
                self.tell(Event::Start);
                self.enable(ip);
                ip
            }
            (5, choice) if self.weather.overflows => {
                self.tell(Event::Overflow);
                self.run.steps.push(Step::Overflow);
                let to = self.far_block(choice);
                self.enable(to);
                to
            }
            // A snapshot.
            _ => {
                self.tell(Event::Flush);
                ip
            }
        }
    }
}
