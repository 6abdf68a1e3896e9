//! Runs a job: builds the splits in parallel, commits each on its own, then writes the manifest.
//!
//! ```text
//!   plan ─► splits without a commit ─► [parallel_splits at once] ─► stage, commit ─► manifest, card, _SUCCESS
//! ```
//!
//! No shard depends on the number of threads, on time or on earlier runs. A split is a function of the job, its piece
//! of the input and the teacher.
//!
//! Memory is that of one split times the concurrent splits. The number of threads does not depend on it
//! ([`crate::engine`]).

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod duplicates;
mod fit;
pub(crate) mod locked_output;
pub mod memory_budget;
pub(crate) mod splits;
mod stop;
#[cfg(test)]
mod tests;
pub mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::display::DisplayableExecutionPlan;
use stillhouse_datasets::damage::{self, check_finished};
use stillhouse_operators::operator::{DuplicateList, OperatorError};
use stillhouse_query::StagedRows;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord, Statistics, TeacherArithmetic};
use stillhouse_teacher::TeacherInfo;

use crate::acceptance;
use crate::append;
use crate::driver;
use crate::driver::Driver;
use crate::engine::device::DeviceQueue;
use crate::engine::runner::SplitRunner;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::finish;
use crate::identity::JobHash;
use crate::inputs::find_work;
use crate::job::{Prepared, blocking, chain};
use crate::job_diff::differences;
use crate::output::{self, CommitRecord, Found, Output, PlanRecord};
use crate::plan;
use crate::run::duplicates::Documents;
use crate::run::locked_output::{LockedOutput, may_overwrite, remove_overwritten};
pub use crate::run::stop::Stop;
pub(crate) use crate::run::stop::release;
use crate::sequence_offsets;
use crate::staged_rows;
use crate::storage::blocking as blocking_call;
use crate::teacher::{self, DecidedArithmetic, JobInput, LoadedTeachers};

/// Options of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions {
    /// Remove the output of another job first.
    pub overwrite: bool,
    /// Read every byte of an already finished data set before reporting it as complete.
    pub check: bool,
    /// Build splits of the input's new files and add them to the existing finished data set.
    pub append: bool,
}

/// Result of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunResult {
    /// The physical plan with the metrics of its nodes, as DataFusion prints it; `None` if there was nothing to build.
    pub plan: Option<String>,
    /// Whether executors ran the plan. It then has no metrics; the progress of the run sums them up.
    pub is_remote: bool,
}

/// Runs a job to its end. Resumes where an earlier run of the same job stopped.
///
/// # Errors
/// If the output belongs to another job, a split fails, or the output cannot be written. Committed splits stay.
pub async fn run(prepared: Arc<Prepared>, options: RunOptions, observer: Arc<dyn Observer>) -> Result<RunResult> {
    run_until(prepared, options, observer, &Stop::default()).await
}

/// Like [`run`], but stops on request. Then it cancels remote work and releases the output.
///
/// # Errors
/// See [`run`]; [`ErrorKind::Cancelled`] if `stop` ended it.
pub async fn run_until(
    prepared: Arc<Prepared>,
    options: RunOptions,
    observer: Arc<dyn Observer>,
    stop: &Stop,
) -> Result<RunResult> {
    let began = Instant::now();
    let (hash, locked) = stop.or(lock_output(&prepared, options, &observer)).await?;
    let work = run_locked(prepared, hash, &locked.output, options, observer, (began, stop));
    let result = stop.or_end(work).await;
    locked.release(&result).await;
    result
}

/// Checks that the job may write to its output, and locks it.
async fn lock_output(
    prepared: &Arc<Prepared>,
    options: RunOptions,
    observer: &Arc<dyn Observer>,
) -> Result<(JobHash, LockedOutput)> {
    let hash = blocking(prepared, observer, |p, o| plan::job_hash(p, o)).await?;
    let output = prepared.output()?;
    let hash = append::hash_at_output(hash, &output).await?;
    let grows = options.append && append::growth(prepared, &hash, &output).await?.is_some();
    // check before writing anything, so that a job that must not write leaves no trace
    if !grows
        && let Err(e) = output.inspect_with(&hash.hash, &|plan| differences(plan, &hash)).await
        && !may_overwrite(&output, options.overwrite, &e).await?
    {
        return Err(e);
    }
    let locked = LockedOutput::lock(output, |output| output.for_grown_job(&hash), observer.as_ref()).await?;
    Ok((hash, locked))
}

async fn run_locked(
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: &Output,
    options: RunOptions,
    observer: Arc<dyn Observer>,
    (began, stop): (Instant, &Stop),
) -> Result<RunResult> {
    let hash = if options.append { append::grow(&prepared, hash, output, &observer).await? } else { hash };
    let output = &output.clone().for_grown_job(&hash);
    let found = find_work(&prepared, &hash, output, &observer).await;
    let there = match remove_overwritten(output, &hash.hash, options.overwrite, found).await? {
        Found::Complete => {
            let manifest = finish::manifest_of(output).await?;
            let job_file = prepared.file.as_ref().map(|file| file.display().to_string());
            check_finished(output, &manifest, job_file.as_deref(), options.check, observer.as_ref()).await?;
            output.remove_leftovers().await?;
            output.clean_state().await?;
            acceptance::check_dataset(&prepared.spec, &manifest)?;
            finish::update_card(&prepared, output, &manifest).await?;
            finish::report_finished(output, &manifest, 0.0, true, observer.as_ref());
            return Ok(RunResult::default());
        }
        Found::Nothing => (BTreeMap::new(), Vec::new()),
        Found::Resumable { done, incomplete_uploads } => (done, incomplete_uploads),
    };
    finish_started(prepared, hash, output, there, observer, (began, stop)).await
}

/// Builds the missing splits and finishes the data set. `done` holds the committed shards, `incomplete_uploads` the
/// commits whose shard is not visible. The caller holds the lock and got both from [`find_work`].
///
/// # Errors
/// See [`run`].
pub(crate) async fn finish_started(
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: &Output,
    (mut done, incomplete_uploads): (BTreeMap<SplitId, ShardRecord>, Vec<CommitRecord>),
    observer: Arc<dyn Observer>,
    (began, stop): (Instant, &Stop),
) -> Result<RunResult> {
    done.extend(output.recover(incomplete_uploads).await?);
    let job = Job::start(prepared, hash, output.clone(), done, observer).await?;
    job.stopped_by(stop).run_pending(began).await?.finish(began).await
}

/// A plan, and the files that its splits read.
pub(crate) struct Planned {
    pub splits: Vec<SplitRecord>,
    files: Vec<stillhouse_input_files::InputFile>,
    /// See [`Job::skipped`].
    skipped: Statistics,
    duplicates: Option<Arc<dyn DuplicateList>>,
    record: PlanRecord,
}

/// The files that the splits of a job read, with the bad records that were met in staging them, by reason. For a query and a
/// mixture these are its rows, which this creates if they are missing.
async fn files_of(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<StagedRows> {
    if !prepared.spec.input.is_staged() {
        let (skipped, tables, sha256) = (BTreeMap::new(), Vec::new(), Vec::new());
        return Ok(StagedRows { files: prepared.files.clone(), rows: 0, skipped, tables, sha256 });
    }
    staged_rows::rows_of_job(prepared, hash, output, observer).await
}

/// Creates or resumes the plan of a job and writes it to the output.
pub(crate) async fn create_plan(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<Planned> {
    let earlier = output.plan().await?;
    let staged = files_of(prepared, hash, output, observer).await?;
    if let Some(earlier) = &earlier {
        staged_rows::check(&staged, earlier, output)?;
    }
    let skipped = staged.skipped_records();
    let StagedRows { files, sha256, .. } = staged;
    let splits = match &earlier {
        Some(plan) => plan.splits_of(&hash.files),
        None => {
            let in_order = || plan::in_order(hash, &files);
            let (of, files) = (hash.clone(), if prepared.spec.input.is_staged() { files.clone() } else { in_order() });
            blocking(prepared, observer, move |p, o| plan::all_splits(p, &of, &files, o)).await?
        }
    };
    if splits.is_empty() {
        let staged = prepared.spec.input.staged_by().map(|what| format!("{what} gave no rows"));
        let read = staged.unwrap_or_else(|| "the input holds no records".into());
        return Err(PipelineError::new(ErrorKind::Input, format!("{read}: there is nothing to prepare")));
    }
    let known = earlier.as_ref().and_then(|plan| plan.duplicates.as_ref());
    let documents = Documents { splits: &splits, files: &files, staged: &sha256 };
    let duplicates = duplicates::find_or_load(prepared, hash, output, documents, known, observer).await?;
    let (duplicates_record, duplicates) = duplicates.unzip();
    let job_folder = match output.folder() {
        Some(folder) => output::relative(folder.to_owned(), prepared.base.clone()).await,
        None => None,
    };
    let record = PlanRecord {
        job_hash: hash.hash.clone(),
        name: prepared.spec.name.clone(),
        job_folder: job_folder.unwrap_or_default().to_string_lossy().into_owned(),
        job_file: prepared.file.as_deref().map(plan::file_name).unwrap_or_default(),
        identity: hash.identity.clone(),
        files: hash.files.clone(),
        splits: splits.clone(),
        appended: hash.appended.clone(),
        teacher: earlier.and_then(|plan| plan.teacher),
        staged: sha256,
        duplicates: duplicates_record,
    };
    output.begin(&record).await?;
    Ok(Planned { splits, files, skipped, duplicates, record })
}

/// A running job.
pub(crate) struct Job {
    prepared: Arc<Prepared>,
    hash: JobHash,
    /// The files that the splits read.
    files: Arc<Vec<stillhouse_input_files::InputFile>>,
    /// Bad records that were met in staging. They are counted with the first split.
    skipped: Statistics,
    /// The list of a job with `deduplicate`.
    duplicates: Option<Arc<dyn DuplicateList>>,
    teacher: Option<TeacherInfo>,
    arithmetic: Option<TeacherArithmetic>,
    /// Driver that has other processes build the splits; `None` if this process builds them.
    driver: Option<Arc<dyn Driver>>,
    runner: SplitRunner,
}

impl Job {
    /// Replaces the devices.
    #[cfg(test)]
    pub(crate) fn with_devices(mut self, devices: Vec<DeviceQueue>) -> Self {
        let teacher = devices.first().map(|device| device.info().clone());
        self.runner.devices = devices;
        Self { teacher, arithmetic: None, ..self }
    }

    /// Plans, loads the teacher, and emits the start event.
    pub(crate) async fn start(
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        done: BTreeMap<SplitId, ShardRecord>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let driver = driver::open_driver(&prepared.spec.engine)?;
        Self::start_with(driver, prepared, hash, output, done, observer).await
    }

    /// Like [`Self::start`] with a given driver. Without one, this process builds the splits.
    async fn start_with(
        driver: Option<Arc<dyn Driver>>,
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        done: BTreeMap<SplitId, ShardRecord>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let Planned { splits, files, skipped, duplicates, record } =
            create_plan(&prepared, &hash, &output, &observer).await?;
        let pending = splits.iter().any(|s| !done.contains_key(&s.split));
        let files = Arc::new(files);
        let LoadedTeachers { teachers, arithmetic } = if prepared.teacher.is_some() {
            let (splits, files) = (splits.clone(), Arc::clone(&files));
            // a dtype chosen before the first committed split can still change
            let earlier = record.teacher.clone().filter(|_| !done.is_empty());
            let load = move |p: &Prepared, o: &dyn Observer| {
                let decided = earlier.as_ref().map(DecidedArithmetic::ByShards);
                teacher::load_all(p, JobInput { splits: &splits, files: &files }, decided, pending, o)
            };
            blocking(&prepared, &observer, load).await?
        } else {
            LoadedTeachers::default()
        };
        if arithmetic != record.teacher && pending {
            output.begin(&PlanRecord { teacher: arithmetic.clone(), ..record }).await?;
        }
        hash.teacher_is_still()?;
        observer.event(&Event::JobStarted {
            name: prepared.spec.name.clone(),
            output: output.to_string(),
            splits: splits.len() as u64,
            splits_done: done.len() as u64,
            bytes_done: done.values().map(|shard| shard.bytes).sum(),
            input_bytes: plan::text_bytes(&pending_splits(&splits, &done)),
            teacher: teachers.first().map(|t| {
                let info = t.info();
                format!(
                    "{}, {:.1}M parameters, {} on {}{}",
                    info.architecture.name(),
                    info.parameters as f64 / 1e6,
                    info.arithmetic,
                    teachers.iter().map(|t| t.info().device.as_str()).collect::<Vec<_>>().join(", "),
                    arithmetic.as_ref().and_then(|a| a.cost).map(|cost| format!("; {cost}")).unwrap_or_default()
                )
            }),
            job_hash: hash.hash.clone(),
        });
        let info = teachers.first().map(|teacher| teacher.info().clone());
        // executors load the teacher themselves; this process only needed its arithmetic
        let own = teachers.into_iter().filter(|_| driver.is_none());
        let failed = |e: OperatorError| PipelineError::new(ErrorKind::Model, format!("teacher: {}", chain(&e)));
        let devices: Result<Vec<_>> = own.map(|teacher| DeviceQueue::start(teacher).map_err(failed)).collect();
        let storages = Arc::clone(&prepared.storages);
        let mut runner = SplitRunner::new(output, storages, splits, done, observer);
        runner.devices = devices?;
        if driver.is_some() {
            runner = runner.with_executors();
        }
        Ok(Self { prepared, hash, files, skipped, duplicates, teacher: info, arithmetic, driver, runner })
    }

    /// Makes the job end when `stop` is requested.
    pub(crate) fn stopped_by(mut self, stop: &Stop) -> Self {
        self.runner.stop = stop.flag();
        self
    }

    #[cfg(test)]
    pub(crate) fn all_splits(&self) -> Vec<SplitRecord> {
        self.runner.splits.clone()
    }

    /// Builds the splits that are not committed.
    pub(crate) async fn run_pending(self, began: Instant) -> Result<Self> {
        self.run_splits(self.runner.pending(), began).await?;
        Ok(self)
    }

    /// Rebuilds shards, which must get the same bytes.
    pub(crate) async fn rebuild(mut self, shards: BTreeMap<SplitId, ShardRecord>, began: Instant) -> Result<Self> {
        let runner = &self.runner;
        let splits: Vec<_> = runner.splits.iter().filter(|s| shards.contains_key(&s.split)).cloned().collect();
        if splits.len() < shards.len() {
            let message = format!("{}: the plan does not have all of the splits that are committed", runner.output);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        self.runner.remade = shards;
        self.run_splits(splits, began).await?;
        self.runner.done.append(&mut self.runner.remade);
        Ok(self)
    }

    /// Writes the manifest and the files beside it, after checking that every shard exists and is intact.
    pub(crate) async fn finish(mut self, began: Instant) -> Result<RunResult> {
        let SplitRunner { output, splits, .. } = &self.runner;
        let own = output.records().await?.into_iter().filter(|r| self.hash.includes_commit(&r.job_hash));
        let records: BTreeMap<SplitId, ShardRecord> = own.map(|r| (r.shard.split, r.shard)).collect();
        output.check_ownership().await?;
        let shards = finish::in_order(splits.iter().map(|split| split.split), records, output)?;
        self = self.rebuild_damaged(&shards, began).await?;
        self.hash.teacher_is_still()?;
        let ran = self.result();
        let manifest = finish::manifest(
            &self.prepared,
            &self.hash,
            self.teacher.as_ref(),
            self.arithmetic.as_ref(),
            self.runner.splits,
            shards,
        )?;
        let (output, observer) = (self.runner.output, self.runner.observer);
        if let Err(wrong) = acceptance::check_dataset(&self.prepared.spec, &manifest) {
            if manifest.shards.iter().all(|shard| shard.rows == 0) {
                // an empty data set is useless, and a corrected job has another hash
                output.remove().await?;
            }
            return Err(wrong);
        }
        if let Some(message) = sequence_offsets::schedule_warning(&manifest) {
            observer.event(&Event::Warning { message });
        }
        finish::write(&output, plan::tokenizer_json(&self.prepared)?, &self.prepared.operators, &manifest).await?;
        if output.folder().is_none() && self.prepared.spec.input.is_staged() {
            // for an output on a disk, `write` has removed them with the rest of the state
            staged_rows::remove_staged(&output.sql_folder(&self.hash.hash)?).await;
        }
        finish::report_finished(&output, &manifest, began.elapsed().as_secs_f64(), false, observer.as_ref());
        Ok(ran)
    }

    /// The plans that this run has executed so far.
    fn result(&self) -> RunResult {
        let plans = self.runner.plans();
        // plans that executors run have no metrics in this process
        let shown = |plan: &Arc<dyn ExecutionPlan>| match &self.driver {
            None => DisplayableExecutionPlan::with_metrics(plan.as_ref()).indent(false).to_string(),
            Some(_) => DisplayableExecutionPlan::new(plan.as_ref()).indent(false).to_string(),
        };
        let all: Vec<String> = plans.iter().filter(|plan| partitions(plan) > 0).map(shown).collect();
        RunResult { plan: (!all.is_empty()).then(|| all.join("\n")), is_remote: self.driver.is_some() }
    }

    /// Reads the shards of earlier runs and rebuilds those that were damaged since. Skips shards from before an append,
    /// which were read when the append began.
    ///
    /// Cost: reads every byte of these shards once.
    async fn rebuild_damaged(self, shards: &[ShardRecord], began: Instant) -> Result<Self> {
        let SplitRunner { output, splits, observer, .. } = &self.runner;
        let last = self.hash.appended.len();
        let finished: BTreeSet<SplitId> =
            splits.iter().filter(|s| (s.appended as usize) < last).map(|s| s.split).collect();
        let earlier = shards.iter().filter(|s| !self.runner.has_committed(s.split) && !finished.contains(&s.split));
        let damaged = damage::damaged_shards(output, earlier, true, observer.as_ref()).await?;
        if damaged.is_empty() {
            return Ok(self);
        }
        for damage in &damaged {
            let message = format!("{}: {}; it is made again", output.shown(&damage.name), damage.message);
            observer.event(&Event::Warning { message });
        }
        let is_damaged = |shard: &&ShardRecord| damaged.iter().any(|d| d.split == Some(shard.split));
        let shards = shards.iter().filter(is_damaged).map(|shard| (shard.split, shard.clone())).collect();
        self.rebuild(shards, began).await
    }
}

/// Runs the first split of a job in this process into a temporary folder, then deletes the folder.
///
/// Cost: loads the teacher, stages all rows of `input.sql` or of a mixture, and builds one split.
///
/// # Errors
/// See [`run`].
pub async fn analyze(prepared: Arc<Prepared>, observer: Arc<dyn Observer>) -> Result<RunResult> {
    let began = Instant::now();
    let hash = blocking(&prepared, &observer, |p, o| plan::job_hash(p, o)).await?;
    let folder =
        blocking_call(|| tempfile::tempdir().map_err(PipelineError::output("no temporary folder for the first split")));
    let folder = folder.await?;
    let output = Output::on_disk(folder.path())?.create(observer.as_ref()).await?.for_job(&hash.hash);
    // this process runs it whatever the job's engine: only this machine sees the folder
    let job = Job::start_with(None, prepared, hash, output, BTreeMap::new(), observer).await?;
    let first = job.runner.splits.first().cloned();
    job.run_splits(first.into_iter().collect(), began).await?;
    blocking_call(move || folder.close().map_err(PipelineError::output("the temporary folder of the first split")))
        .await?;
    Ok(job.result())
}

fn partitions(plan: &Arc<dyn ExecutionPlan>) -> usize {
    plan.properties().output_partitioning().partition_count()
}

fn pending_splits(splits: &[SplitRecord], done: &BTreeMap<SplitId, ShardRecord>) -> Vec<SplitRecord> {
    splits.iter().filter(|s| !done.contains_key(&s.split)).cloned().collect()
}
