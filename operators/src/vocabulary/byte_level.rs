//! The alphabet of byte-level BPE (GPT-2): one printable character for each byte, and tokens shown as text.

use std::fmt::Write as _;

/// The byte that a character of a byte-level token stands for.
///
/// Printable bytes of Latin-1 stand for themselves; the 68 others follow from U+0100 on, in order.
fn byte(c: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(|&b| printable(b)),
        code => {
            let nth = usize::try_from(code.checked_sub(0x100)?).ok()?;
            (0..=255u8).filter(|&b| !printable(b)).nth(nth)
        }
    }
}

/// The bytes of a byte-level token; `None` where it has a character of no byte.
pub(super) fn bytes(token: &str) -> Option<Vec<u8>> {
    token.chars().map(byte).collect()
}

/// Bytes as text on one line: control characters and stray bytes are escaped.
pub(super) fn shown(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() { text.extend(c.escape_default()) } else { text.push(c) }
        }
        for b in chunk.invalid() {
            // Writing to a String does not fail.
            let _ = write!(text, "\\x{b:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_of_gpt2() {
        assert_eq!(bytes("ĠHello").unwrap(), b" Hello");
        assert_eq!(bytes("Ċ").unwrap(), b"\n");
        assert_eq!(bytes("Ń"), Some(vec![0xad]));
        assert_eq!(bytes("漢"), None);
        assert_eq!(shown(b"a\n\xe2\x80"), "a\\n\\xe2\\x80");
    }
}
