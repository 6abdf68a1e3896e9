//! Stored hidden states, recomputed.
//!
//! A component v of the state h may differ by 2^-10 · |v| (its rounding, and one unit of it) and by 2e-3 of the root mean square of h: what
//! moves logits by as much as [`LOGPROB_TOLERANCE`] says moves states by a share of their size.

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use stillhouse_operators::extract::StoredStates;
use stillhouse_schemas::manifest::Manifest;

use super::noise::LOGPROB_TOLERANCE;
use crate::operators;

/// One unit of a value in f16, which has 11 bits.
const UNIT: f64 = 1.0 / 1024.0;

/// The stored states of a batch.
pub(super) struct States(StoredStates);

impl States {
    /// Those of a batch; `None` where the job keeps none.
    pub(super) fn of(manifest: &Manifest, batch: &RecordBatch) -> Result<Option<Self>, ArrowError> {
        let (operators, _) = operators::of_manifest(manifest);
        let config = operators::extract_of(&operators);
        Ok(StoredStates::of(config.and_then(|config| config.hidden.as_ref()), batch)?.map(Self))
    }

    pub(super) fn layers(&self) -> &[usize] {
        &self.0.config().layers
    }

    /// Whether a position is stored as certain.
    pub(super) fn is_certain(&self, row: usize, position: usize) -> bool {
        self.0.at(row, position).iter().all(|value| *value == 0.0)
    }

    /// What is wrong at a predicted position, whose states `[layers, H]` were recomputed.
    pub(super) fn wrong(&self, row: usize, position: usize, right: &[f32]) -> Option<String> {
        let width = self.0.config().width.max(1);
        let pairs = self.0.at(row, position).chunks(width).zip(right.chunks(width));
        pairs.zip(self.layers()).find_map(|((got, right), layer)| {
            let (component, got, right) = wrong(got, right)?;
            Some(format!("hidden_states: component {component} of layer {layer} is {got}, recomputed it is {right}"))
        })
    }
}

/// The first component that is too far off.
fn wrong(got: &[f32], right: &[f32]) -> Option<(usize, f32, f32)> {
    let square: f64 = right.iter().map(|v| f64::from(*v).powi(2)).sum();
    let size = (square / right.len().max(1) as f64).sqrt();
    let pairs = got.iter().copied().zip(right.iter().copied()).enumerate();
    let found = pairs.map(|(i, (got, right))| (i, got, right)).find(|(_, got, right)| {
        let (got, right) = (f64::from(*got), f64::from(*right));
        // a NaN is too far from everything
        let near = (got - right).abs() <= UNIT * right.abs() + LOGPROB_TOLERANCE * size;
        !near
    });
    found.or_else(|| (got.len() != right.len()).then_some((got.len(), f32::NAN, f32::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// To the 11 bits of a f16.
    fn rounded(v: f32) -> f32 {
        let unit = 2f32.powi(v.abs().max(6e-5).log2().floor() as i32 - 10);
        (v / unit).round() * unit
    }

    #[test]
    fn a_component_that_is_not_the_teachers_is_found() {
        let right: Vec<f32> = (0..64).map(|i| 300.0 * (i as f32).sin() + if i == 5 { 6e4 } else { 0.0 }).collect();
        let stored: Vec<f32> = right.iter().map(|v| rounded(*v)).collect();
        assert_eq!(wrong(&stored, &right), None);
        for (i, off) in [(0, 60.0f32), (5, -300.0), (63, f32::NAN)] {
            let mut got = stored.clone();
            got[i] += off;
            assert_eq!(wrong(&got, &right).map(|found| found.0), Some(i));
        }
        assert!(wrong(&stored[..63], &right).is_some());
    }
}
