//! What every row format is to the planner and the reader: records that begin somewhere, and are read or passed over.

use std::io;

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::spec::{Compression, Input, InputFormat, TextDocument};

use super::csv::CsvRecords;
use super::decode::{Cursor, compression};
use super::json::JsonRecords;
use super::lines::{BlockRecords, FileRecords, LineRecords};
use super::list::InputFile;
use super::spool::{PushError, Spool};
use super::store::Store;

/// Where a record begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Start {
    /// In the decompressed bytes of the file.
    pub offset: u64,
    /// Newlines between where the records were opened and here.
    pub newlines: u64,
}

/// Why a record is bad.
#[derive(Debug)]
pub(crate) struct Bad {
    pub reason: &'static str,
    pub message: String,
    /// Newlines between where the records were opened and the fault.
    pub newlines: u64,
}

/// Reading cannot go on.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The input failed.
    Input(io::Error),
    /// The temporary file failed.
    Spool(io::Error),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Input(error)
    }
}

/// Records of a file, in order. After each [`Records::next`] comes one [`Records::read`] or [`Records::skip`].
pub(crate) trait Records: Send {
    /// Goes to the next record.
    fn next(&mut self) -> io::Result<Option<Start>>;

    /// Reads the record's text; a bad record is passed over to its end.
    fn read(&mut self, text: &mut Spool) -> Result<Result<(), Bad>, Fault>;

    /// Passes over the record.
    fn skip(&mut self) -> io::Result<()>;

    /// Bytes passed, from the start of the file.
    fn offset(&self) -> u64;
}

/// Whether a reader may begin anywhere in a file and find the next record, so that no scan is needed to cut it.
pub(crate) fn is_seekable(file: &InputFile, input: &Input) -> bool {
    let lines = match input.format() {
        InputFormat::Jsonl => true,
        InputFormat::Text => input.document == TextDocument::Line,
        _ => false,
    };
    lines && compression(file, input) == Compression::None
}

/// Records of a file that begin at `start` or later, of which those that begin before `end` are wanted; also the offset from which newlines
/// are counted.
pub(crate) fn open(
    store: &Store,
    file: &InputFile,
    input: &Input,
    (start, end): (u64, u64),
) -> Result<(Box<dyn Records>, u64), SourceError> {
    let by_line = matches!(input.format(), InputFormat::Jsonl)
        || (input.format() == InputFormat::Text && input.document == TextDocument::Line);
    let cursor = match (input.format(), by_line) {
        (InputFormat::Csv, _) => {
            let records = CsvRecords::open(store, file, input, (start, end))?;
            return Ok((Box::new(records), start));
        }
        // one byte earlier, so that a record which begins exactly at `start` is told from one that began before
        (_, true) if start > 0 => {
            let mut cursor = Cursor::open_range(store, file, input, (start - 1, end))?;
            cursor.finish_line(|_| {}).map_err(|e| SourceError::from_io(&file.path, e))?;
            cursor.newlines = 0;
            cursor
        }
        _ => Cursor::open_range(store, file, input, (start, end))?,
    };
    let from = cursor.offset;
    let records: Box<dyn Records> = match (input.format(), input.document) {
        (InputFormat::Jsonl, _) => Box::new(JsonRecords::new(cursor, &input.text)),
        (_, TextDocument::Line) => Box::new(LineRecords::new(cursor)),
        (_, TextDocument::BlankLine) => Box::new(BlockRecords::new(cursor)),
        (_, TextDocument::File) => Box::new(FileRecords::new(cursor)),
    };
    Ok((records, from))
}

/// Passes bytes to the text until they are not UTF-8; says at which index of them, or `None` where all is well.
pub(crate) fn push(text: &mut Spool, bytes: &[u8]) -> Result<Option<usize>, Fault> {
    match text.push(bytes) {
        Ok(()) => Ok(None),
        Err(PushError::Utf8(at)) => Ok(Some(at)),
        Err(PushError::Io(e)) => Err(Fault::Spool(e)),
    }
}
