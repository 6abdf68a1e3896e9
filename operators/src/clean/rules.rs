//! The detokenizers of MDLM's `dataloader.py`, as tables of rules to apply one after the other.
//!
//! The tables follow what Python does, which differs from Rust's `regex` with the same pattern:
//!
//! | Python | Rust | why |
//! |---|---|---|
//! | `\s` | `[\s\x1c-\x1f]` | `str.isspace` includes the four separators U+001C to U+001F |
//! | `\w` | `[\p{L}\p{N}_]` | `str.isalnum`: no combining marks, but every numeric character |
//! | `$` | `(\n?)\z`, restored | Python's `$` also matches before a final newline |
//! | `str.strip` | trim the same white space | as `\s` |
//!
//! `re.sub` and `replace_all` agree on everything else that these patterns use: leftmost match, lazy repetition, no
//! overlaps, negated classes that match newlines.
//!
//! This module cleans a whole document; `stream.rs` applies the same rules to a document in pieces.
//!
//! Cost: one pass over the text per rule that matches; a rule that does not match copies nothing.

use std::borrow::Cow;
use std::sync::OnceLock;

use regex::Regex;

use super::Detokenizer;

/// One step of a detokenizer, as written in a table.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rule {
    /// Python's `str.replace`.
    Literal(&'static str, &'static str),
    /// The same `str.replace`, several times: a match consumes the blank that its neighbour needs.
    Repeat(usize, &'static str, &'static str),
    /// Python's `re.sub` with a pattern that matches a fixed number of characters.
    Pattern {
        pattern: &'static str,
        to: &'static str,
        /// Longest match in bytes.
        longest: usize,
    },
    /// `re.sub(r"\(\s*([^\)]*?)\s*\)", r"(\1)")`, for any pair of brackets.
    Stripped(char, char),
    /// `re.sub(r"\( ([^\(\)]+) \)", r"(\1)")`, for any pair of brackets.
    Spaced(char, char),
    /// `re.sub(r" (\w+) \. ", r" \1. ")`.
    WordStop,
    /// `re.sub(r" (\w+) \.$", r" \1.")`.
    WordStopAtEnd,
    /// `re.sub(r" \?$", r"?")`, for any mark.
    SpacedAtEnd(char),
    /// Prepends a newline and strips white space from both ends of the text.
    NewlineThenStripped,
}

use Rule::{Literal, NewlineThenStripped, Pattern, Repeat, Spaced, SpacedAtEnd, Stripped, WordStop, WordStopAtEnd};

impl Rule {
    /// Number of times to apply the rule in a row.
    pub(super) fn times(&self) -> usize {
        if let Repeat(times, ..) = self { *times } else { 1 }
    }
}

const WIKITEXT: &[Rule] = &[
    Literal("s '", "s'"),
    // The official replacement is this text, not the matched digit.
    Pattern { pattern: "/' [0-9]/", to: "/'[0-9]/", longest: 5 },
    Literal(" @-@ ", "-"),
    Literal(" @,@ ", ","),
    Literal(" @.@ ", "."),
    Literal(" : ", ": "),
    Literal(" ; ", "; "),
    Literal(" . ", ". "),
    Literal(" ! ", "! "),
    Literal(" ? ", "? "),
    Literal(" , ", ", "),
    Stripped('(', ')'),
    Stripped('[', ']'),
    Stripped('{', '}'),
    Stripped('"', '"'),
    Stripped('\'', '\''),
    Literal("= = = =", "===="),
    Literal("= = =", "==="),
    Literal("= =", "=="),
    Literal(" ° ", "°"),
    Literal(" \n", "\n"),
    Literal("\n ", "\n"),
    Literal(" N ", " 1 "),
    Literal(" 's", "'s"),
];

const PTB: &[Rule] = &[
    Literal(" 's", "'s"),
    Literal("s ' ", "s' "),
    Literal(" n't", "n't"),
    Literal(" \n ", "\n"),
    Literal("\\/", "/"),
    Repeat(10, " N ", " 1 "),
    Literal("$ 1", "$1"),
    Literal("# 1", "#1"),
    Literal("<unk>", "?"),
];

const LM1B: &[Rule] = &[
    Literal("http : / / ", "http://"),
    Literal("https : / / ", "https://"),
    // The official pattern matches the whole word; one character suffices, as no match begins inside a word.
    Pattern { pattern: r" '([\p{L}\p{N}_])", to: "'$1", longest: 6 },
    WordStop,
    WordStopAtEnd,
    Literal(" ? ", "? "),
    SpacedAtEnd('?'),
    Literal(" ! ", "! "),
    SpacedAtEnd('!'),
    Literal(" , ", ", "),
    Literal(" : ", ": "),
    Literal(" ; ", "; "),
    Literal(" / ", "/"),
    Spaced('"', '"'),
    Spaced('\'', '\''),
    Spaced('(', ')'),
    Spaced('[', ']'),
    Literal("$ ", "$"),
    Literal("£ ", "£"),
];

const LAMBADA: &[Rule] = &[Literal("“", "\""), Literal("”", "\""), NewlineThenStripped];

/// White space as in Python's `str.isspace`.
pub(super) fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// A compiled rule for a whole document.
#[derive(Debug)]
enum Step {
    Literal(usize, &'static str, &'static str),
    Pattern(Regex, String),
    NewlineThenStripped,
}

impl Step {
    fn new(rule: &Rule) -> Result<Self, regex::Error> {
        let pattern = |pattern: &str, to: &str| Ok(Self::Pattern(Regex::new(pattern)?, to.to_owned()));
        let escaped = |c: char| regex::escape(c.encode_utf8(&mut [0; 4]));
        match *rule {
            Literal(from, to) => Ok(Self::Literal(1, from, to)),
            Repeat(times, from, to) => Ok(Self::Literal(times, from, to)),
            Pattern { pattern: from, to, .. } => pattern(from, to),
            Stripped(open, close) => {
                let (o, c, space) = (escaped(open), escaped(close), r"[\s\x1c-\x1f]*");
                pattern(&format!("{o}{space}([^{c}]*?){space}{c}"), &format!("{open}$1{close}"))
            }
            Spaced(open, close) => {
                let (o, c) = (escaped(open), escaped(close));
                pattern(&format!("{o} ([^{o}{c}]+) {c}"), &format!("{open}$1{close}"))
            }
            WordStop => pattern(r" ([\p{L}\p{N}_]+) \. ", " $1. "),
            WordStopAtEnd => pattern(r" ([\p{L}\p{N}_]+) \.(\n?)\z", " $1.$2"),
            SpacedAtEnd(mark) => pattern(&format!(r" {}(\n?)\z", escaped(mark)), &format!("{mark}$1")),
            NewlineThenStripped => Ok(Self::NewlineThenStripped),
        }
    }

    fn apply<'t>(&self, mut text: Cow<'t, str>) -> Cow<'t, str> {
        match self {
            Self::Literal(times, from, to) => {
                for _ in 0..*times {
                    if !text.contains(from) {
                        break;
                    }
                    text = Cow::Owned(text.replace(from, to));
                }
                text
            }
            Self::Pattern(pattern, to) => replace_all(pattern, text, to),
            Self::NewlineThenStripped => Cow::Owned(format!("\n{}", text.trim_matches(is_python_space))),
        }
    }
}

fn replace_all<'t>(pattern: &Regex, text: Cow<'t, str>, to: &str) -> Cow<'t, str> {
    let changed = match pattern.replace_all(&text, to) {
        Cow::Borrowed(_) => None,
        Cow::Owned(changed) => Some(changed),
    };
    changed.map_or(text, Cow::Owned)
}

/// Returns the tables that a detokenizer applies, in order.
pub(super) fn tables(detokenizer: Detokenizer) -> &'static [&'static [Rule]] {
    match detokenizer {
        Detokenizer::None => &[],
        Detokenizer::Wikitext => &[WIKITEXT],
        Detokenizer::Ptb => &[PTB],
        Detokenizer::Lm1b => &[LM1B],
        Detokenizer::Lambada => &[LAMBADA],
        Detokenizer::ScientificPapers => &[WIKITEXT, LM1B],
    }
}

/// Applies a detokenizer to a whole text. Borrows the text if nothing changes.
///
/// ```
/// use stillhouse_operators::clean::{Detokenizer, detokenize};
///
/// assert_eq!(detokenize(Detokenizer::Wikitext, "3 @.@ 5 miles , ( about )"), "3.5 miles, (about)");
/// ```
pub fn detokenize(detokenizer: Detokenizer, text: &str) -> Cow<'_, str> {
    static STEPS: [OnceLock<Vec<Step>>; 6] = [const { OnceLock::new() }; 6];
    let steps = STEPS[detokenizer as usize].get_or_init(|| {
        // The patterns are constants and a test compiles all of them, so this drops no rule.
        tables(detokenizer).iter().copied().flatten().filter_map(|rule| Step::new(rule).ok()).collect()
    });
    steps.iter().fold(Cow::Borrowed(text), |text, step| step.apply(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_compiles() {
        for rule in [WIKITEXT, PTB, LM1B, LAMBADA].iter().copied().flatten() {
            Step::new(rule).unwrap();
        }
    }
}
