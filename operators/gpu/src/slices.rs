//! The layout of slices of logits.

/// The stride between two rows of logits, in f32 elements: every row begins at a multiple of 32 bytes.
///
/// The head computes all of it: its weight has rows of zeros after those of the vocabulary. For a row of an odd length
/// (GPT-2 has 50,257 tokens), cuBLASLt only has products without vector accesses, at an eighth of the speed.
#[must_use]
pub const fn logits_stride(vocab: usize) -> usize {
    vocab.next_multiple_of(8)
}

/// Maximum logits of a slice: 128 MB in f32.
const SLICE_VALUES: usize = 32 << 20;
/// Rows of a tile of a product. A slice has whole tiles, because a part of one takes as long as all of it.
const TILE_ROWS: usize = 128;

/// Rows of a slice of logits: enough for a product at full speed, and for a block of the extraction on every
/// multiprocessor.
#[must_use]
pub const fn slice_rows(vocab: usize) -> usize {
    match SLICE_VALUES / vocab {
        ..8 => 8,
        rows @ 8..TILE_ROWS => rows,
        rows @ TILE_ROWS..4096 => rows - rows % TILE_ROWS,
        _ => 4096,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_have_whole_tiles() {
        let rows = [1, 1000, 50_257, 128_256, 262_144, 400_000, 1 << 26, usize::MAX].map(slice_rows);
        assert_eq!(rows, [4096, 4096, 640, 256, 128, 83, 8, 8]);
        assert_eq!([1, 8, 50_257].map(logits_stride), [8, 8, 50_264]);
    }
}
