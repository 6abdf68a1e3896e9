//! Parquet and Arrow files as a table: the columns of all files, each of one type.
//!
//! Strings of every kind become one kind. Columns of text in Parquet are read below Arrow, so that a value that is not UTF-8 is one bad record
//! (see `parquet_rows`); inside of structs and lists, and in Arrow files, it breaks the file.

use std::sync::Arc;

use datafusion::arrow::array::{
    Array, ArrayRef, BooleanArray, LargeBinaryArray, LargeBinaryBuilder, RecordBatch, new_null_array,
};
use datafusion::arrow::compute::{cast, filter};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::arrow::error::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::FileReader;
use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_schemas::spec::{Input, InputFormat};

use super::super::list::InputFile;
use super::super::store::{Chunks, Store};
use super::super::{ipc, parquet_rows};
use super::table::{Asked, Judge, Take, batch};
use super::{BATCH_BYTES, BATCH_ROWS};

fn corrupt(file: &InputFile) -> impl Fn(ArrowError) -> SourceError + '_ {
    |e| SourceError::corrupt(&file.path, format!("its columns cannot be read: {e}"))
}

/// The type that a column has in the query.
fn plain(field: &Field, text: &str) -> DataType {
    match field.data_type() {
        DataType::Utf8 | DataType::Utf8View => DataType::LargeUtf8,
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView if field.name() == text => DataType::LargeUtf8,
        DataType::Dictionary(_, value) => plain(&Field::new(field.name(), value.as_ref().clone(), true), text),
        other => other.clone(),
    }
}

fn file_schema(store: &Store, file: &InputFile, input: &Input) -> Result<SchemaRef, SourceError> {
    match input.format() {
        InputFormat::Arrow => ipc::schema(store, file),
        _ => {
            // opened first for what it says of files that are no Parquet
            parquet_rows::open(store, file)?;
            Ok(metadata(store, file)?.schema().clone())
        }
    }
}

/// The type of a column that has one type in one file and another in another, where there is one.
fn common(a: &DataType, b: &DataType) -> Option<DataType> {
    match (a, b) {
        _ if a == b => Some(a.clone()),
        (DataType::Null, other) | (other, DataType::Null) => Some(other.clone()),
        _ if a.is_integer() && b.is_integer() => Some(DataType::Int64),
        _ if a.is_floating() && b.is_floating() => Some(DataType::Float64),
        _ => None,
    }
}

/// The columns of the files.
pub(super) fn schema(store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
    let mut fields: Vec<(String, DataType, &str)> = Vec::new();
    for file in files {
        for field in file_schema(store, file, input)?.fields() {
            let kind = plain(field, &input.text);
            match fields.iter_mut().find(|(name, ..)| name == field.name()) {
                None => fields.push((field.name().clone(), kind, &file.path)),
                Some((name, known, first)) => {
                    *known = common(known, &kind).ok_or_else(|| {
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

/// Reads these columns of a file.
pub(super) fn read(asked: Asked<'_>, judge: &mut Judge, take: &mut Take<'_>) -> Result<(), SourceError> {
    let Asked { store, file, input, schema } = asked;
    let own = file_schema(store, file, input)?;
    let mut columns = Columns { file, schema, own: &own, row: 0, judge, take };
    match input.format() {
        InputFormat::Arrow => {
            let wanted: Vec<usize> = schema.fields().iter().filter_map(|f| own.index_of(f.name()).ok()).collect();
            // no column at all would not tell how many rows there are
            let read = if wanted.is_empty() { vec![0] } else { wanted };
            ipc::read_columns(store, file, read, &mut |rows| {
                // a record batch may be of any size
                (0..rows.num_rows()).step_by(BATCH_ROWS).try_for_each(|from| {
                    let part = rows.slice(from, BATCH_ROWS.min(rows.num_rows() - from));
                    columns.add(named(&part), part.num_rows())
                })
            })
        }
        _ => read_parquet(store, &mut columns),
    }
}

/// Columns of a file on their way to the columns of the table.
struct Columns<'a, 'b> {
    file: &'a InputFile,
    schema: &'a SchemaRef,
    own: &'a SchemaRef,
    /// Rows so far.
    row: u64,
    judge: &'a mut Judge,
    take: &'a mut Take<'b>,
}

impl Columns<'_, '_> {
    /// Takes rows of the columns of the file, by name; rows with a text that is none are bad.
    fn add(&mut self, named: Vec<(String, ArrayRef)>, rows: usize) -> Result<(), SourceError> {
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
                    for row in not_text(&bytes) {
                        bad[row].get_or_insert(name);
                    }
                    Arc::new(bytes) as ArrayRef
                }
                (kind, _) => cast(column, kind).map_err(&wrong)?,
            });
        }
        for (row, name) in bad.iter().enumerate().filter_map(|(row, name)| Some((row, (*name)?))) {
            let message = format!("the value of {name:?} is not UTF-8; valid: text in UTF-8");
            self.judge.bad(self.file, RecordPosition::Row(self.row + row as u64), reason::UTF8, message)?;
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
            // what was not text is out
            *column = cast(column, field.data_type()).map_err(&wrong)?;
        }
        (self.take)(batch(self.schema, columns, left)?, self.judge)
    }
}

/// The bytes of a column of bytes.
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

fn not_text(bytes: &LargeBinaryArray) -> impl Iterator<Item = usize> {
    (0..bytes.len()).filter(|row| bytes.is_valid(*row) && str::from_utf8(bytes.value(*row)).is_err())
}

fn metadata(store: &Store, file: &InputFile) -> Result<ArrowReaderMetadata, SourceError> {
    let chunks = Chunks::new(store, &file.location, file.size);
    ArrowReaderMetadata::load(&chunks, ArrowReaderOptions::new()).map_err(|e| parquet_rows::fault(&file.path, e))
}

fn read_parquet(store: &Store, columns: &mut Columns<'_, '_>) -> Result<(), SourceError> {
    let file = columns.file;
    let wrong = |e| parquet_rows::fault(&file.path, e);
    let metadata = metadata(store, file)?;
    let wanted: Vec<usize> =
        columns.schema.fields().iter().filter_map(|f| columns.own.index_of(f.name()).ok()).collect();
    let leaves = metadata.parquet_schema();
    let leaf = |name: &str| {
        let mut all = leaves.columns().iter();
        all.position(|c| c.path().parts().len() == 1 && c.name() == name && c.max_rep_level() == 0)
    };
    let is_text = |name: &str| {
        let kind = columns.schema.field_with_name(name).ok().map(Field::data_type);
        let bytes = leaf(name).is_some_and(|at| leaves.column(at).physical_type() == parquet::basic::Type::BYTE_ARRAY);
        bytes && kind == Some(&DataType::LargeUtf8)
    };
    let name = |i: usize| columns.own.field(i).name().clone();
    let (texts, others): (Vec<usize>, Vec<usize>) = wanted.into_iter().partition(|i| is_text(&name(*i)));
    let texts: Vec<(String, usize)> = texts.into_iter().filter_map(|i| Some((name(i), leaf(&name(i))?))).collect();
    let raw = parquet_rows::open(store, file)?;
    for (index, group) in metadata.metadata().row_groups().iter().enumerate() {
        let rows = group.num_rows().max(0) as usize;
        let bytes: i64 = texts.iter().map(|(_, leaf)| group.column(*leaf).uncompressed_size()).sum();
        let size = (BATCH_BYTES * rows / (bytes.max(1) as usize)).clamp(1, BATCH_ROWS);
        let group = raw.get_row_group(index).map_err(wrong)?;
        let mut readers = Vec::new();
        for (name, leaf) in &texts {
            let ColumnReader::ByteArrayColumnReader(reader) = group.get_column_reader(*leaf).map_err(wrong)? else {
                return Err(SourceError::corrupt(&file.path, format!("column {name:?} does not hold strings")));
            };
            readers.push((name.clone(), leaves.column(*leaf).max_def_level(), reader));
        }
        let chunks = || Chunks::new(store, &file.location, file.size);
        let builder = || ParquetRecordBatchReaderBuilder::new_with_metadata(chunks(), metadata.clone());
        let roots = || ProjectionMask::roots(leaves, others.iter().copied());
        let open = || builder().with_row_groups(vec![index]).with_projection(roots()).with_batch_size(size).build();
        let mut rest = (!others.is_empty()).then(open).transpose().map_err(wrong)?;
        let mut left = rows;
        while left > 0 {
            let want = size.min(left);
            let mut cells_of = Vec::new();
            for (name, most, reader) in &mut readers {
                cells_of.push((name.clone(), Arc::new(cells(file, reader, *most, want)?) as ArrayRef));
            }
            if let Some(batch) = next(file, &mut rest, want)? {
                cells_of.extend(named(&batch));
            }
            columns.add(cells_of, want)?;
            left -= want;
        }
    }
    Ok(())
}

fn named(rows: &RecordBatch) -> Vec<(String, ArrayRef)> {
    rows.schema_ref().fields().iter().map(|f| f.name().clone()).zip(rows.columns().iter().cloned()).collect()
}

fn cut_off(file: &InputFile) -> SourceError {
    SourceError::corrupt(&file.path, "ends before the rows that its footer says")
}

fn next(
    file: &InputFile,
    reader: &mut Option<ParquetRecordBatchReader>,
    want: usize,
) -> Result<Option<RecordBatch>, SourceError> {
    let Some(reader) = reader else { return Ok(None) };
    let batch = reader.next().transpose().map_err(corrupt(file))?;
    batch.filter(|rows| rows.num_rows() == want).map(Some).ok_or_else(|| cut_off(file))
}

fn cells(
    file: &InputFile,
    reader: &mut ColumnReaderImpl<ByteArrayType>,
    most: i16,
    want: usize,
) -> Result<LargeBinaryArray, SourceError> {
    let (mut levels, mut values): (Vec<i16>, Vec<ByteArray>) = (Vec::new(), Vec::new());
    let mut got = 0;
    while got < want {
        let (records, _, _) = reader
            .read_records(want - got, Some(&mut levels), None, &mut values)
            .map_err(|e| parquet_rows::fault(&file.path, e))?;
        if records == 0 {
            return Err(cut_off(file));
        }
        got += records;
    }
    let mut filled = values.iter();
    let mut cells = LargeBinaryBuilder::new();
    for i in 0..want {
        let there = most == 0 || levels.get(i) == Some(&most);
        cells.append_option(if there { filled.next().map(ByteArray::data) } else { None });
    }
    Ok(cells.finish())
}
