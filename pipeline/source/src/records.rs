//! What every row format is to the planner and the reader: records that begin somewhere, and are read or passed over.

use std::io;

use stillhouse_base::source_error::SourceError;

use super::spool::{PushError, Spool};

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

/// The text of a row as the file stores it; `None` where it is null.
pub(crate) type Cell<'a> = Option<&'a [u8]>;

/// Rows of a columnar file, in order.
pub(crate) trait Rows: Send {
    /// Goes to the next row; its number in the file, or none at the end of the range.
    fn next(&mut self) -> Result<Option<u64>, SourceError>;

    /// The text of the row that [`Rows::next`] has gone to.
    fn cell(&self) -> Cell<'_>;
}

/// Passes bytes to the text until they are not UTF-8; says at which index of them, or `None` where all is well.
pub(crate) fn push(text: &mut Spool, bytes: &[u8]) -> Result<Option<usize>, Fault> {
    match text.push(bytes) {
        Ok(()) => Ok(None),
        Err(PushError::Utf8(at)) => Ok(Some(at)),
        Err(PushError::Io(e)) => Err(Fault::Spool(e)),
    }
}
