// SPDX-License-Identifier: GPL-2.0

//! What libipt's instruction flow decoder makes of a trace.
//!
//! The types have the layout of libipt's `intel-pt.h`. Where that grew over time it is told the
//! size of what it gets, so only the part used here is declared.

use crate::{
    packet::ExecMode,
    program::{
        Program,
        Step, //
    },
};
use std::{
    ffi::{
        c_char,
        c_int,
        c_void,
        CStr, //
    },
    marker::PhantomData,
    mem::size_of,
    ptr::NonNull,
};

/// `pte_eos`: the end of the trace.
const PTE_EOS: c_int = 7;
/// `pte_nomap`: there is no code at an address.
const PTE_NOMAP: c_int = 16;
/// `pts_event_pending`.
const PTS_EVENT_PENDING: c_int = 1;

/// `struct pt_config`, without what follows `decode`.
#[repr(C)]
struct PtConfig {
    size: usize,
    begin: *const u8,
    end: *const u8,
    callback: *const c_void,
    context: *const c_void,
}

/// `struct pt_insn`.
#[repr(C)]
#[derive(Default)]
struct PtInsn {
    ip: u64,
    isid: c_int,
    mode: c_int,
    iclass: c_int,
    raw: [u8; 15],
    size: u8,
    flags: u32,
}

/// `struct pt_event`, with the first two words of the variant.
#[repr(C)]
#[derive(Default)]
struct PtEvent {
    kind: c_int,
    flags: u32,
    tsc: u64,
    lost_mtc: u32,
    lost_cyc: u32,
    reserved: [u64; 2],
    variant: [u64; 2],
    // The rest of the variant.
    _more: [u64; 4],
}

impl PtEvent {
    const IP_SUPPRESSED: u32 = 1 << 0;
    const STATUS_UPDATE: u32 = 1 << 1;
}

type ReadMemory = extern "C" fn(*mut u8, usize, *const c_void, u64, *mut c_void) -> c_int;

#[link(name = "ipt")]
extern "C" {
    fn pt_insn_alloc_decoder(config: *const PtConfig) -> *mut c_void;
    fn pt_insn_free_decoder(decoder: *mut c_void);
    fn pt_insn_get_image(decoder: *mut c_void) -> *mut c_void;
    fn pt_image_set_callback(image: *mut c_void, read: ReadMemory, context: *mut c_void) -> c_int;
    fn pt_insn_sync_forward(decoder: *mut c_void) -> c_int;
    fn pt_insn_get_offset(decoder: *const c_void, offset: *mut u64) -> c_int;
    fn pt_insn_get_sync_offset(decoder: *const c_void, offset: *mut u64) -> c_int;
    fn pt_insn_next(decoder: *mut c_void, insn: *mut PtInsn, size: usize) -> c_int;
    fn pt_insn_event(decoder: *mut c_void, event: *mut PtEvent, size: usize) -> c_int;
    fn pt_errstr(code: c_int) -> *const c_char;
}

/// A decoder of one trace.
///
/// # Invariants
///
/// `raw` is a decoder that only this owns, made for a trace and a program that outlive it.
struct Decoder<'a> {
    raw: NonNull<c_void>,
    _borrows: PhantomData<(&'a [u8], &'a Program)>,
}

/// Reads the program's code for libipt.
extern "C" fn read_memory(
    buf: *mut u8,
    size: usize,
    _asid: *const c_void,
    ip: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: The context is the program given to `pt_image_set_callback`, which by the invariants
    // of `Decoder` is there for as long as the decoder that calls this.
    let program = unsafe { &*context.cast::<Program>() };
    // SAFETY: libipt owns a buffer of this size for the time of the call. It may not be
    // initialized, so it is before a slice is made of it.
    let buf = unsafe {
        buf.write_bytes(0, size);
        std::slice::from_raw_parts_mut(buf, size)
    };
    match program.read(ip, buf) {
        0 => -PTE_NOMAP,
        len => len as c_int,
    }
}

impl<'a> Decoder<'a> {
    fn new(program: &'a Program, trace: &'a [u8]) -> Self {
        let config = PtConfig {
            size: size_of::<PtConfig>(),
            begin: trace.as_ptr_range().start,
            end: trace.as_ptr_range().end,
            callback: std::ptr::null(),
            context: std::ptr::null(),
        };
        // SAFETY: The configuration is valid and says its size.
        let raw = unsafe { pt_insn_alloc_decoder(&config) };
        // INVARIANT: It was just made, and the lifetime keeps what it was made for.
        let decoder = Self {
            raw: NonNull::new(raw).expect("libipt makes no decoder"),
            _borrows: PhantomData,
        };
        // SAFETY: The decoder is valid, and so is the image it owns; the program outlives both.
        let status = unsafe {
            pt_image_set_callback(
                pt_insn_get_image(raw),
                read_memory,
                std::ptr::from_ref(program).cast_mut().cast(),
            )
        };
        assert_eq!(status, 0);
        decoder
    }

    fn offset(&self) -> u64 {
        let mut offset = 0;
        // SAFETY: The decoder is valid, and `offset` can be written.
        unsafe { pt_insn_get_offset(self.raw.as_ptr(), &mut offset) };
        offset
    }

    fn sync_offset(&self) -> u64 {
        let mut offset = 0;
        // SAFETY: The decoder is valid, and `offset` can be written.
        unsafe { pt_insn_get_sync_offset(self.raw.as_ptr(), &mut offset) };
        offset
    }

    fn sync_forward(&mut self) -> c_int {
        // SAFETY: The decoder is valid.
        unsafe { pt_insn_sync_forward(self.raw.as_ptr()) }
    }

    fn event(&mut self, event: &mut PtEvent) -> c_int {
        // SAFETY: The decoder is valid, and `event` can be written to its size.
        unsafe { pt_insn_event(self.raw.as_ptr(), event, size_of::<PtEvent>()) }
    }

    fn next(&mut self, insn: &mut PtInsn) -> c_int {
        // SAFETY: The decoder is valid, and `insn` can be written to its size.
        unsafe { pt_insn_next(self.raw.as_ptr(), insn, size_of::<PtInsn>()) }
    }
}

impl Drop for Decoder<'_> {
    fn drop(&mut self) {
        // SAFETY: The decoder is valid and not used any more.
        unsafe { pt_insn_free_decoder(self.raw.as_ptr()) }
    }
}

/// How far a decoder came.
#[derive(Debug)]
pub(crate) struct Decoded {
    /// Where it began.
    pub(crate) begin: usize,
    /// What happened from there on.
    pub(crate) steps: Vec<Step>,
    /// Why it ended before the end of the trace.
    pub(crate) error: Option<String>,
}

/// Decodes a trace of a program from its first PSB to its end.
///
/// Returns nothing if there is no PSB.
pub(crate) fn decode(program: &Program, trace: &[u8]) -> Option<Decoded> {
    let mut decoder = Decoder::new(program, trace);
    let mut decoded = Decoded {
        begin: 0,
        steps: vec![],
        error: None,
    };
    let mut status = decoder.sync_forward();
    if status == -PTE_EOS {
        return None;
    }
    decoded.begin = decoder.sync_offset() as usize;
    loop {
        while status >= 0 && status & PTS_EVENT_PENDING != 0 {
            let mut event = PtEvent::default();
            status = decoder.event(&mut event);
            if status >= 0 {
                decoded.steps.extend(step(&event));
            }
        }
        if status >= 0 {
            let mut insn = PtInsn::default();
            status = decoder.next(&mut insn);
            // An error can come with an instruction.
            if insn.size != 0 {
                decoded.steps.push(Step::Insn(insn.ip, exec(insn.mode)));
            }
        }
        if status == -PTE_EOS {
            return Some(decoded);
        }
        if status < 0 {
            // SAFETY: It takes any number and returns a static string.
            let text = unsafe { CStr::from_ptr(pt_errstr(-status)) };
            decoded.error = Some(format!(
                "{} at {:#x}",
                text.to_string_lossy(),
                decoder.offset()
            ));
            return Some(decoded);
        }
    }
}

fn exec(mode: c_int) -> ExecMode {
    match mode {
        1 => ExecMode::Bits16,
        2 => ExecMode::Bits32,
        3 => ExecMode::Bits64,
        _ => panic!("libipt reads code in mode {mode}"),
    }
}

fn step(event: &PtEvent) -> Option<Step> {
    let [first, second] = event.variant;
    let suppressed = event.flags & PtEvent::IP_SUPPRESSED != 0;
    if event.flags & PtEvent::STATUS_UPDATE != 0 {
        return None;
    }
    match event.kind {
        0 => Some(Step::Enabled(first)),
        1 => {
            assert!(suppressed);
            Some(Step::Disabled)
        }
        2 => {
            assert!(suppressed);
            Some(Step::AsyncDisabled(first))
        }
        3 => Some(Step::AsyncBranch(first, second)),
        6 => {
            assert!(suppressed);
            Some(Step::Overflow)
        }
        // ptev_exec_mode: the instructions say it too.
        7 => None,
        // ptev_tick, ptev_cbr.
        17 | 18 => None,
        other => panic!("libipt reports an event {other} that no packet stands for"),
    }
}
