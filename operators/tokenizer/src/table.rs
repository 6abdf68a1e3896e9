//! A table with one byte per code point, in two stages.
//!
//! ```text
//!  code point 0x1F600:  block = index[0x1F6] ──► blocks[block][0x00]      equal blocks are stored once
//! ```
//!
//! A look-up takes two loads. The table of a Unicode property takes about 20 to 60 KB.

use std::collections::HashMap;

const BLOCK: usize = 256;
const CODE_POINTS: usize = 0x11_0000;

/// One byte per code point.
#[derive(Debug)]
pub(crate) struct CodePointTable {
    index: Vec<u16>,
    blocks: Vec<[u8; BLOCK]>,
}

impl CodePointTable {
    /// Creates a table from the bytes of all code points.
    fn from_bytes(all: &[u8]) -> Self {
        let mut table = Self { index: Vec::with_capacity(CODE_POINTS / BLOCK), blocks: Vec::new() };
        let mut known: HashMap<[u8; BLOCK], u16> = HashMap::new();
        for chunk in all.chunks_exact(BLOCK) {
            let mut block = [0; BLOCK];
            block.copy_from_slice(chunk);
            let at = *known.entry(block).or_insert_with(|| {
                table.blocks.push(block);
                // At most 4,352 blocks exist.
                (table.blocks.len() - 1) as u16
            });
            table.index.push(at);
        }
        table
    }

    /// Creates a table from a function of the character. Surrogates, which are not characters, get 0.
    pub(crate) fn from_fn(mut byte: impl FnMut(char) -> u8) -> Self {
        let all: Vec<u8> = (0..CODE_POINTS as u32).map(|code| char::from_u32(code).map_or(0, &mut byte)).collect();
        Self::from_bytes(&all)
    }

    /// Returns the byte of a code point; 0 above U+10FFFF.
    #[inline]
    pub(crate) fn get(&self, code: u32) -> u8 {
        let block = self.index.get(code as usize / BLOCK).and_then(|&at| self.blocks.get(usize::from(at)));
        block.map_or(0, |block| block[code as usize % BLOCK])
    }
}

/// Decodes the UTF-8 code point that begins at `at`, and its length in bytes. If none begins there, the result is
/// arbitrary, without a panic. `at` must be within the text.
#[inline]
pub(crate) fn decode_utf8(text: &[u8], at: usize) -> (u32, usize) {
    let next = |n: usize| u32::from(text.get(at + n).copied().unwrap_or(0) & 0x3f);
    let first = u32::from(text[at]);
    match first {
        0..=0x7f => (first, 1),
        0x80..=0xdf => ((first & 0x1f) << 6 | next(1), 2),
        0xe0..=0xef => ((first & 0x0f) << 12 | next(1) << 6 | next(2), 3),
        _ => ((first & 0x07) << 18 | next(1) << 12 | next(2) << 6 | next(3), 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_is_decoded_and_found() {
        let table = CodePointTable::from_fn(|c| (u32::from(c).wrapping_mul(0x9e37_79b1) >> 24) as u8);
        let mut utf8 = [0; 4];
        for c in '\0'..=char::MAX {
            let text = c.encode_utf8(&mut utf8).as_bytes();
            assert_eq!(decode_utf8(text, 0), (u32::from(c), c.len_utf8()));
            assert_eq!(u32::from(table.get(u32::from(c))), u32::from(c).wrapping_mul(0x9e37_79b1) >> 24);
        }
        assert_eq!(table.get(0x11_0000), 0);
        assert!(CodePointTable::from_fn(|c| u8::from(c.is_alphabetic())).blocks.len() < 200);
    }
}
