//! The engine: a job as one physical plan of DataFusion, its splits as partitions.
//!
//! ```text
//!   ShardSinkExec            one row per partition: path, rows, tokens, bytes, sha256, statistics
//!     OperatorExec           partitions
//!       OperatorExec         extract            ◄──► the owner of the device ([`device`])
//!         OperatorExec       pack
//!           OperatorExec     tokenize
//!             OperatorExec   clean
//!               SplitsExec   one partition per split; reads a batch ahead ([`splits`])
//! ```
//!
//! A partition is pulled from the top, a batch at a time, on one worker of the job's pool ([`pool`], where all threads are counted); it holds
//! no thread while it waits. Overlap comes from several partitions at work, from readers that make the next batch, and from the owners of
//! devices. Nodes hold what a plan says and metrics, nothing else: teacher, tokenizer, stores and the sums of a split are found in the
//! session ([`resources`]). A plan is not sent to other processes: each makes it from the job.
//!
//! A job that reads something else than text has another source under the same operators and sink, as `derive` has; the [`runner`] makes its
//! splits, commits them and reports progress.
//!
//! Memory of a split at work: a batch of documents being made and one being worked on, what came of it at each operator, two batches at
//! the device, one row group, and what of the shard is on its way to the store.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod acceptance;
mod awaited;
pub mod device;
pub mod driver;
mod holdouts;
pub mod node_metrics;
pub mod operator;
pub mod pool;
mod remote;
pub mod resources;
pub mod runner;
pub mod session;
mod shard;
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
use stillhouse_operators::registry::OperatorSpec;

use self::operator::OperatorExec;
use self::resources::{READ, WRITE};
use self::sink::{ShardSinkExec, Shards};

/// The plan of a job: a source with a partition for each split, these operators, and a shard for each partition.
///
/// # Errors
/// When there are not as many shards as partitions.
pub fn job_plan(
    source: Arc<dyn ExecutionPlan>,
    operators: &[OperatorSpec],
    shards: Shards,
) -> Result<Arc<dyn ExecutionPlan>> {
    Ok(Arc::new(ShardSinkExec::new(shards, operator_plan(source, operators))?))
}

/// These operators over a source.
pub fn operator_plan(source: Arc<dyn ExecutionPlan>, operators: &[OperatorSpec]) -> Arc<dyn ExecutionPlan> {
    operators.iter().fold(source, |plan, spec| Arc::new(OperatorExec::new(spec.clone(), plan)))
}

/// The stage that a node is: a source reads, the sink writes. DataFusion's own nodes are no stages.
fn stage_name(plan: &dyn ExecutionPlan) -> Option<&'static str> {
    if let Some(operator) = plan.downcast_ref::<OperatorExec>() {
        return Some(operator.name());
    }
    match plan.children().is_empty() {
        true => Some(READ),
        false => plan.downcast_ref::<ShardSinkExec>().map(|_| WRITE),
    }
}

/// The stages below a node; its place among the stages of a split.
pub fn stages_below(plan: &dyn ExecutionPlan) -> usize {
    plan.children().first().map_or(0, |input| {
        let own = usize::from(stage_name(input.as_ref()).is_some());
        own + stages_below(input.as_ref())
    })
}

fn count(metrics: &MetricsSet, name: &str) -> u64 {
    metrics.sum_by_name(name).map_or(0, |value: MetricValue| value.as_usize() as u64)
}

/// Adds what the nodes of a plan have counted so far to a progress.
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
