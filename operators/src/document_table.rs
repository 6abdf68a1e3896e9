//! The table of a mixture to which a document belongs.

use std::sync::Arc;

use crate::document_pieces::document_name;
use crate::operator::{CarriedValues, OperatorError, SplitContext};

/// Finds the tables of documents, for counts by table.
#[derive(Debug, Clone)]
pub(crate) struct DocumentTables(Option<Arc<dyn CarriedValues>>);

impl DocumentTables {
    pub(crate) fn new(context: &SplitContext) -> Self {
        Self(context.carried.clone().filter(|values| values.is_mixture()))
    }

    /// Returns the name of a document's table; `None` if the input is no mixture.
    ///
    /// # Errors
    /// Fails if its values cannot be read.
    pub(crate) fn of_document(&self, document: u64, operator: &'static str) -> Result<Option<Arc<str>>, OperatorError> {
        let Some(values) = &self.0 else { return Ok(None) };
        let failed = |message: String| OperatorError::Data { operator, place: document_name(document), message };
        let values = values
            .of_document(document)
            .map_err(|e| failed(format!("cannot read the name of its table from a temporary file (TMPDIR): {e}")))?;
        let table = values.as_ref().and_then(|values| values.first()?.as_deref());
        Ok(Some(table.ok_or_else(|| failed("has no table: a bug in this program".into()))?.into()))
    }
}
