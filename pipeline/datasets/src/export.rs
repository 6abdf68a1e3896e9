//! `export`: copies a finished data set to another place and checks every byte on the way.
//!
//! ```text
//!   source ─ 8 MB ranges ─► sha256 ─ parts ─► destination, not yet visible ─ if the sha256 matches the manifest ─► visible
//!   order: data/*.parquet (several at once), tokenizer.json, README.md, manifest.json, plan.json, then _SUCCESS
//! ```
//!
//! The export verifies the checksum of every file that has one before it copies the file. The manifest holds the
//! checksums of shards, `tokenizer.json` and sidecar files; `_SUCCESS` holds that of the manifest. An edited card is
//! copied with a warning, because people edit cards.
//!
//! A file that the destination already has is not copied again. The check compares the size and the sha256 in the
//! object's metadata; on a disk it hashes the file. So an interrupted export resumes at the first missing file. Readers
//! see a whole shard or none, and `_SUCCESS` appears last.
//!
//! Memory per concurrent file: two ranges read ahead and the parts of its upload (`storage.parts_at_once` + 1).
//!
//! [`convert()`] instead writes the teacher's log-probabilities in the file formats of other projects.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod convert;
mod files;
mod formats;
mod record;
mod rows;
mod sparse;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use stillhouse_operators::registry::sidecar_files;

pub use self::convert::{Conversion, Converted, convert};
pub use self::formats::megatron::{Identity, MegatronOptions, MegatronRun};
pub use self::formats::{Format, FormatName, FormatOptions, LeftOut};
pub use self::sparse::{Signal, ValueType};
use crate::card::{self, CardFault};
use crate::dataset::Dataset;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_output::{CARD, MANIFEST, Output, PlanRecord, SUCCESS, TOKENIZER};

/// Marker file that exists while an export is unfinished.
const MARKER_FILE: &str = "_stillhouse/export.json";
const PLAN: &str = "_stillhouse/plan.json";
const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// Options of an export.
#[derive(Debug, Clone, Copy)]
pub struct ExportOptions {
    /// Number of files copied concurrently.
    pub at_once: usize,
    /// Report what would be copied, without writing.
    pub dry_run: bool,
}

/// A file of the data set and its state at the destination.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExportedFile {
    /// Name in the data set.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// sha256, in hexadecimal.
    pub sha256: String,
    /// Whether the destination already had it.
    pub there: bool,
}

/// Result of an export or of a dry run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Export {
    /// Source folder.
    pub source: String,
    /// Destination folder.
    pub destination: String,
    /// Every file, in the order of the data set.
    pub files: Vec<ExportedFile>,
    /// Whether this was a dry run, which writes nothing.
    pub dry_run: bool,
    /// Duration in seconds.
    pub seconds: f64,
}

#[derive(Serialize, Deserialize)]
struct Marker {
    manifest_sha256: String,
}

/// A file small enough to hold in memory. Small files are written in the order of their list.
struct SmallFile {
    name: &'static str,
    bytes: Bytes,
}

/// Copies a finished data set.
///
/// # Errors
/// If the source is not a finished data set or is damaged, if the destination holds other files, or if reading or
/// writing fails. Copied files stay; calling this again resumes.
pub async fn export(
    source: Output,
    destination: Output,
    options: ExportOptions,
    observer: &dyn Observer,
) -> Result<Export> {
    let began = Instant::now();
    if !destination.is_listed() {
        return Err(destination.read_only());
    }
    let dataset = Dataset::open(source).await?;
    let small = small_files(&dataset, observer).await?;
    let manifest_sha256 = digest(small.iter().find(|s| s.name == MANIFEST).map_or(&[][..], |s| &s.bytes));
    check_destination(&destination, &manifest_sha256).await?;
    let made_folder = !destination.has_folder().await;
    let (destination, lock) = match options.dry_run {
        true => (destination, None),
        false => {
            let destination = destination.create(observer).await?;
            let lock = destination.lock(observer).await?;
            // another export may have finished while this one waited for the lock
            if let Err(e) = check_destination(&destination, &manifest_sha256).await {
                lock.release().await;
                return Err(e);
            }
            (destination, Some(lock))
        }
    };
    let job = CopyJob { dataset: &dataset, destination: &destination, options, observer, done: Counts::default() };
    let files = job.run(small, manifest_sha256).await;
    if files.is_err() && !options.dry_run {
        // a destination that this export created is removed again unless it holds a complete file
        destination.remove_export_if_empty(made_folder).await;
    }
    if let Some(lock) = lock {
        lock.release().await;
    }
    Ok(Export {
        source: dataset.shown(""),
        destination: destination.to_string(),
        files: files?,
        dry_run: options.dry_run,
        seconds: began.elapsed().as_secs_f64(),
    })
}

/// Reads the files beside the shards and verifies the checksum of each.
async fn small_files(dataset: &Dataset, observer: &dyn Observer) -> Result<Vec<SmallFile>> {
    let manifest = dataset.manifest();
    let mut small =
        vec![SmallFile { name: TOKENIZER, bytes: dataset.read_verified(TOKENIZER, &manifest.tokenizer.sha256).await? }];
    for name in sidecar_files() {
        if let Some(sha256) = manifest.sidecar_files.get(name) {
            small.push(SmallFile { name, bytes: dataset.read_verified(name, sha256).await? });
        }
    }
    let card = dataset.output().get(CARD).await?.unwrap_or_default();
    match card::fault(&card) {
        Some(CardFault::Damaged(what)) => {
            let message = format!("{}: {what}; `stillhouse repair` writes it again", dataset.shown(CARD));
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        Some(CardFault::Changed(what)) => {
            observer.event(&Event::Warning { message: format!("{}: {what}", dataset.shown(CARD)) });
        }
        None => {}
    }
    small.push(SmallFile { name: CARD, bytes: card });
    small.push(SmallFile { name: MANIFEST, bytes: dataset.verified_manifest().await? });
    if let Some(plan) = dataset.output().get_json::<PlanRecord>(PLAN).await? {
        // omit the job file's path: it is useless on another machine and may be private
        let plan = PlanRecord { job_folder: String::new(), job_file: String::new(), ..plan };
        let bytes = serde_json::to_vec_pretty(&plan).map_err(PipelineError::dataset(PLAN))?;
        small.push(SmallFile { name: PLAN, bytes: bytes.into() });
    }
    let marker = dataset.output().get(SUCCESS).await?.unwrap_or_default();
    small.push(SmallFile { name: SUCCESS, bytes: marker });
    Ok(small)
}

fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Accepts a destination that is empty or holds this data set or a part of it.
async fn check_destination(destination: &Output, manifest_sha256: &str) -> Result<()> {
    let refuse = |what: &str| {
        let message = format!("{destination}: holds {what}; choose another place, or remove it first");
        Err(PipelineError::new(ErrorKind::Usage, message))
    };
    if let Some(mark) = destination.get_json::<Marker>(MARKER_FILE).await? {
        return match mark.manifest_sha256 == manifest_sha256 {
            true => Ok(()),
            false => refuse("the unfinished export of another data set"),
        };
    }
    if let Some(manifest) = destination.get(MANIFEST).await? {
        return match digest(&manifest) == manifest_sha256 {
            true => Ok(()),
            false => refuse("another data set"),
        };
    }
    if destination.is_of_a_job().await? {
        return refuse("the unfinished data set of a job");
    }
    if destination.is_nothing().await? { Ok(()) } else { refuse("files that are not of this data set") }
}

#[derive(Default)]
struct Counts {
    files: AtomicU64,
    bytes: AtomicU64,
    bytes_there: AtomicU64,
}

impl Counts {
    fn report(&self, files: u64, bytes: u64, observer: &dyn Observer) {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        observer.event(&Event::ExportProgress {
            files_done: get(&self.files),
            files,
            bytes_done: get(&self.bytes),
            bytes,
            bytes_there: get(&self.bytes_there),
        });
    }
}

struct CopyJob<'a> {
    dataset: &'a Dataset,
    destination: &'a Output,
    options: ExportOptions,
    observer: &'a dyn Observer,
    done: Counts,
}

impl CopyJob<'_> {
    async fn run(&self, small: Vec<SmallFile>, manifest_sha256: String) -> Result<Vec<ExportedFile>> {
        let shards = &self.dataset.manifest().shards;
        let files = (shards.len() + small.len()) as u64;
        let bytes =
            shards.iter().map(|s| s.bytes).sum::<u64>() + small.iter().map(|s| s.bytes.len() as u64).sum::<u64>();
        if !self.options.dry_run {
            self.destination.put_json(MARKER_FILE, &Marker { manifest_sha256 }).await?;
            self.destination.remove_leftovers().await?;
            self.destination.abort_uploads(false).await?;
            self.observer.event(&Event::ExportStarted { destination: self.destination.to_string(), files, bytes });
        }
        let copies = futures::stream::iter(shards)
            .map(|shard| self.copy_shard(&shard.path, shard.bytes, &shard.sha256))
            .buffered(self.options.at_once.max(1))
            .try_collect::<Vec<ExportedFile>>();
        let mut copied = self.with_progress(copies, files, bytes).await?;
        for file in small {
            copied.push(self.write_small_file(file).await?);
        }
        if !self.options.dry_run {
            self.destination.delete(MARKER_FILE).await?;
        }
        self.report_progress(files, bytes);
        Ok(copied)
    }

    /// Runs the copies and reports their progress.
    async fn with_progress<T>(&self, copies: impl Future<Output = Result<T>>, files: u64, bytes: u64) -> Result<T> {
        tokio::pin!(copies);
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        loop {
            tokio::select! {
                result = &mut copies => return result,
                _ = ticks.tick() => self.report_progress(files, bytes),
            }
        }
    }

    fn report_progress(&self, files: u64, bytes: u64) {
        if !self.options.dry_run {
            self.done.report(files, bytes, self.observer);
        }
    }

    async fn copy_shard(&self, name: &str, bytes: u64, sha256: &str) -> Result<ExportedFile> {
        let there = self.is_there(name, bytes, sha256).await?;
        if there {
            self.done.bytes.fetch_add(bytes, Ordering::Relaxed);
            self.done.bytes_there.fetch_add(bytes, Ordering::Relaxed);
        } else if !self.options.dry_run {
            self.copy(name, bytes, sha256).await?;
        }
        self.done.files.fetch_add(1, Ordering::Relaxed);
        Ok(ExportedFile { name: name.to_owned(), bytes, sha256: sha256.to_owned(), there })
    }

    async fn is_there(&self, name: &str, bytes: u64, sha256: &str) -> Result<bool> {
        let Some(there) = self.destination.copied(name).await? else { return Ok(false) };
        let same = there.bytes == bytes
            && match there.sha256 {
                Some(known) => known == sha256,
                None => self.destination.read_whole(name, |_| {}).await?.0 == sha256,
            };
        if same {
            return Ok(true);
        }
        let message = format!("{}: is there with other content; remove it first", self.destination.shown(name));
        Err(PipelineError::new(ErrorKind::Output, message))
    }

    async fn copy(&self, name: &str, bytes: u64, sha256: &str) -> Result<()> {
        let mut upload = Some(self.destination.upload_copy(name, bytes, Some(sha256)).await?);
        let pieces = self.dataset.output().pieces(name, bytes);
        tokio::pin!(pieces);
        let sent: Result<()> = async {
            while let Some(piece) = pieces.try_next().await? {
                let length = piece.len() as u64;
                if let Some(upload) = &mut upload {
                    let failed =
                        |e| PipelineError::store(ErrorKind::Output, &e, "write", &self.destination.shown(name));
                    upload.put(piece).await.map_err(failed)?;
                }
                self.done.bytes.fetch_add(length, Ordering::Relaxed);
            }
            Ok(())
        }
        .await;
        let Some(upload) = upload.take() else { return sent };
        if let Err(e) = sent {
            upload.abort().await;
            return Err(e);
        }
        // detect a wrong checksum before readers can see the copy
        if upload.sha256() != sha256 {
            let got = upload.sha256();
            upload.abort().await;
            let message = format!("{}: has sha256 {got}, the manifest has {sha256}", self.dataset.shown(name));
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        let failed = |e| PipelineError::store(ErrorKind::Output, &e, "write", &self.destination.shown(name));
        let staged = upload.finish().await.map_err(failed)?;
        self.destination.place(staged, name).await
    }

    async fn write_small_file(&self, file: SmallFile) -> Result<ExportedFile> {
        let SmallFile { name, bytes } = file;
        let (size, sha256) = (bytes.len() as u64, digest(&bytes));
        let there = match self.destination.get(name).await? {
            Some(there) => digest(&there) == sha256,
            None => false,
        };
        if !there && !self.options.dry_run {
            self.destination.put_copy(name, bytes, &sha256).await?;
        }
        self.done.files.fetch_add(1, Ordering::Relaxed);
        self.done.bytes.fetch_add(size, Ordering::Relaxed);
        Ok(ExportedFile { name: name.to_owned(), bytes: size, sha256, there })
    }
}
