//! Running a job on this machine: splits in parallel, each committed on its own, then the manifest.
//!
//! ```text
//!   plan ─► splits not yet committed ─► [parallel_splits at once] ─► stage, commit ─► manifest, card, _SUCCESS
//! ```
//!
//! Nothing that depends on the number of threads, on time or on earlier runs reaches a shard: a split is a function
//! of the job, its piece of the input and the teacher.
//!
//! Memory is that of a split times the splits at work; threads do not depend on them ([`crate::engine`]).

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod awaited;
mod fit;
pub mod memory_budget;
mod remote;
pub(crate) mod splits;
mod stop;
pub mod worker;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::display::DisplayableExecutionPlan;
use stillhouse_operators::operator::OperatorError;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord, TeacherArithmetic};
use stillhouse_schemas::spec::EngineKind;
use stillhouse_teacher::TeacherInfo;

use crate::acceptance;
use crate::append;
use crate::damage::{self, check_finished};
use crate::driver;
use crate::driver::Driver;
use crate::engine::device::DeviceQueue;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::finish;
use crate::holdouts::Holdouts;
use crate::identity::JobHash;
use crate::inputs::find;
use crate::job::{Prepared, blocking, chain};
use crate::job_diff::differences;
use crate::output::{self, CommitRecord, Found, Output, PlanRecord};
use crate::plan;
use crate::query_rows;
use crate::run::awaited::Awaited;
use crate::run::remote::Remote;
pub use crate::run::stop::Stop;
pub(crate) use crate::run::stop::release;
use crate::run::stop::was_stopped;
use crate::sequence_offsets;
use crate::source::{self, Staged};
use crate::storage::blocking as blocking_call;
use crate::teacher::{self, Decided, JobInput, Loaded};

/// How to run.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunOptions {
    /// Remove the output of another job first.
    pub overwrite: bool,
    /// Read every byte of a data set that is finished already, before it is called complete.
    pub check: bool,
    /// Make splits of the files that the input has grown by, beside those of the finished data set that is there.
    pub append: bool,
}

/// What a run did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ran {
    /// The plan with the metrics of its nodes, as DataFusion shows plans; `None` where nothing was left to make.
    pub plan: Option<String>,
    /// Whether others have run the plan: then it has no metrics, which the progress of the run sums up.
    pub is_elsewhere: bool,
}

/// Runs a job to its end; goes on where an earlier run of the same job stopped.
///
/// # Errors
/// When the output belongs to another job, when a split fails, when the output cannot be written. Committed splits stay.
pub async fn run(prepared: Arc<Prepared>, options: RunOptions, observer: Arc<dyn Observer>) -> Result<Ran> {
    run_until(prepared, options, observer, &Stop::default()).await
}

/// The same, until it is told to stop: then what it has sent elsewhere is called back, and the output is free.
///
/// # Errors
/// As [`run`]; [`ErrorKind::Cancelled`] where it was told to stop before its end.
pub async fn run_until(
    prepared: Arc<Prepared>,
    options: RunOptions,
    observer: Arc<dyn Observer>,
    stop: &Stop,
) -> Result<Ran> {
    let began = Instant::now();
    let Held { hash, output, lock, fresh, made_folder } = stop.or(hold(&prepared, options, &observer)).await?;
    let is_elsewhere = prepared.spec.engine.kind == EngineKind::Ballista;
    let work = run_locked(prepared, hash, &output, options, observer, (began, stop));
    let result = stop.or_call_back(is_elsewhere, work).await;
    if result.is_err() && fresh && !was_stopped(&result) {
        output.remove_if_nothing_is_committed(made_folder).await;
    }
    release(lock, &result).await;
    result
}

/// An output that a run holds.
struct Held {
    hash: JobHash,
    output: Output,
    lock: output::Lock,
    /// Whether nothing was there.
    fresh: bool,
    made_folder: bool,
}

async fn hold(prepared: &Arc<Prepared>, options: RunOptions, observer: &Arc<dyn Observer>) -> Result<Held> {
    let hash = blocking(prepared, observer, |p, o| plan::job_hash(p, o)).await?;
    let output = prepared.output()?;
    let hash = append::at_output(hash, &output).await?;
    let grows = options.append && append::growth(prepared, &hash, &output).await?.is_some();
    // before anything is written, so that a job that must not write here leaves no trace
    if !grows
        && let Err(e) = output.look_as(&hash.hash, &|plan| differences(plan, &hash)).await
        && !(options.overwrite && e.kind == ErrorKind::Usage && output.is_of_a_job().await?)
    {
        return Err(e);
    }
    let fresh = output.is_nothing().await?;
    let made_folder = output.folder().is_some() && !output.has_folder().await;
    let output = output.create(observer.as_ref()).await?.for_grown_job(&hash);
    let lock = output.lock(observer.as_ref()).await?;
    Ok(Held { hash, output, lock, fresh, made_folder })
}

async fn run_locked(
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: &Output,
    options: RunOptions,
    observer: Arc<dyn Observer>,
    (began, stop): (Instant, &Stop),
) -> Result<Ran> {
    let hash = if options.append { append::grow(&prepared, hash, output, &observer).await? } else { hash };
    let output = &output.clone().for_grown_job(&hash);
    let mut found = find(&prepared, &hash, output, &observer).await;
    if options.overwrite && matches!(&found, Err(e) if e.kind == ErrorKind::Usage) && output.is_of_a_job().await? {
        output.remove().await?;
        found = output.look(&hash.hash).await;
    }
    let there = match found? {
        Found::Complete => {
            let manifest = finish::manifest_of(output).await?;
            let job_file = prepared.file.as_ref().map(|file| file.display().to_string());
            check_finished(output, &manifest, job_file.as_deref(), options.check, observer.as_ref()).await?;
            output.remove_leftovers().await?;
            output.clean_state().await?;
            acceptance::judge(&prepared.spec, &manifest)?;
            finish::renew_card(&prepared, output, &manifest).await?;
            finish::report(output, &manifest, 0.0, true, observer.as_ref());
            return Ok(Ran::default());
        }
        Found::Nothing => (BTreeMap::new(), Vec::new()),
        Found::Resumable { done, unsettled } => (done, unsettled),
    };
    finish_begun(prepared, hash, output, there, observer, (began, stop)).await
}

/// Makes the splits that are missing, and finishes the data set. `done` are the committed shards, `unsettled` the commits whose shard is not
/// visible; the caller holds the lock and has found both by [`find`].
///
/// # Errors
/// As [`run`].
pub(crate) async fn finish_begun(
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: &Output,
    (mut done, unsettled): (BTreeMap<SplitId, ShardRecord>, Vec<CommitRecord>),
    observer: Arc<dyn Observer>,
    (began, stop): (Instant, &Stop),
) -> Result<Ran> {
    done.extend(output.recover(unsettled).await?);
    let job = Job::start(prepared, hash, output.clone(), done, observer).await?;
    job.stopped_by(stop).run_pending(began).await?.finish(began).await
}

/// A plan, and what its splits read.
pub(crate) struct Planned {
    pub splits: Vec<SplitRecord>,
    files: Vec<source::InputFile>,
    skipped: BTreeMap<String, u64>,
    record: PlanRecord,
}

/// The files that the splits of a job are of: those of the input, or the rows that `input.sql` gives, which are made where they are missing; and the bad
/// records that the query met, by reason.
async fn files_of(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<Staged> {
    if prepared.spec.input.sql.is_none() {
        let nothing = (BTreeMap::new(), Vec::new());
        return Ok(Staged { files: prepared.files.clone(), rows: 0, skipped: nothing.0, sha256: nothing.1 });
    }
    query_rows::of_query(prepared, hash, output, observer).await
}

/// The plan of a job, made or gone on with, and noted at the output.
pub(crate) async fn planned(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    observer: &Arc<dyn Observer>,
) -> Result<Planned> {
    let earlier = output.plan().await?;
    let staged = files_of(prepared, hash, output, observer).await?;
    if let Some(earlier) = &earlier {
        query_rows::check(&staged, earlier, output)?;
    }
    let Staged { files, skipped, sha256, .. } = staged;
    let splits = match &earlier {
        Some(plan) => plan.splits_of(&hash.files),
        None => {
            let in_order = || plan::in_order(hash, &files);
            let (of, files) =
                (hash.clone(), if prepared.spec.input.sql.is_some() { files.clone() } else { in_order() });
            blocking(prepared, observer, move |p, o| plan::all_splits(p, &of, &files, o)).await?
        }
    };
    if splits.is_empty() {
        let read =
            if prepared.spec.input.sql.is_some() { "input.sql gave no rows" } else { "the input holds no records" };
        return Err(PipelineError::new(ErrorKind::Input, format!("{read}: there is nothing to prepare")));
    }
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
    };
    output.begin(&record).await?;
    Ok(Planned { splits, files, skipped, record })
}

/// A job at work.
pub(crate) struct Job {
    prepared: Arc<Prepared>,
    hash: JobHash,
    output: Output,
    splits: Vec<SplitRecord>,
    /// The files that the splits read.
    files: Arc<Vec<source::InputFile>>,
    /// Bad records that `input.sql` met; they are counted with the first split.
    skipped: BTreeMap<String, u64>,
    done: BTreeMap<SplitId, ShardRecord>,
    /// What the shards must be that are made again.
    remade: BTreeMap<SplitId, ShardRecord>,
    /// Shards that this run has made.
    made: Mutex<BTreeSet<SplitId>>,
    /// The plans of this run, whose metrics are its progress: one, or two where shards are made again first.
    plans: Mutex<Vec<Arc<dyn ExecutionPlan>>>,
    committed: AtomicU64,
    teacher: Option<TeacherInfo>,
    arithmetic: Option<TeacherArithmetic>,
    devices: Vec<DeviceQueue>,
    holdouts: Holdouts,
    /// Bytes of the shards that this run has committed.
    bytes: AtomicU64,
    /// Set when a split has failed: the others end at their next batch.
    stop: Arc<AtomicBool>,
    observer: Arc<dyn Observer>,
    /// Who makes the splits, where that is not this process.
    driver: Option<Arc<dyn Driver>>,
    /// What is known of the work of others for this run.
    elsewhere: Mutex<Remote>,
    /// Whom the devices of this process have waited for.
    awaited: Mutex<Awaited>,
}

impl Job {
    /// The job with other devices.
    #[cfg(test)]
    pub(crate) fn with_devices(self, devices: Vec<DeviceQueue>) -> Self {
        let teacher = devices.first().map(|device| device.info().clone());
        Self { devices, teacher, arithmetic: None, ..self }
    }

    /// Plans, loads the teacher, and tells that it begins.
    pub(crate) async fn start(
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        done: BTreeMap<SplitId, ShardRecord>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let driver = driver::remote(&prepared.spec.engine)?;
        Self::start_with(driver, prepared, hash, output, done, observer).await
    }

    /// The same with a driver; this process makes the splits without one.
    async fn start_with(
        driver: Option<Arc<dyn Driver>>,
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        done: BTreeMap<SplitId, ShardRecord>,
        observer: Arc<dyn Observer>,
    ) -> Result<Self> {
        let Planned { splits, files, skipped, record } = planned(&prepared, &hash, &output, &observer).await?;
        let pending = splits.iter().any(|s| !done.contains_key(&s.split));
        let files = Arc::new(files);
        let Loaded { teachers, arithmetic } = if prepared.teacher.is_some() {
            let (splits, files) = (splits.clone(), Arc::clone(&files));
            // what no split was made in binds nobody
            let earlier = record.teacher.clone().filter(|_| !done.is_empty());
            let load = move |p: &Prepared, o: &dyn Observer| {
                let decided = earlier.as_ref().map(Decided::ByShards);
                teacher::load_all(p, JobInput { splits: &splits, files: &files }, decided, pending, o)
            };
            blocking(&prepared, &observer, load).await?
        } else {
            Loaded::default()
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
        // others load it themselves; here it has told what it computes in
        let own = teachers.into_iter().filter(|_| driver.is_none());
        let devices: Result<Vec<_>, _> = own.map(DeviceQueue::start).collect();
        let failed = |e: OperatorError| PipelineError::new(ErrorKind::Model, format!("teacher: {}", chain(&e)));
        let devices = devices.map_err(failed)?;
        Ok(Self {
            holdouts: Holdouts::new(&splits, done.values()),
            bytes: AtomicU64::new(0),
            prepared,
            hash,
            output,
            splits,
            files,
            skipped,
            committed: AtomicU64::new(done.len() as u64),
            done,
            remade: BTreeMap::new(),
            made: Mutex::default(),
            plans: Mutex::default(),
            teacher: info,
            arithmetic,
            devices,
            stop: Arc::default(),
            observer,
            driver,
            elsewhere: Mutex::default(),
            awaited: Mutex::default(),
        })
    }

    /// The job, which ends when it is told to stop.
    pub(crate) fn stopped_by(self, stop: &Stop) -> Self {
        Self { stop: stop.flag(), ..self }
    }

    #[cfg(test)]
    pub(crate) fn all_splits(&self) -> Vec<SplitRecord> {
        self.splits.clone()
    }

    /// Makes what is not committed yet.
    pub(crate) async fn run_pending(self, began: Instant) -> Result<Self> {
        self.run_splits(pending_splits(&self.splits, &self.done), began).await?;
        Ok(self)
    }

    /// Makes shards again that must be what they were.
    pub(crate) async fn remake(mut self, shards: BTreeMap<SplitId, ShardRecord>, began: Instant) -> Result<Self> {
        let splits: Vec<_> = self.splits.iter().filter(|s| shards.contains_key(&s.split)).cloned().collect();
        if splits.len() < shards.len() {
            let message = format!("{}: the plan does not have all of the splits that are committed", self.output);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        }
        self.remade = shards;
        self.run_splits(splits, began).await?;
        self.done.append(&mut self.remade);
        Ok(self)
    }

    /// The manifest and what stands beside it, once every shard is there and whole.
    pub(crate) async fn finish(mut self, began: Instant) -> Result<Ran> {
        let own = self.output.records().await?.into_iter().filter(|r| self.hash.counts(&r.job_hash));
        let mut records: BTreeMap<SplitId, ShardRecord> = own.map(|r| (r.shard.split, r.shard)).collect();
        self.output.still_ours().await?;
        let mut shards = Vec::new();
        for split in &self.splits {
            shards.push(records.remove(&split.split).ok_or_else(|| {
                let gone = format!("{}: the record of split {} is gone", self.output, split.split.0);
                PipelineError::new(ErrorKind::Output, gone)
            })?);
        }
        self = self.mend(&shards, began).await?;
        self.hash.teacher_is_still()?;
        let ran = self.ran();
        let manifest = finish::manifest(
            &self.prepared,
            &self.hash,
            self.teacher.as_ref(),
            self.arithmetic.as_ref(),
            self.splits,
            shards,
        )?;
        if let Err(wrong) = acceptance::judge(&self.prepared.spec, &manifest) {
            if manifest.shards.iter().all(|shard| shard.rows == 0) {
                // nothing of it is worth keeping, and a job that is put right is another one
                self.output.remove().await?;
            }
            return Err(wrong);
        }
        if let Some(message) = sequence_offsets::told(&manifest) {
            self.observer.event(&Event::Warning { message });
        }
        finish::write(&self.prepared, &self.output, &manifest).await?;
        if self.output.folder().is_none() && self.prepared.spec.input.sql.is_some() {
            // beside an output on a disk they go with the rest of the state
            query_rows::remove_staged(&self.output.sql_folder(&self.hash.hash)?).await;
        }
        finish::report(&self.output, &manifest, began.elapsed().as_secs_f64(), false, self.observer.as_ref());
        Ok(ran)
    }

    /// What the plans of this run did so far.
    fn ran(&self) -> Ran {
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        // what others have run has no metrics here
        let shown = |plan: &Arc<dyn ExecutionPlan>| match &self.driver {
            None => DisplayableExecutionPlan::with_metrics(plan.as_ref()).indent(false).to_string(),
            Some(_) => DisplayableExecutionPlan::new(plan.as_ref()).indent(false).to_string(),
        };
        let all: Vec<String> = plans.iter().filter(|plan| partitions(plan) > 0).map(shown).collect();
        Ran { plan: (!all.is_empty()).then(|| all.join("\n")), is_elsewhere: self.driver.is_some() }
    }

    /// Reads the shards of earlier runs, and makes those again that were damaged since. Those of a data set that was finished before files
    /// were appended were read then.
    ///
    /// Cost: every byte of them is read once.
    async fn mend(self, shards: &[ShardRecord], began: Instant) -> Result<Self> {
        let earlier: Vec<&ShardRecord> = {
            let made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
            let last = self.hash.appended.len();
            let finished: BTreeSet<SplitId> =
                self.splits.iter().filter(|s| (s.appended as usize) < last).map(|s| s.split).collect();
            shards.iter().filter(|s| !made.contains(&s.split) && !finished.contains(&s.split)).collect()
        };
        let damaged = damage::damaged_shards(&self.output, earlier, true, self.observer.as_ref()).await?;
        if damaged.is_empty() {
            return Ok(self);
        }
        for damage in &damaged {
            let message = format!("{}: {}; it is made again", self.output.shown(&damage.name), damage.message);
            self.observer.event(&Event::Warning { message });
        }
        let is_damaged = |shard: &&ShardRecord| damaged.iter().any(|d| d.split == Some(shard.split));
        let shards = shards.iter().filter(is_damaged).map(|shard| (shard.split, shard.clone())).collect();
        self.remake(shards, began).await
    }
}

/// Runs the first split of a job in this process into a temporary folder, which is gone afterwards.
///
/// Cost: the teacher is loaded, `input.sql` runs whole, and one split is made.
///
/// # Errors
/// As [`run`].
pub async fn analyze(prepared: Arc<Prepared>, observer: Arc<dyn Observer>) -> Result<Ran> {
    let began = Instant::now();
    let hash = blocking(&prepared, &observer, |p, o| plan::job_hash(p, o)).await?;
    let folder =
        blocking_call(|| tempfile::tempdir().map_err(PipelineError::output("no temporary folder for the first split")));
    let folder = folder.await?;
    let output = Output::on_disk(folder.path())?.create(observer.as_ref()).await?.for_job(&hash.hash);
    // a folder of this machine is nobody else's, whatever the engine of the job
    let job = Job::start_with(None, prepared, hash, output, BTreeMap::new(), observer).await?;
    let first = job.splits.first().cloned();
    job.run_splits(first.into_iter().collect(), began).await?;
    blocking_call(move || folder.close().map_err(PipelineError::output("the temporary folder of the first split")))
        .await?;
    Ok(job.ran())
}

fn partitions(plan: &Arc<dyn ExecutionPlan>) -> usize {
    plan.properties().output_partitioning().partition_count()
}

fn pending_splits(splits: &[SplitRecord], done: &BTreeMap<SplitId, ShardRecord>) -> Vec<SplitRecord> {
    splits.iter().filter(|s| !done.contains_key(&s.split)).cloned().collect()
}
