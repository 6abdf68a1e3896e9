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
pub struct Room(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// A write failed for lack of space, and no trial write has succeeded since.
    refused: bool,
    /// Less space is free than `limits.disk_reserve_megabytes`.
    short: bool,
}

impl Known {
    fn is_full(&self) -> bool {
        self.refused || self.short
    }
}

/// The file that reserves space.
#[derive(Debug)]
pub struct Reserve(PathBuf);

/// Space for the write-ahead log of a few changes and the shared-memory file of its index (32 KiB).
const RESERVE_BYTES: usize = 256 << 10;

impl Reserve {
    /// The reserve of a data folder.
    pub fn of(folder: &Path) -> Self {
        Self(folder.join("reserve"))
    }

    /// Creates the file, if it does not exist.
    ///
    /// # Errors
    /// When there is no space for it.
    #[expect(clippy::disallowed_methods, reason = "called through `blocking`")]
    fn make(&self) -> io::Result<()> {
        if std::fs::metadata(&self.0).is_ok_and(|m| m.len() == RESERVE_BYTES as u64) {
            return Ok(());
        }
        // random bytes: a file system that compresses would reserve no space for zeros
        let mut bytes = vec![0; RESERVE_BYTES];
        getrandom::fill(&mut bytes).map_err(io::Error::other)?;
        let written = std::fs::write(&self.0, &bytes).and_then(|()| std::fs::File::open(&self.0)?.sync_all());
        if written.is_err() {
            self.give();
        }
        written
    }

    /// Removes the file; returns whether that freed space.
    #[expect(
        clippy::disallowed_methods,
        reason = "called where the database is written, which waits for the disk as well"
    )]
    pub fn give(&self) -> bool {
        std::fs::remove_file(&self.0).is_ok()
    }
}

/// Interval between two checks of the disk.
const LOOK: Duration = Duration::from_secs(1);

/// The message for users; only the log names the folder.
pub const FULL: &str = "the disk of the service's data folder is full: submissions are refused until there is room; running jobs go on, and what \
    they report is kept";

impl Room {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, why: &dyn std::fmt::Display, change: impl FnOnce(&mut Known)) {
        let mut known = self.lock();
        let before = known.is_full();
        change(&mut known);
        match (before, known.is_full()) {
            (false, true) => tracing::error!("{FULL} ({why})"),
            (true, false) => tracing::info!("there is room in the data folder again"),
            _ => {}
        }
    }

    /// Records that a write failed for lack of space.
    pub fn refuse(&self, why: &dyn std::fmt::Display) {
        self.change(why, |known| known.refused = true);
    }

    /// Records that a trial write succeeded.
    pub fn accept(&self) {
        self.change(&"", |known| known.refused = false);
    }

    /// Records the free bytes of the disk; full if fewer than `reserve`.
    pub fn free(&self, bytes: u64, reserve: u64) {
        let why = format!("{bytes} bytes are free, less than limits.disk_reserve_megabytes");
        self.change(&why, |known| known.short = bytes < reserve);
    }

    /// Whether the disk is full.
    pub fn is_full(&self) -> bool {
        self.lock().is_full()
    }

    fn was_refused(&self) -> bool {
        self.lock().refused
    }
}

/// Checks the disk for as long as the service runs.
pub async fn watch(service: Arc<Service>) {
    let reserve = u64::from(service.config.limits.disk_reserve_megabytes) * 1_000_000;
    let mut looks = tokio::time::interval(LOOK);
    loop {
        looks.tick().await;
        let data = service.config.data.clone();
        match blocking(move || process::free_bytes(&data)).await {
            Ok(free) => service.store.room.free(free, reserve),
            Err(e) => tracing::debug!("the disk of the data folder: {e}"),
        }
        if service.store.room.was_refused() && service.store.try_room().await.is_ok() {
            service.store.room.accept();
        }
        if !service.store.room.is_full() {
            let store = Arc::clone(&service.store);
            if let Err(e) = blocking(move || store.reserve.make()).await {
                tracing::debug!("no room is kept: {e}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_full_while_either_says_so() {
        let room = Room::default();
        assert!(!room.is_full());
        room.refuse(&"no");
        room.free(10, 100);
        room.accept();
        assert!(room.is_full());
        room.free(100, 100);
        assert!(!room.is_full());
        room.refuse(&"no");
        room.free(100, 100);
        assert!(room.is_full() && room.was_refused());
        room.accept();
        assert!(!room.is_full());
    }
}
