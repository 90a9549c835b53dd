// SPDX-License-Identifier: GPL-2.0

//! The usual group: an AUX leader, and a sampler whose samples carry the leader's latest AUX bytes.

use crate::abi;
use crate::error::Result;
use crate::event::{
    Attr,
    Event, //
};
use crate::load;
use crate::record::{
    Record,
    Sample, //
};
use crate::ring::{
    Aux,
    AuxMode,
    Ring, //
};
use crate::sys::Pmu;
use std::time::{
    Duration,
    Instant, //
};

/// How an [`AuxGroup`] is set up. The fields are the knobs; [`Setup::new`] has the usual values.
#[derive(Clone)]
pub struct Setup {
    /// The leader.
    pub leader: Attr,
    /// Data pages of the leader's ring.
    pub leader_pages: usize,
    /// AUX pages.
    pub aux_pages: usize,
    /// Snapshot or full trace.
    pub mode: AuxMode,
    /// The sampler, without its group.
    pub sampler: Attr,
    /// Data pages of the sampler's ring.
    pub sampler_pages: usize,
}

impl Setup {
    /// The PMU on the calling thread, a 16 page snapshot area, and a 4 ms `cpu-clock` sampler of
    /// 4096 bytes.
    pub fn new(pmu: &Pmu, config: u64) -> Self {
        let sample_type = abi::PERF_SAMPLE_IP
            | abi::PERF_SAMPLE_TID
            | abi::PERF_SAMPLE_TIME
            | abi::PERF_SAMPLE_AUX;
        Setup {
            leader: pmu.event(config),
            leader_pages: 8,
            aux_pages: 16,
            mode: AuxMode::Snapshot,
            sampler: Attr::cpu_clock(4_000_000)
                .user_only()
                .sample_type(sample_type.into())
                .aux_sample_size(4096),
            sampler_pages: 64,
        }
    }

    /// Opens and maps the group, switched off.
    pub fn open(&self) -> Result<AuxGroup> {
        let leader = self.leader.open()?;
        let leader_ring = Ring::map(&leader, self.leader_pages)?;
        let aux = leader_ring.map_aux(&leader, self.aux_pages, self.mode)?;
        let sampler = self.sampler.clone().group(&leader).open()?;
        let ring = Ring::map(&sampler, self.sampler_pages)?;
        Ok(AuxGroup {
            aux,
            leader_ring,
            ring,
            sampler,
            leader,
        })
    }
}

/// The open and mapped group. [`Event::enable`] of the leader starts it.
pub struct AuxGroup {
    /// The AUX area.
    pub aux: Aux,
    /// The leader's ring, with the positions of the AUX area.
    pub leader_ring: Ring,
    /// The sampler's ring.
    pub ring: Ring,
    /// The sampler.
    pub sampler: Event,
    /// The leader.
    pub leader: Event,
}

impl AuxGroup {
    /// The samples that arrived since the last call; other records are left out.
    pub fn samples(&mut self) -> Result<Vec<Sample>> {
        let records = self.ring.drain()?;
        Ok(records
            .into_iter()
            .filter_map(|record| match record {
                Record::Sample(sample) => Some(*sample),
                _ => None,
            })
            .collect())
    }

    /// Runs `work` with the group switched on.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        self.leader.enable()?;
        let result = work();
        self.leader.disable()?;
        Ok(result)
    }

    /// How much of the sampler's ring is filled, in bytes.
    pub fn filled(&self) -> usize {
        self.ring.head().wrapping_sub(self.ring.tail()) as usize
    }

    /// Spins with the group switched on, switching it off whenever the ring is half full, until
    /// there are this many samples or the time is over.
    ///
    /// A traced process that takes samples apart would mostly trace that, and with a slow PMU take
    /// very long.
    pub fn sample(&mut self, samples: usize, limit: Duration) -> Result<Vec<Sample>> {
        let end = Instant::now() + limit;
        let mut all = Vec::new();
        while all.len() < samples && Instant::now() < end {
            let half = self.ring.data_bytes() / 2;
            let few =
                (samples - all.len()) * (self.sampler.attr().aux_sample_size as usize).min(65_528);
            self.run(|| {
                load::spin_until(Duration::from_secs(1), || self.filled() > half.min(few))
            })?;
            all.extend(self.samples()?);
        }
        Ok(all)
    }
}
