//! What the nodes of a plan find when they are executed: nothing of it is in the plan, so that a plan can be sent to another process.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use datafusion::common::{Result, internal_datafusion_err};
use datafusion::execution::TaskContext;
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::prelude::{SessionConfig, SessionContext};
use stillhouse_operators::invariants::Limits;
use stillhouse_operators::operator::OperatorError;
use stillhouse_operators::registry::OperatorSpec;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::SplitRecord;

use super::device::DeviceQueue;
use super::pool::Spawner;
use crate::output::Output;
use crate::source::Store;
use crate::stage_state::SplitState;

/// What a job works with on this machine.
pub struct JobResources {
    /// The store of the input; its runtime serves all requests and files.
    pub store: Store,
    /// The tokenizer.
    pub vocabulary: Arc<Vocabulary>,
    /// The devices that the teacher is on; none in a job without one.
    pub devices: Vec<DeviceQueue>,
    /// Where the shards go.
    pub output: Output,
    /// What the rows of a split must keep to.
    pub limits: Arc<dyn Fn(&SplitRecord) -> Limits + Send + Sync>,
    /// The threads that work on splits.
    pub spawner: Spawner,
    /// Whether the operators of a split overlap, each pulled one batch ahead: where there are fewer splits at work at once than threads.
    pub operators_overlap: bool,
    /// Set where a split fails, before anybody sees the error: no other one begins.
    pub has_failed: AtomicBool,
    /// Set when a split has failed: the others end at their next batch.
    pub stop: Arc<AtomicBool>,
    /// The stages of a split, in order.
    pub stages: Vec<&'static str>,
    /// The splits at work.
    pub at_work: SplitsAtWork,
}

/// The splits that streams of this session are open for.
#[derive(Debug, Default)]
pub struct SplitsAtWork(Mutex<HashMap<SplitId, Weak<SplitState>>>);

impl SplitsAtWork {
    fn get(&self, split: &SplitRecord, stages: &[&'static str]) -> Arc<SplitState> {
        let mut splits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(state) = splits.get(&split.split).and_then(Weak::upgrade) {
            return state;
        }
        splits.retain(|_, state| state.strong_count() > 0);
        let reads = split.pieces.first().map(|piece| piece.file.clone()).unwrap_or_default();
        let state = Arc::new(SplitState::new(split.split, reads, stages));
        splits.insert(split.split, Arc::downgrade(&state));
        state
    }

    /// Lets a split begin anew. What is left of an attempt that failed may still hold its counts, and a read that cannot be stopped may still
    /// add to them.
    pub(crate) fn begin_anew(&self, split: SplitId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&split);
    }

    /// All of them, by number.
    pub fn all(&self) -> Vec<Arc<SplitState>> {
        let splits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<_> = splits.values().filter_map(Weak::upgrade).collect();
        all.sort_by_key(|state| state.split);
        all
    }
}

impl JobResources {
    /// Those of the session that a plan is executed in.
    ///
    /// # Errors
    /// In a session that is no job's.
    pub fn of(context: &TaskContext) -> Result<Arc<Self>> {
        let found = context.session_config().get_extension::<Self>();
        found.ok_or_else(|| internal_datafusion_err!("this session has no resources of a Stillhouse job"))
    }

    /// A session for executing a plan with these; the buckets of the input stand in its registry of object stores.
    ///
    /// # Errors
    /// As [`Store::register`].
    pub fn session(self: &Arc<Self>, runtime: Arc<RuntimeEnv>) -> Result<SessionContext> {
        self.store.register(&runtime)?;
        Ok(SessionContext::new_with_config_rt(SessionConfig::new().with_extension(Arc::clone(self)), runtime))
    }

    pub(super) fn state_of(&self, split: &SplitRecord) -> Arc<SplitState> {
        self.at_work.get(split, &self.stages)
    }

    /// The device that serves a partition: a split per device in turn, among those that are there still.
    pub(super) fn device_of(&self, partition: usize) -> Result<DeviceQueue, OperatorError> {
        let there: Vec<&DeviceQueue> = self.devices.iter().filter(|device| !device.is_lost()).collect();
        let none = || {
            let message = match self.devices.iter().find_map(|device| device.lost_because()) {
                Some(reason) => format!("every device is lost: {reason}"),
                None => "needs a teacher".into(),
            };
            OperatorError::Config { operator: "extract", message }
        };
        let at = partition.checked_rem(there.len()).ok_or_else(none)?;
        there.get(at).map(|device| DeviceQueue::clone(device)).ok_or_else(none)
    }

    /// How many devices are of no use any more.
    pub fn lost_devices(&self) -> usize {
        self.devices.iter().filter(|device| device.is_lost()).count()
    }
}

impl fmt::Debug for JobResources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobResources").field("output", &self.output.to_string()).finish_non_exhaustive()
    }
}

/// The stages of a split of a job with these operators: `read`, the operators, `write`.
pub fn stages(operators: &[OperatorSpec]) -> Vec<&'static str> {
    std::iter::once("read").chain(operators.iter().map(OperatorSpec::name)).chain(std::iter::once("write")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_that_begins_anew_counts_from_nothing() {
        let (pieces, dataset_split) = (Vec::new(), "train".into());
        let split = SplitRecord { split: SplitId(3), dataset_split, pieces, keys: None, appended: 0, place: None };
        let at_work = SplitsAtWork::default();
        let before = at_work.get(&split, &["read"]);
        assert!(Arc::ptr_eq(&before, &at_work.get(&split, &["read"])));
        at_work.begin_anew(split.split);
        // what is left of the attempt before is alive
        let now = at_work.get(&split, &["read"]);
        assert!(!Arc::ptr_eq(&before, &now));
        assert!(at_work.all().iter().all(|state| Arc::ptr_eq(state, &now)));
    }
}
