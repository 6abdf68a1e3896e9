//! What a running job tells: one stream of events for progress bars, log lines, `--json` and the service.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::Statistics;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The input is being listed, scanned or fetched; tells what takes the time.
    Preparing {
        /// What is being done.
        what: String,
    },
    /// Something that the user allowed and should know of.
    Warning {
        /// What it is.
        message: String,
    },
    /// The plan is made and work begins (or goes on).
    JobStarted {
        /// The job's name.
        name: String,
        /// Where the data set goes.
        output: String,
        /// Splits in the plan.
        splits: u64,
        /// Splits that an earlier run had committed.
        splits_done: u64,
        /// Bytes of the shards that earlier runs had committed.
        bytes_done: u64,
        /// Bytes of input that the plan reads; 0 where not known (columnar files).
        input_bytes: u64,
        /// Teacher, where there is one: architecture, parameters, arithmetic, device.
        teacher: Option<String>,
        /// The job's hash, as it will stand in the manifest.
        #[serde(default)]
        job_hash: String,
    },
    /// Work on a split began.
    SplitStarted {
        /// Which split.
        split: SplitId,
        /// Its data set split.
        dataset_split: String,
        /// On a cluster: the executor, where it has said so.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        executor: Option<String>,
    },
    /// A shard is complete, checked and visible.
    SplitCommitted {
        /// Which split.
        split: SplitId,
        /// Path of the shard under the output.
        shard: String,
        /// Packed sequences.
        rows: u64,
        /// Tokens.
        tokens: u64,
        /// Bytes of the shard.
        bytes: u64,
    },
    /// Nothing has moved for a while: no row, no commit, no request. Told again when twice as long has passed.
    Stalled {
        /// Seconds since anything moved.
        seconds: f64,
        /// Splits at work.
        at_work: u64,
        /// Where they stand, the longest still ones first; the first few of them.
        splits: Vec<StalledSplit>,
    },
    /// A data set is being copied.
    ExportStarted {
        /// To where.
        destination: String,
        /// Files of the data set.
        files: u64,
        /// Bytes of all files.
        bytes: u64,
    },
    /// How far the copy is, sent about four times a second.
    ExportProgress {
        /// Files copied or found there.
        files_done: u64,
        /// Files of the data set.
        files: u64,
        /// Bytes copied or found there.
        bytes_done: u64,
        /// Bytes of all files.
        bytes: u64,
        /// Bytes that were there before.
        bytes_there: u64,
    },
    /// Counters so far, in this run, sent about four times a second.
    Progress(Progress),
    /// All shards are there, with manifest and `_SUCCESS`.
    JobFinished {
        /// Where the data set is.
        output: String,
        /// Hash of everything that decided the bytes of its shards.
        #[serde(default)]
        job_hash: String,
        /// Packed sequences.
        rows: u64,
        /// Tokens.
        tokens: u64,
        /// Bytes of all shards.
        bytes: u64,
        /// Seconds that this run took.
        seconds: f64,
        /// Whether an earlier run had finished the data set already.
        already_done: bool,
        /// What went in.
        #[serde(flatten)]
        went_in: WentIn,
    },
}

/// What went into a data set, and what of it did not get into a sequence.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
// an earlier version may have told less
#[serde(default)]
pub struct WentIn {
    /// Documents read.
    pub documents: u64,
    /// Of those the ones that gave no token.
    pub empty_documents: u64,
    /// Records skipped, by reason; they are not among the documents.
    pub skipped: BTreeMap<String, u64>,
    /// Tokens of text, before packing.
    pub text_tokens: u64,
    /// Of those the ones that packing dropped: remainders, and what was cut off rows.
    pub dropped_tokens: u64,
}

impl From<&Statistics> for WentIn {
    fn from(s: &Statistics) -> Self {
        Self {
            documents: s.documents,
            empty_documents: s.empty_documents,
            skipped: s.skipped.clone(),
            text_tokens: s.text_tokens,
            dropped_tokens: s.dropped_tokens,
        }
    }
}

/// A split at work that does not move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StalledSplit {
    /// Which split.
    pub split: SplitId,
    /// What it reads.
    pub reads: String,
    /// Seconds since anything of it moved.
    pub seconds: f64,
    /// Where its stages stand, in the order of the pipeline.
    pub stages: Vec<StageStatus>,
}

/// Where a stage of a split stands.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStatus {
    /// Its name, as in [`StageProgress`].
    pub name: String,
    /// Rows that came out of it.
    pub rows: u64,
    /// What it is doing, in words.
    pub doing: String,
}

/// What [`Event::Stalled`] says, in words.
pub fn stalled_words(seconds: f64, at_work: u64, splits: &[StalledSplit]) -> String {
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

/// Counters of one stage of the pipeline, in this run, summed over all splits.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct StageProgress {
    /// `read`, the name of an operator (`clean`, `tokenize`, `pack`, `extract`, …), or `write`.
    pub name: String,
    /// Rows that came out of the stage: pieces of documents up to `tokenize`, sequences from `pack` on.
    pub rows: u64,
    /// Seconds of the stage's own work; not those in which it waited for its neighbours. Splits at work at once add up.
    pub busy_seconds: f64,
    /// Seconds in which devices had no batch while the stage was at work, looked at now and then; where several stages were, shared out evenly.
    #[serde(default)]
    pub awaited_seconds: f64,
}

/// Counters of this run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Seconds since the run began.
    pub seconds: f64,
    /// Splits committed, those of earlier runs included.
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
    /// The stages, in the order of the pipeline; the same ones in every event of a run.
    pub stages: Vec<StageProgress>,
    /// Requests sent to object stores and web servers, those sent again counted again.
    pub store_requests: u64,
    /// Of those the ones that were sent again.
    pub store_retries: u64,
    /// Bytes of the shards that this run has committed.
    pub bytes: u64,
}

impl Progress {
    /// The stage that devices without a batch have waited for longest.
    pub fn most_awaited(&self) -> Option<&str> {
        let awaited = self.stages.iter().filter(|stage| stage.awaited_seconds > 0.0);
        awaited.max_by(|a, b| a.awaited_seconds.total_cmp(&b.awaited_seconds)).map(|stage| stage.name.as_str())
    }

    /// Adds what another process has counted for the same run: its work, not what the run itself knows of time, splits and shards.
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

/// Takes events as they happen. Called from several threads.
pub trait Observer: Send + Sync {
    /// Takes one event; must not block for long.
    fn event(&self, event: &Event);
}

/// Takes no notice.
pub struct Silent;

impl Observer for Silent {
    fn event(&self, _: &Event) {}
}
