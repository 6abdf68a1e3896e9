//! `prompts`: makes a row with the beginning of a text from each document: `sequence_id` uint64, `document_id` uint64,
//! `prompt` list uint32.
//!
//! If prompts have tokens (`prompt_tokens` > 0), a document without any gets no text, as it gets no row from `pack`.
//! Memory: one batch of prompts, for documents of any length.

use std::sync::Arc;

use arrow::array::{RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::problems::Problem;

use crate::config::{JobContext, OperatorConfig};
use crate::document_pieces::unfinished_document;
use crate::operator::{Emit, Operator, OperatorError, SharedStatistics, SplitContext};
use crate::pack::{TokenPiece, token_pieces};
use crate::rows::list_column;

const NAME: &str = "prompts";
/// Rows per batch; a device has two batches per split.
pub(super) const ROWS_PER_BATCH: usize = 64;

/// Configuration of `prompts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptsConfig {
    /// Maximum tokens of each document that begin its text.
    pub tokens: usize,
}

impl OperatorConfig for PromptsConfig {
    const NAME: &'static str = NAME;

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        Ok(context.spec.sequential().map(|sequential| Self { tokens: sequential.prompt_tokens as usize }))
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        schema()
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        Ok(Box::new(Prompts {
            tokens: self.tokens,
            split: context.split,
            row_count: 0,
            document: None,
            ids: Vec::new(),
            prompts: Vec::new(),
            lengths: Vec::new(),
            statistics: context.statistics.clone(),
        }))
    }
}

pub(super) fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("sequence_id", DataType::UInt64, false),
        Field::new("document_id", DataType::UInt64, false),
        Field::new("prompt", DataType::new_list(DataType::UInt32, false), false),
    ]))
}

/// The operator.
struct Prompts {
    tokens: usize,
    split: SplitId,
    /// Rows so far, including those not yet emitted.
    row_count: u64,
    /// The document that has not ended yet.
    document: Option<u64>,
    /// Document ids of the rows not yet emitted; `prompts` holds their prompts, concatenated, and `lengths` the length
    /// of each.
    ids: Vec<u64>,
    prompts: Vec<u32>,
    lengths: Vec<usize>,
    statistics: SharedStatistics,
}

impl Prompts {
    fn add_piece(&mut self, piece: &TokenPiece<'_>) -> Result<(), OperatorError> {
        match self.document.replace(piece.id) {
            Some(open) if open != piece.id => return Err(unfinished_document(NAME, open)),
            Some(_) => {}
            None => {
                self.ids.push(piece.id);
                self.lengths.push(0);
            }
        }
        if let Some(length) = self.lengths.last_mut() {
            let taken = piece.tokens.len().min(self.tokens - *length);
            self.prompts.extend_from_slice(&piece.tokens[..taken]);
            *length += taken;
            self.statistics.lock().dropped_tokens += (piece.tokens.len() - taken) as u64;
        }
        if piece.end {
            self.document = None;
            if self.tokens > 0 && self.lengths.last() == Some(&0) {
                self.ids.pop();
                self.lengths.pop();
                self.statistics.lock().empty_documents += 1;
            } else {
                self.row_count += 1;
            }
        }
        Ok(())
    }

    fn flush(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let rows = self.lengths.len() as u64;
        if rows == 0 {
            return Ok(());
        }
        let last = u32::try_from(self.row_count - 1).map_err(|_| OperatorError::Data {
            operator: NAME,
            place: format!("split {}", self.split.0),
            message: format!("got {} rows, valid: up to 2^32 rows in a split", self.row_count),
        })?;
        let numbers = (last - (rows - 1) as u32)..=last;
        let arrow = OperatorError::arrow(NAME);
        let (schema, prompts) = (schema(), Arc::new(UInt32Array::from(std::mem::take(&mut self.prompts))));
        let prompts = list_column(schema.field(2), prompts, &std::mem::take(&mut self.lengths)).map_err(&arrow)?;
        let batch = RecordBatch::try_new(
            schema,
            vec![
                Arc::new(UInt64Array::from_iter_values(numbers.map(|row| self.split.sequence(row).0))),
                Arc::new(UInt64Array::from(std::mem::take(&mut self.ids))),
                prompts,
            ],
        );
        emit(batch.map_err(arrow)?)
    }
}

impl Operator for Prompts {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for piece in token_pieces(batch, false)? {
            self.add_piece(&piece)?;
            if self.document.is_none() && self.lengths.len() >= ROWS_PER_BATCH {
                self.flush(emit)?;
            }
        }
        Ok(())
    }

    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        match self.document {
            Some(open) => Err(unfinished_document(NAME, open)),
            None => self.flush(emit),
        }
    }
}
