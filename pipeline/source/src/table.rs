//! Files as tables of a query (`input.sql`): what a format gives to be one.
//!
//! Only the columns that the query uses are decoded. A record is bad where one of them is, or where its line or its number of fields is.

use std::collections::BTreeMap;

use arrow::array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_base::source_error::{RecordPosition, SourceError};
use stillhouse_schemas::spec::{Input, OnError};

use super::input_file::InputFile;
use super::store::Store;

/// Most rows of a batch.
pub(crate) const BATCH_ROWS: usize = 1024;
/// A batch of this many bytes is full.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
/// Records that decide the columns of JSON lines and the types of CSV.
pub(crate) const SAMPLE_RECORDS: usize = 1000;
/// Largest record in bytes; a query holds records as a whole.
pub(crate) const MAX_RECORD_BYTES: usize = 256 << 20;

/// A format whose files can be tables.
pub(crate) trait TableFormat: Sync {
    /// The columns of all files of a table, each of one type.
    ///
    /// # Errors
    /// When a file cannot be read, or two files disagree on a column.
    fn schema(&self, store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError>;

    /// Reads these columns of one file, in batches.
    ///
    /// # Errors
    /// When the file cannot be read, at the first bad record where none may be skipped, and the errors of `take`.
    fn read(
        &self,
        columns: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError>;
}

/// A file of a table, and the columns that are asked of it.
#[derive(Clone, Copy)]
pub(crate) struct FileColumns<'a> {
    pub store: &'a Store,
    pub file: &'a InputFile,
    pub input: &'a Input,
    pub schema: &'a SchemaRef,
}

/// Counts the bad records of a table, or fails at the first one, as `input.on_error` says.
#[derive(Debug)]
pub(crate) struct BadRecords {
    on_error: OnError,
    pub skipped: BTreeMap<String, u64>,
}

impl BadRecords {
    pub fn new(on_error: OnError) -> Self {
        Self { on_error, skipped: BTreeMap::new() }
    }

    /// A bad record: an error, or one more of the skipped.
    pub fn bad(
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

/// Takes rows of a file, with the bad records before them.
pub(crate) type TakeRows<'a> = dyn FnMut(RecordBatch, &BadRecords) -> Result<(), SourceError> + 'a;

/// A batch, also of no columns.
pub(crate) fn batch(schema: &SchemaRef, columns: Vec<ArrayRef>, rows: usize) -> Result<RecordBatch, SourceError> {
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
        .map_err(|e| SourceError::Sql { message: e.to_string(), retryable: false })
}
