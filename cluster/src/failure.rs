//! Sends pipeline errors through Ballista, which carries errors as text, and restores their kind and whether a retry
//! can help.
//!
//! The text holds the encoded failure in hexadecimal between two marks, because Ballista quotes the text several times.

use std::io;

use datafusion::common::DataFusionError;
use stillhouse_pipeline::error::{ErrorKind, PipelineError, SerializedError};

const BEGIN: &str = "[stillhouse failure ";
const END: char = ']';

/// The error of a task. A retryable error becomes an I/O error, which Ballista retries; an executor makes the fourth
/// failure of a split permanent.
pub fn to_task_error(error: &PipelineError) -> DataFusionError {
    let failure = serde_json::to_vec(&SerializedError::from(error)).unwrap_or_default();
    let text = format!("{BEGIN}{}{END} {error}", hex::encode(failure));
    match error.retryable {
        true => DataFusionError::IoError(io::Error::other(text)),
        false => DataFusionError::Execution(text),
    }
}

/// The failure that a task reported, found in text that may quote it.
fn decode(text: &str) -> Option<SerializedError> {
    let (digits, _) = text.split_once(BEGIN)?.1.split_once(END)?;
    serde_json::from_slice(&hex::decode(digits).ok()?).ok()
}

/// Whether the error concerns this executor alone, so that another executor should take the task.
pub fn is_local_to_executor(text: &str) -> bool {
    decode(text).is_some_and(|failure| failure.machine_specific)
}

/// The error of a failed job: the failure that a task reported, or else Ballista's own text.
pub fn from_job_error(text: &str) -> PipelineError {
    match decode(text) {
        Some(failure) => failure.into(),
        None => PipelineError::new(ErrorKind::Output, format!("the cluster: {text}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_keeps_its_kind_however_it_is_quoted() {
        for retryable in [false, true] {
            let error = PipelineError::new(ErrorKind::Model, "teacher: \"x\" computes\n [f32], not bf16");
            let error = if retryable { error.retryable() } else { error };
            let task_error = to_task_error(&error);
            assert_eq!(matches!(task_error, DataFusionError::IoError(_)), retryable);
            let quoted = format!("Job x failed: {:?}", format!("Task failed: {task_error:?}"));
            let back = from_job_error(&quoted);
            assert_eq!((back.kind, back.retryable, back.to_string()), (error.kind, retryable, error.to_string()));
        }
        let is_local = |error: PipelineError| is_local_to_executor(&format!("{:?}", to_task_error(&error)));
        let error = || PipelineError::new(ErrorKind::Model, "no room");
        assert!(is_local(error().machine_specific()) && !is_local(error()) && !is_local_to_executor("no room"));
        let other = from_job_error("no such job");
        assert_eq!((other.kind, other.to_string().as_str()), (ErrorKind::Output, "the cluster: no such job"));
    }
}
