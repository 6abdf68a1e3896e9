//! The interface through which other processes make the splits of a run.
//!
//! ```text
//!   run ── TaskSpec, PendingSplits ──► Driver ─► makes every split and commits it under the run's lock or lease
//!    ▲                                │
//!    └────────── DriverEvent ─────────┘
//! ```
//!
//! The run plans, locks the output and writes the manifest. The driver makes shards and commits them
//! ([`stillhouse_output::Ticket`]). A driver may therefore lose, repeat or delay work without harm: a split is done
//! once its record is in the output, and not before.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::{Output, Ticket, WorkerReport};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, TeacherArithmetic};
use stillhouse_schemas::spec::{Engine, EngineKind};

/// Everything another process needs to work for a run, for any split. That process builds the plan itself and compares
/// the job's hash with the ticket's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskSpec {
    /// The checked job, as JSON.
    pub spec: String,
    /// Directory against which relative paths of the job resolve.
    pub base: PathBuf,
    /// Identifies the run for which commits are made.
    pub ticket: Ticket,
    /// Arithmetic of the teacher, if the job has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherArithmetic>,
    /// Kind of device that the teacher runs on: `cpu` or `cuda`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// A split to make.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitTask {
    /// The split's number.
    pub split: SplitId,
    /// Its data set split.
    pub dataset_split: String,
    /// The record that the shard must reproduce, when it is made again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub was: Option<ShardRecord>,
}

/// The splits that a run still has to make.
pub struct PendingSplits {
    /// The splits in order, holdouts first.
    pub splits: Vec<SplitTask>,
    /// The output to which the shards are committed.
    pub output: Output,
    /// Set when no further split may begin.
    pub stop: Arc<AtomicBool>,
}

/// An event of the driver.
#[derive(Debug)]
pub enum DriverEvent {
    /// A split began.
    SplitStarted {
        /// The split's number.
        split: SplitId,
        /// Its data set split.
        dataset_split: String,
        /// Name of the executor, or `None` for this process.
        executor: Option<String>,
    },
    /// The latest report of every executor, by report name: its splits and counts.
    WorkerReports(BTreeMap<String, WorkerReport>),
    /// A shard is committed.
    Committed(Box<ShardRecord>),
    /// A warning for the user.
    Warning(String),
}

/// Receives the events; returns an error when the run must stop.
pub type EventSink<'a> = &'a (dyn Fn(DriverEvent) -> Result<()> + Send + Sync);

/// Makes the splits of a run in other processes.
pub trait Driver: Send + Sync {
    /// Makes every split. Returns when all are made or, after a failure, when no further one will begin.
    fn drive<'a>(
        &'a self,
        spec: &'a TaskSpec,
        work: &'a PendingSplits,
        emit: EventSink<'a>,
    ) -> BoxFuture<'a, Result<()>>;
}

/// Opens the driver of the cluster that a job names.
pub type DriverFactory = fn(&Engine) -> Result<Arc<dyn Driver>>;

static CLUSTER_DRIVER: OnceLock<DriverFactory> = OnceLock::new();

/// Registers the engine `ballista`. Only the first call has an effect.
pub fn register_cluster(factory: DriverFactory) {
    let _ = CLUSTER_DRIVER.set(factory);
}

/// Whether this program has the engine `ballista`.
pub fn has_cluster() -> bool {
    CLUSTER_DRIVER.get().is_some()
}

/// Returns why this program cannot run an engine, or `None`.
pub fn unavailable_reason(engine: &Engine) -> Option<&'static str> {
    let missing = engine.kind == EngineKind::Ballista && !has_cluster();
    missing.then_some(
        "this program has no cluster support; valid: local, or a program built with `cargo build -p stillhouse --features distributed`",
    )
}

/// Opens the driver of a job that runs in other processes, or returns `None` for the local engine.
///
/// # Errors
/// When this program lacks the engine, or the engine cannot be opened.
pub fn open_driver(engine: &Engine) -> Result<Option<Arc<dyn Driver>>> {
    match (engine.kind, CLUSTER_DRIVER.get()) {
        (EngineKind::Local, _) => Ok(None),
        (EngineKind::Ballista, Some(factory)) => factory(engine).map(Some),
        (EngineKind::Ballista, None) => {
            let message = format!("engine.kind: got ballista: {}", unavailable_reason(engine).unwrap_or_default());
            Err(PipelineError::new(ErrorKind::Usage, message))
        }
    }
}
