//! Records of text files: lines, blocks between blank lines, whole files.
//!
//! A line ends with `\n`; one `\r` before it belongs to the line ending. A newline at the end of the file begins no
//! further line. Within a block, lines are joined with `\n`. A whole file is taken byte for byte. A byte order mark at
//! the start is dropped.

use std::io;

use stillhouse_base::source_error::{SourceError, reason};
use stillhouse_input_files::{Cursor, InputFile, Store};
use stillhouse_schemas::spec::{Input, TextDocument};

use super::records_table::RecordsTable;
use super::{BytesFormat, Cut};
use crate::records::{BadRecord, ReadError, RecordStart, Records, push};
use crate::spool::Spool;
use crate::table_format::TableFormat;

const MAX_INDENT_BYTES: usize = 1 << 20;

/// `input.format: text`.
pub(super) struct Text;

impl BytesFormat for Text {
    fn endings(&self) -> &'static [&'static str] {
        &[".txt", ".text"]
    }

    fn cut(&self, input: &Input) -> Cut {
        match input.document {
            TextDocument::Line => Cut::Anywhere,
            TextDocument::BlankLine => Cut::AtRecords,
            TextDocument::File => Cut::Nowhere,
        }
    }

    fn open(
        &self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        range: (u64, u64),
    ) -> Result<(Box<dyn Records>, u64), SourceError> {
        let cursor = match input.document {
            TextDocument::Line => Cursor::open_at_line(store, file, input, range)?,
            TextDocument::BlankLine | TextDocument::File => Cursor::open_range(store, file, input, range)?,
        };
        let from = cursor.offset;
        let records: Box<dyn Records> = match input.document {
            TextDocument::Line => Box::new(LineRecords::new(cursor)),
            TextDocument::BlankLine => Box::new(BlockRecords::new(cursor)),
            TextDocument::File => Box::new(FileRecords::new(cursor)),
        };
        Ok((records, from))
    }

    fn table(&self) -> Option<&'static dyn TableFormat> {
        Some(&RecordsTable { format: &Text, columns: &[] })
    }
}

pub(super) fn invalid(newlines: u64) -> BadRecord {
    BadRecord { reason: reason::UTF8, message: "got bytes that are not UTF-8; valid: text in UTF-8".into(), newlines }
}

/// Reads the rest of the line into the text, and calls `on_part` with its parts. Returns false if the line is not UTF-8. Passes
/// the whole line in both cases.
pub(super) fn read_line(
    cursor: &mut Cursor,
    text: &mut Spool,
    mut on_part: impl FnMut(&[u8]),
) -> Result<bool, ReadError> {
    let mut good = true;
    let mut fault = None;
    cursor.finish_line(|bytes| {
        on_part(bytes);
        if good && fault.is_none() {
            match push(text, bytes) {
                Ok(bad) => good = bad.is_none(),
                Err(e) => fault = Some(e),
            }
        }
    })?;
    if let Some(fault) = fault {
        return Err(fault);
    }
    if good {
        text.trim_carriage_return().map_err(ReadError::Spool)?;
    }
    Ok(good && text.is_whole())
}

/// Reads every line.
pub(crate) struct LineRecords {
    cursor: Cursor,
}

impl LineRecords {
    pub fn new(cursor: Cursor) -> Self {
        Self { cursor }
    }
}

impl Records for LineRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        let start = RecordStart { offset: self.cursor.offset, newlines: self.cursor.newlines };
        self.cursor.skip_byte_order_mark()?;
        Ok((!self.cursor.fill()?.is_empty()).then_some(start))
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        let newlines = self.cursor.newlines;
        Ok(if read_line(&mut self.cursor, text, |_| {})? { Ok(()) } else { Err(invalid(newlines)) })
    }

    fn skip(&mut self) -> io::Result<()> {
        self.cursor.finish_line(|_| {})
    }

    fn offset(&self) -> u64 {
        self.cursor.offset
    }
}

/// Reads blocks of lines. A line of white space is blank, unless it is longer than 1 MB.
pub(crate) struct BlockRecords {
    cursor: Cursor,
    /// White space at the start of the current line.
    indent: Vec<u8>,
}

impl BlockRecords {
    pub fn new(cursor: Cursor) -> Self {
        Self { cursor, indent: Vec::new() }
    }

    /// Passes the white space at the start of a line. Returns false if the line has nothing else, or at the end of the
    /// file.
    fn has_text(&mut self) -> io::Result<bool> {
        self.indent.clear();
        loop {
            let available = self.cursor.fill()?;
            if available.is_empty() {
                return Ok(false);
            }
            let space = MAX_INDENT_BYTES.saturating_sub(self.indent.len());
            let end = available.iter().take(space).position(|b| !matches!(b, b' ' | b'\t' | b'\r' | 0x0b | 0x0c));
            let n = end.unwrap_or(available.len().min(space));
            let newline = available.get(n) == Some(&b'\n');
            self.indent.extend_from_slice(&available[..n]);
            if newline {
                self.cursor.consume(n + 1);
                self.cursor.newlines += 1;
                return Ok(false);
            }
            self.cursor.consume(n);
            if end.is_some() || self.indent.len() >= MAX_INDENT_BYTES {
                return Ok(true);
            }
        }
    }
}

impl Records for BlockRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        loop {
            let start = RecordStart { offset: self.cursor.offset, newlines: self.cursor.newlines };
            self.cursor.skip_byte_order_mark()?;
            if self.has_text()? {
                return Ok(Some(start));
            }
            if self.cursor.fill()?.is_empty() {
                return Ok(None);
            }
        }
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        loop {
            let newlines = self.cursor.newlines;
            let indent = push(text, &self.indent)?;
            if indent.is_some() || !read_line(&mut self.cursor, text, |_| {})? {
                if self.has_text()? {
                    self.skip()?;
                }
                return Ok(Err(invalid(newlines)));
            }
            if !self.has_text()? {
                return Ok(Ok(()));
            }
            push(text, b"\n")?;
        }
    }

    fn skip(&mut self) -> io::Result<()> {
        loop {
            self.cursor.finish_line(|_| {})?;
            if !self.has_text()? {
                return Ok(());
            }
        }
    }

    fn offset(&self) -> u64 {
        self.cursor.offset
    }
}

/// Reads the whole file as one record, empty or not.
pub(crate) struct FileRecords {
    cursor: Cursor,
    done: bool,
}

impl FileRecords {
    pub fn new(cursor: Cursor) -> Self {
        Self { cursor, done: false }
    }
}

impl Records for FileRecords {
    fn next(&mut self) -> io::Result<Option<RecordStart>> {
        let start = RecordStart { offset: 0, newlines: 0 };
        Ok((!std::mem::replace(&mut self.done, true)).then_some(start))
    }

    fn read(&mut self, text: &mut Spool) -> Result<Result<(), BadRecord>, ReadError> {
        self.cursor.skip_byte_order_mark()?;
        loop {
            let available = self.cursor.fill()?;
            if available.is_empty() {
                let newlines = self.cursor.newlines;
                return Ok(if text.is_whole() { Ok(()) } else { Err(invalid(newlines)) });
            }
            let n = available.len();
            let bad = push(text, available)?;
            let good = &available[..bad.unwrap_or(n)];
            let newlines = memchr::memchr_iter(b'\n', good).count() as u64;
            self.cursor.newlines += newlines;
            if bad.is_some() {
                return Ok(Err(invalid(self.cursor.newlines)));
            }
            self.cursor.consume(n);
        }
    }

    fn skip(&mut self) -> io::Result<()> {
        self.cursor.skip_to(u64::MAX)
    }

    fn offset(&self) -> u64 {
        self.cursor.offset
    }
}
