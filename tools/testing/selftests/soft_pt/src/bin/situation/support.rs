// SPDX-License-Identifier: GPL-2.0

//! What the situations share: results, flags, signals, children.

use std::{
    arch::asm,
    fmt,
    fs,
    io,
    mem,
    ptr, //
};

/// Why a situation is not as it must be.
pub enum Problem {
    Wrong(String),
    Lacking(String),
}

impl From<String> for Problem {
    fn from(what: String) -> Self {
        Problem::Wrong(what)
    }
}

/// Fails unless the two are equal.
pub fn expect<T: PartialEq + fmt::Debug>(what: &str, got: T, want: T) -> Result<(), Problem> {
    if got == want {
        return Ok(());
    }
    Err(Problem::Wrong(format!(
        "{what}: got {got:?}, expected {want:?}"
    )))
}

/// Fails with the current errno when a system call did.
pub fn os(what: &str, ret: i64) -> Result<i64, Problem> {
    if ret < 0 {
        return Err(Problem::Wrong(format!(
            "{what}: {}",
            io::Error::last_os_error()
        )));
    }
    Ok(ret)
}

/// Fails unless an execution breakpoint was hit each time that control came by.
///
/// QEMU's software emulation pushes RF=1 for hardware interrupts too (`exception_is_fault()` in its
/// `do_interrupt64()`), so that a breakpoint on the instruction that an interrupt comes before is
/// passed over. While a program is stepped, an interrupt waits for the end of a step rather often:
/// one hit in a hundred was lost there. A twentieth may be.
pub fn expect_hits(hits: u64, calls: u64) -> Result<(), Problem> {
    const HYPERVISOR: u32 = 0x4000_0000;
    // SAFETY: Every x86-64 CPU has the instruction, and answers leaves that it does not know.
    let name = unsafe { std::arch::x86_64::__cpuid(HYPERVISOR) }.ebx;
    let lost = if name.to_le_bytes() == *b"TCGT" {
        calls / 20
    } else {
        0
    };
    if (calls - lost..=calls).contains(&hits) {
        return Ok(());
    }
    Err(Problem::Wrong(format!(
        "{hits} hits of a breakpoint in {calls} calls, expected at least {}",
        calls - lost
    )))
}

/// Tells the reader of the trace how often control comes to a function by a branch.
pub fn reaches(function: usize, count: usize) {
    println!("reaches {function:#x} {count}");
}

/// The trap flag.
pub const TF: u64 = 1 << 8;

/// Whether the processor enters the kernel by FRED, which leaves `rcx` and `r11` alone at system
/// calls, and traps at once behind one if the program has set TF.
pub fn enters_by_fred() -> Result<bool, Problem> {
    let cpus = fs::read_to_string("/proc/cpuinfo")
        .map_err(|e| Problem::Wrong(format!("/proc/cpuinfo: {e}")))?;
    let flags = cpus.lines().find(|line| line.starts_with("flags"));
    Ok(flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "fred")))
}

/// The flags as `pushf` shows them.
#[inline(always)]
pub fn flags() -> u64 {
    let flags;
    // SAFETY: Pushes and pops one word.
    unsafe { asm!("pushfq", "pop {}", out(reg) flags) };
    flags
}

/// Runs a loop of `n` rounds, two instructions each, and gives back `n`.
#[inline(never)]
pub fn spin(n: u64) -> u64 {
    let counted;
    // SAFETY: Uses two registers.
    unsafe {
        asm!("2:", "inc {counted}", "cmp {counted}, {n}", "jb 2b",
             counted = inout(reg) 0u64 => counted, n = in(reg) n, options(nomem, nostack))
    };
    counted
}

/// A signal handler as `SA_SIGINFO` wants it.
pub type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

/// Installs a handler.
pub fn handle(signal: i32, handler: Handler, flags: i32) -> Result<(), Problem> {
    // SAFETY: All zeros is a value of this plain data.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO | flags;
    // SAFETY: The action lives during the call and the handlers are signal-safe.
    let ret = unsafe { libc::sigaction(signal, &action, ptr::null_mut()) };
    os("sigaction", ret.into()).map(drop)
}

/// The registers a handler returns to.
///
/// # Safety
///
/// `context` must be what the kernel passed to the handler that calls this.
pub unsafe fn registers<'a>(context: *mut libc::c_void) -> &'a mut [i64; 23] {
    // SAFETY: By the caller this is a `ucontext_t`, for the time that the handler runs.
    unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs }
}

/// The flags in a handler's frame.
pub fn saved_flags(registers: &[i64; 23]) -> u64 {
    registers[libc::REG_EFL as usize] as u64
}

/// Runs `body` in a forked child, which exits with what it gives.
pub fn in_child(body: impl FnOnce() -> i32) -> Result<i32, Problem> {
    // SAFETY: The program has one thread when it forks, so the child may do anything.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let code = body();
        // SAFETY: Ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    os("fork", pid.into()).map(|pid| pid as i32)
}

/// Waits for a change of a child and gives its status.
pub fn wait(pid: i32) -> Result<i32, Problem> {
    let mut status = 0;
    // SAFETY: Writes one status.
    let ret = unsafe { libc::waitpid(pid, &mut status, libc::__WALL) };
    os("waitpid", ret.into()).map(|_| status)
}

/// How a child ended or stopped, in words.
pub fn said(status: i32) -> String {
    if libc::WIFEXITED(status) {
        format!("exit {}", libc::WEXITSTATUS(status))
    } else if libc::WIFSIGNALED(status) {
        format!("killed by signal {}", libc::WTERMSIG(status))
    } else if libc::WIFSTOPPED(status) {
        format!("stopped by signal {}", libc::WSTOPSIG(status))
    } else {
        format!("status {status:#x}")
    }
}

/// Waits for the end of a child, which must exit with `code`.
pub fn expect_exit(what: &str, pid: i32, code: i32) -> Result<(), Problem> {
    expect(what, said(wait(pid)?), format!("exit {code}"))
}

/// What a child of the situations does: enough to be stepped, and a look at its own flags.
pub fn child_work() -> i32 {
    for _ in 0..20 {
        if spin(50) != 50 || flags() & TF != 0 {
            return 1;
        }
    }
    42
}

/// A word shared with children.
pub struct Shared(*mut u64);

impl Shared {
    pub fn new() -> Result<Self, Problem> {
        // SAFETY: A new mapping of one page.
        let page = unsafe {
            libc::mmap(
                ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if page == libc::MAP_FAILED {
            os("mmap", -1)?;
        }
        Ok(Shared(page.cast()))
    }

    pub fn word(&self) -> &std::sync::atomic::AtomicU64 {
        // SAFETY: The page is mapped for the life of the process and used as this word only.
        unsafe { std::sync::atomic::AtomicU64::from_ptr(self.0) }
    }
}

/// Where in the program's file the byte at an address comes from.
pub fn offset_in_program(address: u64) -> Result<u64, Problem> {
    let maps =
        fs::read_to_string("/proc/self/maps").map_err(|e| Problem::Wrong(format!("maps: {e}")))?;
    maps.lines()
        .find_map(|line| {
            let mut fields = line.split_whitespace();
            let (start, end) = fields.next()?.split_once('-')?;
            let start = u64::from_str_radix(start, 16).ok()?;
            let end = u64::from_str_radix(end, 16).ok()?;
            let offset = u64::from_str_radix(fields.nth(1)?, 16).ok()?;
            (start..end)
                .contains(&address)
                .then(|| address - start + offset)
        })
        .ok_or_else(|| Problem::Wrong(format!("{address:#x} is in no mapping")))
}
