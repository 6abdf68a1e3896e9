//! A finished data set with random access to its rows.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use arrow_array::{Array, RecordBatch};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use stillhouse_schemas::columns::{DOCUMENT_FIELDS, FORMAT_VERSION};
use stillhouse_schemas::storage::Storage;
use stillhouse_storage::DiskCacheOptions;
use tokio::sync::OnceCell;

use crate::blocks::Block;
use crate::cache::{Cache, MemorySize};
use crate::columns::{Column, ColumnSpec, RowRef, gather};
use crate::process::PerProcess;
use crate::shard::{Footer, Shard};
use crate::source::Source;
use crate::{ReadError, Result};

/// Tokens of a block, the unit of a read. With L = 1,024 a block has 64 rows, about 1.5 MB with noise. Each read of a
/// block decodes the dictionaries of its columns again, so blocks of half the size cost half as much again.
pub const BLOCK_TOKENS: u64 = 65_536;
/// Maximum rows of a block.
const MAX_BLOCK_ROWS: u64 = 4_096;
/// Memory for the footers of shards, in bytes.
const FOOTER_CACHE_BYTES: usize = 256 << 20;
/// Maximum blocks and shards read concurrently.
const MAX_CONCURRENT_READS: usize = 16;
/// Number of blocks that must fit into the cache before whole blocks are read.
const MIN_CACHED_BLOCKS: u64 = 8;
/// Maximum number of blocks remembered because a single row of them was read.
const MAX_RECENT_SINGLE_READS: usize = 4_096;

/// Options for opening a data set.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// Data set split, such as `train`.
    pub split: String,
    /// Access to the store of the data set.
    pub storage: Storage,
    /// Memory for decoded blocks, in bytes.
    pub cache_bytes: usize,
    /// Disk cache for the shards of a store; `None` disables it.
    pub disk_cache: Option<DiskCacheOptions>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { split: "train".into(), storage: Storage::default(), cache_bytes: 512 << 20, disk_cache: None }
    }
}

/// The fields of the manifest that the reader needs. Fields of later minor versions are ignored.
#[derive(Debug, Deserialize)]
struct Manifest {
    job: Job,
    job_hash: String,
    columns: Vec<ColumnSpec>,
    shards: Vec<Shard>,
    /// SHA-256 of further files, by name.
    #[serde(rename = "beside", default)]
    sidecar_files: BTreeMap<String, String>,
    #[serde(default)]
    tokenizer: Tokenizer,
}

/// The tokenizer that decodes the ids.
#[derive(Debug, Default, Deserialize)]
struct Tokenizer {
    #[serde(default)]
    sha256: String,
}

#[derive(Debug, Deserialize)]
struct Job {
    pack: Pack,
}

#[derive(Debug, Deserialize)]
struct Pack {
    length: u64,
}

/// How to read the requested rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadMode {
    /// Reads whole blocks and caches them: right if most of their rows will be requested.
    Blocks,
    /// Reads a single row by its pages, and the whole block once a second of its rows is requested.
    Auto,
    /// Reads rows by their pages.
    Rows,
}

/// One data set split of a finished data set, with a selection of columns.
#[derive(Debug)]
pub struct DataSet {
    url: String,
    options: OpenOptions,
    /// Text of `manifest.json`.
    manifest: Arc<str>,
    job_hash: String,
    length: u64,
    shards: Arc<[Shard]>,
    /// First row of each shard, followed by the total number of rows.
    starts: Arc<[u64]>,
    columns: Vec<ColumnSpec>,
    state: PerProcess<ProcessState>,
}

/// The state that a process has open.
#[derive(Debug)]
struct ProcessState {
    source: Result<Source>,
    /// Why the disk cache is not used; taken when it is reported.
    warning: Mutex<Option<String>>,
    footers: Cache<CachedFooter>,
    blocks: Cache<Block>,
    recent_single_reads: Mutex<RecentSingleReads>,
    /// Decoded size of the largest row of a sample, in bytes.
    row_bytes: OnceCell<usize>,
}

#[derive(Debug)]
struct CachedFooter(Footer);

impl MemorySize for CachedFooter {
    fn bytes(&self) -> usize {
        self.0.size()
    }
}

impl DataSet {
    /// Opens one split of a data set. Reads only the manifest.
    ///
    /// # Errors
    /// If the data set does not exist, is unfinished, has a newer format or no such split; if the folder of the disk
    /// cache cannot be used.
    pub async fn open(url: &str, options: OpenOptions) -> Result<Self> {
        let source = Source::open(url, &options.storage)?;
        let manifest = read_manifest(&source).await?;
        let parsed = parse_manifest(&source, &manifest)?;
        let splits: BTreeSet<&str> = parsed.shards.iter().map(|s| s.dataset_split.as_str()).collect();
        if !splits.contains(options.split.as_str()) {
            let valid = splits.into_iter().collect::<Vec<_>>().join(", ");
            return Err(ReadError::Usage(format!(
                "{}: got split {:?}, valid: {valid}",
                source.display_name(""),
                options.split
            )));
        }
        if let Some(cache) = &options.disk_cache {
            source.with_disk_cache(cache, &parsed.job_hash)?;
        }
        let shards: Arc<[Shard]> =
            parsed.shards.into_iter().filter(|s| s.dataset_split == options.split && s.rows > 0).collect();
        let mut starts = vec![0];
        starts.extend(shards.iter().scan(0, |end, shard| {
            *end += shard.rows;
            Some(*end)
        }));
        Ok(Self {
            url: url.to_owned(),
            options,
            manifest: manifest.into(),
            job_hash: parsed.job_hash,
            length: parsed.job.pack.length.max(1),
            shards,
            starts: starts.into(),
            columns: parsed.columns.into_iter().filter(ColumnSpec::is_in_batches).collect(),
            state: PerProcess::new(),
        })
    }

    /// Returns the same data set with a selection of its columns, in the given order.
    ///
    /// # Errors
    /// If a column does not exist.
    pub fn select_columns(&self, names: &[String]) -> Result<Self> {
        let find = |name: &String| {
            self.columns.iter().find(|c| c.name == *name).cloned().ok_or_else(|| {
                let valid = self.columns.iter().map(|c| c.name.as_str()).collect::<Vec<_>>().join(", ");
                let text = if name == DOCUMENT_FIELDS { ". It is text; read it with pyarrow or DuckDB" } else { "" };
                ReadError::Column(format!("{}: got column {name:?}, valid: {valid}{text}", self.url))
            })
        };
        Ok(Self {
            url: self.url.clone(),
            options: self.options.clone(),
            manifest: Arc::clone(&self.manifest),
            job_hash: self.job_hash.clone(),
            length: self.length,
            shards: Arc::clone(&self.shards),
            starts: Arc::clone(&self.starts),
            columns: names.iter().map(find).collect::<Result<_>>()?,
            state: PerProcess::new(),
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> u64 {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Number of positions of the longest row, L.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Number of rows of a block: a power of two that depends only on L.
    pub fn block_rows(&self) -> u64 {
        let fit = (BLOCK_TOKENS / self.length).clamp(1, MAX_BLOCK_ROWS);
        1 << fit.ilog2()
    }

    /// The selected columns.
    pub fn columns(&self) -> &[ColumnSpec] {
        &self.columns
    }

    /// Text of `manifest.json`.
    pub fn manifest(&self) -> &str {
        &self.manifest
    }

    /// Hash of everything that determines the bytes of the shards.
    pub fn job_hash(&self) -> &str {
        &self.job_hash
    }

    /// Name of the data set split.
    pub fn split(&self) -> &str {
        &self.options.split
    }

    /// Reads rows in the given order; a row may occur several times.
    ///
    /// Memory: the rows and their blocks. If the blocks do not fit into the cache, the rows are read by their pages
    /// instead.
    ///
    /// # Errors
    /// If a row does not exist, or a shard cannot be read.
    pub async fn read(self: &Arc<Self>, rows: &[u64], reading: ReadMode) -> Result<Vec<Column>> {
        if let Some(row) = rows.iter().find(|&&row| row >= self.rows()) {
            return Err(ReadError::Usage(format!("{}: got row {row}, valid: below {}", self.url, self.rows())));
        }

        let mut by_block: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
        for &row in rows {
            by_block.entry(row / self.block_rows()).or_default().insert(row);
        }
        let blocks = by_block.len() as u64;
        let fits =
            reading != ReadMode::Rows && self.fit_in_cache(blocks.max(MIN_CACHED_BLOCKS) * self.block_rows()).await?;
        let (whole, single_rows): (Vec<_>, Vec<_>) = by_block.into_iter().partition(|(block, rows)| {
            fits && (reading == ReadMode::Blocks || self.should_read_block(*block, rows.len()))
        });
        let single_rows = single_rows.into_iter().flat_map(|(_, rows)| rows);

        let blocks = futures::stream::iter(whole.into_iter().map(|(block, _)| self.spawn_block(block)));
        let blocks = blocks.buffer_unordered(MAX_CONCURRENT_READS).try_collect::<HashMap<_, _>>();
        let (blocks, single_rows) = futures::try_join!(blocks, self.read_single(single_rows))?;

        let find = |row: &u64| {
            let in_block = blocks.get(&(row / self.block_rows())).and_then(|block| block.row(*row));
            in_block.or_else(|| single_rows.get(row).map(|(batch, row)| RowRef { batch, row: *row })).ok_or_else(|| {
                ReadError::DataSet(format!("{}: row {row} is in no shard; `stillhouse verify` checks them", self.url))
            })
        };
        let found = rows.iter().map(find).collect::<Result<Vec<_>>>()?;
        self.columns.iter().map(|spec| gather(spec, &found)).collect()
    }

    /// Reads a block into the cache, in another task.
    pub(crate) fn prefetch(self: &Arc<Self>, block: u64) -> tokio::task::JoinHandle<Result<()>> {
        let this = Arc::clone(self);
        tokio::spawn(async move { this.block(block).await.map(|_| ()) })
    }

    /// Drops a block from the cache.
    pub(crate) fn release(&self, block: u64) {
        self.state().blocks.release(block);
    }

    /// Whether another block fits into the cache.
    pub(crate) fn fits_another_block(&self) -> bool {
        self.state().blocks.fits_another()
    }

    /// Whether `rows` rows fit into the cache, estimated from the largest row of a small sample.
    pub(crate) async fn fit_in_cache(&self, rows: u64) -> Result<bool> {
        let measure = || async {
            let last = self.rows() - 1;
            let sample = BTreeSet::from([0, last / 3, last / 3 * 2, last]);
            let found = self.read_single(sample.into_iter()).await?;
            Ok::<_, ReadError>(
                found.values().map(|(batch, row)| logical_bytes(&batch.slice(*row, 1))).max().unwrap_or(0),
            )
        };
        if self.rows() == 0 {
            return Ok(true);
        }
        let each = *self.state().row_bytes.get_or_try_init(measure).await?;
        Ok(rows.saturating_mul(each as u64) <= self.options.cache_bytes as u64)
    }

    /// Checks the size and SHA-256 of every shard of this split.
    ///
    /// # Errors
    /// For the first shard that does not match or cannot be read.
    pub async fn verify(&self) -> Result<()> {
        let source = self.state().source.as_ref().map_err(Clone::clone)?;
        for shard in self.shards.iter() {
            let failed = |e: &object_store::Error| source.explain_error(e, &shard.path);
            let mut stream =
                source.store.get(&Path::from(shard.path.as_str())).await.map_err(|e| failed(&e))?.into_stream();
            let (mut hash, mut bytes) = (Sha256::new(), 0u64);
            while let Some(chunk) = stream.try_next().await.map_err(|e| failed(&e))? {
                bytes += chunk.len() as u64;
                hash.update(&chunk);
            }
            let sum = hex::encode(hash.finalize());
            if bytes != shard.bytes || sum != shard.sha256 {
                return Err(ReadError::DataSet(format!(
                    "{}: has {bytes} bytes and sha256 {sum}, the manifest says {} and {}; copy it again",
                    source.display_name(&shard.path),
                    shard.bytes,
                    shard.sha256
                )));
            }
        }
        Ok(())
    }

    fn state(&self) -> &ProcessState {
        self.state.get_or_init(|| {
            let (source, warning) = self.source();
            ProcessState {
                source,
                warning: Mutex::new(warning),
                footers: Cache::new(FOOTER_CACHE_BYTES),
                blocks: Cache::new(self.options.cache_bytes),
                recent_single_reads: Mutex::default(),
                row_bytes: OnceCell::new(),
            }
        })
    }

    /// Opens the source, through the disk cache if possible. The cache worked when the data set was opened, so its
    /// failure is only a warning now.
    fn source(&self) -> (Result<Source>, Option<String>) {
        let source = Source::open(&self.url, &self.options.storage);
        let (Ok(source), Some(cache)) = (&source, &self.options.disk_cache) else { return (source, None) };
        match source.clone().with_disk_cache(cache, &self.job_hash) {
            Ok(cached) => (Ok(cached), None),
            Err(e) => (Ok(source.clone()), Some(format!("{e}; reading continues without it"))),
        }
    }

    /// Returns the first failure of the disk cache. Returns it once. The data read is correct in any case.
    pub fn take_warning(&self) -> Option<String> {
        self.options.disk_cache.as_ref()?;
        let state = self.state();
        let reported = state.warning.lock().unwrap_or_else(PoisonError::into_inner).take();
        reported.or_else(|| state.source.as_ref().ok()?.take_warning())
    }

    fn should_read_block(&self, block: u64, rows: usize) -> bool {
        let state = self.state();
        let is_many = rows as u64 * 4 >= self.block_rows();
        is_many
            || state.blocks.contains(block)
            || state.recent_single_reads.lock().unwrap_or_else(PoisonError::into_inner).record(block)
    }

    async fn spawn_block(self: &Arc<Self>, number: u64) -> Result<(u64, Arc<Block>)> {
        let this = Arc::clone(self);
        let task = tokio::spawn(async move { this.block(number).await });
        Ok((number, task.await.map_err(|e| ReadError::Usage(format!("reading stopped: {e}")))??))
    }

    async fn block(&self, number: u64) -> Result<Arc<Block>> {
        self.state()
            .blocks
            .get_or_load(number, || async move {
                let (start, end) = (number * self.block_rows(), ((number + 1) * self.block_rows()).min(self.rows()));
                let mut block = Block::default();
                for (shard, local) in self.split_by_shard(start..end) {
                    let first = self.starts[shard] + local.start;
                    block.push(first, self.read_shard(shard, &[local]).await?);
                }
                Ok(block)
            })
            .await
    }

    /// Reads single rows through the pages that contain them.
    async fn read_single(&self, rows: impl Iterator<Item = u64>) -> Result<HashMap<u64, (RecordBatch, usize)>> {
        let mut by_shard: BTreeMap<usize, Vec<u64>> = BTreeMap::new();
        for row in rows {
            by_shard.entry(self.shard_of(row)).or_default().push(row);
        }
        let read = |(shard, rows): (usize, Vec<u64>)| async move {
            let ranges: Vec<Range<u64>> =
                rows.iter().map(|row| row - self.starts[shard]).map(|local| local..local + 1).collect();
            let batches = self.read_shard(shard, &ranges).await?;
            let batch_rows =
                batches.into_iter().flat_map(|batch| (0..batch.num_rows()).map(move |i| (batch.clone(), i)));
            Ok::<_, ReadError>(rows.into_iter().zip(batch_rows).collect::<Vec<_>>())
        };
        let found: Vec<Vec<_>> = futures::stream::iter(by_shard.into_iter().map(read))
            .buffer_unordered(MAX_CONCURRENT_READS)
            .try_collect()
            .await?;
        Ok(found.into_iter().flatten().collect())
    }

    async fn read_shard(&self, shard: usize, ranges: &[Range<u64>]) -> Result<Vec<RecordBatch>> {
        let (state, start) = (self.state(), Instant::now());
        let read = self.read_shard_once(shard, ranges).await;
        // the disk cache has its own checksums, but its bytes may have been damaged before they were stored, or the
        // store's copy was repaired since
        if let (Err(ReadError::DataSet(_)), Ok(source)) = (&read, &state.source)
            && source.drop_cached(&self.shards[shard].path, start).await
        {
            state.footers.release(shard as u64);
            return self.read_shard_once(shard, ranges).await;
        }
        read
    }

    async fn read_shard_once(&self, shard: usize, ranges: &[Range<u64>]) -> Result<Vec<RecordBatch>> {
        let state = self.state();
        let source = state.source.as_ref().map_err(Clone::clone)?;
        let record = &self.shards[shard];
        let footer = state
            .footers
            .get_or_load(shard as u64, || async { Footer::load(source, record).await.map(CachedFooter) })
            .await?;
        footer.0.read(source, record, &self.columns, ranges).await
    }

    fn shard_of(&self, row: u64) -> usize {
        self.starts.partition_point(|&start| start <= row).saturating_sub(1)
    }

    /// Splits a range of rows of the data set into ranges of rows of its shards.
    fn split_by_shard(&self, rows: Range<u64>) -> impl Iterator<Item = (usize, Range<u64>)> {
        (self.shard_of(rows.start)..self.shards.len()).map_while(move |shard| {
            let (begin, end) = (self.starts[shard], self.starts[shard + 1]);
            let (from, to) = (rows.start.max(begin), rows.end.min(end));
            (from < to).then(|| (shard, from - begin..to - begin))
        })
    }
}

/// Blocks of which a single row was read recently.
#[derive(Debug, Default)]
struct RecentSingleReads {
    when: HashMap<u64, u64>,
    by_time: BTreeMap<u64, u64>,
    clock: u64,
}

impl RecentSingleReads {
    /// Records that a row of the block is read. Returns whether this happened before.
    fn record(&mut self, block: u64) -> bool {
        self.clock += 1;
        let before = self.when.insert(block, self.clock);
        if let Some(before) = before {
            self.by_time.remove(&before);
        }
        self.by_time.insert(self.clock, block);
        if self.by_time.len() > MAX_RECENT_SINGLE_READS
            && let Some((_, oldest)) = self.by_time.pop_first()
        {
            self.when.remove(&oldest);
        }
        before.is_some()
    }
}

impl DataSet {
    /// Reads a whole file beside the shards that has a checksum in the manifest: `tokenizer.json`, or a file listed in
    /// `read_sidecar_file`.
    ///
    /// # Errors
    /// If the manifest does not list the file, if it is missing, or if its checksum differs.
    pub async fn read_sidecar_file(&self, name: &str) -> Result<Bytes> {
        let source = Source::open(&self.url, &self.options.storage)?;
        let parsed = parse_manifest(&source, &self.manifest)?;
        let mut sums = parsed.sidecar_files;
        // rows of numbers have no tokenizer
        if !parsed.tokenizer.sha256.is_empty() {
            sums.insert(TOKENIZER_FILE.to_owned(), parsed.tokenizer.sha256);
        }
        let Some(expected) = sums.get(name) else {
            let valid: Vec<&str> = sums.keys().map(String::as_str).collect();
            let valid =
                if valid.is_empty() { "there is none".to_owned() } else { format!("valid: {}", valid.join(", ")) };
            return Err(ReadError::Usage(format!("{}: got the file {name:?}, {valid}", source.display_name(""))));
        };
        let shown = source.display_name(name);
        let bytes = source.get(name).await?.ok_or_else(|| {
            ReadError::DataSet(format!(
                "{shown}: is missing, though the manifest lists it; copy the data set again (`stillhouse export`)"
            ))
        })?;
        let sum = hex::encode(Sha256::digest(&bytes));
        if sum != *expected {
            return Err(ReadError::DataSet(format!(
                "{shown}: is damaged: it has sha256 {sum}, the manifest says {expected}; copy it again, or `stillhouse repair` the data set"
            )));
        }
        Ok(bytes)
    }
}

const TOKENIZER_FILE: &str = "tokenizer.json";

/// Memory size of the values themselves, in bytes.
fn logical_bytes(batch: &RecordBatch) -> usize {
    batch.columns().iter().map(|column| column.to_data().get_slice_memory_size().unwrap_or(0)).sum()
}

/// Reads the manifest of a finished data set, and checks that this version can read it.
async fn read_manifest(source: &Source) -> Result<String> {
    let shown = source.display_name("manifest.json");
    let Some(bytes) = source.get("manifest.json").await? else {
        let unfinished = source.get("_stillhouse/plan.json").await?.is_some();
        let why = match unfinished {
            true => "the job is not finished; `stillhouse run` with its job file resumes it",
            false => "not a Stillhouse data set (no manifest.json); give the folder that the job's output.path names",
        };
        return Err(ReadError::DataSet(format!("{}: {why}", source.display_name(""))));
    };
    let text = String::from_utf8(bytes.to_vec()).map_err(|e| ReadError::DataSet(format!("{shown}: {e}")))?;
    let json: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| ReadError::DataSet(format!("{shown}: is damaged: {e}; copy it again")))?;
    match json.get("format_version").and_then(serde_json::Value::as_u64) {
        Some(version) if version <= u64::from(FORMAT_VERSION) => {}
        Some(version) => {
            return Err(ReadError::DataSet(format!(
                "{shown}: got format_version {version}, this version of the package reads up to {FORMAT_VERSION}; \
                 install a newer stillhouse (pip install -U)"
            )));
        }
        None => {
            return Err(ReadError::DataSet(format!(
                "{shown}: has no format_version; it is not a manifest of Stillhouse"
            )));
        }
    }
    let Some(success) = source.get("_SUCCESS").await? else {
        return Err(ReadError::DataSet(format!(
            "{}: has no _SUCCESS: the job or the copy is not finished; `stillhouse run` the job, or `stillhouse export`, again",
            source.display_name("")
        )));
    };
    let sha256 = hex::encode(Sha256::digest(&bytes));
    // the file is empty in data sets of older versions
    if !success.is_empty() && !success.starts_with(sha256.as_bytes()) {
        return Err(ReadError::DataSet(format!(
            "{shown}: is damaged: it has sha256 {sha256}, _SUCCESS names another; copy it again, or `stillhouse repair` the data set"
        )));
    }
    Ok(text)
}

fn parse_manifest(source: &Source, manifest: &str) -> Result<Manifest> {
    serde_json::from_str(manifest).map_err(|e| {
        ReadError::DataSet(format!("{}: {e}; it is damaged, copy it again", source.display_name("manifest.json")))
    })
}
