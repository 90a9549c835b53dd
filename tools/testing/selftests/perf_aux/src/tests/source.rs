// SPDX-License-Identifier: GPL-2.0

//! What the PMU under test puts into its AUX area, and what a sample of it must therefore hold.
//!
//! A PMU with a `pattern` format field can write a 64-bit counter in place of its trace, and one
//! whose `caps/pattern` reads 1 writes nothing else: word `n` of an AUX area, counted from when it
//! was mapped, is the number `n`, little-endian, at byte `8 * n`. When it writes a word is its own
//! affair. So a sample taken when `n` words were written ends with the word `n - 1`, each word is
//! one more than the one before it, and what lies before word 0 is zero. Other PMUs have traces
//! that this crate can't predict; for them only sizes are checked.

use perf_aux::group::Setup;
use perf_aux::load;
use perf_aux::record::Sample;
use perf_aux::ring::Aux;
use perf_aux::sys::Pmu;
use perf_aux::{
    check,
    skip,
    Ctx,
    Outcome,
    Stop, //
};
use std::time::Duration;

/// The PMU under test, with the most predictable of its configurations.
pub struct Source {
    pub pmu: Pmu,
    pub config: u64,
    pub pattern: bool,
    /// There is a word for each instruction in user mode, so that a program decides how many there
    /// are.
    pub by_instruction: bool,
}

impl Source {
    pub fn new(ctx: &Ctx) -> Result<Self, Stop> {
        let pmu = ctx.pmu()?;
        let chosen = pmu.config("pattern", 1)?;
        let always = pmu.file("caps/pattern")?.as_deref() == Some("1");
        Ok(Source {
            // One that can be chosen in place of a trace of instructions counts them.
            by_instruction: chosen.is_some(),
            pattern: always || chosen.is_some(),
            config: chosen.unwrap_or(0),
            pmu,
        })
    }

    /// Skips a test in which a program must decide what is written.
    pub fn needs_instructions(&self) -> Outcome {
        if !self.by_instruction {
            skip!(
                "{} has no pattern that counts instructions",
                self.pmu.name()
            );
        }
        Ok(())
    }

    /// Runs some instructions in user mode, of which a trace of instructions shows `rounds` times
    /// eight or so. One that a timer writes gets the time for more than a word.
    pub fn spin(&self, rounds: u64) {
        load::spin(rounds);
        if self.by_timer() {
            for _ in 0..8 {
                load::spin(200_000);
                // On an emulated machine, who makes the timer come needs a turn too.
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    /// The same, until there is something in this area.
    pub fn spin_till_traced(&self, rounds: u64, aux: &Aux) {
        self.spin(rounds);
        if self.by_timer() {
            load::spin_until(Duration::from_secs(30), || {
                aux.all().iter().any(|byte| *byte != 0)
            });
        }
    }

    fn by_timer(&self) -> bool {
        self.pattern && !self.by_instruction
    }

    /// The usual group with this source as its leader.
    pub fn setup(&self) -> Setup {
        Setup::new(&self.pmu, self.config)
    }

    /// Checks one sample against the model. Returns how many words had been written when it was
    /// taken, where known.
    pub fn check(&self, sample: &Sample) -> Result<Option<u64>, Stop> {
        let Some(aux) = &sample.aux else {
            perf_aux::fail!("a sample without an AUX field: {sample:?}");
        };
        if !self.pattern {
            return Ok(None);
        }
        match written(aux) {
            Ok(n) => Ok(Some(n)),
            Err(what) => perf_aux::fail!("AUX bytes of a sample of {} bytes: {what}", aux.len()),
        }
    }

    /// The same for a row of samples of one area, which must not go backwards.
    pub fn check_all(&self, samples: &[Sample]) -> Outcome {
        let mut last = 0;
        for sample in samples {
            let now = self.check(sample)?.unwrap_or(0);
            check!(
                now >= last,
                "a sample at word {now} after one at word {last}"
            );
            last = now;
        }
        Ok(())
    }
}

/// How many words the pattern source had written when these, its latest bytes, were copied.
fn written(aux: &[u8]) -> Result<u64, String> {
    if aux.len() % 8 != 0 {
        return Err("not whole words".to_owned());
    }
    let words: Vec<u64> = aux
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
        .collect();
    // Word 0 is zero like what was never written, so a sample of nothing but zeros may be of 0
    // words or of 1.
    let end = match words.last() {
        None | Some(0) => 0,
        Some(last) => last + 1,
    };
    for (back, word) in words.iter().rev().enumerate() {
        let expected = end.saturating_sub(1).saturating_sub(back as u64);
        if *word != expected {
            return Err(format!(
                "word {} of {} is {word:#x}, expected {expected:#x} as the last is {:#x}",
                words.len() - 1 - back,
                words.len(),
                end.saturating_sub(1)
            ));
        }
    }
    Ok(end)
}

#[cfg(test)]
mod tests {
    use super::written;

    fn bytes(words: &[u64]) -> Vec<u8> {
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    #[test]
    fn the_model_accepts_what_the_pattern_writes() {
        assert_eq!(written(&bytes(&[])), Ok(0));
        assert_eq!(written(&bytes(&[0, 0, 0])), Ok(0));
        assert_eq!(written(&bytes(&[0, 0, 1])), Ok(2));
        assert_eq!(written(&bytes(&[5, 6, 7])), Ok(8));
    }

    #[test]
    fn the_model_refuses_anything_else() {
        assert!(written(&bytes(&[5, 6, 0])).is_err());
        assert!(written(&bytes(&[5, 7])).is_err());
        assert!(written(&bytes(&[9, 0, 1])).is_err());
        assert!(written(&bytes(&[1, 2])[1..]).is_err());
    }
}
