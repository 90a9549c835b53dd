// SPDX-License-Identifier: GPL-2.0

//! A debugger and its child, both perhaps traced: what the debugger sees and gets must be as ever.

use std::{
    arch::global_asm,
    mem,
    sync::atomic::Ordering, //
};

use crate::support::*;

fn ptrace(request: libc::c_uint, pid: i32, address: usize, data: usize) -> Result<i64, Problem> {
    // SAFETY: The callers pass numbers, or the address of a value that the request writes.
    let ret = unsafe { libc::ptrace(request, pid, address, data) };
    os(&format!("ptrace request {request:#x}"), ret)
}

fn registers_of(pid: i32) -> Result<libc::user_regs_struct, Problem> {
    // SAFETY: All zeros is a value of this plain data.
    let mut regs: libc::user_regs_struct = unsafe { mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, pid, 0, (&raw mut regs) as usize)?;
    Ok(regs)
}

fn expect_stop(pid: i32, signal: i32) -> Result<(), Problem> {
    expect_stopped(wait(pid)?, signal)
}

fn expect_stopped(status: i32, signal: i32) -> Result<(), Problem> {
    expect("child", said(status), format!("stopped by signal {signal}"))
}

/// Stops a running child again and again and looks at its flags.
pub fn getregs(_: &[String]) -> Result<(), Problem> {
    let shared = Shared::new()?;
    let child = in_child(|| {
        while shared.word().load(Ordering::Acquire) == 0 {
            spin(100);
        }
        child_work()
    })?;
    ptrace(
        libc::PTRACE_SEIZE,
        child,
        0,
        libc::PTRACE_O_EXITKILL as usize,
    )?;
    for _ in 0..50 {
        ptrace(libc::PTRACE_INTERRUPT, child, 0, 0)?;
        expect_stop(child, libc::SIGTRAP)?;
        expect("TF in PTRACE_GETREGS", registers_of(child)?.eflags & TF, 0)?;
        let offset = mem::offset_of!(libc::user_regs_struct, eflags);
        let flags = ptrace(libc::PTRACE_PEEKUSER, child, offset, 0)? as u64;
        expect("TF in PTRACE_PEEKUSER", flags & TF, 0)?;
        ptrace(libc::PTRACE_CONT, child, 0, 0)?;
    }
    ptrace(libc::PTRACE_INTERRUPT, child, 0, 0)?;
    expect_stop(child, libc::SIGTRAP)?;
    ptrace(libc::PTRACE_DETACH, child, 0, 0)?;
    shared.word().store(1, Ordering::Release);
    expect_exit("child", child, 42)
}

global_asm!(
    // What the debugger steps over: both ways of a branch, a loop, a call, a system call, a string.
    ".globl situation_stepped",
    "situation_stepped:",
    "xor eax, eax",
    "cmp eax, 1",
    "je 2f",
    "jne 3f",
    "2: ud2",
    "3: mov ecx, 4",
    "4: loop 4b",
    "call 6f",
    "mov eax, 39",
    "syscall",
    "lea rsi, [rsp - 64]",
    "lea rdi, [rsp - 96]",
    "mov ecx, 2",
    "rep movsb",
    "lea rax, [rip + 5f]",
    "jmp rax",
    "ud2",
    "5: mov eax, 42",
    ".globl situation_stepped_end",
    "situation_stepped_end:",
    "ret",
    "6: ret",
    ".globl situation_site",
    "situation_site:",
    "inc edi",
    "mov eax, edi",
    "ret",
);

extern "C" {
    fn situation_stepped() -> i32;
    fn situation_stepped_end();
    fn situation_site(n: i32) -> i32;
}

/// A child that waits for its debugger and then does what is stepped.
fn stopped_child() -> Result<i32, Problem> {
    let child = in_child(|| {
        // SAFETY: The stop is what the debugger waits for; the code keeps the calling convention.
        unsafe {
            if libc::ptrace(libc::PTRACE_TRACEME, 0, 0usize, 0usize) < 0 {
                return 1;
            }
            libc::raise(libc::SIGSTOP);
            if situation_stepped() != 42 {
                return 2;
            }
        }
        child_work()
    })?;
    expect_stop(child, libc::SIGSTOP)?;
    Ok(child)
}

/// Steps until the child is at an address; gives the addresses on the way, the last included.
fn step_to(child: i32, address: usize) -> Result<Vec<u64>, Problem> {
    let mut list = Vec::new();
    loop {
        ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0)?;
        expect_stop(child, libc::SIGTRAP)?;
        let regs = registers_of(child)?;
        expect(
            "TF in PTRACE_GETREGS of a stepped child",
            regs.eflags & TF,
            0,
        )?;
        list.push(regs.rip);
        if regs.rip == address as u64 {
            return Ok(list);
        }
        if list.len() > 100_000 {
            return Err(Problem::Wrong(format!(
                "{address:#x} is never reached by steps"
            )));
        }
    }
}

/// Steps a child: each instruction once.
pub fn singlestep(_: &[String]) -> Result<(), Problem> {
    let child = stopped_child()?;
    step_to(child, situation_stepped as usize)?;
    let list = step_to(child, situation_stepped_end as usize)?;
    let offsets: Vec<String> = list
        .iter()
        .map(|ip| {
            format!(
                "{:+}",
                ip.wrapping_sub(situation_stepped as usize as u64) as i64
            )
        })
        .collect();
    println!("steps: {}", offsets.join(" "));
    ptrace(libc::PTRACE_CONT, child, 0, 0)?;
    expect_exit("child", child, 42)
}

/// Leaves a child alone in the middle of stepping it.
pub fn detach(_: &[String]) -> Result<(), Problem> {
    for steps in [1, 2, 5] {
        let child = stopped_child()?;
        step_to(child, situation_stepped as usize)?;
        for _ in 0..steps {
            ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0)?;
            expect_stop(child, libc::SIGTRAP)?;
        }
        ptrace(libc::PTRACE_DETACH, child, 0, 0)?;
        expect_exit("child", child, 42)?;
    }
    Ok(())
}

extern "C" fn away() -> ! {
    // SAFETY: Ends the child.
    unsafe { libc::_exit(43) }
}

/// Sends a child elsewhere.
pub fn setregs(_: &[String]) -> Result<(), Problem> {
    let child = stopped_child()?;
    step_to(child, situation_stepped as usize)?;
    let mut regs = registers_of(child)?;
    regs.rip = away as usize as u64;
    regs.rsp = (regs.rsp & !15) - 8;
    ptrace(libc::PTRACE_SETREGS, child, 0, (&raw const regs) as usize)?;
    ptrace(libc::PTRACE_CONT, child, 0, 0)?;
    expect_exit("child", child, 43)
}

/// An execution breakpoint in a debug register.
pub fn breakpoint(_: &[String]) -> Result<(), Problem> {
    const CALLS: i32 = 300;
    let child = in_child(|| {
        // SAFETY: The stop is what the debugger waits for; the code keeps the calling convention.
        unsafe {
            if libc::ptrace(libc::PTRACE_TRACEME, 0, 0usize, 0usize) < 0 {
                return 1;
            }
            libc::raise(libc::SIGSTOP);
            let mut n = 0;
            for _ in 0..CALLS {
                n = situation_site(n);
            }
            if n != CALLS {
                return 2;
            }
        }
        child_work()
    })?;
    expect_stop(child, libc::SIGSTOP)?;
    let register = |n: usize| mem::offset_of!(libc::user, u_debugreg) + 8 * n;
    ptrace(
        libc::PTRACE_POKEUSER,
        child,
        register(0),
        situation_site as usize,
    )?;
    ptrace(libc::PTRACE_POKEUSER, child, register(7), 1)?;
    let mut hits = 0;
    let end = loop {
        ptrace(libc::PTRACE_CONT, child, 0, 0)?;
        let status = wait(child)?;
        if !libc::WIFSTOPPED(status) {
            break status;
        }
        expect_stopped(status, libc::SIGTRAP)?;
        expect(
            "place of the stop",
            registers_of(child)?.rip,
            situation_site as usize as u64,
        )?;
        hits += 1;
    };
    reaches(situation_site as usize, CALLS as usize);
    expect("child", said(end), "exit 42".to_owned())?;
    expect_hits(hits, CALLS as u64)
}
