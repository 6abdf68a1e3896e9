//! A fast hash with a fixed key for the sets of words and n-grams. Equality is always compared, so results do not depend
//! on it.

use std::hash::{BuildHasherDefault, Hasher};

/// A map with [`FoldHasher`].
pub(crate) type FastMap<K, V> = std::collections::HashMap<K, V, BuildHasherDefault<FoldHasher>>;
/// A set with [`FoldHasher`].
pub(crate) type FastSet<K> = std::collections::HashSet<K, BuildHasherDefault<FoldHasher>>;

/// Multiplies each word of 8 bytes with a constant and folds the 128 bits of the product.
#[derive(Default)]
pub(crate) struct FoldHasher(u64);

const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline]
pub(crate) fn fold(state: u64, word: u64) -> u64 {
    let product = u128::from(state ^ word ^ 0x2d35_8dcc_aa6c_78a5) * u128::from(FACTOR);
    (product as u64) ^ ((product >> 64) as u64)
}

impl Hasher for FoldHasher {
    #[inline]
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.0 = fold(self.0, u64::from_le_bytes(*word));
        }
        let last = rest.iter().fold(0u64, |last, &byte| last << 8 | u64::from(byte));
        self.0 = fold(self.0, last ^ (bytes.len() as u64) << 56);
    }

    #[inline]
    fn write_u64(&mut self, word: u64) {
        self.0 = fold(self.0, word);
    }

    #[inline]
    fn write_u8(&mut self, _: u8) {
        // `str` ends with a byte 0xff, which adds nothing: `write` hashes the length
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
