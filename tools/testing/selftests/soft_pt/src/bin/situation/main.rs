// SPDX-License-Identifier: GPL-2.0

//! `situation NAME [ARG…]`: programs in which a tracer that steps by `EFLAGS.TF` could show, get
//! lost or do harm. Each checks itself and knows nothing of being traced.
//!
//! Exit status: 0 all is as it must be, 1 something is not (standard output says what), 4 this
//! machine lacks what the situation needs (standard output says what).
//!
//! Standard output must be the same traced and untraced, but for lines `reaches ADDRESS COUNT`:
//! they are for the reader of a trace, which must hold that many branches to that address.

mod children;
mod debugger;
mod dispatch;
mod flags;
mod library;
mod own_trap;
mod probes;
mod protected;
mod segments;
mod shadow;
mod signals;
mod support;

use std::process::ExitCode;

use support::Problem;

type Situation = fn(&[String]) -> Result<(), Problem>;

const SITUATIONS: &[(&str, Situation)] = &[
    ("pushf", flags::pushf),
    ("popf", flags::popf),
    ("iret", flags::iret),
    ("syscall-r11", flags::syscall_r11),
    ("int80", flags::int80),
    ("vsyscall", flags::vsyscall),
    ("vdso", flags::vdso),
    ("mov-ss", flags::mov_ss),
    ("rep", flags::rep),
    ("cpuid", flags::cpuid),
    ("compat-code", flags::compat_code),
    ("stack-loads", segments::stack_loads),
    ("many-stack-loads", segments::many_stack_loads),
    ("lss", segments::lss),
    ("far", segments::far),
    ("segment-base", segments::segment_base),
    ("execute-only", protected::execute_only),
    ("user-dispatch", dispatch::user_dispatch),
    ("shadow-stack", shadow::shadow_stack),
    ("own-tf", own_trap::own_tf),
    ("own-tf-by-iret", own_trap::by_iret),
    ("own-tf-by-sigreturn", own_trap::by_sigreturn),
    ("own-tf-syscall", own_trap::over_syscall),
    ("int3", own_trap::int3),
    ("icebp", own_trap::icebp),
    ("signal-fault", signals::fault),
    ("signal-syscall", signals::syscall),
    ("signal-irq", signals::irq),
    ("signal-nested", signals::nested),
    ("signal-no-return", signals::no_return),
    ("page-faults", signals::page_faults),
    ("syscall-restart", signals::restart),
    ("rseq-abort", signals::rseq_abort),
    ("fork", children::fork),
    ("vfork", children::vfork),
    ("clone", children::clone),
    ("thread", children::thread),
    ("spawn", children::spawn),
    ("exec", children::exec),
    ("dlopen", library::dlopen),
    ("core-dump", children::core_dump),
    ("kill", children::kill),
    ("exit-with-threads", children::exit_with_threads),
    ("migrate", children::migrate),
    ("ping-pong", children::ping_pong),
    ("churn", children::churn),
    ("ptrace-getregs", debugger::getregs),
    ("ptrace-singlestep", debugger::singlestep),
    ("ptrace-detach", debugger::detach),
    ("ptrace-setregs", debugger::setregs),
    ("ptrace-breakpoint", debugger::breakpoint),
    ("uprobe-emulated", probes::uprobe_emulated),
    ("uprobe-stepped", probes::uprobe_stepped),
    ("uprobe-syscall", probes::uprobe_syscall),
    ("uprobe-call", probes::uprobe_call),
    ("uretprobe", probes::uretprobe),
    ("exec-breakpoint", probes::exec_breakpoint),
    ("stop-before-popf", probes::stop_before_popf),
    ("stop-in-handler", probes::stop_in_handler),
    ("stop-before-iret", probes::stop_before_iret),
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_default();
    if name == "--list" {
        for (name, _) in SITUATIONS {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    }
    let Some((_, situation)) = SITUATIONS.iter().find(|(known, _)| *known == name) else {
        eprintln!("usage: situation NAME [ARG…]; situation --list names them");
        return ExitCode::from(64);
    };
    let args: Vec<String> = args.collect();
    match situation(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Problem::Wrong(what)) => {
            println!("{name}: {what}");
            ExitCode::from(1)
        }
        Err(Problem::Lacking(what)) => {
            println!("{name}: {what}");
            ExitCode::from(4)
        }
    }
}
