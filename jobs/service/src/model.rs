//! What the service keeps of a job, and the states that it goes through.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use stillhouse_pipeline::events::{StageProgress, WentIn};
use utoipa::ToSchema;

/// Milliseconds since 1970, as SQLite keeps them; RFC 3339 in every answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub i64);

impl Time {
    /// The time now, by the clock of this machine.
    pub fn now() -> Self {
        Self(Utc::now().timestamp_millis())
    }

    /// The time after a wait.
    pub fn after(self, wait: std::time::Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(wait.as_millis()).unwrap_or(i64::MAX)))
    }

    /// Seconds from an earlier time to this one.
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

/// A job's id: 12 characters, easy to read out and to type.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(String);

const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const ID_LENGTH: usize = 12;

impl JobId {
    /// A new one, of 60 random bits.
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
///  wait     │                    cancel │    │ └─ the job is wrong, a limit, no attempts left ─► failed
///   is      │ cancel                    ▼    │ crashed, or a failure that
///  over     │                    cancelling  │ another attempt can mend          failed ─┐ retry
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
    /// A worker is at it.
    Running,
    /// Its worker was told to stop.
    Cancelling,
    /// Waits for the time of the next attempt.
    Retrying,
    /// The data set is whole.
    Succeeded,
    /// It will not be tried again by itself.
    Failed,
    /// Stopped on request; what is committed stays.
    Cancelled,
}

impl JobState {
    /// All states, in the order of a life.
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

    /// Whether nothing more happens unless somebody asks for it.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }

    /// Whether the diagram has this arrow.
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

/// What a job takes up while it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Slot {
    /// One of the CPU slots.
    Cpu,
    /// A slot of any GPU.
    AnyGpu,
    /// A slot of the GPU of this ordinal.
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

/// Kind of device that a job runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// The processor.
    Cpu,
    /// A GPU.
    Gpu,
}

/// What was wrong with an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// The job: its file, its input, its teacher. The same again fails again.
    Job,
    /// The machine or a store: the worker crashed or was killed, a store did not answer.
    Machine,
    /// A limit on time or on output.
    Limit,
}

/// One thing that is wrong with a job file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct FieldProblem {
    /// Path of the field, such as `pack.length`; empty for the whole file.
    pub field: String,
    /// What was got.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// What is wrong and what is valid.
    pub message: String,
    /// Line of the job file where it stands, from 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Column of that line, in characters from 1.
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
    /// Whose fault it is.
    pub kind: FailureKind,
    /// In words.
    pub message: String,
    /// What is wrong with the job file, by field.
    #[serde(default)]
    pub problems: Vec<FieldProblem>,
}

/// Rows and time of one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StageView {
    /// `read`, the name of an operator, or `write`.
    pub name: String,
    /// Rows that it gave out.
    pub rows: u64,
    /// Seconds of its own work, summed over splits.
    pub seconds: f64,
}

impl From<&StageProgress> for StageView {
    fn from(stage: &StageProgress) -> Self {
        Self { name: stage.name.clone(), rows: stage.rows, seconds: stage.busy_seconds }
    }
}

/// Counters of the attempt that runs, or of the last one.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
// an earlier version of the service may have kept less
#[serde(default)]
pub struct ProgressView {
    /// Seconds since the attempt began to work.
    pub seconds: f64,
    /// Splits committed, those of earlier attempts included.
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
    /// Tokens that the teacher has gone over.
    pub teacher_tokens: u64,
    /// Seconds in the teacher's own pass, summed over splits at work.
    pub teacher_seconds: f64,
    /// Seconds in log-probabilities, noise and top-k.
    pub extract_seconds: f64,
    /// Devices with the teacher.
    #[serde(default)]
    pub devices: u64,
    /// Seconds in which devices had no batch, as no split was ready, summed over them.
    #[serde(default)]
    pub device_idle_seconds: f64,
    /// Seconds in which devices waited for the extraction of the logits that they had made, summed over them.
    #[serde(default)]
    pub device_blocked_seconds: f64,
    /// Bytes of the committed shards, those of earlier attempts included.
    pub bytes: u64,
    /// Tokens per second over the last seconds: the teacher's where there is one.
    pub tokens_per_second: f64,
    /// Seconds left at this rate, where it can be told.
    pub seconds_left: Option<f64>,
    /// The stages, in the order of the pipeline.
    pub stages: Vec<StageView>,
}

/// What a finished job made.
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
    /// Whether the data set was complete before.
    pub already_done: bool,
    /// Documents read.
    // an earlier version of the service has kept none of these
    #[serde(default)]
    pub documents: u64,
    /// Of those the ones that gave no token.
    #[serde(default)]
    pub empty_documents: u64,
    /// Records skipped, by reason; they are not among the documents.
    #[serde(default)]
    pub skipped: BTreeMap<String, u64>,
    /// Tokens of text, before packing.
    #[serde(default)]
    pub text_tokens: u64,
    /// Of those the ones that packing dropped.
    #[serde(default)]
    pub dropped_tokens: u64,
}

/// Reasons for skipped records that are kept of what a worker tells.
const MOST_REASONS: usize = 100;

impl ResultView {
    /// The result of an attempt that ended well.
    pub fn new([rows, tokens, bytes]: [u64; 3], seconds: f64, already_done: bool, went_in: WentIn) -> Self {
        let WentIn { documents, empty_documents, skipped, text_tokens, dropped_tokens } = went_in;
        let skipped = skipped.into_iter().take(MOST_REASONS).collect();
        Self {
            rows,
            tokens,
            bytes,
            seconds,
            already_done,
            documents,
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
    /// Its id.
    #[schema(value_type = String, pattern = "^[0-9a-hjkmnp-tv-z]{12}$", example = "k3v9x0m2t8qa")]
    pub id: JobId,
    /// The name in its file.
    pub name: String,
    /// Its state.
    pub state: JobState,
    /// Who submitted it.
    pub user: String,
    /// Jobs of higher priority go first.
    #[schema(minimum = -100, maximum = 100)]
    pub priority: i32,
    /// What it runs on.
    pub device: Device,
    /// Which GPU it runs on now.
    pub gpu: Option<u32>,
    /// When it was submitted.
    #[schema(value_type = String, format = DateTime)]
    pub created_at: Time,
    /// When anything of it changed last.
    #[schema(value_type = String, format = DateTime)]
    pub updated_at: Time,
    /// When it began to run first.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub started_at: Option<Time>,
    /// When it reached a final state.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub finished_at: Option<Time>,
    /// While it is `retrying`: when it is queued again.
    #[schema(value_type = Option<String>, format = DateTime)]
    pub not_before: Option<Time>,
    /// How many queued jobs are before it by priority and time, itself included; told where one job is asked for.
    pub queue_position: Option<u64>,
    /// How often it was started.
    pub attempt: u32,
    /// How many attempts failed or crashed since it was submitted or retried by hand.
    pub failures: u32,
    /// How many may.
    pub max_attempts: u32,
    /// Longest that one attempt may take.
    pub time_limit_seconds: u64,
    /// Most that its shards may take.
    pub output_limit_bytes: u64,
    /// Whether it may replace the data set of another job.
    pub overwrite: bool,
    /// Whether it makes splits of the files alone that its input has grown by, beside those of its finished data set.
    #[serde(default)]
    #[schema(required = true)]
    pub append: bool,
    /// Where the data set goes.
    pub output: String,
    /// Why it is in this state.
    pub reason: Option<String>,
    /// What was wrong with its last attempt, if anything was.
    pub failure: Option<Failure>,
    /// Architecture, parameters, arithmetic and device of its teacher.
    pub teacher: Option<String>,
    /// How far it is.
    pub progress: Option<ProgressView>,
    /// What it made.
    pub result: Option<ResultView>,
}

/// Kinds of event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventType {
    /// `{from, to, reason}`: the job went from one state to another.
    State,
    /// `{what}`: the worker lists, scans or fetches.
    Preparing,
    /// `{message}`: something that the job allowed and its owner should know of.
    Warning,
    /// `{name, output, splits, splits_done, bytes_done, input_bytes, teacher, job_hash}`: the plan is made.
    Started,
    /// `{split, dataset_split}`.
    SplitStarted,
    /// `{split, shard, rows, tokens, bytes}`.
    SplitCommitted,
    /// `{output, job_hash, rows, tokens, bytes, seconds, already_done, documents, empty_documents, skipped, text_tokens, dropped_tokens}`: the
    /// data set is whole.
    Finished,
    /// The job's `progress`; live only, without a number.
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

/// Something that happened to a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Its number in the service; absent for what is live only.
    pub seq: Option<i64>,
    /// Whose.
    #[schema(value_type = String)]
    pub job: JobId,
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub time: Time,
    /// In which attempt; 0 before the first.
    pub attempt: u32,
    /// What.
    #[serde(rename = "type")]
    pub kind: EventType,
    /// More of it; see the type.
    #[schema(value_type = Object)]
    pub data: serde_json::Value,
}

/// A point of the rate plot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RatePoint {
    /// When.
    #[schema(value_type = String, format = DateTime)]
    pub time: Time,
    /// Of which attempt.
    pub attempt: u32,
    /// Tokens per second since the point before.
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
        // every state can be left for a final one
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
