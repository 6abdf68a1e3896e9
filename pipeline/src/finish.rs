//! Finishes a data set: writes the tokenizer, sidecar files, manifest, card and `_SUCCESS`, in this order.

use std::collections::BTreeMap;

use arrow::datatypes::Schema;
use sha2::{Digest, Sha256};
use stillhouse_datasets::card::{self, CardFault, card};
use stillhouse_operators::operator::documents_schema;
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::subtokens::SubtokensConfig;
use stillhouse_schemas::columns::FORMAT_VERSION;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{
    ColumnRecord, Manifest, ShardRecord, SplitRecord, Statistics, SubtokenRecord, TeacherArithmetic, TeacherRecord,
    TokenizerRecord, Totals,
};
use stillhouse_teacher::TeacherInfo;

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::identity::JobHash;
use crate::job::Prepared;
use crate::output::{CARD, MANIFEST, Output, TOKENIZER};
use crate::plan;

/// Builds the manifest.
///
/// # Errors
/// If a special token cannot be named.
pub fn manifest(
    prepared: &Prepared,
    hash: &JobHash,
    teacher: Option<&TeacherInfo>,
    arithmetic: Option<&TeacherArithmetic>,
    splits: Vec<SplitRecord>,
    shards: Vec<ShardRecord>,
) -> Result<Manifest> {
    let (statistics, totals) = sum_shards(&shards);
    let spec = &prepared.spec;
    Ok(Manifest {
        format_version: FORMAT_VERSION,
        job: spec.clone(),
        job_hash: hash.hash.clone(),
        tokenizer: tokenizer_record(prepared, hash),
        teacher: teacher.zip(prepared.teacher.as_ref()).map(|(info, found)| TeacherRecord {
            source: found.source.clone(),
            architecture: info.architecture.name().to_owned(),
            parameters: info.parameters,
            arithmetic: arithmetic.map_or_else(|| info.arithmetic.clone(), |a| a.arithmetic.clone()),
            dtype: arithmetic.map(|a| a.dtype),
            cost: arithmetic.and_then(|a| a.cost),
            device: info.device.clone(),
            files: hash.teacher.clone(),
            bos_token_id: found.bos,
        }),
        vocab_size: prepared.vocab_size as u64,
        noise_seed: spec.has_noise().then(|| spec.noise_seed()),
        subtokens: subtokens(&prepared.operators),
        sidecar_files: sidecar_sha256(&prepared.operators),
        columns: ColumnRecord::of_schema(&schema(&prepared.operators)),
        splits,
        appended: hash.appended.clone(),
        shards,
        totals,
        statistics,
        derived_from: None,
    })
}

fn tokenizer_record(prepared: &Prepared, hash: &JobHash) -> TokenizerRecord {
    let vocabulary = &prepared.vocabulary;
    TokenizerRecord {
        source: vocabulary.source().to_owned(),
        sha256: hash.tokenizer.clone(),
        vocab_size: vocabulary.vocab_size() as u64,
        special_tokens: vocabulary.special_tokens(),
    }
}

/// Sums over all shards: the statistics, and the totals of each data set split.
pub(crate) fn sum_shards(shards: &[ShardRecord]) -> (Statistics, BTreeMap<String, Totals>) {
    let (mut statistics, mut totals) = (Statistics::default(), BTreeMap::<String, Totals>::new());
    for shard in shards {
        statistics.add(&shard.statistics);
        let total = totals.entry(shard.dataset_split.clone()).or_default();
        total.shards += 1;
        total.rows += shard.rows;
        total.tokens += shard.tokens;
        total.bytes += shard.bytes;
    }
    (statistics, totals)
}

/// The records of these splits, in the order of the splits.
///
/// # Errors
/// If a record is missing.
pub(crate) fn in_order(
    splits: impl Iterator<Item = SplitId>,
    mut records: BTreeMap<SplitId, ShardRecord>,
    output: &Output,
) -> Result<Vec<ShardRecord>> {
    let gone = |split: SplitId| {
        PipelineError::new(ErrorKind::Output, format!("{output}: the record of split {} is gone", split.0))
    };
    splits.map(|split| records.remove(&split).ok_or_else(|| gone(split))).collect()
}

/// Base and length of the sub-tokens, if the operators make any.
pub(crate) fn subtokens(operators: &[OperatorSpec]) -> Option<SubtokenRecord> {
    let config = operators.iter().find_map(|o| o.config::<SubtokensConfig>())?;
    Some(SubtokenRecord { base: config.base, length: config.length as u32 })
}

/// The files that the operators write beside the shards.
fn sidecar_files(operators: &[OperatorSpec]) -> impl Iterator<Item = (&'static str, Vec<u8>)> {
    operators.iter().flat_map(OperatorSpec::sidecar_files)
}

/// The sha256 of these files, by name.
pub(crate) fn sidecar_sha256(operators: &[OperatorSpec]) -> BTreeMap<String, String> {
    sidecar_files(operators).map(|(name, bytes)| (name.to_owned(), hex::encode(Sha256::digest(&bytes)))).collect()
}

/// Schema of the shards that these operators write.
pub fn schema(operators: &[OperatorSpec]) -> Schema {
    let mut schema = documents_schema();
    for operator in operators {
        schema = operator.output_schema(&schema);
    }
    schema.as_ref().clone()
}

/// Writes the files that complete a data set: tokenizer, sidecar files, manifest, card, and `_SUCCESS` last.
///
/// # Errors
/// If the store fails.
pub async fn write(output: &Output, tokenizer: Vec<u8>, operators: &[OperatorSpec], manifest: &Manifest) -> Result<()> {
    output.put_if_owner(TOKENIZER, tokenizer).await?;
    for (name, bytes) in sidecar_files(operators) {
        output.put_if_owner(name, bytes).await?;
    }
    output.put_json_if_owner(MANIFEST, manifest).await?;
    output.put_if_owner(CARD, card(manifest).into_bytes()).await?;
    output.finish().await
}

/// Rewrites the tokenizer, sidecar files and card of a finished data set where they are missing or damaged.
///
/// # Errors
/// If the tokenizer of the job is not the data set's, or the store fails.
pub async fn write_sidecar_files(prepared: &Prepared, output: &Output, manifest: &Manifest) -> Result<()> {
    let put = async |name: &str, bytes: Vec<u8>| match output.get(name).await? {
        Some(there) if there == bytes => Ok(()),
        _ => output.put_if_owner(name, bytes).await,
    };
    put(TOKENIZER, plan::tokenizer_json(prepared)?).await?;
    for (name, bytes) in sidecar_files(&prepared.operators) {
        put(name, bytes).await?;
    }
    let there = output.get(CARD).await?.unwrap_or_default();
    if matches!(card::fault(&there), Some(CardFault::Damaged(_))) {
        output.put_if_owner(CARD, card(manifest).into_bytes()).await?;
    }
    output.finish().await
}

/// Emits the event that the data set is finished.
pub fn report_finished(
    output: &Output,
    manifest: &Manifest,
    seconds: f64,
    already_done: bool,
    observer: &dyn Observer,
) {
    let sum = |f: fn(&Totals) -> u64| manifest.totals.values().map(f).sum();
    observer.event(&Event::JobFinished {
        output: output.to_string(),
        job_hash: manifest.job_hash.clone(),
        rows: sum(|t| t.rows),
        tokens: sum(|t| t.tokens),
        bytes: sum(|t| t.bytes),
        seconds,
        already_done,
        went_in: (&manifest.statistics).into(),
    });
}

/// The manifest of a finished data set.
///
/// # Errors
/// If it cannot be read.
pub async fn manifest_of(output: &Output) -> Result<Manifest> {
    let gone = || PipelineError::new(ErrorKind::DataSet, format!("{output}: _SUCCESS without manifest.json"));
    output.get_json(MANIFEST).await?.ok_or_else(gone)
}

/// Rewrites the card of a finished data set if the job file's card settings changed. The manifest keeps the original
/// settings.
///
/// # Errors
/// If the store fails.
pub async fn update_card(prepared: &Prepared, output: &Output, manifest: &Manifest) -> Result<()> {
    let now = &prepared.spec.output.card;
    if manifest.job.output.card == *now {
        return Ok(());
    }
    let mut renewed = manifest.clone();
    renewed.job.output.card = now.clone();
    output.put_if_owner(CARD, card(&renewed).into_bytes()).await
}
