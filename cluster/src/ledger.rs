//! Finds lost tasks: compares the open tasks of each executor with the number that it reports as running.
//!
//! ```text
//!   an executor polls: its slots, the free ones, the tasks that ended ─► open − ended
//!   it gets tasks ─────────────────────────────────────────────────────► open + tasks
//!   open > slots − free for ten seconds ─► a request or an answer was lost: the executor is treated as restarted
//! ```
//!
//! A Ballista executor reports the end of a task once, and the scheduler hands out a task once. When a connection
//! breaks in between, the scheduler counts a task as running that no executor has. The job would then never end. The
//! scheduler hands lost tasks out again; a split that was already committed is found committed.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballista_core::serde::protobuf::scheduler_grpc_server::SchedulerGrpc;
use ballista_core::serde::protobuf::{
    CancelJobParams, CancelJobResult, CleanJobDataParams, CleanJobDataResult, CreateUpdateSessionParams,
    CreateUpdateSessionResult, ExecuteQueryParams, ExecuteQueryResult, ExecutorStoppedParams, ExecutorStoppedResult,
    GetJobMetricsParams, GetJobMetricsResult, GetJobStatusParams, GetJobStatusResult, HeartBeatParams, HeartBeatResult,
    PollWorkParams, PollWorkResult, RegisterExecutorParams, RegisterExecutorResult, RemoveSessionParams,
    RemoveSessionResult, UpdateTaskStatusParams, UpdateTaskStatusResult,
};
use ballista_core::serde::scheduler::ExecutorSpecification;
use tonic::{Request, Response, Status};

/// A difference that lasts this long is not a request in flight. Executors poll every 50 ms while a slot is free.
const LASTS: Duration = Duration::from_secs(10);
/// The ledger drops executors that have not polled for this long.
const FORGETS: Duration = Duration::from_hours(24);

/// The accounts of all executors.
#[derive(Debug, Default)]
struct Ledger(HashMap<String, Account>);

#[derive(Debug)]
struct Account {
    /// Tasks handed out, minus those that ended.
    open: usize,
    /// Since when `open` exceeds the number of running tasks.
    differs: Option<Instant>,
    asked: Instant,
}

impl Ledger {
    /// Records a poll of an executor that runs `at_work` tasks and reports `ended` ones. Returns the number of lost
    /// tasks, once a difference has lasted [`LASTS`].
    fn asks(&mut self, executor: &str, at_work: usize, ended: usize, now: Instant) -> Option<usize> {
        self.0.retain(|_, account| now.duration_since(account.asked) < FORGETS);
        let new = || Account { open: 0, differs: None, asked: now };
        let account = self.0.entry(executor.to_owned()).or_insert_with(new);
        account.asked = now;
        // it may also report tasks of an earlier scheduler
        account.open = account.open.saturating_sub(ended);
        if account.open <= at_work {
            account.differs = None;
            return None;
        }
        let since = *account.differs.get_or_insert(now);
        if now.duration_since(since) < LASTS {
            return None;
        }
        let lost = account.open - at_work;
        (account.open, account.differs) = (at_work, None);
        Some(lost)
    }

    /// Records that the executor got this many tasks.
    fn gives(&mut self, executor: &str, tasks: usize) {
        if let Some(account) = self.0.get_mut(executor) {
            account.open += tasks;
        }
    }
}

/// A scheduler that keeps a ledger of the tasks of its executors.
pub(crate) struct Reconciled<S> {
    scheduler: S,
    ledger: Mutex<Ledger>,
}

impl<S> Reconciled<S> {
    pub fn new(scheduler: S) -> Self {
        Self { scheduler, ledger: Mutex::default() }
    }
}

/// The executor that polls, and how many tasks it runs.
fn at_work(asked: &PollWorkParams) -> Option<(String, usize)> {
    let metadata = asked.metadata.as_ref()?;
    let ExecutorSpecification { vcores, .. } = metadata.specification.clone()?.into();
    Some((metadata.id.clone(), vcores.saturating_sub(asked.num_free_vcores) as usize))
}

/// Implements the calls in braces here and forwards the listed ones to the inner scheduler.
macro_rules! answers {
    ({ $($own:tt)* } $($call:ident($asked:ty) -> $answer:ty;)*) => {
        #[tonic::async_trait]
        impl<S: SchedulerGrpc> SchedulerGrpc for Reconciled<S> {
            $($own)*

            $(async fn $call(&self, request: Request<$asked>) -> Result<Response<$answer>, Status> {
                self.scheduler.$call(request).await
            })*
        }
    };
}

answers! {
    {
        type ExecuteQueryPushStream = S::ExecuteQueryPushStream;

        async fn poll_work(&self, request: Request<PollWorkParams>) -> Result<Response<PollWorkResult>, Status> {
            let Some((executor_id, at_work)) = at_work(request.get_ref()) else {
                return self.scheduler.poll_work(request).await;
            };
            let ended = request.get_ref().task_status.len();
            let ledger = || self.ledger.lock().unwrap_or_else(PoisonError::into_inner);
            let lost = ledger().asks(&executor_id, at_work, ended, Instant::now());
            if let Some(lost) = lost {
                let reason =
                    format!("{lost} of its tasks were lost on their way, or their ends were; they are handed out again");
                tracing::warn!("executor {executor_id}: {reason}");
                let stopped = ExecutorStoppedParams { executor_id: executor_id.clone(), reason };
                self.scheduler.executor_stopped(Request::new(stopped)).await?;
            }
            let answer = self.scheduler.poll_work(request).await?;
            ledger().gives(&executor_id, answer.get_ref().tasks.len());
            Ok(answer)
        }
    }
    register_executor(RegisterExecutorParams) -> RegisterExecutorResult;
    heart_beat_from_executor(HeartBeatParams) -> HeartBeatResult;
    update_task_status(UpdateTaskStatusParams) -> UpdateTaskStatusResult;
    create_update_session(CreateUpdateSessionParams) -> CreateUpdateSessionResult;
    remove_session(RemoveSessionParams) -> RemoveSessionResult;
    execute_query_push(ExecuteQueryParams) -> Self::ExecuteQueryPushStream;
    execute_query(ExecuteQueryParams) -> ExecuteQueryResult;
    get_job_status(GetJobStatusParams) -> GetJobStatusResult;
    get_job_metrics(GetJobMetricsParams) -> GetJobMetricsResult;
    executor_stopped(ExecutorStoppedParams) -> ExecutorStoppedResult;
    cancel_job(CancelJobParams) -> CancelJobResult;
    clean_job_data(CleanJobDataParams) -> CleanJobDataResult;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_on_its_way_is_found_and_what_is_under_way_is_not() {
        let (mut ledger, began) = (Ledger::default(), Instant::now());
        let at = |tenths: u32| began + LASTS * tenths / 10;
        assert_eq!(ledger.asks("a", 0, 0, at(0)), None);
        ledger.gives("a", 2);
        assert_eq!(ledger.asks("a", 2, 0, at(1)), None);
        // one task has ended, and the next poll reports it
        assert_eq!(ledger.asks("a", 1, 0, at(2)), None);
        assert_eq!(ledger.asks("a", 1, 1, at(3)), None);
        assert_eq!(ledger.asks("a", 1, 0, at(30)), None);
        // the poll that reported the other task's end was lost
        assert_eq!(ledger.asks("a", 0, 0, at(31)), None);
        assert_eq!(ledger.asks("a", 0, 0, at(40)), None);
        assert_eq!(ledger.asks("a", 0, 0, at(41)), Some(1));
        assert_eq!(ledger.asks("a", 0, 0, at(80)), None);
        // an answer with three tasks was lost, and the executor gets others
        ledger.gives("a", 3);
        assert_eq!(ledger.asks("a", 0, 0, at(81)), None);
        ledger.gives("a", 1);
        assert_eq!(ledger.asks("a", 1, 0, at(91)), Some(3));
        // each executor has its own account; ends of tasks that were never handed out do not make it negative
        assert_eq!(ledger.asks("b", 0, 5, at(91)), None);
        ledger.gives("b", 1);
        assert_eq!((ledger.asks("b", 1, 0, at(92)), ledger.asks("b", 1, 0, at(192))), (None, None));
    }
}
