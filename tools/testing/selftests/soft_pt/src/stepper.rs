// SPDX-License-Identifier: GPL-2.0

//! The oracle: a program run instruction by instruction under ptrace.
//!
//! A stop tells which instruction comes next, so the list of stops is the list of instructions
//! run, with three rules, each of which follows from how the CPU traps:
//!
//! - A signal that is about to be delivered moves control before the instruction that was announced
//!   by the last stop; that announcement is taken back.
//! - A repeated string instruction traps once for each repetition; it is listed once.
//! - A write to the stack segment holds the trap back until after the next instruction; that one is
//!   added.
//!
//! There is a fourth where the processor enters the kernel by FRED. Behind a system call, and at
//! the first instruction after exec, the trap comes before the next instruction has run, too; the
//! stop that this makes is left out.

use std::{
    collections::BTreeMap,
    fs,
    io::{
        self,
        Read, //
    },
    mem,
    os::unix::process::CommandExt,
    path::Path,
    process::{
        Command,
        Stdio, //
    }, //
};

use crate::image::{
    Image,
    Map, //
};

/// What one run under the stepper gave.
pub struct Steps {
    /// The instruction addresses of each thread, in the order in which the threads were made.
    pub threads: Vec<Vec<u64>>,
    /// The executable memory.
    pub image: Image,
    /// What the program wrote.
    pub stdout: String,
    /// How it ended, as `waitpid()` says it.
    pub status: i32,
}

fn failed(what: &str) -> String {
    format!("{what}: {}", io::Error::last_os_error())
}

fn ptrace(request: libc::c_uint, pid: i32, data: usize) -> Result<(), String> {
    // SAFETY: The requests made through here take numbers, not pointers.
    let ret = unsafe { libc::ptrace(request, pid, 0usize, data) };
    if ret < 0 {
        return Err(failed(&format!("ptrace request {request} of {pid}")));
    }
    Ok(())
}

fn instruction_pointer(pid: i32) -> Result<u64, String> {
    // SAFETY: All zeros is a value of this plain data.
    let mut regs: libc::user_regs_struct = unsafe { mem::zeroed() };
    // SAFETY: The request writes one `user_regs_struct`.
    let ret = unsafe { libc::ptrace(libc::PTRACE_GETREGS, pid, 0usize, &raw mut regs) };
    if ret < 0 {
        return Err(failed(&format!("PTRACE_GETREGS of {pid}")));
    }
    Ok(regs.rip)
}

/// Makes a command that runs with the same addresses each time.
pub fn same_addresses(command: &mut Command) -> &mut Command {
    // SAFETY: personality() is a plain system call, allowed between fork and exec.
    unsafe {
        command.pre_exec(|| {
            const ADDR_NO_RANDOMIZE: libc::c_ulong = 0x004_0000;
            if libc::personality(ADDR_NO_RANDOMIZE) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        })
    }
}

/// Runs the program under ptrace, one instruction after the other.
pub fn step(program: &Path, args: &[&str]) -> Result<Steps, String> {
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // A group of its own, so that waiting for it takes no other child.
        .process_group(0);
    same_addresses(&mut command);
    // SAFETY: As above.
    unsafe {
        command.pre_exec(|| {
            if libc::ptrace(libc::PTRACE_TRACEME, 0, 0usize, 0usize) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        })
    };
    let mut child = command
        .spawn()
        .map_err(|e| format!("{}: {e}", program.display()))?;
    let pid = child.id() as i32;

    let result = follow(pid);
    if result.is_err() {
        // What became of the program no longer matters.
        let _ = child.kill();
        // SAFETY: waitpid() with no place for a status.
        while unsafe { libc::waitpid(-pid, std::ptr::null_mut(), libc::__WALL) } > 0 {}
    }
    let mut steps = result?;
    if let Some(mut out) = child.stdout.take() {
        out.read_to_string(&mut steps.stdout)
            .map_err(|e| format!("output of {}: {e}", program.display()))?;
    }
    Ok(steps)
}

fn follow(pid: i32) -> Result<Steps, String> {
    let mut order: Vec<i32> = Vec::new();
    let mut lists: BTreeMap<i32, Vec<u64>> = BTreeMap::new();
    let mut image = None;

    let status = loop {
        let mut status = 0;
        // SAFETY: waitpid() writes one status.
        let tid = unsafe { libc::waitpid(-pid, &raw mut status, libc::__WALL) };
        if tid < 0 {
            return Err(failed(&format!("waitpid({})", -pid)));
        }
        if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
            if tid == pid {
                break status;
            }
            continue;
        }
        let signal = libc::WSTOPSIG(status);
        let event = status >> 16;
        let mut deliver = 0;
        if let Some(list) = lists.get_mut(&tid) {
            if event == 0 {
                let ip = instruction_pointer(tid)?;
                if signal == libc::SIGTRAP {
                    list.push(ip);
                } else {
                    deliver = signal;
                    if list.last() == Some(&ip) {
                        list.pop();
                    }
                }
            }
        } else {
            // The stop after exec, or the one with which a new thread starts.
            if order.is_empty() {
                let options = libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
                ptrace(libc::PTRACE_SETOPTIONS, tid, options as usize)?;
                let path = format!("/proc/{pid}/maps");
                let maps = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
                image = Some(Image::load(&Map::of_proc_maps(&maps)));
            }
            order.push(tid);
            lists.insert(tid, vec![instruction_pointer(tid)?]);
        }
        ptrace(libc::PTRACE_SINGLESTEP, tid, deliver as usize)?;
    };

    let image = image.ok_or("the program ended before its first instruction")?;
    let cpus = fs::read_to_string("/proc/cpuinfo").map_err(|e| format!("/proc/cpuinfo: {e}"))?;
    let fred = cpus.split_whitespace().any(|word| word == "fred");
    let threads = order
        .iter()
        .map(|tid| by_the_rules(&lists[tid], &image, fred))
        .collect();
    Ok(Steps {
        threads,
        image,
        stdout: String::new(),
        status,
    })
}

fn by_the_rules(stops: &[u64], image: &Image, fred: bool) -> Vec<u64> {
    let mut list: Vec<u64> = Vec::with_capacity(stops.len());
    for &ip in stops {
        let before = list.len().checked_sub(2).map(|n| list[n]);
        let behind_call = || before.is_none_or(|ip| image.enters_kernel(ip));
        if list.last() == Some(&ip) && (image.repeats(ip) || (fred && behind_call())) {
            continue;
        }
        list.push(ip);
        if image.defers_trap(ip) {
            if let Some(instruction) = image.instruction(ip) {
                list.push(instruction.next_ip());
            }
        }
    }
    list
}

impl Steps {
    /// Checks the list itself: each instruction must be one that can come after the one before it,
    /// but for the given number of times that a signal moved control.
    pub fn check(&self, moves_by_signals: usize) -> Result<(), String> {
        for (n, list) in self.threads.iter().enumerate() {
            let bad: Vec<String> = list
                .windows(2)
                .filter_map(|pair| self.image.check_step(pair[0], pair[1]).err())
                .collect();
            if bad.len() != moves_by_signals {
                return Err(format!(
                    "thread {n}: {} steps that no instruction makes, {moves_by_signals} expected; first: {}",
                    bad.len(),
                    bad.first().map_or("none", String::as_str),
                ));
            }
        }
        Ok(())
    }
}
