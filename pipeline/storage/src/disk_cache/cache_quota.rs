//! The size limit of the cache, shared by all processes, and eviction.
//!
//! Every change to the folder happens under one file lock (`lock`, which also stores the byte count). A process holds
//! it for no longer than writing 2 MiB into the page cache takes. The kernel releases the lock when its holder dies. If
//! the holder is stopped, others wait only briefly.
//!
//! A full cache evicts only data sets that no process has open, the least recently used object first. An epoch reads
//! every object once, in random order. LRU eviction within the data set being read would therefore drop data that is
//! still needed: with space for half of the data set, (1 - ln 2) / 2 = 15 % of reads would hit. Without eviction, half
//! of them hit, and no write is wasted.

#![allow(clippy::disallowed_methods, reason = "called through `blocking` where a runtime waits")]

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::entry::{Entry, bytes_of, table_bytes, units_of};

/// The folder below the configured one. The number is the format version, so that another format gets its own folder.
const ROOT_FOLDER: &str = "stillhouse-1";
const LOCK_FILE: &str = "lock";
const CLAIMS_FOLDER: &str = "claims";
/// The lock file of a data set, held by every process that has the data set open.
const IN_USE_FILE: &str = "in-use";
/// Timeout for a lock that others hold for milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
/// Time without further attempts to store, after one failed.
const SUSPENSION: Duration = Duration::from_secs(10);
/// Seconds after which a full cache is counted again. A killed process leaves at most one write too many in the count,
/// so occasional recounts suffice.
const RECOUNT_INTERVAL_SECONDS: u64 = 60;

/// The cache folder, and the data set in it that this process reads.
#[derive(Debug)]
pub(crate) struct CacheFolder {
    root: PathBuf,
    dataset: PathBuf,
    limit: u64,
    /// Keeps the data set locked while this value lives.
    _in_use: File,
    /// Nothing is stored until this time, after the cache was full or not writable.
    suspended_until: Mutex<Option<Instant>>,
}

/// Result of an attempt to store units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// The units are stored.
    Yes,
    /// The cache is full, and nothing may be evicted.
    Full,
}

impl CacheFolder {
    /// Creates the folders of a data set, and evicts entries until the cache holds at most `limit` bytes.
    pub fn open(folder: &Path, dataset: &str, limit: u64) -> io::Result<Self> {
        let root = folder.join(ROOT_FOLDER);
        make_folder(&root.join(CLAIMS_FOLDER))?;
        let dataset = root.join(dataset);
        make_folder(&dataset)?;
        let in_use = open_lock(&dataset.join(IN_USE_FILE))?;
        lock_with_timeout(|| in_use.try_lock_shared())?;
        let cache = Self { root, dataset, limit, _in_use: in_use, suspended_until: Mutex::default() };
        // applies a lowered limit at once, and detects a folder that is not writable
        if let Some(mut count) = cache.lock()? {
            if count.bytes > limit {
                count.recount()?;
            }
            cache.evict(&mut count, limit, true)?;
            count.write()?;
        }
        Ok(cache)
    }

    /// Path of the entry with this name.
    pub fn entry(&self, name: &str) -> PathBuf {
        self.dataset.join(name)
    }

    /// Path of one of the lock files that serialize fetches.
    pub fn claim(&self, number: u32) -> PathBuf {
        self.root.join(CLAIMS_FOLDER).join(format!("{number:03x}"))
    }

    /// Whether attempts to store are suspended.
    pub fn is_suspended(&self) -> bool {
        self.suspended_until.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| Instant::now() < until)
    }

    /// Suspends attempts to store for a while.
    pub fn suspend(&self) {
        *self.suspended_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + SUSPENSION);
    }

    /// Stores whole units of an object of `bytes` bytes, beginning with unit `first`, if they fit or eviction can make
    /// space.
    pub fn store(&self, name: &str, bytes: u64, first: u64, data: &[u8]) -> io::Result<Stored> {
        let stored = self.store_units(name, bytes, first, data);
        if !matches!(stored, Ok(Stored::Yes)) {
            self.suspend();
        }
        stored
    }

    /// Removes the entries of all versions of an object.
    pub fn remove_object(&self, object: &str) -> io::Result<()> {
        let Some(mut count) = self.lock()? else { return Ok(()) };
        self.remove_versions(&mut count, object)?;
        count.write()
    }

    fn store_units(&self, name: &str, bytes: u64, first: u64, data: &[u8]) -> io::Result<Stored> {
        let Some(mut count) = self.lock()? else { return Ok(Stored::Full) };
        let path = self.entry(name);
        let start = bytes_of(&(first..first + 1), bytes).start;
        let units = units_of(&(start..start + data.len() as u64));
        let entry = Entry::open(&path, bytes)?;
        if entry.is_none() {
            self.remove_versions(&mut count, name)?;
        }
        let cost = match &entry {
            Some(entry) => entry.missing_bytes(&units)?,
            None => table_bytes(bytes) + data.len() as u64,
        };
        if !self.evict_to_fit(&mut count, cost)? {
            count.write()?;
            return Ok(Stored::Full);
        }
        // counted before the write: a process killed in between leaves a count that is too high, never too low
        count.bytes += cost;
        count.write()?;
        let entry = match entry {
            Some(entry) => entry,
            None => {
                make_folder(&self.dataset)?;
                Entry::create(&path, bytes)?
            }
        };
        entry.write(first, data)?;
        Ok(Stored::Yes)
    }

    fn evict_to_fit(&self, count: &mut ByteCount, cost: u64) -> io::Result<bool> {
        let fits = |count: &ByteCount| count.bytes.saturating_add(cost) <= self.limit;
        if fits(count) || cost > self.limit {
            return Ok(cost <= self.limit);
        }
        if count.is_old() {
            count.recount()?;
        }
        if !fits(count) {
            // evict more than needed, since scanning the folder for every write would be slow
            let spare = cost.max(self.limit / 32).min(self.limit);
            self.evict(count, self.limit - spare, false)?;
        }
        Ok(fits(count))
    }

    /// Evicts objects, the least recently used first, until the cache holds at most `limit` bytes: first those of data
    /// sets that no process has open, then, with `include_in_use`, those in use.
    fn evict(&self, count: &mut ByteCount, limit: u64, include_in_use: bool) -> io::Result<()> {
        if count.bytes <= limit {
            return Ok(());
        }
        let mut locks: BTreeMap<PathBuf, Option<File>> = BTreeMap::new();
        let mut by_use = Vec::new();
        for dataset in dataset_folders(&self.root)? {
            let lock = lock_if_unused(&dataset)?;
            let is_in_use = lock.is_none();
            if !is_in_use || include_in_use {
                by_use.extend(entries(&dataset)?.into_iter().map(|(path, used)| (is_in_use, used, path)));
                locks.insert(dataset, lock);
            }
        }
        by_use.sort();
        for (_, _, path) in by_use {
            if count.bytes <= limit {
                break;
            }
            count.remove(&path)?;
        }
        for (dataset, _lock) in locks.iter().filter(|(_, lock)| lock.is_some()) {
            if entries(dataset)?.is_empty() {
                remove_dataset(dataset)?;
            }
        }
        Ok(())
    }

    /// Removes the entries of an object for all versions but the one with this name.
    fn remove_versions(&self, count: &mut ByteCount, name: &str) -> io::Result<()> {
        let object = name.split_once('-').map_or(name, |(object, _)| object);
        for (path, _) in entries(&self.dataset)? {
            let is_version = path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(object));
            if is_version && path != self.entry(name) {
                count.remove(&path)?;
            }
        }
        Ok(())
    }

    /// Locks and reads the count; `None` if another process holds the lock for too long.
    fn lock(&self) -> io::Result<Option<ByteCount>> {
        let file = open_lock(&self.root.join(LOCK_FILE))?;
        match lock_with_timeout(|| file.try_lock()) {
            Ok(()) => ByteCount::read(&self.root, file).map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// The byte count of the cache, stored in the locked file.
#[derive(Debug)]
struct ByteCount {
    root: PathBuf,
    file: File,
    bytes: u64,
    /// Time of the last recount, in seconds since 1970.
    recounted: u64,
}

impl ByteCount {
    fn read(root: &Path, file: File) -> io::Result<Self> {
        let mut count = Self { root: root.to_owned(), file, bytes: 0, recounted: 0 };
        let mut written = [0; 20];
        let is_readable = count.file.read_exact_at(&mut written, 0).is_ok();
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| written[at + i]));
        (count.bytes, count.recounted) = (number(0), number(8));
        if !is_readable || count.encoded() != written {
            count.recount()?;
        }
        Ok(count)
    }

    fn encoded(&self) -> [u8; 20] {
        let mut written = [0; 20];
        written[..8].copy_from_slice(&self.bytes.to_le_bytes());
        written[8..16].copy_from_slice(&self.recounted.to_le_bytes());
        let sum = crc32fast::hash(&written[..16]);
        written[16..].copy_from_slice(&sum.to_le_bytes());
        written
    }

    fn write(&self) -> io::Result<()> {
        self.file.write_all_at(&self.encoded(), 0)
    }

    fn is_old(&self) -> bool {
        now_seconds().abs_diff(self.recounted) >= RECOUNT_INTERVAL_SECONDS
    }

    /// Recounts the bytes of all entries. Removes files that are not valid entries.
    fn recount(&mut self) -> io::Result<()> {
        self.bytes = 0;
        for dataset in dataset_folders(&self.root)? {
            for (path, _) in entries(&dataset)? {
                match Entry::open_any(&path)? {
                    Some(entry) => self.bytes += entry.counted_bytes()?,
                    None => remove(&path)?,
                }
            }
        }
        self.recounted = now_seconds();
        Ok(())
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        let counted = Entry::open_any(path)?.map_or(Ok(0), |entry| entry.counted_bytes())?;
        remove(path)?;
        self.bytes = self.bytes.saturating_sub(counted);
        Ok(())
    }
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens a lock file, creating it if needed.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Retries a lock until it succeeds or the timeout passes.
fn lock_with_timeout(try_lock: impl Fn() -> Result<(), TryLockError>) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_TIMEOUT => {
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Locks a data set that no process has open; `None` if one has.
fn lock_if_unused(dataset: &Path) -> io::Result<Option<File>> {
    let file = open_lock(&dataset.join(IN_USE_FILE))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

fn is_hash(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The folders of data sets. Other content of the cache folder is never touched.
fn dataset_folders(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in fs::read_dir(root)? {
        let folder = folder?;
        if folder.file_name().to_str().is_some_and(is_hash) && folder.file_type()?.is_dir() {
            found.push(folder.path());
        }
    }
    Ok(found)
}

/// The entries of a data set, with the time of their last use.
fn entries(dataset: &Path) -> io::Result<Vec<(PathBuf, SystemTime)>> {
    let listing = match fs::read_dir(dataset) {
        Ok(listing) => listing,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e),
    };
    let mut found = Vec::new();
    for file in listing {
        let file = file?;
        let is_entry = |name: &str| name.split_once('-').is_some_and(|(object, of)| is_hash(object) && is_hash(of));
        if file.file_name().to_str().is_some_and(is_entry) {
            found.push((file.path(), file.metadata()?.modified()?));
        }
    }
    Ok(found)
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Removes the folder of a data set without entries.
fn remove_dataset(dataset: &Path) -> io::Result<()> {
    remove(&dataset.join(IN_USE_FILE))?;
    match fs::remove_dir(dataset) {
        Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => Err(e),
        _ => Ok(()),
    }
}
