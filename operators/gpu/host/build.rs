//! Compiles the kernels for the host, as one C++ translation unit.

use std::path::{Path, PathBuf};
use std::{env, io};

mod mutants;

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=../kernels");
    println!("cargo::rerun-if-changed=mutants.rs");
    let out = env::var_os("OUT_DIR").map(PathBuf::from).ok_or_else(|| io::Error::other("no OUT_DIR"))?;
    let mutants = out.join("mutants");
    mutants::write(Path::new("../kernels"), &mutants)?;
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("../kernels/host/all.cpp")
        .include("../kernels")
        .include(mutants)
        .define("STILLHOUSE_SELFTEST", None)
        .define("STILLHOUSE_MUTANTS", None)
        // The CPU code does not fuse products with sums, so fused ones would give other bits.
        .flag("-ffp-contract=off")
        .opt_level(2)
        .compile("stillhouse_kernels");
    Ok(())
}
