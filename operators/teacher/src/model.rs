//! Loading steps that all architectures share: options, checks, opening files, and the description for manifests.

use std::path::Path;

use stillhouse_cpu::HeadKvCache;
use stillhouse_noise::ExtractionSpec;

use crate::TeacherInfo;
use crate::config::{TeacherConfig, is_gguf};
use crate::config_file::ConfigFile;
use crate::device::{DeviceChoice, Precision};
use crate::error::{Result, TeacherError};
use crate::gguf::Gguf;
use crate::net::{Arithmetic, Attention, Loader, Net};
use crate::weights::{Read, Weights};

/// Options for loading a teacher.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The device to run on.
    pub device: DeviceChoice,
    /// The precision of weights and activations; on a CPU, of weights and products.
    pub dtype: Precision,
    /// Maximum number of tokens in a pass. A GPU allocates memory for as many, or fewer if memory is short. A CPU
    /// accepts passes of any size.
    pub batch_tokens: usize,
    /// Tokens of the longest sequence. A GPU always allocates memory for one.
    pub length: usize,
    /// Tokens per pass of an earlier run that this one resumes. A GPU allocates memory for exactly this number or
    /// fails.
    pub pass_tokens: Option<usize>,
    /// The extraction to run on the logits, if known. A GPU reserves memory for it.
    pub extraction: Option<ExtractionSpec>,
    /// Names of tensors to accept although they are not part of the model, with `*` for any characters:
    /// `medusa_head.*`.
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

/// Describes a loaded teacher for manifests and checks.
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
            format!("{dtype} ({} from {stored} {format})", conversion_verb(dtype, &stored))
        },
    }
}

/// Checks that the weights match the configuration: every tensor exists with its shape and a valid type, and there are
/// no others. Reads only headers (some kilobytes per file).
///
/// Buffers that older programs stored with the weights are accepted by name: `h.N.attn.bias` and `h.N.attn.masked_bias`
/// of GPT-2, `rotary_emb.inv_freq` and `blk.N.attn_rot_embd.weight`. So is `lm_head.weight` if the head is tied to the
/// embedding ([`crate::load`] compares the two). `ignore` names further tensors. Each pattern must match a tensor, and
/// none that the model uses.
///
/// Returns a warning if the configuration has unknown keys.
///
/// # Errors
/// As [`crate::load`], for everything that headers reveal.
pub fn check_weights(path: &Path, ignore: &[String]) -> Result<Option<String>> {
    build(path, &TeacherConfig::read(path)?, Arithmetic::F32, Read::Headers, ignore).map(|built| built.warning)
}

/// Returns an upper bound on the bytes of one slot of [`crate::Teacher::decoding`] for sequences of `length` tokens.
/// Reads only headers.
///
/// # Errors
/// As [`check_weights`]; also if LongRoPE stretches positions at this length, because the whole sequence's length then
/// changes all rotations.
pub fn decoding_bytes(path: &Path, length: usize, ignore: &[String]) -> Result<u64> {
    let BuiltNet { net, .. } = build(path, &TeacherConfig::read(path)?, Arithmetic::F32, Read::Headers, ignore)?;
    check_decodable(&net, length)?;
    // The arithmetic is not known yet, so takes the largest size of all that this machine supports.
    let of_head = |dim| {
        let bytes = Arithmetic::ALL.into_iter().filter_map(|a| HeadKvCache::bytes_for(dim, length, a).ok());
        bytes.max().unwrap_or(0)
    };
    let of_layer = |attention: &Attention| attention.kv_heads * of_head(attention.head_dim);
    Ok(net.layers.iter().map(|layer| of_layer(&layer.attention)).sum::<usize>() as u64)
}

/// Checks that positions are rotated the same way up to `length` tokens, as incremental decoding requires.
pub(crate) fn check_decodable(net: &Net, length: usize) -> Result<()> {
    if net.decodes_up_to(length) {
        return Ok(());
    }
    let valid = "at most the context length before LongRoPE's scaling: beyond it, the rotation of each position depends on the length of the sequence";
    Err(TeacherError::Input { what: "length of a text that is written", got: length.to_string(), valid: valid.into() })
}

/// Opens a model's weight files and configuration, without reading any weight.
pub(crate) fn open(path: &Path, config: &TeacherConfig, read: Read) -> Result<(ConfigFile, Weights)> {
    let (json, weights) = if is_gguf(path) {
        let gguf = Gguf::open(path)?;
        (gguf.config_file()?, Weights::gguf(gguf, read)?)
    } else {
        let json = ConfigFile::read(&path.join("config.json"))?;
        (json, Weights::safetensors(&config.weights, read)?)
    };
    let (prefix, embedding) = config.architecture.family().prefix();
    Ok((json, weights.with_prefix_if(prefix, embedding)))
}

/// A net and the weights it was built from.
pub(crate) struct BuiltNet {
    pub net: Net,
    pub weights: Weights,
    /// A warning about the configuration, for the user.
    pub warning: Option<String>,
}

/// Builds the net of a configuration. Checks that it uses every tensor of the files, and that no ignored key changes
/// what the net computes.
pub(crate) fn build(
    path: &Path,
    config: &TeacherConfig,
    arithmetic: Arithmetic,
    read: Read,
    ignore: &[String],
) -> Result<BuiltNet> {
    let (json, weights) = open(path, config, read)?;
    // This comes before checks of tensors, because quantized tensors have other names and types.
    if json.get("quantization_config").is_some() {
        let valid = "null or no such key: weights in f32, f16 or bf16 (a .gguf may hold quantized ones)";
        return Err(json.invalid("quantization_config", valid));
    }
    let family = config.architecture.family();
    let net = family.load(&json, &Loader { weights: &weights, arithmetic })?;
    let warning = json.check_unread(config.architecture)?;
    weights.check_all_used(
        &quoted_fields(path, config, &json),
        &|name| family.is_buffer(name, config.layers),
        ignore,
    )?;
    Ok(BuiltNet { net, weights, warning })
}

/// Quotes the fields of a configuration that determine which tensors exist.
pub(crate) fn quoted_fields(path: &Path, config: &TeacherConfig, json: &ConfigFile) -> String {
    if is_gguf(path) {
        let family = config.architecture.family();
        let name = family.gguf_name().unwrap_or(family.name());
        return format!("{name}.block_count {}, {name}.embedding_length {}", config.layers, config.hidden_size);
    }
    let fields = config.architecture.family().tensor_fields();
    let named = fields.iter().filter_map(|field| Some(format!("{field} {}", json.get(field)?)));
    format!("config.json: {}", named.collect::<Vec<_>>().join(", "))
}

fn conversion_verb(to: Precision, stored: &str) -> &'static str {
    match to {
        Precision::F32 if !stored.contains("F64") => "widened",
        _ => "converted",
    }
}

/// Checks that tokens match a teacher's vocabulary and context.
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
