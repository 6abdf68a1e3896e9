//! Turns finished texts into rows: the columns of `pack`, `given`, and those of the teacher.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, BooleanArray, Int32Array, RecordBatch, UInt64Array};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_noise::ExtractedColumns;
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::Statistics;

use super::{GIVEN, GenerateConfig, NAME};
use crate::config::with_columns;
use crate::extract::{BatchForward, HiddenConfig, HiddenStatesBuilder, PredictedPosition, hidden_state_error};
use crate::operator::{Counters, OperatorError};
use crate::rows::list_column;

/// A finished batch of texts.
#[derive(Debug)]
pub struct GeneratedBatch {
    /// The rows.
    pub batch: RecordBatch,
    /// Numbers to add to the statistics of the split.
    pub statistics: Statistics,
    /// Time that the device spent on the batch.
    pub busy: Duration,
}

/// A text that is being written.
pub(super) struct Text {
    /// Number of its batch, and its row in it.
    pub batch_and_row: (usize, usize),
    /// Sequence id: the key of its noise.
    pub id: u64,
    document: u64,
    /// Bos, prompt, and the tokens written so far.
    pub tokens: Vec<u32>,
    /// Number of given tokens: bos and the prompt.
    prompt_length: usize,
    /// Number of tokens that the teacher has processed.
    processed: usize,
    /// Signals of the written tokens.
    extracted: ExtractedColumns,
    /// The states from which they are predicted, if the job stores any.
    states: Option<HiddenStatesBuilder>,
    /// The error that stopped the text.
    pub error: Option<OperatorError>,
}

impl Text {
    /// Creates a text that begins with the given tokens.
    pub fn new(
        batch_and_row: (usize, usize),
        (id, document): (u64, u64),
        prompt: impl Iterator<Item = u32>,
        hidden: Option<&HiddenConfig>,
    ) -> Self {
        let tokens: Vec<u32> = prompt.collect();
        let prompt_length = tokens.len();
        let (extracted, states) =
            (ExtractedColumns::default(), hidden.map(|hidden| HiddenStatesBuilder::new(hidden.clone(), 0)));
        Self { batch_and_row, id, document, tokens, prompt_length, processed: 0, extracted, states, error: None }
    }

    /// Returns the tokens that the teacher has not processed yet.
    pub fn unprocessed(&self) -> &[u32] {
        &self.tokens[self.processed..]
    }

    /// Marks all tokens as processed by the teacher.
    pub const fn mark_processed(&mut self) {
        self.processed = self.tokens.len();
    }

    /// Appends a token with the signals in row `row` of a step, and the states `[layers, H]` it is predicted from.
    pub fn push_token(
        &mut self,
        token: u32,
        row: usize,
        extracted: &ExtractedColumns,
        states: &[f32],
    ) -> Result<(), OperatorError> {
        if let Some(kept) = &mut self.states {
            kept.push(states).map_err(|message| hidden_state_error((self.id, self.tokens.len()), message))?;
        }
        self.tokens.push(token);
        self.extracted.logprob.push(extracted.logprob[row]);
        self.extracted.signals.extend(extracted.signals.get(row).cloned());
        Ok(())
    }
}

/// Builds the rows of a batch whose texts have all ended, in order.
pub(super) fn build_rows(
    config: &GenerateConfig,
    texts: &mut [Text],
    busy: Duration,
) -> Result<GeneratedBatch, OperatorError> {
    let packed = pack_texts(config, texts).map_err(OperatorError::arrow(NAME))?;
    let extract = Arc::new(config.extract.clone());
    // the meter counted this work while it was done
    let mut columns = BatchForward::new(&extract, &packed, Arc::new(Counters::default()))?.columns(packed)?;
    for (row, text) in texts.iter_mut().enumerate() {
        let written = (text.prompt_length..text.tokens.len()).map(|position| PredictedPosition { row, position });
        let states = text.states.as_ref().map(HiddenStatesBuilder::to_f32_vec).unwrap_or_default();
        columns.store(&written.collect::<Vec<_>>(), std::mem::take(&mut text.extracted), &states)?;
    }
    let (batch, statistics) = columns.finish()?;
    Ok(GeneratedBatch { batch, statistics, busy })
}

fn pack_texts(config: &GenerateConfig, texts: &[Text]) -> Result<RecordBatch, ArrowError> {
    let (length, pad) = (config.length(), config.pack.pad.unwrap_or(config.eos));
    let lengths = vec![length; texts.len()];
    let (mut offsets, mut documents, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for text in texts {
        let starts = segment_starts(config, &text.tokens);
        documents.extend(starts.iter().map(|_| text.document));
        counts.push(starts.len());
        offsets.extend(starts);
    }
    let schema = config.pack.schema();
    let column = |field: &Field| -> Result<ArrayRef, ArrowError> {
        match field.name().as_str() {
            columns::SEQUENCE_ID => Ok(Arc::new(UInt64Array::from_iter_values(texts.iter().map(|text| text.id)))),
            columns::INPUT_IDS => {
                let padded = |text: &Text| {
                    let tokens = text.tokens.iter().copied().chain(std::iter::repeat(pad)).take(length);
                    tokens.map(|token| token as i32).collect::<Vec<_>>()
                };
                list_column(field, Arc::new(Int32Array::from_iter_values(texts.iter().flat_map(padded))), &lengths)
            }
            columns::ATTENTION_MASK => {
                let mask = texts.iter().flat_map(|text| (0..length).map(|i| Some(i < text.tokens.len())));
                list_column(field, Arc::new(mask.collect::<BooleanArray>()), &lengths)
            }
            columns::DOCUMENT_OFFSETS => {
                list_column(field, Arc::new(Int32Array::from_iter_values(offsets.iter().copied())), &counts)
            }
            _ => list_column(field, Arc::new(UInt64Array::from_iter_values(documents.iter().copied())), &counts),
        }
    };
    let arrays = schema.fields().iter().map(|field| column(field)).collect::<Result<_, _>>()?;
    let packed = RecordBatch::try_new(schema, arrays)?;
    let prompt_lengths = Int32Array::from_iter_values(texts.iter().map(|text| text.prompt_length as i32));
    with_columns(&packed, vec![Field::new(GIVEN, DataType::Int32, false)], vec![Arc::new(prompt_lengths)])
}

/// Returns the positions where the segments of a text begin: 0, and those that parsed special tokens begin.
fn segment_starts(config: &GenerateConfig, tokens: &[u32]) -> Vec<i32> {
    let (mut starts, mut at, mut continues_segment) = (vec![0], 1, true);
    for run in config.pack.segment_breaks.segment_runs(&tokens[1..]) {
        if at > 1 && (!continues_segment || run.begins_segment) {
            starts.push(at as i32);
        }
        at += run.tokens.len();
        continues_segment = !run.ends_segment;
    }
    starts
}
