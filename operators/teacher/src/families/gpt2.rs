//! GPT-2: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". The block is that of Radford et
//! al. 2018 with the norms moved to the front, and one more norm at the end.
//!
//! ```text
//! x = wte[token] + wpe[position]
//! x = x + proj(attention(c_attn(ln_1 x)))          q, k, v in one product
//! x = x + c_proj(gelu(c_fc(ln_2 x)))               inner width 4H
//! logits = ln_f(x) · wteᵀ
//! ```
//!
//! Weights are stored as Conv1D: `[in, out]`.

use serde_json::{Value, json};
use stillhouse_gpu::net::Architecture as DeviceArchitecture;

use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::families::{Family, GgufLayout, SizeFields, activation, is_in_layer, with_gelu};
use crate::gguf::Gguf;
use crate::net::{Activation, Attention, Embedding, Head, Layer, Loader, Mlp, Net};

/// GPT-2.
pub(super) struct Gpt2;

impl Family for Gpt2 {
    fn name(&self) -> &'static str {
        "gpt2"
    }

    fn class(&self) -> &'static str {
        "GPT2LMHeadModel"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        load(config, loader)
    }

    fn device_kind(&self) -> Option<DeviceArchitecture> {
        Some(DeviceArchitecture::Gpt2)
    }

    fn prefix(&self) -> (&'static str, &'static str) {
        ("transformer.", "wte.weight")
    }

    fn size_fields(&self) -> SizeFields {
        SizeFields { positions: "n_positions", width: "n_embd", layers: "n_layer" }
    }

    fn tensor_fields(&self) -> &'static [&'static str] {
        &["model_type", "n_layer", "tie_word_embeddings"]
    }

    fn is_buffer(&self, name: &str, layers: usize) -> bool {
        [".attn.bias", ".attn.masked_bias"].iter().any(|buffer| is_in_layer(name, layers, "h.", buffer))
    }

    fn gguf_config(&self, file: &Gguf) -> Result<Value> {
        Ok(json!({
            "model_type": self.name(),
            "vocab_size": file.vocab_size()?,
            "n_positions": file.max_positions()?,
            "n_embd": file.hidden_size()?,
            "n_layer": file.layers()?,
            "n_head": file.size(&file.key("attention.head_count"))?,
            "n_inner": file.size(&file.key("feed_forward_length"))?,
            "layer_norm_epsilon": file.eps("attention.layer_norm_epsilon")?,
            "tie_word_embeddings": !file.has("lm_head.weight"),
        }))
    }

    fn gguf_layout(&self, _name: &str, module: &str, dimensions: usize) -> GgufLayout {
        let is_conv1d = matches!(module, "c_attn" | "c_proj" | "c_fc");
        if is_conv1d && dimensions == 2 { GgufLayout::Transposed } else { GgufLayout::Same }
    }
}

fn load(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    config.require_one_of("add_cross_attention", &[json!(false)])?;
    config.require_one_of("reorder_and_upcast_attn", &[json!(false), json!(true)])?;
    let (vocab, width) = (config.size("vocab_size")?, config.size("n_embd")?);
    let (heads, inner) = (config.size_or("n_head", 12)?, config.size_or("n_inner", 4 * width)?);
    if width % heads != 0 {
        return Err(config.invalid("n_head", &format!("a divisor of n_embd = {width}")));
    }
    let eps = config.float_or("layer_norm_epsilon", 1e-5)? as f32;
    let activation = activation(config, "activation_function", Activation::GeluTanh, false)?;
    let head_dim = width / heads;
    let scaled = config.flag_or("scale_attn_weights", true)?;
    let by_layer = config.flag_or("scale_attn_by_inverse_layer_idx", false)?;
    let layer = |i: usize| -> Result<Layer> {
        let at = |name: &str| format!("h.{i}.{name}");
        let scale = if scaled { 1.0 / (head_dim as f32).sqrt() } else { 1.0 };
        let scale = if by_layer { scale / (i + 1) as f32 } else { scale };
        Ok(Layer {
            before_attention: Some(loader.layer_norm(&at("ln_1"), width, eps)?),
            qkv: loader.conv1d(&at("attn.c_attn"), width, 3 * width)?,
            attention: Attention { heads, kv_heads: heads, head_dim, scale, ..Attention::default() },
            out: loader.conv1d(&at("attn.c_proj"), width, width)?,
            after_attention: None,
            before_mlp: Some(loader.layer_norm(&at("ln_2"), width, eps)?),
            mlp: Mlp {
                up: with_gelu(loader.conv1d(&at("mlp.c_fc"), width, inner)?, activation),
                activation,
                down: loader.conv1d(&at("mlp.c_proj"), inner, width)?,
            },
            after_mlp: None,
            parallel: false,
        })
    };
    let tokens = loader.matrix("wte.weight", [vocab, width])?;
    let layers = (0..config.size("n_layer")?).map(layer).collect::<Result<_>>()?;
    let positions = loader.matrix("wpe.weight", [config.size("n_positions")?, width])?;
    let tied = config.flag_or("tie_word_embeddings", true)?;
    Ok(Net {
        width,
        head: Head {
            weight: loader.head(tied, ["lm_head.weight", "wte.weight"], &tokens, [vocab, width])?,
            tied,
            soft_cap: None,
        },
        embedding: Embedding { tokens, scale: 1.0, positions: Some(positions) },
        ropes: Vec::new(),
        layers,
        last: loader.layer_norm("ln_f", width, eps)?,
    })
}
