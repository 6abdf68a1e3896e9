//! Tokens that may get a correction, with their quantities in f64.

use crate::kernels::{self, Block, BlockSums};
use crate::philox::BLOCK;
use crate::posterior::Softmax;
use crate::replay::rounding::Values;
use crate::{NoiseStream, ValueType};

/// One vocabulary entry k ≠ x, removed from the vector passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Candidate {
    pub index: u32,
    /// ln p_k.
    pub logprob: f64,
    /// w_k = 1/E_k.
    pub weight: f64,
    /// δ_k without a correction: d_k = 1/e_k − 1/E_k.
    pub excess: f64,
    /// δ_k with the correction as stored.
    pub error: f64,
    /// Stored values of ln p_k.
    pub stored: Values,
    /// The smallest p̂_k with which x wins against k in argmax(l + ξ̂); not above 0 if x wins without a correction.
    pub min_probability: f64,
    /// p_k·e_0, and e_k: the inputs of `error`.
    added: f64,
    exponential: f64,
}

impl Candidate {
    fn new(index: u32, logprob: f64, context: &RowContext<'_>) -> Self {
        let (exponential, e0) = (f64::from(context.stream.exponential(index)), f64::from(context.e0));
        let p = libm::exp(logprob);
        let added = p * e0;
        let weight = 1.0 / (exponential + added);
        let excess = added / exponential * weight;
        let min_probability = p * context.rival_threshold - exponential / e0;
        let stored = Values::single(context.value_type.round(logprob));
        let candidate =
            Self { index, logprob, weight, excess, error: 0.0, stored, min_probability, added, exponential };
        if candidate.accepts(&stored) {
            return candidate.with_stored(stored);
        }
        candidate.with_stored(Values::covering(min_probability, context.value_type).unwrap_or(stored))
    }

    /// Whether this entry beats x unless it is corrected.
    pub(super) fn is_rival(&self) -> bool {
        self.min_probability > 0.0
    }

    /// Whether x wins against this entry with these values.
    pub(super) fn accepts(&self, values: &Values) -> bool {
        // The slack is far above the error of the sum and far below the margin in `min_probability`.
        values.sum() >= self.min_probability * (1.0 - 1e-10)
    }

    /// Returns the candidate with other stored values.
    pub(super) fn with_stored(self, stored: Values) -> Self {
        // ŵ − w = −(p̂ − p)·e_0·ŵ·w, computed without cancellation.
        let shift = self.added * stored.excess_over(self.logprob);
        let decoded = 1.0 / (self.exponential + self.added + shift);
        let error = -shift * decoded * self.weight;
        Self { stored, error, ..self }
    }
}

/// The row that supplies the candidates.
pub(super) struct RowContext<'a> {
    pub logits: &'a [f32],
    pub stream: &'a NoiseStream,
    pub softmax: &'a Softmax,
    pub e0: f32,
    pub value_type: ValueType,
    /// x wins against k if Ê_k reaches p_k·rival_threshold·e_0; 0 if x need not win.
    pub rival_threshold: f64,
}

/// `rival_threshold` for the vector pass, raised so that the pass finds every rival despite the rounding of its f32
/// values.
pub(super) fn with_slack(rival_threshold: f64) -> f32 {
    (rival_threshold * (1.0 + 1e-5)) as f32
}

impl RowContext<'_> {
    /// Moves every token that would beat x without a correction from the arrays to `candidates`; w and d become 0
    /// there.
    pub(super) fn take_rivals(
        &self,
        (w, d): (&mut [Block], &mut [Block]),
        sums: &mut [BlockSums],
        candidates: &mut Vec<Candidate>,
    ) {
        let rival_threshold = with_slack(self.rival_threshold);
        for (b, ((w, d), sums)) in w.iter_mut().zip(d).zip(sums).enumerate() {
            if !sums.has_rival {
                continue;
            }
            let before = candidates.len();
            for (i, (w, d)) in w.0.iter_mut().zip(&mut d.0).enumerate() {
                // d/w = p_k·e_0/e_k; both are 0 at x.
                if *d * rival_threshold > *w {
                    let candidate = self.candidate(b * BLOCK + i);
                    if candidate.is_rival() {
                        (*w, *d) = (0.0, 0.0);
                        candidates.push(candidate);
                    }
                }
            }
            if candidates.len() > before {
                sums.excess = kernels::block_sum(self.softmax.level(), d);
            }
        }
    }

    fn candidate(&self, k: usize) -> Candidate {
        Candidate::new(k as u32, self.softmax.logprob(self.logits[k]), self)
    }

    /// Moves every token with d_k > `threshold` from the arrays to `candidates`; w and d become 0 there. The candidates
    /// stay sorted by descending d_k, ties by index.
    pub(super) fn take_above(
        &self,
        threshold: f32,
        (w, d): (&mut [Block], &mut [Block]),
        sums: &mut [BlockSums],
        found: &mut Vec<u32>,
        candidates: &mut Vec<Candidate>,
    ) {
        let before = candidates.len();
        for (b, ((w, d), sums)) in w.iter_mut().zip(d).zip(sums).enumerate() {
            if sums.largest <= threshold {
                continue;
            }
            found.clear();
            sums.excess = kernels::take_above(self.softmax.level(), d, threshold, found);
            sums.largest = threshold;
            for &i in found.iter() {
                w.0[i as usize] = 0.0;
                candidates.push(self.candidate(b * BLOCK + i as usize));
            }
        }
        // Candidates of an earlier, higher threshold already come first, except for differences in the last bits of f32
        // and f64.
        let new = &mut candidates[before..];
        new.sort_unstable_by(|a, b| b.excess.total_cmp(&a.excess).then(a.index.cmp(&b.index)));
    }
}
