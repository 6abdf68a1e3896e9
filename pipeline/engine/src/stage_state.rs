//! State of the splits in progress: what each stage is doing, for stall reports, and the statistics that operators
//! share.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use stillhouse_base::events::StageStatus;
use stillhouse_operators::operator::{CarriedValues, Counters, FooterEntries, Measure, Meter, SharedStatistics};
use stillhouse_output::SplitCounts;
use stillhouse_schemas::ids::SplitId;

use crate::node_metrics::NodeMetrics;

/// What a stage of a split is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum StageActivity {
    /// Has not begun.
    NotStarted,
    /// Computes, reads or writes.
    Works,
    /// Waits for a batch of the previous stage.
    WaitsForInput,
    /// Waits for the device.
    WaitsForDevice,
    /// Has a batch that the next stage has not taken yet.
    WaitsForConsumer,
    /// Has ended.
    Done,
}

impl StageActivity {
    const ALL: [Self; 6] =
        [Self::NotStarted, Self::Works, Self::WaitsForInput, Self::WaitsForDevice, Self::WaitsForConsumer, Self::Done];

    fn description(self) -> &'static str {
        match self {
            Self::NotStarted => "has not begun",
            Self::Works => "is at work",
            Self::WaitsForInput => "waits for the stage before it",
            Self::WaitsForDevice => "waits for the device",
            Self::WaitsForConsumer => "waits for the stage after it",
            Self::Done => "has ended",
        }
    }
}

#[derive(Debug)]
struct Stage {
    name: &'static str,
    rows: AtomicU64,
    activity: AtomicU8,
}

/// A split in progress. Plan nodes find it in the session by the split's number. It lives as long as one of their
/// streams.
#[derive(Debug)]
pub struct SplitState {
    /// The split's number.
    pub split: SplitId,
    /// The first input file that it reads.
    pub input_file: String,
    /// Statistics for the shard's record.
    pub statistics: SharedStatistics,
    /// Entries for the shard's footer.
    pub footer: FooterEntries,
    /// The values of `input.carry`, set before reading begins.
    carried: Mutex<Option<Arc<dyn CarriedValues>>>,
    /// SHA-256 checksums of the input, set once all of it is read.
    input_sha256: Mutex<Vec<String>>,
    stages: Vec<Stage>,
    counters: Counters,
}

impl SplitState {
    /// A new split that reads the file `reads` and has these stages.
    pub fn new(split: SplitId, input_file: String, stages: &[&'static str]) -> Self {
        let stage = |name: &&'static str| Stage {
            name,
            rows: AtomicU64::new(0),
            activity: AtomicU8::new(StageActivity::NotStarted as u8),
        };
        Self {
            split,
            input_file,
            statistics: SharedStatistics::default(),
            footer: FooterEntries::default(),
            carried: Mutex::default(),
            input_sha256: Mutex::default(),
            stages: stages.iter().map(stage).collect(),
            counters: Counters::default(),
        }
    }

    /// Returns the counts of this attempt at the split so far.
    pub fn counts(&self) -> SplitCounts {
        SplitCounts {
            documents: self.counters.get(Measure::Documents),
            text_bytes: self.counters.get(Measure::TextBytes),
            tokens: self.counters.get(Measure::Tokens),
            sequences: self.counters.get(Measure::Sequences),
            teacher_tokens: self.counters.get(Measure::TeacherTokens),
        }
    }

    /// Sets the source of the values of `input.carry`.
    pub fn set_carried(&self, carried: Arc<dyn CarriedValues>) {
        *self.carried.lock().unwrap_or_else(PoisonError::into_inner) = Some(carried);
    }

    /// Returns the source of the values of `input.carry`, in a job with it.
    pub fn carried(&self) -> Option<Arc<dyn CarriedValues>> {
        self.carried.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sets the checksums of the input.
    pub fn set_input_sha256(&self, sha256: Vec<String>) {
        *self.input_sha256.lock().unwrap_or_else(PoisonError::into_inner) = sha256;
    }

    /// Returns the checksums of the input.
    pub fn input_sha256(&self) -> Vec<String> {
        self.input_sha256.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sum of the rows that all stages have emitted; grows as long as anything moves.
    pub fn rows(&self) -> u64 {
        self.stages.iter().map(|stage| stage.rows.load(Ordering::Relaxed)).sum()
    }

    /// Returns the names of the stages that are working.
    pub fn working_stages(&self) -> impl Iterator<Item = &'static str> {
        let is_working = |stage: &&Stage| stage.activity.load(Ordering::Relaxed) == StageActivity::Works as u8;
        self.stages.iter().filter(is_working).map(|stage| stage.name)
    }

    /// Returns the status of each stage, in order.
    pub fn statuses(&self) -> Vec<StageStatus> {
        let status = |stage: &Stage| StageStatus {
            name: stage.name.to_owned(),
            rows: stage.rows.load(Ordering::Relaxed),
            doing: StageActivity::ALL
                .get(usize::from(stage.activity.load(Ordering::Relaxed)))
                .map_or("", |activity| activity.description())
                .to_owned(),
        };
        self.stages.iter().map(status).collect()
    }
}

/// Adds each count to the metrics of a node and to the state of a split.
#[derive(Debug)]
pub struct SplitMeter {
    node: Arc<NodeMetrics>,
    split: Arc<SplitState>,
}

impl SplitMeter {
    /// A meter for this node and this split.
    pub fn of(node: &Arc<NodeMetrics>, split: &Arc<SplitState>) -> Arc<dyn Meter> {
        Arc::new(Self { node: Arc::clone(node), split: Arc::clone(split) })
    }
}

impl Meter for SplitMeter {
    fn add(&self, what: Measure, n: u64) {
        self.node.add(what, n);
        self.split.counters.add(what, n);
    }
}

/// One stage's part of the state of its split.
#[derive(Debug, Clone)]
pub struct StageState {
    split: Arc<SplitState>,
    stage: usize,
}

impl StageState {
    /// The stage with this index.
    pub fn new(split: &Arc<SplitState>, stage: usize) -> Self {
        Self { split: Arc::clone(split), stage }
    }

    /// Sets what the stage is doing.
    pub fn set_activity(&self, activity: StageActivity) {
        if let Some(stage) = self.split.stages.get(self.stage) {
            stage.activity.store(activity as u8, Ordering::Relaxed);
        }
    }

    /// Counts rows that the stage has emitted.
    pub fn count_output(&self, rows: usize) {
        if let Some(stage) = self.split.stages.get(self.stage) {
            stage.rows.fetch_add(rows as u64, Ordering::Relaxed);
        }
    }

    /// Returns the state of the whole split.
    pub fn split(&self) -> &Arc<SplitState> {
        &self.split
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operator_counts_is_of_its_node_and_of_this_attempt_at_the_split() {
        let node = NodeMetrics::new();
        for documents in [13, 20] {
            // a new attempt has a new state
            let split = Arc::new(SplitState::new(SplitId(1), "a.jsonl".into(), &["read"]));
            let meter = SplitMeter::of(&node, &split);
            meter.add(Measure::Documents, documents);
            meter.add(Measure::Tokens, 10 * documents);
            let counts = SplitCounts { documents, tokens: 10 * documents, ..SplitCounts::default() };
            assert_eq!(split.counts(), counts);
        }
        assert_eq!(node.set().sum_by_name("documents").map(|sum| sum.as_usize()), Some(33));
    }
}
