//! Rules that decide which documents of a corpus are kept, with the results of datatrove 0.10.1.
//!
//! ```
//! use stillhouse_filters::{Filter, Models, Rule, Verdict};
//!
//! let rules: Vec<Rule> = serde_json::from_str(r#"[{"c4": {"min_sentences": 2}}, {"pii": {}}]"#)?;
//! let filter = Filter::new(&rules, &Models::new())?;
//! let verdict = filter.judge("This line remains. So does its end.\nThis one does not\nWrite to me@home.org, please.");
//! assert!(matches!(verdict, Verdict::Keep(text) if text == "This line remains. So does its end.\nWrite to email@example.com, please."));
//! assert!(matches!(filter.judge("Too short."), Verdict::Drop(reason) if reason.to_string() == "c4.too_few_sentences"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
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
//! | `fasttext` | `FastTextClassifierFilter` | no |
//!
//! [`UrlBlocklist`] judges a document by its URL, as datatrove's `URLFilter` does.
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
//! - `fasttext` takes a line break for a space. datatrove removes line breaks unless it is told to replace them. Scores
//!   are computed in a fixed order, see [`FasttextModel`].
//! - spaCy refuses texts of 2³⁰ characters and more.

mod document;
mod english;
mod fasttext;
mod hashing;
mod ngrams;
mod python;
mod rules;
#[cfg(test)]
mod tests;
mod unicode;
mod unicode_ranges;
mod url;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Display};

use schemars::{JsonSchema, Schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

pub use english::{sentences, words};
pub use fasttext::{FasttextError, FasttextModel};
pub use rules::c4::{C4, C4Unit};
pub use rules::c4_paragraphs::C4Paragraphs;
pub use rules::fasttext::Fasttext;
pub use rules::fineweb::Fineweb;
pub use rules::gopher_quality::GopherQuality;
pub use rules::gopher_repetition::{GopherRepetition, NgramLimit};
pub use rules::language::Language;
pub use rules::length::Length;
pub use rules::pattern::Pattern;
pub use rules::pii::Pii;
pub use url::{BlockedUrl, UrlBlocklist, UrlLists, count_entries};

use document::Document;
use rules::fasttext::Classifier;
use rules::language::Languages;
use rules::pattern::Patterns;
use rules::{c4, c4_paragraphs, fasttext as by_fasttext, fineweb, gopher_quality, language, length, pattern};

/// One entry of the list `filter.rules` of a job file: an object whose only key is the rule's name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "FilterRule", transform = one_key)]
pub enum Rule {
    /// Documents that are too short or too long.
    Length(Length),
    /// Documents in another language.
    Language(Language),
    /// Documents that repeat themselves (Gopher, Rae et al. 2021, table A1).
    GopherRepetition(GopherRepetition),
    /// Documents that are no ordinary text (Gopher, Rae et al. 2021, section A.1.1).
    GopherQuality(GopherQuality),
    /// Drops lines, and documents with too little left (C4, Raffel et al. 2020, section 2.2). Changes the text.
    C4(C4),
    /// Documents without enough long paragraphs (mC4, Xue et al. 2021).
    C4Paragraphs(C4Paragraphs),
    /// Documents made of lists, short lines or repeated lines (FineWeb, Penedo et al. 2024).
    Fineweb(Fineweb),
    /// Documents that a regular expression matches, or does not match.
    Pattern(Pattern),
    /// Replaces e-mail addresses and public IP addresses. Changes the text and drops nothing.
    Pii(Pii),
    /// Documents with low or high scores of a fastText classifier (Joulin et al. 2017).
    Fasttext(Fasttext),
}

/// Writes the schema of an enum as one object with a property for each variant, of which exactly one is given. A message
/// about it then names the keys that are valid.
fn one_key(schema: &mut Schema) {
    let Some(Value::Array(variants)) = schema.remove("oneOf") else { return };
    let mut properties = Map::new();
    for mut variant in variants {
        let description = variant.get("description").cloned();
        let Some(Value::Object(of_variant)) = variant.get_mut("properties").map(Value::take) else { continue };
        for (name, mut property) in of_variant {
            if let (Some(property), Some(description)) = (property.as_object_mut(), &description) {
                property.insert("description".into(), description.clone());
            }
            properties.insert(name, property);
        }
    }
    schema.insert("type".into(), "object".into());
    schema.insert("properties".into(), properties.into());
    schema.insert("additionalProperties".into(), false.into());
    schema.insert("minProperties".into(), 1.into());
    schema.insert("maxProperties".into(), 1.into());
}

impl Rule {
    /// Returns the name of the rule in a job file.
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
            Self::Fasttext(_) => "fasttext",
        }
    }

    /// Checks the options. [`Filter::new`] does the same, and compares them with the models.
    pub fn check(&self) -> Result<(), RuleError> {
        match self {
            Self::Fasttext(rule) => rule.check(),
            rule => Compiled::new(rule, &Models::new()).map(drop),
        }
    }

    /// Returns the path of the file that the rule needs.
    pub fn model(&self) -> Option<&str> {
        if let Self::Fasttext(rule) = self { Some(&rule.model) } else { None }
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
            Self::Fasttext(_) => by_fasttext::REASONS.to_vec(),
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

/// The models that rules name, by their paths as the rules have them ([`Rule::model`]).
pub type Models = BTreeMap<String, FasttextModel>;

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
    Fasttext(Classifier),
}

impl Compiled {
    fn new(rule: &Rule, models: &Models) -> Result<Self, RuleError> {
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
            Rule::Fasttext(rule) => {
                let unread = || RuleError::new("fasttext.model", &rule.model, "a file that was read");
                Self::Fasttext(rule.compile(models.get(&rule.model).ok_or_else(unread)?)?)
            }
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
            Self::Fasttext(rule) => rule.judge(document),
        }
    }
}

impl Filter {
    /// Checks and compiles the rules. `models` has each model that they name.
    pub fn new(rules: &[Rule], models: &Models) -> Result<Self, RuleError> {
        let compile = |rule: &Rule| Ok((rule.name(), Compiled::new(rule, models)?));
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
