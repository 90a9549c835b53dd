// SPDX-License-Identifier: GPL-2.0

//! Intel's decoder library, as a second opinion. It is looked for when a test runs, so that this
//! crate builds and runs without it.

use std::{
    ffi::{
        c_char,
        c_int,
        c_void,
        CStr,
        CString, //
    },
    mem,
    path::Path,
    ptr, //
};

use crate::image::Image;

/// `struct pt_config` of version 2.1. The library reads as much of it as `size` says.
#[repr(C)]
struct Config {
    size: usize,
    begin: *const u8,
    end: *const u8,
    /// Callbacks, CPU, errata, timing, flags, filters: zero is the default of each.
    rest: [u64; 32],
}

/// `struct pt_insn`.
#[repr(C)]
struct Insn {
    ip: u64,
    isid: c_int,
    mode: c_int,
    class: c_int,
    raw: [u8; 15],
    size: u8,
    flags: u32,
}

/// `struct pt_event`, of which nothing is read.
#[repr(C)]
struct Event([u64; 16]);

const PTE_EOS: c_int = 7;
const PTS_EVENT_PENDING: c_int = 1;
const PTS_EOS: c_int = 4;

type Decoder = *mut c_void;

struct Library {
    alloc_decoder: unsafe extern "C" fn(*const Config) -> Decoder,
    free_decoder: unsafe extern "C" fn(Decoder),
    get_image: unsafe extern "C" fn(Decoder) -> *mut c_void,
    add_file:
        unsafe extern "C" fn(*mut c_void, *const c_char, u64, u64, *const c_void, u64) -> c_int,
    sync_forward: unsafe extern "C" fn(Decoder) -> c_int,
    event: unsafe extern "C" fn(Decoder, *mut Event, usize) -> c_int,
    next: unsafe extern "C" fn(Decoder, *mut Insn, usize) -> c_int,
    get_offset: unsafe extern "C" fn(Decoder, *mut u64) -> c_int,
    errstr: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl Library {
    #[expect(
        clippy::missing_transmute_annotations,
        reason = "the fields that take the functions say their types"
    )]
    fn open() -> Option<Self> {
        // SAFETY: A name that ends as the call wants it. The library stays for the process's life.
        let library = unsafe { libc::dlopen(c"libipt.so.2".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return None;
        }
        macro_rules! function {
            ($name:literal) => {{
                // SAFETY: As above.
                let address = unsafe { libc::dlsym(library, $name.as_ptr()) };
                if address.is_null() {
                    return None;
                }
                // SAFETY: The function of this name has the type it is given here, by intel-pt.h.
                unsafe { mem::transmute(address) }
            }};
        }
        Some(Library {
            alloc_decoder: function!(c"pt_insn_alloc_decoder"),
            free_decoder: function!(c"pt_insn_free_decoder"),
            get_image: function!(c"pt_insn_get_image"),
            add_file: function!(c"pt_image_add_file"),
            sync_forward: function!(c"pt_insn_sync_forward"),
            event: function!(c"pt_insn_event"),
            next: function!(c"pt_insn_next"),
            get_offset: function!(c"pt_insn_get_offset"),
            errstr: function!(c"pt_errstr"),
        })
    }
}

/// Decodes a trace of a statically linked program at a fixed address, from its first PSB on:
/// `None` if the library is not there, else the addresses of the instructions.
pub fn decode(trace: &[u8], program: &Path) -> Option<Result<Vec<u64>, String>> {
    Library::open().map(|library| library.decode(trace, program))
}

impl Library {
    fn decode(&self, trace: &[u8], program: &Path) -> Result<Vec<u64>, String> {
        let range = trace.as_ptr_range();
        let config = Config {
            size: mem::size_of::<Config>(),
            begin: range.start,
            end: range.end,
            rest: [0; 32],
        };
        // SAFETY: The configuration is complete, and the trace outlives the decoder.
        let decoder = unsafe { (self.alloc_decoder)(&config) };
        if decoder.is_null() {
            return Err("pt_insn_alloc_decoder gives nothing".into());
        }
        let result = self.run(decoder, program);
        // SAFETY: The decoder is not used from here on.
        unsafe { (self.free_decoder)(decoder) };
        result
    }

    fn run(&self, decoder: Decoder, program: &Path) -> Result<Vec<u64>, String> {
        let path = CString::new(program.as_os_str().as_encoded_bytes())
            .map_err(|e| format!("{}: {e}", program.display()))?;
        for map in Image::maps_of_static_program(program)? {
            let size = map.end - map.start;
            // SAFETY: The decoder's own image, a string, and no particular address space.
            let status = unsafe {
                let image = (self.get_image)(decoder);
                (self.add_file)(
                    image,
                    path.as_ptr(),
                    map.offset,
                    size,
                    ptr::null(),
                    map.start,
                )
            };
            self.check(decoder, status, "pt_image_add_file")?;
        }

        let mut list = Vec::new();
        // SAFETY: The decoder is live, here and below.
        let mut status = unsafe { (self.sync_forward)(decoder) };
        self.check(decoder, status, "pt_insn_sync_forward")?;
        loop {
            while status & PTS_EVENT_PENDING != 0 {
                let mut event = Event([0; 16]);
                // SAFETY: The library writes at most as many bytes as it is told.
                status = unsafe { (self.event)(decoder, &mut event, mem::size_of::<Event>()) };
                self.check(decoder, status, "pt_insn_event")?;
            }
            if status & PTS_EOS != 0 {
                return Ok(list);
            }
            // SAFETY: All zeros is a value of this plain data.
            let mut insn: Insn = unsafe { mem::zeroed() };
            // SAFETY: As for the event.
            status = unsafe { (self.next)(decoder, &mut insn, mem::size_of::<Insn>()) };
            if status == -PTE_EOS {
                return Ok(list);
            }
            self.check(decoder, status, "pt_insn_next")?;
            list.push(insn.ip);
        }
    }

    fn check(&self, decoder: Decoder, status: c_int, what: &str) -> Result<(), String> {
        if status >= 0 {
            return Ok(());
        }
        let mut offset = 0;
        // SAFETY: The decoder is live, and the text lives for ever.
        let text = unsafe {
            (self.get_offset)(decoder, &mut offset);
            CStr::from_ptr((self.errstr)(-status))
        };
        Err(format!(
            "{what} near byte {offset:#x}: {}",
            text.to_string_lossy()
        ))
    }
}
