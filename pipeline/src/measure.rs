//! Measures what a job will make, on a part of its input and on this machine, for the estimates of `plan`.
//!
//! ```text
//!   the first megabyte of a few splits ─► read, clean, tokenize, pack ─► tokens of the job        (without the teacher)
//!   the rows of a sample                                              ─► bytes per token, tokens per second
//! ```
//!
//! Each value has a 95 % interval, from how far the measured parts differ. It holds if the rest of the corpus is like these
//! parts, as that of a shuffled corpus is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use arrow::array::{RecordBatch, UInt64Array};
use arrow::error::ArrowError;
use futures::TryStreamExt;
use serde::Serialize;
use stillhouse_input_files::{InputFile, compression, evenly_spaced};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::pack::PackConfig;
use stillhouse_operators::rows::ListRows;
use stillhouse_schemas::columns;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};
use stillhouse_schemas::spec::{Compression, Input, InputFormat, PackMode, Remainder, TextDocument};

use crate::engine::operator_plan;
use crate::engine::pool::Pool;
use crate::engine::session::Session;
use crate::engine::shard::{count_tokens, encoded_bytes};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::JobHash;
use crate::job::Prepared;
use crate::plan;
use crate::run::splits::{sample_resources, source_of};

/// Splits of which a part is tokenized.
const SAMPLED_SPLITS: usize = 4;
/// Bytes of a split that are tokenized.
const SAMPLED_BYTES: u64 = 1_000_000;
/// Rows of a split that are tokenized, in files of rows.
const SAMPLED_ROWS: u64 = 500;
/// Tokens after which the part of a split is given up: a document is far larger than the part.
const MAX_TOKENS: u64 = 2_000_000;

/// A measured value with a 95 % interval. The two ends are equal to the value if all was measured, or a single part.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Measured {
    /// The value over all parts.
    pub value: f64,
    /// The low end, at least 0.
    pub low: f64,
    /// The high end.
    pub high: f64,
}

/// 97.5 % quantiles of Student's t distribution with 1, 2, … degrees of freedom.
const T_QUANTILES: [f64; 15] =
    [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131];

/// The 97.5 % quantile of Student's t distribution; within 0.3 % beyond the table.
fn t_quantile(degrees_of_freedom: usize) -> f64 {
    let of_table = degrees_of_freedom.checked_sub(1).and_then(|i| T_QUANTILES.get(i));
    of_table.copied().unwrap_or(1.96 + 2.5 / degrees_of_freedom.max(1) as f64)
}

impl Measured {
    /// The ratio of two sums over parts. The interval is that of the ratio estimator for a random sample of parts:
    /// ± t √(n/(n−1) Σ(aᵢ − r bᵢ)²) / Σbᵢ with n − 1 degrees of freedom. `None` without parts.
    fn ratio(parts: &[(f64, f64)]) -> Option<Self> {
        let parts: Vec<_> = parts.iter().filter(|(_, below)| *below > 0.0).collect();
        let sums = parts.iter().fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
        if parts.is_empty() {
            return None;
        }
        let value = sums.0 / sums.1;
        let squares: f64 = parts.iter().map(|(above, below)| (above - value * below).powi(2)).sum();
        let half = match parts.len() - 1 {
            0 => 0.0,
            freedom => t_quantile(freedom) * (squares * parts.len() as f64 / freedom as f64).sqrt() / sums.1,
        };
        Some(Self { value, low: (value - half).max(0.0), high: value + half })
    }

    /// A value without an error.
    pub fn exact(value: f64) -> Self {
        Self { value, low: value, high: value }
    }

    /// The product with an exact number.
    pub fn scaled(self, factor: f64) -> Self {
        Self { value: self.value * factor, low: self.low * factor, high: self.high * factor }
    }

    /// The difference to an exact number, at least 0.
    fn less(self, other: f64) -> Self {
        let less = |value: f64| (value - other).max(0.0);
        Self { value: less(self.value), low: less(self.low), high: less(self.high) }
    }

    /// The product of two values.
    pub fn times(self, other: Self) -> Self {
        Self { value: self.value * other.value, low: self.low * other.low, high: self.high * other.high }
    }

    /// The quotient of two values. Without a high end if the other may be 0.
    pub fn over(self, other: Self) -> Self {
        Self { value: self.value / other.value, low: self.low / other.high, high: self.high / other.low }
    }

    /// Half of the interval in relation to the value.
    pub fn relative_error(self) -> f64 {
        (self.high - self.low) / 2.0 / self.value
    }
}

/// Measures the tokens of a job: reads, tokenizes and packs the beginning of a few splits, as a run does. `None` if the
/// job has no text to tokenize, or its splits are not known. Blocks.
///
/// # Errors
/// See a run: if the input cannot be read.
pub fn tokens(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    splits: &[SplitRecord],
    observer: &dyn Observer,
) -> Result<Option<Measured>> {
    let packs = |operator: &OperatorSpec| operator.config::<PackConfig>().is_some();
    let Some(pack) = prepared.operators.iter().position(packs) else { return Ok(None) };
    let files = Arc::new(plan::in_order(hash, &prepared.files));
    let sampled = parts_of(splits, &files, &prepared.spec.input);
    if sampled.is_empty() {
        return Ok(None);
    }
    observer.event(&Event::Preparing { what: "counting tokens of the first megabyte of a few splits".into() });
    let sampled = Arc::new(sampled);
    let operators = prepared.operators.get(..=pack).unwrap_or_default();
    let pool = Pool::of_this_process()?;
    let plan = operator_plan(source_of(prepared, &files, &sampled), operators);
    let resources = sample_resources(prepared, &[], &sampled, pool.spawner()?);
    let session = Session::new(plan, resources, &prepared.spec.engine)?;
    let mut parts = Vec::new();
    for (partition, split) in sampled.iter().enumerate() {
        if let Some(tokens) = prepared.store.wait(tokens_of_split(prepared, &session, partition))? {
            parts.push((tokens as f64, weight(split)));
        }
    }
    let of_all: f64 = splits.iter().map(weight).sum();
    let dropped_at_the_end = if drops_remainders(prepared) { f64::from(prepared.spec.pack.length) / 2.0 } else { 0.0 };
    let is_whole = of_all == sampled.iter().map(weight).sum::<f64>() && parts.len() == sampled.len();
    let dropped = dropped_at_the_end * splits.len() as f64;
    let measured = Measured::ratio(&parts).map(|per_unit| per_unit.scaled(of_all).less(dropped));
    Ok(measured
        .map(|tokens| if is_whole { Measured { low: tokens.value, high: tokens.value, ..tokens } } else { tokens }))
}

/// Whether a split drops the tokens at its end that do not fill a sequence: half a sequence, on average.
fn drops_remainders(prepared: &Prepared) -> bool {
    let pack = &prepared.spec.pack;
    pack.mode == PackMode::Wrap && pack.remainder == Remainder::Drop
}

/// The tokens of a part, with those that its end drops, since the end of a part is not that of a split. `None` if there
/// are too many.
async fn tokens_of_split(prepared: &Prepared, session: &Session, partition: usize) -> Result<Option<u64>> {
    let split = &session.splits()[partition];
    let place = format!("split {}", split.split.0);
    let of_stage = |e| PipelineError::from_stage(place.clone(), e);
    // the split's counts live as long as this handle
    let state = session.resources.split_state(split);
    let mut batches = session.rows(partition).map_err(of_stage)?;
    let mut tokens = 0;
    while let Some(batch) = batches.try_next().await.map_err(of_stage)? {
        tokens += tokens_of(&batch)?;
        if tokens > MAX_TOKENS {
            return Ok(None);
        }
    }
    let dropped = if drops_remainders(prepared) { state.statistics.lock().dropped_tokens } else { 0 };
    Ok(Some(tokens + dropped))
}

fn tokens_of(batch: &RecordBatch) -> Result<u64> {
    count_tokens(batch).map_err(|e| PipelineError::caused(ErrorKind::DataSet, "tokens of a sample", e))
}

/// The parts of the splits to tokenize: of a few splits, or several parts of each if there are fewer. Each has its own
/// number.
fn parts_of(splits: &[SplitRecord], files: &[InputFile], input: &Input) -> Vec<SplitRecord> {
    // records of other formats may not begin at any byte
    let starts_anywhere = match input.format() {
        InputFormat::Jsonl | InputFormat::Parquet | InputFormat::Arrow => true,
        InputFormat::Text => input.document == TextDocument::Line,
        _ => false,
    };
    // what is before a position in a Zstandard frame has to be decompressed
    let files: BTreeMap<&str, Compression> =
        files.iter().map(|file| (file.path.as_str(), compression(file, input))).collect();
    let is_far = |split: &SplitRecord| {
        let first = split.pieces.first().map(|piece| (files.get(piece.file.as_str()), piece.range));
        matches!(first, Some((Some(Compression::Zstd), Range::Bytes { start, .. })) if start > 0)
    };
    let near: Vec<&SplitRecord> = splits.iter().filter(|split| !is_far(split)).collect();
    let sampled: Vec<&SplitRecord> = evenly_spaced(near.iter().copied(), near.len(), SAMPLED_SPLITS).collect();
    let may_be_cut = starts_anywhere && !files.values().any(|how| *how == Compression::Zstd);
    let parts = if may_be_cut { SAMPLED_SPLITS / sampled.len().max(1) } else { 1 };
    let parts = sampled.into_iter().flat_map(|split| (0..parts as u64).map(move |n| part(split, n, parts as u64)));
    let numbered = (0..).zip(parts.filter(|part| !part.pieces.is_empty()));
    numbered.map(|(n, part)| SplitRecord { split: SplitId(n), ..part }).collect()
}

/// The `n`-th of `of` parts of a split, or its beginning if it is large.
fn part(split: &SplitRecord, n: u64, of: u64) -> SplitRecord {
    let all: u64 = split.pieces.iter().map(|piece| length(&piece.range)).sum();
    let (mut skip, end) = (all * n / of, all * (n + 1) / of);
    let mut take = end - skip;
    let mut pieces = Vec::new();
    for piece in &split.pieces {
        let (start, end, most) = match piece.range {
            Range::Bytes { start, end, .. } => (start, end, SAMPLED_BYTES),
            Range::Rows { start, end } => (start, end, SAMPLED_ROWS),
        };
        let start = start + skip.min(end - start);
        skip = skip.saturating_sub(length(&piece.range));
        take = take.min(most - pieces.iter().map(|piece: &Piece| length(&piece.range)).sum::<u64>().min(most));
        let end = end.min(start + take);
        take -= end - start;
        if end > start {
            let range = match piece.range {
                Range::Bytes { start: first, line, .. } => {
                    Range::Bytes { start, end, line: line.filter(|_| start == first) }
                }
                Range::Rows { .. } => Range::Rows { start, end },
            };
            pieces.push(Piece { range, ..piece.clone() });
        }
    }
    SplitRecord { pieces, ..split.clone() }
}

fn length(range: &Range) -> u64 {
    match range {
        Range::Bytes { start, end, .. } | Range::Rows { start, end } => end.saturating_sub(*start),
    }
}

/// Bytes or rows that a split takes.
fn weight(split: &SplitRecord) -> f64 {
    let all: u64 = split.pieces.iter().map(|piece| length(&piece.range)).sum();
    all as f64 * split.keys.map_or(1.0, |keys| keys.share())
}

/// What a sample of rows says of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SampleMeasurements {
    /// Tokens that were measured.
    pub tokens: u64,
    /// Bytes per token of the shards, without their footers.
    pub bytes_per_token: Measured,
    /// Tokens in a second on this machine, of one split on one device. `None` if all came in the first batch, which waits
    /// for the first document and warms up.
    pub tokens_per_second: Option<Measured>,
    /// Devices over which a run distributes its splits; 0 without a teacher.
    pub devices: usize,
}

/// Parts of a sample whose bytes per token are compared, at most.
const MAX_PARTS: usize = 16;
/// Parts of a single document.
const PARTS_OF_DOCUMENT: usize = 4;

/// Cuts rows into parts: those that begin in one document, or in a few if there are many; those of a single document into
/// a few.
fn parts_of_rows(rows: &[RecordBatch]) -> Result<Vec<&[RecordBatch]>> {
    let first = |row: &RecordBatch| {
        let lists = ListRows::from_batch(row, columns::DOCUMENT_IDS)?;
        let ids = lists.values::<UInt64Array>(columns::DOCUMENT_IDS)?;
        Ok::<_, ArrowError>(lists.range(0).next().map(|i| ids.value(i)))
    };
    let firsts: Vec<Option<u64>> = rows
        .iter()
        .map(first)
        .collect::<std::result::Result<_, _>>()
        .map_err(|e| PipelineError::caused(ErrorKind::DataSet, "documents of a sample", e))?;
    let begins: Vec<usize> = (0..rows.len()).filter(|&i| i == 0 || firsts[i] != firsts[i - 1]).collect();
    if begins.len() < 2 {
        return Ok(rows.chunks(rows.len().div_ceil(PARTS_OF_DOCUMENT).max(1)).collect());
    }
    let together = begins.len().div_ceil(MAX_PARTS);
    let starts: Vec<usize> = begins.into_iter().step_by(together).collect();
    let ends = starts.iter().skip(1).copied().chain([rows.len()]);
    Ok(starts.iter().zip(ends).map(|(&start, end)| &rows[start..end]).collect())
}

/// Measures rows of a sample. `batches` took these times to come.
pub(crate) fn sample(
    prepared: &Prepared,
    rows: &[RecordBatch],
    batches: &[(u64, Duration)],
    devices: usize,
) -> Result<Option<SampleMeasurements>> {
    let tokens = |batches: &[RecordBatch]| batches.iter().map(tokens_of).sum::<Result<u64>>();
    let bytes = |batches: &[RecordBatch]| {
        let length = prepared.spec.pack.length as usize;
        encoded_bytes(batches, &prepared.spec.output, length)
            .map(|bytes| bytes as f64)
            .map_err(|e| PipelineError::caused(ErrorKind::Output, "a sample cannot be encoded", e))
    };
    let single: Vec<RecordBatch> =
        rows.iter().flat_map(|batch| (0..batch.num_rows()).map(|row| batch.slice(row, 1))).collect();
    let all = tokens(&single)?;
    if all == 0 {
        return Ok(None);
    }
    // short parts compress less well than the whole, so only their spread counts
    let parts = parts_of_rows(&single)?.into_iter();
    let parts: Vec<(f64, f64)> = parts.map(|part| Ok((bytes(part)?, tokens(part)? as f64))).collect::<Result<_>>()?;
    let value = bytes(rows)? / all as f64;
    let Some(spread) = Measured::ratio(&parts) else { return Ok(None) };
    let bytes_per_token = spread.scaled(value / spread.value);
    let timed: Vec<(f64, f64)> =
        batches.iter().skip(1).map(|(tokens, time)| (*tokens as f64, time.as_secs_f64())).collect();
    Ok(Some(SampleMeasurements { tokens: all, bytes_per_token, tokens_per_second: Measured::ratio(&timed), devices }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(ranges: &[(u64, u64)]) -> SplitRecord {
        let piece =
            |&(start, end): &(u64, u64)| Piece { file: "x".into(), range: Range::Bytes { start, end, line: None } };
        SplitRecord {
            split: SplitId(3),
            dataset_split: "train".into(),
            pieces: ranges.iter().map(piece).collect(),
            keys: None,
            appended: 0,
            place: None,
        }
    }

    #[test]
    fn a_ratio_lies_between_those_of_its_parts() {
        assert_eq!(Measured::ratio(&[]), None);
        assert_eq!(Measured::ratio(&[(3.0, 0.0)]), None);
        assert_eq!(Measured::ratio(&[(6.0, 2.0)]), Some(Measured { value: 3.0, low: 3.0, high: 3.0 }));
        // values of scipy.stats.t.ppf(0.975, 3) and numpy on the same four pairs
        let ratio = Measured::ratio(&[(2.0, 1.0), (9.0, 3.0), (5.0, 2.0), (5.0, 2.0)]).unwrap();
        assert!((ratio.value - 2.625).abs() < 1e-12, "{ratio:?}");
        assert!((ratio.low - 2.011_94).abs() < 1e-3 && (ratio.high - 3.238_06).abs() < 1e-3, "{ratio:?}");
        let twice = Measured { value: 2.0, low: 1.0, high: 4.0 };
        assert_eq!(twice.over(twice), Measured { value: 1.0, low: 0.25, high: 4.0 });
        assert_eq!((twice.times(twice).high, twice.relative_error()), (16.0, 0.75));
    }

    /// 32 bits that look random (the finalizer of MurmurHash3).
    fn spread(i: u32) -> u32 {
        let i = (i ^ 0x9E37_79B9 ^ (i >> 16)).wrapping_mul(0x85EB_CA6B);
        let i = (i ^ (i >> 13)).wrapping_mul(0xC2B2_AE35);
        i ^ (i >> 16)
    }

    /// Of 2,000 samples of a skewed corpus, about 95 % of the intervals contain the ratio of the whole corpus; of samples
    /// of three documents, which say little about the skew, about 87 %.
    #[test]
    fn intervals_contain_the_ratio_of_the_corpus_as_often_as_they_say() {
        let corpus: Vec<(f64, f64)> = (0..5000u32)
            .map(|i| {
                let uniform = |stream| f64::from(spread(2 * i + stream)) / f64::from(u32::MAX);
                let length = 100.0 + 900.0 * uniform(0);
                (length * (20.0 + 20.0 * uniform(1).powi(2)), length)
            })
            .collect();
        let of_all = Measured::ratio(&corpus).unwrap().value;
        for (size, least) in [(3, 0.85), (8, 0.89), (40, 0.93)] {
            let chosen = |n: usize| (0..size).map(move |i| (n * 7919 + i * 104_729) % 5000);
            let inside = |n: &usize| {
                let found = Measured::ratio(&chosen(*n).map(|i| corpus[i]).collect::<Vec<_>>()).unwrap();
                found.low <= of_all && of_all <= found.high
            };
            let share = (0..2000).filter(inside).count() as f64 / 2000.0;
            assert!((least..0.99).contains(&share), "{size} documents: {share}");
        }
    }

    #[test]
    fn the_parts_of_a_split_cover_it_or_begin_at_equal_distances() {
        let range = |start, end| Range::Bytes { start, end, line: None };
        let ranges = |split: &SplitRecord| split.pieces.iter().map(|piece| piece.range).collect::<Vec<_>>();
        let small = split(&[(5, 105), (0, 100)]);
        let parts: Vec<_> = (0..4).map(|n| ranges(&part(&small, n, 4))).collect();
        assert_eq!(parts, [[range(5, 55)], [range(55, 105)], [range(0, 50)], [range(50, 100)]]);
        assert_eq!(ranges(&part(&small, 0, 1)), [range(5, 105), range(0, 100)]);
        let large = split(&[(0, 8_000_000)]);
        assert_eq!(ranges(&part(&large, 3, 4)), [range(6_000_000, 7_000_000)]);
        let rows = SplitRecord {
            pieces: vec![Piece { file: "x".into(), range: Range::Rows { start: 10, end: 20_010 } }],
            ..split(&[])
        };
        assert_eq!(ranges(&part(&rows, 1, 2)), [Range::Rows { start: 10_010, end: 10_510 }]);
    }

    #[test]
    fn the_beginning_of_a_split_is_a_megabyte_over_its_pieces() {
        let split = split(&[(5, 600_005), (0, 900_000), (0, 10)]);
        let short = part(&split, 0, 1);
        assert_eq!(short.pieces, self::split(&[(5, 600_005), (0, 400_000)]).pieces);
        assert_eq!((weight(&split), weight(&short)), (1_500_010.0, 1e6));
        assert_eq!(part(&short, 0, 1), short);
    }
}
