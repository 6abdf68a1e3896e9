//! `stillhouse scheduler`: Ballista's scheduler, which hands out splits to executors that have the cluster's token.
//!
//! It keeps its state in memory. A restarted scheduler has forgotten its jobs: their runs fail, and continue when they
//! are started again, because finished splits are at the output.

use std::net::SocketAddr;
use std::sync::Arc;

use ballista_core::config::TaskSchedulingPolicy;
use ballista_core::serde::protobuf::scheduler_grpc_server::SchedulerGrpcServer;
use ballista_scheduler::cluster::BallistaCluster;
use ballista_scheduler::config::SchedulerConfig;
use ballista_scheduler::scheduler_process::create_scheduler;
use datafusion_proto::protobuf::{LogicalPlanNode, PhysicalPlanNode};
use stillhouse_pipeline::error::{ErrorKind, PipelineError, Result};
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::codec::Codec;
use crate::lost_tasks::LostTaskDetector;
use crate::token::Token;
use crate::{scheduler_client, tls};

/// Checks for dead executors within one `executor_timeout_seconds`.
const CHECKS_PER_TIMEOUT: u64 = 4;
/// Seconds that a job waits for an executor after the last one is gone.
const NO_EXECUTOR_GRACE_SECONDS: u64 = 300;

/// Where a scheduler listens, and which callers it accepts.
pub struct Options {
    /// Address and port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Certificate and key; callers must use TLS if set.
    pub tls: Option<tls::Files>,
    /// Declares that no stranger can listen in on the network. Allows an address beyond loopback without TLS.
    pub trusted_network: bool,
    /// Seconds after which an executor that has not polled is dead and its splits go to others. A busy executor polls
    /// every five seconds.
    pub executor_timeout_seconds: u64,
    /// The cluster's token.
    pub token: Token,
}

/// Serves until it is dropped; calls `on_listening` with the address.
///
/// # Errors
/// When it cannot or must not listen on the address, or when the TLS files are not valid.
pub async fn serve(options: Options, on_listening: impl FnOnce(SocketAddr)) -> Result<()> {
    let Options { listen, tls, trusted_network, executor_timeout_seconds, token } = options;
    if !listen.ip().is_loopback() && !trusted_network && tls.is_none() {
        let message = format!(
            "--listen {listen}: other machines reach this address, and what is said there is not encrypted; valid: a loopback address, \
             --tls-certificate and --tls-key, or --trusted-network where nobody else listens in"
        );
        return Err(PipelineError::new(ErrorKind::Usage, message));
    }
    let failed = |what: &'static str| {
        move |e: ballista_core::error::BallistaError| {
            PipelineError::new(ErrorKind::Output, format!("the scheduler cannot {what}: {e}"))
        }
    };
    let max_message_bytes = u32::try_from(scheduler_client::MAX_MESSAGE_BYTES).unwrap_or(u32::MAX);
    let config = SchedulerConfig {
        bind_host: listen.ip().to_string(),
        bind_port: listen.port(),
        scheduling_policy: TaskSchedulingPolicy::PullStaged,
        executor_timeout_seconds,
        expire_dead_executor_interval_seconds: (executor_timeout_seconds / CHECKS_PER_TIMEOUT).max(1),
        no_executors_grace_period_seconds: NO_EXECUTOR_GRACE_SECONDS.max(executor_timeout_seconds),
        grpc_server_max_decoding_message_size: max_message_bytes,
        grpc_server_max_encoding_message_size: max_message_bytes,
        // no limit: Ballista also counts splits that an executor returns; executors count real failures
        task_max_failures: usize::MAX,
        // executors listen on no port, so the scheduler never calls one, nor waits for one that is gone
        override_create_grpc_client_endpoint: Some(Arc::new(|_| Err("executors listen on no port".into()))),
        override_physical_codec: Some(Arc::new(Codec::new(token.clone(), None))),
        ..SchedulerConfig::default()
    };
    let cluster = BallistaCluster::new_from_config(&config).await.map_err(failed("begin"))?;
    let scheduler = create_scheduler::<LogicalPlanNode, PhysicalPlanNode>(cluster, Arc::new(config));
    let service = SchedulerGrpcServer::new(LostTaskDetector::new(scheduler.await.map_err(failed("begin"))?))
        .max_decoding_message_size(scheduler_client::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(scheduler_client::MAX_MESSAGE_BYTES);
    let proof = token.proof();
    let authenticated =
        InterceptedService::new(service, move |request| scheduler_client::check_caller(request, &proof));
    let listen_error = |e: &dyn std::error::Error| {
        let message = format!("the scheduler cannot listen on {listen}: {}", stillhouse_pipeline::job::chain(e));
        PipelineError::new(ErrorKind::Output, message)
    };
    let mut server = Server::builder();
    if let Some(files) = &tls {
        let tls_config = files.server_config()?;
        server =
            server.tls_config(tls_config).map_err(|e| files.mismatch_error(&stillhouse_pipeline::job::chain(&e)))?;
    }
    let incoming = TcpIncoming::bind(listen).map_err(|e| listen_error(&e))?;
    on_listening(incoming.local_addr().map_err(|e| listen_error(&e))?);
    server.add_service(authenticated).serve_with_incoming(incoming).await.map_err(|e| listen_error(&e))
}
