//! Reads batches of document pieces: the typed columns of [`crate::operator::documents_schema`].

use arrow::array::{Array, BooleanArray, RecordBatch, StringArray, UInt64Array};
use arrow::error::ArrowError;
use stillhouse_schemas::ids::DocumentId;

use crate::operator::OperatorError;
use crate::rows::column;

/// A piece of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DocumentPiece<'a> {
    pub id: u64,
    pub text: &'a str,
    /// Whether this is the document's last piece.
    pub end: bool,
}

/// Returns the pieces of a batch, in order.
pub(crate) fn document_pieces<'a>(
    batch: &'a RecordBatch,
    operator: &'static str,
) -> Result<impl Iterator<Item = DocumentPiece<'a>>, OperatorError> {
    let ids: &UInt64Array = typed_column(batch, "document_id", operator)?;
    let texts: &StringArray = typed_column(batch, "text", operator)?;
    let ends: &BooleanArray = typed_column(batch, "end", operator)?;
    Ok((0..batch.num_rows()).map(|i| DocumentPiece { id: ids.value(i), text: texts.value(i), end: ends.value(i) }))
}

/// Returns a column of a batch as type `A`.
pub(crate) fn typed_column<'a, A: Array + 'static>(
    batch: &'a RecordBatch,
    name: &str,
    operator: &'static str,
) -> Result<&'a A, OperatorError> {
    let array = column(batch, name).map_err(OperatorError::arrow(operator))?;
    array.as_any().downcast_ref::<A>().ok_or_else(|| OperatorError::Arrow {
        operator,
        source: ArrowError::SchemaError(format!("column {name} has the unexpected type {}", array.data_type())),
    })
}

/// Names a document for a message.
pub(crate) fn document_name(id: u64) -> String {
    let (split, ordinal) = DocumentId(id).parts();
    format!("document {ordinal} of split {}", split.0)
}

/// The error for a document without a last piece: the reader broke its contract.
pub(crate) fn unfinished_document(operator: &'static str, id: u64) -> OperatorError {
    OperatorError::Data {
        operator,
        place: document_name(id),
        message: "got no last piece; valid: pieces that follow one another, the last one with `end` true".into(),
    }
}
