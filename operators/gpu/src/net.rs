//! The forward pass of GPT-2, Llama and Qwen3 on a device. It computes what `stillhouse-teacher` computes on the CPU.
//!
//! Where the CPU code takes a batch `[B, L]`, this module takes runs: token sequences of any length, back to back.
//! Documents therefore share a pass without padding.
//!
//! ```text
//!   tokens ─► embed ─► x ─► norm ─► n ─► qkv ─► rope ─► attention ─► x += out ─► norm ─► n ─► up ─► gelu | gated ──► x += down ─┐
//!                       ▲                                                                                                  │
//!                       └──────────────────────────────────── layers ──────────────────────────────────────────────────────┘
//!   x ─► norm ─► n, which stays on the device;   logits: rows of n · headᵀ, in f32, straight from the product
//! ```
//!
//! Weights and activations have one dtype; sums, norms and softmax are f32. The matrix products add the residual
//! themselves, so x is rounded once per step. [`Net::load`] allocates all device memory; passes allocate none.
//!
//! Cost per token and layer: 2 flops per weight, and 2 L heads · D for attention.

mod kept;
pub mod kernels;
mod made;
mod numbers;
mod shape;
mod upload;
mod weights;
mod widen;

use std::sync::Arc;

pub use made::MadeUp;
pub use numbers::Numbers;
pub use shape::{Activation, Kind, Shape};
pub use weights::Source;
pub use widen::{Format, Order, STAGES_BYTES, Stored};

use crate::device::{Buffer, Device, Element, Matrix, Pinned, Product, Result, Scaled, ScaledProduct, Stream};
use crate::error::GpuError;
use kept::Kept;
use kernels::{ITEM_BYTES, Kernels, Rotation, Scale, query_rows, work_items};
use shape::{INPUT_BYTES, ROW_BYTES};
use upload::{Upload, put};
use weights::{Layer, Linear, Loader, Norm, Weights};

/// Alignment in bytes of every matrix that a product reads. Libraries assume it when they choose an algorithm.
const PRODUCT_ALIGN: u64 = 256;

/// Tables of the rotary position embedding, each `[positions, D/2]`.
#[derive(Debug, Clone, Copy)]
pub struct Rope<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
}

/// The buffers that a pass works in.
#[derive(Debug)]
struct Workspace {
    /// The residual stream `[tokens, width]`.
    x: Buffer,
    /// The normalised residual stream `[tokens, width]`.
    n: Buffer,
    /// For the width of `wide` and `narrow`, see [`Shape::work_widths`].
    wide: Buffer,
    narrow: Buffer,
    inputs: Buffer,
    rows: Buffer,
    /// The e4m3 input of an 8-bit product, and the scales of its rows.
    eight: Option<[Buffer; 2]>,
}

/// Device addresses of a pass's inputs.
#[derive(Debug, Clone, Copy)]
struct Inputs {
    items: u64,
    item_count: usize,
    tokens: u64,
    positions: u64,
    count: usize,
}

/// A language model on a device.
#[derive(Debug)]
pub struct Net {
    device: Arc<dyn Device>,
    kernels: Kernels,
    shape: Shape,
    element: Element,
    weights: Weights,
    angles: Option<[Buffer; 2]>,
    work: Workspace,
    input_upload: Upload,
    row_upload: Upload,
    most_tokens: usize,
    /// Tokens of the last pass.
    tokens: usize,
    /// Pinned memory for hidden states, reused between passes.
    kept: Option<Pinned>,
}

fn input(what: &'static str, got: impl ToString, valid: impl Into<String>) -> GpuError {
    GpuError::Input { what, got: got.to_string(), valid: valid.into() }
}

impl Net {
    /// Loads a net and allocates buffers for passes over at most `most_tokens` tokens.
    ///
    /// # Errors
    /// If the device cannot compute this shape in these numbers, if the weights do not match the shape, or if memory
    /// runs out.
    pub fn load(
        device: &Arc<dyn Device>,
        shape: Shape,
        numbers: impl Into<Numbers>,
        rope: Option<Rope<'_>>,
        source: &mut dyn Source,
        most_tokens: usize,
    ) -> Result<Self> {
        let numbers = numbers.into();
        numbers.check(device, &shape)?;
        check_rope(&shape, rope)?;
        Self::of(device, shape, numbers, most_tokens, || {
            let mut loader = Loader::new(device, &shape, numbers, source)?;
            let angles = match rope.filter(|_| shape.rotates()) {
                Some(Rope { cos, sin }) => Some([loader.table_of_angles(cos)?, loader.table_of_angles(sin)?]),
                None => None,
            };
            Ok((angles, loader.load()?))
        })
    }

    /// Allocates the buffers of a pass, then calls `load` for the weights.
    ///
    /// The buffers come first because the caller chooses their size: a caller that asks for too much gets the error
    /// before the weights are read.
    fn of(
        device: &Arc<dyn Device>,
        shape: Shape,
        numbers: Numbers,
        most_tokens: usize,
        load: impl FnOnce() -> Result<(Option<[Buffer; 2]>, Weights)>,
    ) -> Result<Self> {
        if most_tokens == 0 || u32::try_from(most_tokens).is_err() {
            return Err(input("tokens of a pass", most_tokens, "at least 1, below 2^32"));
        }
        let (element, fp8) = (numbers.element(), numbers == Numbers::Fp8);
        let bytes = |per_row: usize| Buffer::new(device, per_row * numbers.rows(most_tokens));
        let [wide, narrow] = shape.work_widths().map(|width| width * element.bytes());
        let work = Workspace {
            x: bytes(shape.width * element.bytes())?,
            n: bytes(shape.width * element.bytes())?,
            wide: bytes(wide)?,
            narrow: bytes(narrow)?,
            inputs: Buffer::new(device, INPUT_BYTES * most_tokens)?,
            rows: Buffer::new(device, ROW_BYTES * most_tokens)?,
            eight: if fp8 { Some([bytes(shape.fp8_inputs())?, bytes(Element::F32.bytes())?]) } else { None },
        };
        let (angles, weights) = load()?;
        Ok(Self {
            device: Arc::clone(device),
            kernels: Kernels::new(device, element),
            shape,
            element,
            weights,
            angles,
            work,
            input_upload: Upload::new(device, INPUT_BYTES * most_tokens)?,
            row_upload: Upload::new(device, ROW_BYTES * most_tokens)?,
            most_tokens,
            tokens: 0,
            kept: None,
        })
    }

    /// The shape of the net.
    #[must_use]
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The dtype of weights and activations.
    #[must_use]
    pub fn element(&self) -> Element {
        self.element
    }

    /// The largest number of tokens in a pass.
    #[must_use]
    pub fn most_tokens(&self) -> usize {
        self.most_tokens
    }

    /// The normalised hidden states of the last pass. They are valid once [`Stream::Pass`] has finished that pass,
    /// until the next pass.
    #[must_use]
    pub fn states(&self) -> Matrix {
        self.activations(&self.work.n, self.tokens, self.shape.width)
    }

    /// Runs the net over token sequences (runs) that lie back to back.
    ///
    /// Run i is `tokens[offsets[i]..offsets[i + 1]]`; its positions count from 0. Enqueues the work on
    /// [`Stream::Pass`].
    ///
    /// # Errors
    /// If a token is outside the vocabulary, a run is longer than the net's positions, there are more than
    /// [`Net::most_tokens`] tokens, or the device fails.
    pub fn hidden(&mut self, tokens: &[u32], offsets: &[u32]) -> Result<()> {
        self.pass(tokens, offsets, &mut Kept::default())
    }

    /// As [`Net::hidden`], and returns the hidden states of these layers, f32 `[tokens, layers, H]`. Waits for the
    /// pass.
    ///
    /// Layer 0 is the output of the embeddings, layer k (1 to layers - 1) the output of the k-th layer, and layer `layers`
    /// the normalised states. The values are those of the device, rounded to [`Net::element`].
    ///
    /// # Errors
    /// As [`Net::hidden`], and if a layer does not exist.
    pub fn hidden_keeping(&mut self, tokens: &[u32], offsets: &[u32], layers: &[usize]) -> Result<Vec<f32>> {
        if let Some(layer) = layers.iter().find(|layer| **layer > self.shape.layers) {
            return Err(input("layer of hidden states", layer, format!("0 to {}", self.shape.layers)));
        }
        let width = self.shape.width;
        let bytes = tokens.len() * width * self.element.bytes();
        let mut kept = Kept::new(&self.device, layers, bytes, self.kept.take())?;
        let ran = self.pass(tokens, offsets, &mut kept);
        // Waits even after a failure: the stream may still write to this memory.
        let there = self.device.record(Stream::Pass).and_then(|event| self.device.wait(event));
        ran.and(there)?;
        let states = kept.widened(self.element, tokens.len(), width);
        self.kept = kept.memory;
        Ok(states)
    }

    fn pass(&mut self, tokens: &[u32], offsets: &[u32], kept: &mut Kept<'_>) -> Result<()> {
        self.check_runs(tokens, offsets)?;
        self.tokens = 0;
        if tokens.is_empty() {
            return Ok(());
        }
        let inputs = self.send(tokens, offsets)?;
        let (kernels, work, width) = (&self.kernels, &self.work, self.shape.width);
        let (x, rows) = (work.x.pointer(), [inputs.count, width]);
        let wpe = self.weights.positions.as_ref().map(Buffer::pointer);
        let wte = self.weights.tokens.matrix(self.element).pointer;
        // SAFETY: the buffers hold `most_tokens` rows; `check_runs` checked tokens and positions
        unsafe { kernels.embed([inputs.tokens, inputs.positions], wte, wpe, x, rows)? };
        let states = |buffer| self.activations(buffer, inputs.count, width);
        for (i, layer) in self.weights.layers.iter().enumerate() {
            kept.take(self.device.as_ref(), i, states(&work.x))?;
            self.norm(&layer.before_attention, inputs.count)?;
            self.attention(i, layer, &inputs)?;
            self.norm(&layer.before_mlp, inputs.count)?;
            self.feed_forward(layer, inputs.count)?;
        }
        self.norm(&self.weights.last, inputs.count)?;
        kept.take(self.device.as_ref(), self.shape.layers, states(&work.n))?;
        self.tokens = inputs.count;
        Ok(())
    }

    /// Computes the logits of these rows of the last pass, f32 `[rows, vocabulary]`, into device memory. Enqueues the
    /// work on [`Stream::Pass`].
    ///
    /// # Safety
    /// `to` is the address of a live buffer that is large enough. Readers of the logits wait for the stream first.
    ///
    /// # Errors
    /// If the last pass did not have one of the rows, or the device fails.
    pub unsafe fn logits(&mut self, rows: &[u32], to: u64) -> Result<()> {
        // SAFETY: the caller upholds the safety contract
        unsafe { self.logits_into(rows, to, self.shape.vocab) }
    }

    /// As [`Net::logits`], with rows that begin `stride` floats apart: see [`logits_stride`](crate::logits_stride).
    ///
    /// # Safety
    /// As [`Net::logits`], for rows of `stride` floats.
    ///
    /// # Errors
    /// As [`Net::logits`], and if the stride is shorter than a row.
    pub unsafe fn logits_into(&mut self, rows: &[u32], to: u64, stride: usize) -> Result<()> {
        if stride < self.shape.vocab {
            return Err(input("stride of logits", stride, format!("at least {}", self.shape.vocab)));
        }
        if rows.len() > self.most_tokens {
            return Err(input("rows of the head", rows.len(), format!("at most {}", self.most_tokens)));
        }
        if let Some(row) = rows.iter().find(|row| **row as usize >= self.tokens) {
            return Err(input("row of the head", row, format!("below {}, the tokens of the last pass", self.tokens)));
        }
        let Some(first) = rows.first() else { return Ok(()) };
        let width = self.shape.width;
        let in_place = self.work.n.pointer() + u64::from(*first) * (width * self.element.bytes()) as u64;
        let neighbours = rows.iter().zip(*first..).all(|(row, i)| *row == i);
        let mut states = self.activations(&self.work.narrow, rows.len(), width);
        if neighbours && in_place.is_multiple_of(PRODUCT_ALIGN) {
            states.pointer = in_place;
        } else {
            let numbers = self.work.rows.pointer();
            // SAFETY: the buffers hold `most_tokens` rows and row numbers; both were checked above
            unsafe {
                self.row_upload.send(numbers, rows.len() * ROW_BYTES, |memory| put(rows, memory, u32::to_ne_bytes))?;
                self.kernels.gather(self.work.n.pointer(), numbers, states.pointer, [rows.len(), width])?;
            }
        }
        let head = self.weights.head.as_ref().unwrap_or(&self.weights.tokens).matrix(self.element);
        let vocab = self.shape.vocab;
        let d = Matrix { pointer: to, element: Element::F32, rows: rows.len(), columns: vocab, stride };
        // SAFETY: the net owns the states and the head; the caller guarantees the memory of the logits
        unsafe {
            self.device.product(Stream::Pass, &Product { a: states, b: head, d, bias: 0, add: false, gelu: false })
        }
    }

    fn check_runs(&self, tokens: &[u32], offsets: &[u32]) -> Result<()> {
        let Shape { vocab, positions, .. } = self.shape;
        if tokens.len() > self.most_tokens {
            return Err(input("tokens of a pass", tokens.len(), format!("at most {}", self.most_tokens)));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(input("token", token, format!("below {vocab}, the size of the vocabulary")));
        }
        let ends = (offsets.first().copied(), offsets.last().map(|end| *end as usize));
        if ends != (Some(0), Some(tokens.len())) || !offsets.is_sorted() {
            let got = format!("{} from {:?} to {:?}", offsets.len(), offsets.first(), offsets.last());
            return Err(input("offsets of runs", got, format!("ascending, from 0 to {}", tokens.len())));
        }
        let longest = offsets.windows(2).map(|run| run.iter().rev().fold(0, |end, x| x.abs_diff(end))).max();
        match longest {
            Some(longest) if longest as usize > positions => {
                Err(input("tokens of a run", longest, format!("at most {positions}")))
            }
            _ => Ok(()),
        }
    }

    /// Uploads the inputs of a pass in one copy: work items of attention, tokens, positions.
    fn send(&mut self, tokens: &[u32], offsets: &[u32]) -> Result<Inputs> {
        let items = work_items(offsets, query_rows(self.element, self.shape.heads().dim));
        let (count, token_bytes) = (tokens.len(), size_of_val(tokens));
        let start = self.work.inputs.pointer();
        let item_bytes = items.len() * ITEM_BYTES;
        let fill = |memory: &mut [u8]| {
            let (item_memory, memory) = memory.split_at_mut(item_bytes);
            let (token_memory, memory) = memory.split_at_mut(token_bytes);
            put(items.as_flattened(), item_memory, u32::to_ne_bytes);
            put(tokens, token_memory, u32::to_ne_bytes);
            let positions = offsets.windows(2).flat_map(|run| run.iter().skip(1).zip(run).flat_map(|(e, s)| 0..e - s));
            for (to, position) in memory.chunks_exact_mut(size_of::<u32>()).zip(positions) {
                to.copy_from_slice(&position.to_ne_bytes());
            }
        };
        // SAFETY: every item has at least one token, so items never outnumber tokens; the buffer is sized for
        // `most_tokens`
        unsafe { self.input_upload.send(start, item_bytes + 2 * token_bytes, fill)? };
        let first_token = start + item_bytes as u64;
        Ok(Inputs {
            items: start,
            item_count: items.len(),
            tokens: first_token,
            positions: first_token + token_bytes as u64,
            count,
        })
    }

    fn norm(&self, norm: &Norm, tokens: usize) -> Result<()> {
        let bias = norm.bias.as_ref().map(Buffer::pointer);
        let scale = Scale { weight: norm.weight.pointer(), bias, eps: self.shape.eps };
        let (x, n) = (self.work.x.pointer(), self.work.n.pointer());
        // SAFETY: both buffers hold `most_tokens` rows
        unsafe { self.kernels.add_norm(x, None, &scale, n, [tokens, self.shape.width]) }
    }

    /// Adds attention to the residual stream: x += the output projection of attention over n.
    fn attention(&self, number: usize, layer: &Layer, inputs: &Inputs) -> Result<()> {
        let (heads, [qkv_width, out_width]) = (self.shape.heads(), self.shape.attention_widths());
        let qkv = self.activations(&self.work.wide, inputs.count, qkv_width);
        let out = self.activations(&self.work.narrow, inputs.count, out_width);
        let n = self.activations(&self.work.n, inputs.count, self.shape.width);
        self.linear(n, &layer.qkv, qkv, false)?;
        if let Some([cos, sin]) = &self.angles {
            let norms = layer.head_norms.as_ref().map(|[q, k]| [q.pointer(), k.pointer()]);
            let (cos, sin, eps) = (cos.pointer(), sin.pointer(), self.shape.eps);
            let rotation = Rotation { cos, sin, positions: inputs.positions, norms, eps };
            // SAFETY: the buffer holds `inputs.count` fused rows; `check_runs` checked that positions are within the
            // tables
            unsafe { self.kernels.rope(qkv.pointer, &rotation, &heads, inputs.count)? };
        }
        let items = [inputs.items, inputs.item_count as u64];
        let scale = self.shape.score_scale(number);
        // SAFETY: the items refer to these rows, and the output buffer holds `most_tokens` rows
        unsafe { self.kernels.attention(qkv.pointer, out.pointer, items, scale, &heads)? };
        self.linear(out, &layer.attention_out, self.activations(&self.work.x, inputs.count, self.shape.width), true)
    }

    /// Adds the feed-forward block to the residual stream: x += feed-forward(n).
    fn feed_forward(&self, layer: &Layer, tokens: usize) -> Result<()> {
        let Shape { width, inner, .. } = self.shape;
        let n = self.activations(&self.work.n, tokens, width);
        let up = self.activations(&self.work.wide, tokens, self.shape.up_width());
        let narrow = self.activations(&self.work.narrow, tokens, inner);
        let size = [tokens, inner];
        if self.shape.activation == Activation::GeluTanh {
            self.linear_with_gelu(n, &layer.up, up)?;
        } else {
            self.linear(n, &layer.up, up, false)?;
        }
        // SAFETY: `up` holds `most_tokens` rows of one inner width, or of two if the activation is gated; `narrow`
        // holds rows of one
        unsafe {
            match self.shape.activation {
                Activation::SwiGlu => self.kernels.swiglu(up.pointer, narrow.pointer, size)?,
                Activation::GeGlu => self.kernels.geglu(up.pointer, narrow.pointer, size)?,
                Activation::GeluTanh => {}
                Activation::Gelu => self.kernels.gelu(up.pointer, size)?,
            }
        }
        let activated = if self.shape.gated() { narrow } else { up };
        self.linear(activated, &layer.down, self.activations(&self.work.x, tokens, width), true)
    }

    fn activations(&self, buffer: &Buffer, rows: usize, columns: usize) -> Matrix {
        Matrix { pointer: buffer.pointer(), element: self.element, rows, columns, stride: columns }
    }

    fn linear(&self, from: Matrix, linear: &Linear, to: Matrix, add: bool) -> Result<()> {
        if let (Some(b), Some([rows, scales])) = (linear.scaled(), &self.work.eight) {
            let (padded, columns) = (Numbers::Fp8.rows(from.rows), from.columns);
            let a = Scaled { pointer: rows.pointer(), scales: scales.pointer(), rows: padded, columns };
            let product = ScaledProduct { a, b, d: Matrix { rows: padded, ..to }, bias: linear.bias(), add };
            // SAFETY: the buffers hold `most_tokens` rows of the widest input; activations and weights as below
            return unsafe {
                self.kernels.quantise(from.pointer, a.pointer, a.scales, [from.rows, columns])?;
                self.device.scaled_product(Stream::Pass, &product)
            };
        }
        let product = Product { a: from, b: linear.matrix(self.element), d: to, bias: linear.bias(), add, gelu: false };
        // SAFETY: activations hold `most_tokens` rows, and weights have the sizes of their shapes
        unsafe { self.device.product(Stream::Pass, &product) }
    }

    /// Computes to = GELU(linear(from)). The product applies GELU itself if the device supports that; otherwise a
    /// kernel does it afterwards.
    fn linear_with_gelu(&self, from: Matrix, linear: &Linear, to: Matrix) -> Result<()> {
        let product =
            Product { a: from, b: linear.matrix(self.element), d: to, bias: linear.bias(), add: false, gelu: true };
        if linear.scaled().is_none() && self.device.ends_in_gelu(&product)? {
            // SAFETY: activations hold `most_tokens` rows, and weights have the sizes of their shapes
            return unsafe { self.device.product(Stream::Pass, &product) };
        }
        self.linear(from, linear, to, false)?;
        // SAFETY: the buffer holds `most_tokens` rows of this width
        unsafe { self.kernels.gelu_new(to.pointer, [to.rows, to.columns]) }
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // The stream may still use memory that is freed now. A device that fails uses none.
        if let Ok(event) = self.device.record(Stream::Pass) {
            let _ = self.device.wait(event);
        }
    }
}

fn check_rope(shape: &Shape, rope: Option<Rope<'_>>) -> Result<()> {
    if !shape.rotates() {
        return Ok(());
    }
    let Some(Rope { cos, sin }) = rope else {
        return Err(input("rotary positions", "none", "tables of cosines and sines"));
    };
    let count = shape.positions * shape.head_dim / 2;
    if cos.len() == count && sin.len() == count {
        return Ok(());
    }
    let valid = format!("{count}: {} positions, half of {} each", shape.positions, shape.head_dim);
    Err(input("rotary positions", format!("{} and {}", cos.len(), sin.len()), valid))
}
