//! How much the cache holds, over all processes, and what goes when it is full.
//!
//! Everything that changes the folder is done under one lock (`lock`, which also holds the count), for as long as it takes to write
//! 2 MiB into the page cache. The kernel releases it when its holder dies; of a holder that is stopped nobody waits for long.
//!
//! Of what is full only data sets that no process has open are dropped, the least recently used object first. An epoch asks for
//! everything once in random order, so to drop what was used least recently of the data set that is being read would drop what is still
//! to come: with room for half of it, (1 - ln 2) / 2 = 15 % would be found. Left alone, half is found, and nothing is written in vain.

#![allow(clippy::disallowed_methods, reason = "called through `blocking` where a runtime waits")]

use std::collections::BTreeMap;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::entry::{Entry, bytes_of, table_bytes, units_of};

/// Below the folder that is given: with a number, so that another format gets a folder of its own.
const ROOT: &str = "stillhouse-1";
const LOCK: &str = "lock";
const CLAIMS: &str = "claims";
/// Of a data set: locked by every process that has it open.
const IN_USE: &str = "in-use";
/// How long to wait for a lock that others hold for milliseconds.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// How long what could not be stored is not tried again.
const CLOSED_FOR: Duration = Duration::from_secs(10);
/// A killed process leaves at most one write too much in the count, so counting anew now and then is enough.
const RECOUNT_AFTER: u64 = 60;

/// The folder, and the data set of it that this process reads.
#[derive(Debug)]
pub(crate) struct Room {
    root: PathBuf,
    dataset: PathBuf,
    limit: u64,
    /// Locked as long as this lives.
    _in_use: File,
    /// Until when nothing is stored, after it was full or could not be written.
    closed: Mutex<Option<Instant>>,
}

/// What became of something that was to be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// It is there.
    Yes,
    /// There is no room that may be made.
    Full,
}

impl Room {
    /// Makes the folders for a data set, and sees to it that no more is held than `limit` bytes.
    pub fn open(folder: &Path, dataset: &str, limit: u64) -> io::Result<Self> {
        let root = folder.join(ROOT);
        make_folder(&root.join(CLAIMS))?;
        let dataset = root.join(dataset);
        make_folder(&dataset)?;
        let in_use = open_lock(&dataset.join(IN_USE))?;
        patiently(|| in_use.try_lock_shared())?;
        let room = Self { root, dataset, limit, _in_use: in_use, closed: Mutex::default() };
        // a bound that was lowered since counts at once, and a folder that cannot be written shows
        if let Some(mut count) = room.lock()? {
            if count.bytes > limit {
                count.recount()?;
            }
            room.evict(&mut count, limit, true)?;
            count.write()?;
        }
        Ok(room)
    }

    /// Where the entry of an object lies.
    pub fn entry(&self, name: &str) -> PathBuf {
        self.dataset.join(name)
    }

    /// One of the files that are locked by whoever fetches something.
    pub fn claim(&self, number: u32) -> PathBuf {
        self.root.join(CLAIMS).join(format!("{number:03x}"))
    }

    /// Whether it is worth asking to store something.
    pub fn is_closed(&self) -> bool {
        self.closed.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|until| Instant::now() < until)
    }

    /// Stores nothing for a while.
    pub fn close(&self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + CLOSED_FOR);
    }

    /// Stores whole units of an object of `bytes` bytes, if there is room or room can be made.
    pub fn store(&self, name: &str, bytes: u64, first: u64, data: &[u8]) -> io::Result<Stored> {
        let stored = self.store_units(name, bytes, first, data);
        if !matches!(stored, Ok(Stored::Yes)) {
            self.close();
        }
        stored
    }

    /// Drops what is there of an object, in any version.
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
            Some(entry) => entry.missing(&units)?,
            None => table_bytes(bytes) + data.len() as u64,
        };
        if !self.make_room(&mut count, cost)? {
            count.write()?;
            return Ok(Stored::Full);
        }
        // before the bytes: whoever is killed in between has counted too much, not too little
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

    fn make_room(&self, count: &mut Count, cost: u64) -> io::Result<bool> {
        let fits = |count: &Count| count.bytes.saturating_add(cost) <= self.limit;
        if fits(count) || cost > self.limit {
            return Ok(cost <= self.limit);
        }
        if count.is_old() {
            count.recount()?;
        }
        if !fits(count) {
            // some more than is needed: looking through the folder is no work for every write
            let spare = cost.max(self.limit / 32).min(self.limit);
            self.evict(count, self.limit - spare, false)?;
        }
        Ok(fits(count))
    }

    /// Drops objects, the least recently used first, until no more than `limit` bytes are held: those of data sets that nobody has
    /// open, then the others too if they must go.
    fn evict(&self, count: &mut Count, limit: u64, others_too: bool) -> io::Result<()> {
        if count.bytes <= limit {
            return Ok(());
        }
        let mut locks: BTreeMap<PathBuf, Option<File>> = BTreeMap::new();
        let mut by_use = Vec::new();
        for dataset in folders(&self.root)? {
            let lock = idle(&dataset)?;
            let is_in_use = lock.is_none();
            if !is_in_use || others_too {
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

    /// Drops what is there of other versions of an object than that of this name.
    fn remove_versions(&self, count: &mut Count, name: &str) -> io::Result<()> {
        let object = name.split_once('-').map_or(name, |(object, _)| object);
        for (path, _) in entries(&self.dataset)? {
            let is_version = path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(object));
            if is_version && path != self.entry(name) {
                count.remove(&path)?;
            }
        }
        Ok(())
    }

    /// The count, locked; `None` where somebody does not let go of it.
    fn lock(&self) -> io::Result<Option<Count>> {
        let file = open_lock(&self.root.join(LOCK))?;
        match patiently(|| file.try_lock()) {
            Ok(()) => Count::read(&self.root, file).map(Some),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// Bytes that are held, as they stand in the locked file.
#[derive(Debug)]
struct Count {
    root: PathBuf,
    file: File,
    bytes: u64,
    /// Seconds since 1970.
    recounted: u64,
}

impl Count {
    fn read(root: &Path, file: File) -> io::Result<Self> {
        let mut count = Self { root: root.to_owned(), file, bytes: 0, recounted: 0 };
        let mut written = [0; 20];
        let is_there = count.file.read_exact_at(&mut written, 0).is_ok();
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| written[at + i]));
        (count.bytes, count.recounted) = (number(0), number(8));
        if !is_there || count.written() != written {
            count.recount()?;
        }
        Ok(count)
    }

    fn written(&self) -> [u8; 20] {
        let mut written = [0; 20];
        written[..8].copy_from_slice(&self.bytes.to_le_bytes());
        written[8..16].copy_from_slice(&self.recounted.to_le_bytes());
        let sum = crc32fast::hash(&written[..16]);
        written[16..].copy_from_slice(&sum.to_le_bytes());
        written
    }

    fn write(&self) -> io::Result<()> {
        self.file.write_all_at(&self.written(), 0)
    }

    fn is_old(&self) -> bool {
        seconds().abs_diff(self.recounted) >= RECOUNT_AFTER
    }

    /// Counts what is there. What is no entry goes.
    fn recount(&mut self) -> io::Result<()> {
        self.bytes = 0;
        for dataset in folders(&self.root)? {
            for (path, _) in entries(&dataset)? {
                match Entry::open_any(&path)? {
                    Some(entry) => self.bytes += entry.counted()?,
                    None => remove(&path)?,
                }
            }
        }
        self.recounted = seconds();
        Ok(())
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        let counted = Entry::open_any(path)?.map_or(Ok(0), |entry| entry.counted())?;
        remove(path)?;
        self.bytes = self.bytes.saturating_sub(counted);
        Ok(())
    }
}

fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Opens a file to lock it.
pub(crate) fn open_lock(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Tries to lock until it works or takes too long.
fn patiently(lock: impl Fn() -> Result<(), TryLockError>) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(Duration::from_micros(200));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// The lock of a data set that nobody has open.
fn idle(dataset: &Path) -> io::Result<Option<File>> {
    let file = open_lock(&dataset.join(IN_USE))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

fn is_hash(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

/// The folders of data sets. Nothing else in the folder is ever touched.
fn folders(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for folder in fs::read_dir(root)? {
        let folder = folder?;
        if folder.file_name().to_str().is_some_and(is_hash) && folder.file_type()?.is_dir() {
            found.push(folder.path());
        }
    }
    Ok(found)
}

/// The entries of a data set, and when each was last used.
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

/// The folder of a data set of which nothing is left.
fn remove_dataset(dataset: &Path) -> io::Result<()> {
    remove(&dataset.join(IN_USE))?;
    match fs::remove_dir(dataset) {
        Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::DirectoryNotEmpty) => Err(e),
        _ => Ok(()),
    }
}
