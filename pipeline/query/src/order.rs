//! Physical optimizer rules that make the rows of a query, and their order, a function of the input alone.
//!
//! DataFusion does not define the order of rows that are equal under ORDER BY, of groups, or of the parts of a UNION
//! ALL. In practice it depends on the memory: a sort or an aggregation that spilled returns other rows first, so LIMIT
//! and `row_number()` choose others. Two runs of one job with different `engine.sql_memory_megabytes` must have the
//! same rows, so:
//!
//! | node | change | order |
//! |---|---|---|
//! | sort, top k | also sorted by the row number in its input | equal rows keep the order of the input |
//! | aggregation with groups | input sorted by group and row: one group in memory, no spilling | groups in the order of their first rows |
//! | aggregation over grouping sets, join without an equation | no spilling: an error if memory is short | as without memory pressure |
//! | UNION ALL | outputs its inputs one after the other | as written |
//!
//! Hash joins do not spill; windows and merge joins keep the order of their sorted input.

use std::sync::Arc;

use datafusion::arrow::datatypes::DataType;
use datafusion::common::Result;
use datafusion::common::config::ConfigOptions;
use datafusion::common::tree_node::{Transformed, TreeNode};
use datafusion::execution::runtime_env::RuntimeEnv;
use datafusion::functions_aggregate::min_max::min_udaf;
use datafusion::physical_expr::aggregate::AggregateExprBuilder;
use datafusion::physical_expr::expressions::Column;
use datafusion::physical_expr::{LexOrdering, PhysicalExpr, PhysicalSortExpr};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_optimizer::optimizer::PhysicalOptimizer;
use datafusion::physical_plan::aggregates::{AggregateExec, AggregateMode};
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::joins::NestedLoopJoinExec;
use datafusion::physical_plan::limit::GlobalLimitExec;
use datafusion::physical_plan::projection::ProjectionExec;
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion::physical_plan::{ExecutionPlan, InputOrderMode, replace_children_if_necessary};

use crate::nodes::{NodeKind, QueryNode, ROW};

/// Maximum rows of a top k that is held in memory.
const MAX_IN_MEMORY_ROWS: usize = 1_000;

type Plan = Arc<dyn ExecutionPlan>;

/// Returns DataFusion's rules, with this module's rules before and after them.
pub(super) fn rules(
    spilling: Arc<RuntimeEnv>,
    in_memory: Arc<RuntimeEnv>,
) -> Vec<Arc<dyn PhysicalOptimizerRule + Send + Sync>> {
    let mut rules = PhysicalOptimizer::default().rules;
    rules.insert(0, Arc::new(UnionsAsWritten));
    rules.push(Arc::new(TotalOrder { spilling, in_memory }));
    rules
}

/// Runs first, so that all later rules see a single partition.
#[derive(Debug)]
struct UnionsAsWritten;

impl PhysicalOptimizerRule for UnionsAsWritten {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        plan.transform_up(|node| {
            Ok(match node.downcast_ref::<UnionExec>() {
                Some(_) => Transformed::yes(QueryNode::over(NodeKind::Concatenate, node)),
                None => Transformed::no(node),
            })
        })
        .map(|rewritten| rewritten.data)
    }

    fn name(&self) -> &'static str {
        "unions_as_written"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

/// Runs last, on the sorts that remain after all other rules.
#[derive(Debug)]
struct TotalOrder {
    spilling: Arc<RuntimeEnv>,
    in_memory: Arc<RuntimeEnv>,
}

impl PhysicalOptimizerRule for TotalOrder {
    fn optimize(&self, plan: Plan, _: &ConfigOptions) -> Result<Plan> {
        let rewritten = plan.transform_up(|node| {
            if let Some(sort) = node.downcast_ref::<SortExec>() {
                return Ok(Transformed::yes(stable_sort(sort)?));
            }
            if let Some(aggregation) = node.downcast_ref::<AggregateExec>() {
                return self.aggregation(aggregation);
            }
            if let Some(coalesced) = node.downcast_ref::<CoalescePartitionsExec>() {
                let input = one_partition(coalesced.input().clone());
                return Ok(Transformed::yes(match coalesced.fetch() {
                    Some(fetch) => Arc::new(GlobalLimitExec::new(input, 0, Some(fetch))),
                    None => input,
                }));
            }
            if node.is::<NestedLoopJoinExec>() {
                return Ok(Transformed::yes(self.without_spilling(node)?));
            }
            Ok(Transformed::no(node))
        })?;
        Ok(one_partition(rewritten.data))
    }

    fn name(&self) -> &'static str {
        "total_order"
    }

    fn schema_check(&self) -> bool {
        true
    }
}

fn one_partition(plan: Plan) -> Plan {
    match plan.properties().partitioning.partition_count() {
        1 => plan,
        _ => QueryNode::over(NodeKind::Concatenate, plan),
    }
}

/// Adds row numbers to the input and returns the expression of their column.
fn numbered(input: Plan) -> (Plan, Arc<dyn PhysicalExpr>) {
    let numbered = QueryNode::over(NodeKind::RowNumbers, one_partition(input));
    let last = numbered.schema().fields().len() - 1;
    (numbered, Arc::new(Column::new(ROW, last)))
}

/// Removes the last column, which is a row number.
fn without_numbers(plan: Plan) -> Result<Plan> {
    let schema = plan.schema();
    let kept = schema.fields().len() - 1;
    let columns = schema.fields().iter().take(kept).enumerate();
    let columns = columns
        .map(|(i, field)| (Arc::new(Column::new(field.name(), i)) as Arc<dyn PhysicalExpr>, field.name().clone()));
    Ok(Arc::new(ProjectionExec::try_new(columns.collect::<Vec<_>>(), plan)?))
}

fn stable_sort(sort: &SortExec) -> Result<Plan> {
    let (input, row) = numbered(sort.input().clone());
    let keys = sort.expr().iter().cloned().chain([PhysicalSortExpr::new_default(row)]);
    let Some(keys) = LexOrdering::new(keys) else { return Ok(sort.input().clone()) };
    let sorted = SortExec::new(keys, input);
    let sorted: Plan = match sort.fetch() {
        // a top k stays in memory; a sort may spill
        Some(fetch) if fetch > MAX_IN_MEMORY_ROWS => Arc::new(GlobalLimitExec::new(Arc::new(sorted), 0, Some(fetch))),
        fetch => Arc::new(sorted.with_fetch(fetch)),
    };
    without_numbers(sorted)
}

impl TotalOrder {
    fn aggregation(&self, aggregation: &AggregateExec) -> Result<Transformed<Plan>> {
        let as_it_is: Plan = Arc::new(aggregation.clone());
        if aggregation.group_expr().is_empty() {
            return Ok(Transformed::no(as_it_is));
        }
        Ok(Transformed::yes(match group_by_group(aggregation)? {
            Some(sorted) => sorted,
            None => self.without_spilling(as_it_is)?,
        }))
    }

    /// Makes a node fail for lack of memory instead of spilling to disk; its inputs may spill.
    fn without_spilling(&self, node: Plan) -> Result<Plan> {
        let inputs = node.children().into_iter().cloned();
        let inputs = inputs.map(|input| QueryNode::over(NodeKind::WithRuntime(self.spilling.clone()), input)).collect();
        let node = replace_children_if_necessary(node, inputs)?;
        Ok(QueryNode::over(NodeKind::WithRuntime(self.in_memory.clone()), node))
    }
}

/// Returns the aggregation over sorted input; `None` if that is not possible: grouping sets, or group keys of types
/// without an order.
fn group_by_group(aggregation: &AggregateExec) -> Result<Option<Plan>> {
    let groups = aggregation.group_expr();
    if !groups.is_single() || groups.has_grouping_set() || *aggregation.mode() != AggregateMode::Single {
        return Ok(None);
    }
    let (input, row) = numbered(aggregation.input().clone());
    let schema = input.schema();
    let keys = groups.input_exprs();
    for key in &keys {
        if !has_order(&key.data_type(&schema)?) {
            return Ok(None);
        }
    }
    let keys = keys.into_iter().chain([row.clone()]).map(PhysicalSortExpr::new_default);
    let Some(keys) = LexOrdering::new(keys) else { return Ok(None) };
    let sorted = Arc::new(SortExec::new(keys, input));
    let first_row = AggregateExprBuilder::new(min_udaf(), vec![row]).schema(schema.clone()).alias(ROW).build()?;
    let aggregates = aggregation.aggr_expr().iter().cloned().chain([Arc::new(first_row)]).collect();
    let filters = aggregation.filter_expr().iter().cloned().chain([None]).collect();
    let grouped = AggregateExec::try_new(AggregateMode::Single, groups.clone(), aggregates, filters, sorted, schema)?;
    if *grouped.input_order_mode() != InputOrderMode::Sorted {
        return Ok(None);
    }
    let last = grouped.schema().fields().len() - 1;
    let by_first_row = LexOrdering::new([PhysicalSortExpr::new_default(Arc::new(Column::new(ROW, last)))]);
    match by_first_row {
        Some(order) => Ok(Some(without_numbers(Arc::new(SortExec::new(order, Arc::new(grouped))))?)),
        None => Ok(None),
    }
}

fn has_order(kind: &DataType) -> bool {
    match kind {
        DataType::Dictionary(_, value) => has_order(value),
        other => !other.is_nested() && !other.is_null(),
    }
}
