//! Holds one document between the input and the batches: validates UTF-8, keeps it in memory up to a size, then in a
//! temporary file.
//!
//! A record is emitted only after all of it is known to be good, and a document is never whole in memory. The spool
//! keeps at most one piece in memory, writes longer documents to a temporary file (`TMPDIR`), and reads them back in
//! pieces.

use std::io::{self, Read, Seek, SeekFrom, Write};

use sha2::{Digest, Sha256};
use tempfile::SpooledTempFile;

/// Why bytes were not accepted.
#[derive(Debug)]
pub(crate) enum PushError {
    /// Not UTF-8 at this index of the pushed bytes (0 where the fault began in an earlier push).
    Utf8(usize),
    /// The temporary file failed.
    Io(io::Error),
}

/// Computes the key of a document: the first 8 bytes, little-endian, of SHA-256 over `holdout`, the seed (8 bytes,
/// little-endian) and the text.
pub(crate) struct DocumentKey(Sha256);

impl DocumentKey {
    pub fn new(seed: u64) -> Self {
        Self(Sha256::new().chain_update(b"holdout").chain_update(seed.to_le_bytes()))
    }

    pub fn add(&mut self, text: impl AsRef<[u8]>) {
        self.0.update(text);
    }

    pub fn with(mut self, text: impl AsRef<[u8]>) -> Self {
        self.add(text);
        self
    }

    pub fn get(self) -> u64 {
        self.0.finalize().iter().take(8).rev().fold(0, |key, byte| key << 8 | u64::from(*byte))
    }
}

/// The text of one document.
pub(crate) struct Spool {
    file: SpooledTempFile,
    piece: usize,
    length: u64,
    last: u8,
    /// Bytes of a character that is not complete yet.
    partial: [u8; 4],
    partial_length: usize,
    buffer: Vec<u8>,
    /// Bytes at the start of the buffer already returned.
    returned: usize,
    /// Bytes of the text still to be read back.
    unread: u64,
    /// Number of documents that went to disk.
    pub spooled_to_disk: u64,
}

impl Spool {
    /// Creates a spool that returns documents in pieces of at most `piece` bytes.
    pub fn new(piece: usize) -> Self {
        Self {
            file: SpooledTempFile::new(piece),
            piece,
            length: 0,
            last: 0,
            partial: [0; 4],
            partial_length: 0,
            buffer: Vec::new(),
            returned: 0,
            unread: 0,
            spooled_to_disk: 0,
        }
    }

    /// Bytes of text so far.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Removes the text.
    pub fn clear(&mut self) -> io::Result<()> {
        if self.file.is_rolled() {
            self.file = SpooledTempFile::new(self.piece);
        } else {
            self.file.set_len(0)?;
            self.file.rewind()?;
        }
        (self.length, self.partial_length, self.last) = (0, 0, 0);
        Ok(())
    }

    /// Appends bytes. A character may be divided between two calls.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), PushError> {
        let Some(&last) = bytes.last() else { return Ok(()) };
        self.validate(bytes).map_err(PushError::Utf8)?;
        let was = self.file.is_rolled();
        self.file.write_all(bytes).map_err(PushError::Io)?;
        if self.file.is_rolled() && !was {
            self.spooled_to_disk += 1;
        }
        self.length += bytes.len() as u64;
        self.last = last;
        Ok(())
    }

    fn validate(&mut self, mut bytes: &[u8]) -> Result<(), usize> {
        let mut taken = 0;
        while self.partial_length > 0 && !bytes.is_empty() {
            self.partial[self.partial_length] = bytes[0];
            self.partial_length += 1;
            (bytes, taken) = (&bytes[1..], taken + 1);
            match std::str::from_utf8(&self.partial[..self.partial_length]) {
                Ok(_) => self.partial_length = 0,
                Err(e) if e.error_len().is_some() => return Err(0),
                Err(_) => {}
            }
        }
        match std::str::from_utf8(bytes) {
            Ok(_) => Ok(()),
            Err(e) if e.error_len().is_some() => Err(taken + e.valid_up_to()),
            Err(e) => {
                let rest = &bytes[e.valid_up_to()..];
                self.partial[..rest.len()].copy_from_slice(rest);
                self.partial_length = rest.len();
                Ok(())
            }
        }
    }

    /// Removes a carriage return at the end.
    pub fn trim_carriage_return(&mut self) -> io::Result<()> {
        if self.length > 0 && self.last == b'\r' {
            self.length -= 1;
            self.last = 0;
            self.file.set_len(self.length)?;
            self.file.seek(SeekFrom::Start(self.length))?;
        }
        Ok(())
    }

    /// Whether the text ends with a whole character.
    pub fn is_whole(&self) -> bool {
        self.partial_length == 0
    }

    /// Computes the key of the text.
    pub fn key(&mut self, seed: u64) -> io::Result<u64> {
        let mut key = DocumentKey::new(seed);
        self.pieces(|e| e, &mut |text, _| {
            key.add(text);
            Ok(())
        })?;
        Ok(key.get())
    }

    /// Calls `emit` with pieces of the text, cut between characters; the flag is true for the last one. An empty text
    /// is one empty piece.
    pub fn pieces<E>(
        &mut self,
        error: impl Fn(io::Error) -> E,
        emit: &mut dyn FnMut(&str, bool) -> Result<(), E>,
    ) -> Result<(), E> {
        self.rewind().map_err(&error)?;
        loop {
            let (text, end) = self.next_piece().map_err(&error)?;
            emit(text, end)?;
            if end {
                return Ok(());
            }
        }
    }

    /// Goes to the start of the text, to return its pieces.
    pub fn rewind(&mut self) -> io::Result<()> {
        self.buffer.clear();
        (self.returned, self.unread) = (0, self.length);
        self.file.rewind()
    }

    /// Returns the next piece after [`Spool::rewind`], cut between characters, and true with the last one. An empty
    /// text is one empty piece.
    pub fn next_piece(&mut self) -> io::Result<(&str, bool)> {
        self.buffer.drain(..self.returned);
        let had = self.buffer.len();
        let want = self.unread.min((self.piece - had) as u64);
        self.buffer.resize(had + want as usize, 0);
        self.file.read_exact(&mut self.buffer[had..])?;
        self.unread -= want;
        let end = self.unread == 0;
        self.returned = if end { self.buffer.len() } else { whole_characters(&self.buffer) };
        let text = std::str::from_utf8(&self.buffer[..self.returned])
            .map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
        Ok((text, end))
    }

    /// Bytes of text in memory that are still to be returned.
    #[cfg(test)]
    pub fn buffered(&self) -> usize {
        self.buffer.len()
    }
}

/// Returns the length of the longest prefix of valid UTF-8 that ends with a complete character.
pub(crate) fn whole_characters(bytes: &[u8]) -> usize {
    let tail = bytes.len().saturating_sub(3);
    for at in (tail..bytes.len()).rev() {
        let width = match bytes[at] {
            0x00..=0x7f => 1,
            0x80..=0xbf => continue,
            0xc0..=0xdf => 2,
            0xe0..=0xef => 3,
            _ => 4,
        };
        return if at + width <= bytes.len() { bytes.len() } else { at };
    }
    bytes.len()
}
