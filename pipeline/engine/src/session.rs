//! Executes a plan in this process, split by split.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use datafusion::common::{DataFusionError, Result};
use datafusion::execution::memory_pool::{GreedyMemoryPool, TrackConsumersPool};
use datafusion::execution::runtime_env::{RuntimeEnv, RuntimeEnvBuilder};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::{SessionConfig, SessionContext};
use futures::TryStreamExt;
use stillhouse_base::error::{ErrorKind, PipelineError};
use stillhouse_input_files::Store;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::Engine;
use stillhouse_schemas::storage::Scheme;
use url::Url;

use crate::device::DeviceQueue;
use crate::resources::JobResources;
use crate::sink::{describe, records};

/// Number of largest memory consumers that an out-of-memory error names.
const MAX_CONSUMERS_LISTED: NonZeroUsize = NonZeroUsize::MIN.saturating_add(2);

/// A plan and its resources in this process.
pub struct Session {
    /// The plan.
    pub plan: Arc<dyn ExecutionPlan>,
    /// What the nodes take from the session.
    pub resources: Arc<JobResources>,
    context: Arc<TaskContext>,
}

impl Session {
    /// Creates a session with the job's memory limit, which can read the buckets of the input.
    ///
    /// # Errors
    /// When the memory limit or the name of a bucket is not valid.
    pub fn new(plan: Arc<dyn ExecutionPlan>, resources: JobResources, engine: &Engine) -> Result<Self, PipelineError> {
        let resources = Arc::new(resources);
        let runtime = runtime(engine).map_err(PipelineError::from_plan)?;
        register_buckets(&resources.store, &runtime).map_err(PipelineError::from_plan)?;
        let config = SessionConfig::new().with_extension(Arc::clone(&resources));
        let context = SessionContext::new_with_config_rt(config, runtime).task_ctx();
        Ok(Self { plan, resources, context })
    }

    /// The splits, in the order of the partitions.
    pub fn splits(&self) -> &[SplitRecord] {
        &self.resources.splits
    }

    /// Maps each split to its partition.
    pub fn partitions(&self) -> HashMap<SplitId, usize> {
        self.splits().iter().enumerate().map(|(partition, split)| (split.split, partition)).collect()
    }

    /// Streams the rows of one split, which a worker of the pool makes one batch ahead; for a plan without a sink.
    ///
    /// # Errors
    /// When there is no such partition. The stream returns the errors of the nodes.
    pub fn rows(&self, partition: usize) -> Result<SendableRecordBatchStream> {
        let rows = self.plan.execute(partition, Arc::clone(&self.context))?;
        Ok(self.resources.spawner.ahead(rows))
    }

    /// Executes one split, from its piece of the input to its committed shard. Calls `warn` with a message for each
    /// device that was lost meanwhile.
    ///
    /// # Errors
    /// Those of the plan's nodes.
    pub async fn execute(
        &self,
        partition: usize,
        warn: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Vec<ShardRecord>, PipelineError> {
        let resources = Arc::clone(&self.resources);
        let (plan, context) = (Arc::clone(&self.plan), Arc::clone(&self.context));
        let split = self.splits().get(partition).map(|split| split.split);
        let chain = async move {
            loop {
                let lost_before = resources.lost_devices();
                if let Some(split) = split {
                    resources.splits_in_progress.reset(split);
                }
                let made = async { plan.execute(partition, Arc::clone(&context))?.try_collect::<Vec<_>>().await }.await;
                // If a device was lost, another one makes the whole split again.
                let lost_now = resources.lost_devices();
                if made.is_err() && lost_now > lost_before && lost_now < resources.devices.len() {
                    continue;
                }
                resources.has_failed.fetch_or(made.is_err(), Ordering::Relaxed);
                return made;
            }
        };
        let stopped = || match self.splits().get(partition) {
            Some(split) => format!("{} stopped: a bug in this program", describe(split)),
            None => format!("the plan has no partition {partition}"),
        };
        let made = self.resources.spawner.chain(chain).wait().await;
        for device in self.resources.devices.iter().filter_map(DeviceQueue::newly_lost) {
            warn(format!("{device} is lost; its splits go to the other devices"));
        }
        let batches = made
            .map_err(|e| PipelineError::caused(ErrorKind::Output, stopped(), e))?
            .map_err(PipelineError::from_plan)?;
        let mut made = Vec::new();
        for batch in &batches {
            made.append(&mut records(batch).map_err(PipelineError::from_plan)?);
        }
        Ok(made)
    }
}

/// Registers the buckets of the input under their URLs, so that DataFusion's own nodes find them as they find the disk.
fn register_buckets(store: &Store, runtime: &RuntimeEnv) -> Result<()> {
    // DataFusion tells stores apart by scheme and host, and all data sets of the hub have the same
    for (url, bucket) in store.buckets().filter(|(url, _)| url.scheme != Scheme::Hf) {
        let url = Url::parse(&url.to_string()).map_err(|e| DataFusionError::External(Box::new(e)))?;
        runtime.register_object_store(&url, Arc::clone(bucket));
    }
    Ok(())
}

/// Creates the runtime whose memory pool the plan's nodes share, limited by `engine.memory_megabytes`.
fn runtime(engine: &Engine) -> Result<Arc<RuntimeEnv>> {
    let builder = RuntimeEnvBuilder::new();
    let builder = match engine.memory_megabytes {
        Some(megabytes) => {
            let pool = GreedyMemoryPool::new(megabytes as usize * 1_000_000);
            builder.with_memory_pool(Arc::new(TrackConsumersPool::new(pool, MAX_CONSUMERS_LISTED)))
        }
        None => builder,
    };
    builder.build_arc()
}

#[cfg(test)]
mod tests {
    use datafusion::execution::object_store::ObjectStoreUrl;
    use object_store::memory::InMemory;
    use object_store::{ObjectStoreExt, PutPayload};
    use stillhouse_base::storage::{Opened, StoreUrl};

    use super::*;

    /// DataFusion's own plan nodes find the buckets of a job in the session, under their URLs.
    #[test]
    fn a_session_finds_the_buckets_by_their_urls() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let memory = Arc::new(InMemory::new());
        let key = object_store::path::Path::from("of/a.jsonl");
        runtime.block_on(memory.put(&key, PutPayload::from("whole"))).unwrap();
        let session = RuntimeEnv::default();
        let opened = Opened { store: memory, multipart: None, uploads: None, statistics: Arc::default() };
        let url = StoreUrl::parse("s3://corpora/").unwrap().unwrap();
        register_buckets(&Store::with_buckets(runtime.handle().clone(), [(url, opened)]), &session).unwrap();
        let found = session.object_store(ObjectStoreUrl::parse("s3://corpora").unwrap()).unwrap();
        let bytes = runtime.block_on(async { found.get(&key).await?.bytes().await }).unwrap();
        assert_eq!(bytes, "whole".as_bytes());
        assert!(session.object_store(ObjectStoreUrl::parse("s3://others").unwrap()).is_err());
    }
}
