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

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::datatypes::{Schema, SchemaRef};
use serde::Deserialize;
use stillhouse_dedup::{ContaminationConfig, ContaminationIndex};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use section::DecontaminateSection;

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::beginning;
use crate::judged_documents::{Judge, JudgeDocuments, Judgement};
use crate::operator::{Operator, OperatorError, SplitContext, documents_schema};

const NAME: &str = "decontaminate";

/// Field of the section that names the file.
const BENCHMARKS_FIELD: &str = "decontaminate.benchmarks";
/// Name of the file beside the shards.
const BENCHMARKS: &str = "benchmarks.jsonl";

/// Maximum number of benchmarks, and of bytes of a name: every shard counts its dropped documents by name.
const MAX_BENCHMARKS: usize = 64;
const MAX_NAME_BYTES: usize = 64;

/// Configuration of `decontaminate`.
#[derive(Clone)]
pub struct DecontaminateConfig {
    options: ContaminationConfig,
    /// The file, JSON lines in UTF-8.
    benchmarks: Arc<[u8]>,
    /// Longest document that is judged, in bytes.
    max_document_bytes: usize,
    /// Longest piece of a kept document, in bytes (`input.piece_kilobytes` · 1000).
    piece_bytes: usize,
    /// The n-grams of the file, once a split needs them.
    index: Arc<Mutex<Option<Arc<ContaminationIndex>>>>,
}

impl fmt::Debug for DecontaminateConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DecontaminateConfig").field("options", &self.options).finish_non_exhaustive()
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

/// Checks the lines of a file of benchmarks. Makes n-grams up to the first one only: `verify` and `inspect` check files,
/// too, and use none.
fn check(text: &str, options: &ContaminationConfig) -> Result<(), Problem> {
    let problem = |message: String| Problem::missing(BENCHMARKS_FIELD, message);
    let (mut names, mut has_ngram) = (BTreeSet::new(), false);
    for example in examples(text) {
        let Example { benchmark, label, query } = example?;
        if benchmark.trim().is_empty() || benchmark.len() > MAX_NAME_BYTES {
            let got = beginning(&benchmark, MAX_NAME_BYTES);
            let message = format!("a line has the benchmark {got:?}; valid: a name of 1 to {MAX_NAME_BYTES} bytes");
            return Err(problem(message));
        }
        if label.is_empty() && query.as_ref().is_none_or(String::is_empty) {
            let message = format!("a line of {benchmark} has neither a query nor a label; valid: at least one text");
            return Err(problem(message));
        }
        if !has_ngram {
            let mut one = ContaminationIndex::builder(options).map_err(|e| problem(e.to_string()))?;
            one.add(&benchmark, query.as_deref(), &label);
            has_ngram = one.build().ngrams() > 0;
        }
        names.insert(benchmark);
        if names.len() > MAX_BENCHMARKS {
            let message = format!("names more than {MAX_BENCHMARKS} benchmarks; valid: one name for all its examples");
            return Err(problem(message));
        }
    }
    if names.is_empty() {
        return Err(problem("has no line; valid: at least one example of a benchmark".into()));
    }
    // without an n-gram, all documents would pass without a word
    if !has_ngram {
        let words = options.ngram_words;
        let message = format!(
            "has no run of {words} words; valid: longer texts, a smaller ngram_words, or find_query_ngrams: true"
        );
        return Err(problem(message));
    }
    Ok(())
}

/// Collects the n-grams of a file that [`check`] accepts.
fn collect_ngrams(text: &str, options: &ContaminationConfig) -> Result<ContaminationIndex, OperatorError> {
    let config = |message: String| OperatorError::Config { operator: NAME, message };
    let mut index = ContaminationIndex::builder(options).map_err(|e| config(e.to_string()))?;
    for example in examples(text) {
        let Example { benchmark, query, label } = example.map_err(|e| config(e.to_string()))?;
        index.add(&benchmark, query.as_deref(), &label);
    }
    Ok(index.build())
}

impl DecontaminateConfig {
    /// The n-grams, collected for the first split of a process. The lock keeps other splits from collecting them as well.
    fn index(&self) -> Result<Arc<ContaminationIndex>, OperatorError> {
        let mut index = self.index.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = index.as_ref() {
            return Ok(Arc::clone(index));
        }
        let text = std::str::from_utf8(&self.benchmarks)
            .map_err(|e| OperatorError::Config { operator: NAME, message: e.to_string() })?;
        let collected = Arc::new(collect_ngrams(text, &self.options)?);
        *index = Some(Arc::clone(&collected));
        Ok(collected)
    }
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
        check(text, &options)?;
        Ok(Some(Self {
            options,
            benchmarks: Arc::clone(file),
            max_document_bytes: section.max_document_megabytes as usize * 1_000_000,
            piece_bytes: context.spec.input.piece_kilobytes as usize * 1000,
            index: Arc::default(),
        }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        vec![(BENCHMARKS, self.benchmarks.to_vec())]
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let judge = Benchmarks(self.index()?);
        Ok(Box::new(JudgeDocuments::new(NAME, judge, (self.max_document_bytes, self.piece_bytes), context)))
    }
}

/// Judges by the n-grams of the benchmarks.
struct Benchmarks(Arc<ContaminationIndex>);

impl Judge for Benchmarks {
    fn judge<'t>(&self, _: u64, text: &'t str) -> Judgement<'t> {
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
