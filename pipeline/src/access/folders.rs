//! Resolves paths of this machine and compares them with allowed folders.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::ANY;
use super::urls::{Prefix, is_url};

/// A path without its `file://` prefix.
pub(super) fn stripped(path: &str) -> &str {
    path.strip_prefix("file://").unwrap_or(path)
}

/// The folders and prefixes of one list.
#[derive(Debug)]
pub(super) struct Roots {
    any: bool,
    folders: Vec<PathBuf>,
    urls: Vec<Prefix>,
}

impl Roots {
    /// Parses the entries; invalid ones allow nothing.
    pub fn new<'a>(entries: impl IntoIterator<Item = &'a String>) -> Self {
        let mut roots = Self { any: false, folders: Vec::new(), urls: Vec::new() };
        for entry in entries {
            if entry == ANY {
                roots.any = true;
            } else if is_url(entry) {
                roots.urls.extend(Prefix::parse(entry));
            } else {
                let folder = Path::new(stripped(entry));
                roots.folders.extend(resolve(folder, |_| true).filter(|_| folder.is_absolute()));
            }
        }
        roots
    }

    pub fn contains_url(&self, url: &Prefix) -> bool {
        self.any || self.urls.iter().any(|prefix| prefix.contains(url))
    }

    /// Whether a resolved path is in one of the folders.
    pub fn contains_folder(&self, resolved: &Path) -> bool {
        self.any || self.folders.iter().any(|folder| resolved.starts_with(folder))
    }

    /// Whether a resolved path is in one of the folders or is an ancestor of one.
    pub fn are_near(&self, resolved: &Path) -> bool {
        self.contains_folder(resolved) || self.folders.iter().any(|folder| folder.starts_with(resolved))
    }
}

/// The target of a path as the system opens it: links are followed, and `..` applies to the link's target. Components
/// that do not exist yet are kept as written.
///
/// Returns `None` if the target cannot be determined (dangling link, loop, unreadable folder), or if `..` follows a
/// folder that is not `known`. Never reads the disk in folders that are not `known`.
pub(super) fn resolve(path: &Path, known: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let absolute = std::path::absolute(path).ok()?;
    let mut resolved = PathBuf::new();
    for component in absolute.components() {
        match component {
            Component::ParentDir => {
                if !known(&resolved) {
                    return None;
                }
                resolved.pop();
            }
            Component::CurDir => {}
            other => {
                let asked = known(&resolved);
                resolved.push(other);
                if !asked {
                    continue;
                }
                match fs::symlink_metadata(&resolved) {
                    Ok(found) if found.is_symlink() => resolved = resolved.canonicalize().ok()?,
                    Ok(_) => {}
                    Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
                    Err(_) => return None,
                }
            }
        }
    }
    Some(resolved)
}

/// The names that a run writes below an output, and every link or special file that exists there.
pub(super) fn written(root: &Path) -> Vec<PathBuf> {
    let names = ["data", "_stillhouse", "manifest.json", "README.md", "tokenizer.json", "_SUCCESS"];
    let mut found: Vec<PathBuf> = names.iter().map(|name| root.join(name)).collect();
    let mut folders: Vec<PathBuf> = found.iter().take(2).filter(|f| is_folder(f)).cloned().collect();
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries.flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_file() => {}
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => found.push(entry.path()),
            }
        }
    }
    found
}

/// Whether the path is a folder; false for a link to a folder.
fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}
