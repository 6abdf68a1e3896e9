//! Names this build: the version, plus a hash of the sources that decide the bytes of shards.
//!
//! Two programs of one version may come from different sources, and a cluster of both would mix their shards. The hash
//! covers the names and contents of the files and the target triple. So it is the same for a checkout, a tarball and a
//! copy; `git` is not needed. It excludes test code, and code that only reads or prints.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose sources decide the bytes of a shard.
const FOLDERS: [&str; 4] = ["schemas", "operators", "pipeline", "cluster"];
/// Subfolders that do not.
const EXCLUDED: [&str; 6] = ["tests", "benches", "examples", "testdata", "proptest-regressions", "target"];
/// Files that decide the versions of the libraries and how they are built.
const WORKSPACE_FILES: [&str; 2] = ["Cargo.lock", "Cargo.toml"];
/// Hexadecimal digits of the hash in the name.
const HASH_DIGITS: usize = 12;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is_set = |name: &str| std::env::var_os(name).is_some();
    if !is_set("CARGO_FEATURE_DISTRIBUTED") {
        return;
    }
    match name(is_set("CARGO_FEATURE_CUDA")) {
        Ok(name) => println!("cargo::rustc-env=STILLHOUSE_BUILD={name}"),
        Err(e) => println!("cargo::error=the sources of the workspace cannot be read, which name this build: {e}"),
    }
}

fn name(has_cuda: bool) -> Result<String, Box<dyn std::error::Error>> {
    let crate_folder = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?);
    let root = crate_folder.parent().ok_or("the crate is in no workspace")?;
    let mut files: Vec<PathBuf> = WORKSPACE_FILES.iter().map(PathBuf::from).collect();
    for folder in FOLDERS {
        collect(root, Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut hash = Fnv::default();
    // another target's libm may return other last bits
    hash.add(std::env::var("TARGET")?.as_bytes());
    for file in &files {
        let path = root.join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let (name, bytes) = (file.to_string_lossy().replace('\\', "/"), fs::read(&path)?);
        // the lengths keep two different lists of files from hashing the same bytes
        for part in [name.as_bytes(), bytes.as_slice()] {
            hash.add(&(part.len() as u64).to_le_bytes());
            hash.add(part);
        }
    }
    let digits = format!("{:032x}", hash.0);
    let features = if has_cuda { ".cuda" } else { "" };
    Ok(format!("{}+{}{features}", std::env::var("CARGO_PKG_VERSION")?, &digits[..HASH_DIGITS]))
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let name = entry.file_name();
        let shown = name.to_string_lossy();
        let kind = entry.file_type()?;
        if shown.starts_with('.') || (kind.is_dir() && EXCLUDED.contains(&shown.as_ref())) {
            continue;
        }
        let path = folder.join(&name);
        if kind.is_dir() {
            collect(root, &path, files)?;
        } else if kind.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

/// 128-bit FNV-1a. It tells builds apart and is not a security measure; the token is.
struct Fnv(u128);

impl Default for Fnv {
    fn default() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Fnv {
    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
    }
}
