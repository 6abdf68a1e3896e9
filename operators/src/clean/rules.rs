//! The detokenizers of MDLM's `dataloader.py`, as tables of rules applied one after the other.
//!
//! The tables hold to what Python does, not to what Rust's `regex` would do with the same pattern:
//!
//! | Python | here | why |
//! |---|---|---|
//! | `\s` | `[\s\x1c-\x1f]` | `str.isspace` counts the four separators U+001C to U+001F |
//! | `\w` | `[\p{L}\p{N}_]` | `str.isalnum`: no combining marks, but every numeric character |
//! | `$` | `(\n?)\z`, put back | Python's `$` also matches before a last newline |
//! | `str.strip` | trim over the same white space | as `\s` |
//!
//! `re.sub` and `replace_all` agree on everything else that these patterns use: leftmost match, lazy repetition,
//! no overlaps, negated classes that match newlines.
//!
//! Cost: one pass over the text per rule that matches; a rule that does not match copies nothing.

use std::borrow::Cow;
use std::sync::OnceLock;

use regex::Regex;
use stillhouse_schemas::spec::Detokenizer;

/// One step of a detokenizer, as it stands in a table.
#[derive(Debug, Clone, Copy)]
enum Rule {
    /// Python's `str.replace`.
    Literal(&'static str, &'static str),
    /// The same `str.replace`, several times over: a match takes the blank that its neighbour needs.
    Repeat(usize, &'static str, &'static str),
    /// Python's `re.sub`.
    Pattern(&'static str, &'static str),
    /// The same with a pattern that ends in `$`: for the end of the document only.
    AtEnd(&'static str, &'static str),
    /// A new line, then the text without white space at both ends.
    NewlineThenStripped,
}

use Rule::{AtEnd, Literal, NewlineThenStripped, Pattern, Repeat};

const WIKITEXT: &[Rule] = &[
    Literal("s '", "s'"),
    // The official replacement is this text, not a digit.
    Pattern("/' [0-9]/", "/'[0-9]/"),
    Literal(" @-@ ", "-"),
    Literal(" @,@ ", ","),
    Literal(" @.@ ", "."),
    Literal(" : ", ": "),
    Literal(" ; ", "; "),
    Literal(" . ", ". "),
    Literal(" ! ", "! "),
    Literal(" ? ", "? "),
    Literal(" , ", ", "),
    Pattern(r"\([\s\x1c-\x1f]*([^)]*?)[\s\x1c-\x1f]*\)", "($1)"),
    Pattern(r"\[[\s\x1c-\x1f]*([^\]]*?)[\s\x1c-\x1f]*\]", "[$1]"),
    Pattern(r"\{[\s\x1c-\x1f]*([^}]*?)[\s\x1c-\x1f]*\}", "{$1}"),
    Pattern(r#""[\s\x1c-\x1f]*([^"]*?)[\s\x1c-\x1f]*""#, r#""$1""#),
    Pattern(r"'[\s\x1c-\x1f]*([^']*?)[\s\x1c-\x1f]*'", "'$1'"),
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
    Pattern(r" '([\p{L}\p{N}_]+)", "'$1"),
    Pattern(r" ([\p{L}\p{N}_]+) \. ", " $1. "),
    AtEnd(r" ([\p{L}\p{N}_]+) \.(\n?)\z", " $1.$2"),
    Literal(" ? ", "? "),
    AtEnd(r" \?(\n?)\z", "?$1"),
    Literal(" ! ", "! "),
    AtEnd(r" !(\n?)\z", "!$1"),
    Literal(" , ", ", "),
    Literal(" : ", ": "),
    Literal(" ; ", "; "),
    Literal(" / ", "/"),
    Pattern(r#"" ([^"]+) ""#, r#""$1""#),
    Pattern("' ([^']+) '", "'$1'"),
    Pattern(r"\( ([^()]+) \)", "($1)"),
    Pattern(r"\[ ([^\[\]]+) \]", "[$1]"),
    Literal("$ ", "$"),
    Literal("£ ", "£"),
];

const LAMBADA: &[Rule] = &[Literal("“", "\""), Literal("”", "\""), NewlineThenStripped];

/// White space as Python's `str.isspace` has it.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// A rule that is ready to run.
#[derive(Debug)]
enum Step {
    Literal(usize, &'static str, &'static str),
    Pattern(Regex, &'static str),
    AtEnd(Regex, &'static str),
    NewlineThenStripped,
}

/// Which ends of its document a text has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ends {
    /// The text begins where the document begins.
    pub first: bool,
    /// The text ends where the document ends.
    pub last: bool,
}

impl Step {
    fn new(rule: &Rule) -> Result<Self, regex::Error> {
        Ok(match *rule {
            Literal(from, to) => Self::Literal(1, from, to),
            Repeat(times, from, to) => Self::Literal(times, from, to),
            Pattern(pattern, to) => Self::Pattern(Regex::new(pattern)?, to),
            AtEnd(pattern, to) => Self::AtEnd(Regex::new(pattern)?, to),
            NewlineThenStripped => Self::NewlineThenStripped,
        })
    }

    fn apply<'t>(&self, mut text: Cow<'t, str>, ends: Ends) -> Cow<'t, str> {
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
            Self::AtEnd(pattern, to) if ends.last => replace_all(pattern, text, to),
            Self::AtEnd(..) => text,
            Self::NewlineThenStripped => {
                let start = if ends.first { text.trim_start_matches(is_python_space) } else { &text };
                let stripped = if ends.last { start.trim_end_matches(is_python_space) } else { start };
                Cow::Owned(format!("{}{stripped}", if ends.first { "\n" } else { "" }))
            }
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

/// The tables that a detokenizer runs, in order.
fn tables(detokenizer: Detokenizer) -> &'static [&'static [Rule]] {
    match detokenizer {
        Detokenizer::None => &[],
        Detokenizer::Wikitext => &[WIKITEXT],
        Detokenizer::Ptb => &[PTB],
        Detokenizer::Lm1b => &[LM1B],
        Detokenizer::Lambada => &[LAMBADA],
        Detokenizer::ScientificPapers => &[WIKITEXT, LM1B],
    }
}

/// Applies a detokenizer to a whole text. Unchanged text is handed back as it came.
///
/// ```
/// use stillhouse_operators::clean::detokenize;
/// use stillhouse_schemas::spec::Detokenizer;
///
/// assert_eq!(detokenize(Detokenizer::Wikitext, "3 @.@ 5 miles , ( about )"), "3.5 miles, (about)");
/// ```
pub fn detokenize(detokenizer: Detokenizer, text: &str) -> Cow<'_, str> {
    detokenize_part(detokenizer, text, Ends { first: true, last: true })
}

/// [`detokenize`] for a part of a document: rules about the ends of the text apply at the ends of the document only.
pub(crate) fn detokenize_part(detokenizer: Detokenizer, text: &str, ends: Ends) -> Cow<'_, str> {
    static STEPS: [OnceLock<Vec<Step>>; 6] = [const { OnceLock::new() }; 6];
    let steps = STEPS[detokenizer as usize].get_or_init(|| {
        // The patterns are constants and a test compiles every one of them, so none is lost here.
        tables(detokenizer).iter().copied().flatten().filter_map(|rule| Step::new(rule).ok()).collect()
    });
    steps.iter().fold(Cow::Borrowed(text), |text, step| step.apply(text, ends))
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
