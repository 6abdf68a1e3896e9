//! The batch-job service: a queue that survives crashes, workers, a REST API, a web page, Prometheus metrics.
//!
//! ```text
//!            ┌───────────── service process ──────────────┐
//!  HTTP ───► net ─► api ─► store (SQLite) ◄─ scheduler     │
//!  SSE  ◄────────── bus ◄────┘     ▲            │ slots    │
//!                                  └─ runner ◄──┴─► worker process ─► pipeline ─► data set
//!                                     (one per running job)   (confined by the kernel)
//! ```
//!
//! The service holds no data logic: a worker runs the same pipeline as `stillhouse run`, which resumes where an earlier
//! attempt stopped. So the service may die at any moment: its workers end with it, and its next start queues their jobs
//! again.
//!
//! Bounds: [`config::Limits`] bounds connections, streams, bodies, waiting jobs, and the log and events of a job. A
//! queue of 64 holds a worker's messages, which wait there while the disk is full. A slow watcher reads the events that
//! it missed from the store.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod api;
pub mod bounds;
pub mod client;
mod client_limits;
pub mod config;
mod dataset_query;
mod disk_space;
mod drain_body;
mod logs;
mod metrics;
pub mod model;
mod net;
mod outcome;
mod pending_cancels;
pub mod process;
mod proxies;
mod rates;
mod runner;
pub mod sandbox;
mod scheduler;
mod serve;
mod stop;
pub mod store;
mod worker;
pub mod worker_protocol;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::{Notify, watch};

pub use self::api::openapi::document as openapi;
use self::config::Config;
use self::logs::Logs;
use self::pending_cancels::PendingCancels;
use self::scheduler::Running;
pub use self::serve::serve;
use self::store::Store;

/// A running service.
pub struct Service {
    /// Its configuration.
    pub config: Config,
    /// The SQLite database with everything that survives a restart.
    pub store: Arc<Store>,
    /// The logs of jobs.
    pub logs: Logs,
    /// The running attempts.
    pub running: Running,
    /// Cancels that the store does not hold yet.
    pub pending_cancels: PendingCancels,
    /// Wakes the scheduler.
    pub wake: Notify,
    /// The executable that runs as a worker.
    pub program: PathBuf,
    /// Renders the Prometheus metrics; `None` in tests that record none.
    pub metrics: Option<PrometheusHandle>,
    /// True as soon as the service begins to stop.
    pub stopping: watch::Sender<bool>,
    _lock: File,
}

impl Service {
    /// Opens the data folder of a configuration. Makes no connections and starts nothing.
    ///
    /// # Errors
    /// When the folder cannot be created or used, or another server uses it.
    pub fn open(config: Config, metrics: Option<PrometheusHandle>) -> Result<Arc<Self>, String> {
        let lock = lock(&config.data)?;
        let shown = config.data.display();
        let store = Store::open(&config.data).map_err(|e| format!("{shown}: {e}"))?;
        let max_bytes = u64::from(config.limits.log_megabytes) * 1_000_000;
        let logs = Logs::new(&config.data, max_bytes).map_err(|e| format!("{shown}: {e}"))?;
        let program = std::env::current_exe().map_err(|e| format!("cannot find the path of this program: {e}"))?;
        Ok(Arc::new(Self {
            config,
            store,
            logs,
            running: Running::default(),
            pending_cancels: PendingCancels::default(),
            wake: Notify::new(),
            program,
            metrics,
            stopping: watch::channel(false).0,
            _lock: lock,
        }))
    }

    /// Removes the scratch folders of an earlier service's workers, which have ended or no longer write there.
    pub async fn clear_scratch(&self) {
        let scratch = self.config.data.join(SCRATCH);
        match tokio::fs::remove_dir_all(&scratch).await {
            Err(e) if e.kind() != io::ErrorKind::NotFound => tracing::warn!("cannot remove {}: {e}", scratch.display()),
            _ => {}
        }
    }

    /// The path of a worker's scratch folder.
    pub fn scratch(&self, name: &str) -> PathBuf {
        self.config.data.join(SCRATCH).join(name)
    }
}

const SCRATCH: &str = "scratch";

/// Creates the data folder if it does not exist, accessible to this user only.
///
/// # Errors
/// When it cannot be created.
#[expect(clippy::disallowed_methods, reason = "once, before the service answers anybody")]
pub fn make_data_folder(path: &Path) -> Result<(), String> {
    let io_error = |e: io::Error| format!("cannot create the data folder {}: {e}", path.display());
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(io_error)?;
    let permissions = fs::metadata(path).map_err(io_error)?.permissions();
    if permissions.mode() & 0o077 != 0 {
        fs::set_permissions(path, fs::Permissions::from_mode(0o700)).map_err(io_error)?;
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "once, before the service answers anybody")]
fn lock(data: &Path) -> Result<File, String> {
    make_data_folder(data)?;
    let path = data.join("lock");
    let io_error = |e: io::Error| format!("cannot lock {}: {e}", path.display());
    let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path).map_err(io_error)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(format!(
            "another server is using the data folder {}; stop that server, or choose another data folder",
            data.display()
        )),
        Err(fs::TryLockError::Error(e)) => Err(io_error(e)),
    }
}

/// Waits until the flag is true or its sender is dropped.
pub async fn wait_until_set(flag: &mut watch::Receiver<bool>) {
    let _ = flag.wait_for(|up| *up).await;
}
