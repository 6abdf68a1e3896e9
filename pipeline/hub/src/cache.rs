//! The cache on disk, in the layout of Python's `huggingface_hub`.
//!
//! ```text
//!   HF_HUB_CACHE/
//!     models--org--name/
//!       blobs/<etag>                     the bytes of a file, named by the hub's hash of it
//!       blobs/<etag>.incomplete          a partial download of it
//!       snapshots/<commit>/config.json   ─► ../../blobs/<etag>
//!       refs/main                        the commit that a branch or tag last resolved to
//!       .no_exist/<commit>/<file>        marks a file that the commit is known not to have
//!     .locks/models--org--name/<etag>.lock
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::Fetched;
use super::reference::HubRef;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_schemas::hub_names::is_commit;

/// Interval between attempts to take a lock that another process holds.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Interval between log messages while waiting for a lock.
const LOCK_NOTICE_INTERVAL: Duration = Duration::from_secs(30);

/// One repository in the cache.
#[derive(Debug)]
pub(super) struct CachedRepo {
    root: PathBuf,
    locks: PathBuf,
}

/// The exclusive right to write one blob; released when dropped and when the process ends.
#[derive(Debug)]
pub(super) struct BlobLock(#[expect(dead_code, reason = "held for its lock")] Option<File>);

impl CachedRepo {
    pub(super) fn new(cache: &Path, repo: &str) -> Self {
        let folder = format!("models--{}", repo.replace('/', "--"));
        Self { root: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }

    pub(super) fn snapshot_path(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    pub(super) fn file_path(&self, commit: &str, name: &str) -> PathBuf {
        self.snapshot_path(commit).join(name)
    }

    pub(super) fn blob_path(&self, etag: &str) -> PathBuf {
        self.root.join("blobs").join(etag)
    }

    /// Whether the file exists. A link to a deleted blob does not count.
    pub(super) fn has_file(&self, commit: &str, name: &str) -> bool {
        self.file_path(commit, name).is_file()
    }

    pub(super) fn is_known_absent(&self, commit: &str, name: &str) -> bool {
        self.root.join(".no_exist").join(commit).join(name).is_file()
    }

    pub(super) fn to_fetched(&self, commit: String, reference: &HubRef) -> Fetched {
        let snapshot = self.snapshot_path(&commit);
        Fetched { path: reference.file().map_or_else(|| snapshot.clone(), |file| snapshot.join(file)), commit }
    }

    /// Returns the commit of a revision as far as the cache knows it.
    pub(super) fn cached_commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.root.join("refs").join(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Records the commit of a branch or tag. If the cache is read-only, logs a warning and goes on.
    pub(super) fn set_ref(&self, revision: &str, commit: &str) {
        if self.cached_commit(revision).as_deref() == Some(commit) {
            return;
        }
        let path = self.root.join("refs").join(revision);
        if let Err(error) = write_atomically(&path, |temporary| fs::write(temporary, commit)) {
            tracing::warn!(path = %path.display(), %error, "cannot note the commit of the revision");
        }
    }

    /// Records files that the commit lacks, so that later calls need not ask the hub for them.
    pub(super) fn record_absent(&self, commit: &str, names: &[&str]) {
        for name in names.iter().filter(|name| !self.is_known_absent(commit, name)) {
            let path = self.root.join(".no_exist").join(commit).join(name);
            if let Err(error) = write_atomically(&path, |temporary| File::create(temporary).map(drop)) {
                tracing::debug!(path = %path.display(), %error, "cannot note that the file does not exist");
            }
        }
    }

    /// Waits until no other process writes the blob, and locks it.
    pub(super) fn lock(&self, etag: &str) -> Result<BlobLock> {
        let path = self.locks.join(format!("{etag}.lock"));
        let context = || format!("cannot lock {}", path.display());
        fs::create_dir_all(&self.locks).map_err(disk_error(context()))?;
        let mut last_notice: Option<Instant> = None;
        loop {
            let file = File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .map_err(disk_error(context()))?;
            match file.try_lock() {
                Ok(()) if is_still_at(&file, &path) => return Ok(BlobLock(Some(file))),
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    if last_notice.is_none_or(|at| at.elapsed() > LOCK_NOTICE_INTERVAL) {
                        tracing::info!(lock = %path.display(), "waiting for another process that downloads the same file");
                        last_notice = Some(Instant::now());
                    }
                    thread::sleep(LOCK_POLL_INTERVAL);
                }
                Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {
                    tracing::warn!(lock = %path.display(), "the file system has no locks: do not download twice at once");
                    return Ok(BlobLock(None));
                }
                Err(TryLockError::Error(error)) => return Err(disk_error(context())(error)),
            }
        }
    }

    /// Makes a blob visible as a file of a commit, by a symlink or else a copy.
    pub(super) fn link(&self, etag: &str, commit: &str, name: &str) -> Result<()> {
        let path = self.file_path(commit, name);
        if path.is_file() {
            return Ok(());
        }
        let to_root = "../".repeat(2 + name.matches('/').count());
        write_atomically(&path, |temporary| {
            symlink(&format!("{to_root}blobs/{etag}"), temporary)
                .or_else(|_| fs::copy(self.blob_path(etag), temporary).map(drop))
        })
        .map_err(disk_error(format!("cannot write {}", path.display())))
    }
}

/// Returns a closure for `map_err` that reports a failure of the local disk as retryable.
pub(super) fn disk_error(context: String) -> impl FnOnce(io::Error) -> PipelineError {
    move |error| PipelineError::caused(ErrorKind::Model, context, error).retryable()
}

/// Writes a file atomically: calls `write` with a temporary path, then renames it to `path`.
fn write_atomically(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let unique = format!("{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = path.with_added_extension(unique);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    write(&temporary).and_then(|()| fs::rename(&temporary, path)).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

/// Whether the locked file is still the one at `path`. Python deletes its lock files, and a lock on a deleted file
/// excludes nobody.
#[cfg(unix)]
fn is_still_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(locked), Ok(current)) => (locked.dev(), locked.ino()) == (current.dev(), current.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn is_still_at(_file: &File, _path: &Path) -> bool {
    true
}

#[cfg(unix)]
fn symlink(target: &str, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

#[cfg(not(unix))]
fn symlink(_target: &str, _at: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
