//! The contract of a kernel, and the order of packed numbers in memory.
//!
//! ```text
//! strip of rows (packed in each product)         panel of outputs (packed once)
//! line 0: row 0 [64 bytes] row 1 .. row m-1      group 0: output 0 [GROUP inputs] output 1 .. OUTPUTS-1
//! line 1: row 0 [64 bytes] ..                    group 1: ..
//! ```
//!
//! A line holds INPUTS consecutive numbers of a row, so packing a row copies whole cache lines. A group is the inputs
//! that one instruction sums for an output. Inputs past the last are zeros on both sides.

use crate::memory::{Line, Number};

/// Arguments of one call of [`Kernel::compute_tile`].
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Rows of the strip.
    pub rows: usize,
    /// Lines in each row.
    pub lines: usize,
    /// The packed rows.
    pub strip: *const Line,
    /// The packed outputs.
    pub panel: *const Line,
    /// Number of panels: 1, or a power of two up to [`Kernel::max_panels`].
    pub panels: usize,
    /// Lines from one panel to the next.
    pub panel_stride: usize,
    /// Destination of the sums.
    pub out: *mut f32,
    /// Whether the call overwrites `out`. If false, it adds the sums of further lines to `out`.
    pub overwrite: bool,
    /// Memory that is read soon (the next panel). For each line that a kernel reads, it may prefetch
    /// `prefetch_per_line` lines of this.
    pub next: *const Line,
    /// Lines of `next` to prefetch per line.
    pub prefetch_per_line: usize,
    /// Where the caller writes the tile's rows afterwards, `write_stride` floats apart. A kernel may prefetch these
    /// addresses.
    pub write_to: *const f32,
    /// Floats from one of those rows to the next; 0 if the rows are not written yet.
    pub write_stride: usize,
    /// Whether [`Kernel::widen`] made the panel.
    pub widened: bool,
}

/// The product of a register tile. Implemented on the proof type (see `cpu_features`) that the machine has the
/// instructions.
pub(crate) trait Kernel: Copy + Send + Sync {
    /// The stored type of a weight.
    type Weight: Number;
    /// Largest number of rows in a strip.
    const ROWS: usize;
    /// Outputs in a panel: an even number, and a group of all outputs fills whole lines.
    const OUTPUTS: usize;
    /// Inputs in one line of a packed row.
    const INPUTS: usize;
    /// Inputs of one output that are adjacent in a panel.
    const GROUP: usize;
    /// Whether rows and outputs have scales.
    const SCALED: bool = false;
    /// Lines at a panel's end for the kernel's own use (see `finish_panel`).
    const TRAILER_LINES: usize = 0;

    /// Whether [`Kernel::vectorised`] compiles for fused multiply-adds.
    const HAS_FMA: bool = false;
    /// A call may stop after a multiple of this many lines. A later call may continue with `overwrite` unset, without
    /// changing the order of the sum. `None` if one call must process all lines.
    const RESUME_LINES: Option<usize> = None;
    /// Smallest number of strips in a block for which [`Kernel::widen`] first converts the panels; `None` for kernels
    /// that never widen.
    const WIDEN_FROM: Option<usize> = None;

    /// Returns the scale of values whose largest magnitude is `max` (finite, not negative). The scale is positive, and
    /// a value divided by it fits the type.
    fn scale(_max: f32) -> f32 {
        1.0
    }

    /// Encodes a weight that was already divided by its output's scale.
    fn encode_weight(value: f32) -> Self::Weight;

    /// Fills the panel's last [`Kernel::TRAILER_LINES`] lines, which hold zeros at first, from the rest of the panel.
    fn finish_panel(_panel: &mut [Line]) {}

    /// Packs a row, writing every number of each line: line l goes to `strip[l * line_stride]`. Returns the row's
    /// scale.
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32;

    /// Computes `out[i, j] = sum over k of strip[i, k] · panel[j, k]`, with rows of `out` [`Kernel::OUTPUTS`] floats
    /// apart. The order of the sum does not depend on `rows` or i.
    ///
    /// # Safety
    /// - `rows` is in 1..=ROWS.
    /// - `strip` has `lines` times [`strip_stride`](Kernel::strip_stride)`(rows)` readable lines.
    /// - `panel` has `lines · INPUTS · OUTPUTS` readable weights and the trailer, or twice as many lines if it is
    ///   widened.
    /// - `out` has `ROWS · OUTPUTS` writable floats, aligned to 64 bytes, that overlap neither `strip` nor `panel`.
    /// - With several panels, each satisfies this `panel_stride` lines after the one before it, and `out` has as many
    ///   floats again for each.
    unsafe fn compute_tile(self, tile: Tile);

    /// Converts a panel to f32, which takes twice as many lines, for [`Tile::widened`].
    fn widen(self, _from: &[Line], _to: &mut [Line]) {}

    /// Lines from line l to line l + 1 of a row in a strip.
    fn strip_stride(rows: usize) -> usize {
        rows
    }

    /// Runs `f`. Where the compiler inlines `f`, it compiles `f` for this kernel's instructions.
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R;

    /// Largest number of panels in a call with `rows` rows.
    fn max_panels(_rows: usize) -> usize {
        1
    }

    /// Prepares the thread for [`Kernel::compute_tile`] calls in `f`, and cleans up afterwards.
    fn session<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
}

/// Lines of 16 inputs that are summed from zero before the sum is added to the tile.
pub(crate) const BLOCK_LINES: usize = 48;

/// Yields the blocks of a sum over `lines`: first line, number of lines, whether the block overwrites the tile.
#[inline(always)]
pub(crate) fn blocks(lines: usize, overwrite: bool) -> impl Iterator<Item = (usize, usize, bool)> {
    (0..lines).step_by(BLOCK_LINES).map(move |start| (start, BLOCK_LINES.min(lines - start), start == 0 && overwrite))
}

/// Builds an array from its indices. In every optimised build, the compiler vectorises this loop over values that
/// nothing else aliases. The standard library's `array::from_fn` may remain a call that is compiled for the target's
/// minimum instructions.
#[inline(always)]
pub(crate) fn array_from_fn<T: Copy + Default, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut all = [T::default(); N];
    for (i, lane) in all.iter_mut().enumerate() {
        *lane = f(i);
    }
    all
}

/// Copies a row to its lines through `encode`, and fills the rest of the last line with zeros.
#[inline(always)]
pub(crate) fn copy_to_lines<T: Number + Default>(
    row: &[f32],
    strip: &mut [Line],
    line_stride: usize,
    encode: impl Fn(f32) -> T,
) {
    let inputs = crate::memory::LINE / size_of::<T>();
    let whole = row.chunks_exact(inputs);
    let rest = whole.remainder();
    let mut lines = strip.chunks_mut(line_stride);
    for (numbers, line) in whole.zip(&mut lines) {
        let line = crate::memory::as_numbers_mut::<T>(&mut line[..1]);
        // The constant count of sixteen lets the compiler make one vector of each chunk.
        for (to, from) in line.as_chunks_mut::<16>().0.iter_mut().zip(numbers.as_chunks::<16>().0.iter().copied()) {
            *to = array_from_fn(|i| encode(from[i]));
        }
    }
    if let (false, Some(line)) = (rest.is_empty(), lines.next()) {
        let line = crate::memory::as_numbers_mut::<T>(&mut line[..1]);
        line.fill(encode(0.0));
        for (to, from) in line.iter_mut().zip(rest) {
            *to = encode(*from);
        }
    }
}

/// Returns the largest magnitude in `row`; the result is not finite if any number is not.
#[inline(always)]
pub(crate) fn max_magnitude(row: &[f32]) -> f32 {
    // Without the sign bit, the bits of floats sort as the floats do, with infinity and NaN above the others.
    f32::from_bits(row.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff)))
}
