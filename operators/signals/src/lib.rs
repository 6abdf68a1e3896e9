//! Stored signals of a teacher: values per position, besides the noise, computed from its logits l `[V]`.
//! Each signal is one file and one line of [`SIGNALS`].
//!
//! | key of `extract` | definition | error |
//! |---|---|---|
//! | `topk` | the k largest ln p_k with their tokens, descending, ties by lower token | half a unit in the last place, at least 1e-6 |
//! | `logz_temperatures` | ln Σ_k exp(l_k / T) | 1e-5 nat, or half a unit in the last place of its f32 where that is more |
//! | `entropy` | −Σ_k p_k · ln p_k, nat | 1e-5 nat |
//! | `candidates` | ln p_k of given k | half a unit in the last place, at least 1e-6 |
//! | `samples` | N draws from q ∝ p^t, as distinct tokens with counts | unbiased: E\[count_k / N · p_k / q_k\] = p_k |
//! | `top_p` | the smallest set of most likely entries that holds a mass, and ln of the remaining mass (tail) | tail: 1e-5, relative |
//!
//! ```text
//!   job file ─► SIGNALS: from_job   ─► StoredSignal ─┬─► columns            Arrow fields, FORMAT.md
//!                                                     ├─► Signal::compute    CPU, or Signal::kernel on a device
//!                                                     ├─► check, compare     `verify`
//!                                                     └─► view, summary      `inspect`, the page
//! ```
//!
//! A position that the teacher does not predict is certain: p is one-hot at its token, with l = 0 there and −∞ elsewhere.

mod candidates;
mod entropy;
mod log_partitions;
mod sampled_logits;
#[cfg(test)]
mod tests;
mod tolerances;
mod top_k;
mod top_p;

pub use candidates::Candidates;
pub use entropy::Entropy;
pub use log_partitions::LogPartitions;
pub use sampled_logits::SampledLogits;
pub use tolerances::{LOGPROB_TOLERANCE, Tolerances};
pub use top_k::TopK;
pub use top_p::TopP;

use std::sync::Arc;

use stillhouse_noise::{LoadedRow, RowSignals, Signal, Signals, Values};
use stillhouse_schemas::columns::Column;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Extract;

/// All signals, in the order of their columns. `None` if the job does not ask for the signal.
pub const SIGNALS: &[SignalKind] = &[
    SignalKind {
        columns: top_k::COLUMNS,
        from_job: |extract, _| stored(TopK { k: extract.topk as usize }, extract.topk > 0),
    },
    SignalKind {
        columns: log_partitions::COLUMNS,
        from_job: |Extract { logz_temperatures: temperatures, .. }, _| {
            stored(LogPartitions { temperatures: temperatures.clone() }, !temperatures.is_empty())
        },
    },
    SignalKind { columns: entropy::COLUMNS, from_job: |extract, _| stored(Entropy, extract.entropy) },
    SignalKind {
        columns: candidates::COLUMNS,
        from_job: |Extract { candidates: tokens, .. }, _| {
            stored(Candidates { tokens: tokens.clone() }, !tokens.is_empty())
        },
    },
    SignalKind {
        columns: sampled_logits::COLUMNS,
        from_job: |extract, seed| {
            let samples = extract.samples.as_ref()?;
            stored(SampledLogits { draws: samples.draws, power: samples.power, seed }, true)
        },
    },
    SignalKind {
        columns: top_p::COLUMNS,
        from_job: |extract, _| {
            let top_p = extract.top_p.as_ref()?;
            stored(TopP { mass: top_p.mass, max_entries: top_p.most as usize }, true)
        },
    },
];

fn stored(signal: impl StoredSignal + 'static, is_requested: bool) -> Option<Arc<dyn StoredSignal>> {
    if is_requested { Some(Arc::new(signal)) } else { None }
}

/// The declaration of a signal.
#[derive(Debug, Clone, Copy)]
pub struct SignalKind {
    /// Descriptions of all columns that it can have.
    pub columns: &'static [Column],
    /// Returns the signal if the job asks for it. The second argument is the job's seed.
    pub from_job: fn(&Extract, u64) -> Option<Arc<dyn StoredSignal>>,
}

/// Type of a column's values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ItemType {
    /// 32-bit floats.
    F32,
    /// Vocabulary entries as int32.
    I32,
    /// Counts up to 65,535.
    U16,
    /// Vocabulary entries: 16 bits if V ≤ 65,536, else 32.
    Token,
}

/// Shape of a row of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnShape {
    /// One value per position: `[L]`.
    Scalar,
    /// As many values at every position: `[L, n]`.
    Vector(usize),
    /// The length of each position's list in the [`ColumnShape::List`] columns that follow: `[L]`.
    Count,
    /// The lists of all positions, one after another: `[*]`.
    List,
}

/// A column of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalColumn {
    /// Name.
    pub name: &'static str,
    /// Type of the values.
    pub item: ItemType,
    /// Shape of a row.
    pub shape: ColumnShape,
}

impl SignalColumn {
    const fn new(name: &'static str, item: ItemType, shape: ColumnShape) -> Self {
        Self { name, item, shape }
    }
}

/// A signal as a data set stores it. `values` holds the values of its columns at one position, in order.
pub trait StoredSignal: Signal {
    /// The columns.
    fn columns(&self) -> Vec<SignalColumn>;

    /// Appends the values at a certain position.
    fn certain(&self, token: u32, columns: &mut RowSignals);

    /// Checks ranges, order and sums; returns what is wrong.
    fn check(&self, values: &[Values], vocab: usize) -> Option<String>;

    /// Compares stored values with recomputed ones; returns what differs.
    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        row: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String>;

    /// Estimates the bytes per token in a shard; `token_bytes` is log2 V / 8.
    fn bytes_per_token(&self, token_bytes: f64) -> f64;

    /// Upper bound of the values of a position.
    fn max_values(&self, vocab: usize) -> usize;

    /// What `inspect` shows of a row. `positions` holds the values of each position.
    fn view(&self, positions: &[&[Values]], vocab: usize) -> Vec<Series>;

    /// The values of a token in short form.
    fn summary(&self, values: &[Values]) -> String;

    /// Settings that the vocabulary of the teacher makes invalid.
    fn vocabulary_problems(&self, vocab: usize) -> Vec<Problem> {
        let _ = vocab;
        Vec::new()
    }

    /// The setting that decides how many of the most likely tokens a device must list, with its value.
    fn top_entries_setting(&self) -> Option<(&'static str, usize)> {
        None
    }
}

impl PartialEq for dyn StoredSignal {
    fn eq(&self, other: &Self) -> bool {
        (self as &dyn Signal) == (other as &dyn Signal)
    }
}

/// A value per position for `inspect`.
pub struct Series {
    /// Title.
    pub title: String,
    /// A value per position.
    pub values: Vec<f64>,
    /// Bounds of its axis.
    pub axis: Axis,
    /// Describes the mean over the predicted positions: name and value.
    pub describe_mean: Box<dyn Fn(f64) -> (String, String)>,
}

/// Bounds of the axis of a [`Series`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Axis {
    /// The range of the values.
    Values,
    /// From 0 to the largest value.
    FromZero,
    /// From 0 to a number.
    UpTo(f64),
}

/// Returns the signals that a job asks for.
#[must_use]
pub fn from_job(extract: &Extract, seed: u64) -> Vec<Arc<dyn StoredSignal>> {
    SIGNALS.iter().filter_map(|kind| (kind.from_job)(extract, seed)).collect()
}

/// Returns what the extraction computes.
#[must_use]
pub fn requested(signals: &[Arc<dyn StoredSignal>]) -> Signals {
    Signals::new(signals.iter().map(|signal| Arc::clone(signal) as Arc<dyn Signal>).collect())
}

/// Returns the values of all signals at a certain position.
#[must_use]
pub fn certain(signals: &[Arc<dyn StoredSignal>], token: u32) -> RowSignals {
    let mut columns = RowSignals::new();
    signals.iter().for_each(|signal| signal.certain(token, &mut columns));
    columns
}

/// Returns each signal with the values of its columns.
pub fn split<'a>(
    signals: &'a [Arc<dyn StoredSignal>],
    mut row: &'a [Values],
) -> impl Iterator<Item = (&'a dyn StoredSignal, &'a [Values])> {
    signals.iter().map(move |signal| {
        let (values, rest) = row.split_at(signal.columns().len().min(row.len()));
        row = rest;
        (signal.as_ref(), values)
    })
}

/// The floats of column `n`; empty if there is no such column.
fn f32s(values: &[Values], n: usize) -> &[f32] {
    values.get(n).map_or(&[], Values::f32s)
}

/// The integers of column `n`; empty if there is no such column.
fn u32s(values: &[Values], n: usize) -> &[u32] {
    values.get(n).map_or(&[], Values::u32s)
}

/// The float of column `n`; NaN if there is none.
fn f32_of(values: &[Values], n: usize) -> f32 {
    f32s(values, n).first().copied().unwrap_or(f32::NAN)
}

/// Reads f32 values from bytes that a kernel wrote.
fn f32s_of_bytes(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect()
}

/// Reads u32 values from bytes that a kernel wrote.
fn u32s_of_bytes(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| u32::from_ne_bytes(*bytes)).collect()
}

/// Whether a value is farther from another than the tolerance. NaN differs from every value.
#[must_use]
pub fn differs(got: f32, expected: f32, tolerance: f64) -> bool {
    let distance = (f64::from(got) - f64::from(expected)).abs();
    got != expected && distance.partial_cmp(&tolerance).is_none_or(std::cmp::Ordering::is_gt)
}

fn mismatch(name: &str, got: f32, expected: f32) -> Option<String> {
    Some(format!("{name} is {got}, recomputed it is {expected}"))
}
