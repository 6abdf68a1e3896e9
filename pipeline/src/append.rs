//! Appending: if the input has new files, builds only their splits and adds them to the finished data set.
//!
//! ```text
//!   first run     a.jsonl  b.jsonl                    splits 0 1 2 | 3       train-00000-of-00003 … validation-00000-of-00001
//!   --append      a.jsonl  b.jsonl │ aa.jsonl         splits 4 5             train-00003-of-00005 …
//!   --append      a.jsonl  b.jsonl │ aa.jsonl │ c.gz  split 6                train-00005-of-00006
//! ```
//!
//! Files keep the order in which they were added, wherever they are in the listing. So every split keeps its number,
//! shard and ids; new ones count on. The hash of the grown job covers the files in this order and the lengths of the
//! appends. The plan keeps the job's earlier hashes, whose commits still count ([`PlanRecord::includes_commit`]). So an
//! append replaces one small file, the plan, and touches no record or shard.
//!
//! The existing data set must be finished first. So only the newest append can be incomplete. If its files change, the
//! next `--append` reverts it.
//!
//! Cost: planning the splits of the new files, and one listing of the existing shards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use stillhouse_datasets::damage::{self, Repaired};
use stillhouse_operators::deduplicate;
use stillhouse_schemas::manifest::{Appended, Manifest};

use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::finish;
use crate::identity::{JobHash, PlannedFile};
use crate::inputs::find_work;
use crate::job::{Prepared, blocking};
use crate::output::{Found, Output, PlanRecord};
use crate::plan;
use stillhouse_input_files::InputFile;

/// Maximum number of files that a refusal names.
const MAX_NAMED_FILES: usize = 5;

/// The hash of a job as its output has it: with the files in the order in which they were added there.
///
/// # Errors
/// If the output cannot be read.
pub fn hash_at_output_blocking(prepared: &Prepared, hash: JobHash) -> Result<JobHash> {
    let output = prepared.output()?;
    prepared.store.wait(hash_at_output(hash, &output))
}

/// Like [`hash_at_output_blocking`]. Without a readable plan it takes the order from the manifest.
pub(crate) async fn hash_at_output(hash: JobHash, output: &Output) -> Result<JobHash> {
    let appended = match output.plan().await {
        Ok(Some(plan)) => plan.appended,
        Err(e) if e.kind != ErrorKind::DataSet => return Err(e),
        Ok(None) | Err(_) => {
            let manifest = output.finished_manifest().await?;
            let manifest = manifest.and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok());
            manifest.map(|manifest| manifest.appended).unwrap_or_default()
        }
    };
    Ok(match appended.is_empty() {
        true => hash,
        false => hash.arranged(&appended).unwrap_or(hash),
    })
}

/// The job as it was when the plan at the output was made, if its input got new files since. What was made of the old
/// files remains valid.
///
/// # Errors
/// If the output cannot be read.
pub(crate) async fn before_new_files(hash: JobHash, output: &Output) -> Result<JobHash> {
    let there = match output.plan().await {
        Ok(Some(there)) => there,
        // a repair handles a damaged plan
        Err(e) if e.kind != ErrorKind::DataSet => return Err(e),
        Ok(None) | Err(_) => return Ok(hash),
    };
    if there.identity != hash.identity || there.job_hash == hash.hash {
        return Ok(hash);
    }
    Ok(match files_now(&there, &hash) {
        Ok(files) => hash.of_files(there.job_hash, files, there.appended),
        Err(_) => hash,
    })
}

/// What `--append` would do at an output.
#[derive(Debug)]
pub(crate) struct Growth {
    /// The plan at the output, without its newest append if that is reverted.
    base: PlanRecord,
    /// Hash of the plan at the output.
    plan_hash: String,
    /// The job when `base` was made, with the present paths of its files.
    now: JobHash,
    /// The job with the new files; `None` if an append is reverted and there are no new files.
    grown: Option<JobHash>,
}

impl Growth {
    /// The job with the new files and the present plan; `None` if there are no new files.
    pub(crate) fn grown(&self) -> Option<(&JobHash, &PlanRecord)> {
        Some((self.grown.as_ref()?, &self.base))
    }

    /// The job that is finished at the output; `None` if an append is reverted first.
    pub(crate) fn finished(&self) -> Option<&JobHash> {
        (self.plan_hash == self.base.job_hash).then_some(&self.now)
    }
}

/// Determines what to append. Returns `None` if the output is empty, has all files, or belongs to another job.
///
/// # Errors
/// If the output cannot be appended to.
pub(crate) async fn growth(prepared: &Prepared, hash: &JobHash, output: &Output) -> Result<Option<Growth>> {
    if let Some(what) = prepared.spec.input.staged_by() {
        let message = format!(
            "--append: {what} is made of all files at once, so new files have no rows of their own; valid: a job with input.paths and without \
             input.sql"
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    if prepared.operators.iter().any(|operator| operator.name() == deduplicate::NAME) {
        let message = "--append: deduplicate compares all documents of the input, and new files would have to be compared with those that are \
                       prepared, which this version cannot; valid: a job without deduplicate, or all of it anew with --overwrite";
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let manifest = output.finished_manifest().await?;
    let manifest = manifest.and_then(|bytes| serde_json::from_slice::<Manifest>(&bytes).ok());
    if let Some(Manifest { derived_from: Some(from), .. }) = &manifest {
        let message = format!(
            "--append: {output} was derived from another data set, that of the job {:?}, and has no input of its own; append to that one \
             (`stillhouse run JOB.yaml --append`), then derive again (`stillhouse derive DATASET JOB.yaml --overwrite`)",
            from.job.name
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let Some(there) = output.plan().await? else { return Ok(None) };
    let finished = manifest.is_some_and(|manifest| manifest.job_hash == there.job_hash);
    growth_between(&there, hash, finished).map_err(|why| {
        let message = format!("output.path: {output} cannot be appended to: {why}");
        PipelineError::new(ErrorKind::Usage, message)
    })
}

/// A plan without its newest append; `None` if it has no append.
fn without_newest(plan: &PlanRecord) -> Option<PlanRecord> {
    let mut base = plan.clone();
    let newest = base.appended.pop()?;
    let number = base.appended.len();
    base.files.truncate(base.files.len().saturating_sub(newest.files.len()));
    base.splits.retain(|split| split.appended as usize <= number);
    Some(PlanRecord { job_hash: newest.to, ..base })
}

/// How a job has grown since its plan was made.
fn growth_between(there: &PlanRecord, hash: &JobHash, finished: bool) -> Result<Option<Growth>, String> {
    if there.identity != hash.identity || there.job_hash == hash.hash {
        return Ok(None);
    }
    let base = match (finished, without_newest(there)) {
        (true, _) => there.clone(),
        (false, Some(base)) => base,
        (false, None) => {
            let why =
                "it is not finished; `stillhouse repair DATASET JOB.yaml` finishes it with its original input files";
            return Err(why.into());
        }
    };
    let files = files_now(&base, hash)?;
    let old: BTreeSet<&str> = files.iter().map(|f| f.path.as_str()).collect();
    let renamed: BTreeMap<&str, &str> =
        base.files.iter().zip(&files).map(|(was, is)| (was.name.as_str(), is.name.as_str())).collect();
    let mut appended = base.appended.clone();
    for name in appended.iter_mut().flat_map(|a| &mut a.files) {
        *name = renamed.get(name.as_str()).ok_or("its plan is damaged")?.to_string();
    }
    let new: Vec<PlannedFile> = hash.files.iter().filter(|f| !old.contains(f.path.as_str())).cloned().collect();
    let now = hash.of_files(base.job_hash.clone(), files.clone(), appended.clone());
    let grown = (!new.is_empty()).then(|| {
        appended.push(Appended { to: base.job_hash.clone(), files: new.iter().map(|f| f.name.clone()).collect() });
        hash.with_files(files.into_iter().chain(new).collect(), appended)
    });
    Ok(Some(Growth { base, plan_hash: there.job_hash.clone(), now, grown }))
}

/// The present files of a plan: those with the same path, or with the same name below another folder.
fn files_now(base: &PlanRecord, hash: &JobHash) -> Result<Vec<PlannedFile>, String> {
    let by_path: BTreeMap<&str, usize> = hash.files.iter().enumerate().map(|(i, f)| (f.path.as_str(), i)).collect();
    let by_name: BTreeMap<&str, usize> = hash.files.iter().enumerate().map(|(i, f)| (f.name.as_str(), i)).collect();
    let (mut places, mut wrong) = (Vec::new(), Vec::new());
    for was in &base.files {
        let place = by_path.get(was.path.as_str()).or_else(|| by_name.get(was.name.as_str()));
        match place.map(|i| (*i, hash.files[*i].state.bytes)) {
            None => wrong.push(format!("{} is not in this job", was.path)),
            Some((_, bytes)) if bytes != was.state.bytes => {
                wrong.push(format!("{} has {bytes} bytes, it had {}", was.path, was.state.bytes));
            }
            Some((i, _)) => places.push(i),
        }
    }
    if !wrong.is_empty() {
        let more = wrong.len().saturating_sub(MAX_NAMED_FILES);
        let more = if more > 0 { format!(" and {more} more files") } else { String::new() };
        wrong.truncate(MAX_NAMED_FILES);
        return Err(format!(
            "files that it was made of are others now: {}{more}; put them back (new files may only come beside them), or choose another folder, or `--overwrite` to remove it",
            wrong.join(", ")
        ));
    }
    let later: usize = base.appended.iter().map(|a| a.files.len()).sum();
    let first = &places[..places.len().saturating_sub(later)];
    if places.iter().collect::<BTreeSet<_>>().len() < places.len() || !first.is_sorted() {
        return Err(
            "the files that it was made of are in another order in this job; name them in the order that they had"
                .into(),
        );
    }
    Ok(places.into_iter().map(|i| hash.files[i].clone()).collect())
}

/// Plans the new files and writes the plan to the output, which the caller has locked. Returns the job's new hash.
///
/// # Errors
/// If the output cannot be appended to or is damaged, or the new files cannot be read.
pub(crate) async fn grow(
    prepared: &Arc<Prepared>,
    hash: JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<JobHash> {
    let Some(Growth { base, plan_hash, now, grown }) = growth(prepared, &hash, output).await? else { return Ok(hash) };
    if plan_hash != base.job_hash {
        let message = format!("{output}: an append that was not finished is taken back: the input is another one now");
        observer.event(&Event::Warning { message });
        output.replan(&base, &plan_hash).await?;
    }
    let output = &output.clone().for_grown_job(&now);
    // compare what was read of the old files with their present content
    if let Found::Complete = find_work(prepared, &now, output, observer).await? {
        check_finished_output(output, &now, observer).await?;
    }
    let (Some(grown), Some(plan)) = (grown, output.plan().await?) else { return Ok(now) };
    let number = grown.appended.len() as u32;
    let old: BTreeSet<&str> = now.files.iter().map(|f| f.path.as_str()).collect();
    let new: Vec<InputFile> =
        plan::in_order(&grown, &prepared.files).into_iter().filter(|f| !old.contains(f.path.as_str())).collect();
    warn_fixed_holdouts(prepared, observer.as_ref());
    let what = format!("finding the splits of {} new files", new.len());
    observer.event(&Event::Preparing { what });
    let earlier = (plan.splits.clone(), number);
    let splits = blocking(prepared, observer, move |p, _| plan::appended_splits(p, &new, earlier)).await?;
    let record = PlanRecord {
        job_hash: grown.hash.clone(),
        files: grown.files.clone(),
        splits,
        appended: grown.appended.clone(),
        ..plan
    };
    output.replan(&record, &now.hash).await?;
    Ok(grown)
}

/// Checks that a finished data set has all shards in their size, and rewrites missing records.
async fn check_finished_output(output: &Output, hash: &JobHash, observer: &Arc<dyn Observer>) -> Result<()> {
    let manifest = finish::manifest_of(output).await?;
    damage::check_finished(output, &manifest, None, false, observer.as_ref()).await?;
    damage::repair_records(output, hash, Some(&manifest), &mut Repaired::default()).await?;
    Ok(())
}

/// Warns about holdouts that get no appended documents.
fn warn_fixed_holdouts(prepared: &Prepared, observer: &dyn Observer) {
    for (name, _) in prepared.spec.input.holdout.iter().filter(|(_, h)| h.last_documents.is_some()) {
        let message = format!(
            "input.holdout.{name}.last_documents: the documents that were held out at first stay the holdout; it takes none of the new files"
        );
        observer.event(&Event::Warning { message });
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use stillhouse_base::file_state::FileState;

    fn files(names: &[(&str, u64)]) -> Vec<PlannedFile> {
        let file = |(name, bytes): &(&str, u64)| PlannedFile {
            path: format!("in/{name}"),
            name: (*name).into(),
            state: FileState { bytes: *bytes, ..FileState::default() },
        };
        names.iter().map(file).collect()
    }

    fn job(names: &[(&str, u64)]) -> JobHash {
        JobHash::of_identity(json!({"seed": 1}), files(names))
    }

    fn plan(of: &JobHash) -> PlanRecord {
        let record = json!({"job_hash": of.hash, "name": "x", "identity": of.identity, "splits": []});
        let record: PlanRecord = serde_json::from_value(record).unwrap();
        PlanRecord { files: of.files.clone(), appended: of.appended.clone(), ..record }
    }

    fn why(there: &JobHash, now: &JobHash) -> String {
        growth_between(&plan(there), now, true).unwrap_err()
    }

    #[test]
    fn the_hash_depends_on_what_came_when_and_not_on_where_the_listing_has_it() {
        let first = job(&[("b", 1)]);
        let grown = |there: &JobHash, now: &[(&str, u64)]| {
            let growth = growth_between(&plan(there), &job(now), true).unwrap().unwrap();
            assert_eq!(
                (growth.now.hash.as_str(), growth.plan_hash.as_str()),
                (there.hash.as_str(), there.hash.as_str())
            );
            growth.grown.unwrap()
        };
        let one_by_one = grown(&grown(&first, &[("a", 1), ("b", 1)]), &[("a", 1), ("b", 1), ("c", 1)]);
        let at_once = grown(&first, &[("a", 1), ("b", 1), ("c", 1)]);
        let names = |hash: &JobHash| hash.files.iter().map(|f| f.name.clone()).collect::<String>();
        assert_eq!((names(&one_by_one), names(&at_once)), ("bac".into(), "bac".into()));
        let never = job(&[("b", 1), ("a", 1), ("c", 1)]);
        assert_eq!(BTreeSet::from([&one_by_one.hash, &at_once.hash, &never.hash]).len(), 3);
        // a later run sees only the listing
        for listing in [[("a", 1), ("b", 1), ("c", 1)], [("c", 1), ("b", 1), ("a", 1)]] {
            let later = job(&listing).arranged(&one_by_one.appended).unwrap();
            assert_eq!((names(&later), &later.hash), ("bac".into(), &one_by_one.hash));
            assert!(growth_between(&plan(&one_by_one), &later, true).unwrap().is_none());
        }
        assert!(job(&[("b", 1), ("c", 1)]).arranged(&one_by_one.appended).is_none());
        assert!(one_by_one.includes_commit(&first.hash) && !one_by_one.includes_commit(&never.hash));
    }

    #[test]
    fn files_that_are_others_or_elsewhere_are_told() {
        let there = job(&[("a", 1), ("b", 2)]);
        let wrong = why(&there, &job(&[("a", 9), ("c", 2)]));
        assert!(wrong.contains("in/a has 9 bytes, it had 1, in/b is not in this job"), "{wrong}");
        let wrong = why(&there, &job(&[("b", 2), ("a", 1), ("c", 3)]));
        assert!(wrong.contains("another order"), "{wrong}");
        let many: Vec<String> = (0..1000).map(|i| i.to_string()).collect();
        let many: Vec<(&str, u64)> = many.iter().map(|name| (name.as_str(), 1)).collect();
        let wrong = why(&job(&many), &job(&[("c", 2)]));
        assert!(wrong.len() < 400 && wrong.contains("and 995 more files"), "{wrong}");
    }

    #[test]
    fn only_the_newest_append_is_taken_back() {
        let first = job(&[("a", 1)]);
        let second = growth_between(&plan(&first), &job(&[("a", 1), ("b", 1)]), true).unwrap().unwrap().grown.unwrap();
        let back = growth_between(&plan(&second), &first, false).unwrap().unwrap();
        assert_eq!((back.base.job_hash.as_str(), back.base.files.len()), (first.hash.as_str(), 1));
        assert!(back.grown.is_none() && back.base.appended.is_empty());
        // a finished append is data; a first run that never finished has nothing to revert to
        assert!(growth_between(&plan(&second), &first, true).is_err());
        assert!(
            growth_between(&plan(&first), &job(&[("a", 1), ("b", 1)]), false).unwrap_err().contains("is not finished")
        );
    }
}
