//! A table of a query (`input.sql`) or of a mixture: files of the input, read by the readers of their format.

use std::collections::BTreeMap;
use std::iter::repeat_n;
use std::sync::Arc;

use arrow::array::{ArrayRef, LargeStringArray, RecordBatch};
use arrow::datatypes::{DataType, Field, FieldRef, Schema, SchemaRef};
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{FILE_COLUMN, Input};

use super::column_check::{MAX_PROBLEMS, check_first_bytes};
use super::formats::{self, Format};
use super::table_format::{BadRecords, FileColumns, record_batch};

/// A table of a query or of a mixture.
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
        let schema = formats::for_input(&self.input).table()?.schema(store, &self.files, &self.input)?;
        if !self.has_file_column() {
            return Ok(schema);
        }
        if schema.field_with_name(FILE_COLUMN).is_ok() {
            let message = format!(
                "{}: its files have a column {FILE_COLUMN}, and so has the table; valid: another name",
                self.field
            );
            return Err(SourceError::corrupt(FILE_COLUMN, message));
        }
        let file = Field::new(FILE_COLUMN, DataType::LargeUtf8, false);
        let fields: Vec<_> = schema.fields().iter().cloned().chain([Arc::new(file)]).collect();
        Ok(Schema::new(fields))
    }

    /// Whether the table has the column of file names. Only a query that names it, or a mixture that carries it, can use it.
    fn has_file_column(&self) -> bool {
        match &self.input.sql {
            Some(sql) => sql.contains(FILE_COLUMN),
            None => self.input.carry.iter().any(|name| name == FILE_COLUMN),
        }
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
        let file_column = schema.index_of(FILE_COLUMN).ok().filter(|_| self.has_file_column());
        let of_files = |(i, field): (usize, &FieldRef)| (Some(i) != file_column).then(|| Arc::clone(field));
        let stored = Arc::new(Schema::new(schema.fields().iter().enumerate().filter_map(of_files).collect::<Vec<_>>()));
        for file in &self.files {
            let columns = FileColumns { store, file, input, schema: &stored };
            let mut take_with_file = |rows: RecordBatch, bad: &BadRecords| {
                let Some(index) = file_column else { return take(rows, &bad.skipped) };
                let name: ArrayRef =
                    Arc::new(LargeStringArray::from_iter_values(repeat_n(&file.path, rows.num_rows())));
                let mut columns = rows.columns().to_vec();
                columns.insert(index, name);
                take(record_batch(schema, columns, rows.num_rows())?, &bad.skipped)
            };
            table.read(columns, &mut bad_records, &mut take_with_file)?;
        }
        Ok(bad_records.skipped)
    }
}
