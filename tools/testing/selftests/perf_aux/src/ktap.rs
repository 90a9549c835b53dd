// SPDX-License-Identifier: GPL-2.0

//! The test runner: KTAP version 1, each test in a process of its own.
//!
//! A test is a function that returns an [`Outcome`]. It runs in a forked child which leads its own
//! process group, so a crash, a stray signal or a hang is one failed test, and whatever it forked
//! is gone before the next one starts. A test also fails when the kernel logged a fault while it
//! ran, if the log can be read.
//!
//! `Documentation/dev-tools/ktap.rst` is the format, and the exit codes are those of kselftest: 0
//! all passed, 1 any failed, 4 all skipped.

use crate::error::{
    Error,
    Result, //
};
use crate::load;
use crate::sys::{
    KernelLog,
    Pmu, //
};
use std::fmt;
use std::io::Read;
use std::os::fd::{
    AsRawFd,
    OwnedFd, //
};
use std::process::ExitCode;
use std::time::{
    Duration,
    Instant, //
};

/// Why a test ended early.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Something the test needs is missing here.
    Skip(String),
    /// Something is wrong.
    Fail(String),
}

/// What a test returns. `?` turns any [`Error`] into a failure.
pub type Outcome = std::result::Result<(), Stop>;

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Fail(error.to_string())
    }
}

/// Ends the test as skipped, with the reason.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {
        return ::std::result::Result::Err($crate::Stop::Skip(::std::format!($($reason)*)))
    };
}

/// Ends the test as failed, with the reason.
#[macro_export]
macro_rules! fail {
    ($($reason:tt)*) => {
        return ::std::result::Result::Err($crate::Stop::Fail(::std::format!($($reason)*)))
    };
}

/// Fails unless the condition holds; the message says what was seen.
#[macro_export]
macro_rules! check {
    ($condition:expr, $($seen:tt)*) => {
        if !$condition {
            $crate::fail!("{}:{}: {}", ::std::file!(), ::std::line!(), ::std::format!($($seen)*));
        }
    };
}

/// Fails unless both are equal; the message says what they are.
#[macro_export]
macro_rules! check_eq {
    ($left:expr, $right:expr, $($what:tt)*) => {{
        let (left, right) = (&$left, &$right);
        $crate::check!(left == right, "{}: {:?}, expected {:?}", ::std::format!($($what)*), left, right);
    }};
}

/// One test.
#[derive(Clone, Copy)]
pub struct Test {
    /// Its name in the output: one word, parts separated by dots.
    pub name: &'static str,
    /// What it runs.
    pub run: fn(&Ctx) -> Outcome,
    /// How long that may take.
    pub limit: Duration,
}

impl Test {
    /// A test with the usual time limit of 60 seconds.
    pub const fn new(name: &'static str, run: fn(&Ctx) -> Outcome) -> Self {
        Test {
            name,
            run,
            limit: Duration::from_secs(60),
        }
    }

    /// The same with another time limit.
    pub const fn limit(mut self, seconds: u64) -> Self {
        self.limit = Duration::from_secs(seconds);
        self
    }
}

/// What a test gets to know.
pub struct Ctx {
    pmu: Option<String>,
    seed: u64,
    long: u32,
}

impl Ctx {
    /// `--seed`: the same seed gives the same choices.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Random numbers of the seed.
    pub fn random(&self) -> Random {
        Random(self.seed)
    }

    /// `rounds` of what a test repeats, or with `--long` so many times as many.
    pub fn rounds(&self, rounds: usize) -> usize {
        rounds * self.long as usize
    }

    /// `time` that a test goes on for, or with `--long` so many times as long.
    pub fn time(&self, time: Duration) -> Duration {
        time * self.long
    }

    /// A diagnostic line.
    pub fn diag(&self, text: impl fmt::Display) {
        diag(text);
    }

    /// The AUX PMU to test: that of `--pmu`, or one that can snapshot, `soft_pt` and `intel_pt`
    /// before others. Skips when there is none.
    pub fn pmu(&self) -> std::result::Result<Pmu, Stop> {
        if let Some(name) = &self.pmu {
            let pmu = Pmu::needed(name)?;
            if !pmu.can_snapshot()? {
                skip!("the PMU {name} has no snapshot_aux");
            }
            return Ok(pmu);
        }
        let mut pmus = Pmu::all()?;
        let rank = |pmu: &Pmu| match pmu.name() {
            "soft_pt" => 0,
            "intel_pt" => 1,
            _ => 2,
        };
        pmus.sort_by_key(rank);
        for pmu in pmus {
            // What an event of a PMU needs that has no AUX area, nobody here knows.
            if pmu.can_snapshot().unwrap_or(false) {
                return Ok(pmu);
            }
        }
        skip!("no PMU here has snapshot_aux")
    }
}

/// A small repeatable generator (SplitMix64).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The generator of this seed.
    pub fn new(seed: u64) -> Self {
        Random(seed)
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.any() % end.max(1)
    }
}

/// Prints a diagnostic line.
pub fn diag(text: impl fmt::Display) {
    for line in text.to_string().lines() {
        print(&format!("# {line}\n"));
    }
}

/// Writes to standard output without a buffer that a fork would double.
fn print(text: &str) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        // SAFETY: the slice is live.
        let n = unsafe { libc::write(1, rest.as_ptr().cast(), rest.len()) };
        if n <= 0 {
            return;
        }
        rest = &rest[n as usize..];
    }
}

struct Options {
    list: bool,
    filters: Vec<String>,
    pmu: Option<String>,
    seed: u64,
    repeat: usize,
    slow: u32,
    long: u32,
    known: Vec<(String, String)>,
}

const HELP: &str = "\
  --list          print the names of the tests
  --filter TEXT   run only tests whose name contains TEXT, or matches it if it has a *; may be
                  repeated
  --pmu NAME      the AUX PMU to test (default: soft_pt, intel_pt, or any that has snapshot_aux)
  --seed N        seed of every random choice (default: by the clock, and printed)
  --repeat N      run each test N times
  --slow N        multiply every time limit by N (default: 6 on a kernel with lockdep, else 1)
  --long N        go on N times as long in tests that repeat something at random
  --known FILE    do not run the tests that FILE names, but skip them for the reason it gives:
                  a line \"NAME REASON\" each; for faults that a kernel is known to have
";

impl Options {
    fn parse(
        name: &str,
        arguments: impl Iterator<Item = String>,
    ) -> std::result::Result<Self, String> {
        let mut options = Options {
            list: false,
            filters: Vec::new(),
            pmu: None,
            seed: std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(1, |now| now.as_nanos() as u64 & 0xffff_ffff),
            repeat: 1,
            slow: crate::sys::slowness(),
            long: 1,
            known: Vec::new(),
        };
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let (key, given) = match argument.split_once('=') {
                Some((key, value)) => (key.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let mut value = || {
                given
                    .clone()
                    .or_else(|| arguments.next())
                    .ok_or_else(|| format!("{key} needs a value"))
            };
            fn number<T: std::str::FromStr>(text: String) -> std::result::Result<T, String> {
                text.parse()
                    .map_err(|_| format!("{text:?} is not a number in range"))
            }
            match key.as_str() {
                "--list" => options.list = true,
                "--filter" => options.filters.push(value()?),
                "--pmu" => options.pmu = Some(value()?),
                "--seed" => options.seed = number(value()?)?,
                "--repeat" => options.repeat = number(value()?)?,
                "--slow" => options.slow = number(value()?)?,
                "--long" => options.long = number(value()?)?,
                "--known" => options.known = known(&value()?)?,
                "--help" | "-h" => return Err(format!("usage: {name} [options]\n{HELP}")),
                _ => {
                    return Err(format!(
                        "unknown option {key}\nusage: {name} [options]\n{HELP}"
                    ))
                }
            }
        }
        Ok(options)
    }

    fn wants(&self, test: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| matches(filter, test))
    }
}

/// Reads the file of `--known`.
fn known(file: &str) -> std::result::Result<Vec<(String, String)>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| match line.split_once(char::is_whitespace) {
            Some((name, reason)) => Ok((name.to_owned(), reason.trim().to_owned())),
            None => Err(format!("{file}: no reason for {line}")),
        })
        .collect()
}

/// Whether a name contains the text, or matches it as a whole if it has a `*`.
fn matches(filter: &str, name: &str) -> bool {
    let Some((front, mut rest)) = filter.split_once('*') else {
        return name.contains(filter);
    };
    let Some(mut name) = name.strip_prefix(front) else {
        return false;
    };
    while let Some((part, tail)) = rest.split_once('*') {
        let Some(at) = name.find(part) else {
            return false;
        };
        (name, rest) = (&name[at + part.len()..], tail);
    }
    name.ends_with(rest)
}

/// Runs the tests as the command line asks; the exit code is for `main` to return.
pub fn main(name: &str, suites: &[&[Test]]) -> ExitCode {
    let options = match Options::parse(name, std::env::args().skip(1)) {
        Ok(options) => options,
        Err(message) => {
            eprint!(
                "{message}{}",
                if message.ends_with('\n') { "" } else { "\n" }
            );
            return ExitCode::from(2);
        }
    };
    let tests: Vec<Test> = suites
        .iter()
        .flat_map(|suite| suite.iter())
        .filter(|test| options.wants(test.name))
        .flat_map(|test| std::iter::repeat_n(*test, options.repeat))
        .collect();
    if options.list {
        for test in &tests {
            print(&format!("{}\n", test.name));
        }
        return ExitCode::SUCCESS;
    }
    // A test's orphans come to this process, which waits for them.
    // SAFETY: no preconditions.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };

    print(&format!("KTAP version 1\n1..{}\n", tests.len()));
    diag(format_args!("{name} --seed {}", options.seed));
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (i, test) in tests.iter().enumerate() {
        let number = i + 1;
        let ctx = Ctx {
            pmu: options.pmu.clone(),
            seed: options.seed.wrapping_add(i as u64),
            long: options.long,
        };
        let started = Instant::now();
        let known = options.known.iter().find(|(name, _)| name == test.name);
        let outcome = match known {
            Some((_, reason)) => Err(Stop::Skip(reason.clone())),
            None => isolated(test, &ctx, test.limit * options.slow * options.long)
                .unwrap_or_else(|error| Err(Stop::Fail(error.to_string()))),
        };
        let time = started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                passed += 1;
                print(&format!("ok {number} {}\n", test.name));
            }
            Err(Stop::Skip(reason)) => {
                skipped += 1;
                print(&format!(
                    "ok {number} {} # SKIP {}\n",
                    test.name,
                    one_line(&reason)
                ));
            }
            Err(Stop::Fail(reason)) => {
                failed += 1;
                diag(format_args!("{}: {reason}", test.name));
                diag(format_args!(
                    "{}: after {time:.1} s, seed {}",
                    test.name, ctx.seed
                ));
                print(&format!("not ok {number} {}\n", test.name));
            }
        }
    }
    diag(format_args!(
        "Totals: pass:{passed} fail:{failed} xfail:0 xpass:0 skip:{skipped} error:0"
    ));
    ExitCode::from(match (passed, failed) {
        (_, 1..) => 1,
        (0, 0) => 4,
        _ => 0,
    })
}

fn one_line(text: &str) -> String {
    text.replace('\n', "; ").replace('#', "")
}

/// Runs one test in a child that leads its own process group.
fn isolated(test: &Test, ctx: &Ctx, limit: Duration) -> Result<Outcome> {
    let mut log = KernelLog::from_now();
    let (result, report) = load::pipe()?;
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(Error::last_os(format!("fork for test {}", test.name)));
    }
    if pid == 0 {
        drop(result);
        child(test, ctx, report);
    }
    drop(report);
    // The child does the same: whoever comes first, the group exists when it is needed.
    // SAFETY: no preconditions.
    unsafe { libc::setpgid(pid, pid) };

    let ended = wait(pid, limit)?;
    // SAFETY: the group is that of our child, which is not reaped yet, so the id has no other
    // owner.
    unsafe { libc::kill(-pid, libc::SIGKILL) };
    let mut status = 0;
    // SAFETY: `status` is live. The first wait is for the child; then for what it left behind,
    // which comes to us.
    unsafe {
        while libc::waitpid(pid, &mut status, 0) < 0 && errno() == libc::EINTR {}
        loop {
            if libc::waitpid(-pid, std::ptr::null_mut(), 0) < 0 && errno() != libc::EINTR {
                break;
            }
        }
    }

    let mut outcome = if !ended {
        Err(Stop::Fail(format!("not finished in {} s", limit.as_secs())))
    } else if libc::WIFSIGNALED(status) {
        Err(Stop::Fail(format!(
            "ended by signal {}",
            libc::WTERMSIG(status)
        )))
    } else {
        let mut text = String::new();
        let _ = std::fs::File::from(result).read_to_string(&mut text);
        match libc::WEXITSTATUS(status) {
            0 => Ok(()),
            4 => Err(Stop::Skip(text)),
            1 => Err(Stop::Fail(text)),
            code => Err(Stop::Fail(format!("exit code {code} {text}"))),
        }
    };
    let faults = log.as_mut().map(KernelLog::faults).unwrap_or_default();
    if !faults.is_empty() {
        let mut text = format!("the kernel logged a fault:\n{}", faults.join("\n"));
        if let Err(Stop::Fail(reason)) = &outcome {
            text = format!("{reason}\n{text}");
        }
        outcome = Err(Stop::Fail(text));
    }
    Ok(outcome)
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The life of a test's process.
fn child(test: &Test, ctx: &Ctx, report: OwnedFd) -> ! {
    // SAFETY: no preconditions.
    unsafe {
        libc::setpgid(0, 0);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
    std::panic::set_hook(Box::new(|info| diag(info)));
    let run = std::panic::AssertUnwindSafe(|| (test.run)(ctx));
    let (code, text) = match std::panic::catch_unwind(run) {
        Ok(Ok(())) => (0, String::new()),
        Ok(Err(Stop::Skip(reason))) => (4, reason),
        Ok(Err(Stop::Fail(reason))) => (1, reason),
        Err(_) => (1, "the test panicked".to_owned()),
    };
    // Kept short, so that a pipe takes it whole with no reader there yet.
    let text = &text.as_bytes()[..text.len().min(4000)];
    // SAFETY: the slice is live; and the process ends without running what its parent registered.
    unsafe {
        libc::write(report.as_raw_fd(), text.as_ptr().cast(), text.len());
        libc::_exit(code)
    }
}

/// Waits until the process ended, but not longer than `limit`; whether it did. It is not reaped.
fn wait(pid: libc::pid_t, limit: Duration) -> Result<bool> {
    let end = Instant::now() + limit;
    // SAFETY: the process is an unreaped child.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) } as libc::c_int;
    if fd < 0 {
        return Err(Error::last_os(format!("pidfd_open({pid})")));
    }
    // SAFETY: just made, no other owner.
    let fd: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) };
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live pollfd.
        match unsafe { libc::poll(&mut poll, 1, left.as_millis().min(60_000) as i32) } {
            1 => return Ok(true),
            0 if left.is_zero() => return Ok(false),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_substrings_or_patterns() {
        assert!(matches("poll", "notify.poll.mmap"));
        assert!(!matches("sigio", "notify.poll.mmap"));
        assert!(matches("notify.*", "notify.poll.mmap"));
        assert!(matches("*.mmap", "notify.poll.mmap"));
        assert!(matches("notify.*.mmap", "notify.poll.mmap"));
        assert!(!matches("poll.*", "notify.poll.mmap"));
        assert!(!matches("notify.*.none", "notify.poll.mmap"));
    }

    #[test]
    fn options_are_checked() {
        let parse = |line: &str| Options::parse("x", line.split_whitespace().map(str::to_owned));
        let options = parse("--pmu intel_pt --seed=7 --filter a --filter b").unwrap();
        assert_eq!(options.pmu.as_deref(), Some("intel_pt"));
        assert_eq!(options.seed, 7);
        assert!(options.wants("cab") && !options.wants("xyz"));
        assert!(parse("--seed").is_err());
        assert!(parse("--seed many").is_err());
        assert!(parse("--fast").is_err());
    }

    fn run(run: fn(&Ctx) -> Outcome, limit: u64) -> Outcome {
        let ctx = Ctx {
            pmu: None,
            seed: 1,
            long: 1,
        };
        isolated(&Test::new("t", run), &ctx, Duration::from_secs(limit)).unwrap()
    }

    #[test]
    fn outcomes_cross_the_process_border() {
        assert_eq!(run(|_| Ok(()), 10), Ok(()));
        assert_eq!(
            run(|_| Err(Stop::Skip("no".into())), 10),
            Err(Stop::Skip("no".into()))
        );
        assert_eq!(
            run(|_| Err(Stop::Fail("bad".into())), 10),
            Err(Stop::Fail("bad".into()))
        );
    }

    #[test]
    fn a_signal_or_a_hang_is_a_failure() {
        fn trap(_: &Ctx) -> Outcome {
            // SAFETY: no preconditions.
            unsafe { libc::raise(libc::SIGTRAP) };
            Ok(())
        }
        fn hang(_: &Ctx) -> Outcome {
            std::thread::sleep(Duration::from_secs(100));
            Ok(())
        }
        assert_eq!(run(trap, 10), Err(Stop::Fail("ended by signal 5".into())));
        assert_eq!(run(hang, 1), Err(Stop::Fail("not finished in 1 s".into())));
    }
}
