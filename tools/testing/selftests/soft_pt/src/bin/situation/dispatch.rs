// SPDX-License-Identifier: GPL-2.0

//! System calls that come back to the program as signals, as emulators of other systems have it.

use std::{
    arch::asm,
    sync::atomic::{
        AtomicU32,
        AtomicU8,
        AtomicUsize,
        Ordering, //
    },
};

use crate::support::*;

/// What the selector tells the kernel to do.
const ALLOW: u8 = 0;
const BLOCK: u8 = 1;

static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);
static CALLS: AtomicUsize = AtomicUsize::new(0);
static WITH_TF: AtomicU32 = AtomicU32::new(0);

/// The result of a system call that is carried out here.
const RESULT: i64 = 1 << 20;

extern "C" fn carry_out(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    SELECTOR.store(ALLOW, Ordering::Relaxed);
    // SAFETY: Called by the kernel.
    let registers = unsafe { registers(context) };
    let r11 = registers[libc::REG_R11 as usize] as u64;
    if (saved_flags(registers) | r11 | flags()) & TF != 0 {
        WITH_TF.fetch_add(1, Ordering::Relaxed);
    }
    CALLS.fetch_add(1, Ordering::Relaxed);
    registers[libc::REG_RAX as usize] += RESULT;
}

/// Each system call is blocked, and carried out by the handler of its signal.
pub fn user_dispatch(_: &[String]) -> Result<(), Problem> {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    const PR_SYS_DISPATCH_ON: usize = 1;

    handle(libc::SIGSYS, carry_out, 0)?;
    // SAFETY: No code is excepted, and the selector is there for as long as the program is.
    let ret = unsafe {
        libc::prctl(
            PR_SET_SYSCALL_USER_DISPATCH,
            PR_SYS_DISPATCH_ON,
            0usize,
            0usize,
            SELECTOR.as_ptr(),
        )
    };
    if ret != 0 {
        return Err(Problem::Lacking("no system calls by user dispatch".into()));
    }
    const ROUNDS: i64 = 50;
    for number in 0..ROUNDS {
        SELECTOR.store(BLOCK, Ordering::Relaxed);
        let (result, r11): (i64, u64);
        // SAFETY: The call isn't made.
        unsafe { asm!("syscall", inlateout("rax") number => result, out("rcx") _, out("r11") r11) };
        expect("result of the handler", result, number + RESULT)?;
        expect("TF in r11", r11 & TF, 0)?;
        // One that is let through.
        let pid: i64;
        // SAFETY: getpid() touches no memory.
        unsafe {
            asm!("syscall", inlateout("rax") libc::SYS_getpid => pid, out("rcx") _, out("r11") _)
        };
        expect("getpid", pid, i64::from(std::process::id()))?;
    }
    let calls = CALLS.load(Ordering::Relaxed);
    reaches(carry_out as *const () as usize, calls);
    expect("calls", calls as i64, ROUNDS)?;
    expect("TF in a frame", WITH_TF.load(Ordering::Relaxed), 0)
}
