//! Parquet files as a table. Text columns are read as bytes, without Arrow, so that a value that is not UTF-8 makes one
//! bad record.

use std::sync::Arc;

use arrow::array::{ArrayRef, LargeBinaryArray, LargeBinaryBuilder, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema};
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, ParquetRecordBatchReaderBuilder,
};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::FileReader;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, RangeCache, Store};
use stillhouse_schemas::spec::Input;

use super::super::columnar::{self, Columns, corrupt, named_columns};
use super::{fault, open};
use crate::table_format::{BATCH_BYTES, BATCH_ROWS, BadRecords, FileColumns, TableFormat, TakeRows};

/// Parquet files as a table.
pub(super) struct ParquetTable;

impl TableFormat for ParquetTable {
    fn schema(&self, store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
        columnar::schema(files, input, |file| {
            // opened first for its error about files that are not Parquet
            open(store, file)?;
            Ok(metadata(store, file)?.schema().clone())
        })
    }

    fn read(
        &self,
        FileColumns { store, file, schema, .. }: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError> {
        open(store, file)?;
        let file_schema = metadata(store, file)?.schema().clone();
        read_parquet(store, &mut Columns { file, schema, file_schema: &file_schema, row: 0, bad_records, take })
    }
}

pub(super) fn metadata(store: &Store, file: &InputFile) -> Result<ArrowReaderMetadata, SourceError> {
    let cache = RangeCache::new(store, &file.location, file.size);
    ArrowReaderMetadata::load(&cache, ArrowReaderOptions::new()).map_err(|e| fault(&file.path, e))
}

/// Opens some columns of a range of rows.
pub(super) fn rows_of_range(
    store: &Store,
    file: &InputFile,
    metadata: ArrowReaderMetadata,
    columns: ProjectionMask,
    (start, end): (u64, u64),
    batch_rows: usize,
) -> Result<ParquetRecordBatchReader, SourceError> {
    let (mut groups, mut first, mut skipped) = (Vec::new(), 0, 0);
    for (index, group) in metadata.metadata().row_groups().iter().enumerate() {
        let next = first + group.num_rows().max(0) as u64;
        if next > start && first < end {
            groups.push(index);
        } else if next <= start {
            skipped = next;
        }
        first = next;
    }
    let cache = RangeCache::new(store, &file.location, file.size);
    ParquetRecordBatchReaderBuilder::new_with_metadata(cache, metadata)
        .with_projection(columns)
        .with_row_groups(groups)
        .with_offset((start - skipped) as usize)
        .with_limit(end.saturating_sub(start) as usize)
        .with_batch_size(batch_rows)
        .build()
        .map_err(|e| fault(&file.path, e))
}

fn read_parquet(store: &Store, columns: &mut Columns<'_, '_>) -> Result<(), SourceError> {
    let file = columns.file;
    let wrong = |e| fault(&file.path, e);
    let metadata = metadata(store, file)?;
    let wanted: Vec<usize> =
        columns.schema.fields().iter().filter_map(|f| columns.file_schema.index_of(f.name()).ok()).collect();
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
    let name = |i: usize| columns.file_schema.field(i).name().clone();
    let (texts, others): (Vec<usize>, Vec<usize>) = wanted.into_iter().partition(|i| is_text(&name(*i)));
    let texts: Vec<(String, usize)> = texts.into_iter().filter_map(|i| Some((name(i), leaf(&name(i))?))).collect();
    let raw = open(store, file)?;
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
        let cache = || RangeCache::new(store, &file.location, file.size);
        let builder = || ParquetRecordBatchReaderBuilder::new_with_metadata(cache(), metadata.clone());
        let roots = || ProjectionMask::roots(leaves, others.iter().copied());
        let open = || builder().with_row_groups(vec![index]).with_projection(roots()).with_batch_size(size).build();
        let mut rest = (!others.is_empty()).then(open).transpose().map_err(wrong)?;
        let mut left = rows;
        while left > 0 {
            let want = size.min(left);
            let mut cells_of = Vec::new();
            for (name, max_level, reader) in &mut readers {
                cells_of.push((name.clone(), Arc::new(cells(file, reader, *max_level, want)?) as ArrayRef));
            }
            if let Some(batch) = next(file, &mut rest, want)? {
                cells_of.extend(named_columns(&batch));
            }
            columns.add(cells_of, want)?;
            left -= want;
        }
    }
    Ok(())
}

fn truncated(file: &InputFile) -> SourceError {
    SourceError::corrupt(&file.path, "ends before the rows that its footer says")
}

fn next(
    file: &InputFile,
    reader: &mut Option<ParquetRecordBatchReader>,
    want: usize,
) -> Result<Option<RecordBatch>, SourceError> {
    let Some(reader) = reader else { return Ok(None) };
    let batch = reader.next().transpose().map_err(corrupt(file))?;
    batch.filter(|rows| rows.num_rows() == want).map(Some).ok_or_else(|| truncated(file))
}

fn cells(
    file: &InputFile,
    reader: &mut ColumnReaderImpl<ByteArrayType>,
    max_level: i16,
    want: usize,
) -> Result<LargeBinaryArray, SourceError> {
    let (mut levels, mut values): (Vec<i16>, Vec<ByteArray>) = (Vec::new(), Vec::new());
    let mut got = 0;
    while got < want {
        let (records, _, _) =
            reader.read_records(want - got, Some(&mut levels), None, &mut values).map_err(|e| fault(&file.path, e))?;
        if records == 0 {
            return Err(truncated(file));
        }
        got += records;
    }
    let mut filled = values.iter();
    let mut cells = LargeBinaryBuilder::new();
    for i in 0..want {
        let there = max_level == 0 || levels.get(i) == Some(&max_level);
        cells.append_option(if there { filled.next().map(ByteArray::data) } else { None });
    }
    Ok(cells.finish())
}
