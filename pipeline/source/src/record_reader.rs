//! Reads the records of a range of a file one after another, and the text of each piece by piece.
//!
//! Every call reads what it needs and returns; none waits for a consumer. Between two calls the reader holds at most a
//! record's spool (a piece of it in memory), the decoder's window, and for a columnar file a page or a record batch.

use std::collections::BTreeMap;
use std::sync::Arc;

use stillhouse_base::source_error::{RecordPosition, SourceError, reason};
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::manifest::Range;
use stillhouse_schemas::spec::{FILE_COLUMN, Input, OnError};

use super::formats::{self, Cut, Format};
use super::records::{self, Carried, Cell, MAX_CARRIED_BYTES, ReadError, Records, Rows};
use super::spool::{DocumentKey, Spool, whole_characters};

/// A record of the range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordKind {
    /// A document, whose text can be read.
    Document,
    /// A bad record; it is counted as skipped.
    Bad,
}

/// A range that is being read.
struct OpenRange {
    file: InputFile,
    records: RangeRecords,
}

enum RangeRecords {
    Bytes {
        records: Box<dyn Records>,
        /// Offset from which the records count newlines.
        from: u64,
        /// Records that begin at this offset or later do not belong to the range.
        end: u64,
        /// Line number at the start of the range, if known.
        line: Option<u64>,
    },
    Rows(Box<dyn Rows>),
}

/// Why a record is not a document, and where.
struct RecordFault {
    reason: &'static str,
    message: String,
    at: RecordPlace,
}

#[derive(Clone, Copy)]
enum RecordPlace {
    /// Number of newlines after the offset where the records were opened.
    Newlines(u64),
    Row(u64),
}

/// Reads ranges of files, one after another.
pub(super) struct RecordReader {
    store: Store,
    input: Arc<Input>,
    spool: Spool,
    skipped: BTreeMap<String, u64>,
    open: Option<OpenRange>,
    /// Carried values of the current document.
    carried: Carried,
    /// Bytes of the current row's cell already returned.
    returned: usize,
}

impl RecordReader {
    pub fn new(store: Store, input: Arc<Input>) -> Self {
        let spool = Spool::new(piece_bytes(&input));
        Self { store, input, spool, skipped: BTreeMap::new(), open: None, carried: Carried::new(), returned: 0 }
    }

    /// Returns the number of records skipped, by reason, and the number of documents that went through a temporary
    /// file.
    pub fn into_counts(self) -> (BTreeMap<String, u64>, u64) {
        (self.skipped, self.spool.spooled_to_disk)
    }

    /// Bytes of text in memory that are still to be returned.
    #[cfg(test)]
    pub fn held_bytes(&self) -> usize {
        self.spool.buffered()
    }

    /// Whether a range is open whose end has not been reached.
    pub fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Opens a range.
    pub fn open(&mut self, file: &InputFile, range: Range) -> Result<(), SourceError> {
        let (store, input) = (&self.store, &*self.input);
        let format = formats::for_input(input);
        let records = match range {
            Range::Bytes { start, end, line } => {
                // a file that is a single record includes what was appended to it
                let is_whole = matches!(format, Format::Bytes(format) if format.cut(input) == Cut::Nowhere);
                let end = if is_whole { u64::MAX } else { end };
                let (records, from) = format.open_bytes(store, file, input, (start, end))?;
                RangeRecords::Bytes { records, from, end, line }
            }
            Range::Rows { start, end } => RangeRecords::Rows(format.open_rows(store, file, input, (start, end))?),
        };
        self.open = Some(OpenRange { file: file.clone(), records });
        Ok(())
    }

    /// Advances to the next record. Returns `None` at the end of the range and closes it.
    pub fn next(&mut self) -> Result<Option<RecordKind>, SourceError> {
        let Some(open) = &mut self.open else { return Ok(None) };
        let mut found = match &mut open.records {
            RangeRecords::Bytes { records, end, .. } => {
                next_in_bytes(&open.file, records.as_mut(), *end, &mut self.spool)?
            }
            RangeRecords::Rows(rows) => next_in_rows(rows.as_mut(), &self.input.text)?,
        };
        if let Some(Ok(at)) = &found {
            self.carried = match &mut open.records {
                RangeRecords::Bytes { records, .. } => records.carried(),
                RangeRecords::Rows(rows) => rows.carried(),
            };
            if self.carried.len() != self.input.carried_columns().count() {
                let message = "its format does not give the values of `input.carry`: a bug in this program";
                return Err(SourceError::corrupt(&open.file.path, message));
            }
            if let Some(message) = too_long(&self.input, &self.carried) {
                found = Some(Err(RecordFault { reason: reason::LONG_CARRIED, message, at: *at }));
            }
        }
        self.returned = 0;
        match found {
            None => {
                self.open = None;
                Ok(None)
            }
            Some(Ok(_)) => Ok(Some(RecordKind::Document)),
            Some(Err(fault)) => self.handle_bad(fault).map(|()| Some(RecordKind::Bad)),
        }
    }

    fn handle_bad(&mut self, RecordFault { reason, message, at }: RecordFault) -> Result<(), SourceError> {
        let Some(open) = &self.open else { return Ok(()) };
        let file = &open.file.path;
        if self.input.on_error == OnError::Fail {
            let position = match at {
                RecordPlace::Row(row) => RecordPosition::Row(row),
                RecordPlace::Newlines(newlines) => RecordPosition::Line(self.first_line(open)? + newlines),
            };
            return Err(SourceError::Record { file: file.clone(), position, reason, message });
        }
        tracing::debug!(file, reason, message, "record skipped");
        *self.skipped.entry(reason.into()).or_default() += 1;
        Ok(())
    }

    /// Returns the line number, from 1, where the records of a range were opened. If the plan does not have it, reads
    /// all bytes before the range once more.
    fn first_line(&self, open: &OpenRange) -> Result<u64, SourceError> {
        match open.records {
            RangeRecords::Bytes { line: Some(line), .. } => Ok(line),
            RangeRecords::Bytes { from, .. } if from > 0 => {
                let mut cursor = Cursor::open_range(&self.store, &open.file, &self.input, (0, from))?;
                let newlines = cursor.count_newlines(from);
                Ok(1 + newlines.map_err(|e| SourceError::from_io(&open.file.path, e))?)
            }
            _ => Ok(1),
        }
    }

    /// Returns the cell of the current document, if it did not go through the spool.
    fn cell(&self) -> Cell<'_> {
        match &self.open {
            Some(OpenRange { records: RangeRecords::Rows(rows), .. }) => rows.cell(),
            _ => None,
        }
    }

    /// Bytes of the current document's text.
    pub fn length(&self) -> u64 {
        self.cell().map_or(self.spool.length(), |cell| cell.len() as u64)
    }

    /// Returns the key of the current document.
    pub fn key(&mut self, seed: u64) -> Result<u64, SourceError> {
        match self.cell() {
            Some(cell) => Ok(DocumentKey::new(seed).with(cell).get()),
            None => self.spool.key(seed).map_err(SourceError::temporary_file),
        }
    }

    /// Takes the current document's values of `input.carry`, in the order of the job file.
    pub fn carried(&mut self) -> Carried {
        let (mut of_columns, file) = (std::mem::take(&mut self.carried).into_iter(), self.open.as_ref());
        let is_file = |name: &String| !self.input.is_staged() && name == FILE_COLUMN;
        let value = |name: &String| match is_file(name) {
            true => file.map(|open| open.file.path.clone()),
            false => of_columns.next().flatten(),
        };
        self.input.carry.iter().map(value).collect()
    }

    /// Goes to the start of the current document's text.
    pub fn rewind(&mut self) -> Result<(), SourceError> {
        self.returned = 0;
        self.spool.rewind().map_err(SourceError::temporary_file)
    }

    /// Returns the next piece of the current document's text, and true with the last one. Pieces end between
    /// characters; an empty text is one empty piece.
    pub fn next_piece(&mut self) -> Result<(&str, bool), SourceError> {
        let Some(OpenRange { file, records: RangeRecords::Rows(rows) }) = &self.open else {
            return self.spool.next_piece().map_err(SourceError::temporary_file);
        };
        let rest = rows.cell().and_then(|cell| cell.get(self.returned..)).unwrap_or_default();
        let length = match rest.get(..piece_bytes(&self.input)) {
            Some(window) if rest.len() > window.len() => whole_characters(window),
            _ => rest.len(),
        };
        self.returned += length;
        // the whole cell was checked as UTF-8; the second check costs little compared with the cell's checksum
        let text = std::str::from_utf8(&rest[..length]).map_err(|e| SourceError::corrupt(&file.path, e))?;
        Ok((text, length == rest.len()))
    }
}

/// Maximum bytes of a piece.
fn piece_bytes(input: &Input) -> usize {
    input.piece_kilobytes as usize * 1000
}

/// A document and where it is, or why the record is none.
type NextRecord = Option<Result<RecordPlace, RecordFault>>;

/// Says which carried value is too long, if one is.
fn too_long(input: &Input, carried: &Carried) -> Option<String> {
    let lengths = carried.iter().map(|value| value.as_ref().map_or(0, String::len));
    let (name, _) = input.carried_columns().zip(lengths).find(|(_, length)| *length > MAX_CARRIED_BYTES)?;
    Some(format!(
        "the value of {name:?}, which `input.carry` names, is longer than {MAX_CARRIED_BYTES} bytes; valid: at most as many"
    ))
}

fn next_in_bytes(
    file: &InputFile,
    records: &mut dyn Records,
    end: u64,
    spool: &mut Spool,
) -> Result<NextRecord, SourceError> {
    let start = records.next().map_err(|e| SourceError::from_io(&file.path, e))?;
    let Some(start) = start.filter(|at| at.offset < end) else { return Ok(None) };
    spool.clear().map_err(SourceError::temporary_file)?;
    let outcome = records.read(spool).map_err(|fault| match fault {
        ReadError::Input(e) => SourceError::from_io(&file.path, e),
        ReadError::Spool(e) => SourceError::temporary_file(e),
    })?;
    let fault = |bad: records::BadRecord| RecordFault {
        reason: bad.reason,
        message: bad.message,
        at: RecordPlace::Newlines(bad.newlines),
    };
    Ok(Some(outcome.map(|()| RecordPlace::Newlines(start.newlines)).map_err(fault)))
}

fn next_in_rows(rows: &mut dyn Rows, name: &str) -> Result<NextRecord, SourceError> {
    let Some(row) = rows.next()? else { return Ok(None) };
    let fault = |reason, message| Ok(Some(Err(RecordFault { reason, message, at: RecordPlace::Row(row) })));
    match rows.cell().map(std::str::from_utf8) {
        Some(Ok(_)) => Ok(Some(Ok(RecordPlace::Row(row)))),
        Some(Err(_)) => fault(reason::UTF8, format!("the value of {name:?} is not UTF-8; valid: text in UTF-8")),
        None => fault(reason::NULL, format!("the value of {name:?} is null; valid: a string")),
    }
}
