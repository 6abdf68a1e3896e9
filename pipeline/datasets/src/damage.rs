//! Finds missing or damaged files of a data set by its commit records and its manifest.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest, Sha256};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer};
use stillhouse_output::commands::repair_command;
use stillhouse_output::identity::JobHash;
use stillhouse_output::{CARD, Output, TOKENIZER};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, ShardRecord};

use crate::card::{self, CardFault};

/// Maximum number of damages that a message lists.
const MAX_NAMED_FILES: usize = 10;

/// A file that is missing or damaged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Name of the file in the data set.
    pub name: String,
    /// The problem.
    pub message: String,
    /// The split of the shard; `None` for other files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitId>,
}

/// Result of a repair.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Number of shards that were read and compared.
    pub checked: u64,
    /// Damages found.
    pub damages: Vec<Damage>,
    /// Shards that were rebuilt, with the same bytes.
    pub remade: Vec<String>,
    /// Other files that were rewritten.
    pub rewritten: Vec<String>,
}

/// Checks that each shard exists with its recorded size; with `thorough` also its checksum.
///
/// Cost: one listing; with `thorough` every byte is read.
///
/// # Errors
/// If the store fails.
pub async fn damaged_shards<'a>(
    output: &Output,
    shards: impl IntoIterator<Item = &'a ShardRecord>,
    thorough: bool,
    observer: &dyn Observer,
) -> Result<Vec<Damage>> {
    let shards: Vec<&ShardRecord> = shards.into_iter().collect();
    let sizes = if shards.is_empty() { BTreeMap::new() } else { output.list("data").await? };
    let bytes: u64 = shards.iter().map(|s| s.bytes).sum();
    let mut found = Vec::new();
    for (i, shard) in shards.iter().enumerate() {
        let message = match sizes.get(&shard.path) {
            None => Some("is missing".to_owned()),
            Some(size) if *size != shard.bytes => Some(format!("has {size} bytes, should have {}", shard.bytes)),
            Some(_) if thorough => {
                let what = format!("reading shard {} of {} again ({bytes} bytes in all)", i + 1, shards.len());
                observer.event(&Event::Preparing { what });
                let (sha256, _) = output.read_whole(&shard.path, |_| {}).await?;
                (sha256 != shard.sha256).then(|| format!("sha256 {sha256}, should be {}", shard.sha256))
            }
            Some(_) => None,
        };
        if let Some(message) = message {
            found.push(Damage { name: shard.path.clone(), message, split: Some(shard.split) });
        }
    }
    Ok(found)
}

/// Checks the other files of a finished data set: tokenizer, sidecar files, card.
pub async fn damaged_files(output: &Output, manifest: &Manifest) -> Result<Vec<Damage>> {
    let damage = |name: &str, message: &str| Damage { name: name.into(), message: message.into(), split: None };
    let mut found = Vec::new();
    match output.get(TOKENIZER).await? {
        None => found.push(damage(TOKENIZER, "is missing")),
        Some(bytes) if hex::encode(Sha256::digest(&bytes)) != manifest.tokenizer.sha256 => {
            found.push(damage(TOKENIZER, "is not the tokenizer that the manifest names"));
        }
        Some(_) => {}
    }
    for (name, sha256) in &manifest.sidecar_files {
        match output.get(name).await? {
            None => found.push(damage(name, "is missing")),
            Some(bytes) if hex::encode(Sha256::digest(&bytes)) != *sha256 => {
                found.push(damage(name, "is not the file that the manifest names"));
            }
            Some(_) => {}
        }
    }
    // people edit the card: report it only if no edit can have intended its content
    if let Some(CardFault::Damaged(message)) = card::fault(&output.get(CARD).await?.unwrap_or_default()) {
        found.push(damage(CARD, message));
    }
    Ok(found)
}

/// Checks that a finished data set is complete before a caller reports it as finished.
///
/// # Errors
/// If a file is missing or damaged, with the command that repairs it; if the manifest cannot be read.
pub async fn check_finished(
    output: &Output,
    manifest: &Manifest,
    job_file: Option<&str>,
    thorough: bool,
    observer: &dyn Observer,
) -> Result<()> {
    let mut found = damaged_shards(output, &manifest.shards, thorough, observer).await?;
    found.extend(damaged_files(output, manifest).await?);
    if found.is_empty() {
        return Ok(());
    }
    let mut message =
        format!("{output}: {} of its files are missing or damaged; {}", found.len(), repair_advice(output, job_file));
    for damage in found.iter().take(MAX_NAMED_FILES) {
        message += &format!("\n  {}: {}", damage.name, damage.message);
    }
    if found.len() > MAX_NAMED_FILES {
        message += &format!("\n  … and {} more", found.len() - MAX_NAMED_FILES);
    }
    Err(PipelineError::new(ErrorKind::DataSet, message))
}

fn repair_advice(output: &Output, job_file: Option<&str>) -> String {
    format!("`{}` makes them again", repair_command(output, job_file))
}

/// Whether a commit record equals the manifest's record. Sums of floats may have lost their last bit in JSON.
fn same(record: &ShardRecord, shard: &ShardRecord) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-12 * a.abs();
    let (mut as_shard, (was, is)) = (record.clone(), (&record.statistics, &shard.statistics));
    if near(was.logprob_sum, is.logprob_sum) && near(was.total_variation_max, is.total_variation_max) {
        as_shard.statistics.logprob_sum = is.logprob_sum;
        as_shard.statistics.total_variation_max = is.total_variation_max;
    }
    as_shard == *shard
}

/// Repairs the commit records and returns the expected record of every shard: from the manifest, or without one from
/// the records.
///
/// With a manifest, this rewrites records that are missing, unreadable or different. Without one, it deletes unreadable
/// records, so that a run rebuilds their splits.
pub async fn repair_records(
    output: &Output,
    hash: &JobHash,
    manifest: Option<&Manifest>,
    done: &mut Repaired,
) -> Result<BTreeMap<SplitId, ShardRecord>> {
    let (records, unreadable) = output.readable_records().await?;
    let own = records.into_iter().filter(|r| hash.includes_commit(&r.job_hash));
    let records: BTreeMap<SplitId, ShardRecord> = own.map(|r| (r.shard.split, r.shard)).collect();
    for (name, message) in unreadable {
        output.delete(&name).await?;
        done.damages.push(Damage { name, message, split: None });
    }
    let Some(manifest) = manifest else { return Ok(records) };
    for shard in manifest.shards.iter().filter(|shard| !records.get(&shard.split).is_some_and(|r| same(r, shard))) {
        done.rewritten.push(output.record(shard).await?);
    }
    Ok(manifest.shards.iter().map(|shard| (shard.split, shard.clone())).collect())
}
