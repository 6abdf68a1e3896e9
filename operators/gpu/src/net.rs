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

mod hidden_states;
pub mod kernels;
mod number_format;
mod random_weights;
mod shape;
mod upload;
mod weights;
mod widen;

use std::sync::Arc;

pub use number_format::NumberFormat;
pub use random_weights::RandomWeights;
pub use shape::{Activation, Architecture, Shape};
pub use weights::Source;
pub use widen::{STAGES_BYTES, StorageFormat, StorageOrder, StoredTensor};

use crate::device::{Buffer, Device, Element, Matrix, Pinned, Product, Result, ScaledMatrix, ScaledProduct, Stream};
use crate::error::GpuError;
use hidden_states::HiddenStates;
use kernels::{ITEM_BYTES, Kernels, NormParams, RopeInputs, query_rows, work_items};
use shape::{INPUT_BYTES, ROW_BYTES};
use upload::{UploadRing, write_words};
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
    fp8_input: Option<[Buffer; 2]>,
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
    rope_tables: Option<[Buffer; 2]>,
    work: Workspace,
    input_upload: UploadRing,
    row_upload: UploadRing,
    max_tokens: usize,
    /// Tokens of the last pass.
    tokens: usize,
    /// Pinned memory for hidden states, reused between passes.
    states_memory: Option<Pinned>,
}

fn invalid(what: &'static str, got: impl ToString, valid: impl Into<String>) -> GpuError {
    GpuError::Input { what, got: got.to_string(), valid: valid.into() }
}

impl Net {
    /// Loads a net and allocates buffers for passes over at most `max_tokens` tokens.
    ///
    /// # Errors
    /// If the device cannot compute this shape in this number format, if the weights do not match the shape, or if memory
    /// runs out.
    pub fn load(
        device: &Arc<dyn Device>,
        shape: Shape,
        number_format: impl Into<NumberFormat>,
        rope: Option<Rope<'_>>,
        source: &mut dyn Source,
        max_tokens: usize,
    ) -> Result<Self> {
        let number_format = number_format.into();
        number_format.check(device, &shape)?;
        check_rope(&shape, rope)?;
        Self::allocate_and_load(device, shape, number_format, max_tokens, || {
            let mut loader = Loader::new(device, &shape, number_format, source)?;
            let rope_tables = match rope.filter(|_| shape.rotates()) {
                Some(Rope { cos, sin }) => Some([loader.rope_table(cos)?, loader.rope_table(sin)?]),
                None => None,
            };
            Ok((rope_tables, loader.load()?))
        })
    }

    /// Allocates the buffers of a pass, then calls `load` for the weights.
    ///
    /// The buffers come first because the caller chooses their size: a caller that asks for too much gets the error
    /// before the weights are read.
    fn allocate_and_load(
        device: &Arc<dyn Device>,
        shape: Shape,
        number_format: NumberFormat,
        max_tokens: usize,
        load: impl FnOnce() -> Result<(Option<[Buffer; 2]>, Weights)>,
    ) -> Result<Self> {
        if max_tokens == 0 || u32::try_from(max_tokens).is_err() {
            return Err(invalid("tokens of a pass", max_tokens, "at least 1, below 2^32"));
        }
        let (element, fp8) = (number_format.element(), number_format == NumberFormat::Fp8);
        let bytes = |per_row: usize| Buffer::new(device, per_row * number_format.padded_rows(max_tokens));
        let [wide, narrow] = shape.work_widths().map(|width| width * element.bytes());
        let work = Workspace {
            x: bytes(shape.width * element.bytes())?,
            n: bytes(shape.width * element.bytes())?,
            wide: bytes(wide)?,
            narrow: bytes(narrow)?,
            inputs: Buffer::new(device, INPUT_BYTES * max_tokens)?,
            rows: Buffer::new(device, ROW_BYTES * max_tokens)?,
            fp8_input: if fp8 { Some([bytes(shape.widest_input())?, bytes(Element::F32.bytes())?]) } else { None },
        };
        let (rope_tables, weights) = load()?;
        Ok(Self {
            device: Arc::clone(device),
            kernels: Kernels::new(device, element),
            shape,
            element,
            weights,
            rope_tables,
            work,
            input_upload: UploadRing::new(device, INPUT_BYTES * max_tokens)?,
            row_upload: UploadRing::new(device, ROW_BYTES * max_tokens)?,
            max_tokens,
            tokens: 0,
            states_memory: None,
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
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
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
    /// [`Net::max_tokens`] tokens, or the device fails.
    pub fn hidden(&mut self, tokens: &[u32], offsets: &[u32]) -> Result<()> {
        self.pass(tokens, offsets, &mut HiddenStates::default())
    }

    /// As [`Net::hidden`], and returns the hidden states of these layers, f32 `[tokens, layers, H]`. Waits for the
    /// pass.
    ///
    /// Layer 0 is the output of the embeddings, layer k (1 to layers - 1) the output of the k-th layer, and layer `layers`
    /// the normalised states. The values are those of the device, rounded to [`Net::element`].
    ///
    /// # Errors
    /// As [`Net::hidden`], and if a layer does not exist.
    pub fn hidden_with_layers(&mut self, tokens: &[u32], offsets: &[u32], layers: &[usize]) -> Result<Vec<f32>> {
        if let Some(layer) = layers.iter().find(|layer| **layer > self.shape.layers) {
            return Err(invalid("layer of hidden states", layer, format!("0 to {}", self.shape.layers)));
        }
        let width = self.shape.width;
        let bytes = tokens.len() * width * self.element.bytes();
        let mut hidden_states = HiddenStates::new(&self.device, layers, bytes, self.states_memory.take())?;
        let ran = self.pass(tokens, offsets, &mut hidden_states);
        // Waits even after a failure: the stream may still write to this memory.
        let finished = self.device.record(Stream::Pass).and_then(|event| self.device.wait(event));
        ran.and(finished)?;
        let states = hidden_states.to_f32(self.element, tokens.len(), width);
        self.states_memory = hidden_states.memory;
        Ok(states)
    }

    fn pass(&mut self, tokens: &[u32], offsets: &[u32], hidden_states: &mut HiddenStates<'_>) -> Result<()> {
        self.check_runs(tokens, offsets)?;
        self.tokens = 0;
        if tokens.is_empty() {
            return Ok(());
        }
        let inputs = self.upload_inputs(tokens, offsets)?;
        let (kernels, work, width) = (&self.kernels, &self.work, self.shape.width);
        let (x, rows) = (work.x.pointer(), [inputs.count, width]);
        let wpe = self.weights.position_embedding.as_ref().map(Buffer::pointer);
        let wte = self.weights.token_embedding.matrix(self.element).pointer;
        // SAFETY: the buffers hold `max_tokens` rows; `check_runs` checked tokens and positions
        unsafe { kernels.embed([inputs.tokens, inputs.positions], wte, wpe, x, rows)? };
        let states = |buffer| self.activations(buffer, inputs.count, width);
        for (i, layer) in self.weights.layers.iter().enumerate() {
            hidden_states.copy_layer(self.device.as_ref(), i, states(&work.x))?;
            self.norm(&layer.before_attention, inputs.count)?;
            self.attention(i, layer, &inputs)?;
            self.norm(&layer.before_mlp, inputs.count)?;
            self.feed_forward(layer, inputs.count)?;
        }
        self.norm(&self.weights.final_norm, inputs.count)?;
        hidden_states.copy_layer(self.device.as_ref(), self.shape.layers, states(&work.n))?;
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

    /// As [`Net::logits`], with rows that begin `stride` floats apart. With the stride of
    /// [`logits_stride`](crate::logits_stride) the product is fast; what is behind the vocabulary in a row has no meaning.
    ///
    /// # Safety
    /// As [`Net::logits`], for rows of `stride` floats.
    ///
    /// # Errors
    /// As [`Net::logits`], and if the stride is shorter than a row.
    pub unsafe fn logits_into(&mut self, rows: &[u32], to: u64, stride: usize) -> Result<()> {
        if stride < self.shape.vocab {
            return Err(invalid("stride of logits", stride, format!("at least {}", self.shape.vocab)));
        }
        if rows.len() > self.max_tokens {
            return Err(invalid("rows of the head", rows.len(), format!("at most {}", self.max_tokens)));
        }
        if let Some(row) = rows.iter().find(|row| **row as usize >= self.tokens) {
            return Err(invalid("row of the head", row, format!("below {}, the tokens of the last pass", self.tokens)));
        }
        let Some(first) = rows.first() else { return Ok(()) };
        let width = self.shape.width;
        let in_place = self.work.n.pointer() + u64::from(*first) * (width * self.element.bytes()) as u64;
        let is_contiguous = rows.iter().zip(*first..).all(|(row, i)| *row == i);
        let mut states = self.activations(&self.work.narrow, rows.len(), width);
        if is_contiguous && in_place.is_multiple_of(PRODUCT_ALIGN) {
            states.pointer = in_place;
        } else {
            let row_numbers = self.work.rows.pointer();
            // SAFETY: the buffers hold `max_tokens` rows and row numbers; both were checked above
            unsafe {
                self.row_upload
                    .send(row_numbers, rows.len() * ROW_BYTES, |memory| write_words(rows, memory, u32::to_ne_bytes))?;
                self.kernels.gather(self.work.n.pointer(), row_numbers, states.pointer, [rows.len(), width])?;
            }
        }
        let head = self.weights.lm_head.as_ref().unwrap_or(&self.weights.token_embedding).matrix(self.element);
        // A row with room for them also gets the products of the head's zeros.
        let columns = if stride < head.rows { self.shape.vocab } else { head.rows };
        let head = Matrix { rows: columns, ..head };
        let d = Matrix { pointer: to, element: Element::F32, rows: rows.len(), columns, stride };
        // SAFETY: the net owns the states and the head; the caller guarantees the memory of the logits
        unsafe {
            self.device
                .product(Stream::Pass, &Product { a: states, b: head, d, bias: 0, accumulate: false, gelu: false })
        }
    }

    fn check_runs(&self, tokens: &[u32], offsets: &[u32]) -> Result<()> {
        let Shape { vocab, positions, .. } = self.shape;
        if tokens.len() > self.max_tokens {
            return Err(invalid("tokens of a pass", tokens.len(), format!("at most {}", self.max_tokens)));
        }
        if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
            return Err(invalid("token", token, format!("below {vocab}, the size of the vocabulary")));
        }
        let ends = (offsets.first().copied(), offsets.last().map(|end| *end as usize));
        if ends != (Some(0), Some(tokens.len())) || !offsets.is_sorted() {
            let got = format!("{} from {:?} to {:?}", offsets.len(), offsets.first(), offsets.last());
            return Err(invalid("offsets of runs", got, format!("ascending, from 0 to {}", tokens.len())));
        }
        let longest = offsets.windows(2).map(|run| run.iter().rev().fold(0, |end, x| x.abs_diff(end))).max();
        match longest {
            Some(longest) if longest as usize > positions => {
                Err(invalid("tokens of a run", longest, format!("at most {positions}")))
            }
            _ => Ok(()),
        }
    }

    /// Uploads the inputs of a pass in one copy: work items of attention, tokens, positions.
    fn upload_inputs(&mut self, tokens: &[u32], offsets: &[u32]) -> Result<Inputs> {
        let items = work_items(offsets, query_rows(self.element, self.shape.heads().dim));
        let (count, token_bytes) = (tokens.len(), size_of_val(tokens));
        let start = self.work.inputs.pointer();
        let item_bytes = items.len() * ITEM_BYTES;
        let fill = |memory: &mut [u8]| {
            let (item_memory, memory) = memory.split_at_mut(item_bytes);
            let (token_memory, memory) = memory.split_at_mut(token_bytes);
            write_words(items.as_flattened(), item_memory, u32::to_ne_bytes);
            write_words(tokens, token_memory, u32::to_ne_bytes);
            let positions = offsets.windows(2).flat_map(|run| run.iter().skip(1).zip(run).flat_map(|(e, s)| 0..e - s));
            for (to, position) in memory.chunks_exact_mut(size_of::<u32>()).zip(positions) {
                to.copy_from_slice(&position.to_ne_bytes());
            }
        };
        // SAFETY: every item has at least one token, so items never outnumber tokens; the buffer is sized for
        // `max_tokens`
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
        let params = NormParams { weight: norm.weight.pointer(), bias, eps: self.shape.eps };
        let (x, n) = (self.work.x.pointer(), self.work.n.pointer());
        // SAFETY: both buffers hold `max_tokens` rows
        unsafe { self.kernels.add_norm(x, None, &params, n, [tokens, self.shape.width]) }
    }

    /// Adds attention to the residual stream: x += the output projection of attention over n.
    fn attention(&self, number: usize, layer: &Layer, inputs: &Inputs) -> Result<()> {
        let (heads, [qkv_width, out_width]) = (self.shape.heads(), self.shape.attention_widths());
        let qkv = self.activations(&self.work.wide, inputs.count, qkv_width);
        let out = self.activations(&self.work.narrow, inputs.count, out_width);
        let n = self.activations(&self.work.n, inputs.count, self.shape.width);
        self.linear(n, &layer.qkv, qkv, false)?;
        if let Some([cos, sin]) = &self.rope_tables {
            let norms = layer.head_norms.as_ref().map(|[q, k]| [q.pointer(), k.pointer()]);
            let (cos, sin, eps) = (cos.pointer(), sin.pointer(), self.shape.eps);
            let rotation = RopeInputs { cos, sin, positions: inputs.positions, norms, eps };
            // SAFETY: the buffer holds `inputs.count` fused rows; `check_runs` checked that positions are within the
            // tables
            unsafe { self.kernels.rope(qkv.pointer, &rotation, &heads, inputs.count)? };
        }
        let items = [inputs.items, inputs.item_count as u64];
        let scale = self.shape.score_scale(number);
        // SAFETY: the items refer to these rows, and the output buffer holds `max_tokens` rows
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
        // SAFETY: `up` holds `max_tokens` rows of one inner width, or of two if the activation is gated; `narrow`
        // holds rows of one
        unsafe {
            match self.shape.activation {
                Activation::SwiGlu => self.kernels.swiglu(up.pointer, narrow.pointer, size)?,
                Activation::GeGlu => self.kernels.geglu(up.pointer, narrow.pointer, size)?,
                Activation::GeluTanh => {}
                Activation::Gelu => self.kernels.gelu(up.pointer, size)?,
            }
        }
        let activated = if self.shape.is_gated() { narrow } else { up };
        self.linear(activated, &layer.down, self.activations(&self.work.x, tokens, width), true)
    }

    fn activations(&self, buffer: &Buffer, rows: usize, columns: usize) -> Matrix {
        Matrix { pointer: buffer.pointer(), element: self.element, rows, columns, stride: columns }
    }

    fn linear(&self, from: Matrix, linear: &Linear, to: Matrix, accumulate: bool) -> Result<()> {
        if let (Some(b), Some([rows, scales])) = (linear.scaled(), &self.work.fp8_input) {
            let (padded, columns) = (NumberFormat::Fp8.padded_rows(from.rows), from.columns);
            let a = ScaledMatrix { pointer: rows.pointer(), scales: scales.pointer(), rows: padded, columns };
            let product = ScaledProduct { a, b, d: Matrix { rows: padded, ..to }, bias: linear.bias(), accumulate };
            // SAFETY: the buffers hold `max_tokens` rows of the widest input; activations and weights as below
            return unsafe {
                self.kernels.quantise(from.pointer, a.pointer, a.scales, [from.rows, columns])?;
                self.device.scaled_product(Stream::Pass, &product)
            };
        }
        let product =
            Product { a: from, b: linear.matrix(self.element), d: to, bias: linear.bias(), accumulate, gelu: false };
        // SAFETY: activations hold `max_tokens` rows, and weights have the sizes of their shapes
        unsafe { self.device.product(Stream::Pass, &product) }
    }

    /// Computes to = GELU(linear(from)). The product applies GELU itself if the device supports that; otherwise a
    /// kernel does it afterwards.
    fn linear_with_gelu(&self, from: Matrix, linear: &Linear, to: Matrix) -> Result<()> {
        let product = Product {
            a: from,
            b: linear.matrix(self.element),
            d: to,
            bias: linear.bias(),
            accumulate: false,
            gelu: true,
        };
        if linear.scaled().is_none() && self.device.fuses_gelu(&product)? {
            // SAFETY: activations hold `max_tokens` rows, and weights have the sizes of their shapes
            return unsafe { self.device.product(Stream::Pass, &product) };
        }
        self.linear(from, linear, to, false)?;
        // SAFETY: the buffer holds `max_tokens` rows of this width
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
        return Err(invalid("rotary positions", "none", "tables of cosines and sines"));
    };
    let count = shape.positions * shape.head_dim / 2;
    if cos.len() == count && sin.len() == count {
        return Ok(());
    }
    let valid = format!("{count}: {} positions, half of {} each", shape.positions, shape.head_dim);
    Err(invalid("rotary positions", format!("{} and {}", cos.len(), sin.len()), valid))
}
