//! Hand-written pre-tokenizers: each finds the end of the word at a given offset, as its regular expression would.
//!
//! ```text
//!  GPT-2        's|'t|…| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//!  cl100k       (?i:'s|…)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//!  o200k        words of capitals, then small letters, with a contraction after an apostrophe; else as cl100k
//! ```
//!
//! Every character can begin some alternative of each pattern, so words follow one another without gaps. A scanner
//! tries the alternatives in the order of the pattern. Where a regular expression would backtrack, a comment states the
//! result. Each scanner reads a character a bounded number of times, so the time is linear in the text.
//!
//! `tests/patterns.rs` proves the scanners equal to the patterns for every short text over the classes that the pattern
//! distinguishes.

use crate::classes::{Classes, LETTER, LINE, LOWER, NUMBER, NUMERIC, OTHER, SPACE, UPPER};
use crate::sentencepiece::SPACE_MARK_STR;

/// A known way to split a text into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordSplitter {
    /// GPT-2, RoBERTa, GPT-NeoX, OLMo.
    Gpt2,
    /// SmolLM, StarCoder: every numeric character is a word; the text between them is split as for GPT-2.
    DigitsGpt2,
    /// GPT-4 and Llama 3: numbers have up to three digits.
    Cl100k,
    /// Qwen 2 and 3: as cl100k, but each digit is a word.
    Qwen2,
    /// GPT-4o, gpt-oss, Llama 4.
    O200k,
    /// Llama 2, Mistral, Phi-3, Gemma: one or more spaces, and the text up to the next space.
    Spaces,
    /// The whole text is one word.
    Whole,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl WordSplitter {
    /// Returns the splitter whose pattern is exactly `pattern`.
    pub fn from_pattern(pattern: &str) -> Option<Self> {
        [Self::Gpt2, Self::Cl100k, Self::Qwen2, Self::O200k]
            .into_iter()
            .find(|splitter| splitter.pattern() == Some(pattern))
    }

    /// Returns the regular expression; `None` if the words are not those of a single expression.
    pub fn pattern(self) -> Option<&'static str> {
        match self {
            Self::Gpt2 => Some(GPT2),
            Self::Cl100k => Some(CL100K),
            Self::Qwen2 => Some(QWEN2),
            Self::O200k => Some(O200K),
            Self::DigitsGpt2 | Self::Spaces | Self::Whole => None,
        }
    }

    /// A description for users.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT-2 pattern",
            Self::DigitsGpt2 => "single digits and GPT-2 pattern",
            Self::Cl100k => "cl100k pattern",
            Self::Qwen2 => "Qwen 2 pattern",
            Self::O200k => "o200k pattern",
            Self::Spaces => "words after spaces",
            Self::Whole => "no pattern",
        }
    }

    /// Returns the words of a text.
    pub fn split(self, text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        // The closure never fails.
        let _ = self.for_each_word(text.as_bytes(), |start, end| {
            words.push(&text[start..end]);
            Ok::<(), ()>(())
        });
        words
    }

    /// Calls `word` with the start and the end of each word in order, until it fails.
    #[inline]
    pub(crate) fn for_each_word<E>(
        self,
        text: &[u8],
        word: impl FnMut(usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let classes = Classes::get();
        match self {
            Self::Gpt2 => for_each_word(text, word, |text, at| gpt2_word_end(classes, text, at)),
            Self::DigitsGpt2 => for_each_word_between_digits(classes, text, word),
            Self::Cl100k => for_each_word(text, word, |text, at| cl100k_word_end::<3>(classes, text, at)),
            Self::Qwen2 => for_each_word(text, word, |text, at| cl100k_word_end::<1>(classes, text, at)),
            Self::O200k => for_each_word(text, word, |text, at| o200k_word_end(classes, text, at)),
            Self::Spaces => for_each_word(text, word, sentencepiece_word_end),
            Self::Whole => for_each_word(text, word, |text, _| text.len()),
        }
    }
}

/// Returns the end of a word of SentencePiece: the next space that does not follow a space or U+2581.
#[inline]
fn sentencepiece_word_end(text: &[u8], at: usize) -> usize {
    let mark = SPACE_MARK_STR.as_bytes();
    let mut end = at + 1;
    while let Some(next) = memchr::memchr(b' ', &text[end..]) {
        end += next;
        let before = &text[at..end];
        if !before.ends_with(b" ") && !before.ends_with(mark) {
            return end;
        }
        end += 1;
    }
    text.len()
}

#[inline]
fn for_each_word<E>(
    text: &[u8],
    mut word: impl FnMut(usize, usize) -> Result<(), E>,
    end: impl Fn(&[u8], usize) -> usize,
) -> Result<(), E> {
    let mut at = 0;
    while at < text.len() {
        let next = end(text, at);
        word(at, next)?;
        at = next;
    }
    Ok(())
}

/// Splits off numeric characters. The pattern sees the text between them as a separate text with its own end.
#[inline]
fn for_each_word_between_digits<E>(
    classes: &Classes,
    text: &[u8],
    mut word: impl FnMut(usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = 0;
    while at < text.len() {
        let (mut stop, mut digit) = (at, 0);
        while stop < text.len() {
            let (class, length) = classes.at(text, stop);
            if class & NUMERIC != 0 {
                digit = length;
                break;
            }
            stop += length;
        }
        let between = &text[..stop];
        while at < stop {
            let next = gpt2_word_end(classes, between, at);
            word(at, next)?;
            at = next;
        }
        if digit > 0 {
            at = stop + digit;
            word(stop, at)?;
        }
    }
    Ok(())
}

/// `\s+(?!\S)|\s+` at a white space: a run leaves its last character to the next word, unless it is the only character
/// or the text ends.
#[inline]
fn whitespace_end(classes: &Classes, text: &[u8], at: usize) -> usize {
    let (mut last, mut end) = (at, at);
    loop {
        let (class, length) = classes.at(text, end);
        if class & SPACE == 0 {
            break;
        }
        last = end;
        end += length;
    }
    if end == text.len() || last == at { end } else { last }
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+` at a white space: a run with line breaks ends after the last of them.
#[inline]
fn line_break_or_whitespace_end(classes: &Classes, text: &[u8], at: usize) -> usize {
    let (mut last, mut end, mut after_line) = (at, at, at);
    loop {
        let (class, length) = classes.at(text, end);
        if class & SPACE == 0 {
            break;
        }
        last = end;
        end += length;
        if class & LINE != 0 {
            after_line = end;
        }
    }
    if after_line > at {
        after_line
    } else if end == text.len() || last == at {
        end
    } else {
        last
    }
}

/// Length in bytes of `'s|'t|'re|'ve|'m|'ll|'d` at an apostrophe; 0 if there is no match.
#[inline]
fn contraction_len(text: &[u8], at: usize) -> usize {
    match (text.get(at + 1), text.get(at + 2)) {
        (Some(b's' | b't' | b'm' | b'd'), _) => 2,
        (Some(b'r' | b'v'), Some(b'e')) | (Some(b'l'), Some(b'l')) => 3,
        _ => 0,
    }
}

/// As [`contraction_len`] with `(?i:…)`: both cases, and the long s (U+017F), which folds to s.
#[inline]
fn contraction_len_ignoring_case(text: &[u8], at: usize) -> usize {
    let lower = |n: usize| text.get(at + n).map(u8::to_ascii_lowercase);
    match (lower(1), lower(2)) {
        (Some(b's' | b't' | b'm' | b'd'), _) => 2,
        (Some(b'r' | b'v'), Some(b'e')) | (Some(b'l'), Some(b'l')) => 3,
        (Some(0xc5), Some(0xbf)) => 3,
        _ => 0,
    }
}

#[inline]
fn gpt2_word_end(classes: &Classes, text: &[u8], at: usize) -> usize {
    let (mut class, length) = classes.at(text, at);
    let mut after = at + length;
    if text[at] == b' ' {
        let (next, length) = classes.at(text, after);
        if next & (LETTER | NUMBER | OTHER) == 0 {
            return whitespace_end(classes, text, at);
        }
        class = next;
        after += length;
    } else if text[at] == b'\'' {
        let length = contraction_len(text, at);
        if length > 0 {
            return at + length;
        }
    }
    match class & (LETTER | NUMBER | OTHER) {
        0 => whitespace_end(classes, text, at),
        kind => classes.end_of_run(text, after, kind),
    }
}

/// Returns the end of a run of at most `max_count` numbers, whose first number ends at `after`.
#[inline]
fn numbers_end(classes: &Classes, text: &[u8], mut after: usize, max_count: usize) -> usize {
    for _ in 1..max_count {
        let (class, length) = classes.at(text, after);
        if class & NUMBER == 0 {
            break;
        }
        after += length;
    }
    after
}

#[inline]
fn cl100k_word_end<const MAX_DIGITS: usize>(classes: &Classes, text: &[u8], at: usize) -> usize {
    let (class, length) = classes.at(text, at);
    let after = at + length;
    if class & LETTER != 0 {
        return classes.end_of_run(text, after, LETTER);
    }
    if class & NUMBER != 0 {
        return numbers_end(classes, text, after, MAX_DIGITS);
    }
    if text[at] == b'\'' {
        let length = contraction_len_ignoring_case(text, at);
        if length > 0 {
            return at + length;
        }
    }
    let (next, _) = classes.at(text, after);
    if class & LINE == 0 && next & LETTER != 0 {
        return classes.end_of_run(text, after, LETTER);
    }
    if class & OTHER != 0 || text[at] == b' ' && next & OTHER != 0 {
        let end = classes.end_of_run(text, after, OTHER);
        return classes.end_of_run(text, end, LINE);
    }
    line_break_or_whitespace_end(classes, text, at)
}

/// Returns the end of a word of letters at `at` by the first two alternatives of o200k, without their optional first
/// character. `Ok` if the first alternative matches, else `Err` with the end of the second (`at` if it does not match
/// either).
///
/// ```text
///  first   [UPPER]*[LOWER]+   UPPER and LOWER share caseless letters and marks; a run of UPPER without a small letter
///                             after it backtracks to its last character that is also LOWER
///  second  [UPPER]+[LOWER]*   tried if no character of the run, nor the one after it, is LOWER: matches the run itself
/// ```
#[inline]
fn cased_word_end(classes: &Classes, text: &[u8], at: usize) -> Result<usize, usize> {
    let (mut end, mut after_both) = (at, at);
    loop {
        let (class, length) = classes.at(text, end);
        if class & UPPER == 0 {
            break if class & LOWER != 0 {
                Ok(classes.end_of_run(text, end + length, LOWER))
            } else if after_both > at {
                Ok(after_both)
            } else {
                Err(end)
            };
        }
        end += length;
        if class & LOWER != 0 {
            after_both = end;
        }
    }
}

#[inline]
fn o200k_word_end(classes: &Classes, text: &[u8], at: usize) -> usize {
    let (class, length) = classes.at(text, at);
    let after = at + length;
    if class & NUMBER != 0 {
        return numbers_end(classes, text, after, 3);
    }
    let word = if class & LETTER != 0 {
        Some(cased_word_end(classes, text, at).unwrap_or_else(|end| end))
    } else if class & LINE == 0 {
        match cased_word_end(classes, text, after) {
            Ok(end) => Some(end),
            // A mark without a word after it begins a word itself.
            Err(_) if class & UPPER != 0 => Some(cased_word_end(classes, text, at).unwrap_or_else(|end| end)),
            Err(end) if end > after => Some(end),
            Err(_) => None,
        }
    } else {
        None
    };
    if let Some(end) = word {
        return match text.get(end) {
            Some(b'\'') => end + contraction_len_ignoring_case(text, end),
            _ => end,
        };
    }
    if class & OTHER != 0 || text[at] == b' ' && classes.at(text, after).0 & OTHER != 0 {
        let mut end = classes.end_of_run(text, after, OTHER);
        while matches!(text.get(end), Some(b'\r' | b'\n' | b'/')) {
            end += 1;
        }
        return end;
    }
    line_break_or_whitespace_end(classes, text, at)
}
