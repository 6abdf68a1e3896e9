//! The forward pass in f64 by its definition, as the reference for the kernels.

use std::collections::HashMap;

use stillhouse_gpu::net::{Activation, Architecture, Shape};

/// Weights by name, as the net received them.
pub type Weights = HashMap<String, Vec<f64>>;

pub fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().sum::<f64>() / x.len() as f64;
    let var = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).zip(bias).map(|((x, w), b)| (x - mean) / (var + eps).sqrt() * w + b).collect()
}

pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    x.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect()
}

pub fn gelu_new(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// x Φ(x). The error function is a series of terms of one sign.
pub fn gelu(x: f64) -> f64 {
    let z = x.abs() / std::f64::consts::SQRT_2;
    // Beyond 6, 1 - erf(z) is below the precision of f64.
    let erf = if z > 6.0 {
        1.0
    } else {
        let terms = (0..400).scan(z, |term, n| {
            let this = *term;
            *term *= 2.0 * z * z / f64::from(2 * n + 3);
            Some(this)
        });
        2.0 / std::f64::consts::PI.sqrt() * (-z * z).exp() * terms.sum::<f64>()
    };
    0.5 * x * (1.0 + x.signum() * erf)
}

pub fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Rotates one head by the cosines and sines of its position.
pub fn rotate(head: &mut [f64], cos: &[f64], sin: &[f64]) {
    let (low, high) = head.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
    }
}

/// Attention within one run of fused rows of `heads + 2 kv` heads; divides scores by sqrt(D).
pub fn attention(qkv: &[f64], heads: usize, kv: usize, dim: usize) -> Vec<f64> {
    scaled_attention(qkv, [heads, kv, dim], 1.0 / (dim as f64).sqrt())
}

/// As [`attention`], with another scale.
pub fn scaled_attention(qkv: &[f64], [heads, kv, dim]: [usize; 3], scale: f64) -> Vec<f64> {
    let rows: Vec<&[f64]> = qkv.chunks_exact((heads + 2 * kv) * dim).collect();
    let mut out = Vec::new();
    for (t, row) in rows.iter().enumerate() {
        for head in 0..heads {
            let part = |row: &'_ [f64], at: usize| row[at * dim..(at + 1) * dim].to_vec();
            let (q, group) = (part(row, head), head / (heads / kv));
            let score = |s: &[f64]| dot(&q, &part(s, heads + group)) * scale;
            let scores: Vec<f64> = rows[..=t].iter().map(|s| score(s)).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            let mut sum = vec![0.0; dim];
            for (weight, row) in weights.iter().zip(&rows) {
                for (sum, v) in sum.iter_mut().zip(part(row, heads + kv + group)) {
                    *sum += weight / total * v;
                }
            }
            out.extend(sum);
        }
    }
    out
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Maps rows of `inputs` elements by a weight `[out, in]`.
pub fn linear(x: &[f64], inputs: usize, weight: &[f64], bias: Option<&Vec<f64>>) -> Vec<f64> {
    let row = |x: &[f64]| -> Vec<f64> {
        let sums = weight.chunks_exact(inputs).map(|w| dot(x, w)).enumerate();
        sums.map(|(i, sum)| sum + bias.map_or(0.0, |bias| bias[i])).collect()
    };
    x.chunks_exact(inputs).flat_map(row).collect()
}

fn transposed(weight: &[f64], outputs: usize) -> Vec<f64> {
    (0..outputs).flat_map(|o| weight.iter().skip(o).step_by(outputs).copied().collect::<Vec<_>>()).collect()
}

/// A net in f64.
pub struct Naive<'a> {
    pub shape: Shape,
    pub weights: &'a Weights,
    pub cos: &'a [f64],
    pub sin: &'a [f64],
}

impl Naive<'_> {
    fn project(&self, x: &[f64], name: &str) -> Vec<f64> {
        let weight = &self.weights[&format!("{name}.weight")];
        let bias = self.weights.get(&format!("{name}.bias"));
        match (self.shape.architecture, bias) {
            (Architecture::Gpt2, Some(bias)) => {
                let inputs = weight.len() / bias.len();
                linear(x, inputs, &transposed(weight, bias.len()), Some(bias))
            }
            _ => linear(x, weight.len() / self.outputs(name), weight, bias),
        }
    }

    fn score_scale(&self, layer: usize) -> f64 {
        let Shape { head_dim, scaled, scaled_by_layer, .. } = self.shape;
        let by = if scaled { (head_dim as f64).sqrt() } else { 1.0 };
        1.0 / if scaled_by_layer { by * (1.0 + layer as f64) } else { by }
    }

    fn outputs(&self, name: &str) -> usize {
        let Shape { width, heads, kv_heads, head_dim, inner, vocab, .. } = self.shape;
        match name.rsplit('.').next().unwrap() {
            "q_proj" => heads * head_dim,
            "k_proj" | "v_proj" => kv_heads * head_dim,
            "gate_proj" | "up_proj" => inner,
            "lm_head" | "wte" | "embed_tokens" => vocab,
            _ => width,
        }
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let weight = &self.weights[&format!("{name}.weight")];
        let eps = f64::from(self.shape.eps);
        let row = |x: &[f64]| match self.weights.get(&format!("{name}.bias")) {
            Some(bias) => layer_norm(x, weight, bias, eps),
            None => rms_norm(x, weight, eps),
        };
        x.chunks_exact(weight.len()).flat_map(row).collect()
    }

    /// Normalised hidden states of one run.
    pub fn hidden(&self, tokens: &[u32]) -> Vec<f64> {
        let Shape { architecture, width, layers, .. } = self.shape;
        let gpt2 = architecture == Architecture::Gpt2;
        let wte = &self.weights[if gpt2 { "wte.weight" } else { "embed_tokens.weight" }];
        let mut x: Vec<f64> =
            tokens.iter().flat_map(|t| wte.chunks_exact(width).nth(*t as usize).unwrap().to_vec()).collect();
        if gpt2 {
            x.iter_mut().zip(&self.weights["wpe.weight"]).for_each(|(x, p)| *x += p);
        }
        for i in 0..layers {
            let y = if gpt2 { self.gpt2_attention(&x, i) } else { self.llama_attention(&x, i) };
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
            let y = if gpt2 { self.gpt2_mlp(&x, i) } else { self.llama_mlp(&x, i) };
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
        }
        self.norm(&x, if gpt2 { "ln_f" } else { "norm" })
    }

    pub fn logits(&self, hidden: &[f64]) -> Vec<f64> {
        let head = match (self.shape.tied, self.shape.architecture) {
            (false, _) => "lm_head",
            (true, Architecture::Gpt2) => "wte",
            (true, _) => "embed_tokens",
        };
        linear(hidden, self.shape.width, &self.weights[&format!("{head}.weight")], None)
    }

    fn gpt2_attention(&self, x: &[f64], i: usize) -> Vec<f64> {
        let Shape { heads, head_dim, .. } = self.shape;
        let qkv = self.project(&self.norm(x, &format!("h.{i}.ln_1")), &format!("h.{i}.attn.c_attn"));
        self.project(
            &scaled_attention(&qkv, [heads, heads, head_dim], self.score_scale(i)),
            &format!("h.{i}.attn.c_proj"),
        )
    }

    fn gpt2_mlp(&self, x: &[f64], i: usize) -> Vec<f64> {
        let inner = self.project(&self.norm(x, &format!("h.{i}.ln_2")), &format!("h.{i}.mlp.c_fc"));
        let exact = self.shape.activation == Activation::Gelu;
        let inner: Vec<f64> = inner.into_iter().map(if exact { gelu } else { gelu_new }).collect();
        self.project(&inner, &format!("h.{i}.mlp.c_proj"))
    }

    fn llama_attention(&self, x: &[f64], i: usize) -> Vec<f64> {
        let Shape { architecture, heads, kv_heads, head_dim, .. } = self.shape;
        let n = self.norm(x, &format!("layers.{i}.input_layernorm"));
        let at = |name: &str| format!("layers.{i}.self_attn.{name}");
        let mut parts = ["q", "k", "v"].map(|part| self.project(&n, &at(&format!("{part}_proj"))));
        for (part, count, norm) in [(0, heads, "q_norm"), (1, kv_heads, "k_norm")] {
            if architecture == Architecture::Qwen3 {
                parts[part] = self.norm(&parts[part], &at(norm));
            }
            for (i, head) in parts[part].chunks_exact_mut(head_dim).enumerate() {
                let at = i / count * head_dim / 2;
                rotate(head, &self.cos[at..at + head_dim / 2], &self.sin[at..at + head_dim / 2]);
            }
        }
        let [q, k, v] = parts;
        let rows = q.chunks_exact(heads * head_dim).zip(k.chunks_exact(kv_heads * head_dim));
        let rows = rows.zip(v.chunks_exact(kv_heads * head_dim));
        let qkv: Vec<f64> = rows.flat_map(|((q, k), v)| [q, k, v].concat()).collect();
        self.project(&scaled_attention(&qkv, [heads, kv_heads, head_dim], self.score_scale(i)), &at("o_proj"))
    }

    fn llama_mlp(&self, x: &[f64], i: usize) -> Vec<f64> {
        let m = self.norm(x, &format!("layers.{i}.post_attention_layernorm"));
        let [gate, up] = ["gate", "up"].map(|part| self.project(&m, &format!("layers.{i}.mlp.{part}_proj")));
        let of = if self.shape.activation == Activation::GeGlu { gelu_new } else { silu };
        let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| of(*g) * u).collect();
        self.project(&inner, &format!("layers.{i}.mlp.down_proj"))
    }
}
