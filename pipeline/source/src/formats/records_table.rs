//! Files of bytes as a table: the text of a record, and columns that the format carries beside it, all of them text.

use std::sync::Arc;

use arrow::array::{ArrayRef, LargeStringBuilder};
use arrow::datatypes::{DataType, Field, Schema};
use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_input_files::InputFile;
use stillhouse_input_files::Store;
use stillhouse_schemas::spec::Input;

use super::BytesFormat;
use crate::records::ReadError;
use crate::spool::Spool;
use crate::table_format::{
    BATCH_BYTES, BATCH_ROWS, BadRecords, FileColumns, MAX_RECORD_BYTES, TableFormat, TakeRows, record_batch,
};

/// Files of a format as a table.
pub(super) struct RecordsTable {
    pub format: &'static dyn BytesFormat,
    /// The columns beside the text, which has the name that `input.text` gives it.
    pub columns: &'static [&'static str],
}

impl TableFormat for RecordsTable {
    fn schema(&self, _store: &Store, _files: &[InputFile], input: &Input) -> Result<Schema, SourceError> {
        let names = std::iter::once(input.text.as_str()).chain(self.columns.iter().copied());
        Ok(Schema::new(names.map(|name| Field::new(name, DataType::LargeUtf8, true)).collect::<Vec<_>>()))
    }

    fn read(
        &self,
        FileColumns { store, file, input, schema }: FileColumns<'_>,
        bad_records: &mut BadRecords,
        take: &mut TakeRows<'_>,
    ) -> Result<(), SourceError> {
        let is_text = |name: &str| name == input.text;
        let carry = schema.fields().iter().map(|field| field.name()).filter(|name| !is_text(name)).cloned().collect();
        let (mut records, _) = self.format.open(store, file, &Input { carry, ..input.clone() }, (0, u64::MAX))?;
        let mut text = Spool::new(input.piece_kilobytes as usize * 1000);
        let mut columns: Vec<LargeStringBuilder> = schema.fields().iter().map(|_| LargeStringBuilder::new()).collect();
        let (mut rows, mut bytes) = (0, 0);
        let mut flush = |columns: &mut [LargeStringBuilder], rows: usize, bad_records: &BadRecords| {
            let arrays = columns.iter_mut().map(|column| Arc::new(column.finish()) as ArrayRef).collect();
            take(record_batch(schema, arrays, rows)?, bad_records)
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
            let mut carried = records.carried().into_iter();
            for (column, field) in columns.iter_mut().zip(schema.fields()) {
                let value = match is_text(field.name()) {
                    true => Some(whole(&mut text, length)?),
                    false => carried.next().flatten(),
                };
                bytes += value.as_ref().map_or(0, String::len);
                column.append_option(value);
            }
            rows += 1;
            if rows >= BATCH_ROWS || bytes >= BATCH_BYTES {
                flush(&mut columns, rows, bad_records)?;
                (rows, bytes) = (0, 0);
            }
        }
        if rows > 0 { flush(&mut columns, rows, bad_records) } else { Ok(()) }
    }
}

/// The text of the record that was read last.
fn whole(text: &mut Spool, length: u64) -> Result<String, SourceError> {
    let mut whole = String::with_capacity(length as usize);
    text.pieces(SourceError::temporary_file, &mut |piece, _| {
        whole.push_str(piece);
        Ok(())
    })?;
    Ok(whole)
}
