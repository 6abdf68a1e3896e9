//! The life of a service process: from its configuration to the signal that ends it.

use std::io;
use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::config::Config;
use crate::{Service, api, disk_space, metrics, net, process, scheduler};

/// Serves until SIGTERM or Ctrl-C, then returns running jobs to the queue. Calls `announce` with the final address in
/// `config.listen` once the service listens.
///
/// # Errors
/// A message: when it cannot listen, open its data folder, recover its queue, or receive signals.
pub async fn serve(mut config: Config, announce: impl FnOnce(&Config)) -> Result<(), String> {
    warn_of_few_open_files(&config);
    let metrics = metrics::install()?;
    let listener = TcpListener::bind(config.listen).await;
    let listener = listener.map_err(|e| format!("cannot listen on {}: {e}", config.listen))?;
    config.listen =
        listener.local_addr().map_err(|e| format!("cannot read the address that the server listens on: {e}"))?;
    let service = Service::open(config, Some(metrics))?;
    let leftovers = scheduler::recover(&service).await?;
    announce(&service.config);
    let router = api::router(Arc::clone(&service));
    let stopping = &service.stopping;
    let net = net::serve(listener, router, &service.config, stopping.subscribe());
    let jobs = scheduler::run(Arc::clone(&service), leftovers, stopping.subscribe());
    let signals = until_signalled(stopping.clone());
    let upkeep = tokio::spawn(metrics::run_upkeep(Arc::clone(&service)));
    let disk_space = tokio::spawn(disk_space::watch(Arc::clone(&service)));
    let (_, _, received) = tokio::join!(net, jobs, signals);
    upkeep.abort();
    disk_space.abort();
    received.map_err(|e| format!("cannot handle signals: {e}"))?;
    let store = Arc::clone(&service.store);
    match tokio::task::spawn_blocking(move || store.checkpoint()).await {
        Ok(Ok(())) => {}
        Ok(Err(e)) => tracing::warn!("cannot merge the database's write-ahead log into the database: {e}"),
        Err(e) => tracing::warn!("cannot merge the database's write-ahead log into the database: {e}"),
    }
    tracing::info!("stopped");
    Ok(())
}

/// Raises the limit of open files and warns if it stays too low. Each connection and followed log needs one file, and
/// each worker some.
fn warn_of_few_open_files(config: &Config) {
    let limits = &config.limits;
    let wanted = u64::from(limits.connections) + u64::from(limits.connections_kept) + u64::from(limits.watchers) + 256;
    match process::raise_open_file_limit() {
        Ok(files) if files < wanted => tracing::warn!(
            files,
            wanted,
            "the limit on open files (ulimit -n) is lower than limits.connections and limits.watchers may need"
        ),
        Ok(_) => {}
        Err(e) => tracing::warn!("cannot raise the limit on open files: {e}"),
    }
}

/// Waits for Ctrl-C or SIGTERM, then stops every part of the service.
async fn until_signalled(stopping: watch::Sender<bool>) -> io::Result<()> {
    let ended = match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = terminate.recv() => Ok(()),
                _ = tokio::signal::ctrl_c() => Ok(()),
            }
        }
        Err(e) => Err(e),
    };
    tracing::info!("stopping: running jobs go back into the queue");
    stopping.send_replace(true);
    ended
}
