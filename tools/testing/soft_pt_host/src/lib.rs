// SPDX-License-Identifier: GPL-2.0

//! The parts of `soft_pt` that know no kernel types, built and tested on the host.
//!
//! The files under test are the module's own; this crate only adds what is needed to test them:
//!
//! - `events`: tells a trace what happens, and notes what has to be in it.
//! - `program`: random programs, and a run of one as the events of its flow.
//! - `libipt`: what libipt makes of a trace, as the flow that the run should have had.
//! - `perf`: the same from the decoder of the perf tool, where `KERNEL_SRC` names a kernel source
//!   tree.
//! - `follow`: compares that with the run.
//!
//! The tests, by what they show:
//!
//! - `golden`: the bytes of each packet and of each event, written down by hand.
//! - `packets`: an independent packet decoder reads back the events that went in.
//! - `flow`: independent flow decoders follow a run exactly, from any PSB on.
//! - `insns`: an independent decoder reads instructions as the stepper's short way does.
//! - `rings`: the arithmetic of rings and the sizes of samples that the perf core's half goes by.
//! - `density`: how many bytes that takes, against the fewest that the format allows, of which
//!   `fewest` is the model.

#![cfg_attr(not(test), expect(dead_code, reason = "the tests are what uses it"))]

#[expect(
    unreachable_pub,
    reason = "what it says is part of the kernel crate's interface"
)]
#[path = "../../../../rust/kernel/perf/step/insn.rs"]
mod insn;
#[path = "../../../../samples/rust/soft_pt/packet.rs"]
mod packet;
#[path = "../../../../rust/kernel/perf/ring.rs"]
mod ring;
#[path = "../../../../rust/kernel/perf/sampling/size.rs"]
mod size;
#[path = "../../../../samples/rust/soft_pt/trace.rs"]
mod trace;

#[cfg(test)]
mod density;
#[cfg(test)]
mod events;
#[cfg(test)]
mod fewest;
#[cfg(test)]
mod flow;
#[cfg(test)]
mod follow;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod insns;
#[cfg(test)]
mod libipt;
#[cfg(test)]
mod packets;
#[cfg(perf_decoder)]
#[cfg(test)]
mod perf;
#[cfg(test)]
mod program;
#[cfg(test)]
mod rings;
