//! Checks of a GGUF file's header before anything is computed from it, because files are untrusted input.
//!
//! candle's reader checks lengths and counts. This module checks what that reader cannot handle.

use std::io::{self, Read};

use candle_core::quantized::gguf_file::{Content, Value};

use crate::error::{ENDS_EARLY, message_of};

const HEADER_CUT: &str = "it ends in the middle of its header";
/// The magic bytes of a GGUF file.
const MAGIC: [u8; 4] = *b"GGUF";
/// Maximum nesting depth of arrays.
const MAX_ARRAY_DEPTH: u32 = 8;
/// Numbers of value types in the format.
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const ALIGNMENT: &str = "general.alignment";

/// Describes a problem in the file's header that candle cannot handle: wrong magic, an unknown version, a truncated
/// header, or an invalid alignment.
pub(crate) fn find_problem(file: impl Read) -> Option<String> {
    let mut header = Header { file, wide: true };
    let magic = header.bytes::<4>();
    if !matches!(&magic, Ok(magic) if *magic == MAGIC) {
        return Some(match magic {
            Ok(got) => format!("it begins with {:?}, not with \"GGUF\"", String::from_utf8_lossy(&got)),
            Err(_) => "it is shorter than four bytes".into(),
        });
    }
    match header.number() {
        Ok(version @ 1..=3) => header.wide = version > 1,
        Ok(version) => return Some(format!("it has GGUF version {version}; valid: 1, 2, 3")),
        Err(_) => return Some(HEADER_CUT.into()),
    }
    // candle reports all other problems.
    match header.read_alignment() {
        Ok(Some(n)) if n == 0 || n > 1 << 20 => Some(format!("{ALIGNMENT} is {n}; valid: 1 to {}", 1 << 20)),
        _ => None,
    }
}

struct Header<R> {
    file: R,
    /// Whether lengths take 8 bytes; they take 4 in version 1.
    wide: bool,
}

impl<R: Read> Header<R> {
    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.file.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&mut self) -> io::Result<u32> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn length(&mut self) -> io::Result<u64> {
        if self.wide { Ok(u64::from_le_bytes(self.bytes()?)) } else { self.number().map(u64::from) }
    }

    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        match io::copy(&mut self.file.by_ref().take(bytes), &mut io::sink())? {
            n if n == bytes => Ok(()),
            _ => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn read_alignment(&mut self) -> io::Result<Option<u64>> {
        let _tensors = self.length()?;
        for _ in 0..self.length()? {
            let length = self.length()?;
            let is_alignment = length == ALIGNMENT.len() as u64;
            let mut key = [0; ALIGNMENT.len()];
            if is_alignment {
                self.file.read_exact(&mut key)?;
            } else {
                self.skip(length)?;
            }
            let kind = self.number()?;
            if is_alignment && key == *ALIGNMENT.as_bytes() {
                return Ok(match kind {
                    0 | 1 => Some(u64::from(self.bytes::<1>()?[0])),
                    2 | 3 => Some(u64::from(u16::from_le_bytes(self.bytes()?))),
                    4 | 5 => Some(u64::from(self.number()?)),
                    _ => None,
                });
            }
            self.skip_value(kind, 0)?;
        }
        Ok(None)
    }

    fn skip_value(&mut self, kind: u32, depth: u32) -> io::Result<()> {
        match (size(kind), kind) {
            (Some(size), _) => self.skip(size),
            (None, STRING) => {
                let length = self.length()?;
                self.skip(length)
            }
            (None, ARRAY) if depth < MAX_ARRAY_DEPTH => {
                let (kind, items) = (self.number()?, self.length()?);
                match size(kind) {
                    Some(size) => self.skip(items.saturating_mul(size)),
                    None => (0..items).try_for_each(|_| self.skip_value(kind, depth + 1)),
                }
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// Returns the bytes of a fixed-size value.
fn size(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// Describes a tensor whose shape no file can hold. Later code computes sizes from shapes without checks.
pub(crate) fn find_shape_problem(content: &Content) -> Option<String> {
    const MAX_NUMBERS: u64 = 1 << 48;
    let numbers = |dims: &[usize]| {
        let product = dims.iter().try_fold(1_u64, |n, d| n.checked_mul(u64::try_from(*d).ok()?));
        product.filter(|n| *n <= MAX_NUMBERS)
    };
    let wrong = content.tensor_infos.iter().filter(|(_, info)| numbers(info.shape.dims()).is_none());
    let (name, info) = wrong.min_by(|a, b| a.0.cmp(b.0))?;
    Some(format!("tensor `{name}` has the shape {:?}; valid: at most {MAX_NUMBERS} numbers", info.shape.dims()))
}

/// Returns candle's message about a header in readable form.
pub(crate) fn describe(error: &candle_core::Error) -> String {
    let text = message_of(error);
    match text.as_str() {
        ENDS_EARLY => HEADER_CUT.into(),
        _ => text.strip_prefix("gguf: ").unwrap_or(&text).to_owned(),
    }
}

/// Formats a metadata value for a message.
pub(crate) fn format_value(value: &Value) -> String {
    match value {
        Value::U8(n) => n.to_string(),
        Value::I8(n) => n.to_string(),
        Value::U16(n) => n.to_string(),
        Value::I16(n) => n.to_string(),
        Value::U32(n) => n.to_string(),
        Value::I32(n) => n.to_string(),
        Value::U64(n) => n.to_string(),
        Value::I64(n) => n.to_string(),
        Value::F32(x) => x.to_string(),
        Value::F64(x) => x.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::String(text) if text.chars().count() > 100 => {
            format!("{:?}…", text.chars().take(100).collect::<String>())
        }
        Value::String(text) => format!("{text:?}"),
        Value::Array(items) => format!("an array of {}", items.len()),
    }
}
