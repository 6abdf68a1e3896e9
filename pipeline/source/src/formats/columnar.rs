//! Parquet and Arrow files as a table: the columns of all files, each with one type.
//!
//! All string types become one type. Text columns of Parquet are read as bytes, without Arrow, so that a value that is
//! not UTF-8 makes one bad record (see [`super::parquet`]). Inside structs and lists, and in Arrow files, such a value
//! makes the file corrupt.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, BooleanArray, LargeBinaryArray, RecordBatch, new_null_array};
use arrow::compute::{cast, filter};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_input_files::InputFile;
use stillhouse_schemas::spec::Input;

use crate::table_format::{BadRecords, TakeRows, record_batch};

pub(super) fn corrupt(file: &InputFile) -> impl Fn(ArrowError) -> SourceError + '_ {
    |e| SourceError::corrupt(&file.path, format!("its columns cannot be read: {e}"))
}

/// Returns the type of a column in the query.
fn column_type(field: &Field, text: &str) -> DataType {
    match field.data_type() {
        DataType::Utf8 | DataType::Utf8View => DataType::LargeUtf8,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView if field.name() == text => DataType::LargeUtf8,
        DataType::Dictionary(_, value) => column_type(&Field::new(field.name(), value.as_ref().clone(), true), text),
        other => other.clone(),
    }
}

/// Returns a common type for a column with different types in two files, if there is one.
fn common_type(a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        _ if a == b => Some(a.clone()),
        (DataType::Null, other) | (other, DataType::Null) => Some(other.clone()),
        _ if a.is_integer() && b.is_integer() => Some(DataType::Int64),
        _ if a.is_floating() && b.is_floating() => Some(DataType::Float64),
        _ => None,
    }
}

/// Returns the columns of the files.
pub(super) fn schema(
    files: &[InputFile],
    input: &Input,
    file_schema: impl Fn(&InputFile) -> Result<SchemaRef, SourceError>,
) -> Result<Schema, SourceError> {
    let mut fields: Vec<(String, DataType, &str)> = Vec::new();
    for file in files {
        for field in file_schema(file)?.fields() {
            let kind = column_type(field, &input.text);
            match fields.iter_mut().find(|(name, ..)| name == field.name()) {
                None => fields.push((field.name().clone(), kind, &file.path)),
                Some((name, known, first)) => {
                    *known = common_type(known, &kind).ok_or_else(|| {
                        let message = format!(
                            "the column {name:?} is of type {kind}, in {first} of type {known}; valid: one type in all files of a table"
                        );
                        SourceError::corrupt(&file.path, message)
                    })?;
                }
            }
        }
    }
    Ok(Schema::new(fields.into_iter().map(|(name, kind, _)| Field::new(name, kind, true)).collect::<Vec<_>>()))
}

/// Converts columns of a file to the columns of the table.
pub(super) struct Columns<'a, 'b> {
    pub file: &'a InputFile,
    pub schema: &'a SchemaRef,
    pub file_schema: &'a SchemaRef,
    /// Number of rows so far.
    pub row: u64,
    pub bad_records: &'a mut BadRecords,
    pub take: &'a mut TakeRows<'b>,
}

impl Columns<'_, '_> {
    /// Passes rows on, given by the file's columns with their names. Rows with a text that is not UTF-8 are bad.
    pub fn add(&mut self, named: Vec<(String, ArrayRef)>, rows: usize) -> Result<(), SourceError> {
        let wrong = corrupt(self.file);
        let mut columns = Vec::new();
        let mut bad: Vec<Option<&str>> = vec![None; rows];
        for field in self.schema.fields() {
            let Some((name, column)) = named.iter().find(|(name, _)| name == field.name()) else {
                columns.push(new_null_array(field.data_type(), rows));
                continue;
            };
            columns.push(match (field.data_type(), bytes_of(column).map_err(&wrong)?) {
                (DataType::LargeUtf8, Some(bytes)) => {
                    for row in invalid_rows(&bytes) {
                        bad[row].get_or_insert(name);
                    }
                    Arc::new(bytes) as ArrayRef
                }
                (kind, _) => cast(column, kind).map_err(&wrong)?,
            });
        }
        for (row, name) in bad.iter().enumerate().filter_map(|(row, name)| Some((row, (*name)?))) {
            let message = format!("the value of {name:?} is not UTF-8; valid: text in UTF-8");
            self.bad_records.add(self.file, RecordPosition::Row(self.row + row as u64), reason::UTF8, message)?;
        }
        self.row += rows as u64;
        let good: BooleanArray = bad.iter().map(|name| Some(name.is_none())).collect();
        let mut left = rows;
        if good.true_count() < rows {
            left = good.true_count();
            for column in &mut columns {
                *column = filter(column, &good).map_err(&wrong)?;
            }
        }
        for (column, field) in columns.iter_mut().zip(self.schema.fields()) {
            // rows with invalid UTF-8 are removed, so the cast succeeds
            *column = cast(column, field.data_type()).map_err(&wrong)?;
        }
        (self.take)(record_batch(self.schema, columns, left)?, self.bad_records)
    }
}

/// Returns a binary column as its bytes; `None` for other types.
fn bytes_of(column: &ArrayRef) -> Result<Option<LargeBinaryArray>, ArrowError> {
    let plain = match column.data_type() {
        DataType::Dictionary(_, value) => cast(column, value)?,
        _ => column.clone(),
    };
    match plain.data_type() {
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView => {
            Ok(Some(LargeBinaryArray::from(cast(&plain, &DataType::LargeBinary)?.to_data())))
        }
        _ => Ok(None),
    }
}

fn invalid_rows(bytes: &LargeBinaryArray) -> impl Iterator<Item = usize> {
    (0..bytes.len()).filter(|row| bytes.is_valid(*row) && str::from_utf8(bytes.value(*row)).is_err())
}

pub(super) fn named_columns(rows: &RecordBatch) -> Vec<(String, ArrayRef)> {
    rows.schema_ref().fields().iter().map(|f| f.name().clone()).zip(rows.columns().iter().cloned()).collect()
}
