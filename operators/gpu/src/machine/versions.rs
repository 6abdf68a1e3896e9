//! Versions of driver, GPU and cuBLASLt: those found and those required. Each may decide the last bits of a result.

use std::fs;

/// Oldest CUDA version of a driver, in the numbering of `cuDriverGetVersion`: that of the kernels and cuBLASLt.
const MIN_DRIVER_VERSION: i32 = 13_000;
/// Ampere, the oldest architecture that the kernels are compiled for.
const MIN_CAPABILITY: [i32; 2] = [8, 0];
/// Major compute capabilities that have machine code. For later ones, the driver compiles PTX.
const COMPILED_MAJORS: [i32; 2] = [8, 9];

/// Checks that the driver is new enough.
pub fn check_driver(version: i32) -> Result<(), String> {
    if version >= MIN_DRIVER_VERSION {
        return Ok(());
    }
    let [found, valid] = [version, MIN_DRIVER_VERSION].map(driver_text);
    Err(format!("the NVIDIA driver supports CUDA {found}, valid: CUDA {valid} or later, or cpu"))
}

/// Checks that the GPU can run the kernels.
pub fn check_capability(model: &str, found: [i32; 2]) -> Result<(), String> {
    if found >= MIN_CAPABILITY {
        return Ok(());
    }
    let [major, minor] = MIN_CAPABILITY;
    Err(format!("{model} has compute capability {}.{}, valid: {major}.{minor} or later, or cpu", found[0], found[1]))
}

/// Environment variables of NVIDIA's libraries that change the last bits of results, and their effect if neither empty
/// nor 0.
const RESULT_SETTINGS: [(&str, &str); 5] = [
    ("CUBLAS_EMULATE_SINGLE_PRECISION", "lets cuBLASLt compute f32 products in other types"),
    ("NVIDIA_TF32_OVERRIDE", "lets cuBLASLt compute f32 products in other types"),
    ("CUBLASLT_HEURISTICS_LUT_FILE", "lets cuBLASLt choose other algorithms"),
    ("CUDA_FORCE_PTX_JIT", "lets the driver recompile the kernels"),
    ("CUDA_FORCE_JIT", "lets the driver recompile the kernels"),
];

/// Checks that no environment variable replaces the products or kernels that [`arithmetic`] names.
pub fn check_settings(environment: impl Fn(&str) -> Option<String>) -> Result<(), String> {
    let set = |name: &str| environment(name).filter(|value| !value.is_empty() && value != "0");
    match RESULT_SETTINGS.iter().find_map(|(name, effect)| set(name).map(|value| (name, value, effect))) {
        None => Ok(()),
        Some((name, value, effect)) => Err(format!("{name}={value} {effect}, valid: without it, or 0")),
    }
}

/// Names everything that the bytes of a result depend on. `release` is the driver's own version; it counts only where
/// the driver compiles the kernels.
pub fn arithmetic(
    model: &str,
    multiprocessors: u32,
    capability: [i32; 2],
    driver: i32,
    release: Option<&str>,
    cublaslt: usize,
) -> String {
    let [major, minor] = capability;
    let compiles = !COMPILED_MAJORS.contains(&major);
    let release = release.filter(|_| compiles).map(|release| format!(" {release}")).unwrap_or_default();
    format!(
        "{model} ({multiprocessors} multiprocessors, compute capability {major}.{minor}), driver{release} for CUDA {}, cuBLASLt {}",
        driver_text(driver),
        cublaslt_text(cublaslt)
    )
}

fn driver_text(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn cublaslt_text(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
}

/// The version of the driver's kernel module, such as 580.82.07, if the system reports it.
pub fn driver_release() -> Option<String> {
    parse_release(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

fn parse_release(text: &str) -> Option<String> {
    let words = text.lines().next()?.split_whitespace();
    let is_release = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    words.filter(is_release).map(str::to_owned).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_old_is_told_with_both_numbers() {
        assert!(check_driver(13_000).is_ok() && check_driver(13_020).is_ok());
        let message = check_driver(12_080).unwrap_err();
        assert_eq!(message, "the NVIDIA driver supports CUDA 12.8, valid: CUDA 13.0 or later, or cpu");
        assert!([[8, 0], [8, 6], [9, 0], [12, 1]].into_iter().all(|found| check_capability("A GPU", found).is_ok()));
        let message = check_capability("Tesla T4", [7, 5]).unwrap_err();
        assert_eq!(message, "Tesla T4 has compute capability 7.5, valid: 8.0 or later, or cpu");
    }

    #[test]
    fn settings_that_change_products_are_refused() {
        let with = |name: &'static str, value: &'static str| {
            move |requested: &str| (requested == name).then(|| value.to_owned())
        };
        assert_eq!(check_settings(|_| None), Ok(()));
        assert_eq!(check_settings(with("NVIDIA_TF32_OVERRIDE", "0")), Ok(()));
        assert_eq!(check_settings(with("CUBLAS_EMULATE_SINGLE_PRECISION", "")), Ok(()));
        let message = check_settings(with("CUBLAS_EMULATE_SINGLE_PRECISION", "1")).unwrap_err();
        assert!(message.starts_with("CUBLAS_EMULATE_SINGLE_PRECISION=1 lets"), "{message}");
        assert!(check_settings(with("NVIDIA_TF32_OVERRIDE", "1")).is_err());
        let message = check_settings(with("CUDA_FORCE_PTX_JIT", "1")).unwrap_err();
        assert_eq!(message, "CUDA_FORCE_PTX_JIT=1 lets the driver recompile the kernels, valid: without it, or 0");
        assert!(check_settings(with("CUBLASLT_HEURISTICS_LUT_FILE", "/a/table")).is_err());
    }

    #[test]
    fn arithmetic_names_what_the_bytes_depend_on() {
        let describe =
            |capability, driver, cublaslt| arithmetic("A GPU", 132, capability, driver, Some("580.82.07"), cublaslt);
        assert_eq!(
            describe([9, 0], 13_000, 130_002),
            "A GPU (132 multiprocessors, compute capability 9.0), driver for CUDA 13.0, cuBLASLt 13.0.2"
        );
        // The driver compiles the machine code itself.
        assert!(describe([10, 0], 13_000, 130_002).contains("driver 580.82.07 for CUDA 13.0"));
        let others =
            [describe([9, 0], 13_010, 130_002), describe([9, 0], 13_000, 130_102), describe([8, 6], 13_000, 130_002)];
        assert!(others.iter().all(|other| *other != describe([9, 0], 13_000, 130_002)), "{others:?}");
    }

    #[test]
    fn the_release_is_found_in_what_the_kernel_says() {
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (user@host)\nGCC version: 13.3.0";
        assert_eq!(parse_release(open).as_deref(), Some("580.82.07"));
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24 07:25:52 UTC 2025\n";
        assert_eq!(parse_release(closed).as_deref(), Some("575.57.08"));
        assert_eq!(parse_release(""), None);
    }
}
