//! How other processes make the splits of a run.
//!
//! ```text
//!   run ── TaskSpec, Work: splits, output ──► Driver ─► every split: made, committed under the run's own lock or lease
//!    ▲                                          │
//!    └───────── Step: begun, made, warning ─────┘
//! ```
//!
//! The run plans, holds the output, and writes the manifest; whoever drives makes shards and commits them ([`stillhouse_output::Ticket`]). So what
//! a driver loses, does twice or does late harms nothing: a split is done when its record is at the output, and not before.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use stillhouse_base::error::{ErrorKind, PipelineError, Result};
use stillhouse_output::{AtWork, Output, Ticket};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, TeacherArithmetic};
use stillhouse_schemas::spec::{Engine, EngineKind};

/// What another process has to know to work for a run, whatever the split. It makes the plan of it by itself, and finds out whether it is
/// the same: the ticket has the job's hash.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskSpec {
    /// The checked job, as JSON.
    pub spec: String,
    /// What its relative paths are relative to.
    pub base: PathBuf,
    /// For whom commits are made.
    pub ticket: Ticket,
    /// What the teacher computes in, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherArithmetic>,
    /// What it computes on: `cpu` or `cuda`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
}

/// A split that is to be made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitTask {
    /// Which.
    pub split: SplitId,
    /// Its data set split.
    pub dataset_split: String,
    /// What its shard must come out as, where it is made again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub was: Option<ShardRecord>,
}

/// The splits of a run that are to be made.
pub struct Work {
    /// The splits, in order: those of holdouts first.
    pub splits: Vec<SplitTask>,
    /// Where the shards go.
    pub output: Output,
    /// Set when nothing more is to begin.
    pub stop: Arc<AtomicBool>,
}

/// Something that happened.
#[derive(Debug)]
pub enum Step {
    /// Work on a split began.
    Begun {
        /// Which.
        split: SplitId,
        /// Its data set split.
        dataset_split: String,
        /// Who makes it, where that is not this process.
        executor: Option<String>,
    },
    /// What those who work for the run are at and have counted, all of them, by the names of their reports.
    AtWork(BTreeMap<String, AtWork>),
    /// A shard is committed.
    Made(Box<ShardRecord>),
    /// Something that its user should know of.
    Warning(String),
}

/// Takes what happens; an error where the run is to stop for it.
pub type EventSink<'a> = &'a (dyn Fn(Step) -> Result<()> + Send + Sync);

/// Makes the splits of a run in other processes.
pub trait Driver: Send + Sync {
    /// Makes every split. Back when all are made, or when none will be begun any more after a failure.
    fn drive<'a>(&'a self, spec: &'a TaskSpec, work: &'a Work, tell: EventSink<'a>) -> BoxFuture<'a, Result<()>>;
}

/// Opens the driver of a cluster that a job names.
pub type Connect = fn(&Engine) -> Result<Arc<dyn Driver>>;

static CLUSTER: OnceLock<Connect> = OnceLock::new();

/// Adds the engine `ballista` to this program; the first one stays.
pub fn add_cluster(connect: Connect) {
    let _ = CLUSTER.set(connect);
}

/// Whether this program has the engine `ballista`.
pub fn has_cluster() -> bool {
    CLUSTER.get().is_some()
}

/// What is wrong with an engine in this program.
pub fn missing(engine: &Engine) -> Option<&'static str> {
    let missing = engine.kind == EngineKind::Ballista && !has_cluster();
    missing.then_some(
        "this program was built without it; valid: local, or a program built with `cargo build -p stillhouse --features distributed`",
    )
}

/// The driver of a job that is not made in this process.
///
/// # Errors
/// When this program has no such engine, or the engine cannot be opened.
pub fn remote(engine: &Engine) -> Result<Option<Arc<dyn Driver>>> {
    match (engine.kind, CLUSTER.get()) {
        (EngineKind::Local, _) => Ok(None),
        (EngineKind::Ballista, Some(connect)) => connect(engine).map(Some),
        (EngineKind::Ballista, None) => {
            let message = format!("engine.kind: got ballista: {}", missing(engine).unwrap_or_default());
            Err(PipelineError::new(ErrorKind::Usage, message))
        }
    }
}
