use std::sync::LazyLock;

use aho_corasick::AhoCorasick;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::document::Document;
use crate::python::{self, lower_for_ascii_search, split, split_lines, strip};
use crate::unicode::{DECIMAL, classes};
use crate::{RuleError, english};

/// The rules of C4 (<https://jmlr.org/papers/v21/20-074.html>), as datatrove's `C4QualityFilter` for English.
///
/// It removes lines from the text and drops documents of which too little remains.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct C4 {
    /// What the rule removes: lines or sentences.
    pub remove: C4Unit,
    /// Whether to remove citations such as `[12]`, `[edit]` and `[citation needed]` from the lines.
    pub remove_citations: bool,
    /// Whether to remove lines that do not end with `.`, `?`, `!`, `"` or `'`, or that end with `...`.
    pub remove_unterminated_lines: bool,
    /// Least number of sentences that remain; 0 switches the test off.
    pub min_sentences: Option<u64>,
    /// Least number of words of a line, split at white space; 0 switches the test off.
    pub min_words_per_line: Option<u64>,
    /// Largest number of characters of a word of a line.
    pub max_word_characters: Option<u64>,
    /// Whether to drop documents with the phrase `lorem ipsum` in a remaining line.
    pub drop_lorem_ipsum: bool,
    /// Whether to remove lines with the word `javascript`.
    pub remove_javascript_lines: bool,
    /// Whether to drop documents with a `{` in a remaining line.
    pub drop_curly_brackets: bool,
    /// Whether to remove lines about cookies, terms of use or privacy policies.
    pub remove_policy_lines: bool,
}

/// The unit that [`C4`] tests and removes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum C4Unit {
    /// Lines, as in the paper; they remain lines.
    #[default]
    Lines,
    /// Sentences, which are joined by a space.
    Sentences,
}

impl Default for C4 {
    fn default() -> Self {
        Self {
            remove: C4Unit::Lines,
            remove_citations: true,
            remove_unterminated_lines: true,
            min_sentences: Some(5),
            min_words_per_line: Some(3),
            max_word_characters: Some(1000),
            drop_lorem_ipsum: true,
            remove_javascript_lines: true,
            drop_curly_brackets: true,
            remove_policy_lines: true,
        }
    }
}

const LOREM_IPSUM: &str = "lorem_ipsum";
const CURLY_BRACKET: &str = "curly_bracket";
const TOO_FEW_SENTENCES: &str = "too_few_sentences";
pub(crate) const REASONS: &[&str] = &[LOREM_IPSUM, CURLY_BRACKET, TOO_FEW_SENTENCES];

const POLICIES: [&str; 6] =
    ["terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies"];

/// The first pattern is of `drop_lorem_ipsum`, the second of `remove_javascript_lines`, all others of
/// `remove_policy_lines`. `None` never occurs: the patterns are constants.
static PHRASES: LazyLock<Option<AhoCorasick>> = LazyLock::new(|| {
    let phrases = ["lorem ipsum", "javascript"].into_iter().chain(POLICIES);
    AhoCorasick::builder().ascii_case_insensitive(true).build(phrases).ok()
});

/// What to do with a line.
enum Line<'a> {
    Keep(std::borrow::Cow<'a, str>),
    Remove,
    DropDocument(&'static str),
}

impl C4 {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        match self.max_word_characters {
            Some(0) => Err(RuleError::new("c4.max_word_characters", 0, "at least 1")),
            _ => Ok(()),
        }
    }

    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let text = document.text();
        let separator = if self.remove == C4Unit::Lines { '\n' } else { ' ' };
        let lines: Box<dyn Iterator<Item = &str>> = match self.remove {
            C4Unit::Lines => Box::new(split_lines(text)),
            C4Unit::Sentences => Box::new(english::sentences(text).into_iter()),
        };
        let (least, mut sentences) = (self.min_sentences.unwrap_or(0), 0);
        let (mut kept, mut is_first) = (String::with_capacity(text.len()), true);
        for line in lines {
            let line = match self.judge_line(strip(line)) {
                Line::Keep(line) => line,
                Line::Remove => continue,
                Line::DropDocument(reason) => return Some(reason),
            };
            // more sentences than the limit change nothing
            if sentences < least {
                sentences += match self.remove {
                    C4Unit::Lines => english::count_sentences(&line) as u64,
                    C4Unit::Sentences => 1,
                };
            }
            if !std::mem::take(&mut is_first) {
                kept.push(separator);
            }
            kept.push_str(&line);
        }
        if sentences < least {
            return Some(TOO_FEW_SENTENCES);
        }
        let trimmed = strip(&kept);
        let kept = if trimmed.len() == kept.len() { kept } else { trimmed.to_owned() };
        document.replace(kept);
        None
    }

    /// Applies the tests in datatrove's order, which decides what drops a document with several faults.
    fn judge_line<'a>(&self, line: &'a str) -> Line<'a> {
        let (mut words, mut longest_allowed) = (0, true);
        for word in split(line) {
            words += 1;
            longest_allowed &= self
                .max_word_characters
                .is_none_or(|most| word.len() as u64 <= most || python::len(word) as u64 <= most);
        }
        if !longest_allowed {
            return Line::Remove;
        }
        let line = if self.remove_citations { without_citations(line) } else { line.into() };
        if self.remove_unterminated_lines && (!line.ends_with(['.', '?', '!', '"', '\'']) || line.ends_with("...")) {
            return Line::Remove;
        }
        if self.min_words_per_line.is_some_and(|least| words < least) {
            return Line::Remove;
        }
        let phrases = Phrases::of(&line);
        if self.drop_lorem_ipsum && phrases.lorem_ipsum {
            return Line::DropDocument(LOREM_IPSUM);
        }
        if self.remove_javascript_lines && phrases.javascript {
            return Line::Remove;
        }
        if self.drop_curly_brackets && line.contains('{') {
            return Line::DropDocument(CURLY_BRACKET);
        }
        if self.remove_policy_lines && phrases.policy {
            return Line::Remove;
        }
        Line::Keep(line)
    }
}

/// Which phrases a line contains.
#[derive(Default)]
struct Phrases {
    lorem_ipsum: bool,
    javascript: bool,
    policy: bool,
}

impl Phrases {
    fn of(line: &str) -> Self {
        let mut phrases = Self::default();
        let lower = lower_for_ascii_search(line);
        let matches = PHRASES.as_ref().into_iter().flat_map(|automaton| automaton.find_overlapping_iter(&*lower));
        for phrase in matches {
            match phrase.pattern().as_usize() {
                0 => phrases.lorem_ipsum = true,
                1 => phrases.javascript = true,
                _ => phrases.policy = true,
            }
        }
        phrases
    }
}

/// Removes `[`, decimal digits, `]`, and the notes `[edit]` and `[citation needed]`.
fn without_citations(line: &str) -> std::borrow::Cow<'_, str> {
    let mut kept = String::new();
    let (mut copied, mut from) = (0, 0);
    while let Some(open) = line.get(from..).and_then(|rest| memchr::memchr(b'[', rest.as_bytes())) {
        let open = from + open;
        from = open + 1;
        let inner = line.get(from..).unwrap_or_default();
        let note = ["edit", "citation needed"].into_iter().find_map(|note| inner.strip_prefix(note)?.strip_prefix(']'));
        let number = || inner.trim_start_matches(|c| classes().is(c, DECIMAL)).strip_prefix(']');
        if let Some(rest) = note.or_else(number) {
            kept.push_str(line.get(copied..open).unwrap_or_default());
            copied = line.len() - rest.len();
            from = copied;
        }
    }
    if copied == 0 {
        return line.into();
    }
    kept.push_str(line.get(copied..).unwrap_or_default());
    kept.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn citations_are_removed_once() {
        assert_eq!(without_citations("a[1]b[]c[edit]d[citation needed]e[x]f[٣]"), "abcde[x]f");
        assert_eq!(without_citations("[[1]]"), "[]");
        assert_eq!(without_citations("[1"), "[1");
    }

    #[test]
    fn phrases_are_found_in_any_case() {
        assert!(Phrases::of("Our PRIVACY Policy").policy && Phrases::of("use coo\u{212a}ies").policy);
        assert!(Phrases::of("xJavaScriptx").javascript && Phrases::of("LOREM ipsum").lorem_ipsum);
        assert!(!Phrases::of("java script, lorem  ipsum").javascript);
    }
}
