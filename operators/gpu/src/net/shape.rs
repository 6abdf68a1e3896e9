//! The shape of a net, and the memory it needs.

use super::NumberFormat;
use super::kernels::{Heads, ITEM_BYTES, padded_dim};
use crate::device::{Element, Result};
use crate::error::GpuError;
use crate::slices::logits_stride;

/// A model architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Learned positions, LayerNorm, an ungated feed-forward block, biases, weights stored as Conv1D.
    Gpt2,
    /// Rotary positions, RMSNorm, a gated feed-forward block.
    Llama,
    /// As Llama, with norms on the query and key heads before the rotation.
    Qwen3,
}

/// The activation between the two products of a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `silu(gate) ⊙ up`.
    SwiGlu,
    /// `gelu(gate) ⊙ up`, with the tanh approximation.
    GeGlu,
    /// GELU with the tanh approximation.
    GeluTanh,
    /// GELU.
    Gelu,
}

impl Activation {
    /// Whether the input consists of a gate and a value.
    #[must_use]
    pub const fn is_gated(self) -> bool {
        matches!(self, Self::SwiGlu | Self::GeGlu)
    }
}

/// The shape of a net.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Architecture.
    pub architecture: Architecture,
    /// Vocabulary size V.
    pub vocab: usize,
    /// Width H of the residual stream.
    pub width: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads.
    pub kv_heads: usize,
    /// Elements of a head, D.
    pub head_dim: usize,
    /// Inner width of the feed-forward block.
    pub inner: usize,
    /// Activation of the feed-forward block: gated for Llama and Qwen3, not gated for GPT-2.
    pub activation: Activation,
    /// Whether attention scores are divided by sqrt(D).
    pub scaled: bool,
    /// Whether attention scores are divided by the number of the layer, counted from 1.
    pub scaled_by_layer: bool,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Maximum tokens of a run.
    pub positions: usize,
    /// Whether the LM head shares the embedding's weight.
    pub tied: bool,
    /// Whether q, k, v and o have biases; GPT-2 always has them.
    pub attention_bias: bool,
    /// Whether the feed-forward block has biases; GPT-2 always has them.
    pub mlp_bias: bool,
}

fn invalid(what: &'static str, got: impl ToString, valid: impl Into<String>) -> GpuError {
    GpuError::Input { what, got: got.to_string(), valid: valid.into() }
}

impl Shape {
    /// Checks that the kernels can compute a net of this shape.
    ///
    /// # Errors
    /// The first invalid field, with what is valid.
    pub fn check(&self) -> Result<()> {
        let sizes = [
            ("vocabulary", self.vocab),
            ("width", self.width),
            ("heads", self.heads),
            ("key and value heads", self.kv_heads),
            ("inner width", self.inner),
            ("positions", self.positions),
        ];
        for (what, size) in sizes {
            if size == 0 || u32::try_from(size).is_err() {
                return Err(invalid(what, size, "at least 1, below 2^32"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let valid = format!("a divisor of the {} heads", self.heads);
            return Err(invalid("key and value heads", self.kv_heads, valid));
        }
        if self.head_dim == 0 || padded_dim(self.head_dim).is_none() {
            return Err(invalid("dimension of a head", self.head_dim, "1 to 256"));
        }
        if self.rotates() && !self.head_dim.is_multiple_of(2) {
            return Err(invalid("dimension of a head", self.head_dim, "an even number"));
        }
        if !self.rotates() && self.kv_heads != self.heads {
            return Err(invalid("key and value heads", self.kv_heads, format!("{}, as many as heads", self.heads)));
        }
        if self.is_gated() != self.rotates() {
            let valid = if self.rotates() { "SwiGlu, GeGlu" } else { "GeluTanh, Gelu" };
            return Err(invalid("activation", format!("{:?}", self.activation), valid));
        }
        Ok(())
    }

    /// Whether positions are rotary.
    #[must_use]
    pub fn rotates(&self) -> bool {
        self.architecture != Architecture::Gpt2
    }

    /// Whether the first product of the feed-forward block computes gate ‖ up.
    pub(super) fn is_gated(&self) -> bool {
        self.activation.is_gated()
    }

    /// The factor of the attention scores of a layer; layers count from 0.
    pub(super) fn score_scale(&self, layer: usize) -> f64 {
        let scale = if self.scaled { 1.0 / (self.head_dim as f64).sqrt() } else { 1.0 };
        if self.scaled_by_layer { scale / (layer + 1) as f64 } else { scale }
    }

    pub(super) fn heads(&self) -> Heads {
        let dim = padded_dim(self.head_dim).unwrap_or(self.head_dim);
        Heads { heads: self.heads, kv_heads: self.kv_heads, dim, model_dim: self.head_dim }
    }

    /// Elements of a fused row of q, k and v, and of an output row of attention.
    pub(super) fn attention_widths(&self) -> [usize; 2] {
        let Heads { heads, kv_heads, dim, .. } = self.heads();
        [(heads + 2 * kv_heads) * dim, heads * dim]
    }

    /// Outputs of the first product of the feed-forward block.
    pub(super) fn up_width(&self) -> usize {
        if self.is_gated() { 2 * self.inner } else { self.inner }
    }

    /// Bytes of the weights on the device, without the rounding of allocations.
    #[must_use]
    pub fn weight_bytes(&self, number_format: impl Into<NumberFormat>) -> u64 {
        match number_format.into() {
            NumberFormat::Dtype(element) => self.plain_weight_bytes(element),
            NumberFormat::Fp8 => self.fp8_weight_bytes(),
        }
    }

    fn plain_weight_bytes(&self, element: Element) -> u64 {
        let Heads { dim, .. } = self.heads();
        let [qkv, attention] = self.attention_widths();
        let (width, up, gpt2) = (self.width, self.up_width(), !self.rotates());
        let biases = |on: bool, outputs: usize| if on || gpt2 { outputs } else { 0 };
        let norm = if gpt2 { 2 * width } else { width };
        let heads_norms = if self.architecture == Architecture::Qwen3 { 2 * dim } else { 0 };
        let layer = (qkv + attention) * width
            + biases(self.attention_bias, qkv + width)
            + (up + self.inner) * width
            + biases(self.mlp_bias, up + width)
            + 2 * norm
            + heads_norms;
        let tables = if gpt2 { 0 } else { 2 * self.positions * dim / 2 * Element::F32.bytes() };
        let embeddings = logits_stride(self.vocab) * width * if self.tied { 1 } else { 2 }
            + if gpt2 { self.positions * width } else { 0 };
        ((layer * self.layers + embeddings + norm) * element.bytes() + tables) as u64
    }

    /// Checks that the products of this net can be 8-bit.
    ///
    /// # Errors
    /// The first invalid field, with what is valid.
    pub(super) fn check_fp8(&self) -> Result<()> {
        // Head dimensions in memory are always multiples of 16.
        for (what, size) in [("width of a net in fp8", self.width), ("inner width of a net in fp8", self.inner)] {
            if !size.is_multiple_of(FP8_ALIGN) {
                return Err(invalid(what, size, format!("a multiple of {FP8_ALIGN}")));
            }
        }
        Ok(())
    }

    /// Bytes with 8-bit products in the layers and a scale per output; all other weights are 16-bit.
    fn fp8_weight_bytes(&self) -> u64 {
        let [qkv, attention] = self.attention_widths();
        let (width, up) = (self.width, self.up_width());
        let elements = (qkv + attention) * width + (up + self.inner) * width;
        let scales = (qkv + up + 2 * width) * Element::F32.bytes();
        self.plain_weight_bytes(Element::Bf16) - (self.layers * elements) as u64 + (self.layers * scales) as u64
    }

    /// Extra bytes while an 8-bit weight is made from a 16-bit one: the largest 16-bit weight.
    #[must_use]
    pub fn loading_bytes(&self, number_format: NumberFormat) -> u64 {
        if number_format != NumberFormat::Fp8 {
            return 0;
        }
        let [qkv, _] = self.attention_widths();
        (qkv.max(self.up_width()) * self.width * number_format.element().bytes()) as u64
    }

    /// Inputs of the widest product of a layer.
    pub(super) fn widest_input(&self) -> usize {
        let [_, attention] = self.attention_widths();
        self.width.max(attention).max(self.inner)
    }

    /// Bytes of a pass's buffers for at most `max_tokens` tokens.
    #[must_use]
    pub fn workspace_bytes(&self, number_format: impl Into<NumberFormat>, max_tokens: usize) -> u64 {
        let (number_format, [wide, narrow]) = (number_format.into(), self.work_widths());
        let fp8_bytes = if number_format == NumberFormat::Fp8 { self.widest_input() + Element::F32.bytes() } else { 0 };
        let row = (2 * self.width + wide + narrow) * number_format.element().bytes() + fp8_bytes;
        (row * number_format.padded_rows(max_tokens) + (INPUT_BYTES + ROW_BYTES) * max_tokens) as u64
    }

    /// Elements per token of the two buffers that the steps between residual sums share.
    ///
    /// - The first holds q, k and v, or the feed-forward block's first product.
    /// - The second holds attention's output, the inner activations, or gathered rows for the LM head.
    pub(super) fn work_widths(&self) -> [usize; 2] {
        let [qkv, attention] = self.attention_widths();
        let inner = if self.is_gated() { self.inner } else { 0 };
        [qkv.max(self.up_width()), attention.max(inner).max(self.width)]
    }
}

/// Divisor that 8-bit products require of rows and outputs.
const FP8_ALIGN: usize = 16;
/// Bytes per token of a pass's inputs: a token, its position, and at most one work item of attention.
pub(super) const INPUT_BYTES: usize = 2 * size_of::<u32>() + ITEM_BYTES;
/// Bytes per row number that the LM head gathers.
pub(super) const ROW_BYTES: usize = size_of::<u32>();
