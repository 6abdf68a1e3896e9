//! What time does to a finished data set: finding files that are missing or damaged, and making just these again.
//!
//! ```text
//!   record of split N ── sha256 ──► data/X as it should be
//!   data/X missing, of another size, of another sha256 ─► split N once more ─ the same sha256? ─► in place of it
//!                                                                          └─ no: nothing is published, the reason is told
//! ```
//!
//! The records of the commits, and the manifest that was made of them, stay the truth. What comes out otherwise is no repair but another
//! data set. A shard is replaced whole, in one step, so readers see the old file or the new one.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use serde::Serialize;
use sha2::{Digest, Sha256};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, Range, ShardRecord, SplitRecord};
use stillhouse_schemas::spec::EngineKind;

use crate::append;
use crate::card::{self, CardFault};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::finish;
use crate::identity::JobHash;
use crate::job::Prepared;
use crate::job_diff::differences;
use crate::output::commands::{derive_command, repair_command};
use crate::output::{CARD, Lock, MANIFEST, Output, PLAN, SUCCESS, TOKENIZER};
use crate::plan;
use crate::run::{Job, Stop, blocking, planned, release};

/// Damages that are told one by one.
const MOST_NAMED: usize = 10;

/// A file that is not what it should be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// Its name in the data set.
    pub name: String,
    /// What is wrong with it.
    pub message: String,
    /// The split that it is made from, where it is a shard.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitId>,
}

/// What a repair did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Shards that were read and compared.
    pub checked: u64,
    /// What was found.
    pub damages: Vec<Damage>,
    /// Shards that were made again, with the same bytes.
    pub remade: Vec<String>,
    /// Other files that were written again.
    pub rewritten: Vec<String>,
}

/// Looks at shards: that each is there in its size, and with `thorough` that its bytes are what they were.
///
/// Cost: one listing; with `thorough` every byte is read.
///
/// # Errors
/// When the store cannot say.
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

/// The other files of a finished data set.
async fn damaged_files(output: &Output, manifest: &Manifest) -> Result<Vec<Damage>> {
    let damage = |name: &str, message: &str| Damage { name: name.into(), message: message.into(), split: None };
    let mut found = Vec::new();
    match output.get(TOKENIZER).await? {
        None => found.push(damage(TOKENIZER, "is missing")),
        Some(bytes) if hex::encode(&Sha256::digest(&bytes)) != manifest.tokenizer.sha256 => {
            found.push(damage(TOKENIZER, "is not the tokenizer that the manifest names"));
        }
        Some(_) => {}
    }
    for (name, sha256) in &manifest.beside {
        match output.get(name).await? {
            None => found.push(damage(name, "is missing")),
            Some(bytes) if hex::encode(&Sha256::digest(&bytes)) != *sha256 => {
                found.push(damage(name, "is not the file that the manifest names"));
            }
            Some(_) => {}
        }
    }
    // people write into it: what cannot be meant is no card
    if let Some(CardFault::Damaged(message)) = card::fault(&output.get(CARD).await?.unwrap_or_default()) {
        found.push(damage(CARD, message));
    }
    Ok(found)
}

/// Makes sure that a finished data set is whole before anybody says so.
///
/// # Errors
/// When a file is missing or damaged, with what mends it; when the manifest cannot be read.
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
        format!("{output}: {} of its files are missing or damaged; {}", found.len(), how(output, job_file));
    for damage in found.iter().take(MOST_NAMED) {
        message += &format!("\n  {}: {}", damage.name, damage.message);
    }
    if found.len() > MOST_NAMED {
        message += &format!("\n  … and {} more", found.len() - MOST_NAMED);
    }
    Err(PipelineError::new(ErrorKind::DataSet, message))
}

fn how(output: &Output, job_file: Option<&str>) -> String {
    format!("`{}` makes them again", repair_command(output, job_file))
}

/// Makes what is missing or damaged in a data set again, and nothing else.
///
/// A data set that is not finished gets its state mended; the job itself goes on with a run. Where new files have come to its input a run would
/// be another job's, so it is finished here, with the files that it was begun with.
///
/// # Errors
/// When the data set is another job's; when its input is another by now; when a shard comes out with other bytes than it had, which is
/// then not published; when the store fails.
pub async fn repair(prepared: Arc<Prepared>, output: Output, observer: Arc<dyn Observer>) -> Result<Repaired> {
    repair_until(prepared, output, observer, &Stop::default()).await
}

/// The same, until it is told to stop: then what it has sent elsewhere is called back, and the output is free.
///
/// # Errors
/// As [`repair`]; [`ErrorKind::Cancelled`] where it was told to stop before its end.
pub async fn repair_until(
    prepared: Arc<Prepared>,
    output: Output,
    observer: Arc<dyn Observer>,
    stop: &Stop,
) -> Result<Repaired> {
    let is_elsewhere = prepared.spec.engine.kind == EngineKind::Ballista;
    let (as_it_was, output, lock) = stop.or(hold(&prepared, output, &observer)).await?;
    let work = repair_locked(prepared, as_it_was, &output, observer, stop);
    let result = stop.or_call_back(is_elsewhere, work).await;
    release(lock, &result).await;
    result
}

async fn hold(
    prepared: &Arc<Prepared>,
    output: Output,
    observer: &Arc<dyn Observer>,
) -> Result<(AsItWas, Output, Lock)> {
    if !output.has_folder().await || !output.has_state().await? {
        let message = format!("{output}: no data set of a Stillhouse job is here");
        return Err(PipelineError::new(ErrorKind::DataSet, message));
    }
    if let Ok(Some(Manifest { derived_from: Some(_), .. })) = output.get_json(MANIFEST).await {
        let message =
            format!("{output}: was derived from another data set; `{}` again mends it", derive_command(&output));
        return Err(PipelineError::new(ErrorKind::DataSet, message));
    }
    let hash = blocking(prepared, observer, |p, o| plan::job_hash(p, o)).await?;
    let hash = append::at_output(hash, &output).await?;
    // new files are for `run --append`, which asks for a data set that is whole
    let now = hash.hash.clone();
    let hash = append::before_new_files(hash, &output).await?;
    let has_grown = hash.hash != now;
    let output = output.create(observer.as_ref()).await?.for_grown_job(&hash);
    let lock = output.lock(observer.as_ref()).await?;
    Ok((AsItWas { hash, has_grown }, output, lock))
}

/// The job as it was when its plan was made.
struct AsItWas {
    hash: JobHash,
    /// Whether files have come to its input since.
    has_grown: bool,
}

async fn repair_locked(
    prepared: Arc<Prepared>,
    AsItWas { hash, has_grown }: AsItWas,
    output: &Output,
    observer: Arc<dyn Observer>,
    stop: &Stop,
) -> Result<Repaired> {
    let began = Instant::now();
    let mut done = Repaired::default();
    let manifest = sound_manifest(output, &hash).await?;
    if !has_plan(output, &hash, &mut done).await? {
        refuse_of_others(output, &hash).await?;
        let made = planned(&prepared, &hash, output, &observer).await?.splits;
        if manifest.as_ref().is_some_and(|manifest| !same_ranges(&manifest.splits, &made)) {
            output.remove_mark(PLAN).await?;
            let message = format!("{output}: its input makes other splits by now; put the files back as they were");
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        done.rewritten.push(PLAN.into());
    }
    let truth = mend_records(output, &hash, manifest.as_ref(), &mut done).await?;
    if manifest.is_none() && !has_grown && !output.exists(SUCCESS).await? {
        if done.damages.is_empty() {
            let message =
                format!("{output}: the job is not finished and its state is sound; `stillhouse run` goes on with it");
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        return Ok(done);
    }
    let damaged = damaged_shards(output, truth.values(), true, observer.as_ref()).await?;
    done.checked = truth.len() as u64;
    let is_damaged = |split: &SplitId| damaged.iter().any(|d| d.split == Some(*split));
    let (bad, good): (BTreeMap<_, _>, BTreeMap<_, _>) = truth.into_iter().partition(|(split, _)| is_damaged(split));
    done.remade = bad.values().map(|shard| shard.path.clone()).collect();
    let nothing_to_make = bad.is_empty();
    done.damages.extend(damaged);
    match manifest {
        Some(manifest) => {
            let files = damaged_files(output, &manifest).await?;
            done.rewritten.extend(files.iter().map(|d| d.name.clone()));
            done.damages.extend(files);
            if !nothing_to_make {
                Job::start(Arc::clone(&prepared), hash, output.clone(), good, observer)
                    .await?
                    .stopped_by(stop)
                    .remake(bad, began)
                    .await?;
            }
            finish::write_beside(&prepared, output, &manifest).await?;
        }
        None => {
            let message = "is missing or damaged; it is made again".to_owned();
            done.damages.push(Damage { name: MANIFEST.into(), message, split: None });
            done.rewritten.push(MANIFEST.into());
            let job = Job::start(prepared, hash, output.clone(), good, Arc::clone(&observer)).await?;
            job.stopped_by(stop).remake(bad, began).await?.run_pending(began).await?.finish(began).await?;
        }
    }
    Ok(done)
}

/// The manifest, where it is there, whole, and of this job.
async fn sound_manifest(output: &Output, hash: &JobHash) -> Result<Option<Manifest>> {
    let Some(bytes) = output.finished_manifest().await? else { return Ok(None) };
    let manifest = serde_json::from_slice::<Manifest>(&bytes).ok();
    Ok(manifest.filter(|manifest| manifest.job_hash == hash.hash))
}

fn same_ranges(a: &[SplitRecord], b: &[SplitRecord]) -> bool {
    let ranges = |splits: &[SplitRecord]| -> Vec<(String, Vec<Range>)> {
        splits.iter().map(|s| (s.dataset_split.clone(), s.pieces.iter().map(|p| p.range).collect())).collect()
    };
    ranges(a) == ranges(b)
}

/// Whether there is a plan of this job. One that cannot be read is taken away: it is a function of the job and comes out the same.
async fn has_plan(output: &Output, hash: &JobHash, done: &mut Repaired) -> Result<bool> {
    match output.plan().await {
        Ok(Some(plan)) if plan.job_hash != hash.hash => {
            let mut message = format!("{output} is the data set of another job ({})", plan.name);
            differences(&plan, hash).iter().for_each(|line| message += &format!("\n  {line}"));
            message += &format!("\n  {ITS_OWN}");
            Err(PipelineError::new(ErrorKind::Usage, message))
        }
        Ok(plan) => Ok(plan.is_some()),
        Err(e) if e.kind == ErrorKind::DataSet => {
            done.damages.push(Damage { name: PLAN.into(), message: e.to_string(), split: None });
            output.remove_mark(PLAN).await?;
            Ok(false)
        }
        Err(e) => Err(e),
    }
}

/// What another job's data set is repaired with.
const ITS_OWN: &str = "repair it with the job file and the input that it was made of";

/// Refuses to plan where the plan is lost and what is there was made by another job, or of another input: its shards would be nobody's.
async fn refuse_of_others(output: &Output, hash: &JobHash) -> Result<()> {
    let manifest = output.finished_manifest().await?;
    let manifest = manifest.and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok());
    let (records, _) = output.readable_records().await?;
    let mut hashes = manifest.iter().map(|m| &m.job_hash).chain(records.iter().map(|r| &r.job_hash));
    if hashes.all(|there| hash.counts(there)) {
        return Ok(());
    }
    let name = manifest.map(|manifest| format!(" ({})", manifest.job.name)).unwrap_or_default();
    let message = format!(
        "{output}: its plan is missing or damaged, and it was made by another job{name}, or of other files than its input has now; {ITS_OWN}"
    );
    Err(PipelineError::new(ErrorKind::Usage, message))
}

/// Whether a record says what the manifest says; sums of floats may have lost their last bit on the way through JSON.
fn same(record: &ShardRecord, shard: &ShardRecord) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-12 * a.abs();
    let (mut as_shard, (was, is)) = (record.clone(), (&record.statistics, &shard.statistics));
    if near(was.logprob_sum, is.logprob_sum) && near(was.total_variation_max, is.total_variation_max) {
        as_shard.statistics.logprob_sum = is.logprob_sum;
        as_shard.statistics.total_variation_max = is.total_variation_max;
    }
    as_shard == *shard
}

/// What every shard should be: what the manifest says, or where there is none the records. Records that are missing, cannot be read or
/// say something else than the manifest are written again from it; without one those that cannot be read go, and their splits are made
/// again by a run.
pub(crate) async fn mend_records(
    output: &Output,
    hash: &JobHash,
    manifest: Option<&Manifest>,
    done: &mut Repaired,
) -> Result<BTreeMap<SplitId, ShardRecord>> {
    let (records, unreadable) = output.readable_records().await?;
    let own = records.into_iter().filter(|r| hash.counts(&r.job_hash));
    let records: BTreeMap<SplitId, ShardRecord> = own.map(|r| (r.shard.split, r.shard)).collect();
    for (name, message) in unreadable {
        output.remove_mark(&name).await?;
        done.damages.push(Damage { name, message, split: None });
    }
    let Some(manifest) = manifest else { return Ok(records) };
    for shard in manifest.shards.iter().filter(|shard| !records.get(&shard.split).is_some_and(|r| same(r, shard))) {
        done.rewritten.push(output.record(shard).await?);
    }
    Ok(manifest.shards.iter().map(|shard| (shard.split, shard.clone())).collect())
}
