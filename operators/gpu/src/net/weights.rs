//! Loads weights onto the device, all as `[out, in]`. Weights that one product uses together are stacked.
//!
//! Attention is compiled for some head dimensions only. Other heads are padded to the next larger one: each half of a
//! head begins at the beginning of a padded half, with zeros after it. This holds for q, k, v and the input of the
//! output projection. The zeros change no sum.

use std::sync::Arc;

use super::Numbers;
use super::kernels::{Axis, Heads, Kernels};
use super::shape::{Kind, Shape};
use super::widen::{Stages, Stored, Target};
use crate::device::{Buffer, Device, Element, Matrix, Result, Scaled, Stream};
use crate::error::GpuError;

/// A source of weights.
pub trait Source {
    /// Returns the tensor of this name and shape, row-major.
    ///
    /// Names are those of Hugging Face checkpoints, without the prefix of files that hold a whole model
    /// (`transformer.`, `model.`): `h.0.ln_1.weight`, `layers.0.self_attn.q_proj.weight`, `lm_head.weight`. The loader
    /// requests each tensor once.
    ///
    /// # Errors
    /// If there is no such tensor, or it has another shape.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>>;

    /// As [`Source::tensor`], in the format in which the source stores it; the device widens it. The default returns
    /// f32 numbers.
    ///
    /// # Errors
    /// As [`Source::tensor`].
    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<Stored<'_>> {
        self.tensor(name, shape).map(Stored::Numbers)
    }
}

/// A linear map `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Buffer,
    /// Scales of the outputs `[outputs]`, if the weight is e4m3.
    scales: Option<Buffer>,
    bias: Option<Buffer>,
    outputs: usize,
    inputs: usize,
}

impl Linear {
    pub fn of(weight: Buffer, bias: Option<Buffer>, [outputs, inputs]: [usize; 2]) -> Self {
        Self { weight, scales: None, bias, outputs, inputs }
    }

    /// Converts the weight to the number format of its products.
    pub fn in_numbers(self, numbers: Numbers, device: &Arc<dyn Device>, kernels: &Kernels) -> Result<Self> {
        if numbers != Numbers::Fp8 {
            return Ok(self);
        }
        let Self { weight, bias, outputs, inputs, .. } = self;
        if weight.bytes() < outputs * inputs * numbers.element().bytes() || !inputs.is_multiple_of(16) {
            let valid = format!("[{outputs}, {inputs}], a width that is a multiple of 16");
            return Err(GpuError::Input { what: "rows of e4m3", got: format!("{} bytes", weight.bytes()), valid });
        }
        let eight = Buffer::new(device, outputs * inputs)?;
        let scales = Buffer::new(device, outputs * size_of::<f32>())?;
        // SAFETY: the weight's size is checked above, and the two other buffers are allocated for these sizes
        unsafe { kernels.quantise(weight.pointer(), eight.pointer(), scales.pointer(), [outputs, inputs])? };
        // Waits because the 16-bit weight is freed here.
        device.wait(device.record(Stream::Pass)?)?;
        Ok(Self { weight: eight, scales: Some(scales), bias, outputs, inputs })
    }

    pub fn matrix(&self, element: Element) -> Matrix {
        let Self { outputs, inputs, .. } = *self;
        Matrix { pointer: self.weight.pointer(), element, rows: outputs, columns: inputs, stride: inputs }
    }

    /// The weight as an e4m3 matrix, if it is one.
    pub fn scaled(&self) -> Option<Scaled> {
        let scales = self.scales.as_ref()?.pointer();
        Some(Scaled { pointer: self.weight.pointer(), scales, rows: self.outputs, columns: self.inputs })
    }

    /// The address of the bias; 0 if there is none.
    pub fn bias(&self) -> u64 {
        self.bias.as_ref().map_or(0, Buffer::pointer)
    }
}

#[derive(Debug)]
pub(super) struct Norm {
    pub weight: Buffer,
    pub bias: Option<Buffer>,
}

#[derive(Debug)]
pub(super) struct Layer {
    pub before_attention: Norm,
    pub qkv: Linear,
    /// Norms of the query and key heads.
    pub head_norms: Option<[Buffer; 2]>,
    pub attention_out: Linear,
    pub before_mlp: Norm,
    pub up: Linear,
    pub down: Linear,
}

#[derive(Debug)]
pub(super) struct Weights {
    pub tokens: Linear,
    pub positions: Option<Buffer>,
    pub layers: Vec<Layer>,
    pub last: Norm,
    /// The LM head, if it is not tied to the embedding.
    pub head: Option<Linear>,
}

/// Loads weights onto a device, one part of a tensor at a time.
pub(super) struct Loader<'a> {
    device: &'a Arc<dyn Device>,
    shape: &'a Shape,
    numbers: Numbers,
    source: &'a mut dyn Source,
    stages: Stages,
}

/// A dimension of a weight: a number of heads, each padded from `own` to `dim` elements.
#[derive(Clone, Copy)]
struct Places {
    heads: usize,
    axis: Axis,
}

impl Places {
    /// Elements in the model.
    fn own(self) -> usize {
        self.heads * self.axis.own
    }

    /// Elements in the weight on the device, with padding.
    fn all(self) -> usize {
        self.heads * self.axis.dim
    }

    fn is_filled_up(self) -> bool {
        self.axis.own != self.axis.dim
    }
}

/// A dimension that is not split into heads.
fn whole(size: usize) -> Places {
    Places { heads: 1, axis: Axis { own: size, dim: size } }
}

impl<'a> Loader<'a> {
    pub fn new(
        device: &'a Arc<dyn Device>,
        shape: &'a Shape,
        numbers: Numbers,
        source: &'a mut dyn Source,
    ) -> Result<Self> {
        let stages = Stages::new(device, numbers.element())?;
        Ok(Self { device, shape, numbers, source, stages })
    }

    pub fn load(mut self) -> Result<Weights> {
        let Shape { vocab, width, layers, tied, .. } = *self.shape;
        let gpt2 = self.shape.kind == Kind::Gpt2;
        let [tokens, last] = if gpt2 { ["wte.weight", "ln_f"] } else { ["embed_tokens.weight", "norm"] };
        let tokens = self.table(tokens, vocab, width)?;
        let positions = if gpt2 { Some(self.table("wpe.weight", self.shape.positions, width)?.weight) } else { None };
        let layers = (0..layers)
            .map(|i| if gpt2 { self.gpt2_layer(&format!("h.{i}.")) } else { self.llama_layer(&format!("layers.{i}.")) })
            .collect::<Result<_>>()?;
        let last = self.norm(last)?;
        let head = if tied { None } else { Some(self.table("lm_head.weight", vocab, width)?) };
        Ok(Weights { tokens, positions, layers, last, head })
    }

    fn gpt2_layer(&mut self, at: &str) -> Result<Layer> {
        let Shape { width, inner, .. } = *self.shape;
        let [q, _] = self.places();
        let fused = Places { heads: 3 * q.heads, ..q };
        Ok(Layer {
            before_attention: self.norm(&format!("{at}ln_1"))?,
            qkv: self.conv1d(&format!("{at}attn.c_attn"), whole(width), fused)?,
            head_norms: None,
            attention_out: self.conv1d(&format!("{at}attn.c_proj"), q, whole(width))?,
            before_mlp: self.norm(&format!("{at}ln_2"))?,
            up: self.conv1d(&format!("{at}mlp.c_fc"), whole(width), whole(inner))?,
            down: self.conv1d(&format!("{at}mlp.c_proj"), whole(inner), whole(width))?,
        })
    }

    fn llama_layer(&mut self, at: &str) -> Result<Layer> {
        let Shape { width, inner, attention_bias, mlp_bias, kind, .. } = *self.shape;
        let [q, kv] = self.places();
        let (attention, mlp) = (format!("{at}self_attn."), format!("{at}mlp."));
        let qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let gate_up = ["gate_proj", "up_proj"].map(|name| (name, whole(inner)));
        let head_norms = match kind {
            Kind::Qwen3 => Some([self.head_norm(&attention, "q_norm")?, self.head_norm(&attention, "k_norm")?]),
            Kind::Gpt2 | Kind::Llama => None,
        };
        Ok(Layer {
            before_attention: self.norm(&format!("{at}input_layernorm"))?,
            qkv: self.stacked(&attention, &qkv, whole(width), attention_bias)?,
            head_norms,
            attention_out: self.stacked(&attention, &[("o_proj", whole(width))], q, attention_bias)?,
            before_mlp: self.norm(&format!("{at}post_attention_layernorm"))?,
            up: self.stacked(&mlp, &gate_up, whole(width), mlp_bias)?,
            down: self.stacked(&mlp, &[("down_proj", whole(width))], whole(inner), mlp_bias)?,
        })
    }

    /// Linear maps of the same input, stacked along their outputs.
    fn stacked(&mut self, at: &str, parts: &[(&str, Places)], inputs: Places, bias: bool) -> Result<Linear> {
        let outputs = parts.iter().map(|(_, places)| places.all()).sum();
        let is_filled_up = inputs.is_filled_up() || parts.iter().any(|(_, places)| places.is_filled_up());
        let weight = self.buffer(outputs * inputs.all(), is_filled_up)?;
        let biases = if bias { Some(self.buffer(outputs, is_filled_up)?) } else { None };
        let mut first = 0;
        for (name, places) in parts {
            let strides = [inputs.all(), 1];
            self.put(&weight, first * inputs.all(), &format!("{at}{name}.weight"), [*places, inputs], strides)?;
            if let Some(biases) = &biases {
                self.put_vector(biases, first, &format!("{at}{name}.bias"), *places)?;
            }
            first += places.all();
        }
        self.linear(weight, biases, outputs, inputs.all())
    }

    /// GPT-2's `Conv1D`, stored `[inputs, outputs]`, transposed.
    fn conv1d(&mut self, name: &str, inputs: Places, outputs: Places) -> Result<Linear> {
        let is_filled_up = inputs.is_filled_up() || outputs.is_filled_up();
        let weight = self.buffer(outputs.all() * inputs.all(), is_filled_up)?;
        self.put(&weight, 0, &format!("{name}.weight"), [inputs, outputs], [1, inputs.all()])?;
        let bias = Some(self.vector(&format!("{name}.bias"), outputs)?);
        self.linear(weight, bias, outputs.all(), inputs.all())
    }

    /// Makes a linear map of a loaded weight, in the number format of its products.
    fn linear(&self, weight: Buffer, bias: Option<Buffer>, outputs: usize, inputs: usize) -> Result<Linear> {
        Linear::of(weight, bias, [outputs, inputs]).in_numbers(self.numbers, self.device, self.stages.kernels())
    }

    fn table(&mut self, name: &str, rows: usize, width: usize) -> Result<Linear> {
        let weight = self.buffer(rows * width, false)?;
        self.put(&weight, 0, name, [whole(rows), whole(width)], [width, 1])?;
        Ok(Linear { weight, scales: None, bias: None, outputs: rows, inputs: width })
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let width = whole(self.shape.width);
        let weight = self.vector(&format!("{name}.weight"), width)?;
        let bias = match self.shape.kind {
            Kind::Gpt2 => Some(self.vector(&format!("{name}.bias"), width)?),
            Kind::Llama | Kind::Qwen3 => None,
        };
        Ok(Norm { weight, bias })
    }

    fn head_norm(&mut self, at: &str, name: &str) -> Result<Buffer> {
        let [q, _] = self.places();
        self.vector(&format!("{at}{name}.weight"), Places { heads: 1, ..q })
    }

    fn vector(&mut self, name: &str, places: Places) -> Result<Buffer> {
        let buffer = self.buffer(places.all(), places.is_filled_up())?;
        self.put_vector(&buffer, 0, name, places)?;
        Ok(buffer)
    }

    /// A table of cosines or sines `[positions, D/2]`. Always f32, whatever the dtype of the weights.
    pub fn table_of_angles(&mut self, values: &[f32]) -> Result<Buffer> {
        let Heads { dim, own_dim, .. } = self.shape.heads();
        let mut bytes = vec![0; values.len() / (own_dim / 2) * (dim / 2) * size_of::<f32>()];
        let rows = bytes.chunks_exact_mut(dim / 2 * size_of::<f32>()).zip(values.chunks_exact(own_dim / 2));
        for (to, row) in rows {
            super::upload::put(row, to, f32::to_ne_bytes);
        }
        Buffer::of(self.device, &bytes)
    }

    /// The dimensions of the query heads, and of the key or value heads.
    fn places(&self) -> [Places; 2] {
        let Heads { heads, kv_heads, dim, own_dim } = self.shape.heads();
        [heads, kv_heads].map(|heads| Places { heads, axis: Axis { own: own_dim, dim } })
    }

    /// Allocates `elements` elements; clears them if padding leaves some of them unwritten.
    fn buffer(&mut self, elements: usize, is_filled_up: bool) -> Result<Buffer> {
        let buffer = Buffer::new(self.device, elements * self.numbers.element().bytes())?;
        if is_filled_up {
            self.stages.clear(&buffer)?;
        }
        Ok(buffer)
    }

    fn put_vector(&mut self, to: &Buffer, first: usize, name: &str, places: Places) -> Result<()> {
        let stored = self.source.stored(name, &[places.own()])?;
        let target = target(to, self.numbers.element(), first, [places, whole(1)], [1, 1])?;
        // SAFETY: `target` checked that the target is within the buffer
        unsafe { self.stages.send(name, &stored, &target) }
    }

    /// Loads a tensor of this shape into the buffer, from element `first` on.
    fn put(&mut self, to: &Buffer, first: usize, name: &str, shape: [Places; 2], strides: [usize; 2]) -> Result<()> {
        let stored = self.source.stored(name, &shape.map(Places::own))?;
        let target = target(to, self.numbers.element(), first, shape, strides)?;
        // SAFETY: `target` checked that the target is within the buffer
        unsafe { self.stages.send(name, &stored, &target) }
    }
}

/// The target of a tensor in a buffer, checked to be within it.
fn target(to: &Buffer, element: Element, first: usize, shape: [Places; 2], strides: [usize; 2]) -> Result<Target> {
    let last = shape.iter().zip(strides).map(|(places, stride)| (places.all() - 1) * stride).sum::<usize>();
    let end = (first + last + 1) * element.bytes();
    if end > to.bytes() {
        let valid = format!("what {} bytes hold", to.bytes());
        return Err(GpuError::Input { what: "bytes of a weight", got: end.to_string(), valid });
    }
    let to = to.pointer() + (first * element.bytes()) as u64;
    Ok(Target { to, size: shape.map(Places::own), axes: shape.map(|places| places.axis), strides })
}
