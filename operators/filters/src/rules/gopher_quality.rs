use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{active, check_limit, check_order, share};
use crate::RuleError;
use crate::document::Document;
use crate::hashing::FastSet;
use crate::python::{self, is_space, split_lines};
use crate::unicode::{ALPHABETIC, GOPHER_SYMBOL, classes};

/// The quality rules of Gopher (<https://arxiv.org/abs/2112.11446>), as datatrove's `GopherQualityFilter` for English.
///
/// 0 switches a test off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct GopherQuality {
    /// Least number of words that are not only punctuation.
    pub min_words: Option<u64>,
    /// Largest number of words that are not only punctuation.
    pub max_words: Option<u64>,
    /// Least mean length in characters of the words that are not only punctuation.
    #[schemars(range(min = 0.0))]
    pub min_mean_word_characters: Option<f64>,
    /// Largest mean length in characters of the words that are not only punctuation.
    #[schemars(range(min = 0.0))]
    pub max_mean_word_characters: Option<f64>,
    /// Largest number of `#` per word, and of ellipses per word.
    #[schemars(range(min = 0.0))]
    pub max_symbols_per_word: Option<f64>,
    /// Largest share of lines that start with `•` or `-`, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_bullet_line_share: Option<f64>,
    /// Largest share of lines that end with an ellipsis, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_ellipsis_line_share: Option<f64>,
    /// Least share of words with an alphabetic character, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub min_alphabetic_word_share: Option<f64>,
    /// Least number of different `stop_words` that occur.
    pub min_stop_words: Option<u64>,
    /// Stop words. They are compared with case.
    pub stop_words: Vec<String>,
}

impl Default for GopherQuality {
    fn default() -> Self {
        Self {
            min_words: Some(50),
            max_words: Some(100_000),
            min_mean_word_characters: Some(3.0),
            max_mean_word_characters: Some(10.0),
            max_symbols_per_word: Some(0.1),
            max_bullet_line_share: Some(0.9),
            max_ellipsis_line_share: Some(0.3),
            min_alphabetic_word_share: Some(0.8),
            min_stop_words: Some(2),
            stop_words: ["the", "be", "to", "of", "and", "that", "have", "with"].map(str::to_owned).to_vec(),
        }
    }
}

const SHORT: &str = "gopher_short_doc";
const LONG: &str = "gopher_long_doc";
const BELOW_MEAN: &str = "gopher_below_avg_threshold";
const ABOVE_MEAN: &str = "gopher_above_avg_threshold";
const HASHES: &str = "gopher_too_many_hashes";
const ELLIPSES: &str = "gopher_too_many_ellipsis";
const BULLETS: &str = "gopher_too_many_bullets";
const END_ELLIPSES: &str = "gopher_too_many_end_ellipsis";
const BELOW_ALPHABETIC: &str = "gopher_below_alpha_threshold";
const STOP_WORDS: &str = "gopher_enough_stop_words";
pub(crate) const REASONS: &[&str] =
    &[SHORT, LONG, BELOW_MEAN, ABOVE_MEAN, HASHES, ELLIPSES, BULLETS, END_ELLIPSES, BELOW_ALPHABETIC, STOP_WORDS];

impl GopherQuality {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        check_limit("gopher_quality.min_mean_word_characters", self.min_mean_word_characters, f64::INFINITY)?;
        check_limit("gopher_quality.max_mean_word_characters", self.max_mean_word_characters, f64::INFINITY)?;
        check_limit("gopher_quality.max_symbols_per_word", self.max_symbols_per_word, f64::INFINITY)?;
        check_limit("gopher_quality.max_bullet_line_share", self.max_bullet_line_share, 1.0)?;
        check_limit("gopher_quality.max_ellipsis_line_share", self.max_ellipsis_line_share, 1.0)?;
        check_limit("gopher_quality.min_alphabetic_word_share", self.min_alphabetic_word_share, 1.0)?;
        let on = |words: Option<u64>| words.filter(|&words| words != 0);
        check_order(
            ("gopher_quality.min_words", on(self.min_words)),
            ("gopher_quality.max_words", on(self.max_words)),
        )?;
        check_order(
            ("gopher_quality.min_mean_word_characters", active(self.min_mean_word_characters)),
            ("gopher_quality.max_mean_word_characters", active(self.max_mean_word_characters)),
        )?;
        let different = self.stop_words.iter().collect::<FastSet<_>>().len() as u64;
        match self.min_stop_words {
            Some(least) if least > different => Err(RuleError::new(
                "gopher_quality.min_stop_words",
                least,
                format!("at most {different}, the number of different stop_words"),
            )),
            _ => Ok(()),
        }
    }

    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let words = document.words();
        let classes = classes();
        let (mut counted, mut characters, mut alphabetic) = (0, 0, 0);
        for word in words.iter() {
            alphabetic += usize::from(word.chars().any(|c| classes.is(c, ALPHABETIC)));
            if word.chars().any(|c| !classes.is(c, GOPHER_SYMBOL)) {
                counted += 1;
                characters += python::len(word);
            }
        }
        if self.min_words.is_some_and(|least| (counted as u64) < least) {
            return Some(SHORT);
        }
        if self.max_words.is_some_and(|most| most != 0 && counted as u64 > most) {
            return Some(LONG);
        }
        // NaN if no word counts, as numpy's mean: both comparisons are then false
        let mean = share(characters, counted);
        if active(self.min_mean_word_characters).is_some_and(|least| mean < least) {
            return Some(BELOW_MEAN);
        }
        if active(self.max_mean_word_characters).is_some_and(|most| mean > most) {
            return Some(ABOVE_MEAN);
        }
        if words.len() == 0 && self.divides_by_words_or_lines(words.text) {
            return Some(SHORT);
        }
        self.judge_symbols(words.text, words.len()).or_else(|| self.judge_lines(words.text)).or_else(|| {
            if active(self.min_alphabetic_word_share).is_some_and(|least| share(alphabetic, words.len()) < least) {
                return Some(BELOW_ALPHABETIC);
            }
            let least = self.min_stop_words.filter(|&least| least != 0)?;
            let mut missing: FastSet<&str> = self.stop_words.iter().map(String::as_str).collect();
            let different = missing.len();
            words.iter().for_each(|word| {
                missing.remove(word);
            });
            (((different - missing.len()) as u64) < least).then_some(STOP_WORDS)
        })
    }

    /// Returns whether a test divides by the number of words or lines of a text without words, where datatrove raises
    /// an exception: a text of white space has lines.
    fn divides_by_words_or_lines(&self, text: &str) -> bool {
        let by_words = active(self.max_symbols_per_word).or(active(self.min_alphabetic_word_share));
        let by_lines = active(self.max_bullet_line_share).or(active(self.max_ellipsis_line_share));
        by_words.is_some() || by_lines.is_some() && text.is_empty()
    }

    fn judge_symbols(&self, text: &str, words: usize) -> Option<&'static str> {
        let most = active(self.max_symbols_per_word)?;
        if share(memchr::memchr_iter(b'#', text.as_bytes()).count(), words) > most {
            return Some(HASHES);
        }
        let ellipses = text.matches("...").count() + text.matches('…').count();
        (share(ellipses, words) > most).then_some(ELLIPSES)
    }

    fn judge_lines(&self, text: &str) -> Option<&'static str> {
        let (mut lines, mut bullets, mut ellipses) = (0, 0, 0);
        for line in split_lines(text) {
            lines += 1;
            bullets += usize::from(line.trim_start_matches(is_space).starts_with(['•', '-']));
            let end = line.trim_end_matches(is_space);
            ellipses += usize::from(end.ends_with("...") || end.ends_with('…'));
        }
        if active(self.max_bullet_line_share).is_some_and(|most| share(bullets, lines) > most) {
            return Some(BULLETS);
        }
        active(self.max_ellipsis_line_share).filter(|&most| share(ellipses, lines) > most).map(|_| END_ELLIPSES)
    }
}
