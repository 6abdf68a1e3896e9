//! Unicode normal form C (NFC), which most texts already have.
//!
//! A character is plain if NFC leaves it unchanged, it is not a combining character, and it composes with no preceding
//! character. A text of plain characters is its own normal form. Any other text is normalized with the tables that
//! `tokenizers` uses.

use std::sync::LazyLock;

use unicode_normalization_alignments::char::canonical_combining_class;
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use crate::table::{CodePointTable, decode_utf8};

/// First UTF-8 byte of U+0300. All characters below are plain.
const COMBINING: u8 = 0xcc;

static PLAIN: LazyLock<CodePointTable> = LazyLock::new(|| CodePointTable::from_fn(|c| u8::from(is_plain(c))));

fn is_plain(c: char) -> bool {
    canonical_combining_class(c) == 0 && matches!(is_nfc_quick(std::iter::once(c)), IsNormalized::Yes)
}

/// NFC, or the identity.
#[derive(Debug)]
pub(crate) struct Normalizer {
    plain: Option<&'static CodePointTable>,
}

impl Normalizer {
    pub(crate) fn identity() -> Self {
        Self { plain: None }
    }

    pub(crate) fn nfc() -> Self {
        Self { plain: Some(&PLAIN) }
    }

    pub(crate) fn is_identity(&self) -> bool {
        self.plain.is_none()
    }

    /// Whether the text is certainly unchanged by normalization.
    pub(crate) fn leaves_unchanged(&self, text: &str) -> bool {
        let Some(plain) = self.plain else { return true };
        let text = text.as_bytes();
        let Some(mut at) = text.iter().position(|&byte| byte >= COMBINING) else { return true };
        while at < text.len() {
            let (code, length) = decode_utf8(text, at);
            if code >= 0x300 && plain.get(code) == 0 {
                return false;
            }
            at += length;
        }
        true
    }

    /// Writes the normal form of a text to `normal`.
    pub(crate) fn normalize_into(&self, text: &str, normal: &mut String) {
        normal.clear();
        match self.plain {
            Some(_) => normal.extend(text.nfc().map(|(c, _)| c)),
            None => normal.push_str(text),
        }
    }

    /// Returns the normal form of a text.
    pub(crate) fn normalize(&self, text: &str) -> String {
        let mut normal = String::new();
        self.normalize_into(text, &mut normal);
        normal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// NFC changes no plain character and none below U+0300, and none composes with a preceding one: a character that
    /// composes is part of some decomposition, but not its first character.
    #[test]
    fn plain_characters_are_left_alone() {
        let nfc = Normalizer::nfc();
        let mut plain = 0;
        for c in '\0'..=char::MAX {
            let text = c.to_string();
            let unchanged = nfc.leaves_unchanged(&text);
            assert!(!unchanged || nfc.normalize(&text) == text && canonical_combining_class(c) == 0, "{c:?}");
            plain += usize::from(unchanged);
            let parts: Vec<char> = std::iter::once(c).nfd().map(|(c, _)| c).collect();
            for part in parts.iter().skip(1) {
                assert!(
                    parts.len() == 1 || !nfc.leaves_unchanged(&part.to_string()) || nfc.normalize(&text) != text,
                    "{c:?}: {part:?}"
                );
            }
        }
        assert!(plain > 1_000_000 && plain < 1_112_064, "{plain}");
        assert!(
            nfc.leaves_unchanged("né 漢字 한국어 я")
                && !nfc.leaves_unchanged("ne\u{301}")
                && !nfc.leaves_unchanged("\u{1100}\u{1161}")
                && !nfc.leaves_unchanged("\u{2126}")
        );
        assert!(Normalizer::identity().leaves_unchanged("ne\u{301}"));
    }
}
