//! Repairs a data set: finds missing or damaged files and rebuilds only these.
//!
//! ```text
//!   record of split N ── sha256 ──► expected data/X
//!   data/X missing, of another size or sha256 ─► build split N again ─ same sha256? ─► replace data/X
//!                                                                    └─ no: publish nothing, report the reason
//! ```
//!
//! The commit records and the manifest made from them remain the truth. A shard with other bytes would be another data
//! set, not a repair. A shard is replaced whole in one step, so readers see the old file or the new one.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use stillhouse_datasets::damage::{Damage, Repaired, damaged_files, damaged_shards, repair_records};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, Range, SplitRecord};

use crate::append;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::Observer;
use crate::finish;
use crate::identity::JobHash;
use crate::inputs::find_work;
use crate::job::{Prepared, blocking};
use crate::job_diff::differences;
use crate::output::commands::derive_command;
use crate::output::{Found, Lock, MANIFEST, Output, PLAN, SUCCESS};
use crate::plan;
use crate::run::{Job, Stop, create_plan, finish_started, release};

/// Rebuilds the missing or damaged files of a data set.
///
/// For an unfinished data set this repairs the state; a run then continues the job. If its input got new files, a run
/// would be another job's. Then this finishes the data set with the original files.
///
/// # Errors
/// If the data set belongs to another job, its input changed, a rebuilt shard has other bytes (it is then not
/// published), or the store fails.
pub async fn repair(prepared: Arc<Prepared>, output: Output, observer: Arc<dyn Observer>) -> Result<Repaired> {
    repair_until(prepared, output, observer, &Stop::default()).await
}

/// Like [`repair`], but stops on request. Then it cancels remote work and releases the output.
///
/// # Errors
/// See [`repair`]; [`ErrorKind::Cancelled`] if `stop` ended it.
pub async fn repair_until(
    prepared: Arc<Prepared>,
    output: Output,
    observer: Arc<dyn Observer>,
    stop: &Stop,
) -> Result<Repaired> {
    let (original_job, output, lock) = stop.or(lock_output(&prepared, output, &observer)).await?;
    let work = repair_locked(prepared, original_job, &output, observer, stop);
    let result = stop.or_end(work).await;
    release(lock, &result).await;
    result
}

async fn lock_output(
    prepared: &Arc<Prepared>,
    output: Output,
    observer: &Arc<dyn Observer>,
) -> Result<(OriginalJob, Output, Lock)> {
    if !output.has_folder().await || !output.has_state().await? {
        let message = format!("{output}: no data set of a Stillhouse job is here");
        return Err(PipelineError::new(ErrorKind::DataSet, message));
    }
    if let Ok(Some(Manifest { derived_from: Some(_), .. })) = output.get_json(MANIFEST).await {
        let message = format!("{output}: was derived from another data set; `{}` repairs it", derive_command(&output));
        return Err(PipelineError::new(ErrorKind::DataSet, message));
    }
    let hash = blocking(prepared, observer, |p, o| plan::job_hash(p, o)).await?;
    let hash = append::hash_at_output(hash, &output).await?;
    // new files are for `run --append`, which requires an intact data set
    let now = hash.hash.clone();
    let hash = append::before_new_files(hash, &output).await?;
    let has_grown = hash.hash != now;
    let output = output.create(observer.as_ref()).await?.for_grown_job(&hash);
    let lock = output.lock(observer.as_ref()).await?;
    Ok((OriginalJob { hash, has_grown }, output, lock))
}

/// The job as it was when its plan was made.
struct OriginalJob {
    hash: JobHash,
    /// Whether its input got new files since.
    has_grown: bool,
}

async fn repair_locked(
    prepared: Arc<Prepared>,
    OriginalJob { hash, has_grown }: OriginalJob,
    output: &Output,
    observer: Arc<dyn Observer>,
    stop: &Stop,
) -> Result<Repaired> {
    let began = Instant::now();
    let mut done = Repaired::default();
    let manifest = intact_manifest(output, &hash).await?;
    if !check_plan(output, &hash, &mut done).await? {
        refuse_other_jobs(output, &hash).await?;
        let made = create_plan(&prepared, &hash, output, &observer).await?.splits;
        if manifest.as_ref().is_some_and(|manifest| !same_ranges(&manifest.splits, &made)) {
            output.delete(PLAN).await?;
            let message = format!("{output}: its input makes other splits by now; put the files back as they were");
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        done.rewritten.push(PLAN.into());
    }
    let truth = repair_records(output, &hash, manifest.as_ref(), &mut done).await?;
    if manifest.is_none() && !output.exists(SUCCESS).await? {
        if has_grown {
            let message = "is missing: the job was not finished. `repair` finishes it with its original input files";
            done.damages.push(Damage { name: MANIFEST.into(), message: message.into(), split: None });
            done.rewritten.push(MANIFEST.into());
            // as in a run: compare what was read of the old files with their present content
            let there = match find_work(&prepared, &hash, output, &observer).await? {
                Found::Resumable { done, incomplete_uploads } => (done, incomplete_uploads),
                Found::Nothing | Found::Complete => return Ok(done),
            };
            finish_started(prepared, hash, output, there, observer, (began, stop)).await?;
            return Ok(done);
        }
        if done.damages.is_empty() {
            let message = format!("{output}: the job is not finished and has no damage; `stillhouse run` resumes it");
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
                    .rebuild(bad, began)
                    .await?;
            }
            finish::write_sidecar_files(&prepared, output, &manifest).await?;
        }
        None => {
            let message = "is missing or damaged; it is made again".to_owned();
            done.damages.push(Damage { name: MANIFEST.into(), message, split: None });
            done.rewritten.push(MANIFEST.into());
            let job = Job::start(prepared, hash, output.clone(), good, Arc::clone(&observer)).await?;
            job.stopped_by(stop).rebuild(bad, began).await?.run_pending(began).await?.finish(began).await?;
        }
    }
    Ok(done)
}

/// The manifest, if it exists, is intact, and belongs to this job.
async fn intact_manifest(output: &Output, hash: &JobHash) -> Result<Option<Manifest>> {
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

/// Whether the output has a plan of this job. Removes a plan that cannot be read: planning the job again gives the same
/// one.
async fn check_plan(output: &Output, hash: &JobHash, done: &mut Repaired) -> Result<bool> {
    match output.plan().await {
        Ok(Some(plan)) if plan.job_hash != hash.hash => {
            let mut message = format!("{output} is the data set of another job ({})", plan.name);
            differences(&plan, hash).iter().for_each(|line| message += &format!("\n  {line}"));
            message += &format!("\n  {REPAIR_ADVICE}");
            Err(PipelineError::new(ErrorKind::Usage, message))
        }
        Ok(plan) => Ok(plan.is_some()),
        Err(e) if e.kind == ErrorKind::DataSet => {
            done.damages.push(Damage { name: PLAN.into(), message: e.to_string(), split: None });
            output.delete(PLAN).await?;
            Ok(false)
        }
        Err(e) => Err(e),
    }
}

/// Advice for repairing another job's data set.
const REPAIR_ADVICE: &str = "repair it with the job file and the input that it was made of";

/// Refuses to plan if the plan is lost and another job, or other input, made the shards: they would match no job.
async fn refuse_other_jobs(output: &Output, hash: &JobHash) -> Result<()> {
    let manifest = output.finished_manifest().await?;
    let manifest = manifest.and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok());
    let (records, _) = output.readable_records().await?;
    let mut hashes = manifest.iter().map(|m| &m.job_hash).chain(records.iter().map(|r| &r.job_hash));
    if hashes.all(|there| hash.includes_commit(there)) {
        return Ok(());
    }
    let name = manifest.map(|manifest| format!(" ({})", manifest.job.name)).unwrap_or_default();
    let message = format!(
        "{output}: its plan is missing or damaged, and it was made by another job{name}, or of other files than its input has now; {REPAIR_ADVICE}"
    );
    Err(PipelineError::new(ErrorKind::Usage, message))
}
