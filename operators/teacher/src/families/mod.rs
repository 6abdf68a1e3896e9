//! The families of teachers: how each is recognised, configured and built.
//!
//! To add a family, add a file with its [`Family`] and a line in [`FAMILIES`]. A family of Llama's design describes
//! what differs from it as a [`decoder::Decoder`]; the defaults of [`Family`] fit such a family.

mod decoder;
mod gemma;
mod gpt2;
mod gpt_neox;
mod llama;
mod olmo2;
mod phi3;
mod qwen;

#[cfg(test)]
#[path = "tests/seed_oss.rs"]
mod seed_oss;
#[cfg(test)]
mod tests;

use std::fmt;

pub(crate) use decoder::rope;
use serde_json::{Map, Value};
use stillhouse_gpu::net::Architecture as DeviceArchitecture;

use crate::config_file::ConfigFile;
use crate::error::Result;
use crate::gguf::Gguf;
use crate::net::{Activation, Linear, Loader, Net};

/// The families, in the order in which messages list them.
const FAMILIES: [&dyn Family; 11] = [
    &gpt2::Gpt2,
    &llama::Llama,
    &llama::Mistral,
    &llama::SmolLm3,
    &qwen::Qwen2,
    &qwen::Qwen3,
    &gemma::Gemma2,
    &gemma::Gemma3,
    &gpt_neox::GptNeoX,
    &olmo2::Olmo2,
    &phi3::Phi3,
];

/// A family of teachers. The defaults are those of Llama's design.
pub(crate) trait Family: Sync {
    /// The name in `model_type` of `config.json`.
    fn name(&self) -> &'static str;

    /// The name of its class in `architectures` of `config.json`.
    fn class(&self) -> &'static str;

    /// The name in `general.architecture` of a GGUF file; `None` where files name another family.
    fn gguf_name(&self) -> Option<&'static str> {
        Some(self.name())
    }

    /// Builds the net.
    ///
    /// # Errors
    /// Names the field or tensor that is missing or has another value than this program computes.
    fn load(&self, config: &ConfigFile, loader: &Loader<'_>) -> Result<Net>;

    /// The net of the same design on a device; `None` where only the CPU computes it.
    fn device_kind(&self) -> Option<DeviceArchitecture> {
        None
    }

    /// The prefix of its tensors, which checkpoints of a bare model lack, and the embedding's name, whose presence
    /// tells the two apart.
    fn prefix(&self) -> (&'static str, &'static str) {
        ("model.", "embed_tokens.weight")
    }

    /// The fields of `config.json` that hold its size.
    fn size_fields(&self) -> SizeFields {
        SizeFields { positions: "max_position_embeddings", width: "hidden_size", layers: "num_hidden_layers" }
    }

    /// The fields that decide which tensors there are, for messages.
    fn tensor_fields(&self) -> &'static [&'static str] {
        &["model_type", "num_hidden_layers", "attention_bias", "tie_word_embeddings"]
    }

    /// Whether every layer has the window of `sliding_window`.
    fn every_layer_slides(&self) -> bool {
        false
    }

    /// Whether a tensor is a computed table that older programs stored with the weights. `name` is without prefix.
    fn is_buffer(&self, name: &str, layers: usize) -> bool {
        name == "rotary_emb.inv_freq"
            || is_in_layer(name, layers, "layers.", ".self_attn.rotary_emb.inv_freq")
            || is_in_layer(name, layers, "blk.", ".attn_rot_embd.weight")
    }

    /// What a GGUF file of this family may say.
    fn gguf_features(&self) -> GgufFeatures {
        GgufFeatures::default()
    }

    /// The metadata of a GGUF file as a `config.json`.
    ///
    /// # Errors
    /// Names the key that is missing or has another value than this program computes.
    fn gguf_config(&self, file: &Gguf) -> Result<Value> {
        let (mut json, heads_and_dim) = file.decoder_config(self.name(), &self.gguf_features())?;
        self.gguf_rope(file, heads_and_dim[1], &mut json)?;
        self.add_gguf_fields(file, heads_and_dim, &mut json)?;
        Ok(Value::Object(json))
    }

    /// Adds the rotation in a GGUF file's metadata to its `config.json`.
    ///
    /// # Errors
    /// As [`Family::gguf_config`].
    fn gguf_rope(&self, file: &Gguf, _head_dim: usize, json: &mut Map<String, Value>) -> Result<()> {
        let scaling = file.rope_scaling()?;
        json.insert("rope_theta".into(), file.rope_theta(10_000.0)?);
        json.insert("rope_scaling".into(), scaling);
        Ok(())
    }

    /// Adds the fields that only this family has.
    ///
    /// # Errors
    /// As [`Family::gguf_config`].
    fn add_gguf_fields(&self, _file: &Gguf, _heads_and_dim: [usize; 2], _json: &mut Map<String, Value>) -> Result<()> {
        Ok(())
    }

    /// How a GGUF file stores a tensor. `module` is the second-last part of its Hugging Face name.
    fn gguf_layout(&self, _name: &str, _module: &str, _dimensions: usize) -> GgufLayout {
        GgufLayout::Same
    }
}

/// The fields of `config.json` that hold a model's size.
pub(crate) struct SizeFields {
    /// Length of the longest sequence.
    pub positions: &'static str,
    /// Width of the hidden states, H.
    pub width: &'static str,
    /// Number of layers.
    pub layers: &'static str,
}

/// What a GGUF file of a family may say; the default is what one of Llama's design says.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GgufFeatures {
    /// Soft caps of scores and logits.
    pub soft_caps: bool,
    /// A window of attention.
    pub window: bool,
    /// A norm behind attention, and one behind the MLP.
    pub norms_behind: bool,
    /// A rotation of a part of each head.
    pub partial_rotation: bool,
}

/// How a GGUF file stores a tensor, beside Hugging Face's order of its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GgufLayout {
    /// As Hugging Face does.
    Same,
    /// Rotated pairs are adjacent rows instead of rows in two halves, in each query head.
    PairsOfQueries,
    /// As [`GgufLayout::PairsOfQueries`], in each key head.
    PairsOfKeys,
    /// `[out, in]` instead of `[in, out]`.
    Transposed,
    /// q of all heads, then k, then v, instead of q, k and v of each head.
    ByPart,
    /// 1 is added to every value.
    PlusOne,
}

/// Whether a tensor's name is that of a layer, between `before` and `after`.
fn is_in_layer(name: &str, layers: usize, before: &str, after: &str) -> bool {
    let layer = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
    layer.and_then(|layer| layer.parse::<usize>().ok()).is_some_and(|layer| layer < layers)
}

/// A supported architecture: one of the families.
#[derive(Clone, Copy)]
pub struct Architecture(&'static dyn Family);

impl Architecture {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        FAMILIES.into_iter().map(Self)
    }

    /// The architecture with this name in `model_type`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::all().find(|known| known.name() == name)
    }

    /// The name in `model_type`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.0.name()
    }

    pub(crate) fn family(self) -> &'static dyn Family {
        self.0
    }

    /// The architecture that a `config.json` names by its `model_type`, else by its class.
    pub(crate) fn of_config(config: &ConfigFile) -> Result<Self> {
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let name = text(config.get("model_type"));
        let class = text(config.get("architectures").and_then(|list| list.get(0)));
        let found = Self::all().find(|known| match (&name, &class) {
            (Some(name), _) => name == known.name(),
            (None, Some(class)) => class == known.0.class(),
            (None, None) => false,
        });
        let field = if name.is_none() && class.is_some() { "architectures" } else { "model_type" };
        found.ok_or_else(|| {
            let valid: Vec<_> = Self::all().map(Self::name).collect();
            config.invalid(field, &valid.join(", "))
        })
    }

    /// The architecture that a GGUF file names.
    pub(crate) fn of_gguf(file: &Gguf) -> Result<Self> {
        const KEY: &str = "general.architecture";
        let name = file.text(KEY);
        let found = Self::all().find(|known| known.0.gguf_name().is_some_and(|known| Some(known) == name));
        found.ok_or_else(|| {
            let valid: Vec<_> = FAMILIES.iter().filter_map(|family| family.gguf_name()).collect();
            file.invalid(KEY, &valid.join(", "))
        })
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name() == other.name()
    }
}

impl Eq for Architecture {}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
