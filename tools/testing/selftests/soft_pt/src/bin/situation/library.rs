// SPDX-License-Identifier: GPL-2.0

//! Code that is mapped while the program runs.

use std::{
    ffi::CStr,
    fs,
    hint::black_box, //
};

use crate::support::*;

const LIBRARY: &CStr = c"libz.so.1";

/// Loads a library and calls a function of it. Says which file it was, and how many calls.
pub fn dlopen(_: &[String]) -> Result<(), Problem> {
    const CALLS: usize = 50;

    if mapped()?.is_some() {
        return Err(Problem::Lacking(format!("{LIBRARY:?} is loaded already")));
    }
    // SAFETY: Strings that end as the functions want them.
    let function = unsafe {
        let library = libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return Err(Problem::Lacking(format!("no {LIBRARY:?}")));
        }
        libc::dlsym(library, c"adler32_z".as_ptr())
    };
    if function.is_null() {
        return Err(Problem::Lacking(format!("no adler32_z in {LIBRARY:?}")));
    }
    // SAFETY: That is the type of the function, and the library stays loaded.
    let adler32: unsafe extern "C" fn(libc::c_ulong, *const u8, usize) -> libc::c_ulong =
        unsafe { std::mem::transmute(function) };
    for _ in 0..CALLS {
        let text = black_box(b"Wikipedia");
        // SAFETY: The text is that long.
        let sum = unsafe { adler32(1, text.as_ptr(), text.len()) };
        expect("the checksum", sum, 0x11e6_0398)?;
    }
    println!("library {}", mapped()?.unwrap_or_default());
    println!("calls {CALLS}");
    Ok(())
}

/// The file that is mapped of the library.
fn mapped() -> Result<Option<String>, Problem> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|e| format!("own maps: {e}"))?;
    // The file behind the name has more to its version.
    let name = format!("/{}", LIBRARY.to_string_lossy());
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.contains(&name));
    Ok(path.map(str::to_owned))
}
