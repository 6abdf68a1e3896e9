//! Tests the disk cache over an in-memory store that counts requests. Two caches of one folder stand for two processes:
//! they share only files and file locks.

use std::fs;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};
use proptest::prelude::*;
use tempfile::TempDir;

use super::counting_store::{CountingStore, Fault};
use crate::disk_cache::FETCH_UNITS;
use crate::disk_cache::entry::{self, Entry};
use crate::{DiskCache, DiskCacheOptions};

/// Bytes to which requests are rounded.
const FETCH_BYTES: u64 = FETCH_UNITS * entry::UNIT_BYTES;
const LARGE_LIMIT: u64 = 1 << 40;

struct Fixture {
    store: Arc<CountingStore>,
    folder: TempDir,
}

/// A data set as opened in one process.
struct Opened {
    cache: Arc<DiskCache>,
    store: Arc<dyn ObjectStore>,
}

fn content(bytes: u64, seed: u64) -> Bytes {
    (0..bytes).map(|i| (i.wrapping_mul(i + seed) % 251) as u8).collect()
}

fn key() -> Path {
    Path::from("data/a.parquet")
}

impl Fixture {
    fn new() -> Self {
        Self { store: Arc::new(CountingStore::new(InMemory::new())), folder: tempfile::tempdir().unwrap() }
    }

    async fn with(bytes: u64) -> (Self, Bytes) {
        let fixture = Self::new();
        let content = content(bytes, 1);
        fixture.put(&key(), &content).await;
        (fixture, content)
    }

    async fn put(&self, key: &Path, content: &Bytes) {
        self.store.put(key, content.clone().into()).await.unwrap();
    }

    fn options(&self, bytes: u64) -> DiskCacheOptions {
        DiskCacheOptions { folder: self.folder.path().join("cache"), bytes }
    }

    fn open_as(&self, dataset: &str, bytes: u64) -> Opened {
        let cache = DiskCache::open(&self.options(bytes), dataset).unwrap();
        let store = cache.wrap(self.store.clone(), &format!("s3://b/{dataset}"));
        Opened { cache, store }
    }

    fn open(&self) -> Opened {
        self.open_as("dataset", LARGE_LIMIT)
    }

    /// The entry files, in any order.
    fn entries(&self) -> Vec<PathBuf> {
        let root = self.folder.path().join("cache/stillhouse-1");
        let folders = fs::read_dir(root).unwrap().map(|f| f.unwrap().path()).filter(|f| !f.ends_with("claims"));
        let files = folders.filter(|f| f.is_dir()).flat_map(|f| fs::read_dir(f).unwrap().map(|f| f.unwrap().path()));
        files.filter(|f| !f.ends_with("in-use")).collect()
    }

    /// Bytes in the folder, counted from the entries themselves.
    fn stored_bytes(&self) -> u64 {
        self.entries().iter().map(|path| Entry::open_any(path).unwrap().unwrap().counted_bytes().unwrap()).sum()
    }
}

impl Opened {
    async fn read(&self, range: Range<u64>) -> Bytes {
        self.store.get_range(&key(), range).await.unwrap()
    }
}

#[tokio::test]
async fn what_was_read_is_not_asked_for_again() {
    let bytes = FETCH_BYTES * 20 + 1234;
    let (fixture, content) = Fixture::with(bytes).await;
    let opened = fixture.open();
    for _ in 0..2 {
        let ranges = [5..17, FETCH_BYTES - 1..3 * FETCH_BYTES + 1, bytes - 10..bytes, 5..17];
        let found = opened.store.get_ranges(&key(), &ranges).await.unwrap();
        for (range, found) in ranges.iter().zip(found) {
            assert_eq!(found, content.slice(range.start as usize..range.end as usize), "{range:?}");
        }
    }
    assert_eq!((fixture.store.heads(), fixture.store.gets()), (1, 2), "units 0–3 are one request, the last is another");
    assert_eq!(fixture.store.bytes(), 4 * FETCH_BYTES + 1234);

    // another process only asks for the version
    assert_eq!(fixture.open().read(0..FETCH_BYTES).await, content.slice(..FETCH_BYTES as usize));
    assert_eq!((fixture.store.heads(), fixture.store.gets()), (2, 2));
    // whole objects pass through
    let whole = opened.store.get(&key()).await.unwrap().bytes().await.unwrap();
    assert_eq!((whole, fixture.store.gets()), (content, 3));
    assert!(opened.cache.take_warning().is_none());
}

#[tokio::test]
async fn nobody_else_may_look_into_it_and_names_report_nothing() {
    let (fixture, _) = Fixture::with(100).await;
    fixture.open_as("bucket/PRIVATE", LARGE_LIMIT).read(0..100).await;
    let mut folders = vec![fixture.folder.path().join("cache")];
    while let Some(path) = folders.pop() {
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}", path.display());
        assert!(!path.display().to_string().contains("PRIVATE") && !path.display().to_string().contains("parquet"));
        if path.is_dir() {
            folders.extend(fs::read_dir(&path).unwrap().map(|f| f.unwrap().path()));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn processes_that_ask_at_once_fetch_once() {
    let bytes = FETCH_BYTES * 32;
    let (fixture, content) = Fixture::with(bytes).await;
    let opened: Vec<Opened> = (0..3).map(|_| fixture.open()).collect();
    let tasks = opened.iter().cycle().take(24).enumerate().map(|(i, opened)| {
        let (store, content) = (Arc::clone(&opened.store), content.clone());
        tokio::spawn(async move {
            let start = FETCH_BYTES * (i as u64 % 8) * 4 + i as u64;
            let found = store.get_range(&key(), start..start + 3 * FETCH_BYTES).await.unwrap();
            assert_eq!(found, content.slice(start as usize..(start + 3 * FETCH_BYTES) as usize));
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!(fixture.store.bytes(), bytes, "each unit once");
    assert_eq!(fixture.stored_bytes(), bytes + 4096);
}

#[tokio::test]
async fn a_replaced_object_is_never_served() {
    let (fixture, old) = Fixture::with(FETCH_BYTES * 12).await;
    let first = fixture.open();
    assert_eq!(first.read(0..FETCH_BYTES * 9).await, old.slice(..FETCH_BYTES as usize * 9));
    let new = content(FETCH_BYTES * 12, 7);
    fixture.put(&key(), &new).await;

    // a process that has read the old version notices the change with its next request; the parts of one response are
    // of one version
    let both = [0..FETCH_BYTES * 2, FETCH_BYTES * 10..FETCH_BYTES * 11];
    let found = first.store.get_ranges(&key(), &both).await.unwrap();
    for (range, found) in both.iter().zip(found) {
        assert_eq!(found, new.slice(range.start as usize..range.end as usize));
    }
    assert_eq!(fixture.stored_bytes(), 4096 + 3 * FETCH_BYTES, "the old one's place is free");
    // a process that opens the object now sees the new version at once
    assert_eq!(fixture.open().read(3..FETCH_BYTES * 12).await, new.slice(3..));
    fixture.put(&key(), &old).await;
    assert_eq!(fixture.open().read(0..FETCH_BYTES * 9).await, old.slice(..FETCH_BYTES as usize * 9));

    fixture.store.delete(&key()).await.unwrap();
    assert!(matches!(fixture.open().store.get_range(&key(), 0..1).await, Err(Error::NotFound { .. })));
}

#[tokio::test]
async fn damage_of_the_cache_is_fetched_again() {
    let (fixture, content) = Fixture::with(FETCH_BYTES * 4).await;
    let opened = fixture.open();
    opened.read(0..FETCH_BYTES * 4).await;
    let [path] = &fixture.entries()[..] else { panic!() };
    let good = fs::read(path).unwrap();
    let damages: [fn(&mut Vec<u8>); 6] = [
        |bytes| bytes[4096 + FETCH_BYTES as usize * 2 + 99] ^= 4, // a bit of the data
        |bytes| bytes[64 + 8] ^= 1,                               // a bit of the table
        |bytes| bytes[3] ^= 1,                                    // a bit of the header
        |bytes| bytes.truncate(4096 + FETCH_BYTES as usize),      // a truncated file
        |bytes| bytes[4096..].fill(0),                            // a table written before its data
        |bytes| bytes.clear(),
    ];
    for (number, damage) in damages.iter().enumerate() {
        let mut bad = good.clone();
        damage(&mut bad);
        fs::write(path, bad).unwrap();
        let before = fixture.store.gets();
        assert_eq!(opened.read(0..FETCH_BYTES * 4).await, content, "damage {number}");
        assert!(fixture.store.gets() > before, "damage {number}");
        let after = fixture.store.gets();
        assert_eq!(opened.read(0..FETCH_BYTES * 4).await, content, "damage {number}");
        assert_eq!((fixture.store.gets(), fs::read(path).unwrap() == good), (after, true), "damage {number}");
    }
    assert!(opened.cache.take_warning().is_none(), "that is no news");
}

#[tokio::test]
async fn what_came_damaged_from_the_store_can_be_dropped() {
    let (fixture, content) = Fixture::with(FETCH_BYTES * 2).await;
    let opened = fixture.open();
    fixture.store.fail(Fault::Flip);
    assert_ne!(opened.read(0..FETCH_BYTES).await, content.slice(..FETCH_BYTES as usize));
    let url = format!("s3://b/dataset/{}", key());
    let start = Instant::now();
    assert!(opened.cache.drop_object(&url, start));
    assert!(opened.cache.drop_object(&url, start), "of two that read at once both read again");
    assert_eq!(opened.read(0..FETCH_BYTES).await, content.slice(..FETCH_BYTES as usize));
    assert!(!opened.cache.drop_object(&url, Instant::now()), "the second time it is the store's");
    assert_eq!(fixture.stored_bytes(), 4096 + FETCH_BYTES);
}

#[tokio::test]
async fn the_bound_is_kept_and_the_least_recently_used_goes_first() {
    let (fixture, content) = Fixture::with(FETCH_BYTES * 4).await;
    let each = 4096 + 4 * FETCH_BYTES;
    let names = ["a", "b", "c"];
    for (age, name) in names.iter().enumerate() {
        fixture.open_as(name, 4 * each).read(0..FETCH_BYTES * 4).await;
        let hours = Duration::from_secs(3600 * (10 - age as u64));
        for path in fixture.entries().iter().filter(|path| is_fresh(path)) {
            fs::File::options().write(true).open(path).unwrap().set_modified(SystemTime::now() - hours).unwrap();
        }
    }
    assert_eq!(fixture.stored_bytes(), 3 * each);
    // `a` is read again, so that `b` becomes the oldest
    let reads = fixture.store.gets();
    fixture.open_as("a", 4 * each).read(0..1).await;
    assert_eq!(fixture.store.gets(), reads);
    // the fourth data set fills the cache, the fifth exceeds it
    let _fourth = fixture.open_as("d", 4 * each).read(0..FETCH_BYTES * 4).await;
    fixture.open_as("e", 4 * each).read(0..FETCH_BYTES * 4).await;
    assert_eq!(fixture.stored_bytes(), 4 * each);
    for (name, is_there) in [("a", true), ("c", true), ("d", true), ("e", true), ("b", false)] {
        let reads = fixture.store.gets();
        assert_eq!(fixture.open_as(name, 4 * each).read(0..FETCH_BYTES * 4).await, content);
        assert_eq!(fixture.store.gets() == reads, is_there, "{name}");
        assert!(fixture.stored_bytes() <= 4 * each);
    }
}

fn is_fresh(path: &FsPath) -> bool {
    fs::metadata(path).unwrap().modified().unwrap().elapsed().unwrap() < Duration::from_secs(60)
}

#[tokio::test]
async fn what_a_process_has_open_stays_unless_the_bound_is_lowered() {
    let (fixture, content) = Fixture::with(FETCH_BYTES * 8).await;
    let bound = 4096 + 6 * FETCH_BYTES;
    let first = fixture.open_as("a", bound);
    first.read(0..FETCH_BYTES * 6).await;
    // more of the same data set, and another one: the cache is full, so exactly the requested bytes are fetched
    let other = fixture.open_as("b", bound);
    let fetched = fixture.store.bytes();
    assert_eq!(
        first.read(FETCH_BYTES * 6..FETCH_BYTES * 6 + 100).await,
        content.slice(6 * FETCH_BYTES as usize..6 * FETCH_BYTES as usize + 100)
    );
    assert_eq!(fixture.store.bytes() - fetched, FETCH_BYTES, "the first time it was to be kept");
    assert_eq!(
        first.read(FETCH_BYTES * 7..FETCH_BYTES * 7 + 100).await,
        content.slice(7 * FETCH_BYTES as usize..7 * FETCH_BYTES as usize + 100)
    );
    assert_eq!(fixture.store.bytes() - fetched, FETCH_BYTES + 100, "now it is known");
    other.read(0..FETCH_BYTES).await;
    let gets = fixture.store.gets();
    assert_eq!(first.read(0..FETCH_BYTES * 6).await, content.slice(..6 * FETCH_BYTES as usize));
    assert_eq!((fixture.store.gets(), fixture.stored_bytes()), (gets, bound));

    // a lower limit applies at once, even to data sets in use
    let third = fixture.open_as("c", 3 * FETCH_BYTES);
    assert_eq!(fixture.stored_bytes(), 0);
    assert_eq!(first.read(0..FETCH_BYTES * 6).await, content.slice(..6 * FETCH_BYTES as usize));
    assert_eq!(third.read(5..9).await, content.slice(5..9));
    assert!(first.cache.take_warning().is_none() && third.cache.take_warning().is_none());
}

#[tokio::test]
async fn a_count_that_is_lost_or_wrong_is_made_again() {
    let (fixture, _) = Fixture::with(FETCH_BYTES * 4).await;
    fixture.open().read(0..FETCH_BYTES * 4).await;
    let lock = fixture.folder.path().join("cache/stillhouse-1/lock");
    // the count is lost in a power cut; then the folder holds more than its limit
    fs::write(&lock, b"").unwrap();
    let opened = fixture.open_as("b", 4096 + 2 * FETCH_BYTES);
    assert_eq!(fixture.stored_bytes(), 0);
    opened.read(0..FETCH_BYTES).await;
    assert_eq!(fixture.stored_bytes(), 4096 + FETCH_BYTES);
    // an invalid entry file, as an interrupted creation leaves it, is removed by the next recount
    let [path] = &fixture.entries()[..] else { panic!() };
    fs::write(path, b"stillhouse").unwrap();
    fs::write(&lock, b"garbage that is long enough").unwrap();
    fixture.open();
    assert!(fixture.entries().is_empty());
}

#[tokio::test]
async fn a_folder_that_fails_costs_no_data() {
    let (fixture, content) = Fixture::with(FETCH_BYTES * 4).await;
    let opened = fixture.open();
    opened.read(0..FETCH_BYTES).await;
    let root = fixture.folder.path().join("cache/stillhouse-1");
    fs::remove_dir_all(&root).unwrap();
    // someone deleted the folder: the cache starts again
    assert_eq!(opened.read(0..FETCH_BYTES).await, content.slice(..FETCH_BYTES as usize));
    // a file takes the place of the folder
    let _ = fs::remove_dir_all(&root);
    fs::write(&root, b"").unwrap();
    for _ in 0..3 {
        assert_eq!(opened.read(0..FETCH_BYTES * 4).await, content);
    }
    let warning = opened.cache.take_warning().unwrap();
    assert!(warning.contains("reading continues without it") && !warning.contains('\n'), "{warning}");
    assert_eq!(opened.cache.take_warning(), None);

    let error = DiskCache::open(&fixture.options(LARGE_LIMIT), "x").unwrap_err().to_string();
    assert!(error.contains("cannot be used") && error.contains("cache"), "{error}");
}

#[tokio::test]
async fn failures_of_the_store_are_passed_on_and_block_nobody() {
    let (fixture, content) = Fixture::with(FETCH_BYTES * 4).await;
    let opened = fixture.open();
    for fault in [Fault::Get, Fault::Head] {
        fixture.store.fail(fault);
        let read = opened.store.get_range(&key(), 0..FETCH_BYTES).await;
        // reading works without HEAD
        assert_eq!(read.is_ok(), fault == Fault::Head, "{read:?}");
        assert_eq!(opened.read(0..FETCH_BYTES).await, content.slice(..FETCH_BYTES as usize));
        opened.cache.drop_object(&format!("s3://b/dataset/{}", key()), Instant::now());
    }
    assert!(opened.cache.take_warning().unwrap().contains("whose version the store does not tell"));
    let short = opened.store.get_range(&key(), 0..FETCH_BYTES * 5).await;
    assert_eq!(short.unwrap(), content, "past the end the answer is the store's");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any requests by any process in any order, with any limit and any flipped bits: the bytes are the object's
    /// and the cache stays within its limit.
    #[test]
    fn bytes_are_right_and_the_bound_is_kept(
        bytes in 1u64..FETCH_BYTES * 11,
        bound in 1u64..FETCH_BYTES * 14,
        requests in prop::collection::vec((0usize..3, any::<u32>(), any::<u32>(), any::<Option<u32>>()), 1..12),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (fixture, content) = Fixture::with(bytes).await;
            let opened = [fixture.open_as("a", bound), fixture.open_as("a", bound), fixture.open_as("b", bound)];
            for (who, from, to, flip) in requests {
                let (from, to) = (u64::from(from) % bytes, u64::from(to) % bytes);
                let range = from.min(to)..from.max(to) + 1;
                let ranges = [range.clone(), 0..1, range.start..bytes];
                let found = opened[who].store.get_ranges(&key(), &ranges).await.unwrap();
                for (range, found) in ranges.iter().zip(found) {
                    assert_eq!(found, content.slice(range.start as usize..range.end as usize), "{range:?}");
                }
                assert!(fixture.stored_bytes() <= bound, "{} of {bound}", fixture.stored_bytes());
                if let (Some(flip), Some(path)) = (flip, fixture.entries().first()) {
                    let mut file = fs::read(path).unwrap();
                    let at = 64 + flip as usize % (file.len() - 64); // the recount needs the header intact
                    file[at] ^= 1;
                    fs::write(path, file).unwrap();
                }
            }
        });
    }
}

#[tokio::test]
async fn many_ranges_of_many_objects() {
    let fixture = Fixture::new();
    let keys: Vec<Path> = (0..20).map(|i| Path::from(format!("data/{i}"))).collect();
    for (i, key) in keys.iter().enumerate() {
        fixture.put(key, &content(FETCH_BYTES * 3, i as u64)).await;
    }
    let opened = fixture.open();
    for _ in 0..2 {
        let reads = futures::stream::iter(keys.iter().enumerate()).map(|(i, key)| {
            let store = Arc::clone(&opened.store);
            async move {
                let found = store.get_range(key, 7..FETCH_BYTES * 3 - 7).await.unwrap();
                assert_eq!(found, content(FETCH_BYTES * 3, i as u64).slice(7..FETCH_BYTES as usize * 3 - 7));
            }
        });
        reads.buffer_unordered(8).collect::<Vec<()>>().await;
    }
    assert_eq!((fixture.store.gets(), fixture.entries().len()), (20, 20));
}
