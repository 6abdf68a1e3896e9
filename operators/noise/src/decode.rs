//! The decoder of the codec `replay`: turns the seed, ln p_x and a few corrections back into noise.
//!
//! ```text
//! p̂_k = Σ exp(stored) over the values of k, 0 for any other k ≠ x        Ê_k = e_k + p̂_k·e_0        Ê_x = exp(logprob)·e_0
//! ```
//!
//! A list may hold an entry more than once: its values are adjacent, the larger one first, and their
//! exponentials add up. The encoder uses this to represent a p_k more precisely than one 16-bit value can.
//!
//! Shapes: out `[V]` f32. Cost: one Philox word and one or two logarithms per entry. A trainer can run the same
//! computation on its GPU.

use crate::dispatch::Level;
use crate::posterior::{check_token, exponentials};
use crate::{NoiseError, NoiseStream, kernels};

/// A stored ln p_k of one vocabulary entry, or one of several values whose exponentials add up to p_k.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Correction {
    /// Vocabulary entry k.
    pub index: u32,
    /// ln p_k as a reader gets it: already rounded to the stored type.
    pub logprob: f32,
}

/// The stored data of one token: the observed token itself, ln p_x, and the corrections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredToken<'a> {
    /// The observed token x.
    pub token: u32,
    /// ln p_x.
    pub logprob: f32,
    /// Corrections of other entries, in ascending order of the index. The exponentials of several values of one entry
    /// add up.
    pub corrections: &'a [Correction],
}

/// Upper bound of ln(1/E_x) before the exponential. The other weights sum to less than V·8.6·10^9, so at e^650 the
/// distribution is a point mass at x to the last bit of an f64. The bound prevents an overflow.
pub(crate) const LN_WEIGHT_MAX: f64 = 650.0;

/// w_x = 1/(p_x·e_0), computed from logarithms because p_x may underflow.
pub(crate) fn weight_of_token(logprob: f64, e0: f32) -> f64 {
    libm::exp((-logprob - libm::log(f64::from(e0))).min(LN_WEIGHT_MAX))
}

/// Writes Ê_k of every entry k ≠ x, and e_x at x. Returns e_0.
pub(crate) fn decode_totals(
    stored: &StoredToken<'_>,
    stream: &NoiseStream,
    out: &mut [f32],
) -> Result<f32, NoiseError> {
    check_token(stored.token, out.len(), stream)?;
    let e0 = exponentials(stream, out);
    for c in stored.corrections {
        let vocab = out.len();
        let Some(total) = out.get_mut(c.index as usize).filter(|_| c.logprob.is_finite()) else {
            return Err(NoiseError::Correction {
                sequence_id: stream.sequence_id,
                position: stream.position,
                index: c.index,
                logprob: c.logprob,
                vocab,
            });
        };
        *total = (f64::from(*total) + libm::exp(f64::from(c.logprob)) * f64::from(e0)) as f32;
    }
    Ok(e0)
}

/// Decodes ξ̂ (`[V]` f32) of one token.
///
/// # Errors
/// If the token or a correction is outside a vocabulary of `out.len()` entries, or a correction is NaN or infinite.
pub fn decode(stored: &StoredToken<'_>, stream: &NoiseStream, out: &mut [f32]) -> Result<(), NoiseError> {
    let e0 = decode_totals(stored, stream, out)?;
    kernels::negative_ln(Level::detect(), out);
    out[stored.token as usize] = (-f64::from(stored.logprob) - libm::log(f64::from(e0))) as f32;
    Ok(())
}

/// Decodes softmax(ξ̂)_k = (1/Ê_k) / Σ_j 1/Ê_j (`[V]` f32), the input of a student model. Computes no logarithm of the
/// noise.
///
/// # Errors
/// As [`decode`].
pub fn decode_softmax(stored: &StoredToken<'_>, stream: &NoiseStream, out: &mut [f32]) -> Result<(), NoiseError> {
    let e0 = decode_totals(stored, stream, out)?;
    softmax_of_totals(out, stored.token, weight_of_token(f64::from(stored.logprob), e0));
    Ok(())
}

/// Maps E to softmax(ξ) in place. `weight_x` is the weight of x; the value at x is not read.
pub(crate) fn softmax_of_totals(out: &mut [f32], x: u32, weight_x: f64) {
    let x = x as usize;
    let level = Level::detect();
    out[x] = f32::INFINITY; // weight 0
    let sum = kernels::reciprocals(level, out) + weight_x;
    // For a point mass at x, 1/Σ underflows f32, and the other entries become 0, their correct value.
    kernels::scale(level, out, (1.0 / sum) as f32);
    out[x] = (weight_x / sum) as f32;
}
