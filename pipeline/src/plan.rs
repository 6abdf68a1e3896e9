//! What would run: splits, operators, sizes. A function of the job, the listing and the models, nothing else.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stillhouse_schemas::columns::FORMAT_VERSION;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::{JobSpec, NoiseCodec};

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::Prepared;
use crate::output::Found;
use crate::shard::hex;
use crate::{run, source};

/// Bytes of English text per token, for estimates only.
const TEXT_BYTES_PER_TOKEN: f64 = 4.2;

/// A plan, as `stillhouse plan` shows it.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Name of the job.
    pub name: String,
    /// Hash of everything that decides the bytes of the shards.
    pub job_hash: String,
    /// Where the data set goes, and what is there.
    pub output: Standing,
    /// Operators, in order.
    pub operators: Vec<String>,
    /// Input files.
    pub files: usize,
    /// Bytes of the input files as they are stored.
    pub input_bytes: u64,
    /// The splits; empty for a job with `input.sql`, whose rows are known once the query has run.
    pub splits: Vec<SplitRecord>,
    /// Estimated bytes per token of the data set.
    pub estimated_bytes_per_token: f64,
    /// Estimated tokens, where the size of the text is known.
    pub estimated_tokens: Option<u64>,
    /// Estimated bytes of the data set.
    pub estimated_bytes: Option<u64>,
}

/// What is at the output of a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Standing {
    /// The folder or URL.
    pub place: String,
    /// What a run would find.
    pub found: Standings,
    /// Splits that are done.
    pub splits_done: u64,
}

/// What a run would find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standings {
    /// Nothing: it begins.
    Nothing,
    /// Work of this job: it goes on.
    Resumable,
    /// The finished data set of this job.
    Complete,
    /// The output of another job, which `--overwrite` removes.
    OtherJob,
}

/// Looks at the output as a run does before it begins; writes nothing.
///
/// # Errors
/// When it is another job's (unless `overwrite`) or nobody's, when it cannot be written to, or when another run is at work there.
pub fn standing(prepared: &Prepared, hash: &JobHash, overwrite: bool, observer: &dyn Observer) -> Result<Standing> {
    let output = prepared.output()?;
    let look = async {
        let (found, splits_done) = match output.look(&hash.hash).await {
            Ok(Found::Nothing) => (Standings::Nothing, 0),
            Ok(Found::Resumable { done, unsettled }) => (Standings::Resumable, done.len() + unsettled.len()),
            Ok(Found::Complete) => (Standings::Complete, 0),
            Err(e) if overwrite && e.kind == ErrorKind::Usage && output.is_of_a_job().await? => {
                (Standings::OtherJob, 0)
            }
            Err(e) => return Err(e),
        };
        if found != Standings::Complete {
            output.check(observer).await?;
        }
        Ok(Standing { place: output.to_string(), found, splits_done: splits_done as u64 })
    };
    prepared.store.wait(look)
}

/// Makes the plan of a job, and every check that a run makes before it begins to work.
///
/// # Errors
/// When the input cannot be scanned or the models cannot be read, and where [`standing`] says no.
pub fn plan(prepared: &Prepared, hash: &JobHash, overwrite: bool, observer: &dyn Observer) -> Result<Plan> {
    let output = standing(prepared, hash, overwrite, observer)?;
    let splits = match prepared.spec.input.sql {
        Some(_) => Vec::new(),
        None => splits(prepared, &prepared.files, observer)?,
    };
    let per_token = bytes_per_token(&prepared.spec, prepared.vocab_size);
    let text = text_bytes(&splits);
    let tokens = (text > 0).then_some((text as f64 / TEXT_BYTES_PER_TOKEN) as u64);
    Ok(Plan {
        name: prepared.spec.name.clone(),
        job_hash: hash.hash.clone(),
        output,
        operators: prepared.operators.iter().map(|o| o.name().to_owned()).collect(),
        files: prepared.files.len(),
        input_bytes: prepared.files.iter().map(|f| f.size).sum(),
        splits,
        estimated_bytes_per_token: per_token,
        estimated_tokens: tokens,
        estimated_bytes: tokens.map(|t| (t as f64 * per_token) as u64),
    })
}

/// The splits over these files.
///
/// # Errors
/// When the input cannot be scanned.
pub fn splits(prepared: &Prepared, files: &[source::InputFile], observer: &dyn Observer) -> Result<Vec<SplitRecord>> {
    observer.event(&Event::Preparing { what: "finding the splits of the input".into() });
    let target = split_bytes(&prepared.spec, prepared.vocab_size);
    source::plan_splits(&prepared.store, files, &run::query_input(prepared), target, &|_| {})
        .map_err(|e| PipelineError::source("input", e))
}

/// Bytes of text that the splits cover, as far as ranges of bytes tell.
pub fn text_bytes(splits: &[SplitRecord]) -> u64 {
    splits
        .iter()
        .flat_map(|s| &s.pieces)
        .map(|p| match p.range {
            Range::Bytes { start, end, .. } => end.saturating_sub(start),
            Range::Rows { .. } => 0,
        })
        .sum()
}

/// Size of a split so that its shard comes out at about `output.shard_megabytes`.
fn split_bytes(spec: &JobSpec, vocab_size: usize) -> u64 {
    let bytes = match spec.input.split_megabytes {
        Some(megabytes) => megabytes * 1e6,
        None => spec.output.shard_megabytes * 1e6 / bytes_per_token(spec, vocab_size) * TEXT_BYTES_PER_TOKEN,
    };
    (bytes as u64).max(1)
}

/// Estimated bytes per token of the data set: measured figures of BENCHMARKS.md, for sizing splits and for `plan`.
fn bytes_per_token(spec: &JobSpec, vocab_size: usize) -> f64 {
    let bits = (vocab_size.max(2) as f64).log2();
    let mut bytes = bits / 8.0;
    if let Some(extract) = &spec.extract {
        bytes += 3.6 + f64::from(extract.topk) * (bits / 8.0 + 3.6);
        if let Some(noise) = &extract.noise {
            let draws = f64::from(noise.draws);
            let width = match noise.resolved_precision() {
                stillhouse_schemas::spec::NoisePrecision::F16 => 2.0,
                stillhouse_schemas::spec::NoisePrecision::F32 => 4.0,
            };
            bytes += draws
                * match noise.codec {
                    NoiseCodec::Dense => vocab_size as f64 * width,
                    NoiseCodec::Replay => 0.5 + (1e-3 / noise.tolerance).powf(1.2) * (bits / 8.0 + width),
                };
        }
    }
    bytes += spec.subtokens.as_ref().map_or(0.0, |_| bits / 8.0);
    bytes + spec.partitions.as_ref().map_or(0.0, |p| f64::from(p.views) / 8.0)
}

/// The hash of a job, and the checksums that went into it.
#[derive(Debug, Clone)]
pub struct JobHash {
    /// sha256, in hexadecimal.
    pub hash: String,
    /// sha256 of the tokenizer as the data set will hold it.
    pub tokenizer: String,
    /// sha256 of the teacher's files, by name.
    pub teacher: BTreeMap<String, String>,
}

/// Hashes everything that decides the bytes of the shards: the job (without what only says where and how it runs),
/// the tokenizer, the teacher and the kind of device, the files of the input with their sizes.
///
/// # Errors
/// When a file of the teacher cannot be read.
pub fn job_hash(prepared: &Prepared, observer: &dyn Observer) -> Result<JobHash> {
    let mut job =
        serde_json::to_value(&prepared.spec).map_err(|e| PipelineError::caused(ErrorKind::Usage, "job file", e))?;
    let elsewhere = [
        ("output", "path"),
        ("", "engine"),
        ("", "name"),
        ("", "storage"),
        ("input", "storage"),
        ("output", "storage"),
        // only says what may still be called a success
        ("input", "max_skipped"),
    ];
    for (section, key) in elsewhere {
        let map = if section.is_empty() { Some(&mut job) } else { job.get_mut(section) };
        if let Some(Value::Object(map)) = map {
            map.remove(key);
        }
    }
    if let Some(Value::Object(teacher)) = job.pointer_mut("/extract/teacher") {
        teacher.remove("device");
    }
    let tokenizer = hex(&Sha256::digest(tokenizer_json(prepared)?));
    let mut teacher = BTreeMap::new();
    let mut device = None;
    if let Some(found) = &prepared.teacher {
        observer.event(&Event::Preparing { what: "checking the teacher's files".into() });
        for path in &found.config.weights {
            teacher.insert(file_name(path), hash_file(path)?);
        }
        device = Some(device_kind(&prepared.spec));
    }
    let files: Vec<Value> = prepared.files.iter().map(|f| json!([f.path, f.size])).collect();
    let all = json!({
        "format_version": FORMAT_VERSION, "job": job, "tokenizer": tokenizer,
        "teacher": teacher, "device": device, "files": files,
    });
    Ok(JobHash { hash: hex(&Sha256::digest(all.to_string().as_bytes())), tokenizer, teacher })
}

/// `cpu` or `cuda`: floating point differs between them.
fn device_kind(spec: &JobSpec) -> &'static str {
    let choice = spec.extract.as_ref().and_then(|e| e.teacher.device.parse::<stillhouse_teacher::DeviceChoice>().ok());
    match choice.map(stillhouse_teacher::DeviceChoice::open) {
        Some(Ok(device)) if !device.is_cpu() => "cuda",
        _ => "cpu",
    }
}

/// Name of a file without its folder.
pub fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// sha256 of a file, read in pieces.
///
/// # Errors
/// When it cannot be read.
pub fn hash_file(path: &Path) -> Result<String> {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let mut hasher = Sha256::new();
        let mut buffer = vec![0; 1 << 20];
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex(&hasher.finalize())),
                n => hasher.update(&buffer[..n]),
            }
        }
    };
    read().map_err(|e| PipelineError::caused(ErrorKind::Model, format!("cannot read {}", path.display()), e))
}

/// The tokenizer as the data set holds it.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn tokenizer_json(prepared: &Prepared) -> Result<Vec<u8>> {
    prepared.vocabulary.to_json().map_err(|e| PipelineError::caused(ErrorKind::Model, "tokenizer", e))
}
