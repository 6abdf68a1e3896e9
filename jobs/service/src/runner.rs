//! One attempt at a job: from the start of its worker to the job's next state.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use serde_json::{Value, json};
use stillhouse_pipeline::error::ErrorKind;
use stillhouse_pipeline::events::{Event, Progress, stalled_words};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::logs::LogWriter;
use super::model::{EventType, EventView, Job, JobState, ProgressView, ResultView, Slot, StageView, Time};
use super::order::{Message, Order, STOPPED, Work};
use super::outcome::Outcome;
use super::process::TERMINATE;
use super::rates::{Rates, Speed};
use super::store::jobs::{self, Report, Task};
use super::store::{Result, StoreError, attempts, events};
use super::worker::{Exit, FromWorker, Start, Worker, says_no_memory};
use super::{Service, ask, bounds, metrics as figures, pending_cancels};
use stillhouse_pipeline::progress_estimate::{Estimator, Start as EstimatorStart};

/// Why a worker has to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It does not have to.
    No,
    /// A user cancelled the job.
    Cancel,
    /// The service stops.
    Shutdown,
}

const REPORT_EVERY: Duration = Duration::from_millis(500);
/// Seconds to wait, after a worker has ended, for child processes that hold its pipes: without output, and in total.
const LINGER: u32 = 5;
const LINGER_AT_ALL: u32 = 120;
/// Interval between two tries to store what the full disk refused.
const AGAIN: Duration = Duration::from_secs(1);
/// Exit code of a Rust process that panicked.
const PANICKED: i32 = 101;
const KEEP: Duration = Duration::from_secs(5);

/// Runs the attempt and stores the job's next state.
pub async fn attempt(service: Arc<Service>, task: Task, gpu: Option<u32>, stop: watch::Receiver<Stop>) {
    let id = task.whose.id.clone();
    let mut attempt = Attempt::new(Arc::clone(&service), task, gpu, stop);
    let began = Instant::now();
    let outcome = match attempt.run().await {
        Ok(outcome) => outcome,
        Err(message) => Outcome::Crashed(message),
    };
    tracing::info!(job = %id, attempt = attempt.task.whose.attempt, outcome = ?outcome, "attempt ended");
    histogram!(figures::ATTEMPT, "outcome" => outcome.name()).record(began.elapsed().as_secs_f64());
    // the loop must store the state, or the job would stay running without a worker
    while let Err(e) = attempt.close(&outcome).await {
        // the store has already logged a full disk
        if !matches!(e, StoreError::NoRoom(_)) {
            tracing::error!(job = %id, "cannot store how an attempt ended: {e}");
        }
        if matches!(e, StoreError::Damaged(_) | StoreError::NoJob(_)) {
            break;
        }
        tokio::time::sleep(AGAIN).await;
    }
}

struct Attempt {
    service: Arc<Service>,
    task: Task,
    gpu: Option<u32>,
    stop: watch::Receiver<Stop>,
    log: Option<LogWriter>,
    report: Report,
    estimator: Option<(Estimator, bool)>,
    speed: Speed,
    rates: Rates,
    last: Progress,
    view: Option<ProgressView>,
    bytes_before: u64,
    bytes: u64,
    last_report: Option<Instant>,
    kept: Option<Instant>,
    failed: Option<Outcome>,
    finished: bool,
    /// Whether the worker's log says that an allocation failed.
    lacked_memory: bool,
    plan: Option<Plan>,
    /// Events that the full disk refused, oldest first. Until they are stored, nothing more is read from the worker, so
    /// they stay few: the worker blocks once its pipe is full.
    waiting: VecDeque<Waiting>,
}

/// The plan that the worker reported.
struct Plan {
    job_hash: String,
    splits: u64,
    committed: u64,
}

/// An event that is not stored yet.
#[derive(Clone)]
struct Waiting {
    kind: EventType,
    data: Value,
    time: Time,
}

impl Attempt {
    fn new(service: Arc<Service>, task: Task, gpu: Option<u32>, stop: watch::Receiver<Stop>) -> Self {
        Self {
            service,
            task,
            gpu,
            stop,
            log: None,
            report: Report { gpu, ..Report::default() },
            estimator: None,
            speed: Speed::default(),
            rates: Rates::default(),
            last: Progress::default(),
            view: None,
            bytes_before: 0,
            bytes: 0,
            last_report: None,
            kept: None,
            failed: None,
            finished: false,
            lacked_memory: false,
            plan: None,
            waiting: VecDeque::new(),
        }
    }

    async fn run(&mut self) -> Result<Outcome, String> {
        let id = self.task.whose.id.clone();
        histogram!(figures::QUEUE_WAIT).record(self.task.waited.max(0) as f64 / 1e3);
        match self.service.logs.write_to(&id, self.task.whose.attempt).await {
            Ok(log) => self.log = Some(log),
            Err(e) => tracing::error!(job = %id, "cannot write its log: {e}"),
        }
        // the job may have been cancelled before its attempt could be stopped
        let (own, store) = (id.clone(), Arc::clone(&self.service.store));
        let state = store.read(move |c| jobs::get(c, &own)).await.map_err(|e| e.to_string())?.state;
        if state == JobState::Cancelling {
            return Ok(Outcome::Cancelled);
        }
        self.rates = self.earlier_rates().await;
        let scratch = self.service.scratch(id.as_str());
        let start = self.order(scratch.clone());
        let started = tokio::task::spawn_blocking(move || Worker::start(&start).map(|worker| (worker, start.order)));
        let failed = |e: std::io::Error| format!("cannot start a worker: {e}");
        let (mut worker, order) = started.await.map_err(|e| e.to_string())?.map_err(failed)?;
        let (attempt, (process, began)) = (self.task.whose.attempt, worker.process());
        let mut stop = self.stop.clone();
        while let Err(e) = self.note(process, began).await {
            // a full disk is not the job's fault: wait for space
            let stopped = match e {
                StoreError::NoRoom(_) => tokio::select! {
                    why = stop_requested(&mut stop) => Some(Ok(stopped_by(why))),
                    () = tokio::time::sleep(AGAIN) => None,
                },
                e => Some(Err(e.to_string())),
            };
            if let Some(outcome) = stopped {
                worker.kill();
                let _ = worker.wait().await;
                return outcome;
            }
        }
        // the order comes only now, so that a service that dies earlier leaves no worker at work
        let given = tokio::task::spawn_blocking(move || worker.give(&order).map(|()| worker));
        let worker = given.await.map_err(|e| e.to_string())?.map_err(failed)?;
        tracing::info!(job = %id, attempt, process, gpu = self.gpu, user = self.task.user, "attempt began");
        let mut outcome = self.follow(worker).await;
        if let Ok(ended) = &outcome
            && let Some(finished) = self.finished_unreported(ended).await
        {
            self.event(finished).await;
            outcome = Ok(Outcome::Succeeded);
        }
        if let Err(e) = tokio::fs::remove_dir_all(&scratch).await {
            tracing::warn!(job = %id, "cannot remove {}: {e}", scratch.display());
        }
        outcome
    }

    /// Stores the worker's process id.
    async fn note(&self, process: i32, began: u64) -> Result<()> {
        let (seq, attempt, report) = (self.task.whose.seq, self.task.whose.attempt, self.report.clone());
        let noted = self.service.store.write(move |t, _| {
            attempts::set_process(t, seq, attempt, process, began)?;
            jobs::report(t, seq, &report, Time::now())
        });
        noted.await
    }

    fn order(&self, scratch: std::path::PathBuf) -> Start {
        let config = &self.service.config;
        let visible_gpus = match (self.task.slot, self.gpu) {
            (Slot::AnyGpu, Some(gpu)) => Some(gpu.to_string()),
            // the job names its GPU itself, by the machine's ordinal
            (Slot::Gpu(_), _) => None,
            // hides all GPUs, so that `auto` does not take another job's
            _ => Some(String::new()),
        };
        Start {
            program: self.service.program.clone(),
            visible_gpus,
            endpoint: config.endpoint.clone(),
            order: Order {
                work: Work::Run {
                    file: self.task.file.clone(),
                    folder: self.task.folder.clone().into(),
                    overwrite: self.task.overwrite,
                    append: self.task.append,
                },
                access: config.job_access(),
                scheduler: config.cluster.scheduler.clone(),
                scratch,
                threads: config.capacity.threads(),
                allow_unconfined: config.allow_unconfined,
                memory_bytes: config.capacity.worker_gigabytes.map(|n| u64::from(n) * 1_000_000_000),
            },
        }
    }

    async fn earlier_rates(&self) -> Rates {
        let id = self.task.whose.id.clone();
        let kept = self.service.store.read(move |c| jobs::rates(c, &id)).await.ok().flatten();
        kept.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// Reads the worker's output to its end, and stops the worker if needed.
    async fn follow(&mut self, mut worker: Worker) -> Result<Outcome, String> {
        let limit = Duration::from_secs(self.task.time_limit_seconds);
        let deadline = tokio::time::sleep(limit);
        tokio::pin!(deadline);
        let mut stop = self.stop.clone();
        let mut stopping: Option<Outcome> = None;
        let mut kill_at: Option<tokio::time::Instant> = None;
        let patience = Duration::from_secs(u64::from(self.service.config.limits.cancel_seconds));
        let mut look = tokio::time::interval(Duration::from_secs(1));
        let mut again = tokio::time::interval(AGAIN);
        // ticks must not accumulate while nothing waits for the interval
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        again.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut silent, mut ended) = (0, 0);
        loop {
            let killing = async {
                match kill_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let mut reason = None;
            tokio::select! {
                said = worker.said.recv(), if self.waiting.is_empty() => match said {
                    Some(said) => {
                        silent = 0;
                        self.take(said).await;
                    }
                    None => break,
                },
                _ = again.tick(), if !self.waiting.is_empty() => self.store_waiting().await,
                why = stop_requested(&mut stop), if stopping.is_none() => reason = Some(stopped_by(why)),
                () = &mut deadline, if stopping.is_none() => reason = Some(Outcome::over_time_limit(limit)),
                // children of the worker may outlive it and hold its pipes
                _ = look.tick(), if self.waiting.is_empty() && worker.has_ended() => {
                    worker.kill();
                    silent = if worker.said.is_empty() { silent + 1 } else { 0 };
                    ended += 1;
                    if silent > LINGER || ended > LINGER_AT_ALL {
                        break;
                    }
                }
                () = killing => {
                    worker.kill();
                    kill_at = None;
                }
            }
            let reason = self.over_output_limit().filter(|_| stopping.is_none()).or(reason);
            if let Some(reason) = reason {
                worker.terminate();
                stopping = Some(reason);
                kill_at = Some(tokio::time::Instant::now() + patience);
            }
        }
        let exit = end_of(worker).await?;
        Ok(self.outcome(exit, stopping))
    }

    /// The outcome of a worker whose shards exceed the job's output limit.
    fn over_output_limit(&self) -> Option<Outcome> {
        let (bytes, limit) = (self.bytes_before + self.bytes, self.task.output_limit_bytes);
        let over = bytes > limit && !self.finished;
        over.then(|| Outcome::OverLimit(format!("its shards take {bytes} bytes, more than its limit of {limit} bytes")))
    }

    fn outcome(&mut self, exit: Exit, stopping: Option<Outcome>) -> Outcome {
        match (exit, self.failed.take(), stopping) {
            // `_SUCCESS` exists, however the worker ended afterwards
            _ if self.finished => Outcome::Succeeded,
            (_, _, Some(stopped)) => stopped,
            (_, Some(failed), None) => failed,
            // something else stopped it: a machine that shuts down signals the service and its workers in any order
            (Exit::Code(STOPPED) | Exit::Signal(TERMINATE), None, None) => Outcome::Interrupted,
            (Exit::Signal(libc::SIGABRT) | Exit::Code(PANICKED), None, None) if self.lacked_memory => {
                Outcome::out_of_memory(self.service.config.capacity.worker_gigabytes)
            }
            (exit, None, None) => Outcome::Crashed(exit.describe()),
        }
    }

    /// The worker's final event, if it was stopped before it could send it but the data set is complete. Asks the data
    /// set itself.
    async fn finished_unreported(&self, outcome: &Outcome) -> Option<Event> {
        let stopped = matches!(outcome, Outcome::Cancelled | Outcome::OverLimit(_) | Outcome::Crashed(_));
        let plan = self.plan.as_ref().filter(|plan| stopped && plan.committed >= plan.splits)?;
        let (file, folder) = (self.task.file.clone(), self.task.folder.clone());
        match ask::finished(&self.service, file, folder, plan.job_hash.clone()).await? {
            Event::JobFinished { output, job_hash, rows, tokens, bytes, went_in, .. } => {
                let seconds = self.view.as_ref().map_or(0.0, |view| view.seconds);
                Some(Event::JobFinished {
                    output,
                    job_hash,
                    rows,
                    tokens,
                    bytes,
                    seconds,
                    already_done: false,
                    went_in,
                })
            }
            _ => None,
        }
    }

    async fn take(&mut self, said: FromWorker) {
        match said {
            FromWorker::Log(line) => {
                self.lacked_memory |= says_no_memory(&line);
                let Some(log) = self.log.take() else { return };
                let added = log.add(line, Time::now()).await.and_then(|(log, added)| {
                    self.log = Some(log);
                    added
                });
                if let Err(e) = added {
                    // an error comes once per series; the log itself later holds the number of lost lines
                    tracing::error!(job = %self.task.whose.id, "cannot write its log: {e}");
                }
            }
            FromWorker::Garbled(what) => {
                tracing::warn!(job = %self.task.whose.id, "its worker said what it cannot: {what}")
            }
            FromWorker::Message(message) => match *message {
                Message::Event(event) => self.event(event).await,
                Message::Failed { kind, message, problems, retryable } => {
                    let (message, problems) = (bounds::message(message), bounds::problems(problems));
                    self.failed = Some(match kind == ErrorKind::Busy.name() {
                        true => Outcome::Waits(message),
                        false => Outcome::Failed { message, problems, retryable },
                    });
                }
                Message::Answer(_) | Message::OtherDataSet => {}
            },
        }
    }

    async fn event(&mut self, event: Event) {
        let Some((event, data)) = bounded(&event) else { return };
        match event {
            Event::Progress(progress) => self.progress(progress).await,
            Event::Preparing { .. } => self.report_kept(EventType::Preparing, data).await,
            Event::Warning { .. } => self.report_kept(EventType::Warning, data).await,
            Event::Stalled { seconds, at_work, splits } => {
                let message = stalled_words(seconds, at_work, &splits);
                self.report_kept(EventType::Warning, json!({ "message": message })).await;
            }
            Event::SplitStarted { .. } => self.report_kept(EventType::SplitStarted, data).await,
            Event::JobStarted { output, splits, splits_done, bytes_done, input_bytes, teacher, job_hash, .. } => {
                self.plan = Some(Plan { job_hash, splits, committed: splits_done });
                self.bytes_before = bytes_done;
                let start = EstimatorStart { splits_done, input_bytes, teacher: teacher.is_some() };
                self.estimator = Some((Estimator::new(start), teacher.is_some()));
                self.report.teacher = teacher;
                self.report.output = Some(output);
                self.report_kept(EventType::Started, data).await;
                self.keep().await;
            }
            Event::SplitCommitted { bytes, .. } => {
                counter!("stillhouse_splits_committed_total").increment(1);
                counter!("stillhouse_shard_bytes_total").increment(bytes);
                self.bytes += bytes;
                if let Some(plan) = &mut self.plan {
                    plan.committed += 1;
                }
                self.report_kept(EventType::SplitCommitted, data).await;
            }
            Event::JobFinished { output, job_hash: _, rows, tokens, bytes, seconds, already_done, went_in } => {
                self.finished = true;
                self.report.output = Some(output);
                self.report.result = Some(ResultView::new([rows, tokens, bytes], seconds, already_done, went_in));
                if let Some(view) = &mut self.view {
                    view.seconds_left = None;
                    view.bytes = bytes;
                }
                self.report_kept(EventType::Finished, data).await;
                self.keep().await;
            }
            Event::ExportStarted { .. } | Event::ExportProgress { .. } => {}
        }
    }

    async fn progress(&mut self, now: Progress) {
        figures::count(&self.last, &now);
        let now_time = Time::now();
        let with_teacher = self.estimator.as_ref().is_some_and(|(_, teacher)| *teacher);
        let tokens = if with_teacher { now.teacher_tokens } else { now.tokens };
        let seconds_left = self.estimator.as_mut().and_then(|(estimator, _)| estimator.read(&now).seconds_left);
        self.rates.read(now_time, self.task.whose.attempt, tokens, now.splits_done);
        let tokens_per_second = self.speed.read(now.seconds, tokens);
        self.service.running.set_rate(&self.task.whose.id, self.task.whose.attempt, tokens_per_second);
        let first = self.view.is_none();
        self.view = Some(ProgressView {
            seconds: now.seconds,
            splits_done: now.splits_done,
            splits: now.splits,
            documents: now.documents,
            text_bytes: now.text_bytes,
            tokens: now.tokens,
            sequences: now.sequences,
            teacher_tokens: now.teacher_tokens,
            teacher_seconds: now.teacher_seconds,
            extract_seconds: now.extract_seconds,
            devices: now.devices,
            device_idle_seconds: now.device_idle_seconds,
            device_blocked_seconds: now.device_blocked_seconds,
            bytes: self.bytes_before + self.bytes,
            tokens_per_second,
            seconds_left,
            stages: now.stages.iter().map(StageView::from).collect(),
        });
        self.last = now;
        if self.last_report.is_none_or(|at| at.elapsed() >= REPORT_EVERY) {
            self.last_report = Some(Instant::now());
            let whose = &self.task.whose;
            self.service.store.publish(EventView {
                seq: None,
                job: whose.id.clone(),
                time: now_time,
                attempt: whose.attempt,
                kind: EventType::Progress,
                data: json!(self.view),
            });
        }
        if first || self.kept.is_none_or(|kept| kept.elapsed() >= KEEP) {
            self.keep().await;
        }
    }

    /// Stores progress and rates. If the disk is full the next call stores them, at the latest the one for the job's
    /// next state.
    async fn keep(&mut self) {
        self.kept = Some(Instant::now());
        self.gather();
        let (seq, report) = (self.task.whose.seq, self.report.clone());
        match self.service.store.write(move |t, _| jobs::report(t, seq, &report, Time::now())).await {
            Ok(()) | Err(StoreError::NoRoom(_)) => {}
            Err(e) => tracing::error!(job = %self.task.whose.id, "cannot store its progress: {e}"),
        }
    }

    fn gather(&mut self) {
        self.report.progress = self.view.as_ref().map(|v| json!(v));
        self.report.rates = Some(json!(self.rates));
    }

    async fn report_kept(&mut self, kind: EventType, data: Value) {
        self.waiting.push_back(Waiting { kind, data, time: Time::now() });
        self.store_waiting().await;
    }

    /// Stores waiting events in order, until the disk is full.
    async fn store_waiting(&mut self) {
        while let Some(next) = self.waiting.front() {
            match self.store_event(next.clone()).await {
                Ok(()) => {}
                Err(StoreError::NoRoom(_)) => return,
                Err(e) => tracing::error!(job = %self.task.whose.id, "cannot store an event: {e}"),
            }
            self.waiting.pop_front();
        }
    }

    async fn store_event(&self, Waiting { kind, data, time }: Waiting) -> Result<()> {
        let (whose, most) = (self.task.whose.clone(), self.service.config.limits.events_per_job);
        let stored = self.service.store.write(move |t, appended| {
            // the limit applies to kinds of which a job may have many, such as one per split; clients need all others
            let many = matches!(kind, EventType::SplitStarted | EventType::SplitCommitted | EventType::Preparing);
            if !many || jobs::event_count(t, whose.seq)? < most {
                // only a later attempt can begin a split again
                if kind == EventType::SplitStarted && whose.attempt > 1 && events::was_started(t, whose.seq, &data)? {
                    counter!("stillhouse_split_retries_total").increment(1);
                }
                appended.push(events::add(t, &whose, kind, data, time)?);
            }
            Ok(())
        });
        stored.await
    }

    /// Stores the attempt's end and the job's next state.
    async fn close(&mut self, outcome: &Outcome) -> Result<()> {
        self.store_waiting().await;
        pending_cancels::store_pending_of(&self.service, &self.task.whose.id).await?;
        self.gather();
        let stopping = *self.service.stopping.borrow();
        let next = outcome.next(&self.task, &self.service.config.retry, stopping);
        let (task, interruptions) = (self.task.clone(), self.service.config.limits.interruptions);
        let report = self.report.clone();
        let changed = self.service.store.write(move |t, appended| {
            let now = Time::now();
            let (whose, state) = jobs::whose(t, &task.whose.id)?;
            jobs::report(t, whose.seq, &report, now)?;
            attempts::end(t, whose.seq, next.outcome, next.reason.as_deref(), now)?;
            let mut to = next.state;
            let mut reason = next.reason;
            if state == JobState::Cancelling && to != JobState::Succeeded {
                // the job counts as cancelled, whatever else happened; the stored reason names the user
                to = JobState::Cancelled;
                reason = jobs::get(t, &whose.id)?.reason;
            } else if state == JobState::Running && to == JobState::Cancelled {
                // the cancel was for an earlier attempt
                to = JobState::Queued;
            } else if let Some(failure) = &next.failure {
                attempts::fail(t, whose.seq, failure, next.not_before)?;
            } else if let Some(not_before) = next.not_before {
                attempts::wait_until(t, whose.seq, not_before)?;
            } else if to == JobState::Queued && attempts::count_interruption(t, whose.seq)? > interruptions {
                to = JobState::Failed;
                reason = Some(format!("the service was stopped in each of {interruptions} attempts"));
            }
            jobs::transition(t, &whose, state, to, reason.as_deref(), now, appended)?;
            jobs::get(t, &whose.id)
        });
        let Job { state, started_at, finished_at, .. } = changed.await?;
        if let (Some(from), Some(to)) = (started_at, finished_at) {
            histogram!(figures::JOB, "state" => state.name()).record(to.seconds_since(from));
        }
        counter!("stillhouse_attempts_total", "outcome" => outcome.name()).increment(1);
        if state == JobState::Retrying {
            self.service.wake.notify_one();
        }
        Ok(())
    }
}

/// An event and its data with truncated texts and lists.
fn bounded(event: &Event) -> Option<(Event, Value)> {
    let mut data = serde_json::to_value(event).ok()?;
    bounds::event(&mut data);
    let event = serde_json::from_value(data.clone()).ok()?;
    data.as_object_mut()?.remove("event");
    Some((event, data))
}

/// The exit of a worker whose pipes are closed. Kills it if it does not end within five seconds.
async fn end_of(worker: Worker) -> Result<Exit, String> {
    for _ in 0..100 {
        if worker.has_ended() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    worker.kill();
    worker.wait().await.map_err(|e| format!("the worker's end was not seen: {e}"))
}

async fn stop_requested(stop: &mut watch::Receiver<Stop>) -> Stop {
    let why = stop.wait_for(|s| *s != Stop::No).await.ok().map(|why| *why);
    match why {
        Some(why) => why,
        // the sender is gone, so no request can come
        None => std::future::pending().await,
    }
}

fn stopped_by(why: Stop) -> Outcome {
    if why == Stop::Cancel { Outcome::Cancelled } else { Outcome::Interrupted }
}
