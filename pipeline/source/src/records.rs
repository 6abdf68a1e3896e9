//! The interface between row formats and the planner and reader: records that begin at an offset and are read or
//! skipped.

use std::io;

use stillhouse_base::source_error::SourceError;

use super::spool::{PushError, Spool};

/// The start of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordStart {
    /// Offset in the decompressed bytes of the file.
    pub offset: u64,
    /// Newlines between the position where the records were opened and this offset.
    pub newlines: u64,
}

/// Why a record is bad.
#[derive(Debug)]
pub(crate) struct BadRecord {
    pub reason: &'static str,
    pub message: String,
    /// Newlines between the position where the records were opened and the fault.
    pub newlines: u64,
}

/// An error after which reading cannot continue.
#[derive(Debug)]
pub(crate) enum ReadError {
    /// The input failed.
    Input(io::Error),
    /// The temporary file failed.
    Spool(io::Error),
}

impl From<io::Error> for ReadError {
    fn from(error: io::Error) -> Self {
        Self::Input(error)
    }
}

/// Maximum bytes of a carried value. A record with a longer one is bad.
pub(crate) const MAX_CARRIED_BYTES: usize = 16 << 10;

/// Values of the columns that [`stillhouse_schemas::spec::Input::carried_columns`] names, in their order; `None` for null. Empty
/// if there are none.
pub(crate) type Carried = Vec<Option<String>>;

/// Records of a file, in order. After each [`Records::next`] the caller makes one call of [`Records::read`] or
/// [`Records::skip`].
pub(crate) trait Records: Send {
    /// Advances to the next record.
    fn next(&mut self) -> io::Result<Option<RecordStart>>;

    /// Reads the record's text; skips to the end of a bad record.
    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError>;

    /// Skips the record.
    fn skip(&mut self) -> io::Result<()>;

    /// Decompressed bytes passed, from the start of the file.
    fn offset(&self) -> u64;

    /// Takes the carried values of the record that was read last. Formats without columns have none.
    fn carried(&mut self) -> Carried {
        Carried::new()
    }
}

/// The text of a row as the file stores it; `None` if it is null.
pub(crate) type Cell<'a> = Option<&'a [u8]>;

/// Rows of a columnar file, in order.
pub(crate) trait Rows: Send {
    /// Advances to the next row. Returns its number in the file, or `None` at the end of the range.
    fn next(&mut self) -> Result<Option<u64>, SourceError>;

    /// Returns the text of the row to which [`Rows::next`] has advanced.
    fn cell(&self) -> Cell<'_>;

    /// Returns the carried values of this row. Formats without columns have none.
    fn carried(&self) -> Carried {
        Carried::new()
    }
}

/// Appends bytes to the text. Returns the index of the first byte that is not UTF-8, or `None` if all are.
pub(crate) fn push(text: &mut Spool, bytes: &[u8]) -> Result<Option<usize>, ReadError> {
    match text.push(bytes) {
        Ok(()) => Ok(None),
        Err(PushError::Utf8(at)) => Ok(Some(at)),
        Err(PushError::Io(e)) => Err(ReadError::Spool(e)),
    }
}
