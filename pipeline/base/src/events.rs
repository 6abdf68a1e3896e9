//! Events of a running job: one stream for progress bars, log lines, `--json` and the service.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{SourceStatistics, Statistics};

/// An event of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A slow step before the plan is ready: the input is being listed, scanned or fetched.
    Preparing {
        /// Description of the step.
        what: String,
    },
    /// Something that the user allowed but should know about.
    Warning {
        /// Text of the warning.
        message: String,
    },
    /// The plan is ready and work begins or resumes.
    JobStarted {
        /// Name of the job.
        name: String,
        /// Path or URL of the data set.
        output: String,
        /// Number of splits in the plan.
        splits: u64,
        /// Number of splits that earlier runs committed.
        splits_done: u64,
        /// Bytes of the shards that earlier runs committed.
        bytes_done: u64,
        /// Bytes of input that the plan reads; 0 if unknown (columnar files).
        input_bytes: u64,
        /// The teacher, if the job has one: architecture, parameters, arithmetic, device.
        teacher: Option<String>,
        /// Hash of the job, as the manifest will record it.
        #[serde(default)]
        job_hash: String,
    },
    /// Work on a split began.
    SplitStarted {
        /// Id of the split.
        split: SplitId,
        /// Data set split that the split belongs to, such as `train`.
        dataset_split: String,
        /// On a cluster: the executor that makes the split, if it has reported its name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        executor: Option<String>,
    },
    /// A shard is complete, verified and visible to readers.
    SplitCommitted {
        /// Id of the split.
        split: SplitId,
        /// Path of the shard, relative to the output.
        shard: String,
        /// Number of packed sequences.
        rows: u64,
        /// Number of tokens.
        tokens: u64,
        /// Size of the shard in bytes.
        bytes: u64,
    },
    /// Nothing has moved for a while: no row, no commit, no request. Sent again each time the stall has doubled in
    /// length.
    Stalled {
        /// Seconds since the last movement.
        seconds: f64,
        /// Number of splits in progress.
        at_work: u64,
        /// State of the first few splits, those that have been still for longest first.
        splits: Vec<StalledSplit>,
    },
    /// The copy of a data set began.
    ExportStarted {
        /// Destination path or URL.
        destination: String,
        /// Number of files of the data set.
        files: u64,
        /// Bytes of all files.
        bytes: u64,
    },
    /// Progress of the copy, sent about four times a second.
    ExportProgress {
        /// Files copied, or already present at the destination.
        files_done: u64,
        /// Number of files of the data set.
        files: u64,
        /// Bytes copied, or already present at the destination.
        bytes_done: u64,
        /// Bytes of all files.
        bytes: u64,
        /// Bytes that were present at the destination before the copy began.
        bytes_there: u64,
    },
    /// Counters of this run so far, sent about four times a second.
    Progress(Progress),
    /// All shards are complete, and the manifest and `_SUCCESS` are written.
    JobFinished {
        /// Path or URL of the data set.
        output: String,
        /// Hash of everything that determines the bytes of the shards.
        #[serde(default)]
        job_hash: String,
        /// Number of packed sequences.
        rows: u64,
        /// Number of tokens.
        tokens: u64,
        /// Bytes of all shards.
        bytes: u64,
        /// Duration of this run in seconds.
        seconds: f64,
        /// Whether an earlier run had already finished the data set.
        already_done: bool,
        /// Counts of the input.
        #[serde(flatten)]
        went_in: InputCounts,
    },
}

/// Counts of the input of a data set, and of the part that did not become sequences.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
// events of earlier versions may lack fields
#[serde(default)]
pub struct InputCounts {
    /// Documents read.
    pub documents: u64,
    /// Those documents that filters dropped, by rule and reason.
    pub dropped: BTreeMap<String, u64>,
    /// Those documents that yielded no token.
    pub empty_documents: u64,
    /// Those documents by the table of a mixture.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sources: BTreeMap<String, SourceStatistics>,
    /// Records skipped, by reason; not included in `documents`.
    pub skipped: BTreeMap<String, u64>,
    /// Tokens of text, before packing.
    pub text_tokens: u64,
    /// Those text tokens that packing dropped: remainders, and the parts cut off from rows.
    pub dropped_tokens: u64,
}

impl From<&Statistics> for InputCounts {
    fn from(s: &Statistics) -> Self {
        Self {
            documents: s.documents,
            dropped: s.dropped.clone(),
            sources: s.sources.clone(),
            empty_documents: s.empty_documents,
            skipped: s.skipped.clone(),
            text_tokens: s.text_tokens,
            dropped_tokens: s.dropped_tokens,
        }
    }
}

/// A split in progress that does not move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StalledSplit {
    /// Id of the split.
    pub split: SplitId,
    /// The input that the split reads.
    pub reads: String,
    /// Seconds since the last movement of the split.
    pub seconds: f64,
    /// State of its stages, in pipeline order.
    pub stages: Vec<StageStatus>,
}

/// State of one stage of a split.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStatus {
    /// Name of the stage, as in [`StageProgress`].
    pub name: String,
    /// Rows that the stage has emitted.
    pub rows: u64,
    /// What the stage is doing, as text.
    pub doing: String,
}

/// Formats [`Event::Stalled`] as text.
pub fn format_stall(seconds: f64, at_work: u64, splits: &[StalledSplit]) -> String {
    let minutes = (seconds / 60.0).floor().max(1.0);
    let mut text = format!("nothing has moved for {minutes} minute{}", if minutes == 1.0 { "" } else { "s" });
    for split in splits {
        let stages: Vec<String> =
            split.stages.iter().map(|s| format!("{} {} ({} rows)", s.name, s.doing, s.rows)).collect();
        text += &format!("; split {} ({}): {}", split.split.0, split.reads, stages.join(", "));
    }
    let more = at_work.saturating_sub(splits.len() as u64);
    if more > 0 {
        text += &format!("; and {more} more splits");
    }
    text
}

/// Counters of one pipeline stage in this run, summed over all splits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageProgress {
    /// `read`, the name of an operator (`clean`, `tokenize`, `pack`, `extract`, …), or `write`.
    pub name: String,
    /// Rows that the stage has emitted: pieces of documents up to `tokenize`, sequences from `pack` on.
    pub rows: u64,
    /// Seconds that the stage worked, without the time it waited for its neighbours, summed over concurrent splits.
    pub busy_seconds: f64,
    /// Seconds in which devices had no batch while the stage was at work, estimated by sampling. Stages that were at
    /// work at the same time share the seconds evenly.
    #[serde(default)]
    pub awaited_seconds: f64,
}

/// Counters of this run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Seconds since the run began.
    pub seconds: f64,
    /// Splits committed, including those of earlier runs.
    pub splits_done: u64,
    /// Number of splits in the plan.
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
    /// Number of devices that run the teacher.
    #[serde(default)]
    pub devices: u64,
    /// Seconds in which devices had no batch because no split was ready, summed over devices.
    #[serde(default)]
    pub device_idle_seconds: f64,
    /// Seconds in which devices waited for the extraction of logits that they had computed, summed over devices.
    #[serde(default)]
    pub device_blocked_seconds: f64,
    /// The stages, in pipeline order; every event of a run lists the same ones.
    pub stages: Vec<StageProgress>,
    /// Requests sent to object stores and web servers, including retries.
    pub store_requests: u64,
    /// Those requests that were retries.
    pub store_retries: u64,
    /// Bytes of the shards that this run has committed.
    pub bytes: u64,
}

impl Progress {
    /// Returns the stage that devices without a batch have waited for longest.
    pub fn most_awaited(&self) -> Option<&str> {
        let awaited = self.stages.iter().filter(|stage| stage.awaited_seconds > 0.0);
        awaited.max_by(|a, b| a.awaited_seconds.total_cmp(&b.awaited_seconds)).map(|stage| stage.name.as_str())
    }

    /// Adds the counters of another process of the same run: its work, but not time, splits and shards, which this run
    /// counts itself.
    pub fn add(&mut self, other: &Self) {
        self.documents += other.documents;
        self.text_bytes += other.text_bytes;
        self.tokens += other.tokens;
        self.sequences += other.sequences;
        self.teacher_tokens += other.teacher_tokens;
        self.teacher_seconds += other.teacher_seconds;
        self.extract_seconds += other.extract_seconds;
        self.devices += other.devices;
        self.device_idle_seconds += other.device_idle_seconds;
        self.device_blocked_seconds += other.device_blocked_seconds;
        self.store_requests += other.store_requests;
        self.store_retries += other.store_retries;
        for stage in &other.stages {
            match self.stages.iter_mut().find(|own| own.name == stage.name) {
                Some(own) => {
                    own.rows += stage.rows;
                    own.busy_seconds += stage.busy_seconds;
                    own.awaited_seconds += stage.awaited_seconds;
                }
                None => self.stages.push(stage.clone()),
            }
        }
    }
}

/// Receives events as they happen, on several threads.
pub trait Observer: Send + Sync {
    /// Receives one event. Must not block for long.
    fn event(&self, event: &Event);
}

/// An observer that ignores all events.
pub struct NullObserver;

impl Observer for NullObserver {
    fn event(&self, _: &Event) {}
}
