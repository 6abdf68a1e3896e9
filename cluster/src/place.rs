//! The jobs that an executor works for: each is prepared once in its process, by whichever split comes first, and goes with its run.
//!
//! A job that this machine cannot hold is not looked at again for a minute: its splits go back to the scheduler meanwhile.

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

/// After so long it is tried again whether a job has room here: others may have ended.
const AGAIN: Duration = Duration::from_mins(1);
/// So long it is known that a run is gone: its job ends at the scheduler with the first of its splits that is refused.
const FORGETS: Duration = Duration::from_mins(10);

/// A split that fails so often here is not tried again, whatever may be better later.
const MOST_FAILURES: u32 = 4;
/// How often it is looked for runs that are gone, so that their teachers do not wait for the next split.
const LOOKS: Duration = Duration::from_secs(30);

/// A job, as far as it came here.
#[derive(Default)]
struct Joined {
    worker: OnceCell<Worker>,
    /// How often splits have failed here with something that may be better later.
    failures: Mutex<HashMap<SplitId, u32>>,
    /// Why not, and when that was found out.
    cannot: Mutex<Option<(Failure, Instant)>>,
}

/// An executor's place: its rules, its device, its jobs.
pub struct Workplace {
    /// The runtime that serves requests and files.
    handle: Handle,
    place: Place,
    jobs: Mutex<HashMap<String, Arc<Joined>>>,
    /// Runs that were seen to be gone, and when: what is still handed out of them is not begun.
    gone: Mutex<HashMap<String, (Failure, Instant)>>,
}

/// Aborts what nobody waits for any more.
struct Waited<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for Waited<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Workplace {
    /// In the runtime that this is called in.
    pub fn new(place: Place) -> Arc<Self> {
        let handle = Handle::current();
        let this = Arc::new(Self { handle: handle.clone(), place, jobs: Mutex::default(), gone: Mutex::default() });
        handle.spawn(forget(Arc::downgrade(&this)));
        this
    }

    /// Makes a split of a job, on the runtime of this place, whatever runtime waits for it.
    ///
    /// # Errors
    /// As [`Worker::join`] and [`Worker::make`]; says which executor it was.
    pub async fn make(self: &Arc<Self>, order: &TaskSpec, wanted: SplitTask) -> Result<ShardRecord> {
        let (this, order) = (Arc::clone(self), order.clone());
        let mut task = Waited(self.handle.spawn(async move { this.made(&order, &wanted).await }));
        let made = (&mut task.0).await.map_err(PipelineError::from)?;
        made.map_err(|e| {
            // of a job that is passed on it was told when that was found out
            if !e.of_place {
                tracing::warn!("{e}");
            }
            let failure = Failure::from(&e);
            Failure { message: format!("{} (executor {})", failure.message, self.place.name), ..failure }.into()
        })
    }

    async fn made(&self, order: &TaskSpec, wanted: &SplitTask) -> Result<ShardRecord> {
        let job = self.job(order)?;
        // one that fails is tried again by the next split
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

    /// The job of an order; an error where its run is gone.
    fn job(&self, order: &TaskSpec) -> Result<Arc<Joined>> {
        let key = format!("{} {}", order.ticket.job_hash, order.ticket.holder.as_deref().unwrap_or_default());
        self.forget();
        if let Some((why, _)) = self.gone.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Err(why.clone().into());
        }
        Ok(Arc::clone(self.jobs.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default()))
    }

    /// Lets go of runs that are gone.
    fn forget(&self) {
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let mut gone = self.gone.lock().unwrap_or_else(PoisonError::into_inner);
        gone.retain(|_, (_, since)| since.elapsed() < FORGETS);
        // teachers of runs that have ended make room; what was never made is known for as long as it is not tried again
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

/// Looks for runs that are gone, as long as there is a place.
async fn forget(place: Weak<Workplace>) {
    loop {
        tokio::time::sleep(LOOKS).await;
        let Some(place) = place.upgrade() else { return };
        place.forget();
    }
}

impl Joined {
    /// Counts a failure that may be better later: the last one is an end.
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

/// What the preparation of a job tells, in this executor's log.
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
