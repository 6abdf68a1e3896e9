//! The encoder of the codec `replay`: finds a small set of corrections that keeps the noise of a token within
//! tolerance.
//!
//! The decoder replays e from the seed and knows ln p_x. It lacks p_k of the other tokens. Without p_k it uses the
//! weight 1/e_k instead of 1/E_k. So the value of a correction is the change d_k = 1/e_k − 1/E_k, not p_k: a likely
//! token with a large e_k needs no correction, and an unlikely token with a tiny e_k may need one.
//!
//! ```text
//! logits ─► u, Z ─► per draw: one fused pass  e, w, d ─► bound in tolerance? ──────────────────────► no correction
//!            (once per row)                               │ else: candidates, largest d first
//!                                                         └► smallest prefix with exact TV ≤ target ─► re-rank, drop
//! ```
//!
//! An entry may have a negligible weight in softmax(ξ) and still matter: without a correction it beats x in
//! argmax(l + ξ̂) if p_k/e_k > p_x/E_x = 1/e_0. So every entry with e_k < p_k·e_0 gets a correction, whatever its
//! weight. That is one entry per token on average (Σ_k P(e_k < p_k·e_0) ≈ E e_0), and the tolerance alone would require
//! two thirds of them. Its p̂_k is at least p_k − e_k/e_0, plus a lead ([`Tolerance::lead`]) for readers in f32.
//!
//! With Ŝ = Σ ŵ and S = Σ w, TV = Σ_k (ŵ_k/Ŝ − w_k/S)⁺ = Σ_k (δ_k·a − w_k·g)⁺, where δ = ŵ − w, a = 1/Ŝ and
//! g = Σδ / (S·Ŝ). In terms of the differences δ, the sum loses no digits where a large weight is corrected.
//!
//! The rounding of 16-bit values alone may exceed the tolerance, when two heavy tokens share the mass. Then an entry
//! gets a second or third value, and the exponentials of its values add up (`rounding`). This makes every tolerance
//! reachable. Otherwise a job would fail at the one token in millions for which a single value is too coarse.
//!
//! Shapes: logits `[V]` f32; scratch 12·V bytes. Cost at V = 50,257 on a shared AVX-512 core: 0.08 to 0.12 ms per token
//! (`benches/noise.rs`). The softmax, which several draws share, takes a quarter of it. A debug build also decodes
//! one token of 16 again and compares; the tests of this crate do so with every token, which more than doubles the cost.
//!
//! The encoder cannot skip the word of any entry, however small its p_k: S includes every 1/E_k, and only the word
//! tells whether e_k is 10 or 10^-9. The returned total variation depends on S to the last bit.

mod candidates;
mod rounding;
mod search;

#[cfg(debug_assertions)]
use crate::decode::StoredToken;
use crate::decode::{Correction, weight_of_token};
use crate::dispatch::Level;
use crate::kernels::{Block, BlockSums};
use crate::philox::BLOCK;
use crate::posterior::check_token;
use crate::{NoiseError, NoiseStream, Softmax, ValueType, kernels};
use candidates::{Candidate, with_slack};
use search::{SurplusCache, Totals};

/// Lead by which the observed token wins in l + ξ̂. It covers the error of a reader that computes e within 4 ulp and
/// adds logits of up to 1,024 in f32, plus a small reserve for logits computed on another machine.
pub(crate) const LEAD: f64 = 1.0 / 4096.0;

/// Largest total variation ½ Σ_k |softmax(ξ)_k − softmax(ξ̂)_k| of a token's noise.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Tolerance(f64);

impl Tolerance {
    /// The smallest tolerance. Below it, the rounding errors of f32 readers become visible.
    pub const MIN: f64 = 1e-5;
    /// The largest tolerance.
    pub const MAX: f64 = 0.5;

    /// Creates a tolerance.
    ///
    /// # Errors
    /// If `tolerance` is outside [`Self::MIN`] to [`Self::MAX`].
    pub fn new(tolerance: f64) -> Result<Self, NoiseError> {
        if (Self::MIN..=Self::MAX).contains(&tolerance) {
            Ok(Self(tolerance))
        } else {
            Err(NoiseError::Tolerance { tolerance })
        }
    }

    /// Returns the bound as a number.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }

    /// Minimum lead of the observed token in l + ξ̂ when the condition is kept: 2^−12, or the tolerance if that is
    /// smaller. Lowering weights by this factor moves the total variation by at most a quarter of it, so the encoder
    /// can always keep both bounds.
    #[must_use]
    pub fn lead(self) -> f64 {
        self.0.min(LEAD)
    }

    /// The total variation that the encoder aims at. A reader may compute e within 4 ulp, and both sides compute in
    /// f32. This moves the total variation by about 10^-6, which the margin covers.
    pub(crate) fn target(self) -> f64 {
        self.0 * 0.999 - 1e-6
    }
}

impl Default for Tolerance {
    fn default() -> Self {
        Self(1e-3)
    }
}

/// The encoding of one token and draw, besides its corrections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Encoded {
    /// ln p_x.
    pub logprob: f32,
    /// Total variation between the exact and the decoded noise.
    pub total_variation: f64,
}

/// Encodes tokens of one vocabulary. Keeps its scratch between calls.
///
/// ```
/// use stillhouse_noise::{DrawKey, Encoder, NoiseStream, Tolerance, ValueType};
/// # fn main() -> Result<(), stillhouse_noise::NoiseError> {
/// let logits: Vec<f32> = (0..1000).map(|k| -0.01 * k as f32).collect();
/// let mut encoder = Encoder::new(1000, Tolerance::new(1e-3)?, ValueType::F16)?;
/// let mut corrections = Vec::new();
/// let stream = NoiseStream::new(DrawKey::new(42, 0), 7, 0);
/// let encoded = encoder.encode(&logits, 3, &stream, &mut corrections)?;
/// assert!(encoded.total_variation <= 1e-3);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Encoder {
    tolerance: Tolerance,
    value_type: ValueType,
    condition: bool,
    softmax: Softmax,
    w: Vec<Block>,
    d: Vec<Block>,
    sums: Vec<BlockSums>,
    candidates: Vec<Candidate>,
    found: Vec<u32>,
    surpluses: SurplusCache,
}

impl Encoder {
    /// Creates an encoder for rows of `vocab` logits.
    ///
    /// # Errors
    /// If `vocab` is 0 or exceeds 2^32, the largest vocabulary that an index type of the format addresses.
    pub fn new(vocab: usize, tolerance: Tolerance, value_type: ValueType) -> Result<Self, NoiseError> {
        Self::at_level(vocab, tolerance, value_type, Level::detect())
    }

    /// As [`Self::new`], with the instructions of one level. The results are the same.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn at_level(
        vocab: usize,
        tolerance: Tolerance,
        value_type: ValueType,
        level: Level,
    ) -> Result<Self, NoiseError> {
        let softmax = Softmax::at_level(vocab, level)?;
        Ok(Self {
            tolerance,
            value_type,
            condition: true,
            softmax,
            w: kernels::zeros(vocab),
            d: kernels::zeros(vocab),
            sums: vec![BlockSums::default(); vocab.div_ceil(BLOCK)],
            candidates: Vec::new(),
            found: Vec::new(),
            surpluses: SurplusCache::default(),
        })
    }

    /// Sets whether argmax_k(l_k + ξ̂_k) = x must hold for the decoded noise, besides the tolerance (default: true).
    #[must_use]
    pub fn with_condition(mut self, condition: bool) -> Self {
        self.condition = condition;
        self
    }

    /// Encodes one draw of token `x`, observed where the teacher gave `logits` (`[V]` f32). Appends the corrections to
    /// `out` in ascending order of the index. An entry that needs more precision than 16 bits occurs more than once,
    /// the larger value first.
    ///
    /// # Errors
    /// If the length is wrong, the token is outside the vocabulary, a logit is NaN or infinite, ln p_x is not finite in
    /// f32, or the stored type cannot reach the tolerance or keep the condition at this token.
    pub fn encode(
        &mut self,
        logits: &[f32],
        x: u32,
        stream: &NoiseStream,
        out: &mut Vec<Correction>,
    ) -> Result<Encoded, NoiseError> {
        self.load(logits, stream)?;
        self.encode_loaded(logits, x, stream, out)
    }

    /// Computes the softmax of a row, which all its draws share. `stream` only names the position in an error.
    ///
    /// # Errors
    /// If the length is wrong, or a logit is NaN or infinite.
    pub fn load(&mut self, logits: &[f32], stream: &NoiseStream) -> Result<(), NoiseError> {
        self.softmax.load(logits).map_err(|e| e.at(stream))
    }

    /// The softmax of the last loaded row.
    #[must_use]
    pub fn softmax(&self) -> &Softmax {
        &self.softmax
    }

    /// [`Self::encode`] of the row that [`Self::load`] read last, once per draw.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_loaded(
        &mut self,
        logits: &[f32],
        x: u32,
        stream: &NoiseStream,
        out: &mut Vec<Correction>,
    ) -> Result<Encoded, NoiseError> {
        let vocab = self.softmax.vocab();
        check_token(x, vocab, stream)?;
        if logits.len() != vocab {
            return Err(NoiseError::Length { what: "a row of logits", got: logits.len(), expected: vocab });
        }
        let e0 = stream.auxiliary_exponential();
        let exact_logprob = self.softmax.logprob(logits[x as usize]);
        let logprob = self.softmax.stored_logprob(logits[x as usize]);
        if !logprob.is_finite() {
            let (sequence_id, position) = (stream.sequence_id, stream.position);
            return Err(NoiseError::Logprob { sequence_id, position, logprob });
        }
        // x wins against k if p_k/Ê_k < p_x/Ê_x = (p_x/p̂_x)/e_0.
        let stored_over_exact = libm::exp(f64::from(logprob) - exact_logprob);
        let rival_threshold = if self.condition { (1.0 + self.tolerance.lead()) * stored_over_exact } else { 0.0 };
        kernels::weights(
            self.softmax.level(),
            stream,
            vocab,
            x as usize,
            self.softmax.unnormalised(),
            self.softmax.scale(e0),
            with_slack(rival_threshold),
            &mut self.w,
            &mut self.d,
            &mut self.sums,
        );
        let weight_x = weight_of_token(exact_logprob, e0);
        let rest: f64 = self.sums.iter().map(|s| s.weight).sum();
        let totals = Totals {
            weight: rest + weight_x,
            weight_x,
            // The change of the weight of x from storing ln p_x in 32 bits.
            shift_x: weight_of_token(f64::from(logprob), e0) - weight_x,
            excess: self.sums.iter().map(|s| s.excess).sum(),
        };
        let start = out.len();
        let total_variation = self.search(logits, stream, e0, rival_threshold, totals, out)?;
        let encoded = Encoded { logprob, total_variation };
        #[cfg(debug_assertions)]
        if cfg!(test) || stream.position.is_multiple_of(16) {
            self.check(logits, x, stream, encoded, rival_threshold, &out[start..])?;
        }
        let _ = start;
        Ok(encoded)
    }

    /// Decodes the encoded token with the decoder's own code, and compares it with the dense noise.
    #[cfg(debug_assertions)]
    fn check(
        &self,
        logits: &[f32],
        x: u32,
        stream: &NoiseStream,
        encoded: Encoded,
        rival_threshold: f64,
        corrections: &[Correction],
    ) -> Result<(), NoiseError> {
        let stored = StoredToken { token: x, logprob: encoded.logprob, corrections };
        let mut exact = vec![0f32; logits.len()];
        let e0 = crate::exponentials(stream, &mut exact);
        let level = self.softmax.level();
        kernels::add_scaled(level, &mut exact, self.softmax.unnormalised(), self.softmax.scale(e0));
        let weight_x = weight_of_token(self.softmax.logprob(logits[x as usize]), e0);
        crate::decode::softmax_of_totals(&mut exact, x, weight_x);
        let mut decoded = vec![0f32; logits.len()];
        crate::decode::decode_totals(&stored, stream, &mut decoded)?;
        let (u, scale) = (self.softmax.unnormalised().iter().flat_map(|block| block.0), self.softmax.scale(e0));
        for (k, (total, u)) in decoded.iter().zip(u).enumerate() {
            // Half of the lead covers the rounding of this check.
            let min_total = f64::from(u) * f64::from(scale) * (rival_threshold - self.tolerance.lead() / 2.0);
            debug_assert!(
                k == x as usize || f64::from(*total) >= min_total,
                "sequence {}, position {}: token {k} beats the observed {x} in decoded noise, E {total:e} below {min_total:e}",
                stream.sequence_id,
                stream.position,
            );
        }
        crate::decode::softmax_of_totals(&mut decoded, x, weight_of_token(f64::from(encoded.logprob), e0));
        let reached = crate::verify::total_variation(&exact, &decoded);
        debug_assert!(
            reached <= self.tolerance.get(),
            "sequence {}, position {}: decoded noise has total variation {reached:.3e}, encoder said {:.3e}, tolerance {:.3e}",
            stream.sequence_id,
            stream.position,
            encoded.total_variation,
            self.tolerance.get(),
        );
        Ok(())
    }
}
