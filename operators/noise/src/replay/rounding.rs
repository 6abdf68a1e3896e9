//! Chooses how each stored ln p_k rounds to 16 bits: up or down, or into several values.
//!
//! A common factor of all weights does not change softmax(ξ), so errors of the same sign cancel and errors of opposite
//! signs add up. If rounding to nearest misses the tolerance, the encoder therefore tries both neighbours of the exact
//! value for the heaviest corrections.
//!
//! If two heavy tokens share the mass, no choice of neighbours may suffice: TV is then up to a quarter of the relative
//! error of p̂_k. That error is 0.4 % (half a unit) below e^−8 and 0.8 % below e^−16. For such tokens an entry may
//! occur more than once in a list, and its values add up, p̂_k = Σ exp(v):
//!
//! ```text
//! ln p ─► v_1, rounded down ─► ln(p − exp v_1) ─► v_2, rounded down ─► … ─► the last one, rounded to nearest
//! ```
//!
//! Each additional value divides the relative error by about 64 (1e-4 with two values, 4e-6 with three). The values of
//! an entry are in descending order, so that a reader that adds them in order loses nothing in f32.
//!
//! An entry that must not beat x also has a minimum p̂_k. If the nearest value is below it, the encoder rounds the
//! value (or the last of several) up. It never replaces it with values that fall below the minimum again.

use crate::ValueType;
use crate::replay::candidates::Candidate;
use crate::replay::search::Totals;

/// Number of corrections whose roundings are tried in all combinations.
const MAX_JOINT: usize = 6;
/// Number of the heaviest corrections whose other rounding is then tried one at a time.
const MAX_SINGLE: usize = 64;

/// Largest number of stored values per entry. Three leave no error that a reader in f32 could see.
const MAX_VALUES: usize = 3;
/// Number of corrections that are tried when one of them gets an additional value.
const MAX_EXTENDED: usize = 8;

/// The stored values of one entry, in descending order.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Values {
    values: [f32; MAX_VALUES],
    count: usize,
}

impl Values {
    pub(super) fn single(value: f32) -> Self {
        let mut values = [0.0; MAX_VALUES];
        values[0] = value;
        Self { values, count: 1 }
    }

    pub(super) fn as_slice(&self) -> &[f32] {
        &self.values[..self.count]
    }

    /// p̂ = Σ exp(v).
    pub(super) fn sum(&self) -> f64 {
        self.as_slice().iter().map(|&v| libm::exp(f64::from(v))).sum()
    }

    /// p̂/p − 1, computed without cancellation.
    pub(super) fn excess_over(&self, logprob: f64) -> f64 {
        let ratio = |v: f32| libm::exp(f64::from(v) - logprob);
        libm::expm1(f64::from(self.values[0]) - logprob) + self.as_slice()[1..].iter().map(|&v| ratio(v)).sum::<f64>()
    }

    /// Splits ln p into `count` 16-bit values. Returns `None` if fewer represent it exactly, or if `count` exceeds
    /// [`MAX_VALUES`].
    fn split(logprob: f64, count: usize) -> Option<Self> {
        if count > MAX_VALUES {
            return None;
        }
        let mut split = Self::single(0.0);
        split.count = count;
        // Share of p that the values so far leave.
        let mut remaining = 1.0;
        for (i, slot) in split.values[..count].iter_mut().enumerate() {
            let exact = logprob + libm::log(remaining);
            let nearest = ValueType::F16.round(exact);
            *slot = if i + 1 < count && f64::from(nearest) > exact {
                ValueType::F16.other_neighbour(nearest, exact)?
            } else {
                nearest
            };
            remaining -= libm::exp(f64::from(*slot) - logprob);
            if i + 1 < count && remaining <= 0.0 {
                return None;
            }
        }
        split.finished()
    }

    /// Returns the smallest values, none above 0, whose exponentials sum to at least `min_probability`: one, or several
    /// if one would be above 0.
    pub(super) fn covering(min_probability: f64, value_type: ValueType) -> Option<Self> {
        (1..=MAX_VALUES).find_map(|count| Self::covering_with(min_probability, value_type, count))
    }

    /// As [`Self::covering`] with exactly `count` values. Returns `None` if fewer represent `min_probability` exactly,
    /// a value would be above 0, or `count` exceeds [`MAX_VALUES`].
    fn covering_with(min_probability: f64, value_type: ValueType, count: usize) -> Option<Self> {
        if count > MAX_VALUES {
            return None;
        }
        let mut covering = Self::single(0.0);
        covering.count = count;
        let mut remaining = min_probability;
        for (i, slot) in covering.values[..count].iter_mut().enumerate() {
            let exact = libm::log(remaining);
            *slot = if i + 1 < count { value_type.floor(exact.min(0.0)) } else { value_type.ceil(exact) };
            remaining -= libm::exp(f64::from(*slot));
            if *slot > 0.0 || (i + 1 < count && remaining <= 0.0) {
                return None;
            }
        }
        covering.finished()
    }

    fn finished(mut self) -> Option<Self> {
        self.values[..self.count].sort_unstable_by(|a, b| b.total_cmp(a));
        self.as_slice().iter().all(|v| v.is_finite()).then_some(self)
    }
}

/// Returns the candidate with one additional value.
fn extended(candidate: Candidate) -> Option<Candidate> {
    let count = candidate.stored.count + 1;
    let nearest = Values::split(candidate.logprob, count).filter(|values| candidate.accepts(values));
    let values = nearest.or_else(|| Values::covering_with(candidate.min_probability, ValueType::F16, count))?;
    Some(candidate.with_stored(values))
}

/// Adds one value to the correction where it lowers the total variation most. Returns false if no correction can be
/// extended.
pub(super) fn extend_one(candidates: &mut [Candidate], totals: &Totals, value_type: ValueType) -> bool {
    if value_type != ValueType::F16 {
        return false;
    }
    let all = candidates.len();
    let mut heaviest: Vec<usize> = (0..all).filter(|&i| candidates[i].stored.count < MAX_VALUES).collect();
    sort_by_falling_error(&mut heaviest, candidates);
    let mut best: Option<(f64, usize, Candidate)> = None;
    let extendable = heaviest.into_iter().filter_map(|i| {
        let extended = extended(candidates[i])?;
        (extended.error.abs() < candidates[i].error.abs()).then_some((i, extended))
    });
    for (i, extended) in extendable.take(MAX_EXTENDED).collect::<Vec<_>>() {
        let kept = std::mem::replace(&mut candidates[i], extended);
        let reached = totals.estimate(candidates, all).upper;
        candidates[i] = kept;
        if best.is_none_or(|(lowest, ..)| reached < lowest) {
            best = Some((reached, i, extended));
        }
    }
    if let Some((_, i, extended)) = best {
        candidates[i] = extended;
    }
    best.is_some()
}

fn sort_by_falling_error(indices: &mut [usize], candidates: &[Candidate]) {
    let error = |i: usize| candidates[i].error.abs();
    indices.sort_by(|&i, &j| error(j).total_cmp(&error(i)));
}

/// Chooses the stored values of all candidates (all corrected) to minimise the total variation.
pub(super) fn choose_roundings(candidates: &mut [Candidate], totals: &Totals, value_type: ValueType) {
    let all = candidates.len();
    let mut heaviest: Vec<usize> = (0..all).collect();
    sort_by_falling_error(&mut heaviest, candidates);
    let other = |c: &Candidate| match c.stored.as_slice() {
        &[only] => {
            let other = value_type.other_neighbour(only, c.logprob).map(Values::single);
            other.filter(|values| c.accepts(values)).map(|values| c.with_stored(values))
        }
        _ => None,
    };
    let mut best = totals.estimate(candidates, all).upper;

    let joint: Vec<(usize, [Candidate; 2])> = heaviest
        .iter()
        .take(MAX_JOINT)
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

    for &i in heaviest.iter().take(MAX_SINGLE) {
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
