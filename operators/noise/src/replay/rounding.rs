//! Where 16 bits are the limit: the side to which each stored ln p_k is rounded.
//!
//! A common factor of all weights leaves softmax(ξ) alone, so errors of the same sign cancel and errors of opposite
//! signs add up. When nearest rounding misses the tolerance, the heaviest corrections are therefore tried on both
//! sides of the exact value.

use crate::replay::ValueType;
use crate::replay::candidates::Candidate;
use crate::replay::search::Totals;

/// Corrections tried in all combinations.
const JOINTLY: usize = 6;
/// Corrections tried one by one after that.
const SINGLY: usize = 64;

/// Chooses the stored values of all candidates (all corrected) for a small total variation.
pub(super) fn choose_sides(candidates: &mut [Candidate], totals: &Totals, value_type: ValueType) {
    let all = candidates.len();
    let mut heaviest: Vec<usize> = (0..all).collect();
    heaviest.sort_by(|&i, &j| {
        candidates[j]
            .error
            .abs()
            .total_cmp(&candidates[i].error.abs())
    });
    let other = |c: &Candidate| {
        value_type
            .other_side(c.stored, c.logprob)
            .map(|value| c.with_stored(value))
    };
    let mut best = totals.estimate(candidates, all).upper;

    let joint: Vec<(usize, [Candidate; 2])> = heaviest
        .iter()
        .take(JOINTLY)
        .filter_map(|&i| other(&candidates[i]).map(|flipped| (i, [candidates[i], flipped])))
        .collect();
    let mut chosen = 0usize;
    for sides in 0..1usize << joint.len() {
        for (bit, (i, options)) in joint.iter().enumerate() {
            candidates[*i] = options[sides >> bit & 1];
        }
        let reached = totals.estimate(candidates, all).upper;
        if reached < best {
            (best, chosen) = (reached, sides);
        }
    }
    for (bit, (i, options)) in joint.iter().enumerate() {
        candidates[*i] = options[chosen >> bit & 1];
    }

    for &i in heaviest.iter().take(SINGLY) {
        let kept = candidates[i];
        if let Some(flipped) = other(&kept) {
            candidates[i] = flipped;
            let reached = totals.estimate(candidates, all).upper;
            if reached < best {
                best = reached;
            } else {
                candidates[i] = kept;
            }
        }
    }
}
