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
use stillhouse_pipeline::driver::{Driver, EventSink, SplitTask, Step, TaskSpec, Work};
use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use stillhouse_pipeline::output::{AtWork, Warning};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::spec::Engine;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use crate::codec::Codec;
use crate::node::{self, Job};
use crate::token::Token;
use crate::wire::{self, Scheduler};
use crate::{failure, order};

/// Interval between two status requests to the scheduler.
const ASKS: Duration = Duration::from_millis(250);
/// The run gives up on a scheduler that has not answered for this long.
const GONE: Duration = Duration::from_secs(20);
/// Shortest interval between two looks at the output.
const LOOKS: Duration = Duration::from_secs(1);
/// After a look the run waits at least this many times as long as the look took.
const SHARE: u32 = 3;
/// Commit records that are read concurrently.
const RECORDS: usize = 16;
/// How long the run waits for another executor when all active ones report that they cannot make its splits.
const OTHERS: Duration = Duration::from_mins(2);
/// Most distinct executor warnings that a run passes on.
const MOST_WARNINGS: usize = 1_000;
/// Most executors that the run names one by one as unable to make its splits.
const MOST_NAMED: usize = 8;
/// Time without a commit after which the run warns of possible reasons. It doubles with each warning.
const QUIET: Duration = Duration::from_secs(30);
/// The run fails when no executor has reported on its job for this long.
const NOBODY: Duration = Duration::from_hours(1);
/// How long the run waits for the scheduler once every split has its record. An executor that lost its connection may
/// report the end of a task late or never.
const SETTLES: Duration = Duration::from_secs(30);

/// The cluster behind a scheduler.
struct Cluster {
    scheduler: Scheduler,
    token: Token,
}

/// Opens the driver for a job's `engine` section.
///
/// # Errors
/// When no scheduler is named, the environment has no token, or the CA file is not valid.
pub fn connect(engine: &Engine) -> Result<Arc<dyn Driver>> {
    let missing = || PipelineError::new(ErrorKind::Usage, "engine.scheduler: is required and missing");
    let scheduler = Scheduler::find(engine.scheduler.as_deref().ok_or_else(missing)?)?;
    Ok(Arc::new(Cluster { scheduler, token: Token::find(None)? }))
}

impl Driver for Cluster {
    fn drive<'a>(&'a self, spec: &'a TaskSpec, work: &'a Work, tell: EventSink<'a>) -> BoxFuture<'a, Result<()>> {
        async move {
            if work.splits.is_empty() {
                return Ok(());
            }
            is_wanted(work)?;
            let mut submitted = self.submit(spec, work).await?;
            let ended = submitted.watch(work, tell).await;
            if ended.is_err() {
                work.stop.store(true, Ordering::Relaxed);
            }
            if !matches!(ended, Ok(End::Told)) {
                submitted.cancel().await;
            }
            ended.map(drop)
        }
        .boxed()
    }
}

/// Returns an error once the run has to stop; the caller then cancels the job.
fn is_wanted(work: &Work) -> Result<()> {
    match work.stop.load(Ordering::Relaxed) {
        false => Ok(()),
        true => Err(PipelineError::new(ErrorKind::Cancelled, "the run was told to stop")),
    }
}

type Client = SchedulerGrpcClient<Channel>;

/// How a job ended.
enum End {
    /// The scheduler reported it.
    Told,
    /// Every split has its record, but the scheduler still reports the job as running.
    Seen,
}

/// A job submitted to a scheduler.
struct Submitted<'a> {
    scheduler: &'a Scheduler,
    client: Client,
    job: String,
}

impl Cluster {
    async fn submit(&self, spec: &TaskSpec, work: &Work) -> Result<Submitted<'_>> {
        let channel = self.scheduler.connect(&self.token).await?;
        let client = SchedulerGrpcClient::new(channel);
        let mut client =
            client.max_encoding_message_size(wire::LARGEST_MESSAGE).max_decoding_message_size(wire::LARGEST_MESSAGE);
        let plan = self.plan(spec, work).map_err(PipelineError::of_plan)?;
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
        let answer = client.execute_query(request).await.map_err(|e| self.refused(&e))?.into_inner();
        match answer.result {
            Some(execute_query_result::Result::Success(success)) => {
                Ok(Submitted { scheduler: &self.scheduler, client, job: success.job_id })
            }
            Some(execute_query_result::Result::Failure(failed)) => Err(failure::of_job(&format!("{failed:?}"))),
            None => Err(failure::of_job("the scheduler has answered nothing")),
        }
    }

    fn plan(&self, spec: &TaskSpec, work: &Work) -> Result<Vec<u8>, DataFusionError> {
        let other = |e: String| DataFusionError::Internal(e);
        let bytes = order::to_bytes(spec, &self.token).map_err(other)?;
        let job = Job { bytes, order: spec.clone(), token: self.token.clone(), place: None };
        let plan = node::plan(job, &work.splits)?;
        let codec = Codec::new(self.token.clone(), None);
        let mut encoded = Vec::new();
        PhysicalPlanNode::try_from_physical_plan(plan, &codec)?.try_encode(&mut encoded)?;
        Ok(encoded)
    }

    fn refused(&self, status: &Status) -> PipelineError {
        refused(&self.scheduler, status)
    }
}

/// Turns a scheduler's status into an error. The message of a missing token or another build comes from the scheduler
/// itself.
pub(crate) fn refused(scheduler: &Scheduler, status: &Status) -> PipelineError {
    let (kind, retryable) = match status.code() {
        Code::Unauthenticated | Code::FailedPrecondition | Code::InvalidArgument => (ErrorKind::Usage, false),
        Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled => (ErrorKind::Output, true),
        _ => (ErrorKind::Output, false),
    };
    // a source means that the scheduler did not answer: the connection broke, or the answer was of another protocol
    let is_broken = std::error::Error::source(status).is_some() && status.code() != Code::Unavailable;
    let hint = match is_broken && !scheduler.speaks_tls() {
        true => "; valid: https://host:port where it speaks TLS",
        false => "",
    };
    let error = PipelineError::new(kind, format!("the scheduler at {scheduler}: {}{hint}", status.message()));
    if retryable { error.retryable() } else { error }
}

impl Submitted<'_> {
    async fn watch(&mut self, work: &Work, tell: EventSink<'_>) -> Result<End> {
        let mut commits = Commits::new(work);
        let mut answered = Instant::now();
        loop {
            tokio::time::sleep(ASKS).await;
            is_wanted(work)?;
            let asked = GetJobStatusParams { job_id: self.job.clone() };
            let state = match self.client.get_job_status(asked).await {
                Ok(answer) => answer.into_inner().status.and_then(|status| status.status),
                Err(e) if answered.elapsed() < GONE => {
                    tracing::debug!("{e}");
                    continue;
                }
                Err(e) => return Err(self.gone(e.message())),
            };
            answered = Instant::now();
            match state {
                Some(JobState::Successful(_)) => {
                    commits.look(work, tell).await?;
                    commits.all_there(work, tell)?;
                    return Ok(End::Told);
                }
                Some(JobState::Failed(failed)) => {
                    // report earlier commits before the run fails
                    if let Err(e) = commits.look(work, tell).await {
                        tracing::debug!("{e}");
                    }
                    return Err(failure::of_job(&failed.error));
                }
                Some(JobState::Queued(_) | JobState::Running(_)) => {
                    commits.look_if_due(work, tell).await?;
                    if commits.are_settled(work) {
                        commits.all_there(work, tell)?;
                        return Ok(End::Seen);
                    }
                }
                // the scheduler restarted; Ballista's keeps no state on disk
                None => return Err(self.gone("it does not know this job any more")),
            }
        }
    }

    fn gone(&self, why: &str) -> PipelineError {
        let message = format!(
            "the scheduler at {} was lost: {why}; what is committed stays: run the same command again to go on",
            self.scheduler
        );
        PipelineError::new(ErrorKind::Output, message).retryable()
    }

    async fn cancel(&mut self) {
        let asked = CancelJobParams { job_id: self.job.clone() };
        if let Err(e) = self.client.cancel_job(asked).await {
            // the executors notice it themselves, because the run releases the output
            tracing::debug!("the job at the scheduler was not cancelled: {e}");
        }
    }
}

/// The commits of a run, as the output shows them.
struct Commits {
    left: BTreeSet<SplitId>,
    /// Splits reported as begun, each with the executor reported at that time.
    begun: BTreeMap<SplitId, Option<String>>,
    of: BTreeMap<SplitId, String>,
    /// Latest report by name, and when it last changed. The report of a dead executor stays the same.
    heard: BTreeMap<String, (AtWork, Instant)>,
    looked: Instant,
    /// Duration of the last look.
    took: Duration,
    moved: Instant,
    patience: Duration,
    /// Number of the last warning read from each report.
    warned: BTreeMap<String, u64>,
    /// Warnings passed on, from any executor.
    warnings: BTreeSet<String>,
    /// Executors reported as unable to make these splits, with the reason.
    passed_over: BTreeMap<String, String>,
    last_passed: Instant,
}

impl Commits {
    fn new(work: &Work) -> Self {
        let fresh = work.splits.iter().filter(|wanted| wanted.was.is_none());
        let now = Instant::now();
        let left = fresh.map(|wanted| wanted.split).collect();
        let of = work.splits.iter().map(|wanted| (wanted.split, wanted.dataset_split.clone())).collect();
        Self {
            left,
            begun: BTreeMap::new(),
            of,
            heard: BTreeMap::new(),
            looked: now,
            took: Duration::ZERO,
            moved: now,
            patience: QUIET,
            warned: BTreeMap::new(),
            warnings: BTreeSet::new(),
            passed_over: BTreeMap::new(),
            last_passed: now,
        }
    }

    /// Whether every split has had its record for [`SETTLES`]. Never true when shards are made again: their records
    /// exist from the start.
    fn are_settled(&self, work: &Work) -> bool {
        let makes_again = work.splits.iter().any(|wanted| wanted.was.is_some());
        self.left.is_empty() && !makes_again && self.moved.elapsed() >= SETTLES
    }

    async fn look_if_due(&mut self, work: &Work, tell: EventSink<'_>) -> Result<()> {
        if self.looked.elapsed() >= LOOKS.max(self.took * SHARE) {
            self.look(work, tell).await?;
        }
        // the run itself reports splits that make no progress
        let at_work = self.heard.values().any(|(at, _)| at.splits.iter().any(|at| self.left.contains(&at.split)));
        if !at_work && self.moved.elapsed() >= self.patience {
            let seconds = self.moved.elapsed().as_secs();
            tell(Step::Warning(format!(
                "no executor has made a split of this job for {seconds} s: none may have a free slot (`stillhouse executor` starts one), or all get ready"
            )))?;
            self.patience *= 2;
        }
        if self.heard.is_empty() && self.begun.is_empty() && self.moved.elapsed() >= NOBODY {
            let message = format!(
                "no executor has told of this job within {} minutes; valid: executors of this scheduler (`stillhouse executor`) with a free \
                 slot, then the same command again",
                NOBODY.as_secs() / 60
            );
            return Err(PipelineError::new(ErrorKind::Output, message).retryable());
        }
        Ok(())
    }

    /// Reports that a split began: once, and again for each other executor that takes it over.
    fn begins(&mut self, split: SplitId, executor: Option<String>, tell: EventSink<'_>) -> Result<()> {
        let Some(dataset_split) = self.of.get(&split) else { return Ok(()) };
        let is_new = match (self.begun.get(&split), &executor) {
            (None, _) => true,
            (Some(told), Some(now)) => told.as_ref() != Some(now),
            (Some(_), None) => false,
        };
        if is_new {
            self.begun.insert(split, executor.clone());
            tell(Step::Begun { split, dataset_split: dataset_split.clone(), executor })?;
        }
        Ok(())
    }

    /// Reads the reports of executors. Where several name a split, the one whose report changed last makes it.
    fn hear(&mut self, reports: &BTreeMap<String, AtWork>, tell: EventSink<'_>) -> Result<()> {
        let now = Instant::now();
        for (name, at) in reports {
            match self.heard.get(name) {
                Some((before, _)) if before == at => {}
                _ => drop(self.heard.insert(name.clone(), (at.clone(), now))),
            }
        }
        self.heard.retain(|name, _| reports.contains_key(name));
        let mut makers: BTreeMap<SplitId, (Instant, &str)> = BTreeMap::new();
        for (at, heard) in self.heard.values() {
            for split in at.splits.iter().map(|at| at.split).filter(|split| self.left.contains(split)) {
                let maker = makers.entry(split).or_insert((*heard, &at.worker));
                *maker = (*maker).max((*heard, &at.worker));
            }
        }
        let makers: Vec<_> = makers.into_iter().map(|(split, (_, maker))| (split, maker.to_owned())).collect();
        makers.into_iter().try_for_each(|(split, maker)| self.begins(split, Some(maker), tell))
    }

    /// Passes on the warnings of executors, each text once.
    fn warn(&mut self, reports: &BTreeMap<String, AtWork>, tell: EventSink<'_>) -> Result<()> {
        for (name, at) in reports {
            let last = self.warned.entry(name.clone()).or_default();
            let known = *last;
            for Warning { number, message } in at.warnings.iter().filter(|warning| warning.number > known) {
                if *number > *last + 1 {
                    let left_out = number - *last - 1;
                    tell(Step::Warning(format!("executor {}: {left_out} more warnings, in its log", at.worker)))?;
                }
                *last = *number;
                if self.warnings.len() < MOST_WARNINGS && self.warnings.insert(message.clone()) {
                    tell(Step::Warning(format!("executor {}: {message}", at.worker)))?;
                    if self.warnings.len() == MOST_WARNINGS {
                        tell(Step::Warning("what executors warn of from here on is in their logs only".into()))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Reports the executors that pass the splits on. Fails once only such executors are active.
    fn pass_over(&mut self, reports: &BTreeMap<String, AtWork>, tell: EventSink<'_>) -> Result<()> {
        for at in reports.values() {
            let Some(why) = &at.cannot else { continue };
            if self.passed_over.insert(at.worker.clone(), why.clone()).is_some() {
                continue;
            }
            self.last_passed = Instant::now();
            match self.passed_over.len() {
                n if n <= MOST_NAMED => {
                    tell(Step::Warning(format!("executor {} passes the splits of this job on: {why}", at.worker)))?;
                }
                n if n == MOST_NAMED + 1 => tell(Step::Warning("other executors pass them on too".into()))?,
                _ => {}
            }
        }
        // an unchanged report belongs to an executor that died, left, or works on other jobs
        let fresh = self.heard.values().filter(|(_, heard)| heard.elapsed() < OTHERS);
        let others = fresh.filter(|(at, _)| at.cannot.is_none()).count();
        if self.passed_over.is_empty() || others > 0 || self.last_passed.elapsed() < OTHERS {
            return Ok(());
        }
        let (name, why) = self.passed_over.first_key_value().unzip();
        let message = format!(
            "no executor can make the splits of this job: {} have said so, and for {} s nobody else was at them; of executor {}: {}; valid: \
             an executor that can and has a free slot, then the same command again",
            self.passed_over.len(),
            OTHERS.as_secs(),
            name.map_or("", String::as_str),
            why.map_or("", String::as_str)
        );
        Err(PipelineError::new(ErrorKind::Model, message).retryable())
    }

    /// Looks at the output. Cost: two listings, one small request per executor, and two per new commit.
    async fn look(&mut self, work: &Work, tell: EventSink<'_>) -> Result<()> {
        let began = Instant::now();
        let reports = work.output.reports().await?;
        self.hear(&reports, tell)?;
        self.warn(&reports, tell)?;
        self.pass_over(&reports, tell)?;
        tell(Step::AtWork(reports))?;
        let there = work.output.committed_splits().await?;
        let new: Vec<SplitId> = self.left.intersection(&there).copied().collect();
        let mut records = futures::stream::iter(new).map(|split| work.output.seen(split)).buffered(RECORDS);
        while let Some(record) = records.next().await {
            // a record whose upload is still being completed shows at the next look
            let Some(record) = record? else { continue };
            self.left.remove(&record.split);
            self.begins(record.split, None, tell)?;
            (self.moved, self.patience) = (Instant::now(), QUIET);
            tell(Step::Made(Box::new(record)))?;
        }
        (self.looked, self.took) = (Instant::now(), began.elapsed());
        Ok(())
    }

    /// Fails if a split has no record, then reports the shards that were made again.
    fn all_there(&self, work: &Work, tell: EventSink<'_>) -> Result<()> {
        if let Some(split) = self.left.first() {
            let message = format!(
                "{}: the cluster says that all is done, and split {} is not there; valid: an output that all executors and this machine share",
                work.output, split.0
            );
            return Err(PipelineError::new(ErrorKind::Output, message));
        }
        let made_again = |wanted: &SplitTask| wanted.was.clone();
        work.splits.iter().filter_map(made_again).try_for_each(|record| tell(Step::Made(Box::new(record))))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use stillhouse_pipeline::events::Progress;
    use stillhouse_pipeline::output::Output;

    use super::*;

    fn report(worker: &str, warnings: &[(u64, &str)]) -> AtWork {
        let warning = |(number, message): &(u64, &str)| Warning { number: *number, message: (*message).to_owned() };
        AtWork {
            worker: worker.into(),
            holder: None,
            splits: Vec::new(),
            cannot: None,
            told: 0,
            progress: Progress::default(),
            warnings: warnings.iter().map(warning).collect(),
        }
    }

    fn work(folder: &std::path::Path, splits: Vec<SplitTask>) -> Work {
        let output = Output::on_disk(folder).unwrap();
        Work { splits, output, stop: Arc::default() }
    }

    /// The instant that long ago.
    fn before(time: Duration) -> Instant {
        Instant::now().checked_sub(time).unwrap()
    }

    #[test]
    fn a_run_whose_splits_are_all_there_does_not_wait_for_a_scheduler_that_has_lost_an_end() {
        let folder = tempfile::tempdir().unwrap();
        let wanted = |was| SplitTask { split: SplitId(3), dataset_split: "train".into(), was };
        let fresh = work(folder.path(), vec![wanted(None)]);
        let mut commits = Commits::new(&fresh);
        commits.moved = before(SETTLES);
        assert!(!commits.are_settled(&fresh));
        commits.left.clear();
        assert!(commits.are_settled(&fresh));
        commits.moved = Instant::now();
        assert!(!commits.are_settled(&fresh));
    }

    #[test]
    fn a_run_that_only_such_tell_of_as_cannot_make_it_ends_whoever_else_was_there_before() {
        let folder = tempfile::tempdir().unwrap();
        let work = work(folder.path(), Vec::new());
        let tell = |_: Step| Ok(());
        let able = report("able", &[]);
        let unable = AtWork { cannot: Some("no room".into()), ..report("unable", &[]) };
        let reports = BTreeMap::from([("1".to_owned(), able), ("2".to_owned(), unable)]);
        let mut commits = Commits::new(&work);
        let mut ends = |able: Duration, passed: Duration| {
            commits.hear(&reports, &tell).unwrap();
            commits.pass_over(&reports, &tell).unwrap();
            commits.heard.get_mut("1").unwrap().1 = before(able);
            commits.last_passed = before(passed);
            commits.pass_over(&reports, &tell).err().map(|e| (e.retryable, e.to_string()))
        };
        // another executor is still getting ready, or the last refusal is too recent
        assert_eq!(ends(Duration::ZERO, OTHERS * 2), None);
        assert_eq!(ends(OTHERS, Duration::ZERO), None);
        let (retryable, told) = ends(OTHERS, OTHERS).unwrap();
        assert!(retryable && told.contains("1 have said so") && told.contains("of executor unable: no room"), "{told}");
    }

    #[tokio::test]
    async fn a_run_that_nobody_tells_of_ends() {
        let folder = tempfile::tempdir().unwrap();
        let work = work(folder.path(), Vec::new());
        let mut commits = Commits::new(&work);
        let tell = |_: Step| Ok(());
        commits.looked = Instant::now() + Duration::from_hours(1);
        commits.moved = before(NOBODY / 2);
        commits.look_if_due(&work, &tell).await.unwrap();
        commits.moved = before(NOBODY);
        let ended = commits.look_if_due(&work, &tell).await.unwrap_err();
        assert!(ended.retryable && ended.to_string().contains("within 60 minutes"), "{ended}");
        commits.heard.insert("1".into(), (report("one", &[]), Instant::now()));
        commits.look_if_due(&work, &tell).await.unwrap();
    }

    #[test]
    fn each_warning_of_executors_is_told_once() {
        let folder = tempfile::tempdir().unwrap();
        let work = work(folder.path(), Vec::new());
        let (mut commits, told) = (Commits::new(&work), Mutex::new(Vec::new()));
        let tell = |step: Step| {
            let Step::Warning(message) = step else { panic!("{step:?}") };
            told.lock().unwrap().push(message);
            Ok(())
        };
        let mut hear = |one: &[(u64, &str)], two: &[(u64, &str)]| {
            let reports = [("1".to_owned(), report("one", one)), ("2".to_owned(), report("two", two))];
            commits.warn(&reports.into(), &tell).unwrap();
            std::mem::take(&mut *told.lock().unwrap())
        };
        assert_eq!(hear(&[(1, "a device is lost")], &[]), ["executor one: a device is lost"]);
        // a report that is read again adds nothing, and a warning of several executors is reported once
        assert!(hear(&[(1, "a device is lost")], &[(1, "a device is lost")]).is_empty());
        // warnings that did not fit in a report are counted
        let said = hear(&[(4, "d"), (5, "e")], &[(2, "e")]);
        assert_eq!(said, ["executor one: 2 more warnings, in its log", "executor one: d", "executor one: e"]);
    }
}
