//! Detects from the first bytes of a file that it has another type than its name and the job say.
//!
//! Such a file is refused whatever `on_error` says: its records are not bad, it is the wrong kind of file.

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::spec::{Compression, Input};

use super::compression::compression;
use super::input_file::InputFile;
use super::store::Store;

/// Bytes examined at the start of a file.
pub const HEAD_BYTES: u64 = 64;

/// File type detected from the first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileType {
    /// Compressed with gzip.
    Gzip,
    /// Compressed with Zstandard.
    Zstd,
    /// Compressed with an unsupported method.
    UnsupportedCompression(&'static str),
    /// Parquet.
    Parquet,
    /// Arrow IPC.
    Arrow,
    /// Text, but not in UTF-8.
    OtherEncoding(&'static str),
}

/// Returns the type that these first bytes indicate; `None` if they may be text in UTF-8.
fn detect(bytes: &[u8]) -> Option<FileType> {
    let head = &bytes[..bytes.len().min(HEAD_BYTES as usize)];
    let begins: [(&[u8], FileType); 13] = [
        (b"\x1f\x8b", FileType::Gzip),
        (b"\x28\xb5\x2f\xfd", FileType::Zstd),
        (b"\xfd7zXZ\0", FileType::UnsupportedCompression("xz")),
        (b"7z\xbc\xaf\x27\x1c", FileType::UnsupportedCompression("7z")),
        (b"\x04\x22\x4d\x18", FileType::UnsupportedCompression("LZ4")),
        (b"PK\x03\x04", FileType::UnsupportedCompression("zip")),
        (b"\xff\x06\0\0sNaPpY", FileType::UnsupportedCompression("Snappy")),
        // "PAR1" alone could be the start of a text
        (b"PAR1\x15", FileType::Parquet),
        (b"ARROW1\0\0", FileType::Arrow),
        // before UTF-16, whose mark is a prefix of this one
        (b"\xff\xfe\0\0", FileType::OtherEncoding("UTF-32")),
        (b"\0\0\xfe\xff", FileType::OtherEncoding("UTF-32")),
        (b"\xff\xfe", FileType::OtherEncoding("UTF-16")),
        (b"\xfe\xff", FileType::OtherEncoding("UTF-16")),
    ];
    let begun = begins.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, kind)| *kind);
    let bzip2 = head.starts_with(b"BZh") && head.get(4..10) == Some(b"1AY&SY");
    begun.or(bzip2.then_some(FileType::UnsupportedCompression("bzip2"))).or_else(|| utf16_without_mark(head))
}

/// Detects UTF-16 without a byte order mark in plain ASCII text: every second byte is zero.
fn utf16_without_mark(head: &[u8]) -> Option<FileType> {
    let zero = |from: usize| head.len() >= 8 && head.iter().skip(from).step_by(2).all(|b| *b == 0);
    let text = |from: usize| head.iter().skip(from).step_by(2).all(|b| *b != 0);
    ((zero(1) && text(0)) || (zero(0) && text(1))).then_some(FileType::OtherEncoding("UTF-16"))
}

fn name(how: Compression) -> &'static str {
    match how {
        Compression::Gzip => "gzip",
        Compression::Zstd => "zstd",
        Compression::Auto | Compression::None => "none",
    }
}

fn wrong_type(file: &InputFile, message: String) -> SourceError {
    SourceError::corrupt(&file.path, message)
}

/// Returns the reason not to read a file of lines or CSV that begins with these stored bytes.
pub fn check_stored(head: &[u8], file: &InputFile, input: &Input) -> Option<SourceError> {
    let how = compression(file, input);
    let (found, wanted) = match detect(head) {
        Some(FileType::Gzip) if how == Compression::Gzip => return None,
        Some(FileType::Zstd) if how == Compression::Zstd => return None,
        Some(found) => (describe(found), how),
        None if how == Compression::None => return None,
        // a Zstandard file may begin with a skippable frame
        None if how == Compression::Zstd && head.get(1..4) == Some(b"\x2a\x4d\x18") => return None,
        None => ("these bytes are not compressed, or in a way that is not known; say `compression: none`".into(), how),
    };
    let by = if input.compression == Compression::Auto { "by its name" } else { "as `compression` says" };
    let read =
        if wanted == Compression::None { String::new() } else { format!("is read as {} {by}, but ", name(wanted)) };
    Some(wrong_type(file, format!("{read}{found}")))
}

/// Returns the reason not to read a file whose decompressed content begins with these bytes.
pub fn check_decompressed(head: &[u8], file: &InputFile) -> Option<SourceError> {
    Some(wrong_type(file, format!("after decompression, {}", describe(detect(head)?))))
}

/// Returns what a file that is not of the expected format is instead, if its first bytes show it.
pub fn other_format(store: &Store, file: &InputFile, wanted: FileType) -> Option<SourceError> {
    let head = store.get(&file.location, 0, file.size.min(HEAD_BYTES)).ok()?;
    match (detect(&head), wanted) {
        (Some(found), wanted) if found == wanted => None,
        (Some(FileType::Gzip | FileType::Zstd | FileType::UnsupportedCompression(_)), _) => {
            let message = "these are compressed bytes; Parquet and Arrow files compress inside: decompress the file";
            Some(wrong_type(file, message.into()))
        }
        (Some(found), _) => Some(wrong_type(file, describe(found))),
        (None, _) if head.trim_ascii_start().starts_with(b"{") => {
            Some(wrong_type(file, "this begins like JSON; is it `format: jsonl`?".into()))
        }
        (None, _) => None,
    }
}

fn describe(found: FileType) -> String {
    match found {
        FileType::Gzip => "these are gzip bytes; say `compression: gzip`".into(),
        FileType::Zstd => "these are Zstandard bytes; say `compression: zstd`".into(),
        FileType::UnsupportedCompression(how) => {
            format!("these are {how} bytes, which are not read here; valid: plain, gzip, Zstandard")
        }
        FileType::Parquet => "this is a Parquet file; say `format: parquet`".into(),
        FileType::Arrow => "this is an Arrow file; say `format: arrow`".into(),
        FileType::OtherEncoding(how) => {
            format!("this is text in {how}; valid: UTF-8 (`iconv -f {how} -t UTF-8` makes it)")
        }
    }
}
