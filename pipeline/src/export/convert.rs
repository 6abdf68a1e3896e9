//! `export --format`: a finished data set's log-probabilities in the files of another project's reader.
//!
//! ```text
//!   shards ─ batches ─► entries of each position (sparse) ─► rows of DistillKit ─ Parquet ──┐
//!                                                     └────► iterations of Megatron ─ tars ─┴─► destination, invisible, then placed
//!   order: data/… (several units at once), configuration, README.md, export.json, _SUCCESS last
//! ```
//!
//! A unit is what is made at once: a shard, or some iterations of a split. Its files are there whole or not at all, and the same export makes the
//! same bytes, so an interrupted one goes on with the units that are missing. `export.json` says from what and how, with the sha256 of every file.
//!
//! Memory: per unit a batch of rows, what is encoded of a row group or of one iteration, and the parts of its uploads.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use futures::StreamExt;
use parquet::arrow::ArrowWriter;
use parquet::arrow::async_reader::ParquetRecordBatchStreamBuilder;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stillhouse_reader::ShardFile;

use super::distillkit::{self, Rows};
use super::files::Files;
use super::megatron::{self, Batches, Filling, MegatronRun, Meta};
use super::record::{FileRecord, RECORD, Record, check_destination};
use super::rows::{RowReader, row_length, rows_of_splits};
use super::sparse::{Entries, Signal, Sparse, ValueType};
use super::{Counts, ExportOptions, ExportedFile, MARK, Mark, TICK, digest};
use crate::dataset::Dataset;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::output::{CARD, MANIFEST, Output, SUCCESS};

/// What a file of DistillKit's says of what is not in it: key of its Parquet metadata.
const LEFT_OUT: &str = "stillhouse.left_out";
/// Bytes of a row group before compression.
const ROW_GROUP_BYTES: usize = 16 << 20;

/// A reader that the data are for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// Captured logits of arcee-ai/DistillKit.
    DistillKit,
    /// Cached logits of NVIDIA/Megatron-LM.
    MegatronKd(MegatronRun),
}

/// What is written, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conversion {
    /// For which reader.
    pub format: Format,
    /// Which columns; the first there is of [`Signal::ALL`] where nobody says.
    pub signal: Option<Signal>,
    /// The type of the log-probabilities.
    pub dtype: ValueType,
}

/// What could not be written, by why.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Rows at the end of a split that fill no global batch.
    pub rows_of_no_iteration: u64,
    /// Rows of one token, of which no other one is predicted.
    pub rows_of_one_token: u64,
    /// Entries whose id has no token.
    pub entries_without_token: u64,
}

/// What a conversion did, or would do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Converted {
    /// From where.
    pub source: String,
    /// To where.
    pub destination: String,
    /// Which columns it took.
    pub signal: Signal,
    /// Entries of a position.
    pub entries: usize,
    /// Every file. Of those that would be made, the size is an estimate before compression and there is no sha256.
    pub files: Vec<ExportedFile>,
    /// What is not in it.
    pub left_out: LeftOut,
    /// Whether nothing was written.
    pub dry_run: bool,
    /// Seconds it took.
    pub seconds: f64,
}

/// Writes a finished data set for another reader.
///
/// # Errors
/// When the source is no finished data set, is damaged or lacks what the reader takes, when the destination holds anything else, when one of
/// them fails. What is written stays; the same call goes on.
pub async fn convert(
    source: Output,
    destination: Output,
    conversion: Conversion,
    options: ExportOptions,
    observer: &dyn Observer,
) -> Result<Converted> {
    let began = Instant::now();
    if !destination.is_listed() {
        return Err(destination.read_only());
    }
    let dataset = Dataset::open(source).await?;
    let work = Work::of(dataset, destination, conversion).await?;
    check_destination(&work.destination, &work.identity).await?;
    let made_folder = !work.destination.has_folder().await;
    let mut work = work;
    let lock = match options.dry_run {
        true => None,
        false => {
            work.destination = work.destination.create(observer).await?;
            let lock = work.destination.lock(observer).await?;
            // another export may have been here while this one waited
            if let Err(e) = check_destination(&work.destination, &work.identity).await {
                lock.release().await;
                return Err(e);
            }
            Some(lock)
        }
    };
    let work = Arc::new(work);
    let files = Arc::clone(&work).all(options, observer).await;
    if files.is_err() && !options.dry_run {
        work.destination.remove_export_if_empty(made_folder).await;
    }
    if let Some(lock) = lock {
        lock.release().await;
    }
    let files = files?;
    Ok(Converted {
        source: work.dataset.shown(""),
        destination: work.destination.to_string(),
        signal: work.sparse.signal,
        entries: work.sparse.width,
        files,
        left_out: work.left_out(),
        dry_run: options.dry_run,
        seconds: began.elapsed().as_secs_f64(),
    })
}

/// What is made at once.
#[derive(Debug, Clone)]
struct Unit {
    split: String,
    /// Rows of the split, in the order of its shards.
    rows: Range<u64>,
    /// The files that they become.
    files: Vec<String>,
    /// Bytes of the data set that are read for it, about.
    bytes: u64,
    /// Their number in the split, where there are iterations.
    iteration: u64,
}

enum Target {
    DistillKit { bits: u32 },
    Megatron { batches: Batches, metas: BTreeMap<String, Meta> },
}

struct Work {
    dataset: Dataset,
    destination: Output,
    conversion: Conversion,
    sparse: Sparse,
    target: Target,
    /// sha256 of the source's manifest and of the conversion.
    identity: String,
    manifest_sha256: String,
    rows_of_no_iteration: u64,
    short: AtomicU64,
    without_token: AtomicU64,
    /// Set when a unit has failed: the others end at their next rows.
    stop: AtomicBool,
    done: Arc<Counts>,
}

impl Work {
    async fn of(dataset: Dataset, destination: Output, conversion: Conversion) -> Result<Self> {
        let place = dataset.shown("");
        let unusable = |what: String| PipelineError::new(ErrorKind::Usage, format!("{place}: {what}"));
        let manifest_bytes = dataset.output().get(MANIFEST).await?.unwrap_or_default();
        let manifest_sha256 = digest(&manifest_bytes);
        let how = serde_json::to_vec(&conversion).map_err(PipelineError::dataset("the export"))?;
        let identity = digest(&[manifest_sha256.as_bytes(), &how].concat());
        let manifest = dataset.manifest();
        let vocab = manifest.vocab_size;
        let (most, who) = match &conversion.format {
            Format::DistillKit => (distillkit::MOST_IDS, "DistillKit's compressor counts the bits of an id in f32"),
            Format::MegatronKd(_) => (megatron::MOST_IDS, "Megatron-LM's reader has ids of 17 bits"),
        };
        if vocab > most {
            return Err(unusable(format!("vocab_size: got {vocab}, valid up to {most}: {who}")));
        }
        let ids = match &conversion.format {
            // the trainer cuts its logits off behind the last token, and an entry behind would end it
            Format::DistillKit => {
                let last = dataset.tokenizer().await?.get_vocab(true).into_values().max();
                last.map_or(vocab, |last| vocab.min(u64::from(last) + 1))
            }
            Format::MegatronKd(_) => vocab,
        };
        let sparse =
            Sparse::of(manifest, conversion.signal, u32::try_from(ids).unwrap_or(u32::MAX)).map_err(unusable)?;
        let (target, rows_of_no_iteration) = match &conversion.format {
            Format::DistillKit => (Target::DistillKit { bits: distillkit::bits(vocab) }, 0),
            Format::MegatronKd(run) => {
                let batches = Batches::of(run, row_length(manifest), &sparse, conversion.dtype).map_err(unusable)?;
                let (mut metas, mut rest) = (BTreeMap::new(), 0);
                for (split, rows) in rows_of_splits(manifest) {
                    let iterations = rows / u64::from(run.global_batch);
                    rest += rows % u64::from(run.global_batch);
                    metas.insert(split, Arc::new(batches.meta(iterations, &sparse).map_err(unusable)?));
                }
                (Target::Megatron { batches, metas }, rest)
            }
        };
        let work = Self {
            dataset,
            destination,
            conversion,
            sparse,
            target,
            identity,
            manifest_sha256,
            rows_of_no_iteration,
            short: AtomicU64::new(0),
            without_token: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            done: Arc::default(),
        };
        if work.units().is_empty() {
            return Err(unusable(format!(
                "{} rows in its largest split, which fill no iteration of --global-batch",
                rows_of_splits(work.dataset.manifest()).values().max().copied().unwrap_or(0)
            )));
        }
        Ok(work)
    }

    /// Everything that is made, in order.
    fn units(&self) -> Vec<Unit> {
        let shards = &self.dataset.manifest().shards;
        match &self.target {
            Target::DistillKit { .. } => {
                let mut rows = BTreeMap::<&str, u64>::new();
                let units = shards.iter().map(|shard| {
                    let begin = rows.entry(&shard.dataset_split).or_default();
                    let range = *begin..*begin + shard.rows;
                    *begin = range.end;
                    Unit {
                        split: shard.dataset_split.clone(),
                        rows: range,
                        files: vec![shard.path.clone()],
                        bytes: shard.bytes,
                        iteration: 0,
                    }
                });
                units.collect()
            }
            Target::Megatron { batches, .. } => {
                let global = u64::from(batches.run.global_batch);
                let each = u64::from(batches.run.iterations_per_file.max(1));
                let mut units = Vec::new();
                for (split, rows) in rows_of_splits(self.dataset.manifest()) {
                    let bytes: u64 = shards.iter().filter(|s| s.dataset_split == split).map(|s| s.bytes).sum();
                    let iterations = rows / global;
                    let mut first = 0;
                    while first < iterations {
                        let count = each.min(iterations - first);
                        units.push(Unit {
                            split: split.clone(),
                            rows: first * global..(first + count) * global,
                            files: batches.names(&split, first, count),
                            bytes: (bytes as f64 * (count * global) as f64 / rows.max(1) as f64) as u64,
                            iteration: first,
                        });
                        first += count;
                    }
                }
                units
            }
        }
    }

    fn left_out(&self) -> LeftOut {
        LeftOut {
            rows_of_no_iteration: self.rows_of_no_iteration,
            rows_of_one_token: self.short.load(Ordering::Relaxed),
            entries_without_token: self.without_token.load(Ordering::Relaxed),
        }
    }

    async fn all(self: Arc<Self>, options: ExportOptions, observer: &dyn Observer) -> Result<Vec<ExportedFile>> {
        let units = self.units();
        let files = units.iter().map(|unit| unit.files.len() as u64).sum::<u64>();
        let bytes = units.iter().map(|unit| unit.bytes).sum::<u64>();
        if options.dry_run {
            return self.planned(&units).await;
        }
        let before = self.destination.get_json::<Record>(RECORD).await?;
        self.destination.put_json(MARK, &Mark { manifest_sha256: self.identity.clone() }).await?;
        self.destination.remove_leftovers().await?;
        self.destination.abort_uploads(false).await?;
        observer.event(&Event::ExportStarted { destination: self.destination.to_string(), files, bytes });
        let known = Arc::new(before.map(|record| record.files).unwrap_or_default());
        let making = futures::stream::iter(units)
            .map(|unit| {
                let (work, known) = (Arc::clone(&self), Arc::clone(&known));
                let made = tokio::spawn(async move { work.unit(unit, &known).await });
                async move {
                    let stopped =
                        |e| PipelineError::caused(ErrorKind::Output, "an export stopped: a fault of this program", e);
                    made.await.map_err(stopped)?
                }
            })
            .buffered(options.at_once.max(1));
        tokio::pin!(making);
        let mut ticks = tokio::time::interval(TICK);
        let (mut made, mut failure) = (Vec::new(), None);
        // those at work when one fails are waited for: nothing is written once this has returned
        loop {
            tokio::select! {
                unit = making.next() => match unit {
                    None => break,
                    Some(Ok(files)) => made.extend(files),
                    Some(Err(e)) => {
                        self.stop.store(true, Ordering::Relaxed);
                        failure.get_or_insert(e);
                    }
                },
                _ = ticks.tick() => self.done.report(files, bytes, observer),
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        self.done.report(files, bytes, observer);
        for (name, content) in self.beside(&made)? {
            made.push(self.small(name, content).await?);
        }
        self.destination.remove_mark(MARK).await?;
        Ok(made)
    }

    /// What would be made.
    async fn planned(&self, units: &[Unit]) -> Result<Vec<ExportedFile>> {
        let position = match &self.target {
            Target::DistillKit { bits } => self.rows(*bits).position_bytes() + 8,
            Target::Megatron { .. } => self.sparse.width * (self.conversion.dtype.bytes() + 3),
        };
        let length = row_length(self.dataset.manifest()).saturating_sub(1);
        let mut files = Vec::new();
        for unit in units {
            let bytes = (unit.rows.end - unit.rows.start) * (length * position) as u64 / unit.files.len().max(1) as u64;
            for name in &unit.files {
                let there = self.destination.exists(name).await?;
                files.push(ExportedFile { name: name.clone(), bytes, sha256: String::new(), there });
            }
        }
        Ok(files)
    }

    /// One unit: what is there stays, what is missing is made.
    async fn unit(&self, unit: Unit, known: &BTreeMap<String, FileRecord>) -> Result<Vec<ExportedFile>> {
        self.still_wanted()?;
        let mut there = Vec::new();
        for name in &unit.files {
            let Some(copied) = self.destination.copied(name).await? else { break };
            let sha256 = self.destination.read_whole(name, |_| {}).await?.0;
            if known.get(name).is_some_and(|file| file.sha256 != sha256) {
                let message = format!("{}: is there with other content; remove it first", self.destination.shown(name));
                return Err(PipelineError::new(ErrorKind::Output, message));
            }
            there.push(ExportedFile { name: name.clone(), bytes: copied.bytes, sha256, there: true });
        }
        if there.len() == unit.files.len() {
            self.count_again(&there).await?;
            self.done.bytes.fetch_add(unit.bytes, Ordering::Relaxed);
            self.done.there.fetch_add(unit.bytes, Ordering::Relaxed);
            self.done.files.fetch_add(unit.files.len() as u64, Ordering::Relaxed);
            return Ok(there);
        }
        let mut files = Files::begin(&self.destination, &unit.files, unit.bytes).await?;
        let written = match &self.target {
            Target::DistillKit { bits } => self.parquet(&unit, *bits, &mut files).await,
            Target::Megatron { batches, metas } => {
                let meta = metas.get(&unit.split).map(|meta| meta.as_slice()).unwrap_or_default();
                self.tars(&unit, batches, meta, &mut files).await
            }
        };
        match written {
            Ok(()) => {
                let made = files.place().await?;
                self.done.files.fetch_add(made.len() as u64, Ordering::Relaxed);
                Ok(made)
            }
            Err(e) => {
                files.abort().await;
                Err(e)
            }
        }
    }

    fn still_wanted(&self) -> Result<()> {
        match self.stop.load(Ordering::Relaxed) {
            true => Err(PipelineError::new(ErrorKind::Output, "stopped: another file of the export has failed")),
            false => Ok(()),
        }
    }

    fn reader(&self, unit: &Unit) -> RowReader<'_> {
        RowReader::new(&self.dataset, &self.sparse, &self.done, &unit.split, &unit.rows, unit.bytes)
    }

    fn rows(&self, bits: u32) -> Rows<'_> {
        Rows { sparse: &self.sparse, dtype: self.conversion.dtype, bits }
    }

    async fn parquet(&self, unit: &Unit, bits: u32, files: &mut Files) -> Result<()> {
        let rows = self.rows(bits);
        let failed =
            |e: ParquetError| PipelineError::caused(ErrorKind::Output, files_shown(&self.destination, unit), e);
        let level = self.dataset.manifest().job.output.zstd_level;
        let properties = WriterProperties::builder()
            .set_created_by(concat!("stillhouse ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_compression(Compression::ZSTD(ZstdLevel::try_new(level).unwrap_or_default()))
            .set_max_row_group_row_count(None)
            .build();
        let mut writer = ArrowWriter::try_new(Vec::new(), rows.schema(), Some(properties)).map_err(failed)?;
        let mut entries = Entries::new(&self.sparse);
        let (mut short, mut waiting) = (0, 0);
        let mut reader = self.reader(unit);
        while let Some((batch, shard)) = reader.next().await? {
            self.still_wanted()?;
            let damaged = |e: String| PipelineError::new(ErrorKind::DataSet, format!("{shard}: {e}"));
            let read = self.sparse.batch(&batch).map_err(|e| damaged(e.to_string()))?;
            let (made, none) = rows.encode(&read, &mut entries).map_err(damaged)?;
            short += none;
            waiting += made.get_array_memory_size();
            writer.write(&made).map_err(failed)?;
            if waiting > ROW_GROUP_BYTES {
                waiting = 0;
                writer.flush().map_err(failed)?;
                writer.sync().map_err(PipelineError::output("a row group"))?;
                files.put(0, std::mem::take(writer.inner_mut())).await?;
            }
        }
        let left_out =
            LeftOut { rows_of_one_token: short, entries_without_token: entries.left_out, ..LeftOut::default() };
        let text = serde_json::to_string(&left_out).map_err(PipelineError::dataset(LEFT_OUT))?;
        writer.append_key_value_metadata(KeyValue::new(LEFT_OUT.to_owned(), text));
        writer.finish().map_err(failed)?;
        files.put(0, std::mem::take(writer.inner_mut())).await?;
        self.count(&left_out);
        Ok(())
    }

    fn count(&self, left_out: &LeftOut) {
        self.short.fetch_add(left_out.rows_of_one_token, Ordering::Relaxed);
        self.without_token.fetch_add(left_out.entries_without_token, Ordering::Relaxed);
    }

    /// What was left out of files that are there: they say it, so that an export that was interrupted ends as one that was not.
    async fn count_again(&self, there: &[ExportedFile]) -> Result<()> {
        if !matches!(self.target, Target::DistillKit { .. }) {
            return Ok(());
        }
        for file in there {
            let shown = self.destination.shown(&file.name);
            let reader = ShardFile::new(self.destination.store(), &file.name, file.bytes, None);
            let opened = ParquetRecordBatchStreamBuilder::new(reader).await;
            let opened = opened.map_err(PipelineError::dataset(shown.clone()))?;
            let entries = opened.metadata().file_metadata().key_value_metadata();
            let said = entries.and_then(|entries| entries.iter().find(|entry| entry.key == LEFT_OUT));
            let Some(text) = said.and_then(|entry| entry.value.as_ref()) else {
                let message = format!("{shown}: is there with other content; remove it first");
                return Err(PipelineError::new(ErrorKind::Output, message));
            };
            self.count(&serde_json::from_str(text).map_err(PipelineError::dataset(shown))?);
        }
        Ok(())
    }

    async fn tars(&self, unit: &Unit, batches: &Batches, meta: &[u8], files: &mut Files) -> Result<()> {
        for rank in 0..unit.files.len() {
            files.put(rank, megatron::tar_member(megatron::META, meta)).await?;
        }
        let mut filling = Filling::new(batches, &self.sparse);
        let mut iteration = unit.iteration;
        let mut reader = self.reader(unit);
        while let Some((batch, shard)) = reader.next().await? {
            self.still_wanted()?;
            let damaged = |e: String| PipelineError::new(ErrorKind::DataSet, format!("{shard}: {e}"));
            let read = self.sparse.batch(&batch).map_err(|e| damaged(e.to_string()))?;
            for number in 0..read.len() {
                let made = filling.row(&read, number).map_err(|e| damaged(format!("row {number} of a batch {e}")))?;
                for (rank, file) in made.into_iter().flatten().enumerate() {
                    files.put(rank, megatron::tar_member(&megatron::member(iteration), &file)).await?;
                    iteration += u64::from(rank + 1 == unit.files.len());
                }
            }
        }
        for rank in 0..unit.files.len() {
            files.put(rank, megatron::TAR_END.to_vec()).await?;
        }
        Ok(())
    }

    /// The small files, `_SUCCESS` last.
    fn beside(&self, made: &[ExportedFile]) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let manifest = self.dataset.manifest();
        let mut small = Vec::new();
        match &self.target {
            Target::DistillKit { .. } => {
                let config = distillkit::config(manifest.vocab_size, self.sparse.width, self.conversion.dtype);
                let splits: Vec<String> = rows_of_splits(manifest).into_keys().collect();
                small.push((CARD, distillkit::card(&splits, &config, self.sparse.given).into_bytes()));
                small.push((distillkit::CONFIG, config.into_bytes()));
            }
            Target::Megatron { batches, .. } => {
                let global = u64::from(batches.run.global_batch);
                let iterations: Vec<(String, u64)> = (rows_of_splits(manifest).into_iter())
                    .map(|(split, rows)| (split, rows / global))
                    .filter(|(_, iterations)| *iterations > 0)
                    .collect();
                small.push((CARD, megatron::card(batches, self.sparse.signal, &iterations).into_bytes()));
            }
        }
        let record = Record {
            conversion: self.conversion.clone(),
            signal: self.sparse.signal,
            entries: self.sparse.width,
            source: json!({
                "name": manifest.job.name,
                "job_hash": manifest.job_hash,
                "manifest_sha256": self.manifest_sha256,
                "export_sha256": self.identity,
            }),
            left_out: self.left_out(),
            files: (made.iter())
                .map(|file| (file.name.clone(), FileRecord { bytes: file.bytes, sha256: file.sha256.clone() }))
                .collect(),
        };
        let record = serde_json::to_vec_pretty(&record).map_err(PipelineError::dataset(RECORD))?;
        let marker = format!("{}  {RECORD}\n", digest(&record)).into_bytes();
        small.extend([(RECORD, record), (SUCCESS, marker)]);
        Ok(small)
    }

    async fn small(&self, name: &str, content: Vec<u8>) -> Result<ExportedFile> {
        let (bytes, sha256) = (content.len() as u64, digest(&content));
        let there = self.destination.get(name).await?.is_some_and(|there| digest(&there) == sha256);
        if !there {
            self.destination.put_copy(name, content.into(), &sha256).await?;
        }
        Ok(ExportedFile { name: name.to_owned(), bytes, sha256, there })
    }
}

fn files_shown(destination: &Output, unit: &Unit) -> String {
    format!("cannot write {}", destination.shown(unit.files.first().map_or("", String::as_str)))
}
