//! Loads weights onto the device, all as `[out, in]`. Weights that one product uses together are stacked.
//!
//! Attention is compiled for some head dimensions only. Other heads are padded to the next larger one: each half of a
//! head begins at the beginning of a padded half, with zeros after it. This holds for q, k, v and the input of the
//! output projection. The zeros change no sum.

use std::sync::Arc;

use super::NumberFormat;
use super::kernels::{HeadPadding, Heads, Kernels};
use super::shape::{Architecture, Shape};
use super::widen::{Stages, StoredTensor, Target};
use crate::device::{Buffer, Device, Element, Matrix, Result, ScaledMatrix, Stream};
use crate::error::GpuError;
use crate::slices::logits_stride;

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
    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>> {
        self.tensor(name, shape).map(StoredTensor::F32)
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
    pub fn new(weight: Buffer, bias: Option<Buffer>, [outputs, inputs]: [usize; 2]) -> Self {
        Self { weight, scales: None, bias, outputs, inputs }
    }

    /// Converts the weight to the number format of its products.
    pub fn into_format(self, number_format: NumberFormat, device: &Arc<dyn Device>, kernels: &Kernels) -> Result<Self> {
        if number_format != NumberFormat::Fp8 {
            return Ok(self);
        }
        let Self { weight, bias, outputs, inputs, .. } = self;
        if weight.bytes() < outputs * inputs * number_format.element().bytes() || !inputs.is_multiple_of(16) {
            let valid = format!("[{outputs}, {inputs}], a width that is a multiple of 16");
            return Err(GpuError::Input { what: "rows of e4m3", got: format!("{} bytes", weight.bytes()), valid });
        }
        let quantised = Buffer::new(device, outputs * inputs)?;
        let scales = Buffer::new(device, outputs * size_of::<f32>())?;
        // SAFETY: the weight's size is checked above, and the two other buffers are allocated for these sizes
        unsafe { kernels.quantise(weight.pointer(), quantised.pointer(), scales.pointer(), [outputs, inputs])? };
        // Waits because the 16-bit weight is freed here.
        device.wait(device.record(Stream::Pass)?)?;
        Ok(Self { weight: quantised, scales: Some(scales), bias, outputs, inputs })
    }

    pub fn matrix(&self, element: Element) -> Matrix {
        let Self { outputs, inputs, .. } = *self;
        Matrix { pointer: self.weight.pointer(), element, rows: outputs, columns: inputs, stride: inputs }
    }

    /// The weight as an e4m3 matrix, if it is one.
    pub fn scaled(&self) -> Option<ScaledMatrix> {
        let scales = self.scales.as_ref()?.pointer();
        Some(ScaledMatrix { pointer: self.weight.pointer(), scales, rows: self.outputs, columns: self.inputs })
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
    pub token_embedding: Linear,
    pub position_embedding: Option<Buffer>,
    pub layers: Vec<Layer>,
    pub final_norm: Norm,
    /// The LM head, if it is not tied to the embedding.
    pub lm_head: Option<Linear>,
}

/// Loads weights onto a device, one part of a tensor at a time.
pub(super) struct Loader<'a> {
    device: &'a Arc<dyn Device>,
    shape: &'a Shape,
    number_format: NumberFormat,
    source: &'a mut dyn Source,
    stages: Stages,
}

/// A dimension of a weight: a number of heads, each padded from `own` to `dim` elements.
#[derive(Clone, Copy)]
struct PaddedDim {
    heads: usize,
    padding: HeadPadding,
}

impl PaddedDim {
    /// Elements in the model.
    fn model_len(self) -> usize {
        self.heads * self.padding.model
    }

    /// Elements in the weight on the device, with padding.
    fn padded_len(self) -> usize {
        self.heads * self.padding.padded
    }

    fn is_padded(self) -> bool {
        self.padding.model != self.padding.padded
    }
}

/// A dimension that is not split into heads.
fn unpadded(size: usize) -> PaddedDim {
    PaddedDim { heads: 1, padding: HeadPadding { model: size, padded: size } }
}

impl<'a> Loader<'a> {
    pub fn new(
        device: &'a Arc<dyn Device>,
        shape: &'a Shape,
        number_format: NumberFormat,
        source: &'a mut dyn Source,
    ) -> Result<Self> {
        let stages = Stages::new(device, number_format.element())?;
        Ok(Self { device, shape, number_format, source, stages })
    }

    pub fn load(mut self) -> Result<Weights> {
        let Shape { width, layers, tied, .. } = *self.shape;
        let gpt2 = self.shape.architecture == Architecture::Gpt2;
        let [embedding_name, final_norm_name] =
            if gpt2 { ["wte.weight", "ln_f"] } else { ["embed_tokens.weight", "norm"] };
        let token_embedding = self.token_table(embedding_name)?;
        let position_embedding = if gpt2 {
            let positions = [unpadded(self.shape.positions), unpadded(width)];
            let table = self.buffer(self.shape.positions * width, false)?;
            self.load_into(&table, 0, "wpe.weight", positions, [width, 1])?;
            Some(table)
        } else {
            None
        };
        let layers = (0..layers)
            .map(|i| if gpt2 { self.gpt2_layer(&format!("h.{i}.")) } else { self.llama_layer(&format!("layers.{i}.")) })
            .collect::<Result<_>>()?;
        let final_norm = self.norm(final_norm_name)?;
        let lm_head = if tied { None } else { Some(self.token_table("lm_head.weight")?) };
        Ok(Weights { token_embedding, position_embedding, layers, final_norm, lm_head })
    }

    fn gpt2_layer(&mut self, prefix: &str) -> Result<Layer> {
        let Shape { width, inner, .. } = *self.shape;
        let [q, _] = self.head_dims();
        let fused = PaddedDim { heads: 3 * q.heads, ..q };
        Ok(Layer {
            before_attention: self.norm(&format!("{prefix}ln_1"))?,
            qkv: self.conv1d(&format!("{prefix}attn.c_attn"), unpadded(width), fused)?,
            head_norms: None,
            attention_out: self.conv1d(&format!("{prefix}attn.c_proj"), q, unpadded(width))?,
            before_mlp: self.norm(&format!("{prefix}ln_2"))?,
            up: self.conv1d(&format!("{prefix}mlp.c_fc"), unpadded(width), unpadded(inner))?,
            down: self.conv1d(&format!("{prefix}mlp.c_proj"), unpadded(inner), unpadded(width))?,
        })
    }

    fn llama_layer(&mut self, prefix: &str) -> Result<Layer> {
        let Shape { width, inner, attention_bias, mlp_bias, architecture, .. } = *self.shape;
        let [q, kv] = self.head_dims();
        let (attention, mlp) = (format!("{prefix}self_attn."), format!("{prefix}mlp."));
        let qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let gate_up = ["gate_proj", "up_proj"].map(|name| (name, unpadded(inner)));
        let head_norms = match architecture {
            Architecture::Qwen3 => Some([self.head_norm(&attention, "q_norm")?, self.head_norm(&attention, "k_norm")?]),
            Architecture::Gpt2 | Architecture::Llama => None,
        };
        Ok(Layer {
            before_attention: self.norm(&format!("{prefix}input_layernorm"))?,
            qkv: self.stacked(&attention, &qkv, unpadded(width), attention_bias)?,
            head_norms,
            attention_out: self.stacked(&attention, &[("o_proj", unpadded(width))], q, attention_bias)?,
            before_mlp: self.norm(&format!("{prefix}post_attention_layernorm"))?,
            up: self.stacked(&mlp, &gate_up, unpadded(width), mlp_bias)?,
            down: self.stacked(&mlp, &[("down_proj", unpadded(width))], unpadded(inner), mlp_bias)?,
        })
    }

    /// Linear maps of the same input, stacked along their outputs.
    fn stacked(&mut self, prefix: &str, parts: &[(&str, PaddedDim)], inputs: PaddedDim, bias: bool) -> Result<Linear> {
        let outputs = parts.iter().map(|(_, dim)| dim.padded_len()).sum();
        let is_padded = inputs.is_padded() || parts.iter().any(|(_, dim)| dim.is_padded());
        let weight = self.buffer(outputs * inputs.padded_len(), is_padded)?;
        let biases = if bias { Some(self.buffer(outputs, is_padded)?) } else { None };
        let mut first = 0;
        for (name, dim) in parts {
            let strides = [inputs.padded_len(), 1];
            self.load_into(
                &weight,
                first * inputs.padded_len(),
                &format!("{prefix}{name}.weight"),
                [*dim, inputs],
                strides,
            )?;
            if let Some(biases) = &biases {
                self.load_vector_into(biases, first, &format!("{prefix}{name}.bias"), *dim)?;
            }
            first += dim.padded_len();
        }
        self.linear(weight, biases, outputs, inputs.padded_len())
    }

    /// GPT-2's `Conv1D`, stored `[inputs, outputs]`, transposed.
    fn conv1d(&mut self, name: &str, inputs: PaddedDim, outputs: PaddedDim) -> Result<Linear> {
        let is_padded = inputs.is_padded() || outputs.is_padded();
        let weight = self.buffer(outputs.padded_len() * inputs.padded_len(), is_padded)?;
        self.load_into(&weight, 0, &format!("{name}.weight"), [inputs, outputs], [1, inputs.padded_len()])?;
        let bias = Some(self.vector(&format!("{name}.bias"), outputs)?);
        self.linear(weight, bias, outputs.padded_len(), inputs.padded_len())
    }

    /// Makes a linear map of a loaded weight, in the number format of its products.
    fn linear(&self, weight: Buffer, bias: Option<Buffer>, outputs: usize, inputs: usize) -> Result<Linear> {
        Linear::new(weight, bias, [outputs, inputs]).into_format(self.number_format, self.device, self.stages.kernels())
    }

    /// The embedding of tokens or the LM head: a row for each token, then rows of zeros, see [`logits_stride`].
    fn token_table(&mut self, name: &str) -> Result<Linear> {
        let Shape { vocab, width, .. } = *self.shape;
        let outputs = logits_stride(vocab);
        let weight = self.buffer(outputs * width, outputs > vocab)?;
        self.load_into(&weight, 0, name, [unpadded(vocab), unpadded(width)], [width, 1])?;
        Ok(Linear::new(weight, None, [outputs, width]))
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let width = unpadded(self.shape.width);
        let weight = self.vector(&format!("{name}.weight"), width)?;
        let bias = match self.shape.architecture {
            Architecture::Gpt2 => Some(self.vector(&format!("{name}.bias"), width)?),
            Architecture::Llama | Architecture::Qwen3 => None,
        };
        Ok(Norm { weight, bias })
    }

    fn head_norm(&mut self, prefix: &str, name: &str) -> Result<Buffer> {
        let [q, _] = self.head_dims();
        self.vector(&format!("{prefix}{name}.weight"), PaddedDim { heads: 1, ..q })
    }

    fn vector(&mut self, name: &str, dim: PaddedDim) -> Result<Buffer> {
        let buffer = self.buffer(dim.padded_len(), dim.is_padded())?;
        self.load_vector_into(&buffer, 0, name, dim)?;
        Ok(buffer)
    }

    /// A table of cosines or sines `[positions, D/2]`. Always f32, whatever the dtype of the weights.
    pub fn rope_table(&mut self, values: &[f32]) -> Result<Buffer> {
        let Heads { dim, model_dim, .. } = self.shape.heads();
        let mut bytes = vec![0; values.len() / (model_dim / 2) * (dim / 2) * size_of::<f32>()];
        let rows = bytes.chunks_exact_mut(dim / 2 * size_of::<f32>()).zip(values.chunks_exact(model_dim / 2));
        for (to, row) in rows {
            super::upload::write_words(row, to, f32::to_ne_bytes);
        }
        Buffer::from_bytes(self.device, &bytes)
    }

    /// The dimensions of the query heads, and of the key or value heads.
    fn head_dims(&self) -> [PaddedDim; 2] {
        let Heads { heads, kv_heads, dim, model_dim } = self.shape.heads();
        [heads, kv_heads].map(|heads| PaddedDim { heads, padding: HeadPadding { model: model_dim, padded: dim } })
    }

    /// Allocates `elements` elements; clears them if padding leaves some of them unwritten.
    fn buffer(&mut self, elements: usize, is_padded: bool) -> Result<Buffer> {
        let buffer = Buffer::new(self.device, elements * self.number_format.element().bytes())?;
        if is_padded {
            self.stages.clear(&buffer)?;
        }
        Ok(buffer)
    }

    fn load_vector_into(&mut self, to: &Buffer, first: usize, name: &str, dim: PaddedDim) -> Result<()> {
        let stored = self.source.stored(name, &[dim.model_len()])?;
        let target = target(to, self.number_format.element(), first, [dim, unpadded(1)], [1, 1])?;
        // SAFETY: `target` checked that the target is within the buffer
        unsafe { self.stages.load(name, &stored, &target) }
    }

    /// Loads a tensor of this shape into the buffer, from element `first` on.
    fn load_into(
        &mut self,
        to: &Buffer,
        first: usize,
        name: &str,
        shape: [PaddedDim; 2],
        strides: [usize; 2],
    ) -> Result<()> {
        let stored = self.source.stored(name, &shape.map(PaddedDim::model_len))?;
        let target = target(to, self.number_format.element(), first, shape, strides)?;
        // SAFETY: `target` checked that the target is within the buffer
        unsafe { self.stages.load(name, &stored, &target) }
    }
}

/// The target of a tensor in a buffer, checked to be within it.
fn target(to: &Buffer, element: Element, first: usize, shape: [PaddedDim; 2], strides: [usize; 2]) -> Result<Target> {
    let last = shape.iter().zip(strides).map(|(dim, stride)| (dim.padded_len() - 1) * stride).sum::<usize>();
    let end = (first + last + 1) * element.bytes();
    if end > to.bytes() {
        let valid = format!("what {} bytes hold", to.bytes());
        return Err(GpuError::Input { what: "bytes of a weight", got: end.to_string(), valid });
    }
    let to = to.pointer() + (first * element.bytes()) as u64;
    Ok(Target { to, size: shape.map(PaddedDim::model_len), padding: shape.map(|dim| dim.padding), strides })
}
