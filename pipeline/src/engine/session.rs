//! What the nodes of a plan find when they are executed: nothing of it is in the plan, so that a plan can be sent to another process.

use std::collections::HashMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use datafusion::common::{Result, internal_datafusion_err};
use datafusion::execution::memory_pool::{GreedyMemoryPool, TrackConsumersPool};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::TryStreamExt;
use stillhouse_operators::invariants::Limits;
use stillhouse_operators::operator::OperatorError;
use stillhouse_operators::registry::OperatorSpec;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::Engine;

use super::device::DeviceQueue;
use super::pool::Spawner;
use super::sink::{describe, records};
use crate::error::{ErrorKind, PipelineError};
use crate::output::Output;
use crate::source::Store;
use crate::stage_state::SplitState;

/// The first stage of every split, and the last.
pub(super) const READ: &str = "read";
pub(super) const WRITE: &str = "write";

/// An error that says the memory is not enough names so many of those who hold the most.
const CONSUMERS_LISTED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);

/// What a job works with on this machine.
pub struct JobResources {
    /// The splits, in the order of the partitions.
    pub splits: Arc<Vec<SplitRecord>>,
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

    /// The split of a partition.
    ///
    /// # Errors
    /// When there is no such partition.
    pub fn split(&self, partition: usize) -> Result<SplitRecord> {
        let none = || internal_datafusion_err!("{} splits, asked for partition {partition}", self.splits.len());
        self.splits.get(partition).cloned().ok_or_else(none)
    }

    pub(crate) fn state_of(&self, split: &SplitRecord) -> Arc<SplitState> {
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
    std::iter::once(READ).chain(operators.iter().map(OperatorSpec::name)).chain(std::iter::once(WRITE)).collect()
}

/// A plan with what its nodes find in this process.
pub(crate) struct Session {
    pub plan: Arc<dyn ExecutionPlan>,
    pub resources: Arc<JobResources>,
    context: Arc<TaskContext>,
}

impl Session {
    /// A session of a job with these limits on memory; it can read the buckets of the input.
    ///
    /// # Errors
    /// As [`Store::register`].
    pub fn new(plan: Arc<dyn ExecutionPlan>, resources: JobResources, engine: &Engine) -> Result<Self, PipelineError> {
        let resources = Arc::new(resources);
        let runtime = runtime(engine).map_err(PipelineError::of_plan)?;
        resources.store.register(&runtime).map_err(PipelineError::of_plan)?;
        let config = SessionConfig::new().with_extension(Arc::clone(&resources));
        let context = SessionContext::new_with_config_rt(config, runtime).task_ctx();
        Ok(Self { plan, resources, context })
    }

    /// The splits, in the order of the partitions.
    pub fn splits(&self) -> &[SplitRecord] {
        &self.resources.splits
    }

    /// The partition of each split.
    pub fn partitions(&self) -> HashMap<SplitId, usize> {
        self.splits().iter().enumerate().map(|(partition, split)| (split.split, partition)).collect()
    }

    /// The rows of one split, made by a worker of the pool one batch ahead of whoever takes them; for a plan without a sink.
    ///
    /// # Errors
    /// When there is no such partition; the stream's own are those of the nodes.
    pub fn rows(&self, partition: usize) -> Result<SendableRecordBatchStream> {
        let rows = self.plan.execute(partition, Arc::clone(&self.context))?;
        Ok(self.resources.spawner.ahead(rows))
    }

    /// One split from its piece of the input to its committed shard; calls `lost` for each device that was lost meanwhile.
    ///
    /// # Errors
    /// As the nodes of the plan.
    pub async fn execute(
        &self,
        partition: usize,
        lost: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Vec<ShardRecord>, PipelineError> {
        let resources = Arc::clone(&self.resources);
        let (plan, context) = (Arc::clone(&self.plan), Arc::clone(&self.context));
        let split = self.splits().get(partition).map(|split| split.split);
        let chain = async move {
            loop {
                let lost = resources.lost_devices();
                if let Some(split) = split {
                    resources.at_work.begin_anew(split);
                }
                let made = async { plan.execute(partition, Arc::clone(&context))?.try_collect::<Vec<_>>().await }.await;
                // what a lost device had of a split is made again by another device
                let now_lost = resources.lost_devices();
                if made.is_err() && now_lost > lost && now_lost < resources.devices.len() {
                    continue;
                }
                resources.has_failed.fetch_or(made.is_err(), Ordering::Relaxed);
                return made;
            }
        };
        let stopped = || match self.splits().get(partition) {
            Some(split) => format!("{} stopped: a fault of this program", describe(split)),
            None => format!("the plan has no partition {partition}"),
        };
        let made = self.resources.spawner.chain(chain).wait().await;
        for device in self.resources.devices.iter().filter_map(DeviceQueue::newly_lost) {
            lost(format!("{device} is lost; its splits go to the other devices"));
        }
        let batches = made
            .map_err(|e| PipelineError::caused(ErrorKind::Output, stopped(), e))?
            .map_err(PipelineError::of_plan)?;
        let mut made = Vec::new();
        for batch in &batches {
            made.append(&mut records(batch).map_err(PipelineError::of_plan)?);
        }
        Ok(made)
    }
}

/// The memory that the nodes of a plan share: `engine.memory_megabytes`.
fn runtime(engine: &Engine) -> Result<Arc<RuntimeEnv>> {
    let builder = RuntimeEnvBuilder::new();
    let builder = match engine.memory_megabytes {
        Some(megabytes) => {
            let pool = GreedyMemoryPool::new(megabytes as usize * 1_000_000);
            builder.with_memory_pool(Arc::new(TrackConsumersPool::new(pool, CONSUMERS_LISTED)))
        }
        None => builder,
    };
    builder.build_arc()
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
