//! The messages between the service and a worker process.
//!
//! ```text
//!   service ──stdin──► one WorkerRequest; closes when the service dies ──► the worker ends at once
//!           ◄─stdout── one Message per line
//!           ◄─stderr── the job's log
//! ```
//!
//! A worker is a separate process. A fault in a job (a crash in a decoder, no memory, a teacher that hangs) affects
//! only that job. To stop a job is to stop its process, and the kernel confines what it may access.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use stillhouse_operators::registry::job_format;
use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::events::Event;
use stillhouse_pipeline::storage::StoreUrl;
use stillhouse_schemas::parse::Parsed;
use stillhouse_schemas::paths::alternatives;
use stillhouse_schemas::spec::EngineKind;

use super::model::FieldProblem;

/// Exit code of a worker that was asked to stop or whose service is gone.
pub const STOPPED_EXIT_CODE: i32 = 75;

/// What a worker has to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct WorkerRequest {
    /// The work.
    pub work: WorkerTask,
    /// What the worker may access.
    pub access: Access,
    /// The scheduler of the cluster that runs jobs without `engine.kind`.
    pub scheduler: Option<String>,
    /// A folder for temporary files.
    pub scratch: PathBuf,
    /// Threads to compute with.
    pub threads: usize,
    /// Whether to run even if the kernel cannot confine the worker.
    pub allow_unconfined: bool,
    /// Limit of the address space in bytes.
    pub memory_bytes: Option<u64>,
}

/// Kinds of work.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerTask {
    /// Runs a job.
    Run {
        /// The job file.
        file: String,
        /// Base folder of the job file's relative paths.
        folder: PathBuf,
        /// Whether the job may replace another job's data set.
        overwrite: bool,
        /// Whether to make splits only for new input files.
        append: bool,
    },
    /// Makes a report of a job's data set.
    Report {
        /// The job file: it names the output and the settings of its store.
        file: String,
        /// Base folder of the job file's relative paths.
        folder: PathBuf,
        /// The job's hash from its worker: the output may hold another job's data set by now.
        job_hash: Option<String>,
        /// The row to decode.
        row: u64,
    },
    /// Checks whether the data set is complete and belongs to this job. The answer is the final event of the job's
    /// worker, or null.
    Finished {
        /// The job file.
        file: String,
        /// Base folder of the job file's relative paths.
        folder: PathBuf,
        /// The job's hash from its worker.
        job_hash: String,
    },
    /// Reads the manifest of the data set of a job.
    Manifest {
        /// The job file.
        file: String,
        /// Base folder of the job file's relative paths.
        folder: PathBuf,
        /// The job's hash from its worker.
        job_hash: Option<String>,
    },
}

impl WorkerTask {
    /// Whether the work runs on a cluster and so needs the cluster's token.
    pub fn uses_cluster(&self, scheduler: Option<&str>) -> bool {
        let Self::Run { file, .. } = self else { return false };
        let sent = with_default_engine(job_format().parse(file), scheduler);
        sent.spec.is_some_and(|spec| spec.engine.kind == EngineKind::Ballista)
    }

    /// Whether the job names a store that is written to, and so needs the credentials of stores. Web servers need none, and
    /// the hub has a token of its own.
    pub fn uses_stores(&self) -> bool {
        let (Self::Run { file, .. }
        | Self::Report { file, .. }
        | Self::Finished { file, .. }
        | Self::Manifest { file, .. }) = self;
        let Ok(spec) = job_format().read(file) else { return false };
        let inputs = spec.input.all_paths().flat_map(|(_, path)| alternatives(path).unwrap_or_default());
        let mut places = inputs.chain([spec.output.path.clone()]);
        places.any(|place| matches!(StoreUrl::parse(&place), Some(Ok(url)) if !url.scheme.is_read_only()))
    }
}

/// Sets the engine to the service's cluster, if there is one and the job file has no `engine.kind`.
pub fn with_default_engine(mut parsed: Parsed, scheduler: Option<&str>) -> Parsed {
    let says = parsed.positions.contains("engine.kind");
    if let (Some(spec), Some(scheduler), false) = (&mut parsed.spec, scheduler, says) {
        (spec.engine.kind, spec.engine.scheduler) = (EngineKind::Ballista, Some(scheduler.to_owned()));
    }
    parsed
}

/// A message of a worker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// An event of the job.
    Event(Event),
    /// The answer to a report or manifest.
    Answer(Value),
    /// The output holds another job's data set by now.
    OtherDataSet,
    /// The work failed.
    Failed {
        /// The error kind's name in the pipeline.
        kind: String,
        /// The error message.
        message: String,
        /// Problems of the job file.
        problems: Vec<FieldProblem>,
        /// Whether another attempt can help.
        retryable: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_job_on_a_cluster_asks_one() {
        let asks = |engine: &str, scheduler: Option<&str>| {
            let file = format!(
                "version: 1\nname: x\ninput: {{format: text, paths: [a]}}\ntokenizer: {{path: t}}\npack: {{length: 8}}\noutput: {{path: o}}\n{engine}"
            );
            WorkerTask::Run { file, folder: "/".into(), overwrite: false, append: false }.uses_cluster(scheduler)
        };
        let named = "engine: {kind: ballista, scheduler: \"10.0.0.5:50050\"}";
        for (engine, here, there) in [
            ("", false, true),
            ("engine: {parallel_splits: 2}", false, true),
            ("engine: {kind: local}", false, false),
            (named, true, true),
        ] {
            assert_eq!((asks(engine, None), asks(engine, Some("127.0.0.1:50050"))), (here, there), "{engine}");
        }
    }
}
