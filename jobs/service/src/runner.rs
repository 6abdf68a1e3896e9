//! One attempt at a job: from the start of its worker to the job's next state.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use serde_json::{Value, json};
use stillhouse_pipeline::error::ErrorKind;
use stillhouse_pipeline::events::{Event, Progress, format_stall};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::logs::LogWriter;
use super::model::{EventType, EventView, Job, JobState, ProgressView, ResultView, Slot, StageView, Time};
use super::outcome::Outcome;
use super::process::TERMINATE;
use super::rates::{CurrentRate, Rates};
use super::stop::Stop;
use super::store::jobs::{self, Report, Task};
use super::store::{Result, StoreError, attempts, events};
use super::worker::{Exit, Worker, WorkerOutput, WorkerStart, reports_no_memory};
use super::worker_protocol::{Message, STOPPED_EXIT_CODE, WorkerRequest, WorkerTask};
use super::{Service, bounds, dataset_query, metrics as service_metrics, pending_cancels};
use stillhouse_pipeline::progress_estimate::{Estimator, RunStart};

const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// Seconds to wait, after a worker has ended, for child processes that hold its pipes: without output, and in total.
const MAX_SILENT_SECONDS: u32 = 5;
const MAX_LINGER_SECONDS: u32 = 120;
/// Interval between two tries to store what the full disk refused.
const DISK_RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Exit code of a Rust process that panicked.
const PANIC_EXIT_CODE: i32 = 101;
const STORE_INTERVAL: Duration = Duration::from_secs(5);

/// Runs the attempt and stores the job's next state.
pub async fn run_attempt(service: Arc<Service>, task: Task, gpu: Option<u32>, stop: watch::Receiver<Stop>) {
    let id = task.job_ref.id.clone();
    let mut attempt = Attempt::new(Arc::clone(&service), task, gpu, stop);
    let began = Instant::now();
    let outcome = match attempt.run().await {
        Ok(outcome) => outcome,
        Err(message) => Outcome::Crashed(message),
    };
    tracing::info!(job = %id, attempt = attempt.task.job_ref.attempt, outcome = ?outcome, "attempt ended");
    histogram!(service_metrics::ATTEMPT_SECONDS, "outcome" => outcome.name()).record(began.elapsed().as_secs_f64());
    // the loop must store the state, or the job would stay running without a worker
    while let Err(e) = attempt.store_end(&outcome).await {
        // the store has already logged a full disk
        if !matches!(e, StoreError::DiskFull(_)) {
            tracing::error!(job = %id, "cannot store how an attempt ended: {e}");
        }
        if matches!(e, StoreError::Inconsistent(_) | StoreError::NoJob(_)) {
            break;
        }
        tokio::time::sleep(DISK_RETRY_INTERVAL).await;
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
    current_rate: CurrentRate,
    rates: Rates,
    last_progress: Progress,
    progress_view: Option<ProgressView>,
    earlier_bytes: u64,
    bytes: u64,
    last_report: Option<Instant>,
    last_stored: Option<Instant>,
    failure: Option<Outcome>,
    finished: bool,
    /// Whether the worker's log says that an allocation failed.
    out_of_memory: bool,
    plan: Option<Plan>,
    /// Events that the full disk refused, oldest first. Until they are stored, nothing more is read from the worker, so
    /// they stay few: the worker blocks once its pipe is full.
    unstored_events: VecDeque<UnstoredEvent>,
}

/// The plan that the worker reported.
struct Plan {
    job_hash: String,
    splits: u64,
    committed: u64,
}

/// An event that is not stored yet.
#[derive(Clone)]
struct UnstoredEvent {
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
            current_rate: CurrentRate::default(),
            rates: Rates::default(),
            last_progress: Progress::default(),
            progress_view: None,
            earlier_bytes: 0,
            bytes: 0,
            last_report: None,
            last_stored: None,
            failure: None,
            finished: false,
            out_of_memory: false,
            plan: None,
            unstored_events: VecDeque::new(),
        }
    }

    async fn run(&mut self) -> Result<Outcome, String> {
        let id = self.task.job_ref.id.clone();
        histogram!(service_metrics::QUEUE_WAIT_SECONDS).record(self.task.waited_ms.max(0) as f64 / 1e3);
        match self.service.logs.open_writer(&id, self.task.job_ref.attempt).await {
            Ok(log) => self.log = Some(log),
            Err(e) => tracing::error!(job = %id, "cannot write its log: {e}"),
        }
        // the job may have been cancelled before its attempt could be stopped
        let (job_id, store) = (id.clone(), Arc::clone(&self.service.store));
        let state = store.read(move |c| jobs::get(c, &job_id)).await.map_err(|e| e.to_string())?.state;
        if state == JobState::Cancelling {
            return Ok(Outcome::Cancelled);
        }
        self.rates = self.load_rates().await;
        let scratch = self.service.scratch(id.as_str());
        let start = self.worker_start(scratch.clone());
        let started = tokio::task::spawn_blocking(move || Worker::start(&start).map(|worker| (worker, start.request)));
        let failed = |e: std::io::Error| format!("cannot start a worker: {e}");
        let (mut worker, request) = started.await.map_err(|e| e.to_string())?.map_err(failed)?;
        let (attempt, (process, began)) = (self.task.job_ref.attempt, worker.process_id_and_start());
        let mut stop = self.stop.clone();
        while let Err(e) = self.store_process(process, began).await {
            // a full disk is not the job's fault: wait for space
            let stopped = match e {
                StoreError::DiskFull(_) => tokio::select! {
                    why = stop_requested(&mut stop) => Some(Ok(stop_outcome(why))),
                    () = tokio::time::sleep(DISK_RETRY_INTERVAL) => None,
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
        let sent = tokio::task::spawn_blocking(move || worker.send_request(&request).map(|()| worker));
        let worker = sent.await.map_err(|e| e.to_string())?.map_err(failed)?;
        tracing::info!(job = %id, attempt, process, gpu = self.gpu, user = self.task.user, "attempt began");
        let mut outcome = self.supervise(worker).await;
        if let Ok(ended) = &outcome
            && let Some(finished) = self.unreported_finish(ended).await
        {
            self.handle_event(finished).await;
            outcome = Ok(Outcome::Succeeded);
        }
        if let Err(e) = tokio::fs::remove_dir_all(&scratch).await {
            tracing::warn!(job = %id, "cannot remove {}: {e}", scratch.display());
        }
        outcome
    }

    /// Stores the worker's process id.
    async fn store_process(&self, process: i32, began: u64) -> Result<()> {
        let (seq, attempt, report) = (self.task.job_ref.seq, self.task.job_ref.attempt, self.report.clone());
        let noted = self.service.store.write(move |t, _| {
            attempts::set_process(t, seq, attempt, process, began)?;
            jobs::report(t, seq, &report, Time::now())
        });
        noted.await
    }

    fn worker_start(&self, scratch: std::path::PathBuf) -> WorkerStart {
        let config = &self.service.config;
        let visible_gpus = match (self.task.slot, self.gpu) {
            (Slot::AnyGpu, Some(gpu)) => Some(gpu.to_string()),
            // the job names its GPU itself, by the machine's ordinal
            (Slot::Gpu(_), _) => None,
            // hides all GPUs, so that `auto` does not take another job's
            _ => Some(String::new()),
        };
        WorkerStart {
            program: self.service.program.clone(),
            visible_gpus,
            endpoint: config.endpoint.clone(),
            request: WorkerRequest {
                work: WorkerTask::Run {
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

    async fn load_rates(&self) -> Rates {
        let id = self.task.job_ref.id.clone();
        let stored = self.service.store.read(move |c| jobs::rates(c, &id)).await.ok().flatten();
        stored.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    /// Reads the worker's output to its end, and stops the worker if needed.
    async fn supervise(&mut self, mut worker: Worker) -> Result<Outcome, String> {
        let limit = Duration::from_secs(self.task.time_limit_seconds);
        let deadline = tokio::time::sleep(limit);
        tokio::pin!(deadline);
        let mut stop = self.stop.clone();
        let mut stopping: Option<Outcome> = None;
        let mut kill_at: Option<tokio::time::Instant> = None;
        let stop_timeout = Duration::from_secs(u64::from(self.service.config.limits.cancel_seconds));
        let mut ticks = tokio::time::interval(Duration::from_secs(1));
        let mut disk_retries = tokio::time::interval(DISK_RETRY_INTERVAL);
        // ticks must not accumulate while nothing waits for the interval
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        disk_retries.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut silent_seconds, mut ended_seconds) = (0, 0);
        loop {
            let killing = async {
                match kill_at {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let mut reason = None;
            tokio::select! {
                output = worker.output.recv(), if self.unstored_events.is_empty() => match output {
                    Some(output) => {
                        silent_seconds = 0;
                        self.handle(output).await;
                    }
                    None => break,
                },
                _ = disk_retries.tick(), if !self.unstored_events.is_empty() => self.store_events().await,
                why = stop_requested(&mut stop), if stopping.is_none() => reason = Some(stop_outcome(why)),
                () = &mut deadline, if stopping.is_none() => reason = Some(Outcome::over_time_limit(limit)),
                // children of the worker may outlive it and hold its pipes
                _ = ticks.tick(), if self.unstored_events.is_empty() && worker.has_ended() => {
                    worker.kill();
                    silent_seconds = if worker.output.is_empty() { silent_seconds + 1 } else { 0 };
                    ended_seconds += 1;
                    if silent_seconds > MAX_SILENT_SECONDS || ended_seconds > MAX_LINGER_SECONDS {
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
                kill_at = Some(tokio::time::Instant::now() + stop_timeout);
            }
        }
        let exit = reap(worker).await?;
        Ok(self.outcome(exit, stopping))
    }

    /// The outcome of a worker whose shards exceed the job's output limit.
    fn over_output_limit(&self) -> Option<Outcome> {
        let (bytes, limit) = (self.earlier_bytes + self.bytes, self.task.output_limit_bytes);
        let over = bytes > limit && !self.finished;
        over.then(|| Outcome::OverLimit(format!("its shards take {bytes} bytes, more than its limit of {limit} bytes")))
    }

    fn outcome(&mut self, exit: Exit, stopping: Option<Outcome>) -> Outcome {
        match (exit, self.failure.take(), stopping) {
            // `_SUCCESS` exists, however the worker ended afterwards
            _ if self.finished => Outcome::Succeeded,
            (_, _, Some(stopped)) => stopped,
            (_, Some(failed), None) => failed,
            // something else stopped it: a machine that shuts down signals the service and its workers in any order
            (Exit::Code(STOPPED_EXIT_CODE) | Exit::Signal(TERMINATE), None, None) => Outcome::Interrupted,
            (Exit::Signal(libc::SIGABRT) | Exit::Code(PANIC_EXIT_CODE), None, None) if self.out_of_memory => {
                Outcome::out_of_memory(self.service.config.capacity.worker_gigabytes)
            }
            (exit, None, None) => Outcome::Crashed(exit.describe()),
        }
    }

    /// The worker's final event, if it was stopped before it could send it but the data set is complete. Asks the data
    /// set itself.
    async fn unreported_finish(&self, outcome: &Outcome) -> Option<Event> {
        let stopped = matches!(outcome, Outcome::Cancelled | Outcome::OverLimit(_) | Outcome::Crashed(_));
        let plan = self.plan.as_ref().filter(|plan| stopped && plan.committed >= plan.splits)?;
        let (file, folder) = (self.task.file.clone(), self.task.folder.clone());
        match dataset_query::query_finished(&self.service, file, folder, plan.job_hash.clone()).await? {
            Event::JobFinished { output, job_hash, rows, tokens, bytes, went_in, .. } => {
                let seconds = self.progress_view.as_ref().map_or(0.0, |view| view.seconds);
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

    async fn handle(&mut self, output: WorkerOutput) {
        match output {
            WorkerOutput::Log(line) => {
                self.out_of_memory |= reports_no_memory(&line);
                let Some(log) = self.log.take() else { return };
                let added = log.add(line, Time::now()).await.and_then(|(log, added)| {
                    self.log = Some(log);
                    added
                });
                if let Err(e) = added {
                    // an error comes once per series; the log itself later holds the number of lost lines
                    tracing::error!(job = %self.task.job_ref.id, "cannot write its log: {e}");
                }
            }
            WorkerOutput::Invalid(what) => {
                tracing::warn!(job = %self.task.job_ref.id, "its worker sent an invalid message: {what}")
            }
            WorkerOutput::Message(message) => match *message {
                Message::Event(event) => self.handle_event(event).await,
                Message::Failed { kind, message, problems, retryable } => {
                    let (message, problems) = (bounds::truncate_message(message), bounds::limit_problems(problems));
                    self.failure = Some(match kind == ErrorKind::Busy.name() {
                        true => Outcome::OutputBusy(message),
                        false => Outcome::Failed { message, problems, retryable },
                    });
                }
                Message::Answer(_) | Message::OtherDataSet => {}
            },
        }
    }

    async fn handle_event(&mut self, event: Event) {
        let Some((event, data)) = truncated(&event) else { return };
        match event {
            Event::Progress(progress) => self.handle_progress(progress).await,
            Event::Preparing { .. } => self.add_event(EventType::Preparing, data).await,
            Event::Warning { .. } => self.add_event(EventType::Warning, data).await,
            Event::Stalled { seconds, at_work, splits } => {
                let message = format_stall(seconds, at_work, &splits);
                self.add_event(EventType::Warning, json!({ "message": message })).await;
            }
            Event::SplitStarted { .. } => self.add_event(EventType::SplitStarted, data).await,
            Event::JobStarted { output, splits, splits_done, bytes_done, input_bytes, teacher, job_hash, .. } => {
                self.plan = Some(Plan { job_hash, splits, committed: splits_done });
                self.earlier_bytes = bytes_done;
                let start = RunStart { splits_done, input_bytes, teacher: teacher.is_some() };
                self.estimator = Some((Estimator::new(start), teacher.is_some()));
                self.report.teacher = teacher;
                self.report.output = Some(output);
                self.add_event(EventType::Started, data).await;
                self.store_progress().await;
            }
            Event::SplitCommitted { bytes, .. } => {
                counter!("stillhouse_splits_committed_total").increment(1);
                counter!("stillhouse_shard_bytes_total").increment(bytes);
                self.bytes += bytes;
                if let Some(plan) = &mut self.plan {
                    plan.committed += 1;
                }
                self.add_event(EventType::SplitCommitted, data).await;
            }
            Event::JobFinished { output, job_hash: _, rows, tokens, bytes, seconds, already_done, went_in } => {
                self.finished = true;
                self.report.output = Some(output);
                self.report.result = Some(ResultView::new([rows, tokens, bytes], seconds, already_done, went_in));
                if let Some(view) = &mut self.progress_view {
                    view.seconds_left = None;
                    view.bytes = bytes;
                }
                self.add_event(EventType::Finished, data).await;
                self.store_progress().await;
            }
            Event::ExportStarted { .. } | Event::ExportProgress { .. } => {}
        }
    }

    async fn handle_progress(&mut self, now: Progress) {
        service_metrics::count_progress(&self.last_progress, &now);
        let now_time = Time::now();
        let with_teacher = self.estimator.as_ref().is_some_and(|(_, teacher)| *teacher);
        let tokens = if with_teacher { now.teacher_tokens } else { now.tokens };
        let seconds_left = self.estimator.as_mut().and_then(|(estimator, _)| estimator.update(&now).seconds_left);
        self.rates.record(now_time, self.task.job_ref.attempt, tokens, now.splits_done);
        let tokens_per_second = self.current_rate.record(now.seconds, tokens);
        self.service.running.set_rate(&self.task.job_ref.id, self.task.job_ref.attempt, tokens_per_second);
        let first = self.progress_view.is_none();
        self.progress_view = Some(ProgressView {
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
            bytes: self.earlier_bytes + self.bytes,
            tokens_per_second,
            seconds_left,
            stages: now.stages.iter().map(StageView::from).collect(),
        });
        self.last_progress = now;
        if self.last_report.is_none_or(|at| at.elapsed() >= REPORT_INTERVAL) {
            self.last_report = Some(Instant::now());
            let job_ref = &self.task.job_ref;
            self.service.store.publish(EventView {
                seq: None,
                job: job_ref.id.clone(),
                time: now_time,
                attempt: job_ref.attempt,
                kind: EventType::Progress,
                data: json!(self.progress_view),
            });
        }
        if first || self.last_stored.is_none_or(|stored| stored.elapsed() >= STORE_INTERVAL) {
            self.store_progress().await;
        }
    }

    /// Stores progress and rates. If the disk is full the next call stores them, at the latest the one for the job's
    /// next state.
    async fn store_progress(&mut self) {
        self.last_stored = Some(Instant::now());
        self.update_report();
        let (seq, report) = (self.task.job_ref.seq, self.report.clone());
        match self.service.store.write(move |t, _| jobs::report(t, seq, &report, Time::now())).await {
            Ok(()) | Err(StoreError::DiskFull(_)) => {}
            Err(e) => tracing::error!(job = %self.task.job_ref.id, "cannot store its progress: {e}"),
        }
    }

    fn update_report(&mut self) {
        self.report.progress = self.progress_view.as_ref().map(|v| json!(v));
        self.report.rates = Some(json!(self.rates));
    }

    async fn add_event(&mut self, kind: EventType, data: Value) {
        self.unstored_events.push_back(UnstoredEvent { kind, data, time: Time::now() });
        self.store_events().await;
    }

    /// Stores waiting events in order, until the disk is full.
    async fn store_events(&mut self) {
        while let Some(next) = self.unstored_events.front() {
            match self.store_event(next.clone()).await {
                Ok(()) => {}
                Err(StoreError::DiskFull(_)) => return,
                Err(e) => tracing::error!(job = %self.task.job_ref.id, "cannot store an event: {e}"),
            }
            self.unstored_events.pop_front();
        }
    }

    async fn store_event(&self, UnstoredEvent { kind, data, time }: UnstoredEvent) -> Result<()> {
        let (job_ref, most) = (self.task.job_ref.clone(), self.service.config.limits.events_per_job);
        let stored = self.service.store.write(move |t, appended| {
            // the limit applies to kinds of which a job may have many, such as one per split; clients need all others
            let many = matches!(kind, EventType::SplitStarted | EventType::SplitCommitted | EventType::Preparing);
            if !many || jobs::event_count(t, job_ref.seq)? < most {
                // only a later attempt can begin a split again
                if kind == EventType::SplitStarted && job_ref.attempt > 1 && events::was_started(t, job_ref.seq, &data)?
                {
                    counter!("stillhouse_split_retries_total").increment(1);
                }
                appended.push(events::add(t, &job_ref, kind, data, time)?);
            }
            Ok(())
        });
        stored.await
    }

    /// Stores the attempt's end and the job's next state.
    async fn store_end(&mut self, outcome: &Outcome) -> Result<()> {
        self.store_events().await;
        pending_cancels::store_pending_of(&self.service, &self.task.job_ref.id).await?;
        self.update_report();
        let stopping = *self.service.stopping.borrow();
        let next = outcome.next(&self.task, &self.service.config.retry, stopping);
        let (task, interruptions) = (self.task.clone(), self.service.config.limits.interruptions);
        let report = self.report.clone();
        let changed = self.service.store.write(move |t, appended| {
            let now = Time::now();
            let (job_ref, state) = jobs::job_ref(t, &task.job_ref.id)?;
            jobs::report(t, job_ref.seq, &report, now)?;
            attempts::end(t, job_ref.seq, next.outcome, next.reason.as_deref(), now)?;
            let mut to = next.state;
            let mut reason = next.reason;
            if state == JobState::Cancelling && to != JobState::Succeeded {
                // the job counts as cancelled, whatever else happened; the stored reason names the user
                to = JobState::Cancelled;
                reason = jobs::get(t, &job_ref.id)?.reason;
            } else if state == JobState::Running && to == JobState::Cancelled {
                // the cancel was for an earlier attempt
                to = JobState::Queued;
            } else if let Some(failure) = &next.failure {
                attempts::fail(t, job_ref.seq, failure, next.not_before)?;
            } else if let Some(not_before) = next.not_before {
                attempts::wait_until(t, job_ref.seq, not_before)?;
            } else if to == JobState::Queued && attempts::count_interruption(t, job_ref.seq)? > interruptions {
                to = JobState::Failed;
                reason = Some(format!("the service was stopped in each of {interruptions} attempts"));
            }
            jobs::transition(t, &job_ref, state, to, reason.as_deref(), now, appended)?;
            jobs::get(t, &job_ref.id)
        });
        let Job { state, started_at, finished_at, .. } = changed.await?;
        if let (Some(from), Some(to)) = (started_at, finished_at) {
            histogram!(service_metrics::JOB_SECONDS, "state" => state.name()).record(to.seconds_since(from));
        }
        counter!("stillhouse_attempts_total", "outcome" => outcome.name()).increment(1);
        if state == JobState::Retrying {
            self.service.wake.notify_one();
        }
        Ok(())
    }
}

/// An event and its data with truncated texts and lists.
fn truncated(event: &Event) -> Option<(Event, Value)> {
    let mut data = serde_json::to_value(event).ok()?;
    bounds::truncate_event(&mut data);
    let event = serde_json::from_value(data.clone()).ok()?;
    data.as_object_mut()?.remove("event");
    Some((event, data))
}

/// The exit of a worker whose pipes are closed. Kills it if it does not end within five seconds.
async fn reap(worker: Worker) -> Result<Exit, String> {
    for _ in 0..100 {
        if worker.has_ended() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    worker.kill();
    worker.wait().await.map_err(|e| format!("cannot wait for the end of the worker: {e}"))
}

async fn stop_requested(stop: &mut watch::Receiver<Stop>) -> Stop {
    let why = stop.wait_for(|s| *s != Stop::No).await.ok().map(|why| *why);
    match why {
        Some(why) => why,
        // the sender is gone, so no request can come
        None => std::future::pending().await,
    }
}

fn stop_outcome(why: Stop) -> Outcome {
    if why == Stop::Cancel { Outcome::Cancelled } else { Outcome::Interrupted }
}
