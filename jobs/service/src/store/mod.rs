//! The persistent state of the service: jobs, their events and attempts, and tokens, in one SQLite file.
//!
//! ```text
//!   write(f) ─► the single writing connection ─► transaction ─► commit (fsync) ─► events to the watchers, in order
//!   read(f)  ─► one of a few reading connections, a snapshot each (WAL)
//! ```
//!
//! A change is on the disk before its request is answered (`synchronous = FULL`). Watchers receive the changes of one
//! job in the order of their commits, because they receive each before the next one can commit.
//!
//! Cost: a write is one fsync, some milliseconds; reading a page of jobs takes well below one.

pub(crate) mod attempts;
pub(crate) mod events;
pub(crate) mod jobs;
mod migrations;
pub mod tokens;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags, Transaction, TransactionBehavior, ffi};
use tokio::sync::broadcast;

use super::disk_space::{DiskSpace, ReserveFile};
use super::model::{EventView, JobId, JobState};

/// Name of the database file in the data folder.
pub const FILE: &str = "service.sqlite";
const READER_COUNT: usize = 4;
/// Events that a watcher may lag behind before it must read them from the store.
const BUS_CAPACITY: usize = 4096;
/// Bytes of a trial write: several times what a transaction writes.
const TRIAL_BYTES: usize = 256 << 10;
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

/// Why an operation of the store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// There is no such job.
    #[error("there is no job {0}")]
    NoJob(JobId),
    /// The job is in the wrong state for the operation.
    #[error("the job is {state}; valid: {valid}")]
    WrongState {
        /// The current state.
        state: JobState,
        /// The states that the operation accepts.
        valid: &'static str,
    },
    /// The queue is full.
    #[error("{0}")]
    Full(String),
    /// The idempotency key was used for another request.
    #[error("the idempotency key was already used for a different request")]
    KeyReused,
    /// A newer program wrote the file.
    #[error("{0}")]
    Version(String),
    /// The system returned no random bytes.
    #[error("no random bytes: {0}")]
    Random(#[from] getrandom::Error),
    /// There is no space on the disk.
    #[error("the service's database cannot grow: {0}")]
    DiskFull(#[source] rusqlite::Error),
    /// The file contains pages that SQLite did not write.
    #[error(
        "the service's database ({FILE} in its data folder) is damaged: {0}; stop the service, and replace the file by a backup or by what `sqlite3 {FILE} .recover` restores"
    )]
    Corrupt(String),
    /// SQLite failed for another reason.
    #[error("the service's database: {0}")]
    Sqlite(#[source] rusqlite::Error),
    /// A stored value cannot be read back, or two of them contradict each other.
    #[error("the service's database contradicts itself: {0}")]
    Inconsistent(String),
    /// A thread panicked or was cancelled, or the database is busy.
    #[error("a thread of the service stopped")]
    Stopped,
}

impl From<rusqlite::Error> for StoreError {
    fn from(e: rusqlite::Error) -> Self {
        // an exceeded quota or file size limit appears as an I/O error of the write
        let writes = [ffi::SQLITE_IOERR_WRITE, ffi::SQLITE_IOERR_FSYNC, ffi::SQLITE_IOERR_SHMSIZE];
        let disk_full =
            e.sqlite_error().is_some_and(|e| e.code == ErrorCode::DiskFull || writes.contains(&e.extended_code));
        let damaged = [Some(ErrorCode::DatabaseCorrupt), Some(ErrorCode::NotADatabase)];
        match () {
            () if disk_full => Self::DiskFull(e),
            () if damaged.contains(&e.sqlite_error_code()) => Self::Corrupt(e.to_string()),
            () => Self::Sqlite(e),
        }
    }
}

/// A result of the store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// The open store.
pub struct Store {
    writer: Mutex<Connection>,
    readers: Mutex<Vec<Connection>>,
    reader_returned: Condvar,
    bus: broadcast::Sender<Arc<EventView>>,
    /// Whether the disk has space.
    pub disk_space: DiskSpace,
    /// Reserved space for operations that must work on a full disk.
    pub reserve: ReserveFile,
    /// Whether a damaged page was found.
    corrupt: AtomicBool,
}

impl Store {
    /// Opens the store of a data folder; creates or migrates it if needed.
    ///
    /// # Errors
    /// When the file cannot be opened, is damaged, or was written by a newer program.
    pub fn open(folder: &Path) -> Result<Arc<Self>> {
        match Self::open_once(folder) {
            Err(StoreError::DiskFull(_)) if ReserveFile::in_folder(folder).release() => Self::open_once(folder),
            opened => opened,
        }
    }

    fn open_once(folder: &Path) -> Result<Arc<Self>> {
        let path = folder.join(FILE);
        let mut writer = connect(&path, OpenFlags::default())?;
        writer.pragma_update(None, "journal_mode", "wal")?;
        check_integrity(&writer)?;
        migrations::run(&mut writer)?;
        let read_only = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let readers = (0..READER_COUNT).map(|_| connect(&path, read_only)).collect::<Result<Vec<_>>>()?;
        Ok(Arc::new(Self {
            writer: Mutex::new(writer),
            readers: Mutex::new(readers),
            reader_returned: Condvar::new(),
            bus: broadcast::channel(BUS_CAPACITY).0,
            disk_space: DiskSpace::default(),
            reserve: ReserveFile::in_folder(folder),
            corrupt: AtomicBool::new(false),
        }))
    }

    /// Whether a damaged page was found since the store was opened. No answer of the store is reliable then.
    pub fn is_corrupt(&self) -> bool {
        self.corrupt.load(Ordering::Relaxed)
    }

    fn record_corruption<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(StoreError::Corrupt(e)) = &result
            && !self.corrupt.swap(true, Ordering::Relaxed)
        {
            tracing::error!("{}", StoreError::Corrupt(e.clone()));
        }
        result
    }

    /// Writes the write-ahead log into the database file, so that a copy of that file alone is complete.
    ///
    /// # Errors
    /// SQLite's errors.
    pub fn checkpoint(&self) -> Result<()> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let busy: bool = writer.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
        if busy { Err(StoreError::Stopped) } else { Ok(()) }
    }

    /// Runs `f` in one transaction; sends its events to the watchers after the commit.
    ///
    /// # Errors
    /// The error of `f`, after which nothing has changed, or SQLite's.
    pub async fn write<T: Send + 'static>(
        self: &Arc<Self>,
        f: impl FnOnce(&Transaction<'_>, &mut Vec<EventView>) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = Arc::clone(self);
        tokio::task::spawn_blocking(move || store.write_blocking(f)).await.map_err(|_| StoreError::Stopped)?
    }

    /// [`Store::write`] on the current thread.
    ///
    /// # Errors
    /// As [`Store::write`].
    pub fn write_blocking<T>(&self, f: impl FnOnce(&Transaction<'_>, &mut Vec<EventView>) -> Result<T>) -> Result<T> {
        let written = self.record_corruption(self.transact(f));
        if let Err(StoreError::DiskFull(e)) = &written {
            self.disk_space.record_full(e);
        }
        written
    }

    fn transact<T>(&self, f: impl FnOnce(&Transaction<'_>, &mut Vec<EventView>) -> Result<T>) -> Result<T> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let mut events = Vec::new();
        let value = f(&transaction, &mut events)?;
        transaction.commit()?;
        for event in events {
            // an error only means that there are no watchers
            let _ = self.bus.send(Arc::new(event));
        }
        Ok(value)
    }

    /// Writes more than an event takes, and removes it again.
    ///
    /// # Errors
    /// When there is no space for it.
    pub async fn try_write(self: &Arc<Self>) -> Result<()> {
        const REMOVE: &str = "DROP TABLE IF EXISTS trial";
        // a transaction of its own: SQLite never writes rows that are removed before the commit
        let keep = format!("{REMOVE}; CREATE TABLE trial AS SELECT zeroblob({TRIAL_BYTES}) AS bytes");
        self.write(move |t, _| Ok(t.execute_batch(&keep)?)).await?;
        self.write(|t, _| Ok(t.execute_batch(REMOVE)?)).await
    }

    /// Runs a query on a reading connection.
    ///
    /// # Errors
    /// The error of `f`, or SQLite's.
    pub async fn read<T: Send + 'static>(
        self: &Arc<Self>,
        f: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let store = Arc::clone(self);
        tokio::task::spawn_blocking(move || store.read_blocking(f)).await.map_err(|_| StoreError::Stopped)?
    }

    /// [`Store::read`] on the current thread.
    ///
    /// # Errors
    /// As [`Store::read`].
    pub fn read_blocking<T>(&self, f: impl FnOnce(&Connection) -> Result<T>) -> Result<T> {
        let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
        let reader = loop {
            match readers.pop() {
                Some(reader) => break reader,
                None => readers = self.reader_returned.wait(readers).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(readers);
        let reader_guard = ReaderGuard { store: self, reader: Some(reader) };
        match &reader_guard.reader {
            Some(reader) => self.record_corruption(f(reader)),
            None => Err(StoreError::Stopped),
        }
    }

    /// Receives all later events.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<EventView>> {
        self.bus.subscribe()
    }

    /// Sends an event to watchers without storing it.
    pub fn publish(&self, event: EventView) {
        let _ = self.bus.send(Arc::new(event));
    }
}

/// A borrowed reading connection, returned even after a panic.
struct ReaderGuard<'a> {
    store: &'a Store,
    reader: Option<Connection>,
}

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        if let Some(reader) = self.reader.take() {
            self.store.readers.lock().unwrap_or_else(PoisonError::into_inner).push(reader);
            self.store.reader_returned.notify_one();
        }
    }
}

fn connect(path: &Path, flags: OpenFlags) -> Result<Connection> {
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.pragma_update(None, "synchronous", "full")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    // shrinks the write-ahead log after readers made it grow
    connection.pragma_update(None, "journal_size_limit", 64 << 20)?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

/// Checks every page; reads a few hundred megabytes a second.
fn check_integrity(connection: &Connection) -> Result<()> {
    let found: String = connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    if found == "ok" { Ok(()) } else { Err(StoreError::Corrupt(found)) }
}

fn inconsistent(what: impl std::fmt::Display) -> StoreError {
    StoreError::Inconsistent(what.to_string())
}

#[cfg(test)]
pub(crate) mod tests;
