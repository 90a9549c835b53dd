// SPDX-License-Identifier: GPL-2.0

//! Dumps of the user stack, with stack pointers that no ordinary program has.

use perf_aux::abi;
use perf_aux::ring::Ring;
use perf_aux::{
    check,
    check_eq,
    Attr,
    Ctx,
    Outcome,
    Test, //
};

pub const TESTS: &[Test] = &[
    Test::new("stack.empty", empty),
    Test::new("stack.odd_end", odd_end),
];

/// Spins for a while with this stack pointer. Nothing may use the stack meanwhile: the test gets no
/// signals.
#[cfg(target_arch = "x86_64")]
fn spin_at(sp: u64) {
    // SAFETY: the stack pointer is put back before anything uses it.
    unsafe {
        std::arch::asm!(
            "xchg rsp, {sp}",
            "2: dec {rounds}",
            "jnz 2b",
            "xchg rsp, {sp}",
            sp = inout(reg) sp => _,
            rounds = inout(reg) 60_000_000u64 => _,
        );
    }
}

/// Samples such a spin, with 4096 bytes of stack and a field that comes after the dump.
#[cfg(target_arch = "x86_64")]
fn check_dumps(sp: u64, size: usize) -> Outcome {
    let event = Attr::cpu_clock(1_000_000)
        .user_only()
        .disabled()
        .sample_type(
            (abi::PERF_SAMPLE_IP
                | abi::PERF_SAMPLE_REGS_USER
                | abi::PERF_SAMPLE_STACK_USER
                | abi::PERF_SAMPLE_REGS_INTR)
                .into(),
        )
        .sample_regs_user(1 << 7)
        .sample_regs_intr(1 << 7)
        .sample_stack_user(4096)
        .open()?;
    let mut ring = Ring::map(&event, 256)?;
    event.enable()?;
    spin_at(sp);
    event.disable()?;

    let mut seen = 0;
    for record in ring.drain()? {
        let perf_aux::record::Record::Sample(sample) = record else {
            continue;
        };
        check_eq!(sample.size % 8, 0, "header.size {}", sample.size);
        if sample.regs_user == Some(vec![sp]) {
            seen += 1;
            check_eq!(sample.stack_user.len(), size, "stack bytes at {sp:#x}");
        }
    }
    check!(seen > 0, "no sample with a stack pointer of {sp:#x}");
    Ok(())
}

#[cfg(target_arch = "x86_64")]
fn empty(_: &Ctx) -> Outcome {
    check_dumps(0, 0)
}

#[cfg(target_arch = "x86_64")]
fn odd_end(_: &Ctx) -> Outcome {
    // The address space ends a page before the canonical half does.
    let end = (1u64 << 47) - 4096;
    check_dumps(end - 2044, 2040)
}

#[cfg(not(target_arch = "x86_64"))]
fn empty(_: &Ctx) -> Outcome {
    perf_aux::skip!("the test sets the stack pointer of x86-64")
}

#[cfg(not(target_arch = "x86_64"))]
fn odd_end(_: &Ctx) -> Outcome {
    perf_aux::skip!("the test sets the stack pointer of x86-64")
}
