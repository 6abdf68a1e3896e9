//! The passes over one row of V values, each compiled for every [`Level`](crate::Level).
//!
//! Rows are padded to whole [`Block`]s; u, w and d (below) are 0 in the padding. An f32 sum folds each block by halves
//! and adds the block sums in f64, in the order of the blocks. No result depends on the width of the machine's vectors.
//! Names, for a token x with softmax p = u/Z and variates e:
//!
//! ```text
//! u_k = exp(l_k − max l)       E_k = e_k + p_k·e_0       w_k = 1/E_k       d_k = 1/e_k − 1/E_k = p_k·e_0 / (e_k·E_k)
//! ```
//!
//! Cost per value, all in f32: `weights` takes one Philox word, one logarithm and one division, and dominates.

// The loops index several arrays at the same position: the clearest form, and the one that vectorises.
#![allow(clippy::needless_range_loop)]

use crate::dispatch::dispatched;
use crate::math::{EXP_FLUSH, exp_f32, exponential_from_word, ln_f32};
use crate::philox::{BLOCK, NoiseStream, Words, philox_block};
use crate::quantile::normal_f32;

/// Lanes of an f64 sum, values that [`take_above`] scans together, and columns per block of [`column_maxima`].
pub(crate) const LANES: usize = 16;

/// One block of a row, aligned to cache lines: an AVX-512 access that crosses two lines costs twice as much.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Block(pub [f32; BLOCK]);

impl Block {
    pub(crate) const ZERO: Self = Self([0.0; BLOCK]);
}

/// A padded row of zeros.
pub(crate) fn zeros(vocab: usize) -> Vec<Block> {
    vec![Block::ZERO; vocab.div_ceil(BLOCK)]
}

/// Folds the upper half onto the lower half until one value is left. All but the last four steps are vector operations,
/// and for sums this order has the least error.
#[inline(always)]
fn fold_half(half: &mut [f32; BLOCK / 2], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut width = BLOCK / 4;
    while width > 0 {
        let (low, high) = half.split_at_mut(width);
        for (low, high) in low.iter_mut().zip(high) {
            *low = f(*low, *high);
        }
        width /= 2;
    }
    half[0]
}

#[inline(always)]
fn sum_block(values: &Block) -> f32 {
    let mut half = [0f32; BLOCK / 2];
    for i in 0..BLOCK / 2 {
        half[i] = values.0[i] + values.0[i + BLOCK / 2];
    }
    fold_half(&mut half, |a, b| a + b)
}

#[inline(always)]
fn max_block(values: &Block) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut half = [0f32; BLOCK / 2];
    for i in 0..BLOCK / 2 {
        half[i] = larger(values.0[i], values.0[i + BLOCK / 2]);
    }
    fold_half(&mut half, larger)
}

/// Computes e of the entries from `first` (a multiple of 4) on. `words` is scratch.
#[inline(always)]
fn exponential_block(stream: &NoiseStream, first: usize, words: &mut Words, out: &mut [f32; BLOCK]) {
    philox_block(stream, (first / 4) as u32, words);
    let words = words.as_words();
    for i in 0..BLOCK {
        out[i] = exponential_from_word(words[i]);
    }
}

dispatched! {
    /// Writes the Philox words of one row of whole blocks, for the benchmark.
    pub(crate) fn words(stream: &NoiseStream, out: &mut [u32]) {
        let mut words = Words::ZERO;
        for (b, block) in out.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            philox_block(stream, (b * BLOCK / 4) as u32, &mut words);
            block.copy_from_slice(words.as_words());
        }
    }
}

dispatched! {
    /// Computes e_k of the whole vocabulary. `out`: `[V]`, any V.
    pub(crate) fn exponentials(stream: &NoiseStream, out: &mut [f32]) {
        let mut words = Words::ZERO;
        let (blocks, tail) = out.as_chunks_mut::<BLOCK>();
        let whole = blocks.len();
        for (b, block) in blocks.iter_mut().enumerate() {
            exponential_block(stream, b * BLOCK, &mut words, block);
        }
        if !tail.is_empty() {
            let mut block = [0f32; BLOCK];
            exponential_block(stream, whole * BLOCK, &mut words, &mut block);
            tail.copy_from_slice(&block[..tail.len()]);
        }
    }
}

dispatched! {
    /// The largest logit, and whether all of them are finite.
    pub(crate) fn max_finite(logits: &[f32]) -> (f32, bool) {
        // Enough lanes that the compiler keeps the loops over them as loops, which it then vectorises.
        const WIDE: usize = 256;
        let mut lanes = [f32::MIN; WIDE];
        let mut zeros = [0f32; WIDE]; // l·0 is 0, or NaN if l is not finite
        let (chunks, tail) = logits.as_chunks::<WIDE>();
        for chunk in chunks {
            for l in 0..WIDE {
                lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
                zeros[l] += chunk[l] * 0.0;
            }
        }
        for (l, &value) in tail.iter().enumerate() {
            lanes[l] = if value > lanes[l] { value } else { lanes[l] };
            zeros[l] += value * 0.0;
        }
        let max = lanes.iter().fold(f32::MIN, |a, &b| if b > a { b } else { a });
        (max, zeros.iter().all(|&z| z == 0.0))
    }
}

/// Computes u of one block and adds it to f64 lanes. An f32 sum would change the seventh digit of every
/// log-probability.
#[inline(always)]
fn exp_block(logits: &[f32; BLOCK], max: f32, u: &mut [f32; BLOCK], lanes: &mut [f64; LANES]) {
    for i in 0..BLOCK {
        u[i] = exp_f32(logits[i] - max);
    }
    for chunk in u.as_chunks::<LANES>().0 {
        for l in 0..LANES {
            lanes[l] += f64::from(chunk[l]);
        }
    }
}

dispatched! {
    /// u_k = exp(l_k − max) and Z = Σ u. `logits`: `[V]`; `u`: padded, its padding set to 0.
    pub(crate) fn exp_sum(logits: &[f32], max: f32, u: &mut [Block]) -> f64 {
        let mut lanes = [0f64; LANES];
        let (blocks, tail) = logits.as_chunks::<BLOCK>();
        for (block, u) in blocks.iter().zip(u.iter_mut()) {
            exp_block(block, max, &mut u.0, &mut lanes);
        }
        if !tail.is_empty() && let Some(u) = u.get_mut(blocks.len()) {
            let mut block = [f32::MIN; BLOCK]; // its exponential is 0
            block[..tail.len()].copy_from_slice(tail);
            exp_block(&block, max, &mut u.0, &mut lanes);
        }
        lanes.iter().sum()
    }
}

/// Sums of one block of [`weights`], before the encoder removes any candidate from it.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct BlockSums {
    /// Whether some entry of the block, possibly x, has e_k < p_k·e_0·`rival_threshold`.
    pub has_rival: bool,
    /// Σ w.
    pub weight: f64,
    /// Σ d.
    pub excess: f64,
    /// max d.
    pub largest: f32,
}

dispatched! {
    /// Computes w and d of every k ≠ x (0 at x and in the padding), with their sums per block.
    ///
    /// `u`, `w`, `d`: padded; `sums`: one per block; `scale` = e_0/Z, so that p_k·e_0 = u_k·scale;
    /// `rival_threshold`: 0 if the caller needs no `has_rival`.
    pub(crate) fn weights(
        stream: &NoiseStream, vocab: usize, x: usize, u: &[Block], scale: f32, rival_threshold: f32,
        w: &mut [Block], d: &mut [Block], sums: &mut [BlockSums],
    ) {
        let mut words = Words::ZERO;
        let rows = u.iter().zip(w.iter_mut()).zip(d.iter_mut()).zip(sums.iter_mut());
        for (b, (((u, w_block), d_block), sums)) in rows.enumerate() {
            let first = b * BLOCK;
            philox_block(stream, (first / 4) as u32, &mut words);
            let (words, w, d) = (words.as_words(), &mut w_block.0, &mut d_block.0);
            // Tests e < p·e_0·rival_threshold by the sign of the difference, which avoids turning a comparison mask
            // into a number.
            let mut signs = 0u32;
            for i in 0..BLOCK {
                let e = exponential_from_word(words[i]);
                let added = u.0[i] * scale;
                signs |= (e - added * rival_threshold).to_bits();
                let total = e + added;
                let t = 1.0 / (e * total); // one division serves 1/E, 1/e and their difference
                w[i] = e * t;
                d[i] = added * t;
            }
            if first + BLOCK > vocab {
                w[vocab - first..].fill(0.0);
                d[vocab - first..].fill(0.0);
            }
            if (first..first + BLOCK).contains(&x) {
                w[x - first] = 0.0;
                d[x - first] = 0.0;
            }
            *sums = BlockSums {
                has_rival: signs >> 31 != 0,
                weight: f64::from(sum_block(w_block)),
                excess: f64::from(sum_block(d_block)),
                largest: max_block(d_block),
            };
        }
    }
}

dispatched! {
    /// Σ_k max(0, d_k·a − w_k·g): the contribution of the tokens without a correction to the total variation.
    pub(crate) fn surplus(w: &[Block], d: &[Block], a: f32, g: f32) -> f64 {
        let mut total = 0f64;
        let mut terms = Block::ZERO;
        for (w, d) in w.iter().zip(d) {
            for i in 0..BLOCK {
                let s = d.0[i] * a - w.0[i] * g;
                terms.0[i] = if s > 0.0 { s } else { 0.0 };
            }
            total += f64::from(sum_block(&terms));
        }
        total
    }
}

dispatched! {
    /// The sum of a block.
    pub(crate) fn block_sum(values: &Block) -> f64 {
        f64::from(sum_block(values))
    }
}

dispatched! {
    /// Writes exp((l − max)·factor) of at most BLOCK logits and 0 behind them; returns the sum. With factor 1 it writes
    /// the same bits as [`exp_sum`].
    pub(crate) fn block_of_powers(logits: &[f32], max: f32, factor: f32, out: &mut Block) -> f64 {
        for (out, l) in out.0.iter_mut().zip(logits) {
            *out = exp_f32((l - max) * factor);
        }
        out.0[logits.len()..].fill(0.0);
        f64::from(sum_block(out))
    }
}

dispatched! {
    /// Σ u·(max − l) over at most BLOCK logits. Where u = 0 the distance may be infinite; such entries add 0.
    pub(crate) fn block_of_distances(u: &Block, logits: &[f32], max: f32, scratch: &mut Block) -> f64 {
        for i in 0..logits.len() {
            let distance = max - logits[i];
            let distance = if distance > -EXP_FLUSH { 0.0 } else { distance };
            scratch.0[i] = u.0[i] * distance;
        }
        scratch.0[logits.len()..].fill(0.0);
        f64::from(sum_block(scratch))
    }
}

dispatched! {
    /// Appends the positions in the block with a value above `threshold` to `found`, ascending, and sets these values
    /// to 0. Returns the sum of the remaining values.
    pub(crate) fn take_above(d: &mut Block, threshold: f32, found: &mut Vec<u32>) -> f64 {
        for (c, chunk) in d.0.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            let mut any = 0u32;
            for &value in chunk.iter() {
                any |= u32::from(value > threshold);
            }
            if any != 0 {
                for (l, value) in chunk.iter_mut().enumerate() {
                    if *value > threshold {
                        found.push((c * LANES + l) as u32);
                        *value = 0.0;
                    }
                }
            }
        }
        f64::from(sum_block(d))
    }
}

dispatched! {
    /// Maps E to ξ = −ln E in place, for positive normal E.
    pub(crate) fn negative_ln(values: &mut [f32]) {
        for value in values {
            *value = -ln_f32(*value);
        }
    }
}

dispatched! {
    /// Replaces e_k by E_k = e_k + u_k·scale (`[V]`).
    pub(crate) fn add_scaled(e: &mut [f32], u: &[Block], scale: f32) {
        for (e, u) in e.chunks_mut(BLOCK).zip(u) {
            for (e, u) in e.iter_mut().zip(&u.0) {
                *e += u * scale;
            }
        }
    }
}

dispatched! {
    /// Maps E to 1/E in place; returns Σ 1/E.
    pub(crate) fn reciprocals(values: &mut [f32]) -> f64 {
        let mut lanes = [0f64; LANES];
        let (chunks, tail) = values.as_chunks_mut::<LANES>();
        for chunk in chunks {
            for l in 0..LANES {
                chunk[l] = 1.0 / chunk[l];
                lanes[l] += f64::from(chunk[l]);
            }
        }
        for (l, value) in tail.iter_mut().enumerate() {
            *value = 1.0 / *value;
            lanes[l] += f64::from(*value);
        }
        lanes.iter().sum()
    }
}

dispatched! {
    /// Multiplies the values by `factor` in place.
    pub(crate) fn scale(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }
}

// The kernels below work on one block at a time, for rows that are converted to another type on output. The block stays
// in the L1 cache from the generator to the store.

dispatched! {
    /// Computes e of the entries from `first` (a multiple of BLOCK) on.
    pub(crate) fn block_of_exponentials(stream: &NoiseStream, first: usize, out: &mut Block) {
        exponential_block(stream, first, &mut { Words::ZERO }, &mut out.0);
    }
}

dispatched! {
    /// Maps E to 1/E; returns Σ 1/E.
    pub(crate) fn block_to_weights(values: &mut Block) -> f64 {
        for i in 0..BLOCK {
            values.0[i] = 1.0 / values.0[i];
        }
        f64::from(sum_block(values))
    }
}

dispatched! {
    /// Maps E to −τ·ln E = τ·ξ.
    pub(crate) fn block_to_gumbel(values: &mut Block, temperature: f32) {
        for i in 0..BLOCK {
            values.0[i] = -(temperature * ln_f32(values.0[i]));
        }
    }
}

dispatched! {
    /// Maps E to exp(−E), the Gumbel CDF at ξ.
    pub(crate) fn block_to_uniform(values: &mut Block) {
        for i in 0..BLOCK {
            values.0[i] = exp_f32(-values.0[i]);
        }
    }
}

dispatched! {
    /// Maps E to τ·Φ⁻¹(exp(−E)).
    pub(crate) fn block_to_gaussian(values: &mut Block, temperature: f32) {
        for i in 0..BLOCK {
            values.0[i] = temperature * normal_f32(values.0[i]);
        }
    }
}

dispatched! {
    /// Writes v·factor.
    pub(crate) fn block_scaled(values: &Block, factor: f32, out: &mut Block) {
        for i in 0..BLOCK {
            out.0[i] = values.0[i] * factor;
        }
    }
}

dispatched! {
    /// The largest value.
    pub(crate) fn block_max(values: &Block) -> f32 {
        max_block(values)
    }
}

dispatched! {
    /// Maps v to exp(v − max); returns the sum.
    pub(crate) fn block_to_exp(values: &mut Block, max: f32) -> f64 {
        for i in 0..BLOCK {
            values.0[i] = exp_f32(values.0[i] - max);
        }
        f64::from(sum_block(values))
    }
}

dispatched! {
    /// Maps ξ to E = exp(−ξ), for ξ ≥ −88; 0 for ξ > 60.
    pub(crate) fn block_to_totals(values: &mut Block) {
        for i in 0..BLOCK {
            values.0[i] = exp_f32(-values.0[i]);
        }
    }
}

dispatched! {
    /// The maximum of every column of each block. Column l holds the values l, l + LANES, l + 2·LANES, ….
    pub(crate) fn column_maxima(blocks: &[[f32; BLOCK]], out: &mut [[f32; LANES]]) {
        for (block, out) in blocks.iter().zip(out) {
            let mut lanes = [f32::MIN; LANES];
            for chunk in block.as_chunks::<LANES>().0 {
                for l in 0..LANES {
                    lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
                }
            }
            *out = lanes;
        }
    }
}
