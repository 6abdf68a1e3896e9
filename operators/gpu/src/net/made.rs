//! Nets with random weights, which a kernel generates on the device.
//!
//! They are for measurements in which only the shape, the number format and non-zero values of the weights matter.

use std::sync::Arc;

use super::kernels::Kernels;
use super::weights::{Layer, Linear, Norm, Weights};
use super::{Kind, Net, Numbers, Rope, Shape, check_rope, input};
use crate::device::{Buffer, Device, Result};

/// Parameters of random weights.
#[derive(Debug, Clone, Copy)]
pub struct MadeUp {
    /// Seed.
    pub key: u64,
    /// Standard deviation of the logits.
    pub logits: f32,
}

/// Generates weights one after another, each from its own part of the random sequence.
struct Maker<'a> {
    device: &'a Arc<dyn Device>,
    kernels: Kernels,
    shape: &'a Shape,
    numbers: Numbers,
    next: u64,
}

impl Net {
    /// Creates a net with random weights for passes over at most `most_tokens` tokens.
    ///
    /// # Errors
    /// As [`Net::load`], and if attention was not compiled for the head dimension.
    pub fn made_up(
        device: &Arc<dyn Device>,
        shape: Shape,
        numbers: impl Into<Numbers>,
        rope: Option<Rope<'_>>,
        made: MadeUp,
        most_tokens: usize,
    ) -> Result<Self> {
        let numbers = numbers.into();
        numbers.check(device, &shape)?;
        check_rope(&shape, rope)?;
        if shape.heads().dim != shape.head_dim {
            let valid = format!("a dimension that needs no zeros, such as {}", shape.heads().dim);
            return Err(input("dimension of a head of a made-up net", shape.head_dim, valid));
        }
        let table = |values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            Buffer::of(device, &bytes)
        };
        Self::of(device, shape, numbers, most_tokens, || {
            let angles = match rope.filter(|_| shape.rotates()) {
                Some(Rope { cos, sin }) => Some([table(cos)?, table(sin)?]),
                None => None,
            };
            let kernels = Kernels::new(device, numbers.element());
            let mut maker = Maker { device, kernels, shape: &shape, numbers, next: made.key << 40 };
            Ok((angles, maker.weights(made.logits)?))
        })
    }
}

impl Maker<'_> {
    fn weights(&mut self, logits: f32) -> Result<Weights> {
        let Shape { kind, vocab, width, layers, tied, positions, .. } = *self.shape;
        // States are normalised, so head rows of this size give logits of the wanted standard deviation.
        let head = logits / (width as f32).sqrt();
        let tokens = self.table(vocab, if tied { head } else { 0.5 })?;
        Ok(Weights {
            tokens,
            positions: match kind {
                Kind::Gpt2 => Some(self.buffer(positions * width, 0.02, 0.0)?),
                Kind::Llama | Kind::Qwen3 => None,
            },
            layers: (0..layers).map(|_| self.layer()).collect::<Result<_>>()?,
            last: self.norm()?,
            head: if tied { None } else { Some(self.table(vocab, head)?) },
        })
    }

    fn layer(&mut self) -> Result<Layer> {
        let Shape { kind, width, inner, head_dim, attention_bias, mlp_bias, .. } = *self.shape;
        let [qkv, out] = self.shape.attention_widths();
        let biased = kind == Kind::Gpt2;
        Ok(Layer {
            before_attention: self.norm()?,
            qkv: self.linear([qkv, width], biased || attention_bias)?,
            head_norms: match kind {
                Kind::Qwen3 => Some([self.buffer(head_dim, 0.02, 1.0)?, self.buffer(head_dim, 0.02, 1.0)?]),
                Kind::Gpt2 | Kind::Llama => None,
            },
            attention_out: self.linear([width, out], biased || attention_bias)?,
            before_mlp: self.norm()?,
            up: self.linear([self.shape.up_width(), width], biased || mlp_bias)?,
            down: self.linear([width, inner], biased || mlp_bias)?,
        })
    }

    fn norm(&mut self) -> Result<Norm> {
        let width = self.shape.width;
        let bias = if self.shape.kind == Kind::Gpt2 { Some(self.buffer(width, 0.02, 0.0)?) } else { None };
        Ok(Norm { weight: self.buffer(width, 0.02, 1.0)?, bias })
    }

    fn linear(&mut self, [outputs, inputs]: [usize; 2], biased: bool) -> Result<Linear> {
        let weight = self.buffer(outputs * inputs, 1.0 / (inputs as f32).sqrt(), 0.0)?;
        let bias = if biased { Some(self.buffer(outputs, 0.02, 0.0)?) } else { None };
        Linear::of(weight, bias, [outputs, inputs]).in_numbers(self.numbers, self.device, &self.kernels)
    }

    fn table(&mut self, rows: usize, factor: f32) -> Result<Linear> {
        let width = self.shape.width;
        Ok(Linear::of(self.buffer(rows * width, factor, 0.0)?, None, [rows, width]))
    }

    fn buffer(&mut self, count: usize, factor: f32, term: f32) -> Result<Buffer> {
        let buffer = Buffer::new(self.device, count * self.numbers.element().bytes())?;
        // SAFETY: the buffer has `count` elements
        unsafe { self.kernels.fill(buffer.pointer(), count, self.next, [factor, term])? };
        self.next = self.next.wrapping_add(count as u64);
        Ok(buffer)
    }
}
