//! Folders that may hold CUDA's libraries, besides the loader's path: those of a toolkit, or of an installed PyTorch,
//! whose wheels contain them.

use std::env;
use std::ffi::OsStr;
use std::fs::read_dir;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Existing folders, the most specific first. The search runs once, so a process that confines itself to these folders
/// gets the same list afterwards.
pub fn folders() -> &'static [PathBuf] {
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOLDERS.get_or_init(search)
}

fn search() -> Vec<PathBuf> {
    let env_path = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let toolkits = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(env_path);
    let mut folders: Vec<PathBuf> = toolkits.flat_map(|home| [home.join("lib64"), home.join("lib")]).collect();
    let on_path = env::var_os("PATH").map(|path| python_prefixes(&path)).unwrap_or_default();
    // Packages of conda itself are in `lib` of the prefix, not inside Python.
    folders.extend(env_path("CONDA_PREFIX").map(|prefix| prefix.join("lib")));
    let pythons = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(env_path).chain(on_path);
    let pythons = pythons.chain(env_path("HOME").map(|home| home.join(".local")));
    let pythons = pythons.chain(["/usr/local", "/usr"].map(PathBuf::from));
    folders.extend(pythons.flat_map(|prefix| nvidia_folders(&prefix)));
    folders.extend(["/usr/local/cuda/lib64", "/usr/local/cuda-13/lib64"].map(PathBuf::from));
    folders.retain(|folder| folder.is_dir());
    folders.dedup();
    folders
}

/// Prefixes of the first `python3` on a `PATH`: of the path itself, which is in the environment's folder, and of its
/// target.
fn python_prefixes(path: &OsStr) -> Vec<PathBuf> {
    let Some(found) = env::split_paths(path).map(|folder| folder.join("python3")).find(|python| python.is_file())
    else {
        return Vec::new();
    };
    let real = found.canonicalize().ok();
    let pythons = std::iter::once(found).chain(real);
    pythons.filter_map(|python| python.parent()?.parent().map(Path::to_path_buf)).collect()
}

/// The folders `nvidia/cu13/lib` of the Python packages under a prefix.
fn nvidia_folders(prefix: &Path) -> Vec<PathBuf> {
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
        assert_eq!(nvidia_folders(prefix.path()), [lib]);
        assert!(nvidia_folders(Path::new("/nowhere")).is_empty());
    }

    #[test]
    fn an_environment_on_the_path_comes_before_the_python_that_it_is_made_of() {
        let (system, environment) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for prefix in [&system, &environment] {
            std::fs::create_dir_all(prefix.path().join("bin")).unwrap();
        }
        let real = system.path().join("bin/python3.11");
        std::fs::write(&real, "").unwrap();
        std::os::unix::fs::symlink(&real, environment.path().join("bin/python3")).unwrap();
        let path = env::join_paths([Path::new("/nowhere"), &environment.path().join("bin")]).unwrap();
        let want = [environment.path().to_path_buf(), system.path().canonicalize().unwrap()];
        assert_eq!(python_prefixes(&path), want);
        assert!(python_prefixes(OsStr::new("/nowhere")).is_empty());
    }
}
