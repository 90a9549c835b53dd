// SPDX-License-Identifier: GPL-2.0

//! The PMU's module stays while anything of it is in use, and goes when nothing is.

use super::inject::Injector;
use super::source::Source;
use perf_aux::load::{
    self,
    Child, //
};
use perf_aux::ring::{
    AuxMode,
    Ring, //
};
use perf_aux::sys::{
    self,
    Pmu, //
};
use perf_aux::{
    check,
    check_eq,
    skip,
    Ctx,
    Error,
    Outcome,
    Result,
    Stop,
    Test, //
};
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("module.busy", |ctx| busy(ctx, 0)),
    // Only where the kernel lets nobody do so (CONFIG_MODULE_FORCE_UNLOAD).
    Test::new("module.busy_by_force", |ctx| busy(ctx, libc::O_TRUNC)),
    Test::new("module.unload_and_reload", unload_and_reload).limit(120),
    Test::new("module.failed_load", failed_load).limit(180),
    Test::new("module.rounds", rounds).limit(240),
    Test::new("module.no_leaks", no_leaks).limit(120),
];

/// `delete_module(2)` as rmmod calls it: the errno of a refusal.
fn unload(module: &str) -> Result<()> {
    unload_with(module, 0)
}

fn unload_with(module: &str, flags: i32) -> Result<()> {
    let name = CString::new(module).map_err(|_| Error::new("a module's name holds a NUL byte"))?;
    let flags = flags | libc::O_NONBLOCK;
    // SAFETY: a C string that outlives the call.
    let ret = unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), flags) };
    if ret < 0 {
        return Err(Error::last_os(format!("delete_module({module})")));
    }
    Ok(())
}

fn check_busy(module: &str, flags: i32, state: &str) -> Outcome {
    check!(
        sys::module_refcount(module)?.unwrap_or(0) > 0,
        "use count of {module} with {state} is not above 0"
    );
    let errno = unload_with(module, flags)
        .err()
        .and_then(|error| error.errno());
    check_eq!(
        errno,
        Some(libc::EAGAIN),
        "errno of unloading {module} with {state}"
    );
    Ok(())
}

fn check_idle(module: &str, state: &str) -> Outcome {
    let mut count = None;
    for _ in 0..100 {
        count = sys::module_refcount(module)?;
        if count == Some(0) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    perf_aux::fail!("use count of {module} after {state}: {count:?}")
}

fn module_of(pmu: &Pmu) -> std::result::Result<String, Stop> {
    if !sys::is_root() {
        skip!("unloading a module needs root");
    }
    match pmu.module() {
        Some(module) => Ok(module),
        None => skip!("PMU {} is not a module's", pmu.name()),
    }
}

/// Unloading fails while an event, a mapping, a sampler or a child's event is left.
fn busy(ctx: &Ctx, flags: i32) -> Outcome {
    let source = Source::new(ctx)?;
    let module = module_of(&source.pmu)?;
    check_idle(&module, "nothing was opened")?;
    {
        let event = source.pmu.event(source.config).open()?;
        check_busy(&module, flags, "an idle event")?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
        event.enable()?;
        load::spin(1000);
        check_busy(&module, flags, "a running event")?;
        drop(event);
        check_busy(&module, flags, "a closed event whose area is still mapped")?;
        drop((aux, ring));
    }
    check_idle(&module, "the mappings are gone")?;
    {
        let group = source.setup().open()?;
        group.run(|| {
            load::spin(1000);
        })?;
        drop((group.aux, group.leader_ring, group.leader));
        // With its leader closed the sampler has no link any more, and may keep the module or not.
        drop((group.ring, group.sampler));
    }
    check_idle(&module, "the group is closed")?;
    {
        let event = source.pmu.event(source.config).inherit().open()?;
        event.enable()?;
        let mut child = Child::spinning(None)?;
        child.go()?;
        std::thread::sleep(Duration::from_millis(20));
        check_busy(&module, flags, "a child with an inherited event")?;
        drop(event);
        drop(child);
    }
    check_idle(&module, "the child is gone")
}

/// The module, to be loaded again with the parameters that it has now.
struct Loader {
    module: String,
    file: fs::File,
    parameters: CString,
}

impl Loader {
    fn new(pmu: &Pmu) -> std::result::Result<Self, Stop> {
        let module = module_of(pmu)?;
        let Ok(file) = std::env::var("PERF_AUX_MODULE") else {
            skip!("PERF_AUX_MODULE does not name the file to load {module} from");
        };
        let file =
            fs::File::open(&file).map_err(|e| Error::from_io(format!("opening {file}"), &e))?;
        let parameters = CString::new(parameters(&module)?)
            .map_err(|_| Error::new("a parameter holds a NUL byte"))?;
        Ok(Loader {
            module,
            file,
            parameters,
        })
    }

    fn load(&self) -> Result<()> {
        // SAFETY: a descriptor and a C string that outlive the call.
        let ret = unsafe {
            libc::syscall(
                libc::SYS_finit_module,
                self.file.as_raw_fd(),
                self.parameters.as_ptr(),
                0,
            )
        };
        if ret < 0 {
            return Err(Error::last_os(format!("loading {}", self.module)));
        }
        Ok(())
    }

    /// Unloads it; its PMU must be gone, and nothing of it be left in sysfs.
    fn unload(&self, pmu: &Pmu) -> Outcome {
        unload(&self.module)?;
        self.check_gone(pmu)
    }

    fn check_gone(&self, pmu: &Pmu) -> Outcome {
        check!(
            Pmu::find(pmu.name())?.is_none(),
            "PMU {} is still there",
            pmu.name()
        );
        check_eq!(
            sys::module_refcount(&self.module)?,
            None,
            "use count of {}",
            self.module
        );
        let folder = format!("/sys/module/{}", self.module);
        check!(!fs::exists(&folder).unwrap_or(true), "{folder} is there");
        Ok(())
    }
}

/// Some samples, all right.
fn sample(source: &Source) -> Outcome {
    let mut group = source.setup().open()?;
    group.leader.enable()?;
    load::spin_until(Duration::from_secs(10), || group.ring.head() > 5 * 4096);
    group.leader.disable()?;
    let samples = group.samples()?;
    check!(samples.len() >= 4, "{} samples", samples.len());
    source.check_all(&samples)
}

/// Unloading works right after the last use, and what is loaded again works as before.
fn unload_and_reload(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let loader = Loader::new(&source.pmu)?;
    for _ in 0..5 {
        {
            let group = source.setup().open()?;
            group.run(|| {
                load::spin(2000);
            })?;
        }
        check_idle(&loader.module, "the last use")?;
        loader.unload(&source.pmu)?;
        loader.load()?;
        sample(&Source::new(ctx)?)?;
    }
    Ok(())
}

/// Each allocation of loading the module fails once: nothing of it is left, and the next try works.
fn failed_load(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let loader = Loader::new(&source.pmu)?;
    let injector = Injector::new()?;
    check_idle(&loader.module, "the tests before")?;
    loader.unload(&source.pmu)?;
    let result = injector.each(
        &[libc::ENOMEM],
        || loader.load(),
        |_| {
            // What could do without the allocation is loaded.
            if sys::module_refcount(&loader.module)?.is_some() {
                loader.unload(&source.pmu)?;
            }
            loader.check_gone(&source.pmu)
        },
    );
    if sys::module_refcount(&loader.module)?.is_none() {
        loader.load()?;
    }
    let (all, failed) = result?;
    ctx.diag(format_args!(
        "{all} allocations, without {failed} of them it was not loaded"
    ));
    check!(failed > 10, "loading failed only {failed} times");
    sample(&Source::new(ctx)?)
}

/// Loading, using and unloading, over and over. Memory comes back.
fn rounds(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let loader = Loader::new(&source.pmu)?;
    let rounds = ctx.rounds(20);
    // The module has some 80 KiB of its own; a tenth of that per round would be a leak.
    let allowed = 4096 + 8 * rounds as u64;
    let mut missing = u64::MAX;
    // A leak is there in all rounds. What the kernel keeps for itself when it loads modules, or
    // gives back late (whatever the module: megabytes), it does not keep each time.
    for _ in 0..3 {
        missing = missing.min(memory_of_rounds(ctx, &loader, rounds)?);
        if missing < allowed {
            break;
        }
    }
    check!(
        missing < allowed,
        "{missing} KiB less free after {rounds} rounds, and more after others"
    );
    sample(&Source::new(ctx)?)
}

/// How much less memory is free after these rounds, in KiB.
fn memory_of_rounds(ctx: &Ctx, loader: &Loader, rounds: usize) -> std::result::Result<u64, Stop> {
    let mut free = Vec::new();
    for round in 0..rounds {
        check_idle(&loader.module, "the round before")?;
        loader.unload(&Source::new(ctx)?.pmu)?;
        loader.load()?;
        let source = Source::new(ctx)?;
        let event = source.pmu.event(source.config).open()?;
        let ring = Ring::map(&event, 1)?;
        let aux = ring.map_aux(&event, 4, AuxMode::Snapshot)?;
        event.enable()?;
        source.spin_till_traced(100, &aux);
        event.disable()?;
        check!(
            aux.all().iter().any(|byte| *byte != 0),
            "nothing was traced in round {round}"
        );
        free.push(free_memory()?);
    }
    let (first, last) = (free[rounds / 10], free[rounds - 1]);
    ctx.diag(format_args!(
        "{rounds} rounds, free memory from {first} to {last} KiB"
    ));
    Ok(first.saturating_sub(last))
}

/// `MemFree` plus what the kernel would give back, in KiB.
fn free_memory() -> Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")
        .map_err(|e| Error::from_io("reading /proc/meminfo", &e))?;
    let field = |name: &str| {
        text.lines()
            .find_map(|line| {
                line.strip_prefix(name)?
                    .split_whitespace()
                    .nth(1)?
                    .parse()
                    .ok()
            })
            .unwrap_or(0)
    };
    Ok(field("MemFree") + field("Cached") + field("Buffers") + field("SReclaimable"))
}

/// After the tests nothing that perf or the module allocated is without a reference.
fn no_leaks(ctx: &Ctx) -> Outcome {
    const KMEMLEAK: &str = "/sys/kernel/debug/kmemleak";
    let source = Source::new(ctx)?;
    let module = module_of(&source.pmu)?;
    if fs::write(KMEMLEAK, "scan").is_err() {
        skip!("no {KMEMLEAK} that can scan: CONFIG_DEBUG_KMEMLEAK, and a boot with kmemleak=on");
    }
    // What is younger than five seconds is not reported, and what is only on its way twice is not.
    std::thread::sleep(Duration::from_secs(6));
    for _ in 0..2 {
        fs::write(KMEMLEAK, "scan")
            .map_err(|e| Error::from_io(format!("writing {KMEMLEAK}"), &e))?;
    }
    let report = fs::read_to_string(KMEMLEAK)
        .map_err(|e| Error::from_io(format!("reading {KMEMLEAK}"), &e))?;
    let leaks = report.split("unreferenced object").skip(1).filter(|leak| {
        [module.as_str(), "perf", "rb_alloc"]
            .iter()
            .any(|name| leak.contains(name))
    });
    if let Some(leak) = leaks.clone().next() {
        ctx.diag(leak);
    }
    check_eq!(leaks.count(), 0, "objects that were leaked");
    Ok(())
}

/// The module's parameters as they are, for loading it in the same way.
fn parameters(module: &str) -> Result<String> {
    let folder = format!("/sys/module/{module}/parameters");
    let mut text = String::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let value = fs::read_to_string(entry.path())
            .map_err(|e| Error::from_io(format!("reading {}", entry.path().display()), &e))?;
        text += &format!(
            "{}={} ",
            entry.file_name().to_string_lossy(),
            value.trim_end()
        );
    }
    Ok(text)
}
