//! Whether there is room in the data folder: told once when there is none, and once when there is some again.
//!
//! ```text
//!   a write that found no room ─┐                              ┌─► /ready 503, submissions 507, a figure, one line of the log
//!   less free than the reserve ─┴─► full ──────────────────────┤
//!                                    └─ a trial write a second ─┴─► what running jobs report waits, and is stored afterwards
//! ```
//!
//! The file `reserve` beside the database keeps 256 KiB for what must work on a full disk: opening the database, and storing a cancel. These
//! remove it; it is made again once there is room.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use stillhouse_pipeline::storage::blocking;

use super::{Service, process};

/// What is known of the room in a data folder.
#[derive(Debug, Default)]
pub struct Room(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// A write found no room, and no trial has found any since.
    refused: bool,
    /// Less is free than is to be left.
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

/// The log of a few changes, and what is shared about it between connections (32 KiB).
const RESERVE_BYTES: usize = 256 << 10;

impl Reserve {
    /// The reserve of a data folder.
    pub fn of(folder: &Path) -> Self {
        Self(folder.join("reserve"))
    }

    /// Makes the file, if it is not there.
    ///
    /// # Errors
    /// When there is no room for it.
    #[expect(clippy::disallowed_methods, reason = "called through `blocking`")]
    fn make(&self) -> io::Result<()> {
        if std::fs::metadata(&self.0).is_ok_and(|m| m.len() == RESERVE_BYTES as u64) {
            return Ok(());
        }
        // a file system that compresses would keep no room for zeros
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

/// How often it is looked whether there is room again.
const LOOK: Duration = Duration::from_secs(1);

/// What everybody is told; where the folder is stands in the log.
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

    /// A write found no room.
    pub fn refuse(&self, why: &dyn std::fmt::Display) {
        self.change(why, |known| known.refused = true);
    }

    /// A trial write found some.
    pub fn accept(&self) {
        self.change(&"", |known| known.refused = false);
    }

    /// So much is free of the disk, of which so much is to be left.
    pub fn free(&self, bytes: u64, reserve: u64) {
        let why = format!("{bytes} bytes are free, less than limits.disk_reserve_megabytes");
        self.change(&why, |known| known.short = bytes < reserve);
    }

    /// Whether there is none.
    pub fn is_full(&self) -> bool {
        self.lock().is_full()
    }

    fn was_refused(&self) -> bool {
        self.lock().refused
    }
}

/// Looks whether there is room, for as long as the service runs.
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
