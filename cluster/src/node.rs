//! The one plan node of ours that Ballista runs: a job over one row per split.
//!
//! ```text
//!   JobExec { spec }                        column record: the record of the shard, JSON
//!     DataSourceExec (rows in memory)       columns wanted (JSON), seal; one partition and one row for each split
//! ```
//!
//! Ballista cuts a plan into tasks at the leaves that it knows, and an in-memory source is one of them. So a task
//! carries the task spec and its own row, whatever the number of splits. Each executor builds the pipeline's plan of
//! all splits once.

use std::fmt;
use std::sync::Arc;

use datafusion::arrow::array::{Array, BinaryArray, RecordBatch, StringArray};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::catalog::memory::MemorySourceConfig;
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::datasource::source::DataSourceExec;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::execution_plan::ReplaceChildrenOptions;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, ExecutionPlanProperties, PlanProperties};
use futures::{StreamExt, TryStreamExt};
use stillhouse_engine::driver::{SplitTask, TaskSpec};
use stillhouse_engine::node_metrics::properties;
use stillhouse_pipeline::error::{ErrorKind, PipelineError};

use crate::executor_jobs::ExecutorJobs;
use crate::failure;
use crate::sealed_spec::{split_seal, split_to_json};
use crate::token::Token;

/// A job over its splits.
#[derive(Debug, Clone)]
pub struct JobExec {
    job: Arc<Job>,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

/// What all splits of a job share.
#[derive(Debug)]
pub struct Job {
    /// The encoded and sealed task spec.
    pub bytes: Vec<u8>,
    /// The decoded task spec.
    pub spec: TaskSpec,
    /// The token that sealed the task spec.
    pub token: Token,
    /// The jobs of this executor; `None` outside executors.
    pub executor_jobs: Option<Arc<ExecutorJobs>>,
}

fn split_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("wanted", DataType::Utf8, false),
        Field::new("seal", DataType::Binary, false),
    ]))
}

fn record_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![Field::new("record", DataType::Utf8, false)]))
}

/// The plan of a job, with one partition per split.
pub fn plan(job: Job, splits: &[SplitTask]) -> Result<Arc<dyn ExecutionPlan>> {
    let partition = |task: &SplitTask| {
        let text = split_to_json(task).map_err(|e| DataFusionError::External(e.into()))?;
        let seal = split_seal(&job.bytes, &text, &job.token);
        let columns: Vec<Arc<dyn Array>> =
            vec![Arc::new(StringArray::from(vec![text])), Arc::new(BinaryArray::from_vec(vec![seal.as_slice()]))];
        Ok(vec![RecordBatch::try_new(split_schema(), columns)?])
    };
    let rows = splits.iter().map(partition).collect::<Result<Vec<_>>>()?;
    let rows = DataSourceExec::from_data_source(MemorySourceConfig::try_new(&rows, split_schema(), None)?);
    Ok(Arc::new(JobExec::new(Arc::new(job), rows)))
}

impl JobExec {
    /// Creates the node over the rows of splits.
    pub fn new(job: Arc<Job>, input: Arc<dyn ExecutionPlan>) -> Self {
        let partitions = input.output_partitioning().partition_count();
        let properties = properties(record_schema(), partitions);
        Self { job, input, properties }
    }

    /// The encoded and sealed task spec.
    pub fn bytes(&self) -> &[u8] {
        &self.job.bytes
    }

    /// Whether the input is in-memory rows of splits, the only valid input.
    pub fn has_split_rows(&self) -> bool {
        let rows = self.input.downcast_ref::<DataSourceExec>();
        rows.is_some_and(|rows| {
            let source: &dyn std::any::Any = rows.data_source().as_ref();
            source.is::<MemorySourceConfig>()
        }) && self.input.schema() == split_schema()
    }
}

impl DisplayAs for JobExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hash = &self.job.spec.ticket.job_hash;
        write!(f, "JobExec: job={}", &hash[..12.min(hash.len())])
    }
}

/// The splits of a batch. Fails if the seal of one does not match.
fn split_tasks(batch: &RecordBatch, job: &Job) -> Result<Vec<SplitTask>> {
    let texts = batch.column(0).as_any().downcast_ref::<StringArray>();
    let seals = batch.column(1).as_any().downcast_ref::<BinaryArray>();
    let (Some(texts), Some(seals)) = (texts, seals) else { return internal_err!("rows of a job of other types") };
    let read = |(text, seal): (Option<&str>, Option<&[u8]>)| {
        let text = text.unwrap_or_default();
        if !job.token.verify(&[&job.bytes, text.as_bytes()], seal.unwrap_or_default()) {
            let message = "a split does not come from a sender with this cluster's token; it is refused";
            return Err(failure::to_task_error(&PipelineError::new(ErrorKind::Usage, message)));
        }
        serde_json::from_str(text).map_err(|e| DataFusionError::External(Box::new(e)))
    };
    texts.iter().zip(seals.iter()).map(read).collect()
}

impl ExecutionPlan for JobExec {
    fn name(&self) -> &str {
        "JobExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    stillhouse_engine::plain_node!();
    stillhouse_engine::one_input!();

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(input), true) => Ok(Arc::new(Self::new(Arc::clone(&self.job), input))),
            _ => internal_err!("JobExec takes one input"),
        }
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let Some(executor_jobs) = self.job.executor_jobs.clone() else {
            return internal_err!("a job of a cluster is executed by executors only");
        };
        let job = Arc::clone(&self.job);
        let rows = self.input.execute(partition, context)?;
        let records_stream = rows.and_then(move |batch| {
            let (job, executor_jobs) = (Arc::clone(&job), Arc::clone(&executor_jobs));
            async move {
                let mut records = Vec::new();
                for task in split_tasks(&batch, &job)? {
                    let record =
                        executor_jobs.make_split(&job.spec, task).await.map_err(|e| failure::to_task_error(&e))?;
                    records.push(serde_json::to_string(&record).map_err(|e| DataFusionError::External(Box::new(e)))?);
                }
                Ok(RecordBatch::try_new(record_schema(), vec![Arc::new(StringArray::from(records))])?)
            }
        });
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), records_stream.boxed())))
    }
}
