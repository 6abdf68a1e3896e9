//! Detects a full disk of the data folder. Logs once when it is full, and once when it has space again.
//!
//! ```text
//!   a write failed: disk full ──┐                                ┌─► /ready 503, submissions 507, a metric, a log line
//!   less free than the reserve ─┴─► full ────────────────────────┤
//!                                    └─ trial write each second ─┴─► reports of running jobs wait, are stored later
//! ```
//!
//! The file `reserve` beside the database keeps 256 KiB for operations that must work on a full disk: opening the
//! database, and storing a cancel. These remove the file; it is created again when there is space.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stillhouse_pipeline::storage::blocking;

use super::{Service, process};

/// What is known about the free space of a data folder.
#[derive(Debug, Default)]
pub struct DiskSpace(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// A write failed for lack of space, and no trial write has succeeded since.
    write_failed: bool,
    /// Less space is free than `limits.disk_reserve_megabytes`.
    below_reserve: bool,
}

impl State {
    fn is_full(&self) -> bool {
        self.write_failed || self.below_reserve
    }
}

/// The file that reserves space.
#[derive(Debug)]
pub struct ReserveFile(PathBuf);

/// Space for the write-ahead log of a few changes and the shared-memory file of its index (32 KiB).
const RESERVE_BYTES: usize = 256 << 10;

impl ReserveFile {
    /// The reserve of a data folder.
    pub fn in_folder(folder: &Path) -> Self {
        Self(folder.join("reserve"))
    }

    /// Creates the file, if it does not exist.
    ///
    /// # Errors
    /// When there is no space for it.
    #[expect(clippy::disallowed_methods, reason = "called through `blocking`")]
    fn create(&self) -> io::Result<()> {
        if std::fs::metadata(&self.0).is_ok_and(|m| m.len() == RESERVE_BYTES as u64) {
            return Ok(());
        }
        // random bytes: a file system that compresses would reserve no space for zeros
        let mut bytes = vec![0; RESERVE_BYTES];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let written = std::fs::write(&self.0, &bytes).and_then(|()| std::fs::File::open(&self.0)?.sync_all());
        if written.is_err() {
            self.release();
        }
        written
    }

    /// Removes the file; returns whether that freed space.
    #[expect(
        clippy::disallowed_methods,
        reason = "called where the database is written, which waits for the disk as well"
    )]
    pub fn release(&self) -> bool {
        std::fs::remove_file(&self.0).is_ok()
    }
}

/// Interval between two checks of the disk.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The message for users; only the log names the folder.
pub const FULL_MESSAGE: &str = "the disk of the service's data folder is full: submissions are refused until space is free; running jobs continue, \
    and their reports are kept";

impl DiskSpace {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, why: &dyn std::fmt::Display, change: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        let before = state.is_full();
        change(&mut state);
        match (before, state.is_full()) {
            (false, true) => tracing::error!("{FULL_MESSAGE} ({why})"),
            (true, false) => tracing::info!("the disk of the data folder has free space again"),
            _ => {}
        }
    }

    /// Records that a write failed for lack of space.
    pub fn record_full(&self, why: &dyn std::fmt::Display) {
        self.change(why, |state| state.write_failed = true);
    }

    /// Records that a trial write succeeded.
    pub fn record_writable(&self) {
        self.change(&"", |state| state.write_failed = false);
    }

    /// Records the free bytes of the disk; full if fewer than `reserve`.
    pub fn record_free(&self, bytes: u64, reserve: u64) {
        let why = format!("{bytes} bytes are free, less than limits.disk_reserve_megabytes");
        self.change(&why, |state| state.below_reserve = bytes < reserve);
    }

    /// Whether the disk is full.
    pub fn is_full(&self) -> bool {
        self.lock().is_full()
    }

    fn has_failed_write(&self) -> bool {
        self.lock().write_failed
    }
}

/// Checks the disk for as long as the service runs.
pub async fn watch(service: Arc<Service>) {
    let reserve = u64::from(service.config.limits.disk_reserve_megabytes) * 1_000_000;
    let mut interval = tokio::time::interval(CHECK_INTERVAL);
    loop {
        interval.tick().await;
        let data = service.config.data.clone();
        match blocking(move || process::free_bytes(&data)).await {
            Ok(free) => service.store.disk_space.record_free(free, reserve),
            Err(e) => tracing::debug!("cannot read the free space of the data folder's disk: {e}"),
        }
        if service.store.disk_space.has_failed_write() && service.store.try_write().await.is_ok() {
            service.store.disk_space.record_writable();
        }
        if !service.store.disk_space.is_full() {
            let store = Arc::clone(&service.store);
            if let Err(e) = blocking(move || store.reserve.create()).await {
                tracing::debug!("cannot reserve disk space: {e}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_full_while_either_says_so() {
        let disk_space = DiskSpace::default();
        assert!(!disk_space.is_full());
        disk_space.record_full(&"no");
        disk_space.record_free(10, 100);
        disk_space.record_writable();
        assert!(disk_space.is_full());
        disk_space.record_free(100, 100);
        assert!(!disk_space.is_full());
        disk_space.record_full(&"no");
        disk_space.record_free(100, 100);
        assert!(disk_space.is_full() && disk_space.has_failed_write());
        disk_space.record_writable();
        assert!(!disk_space.is_full());
    }
}
