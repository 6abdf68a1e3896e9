//! The jobs of an executor. The first split of a job prepares it, once per process; the job is dropped when its run
//! ends.
//!
//! When this machine cannot run a job, the executor returns its splits to the scheduler for a minute before it tries
//! again.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use stillhouse_pipeline::driver::{SplitTask, TaskSpec};
use stillhouse_pipeline::error::{PipelineError, Result, SerializedError};
use stillhouse_pipeline::events::{Event, Observer};
use stillhouse_pipeline::run::worker::{Worker, WorkerConfig};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

/// Interval after which the executor tries again to prepare a job that did not fit: other jobs may have ended.
const RETRY_INTERVAL: Duration = Duration::from_mins(1);
/// How long the executor remembers that a run has ended. The first split that it refuses ends the job at the scheduler.
const ENDED_RETENTION: Duration = Duration::from_mins(10);

/// A split that fails this often in this executor becomes a permanent failure, even if its error is retryable.
const MAX_FAILURES: u32 = 4;
/// Interval between two checks for ended runs, so that their teachers are dropped without waiting for the next split.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);

/// A job and the state of its preparation.
#[derive(Default)]
struct PreparedJob {
    worker: OnceCell<Worker>,
    /// Retryable failures of each split in this executor.
    failures: Mutex<HashMap<SplitId, u32>>,
    /// Why this executor cannot run the job, and when it found out.
    unable: Mutex<Option<(SerializedError, Instant)>>,
}

/// The jobs of an executor, with its access rules and its device.
pub struct ExecutorJobs {
    /// The runtime for requests and files.
    handle: Handle,
    config: WorkerConfig,
    jobs: Mutex<HashMap<String, Arc<PreparedJob>>>,
    /// Ended runs, with the reason and when that was noticed. Their remaining splits are refused.
    ended: Mutex<HashMap<String, (SerializedError, Instant)>>,
}

/// A task that is aborted when nothing waits for it any more.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl ExecutorJobs {
    /// Creates the jobs of an executor that uses the current runtime.
    pub fn new(config: WorkerConfig) -> Arc<Self> {
        let handle = Handle::current();
        let this = Arc::new(Self { handle: handle.clone(), config, jobs: Mutex::default(), ended: Mutex::default() });
        handle.spawn(drop_ended_periodically(Arc::downgrade(&this)));
        this
    }

    /// Makes a split of a job, on the executor's runtime.
    ///
    /// # Errors
    /// As [`Worker::join`] and [`Worker::make`]; the message names the executor.
    pub async fn make_split(self: &Arc<Self>, spec: &TaskSpec, split_task: SplitTask) -> Result<ShardRecord> {
        let (this, spec) = (Arc::clone(self), spec.clone());
        let mut task = AbortOnDrop(self.handle.spawn(async move { this.prepare_and_make(&spec, &split_task).await }));
        let made = (&mut task.0).await.map_err(PipelineError::from)?;
        made.map_err(|e| {
            // `prepare` has already logged why the job is passed on
            if !e.machine_specific {
                tracing::warn!("{e}");
            }
            let failure = SerializedError::from(&e);
            SerializedError { message: format!("{} (executor {})", failure.message, self.config.name), ..failure }
                .into()
        })
    }

    async fn prepare_and_make(&self, spec: &TaskSpec, split_task: &SplitTask) -> Result<ShardRecord> {
        let job = self.find_or_add(spec)?;
        // after a failure the next split prepares the job again
        let worker = job.worker.get_or_try_init(|| self.prepare(&job, spec)).await?;
        tracing::info!(split = split_task.split.0, job = spec.ticket.job_hash, "begins");
        let made = worker.build_split(split_task).await;
        let record = made.map_err(|e| if e.retryable { job.count_failure(split_task.split, e) } else { e })?;
        tracing::info!(split = split_task.split.0, shard = record.path, bytes = record.bytes, "committed");
        Ok(record)
    }

    async fn prepare(&self, job: &PreparedJob, spec: &TaskSpec) -> Result<Worker> {
        let known = job.unable.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((failure, since)) = known
            && since.elapsed() < RETRY_INTERVAL
        {
            return Err(failure.into());
        }
        let worker = Worker::join(spec, &self.config, Arc::new(LogObserver)).await;
        let unable =
            worker.as_ref().err().filter(|e| e.machine_specific).map(|e| (SerializedError::from(e), Instant::now()));
        if let Some((failure, _)) = &unable {
            tracing::warn!("the splits of job {} are passed on: {}", spec.ticket.job_hash, failure.message);
        }
        *job.unable.lock().unwrap_or_else(PoisonError::into_inner) = unable;
        worker
    }

    /// The job of a task; an error if its run has ended.
    fn find_or_add(&self, spec: &TaskSpec) -> Result<Arc<PreparedJob>> {
        let key = format!("{} {}", spec.ticket.job_hash, spec.ticket.holder.as_deref().unwrap_or_default());
        self.drop_ended();
        if let Some((failure, _)) = self.ended.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Err(failure.clone().into());
        }
        Ok(Arc::clone(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default()))
    }

    /// Drops the jobs whose runs have ended.
    fn drop_ended(&self) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.retain(|_, (_, since)| since.elapsed() < ENDED_RETENTION);
        // dropping ended runs frees the memory of their teachers; a job that could not be prepared is kept until its
        // retry
        jobs.retain(|key, job| {
            let Some(worker) = job.worker.get() else {
                let unable = job.unable.lock().unwrap_or_else(PoisonError::into_inner);
                return Arc::strong_count(job) > 1
                    || unable.as_ref().is_some_and(|(_, since)| since.elapsed() < RETRY_INTERVAL);
            };
            let Some(failure) = worker.end_reason() else { return true };
            ended.insert(key.clone(), (failure, Instant::now()));
            Arc::strong_count(job) > 1
        });
    }
}

/// Drops ended runs periodically, as long as the value exists.
async fn drop_ended_periodically(jobs: Weak<ExecutorJobs>) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        let Some(jobs) = jobs.upgrade() else { return };
        jobs.drop_ended();
    }
}

impl PreparedJob {
    /// Counts a retryable failure; the last allowed one becomes permanent.
    fn count_failure(&self, split: SplitId, error: PipelineError) -> PipelineError {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let times = failures.entry(split).or_default();
        *times += 1;
        if *times < MAX_FAILURES {
            return error;
        }
        let failure = SerializedError::from(&error);
        let message = format!("{} (split {} has failed so {times} times here)", failure.message, split.0);
        SerializedError { message, retryable: false, ..failure }.into()
    }
}

impl fmt::Debug for ExecutorJobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExecutorJobs").field("name", &self.config.name).finish_non_exhaustive()
    }
}

/// Logs the events of a job's preparation.
struct LogObserver;

impl Observer for LogObserver {
    fn event(&self, event: &Event) {
        match event {
            Event::Preparing { what } => tracing::info!("{what}"),
            Event::Warning { message } => tracing::warn!("{message}"),
            _ => {}
        }
    }
}
