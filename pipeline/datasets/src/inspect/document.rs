//! Where the tokens of a document of the input lie in a data set.

use arrow::array::{RecordBatch, UInt64Array};
use arrow::error::ArrowError;
use futures::TryStreamExt;
use serde::Serialize;
use serde_json::Value;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_operators::extract::sequences;
use stillhouse_operators::rows::ListRows;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_output::TOKENIZER;
use stillhouse_schemas::columns;
use stillhouse_schemas::ids::DocumentId;
use stillhouse_schemas::manifest::{DroppedDocument, Piece, ShardRecord};

use super::dropped::samples_of;
use super::values;
use crate::dataset::{Dataset, Selection};

/// Rows that are read at once.
const BATCH_ROWS: usize = 256;
/// Bytes of text of a document that are shown; in a data set, to the end of a batch of rows.
pub const MAX_TEXT_BYTES: usize = 1 << 20;

/// A document of the input, and what the data set holds of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DocumentTrace {
    /// Id of the document: `split`·2³² + `record`.
    pub document_id: u64,
    /// The split that read it.
    pub split: u32,
    /// Index of its record in the split, from 0. Bad records count too.
    pub record: u32,
    /// Data set split of the split.
    pub dataset_split: String,
    /// The files and ranges that the split reads, in order.
    pub pieces: Vec<Piece>,
    /// Its values of the names in `input.carry`, if it is in a row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fields: Option<Value>,
    /// Its tokens, in the order of the rows.
    pub parts: Vec<DocumentPart>,
    /// The rule and the reason for which a filter dropped it, if the shard has it as a sample.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropped: Option<String>,
    /// Documents of the split that filters dropped.
    pub dropped_in_split: u64,
}

/// The tokens of a document in one row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DocumentPart {
    /// Row, counted over all shards.
    pub row: u64,
    /// Id of the sequence.
    pub sequence_id: u64,
    /// Position of the first token.
    pub start: usize,
    /// End of the tokens, exclusive. Separators that follow the document count as its own.
    pub end: usize,
    /// The text of these tokens. None for images and codes, and beyond the first [`MAX_TEXT_BYTES`] of a document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Finds a document in its data set.
///
/// Cost: reads the ids of documents and the tokens of one shard.
///
/// # Errors
/// If there is no such split, or the shard cannot be read.
pub async fn trace_document(dataset: &Dataset, id: DocumentId) -> Result<DocumentTrace> {
    let manifest = dataset.manifest();
    let (split, record) = id.parts();
    let Some(found) = manifest.splits.iter().find(|s| s.split == split) else {
        let message = format!(
            "--document: got {}:{record}, valid: SPLIT:RECORD with a split from 0 to {}",
            split.0,
            manifest.splits.len().saturating_sub(1)
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    };
    let mut trace = DocumentTrace {
        document_id: id.0,
        split: split.0,
        record,
        dataset_split: found.dataset_split.clone(),
        pieces: found.pieces.clone(),
        fields: None,
        parts: Vec::new(),
        dropped: None,
        dropped_in_split: 0,
    };
    let mut before = 0;
    for shard in &manifest.shards {
        if shard.split == split {
            trace.parts = parts(dataset, shard, id, before).await?;
            if let Some(part) = trace.parts.first() {
                trace.fields = carried_fields(dataset, part.row, id).await?;
            }
            trace.dropped_in_split = shard.statistics.dropped.values().sum();
            if trace.parts.is_empty() && trace.dropped_in_split > 0 {
                let is_it = |sample: &DroppedDocument| sample.document_id == id.0;
                let reasons = samples_of(dataset, shard).await?;
                trace.dropped =
                    reasons.into_iter().find(|(_, samples)| samples.iter().any(is_it)).map(|(reason, _)| reason);
            }
        }
        before += shard.rows;
    }
    Ok(trace)
}

/// The carried values of a document of a row.
async fn carried_fields(dataset: &Dataset, row: u64, id: DocumentId) -> Result<Option<Value>> {
    if !dataset.manifest().columns.iter().any(|column| column.name == columns::DOCUMENT_FIELDS) {
        return Ok(None);
    }
    let wanted = [columns::DOCUMENT_IDS, columns::DOCUMENT_FIELDS].map(str::to_owned);
    let found = values::of_row(dataset, row, &wanted).await?;
    let list = |column: usize| found.get(column).and_then(|column| column.values.as_array());
    let (Some(ids), Some(fields)) = (list(0), list(1)) else { return Ok(None) };
    Ok(ids.iter().position(|entry| *entry == id.0).and_then(|at| fields.get(at)).cloned())
}

async fn parts(dataset: &Dataset, shard: &ShardRecord, id: DocumentId, rows_before: u64) -> Result<Vec<DocumentPart>> {
    let place = dataset.shown(&shard.path);
    let wanted = [
        columns::SEQUENCE_ID,
        columns::INPUT_IDS,
        columns::ATTENTION_MASK,
        columns::DOCUMENT_OFFSETS,
        columns::DOCUMENT_IDS,
    ];
    let is_there = |name: &&str| dataset.manifest().columns.iter().any(|column| column.name == **name);
    let names = wanted.iter().filter(|name| is_there(name)).map(|name| (*name).to_owned()).collect();
    let selection = Selection { columns: Some(names), offset: 0, limit: None, batch_rows: BATCH_ROWS };
    let vocabulary = match dataset.manifest().job.input.is_rows() {
        true => None,
        false => Some(
            Vocabulary::from_tokenizer(dataset.tokenizer().await?, TOKENIZER)
                .map_err(PipelineError::dataset(dataset.shown(TOKENIZER)))?,
        ),
    };
    let mut stream = dataset.read(shard, &selection).await?;
    let mut row = rows_before;
    let mut found: Vec<DocumentPart> = Vec::new();
    let mut text_bytes = 0;
    while let Some(batch) = stream.try_next().await.map_err(PipelineError::dataset(place.clone()))? {
        let vocabulary = vocabulary.as_ref().filter(|_| text_bytes < MAX_TEXT_BYTES);
        let parts = parts_of_batch(&batch, id, row, vocabulary).map_err(PipelineError::dataset(place.clone()))?;
        text_bytes += parts.iter().map(|part| part.text.as_ref().map_or(0, String::len)).sum::<usize>();
        found.extend(parts);
        row += batch.num_rows() as u64;
    }
    Ok(found)
}

/// The parts of a document in a batch whose first row has this number.
fn parts_of_batch(
    batch: &RecordBatch,
    id: DocumentId,
    first_row: u64,
    vocabulary: Option<&Vocabulary>,
) -> std::result::Result<Vec<DocumentPart>, ArrowError> {
    let ids = ListRows::from_batch(batch, columns::DOCUMENT_IDS)?;
    let values = ids.values::<UInt64Array>(columns::DOCUMENT_IDS)?;
    let mut found = Vec::new();
    for (i, sequence) in sequences(batch)?.iter().enumerate() {
        let ends = sequence.offsets.iter().skip(1).copied().chain([sequence.valid]);
        for ((start, end), at) in sequence.offsets.iter().copied().zip(ends).zip(ids.range(i)) {
            if values.value(at) == id.0 {
                let tokens = sequence.tokens.get(start..end).ok_or_else(|| {
                    let message = format!("{}: {start} to {end} is no part of a row", columns::DOCUMENT_OFFSETS);
                    ArrowError::InvalidArgumentError(message)
                })?;
                let text = vocabulary.map(|v| v.decode(tokens));
                found.push(DocumentPart { row: first_row + i as u64, sequence_id: sequence.id, start, end, text });
            }
        }
    }
    Ok(found)
}
