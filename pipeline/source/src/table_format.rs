//! Files as tables of a query (`input.sql`): the interface that a format implements.
//!
//! It decodes only the columns that the query uses. A record is bad if one of them is, or if its line or its number of
//! fields is invalid.

use std::collections::BTreeMap;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::spec::{Input, OnError};

/// Maximum rows of a batch of a table.
pub const BATCH_ROWS: usize = 1024;
/// Bytes at which a batch is full.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
/// Number of records that determine the columns of JSON lines and the types of CSV.
pub(crate) const SAMPLE_RECORDS: usize = 1000;
/// Maximum bytes of a record; a query holds whole records.
pub(crate) const MAX_RECORD_BYTES: usize = 256 << 20;

/// A format whose files can be tables of a query.
pub(crate) trait TableFormat: Sync {
    /// Returns the columns of all files of a table, each with one type.
    ///
    /// # Errors
    /// When a file cannot be read, or two files disagree on a column.
    fn schema(&self, store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError>;

    /// Reads the columns of `columns.schema` from one file, in batches.
    ///
    /// # Errors
    /// When the file cannot be read; at the first bad record unless they may be skipped; the errors of `take`.
    fn read(
        &self,
        columns: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError>;
}

/// A file of a table, and the columns requested from it.
#[derive(Clone, Copy)]
pub(crate) struct FileColumns<'a> {
    pub store: &'a Store,
    pub file: &'a InputFile,
    pub input: &'a Input,
    pub schema: &'a SchemaRef,
}

/// Counts the bad records of a table, or fails at the first one, depending on `input.on_error`.
#[derive(Debug)]
pub(crate) struct BadRecords {
    on_error: OnError,
    pub skipped: BTreeMap<String, u64>,
}

impl BadRecords {
    pub fn new(on_error: OnError) -> Self {
        Self { on_error, skipped: BTreeMap::new() }
    }

    /// Handles a bad record: returns an error or counts it as skipped.
    pub fn add(
        &mut self,
        file: &InputFile,
        position: RecordPosition,
        reason: &'static str,
        message: String,
    ) -> Result<(), SourceError> {
        if self.on_error == OnError::Fail {
            return Err(SourceError::Record { file: file.path.clone(), position, reason, message });
        }
        *self.skipped.entry(reason.into()).or_default() += 1;
        Ok(())
    }
}

/// Consumes rows of a file, together with the bad records before them.
pub(crate) type TakeRows<'a> = dyn FnMut(RecordBatch, &BadRecords) -> Result<(), SourceError> + 'a;

/// Creates a batch, which may have no columns.
pub(crate) fn record_batch(
    schema: &SchemaRef,
    columns: Vec<ArrayRef>,
    rows: usize,
) -> Result<RecordBatch, SourceError> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|e| SourceError::Sql { message: e.to_string(), retryable: false })
}
