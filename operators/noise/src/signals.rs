//! Other teacher signals for training students, computed from the logits l `[V]` of one row while its softmax is in
//! memory.
//!
//! | signal | definition | error |
//! |---|---|---|
//! | log-partition at T | ln Σ_k exp(l_k / T) | 1e-5 nat, or half a unit in the last place of its f32 where that is more |
//! | entropy | −Σ_k p_k · ln p_k, nat | 1e-5 nat |
//! | candidates | ln p_k of given k | half a unit in the last place, at least 1e-6 |
//! | sampled logits | N draws from q ∝ p^t, as distinct tokens with counts | unbiased: E\[count_k / N · p_k / q_k\] = p_k |
//! | top-p | the smallest set of most likely entries that holds a mass, and ln of the remaining mass (tail) | tail: 1e-5, relative |
//!
//! Sampled logits implement Sparse Logit Sampling (arXiv 2503.16870, section 3). With t = 1 the weight of a drawn token
//! is count/N. With another t it is count/N · p/q, **not** divided by its sum over the row, which would bias it.
//!
//! ```text
//!   sums of q by blocks of 1,024 ─► N keyed uniforms, sorted, times the total ─► block ─► entry ─► runs of equal ones
//! ```
//!
//! Cost: one pass with one exponential per entry for each temperature other than 1 and for the draws; one pass with a
//! product per entry for the entropy; one pass with a sum for the tail. Memory: one block. Entries with (l − max l)/T
//! below −60 count as 0; they are at most 1e-26 of the largest.

use std::cmp::Ordering;

use crate::kernels::{self, Block};
use crate::philox::BLOCK;
use crate::{KeyedUniforms, NoiseError, Softmax, keyed_uniforms, top_k_of_loaded};

/// Purpose of the uniforms of sampled logits. Their stream number is the position.
const PURPOSE: &str = "sampled_logits";

/// The requested signals, besides noise and top-k.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SignalSpec {
    /// Temperatures of the log-partitions.
    pub temperatures: Vec<f64>,
    /// Whether to compute the entropy.
    pub entropy: bool,
    /// Vocabulary entries whose ln p to return.
    pub candidates: Vec<u32>,
    /// Parameters of sampled logits.
    pub sampling: Option<LogitSampling>,
    /// Parameters of top-p.
    pub top_p: Option<TopP>,
}

/// Parameters of sampled logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitSampling {
    /// Number of draws N.
    pub draws: u32,
    /// Exponent t of the proposal q ∝ p^t.
    pub power: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl LogitSampling {
    /// Returns the uniforms of a position, one per draw.
    #[must_use]
    pub fn uniforms(&self, sequence_id: u64, position: u32) -> KeyedUniforms {
        keyed_uniforms(self.seed, PURPOSE, sequence_id, position)
    }
}

/// Limits of top-p.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TopP {
    /// Probability that the kept entries reach, unless that takes more than `max_entries` entries.
    pub mass: f64,
    /// Largest number of kept entries.
    pub max_entries: usize,
}

/// A drawn token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampledLogit {
    /// Vocabulary entry.
    pub index: u32,
    /// Number of times it was drawn.
    pub count: u32,
    /// p/q; 1 if t = 1.
    pub ratio: f32,
}

/// The signals of one row. Signals that were not requested are empty or 0.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RowSignals {
    /// ln Σ exp(l/T) of each temperature.
    pub logz: Vec<f32>,
    /// Entropy, nat.
    pub entropy: f32,
    /// ln p of each candidate.
    pub candidates: Vec<f32>,
    /// Drawn tokens, ascending by entry.
    pub sampled: Vec<SampledLogit>,
    /// The most likely entries with their ln p, in descending order, ties by lower entry.
    pub top_p: Vec<(u32, f32)>,
    /// ln of the total probability of the entries outside `top_p`; −∞ if there is none, 0 if top-p was not requested.
    pub tail: f32,
}

impl SignalSpec {
    /// Whether no signal is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let Self { temperatures, entropy, candidates, sampling, top_p } = self;
        temperatures.is_empty() && !entropy && candidates.is_empty() && sampling.is_none() && top_p.is_none()
    }

    /// Checks that all candidates are in the vocabulary.
    ///
    /// # Errors
    /// Names the first candidate that is not.
    pub fn check(&self, vocab: usize) -> Result<(), NoiseError> {
        match self.candidates.iter().find(|&&k| k as usize >= vocab) {
            Some(&k) => Err(NoiseError::Range { what: "candidate", got: i64::from(k), last: vocab as i64 - 1 }),
            None => Ok(()),
        }
    }

    /// Returns the signals of a position whose token is certain: p is one-hot, l = ln p.
    #[must_use]
    pub fn one_hot(&self, token: u32) -> RowSignals {
        let logprob = |k: &u32| if *k == token { 0.0 } else { f32::NEG_INFINITY };
        let draw = |s: LogitSampling| SampledLogit { index: token, count: s.draws, ratio: 1.0 };
        RowSignals {
            logz: vec![0.0; self.temperatures.len()],
            entropy: 0.0,
            candidates: self.candidates.iter().map(logprob).collect(),
            sampled: self.sampling.map(draw).into_iter().collect(),
            top_p: self.top_p.map(|_| (token, 0.0)).into_iter().collect(),
            tail: if self.top_p.is_some() { f32::NEG_INFINITY } else { 0.0 },
        }
    }
}

/// Returns the signals of the row that `softmax` holds. The candidates must be in the vocabulary.
#[must_use]
pub fn signals_of_loaded(
    requested: &SignalSpec,
    softmax: &Softmax,
    logits: &[f32],
    sequence_id: u64,
    position: u32,
) -> RowSignals {
    let candidate = |k: &u32| logits.get(*k as usize).map_or(f32::NAN, |l| softmax.logprob(*l) as f32);
    let mut row = RowSignals {
        logz: requested.temperatures.iter().map(|t| log_partition(softmax, logits, *t) as f32).collect(),
        entropy: if requested.entropy { entropy(softmax, logits) as f32 } else { 0.0 },
        candidates: requested.candidates.iter().map(candidate).collect(),
        ..RowSignals::default()
    };
    if let Some(sampling) = &requested.sampling {
        row.sampled = sample_logits(softmax, logits, sampling, sequence_id, position);
    }
    if let Some(top_p) = &requested.top_p {
        (row.top_p, row.tail) = top_p_with_tail(softmax, logits, top_p);
    }
    row
}

/// ln Σ exp(l/T).
fn log_partition(softmax: &Softmax, logits: &[f32], temperature: f64) -> f64 {
    let ln_z = if temperature == 1.0 {
        softmax.ln_z()
    } else {
        let sums = sums_of_powers(softmax, logits, (1.0 / temperature) as f32);
        libm::log(sums.iter().sum())
    };
    f64::from(softmax.max()) / temperature + ln_z
}

/// Σ exp((l − max)·factor) of each block.
fn sums_of_powers(softmax: &Softmax, logits: &[f32], factor: f32) -> Vec<f64> {
    let mut block = Block::ZERO;
    let block_sum =
        |logits: &[f32]| kernels::block_of_powers(softmax.level(), logits, softmax.max(), factor, &mut block);
    logits.chunks(BLOCK).map(block_sum).collect()
}

/// −Σ p·ln p = ln Z + Σ u·(max − l) / Z.
fn entropy(softmax: &Softmax, logits: &[f32]) -> f64 {
    let mut scratch = Block::ZERO;
    let blocks = logits.chunks(BLOCK).zip(softmax.unnormalised());
    let sum: f64 = blocks
        .map(|(logits, u)| kernels::block_of_distances(softmax.level(), u, logits, softmax.max(), &mut scratch))
        .sum();
    (softmax.ln_z() + sum / softmax.z()).max(0.0)
}

/// Draws N tokens from q ∝ p^t by inversion: uniform u_i selects the first entry where the running sum of
/// exp(t·(l − max)) exceeds u_i times the total.
fn sample_logits(
    softmax: &Softmax,
    logits: &[f32],
    sampling: &LogitSampling,
    sequence_id: u64,
    position: u32,
) -> Vec<SampledLogit> {
    let factor = sampling.power as f32;
    let sums = sums_of_powers(softmax, logits, factor);
    let total: f64 = sums.iter().sum();
    let mut uniforms = sampling.uniforms(sequence_id, position);
    let mut targets: Vec<f64> = (0..sampling.draws).map(|_| uniforms.next_f64() * total).collect();
    targets.sort_unstable_by(f64::total_cmp);
    let ln_total = libm::log(total);
    let ratio = |index: usize| {
        if sampling.power == 1.0 {
            return 1.0;
        }
        let distance = f64::from(logits[index]) - f64::from(softmax.max());
        libm::exp(softmax.logprob(logits[index]) - (sampling.power * distance - ln_total)) as f32
    };
    let mut sampled: Vec<SampledLogit> = Vec::new();
    let mut take = |index: usize| match sampled.last_mut() {
        Some(last) if last.index as usize == index => last.count += 1,
        _ => sampled.push(SampledLogit { index: index as u32, count: 1, ratio: ratio(index) }),
    };
    let (mut rest, mut below, mut block) = (targets.as_slice(), 0.0, Block::ZERO);
    let last = sums.iter().rposition(|sum| *sum > 0.0).unwrap_or(0);
    for (b, (logits, sum)) in logits.chunks(BLOCK).zip(&sums).enumerate() {
        let in_this_block = if b == last { rest.len() } else { rest.partition_point(|target| *target < below + sum) };
        let (targets, after) = rest.split_at(in_this_block);
        rest = after;
        if !targets.is_empty() {
            kernels::block_of_powers(softmax.level(), logits, softmax.max(), factor, &mut block);
            select_in_block(&block, below, targets, |i| take(b * BLOCK + i));
        }
        below += sum;
    }
    sampled
}

/// Calls `take` with the entry where the running sum first exceeds each target. The sum of single entries may round to
/// a little less than the block's sum; the last entry with positive weight takes the remaining targets.
fn select_in_block(block: &Block, below: f64, targets: &[f64], mut take: impl FnMut(usize)) {
    let last = block.0.iter().rposition(|v| *v > 0.0).unwrap_or(0);
    let (mut i, mut sum) = (0, below + f64::from(block.0[0]));
    for target in targets {
        while i < last && sum.partial_cmp(target) != Some(Ordering::Greater) {
            i += 1;
            sum += f64::from(block.0[i]);
        }
        take(i);
    }
}

/// Returns the smallest set of most likely entries that holds the mass, and ln of the mass of the others. That mass is
/// summed on its own, because 1 − Σ p would lose a tail of 1e-9.
fn top_p_with_tail(softmax: &Softmax, logits: &[f32], top_p: &TopP) -> (Vec<(u32, f32)>, f32) {
    // Most rows need few entries, so k grows only while the mass is not reached.
    let (mut k, mut mass);
    let mut best = Vec::new();
    let mut count = 16.min(top_p.max_entries);
    loop {
        best.clear();
        best.extend(top_k_of_loaded(softmax, logits, count));
        (k, mass) = (0, 0.0);
        while k < best.len() && mass < top_p.mass {
            mass += libm::exp(f64::from(best[k].1));
            k += 1;
        }
        if mass >= top_p.mass || count >= top_p.max_entries.min(logits.len()) {
            break;
        }
        count = (8 * count).min(top_p.max_entries);
    }
    best.truncate(k.max(1));
    let mut kept: Vec<usize> = best.iter().map(|entry| entry.0 as usize).collect();
    kept.sort_unstable();
    let mut kept = kept.iter().peekable();
    let mut tail = 0.0;
    for (b, u) in softmax.unnormalised().iter().enumerate() {
        let mut block = None;
        while let Some(&&k) = kept.peek()
            && k / BLOCK == b
        {
            block.get_or_insert(*u).0[k % BLOCK] = 0.0;
            kept.next();
        }
        tail += kernels::block_sum(softmax.level(), block.as_ref().unwrap_or(u));
    }
    (best, (libm::log(tail) - softmax.ln_z()) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    fn all(vocab: usize) -> SignalSpec {
        SignalSpec {
            temperatures: vec![1.0, 2.0, 0.5],
            entropy: true,
            candidates: vec![0, vocab as u32 - 1],
            sampling: Some(LogitSampling { draws: 50, power: 1.0, seed: 3 }),
            top_p: Some(TopP { mass: 0.9, max_entries: 64 }),
        }
    }

    fn of(requested: &SignalSpec, logits: &[f32], position: u32) -> RowSignals {
        let mut softmax = Softmax::new(logits.len()).unwrap();
        softmax.load(logits).unwrap();
        signals_of_loaded(requested, &softmax, logits, 7, position)
    }

    fn random(vocab: usize, scale: f64, seed: u64) -> Vec<f32> {
        let mut uniforms = keyed_uniforms(seed, "test", vocab as u64, 0);
        (0..vocab).map(|_| (scale * (uniforms.next_f64() + uniforms.next_f64() - 1.0)) as f32).collect()
    }

    /// Returns ln Σ exp(l/T) and ln p, computed in f64.
    fn exact(logits: &[f32], temperature: f64) -> (f64, Vec<f64>) {
        let l: Vec<f64> = logits.iter().map(|l| f64::from(*l) / temperature).collect();
        let max = l.iter().fold(f64::MIN, |a, b| a.max(*b));
        let ln_z = l.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
        (max + ln_z, l.iter().map(|l| (l - max) - ln_z).collect())
    }

    #[test]
    fn signals_are_those_of_f64() {
        let sure = [0.0, -(1e9f64 - 1.0).ln() as f32]; // p = 1 − 1e-9
        let huge = [3e38f32, -3e38, 1e30, 3e38];
        let cases = [
            sure.to_vec(),
            huge.to_vec(),
            vec![-1e4, -1e4 + 1.0],
            vec![5.0],
            vec![0.0; 50_257],
            random(1_000, 20.0, 1),
            random(50_257, 30.0, 2),
            random(2_048, 200.0, 3),
        ];
        for logits in &cases {
            let (requested, vocab) = (all(logits.len()), logits.len());
            let got = of(&requested, logits, 0);
            for (temperature, logz) in requested.temperatures.iter().zip(&got.logz) {
                let expected = exact(logits, *temperature).0;
                if expected.abs() < f64::from(f32::MAX) {
                    let error = (f64::from(*logz) - expected).abs();
                    assert!(error <= 1e-5 + expected.abs() * 6e-8, "V = {vocab}, T = {temperature}: {logz} {expected}");
                }
            }
            let (_, logprobs) = exact(logits, 1.0);
            let entropy: f64 = -logprobs.iter().map(|l| if *l < -700.0 { 0.0 } else { l * l.exp() }).sum::<f64>();
            assert!((f64::from(got.entropy) - entropy).abs() <= 1e-5, "V = {vocab}: {} {entropy}", got.entropy);
            for (k, logprob) in requested.candidates.iter().zip(&got.candidates) {
                let expected = logprobs[*k as usize];
                assert!(
                    (f64::from(*logprob) - expected).abs() <= 1e-6 + expected.abs() * 1.2e-7,
                    "{logprob} {expected}"
                );
            }
            let held = |n: usize| got.top_p[..n].iter().map(|e| logprobs[e.0 as usize].exp()).sum::<f64>();
            let n = got.top_p.len();
            assert!(n == 64 || held(n) >= 0.9 - 1e-6, "V = {vocab}: {}", held(n));
            assert!(n == 1 || held(n - 1) < 0.9 + 1e-6);
            let others = (0..vocab).filter(|k| got.top_p.iter().all(|e| e.0 as usize != *k));
            let tail: f64 = others.map(|k| logprobs[k].exp()).sum();
            let error = (f64::from(got.tail).exp() - tail).abs();
            assert!(error <= 1e-5 * tail + 1e-24, "V = {vocab}: tail {} {tail}", got.tail);
        }
        let got = of(&all(2), &sure, 0);
        assert!((got.tail - 1e-9f32.ln()).abs() < 1e-4, "{}", got.tail);
        assert_eq!(got.top_p.len(), 1);
    }

    /// Expected values: numpy 2, float64, l = [1, 2, 3, −4], `np.log(np.exp(l / T).sum())` and so on.
    #[test]
    fn numbers_of_numpy() {
        let requested = SignalSpec { candidates: vec![3, 1], ..all(4) };
        let got = of(&requested, &[1.0, 2.0, 3.0, -4.0], 0);
        for (got, numpy) in got.logz.iter().zip([3.408_212_401_754_417, 2.195_448_273_167_654, 6.142_932_349_279_819]) {
            assert!((f64::from(*got) - numpy).abs() < 1e-6, "{got} {numpy}");
        }
        assert!((f64::from(got.entropy) - 0.836_988_263_221_596_6).abs() < 1e-6, "{}", got.entropy);
        assert!((got.candidates[0] + 7.408_212).abs() < 2e-6 && (got.candidates[1] + 1.408_212_4).abs() < 1e-6);
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let logits = random(5_003, 25.0, 9);
        let requested = SignalSpec { sampling: Some(LogitSampling { draws: 200, power: 0.7, seed: 5 }), ..all(5_003) };
        let rows = Level::available().into_iter().flatten().map(|level| {
            let mut softmax = Softmax::at_level(logits.len(), level).unwrap();
            softmax.load(&logits).unwrap();
            signals_of_loaded(&requested, &softmax, &logits, 7, 2)
        });
        let rows: Vec<RowSignals> = rows.collect();
        assert!(rows.iter().all(|row| *row == rows[0]));
    }

    /// Over 2,000 positions with 50 draws, the mean estimate of every p is within 4 standard errors, for t = 1 and
    /// others.
    #[test]
    fn sampled_logits_are_unbiased() {
        let logits = random(40, 6.0, 4);
        let (_, logprobs) = exact(&logits, 1.0);
        for power in [1.0, 0.8, 1.2, 0.3] {
            let requested =
                SignalSpec { sampling: Some(LogitSampling { draws: 50, power, seed: 3 }), ..SignalSpec::default() };
            let q: Vec<f64> = logprobs.iter().map(|l| (power * l).exp()).collect();
            let total: f64 = q.iter().sum();
            let mut mean = vec![0f64; logits.len()];
            for position in 0..2_000 {
                let row = of(&requested, &logits, position);
                assert_eq!(row.sampled.iter().map(|s| s.count).sum::<u32>(), 50);
                assert!(row.sampled.is_sorted_by(|a, b| a.index < b.index));
                for s in row.sampled {
                    mean[s.index as usize] += f64::from(s.count) * f64::from(s.ratio) / 1e5;
                }
            }
            let chi: f64 = (0..logits.len())
                .map(|k| {
                    let (p, q) = (logprobs[k].exp(), q[k] / total);
                    let error = p / q * (q * (1.0 - q) / 1e5).sqrt();
                    assert!((mean[k] - p).abs() < 4.0 * error, "t = {power}, entry {k}: {} {p} ± {error}", mean[k]);
                    ((mean[k] - p) / error).powi(2)
                })
                .sum();
            assert!(chi > 10.0 && chi < 80.0, "t = {power}: {chi}"); // 40 entries: consistent with chance
        }
    }

    #[test]
    fn draws_are_those_of_the_uniforms() {
        let logits = random(3_000, 10.0, 8);
        let (_, logprobs) = exact(&logits, 1.0);
        let requested =
            SignalSpec { sampling: Some(LogitSampling { draws: 100, power: 1.0, seed: 3 }), ..SignalSpec::default() };
        let mut uniforms = keyed_uniforms(3, "sampled_logits", 7, 5);
        let mut expected: Vec<u32> = (0..100)
            .map(|_| {
                let (u, mut sum) = (uniforms.next_f64(), 0.0);
                let at = logprobs.iter().position(|l| {
                    sum += l.exp();
                    sum > u
                });
                at.unwrap() as u32
            })
            .collect();
        expected.sort_unstable();
        let drawn = of(&requested, &logits, 5).sampled;
        let drawn: Vec<u32> = drawn.iter().flat_map(|s| vec![s.index; s.count as usize]).collect();
        assert_eq!(drawn, expected);
    }

    /// A candidate belongs to the request, not to a position.
    #[test]
    fn invalid_candidates_are_named_without_a_position() {
        let requested = SignalSpec { candidates: vec![9, 10], ..SignalSpec::default() };
        assert_eq!(requested.check(11), Ok(()));
        let error = requested.check(10).unwrap_err();
        assert_eq!(error.to_string(), "candidate 10 is out of range (0 to 9)");
    }

    #[test]
    fn certain_positions_are_one_hot() {
        let requested = SignalSpec { candidates: vec![4, 9], ..all(10) };
        let row = requested.one_hot(9);
        assert_eq!((row.logz, row.entropy), (vec![0.0; 3], 0.0));
        assert_eq!(row.candidates, [f32::NEG_INFINITY, 0.0]);
        assert_eq!(row.sampled, [SampledLogit { index: 9, count: 50, ratio: 1.0 }]);
        assert_eq!((row.top_p, row.tail), (vec![(9, 0.0)], f32::NEG_INFINITY));
        assert_eq!(SignalSpec::default().one_hot(3), RowSignals::default());
    }
}
