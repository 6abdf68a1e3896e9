//! `entropy`: the entropy −Σ_k p_k · ln p_k of the teacher's next-token distribution, in nat.
//!
//! Cost: one pass with a product per entry.

use stillhouse_noise::{LoadedRow, RowSignals, Signal, SignalKernel, Values};
use stillhouse_schemas::columns::{self, Column};

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances};
use crate::{differs, f32_of, f32s_of_bytes, mismatch};

pub(crate) const COLUMNS: &[Column] = &[Column {
    name: columns::ENTROPY,
    dtype: "fixed list float32",
    when: "`entropy`",
    shape: "[L]",
    contract: "−Σ p ln p of the teacher's distribution, in nat, error at most 1e-5; certain: 0",
    meaning: "entropy of the teacher's distribution at each position, in nat",
}];

/// Entropy.
#[derive(Debug, Clone, PartialEq)]
pub struct Entropy;

impl Signal for Entropy {
    /// −Σ p·ln p = ln Z + Σ u·(max l − l) / Z.
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        let entropy = (row.softmax().ln_z() + row.sum_of_distances() / row.softmax().z()).max(0.0);
        columns.push(Values::F32(vec![entropy as f32]));
    }

    fn kernel(&self, _: usize) -> SignalKernel {
        SignalKernel { name: Some("noise_entropy"), output_bytes: 4, ..SignalKernel::default() }
    }

    fn read_kernel_output(&self, output: &[u8], _: (&[u32], &[f32]), columns: &mut RowSignals) {
        columns.push(Values::F32(f32s_of_bytes(output)));
    }
}

impl StoredSignal for Entropy {
    fn columns(&self) -> Vec<SignalColumn> {
        vec![SignalColumn::new(columns::ENTROPY, ItemType::F32, ColumnShape::Scalar)]
    }

    fn certain(&self, _: u32, columns: &mut RowSignals) {
        columns.push(Values::F32(vec![0.0]));
    }

    fn check(&self, values: &[Values], vocab: usize) -> Option<String> {
        let (entropy, max) = (f32_of(values, 0), (vocab as f64).ln());
        let is_valid = (0.0..=max + 1e-4).contains(&f64::from(entropy));
        (!is_valid).then(|| format!("entropy {entropy}, valid: 0 to ln V = {max}"))
    }

    /// A change of δ in the logits changes the entropy by at most δ · (1 + ln V).
    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        row: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let (got, expected) = (f32_of(got, 0), f32_of(expected, 0));
        let tolerance = tolerances.logit_error() * (1.0 + (row.logits().len() as f64).ln()) + 1e-5;
        if differs(got, expected, tolerance) { mismatch("entropy", got, expected) } else { None }
    }

    fn bytes_per_token(&self, _: f64) -> f64 {
        3.6
    }

    fn max_values(&self, _: usize) -> usize {
        1
    }

    fn view(&self, positions: &[&[Values]], vocab: usize) -> Vec<Series> {
        let describe_mean = |nats: f64| {
            ("mean entropy".into(), format!("{nats:.3} nat, as of {:.1} equally likely tokens", nats.exp()))
        };
        vec![Series {
            title: "entropy in nat".into(),
            values: positions.iter().map(|values| f64::from(f32_of(values, 0))).collect(),
            axis: Axis::UpTo((vocab.max(2) as f64).ln()),
            describe_mean: Box::new(describe_mean),
        }]
    }

    fn summary(&self, values: &[Values]) -> String {
        format!("H {:.2}", f32_of(values, 0))
    }
}
