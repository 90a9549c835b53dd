// SPDX-License-Identifier: GPL-2.0

//! What `perf_event_open()` takes and refuses about AUX sampling.

use perf_aux::abi;
use perf_aux::sys;
use perf_aux::{
    check,
    check_eq,
    Attr,
    Ctx,
    Outcome,
    Test, //
};

pub const TESTS: &[Test] = &[
    Test::new("attr.constants", constants),
    Test::new("attr.sizes", sizes),
    Test::new("attr.reserved", reserved),
    Test::new("attr.no_leader", no_leader),
    Test::new("attr.plain_leader", plain_leader),
];

/// The ABI as the uapi header has it.
fn constants(_: &Ctx) -> Outcome {
    check_eq!(abi::PERF_SAMPLE_AUX, 1 << 20, "PERF_SAMPLE_AUX");
    check_eq!(abi::PERF_ATTR_SIZE_VER6, 120, "PERF_ATTR_SIZE_VER6");
    check_eq!(
        std::mem::offset_of!(abi::perf_event_attr, aux_sample_size),
        112,
        "offset of aux_sample_size"
    );
    Ok(())
}

fn dummy() -> Attr {
    Attr::software(abi::PERF_COUNT_SW_DUMMY)
        .user_only()
        .disabled()
}

/// Every published size of the attribute opens an event, and others tell the kernel's own.
fn sizes(_: &Ctx) -> Outcome {
    for size in [64, 72, 80, 96, 104, 112, 120, 128, 136] {
        dummy().with(|attr| attr.size = size).open()?;
    }
    for size in [1, 63, 4097] {
        let errno = dummy()
            .with(|attr| attr.size = size)
            .open()
            .err()
            .and_then(|e| e.errno());
        check_eq!(errno, Some(libc::E2BIG), "errno of size {size}");
    }
    Ok(())
}

/// Reserved fields must be zero.
fn reserved(_: &Ctx) -> Outcome {
    let cases: [(&str, Attr); 3] = [
        ("__reserved_2", dummy().with(|attr| attr.__reserved_2 = 1)),
        (
            "a bit of aux_action without a name",
            dummy().with(|attr| attr.aux_action = 1 << 3),
        ),
        ("the highest sample_type bit", dummy().sample_type(1 << 63)),
    ];
    for (what, attr) in cases {
        let errno = attr.open().err().and_then(|error| error.errno());
        check_eq!(errno, Some(libc::EINVAL), "errno of {what}");
    }
    Ok(())
}

fn sampler() -> Attr {
    Attr::cpu_clock(1_000_000)
        .user_only()
        .sample_type((abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_AUX).into())
        .aux_sample_size(4096)
}

/// A sampler without a group is refused, with an error and not with descriptor 0.
fn no_leader(_: &Ctx) -> Outcome {
    let before = sys::open_fds()?;
    let errno = sampler().open().err().and_then(|error| error.errno());
    check_eq!(errno, Some(libc::EINVAL), "errno");
    check_eq!(sys::open_fds()?, before, "open descriptors");
    Ok(())
}

/// So is one whose leader has no AUX area.
fn plain_leader(_: &Ctx) -> Outcome {
    let leader = Attr::cpu_clock(0).user_only().disabled().open()?;
    let before = sys::open_fds()?;
    for round in 0..100 {
        let errno = sampler()
            .group(&leader)
            .open()
            .err()
            .and_then(|error| error.errno());
        check_eq!(errno, Some(libc::EINVAL), "errno, round {round}");
    }
    check_eq!(sys::open_fds()?, before, "open descriptors");
    check!(leader.count().is_ok(), "the leader can't be read any more");
    Ok(())
}
