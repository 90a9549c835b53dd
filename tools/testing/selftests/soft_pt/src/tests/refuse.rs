// SPDX-License-Identifier: GPL-2.0

//! What must be refused, by which errno, with nothing left behind.

use std::{
    ffi::CString,
    fs,
    os::fd::AsRawFd,
    path::PathBuf, //
};

use perf_aux::{
    check,
    check_eq,
    fail,
    group::Setup,
    load::{
        spin_for,
        Child, //
    },
    ring::{
        page_size,
        AuxMode,
        Ring, //
    },
    skip,
    sys::{
        is_root,
        module_refcount,
        KernelLog,
        Pmu, //
    },
    Attr,
    Ctx,
    Outcome,
    Stop,
    Test, //
};

use crate::{
    perf::{
        self,
        io,
        Scratch, //
    },
    tests::{
        failed,
        pmu_for_perf, //
    },
};

pub const TESTS: &[Test] = &[
    Test::new("refuse.no_user_mode", no_user_mode),
    Test::new("refuse.unknown_config", unknown_config),
    Test::new("refuse.words_of_perf", words_of_perf).limit(60),
    Test::new("refuse.second_event", second_event),
    Test::new("refuse.aux_area_of_odd_size", aux_area_of_odd_size),
    Test::new(
        "refuse.sampling_into_writable_area",
        sampling_into_writable_area,
    ),
    Test::new("refuse.unload_while_in_use", unload_while_in_use),
    Test::new("refuse.load_twice", load_twice),
    Test::new("refuse.name_taken", name_taken),
    Test::new("refuse.vendor_of_perf", vendor_of_perf),
    Test::new("refuse.unload_under_load", unload_under_load).limit(90),
];

/// The PMU, if it is the one that single-steps; hardware can do more.
fn soft_pt(ctx: &Ctx) -> Result<Pmu, Stop> {
    let pmu = ctx.pmu()?;
    if module_refcount(MODULE)?.is_none() {
        skip!("the module {MODULE} is not loaded");
    }
    Ok(pmu)
}

/// Fails unless opening the event is refused by this errno.
fn expect_errno(attr: &Attr, errno: i32, what: &str) -> Outcome {
    match attr.open() {
        Ok(_) => fail!("{what}: opened"),
        Err(error) => check_eq!(error.errno(), Some(errno), "errno, {what}: {error}"),
    }
    Ok(())
}

fn no_user_mode(ctx: &Ctx) -> Outcome {
    let pmu = soft_pt(ctx)?;
    expect_errno(&pmu.event(0).exclude_user(), libc::EINVAL, "exclude_user")
}

/// What perf says of the hardware's fields that can't be had: which one it is.
fn words_of_perf(ctx: &Ctx) -> Outcome {
    let pmu = pmu_for_perf(ctx)?;
    if pmu.file("caps/mtc")?.as_deref() != Some("0") {
        skip!("there are MTC packets");
    }
    let unknown = |name| format!("unknown term '{name}' for pmu 'intel_pt'");
    let invalid = |name| format!("Invalid {name} for intel_pt. Valid values are: 0");
    for (name, words) in [
        ("cyc", unknown("cyc")),
        ("ptw", unknown("ptw")),
        ("pwr_evt", unknown("pwr_evt")),
        ("event", unknown("event")),
        ("notnt", unknown("notnt")),
        ("mtc_period", invalid("mtc_period")),
        ("cyc_thresh", invalid("cyc_thresh")),
        // By the kernel.
        ("mtc", "Invalid event (intel_pt/mtc=1/u)".into()),
    ] {
        let scratch = Scratch::new()?;
        let event = format!("intel_pt/{name}=1/u");
        let mut record = perf::record(&scratch.path("perf.data"));
        let ran = perf::run(record.args(["-e", &event, "--", "true"]))?;
        check!(ran.ended != perf::SUCCESS, "{event} was recorded");
        check!(
            ran.stderr.contains(&words),
            "perf does not say of {event}: {words}\n{}",
            ran.stderr
        );
    }
    Ok(())
}

fn unknown_config(ctx: &Ctx) -> Outcome {
    let pmu = soft_pt(ctx)?;
    let folder = format!("/sys/bus/event_source/devices/{}/format", pmu.name());
    let mut known = 0;
    for entry in fs::read_dir(&folder).map_err(io(&folder))? {
        let name = entry.map_err(io(&folder))?.file_name();
        let name = name.to_string_lossy();
        let mut all = 1;
        // The largest value that fits.
        while let Ok(Some(bits)) = pmu.config(&name, all) {
            known |= bits;
            all = all * 2 + 1;
        }
    }
    check!(known != 0, "{folder} describes no bits");
    let pt = pmu.config("pt", 1)?.unwrap_or(0);
    for bit in (0..64).map(|n| 1u64 << n).filter(|bit| known & bit == 0) {
        expect_errno(&pmu.event(bit), libc::EINVAL, &format!("config {bit:#x}"))?;
        expect_errno(
            &pmu.event(bit | pt),
            libc::EINVAL,
            &format!("config {:#x}", bit | pt),
        )?;
    }
    if let Some(branch) = pmu.config("branch", 1)? {
        expect_errno(&pmu.event(branch), libc::EINVAL, "branch without pt")?;
        pmu.event(branch | pt).open()?;
    }
    // What can't be had, and can be asked for by its name: perf's own test asks for mtc=0.
    for (name, cap) in [
        ("mtc", "mtc"),
        ("mtc_period", "mtc_periods"),
        ("cyc_thresh", "cycle_thresholds"),
    ] {
        let Some(one) = pmu.config(name, 1)? else {
            fail!("there is no format/{name}");
        };
        if pmu.file(&format!("caps/{cap}"))?.as_deref() == Some("0") {
            expect_errno(&pmu.event(one), libc::EINVAL, name)?;
            expect_errno(
                &pmu.event(one | pt),
                libc::EINVAL,
                &format!("{name} and pt"),
            )?;
        }
    }
    if let Some(periods) = pmu.file("caps/psb_periods")? {
        let periods = u64::from_str_radix(&periods, 16)
            .map_err(|e| failed(format!("caps/psb_periods {periods:?}: {e}")))?;
        for n in 0..16 {
            let Some(config) = pmu.config("psb_period", n)? else {
                break;
            };
            match periods & (1 << n) {
                0 => expect_errno(&pmu.event(config), libc::EINVAL, &format!("psb_period={n}"))?,
                _ => drop(pmu.event(config).open()?),
            }
        }
    }
    let config1 = pmu.event(0).with(|attr| attr.__bindgen_anon_3.config1 = 1);
    expect_errno(&config1, libc::EINVAL, "config1")?;
    let config2 = pmu.event(0).with(|attr| attr.__bindgen_anon_4.config2 = 1);
    expect_errno(&config2, libc::EINVAL, "config2")
}

/// The PMU is exclusive: a task and the CPU it runs on can't both be traced.
fn second_event(ctx: &Ctx) -> Outcome {
    let pmu = soft_pt(ctx)?;
    let task = pmu.event(0).open()?;
    let cpu = pmu.event(0).pid(-1).cpu(0);
    expect_errno(&cpu, libc::EBUSY, "a CPU while a task is traced")?;
    drop(task);
    let held = cpu.open()?;
    expect_errno(&pmu.event(0), libc::EBUSY, "a task while a CPU is traced")?;
    drop(held);
    pmu.event(0).open()?;
    Ok(())
}

fn aux_area_of_odd_size(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let event = pmu.event(0).open()?;
    let ring = Ring::map(&event, 8)?;
    let offset = (9 * page_size()) as u64;
    for mode in [AuxMode::Snapshot, AuxMode::Full] {
        for pages in [3, 5, 7, 12, 1000] {
            match ring.map_aux_at(&event, offset, pages * page_size(), mode) {
                Ok(_) => fail!("an AUX area of {pages} pages was mapped"),
                Err(error) => check_eq!(error.errno(), Some(libc::EINVAL), "errno: {error}"),
            }
        }
        // After all of that a good one is as good as ever.
        let aux = ring.map_aux_at(&event, offset, 4 * page_size(), mode)?;
        event.enable()?;
        spin_for(std::time::Duration::from_millis(20));
        event.disable()?;
        check!(
            aux.all().iter().any(|byte| *byte != 0),
            "nothing traced, {mode:?}"
        );
    }
    Ok(())
}

fn sampling_into_writable_area(ctx: &Ctx) -> Outcome {
    let pmu = ctx.pmu()?;
    let mut setup = Setup::new(&pmu, 0);
    setup.mode = AuxMode::Full;
    let mut group = match setup.open() {
        Ok(group) => group,
        Err(error) => {
            check_eq!(error.errno(), Some(libc::EINVAL), "errno: {error}");
            return Ok(());
        }
    };
    group.run(|| spin_for(std::time::Duration::from_millis(100)))?;
    let samples = group.samples()?;
    for sample in &samples {
        let aux = sample.aux.as_deref().unwrap_or(&[]);
        let trace = aux.iter().filter(|byte| **byte != 0).count();
        check!(
            aux.is_empty(),
            "{} AUX bytes, {trace} of them not zero, in a sample from a writable area",
            aux.len()
        );
    }
    ctx.diag(format!("{} samples, none with AUX data", samples.len()));
    Ok(())
}

const MODULE: &str = "soft_pt";

/// Unloads the module; gives the errno if that is refused.
fn unload() -> Result<(), i32> {
    let name = c"soft_pt";
    // SAFETY: A name that ends as the call wants it.
    let ret = unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), libc::O_NONBLOCK) };
    match ret {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
    }
}

fn expect_no_unload(state: &str) -> Outcome {
    match unload() {
        Ok(()) => fail!("the module was unloaded {state}"),
        // What the kernel says of a module in use, whatever the module's users are.
        Err(errno) => check_eq!(errno, libc::EWOULDBLOCK, "errno of unloading {state}"),
    }
    let count = module_refcount(MODULE)?;
    check!(
        count.is_some_and(|count| count > 0),
        "use count {count:?} {state}"
    );
    Ok(())
}

fn expect_idle(state: &str) -> Outcome {
    // The last reference of an event goes after a grace period of RCU.
    for _ in 0..200 {
        if module_refcount(MODULE)? == Some(0) {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    fail!("use count {:?} {state}", module_refcount(MODULE)?)
}

fn root() -> Result<(), Stop> {
    if !is_root() {
        skip!("only root can unload modules");
    }
    Ok(())
}

fn unload_while_in_use(ctx: &Ctx) -> Outcome {
    root()?;
    let pmu = soft_pt(ctx)?;
    expect_idle("before any event")?;
    let group = Setup::new(&pmu, 0).open()?;
    expect_no_unload("with an event that is off")?;
    group.leader.enable()?;
    expect_no_unload("with an event that is on")?;
    let perf_aux::group::AuxGroup {
        aux,
        leader_ring,
        ring,
        sampler,
        leader,
    } = group;
    drop(leader);
    expect_no_unload("with the leader's descriptor closed")?;
    drop(sampler);
    drop(ring);
    expect_no_unload("with the AUX area mapped only")?;
    drop(aux);
    drop(leader_ring);
    expect_idle("after everything is closed")?;

    let mut child = Child::spinning(None)?;
    let event = pmu.event(0).pid(child.pid()).open()?;
    event.enable()?;
    child.go()?;
    expect_no_unload("with a child traced")?;
    drop(event);
    expect_idle("after the child's event is closed")?;
    Ok(())
}

/// The module's file, which the environment names, and what it was loaded with.
struct File {
    path: PathBuf,
    name: String,
}

impl File {
    fn find(ctx: &Ctx) -> Result<Self, Stop> {
        root()?;
        let pmu = soft_pt(ctx)?;
        let Some(path) = std::env::var_os("MODULE").map(PathBuf::from) else {
            skip!("the environment variable MODULE does not name the module's file");
        };
        Ok(File {
            path,
            name: pmu.name().to_owned(),
        })
    }

    /// Loads it; gives the errno if that is refused.
    fn load(&self, name: &str) -> Result<Result<(), i32>, Stop> {
        let file = fs::File::open(&self.path).map_err(io(self.path.display()))?;
        let parameters = CString::new(format!("name={name}")).map_err(|e| failed(e.to_string()))?;
        // SAFETY: An open file, parameters that end as the call wants them, no flags.
        let ret = unsafe {
            libc::syscall(
                libc::SYS_finit_module,
                file.as_raw_fd(),
                parameters.as_ptr(),
                0,
            )
        };
        Ok(match ret {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        })
    }

    /// Loads it as it was.
    fn load_again(&self) -> Outcome {
        check_eq!(
            self.load(&self.name)?,
            Ok(()),
            "result of loading the module again"
        );
        check!(
            Pmu::find(&self.name)?.is_some(),
            "no PMU {} after that",
            self.name
        );
        Ok(())
    }
}

fn load_twice(ctx: &Ctx) -> Outcome {
    let file = File::find(ctx)?;
    check_eq!(
        file.load("another")?,
        Err(libc::EEXIST),
        "result of loading the module twice"
    );
    check!(Pmu::find("another")?.is_none(), "a second PMU is there");
    check!(
        Pmu::find(&file.name)?.is_some(),
        "the PMU {} is gone",
        file.name
    );
    Ok(())
}

/// The kernel keeps EEXIST for a module that is loaded already, and turns a module's own into this.
const TAKEN: i32 = libc::EBUSY;

fn name_taken(ctx: &Ctx) -> Outcome {
    let file = File::find(ctx)?;
    let pmus = Pmu::all()?.len();
    expect_idle("before unloading")?;
    check_eq!(unload(), Ok(()), "result of unloading");
    let mut log = KernelLog::from_now();
    let mut result = Ok(());
    for (name, errno) in [
        ("software", TAKEN),
        ("breakpoint", TAKEN),
        (".", libc::EINVAL),
        ("a/b", libc::EINVAL),
    ] {
        let got = file.load(name)?;
        if got != Err(errno) {
            result = result.and(Err(failed(format!(
                "loading with name={name:?}: {got:?}, expected errno {errno}"
            ))));
        }
        if got.is_ok() {
            // Make room for the next one.
            let _ = unload();
        }
        let lines = log.as_mut().map(KernelLog::lines).unwrap_or_default();
        let says_why = |line: &String| line.contains("perf: ") || line.contains("parameter");
        if log.is_some() && !lines.iter().any(says_why) {
            result = result.and(Err(failed(format!(
                "the kernel log does not say why name={name:?} is refused: {lines:?}"
            ))));
        }
        if let Some(fault) = lines
            .iter()
            .find(|line| line.contains("WARNING") || line.contains("duplicate"))
        {
            result = result.and(Err(failed(format!("name={name:?}: {fault}"))));
        }
    }
    // Whatever came of it, the next tests need the module.
    file.load_again()?;
    result?;
    check_eq!(Pmu::all()?.len(), pmus, "PMUs after all of that");
    Ok(())
}

/// `perf record` asks the processor who made it, and traces nothing, without a word, if it isn't
/// Intel. The module has the word then.
fn vendor_of_perf(ctx: &Ctx) -> Outcome {
    const WORD: &str = "perf record traces nothing";

    let file = File::find(ctx)?;
    let cpus = fs::read_to_string("/proc/cpuinfo").map_err(io("/proc/cpuinfo"))?;
    let intel = cpus.contains("GenuineIntel");
    let Some(mut log) = KernelLog::from_now() else {
        skip!("the kernel log can't be read");
    };
    expect_idle("before unloading")?;
    let mut result = Ok(());
    for (name, want) in [("intel_pt", !intel), ("another", false)] {
        check_eq!(unload(), Ok(()), "result of unloading");
        log.lines();
        check_eq!(file.load(name)?, Ok(()), "result of loading");
        let got = log.lines().iter().any(|line| line.contains(WORD));
        if got != want {
            result = Err(failed(format!(
                "name={name}, said so: {got}, expected {want}"
            )));
        }
    }
    check_eq!(unload(), Ok(()), "result of unloading");
    file.load_again()?;
    result
}

/// Traced programs while somebody tries to unload the module all the time; then it goes.
fn unload_under_load(ctx: &Ctx) -> Outcome {
    let file = File::find(ctx)?;
    for round in 0..10 {
        let pmu = soft_pt(ctx)?;
        let mut child = Child::spinning(None)?;
        let event = pmu.event(0).pid(child.pid()).open()?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
        child.go()?;
        event.enable()?;
        for _ in 0..20 {
            expect_no_unload("while a program is traced")?;
            spin_for(std::time::Duration::from_millis(2));
        }
        drop((aux, ring, event));
        expect_idle(&format!("in round {round}"))?;
        check_eq!(unload(), Ok(()), "result of unloading");
        // The program that was traced until a moment ago runs on without the module.
        spin_for(std::time::Duration::from_millis(20));
        child.check_alive()?;
        file.load_again()?;
        let path = format!("/proc/{}/stat", child.pid());
        let stat = fs::read_to_string(&path).map_err(io(&path))?;
        check_eq!(stat.split(' ').nth(2), Some("R"), "state of the program");
    }
    Ok(())
}
