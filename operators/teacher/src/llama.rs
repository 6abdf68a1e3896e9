//! Llama: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models"; grouped-query attention:
//! Ainslie et al. 2023; the stretched rotary positions of Llama 3.1: Grattafiori et al. 2024, section 3.4.
//!
//! ```text
//! x = embed_tokens[token]
//! x = x + o_proj(attention(rope(q_proj n), rope(k_proj n), v_proj n)),   n = rms_norm x
//! x = x + down(silu(gate m) ⊙ up m),                                     m = rms_norm x
//! logits = rms_norm(x) · lm_headᵀ                                        lm_head is embed_tokens when tied
//! ```
//!
//! Tokens `[B, L]` u32 in, hidden `[B·L, H]` out, in the type of the weights. Cost per token and layer:
//! 4 H (q + kv) D + 6 H I flops (q, kv heads of D; I the inner width) and 2 L q D for attention.

use candle_core::Tensor;
use candle_nn::rotary_emb::rope_thd;
use serde_json::json;

use crate::attention::CausalAttention;
use crate::config::ConfigFile;
use crate::error::Result;
use crate::layers::{GatedMlp, Head, Linear, RmsNorm, Rope};
use crate::weights::Weights;

struct Block {
    input_norm: RmsNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    attention: CausalAttention,
    o_proj: Linear,
    post_norm: RmsNorm,
    mlp: GatedMlp,
}

pub(crate) struct Llama {
    embed_tokens: Tensor,
    rope: Rope,
    blocks: Vec<Block>,
    norm: RmsNorm,
    pub(crate) head: Head,
}

impl Llama {
    pub(crate) fn load(config: &ConfigFile, weights: &Weights) -> Result<Self> {
        config.only("hidden_act", &[json!("silu")])?;
        let (vocab, width) = (config.size("vocab_size")?, config.size("hidden_size")?);
        let (inner, eps) = (config.size("intermediate_size")?, config.float_or("rms_norm_eps", 1e-6)?);
        let attention = heads(config)?;
        let CausalAttention { heads, kv_heads, head_dim } = attention;
        let bias = config.flag_or("attention_bias", false)?;
        let mlp_bias = config.flag_or("mlp_bias", false)?;
        let block = |i: usize| -> Result<Block> {
            let at = |name: &str| format!("layers.{i}.{name}");
            let (q, kv) = (heads * head_dim, kv_heads * head_dim);
            Ok(Block {
                input_norm: RmsNorm::load(weights, &at("input_layernorm"), width, eps)?,
                q_proj: Linear::load(weights, &at("self_attn.q_proj"), width, q, bias)?,
                k_proj: Linear::load(weights, &at("self_attn.k_proj"), width, kv, bias)?,
                v_proj: Linear::load(weights, &at("self_attn.v_proj"), width, kv, bias)?,
                attention,
                o_proj: Linear::load(weights, &at("self_attn.o_proj"), q, width, bias)?,
                post_norm: RmsNorm::load(weights, &at("post_attention_layernorm"), width, eps)?,
                mlp: GatedMlp::load(weights, &at("mlp"), width, inner, mlp_bias)?,
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
            let (q, k) = (rope_thd(&q, &cos, &sin)?, rope_thd(&k, &cos, &sin)?);
            let a = block.attention.forward(&q, &k, &v)?;
            x = (x + block.o_proj.forward(&a)?)?;
            x = (&x + block.mlp.forward(&block.post_norm.forward(&x)?)?)?;
        }
        Ok(self.norm.forward(&x)?)
    }
}

/// The heads that `config.json` describes; `head_dim` may be left to be derived.
pub(crate) fn heads(config: &ConfigFile) -> Result<CausalAttention> {
    let (width, heads) = (config.size("hidden_size")?, config.size("num_attention_heads")?);
    let kv_heads = config.size_or("num_key_value_heads", heads)?;
    if heads % kv_heads != 0 {
        return Err(config.invalid("num_key_value_heads", &format!("a divisor of num_attention_heads = {heads}")));
    }
    if config.get("head_dim").is_none() && width % heads != 0 {
        return Err(config.invalid("num_attention_heads", &format!("a divisor of hidden_size = {width}")));
    }
    let head_dim = config.size_or("head_dim", width / heads)?;
    if head_dim % 2 != 0 {
        return Err(config.invalid("head_dim", "an even number"));
    }
    Ok(CausalAttention { heads, kv_heads, head_dim })
}

/// `lm_head.weight`, or the embedding where they are tied.
pub(crate) fn head(config: &ConfigFile, weights: &Weights, embedding: &Tensor) -> Result<Head> {
    if config.flag_or("tie_word_embeddings", false)? {
        weights.check_tied("lm_head.weight", "embed_tokens.weight")?;
        return Ok(Head::new(embedding.clone()));
    }
    Ok(Head::new(weights.get_bare("lm_head.weight", embedding.dims())?))
}
