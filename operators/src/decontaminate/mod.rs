//! `decontaminate`: drops documents that have text of a benchmark, and counts them by benchmark.
//!
//! ```text
//!  benchmarks.jsonl ──► n-grams of words, normalised ──┐
//!  [document_id, text, end] ──► whole documents ───────┴─► the first shared n-gram ──┬─► none: kept, unchanged
//!                                                                                    └─► dropped: counts and samples
//! ```
//!
//! N-grams and what they find are those of datatrove's `NGramsDecontFilter` ([`stillhouse_dedup::ContaminationIndex`]). A
//! sample of a dropped document has the n-gram.
//!
//! Cost: the split into words, and one look-up for each. Memory: 20 bytes for each n-gram of the benchmarks, once for all
//! splits of a process, up to 64 while it is built; one input batch, its kept copy, and one open document.

mod section;

use std::fmt;
use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use serde::Deserialize;
use stillhouse_dedup::{ContaminationConfig, ContaminationIndex};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use section::DecontaminateSection;

use crate::config::{JobContext, OperatorConfig};
use crate::judged_documents::{Judge, JudgeDocuments, Judgement};
use crate::operator::{Operator, OperatorError, SplitContext, documents_schema};

const NAME: &str = "decontaminate";

/// Field of the section that names the file.
const BENCHMARKS_FIELD: &str = "decontaminate.benchmarks";
/// Name of the file beside the shards.
const BENCHMARKS: &str = "benchmarks.jsonl";

/// Configuration of `decontaminate`.
#[derive(Clone)]
pub struct DecontaminateConfig {
    options: ContaminationConfig,
    /// The file, JSON lines in UTF-8.
    benchmarks: Arc<str>,
    /// Longest document that is judged, in bytes.
    max_document_bytes: usize,
    /// Longest piece of a kept document, in bytes (`input.piece_kilobytes` · 1000).
    piece_bytes: usize,
    /// The n-grams of the file.
    index: Arc<ContaminationIndex>,
}

impl fmt::Debug for DecontaminateConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("DecontaminateConfig");
        shown.field("options", &self.options).field("ngrams", &self.index.ngrams()).finish_non_exhaustive()
    }
}

impl PartialEq for DecontaminateConfig {
    fn eq(&self, other: &Self) -> bool {
        let sizes = |config: &Self| (config.max_document_bytes, config.piece_bytes);
        sizes(self) == sizes(other) && self.options == other.options && self.benchmarks == other.benchmarks
    }
}

/// A line of the file.
#[derive(Deserialize)]
struct Example {
    benchmark: String,
    #[serde(default)]
    query: Option<String>,
    label: String,
}

/// The lines of a file of benchmarks, without empty ones.
fn examples(text: &str) -> impl Iterator<Item = Result<Example, Problem>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(i, line)| {
        serde_json::from_str(line).map_err(|e| {
            let message = format!(
                "line {}: {e}; valid: {{\"benchmark\": NAME, \"query\": TEXT, \"label\": TEXT}}, query may be absent",
                i + 1
            );
            Problem::missing(BENCHMARKS_FIELD, message)
        })
    })
}

/// Checks the lines of a file of benchmarks and collects their n-grams.
fn index(text: &str, options: &ContaminationConfig) -> Result<ContaminationIndex, Problem> {
    let problem = |message: String| Problem::missing(BENCHMARKS_FIELD, message);
    let mut index = ContaminationIndex::builder(options).map_err(|e| problem(e.to_string()))?;
    let mut is_empty = true;
    for example in examples(text) {
        let Example { benchmark, label, query } = example?;
        if benchmark.trim().is_empty() {
            return Err(problem("a line has an empty benchmark; valid: its name".into()));
        }
        if label.is_empty() && query.as_ref().is_none_or(String::is_empty) {
            let message = format!("a line of {benchmark} has neither a query nor a label; valid: at least one text");
            return Err(problem(message));
        }
        index.add(&benchmark, query.as_deref(), &label);
        is_empty = false;
    }
    if is_empty {
        return Err(problem("has no line; valid: at least one example of a benchmark".into()));
    }
    let index = index.build();
    // without an n-gram, all documents would pass without a word
    if index.ngrams() == 0 {
        let words = options.ngram_words;
        let message = format!(
            "has no run of {words} words; valid: longer texts, a smaller ngram_words, or find_query_ngrams: true"
        );
        return Err(problem(message));
    }
    Ok(index)
}

impl OperatorConfig for DecontaminateConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<DecontaminateSection>());
    const SIDECAR_FILES: &'static [&'static str] = &[BENCHMARKS];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<DecontaminateSection>()? else { return Ok(None) };
        let file = context.spec.sections.file(BENCHMARKS_FIELD);
        let file = file.ok_or_else(|| Problem::missing(BENCHMARKS_FIELD, "was not read"))?;
        let text =
            std::str::from_utf8(file).map_err(|e| Problem::missing(BENCHMARKS_FIELD, format!("is not UTF-8: {e}")))?;
        let options = section.config();
        Ok(Some(Self {
            index: Arc::new(index(text, &options)?),
            options,
            benchmarks: text.into(),
            max_document_bytes: section.max_document_megabytes as usize * 1_000_000,
            piece_bytes: context.spec.input.piece_kilobytes as usize * 1000,
        }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        vec![(BENCHMARKS, self.benchmarks.as_bytes().to_vec())]
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let judge = Benchmarks(Arc::clone(&self.index));
        Ok(Box::new(JudgeDocuments::new(NAME, judge, (self.max_document_bytes, self.piece_bytes), context)))
    }
}

/// Judges by the n-grams of the benchmarks.
struct Benchmarks(Arc<ContaminationIndex>);

impl Judge for Benchmarks {
    fn judge<'t>(&self, text: &'t str) -> Judgement<'t> {
        match self.0.find(text) {
            None => Judgement::Keep(text.into()),
            Some(hit) => {
                let problem = Some(format!("shares {:?}", hit.ngram));
                Judgement::Drop { reason: format!("{NAME}.{}", hit.benchmark), problem }
            }
        }
    }
}

#[cfg(test)]
mod tests;
