//! Text files as a table with one column.

use std::sync::Arc;

use arrow::array::{ArrayRef, LargeStringBuilder};
use arrow::datatypes::{DataType, Field, Schema};
use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::{BytesFormat, Text};
use crate::records::ReadError;
use crate::spool::Spool;
use crate::table_format::{
    BATCH_BYTES, BATCH_ROWS, BadRecords, FileColumns, MAX_RECORD_BYTES, TableFormat, TakeRows, record_batch,
};

/// Text files as a table.
pub(super) struct TextTable;

impl TableFormat for TextTable {
    fn schema(&self, _store: &Store, _files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
        Ok(Schema::new(vec![Field::new(&input.text, DataType::LargeUtf8, true)]))
    }

    fn read(
        &self,
        FileColumns { store, file, input, schema }: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError> {
        let (mut records, _) = Text.open(store, file, input, (0, u64::MAX))?;
        let mut text = Spool::new(input.piece_kilobytes as usize * 1000);
        let (mut texts, mut rows, mut bytes) = (LargeStringBuilder::new(), 0, 0);
        let mut flush = |texts: &mut LargeStringBuilder, rows: usize, bad_records: &BadRecords| {
            let column: ArrayRef = Arc::new(texts.finish());
            let columns = if schema.fields().is_empty() { Vec::new() } else { vec![column] };
            take(record_batch(schema, columns, rows)?, bad_records)
        };
        while let Some(start) = records.next().map_err(|e| SourceError::from_io(&file.path, e))? {
            text.clear().map_err(SourceError::temporary_file)?;
            let record = records.read(&mut text).map_err(|fault| match fault {
                ReadError::Input(e) => SourceError::from_io(&file.path, e),
                ReadError::Spool(e) => SourceError::temporary_file(e),
            })?;
            let length = text.length();
            if let Err(bad) = record {
                bad_records.add(file, RecordPosition::Line(bad.newlines + 1), bad.reason, bad.message)?;
                continue;
            }
            if length > MAX_RECORD_BYTES as u64 {
                let message = format!("the record has {length} bytes; valid in a table: at most {MAX_RECORD_BYTES}");
                bad_records.add(file, RecordPosition::Line(start.newlines + 1), reason::LONG, message)?;
                continue;
            }
            let mut line = String::with_capacity(length as usize);
            text.pieces(SourceError::temporary_file, &mut |piece, _| {
                line.push_str(piece);
                Ok(())
            })?;
            texts.append_value(&line);
            (rows, bytes) = (rows + 1, bytes + line.len());
            if rows >= BATCH_ROWS || bytes >= BATCH_BYTES {
                flush(&mut texts, rows, bad_records)?;
                (rows, bytes) = (0, 0);
            }
        }
        if rows > 0 { flush(&mut texts, rows, bad_records) } else { Ok(()) }
    }
}
