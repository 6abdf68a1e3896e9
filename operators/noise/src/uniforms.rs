//! Keyed uniforms for all random choices that are not noise: partitions, orders, blocks.
//!
//! ```text
//! s       = splitmix64(seed XOR fnv1a64(purpose))        key = (s mod 2^32, s div 2^32)
//! counter = (c0, stream, sequence_id mod 2^32, sequence_id div 2^32)        c0 = 0, 1, 2, ...
//! ```
//!
//! fnv1a64 is FNV-1a of the purpose's UTF-8 bytes. splitmix64 is the output function of SplitMix64, which first adds
//! the constant 0x9E3779B97F4A7C15. The words of a counter are used in order. The purpose separates the uses from each
//! other, and from the noise, whose keys come from its own seed without a hash.

use crate::philox4x32_10;

/// FNV-1a, 64 bits.
#[must_use]
pub const fn fnv1a64(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0100_0000_01b3);
        i += 1;
    }
    hash
}

/// The output of SplitMix64 at state `state`.
#[must_use]
pub const fn splitmix64(state: u64) -> u64 {
    let z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A stream of uniforms, determined by seed, purpose, sequence and stream number.
#[derive(Debug, Clone)]
pub struct KeyedUniforms {
    key: [u32; 2],
    counter: [u32; 4],
    words: [u32; 4],
    used: usize,
}

/// The seed of an epoch. For epoch 0 it is `seed` itself, as in the views of the Python package.
///
/// ```
/// assert_eq!(stillhouse_noise::epoch_seed(42, 0), 42);
/// assert_eq!(stillhouse_noise::epoch_seed(1, 2), 0x3C6E_F372_FE94_F82B);
/// ```
#[must_use]
pub fn epoch_seed(seed: u64, epoch: u32) -> u64 {
    seed.wrapping_add(u64::from(epoch).wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// The stream of uniforms for one purpose at one sequence. `stream` numbers independent streams of the same purpose,
/// such as draws, views or epochs.
///
/// ```
/// let mut uniforms = stillhouse_noise::keyed_uniforms(42, "partitions", 7, 0);
/// assert!((0.0..1.0).contains(&uniforms.next_f64()));
/// ```
#[must_use]
pub fn keyed_uniforms(seed: u64, purpose: &'static str, sequence_id: u64, stream: u32) -> KeyedUniforms {
    let s = splitmix64(seed ^ fnv1a64(purpose.as_bytes()));
    KeyedUniforms {
        key: [s as u32, (s >> 32) as u32],
        counter: [0, stream, sequence_id as u32, (sequence_id >> 32) as u32],
        words: [0; 4],
        used: 4,
    }
}

impl KeyedUniforms {
    /// Returns 32 random bits. A stream holds 2^34 words.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.words = philox4x32_10(self.counter, self.key);
            self.counter[0] = self.counter[0].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.words[self.used - 1]
    }

    /// Returns 64 random bits: two words, the low one first.
    pub fn next_u64(&mut self) -> u64 {
        let low = u64::from(self.next_u32());
        low | u64::from(self.next_u32()) << 32
    }

    /// Returns a uniform in [0, 1) with 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / 9_007_199_254_740_992.0)
    }

    /// Returns a uniform integer in 0 .. n−1 without bias (Lemire 2019); 0 for n = 0.
    pub fn below(&mut self, n: u32) -> u32 {
        let mut product = u64::from(self.next_u32()) * u64::from(n);
        if (product as u32) < n {
            let rejected = n.wrapping_neg() % n;
            while (product as u32) < rejected {
                product = u64::from(self.next_u32()) * u64::from(n);
            }
        }
        (product >> 32) as u32
    }

    /// Shuffles `items` uniformly (Fisher and Yates, from the end).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below((i as u32).wrapping_add(1)) as usize;
            items.swap(i, j);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_derivation_is_the_published_one() {
        assert_eq!(fnv1a64(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(fnv1a64(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
        let s = splitmix64(42 ^ fnv1a64(b"partitions"));
        let expected = philox4x32_10([0, 3, 7, 1], [s as u32, (s >> 32) as u32]);
        let mut uniforms = keyed_uniforms(42, "partitions", 7 | 1 << 32, 3);
        assert_eq!([(); 4].map(|()| uniforms.next_u32()), expected);
    }

    #[test]
    fn purposes_sequences_and_streams_differ() {
        let first = |mut u: KeyedUniforms| u.next_u64();
        let base = first(keyed_uniforms(1, "partitions", 0, 0));
        assert_ne!(base, first(keyed_uniforms(1, "orders", 0, 0)));
        assert_ne!(base, first(keyed_uniforms(1, "partitions", 1, 0)));
        assert_ne!(base, first(keyed_uniforms(1, "partitions", 0, 1)));
        assert_ne!(base, first(keyed_uniforms(2, "partitions", 0, 0)));
    }

    #[test]
    fn below_is_uniform_and_shuffle_permutes() {
        let mut uniforms = keyed_uniforms(9, "test", 0, 0);
        let mut counts = [0u32; 6];
        for _ in 0..60_000 {
            counts[uniforms.below(6) as usize] += 1;
        }
        let chi2: f64 = counts.iter().map(|&c| (f64::from(c) - 1e4).powi(2) / 1e4).sum();
        assert!(chi2 < 20.5, "{counts:?}"); // p = 0.001 at five degrees of freedom
        assert_eq!((uniforms.below(0), uniforms.below(1)), (0, 0));
        let mut order: Vec<u32> = (0..100).collect();
        uniforms.shuffle(&mut order);
        assert_ne!(order, (0..100).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<_>>());
        let mean = (0..100_000).map(|_| uniforms.next_f64()).sum::<f64>() / 1e5;
        assert!((mean - 0.5).abs() < 0.004, "{mean}");
    }
}
