//! Compares exact with stored noise, in f64 and independently of the encoder: total variation, and which token wins.
//!
//! It recomputes everything from the logits and the seed in f64: the exponentials with `log1p`, the softmax, and the
//! decoder's formula. Cost: five f64 transcendental functions per vocabulary entry, without vectorisation. That is far
//! slower than the encoder, so only `verify` and tests use it.

use crate::decode::{LN_WEIGHT_MAX, StoredToken};
use crate::posterior::check_token;
use crate::{NoiseError, NoiseStream, philox4x32_10};

/// ½ Σ |a − b|.
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub(crate) fn total_variation(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).sum::<f64>() / 2.0
}

fn exact_exponential(word: u32) -> f64 {
    -libm::log1p(-((f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)))
}

/// Accuracy of the stored noise of one token and draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NoiseAccuracy {
    /// ½ Σ_k |softmax(ξ)_k − softmax(ξ̂)_k|.
    pub total_variation: f64,
    /// Score l_x + ξ̂_x of the observed token minus the best other score. Negative if another token wins; infinite if
    /// the vocabulary has one entry.
    pub lead: f64,
}

/// ½ Σ_k |softmax(ξ)_k − softmax(ξ̂)_k| of one token: ξ from the teacher's `logits`, ξ̂ from `stored`.
///
/// # Errors
/// If the token or a correction is outside the vocabulary, or a logit is NaN or infinite.
pub fn total_variation_of(logits: &[f32], stored: &StoredToken<'_>, stream: &NoiseStream) -> Result<f64, NoiseError> {
    Ok(measure_accuracy(logits, stored, stream)?.total_variation)
}

/// Judges the codec `replay`: ξ from the teacher's `logits` (`[V]`), ξ̂ from `stored`.
///
/// # Errors
/// If the token or a correction is outside the vocabulary, or a logit is NaN or infinite.
pub fn measure_accuracy(
    logits: &[f32],
    stored: &StoredToken<'_>,
    stream: &NoiseStream,
) -> Result<NoiseAccuracy, NoiseError> {
    let exact = ExactNoise::new(logits, stored.token, stream)?;
    let vocab = logits.len();
    let mut p = vec![0f64; vocab];
    for c in stored.corrections {
        let Some(p) = p.get_mut(c.index as usize).filter(|_| c.logprob.is_finite()) else {
            let (sequence_id, position) = (stream.sequence_id, stream.position);
            return Err(NoiseError::Correction { sequence_id, position, index: c.index, logprob: c.logprob, vocab });
        };
        *p += libm::exp(f64::from(c.logprob));
    }
    let xi_x = -f64::from(stored.logprob) - libm::log(exact.e0);
    Ok(exact.accuracy_of(logits, |k| if k == exact.x { xi_x } else { -libm::log(exact.e[k] + p[k] * exact.e0) }))
}

/// Judges the codec `dense`: ξ from the teacher's `logits` (`[V]`), ξ̂ is the stored `xi` (`[V]`).
///
/// # Errors
/// If the token is outside the vocabulary, a logit is NaN or infinite, or the noise has another length.
pub fn measure_dense_accuracy(
    logits: &[f32],
    x: u32,
    xi: &[f32],
    stream: &NoiseStream,
) -> Result<NoiseAccuracy, NoiseError> {
    if xi.len() != logits.len() {
        return Err(NoiseError::Length { what: "the dense noise of a token", got: xi.len(), expected: logits.len() });
    }
    Ok(ExactNoise::new(logits, x, stream)?.accuracy_of(logits, |k| f64::from(xi[k])))
}

/// Difference between two teachers, or between two ways to compute one teacher, at one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TeacherDifference {
    /// ½ Σ_k |softmax(ξ)_k − softmax(ξ′)_k|. Both noises use the same random words.
    pub total_variation: f64,
    /// |ln p_x − ln p′_x|, nat.
    pub logprob_change: f64,
    /// KL(p ‖ p′), nat.
    pub divergence: f64,
}

/// Compares the observed token's probability and noise under `logits` and under `other` (`[V]` each).
///
/// # Errors
/// If the token is outside the vocabulary, a logit is NaN or infinite, or the two lengths differ.
pub fn measure_difference(
    logits: &[f32],
    other: &[f32],
    token: u32,
    stream: &NoiseStream,
) -> Result<TeacherDifference, NoiseError> {
    if other.len() != logits.len() {
        return Err(NoiseError::Length {
            what: "the logits to compare with",
            got: other.len(),
            expected: logits.len(),
        });
    }
    let (a, b) = (ExactNoise::new(logits, token, stream)?, ExactNoise::new(other, token, stream)?);
    let (ln_p, ln_q) = (ExactNoise::logprobs(logits), ExactNoise::logprobs(other));
    let kl: f64 = (0..logits.len()).map(|k| libm::exp(ln_p(k)) * (ln_p(k) - ln_q(k))).sum();
    Ok(TeacherDifference {
        total_variation: half_distance(&a.weights, &b.weights),
        logprob_change: (ln_p(a.x) - ln_q(a.x)).abs(),
        // For equal distributions, rounding may leave a small negative value.
        divergence: kl.max(0.0),
    })
}

/// ½ Σ |a/Σa − b/Σb|.
fn half_distance(a: &[f64], b: &[f64]) -> f64 {
    let (s, t): (f64, f64) = (a.iter().sum(), b.iter().sum());
    a.iter().zip(b).map(|(a, b)| (a / s - b / t).abs()).sum::<f64>() / 2.0
}

/// exp(ξ), clamped so that the unbounded ξ_x cannot overflow.
fn weight(xi: f64) -> f64 {
    libm::exp(xi.min(LN_WEIGHT_MAX))
}

/// The exact noise of one token.
struct ExactNoise {
    x: usize,
    e0: f64,
    e: Vec<f64>,
    /// exp(ξ) of each entry.
    weights: Vec<f64>,
}

impl ExactNoise {
    fn new(logits: &[f32], token: u32, stream: &NoiseStream) -> Result<Self, NoiseError> {
        let vocab = logits.len();
        check_token(token, vocab, stream)?;
        if let Some(index) = logits.iter().position(|l| !l.is_finite()) {
            return Err(NoiseError::NonFinite { index, value: logits[index] }.at(stream));
        }
        let logprob = Self::logprobs(logits);
        let (x, e0) = (token as usize, exact_exponential(stream.auxiliary_word()));
        let counter = |c0: u32| [c0, stream.position, stream.sequence_id as u32, (stream.sequence_id >> 32) as u32];
        let words = (0..vocab.div_ceil(4)).flat_map(|c0| philox4x32_10(counter(c0 as u32), stream.key.words()));
        let e: Vec<f64> = words.take(vocab).map(exact_exponential).collect();
        let weights = (0..vocab).map(|k| {
            if k == x { weight(-logprob(k) - libm::log(e0)) } else { 1.0 / (e[k] + libm::exp(logprob(k)) * e0) }
        });
        Ok(Self { x, e0, weights: weights.collect(), e })
    }

    /// ln p of each entry.
    fn logprobs(logits: &[f32]) -> impl Fn(usize) -> f64 + '_ {
        let max = f64::from(logits.iter().fold(f32::MIN, |a, &b| a.max(b)));
        let ln_z = libm::log(logits.iter().map(|&l| libm::exp(f64::from(l) - max)).sum::<f64>());
        move |k| f64::from(logits[k]) - max - ln_z
    }

    fn accuracy_of(&self, logits: &[f32], xi: impl Fn(usize) -> f64) -> NoiseAccuracy {
        let score_x = f64::from(logits[self.x]) + xi(self.x);
        let (mut decoded, mut lead) = (Vec::with_capacity(logits.len()), f64::INFINITY);
        for (k, l) in logits.iter().enumerate() {
            let xi = xi(k);
            decoded.push(weight(xi));
            if k != self.x {
                lead = lead.min(score_x - (f64::from(*l) + xi));
            }
        }
        NoiseAccuracy { total_variation: half_distance(&self.weights, &decoded), lead }
    }
}
