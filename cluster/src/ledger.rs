//! What each executor was given and has not told the end of, held against what it says that it is at.
//!
//! ```text
//!   it asks: slots, of which so many are free, and these tasks have ended ─► open − ended
//!   it gets tasks ─────────────────────────────────────────────────────────► open + tasks
//!   open > slots − free for ten seconds ─► a question or an answer was lost on its way: the executor is taken for one that has begun anew
//! ```
//!
//! Ballista's executors tell the end of a task once, and its scheduler hands a task out once. Where a connection breaks in between, a task is at
//! work for the scheduler and nowhere else, for ever: whoever runs the job would wait for it. What was lost so is handed out again; what had
//! been committed is found committed.

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

/// A difference that lasts so long is no question under way. Executors ask every 50 ms as long as a slot is free.
const LASTS: Duration = Duration::from_secs(10);
/// Executors that have not asked for so long are forgotten.
const FORGETS: Duration = Duration::from_hours(24);

/// The accounts of all executors.
#[derive(Debug, Default)]
struct Ledger(HashMap<String, Account>);

#[derive(Debug)]
struct Account {
    /// Tasks that were given, less those that have ended.
    open: usize,
    /// Since when there are more of them than the executor is at.
    differs: Option<Instant>,
    asked: Instant,
}

impl Ledger {
    /// An executor asks, is at so many tasks, and tells of so many that they have ended. How many of its tasks are lost, once that is certain.
    fn asks(&mut self, executor: &str, at_work: usize, ended: usize, now: Instant) -> Option<usize> {
        self.0.retain(|_, account| now.duration_since(account.asked) < FORGETS);
        let new = || Account { open: 0, differs: None, asked: now };
        let account = self.0.entry(executor.to_owned()).or_insert_with(new);
        account.asked = now;
        // of a task of a scheduler before this one it may tell too
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

    /// It is given so many tasks.
    fn gives(&mut self, executor: &str, tasks: usize) {
        if let Some(account) = self.0.get_mut(executor) {
            account.open += tasks;
        }
    }
}

/// A scheduler that keeps a ledger.
pub(crate) struct Reconciled<S> {
    scheduler: S,
    ledger: Mutex<Ledger>,
}

impl<S> Reconciled<S> {
    pub fn new(scheduler: S) -> Self {
        Self { scheduler, ledger: Mutex::default() }
    }
}

/// Who asks, and what it is at.
fn at_work(asked: &PollWorkParams) -> Option<(String, usize)> {
    let metadata = asked.metadata.as_ref()?;
    let ExecutorSpecification { vcores, .. } = metadata.specification.clone()?.into();
    Some((metadata.id.clone(), vcores.saturating_sub(asked.num_free_vcores) as usize))
}

/// A scheduler that answers some calls itself; the others go to the one below as they are.
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
        // one has ended, which its next question tells
        assert_eq!(ledger.asks("a", 1, 0, at(2)), None);
        assert_eq!(ledger.asks("a", 1, 1, at(3)), None);
        assert_eq!(ledger.asks("a", 1, 0, at(30)), None);
        // the other's end was in a question that did not come
        assert_eq!(ledger.asks("a", 0, 0, at(31)), None);
        assert_eq!(ledger.asks("a", 0, 0, at(40)), None);
        assert_eq!(ledger.asks("a", 0, 0, at(41)), Some(1));
        assert_eq!(ledger.asks("a", 0, 0, at(80)), None);
        // an answer with three was lost, and it goes on to get others
        ledger.gives("a", 3);
        assert_eq!(ledger.asks("a", 0, 0, at(81)), None);
        ledger.gives("a", 1);
        assert_eq!(ledger.asks("a", 1, 0, at(91)), Some(3));
        // others have their own account; ends of tasks that nobody gave are no debt
        assert_eq!(ledger.asks("b", 0, 5, at(91)), None);
        ledger.gives("b", 1);
        assert_eq!((ledger.asks("b", 1, 0, at(92)), ledger.asks("b", 1, 0, at(192))), (None, None));
    }
}
