// SPDX-License-Identifier: GPL-2.0

//! A user shadow stack: each return is compared with a copy of its address that the program can't
//! write.

use std::{
    arch::{
        asm,
        global_asm, //
    },
    sync::atomic::{
        AtomicUsize,
        Ordering, //
    },
};

use crate::support::*;

const ARCH_SHSTK_ENABLE: usize = 0x5001;
const ARCH_SHSTK_DISABLE: usize = 0x5002;
const ARCH_SHSTK_SHSTK: usize = 1;

global_asm!(
    ".globl situation_smashed_return",
    "situation_smashed_return:",
    "lea rax, [rip + 2f]",
    "mov [rsp], rax",
    "ret",
    // Where the shadow stack does not let it come.
    "2: mov edi, 3",
    "mov eax, 60",
    "syscall",
    "ud2",
);

extern "C" {
    fn situation_smashed_return() -> !;
}

/// A call of arch_prctl() that returns nowhere: the stack is another one behind it.
#[inline(always)]
fn arch_prctl(option: usize) -> i64 {
    let result;
    // SAFETY: What the options do is up to the caller.
    unsafe {
        asm!("syscall", inlateout("rax") libc::SYS_arch_prctl => result, in("rdi") option,
             in("rsi") ARCH_SHSTK_SHSTK, out("rcx") _, out("r11") _)
    };
    result
}

/// Runs `body` with a shadow stack, if there is one.
#[inline(never)]
fn with_shadow_stack(body: fn() -> Result<(), Problem>) -> Option<Result<(), Problem>> {
    // All calls that are made until it is off again return before that.
    if arch_prctl(ARCH_SHSTK_ENABLE) != 0 {
        return None;
    }
    let result = body();
    arch_prctl(ARCH_SHSTK_DISABLE);
    Some(result)
}

static SIGNALS: AtomicUsize = AtomicUsize::new(0);

extern "C" fn count(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

#[inline(never)]
fn depth(n: u64) -> u64 {
    match n {
        0 => spin(1),
        _ => 1 + std::hint::black_box(depth)(n - 1),
    }
}

fn body() -> Result<(), Problem> {
    const SIGNAL: i32 = libc::SIGUSR1;

    for _ in 0..20 {
        expect("depth", depth(30), 31)?;
        // SAFETY: Sends this thread a handled signal.
        unsafe { libc::syscall(libc::SYS_tkill, libc::syscall(libc::SYS_gettid), SIGNAL) };
        expect("TF", flags() & TF, 0)?;
    }
    expect_exit("a child", in_child(child_work)?, 42)?;
    // SAFETY: The child never returns.
    let smashed = in_child(|| unsafe { situation_smashed_return() })?;
    expect(
        "a return to another place",
        said(wait(smashed)?),
        format!("killed by signal {}", libc::SIGSEGV),
    )
}

pub fn shadow_stack(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGUSR1, count, 0)?;
    let Some(result) = with_shadow_stack(body) else {
        return Err(Problem::Lacking("no user shadow stacks".into()));
    };
    result?;
    let signals = SIGNALS.load(Ordering::Relaxed);
    reaches(count as *const () as usize, signals);
    expect("signals", signals, 20)
}
