//! Lists a local folder name by name, so that an unreadable name does not affect the others.
//!
//! A name that is not UTF-8 or has control characters cannot appear in a job's listing, in manifests or in messages. It
//! is reported, escaped, where it would be read. So is a link that is dangling, circular, or leads outside of what is
//! allowed.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path as DiskPath;
use std::time::UNIX_EPOCH;

use object_store::ObjectMeta;
use object_store::path::{Path, PathPart};
use stillhouse_base::storage::Location;

use super::input_file::AccessCheck;

/// An entry of a folder.
pub(crate) enum FolderEntry {
    Folder(Path),
    File(ObjectMeta),
    /// A pipe, a device or a socket.
    Special(Path),
    /// An entry that cannot be read, with the reason. `folder`: it is or could be a folder.
    Unreadable {
        message: String,
        folder: bool,
    },
}

/// Returns the file at a path with the metadata that `object_store` would report. `None` if nothing exists there, or a
/// folder.
pub(crate) fn file(path: &DiskPath, location: &Path) -> Result<Option<FolderEntry>, String> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => Ok(None),
        Ok(found) if has_hidden_bytes(&found, path) => Err(HIDDEN_BYTES.into()),
        Ok(found) => Ok(Some(from_metadata(&found, location.clone()))),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(e) => Err(describe(&e)),
    }
}

const HIDDEN_BYTES: &str =
    "has 0 bytes according to the system but is not empty, as files in /proc; valid: a copy of it on a disk";

/// Whether a file holds bytes although its size is 0. Without this check it would be read as empty, without an error.
fn has_hidden_bytes(found: &Metadata, path: &DiskPath) -> bool {
    let reads = || fs::File::open(path).and_then(|mut file| file.read(&mut [0]));
    found.is_file() && found.len() == 0 && reads().is_ok_and(|read| read > 0)
}

fn from_metadata(found: &Metadata, location: Path) -> FolderEntry {
    match (found.is_dir(), found.is_file()) {
        (true, _) => FolderEntry::Folder(location),
        (_, true) => FolderEntry::File(object_meta(found, location)),
        _ => FolderEntry::Special(location),
    }
}

/// Builds the same metadata as `object_store`, which would have to open the file for it.
pub(crate) fn object_meta(found: &Metadata, location: Path) -> ObjectMeta {
    let modified = found.modified().unwrap_or(UNIX_EPOCH);
    let micros = modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let (inode, size) = (found.ino(), found.len());
    let e_tag = Some(format!("{inode:x}-{micros:x}-{size:x}"));
    ObjectMeta { location, last_modified: modified.into(), size, e_tag, version: None }
}

/// Returns the wanted entries of a folder, sorted by name. A folder that does not exist is empty, as in a store.
pub(crate) fn list_entries(
    folder: &DiskPath,
    location: &Path,
    display: &str,
    wanted: &dyn Fn(&str) -> bool,
    check_access: AccessCheck<'_>,
) -> Result<Vec<(String, FolderEntry)>, String> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(e) => return Err(format!("cannot list {}: {}", folder.display(), describe(&e))),
    };
    let mut children = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| format!("cannot list {}: {}", folder.display(), describe(&e)))?;
        let name = entry.file_name();
        let shown = name.to_string_lossy();
        if !wanted(&shown) {
            continue;
        }
        let found = read_entry(&entry, &name, location, display, check_access)
            .map_err(|e| format!("cannot access {}: {}", escaped(display, &name), describe(&e)))?;
        children.push((shown.into_owned(), found));
    }
    // two names that are not UTF-8 may have the same lossy form
    children.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(children)
}

fn read_entry(
    entry: &fs::DirEntry,
    name: &OsStr,
    location: &Path,
    display: &str,
    check_access: AccessCheck<'_>,
) -> io::Result<FolderEntry> {
    let unreadable = |why: &str, folder| {
        Ok(FolderEntry::Unreadable { message: format!("{} {why}", escaped(display, name)), folder })
    };
    let is_link = entry.file_type()?.is_symlink();
    if is_link && let Err(message) = check_access(&Location::Disk(entry.path())) {
        return unreadable(&format!("is a link: {message}"), true);
    }
    // for an entry that is not a link, the open folder gives the metadata, without resolving the whole path
    let found = match if is_link { fs::metadata(entry.path()) } else { entry.metadata() } {
        Ok(found) => found,
        // removed after the listing
        Err(e) if !is_link && e.kind() == ErrorKind::NotFound => return unreadable("is gone", false),
        Err(e) if e.kind() == ErrorKind::NotFound => return unreadable("is a link to what is not there", false),
        Err(e) => return unreadable(&format!("is a link that cannot be followed: {}", describe(&e)), true),
    };
    if is_link && found.is_dir() && is_circular_link(&entry.path()) {
        return unreadable("is a link to a folder that contains it; valid: no cycles", true);
    }
    if has_hidden_bytes(&found, &entry.path()) {
        return unreadable(HIDDEN_BYTES, false);
    }
    let part = name.to_str().and_then(|name| PathPart::parse(name).ok());
    let Some(part) = part else {
        return unreadable("has a name that is not UTF-8 or has control characters; valid: rename it", found.is_dir());
    };
    let at: Path = location.parts().chain([part]).collect();
    Ok(from_metadata(&found, at))
}

/// Whether a link leads to one of the folders that contain it.
fn is_circular_link(link: &DiskPath) -> bool {
    let Ok(target) = link.canonicalize() else { return false };
    link.ancestors().skip(1).any(|folder| folder.canonicalize().is_ok_and(|folder| folder == target))
}

/// Formats a name for one line, escaped and in quotes.
fn escaped(display: &str, name: &OsStr) -> String {
    let name = format!("{name:?}");
    format!("\"{display}{}\"", name.trim_start_matches('"').trim_end_matches('"'))
}

/// Returns the system's message without the error number.
fn describe(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => "permission denied".into(),
        _ => {
            let text = error.to_string();
            text.split(" (os error").next().unwrap_or_default().to_lowercase()
        }
    }
}

#[cfg(test)]
mod tests {
    use object_store::ObjectStoreExt;

    use super::*;

    #[tokio::test]
    async fn a_file_is_reported_as_the_store_reports_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().canonicalize().unwrap().join("a ü.txt");
        fs::write(&path, "text").unwrap();
        let location = Path::from_absolute_path(&path).unwrap();
        let store = object_store::local::LocalFileSystem::new();
        let Ok(Some(FolderEntry::File(found))) = file(&path, &location) else { panic!("no file") };
        assert_eq!(found, store.head(&location).await.unwrap());
        let listed = list_entries(folder.path(), &Path::default(), "", &|_| true, &|_| Ok(())).unwrap();
        assert!(matches!(listed.as_slice(), [(name, FolderEntry::File(meta))] if name == "a ü.txt" && meta.size == 4));
    }
}
