//! The section `filter` of a job: the rules that decide which documents are kept.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_filters::{
    C4, C4Paragraphs, Fineweb, GopherQuality, GopherRepetition, Language, Length, Pattern, Pii, Rule, RuleError,
};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec::JobSpec;

/// Rules that decide which documents are kept. They see the text after `clean`; what they drop is counted by rule and reason.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Filter")]
pub struct FilterSection {
    /// The rules, in the order in which they judge. The first rule that drops a document decides.
    #[schemars(length(min = 1, max = 64))]
    pub rules: Vec<FilterRule>,
    /// Longest document that the rules judge, in megabytes (10^6 bytes) of text, which is held in memory. A longer one is
    /// dropped, as `filter.too_large`.
    #[serde(default = "default_max_document")]
    #[schemars(range(min = 1, max = 512))]
    pub max_document_megabytes: u32,
}

fn default_max_document() -> u32 {
    16
}

/// A rule: exactly one of these keys.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FilterRule {
    /// Documents that are too short or too long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub length: Option<Length>,
    /// Documents in another language.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub language: Option<Language>,
    /// Documents that repeat themselves (Gopher, Rae et al. 2021, table A1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gopher_repetition: Option<GopherRepetition>,
    /// Documents that are no ordinary text (Gopher, Rae et al. 2021, section A.1.1).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gopher_quality: Option<GopherQuality>,
    /// Drops lines, and documents with too little left (C4, Raffel et al. 2020, section 2.2). Changes the text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c4: Option<C4>,
    /// Documents without enough long paragraphs (mC4, Xue et al. 2021).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub c4_paragraphs: Option<C4Paragraphs>,
    /// Documents made of lists, short lines or repeated lines (FineWeb, Penedo et al. 2024).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fineweb: Option<Fineweb>,
    /// Documents that a regular expression matches, or does not match.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<Pattern>,
    /// Replaces e-mail addresses and public IP addresses. Changes the text and drops nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pii: Option<Pii>,
}

impl FilterRule {
    /// The names of the rules.
    const NAMES: &'static str =
        "length, language, gopher_repetition, gopher_quality, c4, c4_paragraphs, fineweb, pattern, pii";

    /// Returns the rules that it names; valid is exactly one.
    fn rules(&self) -> Vec<Rule> {
        let Self { length, language, gopher_repetition, gopher_quality, c4, c4_paragraphs, fineweb, pattern, pii } =
            self.clone();
        [
            length.map(Rule::Length),
            language.map(Rule::Language),
            gopher_repetition.map(Rule::GopherRepetition),
            gopher_quality.map(Rule::GopherQuality),
            c4.map(Rule::C4),
            c4_paragraphs.map(Rule::C4Paragraphs),
            fineweb.map(Rule::Fineweb),
            pattern.map(Rule::Pattern),
            pii.map(Rule::Pii),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl FilterSection {
    /// Returns the rules, in order.
    ///
    /// # Errors
    /// Returns the first entry that does not name exactly one rule, or whose rule is not valid.
    pub fn rules(&self) -> Result<Vec<Rule>, Problem> {
        let mut rules = Vec::with_capacity(self.rules.len());
        for (i, entry) in self.rules.iter().enumerate() {
            let field = format!("filter.rules[{i}]");
            let mut named = entry.rules();
            let rule = match (named.pop(), named.last()) {
                (Some(rule), None) => rule,
                (Some(last), Some(first)) => {
                    let got = format!("{} and {}", first.name(), last.name());
                    return Err(Problem::new(field, got, "one rule per entry; begin each with a dash of its own"));
                }
                (None, _) => {
                    let valid =
                        format!("names no rule; valid: one of {}, such as `gopher_quality: {{}}`", Self::names());
                    return Err(Problem::missing(field, valid));
                }
            };
            rule.check().map_err(|e| rule_problem(&field, &e))?;
            rules.push(rule);
        }
        Ok(rules)
    }

    fn names() -> &'static str {
        FilterRule::NAMES
    }
}

fn rule_problem(field: &str, error: &RuleError) -> Problem {
    // the error of a regular expression shows it on lines of its own
    let valid = error.valid.split_whitespace().collect::<Vec<_>>().join(" ");
    Problem::new(format!("{field}.{}", error.field), &error.got, format!("not valid; valid: {valid}"))
}

impl Section for FilterSection {
    const KEY: &'static str = super::NAME;

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if job.input.is_rows() {
            problems.push(Problem::missing(Self::KEY, "judges text, and images and codes have none; remove it"));
        }
        problems.extend(self.rules().err());
    }
}
