use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::RuleError;
use crate::document::Document;

/// Keeps documents with at least 3 long lines, the paragraphs of mC4, as datatrove's `C4ParagraphFilter`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct C4Paragraphs {
    /// Least number of characters of the third-longest line.
    pub min_paragraph_characters: u64,
}

impl Default for C4Paragraphs {
    fn default() -> Self {
        Self { min_paragraph_characters: 200 }
    }
}

const PARAGRAPHS: usize = 3;
const TOO_FEW_PARAGRAPHS: &str = "< 3 paragraphs";
pub(crate) const REASONS: &[&str] = &[TOO_FEW_PARAGRAPHS];

impl C4Paragraphs {
    pub(crate) fn check(&self) -> Result<(), RuleError> {
        Ok(())
    }

    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let least = usize::try_from(self.min_paragraph_characters).unwrap_or(usize::MAX);
        let is_long = |line: &&str| least == 0 || line.chars().nth(least - 1).is_some();
        let paragraphs = document.text().split('\n').filter(is_long).take(PARAGRAPHS).count();
        (paragraphs < PARAGRAPHS).then_some(TOO_FEW_PARAGRAPHS)
    }
}
