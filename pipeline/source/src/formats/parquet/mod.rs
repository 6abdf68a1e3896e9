//! Rows of Parquet files: reads only the text column, page by page, and checks its bytes cell by cell.
//!
//! It reads the column as byte arrays, without Arrow, for three reasons: it reads one page at a time, so it needs
//! memory for a page and a dictionary rather than a column chunk; a cell that is not UTF-8 is a bad record, not a
//! failed batch; and it copies nothing.

mod carried;
mod conversations;
mod table;

use parquet::basic::{ConvertedType, LogicalType, Type as PhysicalType};
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::schema::types::ColumnDescriptor;

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{
    InputFile, RangeCache, Store,
    sniff::{self, FileType},
};
use stillhouse_schemas::spec::Input;

use super::{FileColumn, RowsFormat};
use crate::records::{Cell, Rows};
use crate::segment::RowGroup;
use crate::table_format::TableFormat;

const BATCH_BYTES: u64 = 1 << 20;
const BATCH_ROWS: u64 = 1024;

/// `input.format: parquet`.
pub(super) struct Parquet;

impl RowsFormat for Parquet {
    fn endings(&self) -> &'static [&'static str] {
        &[".parquet", ".pq"]
    }

    fn row_groups(&self, store: &Store, file: &InputFile, input: &Input) -> Result<Vec<RowGroup>, SourceError> {
        match &input.messages {
            Some(_) => conversations::row_groups(store, file, input),
            None => row_groups(store, file, &input.text),
        }
    }

    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<Box<dyn Rows>, SourceError> {
        let rows: Box<dyn Rows> = match &input.messages {
            Some(_) => Box::new(conversations::ConversationRows::open(store, file, input, range)?),
            None => Box::new(ParquetRows::open(store, file, &input.text, range)?),
        };
        Ok(match input.carried_columns().next() {
            Some(_) => Box::new(carried::WithCarried::open(store, file, input, range, rows)?),
            None => rows,
        })
    }

    fn columns(&self, store: &Store, file: &InputFile) -> Result<Option<Vec<FileColumn>>, SourceError> {
        columns(store, file).map(Some)
    }

    fn table(&self) -> Option<&'static dyn TableFormat> {
        Some(&table::ParquetTable)
    }
}

fn fault(file: &str, error: ParquetError) -> SourceError {
    match error {
        ParquetError::External(source) => match source.downcast::<object_store::Error>() {
            Ok(error) => SourceError::from_store(file, *error),
            Err(other) => {
                SourceError::corrupt(file, format!("cannot be read as Parquet: {}", without_prefix(&other.to_string())))
            }
        },
        other => {
            SourceError::corrupt(file, format!("cannot be read as Parquet: {}", without_prefix(&other.to_string())))
        }
    }
}

/// Removes the reader's prefixes for kinds of errors.
fn without_prefix(message: &str) -> &str {
    ["Parquet error: ", "EOF: ", "External: "].iter().find_map(|kind| message.strip_prefix(kind)).unwrap_or(message)
}

fn open(store: &Store, file: &InputFile) -> Result<SerializedFileReader<RangeCache>, SourceError> {
    SerializedFileReader::new(RangeCache::new(store, &file.location, file.size)).map_err(|e| {
        match fault(&file.path, e) {
            SourceError::Corrupt { file: name, message } => sniff::other_format(store, file, FileType::Parquet)
                .unwrap_or(SourceError::Corrupt { file: name, message }),
            other => other,
        }
    })
}

/// Whether a column is text, or bytes without a declared meaning, in which many writers put text.
fn may_be_text(column: &ColumnDescriptor) -> bool {
    let logical = match column.logical_type_ref() {
        Some(kind) => matches!(kind, LogicalType::String | LogicalType::Json | LogicalType::Enum),
        None => matches!(
            column.converted_type(),
            ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::JSON | ConvertedType::ENUM
        ),
    };
    column.physical_type() == PhysicalType::BYTE_ARRAY && column.max_rep_level() == 0 && logical
}

/// Returns the columns of a file: name (fields of structs as `meta.text`), whether it can be the text, and type.
fn columns(store: &Store, file: &InputFile) -> Result<Vec<FileColumn>, SourceError> {
    let reader = open(store, file)?;
    let schema = reader.metadata().file_metadata().schema_descr();
    Ok(schema
        .columns()
        .iter()
        .map(|c| {
            let kind = match c.logical_type_ref() {
                _ if c.max_rep_level() > 0 => "list".to_string(),
                Some(logical) => format!("{logical:?}").to_ascii_lowercase(),
                None => c.physical_type().to_string().to_ascii_lowercase(),
            };
            let is_list = c.max_rep_level() > 0;
            FileColumn { name: c.path().string(), is_text: may_be_text(c), is_list, data_type: kind }
        })
        .collect())
}

fn text_column(reader: &SerializedFileReader<RangeCache>, file: &str, text: &str) -> Result<usize, SourceError> {
    let schema = reader.metadata().file_metadata().schema_descr();
    let columns = schema.columns();
    let named = |depth: fn(usize) -> bool| {
        columns.iter().position(|c| depth(c.path().parts().len()) && c.path().string() == text && may_be_text(c))
    };
    // a column with the whole name takes precedence over a field of a struct
    named(|depth| depth == 1).or_else(|| named(|depth| depth > 1)).ok_or_else(|| {
        let names: Vec<_> = columns.iter().map(|c| c.path().string()).collect();
        SourceError::corrupt(
            file,
            format!("no string column {text:?}, which `input.text` names; columns: {}", names.join(", ")),
        )
    })
}

fn text_bytes(group: &RowGroupMetaData, column: usize) -> u64 {
    let chunk = group.column(column);
    let bytes = chunk.unencoded_byte_array_data_bytes().unwrap_or_else(|| chunk.uncompressed_size());
    bytes.max(0) as u64
}

/// Returns the row groups of a file.
fn row_groups(store: &Store, file: &InputFile, text: &str) -> Result<Vec<RowGroup>, SourceError> {
    let reader = open(store, file)?;
    let column = text_column(&reader, &file.path, text)?;
    Ok(reader
        .metadata()
        .row_groups()
        .iter()
        .map(|g| RowGroup { rows: g.num_rows().max(0) as u64, bytes: text_bytes(g, column) })
        .collect())
}

/// Reads the text cells of a range of rows, in order: one row group at a time, and of it about 1 MB of rows at a time.
pub(crate) struct ParquetRows {
    file: String,
    text: String,
    reader: SerializedFileReader<RangeCache>,
    column: usize,
    /// The row after the range.
    end: u64,
    /// The next row group to open, and its first row.
    group: (usize, u64),
    /// The next row to read.
    row: u64,
    open: Option<Column>,
    cells: Cells,
}

/// The text column of a row group.
struct Column {
    values: ColumnReaderImpl<ByteArrayType>,
    /// Definition level of a value that is not null.
    max_level: i16,
    /// Number of rows decoded at a time.
    batch: u64,
    /// The row after the last wanted row of the group.
    to: u64,
}

/// Decoded cells.
#[derive(Default)]
struct Cells {
    levels: Vec<i16>,
    /// The cells that are not null.
    values: Vec<ByteArray>,
    rows: usize,
    max_level: i16,
    /// Number of rows and of values passed, including the current row.
    passed: (usize, usize),
    is_null: bool,
}

impl Cells {
    fn read(&mut self, column: &mut Column, want: usize) -> Result<(), ParquetError> {
        self.levels.clear();
        self.values.clear();
        let (rows, _, _) = column.values.read_records(want, Some(&mut self.levels), None, &mut self.values)?;
        (self.rows, self.max_level, self.passed) = (rows, column.max_level, (0, 0));
        Ok(())
    }

    fn next(&mut self) -> bool {
        let (row, value) = self.passed;
        if row == self.rows {
            return false;
        }
        self.is_null = self.max_level > 0 && self.levels.get(row) != Some(&self.max_level);
        self.passed = (row + 1, value + usize::from(!self.is_null));
        true
    }
}

impl ParquetRows {
    /// Opens a file to read the rows from `start` to `end` of a column.
    pub fn open(store: &Store, file: &InputFile, text: &str, (start, end): (u64, u64)) -> Result<Self, SourceError> {
        let reader = open(store, file)?;
        let column = text_column(&reader, &file.path, text)?;
        let (file, text) = (file.path.clone(), text.to_owned());
        Ok(Self { file, text, reader, column, end, group: (0, 0), row: start, open: None, cells: Cells::default() })
    }

    /// Opens the text column of the next row group that has rows of the range.
    fn next_column(&mut self) -> Result<Option<Column>, SourceError> {
        let wrong = |e| fault(&self.file, e);
        let groups = self.reader.metadata().row_groups();
        while let Some(group) = groups.get(self.group.0) {
            let (index, first) = self.group;
            let rows = group.num_rows().max(0) as u64;
            self.group = (index + 1, first + rows);
            let to = self.end.min(first + rows);
            if self.row >= to {
                continue;
            }
            let column = self.reader.get_row_group(index).and_then(|group| group.get_column_reader(self.column));
            let ColumnReader::ByteArrayColumnReader(mut values) = column.map_err(wrong)? else {
                return Err(SourceError::corrupt(&self.file, format!("column {:?} does not hold strings", self.text)));
            };
            if self.row > first {
                values.skip_records((self.row - first) as usize).map_err(wrong)?;
            }
            let max_level = group.schema_descr().column(self.column).max_def_level();
            let batch = (BATCH_BYTES * rows / text_bytes(group, self.column).max(1)).clamp(1, BATCH_ROWS);
            return Ok(Some(Column { values, max_level, batch, to }));
        }
        Ok(None)
    }
}

impl Rows for ParquetRows {
    fn next(&mut self) -> Result<Option<u64>, SourceError> {
        while !self.cells.next() {
            match &mut self.open {
                Some(column) if self.row < column.to => {
                    let want = column.batch.min(column.to - self.row) as usize;
                    self.cells.read(column, want).map_err(|e| fault(&self.file, e))?;
                    if self.cells.rows == 0 {
                        let (row, to) = (self.row, column.to);
                        let message = format!("ends at row {row}; its footer says {to} rows or more");
                        return Err(SourceError::corrupt(&self.file, message));
                    }
                }
                _ => {
                    self.open = None;
                    self.open = self.next_column()?;
                    if self.open.is_none() {
                        return Ok(None);
                    }
                }
            }
        }
        self.row += 1;
        Ok(Some(self.row - 1))
    }

    fn cell(&self) -> Cell<'_> {
        match self.cells.is_null {
            true => None,
            false => self.cells.values.get(self.cells.passed.1.checked_sub(1)?).map(ByteArray::data),
        }
    }
}
