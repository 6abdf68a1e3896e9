//! Selects the files of a repository that a reference needs, and checks which of them the cache has.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use stillhouse_base::error::{ErrorKind, PipelineError, Result};

use super::FetchPurpose;
use super::cache::CachedRepo;
use super::reference::{HubRef, check_file, is_gguf};

/// The index file, which names the shards of a model.
pub(super) const INDEX: &str = "model.safetensors.index.json";
const WEIGHTS: &str = "model.safetensors";
const CONFIG: &str = "config.json";
/// Marks an adapter, which other programs load into the model.
const ADAPTER: &str = "adapter_config.json";
const TOKENIZER: &str = "tokenizer.json";
/// Files that are fetched if they exist.
const SIDECAR_FILES: [&str; 6] = [
    CONFIG,
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
];

/// How much of the wanted files the cache has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CacheCoverage {
    /// Less than the required files.
    Insufficient,
    /// The required files; the repository may have more.
    Required,
    /// All wanted files that the repository has.
    All,
}

/// The files to fetch, in order, and the wanted files that the repository lacks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FileSelection {
    pub(super) files: Vec<String>,
    pub(super) absent: Vec<&'static str>,
}

/// Chooses from the file list of the hub.
pub(super) fn select_files(names: &[String], reference: &HubRef, purpose: FetchPurpose) -> Result<FileSelection> {
    let has = |name: &str| names.iter().any(|n| n == name);
    let usage_error = |problem: &str, hint: &str| {
        Err(PipelineError::new(
            ErrorKind::Usage,
            format!("{reference} {problem}; it has {}{hint}", format_names(names)),
        ))
    };
    if let Some(file) = reference.file() {
        if !has(file) {
            return usage_error(&format!("has no file {file:?}"), "");
        }
        return Ok(FileSelection { files: vec![file.to_owned()], absent: Vec::new() });
    }
    let gguf_hint =
        if names.iter().any(|n| is_gguf(n)) { " (a .gguf is used when named: hf://org/name/file.gguf)" } else { "" };
    let (present, absent): (Vec<_>, Vec<_>) = SIDECAR_FILES.into_iter().partition(|name| has(name));
    let mut files: Vec<String> = present.into_iter().map(str::to_owned).collect();
    match purpose {
        FetchPurpose::Tokenizer if !has(TOKENIZER) => return usage_error("has no tokenizer.json", gguf_hint),
        FetchPurpose::Teacher if !has(CONFIG) => return usage_error("has no config.json", gguf_hint),
        FetchPurpose::Teacher if has(ADAPTER) => {
            let problem = format!(
                "has an {ADAPTER} beside the model, and adapters are not loaded: merge it into the weights first"
            );
            return usage_error(&problem, "");
        }
        FetchPurpose::Tokenizer => {}
        // The order in which the teacher looks for its weights.
        FetchPurpose::Teacher if has(INDEX) => files.push(INDEX.to_owned()),
        FetchPurpose::Teacher if has(WEIGHTS) => files.push(WEIGHTS.to_owned()),
        FetchPurpose::Teacher => {
            let mut weights: Vec<_> = names.iter().filter(|n| is_root_safetensors(n)).cloned().collect();
            if weights.is_empty() {
                return usage_error("has no weights as safetensors, and pickled ones are not read", gguf_hint);
            }
            weights.sort();
            files.append(&mut weights);
        }
    }
    Ok(FileSelection { files, absent })
}

/// Returns the shards that an index names, after checking that the repository has each of them.
pub(super) fn read_shards(index: &Path, names: &[String], reference: &HubRef) -> Result<BTreeSet<String>> {
    let shards = read_index(index)
        .map_err(|problem| PipelineError::new(ErrorKind::Model, format!("{reference}: {INDEX} {problem}")))?;
    match shards.iter().find(|shard| !names.contains(shard)) {
        Some(missing) => Err(PipelineError::new(
            ErrorKind::Usage,
            format!("{reference}: {INDEX} names {missing:?}, which is not there"),
        )),
        None => Ok(shards),
    }
}

/// Returns how much of the wanted files of a commit the cache has.
pub(super) fn cache_coverage(
    repo: &CachedRepo,
    commit: &str,
    reference: &HubRef,
    purpose: FetchPurpose,
) -> CacheCoverage {
    let has = |name: &str| repo.has_file(commit, name);
    if let Some(file) = reference.file() {
        return if has(file) { CacheCoverage::All } else { CacheCoverage::Insufficient };
    }
    let required = match purpose {
        FetchPurpose::Tokenizer => has(TOKENIZER),
        FetchPurpose::Teacher => has(CONFIG) && has_cached_weights(repo, commit),
    };
    match required {
        false => CacheCoverage::Insufficient,
        true if SIDECAR_FILES.iter().all(|name| has(name) || repo.is_known_absent(commit, name)) => CacheCoverage::All,
        true => CacheCoverage::Required,
    }
}

fn has_cached_weights(repo: &CachedRepo, commit: &str) -> bool {
    if repo.has_file(commit, INDEX) {
        return read_index(&repo.file_path(commit, INDEX))
            .is_ok_and(|shards| shards.iter().all(|shard| repo.has_file(commit, shard)));
    }
    if repo.has_file(commit, WEIGHTS) {
        return true;
    }
    let Ok(entries) = repo.snapshot_path(commit).read_dir() else { return false };
    let names: Vec<_> = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    let mut weights = names.iter().filter(|name| is_root_safetensors(name)).peekable();
    // Shards without their index may be incomplete.
    weights.peek().is_some() && weights.all(|name| !name.contains("-of-") && repo.has_file(commit, name))
}

fn read_index(path: &Path) -> std::result::Result<BTreeSet<String>, String> {
    let bytes = std::fs::read(path).map_err(|e| format!("cannot be read: {e}"))?;
    let index: Value = serde_json::from_slice(&bytes).map_err(|e| format!("is not JSON: {e}"))?;
    let map = index["weight_map"].as_object().filter(|map| !map.is_empty()).ok_or("has no weight_map")?;
    map.values()
        .map(|file| match file.as_str() {
            Some(file) if file.ends_with(".safetensors") => check_file(file).map(|()| file.to_owned()),
            _ => Err(format!("names {file}, which is not a .safetensors file")),
        })
        .collect()
}

fn is_root_safetensors(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains('/') && check_file(name).is_ok()
}

/// Formats file names for a message: the first 12, quoted because they come from an untrusted source.
fn format_names(names: &[String]) -> String {
    const MAX_SHOWN: usize = 12;
    let mut list = match names {
        [] => "no files".to_owned(),
        _ => names.iter().take(MAX_SHOWN).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", "),
    };
    if names.len() > MAX_SHOWN {
        list += &format!(" and {} more", names.len() - MAX_SHOWN);
    }
    list
}
