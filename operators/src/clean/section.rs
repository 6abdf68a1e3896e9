//! The section `clean` of a job: rules applied to the text before it is tokenized.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec::JobSpec;

/// Rules applied to the text.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
#[schemars(rename = "Clean")]
pub struct CleanSection {
    /// Undoes the tokenization that a benchmark corpus was published with.
    pub detokenizer: Detokenizer,
}

/// The five detokenizers of the MDLM code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Detokenizer {
    /// Text as it is.
    #[default]
    None,
    /// WikiText-2 and WikiText-103.
    Wikitext,
    /// Penn Treebank.
    Ptb,
    /// One Billion Words.
    Lm1b,
    /// LAMBADA.
    Lambada,
    /// PubMed and arXiv.
    ScientificPapers,
}

impl Section for CleanSection {
    const KEY: &'static str = super::NAME;

    /// No rules, which every job without the section has always had in its hash.
    fn when_absent() -> Option<Self> {
        Some(Self::default())
    }

    /// Rules for text do not apply to numbers.
    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if *self == Self::default() {
            return;
        }
        if job.input.is_rows() {
            let format = job.input.format().name();
            problems.push(Problem::missing(Self::KEY, format!("cleans text; leave it out with `format: {format}`")));
        }
        if job.input.messages.is_some() {
            problems
                .push(Problem::missing(Self::KEY, "cleans text; leave it out with conversations (`input.messages`)"));
        }
    }
}
