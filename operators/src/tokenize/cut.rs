//! Finds places to cut a text so that the ids of the two parts, joined, are the ids of the whole text.
//!
//! ```text
//!  text:  … the quick brown│ fox jumps over …            head │ tail
//!         └ CONTEXT_BYTES ┘ └ CONTEXT_BYTES ┘        encode(both) = encode(head) ++ encode(tail) ?
//! ```
//!
//! Candidates are tried from the end of the text backwards, likely kinds first: before a single space between two
//! letters, before a space between other characters, before and after a line break, between a letter and another
//! character. The tokenizer checks each of them on up to [`CONTEXT_BYTES`] bytes to both sides.
//!
//! The strength of this check depends on the tokenizer:
//!
//! - It equals a check on the whole text if the pre-tokenizer always ends a word at the cut, whatever text is further
//!   away. Merges never cross words, and the characters of a word and the one after it decide what a pattern matches.
//!   This holds for the patterns of GPT-2, Llama 3 and Qwen, which break between a letter and a space before a letter.
//!   It holds for BERT, which breaks at every space. If the normalizer leaves nothing of one side, the check rejects
//!   the cut.
//! - It is not a proof for a tokenizer without such words. A BPE without a pre-tokenizer could merge a run of one
//!   letter in pairs from its start. Then a start more than [`CONTEXT_BYTES`] bytes away would decide the tokens at its
//!   end. No tokenizer known to us has merges that show this at a cut between words. Tests compare cut and uncut texts
//!   with long runs of every kind.
//!
//! Tokenizers that put a prefix before every text (Llama 2: `▁`) would see one space too many in the tail. For them the
//! cut leaves out the space, with the same check.
//!
//! Cost: two encodings of 2 · [`CONTEXT_BYTES`] bytes per candidate; usually the first one passes.

use crate::vocabulary::{Vocabulary, VocabularyError};

/// Maximum bytes on each side of a cut that the check encodes.
const CONTEXT_BYTES: usize = 4096;
/// Bytes that must follow a cut, so that the check sees the text after it.
pub(super) const MIN_BYTES_AFTER_CUT: usize = 1024;
/// Candidates of each kind to check before giving up.
const MAX_CANDIDATES: usize = 64;

/// A place to cut: the head is `..head` and the tail is `tail..`; a single space may lie between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cut {
    pub head: usize,
    pub tail: usize,
}

/// Returns the last cut of a text that passes the check; `None` if no candidate does.
pub(super) fn find(text: &str, vocabulary: &Vocabulary) -> Result<Option<Cut>, VocabularyError> {
    let limit = text.floor_char_boundary(text.len().saturating_sub(MIN_BYTES_AFTER_CUT));
    for kind in [spaces_between_letters, spaces, before_lines, after_lines, letter_boundaries] {
        for at in candidates(text, limit, kind).take(MAX_CANDIDATES) {
            if let Some(cut) = verify(text, at, vocabulary)? {
                return Ok(Some(cut));
            }
        }
    }
    Ok(None)
}

type CutRule = fn(before: char, after: char, next: Option<char>) -> bool;

fn spaces_between_letters(before: char, after: char, next: Option<char>) -> bool {
    after == ' ' && before.is_alphabetic() && next.is_some_and(char::is_alphabetic)
}

fn spaces(before: char, after: char, next: Option<char>) -> bool {
    after == ' ' && !before.is_whitespace() && next.is_some_and(|c| !c.is_whitespace())
}

fn before_lines(before: char, after: char, _: Option<char>) -> bool {
    after == '\n' && !before.is_whitespace()
}

fn after_lines(before: char, after: char, _: Option<char>) -> bool {
    before == '\n' && !after.is_whitespace()
}

fn letter_boundaries(before: char, after: char, _: Option<char>) -> bool {
    before.is_alphabetic() != after.is_alphabetic() && !before.is_whitespace() && !after.is_whitespace()
}

/// Returns the places of a kind in `1..=limit`, last first.
fn candidates(text: &str, limit: usize, kind: CutRule) -> impl Iterator<Item = usize> {
    let head = &text[..limit];
    let mut after = text[limit..].chars().next();
    let mut next = text[limit..].chars().nth(1);
    let mut at = limit;
    head.chars().rev().filter_map(move |before| {
        let place = at;
        let fits = after.is_some_and(|after| kind(before, after, next));
        at -= before.len_utf8();
        next = after;
        after = Some(before);
        fits.then_some(place)
    })
}

fn verify(text: &str, at: usize, vocabulary: &Vocabulary) -> Result<Option<Cut>, VocabularyError> {
    let start = text.floor_char_boundary(at.saturating_sub(CONTEXT_BYTES));
    let end = text.floor_char_boundary((at + CONTEXT_BYTES).min(text.len()));
    let whole = vocabulary.encode(&text[start..end])?;
    let head = vocabulary.encode(&text[start..at])?;
    // if the normalizer leaves nothing of a side, the check cannot see its neighbour: BERT joins letters across
    // combining marks
    let Some(rest) = whole.strip_prefix(head.as_slice()).filter(|rest| !head.is_empty() && !rest.is_empty()) else {
        return Ok(None);
    };
    let mut tails = vec![at];
    if text[at..].starts_with(' ') {
        tails.push(at + 1);
    }
    for tail in tails {
        if rest == vocabulary.encode(&text[tail..end])? {
            return Ok(Some(Cut { head: at, tail }));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::bert;

    fn all(text: &str, kind: CutRule) -> Vec<usize> {
        candidates(text, text.floor_char_boundary(text.len() - 1), kind).collect()
    }

    #[test]
    fn candidates_come_from_the_end() {
        assert_eq!(all("ab cd, ef g", spaces_between_letters), [9, 2]);
        assert_eq!(all("ab cd, ef g", spaces), [9, 6, 2]);
        assert!(all("a  b", spaces).is_empty());
        assert_eq!(all("é\n\nö\nx", before_lines), [6, 2]);
        assert_eq!(all("é\n\nö\nx", after_lines), [7, 4]);
        assert_eq!(all("ab12 é", letter_boundaries), [2]);
    }

    /// BERT's normalizer removes combining marks, so `abc` and `def` are one word for any number of marks between them.
    #[test]
    fn letters_are_not_torn_across_what_the_normalizer_takes_away() {
        for marks in [100, 3000] {
            let head = format!("abc{}", "\u{301}".repeat(marks));
            assert!(verify(&format!("{head}def ghi"), head.len(), &bert()).unwrap().is_none(), "{marks} marks");
            assert!(verify(&format!("{head}abc ghi"), head.len() + 3, &bert()).unwrap().is_some(), "{marks} marks");
        }
    }
}
