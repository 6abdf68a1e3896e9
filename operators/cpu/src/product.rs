//! Rows times a packed weight: what is split, what runs at once, what a product's end does.
//!
//! ```text
//!                    panels of outputs, in groups: one task each
//!                  +--------+--------+--------+--
//! block of rows    | task   | task   | ..     |      a block's packed rows stay in a core's cache
//! (packed once)    +--------+--------+--------+--
//! next block       | ..
//! ```
//!
//! How rows are cut into blocks and strips, and which thread runs a task, changes nothing: a kernel sums a row's inputs
//! in an order that depends on their number only.

use crate::arithmetic::with_kernel;
use crate::elementwise::{gelu, silu};
use crate::error::ProductError;
use crate::kernel::{Kernel, Tile};
use crate::memory::{Line, numbers, numbers_mut};
use crate::weight::{Packed, fits};
use rayon::prelude::*;
use std::ops::Range;

/// Rows of floats, `stride` apart; as many floats in a row as the weight has inputs.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The floats.
    pub data: &'a [f32],
    /// Number of rows.
    pub rows: usize,
    /// Floats from a row's start to the next one's.
    pub stride: usize,
}

/// Rows to be written, `stride` apart: as many floats in a row as the weight has outputs, half of them for
/// [`Epilogue::SwiGlu`]. Floats between rows stay as they are.
#[derive(Debug)]
pub struct RowsMut<'a> {
    /// The floats.
    pub data: &'a mut [f32],
    /// Number of rows.
    pub rows: usize,
    /// Floats from a row's start to the next one's.
    pub stride: usize,
}

/// What becomes of a product's value v (with its bias added).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Epilogue {
    /// `out = v`
    Store,
    /// `out = out + v`, the residual.
    Add,
    /// `out = gelu(v)`, the tanh approximation.
    Gelu,
    /// `out = silu(v of gate) · v of up`, of a weight packed by [`Packed::gate_up`].
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

/// Who computes a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Threads {
    /// The calling thread.
    One,
    /// The rayon pool of the calling thread.
    Pool,
}

/// Memory for packed rows, kept between products: it grows to the largest one's need, about the size of a block of
/// rows (1 MiB for each thread) or of the rows, whichever is larger.
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
    /// No memory yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { lines: Vec::new() }
    }
}

/// Bytes of packed rows that a core's second-level cache keeps while panels go by (half of it on common machines).
const BLOCK_BYTES: usize = 1 << 20;
/// Bytes of panels that go by together: each strip of rows is then read once for several of them.
const GROUP_BYTES: usize = 1 << 16;
/// Multiplications below which a task is not worth another thread.
const TASK: usize = 2 << 20;
/// Floats of the largest register tile.
const TILE: usize = 1024;

/// `out[r, :] = epilogue(x[r, :] · weightᵀ + bias)`.
///
/// A row's bits depend on that row, the weight, the bias and the instruction set ([`crate::level`]): not on the other
/// rows, nor on their number, nor on the threads. In f32, NaN and infinity go where arithmetic takes them.
///
/// # Errors
/// [`ProductError`] where sizes differ, memory is too short, or the weight was not packed for the epilogue; `out` is
/// as it was then.
pub fn product(
    x: Rows<'_>,
    weight: &Packed,
    bias: Option<&[f32]>,
    epilogue: Epilogue,
    out: RowsMut<'_>,
    threads: Threads,
    scratch: &mut Scratch,
) -> Result<(), ProductError> {
    if weight.paired() != (epilogue == Epilogue::SwiGlu) {
        let packed = if weight.paired() { "gate_up" } else { "new" };
        return Err(ProductError::Pairing { got: epilogue.name(), packed });
    }
    let columns = if weight.paired() { weight.outputs() / 2 } else { weight.outputs() };
    fits("x", x.data.len(), x.rows, weight.inputs(), x.stride)?;
    fits("out", out.data.len(), out.rows, columns, out.stride)?;
    let size = |what, got, valid| if got == valid { Ok(()) } else { Err(ProductError::Size { what, got, valid }) };
    size("the number of rows of out", out.rows, x.rows)?;
    size("the length of the bias", bias.map_or(weight.outputs(), <[f32]>::len), weight.outputs())?;
    let job = Job { x, weight, bias, epilogue, columns, out: out.data.as_mut_ptr(), stride: out.stride };
    let threads = match threads {
        Threads::One => 1,
        Threads::Pool => rayon::current_num_threads(),
    };
    with_kernel!(weight.level(), kernel => job.run(kernel, threads, scratch));
    Ok(())
}

/// A product whose sizes were checked.
struct Job<'a> {
    x: Rows<'a>,
    weight: &'a Packed,
    bias: Option<&'a [f32]>,
    epilogue: Epilogue,
    columns: usize,
    out: *mut f32,
    stride: usize,
}

// SAFETY: `out` is borrowed mutably for the call, and tasks write disjoint rectangles of it (`Job::end`).
unsafe impl Sync for Job<'_> {}

/// Part `index` of `parts` of `0..total`, whose sizes differ by one at most.
fn part(total: usize, parts: usize, index: usize) -> Range<usize> {
    let start = |index: usize| total / parts * index + (total % parts).min(index);
    start(index)..start(index + 1)
}

/// How a block's packed rows lie in its part of the scratch.
struct Block {
    rows: Range<usize>,
    strips: usize,
    /// Lines of a row.
    lines: usize,
    /// Lines of a strip.
    strip: usize,
}

impl Block {
    /// Lines of scratch: the strips, then a scale for each row of each strip.
    const fn size<K: Kernel>(strips: usize, strip: usize) -> usize {
        strips * strip + (strips * K::ROWS).div_ceil(16)
    }
}

impl Job<'_> {
    fn run<K: Kernel>(&self, kernel: K, threads: usize, scratch: &mut Scratch) {
        let rows = self.x.rows;
        let lines = self.weight.inputs().div_ceil(K::INPUTS);
        let work = rows * self.weight.inputs() * self.weight.outputs();
        let threads = threads.min(work / TASK).max(1);
        let blocks = threads.min(rows / (2 * K::ROWS)).max((rows * lines * 64).div_ceil(BLOCK_BYTES)).clamp(1, rows);
        let strips = rows.div_ceil(blocks).div_ceil(K::ROWS);
        let strip = lines * K::slots(K::ROWS);
        let size = Block::size::<K>(strips, strip);
        if scratch.lines.len() < blocks * size {
            scratch.lines.resize(blocks * size, Line::ZERO);
        }
        let block = |index: usize, memory: &mut [Line]| {
            let rows = part(rows, blocks, index);
            let strips = rows.len().div_ceil(K::ROWS);
            let block = Block { rows, strips, lines, strip };
            self.pack(kernel, &block, memory);
            let panels = self.weight.panels();
            let task = work.div_ceil(panels * blocks);
            let group = TASK.div_ceil(task).clamp(1, panels);
            if threads == 1 {
                return self.panels(kernel, &block, memory, 0..panels);
            }
            let memory = &*memory;
            let groups = panels.div_ceil(group);
            (0..groups)
                .into_par_iter()
                .with_max_len(1)
                .for_each(|g| self.panels(kernel, &block, memory, part(panels, groups, g)));
        };
        let memory = &mut scratch.lines[..blocks * size];
        if threads == 1 {
            memory.chunks_exact_mut(size).enumerate().for_each(|(index, memory)| block(index, memory));
        } else {
            memory.par_chunks_exact_mut(size).enumerate().for_each(|(index, memory)| block(index, memory));
        }
    }

    /// Packs a block's rows into its memory.
    fn pack<K: Kernel>(&self, kernel: K, block: &Block, memory: &mut [Line]) {
        let (strips, scales) = memory.split_at_mut(block.strips * block.strip);
        let scales = numbers_mut::<f32>(scales);
        kernel.vectorised(
            #[inline(always)]
            || {
                for (s, (strip, scales)) in
                    strips.chunks_exact_mut(block.strip).zip(scales.chunks_exact_mut(K::ROWS)).enumerate()
                {
                    let rows = part(block.rows.len(), block.strips, s);
                    let slots = K::slots(rows.len());
                    for i in 0..rows.len() {
                        let start = (block.rows.start + rows.start + i) * self.x.stride;
                        let row = &self.x.data[start..start + self.weight.inputs()];
                        scales[i] = kernel.row(row, &mut strip[i..block.lines * slots], slots);
                    }
                }
            },
        );
    }

    /// The block's rows times some of the panels.
    fn panels<K: Kernel>(&self, kernel: K, block: &Block, memory: &[Line], panels: Range<usize>) {
        const { assert!(K::ROWS * K::OUTPUTS <= TILE && K::OUTPUTS.is_multiple_of(16)) };
        let (strips, scales) = memory.split_at(block.strips * block.strip);
        let mut tile = [Line::ZERO; TILE / 16];
        let panel_lines = self.weight.panel(0).len();
        let group = (GROUP_BYTES / size_of_val(self.weight.panel(0))).clamp(1, panels.len().max(1));
        let step = panel_lines.div_ceil(block.lines * block.strips);
        kernel.session(|| {
            for start in panels.clone().step_by(group) {
                let group = start..panels.end.min(start + group);
                let mut next = self.weight.panel(group.end - 1).as_ptr_range().end;
                for (s, strip) in strips.chunks_exact(block.strip).enumerate() {
                    let rows = part(block.rows.len(), block.strips, s);
                    let scales = &numbers::<f32>(scales)[s * K::ROWS..][..rows.len()];
                    for p in group.clone() {
                        // SAFETY: a block has at most `strips · ROWS` rows and at least one for each strip, so a strip
                        // has 1..=ROWS; it holds `lines` times the slots of ROWS, which are at least those of its
                        // rows; a panel was filled for the same kernel and inputs; the tile has space for
                        // ROWS · OUTPUTS floats (asserted above), in aligned lines of its own.
                        unsafe {
                            kernel.tile(Tile {
                                rows: rows.len(),
                                lines: block.lines,
                                strip: strip.as_ptr(),
                                panel: self.weight.panel(p).as_ptr(),
                                out: tile.as_mut_ptr().cast(),
                                next,
                                step,
                            });
                        }
                        next = next.wrapping_add(step * block.lines);
                        let first = block.rows.start + rows.start;
                        kernel.vectorised(
                            #[inline(always)]
                            || self.end::<K>(p, first, scales, numbers_mut(&mut tile)),
                        );
                    }
                }
            }
        });
    }

    /// Scales, bias and epilogue of a tile: rows from `first` on, one for each scale.
    #[inline(always)]
    fn end<K: Kernel>(&self, p: usize, first: usize, scales: &[f32], tile: &mut [f32]) {
        let width = if self.weight.paired() { K::OUTPUTS / 2 } else { K::OUTPUTS };
        let columns = p * width..self.columns.min((p + 1) * width);
        let n = columns.len();
        for (i, (values, scale)) in tile.chunks_exact_mut(K::OUTPUTS).zip(scales).enumerate() {
            if K::SCALED {
                for (v, by) in values.iter_mut().zip(self.weight.scales::<K>(p)) {
                    *v *= *scale * *by;
                }
            }
            if let Some(bias) = self.bias {
                let halves = bias.chunks_exact(self.columns).zip(values.chunks_exact_mut(width));
                for (bias, values) in halves {
                    for (v, b) in values.iter_mut().zip(&bias[columns.clone()]) {
                        *v += *b;
                    }
                }
            }
            // SAFETY: row `first + i` is below out's rows and the columns below its columns, so that the floats lie in
            // out (checked by `product`), which is borrowed mutably; rows do not overlap, and no other task has these
            // rows and this panel.
            let out =
                unsafe { std::slice::from_raw_parts_mut(self.out.add((first + i) * self.stride + columns.start), n) };
            match self.epilogue {
                Epilogue::Store => out.copy_from_slice(&values[..n]),
                Epilogue::Add => out.iter_mut().zip(values).for_each(|(out, v)| *out += *v),
                Epilogue::Gelu => out.iter_mut().zip(values).for_each(|(out, v)| *out = gelu(*v)),
                Epilogue::SwiGlu => {
                    let (gate, up) = values.split_at(width);
                    out.iter_mut().zip(gate.iter().zip(up)).for_each(|(out, (gate, up))| *out = silu(*gate) * *up);
                }
            }
        }
    }
}
