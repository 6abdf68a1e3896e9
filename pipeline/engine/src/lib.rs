//! The engine: runs a job as one DataFusion physical plan with one partition per split.
//!
//! ```text
//!   ShardSinkExec            one row per partition: path, rows, tokens, bytes, sha256, statistics
//!     OperatorExec           partitions
//!       OperatorExec         extract            ◄──► the owner thread of the device ([`device`])
//!         OperatorExec       pack
//!           OperatorExec     tokenize
//!             OperatorExec   clean
//!               SplitsExec   one partition per split; prefetches one batch ([`splits`])
//! ```
//!
//! Each partition is pulled from the top, one batch at a time, by a worker of the job's pool ([`pool`] lists all
//! threads). A waiting partition holds no thread. Work overlaps in three ways: several partitions run at once, readers
//! prefetch the next batch, and device owners run in parallel. Plan nodes hold only what the plan states, and metrics.
//! They take the teacher, the tokenizer, the stores and the statistics of a split from the session ([`resources`]). The
//! plan is never sent to other processes: each builds it from the job.
//!
//! A job that does not read text puts another source under the same operators and sink, as `derive` does. The
//! [`runner`] executes the splits, commits them and reports progress.
//!
//! Memory of a split in progress:
//! - one batch of documents being read and one being processed,
//! - the output of each operator for that batch,
//! - two batches at the device,
//! - one row group,
//! - the part of the shard that is being uploaded.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod acceptance;
pub mod device;
mod device_waits;
pub mod driver;
mod executor_reports;
mod holdouts;
pub mod node_metrics;
pub mod operator;
pub mod pool;
pub mod resources;
pub mod runner;
pub mod session;
pub mod shard;
pub mod sink;
pub mod splits;
pub mod stage_state;
mod stall;
pub mod teacher;

use std::sync::Arc;

use datafusion::common::Result;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::metrics::{MetricValue, MetricsSet};
use stillhouse_base::events::{Progress, StageProgress};
use stillhouse_operators::operator::Measure;
use stillhouse_operators::operator_spec::OperatorSpec;

use self::operator::OperatorExec;
use self::resources::{READ, WRITE};
use self::sink::{ShardSinkExec, Shards};

/// Builds the plan of a job: a source with one partition per split, the operators, and a sink that writes one shard per
/// partition.
///
/// # Errors
/// When the number of shards differs from the number of partitions.
pub fn job_plan(
    source: Arc<dyn ExecutionPlan>,
    operators: &[OperatorSpec],
    shards: Shards,
) -> Result<Arc<dyn ExecutionPlan>> {
    Ok(Arc::new(ShardSinkExec::new(shards, operator_plan(source, operators))?))
}

/// Stacks the operators on a source.
pub fn operator_plan(source: Arc<dyn ExecutionPlan>, operators: &[OperatorSpec]) -> Arc<dyn ExecutionPlan> {
    operators.iter().fold(source, |plan, spec| Arc::new(OperatorExec::new(spec.clone(), plan)))
}

/// Returns the stage that a node belongs to: a leaf reads, the sink writes. DataFusion's own nodes are not stages.
fn stage_name(plan: &dyn ExecutionPlan) -> Option<&'static str> {
    if let Some(operator) = plan.downcast_ref::<OperatorExec>() {
        return Some(operator.name());
    }
    match plan.children().is_empty() {
        true => Some(READ),
        false => plan.downcast_ref::<ShardSinkExec>().map(|_| WRITE),
    }
}

/// Counts the stages below a node, which is the node's index among the stages of a split.
pub fn stages_below(plan: &dyn ExecutionPlan) -> usize {
    plan.children().first().map_or(0, |input| {
        let own = usize::from(stage_name(input.as_ref()).is_some());
        own + stages_below(input.as_ref())
    })
}

fn count(metrics: &MetricsSet, name: &str) -> u64 {
    metrics.sum_by_name(name).map_or(0, |value: MetricValue| value.as_usize() as u64)
}

/// Adds the counts of all nodes of a plan so far to `progress`.
pub fn add_progress(plan: &dyn ExecutionPlan, progress: &mut Progress) {
    if let Some(input) = plan.children().first() {
        add_progress(input.as_ref(), progress);
    }
    let Some(metrics) = plan.metrics() else { return };
    let sum = |what: Measure| count(&metrics, what.name());
    progress.documents += sum(Measure::Documents);
    progress.text_bytes += sum(Measure::TextBytes);
    progress.tokens += sum(Measure::Tokens);
    progress.sequences += sum(Measure::Sequences);
    progress.teacher_tokens += sum(Measure::TeacherTokens);
    progress.teacher_seconds += sum(Measure::TeacherNanos) as f64 / 1e9;
    progress.extract_seconds += sum(Measure::ExtractNanos) as f64 / 1e9;
    progress.device_idle_seconds += sum(Measure::DeviceIdleNanos) as f64 / 1e9;
    progress.device_blocked_seconds += sum(Measure::DeviceBlockedNanos) as f64 / 1e9;
    let Some(name) = stage_name(plan) else { return };
    let rows = metrics.output_rows().unwrap_or(0) as u64;
    let busy_seconds = metrics.elapsed_compute().unwrap_or(0) as f64 / 1e9;
    match progress.stages.iter_mut().find(|stage| stage.name == name) {
        Some(stage) => {
            stage.rows += rows;
            stage.busy_seconds += busy_seconds;
        }
        None => {
            let stage = StageProgress { name: name.to_owned(), rows, busy_seconds, awaited_seconds: 0.0 };
            progress.stages.push(stage);
        }
    }
}
