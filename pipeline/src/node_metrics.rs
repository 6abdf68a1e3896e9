//! What every node of the plan has: its properties, and metrics whose number does not grow with the partitions.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use arrow::datatypes::SchemaRef;
use datafusion::physical_expr::EquivalenceProperties;
use datafusion::physical_plan::execution_plan::{Boundedness, EmissionType};
use datafusion::physical_plan::metrics::{
    Count, ExecutionPlanMetricsSet, MetricBuilder, MetricValue, MetricsSet, Time,
};
use datafusion::physical_plan::{Partitioning, PlanProperties};
use stillhouse_operators::operator::{Measure, Meter};

pub(crate) fn properties(schema: SchemaRef, partitions: usize) -> Arc<PlanProperties> {
    Arc::new(PlanProperties::new(
        EquivalenceProperties::new(schema),
        Partitioning::UnknownPartitioning(partitions),
        EmissionType::Incremental,
        Boundedness::Bounded,
    ))
}

enum Live {
    Count(Count),
    Time(Time),
}

/// Rows, batches and time of a node, and what its operator counts: one of each for all partitions, so that a hundred thousand of them
/// cost what one costs.
pub(crate) struct NodeMetrics {
    set: ExecutionPlanMetricsSet,
    rows: Count,
    batches: Count,
    bytes: Count,
    busy: Time,
    measures: [OnceLock<Live>; Measure::ALL.len()],
}

impl NodeMetrics {
    pub fn new() -> Arc<Self> {
        let set = ExecutionPlanMetricsSet::new();
        let (rows, batches, bytes, busy) = (Count::new(), Count::new(), Count::new(), Time::new());
        MetricBuilder::new(&set).build(MetricValue::OutputRows(rows.clone()));
        MetricBuilder::new(&set).build(MetricValue::ElapsedCompute(busy.clone()));
        MetricBuilder::new(&set).build(MetricValue::OutputBatches(batches.clone()));
        MetricBuilder::new(&set).build(MetricValue::OutputBytes(bytes.clone()));
        Arc::new(Self { set, rows, batches, bytes, busy, measures: Default::default() })
    }

    /// A batch comes out of the node.
    pub fn put_out(&self, rows: usize, bytes: usize) {
        self.rows.add(rows);
        self.batches.add(1);
        self.bytes.add(bytes);
    }

    /// The node was at work since then.
    pub fn worked_since(&self, began: Instant) {
        self.busy.add_elapsed(began);
    }

    /// The node was at work for so long.
    pub fn worked(&self, time: Duration) {
        self.busy.add_duration(time);
    }

    pub fn set(&self) -> MetricsSet {
        self.set.clone_inner()
    }
}

impl Meter for NodeMetrics {
    fn add(&self, what: Measure, n: u64) {
        let live = self.measures[what as usize].get_or_init(|| match what.is_time() {
            true => Live::Time(MetricBuilder::new(&self.set).subset_time(what.name(), 0)),
            false => Live::Count(MetricBuilder::new(&self.set).global_counter(what.name())),
        });
        match live {
            Live::Count(count) => count.add(usize::try_from(n).unwrap_or(usize::MAX)),
            Live::Time(time) => time.add_duration(Duration::from_nanos(n)),
        }
    }
}

impl fmt::Debug for NodeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeMetrics").finish_non_exhaustive()
    }
}

/// The parts of [`ExecutionPlan`] that are the same for every node.
macro_rules! node_basics {
    () => {
        fn properties(&self) -> &Arc<PlanProperties> {
            &self.properties
        }

        fn apply_expressions(
            &self,
            _: &mut dyn FnMut(&Arc<dyn PhysicalExpr>) -> Result<TreeNodeRecursion>,
        ) -> Result<TreeNodeRecursion> {
            Ok(TreeNodeRecursion::Continue)
        }

        fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
            self.replace_children(children, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute))
        }

        fn metrics(&self) -> Option<MetricsSet> {
            Some(self.metrics.set())
        }
    };
}
pub(crate) use node_basics;

/// What is the same for every node of one input, which is never repartitioned: a partition is a split.
macro_rules! one_input {
    () => {
        fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
            vec![&self.input]
        }

        fn benefits_from_input_partitioning(&self) -> Vec<bool> {
            vec![false]
        }
    };
}
pub(crate) use one_input;
