//! What must hold of every batch of sequences: written once, checked in debug builds where shards are written and by
//! `verify` where they are read.
//!
//! Cost: one pass over the columns; nothing here needs the teacher.

use arrow::array::{Array, ArrayRef, AsArray, BooleanArray, Float32Array, Int32Array, RecordBatch, UInt64Array};
use arrow::datatypes::{DataType, Float16Type, UInt8Type, UInt16Type, UInt32Type};
use arrow::error::ArrowError;
use stillhouse_schemas::columns;
use stillhouse_schemas::ids::SplitId;

use crate::pack::Breaks;
use crate::partitions::{PartitionsConfig, partition_row};
use crate::rows::{ListRows, sequence_ids};
use crate::subtokens;

/// What the columns are checked against.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// V.
    pub vocab_size: usize,
    /// L.
    pub length: usize,
    /// The split that made the rows.
    pub split: SplitId,
    /// Draws of the noise.
    pub draws: usize,
    /// k of the top-k.
    pub topk: usize,
    /// Base and length of the sub-tokens.
    pub subtokens: Option<(u32, usize)>,
    /// Special tokens of a text that cut its document into segments.
    pub breaks: Breaks,
    /// Config of the partitions, which are drawn again and compared.
    pub partitions: Option<PartitionsConfig>,
}

/// A row that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    /// Row in the batch.
    pub row: usize,
    /// What was got and what must be.
    pub message: String,
}

type Check = fn(&RecordBatch, &Limits, &mut Vec<Broken>) -> Result<(), ArrowError>;

/// Checks every rule on every row.
///
/// # Errors
/// When a column is missing or has another type than the format says.
pub fn check(batch: &RecordBatch, limits: &Limits) -> Result<Vec<Broken>, ArrowError> {
    let checks: [Check; 7] =
        [check_ids, check_tokens, check_documents, check_logprobs, check_noise, check_topk, check_views];
    let mut broken = Vec::new();
    for check in checks {
        check(batch, limits, &mut broken)?;
    }
    Ok(broken)
}

fn tell(broken: &mut Vec<Broken>, row: usize, message: String) {
    broken.push(Broken { row, message });
}

fn check_ids(batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let ids = sequence_ids(batch)?;
    for row in 0..ids.len() {
        let id = ids.value(row);
        if id >> 32 != u64::from(limits.split.0) {
            tell(broken, row, format!("sequence_id {id} is not of split {}", limits.split.0));
        }
        if row > 0 && id != ids.value(row - 1) + 1 {
            tell(broken, row, format!("sequence_id {id} does not follow {}", ids.value(row - 1)));
        }
    }
    Ok(())
}

fn check_tokens(batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let rows = ListRows::of(batch, columns::INPUT_IDS)?;
    let values = rows.values::<Int32Array>(columns::INPUT_IDS)?.values();
    let short = matches!(batch.column_by_name(columns::INPUT_IDS).map(|c| c.data_type()), Some(DataType::List(_)));
    for row in 0..rows.len() {
        let tokens = &values[rows.range(row)];
        if tokens.len() > limits.length || (tokens.len() < limits.length && !short) || tokens.is_empty() {
            tell(
                broken,
                row,
                format!("{} tokens, valid: {}{}", tokens.len(), limits.length, if short { " or fewer" } else { "" }),
            );
        }
        if let Some(id) = tokens.iter().find(|&&id| id < 0 || id as usize >= limits.vocab_size) {
            tell(broken, row, format!("token {id}, valid: 0 to {}", limits.vocab_size - 1));
        }
    }
    if let Some(mask) = batch.column_by_name(columns::ATTENTION_MASK) {
        let mask = ListRows::new(columns::ATTENTION_MASK, mask)?;
        let values = mask.values::<BooleanArray>(columns::ATTENTION_MASK)?;
        for row in 0..mask.len() {
            let range = mask.range(row);
            let valid = range.clone().take_while(|&i| values.value(i)).count();
            if range.clone().skip(valid).any(|i| values.value(i)) {
                tell(broken, row, "attention_mask is not a prefix".into());
            }
            if range.len() != rows.range(row).len() {
                tell(
                    broken,
                    row,
                    format!("attention_mask has {} values for {} tokens", range.len(), rows.range(row).len()),
                );
            }
        }
    }
    Ok(())
}

fn check_documents(batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let tokens = ListRows::of(batch, columns::INPUT_IDS)?;
    let token_values = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    let offsets = ListRows::of(batch, columns::DOCUMENT_OFFSETS)?;
    let values = offsets.values::<Int32Array>(columns::DOCUMENT_OFFSETS)?.values();
    let ids = ListRows::of(batch, columns::DOCUMENT_IDS)?;
    let id_values = ids.values::<UInt64Array>(columns::DOCUMENT_IDS)?.values();
    for row in 0..offsets.len() {
        let row_offsets = &values[offsets.range(row)];
        let row_ids = &id_values[ids.range(row)];
        if row_offsets.len() != row_ids.len() {
            tell(broken, row, format!("{} document offsets, {} document ids", row_offsets.len(), row_ids.len()));
        }
        let inside = row_offsets.last().is_some_and(|&last| (last as usize) < tokens.range(row).len());
        if row_offsets.first() != Some(&0) || !row_offsets.is_sorted_by(|a, b| a < b) || !inside {
            tell(broken, row, format!("document_offsets {row_offsets:?} do not ascend from 0 within the row"));
        }
        if !row_ids.is_sorted() {
            tell(broken, row, "document_ids do not ascend".into());
        }
        let ids = &token_values[tokens.range(row)];
        let starts = row_offsets.iter().skip(1).filter_map(|&start| usize::try_from(start).ok());
        let same = row_ids.windows(2).map(|pair| pair[0] == pair[1]);
        if let Some((start, _)) = starts.zip(same).find(|(start, same)| *same && !limits.breaks.is_at(ids, *start)) {
            tell(broken, row, format!("a document is cut at {start}, where no special token of its text is"));
        }
    }
    Ok(())
}

fn check_logprobs(batch: &RecordBatch, _: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let Some(column) = batch.column_by_name(columns::LOGPROB) else { return Ok(()) };
    let rows = ListRows::new(columns::LOGPROB, column)?;
    let tokens = ListRows::of(batch, columns::INPUT_IDS)?;
    let values = rows.values::<Float32Array>(columns::LOGPROB)?.values();
    for row in 0..rows.len() {
        if rows.range(row).len() != tokens.range(row).len() {
            tell(
                broken,
                row,
                format!("{} log-probabilities for {} tokens", rows.range(row).len(), tokens.range(row).len()),
            );
        }
        if let Some(bad) = values[rows.range(row)].iter().find(|v| !v.is_finite() || **v > 0.0) {
            tell(broken, row, format!("logprob {bad}, valid: finite, at most 0"));
        }
    }
    Ok(())
}

/// Unsigned values of any width.
fn unsigned(array: &ArrayRef) -> Option<Vec<u32>> {
    Some(match array.data_type() {
        DataType::UInt8 => array.as_primitive::<UInt8Type>().values().iter().map(|&v| u32::from(v)).collect(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().values().iter().map(|&v| u32::from(v)).collect(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().values().to_vec(),
        _ => return None,
    })
}

/// Floats of either stored width.
fn floats(array: &ArrayRef) -> Option<Vec<f32>> {
    Some(match array.data_type() {
        DataType::Float16 => array.as_primitive::<Float16Type>().values().iter().map(|v| v.to_f32()).collect(),
        DataType::Float32 => array.as_any().downcast_ref::<Float32Array>()?.values().to_vec(),
        _ => return None,
    })
}

/// A list column as vectors of one type, row by row: for the columns whose stored width varies.
#[derive(Debug, Clone)]
pub struct Widened<T> {
    values: Vec<T>,
    ranges: Vec<std::ops::Range<usize>>,
}

impl<T> Widened<T> {
    fn new(batch: &RecordBatch, name: &str, widen: fn(&ArrayRef) -> Option<Vec<T>>) -> Result<Self, ArrowError> {
        let rows = ListRows::of(batch, name)?;
        let values = widen(rows.all_values()).ok_or_else(|| {
            ArrowError::SchemaError(format!("column {name} has items of type {}", rows.all_values().data_type()))
        })?;
        Ok(Self { values, ranges: (0..rows.len()).map(|row| rows.range(row)).collect() })
    }

    /// The values of a row.
    pub fn row(&self, row: usize) -> &[T] {
        &self.values[self.ranges[row].clone()]
    }
}

/// A column of unsigned integers.
///
/// # Errors
/// When it is missing or has another type.
pub fn unsigned_column(batch: &RecordBatch, name: &str) -> Result<Widened<u32>, ArrowError> {
    Widened::new(batch, name, unsigned)
}

/// A column of f16 or f32 values.
///
/// # Errors
/// When it is missing or has another type.
pub fn float_column(batch: &RecordBatch, name: &str) -> Result<Widened<f32>, ArrowError> {
    Widened::new(batch, name, floats)
}

fn check_noise(batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let tokens = ListRows::of(batch, columns::INPUT_IDS)?;
    let ids = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    if batch.column_by_name(columns::NOISE).is_some() {
        let noise = float_column(batch, columns::NOISE)?;
        for row in 0..batch.num_rows() {
            let expected = limits.draws * tokens.range(row).len() * limits.vocab_size;
            if noise.row(row).len() != expected || noise.row(row).iter().any(|v| v.is_nan()) {
                tell(broken, row, format!("noise has {} values, valid: {expected}, none NaN", noise.row(row).len()));
            }
        }
    }
    if batch.column_by_name(columns::NOISE_COUNT).is_none() {
        return Ok(());
    }
    let counts = unsigned_column(batch, columns::NOISE_COUNT)?;
    let indices = unsigned_column(batch, columns::NOISE_INDEX)?;
    let logprobs = float_column(batch, columns::NOISE_LOGPROB)?;
    for row in 0..batch.num_rows() {
        let (counts, indices, logprobs) = (counts.row(row), indices.row(row), logprobs.row(row));
        let row_ids = &ids[tokens.range(row)];
        let sum: usize = counts.iter().map(|&c| c as usize).sum();
        if counts.len() != limits.draws * row_ids.len() || sum != indices.len() || sum != logprobs.len() {
            tell(
                broken,
                row,
                format!(
                    "{} counts that add up to {sum}, {} indices, {} values, for {} draws of {} tokens",
                    counts.len(),
                    indices.len(),
                    logprobs.len(),
                    limits.draws,
                    row_ids.len()
                ),
            );
            continue;
        }
        let mut rest = indices;
        for (i, &count) in counts.iter().enumerate() {
            let (list, after) = rest.split_at(count as usize);
            rest = after;
            let token = row_ids[i % row_ids.len()] as u32;
            // an entry may occur more than once: its values add up
            let sound = list.is_sorted_by(|a, b| a <= b)
                && list.iter().all(|&k| (k as usize) < limits.vocab_size && k != token);
            if !sound {
                tell(
                    broken,
                    row,
                    format!(
                        "corrections {list:?} of position {} are not in ascending order below {} without {token}",
                        i % row_ids.len(),
                        limits.vocab_size
                    ),
                );
            }
        }
        if let Some(bad) = logprobs.iter().find(|v| !v.is_finite() || **v > 0.0) {
            tell(broken, row, format!("noise_logprob {bad}, valid: finite, at most 0"));
        }
    }
    Ok(())
}

fn check_topk(batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    if batch.column_by_name(columns::TOPK_INDEX).is_none() {
        return Ok(());
    }
    let tokens = ListRows::of(batch, columns::INPUT_IDS)?;
    let indices = ListRows::of(batch, columns::TOPK_INDEX)?;
    let index_values = indices.values::<Int32Array>(columns::TOPK_INDEX)?.values();
    let logprobs = float_column(batch, columns::TOPK_LOGPROB)?;
    for row in 0..batch.num_rows() {
        let (list, values) = (&index_values[indices.range(row)], logprobs.row(row));
        let expected = tokens.range(row).len() * limits.topk;
        if list.len() != expected || values.len() != expected {
            tell(broken, row, format!("{} top-k entries, {} values, valid: {expected}", list.len(), values.len()));
            continue;
        }
        for (indices, values) in list.chunks(limits.topk).zip(values.chunks(limits.topk)) {
            let in_range = indices.iter().all(|&i| i >= 0 && (i as usize) < limits.vocab_size);
            if !in_range || !values.is_sorted_by(|a, b| a >= b) || values.iter().any(|v| *v > 0.0) {
                tell(broken, row, format!("top-k entries {indices:?} {values:?} do not descend within the vocabulary"));
                break;
            }
        }
    }
    Ok(())
}

fn check_views(batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
    let tokens = ListRows::of(batch, columns::INPUT_IDS)?;
    let ids = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    if let Some((base, length)) = limits.subtokens {
        let digits = unsigned_column(batch, columns::SUBTOKENS)?;
        for row in 0..batch.num_rows() {
            let row_ids = &ids[tokens.range(row)];
            let decoded = digits.row(row).chunks(length).map(|d| {
                let d: Vec<u16> = d.iter().map(|&v| v as u16).collect();
                subtokens::decode(&d, base, limits.vocab_size).map(|id| id as i32)
            });
            if !decoded.eq(row_ids.iter().map(|&id| Some(id))) {
                tell(broken, row, "subtokens do not decode to input_ids".into());
            }
        }
    }
    let Some(config) = &limits.partitions else { return Ok(()) };
    let groups = ListRows::of(batch, columns::PARTITION)?;
    let group_values = groups.values::<BooleanArray>(columns::PARTITION)?;
    let times = float_column(batch, columns::PARTITION_T)?;
    let sequences = crate::extract::sequences(batch)?;
    for (row, sequence) in sequences.iter().enumerate() {
        let length = sequence.tokens.len();
        let mask: Vec<bool> = (0..length).map(|i| i < sequence.valid).collect();
        let stored: Vec<bool> = groups.range(row).map(|i| group_values.value(i)).collect();
        let expected = partition_row(config, sequence.id, &mask);
        let same = expected.iter().flat_map(|p| &p.groups).eq(stored.iter())
            && expected.iter().map(|p| p.t).eq(times.row(row).iter().copied());
        if !same {
            tell(broken, row, "partitions are not those of the seed".into());
        }
        for (view, stored) in stored.chunks(length.max(1)).enumerate() {
            let ones = stored.iter().filter(|&&g| g).count();
            if sequence.valid >= 2 && (ones == 0 || ones == sequence.valid) {
                tell(broken, row, format!("view {view}: a group is empty"));
            }
        }
    }
    Ok(())
}
