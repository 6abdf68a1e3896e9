//! What a kernel promises, and the order in which it finds its numbers.
//!
//! ```text
//! strip of rows (packed for each product)        panel of outputs (packed once)
//! line 0: row 0 [64 bytes] row 1 .. row m-1      group 0: output 0 [GROUP inputs] output 1 .. OUTPUTS-1
//! line 1: row 0 [64 bytes] ..                    group 1: ..
//! ```
//!
//! A line holds INPUTS numbers of a row that follow each other, so rows are packed by copying whole cache lines; a
//! group is as many inputs as one instruction sums for an output. Inputs past the last are zeros on both sides.

use crate::memory::{Line, Number};

/// One call of [`Kernel::tile`].
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// Rows of the strip.
    pub rows: usize,
    /// Lines of each row.
    pub lines: usize,
    /// The packed rows.
    pub strip: *const Line,
    /// The packed outputs.
    pub panel: *const Line,
    /// Panels, 1 or a power of two up to [`Kernel::panels`].
    pub panels: usize,
    /// Lines from a panel to the next one.
    pub apart: usize,
    /// What is computed.
    pub out: *mut f32,
    /// Whether `out` is written; sums of further lines are added to it otherwise.
    pub first: bool,
    /// Memory that is read soon (the next panel): a kernel may prefetch `step` lines of it for each line of its own.
    pub next: *const Line,
    /// Lines of `next` for each line.
    pub step: usize,
    /// Where the tile's rows go when it is done, `stride` floats apart: a kernel may prefetch them.
    pub to: *const f32,
    /// Floats from one of those rows to the next; 0 where they go nowhere yet.
    pub stride: usize,
    /// Whether the panel is one that [`Kernel::widen`] has made.
    pub widened: bool,
}

/// A register tile's product. It is implemented on the proof (see `cpu`) that the machine has the instructions.
pub(crate) trait Kernel: Copy + Send + Sync {
    /// How a weight is kept.
    type Weight: Number;
    /// The most rows of a strip.
    const ROWS: usize;
    /// Outputs of a panel; even, and a group of them is whole lines.
    const OUTPUTS: usize;
    /// Inputs in a line of a packed row.
    const INPUTS: usize;
    /// Inputs of an output that lie next to each other in a panel.
    const GROUP: usize;
    /// Whether rows and outputs have scales.
    const SCALED: bool = false;
    /// Lines at a panel's end that are the kernel's own (see `seal`).
    const SEAL: usize = 0;

    /// Whether [`Kernel::vectorised`] compiles for fused multiply-adds.
    const FUSED: bool = false;
    /// Lines after which a call may end and another go on with `first` unset, without a change of the sum's order; `None`
    /// where one call has to have all lines.
    const PAUSE: Option<usize> = None;
    /// Strips of a block from which its panels go through [`Kernel::widen`] first; `None` for a kernel that has no such.
    const WIDEN_FROM: Option<usize> = None;

    /// The scale of values whose largest magnitude is `max` (finite, not negative); positive, and a value divided by
    /// it fits the type.
    fn scale(_max: f32) -> f32 {
        1.0
    }

    /// A weight that was divided by its output's scale.
    fn weight(value: f32) -> Self::Weight;

    /// Fills the panel's last [`Kernel::SEAL`] lines, of zeros at first, from the rest of it.
    fn seal(_panel: &mut [Line]) {}

    /// Packs a row: line l goes to `strip[l * step]`. Returns the row's scale. Every number of a line is written.
    fn row(self, row: &[f32], strip: &mut [Line], step: usize) -> f32;

    /// `out[i, j] = sum over k of strip[i, k] · panel[j, k]`, rows of `out` [`Kernel::OUTPUTS`] apart, in an order of the
    /// sum that neither `rows` nor i changes.
    ///
    /// # Safety
    /// - `rows` is in 1..=ROWS;
    /// - `strip` has `lines` times [`slots`](Kernel::slots)`(rows)` lines to be read;
    /// - `panel` has `lines · INPUTS · OUTPUTS` weights and the seal to be read, or twice the lines where it is widened;
    /// - `out` has `ROWS · OUTPUTS` floats to be written, aligned to 64 bytes, that overlap neither;
    /// - where there are several panels, so has each of them, `apart` lines from the one before, and as many floats after its own.
    unsafe fn tile(self, tile: Tile);

    /// Makes a panel's lines twice as many, for [`Tile::widened`].
    fn widen(self, _from: &[Line], _to: &mut [Line]) {}

    /// Lines between line l and line l + 1 of a strip's row.
    fn slots(rows: usize) -> usize {
        rows
    }

    /// Runs `f`, compiled for this kernel's machine where the compiler may inline it.
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R;

    /// The most panels of a call with so many rows.
    fn panels(_rows: usize) -> usize {
        1
    }

    /// Prepares the thread for [`Kernel::tile`] calls in `f`, and cleans up after them.
    fn session<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
}

/// Lines of 16 inputs that are summed before they are added to the tile.
pub(crate) const BLOCK: usize = 48;

/// Blocks of a sum over `lines`: first line, number of lines, whether it is the first.
#[inline(always)]
pub(crate) fn blocks(lines: usize, first: bool) -> impl Iterator<Item = (usize, usize, bool)> {
    (0..lines).step_by(BLOCK).map(move |start| (start, BLOCK.min(lines - start), start == 0 && first))
}

/// An array by index. Values that are no one else's memory are what the compiler makes vectors of in every optimised build;
/// the standard library's own may stay a call, compiled for the target's least instructions.
#[inline(always)]
pub(crate) fn lanes<T: Copy + Default, const N: usize>(f: impl Fn(usize) -> T) -> [T; N] {
    let mut all = [T::default(); N];
    for (i, lane) in all.iter_mut().enumerate() {
        *lane = f(i);
    }
    all
}

/// Copies a row to its lines through `encode`, with zeros after its last number.
#[inline(always)]
pub(crate) fn to_lines<T: Number + Default>(row: &[f32], strip: &mut [Line], step: usize, encode: impl Fn(f32) -> T) {
    let inputs = crate::memory::LINE / size_of::<T>();
    let whole = row.chunks_exact(inputs);
    let rest = whole.remainder();
    let mut lines = strip.chunks_mut(step);
    for (numbers, line) in whole.zip(&mut lines) {
        let line = crate::memory::numbers_mut::<T>(&mut line[..1]);
        // sixteen at a time: a count that the compiler knows, so that it makes one vector of them
        for (to, from) in line.as_chunks_mut::<16>().0.iter_mut().zip(numbers.as_chunks::<16>().0.iter().copied()) {
            *to = lanes(|i| encode(from[i]));
        }
    }
    if let (false, Some(line)) = (rest.is_empty(), lines.next()) {
        let line = crate::memory::numbers_mut::<T>(&mut line[..1]);
        line.fill(encode(0.0));
        for (to, from) in line.iter_mut().zip(rest) {
            *to = encode(*from);
        }
    }
}

/// The largest magnitude of `row`; not finite if a number of it is not.
#[inline(always)]
pub(crate) fn largest(row: &[f32]) -> f32 {
    // without their sign, the bits of floats are ordered as the floats are, infinity and NaN above the others
    f32::from_bits(row.iter().fold(0, |max, x| max.max(x.to_bits() & 0x7fff_ffff)))
}
