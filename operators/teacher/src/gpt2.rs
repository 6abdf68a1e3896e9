//! GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (the block of Radford et al.
//! 2018 with the norms moved in front, and one more at the end).
//!
//! ```text
//! x = wte[token] + wpe[position]
//! x = x + proj(attention(c_attn(ln_1 x)))          q, k, v in one product
//! x = x + c_proj(gelu_new(c_fc(ln_2 x)))           inner width 4H
//! logits = ln_f(x) · wteᵀ
//! ```
//!
//! Tokens `[B, L]` u32 in, hidden `[B·L, H]` out, in the type of the weights. Weights are Conv1D: `[in, out]`.
//! Cost per token and layer: 24 H² flops and 2 L H for attention (half of 4 L H: blocks of the future are skipped).

use candle_core::Tensor;
use serde_json::json;

use crate::attention::CausalAttention;
use crate::config::ConfigFile;
use crate::error::Result;
use crate::kernels::gelu_new;
use crate::layers::{Head, LayerNorm, Linear};
use crate::weights::Weights;

struct Block {
    ln_1: LayerNorm,
    c_attn: Linear,
    attention: CausalAttention,
    proj: Linear,
    ln_2: LayerNorm,
    c_fc: Linear,
    c_proj: Linear,
}

pub(crate) struct Gpt2 {
    wte: Tensor,
    wpe: Tensor,
    blocks: Vec<Block>,
    ln_f: LayerNorm,
    pub(crate) head: Head,
}

impl Gpt2 {
    pub(crate) fn load(config: &ConfigFile, weights: &Weights) -> Result<Self> {
        config.only("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
        config.only("scale_attn_weights", &[json!(true)])?;
        config.only("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
        config.only("add_cross_attention", &[json!(false)])?;
        let (vocab, width) = (config.size("vocab_size")?, config.size("n_embd")?);
        let (heads, inner) = (config.size_or("n_head", 12)?, config.size_or("n_inner", 4 * width)?);
        if width % heads != 0 {
            return Err(config.invalid("n_head", &format!("a divisor of n_embd = {width}")));
        }
        let eps = config.float_or("layer_norm_epsilon", 1e-5)?;
        let attention = CausalAttention { heads, kv_heads: heads, head_dim: width / heads };
        let block = |i: usize| -> Result<Block> {
            let at = |name: &str| format!("h.{i}.{name}");
            Ok(Block {
                ln_1: LayerNorm::load(weights, &at("ln_1"), width, eps)?,
                c_attn: Linear::load_conv1d(weights, &at("attn.c_attn"), width, 3 * width)?,
                attention,
                proj: Linear::load_conv1d(weights, &at("attn.c_proj"), width, width)?,
                ln_2: LayerNorm::load(weights, &at("ln_2"), width, eps)?,
                c_fc: Linear::load_conv1d(weights, &at("mlp.c_fc"), width, inner)?,
                c_proj: Linear::load_conv1d(weights, &at("mlp.c_proj"), inner, width)?,
            })
        };
        let wte = weights.get("wte.weight", &[vocab, width])?;
        let tied = config.flag_or("tie_word_embeddings", true)?;
        let head = if tied {
            weights.check_tied("lm_head.weight", "wte.weight")?;
            wte.clone()
        } else {
            weights.get_bare("lm_head.weight", &[vocab, width])?
        };
        Ok(Self {
            wpe: weights.get("wpe.weight", &[config.size("n_positions")?, width])?,
            blocks: (0..config.size("n_layer")?).map(block).collect::<Result<_>>()?,
            ln_f: LayerNorm::load(weights, "ln_f", width, eps)?,
            head: Head::new(head),
            wte,
        })
    }

    pub(crate) fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.dims2()?;
        let x = self.wte.embedding(&tokens.flatten_all()?)?;
        let width = x.dim(1)?;
        let x = x.reshape((batch, length, width))?.broadcast_add(&self.wpe.narrow(0, 0, length)?)?;
        let mut x = x.reshape((batch * length, width))?;
        for block in &self.blocks {
            let CausalAttention { heads, head_dim, .. } = block.attention;
            let qkv = block.c_attn.forward(&block.ln_1.forward(&x)?)?;
            let qkv = qkv.reshape((batch, length, 3 * heads, head_dim))?;
            let part = |i: usize| qkv.narrow(2, i * heads, heads);
            let a = block.attention.forward(&part(0)?, &part(1)?, &part(2)?)?;
            x = (x + block.proj.forward(&a)?)?;
            let inner = gelu_new(&block.c_fc.forward(&block.ln_2.forward(&x)?)?)?;
            x = (x + block.c_proj.forward(&inner)?)?;
        }
        Ok(self.ln_f.forward(&x)?)
    }
}
