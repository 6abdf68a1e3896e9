//! The adapter between operators and DataFusion: processes one batch per pull, on the thread that pulls.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::RecordBatch;
use datafusion::common::{DataFusionError, Result, internal_err};
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_plan::execution_plan::ReplaceChildrenOptions;
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, PlanProperties};
use futures::StreamExt;
use futures::stream::try_unfold;
use stillhouse_operators::extract::{self, ExtractConfig};
use stillhouse_operators::generate::GenerateConfig;
use stillhouse_operators::operator::{Meter, Operator, OperatorError, SplitContext};
use stillhouse_operators::operator_spec::OperatorSpec;

use crate::device::{DeviceQueue, PendingBatch};
use crate::node_metrics::{NodeMetrics, properties};
use crate::resources::JobResources;
use crate::stage_state::{SplitMeter, StageActivity, StageState};
use crate::stages_below;

/// Minimum number of batches of a split that are submitted to the device at once, so that it always has a next one.
const MIN_BATCHES_IN_FLIGHT: usize = 2;

/// Runs any operator over its input, partition by partition.
#[derive(Debug)]
pub struct OperatorExec {
    spec: OperatorSpec,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
    metrics: Arc<NodeMetrics>,
}

impl OperatorExec {
    /// Puts an operator over an input.
    pub fn new(spec: OperatorSpec, input: Arc<dyn ExecutionPlan>) -> Self {
        let partitions = input.properties().output_partitioning().partition_count();
        let properties = properties(spec.output_schema(&input.schema()), partitions);
        Self { spec, input, properties, metrics: NodeMetrics::new() }
    }

    /// The operator's name, which names its stage.
    pub fn name(&self) -> &'static str {
        self.spec.name()
    }
}

impl DisplayAs for OperatorExec {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperatorExec: {}", self.spec.name())
    }
}

fn external(error: OperatorError) -> DataFusionError {
    DataFusionError::External(Box::new(error))
}

/// What every operator stream of one split has.
struct StreamContext {
    input: SendableRecordBatchStream,
    metrics: Arc<NodeMetrics>,
    stage: StageState,
}

impl StreamContext {
    async fn next_input(&mut self) -> Result<Option<RecordBatch>> {
        self.stage.set_activity(StageActivity::WaitsForInput);
        let next = self.input.next().await.transpose();
        self.stage.set_activity(StageActivity::Works);
        next
    }

    fn count_output(&self, batch: &RecordBatch) {
        self.metrics.count_output(batch.num_rows(), batch.get_array_memory_size());
        self.stage.count_output(batch.num_rows());
    }
}

/// The stream of an operator that computes on the pulling thread.
struct InlineStream {
    context: StreamContext,
    operator: Box<dyn Operator>,
    /// Output of the last input batch that is not yet emitted.
    ready: VecDeque<RecordBatch>,
    input_ended: bool,
}

impl InlineStream {
    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>> {
        loop {
            if let Some(batch) = self.ready.pop_front() {
                self.context.count_output(&batch);
                return Ok(Some((batch, self)));
            }
            if self.input_ended {
                self.context.stage.set_activity(StageActivity::Done);
                return Ok(None);
            }
            let input = self.context.next_input().await?;
            let began = Instant::now();
            let ready = &mut self.ready;
            let mut emit = |batch| {
                ready.push_back(batch);
                Ok(())
            };
            match input {
                Some(batch) => self.operator.process(&batch, &mut emit),
                None => {
                    self.input_ended = true;
                    self.operator.finish(&mut emit)
                }
            }
            .map_err(external)?;
            self.context.metrics.worked_since(began);
        }
    }
}

/// Kind of work for a device.
enum DeviceWork {
    /// A forward pass over text.
    Extract(Arc<ExtractConfig>),
    /// Text generation from prompts.
    Generate(Arc<GenerateConfig>),
}

impl DeviceWork {
    /// Returns the device work of an operator, or `None` if it runs on the pulling thread.
    fn from_spec(spec: &OperatorSpec) -> Option<Self> {
        let extract = spec.config::<ExtractConfig>().map(|config| Self::Extract(Arc::new(config.clone())));
        extract.or_else(|| spec.config::<GenerateConfig>().map(|config| Self::Generate(Arc::new(config.clone()))))
    }

    fn check(&self, device: &DeviceQueue) -> Result<(), OperatorError> {
        match self {
            Self::Extract(config) => config.check(device.info()),
            Self::Generate(config) => config.check(device.info()),
        }
    }

    fn parts(&self, batch: &RecordBatch) -> Box<dyn Iterator<Item = RecordBatch> + Send> {
        match self {
            Self::Extract(config) => Box::new(extract::parts(batch, config.max_rows_per_part())),
            Self::Generate(config) => Box::new(extract::parts(batch, config.max_rows_per_part())),
        }
    }

    /// Maximum number of batches of a split at the device: it works on one while the next one is made.
    fn max_in_flight(&self) -> usize {
        match self {
            Self::Extract(_) => MIN_BATCHES_IN_FLIGHT,
            Self::Generate(config) => config.max_batches_in_flight().max(MIN_BATCHES_IN_FLIGHT),
        }
    }

    async fn submit(
        &self,
        device: &DeviceQueue,
        part: RecordBatch,
        meter: Arc<dyn Meter>,
    ) -> Result<PendingBatch, OperatorError> {
        match self {
            Self::Extract(config) => device.submit(config, part, meter).await,
            Self::Generate(config) => device.write(config, part, meter).await,
        }
    }
}

/// The stream of an operator whose work the owner of a device does.
struct DeviceStream {
    context: StreamContext,
    work: DeviceWork,
    device: DeviceQueue,
    /// Parts of the last input batch that are not yet submitted.
    parts: Box<dyn Iterator<Item = RecordBatch> + Send>,
    in_flight: VecDeque<PendingBatch>,
    input_ended: bool,
}

impl DeviceStream {
    async fn next(mut self) -> Result<Option<(RecordBatch, Self)>> {
        loop {
            if self.in_flight.len() < self.work.max_in_flight() && !self.input_ended {
                match self.parts.next() {
                    Some(part) => {
                        self.context.stage.set_activity(StageActivity::WaitsForDevice);
                        let meter = SplitMeter::of(&self.context.metrics, self.context.stage.split());
                        let pending = self.work.submit(&self.device, part, meter).await.map_err(external)?;
                        self.in_flight.push_back(pending);
                    }
                    None => match self.context.next_input().await? {
                        Some(batch) => self.parts = self.work.parts(&batch),
                        None => self.input_ended = true,
                    },
                }
                continue;
            }
            let Some(pending) = self.in_flight.pop_front() else {
                self.context.stage.set_activity(StageActivity::Done);
                return Ok(None);
            };
            self.context.stage.set_activity(StageActivity::WaitsForDevice);
            let done = pending.wait(&self.device).await.map_err(external)?;
            self.context.stage.split().statistics.lock().add(&done.statistics);
            self.context.metrics.worked(done.busy);
            self.context.count_output(&done.batch);
            return Ok(Some((done.batch, self)));
        }
    }
}

impl ExecutionPlan for OperatorExec {
    crate::node_basics!();
    crate::one_input!();

    fn name(&self) -> &str {
        "OperatorExec"
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![true]
    }

    fn replace_children(
        self: Arc<Self>,
        mut children: Vec<Arc<dyn ExecutionPlan>>,
        _: ReplaceChildrenOptions,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match (children.pop(), children.is_empty()) {
            (Some(input), true) => Ok(Arc::new(Self::new(self.spec.clone(), input))),
            _ => internal_err!("OperatorExec takes one input"),
        }
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        let resources = JobResources::of(&context)?;
        let split = resources.split(partition)?;
        let state = resources.split_state(&split);
        let below = stages_below(self);
        let mut input = self.input.execute(partition, context)?;
        // A source prefetches by itself.
        if resources.operators_overlap && below > 1 {
            input = resources.spawner.ahead(input);
        }
        let stage = StageState::new(&state, below);
        let stream_context = StreamContext { input, metrics: Arc::clone(&self.metrics), stage };
        if let Some(work) = DeviceWork::from_spec(&self.spec) {
            let device = resources.device_for(partition).map_err(external)?;
            work.check(&device).map_err(external)?;
            let (parts, in_flight) = (Box::new(std::iter::empty()), VecDeque::new());
            let device_stream =
                DeviceStream { context: stream_context, work, device, parts, in_flight, input_ended: false };
            let stream = try_unfold(device_stream, DeviceStream::next);
            return Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), stream)));
        }
        let context = SplitContext {
            split: split.split,
            dataset_split: split.dataset_split,
            sequence_range: split.place,
            vocabulary: Arc::clone(&resources.vocabulary),
            duplicates: resources.duplicates.clone(),
            carried: state.carried(),
            teacher: None,
            statistics: state.statistics.clone(),
            footer: state.footer.clone(),
            meter: SplitMeter::of(&self.metrics, &state),
        };
        let operator = self.spec.build(&context).map_err(external)?;
        let stream = try_unfold(
            InlineStream { context: stream_context, operator, ready: VecDeque::new(), input_ended: false },
            InlineStream::next,
        );
        Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), stream)))
    }
}
