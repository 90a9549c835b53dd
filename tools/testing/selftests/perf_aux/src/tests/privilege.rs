// SPDX-License-Identifier: GPL-2.0

//! What a user without privileges gets: the flow of user mode of that user's own tasks, and no
//! address of the kernel.
//!
//! `Documentation/admin-guide/perf-security.rst` has the levels of `kernel.perf_event_paranoid`: up
//! to 0 whole CPUs may be watched by anybody, up to 1 kernel mode.

use super::source::Source;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::notify;
use perf_aux::ring::{
    AuxMode,
    Ring, //
};
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    skip,
    Attr,
    Ctx,
    Error,
    Outcome,
    Stop,
    Test, //
};
use std::ffi::CString;
use std::fs;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{
    Duration,
    Instant, //
};

pub const TESTS: &[Test] = &[
    Test::new("privilege.own_tasks_only", own_tasks_only),
    Test::new("privilege.no_kernel_addresses", no_kernel_addresses).limit(120),
    Test::new("privilege.nothing_after_setuid", nothing_after_setuid).limit(120),
];

const LEVELS: [i64; 4] = [-1, 0, 1, 2];

/// Runs `test` as a user without privileges at each level of `kernel.perf_event_paranoid`.
pub(super) fn at_each_level(test: impl Fn(i64) -> Outcome) -> Outcome {
    if !sys::is_root() {
        skip!("setting kernel.perf_event_paranoid needs root");
    }
    for level in LEVELS {
        let _paranoid = sys::Sysctl::set("kernel/perf_event_paranoid", level)?;
        let run = || -> Outcome {
            sys::become_nobody()?;
            // What changed its user is like a setuid program: not even its own user may look at it.
            // SAFETY: no preconditions.
            unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) };
            test(level)
        };
        let child = Child::new(move || match run() {
            Ok(()) => 0,
            Err(stop) => {
                perf_aux::ktap::diag(format_args!("perf_event_paranoid {level}: {stop:?}"));
                1
            }
        })?;
        check_eq!(
            child.wait()?,
            0,
            "exit status of an unprivileged run at perf_event_paranoid {level}"
        );
    }
    Ok(())
}

/// Neither the tasks of others nor, above level 0, whole CPUs; nor kernel mode above level 1.
fn own_tasks_only(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let mut others = Child::spinning(None)?;
    others.go()?;
    let other = others.pid();
    at_each_level(|level| {
        let event = source.pmu.event(source.config);
        check_eq!(event.refusal(), None, "errno of an event of the own task");
        let own = Child::spinning(None)?;
        let of_own = event.clone().pid(own.pid());
        check_eq!(of_own.refusal(), None, "errno of an event of an own child");
        for (what, attr) in [
            ("another user's task", event.clone().pid(other)),
            ("the first process", event.clone().pid(1)),
            (
                "another user's task, inherited",
                event.clone().pid(other).inherit(),
            ),
        ] {
            check_eq!(
                attr.refusal(),
                Some(libc::EACCES),
                "errno of an event of {what}"
            );
        }
        check_eq!(
            event.clone().pid(-1).cpu(0).refusal(),
            (level > 0).then_some(libc::EACCES),
            "errno of an event of a CPU"
        );
        let with_kernel = event.clone().with(|attr| attr.set_exclude_kernel(0));
        check!(
            with_kernel.refusal().is_some() || level < 2,
            "an event of kernel mode was opened at level {level}"
        );
        let leader = event.open()?;
        let sampler = Attr::cpu_clock(1_000_000)
            .sample_type(perf_aux::abi::PERF_SAMPLE_AUX.into())
            .aux_sample_size(64)
            .group(&leader);
        check_eq!(
            sampler.refusal(),
            (level > 1).then_some(libc::EACCES),
            "errno of a sampler of kernel mode"
        );
        check_eq!(
            sampler.user_only().refusal(),
            None,
            "errno of a sampler of user mode"
        );
        Ok(())
    })
}

/// The addresses in Intel PT packets, from the first PSB on.
fn addresses(trace: &[u8]) -> Result<Vec<u64>, String> {
    const PSB: [u8; 2] = [0x02, 0x82];
    let start = trace
        .windows(16)
        .position(|window| window.chunks(2).all(|pair| pair == PSB))
        .ok_or("no PSB")?;
    let mut rest = &trace[start..];
    let (mut last, mut found) = (0u64, Vec::new());
    while let [first, ..] = rest {
        let second = rest.get(1).copied().unwrap_or(0);
        let length = match (first, second) {
            (0x00, _) => 1,
            (0x02, 0x82) => {
                last = 0;
                16
            }
            (0x02, 0x23 | 0xf3) => 2,
            (0x02, 0x03) => 4,
            (0x02, 0xa3) => 8,
            (0x02, _) => return Err(format!("packet 02 {second:02x}")),
            (0x19, _) => 8,
            (0x59 | 0x99, _) => 2,
            (first, _) if first & 1 == 0 => 1,
            (first, _) if matches!(first & 0x1f, 0x0d | 0x11 | 0x01 | 0x1d) => {
                let bytes = [0, 2, 4, 6, 6, 0, 8, 0][usize::from(first >> 5)];
                let mut ip = last.to_le_bytes();
                let Some(payload) = rest.get(1..1 + bytes) else {
                    break;
                };
                ip[..bytes].copy_from_slice(payload);
                last = u64::from_le_bytes(ip);
                if first >> 5 == 3 {
                    last = ((last << 16) as i64 >> 16) as u64;
                }
                if bytes > 0 {
                    found.push(last);
                }
                1 + bytes
            }
            (first, _) => return Err(format!("packet {first:02x}")),
        };
        rest = rest.get(length..).unwrap_or(&[]);
    }
    Ok(found)
}

extern "C" fn on_signal(_: libc::c_int) {}

/// What takes a task into the kernel in each way that there is.
fn enter_kernel_often() -> Outcome {
    // SAFETY: the handler does nothing, and the calls have no other preconditions.
    unsafe {
        libc::signal(libc::SIGUSR1, on_signal as *const () as usize);
        for _ in 0..50 {
            libc::getppid();
            libc::raise(libc::SIGUSR1);
            libc::sched_yield();
        }
    }
    let mut memory = super::faults::Pages::new(50)?;
    while memory.fault() {
        load::spin(20);
    }
    load::spin_for(Duration::from_millis(20));
    Ok(())
}

/// System calls, signals, faults and interrupts leave nothing of the kernel in the trace.
fn no_kernel_addresses(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if source.pmu.file("caps/psb_periods")?.is_none() {
        skip!("{} writes no Intel PT packets", source.pmu.name());
    }
    at_each_level(|_| {
        // The trace as the PMU would make it by default, without the times.
        let event = source.pmu.event(0).open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 64, AuxMode::Snapshot)?;
        event.enable()?;
        enter_kernel_often()?;
        event.disable()?;
        let trace = aux.bytes(ring.aux_head(), aux.size());
        let found = match addresses(&trace) {
            Ok(found) => found,
            Err(what) => perf_aux::fail!("the trace: {what}"),
        };
        check!(found.len() > 200, "only {} addresses", found.len());
        for ip in found {
            check!(ip < 1 << 47, "the trace has the address {ip:#x}");
        }
        Ok(())
    })
}

/// A program that anybody may run, in two versions: with the rights of whoever runs it, and with
/// those of root.
struct Programs {
    folder: PathBuf,
}

impl Programs {
    const SOURCE: &'static str = "/usr/bin/sha256sum";

    fn new() -> std::result::Result<Self, Stop> {
        let folder = std::env::temp_dir().join(format!("perf_aux.{}", std::process::id()));
        let io = |e: std::io::Error| Error::from_io(format!("making {}", folder.display()), &e);
        fs::create_dir(&folder).map_err(io)?;
        let programs = Programs {
            folder: folder.clone(),
        };
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).map_err(io)?;
        for (name, mode) in [("plain", 0o755), ("setuid", 0o4755)] {
            let path = folder.join(name);
            fs::copy(Self::SOURCE, &path).map_err(io)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(io)?;
        }
        Ok(programs)
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// A traced process that is about to run a program, which works as long as it is fed.
struct Runner {
    // Dropped first, which ends the program.
    food: fs::File,
    child: Child,
}

impl Runner {
    fn new(path: PathBuf) -> std::result::Result<Self, Stop> {
        let (input, food) = load::pipe()?;
        let name = CString::new(path.into_os_string().into_encoded_bytes()).unwrap_or_default();
        let feed = food.as_raw_fd();
        let child = Child::new(move || {
            load::spin(1000);
            let argv = [name.as_ptr(), std::ptr::null()];
            // SAFETY: a string and a list that end as exec wants it; the output is not wanted.
            unsafe {
                libc::close(feed);
                libc::dup2(input.as_raw_fd(), 0);
                let null = libc::open(c"/dev/null".as_ptr(), libc::O_WRONLY);
                libc::dup2(null, 1);
                libc::execv(name.as_ptr(), argv.as_ptr());
            }
            127
        })?;
        Ok(Runner {
            food: fs::File::from(food),
            child,
        })
    }

    fn effective_uid(&self) -> Option<u32> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.pid())).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    fn runs(&self, name: &str) -> bool {
        fs::read_to_string(format!("/proc/{}/comm", self.child.pid()))
            .is_ok_and(|comm| comm.trim_end() == name)
    }

    /// Gives the program something to do, and some time.
    fn feed(&mut self) -> Outcome {
        self.food
            .write_all(&[0; 4096])
            .map_err(|e| Error::from_io("feeding the program", &e))?;
        std::thread::sleep(Duration::from_millis(200));
        Ok(())
    }
}

/// Once a traced task runs a program with other rights than its user's, its trace is over.
fn nothing_after_setuid(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    if !sys::is_root() {
        skip!("making a setuid program needs root");
    }
    if !fs::exists(Programs::SOURCE).unwrap_or(false) {
        skip!("there is no {}", Programs::SOURCE);
    }
    let programs = Programs::new()?;
    at_each_level(|level| {
        for name in ["plain", "setuid"] {
            let mut runner = Runner::new(programs.folder.join(name))?;
            let event = source
                .pmu
                .event(source.config)
                .pid(runner.child.pid())
                .open()?;
            let ring = Ring::map(&event, 8)?;
            let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
            event.enable()?;
            runner.child.go()?;
            let end = Instant::now() + Duration::from_secs(20);
            while !runner.runs(name) {
                check!(Instant::now() < end, "the program was not run");
                std::thread::sleep(Duration::from_millis(10));
            }
            let root = runner.effective_uid() == Some(0);
            check_eq!(root, name == "setuid", "whether {name} runs as root");

            // A program that is stepped may take long to get anywhere, and one that is not has to
            // do much before a timer comes.
            let end = Instant::now() + Duration::from_secs(20);
            runner.feed()?;
            while aux.all().iter().all(|byte| *byte == 0) && Instant::now() < end {
                runner.feed()?;
            }
            let before = aux.all();
            runner.feed()?;
            while !root && aux.all() == before && Instant::now() < end {
                runner.feed()?;
            }
            let moved = aux.all() != before;
            let over = notify::poll(&event, Duration::ZERO)? & libc::POLLHUP != 0;
            check!(
                before.iter().any(|byte| *byte != 0),
                "nothing was traced before {name}"
            );
            check_eq!(
                (moved, over),
                (!root, root),
                "whether the trace of {name} goes on, and is over, at level {level}"
            );
            // Without food it ends. It could not be killed any more.
            let Runner { child, food } = runner;
            event.disable().ok();
            drop(food);
            check_eq!(child.wait()?, 0, "exit status of {name}");
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::addresses;

    #[test]
    fn addresses_of_packets() {
        let mut trace = vec![0, 0];
        trace.extend([0x02, 0x82].repeat(8));
        trace.extend([0x02, 0x23, 0x71, 0x78, 0x56, 0x34, 0x12, 0x00, 0x00]);
        trace.extend([0x06, 0x2d, 0xcd, 0xab, 0x01]);
        trace.extend([0x7d, 0x00, 0x00, 0x00, 0x81, 0xff, 0xff]);
        assert_eq!(
            addresses(&trace),
            Ok(vec![0x1234_5678, 0x1234_abcd, 0xffff_ffff_8100_0000])
        );
        assert!(addresses(&[0; 64]).is_err());
        trace.extend([0x02, 0x43]);
        assert!(addresses(&trace).is_err());
    }
}
