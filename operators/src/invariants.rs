//! Rules that every batch of sequences must follow. Operators declare them; debug builds check them before writing
//! shards, and `verify` checks them when reading.
//!
//! Cost: one pass over the columns, without the teacher.

use arrow::array::{Array, ArrayRef, AsArray, Float32Array, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Float16Type, UInt8Type, UInt16Type, UInt32Type};
use arrow::error::ArrowError;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::sequence_range::SequenceRange;

use crate::rows::ListRows;

/// What the checks compare the columns with.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckContext {
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Row length L.
    pub length: usize,
    /// The split that the rows belong to.
    pub split: SplitId,
    /// Indices of the split's sequences in the data set, if the plan knows them.
    pub sequence_range: Option<SequenceRange>,
}

/// A row that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    /// Row of the batch.
    pub row: usize,
    /// The value found and what is valid.
    pub message: String,
}

impl Violation {
    /// Creates an entry from a row and a message.
    pub fn new(row: usize, message: impl Into<String>) -> Self {
        Self { row, message: message.into() }
    }
}

/// Widens unsigned values of 8, 16 or 32 bits.
fn widen_unsigned(array: &ArrayRef) -> Option<Vec<u32>> {
    Some(match array.data_type() {
        DataType::UInt8 => array.as_primitive::<UInt8Type>().values().iter().map(|&v| u32::from(v)).collect(),
        DataType::UInt16 => array.as_primitive::<UInt16Type>().values().iter().map(|&v| u32::from(v)).collect(),
        DataType::UInt32 => array.as_primitive::<UInt32Type>().values().to_vec(),
        _ => return None,
    })
}

/// Widens tokens. A negative one becomes the largest value, which is in no vocabulary.
fn widen_tokens(array: &ArrayRef) -> Option<Vec<u32>> {
    let tokens = array.as_any().downcast_ref::<Int32Array>()?.values();
    Some(tokens.iter().map(|token| u32::try_from(*token).unwrap_or(u32::MAX)).collect())
}

/// Widens f16 or f32 values.
fn widen_floats(array: &ArrayRef) -> Option<Vec<f32>> {
    Some(match array.data_type() {
        DataType::Float16 => array.as_primitive::<Float16Type>().values().iter().map(|v| v.to_f32()).collect(),
        DataType::Float32 => array.as_any().downcast_ref::<Float32Array>()?.values().to_vec(),
        _ => return None,
    })
}

/// A list column as values of one type, for columns whose stored width varies.
#[derive(Debug, Clone)]
pub struct Widened<T> {
    values: Vec<T>,
    ranges: Vec<std::ops::Range<usize>>,
}

impl<T> Widened<T> {
    fn new(batch: &RecordBatch, name: &str, widen: fn(&ArrayRef) -> Option<Vec<T>>) -> Result<Self, ArrowError> {
        let rows = ListRows::from_batch(batch, name)?;
        let values = widen(rows.all_values()).ok_or_else(|| {
            ArrowError::SchemaError(format!("column {name} has items of type {}", rows.all_values().data_type()))
        })?;
        Ok(Self { values, ranges: (0..rows.len()).map(|row| rows.range(row)).collect() })
    }

    /// Returns the values of a row.
    pub fn row(&self, row: usize) -> &[T] {
        &self.values[self.ranges[row].clone()]
    }
}

/// Reads a column of lists of unsigned integers.
///
/// # Errors
/// Fails if it is missing or has another type.
pub fn unsigned_column(batch: &RecordBatch, name: &str) -> Result<Widened<u32>, ArrowError> {
    Widened::new(batch, name, widen_unsigned)
}

/// Reads a column of lists of tokens in int32.
///
/// # Errors
/// Fails if it is missing or has another type.
pub fn token_column(batch: &RecordBatch, name: &str) -> Result<Widened<u32>, ArrowError> {
    Widened::new(batch, name, widen_tokens)
}

/// Reads a column of lists of f16 or f32 values.
///
/// # Errors
/// Fails if it is missing or has another type.
pub fn float_column(batch: &RecordBatch, name: &str) -> Result<Widened<f32>, ArrowError> {
    Widened::new(batch, name, widen_floats)
}
