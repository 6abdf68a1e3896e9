//! A folder of this machine: what is in it, name by name, so that one that cannot be read harms no other.
//!
//! A name that is not UTF-8 or has control characters has no place in a job's listing, in manifests and in messages: it is told, escaped, where it
//! would be read. So is a link that leads nowhere, in a circle, or out of what is allowed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path as DiskPath;

use object_store::path::{Path, PathPart};

use super::list::Admits;
use crate::storage::Place;

/// What is in a folder.
pub(super) enum Child {
    Folder(Path),
    File(Path, u64),
    /// What it is that cannot be read, and why; `folder`: it is one, or could be.
    Unreadable {
        message: String,
        folder: bool,
    },
}

/// The size of a file; `None` where there is none, or a folder.
pub(super) fn file_size(path: &DiskPath) -> Result<Option<u64>, String> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(None),
        Ok(found) => Ok(Some(found.len())),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(told(&e)),
    }
}

/// What is in a folder, by name: those that are wanted. What is not there is empty, as in a store.
pub(super) fn children(
    folder: &DiskPath,
    location: &Path,
    display: &str,
    wanted: &dyn Fn(&str) -> bool,
    admits: Admits<'_>,
) -> Result<BTreeMap<String, Child>, String> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(BTreeMap::new()),
        Err(e) => return Err(format!("cannot list {}: {}", folder.display(), told(&e))),
    };
    let mut children = BTreeMap::new();
    for entry in entries {
        let entry = entry.map_err(|e| format!("cannot list {}: {}", folder.display(), told(&e)))?;
        let name = entry.file_name();
        let shown = name.to_string_lossy();
        if !wanted(&shown) {
            continue;
        }
        let child = child(&entry, &name, location, display, admits).map_err(|e| {
            format!("cannot look at {}: {}", escaped(display, &name), told(&e))
        })?;
        children.insert(shown.into_owned(), child);
    }
    Ok(children)
}

fn child(
    entry: &fs::DirEntry,
    name: &OsStr,
    location: &Path,
    display: &str,
    admits: Admits<'_>,
) -> io::Result<Child> {
    let unreadable = |why: &str, folder| Ok(Child::Unreadable { message: format!("{} {why}", escaped(display, name)), folder });
    let is_link = entry.file_type()?.is_symlink();
    let path = entry.path();
    if is_link && let Err(message) = admits(&Place::Disk(path.clone())) {
        return unreadable(&format!("is a link: {message}"), true);
    }
    let found = match fs::metadata(&path) {
        Ok(found) => found,
        // removed since it was listed
        Err(e) if !is_link && e.kind() == ErrorKind::NotFound => return unreadable("is gone", false),
        Err(e) if e.kind() == ErrorKind::NotFound => return unreadable("is a link to what is not there", false),
        Err(e) => return unreadable(&format!("is a link that cannot be followed: {}", told(&e)), true),
    };
    if is_link && found.is_dir() && leads_back(&path) {
        return unreadable("is a link that leads back to a folder it is in; valid: no circles", true);
    }
    let part = name.to_str().and_then(|name| PathPart::parse(name).ok());
    let Some(part) = part else {
        return unreadable("has a name that is not UTF-8 or has control characters; valid: rename it", found.is_dir());
    };
    let at: Path = location.parts().chain([part]).collect();
    Ok(if found.is_dir() { Child::Folder(at) } else { Child::File(at, found.len()) })
}

/// Whether a link to a folder leads to one of those that it was found through.
fn leads_back(link: &DiskPath) -> bool {
    let Ok(target) = link.canonicalize() else { return false };
    link.ancestors().skip(1).any(|folder| folder.canonicalize().is_ok_and(|folder| folder == target))
}

/// A name as it can be shown on one line, in quotes.
fn escaped(display: &str, name: &OsStr) -> String {
    let name = format!("{name:?}");
    format!("\"{display}{}\"", name.trim_start_matches('"').trim_end_matches('"'))
}

/// What the system says, without its number.
fn told(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => "permission denied".into(),
        _ => {
            let text = error.to_string();
            text.split(" (os error").next().unwrap_or_default().to_lowercase()
        }
    }
}
