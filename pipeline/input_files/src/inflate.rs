//! Deflate with stops. It calls zlib's functions that report the end of a block, begin between two blocks, and copy a
//! stream in any state.
//!
//! A block may end inside a byte. To begin after a block, zlib needs the window (up to 32 KB of preceding text), the
//! remaining bits of that byte, and the byte at which the stored bytes continue.

use std::{fmt, io};

use libz_rs_sys::{
    Z_BLOCK, Z_BUF_ERROR, Z_NO_FLUSH, Z_OK, Z_STREAM_END, inflate, inflateCopy, inflateEnd, inflateGetDictionary,
    inflateInit2_, inflatePrime, inflateReset, inflateSetDictionary, z_stream, zlibVersion,
};

/// Bytes that a block may refer back to.
pub(crate) const WINDOW_BYTES: usize = 32 << 10;

/// `windowBits` of zlib: deflate without a header, with a window of 2^15 bytes.
const RAW_WINDOW_BITS: i32 = -15;
// bits of `data_type`: between two blocks; in or after the last block; number of unused bits of the last byte taken
const BETWEEN_BLOCKS: i32 = 128;
const IN_LAST_BLOCK: i32 = 64;
const UNUSED_BITS: i32 = 63;

/// Bytes of memory of a stream: its window and its tables.
pub(crate) const STREAM_BYTES: usize = 48 << 10;

/// A deflate stream that is being decompressed.
pub(crate) struct Inflate(Box<z_stream>);

// SAFETY: zlib's state belongs to this stream alone (no other object shares it, and no thread keeps a part of it). Its
// allocator is that of the process. Only `step` reads `next_in` and `next_out`, after it has set them.
unsafe impl Send for Inflate {}
// SAFETY: the methods that take `&self` only read zlib's state.
unsafe impl Sync for Inflate {}

/// Progress of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    /// Bytes taken from the input.
    pub read: usize,
    /// Bytes put into the output.
    pub written: usize,
    pub at: StepEnd,
}

/// Where a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepEnd {
    /// Where the input or the output ended.
    Anywhere,
    /// Between two blocks.
    BetweenBlocks {
        /// Number of bits of the last byte taken that belong to the next block: fewer than 8.
        bits: u8,
    },
    /// At the end of the stream.
    End,
}

fn init_error() -> io::Error {
    io::Error::other("the decompressor could not begin: no memory")
}

impl Inflate {
    pub fn new() -> io::Result<Self> {
        let mut stream = Box::new(z_stream::default());
        let size = size_of::<z_stream>() as i32;
        // SAFETY: we own the stream exclusively; it does not move (boxed) and has the allocator of its default value;
        // the version is zlib's.
        let outcome = unsafe { inflateInit2_(&mut *stream, RAW_WINDOW_BITS, zlibVersion(), size) };
        if outcome != Z_OK {
            return Err(init_error());
        }
        Ok(Self(stream))
    }

    /// Starts another stream.
    pub fn reset(&mut self) -> io::Result<()> {
        // SAFETY: `new` has initialized the stream.
        match unsafe { inflateReset(&mut *self.0) } {
            Z_OK => Ok(()),
            _ => Err(init_error()),
        }
    }

    /// Begins between two blocks of a stream, with the unused bits of the byte before the input and the preceding text.
    pub fn resume(last: u8, bits: u8, window: &[u8]) -> io::Result<Self> {
        let mut inflate = Self::new()?;
        if bits > 0 {
            // SAFETY: `new` has initialized the stream, and nothing was read from it.
            let outcome = unsafe { inflatePrime(&mut *inflate.0, bits.into(), i32::from(last) >> (8 - bits.min(8))) };
            if outcome != Z_OK {
                return Err(init_error());
            }
        }
        // SAFETY: the stream is initialized; zlib copies `window.len()` bytes out of the slice.
        let outcome = unsafe { inflateSetDictionary(&mut *inflate.0, window.as_ptr(), window.len() as u32) };
        if outcome != Z_OK {
            return Err(init_error());
        }
        Ok(inflate)
    }

    /// Copies a stream with its state.
    pub fn copy(&self) -> io::Result<Self> {
        let mut stream = Box::new(z_stream::default());
        // SAFETY: the source is initialized, and zlib only reads it; we own the destination, which is not a stream yet
        // and does not move (boxed).
        match unsafe { inflateCopy(&mut *stream, &*self.0) } {
            Z_OK => Ok(Self(stream)),
            _ => Err(init_error()),
        }
    }

    /// Decompresses some bytes; with `stop`, at most up to the end of the current block.
    pub fn step(&mut self, input: &[u8], output: &mut [u8], stop: bool) -> io::Result<Step> {
        let (input_bytes, output_bytes) = (saturating_u32(input.len()), saturating_u32(output.len()));
        let stream = &mut *self.0;
        (stream.next_in, stream.avail_in) = (input.as_ptr(), input_bytes);
        (stream.next_out, stream.avail_out) = (output.as_mut_ptr(), output_bytes);
        // SAFETY: `new` has initialized the stream; `next_in` and `next_out` have `avail_in` readable and `avail_out`
        // writable bytes, in slices that are borrowed for the call.
        let outcome = unsafe { inflate(stream, if stop { Z_BLOCK } else { Z_NO_FLUSH }) };
        let (read, written) = ((input_bytes - stream.avail_in) as usize, (output_bytes - stream.avail_out) as usize);
        let at = match outcome {
            Z_STREAM_END => StepEnd::End,
            Z_OK | Z_BUF_ERROR => {
                match (stream.data_type & (BETWEEN_BLOCKS | IN_LAST_BLOCK), stream.data_type & UNUSED_BITS) {
                    (BETWEEN_BLOCKS, bits @ 0..8) => StepEnd::BetweenBlocks { bits: bits as u8 },
                    _ => StepEnd::Anywhere,
                }
            }
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "corrupt deflate stream")),
        };
        Ok(Step { read, written, at })
    }

    /// Returns the last bytes written, as many as later blocks may refer to.
    pub fn window(&self) -> Vec<u8> {
        let (mut window, mut length) = (vec![0; WINDOW_BYTES], 0);
        // SAFETY: the stream is initialized, and a deflate window, which zlib writes, has at most this many bytes.
        let outcome = unsafe { inflateGetDictionary(&*self.0, window.as_mut_ptr(), &mut length) };
        window.truncate(if outcome == Z_OK { length as usize } else { 0 });
        window
    }
}

impl fmt::Debug for Inflate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Inflate")
    }
}

impl Drop for Inflate {
    fn drop(&mut self) {
        // SAFETY: `new` has initialized the stream, and it is ended only once.
        unsafe { inflateEnd(&mut *self.0) };
    }
}

fn saturating_u32(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
