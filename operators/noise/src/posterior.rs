//! Posterior Gumbel noise of an observed token (Gumbel distillation, Algorithm 1 and Eq. 4), in exponential form.
//!
//! ```text
//! E_k = e_k + p_k·e_0   (k ≠ x)        E_x = p_x·e_0        ξ = −ln E        e = exp(−ζ) ~ Exp(1)
//! ```
//!
//! Here p = softmax(l) is the teacher's distribution and x is the observed token. Then `argmax_k(l_k + ξ_k) = x` always
//! holds, and over x ~ p every ξ_k is a standard Gumbel variate. (The form with `exp(−ζ_k)/p_k`, printed in the paper's
//! appendix, has other marginals.)
//!
//! Shapes: logits `[V]` f32, noise `[V]` f32. ξ_x = −ln p_x − ln e_0 comes from the log-softmax in f64, because p_x
//! itself underflows for tokens that a confident teacher did not expect.

use crate::dispatch::Level;
use crate::kernels::Block;
use crate::{NoiseError, NoiseStream, ValueType, kernels};

/// Softmax of one row of logits at temperature 1, stored as u_k = exp(l_k − max l) and Z = Σ u. Reusable; takes 4·V
/// bytes.
#[derive(Debug, Clone)]
pub struct Softmax {
    vocab: usize,
    level: Level,
    u: Vec<Block>,
    max: f32,
    z: f64,
    ln_z: f64,
}

impl Softmax {
    /// Allocates for rows of `vocab` logits.
    ///
    /// # Errors
    /// If `vocab` is 0 or exceeds 2^32, the largest vocabulary that an index type of the format addresses.
    pub fn new(vocab: usize) -> Result<Self, NoiseError> {
        Self::at_level(vocab, Level::detect())
    }

    /// As [`Self::new`], with the instructions of one level. The results are the same.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn at_level(vocab: usize, level: Level) -> Result<Self, NoiseError> {
        if vocab == 0 || vocab as u64 > 1 << 32 {
            return Err(NoiseError::Vocabulary { vocab });
        }
        Ok(Self { vocab, level, u: kernels::zeros(vocab), max: 0.0, z: 1.0, ln_z: 0.0 })
    }

    /// Computes the softmax of a row of logits.
    ///
    /// # Errors
    /// If the row has another length, or holds a logit that is NaN or infinite.
    pub fn load(&mut self, logits: &[f32]) -> Result<(), NoiseError> {
        if logits.len() != self.vocab {
            return Err(NoiseError::Length { what: "a row of logits", got: logits.len(), expected: self.vocab });
        }
        let (max, finite) = kernels::max_finite(self.level, logits);
        if !finite {
            let index = logits.iter().position(|l| !l.is_finite()).unwrap_or(0);
            return Err(NoiseError::NonFinite { index, value: logits[index] });
        }
        self.max = max;
        self.z = kernels::exp_sum(self.level, logits, max, &mut self.u);
        self.ln_z = libm::log(self.z);
        Ok(())
    }

    /// Vocabulary size V.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// ln p of an entry with this logit, in f64.
    #[must_use]
    pub fn logprob(&self, logit: f32) -> f64 {
        (f64::from(logit) - f64::from(self.max)) - self.ln_z
    }

    /// ln p of an entry with this logit as it is stored: the nearest f32, but rounded down below −64. There an f32 is
    /// coarser than the noise, and a value rounded up could make x lose in argmax(l + ξ).
    #[must_use]
    pub fn stored_logprob(&self, logit: f32) -> f32 {
        let exact = self.logprob(logit);
        if exact < -64.0 { ValueType::F32.floor(exact) } else { exact as f32 }
    }

    /// ln Σ exp(l), in f64.
    #[must_use]
    pub fn logsumexp(&self) -> f64 {
        f64::from(self.max) + self.ln_z
    }

    /// The largest logit.
    #[must_use]
    pub fn max(&self) -> f32 {
        self.max
    }

    /// ln Z with Z = Σ exp(l − max l).
    #[must_use]
    pub fn ln_z(&self) -> f64 {
        self.ln_z
    }

    /// Z = Σ exp(l − max l).
    #[must_use]
    pub fn z(&self) -> f64 {
        self.z
    }

    /// e_0/Z, the factor that turns u_k into p_k·e_0.
    pub(crate) fn scale(&self, e0: f32) -> f32 {
        (f64::from(e0) / self.z) as f32
    }

    pub(crate) fn unnormalised(&self) -> &[Block] {
        &self.u
    }

    pub(crate) fn level(&self) -> Level {
        self.level
    }
}

/// Log-probability and log-partition that a row of logits gives for the observed token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowLogprobs {
    /// ln p_x.
    pub logprob_x: f32,
    /// ln Σ exp(l).
    pub logsumexp: f32,
}

pub(crate) fn check_token(x: u32, vocab: usize, stream: &NoiseStream) -> Result<(), NoiseError> {
    if (x as usize) < vocab {
        return Ok(());
    }
    Err(NoiseError::Token { sequence_id: stream.sequence_id, position: stream.position, token: x, vocab })
}

/// Writes e_k of every vocabulary entry to `out` (`[V]`) and returns e_0: independent Exp(1) variates that `stream`
/// determines.
pub fn exponentials(stream: &NoiseStream, out: &mut [f32]) -> f32 {
    kernels::exponentials(Level::detect(), stream, out);
    stream.auxiliary_exponential()
}

/// Computes dense posterior noise ξ (`[V]` f32) of token `x`, for the codec `dense`.
///
/// ```
/// use stillhouse_noise::{DrawKey, NoiseStream, Softmax, dense_noise};
/// # fn main() -> Result<(), stillhouse_noise::NoiseError> {
/// let (logits, stream) = ([1.0f32, 3.0, -2.0], NoiseStream::new(DrawKey::new(42, 0), 7, 0));
/// let mut noise = [0f32; 3];
/// let row = dense_noise(&mut Softmax::new(3)?, &logits, 2, &stream, &mut noise)?;
/// let scores: Vec<f32> = logits.iter().zip(noise).map(|(l, xi)| l + xi).collect();
/// assert!(scores[2] > scores[0] && scores[2] > scores[1]);
/// assert!((row.logprob_x - -5.1328).abs() < 1e-3);
/// # Ok(()) }
/// ```
///
/// # Errors
/// On a wrong length, a token outside the vocabulary, or a logit that is NaN or infinite.
pub fn dense_noise(
    softmax: &mut Softmax,
    logits: &[f32],
    x: u32,
    stream: &NoiseStream,
    out: &mut [f32],
) -> Result<RowLogprobs, NoiseError> {
    softmax.load(logits).map_err(|e| e.at(stream))?;
    dense_noise_of_loaded(softmax, logits, x, stream, out)
}

/// [`dense_noise`] of the row that `softmax` already holds, for several draws of one row.
///
/// # Errors
/// On a wrong length or a token outside the vocabulary.
pub fn dense_noise_of_loaded(
    softmax: &Softmax,
    logits: &[f32],
    x: u32,
    stream: &NoiseStream,
    out: &mut [f32],
) -> Result<RowLogprobs, NoiseError> {
    let vocab = softmax.vocab();
    check_token(x, vocab, stream)?;
    for (what, got) in [("a row of logits", logits.len()), ("the noise of a token", out.len())] {
        if got != vocab {
            return Err(NoiseError::Length { what, got, expected: vocab });
        }
    }
    let level = softmax.level();
    let e0 = stream.auxiliary_exponential();
    kernels::exponentials(level, stream, out);
    kernels::add_scaled(level, out, softmax.unnormalised(), softmax.scale(e0));
    kernels::negative_ln(level, out);
    let logprob = softmax.logprob(logits[x as usize]);
    out[x as usize] = (-logprob - libm::log(f64::from(e0))) as f32;
    Ok(RowLogprobs { logprob_x: softmax.stored_logprob(logits[x as usize]), logsumexp: softmax.logsumexp() as f32 })
}

/// Noise of a position that is not predicted, such as given text or padding. p is one-hot at `x`, so ξ_k = −ln e_k for
/// k ≠ x and ξ_x = −ln e_0: prior noise throughout. Equals [`crate::decode`] with ln p_x = 0 and no corrections.
///
/// # Errors
/// If `x` is not below the length of `out`.
pub fn prior_noise(x: u32, stream: &NoiseStream, out: &mut [f32]) -> Result<(), NoiseError> {
    check_token(x, out.len(), stream)?;
    let e0 = exponentials(stream, out);
    kernels::negative_ln(Level::detect(), out);
    out[x as usize] = -libm::log(f64::from(e0)) as f32;
    Ok(())
}

/// Noise of teacher-generated text (sequential extraction): ξ_k = −ln e_k for every k. Does not use e_0.
pub fn sequential_noise(stream: &NoiseStream, out: &mut [f32]) {
    exponentials(stream, out);
    kernels::negative_ln(Level::detect(), out);
}

/// Samples the next token of teacher-generated text from softmax(l): x = argmax_k(l_k + ξ_k) under
/// [`sequential_noise`]. Ties go to the lower index. Leaves ξ in `noise` (`[V]` f32).
///
/// # Errors
/// On a wrong length, or a logit that is NaN or infinite.
pub fn sample_sequential(logits: &[f32], stream: &NoiseStream, noise: &mut [f32]) -> Result<u32, NoiseError> {
    if noise.len() != logits.len() {
        return Err(NoiseError::Length { what: "the noise of a token", got: noise.len(), expected: logits.len() });
    }
    if let Some(index) = logits.iter().position(|l| !l.is_finite()) {
        return Err(NoiseError::NonFinite { index, value: logits[index] }.at(stream));
    }
    sequential_noise(stream, noise);
    let mut best = (0, f32::NEG_INFINITY);
    for (k, (l, xi)) in logits.iter().zip(noise.iter()).enumerate() {
        if l + xi > best.1 {
            best = (k, l + xi);
        }
    }
    Ok(best.0 as u32)
}
