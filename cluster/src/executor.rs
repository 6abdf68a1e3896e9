//! `stillhouse executor`: Ballista's executor with this house's codec and engine: it makes splits and nothing else, and listens on no port.
//!
//! ```text
//!   asks the scheduler every 50 ms as long as a slot is free, else every 5 s ─► task ─► is it a job of ours? ─► Worker::make
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use ballista_core::JobId;
use ballista_core::config::TaskSchedulingPolicy;
use ballista_core::error::BallistaError;
use ballista_core::execution_plans::ShuffleWriterExec;
use ballista_core::serde::protobuf::scheduler_grpc_client::SchedulerGrpcClient;
use ballista_core::serde::protobuf::{
    GetJobStatusParams, RuntimeStatsReport, ShuffleWritePartition, WindowStateReport,
};
use ballista_executor::execution_engine::{DefaultExecutionEngine, ExecutionEngine, QueryStageExecutor};
use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};
use datafusion::common::{DataFusionError, Result as DataResult};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::metrics::MetricsSet;
use datafusion::prelude::SessionConfig;
use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use stillhouse_pipeline::run::worker::Place;

use crate::codec::Codec;
use crate::folder::OwnFolder;
use crate::node::JobExec;
use crate::place::Workplace;
use crate::token::Token;
use crate::wire::{self, Scheduler};
use crate::{driver, failure};

/// A task that this executor cannot make is given back after so long.
const GIVES_BACK: Duration = Duration::from_secs(5);

/// Between tries to reach a scheduler that is not there yet.
const AGAIN: Duration = Duration::from_millis(250);

/// What an executor is.
pub struct Options {
    /// The scheduler.
    pub scheduler: Scheduler,
    /// How long it waits for a scheduler that is not there yet.
    pub patience: Duration,
    /// Its name, its rules and its device.
    pub place: Place,
    /// The cluster's token.
    pub token: Token,
}

/// Works until it is told to stop (SIGTERM, Ctrl-C); `ready` is told its name once the scheduler has taken it.
///
/// # Errors
/// When the scheduler cannot be reached, or refuses it.
pub async fn work(options: Options, ready: impl FnOnce(&str)) -> Result<()> {
    let Options { scheduler, patience, place, token } = options;
    greet(&scheduler, &token, patience).await?;
    let host = hostname();
    let (name, slots) = (place.name.clone(), place.slots);
    let workplace = Workplace::new(place);
    let work_dir =
        OwnFolder::new(&std::env::temp_dir()).map_err(PipelineError::output("no temporary folder for the executor"))?;
    let (scheduler_host, scheduler_port) = scheduler.host_and_port();
    let failed = |e: &dyn std::fmt::Display| PipelineError::new(ErrorKind::Output, format!("the executor: {e}"));
    let largest = u32::try_from(wire::LARGEST_MESSAGE).unwrap_or(u32::MAX);
    let (called, signer) = (scheduler.clone(), token.clone());
    let config = ExecutorProcessConfig {
        external_host: Some(host),
        // nobody can call it
        port: 0,
        grpc_port: 0,
        scheduler_host: scheduler_host.into(),
        scheduler_port,
        vcores: slots,
        task_scheduling_policy: TaskSchedulingPolicy::PullStaged,
        work_dir: Some(work_dir.path().display().to_string()),
        grpc_max_decoding_message_size: largest,
        grpc_max_encoding_message_size: largest,
        // the memory of jobs is bounded by themselves
        memory_pool_size: Some(0),
        override_execution_engine: Some(Arc::new(OwnJobsOnly(DefaultExecutionEngine::new()))),
        override_physical_codec: Some(Arc::new(Codec::new(token, Some(workplace)))),
        override_create_grpc_client_endpoint: Some(Arc::new(move |_| Ok(called.endpoint(&signer)?))),
        // nothing is fetched from an executor, so it listens nowhere
        override_arrow_flight_service: Some(Arc::new(|_, _, mut shutdown, _| {
            tokio::spawn(async move {
                shutdown.recv().await;
                Ok(())
            })
        })),
        ..ExecutorProcessConfig::default()
    };
    ready(&name);
    start_executor_process(Arc::new(config)).await.map_err(|e| failed(&e))
}

/// Makes sure that there is a scheduler and that it takes this executor: Ballista's own loop would ask forever.
async fn greet(scheduler: &Scheduler, token: &Token, patience: Duration) -> Result<()> {
    let began = std::time::Instant::now();
    loop {
        let greeted = async {
            let mut client = SchedulerGrpcClient::new(scheduler.connect(token).await?);
            let asked = GetJobStatusParams { job_id: "none: an executor greets".into() };
            client.get_job_status(asked).await.map_err(|e| driver::refused(scheduler, &e))
        };
        match greeted.await {
            Ok(_) => return Ok(()),
            Err(e) if e.retryable && began.elapsed() < patience => tokio::time::sleep(AGAIN).await,
            Err(e) => return Err(e),
        }
    }
}

/// How an executor is named where nobody says: by its machine and process.
pub fn usual_name() -> String {
    format!("{} process {}", hostname(), std::process::id())
}

fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".into() } else { name.into() }
}

/// Ballista's engine, for plans that are a job of this house and nothing else: no file is read, no query run for strangers.
struct OwnJobsOnly(DefaultExecutionEngine);

impl ExecutionEngine for OwnJobsOnly {
    fn create_query_stage_exec(
        &self,
        job_id: JobId,
        stage_id: usize,
        task_id: usize,
        global_output_partition_ids: Vec<usize>,
        plan: Arc<dyn ExecutionPlan>,
        work_dir: &str,
        config: &SessionConfig,
    ) -> DataResult<Arc<dyn QueryStageExecutor>> {
        if !is_a_job(plan.as_ref()) {
            let message = "an executor of stillhouse makes its jobs and executes no other plans";
            return Err(failure::of_task(&PipelineError::new(ErrorKind::Usage, message)));
        }
        let ids = global_output_partition_ids;
        let stage = self.0.create_query_stage_exec(job_id, stage_id, task_id, ids, plan, work_dir, config)?;
        Ok(Arc::new(GivesBack(stage)))
    }
}

/// A stage whose task goes back to the scheduler where this executor cannot make it, without being counted as a failure of it, and that tells
/// the scheduler no more than that it is done.
#[derive(Debug)]
struct GivesBack(Arc<dyn QueryStageExecutor>);

impl fmt::Display for GivesBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[async_trait]
impl QueryStageExecutor for GivesBack {
    async fn execute_query_stage(
        &self,
        task_id: usize,
        context: Arc<TaskContext>,
    ) -> DataResult<Vec<ShuffleWritePartition>> {
        let made = self.0.execute_query_stage(task_id, context).await;
        match made {
            Err(e) if failure::is_of_place(&format!("{e:?}")) => {
                // the slot stays taken for a while, so that others ask before this one asks again
                tokio::time::sleep(GIVES_BACK).await;
                Err(DataFusionError::External(Box::new(BallistaError::Cancelled)))
            }
            made => made,
        }
    }

    /// None: what a split counted is told at the output, and the scheduler would go over the metrics of every task of the job with each that ends.
    fn collect_plan_metrics(&self) -> Vec<MetricsSet> {
        Vec::new()
    }

    fn collect_runtime_stats_reports(&self) -> Vec<RuntimeStatsReport> {
        self.0.collect_runtime_stats_reports()
    }

    fn collect_window_state_reports(&self) -> DataResult<Vec<WindowStateReport>> {
        self.0.collect_window_state_reports()
    }
}

fn is_a_job(plan: &dyn ExecutionPlan) -> bool {
    plan.is::<ShuffleWriterExec>()
        && match plan.children().as_slice() {
            [job] => job.downcast_ref::<JobExec>().is_some_and(JobExec::is_whole),
            _ => false,
        }
}
