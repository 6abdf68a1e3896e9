//! Nets with random weights, which a kernel generates on the device.
//!
//! They are for measurements in which only the shape, the number format and non-zero values of the weights matter.

use std::sync::Arc;

use super::kernels::Kernels;
use super::weights::{Layer, Linear, Norm, Weights};
use super::{Architecture, Net, NumberFormat, Rope, Shape, check_rope, invalid};
use crate::device::{Buffer, Device, Result};
use crate::slices::logits_stride;

/// Parameters of random weights.
#[derive(Debug, Clone, Copy)]
pub struct RandomWeights {
    /// Seed.
    pub seed: u64,
    /// Standard deviation of the logits.
    pub logits_std: f32,
}

/// Generates weights one after another, each from its own part of the random sequence.
struct Generator<'a> {
    device: &'a Arc<dyn Device>,
    kernels: Kernels,
    shape: &'a Shape,
    number_format: NumberFormat,
    next: u64,
}

impl Net {
    /// Creates a net with random weights for passes over at most `max_tokens` tokens.
    ///
    /// # Errors
    /// As [`Net::load`], and if attention was not compiled for the head dimension.
    pub fn with_random_weights(
        device: &Arc<dyn Device>,
        shape: Shape,
        number_format: impl Into<NumberFormat>,
        rope: Option<Rope<'_>>,
        random: RandomWeights,
        max_tokens: usize,
    ) -> Result<Self> {
        let number_format = number_format.into();
        number_format.check(device, &shape)?;
        check_rope(&shape, rope)?;
        if shape.heads().dim != shape.head_dim {
            let valid = format!("a dimension that needs no zeros, such as {}", shape.heads().dim);
            return Err(invalid("dimension of a head of a made-up net", shape.head_dim, valid));
        }
        let table = |values: &[f32]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
            Buffer::from_bytes(device, &bytes)
        };
        Self::allocate_and_load(device, shape, number_format, max_tokens, || {
            let rope_tables = match rope.filter(|_| shape.rotates()) {
                Some(Rope { cos, sin }) => Some([table(cos)?, table(sin)?]),
                None => None,
            };
            let kernels = Kernels::new(device, number_format.element());
            let mut generator = Generator { device, kernels, shape: &shape, number_format, next: random.seed << 40 };
            Ok((rope_tables, generator.weights(random.logits_std)?))
        })
    }
}

impl Generator<'_> {
    fn weights(&mut self, logits_std: f32) -> Result<Weights> {
        let Shape { architecture, width, layers, tied, positions, .. } = *self.shape;
        // States are normalised, so head rows of this size give logits of the wanted standard deviation.
        let head_scale = logits_std / (width as f32).sqrt();
        let token_embedding = self.token_table(if tied { head_scale } else { 0.5 })?;
        Ok(Weights {
            token_embedding,
            position_embedding: match architecture {
                Architecture::Gpt2 => Some(self.buffer(positions * width, 0.02, 0.0)?),
                Architecture::Llama | Architecture::Qwen3 => None,
            },
            layers: (0..layers).map(|_| self.layer()).collect::<Result<_>>()?,
            final_norm: self.norm()?,
            lm_head: if tied { None } else { Some(self.token_table(head_scale)?) },
        })
    }

    fn layer(&mut self) -> Result<Layer> {
        let Shape { architecture, width, inner, head_dim, attention_bias, mlp_bias, .. } = *self.shape;
        let [qkv, out] = self.shape.attention_widths();
        let has_bias = architecture == Architecture::Gpt2;
        Ok(Layer {
            before_attention: self.norm()?,
            qkv: self.linear([qkv, width], has_bias || attention_bias)?,
            head_norms: match architecture {
                Architecture::Qwen3 => Some([self.buffer(head_dim, 0.02, 1.0)?, self.buffer(head_dim, 0.02, 1.0)?]),
                Architecture::Gpt2 | Architecture::Llama => None,
            },
            attention_out: self.linear([width, out], has_bias || attention_bias)?,
            before_mlp: self.norm()?,
            up: self.linear([self.shape.up_width(), width], has_bias || mlp_bias)?,
            down: self.linear([width, inner], has_bias || mlp_bias)?,
        })
    }

    fn norm(&mut self) -> Result<Norm> {
        let width = self.shape.width;
        let bias =
            if self.shape.architecture == Architecture::Gpt2 { Some(self.buffer(width, 0.02, 0.0)?) } else { None };
        Ok(Norm { weight: self.buffer(width, 0.02, 1.0)?, bias })
    }

    fn linear(&mut self, [outputs, inputs]: [usize; 2], has_bias: bool) -> Result<Linear> {
        let weight = self.buffer(outputs * inputs, 1.0 / (inputs as f32).sqrt(), 0.0)?;
        let bias = if has_bias { Some(self.buffer(outputs, 0.02, 0.0)?) } else { None };
        Linear::new(weight, bias, [outputs, inputs]).into_format(self.number_format, self.device, &self.kernels)
    }

    fn token_table(&mut self, factor: f32) -> Result<Linear> {
        let (outputs, width) = (logits_stride(self.shape.vocab), self.shape.width);
        Ok(Linear::new(self.buffer(outputs * width, factor, 0.0)?, None, [outputs, width]))
    }

    fn buffer(&mut self, count: usize, factor: f32, term: f32) -> Result<Buffer> {
        let buffer = Buffer::new(self.device, count * self.number_format.element().bytes())?;
        // SAFETY: the buffer has `count` elements
        unsafe { self.kernels.fill(buffer.pointer(), count, self.next, [factor, term])? };
        self.next = self.next.wrapping_add(count as u64);
        Ok(buffer)
    }
}
