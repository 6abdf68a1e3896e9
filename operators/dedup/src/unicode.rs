//! Classes of characters as CPython 3.11 and the Python package `regex` have them.

use crate::unicode_tables::{DIGITS, NONSPACING_MARKS, PUNCTUATION, UNASSIGNED};

/// Decimal digit, as `\p{Nd}`.
pub(crate) const DIGIT: u8 = 1;
/// White space, as `str.isspace`.
pub(crate) const SPACE: u8 = 2;
/// Punctuation that datatrove replaces by a space; also control characters.
pub(crate) const PUNCT: u8 = 4;

/// The classes of ASCII, by far the most frequent characters.
const ASCII: [u8; 128] = {
    let mut classes = [0; 128];
    let mut code = 0;
    while code < 128 {
        let byte = code as u8;
        let is_punctuation = !matches!(byte, b'\t' | b'\n' | b' ') && !byte.is_ascii_alphanumeric();
        classes[code] = if byte.is_ascii_digit() { DIGIT } else { 0 }
            | if matches!(byte, 9..=13 | 0x1c..=0x20) { SPACE } else { 0 }
            | if is_punctuation { PUNCT } else { 0 };
        code += 1;
    }
    classes
};

/// Returns the classes of a character.
#[inline]
pub(crate) fn classes(c: char) -> u8 {
    match ASCII.get(c as usize) {
        Some(&classes) => classes,
        None => other_classes(c),
    }
}

fn other_classes(c: char) -> u8 {
    let class = |is: bool, class| if is { class } else { 0 };
    class(contains(DIGITS, c), DIGIT) | class(is_space(c), SPACE) | class(contains(PUNCTUATION, c), PUNCT)
}

/// Returns whether CPython takes the character for white space. The set is the same in all versions of Unicode since 6.3.
#[inline]
pub(crate) fn is_space(c: char) -> bool {
    matches!(c, '\u{1c}'..='\u{1f}') || c.is_whitespace()
}

/// Returns whether Unicode 14.0.0 does not assign the character.
#[inline]
pub(crate) fn is_unassigned(c: char) -> bool {
    c >= '\u{378}' && contains(UNASSIGNED, c)
}

/// Returns whether the character has the category Mn in Unicode 14.0.0.
#[inline]
pub(crate) fn is_nonspacing_mark(c: char) -> bool {
    c >= '\u{300}' && contains(NONSPACING_MARKS, c)
}

fn contains(ranges: &[(u32, u32)], c: char) -> bool {
    let code = u32::from(c);
    let next = ranges.partition_point(|&(_, last)| last < code);
    ranges.get(next).is_some_and(|&(first, _)| first <= code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ascii_agrees_with_the_tables() {
        for c in (0..128u8).map(char::from) {
            assert_eq!(classes(c), other_classes(c), "{c:?}");
        }
    }

    #[test]
    fn tables_ascend() {
        for ranges in [UNASSIGNED, NONSPACING_MARKS, DIGITS, PUNCTUATION] {
            assert!(ranges.iter().all(|(first, last)| first <= last));
            assert!(ranges.windows(2).all(|pair| pair[0].1 < pair[1].0));
        }
    }

    #[test]
    fn classes_of_some_characters() {
        assert_eq!(['a', '7', ' ', '.', '\u{1c}', '\n', '\u{85}', '\u{a0}'].map(classes), [0, 1, 2, 4, 6, 2, 6, 2]);
        assert_eq!(['٣', '。', '·', '\u{3000}', '½'].map(classes), [1, 4, 0, 2, 0]);
        assert!(is_nonspacing_mark('\u{301}') && !is_nonspacing_mark('\u{903}'));
        assert!(is_unassigned('\u{378}') && is_unassigned('\u{1c89}') && !is_unassigned('a'));
    }
}
