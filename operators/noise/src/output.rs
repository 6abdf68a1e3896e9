//! Writes the noise of one token in the form that a student takes as input: f32, f16 or bf16.
//!
//! | [`OutputKind`] | value of entry k | with temperature τ |
//! |---|---|---|
//! | `Softmax` | E_k^−τ / Σ_j E_j^−τ | softmax(τ·ξ) |
//! | `Gumbel` | −τ·ln E_k | τ·ξ |
//! | `Gaussian` | τ·Φ⁻¹(exp(−E_k)) | the normal variate times τ, as the paper scales the Gumbel variate |
//! | `Uniform` | exp(−E_k) | τ = 1 only: a uniform variate has no scale |
//!
//! Cost per entry: one Philox word and one logarithm for e. `Softmax` adds one division, `Gumbel` one logarithm, and
//! the others one or two transcendental functions. A row is computed in blocks of 4 KiB. Only `Softmax`, which needs a
//! sum before it can write, keeps the whole row in f32 (scratch of 4·V bytes per thread).

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::decode::{Correction, StoredToken, weight_of_token};
use crate::dispatch::Level;
use crate::kernels::{self, Block};
use crate::philox::BLOCK;
use crate::quantile::normal_of_gumbel;
use crate::{NoiseError, NoiseStream};

/// The function of the noise ξ of a token that a [`RowWriter`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputKind {
    /// softmax(τ·ξ) over the vocabulary.
    Softmax,
    /// τ·ξ.
    Gumbel,
    /// Maps ξ through the Gumbel CDF and the normal quantile, times τ.
    Gaussian,
    /// Maps ξ through the Gumbel CDF; rounds to 1 in f32 for ξ above 17.
    Uniform,
}

/// An output kind with its temperature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Output {
    kind: OutputKind,
    temperature: f32,
}

impl Output {
    /// Combines `kind` with temperature τ.
    ///
    /// # Errors
    /// If τ is not a positive normal f32, or not 1 for uniform noise.
    pub fn new(kind: OutputKind, temperature: f64) -> Result<Self, NoiseError> {
        let valid = match kind {
            OutputKind::Uniform => temperature == 1.0,
            _ => temperature > 0.0 && (temperature as f32).is_normal(),
        };
        if !valid {
            return Err(NoiseError::Temperature { temperature, uniform: kind == OutputKind::Uniform });
        }
        Ok(Self { kind, temperature: temperature as f32 })
    }

    /// Computes the output of one entry from its ξ in f64. For `Softmax`, returns the logarithm before normalisation.
    fn map_gumbel(self, xi: f64) -> f64 {
        let tau = f64::from(self.temperature);
        match self.kind {
            OutputKind::Softmax | OutputKind::Gumbel => tau * xi,
            OutputKind::Gaussian => tau * normal_of_gumbel(xi),
            OutputKind::Uniform => libm::exp(-libm::exp(-xi)),
        }
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// An element type of the output: f32, f16 or bf16. Values round to nearest, ties to even. Only the observed token's
/// value has no bound: it saturates at the largest finite value of the type (65,504 for f16). The others are at most
/// 23·τ.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    /// Writes `values` to `out`, which has the same length.
    fn store(values: &[f32], out: &mut [Self]);
    /// Rounds one value.
    fn from_f64_saturating(value: f64) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn store(values: &[f32], out: &mut [Self]) {
        out.copy_from_slice(values);
    }
    fn from_f64_saturating(value: f64) -> Self {
        value.clamp(f64::from(Self::MIN), f64::from(Self::MAX)) as Self
    }
}

impl Element for f16 {
    #[inline(always)]
    fn store(values: &[f32], out: &mut [Self]) {
        out.convert_from_f32_slice(values);
    }
    fn from_f64_saturating(value: f64) -> Self {
        Self::from_f64(value.clamp(Self::MIN.to_f64(), Self::MAX.to_f64()))
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn store(values: &[f32], out: &mut [Self]) {
        // All values are finite, so bf16 is the upper half of the f32, rounded. In integer arithmetic the loop
        // vectorises.
        for (out, value) in out.iter_mut().zip(values) {
            let bits = value.to_bits();
            *out = Self::from_bits((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16);
        }
    }
    fn from_f64_saturating(value: f64) -> Self {
        Self::from_f64(value.clamp(Self::MIN.to_f64(), Self::MAX.to_f64()))
    }
}

/// Stored dense noise ξ `[V]` of one token.
#[derive(Debug, Clone, Copy)]
pub enum DenseRow<'a> {
    /// ξ in single precision.
    F32(&'a [f32]),
    /// ξ in half precision.
    F16(&'a [f16]),
}

/// The source of a row's blocks.
enum RowSource<'a> {
    /// Yields E of the entries, and infinity (weight 0) at `token`, which the caller computes separately.
    Replay { stream: &'a NoiseStream, e0: f32, token: Option<u32>, corrections: &'a [Correction] },
    /// Yields stored ξ.
    Dense(DenseRow<'a>),
}

/// Writes rows of noise. Holds the scratch of one thread.
#[derive(Debug)]
pub struct RowWriter {
    vocab: usize,
    level: Level,
    output: Output,
    /// One row in f32, for softmax.
    row: Vec<Block>,
    block: Box<Block>,
}

impl RowWriter {
    /// Creates a writer of rows of `vocab` entries.
    #[must_use]
    pub fn new(vocab: usize, output: Output) -> Self {
        Self::at_level(vocab, output, Level::detect())
    }

    /// As [`Self::new`], with the instructions of one level. The results are the same.
    #[must_use]
    pub fn at_level(vocab: usize, output: Output, level: Level) -> Self {
        let row = if output.kind == OutputKind::Softmax { kernels::zeros(vocab) } else { Vec::new() };
        Self { vocab, level, output, row, block: Box::new(Block::ZERO) }
    }

    /// Writes the posterior noise of a stored token to `out` (`[V]`). The corrections must ascend by index, as in the
    /// format.
    ///
    /// # Errors
    /// If the token or a correction is outside the vocabulary, a stored value is not finite, a correction is out of
    /// order, or `out` has another length.
    pub fn replay<T: Element>(
        &mut self,
        stored: &StoredToken<'_>,
        stream: &NoiseStream,
        out: &mut [T],
    ) -> Result<(), NoiseError> {
        crate::posterior::check_token(stored.token, self.vocab, stream)?;
        let (sequence_id, position) = (stream.sequence_id, stream.position);
        if !stored.logprob.is_finite() {
            return Err(NoiseError::Logprob { sequence_id, position, logprob: stored.logprob });
        }
        let mut before = 0;
        for &Correction { index, logprob } in stored.corrections {
            if index as usize >= self.vocab || !logprob.is_finite() {
                return Err(NoiseError::Correction { sequence_id, position, index, logprob, vocab: self.vocab });
            }
            if index < before {
                return Err(NoiseError::Unordered { sequence_id, position, index, before });
            }
            before = index;
        }
        let e0 = stream.auxiliary_exponential();
        let source = RowSource::Replay { stream, e0, token: Some(stored.token), corrections: stored.corrections };
        let xi = -f64::from(stored.logprob) - libm::log(f64::from(e0));
        let weight = weight_of_token(f64::from(stored.logprob), e0);
        self.write(source, Some((stored.token as usize, xi, weight)), out)
    }

    /// Writes prior noise, ξ_k = −ln e_k for every k, to `out` (`[V]`). Teacher-generated text and inference use it.
    ///
    /// # Errors
    /// If `out` has another length.
    pub fn prior<T: Element>(&mut self, stream: &NoiseStream, out: &mut [T]) -> Result<(), NoiseError> {
        self.write(RowSource::Replay { stream, e0: 0.0, token: None, corrections: &[] }, None, out)
    }

    /// Writes stored dense noise to `out` (`[V]`).
    ///
    /// # Errors
    /// If the noise or `out` has another length.
    pub fn dense<T: Element>(&mut self, noise: DenseRow<'_>, out: &mut [T]) -> Result<(), NoiseError> {
        let got = match noise {
            DenseRow::F32(row) => row.len(),
            DenseRow::F16(row) => row.len(),
        };
        self.check_length("the dense noise of a token", got)?;
        self.write(RowSource::Dense(noise), None, out)
    }

    fn check_length(&self, what: &'static str, got: usize) -> Result<(), NoiseError> {
        if got == self.vocab { Ok(()) } else { Err(NoiseError::Length { what, got, expected: self.vocab }) }
    }

    /// Writes a row. `token` is an entry that is computed separately in f64: its index, ξ and exp(ξ).
    fn write<T: Element>(
        &mut self,
        mut source: RowSource<'_>,
        token: Option<(usize, f64, f64)>,
        out: &mut [T],
    ) -> Result<(), NoiseError> {
        self.check_length("the output of a token", out.len())?;
        if self.output.kind == OutputKind::Softmax {
            if self.output.temperature == 1.0 && matches!(source, RowSource::Replay { .. }) {
                self.softmax_of_weights(&mut source, token, out);
            } else {
                self.softmax_of_gumbel(&mut source, token, out);
            }
            return Ok(());
        }
        let tau = self.output.temperature;
        for (b, out) in out.chunks_mut(BLOCK).enumerate() {
            let block = &mut *self.block;
            let dense = fill(self.level, &mut source, b, out.len(), block);
            match (self.output.kind, dense) {
                (OutputKind::Gumbel, false) => kernels::block_to_gumbel(self.level, block, tau),
                (OutputKind::Gumbel | OutputKind::Softmax, _) => {
                    kernels::scale(self.level, &mut block.0, tau);
                }
                (kind, _) => {
                    let large = if dense { LargeValues::collect(block, out.len()) } else { LargeValues::default() };
                    if dense {
                        kernels::block_to_totals(self.level, block);
                    }
                    if kind == OutputKind::Uniform {
                        kernels::block_to_uniform(self.level, block);
                    } else {
                        kernels::block_to_gaussian(self.level, block, tau);
                    }
                    large.restore(self.output, block);
                }
            }
            T::store(&block.0[..out.len()], out);
        }
        if let Some((x, xi, _)) = token {
            out[x] = T::from_f64_saturating(self.output.map_gumbel(xi));
        }
        Ok(())
    }

    /// Softmax at τ = 1, which needs no logarithm: softmax(ξ)_k = (1/E_k) / Σ_j 1/E_j.
    fn softmax_of_weights<T: Element>(
        &mut self,
        source: &mut RowSource<'_>,
        token: Option<(usize, f64, f64)>,
        out: &mut [T],
    ) {
        let mut sum = 0f64;
        for (b, block) in self.row.iter_mut().enumerate() {
            let valid = (self.vocab - b * BLOCK).min(BLOCK);
            fill(self.level, source, b, valid, block);
            block.0[valid..].fill(f32::INFINITY); // weight 0
            sum += kernels::block_to_weights(self.level, block);
        }
        let weight = token.map_or(0.0, |(_, _, weight)| weight);
        sum += weight;
        // For a point mass at x, 1/Σ underflows f32, and the other entries become 0, their correct value.
        self.scale_out((1.0 / sum) as f32, out);
        if let Some((x, ..)) = token {
            out[x] = T::from_f64_saturating(weight / sum);
        }
    }

    /// Computes softmax(τ·ξ) through the logarithm, after it subtracts the largest τ·ξ.
    fn softmax_of_gumbel<T: Element>(
        &mut self,
        source: &mut RowSource<'_>,
        token: Option<(usize, f64, f64)>,
        out: &mut [T],
    ) {
        let tau = self.output.temperature;
        let at_token = token.map(|(x, xi, _)| (x, self.output.map_gumbel(xi)));
        let mut max = at_token.map_or(f32::MIN, |(_, value)| f32::from_f64_saturating(value));
        for (b, block) in self.row.iter_mut().enumerate() {
            let valid = (self.vocab - b * BLOCK).min(BLOCK);
            if fill(self.level, source, b, valid, block) {
                kernels::scale(self.level, &mut block.0, tau);
            } else {
                kernels::block_to_gumbel(self.level, block, tau);
            }
            block.0[valid..].fill(f32::MIN); // its exponential is 0
            if let Some((x, _)) = at_token
                && x / BLOCK == b
            {
                block.0[x % BLOCK] = f32::MIN;
            }
            let largest = kernels::block_max(self.level, block);
            max = if largest > max { largest } else { max };
        }
        let mut sum = 0f64;
        for block in &mut self.row {
            sum += kernels::block_to_exp(self.level, block, max);
        }
        let weight = at_token.map_or(0.0, |(_, value)| libm::exp(value.min(f64::from(f32::MAX)) - f64::from(max)));
        sum += weight;
        self.scale_out((1.0 / sum) as f32, out);
        if let Some((x, _)) = at_token {
            out[x] = T::from_f64_saturating(weight / sum);
        }
    }

    fn scale_out<T: Element>(&mut self, factor: f32, out: &mut [T]) {
        for (block, out) in self.row.iter().zip(out.chunks_mut(BLOCK)) {
            kernels::block_scaled(self.level, block, factor, &mut self.block);
            T::store(&self.block.0[..out.len()], out);
        }
    }
}

/// Fills block `b` of a row, whose first `valid` entries are in the vocabulary. Returns true if it holds ξ, false if E.
#[inline]
fn fill(level: Level, source: &mut RowSource<'_>, b: usize, valid: usize, block: &mut Block) -> bool {
    let first = b * BLOCK;
    match source {
        RowSource::Replay { stream, e0, token, corrections } => {
            kernels::block_of_exponentials(level, stream, first, block);
            while let Some((c, rest)) = corrections.split_first()
                && (c.index as usize) < first + BLOCK
            {
                let total = &mut block.0[c.index as usize - first];
                *total = (f64::from(*total) + libm::exp(f64::from(c.logprob)) * f64::from(*e0)) as f32;
                *corrections = rest;
            }
            if let Some(x) = *token
                && x as usize / BLOCK == b
            {
                block.0[x as usize % BLOCK] = f32::INFINITY; // weight 0: computed separately
            }
            false
        }
        RowSource::Dense(DenseRow::F32(row)) => {
            block.0[..valid].copy_from_slice(&row[first..first + valid]);
            true
        }
        RowSource::Dense(DenseRow::F16(row)) => {
            row[first..first + valid].convert_to_f32_slice(&mut block.0[..valid]);
            true
        }
    }
}

/// Values of dense noise whose E is too small for the vector functions. Only ξ_x has no bound, so few rows have one.
#[derive(Default)]
struct LargeValues(Vec<(usize, f32)>);

impl LargeValues {
    /// Bound on ξ, with a margin: the generator's smallest e is e^−22.9.
    const THRESHOLD: f32 = 23.0;

    fn collect(block: &Block, valid: usize) -> Self {
        let values = block.0[..valid].iter().enumerate();
        Self(values.filter(|(_, v)| **v > Self::THRESHOLD).map(|(i, v)| (i, *v)).collect())
    }

    fn restore(self, output: Output, block: &mut Block) {
        for (i, xi) in self.0 {
            block.0[i] = f32::from_f64_saturating(output.map_gumbel(f64::from(xi)));
        }
    }
}
