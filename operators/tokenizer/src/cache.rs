//! A cache of words and their ids, with a fixed amount of memory and no allocation.
//!
//! ```text
//!  word of up to 15 bytes, up to 3 ids   ──► short[hash]   32 bytes a slot: 16 of key with length, 3 ids, their number
//!  up to 63 bytes, up to 15 ids          ──► long[hash]   128 bytes a slot
//!  longer                                ──► not cached
//! ```
//!
//! A word replaces the one in its slot. The cache affects only the speed, never the ids.

/// Slots of short words (2 MB) and of long ones (512 KB): about the size of a core's L2 cache.
const SHORT_SLOTS: usize = 1 << 16;
const LONG_SLOTS: usize = 1 << 12;
/// Bytes of the longest short word, and of the longest cached word.
const MAX_SHORT_BYTES: usize = 15;
const MAX_LONG_BYTES: usize = 63;
const MAX_SHORT_IDS: usize = 3;
const MAX_LONG_IDS: usize = 15;

#[derive(Debug, Clone, Copy)]
struct ShortSlot {
    /// The bytes of the word, padded with zeros, and its length in the last byte; 0 if the slot is empty.
    key: u128,
    ids: [u32; MAX_SHORT_IDS],
    count: u32,
}

#[derive(Debug, Clone, Copy)]
struct LongSlot {
    key: [u64; 8],
    ids: [u32; MAX_LONG_IDS],
    count: u32,
}

const EMPTY_SHORT: ShortSlot = ShortSlot { key: 0, ids: [0; MAX_SHORT_IDS], count: 0 };
const EMPTY_LONG: LongSlot = LongSlot { key: [0; 8], ids: [0; MAX_LONG_IDS], count: 0 };

/// The slot and key under which to store a word that was not found.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CacheKey {
    Short(u128),
    Long([u64; 8]),
    Uncacheable,
}

/// Cached words and their ids.
#[derive(Debug)]
pub(crate) struct WordCache {
    short: Box<[ShortSlot]>,
    long: Box<[LongSlot]>,
}

impl WordCache {
    pub(crate) fn new() -> Self {
        Self { short: vec![EMPTY_SHORT; SHORT_SLOTS].into(), long: vec![EMPTY_LONG; LONG_SLOTS].into() }
    }

    pub(crate) fn clear(&mut self) {
        self.short.fill(EMPTY_SHORT);
        self.long.fill(EMPTY_LONG);
    }

    /// Appends the ids of the non-empty word `text[start..end]`. If it is not cached, returns the key to store it
    /// under.
    #[inline]
    pub(crate) fn lookup(&self, text: &[u8], start: usize, end: usize, ids: &mut Vec<u32>) -> Option<CacheKey> {
        let length = end - start;
        if length <= MAX_SHORT_BYTES {
            let key = short_key(text, start, length);
            let slot = &self.short[short_slot(key)];
            if slot.key != key {
                return Some(CacheKey::Short(key));
            }
            match slot.count {
                1 => ids.push(slot.ids[0]),
                count => ids.extend_from_slice(&slot.ids[..count as usize % (MAX_SHORT_IDS + 1)]),
            }
            return None;
        }
        if length > MAX_LONG_BYTES {
            return Some(CacheKey::Uncacheable);
        }
        let key = long_key(&text[start..end]);
        let slot = &self.long[long_slot(&key)];
        if slot.key != key {
            return Some(CacheKey::Long(key));
        }
        ids.extend_from_slice(&slot.ids[..slot.count as usize % (MAX_LONG_IDS + 1)]);
        None
    }

    /// Stores the ids of a word under its key, unless they are too many.
    pub(crate) fn insert(&mut self, key: CacheKey, ids: &[u32]) {
        match key {
            CacheKey::Short(key) if ids.len() <= MAX_SHORT_IDS => {
                let slot = &mut self.short[short_slot(key)];
                *slot = ShortSlot { key, count: ids.len() as u32, ..EMPTY_SHORT };
                slot.ids[..ids.len()].copy_from_slice(ids);
            }
            CacheKey::Long(key) if ids.len() <= MAX_LONG_IDS => {
                let slot = &mut self.long[long_slot(&key)];
                *slot = LongSlot { key, count: ids.len() as u32, ..EMPTY_LONG };
                slot.ids[..ids.len()].copy_from_slice(ids);
            }
            _ => {}
        }
    }
}

#[inline]
fn short_key(text: &[u8], start: usize, length: usize) -> u128 {
    let bytes = match text.get(start..start + 16).and_then(|bytes| bytes.try_into().ok()) {
        // Only the word's bytes: 1 to 15 of the 16.
        Some(bytes) => u128::from_le_bytes(bytes) & (u128::MAX >> (128 - 8 * length as u32)),
        None => {
            let mut bytes = [0; 16];
            bytes[..length].copy_from_slice(&text[start..start + length]);
            u128::from_le_bytes(bytes)
        }
    };
    bytes | (length as u128) << 120
}

fn long_key(word: &[u8]) -> [u64; 8] {
    let mut bytes = [0; 64];
    bytes[..word.len()].copy_from_slice(word);
    bytes[63] = word.len() as u8;
    std::array::from_fn(|i| {
        let mut chunk = [0; 8];
        chunk.copy_from_slice(&bytes[8 * i..8 * i + 8]);
        u64::from_le_bytes(chunk)
    })
}

const HASH_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline]
fn short_slot(key: u128) -> usize {
    let (low, high) = (key as u64, (key >> 64) as u64);
    let hash = (low ^ high.rotate_left(29).wrapping_mul(HASH_MULTIPLIER)).wrapping_mul(HASH_MULTIPLIER);
    (hash >> (64 - SHORT_SLOTS.trailing_zeros())) as usize % SHORT_SLOTS
}

fn long_slot(key: &[u64; 8]) -> usize {
    let hash = key.iter().fold(0u64, |hash, &chunk| (hash.rotate_left(23) ^ chunk).wrapping_mul(HASH_MULTIPLIER));
    (hash >> (64 - LONG_SLOTS.trailing_zeros())) as usize % LONG_SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(cache: &WordCache, text: &str, start: usize, end: usize) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        cache.lookup(text.as_bytes(), start, end, &mut ids).is_none().then_some(ids)
    }

    #[test]
    fn words_of_every_length_are_found_again_or_never_kept() {
        let text = "abcdefghijklmnopqrstuvwxyz".repeat(4);
        for length in 1..80 {
            for count in 0..20 {
                let mut cache = WordCache::new();
                let ids: Vec<u32> = (100..100 + count).collect();
                for start in [0, 7, text.len() - length] {
                    let key = cache.lookup(text.as_bytes(), start, start + length, &mut Vec::new()).unwrap();
                    cache.insert(key, &ids);
                    let kept = if length <= 15 { count <= 3 } else { length <= 63 && count <= 15 };
                    assert_eq!(
                        get(&cache, &text, start, start + length),
                        kept.then(|| ids.clone()),
                        "{length} {count}"
                    );
                    // A prefix or an extension of the word is not found.
                    assert!(length == 1 || get(&cache, &text, start, start + length - 1).is_none());
                    cache.clear();
                    assert_eq!(get(&cache, &text, start, start + length), None);
                }
            }
        }
    }

    #[test]
    fn zeros_in_a_word_are_part_of_it() {
        let mut cache = WordCache::new();
        let text = "a\0\0\0";
        let key = cache.lookup(text.as_bytes(), 0, 2, &mut Vec::new()).unwrap();
        cache.insert(key, &[5]);
        assert_eq!(get(&cache, text, 0, 2), Some(vec![5]));
        assert_eq!(get(&cache, text, 0, 1), None);
        assert_eq!(get(&cache, text, 0, 3), None);
    }
}
