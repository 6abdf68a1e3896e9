//! Reads numbers from the bytes of a model, and never more than there are.

use super::FasttextError;

pub(super) struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    pub(super) fn new(bytes: &'b [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn bytes(&self) -> &'b [u8] {
        self.bytes
    }

    /// Where the next byte lies.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    fn truncated(&self, part: &'static str) -> FasttextError {
        FasttextError::Truncated { part, bytes: self.bytes.len() }
    }

    pub(super) fn take(&mut self, count: usize, part: &'static str) -> Result<&'b [u8], FasttextError> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or_else(|| self.truncated(part))?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, part: &'static str) -> Result<[u8; N], FasttextError> {
        let taken = self.bytes.get(self.at..).and_then(<[u8]>::first_chunk::<N>).copied();
        let taken = taken.ok_or_else(|| self.truncated(part))?;
        self.at += N;
        Ok(taken)
    }

    pub(super) fn byte(&mut self, part: &'static str) -> Result<u8, FasttextError> {
        self.array(part).map(|[byte]| byte)
    }

    pub(super) fn flag(&mut self, part: &'static str) -> Result<bool, FasttextError> {
        match self.byte(part)? {
            byte @ 0..=1 => Ok(byte == 1),
            byte => Err(FasttextError::Invalid { field: part, got: byte.into(), valid: "0 or 1".into() }),
        }
    }

    pub(super) fn int(&mut self, part: &'static str) -> Result<i32, FasttextError> {
        self.array(part).map(i32::from_le_bytes)
    }

    pub(super) fn long(&mut self, part: &'static str) -> Result<i64, FasttextError> {
        self.array(part).map(i64::from_le_bytes)
    }

    /// An integer that must be in a range, which includes its end.
    pub(super) fn int_in(&mut self, field: &'static str, least: i32, most: i32) -> Result<i32, FasttextError> {
        match self.int(field)? {
            value if (least..=most).contains(&value) => Ok(value),
            value => Err(FasttextError::Invalid { field, got: value.into(), valid: format!("{least} to {most}") }),
        }
    }

    /// A number of things of which each takes at least `size` bytes of the rest.
    pub(super) fn count(&mut self, field: &'static str, size: usize, is_long: bool) -> Result<usize, FasttextError> {
        let got = if is_long { self.long(field)? } else { self.int(field)?.into() };
        let most = (self.bytes.len() - self.at) / size;
        match usize::try_from(got) {
            Ok(count) if count <= most => Ok(count),
            Ok(_) => Err(self.truncated(field)),
            Err(_) => Err(FasttextError::Invalid { field, got, valid: "at least 0".into() }),
        }
    }

    pub(super) fn floats(&mut self, count: usize, part: &'static str) -> Result<Vec<f32>, FasttextError> {
        let bytes = count.checked_mul(4).ok_or_else(|| self.truncated(part))?;
        Ok(floats(self.take(bytes, part)?).collect())
    }

    /// Bytes up to a zero byte, which is skipped.
    pub(super) fn until_zero(&mut self, part: &'static str) -> Result<&'b [u8], FasttextError> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = memchr::memchr(0, rest).ok_or_else(|| self.truncated(part))?;
        self.at += length + 1;
        Ok(&rest[..length])
    }

    pub(super) fn end(&self) -> Result<(), FasttextError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            more => Err(FasttextError::Invalid {
                field: "bytes after the output matrix",
                got: more as i64,
                valid: "0".into(),
            }),
        }
    }
}

/// The numbers in little-endian bytes, wherever they lie.
pub(super) fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes.chunks_exact(4).map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]))
}
