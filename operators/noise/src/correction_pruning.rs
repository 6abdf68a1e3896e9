//! Drops corrections for a looser tolerance, from the stored data alone, without the teacher.
//!
//! ```text
//!   stored at t: TV(true, stored) ≤ t
//!   dropping corrections moves softmax(ξ̂) by TV ≤ Δ/(Z + Δ)
//!     with Δ = Σ (1/e_k − 1/Ê_k) over the dropped entries, Z = Σ 1/Ê over all entries
//!   so at t′: t + Δ/(Z + Δ) ≤ t′
//! ```
//!
//! Without its correction an entry has the larger weight 1/e_k instead of 1/Ê_k. The new distribution is therefore a
//! mixture of the old one with a share Δ/(Z + Δ) of another, and this share bounds their distance. The pruner drops
//! the corrections with the smallest effect first. If the observed token must win in l + ξ̂, an entry keeps its
//! correction unless the observed token beats it by a margin without one: twice the required lead, plus twice the
//! rounding error of the stored value.
//!
//! It keeps more corrections than the encoder would at t′: the encoder knows the true error, the pruner must assume
//! t.
//!
//! Cost per token and draw: one pass over V for the exponentials, and one for Z.

use crate::dispatch::Level;
use crate::posterior::{check_token, exponentials};
use crate::{Correction, NoiseError, NoiseStream, StoredToken, Tolerance, ValueType, kernels};

/// Drops corrections. Holds scratch of 4·V bytes.
#[derive(Debug, Clone)]
pub struct CorrectionPruner {
    /// Largest total variation by which the distribution may move.
    tv_budget: f64,
    /// The lead that the observed token must have over an entry without correction; `None` if it need not win.
    lead: Option<f64>,
    /// Relative error of a stored ln p.
    rounding: f64,
    totals: Vec<f32>,
    entries: Vec<Entry>,
}

/// The corrections of one vocabulary entry.
#[derive(Debug, Clone)]
struct Entry {
    index: u32,
    /// Increase of the entry's weight if its corrections are dropped.
    growth: f64,
    is_droppable: bool,
}

impl CorrectionPruner {
    /// Creates a pruner from one tolerance to a looser one; `None` if the looser one leaves no margin beyond the
    /// first.
    ///
    /// # Errors
    /// If `vocab` is 0 or exceeds 2^32, the largest vocabulary that an index type of the format addresses.
    pub fn new(
        vocab: usize,
        (from, to): (Tolerance, Tolerance),
        condition: bool,
        value_type: ValueType,
    ) -> Result<Option<Self>, NoiseError> {
        if vocab == 0 || vocab as u64 > 1 << 32 {
            return Err(NoiseError::Vocabulary { vocab });
        }
        let tv_budget = to.target() - from.get();
        let rounding = match value_type {
            ValueType::F16 => 1.0 / 2048.0,
            ValueType::F32 => 1.0 / f64::from(1 << 24),
        };
        Ok((tv_budget > 0.0).then(|| Self {
            tv_budget,
            lead: condition.then(|| to.lead()),
            rounding,
            totals: vec![0.0; vocab],
            entries: Vec::new(),
        }))
    }

    /// Appends the remaining corrections to `kept`, in their order. Returns an upper bound on how far softmax(ξ̂)
    /// moves.
    ///
    /// # Errors
    /// If the token or a correction is outside the vocabulary, or a correction is not finite.
    pub fn prune(
        &mut self,
        stored: &StoredToken<'_>,
        stream: &NoiseStream,
        kept: &mut Vec<Correction>,
    ) -> Result<f64, NoiseError> {
        if stored.corrections.is_empty() {
            return Ok(0.0);
        }
        check_token(stored.token, self.totals.len(), stream)?;
        let e0 = f64::from(exponentials(stream, &mut self.totals));
        self.entries.clear();
        for values in stored.corrections.chunk_by(|a, b| a.index == b.index) {
            let entry = self.entry(values, stream, e0)?;
            self.entries.push(entry);
        }
        let token_weight = crate::decode::weight_of_token(f64::from(stored.logprob), e0 as f32);
        self.totals[stored.token as usize] = f32::INFINITY; // weight 0
        let z = kernels::reciprocals(Level::detect(), &mut self.totals) + token_weight;
        // Smallest growth first, ties by lower index.
        let mut order: Vec<usize> = (0..self.entries.len()).filter(|&i| self.entries[i].is_droppable).collect();
        order.sort_by(|&a, &b| self.entries[a].growth.total_cmp(&self.entries[b].growth));
        let (mut total_growth, mut dropped) = (0.0, 0);
        for &i in &order {
            let next_growth = total_growth + self.entries[i].growth;
            if next_growth / (z + next_growth) > self.tv_budget {
                break;
            }
            (total_growth, dropped) = (next_growth, dropped + 1);
        }
        let mut dropped_indices: Vec<u32> = order[..dropped].iter().map(|&i| self.entries[i].index).collect();
        dropped_indices.sort_unstable();
        kept.extend(stored.corrections.iter().filter(|c| dropped_indices.binary_search(&c.index).is_err()));
        Ok(total_growth / (z + total_growth))
    }

    /// Adds the corrections to the entry's total, and returns the effect of dropping them.
    fn entry(&mut self, values: &[Correction], stream: &NoiseStream, e0: f64) -> Result<Entry, NoiseError> {
        let (index, vocab) = (values[0].index, self.totals.len());
        if let Some(bad) = values.iter().find(|c| c.index as usize >= vocab || !c.logprob.is_finite()) {
            let NoiseStream { sequence_id, position, .. } = *stream;
            let Correction { index, logprob } = *bad;
            return Err(NoiseError::Correction { sequence_id, position, index, logprob, vocab });
        }
        let total = &mut self.totals[index as usize];
        let prior = f64::from(*total);
        let p: f64 = values.iter().map(|c| libm::exp(f64::from(c.logprob))).sum();
        for c in values {
            // In the order and precision of the decoder.
            *total = (f64::from(*total) + libm::exp(f64::from(c.logprob)) * e0) as f32;
        }
        let is_droppable = self.lead.is_none_or(|lead| {
            let rounding_error = 2.0 * self.rounding * f64::from(values[0].logprob).abs();
            // ln of the distance between the entry and the observed token in l + ξ̂, both without ln Z.
            libm::log(prior) - libm::log(p) - libm::log(e0) >= 2.0 * lead + rounding_error
        });
        let growth = 1.0 / prior - 1.0 / f64::from(*total);
        Ok(Entry { index, growth: growth.max(0.0), is_droppable })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DrawKey, Encoder, keyed_uniforms, measure_accuracy};

    /// Returns the logits of a Zipf distribution in random order, with a sharpness that varies by row, and a token.
    fn row(vocab: usize, number: u64) -> (Vec<f32>, u32) {
        let mut uniforms = keyed_uniforms(3, "logits of a test", number, 0);
        let sharpness = 0.3 + uniforms.next_f64() * 2.0;
        let mut logits: Vec<f32> = (0..vocab).map(|k| (-sharpness * ((k + 1) as f64).ln()) as f32).collect();
        for k in (1..vocab).rev() {
            logits.swap(k, uniforms.below(k as u32 + 1) as usize);
        }
        (logits, uniforms.below(vocab as u32))
    }

    #[test]
    fn what_is_left_keeps_the_looser_promise() {
        for (vocab, value_type) in [(2, ValueType::F16), (37, ValueType::F32), (3000, ValueType::F16)] {
            for (from, to) in [(1e-4, 1e-3), (1e-3, 1e-2), (1e-3, 0.3), (1e-2, 1.2e-2)] {
                let [from, to] = [from, to].map(|t| Tolerance::new(t).unwrap());
                let (mut stored, mut left) = (0, 0);
                let mut pruner = CorrectionPruner::new(vocab, (from, to), true, value_type).unwrap().unwrap();
                for number in 0..40 {
                    let (logits, token) = row(vocab, number);
                    let stream = NoiseStream::new(DrawKey::new(8, 0), number, 5);
                    let mut encoder = Encoder::new(vocab, from, value_type).unwrap();
                    let mut corrections = Vec::new();
                    let encoded = encoder.encode(&logits, token, &stream, &mut corrections).unwrap();
                    let of = |corrections| StoredToken { token, logprob: encoded.logprob, corrections };
                    let mut kept = Vec::new();
                    let moved = pruner.prune(&of(&corrections), &stream, &mut kept).unwrap();
                    let accuracy = measure_accuracy(&logits, &of(&kept), &stream).unwrap();
                    assert!(accuracy.total_variation <= to.get(), "{accuracy:?}");
                    assert!(accuracy.lead >= 0.9 * to.lead(), "{accuracy:?}");
                    assert!(
                        accuracy.total_variation <= encoded.total_variation + moved + 1e-6,
                        "{accuracy:?}, {moved}"
                    );
                    assert!(kept.iter().all(|c| corrections.contains(c)) && kept.is_sorted_by_key(|c| c.index));
                    (stored, left) = (stored + corrections.len(), left + kept.len());
                }
                assert!(vocab < 3000 || to.get() < 5.0 * from.get() || left * 2 < stored, "{left} of {stored} left");
            }
        }
    }

    #[test]
    fn no_room_and_wrong_lists_are_told() {
        let tolerance = |t| Tolerance::new(t).unwrap();
        let of = |from, to| CorrectionPruner::new(50, (tolerance(from), tolerance(to)), true, ValueType::F16).unwrap();
        assert!(of(1e-3, 1e-3).is_none() && of(1e-3, 1e-4).is_none() && of(1e-3, 1.0005e-3).is_none());
        let mut pruner = of(1e-3, 1e-2).unwrap();
        let stream = NoiseStream::new(DrawKey::new(8, 0), 1, 5);
        let mut wrong = |index, logprob, token| {
            let corrections = [Correction { index, logprob }];
            let stored = StoredToken { token, logprob: -1.0, corrections: &corrections };
            pruner.prune(&stored, &stream, &mut Vec::new()).unwrap_err().to_string()
        };
        assert!(wrong(50, -2.0, 1).contains("50") && wrong(3, f32::NAN, 1).contains("NaN"));
        assert!(wrong(3, -2.0, 50).contains("token 50"));
    }
}
