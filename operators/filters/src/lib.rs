//! Rules that decide which documents of a corpus are kept, with the results of datatrove 0.10.1.
//!
//! ```
//! use stillhouse_filters::{Filter, Rule, Verdict};
//!
//! let rules: Vec<Rule> = serde_json::from_str(r#"[{"rule": "c4", "min_sentences": 2}, {"rule": "pii"}]"#).unwrap();
//! let filter = Filter::new(&rules).unwrap();
//! let verdict = filter.judge("This line remains. So does its end.\nThis one does not\nWrite to me@home.org, please.");
//! assert!(matches!(verdict, Verdict::Keep(text) if text == "This line remains. So does its end.\nWrite to email@example.com, please."));
//! assert!(matches!(filter.judge("Too short."), Verdict::Drop(reason) if reason.to_string() == "c4.too_few_sentences"));
//! ```
//!
//! ```text
//!   Rule (job file) ─► Filter::new ─► rules in order ─► judge(text) ─┬─► Keep: the text, which rules may have changed
//!                      check          share one split                └─► Drop: the first rule that drops it, its reason
//!                                     into words
//! ```
//!
//! | rule | datatrove | changes the text |
//! |---|---|---|
//! | `length`, `language`, `pattern` | no equivalent with equal results | no |
//! | `gopher_repetition` | `GopherRepetitionFilter` | no |
//! | `gopher_quality` | `GopherQualityFilter` | no |
//! | `c4` | `C4QualityFilter` | removes lines |
//! | `c4_paragraphs` | `C4ParagraphFilter` | no |
//! | `fineweb` | `FineWebQualityFilter` | no |
//! | `pii` | `PIIFormatter` | replaces addresses |
//!
//! Words and sentences are those of English text, see [`words`]. Characters are code points, and their classes are those of
//! Unicode 14.0.0, as in CPython 3.11. Results depend on the text and the rules alone.
//!
//! Differences from datatrove:
//! - `pii` starts with the first replacement in each document. datatrove's formatter counts on over all documents.
//! - Where a test of `gopher_quality` divides by zero, because a text has no words, datatrove raises an exception. The
//!   document is dropped as `gopher_short_doc` here.
//! - Addresses of `pii` are public as in CPython 3.11.7. Later versions also exclude most of 192.0.0.0/24.
//! - spaCy 3.8 raises an exception for the word `IS_ALPHA` if the process has met it before. datatrove then removes it
//!   from the text. It is always a word here.
//! - spaCy refuses texts of 2³⁰ characters and more.

mod document;
mod english;
mod hashing;
mod ngrams;
mod python;
mod rules;
#[cfg(test)]
mod tests;
mod unicode;
mod unicode_ranges;

use std::borrow::Cow;
use std::fmt::{self, Display};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use english::{sentences, words};
pub use rules::c4::{C4, C4Unit};
pub use rules::c4_paragraphs::C4Paragraphs;
pub use rules::fineweb::Fineweb;
pub use rules::gopher_quality::GopherQuality;
pub use rules::gopher_repetition::{GopherRepetition, NgramLimit};
pub use rules::language::Language;
pub use rules::length::Length;
pub use rules::pattern::Pattern;
pub use rules::pii::Pii;

use document::Document;
use rules::language::Languages;
use rules::pattern::Patterns;
use rules::{c4, c4_paragraphs, fineweb, gopher_quality, language, length, pattern};

/// One rule of the list `filter.rules` of a job file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "rule", rename_all = "snake_case", deny_unknown_fields)]
pub enum Rule {
    /// Bounds of the length.
    Length(Length),
    /// Languages to keep.
    Language(Language),
    /// Gopher's rules of repetition.
    GopherRepetition(GopherRepetition),
    /// Gopher's rules of quality.
    GopherQuality(GopherQuality),
    /// C4's rules, which remove lines.
    C4(C4),
    /// mC4's rule of long lines.
    C4Paragraphs(C4Paragraphs),
    /// FineWeb's rules of quality.
    Fineweb(Fineweb),
    /// Regular expressions.
    Pattern(Pattern),
    /// Replacement of e-mail and IP addresses.
    Pii(Pii),
}

impl Rule {
    /// Returns the value of the key `rule`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Length(_) => "length",
            Self::Language(_) => "language",
            Self::GopherRepetition(_) => "gopher_repetition",
            Self::GopherQuality(_) => "gopher_quality",
            Self::C4(_) => "c4",
            Self::C4Paragraphs(_) => "c4_paragraphs",
            Self::Fineweb(_) => "fineweb",
            Self::Pattern(_) => "pattern",
            Self::Pii(_) => "pii",
        }
    }

    /// Checks the options. [`Filter::new`] does the same.
    pub fn check(&self) -> Result<(), RuleError> {
        Compiled::new(self).map(drop)
    }

    /// Returns all reasons for which the rule can drop a document, in the order of its tests. They are datatrove's own.
    pub fn reasons(&self) -> Vec<&'static str> {
        match self {
            Self::Length(_) => length::REASONS.to_vec(),
            Self::Language(_) => language::REASONS.to_vec(),
            Self::GopherRepetition(rule) => rule.reasons(),
            Self::GopherQuality(_) => gopher_quality::REASONS.to_vec(),
            Self::C4(_) => c4::REASONS.to_vec(),
            Self::C4Paragraphs(_) => c4_paragraphs::REASONS.to_vec(),
            Self::Fineweb(_) => fineweb::REASONS.to_vec(),
            Self::Pattern(_) => pattern::REASONS.to_vec(),
            Self::Pii(_) => Vec::new(),
        }
    }
}

/// An option with an invalid value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {got}; valid: {valid}")]
pub struct RuleError {
    /// Rule and option, such as `gopher_quality.min_words`.
    pub field: String,
    /// The value.
    pub got: String,
    /// What is valid.
    pub valid: String,
}

impl RuleError {
    pub(crate) fn new(field: impl Display, got: impl Display, valid: impl Display) -> Self {
        Self { field: field.to_string(), got: got.to_string(), valid: valid.to_string() }
    }
}

/// The rules of a job, compiled, in its order.
pub struct Filter {
    rules: Vec<(&'static str, Compiled)>,
}

/// A checked rule.
enum Compiled {
    Length(Length),
    Language(Languages),
    GopherRepetition(GopherRepetition),
    GopherQuality(GopherQuality),
    C4(C4),
    C4Paragraphs(C4Paragraphs),
    Fineweb(Fineweb),
    Pattern(Patterns),
    Pii(Pii),
}

impl Compiled {
    fn new(rule: &Rule) -> Result<Self, RuleError> {
        Ok(match rule {
            Rule::Length(rule) => rule.check().map(|()| Self::Length(rule.clone()))?,
            Rule::Language(rule) => Self::Language(rule.compile()?),
            Rule::GopherRepetition(rule) => rule.check().map(|()| Self::GopherRepetition(rule.clone()))?,
            Rule::GopherQuality(rule) => rule.check().map(|()| Self::GopherQuality(rule.clone()))?,
            Rule::C4(rule) => rule.check().map(|()| Self::C4(rule.clone()))?,
            Rule::C4Paragraphs(rule) => rule.check().map(|()| Self::C4Paragraphs(rule.clone()))?,
            Rule::Fineweb(rule) => rule.check().map(|()| Self::Fineweb(rule.clone()))?,
            Rule::Pattern(rule) => Self::Pattern(rule.compile()?),
            Rule::Pii(rule) => rule.check().map(|()| Self::Pii(rule.clone()))?,
        })
    }

    /// Returns the reason to drop the document, if any. May change its text.
    fn judge(&self, document: &mut Document) -> Option<&'static str> {
        match self {
            Self::Length(rule) => rule.judge(document),
            Self::Language(rule) => rule.judge(document),
            Self::GopherRepetition(rule) => rule.judge(document),
            Self::GopherQuality(rule) => rule.judge(document),
            Self::C4(rule) => rule.judge(document),
            Self::C4Paragraphs(rule) => rule.judge(document),
            Self::Fineweb(rule) => rule.judge(document),
            Self::Pattern(rule) => rule.judge(document),
            Self::Pii(rule) => {
                rule.apply(document);
                None
            }
        }
    }
}

impl Filter {
    /// Checks and compiles the rules.
    pub fn new(rules: &[Rule]) -> Result<Self, RuleError> {
        let compile = |rule: &Rule| Ok((rule.name(), Compiled::new(rule)?));
        Ok(Self { rules: rules.iter().map(compile).collect::<Result<_, _>>()? })
    }

    /// Applies the rules in order until one drops the text.
    pub fn judge<'t>(&self, text: &'t str) -> Verdict<'t> {
        let mut document = Document::new(text);
        for (index, (name, rule)) in self.rules.iter().enumerate() {
            if let Some(reason) = rule.judge(&mut document) {
                return Verdict::Drop(Reason { rule: index, name, reason });
            }
        }
        Verdict::Keep(document.into_text())
    }
}

/// What the rules decide about a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict<'t> {
    /// The text to keep; owned if a rule changed it.
    Keep(Cow<'t, str>),
    /// The first rule that drops the document.
    Drop(Reason),
}

/// Why a document is dropped. Displayed as `gopher_quality.gopher_short_doc`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Reason {
    /// The rule's index in the job.
    pub rule: usize,
    /// The rule's name, see [`Rule::name`].
    pub name: &'static str,
    /// The reason, one of [`Rule::reasons`].
    pub reason: &'static str,
}

impl Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.name, self.reason)
    }
}
