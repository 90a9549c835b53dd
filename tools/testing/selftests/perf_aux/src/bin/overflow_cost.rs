// SPDX-License-Identifier: GPL-2.0

//! What one overflow costs, with a ring buffer and without.
//!
//! The event is a page fault with period 1. One fault is timed by the time stamp counter many times
//! and the least is taken: with no event, with an event that has no buffer, and with one that has.
//! The differences to the first are the cost of an overflow. In QEMU with `-icount
//! shift=0,sleep=off` and one CPU the counter counts instructions.

use perf_aux::abi;
use perf_aux::ring::{
    page_size,
    Ring, //
};
use perf_aux::{
    Attr,
    Error,
    Event,
    Result, //
};
use std::process::ExitCode;

const ROUNDS: usize = 2000;

#[cfg(target_arch = "x86_64")]
fn now() -> u64 {
    // SAFETY: the instruction exists on every x86-64 CPU.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
fn now() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is live.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// One page of a file in memory: it faults when touched after `forget()`, always in the same way.
struct Page(*mut u8);

impl Page {
    fn new() -> Result<Self> {
        // SAFETY: the name is a C string; the new mapping touches no existing memory.
        let base = unsafe {
            let fd = libc::memfd_create(c"overflow_cost".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 || libc::ftruncate(fd, page_size() as libc::off_t) < 0 {
                return Err(Error::last_os("memfd of one page"));
            }
            let base = libc::mmap(
                std::ptr::null_mut(),
                page_size(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            );
            libc::close(fd);
            base
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os("mmap of a memfd"));
        }
        Ok(Page(base.cast()))
    }

    fn forget(&self) {
        // SAFETY: our own shared mapping; its contents stay in the file.
        unsafe { libc::madvise(self.0.cast(), page_size(), libc::MADV_DONTNEED) };
    }

    /// The least time that touching the page took.
    fn least(&self, mut after: impl FnMut()) -> u64 {
        (0..ROUNDS)
            .map(|_| {
                self.forget();
                let start = now();
                // SAFETY: inside the mapping.
                unsafe { self.0.read_volatile() };
                let time = now() - start;
                after();
                time
            })
            .min()
            .unwrap_or(0)
    }
}

fn open(attr: Attr) -> Result<Event> {
    attr.sample_period(1)
        .user_only()
        .wakeup_events(1 << 30)
        .open()
}

fn run() -> Result<()> {
    let page = Page::new()?;
    let plain = abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME;
    let chain = plain | abi::PERF_SAMPLE_CALLCHAIN;
    let stack = plain | abi::PERF_SAMPLE_REGS_USER | abi::PERF_SAMPLE_STACK_USER;
    let faults = || Attr::software(abi::PERF_COUNT_SW_PAGE_FAULTS);
    let kinds: [(&str, Attr); 4] = [
        ("no field", faults()),
        ("ip, tid, time", faults().sample_type(plain.into())),
        ("and call chain", faults().sample_type(chain.into())),
        (
            "and user registers, 8 KiB of stack",
            faults()
                .sample_type(stack.into())
                .sample_regs_user(0xff)
                .sample_stack_user(8192),
        ),
    ];
    println!(
        "{:<36} {:>10} {:>10}",
        "cost of an overflow", "no buffer", "buffer"
    );
    for (name, attr) in kinds {
        let none = page.least(|| {});
        let bare = {
            let _event = open(attr.clone())?;
            page.least(|| {})
        };
        let buffered = {
            let event = open(attr)?;
            let ring = Ring::map(&event, 64)?;
            page.least(|| ring.set_tail(ring.head()))
        };
        println!(
            "{name:<36} {:>10} {:>10}",
            bare.saturating_sub(none),
            buffered.saturating_sub(none)
        );
    }
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("overflow_cost: {error}");
            ExitCode::FAILURE
        }
    }
}
