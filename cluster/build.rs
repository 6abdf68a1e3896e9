//! Gives this build its name: the version, and what the sources hash to that decide the bytes of shards.
//!
//! Two programs of one version may be of different sources, and a cluster of both would mix what they make. The hash is of the files' contents
//! and names and the target that is built for, so it is the same for a checkout, a tarball and a copy; no `git` is asked. Test code is left out, as is what only looks or prints.

use std::fs;
use std::path::{Path, PathBuf};

/// Folders whose sources decide what a shard holds.
const FOLDERS: [&str; 4] = ["schemas", "operators", "pipeline", "cluster"];
/// Folders in them that do not.
const LEFT_OUT: [&str; 6] = ["tests", "benches", "examples", "testdata", "proptest-regressions", "target"];
/// What the libraries are, and how they are built.
const WORKSPACE: [&str; 2] = ["Cargo.lock", "Cargo.toml"];
/// Digits that are shown.
const DIGITS: usize = 12;

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
    let mut files: Vec<PathBuf> = WORKSPACE.iter().map(PathBuf::from).collect();
    for folder in FOLDERS {
        collect(root, Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut hash = Fnv::default();
    // another libm has other last bits
    hash.add(std::env::var("TARGET")?.as_bytes());
    for file in &files {
        let path = root.join(file);
        println!("cargo::rerun-if-changed={}", path.display());
        let (name, bytes) = (file.to_string_lossy().replace('\\', "/"), fs::read(&path)?);
        // lengths, so that no two lists of files run into the same bytes
        for part in [name.as_bytes(), bytes.as_slice()] {
            hash.add(&(part.len() as u64).to_le_bytes());
            hash.add(part);
        }
    }
    let digits = format!("{:032x}", hash.0);
    let features = if has_cuda { ".cuda" } else { "" };
    Ok(format!("{}+{}{features}", std::env::var("CARGO_PKG_VERSION")?, &digits[..DIGITS]))
}

fn collect(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(root.join(folder))? {
        let entry = entry?;
        let name = entry.file_name();
        let shown = name.to_string_lossy();
        let kind = entry.file_type()?;
        if shown.starts_with('.') || (kind.is_dir() && LEFT_OUT.contains(&shown.as_ref())) {
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

/// FNV-1a of 128 bits: it tells builds apart, and nobody is kept out by it (that is what the token is for).
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
