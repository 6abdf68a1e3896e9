//! Collects pieces of documents into record batches of bounded size.
//!
//! A batch is full at 1024 rows or 1 MB of text. It never exceeds 4 MB, except for a single longer piece.

use std::sync::Arc;

use arrow::array::{BooleanBuilder, RecordBatch, StringBuilder, UInt64Builder};
use arrow::datatypes::SchemaRef;
use stillhouse_operators::operator::documents_schema;
use stillhouse_schemas::ids::DocumentId;

use stillhouse_base::source_error::SourceError;

const MAX_ROWS: usize = 1024;
const FULL_BYTES: usize = 1 << 20;
const MAX_BYTES: usize = 4 << 20;

/// Collects pieces until they fill a batch.
pub(crate) struct BatchBuilder {
    schema: SchemaRef,
    ids: UInt64Builder,
    texts: StringBuilder,
    ends: BooleanBuilder,
    rows: usize,
    bytes: usize,
}

impl BatchBuilder {
    pub fn new() -> Self {
        Self {
            schema: documents_schema(),
            ids: UInt64Builder::new(),
            texts: StringBuilder::new(),
            ends: BooleanBuilder::new(),
            rows: 0,
            bytes: 0,
        }
    }

    /// Adds a piece. Returns the previous batch if both together would be too large. The batch must not be full.
    pub fn push(&mut self, id: DocumentId, text: &str, end: bool) -> Result<Option<RecordBatch>, SourceError> {
        let before = if self.bytes + text.len() > MAX_BYTES { self.close()? } else { None };
        self.ids.append_value(id.0);
        self.texts.append_value(text);
        self.ends.append_value(end);
        self.rows += 1;
        self.bytes += text.len();
        Ok(before)
    }

    /// Whether the batch accepts no further piece.
    pub fn is_full(&self) -> bool {
        self.rows >= MAX_ROWS || self.bytes >= FULL_BYTES
    }

    /// Bytes of text held.
    #[cfg(test)]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the collected rows as a batch, or `None` if there are none.
    pub fn close(&mut self) -> Result<Option<RecordBatch>, SourceError> {
        if self.rows == 0 {
            return Ok(None);
        }
        (self.rows, self.bytes) = (0, 0);
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(self.ids.finish()), Arc::new(self.texts.finish()), Arc::new(self.ends.finish())];
        let batch =
            RecordBatch::try_new(self.schema.clone(), columns).map_err(|e| SourceError::corrupt("documents", e))?;
        Ok(Some(batch))
    }
}
