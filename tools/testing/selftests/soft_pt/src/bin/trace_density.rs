// SPDX-License-Identifier: GPL-2.0

//! How many bytes the traces of real programs take, against the fewest that the format allows.
//!
//! Standard output has one JSON object per line, standard error the same for people.

#[expect(dead_code, reason = "the selftest uses the rest")]
#[path = "../density.rs"]
mod density;
#[path = "../../../../soft_pt_host/src/fewest.rs"]
mod fewest;
#[expect(dead_code, reason = "the selftest uses the rest")]
#[path = "../image.rs"]
mod image;

use perf_aux::{
    sys::Pmu,
    Error,
    Result, //
};
use std::process::ExitCode;

fn report(pmu: &Pmu) -> Result<()> {
    let directory = std::env::temp_dir().join(format!("trace_density-{}", std::process::id()));
    std::fs::create_dir_all(&directory)
        .map_err(|e| Error::from_io(format!("making {}", directory.display()), &e))?;
    for program in density::programs(&directory)? {
        let (image, trace) = density::record(pmu, &program)?;
        let density = density::follow(&image, &trace)?;
        let what = program.what;
        let (instructions, branches) = (density.instructions, density.branches);
        let per_1000 = |bytes: usize| bytes as f64 * 1000.0 / instructions as f64;
        let (has, least) = (density.bytes, density.fewest);
        let (bytes, fewest) = (has.total(), least.total());
        let ratio = bytes as f64 / fewest as f64;
        eprintln!(
            "{what:<12} {instructions:9} instructions, {branches:8} conditional branches, {:8} bytes: \
             {:.1} per 1000 instructions, {:.3} per conditional branch, {:.2} % over the fewest \
             (TNT {} of {}, TIP {} of {}, other {} of {})",
            bytes,
            per_1000(bytes),
            bytes as f64 / branches as f64,
            (ratio - 1.0) * 100.0,
            has.tnt,
            least.tnt,
            has.tip,
            least.tip,
            has.other,
            least.other,
        );
        println!(
            r#"{{"what":"{what}","variant":"density","instructions":{instructions},"branches":{branches},"bytes":{},"fewest":{},"ratio":{ratio:.4},"bytes_per_1000_instructions":{:.2},"fewest_per_1000_instructions":{:.2},"bytes_per_branch":{:.4},"tnt":{},"tip":{},"other":{}}}"#,
            bytes,
            fewest,
            per_1000(bytes),
            per_1000(fewest),
            bytes as f64 / branches as f64,
            has.tnt,
            has.tip,
            has.other,
        );
    }
    // What is left behind does no harm.
    let _ = std::fs::remove_dir_all(&directory);
    Ok(())
}

fn main() -> ExitCode {
    let pmu = ["intel_pt", "soft_pt"]
        .into_iter()
        .find_map(|name| Pmu::find(name).transpose())
        .unwrap_or_else(|| Err(Error::new("there is no PMU called intel_pt or soft_pt")));
    match pmu.and_then(|pmu| report(&pmu)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("trace_density: {error}");
            ExitCode::FAILURE
        }
    }
}
