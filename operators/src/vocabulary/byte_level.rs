//! The alphabet of byte-level BPE (GPT-2), with one printable character per byte, and the display of tokens as text.

use std::fmt::Write as _;

/// Returns the byte that a character of a byte-level token encodes.
///
/// Printable bytes of Latin-1 encode themselves; the 68 others are the characters from U+0100 on, in order.
fn decode_char(c: char) -> Option<u8> {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(c) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(|&b| printable(b)),
        code => {
            let nth = usize::try_from(code.checked_sub(0x100)?).ok()?;
            (0..=255u8).filter(|&b| !printable(b)).nth(nth)
        }
    }
}

/// Returns the bytes of a byte-level token; `None` if a character encodes no byte.
pub(super) fn decode_token(token: &str) -> Option<Vec<u8>> {
    token.chars().map(decode_char).collect()
}

/// Formats bytes as one line of text: control characters and bytes of invalid UTF-8 are escaped.
pub(super) fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() { text.extend(c.escape_default()) } else { text.push(c) }
        }
        for b in chunk.invalid() {
            // Writing to a String never fails.
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
        assert_eq!(decode_token("ĠHello").unwrap(), b" Hello");
        assert_eq!(decode_token("Ċ").unwrap(), b"\n");
        assert_eq!(decode_token("Ń"), Some(vec![0xad]));
        assert_eq!(decode_token("漢"), None);
        assert_eq!(escape(b"a\n\xe2\x80"), "a\\n\\xe2\\x80");
    }
}
