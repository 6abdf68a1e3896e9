//! Holdouts: assign documents to data set splits.
//!
//! ```text
//!   segments ─┬─ the last N records, cut off ─────────────────────────────────────► one data set split each
//!             └─ the rest, read once for each of ─┬─ share: keys of an interval ──► one data set split each
//!                                                 ├─ documents: the N smallest keys after that
//!                                                 └─ every other key ─────────────► train
//! ```
//!
//! A document's key is a hash of the job's seed and its text. So the documents of a share do not depend on the files,
//! the splits or the other documents, and copies of a text have the same key.
//!
//! To count the last records, the code goes back from the end segment by segment and reads only the segments that it
//! needs. To find the N smallest keys, it reads the whole input once. Memory: 64 bytes for each of the N.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::manifest::{KEYS, KeyRange, Range, SplitRecord};
use stillhouse_schemas::spec::{Holdout, Input};

use super::formats::{self, Format, numbers};
use super::segment::Segment;
use super::split_reader::read_keys;
use super::summary::TRAIN;

/// The segments and keys from which the splits of one data set split are made.
pub(crate) struct SplitSource {
    pub dataset_split: String,
    pub segments: Vec<Segment>,
    pub keys: Option<KeyRange>,
}

/// Returns the data set splits: `train`, then the holdouts by name.
pub(crate) fn split_sources(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    seed: u64,
    segments: Vec<Segment>,
) -> Result<Vec<SplitSource>, SourceError> {
    let mut rest = segments;
    let mut held = BTreeMap::new();
    let mut before = 0;
    for (name, n) in holdouts_with(input, |h| h.last_documents).rev() {
        let field = format!("input.holdout.{name}.last_documents");
        let (left, tail) = split_off_last(store, files, input, rest, (n, before), &field)?;
        (rest, before) = (left, before + n);
        held.insert(name, (tail, None));
    }
    let mut bound = 0;
    let mut sum = 0.0;
    for (name, share) in holdouts_with(input, |h| h.share) {
        sum += share;
        let end = (sum * KEYS) as u64;
        held.insert(
            name,
            (rest.clone(), Some(KeyRange { seed, first: bound, last: end.saturating_sub(1).max(bound) })),
        );
        bound = end;
    }
    let counts: Vec<(&str, u64)> = holdouts_with(input, |h| h.documents).collect();
    if !counts.is_empty() {
        let total = counts.iter().map(|(_, n)| n).sum();
        let smallest =
            smallest_keys(store, files, input, &rest, KeyRange { seed, first: bound, last: u64::MAX }, total)?;
        let mut keys = smallest.into_iter();
        for (name, n) in counts {
            let last = keys.nth(n as usize - 1).unwrap_or(bound);
            held.insert(name, (rest.clone(), Some(KeyRange { seed, first: bound, last })));
            bound = last.saturating_add(1);
        }
    }
    let keys = (bound > 0).then_some(KeyRange { seed, first: bound, last: u64::MAX });
    let train = SplitSource { dataset_split: TRAIN.into(), segments: rest, keys };
    let held =
        held.into_iter().map(|(name, (segments, keys))| SplitSource { dataset_split: name.into(), segments, keys });
    Ok([train].into_iter().chain(held).collect())
}

/// Assigns appended segments to the data set splits of existing splits: documents with the same keys as there.
pub(crate) fn appended_split_sources(input: &Input, splits: &[SplitRecord], segments: &[Segment]) -> Vec<SplitSource> {
    let is_cut_off = |name: &str| input.holdout.get(name).is_some_and(|h| h.last_documents.is_some());
    let mut seen = BTreeSet::new();
    let first_of_each = splits.iter().filter(|split| seen.insert(split.dataset_split.as_str()));
    first_of_each
        .filter(|split| !is_cut_off(&split.dataset_split))
        .map(|split| SplitSource {
            dataset_split: split.dataset_split.clone(),
            segments: segments.to_vec(),
            keys: split.keys,
        })
        .collect()
}

/// Returns the holdouts that have a value for this rule, by name.
fn holdouts_with<T>(input: &Input, rule: impl Fn(&Holdout) -> Option<T>) -> impl DoubleEndedIterator<Item = (&str, T)> {
    input.holdout.iter().filter_map(move |(name, holdout)| Some((name.as_str(), rule(holdout)?)))
}

/// Returns the `n` smallest document keys of the range.
fn smallest_keys(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    segments: &[Segment],
    range: KeyRange,
    n: u64,
) -> Result<BTreeSet<u64>, SourceError> {
    // one more, to make sure that something is left for train
    let max_keys = n as usize + 1;
    let smallest = Mutex::new(BTreeSet::new());
    let bound = AtomicU64::new(u64::MAX);
    let add = |key: u64| {
        if !range.contains(key) || key > bound.load(Ordering::Relaxed) {
            return;
        }
        let mut smallest = smallest.lock().unwrap_or_else(PoisonError::into_inner);
        smallest.insert(key);
        if smallest.len() > max_keys {
            smallest.pop_last();
        }
        if let Some(last) = smallest.last().filter(|_| smallest.len() == max_keys) {
            bound.store(*last, Ordering::Relaxed);
        }
    };
    for_each_segment(segments, |segment| {
        read_keys(store, files, &files[segment.file], segment.range, input, range.seed, &mut |key| add(key))
    })?;
    let mut keys = smallest.into_inner().unwrap_or_else(PoisonError::into_inner);
    if keys.len() < max_keys {
        let fields: Vec<String> =
            holdouts_with(input, |h| h.documents).map(|(name, _)| format!("input.holdout.{name}.documents")).collect();
        return Err(SourceError::Plan {
            field: fields.join(" and "),
            message: format!(
                "got {n}, but the input has {} different documents that no other holdout takes; valid: fewer than that, \
                 so that something is left for train",
                keys.len()
            ),
        });
    }
    keys.pop_last();
    Ok(keys)
}

/// Calls `visit` with all segments, on as many threads as the machine has cores. Returns the error of the first segment
/// that failed.
fn for_each_segment(
    segments: &[Segment],
    visit: impl Fn(&Segment) -> Result<(), SourceError> + Sync,
) -> Result<(), SourceError> {
    let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).min(segments.len().max(1));
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let errors: Mutex<BTreeMap<usize, SourceError>> = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let i = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(segment) = segments.get(i)
                    && !failed.load(Ordering::Relaxed)
                {
                    if let Err(e) = visit(segment) {
                        failed.store(true, Ordering::Relaxed);
                        errors.lock().unwrap_or_else(PoisonError::into_inner).insert(i, e);
                    }
                }
            });
        }
    });
    errors.into_inner().unwrap_or_else(PoisonError::into_inner).pop_first().map_or(Ok(()), |(_, first)| Err(first))
}

/// Returns the segments before the last `n` records, and those of the last `n` records. Other holdouts already hold
/// `before` records after them.
fn split_off_last(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    mut segments: Vec<Segment>,
    (n, before): (u64, u64),
    field: &str,
) -> Result<(Vec<Segment>, Vec<Segment>), SourceError> {
    let mut held = Vec::new();
    let mut left = n;
    while left > 0 {
        let Some(mut segment) = segments.pop() else { break };
        let records = count_records(store, files, input, &segment)?;
        segment.records = Some(records);
        if records > left {
            let (before, after) = split_segment(store, files, input, &segment, records - left)?;
            segments.push(before);
            held.push(after);
            left = 0;
        } else {
            left -= records;
            held.push(segment);
        }
    }
    let mut train = false;
    for segment in segments.iter().rev() {
        if count_records(store, files, input, segment)? > 0 {
            train = true;
            break;
        }
    }
    if left > 0 || !train {
        let others = if before > 0 { format!(", {before} of them held out by others") } else { String::new() };
        return Err(SourceError::Plan {
            field: field.into(),
            message: format!(
                "got {n}, but the input has {} records{others}; valid: fewer than that, so that something is left for train",
                n - left + before
            ),
        });
    }
    held.reverse();
    Ok((segments, held))
}

fn bounds(range: Range) -> (u64, u64) {
    match range {
        Range::Bytes { start, end, .. } | Range::Rows { start, end } => (start, end),
    }
}

fn count_records(store: &Store, files: &[InputFile], input: &Input, segment: &Segment) -> Result<u64, SourceError> {
    if let Some(records) = segment.records {
        return Ok(records);
    }
    let file = &files[segment.file];
    let io_error = |e| SourceError::from_io(&file.path, e);
    let (start, end) = bounds(segment.range);
    let (mut records, _) = formats::for_input(input).open_bytes(store, file, input, (start, end))?;
    let mut count = 0;
    while let Some(at) = records.next().map_err(io_error)?
        && at.offset < end
    {
        count += 1;
        records.skip().map_err(io_error)?;
    }
    Ok(count)
}

/// Cuts a segment before its record with this index, counted from 0.
fn split_segment(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    segment: &Segment,
    record: u64,
) -> Result<(Segment, Segment), SourceError> {
    let file = &files[segment.file];
    let io_error = |e| SourceError::from_io(&file.path, e);
    let (before, after) = match segment.range {
        Range::Rows { start, end } => {
            let at = start + record;
            (Range::Rows { start, end: at }, Range::Rows { start: at, end })
        }
        Range::Bytes { start, end, .. } if matches!(formats::for_input(input), Format::Numbers) => {
            let at = numbers::offset_of(store, file, input, (start, end), record)?;
            (Range::Bytes { start, end: at, line: None }, Range::Bytes { start: at, end, line: None })
        }
        Range::Bytes { start, end, line } => {
            let (mut records, _) = formats::for_input(input).open_bytes(store, file, input, (start, end))?;
            for _ in 0..record {
                records.next().map_err(io_error)?;
                records.skip().map_err(io_error)?;
            }
            let at = records.next().map_err(io_error)?;
            let (offset, newlines) = at.map_or((end, 0), |at| (at.offset, at.newlines));
            let after = Range::Bytes { start: offset, end, line: line.map(|l| l + newlines) };
            (Range::Bytes { start, end: offset, line }, after)
        }
    };
    let (from, to) = bounds(segment.range);
    let records = segment.records.unwrap_or(record);
    let part = |range: Range, records: u64| {
        let (start, end) = bounds(range);
        let weight = u128::from(segment.weight) * u128::from(end - start) / u128::from((to - from).max(1));
        Segment { file: segment.file, range, weight: weight as u64, records: Some(records) }
    };
    Ok((part(before, record), part(after, records - record)))
}
