//! Llama: Touvron et al. 2023, "LLaMA: Open and Efficient Foundation Language Models". Grouped-query attention: Ainslie
//! et al. 2023. The scaled rotary positions of Llama 3.1: Grattafiori et al. 2024, section 3.4.
//!
//! Two families differ only in the positions that layers see: Mistral (Jiang et al. 2023, section 2: a window) and
//! SmolLM3 (Bakouch et al. 2025: every fourth layer without positions).

use serde_json::{Value, json};
use stillhouse_gpu::net::Architecture as DeviceArchitecture;

use super::decoder::{Decoder, Defaults, Positions};
use super::{Family, GgufLayout, activation, windows};
use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::net::{Activation, Loader, Net, RopeFields};

const DEFAULTS: Defaults = Defaults { kv_heads: None, head_dim: None, eps: 1e-6, tied: false };

/// Llama 1 to 3, SmolLM, TinyLlama and other models of the same design.
pub(super) struct Llama;

impl Family for Llama {
    fn name(&self) -> &'static str {
        "llama"
    }

    fn class(&self) -> &'static str {
        "LlamaForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        llama(config, loader)
    }

    fn device_kind(&self) -> Option<DeviceArchitecture> {
        Some(DeviceArchitecture::Llama)
    }

    fn gguf_layout(&self, _name: &str, module: &str, _dimensions: usize) -> GgufLayout {
        pairs(module)
    }
}

/// Mistral.
pub(super) struct Mistral;

impl Family for Mistral {
    fn name(&self) -> &'static str {
        "mistral"
    }

    fn class(&self) -> &'static str {
        "MistralForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        mistral(config, loader)
    }

    fn gguf_name(&self) -> Option<&'static str> {
        // files of Mistral say llama
        None
    }

    fn every_layer_slides(&self) -> bool {
        true
    }
}

/// SmolLM3.
pub(super) struct SmolLm3;

impl Family for SmolLm3 {
    fn name(&self) -> &'static str {
        "smollm3"
    }

    fn class(&self) -> &'static str {
        "SmolLM3ForCausalLM"
    }

    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
        smollm3(config, loader)
    }

    fn gguf_layout(&self, _name: &str, module: &str, _dimensions: usize) -> GgufLayout {
        pairs(module)
    }
}

/// GGUF files of these families store the rotated pairs of queries and keys as adjacent rows.
fn pairs(module: &str) -> GgufLayout {
    match module {
        "q_proj" => GgufLayout::PairsOfQueries,
        "k_proj" => GgufLayout::PairsOfKeys,
        _ => GgufLayout::Same,
    }
}

fn llama(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &DEFAULTS)?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    decoder.qkv_bias = config.flag_or("attention_bias", false)?;
    decoder.out_bias = decoder.qkv_bias;
    decoder.mlp_bias = config.flag_or("mlp_bias", false)?;
    let rope = RopeFields::from_config(config, decoder.head_dim);
    decoder.with_rope(&rope, loader)?.net(config, loader)
}

fn mistral(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &Defaults { kv_heads: Some(8), ..DEFAULTS })?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    let window = config.window("sliding_window", Some(4096))?;
    decoder.positions.iter_mut().for_each(|layer| layer.window = window);
    let rope = RopeFields::from_config(config, decoder.head_dim);
    decoder.with_rope(&rope, loader)?.net(config, loader)
}

fn smollm3(config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    let mut decoder = Decoder::read(config, &Defaults { kv_heads: Some(4), tied: true, ..DEFAULTS })?;
    decoder.activation = activation(config, "hidden_act", Activation::SwiGlu, true)?;
    decoder.qkv_bias = config.flag_or("attention_bias", false)?;
    decoder.out_bias = decoder.qkv_bias;
    decoder.mlp_bias = config.flag_or("mlp_bias", false)?;
    let layers = decoder.positions.len();
    let rotated = rotated_layers(config, layers)?;
    let uses_window = config.flag_or("use_sliding_window", false)?;
    let window = config.window("sliding_window", None)?.filter(|_| uses_window);
    let windows = windows(config, layers, window, |i| !rotated[i])?;
    for (layer, (rotates, window)) in decoder.positions.iter_mut().zip(rotated.into_iter().zip(windows)) {
        *layer = Positions { window, rope: rotates.then_some(0) };
    }
    let mut rope = RopeFields::from_config(config, decoder.head_dim);
    rope.theta = 2_000_000.0;
    decoder.with_rope(&rope, loader)?.net(config, loader)
}

/// Returns which layers are rotated. SmolLM3's `no_rope_layers` holds 1 for a rotated layer; without it, every
/// `no_rope_layer_interval`-th layer is not rotated.
fn rotated_layers(config: &ConfigFile, layers: usize) -> Result<Vec<bool>> {
    let field = "no_rope_layers";
    let Some(list) = config.get(field) else {
        let interval = config.size_or("no_rope_layer_interval", 4)?;
        return Ok((0..layers).map(|i| (i + 1) % interval != 0).collect());
    };
    let read = |flag: &Value| [json!(0), json!(1)].iter().position(|valid| valid == flag).map(|flag| flag == 1);
    let list = list.as_array().filter(|list| list.len() == layers);
    let list: Option<Vec<bool>> = list.and_then(|list| list.iter().map(read).collect());
    list.ok_or_else(|| config.invalid(field, &format!("{layers} of 0, 1")))
}
