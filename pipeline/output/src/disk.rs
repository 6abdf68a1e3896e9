//! File system operations that an object store does not offer: durable files, locks, removing empty folders.
//!
//! All of them block and therefore run through [`blocking`]. The lint `disallowed_methods` enforces that in the rest of
//! [`super`]. [`super::commit`] decides the order in which things become durable:
//!
//! ```text
//!   bytes of a file ── sync_file ──► its name ── sync_folder ──► the record that says it exists
//! ```

#![allow(clippy::disallowed_methods, reason = "every function here runs its work through `blocking`")]

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::nofollow;
use stillhouse_base::storage::blocking;

/// Number of files that this process has begun to write; makes temporary names unique.
static FILES_BEGUN: AtomicU64 = AtomicU64::new(0);

/// Makes the bytes of a file durable.
pub(super) async fn sync_file(path: PathBuf) -> io::Result<()> {
    blocking(move || File::open(path)?.sync_all()).await
}

/// Makes the names in a folder durable, if the file system supports it.
pub(super) async fn sync_folder(path: PathBuf) -> io::Result<()> {
    blocking(move || fsync_folder(&path)).await
}

/// Writes a file atomically. Bytes, name and folder are durable on return; a crash leaves either the old file or the
/// new one.
///
/// The temporary file has a name that object_store hides from listings (`X#N`).
pub(super) async fn put(path: PathBuf, bytes: Vec<u8>) -> io::Result<()> {
    blocking(move || {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let mut temporary = path.clone().into_os_string();
        let number = FILES_BEGUN.fetch_add(1, Ordering::Relaxed);
        temporary.push(format!("#{}{number:010}", std::process::id()));
        let written = File::create(&temporary).and_then(|mut file| {
            io::Write::write_all(&mut file, &bytes)?;
            file.sync_all()
        });
        if let Err(e) = written.and_then(|()| fs::rename(&temporary, &path)) {
            let _ = fs::remove_file(&temporary);
            return Err(e);
        }
        fsync_folder(folder)
    })
    .await
}

/// Finds files in these folders that [`put`] began and did not finish because its process was killed. `is_target`
/// checks the intended name.
pub(super) async fn unfinished(folders: Vec<PathBuf>, is_target: fn(&str) -> bool) -> io::Result<Vec<PathBuf>> {
    let find = move || {
        let mut found = Vec::new();
        for folder in folders {
            let entries = match fs::read_dir(folder) {
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                let name = entry.file_name();
                let target = name.to_str().and_then(|name| name.rsplit_once('#'));
                // The suffix that `put` adds: the process id and a number of ten digits.
                let is_unfinished = target.is_some_and(|(target, number)| {
                    number.len() > 10 && number.bytes().all(|digit| digit.is_ascii_digit()) && is_target(target)
                });
                if is_unfinished && entry.file_type()?.is_file() {
                    found.push(entry.path());
                }
            }
        }
        found.sort();
        Ok(found)
    };
    blocking(find).await
}

/// Removes files. A missing file is not an error.
pub(super) async fn remove_files(files: Vec<PathBuf>) -> io::Result<()> {
    let remove = move || {
        files.into_iter().try_for_each(|file| match fs::remove_file(file) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        })
    };
    blocking(remove).await
}

fn fsync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        // Network file systems have no fsync for folders: a name is durable once the server has replied.
        Err(e) if matches!(e.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported) => Ok(()),
        synced => synced,
    }
}

pub(super) async fn is_folder(path: PathBuf) -> io::Result<bool> {
    blocking(move || Ok(path.is_dir())).await
}

pub(super) async fn make_folder(path: PathBuf) -> io::Result<()> {
    blocking(move || fs::create_dir_all(path)).await
}

/// Fails if a folder below `root` is a symbolic link.
pub(super) async fn refuse_links(root: PathBuf, names: &'static [&'static str]) -> io::Result<()> {
    blocking(move || nofollow::refuse_links(&root, names)).await
}

/// Removes a file below `root`, if it exists, without following links.
pub(super) async fn remove_file(root: PathBuf, name: String) -> io::Result<()> {
    blocking(move || nofollow::remove_file(&root, &name)).await
}

/// Removes a folder below `root` with its contents, if it exists, without following links.
pub(super) async fn remove_folder(root: PathBuf, name: String) -> io::Result<()> {
    blocking(move || nofollow::remove_folder(&root, &name)).await
}

/// Removes a file, then each of the folders in order if it is empty. Failures are ignored.
pub(super) async fn remove_if_empty(file: Option<PathBuf>, folders: Vec<PathBuf>) {
    let work = move || {
        if let Some(file) = file {
            let _ = fs::remove_file(file);
        }
        for folder in folders {
            let _ = fs::remove_dir(folder);
        }
        Ok::<_, io::Error>(())
    };
    if let Err(e) = blocking(work).await {
        tracing::debug!("empty folders stay: {e}");
    }
}

/// Attempts to lock. [`lock_holder`] takes the lock for a moment when another process checks it, so one failure proves
/// nothing.
const MAX_LOCK_ATTEMPTS: u32 = 3;
const LOCK_RETRY_DELAY: Duration = Duration::from_millis(20);

/// Locks a file, creating it if it is missing, and erases the previous holder's name. Returns `None` if another process
/// holds it.
pub(super) async fn lock(path: PathBuf) -> io::Result<Option<File>> {
    blocking(move || {
        let file = open_lock(&path)?;
        for _ in 0..MAX_LOCK_ATTEMPTS {
            match file.try_lock() {
                Ok(()) => return file.set_len(0).map(|()| Some(file)),
                Err(fs::TryLockError::WouldBlock) => std::thread::sleep(LOCK_RETRY_DELAY),
                Err(fs::TryLockError::Error(e)) => return Err(e),
            }
        }
        Ok(None)
    })
    .await
}

/// Writes the holder's name into a lock file.
pub(super) async fn name_holder(path: PathBuf, holder: String) -> io::Result<()> {
    blocking(move || fs::write(path, holder)).await
}

/// Releases a lock and erases the holder's name.
pub(super) async fn unlock(lock: File) -> io::Result<()> {
    blocking(move || lock.set_len(0)).await
}

/// Does not truncate: the content may belong to another holder.
fn open_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

/// Returns the holder of a lock, or `None` if it is free.
pub(super) async fn lock_holder(path: PathBuf) -> io::Result<Option<String>> {
    blocking(move || {
        let mut file = match File::open(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(None),
            Err(fs::TryLockError::WouldBlock) => {
                let mut holder = String::new();
                io::Read::read_to_string(&mut file, &mut holder)?;
                Ok(Some(holder))
            }
            Err(fs::TryLockError::Error(e)) => Err(e),
        }
    })
    .await
}

/// Takes a shared lock, which makes [`is_unlocked`] return false while the file is open.
pub(super) async fn lock_shared(path: PathBuf) -> io::Result<File> {
    blocking(move || {
        let file = open_lock(&path)?;
        file.lock_shared()?;
        Ok(file)
    })
    .await
}

/// Whether nobody holds a file ([`lock_shared`]) or it does not exist. If nobody does and `remove` is set, removes the
/// file.
pub(super) async fn is_unlocked(path: PathBuf, remove: bool) -> io::Result<bool> {
    blocking(move || {
        let file = match File::options().read(true).write(true).open(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(true),
            opened => opened?,
        };
        match file.try_lock() {
            Ok(()) if remove => fs::remove_file(&path).map(|()| true),
            Ok(()) => Ok(true),
            Err(fs::TryLockError::WouldBlock) => Ok(false),
            Err(fs::TryLockError::Error(e)) => Err(e),
        }
    })
    .await
}

/// Returns the canonical path of a file, relative to the working directory if it is below that, or `None` if it does
/// not exist.
pub(super) async fn existing_file(path: PathBuf) -> Option<PathBuf> {
    let find = move || {
        let file = path.canonicalize()?;
        let here = std::env::current_dir().and_then(|here| here.canonicalize()).ok();
        let short = here.and_then(|here| file.strip_prefix(here).ok().map(Path::to_path_buf));
        Ok::<_, io::Error>(file.is_file().then(|| short.unwrap_or(file)))
    };
    blocking(find).await.ok().flatten()
}

/// Returns the path of `to` relative to `from`, so that the output holds no absolute path. Both must exist.
pub async fn relative(from: PathBuf, to: PathBuf) -> Option<PathBuf> {
    let path = blocking(move || {
        let (from, to) = (from.canonicalize()?, to.canonicalize()?);
        let common = from.components().zip(to.components()).take_while(|(a, b)| a == b).count();
        let up = from.components().skip(common).map(|_| std::path::Component::ParentDir);
        Ok::<_, io::Error>(up.chain(to.components().skip(common)).collect())
    });
    path.await.ok()
}
