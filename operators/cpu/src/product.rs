//! Products of rows and a packed weight: how the work is split into tasks, what runs in parallel, and the epilogues.
//!
//! ```text
//!                    panels of outputs, in groups; one task per group
//!                  +--------+--------+--------+--
//! block of rows    | task   | task   | ..     |      a block's packed rows stay in a core's cache
//! (packed once)    +--------+--------+--------+--
//! next block       | ..
//! ```
//!
//! The split into blocks and strips, and the thread that runs a task, do not change any bit: a kernel sums a row's
//! inputs in an order that depends only on their number.

use crate::arithmetic::with_kernel;
use crate::elementwise::{gelu, silu};
use crate::error::ProductError;
use crate::kernel::{Kernel, Tile, array_from_fn};
use crate::memory::{LINE, Line, as_numbers, as_numbers_mut};
use crate::weight::{PackedWeight, check_fits};
use crate::widened_weights::WidenedPanels;
use rayon::prelude::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows of floats, `stride` apart. Each row has as many floats as the weight has inputs.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The matrix.
    pub data: &'a [f32],
    /// Number of rows.
    pub rows: usize,
    /// Floats from one row's start to the next.
    pub stride: usize,
}

/// Output rows, `stride` apart. Each row has as many floats as the weight has outputs, or half as many for
/// [`Epilogue::SwiGlu`]. Floats between rows are left unchanged.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// The matrix.
    pub data: &'a mut [f32],
    /// Number of rows.
    pub rows: usize,
    /// Floats from one row's start to the next.
    pub stride: usize,
}

/// What a product does with a value v, to which the bias is already added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Epilogue {
    /// `out = v`
    Store,
    /// `out = out + v`: adds to the residual.
    Add,
    /// `out = gelu(v)`, in the tanh approximation.
    Gelu,
    /// `out = silu(v of gate) · v of up`, for a weight packed by [`PackedWeight::gate_up`].
    SwiGlu,
}

impl Epilogue {
    const fn name(self) -> &'static str {
        match self {
            Self::Store => "Store",
            Self::Add => "Add",
            Self::Gelu => "Gelu",
            Self::SwiGlu => "SwiGlu",
        }
    }
}

/// Which threads compute a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// The calling thread.
    One,
    /// The rayon pool of the calling thread.
    Pool,
}

/// Memory for packed rows, reused between products. It grows to the need of the largest product: about a block of rows
/// (1 MiB) per thread, or the size of the rows, whichever is larger.
#[derive(Default)]
pub struct Scratch {
    lines: Vec<Line>,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scratch").field("bytes", &std::mem::size_of_val(self.lines.as_slice())).finish()
    }
}

impl Scratch {
    /// Creates an empty scratch, without allocating.
    #[must_use]
    pub const fn new() -> Self {
        Self { lines: Vec::new() }
    }
}

/// Bytes of packed rows in a block. They stay in a core's L2 cache (half of it on common machines) while panels pass
/// through.
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes of panels in a group. A strip of rows is read once for the whole group.
const GROUP_BYTES: usize = 1 << 16;
/// Bytes of panels, or of one part of their lines, that are widened together. All strips read them from a core's cache.
const WIDENED_BYTES: usize = 1 << 19;
/// Multiplications below which a task is not worth another thread, unless it reads [`TASK_BYTES`].
const TASK_MULTIPLICATIONS: usize = 2 << 20;
/// Bytes of weight per task. A core takes slightly longer to fetch them than to wake another core.
const TASK_BYTES: usize = 1 << 18;
/// Floats in the smallest vector. A tile, and each half of a gated tile, is a whole number of such vectors.
const LANES: usize = 8;
/// Floats in the largest register tile.
const MAX_TILE_FLOATS: usize = 1024;
/// Lines for the tiles of a task that sums in parts.
const TILE_BUFFER_LINES: usize = 1024;
/// Strips in a block whose sums are computed in parts: the tiles of several panels must fit [`TILE_BUFFER_LINES`].
const PART_STRIPS: usize = 4;
/// Bytes of a row above which its sums are computed in parts, because too few rows of this size fit a block.
const LONG_ROW_BYTES: usize = 1 << 14;

/// `out[r, :] = epilogue(x[r, :] · weightᵀ + bias)`.
///
/// A row's bits depend on that row, the weight, the bias and the instruction set ([`crate::level_name`]). They do not
/// depend on the other rows, their number, or the threads. In f32, NaN and infinity propagate as in IEEE arithmetic.
///
/// # Errors
/// Returns [`ProductError`] if sizes differ, a slice is too short, or the weight was not packed for the epilogue. `out`
/// is unchanged in that case.
pub fn product(
    x: Rows<'_>,
    weight: &PackedWeight,
    bias: Option<&[f32]>,
    epilogue: Epilogue,
    out: RowsMut<'_>,
    threads: Threads,
    scratch: &mut Scratch,
) -> Result<(), ProductError> {
    if weight.is_gated() != (epilogue == Epilogue::SwiGlu) {
        let packed = if weight.is_gated() { "gate_up" } else { "new" };
        return Err(ProductError::Pairing { got: epilogue.name(), packed });
    }
    let columns = if weight.is_gated() { weight.outputs() / 2 } else { weight.outputs() };
    check_fits("x", x.data.len(), x.rows, weight.inputs(), x.stride)?;
    check_fits("out", out.data.len(), out.rows, columns, out.stride)?;
    let size = |what, got, valid| if got == valid { Ok(()) } else { Err(ProductError::Size { what, got, valid }) };
    size("the number of rows of out", out.rows, x.rows)?;
    size("the length of the bias", bias.map_or(weight.outputs(), <[f32]>::len), weight.outputs())?;
    let call = ProductCall { x, weight, bias, epilogue, columns, out: out.data.as_mut_ptr(), stride: out.stride };
    let threads = match threads {
        Threads::One => 1,
        Threads::Pool => rayon::current_num_threads(),
    };
    with_kernel!(weight.level(), kernel => call.run(kernel, threads, scratch));
    Ok(())
}

/// A product with validated sizes.
struct ProductCall<'a> {
    x: Rows<'a>,
    weight: &'a PackedWeight,
    bias: Option<&'a [f32]>,
    epilogue: Epilogue,
    columns: usize,
    out: *mut f32,
    stride: usize,
}

// SAFETY: the call borrows `out` mutably, and tasks write disjoint rectangles of it (`ProductCall::finish_tile`).
unsafe impl Sync for ProductCall<'_> {}

/// Returns part `index` of `parts` of `0..total`. Part sizes differ by at most one.
pub(crate) fn part_range(total: usize, parts: usize, index: usize) -> Range<usize> {
    let start = |index: usize| total / parts * index + (total % parts).min(index);
    start(index)..start(index + 1)
}

/// Lines that are summed at once: all `lines`, or for long rows as many as let panels stay in a core's cache.
fn part_lines<K: Kernel>(lines: usize) -> usize {
    match K::RESUME_LINES {
        Some(resume) if lines * LINE > LONG_ROW_BYTES => resume * 48usize.div_ceil(resume),
        _ => lines,
    }
}

/// Initialises memory with zeros. Callers pass only the lines they need, because zeroing all 64 KiB would dominate the
/// time of a small product.
fn zeroed(space: &mut [MaybeUninit<Line>]) -> &mut [Line] {
    for line in space.iter_mut() {
        line.write(Line::ZERO);
    }
    // SAFETY: the loop wrote each line.
    unsafe { &mut *(std::ptr::from_mut(space) as *mut [Line]) }
}

/// Layout of a block's packed rows in its part of the scratch.
struct Block {
    rows: Range<usize>,
    strips: usize,
    /// Lines in a row.
    lines: usize,
    /// Lines in a strip.
    strip: usize,
}

impl Block {
    /// Lines of scratch for a block: the strips, then one scale per row of each strip.
    const fn size<K: Kernel>(strips: usize, strip: usize) -> usize {
        strips * strip + (strips * K::ROWS).div_ceil(16)
    }
}

impl ProductCall<'_> {
    fn run<K: Kernel>(&self, kernel: K, threads: usize, scratch: &mut Scratch) {
        let rows = self.x.rows;
        let lines = self.weight.inputs().div_ceil(K::INPUTS);
        let work = rows * self.weight.inputs() * self.weight.outputs();
        // With few rows, reading the weight dominates the time.
        let tasks = (work / TASK_MULTIPLICATIONS).max(self.weight.bytes() / TASK_BYTES).max(1);
        let threads = threads.min(tasks).max(1);
        let largest =
            if part_lines::<K>(lines) < lines { PART_STRIPS * K::ROWS } else { (BLOCK_BYTES / (lines * LINE)).max(1) };
        let blocks = threads.min(rows / (2 * K::ROWS)).max(rows.div_ceil(largest)).clamp(1, rows);
        let strips = rows.div_ceil(blocks).div_ceil(K::ROWS);
        let strip = lines * K::strip_stride(K::ROWS);
        let size = Block::size::<K>(strips, strip);
        if scratch.lines.len() < blocks * size {
            scratch.lines.resize(blocks * size, Line::ZERO);
        }
        let block = |index: usize, memory: &mut [Line]| {
            let rows = part_range(rows, blocks, index);
            let strips = rows.len().div_ceil(K::ROWS);
            let block = Block { rows, strips, lines, strip };
            self.pack_rows(kernel, &block, memory);
            let panels = self.weight.panels();
            let group = panels.div_ceil(tasks.div_ceil(blocks)).clamp(1, panels);
            if threads == 1 {
                return self.multiply_panels(kernel, &block, memory, 0..panels);
            }
            let memory = &*memory;
            let groups = panels.div_ceil(group);
            (0..groups)
                .into_par_iter()
                .with_max_len(1)
                .for_each(|g| self.multiply_panels(kernel, &block, memory, part_range(panels, groups, g)));
        };
        let memory = &mut scratch.lines[..blocks * size];
        if threads == 1 {
            memory.chunks_exact_mut(size).enumerate().for_each(|(index, memory)| block(index, memory));
        } else {
            memory.par_chunks_exact_mut(size).enumerate().for_each(|(index, memory)| block(index, memory));
        }
    }

    /// Packs a block's rows into its memory.
    fn pack_rows<K: Kernel>(&self, kernel: K, block: &Block, memory: &mut [Line]) {
        let (strips, scales) = memory.split_at_mut(block.strips * block.strip);
        let scales = as_numbers_mut::<f32>(scales);
        kernel.vectorised(
            #[inline(always)]
            || {
                for (s, (strip, scales)) in
                    strips.chunks_exact_mut(block.strip).zip(scales.chunks_exact_mut(K::ROWS)).enumerate()
                {
                    let rows = part_range(block.rows.len(), block.strips, s);
                    let strip_stride = K::strip_stride(rows.len());
                    for i in 0..rows.len() {
                        let start = (block.rows.start + rows.start + i) * self.x.stride;
                        let row = &self.x.data[start..start + self.weight.inputs()];
                        scales[i] = kernel.pack_row(row, &mut strip[i..block.lines * strip_stride], strip_stride);
                    }
                }
            },
        );
    }

    /// Multiplies the block's rows by some of the panels.
    fn multiply_panels<K: Kernel>(&self, kernel: K, block: &Block, memory: &[Line], panels: Range<usize>) {
        const { assert!(K::ROWS * K::OUTPUTS <= MAX_TILE_FLOATS && K::OUTPUTS.is_multiple_of(2 * LANES)) };
        let (strips, scales) = memory.split_at(block.strips * block.strip);
        let mut space = [const { MaybeUninit::uninit() }; TILE_BUFFER_LINES];
        let tile = K::ROWS * K::OUTPUTS / 16;
        let lines = part_lines::<K>(block.lines);
        let parts = block.lines.div_ceil(lines);
        // Lines of a panel per line of rows.
        let depth = K::INPUTS * K::OUTPUTS * size_of::<K::Weight>() / LINE;
        let prefetch_per_line = depth.div_ceil(block.strips);
        // Whole sums reuse one tile; sums in parts need one tile per strip and panel.
        let mut group = if parts > 1 {
            TILE_BUFFER_LINES / tile / block.strips
        } else {
            GROUP_BYTES / size_of_val(self.weight.panel(0))
        };
        let widens = K::WIDEN_FROM.is_some_and(|from| block.strips >= from);
        // Lines of a widened panel, or of one part of it.
        let widened_lines = if widens { 2 * depth * lines.min(block.lines) } else { 0 };
        if widens {
            group = group.min(WIDENED_BYTES / (widened_lines * LINE)).max(1);
        }
        // A single strip of few rows takes several panels per call.
        let max_panels = if block.strips == 1 { K::max_panels(block.rows.len()) } else { 1 };
        group = group.max(max_panels);
        let tiles = zeroed(&mut space[..if parts > 1 { TILE_BUFFER_LINES } else { max_panels * tile }]);
        let mut widened = WidenedPanels::take(widened_lines * group.min(panels.len()));
        let widened = widened.lines();
        kernel.session(|| {
            for start in panels.clone().step_by(group) {
                let group = start..panels.end.min(start + group);
                for first_line in (0..block.lines).step_by(lines) {
                    let lines = lines.min(block.lines - first_line);
                    let last = first_line + lines == block.lines;
                    // The memory read next: after these panels, or after this part of them.
                    let current = if parts > 1 { start } else { group.end - 1 };
                    let mut next = self.weight.panel(current).as_ptr().wrapping_add((first_line + lines) * depth);
                    if widens {
                        for (to, p) in widened.chunks_exact_mut(widened_lines).zip(group.clone()) {
                            let from = &self.weight.panel(p)[first_line * depth..][..lines * depth];
                            kernel.widen(from, &mut to[..2 * lines * depth]);
                        }
                    }
                    for (s, strip) in strips.chunks_exact(block.strip).enumerate() {
                        let rows = part_range(block.rows.len(), block.strips, s);
                        let mut p = group.start;
                        while p < group.end {
                            let panels_per_call = 1 << max_panels.min(group.end - p).ilog2();
                            let slot = if parts > 1 { s * group.len() + p - group.start } else { 0 };
                            let out = &mut tiles[slot * tile..(slot + panels_per_call) * tile];
                            let strip = &strip[first_line * K::strip_stride(rows.len())..];
                            let panel = if widens {
                                &widened[(p - group.start) * widened_lines..][..widened_lines]
                            } else {
                                &self.weight.panels_from(p)[first_line * depth..]
                            };
                            let first = block.rows.start + rows.start;
                            let width = if self.weight.is_gated() { K::OUTPUTS / 2 } else { K::OUTPUTS };
                            // SAFETY: a block has at most `strips · ROWS` rows and at least one per strip, so a strip
                            // has 1..=ROWS rows. From `first_line` on, the strip holds `lines` times the slots of its
                            // rows. The panel was filled for the same kernel and inputs, so it holds as many groups, or
                            // twice the lines if widened. It includes the trailer, because a kernel with a trailer
                            // does not resume. The panels after it, up to the group's end, hold the same. `out` has
                            // ROWS · OUTPUTS floats in aligned lines for each of them.
                            unsafe {
                                kernel.compute_tile(Tile {
                                    rows: rows.len(),
                                    lines,
                                    strip: strip.as_ptr(),
                                    panel: panel.as_ptr(),
                                    panels: panels_per_call,
                                    panel_stride: self.weight.panel(p).len(),
                                    out: out.as_mut_ptr().cast(),
                                    overwrite: first_line == 0,
                                    next,
                                    prefetch_per_line,
                                    write_to: self.out.wrapping_add(first * self.stride + p * width),
                                    write_stride: if last { self.stride } else { 0 },
                                    widened: widens,
                                });
                            }
                            next = next.wrapping_add(prefetch_per_line * lines * panels_per_call);
                            if last {
                                let scales = &as_numbers::<f32>(scales)[s * K::ROWS..][..rows.len()];
                                for (out, p) in out.chunks_exact_mut(tile).zip(p..) {
                                    kernel.vectorised(
                                        #[inline(always)]
                                        || self.finish_tile::<K>(p, first, scales, as_numbers_mut(out)),
                                    );
                                }
                            }
                            p += panels_per_call;
                        }
                    }
                }
            }
        });
    }

    /// Applies scales, bias and epilogue to a tile: rows from `first` on, one per scale.
    #[inline(always)]
    fn finish_tile<K: Kernel>(&self, p: usize, first: usize, scales: &[f32], tile: &mut [f32]) {
        let width = if self.weight.is_gated() { K::OUTPUTS / 2 } else { K::OUTPUTS };
        let columns = p * width..self.columns.min((p + 1) * width);
        if K::SCALED {
            for (values, scale) in tile.chunks_exact_mut(K::OUTPUTS).zip(scales) {
                for (v, by) in values.iter_mut().zip(self.weight.scales::<K>(p)) {
                    *v *= *scale * *by;
                }
            }
        }
        if let Some(bias) = self.bias {
            for values in tile.chunks_exact_mut(K::OUTPUTS).take(scales.len()) {
                let halves = bias.chunks_exact(self.columns).zip(values.chunks_exact_mut(width));
                for (bias, values) in halves {
                    for (v, b) in values.iter_mut().zip(&bias[columns.clone()]) {
                        *v += *b;
                    }
                }
            }
        }
        let tile = &tile[..scales.len() * K::OUTPUTS];
        // Uses sixteen lanes if half of a tile's row has that many.
        if K::OUTPUTS >= 32 {
            self.apply_epilogue::<K, 16>(first, columns, tile);
        } else {
            self.apply_epilogue::<K, LANES>(first, columns, tile);
        }
    }

    /// Applies the epilogue to a tile's rows, N lanes at a time.
    #[inline(always)]
    fn apply_epilogue<K: Kernel, const N: usize>(&self, first: usize, columns: Range<usize>, tile: &[f32]) {
        match self.epilogue {
            Epilogue::Store => self.write_rows::<K, N>(first, columns, tile, K::OUTPUTS, |_, v, _| v),
            Epilogue::Add => self.write_rows::<K, N>(first, columns, tile, K::OUTPUTS, |out, v, _| out + v),
            Epilogue::Gelu => self.write_rows::<K, N>(first, columns, tile, K::OUTPUTS, |_, v, _| gelu(v)),
            Epilogue::SwiGlu => self.write_rows::<K, N>(first, columns, tile, K::OUTPUTS / 2, |_, v, up| silu(v) * up),
        }
    }

    /// Computes `out = f(out, v, up)` for the first `width` values v of each row of the tile; `up` is the value half a
    /// row further on.
    #[inline(always)]
    fn write_rows<K: Kernel, const N: usize>(
        &self,
        first: usize,
        columns: Range<usize>,
        tile: &[f32],
        width: usize,
        f: impl Fn(f32, f32, f32) -> f32,
    ) {
        let n = columns.len();
        for (i, values) in tile.chunks_exact(K::OUTPUTS).enumerate() {
            // SAFETY: row `first + i` and the columns are within the bounds that `product` checked, so the floats lie
            // in out, which is borrowed mutably. Rows do not overlap, and no other task has these rows and this panel.
            let out =
                unsafe { std::slice::from_raw_parts_mut(self.out.add((first + i) * self.stride + columns.start), n) };
            let (values, up) = (&values[..width], &values[K::OUTPUTS - width..]);
            if n == width {
                // A number of vectors that is known at compile time.
                let (out, values, up) = (&mut out[..width], &values[..width], &up[..width]);
                let parts = out.as_chunks_mut::<N>().0.iter_mut();
                for ((out, v), up) in parts.zip(values.as_chunks::<N>().0).zip(up.as_chunks::<N>().0) {
                    let (old, v, up) = (*out, *v, *up);
                    *out = array_from_fn(|i| f(old[i], v[i], up[i]));
                }
            } else {
                // Computes whole vectors, padding included: a loop over `n` would end in scalar code.
                let parts = values.as_chunks::<N>().0.iter().zip(up.as_chunks::<N>().0);
                for (out, (v, up)) in out.chunks_mut(N).zip(parts) {
                    let mut old = [0.0; N];
                    old[..out.len()].copy_from_slice(out);
                    let (v, up) = (*v, *up);
                    let new: [f32; N] = array_from_fn(|i| f(old[i], v[i], up[i]));
                    out.copy_from_slice(&new[..out.len()]);
                }
            }
        }
    }
}
