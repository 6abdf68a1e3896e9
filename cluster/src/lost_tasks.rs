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
const MISMATCH_TIMEOUT: Duration = Duration::from_secs(10);
/// Drops the counts of an executor that has not polled for this long.
const COUNTS_RETENTION: Duration = Duration::from_hours(24);

/// The task counts of all executors.
#[derive(Debug, Default)]
struct TaskCounts(HashMap<String, ExecutorTasks>);

#[derive(Debug)]
struct ExecutorTasks {
    /// Tasks handed out, minus those that ended.
    open: usize,
    /// Since when `open` exceeds the number of running tasks.
    mismatch_since: Option<Instant>,
    last_poll: Instant,
}

impl TaskCounts {
    /// Records a poll of an executor that runs `running` tasks and reports `ended` ones. Returns the number of lost
    /// tasks, once a difference has lasted [`MISMATCH_TIMEOUT`].
    fn record_poll(&mut self, executor: &str, running: usize, ended: usize, now: Instant) -> Option<usize> {
        self.0.retain(|_, executor| now.duration_since(executor.last_poll) < COUNTS_RETENTION);
        let new = || ExecutorTasks { open: 0, mismatch_since: None, last_poll: now };
        let executor = self.0.entry(executor.to_owned()).or_insert_with(new);
        executor.last_poll = now;
        // it may also report tasks of an earlier scheduler
        executor.open = executor.open.saturating_sub(ended);
        if executor.open <= running {
            executor.mismatch_since = None;
            return None;
        }
        let since = *executor.mismatch_since.get_or_insert(now);
        if now.duration_since(since) < MISMATCH_TIMEOUT {
            return None;
        }
        let lost = executor.open - running;
        (executor.open, executor.mismatch_since) = (running, None);
        Some(lost)
    }

    /// Records that the executor got this many tasks.
    fn record_tasks(&mut self, executor: &str, tasks: usize) {
        if let Some(executor) = self.0.get_mut(executor) {
            executor.open += tasks;
        }
    }
}

/// A scheduler that counts the tasks of its executors, and so detects lost ones.
pub(crate) struct LostTaskDetector<S> {
    scheduler: S,
    counts: Mutex<TaskCounts>,
}

impl<S> LostTaskDetector<S> {
    pub fn new(scheduler: S) -> Self {
        Self { scheduler, counts: Mutex::default() }
    }
}

/// The executor that polls, and how many tasks it runs.
fn executor_and_running(params: &PollWorkParams) -> Option<(String, usize)> {
    let metadata = params.metadata.as_ref()?;
    let ExecutorSpecification { vcores, .. } = metadata.specification.clone()?.into();
    Some((metadata.id.clone(), vcores.saturating_sub(params.num_free_vcores) as usize))
}

/// Implements the calls in braces here and forwards the listed ones to the inner scheduler.
macro_rules! forward_calls {
    ({ $($own:tt)* } $($call:ident($params:ty) -> $response:ty;)*) => {
        #[tonic::async_trait]
        impl<S: SchedulerGrpc> SchedulerGrpc for LostTaskDetector<S> {
            $($own)*

            $(async fn $call(&self, request: Request<$params>) -> Result<Response<$response>, Status> {
                self.scheduler.$call(request).await
            })*
        }
    };
}

forward_calls! {
    {
        type ExecuteQueryPushStream = S::ExecuteQueryPushStream;

        async fn poll_work(&self, request: Request<PollWorkParams>) -> Result<Response<PollWorkResult>, Status> {
            let Some((executor_id, running)) = executor_and_running(request.get_ref()) else {
                return self.scheduler.poll_work(request).await;
            };
            let ended = request.get_ref().task_status.len();
            let counts = || self.counts.lock().unwrap_or_else(PoisonError::into_inner);
            let lost = counts().record_poll(&executor_id, running, ended, Instant::now());
            if let Some(lost) = lost {
                let reason =
                    format!("{lost} of its tasks were lost, or their results were; they are assigned again");
                tracing::warn!("executor {executor_id}: {reason}");
                let stopped = ExecutorStoppedParams { executor_id: executor_id.clone(), reason };
                self.scheduler.executor_stopped(Request::new(stopped)).await?;
            }
            let response = self.scheduler.poll_work(request).await?;
            counts().record_tasks(&executor_id, response.get_ref().tasks.len());
            Ok(response)
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
        let (mut counts, began) = (TaskCounts::default(), Instant::now());
        let at = |tenths: u32| began + MISMATCH_TIMEOUT * tenths / 10;
        assert_eq!(counts.record_poll("a", 0, 0, at(0)), None);
        counts.record_tasks("a", 2);
        assert_eq!(counts.record_poll("a", 2, 0, at(1)), None);
        // one task has ended, and the next poll reports it
        assert_eq!(counts.record_poll("a", 1, 0, at(2)), None);
        assert_eq!(counts.record_poll("a", 1, 1, at(3)), None);
        assert_eq!(counts.record_poll("a", 1, 0, at(30)), None);
        // the poll that reported the other task's end was lost
        assert_eq!(counts.record_poll("a", 0, 0, at(31)), None);
        assert_eq!(counts.record_poll("a", 0, 0, at(40)), None);
        assert_eq!(counts.record_poll("a", 0, 0, at(41)), Some(1));
        assert_eq!(counts.record_poll("a", 0, 0, at(80)), None);
        // an answer with three tasks was lost, and the executor gets others
        counts.record_tasks("a", 3);
        assert_eq!(counts.record_poll("a", 0, 0, at(81)), None);
        counts.record_tasks("a", 1);
        assert_eq!(counts.record_poll("a", 1, 0, at(91)), Some(3));
        // each executor has its own counts; ends of tasks that were never handed out do not make it negative
        assert_eq!(counts.record_poll("b", 0, 5, at(91)), None);
        counts.record_tasks("b", 1);
        assert_eq!((counts.record_poll("b", 1, 0, at(92)), counts.record_poll("b", 1, 0, at(192))), (None, None));
    }
}
