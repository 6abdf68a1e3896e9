use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{check_limit, duplicates, share};
use crate::RuleError;
use crate::document::Document;
use crate::python::{self, strip};
use crate::unicode::{TERMINAL, classes};

/// The quality rules of FineWeb (<https://arxiv.org/abs/2406.17557>), as datatrove's `FineWebQualityFilter` for English.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Fineweb {
    /// Least share of lines that end with terminal punctuation, 0 to 1. Blank lines do not count.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub min_terminated_line_share: f64,
    /// Whether to keep documents in which no line ends with terminal punctuation.
    pub keep_if_no_line_is_terminated: bool,
    /// Line ends that are terminal punctuation. Default: datatrove's list, which covers many scripts.
    pub terminal_punctuation: Option<Vec<String>>,
    /// Largest share of short lines, 0 to 1. Blank lines do not count.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_short_line_share: f64,
    /// Largest number of characters of a short line.
    pub short_line_characters: u64,
    /// Largest share of characters in lines that occurred before, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_duplicate_line_character_share: f64,
    /// Largest number of newlines per word.
    #[schemars(range(min = 0.0))]
    pub max_newlines_per_word: f64,
}

impl Default for Fineweb {
    fn default() -> Self {
        Self {
            min_terminated_line_share: 0.12,
            keep_if_no_line_is_terminated: false,
            terminal_punctuation: None,
            max_short_line_share: 0.67,
            short_line_characters: 30,
            max_duplicate_line_character_share: 0.01,
            max_newlines_per_word: 0.3,
        }
    }
}

const EMPTY: &str = "empty";
const LINE_PUNCTUATION: &str = "line_punct_ratio";
const SHORT_LINES: &str = "short_line_ratio";
const DUPLICATES: &str = "char_dup_ratio";
const LIST: &str = "list_ratio";
pub(crate) const REASONS: &[&str] = &[EMPTY, LINE_PUNCTUATION, SHORT_LINES, DUPLICATES, LIST];

impl Fineweb {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        check_limit("fineweb.min_terminated_line_share", Some(self.min_terminated_line_share), 1.0)?;
        check_limit("fineweb.max_short_line_share", Some(self.max_short_line_share), 1.0)?;
        check_limit("fineweb.max_duplicate_line_character_share", Some(self.max_duplicate_line_character_share), 1.0)?;
        check_limit("fineweb.max_newlines_per_word", Some(self.max_newlines_per_word), f64::INFINITY)
    }

    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let text = document.text();
        let lines = || text.split('\n').filter(|line| !strip(line).is_empty());
        let (mut count, mut terminated, mut short) = (0, 0, 0);
        for line in lines() {
            count += 1;
            terminated += usize::from(self.is_terminated(line));
            short += usize::from(python::len(line) as u64 <= self.short_line_characters);
        }
        if count == 0 {
            return Some(EMPTY);
        }
        let kept_unterminated = terminated == 0 && self.keep_if_no_line_is_terminated;
        if share(terminated, count) < self.min_terminated_line_share && !kept_unterminated {
            return Some(LINE_PUNCTUATION);
        }
        if share(short, count) > self.max_short_line_share {
            return Some(SHORT_LINES);
        }
        let newlines = memchr::memchr_iter(b'\n', text.as_bytes()).count();
        let (_, duplicated) = duplicates(lines());
        if share(duplicated, python::len(text) - newlines) > self.max_duplicate_line_character_share {
            return Some(DUPLICATES);
        }
        let words = document.words().len();
        (share(newlines, words) > self.max_newlines_per_word).then_some(LIST)
    }

    fn is_terminated(&self, line: &str) -> bool {
        match &self.terminal_punctuation {
            None => line.chars().next_back().is_some_and(|c| classes().is(c, TERMINAL)),
            Some(ends) => ends.iter().any(|end| line.ends_with(end.as_str())),
        }
    }
}
