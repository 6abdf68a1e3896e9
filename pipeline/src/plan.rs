//! The hash of a job and its splits. Both depend only on the job, the listing of its input, and its models.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::registry::{bytes_per_token, job_format};
use stillhouse_schemas::columns::FORMAT_VERSION;
use stillhouse_schemas::manifest::{Range, SplitRecord};
use stillhouse_schemas::spec::{InputFormat, JobSpec};

use crate::engine::teacher::file_sha256;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::{JobHash, PlannedFile, Stamp};
use crate::job::{NamedContent, Prepared, staged_input};
use crate::sequence_offsets::TEXT_BYTES_PER_TOKEN;
use crate::source::PlannedSplits;
use crate::{sequence_offsets, source};

/// The files of a listing in the order of the job's hash, without files that the hash does not have.
pub(crate) fn in_order(
    hash: &JobHash,
    files: &[stillhouse_input_files::InputFile],
) -> Vec<stillhouse_input_files::InputFile> {
    let by_path: BTreeMap<&str, &stillhouse_input_files::InputFile> =
        files.iter().map(|f| (f.path.as_str(), f)).collect();
    hash.files.iter().filter_map(|f| by_path.get(f.path.as_str()).copied().cloned()).collect()
}

/// Plans the splits over these files.
///
/// # Errors
/// If the input cannot be scanned.
pub fn splits(
    prepared: &Prepared,
    files: &[stillhouse_input_files::InputFile],
    observer: &dyn Observer,
) -> Result<Vec<SplitRecord>> {
    observer.event(&Event::Preparing { what: "finding the splits of the input".into() });
    let target = split_bytes(prepared);
    let seed = prepared.spec.seed;
    let planned = source::plan_splits(&prepared.store, files, &staged_input(prepared), target, seed, &|_| {});
    let PlannedSplits { mut splits, weights } = planned.map_err(|e| PipelineError::source("input", e))?;
    sequence_offsets::plan_ranges(&prepared.spec, &mut splits, 0, &weights);
    Ok(splits)
}

/// Plans the splits over these files, which are in the order of the hash and include appended ones.
///
/// # Errors
/// If the input cannot be scanned.
pub(crate) fn all_splits(
    prepared: &Prepared,
    hash: &JobHash,
    files: &[stillhouse_input_files::InputFile],
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

/// Adds the splits over the files of an append to `earlier`, the existing splits and the number of the append.
///
/// # Errors
/// If the files cannot be scanned.
pub(crate) fn appended_splits(
    prepared: &Prepared,
    files: &[stillhouse_input_files::InputFile],
    earlier: (Vec<SplitRecord>, u32),
) -> Result<Vec<SplitRecord>> {
    let there = earlier.0.len();
    let planned = source::append_splits(&prepared.store, files, &prepared.spec.input, split_bytes(prepared), earlier);
    let PlannedSplits { mut splits, weights } = planned.map_err(|e| PipelineError::source("input", e))?;
    sequence_offsets::plan_ranges(&prepared.spec, &mut splits, there, &weights);
    Ok(splits)
}

/// Bytes of text that the splits cover, counting only byte ranges.
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

/// Numbers in the rows of the splits; `None` if some splits have no row ranges, such as those of tar files.
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

/// Size of a split, in bytes of text or in documents without text. Chosen so that its shard has about
/// `output.shard_megabytes`.
fn split_bytes(prepared: &Prepared) -> u64 {
    let spec = &prepared.spec;
    let per_token = || bytes_per_token(&prepared.operators, prepared.vocab_size);
    let bytes = match spec.input.split_megabytes {
        Some(megabytes) => megabytes * 1e6,
        // a number has weight one
        None if spec.input.is_rows() => spec.output.shard_megabytes * 1e6 / per_token(),
        None => spec.output.shard_megabytes * 1e6 / per_token() * TEXT_BYTES_PER_TOKEN,
    };
    // documents whose text the teacher will write are estimated at this size
    let of_a_document = match spec.input.format {
        Some(InputFormat::None) => f64::from(spec.pack.length) * TEXT_BYTES_PER_TOKEN,
        _ => 1.0,
    };
    ((bytes / of_a_document) as u64).max(1)
}

/// Returns what stands for a key of a section in the job's hash: the file that it names, or what the operator made of
/// it.
fn content_of_sections(prepared: &Prepared) -> impl Iterator<Item = NamedContent> {
    let spec = &prepared.spec;
    let files = job_format().files(spec).into_iter();
    let files = files.filter_map(|file| {
        let content = Arc::clone(spec.sections.file(&file.field)?);
        Some((file.field, content))
    });
    let of_operators = prepared.operators.iter().flat_map(OperatorSpec::hashed_content);
    files.chain(of_operators.map(|(field, content)| (field.into(), content)))
}

/// Hashes everything that decides the bytes of the shards: the job (without settings that only say where things are and
/// how it runs), the tokenizer, the teacher, the kind of device, and the input files' sizes and names below their
/// common folder.
///
/// So moving a corpus, tokenizer or teacher does not change the hash. The content of input files is compared by what
/// the splits read ([`crate::inputs`]).
///
/// # Errors
/// If a file of the teacher cannot be read.
pub fn job_hash(prepared: &Prepared, observer: &dyn Observer) -> Result<JobHash> {
    let mut job =
        serde_json::to_value(&prepared.spec).map_err(|e| PipelineError::caused(ErrorKind::Usage, "job file", e))?;
    if let (Some(written), Some(Value::Object(extract))) = (prepared.spec.sequential(), job.pointer_mut("/extract")) {
        // an omitted section counts as its defaults
        extract.insert("sequential".into(), json!(written));
    }
    job_format().retain_identity(&mut job);
    for table in &prepared.tables {
        if let Some(Value::Object(map)) = job.pointer_mut(&format!("/input/tables/{}", table.name)) {
            // the paths of a table's files do not matter; which of all files belong to it does
            map.remove("paths");
            map.insert("files".into(), json!(table.files.len()));
        }
    }
    for (field, content) in content_of_sections(prepared) {
        // as a JSON pointer: `filter.rules[0].fasttext.model` is /filter/rules/0/fasttext/model
        let pointer = format!("/{}", field.replace(['.', '['], "/").replace(']', ""));
        if let Some((parent, key)) = pointer.rsplit_once('/')
            && let Some(Value::Object(parent)) = job.pointer_mut(parent)
        {
            parent.insert(key.to_owned(), json!({"sha256": hex::encode(Sha256::digest(&content))}));
        }
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

/// The files, named relative to their common folder.
fn planned_files(files: &[stillhouse_input_files::InputFile]) -> Vec<PlannedFile> {
    // up to a slash, so that only whole folder names are shared
    let folder = |location: &[u8]| location.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let first = files.first().map_or(&[][..], |f| f.location.as_ref().as_bytes());
    let common = files.iter().skip(1).fold(folder(first), |common, f| {
        let location = f.location.as_ref().as_bytes();
        let same = first.iter().zip(location).take(common.min(folder(location))).take_while(|(a, b)| a == b).count();
        folder(&first[..same])
    });
    let planned = |f: &stillhouse_input_files::InputFile| PlannedFile {
        path: f.path.clone(),
        name: f.location.as_ref().get(common..).unwrap_or_default().to_owned(),
        state: f.state.clone(),
    };
    files.iter().map(planned).collect()
}

/// `cpu` or `cuda`. Their floating-point results differ.
pub(crate) fn device_kind(spec: &JobSpec) -> &'static str {
    let devices = spec.extract.as_ref().and_then(|e| stillhouse_teacher::parse_devices(&e.teacher.device).ok());
    match devices.as_deref() {
        Some([first, ..]) if !first.is_cpu() => "cuda",
        _ => "cpu",
    }
}

/// Name of a file without its folder.
pub fn file_name(path: &Path) -> String {
    path.file_name().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned())
}

/// The tokenizer as the data set stores it.
///
/// # Errors
/// If it cannot be serialized as JSON.
pub fn tokenizer_json(prepared: &Prepared) -> Result<Vec<u8>> {
    prepared.vocabulary.to_json().map_err(|e| PipelineError::caused(ErrorKind::Model, "tokenizer", e))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(locations: &[&str]) -> Vec<String> {
        let file = |location: &&str| stillhouse_input_files::InputFile {
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
        // a file is not a folder, even if its name equals one
        assert_eq!(names(&["data/a", "data/a/b"]), ["a", "a/b"]);
        assert_eq!(names(&["data/ab/x", "data/ac/x"]), ["ab/x", "ac/x"]);
        // é and è begin with the same byte
        assert_eq!(names(&["data/é", "data/è"]), ["é", "è"]);
    }
}
