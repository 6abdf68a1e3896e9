use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{active, check_limit, duplicates, share};
use crate::RuleError;
use crate::document::Document;
use crate::ngrams::{DuplicatedNgrams, TopNgrams};
use crate::python::{self, split_newlines, strip};

/// The repetition rules of Gopher (<https://arxiv.org/abs/2112.11446>), as datatrove's `GopherRepetitionFilter` for
/// English.
///
/// A share of characters is a number of characters divided by the characters of the text. 0 switches a test of
/// lines or paragraphs off; an empty list switches the tests of n-grams off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GopherRepetition {
    /// Largest share of lines that occurred before, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_duplicate_line_share: Option<f64>,
    /// Largest share of paragraphs that occurred before, 0 to 1. Blank lines separate paragraphs.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_duplicate_paragraph_share: Option<f64>,
    /// Largest share of characters in lines that occurred before, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_duplicate_line_character_share: Option<f64>,
    /// Largest share of characters in paragraphs that occurred before, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_duplicate_paragraph_character_share: Option<f64>,
    /// Largest shares of characters in all occurrences of the most frequent n-gram.
    pub top_ngrams: Vec<NgramLimit>,
    /// Largest shares of characters in n-grams that occurred before.
    pub duplicated_ngrams: Vec<NgramLimit>,
}

/// A limit for the n-grams of one length.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NgramLimit {
    /// Number of words of the n-grams, 1 to 20.
    #[schemars(range(min = 1, max = 20))]
    pub words: usize,
    /// Largest share of characters, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_character_share: f64,
}

impl Default for GopherRepetition {
    fn default() -> Self {
        let limit = |(words, max_character_share)| NgramLimit { words, max_character_share };
        Self {
            max_duplicate_line_share: Some(0.3),
            max_duplicate_paragraph_share: Some(0.3),
            max_duplicate_line_character_share: Some(0.2),
            max_duplicate_paragraph_character_share: Some(0.2),
            top_ngrams: [(2, 0.2), (3, 0.18), (4, 0.16)].map(limit).to_vec(),
            duplicated_ngrams: [(5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)].map(limit).to_vec(),
        }
    }
}

const EMPTY: &str = "empty";
const PARAGRAPHS: &str = "dup_para_frac";
const PARAGRAPH_CHARACTERS: &str = "dup_para_char_frac";
const LINES: &str = "dup_line_frac";
const LINE_CHARACTERS: &str = "dup_line_char_frac";
pub(crate) const REASONS: &[&str] = &[EMPTY, PARAGRAPHS, PARAGRAPH_CHARACTERS, LINES, LINE_CHARACTERS];

/// The reasons of n-grams of 1 to 20 words: of the most frequent one, and of duplicated ones.
macro_rules! ngram_reasons {
    ($($n:literal)*) => {
        (&[$(concat!("top_", $n, "_gram")),*], &[$(concat!("duplicated_", $n, "_n_grams")),*])
    };
}
const NGRAM_REASONS: (&[&str], &[&str]) = ngram_reasons!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20);

fn reason(reasons: &'static [&'static str], limit: &NgramLimit) -> &'static str {
    reasons.get(limit.words.wrapping_sub(1)).copied().unwrap_or_default()
}

impl GopherRepetition {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        let field = |name: &str| format!("gopher_repetition.{name}");
        check_limit(&field("max_duplicate_line_share"), self.max_duplicate_line_share, 1.0)?;
        check_limit(&field("max_duplicate_paragraph_share"), self.max_duplicate_paragraph_share, 1.0)?;
        check_limit(&field("max_duplicate_line_character_share"), self.max_duplicate_line_character_share, 1.0)?;
        check_limit(
            &field("max_duplicate_paragraph_character_share"),
            self.max_duplicate_paragraph_character_share,
            1.0,
        )?;
        for (name, limits) in [("top_ngrams", &self.top_ngrams), ("duplicated_ngrams", &self.duplicated_ngrams)] {
            for limit in limits {
                if !(1..=NGRAM_REASONS.0.len()).contains(&limit.words) {
                    return Err(RuleError::new(format!("gopher_repetition.{name}.words"), limit.words, "1 to 20"));
                }
                let field = format!("gopher_repetition.{name}.max_character_share");
                check_limit(&field, Some(limit.max_character_share), 1.0)?;
            }
        }
        Ok(())
    }

    pub(crate) fn reasons(&self) -> Vec<&'static str> {
        let top = self.top_ngrams.iter().map(|limit| reason(NGRAM_REASONS.0, limit));
        let duplicated = self.duplicated_ngrams.iter().map(|limit| reason(NGRAM_REASONS.1, limit));
        REASONS.iter().copied().chain(top).chain(duplicated).collect()
    }

    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let text = document.text();
        if text.is_empty() {
            return Some(EMPTY);
        }
        let characters = python::len(text);
        let exceeds = |count, total, most| active(most).is_some_and(|most| share(count, total) > most);

        let paragraphs = || split_newlines(strip(text), 2);
        let (duplicated, duplicated_characters) = duplicates(paragraphs());
        if duplicated > 0 && exceeds(duplicated, paragraphs().count(), self.max_duplicate_paragraph_share) {
            return Some(PARAGRAPHS);
        }
        if exceeds(duplicated_characters, characters, self.max_duplicate_paragraph_character_share) {
            return Some(PARAGRAPH_CHARACTERS);
        }

        let lines = || split_newlines(text, 1);
        let (duplicated, duplicated_characters) = duplicates(lines());
        if duplicated > 0 && exceeds(duplicated, lines().count(), self.max_duplicate_line_share) {
            return Some(LINES);
        }
        if exceeds(duplicated_characters, characters, self.max_duplicate_line_character_share) {
            return Some(LINE_CHARACTERS);
        }

        let words = document.words();
        let exceeds = |count: usize, limit: &NgramLimit| share(count, characters) > limit.max_character_share;
        let mut top = TopNgrams::new(words);
        for limit in &self.top_ngrams {
            if top.characters(limit.words).is_some_and(|count| exceeds(count, limit)) {
                return Some(reason(NGRAM_REASONS.0, limit));
            }
        }
        if self.duplicated_ngrams.is_empty() {
            return None;
        }
        let ngrams = DuplicatedNgrams::new(words);
        let limit = self.duplicated_ngrams.iter().find(|limit| exceeds(ngrams.characters(limit.words), limit));
        limit.map(|limit| reason(NGRAM_REASONS.1, limit))
    }
}
