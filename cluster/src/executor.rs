//! `stillhouse executor`: Ballista's executor with our codec and execution engine. It makes splits and nothing else,
//! and listens on no port.
//!
//! ```text
//!   polls the scheduler every 50 ms while a slot is free, else every 5 s ─► task ─► a job of ours? ─► Worker::make
//!   SIGTERM or Ctrl-C ─► the scheduler gives the running splits to others ─► the process ends three seconds later
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
use ballista_core::serde::protobuf::{ExecutorStoppedParams, GetJobStatusParams, ShuffleWritePartition};
use ballista_executor::execution_engine::{ExecutionEngine, QueryStageExecutor};
use ballista_executor::executor_process::{ExecutorProcessConfig, start_executor_process};
use datafusion::common::{DataFusionError, Result as DataResult};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::metrics::MetricsSet;
use datafusion::physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use datafusion::prelude::SessionConfig;
use futures::TryStreamExt;
use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use stillhouse_pipeline::run::worker::WorkerConfig;
use stillhouse_pipeline::storage::Backoff;
use tokio::signal::unix::{SignalKind, signal};

use crate::codec::Codec;
use crate::executor_jobs::ExecutorJobs;
use crate::node::JobExec;
use crate::scheduler_client::{self, SchedulerAddress};
use crate::token::Token;
use crate::work_folder::WorkFolder;
use crate::{driver, failure};

/// How long the executor waits before it returns a task that it cannot make.
const RETURN_DELAY: Duration = Duration::from_secs(5);

/// How long a stopping executor may take to tell the scheduler, and to finish splits that are about to end.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(3);

/// Waits between the tries to reach a scheduler that does not answer yet; random, so that the executors of a cluster do
/// not call at once.
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(250), largest: Duration::from_secs(2) };

/// Options of an executor.
pub struct Options {
    /// The scheduler to poll.
    pub scheduler: SchedulerAddress,
    /// How long to wait for a scheduler that does not answer yet.
    pub scheduler_timeout: Duration,
    /// The name, access rules and device of the executor.
    pub worker: WorkerConfig,
    /// The cluster's token.
    pub token: Token,
}

/// Works until SIGTERM or Ctrl-C. Calls `on_ready` with the executor's name once the scheduler accepts it.
///
/// # Errors
/// When the scheduler cannot be reached or refuses the executor.
pub async fn run(options: Options, on_ready: impl FnOnce(&str)) -> Result<()> {
    let Options { scheduler, scheduler_timeout, worker, token } = options;
    check_scheduler(&scheduler, &token, scheduler_timeout).await?;
    let host = hostname();
    let (name, slots) = (worker.name.clone(), worker.slots);
    let executor_jobs = ExecutorJobs::new(worker);
    let work_dir = WorkFolder::new(&std::env::temp_dir())
        .map_err(PipelineError::output("no temporary folder for the executor"))?;
    let (scheduler_host, scheduler_port) = scheduler.host_and_port();
    let executor_error =
        |e: &dyn std::fmt::Display| PipelineError::new(ErrorKind::Output, format!("the executor: {e}"));
    let max_message_bytes = u32::try_from(scheduler_client::MAX_MESSAGE_BYTES).unwrap_or(u32::MAX);
    let (endpoint_scheduler, endpoint_token) = (scheduler.clone(), token.clone());
    let executor_id = uuid::Uuid::new_v4().to_string();
    let stop_signal = stop_signal()?;
    let config = ExecutorProcessConfig {
        executor_id: executor_id.clone(),
        external_host: Some(host),
        // the executor listens on no port
        port: 0,
        grpc_port: 0,
        scheduler_host: scheduler_host.into(),
        scheduler_port,
        vcores: slots,
        task_scheduling_policy: TaskSchedulingPolicy::PullStaged,
        work_dir: Some(work_dir.path().display().to_string()),
        grpc_max_decoding_message_size: max_message_bytes,
        grpc_max_encoding_message_size: max_message_bytes,
        // jobs bound their own memory
        memory_pool_size: Some(0),
        override_execution_engine: Some(Arc::new(StillhouseEngine)),
        override_physical_codec: Some(Arc::new(Codec::new(token.clone(), Some(executor_jobs)))),
        override_create_grpc_client_endpoint: Some(Arc::new(
            move |_| Ok(endpoint_scheduler.endpoint(&endpoint_token)?),
        )),
        // nothing fetches data from an executor, so it serves no Flight
        override_arrow_flight_service: Some(Arc::new(|_, _, mut shutdown, _| {
            tokio::spawn(async move {
                shutdown.recv().await;
                Ok(())
            })
        })),
        ..ExecutorProcessConfig::default()
    };
    on_ready(&name);
    let process = start_executor_process(Arc::new(config));
    tokio::pin!(process);
    tokio::select! {
        ended = &mut process => return ended.map_err(|e| executor_error(&e)),
        () = stop_signal => tracing::info!("stopping: other executors make the unfinished splits"),
    }
    // Ballista's own shutdown also tells the scheduler, but waits for the running splits and polls for others meanwhile
    match tokio::time::timeout(SHUTDOWN_TIMEOUT, process).await {
        Ok(ended) => ended.map_err(|e| executor_error(&e)),
        Err(_) => unregister(&scheduler, &token, executor_id).await,
    }
}

/// Returns a future that ends with SIGTERM or Ctrl-C.
fn stop_signal() -> Result<impl Future<Output = ()>> {
    let no_signals = PipelineError::output("no signals can be waited for");
    let terminate =
        signal(SignalKind::terminate()).and_then(|terminate| Ok((terminate, signal(SignalKind::interrupt())?)));
    let (mut terminate, mut interrupt) = terminate.map_err(no_signals)?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Tells the scheduler that this executor leaves. A scheduler that cannot be reached notices by its timeout.
async fn unregister(scheduler: &SchedulerAddress, token: &Token, executor_id: String) -> Result<()> {
    let unregister = async {
        let mut client = SchedulerGrpcClient::new(scheduler.connect(token).await?);
        let stopped = ExecutorStoppedParams { executor_id, reason: "told to stop".into() };
        client.executor_stopped(stopped).await.map_err(|e| driver::scheduler_error(scheduler, &e))
    };
    if let Ok(Err(e)) = tokio::time::timeout(SHUTDOWN_TIMEOUT, unregister).await {
        tracing::debug!("{e}");
    }
    Ok(())
}

/// Checks that there is a scheduler and that it accepts this executor: Ballista's own loop would poll forever.
async fn check_scheduler(scheduler: &SchedulerAddress, token: &Token, scheduler_timeout: Duration) -> Result<()> {
    let began = std::time::Instant::now();
    let mut failures = 0;
    loop {
        let check = async {
            let mut client = SchedulerGrpcClient::new(scheduler.connect(token).await?);
            let request = GetJobStatusParams { job_id: "none: an executor greets".into() };
            client.get_job_status(request).await.map_err(|e| driver::scheduler_error(scheduler, &e))
        };
        match check.await {
            Ok(_) => return Ok(()),
            Err(e) if e.retryable && began.elapsed() < scheduler_timeout => {
                failures += 1;
                tokio::time::sleep(BACKOFF.wait(failures, None)).await;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Default name of an executor: its machine and process.
pub fn default_name() -> String {
    format!("{} process {}", hostname(), std::process::id())
}

fn hostname() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "localhost".into() } else { name.into() }
}

/// Ballista's execution engine, restricted to plans that are one of our jobs: it reads no files and runs no queries for
/// strangers.
struct StillhouseEngine;

impl ExecutionEngine for StillhouseEngine {
    fn create_query_stage_exec(
        &self,
        _: JobId,
        _: usize,
        _: usize,
        _: Vec<usize>,
        plan: Arc<dyn ExecutionPlan>,
        _: &str,
        _: &SessionConfig,
    ) -> DataResult<Arc<dyn QueryStageExecutor>> {
        match job_in(plan.as_ref()) {
            Some(job) => Ok(Arc::new(SplitStage(job))),
            None => {
                let message = "an executor of stillhouse makes its jobs and executes no other plans";
                Err(failure::to_task_error(&PipelineError::new(ErrorKind::Usage, message)))
            }
        }
    }
}

/// The splits of a task. They are committed at the output, where the run finds them, so the task writes no shuffle data
/// and reports only that it is done. If this executor cannot make them, the task goes back to the scheduler.
#[derive(Debug)]
struct SplitStage(Arc<dyn ExecutionPlan>);

impl fmt::Display for SplitStage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.name())
    }
}

impl SplitStage {
    async fn make(&self, context: &Arc<TaskContext>) -> DataResult<()> {
        for partition in 0..self.0.output_partitioning().partition_count() {
            let records = self.0.execute(partition, Arc::clone(context))?;
            records.try_for_each(|_| std::future::ready(Ok(()))).await?;
        }
        Ok(())
    }
}

#[async_trait]
impl QueryStageExecutor for SplitStage {
    async fn execute_query_stage(&self, _: usize, context: Arc<TaskContext>) -> DataResult<Vec<ShuffleWritePartition>> {
        match self.make(&context).await {
            Err(e) if failure::is_local_to_executor(&format!("{e:?}")) => {
                // holding the slot for a while lets other executors poll first
                tokio::time::sleep(RETURN_DELAY).await;
                Err(DataFusionError::External(Box::new(BallistaError::Cancelled)))
            }
            made => made.map(|()| Vec::new()),
        }
    }

    /// Returns none: the output carries the counts of a split, and the scheduler would scan the metrics of all tasks at
    /// the end of each.
    fn collect_plan_metrics(&self) -> Vec<MetricsSet> {
        Vec::new()
    }
}

/// The job in a task's plan, if the plan is only that and Ballista's shuffle writer above it.
fn job_in(plan: &dyn ExecutionPlan) -> Option<Arc<dyn ExecutionPlan>> {
    match plan.children().as_slice() {
        [job] if plan.is::<ShuffleWriterExec>() => {
            job.downcast_ref::<JobExec>().is_some_and(JobExec::has_split_rows).then(|| Arc::clone(job))
        }
        _ => None,
    }
}
