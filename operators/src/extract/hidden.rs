//! The column `hidden_states` \[L, layers, H\]: for every position, the states from which the teacher predicts its
//! token. The job names the layers and their order.
//!
//! ```text
//!   teacher's input   BOS  x_0  x_1 …          (if a run begins with BOS itself: x_0 is given, and its state is 0)
//!                      │    │    │
//!   hidden_states[i]   0    1    2  …          has seen the same tokens as `logprob[i]`, and no others
//! ```
//!
//! Layers are numbered as in transformers (`output_hidden_states`): 0 is the embeddings, k the output of layer k, and
//! the number of layers the final state after the last norm. Certain positions (given, or padding) have 0.
//!
//! Error: rounding to the stored type, 2^-11 of a value in f16 (2^-25 for values below 2^-14). Cost: only the copies.
//! Memory: 4 · layers · H bytes per token of a forward pass, plus the stored bytes per token of the rows that are
//! processed at once.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float16Array, Float32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use arrow::error::ArrowError;
use half::f16;
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::{HiddenStates, NoisePrecision};

use super::{ExtractConfig, NAME};
use crate::invariants::{Violation, Widened, float_column};
use crate::operator::OperatorError;
use crate::rows::{ListRows, list_column};

/// Which hidden states to store, and in which type.
#[derive(Debug, Clone, PartialEq)]
pub struct HiddenConfig {
    /// Layers, in the order of the column.
    pub layers: Vec<usize>,
    /// Width H of a state.
    pub width: usize,
    /// Type of the stored values.
    pub precision: NoisePrecision,
}

impl HiddenConfig {
    pub(super) fn from_job(states: &HiddenStates) -> Result<Self, Problem> {
        let unknown = || Problem::missing("extract.hidden_states", "the width of the teacher's states is not known");
        let width = states.width.ok_or_else(unknown)? as usize;
        let layers = states.layers.iter().map(|layer| *layer as usize).collect();
        Ok(Self { layers, width, precision: states.precision })
    }

    /// Number of values per token.
    pub(super) fn values_per_token(&self) -> usize {
        self.layers.len() * self.width
    }

    /// Stored bytes per token.
    pub(super) fn bytes_per_token(&self) -> usize {
        self.values_per_token() * if self.precision == NoisePrecision::F16 { 2 } else { 4 }
    }

    pub(super) fn field(&self, rows: RowLength) -> Field {
        let item = if self.precision == NoisePrecision::F16 { DataType::Float16 } else { DataType::Float32 };
        rows.field_with_dimensions(columns::HIDDEN_STATES, item, None, &[self.layers.len(), self.width])
    }
}

/// The values of an unfinished column: of a batch, or of one text that is still being written.
pub(crate) struct HiddenStatesBuilder {
    config: HiddenConfig,
    values: Values,
}

enum Values {
    F16(Vec<f16>),
    F32(Vec<f32>),
}

impl HiddenStatesBuilder {
    /// Creates the states of `positions` positions, all certain until they are set.
    pub(crate) fn new(config: HiddenConfig, positions: usize) -> Self {
        let count = positions * config.values_per_token();
        let values = match config.precision {
            NoisePrecision::F16 => Values::F16(vec![f16::ZERO; count]),
            NoisePrecision::F32 => Values::F32(vec![0.0; count]),
        };
        Self { config, values }
    }

    /// Number of values per position.
    pub(super) fn values_per_position(&self) -> usize {
        self.config.values_per_token()
    }

    /// Appends a position with the states it is predicted from, \[layers, H\]. The error names a value that the type
    /// cannot hold.
    pub(crate) fn push(&mut self, states: &[f32]) -> Result<(), String> {
        let values_per_position = self.config.values_per_token();
        let at = match &mut self.values {
            Values::F16(values) => (values.len(), values.resize(values.len() + values_per_position, f16::ZERO)).0,
            Values::F32(values) => (values.len(), values.resize(values.len() + values_per_position, 0.0)).0,
        };
        self.set(at / values_per_position.max(1), states)
    }

    /// Returns all values, as stored, in f32.
    pub(crate) fn to_f32_vec(&self) -> Vec<f32> {
        match &self.values {
            Values::F16(values) => values.iter().map(|value| value.to_f32()).collect(),
            Values::F32(values) => values.clone(),
        }
    }

    /// Stores the states of position `at`, \[layers, H\]. The error names a value that the type cannot hold.
    pub(super) fn set(&mut self, at: usize, states: &[f32]) -> Result<(), String> {
        let values = self.config.values_per_token();
        let range = at * values..(at + 1) * values;
        let unfit = |i: usize, value: f32, what: &str| {
            let (layer, component) = (self.config.layers[i / self.config.width], i % self.config.width);
            format!("component {component} of the hidden state of layer {layer} is {value}, {what}")
        };
        if let Some(i) = states.iter().position(|value| !value.is_finite()) {
            return Err(unfit(
                i,
                states[i],
                "not a finite number; look for NaN and infinite numbers in the teacher's weights",
            ));
        }
        match &mut self.values {
            Values::F32(values) => values[range].copy_from_slice(states),
            Values::F16(values) => {
                for (i, (stored, value)) in values[range].iter_mut().zip(states).enumerate() {
                    *stored = f16::from_f32(*value);
                    if !stored.is_finite() {
                        return Err(unfit(
                            i,
                            *value,
                            "f16 holds up to 65504; set extract.hidden_states.precision: f32",
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    pub(super) fn into_array(self, field: &Field, lengths: &[usize]) -> Result<ArrayRef, OperatorError> {
        let per_row: Vec<usize> = lengths.iter().map(|length| length * self.config.values_per_token()).collect();
        let values: ArrayRef = match self.values {
            Values::F16(values) => Arc::new(Float16Array::from(values)),
            Values::F32(values) => Arc::new(Float32Array::from(values)),
        };
        list_column(field, values, &per_row).map_err(OperatorError::arrow(NAME))
    }
}

/// The hidden states stored in a batch.
pub struct StoredStates {
    config: HiddenConfig,
    column: Widened<f32>,
}

impl StoredStates {
    /// Reads the hidden states of a batch; `None` if the job stores none.
    ///
    /// # Errors
    /// Fails if the column is missing or has another type.
    pub fn of(config: Option<&HiddenConfig>, batch: &RecordBatch) -> Result<Option<Self>, ArrowError> {
        let Some(config) = config else { return Ok(None) };
        Ok(Some(Self { config: config.clone(), column: float_column(batch, columns::HIDDEN_STATES)? }))
    }

    /// Returns which states are stored.
    #[must_use]
    pub fn config(&self) -> &HiddenConfig {
        &self.config
    }

    /// Returns all states of a row, \[length, layers, H\].
    #[must_use]
    pub fn row(&self, row: usize) -> &[f32] {
        self.column.row(row)
    }

    /// Returns the states of a position, \[layers, H\]; empty if the row is too short, which `check` reports.
    #[must_use]
    pub fn at(&self, row: usize, position: usize) -> &[f32] {
        let values = self.config.values_per_token();
        self.row(row).get(position * values..(position + 1) * values).unwrap_or_default()
    }
}

/// Checks the column `hidden_states` of a batch.
pub(super) fn check(
    config: &ExtractConfig,
    batch: &RecordBatch,
    violations: &mut Vec<Violation>,
) -> Result<(), ArrowError> {
    let Some(stored) = StoredStates::of(config.hidden.as_ref(), batch)? else { return Ok(()) };
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    for row in 0..batch.num_rows() {
        let (got, expected) = (stored.row(row), tokens.range(row).len() * stored.config.values_per_token());
        if got.len() != expected {
            let of = columns::HIDDEN_STATES;
            violations.push(Violation::new(row, format!("{of} has {} values, valid: {expected}", got.len())));
        } else if let Some(i) = got.iter().position(|value| !value.is_finite()) {
            let (position, value) = (i / stored.config.values_per_token(), got[i]);
            violations
                .push(Violation::new(row, format!("hidden_states at position {position}: {value}, valid: finite")));
        }
    }
    Ok(())
}
