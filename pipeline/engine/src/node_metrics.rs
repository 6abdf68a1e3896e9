//! What all plan nodes share: plan properties, and metrics whose number does not grow with the partitions.

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

/// Properties of a node with one partition per split. DataFusion may assume nothing about the order of its rows.
pub fn properties(schema: SchemaRef, partitions: usize) -> Arc<PlanProperties> {
    Arc::new(PlanProperties::new(
        EquivalenceProperties::new(schema),
        Partitioning::UnknownPartitioning(partitions),
        EmissionType::Incremental,
        Boundedness::Bounded,
    ))
}

enum LiveMetric {
    Count(Count),
    Time(Time),
}

/// Rows, batches, time and operator counts of a node. All partitions share one set, so 100,000 partitions cost no more
/// than one.
pub struct NodeMetrics {
    set: ExecutionPlanMetricsSet,
    rows: Count,
    batches: Count,
    bytes: Count,
    busy: Time,
    measures: [OnceLock<LiveMetric>; Measure::ALL.len()],
}

impl NodeMetrics {
    /// Metrics that start at zero.
    pub fn new() -> Arc<Self> {
        let set = ExecutionPlanMetricsSet::new();
        let (rows, batches, bytes, busy) = (Count::new(), Count::new(), Count::new(), Time::new());
        MetricBuilder::new(&set).build(MetricValue::OutputRows(rows.clone()));
        MetricBuilder::new(&set).build(MetricValue::ElapsedCompute(busy.clone()));
        MetricBuilder::new(&set).build(MetricValue::OutputBatches(batches.clone()));
        MetricBuilder::new(&set).build(MetricValue::OutputBytes(bytes.clone()));
        Arc::new(Self { set, rows, batches, bytes, busy, measures: Default::default() })
    }

    /// Counts a batch that the node emits.
    pub fn count_output(&self, rows: usize, bytes: usize) {
        self.rows.add(rows);
        self.batches.add(1);
        self.bytes.add(bytes);
    }

    /// Adds the time since `began` to the node's busy time.
    pub fn worked_since(&self, began: Instant) {
        self.busy.add_elapsed(began);
    }

    /// Adds `time` to the node's busy time.
    pub fn worked(&self, time: Duration) {
        self.busy.add_duration(time);
    }

    /// The metrics in DataFusion's form.
    pub fn set(&self) -> MetricsSet {
        self.set.clone_inner()
    }
}

impl Meter for NodeMetrics {
    fn add(&self, what: Measure, n: u64) {
        let metric = self.measures[what as usize].get_or_init(|| match what.is_time() {
            true => LiveMetric::Time(MetricBuilder::new(&self.set).subset_time(what.name(), 0)),
            false => LiveMetric::Count(MetricBuilder::new(&self.set).global_counter(what.name())),
        });
        match metric {
            LiveMetric::Count(count) => count.add(usize::try_from(n).unwrap_or(usize::MAX)),
            LiveMetric::Time(time) => time.add_duration(Duration::from_nanos(n)),
        }
    }
}

impl fmt::Debug for NodeMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeMetrics").finish_non_exhaustive()
    }
}

/// The methods of [`datafusion::physical_plan::ExecutionPlan`] that all nodes with `properties` and [`NodeMetrics`]
/// share.
#[macro_export]
macro_rules! node_basics {
    () => {
        fn properties(&self) -> &::std::sync::Arc<::datafusion::physical_plan::PlanProperties> {
            &self.properties
        }

        fn metrics(&self) -> Option<::datafusion::physical_plan::metrics::MetricsSet> {
            Some(self.metrics.set())
        }

        $crate::plain_node!();
    };
}

/// The methods of [`datafusion::physical_plan::ExecutionPlan`] that all nodes without DataFusion expressions share.
#[macro_export]
macro_rules! plain_node {
    () => {
        fn apply_expressions(
            &self,
            _: &mut dyn FnMut(
                &::std::sync::Arc<dyn ::datafusion::physical_expr::PhysicalExpr>,
            ) -> ::datafusion::common::Result<::datafusion::common::tree_node::TreeNodeRecursion>,
        ) -> ::datafusion::common::Result<::datafusion::common::tree_node::TreeNodeRecursion> {
            Ok(::datafusion::common::tree_node::TreeNodeRecursion::Continue)
        }

        fn with_new_children(
            self: ::std::sync::Arc<Self>,
            children: Vec<::std::sync::Arc<dyn ::datafusion::physical_plan::ExecutionPlan>>,
        ) -> ::datafusion::common::Result<::std::sync::Arc<dyn ::datafusion::physical_plan::ExecutionPlan>> {
            use ::datafusion::physical_plan::execution_plan::{ChildrenPropertiesMode, ReplaceChildrenOptions};
            self.replace_children(children, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute))
        }
    };
}

/// The methods of [`datafusion::physical_plan::ExecutionPlan`] that all nodes with one input share. The input is never
/// repartitioned, because each partition is a split.
#[macro_export]
macro_rules! one_input {
    () => {
        fn children(&self) -> Vec<&::std::sync::Arc<dyn ::datafusion::physical_plan::ExecutionPlan>> {
            vec![&self.input]
        }

        fn benefits_from_input_partitioning(&self) -> Vec<bool> {
            vec![false]
        }
    };
}

/// The methods of [`datafusion::physical_plan::ExecutionPlan`] that all leaf nodes that read splits share.
#[macro_export]
macro_rules! no_input {
    () => {
        fn children(&self) -> Vec<&::std::sync::Arc<dyn ::datafusion::physical_plan::ExecutionPlan>> {
            Vec::new()
        }

        fn replace_children(
            self: ::std::sync::Arc<Self>,
            _: Vec<::std::sync::Arc<dyn ::datafusion::physical_plan::ExecutionPlan>>,
            _: ::datafusion::physical_plan::execution_plan::ReplaceChildrenOptions,
        ) -> ::datafusion::common::Result<::std::sync::Arc<dyn ::datafusion::physical_plan::ExecutionPlan>> {
            Ok(self)
        }
    };
}
