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

use super::checkpoints::{Checkpoint, Checkpoints, DeflateState, MemberState, NextCheckpoint};
use super::inflate::{Inflate, StepEnd, WINDOW_BYTES};
use super::input_file::InputFile;
use super::store::{ObjectReader, Store};

const BUFFER_BYTES: usize = 256 << 10;
/// Maximum bytes of a name or comment in a gzip header.
const MAX_FIELD_BYTES: usize = 65_535;
// flags of a gzip header: a CRC-16, an extra field, a name, a comment, and the reserved bits
const HEADER_CRC: u8 = 2;
const EXTRA: u8 = 4;
const NAME: u8 = 8;
const COMMENT: u8 = 16;
const RESERVED: u8 = 0xe0;

/// A reader of the decompressed bytes of a file.
pub(crate) struct Decompressor {
    raw: ObjectReader,
    codec: Codec,
    buffer: Vec<u8>,
    /// The part of the buffer that the consumer has not read: `begin..end`.
    begin: usize,
    end: usize,
    /// Decompressed offset of the end of the buffer's content.
    offset: u64,
    recorder: Option<CheckpointRecorder>,
}

/// Records checkpoints of a file.
struct CheckpointRecorder {
    checkpoints: Arc<Checkpoints>,
    file: InputFile,
    next: NextCheckpoint,
}

enum Codec {
    Gzip(Box<GzipMember>),
    Zstd(Frames<'static>, MemberPosition),
}

/// Position relative to a gzip member or a Zstandard frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MemberPosition {
    /// Before a member or frame, or at the end of the file.
    Before,
    Inside,
    /// At the end of the file, after at least one member or frame.
    Ended,
}

/// The decoder of a gzip member.
struct GzipMember {
    inflate: Inflate,
    position: MemberPosition,
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

impl CheckpointRecorder {
    /// Records a checkpoint, unless another reader has recorded one in the meantime.
    fn record(
        &mut self,
        offset: u64,
        stored: u64,
        member_state: impl FnOnce() -> io::Result<Option<MemberState>>,
    ) -> io::Result<()> {
        self.next = self.checkpoints.next_wanted(&self.file);
        if offset < self.next.from {
            return Ok(());
        }
        self.checkpoints.record(&self.file, Checkpoint { decompressed: offset, stored, member_state: member_state()? });
        self.next = self.checkpoints.next_wanted(&self.file);
        Ok(())
    }
}

impl GzipMember {
    fn new() -> io::Result<Self> {
        Ok(Self {
            inflate: Inflate::new()?,
            position: MemberPosition::Before,
            crc: crc32fast::Hasher::new(),
            length: 0,
            last: 0,
        })
    }

    fn resume(state: &MemberState) -> io::Result<Self> {
        let (inflate, last) = match &state.deflate {
            DeflateState::Copy(inflate) => (inflate.copy()?, 0),
            DeflateState::BetweenBlocks { last, bits, window } => {
                (Inflate::resume(*last, *bits, &zstd::bulk::decompress(window, WINDOW_BYTES)?)?, *last)
            }
        };
        let crc = crc32fast::Hasher::new_with_initial(state.crc);
        Ok(Self { inflate, position: MemberPosition::Inside, crc, length: state.length, last })
    }

    fn checkpoint(&self, bits: Option<u8>) -> io::Result<Option<MemberState>> {
        let deflate = match bits {
            None => DeflateState::Copy(self.inflate.copy()?),
            Some(bits) => {
                let window = zstd::bulk::compress(&self.inflate.window(), 1)?.into();
                DeflateState::BetweenBlocks { last: self.last, bits, window }
            }
        };
        Ok(Some(MemberState { crc: self.crc.clone().finalize(), length: self.length, deflate }))
    }

    /// Decodes some bytes of the member. Returns 0 at its end or between two blocks.
    fn decode(
        &mut self,
        raw: &mut ObjectReader,
        out: &mut [u8],
        offset: u64,
        recorder: &mut Option<CheckpointRecorder>,
    ) -> io::Result<usize> {
        let input = raw.fill_buf()?;
        let stop = recorder.as_ref().is_some_and(|recorder| offset >= recorder.next.from);
        let step = self.inflate.step(input, out, stop)?;
        if let Some(last) = step.read.checked_sub(1).and_then(|i| input.get(i)) {
            self.last = *last;
        } else if step.written == 0 && step.at == StepEnd::Anywhere {
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
        match (step.at, recorder) {
            (StepEnd::End, _) => self.trailer(raw)?,
            (StepEnd::BetweenBlocks { bits }, Some(recorder)) if stop => {
                recorder.record(now, raw.offset(), || self.checkpoint(Some(bits)))?;
            }
            (_, Some(recorder)) if now >= recorder.next.inside_block_from => {
                recorder.record(now, raw.offset(), || self.checkpoint(None))?;
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
        (self.position, self.length) = (MemberPosition::Before, 0);
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
        self.position = MemberPosition::Inside;
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
        for _ in 0..=MAX_FIELD_BYTES {
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
        let codec = match (how, from.and_then(|from| from.member_state.as_ref())) {
            (Compression::Gzip, None) => Codec::Gzip(Box::new(GzipMember::new()?)),
            (Compression::Gzip, Some(state)) => Codec::Gzip(Box::new(GzipMember::resume(state)?)),
            _ => Codec::Zstd(Frames::new()?, MemberPosition::Before),
        };
        let recorder = store.checkpoints(file).map(|checkpoints| CheckpointRecorder {
            next: checkpoints.next_wanted(file),
            checkpoints: Arc::clone(checkpoints),
            file: file.clone(),
        });
        let offset = from.map_or(0, |from| from.decompressed);
        Ok(Self { raw, codec, buffer: vec![0; BUFFER_BYTES], begin: 0, end: 0, offset, recorder })
    }

    /// Decodes into the buffer until it holds some bytes; it stays empty at the end of the file.
    fn decode(&mut self) -> io::Result<()> {
        (self.begin, self.end) = (0, 0);
        while self.end == 0 {
            let Self { raw, codec, buffer, offset, recorder, .. } = self;
            let position = match codec {
                Codec::Gzip(member) => &mut member.position,
                Codec::Zstd(_, position) => position,
            };
            if *position == MemberPosition::Ended {
                return Ok(());
            }
            if *position == MemberPosition::Before {
                if raw.fill_buf()?.is_empty() {
                    *position = MemberPosition::Ended;
                    return Ok(());
                }
                if matches!(codec, Codec::Gzip(_)) && raw.offset() > 0 && has_only_zeros_left(raw)? {
                    if let Codec::Gzip(member) = codec {
                        member.position = MemberPosition::Ended;
                    }
                    return Ok(());
                }
                if let Some(recorder) = recorder.as_mut().filter(|recorder| *offset >= recorder.next.from) {
                    recorder.record(*offset, raw.offset(), || Ok(None))?;
                }
            }
            let written = match codec {
                Codec::Gzip(member) if member.position == MemberPosition::Before => member.header(raw).map(|()| 0)?,
                Codec::Gzip(member) => member.decode(raw, buffer, *offset, recorder)?,
                Codec::Zstd(frames, position) => decode_frame(frames, position, raw, buffer)?,
            };
            (self.end, self.offset) = (written, *offset + written as u64);
            #[cfg(test)]
            if let Some(recorder) = &self.recorder {
                recorder.checkpoints.add_decompressed(written);
            }
        }
        Ok(())
    }
}

/// Whether the rest of the file consists of zeros, which tapes and block devices leave after the last member. gzip
/// skips them, too.
fn has_only_zeros_left(raw: &mut ObjectReader) -> io::Result<bool> {
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
fn decode_frame(
    frames: &mut Frames<'_>,
    position: &mut MemberPosition,
    raw: &mut ObjectReader,
    out: &mut [u8],
) -> io::Result<usize> {
    if *position == MemberPosition::Before {
        frames.reinit()?;
        *position = MemberPosition::Inside;
    }
    let input = raw.fill_buf()?;
    let step = frames.run_on_buffers(input, out)?;
    if input.is_empty() && step.bytes_written == 0 && step.remaining > 0 {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "incomplete frame"));
    }
    raw.consume(step.bytes_read);
    if step.remaining == 0 {
        *position = MemberPosition::Before;
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
