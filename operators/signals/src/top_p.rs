//! `top_p`: the smallest set of most likely tokens that holds a probability mass, and ln of the remaining mass, the tail.
//!
//! Cost: a top-k, and one pass with a sum for the tail.

use stillhouse_noise::{LoadedRow, RowSignals, Signal, SignalKernel, Values};
use stillhouse_schemas::columns::{self, Column};

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances};
use crate::{differs, f32_of, f32s, f32s_of_bytes, mismatch, u32s, u32s_of_bytes};

pub(crate) const COLUMNS: &[Column] = &[
    Column {
        name: columns::TOP_P_COUNT,
        dtype: "fixed list uint16",
        when: "`top_p`",
        shape: "[L]",
        contract: "smallest number of most likely tokens whose probabilities reach `mass`, at most `most`; certain: 1",
        meaning: "number of most likely tokens kept at each position",
    },
    Column {
        name: columns::TOP_P_INDEX,
        dtype: "list uint16 (V ≤ 65,536) / uint32",
        when: "`top_p`",
        shape: "[*]",
        contract: "tokens of position 0, then 1, …; the most likely first, ties by lower id",
        meaning: "ids of the kept tokens: position 0 first; within a position, the most likely first",
    },
    Column {
        name: columns::TOP_P_LOGPROB,
        dtype: "list float32",
        when: "`top_p`",
        shape: "[*]",
        contract: "ln p of each",
        meaning: "natural logarithms of the probabilities of the kept tokens",
    },
    Column {
        name: columns::TOP_P_TAIL,
        dtype: "fixed list float32",
        when: "`top_p`",
        shape: "[L]",
        contract: "ln of the total probability of all other tokens, error at most 1e-5 even for a tail of 1e-9; certain: −∞",
        meaning: "natural logarithm of the total probability of all other tokens",
    },
];

/// Top-p.
#[derive(Debug, Clone, PartialEq)]
pub struct TopP {
    /// Probability that the kept entries reach, unless that takes more than `max_entries` entries.
    pub mass: f64,
    /// Largest number of kept entries.
    pub max_entries: usize,
}

fn push_columns(tokens: Vec<u32>, logprobs: Vec<f32>, tail: f32, columns: &mut RowSignals) {
    columns.push(Values::U32(vec![tokens.len() as u32]));
    columns.push(Values::U32(tokens));
    columns.push(Values::F32(logprobs));
    columns.push(Values::F32(vec![tail]));
}

/// Σ p of entries with these ln p.
fn mass_of(logprobs: &[f32]) -> f64 {
    logprobs.iter().map(|logprob| f64::from(*logprob).exp()).sum()
}

impl Signal for TopP {
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        // Most rows need few entries, so k grows only while the mass is not reached.
        let mut count = 16.min(self.max_entries);
        let best = loop {
            let mut best = row.top(count);
            let (mut k, mut mass) = (0, 0.0);
            while k < best.len() && mass < self.mass {
                mass += libm::exp(f64::from(best[k].1));
                k += 1;
            }
            if mass >= self.mass || count >= self.max_entries.min(row.logits().len()) {
                best.truncate(k.max(1));
                break best;
            }
            count = (8 * count).min(self.max_entries);
        };
        let mut kept: Vec<usize> = best.iter().map(|entry| entry.0 as usize).collect();
        kept.sort_unstable();
        let tail = (libm::log(row.sum_without(&kept)) - row.softmax().ln_z()) as f32;
        let (tokens, logprobs) = best.into_iter().unzip();
        push_columns(tokens, logprobs, tail, columns);
    }

    /// Output: the number of kept tokens (u32), then the tail (f32).
    fn kernel(&self, vocab: usize) -> SignalKernel {
        SignalKernel {
            name: Some("noise_top_p"),
            constants: self.mass.to_ne_bytes().to_vec(),
            count: self.max_entries.min(vocab) as u32,
            output_bytes: size_of::<u32>() + size_of::<f32>(),
            top_entries: self.max_entries.min(vocab),
            ..SignalKernel::default()
        }
    }

    fn read_kernel_output(&self, output: &[u8], (tokens, logprobs): (&[u32], &[f32]), columns: &mut RowSignals) {
        let (count, tail) = output.split_at(output.len() / 2);
        let count = u32s_of_bytes(count).first().map_or(0, |count| (*count as usize).min(tokens.len()));
        let tail = f32s_of_bytes(tail).first().copied().unwrap_or(f32::NAN);
        push_columns(tokens[..count].to_vec(), logprobs[..count].to_vec(), tail, columns);
    }
}

impl StoredSignal for TopP {
    fn columns(&self) -> Vec<SignalColumn> {
        vec![
            SignalColumn::new(columns::TOP_P_COUNT, ItemType::U16, ColumnShape::Count),
            SignalColumn::new(columns::TOP_P_INDEX, ItemType::Token, ColumnShape::List),
            SignalColumn::new(columns::TOP_P_LOGPROB, ItemType::F32, ColumnShape::List),
            SignalColumn::new(columns::TOP_P_TAIL, ItemType::F32, ColumnShape::Scalar),
        ]
    }

    fn certain(&self, token: u32, columns: &mut RowSignals) {
        push_columns(vec![token], vec![0.0], f32::NEG_INFINITY, columns);
    }

    fn check(&self, values: &[Values], vocab: usize) -> Option<String> {
        let (tokens, logprobs, tail) = (u32s(values, 1), f32s(values, 2), f32_of(values, 3));
        if !(1..=self.max_entries).contains(&tokens.len()) {
            return Some(format!("top_p_count {}, valid: 1 to {}", tokens.len(), self.max_entries));
        }
        let kept: Vec<(u32, f32)> = tokens.iter().copied().zip(logprobs.iter().copied()).collect();
        let descends = kept.is_sorted_by(|a, b| a.1 > b.1 || (a.1 == b.1 && a.0 != b.0));
        let is_inside = kept.iter().all(|entry| (entry.0 as usize) < vocab && entry.1 <= 0.0);
        if !descends || !is_inside {
            return Some(format!("top-p entries {kept:?} do not descend within the vocabulary"));
        }
        let sum = mass_of(logprobs) + f64::from(tail).exp();
        let is_whole = matches!((sum - 1.0).abs(), 0.0..=1e-4);
        (!is_whole).then(|| format!("the top-p entries and their tail hold {sum}, valid: 1"))
    }

    /// If the logits have the same bits, tokens and tail must be equal. Otherwise ties may change which entries are
    /// kept.
    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        row: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let (tokens, expected_tokens) = (u32s(got, 1), u32s(expected, 1));
        let (logprobs, expected_logprobs) = (f32s(got, 2), f32s(expected, 2));
        let (tail, expected_tail) = (f32_of(got, 3), f32_of(expected, 3));
        for (token, logprob) in tokens.iter().zip(logprobs) {
            let exact = row.logprob(*token) as f32;
            if differs(*logprob, exact, tolerances.listed(exact)) {
                return mismatch(&format!("top_p_logprob of {token}"), *logprob, exact);
            }
        }
        let counts = (tokens.len(), expected_tokens.len());
        let count_differs = || Some(format!("top_p_count is {}, recomputed it is {}", counts.0, counts.1));
        if tolerances.is_exact() {
            if counts.0 != counts.1 {
                return count_differs();
            }
            if tokens != expected_tokens {
                return Some(format!("top_p_index is {tokens:?}, recomputed it is {expected_tokens:?}"));
            }
            let tail_differs = differs(tail, expected_tail, tolerances.relative());
            return if tail_differs { mismatch("top_p_tail", tail, expected_tail) } else { None };
        }
        let (tail_mass, expected_mass) = (f64::from(tail).exp(), f64::from(expected_tail).exp());
        if counts.0 == counts.1 && (tail_mass - expected_mass).abs() > tolerances.relative() * expected_mass + 1e-6 {
            return mismatch("top_p_tail", tail, expected_tail);
        }
        // The kept entries hold just the required mass: their number equals the recomputed one, except in close calls.
        let more = counts.0.abs_diff(counts.1);
        let distance = (mass_of(logprobs) - mass_of(expected_logprobs)).abs();
        let is_close = distance <= more as f64 * 0.5 + tolerances.relative();
        if is_close && more <= 1 + counts.1 / 8 { None } else { count_differs() }
    }

    /// About a tenth of `max_entries` are needed.
    fn bytes_per_token(&self, token_bytes: f64) -> f64 {
        let kept = 1.0 + self.max_entries as f64 * self.mass.powi(2) / 8.0;
        4.6 + kept * (token_bytes + 3.6)
    }

    fn max_values(&self, vocab: usize) -> usize {
        2 + 2 * vocab.min(self.max_entries)
    }

    fn view(&self, positions: &[&[Values]], _: usize) -> Vec<Series> {
        let mass = self.mass;
        let describe_count =
            move |kept: f64| ("top-p".into(), format!("{kept:.1} tokens on average for {mass} of the mass"));
        let describe_tail = |mean: f64| ("mass outside of top-p".into(), format!("{mean:.4} on average"));
        vec![
            Series {
                title: "tokens kept by top-p".into(),
                values: positions.iter().map(|values| u32s(values, 1).len() as f64).collect(),
                axis: Axis::UpTo(self.max_entries as f64),
                describe_mean: Box::new(describe_count),
            },
            Series {
                title: "mass outside of top-p".into(),
                values: positions.iter().map(|values| f64::from(f32_of(values, 3)).exp()).collect(),
                axis: Axis::FromZero,
                describe_mean: Box::new(describe_tail),
            },
        ]
    }

    fn summary(&self, values: &[Values]) -> String {
        format!("top-p {} + {:.1e}", u32s(values, 1).len(), f64::from(f32_of(values, 3)).exp())
    }

    fn top_entries_setting(&self) -> Option<(&'static str, usize)> {
        Some(("extract.top_p.most", self.max_entries))
    }
}
