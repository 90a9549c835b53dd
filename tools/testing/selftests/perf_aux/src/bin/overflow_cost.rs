// SPDX-License-Identifier: GPL-2.0

//! What one overflow costs, with a ring buffer and without.
//!
//! The event is a page fault with period 1. One fault is timed by the time stamp counter many times
//! and the least is taken: with no event, with an event that has no buffer, and with one that has.
//! The differences to the first are the cost of an overflow, a JSON object a line. In QEMU with
//! `-icount shift=0,sleep=off` and one CPU the counter counts instructions.

use perf_aux::abi;
use perf_aux::load::FaultingPage;
use perf_aux::ring::Ring;
use perf_aux::{
    Attr,
    Event,
    Result, //
};
use serde_json::json;
use std::process::ExitCode;

const ROUNDS: usize = 2000;

/// The least time that touching the page took.
fn least(page: &FaultingPage, mut after: impl FnMut()) -> u64 {
    (0..ROUNDS)
        .map(|_| {
            let time = page.touch();
            after();
            time
        })
        .min()
        .unwrap_or(0)
}

fn open(attr: Attr) -> Result<Event> {
    attr.sample_period(1)
        .user_only()
        .wakeup_events(1 << 30)
        .open()
}

fn run() -> Result<()> {
    let page = FaultingPage::new()?;
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
    for (name, attr) in kinds {
        let none = least(&page, || {});
        let bare = {
            let _event = open(attr.clone())?;
            least(&page, || {})
        };
        let buffered = {
            let event = open(attr)?;
            let ring = Ring::map(&event, 64)?;
            least(&page, || ring.set_tail(ring.head()))
        };
        for (variant, time) in [("no buffer", bare), ("buffer", buffered)] {
            println!(
                "{}",
                json!({
                    "what": "overflow",
                    "sample": name,
                    "variant": variant,
                    "instructions": time.saturating_sub(none),
                })
            );
        }
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
