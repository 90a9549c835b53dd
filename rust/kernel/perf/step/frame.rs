// SPDX-License-Identifier: GPL-2.0

//! What the registers that a task's entry into the kernel has saved tell of that entry, and of the
//! way back.
//!
//! C headers:
//! [`arch/x86/include/asm/fred.h`](srctree/arch/x86/include/asm/fred.h),
//! [`arch/x86/include/asm/trapnr.h`](srctree/arch/x86/include/asm/trapnr.h)
//!
//! A processor with FRED writes down what kind of event it was, in the slot of SS. One that enters
//! by the IDT does not, and it is told by what the entry code and `syscall` leave in the registers:
//!
//! ```text
//!                          FRED                          IDT
//!   ─────────────────────────────────────────────────────────────────────────────
//!    system call           type 7, int n: type 4         orig_ax is its number
//!    return from a signal  the same, orig_ax is -1       orig_ax is -1, ip has moved
//!    execve()              nothing but swevent           orig_ax is its number
//!    anything else         another type                  orig_ax is -1
//!    flags in r11          never                         syscall: r11 is flags, cx is ip
//!    TF on the way back    swevent: traps at once        traps behind the instruction
//! ```
//!
//! This is pure logic: no memory is touched. RF plays no part in it: it is set for faults and
//! interrupts, and clear for traps, but emulators differ.

use super::super::bindings;
use crate::prelude::*;

/// `EFLAGS.TF`.
pub(super) const TF: usize = 1 << 8;

/// The vectors of `EVENT_TYPE_OTHER`.
const FRED_SYSCALL: u64 = 1;
const FRED_SYSENTER: u64 = 2;

/// The length of `syscall`, by which the kernel moves the task back to restart it.
const SYSCALL_LEN: usize = 2;

/// How the task came into the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// By the IDT, which does not say.
    Untold,
    /// By an interrupt or an NMI: no instruction has led there.
    Interrupt,
    /// By an exception of an instruction.
    Exception,
    /// By `int n`, `int3` or `into`.
    SoftwareInterrupt,
    /// By `syscall` or `sysenter`.
    Syscall,
    /// By `execve()`, which has made the registers anew.
    Exec,
    /// By something that came up after this was written.
    Unknown,
}

/// The registers that tell.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    /// The slot of SS, if the processor enters by FRED.
    pub(super) fred: Option<bindings::fred_ss>,
    pub(super) orig_ax: usize,
    pub(super) ip: usize,
    pub(super) flags: usize,
    pub(super) cx: usize,
    pub(super) r11: usize,
}

impl Frame {
    /// How the task came into the kernel.
    pub(super) fn event(&self) -> Event {
        const DEBUG: u64 = bindings::X86_TRAP_DB as u64;
        const NMI: u64 = bindings::X86_TRAP_NMI as u64;
        const BREAKPOINT: u64 = bindings::X86_TRAP_BP as u64;
        const OVERFLOW: u64 = bindings::X86_TRAP_OF as u64;

        let Some(ss) = self.fred else {
            return Event::Untold;
        };
        match (ss.type_() as c_uint, ss.vector()) {
            // start_thread() writes the slot as a whole, which leaves the type of interrupts, but
            // there is no interrupt with the vector 0.
            (bindings::EVENT_TYPE_EXTINT, 0) if ss.swevent() != 0 => Event::Exec,
            (bindings::EVENT_TYPE_EXTINT, 32..) | (bindings::EVENT_TYPE_NMI, NMI) => {
                Event::Interrupt
            }
            (bindings::EVENT_TYPE_HWEXC, 0..32) | (bindings::EVENT_TYPE_PRIV_SWEXC, DEBUG) => {
                Event::Exception
            }
            (bindings::EVENT_TYPE_SWEXC, BREAKPOINT | OVERFLOW)
            | (bindings::EVENT_TYPE_SWINT, _) => Event::SoftwareInterrupt,
            // The one in code of the other kind is an invalid opcode.
            (bindings::EVENT_TYPE_OTHER, FRED_SYSCALL) if ss.l() != 0 => Event::Syscall,
            (bindings::EVENT_TYPE_OTHER, FRED_SYSENTER) if ss.l() == 0 => Event::Syscall,
            (bindings::EVENT_TYPE_OTHER, FRED_SYSCALL | FRED_SYSENTER) => Event::Exception,
            _ => Event::Unknown,
        }
    }

    /// Whether the task entered the kernel by a system call and has not come back yet.
    ///
    /// All other entries, and the return from a signal handler, set the number to -1.
    #[inline]
    pub(super) fn in_syscall(&self) -> bool {
        self.orig_ax as isize != -1
    }

    /// Whether a system call or software interrupt at `at` has retired by entering the kernel.
    pub(super) fn entered_from(&self, at: u64) -> bool {
        match self.event() {
            Event::Syscall | Event::Exec => true,
            Event::Interrupt | Event::Exception | Event::Unknown => false,
            // A system call that is restarted goes back to where it was; its number tells. So does
            // an `int n` that there is no gate for.
            Event::Untold | Event::SoftwareInterrupt => self.in_syscall() || self.has_left(at),
        }
    }

    /// Whether the call at `at` for a return from a signal handler has been carried out.
    pub(super) fn returned_from_signal(&self, at: u64) -> bool {
        !self.in_syscall()
            && match self.event() {
                Event::Syscall => true,
                Event::Untold | Event::SoftwareInterrupt => self.has_left(at),
                _ => false,
            }
    }

    /// Whether the task does not go on at `at`.
    fn has_left(&self, at: u64) -> bool {
        self.ip as u64 != at
    }

    /// Whether `r11` is a copy that `syscall` made, when the flags were `flags`.
    ///
    /// That is for the task itself, and for a child that has yet to return from the call. The call
    /// may be about to be restarted.
    pub(super) fn r11_is_copy_of(&self, flags: usize) -> bool {
        self.fred.is_none()
            && self.in_syscall()
            && self.r11 == flags
            && (self.cx == self.ip || self.cx == self.ip.wrapping_add(SYSCALL_LEN))
    }

    /// Whether a TF that is set leads to a trap before the next instruction has run.
    pub(super) fn traps_at_once(&self) -> bool {
        self.flags & TF != 0 && self.fred.is_some_and(|ss| ss.swevent() != 0)
    }
}

/// What is left of DR6 when the step in it is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rest {
    /// DR6 for those who have a say after this.
    pub(super) dr6: usize,
    /// There was nothing but the step.
    pub(super) is_empty: bool,
}

/// Whether a debug exception has come for a step, maybe among other things.
///
/// That of `int1` has not.
#[inline(always)]
pub(super) const fn is_step(dr6: usize) -> bool {
    dr6 & bindings::DR_STEP as usize != 0
}

/// Takes a step out of DR6.
///
/// The code for the debug registers leaves the bit of an execution breakpoint set when it sees the
/// step, for whoever handles the step. What it leaves for others, such as a bus lock, is theirs.
#[inline(always)]
pub(super) const fn without_step(dr6: usize) -> Rest {
    Rest {
        dr6: dr6 & !((bindings::DR_STEP | bindings::DR_TRAP_BITS) as usize),
        is_empty: dr6 == bindings::DR_STEP as usize,
    }
}

#[cfg(not(PERF_IN_MODULE))]
#[macros::kunit_tests(rust_perf_frame)]
mod tests {
    use super::*;

    const AT: usize = 0x40_1000;
    const FLAGS: usize = 0x246;
    const RF: usize = 1 << 16;
    const NONE: usize = usize::MAX;

    const SYSCALL_64: (u32, u64) = (bindings::EVENT_TYPE_OTHER, FRED_SYSCALL);
    const SYSENTER: (u32, u64) = (bindings::EVENT_TYPE_OTHER, FRED_SYSENTER);
    const INT_80: (u32, u64) = (bindings::EVENT_TYPE_SWINT, 0x80);
    const PAGE_FAULT: (u32, u64) = (bindings::EVENT_TYPE_HWEXC, 14);
    const TIMER: (u32, u64) = (bindings::EVENT_TYPE_EXTINT, 0xec);

    /// The slot of SS as the processor fills it.
    fn slot((event, vector): (u32, u64), long: bool) -> bindings::fred_ss {
        let mut ss = bindings::fred_ss::default();
        ss.set_ss(0x2b);
        ss.set_type(event.into());
        ss.set_vector(vector);
        ss.set_l(long.into());
        // By its definition.
        let software = matches!(
            event,
            bindings::EVENT_TYPE_SWINT | bindings::EVENT_TYPE_OTHER
        );
        ss.set_swevent(software.into());
        ss.set_nmi((event == bindings::EVENT_TYPE_NMI).into());
        ss
    }

    /// A task that an event by FRED has taken to the kernel from the instruction at `AT`.
    fn fred(kind: (u32, u64), orig_ax: usize, ip: usize) -> Frame {
        Frame {
            fred: Some(slot(kind, true)),
            orig_ax,
            ip,
            flags: FLAGS | TF,
            cx: 1,
            r11: 2,
        }
    }

    /// The same by the IDT.
    fn idt(orig_ax: usize, ip: usize) -> Frame {
        Frame {
            fred: None,
            ..fred(TIMER, orig_ax, ip)
        }
    }

    /// The task behind a `syscall` at `AT` that entered by the IDT with these flags.
    fn idt_syscall(number: usize, flags: usize) -> Frame {
        Frame {
            flags,
            cx: AT + SYSCALL_LEN,
            r11: flags,
            ..idt(number, AT + SYSCALL_LEN)
        }
    }

    /// What start_thread() makes of a frame.
    fn exec(mut frame: Frame) -> Frame {
        if let Some(ss) = &mut frame.fred {
            *ss = bindings::fred_ss::default();
            ss.set_ss(0x2b);
            ss.set_swevent(1);
            ss.set_nmi(1);
        }
        Frame {
            ip: 0x7f00_0000,
            flags: 0x202,
            cx: 0,
            r11: 0,
            ..frame
        }
    }

    fn with_flags(frame: Frame, flags: usize) -> Frame {
        Frame { flags, ..frame }
    }

    /// Each kind of event there is, and each that there is not.
    #[test]
    fn kinds_of_events() {
        for kind in 0..16 {
            for vector in 0..=255 {
                let want = match (kind, vector) {
                    (0, 32..) | (2, 2) => Event::Interrupt,
                    (3, 0..32) | (5, 1) => Event::Exception,
                    (4, _) | (6, 3 | 4) => Event::SoftwareInterrupt,
                    (7, 1) => Event::Syscall,
                    (7, 2) => Event::Exception,
                    _ => Event::Unknown,
                };
                assert_eq!(fred((kind, vector), NONE, AT).event(), want);
            }
        }
        let compat = |kind| Frame {
            fred: Some(slot(kind, false)),
            ..fred(kind, 1, AT)
        };
        assert_eq!(compat(SYSENTER).event(), Event::Syscall);
        assert_eq!(compat(SYSCALL_64).event(), Event::Exception);
        assert_eq!(
            exec(fred(SYSCALL_64, 59, AT + SYSCALL_LEN)).event(),
            Event::Exec
        );
        assert_eq!(idt(NONE, AT).event(), Event::Untold);
        assert_eq!(exec(idt(59, AT + SYSCALL_LEN)).event(), Event::Untold);
    }

    #[test]
    fn system_calls_enter() {
        let at = AT as u64;
        let next = AT + SYSCALL_LEN;
        for kind in [SYSCALL_64, INT_80] {
            assert!(fred(kind, 39, next).entered_from(at));
            // It is restarted.
            assert!(fred(kind, 39, AT).entered_from(at));
            // A return from a signal handler, or exec.
            assert!(fred(kind, NONE, 0x1234).entered_from(at));
            assert!(exec(fred(kind, 59, next)).entered_from(at));
        }
        assert!(idt(39, next).entered_from(at));
        assert!(idt(39, AT).entered_from(at));
        assert!(idt(NONE, 0x1234).entered_from(at));
        assert!(exec(idt(59, next)).entered_from(at));
    }

    #[test]
    fn int_n_enters_if_there_is_a_gate() {
        let at = AT as u64;
        for vector in [3, 4] {
            let kind = (bindings::EVENT_TYPE_SWINT, vector);
            assert!(fred(kind, NONE, AT + 2).entered_from(at));
        }
        let into = (bindings::EVENT_TYPE_SWEXC, 4);
        assert!(fred(into, NONE, AT + 1).entered_from(at));
        // The kernel moves it back and makes a general protection fault of it.
        let none = fred((bindings::EVENT_TYPE_SWINT, 0x81), NONE, AT);
        assert!(!none.entered_from(at));
        assert!(idt(NONE, AT + 2).entered_from(at));
        assert!(!idt(NONE, AT).entered_from(at));
    }

    #[test]
    fn interrupts_and_faults_do_not_enter() {
        let at = AT as u64;
        let nmi = (bindings::EVENT_TYPE_NMI, 2);
        for kind in [TIMER, nmi, PAGE_FAULT] {
            assert!(!fred(kind, NONE, AT).entered_from(at));
            // A restartable sequence is aborted, or a debugger moves the task.
            assert!(!fred(kind, NONE, 0x1234).entered_from(at));
            // A debugger has a say about the number, too.
            assert!(!fred(kind, 39, AT).entered_from(at));
            assert!(!fred(kind, NONE, 0x1234).returned_from_signal(at));
        }
        assert!(!idt(NONE, AT).entered_from(at));
    }

    #[test]
    fn return_from_signal() {
        let at = AT as u64;
        assert!(fred(SYSCALL_64, NONE, 0x1234).returned_from_signal(at));
        // To the very place.
        assert!(fred(SYSCALL_64, NONE, AT).returned_from_signal(at));
        assert!(fred(INT_80, NONE, 0x1234).returned_from_signal(at));
        assert!(idt(NONE, 0x1234).returned_from_signal(at));
        // Not yet, or a debugger made another call of it.
        assert!(!fred(SYSCALL_64, 15, AT + SYSCALL_LEN).returned_from_signal(at));
        assert!(!fred(SYSCALL_64, 39, AT + SYSCALL_LEN).returned_from_signal(at));
        assert!(!idt(15, AT + SYSCALL_LEN).returned_from_signal(at));
        assert!(!idt(39, AT + SYSCALL_LEN).returned_from_signal(at));
        // An interrupt before it.
        assert!(!fred(TIMER, NONE, AT).returned_from_signal(at));
        assert!(!idt(NONE, AT).returned_from_signal(at));
    }

    #[test]
    fn flags_in_r11() {
        let flags = FLAGS | TF;
        let call = idt_syscall(39, flags);
        assert!(call.r11_is_copy_of(flags));
        let restarted = Frame { ip: AT, ..call };
        assert!(restarted.r11_is_copy_of(flags));
        // A child's flags are clean, its r11 is not yet.
        let child = with_flags(call, FLAGS);
        assert!(child.r11_is_copy_of(child.flags | TF));
        assert!(!child.r11_is_copy_of(child.flags));

        // The program's own: of another call, which leaves cx alone, of none, or by FRED.
        assert!(!Frame { cx: 1, ..call }.r11_is_copy_of(flags));
        let orig_ax = NONE;
        assert!(!Frame { orig_ax, ..call }.r11_is_copy_of(flags));
        let ss = Some(slot(SYSCALL_64, true));
        assert!(!Frame { fred: ss, ..call }.r11_is_copy_of(flags));
        assert!(!exec(call).r11_is_copy_of(flags));
    }

    #[test]
    fn traps_at_once() {
        let next = AT + SYSCALL_LEN;
        let all = [
            (SYSCALL_64, true),
            (INT_80, true),
            (TIMER, false),
            (PAGE_FAULT, false),
            ((bindings::EVENT_TYPE_NMI, 2), false),
            ((bindings::EVENT_TYPE_HWEXC, 1), false),
            ((bindings::EVENT_TYPE_PRIV_SWEXC, 1), false),
            ((bindings::EVENT_TYPE_SWEXC, 3), false),
        ];
        for (kind, want) in all {
            let frame = fred(kind, NONE, next);
            assert_eq!(frame.traps_at_once(), want);
            assert!(!with_flags(frame, FLAGS).traps_at_once());
        }
        let started = exec(fred(SYSCALL_64, 59, next));
        assert!(with_flags(started, started.flags | TF).traps_at_once());
        assert!(!started.traps_at_once());
        // As prevent_single_step_upon_eretu() leaves it, and the stepper.
        let mut frame = fred(SYSCALL_64, NONE, 0x1234);
        if let Some(ss) = &mut frame.fred {
            ss.set_swevent(0);
        }
        assert!(!frame.traps_at_once());
        assert_eq!(frame.event(), Event::Syscall);
        assert!(!idt_syscall(39, FLAGS | TF).traps_at_once());
    }

    #[test]
    fn resume_flag_tells_nothing() {
        let at = AT as u64;
        for frame in [
            fred(SYSCALL_64, 39, AT + SYSCALL_LEN),
            fred(PAGE_FAULT, NONE, AT),
            fred(TIMER, NONE, 0x1234),
            idt_syscall(39, FLAGS | TF),
            idt(NONE, AT),
        ] {
            let other = Frame {
                flags: frame.flags | RF,
                r11: frame.r11 | RF,
                ..frame
            };
            assert_eq!(other.event(), frame.event());
            assert_eq!(other.entered_from(at), frame.entered_from(at));
            assert_eq!(other.traps_at_once(), frame.traps_at_once());
            assert_eq!(
                other.r11_is_copy_of(other.flags),
                frame.r11_is_copy_of(frame.flags)
            );
        }
    }

    #[test]
    fn dr6() {
        const STEP: usize = bindings::DR_STEP as usize;
        const BUS_LOCK: usize = bindings::DR_BUS_LOCK as usize;
        let rest = |dr6, is_empty| Rest { dr6, is_empty };

        // `int1`, breakpoints.
        for dr6 in [0, 1, 2, 4, 8, BUS_LOCK] {
            assert!(!is_step(dr6));
            assert!(is_step(dr6 | STEP));
        }
        assert_eq!(without_step(STEP), rest(0, true));
        for hit in [1, 2, 4, 8, 15] {
            assert_eq!(without_step(STEP | hit), rest(0, false));
        }
        assert_eq!(without_step(STEP | BUS_LOCK), rest(BUS_LOCK, false));
        assert_eq!(without_step(STEP | BUS_LOCK | 1), rest(BUS_LOCK, false));
    }
}
