// SPDX-License-Identifier: GPL-2.0

//! The PMU's module stays while anything of it is in use, and goes when nothing is.

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
    Test, //
};
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("module.busy", busy),
    Test::new("module.unload_and_reload", unload_and_reload).limit(120),
];

/// `delete_module(2)` as rmmod calls it: the errno of a refusal.
fn unload(module: &str) -> Result<()> {
    let name = CString::new(module).map_err(|_| Error::new("a module's name holds a NUL byte"))?;
    // SAFETY: a C string that outlives the call.
    let ret = unsafe { libc::syscall(libc::SYS_delete_module, name.as_ptr(), libc::O_NONBLOCK) };
    if ret < 0 {
        return Err(Error::last_os(format!("delete_module({module})")));
    }
    Ok(())
}

fn check_busy(module: &str, state: &str) -> Outcome {
    check!(
        sys::module_refcount(module)?.unwrap_or(0) > 0,
        "use count of {module} with {state} is not above 0"
    );
    let errno = unload(module).err().and_then(|error| error.errno());
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

fn module_of(pmu: &Pmu) -> std::result::Result<String, perf_aux::Stop> {
    if !sys::is_root() {
        skip!("unloading a module needs root");
    }
    match pmu.module() {
        Some(module) => Ok(module),
        None => skip!("PMU {} is not a module's", pmu.name()),
    }
}

/// Unloading fails while an event, a mapping, a sampler or a child's event is left.
fn busy(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let module = module_of(&source.pmu)?;
    check_idle(&module, "nothing was opened")?;
    {
        let event = source.pmu.event(source.config).open()?;
        check_busy(&module, "an idle event")?;
        let ring = Ring::map(&event, 8)?;
        let aux = ring.map_aux(&event, 16, AuxMode::Snapshot)?;
        event.enable()?;
        load::spin(1000);
        check_busy(&module, "a running event")?;
        drop(event);
        check_busy(&module, "a closed event whose area is still mapped")?;
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
        check_busy(&module, "a child with an inherited event")?;
        drop(event);
        drop(child);
    }
    check_idle(&module, "the child is gone")
}

/// Unloading works right after the last use, and what is loaded again works as before.
fn unload_and_reload(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let module = module_of(&source.pmu)?;
    let Ok(file) = std::env::var("PERF_AUX_MODULE") else {
        skip!("PERF_AUX_MODULE does not name the file to load {module} from");
    };
    let file = fs::File::open(&file).map_err(|e| Error::from_io(format!("opening {file}"), &e))?;
    let parameters = parameters(&module)?;
    for round in 0..5 {
        {
            let group = source.setup().open()?;
            group.run(|| {
                load::spin(2000);
            })?;
        }
        check_idle(&module, "the last use")?;
        unload(&module)?;
        check!(
            Pmu::find(source.pmu.name())?.is_none(),
            "PMU {} is still there",
            source.pmu.name()
        );
        let text = CString::new(parameters.as_str())
            .map_err(|_| Error::new("a parameter holds a NUL byte"))?;
        // SAFETY: a descriptor and a C string that outlive the call.
        let ret =
            unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), text.as_ptr(), 0) };
        if ret < 0 {
            return Err(Error::last_os(format!("loading {module} again, round {round}")).into());
        }
        let source = Source::new(ctx)?;
        let mut group = source.setup().open()?;
        group.leader.enable()?;
        load::spin_until(Duration::from_secs(10), || group.ring.head() > 5 * 4096);
        group.leader.disable()?;
        let samples = group.samples()?;
        check!(
            samples.len() >= 4,
            "{} samples once loaded again",
            samples.len()
        );
        source.check_all(&samples)?;
    }
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
