//! A table of a query (`input.sql`): files of the input, read by the readers of their format.

use std::collections::BTreeMap;

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::Input;

use super::column_check::{MAX_PROBLEMS, check_first_bytes};
use super::formats::{self, Format};
use super::table_format::{BadRecords, FileColumns};

/// A table of a query.
#[derive(Debug, Clone)]
pub struct QueryTable {
    /// Name in the query.
    pub name: String,
    /// Field in the job file, such as `input.tables.labels`.
    pub field: String,
    /// Input settings of its files.
    pub input: Input,
    /// The files, in order.
    pub files: Vec<InputFile>,
}

/// Consumes rows of a table, together with the number of bad records skipped before them, by reason.
pub type TakeRows<'a> = dyn FnMut(RecordBatch, &BTreeMap<String, u64>) -> Result<(), SourceError> + 'a;

impl QueryTable {
    /// Checks the first bytes of the files, for formats without a header or footer. Returns at most five problems.
    ///
    /// # Errors
    /// When a store does not answer, which is not a problem of the job.
    pub fn check(&self, store: &Store) -> Result<Vec<Problem>, SourceError> {
        match formats::for_input(&self.input) {
            Format::Bytes(_) => {
                let field = format!("{}.paths", self.field);
                check_first_bytes(store, &self.files, &self.input, &field, MAX_PROBLEMS, &mut |_| {})
            }
            Format::Rows(_) | Format::Numbers => Ok(Vec::new()),
        }
    }

    /// Returns the columns and their types. Reads what determines them: footers, headers, and the first 1000 records of
    /// JSON or CSV.
    ///
    /// # Errors
    /// When a file cannot be read, two files disagree on a column, or files of this format cannot be a table.
    pub fn schema(&self, store: &Store) -> Result<Schema, SourceError> {
        formats::for_input(&self.input).table()?.schema(store, &self.files, &self.input)
    }

    /// Reads the columns of `schema` from all files, in order, in batches of at most [`super::BATCH_ROWS`] rows. Returns
    /// the number of bad records skipped, by reason.
    ///
    /// It decodes only these columns. A record is bad if one of them is, or if its line or its number of fields is
    /// invalid.
    ///
    /// # Errors
    /// When a file cannot be read; at the first bad record with `on_error: fail`; the errors of `take`.
    pub fn read(
        &self,
        store: &Store,
        schema: &SchemaRef,
        take: &mut TakeRows<'_>,
    ) -> Result<BTreeMap<String, u64>, SourceError> {
        let (input, mut bad_records) = (&self.input, BadRecords::new(self.input.on_error));
        let table = formats::for_input(input).table()?;
        for file in &self.files {
            let columns = FileColumns { store, file, input, schema };
            table.read(columns, &mut bad_records, &mut |rows, bad| take(rows, &bad.skipped))?;
        }
        Ok(bad_records.skipped)
    }
}
