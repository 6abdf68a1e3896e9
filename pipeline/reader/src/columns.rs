//! Columns in the form that trainers need: one buffer `[B, …]` per column, or values with offsets if rows differ in
//! length.
//!
//! Cost: one copy of the requested rows out of the decoded pages.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Float16Type, Float32Type, Int32Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, FixedSizeListArray, ListArray, RecordBatch};
use arrow_buffer::BooleanBuffer;
use arrow_schema::DataType;
use half::f16;
use serde::Deserialize;

use crate::{ReadError, Result};

/// A column as described in the manifest.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ColumnSpec {
    /// Name.
    pub name: String,
    /// Arrow type, such as `fixed_size_list<int32>[1024]`.
    pub data_type: String,
    /// Shape of a row, such as `[1024,4]`; `*` marks a variable dimension.
    #[serde(default)]
    pub shape: Option<String>,
}

impl ColumnSpec {
    /// Returns the shape of one row; `None` if rows differ in length.
    pub fn dimensions(&self) -> Option<Vec<usize>> {
        let Some(shape) = &self.shape else { return Some(Vec::new()) };
        let inner = shape.trim_matches(['[', ']']);
        inner.split(',').map(|n| n.trim().parse().ok()).collect()
    }

    /// Whether batches have the column: those of text are for people and queries.
    pub(crate) fn is_in_batches(&self) -> bool {
        !self.item().starts_with("struct")
    }

    /// Returns the Arrow type of the values, as written in the manifest.
    pub fn item(&self) -> &str {
        let inner = self.data_type.split_once('<').and_then(|(_, rest)| rest.split_once('>'));
        inner.map_or(self.data_type.as_str(), |(item, _)| item)
    }
}

impl ColumnSpec {
    /// Checks that a column of a file matches the manifest: the type of its values, and the number of values per row if
    /// it is fixed.
    pub(crate) fn check(&self, found: &DataType) -> Result<(), String> {
        let (item, width) = match found {
            DataType::FixedSizeList(item, width) => (item.data_type(), Some(*width as usize)),
            DataType::List(item) => (item.data_type(), None),
            other => (other, None),
        };
        if item_name(item) != self.item() {
            return Err(format!(
                "column {} has values of type {}, the manifest says {}",
                self.name,
                item_name(item),
                self.item()
            ));
        }
        match (self.dimensions(), width) {
            (Some(shape), Some(width)) if shape.iter().product::<usize>() != width => {
                Err(format!("column {} has {width} values per row, the manifest says {shape:?}", self.name))
            }
            _ => Ok(()),
        }
    }
}

/// The name of a type as the manifest writes it.
fn item_name(data_type: &DataType) -> String {
    match data_type {
        DataType::Boolean => "bool".into(),
        other => other.to_string().to_lowercase(),
    }
}

/// Values of one type.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Values {
    Bool(Vec<bool>),
    U8(Vec<u8>),
    U16(Vec<u16>),
    U32(Vec<u32>),
    U64(Vec<u64>),
    I32(Vec<i32>),
    F16(Vec<f16>),
    F32(Vec<f32>),
}

/// How values are grouped into rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// `[B, …]`: every row has this shape.
    Dense(Vec<usize>),
    /// Row i is `offsets[i]..offsets[i + 1]`.
    Ragged(Vec<i64>),
}

/// Rows of one column.
#[derive(Debug, Clone, PartialEq)]
pub struct Column {
    /// Name.
    pub name: String,
    /// The values of all rows, concatenated.
    pub values: Values,
    /// How the values are grouped into rows.
    pub layout: Layout,
}

/// One row of a decoded batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RowRef<'a> {
    pub batch: &'a RecordBatch,
    pub row: usize,
}

/// Copies rows of one column into a contiguous buffer.
pub(crate) fn gather(spec: &ColumnSpec, rows: &[RowRef<'_>]) -> Result<Column> {
    let arrays = rows
        .iter()
        .map(|at| RowValues::new(at, &spec.name))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| ReadError::Column(format!("column {} is missing from a shard", spec.name)))?;
    let layout = layout(spec, &arrays)?;
    let values = match spec.item() {
        "bool" => Values::Bool(bools(spec, &arrays)?),
        "uint8" => Values::U8(primitives::<UInt8Type>(spec, &arrays)?),
        "uint16" => Values::U16(primitives::<UInt16Type>(spec, &arrays)?),
        "uint32" => Values::U32(primitives::<UInt32Type>(spec, &arrays)?),
        "uint64" => Values::U64(primitives::<UInt64Type>(spec, &arrays)?),
        "int32" => Values::I32(primitives::<Int32Type>(spec, &arrays)?),
        "float16" => Values::F16(primitives::<Float16Type>(spec, &arrays)?),
        "float32" => Values::F32(primitives::<Float32Type>(spec, &arrays)?),
        other => {
            return Err(ReadError::Column(format!(
                "column {} has values of type {other}, which this version does not read; leave it out with select_columns, \
                 or install a newer stillhouse",
                spec.name
            )));
        }
    };
    Ok(Column { name: spec.name.clone(), values, layout })
}

/// The values of one row, as a range of an array.
struct RowValues<'a> {
    values: &'a dyn Array,
    start: usize,
    end: usize,
}

impl<'a> RowValues<'a> {
    fn new(at: &RowRef<'a>, name: &str) -> Option<Self> {
        let array: &ArrayRef = at.batch.column_by_name(name)?;
        if let Some(list) = array.as_any().downcast_ref::<FixedSizeListArray>() {
            let width = list.value_length() as usize;
            return Some(Self { values: list.values().as_ref(), start: at.row * width, end: (at.row + 1) * width });
        }
        if let Some(list) = array.as_any().downcast_ref::<ListArray>() {
            let offsets = list.value_offsets();
            let (start, end) = (*offsets.get(at.row)? as usize, *offsets.get(at.row + 1)? as usize);
            return Some(Self { values: list.values().as_ref(), start, end });
        }
        Some(Self { values: array.as_ref(), start: at.row, end: at.row + 1 })
    }

    fn len(&self) -> usize {
        self.end - self.start
    }
}

fn layout(spec: &ColumnSpec, rows: &[RowValues<'_>]) -> Result<Layout> {
    let Some(shape) = spec.dimensions() else {
        let mut offsets = Vec::with_capacity(rows.len() + 1);
        offsets.push(0);
        let mut end = 0;
        for row in rows {
            end += row.len() as i64;
            offsets.push(end);
        }
        return Ok(Layout::Ragged(offsets));
    };
    let width = shape.iter().product::<usize>();
    match rows.iter().find(|row| row.len() != width) {
        None => Ok(Layout::Dense(shape)),
        Some(row) => Err(ReadError::Column(format!(
            "column {}: a row has {} values, the manifest says {width}; `stillhouse verify` says which shard is wrong",
            spec.name,
            row.len()
        ))),
    }
}

fn wrong_type(spec: &ColumnSpec, got: &DataType) -> ReadError {
    ReadError::Column(format!(
        "column {}: a shard has values of type {got}, the manifest says {}; the shard is not of this data set, copy it again",
        spec.name,
        spec.item()
    ))
}

fn primitives<T: ArrowPrimitiveType>(spec: &ColumnSpec, rows: &[RowValues<'_>]) -> Result<Vec<T::Native>> {
    let mut out = Vec::with_capacity(rows.iter().map(RowValues::len).sum());
    for row in rows {
        let array = row.values.as_primitive_opt::<T>().ok_or_else(|| wrong_type(spec, row.values.data_type()))?;
        out.extend_from_slice(&array.values()[row.start..row.end]);
    }
    Ok(out)
}

fn bools(spec: &ColumnSpec, rows: &[RowValues<'_>]) -> Result<Vec<bool>> {
    let mut out = Vec::with_capacity(rows.iter().map(RowValues::len).sum());
    for row in rows {
        let array = row.values.as_boolean_opt().ok_or_else(|| wrong_type(spec, row.values.data_type()))?;
        unpack(array.values(), row.start, row.end, &mut out);
    }
    Ok(out)
}

/// Unpacks bits to bools, in words of 64.
fn unpack(bits: &BooleanBuffer, start: usize, end: usize, out: &mut Vec<bool>) {
    let chunks = bits.slice(start, end - start);
    let chunks = chunks.bit_chunks();
    for word in chunks.iter() {
        let mut group = [false; 64];
        for (i, bit) in group.iter_mut().enumerate() {
            *bit = word >> i & 1 == 1;
        }
        out.extend_from_slice(&group);
    }
    let rest = chunks.remainder_bits();
    out.extend((0..chunks.remainder_len()).map(|i| rest >> i & 1 == 1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(data_type: &str, shape: Option<&str>) -> ColumnSpec {
        ColumnSpec { name: "c".into(), data_type: data_type.into(), shape: shape.map(str::to_owned) }
    }

    #[test]
    fn descriptions_are_understood() {
        let fixed = spec("fixed_size_list<int32>[256]", Some("[1,256]"));
        assert_eq!((fixed.item(), fixed.dimensions()), ("int32", Some(vec![1, 256])));
        let list = spec("list<float16>", Some("[*]"));
        assert_eq!((list.item(), list.dimensions()), ("float16", None));
        let single = spec("uint64", None);
        assert_eq!((single.item(), single.dimensions()), ("uint64", Some(vec![])));
        assert_eq!(spec("list<uint8>", Some("[*,4]")).dimensions(), None);
        let text = spec("list<struct<url: string, meta.lang: string>>", Some("[*]"));
        assert!(!text.is_in_batches() && list.is_in_batches() && single.is_in_batches());
    }

    #[test]
    fn files_are_held_to_the_manifest() {
        let list = |item: DataType, width: i32| DataType::new_fixed_size_list(item, width, false);
        let fixed = spec("fixed_size_list<float16>[6]", Some("[2,3]"));
        assert_eq!(fixed.check(&list(DataType::Float16, 6)), Ok(()));
        assert_eq!(
            fixed.check(&list(DataType::Float32, 6)).unwrap_err(),
            "column c has values of type float32, the manifest says float16"
        );
        assert_eq!(
            fixed.check(&list(DataType::Float16, 5)).unwrap_err(),
            "column c has 5 values per row, the manifest says [2, 3]"
        );
        for (name, found) in [("bool", DataType::Boolean), ("uint64", DataType::UInt64), ("int32", DataType::Int32)] {
            assert_eq!(spec(name, None).check(&found), Ok(()));
        }
    }

    #[test]
    fn bits_come_out_at_any_offset() {
        let truth: Vec<bool> = (0..300).map(|i| i % 3 == 0 || i % 7 == 2).collect();
        let bits = BooleanBuffer::from(truth.clone());
        for (start, end) in [(0, 300), (1, 66), (63, 64), (64, 128), (5, 5), (7, 299)] {
            let mut out = Vec::new();
            unpack(&bits, start, end, &mut out);
            assert_eq!(out, truth[start..end], "{start}..{end}");
        }
    }
}
