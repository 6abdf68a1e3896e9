//! A cursor over the decompressed bytes of a file, which counts the offset and the newlines passed.
//!
//! To open a compressed file at an offset, it decompresses the bytes between the last checkpoint
//! ([`super::checkpoints`]) and the offset: about 1 MB of gzip if the file was read before. A Zstandard frame is
//! decompressed from its start.

use std::io::{self, BufRead};
use std::sync::PoisonError;

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::spec::{Compression, Input};

use super::compression::compression;
use super::decompress::Decompressor;
use super::input_file::InputFile;
use super::sniff;
use super::store::{ObjectReader, Store};

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A position in the decompressed bytes of a file.
pub struct Cursor {
    reader: Box<dyn BufRead + Send>,
    /// Decompressed bytes passed, from the start of the file.
    pub offset: u64,
    /// Newlines passed since this cursor was opened; the record readers count them.
    pub newlines: u64,
}

impl Cursor {
    /// Opens a file at an offset of its decompressed bytes.
    pub fn open(store: &Store, file: &InputFile, input: &Input, start: u64) -> Result<Self, SourceError> {
        Self::open_range(store, file, input, (start, u64::MAX))
    }

    /// Opens a file at the first line that begins at `start` or later, to read up to about `end`. Counts newlines from
    /// that line.
    ///
    /// Opens one byte earlier, to distinguish a line that begins exactly at `start` from one that began before it.
    pub fn open_at_line(
        store: &Store,
        file: &InputFile,
        input: &Input,
        (start, end): (u64, u64),
    ) -> Result<Self, SourceError> {
        let Some(before) = start.checked_sub(1) else { return Self::open_range(store, file, input, (start, end)) };
        let mut cursor = Self::open_range(store, file, input, (before, end))?;
        cursor.finish_line(|_| {}).map_err(|e| SourceError::from_io(&file.path, e))?;
        cursor.newlines = 0;
        Ok(cursor)
    }

    /// Opens a file at a decompressed offset, to read up to about another. For a compressed file, whose stored size up
    /// to there is unknown, it may fetch one chunk more.
    pub fn open_range(
        store: &Store,
        file: &InputFile,
        input: &Input,
        (start, end): (u64, u64),
    ) -> Result<Self, SourceError> {
        let how = compression(file, input);
        let io = |e| SourceError::from_io(&file.path, e);
        if how == Compression::None {
            let mut reader = ObjectReader::new(store, &file.location, file.size, start).read_ahead_until(end);
            if start == 0
                && let Some(wrong) = sniff::check_stored(reader.fill_buf().map_err(io)?, file, input)
            {
                return Err(wrong);
            }
            return Ok(Self { reader: Box::new(reader), offset: start, newlines: 0 });
        }
        if file.size == 0 {
            let name = if how == Compression::Gzip { "gzip" } else { "Zstandard" };
            return Err(SourceError::corrupt(
                &file.path,
                format!("is cut off: got 0 bytes, which is not a {name} file"),
            ));
        }
        let checkpoints = store.checkpoints(file);
        // if several readers would decompress the same bytes, one does, and the others wait for the checkpoints that it
        // records; Zstandard has no checkpoints inside a frame
        let lock = checkpoints.filter(|_| how == Compression::Gzip).and_then(|all| all.decompression_lock(file, start));
        let _guard = lock.as_ref().map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        let mut cursor = match checkpoints.and_then(|all| all.before(file, start)) {
            Some(from) => {
                let reader = Box::new(Decompressor::resume(store, file, how, &from).map_err(io)?);
                Self { reader, offset: from.decompressed, newlines: 0 }
            }
            None => Self::at_start(store, file, input, how)?,
        };
        cursor.skip_to(start).map_err(io)?;
        Ok(cursor)
    }

    /// Opens the stored bytes of a file at an offset, without decompression, to read up to about another.
    pub fn stored(store: &Store, file: &InputFile, (start, end): (u64, u64)) -> Result<Self, SourceError> {
        let reader = ObjectReader::new(store, &file.location, file.size, start).read_ahead_until(end);
        Ok(Self { reader: Box::new(reader), offset: start, newlines: 0 })
    }

    fn at_start(store: &Store, file: &InputFile, input: &Input, how: Compression) -> Result<Self, SourceError> {
        let io = |e| SourceError::from_io(&file.path, e);
        let mut raw = ObjectReader::new(store, &file.location, file.size, 0);
        if let Some(wrong) = sniff::check_stored(raw.fill_buf().map_err(io)?, file, input) {
            return Err(wrong);
        }
        let reader = Box::new(Decompressor::new(store, file, how, raw).map_err(io)?);
        let mut cursor = Self { reader, offset: 0, newlines: 0 };
        if let Some(wrong) = sniff::check_decompressed(cursor.fill().map_err(io)?, file) {
            return Err(wrong);
        }
        Ok(cursor)
    }

    /// Advances to an offset of the same file: skips the bytes before it, or reopens the file there if that costs less.
    pub fn forward(
        mut self,
        store: &Store,
        file: &InputFile,
        input: &Input,
        (start, end): (u64, u64),
    ) -> Result<Self, SourceError> {
        let nearer = |from: u64| from > self.offset;
        let opens = match compression(file, input) {
            Compression::None => true,
            Compression::Gzip => store.checkpoints(file).is_some(),
            _ => {
                store.checkpoints(file).and_then(|all| all.before(file, start)).is_some_and(|p| nearer(p.decompressed))
            }
        };
        if opens {
            return Self::open_range(store, file, input, (start, end));
        }
        self.skip_to(start).map_err(|e| SourceError::from_io(&file.path, e))?;
        Ok(self)
    }

    /// Returns the buffered bytes and reads more only if there are none. Empty at the end of the file.
    pub fn fill(&mut self) -> io::Result<&[u8]> {
        loop {
            match self.reader.fill_buf() {
                Ok(_) => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.reader.fill_buf()
    }

    /// Passes bytes that [`Cursor::fill`] has returned.
    pub fn consume(&mut self, n: usize) {
        self.reader.consume(n);
        self.offset += n as u64;
    }

    /// Skips bytes up to an offset, or to the end of the file.
    pub fn skip_to(&mut self, offset: u64) -> io::Result<()> {
        while self.offset < offset {
            let available = self.fill()?.len() as u64;
            if available == 0 {
                break;
            }
            self.consume(available.min(offset - self.offset) as usize);
        }
        Ok(())
    }

    /// Passes the rest of a line and its newline. Calls `on_part` with each part of the line, without the newline.
    pub fn finish_line(&mut self, mut on_part: impl FnMut(&[u8])) -> io::Result<()> {
        loop {
            let available = self.fill()?;
            if available.is_empty() {
                return Ok(());
            }
            let end = memchr::memchr(b'\n', available);
            on_part(&available[..end.unwrap_or(available.len())]);
            let n = end.map_or(available.len(), |i| i + 1);
            self.consume(n);
            if end.is_some() {
                self.newlines += 1;
                return Ok(());
            }
        }
    }

    /// Skips the byte order mark if the cursor is at the start of a file that has one.
    pub fn skip_byte_order_mark(&mut self) -> io::Result<()> {
        if self.offset != 0 {
            return Ok(());
        }
        let available = self.fill()?;
        if available.len() >= 3 {
            if available.starts_with(BYTE_ORDER_MARK) {
                self.consume(3);
            }
            return Ok(());
        }
        let mut head = Vec::new();
        while head.len() < 3 {
            let available = self.reader.fill_buf()?;
            if available.is_empty() {
                break;
            }
            let n = available.len().min(3 - head.len());
            head.extend_from_slice(&available[..n]);
            self.reader.consume(n);
        }
        if head == BYTE_ORDER_MARK {
            self.offset = 3;
        } else {
            let rest = std::mem::replace(&mut self.reader, Box::new(io::empty()));
            self.reader = Box::new(io::Read::chain(io::Cursor::new(head), rest));
        }
        Ok(())
    }

    /// Counts the newlines from the current offset up to `until`.
    pub fn count_newlines(&mut self, until: u64) -> io::Result<u64> {
        let mut count = 0;
        while self.offset < until {
            let left = until - self.offset;
            let available = self.fill()?;
            if available.is_empty() {
                break;
            }
            let n = (available.len() as u64).min(left) as usize;
            count += memchr::memchr_iter(b'\n', &available[..n]).count() as u64;
            self.consume(n);
        }
        Ok(count)
    }
}
