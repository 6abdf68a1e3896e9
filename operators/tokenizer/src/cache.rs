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
const SHORT: usize = 15;
const LONG: usize = 63;
const SHORT_IDS: usize = 3;
const LONG_IDS: usize = 15;

#[derive(Debug, Clone, Copy)]
struct ShortSlot {
    /// The bytes of the word, padded with zeros, and its length in the last byte; 0 if the slot is empty.
    key: u128,
    ids: [u32; SHORT_IDS],
    count: u32,
}

#[derive(Debug, Clone, Copy)]
struct LongSlot {
    key: [u64; 8],
    ids: [u32; LONG_IDS],
    count: u32,
}

const NO_SHORT: ShortSlot = ShortSlot { key: 0, ids: [0; SHORT_IDS], count: 0 };
const NO_LONG: LongSlot = LongSlot { key: [0; 8], ids: [0; LONG_IDS], count: 0 };

/// The slot and key under which to store a word that was not found.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    Short(u128),
    Long([u64; 8]),
    Nowhere,
}

/// Cached words and their ids.
#[derive(Debug)]
pub(crate) struct Cache {
    short: Box<[ShortSlot]>,
    long: Box<[LongSlot]>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Self { short: vec![NO_SHORT; SHORT_SLOTS].into(), long: vec![NO_LONG; LONG_SLOTS].into() }
    }

    pub(crate) fn clear(&mut self) {
        self.short.fill(NO_SHORT);
        self.long.fill(NO_LONG);
    }

    /// Appends the ids of the non-empty word `text[start..end]`. If it is not cached, returns the place to store it.
    #[inline]
    pub(crate) fn find(&self, text: &[u8], start: usize, end: usize, ids: &mut Vec<u32>) -> Option<Place> {
        let length = end - start;
        if length <= SHORT {
            let key = short_key(text, start, length);
            let slot = &self.short[short_slot(key)];
            if slot.key != key {
                return Some(Place::Short(key));
            }
            match slot.count {
                1 => ids.push(slot.ids[0]),
                count => ids.extend_from_slice(&slot.ids[..count as usize % (SHORT_IDS + 1)]),
            }
            return None;
        }
        if length > LONG {
            return Some(Place::Nowhere);
        }
        let key = long_key(&text[start..end]);
        let slot = &self.long[long_slot(&key)];
        if slot.key != key {
            return Some(Place::Long(key));
        }
        ids.extend_from_slice(&slot.ids[..slot.count as usize % (LONG_IDS + 1)]);
        None
    }

    /// Stores the ids of a word at its place, unless they are too many.
    pub(crate) fn keep(&mut self, place: Place, ids: &[u32]) {
        match place {
            Place::Short(key) if ids.len() <= SHORT_IDS => {
                let slot = &mut self.short[short_slot(key)];
                *slot = ShortSlot { key, count: ids.len() as u32, ..NO_SHORT };
                slot.ids[..ids.len()].copy_from_slice(ids);
            }
            Place::Long(key) if ids.len() <= LONG_IDS => {
                let slot = &mut self.long[long_slot(&key)];
                *slot = LongSlot { key, count: ids.len() as u32, ..NO_LONG };
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
        let mut eight = [0; 8];
        eight.copy_from_slice(&bytes[8 * i..8 * i + 8]);
        u64::from_le_bytes(eight)
    })
}

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

#[inline]
fn short_slot(key: u128) -> usize {
    let (low, high) = (key as u64, (key >> 64) as u64);
    let hash = (low ^ high.rotate_left(29).wrapping_mul(ODD)).wrapping_mul(ODD);
    (hash >> (64 - SHORT_SLOTS.trailing_zeros())) as usize % SHORT_SLOTS
}

fn long_slot(key: &[u64; 8]) -> usize {
    let hash = key.iter().fold(0u64, |hash, &eight| (hash.rotate_left(23) ^ eight).wrapping_mul(ODD));
    (hash >> (64 - LONG_SLOTS.trailing_zeros())) as usize % LONG_SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(cache: &Cache, text: &str, start: usize, end: usize) -> Option<Vec<u32>> {
        let mut ids = Vec::new();
        cache.find(text.as_bytes(), start, end, &mut ids).is_none().then_some(ids)
    }

    #[test]
    fn words_of_every_length_are_found_again_or_never_kept() {
        let text = "abcdefghijklmnopqrstuvwxyz".repeat(4);
        for length in 1..80 {
            for count in 0..20 {
                let mut cache = Cache::new();
                let ids: Vec<u32> = (100..100 + count).collect();
                for start in [0, 7, text.len() - length] {
                    let place = cache.find(text.as_bytes(), start, start + length, &mut Vec::new()).unwrap();
                    cache.keep(place, &ids);
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
        let mut cache = Cache::new();
        let text = "a\0\0\0";
        let place = cache.find(text.as_bytes(), 0, 2, &mut Vec::new()).unwrap();
        cache.keep(place, &[5]);
        assert_eq!(get(&cache, text, 0, 2), Some(vec![5]));
        assert_eq!(get(&cache, text, 0, 1), None);
        assert_eq!(get(&cache, text, 0, 3), None);
    }
}
