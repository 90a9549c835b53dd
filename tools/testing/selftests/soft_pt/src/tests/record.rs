// SPDX-License-Identifier: GPL-2.0

//! Every sampler that needs no hardware, and every way to record, by the unmodified perf: each must
//! decode without an error, each sample must lie at the end of the branches that led to it, and no
//! branch may be one that the program can't take.

use std::{
    collections::BTreeMap,
    fs,
    path::{
        Path,
        PathBuf, //
    },
    process::Command,
    time::{
        Duration,
        Instant, //
    }, //
};

use perf_aux::{
    check,
    check_eq,
    fail,
    load::{
        spin_until,
        Child, //
    },
    ring::{
        page_size,
        AuxMode,
        Ring, //
    },
    skip,
    Ctx,
    Outcome,
    Stop,
    Test, //
};

use crate::{
    image::{
        Flow,
        Image,
        Symbol, //
    },
    perf::{
        self,
        io,
        program,
        Branch,
        Sample,
        Scratch,
        Script, //
    },
    tests::{
        failed,
        pmu_for_perf,
        symbol_of,
        waiting, //
    }, //
};

macro_rules! tests {
    ($($name:literal: $run:expr;)*) => {
        &[$(Test::new(concat!("record.", $name), $run).limit(150),)*]
    };
}

pub const TESTS: &[Test] = tests! {
    "sampler.cpu_clock": |ctx| sample_flow(ctx, "cpu-clock/period=2000000/u", Place::InBranches);
    "sampler.task_clock": |ctx| sample_flow(ctx, "task-clock/period=2000000/u", Place::InBranches);
    "sampler.page_faults": page_faults;
    "sampler.exec_breakpoint": exec_breakpoint;
    "sampler.tracepoint": tracepoint;
    "sampler.uprobe": uprobe;
    "sampler.sort": sort;
    "sampler.size_8192": |ctx| sample_size(ctx, 8192);
    "sampler.size_61440": |ctx| sample_size(ctx, 61440);
    "sampler.per_thread": |ctx| sample_with(ctx, "", 4096, &["--per-thread"]);
    "sampler.system_wide": |ctx| sample_with(ctx, "", 4096, &["-a"]);
    "sampler.no_tsc": |ctx| sample_with(ctx, "tsc=0", 4096, &[]);
    "sampler.no_ret_compression": |ctx| sample_with(ctx, "noretcomp=1", 4096, &[]);
    "sampler.attach": attach_sampling;
    "full.per_cpu": |ctx| full(ctx, "", &[]);
    "full.per_thread": |ctx| full(ctx, "", &["--per-thread"]);
    "full.system_wide": |ctx| full(ctx, "", &["-a"]);
    "full.no_tsc": |ctx| full(ctx, "tsc=0", &["--per-thread"]);
    "full.no_ret_compression": |ctx| full(ctx, "noretcomp=1", &[]);
    "full.sort": full_sort;
    "full.attach": attach_full;
    "full.plain": plain;
    "full.cgroup": cgroup;
    "full.small_area": small_area;
    "full.pipe": pipe;
    "snapshot.at_exit": snapshot_at_exit;
    "snapshot.by_signal": snapshot_by_signal;
    "psb_period": psb_period;
    "no_branch": no_branch;
    "no_branch_by_perf": no_branch_by_perf;
};

/// Where a sampler's samples lie.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// In user mode, on the way from the last branch.
    InBranches,
    /// In the kernel, which the program entered by a system call.
    InSystemCall,
    /// Outside of what is traced, too.
    Anywhere,
}

fn flow(rounds: usize) -> Result<Vec<String>, Stop> {
    let path = program("flow")?;
    Ok(vec![
        path.to_string_lossy().into_owned(),
        rounds.to_string(),
    ])
}

/// Records the program with a group of the PMU and a sampler, and checks what is decoded.
fn sample(
    ctx: &Ctx,
    terms: &str,
    sampler: &str,
    size: usize,
    options: &[&str],
    workload: &[String],
    place: Place,
) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record
        .arg(format!("--aux-sample={size}"))
        // Room for all samples, so that none is lost on a busy machine.
        .args(["-m", "8M"])
        .args(["-e", &format!("{{intel_pt/{terms}/u,{sampler}}}")])
        .args(options)
        .arg("--")
        .args(workload);
    let ran = perf::run_record(&mut record)?;
    check_eq!(
        ran.ended,
        perf::SUCCESS,
        "end of the recorded program, {}",
        ran.stderr
    );
    let command = workload.first().map_or("", String::as_str);
    check_samples(ctx, &data, command, place)
}

/// Checks the samples of a recording: those of processes that run `program`.
pub(super) fn check_samples(ctx: &Ctx, data: &Path, program: &str, place: Place) -> Outcome {
    let mut samples: Vec<Sample> = Vec::new();
    let script = Script::read(data, "L64e", Sample::FIELDS, |line| {
        match Sample::of_line(line) {
            Some(sample) => samples.push(sample),
            None if line.is_empty() => {}
            None => fail!("perf script says: {line}"),
        }
        Ok(())
    })?;
    script.expect_no_errors()?;
    check!(!samples.is_empty(), "no samples");

    let mut images: BTreeMap<i32, Image> = BTreeMap::new();
    let (mut with_branches, mut without, mut branches) = (0, 0, 0);
    for (n, sample) in samples.iter().enumerate() {
        if !script.runs(sample.pid, program) {
            continue;
        }
        if sample.branches.is_empty() {
            without += 1;
            continue;
        }
        with_branches += 1;
        let image = images
            .entry(sample.pid)
            .or_insert_with(|| script.image(sample.pid));
        for &(from, to) in &sample.branches {
            branches += 1;
            // The kernel's page for uprobes is no file.
            let of_uprobes = |ip| script.mapped(sample.pid, ip) == Some("[uprobes]");
            if of_uprobes(from) || of_uprobes(to) {
                continue;
            }
            check_branch(image, from, to)
                .map_err(|e| failed(format!("sample {n} at {:#x}: {e}", sample.ip)))?;
        }
        match place {
            Place::InBranches => sample
                .check_place(image)
                .map_err(|e| failed(format!("sample {n}: {e}")))?,
            Place::InSystemCall => check_in_system_call(sample, image)
                .map_err(|e| failed(format!("sample {n}: {e}")))?,
            Place::Anywhere => {}
        }
    }
    ctx.diag(format!(
        "{} samples, {with_branches} with branches, {without} without; {branches} branches checked",
        samples.len()
    ));
    check!(with_branches > 0, "no sample has branches");
    // A sample in the first instructions of the program has none yet.
    check!(
        without <= 2 || place == Place::Anywhere,
        "{without} samples of {} without branches",
        with_branches + without
    );
    Ok(())
}

/// Checks a branch of a decoded trace; a zero is a place outside of it.
fn check_branch(image: &Image, from: u64, to: u64) -> Result<(), String> {
    match (from, to) {
        (0, to) | (to, 0) if image.contains(to) => Ok(()),
        (0, to) | (to, 0) => Err(format!("trace begins or ends at {to:#x}: not executable")),
        _ => image.check_branch(from, to),
    }
}

/// Checks that straight code leads from the last branch to a system call, or that the last branch
/// is one.
fn check_in_system_call(sample: &Sample, image: &Image) -> Result<(), String> {
    let Some(&(from, to)) = sample.branches.first() else {
        return Err("no branch".into());
    };
    let mut at = if to == 0 { from } else { to };
    for _ in 0..1000 {
        if image.flow(at) == Some(Flow::Kernel) {
            return Ok(());
        }
        let Some(instruction) = image.instruction(at) else {
            break;
        };
        let next = instruction.next_ip();
        if image.check_step(at, next).is_err() {
            break;
        }
        at = next;
    }
    Err(format!(
        "no system call on the way from the last branch {from:#x} -> {to:#x}"
    ))
}

fn sample_flow(ctx: &Ctx, sampler: &str, place: Place) -> Outcome {
    sample(ctx, "", sampler, 4096, &[], &flow(20)?, place)
}

fn sample_size(ctx: &Ctx, size: usize) -> Outcome {
    sample_with(ctx, "", size, &[])
}

fn sample_with(ctx: &Ctx, terms: &str, size: usize, options: &[&str]) -> Outcome {
    // Fewer of the large ones.
    let period = if size > 8192 { 20_000_000 } else { 4_000_000 };
    // And fewer where perf takes longer to write them.
    let period = period * u64::from(perf_aux::sys::slowness());
    let sampler = &format!("cpu-clock/period={period}/u");
    sample(
        ctx,
        terms,
        sampler,
        size,
        options,
        &flow(20)?,
        Place::InBranches,
    )
}

fn page_faults(ctx: &Ctx) -> Outcome {
    let path = program("situation")?.to_string_lossy().into_owned();
    let workload = [path, "page-faults".to_owned()];
    sample(
        ctx,
        "",
        "page-faults/period=1/u",
        4096,
        &[],
        &workload,
        Place::InBranches,
    )
}

fn exec_breakpoint(ctx: &Ctx) -> Outcome {
    let Symbol { address, .. } = symbol_of("flow", "flow_oddities")?;
    sample_flow(ctx, &format!("mem:{address:#x}:xu"), Place::InBranches)
}

const TRACEFS: &str = "/sys/kernel/tracing";

/// Mounts tracefs where it is missing, and skips where it can't be had.
pub(super) fn tracefs() -> Result<(), Stop> {
    let events = Path::new(TRACEFS).join("events");
    if !events.is_dir() {
        let target = std::ffi::CString::new(TRACEFS).map_err(|e| failed(e.to_string()))?;
        // SAFETY: Strings that end as mount wants them, and no data.
        let ret = unsafe {
            libc::mount(
                c"tracefs".as_ptr(),
                target.as_ptr(),
                c"tracefs".as_ptr(),
                0,
                std::ptr::null(),
            )
        };
        if ret < 0 || !events.is_dir() {
            skip!("no tracefs: {}", std::io::Error::last_os_error());
        }
    }
    Ok(())
}

fn tracepoint(ctx: &Ctx) -> Outcome {
    tracefs()?;
    let known = ["syscalls/sys_enter_getppid", "raw_syscalls/sys_enter"];
    let Some(name) = known
        .iter()
        .find(|name| Path::new(TRACEFS).join("events").join(name).is_dir())
    else {
        skip!("no tracepoint of system calls");
    };
    sample_flow(ctx, &name.replace('/', ":"), Place::InSystemCall)
}

/// A uprobe, removed when dropped.
pub(super) struct Uprobe {
    event: &'static str,
}

impl Uprobe {
    fn write(line: &str) -> std::io::Result<()> {
        use std::io::Write;
        fs::OpenOptions::new()
            .append(true)
            .open(Path::new(TRACEFS).join("uprobe_events"))?
            .write_all(line.as_bytes())
    }

    /// A probe called `event`, at this place of a program's file.
    pub(super) fn at(event: &'static str, program: &Path, offset: u64) -> Result<Self, Stop> {
        Self::of_kind('p', event, program, offset)
    }

    /// A probe where the function at this place returns to.
    pub(super) fn at_return(
        event: &'static str,
        program: &Path,
        offset: u64,
    ) -> Result<Self, Stop> {
        Self::of_kind('r', event, program, offset)
    }

    fn of_kind(kind: char, event: &'static str, program: &Path, offset: u64) -> Result<Self, Stop> {
        let name = event.replace(':', "/");
        let line = format!("{kind}:{name} {}:{offset:#x}", program.display());
        // A test that was ended for its time left its own.
        let _ = Self::write(&format!("-:{name}"));
        match Self::write(&line) {
            Ok(()) => Ok(Uprobe { event }),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => skip!("no uprobe events: {e}"),
            Err(e) => fail!("uprobe_events, {line}: {e}"),
        }
    }
}

impl Drop for Uprobe {
    fn drop(&mut self) {
        // A probe that stays is removed when it is wanted again.
        let _ = Self::write(&format!("-:{}", self.event.replace(':', "/")));
    }
}

fn uprobe(ctx: &Ctx) -> Outcome {
    const EVENT: &str = "soft_pt_selftest:site";

    tracefs()?;
    let Symbol { offset, .. } = symbol_of("flow", "flow_oddities")?;
    let _probe = Uprobe::at(EVENT, &program("flow")?, offset)?;
    sample_flow(ctx, EVENT, Place::InBranches)
}

/// A program of the distribution and something for it to do.
fn sort_command(scratch: &Scratch) -> Result<Vec<String>, Stop> {
    let input = scratch.path("words");
    let mut seed = 12345u32;
    let mut text = String::new();
    for _ in 0..300 {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        text += &format!("word{:05}\n", seed >> 16);
    }
    fs::write(&input, text).map_err(io(input.display()))?;
    let output = scratch.path("sorted");
    let path = |path: PathBuf| path.to_string_lossy().into_owned();
    Ok(vec![
        "/usr/bin/sort".into(),
        "-o".into(),
        path(output),
        path(input),
    ])
}

fn sort(ctx: &Ctx) -> Outcome {
    let words = Scratch::named("words")?;
    let workload = sort_command(&words)?;
    let sampler = "cpu-clock/period=2000000/u";
    sample(ctx, "", sampler, 4096, &[], &workload, Place::InBranches)
}

/// Checks every branch of a full trace.
fn check_full(ctx: &Ctx, data: &Path, program: &str) -> Outcome {
    let mut branches: Vec<Branch> = Vec::new();
    let script = Script::read(data, "be", Branch::FIELDS, |line| {
        match Branch::of_line(line) {
            Some(branch) => branches.push(branch),
            None if line.is_empty() => {}
            None => fail!("perf script says: {line}"),
        }
        Ok(())
    })?;
    script.expect_no_errors()?;
    let mut images: BTreeMap<i32, Image> = BTreeMap::new();
    let mut checked = 0;
    // Where each thread was last seen to land.
    let mut landed: BTreeMap<i32, u64> = BTreeMap::new();
    for branch in branches
        .iter()
        .filter(|branch| script.runs(branch.pid, program))
    {
        let image = images
            .entry(branch.pid)
            .or_insert_with(|| script.image(branch.pid));
        check_branch(image, branch.from, branch.to).map_err(failed)?;
        if let Some(at) = landed.insert(branch.tid, branch.to) {
            if at != 0 && branch.from != 0 {
                check_straight(image, at, branch.from).map_err(failed)?;
            }
        }
        checked += 1;
    }
    ctx.diag(format!("{checked} branches checked"));
    check!(checked > 0, "no branch of {program} decoded");
    Ok(())
}

/// Checks that straight code leads from where one branch landed to where the next one leaves.
fn check_straight(image: &Image, mut at: u64, from: u64) -> Result<(), String> {
    let start = at;
    while at < from {
        let Some(instruction) = image.instruction(at) else {
            return Err(format!("no instruction is known at {at:#x}"));
        };
        image
            .check_step(at, instruction.next_ip())
            .map_err(|e| format!("between a branch to {start:#x} and one from {from:#x}: {e}"))?;
        at = instruction.next_ip();
    }
    if at != from {
        return Err(format!(
            "no straight code from {start:#x} to the branch at {from:#x}"
        ));
    }
    Ok(())
}

fn full_of(ctx: &Ctx, terms: &str, options: &[&str], workload: &[String]) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record
        .args(["-m", ",8M", "-e", &format!("intel_pt/{terms}/u")])
        .args(options)
        .arg("--")
        .args(workload);
    let ran = perf::run_record(&mut record)?;
    check_eq!(
        ran.ended,
        perf::SUCCESS,
        "end of the recorded program, {}",
        ran.stderr
    );
    check_full(ctx, &data, workload.first().map_or("", String::as_str))
}

fn full(ctx: &Ctx, terms: &str, options: &[&str]) -> Outcome {
    full_of(ctx, terms, options, &flow(4)?)
}

fn full_sort(ctx: &Ctx) -> Outcome {
    let words = Scratch::named("words")?;
    full_of(ctx, "", &[], &sort_command(&words)?)
}

/// An area that the trace fills many times over: perf must keep up or say what was lost, and what
/// is there must decode.
fn small_area(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let workload = flow(20)?;
    let mut record = perf::record(&data);
    record
        .args(["-m", ",16K", "-e", "intel_pt//u", "--"])
        .args(&workload);
    let ran = perf::run(&mut record)?;
    check_eq!(
        ran.ended,
        perf::SUCCESS,
        "end of the recorded program, {}",
        ran.stderr
    );
    let mut branches = Vec::new();
    let script = Script::read_lossy(&data, "be", Branch::FIELDS, |line| {
        branches.extend(Branch::of_line(line));
        Ok(())
    })?;
    // Where trace was lost perf says so by its own errors; nothing else may be wrong.
    let other: Vec<&String> = script
        .errors
        .iter()
        .filter(|error| !error.contains("Lost trace data") && !error.contains("Overflow"))
        .collect();
    if let Some(first) = other.first() {
        fail!("{} decoder errors; the first: {first}", other.len());
    }
    let image = Image::of_static_program(&program("flow")?).map_err(failed)?;
    for branch in &branches {
        check_branch(&image, branch.from, branch.to).map_err(failed)?;
    }
    ctx.diag(format!(
        "{} branches, {} losses",
        branches.len(),
        script.errors.len()
    ));
    check!(!branches.is_empty(), "no branch decoded");
    Ok(())
}

/// A program that runs already, and its end.
struct Running(std::process::Child);

impl Running {
    fn start(workload: &[String]) -> Result<Self, Stop> {
        let child = Command::new(&workload[0])
            .args(&workload[1..])
            .stdout(std::process::Stdio::null())
            .spawn()
            .map_err(io(&workload[0]))?;
        Ok(Running(child))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// Whether it still runs; it must not have failed.
    fn is_there(&mut self) -> Result<bool, Stop> {
        match self.0.try_wait().map_err(io("wait"))? {
            None => Ok(true),
            Some(status) if status.success() => Ok(false),
            Some(status) => fail!("the traced program ended by {status}"),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Attaches to a program that runs, detaches, and sees that it goes on.
fn attach(options: &[&str], data: &Path) -> Result<Running, Stop> {
    // Long enough to be there until perf is through, at any speed.
    let mut running = Running::start(&flow(100_000_000)?)?;
    let mut record = perf::record(data);
    record
        .args(options)
        .args(["-p", &running.pid(), "--", "sleep", "0.3"]);
    let ran = perf::run_record(&mut record)?;
    check_eq!(ran.ended, perf::SUCCESS, "end of perf, {}", ran.stderr);
    std::thread::sleep(Duration::from_millis(300));
    check!(running.is_there()?, "the program ended");
    Ok(running)
}

fn attach_sampling(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let group = "{intel_pt//u,cpu-clock/period=4000000/u}";
    let _running = attach(&["--aux-sample=4096", "-e", group], &data)?;
    check_samples(ctx, &data, &flow(0)?[0], Place::InBranches)
}

fn attach_full(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let _running = attach(&["-m", ",8M", "-e", "intel_pt//u"], &data)?;
    check_full(ctx, &data, &flow(0)?[0])
}

/// Without `:u`, as one types it first: user mode is traced, and nothing else.
fn plain(ctx: &Ctx) -> Outcome {
    const KERNEL: u64 = 1 << 63;

    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record.args(["-e", "intel_pt//", "--"]).args(flow(4)?);
    let ran = perf::run_record(&mut record)?;
    check_eq!(ran.ended, perf::SUCCESS, "end of perf, {}", ran.stderr);
    check_full(ctx, &data, &flow(0)?[0])?;
    Script::read(&data, "be", Branch::FIELDS, |line| {
        if let Some(branch) = Branch::of_line(line) {
            let kernel = (branch.from | branch.to) & KERNEL != 0;
            check!(!kernel, "a branch of the kernel's: {line}");
        }
        Ok(())
    })
    .map(drop)
}

/// A group of tasks, in a tree that is mounted for it if need be.
struct Cgroup {
    path: PathBuf,
    mounted: bool,
}

impl Cgroup {
    const TREE: &str = "/sys/fs/cgroup";

    fn new(name: &str) -> Result<Self, Stop> {
        let mounted = !Path::new(Self::TREE).join("cgroup.procs").exists();
        if mounted {
            let mount = ["-t", "cgroup2", "none", Self::TREE];
            let ran = perf::run(Command::new("mount").args(mount))?;
            if ran.ended != perf::SUCCESS {
                skip!("no cgroups: {}", ran.stderr);
            }
        }
        // perf's part of a group is there only when its parent passes anything on.
        let control = Path::new(Self::TREE).join("cgroup.subtree_control");
        fs::write(&control, "+pids").map_err(io(control.display()))?;
        let path = Path::new(Self::TREE).join(name);
        let cgroup = Cgroup { path, mounted };
        fs::create_dir(&cgroup.path).map_err(io(cgroup.path.display()))?;
        Ok(cgroup)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The last task of it may still be on its way out.
        spin_until(Duration::from_secs(10), || {
            fs::remove_dir(&self.path).is_ok() || !self.path.exists()
        });
        if self.mounted {
            // A tree that stays does no harm.
            let _ = Command::new("umount").arg(Self::TREE).status();
        }
    }
}

/// The tasks of one cgroup, and no others.
fn cgroup(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    if !perf_aux::sys::is_root() {
        skip!("only root can make a cgroup");
    }
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let name = format!("soft_pt-{}", std::process::id());
    let cgroup = Cgroup::new(&name)?;
    // They run beside it the whole time.
    let mut others = [Child::spinning(None)?, Child::spinning(None)?];
    for other in &mut others {
        other.go()?;
    }
    let inside = format!(
        "echo $$ >{}/cgroup.procs && exec {}",
        cgroup.path.display(),
        flow(4)?.join(" ")
    );
    let mut record = perf::record(&data);
    record.args(["-a", "-m", ",8M", "-e", "intel_pt//u", "-G", &name]);
    let ran = perf::run_record(record.args(["--", "sh", "-c", &inside]))?;
    check_eq!(ran.ended, perf::SUCCESS, "end of perf, {}", ran.stderr);
    check_full(ctx, &data, &flow(0)?[0])?;
    Script::read(&data, "be", Branch::FIELDS, |line| {
        if let Some(branch) = Branch::of_line(line) {
            let other = others.iter().any(|other| other.pid() == branch.pid);
            check!(!other, "a branch of a task of another cgroup: {line}");
        }
        Ok(())
    })
    .map(drop)
}

/// perf record into perf script, nothing on disk.
fn pipe(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let workload = flow(4)?;
    let (out, said) = (scratch.path("out"), scratch.path("said"));
    let line = format!(
        "perf record -B -N -m ,8M -e intel_pt//u -o - -- {} 2>{said} | perf script -i - --itrace=be -F {} >{out} 2>>{said}",
        workload.join(" "),
        Branch::FIELDS,
        said = said.display(),
        out = out.display(),
    );
    let ran = perf::run(Command::new("sh").args(["-c", &line]))?;
    let words = fs::read_to_string(&said).map_err(io(said.display()))?;
    check_eq!(ran.ended, perf::SUCCESS, "{line}: {words}");
    let text = fs::read_to_string(&out).map_err(io(out.display()))?;
    let errors: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("instruction trace error"))
        .collect();
    if let Some(first) = errors.first() {
        fail!("{} decoder errors; the first: {first}", errors.len());
    }
    let image = Image::of_static_program(&program("flow")?).map_err(failed)?;
    let mut checked = 0;
    for branch in text.lines().filter_map(Branch::of_line) {
        check_branch(&image, branch.from, branch.to).map_err(failed)?;
        checked += 1;
    }
    ctx.diag(format!("{checked} branches checked"));
    check!(checked > 0, "no branch decoded; {words}");
    Ok(())
}

fn snapshot_at_exit(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let workload = flow(20)?;
    let mut record = perf::record(&data);
    record
        .args(["-Se", "-m", ",64K", "-e", "intel_pt//u", "--"])
        .args(&workload);
    let ran = perf::run_record(&mut record)?;
    check_eq!(
        ran.ended,
        perf::SUCCESS,
        "end of the recorded program, {}",
        ran.stderr
    );
    check_full(ctx, &data, &workload[0])
}

fn snapshot_by_signal(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut running = Running::start(&flow(100_000_000)?)?;
    let mut record = perf::record(&data);
    record.args([
        "-S",
        "-m",
        ",64K",
        "-e",
        "intel_pt//u",
        "-p",
        &running.pid(),
    ]);
    let said = scratch.path("said");
    let stderr = fs::File::create(&said).map_err(io(said.display()))?;
    let mut perf = record.stderr(stderr).spawn().map_err(io("perf record"))?;
    // It makes the file when it has its signal handlers, and not before; until it is ready it
    // ignores them.
    let end = Instant::now() + Duration::from_secs(60);
    while !data.exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    let size = || fs::metadata(&data).map_or(0, |data| data.len());
    // SAFETY: The process is a child of ours that is not waited for.
    let signal = |signal| unsafe { libc::kill(perf.id() as i32, signal) };
    let (mut snapshots, mut end) = (0, Instant::now() + Duration::from_secs(60));
    while snapshots < 3 && Instant::now() < end {
        let before = size();
        signal(libc::SIGUSR2);
        std::thread::sleep(Duration::from_millis(1500));
        if size() > before {
            snapshots += 1;
            end = Instant::now() + Duration::from_secs(60);
        }
    }
    signal(libc::SIGINT);
    perf.wait().map_err(io("perf record"))?;
    check!(running.is_there()?, "the program ended");
    let words = fs::read_to_string(&said).map_err(io(said.display()))?;
    check!(snapshots == 3, "{snapshots} snapshots; perf says: {words}");
    check_full(ctx, &data, &flow(0)?[0])
}

/// PSBs come as often as was asked for.
fn psb_period(ctx: &Ctx) -> Outcome {
    const PSB: [u8; 16] = *b"\x02\x82\x02\x82\x02\x82\x02\x82\x02\x82\x02\x82\x02\x82\x02\x82";

    let pmu = ctx.pmu()?;
    let Some(periods) = pmu.file("caps/psb_periods")? else {
        skip!("{} has no caps/psb_periods", pmu.name());
    };
    let periods = u64::from_str_radix(&periods, 16)
        .map_err(|e| failed(format!("caps/psb_periods {periods:?}: {e}")))?;
    // Returns are written out, so that a short run makes a long trace.
    let noretcomp = pmu.config("noretcomp", 1)?.unwrap_or(0);
    for n in (0..6).filter(|n| periods & (1 << n) != 0) {
        let Some(config) = pmu.config("psb_period", n)? else {
            skip!("{} has no format/psb_period", pmu.name());
        };
        let period = 2048usize << n;
        let child = waiting(1000)?;
        let attr = pmu.event(config | noretcomp).pid(child.pid());
        let event = attr.enable_on_exec().open()?;
        let ring = Ring::map(&event, 8)?;
        // The trace ends by itself when the area is full.
        let aux = ring.map_aux(&event, (4 * period).div_ceil(page_size()), AuxMode::Full)?;
        let mut child = child;
        child.go()?;
        spin_until(Duration::from_secs(60), || {
            std::thread::sleep(Duration::from_millis(10));
            ring.aux_head() as usize + 1024 > aux.size()
        });
        event.disable()?;
        let bytes = aux.bytes(0, (ring.aux_head() as usize).min(aux.size()));
        let mut places = Vec::new();
        let mut at = 0;
        while at + PSB.len() <= bytes.len() {
            if bytes[at..].starts_with(&PSB) {
                places.push(at);
                at += PSB.len();
            } else {
                at += 1;
            }
        }
        let apart = |pair: &[usize]| pair[1] - pair[0];
        let widest = places.windows(2).map(apart).max().unwrap_or(0);
        ctx.diag(format!(
            "psb_period={n}: {} bytes, {} PSBs, at most {widest} bytes apart",
            bytes.len(),
            places.len()
        ));
        check!(
            places.first() == Some(&0),
            "the trace does not begin with a PSB"
        );
        check!(
            bytes.len() > 3 * period,
            "only {} bytes of trace",
            bytes.len()
        );
        let rest = bytes.len() - places.last().unwrap_or(&0);
        check!(
            widest.max(rest) <= period,
            "PSBs {widest} bytes apart and {rest} after the last, expected at most {period}"
        );
    }
    Ok(())
}

/// The length of the packet at the start of `bytes`, if it is one of those that do not depend on
/// the flow.
fn packet_without_flow(bytes: &[u8]) -> Option<usize> {
    match bytes {
        [0, ..] => Some(1),
        [0x02, 0x82, ..] => bytes.starts_with(&[0x02, 0x82].repeat(8)).then_some(16),
        [0x02, 0x23, ..] => Some(2),
        [0x02, 0x03, _, 0, ..] => Some(4),
        [0x19, ..] => Some(8),
        _ => None,
    }
}

/// Without `branch` there is no packet of the flow; `tsc` says whether there is one of the time.
fn no_branch(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let (Some(pt), Some(tsc)) = (pmu.config("pt", 1)?, pmu.config("tsc", 1)?) else {
        skip!("{} has no format/pt or format/tsc", pmu.name());
    };
    for (config, with_time) in [(pt, false), (pt | tsc, true)] {
        let child = waiting(4)?;
        let attr = pmu.event(config).pid(child.pid());
        let event = attr.enable_on_exec().open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 256, AuxMode::Full)?;
        check_eq!(child.wait()?, 0, "exit code of the traced program");
        let trace = aux.bytes(0, ring.aux_head() as usize);
        let (mut at, mut times) = (0, 0);
        while at < trace.len() {
            let Some(length) = packet_without_flow(&trace[at..]) else {
                let end = trace.len().min(at + 16);
                fail!(
                    "config {config:#x}: a packet {:02x?} at {at:#x}",
                    &trace[at..end]
                );
            };
            times += usize::from(trace[at] == 0x19);
            at += length;
        }
        ctx.diag(format!(
            "config {config:#x}: {} bytes, {times} times",
            trace.len()
        ));
        check!(!trace.is_empty(), "config {config:#x}: no trace");
        check_eq!(times > 0, with_time, "config {config:#x}: TSC packets");
    }
    Ok(())
}

fn no_branch_by_perf(ctx: &Ctx) -> Outcome {
    pmu_for_perf(ctx)?;
    let scratch = Scratch::new()?;
    let data = scratch.path("perf.data");
    let mut record = perf::record(&data);
    record
        .args(["-e", "intel_pt/branch=0/u", "--"])
        .args(flow(4)?);
    let ran = perf::run_record(&mut record)?;
    check_eq!(ran.ended, perf::SUCCESS, "end of perf, {}", ran.stderr);
    let mut branches = 0;
    let script = Script::read(&data, "be", Branch::FIELDS, |line| {
        branches += usize::from(Branch::of_line(line).is_some());
        Ok(())
    })?;
    script.expect_no_errors()?;
    check_eq!(branches, 0, "branches");
    Ok(())
}
