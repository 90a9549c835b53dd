// SPDX-License-Identifier: GPL-2.0

//! Children and threads, traced with the parent or not, and how tasks come and go.

use std::{
    arch::asm,
    fs,
    path::Path,
    process::Command,
    sync::atomic::Ordering,
    thread as threads, //
};

use crate::support::*;

/// Children that go on as copies of the program.
pub fn fork(_: &[String]) -> Result<(), Problem> {
    for _ in 0..10 {
        let child = in_child(child_work)?;
        expect("TF after fork", flags() & TF, 0)?;
        expect_exit("forked child", child, 42)?;
    }
    Ok(())
}

/// A child that borrows the parent's memory until it exits.
pub fn vfork(_: &[String]) -> Result<(), Problem> {
    for _ in 0..10 {
        let pid: i64;
        // SAFETY: The child touches no memory and ends by exit.
        unsafe {
            asm!(
                "syscall", "test rax, rax", "jnz 3f",
                "mov ecx, 50", "2: dec ecx", "jnz 2b",
                "mov edi, 42", "mov eax, 60", "syscall", "ud2",
                "3:",
                inlateout("rax") libc::SYS_vfork => pid, out("rcx") _, out("r11") _, out("rdi") _,
            )
        };
        expect("a child of vfork", pid > 0, true)?;
        expect("TF after vfork", flags() & TF, 0)?;
        expect_exit("child of vfork", pid as i32, 42)?;
    }
    Ok(())
}

/// A child by clone() with a stack of its own.
pub fn clone(_: &[String]) -> Result<(), Problem> {
    extern "C" fn body(_: *mut libc::c_void) -> i32 {
        child_work()
    }
    let mut stack = vec![0u128; 4096];
    for _ in 0..10 {
        // SAFETY: The child shares the memory, runs on its own stack and only computes. The parent
        // waits for it.
        let pid = unsafe {
            let top = stack.as_mut_ptr().add(stack.len());
            libc::clone(
                body,
                top.cast(),
                libc::CLONE_VM | libc::SIGCHLD,
                std::ptr::null_mut(),
            )
        };
        os("clone", pid.into())?;
        expect_exit("cloned child", pid, 42)?;
        expect("TF after clone", flags() & TF, 0)?;
    }
    Ok(())
}

/// Threads, several at a time.
pub fn thread(_: &[String]) -> Result<(), Problem> {
    for _ in 0..5 {
        let running: Vec<_> = (0..4).map(|_| threads::spawn(child_work)).collect();
        for thread in running {
            expect("thread", thread.join().ok(), Some(42))?;
        }
        expect("TF after clone", flags() & TF, 0)?;
    }
    Ok(())
}

fn myself() -> Result<std::path::PathBuf, Problem> {
    std::env::current_exe().map_err(|e| Problem::Wrong(format!("own path: {e}")))
}

/// Other programs, by posix_spawn().
pub fn spawn(_: &[String]) -> Result<(), Problem> {
    let program = myself()?;
    for _ in 0..3 {
        let output = Command::new(&program)
            .args(["exec", "0"])
            .output()
            .map_err(|e| Problem::Wrong(format!("spawning {}: {e}", program.display())))?;
        expect("spawned program", output.status.code(), Some(0))?;
        expect(
            "its output",
            String::from_utf8_lossy(&output.stdout).as_ref(),
            "done\n",
        )?;
    }
    Ok(())
}

/// `exec [N]`: becomes itself N times over.
pub fn exec(args: &[String]) -> Result<(), Problem> {
    let left: u32 = match args.first() {
        Some(n) => n.parse().map_err(|e| Problem::Wrong(format!("{n}: {e}")))?,
        None => 3,
    };
    expect("work", child_work(), 42)?;
    if left == 0 {
        println!("done");
        return Ok(());
    }
    use std::os::unix::process::CommandExt;
    let error = Command::new(myself()?)
        .args(["exec", &(left - 1).to_string()])
        .exec();
    Err(Problem::Wrong(format!("exec: {error}")))
}

/// The flags in a core file, by its NT_PRSTATUS notes.
fn flags_in_core(core: &[u8]) -> Option<Vec<u64>> {
    const PT_NOTE: u64 = 4;
    const NT_PRSTATUS: u64 = 1;
    // struct elf_prstatus: the registers start here, and the flags are the 19th of them.
    const REGISTERS: usize = 112;
    let at = |offset: usize, size: usize| -> Option<u64> {
        let mut value = [0; 8];
        value[..size].copy_from_slice(core.get(offset..offset + size)?);
        Some(u64::from_le_bytes(value))
    };
    let mut found = Vec::new();
    let (table, entry, entries) = (
        at(32, 8)? as usize,
        at(54, 2)? as usize,
        at(56, 2)? as usize,
    );
    for header in (0..entries).map(|n| table + n * entry) {
        if at(header, 4)? != PT_NOTE {
            continue;
        }
        let mut note = at(header + 8, 8)? as usize;
        let end = note + at(header + 32, 8)? as usize;
        while note + 12 <= end {
            let name = (at(note, 4)? as usize).next_multiple_of(4);
            let size = (at(note + 4, 4)? as usize).next_multiple_of(4);
            if at(note + 8, 4)? == NT_PRSTATUS {
                found.push(at(note + 12 + name + REGISTERS + 18 * 8, 8)?);
            }
            note += 12 + name + size;
        }
    }
    Some(found)
}

/// A program that dumps core, and the flags in the dump.
pub fn core_dump(_: &[String]) -> Result<(), Problem> {
    let pattern = "/proc/sys/kernel/core_pattern";
    let folder = std::env::temp_dir().join(format!("situation-core-{}", std::process::id()));
    fs::create_dir(&folder).map_err(|e| Problem::Wrong(format!("{}: {e}", folder.display())))?;
    let old = fs::read_to_string(pattern).unwrap_or_default();
    let result = fs::write(pattern, "core")
        .map_err(|e| Problem::Lacking(format!("{pattern}: {e}")))
        .and_then(|()| dump_in(&folder));
    // Both are clean-up after a result that stands already.
    let _ = fs::write(pattern, old.trim_end());
    let _ = fs::remove_dir_all(&folder);
    result
}

fn dump_in(folder: &Path) -> Result<(), Problem> {
    for _ in 0..3 {
        let child = in_child(|| {
            let limit = libc::rlimit {
                rlim_cur: libc::RLIM_INFINITY,
                rlim_max: libc::RLIM_INFINITY,
            };
            // SAFETY: Reads one rlimit. The fault ends the child.
            unsafe {
                if libc::setrlimit(libc::RLIMIT_CORE, &limit) < 0
                    || std::env::set_current_dir(folder).is_err()
                {
                    return 1;
                }
                asm!("ud2");
            }
            2
        })?;
        let status = wait(child)?;
        expect(
            "child",
            said(status),
            format!("killed by signal {}", libc::SIGILL),
        )?;
        if !libc::WCOREDUMP(status) {
            return Err(Problem::Lacking("the kernel dumps no core".into()));
        }
        let file = fs::read_dir(folder)
            .ok()
            .and_then(|mut entries| entries.find_map(Result::ok))
            .map(|entry| entry.path());
        let Some(file) = file else {
            return Err(Problem::Wrong(
                "no core file although the child dumped core".into(),
            ));
        };
        let core = fs::read(&file).map_err(|e| Problem::Wrong(format!("core: {e}")))?;
        let _ = fs::remove_file(&file);
        let Some(flags) = flags_in_core(&core) else {
            return Err(Problem::Wrong("the core file ends early".into()));
        };
        expect("threads in the core file", flags.len(), 1)?;
        expect("TF in the core file", flags[0] & TF, 0)?;
    }
    Ok(())
}

fn forever() -> i32 {
    loop {
        spin(1000);
    }
}

/// Children that are killed while they run.
pub fn kill(_: &[String]) -> Result<(), Problem> {
    for signal in [libc::SIGKILL, libc::SIGTERM, libc::SIGKILL] {
        let shared = Shared::new()?;
        let child = in_child(|| {
            shared.word().store(1, Ordering::Release);
            forever()
        })?;
        while shared.word().load(Ordering::Acquire) == 0 {
            threads::yield_now();
        }
        // SAFETY: The child is ours and not waited for.
        os("kill", unsafe { libc::kill(child, signal) }.into())?;
        expect(
            "child",
            said(wait(child)?),
            format!("killed by signal {signal}"),
        )?;
    }
    Ok(())
}

/// A program that exits while its other threads run.
pub fn exit_with_threads(_: &[String]) -> Result<(), Problem> {
    for _ in 0..3 {
        let child = in_child(|| {
            for _ in 0..3 {
                threads::spawn(forever);
            }
            spin(10_000);
            7
        })?;
        expect_exit("child with threads", child, 7)?;
    }
    Ok(())
}

fn pin(cpu: usize) -> Result<(), Problem> {
    // SAFETY: A CPU set is plain data and the CPU is one of its bits.
    let ret = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, std::mem::size_of_val(&set), &set)
    };
    os("sched_setaffinity", ret.into()).map(drop)
}

/// From one CPU to the other and back.
pub fn migrate(_: &[String]) -> Result<(), Problem> {
    let cpus = threads::available_parallelism().map_or(1, |n| n.get());
    if cpus < 2 {
        return Err(Problem::Lacking("there is one CPU only".into()));
    }
    for round in 0..40 {
        pin(round % 2)?;
        expect("rounds", spin(1000), 1000)?;
        expect("TF", flags() & TF, 0)?;
    }
    reaches(spin as usize, 40);
    Ok(())
}

/// Two tasks on one CPU that wake each other: perf swaps the contexts of such clones instead of
/// stopping one and starting the other.
pub fn ping_pong(args: &[String]) -> Result<(), Problem> {
    pin(0)?;
    // Until whoever started this is ready.
    if args.iter().any(|arg| arg == "wait") {
        let mut line = String::new();
        std::io::stdin()
            .read_line(&mut line)
            .map_err(|error| Problem::Wrong(format!("standard input: {error}")))?;
    }
    let pipe = || -> Result<[i32; 2], Problem> {
        let mut fds = [0; 2];
        // SAFETY: Writes two descriptors.
        os("pipe", unsafe { libc::pipe(fds.as_mut_ptr()) }.into())?;
        Ok(fds)
    };
    let (there, back) = (pipe()?, pipe()?);
    const ROUNDS: u64 = 300;
    let play = move |from: i32, to: i32, first: bool| -> i32 {
        let mut value = 0u64;
        for _ in 0..ROUNDS {
            // SAFETY: Reads and writes one word.
            unsafe {
                if first && libc::write(to, (&raw const value).cast(), 8) != 8 {
                    return 1;
                }
                if libc::read(from, (&raw mut value).cast(), 8) != 8 {
                    return 2;
                }
                value += spin(20);
                if !first && libc::write(to, (&raw const value).cast(), 8) != 8 {
                    return 3;
                }
            }
            if flags() & TF != 0 {
                return 4;
            }
        }
        // Both add in each round, and the one that starts adds last.
        let adds = if first { 2 * ROUNDS } else { 2 * ROUNDS - 1 };
        if value == adds * 20 {
            42
        } else {
            5
        }
    };
    let one = in_child(|| play(back[0], there[1], true))?;
    let two = in_child(|| play(there[0], back[1], false))?;
    expect_exit("first player", one, 42)?;
    expect_exit("second player", two, 42)
}

static ALARMS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

extern "C" fn on_alarm(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: Called by the kernel.
    let frame = saved_flags(unsafe { registers(context) });
    ALARMS.fetch_add(1 + (((frame | flags()) & TF) << 24), Ordering::Relaxed);
}

/// `churn [SECONDS]`: everything at once for a while, for a tracer that goes on and off meanwhile:
/// timers, forks, threads, flag images, system calls, migration.
pub fn churn(args: &[String]) -> Result<(), Problem> {
    let seconds: u64 = match args.first() {
        Some(n) => n.parse().map_err(|e| Problem::Wrong(format!("{n}: {e}")))?,
        None => 1,
    };
    handle(libc::SIGALRM, on_alarm, libc::SA_RESTART)?;
    let tick = libc::timeval {
        tv_sec: 0,
        tv_usec: 1700,
    };
    let timer = libc::itimerval {
        it_interval: tick,
        it_value: tick,
    };
    // SAFETY: Reads one itimerval.
    let ret = unsafe { libc::setitimer(libc::ITIMER_REAL, &timer, std::ptr::null_mut()) };
    os("setitimer", ret.into())?;
    let cpus = threads::available_parallelism().map_or(1, |n| n.get());
    let end = std::time::Instant::now() + std::time::Duration::from_secs(seconds);
    let mut round = 0usize;
    while std::time::Instant::now() < end {
        pin(round % cpus)?;
        expect("rounds", spin(2000), 2000)?;
        for _ in 0..50 {
            let (image, r11): (u64, u64);
            // SAFETY: Puts back the flags it took; getpid() touches no memory.
            unsafe {
                asm!("pushfq", "mov {i}, [rsp]", "popfq", "mov eax, 39", "syscall", "mov {r}, r11",
                     i = out(reg) image, r = out(reg) r11, out("rax") _, out("rcx") _, out("r11") _)
            };
            expect("TF in an image or r11", (image | r11) & TF, 0)?;
        }
        if round % 8 == 0 {
            let child = in_child(child_work)?;
            expect_exit("forked child", child, 42)?;
        }
        if round % 8 == 4 {
            expect("thread", threads::spawn(child_work).join().ok(), Some(42))?;
        }
        round += 1;
    }
    // SAFETY: As above, with all zeros to end it.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &std::mem::zeroed(), std::ptr::null_mut()) };
    expect(
        "handlers or frames with TF",
        ALARMS.load(Ordering::Relaxed) >> 32,
        0,
    )?;
    expect("TF at the end", flags() & TF, 0)
}
