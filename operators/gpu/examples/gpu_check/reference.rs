//! The forward pass in f64, one run at a time, as the papers define it: no kernels, no fusion. It shares only the
//! weights with the checked code, rounded to the net's dtype.

use half::{bf16, f16};
use stillhouse_gpu::net::{Activation, Architecture, Rope, Shape, Source};
use stillhouse_gpu::{Element, Result};

/// A linear map `[out, in]` with its bias.
struct Linear {
    weight: Vec<f64>,
    bias: Vec<f64>,
    inputs: usize,
}

impl Linear {
    fn apply(&self, rows: &[f64]) -> Vec<f64> {
        let mut out = Vec::new();
        for row in rows.chunks_exact(self.inputs) {
            for (weight, bias) in self.weight.chunks_exact(self.inputs).zip(&self.bias) {
                out.push(bias + row.iter().zip(weight).map(|(x, w)| x * w).sum::<f64>());
            }
        }
        out
    }
}

/// Reads weights from a source and rounds them.
struct RoundedWeights<'a> {
    source: &'a mut dyn Source,
    element: Element,
}

impl RoundedWeights<'_> {
    fn values(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f64>> {
        let round = |v: f32| match self.element {
            Element::F32 => v,
            Element::Bf16 => bf16::from_f32(v).to_f32(),
            Element::F16 => f16::from_f32(v).to_f32(),
        };
        Ok(self.source.tensor(name, shape)?.into_iter().map(|v| f64::from(round(v))).collect())
    }

    fn linear(&mut self, name: &str, outputs: usize, inputs: usize, bias: bool) -> Result<Linear> {
        let weight = self.values(&format!("{name}.weight"), &[outputs, inputs])?;
        let bias = if bias { self.values(&format!("{name}.bias"), &[outputs])? } else { vec![0.0; outputs] };
        Ok(Linear { weight, bias, inputs })
    }

    fn conv1d(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let stored = self.values(&format!("{name}.weight"), &[inputs, outputs])?;
        let weight = (0..outputs * inputs).map(|i| stored[i % inputs * outputs + i / inputs]).collect();
        Ok(Linear { weight, bias: self.values(&format!("{name}.bias"), &[outputs])?, inputs })
    }

    /// Normalises rows with the norm of this name.
    fn norm(&mut self, name: &str, rows: &[f64], shape: &Shape) -> Result<Vec<f64>> {
        let (width, centred) = (shape.width, shape.architecture == Architecture::Gpt2);
        let weight = self.values(&format!("{name}.weight"), &[width])?;
        let bias = if centred { self.values(&format!("{name}.bias"), &[width])? } else { vec![0.0; width] };
        let mut out = rows.to_vec();
        for row in out.chunks_exact_mut(width) {
            let mean = if centred { row.iter().sum::<f64>() / width as f64 } else { 0.0 };
            row.iter_mut().for_each(|x| *x -= mean);
            scale(row, &weight, shape);
            row.iter_mut().zip(&bias).for_each(|(x, bias)| *x += bias);
        }
        Ok(out)
    }
}

/// Scales a row to a mean square of 1, then by the weights.
fn scale(row: &mut [f64], weight: &[f64], shape: &Shape) {
    let square = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    let root = (square + f64::from(shape.eps)).sqrt();
    row.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x / root * weight);
}

/// Rotates the heads of rows.
fn rotate(rows: &mut [f64], heads: usize, dim: usize, rope: Rope<'_>) {
    let half = dim / 2;
    for (position, row) in rows.chunks_exact_mut(heads * dim).enumerate() {
        for head in row.chunks_exact_mut(dim) {
            for i in 0..half {
                let [cos, sin] = [rope.cos, rope.sin].map(|table| f64::from(table[position * half + i]));
                let (a, b) = (head[i], head[i + half]);
                (head[i], head[i + half]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
    }
}

/// The divisor of a layer's attention scores.
fn score_divisor(shape: &Shape, layer: usize) -> f64 {
    let root = if shape.scaled { (shape.head_dim as f64).sqrt() } else { 1.0 };
    if shape.scaled_by_layer { root * (layer + 1) as f64 } else { root }
}

fn attention(q: &[f64], k: &[f64], v: &[f64], shape: &Shape, score_divisor: f64) -> Vec<f64> {
    let (dim, shared) = (shape.head_dim, shape.heads / shape.kv_heads);
    let (width, kv_width) = (shape.heads * dim, shape.kv_heads * dim);
    let mut out = vec![0.0; q.len()];
    for (row, to) in out.chunks_exact_mut(width).enumerate() {
        for (head, to) in to.chunks_exact_mut(dim).enumerate() {
            let at = |position: usize| position * kv_width + head / shared * dim;
            let query = &q[row * width + head * dim..][..dim];
            let score = |p: usize| query.iter().zip(&k[at(p)..]).map(|(q, k)| q * k).sum::<f64>() / score_divisor;
            let scores: Vec<f64> = (0..=row).map(score).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let sum: f64 = weights.iter().sum();
            for (position, weight) in weights.iter().enumerate() {
                to.iter_mut().zip(&v[at(position)..]).for_each(|(to, v)| *to += weight / sum * v);
            }
        }
    }
    out
}

/// x Φ(x). The error function is a series of terms of one sign; beyond 6, 1 - erf(z) is below the precision of f64.
fn gelu(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    let (mut term, mut sum) = (z, 0.0);
    for n in 0..400 {
        sum += term;
        term *= 2.0 * z * z / f64::from(2 * n + 3);
    }
    let erf = if z > 6.0 { 1.0 } else { 2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * sum };
    0.5 * x * (1.0 + x.signum() * erf)
}

/// The activation of a number, or of a gate.
fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::SwiGlu => x / (1.0 + (-x).exp()),
        Activation::Gelu => gelu(x),
        Activation::GeluTanh | Activation::GeGlu => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
        }
    }
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Logits `[L, V]` of one run.
pub fn logits(
    shape: &Shape,
    element: Element,
    rope: Option<Rope<'_>>,
    source: &mut dyn Source,
    tokens: &[u32],
) -> Result<Vec<f64>> {
    let gpt2 = shape.architecture == Architecture::Gpt2;
    let mut weights = RoundedWeights { source, element };
    let (vocab, width) = (shape.vocab, shape.width);
    let [table, last] = if gpt2 { ["wte.weight", "ln_f"] } else { ["embed_tokens.weight", "norm"] };
    let table = weights.values(table, &[vocab, width])?;
    let mut x: Vec<f64> = tokens.iter().flat_map(|t| &table[*t as usize * width..][..width]).copied().collect();
    if gpt2 {
        add(&mut x, &weights.values("wpe.weight", &[shape.positions, width])?);
    }
    for layer in 0..shape.layers {
        if gpt2 {
            gpt2_layer(shape, &mut weights, layer, &mut x)?;
        } else {
            llama_layer(shape, rope, &mut weights, layer, &mut x)?;
        }
    }
    let n = weights.norm(last, &x, shape)?;
    let weight = if shape.tied { table } else { weights.values("lm_head.weight", &[vocab, width])? };
    Ok(Linear { weight, bias: vec![0.0; vocab], inputs: width }.apply(&n))
}

fn gpt2_layer(shape: &Shape, weights: &mut RoundedWeights<'_>, layer: usize, x: &mut [f64]) -> Result<()> {
    let at = format!("h.{layer}.");
    let (width, all) = (shape.width, shape.heads * shape.head_dim);
    let n = weights.norm(&format!("{at}ln_1"), x, shape)?;
    let qkv = weights.conv1d(&format!("{at}attn.c_attn"), 3 * all, width)?.apply(&n);
    let part = |i: usize| -> Vec<f64> {
        qkv.chunks_exact(3 * all).flat_map(|row| &row[i * all..(i + 1) * all]).copied().collect()
    };
    let out = attention(&part(0), &part(1), &part(2), shape, score_divisor(shape, layer));
    add(x, &weights.conv1d(&format!("{at}attn.c_proj"), width, all)?.apply(&out));
    let n = weights.norm(&format!("{at}ln_2"), x, shape)?;
    let mut inner = weights.conv1d(&format!("{at}mlp.c_fc"), shape.inner, width)?.apply(&n);
    inner.iter_mut().for_each(|x| *x = activate(shape.activation, *x));
    add(x, &weights.conv1d(&format!("{at}mlp.c_proj"), width, shape.inner)?.apply(&inner));
    Ok(())
}

fn llama_layer(
    shape: &Shape,
    rope: Option<Rope<'_>>,
    weights: &mut RoundedWeights<'_>,
    layer: usize,
    x: &mut [f64],
) -> Result<()> {
    let at = format!("layers.{layer}.");
    let (width, dim) = (shape.width, shape.head_dim);
    let (all, kv) = (shape.heads * dim, shape.kv_heads * dim);
    let n = weights.norm(&format!("{at}input_layernorm"), x, shape)?;
    let mut project = |name: &str, outputs: usize, inputs: usize, rows: &[f64], bias: bool| -> Result<Vec<f64>> {
        Ok(weights.linear(&format!("{at}{name}"), outputs, inputs, bias)?.apply(rows))
    };
    let mut q = project("self_attn.q_proj", all, width, &n, shape.attention_bias)?;
    let mut k = project("self_attn.k_proj", kv, width, &n, shape.attention_bias)?;
    let v = project("self_attn.v_proj", kv, width, &n, shape.attention_bias)?;
    if shape.architecture == Architecture::Qwen3 {
        for (name, rows) in [("q_norm", &mut q), ("k_norm", &mut k)] {
            let weight = weights.values(&format!("{at}self_attn.{name}.weight"), &[dim])?;
            rows.chunks_exact_mut(dim).for_each(|head| scale(head, &weight, shape));
        }
    }
    if let Some(rope) = rope {
        rotate(&mut q, shape.heads, dim, rope);
        rotate(&mut k, shape.kv_heads, dim, rope);
    }
    let out = attention(&q, &k, &v, shape, score_divisor(shape, layer));
    add(x, &weights.linear(&format!("{at}self_attn.o_proj"), width, all, shape.attention_bias)?.apply(&out));
    let n = weights.norm(&format!("{at}post_attention_layernorm"), x, shape)?;
    let inner = shape.inner;
    let gate = weights.linear(&format!("{at}mlp.gate_proj"), inner, width, shape.mlp_bias)?.apply(&n);
    let mut up = weights.linear(&format!("{at}mlp.up_proj"), inner, width, shape.mlp_bias)?.apply(&n);
    up.iter_mut().zip(&gate).for_each(|(up, gate)| *up *= activate(shape.activation, *gate));
    add(x, &weights.linear(&format!("{at}mlp.down_proj"), width, inner, shape.mlp_bias)?.apply(&up));
    Ok(())
}
