//! A worker: a process that builds splits for another process's run. It makes the same plan from the same job and
//! executes one split at a time.
//!
//! ```text
//!   TaskSpec ─► device present, and of the run's kind? ─► prepare (with this machine's own rules) ─► hash = the ticket's?
//!            ─► plan.json of the output ─► teacher ─► session
//!   SplitTask ─► already committed? ─ yes ─► return its record
//!                                   └ no ──► execute its partition, commit for the run ─► return its record
//! ```
//!
//! A [`TaskSpec`] names a job, not instructions: what is read, computed and written follows from the job, which the
//! worker checks like any other. A worker refuses if it sees another input, tokenizer or weights, or computes in
//! another arithmetic. The error names the difference.
//!
//! Every 2 s a worker checks whether its run still holds the output. If not, or if the run stopped renewing its lease,
//! the worker's splits end at their next batch. This detects cancelled and dead runs for one small request. The worker
//! also writes its splits and counts to `_stillhouse/workers`: with each check if its splits changed, else every 10 s.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use stillhouse_operators::operator::DuplicateList;
use stillhouse_operators::registry::job_format;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord, Statistics};
use stillhouse_schemas::spec::EngineKind;
use tokio::sync::Semaphore;

use super::fit::{MAX_LINES, check_same_input, device_mismatch};
use super::memory_budget::{MemoryBudget, MemoryNeeds, Reservation};
use super::splits::splits_with_memory;
use super::{Job, JobHash, duplicates, files_of};
use crate::access::Access;
use crate::append;
use crate::driver::{SplitTask, TaskSpec};
use crate::engine::device::DeviceQueue;
use crate::engine::pool::Pool;
use crate::engine::runner::SplitRunner;
use crate::engine::session::Session;
use crate::error::{ErrorKind, PipelineError, Result, SerializedError};
use crate::events::{Event, Observer};
use crate::job::blocking;
use crate::job::{self, Prepared, chain, prepare};
use crate::job_diff::differences;
use crate::output::{LeaseMonitor, Output, SplitReport, Warning, WorkerReport};
use crate::plan;
use crate::staged_rows;
use crate::teacher::{self, DecidedArithmetic, JobInput, LoadedTeachers};

/// Interval between two checks that the run still holds the output.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Interval between two reports if the splits do not change.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of warnings in a report, and maximum bytes of one.
const MAX_WARNINGS: usize = 20;
const MAX_WARNING_BYTES: usize = 1_000;

/// A job on which this process works.
pub struct Worker {
    state: Arc<WorkerState>,
    partitions: HashMap<SplitId, usize>,
    /// One lock per split, so that repeated requests for a split build it once at a time.
    split_locks: Mutex<HashMap<SplitId, Arc<tokio::sync::Mutex<()>>>>,
    /// Limits concurrent splits to the job's memory, whatever the slots of this process.
    split_permits: Semaphore,
    watch_task: tokio::task::JoinHandle<()>,
    pool: Pool,
}

/// State that a worker shares with its background task.
struct WorkerState {
    name: String,
    job: Job,
    session: Session,
    in_progress: Mutex<BTreeSet<SplitId>>,
    /// Why the worker stopped building splits for the run; empty while it works.
    end_reason: OnceLock<SerializedError>,
    began: Instant,
    warnings: Arc<Warnings>,
    /// Name of the worker's report. The lock serializes writes, so that an older report never replaces a newer one.
    report: tokio::sync::Mutex<String>,
    report_count: AtomicU64,
    /// Memory of the job, held while the teacher is loaded.
    _reservation: Reservation,
}

impl WorkerState {
    fn splits(&self) -> BTreeSet<SplitId> {
        self.in_progress.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The report: current splits and counts.
    fn build_report(&self, splits: &BTreeSet<SplitId>) -> WorkerReport {
        let states: HashMap<SplitId, _> =
            self.session.resources.splits_in_progress.all().into_iter().map(|state| (state.split, state)).collect();
        let at = |split: &SplitId| {
            let state = states.get(split);
            let reads = state.map(|state| state.input_file.clone()).unwrap_or_default();
            let stages = state.map(|state| state.statuses()).unwrap_or_default();
            let counts = state.map(|state| state.counts()).unwrap_or_default();
            SplitReport { split: *split, reads, stages, counts }
        };
        WorkerReport {
            splits: splits.iter().map(at).collect(),
            cannot: self.lost_devices_error().map(|e| e.to_string()),
            told: self.report_count.fetch_add(1, Ordering::Relaxed),
            progress: self.job.runner.progress(self.began),
            warnings: self.warnings.last(),
            ..WorkerReport::new(&self.name, &self.job.runner.output)
        }
    }

    /// Why this worker can build nothing more, though others may: its devices are lost.
    fn lost_devices_error(&self) -> Option<PipelineError> {
        let resources = &self.session.resources;
        let are_gone = !resources.devices.is_empty() && resources.lost_devices() == resources.devices.len();
        let message =
            "teacher: every device of this executor is lost; valid: this executor, started anew once they are there";
        are_gone.then(|| PipelineError::new(ErrorKind::Model, message).machine_specific())
    }

    /// Reports the splits in progress, if there are any, and returns them. Holds the lock from reading them until the
    /// report is written: see [`Worker::build_split`].
    async fn report(&self) -> BTreeSet<SplitId> {
        let name = self.report.lock().await;
        let splits = self.splits();
        // a report without splits could arrive after the run has deleted all reports
        if !splits.is_empty() {
            let at = self.build_report(&splits);
            match self.job.runner.output.report(&name, &at).await {
                Ok(()) => self.warnings.mark_reported(&at.warnings),
                Err(e) => tracing::debug!("{e}"),
            }
        }
        splits
    }
}

/// Warnings of the work for a job: logged by this process, and the latest ones reported to the run.
struct Warnings {
    log: Arc<dyn Observer>,
    last: Mutex<VecDeque<Warning>>,
    /// Number of the latest warning.
    count: AtomicU64,
    /// Number of the latest warning that was reported to the run.
    last_reported: AtomicU64,
}

impl Warnings {
    fn new(log: Arc<dyn Observer>) -> Arc<Self> {
        Arc::new(Self { log, last: Mutex::default(), count: AtomicU64::new(0), last_reported: AtomicU64::new(0) })
    }

    fn last(&self) -> Vec<Warning> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    fn mark_reported(&self, reported: &[Warning]) {
        if let Some(last) = reported.last() {
            self.last_reported.fetch_max(last.number, Ordering::Relaxed);
        }
    }

    fn has_unreported(&self) -> bool {
        self.count.load(Ordering::Relaxed) > self.last_reported.load(Ordering::Relaxed)
    }
}

impl Observer for Warnings {
    fn event(&self, event: &Event) {
        self.log.event(event);
        let Event::Warning { message } = event else { return };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        if last.len() == MAX_WARNINGS {
            last.pop_front();
        }
        let message = message[..message.floor_char_boundary(MAX_WARNING_BYTES)].to_owned();
        last.push_back(Warning { number, message });
    }
}

/// Marks a split as being built until it is dropped.
struct InProgress<'a>(&'a Mutex<BTreeSet<SplitId>>, SplitId);

impl<'a> InProgress<'a> {
    fn on(in_progress: &'a Mutex<BTreeSet<SplitId>>, split: SplitId) -> Self {
        in_progress.lock().unwrap_or_else(PoisonError::into_inner).insert(split);
        Self(in_progress, split)
    }
}

impl Drop for InProgress<'_> {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

/// What a worker offers to task specs.
#[derive(Debug, Clone)]
pub struct WorkerConfig {
    /// Name of this process for people.
    pub name: String,
    /// What jobs may access.
    pub access: Access,
    /// Device of teachers; `None` uses the job's.
    pub device: Option<String>,
    /// Concurrent splits of a job.
    pub slots: usize,
    /// Memory that jobs may use.
    pub memory_budget: Arc<MemoryBudget>,
}

impl Worker {
    /// Prepares to work for a run: everything except the splits.
    ///
    /// Cost: lists the input, reads the run's plan, loads the teacher.
    ///
    /// # Errors
    /// If this process is not allowed to, cannot, or would build other bytes than the run. An error that concerns only
    /// this machine ([`PipelineError::machine_specific`]) is also reported at the output, so that the run knows which
    /// worker passes its splits on.
    pub async fn join(task: &TaskSpec, config: &WorkerConfig, observer: Arc<dyn Observer>) -> Result<Self> {
        let warnings = Warnings::new(observer);
        let observer = Arc::clone(&warnings) as Arc<dyn Observer>;
        let id = uuid::Uuid::new_v4().simple().to_string();
        if let Some(spec) = job_format().parse_json(&task.spec).spec
            && let Some(mismatch) = device_mismatch(&spec, task, config).await?
        {
            let output = job::output_of(&spec, &task.base, &config.access)?.joined(&task.ticket);
            output.check_ownership().await?;
            let at = WorkerReport { cannot: Some(mismatch.to_string()), ..WorkerReport::new(&config.name, &output) };
            output.report(&id, &at).await?;
            return Err(mismatch);
        }
        let prepared = prepare_job(task, config, &observer).await?;
        let hash = blocking(&prepared, &observer, |p, o| plan::job_hash(p, o)).await?;
        let output = prepared.output()?.joined(&task.ticket);
        let hash = append::hash_at_output(hash, &output).await?;
        let output = output.for_grown_job(&hash).joined(&task.ticket);
        output.check_ownership().await?;
        let at = WorkerReport { warnings: warnings.last(), ..WorkerReport::new(&config.name, &output) };
        // without a report the run cannot tell whether this worker is loading or absent
        output.report(&id, &at).await?;
        warnings.mark_reported(&at.warnings);
        let ready = Self::start(prepared, hash, output.clone(), (task, config), &id, &warnings);
        let ready = report_until_ready(&output, &id, &at, ready).await;
        if let Err(e) = &ready
            && e.machine_specific
        {
            output.report(&id, &WorkerReport { cannot: Some(e.to_string()), warnings: warnings.last(), ..at }).await?;
        }
        ready
    }

    async fn start(
        prepared: Arc<Prepared>,
        hash: JobHash,
        output: Output,
        (task, config): (&TaskSpec, &WorkerConfig),
        id: &str,
        warnings: &Arc<Warnings>,
    ) -> Result<Self> {
        let observer = Arc::clone(warnings) as Arc<dyn Observer>;
        let reservation = reserve_memory(&prepared, task, config, &observer).await?;
        let (splits, job_files, skipped, duplicates) = load_plan(&prepared, &hash, &output, task, &observer).await?;
        let loaded = load_teacher(&prepared, task, &splits, &job_files, &observer).await?;
        hash.teacher_is_still()?;
        let teacher = loaded.teachers.first().map(|teacher| teacher.info().clone());
        let devices: Result<Vec<_>, _> = loaded.teachers.into_iter().map(DeviceQueue::start).collect();
        let devices = devices.map_err(|e| PipelineError::new(ErrorKind::Model, format!("teacher: {}", chain(&e))))?;
        let storages = Arc::clone(&prepared.storages);
        let mut runner = SplitRunner::new(output, storages, splits.clone(), BTreeMap::new(), observer);
        runner.devices = devices;
        let (files, arithmetic) = (job_files, loaded.arithmetic);
        let job = Job { prepared, hash, files, skipped, duplicates, teacher, arithmetic, driver: None, runner };
        let pool = Pool::of_this_process()?;
        let session = job.session(splits, &BTreeMap::new(), pool.spawner()?)?;
        job.runner.add_plan(&session.plan);
        let partitions = session.partitions();
        let (name, in_progress, began) = (config.name.clone(), Mutex::default(), Instant::now());
        let state = Arc::new(WorkerState {
            name,
            job,
            session,
            in_progress,
            end_reason: OnceLock::new(),
            began,
            warnings: Arc::clone(warnings),
            report: tokio::sync::Mutex::new(id.to_owned()),
            report_count: AtomicU64::new(0),
            _reservation: reservation,
        });
        let permits = splits_with_memory(&state.job.prepared.spec).min(Semaphore::MAX_PERMITS);
        let watch_task = tokio::spawn(watch(Arc::clone(&state)));
        Ok(Self {
            state,
            partitions,
            split_locks: Mutex::default(),
            split_permits: Semaphore::new(permits),
            watch_task,
            pool,
        })
    }

    /// Why the run is over for this worker; `None` while it works.
    pub fn end_reason(&self) -> Option<SerializedError> {
        self.state.end_reason.get().cloned()
    }

    /// Builds a split and commits it for the run. Returns the existing record if it is already committed.
    ///
    /// # Errors
    /// If the split cannot be built, or the run no longer holds the output.
    pub async fn build_split(&self, split_task: &SplitTask) -> Result<ShardRecord> {
        let made = self.build_split_in_progress(split_task).await;
        // A report that names the split may be on its way. The run deletes the reports once it knows that its last split
        // has ended, so it learns that only after the report was written.
        drop(self.state.report.lock().await);
        made
    }

    async fn build_split_in_progress(&self, split_task: &SplitTask) -> Result<ShardRecord> {
        let split_lock = {
            let mut split_locks = self.split_locks.lock().unwrap_or_else(PoisonError::into_inner);
            split_locks.retain(|_, split_lock| Arc::strong_count(split_lock) > 1);
            Arc::clone(split_locks.entry(split_task.split).or_default())
        };
        let _guard = split_lock.lock().await;
        if let Some(why) = self.end_reason() {
            return Err(why.into());
        }
        let WorkerState { job, session, in_progress, warnings, .. } = self.state.as_ref();
        let output = &job.runner.output;
        output.check_ownership().await?;
        if split_task.was.is_none()
            && let Some(record) = output.committed(split_task.split).await?
        {
            return Ok(record);
        }
        let Some(&partition) = self.partitions.get(&split_task.split) else {
            let message = format!("{output}: the plan has no split {}", split_task.split.0);
            return Err(PipelineError::new(ErrorKind::DataSet, message));
        };
        let _permit = self.split_permits.acquire().await;
        if let Some(lost) = self.state.lost_devices_error() {
            return Err(lost);
        }
        let _in_progress = InProgress::on(in_progress, split_task.split);
        let warn = |message: String| warnings.event(&Event::Warning { message });
        let made = match &split_task.was {
            None => session.execute(partition, &warn).await,
            Some(was) => self.rebuild_session(partition, was)?.execute(0, &warn).await,
        };
        if warnings.has_unreported() {
            // report now: once the run learns that this split is done, it may end
            self.state.report().await;
        }
        // a split that failed here was either stopped or goes to another worker
        let made = match made {
            Ok(made) => made,
            Err(e) => {
                let lost = self.state.lost_devices_error();
                if lost.is_some() {
                    warn(e.to_string());
                    self.state.report().await;
                }
                return Err(self.end_reason().map(PipelineError::from).or(lost).unwrap_or(e));
            }
        };
        let [record] = <[ShardRecord; 1]>::try_from(made).map_err(|made| {
            let message = format!("split {} gave {} records: a bug in this program", split_task.split.0, made.len());
            PipelineError::new(ErrorKind::Output, message)
        })?;
        Ok(record)
    }

    /// A plan of one split whose shard must get the same bytes as before.
    fn rebuild_session(&self, partition: usize, was: &ShardRecord) -> Result<Session> {
        let WorkerState { job, session, .. } = self.state.as_ref();
        let splits: Vec<SplitRecord> = session.splits().get(partition).cloned().into_iter().collect();
        job.session(splits, &BTreeMap::from([(was.split, was.clone())]), self.pool.spawner()?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.watch_task.abort();
    }
}

/// Sets `stop` once the run is gone, and writes reports to the output. A store that does not answer proves nothing.
async fn watch(state: Arc<WorkerState>) {
    let runner = &state.job.runner;
    let output = &runner.output;
    let (mut reported, mut at) = (BTreeSet::new(), Instant::now());
    let mut monitor = LeaseMonitor::default();
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        runner.sample_device_waits(&state.session.resources.splits_in_progress);
        match output.check_run_alive(&mut monitor).await {
            Err(e) if e.retryable => continue,
            Err(e) => {
                tracing::info!("{e}");
                let _ = state.end_reason.set(SerializedError::from(&e));
                runner.stop.store(true, Ordering::Relaxed);
                return;
            }
            Ok(()) => {}
        }
        let splits = state.splits();
        if !splits.is_empty()
            && (splits != reported || state.warnings.has_unreported() || at.elapsed() >= REPORT_INTERVAL)
        {
            (reported, at) = (state.report().await, Instant::now());
        }
    }
}

/// Waits until the worker is ready, and reports meanwhile that it is alive.
async fn report_until_ready(
    output: &Output,
    id: &str,
    at: &WorkerReport,
    ready: impl Future<Output = Result<Worker>>,
) -> Result<Worker> {
    tokio::pin!(ready);
    let mut at = at.clone();
    loop {
        tokio::select! {
            ready = &mut ready => return ready,
            () = tokio::time::sleep(REPORT_INTERVAL) => {
                at.told += 1;
                if let Err(e) = output.report(id, &at).await {
                    tracing::debug!("{e}");
                }
            }
        }
    }
}

/// Reserves the memory of the job before any of it is used.
async fn reserve_memory(
    prepared: &Arc<Prepared>,
    task: &TaskSpec,
    config: &WorkerConfig,
    observer: &Arc<dyn Observer>,
) -> Result<Reservation> {
    let (budget, slots) = (Arc::clone(&config.memory_budget), config.slots);
    let dtype = task.teacher.as_ref().map(|teacher| teacher.dtype);
    blocking(prepared, observer, move |p, _| budget.reserve(MemoryNeeds::for_job(p, dtype, slots)?)).await
}

/// The job, checked like any other.
async fn prepare_job(task: &TaskSpec, config: &WorkerConfig, observer: &Arc<dyn Observer>) -> Result<Arc<Prepared>> {
    let mut parsed = job_format().parse_json(&task.spec);
    if let Some(spec) = &mut parsed.spec {
        // this process builds the splits itself
        spec.engine.kind = EngineKind::Local;
        spec.engine.scheduler = None;
        if let (Some(extract), Some(device)) = (&mut spec.extract, &config.device) {
            extract.teacher.device.clone_from(device);
        }
    }
    let (base, access, observer) = (task.base.clone(), config.access.clone(), Arc::clone(observer));
    let prepared = tokio::task::spawn_blocking(move || prepare(parsed, &base, &access, observer.as_ref()));
    Ok(Arc::new(prepared.await.map_err(PipelineError::worker_stopped(ErrorKind::Input))??))
}

type Planned =
    (Vec<SplitRecord>, Arc<Vec<stillhouse_input_files::InputFile>>, Statistics, Option<Arc<dyn DuplicateList>>);

/// The splits as the run planned them, over the files as this process sees them.
async fn load_plan(
    prepared: &Arc<Prepared>,
    hash: &JobHash,
    output: &Output,
    task: &TaskSpec,
    observer: &Arc<dyn Observer>,
) -> Result<Planned> {
    let Some(plan) = output.plan().await? else {
        let message = format!(
            "{output}: no plan is there as this machine sees it; valid: a place that all executors and the run share"
        );
        return Err(PipelineError::new(ErrorKind::Output, message));
    };
    if hash.hash != task.ticket.job_hash || plan.job_hash != task.ticket.job_hash {
        let short = |hash: &str| hash[..12.min(hash.len())].to_owned();
        let mut message = format!(
            "the job is another one as this machine sees it (hash {}; the run has {})",
            short(&hash.hash),
            short(&task.ticket.job_hash)
        );
        differences(&plan, hash).iter().take(MAX_LINES).for_each(|line| message += &format!("\n  {line}"));
        return Err(PipelineError::new(ErrorKind::Input, message));
    }
    // staged rows are read from the run's parts
    if !prepared.spec.input.is_staged() {
        check_same_input(&plan, hash)?;
    }
    let staged = files_of(prepared, hash, output, observer).await?;
    staged_rows::check(&staged, &plan, output)?;
    let duplicates = duplicates::of_run(prepared, output, plan.duplicates.as_ref()).await?;
    let skipped = staged.skipped_records();
    Ok((plan.splits_of(&hash.files), Arc::new(staged.files), skipped, duplicates))
}

/// Loads the teacher in the run's arithmetic, or returns an error.
async fn load_teacher(
    prepared: &Arc<Prepared>,
    task: &TaskSpec,
    splits: &[SplitRecord],
    files: &Arc<Vec<stillhouse_input_files::InputFile>>,
    observer: &Arc<dyn Observer>,
) -> Result<LoadedTeachers> {
    if prepared.teacher.is_none() {
        return Ok(LoadedTeachers::default());
    }
    let (splits, files, arithmetic) = (splits.to_vec(), Arc::clone(files), task.teacher.clone());
    let load = move |p: &Prepared, o: &dyn Observer| {
        let decided = arithmetic.as_ref().map(DecidedArithmetic::ByRun);
        teacher::load_all(p, JobInput { splits: &splits, files: &files }, decided, true, o)
    };
    blocking(prepared, observer, load).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::NullObserver;

    #[test]
    fn a_report_has_the_last_warnings_with_their_numbers() {
        let warnings = Warnings::new(Arc::new(NullObserver));
        assert!(!warnings.has_unreported() && warnings.last().is_empty());
        let warn = |message: String| warnings.event(&Event::Warning { message });
        warn("é".repeat(MAX_WARNING_BYTES));
        let reported = warnings.last();
        assert_eq!((reported.len(), reported[0].number, reported[0].message.len()), (1, 1, MAX_WARNING_BYTES));
        warnings.mark_reported(&reported);
        assert!(!warnings.has_unreported());
        (0..MAX_WARNINGS).for_each(|n| warn(n.to_string()));
        assert!(warnings.has_unreported());
        let numbers: Vec<u64> = warnings.last().iter().map(|warning| warning.number).collect();
        assert_eq!(numbers, (2..=MAX_WARNINGS as u64 + 1).collect::<Vec<_>>());
        // an older report that is written later does not undo a newer one
        warnings.mark_reported(&warnings.last());
        warnings.mark_reported(&reported);
        assert!(!warnings.has_unreported());
    }
}
