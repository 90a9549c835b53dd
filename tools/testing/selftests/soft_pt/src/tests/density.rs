// SPDX-License-Identifier: GPL-2.0

//! The traces of real programs take hardly more bytes than the format needs.

use perf_aux::{
    check,
    fail,
    skip,
    Ctx,
    Outcome,
    Test, //
};

use crate::{
    density::{
        follow,
        programs,
        record, //
    },
    perf::Scratch, //
};

pub const TESTS: &[Test] = &[
    Test::new("density.sort", |ctx| dense(ctx, "sort")).limit(120),
    Test::new("density.compressor", |ctx| dense(ctx, "compressor")).limit(120),
    Test::new("density.interpreter", |ctx| dense(ctx, "interpreter")).limit(120),
    Test::new("density.assembler", |ctx| dense(ctx, "assembler")).limit(120),
];

fn dense(ctx: &Ctx, what: &str) -> Outcome {
    let pmu = ctx.pmu()?;
    let scratch = Scratch::new()?;
    let programs = programs(&scratch.path("."))?;
    let Some(program) = programs.iter().find(|program| program.what == what) else {
        skip!("no {what} that is known");
    };
    let (image, trace) = record(&pmu, program)?;
    let density = match follow(&image, &trace) {
        Ok(density) => density,
        Err(error) => fail!("{:?}: {error}", program.command),
    };
    ctx.diag(format!(
        "{} instructions, {:?}, at least {:?}",
        density.instructions, density.bytes, density.fewest
    ));
    check!(
        density.instructions > 100_000,
        "only {} instructions traced",
        density.instructions
    );
    let (bytes, fewest) = (density.bytes.total(), density.fewest.total());
    check!(
        bytes >= fewest,
        "{bytes} bytes, fewer than the fewest, {fewest}"
    );
    check!(
        bytes * 100 <= fewest * 105,
        "{bytes} bytes, more than 5 % over the fewest, {fewest}"
    );
    Ok(())
}
