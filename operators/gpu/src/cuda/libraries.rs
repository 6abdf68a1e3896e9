//! Where cuBLASLt may be: on the loader's path, in a toolkit, or in an installed PyTorch, whose wheels carry it.

use std::env;
use std::ffi::OsStr;
use std::fs::read_dir;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

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

/// Folders that exist, the most particular first.
fn folders() -> Vec<PathBuf> {
    let named = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(named);
    let mut folders: Vec<PathBuf> = toolkits.flat_map(|home| [home.join("lib64"), home.join("lib")]).collect();
    let pythons =
        [named("VIRTUAL_ENV"), named("CONDA_PREFIX"), python(), named("HOME").map(|home| home.join(".local"))];
    let pythons = pythons.into_iter().flatten().chain(["/usr/local", "/usr"].map(PathBuf::from));
    folders.extend(pythons.flat_map(|prefix| of_python(&prefix)));
    folders.extend(["/usr/local/cuda/lib64", "/usr/local/cuda-13/lib64"].map(PathBuf::from));
    folders.retain(|folder| folder.is_dir());
    folders.dedup();
    folders
}

/// The prefix of the `python3` on the path.
fn python() -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    let found = env::split_paths(&path).map(|folder| folder.join("python3")).find(|python| python.is_file())?;
    found.canonicalize().ok()?.parent()?.parent().map(Path::to_path_buf)
}

/// `nvidia/cu13/lib` of the packages under a prefix.
fn of_python(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = read_dir(prefix.join("lib")) else { return Vec::new() };
    let is_python = |name: &OsStr| name.to_string_lossy().starts_with("python3");
    let mut versions: Vec<PathBuf> =
        entries.flatten().filter(|entry| is_python(&entry.file_name())).map(|entry| entry.path()).collect();
    versions.sort();
    let packages = |version: &PathBuf| ["site-packages", "dist-packages"].map(|name| version.join(name));
    versions.iter().flat_map(packages).map(|folder| folder.join("nvidia/cu13/lib")).filter(|f| f.is_dir()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_an_installed_torch_are_found() {
        let prefix = tempfile::tempdir().unwrap();
        let lib = prefix.path().join("lib/python3.11/site-packages/nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::create_dir_all(prefix.path().join("lib/python3.12/site-packages")).unwrap();
        assert_eq!(of_python(prefix.path()), [lib]);
        assert!(of_python(Path::new("/nowhere")).is_empty());
    }
}
