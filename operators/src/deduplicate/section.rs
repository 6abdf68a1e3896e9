//! The section `deduplicate` of a job: which documents count as duplicates of earlier ones.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_dedup::{ExactConfig, MinHashConfig, Normalization, OptionError};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec::JobSpec;

use super::{DocumentKeys, NAME};

/// Drops documents that are duplicates of an earlier document of the whole input: of equal text, of nearly equal text, or both.
/// The documents are those that `clean`, `filter` and `decontaminate` keep. For this, the input is read twice.
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
        if self.exact.is_none() && self.minhash.is_none() {
            problems.push(Problem::missing(
                NAME,
                "has neither `exact` nor `minhash`; valid: at least one, such as `exact: {}`",
            ));
        }
        problems.extend(DocumentKeys::check(self.minhash.as_ref()).err());
    }
}
