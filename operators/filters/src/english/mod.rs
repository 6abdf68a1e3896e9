//! Words and sentences of English text, as datatrove 0.10.1 takes them from spaCy 3.8 (`spacy.blank("en")` with its
//! sentencizer).
//!
//! ```text
//!   text ─► chunks at white space ─► special cases ─► prefixes and suffixes ─► URL ─► infixes ─► tokens
//!   tokens ─► sequences that spell a special case are replaced by its tokens ─► words, sentences
//! ```
//!
//! A chunk of n bytes costs O(n) time, also where spaCy's own search is quadratic.

mod affixes;
mod special_case_table;
mod special_cases;
mod url;

use crate::unicode::{PUNCTUATION, SENTENCE_END, classes};
use special_cases::SpecialCases;

/// The bytes of a token: `start..end` of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) end: usize,
}

impl Span {
    /// Returns the text of the span; an empty string if the span is not of this text.
    #[inline]
    pub(crate) fn of(self, text: &str) -> &str {
        text.get(self.start..self.end).unwrap_or_default()
    }

    #[inline]
    fn is_space(self, text: &str) -> bool {
        self.of(text).chars().next().is_none_or(crate::python::is_space)
    }
}

/// Returns the tokens of a text, white space included where it is more than one space.
pub(crate) fn tokens(text: &str) -> Vec<Span> {
    let cases = SpecialCases::get();
    let mut tokens = Vec::with_capacity(text.len() / 5);
    affixes::split(text, Some(cases), &mut tokens);
    cases.merge(text, &mut tokens);
    tokens
}

/// Removes the tokens of white space, which leaves the words.
pub(crate) fn keep_words(text: &str, tokens: &mut Vec<Span>) {
    tokens.retain(|token| !token.is_space(text));
}

/// Returns the words of a text, as datatrove's `split_into_words` for English.
///
/// ```
/// assert_eq!(stillhouse_filters::words("Don't pay $5km."), ["Do", "n't", "pay", "$", "5", "km", "."]);
/// ```
pub fn words(text: &str) -> Vec<&str> {
    let mut tokens = tokens(text);
    keep_words(text, &mut tokens);
    tokens.into_iter().map(|token| token.of(text)).collect()
}

/// Returns the sentences of a text, as datatrove's `split_into_sentences` for English: they cover the text, and an empty
/// text is one sentence.
///
/// ```
/// assert_eq!(stillhouse_filters::sentences("One. Two!"), ["One.", " Two!"]);
/// ```
pub fn sentences(text: &str) -> Vec<&str> {
    let (mut start, mut sentences) = (0, Vec::new());
    for end in sentence_ends(text) {
        sentences.push(text.get(start..end).unwrap_or_default());
        start = end;
    }
    sentences.push(text.get(start..).unwrap_or_default());
    sentences
}

/// Returns the number of sentences of a text.
pub(crate) fn count_sentences(text: &str) -> usize {
    sentence_ends(text).len() + 1
}

/// Returns the end of each sentence but the last.
fn sentence_ends(text: &str) -> Vec<usize> {
    let (mut ends, mut after_end, mut last_end) = (Vec::new(), false, 0);
    for token in tokens(text) {
        let word = token.of(text);
        let mut characters = word.chars();
        let is_end = match (characters.next(), characters.next()) {
            (Some(c), None) => classes().is(c, SENTENCE_END),
            _ => false,
        };
        if is_end {
            after_end = true;
        } else if after_end && !word.chars().all(|c| classes().is(c, PUNCTUATION)) {
            ends.push(last_end);
            after_end = false;
        }
        last_end = token.end;
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_spacy() {
        assert_eq!(
            words("U.S.A. don't—that's (e.g.) 5km. a……b ……"),
            ["U.S.A.", "don't", "—", "that", "'s", "(", "e.g.", ")", "5", "km", ".", "a", "…", "…", "b", "…", "…"]
        );
        assert_eq!(
            words("see http://a.example.com/b?c=d, or me@example.com."),
            ["see", "http://a.example.com/b?c=d", ",", "or", "me@example.com", "."]
        );
        assert_eq!(words(""), [""; 0]);
        assert_eq!(words(" \n\t\u{a0}"), [""; 0]);
    }

    #[test]
    fn a_spelled_special_case_is_one_token_again() {
        assert_eq!(words("hi:)"), ["hi", ":)"]);
        assert_eq!(words("hi: )"), ["hi", ":", ")"]);
    }

    #[test]
    fn sentences_cover_the_text() {
        assert_eq!(sentences(" A bb. \n C? D"), [" A bb.", " \n C?", " D"]);
        assert_eq!(sentences(""), [""]);
        assert_eq!(count_sentences(""), 1);
        assert_eq!(sentences("Wait... \"No.\" Yes"), ["Wait... \"No.\"", " Yes"]);
    }
}
