//! The section `decontaminate` of a job: the benchmarks whose text must not be trained on.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use stillhouse_dedup::{ContaminationConfig, Normalization};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionFile};
use stillhouse_schemas::spec::JobSpec;

use super::{BENCHMARKS, BENCHMARKS_FIELD, NAME};

/// Maximum size of the file of benchmarks, in bytes.
const MAX_BENCHMARK_BYTES: u64 = 64 << 20;

/// Drops documents that have text of a benchmark. They are judged after `filter`, and counted by benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Decontaminate")]
pub struct DecontaminateSection {
    /// A file of JSON lines, each `{"benchmark": NAME, "query": TEXT, "label": TEXT}`; `query` may be absent. A copy of it
    /// lies beside the shards.
    #[schemars(length(min = 1))]
    #[schemars(extend("x-identity" = false))]
    pub benchmarks: String,
    /// Words of the shortest run that a document must not share with a benchmark.
    #[serde(default = "default_ngram_words")]
    #[schemars(range(min = 1, max = 100))]
    pub ngram_words: u32,
    /// Whether runs of a query alone count. By default only runs with words of a label do.
    #[serde(default)]
    pub find_query_ngrams: bool,
    /// Whether runs that begin in a query and end in its label count.
    #[serde(default = "yes")]
    pub find_overlap_ngrams: bool,
    /// Longest document that is judged, in megabytes (10^6 bytes) of text, which is held in memory. A longer one is dropped,
    /// as `decontaminate.too_large`.
    #[serde(default = "default_max_document")]
    #[schemars(range(min = 1, max = 512))]
    pub max_document_megabytes: u32,
}

fn default_ngram_words() -> u32 {
    ContaminationConfig::default().ngram_words
}

fn yes() -> bool {
    true
}

fn default_max_document() -> u32 {
    16
}

impl DecontaminateSection {
    /// The options of the index.
    pub fn config(&self) -> ContaminationConfig {
        ContaminationConfig {
            ngram_words: self.ngram_words,
            find_query_ngrams: self.find_query_ngrams,
            find_overlap_ngrams: self.find_overlap_ngrams,
            normalization: Normalization::default(),
        }
    }
}

impl Section for DecontaminateSection {
    const KEY: &'static str = NAME;

    fn files(&self) -> Vec<SectionFile> {
        vec![SectionFile {
            field: BENCHMARKS_FIELD.into(),
            path: self.benchmarks.clone(),
            valid: "a file of JSON lines",
            max_bytes: MAX_BENCHMARK_BYTES,
            stored_as: Some(BENCHMARKS),
        }]
    }

    fn check(&self, job: &JobSpec, problems: &mut Vec<Problem>) {
        if job.input.is_rows() {
            problems.push(Problem::missing(NAME, "judges text, and images and codes have none; remove it"));
        }
        if job.input.messages.is_some() {
            problems.push(Problem::missing(NAME, "judges text, not conversations, in this version; remove it"));
        }
    }
}
