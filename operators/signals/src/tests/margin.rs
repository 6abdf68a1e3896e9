//! `margin`: ln p of the most likely token less ln p of the second one.
//!
//! Cost: a top-2.

use stillhouse_noise::{LoadedRow, RowSignals, Signal, SignalKernel, Values};
use stillhouse_schemas::columns::Column;

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances, differs};

const MARGIN: &str = "margin";

pub(crate) const COLUMNS: &[Column] = &[Column {
    name: MARGIN,
    dtype: "fixed list float32",
    when: "`margin`",
    shape: "[L]",
    contract: "ln p of the most likely token less that of the second one; certain: +∞",
    meaning: "natural logarithm of how many times as likely the most likely token is as the second one",
}];

/// The margin of the most likely token.
#[derive(Debug, Clone, PartialEq)]
pub struct Margin;

/// The margin between the first two of some ln p, which descend; +∞ if there is one entry.
fn margin(logprobs: &[f32]) -> Values {
    let [first, second, ..] = logprobs else { return Values::F32(vec![f32::INFINITY]) };
    Values::F32(vec![first - second])
}

fn stored(values: &[Values]) -> f32 {
    values.first().and_then(|values| values.f32s().first()).copied().unwrap_or(f32::NAN)
}

impl Signal for Margin {
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        let logprobs: Vec<f32> = row.top(2).iter().map(|entry| entry.1).collect();
        columns.push(margin(&logprobs));
    }

    fn kernel(&self, _: usize) -> SignalKernel {
        SignalKernel { top_entries: 2, ..SignalKernel::default() }
    }

    fn read_kernel_output(&self, _: &[u8], (_, logprobs): (&[u32], &[f32]), columns: &mut RowSignals) {
        columns.push(margin(logprobs));
    }
}

impl StoredSignal for Margin {
    fn columns(&self) -> Vec<SignalColumn> {
        vec![SignalColumn::new(MARGIN, ItemType::F32, ColumnShape::Scalar)]
    }

    fn certain(&self, _: u32, columns: &mut RowSignals) {
        columns.push(Values::F32(vec![f32::INFINITY]));
    }

    fn check(&self, values: &[Values], _: usize) -> Option<String> {
        let margin = stored(values);
        let is_valid = margin >= 0.0;
        (!is_valid).then(|| format!("margin {margin}, valid: at least 0"))
    }

    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        _: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let (got, expected) = (stored(got), stored(expected));
        // each of the two logits has its own error
        let tolerance = 2.0 * tolerances.listed(expected);
        differs(got, expected, tolerance).then(|| format!("margin is {got}, recomputed it is {expected}"))
    }

    fn bytes_per_token(&self, _: f64) -> f64 {
        3.6
    }

    fn max_values(&self, _: usize) -> usize {
        1
    }

    fn view(&self, positions: &[&[Values]], _: usize) -> Vec<Series> {
        vec![Series {
            title: "margin in nat".into(),
            values: positions.iter().map(|values| f64::from(stored(values))).collect(),
            axis: Axis::FromZero,
            describe_mean: Box::new(|mean| ("mean margin".into(), format!("{mean:.3} nat"))),
        }]
    }

    fn summary(&self, values: &[Values]) -> String {
        format!("margin {:.2}", stored(values))
    }
}
