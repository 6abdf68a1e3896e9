//! Conversations in Parquet files: the columns of messages and tools of a row, as a JSON object.
//!
//! Memory: [`MAX_BATCH_ROWS`] rows at most, decoded and as JSON. A dictionary may hold a long value once for many rows, so
//! the size of a row group does not bound that of its rows.

use arrow::array::RecordBatch;
use arrow_json::writer::LineDelimitedWriter;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReader;
use parquet::basic::{ConvertedType, Type as PhysicalType};
use parquet::file::metadata::RowGroupMetaData;
use parquet::schema::types::SchemaDescriptor;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::super::columnar::corrupt;
use super::open;
use super::table::{metadata, rows_of_range};
use crate::records::{Cell, Rows};
use crate::segment::RowGroup;

/// Rows decoded at a time.
const MAX_BATCH_ROWS: usize = 16;

/// Returns the indices of the columns with the messages and the tools.
fn roots(schema: &SchemaDescriptor, file: &InputFile, input: &Input) -> Result<Vec<usize>, SourceError> {
    let names: Vec<&str> = schema.root_schema().get_fields().iter().map(|field| field.name()).collect();
    let index = |wanted: &str, field: &str| {
        names.iter().position(|name| *name == wanted).ok_or_else(|| {
            let message = format!("no column {wanted:?}, which `{field}` names; columns: {}", names.join(", "));
            SourceError::corrupt(&file.path, message)
        })
    };
    let messages = input.messages.iter().map(|name| index(name, "input.messages"));
    let roots: Vec<usize> =
        messages.chain(input.tools.iter().map(|name| index(name, "input.tools"))).collect::<Result<_, _>>()?;
    let bytes = schema.columns().iter().enumerate().find(|(leaf, column)| {
        let is_untyped = column.logical_type_ref().is_none() && column.converted_type() == ConvertedType::NONE;
        roots.contains(&schema.get_column_root_idx(*leaf))
            && column.physical_type() == PhysicalType::BYTE_ARRAY
            && is_untyped
    });
    match bytes {
        // as JSON they would be hexadecimal digits
        Some((_, column)) => {
            let message = format!("the column {:?} holds bytes without a type; valid: strings", column.path().string());
            Err(SourceError::corrupt(&file.path, message))
        }
        None => Ok(roots),
    }
}

/// Bytes of these columns in a row group, not compressed.
fn bytes(group: &RowGroupMetaData, schema: &SchemaDescriptor, roots: &[usize]) -> u64 {
    let columns = group.columns().iter().enumerate();
    let of_roots = columns.filter(|(leaf, _)| roots.contains(&schema.get_column_root_idx(*leaf)));
    of_roots.map(|(_, column)| column.uncompressed_size().max(0) as u64).sum()
}

pub(super) fn row_groups(store: &Store, file: &InputFile, input: &Input) -> Result<Vec<RowGroup>, SourceError> {
    // opened first for its error about files that are not Parquet
    open(store, file)?;
    let metadata = metadata(store, file)?;
    let schema = metadata.parquet_schema();
    let roots = roots(schema, file, input)?;
    let groups = metadata.metadata().row_groups().iter();
    Ok(groups.map(|g| RowGroup { rows: g.num_rows().max(0) as u64, bytes: bytes(g, schema, &roots) }).collect())
}

/// Reads the conversations of a range of rows, in order.
pub(super) struct ConversationRows {
    file: InputFile,
    reader: ParquetRecordBatchReader,
    /// The number of the next row, and the row after the range.
    row: u64,
    end: u64,
    /// The rows of a batch, one per line, and the part of it that is the current row.
    lines: Vec<u8>,
    current: (usize, usize),
}

impl ConversationRows {
    pub(super) fn open(
        store: &Store,
        file: &InputFile,
        input: &Input,
        (start, end): (u64, u64),
    ) -> Result<Self, SourceError> {
        open(store, file)?;
        let metadata = metadata(store, file)?;
        let roots = roots(metadata.parquet_schema(), file, input)?;
        let mask = ProjectionMask::roots(metadata.parquet_schema(), roots);
        let reader = rows_of_range(store, file, metadata, mask, (start, end), MAX_BATCH_ROWS)?;
        Ok(Self { file: file.clone(), reader, row: start, end, lines: Vec::new(), current: (0, 0) })
    }

    /// Writes the next batch as lines. Returns false at the end.
    fn next_batch(&mut self) -> Result<bool, SourceError> {
        let wrong = corrupt(&self.file);
        let Some(batch) = self.reader.next() else { return Ok(false) };
        let batch: RecordBatch = batch.map_err(&wrong)?;
        self.lines.clear();
        self.current = (0, 0);
        let mut writer = LineDelimitedWriter::new(&mut self.lines);
        writer.write(&batch).map_err(&wrong)?;
        writer.finish().map_err(&wrong)?;
        Ok(true)
    }
}

impl Rows for ConversationRows {
    fn next(&mut self) -> Result<Option<u64>, SourceError> {
        // a string of JSON has no line break, so a line is a row
        let begin = loop {
            let begin = if self.current.1 == 0 { 0 } else { self.current.1 + 1 };
            if begin < self.lines.len() {
                break begin;
            }
            if !self.next_batch()? {
                if self.row < self.end {
                    let message = format!("ends at row {}; its footer says {} rows or more", self.row, self.end);
                    return Err(SourceError::corrupt(&self.file.path, message));
                }
                return Ok(None);
            }
        };
        let rest = self.lines.get(begin..).unwrap_or_default();
        self.current = (begin, begin + memchr::memchr(b'\n', rest).unwrap_or(rest.len()));
        self.row += 1;
        Ok(Some(self.row - 1))
    }

    fn cell(&self) -> Cell<'_> {
        self.lines.get(self.current.0..self.current.1)
    }
}
