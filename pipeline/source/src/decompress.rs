//! Decompresses gzip with several members and Zstandard with several frames up to the end of the file, from its start
//! or from a checkpoint.
//!
//! Every reader records the checkpoints that it passes, unless another reader has recorded them
//! ([`super::checkpoints`]). A reader that reaches the end of a gzip member compares the member's CRC-32 and length
//! with its trailer. A reader that began inside the member continues with the CRC-32 and length of the checkpoint, so
//! they cover all bytes of the member.
//!
//! Errors: a truncated file gives `UnexpectedEof`; every other error says what is broken.

use std::io::{self, BufRead, Read};
use std::sync::Arc;

use stillhouse_schemas::spec::Compression;
use zstd::stream::raw::{Decoder as Frames, Operation};

use super::checkpoints::{Checkpoint, Checkpoints, Due, Inside, Stream};
use super::inflate::{At, Inflate, WINDOW};
use super::input_file::InputFile;
use super::store::{ObjectReader, Store};

const BUFFER: usize = 256 << 10;
/// Maximum bytes of a name or comment in a gzip header.
const LARGEST_FIELD: usize = 65_535;
// flags of a gzip header: a CRC-16, an extra field, a name, a comment, and the reserved bits
const HEADER_CRC: u8 = 2;
const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
const RESERVED: u8 = 0xe0;

/// A reader of the decompressed bytes of a file.
pub(super) struct Decompressor {
    raw: ObjectReader,
    codec: Codec,
    buffer: Vec<u8>,
    /// The part of the buffer that the consumer has not read: `begin..end`.
    begin: usize,
    end: usize,
    /// Decompressed offset of the end of the buffer's content.
    offset: u64,
    notes: Option<Notes>,
}

/// Records checkpoints of a file.
struct Notes {
    checkpoints: Arc<Checkpoints>,
    file: InputFile,
    due: Due,
}

enum Codec {
    Gzip(Box<Member>),
    Zstd(Frames<'static>, Place),
}

/// Position relative to a gzip member or a Zstandard frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Before a member or frame, or at the end of the file.
    Before,
    Inside,
    /// At the end of the file, after at least one member or frame.
    Ended,
}

/// The decoder of a gzip member.
struct Member {
    inflate: Inflate,
    place: Place,
    crc: crc32fast::Hasher,
    length: u32,
    /// The last stored byte read from the deflate stream.
    last: u8,
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

fn exactly<const N: usize>(raw: &mut ObjectReader) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    raw.read_exact(&mut bytes).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => io::ErrorKind::UnexpectedEof.into(),
        _ => e,
    })?;
    Ok(bytes)
}

impl Notes {
    /// Records a checkpoint, unless another reader has recorded one in the meantime.
    fn note(
        &mut self,
        offset: u64,
        stored: u64,
        inside: impl FnOnce() -> io::Result<Option<Inside>>,
    ) -> io::Result<()> {
        self.due = self.checkpoints.due(&self.file);
        if offset < self.due.from {
            return Ok(());
        }
        self.checkpoints.note(&self.file, Checkpoint { decompressed: offset, stored, inside: inside()? });
        self.due = self.checkpoints.due(&self.file);
        Ok(())
    }
}

impl Member {
    fn before() -> io::Result<Self> {
        Ok(Self { inflate: Inflate::new()?, place: Place::Before, crc: crc32fast::Hasher::new(), length: 0, last: 0 })
    }

    fn inside(inside: &Inside) -> io::Result<Self> {
        let (inflate, last) = match &inside.stream {
            Stream::Copy(inflate) => (inflate.copy()?, 0),
            Stream::Between { last, bits, window } => {
                (Inflate::resume(*last, *bits, &zstd::bulk::decompress(window, WINDOW)?)?, *last)
            }
        };
        let crc = crc32fast::Hasher::new_with_initial(inside.crc);
        Ok(Self { inflate, place: Place::Inside, crc, length: inside.length, last })
    }

    fn checkpoint(&self, bits: Option<u8>) -> io::Result<Option<Inside>> {
        let stream = match bits {
            None => Stream::Copy(self.inflate.copy()?),
            Some(bits) => {
                let window = zstd::bulk::compress(&self.inflate.window(), 1)?.into();
                Stream::Between { last: self.last, bits, window }
            }
        };
        Ok(Some(Inside { crc: self.crc.clone().finalize(), length: self.length, stream }))
    }

    /// Decodes some bytes of the member. Returns 0 at its end or between two blocks.
    fn decode(
        &mut self,
        raw: &mut ObjectReader,
        out: &mut [u8],
        offset: u64,
        notes: &mut Option<Notes>,
    ) -> io::Result<usize> {
        let input = raw.fill_buf()?;
        let stop = notes.as_ref().is_some_and(|notes| offset >= notes.due.from);
        let step = self.inflate.step(input, out, stop)?;
        if let Some(last) = step.read.checked_sub(1).and_then(|i| input.get(i)) {
            self.last = *last;
        } else if step.written == 0 && step.at == At::Anywhere {
            return Err(match input.is_empty() {
                true => io::ErrorKind::UnexpectedEof.into(),
                false => broken("corrupt deflate stream"),
            });
        }
        raw.consume(step.read);
        let written = &out[..step.written];
        self.crc.update(written);
        self.length = self.length.wrapping_add(step.written as u32);
        let now = offset + step.written as u64;
        match (step.at, notes) {
            (At::End, _) => self.trailer(raw)?,
            (At::Between { bits }, Some(notes)) if stop => {
                notes.note(now, raw.offset(), || self.checkpoint(Some(bits)))?;
            }
            (_, Some(notes)) if now >= notes.due.late => {
                notes.note(now, raw.offset(), || self.checkpoint(None))?;
            }
            _ => {}
        }
        Ok(step.written)
    }

    fn trailer(&mut self, raw: &mut ObjectReader) -> io::Result<()> {
        let stored: [u8; 8] = exactly(raw)?;
        let crc = std::mem::take(&mut self.crc).finalize();
        let sums = crc.to_le_bytes().into_iter().chain(self.length.to_le_bytes());
        if !sums.eq(stored) {
            return Err(broken("corrupt gzip stream does not have a matching checksum"));
        }
        (self.place, self.length) = (Place::Before, 0);
        Ok(())
    }

    fn header(&mut self, raw: &mut ObjectReader) -> io::Result<()> {
        let mut header = Header { raw, crc: crc32fast::Hasher::new() };
        let start: [u8; 10] = header.take()?;
        let flags = start[3];
        if start[..3] != [0x1f, 0x8b, 8] || flags & RESERVED != 0 {
            return Err(broken("invalid gzip header"));
        }
        if flags & EXTRA != 0 {
            for _ in 0..u16::from_le_bytes(header.take()?) {
                header.take::<1>()?;
            }
        }
        for field in [NAME, COMMENT] {
            if flags & field != 0 {
                header.skip_field()?;
            }
        }
        if flags & HEADER_CRC != 0 {
            let sum = header.crc.clone().finalize() as u16;
            if header.take()? != sum.to_le_bytes() {
                return Err(broken("corrupt gzip stream does not have a matching checksum"));
            }
        }
        self.inflate.reset()?;
        self.place = Place::Inside;
        Ok(())
    }
}

struct Header<'a> {
    raw: &'a mut ObjectReader,
    crc: crc32fast::Hasher,
}

impl Header<'_> {
    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let bytes = exactly(self.raw)?;
        self.crc.update(&bytes);
        Ok(bytes)
    }

    /// Skips a field that ends with a zero byte.
    fn skip_field(&mut self) -> io::Result<()> {
        for _ in 0..=LARGEST_FIELD {
            if self.take()? == [0] {
                return Ok(());
            }
        }
        Err(broken("gzip header field too long"))
    }
}

impl Decompressor {
    /// Begins at the start of the file. `raw` may have buffered bytes, but its consumer must not have read any.
    pub fn new(store: &Store, file: &InputFile, how: Compression, raw: ObjectReader) -> io::Result<Self> {
        Self::with(store, file, how, raw, None)
    }

    /// Begins at a checkpoint of the file.
    pub fn resume(store: &Store, file: &InputFile, how: Compression, from: &Checkpoint) -> io::Result<Self> {
        let raw = ObjectReader::new(store, &file.location, file.size, from.stored);
        Self::with(store, file, how, raw, Some(from))
    }

    fn with(
        store: &Store,
        file: &InputFile,
        how: Compression,
        raw: ObjectReader,
        from: Option<&Checkpoint>,
    ) -> io::Result<Self> {
        let codec = match (how, from.and_then(|from| from.inside.as_ref())) {
            (Compression::Gzip, None) => Codec::Gzip(Box::new(Member::before()?)),
            (Compression::Gzip, Some(inside)) => Codec::Gzip(Box::new(Member::inside(inside)?)),
            _ => Codec::Zstd(Frames::new()?, Place::Before),
        };
        let notes = store.checkpoints(file).map(|checkpoints| Notes {
            due: checkpoints.due(file),
            checkpoints: Arc::clone(checkpoints),
            file: file.clone(),
        });
        let offset = from.map_or(0, |from| from.decompressed);
        Ok(Self { raw, codec, buffer: vec![0; BUFFER], begin: 0, end: 0, offset, notes })
    }

    /// Decodes into the buffer until it holds some bytes; it stays empty at the end of the file.
    fn decode(&mut self) -> io::Result<()> {
        (self.begin, self.end) = (0, 0);
        while self.end == 0 {
            let Self { raw, codec, buffer, offset, notes, .. } = self;
            let place = match codec {
                Codec::Gzip(member) => &mut member.place,
                Codec::Zstd(_, place) => place,
            };
            if *place == Place::Ended {
                return Ok(());
            }
            if *place == Place::Before {
                if raw.fill_buf()?.is_empty() {
                    *place = Place::Ended;
                    return Ok(());
                }
                if matches!(codec, Codec::Gzip(_)) && raw.offset() > 0 && zeros(raw)? {
                    if let Codec::Gzip(member) = codec {
                        member.place = Place::Ended;
                    }
                    return Ok(());
                }
                if let Some(notes) = notes.as_mut().filter(|notes| *offset >= notes.due.from) {
                    notes.note(*offset, raw.offset(), || Ok(None))?;
                }
            }
            let written = match codec {
                Codec::Gzip(member) if member.place == Place::Before => member.header(raw).map(|()| 0)?,
                Codec::Gzip(member) => member.decode(raw, buffer, *offset, notes)?,
                Codec::Zstd(frames, place) => frame(frames, place, raw, buffer)?,
            };
            (self.end, self.offset) = (written, *offset + written as u64);
            #[cfg(test)]
            if let Some(notes) = &self.notes {
                notes.checkpoints.add_decompressed(written);
            }
        }
        Ok(())
    }
}

/// Whether the rest of the file consists of zeros, which tapes and block devices leave after the last member. gzip
/// skips them, too.
fn zeros(raw: &mut ObjectReader) -> io::Result<bool> {
    if raw.fill_buf()?.first() != Some(&0) {
        return Ok(false);
    }
    loop {
        let left = raw.fill_buf()?;
        if left.is_empty() {
            return Ok(true);
        }
        if left.iter().any(|byte| *byte != 0) {
            return Err(broken("zeros and then other bytes after a gzip member"));
        }
        let passed = left.len();
        raw.consume(passed);
    }
}

/// Decodes some bytes of a Zstandard frame. Returns 0 if it needs more stored bytes, or at the end of the frame.
fn frame(frames: &mut Frames<'_>, place: &mut Place, raw: &mut ObjectReader, out: &mut [u8]) -> io::Result<usize> {
    if *place == Place::Before {
        frames.reinit()?;
        *place = Place::Inside;
    }
    let input = raw.fill_buf()?;
    let step = frames.run_on_buffers(input, out)?;
    if input.is_empty() && step.bytes_written == 0 && step.remaining > 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "incomplete frame"));
    }
    raw.consume(step.bytes_read);
    if step.remaining == 0 {
        *place = Place::Before;
    }
    Ok(step.bytes_written)
}

impl BufRead for Decompressor {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.begin == self.end {
            self.decode()?;
        }
        Ok(&self.buffer[self.begin..self.end])
    }

    fn consume(&mut self, n: usize) {
        self.begin = self.end.min(self.begin + n);
    }
}

impl Read for Decompressor {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let available = self.fill_buf()?;
        let n = available.len().min(out.len());
        out[..n].copy_from_slice(&available[..n]);
        self.consume(n);
        Ok(n)
    }
}
