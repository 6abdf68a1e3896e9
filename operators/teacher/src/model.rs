//! Loading, and what is the same for every architecture: checks, batches, information.

use std::path::Path;

use candle_core::{DType, Device, Tensor};

use crate::config::{Architecture, ConfigFile, TeacherConfig, is_gguf};
use crate::device::{DeviceChoice, Opened, Precision};
use crate::error::{Result, TeacherError};
use crate::gguf::Gguf;
use crate::gpt2::Gpt2;
use crate::gpu;
use crate::layers::Head;
use crate::llama::Llama;
use crate::qwen3::Qwen3;
use crate::weights::{Read, Weights};
use crate::{HostTeacher, OnHost, Teacher, TeacherInfo};

/// On a CPU a batch runs in pieces of about this many tokens: what a layer writes then stays below the size from
/// which the allocator hands out fresh, unmapped pages every time.
const CPU_TOKENS: usize = 2048;

/// How to run a teacher.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Where.
    pub device: DeviceChoice,
    /// In which type.
    pub dtype: Precision,
    /// Tokens of one pass at most: what a GPU gets room for, or less where it has no room. A CPU takes what comes.
    pub batch_tokens: usize,
    /// Tokens of the longest sequence, for which a GPU has room in any case.
    pub length: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { device: DeviceChoice::Auto, dtype: Precision::F32, batch_tokens: 16_384, length: 1024 }
    }
}

enum Net {
    Gpt2(Gpt2),
    Llama(Llama),
    Qwen3(Qwen3),
}

struct Model {
    info: TeacherInfo,
    net: Net,
}

/// Loads the model in a folder (`config.json` beside `*.safetensors`, sharded or not) or in a `.gguf` file.
///
/// # Errors
/// Names the file and the field or tensor, what was found and what is valid. Tensors that the configuration does not
/// describe are an error as missing ones are.
pub fn load(path: &Path, options: &LoadOptions) -> Result<Box<dyn Teacher>> {
    match options.device.open()? {
        Opened::Cpu => Ok(Box::new(OnHost(load_model(path, options.dtype)?))),
        Opened::Gpu(device) => gpu::load(path, &device, options),
    }
}

/// The same on the CPU, for those who want its tensors.
///
/// # Errors
/// As [`load`].
pub fn load_on_host(path: &Path, dtype: Precision) -> Result<Box<dyn HostTeacher>> {
    Ok(Box::new(load_model(path, dtype)?))
}

fn load_model(path: &Path, dtype: Precision) -> Result<Model> {
    let config = TeacherConfig::read(path)?;
    let (net, weights) = build(path, &config, &Device::Cpu, dtype.dtype(), Read::Weights)?;
    let info = describe(path, &config, &weights, dtype, "cpu");
    Ok(Model { info, net })
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
/// embedding ([`load`] compares the two).
///
/// # Errors
/// As [`load`], for everything that headers tell.
pub fn check_weights(path: &Path) -> Result<()> {
    build(path, &TeacherConfig::read(path)?, &Device::Cpu, DType::F32, Read::Headers).map(|_| ())
}

/// The net of a configuration with the weights that it asked for; every one of the files' tensors is used.
fn build(path: &Path, config: &TeacherConfig, device: &Device, dtype: DType, read: Read) -> Result<(Net, Weights)> {
    let (json, weights) = if is_gguf(path) {
        let gguf = Gguf::open(path)?;
        (gguf.config_file()?, Weights::gguf(gguf, device, dtype, read)?)
    } else {
        let json = ConfigFile::read(&path.join("config.json"))?;
        (json, Weights::safetensors(&config.weights, device, dtype, read)?)
    };
    let (net, weights) = match config.architecture {
        Architecture::Gpt2 => {
            let weights = weights.with_prefix_if("transformer.", "wte.weight");
            (Net::Gpt2(Gpt2::load(&json, &weights)?), weights)
        }
        Architecture::Llama => {
            let weights = weights.with_prefix_if("model.", "embed_tokens.weight");
            (Net::Llama(Llama::load(&json, &weights)?), weights)
        }
        Architecture::Qwen3 => {
            let weights = weights.with_prefix_if("model.", "embed_tokens.weight");
            (Net::Qwen3(Qwen3::load(&json, &weights)?), weights)
        }
    };
    weights.check_all_used(&says(path, config, &json), &|name| is_buffer(config, name))?;
    Ok((net, weights))
}

/// What a configuration says that decides which tensors there are, in its own words.
pub(crate) fn says(path: &Path, config: &TeacherConfig, json: &ConfigFile) -> String {
    if is_gguf(path) {
        return format!("llama.block_count {}, llama.embedding_length {}", config.layers, config.hidden_size);
    }
    let fields: &[&str] = match config.architecture {
        Architecture::Gpt2 => &["model_type", "n_layer", "tie_word_embeddings"],
        Architecture::Llama | Architecture::Qwen3 => {
            &["model_type", "num_hidden_layers", "attention_bias", "tie_word_embeddings"]
        }
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
        Architecture::Llama | Architecture::Qwen3 => {
            name == "rotary_emb.inv_freq"
                || of_layer("layers.", ".self_attn.rotary_emb.inv_freq")
                || of_layer("blk.", ".attn_rot_embd.weight")
        }
    }
}

fn change(to: Precision, stored: &str) -> &'static str {
    match to {
        Precision::F32 if !stored.contains("F64") => "widened",
        _ => "converted",
    }
}

impl Model {
    fn head(&self) -> &Head {
        match &self.net {
            Net::Gpt2(net) => &net.head,
            Net::Llama(net) => &net.head,
            Net::Qwen3(net) => &net.head,
        }
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

impl HostTeacher for Model {
    fn info(&self) -> &TeacherInfo {
        &self.info
    }

    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Tensor> {
        check_tokens(&self.info, tokens, batch, length)?;
        let at_once = (CPU_TOKENS / length).max(1);
        let mut parts = Vec::with_capacity(batch.div_ceil(at_once));
        for part in tokens.chunks(at_once * length) {
            let rows = part.len() / length;
            let part = Tensor::from_slice(part, (rows, length), &Device::Cpu)?;
            let hidden = match &self.net {
                Net::Gpt2(net) => net.hidden(&part)?,
                Net::Llama(net) => net.hidden(&part)?,
                Net::Qwen3(net) => net.hidden(&part)?,
            };
            parts.push(hidden.reshape((rows, length, self.info.hidden_size))?);
        }
        match parts.as_slice() {
            [one] => Ok(one.clone()),
            _ => Ok(Tensor::cat(&parts, 0)?),
        }
    }

    fn logits(&self, hidden_rows: &Tensor) -> Result<Tensor> {
        self.head().logits(hidden_rows)
    }

    fn logits_into(&self, hidden_rows: &Tensor, out: &mut Vec<f32>) -> Result<()> {
        self.head().logits_into(hidden_rows, out)
    }
}
