//! Qwen2 and Qwen2.5: Yang et al. 2024, "Qwen2 Technical Report" (section 2.2). A Llama with biases of q, k and v,
//! whose later layers may have a window.
//!
//! Qwen3, dense: Qwen Team 2025, "Qwen3 Technical Report" (section 2). Mostly without biases; queries and keys have a
//! norm per head before the rotation, and heads may be wider than H / heads.

use stillhouse_gpu::net::Architecture as DeviceArchitecture;

use super::decoder::{Decoder, Defaults, QueryNorms};
use super::{Family, activation, windows};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Loader, Net, RopeFields};

const DEFAULTS: Defaults = Defaults { kv_heads: Some(32), head_dim: None, eps: 1e-6, tied: false };
const DEFAULTS_3: Defaults = Defaults { head_dim: Some(128), ..DEFAULTS };

/// Qwen2 and Qwen2.5.
pub(super) struct Qwen2;

impl Family for Qwen2 {
    fn name(&self) -> &'static str {
        "qwen2"
    }

    fn class(&self) -> &'static str {
        "Qwen2ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        qwen2(config, loader)
    }
}

/// Qwen3, dense.
pub(super) struct Qwen3;

impl Family for Qwen3 {
    fn name(&self) -> &'static str {
        "qwen3"
    }

    fn class(&self) -> &'static str {
        "Qwen3ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        qwen3(config, loader)
    }

    fn device_kind(&self) -> Option<DeviceArchitecture> {
        Some(DeviceArchitecture::Qwen3)
    }
}

fn qwen2(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &DEFAULTS)?;
    decoder.qkv_bias = true;
    finish(decoder, config, loader)
}

fn qwen3(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &DEFAULTS_3)?;
    decoder.qkv_bias = config.flag_or("attention_bias", false)?;
    decoder.out_bias = decoder.qkv_bias;
    decoder.query_norms = QueryNorms::PerHead;
    finish(decoder, config, loader)
}

fn finish(mut decoder: Decoder, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    let uses_window = config.flag_or("use_sliding_window", false)?;
    let window = config.window("sliding_window", Some(4096))?.filter(|_| uses_window);
    let first = config.count_or("max_window_layers", 28)?;
    let windows = windows(config, decoder.positions.len(), window, |i| i >= first)?;
    decoder.positions.iter_mut().zip(windows).for_each(|(layer, window)| layer.window = window);
    let rope = RopeFields::from_config(config, decoder.head_dim);
    decoder.with_rope(&rope, loader)?.net(config, loader)
}
