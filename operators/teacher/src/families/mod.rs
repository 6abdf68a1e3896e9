//! The families of teachers: builds a net from the configuration of each.
//!
//! To add a family, add a file with a `load`, a line in [`load`], and a variant of [`crate::Architecture`].

mod decoder;
mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod olmo2;
mod phi3;
mod qwen;

pub(crate) use decoder::rope;
use serde_json::Value;

use crate::config::{Architecture, ConfigFile};
use crate::error::Result;
use crate::net::{Activation, Linear, Loader, Net};

/// Builds the net of a configuration.
pub(crate) fn load(architecture: Architecture, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net> {
    match architecture {
        Architecture::Gpt2 => gpt2::load(config, loader),
        Architecture::Llama => llama::llama(config, loader),
        Architecture::Mistral => llama::mistral(config, loader),
        Architecture::SmolLm3 => llama::smollm3(config, loader),
        Architecture::Qwen2 => qwen::qwen2(config, loader),
        Architecture::Qwen3 => qwen::qwen3(config, loader),
        Architecture::Gemma2 => gemma::gemma2(config, loader),
        Architecture::Gemma3 => gemma::gemma3(config, loader),
        Architecture::GptNeoX => gpt_neox::load(config, loader),
        Architecture::Olmo2 => olmo2::load(config, loader),
        Architecture::Phi3 => phi3::load(config, loader),
    }
}

/// Reads the MLP's activation from `field`.
fn activation(config: &ConfigFile, field: &str, default: Activation, gated: bool) -> Result<Activation> {
    use Activation::{GeGlu, Gelu, GeluTanh, SwiGlu};
    match (config.get(field).map(|name| name.as_str().unwrap_or_default()), gated) {
        (None, _) => Ok(default),
        (Some("silu" | "swish"), true) => Ok(SwiGlu),
        (Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast"), true) => Ok(GeGlu),
        (Some("gelu_pytorch_tanh" | "gelu_new" | "gelu_fast"), false) => Ok(GeluTanh),
        (Some("gelu"), false) => Ok(Gelu),
        (Some(_), true) => Err(config.invalid(field, "silu, gelu_pytorch_tanh")),
        (Some(_), false) => Err(config.invalid(field, "gelu_new, gelu_pytorch_tanh, gelu")),
    }
}

/// Adds GELU as the epilogue of an ungated MLP's first product, if the product supports the activation.
fn with_gelu(up: Linear, activation: Activation) -> Linear {
    if activation == Activation::GeluTanh { up.with_gelu() } else { up }
}

/// Returns the window of each layer: from `layer_types` if present, else in the layers that `default` selects.
fn windows(
    config: &ConfigFile,
    layers: usize,
    window: Option<usize>,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<Option<usize>>> {
    let field = "layer_types";
    let Some(types) = config.get(field) else {
        return Ok((0..layers).map(|i| window.filter(|_| default(i))).collect());
    };
    let read = |name: &Value| match name.as_str() {
        Some("sliding_attention") if window.is_some() => Some(window),
        Some("full_attention") => Some(None),
        _ => None,
    };
    let list = types.as_array().filter(|all| all.len() == layers);
    let list: Option<Vec<_>> = list.and_then(|all| all.iter().map(read).collect());
    list.ok_or_else(|| {
        let sliding = if window.is_some() { ", sliding_attention" } else { " (sliding_window is none)" };
        config.invalid(field, &format!("{layers} of full_attention{sliding}"))
    })
}
