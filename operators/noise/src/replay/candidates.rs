//! Tokens that may get a correction, with everything about them in f64.

use crate::kernels::{self, Block, BlockSums};
use crate::philox::BLOCK;
use crate::posterior::Softmax;
use crate::replay::rounding::Values;
use crate::{NoiseStream, ValueType};

/// One vocabulary entry k ≠ x, taken out of the vector passes.
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
    /// What is stored of ln p_k.
    pub stored: Values,
    /// The least p̂_k with which x wins against k in argmax(l + ξ̂); not above 0 where it wins without a correction.
    pub least: f64,
    /// p_k·e_0, and e_k: what `error` follows from.
    added: f64,
    exponential: f64,
}

impl Candidate {
    fn new(index: u32, logprob: f64, source: &Source<'_>) -> Self {
        let (exponential, e0) = (f64::from(source.stream.exponential(index)), f64::from(source.e0));
        let p = libm::exp(logprob);
        let added = p * e0;
        let weight = 1.0 / (exponential + added);
        let excess = added / exponential * weight;
        let least = p * source.bar - exponential / e0;
        let stored = Values::single(source.value_type.round(logprob));
        let candidate = Self { index, logprob, weight, excess, error: 0.0, stored, least, added, exponential };
        if candidate.accepts(&stored) {
            return candidate.with_stored(stored);
        }
        candidate.with_stored(Values::covering(least, source.value_type).unwrap_or(stored))
    }

    /// Whether this entry wins against x unless it is corrected.
    pub(super) fn is_rival(&self) -> bool {
        self.least > 0.0
    }

    /// Whether x wins against this entry with these values.
    pub(super) fn accepts(&self, values: &Values) -> bool {
        // far above the error of the sum, far below the margin that is in `least`
        values.sum() >= self.least * (1.0 - 1e-10)
    }

    /// The candidate with other stored values.
    pub(super) fn with_stored(self, stored: Values) -> Self {
        // ŵ − w = −(p̂ − p)·e_0·ŵ·w, without the cancellation
        let shift = self.added * stored.excess_over(self.logprob);
        let decoded = 1.0 / (self.exponential + self.added + shift);
        let error = -shift * decoded * self.weight;
        Self { stored, error, ..self }
    }
}

/// The row that candidates are taken from.
pub(super) struct Source<'a> {
    pub logits: &'a [f32],
    pub stream: &'a NoiseStream,
    pub softmax: &'a Softmax,
    pub e0: f32,
    pub value_type: ValueType,
    /// p_k·bar·e_0 is what Ê_k must reach for x to win against k; 0 where x need not win.
    pub bar: f64,
}

/// `bar` as the vector pass takes it: an entry whose f32 values are off by their rounding is found still.
pub(super) fn loose(bar: f64) -> f32 {
    (bar * (1.0 + 1e-5)) as f32
}

impl Source<'_> {
    /// Moves every token that would beat x without a correction from the arrays (where w and d become 0) to `candidates`.
    pub(super) fn take_rivals(
        &self,
        (w, d): (&mut [Block], &mut [Block]),
        sums: &mut [BlockSums],
        candidates: &mut Vec<Candidate>,
    ) {
        let bar = loose(self.bar);
        for (b, ((w, d), sums)) in w.iter_mut().zip(d).zip(sums).enumerate() {
            if !sums.rival {
                continue;
            }
            let before = candidates.len();
            for (i, (w, d)) in w.0.iter_mut().zip(&mut d.0).enumerate() {
                // d/w = p_k·e_0/e_k; both are 0 at x
                if *d * bar > *w {
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

    /// Moves every token with d_k > `threshold` from the arrays (where w and d become 0) to `candidates`, which stay
    /// sorted by falling d_k, ties by index.
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
        // Those of an earlier, higher threshold are in front already, but for the last bits of f32 against f64.
        let new = &mut candidates[before..];
        new.sort_unstable_by(|a, b| b.excess.total_cmp(&a.excess).then(a.index.cmp(&b.index)));
    }
}
