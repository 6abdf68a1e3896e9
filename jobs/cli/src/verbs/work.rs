//! `stillhouse work`: the service's worker process. It reads its request from stdin; people do not run it.

use std::io::{BufRead, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::inspect::{InspectOptions, inspect};
use stillhouse_operators::registry::job_format;
use stillhouse_pipeline::error::PipelineError;
use stillhouse_pipeline::events::{Event, Observer};
use stillhouse_pipeline::finish;
use stillhouse_pipeline::output::{Found, Output};
use stillhouse_pipeline::run::{self, RunOptions, Stop};
use stillhouse_pipeline::storage::{Location, Storages};
use stillhouse_pipeline::{error::ErrorKind, job};
use stillhouse_schemas::problems::Problem;
use stillhouse_service::bounds;
use stillhouse_service::model::FieldProblem;
use stillhouse_service::sandbox::{Confined, Uses, confine};
use stillhouse_service::worker_protocol::{Message, STOPPED_EXIT_CODE, WorkerRequest, WorkerTask, with_default_engine};

use crate::address_space;
use crate::failure::Failure;
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::requests_runtime;

const EXAMPLES: &str = "\
Examples:
  stillhouse serve                         starts workers as it needs them";

/// Works for `stillhouse serve`
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, hide = true)]
pub struct Args {}

const MAX_REQUEST_BYTES: u64 = 64 << 20;

/// Time limit for a run to end after a request to stop. The service kills the process after `cancel_seconds`, if that
/// is less.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads the request and executes it.
pub fn call(_: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let system = |e: &dyn std::fmt::Display| Failure::System(format!("the worker cannot start: {e}"));
    let mut line = String::new();
    std::io::stdin().lock().take(MAX_REQUEST_BYTES).read_line(&mut line).map_err(|e| system(&e))?;
    let request: WorkerRequest = serde_json::from_str(&line).map_err(|e| system(&e))?;
    // if memory runs out, the kernel should kill this process, not the service
    if let Err(e) = std::fs::write("/proc/self/oom_score_adj", "900") {
        tracing::warn!("the worker is no likelier to be killed for want of memory than the service: {e}");
    }
    let cluster = request.work.uses_cluster(request.scheduler.as_deref());
    let uses = Uses { stores: request.work.uses_stores(), cluster };
    if confine(&request.access, &request.scratch, uses).map_err(|e| system(&e))? == Confined::Not
        && !request.allow_unconfined
    {
        let message = "this kernel cannot confine jobs to what they may touch (Landlock, Linux 5.13); \
            `allow_unconfined: true` in the service's configuration runs them all the same";
        return Err(Failure::System(message.into()));
    }
    if let Some(bytes) = request.memory_bytes {
        address_space::limit(bytes).map_err(|e| system(&e))?;
    }
    std::thread::Builder::new().name("leash".into()).spawn(exit_with_service).map_err(|e| system(&e))?;
    rayon::ThreadPoolBuilder::new().num_threads(request.threads).build_global().map_err(|e| system(&e))?;
    let runtime = requests_runtime(request.threads).map_err(|e| system(&e))?;
    let writer = Arc::new(MessageWriter { out: Mutex::new(std::io::stdout()), log: Watch::new(printer, Mode::Shown) });
    let observer = Arc::clone(&writer);
    let result = runtime.block_on(async move {
        let (stop, is_run) = (Stop::default(), matches!(request.work, WorkerTask::Run { .. }));
        let requests = stop.clone();
        let work = tokio::task::spawn_blocking(move || execute(request, &observer, &requests));
        tokio::pin!(work);
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())
            .map_err(|e| PipelineError::new(ErrorKind::Output, format!("no signals: {e}")))?;
        tokio::select! {
            done = &mut work => done.unwrap_or_else(|e| Err(PipelineError::new(ErrorKind::Output, format!("the work stopped: {e}")))),
            // committed splits stay; others were never visible
            _ = terminate.recv() => {
                if is_run {
                    // cancels the run's remote work and releases its output
                    stop.request();
                    let _ = tokio::time::timeout(STOP_TIMEOUT, work).await;
                }
                std::process::exit(STOPPED_EXIT_CODE)
            }
        }
    });
    writer.log.close();
    if let Err(error) = result {
        tracing::error!("{error}");
        let (kind, problems) = (error.kind.name().to_owned(), bounds::limit_problems(problems(&error)));
        let message = bounds::truncate_message(error.to_string());
        writer.send(&Message::Failed { kind, message, problems, retryable: error.retryable });
        return Err(Failure::Reported);
    }
    Ok(())
}

/// The problems of the job file, so that `submit` ends like `run`. If the error has none by field, makes one from its
/// message.
fn problems(error: &PipelineError) -> Vec<FieldProblem> {
    let found: Vec<FieldProblem> = error.problems.iter().flat_map(|p| &p.0).map(Into::into).collect();
    if !found.is_empty() || error.kind != ErrorKind::Usage {
        return found;
    }
    let text = error.to_string();
    let is_field =
        |name: &str| name.contains('.') && name.bytes().all(|b| b.is_ascii_lowercase() || b"._".contains(&b));
    let (field, message) = text.split_once(": ").filter(|(field, _)| is_field(field)).unwrap_or(("", &text));
    vec![FieldProblem::from(&Problem::missing(field, message))]
}

/// Exits when the service is gone, for whatever reason: the kernel then closes its end of the pipe.
fn exit_with_service() {
    let mut sink = [0; 64];
    loop {
        match std::io::stdin().lock().read(&mut sink) {
            Ok(0) | Err(_) => std::process::exit(STOPPED_EXIT_CODE),
            Ok(_) => {}
        }
    }
}

/// Writes messages for the service to stdout, and a log for people to stderr.
struct MessageWriter {
    out: Mutex<std::io::Stdout>,
    log: Watch,
}

impl MessageWriter {
    fn send(&self, message: &Message) {
        let Ok(mut line) = serde_json::to_vec(message) else { return };
        line.push(b'\n');
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if out.write_all(&line).and_then(|()| out.flush()).is_err() {
            // the service no longer reads
            std::process::exit(STOPPED_EXIT_CODE);
        }
    }
}

impl Observer for MessageWriter {
    fn event(&self, event: &Event) {
        #[cfg(debug_assertions)]
        if matches!(event, Event::JobFinished { .. }) {
            hold_for_test();
        }
        self.send(&Message::Event(event.clone()));
        self.log.event(event);
    }
}

/// For a test: waits right after a job's end, when `_SUCCESS` exists and the service has not been notified, so that the
/// test can stop the worker. Creates a file beside the one that the variable names, and continues when that one is gone.
#[cfg(debug_assertions)]
fn hold_for_test() {
    let Some(path) = std::env::var_os("STILLHOUSE_TEST_HOLD_FINISHED").map(std::path::PathBuf::from) else { return };
    let _ = std::fs::write(path.with_extension("reached"), "");
    while path.exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// Stores the latest event.
#[derive(Default)]
struct LatestEvent(Mutex<Option<Event>>);

impl Observer for LatestEvent {
    fn event(&self, event: &Event) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(event.clone());
    }
}

/// The event of the finished data set, if the job with this hash has finished.
async fn finished(output: &Output, job_hash: &str) -> Result<Option<Event>, PipelineError> {
    match output.inspect(job_hash).await {
        Ok(Found::Complete) => {}
        Ok(_) => return Ok(None),
        Err(e) if e.kind == ErrorKind::Usage => return Ok(None),
        Err(e) => return Err(e),
    }
    let last = LatestEvent::default();
    finish::report_finished(output, &finish::manifest_of(output).await?, 0.0, true, &last);
    Ok(last.0.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn execute(request: WorkerRequest, writer: &Arc<MessageWriter>, stop: &Stop) -> Result<(), PipelineError> {
    let runtime = tokio::runtime::Handle::current();
    let answer = match request.work {
        WorkerTask::Run { file, folder, overwrite, append } => {
            let parsed = with_default_engine(job_format().parse(&file), request.scheduler.as_deref());
            let prepared = job::prepare(parsed, &folder, &request.access, writer.as_ref())?;
            let observer: Arc<dyn Observer> = Arc::clone(writer) as _;
            let options = RunOptions { overwrite, append, ..RunOptions::default() };
            let ran = runtime.block_on(run::run_until(Arc::new(prepared), options, observer, stop));
            return ran.map(|_| ());
        }
        WorkerTask::Report { file, folder, job_hash, row } => {
            let output = output_of(&request.access, &file, &folder)?;
            let dataset = runtime.block_on(Dataset::open(output))?;
            if answer_if_other(&dataset, job_hash.as_deref(), writer) {
                return Ok(());
            }
            let options = InspectOptions { row: Some(row), ..InspectOptions::default() };
            as_printed(&runtime.block_on(inspect(&dataset, &options))?)
        }
        WorkerTask::Finished { file, folder, job_hash } => {
            let output = output_of(&request.access, &file, &folder)?;
            serde_json::to_value(runtime.block_on(finished(&output, &job_hash))?)
        }
        WorkerTask::Manifest { file, folder, job_hash } => {
            let output = output_of(&request.access, &file, &folder)?;
            let dataset = runtime.block_on(Dataset::open(output))?;
            if answer_if_other(&dataset, job_hash.as_deref(), writer) {
                return Ok(());
            }
            serde_json::to_value(dataset.manifest())
        }
    };
    let answer =
        answer.map_err(|e| PipelineError::new(ErrorKind::Output, format!("cannot be written as JSON: {e}")))?;
    writer.send(&Message::Answer(answer));
    Ok(())
}

/// Whether a data set belongs to another job than the requested one; if so, sends that as the answer. Later reads are
/// checked against the checksums of the same manifest.
fn answer_if_other(dataset: &Dataset, job_hash: Option<&str>, writer: &MessageWriter) -> bool {
    let there = &dataset.manifest().job_hash;
    // without a job hash nothing proves that the data set is the job's own (an earlier version stored none for a job
    // that found its data set finished)
    let is_other = job_hash != Some(there.as_str());
    if is_other {
        writer.send(&Message::OtherDataSet);
    }
    is_other
}

/// The JSON that `inspect --json` prints. `to_value` would widen an f32 and so give it more digits.
fn as_printed(value: &impl serde::Serialize) -> serde_json::Result<serde_json::Value> {
    serde_json::from_str(&serde_json::to_string(value)?)
}

/// The output of a job, without its other checks.
fn output_of(access: &stillhouse_pipeline::access::Access, file: &str, folder: &Path) -> Result<Output, PipelineError> {
    let spec = job_format().read(file)?;
    let refused: Vec<_> =
        access.problems(&spec, folder).into_iter().filter(|p| p.field.starts_with("output")).collect();
    stillhouse_schemas::problems::Problems(refused).into_result()?;
    let usage = |e: String| PipelineError::new(ErrorKind::Usage, e);
    let path = access.names().expand(&spec.output.path).map_err(usage)?;
    let named = Location::parse(folder, &path).map_err(usage)?;
    Output::at(&named, &spec.output_storage(), &Storages::new())
}
