//! Reads batches of document pieces: the typed columns of [`crate::operator::documents_schema`]. [`WholeDocuments`] joins
//! the pieces of each document, for operators that need all of it.

use std::borrow::Cow;

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

/// Joins pieces into whole documents, up to a length. Memory: one document of that length.
#[derive(Debug)]
pub(crate) struct WholeDocuments {
    operator: &'static str,
    max_bytes: usize,
    open: Option<OpenDocument>,
}

/// A document of which more pieces follow.
#[derive(Debug)]
struct OpenDocument {
    id: u64,
    /// Its text so far; only the beginning once it is too large.
    text: String,
    bytes: usize,
}

/// A document that is complete.
#[derive(Debug)]
pub(crate) struct WholeDocument<'a> {
    pub id: u64,
    /// Its text; only the beginning if it is too large.
    pub text: Cow<'a, str>,
    /// Bytes of its text.
    pub bytes: usize,
    /// Whether it has more bytes than allowed.
    pub is_too_large: bool,
}

impl WholeDocuments {
    /// Bytes that are kept of a document that is too large, for messages and samples.
    const BEGINNING: usize = 1024;

    pub(crate) fn new(operator: &'static str, max_bytes: usize) -> Self {
        Self { operator, max_bytes, open: None }
    }

    /// Adds a piece. Returns the document that it completes.
    ///
    /// # Errors
    /// Fails if the piece belongs to another document than the open one.
    pub(crate) fn add<'a>(&mut self, piece: DocumentPiece<'a>) -> Result<Option<WholeDocument<'a>>, OperatorError> {
        let DocumentPiece { id, text, end } = piece;
        let mut open = match self.open.take() {
            Some(open) if open.id != id => return Err(unfinished_document(self.operator, open.id)),
            Some(open) => open,
            None if end => return Ok(Some(self.document(id, text.into(), text.len()))),
            None => OpenDocument { id, text: String::new(), bytes: 0 },
        };
        open.bytes += text.len();
        if open.bytes <= self.max_bytes {
            open.text.push_str(text);
        } else {
            let missing = Self::BEGINNING.saturating_sub(open.text.len());
            open.text.push_str(beginning(text, missing));
            open.text.truncate(open.text.floor_char_boundary(Self::BEGINNING));
        }
        if end {
            return Ok(Some(self.document(id, open.text.into(), open.bytes)));
        }
        self.open = Some(open);
        Ok(None)
    }

    fn document<'a>(&self, id: u64, text: Cow<'a, str>, bytes: usize) -> WholeDocument<'a> {
        WholeDocument { id, text, bytes, is_too_large: bytes > self.max_bytes }
    }

    /// Checks that no document is open at the end of a split.
    ///
    /// # Errors
    /// Fails if one is.
    pub(crate) fn finish(&self) -> Result<(), OperatorError> {
        self.open.as_ref().map_or(Ok(()), |open| Err(unfinished_document(self.operator, open.id)))
    }
}

/// Returns at most `bytes` bytes of a text, whole characters.
pub(crate) fn beginning(text: &str, bytes: usize) -> &str {
    text.get(..text.floor_char_boundary(bytes)).unwrap_or_default()
}
