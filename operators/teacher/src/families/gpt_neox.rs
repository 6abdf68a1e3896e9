//! GPT-NeoX, Pythia: Black et al. 2022, "GPT-NeoX-20B" (section 2.1); Biderman et al. 2023, "Pythia".
//!
//! ```text
//! x = embed_in[token]
//! x = x + dense(attention(rope(q), rope(k), v)) + 4h_to_h(gelu(h_to_4h(post_attention_layernorm x)))    q, k, v of input_layernorm x
//! logits = final_layer_norm(x) · embed_outᵀ
//! ```
//!
//! With `use_parallel_residual` (the default), attention and the MLP read the same x. Only a part of each head is
//! rotated. The rows of `query_key_value` are q, k and v of the first head, then of the second, and so on; this module
//! reorders them to q, k, v of all heads.

use serde_json::{Value, json};

use super::{Family, GgufLayout, activation, is_in_layer, with_gelu};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::net::{
    Activation, Attention, Bias, Embedding, Head, Layer, Linear, Loader, Mlp, Net, RopeFields, WeightLayout,
};

/// GPT-NeoX and Pythia.
pub(super) struct GptNeoX;

impl Family for GptNeoX {
    fn name(&self) -> &'static str {
        "gpt_neox"
    }

    fn class(&self) -> &'static str {
        "GPTNeoXForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        load(config, loader)
    }

    fn gguf_name(&self) -> Option<&'static str> {
        Some("gptneox")
    }

    fn prefix(&self) -> (&'static str, &'static str) {
        ("gpt_neox.", "embed_in.weight")
    }

    fn is_buffer(&self, name: &str, layers: usize) -> bool {
        let buffers = [".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"];
        buffers.iter().any(|buffer| is_in_layer(name, layers, "layers.", buffer))
    }

    fn gguf_config(&self, file: &Gguf) -> Result<Value> {
        let (heads, width) = (file.size(&file.key("attention.head_count"))?, file.hidden_size()?);
        let rotated = match file.value(&file.key("rope.dimension_count")) {
            None => width / heads,
            Some(_) => file.size(&file.key("rope.dimension_count"))?,
        };
        let parallel = file.value(&file.key("use_parallel_residual")).is_none_or(|flag| flag.to_bool().unwrap_or(true));
        Ok(json!({
            "model_type": self.name(),
            "vocab_size": file.vocab_size()?,
            "max_position_embeddings": file.max_positions()?,
            "hidden_size": width,
            "intermediate_size": file.size(&file.key("feed_forward_length"))?,
            "num_hidden_layers": file.layers()?,
            "num_attention_heads": heads,
            "layer_norm_eps": file.eps("attention.layer_norm_epsilon")?,
            "rotary_pct": rotated as f64 / (width / heads) as f64,
            "rotary_emb_base": file.float(&file.key("rope.freq_base"))?.unwrap_or(10_000.0),
            "use_parallel_residual": parallel,
            "attention_bias": file.has("layers.0.attention.query_key_value.bias"),
            "tie_word_embeddings": !file.has("embed_out.weight"),
        }))
    }

    fn gguf_layout(&self, _name: &str, module: &str, _dimensions: usize) -> GgufLayout {
        if module == "query_key_value" { GgufLayout::ByPart } else { GgufLayout::Same }
    }
}

fn load(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let (vocab, width) = (config.size("vocab_size")?, config.size("hidden_size")?);
    let (heads, inner) = (config.size("num_attention_heads")?, config.size("intermediate_size")?);
    if width % heads != 0 {
        return Err(config.invalid("num_attention_heads", &format!("a divisor of hidden_size = {width}")));
    }
    let head_dim = width / heads;
    let eps = config.float_or("layer_norm_eps", 1e-5)? as f32;
    let activation = activation(config, "hidden_act", Activation::Gelu, false)?;
    let bias = config.flag_or("attention_bias", true)?;
    let parallel = config.flag_or("use_parallel_residual", true)?;
    let mut rope = RopeFields::from_config(config, head_dim);
    rope.theta = config.float_or("rotary_emb_base", 10_000.0)?;
    let pct = config.float_or("rotary_pct", 0.25)?;
    rope.rotated = config.rotated("partial_rotary_factor", head_dim, pct)?;
    let layer = |i: usize| -> Result<Layer> {
        let at = |name: &str| format!("layers.{i}.{name}");
        let linear = |name: &str, inputs: usize, outputs: usize, bias: bool| {
            loader.linear(&[(at(name), outputs)], inputs, Bias::from(bias))
        };
        Ok(Layer {
            before_attention: Some(loader.layer_norm(&at("input_layernorm"), width, eps)?),
            qkv: query_key_value(loader, &at("attention.query_key_value"), [heads, head_dim, width], bias)?,
            attention: Attention {
                heads,
                kv_heads: heads,
                head_dim,
                scale: 1.0 / (head_dim as f32).sqrt(),
                rope: Some(0),
                ..Attention::default()
            },
            out: linear("attention.dense", width, width, bias)?,
            after_attention: None,
            before_mlp: Some(loader.layer_norm(&at("post_attention_layernorm"), width, eps)?),
            mlp: Mlp {
                up: with_gelu(linear("mlp.dense_h_to_4h", width, inner, true)?, activation),
                activation,
                down: linear("mlp.dense_4h_to_h", inner, width, true)?,
            },
            after_mlp: None,
            parallel,
        })
    };
    let tokens = loader.matrix("embed_in.weight", [vocab, width])?;
    let layers = (0..config.size("num_hidden_layers")?).map(layer).collect::<Result<_>>()?;
    let tied = config.flag_or("tie_word_embeddings", false)?;
    // Newer checkpoints may use the common name.
    let head = if loader.weights.has("lm_head.weight") { "lm_head.weight" } else { "embed_out.weight" };
    Ok(Net {
        width,
        head: Head {
            weight: loader.head(tied, [head, "embed_in.weight"], &tokens, [vocab, width])?,
            tied,
            soft_cap: None,
        },
        embedding: Embedding { tokens, scale: 1.0, positions: None },
        ropes: vec![rope.read(None)?],
        layers,
        last: loader.layer_norm("final_layer_norm", width, eps)?,
    })
}

/// Reorders `[heads, 3, D, H]` to `[3, heads, D, H]`.
fn query_key_value(loader: &Loader<'_>, name: &str, [heads, dim, width]: [usize; 3], bias: bool) -> Result<Linear> {
    let rows = 3 * heads * dim;
    let sort = |from: &[f32], width: usize| -> Vec<f32> {
        let parts: Vec<&[f32]> = from.chunks_exact(dim * width).collect();
        let order = (0..3).flat_map(|part| (0..heads).map(move |head| head * 3 + part));
        order.filter_map(|i| parts.get(i)).flat_map(|part| part.iter().copied()).collect()
    };
    let weight = sort(&loader.matrix(&format!("{name}.weight"), [rows, width])?, width);
    let bias = match bias {
        true => Some(sort(&loader.vector(&format!("{name}.bias"), rows)?, 1)),
        false => None,
    };
    loader.packed(&weight, [rows, width], WeightLayout::Outputs, bias)
}
