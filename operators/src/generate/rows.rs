//! Turns finished texts into rows: the columns of `pack`, `given`, and those of the teacher.

use std::sync::Arc;
use std::time::Duration;

use arrow::array::{ArrayRef, BooleanArray, Int32Array, RecordBatch, UInt64Array};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use stillhouse_noise::Extracted;
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::Statistics;

use super::{GIVEN, GenerateConfig, NAME};
use crate::config::with_columns;
use crate::extract::{Forward, HiddenConfig, Predicted, States, unfit};
use crate::operator::{Counters, OperatorError};
use crate::rows::list_column;

/// A finished batch of texts.
#[derive(Debug)]
pub struct Written {
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
    pub place: (usize, usize),
    /// Sequence id: the key of its noise.
    pub id: u64,
    document: u64,
    /// Bos, prompt, and the tokens written so far.
    pub tokens: Vec<u32>,
    given: usize,
    /// Number of tokens that the teacher has processed.
    seen: usize,
    /// Signals of the written tokens.
    found: Extracted,
    /// The states from which they are predicted, if the job stores any.
    states: Option<States>,
    /// The error that stopped the text.
    pub failed: Option<OperatorError>,
}

impl Text {
    /// Creates a text that begins with the given tokens.
    pub fn new(
        place: (usize, usize),
        (id, document): (u64, u64),
        given: impl Iterator<Item = u32>,
        hidden: Option<&HiddenConfig>,
    ) -> Self {
        let tokens: Vec<u32> = given.collect();
        let given = tokens.len();
        let (found, states) = (Extracted::default(), hidden.map(|hidden| States::new(hidden.clone(), 0)));
        Self { place, id, document, tokens, given, seen: 0, found, states, failed: None }
    }

    /// Returns the tokens that the teacher has not processed yet.
    pub fn unseen(&self) -> &[u32] {
        &self.tokens[self.seen..]
    }

    /// Marks all tokens as processed by the teacher.
    pub const fn see(&mut self) {
        self.seen = self.tokens.len();
    }

    /// Appends a token with the signals in row `row` of a step, and the states `[layers, H]` it is predicted from.
    pub fn write(
        &mut self,
        token: u32,
        row: usize,
        extracted: &Extracted,
        states: &[f32],
    ) -> Result<(), OperatorError> {
        if let Some(kept) = &mut self.states {
            kept.push(states).map_err(|message| unfit((self.id, self.tokens.len()), message))?;
        }
        self.tokens.push(token);
        self.found.logprob.push(extracted.logprob[row]);
        if let Some((indices, logprobs)) = &extracted.topk {
            let k = indices.len() / extracted.logprob.len().max(1);
            let of_row = row * k..(row + 1) * k;
            let (found, values) = self.found.topk.get_or_insert_default();
            found.extend_from_slice(&indices[of_row.clone()]);
            values.extend_from_slice(&logprobs[of_row]);
        }
        self.found.signals.extend(extracted.signals.get(row).cloned());
        Ok(())
    }
}

/// Builds the rows of a batch whose texts have all ended, in order.
pub(super) fn made(config: &GenerateConfig, texts: &[Text], busy: Duration) -> Result<Written, OperatorError> {
    let packed = packed(config, texts).map_err(OperatorError::arrow(NAME))?;
    let extract = Arc::new(config.extract.clone());
    // the meter counted this work while it was done
    let mut columns = Forward::new(&extract, &packed, Arc::new(Counters::default()))?.columns(packed)?;
    for (row, text) in texts.iter().enumerate() {
        let written = (text.given..text.tokens.len()).map(|position| Predicted { row, position });
        let states = text.states.as_ref().map(States::widened).unwrap_or_default();
        columns.place(&written.collect::<Vec<_>>(), &text.found, &states)?;
    }
    let (batch, statistics) = columns.finish()?;
    Ok(Written { batch, statistics, busy })
}

fn packed(config: &GenerateConfig, texts: &[Text]) -> Result<RecordBatch, ArrowError> {
    let (length, pad) = (config.length(), config.pack.pad.unwrap_or(config.eos));
    let lengths = vec![length; texts.len()];
    let (mut offsets, mut documents, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for text in texts {
        let starts = starts(config, &text.tokens);
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
    let given = Int32Array::from_iter_values(texts.iter().map(|text| text.given as i32));
    with_columns(&packed, vec![Field::new(GIVEN, DataType::Int32, false)], vec![Arc::new(given)])
}

/// Returns the positions where the segments of a text begin: 0, and those that parsed special tokens begin.
fn starts(config: &GenerateConfig, tokens: &[u32]) -> Vec<i32> {
    let (mut starts, mut at, mut goes_on) = (vec![0], 1, true);
    for stretch in config.pack.breaks.stretches(&tokens[1..]) {
        if at > 1 && (!goes_on || stretch.begins) {
            starts.push(at as i32);
        }
        at += stretch.tokens.len();
        goes_on = !stretch.ends;
    }
    starts
}
