//! The methods of Python's `str` that the reference uses. They differ from Rust's in what white space and a line break are.

use std::borrow::Cow;

use crate::unicode::{SPACE, classes};

/// `str.isspace` of one character.
#[inline]
pub(crate) fn is_space(c: char) -> bool {
    classes().is(c, SPACE)
}

/// `str.strip`.
pub(crate) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// `str.split` without arguments.
pub(crate) fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(is_space).filter(|word| !word.is_empty())
}

/// `len` of a string, in code points.
#[inline]
pub(crate) fn len(text: &str) -> usize {
    text.chars().count()
}

/// `str.splitlines`: a final line break starts no empty line, and `\r\n` is one break.
pub(crate) fn split_lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some((end, c)) = rest.char_indices().find(|&(_, c)| is_line_break(c)) else {
            return Some(std::mem::take(&mut rest));
        };
        let line = rest.get(..end).unwrap_or_default();
        let after = rest.get(end + c.len_utf8()..).unwrap_or_default();
        rest = if c == '\r' { after.strip_prefix('\n').unwrap_or(after) } else { after };
        Some(line)
    })
}

#[inline]
fn is_line_break(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Splits at runs of at least `least` newlines (`re.split(r"\n{least,}")`), which keeps empty first and last pieces.
pub(crate) fn split_newlines(text: &str, least: usize) -> impl Iterator<Item = &str> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let piece = rest?;
        let mut from = 0;
        loop {
            let tail = piece.get(from..).unwrap_or_default();
            let Some(start) = memchr::memchr(b'\n', tail.as_bytes()) else {
                rest = None;
                return Some(piece);
            };
            let run = tail.bytes().skip(start).take_while(|&byte| byte == b'\n').count();
            if run >= least {
                rest = piece.get(from + start + run..);
                return piece.get(..from + start);
            }
            from += start + run;
        }
    })
}

/// `text.lower()` as far as a search for ASCII phrases needs it.
///
/// Only one character outside ASCII has a lower case that starts with an ASCII letter which one of the phrases contains
/// before another letter: the Kelvin sign. (`İ` becomes `i` and a combining dot.)
pub(crate) fn lower_for_ascii_search(text: &str) -> Cow<'_, str> {
    if text.contains('\u{212a}') { Cow::Owned(text.replace('\u{212a}', "k").to_ascii_lowercase()) } else { text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_where_python_ends_them() {
        let text = "a\r\nb\rc\n\nd\x0be\x0cf\x1cg\x1dh\x1ei\u{85}j\u{2028}k\u{2029}l\n";
        let lines: Vec<_> = split_lines(text).collect();
        assert_eq!(lines, ["a", "b", "c", "", "d", "e", "f", "g", "h", "i", "j", "k", "l"]);
        assert_eq!(split_lines("").count(), 0);
        assert_eq!(split_lines("\n\n").collect::<Vec<_>>(), ["", ""]);
    }

    #[test]
    fn runs_of_newlines_separate_paragraphs() {
        let pieces = |text, least| split_newlines(text, least).collect::<Vec<_>>();
        assert_eq!(pieces("a\nb\n\nc\n\n\n", 2), ["a\nb", "c", ""]);
        assert_eq!(pieces("\na\n\nb", 1), ["", "a", "b"]);
        assert_eq!(pieces("", 1), [""]);
    }

    #[test]
    fn white_space_is_that_of_python() {
        assert_eq!(strip("\x1c\u{3000} a\u{200b}\u{85}"), "a\u{200b}");
        assert_eq!(split(" a\x1fb\u{a0}c ").collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}
