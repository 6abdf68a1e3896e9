//! `filter`: drops documents by rules, and counts what each rule dropped and why.
//!
//! ```text
//!  [document_id, text, end] ──► whole documents ──► rules, on all cores ──┬─► kept: [document_id, text, end]
//!                                                                         └─► dropped: counts and samples by reason
//! ```
//!
//! The rules are those of [`stillhouse_filters`], whose results equal datatrove's. A rule judges a whole document, so a
//! document that arrives in pieces is held until its end, up to `filter.max_document_megabytes`. Kept documents leave in
//! pieces as they came, with the text as the rules changed it.
//!
//! Every document is either kept or counted in `Statistics::dropped`. The footer of the shard holds the first documents of
//! each reason (`dropped.rs`).
//!
//! Cost: the rules' own (docs/benchmarks/corpora.md). Memory: one input batch, its kept copy, and one open document.

mod section;

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{BooleanBuilder, RecordBatch, StringBuilder, UInt64Builder};
use arrow::datatypes::{Schema, SchemaRef};
use rayon::prelude::*;
use stillhouse_filters::{Filter, Rule, Verdict};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use section::FilterSection;

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::{WholeDocument, WholeDocuments, document_pieces};
use crate::dropped::DroppedDocuments;
use crate::operator::{Emit, Operator, OperatorError, SharedStatistics, SplitContext, documents_schema};

const NAME: &str = "filter";

/// Reason for a document that is longer than the rules may judge.
const TOO_LARGE: &str = "filter.too_large";

/// Text of kept documents in a batch, unless one piece is longer. Arrow's offsets end at 2^31.
const MAX_BATCH_BYTES: usize = 64 << 20;

/// Configuration of `filter`.
#[derive(Debug, Clone, PartialEq)]
pub struct FilterConfig {
    /// The rules, in order.
    pub rules: Vec<Rule>,
    /// Longest document that the rules judge, in bytes.
    pub max_document_bytes: usize,
    /// Longest piece of a kept document, in bytes (`input.piece_kilobytes` · 1000).
    pub piece_bytes: usize,
}

impl OperatorConfig for FilterConfig {
    const NAME: &'static str = NAME;
    const SECTION: Option<SectionKind> = Some(SectionKind::of::<FilterSection>());

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        let Some(section) = context.section::<FilterSection>()? else { return Ok(None) };
        section.check_rules()?;
        Ok(Some(Self {
            rules: section.rules,
            max_document_bytes: section.max_document_megabytes as usize * 1_000_000,
            piece_bytes: context.spec.input.piece_kilobytes as usize * 1000,
        }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let filter =
            Filter::new(&self.rules).map_err(|e| OperatorError::Config { operator: NAME, message: e.to_string() })?;
        Ok(Box::new(FilterDocuments {
            filter,
            piece_bytes: self.piece_bytes,
            documents: WholeDocuments::new(NAME, self.max_document_bytes),
            dropped: DroppedDocuments::new(context),
            statistics: context.statistics.clone(),
        }))
    }
}

/// The operator.
struct FilterDocuments {
    filter: Filter,
    piece_bytes: usize,
    documents: WholeDocuments,
    dropped: DroppedDocuments,
    statistics: SharedStatistics,
}

impl FilterDocuments {
    fn judge<'d>(&self, document: &'d WholeDocument<'_>) -> Result<Cow<'d, str>, String> {
        if document.is_too_large {
            return Err(TOO_LARGE.to_owned());
        }
        match self.filter.judge(&document.text) {
            Verdict::Keep(text) => Ok(text),
            Verdict::Drop(reason) => Err(reason.to_string()),
        }
    }
}

impl Operator for FilterDocuments {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let mut documents = Vec::with_capacity(batch.num_rows());
        for piece in document_pieces(batch, NAME)? {
            documents.extend(self.documents.add(piece)?);
        }
        let verdicts: Vec<_> = documents.par_iter().map(|document| self.judge(document)).collect();
        let mut kept = KeptPieces::new(self.piece_bytes);
        let mut cut_bytes = 0;
        for (document, verdict) in documents.iter().zip(verdicts) {
            match verdict {
                Ok(text) => {
                    // a rule may also make a text longer, for example by replacing an address
                    cut_bytes += document.bytes.saturating_sub(text.len()) as u64;
                    kept.push(document.id, &text, emit)?;
                }
                Err(reason) => self.dropped.add(&reason, document, None),
            }
        }
        self.statistics.lock().filtered_bytes += cut_bytes;
        kept.flush(emit)
    }

    fn finish(&mut self, _emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        self.documents.finish()?;
        self.dropped.finish(NAME)
    }
}

/// Collects the pieces of kept documents.
struct KeptPieces {
    piece_bytes: usize,
    ids: UInt64Builder,
    texts: StringBuilder,
    ends: BooleanBuilder,
}

impl KeptPieces {
    fn new(piece_bytes: usize) -> Self {
        Self { piece_bytes, ids: UInt64Builder::new(), texts: StringBuilder::new(), ends: BooleanBuilder::new() }
    }

    fn push(&mut self, id: u64, mut text: &str, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        loop {
            let (piece, rest) = text.split_at(text.floor_char_boundary(self.piece_bytes));
            if self.texts.values_slice().len() + piece.len() > MAX_BATCH_BYTES {
                self.flush(emit)?;
            }
            self.ids.append_value(id);
            self.texts.append_value(piece);
            self.ends.append_value(rest.is_empty());
            text = rest;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    fn flush(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let ids = self.ids.finish();
        if ids.is_empty() {
            return Ok(());
        }
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(ids), Arc::new(self.texts.finish()), Arc::new(self.ends.finish())];
        emit(RecordBatch::try_new(documents_schema(), columns).map_err(OperatorError::arrow(NAME))?)
    }
}

#[cfg(test)]
mod tests;
