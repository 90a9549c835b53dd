// SPDX-License-Identifier: GPL-2.0

//! Code that may be executed, and not read.

use std::{
    arch::global_asm,
    ptr, //
};

use crate::support::*;

global_asm!(
    ".globl situation_unreadable",
    "situation_unreadable:",
    "xor eax, eax",
    "mov ecx, 30",
    "2: pushfq",
    "pop rdx",
    "or eax, edx",
    "pushfq",
    "popfq",
    "loop 2b",
    "ret",
    ".globl situation_unreadable_end",
    "situation_unreadable_end:",
);

extern "C" {
    fn situation_unreadable();
    fn situation_unreadable_end();
}

/// The kernel protects such a mapping by a protection key, by which it can't read it either.
pub fn execute_only(_: &[String]) -> Result<(), Problem> {
    let first = situation_unreadable as usize;
    let length = situation_unreadable_end as usize - first;
    // SAFETY: A new page, which holds a copy of the function.
    let code: extern "C" fn() -> u64 = unsafe {
        let page = libc::mmap(
            ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        );
        if page == libc::MAP_FAILED {
            os("mmap", -1)?;
        }
        ptr::copy_nonoverlapping(first as *const u8, page.cast::<u8>(), length);
        os(
            "mprotect",
            libc::mprotect(page, 4096, libc::PROT_EXEC).into(),
        )?;
        std::mem::transmute(page)
    };
    // A write from there fails if it can't be read.
    let mut ends = [0; 2];
    // SAFETY: The kernel reads the page, or fails.
    let read = unsafe {
        os("pipe", libc::pipe(ends.as_mut_ptr()).into())?;
        libc::write(ends[1], code as *const libc::c_void, 1)
    };
    if read != -1 {
        return Err(Problem::Lacking("no memory protection keys".into()));
    }
    for _ in 0..20 {
        expect("TF in an image of pushf", code() & TF, 0)?;
        expect("TF", flags() & TF, 0)?;
        expect("rounds", spin(10), 10)?;
    }
    Ok(())
}
