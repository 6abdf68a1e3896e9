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
use super::format::{ExportWriter, Format, LeftOut, Unit};
use super::record::{FileRecord, RECORD, Record, check_destination};
use super::rows::{RowReader, go_on, row_length, rows_of_splits};
use super::sparse::{Signal, Sparse, ValueType};
use super::{Counts, ExportOptions, ExportedFile, MARK, Mark, TICK, digest};
use crate::dataset::Dataset;

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

struct Work {
    dataset: Dataset,
    destination: Output,
    conversion: Conversion,
    sparse: Arc<Sparse>,
    writer: Box<dyn ExportWriter>,
    /// sha256 of the source's manifest and of the conversion.
    identity: String,
    manifest_sha256: String,
    /// What is left out of the units so far.
    left_out: Mutex<LeftOut>,
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
        let format = conversion.format.settings();
        let (most, who) = format.most_ids();
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

    /// Everything that is made, in order.
    fn units(&self) -> Vec<Unit> {
        self.writer.units(self.dataset.manifest())
    }

    fn left_out(&self) -> LeftOut {
        let counted = *self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        LeftOut { rows_of_no_iteration: self.writer.rows_of_no_iteration(), ..counted }
    }

    fn count(&self, more: &LeftOut) {
        let mut sum = self.left_out.lock().unwrap_or_else(PoisonError::into_inner);
        sum.rows_of_one_token += more.rows_of_one_token;
        sum.entries_without_token += more.entries_without_token;
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
        for (name, content) in self.small_files(&made)? {
            made.push(self.small(name, content).await?);
        }
        self.destination.remove_mark(MARK).await?;
        Ok(made)
    }

    /// What would be made.
    async fn planned(&self, units: &[Unit]) -> Result<Vec<ExportedFile>> {
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

    /// One unit: what is there stays, what is missing is made.
    async fn unit(&self, unit: Unit, known: &BTreeMap<String, FileRecord>) -> Result<Vec<ExportedFile>> {
        go_on(&self.stop)?;
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
            self.done.there.fetch_add(unit.bytes, Ordering::Relaxed);
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

    async fn small(&self, name: &str, content: Vec<u8>) -> Result<ExportedFile> {
        let (bytes, sha256) = (content.len() as u64, digest(&content));
        let there = self.destination.get(name).await?.is_some_and(|there| digest(&there) == sha256);
        if !there {
            self.destination.put_copy(name, content.into(), &sha256).await?;
        }
        Ok(ExportedFile { name: name.to_owned(), bytes, sha256, there })
    }
}
