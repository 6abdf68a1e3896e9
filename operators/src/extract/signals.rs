//! The columns of the other signals: stores what `stillhouse_noise::signals` computes for each position, as lists.
//!
//! | key of `extract` | columns | value at a certain position |
//! |---|---|---|
//! | `logz_temperatures` | `logz` \[L, temperatures\] | 0 |
//! | `entropy` | `entropy` \[L\] | 0 |
//! | `candidates` | `candidate_logprob` \[L, candidates\] | 0 where it is the token, else −∞ |
//! | `samples` | `sampled_count` \[L\], `sampled_index` \[*\], `sampled_times` \[*\], `sampled_ratio` \[*\] (t ≠ 1) | the token, N times |
//! | `top_p` | `top_p_count` \[L\], `top_p_index` \[*\], `top_p_logprob` \[*\], `top_p_tail` \[L\] | the token with 0; tail −∞ |
//!
//! A certain position has l = 0 at its token and −∞ at all others; the values above follow from that.

use std::ops::Range;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_noise::{LogitSampling, RowSignals, SampledLogit, SignalSpec, TopP};
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::spec::Extract;

use super::collect::unsigned;
use super::{ExtractConfig, NAME};
use crate::invariants::{Violation, Widened, float_column, unsigned_column};
use crate::operator::OperatorError;
use crate::rows::{ListRows, list_column};

/// Which signals to store.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SignalsConfig {
    /// Temperatures T of the log-partitions ln Σ exp(l / T).
    pub logz_temperatures: Vec<f64>,
    /// Whether to store the entropy.
    pub entropy: bool,
    /// Vocabulary entries whose ln p to store.
    pub candidates: Vec<u32>,
    /// Sampled logits, if any.
    pub samples: Option<SamplesConfig>,
    /// Top-p, if any: the likeliest entries up to a probability mass.
    pub top_p: Option<TopPConfig>,
}

/// Configuration of sampled logits.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplesConfig {
    /// Draws per position, N.
    pub draws: u32,
    /// Exponent t of the proposal q ∝ p^t.
    pub power: f64,
    /// Seed of the draws: the job's.
    pub seed: u64,
}

/// Configuration of `top_p`.
#[derive(Debug, Clone, PartialEq)]
pub struct TopPConfig {
    /// Probability mass that the kept entries reach together, unless `most` stops them.
    pub mass: f64,
    /// Largest number of entries kept per position.
    pub most: usize,
}

impl SignalsConfig {
    /// Returns the signals that a job file asks for.
    #[must_use]
    pub fn of(extract: &Extract, seed: u64) -> Self {
        Self {
            logz_temperatures: extract.logz_temperatures.clone(),
            entropy: extract.entropy,
            candidates: extract.candidates.clone(),
            samples: extract.samples.as_ref().map(|s| SamplesConfig { draws: s.draws, power: s.power, seed }),
            top_p: extract.top_p.as_ref().map(|t| TopPConfig { mass: t.mass, most: t.most as usize }),
        }
    }

    /// Whether the job asks for no signal.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.asked().is_empty()
    }

    /// Returns what to compute at every position.
    #[must_use]
    pub fn asked(&self) -> SignalSpec {
        let sampling = |s: &SamplesConfig| LogitSampling { draws: s.draws, power: s.power, seed: s.seed };
        SignalSpec {
            temperatures: self.logz_temperatures.clone(),
            entropy: self.entropy,
            candidates: self.candidates.clone(),
            sampling: self.samples.as_ref().map(sampling),
            top_p: self.top_p.as_ref().map(|t| TopP { mass: t.mass, max_entries: t.most }),
        }
    }

    /// Whether the ratio p/q is stored; for t = 1 it is always 1, so it is not.
    fn has_ratio(&self) -> bool {
        self.samples.as_ref().is_some_and(|s| s.power != 1.0)
    }

    /// Returns the fields of the columns, in the order of [`SignalsConfig::arrays`].
    pub(super) fn fields(&self, rows: RowLength, vocab_size: usize) -> Vec<Field> {
        let list = columns::list_field;
        let index = columns::noise_index_type(vocab_size);
        let mut fields = Vec::new();
        if !self.logz_temperatures.is_empty() {
            fields.push(rows.field(columns::LOGZ, DataType::Float32, None, Some(self.logz_temperatures.len())));
        }
        if self.entropy {
            fields.push(rows.field(columns::ENTROPY, DataType::Float32, None, None));
        }
        if !self.candidates.is_empty() {
            fields.push(rows.field(columns::CANDIDATE_LOGPROB, DataType::Float32, None, Some(self.candidates.len())));
        }
        if self.samples.is_some() {
            fields.push(rows.field(columns::SAMPLED_COUNT, DataType::UInt16, None, None));
            fields.push(list(columns::SAMPLED_INDEX, index.clone()));
            fields.push(list(columns::SAMPLED_TIMES, DataType::UInt16));
        }
        if self.has_ratio() {
            fields.push(list(columns::SAMPLED_RATIO, DataType::Float32));
        }
        if self.top_p.is_some() {
            fields.push(rows.field(columns::TOP_P_COUNT, DataType::UInt16, None, None));
            fields.push(list(columns::TOP_P_INDEX, index));
            fields.push(list(columns::TOP_P_LOGPROB, DataType::Float32));
            fields.push(rows.field(columns::TOP_P_TAIL, DataType::Float32, None, None));
        }
        fields
    }

    /// Builds the columns from rows of positions; takes their fields from `next`.
    pub(super) fn arrays<'f>(
        &self,
        rows: &[&[RowSignals]],
        next: &mut impl FnMut() -> Result<&'f Field, OperatorError>,
    ) -> Result<Vec<ArrayRef>, OperatorError> {
        let lengths = |of: &dyn Fn(&RowSignals) -> usize| -> Vec<usize> {
            rows.iter().map(|row| row.iter().map(of).sum()).collect()
        };
        let all = || rows.iter().flat_map(|row| row.iter());
        let sampled = || all().flat_map(|s| s.sampled.iter());
        let top_p = || all().flat_map(|s| s.top_p.iter());
        let floats = |field: &Field, values: Vec<f32>, lengths: &[usize]| {
            list_column(field, Arc::new(Float32Array::from(values)), lengths).map_err(OperatorError::arrow(NAME))
        };
        let integers = |field: &Field, values: Vec<u32>, lengths: &[usize]| {
            list_column(field, unsigned(field, values)?, lengths).map_err(OperatorError::arrow(NAME))
        };
        let each = lengths(&|_| 1);
        let mut arrays = Vec::new();
        if !self.logz_temperatures.is_empty() {
            let values = all().flat_map(|s| s.logz.iter().copied()).collect();
            arrays.push(floats(next()?, values, &lengths(&|s| s.logz.len()))?);
        }
        if self.entropy {
            arrays.push(floats(next()?, all().map(|s| s.entropy).collect(), &each)?);
        }
        if !self.candidates.is_empty() {
            let values = all().flat_map(|s| s.candidates.iter().copied()).collect();
            arrays.push(floats(next()?, values, &lengths(&|s| s.candidates.len()))?);
        }
        let drawn = lengths(&|s| s.sampled.len());
        if self.samples.is_some() {
            arrays.push(integers(next()?, all().map(|s| s.sampled.len() as u32).collect(), &each)?);
            arrays.push(integers(next()?, sampled().map(|s| s.index).collect(), &drawn)?);
            arrays.push(integers(next()?, sampled().map(|s| s.count).collect(), &drawn)?);
        }
        if self.has_ratio() {
            arrays.push(floats(next()?, sampled().map(|s| s.ratio).collect(), &drawn)?);
        }
        if self.top_p.is_some() {
            let kept = lengths(&|s| s.top_p.len());
            arrays.push(integers(next()?, all().map(|s| s.top_p.len() as u32).collect(), &each)?);
            arrays.push(integers(next()?, top_p().map(|entry| entry.0).collect(), &kept)?);
            arrays.push(floats(next()?, top_p().map(|entry| entry.1).collect(), &kept)?);
            arrays.push(floats(next()?, all().map(|s| s.tail).collect(), &each)?);
        }
        Ok(arrays)
    }

    /// Estimates the bytes per token; `bits` is log2 V.
    pub(super) fn bytes_per_token(&self, bits: f64) -> f64 {
        let floats = self.logz_temperatures.len() + usize::from(self.entropy) + self.candidates.len();
        // Estimate: about a fifth of N draws are distinct, and about a tenth of `most` entries are needed.
        let distinct = self.samples.as_ref().map_or(0.0, |s| 1.0 + 0.8 * f64::from(s.draws).powf(0.7));
        let of_a_draw = bits / 8.0 + 0.7 + if self.has_ratio() { 3.6 } else { 0.0 };
        let kept = self.top_p.as_ref().map_or(0.0, |t| 1.0 + t.most as f64 * t.mass.powi(2) / 8.0);
        let of_a_token = if self.top_p.is_some() { 4.6 } else { 0.0 };
        let of_draws = if self.samples.is_some() { 1.0 } else { 0.0 };
        3.6 * floats as f64 + of_draws + distinct * of_a_draw + of_a_token + kept * (bits / 8.0 + 3.6)
    }
}

/// The signals stored in a batch.
#[derive(Debug, Clone)]
pub struct StoredSignals {
    asked: SignalSpec,
    has_ratio: bool,
    logz: Option<Widened<f32>>,
    entropy: Option<Widened<f32>>,
    candidates: Option<Widened<f32>>,
    sampled: Option<StoredSamples>,
    top_p: Option<StoredTopP>,
}

/// For each row, where the list of each position begins among the row's lists: [length + 1].
type Starts = Vec<Vec<usize>>;
/// Tokens, draws of each token, ratios.
type StoredSamples = (Starts, Widened<u32>, Widened<u32>, Option<Widened<f32>>);
/// Tokens, their log-probabilities, tail masses.
type StoredTopP = (Starts, Widened<u32>, Widened<f32>, Widened<f32>);

impl StoredSignals {
    /// Reads the signals of a batch. Also returns the rows in which lists or lengths do not match; do not call
    /// [`StoredSignals::at`] on those rows.
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn of(config: &SignalsConfig, batch: &RecordBatch) -> Result<(Self, Vec<Violation>), ArrowError> {
        let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
        let lengths: Vec<usize> = (0..batch.num_rows()).map(|row| tokens.range(row).len()).collect();
        let mut violations = Vec::new();
        let mut misfit = |name: &str, got: Vec<usize>, expected: Vec<usize>| {
            for (row, (got, expected)) in got.iter().zip(&expected).enumerate().filter(|(_, (a, b))| a != b) {
                violations.push(Violation::new(row, format!("{name} has {got} values, valid: {expected}")));
            }
        };
        let rows = 0..batch.num_rows();
        let mut floats = |name: &str, width: usize| {
            let column = float_column(batch, name)?;
            let got = rows.clone().map(|row| column.row(row).len()).collect();
            misfit(name, got, lengths.iter().map(|length| length * width).collect());
            Ok::<_, ArrowError>(column)
        };
        let asked = config.asked();
        let logz = (!asked.temperatures.is_empty()).then(|| floats(columns::LOGZ, asked.temperatures.len()));
        let entropy = asked.entropy.then(|| floats(columns::ENTROPY, 1));
        let candidates =
            (!asked.candidates.is_empty()).then(|| floats(columns::CANDIDATE_LOGPROB, asked.candidates.len()));
        let tail = asked.top_p.map(|_| floats(columns::TOP_P_TAIL, 1)).transpose()?;
        let mut lists = |count: &str, index: &str| {
            let (counts, indices) = (unsigned_column(batch, count)?, unsigned_column(batch, index)?);
            misfit(count, rows.clone().map(|row| counts.row(row).len()).collect(), lengths.clone());
            let starts: Starts = rows.clone().map(|row| starts(counts.row(row))).collect();
            let sums: Vec<usize> = starts.iter().map(|starts| starts.last().copied().unwrap_or(0)).collect();
            misfit(index, rows.clone().map(|row| indices.row(row).len()).collect(), sums.clone());
            Ok::<_, ArrowError>((starts, indices, sums))
        };
        let sampled = asked.sampling.map(|_| lists(columns::SAMPLED_COUNT, columns::SAMPLED_INDEX)).transpose()?;
        let top_p = asked.top_p.map(|_| lists(columns::TOP_P_COUNT, columns::TOP_P_INDEX)).transpose()?;
        let sampled = match sampled {
            Some((starts, indices, sums)) => {
                let times = unsigned_column(batch, columns::SAMPLED_TIMES)?;
                misfit(columns::SAMPLED_TIMES, rows.clone().map(|row| times.row(row).len()).collect(), sums.clone());
                let ratio = config.has_ratio().then(|| float_column(batch, columns::SAMPLED_RATIO)).transpose()?;
                if let Some(ratio) = &ratio {
                    misfit(columns::SAMPLED_RATIO, rows.clone().map(|row| ratio.row(row).len()).collect(), sums);
                }
                Some((starts, indices, times, ratio))
            }
            None => None,
        };
        let top_p = match (top_p, tail) {
            (Some((starts, indices, sums)), Some(tail)) => {
                let logprobs = float_column(batch, columns::TOP_P_LOGPROB)?;
                misfit(columns::TOP_P_LOGPROB, rows.clone().map(|row| logprobs.row(row).len()).collect(), sums);
                Some((starts, indices, logprobs, tail))
            }
            _ => None,
        };
        let (logz, entropy, candidates) = (logz.transpose()?, entropy.transpose()?, candidates.transpose()?);
        let has_ratio = config.has_ratio();
        Ok((Self { asked, has_ratio, logz, entropy, candidates, sampled, top_p }, violations))
    }

    /// Returns the signals that every position has.
    #[must_use]
    pub fn asked(&self) -> &SignalSpec {
        &self.asked
    }

    /// Returns the signals of a position in the form in which they were computed.
    #[must_use]
    pub fn at(&self, row: usize, position: usize) -> RowSignals {
        let some = |column: &Option<Widened<f32>>, width: usize| -> Vec<f32> {
            let values = column.as_ref().map(|column| &column.row(row)[position * width..(position + 1) * width]);
            values.unwrap_or_default().to_vec()
        };
        let range = |starts: &Starts| -> Range<usize> { starts[row][position]..starts[row][position + 1] };
        let mut signals = RowSignals {
            logz: some(&self.logz, self.asked.temperatures.len()),
            entropy: self.entropy.as_ref().map_or(0.0, |column| column.row(row)[position]),
            candidates: some(&self.candidates, self.asked.candidates.len()),
            ..RowSignals::default()
        };
        if let Some((starts, indices, times, ratio)) = &self.sampled {
            let of = |i: usize| SampledLogit {
                index: indices.row(row)[i],
                count: times.row(row)[i],
                ratio: ratio.as_ref().map_or(1.0, |ratio| ratio.row(row)[i]),
            };
            signals.sampled = range(starts).map(of).collect();
        }
        if let Some((starts, indices, logprobs, tail)) = &self.top_p {
            signals.top_p = range(starts).map(|i| (indices.row(row)[i], logprobs.row(row)[i])).collect();
            signals.tail = tail.row(row)[position];
        }
        signals
    }
}

fn starts(counts: &[u32]) -> Vec<usize> {
    let sum = |sum: &mut usize, count: &u32| {
        *sum += *count as usize;
        Some(*sum)
    };
    std::iter::once(0).chain(counts.iter().scan(0, sum)).collect()
}

/// Checks the ranges, order and sums of one position's signals; returns what is wrong.
fn wrong(asked: &SignalSpec, has_ratio: bool, signals: &RowSignals, vocab_size: usize) -> Option<String> {
    let most = (vocab_size as f64).ln();
    if let Some(bad) = signals.logz.iter().find(|v| !v.is_finite()) {
        return Some(format!("logz {bad}, valid: finite"));
    }
    if !(0.0..=most + 1e-4).contains(&f64::from(signals.entropy)) {
        return Some(format!("entropy {}, valid: 0 to ln V = {most}", signals.entropy));
    }
    if let Some(bad) = signals.candidates.iter().find(|v| v.is_nan() || **v > 0.0) {
        return Some(format!("candidate_logprob {bad}, valid: at most 0"));
    }
    if let Some(sampling) = &asked.sampling {
        let drawn = &signals.sampled;
        let sum: u64 = drawn.iter().map(|s| u64::from(s.count)).sum();
        if sum != u64::from(sampling.draws) || drawn.iter().any(|s| s.count == 0) {
            return Some(format!("sampled_times add up to {sum}, valid: {}, none 0", sampling.draws));
        }
        let ascends = drawn.is_sorted_by(|a, b| a.index < b.index);
        if !ascends || drawn.iter().any(|s| s.index as usize >= vocab_size) {
            return Some("sampled_index does not ascend within the vocabulary".into());
        }
        if let Some(bad) = drawn.iter().find(|s| has_ratio && !(s.ratio.is_finite() && s.ratio > 0.0)) {
            return Some(format!("sampled_ratio {}, valid: finite, above 0", bad.ratio));
        }
    }
    if let Some(top_p) = &asked.top_p {
        let kept = &signals.top_p;
        if !(1..=top_p.max_entries).contains(&kept.len()) {
            return Some(format!("top_p_count {}, valid: 1 to {}", kept.len(), top_p.max_entries));
        }
        let falls = kept.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 != b.0));
        let inside = kept.iter().all(|entry| (entry.0 as usize) < vocab_size && entry.1 <= 0.0);
        if !falls || !inside {
            return Some(format!("top-p entries {kept:?} do not fall within the vocabulary"));
        }
        let sum = kept.iter().map(|entry| f64::from(entry.1).exp()).sum::<f64>() + f64::from(signals.tail).exp();
        if !matches!((sum - 1.0).abs(), 0.0..=1e-4) {
            return Some(format!("the top-p entries and their tail hold {sum}, valid: 1"));
        }
    }
    None
}

/// Checks the signal columns of a batch.
pub(super) fn check(
    config: &ExtractConfig,
    batch: &RecordBatch,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    if config.signals.is_none() {
        return Ok(());
    }
    let (stored, misfits) = StoredSignals::of(&config.signals, batch)?;
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let ids = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    for row in 0..batch.num_rows() {
        if misfits.iter().any(|misfit| misfit.row == row) {
            continue;
        }
        let wrong = (0..ids[tokens.range(row)].len()).find_map(|position| {
            let message = wrong(&stored.asked, stored.has_ratio, &stored.at(row, position), config.vocab_size)?;
            Some(format!("position {position}: {message}"))
        });
        violations.extend(wrong.map(|message| Violation::new(row, message)));
    }
    violations.extend(misfits);
    Ok(())
}
