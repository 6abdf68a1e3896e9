//! The description of a teacher without its weights, from a folder's `config.json` or a GGUF file's metadata.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use crate::config_file::ConfigFile;
use crate::error::{Result, TeacherError};
use crate::families::{Architecture, SizeFields};
use crate::gguf::Gguf;

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
        let architecture = Architecture::of_config(&json)?;
        let SizeFields { positions, width, layers } = architecture.family().size_fields();
        Ok(Self {
            architecture,
            vocab_size: json.size("vocab_size")?,
            max_positions: json.size(positions)?,
            hidden_size: json.size(width)?,
            layers: json.size(layers)?,
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
    Err(adapter.invalid(
        "peft_type",
        "a folder without an adapter: merge the adapter into the weights first, or move it elsewhere",
    ))
}

pub(crate) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("gguf"))
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
                path: index.path().into(),
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
