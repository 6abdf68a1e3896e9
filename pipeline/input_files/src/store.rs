//! Blocking, ranged access to objects, with read-ahead for sequential reads.
//!
//! ```text
//!   ObjectReader   parser ◄── chunk n          (blocking; waits for the task only if the parser is faster)
//!                             chunk n+1 ◄── a task on the store's runtime, from the second chunk on
//! ```
//!
//! Memory: an [`ObjectReader`] holds two chunks, the current one and the one being fetched, each 64 KB at first and 2
//! MB after a few. A [`RangeCache`] holds 1 MB and does not read ahead: it fetches a page when it is needed, together
//! with the bytes that follow it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use stillhouse_base::file_state::{Changed, FileState};
use stillhouse_base::source_error::SourceError;
use stillhouse_base::storage::{Location, Opened, StoreUrl};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::checkpoints::Checkpoints;
use super::folder;
use super::input_file::InputFile;
use super::router::{Mount, Router};

/// Bytes of the first request of a sequential read.
pub const FIRST_CHUNK_BYTES: u64 = 64 << 10;
const MAX_CHUNK_BYTES: u64 = 2 << 20;
const PAGE_FETCH_BYTES: u64 = 1 << 20;

/// Path prefix of the staged rows of a run's query, if they are beside an output in a store.
const STAGED_ROWS_PREFIX: &str = "input.sql:";

/// An object store and the runtime that runs its futures.
///
/// Do not make its blocking calls on a runtime's own worker thread: use `spawn_blocking`.
#[derive(Debug, Clone)]
pub struct Store {
    /// The store.
    pub store: Arc<dyn ObjectStore>,
    /// The runtime on which its futures run.
    pub handle: Handle,
    router: Arc<Router>,
    /// States that files must still have when they are read.
    expected: Arc<HashMap<Path, FileState>>,
    checkpoints: Arc<Checkpoints>,
}

impl Store {
    /// Creates a store of the local files, under their absolute paths.
    pub fn local(handle: Handle) -> Self {
        Self::with_buckets(handle, [])
    }

    /// Creates a store of the local files and of buckets.
    pub fn with_buckets(handle: Handle, buckets: impl IntoIterator<Item = (StoreUrl, Opened)>) -> Self {
        let mount = |(url, opened): (StoreUrl, Opened)| {
            let url = url.root();
            Mount { prefix: mount_path(&url), store: opened.store, url }
        };
        let router = Arc::new(Router::new(buckets.into_iter().map(mount).collect()));
        Self {
            store: Arc::clone(&router) as Arc<dyn ObjectStore>,
            handle,
            router,
            expected: Arc::default(),
            checkpoints: Arc::default(),
        }
    }

    /// Returns the same store with access to the rows beside an output in a store.
    pub fn with_staged_rows(&self, output: &StoreUrl, store: &Arc<dyn ObjectStore>) -> Self {
        let url = StoreUrl { key: output.key.trim_end_matches('/').to_owned(), ..output.clone() };
        let mount = Mount { prefix: Path::from(STAGED_ROWS_PREFIX), store: Arc::clone(store), url };
        let router = Arc::new(self.router.with(mount));
        Self { store: Arc::clone(&router) as Arc<dyn ObjectStore>, router, ..self.clone() }
    }

    /// Returns the path of a file beside the output in this store.
    pub fn staged_path(name: &str) -> Path {
        Path::from(STAGED_ROWS_PREFIX).parts().chain(Path::from(name).parts()).collect()
    }

    /// The buckets with their URLs.
    pub fn buckets(&self) -> impl Iterator<Item = (&StoreUrl, &Arc<dyn ObjectStore>)> {
        self.router.buckets()
    }

    /// Returns the same store for reading these files as they were listed: to read a range of a changed file is an
    /// error ([`Changed`]).
    pub fn expecting<'a>(&self, files: impl IntoIterator<Item = &'a InputFile>) -> Self {
        let real = files.into_iter().filter(|f| !f.is_placeholder());
        let expected = real.map(|f| (f.location.clone(), f.state.clone())).collect();
        Self { expected: Arc::new(expected), ..self.clone() }
    }

    /// Returns the checkpoints for a file; `None` unless reads of the file are compared with the listing.
    pub(crate) fn checkpoints(&self, file: &InputFile) -> Option<&Arc<Checkpoints>> {
        (self.expected.get(&file.location) == Some(&file.state)).then_some(&self.checkpoints)
    }

    /// Keeps only the last checkpoint of a compressed file before each of these decompressed offsets, which are in order.
    /// The file was decompressed to its end.
    pub fn keep_checkpoints_before(&self, file: &InputFile, starts: impl Iterator<Item = u64>) {
        if let Some(checkpoints) = self.checkpoints(file) {
            checkpoints.keep_before(file, starts);
        }
    }

    /// Returns the same store with another interval and bound of checkpoints.
    #[cfg(test)]
    pub(crate) fn with_checkpoints(&self, checkpoints: Checkpoints) -> Self {
        Self { checkpoints: Arc::new(checkpoints), ..self.clone() }
    }

    #[cfg(test)]
    pub(crate) fn all_checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Checks that a file on the disk has not changed since it was listed. Every answer of a store was compared already.
    pub fn check(&self, file: &InputFile) -> Result<(), SourceError> {
        match self.is_on_disk(&file.location) {
            true => self.check_listed(file),
            false => Ok(()),
        }
    }

    /// Checks that none of these files has changed since it was listed. Cost: one request per file.
    ///
    /// # Errors
    /// When a file has changed, or a store does not answer.
    pub fn check_unchanged<'a>(
        &self,
        files: impl IntoIterator<Item = &'a InputFile> + Clone,
    ) -> Result<(), SourceError> {
        let store = self.expecting(files.clone());
        files.into_iter().try_for_each(|file| store.check_listed(file))
    }

    fn check_listed(&self, file: &InputFile) -> Result<(), SourceError> {
        if !self.expected.contains_key(&file.location) {
            return Ok(());
        }
        let checked = self.wait(self.store.head(&file.location)).and_then(|meta| self.is_expected(&meta));
        checked.map_err(|e| SourceError::from_store(&file.path, e))
    }

    fn is_expected(&self, meta: &ObjectMeta) -> Result<(), object_store::Error> {
        let Some(was) = self.expected.get(&meta.location) else { return Ok(()) };
        let now = FileState::of(meta, self.is_on_disk(&meta.location));
        match was.matches(&now) {
            true => Ok(()),
            false => {
                let source = Box::new(Changed { was: was.clone(), now });
                Err(object_store::Error::Generic { store: "input", source })
            }
        }
    }

    /// Returns the path of a URL in this store; its bucket must be one of the given buckets.
    pub(crate) fn location(url: &StoreUrl) -> Path {
        mount_path(url).parts().chain(url.path().parts()).collect()
    }

    /// Returns a location as users name it, and whether it is on the disk.
    pub(crate) fn display_name(&self, location: &Path) -> (String, bool) {
        self.router.display_name(location)
    }

    /// Whether a location is on the disk.
    pub fn is_on_disk(&self, location: &Path) -> bool {
        self.router.is_on_disk(location)
    }

    /// Returns the path or URL of a location.
    pub(crate) fn location_of(&self, location: &Path) -> Option<Location> {
        self.router.location_of(location)
    }

    /// Waits for a future on this thread, which must be allowed to block.
    pub fn wait<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }

    /// Returns the bytes of a range of an object; none if the range is empty.
    pub fn get(&self, location: &Path, start: u64, end: u64) -> Result<Bytes, object_store::Error> {
        if start >= end {
            // stores refuse an empty range
            return Ok(Bytes::new());
        }
        match self.read_from_disk(location, start, end) {
            Some(read) => read,
            None => self.wait(self.fetch(location, start, end)),
        }
    }

    /// Reads a range of a local file on this thread: the store would use another thread, which costs more than a small
    /// read. `None` on failure; the caller then asks the store, which returns its own error.
    fn read_from_disk(&self, location: &Path, start: u64, end: u64) -> Option<Result<Bytes, object_store::Error>> {
        let file = File::open(self.router.on_disk(location)?).ok()?;
        let found = file.metadata().ok().filter(|found| !found.is_dir())?;
        let end = end.min(found.len());
        if start >= end {
            return None;
        }
        if let Err(changed) = self.is_expected(&folder::object_meta(&found, location.clone())) {
            return Some(Err(changed));
        }
        let mut bytes = vec![0; usize::try_from(end - start).ok()?];
        file.read_exact_at(&mut bytes, start).ok()?;
        Some(Ok(Bytes::from(bytes)))
    }

    async fn fetch(&self, location: &Path, start: u64, end: u64) -> Result<Bytes, object_store::Error> {
        let options = GetOptions { range: Some((start..end).into()), ..GetOptions::default() };
        let got = self.store.get_opts(location, options).await?;
        self.is_expected(&got.meta)?;
        got.bytes().await
    }

    /// Starts to fetch a range that is not empty.
    fn fetch_ahead(&self, location: &Path, start: u64, end: u64) -> PendingFetch {
        let (store, location) = (self.clone(), location.clone());
        PendingFetch(self.handle.spawn(async move { store.fetch(&location, start, end).await }))
    }
}

/// A fetch in progress; dropping it aborts the fetch.
struct PendingFetch(JoinHandle<Result<Bytes, object_store::Error>>);

impl PendingFetch {
    async fn bytes(mut self) -> Result<Bytes, object_store::Error> {
        (&mut self.0).await?
    }
}

impl Drop for PendingFetch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn mount_path(url: &StoreUrl) -> Path {
    Path::from_iter([format!("{}:", url.scheme), url.bucket.clone()])
}

/// Reads an object from an offset on, chunk by chunk.
///
/// While the parser reads a chunk, a task fetches the next one, so that both work at the same time. The first chunk is
/// fetched alone, so a look at the start of an object costs one request. A failed fetch is reported when its bytes are
/// needed, not before.
pub struct ObjectReader {
    store: Store,
    location: Path,
    size: u64,
    /// Offset from which chunks are fetched only when they are needed.
    read_ahead_end: u64,
    /// Offset where the next chunk begins.
    position: u64,
    chunk: Bytes,
    next_chunk: u64,
    ahead: Option<PendingFetch>,
}

impl ObjectReader {
    /// Creates a reader of an object of `size` bytes, from `position` on. Requests nothing yet.
    pub fn new(store: &Store, location: &Path, size: u64, position: u64) -> Self {
        Self {
            store: store.clone(),
            location: location.clone(),
            size,
            read_ahead_end: size,
            position: position.min(size),
            chunk: Bytes::new(),
            next_chunk: FIRST_CHUNK_BYTES,
            ahead: None,
        }
    }

    /// Returns the same reader for a consumer that needs little or nothing from this offset on: no chunk that begins
    /// there is fetched ahead.
    pub fn read_ahead_until(self, end: u64) -> Self {
        Self { read_ahead_end: self.size.min(end), ..self }
    }

    /// Bytes of the object before the next unread byte.
    pub fn offset(&self) -> u64 {
        self.position - self.chunk.len() as u64
    }

    fn next_end(&self) -> u64 {
        self.size.min(self.position + self.next_chunk)
    }

    fn next_chunk(&mut self) -> io::Result<()> {
        let chunk = match self.ahead.take() {
            Some(ahead) => self.store.wait(ahead.bytes()),
            None => self.store.get(&self.location, self.position, self.next_end()),
        };
        self.chunk = chunk.map_err(io::Error::other)?;
        if self.chunk.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let is_first = self.next_chunk == FIRST_CHUNK_BYTES;
        self.position += self.chunk.len() as u64;
        self.next_chunk = (self.next_chunk * 2).min(MAX_CHUNK_BYTES);
        if !is_first && self.position < self.read_ahead_end {
            self.ahead = Some(self.store.fetch_ahead(&self.location, self.position, self.next_end()));
        }
        Ok(())
    }
}

impl BufRead for ObjectReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.chunk.is_empty() && self.position < self.size {
            self.next_chunk()?;
        }
        Ok(&self.chunk)
    }

    fn consume(&mut self, n: usize) {
        let _ = self.chunk.split_to(n.min(self.chunk.len()));
    }
}

impl Read for ObjectReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let n = available.len().min(out.len());
        out[..n].copy_from_slice(&available[..n]);
        self.consume(n);
        Ok(n)
    }
}

/// Reads pages of a Parquet file. Headers and small pages come from fetches of 1 MB.
#[derive(Debug)]
pub struct RangeCache {
    store: Store,
    location: Path,
    size: u64,
    fetched: Mutex<(u64, Bytes)>,
}

impl RangeCache {
    /// Creates an empty cache of an object of `size` bytes.
    pub fn new(store: &Store, location: &Path, size: u64) -> Self {
        Self { store: store.clone(), location: location.clone(), size, fetched: Mutex::new((0, Bytes::new())) }
    }

    /// Returns bytes of the object. If they are not buffered, fetches them together with the following bytes,
    /// `min_bytes` bytes in total, for the next calls.
    pub fn fetch(&self, start: u64, length: u64, min_bytes: u64) -> Result<Bytes, object_store::Error> {
        let mut cached = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, bytes) = &*cached;
        if start < *at || start + length > at + bytes.len() as u64 {
            let end = self.size.min(start + length.max(min_bytes));
            *cached = (start, self.store.get(&self.location, start, end)?);
        }
        let (at, bytes) = &*cached;
        let from = (start - at) as usize;
        let to = (from + length as usize).min(bytes.len());
        Ok(bytes.slice(from..to))
    }
}

impl Length for RangeCache {
    fn len(&self) -> u64 {
        self.size
    }
}

impl ChunkReader for RangeCache {
    type T = ObjectPage;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let length = PAGE_FETCH_BYTES.min(self.size.saturating_sub(start)).min(FIRST_CHUNK_BYTES);
        let bytes = self.fetch(start, length, PAGE_FETCH_BYTES).map_err(|e| ParquetError::External(Box::new(e)))?;
        let after = start + bytes.len() as u64;
        Ok(io::Read::chain(io::Cursor::new(bytes), ObjectReader::new(&self.store, &self.location, self.size, after)))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes, ParquetError> {
        if start.saturating_add(length as u64) > self.size {
            return Err(ParquetError::EOF(format!(
                "bytes {start} to {} are past the end of the file at {}",
                start.saturating_add(length as u64),
                self.size
            )));
        }
        self.fetch(start, length as u64, PAGE_FETCH_BYTES).map_err(|e| ParquetError::External(Box::new(e)))
    }
}

/// Bytes from an offset on: first the fetched ones, then the rest of the object.
pub type ObjectPage = io::Chain<io::Cursor<Bytes>, ObjectReader>;
