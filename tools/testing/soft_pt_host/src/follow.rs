// SPDX-License-Identifier: GPL-2.0

//! Compares what flow decoders make of a trace with what happened.

use crate::{
    libipt,
    program::{
        Program,
        Run,
        Step, //
    },
};

/// Where what a decoder found departs from what happened.
///
/// A decoder can't know where a flow was lost, only that it was: before an overflow, it may miss
/// the last instructions, or believe in some more.
fn difference(expected: &[Step], found: &[Step]) -> Option<String> {
    let (mut e, mut f) = (0, 0);
    loop {
        match (expected.get(e), found.get(f)) {
            (None, None) => return None,
            (a, b) if a == b => {
                e += 1;
                f += 1;
            }
            _ => {
                let insns = |steps: &[Step]| {
                    steps
                        .iter()
                        .take_while(|step| matches!(step, Step::Insn(..)))
                        .count()
                };
                let (lost, guessed) = (insns(&expected[e..]), insns(&found[f..]));
                if expected.get(e + lost) == Some(&Step::Overflow)
                    && found.get(f + guessed) == Some(&Step::Overflow)
                {
                    e += lost;
                    f += guessed;
                    continue;
                }
                return Some(format!(
                    "after {e} steps, expected {:x?}, found {:x?}, last {:x?}",
                    &expected[e..expected.len().min(e + 3)],
                    &found[f..found.len().min(f + 3)],
                    &expected[e.saturating_sub(3)..e],
                ));
            }
        }
    }
}

/// Follows a run through a part of its trace, which begins `cut` bytes into it.
pub(crate) fn follow(program: &Program, run: &Run, trace: &[u8], cut: usize) -> Result<(), String> {
    let first = run.told.psbs.iter().position(|psb| psb.offset >= cut);
    let begin = first.map(|first| run.told.psbs[first].offset - cut);

    let decoded = libipt::decode(program, trace);
    let (Some(decoded), Some(first)) = (&decoded, first) else {
        return if decoded.is_none() && first.is_none() {
            Ok(())
        } else {
            Err(format!(
                "the first PSB is at {begin:x?}, libipt finds {decoded:x?}"
            ))
        };
    };
    let expected = &run.steps[run.psb_steps[first]..];
    let differs = difference(expected, &decoded.steps);
    if Some(decoded.begin) != begin || differs.is_some() || decoded.error.is_some() {
        return Err(format!(
            "from {cut:#x}, libipt from {:#x}: {differs:?}, {:?}",
            decoded.begin, decoded.error
        ));
    }

    #[cfg(perf_decoder)]
    {
        let (steps, error) = crate::perf::decode(program, run.told.config, trace);
        let differs = difference(expected, &steps);
        if differs.is_some() || error.is_some() {
            return Err(format!("from {cut:#x}, perf: {differs:?}, {error:?}"));
        }
    }
    Ok(())
}
