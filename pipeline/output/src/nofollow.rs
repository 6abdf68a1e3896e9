//! Removes files of an output on a disk without following symbolic links.
//!
//! Somebody may place a link in the folders of a run (`out/_stillhouse/input -> /scratch`). Its target does not belong
//! to the run and is never removed. Therefore every folder below the output is opened relative to its parent with
//! `O_NOFOLLOW`, and names are removed relative to the open folder. A link created meanwhile is not followed either.
//! The path to the output itself may contain links, because the job names it.

#![allow(clippy::disallowed_methods, reason = "`disk` runs every function here through `blocking`")]

use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, openat, unlinkat};

/// Maximum depth of nested folders that are removed. A run creates two levels.
const MAX_DEPTH: usize = 32;

const FOLDER_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// A symbolic link where a folder is expected.
#[derive(Debug, thiserror::Error)]
#[error("{} is a link to {}, valid: a folder; nothing is written or removed through it. Remove the link", link.display(), target.display())]
pub(super) struct UnexpectedLink {
    link: PathBuf,
    target: PathBuf,
}

/// Returns an error if the path is a symbolic link.
fn link_error(path: &Path) -> Option<io::Error> {
    let target = std::fs::read_link(path).ok()?;
    Some(io::Error::other(UnexpectedLink { link: path.to_owned(), target }))
}

/// Fails if one of these paths below a folder, or a folder on the way to it, is a symbolic link.
pub(super) fn refuse_links(root: &Path, names: &[&str]) -> io::Result<()> {
    for name in names {
        let mut path = root.to_owned();
        for part in Path::new(name).components() {
            path.push(part);
            if let Some(error) = link_error(&path) {
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Removes a file below a folder. A missing file is not an error.
pub(super) fn remove_file(root: &Path, name: &str) -> io::Result<()> {
    match open_parent(root, name) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
        Ok((parent, _, last)) => ignore_missing(unlinkat(&parent, last, AtFlags::empty())),
    }
}

/// Removes a folder below a folder with its contents. A missing folder is not an error. Links in it are removed, not
/// followed.
pub(super) fn remove_folder(root: &Path, name: &str) -> io::Result<()> {
    let removed = open_parent(root, name).and_then(|(parent, path, last)| {
        remove_contents(open_folder(&parent, last, &path.join(last))?, &path.join(last), 0)?;
        ignore_missing(unlinkat(&parent, last, AtFlags::REMOVEDIR))
    });
    match removed {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

fn ignore_missing(removed: rustix::io::Result<()>) -> io::Result<()> {
    match removed {
        Err(e) if e == rustix::io::Errno::NOENT => Ok(()),
        removed => Ok(removed?),
    }
}

/// Opens the parent folder of a name below `root`. Returns it with its path and the last component of the name.
fn open_parent<'a>(root: &Path, name: &'a str) -> io::Result<(OwnedFd, PathBuf, &'a OsStr)> {
    let invalid = || io::Error::new(ErrorKind::InvalidInput, format!("{name:?} is no name below a folder"));
    let mut parts = Path::new(name).components();
    let Some(Component::Normal(last)) = parts.next_back() else { return Err(invalid()) };
    let (mut folder, mut path) = (openat(CWD, root, FOLDER_FLAGS, Mode::empty())?, root.to_owned());
    for part in parts {
        let Component::Normal(part) = part else { return Err(invalid()) };
        path.push(part);
        folder = open_folder(&folder, part, &path)?;
    }
    Ok((folder, path, last))
}

fn open_folder(parent: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<OwnedFd> {
    openat(parent, name, FOLDER_FLAGS.union(OFlags::NOFOLLOW), Mode::empty())
        .map_err(|e| link_error(path).unwrap_or_else(|| io::Error::from(e)))
}

fn remove_contents(folder: OwnedFd, path: &Path, depth: usize) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other(format!("{}: more than {MAX_DEPTH} folders in each other", path.display())));
    }
    for entry in Dir::read_from(&folder)? {
        let entry = entry?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes()).to_owned();
        if name == "." || name == ".." {
            continue;
        }
        let is_folder = match entry.file_type() {
            FileType::Directory => true,
            // Some file systems do not report the type.
            FileType::Unknown => {
                let stat = rustix::fs::statat(&folder, &*name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            }
            _ => false,
        };
        if is_folder {
            let inner = path.join(&name);
            remove_contents(open_folder(&folder, &name, &inner)?, &inner, depth + 1)?;
        }
        ignore_missing(unlinkat(&folder, &*name, if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() }))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_behind_a_link_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (root, scratch) = (folder.path().join("out"), folder.path().join("scratch"));
        fs::create_dir_all(root.join("state")).unwrap();
        fs::create_dir_all(scratch.join("deep")).unwrap();
        for file in ["precious.parquet", "deep/precious"] {
            fs::write(scratch.join(file), "p").unwrap();
        }
        symlink(&scratch, root.join("state/input")).unwrap();
        let refused = |e: io::Error| {
            assert!(e.to_string().contains("state/input is a link to"), "{e}");
        };
        refused(remove_folder(&root, "state/input").unwrap_err());
        refused(remove_folder(&root, "state/input/deep").unwrap_err());
        refused(remove_file(&root, "state/input/precious.parquet").unwrap_err());
        refused(refuse_links(&root, &["state", "state/input"]).unwrap_err());
        // a link inside a removed folder is removed, and its target stays
        fs::create_dir_all(root.join("mine/deep")).unwrap();
        fs::write(root.join("mine/deep/file"), "f").unwrap();
        symlink(&scratch, root.join("mine/deep/link")).unwrap();
        symlink(scratch.join("precious.parquet"), root.join("mine/file")).unwrap();
        remove_folder(&root, "mine").unwrap();
        assert!(!root.join("mine").exists());
        for file in ["precious.parquet", "deep/precious"] {
            assert!(scratch.join(file).exists());
        }
        // the path to the output itself may contain a link
        let through = folder.path().join("through");
        symlink(&root, &through).unwrap();
        fs::write(root.join("state/file"), "f").unwrap();
        refuse_links(&through, &["state"]).unwrap();
        remove_file(&through, "state/file").unwrap();
        assert!(!root.join("state/file").exists());
        // a missing file is not an error; a name that leaves the folder is
        remove_file(&root, "a/b").unwrap();
        remove_folder(&root, "a/b").unwrap();
        assert!(remove_file(&root, "../scratch/precious.parquet").is_err());
        assert!(scratch.join("precious.parquet").exists());
    }
}
