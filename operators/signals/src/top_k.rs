//! `topk`: the k most likely tokens with their ln p.
//!
//! Cost: one pass, and a sort of the k entries.

use stillhouse_noise::{LoadedRow, RowSignals, Signal, SignalKernel, Values};
use stillhouse_schemas::columns::{self, Column};
use stillhouse_schemas::problems::Problem;

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances};
use crate::{differs, f32s, u32s};

pub(crate) const COLUMNS: &[Column] = &[
    Column {
        name: columns::TOPK_INDEX,
        dtype: "fixed list int32",
        when: "`topk` > 0",
        shape: "[L, k]",
        contract: "the k most likely tokens, the most likely first, ties by lower id",
        meaning: "ids of the most likely tokens at each position, the most likely first",
    },
    Column {
        name: columns::TOPK_LOGPROB,
        dtype: "fixed list float32",
        when: "`topk` > 0",
        shape: "[L, k]",
        contract: "ln p of each",
        meaning: "natural logarithms of their probabilities",
    },
];

/// Top-k.
#[derive(Debug, Clone, PartialEq)]
pub struct TopK {
    /// Number of entries; all of a vocabulary that has fewer.
    pub k: usize,
}

fn push_columns(entries: impl Iterator<Item = (u32, f32)>, columns: &mut RowSignals) {
    let (tokens, logprobs) = entries.unzip();
    columns.push(Values::U32(tokens));
    columns.push(Values::F32(logprobs));
}

impl Signal for TopK {
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        push_columns(row.top(self.k).into_iter(), columns);
    }

    fn kernel(&self, _: usize) -> SignalKernel {
        SignalKernel { top_entries: self.k, ..SignalKernel::default() }
    }

    fn read_kernel_output(&self, _: &[u8], (tokens, logprobs): (&[u32], &[f32]), columns: &mut RowSignals) {
        push_columns(tokens.iter().copied().zip(logprobs.iter().copied()).take(self.k), columns);
    }
}

impl StoredSignal for TopK {
    fn columns(&self) -> Vec<SignalColumn> {
        vec![
            SignalColumn::new(columns::TOPK_INDEX, ItemType::I32, ColumnShape::Vector(self.k)),
            SignalColumn::new(columns::TOPK_LOGPROB, ItemType::F32, ColumnShape::Vector(self.k)),
        ]
    }

    /// The token with 0, and the other entries of lowest index with −∞.
    fn certain(&self, token: u32, columns: &mut RowSignals) {
        let others = (0..).filter(|other| *other != token).map(|other| (other, f32::NEG_INFINITY));
        push_columns(std::iter::once((token, 0.0)).chain(others).take(self.k), columns);
    }

    fn check(&self, values: &[Values], vocab: usize) -> Option<String> {
        let (tokens, logprobs) = (u32s(values, 0), f32s(values, 1));
        let is_valid = tokens.iter().all(|token| (*token as usize) < vocab)
            && logprobs.is_sorted_by(|a, b| a >= b)
            && logprobs.iter().all(|logprob| *logprob <= 0.0);
        (!is_valid).then(|| format!("top-k entries {tokens:?} {logprobs:?} do not descend within the vocabulary"))
    }

    /// If the logits have the same bits, the tokens must be equal. Otherwise other tokens may be listed whose logit is
    /// within 2δ of the last one's.
    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        row: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let least = f32s(expected, 1).last().map_or(f64::NEG_INFINITY, |logprob| f64::from(*logprob));
        let entries = u32s(got, 0).iter().zip(f32s(got, 1)).zip(u32s(expected, 0));
        entries.enumerate().find_map(|(n, ((token, logprob), expected))| {
            let exact = row.logprob(*token) as f32;
            if differs(*logprob, exact, tolerances.listed(exact)) {
                return Some(format!("topk_logprob of {token} is {logprob}, recomputed it is {exact}"));
            }
            let is_listed = match tolerances.is_exact() {
                true => token == expected,
                false => f64::from(exact) >= least - 2.0 * tolerances.listed(exact),
            };
            (!is_listed).then(|| format!("topk_index {n} is {token}, recomputed it is {expected}"))
        })
    }

    fn bytes_per_token(&self, token_bytes: f64) -> f64 {
        self.k as f64 * (token_bytes + 3.6)
    }

    fn max_values(&self, _: usize) -> usize {
        2 * self.k
    }

    fn view(&self, positions: &[&[Values]], _: usize) -> Vec<Series> {
        let k = self.k;
        let mass = |values: &&[Values]| f32s(values, 1).iter().map(|logprob| f64::from(*logprob).exp()).sum();
        vec![Series {
            title: format!("mass of the {k} likeliest"),
            values: positions.iter().map(mass).collect(),
            axis: Axis::UpTo(1.0),
            describe_mean: Box::new(move |mean| {
                ("top-k".into(), format!("{k} tokens hold {mean:.4} of the mass on average"))
            }),
        }]
    }

    fn summary(&self, values: &[Values]) -> String {
        let first = u32s(values, 0).first().zip(f32s(values, 1).first());
        first.map_or_else(String::new, |(token, logprob)| {
            format!("likeliest {token} with {:.3}", f64::from(*logprob).exp())
        })
    }

    fn vocabulary_problems(&self, vocab: usize) -> Vec<Problem> {
        let message = format!("more than the teacher's vocabulary; valid: at most {vocab}");
        let is_valid = self.k <= vocab;
        (!is_valid).then(|| Problem::new("extract.topk", self.k, message)).into_iter().collect()
    }

    fn top_entries_setting(&self) -> Option<(&'static str, usize)> {
        Some(("extract.topk", self.k))
    }
}
