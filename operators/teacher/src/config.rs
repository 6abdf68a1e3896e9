//! The description of a teacher without its weights, from a folder's `config.json` or a GGUF file's metadata.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use crate::error::{Result, TeacherError};
use crate::gguf::Gguf;

/// The supported architectures; `families/` implements them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// GPT-2.
    Gpt2,
    /// Llama 1 to 3, SmolLM, TinyLlama and other models of the same design.
    Llama,
    /// Mistral.
    Mistral,
    /// SmolLM3.
    SmolLm3,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// Gemma 2.
    Gemma2,
    /// Gemma 3, text only.
    Gemma3,
    /// GPT-NeoX and Pythia.
    GptNeoX,
    /// OLMo 2.
    Olmo2,
    /// Phi-3.
    Phi3,
}

pub(crate) const SUPPORTED: &str =
    "gpt2, llama, mistral, smollm3, qwen2, qwen3, gemma2, gemma3_text, gpt_neox, olmo2, phi3";
pub(crate) const SUPPORTED_IN_GGUF: &str = "gpt2, llama, smollm3, qwen2, qwen3, gemma2, gemma3, gptneox, olmo2, phi3";

impl Architecture {
    /// All variants.
    pub const ALL: [Self; 11] = [
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::SmolLm3,
        Self::Qwen2,
        Self::Qwen3,
        Self::Gemma2,
        Self::Gemma3,
        Self::GptNeoX,
        Self::Olmo2,
        Self::Phi3,
    ];

    /// The name in `model_type`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::SmolLm3 => "smollm3",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3_text",
            Self::GptNeoX => "gpt_neox",
            Self::Olmo2 => "olmo2",
            Self::Phi3 => "phi3",
        }
    }

    /// The name in a GGUF file's `general.architecture`.
    pub(crate) fn gguf_name(self) -> &'static str {
        match self {
            Self::Mistral => "llama",
            Self::Gemma3 => "gemma3",
            Self::GptNeoX => "gptneox",
            other => other.name(),
        }
    }

    /// The name of its class in `architectures`.
    fn class(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::SmolLm3 => "SmolLM3ForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Gemma2 => "Gemma2ForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::GptNeoX => "GPTNeoXForCausalLM",
            Self::Olmo2 => "Olmo2ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
        }
    }

    /// Returns the prefix of its tensors, which checkpoints of a bare model lack, and the embedding's name, whose
    /// presence tells the two apart.
    pub(crate) fn prefix(self) -> (&'static str, &'static str) {
        match self {
            Self::Gpt2 => ("transformer.", "wte.weight"),
            Self::GptNeoX => ("gpt_neox.", "embed_in.weight"),
            _ => ("model.", "embed_tokens.weight"),
        }
    }
}

/// The part of a teacher that is cheap to read: enough to check a job before loading anything.
#[derive(Debug, Clone, PartialEq)]
pub struct TeacherConfig {
    /// The architecture that runs it.
    pub architecture: Architecture,
    /// Size of the vocabulary, V: columns of the logits.
    pub vocab_size: usize,
    /// Length of the longest sequence.
    pub max_positions: usize,
    /// Width of the hidden states, H.
    pub hidden_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Begin-of-sequence token, if the model names one.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence token; the first if the model names several.
    pub eos_token_id: Option<u32>,
    /// The weight files, sorted by name.
    pub weights: Vec<PathBuf>,
}

impl TeacherConfig {
    /// Reads the configuration of a model in a folder (`config.json` with `*.safetensors`, sharded or not) or in a
    /// `.gguf` file. Checks that the weight files exist, but reads no weights. [`crate::check_weights`] checks that the
    /// weights match the configuration.
    ///
    /// # Errors
    /// The error names the file, and the field with its valid values.
    pub fn read(path: &Path) -> Result<Self> {
        if is_gguf(path) {
            return Gguf::open(path)?.config();
        }
        refuse_adapter(path)?;
        let json = ConfigFile::read(&path.join("config.json"))?;
        let architecture = json.architecture()?;
        let gpt2 = architecture == Architecture::Gpt2;
        let pick = |gpt2_name, name| json.size(if gpt2 { gpt2_name } else { name });
        Ok(Self {
            architecture,
            vocab_size: json.size("vocab_size")?,
            max_positions: pick("n_positions", "max_position_embeddings")?,
            hidden_size: pick("n_embd", "hidden_size")?,
            layers: pick("n_layer", "num_hidden_layers")?,
            bos_token_id: json.token("bos_token_id")?,
            eos_token_id: json.token("eos_token_id")?,
            weights: safetensors_files(path)?,
        })
    }
}

/// Refuses a folder with an adapter next to the model: other programs load the adapter into the model, but this one
/// does not.
fn refuse_adapter(folder: &Path) -> Result<()> {
    let path = folder.join("adapter_config.json");
    if !path.is_file() {
        return Ok(());
    }
    let adapter = ConfigFile::read(&path)?;
    Err(adapter
        .invalid("peft_type", "no adapter beside the model: merge it into the weights first, or move it elsewhere"))
}

pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"))
}

/// A `config.json` whose errors name the file and the field, and which records what is read.
pub(crate) struct ConfigFile {
    path: PathBuf,
    json: Value,
    /// The fields that were read.
    fields_read: Mutex<BTreeSet<String>>,
}

impl ConfigFile {
    pub(crate) fn new(path: PathBuf, json: Value) -> Self {
        Self { path, json, fields_read: Mutex::default() }
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a field, or one inside it, was read.
    pub(crate) fn was_read(&self, field: &str) -> bool {
        let read = self.fields_read.lock().unwrap_or_else(PoisonError::into_inner);
        let inside =
            |read: &String| read.strip_prefix(field).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        read.iter().any(inside)
    }

    /// Returns the keys of an object that are not null and were never read. An empty name means the whole file.
    pub(crate) fn unread(&self, object: &str) -> Vec<String> {
        let json = match object {
            "" => Some(&self.json),
            object => self.lookup(object),
        };
        let at = |key: &str| if object.is_empty() { key.to_owned() } else { format!("{object}.{key}") };
        let keys = json.and_then(Value::as_object).into_iter().flatten().filter(|(_, value)| !value.is_null());
        keys.map(|(key, _)| key.clone()).filter(|key| !self.was_read(&at(key))).collect()
    }

    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = read_file(path)?;
        let json = serde_json::from_slice(&bytes).map_err(|error| TeacherError::Damaged {
            path: path.into(),
            format: "json",
            message: error.to_string(),
        })?;
        Ok(Self::new(path.into(), json))
    }

    /// Returns `field`, where dots separate the names of nested objects. Null counts as absent.
    pub(crate) fn get(&self, field: &str) -> Option<&Value> {
        self.fields_read.lock().unwrap_or_else(PoisonError::into_inner).insert(field.into());
        self.lookup(field)
    }

    fn lookup(&self, field: &str) -> Option<&Value> {
        field.split('.').try_fold(&self.json, |json, part| json.get(part)).filter(|value| !value.is_null())
    }

    pub(crate) fn invalid(&self, field: &str, valid: &str) -> TeacherError {
        TeacherError::Field {
            path: self.path.clone(),
            field: field.into(),
            got: self.lookup(field).map_or_else(|| "nothing".into(), Value::to_string),
            valid: valid.into(),
        }
    }

    fn architecture(&self) -> Result<Architecture> {
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map(str::to_owned);
        let name = text(self.get("model_type"));
        let class = text(self.get("architectures").and_then(|list| list.get(0)));
        let found = Architecture::ALL.into_iter().find(|known| match (&name, &class) {
            (Some(name), _) => name == known.name(),
            (None, Some(class)) => class == known.class(),
            (None, None) => false,
        });
        let field = if name.is_none() && class.is_some() { "architectures" } else { "model_type" };
        found.ok_or_else(|| self.invalid(field, SUPPORTED))
    }

    /// Reads a window, in tokens; null is `None`. Returns `default` if the field is absent.
    pub(crate) fn window(&self, field: &str, default: Option<usize>) -> Result<Option<usize>> {
        match self.json.get(field) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.size(field).map(Some),
        }
    }

    /// Reads a soft cap; null is `None`. Returns `default` if the field is absent.
    pub(crate) fn cap(&self, field: &str, default: Option<f64>) -> Result<Option<f32>> {
        match self.json.get(field) {
            None => Ok(default.map(|cap| cap as f32)),
            Some(Value::Null) => Ok(None),
            Some(_) => Ok(Some(self.float_or(field, 1.0)? as f32)),
        }
    }

    /// Returns the number of rotated dimensions of a head. `field`, at the top or in `rope_parameters`, holds their
    /// share.
    pub(crate) fn rotated(&self, field: &str, head_dim: usize, default: f64) -> Result<usize> {
        let inside = format!("rope_parameters.{field}");
        let field = if self.get(&inside).is_some() { inside.as_str() } else { field };
        let rotated = (head_dim as f64 * self.float_or(field, default)?) as usize;
        match rotated {
            0 => Err(self.invalid(field, &format!("a part of head_dim = {head_dim} of at least 2"))),
            odd if odd % 2 == 1 => Err(self.invalid(field, &format!("an even part of head_dim = {head_dim}"))),
            more if more > head_dim => Err(self.invalid(field, "at most 1")),
            rotated => Ok(rotated),
        }
    }

    /// Reads a whole number, which may be 0.
    pub(crate) fn count_or(&self, field: &str, default: usize) -> Result<usize> {
        let Some(value) = self.get(field) else { return Ok(default) };
        let count = value.as_u64().and_then(|n| usize::try_from(n).ok());
        count.ok_or_else(|| self.invalid(field, "a whole number"))
    }

    pub(crate) fn size(&self, field: &str) -> Result<usize> {
        self.size_or(field, 0)
    }

    /// Reads a whole number of at least 1. Returns `default` if the field is absent; a default of 0 makes the field
    /// mandatory.
    pub(crate) fn size_or(&self, field: &str, default: usize) -> Result<usize> {
        let value = match self.get(field) {
            Some(value) => value.as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0),
            None => default,
        };
        if value == 0 { Err(self.invalid(field, "a whole number of at least 1")) } else { Ok(value) }
    }

    pub(crate) fn float_or(&self, field: &str, default: f64) -> Result<f64> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|x| *x > 0.0 && x.is_finite())
                .ok_or_else(|| self.invalid(field, "a number above 0")),
        }
    }

    pub(crate) fn flag_or(&self, field: &str, default: bool) -> Result<bool> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.invalid(field, "true, false")),
        }
    }

    /// Refuses a field whose value is not one of these.
    pub(crate) fn only(&self, field: &str, valid: &[Value]) -> Result<()> {
        match self.get(field) {
            Some(value) if !valid.contains(value) => {
                let valid: Vec<_> = valid.iter().map(Value::to_string).chain(["null".to_owned()]).collect();
                Err(self.invalid(field, &valid.join(", ")))
            }
            _ => Ok(()),
        }
    }

    /// Reads a token id, or the first of a list of ids.
    pub(crate) fn token(&self, field: &str) -> Result<Option<u32>> {
        let value = match self.get(field) {
            Some(Value::Array(list)) => list.first(),
            other => other,
        };
        match value {
            None => Ok(None),
            Some(id) => id
                .as_u64()
                .and_then(|id| u32::try_from(id).ok())
                .map(Some)
                .ok_or_else(|| self.invalid(field, "a token id, a list of them, null")),
        }
    }
}

pub(crate) fn read_file(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| TeacherError::Io { path: path.into(), source })
}

/// Whether a relative path stays inside the folder it is joined to. Models are untrusted input.
fn is_inside(name: &str) -> bool {
    let mut components = Path::new(name).components().peekable();
    components.peek().is_some() && components.all(|c| matches!(c, Component::Normal(_)))
}

/// Returns the shards that `model.safetensors.index.json` names, else `model.safetensors`, else every `*.safetensors`.
fn safetensors_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let index = folder.join("model.safetensors.index.json");
    let mut files = Vec::new();
    if index.is_file() {
        let index = ConfigFile::read(&index)?;
        let map = index.get("weight_map").and_then(Value::as_object);
        let map = map.ok_or_else(|| index.invalid("weight_map", "an object of tensor name to file name"))?;
        for (tensor, name) in map {
            let inside = name.as_str().filter(|name| is_inside(name)).ok_or_else(|| TeacherError::Field {
                path: index.path.clone(),
                field: format!("weight_map.{tensor}"),
                got: name.to_string(),
                valid: "the name of a file in the folder: relative, without ..".into(),
            });
            files.push(folder.join(inside?));
        }
    } else if folder.join("model.safetensors").is_file() {
        files.push(folder.join("model.safetensors"));
    } else {
        let io = |source| TeacherError::Io { path: folder.into(), source };
        for entry in std::fs::read_dir(folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.extension().is_some_and(|ext| ext == "safetensors") {
                files.push(path);
            }
        }
    }
    files.sort();
    files.dedup();
    if files.is_empty() {
        files.push(folder.join("model.safetensors"));
    }
    for path in &files {
        std::fs::metadata(path).map_err(|source| TeacherError::Io { path: path.clone(), source })?;
    }
    Ok(files)
}
