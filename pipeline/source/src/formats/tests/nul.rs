//! `input.format: nul`: texts that each end with a zero byte, as `find -print0` writes them.

use std::io;

use stillhouse_base::source_error::{SourceError, reason};
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::spec::Input;

use super::{BytesFormat, Cut};
use crate::records::{BadRecord, ReadError, RecordStart, Records, push};
use crate::spool::Spool;

/// `input.format: nul`.
pub(super) struct Nul;

impl BytesFormat for Nul {
    fn endings(&self) -> &'static [&'static str] {
        &[".nul"]
    }

    fn cut(&self, _input: &Input) -> Cut {
        Cut::AtRecords
    }

    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<(Box<dyn Records>, u64), SourceError> {
        let cursor = Cursor::open_range(store, file, input, range)?;
        let from = cursor.offset;
        Ok((Box::new(NulRecords { cursor }), from))
    }
}

/// Texts up to a zero byte, or to the end of the file.
struct NulRecords {
    cursor: Cursor,
}

impl NulRecords {
    /// Passes a record and hands its bytes to `each`, without the zero byte.
    fn pass(&mut self, mut each: impl FnMut(&[u8]) -> Result<(), ReadError>) -> Result<(), ReadError> {
        loop {
            let available = self.cursor.fill()?;
            let end = memchr::memchr(0, available);
            let bytes = &available[..end.unwrap_or(available.len())];
            let newlines = memchr::memchr_iter(b'\n', bytes).count() as u64;
            let (is_last, passed) = (end.is_some() || available.is_empty(), bytes.len() + usize::from(end.is_some()));
            each(bytes)?;
            self.cursor.newlines += newlines;
            self.cursor.consume(passed);
            if is_last {
                return Ok(());
            }
        }
    }
}

impl Records for NulRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        let start = RecordStart { offset: self.cursor.offset, newlines: self.cursor.newlines };
        Ok((!self.cursor.fill()?.is_empty()).then_some(start))
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        let (newlines, mut is_text) = (self.cursor.newlines, true);
        self.pass(|bytes| {
            is_text = is_text && push(text, bytes)?.is_none();
            Ok(())
        })?;
        let message = || "got bytes that are not UTF-8; valid: text in UTF-8".into();
        let is_good = is_text && text.is_whole();
        Ok(if is_good { Ok(()) } else { Err(BadRecord { reason: reason::UTF8, message: message(), newlines }) })
    }

    fn skip(&mut self) -> io::Result<()> {
        self.pass(|_| Ok(())).map_err(|fault| match fault {
            ReadError::Input(e) | ReadError::Spool(e) => e,
        })
    }

    fn offset(&self) -> u64 {
        self.cursor.offset
    }
}
