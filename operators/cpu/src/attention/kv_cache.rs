//! A KV cache: keys and values of one head that stay packed between calls, for decoding that continues a run.
//!
//! ```text
//!   push [n, dim] keys, values  ─► the next columns of the last panel of keys, the next inputs of the panels of values
//!   attention of positions p..q ─► the same strips over the same panels as [`super::attention`] packs for a whole run
//! ```
//!
//! A row's bits therefore equal those of the whole run. The cache allocates memory for `capacity` positions when it is
//! created: 2 · dim · 4 bytes each (rounded up to whole panels), half of that in bf16. Pushing a position copies its
//! key and value.

use super::{
    AttentionCall, AttentionScratch, Heads, PackedKeyValues, attention_level_for, grow_to, panel_lines, with_attention,
};
use crate::Arithmetic;
use crate::arithmetic::Level;
use crate::error::ProductError;
use crate::kernel::Kernel;
use crate::memory::{Line, as_numbers, as_numbers_mut};
use crate::weight::check_fits;
use std::ops::Range;

/// The KV cache of one head: packed keys and values of positions `0..length`.
pub struct HeadKvCache {
    level: Level,
    dim: usize,
    capacity: usize,
    length: usize,
    keys: Vec<Line>,
    values: Vec<Line>,
    /// Lines in a panel of keys, and in a panel of values.
    lines: [usize; 2],
}

impl std::fmt::Debug for HeadKvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { dim, capacity, length, .. } = self;
        write!(f, "HeadKvCache {{ dim: {dim}, length: {length} of {capacity} }}")
    }
}

/// Lines of all keys and of all values, then the lines of one panel of each.
fn sizes<K: Kernel>(_: K, dim: usize, capacity: usize) -> ([usize; 2], [usize; 2]) {
    let panels = capacity.div_ceil(K::OUTPUTS);
    let lines = panel_lines::<K>(dim, panels);
    ([panels * lines[0], dim.div_ceil(K::OUTPUTS) * lines[1]], lines)
}

fn sizes_at(level: Level, dim: usize, capacity: usize) -> ([usize; 2], [usize; 2]) {
    let mut made = ([0; 2], [0; 2]);
    with_attention!(level, kernel => made = sizes(kernel, dim, capacity));
    made
}

impl HeadKvCache {
    /// Bytes that [`Self::new`] would allocate. They depend on the kernel's panel width on this machine.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn bytes_for(dim: usize, capacity: usize, arithmetic: Arithmetic) -> Result<usize, ProductError> {
        let ([keys, values], _) = sizes_at(attention_level_for(arithmetic)?, dim, capacity);
        Ok((keys + values) * size_of::<Line>())
    }

    /// Allocates memory for `capacity` positions of a head of `dim` floats. Products are those of [`super::attention`].
    ///
    /// # Errors
    /// Returns [`ProductError`] if this machine lacks these products.
    pub fn new(dim: usize, capacity: usize, arithmetic: Arithmetic) -> Result<Self, ProductError> {
        let level = attention_level_for(arithmetic)?;
        let ([keys, values], lines) = sizes_at(level, dim, capacity);
        let (keys, values) = (vec![Line::ZERO; keys], vec![Line::ZERO; values]);
        Ok(Self { level, dim, capacity, length: 0, keys, values, lines })
    }

    /// Number of cached positions.
    #[must_use]
    pub const fn length(&self) -> usize {
        self.length
    }

    /// Bytes that the cache occupies.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(self.keys.as_slice()) + size_of_val(self.values.as_slice())
    }

    /// Removes all positions.
    pub const fn clear(&mut self) {
        self.length = 0;
    }

    /// Appends the next positions: `rows` of `dim` floats each, `stride` apart.
    ///
    /// # Errors
    /// Returns [`ProductError`] if they exceed the capacity or a slice is too short. Nothing is added in that case.
    pub fn push(
        &mut self,
        keys: &[f32],
        values: &[f32],
        stride: usize,
        rows: usize,
        scratch: &mut AttentionScratch,
    ) -> Result<(), ProductError> {
        if rows == 0 {
            return Ok(());
        }
        check_fits("the keys", keys.len(), rows, self.dim, stride)?;
        check_fits("the values", values.len(), rows, self.dim, stride)?;
        if rows > self.capacity - self.length {
            let what = "the number of positions pushed";
            return Err(ProductError::Size { what, got: rows, valid: self.capacity - self.length });
        }
        for row in 0..rows {
            let (key, value) = (&keys[row * stride..][..self.dim], &values[row * stride..][..self.dim]);
            with_attention!(self.level, kernel => self.push_one(kernel, key, value, &mut scratch.row));
            self.length += 1;
        }
        Ok(())
    }

    fn push_one<K: Kernel>(&mut self, kernel: K, key: &[f32], value: &[f32], row: &mut Vec<Line>) {
        let lines = self.dim.div_ceil(K::INPUTS);
        grow_to(row, lines);
        let row = &mut row[..lines];
        let (panel, column) = (self.length / K::OUTPUTS, self.length % K::OUTPUTS);
        let key_panel = &mut self.keys[panel * self.lines[0]..][..self.lines[0]];
        let unit = K::OUTPUTS * K::GROUP;
        if column == 0 {
            // Clears what an earlier run left: it would get weight 0, but 0 times infinity is NaN.
            key_panel.fill(Line::ZERO);
            for value_panel in self.values.chunks_exact_mut(self.lines[1]) {
                let first = self.length / K::GROUP * unit;
                as_numbers_mut::<K::Weight>(value_panel)[first..first + K::OUTPUTS * K::OUTPUTS]
                    .fill(K::encode_weight(0.0));
            }
        }
        kernel.vectorised(
            #[inline(always)]
            || {
                kernel.pack_row(key, row, 1);
                // A unit is 4 bytes of a row, which an instruction sums at once.
                for (to, unit) in
                    as_numbers_mut::<i32>(key_panel).chunks_exact_mut(K::OUTPUTS).zip(as_numbers::<i32>(row))
                {
                    to[column] = *unit;
                }
                kernel.pack_row(value, row, 1);
                let (group, at) = (self.length / K::GROUP, self.length % K::GROUP);
                let parts = as_numbers::<K::Weight>(row).chunks(K::OUTPUTS);
                for (value_panel, part) in self.values.chunks_exact_mut(self.lines[1]).zip(parts) {
                    let to = &mut as_numbers_mut::<K::Weight>(value_panel)[group * unit..][..unit];
                    to[at..].iter_mut().step_by(K::GROUP).zip(part).for_each(|(to, from)| *to = *from);
                }
            },
        );
    }

    /// Computes attention of the queries at `positions`, all already pushed, on the calling thread. The first row of
    /// `heads.queries` and of `out` (rows `stride` apart) belongs to `positions.start`. The keys and values of `heads`
    /// are ignored.
    ///
    /// # Errors
    /// Returns [`ProductError`] if a slice is too short or a position was not pushed. `out` is unchanged in that case.
    pub fn attention(
        &self,
        heads: &Heads<'_>,
        positions: Range<usize>,
        out: &mut [f32],
        stride: usize,
        scratch: &mut AttentionScratch,
    ) -> Result<(), ProductError> {
        if positions.is_empty() {
            return Ok(());
        }
        let size = |what, got, valid| if got == valid { Ok(()) } else { Err(ProductError::Size { what, got, valid }) };
        size("the floats of a head", heads.dim, self.dim)?;
        size("the end of the positions", positions.end.max(self.length), self.length)?;
        check_fits("the queries", heads.queries.len(), positions.len(), heads.group * heads.dim, heads.stride)?;
        check_fits("out", out.len(), positions.len(), heads.group * heads.dim, stride)?;
        let packed = PackedKeyValues { keys: &self.keys, values: &self.values, base: 0, lines: self.lines };
        let mut call = AttentionCall { heads, first: positions.start, positions, out, stride };
        with_attention!(self.level, kernel => call.compute_blocks(kernel, packed, &mut scratch.work));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::attention_at;

    /// Pushing and reading in pieces of any size gives every row the bits of the whole run, even in memory where an
    /// earlier run left NaN.
    #[test]
    fn what_is_kept_gives_the_bits_of_the_whole_run() {
        for (group, dim, length, window, soft_cap) in [
            (3, 64, 200, None, None),
            (1, 8, 70, Some(5), None),
            (2, 20, 130, Some(64), Some(5.0)),
            (5, 33, 150, Some(1), None),
            (2, 40, 300, Some(90), None),
            (1, 128, 1, None, Some(2.0)),
        ] {
            let row = (group + 2) * dim + 3;
            let numbers: Vec<f32> =
                (0..length * row).map(|i| (i as f32 * 0.73).sin() * 2.0 + i as f32 * 1e-4).collect();
            let (keys, values) = (&numbers[group * dim..], &numbers[(group + 1) * dim..]);
            let whole =
                Heads { queries: &numbers, keys, values, stride: row, group, dim, scale: 0.4, soft_cap, window };
            let width = group * dim;
            let bits = |out: &[f32]| out.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            for arithmetic in [Arithmetic::F32, Arithmetic::Bf16] {
                for level in Level::all(arithmetic) {
                    let (mut want, mut scratch) = (vec![0.0; length * width], AttentionScratch::default());
                    attention_at(level, &whole, 0..length, &mut want, width, &mut scratch).unwrap();
                    let mut cache = HeadKvCache::new(dim, length, arithmetic).unwrap();
                    let mut made = ([0; 2], [0; 2]);
                    with_attention!(level, kernel => made = sizes(kernel, dim, length));
                    (cache.level, cache.lines) = (level, made.1);
                    (cache.keys, cache.values) = (vec![Line::ZERO; made.0[0]], vec![Line::ZERO; made.0[1]]);
                    for lines in [&mut cache.keys, &mut cache.values] {
                        as_numbers_mut::<u32>(lines).fill(f32::NAN.to_bits());
                    }
                    for cuts in [vec![length], vec![1; length], vec![length / 3, 1, 1, length - length / 3]] {
                        let mut out = vec![f32::NAN; length * width];
                        cache.clear();
                        for n in cuts {
                            let (from, n) = (cache.length(), n.min(length - cache.length()));
                            if n == 0 {
                                continue;
                            }
                            cache.push(&keys[from * row..], &values[from * row..], row, n, &mut scratch).unwrap();
                            let heads = Heads { queries: &numbers[from * row..], keys: &[], values: &[], ..whole };
                            let out = &mut out[from * width..];
                            cache.attention(&heads, from..from + n, out, width, &mut scratch).unwrap();
                        }
                        assert!(bits(&out) == bits(&want), "{level:?} {group} x {dim} of {length}, {window:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn there_is_room_for_so_many_positions_and_no_more() {
        let numbers = vec![1.0; 100];
        let (mut cache, mut scratch) = (HeadKvCache::new(8, 5, Arithmetic::F32).unwrap(), AttentionScratch::default());
        cache.push(&numbers, &numbers, 8, 4, &mut scratch).unwrap();
        let full = cache.push(&numbers, &numbers, 8, 2, &mut scratch);
        assert!(matches!(full, Err(ProductError::Size { got: 2, valid: 1, .. })), "{full:?}");
        assert_eq!(cache.length(), 4);
        let heads = Heads {
            queries: &numbers,
            keys: &[],
            values: &[],
            stride: 8,
            group: 1,
            dim: 8,
            scale: 1.0,
            soft_cap: None,
            window: None,
        };
        let mut out = [0.0; 40];
        let beyond = cache.attention(&heads, 4..5, &mut out, 8, &mut scratch);
        assert!(matches!(beyond, Err(ProductError::Size { got: 5, valid: 4, .. })), "{beyond:?}");
        assert!(cache.attention(&heads, 3..4, &mut out, 8, &mut scratch).is_ok() && out[..8] == [1.0; 8]);
        let short = cache.push(&numbers[..7], &numbers, 8, 1, &mut scratch);
        assert!(matches!(short, Err(ProductError::Memory { what: "the keys", .. })), "{short:?}");
    }
}
