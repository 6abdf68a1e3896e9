//! Arrow files as a table.

use arrow::datatypes::Schema;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::super::columnar::{self, Columns, named_columns};
use super::{read_columns, schema};
use crate::table_format::{BATCH_ROWS, BadRecords, FileColumns, TableFormat, TakeRows};

/// Arrow files as a table.
pub(super) struct ArrowTable;

impl TableFormat for ArrowTable {
    fn schema(&self, store: &Store, files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
        columnar::schema(files, input, |file| schema(store, file))
    }

    fn read(
        &self,
        FileColumns { store, file, schema: wanted, .. }: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError> {
        let file_schema = schema(store, file)?;
        let mut columns = Columns { file, schema: wanted, file_schema: &file_schema, row: 0, bad_records, take };
        let found: Vec<usize> = wanted.fields().iter().filter_map(|f| file_schema.index_of(f.name()).ok()).collect();
        // read at least one column, which gives the number of rows
        let read = if found.is_empty() { vec![0] } else { found };
        read_columns(store, file, read, &mut |rows| {
            // a record batch may have any size
            (0..rows.num_rows()).step_by(BATCH_ROWS).try_for_each(|from| {
                let part = rows.slice(from, BATCH_ROWS.min(rows.num_rows() - from));
                columns.add(named_columns(&part), part.num_rows())
            })
        })
    }
}
