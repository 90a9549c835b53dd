// SPDX-License-Identifier: GPL-2.0

//! Linking a sampler to its leader: what is allowed, and that a refusal keeps nothing.

use super::source::Source;
use perf_aux::abi;
use perf_aux::group::Setup;
use perf_aux::load;
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
    Event,
    Outcome,
    Stop,
    Test, //
};
use std::time::Duration;

pub const TESTS: &[Test] = &[
    Test::new("link.matrix", matrix).limit(120),
    Test::new("link.leader_is_its_own", leader_samples_itself),
    Test::new("link.other_cpu_or_task", other_context),
    Test::new(
        "link.refused_keeps_no_reference",
        refused_keeps_no_reference,
    )
    .limit(120),
    Test::new("link.leader_closed_first", leader_closed_first),
    Test::new("link.unprivileged", unprivileged),
];

/// The module's use count, to be the same at the end of what is done in between.
struct Uses {
    module: Option<String>,
    before: i64,
}

impl Uses {
    fn of(pmu: &Pmu) -> Result<Self, Stop> {
        let module = pmu.module();
        let before = match &module {
            Some(name) => sys::module_refcount(name)?.unwrap_or(0),
            None => 0,
        };
        Ok(Uses { module, before })
    }

    /// Closing puts references by RCU and from work queues, so a short wait is allowed.
    fn check(&self, what: &str) -> Outcome {
        let Some(module) = &self.module else {
            return Ok(());
        };
        let mut now = 0;
        for _ in 0..100 {
            now = sys::module_refcount(module)?.unwrap_or(0);
            if now == self.before {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        perf_aux::fail!(
            "use count of {module} {what}: {now}, expected {}",
            self.before
        )
    }
}

#[derive(Clone, Copy, Debug)]
enum Link {
    Neither,
    Sample,
    Output,
    Both,
}

fn member(link: Link) -> Attr {
    let event = Attr::cpu_clock(1_000_000)
        .user_only()
        .sample_type((abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_AUX).into());
    match link {
        Link::Neither => event,
        Link::Sample => event.aux_sample_size(4096),
        Link::Output => event.aux_output(),
        Link::Both => event.aux_output().aux_sample_size(4096),
    }
}

/// Every pair of what links and whom to; nothing is kept when it is refused, and nothing when it is
/// closed.
fn matrix(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let uses = Uses::of(&source.pmu)?;
    let fds = sys::open_fds()?;
    // `aux_output` needs a PMU that can send its own data there, which no software event can.
    let expected = |link, aux_leader| match (link, aux_leader) {
        (Link::Neither, _) => None,
        (Link::Output | Link::Both, _) => Some(libc::EOPNOTSUPP),
        (Link::Sample, true) => None,
        (Link::Sample, false) => Some(libc::EINVAL),
    };
    for round in 0..1000 {
        let aux = source.pmu.event(source.config).open()?;
        let clock = Attr::cpu_clock(0).user_only().disabled().open()?;
        let leaders: [(&str, Option<&Event>); 3] = [
            ("an AUX leader", Some(&aux)),
            ("a cpu-clock leader", Some(&clock)),
            ("no leader", None),
        ];
        for (name, leader) in leaders {
            for link in [Link::Neither, Link::Sample, Link::Output, Link::Both] {
                let mut attr = member(link);
                if let Some(leader) = leader {
                    attr = attr.group(leader);
                }
                let got = attr.open().err().and_then(|error| error.errno());
                let is_aux = name == "an AUX leader";
                check_eq!(
                    got,
                    expected(link, is_aux),
                    "errno of {link:?} with {name}, round {round}"
                );
            }
        }
    }
    check_eq!(sys::open_fds()?, fds, "open descriptors");
    uses.check("after everything was closed")
}

/// A leader can't be its own sampler.
fn leader_samples_itself(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let uses = Uses::of(&source.pmu)?;
    for _ in 0..100 {
        let errno = source
            .pmu
            .event(source.config)
            .aux_sample_size(4096)
            .open()
            .err()
            .and_then(|error| error.errno());
        check_eq!(
            errno,
            Some(libc::EINVAL),
            "errno of a leader with aux_sample_size"
        );
    }
    uses.check("after refused leaders")
}

/// Leader and sampler observe the same task on the same CPU, or the sampler is refused.
fn other_context(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let uses = Uses::of(&source.pmu)?;
    let cpus = load::cpus()?;
    let child = load::Child::spinning(None)?;
    {
        let leader = source.pmu.event(source.config).cpu(cpus[0] as i32).open()?;
        let other = *cpus.last().unwrap_or(&0) as i32;
        let cases = [
            ("any CPU", member(Link::Sample).cpu(-1)),
            ("another CPU", member(Link::Sample).cpu(other)),
            (
                "another task",
                member(Link::Sample).cpu(cpus[0] as i32).pid(child.pid()),
            ),
        ];
        for (what, attr) in cases {
            if what == "another CPU" && cpus.len() < 2 {
                continue;
            }
            let errno = attr
                .group(&leader)
                .open()
                .err()
                .and_then(|error| error.errno());
            check_eq!(errno, Some(libc::EINVAL), "errno of a sampler on {what}");
        }
    }
    uses.check("after refused samplers")
}

/// An exclusive PMU refuses its second event on a task, when the link is already made: it has to be
/// undone.
fn refused_keeps_no_reference(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let uses = Uses::of(&source.pmu)?;
    for round in 0..1000 {
        let leader = source.pmu.event(source.config).open()?;
        let second = source
            .pmu
            .event(source.config)
            .aux_sample_size(4096)
            .group(&leader)
            .open();
        match second {
            Ok(_) => skip!("{} allows two events in a group", source.pmu.name()),
            Err(error) => check!(
                matches!(error.errno(), Some(libc::EBUSY | libc::EINVAL)),
                "round {round}: {error}"
            ),
        }
    }
    uses.check("after 1000 refused members")?;
    // A leader that was never freed would keep its task's events exclusive for ever.
    if sys::is_root() {
        let cpu = load::cpus()?[0] as i32;
        source.pmu.event(source.config).pid(-1).cpu(cpu).open()?;
    }
    source.pmu.event(source.config).open()?;
    Ok(())
}

/// When the leader is closed the link is cut: the sampler ends, and nothing is kept.
fn leader_closed_first(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let uses = Uses::of(&source.pmu)?;
    for _ in 0..20 {
        let perf_aux::group::AuxGroup {
            leader,
            leader_ring,
            aux,
            mut ring,
            sampler,
        } = source.setup().open()?;
        leader.enable()?;
        load::spin_for(Duration::from_millis(20));
        drop((aux, leader_ring, leader));
        ring.drain()?;
        load::spin_for(Duration::from_millis(20));
        for record in ring.drain()? {
            if let perf_aux::record::Record::Sample(sample) = record {
                check!(
                    sample.aux.as_ref().is_some_and(|aux| aux.is_empty()),
                    "a sample with AUX bytes after its leader was closed"
                );
            }
        }
        drop(sampler);
    }
    uses.check("after leaders were closed first")
}

/// A user without privileges can sample itself at every level up to 2.
fn unprivileged(ctx: &Ctx) -> Outcome {
    let source = Source::new(ctx)?;
    let run = |source: &Source| -> Outcome {
        let setup = Setup {
            leader_pages: 1,
            aux_pages: 4,
            sampler_pages: 16,
            ..source.setup()
        };
        let mut group = setup.open()?;
        group.leader.enable()?;
        let done = load::spin_until(Duration::from_secs(10), || group.ring.head() > 5 * 4096);
        group.leader.disable()?;
        check!(done, "no five samples in 10 s");
        source.check_all(&group.samples()?)
    };
    if !sys::is_root() {
        return run(&source);
    }
    for level in [-1, 0, 1, 2] {
        let _paranoid = sys::Sysctl::set("kernel/perf_event_paranoid", level)?;
        let child = load::Child::new(|| {
            let result = sys::become_nobody()
                .map_err(Stop::from)
                .and_then(|()| run(&source));
            match result {
                Ok(()) => 0,
                Err(stop) => {
                    perf_aux::ktap::diag(format_args!("perf_event_paranoid {level}: {stop:?}"));
                    1
                }
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
