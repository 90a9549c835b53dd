// SPDX-License-Identifier: GPL-2.0

//! Builds the decoder of the perf tool out of a kernel source tree, for the tests in `perf`.
//!
//! `KERNEL_SRC` names the tree; without it, those tests are left out.

use std::{
    env,
    error::Error,
    fs::File,
    path::{
        Path,
        PathBuf, //
    },
    process::Command, //
};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=KERNEL_SRC");
    // This file also builds the fuzz targets, which are a package of their own.
    let shim = Path::new(file!()).with_file_name("src").join("perf.c");
    println!("cargo::rerun-if-changed={}", shim.display());
    let Some(tree) = env::var_os("KERNEL_SRC").filter(|tree| !tree.is_empty()) else {
        println!(
            "cargo::warning=KERNEL_SRC isn't set: the tests against perf's decoder are left out"
        );
        return Ok(());
    };
    let tools = PathBuf::from(tree).join("tools");
    let decoder = tools.join("perf/util/intel-pt-decoder");
    if !decoder.join("intel-pt-decoder.c").exists() {
        return Err(format!(
            "KERNEL_SRC: there is no perf tool in {}; set it to a kernel source tree",
            tools.display()
        )
        .into());
    }

    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR isn't set")?);
    let made = Command::new("awk")
        .arg("-f")
        .arg(tools.join("arch/x86/tools/gen-insn-attr-x86.awk"))
        .arg(tools.join("arch/x86/lib/x86-opcode-map.txt"))
        .stdout(File::create(out.join("inat-tables.c"))?)
        .status()?;
    if !made.success() {
        return Err("awk can't make the instruction tables".into());
    }

    cc::Build::new()
        .warnings(false)
        .opt_level(2)
        .define("_GNU_SOURCE", None)
        .include(tools.join("include"))
        .include(tools.join("include/uapi"))
        .include(tools.join("arch/x86/include"))
        .include(tools.join("arch/x86/include/uapi"))
        .include(tools.join("lib/perf/include"))
        .include(tools.join("lib"))
        .include(tools.join("perf/include"))
        .include(tools.join("perf/util"))
        .include(tools.join("perf"))
        .include(&decoder)
        .include(&out)
        .file(shim)
        .file(decoder.join("intel-pt-decoder.c"))
        .file(decoder.join("intel-pt-pkt-decoder.c"))
        .file(decoder.join("intel-pt-insn-decoder.c"))
        .file(decoder.join("intel-pt-log.c"))
        .file(tools.join("arch/x86/lib/insn.c"))
        .file(tools.join("arch/x86/lib/inat.c"))
        .file(tools.join("lib/zalloc.c"))
        .file(tools.join("lib/vsprintf.c"))
        .try_compile("perf_decoder")?;
    println!("cargo::rustc-cfg=perf_decoder");
    Ok(())
}
