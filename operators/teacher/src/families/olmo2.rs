//! OLMo 2: OLMo Team 2024, "2 OLMo 2 Furious" (section 2). Norms follow attention and the MLP instead of preceding
//! them, and queries and keys have one norm over all heads.

use serde_json::{Map, Value};

use super::decoder::{Decoder, Defaults, Norms, QueryNorms};
use super::{Family, GgufFeatures, activation};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::net::{Activation, Loader, Net, RopeFields};

/// OLMo 2.
pub(super) struct Olmo2;

impl Family for Olmo2 {
    fn name(&self) -> &'static str {
        "olmo2"
    }

    fn class(&self) -> &'static str {
        "Olmo2ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        load(config, loader)
    }

    fn gguf_features(&self) -> GgufFeatures {
        GgufFeatures { window: true, norms_behind: true, ..GgufFeatures::default() }
    }

    fn add_gguf_fields(&self, file: &Gguf, _: [usize; 2], _json: &mut Map<String, Value>) -> Result<()> {
        match file.window() {
            Some(_) => Err(file.invalid(&file.key("attention.sliding_window"), "0, or none")),
            None => Ok(()),
        }
    }
}

fn load(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &Defaults { kv_heads: None, head_dim: None, eps: 1e-5, tied: false })?;
    config.require_one_of("clip_qkv", &[])?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    decoder.qkv_bias = config.flag_or("attention_bias", false)?;
    decoder.out_bias = decoder.qkv_bias;
    decoder.query_norms = QueryNorms::Whole;
    decoder.norms = Norms {
        after_attention: Some("post_attention_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
        ..Norms::default()
    };
    let rope = RopeFields::from_config(config, decoder.head_dim);
    decoder.with_rope(&rope, loader)?.net(config, loader)
}
