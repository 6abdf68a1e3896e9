//! BERT's normalizer, word splitting and WordPiece.
//!
//! ```text
//!  character ──normalizer──► nothing │ white space │ a one-character word │ characters of a word │ anything else
//!              class         REMOVED │    SPACE    │        SINGLE        │         WORD         │  UNSUPPORTED
//!  text:  Café-au-lait  ──► Café │ - │ au │ - │ lait  ──► (cache) ──► caf ##e, …
//! ```
//!
//! `BertNormalizer` maps each character on its own, with one exception: the decomposition that strips accents also
//! sorts combining characters. The normalizer then removes nearly all of them, and the sort leaves all other characters
//! in place. A character that leaves a combining character is UNSUPPORTED, and so is one that becomes several words. A
//! text with an UNSUPPORTED character needs `tokenizers`. In any other text, words are runs of WORD and REMOVED, which
//! a table decides, and the ids of a word depend only on its own characters.

use std::collections::HashMap;

use tokenizers::normalizers::BertNormalizer;
use unicode_categories::UnicodeCategories;
use unicode_normalization_alignments::UnicodeNormalization;
use unicode_normalization_alignments::char::canonical_combining_class;

use crate::NeedsFallback;
use crate::table::{CodePointTable, decode_utf8};

const UNSUPPORTED: u8 = 0;
const WORD: u8 = 1;
const REMOVED: u8 = 2;
const SPACE: u8 = 4;
const SINGLE: u8 = 8;

/// A WordPiece model with BERT's normalizer.
#[derive(Debug)]
pub(crate) struct Bert {
    normalizer: BertNormalizer,
    table: CodePointTable,
    ascii: [u8; 128],
    pieces: WordPiece,
}

impl Bert {
    pub(crate) fn new(normalizer: BertNormalizer, pieces: WordPiece) -> Self {
        let mut text = String::new();
        let table = CodePointTable::from_fn(|c| class(&normalizer, c, &mut text));
        Self { normalizer, ascii: std::array::from_fn(|i| table.get(i as u32)), table, pieces }
    }

    #[inline]
    fn class(&self, text: &[u8], at: usize) -> (u8, usize) {
        let byte = text[at];
        if byte < 128 {
            return (self.ascii[usize::from(byte)], 1);
        }
        let (code, length) = decode_utf8(text, at);
        (self.table.get(code), length)
    }

    /// Calls `word` with the start and the end of each word in the original text.
    #[inline]
    pub(crate) fn for_each_word(&self, text: &[u8], mut word: impl FnMut(usize, usize)) -> Result<(), NeedsFallback> {
        let mut at = 0;
        while at < text.len() {
            let (class, length) = self.class(text, at);
            let start = at;
            at += length;
            match class {
                SPACE => continue,
                SINGLE => {}
                UNSUPPORTED => return Err(NeedsFallback::UnsupportedCharacter),
                _ => {
                    while at < text.len() {
                        let (class, length) = self.class(text, at);
                        if class & (WORD | REMOVED) == 0 {
                            break;
                        }
                        at += length;
                    }
                }
            }
            word(start, at);
        }
        Ok(())
    }

    /// Appends the ids of a word; `normal` is scratch.
    pub(crate) fn encode(&self, word: &str, normal: &mut String, ids: &mut Vec<u32>) {
        normal.clear();
        word.chars().for_each(|c| normalize(&self.normalizer, c, normal));
        if !normal.is_empty() {
            self.pieces.encode(normal, ids);
        }
    }
}

fn is_control(c: char) -> bool {
    !matches!(c, '\t' | '\n' | '\r') && c.is_other()
}

/// Whether BERT's normalizer surrounds the character with spaces.
fn is_chinese(c: char) -> bool {
    matches!(u32::from(c),
        0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xF900..=0xFAFF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0x2F800..=0x2FA1F)
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.is_punctuation()
}

fn strips_accents(normalizer: &BertNormalizer) -> bool {
    normalizer.strip_accents.unwrap_or(normalizer.lowercase)
}

/// Appends the normalized form of a character, without the spaces around Chinese characters.
fn normalize(normalizer: &BertNormalizer, c: char, normal: &mut String) {
    if normalizer.clean_text && (c == '\0' || c == '\u{fffd}' || is_control(c)) {
        return;
    }
    let c = if normalizer.clean_text && c.is_whitespace() { ' ' } else { c };
    let mut push = |c: char| match normalizer.lowercase {
        true => normal.extend(c.to_lowercase()),
        false => normal.push(c),
    };
    if c.is_ascii() || !strips_accents(normalizer) {
        push(c);
    } else {
        std::iter::once(c).nfd().map(|(c, _)| c).filter(|c| !c.is_mark_nonspacing()).for_each(push);
    }
}

/// Returns the class of a character; `text` is scratch.
fn class(normalizer: &BertNormalizer, c: char, text: &mut String) -> u8 {
    text.clear();
    normalize(normalizer, c, text);
    let is_combining = strips_accents(normalizer)
        && std::iter::once(c).nfd().any(|(c, _)| canonical_combining_class(c) != 0 && !c.is_mark_nonspacing());
    let is_spaced = normalizer.handle_chinese_chars && is_chinese(c);
    let is_single = text.chars().count() == 1;
    if text.is_empty() {
        return if is_spaced { UNSUPPORTED } else { REMOVED };
    }
    if is_combining {
        return UNSUPPORTED;
    }
    if text.chars().all(char::is_whitespace) {
        return SPACE;
    }
    if text.chars().any(char::is_whitespace) {
        return UNSUPPORTED;
    }
    match (is_spaced || text.chars().any(is_punctuation), is_single) {
        (true, true) => SINGLE,
        (true, false) => UNSUPPORTED,
        (false, _) => WORD,
    }
}

/// WordPiece: the longest token that begins the word, then repeatedly the longest that continues it. If none matches,
/// the whole word is unknown.
#[derive(Debug)]
pub(crate) struct WordPiece {
    initial: HashMap<Box<[u8]>, u32>,
    /// Continuation tokens, without their prefix.
    continuation: HashMap<Box<[u8]>, u32>,
    /// Bytes of the longest token. It bounds each look-up, so the time is linear in the word.
    longest: usize,
    unknown: u32,
    max_chars: usize,
}

impl WordPiece {
    pub(crate) fn new<'a>(
        vocabulary: impl Iterator<Item = (&'a str, u32)>,
        prefix: &str,
        unknown: u32,
        max_chars: usize,
    ) -> Self {
        let (mut initial, mut continuation, mut longest) = (HashMap::new(), HashMap::new(), 0);
        for (token, id) in vocabulary {
            longest = longest.max(token.len());
            initial.insert(token.as_bytes().into(), id);
            if let Some(token) = token.strip_prefix(prefix) {
                continuation.insert(token.as_bytes().into(), id);
            }
        }
        Self { initial, continuation, longest, unknown, max_chars }
    }

    /// Appends the ids of a non-empty word.
    fn encode(&self, word: &str, ids: &mut Vec<u32>) {
        let before = ids.len();
        if word.len() > self.max_chars && word.chars().count() > self.max_chars {
            ids.push(self.unknown);
            return;
        }
        let mut start = 0;
        while start < word.len() {
            let tokens = if start == 0 { &self.initial } else { &self.continuation };
            let longest = word.floor_char_boundary(word.len().min(start + self.longest));
            let ends = (start + 1..=longest).rev().filter(|&end| word.is_char_boundary(end));
            let token = ends.filter_map(|end| Some((end, *tokens.get(&word.as_bytes()[start..end])?))).next();
            let Some((end, id)) = token else {
                ids.truncate(before);
                ids.push(self.unknown);
                return;
            };
            ids.push(id);
            start = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::{NormalizedString, Normalizer};

    use super::*;

    /// Compares every character, inside a word, with the normalizer of `tokenizers` and the words of
    /// `BertPreTokenizer`.
    #[test]
    fn every_character_has_the_class_that_the_normalizer_gives_it() {
        for (clean, chinese, strip, lowercase) in [
            (true, true, None, true),
            (true, true, None, false),
            (false, false, Some(false), true),
            (false, true, Some(true), false),
        ] {
            let normalizer = BertNormalizer::new(clean, chinese, strip, lowercase);
            let (mut unsupported, mut text) = (0, String::new());
            for c in '\0'..=char::MAX {
                let mut defined = NormalizedString::from(format!("x{c}y"));
                normalizer.normalize(&mut defined).unwrap();
                text.clear();
                normalize(&normalizer, c, &mut text);
                let spaced = if chinese && is_chinese(c) { format!("x {text} y") } else { format!("x{text}y") };
                assert_eq!(defined.get(), spaced, "{c:?}");
                let mut words = Vec::new();
                for word in defined.get().split(char::is_whitespace) {
                    let ends = word.match_indices(is_punctuation).flat_map(|(at, p)| [at, at + p.len()]);
                    let ends: Vec<usize> = std::iter::once(0).chain(ends).chain([word.len()]).collect();
                    words.extend(ends.windows(2).map(|w| &word[w[0]..w[1]]).filter(|word| !word.is_empty()));
                }
                let expected = match class(&normalizer, c, &mut String::new()) {
                    UNSUPPORTED => {
                        unsupported += 1;
                        continue;
                    }
                    WORD => vec![format!("x{text}y")],
                    REMOVED => vec!["xy".into()],
                    SPACE => vec!["x".into(), "y".into()],
                    _ => vec!["x".into(), text.clone(), "y".into()],
                };
                assert_eq!(words, expected, "{c:?}");
            }
            assert!(unsupported < 120, "{unsupported} characters");
        }
    }

    #[test]
    fn the_longest_piece_is_taken() {
        let vocabulary = [("[UNK]", 0), ("a", 1), ("ab", 2), ("##b", 3), ("##bc", 4), ("##é", 5), ("é", 6)];
        let pieces = WordPiece::new(vocabulary.into_iter(), "##", 0, 5);
        let encode = |word: &str| {
            let mut ids = vec![9];
            pieces.encode(word, &mut ids);
            ids.split_off(1)
        };
        assert_eq!(encode("ab"), [2]);
        assert_eq!(encode("abbc"), [2, 4]);
        assert_eq!(encode("abc"), [0]);
        assert_eq!(encode("ébébé"), [6, 3, 5, 3, 5]);
        assert_eq!(encode("ababab"), [0]);
        assert_eq!(encode("éééééé"), [0]);
    }
}
