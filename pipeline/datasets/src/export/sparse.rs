//! The teacher's log-probabilities at each position as pairs of id and ln p, read from whichever columns the data set
//! has.
//!
//! ```text
//!   topk        topk_index, topk_logprob                           the k most likely tokens
//!   top_p       top_p_count, top_p_index, top_p_logprob            the most likely tokens up to a probability mass
//!   samples     sampled_count, sampled_index, sampled_times[, …]   ln(times/N · ratio): unbiased estimates of p
//!   candidates  candidate_logprob                                  the job's ids, the same at every position
//! ```
//!
//! Other projects' readers take a fixed number of entries per position. This module fills missing entries with ids that
//! the position does not have yet, so that it overwrites no entry. Their log-probability is [`FLOOR`], whose probability
//! is 0 in every float type. It also replaces −∞ by the floor: those readers multiply p by ln p, and 0 · −∞ is NaN.

use std::cmp::Ordering;
use std::ops::Range;

use arrow::array::{
    Array, ArrayRef, AsArray, BooleanArray, Float32Array, Int32Array, RecordBatch, UInt16Array, UInt32Array,
};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Int32Type};
use arrow::error::ArrowError;
use serde::{Deserialize, Serialize};
use stillhouse_operators::generate::GIVEN;
use stillhouse_operators::rows::ListRows;
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::Manifest;

/// Lowest log-probability that is written. Megatron-LM's marker for "no entry"; 16-bit floats can represent it.
pub(super) const FLOOR: f32 = -1000.0;

/// The columns that hold the teacher's log-probabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Signal {
    /// The k most likely entries.
    #[serde(rename = "topk")]
    #[value(name = "topk")]
    TopK,
    /// The most likely entries up to a probability mass.
    TopP,
    /// Sampled logits.
    Samples,
    /// The entries that the job lists.
    Candidates,
}

impl Signal {
    /// All signals, in order of preference if the caller does not choose one.
    pub const ALL: [Self; 4] = [Self::TopK, Self::TopP, Self::Samples, Self::Candidates];

    /// Name of the signal, as in `--signal`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TopK => "topk",
            Self::TopP => "top_p",
            Self::Samples => "samples",
            Self::Candidates => "candidates",
        }
    }

    /// The column whose presence means that the data set has the signal.
    fn column(self) -> &'static str {
        match self {
            Self::TopK => columns::TOPK_LOGPROB,
            Self::TopP => columns::TOP_P_LOGPROB,
            Self::Samples => columns::SAMPLED_TIMES,
            Self::Candidates => columns::CANDIDATE_LOGPROB,
        }
    }
}

/// How to read a data set's log-probabilities from the columns of one signal.
#[derive(Debug, Clone)]
pub(super) struct Sparse {
    /// The signal that is read.
    pub signal: Signal,
    /// Entries per position after filling.
    pub width: usize,
    /// Exclusive upper bound of ids; entries with other ids are left out.
    pub ids: u32,
    candidates: Vec<u32>,
    draws: f64,
    weighted: bool,
    masked: bool,
    /// Whether the teacher wrote the rows, so that each row may begin with given positions.
    pub given: bool,
}

impl Sparse {
    /// Finds the signal of a data set: `asked`, or the first that it has.
    ///
    /// # Errors
    /// A message, if the data set has no signal or not the one asked for.
    pub fn of(manifest: &Manifest, asked: Option<Signal>, ids: u32) -> Result<Self, String> {
        let has = |name: &str| manifest.columns.iter().any(|column| column.name == name);
        let there: Vec<Signal> = Signal::ALL.into_iter().filter(|signal| has(signal.column())).collect();
        let keys = || there.iter().map(|signal| signal.name()).collect::<Vec<_>>().join(", ");
        let signal = match (asked, there.first()) {
            (Some(asked), _) if there.contains(&asked) => asked,
            (None, Some(first)) => *first,
            (_, None) => {
                return Err("has no log-probabilities of a teacher beyond those of its tokens: no column topk_logprob, \
                            top_p_logprob, sampled_times or candidate_logprob; a job with `extract.topk` makes the first"
                    .into());
            }
            (Some(asked), Some(_)) => {
                return Err(format!(
                    "has no column {}; --signal: got {}, valid: {}",
                    asked.column(),
                    asked.name(),
                    keys()
                ));
            }
        };
        let extract = manifest.job.extract.as_ref().ok_or("its job has no teacher, its columns do")?;
        let vocab = manifest.vocab_size as usize;
        let (width, draws) = match signal {
            Signal::TopK => (extract.topk as usize, 1),
            Signal::TopP => (extract.top_p.as_ref().map_or(0, |top_p| top_p.most as usize), 1),
            Signal::Samples => {
                extract.samples.as_ref().map_or((0, 1), |samples| (samples.draws as usize, samples.draws))
            }
            Signal::Candidates => (extract.candidates.len(), 1),
        };
        let width = width.min(vocab);
        if width == 0 || width > ids as usize {
            return Err(format!("{}: {width} entries of each position, {ids} ids that they can have", signal.name()));
        }
        Ok(Self {
            signal,
            width,
            ids,
            candidates: extract.candidates.clone(),
            draws: f64::from(draws),
            weighted: has(columns::SAMPLED_RATIO),
            masked: has(columns::ATTENTION_MASK),
            given: has(GIVEN),
        })
    }

    /// Names of the columns to read.
    pub fn columns(&self) -> Vec<String> {
        let mut names = vec![columns::INPUT_IDS];
        names.extend(self.masked.then_some(columns::ATTENTION_MASK));
        names.extend(self.given.then_some(GIVEN));
        names.extend_from_slice(match self.signal {
            Signal::TopK => &[columns::TOPK_INDEX, columns::TOPK_LOGPROB],
            Signal::TopP => &[columns::TOP_P_COUNT, columns::TOP_P_INDEX, columns::TOP_P_LOGPROB],
            Signal::Samples => &[columns::SAMPLED_COUNT, columns::SAMPLED_INDEX, columns::SAMPLED_TIMES],
            Signal::Candidates => &[columns::CANDIDATE_LOGPROB],
        });
        names.extend((self.signal == Signal::Samples && self.weighted).then_some(columns::SAMPLED_RATIO));
        names.into_iter().map(str::to_owned).collect()
    }

    /// Prepares a batch for reading.
    ///
    /// # Errors
    /// If a column has another type than the format requires.
    pub fn batch<'a>(&'a self, batch: &'a RecordBatch) -> Result<SparseBatch<'a>, ArrowError> {
        let (index, logprob, count) = match self.signal {
            Signal::TopK => (Some(columns::TOPK_INDEX), columns::TOPK_LOGPROB, None),
            Signal::TopP => (Some(columns::TOP_P_INDEX), columns::TOP_P_LOGPROB, Some(columns::TOP_P_COUNT)),
            Signal::Samples => (Some(columns::SAMPLED_INDEX), columns::SAMPLED_TIMES, Some(columns::SAMPLED_COUNT)),
            Signal::Candidates => (None, columns::CANDIDATE_LOGPROB, None),
        };
        let list = |name: &'static str| ListRows::from_batch(batch, name).map(|rows| (name, rows));
        let values = list(logprob)?;
        let same = |other: &ListRows<'_>| (0..other.len()).all(|row| other.range(row) == values.1.range(row));
        let mut index_values = None;
        if let Some(name) = index {
            let rows = ListRows::from_batch(batch, name)?;
            if !same(&rows) {
                return Err(ArrowError::SchemaError(format!("columns {name} and {logprob} have different lengths")));
            }
            let ids = cast(rows.all_values(), &DataType::UInt32)?;
            if ids.null_count() > 0 {
                return Err(ArrowError::SchemaError(format!("column {name} has ids below 0, or none")));
            }
            index_values = Some(ids.as_primitive().clone());
        }
        let numbers = match self.signal {
            Signal::Samples => {
                let ratio = match self.weighted {
                    true => {
                        let rows = ListRows::from_batch(batch, columns::SAMPLED_RATIO)?;
                        if !same(&rows) {
                            let what =
                                format!("columns {} and {logprob} have different lengths", columns::SAMPLED_RATIO);
                            return Err(ArrowError::SchemaError(what));
                        }
                        Some(rows.values::<Float32Array>(columns::SAMPLED_RATIO)?)
                    }
                    false => None,
                };
                Numbers::Times(values.1.values::<UInt16Array>(logprob)?, ratio)
            }
            _ => Numbers::Logprob(values.1.values::<Float32Array>(logprob)?),
        };
        let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
        let mask = match self.masked {
            true => {
                let rows = ListRows::from_batch(batch, columns::ATTENTION_MASK)?;
                Some((rows.values::<BooleanArray>(columns::ATTENTION_MASK)?, rows))
            }
            false => None,
        };
        let count = match count {
            Some(name) => {
                let rows = ListRows::from_batch(batch, name)?;
                Some((rows.values::<UInt16Array>(name)?, rows))
            }
            None => None,
        };
        Ok(SparseBatch {
            of: self,
            ids: tokens.values::<Int32Array>(columns::INPUT_IDS)?,
            tokens,
            mask,
            given: if self.given { Some(given(batch)?) } else { None },
            index: index_values,
            numbers,
            bounds: values.1,
            count,
        })
    }
}

fn given(batch: &RecordBatch) -> Result<&Int32Array, ArrowError> {
    let column: Option<&ArrayRef> = batch.column_by_name(GIVEN);
    let numbers = column.and_then(|column| column.as_primitive_opt::<Int32Type>());
    numbers.ok_or_else(|| ArrowError::SchemaError(format!("column {GIVEN} is missing or no int32")))
}

enum Numbers<'a> {
    Logprob(&'a Float32Array),
    Times(&'a UInt16Array, Option<&'a Float32Array>),
}

/// A batch of rows with the entries of their positions.
pub(super) struct SparseBatch<'a> {
    of: &'a Sparse,
    tokens: ListRows<'a>,
    ids: &'a Int32Array,
    mask: Option<(&'a BooleanArray, ListRows<'a>)>,
    given: Option<&'a Int32Array>,
    index: Option<UInt32Array>,
    numbers: Numbers<'a>,
    bounds: ListRows<'a>,
    count: Option<(&'a UInt16Array, ListRows<'a>)>,
}

/// A row of a [`SparseBatch`].
pub(super) struct Row<'a> {
    /// Token ids, including padding.
    pub tokens: &'a [i32],
    /// Number of tokens without padding, which is at the end.
    pub length: usize,
    /// Number of given positions at the start, if the teacher wrote the rest; else 0.
    pub given: usize,
    /// Offsets of the entries of each position, and the end of the last one.
    bounds: Vec<usize>,
}

impl<'a> SparseBatch<'a> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Reads a row.
    ///
    /// # Errors
    /// A message, if the lengths of the row's columns do not match.
    pub fn row(&self, row: usize) -> Result<Row<'a>, String> {
        let range = self.tokens.range(row);
        let tokens = self.ids.values().get(range).ok_or("input_ids end early")?;
        let length = match &self.mask {
            Some((mask, rows)) => rows.range(row).take_while(|&i| mask.value(i)).count(),
            None => tokens.len(),
        };
        let entries = self.bounds.range(row);
        let mut bounds = Vec::with_capacity(tokens.len() + 1);
        bounds.push(entries.start);
        let mut end = entries.start;
        match &self.count {
            Some((counts, rows)) => bounds.extend(rows.range(row).map(|i| {
                end += usize::from(counts.value(i));
                end
            })),
            None => bounds.extend(tokens.iter().map(|_| {
                end += self.of.width;
                end
            })),
        }
        if bounds.len() != tokens.len() + 1 || end != entries.end {
            return Err(format!(
                "{} tokens, {} entries of {}, which are of {} positions that have {} together",
                tokens.len(),
                entries.len(),
                self.of.signal.name(),
                bounds.len() - 1,
                end - entries.start
            ));
        }
        let given = self.given.map_or(0, |given| given.value(row).max(0) as usize);
        Ok(Row { tokens, length: length.min(tokens.len()), given, bounds })
    }

    fn entry(&self, at: usize, first: usize) -> (u32, f32) {
        let id = match &self.index {
            Some(index) => index.value(at),
            None => self.of.candidates.get(at - first).copied().unwrap_or(u32::MAX),
        };
        let logprob = match self.numbers {
            Numbers::Logprob(values) => values.value(at),
            Numbers::Times(times, ratio) => {
                let share = f64::from(times.value(at)) / self.of.draws;
                libm::log(share * ratio.map_or(1.0, |ratio| f64::from(ratio.value(at)))) as f32
            }
        };
        // NaN becomes the floor, too
        (id, if logprob > FLOOR { logprob } else { FLOOR })
    }
}

/// The entries of a position, filled up to a fixed width, and a count of dropped entries.
pub(super) struct Entries {
    /// Ids of the position that was read last.
    pub ids: Vec<u32>,
    /// Their log-probabilities, in descending order.
    pub logprobs: Vec<f32>,
    /// Number of entries dropped so far because their ids have no token.
    pub left_out: u64,
    taken: Vec<u32>,
    reading: u32,
    sorted: Vec<(u32, f32)>,
}

impl Entries {
    /// Creates empty entries.
    pub fn new(of: &Sparse) -> Self {
        Self {
            ids: Vec::with_capacity(of.width),
            logprobs: Vec::with_capacity(of.width),
            left_out: 0,
            taken: vec![0; of.ids as usize],
            reading: 0,
            sorted: Vec::with_capacity(of.width),
        }
    }

    /// Reads a position. Returns the number of entries that come from the teacher.
    pub fn read(&mut self, batch: &SparseBatch<'_>, row: &Row<'_>, position: usize) -> usize {
        let range: Range<usize> = match row.bounds.get(position..position + 2) {
            Some(bounds) => bounds[0]..bounds[1],
            None => 0..0,
        };
        self.next();
        for at in range.clone() {
            let (id, logprob) = batch.entry(at, range.start);
            match self.taken.get_mut(id as usize) {
                Some(taken) if *taken != self.reading => {
                    *taken = self.reading;
                    self.sorted.push((id, logprob));
                }
                _ => self.left_out += 1,
            }
        }
        if matches!(batch.of.signal, Signal::Samples | Signal::Candidates) {
            let falling = |a: &(u32, f32), b: &(u32, f32)| match b.1.total_cmp(&a.1) {
                Ordering::Equal => a.0.cmp(&b.0),
                other => other,
            };
            self.sorted.sort_unstable_by(falling);
        }
        let there = self.sorted.len();
        self.fill(batch.of.width);
        there
    }

    /// Fills a position for which there is no prediction.
    pub fn fill_empty(&mut self, width: usize) {
        self.next();
        self.fill(width);
    }

    fn next(&mut self) {
        self.sorted.clear();
        self.ids.clear();
        self.logprobs.clear();
        self.reading = self.reading.wrapping_add(1);
        if self.reading == 0 {
            self.taken.fill(0);
            self.reading = 1;
        }
    }

    fn fill(&mut self, width: usize) {
        self.ids.extend(self.sorted.iter().map(|entry| entry.0));
        self.logprobs.extend(self.sorted.iter().map(|entry| entry.1));
        let free = self.taken.iter().enumerate().filter(|(_, taken)| **taken != self.reading).map(|(id, _)| id as u32);
        self.ids.extend(free.take(width.saturating_sub(self.ids.len())));
        self.logprobs.resize(width, FLOOR);
    }
}

/// Float type of the exported values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ValueType {
    /// Single precision, as in the data set.
    #[default]
    Float32,
    /// Half precision: error at most |ln p| / 2,048.
    Float16,
    /// bfloat16: error at most |ln p| / 256.
    Bfloat16,
}

impl ValueType {
    /// Name of the type, as in `--dtype` and DistillKit.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// Bytes per value.
    pub(super) fn bytes(self) -> usize {
        if self == Self::Float32 { 4 } else { 2 }
    }

    /// Appends values in little-endian order, each rounded to nearest.
    pub(super) fn put(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::Float32 => values.iter().for_each(|v| out.extend(v.to_le_bytes())),
            Self::Float16 => values.iter().for_each(|v| out.extend(half::f16::from_f32(*v).to_le_bytes())),
            Self::Bfloat16 => values.iter().for_each(|v| out.extend(half::bf16::from_f32(*v).to_le_bytes())),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, FixedSizeListArray, ListArray};
    use arrow::buffer::OffsetBuffer;
    use arrow::datatypes::Field;

    use super::*;

    fn fixed(values: ArrayRef, each: usize) -> ArrayRef {
        let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
        Arc::new(FixedSizeListArray::new(item, each as i32, values, None))
    }

    fn ragged(values: ArrayRef, lengths: &[usize]) -> ArrayRef {
        let item = Arc::new(Field::new_list_field(values.data_type().clone(), true));
        Arc::new(ListArray::new(item, OffsetBuffer::from_lengths(lengths.iter().copied()), values, None))
    }

    pub fn sparse(signal: Signal, width: usize, ids: u32) -> Sparse {
        Sparse { signal, width, ids, candidates: vec![7, 3], draws: 4.0, weighted: false, masked: false, given: false }
    }

    /// Two rows of `length` tokens with top-k entries.
    pub fn topk(length: usize, ids: Vec<i32>, logprobs: Vec<f32>) -> RecordBatch {
        let entries = logprobs.len();
        let tokens: ArrayRef = Arc::new(Int32Array::from_iter_values((0..length as i32).cycle().take(length * 2)));
        let columns = [
            (columns::INPUT_IDS, fixed(tokens, length)),
            (columns::TOPK_INDEX, fixed(Arc::new(Int32Array::from(ids)), entries / 2)),
            (columns::TOPK_LOGPROB, fixed(Arc::new(Float32Array::from(logprobs)), entries / 2)),
        ];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    fn sampled(counts: Vec<u16>, index: Vec<u16>, times: Vec<u16>, lengths: &[usize]) -> RecordBatch {
        let rows = lengths.len();
        let length = counts.len() / rows;
        let tokens: ArrayRef = Arc::new(Int32Array::from(vec![1; length * rows]));
        let columns = [
            (columns::INPUT_IDS, fixed(tokens, length)),
            (columns::SAMPLED_COUNT, fixed(Arc::new(UInt16Array::from(counts)), length)),
            (columns::SAMPLED_INDEX, ragged(Arc::new(UInt16Array::from(index)), lengths)),
            (columns::SAMPLED_TIMES, ragged(Arc::new(UInt16Array::from(times)), lengths)),
        ];
        RecordBatch::try_from_iter(columns).unwrap()
    }

    #[test]
    fn what_is_missing_is_filled_with_other_ids() {
        let of = sparse(Signal::TopK, 4, 9);
        let ids = vec![8, 0, 2, 1, 5, 9, 4, 6, 3, 2, 1, 0, 8, 7, 6, 5];
        let none = f32::NEG_INFINITY;
        let mut logprobs = vec![-1.0; 16];
        logprobs[..8].copy_from_slice(&[-0.1, -2.0, none, f32::NAN, -0.5, -0.6, -1e9, none]);
        let batch = topk(2, ids, logprobs);
        let batch = of.batch(&batch).unwrap();
        let row = batch.row(0).unwrap();
        let mut entries = Entries::new(&of);
        assert_eq!(entries.read(&batch, &row, 0), 4);
        assert_eq!(
            (entries.ids.as_slice(), entries.logprobs.as_slice()),
            (&[8, 0, 2, 1][..], &[-0.1, -2.0, FLOOR, FLOOR][..])
        );
        // id 9 has no token: another id fills its place, at the end
        assert_eq!(entries.read(&batch, &row, 1), 3);
        assert_eq!(
            (entries.ids.as_slice(), entries.logprobs.as_slice()),
            (&[5, 4, 6, 0][..], &[-0.5, FLOOR, FLOOR, FLOOR][..])
        );
        assert_eq!(entries.left_out, 1);
        entries.fill_empty(4);
        assert_eq!((entries.ids.as_slice(), entries.logprobs.as_slice()), (&[0, 1, 2, 3][..], &[FLOOR; 4][..]));
        // past the end of the row there are no entries
        assert_eq!(entries.read(&batch, &row, 2), 0);
    }

    #[test]
    fn draws_become_estimates_the_largest_first() {
        let of = sparse(Signal::Samples, 3, 10);
        let batch = sampled(vec![2, 1, 3, 0], vec![4, 9, 0, 1, 2, 3], vec![1, 3, 4, 1, 2, 1], &[3, 3]);
        let batch = of.batch(&batch).unwrap();
        let mut entries = Entries::new(&of);
        let rows = [batch.row(0).unwrap(), batch.row(1).unwrap()];
        let ln = |p: f64| p.ln() as f32;
        assert_eq!(entries.read(&batch, &rows[0], 0), 2);
        assert_eq!(
            (entries.ids.as_slice(), entries.logprobs.as_slice()),
            (&[9, 4, 0][..], &[ln(0.75), ln(0.25), FLOOR][..])
        );
        assert_eq!(entries.read(&batch, &rows[0], 1), 1);
        assert_eq!((entries.ids.as_slice(), entries.logprobs.as_slice()), (&[0, 1, 2][..], &[0.0, FLOOR, FLOOR][..]));
        assert_eq!(entries.read(&batch, &rows[1], 0), 3);
        assert_eq!(
            (entries.ids.as_slice(), entries.logprobs.as_slice()),
            (&[2, 1, 3][..], &[ln(0.5), ln(0.25), ln(0.25)][..])
        );
        assert_eq!(entries.read(&batch, &rows[1], 1), 0);
    }

    #[test]
    fn counts_that_do_not_add_up_are_an_error() {
        let of = sparse(Signal::Samples, 3, 10);
        let batch = sampled(vec![2, 2], vec![4, 9, 0], vec![1, 3, 4], &[3]);
        let error = of.batch(&batch).unwrap().row(0).err().unwrap();
        assert!(error.contains("2 tokens, 3 entries of samples") && error.contains("4 together"), "{error}");
        let of = sparse(Signal::TopK, 3, 10);
        let batch = topk(2, vec![1; 8], vec![0.0; 8]);
        assert!(of.batch(&batch).unwrap().row(0).is_err());
        let error = sparse(Signal::TopP, 3, 10).batch(&batch).err().unwrap().to_string();
        assert!(error.contains("top_p_logprob is missing"), "{error}");
        let negative = topk(2, vec![-1; 8], vec![0.0; 8]);
        assert!(sparse(Signal::TopK, 2, 10).batch(&negative).err().unwrap().to_string().contains("below 0"));
    }

    #[test]
    fn values_are_rounded_to_the_nearest() {
        let values = [-0.1f32, -17.77, FLOOR, 0.0];
        for (kind, relative) in
            [(ValueType::Float32, 0.0), (ValueType::Float16, 2f32.powi(-11)), (ValueType::Bfloat16, 2f32.powi(-8))]
        {
            let mut bytes = Vec::new();
            kind.put(&values, &mut bytes);
            assert_eq!(bytes.len(), values.len() * kind.bytes());
            for (value, stored) in values.iter().zip(bytes.chunks(kind.bytes())) {
                let back = match kind {
                    ValueType::Float32 => f32::from_le_bytes(stored.try_into().unwrap()),
                    ValueType::Float16 => half::f16::from_le_bytes(stored.try_into().unwrap()).to_f32(),
                    ValueType::Bfloat16 => half::bf16::from_le_bytes(stored.try_into().unwrap()).to_f32(),
                };
                assert!((back - value).abs() <= relative * value.abs(), "{kind:?}: {value} became {back}");
            }
        }
    }
}
