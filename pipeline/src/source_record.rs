//! Reads one record of the input of a finished data set again.

use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use arrow::datatypes::UInt64Type;
use stillhouse_datasets::inspect::MAX_TEXT_BYTES;
use stillhouse_input_files::Listing;
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::Manifest;
use stillhouse_source::SplitReader;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::job::Prepared;

/// Returns the text of a document as the input has it, before any rule changes it: its first [`MAX_TEXT_BYTES`], then "…"
/// if it is longer.
///
/// Cost: reads the document's whole split, because only that shows whether the records are still those of the data set.
///
/// # Errors
/// If the job has no texts or a query, the data set has no such document, or the input has changed or cannot be read.
pub fn source_record(prepared: &Prepared, manifest: &Manifest, id: DocumentId) -> Result<String> {
    let usage = |message: String| PipelineError::new(ErrorKind::Usage, message);
    let (number, record) = id.parts();
    let input = &prepared.spec.input;
    if input.is_rows() || input.is_staged() {
        let staged = input.staged_by().map(|what| format!("rows of {what}, which are not kept"));
        let what = staged.unwrap_or_else(|| "images or codes".into());
        return Err(usage(format!("--job: the documents of this job are {what}; valid: a job that reads text")));
    }
    let split = manifest.splits.iter().find(|split| split.split == number);
    let shard = manifest.shards.iter().find(|shard| shard.split == number);
    let (Some(split), Some(shard)) = (split, shard) else {
        return Err(usage(format!("split {} has no shard, so what it read cannot be compared", number.0)));
    };
    let listing = Listing::new(Arc::new(prepared.files.clone()));
    let mut reader = SplitReader::new(&prepared.store, &listing, split.clone(), Arc::new(input.clone()));
    let (mut text, mut is_found) = (String::new(), false);
    for batch in &mut reader {
        let batch = batch.map_err(|e| PipelineError::source("input", e))?;
        is_found |= add_pieces(&batch, id, &mut text);
    }
    if reader.summary().sha256 != shard.input_sha256 {
        let message = format!(
            "the input of split {} is not what the data set was made of; valid: the files as they were and the job file of the \
             data set",
            number.0
        );
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    if !is_found {
        return Err(usage(format!("--document: split {} has no document {record}", number.0)));
    }
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES));
        text.push('…');
    }
    Ok(text)
}

/// Appends the pieces of a document that a batch has; whether there were any.
fn add_pieces(batch: &RecordBatch, id: DocumentId, text: &mut String) -> bool {
    let (Some(ids), Some(texts)) = (batch.column_by_name("document_id"), batch.column_by_name("text")) else {
        return false;
    };
    let (Some(ids), Some(texts)) = (ids.as_primitive_opt::<UInt64Type>(), texts.as_string_opt::<i32>()) else {
        return false;
    };
    let mut is_found = false;
    for (_, piece) in ids.values().iter().zip(texts.iter()).filter(|(piece, _)| **piece == id.0) {
        is_found = true;
        // a character more than is returned shows that there is more
        let room = (MAX_TEXT_BYTES + 4).saturating_sub(text.len());
        let piece = piece.unwrap_or_default();
        text.push_str(piece.get(..piece.floor_char_boundary(room)).unwrap_or_default());
    }
    is_found
}
