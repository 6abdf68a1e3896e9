//! One split read into batches of documents.

use std::collections::{BTreeMap, HashMap};

use arrow::array::RecordBatch;
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};
use stillhouse_schemas::spec::{Input, InputFormat, OnError, TextDocument};

use super::batch::Batches;
use super::decode::Cursor;
use super::error::{Place, SourceError, Stopped, reason};
use super::list::InputFile;
use super::records::{self, Fault};
use super::spool::{Spool, cut};
use super::store::Store;
use super::{ipc, parquet_rows};

/// What a split held.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReadSummary {
    /// Documents emitted.
    pub documents: u64,
    /// Bytes of text emitted.
    pub text_bytes: u64,
    /// Records skipped, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Documents that were too long for one piece and went through a temporary file.
    pub spooled_to_disk: u64,
}

/// Reads the records of one split, in order, and emits them as `documents_schema` batches of at most 1024 rows
/// and about 1 MB (4 MB, or one longer piece, at the most).
///
/// `files` must be the listing that the split was planned from. `document_id` counts bad records too.
///
/// # Errors
/// When a file cannot be read or is corrupt; at the first bad record with `on_error: fail`; when `emit` says that it is over.
pub fn read_split(
    store: &Store,
    files: &[InputFile],
    split: &SplitRecord,
    input: &Input,
    emit: &mut dyn FnMut(RecordBatch) -> Result<(), Stopped>,
) -> Result<ReadSummary, SourceError> {
    let by_path: HashMap<&str, &InputFile> = files.iter().map(|f| (f.path.as_str(), f)).collect();
    let piece = input.piece_kilobytes as usize * 1000;
    let mut reader = SplitReader {
        store,
        input,
        split,
        piece,
        ordinal: 0,
        spool: Spool::new(piece),
        batches: Batches::new(emit),
        summary: ReadSummary::default(),
    };
    for piece in &split.pieces {
        let file =
            by_path.get(piece.file.as_str()).ok_or_else(|| SourceError::Unlisted { file: piece.file.clone() })?;
        reader.piece(file, piece)?;
    }
    reader.batches.flush()?;
    reader.summary.spooled_to_disk = reader.spool.rolled;
    Ok(reader.summary)
}

struct SplitReader<'a, 'b> {
    store: &'a Store,
    input: &'a Input,
    split: &'a SplitRecord,
    piece: usize,
    ordinal: u64,
    spool: Spool,
    batches: Batches<'a, 'b>,
    summary: ReadSummary,
}

impl SplitReader<'_, '_> {
    fn piece(&mut self, file: &InputFile, piece: &Piece) -> Result<(), SourceError> {
        match piece.range {
            Range::Rows { start, end } => self.rows(file, (start, end)),
            Range::Bytes { start, end, line } => self.bytes(file, start, end, line),
        }
    }

    fn next_id(&mut self) -> Result<DocumentId, SourceError> {
        let ordinal = u32::try_from(self.ordinal).map_err(|_| SourceError::Plan {
            field: "input.split_megabytes".into(),
            message: format!("split {} has more than 2^32 records; make splits smaller", self.split.split.0),
        })?;
        self.ordinal += 1;
        Ok(self.split.split.document(ordinal))
    }

    fn bad(
        &mut self,
        file: &InputFile,
        reason: &'static str,
        message: String,
        place: impl FnOnce() -> Result<Place, SourceError>,
    ) -> Result<(), SourceError> {
        if self.input.on_error == OnError::Fail {
            return Err(SourceError::Record { file: file.path.clone(), place: place()?, reason, message });
        }
        tracing::debug!(file = file.path, reason, message, "record skipped");
        *self.summary.skipped.entry(reason.into()).or_default() += 1;
        Ok(())
    }

    fn bytes(&mut self, file: &InputFile, start: u64, end: u64, line: Option<u64>) -> Result<(), SourceError> {
        let (store, input) = (self.store, self.input);
        let whole = input.format == InputFormat::Text && input.document == TextDocument::File;
        let (mut records, from) = records::open(store, file, input, start)?;
        let input_fault = |e| SourceError::from_io(&file.path, e);
        while let Some(at) = records.next().map_err(input_fault)? {
            if at.offset >= end && !whole {
                break;
            }
            let id = self.next_id()?;
            self.spool.clear().map_err(SourceError::spool)?;
            let outcome = records.read(&mut self.spool).map_err(|fault| match fault {
                Fault::Input(e) => SourceError::from_io(&file.path, e),
                Fault::Spool(e) => SourceError::spool(e),
            })?;
            if let Err(bad) = outcome {
                self.bad(file, bad.reason, bad.message, || {
                    let first = match line.or((from == 0).then_some(1)) {
                        Some(line) => line,
                        None => {
                            let newlines = Cursor::open(store, file, input, 0)?.count_newlines(from);
                            1 + newlines.map_err(|e| SourceError::from_io(&file.path, e))?
                        }
                    };
                    Ok(Place::Line(first + bad.newlines))
                })?;
                continue;
            }
            self.summary.documents += 1;
            self.summary.text_bytes += self.spool.length();
            let batches = &mut self.batches;
            self.spool.pieces(SourceError::spool, &mut |text, end| batches.push(id, text, end))?;
        }
        Ok(())
    }

    fn rows(&mut self, file: &InputFile, rows: (u64, u64)) -> Result<(), SourceError> {
        let (store, input) = (self.store, self.input);
        let each = &mut |row: u64, cell: parquet_rows::Cell<'_>| {
            let id = self.next_id()?;
            let place = || Ok(Place::Row(row));
            let Some(bytes) = cell else {
                let message = format!("the value of {:?} is null; valid: a string", input.text);
                return self.bad(file, reason::NULL, message, place);
            };
            let Ok(text) = std::str::from_utf8(bytes) else {
                let message = format!("the value of {:?} is not UTF-8; valid: text in UTF-8", input.text);
                return self.bad(file, reason::UTF8, message, place);
            };
            self.summary.documents += 1;
            self.summary.text_bytes += text.len() as u64;
            let batches = &mut self.batches;
            cut(text, self.piece, &mut |text, end| batches.push(id, text, end))
        };
        match input.format {
            InputFormat::Arrow => ipc::read_rows(store, file, &input.text, rows, each),
            _ => parquet_rows::read_rows(store, file, &input.text, rows, each),
        }
    }
}
