// SPDX-License-Identifier: GPL-2.0

//! Instructions that show, set or carry the flags, and ways into the kernel.

use std::{
    arch::{
        asm,
        global_asm,
        x86_64, //
    },
    os::fd::AsRawFd,
    ptr,
    sync::atomic::{
        AtomicU32,
        Ordering, //
    },
};

use crate::support::*;

/// Images made by `pushf`, of both sizes, after jumps and in a row.
pub fn pushf(_: &[String]) -> Result<(), Problem> {
    let mut seen = 0;
    for _ in 0..200 {
        let (wide, narrow, second): (u64, u64, u64);
        // SAFETY: Takes back from the stack what it puts there.
        unsafe {
            asm!(
                "pushfq", "pushfq", "pop {a}", "pop {b}",
                "xor {c:e}, {c:e}", "pushfw", "pop {c:x}",
                a = out(reg) wide, b = out(reg) second, c = out(reg) narrow,
            )
        };
        seen |= wide | second | narrow;
        seen |= flags();
    }
    expect("TF in an image of pushf", seen & TF, 0)
}

/// `popf` gives the flags asked for, and what it does not ask for stays away.
pub fn popf(_: &[String]) -> Result<(), Problem> {
    const CF: u64 = 1;
    const DF: u64 = 1 << 10;
    for want in [0, CF, DF, CF | DF] {
        let got: u64;
        // SAFETY: Sets the direction flag back before anything else runs.
        unsafe {
            asm!(
                "pushfq", "and qword ptr [rsp], {keep}", "or [rsp], {want}", "popfq",
                "pushfq", "pop {got}", "cld",
                keep = const !(0x401i32), want = in(reg) want, got = out(reg) got,
            )
        };
        expect("flags after popf", got & (CF | DF | TF), want)?;
    }
    for _ in 0..200 {
        let mut image: u64;
        // SAFETY: Puts back the flags it took.
        unsafe {
            asm!("pushfq", "pop {i}", "push {i}", "popfq", "pushfq", "popfq", "pushfw", "popfw",
                 i = out(reg) image)
        };
        image &= TF;
        expect("TF in an image that popf took", image, 0)?;
    }
    Ok(())
}

/// `iretq` within user mode, with flags in its frame.
pub fn iret(_: &[String]) -> Result<(), Problem> {
    let mut sum = 0u64;
    for _ in 0..100 {
        let image: u64;
        // SAFETY: The frame returns to the label with the stack pointer as it was.
        unsafe {
            asm!(
                "mov {sp}, rsp",
                "mov {t:e}, ss", "push {t}", "push {sp}", "pushfq", "mov {image}, [rsp]",
                "mov {t:e}, cs", "push {t}", "lea {t}, [rip + 2f]", "push {t}",
                "iretq", "ud2",
                "2: inc {sum}",
                sp = out(reg) _, t = out(reg) _, image = out(reg) image, sum = inout(reg) sum,
            )
        };
        expect("TF in the frame of iret", image & TF, 0)?;
        expect("TF after iret", flags() & TF, 0)?;
    }
    expect("rounds", sum, 100)
}

/// After a system call `r11` holds the flags, and they must be the program's; or, with FRED, what
/// it held before, be that the flags with TF.
pub fn syscall_r11(_: &[String]) -> Result<(), Problem> {
    let kept = enters_by_fred()?;
    for _ in 0..200 {
        // One that there is, and one that there is not.
        for (number, want) in [
            (libc::SYS_getpid, i64::from(std::process::id())),
            (100_000, -i64::from(libc::ENOSYS)),
        ] {
            let (result, before, r11): (i64, u64, u64);
            // SAFETY: The calls touch no memory.
            unsafe {
                asm!(
                    "pushfq", "pop r11", "lea r11, [r11 + {tf}]", "mov {before}, r11", "syscall",
                    tf = const TF, before = out(reg) before, inlateout("rax") number => result,
                    out("rcx") _, out("r11") r11,
                )
            };
            expect("result of a system call", result, want)?;
            expect("TF in r11", r11 & TF, if kept { TF } else { 0 })?;
            expect("the rest of r11", r11 & !TF, before & !TF)?;
        }
    }
    Ok(())
}

static FAULTS: AtomicU32 = AtomicU32::new(0);

/// Makes a fault end the function that made it, as a plain return.
extern "C" fn return_from_fault(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    FAULTS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: Called by the kernel; the functions below fault with their return address on top.
    unsafe {
        let registers = registers(context);
        let top = registers[libc::REG_RSP as usize] as *const i64;
        registers[libc::REG_RIP as usize] = top.read();
        registers[libc::REG_RSP as usize] += 8;
        registers[libc::REG_RAX as usize] = -i64::from(libc::ENOSYS);
    }
}

global_asm!(
    ".globl situation_int80",
    "situation_int80:",
    // A system call that leaves alone what looks like what others leave.
    "pushfq",
    "pop r11",
    "lea r11, [r11 + 0x100]",
    "mov r10, r11",
    "mov eax, 20", // getpid of the 32-bit table
    "int 0x80",
    "xor r10, r11",
    "mov [rdi], r10",
    "ret",
);

extern "C" {
    fn situation_int80(changed: *mut u64) -> i64;
}

pub fn int80(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGSEGV, return_from_fault, 0)?;
    for _ in 0..100 {
        let mut changed = 0;
        // SAFETY: getpid() touches no memory, and the code writes one word.
        let pid = unsafe { situation_int80(&mut changed) };
        if FAULTS.load(Ordering::Relaxed) != 0 {
            return Err(Problem::Lacking("the kernel has no int $0x80".into()));
        }
        expect("getpid by int $0x80", pid, i64::from(std::process::id()))?;
        expect("bits that changed in r11", changed, 0)?;
        expect("TF after int $0x80", flags() & TF, 0)?;
    }
    Ok(())
}

pub fn vsyscall(_: &[String]) -> Result<(), Problem> {
    handle(libc::SIGSEGV, return_from_fault, 0)?;
    // SAFETY: Where the kernel has this page it has time() there.
    let time: extern "C" fn(*mut i64) -> i64 =
        unsafe { std::mem::transmute(0xffff_ffff_ff60_0400usize) };
    for _ in 0..50 {
        let before = now(libc::CLOCK_REALTIME_COARSE)?;
        let got = time(ptr::null_mut());
        let after = now(libc::CLOCK_REALTIME_COARSE)?;
        if FAULTS.load(Ordering::Relaxed) != 0 {
            return Err(Problem::Lacking("the kernel has no vsyscall page".into()));
        }
        if !(before.tv_sec..=after.tv_sec).contains(&got) {
            return Err(Problem::Wrong(format!(
                "time() by vsyscall is {got}, not in {}..={}",
                before.tv_sec, after.tv_sec
            )));
        }
    }
    Ok(())
}

fn now(clock: i32) -> Result<libc::timespec, Problem> {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: Writes one timespec.
    os(
        "clock_gettime",
        unsafe { libc::clock_gettime(clock, &mut time) }.into(),
    )?;
    Ok(time)
}

/// The clock by the vDSO does not go back.
pub fn vdso(_: &[String]) -> Result<(), Problem> {
    let mut last = (0, 0);
    for _ in 0..200 {
        let time = now(libc::CLOCK_MONOTONIC)?;
        let time = (time.tv_sec, time.tv_nsec);
        if time < last {
            return Err(Problem::Wrong(format!(
                "the clock went from {last:?} to {time:?}"
            )));
        }
        last = time;
    }
    Ok(())
}

/// The trap after a write to the stack segment comes one instruction late, so whatever comes next
/// runs unseen.
pub fn mov_ss(_: &[String]) -> Result<(), Problem> {
    for _ in 0..100 {
        let (image, r11, count): (u64, u64, u64);
        // SAFETY: Loads the selector that is there already.
        unsafe {
            asm!(
                "mov eax, ss",
                "mov ss, eax", "pushfq", "pop {image}",
                "mov eax, 39", "mov {t:e}, ss", "mov ss, {t:e}", "syscall", "mov {r11}, r11",
                "xor {count:e}, {count:e}",
                "mov ss, {t:e}", "jmp 2f", "ud2",
                "2: mov ss, {t:e}", "inc {count}",
                "mov ss, {t:e}", "mov ss, {t:e}", "inc {count}",
                "pushfq", "mov ss, {t:e}", "popfq", "inc {count}",
                "call 3f", "jmp 4f",
                "3: mov ss, {t:e}", "ret",
                "4:",
                image = out(reg) image, r11 = out(reg) r11, count = out(reg) count, t = out(reg) _,
                out("rax") _, out("rcx") _, out("r11") _,
            )
        };
        expect("TF in an image of pushf after mov ss", image & TF, 0)?;
        expect("TF in r11 of a syscall after mov ss", r11 & TF, 0)?;
        expect("instructions after mov ss", count, 3)?;
        expect("TF", flags() & TF, 0)?;
    }
    Ok(())
}

/// String instructions, among them some with nothing to do and some that cross pages.
pub fn rep(_: &[String]) -> Result<(), Problem> {
    let source: Vec<u8> = (0..10_000u32).map(|n| (n * 7 % 251) as u8).collect();
    for length in [0usize, 1, 2, 7, 64, 4095, 4096, 4097, 10_000] {
        let mut copy = vec![0u8; 10_000];
        let left: usize;
        // SAFETY: `length` bytes are in both.
        unsafe {
            asm!("rep movsb", inout("rcx") length => left, inout("rsi") source.as_ptr() => _,
                 inout("rdi") copy.as_mut_ptr() => _)
        };
        expect("count after rep movsb", left, 0)?;
        expect("bytes copied", copy[..length] == source[..length], true)?;
        expect("bytes beyond", copy[length..].iter().all(|&b| b == 0), true)?;
    }
    let mut words = [0u64; 100];
    let (at, left): (usize, usize);
    // SAFETY: Stays within the array.
    unsafe {
        asm!("rep stosq", inout("rcx") 99usize => _, inout("rdi") words.as_mut_ptr() => _,
             in("rax") 5u64);
        asm!("repe scasq", inout("rcx") 100usize => left, inout("rdi") words.as_ptr() => at,
             in("rax") 5u64);
    }
    expect("left after repe scasq", left, 0)?;
    expect("end of repe scasq", at, words.as_ptr() as usize + 800)?;
    expect("TF", flags() & TF, 0)
}

/// Instructions that a hypervisor may run in place of the CPU.
pub fn cpuid(_: &[String]) -> Result<(), Problem> {
    // SAFETY: Every x86-64 CPU has leaf 0.
    let first = unsafe { x86_64::__cpuid(0) };
    // The highest extended leaf, and the bit that says rdtscp is there.
    // SAFETY: As above.
    let has_rdtscp = unsafe {
        x86_64::__cpuid(0x8000_0000).eax >= 0x8000_0001
            && x86_64::__cpuid(0x8000_0001).edx & (1 << 27) != 0
    };
    let mut last = 0;
    for _ in 0..50 {
        // SAFETY: As above.
        let again = unsafe { x86_64::__cpuid(0) };
        expect("cpuid", again, first)?;
        if has_rdtscp {
            let mut aux = 0;
            // SAFETY: Writes one word.
            let stamp = unsafe { x86_64::__rdtscp(&mut aux) };
            expect("time stamps go on", stamp > last, true)?;
            last = stamp;
        }
        expect("TF", flags() & TF, 0)?;
    }
    Ok(())
}

global_asm!(
    // 32-bit code, and a way back from it, on a page of their own that is mapped a second time.
    ".balign 4096",
    ".globl situation_compat",
    "situation_compat:",
    ".code32",
    "mov ecx, 30",
    "2: pushfd",
    "pop edx",
    "or eax, edx",
    "loop 2b",
    "call 3f",
    "retf",
    "3: ret",
    ".code64",
    ".balign 64",
    ".globl situation_compat_back",
    "situation_compat_back:",
    "jmp r8",
    ".balign 4096",
);

extern "C" {
    fn situation_compat();
    fn situation_compat_back();
}

/// Maps something below 4 GiB.
pub fn map_low(size: usize, protection: i32, flags: i32, fd: i32, at: u64) -> Result<u64, Problem> {
    // SAFETY: A new mapping at a place of the kernel's choice.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            size,
            protection,
            libc::MAP_PRIVATE | libc::MAP_32BIT | flags,
            fd,
            at as libc::off_t,
        )
    };
    if page == libc::MAP_FAILED {
        os("mmap", -1)?;
    }
    Ok(page as u64)
}

/// 32-bit code reached by a far return: its `pushf` writes four bytes.
pub fn compat_code(_: &[String]) -> Result<(), Problem> {
    let program = std::fs::File::open("/proc/self/exe")
        .map_err(|e| Problem::Wrong(format!("own program: {e}")))?;
    let offset = offset_in_program(situation_compat as usize as u64)?;
    let code = libc::PROT_READ | libc::PROT_EXEC;
    let code = map_low(4096, code, 0, program.as_raw_fd(), offset)?;
    let data = libc::PROT_READ | libc::PROT_WRITE;
    let stack = map_low(0x4000, data, libc::MAP_ANONYMOUS, -1, 0)? + 0x4000;
    let back = code + (situation_compat_back as usize - situation_compat as usize) as u64;
    let seen: u64;
    // SAFETY: The code runs on the stack made for it and comes back by the address in r8, in 64-bit
    // mode. It changes only the registers named here.
    unsafe {
        asm!(
            "mov r9, rsp",
            "mov rsp, {stack}",
            "lea r8, [rip + 2f]",
            // For the far return of the 32-bit code: offset and selector, four bytes each.
            "sub rsp, 8", "mov [rsp], {back:e}", "mov dword ptr [rsp + 4], 0x33",
            "push 0x23", "push {code}",
            "xor eax, eax", "xor edx, edx",
            "retfq",
            "2: mov rsp, r9",
            stack = in(reg) stack, back = in(reg) back, code = in(reg) code,
            out("rax") seen, out("rcx") _, out("rdx") _, out("r8") _, out("r9") _,
        )
    };
    expect("TF in an image of 32-bit pushf", seen & TF, 0)
}
