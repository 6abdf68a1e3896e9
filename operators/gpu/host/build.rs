//! Compiles the kernels for the host: one translation unit, as C++.

fn main() {
    println!("cargo::rerun-if-changed=../kernels");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .file("../kernels/host/all.cpp")
        .include("../kernels")
        .define("STILLHOUSE_SELFTEST", None)
        // fused products would give other bits than the CPU's code, which has none
        .flag("-ffp-contract=off")
        .opt_level(2)
        .compile("stillhouse_kernels");
}
