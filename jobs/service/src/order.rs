//! What the service tells a worker, and what a worker tells back.
//!
//! ```text
//!   service ──stdin──► one line: Order, then nothing; closed when the service dies ──► the worker ends at once
//!           ◄─stdout── one Message per line
//!           ◄─stderr── the job's log
//! ```
//!
//! A worker is a process of its own: what goes wrong in a job (a crash in a decoder, no memory, a teacher that hangs) is the
//! job's alone, a job is stopped by stopping its process, and what a job may touch is confined by the kernel.

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

/// What a worker exits with when it was told to stop, or its service is gone.
pub const STOPPED: i32 = 75;

/// What a worker is to do.
#[derive(Debug, Serialize, Deserialize)]
pub struct Order {
    /// The work.
    pub work: Work,
    /// What it may touch.
    pub access: Access,
    /// The scheduler of the cluster that jobs run on that do not say what kind of engine runs them.
    pub scheduler: Option<String>,
    /// A folder for what it needs while it works.
    pub scratch: PathBuf,
    /// Threads to compute with.
    pub threads: usize,
    /// Whether to work where the kernel cannot confine it.
    pub allow_unconfined: bool,
    /// Most bytes of address space.
    pub memory_bytes: Option<u64>,
}

/// Kinds of work.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Runs a job.
    Run {
        /// The job file.
        file: String,
        /// What its relative paths are relative to.
        folder: PathBuf,
        /// Whether it may replace another job's data set.
        overwrite: bool,
        /// Whether it makes splits of the files alone that the input has grown by.
        append: bool,
    },
    /// Looks at the data set of a job.
    Report {
        /// The job file: it says where, and how its store is reached.
        file: String,
        /// What its relative paths are relative to.
        folder: PathBuf,
        /// The job's hash, as its worker told it: another job may have its data set there by now.
        job_hash: Option<String>,
        /// The row to decode.
        row: u64,
    },
    /// Looks whether the data set is whole, and this job's: the answer is what the worker tells at its end, or null.
    Finished {
        /// As for a report.
        file: String,
        /// As for a report.
        folder: PathBuf,
        /// The job's hash, as its worker told it.
        job_hash: String,
    },
    /// Reads the manifest of the data set of a job.
    Manifest {
        /// As for a report.
        file: String,
        /// As for a report.
        folder: PathBuf,
        /// As for a report.
        job_hash: Option<String>,
    },
}

impl Work {
    /// Whether the work is done on a cluster, whose token it needs then.
    pub fn asks_a_cluster(&self, scheduler: Option<&str>) -> bool {
        let Self::Run { file, .. } = self else { return false };
        let sent = sent(job_format().parse(file), scheduler);
        sent.spec.is_some_and(|spec| spec.engine.kind == EngineKind::Ballista)
    }

    /// Whether the job names an object store, whose credentials it needs then.
    pub fn asks_stores(&self) -> bool {
        let (Self::Run { file, .. }
        | Self::Report { file, .. }
        | Self::Finished { file, .. }
        | Self::Manifest { file, .. }) = self;
        let Ok(spec) = job_format().read(file) else { return false };
        let inputs = spec.input.all_paths().flat_map(|(_, path)| alternatives(path).unwrap_or_default());
        let mut places = inputs.chain([spec.output.path.clone()]);
        places.any(|place| matches!(StoreUrl::parse(&place), Some(Ok(url)) if !url.scheme.is_web()))
    }
}

/// Sends a job to the service's cluster, if there is one and the job does not say what kind of engine runs it.
pub fn sent(mut parsed: Parsed, scheduler: Option<&str>) -> Parsed {
    let says = parsed.says("engine.kind");
    if let (Some(spec), Some(scheduler), false) = (&mut parsed.spec, scheduler, says) {
        (spec.engine.kind, spec.engine.scheduler) = (EngineKind::Ballista, Some(scheduler.to_owned()));
    }
    parsed
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// The job goes on.
    Event(Event),
    /// The answer to a report or manifest.
    Answer(Value),
    /// The data set that is asked about is another job's by now.
    OtherDataSet,
    /// The work failed.
    Failed {
        /// Kind of error, as the pipeline names it.
        kind: String,
        /// In words.
        message: String,
        /// What is wrong with the job file.
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
            Work::Run { file, folder: "/".into(), overwrite: false, append: false }.asks_a_cluster(scheduler)
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
