//! The verbs, one file each: options, the call into the pipeline, and the output.

pub mod clean;
pub mod completions;
pub mod demo;
pub mod derive;
#[cfg(feature = "distributed")]
pub mod executor;
pub mod export;
pub mod init;
pub mod inspect;
pub mod jobs;
pub mod plan;
pub mod repair;
pub mod run;
#[cfg(feature = "distributed")]
pub mod scheduler;
pub mod schema;
pub mod score;
pub mod serve;
pub mod signals;
pub mod submit;
pub mod token;
pub mod verify;
pub mod work;

use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use stillhouse_pipeline::engine::pool::{FILE_THREADS, REQUEST_WORKERS};
use stillhouse_pipeline::error::{ErrorKind, PipelineError};
use stillhouse_pipeline::output::Output;
use stillhouse_pipeline::storage::{Location, Storages};
use stillhouse_schemas::storage::{Storage, endpoint_problem};
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::failure::Failure;
use crate::page::{Line, Page};
use crate::printer::Printer;
use crate::verbs::serve::LogFormat;

/// How much of the machine to use.
#[derive(Debug, Clone, Copy, Default, clap::Args)]
pub struct Threads {
    /// Threads for computation [default: one per processor]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
}

impl Threads {
    /// Sets the size of rayon's pool and returns the runtime for a job's requests. Splits run on threads of their own.
    pub fn requests_runtime(self) -> Result<Runtime, Failure> {
        let system = |e: &dyn std::fmt::Display| Failure::System(format!("cannot start threads: {e}"));
        if let Some(n) = self.threads {
            rayon::ThreadPoolBuilder::new().num_threads(n.get()).build_global().map_err(|e| system(&e))?;
        }
        requests_runtime(rayon::current_num_threads()).map_err(|e| system(&e))
    }

    /// Sets the size of rayon's pool (tokenizer, noise, teacher) and returns a runtime with as many worker threads.
    pub fn runtime(self) -> Result<Runtime, Failure> {
        let system = |e: &dyn std::fmt::Display| Failure::System(format!("cannot start threads: {e}"));
        let mut runtime = Builder::new_multi_thread();
        if let Some(n) = self.threads {
            rayon::ThreadPoolBuilder::new().num_threads(n.get()).build_global().map_err(|e| system(&e))?;
            runtime.worker_threads(n.get());
        }
        runtime.enable_all().build().map_err(|e| system(&e))
    }
}

/// A runtime for a job's requests, with `threads` worker threads up to a limit.
pub fn requests_runtime(threads: usize) -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .worker_threads(threads.clamp(1, REQUEST_WORKERS))
        .max_blocking_threads(FILE_THREADS)
        .enable_all()
        .build()
}

/// How a store is reached, where a data set is named by a URL.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Object stores (credentials come from the environment or the AWS profile files)")]
pub struct StoreOptions {
    /// URL of an S3-compatible service [default: AWS_ENDPOINT_URL, the profile, or Amazon]
    #[arg(long, value_name = "URL")]
    endpoint: Option<String>,
    /// Region of the bucket [default: AWS_REGION, the profile, or us-east-1]
    #[arg(long, value_name = "NAME")]
    region: Option<String>,
    /// Whether the bucket is in the path of requests, not in the host name [default: with an endpoint]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    path_style: Option<bool>,
    /// Send no credentials, for public buckets
    #[arg(long)]
    anonymous: bool,
}

impl StoreOptions {
    /// The options in the form of a job file's `storage` section.
    pub fn storage(&self) -> Storage {
        Storage {
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            path_style: self.path_style,
            anonymous: self.anonymous.then_some(true),
            ..Storage::default()
        }
    }

    /// The storage section of a job file, overridden by these options.
    pub fn override_storage(&self, storage: &Storage) -> Storage {
        let given = self.storage();
        Storage {
            endpoint: given.endpoint.or(storage.endpoint.clone()),
            region: given.region.or(storage.region.clone()),
            path_style: given.path_style.or(storage.path_style),
            anonymous: given.anonymous.or(storage.anonymous),
            ..storage.clone()
        }
    }

    /// The data set, or the place for one, that the user names. Sends no request.
    pub fn output(&self, named: &str, storage: &Storage) -> Result<Output, Failure> {
        let wrong = |e: String| PipelineError::new(ErrorKind::Usage, e);
        if let Some(problem) = storage.endpoint.as_deref().and_then(endpoint_problem) {
            return Err(wrong(format!("--endpoint: {problem}")).into());
        }
        let named = Location::parse(Path::new(""), named).map_err(|e| wrong(format!("the URL {e}")))?;
        Ok(Output::at(&named, storage, &Storages::new())?)
    }

    /// Like [`StoreOptions::output`], with only these options.
    pub fn open(&self, named: &str) -> Result<Output, Failure> {
        self.output(named, &self.storage())
    }
}

/// Writes log records to stderr, above the progress bars.
pub fn log_to(printer: &Arc<Printer>, format: LogFormat, level: &str) {
    let filter = EnvFilter::try_from_env("STILLHOUSE_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let writer = LogWriter(Arc::clone(printer));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(writer);
    // fails only if a subscriber is already set, which is fine
    let _ = match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Bare => lines.without_time().with_target(false).try_init(),
        LogFormat::Json => lines.json().flatten_event(true).with_current_span(true).with_span_list(false).try_init(),
    };
}

struct LogWriter(Arc<Printer>);

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = LogLine<'a>;

    fn make_writer(&'a self) -> Self::Writer {
        LogLine(&self.0)
    }
}

struct LogLine<'a>(&'a Printer);

impl io::Write for LogLine<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut page = Page::new();
        for text in String::from_utf8_lossy(bytes).lines() {
            page.line(Line::plain(text));
        }
        self.0.note(&page);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
