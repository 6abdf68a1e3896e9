//! GGUF files: one file with metadata, tokenizer and (mostly quantised) weights of a Llama.
//!
//! Weights are widened on loading: for whole sequences that is faster than products on quantised blocks. The file
//! keeps the rows of q and k interleaved for rotation by neighbours (ggml's "norm" rope); [`Gguf::tensor`] puts them
//! back into halves, so that `llama.rs` runs both kinds of file:
//!
//! ```text
//! Hugging Face, rows of a head:   a0 a1 a2 … | b0 b1 b2 …      a_i is rotated against b_i
//! GGUF:                           a0 b0 a1 b1 a2 b2 …
//! ```

use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor};
use serde_json::json;

use crate::config::{Architecture, ConfigFile, SUPPORTED, TeacherConfig};
use crate::error::{Result, TeacherError, words};
use crate::gguf_header;
use crate::weights::check_shape;

pub(crate) struct Gguf {
    pub(crate) path: PathBuf,
    content: Content,
}

impl Gguf {
    /// Reads the metadata and the index of tensors.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let mut reader = BufReader::with_capacity(1 << 20, open(path)?);
        if let Some(problem) = gguf_header::problem(&mut reader) {
            return Err(damaged(path, &problem));
        }
        let io = |source| TeacherError::Io { path: path.into(), source };
        reader.rewind().map_err(io)?;
        let content = Content::read(&mut reader).map_err(|error| damaged(path, &gguf_header::describe(&error)))?;
        if let Some(problem) = gguf_header::shape_problem(&content) {
            return Err(damaged(path, &problem));
        }
        Ok(Self { path: path.into(), content })
    }

    /// A value of the metadata.
    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.value(key).and_then(|value| value.to_string().ok()).map(String::as_str)
    }

    /// A whole number, whatever width it is stored in.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            Value::I8(n) => u64::try_from(*n).ok(),
            Value::I16(n) => u64::try_from(*n).ok(),
            Value::I32(n) => u64::try_from(*n).ok(),
            Value::I64(n) => u64::try_from(*n).ok(),
            value => value.to_u64().ok(),
        }
    }

    pub(crate) fn token(&self, key: &str) -> Option<u32> {
        self.number(key).and_then(|id| u32::try_from(id).ok())
    }

    pub(crate) fn invalid(&self, key: &str, valid: &str) -> TeacherError {
        let got = match self.value(key) {
            None => "nothing".into(),
            Some(value) => gguf_header::shown(value),
        };
        TeacherError::Field { path: self.path.clone(), field: key.into(), got, valid: valid.into() }
    }

    fn size(&self, key: &str) -> Result<usize> {
        let size = self.number(key).and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0);
        size.ok_or_else(|| self.invalid(key, "a whole number of at least 1"))
    }

    fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::F32(x)) if *x > 0.0 => Ok(Some(f64::from(*x))),
            Some(Value::F64(x)) if *x > 0.0 => Ok(Some(*x)),
            Some(_) => Err(self.invalid(key, "a number above 0")),
        }
    }

    fn vocab_size(&self) -> Result<usize> {
        // The embedding is the truth; `llama.vocab_size` and the list of tokens are often left out or padded.
        let embedding = self.content.tensor_infos.get("token_embd.weight");
        let rows = embedding.and_then(|info| info.shape.dims().first().copied());
        rows.ok_or_else(|| TeacherError::MissingTensor { path: self.path.clone(), name: "token_embd.weight".into() })
    }

    pub(crate) fn config(&self) -> Result<TeacherConfig> {
        if self.text("general.architecture") != Some("llama") {
            return Err(self.invalid("general.architecture", SUPPORTED));
        }
        Ok(TeacherConfig {
            architecture: Architecture::Llama,
            vocab_size: self.vocab_size()?,
            max_positions: self.size("llama.context_length")?,
            hidden_size: self.size("llama.embedding_length")?,
            layers: self.size("llama.block_count")?,
            bos_token_id: self.token("tokenizer.ggml.bos_token_id"),
            eos_token_id: self.token("tokenizer.ggml.eos_token_id"),
            weights: vec![self.path.clone()],
        })
    }

    /// The metadata in the words of a Hugging Face `config.json`.
    pub(crate) fn config_file(&self) -> Result<ConfigFile> {
        let config = self.config()?;
        let heads = self.size("llama.attention.head_count")?;
        let kv_heads = match self.value("llama.attention.head_count_kv") {
            None => heads,
            Some(_) => self.size("llama.attention.head_count_kv")?,
        };
        let head_dim = match self.value("llama.attention.key_length") {
            None => config.hidden_size / heads,
            Some(_) => self.size("llama.attention.key_length")?,
        };
        for key in ["llama.rope.dimension_count", "llama.attention.value_length"] {
            if self.value(key).is_some() && self.size(key)? != head_dim {
                return Err(self.invalid(key, &head_dim.to_string()));
            }
        }
        if self.number("llama.expert_count").is_some_and(|n| n > 0) {
            return Err(self.invalid("llama.expert_count", "0 (mixtures of experts are not supported)"));
        }
        let eps = self.float("llama.attention.layer_norm_rms_epsilon")?;
        let eps = eps.ok_or_else(|| self.invalid("llama.attention.layer_norm_rms_epsilon", "a number above 0"))?;
        let mut scaling = json!({"rope_type": "default"});
        match self.text("llama.rope.scaling.type") {
            None | Some("none") => {}
            Some("linear") => {
                let factor = self.float("llama.rope.scaling.factor")?.unwrap_or(1.0);
                scaling = json!({"rope_type": "linear", "factor": factor});
            }
            Some(_) => return Err(self.invalid("llama.rope.scaling.type", "none, linear")),
        }
        let json = json!({
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": self.size("llama.feed_forward_length")?,
            "num_hidden_layers": config.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": config.max_positions,
            "rms_norm_eps": eps,
            "rope_theta": self.float("llama.rope.freq_base")?.unwrap_or(10_000.0),
            "rope_scaling": scaling,
            "attention_bias": self.has("layers.0.self_attn.q_proj.bias"),
            "mlp_bias": self.has("layers.0.mlp.gate_proj.bias"),
            "tie_word_embeddings": !self.has("lm_head.weight"),
        });
        Ok(ConfigFile::new(self.path.clone(), json))
    }

    /// Whether the tensor that Hugging Face calls `name` is there.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(&gguf_name(name))
    }

    /// The tensor that Hugging Face calls `name`, as f32, in the layout of Hugging Face; see [`Gguf::check_tensor`].
    pub(crate) fn tensor(&self, name: &str, shape: &[usize], device: &Device) -> Result<Tensor> {
        let stored = gguf_name(name);
        let info = self.content.tensor_infos.get(&stored);
        let info = info.ok_or_else(|| TeacherError::MissingTensor { path: self.path.clone(), name: stored.clone() })?;
        let mut reader = open(&self.path)?;
        let tensor = info
            .read(&mut reader, self.content.tensor_data_offset, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .map_err(|error| damaged(&self.path, &format!("tensor `{stored}`: {}", words(&error))))?;
        let heads = match name.rsplit('.').nth(1) {
            Some("q_proj") => self.size("llama.attention.head_count")?,
            Some("k_proj") => match self.value("llama.attention.head_count_kv") {
                None => self.size("llama.attention.head_count")?,
                Some(_) => self.size("llama.attention.head_count_kv")?,
            },
            _ => return Ok(tensor.to_device(device)?),
        };
        let (rows, rest) = (shape.first().copied().unwrap_or(0), shape.iter().skip(1).product::<usize>());
        let halves = tensor.reshape((heads, rows / heads / 2, 2, rest))?.transpose(1, 2)?;
        Ok(halves.reshape(shape)?.to_device(device)?)
    }

    /// Refuses a tensor that is missing or has another shape; nothing is read.
    pub(crate) fn check_tensor(&self, name: &str, shape: &[usize]) -> Result<()> {
        let stored = gguf_name(name);
        let info = self.content.tensor_infos.get(&stored);
        let info = info.ok_or_else(|| TeacherError::MissingTensor { path: self.path.clone(), name: stored.clone() })?;
        check_shape(&self.path, &stored, info.shape.dims(), shape)
    }

    /// The tensors of the file, as it spells them.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.content.tensor_infos.keys().map(String::as_str)
    }

    /// Refuses a file that ends before its tensors do, or is a part of several.
    pub(crate) fn check_extents(&self) -> Result<()> {
        if self.number("split.count").is_some_and(|n| n > 1) {
            return Err(self.invalid("split.count", "1 (merge the parts into one file: llama-gguf-split --merge)"));
        }
        let held =
            open(&self.path)?.metadata().map_err(|source| TeacherError::Io { path: self.path.clone(), source })?;
        // in the file's order, so that the same file gives the same message
        let mut infos: Vec<_> = self.content.tensor_infos.iter().collect();
        infos.sort_by_key(|(name, info)| (info.offset, name.as_str()));
        for (name, info) in infos {
            let blocks = (info.shape.elem_count() / info.ggml_dtype.block_size()) as u64;
            let end = blocks
                .checked_mul(info.ggml_dtype.type_size() as u64)
                .and_then(|bytes| bytes.checked_add(info.offset))
                .and_then(|bytes| bytes.checked_add(self.content.tensor_data_offset));
            if end.is_none_or(|end| end > held.len()) {
                let end = end.map_or_else(|| "beyond any file".into(), |end| format!("at byte {end}"));
                return Err(damaged(&self.path, &format!("tensor `{name}` ends {end}, the file at {}", held.len())));
            }
        }
        Ok(())
    }

    pub(crate) fn stored_types(&self) -> Vec<String> {
        self.content.tensor_infos.values().map(|info| ggml_name(&format!("{:?}", info.ggml_dtype))).collect()
    }
}

/// `Q4_1` of candle's `Q4_1`, `Q6_K` of its `Q6K`.
fn ggml_name(candle: &str) -> String {
    match candle.strip_suffix('K') {
        Some(bits) if bits.starts_with('Q') => format!("{bits}_K"),
        _ => candle.into(),
    }
}

pub(crate) fn gguf_name(name: &str) -> String {
    let Some((layer, rest)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else {
        return match name {
            "embed_tokens.weight" => "token_embd.weight".into(),
            "norm.weight" => "output_norm.weight".into(),
            "lm_head.weight" => "output.weight".into(),
            other => other.into(),
        };
    };
    let (module, kind) = rest.rsplit_once('.').unwrap_or((rest, "weight"));
    let module = match module {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "post_attention_layernorm" => "ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        other => other,
    };
    format!("blk.{layer}.{module}.{kind}")
}

fn open(path: &Path) -> Result<File> {
    File::open(path).map_err(|source| TeacherError::Io { path: path.into(), source })
}

fn damaged(path: &Path, error: &dyn std::fmt::Display) -> TeacherError {
    TeacherError::Damaged { path: path.into(), format: "gguf", message: error.to_string() }
}
