//! The sink at the top of the plan: writes the shard of each partition, commits it, and emits its record.

use std::fmt;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, RecordBatch, StringArray, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::execution::memory_pool::{MemoryConsumer, MemoryReservation};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::execution_plan::ReplaceChildrenOptions;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};
use stillhouse_base::error::{ErrorKind, PipelineError};
use stillhouse_schemas::manifest::{ShardRecord, SplitRecord};
use stillhouse_schemas::spec::Output as OutputSpec;

use crate::node_metrics::{NodeMetrics, properties};
use crate::resources::JobResources;
use crate::shard::{self, WriteOptions};
use crate::stage_state::{StageActivity, StageState};
use crate::stages_below;

/// The shards to write and how to write them.
#[derive(Debug, Clone)]
pub struct Shards {
    /// Sizes and compression of the files.
    pub spec: OutputSpec,
    /// The shard of each partition.
    pub shards: Arc<Vec<Shard>>,
}

/// The shard of one partition.
#[derive(Debug, Clone)]
pub struct Shard {
    /// File name under `data/`.
    pub name: String,
    /// The record that the shard must reproduce, if it is made again.
    pub expected_record: Option<ShardRecord>,
}

/// Writes and commits one shard per partition, and emits one row per shard.
#[derive(Debug)]
pub struct ShardSinkExec {
    shards: Shards,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
    metrics: Arc<NodeMetrics>,
}

/// The schema of the emitted rows:
/// - `split`: uint32,
/// - `dataset_split`, `path`, `sha256`: utf8,
/// - `rows`, `tokens`, `bytes`: uint64,
/// - `statistics` (JSON) and `record` (the whole commit record as JSON): utf8.
fn record_schema() -> SchemaRef {
    let text = |name| Field::new(name, DataType::Utf8, false);
    let number = |name| Field::new(name, DataType::UInt64, false);
    Arc::new(Schema::new(vec![
        Field::new("split", DataType::UInt32, false),
        text("dataset_split"),
        text("path"),
        number("rows"),
        number("tokens"),
        number("bytes"),
        text("sha256"),
        text("statistics"),
        text("record"),
    ]))
}

fn row(shard: &ShardRecord) -> Result<RecordBatch> {
    let json = |value: std::result::Result<String, serde_json::Error>| {
        value.map_err(|e| DataFusionError::External(Box::new(e)))
    };
    let text = |value: String| Arc::new(StringArray::from(vec![value])) as ArrayRef;
    let number = |value: u64| Arc::new(UInt64Array::from(vec![value])) as ArrayRef;
    let columns = vec![
        Arc::new(UInt32Array::from(vec![shard.split.0])) as ArrayRef,
        text(shard.dataset_split.clone()),
        text(shard.path.clone()),
        number(shard.rows),
        number(shard.tokens),
        number(shard.bytes),
        text(shard.sha256.clone()),
        text(json(serde_json::to_string(&shard.statistics))?),
        text(json(serde_json::to_string(shard))?),
    ];
    Ok(RecordBatch::try_new(record_schema(), columns)?)
}

/// Parses the shard records in a batch that a sink emitted.
///
/// # Errors
/// When the batch does not come from a sink.
pub fn records(batch: &RecordBatch) -> Result<Vec<ShardRecord>> {
    let column = batch.column_by_name("record").and_then(|c| c.as_any().downcast_ref::<StringArray>());
    let Some(column) = column else { return internal_err!("a batch of shards has no column `record` of text") };
    let parse = |text: Option<&str>| serde_json::from_str(text.unwrap_or_default());
    column.iter().map(|text| parse(text).map_err(|e| DataFusionError::External(Box::new(e)))).collect()
}

impl ShardSinkExec {
    /// Puts a sink over an input with one partition per shard.
    ///
    /// # Errors
    /// When the number of partitions differs from the number of shards.
    pub fn new(shards: Shards, input: Arc<dyn ExecutionPlan>) -> Result<Self> {
        let partitions = input.properties().output_partitioning().partition_count();
        if partitions != shards.shards.len() {
            return internal_err!("{} shards over {partitions} partitions", shards.shards.len());
        }
        let properties = properties(record_schema(), partitions);
        Ok(Self { shards, input, properties, metrics: NodeMetrics::new() })
    }
}

impl DisplayAs for ShardSinkExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shards { spec, shards } = &self.shards;
        write!(
            f,
            "ShardSinkExec: shards={}, zstd={}, row_group={} MB",
            shards.len(),
            spec.zstd_level,
            spec.row_group_megabytes
        )
    }
}

/// A shard being made.
struct ShardTask {
    shard: Shard,
    split: SplitRecord,
    spec: OutputSpec,
    resources: Arc<JobResources>,
    stage: StageState,
    metrics: Arc<NodeMetrics>,
    memory: MemoryReservation,
}

impl ShardTask {
    async fn run(self, batches: SendableRecordBatchStream) -> Result<ShardRecord, PipelineError> {
        let label = describe(&self.split);
        let output = self.resources.output.clone().ok_or_else(|| {
            PipelineError::new(ErrorKind::Output, format!("{label}: the plan has a sink, and the session no output"))
        })?;
        let Self { shard, split, spec, resources, stage, metrics, memory } = self;
        let write_options = WriteOptions {
            spec: &spec,
            row_checks: &(resources.row_checks)(&split),
            context: &label,
            stop: &resources.stop,
            memory: &memory,
            requests: &resources.store.handle,
            metrics: &metrics,
            stage: &stage,
            footer: &stage.split().footer,
            // A shard that is made again gets no checksums if the original had none.
            checksums: shard.expected_record.as_ref().is_none_or(|was| was.footer.is_some()),
        };
        let written = shard::write(&output, &shard.name, batches, write_options).await?;
        memory.free();
        let record = ShardRecord {
            path: format!("data/{}", shard.name),
            dataset_split: split.dataset_split,
            split: split.split,
            rows: written.rows,
            tokens: written.tokens,
            bytes: written.staged.bytes,
            sha256: written.staged.sha256.clone(),
            footer: written.footer,
            column_bytes: written.column_bytes,
            input_sha256: stage.split().input_sha256(),
            statistics: stage.split().statistics.lock().clone(),
        };
        let commit = async move {
            match shard.expected_record {
                Some(was) => output.replace(written.staged, &record, &was).await.map(|()| was),
                None => output.commit(written.staged, record).await,
            }
        };
        let committed = resources.store.handle.spawn(commit).await;
        let record = committed
            .map_err(|_| PipelineError::new(ErrorKind::Output, "the commit stopped: a bug in this program"))??;
        stage.set_activity(StageActivity::Done);
        Ok(record)
    }
}

/// Describes a split in messages: its number and its first input file.
pub fn describe(split: &SplitRecord) -> String {
    let place = split.pieces.first().map_or_else(String::new, |p| match split.pieces.len() {
        1 => format!(" ({})", p.file),
        n => format!(" ({} and {} more)", p.file, n - 1),
    });
    format!("split {}{place}", split.split.0)
}

impl ExecutionPlan for ShardSinkExec {
    crate::node_basics!();
    crate::one_input!();

    fn name(&self) -> &str {
        "ShardSinkExec"
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(input), true) => Ok(Arc::new(Self::new(self.shards.clone(), input)?)),
            _ => internal_err!("ShardSinkExec takes one input"),
        }
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let resources = JobResources::of(&context)?;
        let split = resources.split(partition)?;
        let Some(shard) = self.shards.shards.get(partition).cloned() else {
            return internal_err!("ShardSinkExec has {} partitions, asked for {partition}", self.shards.shards.len());
        };
        let stage = StageState::new(&resources.split_state(&split), stages_below(self));
        let memory = MemoryConsumer::new(format!("ShardSinkExec[{partition}]")).register(context.memory_pool());
        // Encoding a batch overlaps with making the next one even if only one split is in progress.
        let input = self.input.execute(partition, context)?;
        let spawner = resources.spawner.clone();
        let (spec, metrics) = (self.shards.spec.clone(), Arc::clone(&self.metrics));
        let task = ShardTask { shard, split, spec, resources, stage, metrics, memory };
        let made = async move {
            let split = task.split.split;
            let record = task.run(spawner.ahead(input)).await;
            let record = record.map_err(|e| DataFusionError::External(Box::new(e.with_split(split))))?;
            row(&record)
        };
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), futures::stream::once(made))))
    }
}
