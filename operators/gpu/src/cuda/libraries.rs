//! cuBLASLt, opened from where it may be: see [`crate::machine::places`].

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::machine::places::folders;

const NAME: &str = "libcublasLt.so.13";

/// Opens cuBLASLt for the rest of the process, once. Who asks for it by its name afterwards gets this one.
pub(super) fn load_cublaslt() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED
        .get_or_init(|| {
            let folders = folders();
            let paths = std::iter::once(PathBuf::from(NAME)).chain(folders.iter().map(|folder| folder.join(NAME)));
            for path in paths {
                // SAFETY: cuBLASLt's own initialisers run, as in every program that links it
                if let Ok(library) = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                    std::mem::forget(library);
                    return Ok(());
                }
            }
            let looked: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
            Err(format!(
                "no {NAME} (CUDA 13) on the loader's path or in {}; valid: a toolkit in CUDA_HOME, or an environment with PyTorch for \
                 CUDA 13 in VIRTUAL_ENV",
                if looked.is_empty() { "any known folder".into() } else { looked.join(", ") }
            ))
        })
        .clone()
}

/// The files of cuBLASLt that this process has, for a message.
pub(super) fn loaded_cublaslt() -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let files: BTreeSet<&str> = maps
        .lines()
        .filter_map(|line| line.split_once('/'))
        .filter(|(_, path)| path.contains("libcublasLt"))
        .map(|(_, path)| path)
        .collect();
    let files: Vec<String> = files.into_iter().map(|path| format!("/{path}")).collect();
    if files.is_empty() { "a file that cannot be told".into() } else { files.join(" or ") }
}
