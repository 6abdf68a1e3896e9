//! Tokens that may get a correction, with everything about them in f64.

use crate::NoiseStream;
use crate::kernels::{self, Block, BlockSums};
use crate::philox::BLOCK;
use crate::posterior::Softmax;
use crate::replay::ValueType;
use crate::replay::rounding::Values;

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
    /// p_k·e_0, and e_k: what `error` follows from.
    added: f64,
    exponential: f64,
}

impl Candidate {
    fn new(index: u32, logprob: f64, e0: f32, stream: &NoiseStream, value_type: ValueType) -> Self {
        let exponential = f64::from(stream.exponential(index));
        let added = libm::exp(logprob) * f64::from(e0);
        let weight = 1.0 / (exponential + added);
        let excess = added / exponential * weight;
        let candidate =
            Self { index, logprob, weight, excess, error: 0.0, stored: Values::single(0.0), added, exponential };
        candidate.with_stored(Values::single(value_type.round(logprob)))
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
}

impl Source<'_> {
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
                let k = b * BLOCK + i as usize;
                let logprob = self.softmax.logprob(self.logits[k]);
                candidates.push(Candidate::new(k as u32, logprob, self.e0, self.stream, self.value_type));
            }
        }
        // Those of an earlier, higher threshold are in front already, but for the last bits of f32 against f64.
        let new = &mut candidates[before..];
        new.sort_unstable_by(|a, b| b.excess.total_cmp(&a.excess).then(a.index.cmp(&b.index)));
    }
}
