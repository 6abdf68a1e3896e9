//! Total variation between exact and decoded noise, in f64 and independent of the encoder.
//!
//! Everything is computed anew from the logits and the seed: the exponentials with `log1p` in f64, the softmax in f64,
//! the decoder's formula in f64. Cost: four f64 transcendental functions per vocabulary entry, unvectorised, so far
//! slower than the encoder: for `verify` and tests.

use crate::decode::{LN_WEIGHT_MAX, StoredToken};
use crate::posterior::{check_token, locate};
use crate::{NoiseError, NoiseStream, philox4x32_10};

/// ½ Σ |a − b|.
#[cfg_attr(not(debug_assertions), allow(dead_code))]
pub(crate) fn total_variation(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).sum::<f64>() / 2.0
}

fn exact_exponential(word: u32) -> f64 {
    -libm::log1p(-((f64::from(word) + 0.5) * (1.0 / 4_294_967_296.0)))
}

/// ½ Σ_k |softmax(ξ)_k − softmax(ξ̂)_k| of one token: ξ from the teacher's `logits`, ξ̂ from what is `stored`.
///
/// # Errors
/// If the token or a correction is outside the vocabulary, or a logit is NaN or infinite.
pub fn total_variation_of(logits: &[f32], stored: &StoredToken<'_>, stream: &NoiseStream) -> Result<f64, NoiseError> {
    let vocab = logits.len();
    check_token(stored.token, vocab, stream)?;
    if let Some(index) = logits.iter().position(|l| !l.is_finite()) {
        return Err(locate(NoiseError::NonFinite { index, value: logits[index] }, stream));
    }
    let max = f64::from(logits.iter().fold(f32::MIN, |a, &b| a.max(b)));
    let ln_z = libm::log(logits.iter().map(|&l| libm::exp(f64::from(l) - max)).sum::<f64>());
    let logprob = |k: usize| f64::from(logits[k]) - max - ln_z;
    let e0 = exact_exponential(stream.auxiliary_word());
    let ln_e0 = libm::log(e0);

    let mut decoded_p = vec![0f64; vocab];
    for c in stored.corrections {
        let Some(p) = decoded_p.get_mut(c.index as usize).filter(|_| c.logprob.is_finite()) else {
            let (sequence_id, position) = (stream.sequence_id, stream.position);
            return Err(NoiseError::Correction { sequence_id, position, index: c.index, logprob: c.logprob, vocab });
        };
        *p += libm::exp(f64::from(c.logprob));
    }
    let counter = |c0: u32| [c0, stream.position, stream.sequence_id as u32, (stream.sequence_id >> 32) as u32];
    let (mut exact, mut decoded) = (Vec::with_capacity(vocab), Vec::with_capacity(vocab));
    let mut words = [0; 4];
    for k in 0..vocab {
        if k % 4 == 0 {
            words = philox4x32_10(counter((k / 4) as u32), stream.key.words());
        }
        if k == stored.token as usize {
            let weight = |logprob: f64| libm::exp((-logprob - ln_e0).min(LN_WEIGHT_MAX));
            exact.push(weight(logprob(k)));
            decoded.push(weight(f64::from(stored.logprob)));
        } else {
            let e = exact_exponential(words[k % 4]);
            exact.push(1.0 / (e + libm::exp(logprob(k)) * e0));
            decoded.push(1.0 / (e + decoded_p[k] * e0));
        }
    }
    let (s, t): (f64, f64) = (exact.iter().sum(), decoded.iter().sum());
    Ok(exact.iter().zip(&decoded).map(|(a, b)| (a / s - b / t).abs()).sum::<f64>() / 2.0)
}
