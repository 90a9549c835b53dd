// SPDX-License-Identifier: GPL-2.0

//! Signals of every origin: their frames must hold the program's flags, and both ways through them
//! must leave the program's flow as it is.

use std::{
    arch::{
        asm,
        global_asm, //
    },
    ptr,
    sync::atomic::{
        AtomicU32,
        AtomicU64,
        AtomicUsize,
        Ordering, //
    },
};

use crate::support::*;

static COUNT: AtomicUsize = AtomicUsize::new(0);
static FRAMES_WITH_TF: AtomicU32 = AtomicU32::new(0);
static HANDLERS_WITH_TF: AtomicU32 = AtomicU32::new(0);

fn note(context: *mut libc::c_void) -> &'static mut [i64; 23] {
    // SAFETY: Passed on by the handlers, which use it until they return.
    let registers = unsafe { registers(context) };
    if saved_flags(registers) & TF != 0 {
        FRAMES_WITH_TF.fetch_add(1, Ordering::Relaxed);
    }
    if flags() & TF != 0 {
        HANDLERS_WITH_TF.fetch_add(1, Ordering::Relaxed);
    }
    COUNT.fetch_add(1, Ordering::Relaxed);
    registers
}

fn result(handler: usize) -> Result<usize, Problem> {
    let count = COUNT.load(Ordering::Relaxed);
    reaches(handler, count);
    expect("frames with TF", FRAMES_WITH_TF.load(Ordering::Relaxed), 0)?;
    expect(
        "handlers entered with TF",
        HANDLERS_WITH_TF.load(Ordering::Relaxed),
        0,
    )?;
    expect("TF at the end", flags() & TF, 0)?;
    Ok(count)
}

fn send(signal: i32) {
    // SAFETY: Sends this thread a handled signal.
    unsafe { libc::syscall(libc::SYS_tkill, libc::syscall(libc::SYS_gettid), signal) };
}

/// Length of the faulting instructions below.
const FAULTING: i64 = 2;

extern "C" fn skip_instruction(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    note(context)[libc::REG_RIP as usize] += FAULTING;
}

/// Faults that the handler steps over: an undefined instruction and a bad access.
pub fn fault(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGILL, skip_instruction, 0)?;
    handle(libc::SIGSEGV, skip_instruction, 0)?;
    handle(libc::SIGFPE, skip_instruction, 0)?;
    for _ in 0..20 {
        // SAFETY: The handler steps over the two bytes that each faulting instruction has.
        unsafe {
            asm!("ud2", options(nomem, nostack));
            // mov al, [rcx] at an address that is never mapped
            asm!(".byte 0x8a, 0x01", in("rcx") 8usize, out("al") _);
            // div ecx by zero
            asm!(".byte 0xf7, 0xf1", in("ecx") 0, inout("eax") 1 => _, inout("edx") 0 => _);
        }
    }
    expect("signals", result(skip_instruction as usize)?, 60)
}

extern "C" fn count(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    note(context);
}

/// Signals that arrive at the end of the system call that sends them.
pub fn syscall(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGUSR1, count, 0)?;
    for _ in 0..100 {
        send(libc::SIGUSR1);
    }
    expect("signals", result(count as usize)?, 100)
}

fn timer(first_us: i64, interval_us: i64) -> Result<(), Problem> {
    let time = |us| libc::timeval {
        tv_sec: us / 1_000_000,
        tv_usec: us % 1_000_000,
    };
    let value = libc::itimerval {
        it_interval: time(interval_us),
        it_value: time(first_us),
    };
    // SAFETY: Reads one itimerval.
    let ret = unsafe { libc::setitimer(libc::ITIMER_REAL, &value, ptr::null_mut()) };
    os("setitimer", ret.into()).map(drop)
}

/// Signals that a timer interrupt raises anywhere in the program's own code.
pub fn irq(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGALRM, count, 0)?;
    timer(2000, 2000)?;
    while COUNT.load(Ordering::Relaxed) < 30 {
        expect("rounds", spin(1000), 1000)?;
        expect("TF", flags() & TF, 0)?;
    }
    timer(0, 0)?;
    result(count as usize).map(drop)
}

extern "C" fn raise_another(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    note(context);
    send(libc::SIGUSR2);
}

/// A signal sent and handled within a handler, one on a stack of its own.
pub fn nested(_: &[String]) -> Result<(), Problem> {
    let mut stack = vec![0u8; 64 << 10];
    let alternative = libc::stack_t {
        ss_sp: stack.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: stack.len(),
    };
    // SAFETY: The stack lives until after the last signal.
    let ret = unsafe { libc::sigaltstack(&alternative, ptr::null_mut()) };
    os("sigaltstack", ret.into())?;
    handle(libc::SIGUSR1, raise_another, 0)?;
    handle(libc::SIGUSR2, count, libc::SA_ONSTACK)?;
    for _ in 0..50 {
        send(libc::SIGUSR1);
    }
    reaches(raise_another as usize, 50);
    expect("signals", COUNT.load(Ordering::Relaxed), 100)?;
    COUNT.store(50, Ordering::Relaxed);
    result(count as usize)?;
    let none = libc::stack_t {
        ss_sp: ptr::null_mut(),
        ss_flags: libc::SS_DISABLE,
        ss_size: 0,
    };
    // SAFETY: Takes the stack out of use before it goes.
    let ret = unsafe { libc::sigaltstack(&none, ptr::null_mut()) };
    os("sigaltstack", ret.into()).map(drop)
}

global_asm!(
    // Saves where to go on, sends the signal, and gives 1 when the handler came back by the jump.
    ".globl situation_jump_point",
    "situation_jump_point:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rip + situation_saved_sp], rsp",
    "mov eax, 200", // tkill
    "syscall",
    "xor eax, eax",
    "jmp 2f",
    ".globl situation_jump_back",
    "situation_jump_back:",
    "mov rsp, [rip + situation_saved_sp]",
    "mov eax, 1",
    "2:",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    ".pushsection .bss",
    "situation_saved_sp: .quad 0",
    ".popsection",
);

extern "C" {
    fn situation_jump_point(tid: i64, signal: i64) -> i64;
    fn situation_jump_back() -> !;
}

extern "C" fn jump(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    note(context);
    // SAFETY: The signal is sent at the jump point only.
    unsafe { situation_jump_back() }
}

/// A handler that is left by a jump, never by sigreturn.
pub fn no_return(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGUSR1, jump, libc::SA_NODEFER)?;
    for _ in 0..50 {
        // SAFETY: The function keeps the calling convention on both of its ways.
        let jumped =
            unsafe { situation_jump_point(libc::syscall(libc::SYS_gettid), libc::SIGUSR1.into()) };
        expect("came back by the jump", jumped, 1)?;
        expect("TF", flags() & TF, 0)?;
    }
    expect("signals", result(jump as usize)?, 50)
}

/// First touches of pages, by reads and by writes.
pub fn page_faults(_: &[String]) -> Result<(), Problem> {
    const PAGES: usize = 64;
    for _ in 0..4 {
        // SAFETY: A new mapping, used through raw pointers and taken away at the end.
        unsafe {
            let area = libc::mmap(
                ptr::null_mut(),
                PAGES * 4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            if area == libc::MAP_FAILED {
                os("mmap", -1)?;
            }
            let area = area.cast::<u8>();
            let mut sum = 0u64;
            for page in 0..PAGES {
                let at = area.add(page * 4096);
                sum += u64::from(at.add(2048).read_volatile());
                at.add(1).write_volatile(page as u8);
                sum += u64::from(at.add(1).read_volatile());
            }
            libc::munmap(area.cast(), PAGES * 4096);
            expect("sum", sum, (0..PAGES as u64).sum())?;
        }
    }
    expect("TF", flags() & TF, 0)
}

/// A read that a signal interrupts and the kernel starts again.
pub fn restart(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGALRM, count, libc::SA_RESTART)?;
    let mut fds = [0; 2];
    // SAFETY: Writes two descriptors.
    os("pipe", unsafe { libc::pipe(fds.as_mut_ptr()) }.into())?;
    let child = in_child(|| {
        // SAFETY: Sleeps, then writes one byte.
        unsafe {
            libc::usleep(300_000);
            (libc::write(fds[1], b"x".as_ptr().cast(), 1) != 1).into()
        }
    })?;
    timer(50_000, 0)?;
    let mut byte = 0u8;
    // SAFETY: Reads one byte.
    let n = unsafe { libc::read(fds[0], (&raw mut byte).cast(), 1) };
    expect("read over the signal", (n, byte), (1, b'x'))?;
    expect("signals", result(count as usize)?, 1)?;
    expect_exit("the writing child", child, 0)
}

#[repr(C, align(32))]
struct CriticalSection {
    version: u32,
    flags: u32,
    start: u64,
    length: u64,
    abort: u64,
}

extern "C" {
    static __rseq_offset: isize;
    static __rseq_size: u32;
}

global_asm!(
    // situation_critical(&rseq.rseq_cs, descriptor, fault): gives 1 when aborted.
    ".globl situation_critical",
    "situation_critical:",
    "mov [rdi], rsi",
    ".globl situation_critical_start",
    "situation_critical_start:",
    "test edx, edx",
    "jz 2f",
    "ud2",
    "2: nop",
    ".globl situation_critical_end",
    "situation_critical_end:",
    "xor eax, eax",
    "ret",
    ".long 0x53053053", // the signature that an abort handler must have in front
    ".globl situation_critical_abort",
    "situation_critical_abort:",
    "mov eax, 1",
    "ret",
);

extern "C" {
    fn situation_critical(slot: *mut u64, section: *const CriticalSection, fault: u32) -> u32;
    fn situation_critical_start();
    fn situation_critical_end();
    fn situation_critical_abort();
}

static RETURN_TO: AtomicU64 = AtomicU64::new(0);

extern "C" fn see_abort(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    RETURN_TO.store(
        note(context)[libc::REG_RIP as usize] as u64,
        Ordering::Relaxed,
    );
}

/// A restartable sequence in which a fault raises a signal: the kernel moves control to the abort
/// handler before it builds the frame.
pub fn rseq_abort(_: &[String]) -> Result<(), Problem> {
    // SAFETY: The C library sets both before main and never changes them.
    let (offset, size) = unsafe { (__rseq_offset, __rseq_size) };
    if size == 0 {
        return Err(Problem::Lacking(
            "rseq is not registered by the C library".into(),
        ));
    }
    handle(libc::SIGILL, see_abort, 0)?;
    let section = CriticalSection {
        version: 0,
        flags: 0,
        start: situation_critical_start as usize as u64,
        length: (situation_critical_end as usize - situation_critical_start as usize) as u64,
        abort: situation_critical_abort as usize as u64,
    };
    expect("flags and version", section.version + section.flags, 0)?;
    // SAFETY: The thread's area lies at this offset of the thread pointer; the section's descriptor
    // outlives its use, and the code keeps the calling convention.
    unsafe {
        let thread: *mut u8;
        asm!("mov {}, fs:0", out(reg) thread);
        let slot = thread.offset(offset).add(8).cast::<u64>();
        for _ in 0..20 {
            expect("aborted", situation_critical(slot, &section, 1), 1)?;
            expect(
                "frame of the signal",
                RETURN_TO.load(Ordering::Relaxed),
                section.abort,
            )?;
            // A tick can abort this one; it must then still end by either way.
            let quiet = situation_critical(slot, &section, 0);
            expect("ended", quiet <= 1, true)?;
        }
        slot.write_volatile(0);
    }
    expect("signals", result(see_abort as usize)?, 20)?;
    Ok(())
}
