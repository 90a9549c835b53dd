// SPDX-License-Identifier: GPL-2.0

//! AUX areas behind a ring that events are redirected to, and what outlives the event that an area
//! was made for.

use super::faults::{
    faults,
    Pages, //
};
use super::source::Source;
use perf_aux::load;
use perf_aux::ring::{
    page_size,
    Aux,
    AuxMode,
    Mapping,
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
    Attr,
    Ctx,
    Error,
    Event,
    Outcome,
    Stop,
    Test, //
};
use std::fs;
use std::path::{
    Path,
    PathBuf, //
};
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("area.redirected.not_mapped", not_mapped),
    Test::new("area.redirected.other_pmu", other_pmu),
    Test::new("area.outlives_its_pmu", outlives_its_pmu),
    Test::new("pause.closed_leader", closed_leader),
];

fn clock() -> Attr {
    Attr::cpu_clock(0).user_only().disabled()
}

/// The event writes into its AUX area, which only grows while it is on.
fn check_works(event: &Event, ring: &Ring, what: &str) -> Outcome {
    let before = ring.aux_head();
    event.enable()?;
    load::spin(1000);
    event.disable()?;
    check!(ring.aux_head() != before, "nothing was written {what}");
    ring.set_aux_tail(ring.aux_head());
    Ok(())
}

/// An AUX area can't be mapped through an event that is redirected to the ring of another one,
/// whether that one could have an area or not. The ring's own event goes on.
fn not_mapped(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let page = page_size();
    let map = |ring: &Ring, event: &Event| ring.map_aux(event, 4, AuxMode::Full);

    // Behind the ring of an event without an AUX area.
    let owner = clock().open()?;
    let ring = Ring::map(&owner, 8)?;
    let event = source.pmu.event(source.config).open()?;
    event.set_output(&owner)?;
    let errno = map(&ring, &event).err().and_then(|error| error.errno());
    check_eq!(errno, Some(libc::EBUSY), "errno through a redirected event");
    let errno = map(&ring, &owner).err().and_then(|error| error.errno());
    check_eq!(
        errno,
        Some(libc::EOPNOTSUPP),
        "errno through an event without AUX"
    );
    let head = ring.head();
    owner.enable()?;
    event.enable()?;
    load::spin(1000);
    event.disable()?;
    owner.disable()?;
    check_eq!(ring.aux_head(), 0, "aux_head without an area");
    drop((event, ring, owner));

    // Behind that of an event of the same PMU, before and after it has an area.
    let owner = source.pmu.event(source.config).open()?;
    let ring = Ring::map(&owner, 8)?;
    let event = source.pmu.event(source.config).open();
    if let Ok(event) = &event {
        event.set_output(&owner)?;
        let errno = map(&ring, event).err().and_then(|error| error.errno());
        check_eq!(errno, Some(libc::EBUSY), "errno before there is an area");
    }
    let aux = map(&ring, &owner)?;
    if let Ok(event) = &event {
        let offset = (9 * page) as u64;
        let again = Mapping::new(event, offset, 4 * page, true);
        check_eq!(
            again.err().and_then(|error| error.errno()),
            Some(libc::EBUSY),
            "errno of an area that is there"
        );
    }
    // Mapped a second time by its own event, it stays when the first mapping goes.
    let second = map(&ring, &owner)?;
    drop(aux);
    check_works(&owner, &ring, "through the second mapping")?;
    drop(second);
    let aux = map(&ring, &owner)?;
    check_works(&owner, &ring, "in a new area")?;
    drop((aux, event));
    check!(ring.head() >= head, "data_head went back");
    Ok(())
}

/// Another PMU whose events can have an AUX area.
fn second_pmu(first: &Pmu) -> Result<Option<Pmu>, Stop> {
    for pmu in Pmu::all()? {
        if pmu.kind() == first.kind() {
            continue;
        }
        let Ok(event) = pmu.event(0).open() else {
            continue;
        };
        let Ok(ring) = Ring::map(&event, 1) else {
            continue;
        };
        if ring.map_aux(&event, 4, AuxMode::Snapshot).is_ok() {
            return Ok(Some(pmu));
        }
    }
    Ok(None)
}

/// An event can't be redirected to a ring whose AUX area is, or will be, another PMU's: not
/// directly, and not through an event that has no AUX area itself.
fn other_pmu(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let Some(other) = second_pmu(&source.pmu)? else {
        skip!("no second PMU with an AUX area");
    };
    let owner = source.pmu.event(source.config).open()?;
    let ring = Ring::map(&owner, 8)?;
    let between = clock().open()?;
    between.set_output(&owner)?;
    let event = other.event(0).open()?;
    let refused = |target: &Event, what: &str| -> Outcome {
        let errno = event.set_output(target).err().and_then(|e| e.errno());
        check_eq!(errno, Some(libc::EINVAL), "errno, {what}");
        Ok(())
    };
    refused(&owner, "directly, no area yet")?;
    refused(&between, "through an event without AUX, no area yet")?;
    let aux = ring.map_aux(&owner, 4, AuxMode::Full)?;
    refused(&owner, "directly")?;
    refused(&between, "through an event without AUX")?;
    event.enable()?;
    check_works(&owner, &ring, "after the refusals")?;
    event.disable()?;
    // What has no AUX area itself, and what is of the PMU, may still come.
    clock().open()?.set_output(&between)?;
    if let Ok(same) = source.pmu.event(source.config).open() {
        same.set_output(&between)?;
    }
    // An exclusive PMU has no second event as long as there is one.
    drop((aux, ring, between, owner));

    // Behind the ring of an event without an AUX area both may be, and there is no area.
    let owner = clock().open()?;
    let ring = Ring::map(&owner, 8)?;
    let first = source.pmu.event(source.config).open()?;
    first.set_output(&owner)?;
    event.set_output(&owner)?;
    for event in [&owner, &first, &event] {
        let area = ring.map_aux(event, 4, AuxMode::Full);
        check!(area.is_err(), "an area in a ring that two PMUs write to");
    }
    Ok(())
}

/// A PMU that goes away while its module stays: the file that unbinds its driver, and what to write
/// there.
struct Bound {
    pmu: Pmu,
    module: String,
    driver: PathBuf,
    device: String,
}

impl Bound {
    /// Looks at the parents of the PMUs' devices.
    fn find() -> Result<Option<Self>, Stop> {
        for pmu in Pmu::all()? {
            let link = Path::new("/sys/bus/event_source/devices").join(pmu.name());
            let Some(parent) = fs::canonicalize(link)
                .ok()
                .and_then(|path| Some(path.parent()?.to_owned()))
            else {
                continue;
            };
            let driver = parent.join("driver");
            let module = fs::read_link(driver.join("module")).ok();
            if let (Some(device), Some(module), true) = (
                parent.file_name(),
                module.as_deref().and_then(Path::file_name),
                driver.join("unbind").exists(),
            ) {
                return Ok(Some(Bound {
                    pmu,
                    module: module.to_string_lossy().into_owned(),
                    device: device.to_string_lossy().into_owned(),
                    driver: fs::canonicalize(&driver)
                        .map_err(|e| Error::from_io("looking for a driver", &e))?,
                }));
            }
        }
        Ok(None)
    }

    fn write(&self, file: &str) -> Result<(), Error> {
        let path = self.driver.join(file);
        fs::write(&path, &self.device)
            .map_err(|e| Error::from_io(format!("writing {}", path.display()), &e))
    }
}

/// An AUX area keeps the module that has to free it, also when the PMU is gone.
fn outlives_its_pmu(_: &Ctx) -> Outcome {
    if !sys::is_root() {
        skip!("only root may unbind a driver");
    }
    let Some(bound) = Bound::find()? else {
        skip!("no PMU whose driver, in a module, can be unbound");
    };
    let uses = || -> Result<i64, Stop> { Ok(sys::module_refcount(&bound.module)?.unwrap_or(0)) };
    let before = uses()?;
    let event = bound.pmu.event(0).open()?;
    let ring = Ring::map(&event, 8)?;
    let Ok(aux) = ring.map_aux(&event, 4, AuxMode::Snapshot) else {
        skip!("{} has no AUX area", bound.pmu.name());
    };
    event.enable()?;
    bound.write("unbind")?;
    let gone = Pmu::find(bound.pmu.name())?.is_none();
    let mapped = uses()?;
    drop::<Aux>(aux);
    let mut after = uses()?;
    for _ in 0..100 {
        if after == before {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
        after = uses()?;
    }
    drop((ring, event));
    bound.write("bind")?;
    check!(gone, "{} is still there", bound.pmu.name());
    check_eq!(
        mapped,
        before + 1,
        "use count of {} while an area is mapped",
        bound.module
    );
    check_eq!(after, before, "use count of {} after it", bound.module);
    Ok(())
}

/// An event that pauses, resumes or samples a leader that was closed counts on, without one.
fn closed_leader(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    type Action = fn(Attr) -> Attr;
    let actions: [(&str, Action); 3] = [
        ("pause", Attr::aux_pause),
        ("resume", Attr::aux_resume),
        ("sample", |attr| attr.aux_sample_size(4096)),
    ];
    let mut tried = 0;
    for (name, action) in actions {
        let leader = source.pmu.event(source.config).open()?;
        let event = match action(faults(1)).group(&leader).open() {
            Err(error) if matches!(error.errno(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                ctx.diag(format_args!("{} knows no {name}", source.pmu.name()));
                continue;
            }
            event => event?,
        };
        tried += 1;
        let ring = Ring::map(&event, 8)?;
        leader.enable()?;
        event.enable()?;
        let mut memory = Pages::new(20)?;
        for _ in 0..10 {
            memory.fault();
        }
        // Nothing of it is mapped, so that it goes with its descriptor.
        drop(leader);
        event.enable()?;
        let before = event.count()?;
        while memory.fault() {}
        let now = event.count()?;
        check!(now >= before + 10, "{name}: count {before}, then {now}");
        drop(ring);
    }
    if tried == 0 {
        skip!("{} has nothing that acts on it", source.pmu.name());
    }
    Ok(())
}
