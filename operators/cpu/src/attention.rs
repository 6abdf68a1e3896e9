//! Causal attention of the query heads that share one head of keys and values.
//!
//! ```text
//!                   keys, packed as panels of outputs         values, packed as panels whose inputs are the keys
//!  strip of       [ panel | panel | .. up to the last seen ]  [ dims | dims ]
//!  queries   ->   scores  -> e^(score - max), 0 if masked ->  sums / total  -> out
//! ```
//!
//! A row is one query head at one position. Consecutive rows are the heads of one position, so a strip computes few
//! masked scores. Scores exist for one strip at a time and stay in a core's cache. Both products run on a [`Kernel`]:
//! in f32, or in bf16 with f32 sums. In bf16, queries, keys, softmax weights and values are rounded as before any other
//! product, but the weights' total is that of the unrounded weights.
//!
//! A position's keys are summed from the first panel that its block of [`BLOCK_POSITIONS`] positions may see. A row's
//! bits therefore depend only on the run's rows up to its own. Keys that a query does not see have a weight of exactly
//! 0.
//!
//! Cost: 4 · dim flops and one exponential per row and key. Packing copies keys and values once per call.

mod kv_cache;

use crate::Arithmetic;
use crate::arithmetic::Level;
use crate::elementwise::{exp, exp_fused, tanh};
use crate::error::ProductError;
use crate::kernel::{Kernel, Tile, array_from_fn};
use crate::memory::{LINE, Line, as_numbers, as_numbers_mut};
use crate::weight::check_fits;
use std::ops::Range;

pub use kv_cache::HeadKvCache;

/// Positions that share the first panel of keys they sum.
const BLOCK_POSITIONS: usize = 64;
/// Largest number of rows in a strip.
const MAX_STRIP_ROWS: usize = 32;
/// Lanes of partial sums and maxima. Their order is the same on every machine.
const LANES: usize = 16;

/// The query heads that share a head of keys and values, as rows of floats `stride` apart. There is one row per
/// position of a run, starting with position 0.
#[derive(Clone, Copy, Debug)]
pub struct Heads<'a> {
    /// Queries: `group` heads of `dim` floats in each row.
    pub queries: &'a [f32],
    /// Keys: `dim` floats in each row.
    pub keys: &'a [f32],
    /// Values: `dim` floats in each row.
    pub values: &'a [f32],
    /// Floats from one position's row to the next, in all three slices.
    pub stride: usize,
    /// Number of query heads.
    pub group: usize,
    /// Floats in a head.
    pub dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Replaces each score by `cap · tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Positions that a query sees: its own and the `window - 1` before it. `None` for all before it.
    pub window: Option<usize>,
}

/// Memory for packed keys and values, and for the scores of a strip. It grows to the need of the longest run.
#[derive(Default)]
pub struct AttentionScratch {
    keys: Vec<Line>,
    values: Vec<Line>,
    row: Vec<Line>,
    work: StripBuffers,
}

/// Buffers for the computation of one strip.
#[derive(Default)]
struct StripBuffers {
    strip: Vec<Line>,
    scores: Vec<Line>,
    weights: Vec<Line>,
    scaled: Vec<f32>,
}

/// Keys and values as panels, starting at the key `base`, which begins a panel.
#[derive(Clone, Copy)]
struct PackedKeyValues<'a> {
    keys: &'a [Line],
    values: &'a [Line],
    base: usize,
    /// Lines in a panel of keys, and in a panel of values.
    lines: [usize; 2],
}

impl std::fmt::Debug for AttentionScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = size_of_val(self.keys.as_slice()) + size_of_val(self.values.as_slice());
        f.debug_struct("AttentionScratch").field("bytes", &bytes).finish_non_exhaustive()
    }
}

impl Heads<'_> {
    /// Returns the first key that a position sees.
    fn first_visible_key(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// Computes attention of the queries at `positions` on the calling thread. `out` gets `group · dim` floats per position
/// in rows `stride` apart, starting with `positions.start`. Products are f32 for every arithmetic except
/// [`Arithmetic::Bf16`].
///
/// # Errors
/// Returns [`ProductError`] if a slice is too short or this machine lacks these products. `out` is unchanged in that
/// case.
pub fn attention(
    heads: &Heads<'_>,
    positions: Range<usize>,
    arithmetic: Arithmetic,
    out: &mut [f32],
    stride: usize,
    scratch: &mut AttentionScratch,
) -> Result<(), ProductError> {
    attention_at(attention_level_for(arithmetic)?, heads, positions, out, stride, scratch)
}

/// Like [`attention`], for a given level of the machine.
fn attention_at(
    level: Level,
    heads: &Heads<'_>,
    positions: Range<usize>,
    out: &mut [f32],
    stride: usize,
    scratch: &mut AttentionScratch,
) -> Result<(), ProductError> {
    if positions.is_empty() {
        return Ok(());
    }
    let width = heads.group * heads.dim;
    check_fits("the queries", heads.queries.len(), positions.end, width, heads.stride)?;
    check_fits("the keys", heads.keys.len(), positions.end, heads.dim, heads.stride)?;
    check_fits("the values", heads.values.len(), positions.end, heads.dim, heads.stride)?;
    check_fits("out", out.len(), positions.len(), width, stride)?;
    let call = AttentionCall { heads, positions, first: 0, out, stride };
    with_attention!(level, kernel => call.run(kernel, scratch));
    Ok(())
}

/// Runs `$body` with the kernel of a level that supports attention.
macro_rules! with_attention {
    ($level:expr, $kernel:ident => $body:expr) => {
        match $level {
            Level::Baseline($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512($kernel) => $body,
            #[cfg(target_arch = "x86_64")]
            Level::AmxBf16($kernel) => $body,
            // `Level::best` returns no other level for f32 and bf16.
            _ => debug_assert!(false, "{}", $level.name()),
        }
    };
}
use with_attention;

/// Returns the level of attention's products: f32 for every arithmetic except [`Arithmetic::Bf16`].
fn attention_level_for(arithmetic: Arithmetic) -> Result<Level, ProductError> {
    match arithmetic {
        Arithmetic::Bf16 => Level::best(Arithmetic::Bf16),
        Arithmetic::F32 | Arithmetic::F32OfF16 | Arithmetic::F32OfBf16 | Arithmetic::F16 | Arithmetic::Bf16x3 => {
            Level::best(Arithmetic::F32)
        }
    }
}

/// Returns the name of the instructions that compute attention in `arithmetic` on this machine; `unavailable` if none
/// do.
#[must_use]
pub fn attention_level_name(arithmetic: Arithmetic) -> &'static str {
    attention_level_for(arithmetic).map_or("unavailable", Level::name)
}

struct AttentionCall<'a> {
    heads: &'a Heads<'a>,
    positions: Range<usize>,
    /// The position of the first row of queries.
    first: usize,
    out: &'a mut [f32],
    stride: usize,
}

/// Grows `lines` to at least `length` lines.
fn grow_to(lines: &mut Vec<Line>, length: usize) {
    if lines.len() < length {
        lines.resize(length, Line::ZERO);
    }
}

/// Lines in a panel of keys, and in a panel of values over `panels` panels of keys.
fn panel_lines<K: Kernel>(dim: usize, panels: usize) -> [usize; 2] {
    let keys = dim.div_ceil(K::INPUTS) * K::INPUTS * K::OUTPUTS / K::GROUP * 4 / LINE;
    [keys, panels * K::OUTPUTS * K::OUTPUTS / K::GROUP * 4 / LINE]
}

/// A strip of queries and the panels of keys that it sees, counted from the first packed panel.
struct Strip {
    /// Rows within the block: position · group + head.
    rows: Range<usize>,
    /// The block's first position.
    first: usize,
    panels: Range<usize>,
}

impl AttentionCall<'_> {
    fn run<K: Kernel>(mut self, kernel: K, scratch: &mut AttentionScratch) {
        let Heads { dim, .. } = *self.heads;
        let base = self.first_key_of_block::<K>(self.positions.start);
        let count = (self.positions.end - base).div_ceil(K::OUTPUTS);
        let lines = panel_lines::<K>(dim, count);
        let row = dim.div_ceil(K::INPUTS);
        grow_to(&mut scratch.keys, count * lines[0]);
        grow_to(&mut scratch.values, dim.div_ceil(K::OUTPUTS) * lines[1]);
        grow_to(&mut scratch.row, (K::OUTPUTS * row).max(K::GROUP * row));
        let seen = base..self.positions.end;
        kernel.vectorised(
            #[inline(always)]
            || {
                self.pack_keys(kernel, seen.clone(), lines[0], scratch);
                self.pack_values(kernel, seen.clone(), lines[1], scratch);
            },
        );
        let AttentionScratch { keys, values, work, .. } = scratch;
        self.compute_blocks(kernel, PackedKeyValues { keys, values, base, lines }, work);
    }

    /// Returns the first key of the first panel that the block of a position may see.
    fn first_key_of_block<K: Kernel>(&self, position: usize) -> usize {
        self.heads.first_visible_key(position / BLOCK_POSITIONS * BLOCK_POSITIONS) / K::OUTPUTS * K::OUTPUTS
    }

    /// Computes all positions, block by block, over packed keys and values.
    fn compute_blocks<K: Kernel>(&mut self, kernel: K, packed: PackedKeyValues<'_>, work: &mut StripBuffers) {
        const { assert!(!K::SCALED && K::TRAILER_LINES == 0 && size_of::<K::Weight>() * K::GROUP == 4) };
        const {
            assert!(
                K::ROWS <= MAX_STRIP_ROWS && K::OUTPUTS.is_multiple_of(K::INPUTS) && K::INPUTS.is_multiple_of(LANES)
            )
        };
        let Heads { dim, group, .. } = *self.heads;
        let (base, strip_stride) = (packed.base, K::strip_stride(K::ROWS));
        let panels = (self.positions.end - base).div_ceil(K::OUTPUTS);
        grow_to(&mut work.strip, dim.div_ceil(K::INPUTS) * strip_stride);
        // One extra tile holds the sums of values.
        grow_to(&mut work.scores, (panels + 1) * K::ROWS * K::OUTPUTS / LANES);
        grow_to(&mut work.weights, panels * K::OUTPUTS / K::INPUTS * strip_stride);
        work.scaled.resize(dim, 0.0);
        let mut start = self.positions.start;
        while start < self.positions.end {
            let end = self.positions.end.min(start / BLOCK_POSITIONS * BLOCK_POSITIONS + BLOCK_POSITIONS);
            let rows = (end - start) * group;
            let strips = rows.div_ceil(K::ROWS);
            let from = (self.first_key_of_block::<K>(start) - base) / K::OUTPUTS;
            for s in 0..strips {
                let rows = crate::product::part_range(rows, strips, s);
                let last = start + (rows.end - 1) / group;
                let panels = from..(last + 1 - base).div_ceil(K::OUTPUTS);
                let strip = Strip { rows, first: start, panels };
                self.compute_strip(kernel, &strip, packed, work);
            }
            start = end;
        }
    }

    /// Packs the keys `seen` as panels, each the [`Kernel::OUTPUTS`] outputs of a weight, with zeros after the last
    /// key.
    #[inline(always)]
    fn pack_keys<K: Kernel>(&self, kernel: K, seen: Range<usize>, panel: usize, scratch: &mut AttentionScratch) {
        let Heads { keys, stride, dim, .. } = *self.heads;
        let lines = dim.div_ceil(K::INPUTS);
        let rows = &mut scratch.row[..K::OUTPUTS * lines];
        for (to, first) in scratch.keys.chunks_exact_mut(panel).zip(seen.clone().step_by(K::OUTPUTS)) {
            for (j, row) in rows.chunks_exact_mut(lines).enumerate() {
                if first + j < seen.end {
                    kernel.pack_row(&keys[(first + j) * stride..][..dim], row, 1);
                } else {
                    row.fill(Line::ZERO);
                }
            }
            // A unit is 4 bytes of a row, which an instruction sums at once.
            let units = as_numbers::<i32>(rows);
            let each = lines * LINE / 4;
            for (unit, to) in as_numbers_mut::<i32>(to).chunks_exact_mut(K::OUTPUTS).enumerate() {
                for (j, to) in to.iter_mut().enumerate() {
                    *to = units[j * each + unit];
                }
            }
        }
    }

    /// Packs the values `seen` as panels of [`Kernel::OUTPUTS`] dimensions whose inputs are the keys.
    #[inline(always)]
    fn pack_values<K: Kernel>(&self, kernel: K, seen: Range<usize>, panel: usize, scratch: &mut AttentionScratch) {
        let Heads { values, stride, dim, .. } = *self.heads;
        let lines = dim.div_ceil(K::INPUTS);
        let (rows, panels) = (&mut scratch.row[..K::GROUP * lines], dim.div_ceil(K::OUTPUTS));
        let unit = K::OUTPUTS * K::GROUP;
        let last = seen.start + (seen.len()).next_multiple_of(K::OUTPUTS);
        for (number, key) in (seen.start..last).step_by(K::GROUP).enumerate() {
            for (g, row) in rows.chunks_exact_mut(lines).enumerate() {
                if key + g < seen.end {
                    kernel.pack_row(&values[(key + g) * stride..][..dim], row, 1);
                } else {
                    row.fill(Line::ZERO);
                }
            }
            let rows = as_numbers::<K::Weight>(rows);
            let each = rows.len() / K::GROUP;
            for p in 0..panels {
                let to = &mut as_numbers_mut::<K::Weight>(&mut scratch.values[p * panel..][..panel])[number * unit..]
                    [..unit];
                let columns = p * K::OUTPUTS..each.min((p + 1) * K::OUTPUTS);
                for g in 0..K::GROUP {
                    let row = &rows[g * each..][columns.clone()];
                    for (to, from) in to[g..].iter_mut().step_by(K::GROUP).zip(row) {
                        *to = *from;
                    }
                }
            }
        }
    }

    fn compute_strip<K: Kernel>(
        &mut self,
        kernel: K,
        strip: &Strip,
        packed: PackedKeyValues<'_>,
        work: &mut StripBuffers,
    ) {
        let Heads { queries, stride, group, dim, scale, .. } = *self.heads;
        let (rows, lines, strip_stride) =
            (strip.rows.len(), dim.div_ceil(K::INPUTS), K::strip_stride(strip.rows.len()));
        let tile = K::ROWS * K::OUTPUTS / LANES;
        let PackedKeyValues { keys, values, base, lines: [keys_panel, values_panel] } = packed;
        let StripBuffers { strip: packed, scores, weights, scaled } = work;
        let from_row = strip.first - self.first;
        kernel.vectorised(
            #[inline(always)]
            || {
                for (i, row) in strip.rows.clone().enumerate() {
                    let query = &queries[(from_row + row / group) * stride + row % group * dim..][..dim];
                    scaled.iter_mut().zip(query).for_each(|(to, q)| *to = q * scale);
                    kernel.pack_row(scaled, &mut packed[i..lines * strip_stride], strip_stride);
                }
            },
        );
        let (sums, scores) = scores.split_at_mut(tile);
        kernel.session(|| {
            for (n, p) in strip.panels.clone().enumerate() {
                let (panel, out) = (&keys[p * keys_panel..][..keys_panel], &mut scores[n * tile..][..tile]);
                // SAFETY: `part_range` makes `rows` lie in 1..=ROWS. The strip has `lines` lines of its slots, and the
                // panel `lines · INPUTS · OUTPUTS` weights (units of 4 bytes). `out` has ROWS · OUTPUTS floats in lines
                // of its own.
                unsafe { kernel.compute_tile(tile_arguments(rows, lines, packed, panel, out)) };
            }
        });
        let count = strip.panels.len();
        let (mut largest, mut totals) = ([[f32::NEG_INFINITY; LANES]; MAX_STRIP_ROWS], [[0f32; LANES]; MAX_STRIP_ROWS]);
        let inverse = &mut [0.0; MAX_STRIP_ROWS][..rows];
        let from = base + strip.panels.start * K::OUTPUTS;
        let seen = |row: usize| {
            let position = strip.first + row / group;
            self.heads.first_visible_key(position).saturating_sub(from)..position + 1 - from
        };
        kernel.vectorised(
            #[inline(always)]
            || {
                // Goes tile by tile: a row's scores are far apart in memory, and would compete for one cache set.
                for (n, tile) in scores.chunks_exact_mut(tile).take(count).enumerate() {
                    let rows = strip.rows.clone().zip(as_numbers_mut::<f32>(tile).chunks_exact_mut(K::OUTPUTS));
                    for ((row, scores), max) in rows.zip(&mut largest) {
                        self.update_maxima(n * K::OUTPUTS, seen(row), scores, max);
                    }
                }
                for lanes in &mut largest {
                    lanes[0] = lanes.iter().fold(f32::NEG_INFINITY, |a, b| if *b > a { *b } else { a });
                }
                for (n, tile) in scores.chunks_exact_mut(tile).take(count).enumerate() {
                    let rows = strip.rows.clone().zip(as_numbers_mut::<f32>(tile).chunks_exact_mut(K::OUTPUTS));
                    for (i, (((row, scores), max), total)) in rows.zip(&largest).zip(&mut totals).enumerate() {
                        exponentiate::<K>(n * K::OUTPUTS, seen(row), scores, max[0], total);
                        kernel.pack_row(
                            scores,
                            &mut weights[n * K::OUTPUTS / K::INPUTS * strip_stride + i..],
                            strip_stride,
                        );
                    }
                }
                for (inverse, total) in inverse.iter_mut().zip(&totals) {
                    *inverse = 1.0 / total.iter().sum::<f32>();
                }
            },
        );
        let lines = count * K::OUTPUTS / K::INPUTS;
        let skipped = strip.panels.start * K::OUTPUTS * K::OUTPUTS / K::GROUP * 4 / LINE;
        for (p, from) in (0..dim).step_by(K::OUTPUTS).enumerate() {
            let panel = &values[p * values_panel..][skipped..values_panel];
            // SAFETY: as above, with the strip of weights, whose `lines` lines are all written, and a panel with as
            // many lines.
            kernel.session(|| unsafe { kernel.compute_tile(tile_arguments(rows, lines, weights, panel, sums)) });
            let columns = from..dim.min(from + K::OUTPUTS);
            let positions = self.positions.start;
            kernel.vectorised(
                #[inline(always)]
                || {
                    let sums = as_numbers::<f32>(sums).chunks_exact(K::OUTPUTS);
                    for ((row, sums), by) in strip.rows.clone().zip(sums).zip(&*inverse) {
                        let at = (strip.first - positions + row / group) * self.stride + row % group * dim;
                        let out = &mut self.out[at..][columns.clone()];
                        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum * by);
                    }
                },
            );
        }
    }

    /// Caps a row's scores for the keys from `first` on, sets those that are not `seen` to negative infinity, and
    /// updates the lanes' `max`.
    #[inline(always)]
    fn update_maxima(&self, first: usize, seen: Range<usize>, scores: &mut [f32], max: &mut [f32; LANES]) {
        for (chunk, key) in scores.as_chunks_mut::<LANES>().0.iter_mut().zip((first..).step_by(LANES)) {
            if let Some(cap) = self.heads.soft_cap {
                let scores = *chunk;
                *chunk = array_from_fn(|l| cap * tanh(scores[l] / cap));
            }
            if !sees_all(key, &seen) {
                mask_unseen(key, &seen, chunk, f32::NEG_INFINITY);
            }
            let (scores, before) = (*chunk, *max);
            *max = array_from_fn(|l| if scores[l] > before[l] { scores[l] } else { before[l] });
        }
    }
}

/// Whether the row sees all keys of a chunk.
#[inline(always)]
fn sees_all(key: usize, seen: &Range<usize>) -> bool {
    seen.start <= key && key + LANES <= seen.end
}

#[inline(always)]
fn mask_unseen(key: usize, seen: &Range<usize>, chunk: &mut [f32; LANES], value: f32) {
    for (l, s) in chunk.iter_mut().enumerate() {
        *s = if seen.contains(&(key + l)) { *s } else { value };
    }
}

/// Replaces scores by `e^(score - max)` for the keys from `first` on, or by 0 for those that are not `seen`, and adds
/// them to `total`.
#[inline(always)]
fn exponentiate<K: Kernel>(first: usize, seen: Range<usize>, scores: &mut [f32], max: f32, total: &mut [f32; LANES]) {
    for (chunk, key) in scores.as_chunks_mut::<LANES>().0.iter_mut().zip((first..).step_by(LANES)) {
        let scores = *chunk;
        *chunk = array_from_fn(|l| if K::HAS_FMA { exp_fused(scores[l] - max) } else { exp(scores[l] - max) });
        if !sees_all(key, &seen) {
            mask_unseen(key, &seen, chunk, 0.0);
        }
        let (weights, before) = (*chunk, *total);
        *total = array_from_fn(|l| before[l] + weights[l]);
    }
}

/// Arguments of a product that sums all lines in one call and prefetches nothing.
fn tile_arguments(rows: usize, lines: usize, strip: &[Line], panel: &[Line], out: &mut [Line]) -> Tile {
    let (strip, panel, out) = (strip.as_ptr(), panel.as_ptr(), out.as_mut_ptr().cast());
    Tile {
        rows,
        lines,
        strip,
        panel,
        panels: 1,
        panel_stride: 0,
        out,
        overwrite: true,
        next: panel,
        prefetch_per_line: 0,
        write_to: out,
        write_stride: 0,
        widened: false,
    }
}

#[cfg(test)]
mod tests;
