//! `deduplicate`: drops documents that are duplicates of an earlier document of the whole input.
//!
//! ```text
//!  before the splits are made:
//!    [document_id, text, end] of every split ──► DocumentKeys ──► equal keys (pipeline) ──► list of duplicates
//!  for each split:
//!    [document_id, text, end] ──► is it in the list? ──┬─► no: kept, unchanged
//!                                                      └─► yes: dropped: counts and samples
//! ```
//!
//! Of documents that are duplicates of each other the first stays, in the order of document ids: by split, then by record. So the
//! list depends on the input and the options alone. `exact` compares texts ([`stillhouse_dedup::ExactKeys`]). `minhash`
//! compares bands of MinHash signatures and joins documents that share one, as datatrove does
//! ([`stillhouse_dedup::MinHash`], [`stillhouse_dedup::Clusters`]).
//!
//! The operator does no I/O: the pipeline finds the duplicates and gives a [`DuplicateList`](crate::operator::DuplicateList) to [`SplitContext`].
//!
//! Cost: a look-up for each document; for the list, the input is read, cleaned and filtered once more
//! (docs/benchmarks/corpora.md has the cost of keys). Memory: the duplicates of a split, one input batch, its kept copy, and one
//! open document.

mod keys;
mod section;

use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_dedup::MinHashConfig;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use keys::{DocumentKeys, KeysOfDocument};
pub use section::{DeduplicateSection, ExactDocuments};

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
        Ok(Box::new(JudgeDocuments::new(NAME, Listed(duplicates), sizes, context)))
    }
}

/// Judges by a list of duplicates, in the order of documents.
struct Listed(Vec<Duplicate>);

impl Judge for Listed {
    fn judge<'t>(&self, id: u64, text: &'t str) -> Judgement<'t> {
        let found = self.0.binary_search_by_key(&id, |duplicate| duplicate.document).ok().and_then(|at| self.0.get(at));
        match found {
            None => Judgement::Keep(text.into()),
            Some(duplicate) => Judgement::Drop {
                reason: format!("{NAME}.{}", duplicate.kind.name()),
                problem: Some(format!("a duplicate of {}", document_name(duplicate.first))),
            },
        }
    }
}

#[cfg(test)]
mod tests;
