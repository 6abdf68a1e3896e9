//! Compiles the GPU kernels with nvcc if the feature `cuda` is on and `CUDA_HOME` names a toolkit.
//!
//! Without a toolkit the crate still compiles, so that it can be checked. Opening a device then reports that the
//! kernels are missing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Machine code for Ampere and Hopper, and PTX that the driver compiles for later GPUs.
const TARGETS: [&str; 3] =
    ["arch=compute_80,code=sm_80", "arch=compute_90,code=sm_90", "arch=compute_90,code=compute_90"];
/// The sources, and whether nvcc may fuse multiplications with additions. It may not for the noise and widened weights,
/// which must match the CPU bit for bit.
const SOURCES: [(&str, bool); 5] =
    [("noise", false), ("forward", true), ("attention", true), ("widen", false), ("fp8", false)];

fn main() {
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let Some(out) = env::var_os("OUT_DIR").map(PathBuf::from) else { return };
    let nvcc = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc")).filter(|nvcc| nvcc.exists());
    if nvcc.is_none() {
        println!("cargo::warning=CUDA_HOME names no toolkit with bin/nvcc: the kernels for GPUs are left out");
    }
    for (name, fuse) in SOURCES {
        let image = out.join(format!("{name}.fatbin"));
        let done = match &nvcc {
            Some(nvcc) => compile(nvcc, name, fuse, &image),
            None => fs::write(&image, []).map_err(|e| e.to_string()),
        };
        if let Err(message) = done {
            println!("cargo::error=kernels/{name}.cu: {message}");
        }
    }
}

fn compile(nvcc: &Path, name: &str, fuse: bool, image: &Path) -> Result<(), String> {
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fatbin", "--threads", "0", "-I", "kernels", "--compress-mode=size"]);
    command.arg(format!("-fmad={fuse}"));
    for target in TARGETS {
        command.args(["-gencode", target]);
    }
    command.arg(format!("kernels/{name}.cu")).arg("-o").arg(image);
    let out = command.output().map_err(|e| format!("{}: {e}", nvcc.display()))?;
    if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) }
}
