//! Recomputes stored hidden states and compares them.
//!
//! A component v of a state h may differ by its rounding: 2^-11 · |v| plus half the smallest step in f16, nothing in
//! f32. If the recomputed states do not have the job's bits, v may differ by 2^-10 · |v| in either type, plus δ
//! ([`Tolerances`]) times the root mean square of h: what moves logits by δ moves states by the same share of their
//! size.

use arrow::array::RecordBatch;
use arrow::error::ArrowError;
use stillhouse_operators::extract::StoredStates;
use stillhouse_operators::registry;
use stillhouse_schemas::manifest::Manifest;
use stillhouse_schemas::spec::NoisePrecision;

use stillhouse_signals::Tolerances;

/// Relative size of one unit in the last place of an f16, which has 11 significant bits.
const UNIT: f64 = 1.0 / 1024.0;
/// Half the smallest step of an f16, 2^-25.
const MIN_F16_ERROR: f64 = 1.0 / (1 << 25) as f64;

/// The stored states of a batch.
pub(super) struct States(StoredStates);

impl States {
    /// Reads the states of a batch; `None` if the job stores none.
    pub(super) fn of(manifest: &Manifest, batch: &RecordBatch) -> Result<Option<Self>, ArrowError> {
        let (operators, _) = registry::operators_from_manifest(manifest);
        let config = registry::extract_config(&operators);
        Ok(StoredStates::of(config.and_then(|config| config.hidden.as_ref()), batch)?.map(Self))
    }

    pub(super) fn layers(&self) -> &[usize] {
        &self.0.config().layers
    }

    /// Whether a position is stored as certain.
    pub(super) fn is_certain(&self, row: usize, position: usize) -> bool {
        self.0.at(row, position).iter().all(|value| *value == 0.0)
    }

    /// Compares a predicted position with its recomputed states `[layers, H]` and describes the first fault.
    pub(super) fn find_mismatch(
        &self,
        row: usize,
        position: usize,
        right: &[f32],
        tolerances: Tolerances,
    ) -> Option<String> {
        let tolerance = StateTolerance { tolerances, is_half: self.0.config().precision == NoisePrecision::F16 };
        let width = self.0.config().width.max(1);
        let pairs = self.0.at(row, position).chunks(width).zip(right.chunks(width));
        pairs.zip(self.layers()).find_map(|((got, right), layer)| {
            let (component, got, right) = find_mismatch(got, right, tolerance)?;
            Some(format!("hidden_states: component {component} of layer {layer} is {got}, recomputed it is {right}"))
        })
    }
}

/// The tolerance of a component.
#[derive(Debug, Clone, Copy)]
struct StateTolerance {
    tolerances: Tolerances,
    is_half: bool,
}

impl StateTolerance {
    /// Tolerance of a component with value `right` in a state whose root mean square is `size`.
    fn limit(self, right: f64, size: f64) -> f64 {
        match (self.tolerances.is_exact(), self.is_half) {
            (true, true) => 0.5 * UNIT * right.abs() + MIN_F16_ERROR,
            (true, false) => 0.0,
            (false, _) => UNIT * right.abs() + self.tolerances.logit_error() * size,
        }
    }
}

/// The first component outside its tolerance.
fn find_mismatch(got: &[f32], right: &[f32], tolerance: StateTolerance) -> Option<(usize, f32, f32)> {
    let square: f64 = right.iter().map(|v| f64::from(*v).powi(2)).sum();
    let size = (square / right.len().max(1) as f64).sqrt();
    let pairs = got.iter().copied().zip(right.iter().copied()).enumerate();
    let found = pairs.map(|(i, (got, right))| (i, got, right)).find(|(_, got, right)| {
        let (got, right) = (f64::from(*got), f64::from(*right));
        // NaN is outside every tolerance
        let is_within = (got - right).abs() <= tolerance.limit(right, size);
        !is_within
    });
    found.or_else(|| (got.len() != right.len()).then_some((got.len(), f32::NAN, f32::NAN)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds to the 11 significant bits of an f16.
    fn rounded(v: f32) -> f32 {
        let unit = 2f32.powi(v.abs().max(6e-5).log2().floor() as i32 - 10);
        (v / unit).round() * unit
    }

    #[test]
    fn a_component_that_is_not_the_teachers_is_found() {
        let right: Vec<f32> = (0..64).map(|i| 300.0 * (i as f32).sin() + if i == 5 { 6e4 } else { 0.0 }).collect();
        let stored: Vec<f32> = right.iter().map(|v| rounded(*v)).collect();
        let elsewhere = StateTolerance { tolerances: Tolerances::other_machine(), is_half: true };
        let here = StateTolerance { tolerances: Tolerances::for_arithmetic(true, "cpu"), is_half: true };
        assert_eq!((find_mismatch(&stored, &right, elsewhere), find_mismatch(&stored, &right, here)), (None, None));
        // one f16 step is a fault if the bits must match; in f32 any difference is
        let mut next = stored.clone();
        next[7] *= 1.0 + 2f32.powi(-10);
        assert_eq!(
            (find_mismatch(&next, &right, elsewhere), find_mismatch(&next, &right, here).map(|found| found.0)),
            (None, Some(7))
        );
        let single = StateTolerance { is_half: false, ..here };
        assert_eq!(
            (find_mismatch(&right, &right, single), find_mismatch(&stored, &right, single).is_some()),
            (None, true)
        );
        for (i, off) in [(0, 60.0f32), (5, -300.0), (63, f32::NAN)] {
            let mut got = stored.clone();
            got[i] += off;
            assert_eq!(find_mismatch(&got, &right, elsewhere).map(|found| found.0), Some(i));
        }
        assert!(find_mismatch(&stored[..63], &right, here).is_some());
    }
}
