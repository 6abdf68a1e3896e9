//! Cuts the input into splits. The cuts are a function of the job and the files, so shards do not depend on who makes
//! them.
//!
//! ```text
//!   file ─► segments of about the target (records that begin in a range) ─┐
//!   file ─► segments ... ─────────────────────────────────────────────────┼─► train │ holdouts ─► grouped into splits
//!   file ─► ...                                (the last records are cut off; other documents are assigned by their keys)
//! ```
//!
//! It cuts every file on its own into segments no longer than about the target, then joins neighbours into as few splits
//! as that allows, all about as long as one another: the longest split decides when a job on many cores ends. A data set
//! split that takes only a part of the documents reads proportionally more of the input for each of its splits, up to 64
//! times the target.
//!
//! - Uncompressed line files: cut by their size alone.
//! - Compressed files, CSV and blocks of text: scanned once, on all cores, for the offsets where records begin.
//! - Columnar files: cut by their metadata.
//! - Images and codes: cut as [`numbers`] says; their weight is the count of their numbers.
//!
//! Memory: the segments, per core the memory of a reader, and for a file that is scanned 16 offsets per segment.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};
use stillhouse_schemas::spec::Input;

use super::formats;
use super::holdout::{self, SplitSource};
use super::segment::{Segment, join_evenly};

/// Maximum number of splits of a job. Each is a shard, a record in the manifest, and memory while the job runs.
const MAX_SPLITS: u32 = 1_000_000;

/// Lower bound on the fraction of documents that a split is assumed to take. Below it, splits are smaller than the
/// target, so that they do not take too long.
const MIN_TAKEN_SHARE: f64 = 1.0 / 64.0;

/// Progress of planning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanProgress {
    /// Files cut into segments.
    pub files: u64,
    /// Total number of files.
    pub files_total: u64,
    /// Stored bytes of the files that are done.
    pub bytes: u64,
    /// Total stored bytes of all files.
    pub bytes_total: u64,
}

/// Splits, and the weights of the new ones: bytes of text, numbers of rows, or documents that have no text yet.
#[derive(Debug, Default)]
pub struct PlannedSplits {
    /// All splits.
    pub splits: Vec<SplitRecord>,
    /// Weights of the last (new) splits.
    pub weights: Vec<f64>,
}

/// Cuts the input into splits: first all of `train`, then those of the holdouts by name, numbered consecutively. `seed`
/// is the seed of the documents' keys.
///
/// `target_split_bytes` counts bytes of text; with `format: none`, documents.
///
/// `files` must be the result of the listing, or of staging the query, for this job. Several threads may call
/// `progress`.
///
/// # Errors
/// When a file cannot be read or is corrupt, when the holdouts take all records, or when there are too many splits.
pub fn plan_splits(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    target_split_bytes: u64,
    seed: u64,
    progress: &(dyn Fn(PlanProgress) + Sync),
) -> Result<PlannedSplits, SourceError> {
    let target = target_split_bytes.max(1);
    let expecting = (!is_cut_by_listing(files, input)).then(|| store.expecting(files));
    let store = expecting.as_ref().unwrap_or(store);
    let segments = segments(store, files, input, target, progress)?;
    let mut planned = PlannedSplits::default();
    for part in holdout::split_sources(store, files, input, seed, segments)? {
        add_splits(files, part, target, &mut planned)?;
    }
    Ok(planned)
}

/// Cuts files appended to the input into splits, which follow the existing splits and carry the number of the append.
///
/// The first run decided the data set split of each key, and the documents of appended files follow their keys. The
/// last documents that the first run held out stay held out; no appended document joins them.
///
/// # Errors
/// As [`plan_splits`].
pub fn append_splits(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    target_split_bytes: u64,
    (splits, appended): (Vec<SplitRecord>, u32),
) -> Result<PlannedSplits, SourceError> {
    let target = target_split_bytes.max(1);
    let store = &store.expecting(files);
    let segments = segments(store, files, input, target, &|_| {})?;
    let before = splits.len();
    let parts = holdout::appended_split_sources(input, &splits, &segments);
    let mut planned = PlannedSplits { splits, weights: Vec::new() };
    for part in parts {
        add_splits(files, part, target, &mut planned)?;
    }
    planned.splits.iter_mut().skip(before).for_each(|split| split.appended = appended);
    Ok(planned)
}

fn add_splits(
    files: &[InputFile],
    part: SplitSource,
    target: u64,
    planned: &mut PlannedSplits,
) -> Result<(), SourceError> {
    let PlannedSplits { splits, weights } = planned;
    let share = part.keys.map_or(1.0, |keys| keys.share());
    let taken = part.keys.map_or(1.0, |keys| keys.share().max(MIN_TAKEN_SHARE));
    let weight = |segment: &Segment| (segment.weight as f64 * taken).ceil() as u64;
    let read: Vec<u64> = part.segments.iter().map(weight).collect();
    for range in join_evenly(&read, target) {
        let too_many = || SourceError::Plan {
            field: "input.split_megabytes".into(),
            message: format!("the input makes more than {MAX_SPLITS} splits; make them larger"),
        };
        let split = u32::try_from(splits.len()).ok().filter(|n| *n < MAX_SPLITS).ok_or_else(too_many)?;
        let segments = &part.segments[range];
        splits.push(SplitRecord {
            split: SplitId(split),
            dataset_split: part.dataset_split.clone(),
            pieces: pieces(files, segments),
            keys: part.keys,
            appended: 0,
            place: None,
        });
        weights.push(segments.iter().map(|segment| segment.weight as f64 * share).sum());
    }
    Ok(())
}

/// The ranges of segments; those that follow one another in a file are one.
fn pieces(files: &[InputFile], segments: &[Segment]) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    for segment in segments {
        let file = &files[segment.file].path;
        let joined =
            pieces.last_mut().is_some_and(|last| last.file == *file && extend_range(&mut last.range, segment.range));
        if !joined {
            pieces.push(Piece { file: file.clone(), range: segment.range });
        }
    }
    pieces
}

/// Extends `last` by a range that directly follows it. Returns false if `next` does not follow.
fn extend_range(last: &mut Range, next: Range) -> bool {
    match (last, next) {
        (Range::Bytes { end, .. }, Range::Bytes { start, end: new, .. }) if *end == start => *end = new,
        (Range::Rows { end, .. }, Range::Rows { start, end: new }) if *end == start => *end = new,
        _ => return false,
    }
    true
}

/// Returns the segments of all files, in order. Works on several files at once; returns the first error in the order of
/// the files.
fn segments(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    target: u64,
    progress: &(dyn Fn(PlanProgress) + Sync),
) -> Result<Vec<Segment>, SourceError> {
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(files.len().max(1));
    let next = AtomicUsize::new(0);
    let (done, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
    let bytes_total = files.iter().map(|f| f.size).sum();
    let found: Vec<Mutex<Option<Result<_, _>>>> = files.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let i = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(file) = files.get(i)
                {
                    let result: Result<Vec<Segment>, SourceError> =
                        formats::for_input(input).segments(store, i, file, input, target);
                    if result.is_err() {
                        next.store(files.len(), Ordering::Relaxed);
                    }
                    *found[i].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
                    progress(PlanProgress {
                        files: done.fetch_add(1, Ordering::Relaxed) + 1,
                        files_total: files.len() as u64,
                        bytes: bytes.fetch_add(file.size, Ordering::Relaxed) + file.size,
                        bytes_total,
                    });
                }
            });
        }
    });
    let mut all = Vec::new();
    for result in found {
        // files begin in order, so those that an error kept from beginning come after it
        if let Some(result) = result.into_inner().unwrap_or_else(PoisonError::into_inner) {
            all.extend(result?);
        }
    }
    Ok(all)
}

/// Whether the listing alone decides the cuts. Then the states of the files, of which there may be very many, are not
/// needed.
fn is_cut_by_listing(files: &[InputFile], input: &Input) -> bool {
    let format = formats::for_input(input);
    input.holdout.is_empty() && files.iter().all(|file| format.is_cut_by_listing(file, input))
}
