//! How an attempt ended, and the next state of its job.

use std::time::Duration;

use super::config::Retry;
use super::model::{Failure, FailureKind, FieldProblem, JobState, Time};
use super::store::jobs::Task;

/// How an attempt ended.
#[derive(Debug)]
pub enum Outcome {
    /// The data set is complete.
    Succeeded,
    /// The worker reported an error.
    Failed { message: String, problems: Vec<FieldProblem>, retryable: bool },
    /// Another run holds the job's output. That run may use another path to it, or run outside the service.
    OutputBusy(String),
    /// The worker ended without a report.
    Crashed(String),
    /// A limit on time, output or memory stopped the attempt.
    OverLimit(String),
    /// A user cancelled the job.
    Cancelled,
    /// The service or the machine stopped the attempt.
    Interrupted,
}

/// The next state of a job.
pub struct NextState {
    pub state: JobState,
    /// The name of the outcome.
    pub outcome: &'static str,
    pub reason: Option<String>,
    pub failure: Option<Failure>,
    pub not_before: Option<Time>,
}

impl Outcome {
    /// The outcome of a worker that could not allocate memory. Under a configured limit a retry would fail again;
    /// without one the machine had none left.
    pub fn out_of_memory(limit_gigabytes: Option<u32>) -> Self {
        match limit_gigabytes {
            Some(limit) => Self::OverLimit(format!(
                "its worker needs more than {limit} GB of memory, the limit of this server (capacity.worker_gigabytes); reduce \
                 engine.memory_megabytes, engine.parallel_splits or extract.teacher.batch_tokens, or raise the limit"
            )),
            None => Self::Crashed("the worker could not allocate memory: the machine had none left".into()),
        }
    }

    /// The outcome of a worker that exceeded its job's time limit.
    pub fn over_time_limit(limit: Duration) -> Self {
        let hours = limit.as_secs_f64() / 3600.0;
        Self::OverLimit(format!("took longer than its time limit of {} s ({hours:.1} h)", limit.as_secs()))
    }

    /// The name in metrics and in the stored attempt.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed { .. } => "failed",
            Self::OutputBusy(_) => "waits",
            Self::Crashed(_) => "crashed",
            Self::OverLimit(_) => "limit",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
        }
    }

    /// The job's next state. `stopping`: whether the service stops.
    pub fn next(&self, task: &Task, retry: &Retry, stopping: bool) -> NextState {
        let failure = |kind, message: &str, problems: &[FieldProblem]| Failure {
            kind,
            message: message.to_owned(),
            problems: problems.to_vec(),
        };
        let next_state = |state, reason: Option<String>, failure, not_before| NextState {
            state,
            outcome: self.name(),
            reason,
            failure,
            not_before,
        };
        let retry_or_fail = |failure: Failure| {
            let failures = task.failures + 1;
            let first = failure.message.lines().next().unwrap_or_default().to_owned();
            if failures >= task.max_attempts {
                let reason = format!("{first} (attempt {failures} of {})", task.max_attempts);
                return next_state(JobState::Failed, Some(reason), Some(failure), None);
            }
            let wait = retry.backoff(failures);
            let reason =
                format!("{first} (attempt {failures} of {}; the next in {} s)", task.max_attempts, wait.as_secs());
            next_state(JobState::Retrying, Some(reason), Some(failure), Some(Time::now().after(wait)))
        };
        match self {
            Self::Succeeded => next_state(JobState::Succeeded, None, None, None),
            Self::Failed { message, problems, retryable: true } => {
                retry_or_fail(failure(FailureKind::Machine, message, problems))
            }
            Self::OutputBusy(message) => {
                let wait = retry.backoff(task.job_ref.attempt);
                let reason = format!("{message} (next check in {} s)", wait.as_secs());
                next_state(JobState::Retrying, Some(reason), None, Some(Time::now().after(wait)))
            }
            Self::Crashed(message) => retry_or_fail(failure(FailureKind::Machine, message, &[])),
            Self::Failed { message, problems, retryable: false } => {
                let reason = message.lines().next().unwrap_or_default().to_owned();
                next_state(JobState::Failed, Some(reason), Some(failure(FailureKind::Job, message, problems)), None)
            }
            Self::OverLimit(message) => next_state(
                JobState::Failed,
                Some(message.clone()),
                Some(failure(FailureKind::Limit, message, &[])),
                None,
            ),
            Self::Cancelled => next_state(JobState::Cancelled, None, None, None),
            Self::Interrupted => {
                let reason = if stopping { "the service stopped" } else { "a signal stopped its worker" };
                next_state(JobState::Queued, Some(reason.into()), None, None)
            }
        }
    }
}
