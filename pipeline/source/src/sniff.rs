//! Detects from the first bytes of a file that it has another type than its name and the job say.
//!
//! Such a file is refused whatever `on_error` says: its records are not bad, it is the wrong kind of file.

use stillhouse_base::source_error::SourceError;
use stillhouse_schemas::spec::{Compression, Input};

use super::compression::compression;
use super::input_file::InputFile;
use super::store::Store;

/// Bytes examined at the start of a file.
pub(super) const HEAD: u64 = 64;
/// File type detected from the first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Gzip,
    Zstd,
    /// Compressed with an unsupported method.
    Packed(&'static str),
    Parquet,
    Arrow,
    /// Text, but not in UTF-8.
    Encoded(&'static str),
}

/// Returns the type that these first bytes indicate; `None` if they may be text in UTF-8.
fn kind(bytes: &[u8]) -> Option<Kind> {
    let head = &bytes[..bytes.len().min(HEAD as usize)];
    let begins: [(&[u8], Kind); 13] = [
        (b"\x1f\x8b", Kind::Gzip),
        (b"\x28\xb5\x2f\xfd", Kind::Zstd),
        (b"\xfd7zXZ\0", Kind::Packed("xz")),
        (b"7z\xbc\xaf\x27\x1c", Kind::Packed("7z")),
        (b"\x04\x22\x4d\x18", Kind::Packed("LZ4")),
        (b"PK\x03\x04", Kind::Packed("zip")),
        (b"\xff\x06\0\0sNaPpY", Kind::Packed("Snappy")),
        // "PAR1" alone could be the start of a text
        (b"PAR1\x15", Kind::Parquet),
        (b"ARROW1\0\0", Kind::Arrow),
        // before UTF-16, whose mark is a prefix of this one
        (b"\xff\xfe\0\0", Kind::Encoded("UTF-32")),
        (b"\0\0\xfe\xff", Kind::Encoded("UTF-32")),
        (b"\xff\xfe", Kind::Encoded("UTF-16")),
        (b"\xfe\xff", Kind::Encoded("UTF-16")),
    ];
    let begun = begins.iter().find(|(magic, _)| head.starts_with(magic)).map(|(_, kind)| *kind);
    let bzip2 = head.starts_with(b"BZh") && head.get(4..10) == Some(b"1AY&SY");
    begun.or(bzip2.then_some(Kind::Packed("bzip2"))).or_else(|| without_mark(head))
}

/// Detects UTF-16 without a byte order mark in plain ASCII text: every second byte is zero.
fn without_mark(head: &[u8]) -> Option<Kind> {
    let zero = |from: usize| head.len() >= 8 && head.iter().skip(from).step_by(2).all(|b| *b == 0);
    let text = |from: usize| head.iter().skip(from).step_by(2).all(|b| *b != 0);
    ((zero(1) && text(0)) || (zero(0) && text(1))).then_some(Kind::Encoded("UTF-16"))
}

fn name(how: Compression) -> &'static str {
    match how {
        Compression::Gzip => "gzip",
        Compression::Zstd => "zstd",
        Compression::Auto | Compression::None => "none",
    }
}

fn said(file: &InputFile, message: String) -> SourceError {
    SourceError::corrupt(&file.path, message)
}

/// Returns the reason not to read a file of lines or CSV that begins with these stored bytes.
pub(super) fn stored(head: &[u8], file: &InputFile, input: &Input) -> Option<SourceError> {
    let how = compression(file, input);
    let (found, wanted) = match kind(head) {
        Some(Kind::Gzip) if how == Compression::Gzip => return None,
        Some(Kind::Zstd) if how == Compression::Zstd => return None,
        Some(found) => (describe(found), how),
        None if how == Compression::None => return None,
        // a Zstandard file may begin with a skippable frame
        None if how == Compression::Zstd && head.get(1..4) == Some(b"\x2a\x4d\x18") => return None,
        None => ("these bytes are not compressed, or in a way that is not known; say `compression: none`".into(), how),
    };
    let by = if input.compression == Compression::Auto { "by its name" } else { "as `compression` says" };
    let read =
        if wanted == Compression::None { String::new() } else { format!("is read as {} {by}, but ", name(wanted)) };
    Some(said(file, format!("{read}{found}")))
}

/// Returns the reason not to read a file whose decompressed content begins with these bytes.
pub(super) fn decompressed(head: &[u8], file: &InputFile) -> Option<SourceError> {
    Some(said(file, format!("after decompression, {}", describe(kind(head)?))))
}

/// Returns what a file that is not of the expected format is instead, if its first bytes show it.
pub(super) fn other_format(store: &Store, file: &InputFile, wanted: Kind) -> Option<SourceError> {
    let head = store.get(&file.location, 0, file.size.min(HEAD)).ok()?;
    match (kind(&head), wanted) {
        (Some(found), wanted) if found == wanted => None,
        (Some(Kind::Gzip | Kind::Zstd | Kind::Packed(_)), _) => {
            let message = "these are compressed bytes; Parquet and Arrow files compress inside: decompress the file";
            Some(said(file, message.into()))
        }
        (Some(found), _) => Some(said(file, describe(found))),
        (None, _) if head.trim_ascii_start().starts_with(b"{") => {
            Some(said(file, "this begins like JSON; is it `format: jsonl`?".into()))
        }
        (None, _) => None,
    }
}

fn describe(found: Kind) -> String {
    match found {
        Kind::Gzip => "these are gzip bytes; say `compression: gzip`".into(),
        Kind::Zstd => "these are Zstandard bytes; say `compression: zstd`".into(),
        Kind::Packed(how) => format!("these are {how} bytes, which are not read here; valid: plain, gzip, Zstandard"),
        Kind::Parquet => "this is a Parquet file; say `format: parquet`".into(),
        Kind::Arrow => "this is an Arrow file; say `format: arrow`".into(),
        Kind::Encoded(how) => format!("this is text in {how}; valid: UTF-8 (`iconv -f {how} -t UTF-8` makes it)"),
    }
}
