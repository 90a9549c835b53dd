// SPDX-License-Identifier: GPL-2.0

//! Counts of what the stepper does, by breakpoints on its functions.
//!
//! They tell what a trace costs without a clock: a trap is what the stepper costs a program, and
//! their number depends on nothing else that the machine does.

use perf_aux::{
    check_eq,
    load::Child,
    skip,
    sys::{
        self,
        is_root, //
    },
    Attr,
    Event,
    Stop, //
};

/// Counts calls of a function of the stepper, by the module that it is in and its own name. The
/// counter is of the calling task, or of what `of` makes of it.
pub fn calls(module: &str, function: &str, of: impl FnOnce(Attr) -> Attr) -> Result<Event, Stop> {
    if !is_root() {
        skip!("a breakpoint in the kernel needs root");
    }
    // Symbols of Rust have the length before each name.
    let module = format!("4step{module}");
    let end = format!("{}{function}", function.len());
    let wanted = |name: &str, _: Option<&str>| name.contains(&module) && name.ends_with(&end);
    let address = match sys::find_kernel_symbol(wanted)? {
        Some(name) => sys::kernel_symbol(&name)?,
        None => None,
    };
    let Some(address) = address else {
        skip!("/proc/kallsyms does not tell the address of the stepper's {function}");
    };
    // It never overflows, so it is never throttled.
    let attr = Attr::exec_breakpoint(address, 1 << 40);
    let counter = of(attr.exclude_user().exclude_hv()).open()?;
    counter.enable()?;
    Ok(counter)
}

/// Counts the traps of a task, or with `pid` -1 of a CPU.
pub fn counter(pid: i32, cpu: i32) -> Result<Event, Stop> {
    calls("", "on_die", |attr| attr.pid(pid).cpu(cpu))
}

/// How many traps a child takes, from when it is told to start until its end.
pub fn of<T>(child: Child, prepare: impl Fn(&Child) -> Result<T, Stop>) -> Result<u64, Stop> {
    let counter = counter(child.pid(), -1)?;
    let prepared = prepare(&child)?;
    check_eq!(child.wait()?, 0, "exit status of the child");
    drop(prepared);
    Ok(counter.count()?)
}
