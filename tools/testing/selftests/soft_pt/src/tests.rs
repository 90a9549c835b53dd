// SPDX-License-Identifier: GPL-2.0

//! The tests, and what they share.

pub mod code;
pub mod density;
pub mod filter;
pub mod idle;
pub mod oracle;
pub mod pause;
pub mod record;
pub mod refuse;
pub mod situation;
pub mod stress;
pub mod traps;

use std::{
    ffi::CString,
    fs, //
};

use perf_aux::{
    load::Child,
    skip,
    sys::Pmu,
    Ctx,
    Stop, //
};

use crate::{
    image::{
        symbol,
        Symbol, //
    },
    perf::{
        io,
        program, //
    }, //
};

/// The PMU, for tests that let perf record it.
fn pmu_for_perf(ctx: &Ctx) -> Result<Pmu, Stop> {
    crate::perf::needed()?;
    let pmu = ctx.pmu()?;
    if pmu.name() != "intel_pt" {
        skip!("perf records only a PMU named intel_pt, not {}", pmu.name());
    }
    Ok(pmu)
}

/// Makes a test fail by the words of an error.
fn failed(what: String) -> Stop {
    Stop::Fail(what)
}

/// A global symbol of a program of this crate.
fn symbol_of(name: &str, wanted: &str) -> Result<Symbol, Stop> {
    let path = program(name)?;
    let elf = fs::read(&path).map_err(io(path.display()))?;
    symbol(&elf, wanted).ok_or_else(|| failed(format!("{} has no symbol {wanted}", path.display())))
}

/// `flow ROUNDS`, about to be run by exec when told to.
fn waiting(rounds: usize) -> Result<Child, Stop> {
    let path = CString::new(program("flow")?.into_os_string().into_encoded_bytes())
        .map_err(|e| failed(format!("path of flow: {e}")))?;
    let rounds = CString::new(rounds.to_string()).map_err(|e| failed(format!("rounds: {e}")))?;
    Ok(Child::new(move || {
        let argv = [path.as_ptr(), rounds.as_ptr(), std::ptr::null()];
        // SAFETY: Strings and a list that end as exec wants it; the output is not wanted.
        unsafe {
            let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
            libc::dup2(null, 1);
            libc::execv(path.as_ptr(), argv.as_ptr());
        }
        127
    })?)
}
