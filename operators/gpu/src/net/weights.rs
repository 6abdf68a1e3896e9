//! Weights, from wherever they come, to the device: stacked where one product makes them one, all `[out, in]`.
//!
//! Heads whose dimension attention was not compiled for lie in wider ones: the model's elements of either half at the half's beginning,
//! zeros after them, in q, k, v and in what the output projection reads. The zeros change no sum.

use std::sync::Arc;

use super::kernels::Heads;
use super::shape::{Kind, Shape};
use super::upload::Upload;
use crate::device::{Buffer, Device, Element, Matrix, Result};
use crate::error::GpuError;

/// Where weights come from.
pub trait Source {
    /// The tensor of this name and shape, row-major. Names are those of Hugging Face checkpoints, without the prefix that files of a whole
    /// model have (`transformer.`, `model.`): `h.0.ln_1.weight`, `layers.0.self_attn.q_proj.weight`, `lm_head.weight`. Each is asked for
    /// once.
    ///
    /// # Errors
    /// When there is none, or it has another shape.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>>;
}

/// A linear map `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct Linear {
    weight: Buffer,
    bias: Option<Buffer>,
    outputs: usize,
    inputs: usize,
}

impl Linear {
    pub fn of(weight: Buffer, bias: Option<Buffer>, [outputs, inputs]: [usize; 2]) -> Self {
        Self { weight, bias, outputs, inputs }
    }

    pub fn matrix(&self, element: Element) -> Matrix {
        let Self { outputs, inputs, .. } = *self;
        Matrix { pointer: self.weight.pointer(), element, rows: outputs, columns: inputs, stride: inputs }
    }

    /// Its address, 0 for none.
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
    /// Of query and key heads.
    pub head_norms: Option<[Buffer; 2]>,
    pub attention_out: Linear,
    pub before_mlp: Norm,
    pub up: Linear,
    pub down: Linear,
}

/// All weights of a net.
#[derive(Debug)]
pub(super) struct Weights {
    pub tokens: Linear,
    pub positions: Option<Buffer>,
    pub layers: Vec<Layer>,
    pub last: Norm,
    /// Where it is not the embedding.
    pub head: Option<Linear>,
}

/// Puts weights on a device; one tensor is on the host at a time.
pub(super) struct Loader<'a> {
    device: &'a Arc<dyn Device>,
    shape: &'a Shape,
    element: Element,
    source: &'a mut dyn Source,
    upload: Upload,
}

/// How the elements of heads lie along a dimension of a weight.
#[derive(Clone, Copy)]
struct Places {
    heads: usize,
    own: usize,
    dim: usize,
}

impl Places {
    /// Where element i of the model's dimension (head by head) lies.
    fn of(self, i: usize) -> usize {
        let (head, at, half) = (i / self.own, i % self.own, self.own.div_ceil(2));
        head * self.dim + if at < half { at } else { at - half + self.dim / 2 }
    }

    fn own(self) -> usize {
        self.heads * self.own
    }

    fn all(self) -> usize {
        self.heads * self.dim
    }

    /// Rows (of `columns` elements) as they lie.
    fn rows(self, values: Vec<f32>, columns: usize) -> Vec<f32> {
        if self.own == self.dim {
            return values;
        }
        let mut out = vec![0.0; self.all() * columns];
        for (i, row) in values.chunks_exact(columns).enumerate() {
            let at = self.of(i) * columns;
            if let Some(to) = out.get_mut(at..at + columns) {
                to.copy_from_slice(row);
            }
        }
        out
    }

    /// Columns as they lie, in each row.
    fn columns(self, values: Vec<f32>) -> Vec<f32> {
        if self.own == self.dim {
            return values;
        }
        let widened = values.chunks_exact(self.own()).flat_map(|row| self.rows(row.to_vec(), 1));
        widened.collect()
    }
}

/// `[rows, columns]` to `[columns, rows]`, in squares that fit a cache.
fn transposed(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    const SIDE: usize = 32;
    let mut out = vec![0.0; values.len()];
    for top in (0..rows).step_by(SIDE) {
        for left in (0..columns).step_by(SIDE) {
            for r in top..rows.min(top + SIDE) {
                for c in left..columns.min(left + SIDE) {
                    out[c * rows + r] = values[r * columns + c];
                }
            }
        }
    }
    out
}

impl<'a> Loader<'a> {
    pub fn new(
        device: &'a Arc<dyn Device>,
        shape: &'a Shape,
        element: Element,
        source: &'a mut dyn Source,
    ) -> Result<Self> {
        let upload = Upload::of_weights(device, element)?;
        Ok(Self { device, shape, element, source, upload })
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
        let qkv = self.conv1d(&format!("{at}attn.c_attn"), [width, fused.own()])?;
        let out = self.conv1d(&format!("{at}attn.c_proj"), [q.own(), width])?;
        Ok(Layer {
            before_attention: self.norm(&format!("{at}ln_1"))?,
            qkv: self.linear(vec![fused.rows(qkv.0, width)], Some(fused.rows(qkv.1, 1)), width)?,
            head_norms: None,
            attention_out: self.linear(vec![q.columns(out.0)], Some(out.1), q.all())?,
            before_mlp: self.norm(&format!("{at}ln_2"))?,
            up: self.conv1d_linear(&format!("{at}mlp.c_fc"), [width, inner])?,
            down: self.conv1d_linear(&format!("{at}mlp.c_proj"), [inner, width])?,
        })
    }

    fn llama_layer(&mut self, at: &str) -> Result<Layer> {
        let Shape { width, inner, attention_bias, mlp_bias, kind, .. } = *self.shape;
        let [q, kv] = self.places();
        let attention = format!("{at}self_attn.");
        let qkv = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let head_norms = match kind {
            Kind::Qwen3 => Some([self.head_norm(&attention, "q_norm")?, self.head_norm(&attention, "k_norm")?]),
            Kind::Gpt2 | Kind::Llama => None,
        };
        Ok(Layer {
            before_attention: self.norm(&format!("{at}input_layernorm"))?,
            qkv: self.stacked(&attention, &qkv, width, attention_bias)?,
            head_norms,
            attention_out: self.attention_out(&attention, q)?,
            before_mlp: self.norm(&format!("{at}post_attention_layernorm"))?,
            up: self.stacked(
                &format!("{at}mlp."),
                &["gate_proj", "up_proj"].map(|n| (n, whole(inner))),
                width,
                mlp_bias,
            )?,
            down: self.stacked(&format!("{at}mlp."), &[("down_proj", whole(width))], inner, mlp_bias)?,
        })
    }

    fn attention_out(&mut self, at: &str, q: Places) -> Result<Linear> {
        let width = self.shape.width;
        let weight = self.fetch(&format!("{at}o_proj.weight"), &[width, q.own()])?;
        let bias = match self.shape.attention_bias {
            true => Some(self.fetch(&format!("{at}o_proj.bias"), &[width])?),
            false => None,
        };
        self.linear(vec![q.columns(weight)], bias, q.all())
    }

    /// Maps of the same input, one under the other; only one of them is on the host at a time.
    fn stacked(&mut self, at: &str, parts: &[(&str, Places)], inputs: usize, bias: bool) -> Result<Linear> {
        let outputs = parts.iter().map(|(_, places)| places.all()).sum();
        let weight = Buffer::new(self.device, outputs * inputs * self.element.bytes())?;
        let mut biases = Vec::new();
        let mut first = 0;
        for (name, places) in parts {
            let values = self.fetch(&format!("{at}{name}.weight"), &[places.own(), inputs])?;
            self.put(&weight, first * inputs, &places.rows(values, inputs))?;
            first += places.all();
            if bias {
                let values = self.fetch(&format!("{at}{name}.bias"), &[places.own()])?;
                biases.extend(places.rows(values, 1));
            }
        }
        let bias = if bias { Some(self.buffer(&biases)?) } else { None };
        Ok(Linear { weight, bias, outputs, inputs })
    }

    fn linear(&mut self, weight: Vec<Vec<f32>>, bias: Option<Vec<f32>>, inputs: usize) -> Result<Linear> {
        let weight = self.buffer(&weight.concat())?;
        let outputs = weight.bytes() / self.element.bytes() / inputs;
        let bias = bias.map(|bias| self.buffer(&bias)).transpose()?;
        Ok(Linear { weight, bias, outputs, inputs })
    }

    /// Weight, turned to `[out, in]`, and bias.
    fn conv1d(&mut self, name: &str, [inputs, outputs]: [usize; 2]) -> Result<(Vec<f32>, Vec<f32>)> {
        let weight = self.fetch(&format!("{name}.weight"), &[inputs, outputs])?;
        let bias = self.fetch(&format!("{name}.bias"), &[outputs])?;
        Ok((transposed(&weight, [inputs, outputs]), bias))
    }

    fn conv1d_linear(&mut self, name: &str, [inputs, outputs]: [usize; 2]) -> Result<Linear> {
        let (weight, bias) = self.conv1d(name, [inputs, outputs])?;
        self.linear(vec![weight], Some(bias), inputs)
    }

    fn table(&mut self, name: &str, rows: usize, width: usize) -> Result<Linear> {
        let weight = self.fetch(name, &[rows, width])?;
        self.linear(vec![weight], None, width)
    }

    fn norm(&mut self, name: &str) -> Result<Norm> {
        let width = self.shape.width;
        let weight = self.fetch(&format!("{name}.weight"), &[width])?;
        let bias = match self.shape.kind {
            Kind::Gpt2 => Some(self.fetch(&format!("{name}.bias"), &[width])?),
            Kind::Llama | Kind::Qwen3 => None,
        };
        let bias = bias.map(|bias| self.buffer(&bias)).transpose()?;
        Ok(Norm { weight: self.buffer(&weight)?, bias })
    }

    fn head_norm(&mut self, at: &str, name: &str) -> Result<Buffer> {
        let [q, _] = self.places();
        let weight = self.fetch(&format!("{at}{name}.weight"), &[q.own])?;
        self.buffer(&Places { heads: 1, ..q }.rows(weight, 1))
    }

    /// Cosines or sines `[positions, D/2]`, f32 whatever the weights are.
    pub fn table_of_angles(&mut self, values: &[f32]) -> Result<Buffer> {
        let Heads { dim, own_dim, .. } = self.shape.heads();
        let mut bytes = vec![0; values.len() / (own_dim / 2) * (dim / 2) * size_of::<f32>()];
        let rows = bytes.chunks_exact_mut(dim / 2 * size_of::<f32>()).zip(values.chunks_exact(own_dim / 2));
        for (to, row) in rows {
            super::upload::put(row, to, f32::to_ne_bytes);
        }
        Buffer::of(self.device, &bytes)
    }

    /// Of query heads, and of key or value heads.
    fn places(&self) -> [Places; 2] {
        let Heads { heads, kv_heads, dim, own_dim } = self.shape.heads();
        [heads, kv_heads].map(|heads| Places { heads, own: own_dim, dim })
    }

    fn fetch(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let values = self.source.tensor(name, shape)?;
        let count = shape.iter().product::<usize>();
        if values.len() == count {
            return Ok(values);
        }
        let got = format!("{} of {name}", values.len());
        Err(GpuError::Input { what: "elements of a weight", got, valid: format!("{count}, for {shape:?}") })
    }

    fn buffer(&mut self, values: &[f32]) -> Result<Buffer> {
        let buffer = Buffer::new(self.device, values.len() * self.element.bytes())?;
        self.put(&buffer, 0, values)?;
        Ok(buffer)
    }

    fn put(&mut self, buffer: &Buffer, first: usize, values: &[f32]) -> Result<()> {
        let start = first * self.element.bytes();
        if start + values.len() * self.element.bytes() > buffer.bytes() {
            let valid = format!("what {} bytes hold", buffer.bytes());
            return Err(GpuError::Input { what: "elements of a weight", got: values.len().to_string(), valid });
        }
        // SAFETY: just checked
        unsafe { self.upload.send_values(buffer.pointer() + start as u64, values, self.element) }
    }
}

/// A dimension without heads.
fn whole(size: usize) -> Places {
    Places { heads: 1, own: size, dim: size }
}
