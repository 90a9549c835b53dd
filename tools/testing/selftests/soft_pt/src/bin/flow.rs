// SPDX-License-Identifier: GPL-2.0

//! `flow [ROUNDS]`: a program that runs the same instructions every time.
//!
//! It is the reference of the trace oracle: stepped by ptrace it gives a list of instruction
//! addresses, and a decoded trace has to give the same list. So it is freestanding (no C runtime,
//! no vDSO, no allocator), makes only system calls that take no decision by time, and its two
//! threads wait for each other by reads that end the same way however long they took.
//!
//! The flow is chosen for what packets have to express: conditional branches both ways, loops of
//! one instruction, calls and returns deeper than the 64 entries of a decoder's return stack,
//! returns that do not go back to their call, a call that only reads the instruction pointer,
//! indirect calls and jumps by register and memory, far returns, `rep` strings, system calls,
//! `mov %ss`, and signal handlers entered from a system call and from a fault.

#![cfg_attr(not(test), no_std)]
#![no_main]

use core::{
    arch::{
        asm,
        global_asm, //
    },
    hint::black_box,
    sync::atomic::{
        AtomicU64,
        Ordering, //
    },
};

const DEFAULT_ROUNDS: u64 = 8;

global_asm!(
    ".globl _start",
    "_start:",
    "xor %ebp, %ebp",
    "mov %rsp, %rdi",
    "and $-16, %rsp",
    "call {main}",
    "ud2",
    main = sym main,
    options(att_syntax),
);

// A handler returns through this, because the kernel offers x86-64 no return path of its own.
global_asm!(
    ".globl flow_restorer",
    ".type flow_restorer, @function",
    "flow_restorer:",
    "mov $15, %eax", // rt_sigreturn
    "syscall",
    ".size flow_restorer, . - flow_restorer",
    options(att_syntax),
);

// flow_clone(flags, stack_top, entry): the new thread calls `entry` and never returns.
global_asm!(
    ".globl flow_clone",
    "flow_clone:",
    "mov %rdx, %r8",
    "xor %edx, %edx",
    "xor %r10d, %r10d",
    "mov $56, %eax", // clone
    "syscall",
    "test %rax, %rax",
    "jz 1f",
    "ret",
    "1:",
    "xor %ebp, %ebp",
    "call *%r8",
    "ud2",
    options(att_syntax),
);

// The parts that a compiler would not write, as one function: takes and returns a number.
global_asm!(
    ".globl flow_oddities",
    ".type flow_oddities, @function",
    "flow_oddities:",
    "push %rbx",
    "mov %rdi, %rbx",
    // A loop of a single instruction, and one entered with nothing to do.
    "mov $5, %ecx",
    "1: loop 1b",
    "xor %ecx, %ecx",
    "jrcxz 2f",
    "ud2",
    "2:",
    // A call that is not returned from.
    "call 3f",
    "3: pop %rax",
    "lea 3b(%rip), %rdx",
    "sub %rdx, %rax",
    "add %rax, %rbx",
    // A return without a call.
    "lea 4f(%rip), %rax",
    "push %rax",
    "ret",
    "ud2",
    "4:",
    // A callee that leaves by its caller's caller's address.
    "call 5f",
    "6:",
    "inc %rbx",
    "jmp 7f",
    "5:",
    "call 8f",
    "ud2",
    "8:",
    "add $8, %rsp",
    "ret",
    "7:",
    // A return that is sent one instruction further than the call.
    "call 9f",
    "ud2",
    "inc %rbx",
    "jmp 10f",
    "9:",
    "addq $2, (%rsp)",
    "ret",
    "10:",
    // A return that drops arguments.
    "push %rbx",
    "push %rbx",
    "call 11f",
    "jmp 12f",
    "11: ret $16",
    "12:",
    // A far return to the same code segment.
    "mov %cs, %eax",
    "push %rax",
    "lea 13f(%rip), %rax",
    "push %rax",
    "lretq",
    "ud2",
    "13:",
    // Indirect jumps by register and by memory.
    "lea 14f(%rip), %rax",
    "jmp *%rax",
    "ud2",
    "14:",
    "lea 15f(%rip), %rax",
    "push %rax",
    "jmp *(%rsp)",
    "ud2",
    "15:",
    "pop %rax",
    // The trap after a write to the stack segment comes one instruction late.
    "mov %ss, %eax",
    "mov %eax, %ss",
    "inc %rbx",
    "mov %eax, %ss",
    "jmp 16f",
    "ud2",
    "16:",
    // A branch to the instruction that follows it, taken and not taken.
    "cmp %eax, %eax",
    "je 17f",
    "17:",
    "jne 18f",
    "18:",
    "jmp 19f",
    "19:",
    "mov %rbx, %rax",
    "pop %rbx",
    "ret",
    ".size flow_oddities, . - flow_oddities",
    options(att_syntax),
);

extern "C" {
    fn flow_restorer();
    fn flow_clone(flags: u64, stack_top: *mut u8, entry: extern "C" fn() -> !) -> i64;
    fn flow_oddities(n: u64) -> u64;
}

const SYS_READ: u64 = 0;
const SYS_WRITE: u64 = 1;
const SYS_CLOSE: u64 = 3;
const SYS_RT_SIGACTION: u64 = 13;
const SYS_PIPE: u64 = 22;
const SYS_GETPID: u64 = 39;
const SYS_EXIT: u64 = 60;
const SYS_GETPPID: u64 = 110;
const SYS_GETTID: u64 = 186;
const SYS_TGKILL: u64 = 234;
const SYS_EXIT_GROUP: u64 = 231;

const SIGILL: u64 = 4;
const SIGUSR1: u64 = 10;
const SA_SIGINFO: u64 = 0x4;
const SA_RESTORER: u64 = 0x0400_0000;

/// Offset of the saved instruction pointer in `ucontext_t`.
const UC_RIP: usize = 40 + 16 * 8;

#[inline(always)]
fn syscall4(nr: u64, a: u64, b: u64, c: u64, d: u64) -> i64 {
    let ret;
    // SAFETY: The callers pass system calls that touch only memory handed to them.
    unsafe {
        asm!("syscall", inlateout("rax") nr => ret, in("rdi") a, in("rsi") b, in("rdx") c,
             in("r10") d, out("rcx") _, out("r11") _)
    };
    ret
}

fn syscall(nr: u64, a: u64, b: u64, c: u64) -> i64 {
    syscall4(nr, a, b, c, 0)
}

fn exit_group(code: u64) -> ! {
    syscall(SYS_EXIT_GROUP, code, 0, 0);
    loop {
        core::hint::spin_loop();
    }
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit_group(101)
}

fn check(ok: bool, code: u64) {
    if !ok {
        exit_group(code);
    }
}

#[repr(C)]
struct KernelSigaction {
    handler: u64,
    flags: u64,
    restorer: u64,
    mask: u64,
}

fn handle(signal: u64, handler: extern "C" fn(i32, *mut u8, *mut u8)) {
    let action = KernelSigaction {
        handler: handler as usize as u64,
        flags: SA_SIGINFO | SA_RESTORER,
        restorer: flow_restorer as usize as u64,
        mask: 0,
    };
    let ret = syscall4(SYS_RT_SIGACTION, signal, &raw const action as u64, 0, 8);
    check(ret == 0, 2);
}

static SIGNALS: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_usr1(_: i32, _: *mut u8, _: *mut u8) {
    SIGNALS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn on_ill(_: i32, _: *mut u8, context: *mut u8) {
    SIGNALS.fetch_add(0x100, Ordering::Relaxed);
    // SAFETY: The kernel passes a `ucontext_t`; the program goes on after the two bytes of `ud2`.
    unsafe { *context.add(UC_RIP).cast::<u64>() += 2 };
}

fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// Branches that go both ways by data.
#[inline(never)]
fn branches(seed: &mut u64, count: u64) -> u64 {
    let mut sum = 0u64;
    for _ in 0..count {
        let bits = next(seed);
        if bits & 1 != 0 {
            // SAFETY: No effect; keeps the two ways from becoming a conditional move.
            unsafe { asm!("nop", options(nomem, nostack)) };
            sum = sum.wrapping_add(bits >> 8);
        } else if bits & 2 != 0 {
            // SAFETY: As above.
            unsafe { asm!("nop", "nop", options(nomem, nostack)) };
            sum ^= bits;
        }
        sum = match (bits >> 4) & 7 {
            0 => sum.rotate_left(3),
            1 => sum.wrapping_mul(5),
            2 => {
                // SAFETY: As above.
                unsafe { asm!("pause", options(nomem, nostack)) };
                sum + 1
            }
            3 => sum ^ 0x55,
            4 => sum.swap_bytes(),
            5 => sum.wrapping_sub(bits),
            6 => !sum,
            _ => sum,
        };
    }
    sum
}

#[inline(never)]
fn recurse(depth: u64, sum: u64) -> u64 {
    if depth == 0 {
        return black_box(sum);
    }
    recurse(depth - 1, black_box(sum.rotate_left(1))) ^ depth
}

#[inline(never)]
fn fibonacci(n: u64) -> u64 {
    if n < 2 {
        return n;
    }
    fibonacci(black_box(n - 1)) + fibonacci(black_box(n - 2))
}

#[inline(never)]
fn double(n: u64) -> u64 {
    n.wrapping_mul(2)
}

#[inline(never)]
fn add_seven(n: u64) -> u64 {
    n.wrapping_add(7)
}

#[inline(never)]
fn odd_or_even(n: u64) -> u64 {
    if black_box(n) & 1 != 0 {
        add_seven(n)
    } else {
        double(n)
    }
}

static TABLE: [fn(u64) -> u64; 3] = [double, add_seven, odd_or_even];

#[inline(never)]
fn indirect(seed: &mut u64, count: u64) -> u64 {
    let mut n = 1;
    for _ in 0..count {
        let f = black_box(&TABLE)[(next(seed) % 3) as usize];
        n = f(n);
    }
    n
}

#[inline(never)]
fn strings() -> u64 {
    let source = *b"0123456789abcdefghijklmnopqrstuv";
    let mut copy = [0u8; 32];
    let left: u64;
    // SAFETY: The counts stay within the two arrays.
    unsafe {
        asm!("rep movsb", inout("rcx") 32u64 => _, inout("rsi") source.as_ptr() => _,
             inout("rdi") copy.as_mut_ptr() => _);
        asm!("rep movsq", inout("rcx") 4u64 => _, inout("rsi") source.as_ptr() => _,
             inout("rdi") copy.as_mut_ptr() => _);
        // Nothing to do, and exactly one to do.
        asm!("rep movsb", inout("rcx") 0u64 => _, inout("rsi") source.as_ptr() => _,
             inout("rdi") copy.as_mut_ptr() => _);
        asm!("rep stosb", inout("rcx") 1u64 => _, in("al") b'!', inout("rdi") copy.as_mut_ptr() => _);
        asm!("repne scasb", inout("rcx") 32u64 => left, in("al") b'f',
             inout("rdi") copy.as_ptr() => _);
    }
    left + copy[0] as u64
}

#[inline(never)]
fn syscalls() -> u64 {
    let pid = syscall(SYS_GETPID, 0, 0, 0);
    check(pid > 0, 3);
    check(syscall(SYS_CLOSE, 1 << 20, 0, 0) == -9, 4);
    check(syscall(SYS_GETPPID, 0, 0, 0) > 0, 5);
    1
}

#[inline(never)]
fn signals() -> u64 {
    let pid = syscall(SYS_GETPID, 0, 0, 0) as u64;
    let tid = syscall(SYS_GETTID, 0, 0, 0) as u64;
    check(syscall(SYS_TGKILL, pid, tid, SIGUSR1) == 0, 6);
    // SAFETY: The handler of SIGILL steps over the instruction.
    unsafe { asm!("ud2") };
    1
}

#[inline(never)]
fn work(rounds: u64, mut seed: u64) -> u64 {
    let mut sum = 0u64;
    for round in 0..rounds {
        sum = sum.rotate_left(7) ^ branches(&mut seed, 40);
        sum ^= recurse(100, round);
        sum = sum.wrapping_add(fibonacci(8));
        sum ^= indirect(&mut seed, 25);
        sum = sum.wrapping_add(strings());
        sum = sum.wrapping_add(syscalls());
        sum = sum.wrapping_add(signals());
        // SAFETY: Takes and returns a number and keeps the calling convention.
        sum = sum.wrapping_add(unsafe { flow_oddities(round) });
    }
    sum
}

const STACK: usize = 64 << 10;

#[repr(C, align(16))]
struct Stack([u8; STACK]);

static mut THREAD_STACK: Stack = Stack([0; STACK]);
static ROUNDS: AtomicU64 = AtomicU64::new(DEFAULT_ROUNDS);
static THREAD_SUM: AtomicU64 = AtomicU64::new(0);
static TO_THREAD: AtomicU64 = AtomicU64::new(0);

extern "C" fn thread() -> ! {
    // The first thread writes after it has started this one, so this read always gets its byte.
    let mut byte = 0u8;
    let fd = TO_THREAD.load(Ordering::Relaxed);
    check(syscall(SYS_READ, fd, &raw mut byte as u64, 1) == 1, 7);
    let sum = work(ROUNDS.load(Ordering::Relaxed), 0x9e37_79b9_7f4a_7c15);
    THREAD_SUM.store(sum, Ordering::Relaxed);
    syscall(SYS_EXIT, 0, 0, 0);
    exit_group(8)
}

fn pipe() -> (u64, u64) {
    let mut fds = [0i32; 2];
    check(syscall(SYS_PIPE, &raw mut fds as u64, 0, 0) == 0, 9);
    (fds[0] as u64, fds[1] as u64)
}

/// Starts the second thread with a file table of its own: the pipe whose writing end only it
/// holds then reads as ended exactly when the thread is gone.
fn with_thread(rounds: u64) -> u64 {
    const CLONE_VM: u64 = 0x100;
    const CLONE_FS: u64 = 0x200;
    const CLONE_SIGHAND: u64 = 0x800;
    const CLONE_THREAD: u64 = 0x1_0000;

    let (go_read, go_write) = pipe();
    let (end_read, end_write) = pipe();
    TO_THREAD.store(go_read, Ordering::Relaxed);
    ROUNDS.store(rounds, Ordering::Relaxed);

    // SAFETY: The stack is used by the one thread started here.
    let tid = unsafe {
        let top = (&raw mut THREAD_STACK).cast::<u8>().add(STACK);
        flow_clone(
            CLONE_VM | CLONE_FS | CLONE_SIGHAND | CLONE_THREAD,
            top,
            thread,
        )
    };
    check(tid > 0, 10);
    check(syscall(SYS_CLOSE, end_write, 0, 0) == 0, 11);
    check(
        syscall(SYS_WRITE, go_write, b"!".as_ptr() as u64, 1) == 1,
        12,
    );

    let sum = work(rounds, 0x2545_f491_4f6c_dd1d);

    let mut byte = 0u8;
    check(
        syscall(SYS_READ, end_read, &raw mut byte as u64, 1) == 0,
        13,
    );
    sum ^ THREAD_SUM.load(Ordering::Relaxed)
}

/// Reads the count of rounds; any other first argument is an error.
///
/// # Safety
///
/// `stack` is the stack pointer a new program starts with.
unsafe fn rounds(stack: *const u64) -> u64 {
    // SAFETY: By the caller, `stack` holds argc and then argv.
    unsafe {
        if *stack < 2 {
            return DEFAULT_ROUNDS;
        }
        let mut text = *stack.add(2) as *const u8;
        let mut n = 0u64;
        while *text != 0 {
            check((*text).is_ascii_digit(), 64);
            n = n.wrapping_mul(10).wrapping_add((*text - b'0') as u64);
            text = text.add(1);
        }
        n
    }
}

extern "C" fn main(stack: *const u64) -> ! {
    // SAFETY: `_start` passes the initial stack pointer.
    let rounds = unsafe { rounds(stack) };
    handle(SIGUSR1, on_usr1);
    handle(SIGILL, on_ill);

    let sum = with_thread(rounds);
    check(SIGNALS.load(Ordering::Relaxed) == 2 * rounds * 0x101, 14);

    let mut line = [0u8; 17];
    for (i, digit) in line.iter_mut().take(16).enumerate() {
        let nibble = (sum >> (60 - 4 * i)) & 15;
        *digit = if nibble < 10 {
            b'0' + nibble as u8
        } else {
            b'a' + nibble as u8 - 10
        };
    }
    line[16] = b'\n';
    check(syscall(SYS_WRITE, 1, line.as_ptr() as u64, 17) == 17, 15);
    exit_group(0)
}
