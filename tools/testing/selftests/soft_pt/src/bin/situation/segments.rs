// SPDX-License-Identifier: GPL-2.0

//! Writes to the stack segment, and far branches.

use std::{
    arch::{
        asm,
        global_asm, //
    },
    fs,
    os::fd::AsRawFd,
    slice, //
};

use crate::{
    flags::map_low,
    support::*, //
};

/// Several writes to the stack segment in a row. Whether a processor holds the trap back at more
/// than the first is its own affair.
pub fn stack_loads(_: &[String]) -> Result<(), Problem> {
    for _ in 0..50 {
        let (image, r11, count): (u64, u64, u64);
        // SAFETY: Loads the selector that is there already.
        unsafe {
            asm!(
                "mov {t:e}, ss",
                "xor {count:e}, {count:e}",
                "mov ss, {t:e}", "mov ss, {t:e}", "pushfq", "pop {image}",
                ".rept 3", "mov ss, {t:e}", ".endr", "pushfq", "or [rsp], {image}", "pop {image}",
                ".rept 20", "mov ss, {t:e}", ".endr", "pushfq", "or [rsp], {image}", "pop {image}",
                "mov ss, {t:e}", "mov ss, {t:e}", "jmp 2f", "ud2",
                "2: mov ss, {t:e}", "mov ss, {t:e}", "mov ss, {t:e}", "call 3f", "jmp 4f", "ud2",
                "3: mov ss, {t:e}", "mov ss, {t:e}", "ret",
                "4: mov eax, 39",
                "mov ss, {t:e}", "mov ss, {t:e}", "syscall", "mov {r11}, r11",
                "mov ss, {t:e}", "mov ss, {t:e}", "inc {count}",
                "pushfq", "mov ss, {t:e}", "mov ss, {t:e}", "popfq", "inc {count}",
                image = out(reg) image, r11 = out(reg) r11, count = out(reg) count, t = out(reg) _,
                out("rax") _, out("rcx") _, out("r11") _,
            )
        };
        expect("TF in an image of pushf", image & TF, 0)?;
        expect("TF in r11 of a syscall", r11 & TF, 0)?;
        expect("instructions", count, 2)?;
        expect("TF", flags() & TF, 0)?;
    }
    Ok(())
}

/// The same by `lss`, for which processors hold no trap back, and emulators do.
pub fn lss(_: &[String]) -> Result<(), Problem> {
    for _ in 0..50 {
        let image: u64;
        // SAFETY: Loads the stack that is there already.
        unsafe {
            asm!(
                "sub rsp, 32",
                "mov [rsp + 16], rsp", "mov {t:e}, ss", "mov [rsp + 24], {t}",
                // lss rsp, [rsp + 16]
                ".byte 0x48, 0x0f, 0xb2, 0x64, 0x24, 0x10", "pushfq", "pop {image}",
                ".byte 0x48, 0x0f, 0xb2, 0x64, 0x24, 0x10",
                ".byte 0x48, 0x0f, 0xb2, 0x64, 0x24, 0x10", "jmp 2f", "ud2",
                "2: mov ss, {t:e}", ".byte 0x48, 0x0f, 0xb2, 0x64, 0x24, 0x10",
                "pushfq", "or [rsp], {image}", "pop {image}",
                "add rsp, 32",
                image = out(reg) image, t = out(reg) _,
            )
        };
        expect("TF in an image of pushf", image & TF, 0)?;
        expect("TF", flags() & TF, 0)?;
    }
    Ok(())
}

/// More writes to the stack segment than are looked at.
pub fn many_stack_loads(_: &[String]) -> Result<(), Problem> {
    for _ in 0..3 {
        let image: u64;
        // SAFETY: Loads the selector that is there already.
        unsafe {
            asm!("mov {t:e}, ss", ".rept 200", "mov ss, {t:e}", ".endr", "pushfq", "pop {image}",
                 t = out(reg) _, image = out(reg) image)
        };
        expect("TF in an image of pushf", image & TF, 0)?;
        expect("TF", flags() & TF, 0)?;
    }
    Ok(())
}

/// Far returns between near calls and returns.
pub fn far(_: &[String]) -> Result<(), Problem> {
    for _ in 0..50 {
        let rounds: u64;
        // SAFETY: Each return finds the address that was pushed for it.
        unsafe {
            asm!(
                "xor {n:e}, {n:e}",
                "call 3f", "jmp 9f",
                "3: call 4f", "inc {n}", "ret",
                "4: call 5f", "inc {n}", "ret",
                // A far return that nobody called.
                "5: mov {t:e}, cs", "push {t}", "lea {t}, [rip + 6f]", "push {t}", "retfq",
                // Then those of the calls.
                "6: inc {n}", "ret",
                "9:",
                n = out(reg) rounds, t = out(reg) _,
            )
        };
        expect("rounds", rounds, 3)?;
    }
    Ok(())
}

global_asm!(
    // 32-bit code in a segment that has a base, and a way back from it, on a page of their own.
    ".balign 4096",
    ".globl situation_based",
    "situation_based:",
    ".code32",
    "mov ecx, 30",
    "2: pushfd",
    "pop edx",
    "or eax, edx",
    "pushfd",
    "popfd",
    "loop 2b",
    "push 0x33",
    "push ebx",
    "retf",
    ".code64",
    ".balign 64",
    ".globl situation_based_back",
    "situation_based_back:",
    "jmp r8",
    ".balign 4096",
);

extern "C" {
    fn situation_based();
    fn situation_based_back();
}

/// Makes an entry of the local descriptor table, and gives its selector.
fn segment(number: u32, base: u64, code: bool, wide: bool) -> Result<u64, Problem> {
    const MODIFY: usize = 0x11;
    const CODE: u32 = 2 << 1;
    const PAGES: u32 = 1 << 4;

    let kind = if code { CODE } else { 0 };
    let (limit, size) = if wide {
        (0xf_ffff, 1 | PAGES)
    } else {
        (0xffff, 0)
    };
    let descriptor = [number, base as u32, limit, kind | size];
    // SAFETY: Reads a descriptor of that size.
    let ret = unsafe {
        libc::syscall(
            libc::SYS_modify_ldt,
            MODIFY,
            descriptor.as_ptr(),
            size_of_val(&descriptor),
        )
    };
    if ret != 0 {
        return Err(Problem::Lacking(format!("no such segment, {wide}")));
    }
    // In the local table, for user mode.
    Ok(u64::from((number << 3) | 7))
}

/// 32-bit code in a segment with a base, whose stack has one too: an address in it is not what it
/// seems. What is at the address that it seems to be belongs to somebody else.
pub fn segment_base(_: &[String]) -> Result<(), Problem> {
    const BASE: u64 = 0x1000;
    const AREA: usize = 0x4_0000;

    let program = fs::File::open("/proc/self/exe")
        .map_err(|e| Problem::Wrong(format!("own program: {e}")))?;
    let offset = offset_in_program(situation_based as *const () as u64)?;
    let protection = libc::PROT_READ | libc::PROT_EXEC;
    let code = map_low(4096, protection, 0, program.as_raw_fd(), offset)?;
    let back = code + (situation_based_back as usize - situation_based as usize) as u64;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let area = map_low(AREA, protection, libc::MAP_ANONYMOUS, -1, 0)?;
    let code_selector = segment(0, BASE, true, true)?;

    for wide in [true, false] {
        // A stack of 16 bits has what it has in the 64 KiB behind its base.
        let low = (area + 0xffff) & !0xffff;
        let base = if wide { BASE } else { low + BASE };
        let stack_selector = match segment(1 + u32::from(wide), base, false, wide) {
            Err(Problem::Lacking(_)) if !wide => {
                println!("no segments of 16 bits");
                continue;
            }
            selector => selector?,
        };
        let frame = low + 0x8000;
        // SAFETY: The area is mapped for this.
        let words = unsafe {
            let bytes = slice::from_raw_parts_mut(area as *mut u8, AREA);
            bytes.fill(0xff);
            *(frame as *mut u64) = code - BASE;
            *((frame + 8) as *mut u64) = code_selector;
            bytes
        };
        let seen: u64;
        // SAFETY: The far return goes to the code on the stack made for it, 0x100 bytes above the
        // frame, and that comes back by the address in r8. It changes only the registers named.
        unsafe {
            asm!(
                "mov r9, rsp",
                "mov r10, ss",
                "mov r11, rbx",
                "mov rbx, {back}",
                "lea r8, [rip + 2f]",
                "xor eax, eax",
                "xor edx, edx",
                "mov rsp, {frame}",
                "mov ss, {stack:e}",
                ".byte 0x48, 0xca, 0x00, 0x01", // retfq 0x100
                "2: mov rsp, r9",
                "mov ss, r10",
                "mov rbx, r11",
                back = in(reg) back, frame = in(reg) frame, stack = in(reg) stack_selector,
                out("rax") seen, out("rcx") _, out("rdx") _, out("r8") _, out("r9") _,
                out("r10") _, out("r11") _,
            )
        };
        expect("TF in an image of pushf", seen & TF, 0)?;
        expect("TF", flags() & TF, 0)?;
        // The words that were pushed, and no other byte.
        let top = frame + 0x110;
        let top = base + if wide { top } else { top & 0xffff };
        let own = (top - 8 - area) as usize..(top - area) as usize;
        let frame = (frame - area) as usize;
        let changed: Vec<usize> = (0..AREA)
            .filter(|at| words[*at] != 0xff && !own.contains(at))
            .filter(|at| !(frame..frame + 16).contains(at))
            .collect();
        expect("other bytes that changed", changed, Vec::new())?;
    }
    Ok(())
}
