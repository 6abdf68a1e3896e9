//! The hash of a job and its splits: functions of the job, the listing of its input and its models, nothing else.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stillhouse_operators::registry::bytes_per_token;
use stillhouse_operators::subtokens::SubtokensConfig;
use stillhouse_schemas::columns::FORMAT_VERSION;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::{InputFormat, JobSpec, Permutation};

use crate::engine::teacher::file_sha256;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::{JobHash, PlannedFile, Stamp};
use crate::job::Prepared;
use crate::job::query_input;
use crate::sequence_offsets::TEXT_BYTES_PER_TOKEN;
use crate::source::Weighed;
use crate::{sequence_offsets, source};

/// The files of a listing in the order of a job's hash; those that it does not have are left out.
pub(crate) fn in_order(hash: &JobHash, files: &[source::InputFile]) -> Vec<source::InputFile> {
    let by_path: BTreeMap<&str, &source::InputFile> = files.iter().map(|f| (f.path.as_str(), f)).collect();
    hash.files.iter().filter_map(|f| by_path.get(f.path.as_str()).copied().cloned()).collect()
}

/// The splits over these files.
///
/// # Errors
/// When the input cannot be scanned.
pub fn splits(prepared: &Prepared, files: &[source::InputFile], observer: &dyn Observer) -> Result<Vec<SplitRecord>> {
    observer.event(&Event::Preparing { what: "finding the splits of the input".into() });
    let target = split_bytes(prepared);
    let seed = prepared.spec.seed;
    let planned = source::plan_splits(&prepared.store, files, &query_input(prepared), target, seed, &|_| {});
    let Weighed { mut splits, weights } = planned.map_err(|e| PipelineError::source("input", e))?;
    sequence_offsets::planned(&prepared.spec, &mut splits, 0, &weights);
    Ok(splits)
}

/// The splits over these files, which are in the order of the hash, where some of them were appended.
///
/// # Errors
/// When the input cannot be scanned.
pub(crate) fn all_splits(
    prepared: &Prepared,
    hash: &JobHash,
    files: &[source::InputFile],
    observer: &dyn Observer,
) -> Result<Vec<SplitRecord>> {
    let later: usize = hash.appended.iter().map(|a| a.files.len()).sum();
    let (first, mut rest) = files.split_at(files.len().saturating_sub(later));
    let mut all = splits(prepared, first, observer)?;
    for (appended, number) in hash.appended.iter().zip(1..) {
        let (now, left) = rest.split_at(appended.files.len().min(rest.len()));
        all = appended_splits(prepared, now, (all, number))?;
        rest = left;
    }
    Ok(all)
}

/// The splits that are there, and those over files that come with the append of this number.
///
/// # Errors
/// When the files cannot be scanned.
pub(crate) fn appended_splits(
    prepared: &Prepared,
    files: &[source::InputFile],
    earlier: (Vec<SplitRecord>, u32),
) -> Result<Vec<SplitRecord>> {
    let there = earlier.0.len();
    let planned = source::append_splits(&prepared.store, files, &prepared.spec.input, split_bytes(prepared), earlier);
    let Weighed { mut splits, weights } = planned.map_err(|e| PipelineError::source("input", e))?;
    sequence_offsets::planned(&prepared.spec, &mut splits, there, &weights);
    Ok(splits)
}

/// Bytes of text that the splits cover, as far as ranges of bytes tell.
pub fn text_bytes(splits: &[SplitRecord]) -> u64 {
    splits
        .iter()
        .map(|s| {
            let bytes = s.pieces.iter().map(|p| match p.range {
                Range::Bytes { start, end, .. } => end.saturating_sub(start),
                Range::Rows { .. } => 0,
            });
            let all: u64 = bytes.sum();
            s.keys.map_or(all, |keys| (all as f64 * keys.share()) as u64)
        })
        .sum()
}

/// Numbers in the rows of the splits, where all of them are numbered: not of tar files.
pub(crate) fn numbers(splits: &[SplitRecord], length: u64) -> Option<u64> {
    let mut sum = 0;
    for split in splits {
        let rows = split.pieces.iter().map(|piece| match piece.range {
            Range::Rows { start, end } => Some(end.saturating_sub(start)),
            Range::Bytes { .. } => None,
        });
        let rows = rows.sum::<Option<u64>>()?;
        sum += split.keys.map_or(rows, |keys| (rows as f64 * keys.share()) as u64);
    }
    Some(sum * length)
}

/// Size of a split, in bytes of text or in documents where these have none, so that its shard comes out at about `output.shard_megabytes`.
fn split_bytes(prepared: &Prepared) -> u64 {
    let spec = &prepared.spec;
    let per_token = || bytes_per_token(&prepared.operators, prepared.vocab_size);
    let bytes = match spec.input.split_megabytes {
        Some(megabytes) => megabytes * 1e6,
        // a number weighs one
        None if spec.input.is_rows() => spec.output.shard_megabytes * 1e6 / per_token(),
        None => spec.output.shard_megabytes * 1e6 / per_token() * TEXT_BYTES_PER_TOKEN,
    };
    // documents that have no text yet will have about this much
    let of_a_document = match spec.input.format {
        Some(InputFormat::None) => f64::from(spec.pack.length) * TEXT_BYTES_PER_TOKEN,
        _ => 1.0,
    };
    ((bytes / of_a_document) as u64).max(1)
}

/// Hashes everything that decides the bytes of the shards: the job (without what only says where things lie and how it runs), the
/// tokenizer, the teacher and the kind of device, the files of the input with their names below their common folder, and sizes.
///
/// So a corpus, tokenizer or teacher that was moved is the same. What the files hold is told by what the splits read ([`crate::inputs`]).
///
/// # Errors
/// When a file of the teacher cannot be read.
pub fn job_hash(prepared: &Prepared, observer: &dyn Observer) -> Result<JobHash> {
    let mut job =
        serde_json::to_value(&prepared.spec).map_err(|e| PipelineError::caused(ErrorKind::Usage, "job file", e))?;
    if let (Some(written), Some(Value::Object(extract))) = (prepared.spec.sequential(), job.pointer_mut("/extract")) {
        // left out, the section is its defaults
        extract.insert("sequential".into(), json!(written));
    }
    let elsewhere = [
        ("", "name"),
        ("", "engine"),
        ("", "storage"),
        ("/input", "paths"),
        ("/input", "storage"),
        // only says what may still be called a success
        ("/input", "max_skipped"),
        ("/tokenizer", "path"),
        // what it holds counts
        ("/subtokens", "permutation"),
        ("/extract/teacher", "path"),
        ("/extract/teacher", "device"),
        ("/extract/sequential", "slots"),
        ("/output", "card"),
        ("/output", "path"),
        ("/output", "storage"),
    ];
    for (section, key) in elsewhere {
        if let Some(Value::Object(map)) = job.pointer_mut(section) {
            map.remove(key);
        }
    }
    for table in &prepared.tables {
        if let Some(Value::Object(map)) = job.pointer_mut(&format!("/input/tables/{}", table.name)) {
            // where its files lie does not count, but which of all files are its own
            map.remove("paths");
            map.insert("files".into(), json!(table.files.len()));
        }
    }
    if let Some(Value::Object(subtokens)) = job.pointer_mut("/subtokens")
        && let Some(config) = prepared.operators.iter().find_map(|o| o.config::<SubtokensConfig>())
        && let Some(numbers) = config.permutation.as_ref().map(Permutation::numbers)
    {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        subtokens.insert("permutation".into(), json!({"sha256": hex::encode(Sha256::digest(&bytes))}));
    }
    let tokenizer = hex::encode(Sha256::digest(tokenizer_json(prepared)?));
    let (mut teacher, mut stamps) = (BTreeMap::new(), Vec::new());
    let mut device = None;
    if let Some(found) = &prepared.teacher {
        observer.event(&Event::Preparing { what: "checking the teacher's files".into() });
        let config = found.path.join("config.json");
        for path in config.is_file().then_some(&config).into_iter().chain(&found.config.weights) {
            stamps.push(Stamp::of(path)?);
            teacher.insert(file_name(path), file_sha256(path)?);
        }
        device = Some(device_kind(&prepared.spec));
    }
    let identity = json!({
        "format_version": FORMAT_VERSION,
        "job": job,
        "tokenizer": {"sha256": tokenizer, "special_tokens": prepared.vocabulary.special_tokens()},
        "teacher": {"sha256": teacher, "device": device},
    });
    let files = planned_files(&prepared.files);
    let hash = JobHash { tokenizer, teacher, stamps, ..JobHash::of_identity(identity, files) };
    hash.teacher_is_still()?;
    Ok(hash)
}

/// The files with their names below the folder that they have in common.
fn planned_files(files: &[source::InputFile]) -> Vec<PlannedFile> {
    // up to a slash, so that a folder is there whole or not at all
    let folder = |location: &[u8]| location.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let first = files.first().map_or(&[][..], |f| f.location.as_ref().as_bytes());
    let common = files.iter().skip(1).fold(folder(first), |common, f| {
        let location = f.location.as_ref().as_bytes();
        let same = first.iter().zip(location).take(common.min(folder(location))).take_while(|(a, b)| a == b).count();
        folder(&first[..same])
    });
    let planned = |f: &source::InputFile| PlannedFile {
        path: f.path.clone(),
        name: f.location.as_ref().get(common..).unwrap_or_default().to_owned(),
        state: f.state.clone(),
    };
    files.iter().map(planned).collect()
}

/// `cpu` or `cuda`: floating point differs between them.
pub(crate) fn device_kind(spec: &JobSpec) -> &'static str {
    let devices = spec.extract.as_ref().and_then(|e| stillhouse_teacher::devices(&e.teacher.device).ok());
    match devices.as_deref() {
        Some([first, ..]) if !first.is_cpu() => "cuda",
        _ => "cpu",
    }
}

/// Name of a file without its folder.
pub fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// The tokenizer as the data set holds it.
///
/// # Errors
/// When it cannot be written as JSON.
pub fn tokenizer_json(prepared: &Prepared) -> Result<Vec<u8>> {
    prepared.vocabulary.to_json().map_err(|e| PipelineError::caused(ErrorKind::Model, "tokenizer", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(locations: &[&str]) -> Vec<String> {
        let file = |location: &&str| source::InputFile {
            path: "given".into(),
            location: object_store::path::Path::parse(location).unwrap(),
            size: 1,
            state: crate::file_state::FileState::default(),
        };
        planned_files(&locations.iter().map(file).collect::<Vec<_>>()).into_iter().map(|f| f.name).collect()
    }

    #[test]
    fn files_are_named_below_what_they_have_in_common() {
        assert_eq!(names(&[]), [""; 0]);
        assert_eq!(names(&["home/x/corpus.jsonl"]), ["corpus.jsonl"]);
        assert_eq!(names(&["home/x/a/1.gz", "home/x/b/1.gz"]), ["a/1.gz", "b/1.gz"]);
        assert_eq!(names(&["s3:/corpora/a/1", "s3:/corpora/a/b/2"]), ["1", "b/2"]);
        assert_eq!(names(&["home/x/a", "s3:/corpora/a"]), ["home/x/a", "s3:/corpora/a"]);
        // a file is no folder, whatever it is called
        assert_eq!(names(&["data/a", "data/a/b"]), ["a", "a/b"]);
        assert_eq!(names(&["data/ab/x", "data/ac/x"]), ["ab/x", "ac/x"]);
        // é and è begin with the same byte
        assert_eq!(names(&["data/é", "data/è"]), ["é", "è"]);
    }
}
