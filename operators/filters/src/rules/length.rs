use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::check_order;
use crate::document::Document;
use crate::{RuleError, python};

/// Keeps documents of a length between bounds. Without a bound there is no limit.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Length {
    /// Least number of characters (code points) of the text.
    pub min_characters: Option<u64>,
    /// Largest number of characters (code points) of the text.
    pub max_characters: Option<u64>,
    /// Least number of words, punctuation included.
    pub min_words: Option<u64>,
    /// Largest number of words, punctuation included.
    pub max_words: Option<u64>,
}

const TOO_FEW_CHARACTERS: &str = "too_few_characters";
const TOO_MANY_CHARACTERS: &str = "too_many_characters";
const TOO_FEW_WORDS: &str = "too_few_words";
const TOO_MANY_WORDS: &str = "too_many_words";
pub(crate) const REASONS: &[&str] = &[TOO_FEW_CHARACTERS, TOO_MANY_CHARACTERS, TOO_FEW_WORDS, TOO_MANY_WORDS];

impl Length {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        if *self == Self::default() {
            let valid = "at least one of min_characters, max_characters, min_words, max_words";
            return Err(RuleError::new("length.min_words", "no bound", valid));
        }
        check_order(("length.min_characters", self.min_characters), ("length.max_characters", self.max_characters))?;
        check_order(("length.min_words", self.min_words), ("length.max_words", self.max_words))
    }

    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        if self.min_characters.is_some() || self.max_characters.is_some() {
            let characters = python::len(document.text()) as u64;
            if self.min_characters.is_some_and(|least| characters < least) {
                return Some(TOO_FEW_CHARACTERS);
            }
            if self.max_characters.is_some_and(|most| characters > most) {
                return Some(TOO_MANY_CHARACTERS);
            }
        }
        if self.min_words.is_some() || self.max_words.is_some() {
            let words = document.words().len() as u64;
            if self.min_words.is_some_and(|least| words < least) {
                return Some(TOO_FEW_WORDS);
            }
            if self.max_words.is_some_and(|most| words > most) {
                return Some(TOO_MANY_WORDS);
            }
        }
        None
    }
}
