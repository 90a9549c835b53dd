// SPDX-License-Identifier: GPL-2.0

//! What a sample's AUX field costs, in each of the two variants of a kernel that has both.

use perf_aux::abi;
use perf_aux::group::Setup;
use perf_aux::ring::page_size;
use perf_aux::sys::Pmu;
use perf_aux::{
    Attr,
    Error,
    Result, //
};

const PARAMETER: &str = "/sys/module/perf/parameters/aux_rust";

fn now() -> u64 {
    // SAFETY: the instruction exists on every x86-64 CPU.
    unsafe { std::arch::x86_64::_rdtsc() }
}

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("aux_cost: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let rounds: usize = std::env::args()
        .nth(1)
        .and_then(|a| a.parse().ok())
        .unwrap_or(200);
    // SAFETY: fresh mapping.
    let page: *mut u8 = unsafe {
        let fd = libc::memfd_create(c"aux_cost".as_ptr(), 0);
        libc::ftruncate(fd, 4096);
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd,
            0,
        )
        .cast()
    };
    let pmu = Pmu::find("intel_pt")?.ok_or_else(|| Error::new("no intel_pt".to_owned()))?;
    let config = pmu.config("pattern", 1)?.unwrap_or(0);
    println!("page size {}", page_size());
    let plain = abi::PERF_SAMPLE_IP | abi::PERF_SAMPLE_TID | abi::PERF_SAMPLE_TIME;
    for size in [
        None,
        Some(0u32),
        Some(8),
        Some(64),
        Some(1024),
        Some(4096),
        Some(16384),
        Some(61440),
    ] {
        let mut attr = Attr::software(abi::PERF_COUNT_SW_PAGE_FAULTS)
            .sample_period(1)
            .user_only()
            .wakeup_events(1 << 30)
            .sample_type(plain.into());
        if let Some(size) = size {
            attr = attr
                .sample_type((plain | abi::PERF_SAMPLE_AUX).into())
                .aux_sample_size(size);
        }
        let setup = Setup {
            sampler: attr,
            aux_pages: 64,
            sampler_pages: 64,
            ..Setup::new(&pmu, config)
        };
        let group = setup.open()?;
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..4 {
            let v = round % 2;
            std::fs::write(PARAMETER, if v == 0 { "N" } else { "Y" })
                .map_err(|e| Error::new(format!("{PARAMETER}: {e}")))?;
            group.leader.enable()?;
            for _ in 0..rounds {
                // SAFETY: our own page.
                unsafe { libc::madvise(page.cast(), 4096, libc::MADV_DONTNEED) };
                let start = now();
                // SAFETY: our own page.
                unsafe { page.read_volatile() };
                times[v].push(now() - start);
                group.ring.set_tail(group.ring.head());
            }
            group.leader.disable()?;
        }
        let mut line = format!("{:>8}", size.map_or("none".into(), |s| s.to_string()));
        for t in &mut times {
            t.sort_unstable();
            line += &format!(
                "  min {:>7} q1 {:>7} median {:>7}",
                t[0],
                t[t.len() / 4],
                t[t.len() / 2]
            );
        }
        println!("{line}");
    }
    Ok(())
}
