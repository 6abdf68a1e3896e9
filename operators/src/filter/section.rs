//! The section `filter` of a job: the rules that decide which documents are kept.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_filters::{Filter, Models, Rule, RuleError};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionFile};
use stillhouse_schemas::spec::JobSpec;

/// Largest model of a rule, in bytes: the classifier of DCLM (Li et al. 2024) has 2.4 GB. The process holds it once.
const MAX_MODEL_BYTES: u64 = 4 << 30;

/// Field of the model that a rule names.
pub(super) fn model_field(rule: usize) -> String {
    format!("filter.rules[{rule}].fasttext.model")
}

/// Rules that decide which documents are kept. They see the text after `clean`; what they drop is counted by rule and reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Filter")]
pub struct FilterSection {
    /// The rules, in the order in which they judge. The first rule that drops a document decides.
    #[schemars(length(min = 1, max = 64))]
    pub rules: Vec<Rule>,
    /// Longest document that the rules judge, in megabytes (10^6 bytes) of text, which is held in memory. A longer one is
    /// dropped, as `filter.too_large`.
    #[serde(default = "default_max_document")]
    #[schemars(range(min = 1, max = 512))]
    pub max_document_megabytes: u32,
}

fn default_max_document() -> u32 {
    16
}

impl FilterSection {
    /// Checks the options of the rules, and compares those with a model that was read with it.
    ///
    /// # Errors
    /// Returns the first that is not valid.
    pub(super) fn check_rules(&self, models: &Models) -> Result<(), Problem> {
        self.rules.iter().enumerate().try_for_each(|(i, rule)| {
            let checked = match rule.model() {
                Some(path) if models.contains_key(path) => Filter::new(std::slice::from_ref(rule), models).map(drop),
                _ => rule.check(),
            };
            checked.map_err(|e| rule_problem(&format!("filter.rules[{i}]"), &e))
        })
    }
}

fn rule_problem(field: &str, error: &RuleError) -> Problem {
    // the error of a regular expression shows it on lines of its own
    let valid = error.valid.split_whitespace().collect::<Vec<_>>().join(" ");
    Problem::new(format!("{field}.{}", error.field), &error.got, format!("not valid; valid: {valid}"))
}

impl Section for FilterSection {
    const KEY: &'static str = super::NAME;

    fn files(&self) -> Vec<SectionFile> {
        let file = |(i, rule): (usize, &Rule)| {
            Some(SectionFile {
                field: model_field(i).into(),
                path: rule.model()?.to_owned(),
                valid: "a .bin or .ftz file of fastText",
                max_bytes: MAX_MODEL_BYTES,
                // needed to make the shards, not to read or check them
                stored_as: None,
            })
        };
        self.rules.iter().enumerate().filter_map(file).collect()
    }

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if job.input.is_rows() {
            problems.push(Problem::missing(Self::KEY, "judges text, and images and codes have none; remove it"));
        }
        problems.extend(self.check_rules(&Models::new()).err());
    }
}
