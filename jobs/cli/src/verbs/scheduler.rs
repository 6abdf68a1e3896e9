//! `stillhouse scheduler`: assigns the splits of jobs to executors.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_cluster::tls::Files;
use stillhouse_cluster::{scheduler, token::Token};

use crate::failure::Failure;
use crate::page::{Line, Page};
use crate::printer::Printer;
use crate::verbs::requests_runtime;
use crate::verbs::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  openssl rand -hex 32 > token; export STILLHOUSE_CLUSTER_TOKEN_FILE=$PWD/token
  stillhouse scheduler                     on this machine; then executors, then `run` with engine: {kind: ballista, …}
  stillhouse scheduler --listen 10.0.0.5:50050 --tls-certificate host.pem --tls-key host.key     others call https://host:50050
  stillhouse scheduler --listen 10.0.0.5:50050 --trusted-network";

/// Assign the splits of jobs to the executors of a cluster
///
/// Jobs with `engine: {kind: ballista, scheduler: \"host:port\"}` are submitted here by `stillhouse run`, and executors ask
/// for work. All of them share a token. The scheduler keeps its state in memory: after a restart of the scheduler, start the runs
/// again, and they resume.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Address and port to listen on
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:50050")]
    listen: SocketAddr,
    /// Use TLS with this certificate and the intermediate certificates in the same file (PEM); read once, at the start
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// The certificate's key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Listen without encryption on an address that other machines reach: only for a network without other users
    #[arg(long)]
    trusted_network: bool,
    /// Seconds after which an executor that sends no request counts as lost and others make its splits
    #[arg(long, value_name = "SECONDS", default_value_t = 20, value_parser = clap::value_parser!(u64).range(7..=86_400))]
    dead_after: u64,
    /// File with the cluster's token [default: STILLHOUSE_CLUSTER_TOKEN_FILE, or the token in STILLHOUSE_CLUSTER_TOKEN]
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// Worker threads for requests; the scheduler computes nothing.
const THREADS: usize = 4;

/// Runs the scheduler until it is stopped.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    stillhouse_cluster::log_bridge::install();
    let token = Token::load(args.token_file.as_deref())?;
    let runtime = requests_runtime(THREADS).map_err(|e| Failure::System(format!("cannot start threads: {e}")))?;
    let Args { listen, trusted_network, dead_after, .. } = *args;
    let tls = args.tls_certificate.clone().zip(args.tls_key.clone());
    let tls = tls.map(|(certificate, key)| Files { certificate, key });
    let scheme = if tls.is_some() { "https://" } else { "" };
    let options = scheduler::Options { listen, tls, trusted_network, executor_timeout_seconds: dead_after, token };
    let listening = |address: SocketAddr| {
        let mut page = Page::new();
        page.line(Line::plain(format!("the scheduler listens on {scheme}{address}")));
        printer.note(&page);
    };
    let ended = runtime.block_on(async {
        let mut signals = Signals::catch().map_err(|e| Failure::System(format!("no signals: {e}")))?;
        tokio::select! {
            ended = scheduler::serve(options, listening) => ended.map_err(Failure::from),
            _ = signals.received() => Ok(()),
        }
    });
    runtime.shutdown_background();
    ended
}
