//! Schedules jobs: fills the slots of the CPU and of each GPU from the queue.
//!
//! ```text
//!   submit, retry, an attempt's end ─► wake ─┐
//!   a retry is due ─────────────────► timer ─┴─► due jobs are queued ─► free slots filled ─► one task per attempt
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::json;
use stillhouse_pipeline::events::Event;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::config::Capacity;
use super::model::{EventType, JobId, JobState, ResultView, Slot, Time};
use super::runner;
use super::stop::Stop;
use super::store::jobs::{self, Report, Task};
use super::store::{self, Result, StoreError, attempts, events};
use super::{Service, dataset_query, pending_cancels, wait_until_set, worker};

/// The running attempts.
#[derive(Default)]
pub struct Running {
    attempts: Mutex<HashMap<Key, RunningAttempt>>,
    changes: AtomicU64,
}

/// A job and the number of the attempt: the end of one may overlap with the start of the next.
type Key = (JobId, u32);

struct RunningAttempt {
    slot: Slot,
    gpu: Option<u32>,
    tokens_per_second: f64,
    stop: watch::Sender<Stop>,
}

impl Running {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, RunningAttempt>> {
        self.attempts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, key: Key, attempt: RunningAttempt) {
        self.lock().insert(key, attempt);
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&self, key: &Key) {
        self.lock().remove(key);
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of starts and ends of attempts so far. When it has changed, any data set may have changed too.
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    /// Asks an attempt to stop, but not a later attempt at the same job.
    pub fn stop(&self, id: &JobId, attempt: u32, why: Stop) {
        if let Some(running) = self.lock().get(&(id.clone(), attempt)) {
            running.stop.send_replace(why);
        }
    }

    /// Sets the current speed of an attempt.
    pub fn set_rate(&self, id: &JobId, attempt: u32, tokens_per_second: f64) {
        if let Some(running) = self.lock().get_mut(&(id.clone(), attempt)) {
            running.tokens_per_second = tokens_per_second;
        }
    }

    /// Sum over all attempts.
    pub fn tokens_per_second(&self) -> f64 {
        self.lock().values().fold(0.0, |sum, p| sum + p.tokens_per_second)
    }

    fn stop_all(&self) {
        for running in self.lock().values() {
            running.stop.send_if_modified(|stop| {
                *stop == Stop::No && {
                    *stop = Stop::Shutdown;
                    true
                }
            });
        }
    }

    /// Total, used and currently free slots of each kind: `all` jobs at once, the CPU, each GPU.
    pub fn slots(&self, capacity: &Capacity) -> Vec<SlotCounts> {
        let running = self.lock();
        let left = capacity.running_jobs.saturating_sub(to_u32(running.len()));
        let of = |kind: String, all: u32, used: usize| {
            let used = to_u32(used);
            SlotCounts { kind, all, used, free: all.saturating_sub(used).min(left) }
        };
        let on_cpu = running.values().filter(|p| p.slot == Slot::Cpu).count();
        let mut slots =
            vec![of("all".into(), capacity.running_jobs, running.len()), of("cpu".into(), capacity.cpu_slots, on_cpu)];
        let gpus = capacity.gpus.iter();
        slots.extend(gpus.map(|gpu| of(format!("gpu:{gpu}"), capacity.jobs_per_gpu, jobs_on_gpu(&running, *gpu))));
        slots
    }

    /// Slots that a job could take now.
    fn free_slots(&self, capacity: &Capacity) -> Vec<Slot> {
        let running = self.lock();
        if running.len() >= capacity.running_jobs as usize {
            return Vec::new();
        }
        let mut free = Vec::new();
        if running.values().filter(|p| p.slot == Slot::Cpu).count() < capacity.cpu_slots as usize {
            free.push(Slot::Cpu);
        }
        let gpus =
            capacity.gpus.iter().filter(|gpu| self::jobs_on_gpu(&running, **gpu) < capacity.jobs_per_gpu as usize);
        let gpus: Vec<Slot> = gpus.map(|gpu| Slot::Gpu(*gpu)).collect();
        if !gpus.is_empty() {
            free.push(Slot::AnyGpu);
            free.extend(gpus);
        }
        free
    }

    /// The GPU for a job with this slot: the one with the fewest jobs.
    fn choose_gpu(&self, slot: Slot, capacity: &Capacity) -> Option<u32> {
        let running = self.lock();
        match slot {
            Slot::Cpu => None,
            Slot::Gpu(gpu) => Some(gpu),
            Slot::AnyGpu => capacity.gpus.iter().copied().min_by_key(|gpu| (jobs_on_gpu(&running, *gpu), *gpu)),
        }
    }
}

/// Slots of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotCounts {
    /// `all`, `cpu`, or `gpu:` with the ordinal of a GPU.
    pub kind: String,
    pub all: u32,
    pub used: u32,
    /// Slots in which a job could begin now; never more than those of `all`.
    pub free: u32,
}

fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn jobs_on_gpu(running: &HashMap<Key, RunningAttempt>, gpu: u32) -> usize {
    running.values().filter(|p| p.gpu == Some(gpu)).count()
}

const MAX_SLEEP: Duration = Duration::from_secs(60);

/// Runs jobs until the service stops, then stops the workers and waits for them.
pub async fn run(service: Arc<Service>, mut leftovers: Leftovers, mut shutdown: watch::Receiver<bool>) {
    let mut attempts = JoinSet::new();
    let mut minutes = tokio::time::interval(MAX_SLEEP);
    loop {
        let next_due = match fill_slots(&service, &mut leftovers, &mut attempts).await {
            Ok(next_due) => next_due,
            Err(e) => {
                // the store has already logged a full disk
                if !matches!(e, StoreError::DiskFull(_)) {
                    tracing::error!("cannot read or change the queue: {e}");
                }
                Some(Time::now().after(Duration::from_secs(1)))
            }
        };
        let sleep = next_due.map_or(MAX_SLEEP, |due| {
            Duration::from_millis((due.0 - Time::now().0).clamp(10, MAX_SLEEP.as_millis() as i64) as u64)
        });
        tokio::select! {
            () = wait_until_set(&mut shutdown) => break,
            () = service.wake.notified() => {}
            () = tokio::time::sleep(sleep) => {}
            _ = minutes.tick() => delete_old(&service).await,
            Some(ended) = attempts.join_next() => {
                if let Err(e) = ended {
                    tracing::error!("an attempt's task stopped: {e}");
                }
            }
        }
    }
    service.running.stop_all();
    let all = async { while attempts.join_next().await.is_some() {} };
    let timeout = Duration::from_secs(u64::from(service.config.shutdown_seconds));
    if tokio::time::timeout(timeout, all).await.is_err() {
        tracing::warn!("workers did not stop in {} s; the next start of the service ends them", timeout.as_secs());
    }
}

async fn fill_slots(
    service: &Arc<Service>,
    leftovers: &mut Leftovers,
    attempts: &mut JoinSet<()>,
) -> Result<Option<Time>> {
    leftovers.store(service).await?;
    pending_cancels::store_pending(service).await?;
    let longest = Duration::from_secs(service.config.retry.largest_backoff_seconds.into());
    let next_due = service.store.write(move |t, appended| jobs::requeue_due(t, Time::now(), longest, appended)).await?;
    loop {
        let free = service.running.free_slots(&service.config.capacity);
        if free.is_empty() {
            return Ok(next_due);
        }
        let taken = service.store.write(move |t, appended| jobs::take_next(t, &free, Time::now(), appended)).await?;
        let Some(task) = taken else { return Ok(next_due) };
        start_attempt(service, task, attempts);
    }
}

fn start_attempt(service: &Arc<Service>, task: Task, attempts: &mut JoinSet<()>) {
    let gpu = service.running.choose_gpu(task.slot, &service.config.capacity);
    let (stop, stopped) = watch::channel(Stop::No);
    let key = (task.job_ref.id.clone(), task.job_ref.attempt);
    service.running.insert(key.clone(), RunningAttempt { slot: task.slot, gpu, tokens_per_second: 0.0, stop });
    let guard = SlotGuard { service: Arc::clone(service), key };
    attempts.spawn(async move {
        runner::run_attempt(Arc::clone(&guard.service), task, gpu, stopped).await;
        drop(guard);
    });
}

/// The slot of an attempt, released however the attempt ends.
struct SlotGuard {
    service: Arc<Service>,
    key: Key,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        self.service.running.remove(&self.key);
    }
}

async fn delete_old(service: &Arc<Service>) {
    let Some(days) = service.config.keep.finished_days else { return };
    let before = Time(Time::now().0 - i64::from(days.get()) * 86_400_000);
    let deleted = service.store.write(move |t, _| {
        let old = jobs::finished_before(t, before)?;
        old.iter().try_for_each(|id| jobs::delete(t, id))?;
        Ok(old)
    });
    match deleted.await {
        Ok(old) => {
            for id in &old {
                service.logs.remove(id).await;
            }
        }
        Err(e) => tracing::error!("cannot delete old jobs: {e}"),
    }
}

/// Row numbers of jobs whose attempts an earlier service left open. Their workers have ended.
pub struct Leftovers(VecDeque<i64>);

/// Cleans up after an earlier service: ends its workers and queues its running jobs again. Returns what the full disk
/// refused, which is stored before any job begins.
///
/// # Errors
/// When a worker of the earlier service does not end: its job must not run twice.
pub async fn recover(service: &Arc<Service>) -> Result<Leftovers, String> {
    let open = service.store.read(attempts::open).await.map_err(|e| e.to_string())?;
    let mut leftovers = Leftovers(VecDeque::new());
    for attempt in open {
        if let Some((process, start_time)) = attempt.process {
            let removed = tokio::task::spawn_blocking(move || worker::kill_leftover(process, start_time));
            removed.await.map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        }
        leftovers.0.push_back(attempt.job);
    }
    service.clear_scratch().await;
    match leftovers.store(service).await {
        Ok(()) | Err(StoreError::DiskFull(_)) => Ok(leftovers),
        Err(e) => Err(e.to_string()),
    }
}

impl Leftovers {
    /// Stores how the attempts ended.
    ///
    /// # Errors
    /// The store's errors; the attempts that are not stored stay in the list.
    async fn store(&mut self, service: &Arc<Service>) -> Result<()> {
        while let Some(job) = self.0.front() {
            let id = end_leftover(service, *job).await?;
            tracing::info!(job = %id, "an earlier service left it running");
            self.0.pop_front();
        }
        Ok(())
    }
}

async fn end_leftover(service: &Arc<Service>, job: i64) -> Result<JobId> {
    let max_interruptions = service.config.limits.interruptions;
    let result = completed_result(service, job).await?;
    let changed = service.store.write(move |t, appended| {
        let now = Time::now();
        let (job_ref, state) = jobs::job_ref_by_row(t, job)?;
        let reason = "the service was killed";
        attempts::end(t, job_ref.seq, "interrupted", Some(reason), now)?;
        match state {
            JobState::Running if attempts::count_interruption(t, job_ref.seq)? > max_interruptions => {
                let reason = format!("the service was stopped in each of {max_interruptions} attempts");
                jobs::transition(t, &job_ref, state, JobState::Failed, Some(&reason), now, appended)?;
            }
            JobState::Running => jobs::transition(t, &job_ref, state, JobState::Queued, Some(reason), now, appended)?,
            JobState::Cancelling if result.is_some() => {
                let data = json!(result);
                let report = Report { result, ..Report::default() };
                jobs::report(t, job_ref.seq, &report, now)?;
                appended.push(events::add(t, &job_ref, EventType::Finished, data, now)?);
                jobs::transition(t, &job_ref, state, JobState::Succeeded, None, now, appended)?;
            }
            JobState::Cancelling => {
                let reason = jobs::get(t, &job_ref.id)?.reason;
                jobs::transition(t, &job_ref, state, JobState::Cancelled, reason.as_deref(), now, appended)?;
            }
            _ => {}
        }
        Ok(job_ref.id)
    });
    changed.await
}

/// The result of a job in state `cancelling` that had already completed its data set, when the service ended before it
/// noticed.
async fn completed_result(service: &Arc<Service>, job: i64) -> store::Result<Option<ResultView>> {
    let query = service.store.read(move |c| {
        let (job_ref, state) = jobs::job_ref_by_row(c, job)?;
        let hash = events::job_hash(c, job)?.filter(|_| state == JobState::Cancelling);
        let (file, folder) = jobs::file_and_folder(c, &job_ref.id)?;
        Ok(hash.map(|hash| (file, folder, hash)))
    });
    let Some((file, folder, hash)) = query.await? else { return Ok(None) };
    Ok(match dataset_query::query_finished(service, file, folder, hash).await {
        Some(Event::JobFinished { rows, tokens, bytes, seconds, went_in, .. }) => {
            Some(ResultView::new([rows, tokens, bytes], seconds, true, went_in))
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(running: &Running, slot: Slot, capacity: &Capacity) -> Option<u32> {
        let gpu = running.choose_gpu(slot, capacity);
        let stop = watch::channel(Stop::No).0;
        running.lock().insert((JobId::new().unwrap(), 1), RunningAttempt { slot, gpu, tokens_per_second: 0.0, stop });
        gpu
    }

    #[test]
    fn slots_fill_up() {
        let capacity =
            Capacity { running_jobs: 4, cpu_slots: 1, gpus: vec![0, 3], jobs_per_gpu: 1, ..Capacity::default() };
        let running = Running::default();
        assert_eq!(running.free_slots(&capacity), [Slot::Cpu, Slot::AnyGpu, Slot::Gpu(0), Slot::Gpu(3)]);
        assert_eq!(put(&running, Slot::Gpu(0), &capacity), Some(0));
        assert_eq!(running.free_slots(&capacity), [Slot::Cpu, Slot::AnyGpu, Slot::Gpu(3)]);
        assert_eq!(put(&running, Slot::AnyGpu, &capacity), Some(3));
        assert_eq!(running.free_slots(&capacity), [Slot::Cpu]);
        assert_eq!(put(&running, Slot::Cpu, &capacity), None);
        assert_eq!(running.free_slots(&capacity), []);
        let reported: Vec<(String, u32, u32, u32)> =
            running.slots(&capacity).into_iter().map(|s| (s.kind, s.all, s.used, s.free)).collect();
        let expected = [("all", 4, 3, 1), ("cpu", 1, 1, 0), ("gpu:0", 1, 1, 0), ("gpu:3", 1, 1, 0)];
        assert_eq!(reported, expected.map(|(kind, all, used, free)| (kind.to_owned(), all, used, free)));
        // never more than `running_jobs`, on any device
        let one = Capacity { running_jobs: 1, ..capacity };
        let running = Running::default();
        put(&running, Slot::AnyGpu, &one);
        assert_eq!(running.free_slots(&one), []);
        assert!(running.slots(&one).iter().all(|s| s.free == 0));
    }
}
