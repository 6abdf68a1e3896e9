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
use stillhouse_pipeline::error::{Failure, PipelineError, Result};
use stillhouse_pipeline::events::{Event, Observer};
use stillhouse_pipeline::run::worker::{Place, Worker};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;
use tokio::runtime::Handle;
use tokio::sync::OnceCell;

/// Interval after which the executor tries again to prepare a job that did not fit: other jobs may have ended.
const AGAIN: Duration = Duration::from_mins(1);
/// How long the executor remembers that a run has ended. The first split that it refuses ends the job at the scheduler.
const FORGETS: Duration = Duration::from_mins(10);

/// A split that fails this often in this executor becomes a permanent failure, even if its error is retryable.
const MOST_FAILURES: u32 = 4;
/// Interval between two checks for ended runs, so that their teachers are dropped without waiting for the next split.
const LOOKS: Duration = Duration::from_secs(30);

/// A job and how far its preparation got.
#[derive(Default)]
struct Joined {
    worker: OnceCell<Worker>,
    /// Retryable failures of each split in this executor.
    failures: Mutex<HashMap<SplitId, u32>>,
    /// Why this executor cannot run the job, and when it found out.
    cannot: Mutex<Option<(Failure, Instant)>>,
}

/// The place of an executor: its access rules, its device, its jobs.
pub struct Workplace {
    /// The runtime for requests and files.
    handle: Handle,
    place: Place,
    jobs: Mutex<HashMap<String, Arc<Joined>>>,
    /// Ended runs, with the reason and when that was noticed. Their remaining splits are refused.
    gone: Mutex<HashMap<String, (Failure, Instant)>>,
}

/// A task that is aborted when nothing waits for it any more.
struct Waited<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for Waited<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Workplace {
    /// Creates a place that uses the current runtime.
    pub fn new(place: Place) -> Arc<Self> {
        let handle = Handle::current();
        let this = Arc::new(Self { handle: handle.clone(), place, jobs: Mutex::default(), gone: Mutex::default() });
        handle.spawn(forget(Arc::downgrade(&this)));
        this
    }

    /// Makes a split of a job, on this place's runtime.
    ///
    /// # Errors
    /// As [`Worker::join`] and [`Worker::make`]; the message names the executor.
    pub async fn make(self: &Arc<Self>, order: &TaskSpec, wanted: SplitTask) -> Result<ShardRecord> {
        let (this, order) = (Arc::clone(self), order.clone());
        let mut task = Waited(self.handle.spawn(async move { this.made(&order, &wanted).await }));
        let made = (&mut task.0).await.map_err(PipelineError::from)?;
        made.map_err(|e| {
            // `join` has already logged why the job is passed on
            if !e.of_place {
                tracing::warn!("{e}");
            }
            let failure = Failure::from(&e);
            Failure { message: format!("{} (executor {})", failure.message, self.place.name), ..failure }.into()
        })
    }

    async fn made(&self, order: &TaskSpec, wanted: &SplitTask) -> Result<ShardRecord> {
        let job = self.job(order)?;
        // after a failure the next split prepares the job again
        let worker = job.worker.get_or_try_init(|| self.join(&job, order)).await?;
        tracing::info!(split = wanted.split.0, job = order.ticket.job_hash, "begins");
        let made = worker.make(wanted).await;
        let record = made.map_err(|e| if e.retryable { job.failed(wanted.split, e) } else { e })?;
        tracing::info!(split = wanted.split.0, shard = record.path, bytes = record.bytes, "committed");
        Ok(record)
    }

    async fn join(&self, job: &Joined, order: &TaskSpec) -> Result<Worker> {
        let known = job.cannot.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((why, since)) = known
            && since.elapsed() < AGAIN
        {
            return Err(why.into());
        }
        let joined = Worker::join(order, &self.place, Arc::new(Log)).await;
        let cannot = joined.as_ref().err().filter(|e| e.of_place).map(|e| (Failure::from(e), Instant::now()));
        if let Some((why, _)) = &cannot {
            tracing::warn!("the splits of job {} are passed on: {}", order.ticket.job_hash, why.message);
        }
        *job.cannot.lock().unwrap_or_else(PoisonError::into_inner) = cannot;
        joined
    }

    /// The job of an order; an error if its run has ended.
    fn job(&self, order: &TaskSpec) -> Result<Arc<Joined>> {
        let key = format!("{} {}", order.ticket.job_hash, order.ticket.holder.as_deref().unwrap_or_default());
        self.forget();
        if let Some((why, _)) = self.gone.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Err(why.clone().into());
        }
        Ok(Arc::clone(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default()))
    }

    /// Drops the jobs whose runs have ended.
    fn forget(&self) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        gone.retain(|_, (_, since)| since.elapsed() < FORGETS);
        // dropping ended runs frees the memory of their teachers; a job that could not be prepared is kept until its
        // retry
        jobs.retain(|key, job| {
            let Some(worker) = job.worker.get() else {
                let cannot = job.cannot.lock().unwrap_or_else(PoisonError::into_inner);
                return Arc::strong_count(job) > 1 || cannot.as_ref().is_some_and(|(_, since)| since.elapsed() < AGAIN);
            };
            let Some(why) = worker.is_over() else { return true };
            gone.insert(key.clone(), (why, Instant::now()));
            Arc::strong_count(job) > 1
        });
    }
}

/// Drops ended runs periodically, as long as the place exists.
async fn forget(place: Weak<Workplace>) {
    loop {
        tokio::time::sleep(LOOKS).await;
        let Some(place) = place.upgrade() else { return };
        place.forget();
    }
}

impl Joined {
    /// Counts a retryable failure; the last allowed one becomes permanent.
    fn failed(&self, split: SplitId, error: PipelineError) -> PipelineError {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let times = failures.entry(split).or_default();
        *times += 1;
        if *times < MOST_FAILURES {
            return error;
        }
        let failure = Failure::from(&error);
        let message = format!("{} (split {} has failed so {times} times here)", failure.message, split.0);
        Failure { message, retryable: false, ..failure }.into()
    }
}

impl fmt::Debug for Workplace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workplace").field("name", &self.place.name).finish_non_exhaustive()
    }
}

/// Logs the events of a job's preparation.
struct Log;

impl Observer for Log {
    fn event(&self, event: &Event) {
        match event {
            Event::Preparing { what } => tracing::info!("{what}"),
            Event::Warning { message } => tracing::warn!("{message}"),
            _ => {}
        }
    }
}
