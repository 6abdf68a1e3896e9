//! `deduplicate`: drops documents that are duplicates of an earlier document of the whole input, and removes parts that occurred
//! before.
//!
//! ```text
//!  before the splits are made:
//!    [document_id, text, end] of every split ──► DocumentKeys ──► equal keys (pipeline) ──► list of duplicates
//!  for each split:
//!    [document_id, text, end] ──► is it in the list? ──┬─► no: kept, unchanged
//!                                                      ├─► parts of it: kept without them
//!                                                      └─► yes: dropped: counts and samples
//! ```
//!
//! Of documents that are duplicates of each other the first stays, in the order of document ids: by split, then by record. So the
//! list depends on the input and the options alone. `exact` compares texts ([`stillhouse_dedup::ExactKeys`]). `minhash`
//! compares bands of MinHash signatures and joins documents that share one, as datatrove does
//! ([`stillhouse_dedup::MinHash`], [`stillhouse_dedup::Clusters`]). `parts` compares paragraphs, lines or sentences of the
//! documents that stay; the first one stays.
//!
//! The operator does no I/O: the pipeline finds the duplicates and gives a [`DuplicateList`](crate::operator::DuplicateList) to [`SplitContext`].
//!
//! Cost: a look-up for each document; for the list, the input is read, cleaned and filtered once more
//! (docs/benchmarks/corpora.md has the cost of keys). Memory: the duplicates of a split, one input batch, its kept copy, and one
//! open document.

mod keys;
mod section;

use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_dedup::{ExactKeys, MinHashConfig};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use keys::{DocumentKeys, KeysOfDocument};
pub use section::{DeduplicateSection, ExactDocuments, PartUnit, RepeatedParts};

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::document_name;
use crate::judged_documents::{Judge, JudgeDocuments, Judgement};
use crate::operator::{Duplicate, Operator, OperatorError, SplitContext, documents_schema};

/// Name of the operator.
pub const NAME: &str = "deduplicate";

/// Configuration of `deduplicate`.
#[derive(Debug, Clone, PartialEq)]
pub struct DeduplicateConfig {
    /// How equal texts are found, if they are.
    pub exact: Option<ExactDocuments>,
    /// How near-duplicates are found, if they are.
    pub minhash: Option<MinHashConfig>,
    /// Which parts are removed if they occurred before, if any are.
    pub parts: Option<RepeatedParts>,
    /// Longest document that is compared, in bytes.
    pub max_document_bytes: usize,
    /// Memory for the keys that are compared at once, in bytes.
    pub memory_bytes: u64,
    /// Longest piece of a kept document, in bytes (`input.piece_kilobytes` · 1000).
    piece_bytes: usize,
}

impl OperatorConfig for DeduplicateConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<DeduplicateSection>());

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<DeduplicateSection>()? else { return Ok(None) };
        DocumentKeys::check(section.minhash.as_ref())?;
        Ok(Some(Self {
            exact: section.exact,
            minhash: section.minhash,
            parts: section.parts,
            max_document_bytes: section.max_document_megabytes as usize * 1_000_000,
            memory_bytes: u64::from(section.memory_megabytes) * 1_000_000,
            piece_bytes: context.spec.input.piece_kilobytes as usize * 1000,
        }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let missing = || OperatorError::Config {
            operator: NAME,
            message: "got no list of duplicates: a bug in this program".into(),
        };
        let duplicates = context.duplicates.as_ref().ok_or_else(missing)?.of_split(context.split)?;
        let sizes = (self.max_document_bytes, self.piece_bytes);
        let invalid =
            |e: stillhouse_dedup::OptionError| OperatorError::Config { operator: NAME, message: e.to_string() };
        let parts = self.parts.as_ref().map(|parts| ExactKeys::new(&parts.config())).transpose().map_err(invalid)?;
        Ok(Box::new(JudgeDocuments::new(NAME, Listed { duplicates, parts }, sizes, context)))
    }
}

/// Judges by a list of duplicates, in the order of documents and parts.
struct Listed {
    duplicates: Vec<Duplicate>,
    /// Finds the parts of a document, in a job that compares them.
    parts: Option<ExactKeys>,
}

impl Judge for Listed {
    fn judge<'t>(&self, id: u64, text: &'t str) -> Judgement<'t> {
        let begin = self.duplicates.partition_point(|duplicate| duplicate.document < id);
        let end = self.duplicates.partition_point(|duplicate| duplicate.document <= id);
        let drop = |duplicate: &Duplicate, what: &str| Judgement::Drop {
            reason: format!("{NAME}.{}", duplicate.kind.name()),
            problem: Some(format!("{what} {}", document_name(duplicate.first))),
        };
        match (self.duplicates.get(begin..end), &self.parts) {
            (Some([first @ Duplicate { part: Some(_), .. }, rest @ ..]), Some(parts)) => {
                let mut removed = std::iter::once(first).chain(rest).filter_map(|duplicate| duplicate.part).peekable();
                let numbered = (0..).zip(parts.keys(text));
                let mut is_removed = |number: &u32| removed.next_if_eq(number).is_some();
                let repeated: Vec<_> =
                    numbered.filter(|(number, _)| is_removed(number)).map(|(_, (range, _))| range).collect();
                match parts.without(text, &repeated) {
                    left if left.trim().is_empty() => drop(first, "nothing new; its first repeated part is in"),
                    left => Judgement::Keep(left),
                }
            }
            (Some([duplicate, ..]), _) => drop(duplicate, "a duplicate of"),
            _ => Judgement::Keep(text.into()),
        }
    }
}

#[cfg(test)]
mod tests;
