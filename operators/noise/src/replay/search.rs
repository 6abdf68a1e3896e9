//! The search for a small set of corrections.

use crate::decode::Correction;
use crate::dispatch::Level;
use crate::kernels::{self, Block};
use crate::replay::candidates::{Candidate, RowContext};
use crate::replay::rounding::{choose_roundings, extend_one};
use crate::{Encoder, NoiseError, NoiseStream};

/// Sums over the vocabulary, in f64. For the names see the module [`crate::replay`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Totals {
    /// S = Σ w, including x.
    pub weight: f64,
    /// w_x.
    pub weight_x: f64,
    /// δ_x, the change of w_x from storing ln p_x in 32 bits.
    pub shift_x: f64,
    /// Σ d over the tokens that are neither x nor candidates.
    pub excess: f64,
}

/// Bounds of the total variation when the first m candidates are corrected, and the parameters of an exact pass.
#[derive(Debug, Clone, Copy)]
pub(super) struct Estimate {
    /// Contribution of x and the candidates: a lower bound.
    pub lower: f64,
    /// Lower bound plus the largest possible contribution of all other tokens.
    pub upper: f64,
    a: f64,
    g: f64,
}

fn positive(value: f64) -> f64 {
    if value > 0.0 { value } else { 0.0 }
}

impl Totals {
    pub(super) fn estimate(&self, candidates: &[Candidate], corrected: usize) -> Estimate {
        let (with, without) = candidates.split_at(corrected);
        let shift = self.excess
            + self.shift_x
            + with.iter().map(|c| c.error).sum::<f64>()
            + without.iter().map(|c| c.excess).sum::<f64>();
        let a = 1.0 / (self.weight + shift);
        let g = shift * a / self.weight;
        let lower = positive(self.shift_x * a - self.weight_x * g)
            + with.iter().map(|c| positive(c.error * a - c.weight * g)).sum::<f64>()
            + without.iter().map(|c| positive(c.excess * a - c.weight * g)).sum::<f64>();
        // Rounding may give Ŝ < S. Then every other token gains weight, and the bound is exact.
        let rest = if g < 0.0 {
            let weight = self.weight - self.weight_x - candidates.iter().map(|c| c.weight).sum::<f64>();
            self.excess * a - positive(weight) * g
        } else {
            self.excess * a
        };
        Estimate { lower, upper: lower + rest, a, g }
    }
}

/// Cache of [`kernels::surplus`] results for the current weights: the search needs the same value more than once.
#[derive(Debug, Clone, Default)]
pub(super) struct SurplusCache(Vec<(f32, f32, f64)>);

impl SurplusCache {
    /// Clears the cache, after the weights change.
    fn clear(&mut self) {
        self.0.clear();
    }

    fn get_or_compute(&mut self, level: Level, (w, d): (&[Block], &[Block]), a: f32, g: f32) -> f64 {
        if let Some(&(.., known)) = self.0.iter().find(|known| (known.0, known.1) == (a, g)) {
            return known;
        }
        let surplus = kernels::surplus(level, w, d, a, g);
        self.0.push((a, g, surplus));
        surplus
    }
}

impl Encoder {
    /// Appends the corrections for the current weights to `out`. Returns the remaining total variation. For
    /// `rival_threshold` see [`RowContext`].
    pub(super) fn search(
        &mut self,
        logits: &[f32],
        stream: &NoiseStream,
        e0: f32,
        rival_threshold: f64,
        mut totals: Totals,
        out: &mut Vec<Correction>,
    ) -> Result<f64, NoiseError> {
        let target = self.tolerance.target();
        self.candidates.clear();
        self.surpluses.clear();
        let context =
            RowContext { logits, stream, softmax: &self.softmax, e0, value_type: self.value_type, rival_threshold };
        context.take_rivals((&mut self.w[..], &mut self.d[..]), &mut self.sums, &mut self.candidates);
        // The rivals come before all other candidates and are corrected whatever their weight.
        let rivals = self.candidates.len();
        if rivals > 0 {
            totals.excess = self.sums.iter().map(|s| s.excess).sum();
        }
        if totals.estimate(&self.candidates, rivals).upper <= target {
            return self.finish(&totals, rivals, stream, out);
        }
        // Fewer than tolerance/threshold tokens can exceed a threshold that is a fraction of tolerance·S. The tokens
        // below the last threshold sum to less than the tolerance, for any vocabulary.
        let mut threshold = (target * totals.weight / 4.0) as f32;
        let min_threshold = (target * totals.weight * 1e-3 / logits.len() as f64) as f32;
        loop {
            let context =
                RowContext { logits, stream, softmax: &self.softmax, e0, value_type: self.value_type, rival_threshold };
            let arrays = (&mut self.w[..], &mut self.d[..]);
            context.take_above(threshold, arrays, &mut self.sums, &mut self.found, &mut self.candidates);
            self.surpluses.clear();
            totals.excess = self.sums.iter().map(|s| s.excess).sum();
            let all = self.candidates.len();
            if self.meets_target(&totals, all, target) {
                break;
            }
            let estimate = totals.estimate(&self.candidates, all);
            if estimate.lower > target / 2.0 || threshold <= min_threshold {
                // More candidates alone cannot meet the target: the error comes from rounding the current ones.
                choose_roundings(&mut self.candidates, &totals, self.value_type);
                if self.meets_target(&totals, all, target) {
                    break;
                }
            }
            // The other tokens are already negligible and rounding errors alone exceed the target. Correcting more
            // entries cannot undo them, only additional values of the same entries.
            let estimate = totals.estimate(&self.candidates, all);
            let rounding_alone = estimate.lower > target && estimate.upper - estimate.lower < target / 10.0;
            if (rounding_alone || threshold <= min_threshold) && self.extend(&totals, target) {
                break;
            }
            if threshold <= min_threshold {
                return Err(self.unreachable(&totals, all, stream));
            }
            threshold /= 4.0;
        }
        let count = self.shrink(&totals, rivals, target);
        self.finish(&totals, count, stream, out)
    }

    fn unreachable(&mut self, totals: &Totals, corrected: usize, stream: &NoiseStream) -> NoiseError {
        NoiseError::ToleranceUnreachable {
            sequence_id: stream.sequence_id,
            position: stream.position,
            reached: self.measure(totals, corrected),
            tolerance: self.tolerance.get(),
            value_type: self.value_type,
        }
    }

    /// Appends the first `count` candidates to `out`. Returns the remaining total variation.
    fn finish(
        &mut self,
        totals: &Totals,
        count: usize,
        stream: &NoiseStream,
        out: &mut Vec<Correction>,
    ) -> Result<f64, NoiseError> {
        let total_variation = self.measure(totals, count);
        let kept = &mut self.candidates[..count];
        kept.sort_unstable_by_key(|c| c.index);
        if let Some(beaten) = kept.iter().find(|c| !c.accepts(&c.stored)) {
            return Err(NoiseError::ConditionUnreachable {
                sequence_id: stream.sequence_id,
                position: stream.position,
                index: beaten.index,
                value_type: self.value_type,
            });
        }
        out.extend(
            kept.iter().flat_map(|c| c.stored.as_slice().iter().map(|&logprob| Correction { index: c.index, logprob })),
        );
        Ok(total_variation)
    }

    /// Adds values to corrections, one at a time, until they meet the target. Returns false if that fails.
    fn extend(&mut self, totals: &Totals, target: f64) -> bool {
        let all = self.candidates.len();
        while !self.meets_target(totals, all, target) {
            if !extend_one(&mut self.candidates, totals, self.value_type) {
                return false;
            }
        }
        true
    }

    /// Returns the smallest number of corrections found that meets the target, given that all candidates together do.
    /// These are then the first candidates. The first `rivals` always stay.
    fn shrink(&mut self, totals: &Totals, rivals: usize, target: f64) -> usize {
        let (mut low, mut high) = (rivals, self.candidates.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.meets_target(totals, middle, target) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        // With the normalisation known, ranks by what each token would add to the total variation without its
        // correction, which may need fewer corrections. Example: a heavy token whose gain the normalisation cancels.
        while high > rivals {
            let Estimate { a, g, .. } = totals.estimate(&self.candidates, high);
            let mut ranked = self.candidates.clone();
            let gain = |c: &Candidate| positive(c.excess * a - c.weight * g);
            ranked[rivals..].sort_by(|p, q| gain(q).total_cmp(&gain(p)));
            std::mem::swap(&mut ranked, &mut self.candidates);
            if !self.meets_target(totals, high - 1, target) {
                self.candidates = ranked;
                break;
            }
            high -= 1;
        }
        high
    }

    /// Whether correcting the first `corrected` candidates meets the target. Runs a vector pass only if the bounds do
    /// not decide it.
    fn meets_target(&mut self, totals: &Totals, corrected: usize, target: f64) -> bool {
        let estimate = totals.estimate(&self.candidates, corrected);
        estimate.upper <= target || (estimate.lower <= target && self.measure(totals, corrected) <= target)
    }

    /// The total variation when the first `corrected` candidates are corrected. Takes one pass over w and d, unless it
    /// is cached.
    fn measure(&mut self, totals: &Totals, corrected: usize) -> f64 {
        let estimate = totals.estimate(&self.candidates, corrected);
        if estimate.g < 0.0 {
            return estimate.upper;
        }
        let arrays = (&self.w[..], &self.d[..]);
        let rest = self.surpluses.get_or_compute(self.softmax.level(), arrays, estimate.a as f32, estimate.g as f32);
        estimate.lower + rest
    }
}
