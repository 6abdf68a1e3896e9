//! Shapes of known nets, and random weights for them.

use stillhouse_gpu::Result;
use stillhouse_gpu::net::{Activation, Architecture, Rope, Shape, Source};
use stillhouse_noise::{fnv1a64, keyed_uniforms};

/// Number of random numbers: a prime, so that no two rows of a weight are the same.
const RANDOM_NUMBERS: usize = 1_048_573;
/// Standard deviation of the logits. With 50,000 tokens, the entropy is then about 3 nats, as under a real teacher.
pub const LOGITS_STD: f64 = 3.9;

/// Standard normal numbers. A tensor reads them from an offset that its name determines.
pub struct Weights {
    numbers: Vec<f32>,
    width: usize,
    tied: bool,
}

impl Weights {
    pub fn of(shape: &Shape) -> Self {
        let mut uniforms = keyed_uniforms(1, "weights of a check", 0, 0);
        let mut normal = || {
            let radius = (-2.0 * (1.0 - uniforms.next_f64()).ln()).sqrt();
            (radius * (std::f64::consts::TAU * uniforms.next_f64()).cos()) as f32
        };
        Self { numbers: (0..RANDOM_NUMBERS).map(|_| normal()).collect(), width: shape.width, tied: shape.tied }
    }

    /// The factor and the term that turn the numbers into a tensor.
    fn scale(&self, name: &str, shape: &[usize]) -> (f32, f32) {
        let head = (LOGITS_STD / (self.width as f64).sqrt()) as f32;
        match shape {
            _ if name.ends_with(".bias") => (0.02, 0.0),
            // norms
            [_] => (0.02, 1.0),
            _ if name == "lm_head.weight" => (head, 0.0),
            _ if name == "wte.weight" || name == "embed_tokens.weight" => (if self.tied { head } else { 0.5 }, 0.0),
            _ if name == "wpe.weight" => (0.02, 0.0),
            // GPT-2 stores [in, out], the others [out, in].
            [inputs, _] if name.starts_with("h.") => (1.0 / (*inputs as f32).sqrt(), 0.0),
            [.., inputs] => (1.0 / (*inputs as f32).sqrt(), 0.0),
            [] => (1.0, 0.0),
        }
    }
}

impl Source for Weights {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let (factor, term) = self.scale(name, shape);
        let count = shape.iter().product();
        let mut values = Vec::with_capacity(count);
        let mut at = (fnv1a64(name.as_bytes()) % RANDOM_NUMBERS as u64) as usize;
        while values.len() < count {
            let end = RANDOM_NUMBERS.min(at + count - values.len());
            values.extend(self.numbers[at..end].iter().map(|number| number * factor + term));
            at = 0;
        }
        Ok(values)
    }
}

/// Rotary tables: cosines and sines.
pub struct RopeTables {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTables {
    pub fn of(shape: &Shape) -> Option<Self> {
        const BASE: f64 = 500_000.0;
        if !shape.rotates() {
            return None;
        }
        let half = shape.head_dim / 2;
        let angle = |i: usize| (i / half) as f64 / BASE.powf((i % half) as f64 / half as f64);
        let table = |of: fn(f64) -> f64| (0..shape.positions * half).map(|i| of(angle(i)) as f32).collect();
        Some(Self { cos: table(f64::cos), sin: table(f64::sin) })
    }

    pub fn rope(&self) -> Rope<'_> {
        Rope { cos: &self.cos, sin: &self.sin }
    }
}

/// A shape with defaults for the other fields: tied weights, no extra biases, 1,024 positions.
pub const fn shape(
    architecture: Architecture,
    vocab: usize,
    width: usize,
    layers: usize,
    heads: [usize; 3],
    inner: usize,
) -> Shape {
    let [heads, kv_heads, head_dim] = heads;
    Shape {
        architecture,
        vocab,
        width,
        layers,
        heads,
        kv_heads,
        head_dim,
        inner,
        activation: match architecture {
            Architecture::Gpt2 => Activation::GeluTanh,
            Architecture::Llama | Architecture::Qwen3 => Activation::SwiGlu,
        },
        scaled: true,
        scaled_by_layer: false,
        eps: 1e-5,
        positions: 1024,
        tied: true,
        attention_bias: false,
        mlp_bias: false,
    }
}

const LLAMA_VOCAB: usize = 128_256;
pub const GPT2: Shape = shape(Architecture::Gpt2, 50_257, 768, 12, [12, 12, 64], 3072);

/// Tokens of the longest run that is measured. Real GPT-2 has 1,024 positions; these nets have more.
const MAX_POSITIONS: usize = 4096;

/// The shapes whose throughput is measured, with the seconds to make their weights. Shapes with performance goals come
/// first.
pub const MEASURED_SHAPES: [(&str, Shape, f64); 4] = [
    (
        "GPT-2 Large 774M",
        Shape { positions: MAX_POSITIONS, ..shape(Architecture::Gpt2, 50_257, 1280, 36, [20, 20, 64], 5120) },
        1.0,
    ),
    (
        "Llama 3.1 8B",
        Shape {
            positions: MAX_POSITIONS,
            tied: false,
            ..shape(Architecture::Llama, LLAMA_VOCAB, 4096, 32, [32, 8, 128], 14_336)
        },
        3.0,
    ),
    ("GPT-2 124M", Shape { positions: MAX_POSITIONS, ..GPT2 }, 1.0),
    (
        "Llama 3.2 1B",
        Shape { positions: MAX_POSITIONS, ..shape(Architecture::Llama, LLAMA_VOCAB, 2048, 16, [32, 8, 64], 8192) },
        1.0,
    ),
];

/// Floating-point operations per token in runs of this length: two per weight of a product, plus causal attention, of
/// which half is masked.
pub fn flops_per_token(shape: &Shape, length: usize) -> f64 {
    let Shape { vocab, width, layers, heads, kv_heads, head_dim, inner, .. } = *shape;
    let ups = if shape.activation.is_gated() { 2 } else { 1 };
    let layer = width * (2 * heads + 2 * kv_heads) * head_dim + (ups + 1) * width * inner;
    let attention = heads * head_dim * length;
    2.0 * (layers * (layer + attention) + vocab * width) as f64
}

/// The shapes that the host measures instead.
pub const TINY_SHAPES: [(&str, Shape, f64); 2] = [
    ("tiny GPT-2", shape(Architecture::Gpt2, 300, 64, 2, [4, 4, 16], 128), 0.0),
    ("tiny Llama", Shape { tied: false, ..shape(Architecture::Llama, 517, 64, 2, [4, 2, 32], 96) }, 0.0),
];
