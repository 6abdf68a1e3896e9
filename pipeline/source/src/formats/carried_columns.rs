//! The columns of `input.carry` in Parquet and Arrow files, as text.
//!
//! Names are resolved as `input.text` is: a column with the whole name takes precedence over a field of a struct.

use arrow::array::{Array, ArrayRef, AsArray, LargeStringArray, RecordBatch};
use arrow::buffer::NullBuffer;
use arrow::compute::{CastOptions, can_cast_types, cast_with_options};
use arrow::datatypes::{DataType, Fields};
use arrow::error::ArrowError;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::InputFile;
use stillhouse_schemas::parse::did_you_mean;
use stillhouse_schemas::spec::Input;

use crate::records::Carried;

/// Names from a column through structs to a field.
type FieldPath = Vec<String>;

/// Returns the paths of the carried columns.
///
/// # Errors
/// When the file has no such column, or it has no values that are one text.
pub(super) fn paths(file: &InputFile, fields: &Fields, input: &Input) -> Result<Vec<FieldPath>, SourceError> {
    let path = |name: &str| match path_to(fields, name) {
        Some((path, data_type)) if is_single(data_type) => Ok(path),
        Some((_, data_type)) => {
            let message = format!(
                "the column {name:?}, which `input.carry` names, is of type {data_type}; valid: strings, numbers, booleans, dates and times"
            );
            Err(SourceError::corrupt(&file.path, message))
        }
        None => {
            let names: Vec<&str> = fields.iter().map(|field| field.name().as_str()).collect();
            let (there, meant) = (names.join(", "), did_you_mean(name, &names));
            let message = format!("no column {name:?}, which `input.carry` names; columns: {there}{meant}");
            Err(SourceError::corrupt(&file.path, message))
        }
    };
    input.carried_columns().map(path).collect()
}

fn path_to<'a>(fields: &'a Fields, name: &str) -> Option<(FieldPath, &'a DataType)> {
    if let Some(field) = fields.iter().find(|field| field.name() == name) {
        return Some((vec![name.to_owned()], field.data_type()));
    }
    fields.iter().find_map(|field| {
        let DataType::Struct(inner) = field.data_type() else { return None };
        let rest = name.strip_prefix(field.name().as_str())?.strip_prefix('.')?;
        let (path, data_type) = path_to(inner, rest)?;
        Some(([field.name().clone()].into_iter().chain(path).collect(), data_type))
    })
}

/// Whether values of a type are each one text: strings, numbers, booleans, dates and times.
pub fn is_single(data_type: &DataType) -> bool {
    !data_type.is_nested() && can_cast_types(data_type, &DataType::LargeUtf8)
}

/// Returns a column as text.
///
/// # Errors
/// When a value has bytes that are not UTF-8.
pub fn as_text(column: &ArrayRef) -> Result<LargeStringArray, ArrowError> {
    // not `safe`: it would make nulls of bytes that are not UTF-8
    let options = CastOptions { safe: false, ..CastOptions::default() };
    Ok(cast_with_options(column, &DataType::LargeUtf8, &options)?.as_string::<i64>().clone())
}

/// Carried columns of a record batch.
#[derive(Default)]
pub(super) struct CarriedColumns(Vec<LargeStringArray>);

impl CarriedColumns {
    /// Reads the columns at these paths.
    ///
    /// # Errors
    /// When a column is missing or has bytes that are not UTF-8.
    pub fn new(batch: &RecordBatch, paths: &[FieldPath]) -> Result<Self, ArrowError> {
        paths.iter().map(|path| texts(batch, path)).collect::<Result<_, _>>().map(Self)
    }

    /// Returns the values of a row.
    pub fn row(&self, row: usize) -> Carried {
        let value = |column: &LargeStringArray| {
            (row < column.len() && column.is_valid(row)).then(|| column.value(row).to_owned())
        };
        self.0.iter().map(value).collect()
    }
}

fn texts(batch: &RecordBatch, path: &[String]) -> Result<LargeStringArray, ArrowError> {
    let missing = || ArrowError::SchemaError(format!("no column {}", path.join(".")));
    let (first, rest) = path.split_first().ok_or_else(missing)?;
    let mut column: ArrayRef = batch.column_by_name(first).ok_or_else(missing)?.clone();
    let mut nulls: Option<NullBuffer> = column.logical_nulls();
    for field in rest {
        column = column.as_struct_opt().and_then(|fields| fields.column_by_name(field)).ok_or_else(missing)?.clone();
        nulls = NullBuffer::union(nulls.as_ref(), column.logical_nulls().as_ref());
    }
    let texts = as_text(&column)?;
    LargeStringArray::try_new(texts.offsets().clone(), texts.values().clone(), nulls)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{
        BinaryArray, DictionaryArray, Float64Array, Int64Array, StringArray, StructArray, TimestampMillisecondArray,
    };
    use arrow::datatypes::{Field, Int8Type, Schema};

    use super::*;

    fn batch() -> RecordBatch {
        let lang: DictionaryArray<Int8Type> = vec![Some("en"), None, Some("de")].into_iter().collect();
        let fields = vec![(Arc::new(Field::new("lang", lang.data_type().clone(), true)), Arc::new(lang) as ArrayRef)];
        let meta = StructArray::from(fields);
        let nulls = NullBuffer::from(vec![true, true, false]);
        let meta = StructArray::new(meta.fields().clone(), meta.columns().to_vec(), Some(nulls));
        RecordBatch::try_from_iter_with_nullable([
            ("url", Arc::new(StringArray::from(vec![Some("a"), None, Some("")])) as ArrayRef, true),
            ("id", Arc::new(Int64Array::from(vec![1, -2, 3])) as _, true),
            ("score", Arc::new(Float64Array::from(vec![0.5, 1e30, -0.0])) as _, true),
            ("time", Arc::new(TimestampMillisecondArray::from(vec![0, 1, 2])) as _, true),
            ("meta", Arc::new(meta) as _, true),
            ("meta.lang.id", Arc::new(Int64Array::from(vec![7, 8, 9])) as _, true),
            ("bytes", Arc::new(BinaryArray::from(vec![b"ok".as_slice(), b"\xff", b""])) as _, true),
        ])
        .unwrap()
    }

    fn input(names: &[&str]) -> Input {
        serde_json::from_value(serde_json::json!({"format": "parquet", "paths": ["x"], "carry": names})).unwrap()
    }

    #[test]
    fn values_of_every_type_become_text() {
        let (batch, file) = (batch(), InputFile::placeholder());
        let names = ["url", "id", "score", "time", "meta.lang", "meta.lang.id"];
        let found = paths(&file, batch.schema().fields(), &input(&names)).unwrap();
        let columns = CarriedColumns::new(&batch, &found).unwrap();
        let row =
            |row: usize| columns.row(row).into_iter().map(|value| value.unwrap_or("null".into())).collect::<Vec<_>>();
        assert_eq!(row(0), ["a", "1", "0.5", "1970-01-01T00:00:00", "en", "7"]);
        assert_eq!(row(1), ["null", "-2", "1e30", "1970-01-01T00:00:00.001", "null", "8"]);
        // the struct is null
        assert_eq!(row(2), ["", "3", "-0.0", "1970-01-01T00:00:00.002", "null", "9"]);
        let bytes = paths(&file, batch.schema().fields(), &input(&["bytes"])).unwrap();
        assert!(CarriedColumns::new(&batch, &bytes).is_err());
    }

    #[test]
    fn columns_that_are_missing_or_nested_are_refused() {
        let file = InputFile::placeholder();
        let list = DataType::new_list(DataType::Utf8, true);
        let schema = Schema::new(vec![Field::new("url", DataType::Utf8, true), Field::new("tags", list, true)]);
        let error = |name: &str| paths(&file, schema.fields(), &input(&[name])).unwrap_err().to_string();
        assert!(
            error("urls").contains("no column \"urls\", which `input.carry` names; columns: url, tags; did you mean"),
            "{}",
            error("urls")
        );
        assert!(error("tags").contains("valid: strings, numbers"), "{}", error("tags"));
    }
}
