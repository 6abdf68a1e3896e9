//! Runs a job on a cluster: submits it, watches the output for commits, and polls the scheduler for the job's status.
//!
//! ```text
//!   submit ─► every 250 ms: status ─► running ─► list the commit records now and then; report the new ones
//!                                  ├► done    ─► last look at the output: every split needs its record, else an error
//!                                  ├► running, and no split left for 30 s ─► treated as done; the job is cancelled
//!                                  ├► failed  ─► the task's own error
//!                                  └► the run has to stop ─► cancel the job at the scheduler
//! ```
//!
//! The results that tasks return to Ballista stay with the executors and are never fetched. A task commits its record
//! at the output before it ends, so an executor that dies afterwards loses nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballista_core::config::{BALLISTA_ADAPTIVE_PLANNER_ENABLED, BALLISTA_JOB_NAME};
use ballista_core::serde::protobuf::execute_query_params::Query;
use ballista_core::serde::protobuf::job_status::Status as JobState;
use ballista_core::serde::protobuf::scheduler_grpc_client::SchedulerGrpcClient;
use ballista_core::serde::protobuf::{
    CancelJobParams, ExecuteQueryParams, GetJobStatusParams, KeyValuePair, execute_query_result,
};
use ballista_core::version::insert_version_header;
use datafusion::common::DataFusionError;
use datafusion_proto::physical_plan::AsExecutionPlan;
use datafusion_proto::protobuf::PhysicalPlanNode;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use stillhouse_pipeline::driver::{Driver, DriverEvent, EventSink, PendingSplits, SplitTask, TaskSpec};
use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use stillhouse_pipeline::output::{Warning, WorkerReport};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::spec::Engine;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::codec::Codec;
use crate::node::{self, Job};
use crate::scheduler_client::{self, SchedulerAddress};
use crate::token::Token;
use crate::{failure, sealed_spec};

/// Interval between two status requests to the scheduler.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The run gives up on a scheduler that has not answered for this long.
const SCHEDULER_TIMEOUT: Duration = Duration::from_secs(20);
/// Shortest interval between two looks at the output.
const MIN_LIST_INTERVAL: Duration = Duration::from_secs(1);
/// After a look the run waits at least this many times as long as the look took.
const WAIT_FACTOR: u32 = 3;
/// Commit records that are read concurrently.
const CONCURRENT_READS: usize = 16;
/// How long the run waits for another executor when all active ones report that they cannot make its splits.
const UNABLE_TIMEOUT: Duration = Duration::from_mins(2);
/// Most distinct executor warnings that a run passes on.
const MAX_WARNINGS: usize = 1_000;
/// Most executors that the run names one by one as unable to make its splits.
const MAX_NAMED: usize = 8;
/// Time without a commit after which the run warns of possible reasons. It doubles with each warning.
const FIRST_WARNING_AFTER: Duration = Duration::from_secs(30);
/// The run fails when no executor has reported on its job for this long.
const NO_EXECUTOR_TIMEOUT: Duration = Duration::from_hours(1);
/// How long the run waits for the scheduler once every split has its record. An executor that lost its connection may
/// report the end of a task late or never.
const SETTLE_TIME: Duration = Duration::from_secs(30);

/// The cluster behind a scheduler.
struct ClusterDriver {
    scheduler: SchedulerAddress,
    token: Token,
}

/// Opens the driver for a job's `engine` section.
///
/// # Errors
/// When no scheduler is named, the environment has no token, or the CA file is not valid.
pub fn connect(engine: &Engine) -> Result<Arc<dyn Driver>> {
    let missing = || PipelineError::new(ErrorKind::Usage, "engine.scheduler: is required and missing");
    let scheduler = SchedulerAddress::parse(engine.scheduler.as_deref().ok_or_else(missing)?)?;
    Ok(Arc::new(ClusterDriver { scheduler, token: Token::load(None)? }))
}

impl Driver for ClusterDriver {
    fn drive<'a>(
        &'a self,
        spec: &'a TaskSpec,
        work: &'a PendingSplits,
        events: EventSink<'a>,
    ) -> BoxFuture<'a, Result<()>> {
        async move {
            if work.splits.is_empty() {
                return Ok(());
            }
            check_not_stopped(work)?;
            let mut submitted = self.submit(spec, work).await?;
            let result = submitted.watch(work, events).await;
            if result.is_err() {
                work.stop.store(true, Ordering::Relaxed);
            }
            if !matches!(result, Ok(JobEnd::Reported)) {
                submitted.cancel().await;
            }
            result.map(drop)
        }
        .boxed()
    }
}

/// Returns an error once the run has to stop; the caller then cancels the job.
fn check_not_stopped(work: &PendingSplits) -> Result<()> {
    match work.stop.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(PipelineError::new(ErrorKind::Cancelled, "a signal stopped the run")),
    }
}

type Client = SchedulerGrpcClient<Channel>;

/// How a job ended.
enum JobEnd {
    /// The scheduler reported it.
    Reported,
    /// Every split has its record, but the scheduler still reports the job as running.
    Observed,
}

/// A job submitted to a scheduler.
struct SubmittedJob<'a> {
    scheduler: &'a SchedulerAddress,
    client: Client,
    job_id: String,
}

impl ClusterDriver {
    async fn submit(&self, spec: &TaskSpec, work: &PendingSplits) -> Result<SubmittedJob<'_>> {
        let channel = self.scheduler.connect(&self.token).await?;
        let client = SchedulerGrpcClient::new(channel);
        let mut client = client
            .max_encoding_message_size(scheduler_client::MAX_MESSAGE_BYTES)
            .max_decoding_message_size(scheduler_client::MAX_MESSAGE_BYTES);
        let plan = self.plan(spec, work).map_err(PipelineError::from_plan)?;
        let setting = |key: &str, value: &str| KeyValuePair { key: key.into(), value: Some(value.into()) };
        let (session, operation) = (uuid::Uuid::new_v4().to_string(), uuid::Uuid::new_v4().to_string());
        let query = ExecuteQueryParams {
            query: Some(Query::PhysicalPlan(plan)),
            settings: vec![
                // one split per task: otherwise a task takes one split per slot of its executor and ends only with the
                // last
                setting("ballista.scheduler.max_partitions_per_task", "1"),
                // the plan has nothing to adapt
                setting(BALLISTA_ADAPTIVE_PLANNER_ENABLED, "false"),
                setting(BALLISTA_JOB_NAME, &spec.ticket.job_hash),
            ],
            session_id: session,
            operation_id: operation,
        };
        let mut request = Request::new(query);
        insert_version_header(request.metadata_mut());
        let response = client.execute_query(request).await.map_err(|e| self.scheduler_error(&e))?.into_inner();
        match response.result {
            Some(execute_query_result::Result::Success(success)) => {
                Ok(SubmittedJob { scheduler: &self.scheduler, client, job_id: success.job_id })
            }
            Some(execute_query_result::Result::Failure(failed)) => Err(failure::from_job_error(&format!("{failed:?}"))),
            None => Err(failure::from_job_error("the scheduler has answered nothing")),
        }
    }

    fn plan(&self, spec: &TaskSpec, work: &PendingSplits) -> Result<Vec<u8>, DataFusionError> {
        let internal = |e: String| DataFusionError::Internal(e);
        let bytes = sealed_spec::to_bytes(spec, &self.token).map_err(internal)?;
        let job = Job { bytes, spec: spec.clone(), token: self.token.clone(), executor_jobs: None };
        let plan = node::plan(job, &work.splits)?;
        let codec = Codec::new(self.token.clone(), None);
        let mut encoded = Vec::new();
        PhysicalPlanNode::try_from_physical_plan(plan, &codec)?.try_encode(&mut encoded)?;
        Ok(encoded)
    }

    fn scheduler_error(&self, status: &Status) -> PipelineError {
        scheduler_error(&self.scheduler, status)
    }
}

/// Turns a scheduler's status into an error. The message of a missing token or another build comes from the scheduler
/// itself.
pub(crate) fn scheduler_error(scheduler: &SchedulerAddress, status: &Status) -> PipelineError {
    let (kind, retryable) = match status.code() {
        Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument => (ErrorKind::Usage, false),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => (ErrorKind::Output, true),
        _ => (ErrorKind::Output, false),
    };
    // a source means that the scheduler did not answer: the connection broke, or the answer was of another protocol
    let is_broken = std::error::Error::source(status).is_some() && status.code() != Code::Unavailable;
    let hint = match is_broken && !scheduler.uses_tls() {
        true => "; valid: https://host:port where it speaks TLS",
        false => "",
    };
    let error = PipelineError::new(kind, format!("the scheduler at {scheduler}: {}{hint}", status.message()));
    if retryable { error.retryable() } else { error }
}

impl SubmittedJob<'_> {
    async fn watch(&mut self, work: &PendingSplits, events: EventSink<'_>) -> Result<JobEnd> {
        let mut commits = CommitWatcher::new(work);
        let mut last_answer = Instant::now();
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            check_not_stopped(work)?;
            let params = GetJobStatusParams { job_id: self.job_id.clone() };
            let state = match self.client.get_job_status(params).await {
                Ok(response) => response.into_inner().status.and_then(|status| status.status),
                Err(e) if last_answer.elapsed() < SCHEDULER_TIMEOUT => {
                    tracing::debug!("{e}");
                    continue;
                }
                Err(e) => return Err(self.scheduler_lost(e.message())),
            };
            last_answer = Instant::now();
            match state {
                Some(JobState::Successful(_)) => {
                    commits.poll(work, events).await?;
                    commits.check_complete(work, events)?;
                    return Ok(JobEnd::Reported);
                }
                Some(JobState::Failed(failed)) => {
                    // report earlier commits before the run fails
                    if let Err(e) = commits.poll(work, events).await {
                        tracing::debug!("{e}");
                    }
                    return Err(failure::from_job_error(&failed.error));
                }
                Some(JobState::Queued(_) | JobState::Running(_)) => {
                    commits.poll_if_due(work, events).await?;
                    if commits.is_settled() {
                        commits.check_complete(work, events)?;
                        return Ok(JobEnd::Observed);
                    }
                }
                // the scheduler restarted; Ballista's keeps no state on disk
                None => return Err(self.scheduler_lost("it no longer has this job")),
            }
        }
    }

    fn scheduler_lost(&self, why: &str) -> PipelineError {
        let message = format!(
            "the scheduler at {} was lost: {why}; committed splits stay: run the same command again to resume",
            self.scheduler
        );
        PipelineError::new(ErrorKind::Output, message).retryable()
    }

    async fn cancel(&mut self) {
        let params = CancelJobParams { job_id: self.job_id.clone() };
        if let Err(e) = self.client.cancel_job(params).await {
            // the executors notice it themselves, because the run releases the output
            tracing::debug!("the job at the scheduler was not cancelled: {e}");
        }
    }
}

/// The commits of a run, as the output shows them.
struct CommitWatcher {
    remaining: BTreeSet<SplitId>,
    /// Splits whose shards are made again: their records exist from the start, so no new commit shows.
    remade: BTreeSet<SplitId>,
    /// Splits reported as begun, each with the executor reported at that time.
    started: BTreeMap<SplitId, Option<String>>,
    dataset_splits: BTreeMap<SplitId, String>,
    /// Latest report by name, and when it last changed. The report of a dead executor stays the same.
    last_reports: BTreeMap<String, (WorkerReport, Instant)>,
    last_listed: Instant,
    /// Duration of the last look.
    list_duration: Duration,
    last_commit: Instant,
    /// When an executor last reported work on one of the `remade` splits.
    last_remake: Instant,
    warn_after: Duration,
    /// Number of the last warning read from each report.
    last_warnings: BTreeMap<String, u64>,
    /// Warnings passed on, from any executor.
    warnings: BTreeSet<String>,
    /// Executors reported as unable to make these splits, with the reason.
    unable_executors: BTreeMap<String, String>,
    last_unable: Instant,
}

impl CommitWatcher {
    fn new(work: &PendingSplits) -> Self {
        let splits = |is_remade: bool| {
            let tasks = work.splits.iter().filter(move |task| task.was.is_some() == is_remade);
            tasks.map(|task| task.split).collect()
        };
        let now = Instant::now();
        let dataset_splits = work.splits.iter().map(|task| (task.split, task.dataset_split.clone())).collect();
        Self {
            remaining: splits(false),
            remade: splits(true),
            started: BTreeMap::new(),
            dataset_splits,
            last_reports: BTreeMap::new(),
            last_listed: now,
            list_duration: Duration::ZERO,
            last_commit: now,
            last_remake: now,
            warn_after: FIRST_WARNING_AFTER,
            last_warnings: BTreeMap::new(),
            warnings: BTreeSet::new(),
            unable_executors: BTreeMap::new(),
            last_unable: now,
        }
    }

    /// Whether every split has had its record for [`SETTLE_TIME`]. Never true when shards are made again: their records
    /// exist from the start.
    fn is_settled(&self) -> bool {
        self.remaining.is_empty() && self.remade.is_empty() && self.last_commit.elapsed() >= SETTLE_TIME
    }

    async fn poll_if_due(&mut self, work: &PendingSplits, events: EventSink<'_>) -> Result<()> {
        if self.last_listed.elapsed() >= MIN_LIST_INTERVAL.max(self.list_duration * WAIT_FACTOR) {
            self.poll(work, events).await?;
        }
        // the run itself reports splits that make no progress
        let is_any_made = |of: &BTreeSet<SplitId>| {
            self.last_reports.values().any(|(report, _)| report.splits.iter().any(|at| of.contains(&at.split)))
        };
        let at_work = is_any_made(&self.remaining);
        if is_any_made(&self.remade) {
            self.last_remake = Instant::now();
        }
        let idle = self.last_commit.max(self.last_remake).elapsed();
        if !at_work && idle >= self.warn_after {
            let seconds = idle.as_secs();
            events(DriverEvent::Warning(format!(
                "no executor has made a split of this job for {seconds} s: none may have a free slot (`stillhouse executor` starts one), or all get ready"
            )))?;
            self.warn_after *= 2;
        }
        if self.last_reports.is_empty() && self.started.is_empty() && idle >= NO_EXECUTOR_TIMEOUT {
            let message = format!(
                "no executor has told of this job within {} minutes; valid: executors of this scheduler (`stillhouse executor`) with a free \
                 slot, then the same command again",
                NO_EXECUTOR_TIMEOUT.as_secs() / 60
            );
            return Err(PipelineError::new(ErrorKind::Output, message).retryable());
        }
        Ok(())
    }

    /// Reports that a split began: once, and again for each other executor that takes it over.
    fn report_start(&mut self, split: SplitId, executor: Option<String>, events: EventSink<'_>) -> Result<()> {
        let Some(dataset_split) = self.dataset_splits.get(&split) else { return Ok(()) };
        let is_new = match (self.started.get(&split), &executor) {
            (None, _) => true,
            (Some(known), Some(now)) => known.as_ref() != Some(now),
            (Some(_), None) => false,
        };
        if is_new {
            self.started.insert(split, executor.clone());
            events(DriverEvent::SplitStarted { split, dataset_split: dataset_split.clone(), executor })?;
        }
        Ok(())
    }

    /// Reads the reports of executors. Where several name a split, the one whose report changed last makes it.
    fn read_reports(&mut self, reports: &BTreeMap<String, WorkerReport>, events: EventSink<'_>) -> Result<()> {
        let now = Instant::now();
        for (name, report) in reports {
            match self.last_reports.get(name) {
                Some((previous, _)) if previous == report => {}
                _ => drop(self.last_reports.insert(name.clone(), (report.clone(), now))),
            }
        }
        self.last_reports.retain(|name, _| reports.contains_key(name));
        let mut makers: BTreeMap<SplitId, (Instant, &str)> = BTreeMap::new();
        for (report, changed_at) in self.last_reports.values() {
            for split in report.splits.iter().map(|at| at.split).filter(|split| self.remaining.contains(split)) {
                let maker = makers.entry(split).or_insert((*changed_at, &report.worker));
                *maker = (*maker).max((*changed_at, &report.worker));
            }
        }
        let makers: Vec<_> = makers.into_iter().map(|(split, (_, maker))| (split, maker.to_owned())).collect();
        makers.into_iter().try_for_each(|(split, maker)| self.report_start(split, Some(maker), events))
    }

    /// Passes on the warnings of executors, each text once.
    fn report_warnings(&mut self, reports: &BTreeMap<String, WorkerReport>, events: EventSink<'_>) -> Result<()> {
        for (name, report) in reports {
            let last = self.last_warnings.entry(name.clone()).or_default();
            let known = *last;
            for Warning { number, message } in report.warnings.iter().filter(|warning| warning.number > known) {
                if *number > *last + 1 {
                    let left_out = number - *last - 1;
                    events(DriverEvent::Warning(format!(
                        "executor {}: {left_out} more warnings, in its log",
                        report.worker
                    )))?;
                }
                *last = *number;
                if self.warnings.len() < MAX_WARNINGS && self.warnings.insert(message.clone()) {
                    events(DriverEvent::Warning(format!("executor {}: {message}", report.worker)))?;
                    if self.warnings.len() == MAX_WARNINGS {
                        events(DriverEvent::Warning(
                            "what executors warn of from here on is in their logs only".into(),
                        ))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reports the executors that pass the splits on. Fails once only such executors are active.
    fn report_unable_executors(
        &mut self,
        reports: &BTreeMap<String, WorkerReport>,
        events: EventSink<'_>,
    ) -> Result<()> {
        for report in reports.values() {
            let Some(why) = &report.cannot else { continue };
            if self.unable_executors.insert(report.worker.clone(), why.clone()).is_some() {
                continue;
            }
            self.last_unable = Instant::now();
            match self.unable_executors.len() {
                n if n <= MAX_NAMED => {
                    events(DriverEvent::Warning(format!(
                        "executor {} passes the splits of this job on: {why}",
                        report.worker
                    )))?;
                }
                n if n == MAX_NAMED + 1 => events(DriverEvent::Warning("other executors pass them on too".into()))?,
                _ => {}
            }
        }
        // an unchanged report belongs to an executor that died, left, or works on other jobs
        let fresh = self.last_reports.values().filter(|(_, changed_at)| changed_at.elapsed() < UNABLE_TIMEOUT);
        let others = fresh.filter(|(report, _)| report.cannot.is_none()).count();
        if self.unable_executors.is_empty() || others > 0 || self.last_unable.elapsed() < UNABLE_TIMEOUT {
            return Ok(());
        }
        let (name, why) = self.unable_executors.first_key_value().unzip();
        let message = format!(
            "no executor can make the splits of this job: {} have said so, and for {} s nobody else was at them; of executor {}: {}; valid: \
             an executor that can and has a free slot, then the same command again",
            self.unable_executors.len(),
            UNABLE_TIMEOUT.as_secs(),
            name.map_or("", String::as_str),
            why.map_or("", String::as_str)
        );
        Err(PipelineError::new(ErrorKind::Model, message).retryable())
    }

    /// Looks at the output. Cost: two listings, one small request per executor, and two per new commit.
    async fn poll(&mut self, work: &PendingSplits, events: EventSink<'_>) -> Result<()> {
        let started_at = Instant::now();
        let reports = work.output.reports().await?;
        self.read_reports(&reports, events)?;
        self.report_warnings(&reports, events)?;
        self.report_unable_executors(&reports, events)?;
        events(DriverEvent::WorkerReports(reports))?;
        let committed = work.output.committed_splits().await?;
        let new: Vec<SplitId> = self.remaining.intersection(&committed).copied().collect();
        let mut records =
            futures::stream::iter(new).map(|split| work.output.committed_readonly(split)).buffered(CONCURRENT_READS);
        while let Some(record) = records.next().await {
            // a record whose upload is still being completed shows at the next look
            let Some(record) = record? else { continue };
            self.remaining.remove(&record.split);
            self.report_start(record.split, None, events)?;
            (self.last_commit, self.warn_after) = (Instant::now(), FIRST_WARNING_AFTER);
            events(DriverEvent::Committed(Box::new(record)))?;
        }
        (self.last_listed, self.list_duration) = (Instant::now(), started_at.elapsed());
        Ok(())
    }

    /// Fails if a split has no record, then reports the shards that were made again.
    fn check_complete(&self, work: &PendingSplits, events: EventSink<'_>) -> Result<()> {
        if let Some(split) = self.remaining.first() {
            let message = format!(
                "{}: the cluster says that all is done, and split {} is not there; valid: an output that all executors and this machine share",
                work.output, split.0
            );
            return Err(PipelineError::new(ErrorKind::Output, message));
        }
        let remade_record = |task: &SplitTask| task.was.clone();
        work.splits
            .iter()
            .filter_map(remade_record)
            .try_for_each(|record| events(DriverEvent::Committed(Box::new(record))))
    }
}

#[cfg(test)]
mod tests;
