//! The one adapter between operators and DataFusion.
//!
//! ```text
//!  DocumentsExec ─► OperatorExec(clean) ─► OperatorExec(tokenize) ─► OperatorExec(pack) ─► … ─► shard writer
//!        └──── bounded channel of QUEUE batches between each two stages ────┘
//! ```
//!
//! Every stage runs on a thread of its own ([`crate::threads`]), so that reading, tokenizing, the teacher and the writer overlap;
//! each queue holds at most [`QUEUE`] batches, which bounds the memory of a split. Batches keep their order.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use arrow::array::RecordBatch;
use arrow::datatypes::SchemaRef;
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::metrics::{BaselineMetrics, Count, ExecutionPlanMetricsSet, MetricBuilder, MetricsSet};
use datafusion::physical_plan::stream::{RecordBatchReceiverStream, RecordBatchReceiverStreamBuilder};
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties};
use futures::StreamExt;
use stillhouse_operators::operator::{OperatorError, OperatorSpec, SplitContext, documents_schema};
use stillhouse_schemas::manifest::SplitRecord;
use stillhouse_schemas::spec::Input;
use tokio::runtime::Handle;
use tokio::sync::mpsc::Sender;

use crate::source::{self, InputFile, SourceError, Stopped, Store};
use crate::stages::{Doing, Stage, Watch};
use crate::threads;

/// Batches that wait between two stages.
pub const QUEUE: usize = 2;

fn single_partition(schema: SchemaRef) -> Arc<PlanProperties> {
    Arc::new(PlanProperties::new(
        EquivalenceProperties::new(schema),
        Partitioning::UnknownPartitioning(1),
        EmissionType::Incremental,
        Boundedness::Bounded,
    ))
}

/// The metrics that every stage reports: rows and batches in and out, and the time spent.
struct StageMetrics {
    baseline: BaselineMetrics,
    input_rows: Count,
    input_batches: Count,
}

impl StageMetrics {
    fn new(set: &ExecutionPlanMetricsSet) -> Self {
        Self {
            baseline: BaselineMetrics::new(set, 0),
            input_rows: MetricBuilder::new(set).counter("input_rows", 0),
            input_batches: MetricBuilder::new(set).counter("input_batches", 0),
        }
    }
}

/// Where a stage puts its batches. Waiting for room in the queue is no work of the stage.
struct Outlet {
    tx: Sender<Result<RecordBatch>>,
    baseline: BaselineMetrics,
    stage: Arc<Stage>,
    watch: Watch,
}

impl Outlet {
    fn new(tx: Sender<Result<RecordBatch>>, baseline: BaselineMetrics, stage: &Arc<Stage>) -> Self {
        let watch = Watch::new(stage, baseline.elapsed_compute());
        Self { tx, baseline, stage: Arc::clone(stage), watch }
    }

    fn send(&self, batch: RecordBatch) -> std::result::Result<(), OperatorError> {
        let rows = batch.num_rows();
        self.baseline.record_output(rows);
        self.watch.stop();
        self.stage.does(Doing::WaitsForRoom);
        let sent = self.tx.blocking_send(Ok(batch));
        self.watch.start();
        self.stage.put_out(rows);
        sent.map_err(|_| OperatorError::Stopped)
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.stage.does(Doing::Done);
    }
}

/// Runs a stage on a thread of its own; the stream ends with what the stage says.
fn run_stage(
    builder: &mut RecordBatchReceiverStreamBuilder,
    name: &'static str,
    work: impl FnOnce() -> Result<()> + Send + 'static,
) -> Result<()> {
    let ended = threads::start(name, work)
        .map_err(|e| DataFusionError::Execution(format!("the system gives no thread for {name}: {e}")))?;
    builder.spawn(async move {
        ended
            .await
            .unwrap_or_else(|_| Err(DataFusionError::Execution(format!("{name} stopped: a fault of this program"))))
    });
    Ok(())
}

/// What a split reads from.
#[derive(Debug, Clone)]
pub struct Corpus {
    /// The store of the input.
    pub store: Store,
    /// The files of the job.
    pub files: Arc<Vec<InputFile>>,
    /// How to read them.
    pub input: Arc<Input>,
}

/// Reads the documents of one split.
pub struct DocumentsExec {
    corpus: Corpus,
    split: SplitRecord,
    context: SplitContext,
    stage: Arc<Stage>,
    read: Arc<Mutex<Vec<String>>>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl DocumentsExec {
    /// A source over one split, whose rows and time are counted for `stage`.
    pub fn new(corpus: Corpus, split: SplitRecord, context: SplitContext, stage: Arc<Stage>) -> Self {
        Self {
            corpus,
            split,
            context,
            stage,
            read: Arc::default(),
            properties: single_partition(documents_schema()),
            metrics: ExecutionPlanMetricsSet::new(),
        }
    }

    /// The same; once all is read, the checksums of the pieces stand in `read` ([`source::ReadSummary`]).
    #[must_use]
    pub fn noting(self, read: &Arc<Mutex<Vec<String>>>) -> Self {
        Self { read: Arc::clone(read), ..self }
    }
}

impl fmt::Debug for DocumentsExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DocumentsExec").field("split", &self.split).finish_non_exhaustive()
    }
}

impl DisplayAs for DocumentsExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DocumentsExec: split={} pieces={}", self.split.split.0, self.split.pieces.len())
    }
}

impl ExecutionPlan for DocumentsExec {
    fn name(&self) -> &str {
        "DocumentsExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        Vec::new()
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        _: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn with_new_children(self: Arc<Self>, _: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        Ok(self)
    }

    fn execute(&self, partition: usize, _: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        if partition != 0 {
            return internal_err!("a split has one partition, asked for {partition}");
        }
        let mut builder = RecordBatchReceiverStream::builder(self.schema(), QUEUE);
        let tx = builder.tx();
        let (corpus, split, context) = (self.corpus.clone(), self.split.clone(), self.context.clone());
        let metrics = StageMetrics::new(&self.metrics);
        let outlet = Outlet::new(tx, metrics.baseline, &self.stage);
        let read = Arc::clone(&self.read);
        run_stage(&mut builder, self.stage.name(), move || {
            outlet.watch.start();
            let mut emit = |batch| outlet.send(batch).map_err(|_| Stopped);
            match source::read_split(&corpus.store, &corpus.files, &split, &corpus.input, &mut emit) {
                Ok(summary) => {
                    *read.lock().unwrap_or_else(PoisonError::into_inner) = summary.sha256;
                    let mut statistics = context.statistics.lock();
                    for (reason, n) in summary.skipped {
                        *statistics.skipped.entry(reason).or_default() += n;
                    }
                    Ok(())
                }
                Err(SourceError::Stopped(_)) => Ok(()),
                Err(e) => Err(DataFusionError::External(Box::new(e))),
            }
        })?;
        Ok(builder.build())
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

enum StageError {
    Operator(OperatorError),
    Input(DataFusionError),
}

/// A stage that ends because its consumer is gone has nothing to report: the consumer does.
fn stage_result(result: std::result::Result<(), StageError>) -> Result<()> {
    match result {
        Ok(()) | Err(StageError::Operator(OperatorError::Stopped)) => Ok(()),
        Err(StageError::Operator(e)) => Err(DataFusionError::External(Box::new(e))),
        Err(StageError::Input(e)) => Err(e),
    }
}

/// Runs any operator over its input.
pub struct OperatorExec {
    spec: OperatorSpec,
    context: SplitContext,
    stage: Arc<Stage>,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
    metrics: ExecutionPlanMetricsSet,
}

impl OperatorExec {
    /// Puts an operator over an input; its rows and time are counted for `stage`.
    pub fn new(spec: OperatorSpec, context: SplitContext, stage: Arc<Stage>, input: Arc<dyn ExecutionPlan>) -> Self {
        let properties = single_partition(spec.output_schema(&input.schema()));
        Self { spec, context, stage, input, properties, metrics: ExecutionPlanMetricsSet::new() }
    }
}

impl fmt::Debug for OperatorExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorExec").field("spec", &self.spec).field("input", &self.input).finish_non_exhaustive()
    }
}

impl DisplayAs for OperatorExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperatorExec: {}", self.spec.name())
    }
}

impl ExecutionPlan for OperatorExec {
    fn name(&self) -> &str {
        "OperatorExec"
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn apply_expressions(
        &self,
        _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
    ) -> Result<TreeNodeRecursion> {
        Ok(TreeNodeRecursion::Continue)
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(input), true) => {
                let stage = Arc::clone(&self.stage);
                Ok(Arc::new(Self::new(self.spec.clone(), self.context.clone(), stage, input)))
            }
            _ => internal_err!("OperatorExec takes one input"),
        }
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        self.replace_children(children, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let mut input = self.input.execute(partition, context)?;
        let mut operator = self.spec.build(&self.context).map_err(|e| DataFusionError::External(Box::new(e)))?;
        let StageMetrics { baseline, input_rows, input_batches } = StageMetrics::new(&self.metrics);
        let mut builder = RecordBatchReceiverStream::builder(self.schema(), QUEUE);
        let outlet = Outlet::new(builder.tx(), baseline, &self.stage);
        let handle = Handle::current();
        run_stage(&mut builder, self.stage.name(), move || {
            let mut emit = |batch| outlet.send(batch);
            let mut run = || {
                loop {
                    outlet.stage.does(Doing::WaitsForInput);
                    let Some(batch) = handle.block_on(input.next()) else { break };
                    let batch = batch.map_err(StageError::Input)?;
                    input_rows.add(batch.num_rows());
                    input_batches.add(1);
                    outlet.watch.start();
                    operator.process(&batch, &mut emit).map_err(StageError::Operator)?;
                    outlet.watch.stop();
                }
                outlet.watch.start();
                let finished = operator.finish(&mut emit).map_err(StageError::Operator);
                outlet.watch.stop();
                finished
            };
            stage_result(run())
        })?;
        Ok(builder.build())
    }

    fn metrics(&self) -> Option<MetricsSet> {
        Some(self.metrics.clone_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use stillhouse_operators::operator::documents_schema;

    use super::*;
    use crate::stages::Stages;

    #[test]
    fn waiting_for_room_is_no_work() {
        let stages = Stages::of(&[]);
        let (tx, mut rx) = tokio::sync::mpsc::channel(1);
        let batch = || RecordBatch::new_empty(documents_schema());
        assert!(tx.try_send(Ok(batch())).is_ok(), "the queue is full from here on");
        let baseline = BaselineMetrics::new(&ExecutionPlanMetricsSet::new(), 0);
        let computed = baseline.elapsed_compute().clone();
        let began = Instant::now();
        let outlet = Outlet::new(tx, baseline, &stages.read);
        let sender = std::thread::spawn(move || {
            outlet.watch.start();
            outlet.send(batch()).unwrap();
            drop(outlet);
            began.elapsed()
        });
        // its watch was stopped: it cannot go on before there is room
        while stages.progress()[0].busy_seconds == 0.0 {
            std::thread::yield_now();
        }
        let stopped = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        let waited = stopped.elapsed();
        while rx.blocking_recv().is_some() {}
        let whole = sender.join().unwrap();
        let busy = Duration::from_secs_f64(stages.progress()[0].busy_seconds);
        // whatever else the machine does: the parts are not more than the whole
        assert!(busy + waited <= whole, "busy for {busy:?}, waited {waited:?}, of {whole:?}");
        assert!(Duration::from_nanos(computed.value() as u64) + waited <= whole);
        assert!(!busy.is_zero());
    }
}
