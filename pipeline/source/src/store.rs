//! Blocking, ranged access to objects, which reads ahead where an object is read from one end to the other.
//!
//! ```text
//!   ObjectReader   parser ◄── chunk n          (blocking; waits for the task only where the parser is faster)
//!                             chunk n+1 ◄── a task on the store's runtime, from the second chunk on
//! ```
//!
//! Memory: an [`ObjectReader`] holds two chunks, the one that is read and the one that is being fetched, each 64 KB at first and 2 MB after a
//! few; [`Chunks`] hold 1 MB and read nothing ahead of what is asked for: a page is fetched when it is wanted, with what lies next to it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use datafusion::common::DataFusionError;
use datafusion::execution::runtime_env::RuntimeEnv;
use object_store::path::Path;
use object_store::{GetOptions, ObjectMeta, ObjectStore, ObjectStoreExt};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, Length};
use stillhouse_base::file_state::{Changed, FileState};
use stillhouse_base::storage::{Location, Opened, StoreUrl};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use url::Url;

use super::checkpoints::Checkpoints;
use super::folder;
use super::input_file::InputFile;
use super::router::{Mount, Router};

pub(crate) const FIRST_CHUNK: u64 = 64 << 10;
const LARGEST_CHUNK: u64 = 2 << 20;
const PAGE_CHUNK: u64 = 1 << 20;

/// Where what the query of a run gave is read, if it lies beside an output in a store.
const ROWS: &str = "input.sql:";

/// An object store and the runtime that waits for it.
///
/// The blocking calls on it must not be made on a runtime's own worker thread: use `spawn_blocking`.
#[derive(Debug, Clone)]
pub struct Store {
    /// The store.
    pub store: Arc<dyn ObjectStore>,
    /// The runtime on which its futures run.
    pub handle: Handle,
    router: Arc<Router>,
    /// What files must still be when they are read.
    expected: Arc<HashMap<Path, FileState>>,
    checkpoints: Arc<Checkpoints>,
}

impl Store {
    /// The files of this machine, under their absolute paths.
    pub fn local(handle: Handle) -> Self {
        Self::with_buckets(handle, [])
    }

    /// The files of this machine, and buckets.
    pub fn with_buckets(handle: Handle, buckets: impl IntoIterator<Item = (StoreUrl, Opened)>) -> Self {
        let mount = |(url, opened): (StoreUrl, Opened)| {
            let url = url.root();
            Mount { at: at(&url), store: opened.store, url }
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

    /// The same, with what lies beside an output in a store.
    pub fn with_rows_beside(&self, output: &StoreUrl, store: &Arc<dyn ObjectStore>) -> Self {
        let url = StoreUrl { key: output.key.trim_end_matches('/').to_owned(), ..output.clone() };
        let mount = Mount { at: Path::from(ROWS), store: Arc::clone(store), url };
        let router = Arc::new(self.router.with(mount));
        Self { store: Arc::clone(&router) as Arc<dyn ObjectStore>, router, ..self.clone() }
    }

    /// What a file beside the output is called here.
    pub fn beside_output(name: &str) -> Path {
        Path::from(ROWS).parts().chain(Path::from(name).parts()).collect()
    }

    /// Makes the buckets known to a session, under their URLs: nodes of DataFusion's own find them there, as they find the disk.
    ///
    /// # Errors
    /// When a bucket has a name that no URL can have.
    pub fn register(&self, runtime: &RuntimeEnv) -> datafusion::common::Result<()> {
        for (url, store) in self.router.buckets() {
            let url = Url::parse(&url.to_string()).map_err(|e| DataFusionError::External(Box::new(e)))?;
            runtime.register_object_store(&url, Arc::clone(store));
        }
        Ok(())
    }

    /// The same, for reading these files as they were listed: a range of one that is another by now is an error ([`Changed`]).
    pub(crate) fn expecting<'a>(&self, files: impl IntoIterator<Item = &'a InputFile>) -> Self {
        let real = files.into_iter().filter(|f| !f.is_nothing());
        let expected = real.map(|f| (f.location.clone(), f.state.clone())).collect();
        Self { expected: Arc::new(expected), ..self.clone() }
    }

    /// Where reading can begin inside of a compressed file; none where what is read is not held against the listing.
    pub(super) fn checkpoints(&self, file: &InputFile) -> Option<&Arc<Checkpoints>> {
        (self.expected.get(&file.location) == Some(&file.state)).then_some(&self.checkpoints)
    }

    /// The same store with other distances between checkpoints, and bounds of them.
    #[cfg(test)]
    pub(super) fn with_checkpoints(&self, checkpoints: Checkpoints) -> Self {
        Self { checkpoints: Arc::new(checkpoints), ..self.clone() }
    }

    #[cfg(test)]
    pub(super) fn all_checkpoints(&self) -> &Checkpoints {
        &self.checkpoints
    }

    /// Looks whether a file is still what it was when it was listed. What a store gave has said so with every answer, so only a disk
    /// is asked, unless `also_stores`.
    pub(crate) fn check(&self, location: &Path, also_stores: bool) -> Result<(), object_store::Error> {
        if !self.expected.contains_key(location) || !(also_stores || self.is_on_disk(location)) {
            return Ok(());
        }
        self.is_expected(&self.wait(self.store.head(location))?)
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

    /// What a URL is called here; its bucket must be one of those that were given.
    pub(crate) fn location(url: &StoreUrl) -> Path {
        at(url).parts().chain(url.path().parts()).collect()
    }

    /// A location as a person names it, and whether it is on the disk.
    pub(crate) fn shown(&self, location: &Path) -> (String, bool) {
        self.router.shown(location)
    }

    /// Whether a location is on the disk.
    pub(crate) fn is_on_disk(&self, location: &Path) -> bool {
        self.router.is_on_disk(location)
    }

    /// Where a location is.
    pub(crate) fn location_of(&self, location: &Path) -> Option<Location> {
        self.router.location_of(location)
    }

    /// Waits for a future on this thread, which may block.
    pub fn wait<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }

    pub(crate) fn get(&self, location: &Path, start: u64, end: u64) -> Result<Bytes, object_store::Error> {
        if start >= end {
            // stores refuse to give nothing
            return Ok(Bytes::new());
        }
        match self.of_disk(location, start, end) {
            Some(read) => read,
            None => self.wait(self.fetch(location, start, end)),
        }
    }

    /// A range of a file of this machine, read by this thread: another one, which the store would ask, costs more than a small read. `None` where
    /// that fails, which the store tells in its words.
    fn of_disk(&self, location: &Path, start: u64, end: u64) -> Option<Result<Bytes, object_store::Error>> {
        let file = File::open(self.router.on_disk(location)?).ok()?;
        let found = file.metadata().ok().filter(|found| !found.is_dir())?;
        let end = end.min(found.len());
        if start >= end {
            return None;
        }
        if let Err(changed) = self.is_expected(&folder::meta(&found, location.clone())) {
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

    /// Begins to fetch a range that is not empty.
    fn fetch_ahead(&self, location: &Path, start: u64, end: u64) -> Ahead {
        let (store, location) = (self.clone(), location.clone());
        Ahead(self.handle.spawn(async move { store.fetch(&location, start, end).await }))
    }
}

/// A fetch under way, which ends where nobody waits for it any more.
struct Ahead(JoinHandle<Result<Bytes, object_store::Error>>);

impl Ahead {
    async fn bytes(mut self) -> Result<Bytes, object_store::Error> {
        (&mut self.0).await?
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn at(url: &StoreUrl) -> Path {
    Path::from_iter([format!("{}:", url.scheme), url.bucket.clone()])
}

/// Reads an object from some byte on, chunk by chunk.
///
/// While a chunk is read the next one is being fetched, so that the parser and the store work at the same time. The first chunk is
/// fetched alone: who looks at the start of an object costs one request.
/// A fetch that failed is told where its bytes are needed, not before.
pub(crate) struct ObjectReader {
    store: Store,
    location: Path,
    size: u64,
    /// Nothing from here on is fetched before it is needed.
    until: u64,
    /// Where the next chunk begins.
    position: u64,
    chunk: Bytes,
    next_chunk: u64,
    ahead: Option<Ahead>,
}

impl ObjectReader {
    pub fn new(store: &Store, location: &Path, size: u64, position: u64) -> Self {
        Self {
            store: store.clone(),
            location: location.clone(),
            size,
            until: size,
            position: position.min(size),
            chunk: Bytes::new(),
            next_chunk: FIRST_CHUNK,
            ahead: None,
        }
    }

    /// The same for a reader that needs little, or nothing, from this byte on: no chunk that begins there is fetched ahead.
    pub fn until(self, end: u64) -> Self {
        Self { until: self.size.min(end), ..self }
    }

    /// Bytes of the object before what is read next.
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
        let is_first = self.next_chunk == FIRST_CHUNK;
        self.position += self.chunk.len() as u64;
        self.next_chunk = (self.next_chunk * 2).min(LARGEST_CHUNK);
        if !is_first && self.position < self.until {
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

/// Pages of a Parquet file: headers and small pages come out of fetches of 1 MB.
#[derive(Debug)]
pub(crate) struct Chunks {
    store: Store,
    location: Path,
    size: u64,
    fetched: Mutex<(u64, Bytes)>,
}

impl Chunks {
    pub fn new(store: &Store, location: &Path, size: u64) -> Self {
        Self { store: store.clone(), location: location.clone(), size, fetched: Mutex::new((0, Bytes::new())) }
    }

    /// Bytes of the object; where they are not here already they are fetched, with what follows up to `least` bytes for the next calls.
    pub fn fetch(&self, start: u64, length: u64, least: u64) -> Result<Bytes, object_store::Error> {
        let mut cached = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
        let (at, bytes) = &*cached;
        if start < *at || start + length > at + bytes.len() as u64 {
            let end = self.size.min(start + length.max(least));
            *cached = (start, self.store.get(&self.location, start, end)?);
        }
        let (at, bytes) = &*cached;
        let from = (start - at) as usize;
        let to = (from + length as usize).min(bytes.len());
        Ok(bytes.slice(from..to))
    }
}

impl Length for Chunks {
    fn len(&self) -> u64 {
        self.size
    }
}

impl ChunkReader for Chunks {
    type T = ObjectPage;

    fn get_read(&self, start: u64) -> Result<Self::T, ParquetError> {
        let length = PAGE_CHUNK.min(self.size.saturating_sub(start)).min(FIRST_CHUNK);
        let bytes = self.fetch(start, length, PAGE_CHUNK).map_err(|e| ParquetError::External(Box::new(e)))?;
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
        self.fetch(start, length as u64, PAGE_CHUNK).map_err(|e| ParquetError::External(Box::new(e)))
    }
}

/// Bytes from some offset on: what was fetched, then the object itself.
pub(crate) type ObjectPage = io::Chain<io::Cursor<Bytes>, ObjectReader>;
