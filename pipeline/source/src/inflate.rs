//! Deflate with stops: zlib's own calls, which tell where a block ends, begin between two blocks, and copy a stream wherever it is.
//!
//! A block may end in the middle of a byte. What it takes to begin after one is the window (up to 32 KB of text before it), the
//! bits of that byte which are left, and the byte where the stored bytes go on.

use std::{fmt, io};

use libz_rs_sys::{
    Z_BLOCK, Z_BUF_ERROR, Z_NO_FLUSH, Z_OK, Z_STREAM_END, inflate, inflateCopy, inflateEnd, inflateGetDictionary,
    inflateInit2_, inflatePrime, inflateReset, inflateSetDictionary, z_stream, zlibVersion,
};

/// Bytes that a block may refer back to.
pub(super) const WINDOW: usize = 32 << 10;

/// Deflate without a header, in zlib's words.
const RAW: i32 = -15;
// of `data_type`: between two blocks; in or after the last block; the bits taken from the input and not used
const BETWEEN: i32 = 128;
const LAST: i32 = 64;
const BITS: i32 = 63;

/// Memory of a stream: its window and its tables.
pub(super) const STREAM: usize = 48 << 10;

/// A deflate stream that is being read.
pub(super) struct Inflate(Box<z_stream>);

// SAFETY: zlib's state belongs to this stream alone (nothing shares it, and no thread keeps anything of it), its allocator is the one of
// the process, and `next_in` and `next_out` are not looked at but in `step`, which sets them first.
unsafe impl Send for Inflate {}
// SAFETY: what takes `&self` only reads zlib's state.
unsafe impl Sync for Inflate {}

/// How far a step came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    /// Bytes taken from the input.
    pub read: usize,
    /// Bytes put into the output.
    pub written: usize,
    pub at: At,
}

/// Where a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum At {
    /// Where the input or the output has ended.
    Anywhere,
    /// Between two blocks.
    Between {
        /// Bits of the last byte taken that belong to the next block: fewer than 8.
        bits: u8,
    },
    /// At the end of the stream.
    End,
}

fn refused() -> io::Error {
    io::Error::other("the decompressor could not begin: no memory")
}

impl Inflate {
    pub fn new() -> io::Result<Self> {
        let mut stream = Box::new(z_stream::default());
        let size = size_of::<z_stream>() as i32;
        // SAFETY: the stream is exclusively ours and stays where it is (boxed), with the allocator that its default brings; the version is zlib's.
        let outcome = unsafe { inflateInit2_(&mut *stream, RAW, zlibVersion(), size) };
        if outcome != Z_OK {
            return Err(refused());
        }
        Ok(Self(stream))
    }

    /// Goes to the start of another stream.
    pub fn reset(&mut self) -> io::Result<()> {
        // SAFETY: `new` has initialized the stream.
        match unsafe { inflateReset(&mut *self.0) } {
            Z_OK => Ok(()),
            _ => Err(refused()),
        }
    }

    /// Begins between two blocks of a stream: with the bits that are left of the byte before the input, and the text before.
    pub fn resume(last: u8, bits: u8, window: &[u8]) -> io::Result<Self> {
        let mut inflate = Self::new()?;
        if bits > 0 {
            // SAFETY: `new` has initialized the stream, and nothing was read from it.
            let outcome = unsafe { inflatePrime(&mut *inflate.0, bits.into(), i32::from(last) >> (8 - bits.min(8))) };
            if outcome != Z_OK {
                return Err(refused());
            }
        }
        // SAFETY: the stream is initialized; zlib copies so many bytes out of the slice.
        let outcome = unsafe { inflateSetDictionary(&mut *inflate.0, window.as_ptr(), window.len() as u32) };
        if outcome != Z_OK {
            return Err(refused());
        }
        Ok(inflate)
    }

    /// A stream that goes on where this one is.
    pub fn copy(&self) -> io::Result<Self> {
        let mut stream = Box::new(z_stream::default());
        // SAFETY: the source is initialized, and zlib only reads it; the destination is ours, is no stream yet, and stays where it is (boxed).
        match unsafe { inflateCopy(&mut *stream, &*self.0) } {
            Z_OK => Ok(Self(stream)),
            _ => Err(refused()),
        }
    }

    /// Reads on; with `stop` no further than to the end of the present block.
    pub fn step(&mut self, input: &[u8], output: &mut [u8], stop: bool) -> io::Result<Step> {
        let (most_in, most_out) = (fitting(input.len()), fitting(output.len()));
        let stream = &mut *self.0;
        (stream.next_in, stream.avail_in) = (input.as_ptr(), most_in);
        (stream.next_out, stream.avail_out) = (output.as_mut_ptr(), most_out);
        // SAFETY: `new` has initialized the stream; `next_in` and `next_out` have `avail_in` readable and `avail_out` writable bytes,
        // in slices that are borrowed for the call.
        let outcome = unsafe { inflate(stream, if stop { Z_BLOCK } else { Z_NO_FLUSH }) };
        let (read, written) = ((most_in - stream.avail_in) as usize, (most_out - stream.avail_out) as usize);
        let at = match outcome {
            Z_STREAM_END => At::End,
            Z_OK | Z_BUF_ERROR => match (stream.data_type & (BETWEEN | LAST), stream.data_type & BITS) {
                (BETWEEN, bits @ 0..8) => At::Between { bits: bits as u8 },
                _ => At::Anywhere,
            },
            _ => return Err(io::Error::new(io::ErrorKind::InvalidInput, "corrupt deflate stream")),
        };
        Ok(Step { read, written, at })
    }

    /// The last bytes that were written, as many as later blocks may refer to.
    pub fn window(&self) -> Vec<u8> {
        let (mut window, mut length) = (vec![0; WINDOW], 0);
        // SAFETY: the stream is initialized, and a window of deflate, which is what zlib writes, has no more bytes than this.
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
        // SAFETY: `new` has initialized the stream, and it is ended once.
        unsafe { inflateEnd(&mut *self.0) };
    }
}

fn fitting(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
