//! Qwen3, dense: Qwen Team 2025, "Qwen3 Technical Report" (section 2).
//!
//! ```text
//! x = embed_tokens[token]
//! x = x + o_proj(attention(rope(q_norm(q_proj n)), rope(k_norm(k_proj n)), v_proj n)),   n = rms_norm x
//! x = x + down(silu(gate m) ⊙ up m),                                                     m = rms_norm x
//! logits = rms_norm(x) · lm_headᵀ
//! ```
//!
//! A Llama whose queries and keys are normalised head by head before they are rotated, whose heads may be wider than
//! H / heads, and which has no biases. Tokens `[B, L]` u32 in, hidden `[B·L, H]` out, in the type of the weights; cost
//! as in `llama.rs`.

use candle_core::Tensor;
use candle_nn::rotary_emb::rope_thd;
use serde_json::json;

use crate::attention::CausalAttention;
use crate::config::ConfigFile;
use crate::error::Result;
use crate::layers::{GatedMlp, Head, Linear, RmsNorm, Rope};
use crate::llama::{head, heads};
use crate::weights::Weights;

struct Block {
    input_norm: RmsNorm,
    q_proj: Linear,
    q_norm: RmsNorm,
    k_proj: Linear,
    k_norm: RmsNorm,
    v_proj: Linear,
    attention: CausalAttention,
    o_proj: Linear,
    post_norm: RmsNorm,
    mlp: GatedMlp,
}

pub(crate) struct Qwen3 {
    embed_tokens: Tensor,
    rope: Rope,
    blocks: Vec<Block>,
    norm: RmsNorm,
    pub(crate) head: Head,
}

impl Qwen3 {
    pub(crate) fn load(config: &ConfigFile, weights: &Weights) -> Result<Self> {
        config.only("hidden_act", &[json!("silu")])?;
        config.only("attention_bias", &[json!(false)])?;
        config.only("use_sliding_window", &[json!(false)])?;
        let (vocab, width) = (config.size("vocab_size")?, config.size("hidden_size")?);
        let (inner, eps) = (config.size("intermediate_size")?, config.float_or("rms_norm_eps", 1e-6)?);
        let attention = heads(config)?;
        let CausalAttention { heads, kv_heads, head_dim } = attention;
        let block = |i: usize| -> Result<Block> {
            let at = |name: &str| format!("layers.{i}.{name}");
            let (q, kv) = (heads * head_dim, kv_heads * head_dim);
            Ok(Block {
                input_norm: RmsNorm::load(weights, &at("input_layernorm"), width, eps)?,
                q_proj: Linear::load(weights, &at("self_attn.q_proj"), width, q, false)?,
                q_norm: RmsNorm::load(weights, &at("self_attn.q_norm"), head_dim, eps)?,
                k_proj: Linear::load(weights, &at("self_attn.k_proj"), width, kv, false)?,
                k_norm: RmsNorm::load(weights, &at("self_attn.k_norm"), head_dim, eps)?,
                v_proj: Linear::load(weights, &at("self_attn.v_proj"), width, kv, false)?,
                attention,
                o_proj: Linear::load(weights, &at("self_attn.o_proj"), q, width, false)?,
                post_norm: RmsNorm::load(weights, &at("post_attention_layernorm"), width, eps)?,
                mlp: GatedMlp::load(weights, &at("mlp"), width, inner, false)?,
            })
        };
        let embed_tokens = weights.get("embed_tokens.weight", &[vocab, width])?;
        Ok(Self {
            rope: Rope::load(config, weights, head_dim)?,
            blocks: (0..config.size("num_hidden_layers")?).map(block).collect::<Result<_>>()?,
            norm: RmsNorm::load(weights, "norm", width, eps)?,
            head: head(config, weights, &embed_tokens)?,
            embed_tokens,
        })
    }

    pub(crate) fn hidden(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, length) = tokens.dims2()?;
        let (cos, sin) = self.rope.tables(length)?;
        let mut x = self.embed_tokens.embedding(&tokens.flatten_all()?)?;
        for block in &self.blocks {
            let CausalAttention { heads, kv_heads, head_dim } = block.attention;
            let n = block.input_norm.forward(&x)?;
            let q = block.q_proj.forward(&n)?.reshape((batch, length, heads, head_dim))?;
            let k = block.k_proj.forward(&n)?.reshape((batch, length, kv_heads, head_dim))?;
            let v = block.v_proj.forward(&n)?.reshape((batch, length, kv_heads, head_dim))?;
            let q = rope_thd(&block.q_norm.forward(&q)?, &cos, &sin)?;
            let k = rope_thd(&block.k_norm.forward(&k)?, &cos, &sin)?;
            let a = block.attention.forward(&q, &k, &v)?;
            x = (x + block.o_proj.forward(&a)?)?;
            x = (&x + block.mlp.forward(&block.post_norm.forward(&x)?)?)?;
        }
        Ok(self.norm.forward(&x)?)
    }
}
