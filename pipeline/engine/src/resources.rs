//! What plan nodes take from their session: tokenizer, devices, output, threads, and the state of the splits in
//! progress.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use datafusion::common::{Result, internal_datafusion_err};
use datafusion::execution::TaskContext;
use stillhouse_input_files::Store;
use stillhouse_operators::operator::{DuplicateList, OperatorError};
use stillhouse_operators::operator_spec::OperatorSpec;
use stillhouse_operators::operator_spec::RowChecks;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_output::Output;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::SplitRecord;

use crate::device::DeviceQueue;
use crate::pool::Spawner;
use crate::stage_state::SplitState;

/// The first stage of every split.
pub(crate) const READ: &str = "read";
/// The last stage of every split.
pub(crate) const WRITE: &str = "write";

/// The resources of a job on this machine.
pub struct JobResources {
    /// The splits, in the order of the partitions.
    pub splits: Arc<Vec<SplitRecord>>,
    /// The store of the input. Its runtime serves all requests and file calls.
    pub store: Store,
    /// The tokenizer.
    pub vocabulary: Arc<Vocabulary>,
    /// The duplicates among the documents of the input, in a job with `deduplicate`.
    pub duplicates: Option<Arc<dyn DuplicateList>>,
    /// The devices that hold the teacher; empty in a job without one.
    pub devices: Vec<DeviceQueue>,
    /// The output to which the shards are committed; `None` for a plan without a sink.
    pub output: Option<Output>,
    /// Returns the checks that the rows of a split must pass.
    pub row_checks: Arc<dyn Fn(&SplitRecord) -> RowChecks + Send + Sync>,
    /// The threads that work on splits.
    pub spawner: Spawner,
    /// Whether the operators of a split overlap, each pulled one batch ahead: true when fewer splits run at once than
    /// there are threads.
    pub operators_overlap: bool,
    /// Set as soon as a split fails, before its error is reported. No further split begins.
    pub has_failed: AtomicBool,
    /// Set when a split has failed. The others end at their next batch.
    pub stop: Arc<AtomicBool>,
    /// The stages of a split, in order.
    pub stages: Vec<&'static str>,
    /// The splits in progress.
    pub splits_in_progress: SplitsInProgress,
}

/// The splits for which this session has open streams.
#[derive(Debug, Default)]
pub struct SplitsInProgress(Mutex<HashMap<SplitId, Weak<SplitState>>>);

impl SplitsInProgress {
    fn get(&self, split: &SplitRecord, stages: &[&'static str]) -> Arc<SplitState> {
        let mut splits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = splits.get(&split.split).and_then(Weak::upgrade) {
            return state;
        }
        splits.retain(|_, state| state.strong_count() > 0);
        let input_file = split.pieces.first().map(|piece| piece.file.clone()).unwrap_or_default();
        let state = Arc::new(SplitState::new(split.split, input_file, stages));
        splits.insert(split.split, Arc::downgrade(&state));
        state
    }

    /// Forgets the state of a split, so that a new attempt starts with zero counts. Remains of a failed attempt may
    /// still hold its state, and a read that cannot be stopped may still add to it.
    pub fn reset(&self, split: SplitId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&split);
    }

    /// Returns all splits in progress, ordered by number.
    pub fn all(&self) -> Vec<Arc<SplitState>> {
        let splits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = splits.values().filter_map(Weak::upgrade).collect();
        all.sort_by_key(|state| state.split);
        all
    }
}

impl JobResources {
    /// Returns the resources of the session that executes a plan.
    ///
    /// # Errors
    /// When the session belongs to no job.
    pub fn of(context: &TaskContext) -> Result<Arc<Self>> {
        let found = context.session_config().get_extension::<Self>();
        found.ok_or_else(|| internal_datafusion_err!("this session has no resources of a Stillhouse job"))
    }

    /// Returns the split of a partition.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn split(&self, partition: usize) -> Result<SplitRecord> {
        let none = || internal_datafusion_err!("{} splits, asked for partition {partition}", self.splits.len());
        self.splits.get(partition).cloned().ok_or_else(none)
    }

    /// Returns the shared state of a split in progress: its statistics and what its stages are doing.
    pub fn split_state(&self, split: &SplitRecord) -> Arc<SplitState> {
        self.splits_in_progress.get(split, &self.stages)
    }

    /// Returns the device for a partition. Partitions rotate over the devices that are not lost.
    pub fn device_for(&self, partition: usize) -> Result<DeviceQueue, OperatorError> {
        let usable: Vec<&DeviceQueue> = self.devices.iter().filter(|device| !device.is_lost()).collect();
        let none = || {
            let message = match self.devices.iter().find_map(|device| device.loss_reason()) {
                Some(reason) => format!("every device is lost: {reason}"),
                None => "needs a teacher".into(),
            };
            OperatorError::Config { operator: "extract", message }
        };
        let at = partition.checked_rem(usable.len()).ok_or_else(none)?;
        usable.get(at).map(|device| DeviceQueue::clone(device)).ok_or_else(none)
    }

    /// Counts the devices that can no longer be used.
    pub fn lost_devices(&self) -> usize {
        self.devices.iter().filter(|device| device.is_lost()).count()
    }
}

impl fmt::Debug for JobResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let output = self.output.as_ref().map(ToString::to_string);
        f.debug_struct("JobResources").field("output", &output).finish_non_exhaustive()
    }
}

/// Lists the stages of a split: `read`, the operators, `write`.
pub fn stages(operators: &[OperatorSpec]) -> Vec<&'static str> {
    std::iter::once(READ).chain(operators.iter().map(OperatorSpec::name)).chain(std::iter::once(WRITE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_that_begins_anew_counts_from_nothing() {
        let (pieces, dataset_split) = (Vec::new(), "train".into());
        let split = SplitRecord { split: SplitId(3), dataset_split, pieces, keys: None, appended: 0, place: None };
        let splits_in_progress = SplitsInProgress::default();
        let before = splits_in_progress.get(&split, &["read"]);
        assert!(Arc::ptr_eq(&before, &splits_in_progress.get(&split, &["read"])));
        splits_in_progress.reset(split.split);
        // the old attempt is still alive
        let now = splits_in_progress.get(&split, &["read"]);
        assert!(!Arc::ptr_eq(&before, &now));
        assert!(splits_in_progress.all().iter().all(|state| Arc::ptr_eq(state, &now)));
    }
}
