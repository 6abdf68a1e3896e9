use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use whatlang::Lang;

use super::check_limit;
use crate::RuleError;
use crate::document::Document;

/// Keeps documents in certain languages. `whatlang` detects the language from the letters and their trigrams.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Language {
    /// Languages to keep, as codes of ISO 639-3 such as `eng`.
    #[schemars(length(min = 1))]
    pub keep: Vec<String>,
    /// Least confidence of the detection, 0 to 1.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub min_confidence: f64,
}

impl Default for Language {
    fn default() -> Self {
        Self { keep: vec!["eng".to_owned()], min_confidence: 0.5 }
    }
}

const UNDETECTED: &str = "undetected";
const OTHER_LANGUAGE: &str = "other_language";
const NOT_CONFIDENT: &str = "not_confident";
pub(crate) const REASONS: &[&str] = &[UNDETECTED, OTHER_LANGUAGE, NOT_CONFIDENT];

/// The languages of the rule as whatlang's values.
pub(crate) struct Languages {
    keep: Vec<Lang>,
    min_confidence: f64,
}

impl Language {
    pub(crate) fn compile(&self) -> Result<Languages, RuleError> {
        check_limit("language.min_confidence", Some(self.min_confidence), 1.0)?;
        if self.keep.is_empty() {
            return Err(RuleError::new("language.keep", "[]", known_codes()));
        }
        let parse = |code: &String| Lang::from_code(code).ok_or(RuleError::new("language.keep", code, known_codes()));
        let keep = self.keep.iter().map(parse).collect::<Result<_, _>>()?;
        Ok(Languages { keep, min_confidence: self.min_confidence })
    }
}

fn known_codes() -> String {
    let codes: Vec<_> = Lang::all().iter().map(|language| language.code()).collect();
    format!("at least one of {}", codes.join(", "))
}

impl Languages {
    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        match whatlang::detect(document.text()) {
            None => Some(UNDETECTED),
            Some(info) if !self.keep.contains(&info.lang()) => Some(OTHER_LANGUAGE),
            Some(info) if info.confidence() < self.min_confidence => Some(NOT_CONFIDENT),
            Some(_) => None,
        }
    }
}
