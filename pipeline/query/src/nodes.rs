//! Plan nodes that make the rows of a query and their order depend on the input alone: see [`super::order`].

use std::fmt;
use std::sync::Arc;

use datafusion::arrow::array::{ArrayRef, RecordBatch, UInt64Array};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::common::tree_node::TreeNodeRecursion;
use datafusion::common::{Result, internal_err};
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::execution::{SendableRecordBatchStream, TaskContext};
use datafusion::physical_expr::{EquivalenceProperties, PhysicalExpr};
use datafusion::physical_plan::execution_plan::{
    Boundedness, ChildrenPropertiesMode, EmissionType, ReplaceChildrenOptions,
};
use datafusion::physical_plan::stream::RecordBatchStreamAdapter;
use datafusion::physical_plan::{DisplayAs, DisplayFormatType, ExecutionPlan, Partitioning, PlanProperties};
use futures::{StreamExt, TryStreamExt};

/// Name of the column that [`NodeKind::RowNumbers`] adds.
pub(super) const ROW: &str = "__stillhouse_row";

/// The function of a [`QueryNode`].
#[derive(Debug, Clone)]
pub(super) enum NodeKind {
    /// Adds the number of each row, from 0, as the last column. Has one partition.
    RowNumbers,
    /// Outputs the partitions of its input one after the other, as one partition.
    Concatenate,
    /// Runs its input with another runtime, which has another rule for spilling to disk.
    WithRuntime(Arc<RuntimeEnv>),
}

/// A node with one input.
#[derive(Debug)]
pub(super) struct QueryNode {
    kind: NodeKind,
    input: Arc<dyn ExecutionPlan>,
    properties: Arc<PlanProperties>,
}

impl QueryNode {
    pub fn over(kind: NodeKind, input: Arc<dyn ExecutionPlan>) -> Arc<dyn ExecutionPlan> {
        let properties = match kind {
            NodeKind::WithRuntime(_) => input.properties().clone(),
            NodeKind::Concatenate => properties(input.schema(), input.properties().emission_type),
            NodeKind::RowNumbers => {
                let mut fields: Vec<_> = input.schema().fields().iter().cloned().collect();
                fields.push(Arc::new(Field::new(ROW, DataType::UInt64, false)));
                let schema = Schema::new_with_metadata(fields, input.schema().metadata().clone());
                properties(Arc::new(schema), input.properties().emission_type)
            }
        };
        Arc::new(Self { kind, input, properties })
    }
}

fn properties(schema: SchemaRef, emission: EmissionType) -> Arc<PlanProperties> {
    let equivalences = EquivalenceProperties::new(schema);
    Arc::new(PlanProperties::new(equivalences, Partitioning::UnknownPartitioning(1), emission, Boundedness::Bounded))
}

impl DisplayAs for QueryNode {
    fn fmt_as(&self, _: DisplayFormatType, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name())
    }
}

impl ExecutionPlan for QueryNode {
    fn name(&self) -> &'static str {
        match self.kind {
            NodeKind::RowNumbers => "RowNumbersExec",
            NodeKind::Concatenate => "ConcatenateExec",
            NodeKind::WithRuntime(_) => "WithRuntimeExec",
        }
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        &self.properties
    }

    fn maintains_input_order(&self) -> Vec<bool> {
        vec![matches!(self.kind, NodeKind::WithRuntime(_))]
    }

    fn benefits_from_input_partitioning(&self) -> Vec<bool> {
        vec![false]
    }

    fn children(&self) -> Vec<&Arc<dyn ExecutionPlan>> {
        vec![&self.input]
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
        match children.pop() {
            Some(input) if children.is_empty() => Ok(Self::over(self.kind.clone(), input)),
            _ => internal_err!("{} has one input", self.name()),
        }
    }

    fn with_new_children(self: Arc<Self>, children: Vec<Arc<dyn ExecutionPlan>>) -> Result<Arc<dyn ExecutionPlan>> {
        self.replace_children(children, ReplaceChildrenOptions::new(ChildrenPropertiesMode::Recompute))
    }

    fn execute(&self, partition: usize, context: Arc<TaskContext>) -> Result<SendableRecordBatchStream> {
        match &self.kind {
            NodeKind::WithRuntime(runtime) => {
                let context = TaskContext::new(
                    context.task_id(),
                    context.session_id(),
                    context.session_config().clone(),
                    context.scalar_functions().clone(),
                    context.higher_order_functions().clone(),
                    context.aggregate_functions().clone(),
                    context.window_functions().clone(),
                    runtime.clone(),
                );
                self.input.execute(partition, Arc::new(context))
            }
            NodeKind::Concatenate => {
                let (input, partitions) = (self.input.clone(), self.input.properties().partitioning.partition_count());
                let streams = futures::stream::iter(0..partitions).map(move |n| input.execute(n, context.clone()));
                Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), streams.try_flatten())))
            }
            NodeKind::RowNumbers => {
                let (input, schema, mut rows) = (self.input.execute(partition, context)?, self.schema(), 0);
                let numbered = input.map(move |batch| {
                    let batch = batch?;
                    let first = rows;
                    rows += batch.num_rows() as u64;
                    let numbers: ArrayRef = Arc::new(UInt64Array::from_iter_values(first..rows));
                    let columns = batch.columns().iter().cloned().chain([numbers]).collect();
                    Ok(RecordBatch::try_new(schema.clone(), columns)?)
                });
                Ok(Box::pin(RecordBatchStreamAdapter::new(self.schema(), numbered)))
            }
        }
    }
}
