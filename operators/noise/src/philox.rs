//! Philox4x32-10, the counter-based generator of Salmon et al. 2011 (Random123), with the keys and counters of the
//! format.
//!
//! ```text
//! key     = (s mod 2^32, s div 2^32),   s = noise_seed + draw · 0x9E3779B97F4A7C15   (mod 2^64)
//! counter = (c0, position, sequence_id mod 2^32, sequence_id div 2^32)
//! ```
//!
//! Vocabulary entry k takes word `k mod 4` of the counter with `c0 = k div 4`. e_0 takes word 0 of the counter with
//! `c0 = 0xFFFFFFFF`. cuRAND, PyTorch-CUDA and Triton have the same generator, so a trainer can replay the noise on its
//! GPU.
//!
//! Cost: 20 multiplications of 32 × 32 bits per four words. The vector version keeps every 32-bit word in a 64-bit
//! lane. There one multiplication yields both halves of the product, and the unused high half needs no mask.

use crate::math::exponential_from_word;

const M0: u64 = 0xD251_1F53;
const M1: u64 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;
const LOW: u64 = 0xFFFF_FFFF;

/// Counter word 0 of the auxiliary variate e_0. No vocabulary is large enough to use it.
const AUXILIARY: u32 = 0xFFFF_FFFF;

/// Words per call of [`philox_block`]: 4 KiB, so that a block stays in the L1 cache.
pub(crate) const BLOCK: usize = 1024;

/// The ten round keys of `key`, each in a 64-bit lane.
#[inline(always)]
fn round_keys(key: [u32; 2]) -> [[u64; 2]; 10] {
    let mut keys = [[0; 2]; 10];
    let [mut k0, mut k1] = key;
    for round in &mut keys {
        *round = [u64::from(k0), u64::from(k1)];
        k0 = k0.wrapping_add(W0);
        k1 = k1.wrapping_add(W1);
    }
    keys
}

/// One round. The high halves of `c[1]` and `c[3]` hold leftover product bits, which nothing reads: the next
/// multiplication masks them, and [`last_round`] masks or truncates them.
#[inline(always)]
fn round(c: [u64; 4], key: [u64; 2]) -> [u64; 4] {
    let p0 = (c[0] & LOW).wrapping_mul(M0);
    let p1 = (c[2] & LOW).wrapping_mul(M1);
    [(p1 >> 32) ^ c[1] ^ key[0], p1, (p0 >> 32) ^ c[3] ^ key[1], p0]
}

/// The last round. Returns the four words as two pairs, the first word of each pair in the low half. Rotating a product
/// by 32 bits puts both halves in place, so the store needs no narrowing.
#[inline(always)]
fn last_round(c: [u64; 4], key: [u64; 2]) -> [u64; 2] {
    let p0 = (c[0] & LOW).wrapping_mul(M0);
    let p1 = (c[2] & LOW).wrapping_mul(M1);
    [p1.rotate_left(32) ^ ((c[1] ^ key[0]) & LOW), p0.rotate_left(32) ^ ((c[3] ^ key[1]) & LOW)]
}

#[inline(always)]
fn rounds(c: [u64; 4], k: &[[u64; 2]; 10]) -> [u64; 2] {
    // Unrolled by hand: without an inner loop, the compiler vectorises the surrounding loop over counters.
    let c = round(c, k[0]);
    let c = round(c, k[1]);
    let c = round(c, k[2]);
    let c = round(c, k[3]);
    let c = round(c, k[4]);
    let c = round(c, k[5]);
    let c = round(c, k[6]);
    let c = round(c, k[7]);
    let c = round(c, k[8]);
    last_round(c, k[9])
}

/// Philox4x32-10 of one counter.
///
/// ```
/// assert_eq!(stillhouse_noise::philox4x32_10([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
/// ```
#[must_use]
#[inline]
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [a, b] = rounds(counter.map(u64::from), &round_keys(key));
    [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32]
}

/// The random words of a block. [`rounds`] writes them as pairs; readers index single words.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Words([u64; BLOCK / 2]);

impl Words {
    pub(crate) const ZERO: Self = Self([0; BLOCK / 2]);

    /// The block as single words.
    #[inline(always)]
    pub(crate) fn as_words(&self) -> &[u32; BLOCK] {
        // SAFETY: BLOCK / 2 u64 and BLOCK u32 have the same size, u32 needs less alignment, and every bit pattern is
        // valid.
        unsafe { &*(&raw const self.0).cast::<[u32; BLOCK]>() }
    }
}

/// Arranges a pair so that the word of the low half comes first in memory, on either byte order.
#[inline(always)]
fn in_memory(pair: u64) -> u64 {
    if cfg!(target_endian = "big") { pair.rotate_left(32) } else { pair }
}

/// Computes the words of the counters `(first + i, stream...)`, i < BLOCK / 4, in vocabulary order.
#[inline(always)]
pub(crate) fn philox_block(stream: &NoiseStream, first: u32, words: &mut Words) {
    let keys = round_keys(stream.key.0);
    let [_, position, low, high] = stream.counter(0).map(u64::from);
    for (i, out) in words.0.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        // A counter past 2^32 would wrap, but only in the padding: a vocabulary uses at most 2^30 counters.
        let c0 = u64::from(first) + i as u64;
        *out = rounds([c0, position, low, high], &keys).map(in_memory);
    }
}

/// The Philox key of one draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DrawKey(pub(crate) [u32; 2]);

impl DrawKey {
    /// The key of draw number `draw` (0 .. D−1) under a job's `noise_seed`.
    #[must_use]
    pub const fn new(noise_seed: u64, draw: u32) -> Self {
        let s = noise_seed.wrapping_add((draw as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        Self([s as u32, (s >> 32) as u32])
    }

    /// The keys of draws 0 .. D−1.
    #[must_use]
    pub fn draws(noise_seed: u64, draws: u32) -> Vec<Self> {
        (0..draws).map(|draw| Self::new(noise_seed, draw)).collect()
    }

    /// The two key words.
    #[must_use]
    pub const fn words(self) -> [u32; 2] {
        self.0
    }
}

/// The random stream of one token, given by draw, packed sequence and position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NoiseStream {
    /// Key of the draw.
    pub key: DrawKey,
    /// Id of the packed sequence, unique in the data set.
    pub sequence_id: u64,
    /// Position in the packed sequence, from 0.
    pub position: u32,
}

impl NoiseStream {
    /// The stream of one token.
    #[must_use]
    pub const fn new(key: DrawKey, sequence_id: u64, position: u32) -> Self {
        Self { key, sequence_id, position }
    }

    const fn counter(&self, c0: u32) -> [u32; 4] {
        [c0, self.position, self.sequence_id as u32, (self.sequence_id >> 32) as u32]
    }

    /// The random word of vocabulary entry `k`.
    #[must_use]
    pub fn word(&self, k: u32) -> u32 {
        philox4x32_10(self.counter(k / 4), self.key.0)[(k % 4) as usize]
    }

    /// The random word of e_0.
    #[must_use]
    pub fn auxiliary_word(&self) -> u32 {
        philox4x32_10(self.counter(AUXILIARY), self.key.0)[0]
    }

    /// e_k = exp(−ζ_k), the Exp(1) variate of vocabulary entry `k`: the same bits as [`crate::exponentials`] writes.
    #[must_use]
    pub fn exponential(&self, k: u32) -> f32 {
        exponential_from_word(self.word(k))
    }

    /// e_0 = exp(−ζ_0), the Exp(1) variate that all entries of the token share.
    #[must_use]
    pub fn auxiliary_exponential(&self) -> f32 {
        exponential_from_word(self.auxiliary_word())
    }
}
