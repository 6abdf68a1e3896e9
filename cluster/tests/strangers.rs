//! The cluster's token gives a right to send Stillhouse jobs, and to have nothing else executed.
//!
//! A client with the token sends plans of its own to a scheduler and an executor in this process. The scheduler is
//! Ballista's and accepts any plan; the executor refuses them.
#![cfg(feature = "distributed")]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballista_core::serde::BallistaPhysicalExtensionCodec;
use ballista_core::serde::protobuf::execute_query_params::Query;
use ballista_core::serde::protobuf::job_status::Status as JobState;
use ballista_core::serde::protobuf::scheduler_grpc_client::SchedulerGrpcClient;
use ballista_core::serde::protobuf::{ExecuteQueryParams, GetJobStatusParams, execute_query_result};
use ballista_core::version::insert_version_header;
use datafusion::arrow::array::{Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Schema};
use datafusion::catalog::memory::MemorySourceConfig;
use datafusion::datasource::source::DataSourceExec;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::empty::EmptyExec;
use datafusion_proto::physical_plan::AsExecutionPlan;
use datafusion_proto::protobuf::physical_plan_node::PhysicalPlanType;
use datafusion_proto::protobuf::{PhysicalExtensionNode, PhysicalPlanNode};
use serde_json::json;
use stillhouse_cluster::scheduler_client::SchedulerAddress;
use stillhouse_cluster::token::Token;
use stillhouse_cluster::{BUILD, executor, scheduler};
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::run::memory_budget::MemoryBudget;
use stillhouse_pipeline::run::worker::WorkerConfig;
use tonic::Request;

const PATIENCE: Duration = Duration::from_secs(60);

fn scheduler_options(token: &Token) -> scheduler::Options {
    scheduler::Options {
        listen: "127.0.0.1:0".parse().unwrap(),
        tls: None,
        trusted_network: false,
        executor_timeout_seconds: 20,
        token: token.clone(),
    }
}

fn executor_options(scheduler: &SchedulerAddress, token: &Token) -> executor::Options {
    let worker = WorkerConfig {
        name: "the executor".into(),
        access: Access::everything(),
        device: None,
        slots: 1,
        memory_budget: MemoryBudget::new(1 << 30),
    };
    executor::Options { scheduler: scheduler.clone(), scheduler_timeout: PATIENCE, worker, token: token.clone() }
}

/// The final state of a plan that a client with the token sends.
async fn final_state(plan: PhysicalPlanNode, scheduler: &SchedulerAddress, token: &Token) -> JobState {
    let mut client = SchedulerGrpcClient::new(scheduler.connect(token).await.unwrap());
    let mut encoded = Vec::new();
    plan.try_encode(&mut encoded).unwrap();
    let mut request = Request::new(ExecuteQueryParams {
        query: Some(Query::PhysicalPlan(encoded)),
        settings: Vec::new(),
        session_id: "strangers".into(),
        operation_id: "strangers".into(),
    });
    insert_version_header(request.metadata_mut());
    let Some(execute_query_result::Result::Success(job)) =
        client.execute_query(request).await.unwrap().into_inner().result
    else {
        panic!("the scheduler takes any plan")
    };
    let began = Instant::now();
    loop {
        let asked = GetJobStatusParams { job_id: job.job_id.clone() };
        let status = client.get_job_status(asked).await.unwrap().into_inner().status.and_then(|status| status.status);
        match status {
            Some(ended @ (JobState::Failed(_) | JobState::Successful(_))) => return ended,
            state => assert!(began.elapsed() < PATIENCE, "{state:?}"),
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn rows() -> Arc<dyn ExecutionPlan> {
    let schema = Arc::new(Schema::new(vec![Field::new("n", DataType::Int64, false)]));
    let batch = RecordBatch::try_new(Arc::clone(&schema), vec![Arc::new(Int64Array::from(vec![1, 2, 3]))]).unwrap();
    DataSourceExec::from_data_source(MemorySourceConfig::try_new(&[vec![batch]], schema, None).unwrap())
}

fn encoded(plan: Arc<dyn ExecutionPlan>) -> PhysicalPlanNode {
    PhysicalPlanNode::try_from_physical_plan(plan, &BallistaPhysicalExtensionCodec::default()).unwrap()
}

/// A Stillhouse job, sealed as `sealed_spec` seals it, over an input that is not rows of splits.
fn job_over(input: Arc<dyn ExecutionPlan>, token: &Token) -> PhysicalPlanNode {
    let spec = json!({"spec": "{}", "base": "/", "ticket": {"job_hash": "abc", "holder": "x"}});
    let mut body = Vec::new();
    ciborium::into_writer(&json!({"build": BUILD, "order": spec}), &mut body).unwrap();
    let node = [&b"\0stillhouse job 2\0"[..], &token.seal(&[&body]), &body].concat();
    let extension = PhysicalExtensionNode { node, inputs: vec![encoded(input)] };
    PhysicalPlanNode { physical_plan_type: Some(PhysicalPlanType::Extension(extension)) }
}

async fn sends_plans(scheduler: &SchedulerAddress, token: &Token) {
    let plans = [
        ("rows", encoded(rows())),
        ("a query over rows", encoded(Arc::new(CoalescePartitionsExec::new(rows())))),
        ("a job over nothing", job_over(Arc::new(EmptyExec::new(rows().schema())), token)),
        ("a job over other rows", job_over(rows(), token)),
    ];
    for (what, plan) in plans {
        match final_state(plan, scheduler, token).await {
            JobState::Failed(failed) => {
                let says = "makes its jobs and executes no other plans";
                assert!(failed.error.contains(says), "{what}: {}", failed.error);
            }
            other => panic!("{what} was executed: {other:?}"),
        }
    }
}

#[test]
fn a_plan_that_is_no_job_is_refused_whoever_sends_it() {
    let token = Token::new(&"t".repeat(32));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let (tell, told) = tokio::sync::oneshot::channel();
        let serves = scheduler::serve(scheduler_options(&token), |address| tell.send(address).unwrap());
        let asks = async {
            let scheduler = SchedulerAddress::parse(&told.await.unwrap().to_string()).unwrap();
            tokio::select! {
                ended = executor::run(executor_options(&scheduler, &token), |_| ()) => {
                    panic!("the executor: {ended:?}")
                }
                () = sends_plans(&scheduler, &token) => {}
            }
        };
        tokio::select! {
            ended = serves => panic!("the scheduler: {ended:?}"),
            () = asks => {}
        }
    });
}
