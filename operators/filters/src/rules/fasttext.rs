use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::check_limit;
use crate::document::Document;
use crate::python;
use crate::{FasttextModel, RuleError};

/// Keeps or drops documents by the scores of a fastText classifier. Exactly one of `keep` and `drop` is given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Fasttext {
    /// The model, a `.bin` or `.ftz` file of fastText.
    #[schemars(length(min = 1))]
    pub model: String,
    /// Labels without `__label__`, and their least scores, 0 to 1. Drops a document that reaches none of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keep: BTreeMap<String, f64>,
    /// Labels without `__label__`, and their least scores, 0 to 1. Drops a document that reaches one of them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub drop: BTreeMap<String, f64>,
}

const LOW_SCORE: &str = "low_score";
const HIGH_SCORE: &str = "high_score";
pub(crate) const REASONS: &[&str] = &[LOW_SCORE, HIGH_SCORE];

/// Labels that a message lists.
const MAX_LISTED: usize = 20;

/// The rule with its model.
pub(crate) struct Classifier {
    model: FasttextModel,
    /// Indices of the labels, and their least scores.
    labels: Vec<usize>,
    least: Vec<f64>,
    keeps: bool,
}

impl Fasttext {
    /// Returns the key that lists labels, and the list.
    fn labels(&self) -> (&'static str, &BTreeMap<String, f64>) {
        if self.keep.is_empty() { ("fasttext.drop", &self.drop) } else { ("fasttext.keep", &self.keep) }
    }

    pub(crate) fn check(&self) -> Result<(), RuleError> {
        if self.keep.is_empty() == self.drop.is_empty() {
            let got = if self.keep.is_empty() { "{}" } else { "given beside fasttext.drop" };
            return Err(RuleError::new("fasttext.keep", got, "labels and their least scores in either keep or drop"));
        }
        let (field, labels) = self.labels();
        labels.iter().try_for_each(|(label, least)| check_limit(&format!("{field}.{label}"), Some(*least), 1.0))
    }

    /// Finds the labels in the model.
    pub(crate) fn compile(&self, model: &FasttextModel) -> Result<Classifier, RuleError> {
        self.check()?;
        let (field, labels) = self.labels();
        let find = |label: &String| {
            let found = model.labels().iter().position(|known| known == label);
            found.ok_or_else(|| RuleError::new(field, label, known_labels(model)))
        };
        Ok(Classifier {
            model: model.clone(),
            labels: labels.keys().map(find).collect::<Result<_, _>>()?,
            least: labels.values().copied().collect(),
            keeps: !self.keep.is_empty(),
        })
    }
}

fn known_labels(model: &FasttextModel) -> String {
    let labels = model.labels();
    let listed = labels.iter().take(MAX_LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    match labels.len().saturating_sub(MAX_LISTED) {
        0 => format!("labels of the model: {listed}"),
        more => format!("labels of the model: {listed} and {more} more"),
    }
}

impl Classifier {
    pub(crate) fn judge(&self, document: &mut Document) -> Option<&'static str> {
        let scores = self.model.scores(python::strip(document.text()), &self.labels);
        let reaches =
            |scores: Vec<f32>| scores.iter().zip(&self.least).any(|(&score, &least)| f64::from(score) >= least);
        match (self.keeps, scores.is_some_and(reaches)) {
            (true, false) => Some(LOW_SCORE),
            (false, true) => Some(HIGH_SCORE),
            _ => None,
        }
    }
}
