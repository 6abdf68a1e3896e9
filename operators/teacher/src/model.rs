//! What is the same for every architecture: options, checks, batches, information.

use std::path::Path;

use stillhouse_cpu::KeyValues;
use stillhouse_noise::Extraction;

use crate::config::{Architecture, ConfigFile, TeacherConfig, is_gguf};
use crate::device::{DeviceChoice, Precision};
use crate::error::{Result, TeacherError};
use crate::gguf::Gguf;
use crate::gguf_model::LONGROPE_FACTORS;
use crate::net::{Arithmetic, Attention, Loader, Net};
use crate::weights::{Read, Weights};
use crate::{TeacherInfo, families};

/// How to run a teacher.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Where.
    pub device: DeviceChoice,
    /// In which type.
    pub dtype: Precision,
    /// Tokens of one pass at most: what a GPU gets room for, or less where it has no room. A CPU takes what comes.
    pub batch_tokens: usize,
    /// Tokens of the longest sequence, for which a GPU has room in any case.
    pub length: usize,
    /// Tokens of a pass of an earlier run that this one goes on with: a GPU has room for exactly these, or is refused.
    pub pass_tokens: Option<usize>,
    /// What is made of the logits, where it is known: a GPU has room for that beside them.
    pub extraction: Option<Extraction>,
    /// Names of tensors that are no part of the model and may be there all the same, `*` for any characters: `medusa_head.*`.
    pub ignore_tensors: Vec<String>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            dtype: Precision::F32,
            batch_tokens: 16_384,
            length: 1024,
            pass_tokens: None,
            extraction: None,
            ignore_tensors: Vec::new(),
        }
    }
}

/// What manifests and checks say of a teacher that was loaded.
pub(crate) fn describe(
    path: &Path,
    config: &TeacherConfig,
    weights: &Weights,
    dtype: Precision,
    device: &str,
) -> TeacherInfo {
    let format = if is_gguf(path) { "gguf" } else { "safetensors" };
    let stored = weights.stored_types();
    let name = |path: &Path| path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    TeacherInfo {
        architecture: config.architecture,
        vocab_size: config.vocab_size,
        max_positions: config.max_positions,
        hidden_size: config.hidden_size,
        layers: config.layers,
        parameters: weights.parameters(),
        bos_token_id: config.bos_token_id,
        eos_token_id: config.eos_token_id,
        weights: config.weights.iter().map(|path| (name(path), path.clone())).collect(),
        dtype,
        device: device.into(),
        arithmetic: if stored.eq_ignore_ascii_case(&dtype.to_string()) {
            format!("{dtype} ({format})")
        } else {
            format!("{dtype} ({} from {stored} {format})", change(dtype, &stored))
        },
    }
}

/// Checks that the weights are those that the configuration describes: every tensor is there with its shape and a type of
/// weights, and there is no other one. Reads headers only (some kilobytes of each file).
///
/// Known buffers that older programs stored beside the weights are excepted by name: `h.N.attn.bias` and `h.N.attn.masked_bias`
/// of GPT-2, `rotary_emb.inv_freq`, `blk.N.attn_rot_embd.weight`; and `lm_head.weight` where the head is tied to the
/// embedding ([`crate::load`] compares the two). So are those that `ignore` names, each of which has to be there and to be no part of the model.
///
/// Returns a warning where the configuration has keys that are not known.
///
/// # Errors
/// As [`crate::load`], for everything that headers tell.
pub fn check_weights(path: &Path, ignore: &[String]) -> Result<Option<String>> {
    build(path, &TeacherConfig::read(path)?, Arithmetic::F32, Read::Headers, ignore).map(|built| built.warning)
}

/// Bytes that a slot of [`crate::Teacher::decoding`] takes for sequences of so many tokens, at most. Reads headers only.
///
/// # Errors
/// As [`check_weights`]; with a length that LongRoPE stretches, as those positions are rotated by a sequence's whole length.
pub fn decoding_bytes(path: &Path, length: usize, ignore: &[String]) -> Result<u64> {
    let Built { net, .. } = build(path, &TeacherConfig::read(path)?, Arithmetic::F32, Read::Headers, ignore)?;
    check_goes_on(&net, length)?;
    // in which arithmetic is not known yet; those that this machine has not are none
    let of_head = |dim| {
        let bytes = Arithmetic::ALL.into_iter().filter_map(|a| KeyValues::bytes_for(dim, length, a).ok());
        bytes.max().unwrap_or(0)
    };
    let of_layer = |attention: &Attention| attention.kv_heads * of_head(attention.head_dim);
    Ok(net.layers.iter().map(|layer| of_layer(&layer.attention)).sum::<usize>() as u64)
}

/// That a net goes on to so many tokens as it began.
pub(crate) fn check_goes_on(net: &Net, length: usize) -> Result<()> {
    if net.goes_on_to(length) {
        return Ok(());
    }
    let valid = "at most the context before LongRoPE stretched it: beyond, every position is rotated by the sequence's whole length";
    Err(TeacherError::Input { what: "length of a text that is written", got: length.to_string(), valid: valid.into() })
}

/// The weights of a model's files, with what its configuration says; nothing of them is read.
pub(crate) fn open(path: &Path, config: &TeacherConfig, read: Read) -> Result<(ConfigFile, Weights)> {
    let (json, weights) = if is_gguf(path) {
        let gguf = Gguf::open(path)?;
        (gguf.config_file()?, Weights::gguf(gguf, read)?)
    } else {
        let json = ConfigFile::read(&path.join("config.json"))?;
        (json, Weights::safetensors(&config.weights, read)?)
    };
    let (prefix, embedding) = config.architecture.prefix();
    Ok((json, weights.with_prefix_if(prefix, embedding)))
}

/// A net with the weights that it asked for.
pub(crate) struct Built {
    pub net: Net,
    pub weights: Weights,
    /// What a person should know of the configuration.
    pub warning: Option<String>,
}

/// The net of a configuration with the weights that it asked for; every one of the files' tensors is used, and no key is ignored that
/// decides what the net computes.
pub(crate) fn build(
    path: &Path,
    config: &TeacherConfig,
    arithmetic: Arithmetic,
    read: Read,
    ignore: &[String],
) -> Result<Built> {
    let (json, weights) = open(path, config, read)?;
    // before anything is said of tensors, which have other names and types where they are quantized
    if json.get("quantization_config").is_some() {
        let valid = "null or no such key: weights in f32, f16 or bf16 (a .gguf may hold quantized ones)";
        return Err(json.invalid("quantization_config", valid));
    }
    let net = families::load(config.architecture, &json, &Loader { weights: &weights, arithmetic })?;
    let warning = json.check_unread(config.architecture)?;
    weights.check_all_used(&says(path, config, &json), &|name| is_buffer(config, name), ignore)?;
    Ok(Built { net, weights, warning })
}

/// What a configuration says that decides which tensors there are, in its own words.
pub(crate) fn says(path: &Path, config: &TeacherConfig, json: &ConfigFile) -> String {
    if is_gguf(path) {
        let name = config.architecture.gguf_name();
        return format!("{name}.block_count {}, {name}.embedding_length {}", config.layers, config.hidden_size);
    }
    let fields: &[&str] = match config.architecture {
        Architecture::Gpt2 => &["model_type", "n_layer", "tie_word_embeddings"],
        _ => &["model_type", "num_hidden_layers", "attention_bias", "tie_word_embeddings"],
    };
    let named = fields.iter().filter_map(|field| Some(format!("{field} {}", json.get(field)?)));
    format!("config.json: {}", named.collect::<Vec<_>>().join(", "))
}

/// Tensors that are no weights: tables that the model computes, which older programs stored. `name` is without prefix.
pub(crate) fn is_buffer(config: &TeacherConfig, name: &str) -> bool {
    let of_layer = |before: &str, after: &str| {
        let layer = name.strip_prefix(before).and_then(|rest| rest.strip_suffix(after));
        let number = layer.and_then(|layer| layer.parse::<usize>().ok());
        number.is_some_and(|number| number < config.layers)
    };
    match config.architecture {
        Architecture::Gpt2 => of_layer("h.", ".attn.bias") || of_layer("h.", ".attn.masked_bias"),
        Architecture::GptNeoX => {
            let buffers = [".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"];
            buffers.iter().any(|buffer| of_layer("layers.", buffer))
        }
        _ => {
            name == "rotary_emb.inv_freq"
                || of_layer("layers.", ".self_attn.rotary_emb.inv_freq")
                || of_layer("blk.", ".attn_rot_embd.weight")
                // read with the configuration
                || config.architecture == Architecture::Phi3 && LONGROPE_FACTORS.contains(&name)
        }
    }
}

fn change(to: Precision, stored: &str) -> &'static str {
    match to {
        Precision::F32 if !stored.contains("F64") => "widened",
        _ => "converted",
    }
}

/// That tokens fit a teacher.
pub(crate) fn check_tokens(info: &TeacherInfo, tokens: &[u32], batch: usize, length: usize) -> Result<()> {
    let invalid = |what, got: String, valid: String| Err(TeacherError::Input { what, got, valid });
    if length == 0 || length > info.max_positions {
        return invalid("sequence length", length.to_string(), format!("1 to {}", info.max_positions));
    }
    if batch == 0 || batch.checked_mul(length) != Some(tokens.len()) {
        let valid = format!("{batch} sequences of {length}, at least one");
        return invalid("number of tokens", tokens.len().to_string(), valid);
    }
    match tokens.iter().find(|token| **token as usize >= info.vocab_size) {
        Some(token) => invalid("token", token.to_string(), format!("0 to {}", info.vocab_size - 1)),
        None => Ok(()),
    }
}
