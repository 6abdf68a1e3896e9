//! The first pass of spaCy's tokenizer: chunks at white space, then prefixes, suffixes, URLs and infixes.
//!
//! The functions below replace the three regular expressions of spaCy 3.8 (`lang/punctuation.py` and
//! `lang/en/punctuation.py`).

use super::Span;
use super::special_cases::{SpecialCases, length_after_digit};
use super::url::is_url;
use crate::unicode::{BEFORE_FINAL_DOT, INFIX, LETTER, LOWER, PREFIX, QUOTE, SPACE, SUFFIX, UPPER, classes};

/// Appends the tokens of a text. `None` splits without special cases, which is how spaCy finds their spellings.
pub(super) fn split(text: &str, cases: Option<&SpecialCases>, tokens: &mut Vec<Span>) {
    let (classes, mut suffixes) = (classes(), Vec::new());
    let mut characters = text.char_indices().peekable();
    while let Some(&(start, first)) = characters.peek() {
        let is_space = classes.is(first, SPACE);
        let (mut end, mut all_letters) = (start, true);
        while let Some(&(at, c)) = characters.peek()
            && classes.is(c, SPACE) == is_space
        {
            all_letters &= c.is_ascii_alphabetic();
            end = at + c.len_utf8();
            characters.next();
        }
        if is_space {
            // one space after a word belongs to the word
            let start = if start > 0 && first == ' ' { start + 1 } else { start };
            if start < end {
                tokens.push(Span { start, end });
            }
        } else if all_letters && cases.is_none_or(|cases| !cases.contains(text.get(start..end).unwrap_or_default())) {
            tokens.push(Span { start, end });
        } else {
            split_chunk(text, Span { start, end }, cases, tokens, &mut suffixes);
        }
    }
}

/// Appends the tokens of a chunk without white space. `suffixes` is scratch memory.
fn split_chunk(
    text: &str,
    chunk: Span,
    cases: Option<&SpecialCases>,
    tokens: &mut Vec<Span>,
    suffixes: &mut Vec<Span>,
) {
    let is_case = |start, end| start < end && cases.is_some_and(|cases| cases.contains(Span { start, end }.of(text)));
    let Span { mut start, mut end } = chunk;
    suffixes.clear();
    while start < end && !is_case(start, end) {
        let piece = Span { start, end }.of(text);
        let prefix = prefix_length(piece);
        if prefix > 0 && is_case(start + prefix, end) {
            tokens.push(Span { start, end: start + prefix });
            start += prefix;
            break;
        }
        // what precedes a suffix is looked up without the prefix
        let suffix = suffix_length(piece.get(prefix..).unwrap_or_default());
        if suffix > 0 && is_case(start, end - suffix) {
            suffixes.push(Span { start: end - suffix, end });
            end -= suffix;
            break;
        }
        if prefix + suffix == 0 {
            break;
        }
        if prefix > 0 {
            tokens.push(Span { start, end: start + prefix });
            start += prefix;
        }
        if suffix > 0 {
            suffixes.push(Span { start: end - suffix, end });
            end -= suffix;
        }
    }
    if start < end {
        let piece = Span { start, end };
        match cases.and_then(|cases| cases.tokens(piece.of(text))) {
            Some(lengths) => push_lengths(piece, lengths, tokens),
            None if is_url(piece.of(text)) => tokens.push(piece),
            None => split_infixes(text, piece, tokens),
        }
    }
    tokens.extend(suffixes.iter().rev());
}

/// Appends the tokens of a special case, given by their lengths in bytes.
pub(super) fn push_lengths(piece: Span, lengths: &[u8], tokens: &mut Vec<Span>) {
    let mut start = piece.start;
    for &length in lengths {
        let end = start + usize::from(length);
        tokens.push(Span { start, end });
        start = end;
    }
}

/// Returns the bytes of the prefix of a piece; 0 if it has none.
pub(super) fn prefix_length(piece: &str) -> usize {
    let bytes = piece.as_bytes();
    match bytes {
        [b'.', b'.', ..] => bytes.iter().take_while(|&&byte| byte == b'.').count(),
        [b'+', rest @ ..] => usize::from(!rest.first().is_some_and(u8::is_ascii_digit)),
        [b'U', b'S', b'$', ..] => 3,
        [b'C' | b'A', b'$', ..] => 2,
        _ => match piece.chars().next() {
            Some(first) if classes().is(first, PREFIX) => first.len_utf8(),
            _ => 0,
        },
    }
}

/// Returns the bytes of the longest suffix of a piece; 0 if it has none.
pub(super) fn suffix_length(piece: &str) -> usize {
    let mut before = piece.chars();
    let Some(last) = before.next_back() else { return 0 };
    let general = if classes().is(last, SUFFIX) { last.len_utf8() } else { 0 };
    let length = match last {
        '.' => final_dots(piece),
        '…' if before.next_back() == Some('…') => 2 * general,
        's' | 'S' => match before.next_back() {
            Some(quote @ ('\'' | '’')) => quote.len_utf8() + 1,
            _ => 0,
        },
        _ => general,
    };
    if last.is_ascii_digit() {
        return length;
    }
    length.max(length_after_digit(piece))
}

/// Returns the final full stops that are a suffix: a run of several, or one after certain characters.
fn final_dots(piece: &str) -> usize {
    let run = piece.bytes().rev().take_while(|&byte| byte == b'.').count();
    if run > 1 {
        return run;
    }
    let mut before = piece.chars().rev().skip(1);
    let (last, second) = (before.next(), before.next());
    let Some(last) = last else { return 0 };
    let is = |c: Option<char>, flags| c.is_some_and(|c| classes().is(c, flags));
    let splits = is(Some(last), BEFORE_FINAL_DOT)
        || is(Some(last), UPPER) && is(second, UPPER)
        || second == Some('°') && matches!(last, 'F' | 'f' | 'C' | 'c' | 'K' | 'k');
    usize::from(splits)
}

/// Appends the tokens of a piece that is split at its infixes.
fn split_infixes(text: &str, piece: Span, tokens: &mut Vec<Span>) {
    let (bytes, mut start) = (piece.of(text), 0);
    let mut push = |start, end| tokens.push(Span { start: piece.start + start, end: piece.start + end });
    let mut at = 0;
    let mut before = None;
    while let Some(c) = bytes.get(at..).and_then(|rest| rest.chars().next()) {
        let length = match c {
            'a'..='z' | 'A'..='Z' | '0'..='9' => 0,
            _ => infix_length(before, c, bytes.get(at + c.len_utf8()..).unwrap_or_default()),
        };
        if length == 0 {
            before = Some(c);
            at += c.len_utf8();
            continue;
        }
        // an infix is a run of one character
        before = Some(c);
        // spaCy leaves an infix at the start of a piece with what follows
        if at > 0 {
            if start < at {
                push(start, at);
            }
            push(at, at + length);
            start = at + length;
        }
        at += length;
    }
    if start < bytes.len() {
        push(start, bytes.len());
    }
}

/// Returns the bytes of the infix that starts with `c`, between the character before it and the text after `c`.
fn infix_length(before: Option<char>, c: char, after: &str) -> usize {
    let classes = classes();
    let is = |c: Option<char>, flags| c.is_some_and(|c| classes.is(c, flags));
    let digit_before = before.is_some_and(|c| c.is_ascii_digit());
    let next = after.chars().next();
    let length = c.len_utf8();
    match c {
        '.' if next == Some('.') => 1 + after.bytes().take_while(|&byte| byte == b'.').count(),
        '.' if is(before, LOWER | QUOTE) && is(next, UPPER | QUOTE) => 1,
        '+' | '-' | '*' | '^' if digit_before && next.is_some_and(|c| c.is_ascii_digit() || c == '-') => 1,
        ',' if is(before, LETTER) && is(next, LETTER) => 1,
        '-' | '–' | '—' | '~' if digit_before || is(before, LETTER) => {
            let most = match c {
                '-' => 3,
                '—' => 2,
                _ => 1,
            };
            let mut rest = after.chars();
            for count in 1..=most {
                match rest.next() {
                    Some(next) if classes.is(next, LETTER) => return count * length,
                    Some(next) if next == c => {}
                    _ => break,
                }
            }
            if classes.is(c, INFIX) { length } else { 0 }
        }
        ':' | '<' | '>' | '=' | '/' if (digit_before || is(before, LETTER)) && is(next, LETTER) => 1,
        _ if classes.is(c, INFIX) => length,
        _ => 0,
    }
}
