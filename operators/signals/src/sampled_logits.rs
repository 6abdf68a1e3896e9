//! `samples`: sampled logits, N tokens drawn from q ∝ p^t, as distinct tokens with counts.
//!
//! Sparse Logit Sampling (arXiv 2503.16870, section 3). With t = 1 the weight of a drawn token is count/N. With another
//! t it is count/N · p/q, **not** divided by its sum over the row, which would bias it.
//!
//! ```text
//!   sums of q by blocks of 1,024 ─► N keyed uniforms, sorted, times the total ─► block ─► entry ─► runs of equal ones
//! ```
//!
//! Cost: one pass with an exponential per entry, and the blocks that draws fall into.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use stillhouse_noise::{
    BLOCK_ENTRIES, KeyedUniforms, LoadedRow, RowSignals, Signal, SignalKernel, Values, keyed_uniforms,
};
use stillhouse_schemas::columns::{self, Column};

use crate::{Axis, ColumnShape, ItemType, Series, SignalColumn, StoredSignal, Tolerances};
use crate::{differs, f32s, f32s_of_bytes, mismatch, u32s, u32s_of_bytes};

pub(crate) const COLUMNS: &[Column] = &[
    Column {
        name: columns::SAMPLED_COUNT,
        dtype: "fixed list uint16",
        when: "`samples`",
        shape: "[L]",
        contract: "number of distinct tokens drawn",
        meaning: "number of distinct tokens drawn from the teacher's distribution at each position",
    },
    Column {
        name: columns::SAMPLED_INDEX,
        dtype: "list uint16 (V ≤ 65,536) / uint32",
        when: "`samples`",
        shape: "[*]",
        contract: "tokens of position 0, then 1, …; ascending within a position",
        meaning: "ids of the drawn tokens: position 0 first",
    },
    Column {
        name: columns::SAMPLED_TIMES,
        dtype: "list uint16",
        when: "`samples`",
        shape: "[*]",
        contract: "how often each token was drawn; the sum per position is N; with `power` 1, times/N is an unbiased estimate of p",
        meaning: "how often each token was drawn; divided by the number of draws, an unbiased estimate of its probability",
    },
    Column {
        name: columns::SAMPLED_RATIO,
        dtype: "list float32",
        when: "`samples.power` ≠ 1",
        shape: "[*]",
        contract: "p/q of each token; times/N · ratio, without normalization, is an unbiased estimate of p",
        meaning: "probability divided by that of the proposal: times/N · ratio is an unbiased estimate of the probability",
    },
];

/// Purpose of the uniforms. Their stream number is the position.
const PURPOSE: &str = "sampled_logits";

/// Sampled logits.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledLogits {
    /// Number of draws N.
    pub draws: u32,
    /// Exponent t of the proposal q ∝ p^t.
    pub power: f64,
    /// Seed of the draws.
    pub seed: u64,
}

/// The distinct drawn tokens of a position, ascending.
#[derive(Default)]
struct Drawn {
    tokens: Vec<u32>,
    times: Vec<u32>,
    /// p/q of each; 1 if t = 1.
    ratios: Vec<f32>,
}

impl Drawn {
    /// Adds a draw, which must not be below the last one.
    fn push(&mut self, token: u32, ratio: impl FnOnce() -> f32) {
        match (self.tokens.last(), self.times.last_mut()) {
            (Some(last), Some(times)) if *last == token => *times += 1,
            _ => {
                self.tokens.push(token);
                self.times.push(1);
                self.ratios.push(ratio());
            }
        }
    }
}

impl SampledLogits {
    /// The uniforms of a position, one per draw.
    fn uniforms(&self, sequence_id: u64, position: u32) -> KeyedUniforms {
        keyed_uniforms(self.seed, PURPOSE, sequence_id, position)
    }

    /// Whether the ratio p/q is stored; for t = 1 it is always 1, so it is not.
    fn has_ratio(&self) -> bool {
        self.power != 1.0
    }

    fn push_columns(&self, drawn: Drawn, columns: &mut RowSignals) {
        columns.push(Values::U32(vec![drawn.tokens.len() as u32]));
        columns.push(Values::U32(drawn.tokens));
        columns.push(Values::U32(drawn.times));
        if self.has_ratio() {
            columns.push(Values::F32(drawn.ratios));
        }
    }

    /// Draws by inversion: uniform u_i selects the first entry where the running sum of exp(t·(l − max l)) exceeds u_i
    /// times the total.
    fn draw(&self, row: &LoadedRow<'_>) -> Drawn {
        let factor = self.power as f32;
        let sums = row.sums_of_powers(factor);
        let total: f64 = sums.iter().sum();
        let mut uniforms = self.uniforms(row.sequence_id, row.position);
        let mut targets: Vec<f64> = (0..self.draws).map(|_| uniforms.next_f64() * total).collect();
        targets.sort_unstable_by(f64::total_cmp);
        let ln_total = libm::log(total);
        let ratio = |index: usize| {
            if !self.has_ratio() {
                return 1.0;
            }
            let logit = row.logits()[index];
            let distance = f64::from(logit) - f64::from(row.softmax().max());
            libm::exp(row.softmax().logprob(logit) - (self.power * distance - ln_total)) as f32
        };
        let mut drawn = Drawn::default();
        let (mut rest, mut below, mut powers) = (targets.as_slice(), 0.0, [0.0; BLOCK_ENTRIES]);
        let last = sums.iter().rposition(|sum| *sum > 0.0).unwrap_or(0);
        for (block, sum) in sums.iter().enumerate() {
            let in_this_block =
                if block == last { rest.len() } else { rest.partition_point(|target| *target < below + sum) };
            let (targets, after) = rest.split_at(in_this_block);
            rest = after;
            if !targets.is_empty() {
                row.powers_of_block(block, factor, &mut powers);
                select_in_block(&powers, below, targets, |i| {
                    let index = block * BLOCK_ENTRIES + i;
                    drawn.push(index as u32, || ratio(index));
                });
            }
            below += sum;
        }
        drawn
    }
}

/// Calls `take` with the entry where the running sum first exceeds each target. The sum of single entries may round to
/// a little less than the block's sum; the last entry with positive weight takes the remaining targets.
fn select_in_block(powers: &[f32; BLOCK_ENTRIES], below: f64, targets: &[f64], mut take: impl FnMut(usize)) {
    let last = powers.iter().rposition(|v| *v > 0.0).unwrap_or(0);
    let (mut i, mut sum) = (0, below + f64::from(powers[0]));
    for target in targets {
        while i < last && sum.partial_cmp(target) != Some(Ordering::Greater) {
            i += 1;
            sum += f64::from(powers[i]);
        }
        take(i);
    }
}

impl Signal for SampledLogits {
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals) {
        self.push_columns(self.draw(row), columns);
    }

    /// Output: the drawn entries (u32), then their ratios (f32). The input holds the uniforms, because only the host has
    /// the keys.
    fn kernel(&self, vocab: usize) -> SignalKernel {
        let draws = self.draws as usize;
        SignalKernel {
            name: Some("noise_sampled_logits"),
            constants: self.power.to_ne_bytes().to_vec(),
            count: self.draws,
            input_bytes: draws * size_of::<f64>(),
            scratch_bytes: vocab.div_ceil(BLOCK_ENTRIES) * size_of::<f64>(),
            output_bytes: draws * (size_of::<u32>() + size_of::<f32>()),
            ..SignalKernel::default()
        }
    }

    fn write_kernel_input(&self, sequence_id: u64, position: u32, input: &mut [u8]) {
        let mut uniforms = self.uniforms(sequence_id, position);
        input.as_chunks_mut::<8>().0.iter_mut().for_each(|to| *to = uniforms.next_f64().to_ne_bytes());
    }

    fn read_kernel_output(&self, output: &[u8], _: (&[u32], &[f32]), columns: &mut RowSignals) {
        let (tokens, ratios) = output.split_at(output.len() / 2);
        let mut draws: Vec<(u32, f32)> = u32s_of_bytes(tokens).into_iter().zip(f32s_of_bytes(ratios)).collect();
        draws.sort_unstable_by_key(|draw| draw.0);
        let mut drawn = Drawn::default();
        draws.into_iter().for_each(|(token, ratio)| drawn.push(token, || ratio));
        self.push_columns(drawn, columns);
    }
}

impl StoredSignal for SampledLogits {
    fn columns(&self) -> Vec<SignalColumn> {
        let ratio = SignalColumn::new(columns::SAMPLED_RATIO, ItemType::F32, ColumnShape::List);
        let mut columns = vec![
            SignalColumn::new(columns::SAMPLED_COUNT, ItemType::U16, ColumnShape::Count),
            SignalColumn::new(columns::SAMPLED_INDEX, ItemType::Token, ColumnShape::List),
            SignalColumn::new(columns::SAMPLED_TIMES, ItemType::U16, ColumnShape::List),
        ];
        columns.extend(self.has_ratio().then_some(ratio));
        columns
    }

    fn certain(&self, token: u32, columns: &mut RowSignals) {
        self.push_columns(Drawn { tokens: vec![token], times: vec![self.draws], ratios: vec![1.0] }, columns);
    }

    fn check(&self, values: &[Values], vocab: usize) -> Option<String> {
        let (tokens, times) = (u32s(values, 1), u32s(values, 2));
        let sum: u64 = times.iter().map(|times| u64::from(*times)).sum();
        if sum != u64::from(self.draws) || times.contains(&0) {
            return Some(format!("sampled_times add up to {sum}, valid: {}, none 0", self.draws));
        }
        if !tokens.is_sorted_by(|a, b| a < b) || tokens.iter().any(|token| *token as usize >= vocab) {
            return Some("sampled_index does not ascend within the vocabulary".into());
        }
        let bad = f32s(values, 3).iter().find(|ratio| !(ratio.is_finite() && **ratio > 0.0))?;
        Some(format!("sampled_ratio {bad}, valid: finite, above 0"))
    }

    /// A draw may fall on another token if the logits differ: on none of N if they are equal, on 1 + N/64 on a GPU of
    /// the same kind, on 1 + N/4 on another machine.
    fn compare(
        &self,
        got: &[Values],
        expected: &[Values],
        _: &LoadedRow<'_>,
        tolerances: Tolerances,
    ) -> Option<String> {
        let (draws, expected_tokens) = (self.draws, u32s(expected, 1));
        let times: BTreeMap<&u32, &u32> = expected_tokens.iter().zip(u32s(expected, 2)).collect();
        let in_common = |(token, got): (&u32, &u32)| (*got).min(times.get(token).map_or(0, |times| **times));
        let kept: u32 = u32s(got, 1).iter().zip(u32s(got, 2)).map(in_common).sum();
        let moved = draws.saturating_sub(kept);
        let may_move = match tolerances {
            _ if tolerances.is_exact() => 0,
            _ if tolerances.is_same_device() => 1 + draws / 64,
            _ => 1 + draws / 4,
        };
        if moved > may_move {
            return Some(format!("{moved} of {draws} sampled tokens differ from those that the seed gives"));
        }
        let ratios: BTreeMap<&u32, &f32> = expected_tokens.iter().zip(f32s(expected, 3)).collect();
        let (ratio, expected) = u32s(got, 1).iter().zip(f32s(got, 3)).find_map(|(token, ratio)| {
            let expected = **ratios.get(token)?;
            let is_off = differs(*ratio, expected, tolerances.relative() * f64::from(expected));
            is_off.then_some((*ratio, expected))
        })?;
        mismatch("sampled_ratio", ratio, expected)
    }

    /// About a fifth of N draws are distinct.
    fn bytes_per_token(&self, token_bytes: f64) -> f64 {
        let distinct = 1.0 + 0.8 * f64::from(self.draws).powf(0.7);
        1.0 + distinct * (token_bytes + 0.7 + if self.has_ratio() { 3.6 } else { 0.0 })
    }

    fn max_values(&self, vocab: usize) -> usize {
        1 + 3 * vocab.min(self.draws as usize)
    }

    fn view(&self, positions: &[&[Values]], _: usize) -> Vec<Series> {
        let draws = self.draws;
        let describe_mean =
            move |mean: f64| ("sampled logits".into(), format!("{draws} draws, {mean:.1} distinct on average"));
        vec![Series {
            title: "distinct tokens drawn".into(),
            values: positions.iter().map(|values| u32s(values, 1).len() as f64).collect(),
            axis: Axis::UpTo(f64::from(draws)),
            describe_mean: Box::new(describe_mean),
        }]
    }

    fn summary(&self, values: &[Values]) -> String {
        let mut drawn: Vec<(&u32, &u32)> = u32s(values, 1).iter().zip(u32s(values, 2)).collect();
        drawn.sort_by_key(|(token, times)| (std::cmp::Reverse(**times), **token));
        let most: Vec<String> = drawn.iter().take(3).map(|(token, times)| format!("{times}×{token}")).collect();
        format!("drawn {}{}", most.join(" "), if drawn.len() > 3 { " …" } else { "" })
    }
}
