//! The formats of input files: each has one folder or file, and one line in [`for_name`].
//!
//! | family | a record is | where a file is cut | formats |
//! |---|---|---|---|
//! | [`BytesFormat`] | a range of the decompressed bytes | anywhere, at a record, or not at all | jsonl, text, csv, warc |
//! | [`RowsFormat`] | a numbered row | at a row, by the metadata of the file | parquet, arrow, none |
//! | [`numbers`] | a row of numbers, not text | see that module | images, codes |
//!
//! Other properties of a format (whether it compresses inside, whether its columns have types) are declared with its
//! variant of `InputFormat` in `schemas`, which checks the job file.

mod arrow;
mod carried_columns;
mod columnar;
mod csv;
mod jsonl;
mod none;
pub(crate) mod numbers;
mod parquet;
mod records_table;
mod text;
mod warc;

#[cfg(test)]
#[path = "tests/nul.rs"]
mod nul;
#[cfg(test)]
mod tests;

use std::sync::LazyLock;

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{Cursor, FileEndings, InputFile, Store, compression};
use stillhouse_schemas::manifest::Range;
use stillhouse_schemas::spec::{Compression, Input, InputFormat};

use super::records::{Records, Rows};
use super::segment::{self, RowGroup, Segment, join_evenly};
use super::table_format::TableFormat;
#[cfg(test)]
pub(crate) use jsonl::fast_parser as fast_json_parser;

pub use carried_columns::{as_text, is_single};

/// Returns the format of an input.
pub(crate) fn for_input(input: &Input) -> Format {
    for_name(input.format())
}

/// Returns the format of a file by its ending, among the formats whose files can be tables.
pub fn format_of_file_name(name: &str) -> Option<InputFormat> {
    let has_ending = |format: &InputFormat| match for_name(*format) {
        Format::Bytes(format) => bytes_endings(format).match_name(name),
        Format::Rows(format) => rows_endings(format).match_name(name),
        Format::Numbers => false,
    };
    InputFormat::tables().find(has_ending)
}

/// Returns the endings of all formats whose files can be tables. A compression ending may follow that of any of them, so a
/// file that is found needs [`format_of_file_name`].
pub fn table_endings() -> FileEndings {
    static ENDINGS: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let of_format = |format| match for_name(format) {
            Format::Bytes(format) => format.endings(),
            Format::Rows(format) => format.endings(),
            Format::Numbers => &[],
        };
        InputFormat::tables().flat_map(of_format).copied().collect()
    });
    FileEndings { endings: &ENDINGS, may_be_compressed: true }
}

/// Returns the endings of the files that a folder of the input stands for.
pub fn file_endings(input: &Input) -> FileEndings {
    match for_input(input) {
        Format::Bytes(format) => bytes_endings(format),
        Format::Rows(format) => rows_endings(format),
        Format::Numbers => numbers::endings(input),
    }
}

/// The whole file of a format of bytes may be compressed.
fn bytes_endings(format: &dyn BytesFormat) -> FileEndings {
    FileEndings { endings: format.endings(), may_be_compressed: true }
}

fn rows_endings(format: &dyn RowsFormat) -> FileEndings {
    FileEndings { endings: format.endings(), may_be_compressed: false }
}

fn for_name(format: InputFormat) -> Format {
    match format {
        InputFormat::Jsonl => Format::Bytes(&jsonl::Jsonl),
        InputFormat::Text => Format::Bytes(&text::Text),
        InputFormat::Csv => Format::Bytes(&csv::Csv),
        InputFormat::Warc => Format::Bytes(&warc::Warc),
        InputFormat::Parquet => Format::Rows(&parquet::Parquet),
        InputFormat::Arrow => Format::Rows(&arrow::Arrow),
        InputFormat::None => Format::Rows(&none::NoFiles),
        InputFormat::Images | InputFormat::Codes => Format::Numbers,
    }
}

/// A format, by its family.
#[derive(Clone, Copy)]
pub(crate) enum Format {
    Bytes(&'static dyn BytesFormat),
    Rows(&'static dyn RowsFormat),
    Numbers,
}

/// Where a file may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Anywhere: a reader finds the next record from any byte. Planning does not read an uncompressed file.
    Anywhere,
    /// Where a record begins; a scan of the file finds these offsets.
    AtRecords,
    /// Nowhere: the file is one record.
    Nowhere,
}

/// A column of a file: its name, whether it can be the text, whether a record has several values of it, and its type for
/// messages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileColumn {
    pub name: String,
    pub is_text: bool,
    pub is_list: bool,
    pub data_type: String,
}

/// A format whose records follow one another in the bytes of a file. The whole file may be compressed.
pub(crate) trait BytesFormat: Sync {
    /// Endings of the files that a folder stands for, in lower case, without compression endings.
    fn endings(&self) -> &'static [&'static str];

    /// Where a file may be cut.
    fn cut(&self, input: &Input) -> Cut;

    /// Opens the records that begin at `start` or later, to read those that begin before `end`. Also returns the offset
    /// from which the records count newlines.
    ///
    /// # Errors
    /// When the file cannot be read or is not of this format.
    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<(Box<dyn Records>, u64), SourceError>;

    /// Returns the columns of a file, for formats that have columns. An empty file has none.
    ///
    /// # Errors
    /// When the file cannot be read or is not of this format.
    fn columns(
        &self,
        _store: &Store,
        _file: &InputFile,
        _input: &Input,
    ) -> Result<Option<Vec<FileColumn>>, SourceError> {
        Ok(None)
    }

    /// Returns the reader of files as a table of a query, if the format supports that.
    fn table(&self) -> Option<&'static dyn TableFormat> {
        None
    }
}

/// A format whose records are numbered rows.
pub(crate) trait RowsFormat: Sync {
    /// As [`BytesFormat::endings`].
    fn endings(&self) -> &'static [&'static str];

    /// Returns the rows of a file in groups that are read as a unit.
    ///
    /// # Errors
    /// When the file cannot be read or is not of this format.
    fn row_groups(&self, store: &Store, file: &InputFile, input: &Input) -> Result<Vec<RowGroup>, SourceError>;

    /// Cuts groups of rows into segments of about `target` bytes.
    fn segments(&self, index: usize, groups: &[RowGroup], target: u64) -> Vec<Segment> {
        segment::by_rows(index, groups, target)
    }

    /// Opens the rows from `start` to `end`.
    ///
    /// # Errors
    /// When the file cannot be read, is not of this format, or has no such column.
    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<Box<dyn Rows>, SourceError>;

    /// Returns the columns of a file. Fields of structs have names such as `meta.text`.
    ///
    /// # Errors
    /// When the file cannot be read or is not of this format.
    fn columns(&self, store: &Store, file: &InputFile) -> Result<Option<Vec<FileColumn>>, SourceError>;

    /// Returns the reader of files as a table of a query, if the format supports that.
    fn table(&self) -> Option<&'static dyn TableFormat> {
        None
    }
}

impl Format {
    /// Whether name and size of the file determine its cuts, so that planning does not open it.
    pub fn is_cut_by_listing(self, file: &InputFile, input: &Input) -> bool {
        match self {
            Self::Bytes(format) => format.cut(input) != Cut::AtRecords && compression(file, input) == Compression::None,
            Self::Rows(_) | Self::Numbers => false,
        }
    }

    /// Cuts a file into segments of about `target` bytes of text, numbers of rows, or documents that have no text yet.
    ///
    /// # Errors
    /// When the file cannot be read or is not of this format.
    pub fn segments(
        self,
        store: &Store,
        index: usize,
        file: &InputFile,
        input: &Input,
        target: u64,
    ) -> Result<Vec<Segment>, SourceError> {
        let format = match self {
            Self::Bytes(format) => format,
            Self::Rows(format) => return Ok(format.segments(index, &format.row_groups(store, file, input)?, target)),
            Self::Numbers => return numbers::segments(store, index, file, input, target),
        };
        let is_plain = compression(file, input) == Compression::None;
        match format.cut(input) {
            Cut::Nowhere => {
                let size = if is_plain { file.size } else { decompressed_bytes(store, file, input)? };
                let range = Range::Bytes { start: 0, end: size, line: Some(1) };
                Ok(vec![Segment { file: index, range, weight: size, records: Some(1) }])
            }
            Cut::Anywhere if is_plain => Ok(segment::by_size(index, file.size, target)),
            Cut::Anywhere | Cut::AtRecords => scan_segments(format, store, index, file, input, target),
        }
    }

    /// Opens records in the bytes of a file, as [`BytesFormat::open`].
    ///
    /// # Errors
    /// As there; when the records of this format are not ranges of bytes.
    pub fn open_bytes(
        self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<(Box<dyn Records>, u64), SourceError> {
        match self {
            Self::Bytes(format) => format.open(store, file, input, range),
            Self::Rows(_) | Self::Numbers => Err(wrong_range_kind(file, "bytes")),
        }
    }

    /// Opens rows of a file, as [`RowsFormat::open`].
    ///
    /// # Errors
    /// As there; when the records of this format are not numbered rows.
    pub fn open_rows(
        self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<Box<dyn Rows>, SourceError> {
        match self {
            Self::Rows(format) => format.open(store, file, input, range),
            Self::Bytes(_) | Self::Numbers => Err(wrong_range_kind(file, "rows")),
        }
    }

    /// Returns the columns of a file; `None` for formats without columns.
    ///
    /// # Errors
    /// When the file cannot be read or is not of this format.
    pub fn columns(
        self,
        store: &Store,
        file: &InputFile,
        input: &Input,
    ) -> Result<Option<Vec<FileColumn>>, SourceError> {
        match self {
            Self::Bytes(format) => format.columns(store, file, input),
            Self::Rows(format) => format.columns(store, file),
            Self::Numbers => Ok(None),
        }
    }

    /// Returns the reader of files as a table of a query.
    ///
    /// # Errors
    /// When files of this format cannot be tables.
    pub fn table(self) -> Result<&'static dyn TableFormat, SourceError> {
        let table = match self {
            Self::Bytes(format) => format.table(),
            Self::Rows(format) => format.table(),
            Self::Numbers => None,
        };
        table.ok_or_else(|| {
            let valid: Vec<_> = InputFormat::tables().map(InputFormat::name).collect();
            let message = format!("files of this format are no table; valid: {}", valid.join(", "));
            SourceError::Sql { message, retryable: false }
        })
    }
}

fn wrong_range_kind(file: &InputFile, unit: &str) -> SourceError {
    SourceError::corrupt(&file.path, format!("the plan has ranges of {unit} of it, which this format does not have"))
}

fn decompressed_bytes(store: &Store, file: &InputFile, input: &Input) -> Result<u64, SourceError> {
    let mut cursor = Cursor::open(store, file, input, 0)?;
    cursor.skip_to(u64::MAX).map_err(|e| SourceError::from_io(&file.path, e))?;
    Ok(cursor.offset)
}

/// Parts of the target that a scan cuts and then joins evenly, as it only knows the length of the file at its end.
const PARTS_OF_TARGET: u64 = 16;

/// Cuts where records begin. For a compressed file, keeps the checkpoints before the cuts.
fn scan_segments(
    format: &dyn BytesFormat,
    store: &Store,
    index: usize,
    file: &InputFile,
    input: &Input,
    target: u64,
) -> Result<Vec<Segment>, SourceError> {
    let io_error = |e| SourceError::from_io(&file.path, e);
    let (mut records, _) = format.open(store, file, input, (0, u64::MAX))?;
    // the offset, the line and the number of the record with which a part begins
    let mut starts: Vec<(u64, u64, u64)> = Vec::new();
    let mut count = 0;
    while let Some(at) = records.next().map_err(io_error)? {
        let begins = starts.last().is_none_or(|(start, ..)| at.offset - start >= target.div_ceil(PARTS_OF_TARGET));
        if begins {
            // the first part also has what is before the first record
            starts.push(if count == 0 { (0, 1, 0) } else { (at.offset, at.newlines + 1, count) });
        }
        count += 1;
        records.skip().map_err(io_error)?;
    }
    starts.push((records.offset(), 0, count));
    let sizes: Vec<u64> = starts.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    let segments: Vec<Segment> = join_evenly(&sizes, target)
        .into_iter()
        .map(|parts| {
            let ((start, line, before), (end, _, after)) = (starts[parts.start], starts[parts.end]);
            let range = Range::Bytes { start, end, line: Some(line) };
            Segment { file: index, range, weight: end - start, records: Some(after - before) }
        })
        .collect();
    // readers also examine the byte before the start
    let starts = segments.iter().filter_map(|segment| match segment.range {
        Range::Bytes { start, .. } => Some(start.saturating_sub(1)),
        Range::Rows { .. } => None,
    });
    store.keep_checkpoints_before(file, starts);
    Ok(segments)
}
