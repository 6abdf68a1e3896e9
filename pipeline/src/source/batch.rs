//! Pieces of documents into record batches of bounded size.
//!
//! A batch is closed at 1024 rows or 1 MB of text; it never passes 4 MB, except for a single piece that is longer.

use std::sync::Arc;

use arrow::array::{BooleanBuilder, RecordBatch, StringBuilder, UInt64Builder};
use arrow::datatypes::SchemaRef;
use stillhouse_operators::operator::documents_schema;
use stillhouse_schemas::ids::DocumentId;

use super::error::{SourceError, Stopped};

const ROWS: usize = 1024;
const FULL_BYTES: usize = 1 << 20;
const LARGEST_BYTES: usize = 4 << 20;

/// Takes a batch to the next stage; blocks while that stage is busy.
pub(crate) type Emit<'a> = dyn FnMut(RecordBatch) -> Result<(), Stopped> + 'a;

/// Collects pieces and emits batches.
pub(crate) struct Batches<'a, 'b> {
    schema: SchemaRef,
    ids: UInt64Builder,
    texts: StringBuilder,
    ends: BooleanBuilder,
    rows: usize,
    bytes: usize,
    emit: &'a mut Emit<'b>,
}

impl<'a, 'b> Batches<'a, 'b> {
    pub fn new(emit: &'a mut Emit<'b>) -> Self {
        Self {
            schema: documents_schema(),
            ids: UInt64Builder::new(),
            texts: StringBuilder::new(),
            ends: BooleanBuilder::new(),
            rows: 0,
            bytes: 0,
            emit,
        }
    }

    pub fn push(&mut self, id: DocumentId, text: &str, end: bool) -> Result<(), SourceError> {
        if self.rows > 0 && self.bytes + text.len() > LARGEST_BYTES {
            self.flush()?;
        }
        self.ids.append_value(id.0);
        self.texts.append_value(text);
        self.ends.append_value(end);
        self.rows += 1;
        self.bytes += text.len();
        if self.rows >= ROWS || self.bytes >= FULL_BYTES {
            self.flush()?;
        }
        Ok(())
    }

    /// Emits what is held.
    pub fn flush(&mut self) -> Result<(), SourceError> {
        if self.rows == 0 {
            return Ok(());
        }
        (self.rows, self.bytes) = (0, 0);
        let columns: Vec<arrow::array::ArrayRef> =
            vec![Arc::new(self.ids.finish()), Arc::new(self.texts.finish()), Arc::new(self.ends.finish())];
        let batch =
            RecordBatch::try_new(self.schema.clone(), columns).map_err(|e| SourceError::corrupt("documents", e))?;
        (self.emit)(batch)?;
        Ok(())
    }
}
