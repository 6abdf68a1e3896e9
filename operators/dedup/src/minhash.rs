use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha1::{Digest, Sha1};
use twox_hash::{XxHash3_128, XxHash32, XxHash64};

use crate::error::OptionError;
use crate::mt19937::Mt19937;
use crate::ngrams::Words;
use crate::normalization::Normalization;

/// Options of [`MinHash`]; the defaults are those of datatrove's `MinhashConfig`.
///
/// Two documents whose sets of n-grams have the Jaccard similarity s share a band with probability 1 − (1 − sʳ)ᵇ, where b
/// is `bands` and r is `band_hashes`. With the defaults that is 0.5 at s ≈ 0.68 and 0.92 at s = 0.8.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct MinHashConfig {
    /// Words of an n-gram, 1 to 100. Documents with fewer words have no signature.
    #[schemars(range(min = 1, max = 100))]
    pub ngram_words: u32,
    /// Number of bands, 1 to 65,536.
    #[schemars(range(min = 1, max = 65_536))]
    pub bands: u32,
    /// Hash values of a band, 1 to 65,536. `bands` times `band_hashes` is at most 65,536.
    #[schemars(range(min = 1, max = 65_536))]
    pub band_hashes: u32,
    /// Seed of the permutations, that of numpy's `RandomState`.
    pub seed: u32,
    /// Hash function of n-grams.
    pub hash: NgramHash,
    /// What is made equal before the text is split into words.
    pub normalization: Normalization,
}

impl Default for MinHashConfig {
    fn default() -> Self {
        Self {
            ngram_words: 5,
            bands: 14,
            band_hashes: 8,
            seed: 1,
            hash: NgramHash::default(),
            normalization: Normalization::default(),
        }
    }
}

/// A hash function of n-grams, as datatrove's `HashConfig`: its function and its precision in bits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum NgramHash {
    /// XXH64, 64 bits.
    #[default]
    #[serde(rename = "xxh64")]
    Xxh64,
    /// XXH32, 32 bits.
    #[serde(rename = "xxh32")]
    Xxh32,
    /// The first 64 bits of SHA-1, little-endian.
    #[serde(rename = "sha1_64")]
    Sha1Bits64,
    /// The first 32 bits of SHA-1, little-endian.
    #[serde(rename = "sha1_32")]
    Sha1Bits32,
}

impl NgramHash {
    /// The bits that a value of the signature keeps.
    fn mask(self) -> u64 {
        match self {
            Self::Xxh64 | Self::Sha1Bits64 => u64::MAX,
            Self::Xxh32 | Self::Sha1Bits32 => u32::MAX.into(),
        }
    }
}

/// Returns the first bits of SHA-1 as a little-endian number.
fn sha1_bits<const BYTES: usize>(text: &str) -> u64 {
    let digest = Sha1::digest(text);
    digest.iter().take(BYTES).rev().fold(0, |bits, &byte| bits << 8 | u64::from(byte))
}

/// The Mersenne prime modulo which the permutations are computed.
const PRIME: u64 = (1 << 61) - 1;
const MOST_HASHES: u32 = 1 << 16;
/// Permutations that are computed together: one vector of AVX-512, two of AVX2.
const LANES: usize = 8;
/// Hashes of n-grams that are computed before the permutations; they stay in the first-level cache.
const BLOCK: usize = 1024;

type Lanes = [u64; LANES];

/// Signatures of texts by MinHash (Broder 1997), and their keys for locality-sensitive hashing, as datatrove computes them.
/// Lee et al. 2022 (<https://arxiv.org/abs/2107.06499>) deduplicate training data so.
///
/// Memory: 16 bytes for each permutation, of which there are `bands` × `band_hashes`.
pub struct MinHash {
    config: MinHashConfig,
    /// Factors and terms of the permutations h ↦ (a · h + b mod 2⁶⁴) mod [`PRIME`]. Those beyond the last permutation are 0.
    factors: Vec<Lanes>,
    terms: Vec<Lanes>,
}

impl MinHash {
    /// Checks the options and draws the permutations.
    pub fn new(config: &MinHashConfig) -> Result<Self, OptionError> {
        OptionError::check_range("minhash.ngram_words", config.ngram_words, 1, 100)?;
        OptionError::check_range("minhash.bands", config.bands, 1, MOST_HASHES)?;
        let valid = format_args!("1 to {}, for {} bands", MOST_HASHES / config.bands, config.bands).to_string();
        if config.band_hashes == 0 || config.band_hashes > MOST_HASHES / config.bands {
            return Err(OptionError::new("minhash.band_hashes", config.band_hashes, valid));
        }
        let permutations = (config.bands * config.band_hashes) as usize;
        let mut random = Mt19937::new(config.seed);
        let mut draw = |least| {
            let mut lanes = vec![[0; LANES]; permutations.div_ceil(LANES)];
            lanes
                .as_flattened_mut()
                .iter_mut()
                .take(permutations)
                .for_each(|number| *number = random.between(least, PRIME));
            lanes
        };
        let (factors, terms) = (draw(1), draw(0));
        Ok(Self { config: config.clone(), factors, terms })
    }

    /// Returns the options.
    pub fn config(&self) -> &MinHashConfig {
        &self.config
    }

    /// Returns the `bands` × `band_hashes` values of a text, band by band, or `None` if it has fewer than `ngram_words`
    /// words. A value is below 2⁶¹ − 1, or below 2³² with a hash function of 32 bits.
    ///
    /// Time: the split into words, and one multiplication for each n-gram and permutation. Memory: up to 32 bytes
    /// for each byte of the text while it runs.
    pub fn signature(&self, text: &str) -> Option<Vec<u64>> {
        let words = Words::new(text, &self.config.normalization);
        let n = self.config.ngram_words as usize;
        if words.len() < n {
            return None;
        }
        let ngrams = words.ngrams(n);
        let mut minima = match self.config.hash {
            NgramHash::Xxh64 => self.minima(ngrams.map(|ngram| XxHash64::oneshot(0, ngram.as_bytes()))),
            NgramHash::Xxh32 => self.minima(ngrams.map(|ngram| XxHash32::oneshot(0, ngram.as_bytes()).into())),
            NgramHash::Sha1Bits64 => self.minima(ngrams.map(sha1_bits::<8>)),
            NgramHash::Sha1Bits32 => self.minima(ngrams.map(sha1_bits::<4>)),
        };
        minima.truncate((self.config.bands * self.config.band_hashes) as usize);
        Some(minima)
    }

    /// Returns the least value of each permutation over the hashes of n-grams.
    fn minima(&self, mut hashes: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut minima = vec![[u64::MAX; LANES]; self.factors.len()];
        let mut block = Vec::with_capacity(BLOCK);
        loop {
            block.clear();
            block.extend(hashes.by_ref().take(BLOCK));
            if block.is_empty() {
                return minima.into_flattened();
            }
            self.lower(&mut minima, &block);
        }
    }

    /// Lowers the minima by a block of hashes, with the vector instructions that the CPU has. Integers have the same results
    /// with all of them.
    fn lower(&self, minima: &mut [Lanes], block: &[u64]) {
        let mask = self.config.hash.mask();
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for ((factors, terms), minima) in self.factors.iter().zip(&self.terms).zip(minima) {
                    let mut least = *minima;
                    for &hash in block {
                        for ((least, factor), term) in least.iter_mut().zip(factors).zip(terms) {
                            *least = (*least).min(permute(hash, *factor, *term) & mask);
                        }
                    }
                    *minima = least;
                }
            },
        );
    }

    /// Returns one key for each band of a signature of this `MinHash`, in the order of bands. Two documents share a key if
    /// and only if datatrove puts them into one bucket: the keys are XXH3-128 of the band's number and values, so that
    /// unequal bands share one with a probability of about 2⁻¹²⁸.
    pub fn band_keys(&self, signature: &[u64]) -> impl Iterator<Item = u128> {
        let bands = signature.chunks_exact(self.config.band_hashes as usize).take(self.config.bands as usize);
        let mut bytes = Vec::with_capacity(8 * self.config.band_hashes as usize + 8);
        (0u64..).zip(bands).map(move |(band, values)| {
            bytes.clear();
            bytes.extend_from_slice(&band.to_le_bytes());
            values.iter().for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
            XxHash3_128::oneshot(&bytes)
        })
    }
}

/// Returns (hash · factor + term mod 2⁶⁴) mod 2⁶¹ − 1.
#[inline(always)]
fn permute(hash: u64, factor: u64, term: u64) -> u64 {
    let product = hash.wrapping_mul(factor).wrapping_add(term);
    // 2⁶¹ is 1 modulo the prime
    let folded = (product & PRIME) + (product >> 61);
    // the difference is larger than `folded` if it is negative
    folded.min(folded.wrapping_sub(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_are_modulo_the_prime() {
        let numbers =
            [0, 1, 2, 7, 8, PRIME - 1, PRIME, PRIME + 1, 2 * PRIME, 7 * PRIME, 8 * PRIME, u64::MAX - 7, u64::MAX];
        for hash in numbers {
            for term in numbers {
                assert_eq!(permute(hash, 1, term), hash.wrapping_add(term) % PRIME, "{hash} {term}");
                assert_eq!(permute(hash, term, hash), hash.wrapping_mul(term).wrapping_add(hash) % PRIME);
            }
        }
    }
}
