use regex::{RegexSet, RegexSetBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RuleError;
use crate::document::Document;

/// Drops or keeps documents by regular expressions (syntax of the Rust crate `regex`), searched anywhere in the text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Pattern {
    /// Drops a document that one of these expressions matches.
    pub drop_if_match: Vec<String>,
    /// Drops a document that none of these expressions matches; an empty list keeps all.
    pub keep_only_if_match: Vec<String>,
}

const MATCH: &str = "match";
const NO_MATCH: &str = "no_match";
pub(crate) const REASONS: &[&str] = &[MATCH, NO_MATCH];

/// Bytes that the compiled expressions of one list may take, and the cache of a search as well.
const SIZE_LIMIT: usize = 10 << 20;

/// The compiled expressions.
pub(crate) struct Patterns {
    drop_if_match: RegexSet,
    keep_only_if_match: RegexSet,
}

impl Pattern {
    pub(crate) fn compile(&self) -> Result<Patterns, RuleError> {
        if self.drop_if_match.is_empty() && self.keep_only_if_match.is_empty() {
            return Err(RuleError::new(
                "pattern.drop_if_match",
                "[]",
                "at least one expression in one of the two lists",
            ));
        }
        Ok(Patterns {
            drop_if_match: compile("pattern.drop_if_match", &self.drop_if_match)?,
            keep_only_if_match: compile("pattern.keep_only_if_match", &self.keep_only_if_match)?,
        })
    }
}

fn compile(field: &str, expressions: &[String]) -> Result<RegexSet, RuleError> {
    let build = |expressions: &[String]| {
        RegexSetBuilder::new(expressions).size_limit(SIZE_LIMIT).dfa_size_limit(SIZE_LIMIT).build()
    };
    build(expressions).map_err(|error| {
        // names the expression that fails alone; otherwise all of them together are too large
        let failing = expressions.iter().find(|expression| build(std::slice::from_ref(*expression)).is_err());
        let got = failing.cloned().unwrap_or_else(|| format!("{} expressions", expressions.len()));
        RuleError::new(field, got, format!("regular expressions that compile to at most 10 MiB: {error}"))
    })
}

impl Patterns {
    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let text = document.text();
        if self.drop_if_match.is_match(text) {
            return Some(MATCH);
        }
        if !self.keep_only_if_match.is_empty() && !self.keep_only_if_match.is_match(text) {
            return Some(NO_MATCH);
        }
        None
    }
}
