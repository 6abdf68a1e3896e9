//! Seed-OSS: ByteDance Seed Team 2025, "Seed-OSS Open-Source Models". A Llama whose queries, keys and values have biases.

use super::decoder::{Decoder, Defaults};
use super::{Family, activation};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Loader, Net, RopeFields};

/// Seed-OSS.
pub(super) struct SeedOss;

impl Family for SeedOss {
    fn name(&self) -> &'static str {
        "seed_oss"
    }

    fn class(&self) -> &'static str {
        "SeedOssForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        let defaults = Defaults { kv_heads: Some(8), head_dim: Some(128), eps: 1e-6, tied: false };
        let mut decoder = Decoder::read(config, &defaults)?;
        decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
        decoder.qkv_bias = config.flag_or("attention_bias", true)?;
        decoder.out_bias = config.flag_or("attention_out_bias", false)?;
        decoder.mlp_bias = config.flag_or("mlp_bias", false)?;
        let rope = RopeFields::from_config(config, decoder.head_dim);
        decoder.with_rope(&rope, loader)?.net(config, loader)
    }
}
