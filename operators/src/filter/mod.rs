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
//! Cost: the rules' own (docs/benchmarks/corpora.md). Memory: one input batch, its kept copy, one open document, and the
//! models of rules, once for all splits of a process.

mod section;

use std::sync::Arc;

use arrow::datatypes::{Schema, SchemaRef};
use stillhouse_filters::{FasttextModel, Filter, Models, Rule, Verdict};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;

pub use section::FilterSection;
use section::model_field;

use crate::config::{JobContext, OperatorConfig};
use crate::judged_documents::{Judge, JudgeDocuments, Judgement};
use crate::operator::{Operator, OperatorError, SplitContext, documents_schema};

const NAME: &str = "filter";

/// Configuration of `filter`.
#[derive(Debug, Clone, PartialEq)]
pub struct FilterConfig {
    /// The rules, in order.
    pub rules: Vec<Rule>,
    /// The models that rules name. Empty where shards are only read or checked.
    pub models: Models,
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
        let mut models = Models::new();
        for (i, path) in section.rules.iter().enumerate().filter_map(|(i, rule)| Some((i, rule.model()?))) {
            let field = model_field(i);
            if let Some(bytes) = context.spec.sections.file(&field)
                && !models.contains_key(path)
            {
                let model = FasttextModel::new(Arc::clone(bytes));
                let model = model.map_err(|e| Problem::new(field, format!("{path:?}"), e.to_string()))?;
                models.insert(path.to_owned(), model);
            }
        }
        section.check_rules(&models)?;
        Ok(Some(Self {
            rules: section.rules,
            models,
            max_document_bytes: section.max_document_megabytes as usize * 1_000_000,
            piece_bytes: context.spec.input.piece_kilobytes as usize * 1000,
        }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        documents_schema()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let filter = Filter::new(&self.rules, &self.models)
            .map_err(|e| OperatorError::Config { operator: NAME, message: e.to_string() })?;
        Ok(Box::new(JudgeDocuments::new(NAME, Rules(filter), (self.max_document_bytes, self.piece_bytes), context)))
    }
}

/// Judges by the rules.
struct Rules(Filter);

impl Judge for Rules {
    fn judge<'t>(&self, _: u64, text: &'t str) -> Judgement<'t> {
        match self.0.judge(text) {
            Verdict::Keep(text) => Judgement::Keep(text),
            Verdict::Drop(reason) => Judgement::Drop { reason: reason.to_string(), problem: None },
        }
    }
}

#[cfg(test)]
mod tests;
