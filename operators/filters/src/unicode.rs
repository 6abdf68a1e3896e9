//! The sets of characters that the rules and the tokenizer test, as one table of flags.
//!
//! The sets are those of the reference, Unicode 14.0.0, and not those of Rust's standard library, which are newer.
//! [`classes`] builds the table at its first call, which takes some milliseconds.

use std::sync::LazyLock;

use crate::unicode_ranges as ranges;

/// `str.isspace`.
pub(crate) const SPACE: u16 = 1;
/// `str.isalpha`.
pub(crate) const ALPHABETIC: u16 = 1 << 1;
/// `str.isalnum`, but not `str.isalpha`.
pub(crate) const NUMERIC: u16 = 1 << 2;
/// `str.isdecimal`.
pub(crate) const DECIMAL: u16 = 1 << 3;
/// The general categories P*.
pub(crate) const PUNCTUATION: u16 = 1 << 4;
/// datatrove's `PUNCTUATION_SET`.
pub(crate) const GOPHER_SYMBOL: u16 = 1 << 5;
/// datatrove's `TERMINAL_PUNCTUATION`.
pub(crate) const TERMINAL: u16 = 1 << 6;
/// The characters that end a sentence for spaCy's sentencizer.
pub(crate) const SENTENCE_END: u16 = 1 << 7;
/// spaCy's `ALPHA`.
pub(crate) const LETTER: u16 = 1 << 8;
/// spaCy's `ALPHA_LOWER`, which includes the scripts without case.
pub(crate) const LOWER: u16 = 1 << 9;
/// spaCy's `ALPHA_UPPER`, which includes the scripts without case.
pub(crate) const UPPER: u16 = 1 << 10;
/// spaCy's `CONCAT_QUOTES`.
pub(crate) const QUOTE: u16 = 1 << 11;
/// Characters that spaCy splits at the start of a word.
pub(crate) const PREFIX: u16 = 1 << 12;
/// Characters that spaCy splits at the end of a word.
pub(crate) const SUFFIX: u16 = 1 << 13;
/// Characters that spaCy splits inside a word, whatever their neighbours.
pub(crate) const INFIX: u16 = 1 << 14;
/// Characters after which spaCy splits a final full stop.
pub(crate) const BEFORE_FINAL_DOT: u16 = 1 << 15;

const SETS: [(u16, &[u32]); 16] = [
    (SPACE, ranges::SPACE),
    (ALPHABETIC, ranges::ALPHABETIC),
    (NUMERIC, ranges::NUMERIC),
    (DECIMAL, ranges::DECIMAL),
    (PUNCTUATION, ranges::PUNCTUATION),
    (GOPHER_SYMBOL, ranges::GOPHER_SYMBOL),
    (TERMINAL, ranges::TERMINAL),
    (SENTENCE_END, ranges::SENTENCE_END),
    (LETTER, ranges::LETTER),
    (LOWER, ranges::LOWER),
    (UPPER, ranges::UPPER),
    (QUOTE, ranges::QUOTE),
    (PREFIX, ranges::PREFIX),
    (SUFFIX, ranges::SUFFIX),
    (INFIX, ranges::INFIX),
    (BEFORE_FINAL_DOT, ranges::BEFORE_FINAL_DOT),
];

const PAGE: usize = 256;

/// The flags of all code points. Equal pages of 256 code points are stored once.
pub(crate) struct Classes {
    ascii: [u16; 128],
    pages: Vec<u16>,
    flags: Vec<u16>,
}

static CLASSES: LazyLock<Classes> = LazyLock::new(Classes::build);

/// Returns the global table.
#[inline]
pub(crate) fn classes() -> &'static Classes {
    &CLASSES
}

impl Classes {
    fn build() -> Self {
        let mut all = vec![0u16; 0x11_0000];
        for (flag, boundaries) in SETS {
            for range in boundaries.chunks_exact(2) {
                let (first, end) = (range.first().copied().unwrap_or(0), range.last().copied().unwrap_or(0));
                let members = all.get_mut(first as usize..end as usize).unwrap_or_default();
                members.iter_mut().for_each(|flags| *flags |= flag);
            }
        }
        let (mut pages, mut flags): (_, Vec<u16>) = (Vec::with_capacity(all.len() / PAGE), Vec::new());
        for page in all.chunks_exact(PAGE) {
            let known = flags.chunks_exact(PAGE).position(|stored| stored == page);
            let number = known.unwrap_or_else(|| {
                flags.extend_from_slice(page);
                flags.len() / PAGE - 1
            });
            pages.push(number as u16);
        }
        let ascii = std::array::from_fn(|code| all.get(code).copied().unwrap_or(0));
        Self { ascii, pages, flags }
    }

    /// Returns the flags of a character.
    #[inline]
    pub(crate) fn of(&self, c: char) -> u16 {
        let code = c as usize;
        match self.ascii.get(code) {
            Some(&flags) => flags,
            None => {
                let page = self.pages.get(code / PAGE).copied().unwrap_or(0);
                self.flags.get(usize::from(page) * PAGE + code % PAGE).copied().unwrap_or(0)
            }
        }
    }

    /// Returns whether a character has one of the flags.
    #[inline]
    pub(crate) fn is(&self, c: char, flags: u16) -> bool {
        self.of(c) & flags != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_follow_the_boundaries() {
        let classes = classes();
        assert_eq!(classes.of('a') & (ALPHABETIC | NUMERIC | LETTER | LOWER | UPPER), ALPHABETIC | LETTER | LOWER);
        assert!(classes.is('\u{1c}', SPACE) && !classes.is('\u{200b}', SPACE));
        assert!(classes.is('٣', DECIMAL) && classes.is('²', NUMERIC) && !classes.is('²', DECIMAL));
        assert!(classes.is('中', LOWER) && classes.is('中', UPPER));
        assert!(classes.is('\u{1F600}', INFIX) && classes.is('(', PREFIX) && classes.is(')', SUFFIX));
        assert_eq!(classes.of(char::MAX), 0);
    }

    #[test]
    fn the_sets_of_ascii_are_those_of_the_standard_library() {
        for c in (0..128u8).map(char::from) {
            assert_eq!(classes().is(c, ALPHABETIC), c.is_ascii_alphabetic());
            assert_eq!(classes().is(c, NUMERIC), c.is_ascii_digit());
            assert_eq!(classes().is(c, PUNCTUATION), c.is_ascii_punctuation() && !"$+<=>^`|~".contains(c));
        }
    }
}
