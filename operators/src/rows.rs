//! Reads and builds the list columns of sequences, with rows of one length or of many.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, FixedSizeListArray, ListArray, RecordBatch, UInt64Array};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;

/// The values of a list column (list or fixed-size list) and the bounds of each row.
#[derive(Debug, Clone)]
pub struct ListRows<'a> {
    values: &'a ArrayRef,
    offsets: Vec<usize>,
}

impl<'a> ListRows<'a> {
    /// Reads a list column; `name` is for error messages.
    ///
    /// # Errors
    /// Fails if the column is not a list.
    pub fn new(name: &str, array: &'a ArrayRef) -> Result<Self, ArrowError> {
        if let Some(list) = array.as_any().downcast_ref::<FixedSizeListArray>() {
            let width = list.value_length() as usize;
            let offsets = (0..=list.len()).map(|i| i * width).collect();
            return Ok(Self { values: list.values(), offsets });
        }
        if let Some(list) = array.as_any().downcast_ref::<ListArray>() {
            let offsets = list.value_offsets().iter().map(|&o| o as usize).collect();
            return Ok(Self { values: list.values(), offsets });
        }
        Err(ArrowError::SchemaError(format!("column {name} has type {}, valid: a list", array.data_type())))
    }

    /// Reads the list column `name` of a batch.
    ///
    /// # Errors
    /// Fails if it is missing or not a list.
    pub fn from_batch(batch: &'a RecordBatch, name: &str) -> Result<Self, ArrowError> {
        Self::new(name, column(batch, name)?)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the range of a row in the values.
    pub fn range(&self, row: usize) -> std::ops::Range<usize> {
        self.offsets[row]..self.offsets[row + 1]
    }

    /// Returns all values, of any type.
    pub fn all_values(&self) -> &'a ArrayRef {
        self.values
    }

    /// Returns all values as an array of type `A`.
    ///
    /// # Errors
    /// Fails if the values have another type.
    pub fn values<A: Array + 'static>(&self, name: &str) -> Result<&'a A, ArrowError> {
        self.values.as_any().downcast_ref::<A>().ok_or_else(|| {
            ArrowError::SchemaError(format!("column {name} has items of type {}", self.values.data_type()))
        })
    }
}

/// Returns the column `name`.
///
/// # Errors
/// Fails if it is missing.
pub fn column<'a>(batch: &'a RecordBatch, name: &str) -> Result<&'a ArrayRef, ArrowError> {
    batch.column_by_name(name).ok_or_else(|| ArrowError::SchemaError(format!("column {name} is missing")))
}

/// Returns the column `sequence_id`.
///
/// # Errors
/// Fails if it is missing or has another type.
pub fn sequence_ids(batch: &RecordBatch) -> Result<&UInt64Array, ArrowError> {
    column(batch, "sequence_id")?
        .as_any()
        .downcast_ref::<UInt64Array>()
        .ok_or_else(|| ArrowError::SchemaError("column sequence_id has not type uint64".into()))
}

/// Builds a list column of the field's type (list or fixed-size list) from flat values and the length of each row.
///
/// # Errors
/// Fails if the lengths do not match the values or the type.
pub fn list_column(field: &Field, values: ArrayRef, lengths: &[usize]) -> Result<ArrayRef, ArrowError> {
    match field.data_type() {
        DataType::FixedSizeList(item, width) => {
            Ok(Arc::new(FixedSizeListArray::try_new_with_length(item.clone(), *width, values, None, lengths.len())?))
        }
        DataType::List(item) => {
            let total = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
            if i32::try_from(total).is_err() {
                return Err(ArrowError::InvalidArgumentError(format!(
                    "column {} would have {total} values in one batch, valid: at most {}; lower \
                     extract.teacher.batch_tokens",
                    field.name(),
                    i32::MAX
                )));
            }
            let offsets = OffsetBuffer::from_lengths(lengths.iter().copied());
            Ok(Arc::new(ListArray::try_new(item.clone(), offsets, values, None)?))
        }
        other => Err(ArrowError::SchemaError(format!("column {} has type {other}, valid: a list", field.name()))),
    }
}

#[cfg(test)]
mod tests {
    use arrow::array::Int32Array;
    use arrow::datatypes::Int32Type;

    use super::*;

    #[test]
    fn rows_of_sliced_lists() {
        let fixed: ArrayRef = Arc::new(FixedSizeListArray::from_iter_primitive::<Int32Type, _, _>(
            (0..4).map(|i| Some(vec![Some(2 * i), Some(2 * i + 1)])),
            2,
        ));
        let list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(
            (0..4).map(|i| Some(vec![Some(2 * i), Some(2 * i + 1)])),
        ));
        for array in [fixed, list] {
            let sliced = array.slice(1, 2);
            let rows = ListRows::new("x", &sliced).unwrap();
            let values = rows.values::<Int32Array>("x").unwrap().values();
            assert_eq!(rows.len(), 2);
            assert_eq!(&values[rows.range(1)], &[4, 5]);
        }
    }
}
