// SPDX-License-Identifier: GPL-2.0

//! Programs with traps of their own, which must come as often and where they always do.

use std::{
    arch::global_asm,
    sync::atomic::{
        AtomicU32,
        AtomicU64,
        AtomicUsize,
        Ordering, //
    },
};

use crate::support::*;

const MOST: usize = 256;

static TRAPS: AtomicUsize = AtomicUsize::new(0);
static WHERE: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
static CODES: AtomicU64 = AtomicU64::new(0);
static FRAMES_WITH_TF: AtomicU32 = AtomicU32::new(0);
static HANDLERS_WITH_TF: AtomicU32 = AtomicU32::new(0);
/// Whether the handler clears TF in its frame.
static CLEAR: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_trap(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    if flags() & TF != 0 {
        HANDLERS_WITH_TF.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: Called by the kernel.
    let (registers, code) = unsafe { (registers(context), (*info).si_code) };
    let n = TRAPS.fetch_add(1, Ordering::Relaxed);
    if let Some(place) = WHERE.get(n) {
        place.store(registers[libc::REG_RIP as usize] as u64, Ordering::Relaxed);
    }
    CODES.fetch_or(1 << (code & 63), Ordering::Relaxed);
    if saved_flags(registers) & TF != 0 {
        FRAMES_WITH_TF.fetch_add(1, Ordering::Relaxed);
        if CLEAR.load(Ordering::Relaxed) != 0 {
            registers[libc::REG_EFL as usize] &= !(TF as i64);
        }
    }
}

/// Prints what the traps were, and checks how many.
fn report(start: usize, traps: usize) -> Result<(), Problem> {
    let count = TRAPS.swap(0, Ordering::Relaxed);
    let places: Vec<String> = WHERE[..count.min(MOST)]
        .iter()
        .map(|place| {
            format!(
                "{:+}",
                place.load(Ordering::Relaxed).wrapping_sub(start as u64) as i64
            )
        })
        .collect();
    println!(
        "{count} traps at {}, codes {:#x}, {} frames with TF",
        places.join(" "),
        CODES.swap(0, Ordering::Relaxed),
        FRAMES_WITH_TF.swap(0, Ordering::Relaxed),
    );
    reaches(on_trap as usize, count);
    expect("traps", count, traps)?;
    expect(
        "handlers entered with TF",
        HANDLERS_WITH_TF.load(Ordering::Relaxed),
        0,
    )?;
    expect("TF at the end", flags() & TF, 0)
}

global_asm!(
    // Six traps: the nops, pushf, and, and the popf that ends it.
    ".globl situation_own_tf",
    "situation_own_tf:",
    "pushfq",
    "or qword ptr [rsp], 0x100",
    "popfq",
    "nop",
    "nop",
    "nop",
    "pushfq",
    "and qword ptr [rsp], ~0x100",
    "popfq",
    "nop",
    "ret",
    // The same with the frame of iret, a loop, a call and a repeated string in between.
    ".globl situation_own_tf_iret",
    "situation_own_tf_iret:",
    "mov r8, rsp",
    "mov eax, ss",
    "push rax",
    "push r8",
    "pushfq",
    "or qword ptr [rsp], 0x100",
    "mov eax, cs",
    "push rax",
    "lea rax, [rip + 2f]",
    "push rax",
    "iretq",
    "ud2",
    "2:",
    "mov ecx, 3",
    "3: loop 3b",
    "call 4f",
    "mov r8, rsp",
    "mov eax, ss",
    "push rax",
    "push r8",
    "pushfq",
    "and qword ptr [rsp], ~0x100",
    "mov eax, cs",
    "push rax",
    "lea rax, [rip + 5f]",
    "push rax",
    "iretq",
    "ud2",
    "4: ret",
    "5: ret",
    ".globl situation_own_tf_syscall",
    "situation_own_tf_syscall:",
    "pushfq",
    "or qword ptr [rsp], 0x100",
    "popfq",
    "mov eax, 39",
    "syscall",
    "nop",
    "pushfq",
    "and qword ptr [rsp], ~0x100",
    "popfq",
    "nop",
    "ret",
    ".globl situation_int3",
    "situation_int3:",
    "int3",
    "nop",
    ".byte 0xcd, 0x03", // int $3 in two bytes
    "nop",
    "ret",
    ".globl situation_icebp",
    "situation_icebp:",
    ".byte 0xf1",
    "nop",
    "ret",
);

extern "C" {
    fn situation_own_tf();
    fn situation_own_tf_iret();
    fn situation_own_tf_syscall();
    fn situation_int3();
    fn situation_icebp();
}

type Code = unsafe extern "C" fn();

fn run(code: Code, rounds: usize, traps: usize) -> Result<(), Problem> {
    handle(libc::SIGTRAP, on_trap, 0)?;
    for _ in 0..rounds {
        // SAFETY: The code keeps to the calling convention; its traps are handled.
        unsafe { code() };
        report(code as usize, traps)?;
    }
    Ok(())
}

/// Steps itself by `popf`.
pub fn own_tf(_: &[String]) -> Result<(), Problem> {
    run(situation_own_tf, 5, 6)
}

/// Steps itself by `iret`.
pub fn by_iret(_: &[String]) -> Result<(), Problem> {
    run(situation_own_tf_iret, 5, 17)
}

/// Steps itself over a system call.
pub fn over_syscall(_: &[String]) -> Result<(), Problem> {
    // One for mov, one for the call and the nop after it (the kernel returns with TF set, and the
    // trap follows the next instruction), one each for pushf, and, popf. With FRED there is one
    // right behind the call too.
    let traps = if enters_by_fred()? { 6 } else { 5 };
    run(situation_own_tf_syscall, 5, traps)
}

extern "C" fn set_trap_flag(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: Called by the kernel.
    let registers = unsafe { registers(context) };
    if saved_flags(registers) & TF != 0 {
        FRAMES_WITH_TF.fetch_add(1000, Ordering::Relaxed);
    }
    registers[libc::REG_EFL as usize] |= TF as i64;
}

/// A handler that sets TF in its frame: one instruction later the program traps.
pub fn by_sigreturn(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGTRAP, on_trap, 0)?;
    handle(libc::SIGUSR1, set_trap_flag, 0)?;
    CLEAR.store(1, Ordering::Relaxed);
    for _ in 0..5 {
        // SAFETY: Sends this thread a handled signal.
        unsafe {
            libc::syscall(
                libc::SYS_tkill,
                libc::syscall(libc::SYS_gettid),
                libc::SIGUSR1,
            );
        }
        // Where in the C library the trap comes is not ours to say.
        WHERE[0].store(0, Ordering::Relaxed);
        report(0, 1)?;
    }
    Ok(())
}

pub fn int3(_: &[String]) -> Result<(), Problem> {
    run(situation_int3, 10, 2)
}

pub fn icebp(_: &[String]) -> Result<(), Problem> {
    run(situation_icebp, 10, 1)
}
