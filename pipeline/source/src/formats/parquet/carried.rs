//! The columns of `input.carry`, read beside the documents of the same rows.
//!
//! Memory: [`MAX_BATCH_ROWS`] rows of these columns, decoded and as text.

use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReader;
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::super::carried_columns::{self, CarriedColumns};
use super::super::columnar::corrupt;
use super::table::{metadata, rows_of_range};
use crate::records::{Carried, Cell, Rows};

/// Rows decoded at a time.
const MAX_BATCH_ROWS: usize = 16;

/// Rows with their carried values.
pub(super) struct WithCarried {
    file: InputFile,
    rows: Box<dyn Rows>,
    paths: Vec<Vec<String>>,
    reader: ParquetRecordBatchReader,
    columns: CarriedColumns,
    /// Number of rows in `columns`, and how many of them were passed, including the current row.
    decoded: usize,
    passed: usize,
}

impl WithCarried {
    /// Opens the carried columns of a range, whose documents `rows` reads.
    pub fn open(
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
        rows: Box<dyn Rows>,
    ) -> Result<Self, SourceError> {
        let metadata = metadata(store, file)?;
        let paths = carried_columns::paths(file, metadata.schema().fields(), input)?;
        // not by `ProjectionMask::columns`, for which a dot in a name divides fields
        let schema = metadata.parquet_schema();
        let is_carried = |leaf: &usize| paths.iter().any(|path| schema.column(*leaf).path().parts() == path);
        let mask = ProjectionMask::leaves(schema, (0..schema.num_columns()).filter(is_carried));
        let reader = rows_of_range(store, file, metadata, mask, range, MAX_BATCH_ROWS)?;
        let columns = CarriedColumns::default();
        Ok(Self { file: file.clone(), rows, paths, reader, columns, decoded: 0, passed: 0 })
    }
}

impl Rows for WithCarried {
    fn next(&mut self) -> Result<Option<u64>, SourceError> {
        let Some(row) = self.rows.next()? else { return Ok(None) };
        while self.passed == self.decoded {
            let wrong = corrupt(&self.file);
            let batch = self.reader.next().transpose().map_err(&wrong)?.ok_or_else(|| {
                SourceError::corrupt(&self.file.path, format!("ends at row {row}; its footer says more rows"))
            })?;
            self.columns = CarriedColumns::new(&batch, &self.paths).map_err(&wrong)?;
            (self.decoded, self.passed) = (batch.num_rows(), 0);
        }
        self.passed += 1;
        Ok(Some(row))
    }

    fn cell(&self) -> Cell<'_> {
        self.rows.cell()
    }

    fn carried(&self) -> Carried {
        self.passed.checked_sub(1).map_or_else(Carried::new, |row| self.columns.row(row))
    }
}
