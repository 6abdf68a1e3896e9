//! Turns slices of logits into the columns of a batch.
//!
//! Slices arrive in the order that suits the teacher. Row, draw and position fix where each value goes, so the columns
//! do not depend on that order. Rows of a slice are processed in parallel; their results are combined in row order.

use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Float16Array, Float32Array, UInt8Array, UInt16Array, UInt32Array};
use arrow::datatypes::{DataType, Field};
use half::f16;
use stillhouse_noise::{
    DrawKey, ExtractedColumns, ExtractionSpec, NoiseForm, NoiseStream, ObservedTokens, RowSignals, Tolerance,
    prior_noise,
};
use stillhouse_schemas::columns;
use stillhouse_schemas::manifest::Statistics;
use stillhouse_schemas::spec::NoiseCodec;

use super::hidden::HiddenStatesBuilder;
use super::pass::{PredictedPosition, Sequence, Slice};
use super::{ExtractConfig, NAME, Workspace, hidden_state_error, noise_error, signals};
use crate::operator::{Measure, Meter, OperatorError};
use crate::rows::list_column;

/// Collects the columns of one batch.
pub(super) struct Collector {
    config: Arc<ExtractConfig>,
    sequences: Arc<Vec<Sequence>>,
    /// Positions of each row, padding included; `starts` says where each row begins in a column of shape `[L]`.
    lengths: Vec<usize>,
    starts: Vec<usize>,
    extraction: ExtractionSpec,
    logprob: Vec<f32>,
    replay: Option<Replay>,
    dense: Option<Vec<f32>>,
    /// Signals of each position; empty if the job wants none.
    signals: Vec<RowSignals>,
    hidden: Option<HiddenStatesBuilder>,
    statistics: Statistics,
    meter: Arc<dyn Meter>,
}

/// Corrections in order of arrival; `lists` holds (start, length) of each (row, draw, position).
struct Replay {
    lists: Vec<(usize, u32)>,
    indices: Vec<u32>,
    logprobs: Vec<f32>,
}

impl Collector {
    pub(super) fn new(
        config: &Arc<ExtractConfig>,
        sequences: &Arc<Vec<Sequence>>,
        meter: &Arc<dyn Meter>,
    ) -> Result<Self, OperatorError> {
        let lengths: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let starts: Vec<usize> = lengths
            .iter()
            .scan(0, |sum, length| {
                let start = *sum;
                *sum += length;
                Some(start)
            })
            .collect();
        let positions: usize = lengths.iter().sum();
        let mut collector = Self {
            config: Arc::clone(config),
            sequences: Arc::clone(sequences),
            starts,
            extraction: config.extraction()?,
            logprob: vec![0.0; positions],
            replay: None,
            dense: None,
            signals: Vec::new(),
            hidden: config.hidden.clone().map(|hidden| HiddenStatesBuilder::new(hidden, positions)),
            statistics: Statistics::default(),
            meter: Arc::clone(meter),
            lengths,
        };
        let lists = positions * collector.extraction.keys.len();
        match collector.extraction.noise {
            Some(NoiseForm::Replay { .. }) => {
                collector.replay =
                    Some(Replay { lists: vec![(0, 0); lists], indices: Vec::new(), logprobs: Vec::new() });
            }
            Some(NoiseForm::Dense { .. }) => collector.dense = Some(vec![0.0; lists * config.vocab_size]),
            None => {}
        }
        if !collector.extraction.signals.is_empty() {
            collector.signals = vec![RowSignals::default(); positions];
        }
        collector.fill_certain()?;
        Ok(collector)
    }

    /// Writes the values of certain positions everywhere. Predicted positions overwrite them later.
    fn fill_certain(&mut self) -> Result<(), OperatorError> {
        for row in 0..self.lengths.len() {
            for position in 0..self.lengths[row] {
                let token = self.token(row, position);
                let at = self.starts[row] + position;
                if let Some(signals) = self.signals.get_mut(at) {
                    *signals = stillhouse_signals::certain(&self.config.signals, token);
                }
            }
        }
        // Prior noise costs as much as posterior noise, so make it only at positions that cannot be predicted.
        if self.dense.is_some() {
            for row in 0..self.lengths.len() {
                let valid = self.sequences[row].valid;
                let certain = (valid..self.lengths[row]).chain(0..valid.min(1));
                for position in certain.chain(self.document_starts(row)) {
                    self.fill_prior(row, position)?;
                }
            }
        }
        Ok(())
    }

    fn document_starts(&self, row: usize) -> Vec<usize> {
        self.sequences[row].offsets.iter().copied().filter(|&o| o > 0 && o < self.sequences[row].valid).collect()
    }

    fn fill_prior(&mut self, row: usize, position: usize) -> Result<(), OperatorError> {
        let token = self.token(row, position);
        for draw in 0..self.extraction.keys.len() {
            let stream = NoiseStream::new(self.extraction.keys[draw], self.sequences[row].id, position as u32);
            let at = self.dense_start(row, draw, position);
            if let Some(dense) = &mut self.dense {
                prior_noise(token, &stream, &mut dense[at..at + self.config.vocab_size]).map_err(noise_error)?;
            }
        }
        Ok(())
    }

    fn token(&self, row: usize, position: usize) -> u32 {
        self.sequences[row].tokens[position]
    }

    /// Index of (row, draw, position) in a column of shape [D, L], counted in lists.
    fn list_index(&self, row: usize, draw: usize, position: usize) -> usize {
        self.starts[row] * self.extraction.keys.len() + draw * self.lengths[row] + position
    }

    fn dense_start(&self, row: usize, draw: usize, position: usize) -> usize {
        self.list_index(row, draw, position) * self.config.vocab_size
    }

    /// Extracts the values of a slice.
    pub(super) fn extract(&self, slice: &Slice, workspace: &mut Workspace) -> Result<ExtractedColumns, OperatorError> {
        let began = Instant::now();
        let positions = &slice.positions;
        let tokens: Vec<u32> = positions.iter().map(|p| self.token(p.row, p.position)).collect();
        let sequence_positions: Vec<u32> = positions.iter().map(|p| p.position as u32).collect();
        let ids: Vec<u64> = positions.iter().map(|p| self.sequences[p.row].id).collect();
        let observed = ObservedTokens { tokens: &tokens, positions: &sequence_positions, sequence_ids: &ids };
        let extracted = workspace.extract(&self.extraction, &slice.logits, &observed);
        self.meter.add_since(Measure::ExtractNanos, began);
        extracted
    }

    /// Stores the values of a slice at their positions.
    pub(super) fn store(
        &mut self,
        positions: &[PredictedPosition],
        mut extracted: ExtractedColumns,
        states: &[f32],
    ) -> Result<(), OperatorError> {
        let began = Instant::now();
        self.store_states(positions, states)?;
        self.statistics.predicted_tokens += positions.len() as u64;
        let (vocab, draws) = (self.config.vocab_size, self.extraction.keys.len());
        for (n, p) in positions.iter().enumerate() {
            let at = self.starts[p.row] + p.position;
            self.logprob[at] = extracted.logprob[n];
            if let (Some(signals), Some(found)) = (self.signals.get_mut(at), extracted.signals.get_mut(n)) {
                *signals = std::mem::take(found);
            }
            for draw in 0..draws {
                let list = self.list_index(p.row, draw, p.position);
                if let Some(encoded) = &extracted.replay {
                    let (indices, logprobs) = encoded.corrections(n, draw);
                    self.check_count(p, indices.len())?;
                    if let Some(replay) = &mut self.replay {
                        replay.lists[list] = (replay.indices.len(), indices.len() as u32);
                        replay.indices.extend_from_slice(indices);
                        replay.logprobs.extend_from_slice(logprobs);
                    }
                    self.statistics.count_corrections(indices.len() as u64);
                }
                if let (Some(dense), Some(found)) = (&mut self.dense, &extracted.dense) {
                    let from = (n * draws + draw) * vocab;
                    dense[list * vocab..(list + 1) * vocab].copy_from_slice(&found[from..from + vocab]);
                }
            }
        }
        if let Some(encoded) = &extracted.replay {
            self.statistics.total_variation_max = self.statistics.total_variation_max.max(encoded.max_total_variation);
        }
        self.meter.add_since(Measure::ExtractNanos, began);
        self.meter.add(Measure::TeacherTokens, positions.len() as u64);
        Ok(())
    }

    fn store_states(&mut self, positions: &[PredictedPosition], states: &[f32]) -> Result<(), OperatorError> {
        let Some(hidden) = &mut self.hidden else { return Ok(()) };
        let (got, expected) = (states.len(), positions.len() * hidden.values_per_position());
        if got != expected {
            let message = format!("{got} values of hidden states, expected {expected}: a bug in this program");
            return Err(OperatorError::Config { operator: NAME, message });
        }
        for (p, states) in positions.iter().zip(states.chunks_exact(hidden.values_per_position())) {
            let at = (self.sequences[p.row].id, p.position);
            hidden.set(self.starts[p.row] + p.position, states).map_err(|message| hidden_state_error(at, message))?;
        }
        Ok(())
    }

    /// Fails if `noise_count` cannot hold `count`. `columns::noise_count_type` picks a type that should always fit.
    fn check_count(&self, p: &PredictedPosition, count: usize) -> Result<(), OperatorError> {
        let Some(noise) = &self.config.noise else { return Ok(()) };
        let max = match columns::noise_count_type(self.config.vocab_size, noise.tolerance) {
            DataType::UInt8 => usize::from(u8::MAX),
            DataType::UInt16 => usize::from(u16::MAX),
            _ => u32::MAX as usize,
        };
        if count <= max {
            return Ok(());
        }
        Err(OperatorError::Data {
            operator: NAME,
            place: format!("sequence {}, position {}", self.sequences[p.row].id, p.position),
            message: format!("{count} corrections, more than {max}; raise extract.noise.tolerance"),
        })
    }

    /// Returns the columns in the order of [`ExtractConfig::fields`], and the statistics.
    pub(super) fn finish(mut self) -> Result<(Vec<ArrayRef>, Statistics), OperatorError> {
        for (row, sequence) in self.sequences.iter().enumerate() {
            let start = self.starts[row];
            for logprob in &self.logprob[start..start + sequence.valid] {
                self.statistics.logprob_sum += f64::from(*logprob);
            }
        }
        let fields = self.config.fields();
        let mut fields = fields.iter();
        let mut next = move || {
            fields
                .next()
                .ok_or_else(|| OperatorError::Config { operator: NAME, message: "a column has no field".into() })
        };
        let error = OperatorError::arrow(NAME);
        let mut arrays = Vec::new();
        let logprob = Arc::new(Float32Array::from(std::mem::take(&mut self.logprob)));
        arrays.push(list_column(next()?, logprob, &self.lengths).map_err(&error)?);
        if let Some(replay) = self.replay.take() {
            let draws = self.extraction.keys.len();
            let (count, index, logprob) = (next()?, next()?, next()?);
            let scaled: Vec<usize> = self.lengths.iter().map(|l| l * draws).collect();
            let counts: Vec<u32> = replay.lists.iter().map(|list| list.1).collect();
            let (indices, logprobs, per_row) = corrections_in_list_order(&replay, &scaled);
            arrays.push(list_column(count, unsigned(count, counts)?, &scaled).map_err(&error)?);
            arrays.push(list_column(index, unsigned(index, indices)?, &per_row).map_err(&error)?);
            arrays.push(list_column(logprob, floats(logprob, logprobs), &per_row).map_err(&error)?);
        }
        if let Some(dense) = self.dense.take() {
            let field = next()?;
            let width = self.extraction.keys.len() * self.config.vocab_size;
            let per_row: Vec<usize> = self.lengths.iter().map(|l| l * width).collect();
            arrays.push(list_column(field, floats(field, dense), &per_row).map_err(&error)?);
        }
        arrays.extend(signals::arrays(
            &self.config.signals,
            std::mem::take(&mut self.signals),
            &self.lengths,
            &mut next,
        )?);
        if let Some(hidden) = self.hidden.take() {
            arrays.push(hidden.into_array(next()?, &self.lengths)?);
        }
        Ok((arrays, self.statistics))
    }
}

impl ExtractConfig {
    /// Returns what to extract from every row of logits.
    ///
    /// # Errors
    /// Fails if the noise cannot be stored.
    pub fn extraction(&self) -> Result<ExtractionSpec, OperatorError> {
        let signals = stillhouse_signals::requested(&self.signals);
        let mut extraction = ExtractionSpec { vocab: self.vocab_size, keys: Vec::new(), noise: None, signals };
        if let Some(noise) = &self.noise {
            let (value_type, condition) = (noise.value_type(), noise.condition);
            extraction.keys = DrawKey::draws(noise.seed, noise.draws);
            extraction.noise = Some(match noise.codec {
                NoiseCodec::Replay => {
                    let tolerance = Tolerance::new(noise.tolerance).map_err(noise_error)?;
                    NoiseForm::Replay { tolerance, value_type, condition }
                }
                NoiseCodec::Dense => NoiseForm::Dense { value_type, condition },
            });
        }
        Ok(extraction)
    }
}

/// Returns the corrections in the order of the lists, and the number that each row has.
fn corrections_in_list_order(replay: &Replay, lists_per_row: &[usize]) -> (Vec<u32>, Vec<f32>, Vec<usize>) {
    let mut indices = Vec::with_capacity(replay.indices.len());
    let mut logprobs = Vec::with_capacity(replay.logprobs.len());
    let mut per_row = Vec::with_capacity(lists_per_row.len());
    let mut lists = replay.lists.iter();
    for &n in lists_per_row {
        let before = indices.len();
        for &(start, length) in lists.by_ref().take(n) {
            let range = start..start + length as usize;
            indices.extend_from_slice(&replay.indices[range.clone()]);
            logprobs.extend_from_slice(&replay.logprobs[range]);
        }
        per_row.push(indices.len() - before);
    }
    (indices, logprobs, per_row)
}

fn item_type(field: &Field) -> DataType {
    match field.data_type() {
        DataType::List(item) | DataType::FixedSizeList(item, _) => item.data_type().clone(),
        other => other.clone(),
    }
}

pub(super) fn unsigned(field: &Field, values: Vec<u32>) -> Result<ArrayRef, OperatorError> {
    let item = item_type(field);
    // a looser tolerance shortens only the lists of corrections
    let remedy =
        if field.name() == columns::NOISE_COUNT { "raise extract.noise.tolerance" } else { "a bug in this program" };
    let too_large = |v: u32| OperatorError::Data {
        operator: NAME,
        place: format!("column {}", field.name()),
        message: format!("value {v} does not fit its type, {item}: {remedy}"),
    };
    Ok(match item {
        DataType::UInt8 => {
            let values: Result<Vec<u8>, _> =
                values.into_iter().map(|v| u8::try_from(v).map_err(|_| too_large(v))).collect();
            Arc::new(UInt8Array::from(values?))
        }
        DataType::UInt16 => {
            let values: Result<Vec<u16>, _> =
                values.into_iter().map(|v| u16::try_from(v).map_err(|_| too_large(v))).collect();
            Arc::new(UInt16Array::from(values?))
        }
        _ => Arc::new(UInt32Array::from(values)),
    })
}

pub(super) fn floats(field: &Field, values: Vec<f32>) -> ArrayRef {
    match item_type(field) {
        DataType::Float16 => Arc::new(values.into_iter().map(|v| Some(f16::from_f32(v))).collect::<Float16Array>()),
        _ => Arc::new(Float32Array::from(values)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_error_about_corrections_names_the_tolerance() {
        let message = |name: &str, item: DataType| {
            unsigned(&columns::list_field(name, item), vec![1, 70_000]).unwrap_err().to_string()
        };
        assert_eq!(
            message(columns::NOISE_COUNT, DataType::UInt16),
            "extract: column noise_count: value 70000 does not fit its type, UInt16: raise extract.noise.tolerance"
        );
        assert_eq!(
            message(columns::SAMPLED_TIMES, DataType::UInt8),
            "extract: column sampled_times: value 70000 does not fit its type, UInt8: a bug in this program"
        );
        let index = columns::list_field(columns::NOISE_INDEX, DataType::UInt32);
        assert_eq!(unsigned(&index, vec![1, 70_000]).unwrap().len(), 2);
    }
}
