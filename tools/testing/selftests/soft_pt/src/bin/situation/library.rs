// SPDX-License-Identifier: GPL-2.0

//! Code that is mapped while the program runs.

use std::{
    ffi::CStr,
    fs,
    hint::black_box, //
};

use crate::support::*;

const LIBRARY: &CStr = c"libm.so.6";

/// Loads a library and calls a function of it. Says which file it was, and how many calls.
pub fn dlopen(_: &[String]) -> Result<(), Problem> {
    const CALLS: u32 = 50;

    if mapped()?.is_some() {
        return Err(Problem::Lacking(format!("{LIBRARY:?} is loaded already")));
    }
    // SAFETY: Strings that end as the functions want them.
    let function = unsafe {
        let library = libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW);
        if library.is_null() {
            return Err(Problem::Lacking(format!("no {LIBRARY:?}")));
        }
        libc::dlsym(library, c"cbrt".as_ptr())
    };
    if function.is_null() {
        return Err(Problem::Lacking(format!("no cbrt in {LIBRARY:?}")));
    }
    // SAFETY: That is the type of the function, and the library stays loaded.
    let cbrt: extern "C" fn(f64) -> f64 = unsafe { std::mem::transmute(function) };
    let mut sum = 0.0;
    for n in 0..CALLS {
        sum += cbrt(black_box(f64::from(n).powi(3)));
    }
    expect(
        "the sum of the roots",
        sum.round() as u32,
        CALLS * (CALLS - 1) / 2,
    )?;
    println!("library {}", mapped()?.unwrap_or_default());
    println!("calls {CALLS}");
    Ok(())
}

/// The file that is mapped of the library.
fn mapped() -> Result<Option<String>, Problem> {
    let maps = fs::read_to_string("/proc/self/maps").map_err(|e| format!("own maps: {e}"))?;
    let name = LIBRARY.to_string_lossy();
    let path = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .find(|path| path.ends_with(&*name));
    Ok(path.map(str::to_owned))
}
