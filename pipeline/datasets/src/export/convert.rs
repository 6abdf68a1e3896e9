//! `export --format`: writes a finished data set's log-probabilities in the file format of another project.
//!
//! ```text
//!   shards ─ batches ─► entries of each position (sparse) ─► rows of DistillKit ─ Parquet ──┐
//!                                                     └────► iterations of Megatron ─ tars ─┴─► destination, invisible until placed
//!   order: data/… (several units at once), configuration, README.md, export.json, then _SUCCESS
//! ```
//!
//! A unit is a group of files that are written together: those of a shard, or of some iterations of a split. Each file
//! appears whole or not at all. The same export writes the same bytes, so an interrupted export resumes with the
//! missing units. `export.json` records the source, the settings and the sha256 of every file.
//!
//! Memory per unit: a batch of rows, the encoded part of a row group or iteration, and the parts of its uploads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::StreamExt;
use serde::{Deserialize, Serialize};
use serde_json::json;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_output::{MANIFEST, Output, SUCCESS};

use super::files::Files;
use super::formats::{ExportWriter, Format, LeftOut, Unit};
use super::record::{FileRecord, RECORD, Record, check_destination};
use super::rows::{RowReader, check_not_stopped, row_length, rows_of_splits};
use super::sparse::{Signal, Sparse, ValueType};
use super::{Counts, ExportOptions, ExportedFile, MARKER_FILE, Marker, PROGRESS_INTERVAL, digest};
use crate::dataset::Dataset;

/// The target format and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Conversion {
    /// The target format.
    pub format: Format,
    /// The signal to export; `None` means the first of [`Signal::ALL`] that the data set has.
    pub signal: Option<Signal>,
    /// Float type of the log-probabilities.
    pub dtype: ValueType,
}

/// Result of a conversion or of a dry run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Converted {
    /// Source folder.
    pub source: String,
    /// Destination folder.
    pub destination: String,
    /// The signal that was exported.
    pub signal: Signal,
    /// Entries per position.
    pub entries: usize,
    /// Every file. In a dry run, sizes are estimates before compression and the sha256 is empty.
    pub files: Vec<ExportedFile>,
    /// What the conversion left out.
    pub left_out: LeftOut,
    /// Whether this was a dry run, which writes nothing.
    pub dry_run: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Writes a finished data set in another project's format.
///
/// # Errors
/// If the source is not a finished data set, is damaged or lacks the columns, if the destination holds other files, or
/// if reading or writing fails. Written files stay; calling this again resumes.
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
    let work = ConversionJob::prepare(dataset, destination, conversion).await?;
    check_destination(&work.destination, &work.identity).await?;
    let made_folder = !work.destination.has_folder().await;
    let mut work = work;
    let lock = match options.dry_run {
        true => None,
        false => {
            work.destination = work.destination.create(observer).await?;
            let lock = work.destination.lock(observer).await?;
            // another export may have finished while this one waited for the lock
            if let Err(e) = check_destination(&work.destination, &work.identity).await {
                lock.release().await;
                return Err(e);
            }
            Some(lock)
        }
    };
    let work = Arc::new(work);
    let files = Arc::clone(&work).write_all(options, observer).await;
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

struct ConversionJob {
    dataset: Dataset,
    destination: Output,
    conversion: Conversion,
    sparse: Arc<Sparse>,
    writer: Box<dyn ExportWriter>,
    /// sha256 over the source manifest's sha256 and the conversion.
    identity: String,
    manifest_sha256: String,
    /// Sum of what the units left out so far.
    left_out: Mutex<LeftOut>,
    /// Set when a unit fails; the other units then stop at their next batch.
    stop: AtomicBool,
    done: Arc<Counts>,
}

impl ConversionJob {
    async fn prepare(dataset: Dataset, destination: Output, conversion: Conversion) -> Result<Self> {
        let place = dataset.shown("");
        let unusable = |what: String| PipelineError::new(ErrorKind::Usage, format!("{place}: {what}"));
        let manifest_bytes = dataset.output().get(MANIFEST).await?.unwrap_or_default();
        let manifest_sha256 = digest(&manifest_bytes);
        let how = serde_json::to_vec(&conversion).map_err(PipelineError::dataset("the export"))?;
        let identity = digest(&[manifest_sha256.as_bytes(), &how].concat());
        let manifest = dataset.manifest();
        let vocab = manifest.vocab_size;
        let format = conversion.format.settings();
        let (most, who) = format.max_ids();
        if vocab > most {
            return Err(unusable(format!("vocab_size: got {vocab}, valid up to {most}: {who}")));
        }
        let ids = u32::try_from(format.ids(&dataset).await?).unwrap_or(u32::MAX);
        let sparse = Arc::new(Sparse::of(manifest, conversion.signal, ids).map_err(unusable)?);
        let writer = format.writer(manifest, &sparse, conversion.dtype).map_err(unusable)?;
        let work = Self {
            dataset,
            destination,
            conversion,
            sparse,
            writer,
            identity,
            manifest_sha256,
            left_out: Mutex::default(),
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

    /// All units to write, in order.
    fn units(&self) -> Vec<Unit> {
        self.writer.units(self.dataset.manifest())
    }

    fn left_out(&self) -> LeftOut {
        let counted = *self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        LeftOut { incomplete_batch_rows: self.writer.incomplete_batch_rows(), ..counted }
    }

    fn count(&self, more: &LeftOut) {
        let mut sum = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        sum.rows_of_one_token += more.rows_of_one_token;
        sum.entries_without_token += more.entries_without_token;
    }

    async fn write_all(self: Arc<Self>, options: ExportOptions, observer: &dyn Observer) -> Result<Vec<ExportedFile>> {
        let units = self.units();
        let files = units.iter().map(|unit| unit.files.len() as u64).sum::<u64>();
        let bytes = units.iter().map(|unit| unit.bytes).sum::<u64>();
        if options.dry_run {
            return self.planned_files(&units).await;
        }
        let before = self.destination.get_json::<Record>(RECORD).await?;
        self.destination.put_json(MARKER_FILE, &Marker { manifest_sha256: self.identity.clone() }).await?;
        self.destination.remove_leftovers().await?;
        self.destination.abort_uploads(false).await?;
        observer.event(&Event::ExportStarted { destination: self.destination.to_string(), files, bytes });
        let known = Arc::new(before.map(|record| record.files).unwrap_or_default());
        let making = futures::stream::iter(units)
            .map(|unit| {
                let (work, known) = (Arc::clone(&self), Arc::clone(&known));
                let made = tokio::spawn(async move { work.write_unit(unit, &known).await });
                async move {
                    let stopped =
                        |e| PipelineError::caused(ErrorKind::Output, "an export stopped: a bug in this program", e);
                    made.await.map_err(stopped)?
                }
            })
            .buffered(options.at_once.max(1));
        tokio::pin!(making);
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        let (mut made, mut failure) = (Vec::new(), None);
        // after a failure, wait for the running units: nothing may be written after this function returns
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
        for (name, content) in self.small_files(&made)? {
            made.push(self.write_small_file(name, content).await?);
        }
        self.destination.delete(MARKER_FILE).await?;
        Ok(made)
    }

    /// The files of a dry run.
    async fn planned_files(&self, units: &[Unit]) -> Result<Vec<ExportedFile>> {
        let position = self.writer.position_bytes();
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

    /// Writes a unit, unless the destination has all of its files.
    async fn write_unit(&self, unit: Unit, known: &BTreeMap<String, FileRecord>) -> Result<Vec<ExportedFile>> {
        check_not_stopped(&self.stop)?;
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
            self.count(&self.writer.left_out_of(&there, &self.destination).await?);
            self.done.bytes.fetch_add(unit.bytes, Ordering::Relaxed);
            self.done.bytes_there.fetch_add(unit.bytes, Ordering::Relaxed);
            self.done.files.fetch_add(unit.files.len() as u64, Ordering::Relaxed);
            return Ok(there);
        }
        let mut files = Files::begin(&self.destination, &unit.files, unit.bytes).await?;
        let rows = RowReader::new(&self.dataset, &self.sparse, (&self.done, &self.stop), &unit);
        match self.writer.write(&unit, rows, &mut files).await {
            Ok(left_out) => {
                let made = files.place().await?;
                self.count(&left_out);
                self.done.files.fetch_add(made.len() as u64, Ordering::Relaxed);
                Ok(made)
            }
            Err(e) => {
                files.abort().await;
                Err(e)
            }
        }
    }

    /// The small files, `_SUCCESS` last.
    fn small_files(&self, made: &[ExportedFile]) -> Result<Vec<(&'static str, Vec<u8>)>> {
        let manifest = self.dataset.manifest();
        let mut small = self.writer.small_files(manifest);
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

    async fn write_small_file(&self, name: &str, content: Vec<u8>) -> Result<ExportedFile> {
        let (bytes, sha256) = (content.len() as u64, digest(&content));
        let there = self.destination.get(name).await?.is_some_and(|there| digest(&there) == sha256);
        if !there {
            self.destination.put_copy(name, content.into(), &sha256).await?;
        }
        Ok(ExportedFile { name: name.to_owned(), bytes, sha256, there })
    }
}
