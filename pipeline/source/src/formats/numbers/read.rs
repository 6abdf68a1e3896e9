//! Reads the records of a split into batches of rows of numbers.

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{Int32Builder, ListBuilder, RecordBatch, UInt32Builder, UInt64Builder};
use arrow::datatypes::{DataType, Field};
use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_operators::grid::numbers_schema;
use stillhouse_operators::images::BadImage;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::{Input, OnError};

use super::{FindFile, RawRecords, holds_labels, open, whole_range};
use crate::spool::DocumentKey;
use crate::summary::{ReadSummary, RecordsDigest};

const ROWS: usize = 1024;
/// Count of numbers at which a batch is full: 1 MB.
const FULL: usize = 1 << 18;

/// Reads the rows that a split takes.
pub(crate) struct NumbersReader {
    store: Store,
    input: Arc<Input>,
    open: Option<Box<dyn RawRecords>>,
    /// Number of records so far.
    ordinal: u64,
    batch: Batch,
    pub records: RecordsDigest,
    pub skipped: BTreeMap<String, u64>,
}

/// Collects rows until they fill a batch.
struct Batch {
    ids: UInt64Builder,
    tokens: ListBuilder<UInt32Builder>,
    labels: Int32Builder,
    rows: usize,
    numbers: usize,
}

impl Batch {
    fn new() -> Self {
        let item = Arc::new(Field::new_list_field(DataType::UInt32, false));
        let tokens = ListBuilder::new(UInt32Builder::new()).with_field(item);
        Self { ids: UInt64Builder::new(), tokens, labels: Int32Builder::new(), rows: 0, numbers: 0 }
    }

    fn close(&mut self) -> Result<Option<RecordBatch>, SourceError> {
        if self.rows == 0 {
            return Ok(None);
        }
        (self.rows, self.numbers) = (0, 0);
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(self.ids.finish()), Arc::new(self.tokens.finish()), Arc::new(self.labels.finish())];
        RecordBatch::try_new(numbers_schema(), columns).map(Some).map_err(|e| SourceError::corrupt("rows", e))
    }
}

impl NumbersReader {
    pub fn new(store: Store, input: Arc<Input>) -> Self {
        let (records, skipped) = Default::default();
        Self { store, input, open: None, ordinal: 0, batch: Batch::new(), records, skipped }
    }

    /// Returns the next full batch, or `None` at the end of the range.
    pub fn next(
        &mut self,
        split: &SplitRecord,
        file: &InputFile,
        others: FindFile<'_>,
        range: Range,
        summary: &mut ReadSummary,
    ) -> Result<Option<RecordBatch>, SourceError> {
        let mut records = match self.open.take() {
            Some(records) => records,
            None => open(&self.store, file, others, &self.input, range)?,
        };
        while self.batch.rows < ROWS && self.batch.numbers < FULL {
            let Some(raw) = records.next()? else { return Ok(None) };
            let ordinal = u32::try_from(self.ordinal).map_err(|_| SourceError::Plan {
                field: "input.split_megabytes".into(),
                message: format!("split {} has more than 2^32 records; make splits smaller", split.split.0),
            })?;
            self.ordinal += 1;
            if let Some(keys) = split.keys
                && !keys.contains(DocumentKey::new(keys.seed).with(&raw.stored).get())
            {
                continue;
            }
            // hash the stored bytes, before they are decoded
            self.records.add_length(raw.stored.len() as u64);
            self.records.add_bytes(&raw.stored);
            let position = raw.position.clone();
            match raw.row(&self.input) {
                Ok((numbers, label)) => {
                    if let Some(label) = label {
                        self.records.add_bytes(&label.to_le_bytes());
                    }
                    summary.documents += 1;
                    summary.text_bytes += numbers.len() as u64;
                    self.batch.ids.append_value(split.split.document(ordinal).0);
                    self.batch.tokens.values().append_slice(&numbers);
                    self.batch.tokens.append(true);
                    self.batch.labels.append_option(label);
                    self.batch.rows += 1;
                    self.batch.numbers += numbers.len();
                }
                Err(BadImage { reason, message }) => {
                    if self.input.on_error == OnError::Fail {
                        return Err(SourceError::Record { file: file.path.clone(), position, reason, message });
                    }
                    tracing::debug!(file = file.path, %position, reason, message, "record skipped");
                    self.records.add_bad_record();
                    *self.skipped.entry(reason.into()).or_default() += 1;
                }
            }
        }
        self.open = Some(records);
        self.close()
    }

    /// Returns the collected rows as a batch, or `None` if there are none.
    pub fn close(&mut self) -> Result<Option<RecordBatch>, SourceError> {
        self.batch.close()
    }
}

/// Calls `each` with the key of every good record of a range.
pub(crate) fn read_keys(
    store: &Store,
    file: &InputFile,
    others: FindFile<'_>,
    range: Range,
    input: &Input,
    seed: u64,
    each: &mut dyn FnMut(u64),
) -> Result<(), SourceError> {
    let mut records = open(store, file, others, input, range)?;
    while let Some(raw) = records.next()? {
        let key = DocumentKey::new(seed).with(&raw.stored).get();
        let position = raw.position.clone();
        match raw.row(input) {
            Ok(_) => each(key),
            Err(BadImage { reason, message }) if input.on_error == OnError::Fail => {
                return Err(SourceError::Record { file: file.path.clone(), position, reason, message });
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// Returns the reason why all of the first records of a file would be skipped; `None` if one is good or the file has
/// none.
///
/// # Errors
/// As reading the file: at the first bad record unless they may be skipped.
pub(crate) fn skip_reason(
    store: &Store,
    files: &[InputFile],
    file: &InputFile,
    input: &Input,
    max_records: usize,
) -> Result<Option<String>, SourceError> {
    if holds_labels(&file.path, input) {
        return Ok(None);
    }
    let others = |path: &str| files.iter().find(|file| file.path == path).cloned();
    let Some(range) = whole_range(store, file, input)? else { return Ok(None) };
    let mut records = open(store, file, &others, input, range)?;
    let mut skipped = None;
    for _ in 0..max_records {
        let Some(raw) = records.next()? else { break };
        let position = raw.position.clone();
        match raw.row(input) {
            Ok(_) => return Ok(None),
            Err(BadImage { reason, message }) if input.on_error == OnError::Fail => {
                return Err(SourceError::Record { file: file.path.clone(), position, reason, message });
            }
            Err(BadImage { reason, .. }) => skipped = skipped.or(Some(reason.to_owned())),
        }
    }
    Ok(skipped)
}
