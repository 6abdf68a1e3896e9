//! Errors of the pipeline: what failed, where, and whether a retry can help.

use std::fmt;
use std::sync::Arc;

use arrow::error::ArrowError;
use datafusion::common::DataFusionError;
use serde::{Deserialize, Serialize};
use stillhouse_operators::operator::OperatorError;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::parse::Positions;
use stillhouse_schemas::problems::Problems;
use tokio::task::JoinError;

use crate::source_error::SourceError;
use crate::storage::{self, StorageError};

/// The part of the job that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The job file or the command line; exit code 2.
    Usage,
    /// The input data.
    Input,
    /// The tokenizer or the teacher.
    Model,
    /// The output folder or store.
    Output,
    /// The output is in use by another run.
    Busy,
    /// A data set whose content is not what its manifest or format requires.
    DataSet,
    /// The job was cancelled.
    Cancelled,
}

impl ErrorKind {
    /// A stable name for metrics and programs: `usage`, `input`, `model`, `output`, `busy`, `data_set`, `cancelled`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Usage => "usage",
            Self::Input => "input",
            Self::Model => "model",
            Self::Output => "output",
            Self::Busy => "busy",
            Self::DataSet => "data_set",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An error with its location, its cause and whether a retry can help.
#[derive(Debug)]
pub struct PipelineError {
    /// The part of the job that failed.
    pub kind: ErrorKind,
    /// Whether the same call can succeed later (a full disk, a lost connection).
    pub retryable: bool,
    /// The problems in the job file, if the job file is what failed.
    pub problems: Option<Problems>,
    /// The split that failed, if the error belongs to one.
    pub split: Option<SplitId>,
    /// Whether this machine is the cause, so that another machine may succeed.
    pub machine_specific: bool,
    message: String,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

/// Whether the file-system error is permanent, so that a retry fails in the same way: permissions, path names, limits
/// on file size.
fn is_permanent(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind as IoErrorKind;
    let permanent_kinds = [
        IoErrorKind::PermissionDenied,
        IoErrorKind::ReadOnlyFilesystem,
        IoErrorKind::FileTooLarge,
        IoErrorKind::NotADirectory,
        IoErrorKind::IsADirectory,
        IoErrorKind::InvalidFilename,
        IoErrorKind::InvalidInput,
    ];
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref::<std::io::Error>().is_some_and(|e| permanent_kinds.contains(&e.kind())) {
            return true;
        }
        cause = error.source();
    }
    false
}

impl PipelineError {
    /// Creates an error without a cause. It is not retryable.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            retryable: false,
            problems: None,
            split: None,
            machine_specific: false,
            message: message.into(),
            source: None,
        }
    }

    /// Creates an error with a cause. An error of an object store among the causes is explained in one line and decides
    /// whether a retry can help.
    pub fn caused(
        kind: ErrorKind,
        message: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        let (message, source) = (message.into(), source.into());
        if let Some(error) = find_store_error(source.as_ref()) {
            let reported = Self::new(kind, format!("{message}: {}", storage::explain_cause(error, &message)));
            return if storage::is_retryable(error) { reported.retryable() } else { reported };
        }
        Self { source: Some(source), ..Self::new(kind, message) }
    }

    /// Marks the error as retryable.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }

    /// Names the field or place that the error belongs to, before its message.
    #[must_use]
    pub fn at(mut self, place: &str) -> Self {
        self.message = format!("{place}: {}", self.message);
        self
    }

    /// Marks the error as specific to this machine: another machine may have the disk space, the memory or the device.
    #[must_use]
    pub fn machine_specific(self) -> Self {
        Self { machine_specific: true, ..self }
    }

    /// Sets the split that failed.
    #[must_use]
    pub fn with_split(self, split: SplitId) -> Self {
        Self { split: Some(split), ..self }
    }

    /// Adds line and column to the problems of the job file.
    #[must_use]
    pub fn with_positions(mut self, positions: &Positions) -> Self {
        if let Some(problems) = &mut self.problems {
            positions.locate(problems);
            self.message = problems.to_string();
        }
        self
    }

    /// Explains a store error in one line, with what the user should check.
    pub fn store(kind: ErrorKind, error: &object_store::Error, action: &str, place: &str) -> Self {
        let reported = Self::new(kind, storage::explain(error, action, place));
        if storage::is_retryable(error) { reported.retryable() } else { reported }
    }

    /// For `map_err`: an output error with `context`, the action that failed. It is retryable, unless the file-system
    /// error is permanent (permissions, path names).
    pub fn output<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        context: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let context = context.into();
        move |e| {
            let cause: Box<dyn std::error::Error + Send + Sync> = e.into();
            let is_permanent = is_permanent(cause.as_ref());
            let reported = Self::caused(ErrorKind::Output, context, cause);
            if is_permanent { reported } else { reported.retryable() }
        }
    }

    /// For `map_err`: a data set error with `context`, the action that failed.
    pub fn dataset<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        context: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let context = context.into();
        move |e| Self::caused(ErrorKind::DataSet, context, e)
    }

    /// For `map_err`: work on another thread panicked, or the shutdown of the runtime cancelled it. `kind` is the part of
    /// the job that the work belongs to.
    pub fn worker_stopped(kind: ErrorKind) -> impl FnOnce(JoinError) -> Self {
        move |e| Self::caused(kind, "a worker stopped", e)
    }

    /// Unwraps an error that a stage raised inside DataFusion, and classifies it by the stage's own error type.
    pub fn from_stage(context: impl Into<String>, error: DataFusionError) -> Self {
        let cause = match unwrap_wrappers(error) {
            DataFusionError::External(e) => e,
            other => Box::new(other),
        };
        let cause = match cause.downcast::<SourceError>() {
            Ok(source) => return Self::source(context, *source),
            Err(other) => other,
        };
        let kind = match cause.downcast_ref().map(OperatorError::root) {
            Some(OperatorError::Teacher(_) | OperatorError::NotFinite { .. }) => ErrorKind::Model,
            _ => ErrorKind::Input,
        };
        Self::caused(kind, context, cause)
    }

    /// The input could not be read, planned or queried.
    pub fn source(context: impl Into<String>, error: SourceError) -> Self {
        let retryable = error.retryable();
        Self { retryable, ..Self::caused(ErrorKind::Input, context, error) }
    }

    /// An error from executing the plan of a job: raised by one of our nodes, or by DataFusion.
    pub fn from_plan(error: DataFusionError) -> Self {
        match unwrap_wrappers(error) {
            DataFusionError::External(cause) => match cause.downcast::<Self>() {
                Ok(own) => *own,
                Err(other) => Self::from_stage("the plan of the job", DataFusionError::External(other)),
            },
            other => Self::from_stage("the plan of the job", other),
        }
    }
}

/// A [`PipelineError`] as processes send it to each other: the fields that decide how it is handled, and the message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerializedError {
    /// The part of the job that failed.
    pub kind: ErrorKind,
    /// Whether the same call can succeed later.
    pub retryable: bool,
    /// The split that failed, if the error belongs to one.
    pub split: Option<SplitId>,
    /// Whether the machine is the cause, so that another machine may succeed.
    #[serde(rename = "of_place", default)]
    pub machine_specific: bool,
    /// The message with its causes, on one line.
    pub message: String,
}

impl From<&PipelineError> for SerializedError {
    fn from(error: &PipelineError) -> Self {
        let PipelineError { kind, retryable, split, machine_specific, .. } = *error;
        Self { kind, retryable, split, machine_specific, message: error.to_string() }
    }
}

impl From<SerializedError> for PipelineError {
    fn from(failure: SerializedError) -> Self {
        let SerializedError { kind, retryable, split, machine_specific, message } = failure;
        Self { retryable, split, machine_specific, ..Self::new(kind, message) }
    }
}

impl fmt::Display for PipelineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&with_causes(self.message.clone(), self.source.as_deref().map(|e| e as &dyn std::error::Error)))
    }
}

/// Removes the wrappers that DataFusion and Arrow put around errors of other crates.
fn unwrap_wrappers(error: DataFusionError) -> DataFusionError {
    match error {
        DataFusionError::Context(_, inner) | DataFusionError::Diagnostic(_, inner) => unwrap_wrappers(*inner),
        DataFusionError::ArrowError(inner, trace) => match *inner {
            ArrowError::ExternalError(cause) => unwrap_wrappers(DataFusionError::External(cause)),
            other => DataFusionError::ArrowError(Box::new(other), trace),
        },
        DataFusionError::Shared(inner) => match Arc::try_unwrap(inner) {
            Ok(inner) => unwrap_wrappers(inner),
            Err(shared) => DataFusionError::Shared(shared),
        },
        DataFusionError::Collection(errors) => match errors.into_iter().next() {
            Some(first) => unwrap_wrappers(first),
            None => DataFusionError::Internal("an error of several without one".into()),
        },
        DataFusionError::External(cause) => match cause.downcast::<DataFusionError>() {
            Ok(inner) => unwrap_wrappers(*inner),
            Err(other) => DataFusionError::External(other),
        },
        other => other,
    }
}

/// Finds an `object_store` error among an error and its causes. The caller explains it, since its own text is not fit
/// for users.
fn find_store_error<'a>(error: &'a (dyn std::error::Error + Send + Sync + 'static)) -> Option<&'a object_store::Error> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        // `SourceError` has explained its store error already
        if error.is::<SourceError>() {
            return None;
        }
        if let Some(found) = error.downcast_ref::<object_store::Error>() {
            return Some(found);
        }
        next = error.source();
    }
    None
}

/// Appends the causes to a message, on one line, and skips text that the message contains already.
pub fn with_causes(mut text: String, mut cause: Option<&(dyn std::error::Error + 'static)>) -> String {
    while let Some(e) = cause {
        let cause_text = e.to_string();
        let cause_text = cause_text.trim_end();
        // many errors repeat the text of their cause; some begin with the text so far
        match cause_text.strip_prefix(text.as_str()) {
            Some(more) => text += more,
            None if text.contains(cause_text) => {}
            None => text = format!("{text}: {cause_text}"),
        }
        cause = e.source();
    }
    text
}

impl std::error::Error for PipelineError {}

impl From<StorageError> for PipelineError {
    fn from(error: StorageError) -> Self {
        Self::new(ErrorKind::Usage, error.to_string())
    }
}

/// File work of the output that panicked on another thread, or that the shutdown of the runtime cancelled: as
/// [`storage::blocking()`] returns it. Other work uses [`PipelineError::worker_stopped`].
impl From<JoinError> for PipelineError {
    fn from(error: JoinError) -> Self {
        Self::caused(ErrorKind::Output, "file work on a thread of its own did not end", error)
    }
}

impl From<Problems> for PipelineError {
    fn from(problems: Problems) -> Self {
        let message = problems.to_string();
        Self { problems: Some(problems), ..Self::new(ErrorKind::Usage, message) }
    }
}

/// The result of a pipeline call.
pub type Result<T, E = PipelineError> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_error::RecordPosition;

    fn of_stage(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> (&'static str, bool) {
        let error = PipelineError::from_stage("split 0", DataFusionError::External(cause.into()));
        assert!(error.to_string().starts_with("split 0: "), "{error}");
        (error.kind.name(), error.retryable)
    }

    #[test]
    fn stages_report_whose_failure_it_is_and_whether_a_retry_can_help() {
        let disk = || std::io::Error::other("no room");
        let store = |source| object_store::Error::Generic { store: "s", source };
        let read = |error| SourceError::Store { file: "f".into(), error: Box::new(error) };
        assert_eq!(of_stage(read(store(Box::new(disk())))), ("input", true));
        let gone = object_store::Error::NotFound { path: "f".into(), source: Box::new(disk()) };
        assert_eq!(of_stage(read(gone)), ("input", false));
        assert_eq!(of_stage(SourceError::Temporary { path: "t".into(), source: disk() }), ("input", true));
        let record = SourceError::Record {
            file: "f".into(),
            position: RecordPosition::Line(1),
            reason: "r",
            message: String::new(),
        };
        assert_eq!(of_stage(record), ("input", false));
        let data = OperatorError::Data { operator: "pack", place: "p".into(), message: String::new() };
        assert_eq!(of_stage(data), ("input", false));
        let teacher = stillhouse_teacher::TeacherError::Io { path: "p".into(), source: disk() };
        let teacher = OperatorError::Teacher(teacher);
        assert_eq!(of_stage(OperatorError::Shared(Arc::new(teacher))), ("model", false));
        let teacher = stillhouse_teacher::TeacherError::Compute("no memory".into());
        assert_eq!(of_stage(OperatorError::Teacher(teacher)), ("model", false));
    }

    #[test]
    fn work_that_panics_on_another_thread_has_the_kind_of_its_caller() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let panicked = || {
            let work = runtime.spawn(async { panic!("of a library") });
            runtime.block_on(work).unwrap_err()
        };
        for kind in [ErrorKind::Input, ErrorKind::Model] {
            let error = PipelineError::worker_stopped(kind)(panicked());
            assert_eq!((error.kind, error.retryable), (kind, false));
            assert!(error.to_string().starts_with("a worker stopped: "), "{error}");
        }
        let error = PipelineError::from(panicked());
        assert_eq!(error.kind, ErrorKind::Output);
        assert!(error.to_string().starts_with("file work"), "{error}");
    }

    #[test]
    fn a_failure_keeps_its_kind_through_everything_that_engines_put_around_it() {
        let own = || PipelineError::new(ErrorKind::Output, "data/x: no room").retryable().with_split(SplitId(7));
        let external = || DataFusionError::External(Box::new(own()));
        let wrapped = [
            external(),
            external().context("partition 7"),
            DataFusionError::Shared(Arc::new(external())),
            DataFusionError::ArrowError(Box::new(ArrowError::ExternalError(Box::new(external()))), None),
            DataFusionError::External(Box::new(external())),
            DataFusionError::Collection(vec![external(), DataFusionError::Execution("later".into())]),
        ];
        for error in wrapped {
            let reported = PipelineError::from_plan(error);
            // the same after a round trip through JSON, as between processes
            let sent = serde_json::to_string(&SerializedError::from(&reported)).unwrap();
            let got = PipelineError::from(serde_json::from_str::<SerializedError>(&sent).unwrap());
            for error in [reported, got] {
                assert_eq!((error.kind, error.retryable, error.split), (ErrorKind::Output, true, Some(SplitId(7))));
                assert_eq!(error.to_string(), "data/x: no room");
            }
        }
    }
}
