//! The data that the service stores about a job, and the states of a job.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use stillhouse_pipeline::events::{InputCounts, StageProgress};
use utoipa::ToSchema;

/// Milliseconds since the Unix epoch, as SQLite stores them; serialized as RFC 3339.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub i64);

impl Time {
    /// The current time of this machine's clock.
    pub fn now() -> Self {
        Self(Utc::now().timestamp_millis())
    }

    /// This time plus `wait`.
    pub fn after(self, wait: std::time::Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)))
    }

    /// Seconds from an earlier time to this one; 0 if `earlier` is later.
    pub fn seconds_since(self, earlier: Self) -> f64 {
        (self.0 - earlier.0).max(0) as f64 / 1e3
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = DateTime::<Utc>::from_timestamp_millis(self.0).unwrap_or_default();
        f.write_str(&time.to_rfc3339_opts(SecondsFormat::Millis, true))
    }
}

impl Serialize for Time {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let time = DateTime::parse_from_rfc3339(&text).map_err(serde::de::Error::custom)?;
        Ok(Self(time.timestamp_millis()))
    }
}

/// A job's id: 12 characters that are easy to read out and to type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(String);

const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const ID_LENGTH: usize = 12;

impl JobId {
    /// A new id of 60 random bits.
    pub fn new() -> Result<Self, getrandom::Error> {
        let mut bytes = [0; ID_LENGTH];
        getrandom::fill(&mut bytes)?;
        Ok(Self(bytes.iter().map(|b| char::from(ALPHABET[usize::from(b % 32)])).collect()))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for JobId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let valid = text.len() == ID_LENGTH && text.bytes().all(|b| ALPHABET.contains(&b));
        if valid { Ok(Self(text.to_owned())) } else { Err(()) }
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// States of a job.
///
/// ```text
///             ┌──────────── the service stopped or was killed ───────────┐
///             ▼                                                          │
///   ┌──► queued ─────────────────────► running ──────────────────────────┴──► succeeded
///   │       │                           │    │ │
/// backoff   │                    cancel │    │ └─ error in the job, limit hit, no attempt left ─► failed
///   is      │ cancel                    ▼    │ crashed, or failed in a
///  over     │                    cancelling  │ way that a retry can fix          failed ─┐ retry
///   │       ▼                           │    ▼                                cancelled ─┤
///   └────────────── retrying ◄──────────┼────┘                                           │
///           │           ▲               │                                                │
///           │ cancel    └───────────────┼────────────────────────────────────────────────┘
///           ▼                           ▼
///       cancelled ◄─────────────────────┘
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Waits for a slot.
    Queued,
    /// A worker runs it.
    Running,
    /// Its worker was asked to stop.
    Cancelling,
    /// Waits for its next attempt.
    Retrying,
    /// The data set is complete.
    Succeeded,
    /// It failed for good; only a retry request starts it again.
    Failed,
    /// Stopped on request; committed splits stay.
    Cancelled,
}

impl JobState {
    /// All states, in the order of a job's life.
    pub const ALL: [Self; 7] =
        [Self::Queued, Self::Running, Self::Cancelling, Self::Retrying, Self::Succeeded, Self::Failed, Self::Cancelled];

    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Cancelling => "cancelling",
            Self::Retrying => "retrying",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether the job stays in this state until a request changes it.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// Whether the diagram has an arrow from this state to `next`.
    pub fn can_transition_to(self, next: Self) -> bool {
        use JobState as S;
        matches!(
            (self, next),
            (S::Queued, S::Running | S::Cancelled | S::Failed)
                | (S::Running, S::Succeeded | S::Failed | S::Retrying | S::Queued | S::Cancelling)
                | (S::Cancelling, S::Cancelled | S::Succeeded)
                | (S::Retrying, S::Queued | S::Cancelled)
                | (S::Failed | S::Cancelled, S::Retrying)
        )
    }
}

impl FromStr for JobState {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|s| s.name() == text).ok_or(())
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The resource that a job occupies while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Slot {
    /// One of the CPU slots.
    Cpu,
    /// One slot of any GPU.
    AnyGpu,
    /// One slot of the GPU with this ordinal.
    Gpu(u32),
}

impl fmt::Display for Slot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::AnyGpu => f.write_str("gpu"),
            Self::Gpu(n) => write!(f, "gpu:{n}"),
        }
    }
}

impl FromStr for Slot {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match (text, text.strip_prefix("gpu:")) {
            ("cpu", _) => Ok(Self::Cpu),
            ("gpu", _) => Ok(Self::AnyGpu),
            (_, Some(n)) => n.parse().map(Self::Gpu).map_err(|_| ()),
            _ => Err(()),
        }
    }
}

/// The kind of device that a job runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The CPU.
    Cpu,
    /// A GPU.
    Gpu,
}

/// The cause of a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The job: its file, input or teacher. A retry without changes fails again.
    Job,
    /// The machine or an object store: the worker crashed or was killed, or a store did not answer.
    Machine,
    /// A limit on time, output or memory.
    Limit,
}

/// One problem of a job file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FieldProblem {
    /// Path of the field, such as `pack.length`; empty for the whole file.
    pub field: String,
    /// The invalid value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// What is wrong, and what is valid.
    pub message: String,
    /// Line of the field in the job file, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Column in that line, in characters from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub column: Option<u32>,
}

impl From<&stillhouse_schemas::problems::Problem> for FieldProblem {
    fn from(p: &stillhouse_schemas::problems::Problem) -> Self {
        let (line, column) = (p.position.map(|at| at.line), p.position.map(|at| at.column));
        Self { field: p.field.clone(), got: p.got.clone(), message: p.message.clone(), line, column }
    }
}

impl From<&FieldProblem> for stillhouse_schemas::problems::Problem {
    fn from(p: &FieldProblem) -> Self {
        let position =
            p.line.zip(p.column).map(|(line, column)| stillhouse_schemas::problems::Position { line, column });
        Self { field: p.field.clone(), got: p.got.clone(), message: p.message.clone(), position }
    }
}

/// Why a job failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// The cause.
    pub kind: FailureKind,
    /// The error message.
    pub message: String,
    /// Problems of the job file, by field.
    #[serde(default)]
    pub problems: Vec<FieldProblem>,
}

/// Rows and time of one pipeline stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StageView {
    /// `read`, the name of an operator, or `write`.
    pub name: String,
    /// Rows that the stage produced.
    pub rows: u64,
    /// Seconds that the stage worked, summed over splits.
    pub seconds: f64,
}

impl From<&StageProgress> for StageView {
    fn from(stage: &StageProgress) -> Self {
        Self { name: stage.name.clone(), rows: stage.rows, seconds: stage.busy_seconds }
    }
}

/// Progress of the current attempt, or of the last one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
// an earlier version of the service may have stored fewer fields
#[serde(default)]
pub struct ProgressView {
    /// Seconds since the attempt began to work.
    pub seconds: f64,
    /// Committed splits, including those of earlier attempts.
    pub splits_done: u64,
    /// Splits in the plan.
    pub splits: u64,
    /// Documents read.
    pub documents: u64,
    /// Bytes of text read.
    pub text_bytes: u64,
    /// Tokens of text.
    pub tokens: u64,
    /// Sequences packed.
    pub sequences: u64,
    /// Tokens that the teacher has processed.
    pub teacher_tokens: u64,
    /// Seconds in the teacher's forward pass, summed over concurrent splits.
    pub teacher_seconds: f64,
    /// Seconds spent on log-probabilities, noise and top-k.
    pub extract_seconds: f64,
    /// Devices that run the teacher.
    #[serde(default)]
    pub devices: u64,
    /// Seconds that devices had no batch because no split was ready, summed over devices.
    #[serde(default)]
    pub device_idle_seconds: f64,
    /// Seconds that devices waited for the extraction of logits that they had computed, summed over devices.
    #[serde(default)]
    pub device_blocked_seconds: f64,
    /// Bytes of committed shards, including those of earlier attempts.
    pub bytes: u64,
    /// Tokens per second over the last seconds: teacher tokens if the job has a teacher.
    pub tokens_per_second: f64,
    /// Estimated seconds left at this rate; null if there is no estimate.
    pub seconds_left: Option<f64>,
    /// The stages, in the order of the pipeline.
    pub stages: Vec<StageView>,
}

/// The result of a succeeded job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ResultView {
    /// Packed sequences.
    pub rows: u64,
    /// Tokens.
    pub tokens: u64,
    /// Bytes of all shards.
    pub bytes: u64,
    /// Seconds that the last attempt took.
    pub seconds: f64,
    /// Whether the data set was already complete when the attempt began.
    pub already_done: bool,
    /// Documents read.
    // an earlier version of the service stored none of these
    #[serde(default)]
    pub documents: u64,
    /// Documents that filters dropped, by rule and reason; `documents` counts them.
    #[serde(default)]
    pub dropped: BTreeMap<String, u64>,
    /// Documents that produced no token.
    #[serde(default)]
    pub empty_documents: u64,
    /// Skipped records by reason; `documents` does not count them.
    #[serde(default)]
    pub skipped: BTreeMap<String, u64>,
    /// Tokens of text, before packing.
    #[serde(default)]
    pub text_tokens: u64,
    /// Tokens of text that packing dropped.
    #[serde(default)]
    pub dropped_tokens: u64,
}

/// Most reasons of each kind of a worker's report that the service stores.
const MAX_REASONS: usize = 100;

impl ResultView {
    /// The result of a successful attempt.
    pub fn new([rows, tokens, bytes]: [u64; 3], seconds: f64, already_done: bool, went_in: InputCounts) -> Self {
        // the report of the data set has what each table of a mixture gave
        let InputCounts { documents, dropped, sources: _, empty_documents, skipped, text_tokens, dropped_tokens } =
            went_in;
        let first = |counts: BTreeMap<String, u64>| counts.into_iter().take(MAX_REASONS).collect();
        let (dropped, skipped) = (first(dropped), first(skipped));
        Self {
            rows,
            tokens,
            bytes,
            seconds,
            already_done,
            documents,
            dropped,
            empty_documents,
            skipped,
            text_tokens,
            dropped_tokens,
        }
    }
}

/// A job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// The id of the job.
    #[schema(value_type = String, pattern = "^[0-9a-hjkmnp-tv-z]{12}$", example = "k3v9x0m2t8qa")]
    pub id: JobId,
    /// The name in the job file.
    pub name: String,
    /// The state of the job.
    pub state: JobState,
    /// The user who submitted it.
    pub user: String,
    /// Jobs of higher priority run first.
    #[schema(minimum = -100, maximum = 100)]
    pub priority: i32,
    /// The kind of device that it runs on.
    pub device: Device,
    /// Ordinal of the GPU that it runs on now.
    pub gpu: Option<u32>,
    /// Time of submission.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Time,
    /// Time of the last change to any field.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Time,
    /// Start of the first attempt.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Time>,
    /// Time at which it reached a final state.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Time>,
    /// In state `retrying`: time at which it is queued again.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub not_before: Option<Time>,
    /// Position in the queue by priority and time, from 1; only where a single job is requested.
    pub queue_position: Option<u64>,
    /// Number of started attempts.
    pub attempt: u32,
    /// Attempts that failed or crashed since the submission or the last retry request.
    pub failures: u32,
    /// Attempts that may fail or crash before the job fails.
    pub max_attempts: u32,
    /// Longest duration of one attempt in seconds.
    pub time_limit_seconds: u64,
    /// Largest total size of its shards in bytes.
    pub output_limit_bytes: u64,
    /// Whether the job may replace another job's data set at its output.
    pub overwrite: bool,
    /// Whether the job only adds splits for new input files to its finished data set.
    #[serde(default)]
    #[schema(required = true)]
    pub append: bool,
    /// Path or URL of the data set.
    pub output: String,
    /// Why the job is in this state.
    pub reason: Option<String>,
    /// The failure of the last attempt, if it failed.
    pub failure: Option<Failure>,
    /// Architecture, parameters, arithmetic and device of the teacher.
    pub teacher: Option<String>,
    /// Progress of the current or last attempt.
    pub progress: Option<ProgressView>,
    /// The result of a succeeded job.
    pub result: Option<ResultView>,
}

/// Kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventType {
    /// `{from, to, reason}`: the job changed its state.
    State,
    /// `{what}`: the worker prepares the job, such as by listing, scanning or downloading files.
    Preparing,
    /// `{message}`: a condition that the job allows but its owner should know.
    Warning,
    /// `{name, output, splits, splits_done, bytes_done, input_bytes, teacher, job_hash}`: the plan is complete.
    Started,
    /// `{split, dataset_split}`: a split began.
    SplitStarted,
    /// `{split, shard, rows, tokens, bytes}`: a split was committed.
    SplitCommitted,
    /// `{output, job_hash, rows, tokens, bytes, seconds, already_done, documents, dropped, empty_documents, skipped,
    /// text_tokens, dropped_tokens}`: the data set is complete.
    Finished,
    /// The job's `progress`; sent only live and without a number.
    Progress,
}

impl EventType {
    /// Its name in the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Preparing => "preparing",
            Self::Warning => "warning",
            Self::Started => "started",
            Self::SplitStarted => "split_started",
            Self::SplitCommitted => "split_committed",
            Self::Finished => "finished",
            Self::Progress => "progress",
        }
    }
}

impl FromStr for EventType {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all = [
            Self::State,
            Self::Preparing,
            Self::Warning,
            Self::Started,
            Self::SplitStarted,
            Self::SplitCommitted,
            Self::Finished,
            Self::Progress,
        ];
        all.into_iter().find(|t| t.name() == text).ok_or(())
    }
}

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Number of the event, unique in the service; absent for live-only events.
    pub seq: Option<i64>,
    /// The id of the job.
    #[schema(value_type = String)]
    pub job: JobId,
    /// Time of the event.
    #[schema(value_type = String, format = DateTime)]
    pub time: Time,
    /// Number of the attempt; 0 before the first.
    pub attempt: u32,
    /// The kind of event.
    #[serde(rename = "type")]
    pub kind: EventType,
    /// Fields of the event; see `type`.
    #[schema(value_type = Object)]
    pub data: serde_json::Value,
}

/// A point of the rate plot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RatePoint {
    /// Time of the point.
    #[schema(value_type = String, format = DateTime)]
    pub time: Time,
    /// Number of the attempt.
    pub attempt: u32,
    /// Tokens per second since the previous point.
    pub tokens_per_second: f64,
    /// Tokens so far in this attempt.
    pub tokens: u64,
    /// Splits committed.
    pub splits_done: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for state in JobState::ALL {
            assert_eq!(state.name().parse(), Ok(state));
            assert_eq!(serde_json::to_value(state).unwrap(), state.name());
        }
        for slot in [Slot::Cpu, Slot::AnyGpu, Slot::Gpu(3)] {
            assert_eq!(slot.to_string().parse(), Ok(slot));
        }
    }

    #[test]
    fn final_states_are_left_by_a_retry_alone() {
        for from in JobState::ALL.into_iter().filter(|s| s.is_final()) {
            for to in JobState::ALL {
                assert_eq!(from.can_transition_to(to), from != JobState::Succeeded && to == JobState::Retrying);
            }
        }
        // every other state leads to a final one
        for from in JobState::ALL.into_iter().filter(|s| !s.is_final()) {
            assert!(JobState::ALL.into_iter().any(|to| to.is_final() && from.can_transition_to(to)), "{from}");
        }
    }

    #[test]
    fn ids_and_times_have_one_form() {
        let id = JobId::new().unwrap();
        assert_eq!(id.as_str().parse(), Ok(id.clone()));
        for bad in ["", "k3v9x0m2t8q", "k3v9x0m2t8qai", "K3V9X0M2T8QA", "../../../etc", "k3v9x0m2t8q\n"] {
            assert!(bad.parse::<JobId>().is_err(), "{bad}");
        }
        assert_eq!(Time(1_700_000_000_123).to_string(), "2023-11-14T22:13:20.123Z");
        let time: Time = serde_json::from_str("\"2023-11-14T22:13:20.123Z\"").unwrap();
        assert_eq!(time, Time(1_700_000_000_123));
    }
}
