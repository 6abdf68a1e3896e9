//! Counts the documents that an operator drops, by reason, and keeps samples of them for the shard's footer.

use std::collections::BTreeMap;

use stillhouse_schemas::manifest::{DROPPED_DOCUMENTS, DroppedDocument};

use crate::document_pieces::{WholeDocument, beginning};
use crate::document_table::DocumentTables;
use crate::operator::{FooterEntries, OperatorError, SharedStatistics, SplitContext};

/// Samples per split and reason.
const SAMPLES: usize = 2;
/// Bytes of text of a sample.
const SAMPLE_BYTES: usize = 400;

/// The documents of a split that an operator dropped. Operators have different reasons.
#[derive(Debug)]
pub(crate) struct DroppedDocuments {
    /// The first documents of each reason.
    samples: BTreeMap<String, Vec<DroppedDocument>>,
    operator: &'static str,
    tables: DocumentTables,
    statistics: SharedStatistics,
    footer: FooterEntries,
}

impl DroppedDocuments {
    pub(crate) fn new(operator: &'static str, context: &SplitContext) -> Self {
        let (tables, samples) = (DocumentTables::new(context), BTreeMap::new());
        Self { samples, operator, tables, statistics: context.statistics.clone(), footer: context.footer.clone() }
    }

    /// Counts a document; `problem` says more than the reason.
    ///
    /// # Errors
    /// Fails in a mixture if the table of the document cannot be read.
    pub(crate) fn add(
        &mut self,
        reason: &str,
        document: &WholeDocument<'_>,
        problem: Option<&str>,
    ) -> Result<(), OperatorError> {
        let table = self.tables.of_document(document.id, self.operator)?;
        let mut statistics = self.statistics.lock();
        statistics.filtered_bytes += document.bytes as u64;
        *statistics.dropped.entry(reason.to_owned()).or_default() += 1;
        if let Some(table) = table {
            let of_table = statistics.sources.entry(table.to_string()).or_default();
            *of_table.dropped.entry(reason.to_owned()).or_default() += 1;
        }
        drop(statistics);
        let samples = self.samples.entry(reason.to_owned()).or_default();
        if samples.len() < SAMPLES {
            let text = beginning(&document.text, SAMPLE_BYTES).to_owned();
            samples.push(DroppedDocument {
                document_id: document.id,
                bytes: document.bytes as u64,
                text,
                problem: problem.map(|problem| beginning(problem, SAMPLE_BYTES).to_owned()),
            });
        }
        Ok(())
    }

    /// Writes the samples into the footer, at the end of the split.
    pub(crate) fn finish(&self) -> Result<(), OperatorError> {
        if self.samples.is_empty() {
            return Ok(());
        }
        let operator = self.operator;
        let json = |e: serde_json::Error| OperatorError::Config { operator, message: e.to_string() };
        let mut all = self.samples.clone();
        if let Some(others) = self.footer.get().get(DROPPED_DOCUMENTS) {
            all.extend(serde_json::from_str::<BTreeMap<_, _>>(others).map_err(json)?);
        }
        self.footer.set(DROPPED_DOCUMENTS, serde_json::to_string(&all).map_err(json)?);
        Ok(())
    }
}
