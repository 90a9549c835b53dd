// SPDX-License-Identifier: GPL-2.0

//! The unmodified perf tool: recording a program, and reading what perf decodes.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs,
    io::{
        BufRead,
        BufReader, //
    },
    path::{
        Path,
        PathBuf, //
    },
    process::{
        Command,
        Stdio, //
    },
};

use perf_aux::{
    fail,
    skip,
    Stop, //
};

use crate::{
    image::{
        Flow,
        Image,
        Map, //
    },
    stepper::same_addresses, //
};

/// Turns a failed operation on a file or program into a failed test.
pub fn io(what: impl std::fmt::Display) -> impl FnOnce(std::io::Error) -> Stop {
    move |error| Stop::Fail(format!("{what}: {error}"))
}

/// A program of this crate, which lies beside this one.
pub fn program(name: &str) -> Result<PathBuf, Stop> {
    let own = std::env::current_exe().map_err(io("own path"))?;
    let path = own.with_file_name(name);
    if !path.is_file() {
        fail!("{} is not there: build the whole crate", path.display());
    }
    Ok(path)
}

/// How a program ends that finds nothing wrong.
pub const SUCCESS: &str = "exit status: 0";

/// A folder of temporary files, gone when dropped.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Result<Self, Stop> {
        Self::named("data")
    }

    pub fn named(name: &str) -> Result<Self, Stop> {
        let name = format!("soft_pt-selftest-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).map_err(io(path.display()))?;
        Ok(Scratch(path))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that stays is no reason to fail a test.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// How a program ended and what it wrote.
#[derive(Debug, PartialEq, Eq)]
pub struct Ran {
    /// As `exit status: 0` or `signal: 5 (SIGTRAP)`.
    pub ended: String,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a command to its end, at the same addresses each time.
pub fn run(command: &mut Command) -> Result<Ran, Stop> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = same_addresses(command)
        .stdin(Stdio::null())
        .output()
        .map_err(io(&name))?;
    Ok(Ran {
        ended: output.status.to_string(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    })
}

/// Skips the test when there is no perf.
pub fn needed() -> Result<(), Stop> {
    match Command::new("perf").arg("--version").output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(_) => fail!("perf --version fails"),
        Err(error) => skip!("no perf tool: {error}"),
    }
}

/// A `perf record` command that writes to `data`, without the program to run.
///
/// Build ids are left out: the decoder then reads the programs themselves, which are still there.
/// The mappings of a program that runs already are read for as long as it takes: perf gives up
/// after half a second, and what it has not read by then can't be decoded.
pub fn record(data: &Path) -> Command {
    let mut command = Command::new("perf");
    command
        .args(["record", "-B", "-N", "--proc-map-timeout", "60000", "-o"])
        .arg(data);
    command
}

/// Runs a `perf record` command; its own complaints about lost data fail the test.
pub fn run_record(command: &mut Command) -> Result<Ran, Stop> {
    let ran = run(command)?;
    for complaint in ["lost", "rror:", "arning:"] {
        if let Some(line) = ran.stderr.lines().find(|line| line.contains(complaint)) {
            fail!("{}\nsays: {line}\n{}", shown(command), ran.stderr);
        }
    }
    Ok(ran)
}

/// A command as one would type it.
pub fn shown(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .map(|word| match word.contains([' ', '{', '/']) {
            true => format!("'{word}'"),
            false => word.into_owned(),
        })
        .collect::<Vec<_>>()
        .join(" ")
}

/// What `perf script` decodes, line by line; errors of the decoder are counted and kept.
pub struct Script {
    /// Executable mappings by process, in the order in which they came.
    maps: BTreeMap<i32, Vec<Map>>,
    /// The decoder's errors.
    pub errors: Vec<String>,
}

impl Script {
    /// Runs `perf script` with this `--itrace` and these fields, and hands on each line that is
    /// neither an error nor a mapping.
    pub fn read(
        data: &Path,
        itrace: &str,
        fields: &str,
        line: impl FnMut(&str) -> Result<(), Stop>,
    ) -> Result<Self, Stop> {
        let (script, words) = Self::read_all(data, itrace, fields, line)?;
        if words.contains("lost") {
            fail!("perf script says: {words}");
        }
        Ok(script)
    }

    /// The same for a recording from which trace may be missing.
    pub fn read_lossy(
        data: &Path,
        itrace: &str,
        fields: &str,
        line: impl FnMut(&str) -> Result<(), Stop>,
    ) -> Result<Self, Stop> {
        Self::read_all(data, itrace, fields, line).map(|(script, _)| script)
    }

    fn read_all(
        data: &Path,
        itrace: &str,
        fields: &str,
        mut line: impl FnMut(&str) -> Result<(), Stop>,
    ) -> Result<(Self, String), Stop> {
        let said = data.with_extension("stderr");
        let stderr = fs::File::create(&said).map_err(io(said.display()))?;
        let mut command = Command::new("perf");
        command
            .args([
                "script",
                "-f",
                "--ns",
                "--show-mmap-events",
                "-F",
                fields,
                "-i",
            ])
            .arg(data)
            .arg(format!("--itrace={itrace}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr);
        let mut child = command.spawn().map_err(io("perf script"))?;
        let mut script = Script {
            maps: BTreeMap::new(),
            errors: Vec::new(),
        };
        let mut result = Ok(());
        if let Some(out) = child.stdout.take() {
            let mut out = BufReader::new(out);
            let mut bytes = Vec::new();
            while result.is_ok() {
                bytes.clear();
                match out.read_until(b'\n', &mut bytes) {
                    Ok(0) => break,
                    Ok(_) => {
                        let text = String::from_utf8_lossy(&bytes);
                        if !script.take(&text) {
                            result = line(text.trim_end());
                        }
                    }
                    Err(error) => result = Err(io("output of perf script")(error)),
                }
            }
        }
        if result.is_err() {
            // The reason is known already.
            let _ = child.kill();
        }
        let status = child.wait().map_err(io("perf script"))?;
        result?;
        let words = fs::read_to_string(&said).map_err(io(said.display()))?;
        if !status.success() {
            fail!("{}: {status}\n{words}", shown(&command));
        }
        Ok((script, words))
    }

    /// Takes an error or a mapping; whether it was one.
    fn take(&mut self, line: &str) -> bool {
        if line.contains("instruction trace error") {
            self.errors.push(line.trim().to_owned());
            return true;
        }
        let Some((_, rest)) = line.split_once("PERF_RECORD_") else {
            return false;
        };
        if let (Some(map), Some(pid)) = (Map::of_perf_line(line), pid_of_record(rest)) {
            self.maps.entry(pid).or_default().push(map);
        }
        true
    }

    /// Whether the process has this program mapped.
    pub fn runs(&self, pid: i32, program: &str) -> bool {
        let maps = self.maps.get(&pid).map_or(&[] as &[Map], Vec::as_slice);
        maps.iter().any(|map| map.path == program)
    }

    /// What of the process is mapped at this address.
    pub fn mapped(&self, pid: i32, address: u64) -> Option<&str> {
        let maps = self.maps.get(&pid).map_or(&[] as &[Map], Vec::as_slice);
        let map = maps
            .iter()
            .rev()
            .find(|map| (map.start..map.end).contains(&address));
        map.map(|map| map.path.as_str())
    }

    /// The executable memory of a process.
    pub fn image(&self, pid: i32) -> Image {
        Image::load(self.maps.get(&pid).map_or(&[], Vec::as_slice))
    }

    /// Fails if the decoder had anything to complain about.
    pub fn expect_no_errors(&self) -> Result<(), Stop> {
        if let Some(first) = self.errors.first() {
            fail!("{} decoder errors; the first: {first}", self.errors.len());
        }
        Ok(())
    }
}

/// The process in `MMAP2 123/124: …`.
fn pid_of_record(rest: &str) -> Option<i32> {
    let (_, rest) = rest.split_once(' ')?;
    rest.split('/').next()?.trim().parse().ok()
}

/// One decoded branch. A zero is a place outside of the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    pub pid: i32,
    pub tid: i32,
    pub from: u64,
    pub to: u64,
}

impl Branch {
    /// The fields to ask for.
    pub const FIELDS: &'static str = "pid,tid,ip,addr";

    /// Reads a line such as ` 12/12  401000 => 401010`; `None` for what is not a branch.
    pub fn of_line(line: &str) -> Option<Self> {
        let (before, to) = line.split_once("=>")?;
        let mut words = before.split_whitespace();
        let (pid, tid) = task(&mut words)?;
        Some(Branch {
            pid,
            tid,
            from: u64::from_str_radix(words.next()?, 16).ok()?,
            to: u64::from_str_radix(to.split_whitespace().next()?, 16).ok()?,
        })
    }
}

/// Takes `12/13`, or `12/ 13` as perf pads it.
fn task<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<(i32, i32)> {
    let word = words.next()?;
    let (pid, tid) = word.split_once('/')?;
    let tid = if tid.is_empty() { words.next()? } else { tid };
    Some((pid.parse().ok()?, tid.parse().ok()?))
}

/// One decoded instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub tid: i32,
    pub ip: u64,
}

impl Step {
    /// The fields to ask for.
    pub const FIELDS: &'static str = "pid,tid,event,ip";

    /// Reads a line such as ` 12/12  instructions:u:  401000`. `None` for what is not an
    /// instruction, but a sample of another event.
    pub fn of_line(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (_, tid) = task(&mut words)?;
        if !words.next()?.starts_with("instructions") {
            return None;
        }
        let ip = u64::from_str_radix(words.next()?, 16).ok()?;
        Some(Step { tid, ip })
    }
}

/// One sample with the branches that led to it, the latest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    pub pid: i32,
    pub ip: u64,
    pub branches: Vec<(u64, u64)>,
}

impl Sample {
    /// The fields to ask for.
    pub const FIELDS: &'static str = "pid,tid,ip,brstack";

    /// Reads a line such as ` 12/12  401000  0x401000/0x401010/P/-/-/0//-`.
    pub fn of_line(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (pid, _) = task(&mut words)?;
        let ip = u64::from_str_radix(words.next()?, 16).ok()?;
        let branches = words
            .map(|word| {
                let mut parts = word.split('/');
                let from = parts.next()?.strip_prefix("0x")?;
                let to = parts.next()?.strip_prefix("0x")?;
                Some((
                    u64::from_str_radix(from, 16).ok()?,
                    u64::from_str_radix(to, 16).ok()?,
                ))
            })
            .collect::<Option<_>>()?;
        Some(Sample { pid, ip, branches })
    }

    /// Checks that the sample was taken on the way from its last branch. Jumps and calls to a
    /// target that they name are on the way: a decoder goes them only once a later packet sends it
    /// there.
    pub fn check_place(&self, image: &Image) -> Result<(), String> {
        /// More than any way without a decision in the programs recorded.
        const LONGEST: usize = 10_000;

        let Some(&(from, to)) = self.branches.first() else {
            return Err("no branch".into());
        };
        let mut at = to;
        for _ in 0..LONGEST {
            if at == self.ip {
                return Ok(());
            }
            let instruction = image
                .instruction(at)
                .ok_or_else(|| format!("no instruction is known at {at:#x}"))?;
            at = match image.flow(at) {
                Some(Flow::Next | Flow::Either(_)) => instruction.next_ip(),
                Some(Flow::To(target)) => target,
                _ => break,
            };
        }
        Err(format!(
            "the sample at {:#x} is not on the way from its last branch {from:#x} -> {to:#x}",
            self.ip
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lines() {
        let branch = Branch::of_line("      5/6           401000 =>           401010").unwrap();
        assert_eq!((branch.pid, branch.tid), (5, 6));
        assert_eq!((branch.from, branch.to), (0x401000, 0x401010));
        assert_eq!(Branch::of_line(" 5/5  401000"), None);

        assert_eq!(Step::of_line("  5/5  probe:site:  401000"), None);
        let step = Step::of_line("  5/ 6  instructions:u:      7ffff7fe");
        assert_eq!(
            step,
            Some(Step {
                tid: 6,
                ip: 0x7fff_f7fe
            })
        );

        let line = " 5/6  401010  0x401000/0x401010/P/-/-/0/RET/-  0x0/0x401000/P/-/-/0//- ";
        let sample = Sample::of_line(line).unwrap();
        assert_eq!(sample.ip, 0x401010);
        assert_eq!(sample.branches, [(0x401000, 0x401010), (0, 0x401000)]);
        assert_eq!(Sample::of_line(" 5/6 401010").unwrap().branches, []);
    }

    #[test]
    fn takes_errors_and_maps() {
        let mut script = Script {
            maps: BTreeMap::new(),
            errors: Vec::new(),
        };
        let map = " 7/7 PERF_RECORD_MMAP2 7/7: [0x401000(0x2000) @ 0x1000 00:17 5 0]: r-xp /x";
        assert!(script.take(map));
        assert!(script.take(" 7/7 PERF_RECORD_COMM exec: x:7/7"));
        assert!(script.take(" instruction trace error type 1 code 5: Failed to get instruction"));
        assert!(!script.take(" 7/7 401000 => 401010"));
        assert_eq!(script.maps[&7].len(), 1);
        assert_eq!(script.errors.len(), 1);
    }
}
