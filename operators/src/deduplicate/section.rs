//! The section `deduplicate` of a job: which documents count as duplicates of earlier ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_dedup::{ExactConfig, MinHashConfig, Normalization, OptionError, Unit};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec::JobSpec;

use super::{DocumentKeys, NAME};

/// Drops documents that are duplicates of an earlier document of the whole input: of equal text, of nearly equal text, or both.
/// Or removes parts that occurred before. The documents are those that `clean`, `filter` and `decontaminate` keep. For this, the input is read twice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Deduplicate")]
pub struct DeduplicateSection {
    /// Drops documents with the text of an earlier one; `{}` for the defaults.
    #[serde(default)]
    pub exact: Option<ExactDocuments>,
    /// Drops near-duplicates of an earlier document, by MinHash; `{}` for the defaults.
    #[serde(default)]
    pub minhash: Option<MinHashConfig>,
    /// Removes paragraphs, lines or sentences that occurred before in the documents that stay; a document of which nothing is
    /// left is dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<RepeatedParts>,
    /// Longest document that is compared, in megabytes (10^6 bytes) of text, which is held in memory. A longer one is
    /// dropped, as `deduplicate.too_large`.
    #[serde(default = "default_max_document")]
    #[schemars(range(min = 1, max = 512))]
    pub max_document_megabytes: u32,
    /// Memory for the keys that are compared at once, in megabytes (10^6 bytes). The others wait on the disk. In addition, a
    /// document takes 16 bytes.
    #[serde(default = "default_memory")]
    #[schemars(range(min = 64, max = 1_048_576))]
    #[schemars(extend("x-identity" = false))]
    pub memory_megabytes: u32,
}

/// What is compared of two documents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ExactDocuments {
    /// What is made equal before texts are compared; by default nothing.
    pub normalization: Normalization,
}

impl Default for ExactDocuments {
    fn default() -> Self {
        Self { normalization: Normalization::NONE }
    }
}

/// Which parts of documents are compared, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RepeatedParts {
    /// What a part is.
    pub unit: PartUnit,
    /// Sentences of a run, for the unit `sentences`. C4 (Raffel et al. 2020, section 2.2) has 3.
    #[serde(default = "default_sentences")]
    #[schemars(range(min = 1, max = 100))]
    pub sentences: u32,
    /// Least number of characters (code points) of a part, as it is compared. Shorter parts always stay.
    #[serde(default = "default_min_characters")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub min_characters: u32,
    /// What is made equal before parts are compared; by default nothing but white space at both ends.
    #[serde(default = "unchanged")]
    pub normalization: Normalization,
}

/// A part of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PartUnit {
    /// Lines between blank lines.
    Paragraph,
    /// A line.
    Line,
    /// Each run of `sentences` consecutive sentences of English text.
    Sentences,
}

impl RepeatedParts {
    pub(super) fn config(&self) -> ExactConfig {
        ExactConfig {
            unit: match self.unit {
                PartUnit::Paragraph => Unit::Paragraph,
                PartUnit::Line => Unit::Line,
                PartUnit::Sentences => Unit::Sentences,
            },
            sentences: self.sentences,
            min_characters: Some(self.min_characters),
            normalization: self.normalization.clone(),
        }
    }
}

fn default_sentences() -> u32 {
    3
}

fn default_min_characters() -> u32 {
    20
}

fn unchanged() -> Normalization {
    Normalization::NONE
}

fn default_max_document() -> u32 {
    16
}

fn default_memory() -> u32 {
    1000
}

impl ExactDocuments {
    pub(super) fn config(&self) -> ExactConfig {
        ExactConfig { normalization: self.normalization.clone(), ..ExactConfig::default() }
    }
}

pub(super) fn option_problem(error: &OptionError) -> Problem {
    Problem::new(format!("{NAME}.{}", error.field), &error.got, format!("not valid; valid: {}", error.valid))
}

impl Section for DeduplicateSection {
    const KEY: &'static str = NAME;

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if job.input.is_rows() {
            problems.push(Problem::missing(NAME, "compares text, and images and codes have none; remove it"));
        }
        if job.input.messages.is_some() {
            problems.push(Problem::missing(NAME, "compares text, not conversations, in this version; remove it"));
        }
        if self.exact.is_none() && self.minhash.is_none() && self.parts.is_none() {
            let message = "has none of `exact`, `minhash` and `parts`; valid: at least one, such as `exact: {}`";
            problems.push(Problem::missing(NAME, message));
        }
        problems.extend(DocumentKeys::check(self.minhash.as_ref()).err());
    }
}
