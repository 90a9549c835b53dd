// SPDX-License-Identifier: GPL-2.0

//! What the perf tool's decoder makes of a trace.

use crate::{
    packet::ExecMode,
    program::{
        Program,
        Step, //
    },
    trace::Config,
};
use std::ffi::{
    c_int,
    c_void, //
};

/// `struct soft_pt_decode` of `perf.c`.
#[repr(C)]
struct Request {
    trace: *const u8,
    len: usize,
    return_compression: bool,
    branch_enable: bool,
    read: extern "C" fn(*mut c_void, u64, *mut u8, usize, *mut bool) -> usize,
    step: extern "C" fn(*mut c_void, c_int, u64, u64),
    context: *mut c_void,
}

extern "C" {
    fn soft_pt_perf_decode(request: *mut Request) -> c_int;
}

struct Context<'a> {
    program: &'a Program,
    steps: Vec<Step>,
    error: Option<String>,
}

extern "C" fn read(
    context: *mut c_void,
    ip: u64,
    buf: *mut u8,
    len: usize,
    wide: *mut bool,
) -> usize {
    // SAFETY: It is the context of the request, which nothing else refers to during the call.
    let context = unsafe { &mut *context.cast::<Context<'_>>() };
    // SAFETY: `perf.c` passes a buffer of this size, which may not be initialized, so it is before
    // a slice is made of it.
    let buf = unsafe {
        buf.write_bytes(0, len);
        std::slice::from_raw_parts_mut(buf, len)
    };
    let Some(insn) = context.program.insn_at(ip) else {
        return 0;
    };
    // SAFETY: `perf.c` passes the address of a bool.
    unsafe { wide.write(insn.exec == ExecMode::Bits64) };
    context.program.read(ip, buf)
}

extern "C" fn step(context: *mut c_void, step: c_int, a: u64, b: u64) {
    // SAFETY: It is the context of the request, which nothing else refers to during the call.
    let context = unsafe { &mut *context.cast::<Context<'_>>() };
    context.steps.push(match step {
        0 => Step::Enabled(a),
        1 if b != 0 => Step::Insn(a, ExecMode::Bits64),
        1 => Step::Insn(a, ExecMode::Bits32),
        2 => Step::Disabled,
        3 => Step::AsyncDisabled(a),
        4 => Step::AsyncBranch(a, b),
        5 => Step::Overflow,
        _ => {
            context.error = Some(format!("error {a} at {b:#x}"));
            return;
        }
    });
}

/// Decodes a trace of a program from its first PSB to its end.
pub(crate) fn decode(
    program: &Program,
    config: Config,
    trace: &[u8],
) -> (Vec<Step>, Option<String>) {
    let mut context = Context {
        program,
        steps: vec![],
        error: None,
    };
    let mut request = Request {
        trace: trace.as_ptr(),
        len: trace.len(),
        return_compression: config.ret_compression,
        branch_enable: config.branch,
        read,
        step,
        context: (&raw mut context).cast(),
    };
    // SAFETY: The request is valid, and what it points to outlives the call.
    assert_eq!(unsafe { soft_pt_perf_decode(&mut request) }, 0);
    (context.steps, context.error)
}
