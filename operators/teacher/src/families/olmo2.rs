//! OLMo 2: OLMo Team 2024, "2 OLMo 2 Furious" (section 2). Norms follow attention and the MLP instead of preceding
//! them, and queries and keys have one norm over all heads.

use super::activation;
use super::decoder::{Decoder, Defaults, Norms, QueryNorms};
use crate::config::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Loader, Net, RopeFields};

pub(crate) fn load(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &Defaults { kv_heads: None, head_dim: None, eps: 1e-5, tied: false })?;
    config.only("clip_qkv", &[])?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    decoder.qkv_bias = config.flag_or("attention_bias", false)?;
    decoder.out_bias = decoder.qkv_bias;
    decoder.query_norms = QueryNorms::Whole;
    decoder.norms = Norms {
        after_attention: Some("post_attention_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
        ..Norms::default()
    };
    let rope = RopeFields::usual(config, decoder.head_dim);
    decoder.with_rope(&rope, loader)?.net(config, loader)
}
