//! Caches on the local disk what is read of a store's objects. All processes of the machine share the cache.
//!
//! ```text
//!   get_ranges ─► which version? (HEAD, once) ─► entry: units stored, checksums valid? ──yes───► bytes
//!                                                  │ no                                            ▲
//!                                                  ▼                                               │
//!              claim (flock): one process fetches ─► GET missing units ─► quota ─► entry ──────────┘
//! ```
//!
//! Only ranges are cached; whole objects pass through. Readers fetch shards of a data set in ranges, and the manifest,
//! which tells whether the shards have changed, as a whole. The cached piece is a *unit* of 64 KiB, at its offset in a
//! sparse file per object. So an epoch of two columns does not fetch the others, and few files hold much data. Entries
//! are named by hashes of the URL and of the version (size with version id and ETag, else with the modification time).
//! A response of another version is never stored or returned as this one. Names and files hold no secret: URLs with one
//! are refused earlier.
//!
//! A failure of the folder costs speed, never data: reading continues without the cache, and
//! [`DiskCache::take_warning`] returns the reason once.
//!
//! Memory: at most 64 MiB of responses in flight per cache, beyond the bytes that the caller requested.

mod cache_quota;
mod claim;
pub(crate) mod entry;

use std::collections::{BTreeMap, BTreeSet, HashMap, hash_map};
use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload,
    OBJECT_STORE_COALESCE_DEFAULT, ObjectMeta, ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, RenameOptions, Result, coalesce_ranges,
};
use sha2::{Digest, Sha256};
use tokio::sync::{OnceCell, Semaphore};

use crate::{StorageError, blocking};
use cache_quota::{CacheFolder, Stored};
use claim::Claim;
use entry::{Entry, UNIT_BYTES, bytes_of, runs, units_of};

/// Units to which requests are rounded: 256 KiB. A larger value makes fewer requests; a smaller one fetches less that
/// was not requested, which matters until the first window of an epoch is cached.
pub(crate) const FETCH_UNITS: u64 = 4;
/// Maximum units of one request, and the units that one claim covers: 2 MiB.
const SEGMENT_UNITS: u64 = 32;
/// Maximum units in flight: 64 MiB.
const MAX_UNITS_IN_FLIGHT: usize = 1024;
/// Maximum concurrent requests of one call.
const MAX_CONCURRENT_REQUESTS: usize = 16;
/// Attempts of one call if the object is replaced while it is read.
const MAX_VERSION_ATTEMPTS: usize = 3;

/// Location and size limit of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskCacheOptions {
    /// A local folder. Created with access for this user only, if it does not exist.
    pub folder: PathBuf,
    /// Maximum bytes in the folder, including those of other processes.
    pub bytes: u64,
}

/// The cache, opened for one data set (or another group of objects that is evicted together). Belongs to one process: a
/// forked child opens its own.
#[derive(Debug)]
pub struct DiskCache {
    folder: PathBuf,
    cache_folder: CacheFolder,
    in_flight_units: Semaphore,
    objects: Mutex<HashMap<String, CachedLookup>>,
    /// URLs whose entries were dropped because their bytes were damaged, with the time of the drop.
    dropped: Mutex<HashMap<String, Instant>>,
    warning: Mutex<Warning>,
}

/// What is known about an object: nothing yet (empty cell), that the store reports no version (`None`), or its version.
type CachedLookup = Arc<OnceCell<Option<Arc<Object>>>>;

#[derive(Debug, Default)]
enum Warning {
    #[default]
    None,
    Pending(String),
    Reported,
}

/// An object, in the version that this process found.
#[derive(Debug)]
struct Object {
    location: Path,
    meta: ObjectMeta,
    /// Name of its entry.
    name: String,
}

impl DiskCache {
    /// Opens the cache folder. `dataset` names, without secrets, the group of objects that is evicted together and
    /// stays while a process has it open.
    ///
    /// # Errors
    /// If the folder cannot be created or written, or does not support locks.
    pub fn open(options: &DiskCacheOptions, dataset: &str) -> Result<Arc<Self>, StorageError> {
        let cache_folder = CacheFolder::open(&options.folder, &hash(&[dataset]), options.bytes).map_err(|e| {
            StorageError(format!(
                "disk cache: the folder {} cannot be used: {e}; valid: a folder of a local disk that this user may write to",
                options.folder.display()
            ))
        })?;
        Ok(Arc::new(Self {
            folder: options.folder.clone(),
            cache_folder,
            in_flight_units: Semaphore::new(MAX_UNITS_IN_FLIGHT),
            objects: Mutex::default(),
            dropped: Mutex::default(),
            warning: Mutex::default(),
        }))
    }

    /// Wraps a store so that ranges are read through the cache. `url` is the URL of the store's root, without secrets.
    pub fn wrap(self: &Arc<Self>, store: Arc<dyn ObjectStore>, url: &str) -> Arc<dyn ObjectStore> {
        Arc::new(CachedStore { store, url: url.to_owned(), cache: Arc::clone(self) })
    }

    /// Returns the first failure of the folder, in one line. Returns it once.
    pub fn take_warning(&self) -> Option<String> {
        let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::take(&mut *warning) {
            Warning::None => None,
            Warning::Pending(text) => {
                *warning = Warning::Reported;
                Some(text)
            }
            Warning::Reported => {
                *warning = Warning::Reported;
                None
            }
        }
    }

    /// Drops the cached object at a URL, because bytes read from it since `since` turned out to be damaged: the store
    /// may have delivered them damaged. Returns whether reading again can help. Each URL is dropped once; if damage
    /// recurs, the object itself is damaged.
    pub fn drop_object(&self, url: &str, since: Instant) -> bool {
        match self.dropped.lock().unwrap_or_else(PoisonError::into_inner).entry(url.to_owned()) {
            hash_map::Entry::Vacant(dropped) => {
                dropped.insert(Instant::now());
            }
            // another reader dropped it; reading again helps if that was during this read
            hash_map::Entry::Occupied(dropped) => return *dropped.get() > since,
        }
        match self.cache_folder.remove_object(&hash(&[url])) {
            Ok(()) => {}
            Err(e) => self.warn("cannot be written", &e),
        }
        self.forget(url);
        true
    }

    fn forget(&self, url: &str) {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner).remove(url);
    }

    fn warn(&self, what: &str, why: &dyn fmt::Display) {
        let mut warning = self.warning.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*warning, Warning::None) {
            let folder = self.folder.display();
            *warning = Warning::Pending(format!("disk cache {folder}: {what}: {why}; reading continues without it"));
        }
    }

    /// Reads ranges from an entry. If the folder cannot be read, all ranges are missing.
    fn read(&self, object: &Object, ranges: &[Range<u64>]) -> Vec<Option<Bytes>> {
        let read = || -> io::Result<Vec<Option<Bytes>>> {
            let Some(entry) = Entry::open(&self.cache_folder.entry(&object.name), object.meta.size)? else {
                return Ok(vec![None; ranges.len()]);
            };
            entry.touch()?;
            // adjacent pages share units
            let units: BTreeSet<u64> = ranges.iter().flat_map(units_of).collect();
            let mut stored_runs = Vec::new();
            for run in runs(units.into_iter()) {
                stored_runs.extend(entry.read(&run)?);
            }
            Ok(ranges.iter().map(|range| slice_of_runs(&stored_runs, range)).collect())
        };
        read().unwrap_or_else(|e| {
            self.warn("cannot be read", &e);
            vec![None; ranges.len()]
        })
    }

    fn store(&self, object: &Object, first: u64, data: &[u8]) {
        match self.cache_folder.store(&object.name, object.meta.size, first, data) {
            Ok(Stored::Yes | Stored::Full) => {}
            Err(e) => self.warn("cannot be written", &e),
        }
    }
}

/// A store that reads ranges through the cache.
#[derive(Debug)]
struct CachedStore {
    store: Arc<dyn ObjectStore>,
    url: String,
    cache: Arc<DiskCache>,
}

impl CachedStore {
    /// Reads ranges; `None` if the object is not cacheable and the caller must ask the store.
    async fn ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Option<(Arc<Object>, Vec<Bytes>)>> {
        for _ in 0..MAX_VERSION_ATTEMPTS {
            let Some(object) = self.identify(location).await? else { return Ok(None) };
            if ranges.iter().any(|range| range.start >= range.end || range.end > object.meta.size) {
                return Ok(None);
            }
            match self.read_ranges_of(&object, ranges).await {
                // the object was replaced in the meantime
                Err(Error::Precondition { .. }) => self.cache.forget(&self.url_of(location)),
                other => return other.map(|bytes| Some((object, bytes))),
            }
        }
        Ok(None)
    }

    async fn read_ranges_of(&self, object: &Arc<Object>, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let found = self.read(object, ranges.to_vec()).await?;
        let absent: Vec<Range<u64>> =
            ranges.iter().zip(&found).filter(|(_, found)| found.is_none()).map(|(range, _)| range.clone()).collect();
        if absent.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        let fetched = match self.cache.cache_folder.is_suspended() {
            true => self.fetch_exactly(object, &absent).await?,
            false => self.fetch_and_store(object, &absent).await?,
        };
        let mut fetched = fetched.into_iter();
        Ok(found.into_iter().filter_map(|found| found.or_else(|| fetched.next())).collect())
    }

    /// Fetches ranges that will not be stored: no more than requested, as without a cache.
    async fn fetch_exactly(&self, object: &Object, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        coalesce_ranges(ranges, |range| self.fetch(object, range), OBJECT_STORE_COALESCE_DEFAULT).await
    }

    async fn fetch_and_store(&self, object: &Arc<Object>, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let last = object.meta.size.div_ceil(UNIT_BYTES);
        let round_out = |units: Range<u64>| {
            units.start / FETCH_UNITS * FETCH_UNITS..units.end.next_multiple_of(FETCH_UNITS).min(last)
        };
        let units: BTreeSet<u64> = ranges.iter().map(units_of).flat_map(round_out).collect();
        let filled: Vec<Vec<(u64, Bytes)>> = futures::stream::iter(segments(units.into_iter()))
            .map(|run| self.fill(object, run))
            .buffer_unordered(MAX_CONCURRENT_REQUESTS)
            .try_collect()
            .await?;
        let units: BTreeMap<u64, Bytes> = filled.into_iter().flatten().collect();
        Ok(ranges.iter().map(|range| assemble(range, &units)).collect())
    }

    /// Fills consecutive units: takes those that another process has stored in the meantime, and fetches the others.
    async fn fill(&self, object: &Arc<Object>, run: Range<u64>) -> Result<Vec<(u64, Bytes)>> {
        let number = crc32fast::hash(format!("{} {}", object.name, run.start / SEGMENT_UNITS).as_bytes());
        let claim = Claim::acquire(&self.cache.cache_folder, number).await;
        let size = object.meta.size;
        let ranges: Vec<Range<u64>> = run.clone().map(|unit| bytes_of(&(unit..unit + 1), size)).collect();
        let stored = self.read(object, ranges).await?;
        let mut units: Vec<(u64, Bytes)> = run.clone().zip(stored).filter_map(|(u, b)| b.map(|b| (u, b))).collect();
        let stored_units: BTreeSet<u64> = units.iter().map(|(unit, _)| *unit).collect();
        for part in runs(run.filter(|unit| !stored_units.contains(unit))) {
            let permits = (part.end - part.start) as u32;
            let _permit = self.cache.in_flight_units.acquire_many(permits).await;
            let bytes = self.fetch(object, bytes_of(&part, size)).await?;
            let (cache, target, data, first) = (Arc::clone(&self.cache), Arc::clone(object), bytes.clone(), part.start);
            blocking(move || {
                cache.store(&target, first, &data);
                Ok::<_, Error>(())
            })
            .await?;
            units.extend(part.map(|unit| {
                let start = ((unit - first) * UNIT_BYTES) as usize;
                (unit, bytes.slice(start..bytes.len().min(start + UNIT_BYTES as usize)))
            }));
        }
        drop(claim);
        Ok(units)
    }

    async fn read(&self, object: &Arc<Object>, ranges: Vec<Range<u64>>) -> Result<Vec<Option<Bytes>>> {
        let (cache, object) = (Arc::clone(&self.cache), Arc::clone(object));
        blocking(move || Ok(cache.read(&object, &ranges))).await
    }

    /// Fetches a range, and checks that it belongs to the version that was found.
    async fn fetch(&self, object: &Object, range: Range<u64>) -> Result<Bytes> {
        let answer = self.store.get_opts(&object.location, GetOptions::new().with_range(Some(range.clone()))).await?;
        if version(&answer.meta) != version(&object.meta) || answer.range != range {
            return Err(replaced_error(object));
        }
        let bytes = answer.bytes().await?;
        if bytes.len() as u64 != range.end - range.start { Err(replaced_error(object)) } else { Ok(bytes) }
    }

    /// Finds the version of an object, once per process. `None` if the store reports none.
    async fn identify(&self, location: &Path) -> Result<Option<Arc<Object>>> {
        let url = self.url_of(location);
        let cell = {
            let mut objects = self.cache.objects.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(objects.entry(url.clone()).or_default())
        };
        let find = || async {
            let meta = match self.store.head(location).await {
                Ok(meta) => meta,
                Err(e @ Error::NotFound { .. }) => return Err(e),
                Err(e) => {
                    // if the store is unreachable, this read returns the error
                    self.store.get_range(location, 0..1).await?;
                    self.cache.warn(&format!("not used for {url}, whose version the store does not tell"), &e);
                    return Ok(None);
                }
            };
            let Some(version) = version(&meta) else {
                let why = "it sends neither ETag nor Last-Modified";
                self.cache.warn(&format!("not used for {url}, whose version the store does not tell"), &why);
                return Ok(None);
            };
            let name = format!("{}-{}", hash(&[&url]), hash(&[&version]));
            Ok(Some(Arc::new(Object { location: location.clone(), meta, name })))
        };
        cell.get_or_try_init(find).await.cloned()
    }

    fn url_of(&self, location: &Path) -> String {
        format!("{}/{location}", self.url)
    }
}

/// The identity of an object's version; `None` if the metadata does not identify it.
fn version(meta: &ObjectMeta) -> Option<String> {
    let identity = match (&meta.version, &meta.e_tag) {
        (None, None) if meta.last_modified.timestamp() == 0 => return None,
        (None, None) => meta.last_modified.to_rfc3339(),
        (version, e_tag) => format!("{version:?} {e_tag:?}"),
    };
    Some(format!("{} {identity}", meta.size))
}

fn replaced_error(object: &Object) -> Error {
    let source = "the object was replaced while it was read".into();
    Error::Precondition { path: object.location.to_string(), source }
}

/// Groups units into runs, split at segment boundaries.
fn segments(units: impl Iterator<Item = u64>) -> Vec<Range<u64>> {
    let cut = |run: Range<u64>| {
        let first = run.start / SEGMENT_UNITS;
        (first..run.end.div_ceil(SEGMENT_UNITS))
            .map(move |segment| (segment * SEGMENT_UNITS).max(run.start)..((segment + 1) * SEGMENT_UNITS).min(run.end))
    };
    runs(units).into_iter().flat_map(cut).collect()
}

/// Slices a range out of the run of bytes that contains it; `None` if no run does.
fn slice_of_runs(stored_runs: &[(u64, Bytes)], range: &Range<u64>) -> Option<Bytes> {
    let (start, bytes) =
        stored_runs.get(stored_runs.partition_point(|(start, _)| *start <= range.start).checked_sub(1)?)?;
    let end = range.end - start;
    (end <= bytes.len() as u64).then(|| bytes.slice((range.start - start) as usize..end as usize))
}

/// Assembles a range from the units that contain it.
fn assemble(range: &Range<u64>, units: &BTreeMap<u64, Bytes>) -> Bytes {
    let mut parts = units_of(range).filter_map(|unit| {
        let bytes = units.get(&unit)?;
        let inside = |at: u64| (at.saturating_sub(unit * UNIT_BYTES) as usize).min(bytes.len());
        Some(bytes.slice(inside(range.start)..inside(range.end)))
    });
    let first = parts.next().unwrap_or_default();
    let Some(second) = parts.next() else { return first };
    let mut whole = BytesMut::with_capacity((range.end - range.start) as usize);
    [first, second].into_iter().chain(parts).for_each(|part| whole.extend_from_slice(&part));
    whole.freeze()
}

/// The first 128 bits of the SHA-256 of the parts, in hexadecimal.
fn hash(parts: &[&str]) -> String {
    let sum =
        parts.iter().fold(Sha256::new(), |sum, part| sum.chain_update(part.len().to_le_bytes()).chain_update(part));
    sum.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

impl fmt::Display for CachedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} through {}", self.store, self.cache.folder.display())
    }
}

#[async_trait]
impl ObjectStore for CachedStore {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.store.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(&self, location: &Path, opts: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        self.store.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if let GetOptions {
            range: Some(GetRange::Bounded(range)),
            if_match: None,
            if_none_match: None,
            if_modified_since: None,
            if_unmodified_since: None,
            version: None,
            head: false,
            ..
        } = &options
            && let Some((object, bytes)) = self.ranges(location, std::slice::from_ref(range)).await?
        {
            let payload = GetResultPayload::Stream(futures::stream::iter(bytes.into_iter().map(Ok)).boxed());
            let (meta, range) = (object.meta.clone(), range.clone());
            return Ok(GetResult { payload, meta, range, attributes: Default::default() });
        }
        self.store.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        match self.ranges(location, ranges).await? {
            Some((_, bytes)) => Ok(bytes),
            None => self.store.get_ranges(location, ranges).await,
        }
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.store.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list(prefix)
    }

    fn list_with_offset(&self, prefix: Option<&Path>, offset: &Path) -> BoxStream<'static, Result<ObjectMeta>> {
        self.store.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.store.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.store.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.store.rename_opts(from, to, options).await
    }
}
