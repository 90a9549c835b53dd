// SPDX-License-Identifier: GPL-2.0

//! Writes to the stack segment, and far branches.

use std::arch::asm;

use crate::support::*;

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
