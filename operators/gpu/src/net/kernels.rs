//! Launches of `kernels/forward.cu`, `kernels/attention.cu`, `kernels/widen.cu` and `kernels/fp8.cu`: one method per
//! kernel, with the grid that the kernel expects.
//!
//! All addresses are device addresses, and all sizes count elements. Every method enqueues on [`Stream::Pass`].

use std::sync::Arc;

use super::widen::StorageFormat;
use crate::device::{Arg, Device, Element, Launch, Result, Stream};

/// Threads of a block that processes one row.
const ROW_THREADS: usize = 256;
/// Threads of a block of an activation kernel: 1,024 elements of 16 bits, which divides most widths.
const ELEMENTWISE_THREADS: usize = 128;
const ATTENTION_THREADS: u32 = 128;
/// Maximum blocks of a fill: several per multiprocessor.
const FILL_BLOCKS: usize = 2048;
/// Head dimensions that attention is compiled for; other heads are padded with zeros.
const HEAD_DIMS: [usize; 8] = [16, 32, 64, 80, 96, 128, 192, 256];
/// Bytes of a work item of attention: first row of the run, length of the run, first query row, 0.
pub(super) const ITEM_BYTES: usize = 16;

macro_rules! names {
    ($name:literal) => {
        [concat!($name, "_f32"), concat!($name, "_bf16"), concat!($name, "_f16")]
    };
}

/// The heads of a layer in fused rows of q, k and v: `heads + 2 kv_heads` of `dim` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements of a head in memory.
    pub dim: usize,
    /// Elements of a head in the model; the rest are 0.
    pub model_dim: usize,
}

/// The inputs of a rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct RopeInputs {
    /// Cosines, f32 `[positions, dim / 2]`.
    pub cos: u64,
    /// Sines.
    pub sin: u64,
    /// The position of each token, u32.
    pub positions: u64,
    /// Weights `[dim]` of the norms of query and key heads, if the model has such norms.
    pub norms: Option<[u64; 2]>,
    /// Epsilon of these norms.
    pub eps: f32,
}

/// The parameters of a norm: LayerNorm with a bias, RMSNorm without one.
#[derive(Debug, Clone, Copy)]
pub struct NormParams {
    /// Weight `[width]`.
    pub weight: u64,
    /// Bias `[width]`, or none.
    pub bias: Option<u64>,
    /// Epsilon, added under the root.
    pub eps: f32,
}

/// The padding of heads along a dimension of a weight: `model` model elements in `padded`, each half of a head at the
/// beginning of a padded half. A dimension without heads has both equal to its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadPadding {
    /// Elements of a head in the model.
    pub model: usize,
    /// Elements of a head in memory.
    pub padded: usize,
}

/// Elements of a stored matrix, and their target in a weight.
#[derive(Debug, Clone, Copy)]
pub struct Widening {
    /// The address of the stored bytes: whole blocks, aligned to 8 bytes.
    pub from: u64,
    /// The storage format.
    pub format: StorageFormat,
    /// The number of elements.
    pub count: usize,
    /// The address of the target weight.
    pub to: u64,
    /// Row and column of the first element in the stored matrix.
    pub first: [usize; 2],
    /// Columns of the stored matrix.
    pub columns: usize,
    /// The padding of rows and columns in the weight.
    pub padding: [HeadPadding; 2],
    /// Whether the stored rows of a head interleave its two halves
    /// ([`StorageOrder::Interleaved`](super::StorageOrder::Interleaved)).
    pub interleaved: bool,
    /// Elements between two rows and between two columns of the weight.
    pub strides: [usize; 2],
}

/// The kernels for one dtype.
#[derive(Debug, Clone)]
pub struct Kernels {
    device: Arc<dyn Device>,
    element: Element,
}

/// The padded dimension in memory of heads of `dim` elements, or `None` if attention does not support them.
#[must_use]
pub fn padded_dim(dim: usize) -> Option<usize> {
    HEAD_DIMS.into_iter().find(|d| *d >= dim)
}

/// Query rows of a work item of attention. `kernels/attention.cu` is compiled for these values.
#[must_use]
pub fn query_rows(element: Element, dim: usize) -> usize {
    match (element, dim) {
        (Element::F32, _) => 32,
        (_, 64 | 80) => 128,
        _ => 64,
    }
}

/// Splits attention over runs that lie back to back into work items `[first row, length, first query row, 0]`.
///
/// Items with the most keys come first, so that no long block is left for the end. `offsets` holds the first row of
/// each run and the end of the last one, ascending.
#[must_use]
pub fn work_items(offsets: &[u32], rows: usize) -> Vec<[u32; 4]> {
    let mut items: Vec<[u32; 4]> = Vec::new();
    for run in offsets.windows(2) {
        let &[start, end] = run else { continue };
        let length = end.saturating_sub(start);
        items.extend((0..length).step_by(rows).map(|first| [start, length, first, 0]));
    }
    // A stable sort: items with equally many keys keep the order of the runs.
    items.sort_by_key(|[_, length, first, _]| std::cmp::Reverse((*first + rows as u32).min(*length)));
    items
}

fn attention_kernel(element: Element, dim: usize) -> Option<&'static str> {
    let names = match dim {
        16 => names!("attention_16"),
        32 => names!("attention_32"),
        64 => names!("attention_64"),
        80 => names!("attention_80"),
        96 => names!("attention_96"),
        128 => names!("attention_128"),
        192 => names!("attention_192"),
        256 => names!("attention_256"),
        _ => return None,
    };
    Some(kernel_name(element, names))
}

fn kernel_name(element: Element, names: [&'static str; 3]) -> &'static str {
    let [f32, bf16, f16] = names;
    match element {
        Element::F32 => f32,
        Element::Bf16 => bf16,
        Element::F16 => f16,
    }
}

/// Bytes of shared memory of attention, in the kernels' layout.
fn attention_shared_bytes(element: Element, dim: usize) -> usize {
    match element {
        Element::F32 => 3 * 32 * (dim + 4) * 4,
        _ => (query_rows(element, dim) + 2 * 64) * (dim + 8) * 2,
    }
}

impl Kernels {
    /// The kernels of a device.
    #[must_use]
    pub fn new(device: &Arc<dyn Device>, element: Element) -> Self {
        Self { device: Arc::clone(device), element }
    }

    /// x`[i]` = wte`[tokens[i]]` + wpe`[positions[i]]`; without the second term if `wpe` is `None`.
    ///
    /// # Safety
    /// All addresses are within live buffers, including the rows that tokens and positions select.
    ///
    /// # Errors
    /// If the device fails. This holds for all methods.
    pub unsafe fn embed(
        &self,
        [tokens, positions]: [u64; 2],
        wte: u64,
        wpe: Option<u64>,
        x: u64,
        [rows, width]: [usize; 2],
    ) -> Result<()> {
        let args = [tokens, positions, wte, wpe.unwrap_or(0), x].map(Arg::Pointer);
        let launch = self.row_launch(names!("embed"), rows, width, 0);
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &args, &[u32_arg(width)]) }
    }

    /// to`[i]` = from`[rows[i]]`, for `count` rows.
    ///
    /// # Safety
    /// All addresses are within live buffers, including the rows that `rows` selects.
    pub unsafe fn gather(&self, from: u64, rows: u64, to: u64, [count, width]: [usize; 2]) -> Result<()> {
        let launch = self.row_launch(names!("gather_rows"), count, width, 0);
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &[from, rows, to].map(Arg::Pointer), &[u32_arg(width)]) }
    }

    /// x += y if there is a y; then out = norm(x).
    ///
    /// # Safety
    /// All addresses are within live buffers.
    pub unsafe fn add_norm(
        &self,
        x: u64,
        y: Option<u64>,
        norm: &NormParams,
        out: u64,
        [rows, width]: [usize; 2],
    ) -> Result<()> {
        let y = y.unwrap_or(0);
        let last = [u32_arg(width), Arg::F32(norm.eps)];
        let shared = width * self.element.bytes();
        // SAFETY: these are the kernels' arguments; the caller guarantees the memory
        unsafe {
            match norm.bias {
                Some(bias) => {
                    let launch = self.row_launch(names!("add_layer_norm"), rows, width, shared);
                    self.launch(&launch, &[x, y, norm.weight, bias, out].map(Arg::Pointer), &last)
                }
                None => {
                    let launch = self.row_launch(names!("add_rms_norm"), rows, width, shared);
                    self.launch(&launch, &[x, y, norm.weight, out].map(Arg::Pointer), &last)
                }
            }
        }
    }

    /// Rotates the queries and keys of `tokens` fused rows.
    ///
    /// # Safety
    /// All addresses are within live buffers, including the rows that positions select; [`padded_dim`] returned
    /// `heads.dim`.
    pub unsafe fn rope(&self, qkv: u64, rotation: &RopeInputs, heads: &Heads, tokens: usize) -> Result<()> {
        // Each thread of a head takes 16 bytes of either half.
        let lanes = (heads.dim / 2 * self.element.bytes() / 16).next_power_of_two();
        let blocks = (tokens * (heads.heads + heads.kv_heads)).div_ceil(ROW_THREADS / lanes);
        let launch = Launch {
            kernel: kernel_name(self.element, names!("rope")),
            grid: [blocks as u32, 1, 1],
            block: [ROW_THREADS as u32, 1, 1],
            shared_bytes: 0,
        };
        let [q_norm, k_norm] = rotation.norms.unwrap_or_default();
        let pointers = [qkv, rotation.cos, rotation.sin, rotation.positions, q_norm, k_norm].map(Arg::Pointer);
        let last = [
            u32_arg(tokens),
            u32_arg(heads.heads),
            u32_arg(heads.kv_heads),
            u32_arg(heads.dim),
            u32_arg(heads.model_dim),
            u32_arg(lanes),
            Arg::F32(rotation.eps),
        ];
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &pointers, &last) }
    }

    /// Causal attention within the run of each item: out `[T, heads · dim]`. Multiplies scores by `scale`.
    ///
    /// # Safety
    /// All addresses are within live buffers. The items come from [`work_items`] with [`query_rows`], and `heads.dim`
    /// from [`padded_dim`].
    pub unsafe fn attention(
        &self,
        qkv: u64,
        out: u64,
        [items, count]: [u64; 2],
        scale: f64,
        heads: &Heads,
    ) -> Result<()> {
        let Heads { heads, kv_heads, dim, .. } = *heads;
        let scale = std::f64::consts::LOG2_E * scale;
        let launch = Launch {
            // No kernel is named "attention": the device reports the unknown name.
            kernel: attention_kernel(self.element, dim).unwrap_or("attention"),
            grid: [(count as usize * heads) as u32, 1, 1],
            block: [ATTENTION_THREADS, 1, 1],
            shared_bytes: attention_shared_bytes(self.element, dim) as u32,
        };
        let last = [u32_arg(heads), u32_arg(kv_heads), Arg::F32(scale as f32)];
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &[qkv, out, items].map(Arg::Pointer), &last) }
    }

    /// Maps rows of gate ‖ up `[rows, 2 inner]` to silu(gate) ⊙ up `[rows, inner]`.
    ///
    /// # Safety
    /// All addresses are within live buffers.
    pub unsafe fn swiglu(&self, gate_up: u64, out: u64, size: [usize; 2]) -> Result<()> {
        // SAFETY: the caller upholds the safety contract
        unsafe { self.activate_gated(names!("swiglu"), gate_up, out, size) }
    }

    /// As [`Kernels::swiglu`], with the tanh approximation of GELU instead of silu.
    ///
    /// # Safety
    /// All addresses are within live buffers.
    pub unsafe fn geglu(&self, gate_up: u64, out: u64, size: [usize; 2]) -> Result<()> {
        // SAFETY: the caller upholds the safety contract
        unsafe { self.activate_gated(names!("geglu"), gate_up, out, size) }
    }

    /// # Safety
    /// As [`Kernels::swiglu`].
    unsafe fn activate_gated(
        &self,
        names: [&'static str; 3],
        gate_up: u64,
        out: u64,
        [rows, inner]: [usize; 2],
    ) -> Result<()> {
        let launch = self.elementwise_launch(names, rows, inner);
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &[gate_up, out].map(Arg::Pointer), &[u32_arg(inner)]) }
    }

    /// The tanh approximation of GELU, in place.
    ///
    /// # Safety
    /// All addresses are within live buffers.
    pub unsafe fn gelu_new(&self, x: u64, size: [usize; 2]) -> Result<()> {
        // SAFETY: the caller upholds the safety contract
        unsafe { self.activate(names!("gelu_new"), x, size) }
    }

    /// GELU, in place.
    ///
    /// # Safety
    /// All addresses are within live buffers.
    pub unsafe fn gelu(&self, x: u64, size: [usize; 2]) -> Result<()> {
        // SAFETY: the caller upholds the safety contract
        unsafe { self.activate(names!("gelu"), x, size) }
    }

    /// # Safety
    /// As [`Kernels::gelu`].
    unsafe fn activate(&self, names: [&'static str; 3], x: u64, [rows, inner]: [usize; 2]) -> Result<()> {
        let launch = self.elementwise_launch(names, rows, inner);
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &[Arg::Pointer(x)], &[u32_arg(inner)]) }
    }

    /// Widens stored elements and writes them to their places in the weight.
    ///
    /// # Safety
    /// All addresses are within live buffers, including the targets of the elements.
    pub unsafe fn widen(&self, widening: &Widening) -> Result<()> {
        let Widening {
            from,
            format,
            count,
            to,
            first,
            columns,
            padding: [row_padding, column_padding],
            interleaved,
            strides,
        } = *widening;
        let launch = Launch {
            kernel: kernel_name(self.element, names!("widen")),
            grid: [count.div_ceil(ROW_THREADS) as u32, 1, 1],
            block: [ROW_THREADS as u32, 1, 1],
            shared_bytes: 0,
        };
        let head = [Arg::Pointer(from), Arg::U32(format.number()), u32_arg(count), Arg::Pointer(to)];
        let [[first_row, first_column], [row_stride, column_stride]] = [first, strides];
        let sizes = [first_row, first_column, columns, row_padding.model, row_padding.padded, usize::from(interleaved)];
        let sizes = sizes.into_iter().chain([column_padding.model, column_padding.padded, row_stride, column_stride]);
        let mut last = [Arg::U32(0); 10];
        last.iter_mut().zip(sizes).for_each(|(arg, value)| *arg = u32_arg(value));
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &head, &last) }
    }

    /// Quantises rows of x to e4m3 `[rows, width]` with f32 scales `[rows]`: x ≈ quantised · scale. The scale is NaN
    /// for a row that contains NaN or infinity.
    ///
    /// # Safety
    /// All addresses are within live buffers; the width is a multiple of 16.
    pub unsafe fn quantise(&self, x: u64, to: u64, scales: u64, [rows, width]: [usize; 2]) -> Result<()> {
        let launch = self.row_launch(names!("quantise_rows"), rows, width, 0);
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &[x, to, scales].map(Arg::Pointer), &[u32_arg(width)]) }
    }

    /// Sets `bytes` bytes, an even number, to zero.
    ///
    /// # Safety
    /// The bytes are within a live buffer.
    pub unsafe fn clear(&self, to: u64, bytes: usize) -> Result<()> {
        let words = bytes / size_of::<u16>();
        let launch = Launch {
            kernel: "clear_words",
            grid: [words.div_ceil(ROW_THREADS) as u32, 1, 1],
            block: [ROW_THREADS as u32, 1, 1],
            shared_bytes: 0,
        };
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &[Arg::Pointer(to)], &[Arg::U64(words as u64)]) }
    }

    /// Fills memory with pseudo-random numbers from a key: approximately normal, times a factor, plus a term.
    ///
    /// # Safety
    /// All elements are within a live buffer.
    pub unsafe fn fill(&self, to: u64, count: usize, key: u64, [factor, term]: [f32; 2]) -> Result<()> {
        let blocks = count.div_ceil(ROW_THREADS).clamp(1, FILL_BLOCKS);
        let launch = Launch {
            kernel: kernel_name(self.element, names!("fill")),
            grid: [blocks as u32, 1, 1],
            block: [ROW_THREADS as u32, 1, 1],
            shared_bytes: 0,
        };
        let args = [Arg::Pointer(to), Arg::U64(count as u64), Arg::U64(key)];
        // SAFETY: these are the kernel's arguments; the caller guarantees the memory
        unsafe { self.launch(&launch, &args, &[factor, term].map(Arg::F32)) }
    }

    /// Elements that a thread loads at once: 16 bytes, or one element if rows do not begin at multiples of 16 bytes.
    fn vector_elements(&self, width: usize) -> usize {
        let vector = 16 / self.element.bytes();
        if width.is_multiple_of(vector) { vector } else { 1 }
    }

    fn row_launch(&self, names: [&'static str; 3], rows: usize, width: usize, shared_bytes: usize) -> Launch {
        let threads = width.div_ceil(self.vector_elements(width)).next_multiple_of(32).min(ROW_THREADS);
        Launch {
            kernel: kernel_name(self.element, names),
            grid: [rows as u32, 1, 1],
            block: [threads as u32, 1, 1],
            shared_bytes: shared_bytes as u32,
        }
    }

    fn elementwise_launch(&self, names: [&'static str; 3], rows: usize, width: usize) -> Launch {
        let pieces = width.div_ceil(self.vector_elements(width) * ELEMENTWISE_THREADS);
        Launch {
            kernel: kernel_name(self.element, names),
            grid: [rows as u32, pieces as u32, 1],
            block: [ELEMENTWISE_THREADS as u32, 1, 1],
            shared_bytes: 0,
        }
    }

    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch(&self, launch: &Launch, first: &[Arg], last: &[Arg]) -> Result<()> {
        let mut args = [Arg::U32(0); 16];
        let (count, given) = (first.len() + last.len(), first.iter().chain(last));
        args.iter_mut().zip(given).for_each(|(arg, given)| *arg = *given);
        // SAFETY: the caller upholds the safety contract
        unsafe { self.device.launch(Stream::Pass, launch, args.get(..count).unwrap_or_default()) }
    }
}

fn u32_arg(value: usize) -> Arg {
    Arg::U32(value as u32)
}
