//! Runs the splits of a job, several at once, until each has a committed shard; counts the results and reports
//! progress.
//!
//! `run`, `repair`, `derive` and the executors of a cluster all use it. The leaf of their plan decides what they read
//! ([`super::job_plan`]).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use datafusion::physical_plan::ExecutionPlan;
use futures::{FutureExt, StreamExt};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_base::events::{Event, Observer, Progress, StageStatus, StalledSplit};
use stillhouse_base::storage::Storages;
use stillhouse_output::Output;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};

use crate::acceptance::Tally;
use crate::device::DeviceQueue;
use crate::device_waits::DeviceWaits;
use crate::driver::{Driver, DriverEvent, EventSink, PendingSplits, SplitTask, TaskSpec};
use crate::executor_reports::ExecutorReports;
use crate::holdouts::Holdouts;
use crate::resources::SplitsInProgress;
use crate::session::Session;
use crate::stage_state::SplitState;
use crate::stall::{self, Stall, StallWatch};

const PROGRESS_INTERVAL: Duration = Duration::from_millis(250);

/// The splits of a job and their progress.
pub struct SplitRunner {
    /// Where the shards are committed.
    pub output: Output,
    /// All splits of the job.
    pub splits: Vec<SplitRecord>,
    /// The shards that earlier runs have committed.
    pub done: BTreeMap<SplitId, ShardRecord>,
    /// Shards to make again, with the records that they must reproduce.
    pub remade: BTreeMap<SplitId, ShardRecord>,
    /// The devices of this process that hold the teacher.
    pub devices: Vec<DeviceQueue>,
    /// Receives progress, commits, warnings and stalls.
    pub observer: Arc<dyn Observer>,
    /// Set when a split has failed or the run is cancelled. The other splits end at their next batch.
    pub stop: Arc<AtomicBool>,
    storages: Arc<Storages>,
    holdouts: Holdouts,
    /// The splits that this run has committed.
    committed_splits: Mutex<BTreeSet<SplitId>>,
    /// The plans whose metrics are the progress of this run: one, or two when it also repairs damaged shards.
    plans: Mutex<Vec<Arc<dyn ExecutionPlan>>>,
    /// Number of committed splits.
    committed: AtomicU64,
    /// Bytes of the shards that this run has committed.
    bytes: AtomicU64,
    /// Reports of the executors, if executors make the splits.
    executor_reports: Option<Mutex<ExecutorReports>>,
    /// Time that the devices of this process have waited, by stage.
    device_waits: Mutex<DeviceWaits>,
}

/// Where the splits are made.
pub enum Workers<'a> {
    /// In this process.
    Local {
        /// Maximum number of splits in progress at once.
        max_splits: usize,
    },
    /// The executors of a cluster.
    Remote {
        /// The cluster.
        driver: &'a dyn Driver,
        /// The job in the form that is sent to executors.
        spec: &'a TaskSpec,
    },
}

impl SplitRunner {
    /// A runner for the splits of a job; `done` are those already committed.
    pub fn new(
        output: Output,
        storages: Arc<Storages>,
        splits: Vec<SplitRecord>,
        done: BTreeMap<SplitId, ShardRecord>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        Self {
            holdouts: Holdouts::new(&splits, done.values()),
            committed: AtomicU64::new(done.len() as u64),
            output,
            splits,
            done,
            remade: BTreeMap::new(),
            devices: Vec::new(),
            observer,
            stop: Arc::default(),
            storages,
            committed_splits: Mutex::default(),
            plans: Mutex::default(),
            bytes: AtomicU64::new(0),
            executor_reports: None,
            device_waits: Mutex::default(),
        }
    }

    /// Makes the runner count the reports of executors, which make the splits.
    pub fn with_executors(self) -> Self {
        Self { executor_reports: Some(Mutex::default()), ..self }
    }

    /// Returns the splits that were not committed before this run.
    pub fn pending(&self) -> Vec<SplitRecord> {
        self.splits.iter().filter(|split| !self.done.contains_key(&split.split)).cloned().collect()
    }

    /// Whether this run has committed a split.
    pub fn has_committed(&self, split: SplitId) -> bool {
        lock(&self.committed_splits).contains(&split)
    }

    /// Returns the plans whose metrics are counted.
    pub fn plans(&self) -> Vec<Arc<dyn ExecutionPlan>> {
        lock(&self.plans).clone()
    }

    /// Adds a plan whose metrics count as progress.
    pub fn add_plan(&self, plan: &Arc<dyn ExecutionPlan>) {
        lock(&self.plans).push(Arc::clone(plan));
    }

    /// Makes all splits of a session.
    ///
    /// # Errors
    /// When a split fails, when the job can no longer be accepted ([`Tally`]), or when a holdout ends up empty.
    pub async fn run(&self, session: &Session, workers: Workers<'_>, tally: &Tally<'_>, began: Instant) -> Result<()> {
        self.holdouts.check()?;
        self.add_plan(&session.plan);
        let is_remote = matches!(workers, Workers::Remote { .. });
        let work = PendingSplits {
            splits: session.splits().iter().map(|split| self.task(split)).collect(),
            output: self.output.clone(),
            stop: Arc::clone(&self.stop),
        };
        let emit = |event| self.handle_event(event, tally);
        let work = match &workers {
            Workers::Local { max_splits } => run_locally(session, *max_splits, &work, &emit).boxed(),
            Workers::Remote { driver, spec } => driver.drive(spec, &work, &emit),
        };
        tokio::pin!(work);
        let mut ticks = tokio::time::interval(PROGRESS_INTERVAL);
        let mut watch = StallWatch::new(stall::STALL_TIMEOUT, Instant::now());
        loop {
            tokio::select! {
                result = &mut work => {
                    self.observer.event(&Event::Progress(self.progress(began)));
                    if result.is_err() && tally.is_fruitless() {
                        self.output.remove().await?;
                    }
                    return result;
                }
                _ = ticks.tick() => {
                    let splits_in_progress = &session.resources.splits_in_progress;
                    self.sample_device_waits(splits_in_progress);
                    let progress = self.progress(began);
                    match is_remote {
                        false => self.report_local_stall(&mut watch, &progress, splits_in_progress),
                        true => self.report_remote_stall(&mut watch, &progress),
                    }
                    self.observer.event(&Event::Progress(progress));
                }
            }
        }
    }

    fn task(&self, split: &SplitRecord) -> SplitTask {
        let (dataset_split, was) = (split.dataset_split.clone(), self.remade.get(&split.split).cloned());
        SplitTask { split: split.split, dataset_split, was }
    }

    /// Reports what each split waits for when nothing has moved in this process for a while.
    fn report_local_stall(&self, watch: &mut StallWatch, progress: &Progress, splits_in_progress: &SplitsInProgress) {
        let at_work: BTreeMap<SplitId, Arc<SplitState>> =
            splits_in_progress.all().into_iter().map(|state| (state.split, state)).collect();
        let rows = at_work.iter().map(|(split, state)| (*split, state.rows()));
        let input_and_stages = |split| at_work.get(&split).map(|state| (state.input_file.clone(), state.statuses()));
        self.report_stall(watch, movement(progress) + progress.store_requests, rows, input_and_stages);
    }

    /// Reports a stall of the executors. Their store requests do not count as movement: stalled executors send them too,
    /// to report.
    fn report_remote_stall(&self, watch: &mut StallWatch, progress: &Progress) {
        let Some(reports) = &self.executor_reports else { return };
        let at_work = {
            let made = lock(&self.committed_splits);
            lock(reports).splits_in_progress(|split| !made.contains(&split))
        };
        let rows = at_work.iter().map(|(split, at)| (*split, at.rows()));
        let input_and_stages = |split| at_work.get(&split).map(|at| (at.reads.clone(), at.stages.clone()));
        self.report_stall(watch, movement(progress), rows, input_and_stages);
    }

    fn report_stall(
        &self,
        watch: &mut StallWatch,
        moved: u64,
        rows: impl Iterator<Item = (SplitId, u64)>,
        input_and_stages: impl Fn(SplitId) -> Option<(String, Vec<StageStatus>)>,
    ) {
        let Some(Stall { time, splits }) = watch.observe(Instant::now(), moved, rows) else { return };
        let stalled_split = |(split, idle): &(SplitId, Duration)| {
            let (reads, stages) = input_and_stages(*split)?;
            Some(StalledSplit { split: *split, reads, seconds: idle.as_secs_f64(), stages })
        };
        self.observer.event(&Event::Stalled {
            seconds: time.as_secs_f64(),
            at_work: splits.len() as u64,
            splits: splits.iter().take(stall::MAX_SPLITS_SHOWN).filter_map(stalled_split).collect(),
        });
    }

    /// Returns the progress of the run, from the metrics of its plans and the reports of executors.
    pub fn progress(&self, began: Instant) -> Progress {
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let requests = self.storages.requests();
        let mut progress = Progress {
            seconds: began.elapsed().as_secs_f64(),
            splits_done: get(&self.committed),
            splits: self.splits.len() as u64,
            store_requests: requests.sent,
            store_retries: requests.retries,
            bytes: get(&self.bytes),
            devices: self.devices.len() as u64,
            ..Progress::default()
        };
        self.plans().iter().for_each(|plan| super::add_progress(plan.as_ref(), &mut progress));
        lock(&self.device_waits).add_to(&mut progress);
        if let Some(reports) = &self.executor_reports {
            lock(reports).add_to(&mut progress);
        }
        progress
    }

    /// Samples which stages the idle devices of this process are waiting for.
    pub fn sample_device_waits(&self, splits_in_progress: &SplitsInProgress) {
        let idle = self.devices.iter().filter(|device| device.is_idle() && !device.is_lost()).count();
        let states = splits_in_progress.all();
        let stages: Vec<&str> = states.iter().flat_map(|state| state.working_stages()).collect();
        lock(&self.device_waits).sample(Instant::now(), idle, &stages);
    }

    /// Counts and reports an event; returns an error when the run must stop because of it.
    fn handle_event(&self, event: DriverEvent, tally: &Tally<'_>) -> Result<()> {
        match event {
            DriverEvent::SplitStarted { split, dataset_split, executor } => {
                self.observer.event(&Event::SplitStarted { split, dataset_split, executor });
            }
            DriverEvent::WorkerReports(reports) => {
                if let Some(executor_reports) = &self.executor_reports {
                    lock(executor_reports).update(reports, Instant::now());
                }
            }
            DriverEvent::Warning(message) => self.observer.event(&Event::Warning { message }),
            DriverEvent::Committed(record) => {
                self.count_committed(&record)?;
                if let Some(message) = tally.add_committed(&record)? {
                    self.observer.event(&Event::Warning { message });
                }
            }
        }
        Ok(())
    }

    fn count_committed(&self, record: &ShardRecord) -> Result<()> {
        let is_first = lock(&self.committed_splits).insert(record.split);
        // A damaged shard that is made again is already counted.
        if is_first && !self.done.contains_key(&record.split) {
            self.committed.fetch_add(1, Ordering::Relaxed);
        }
        self.bytes.fetch_add(record.bytes, Ordering::Relaxed);
        if let Some(reports) = &self.executor_reports {
            lock(reports).add_committed(record);
        }
        self.holdouts.add_committed(record)?;
        self.observer.event(&Event::SplitCommitted {
            split: record.split,
            shard: record.path.clone(),
            rows: record.rows,
            tokens: record.tokens,
            bytes: record.bytes,
        });
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A counter that grows as long as any work moves.
fn movement(progress: &Progress) -> u64 {
    progress.stages.iter().map(|stage| stage.rows).sum::<u64>() + progress.splits_done + progress.teacher_tokens
}

/// Makes the splits in this process, `max_splits` at a time. After a failure it stops the others and waits for them, so
/// that nothing is written after it returns. A request to stop is an error: splits may be missing.
async fn run_locally(session: &Session, max_splits: usize, work: &PendingSplits, emit: EventSink<'_>) -> Result<()> {
    let mut splits = futures::stream::iter(0..work.splits.len())
        .map(|partition| run_split_locally(session, work, partition, emit))
        .buffer_unordered(max_splits);
    let mut failure = None;
    while let Some(result) = splits.next().await {
        if let Err(e) = result {
            work.stop.store(true, Ordering::Relaxed);
            // Later errors only say that their split was stopped.
            failure.get_or_insert(e);
        }
    }
    match failure {
        Some(e) => Err(e),
        None if work.stop.load(Ordering::Relaxed) => Err(PipelineError::new(ErrorKind::Cancelled, "stopped")),
        None => Ok(()),
    }
}

async fn run_split_locally(
    session: &Session,
    work: &PendingSplits,
    partition: usize,
    emit: EventSink<'_>,
) -> Result<()> {
    if work.stop.load(Ordering::Relaxed) || session.resources.has_failed.load(Ordering::Relaxed) {
        return Ok(());
    }
    let SplitTask { split, dataset_split, .. } = work.splits[partition].clone();
    emit(DriverEvent::SplitStarted { split, dataset_split, executor: None })?;
    let warn = |message| drop(emit(DriverEvent::Warning(message)));
    for record in session.execute(partition, &warn).await? {
        emit(DriverEvent::Committed(Box::new(record)))?;
    }
    Ok(())
}
