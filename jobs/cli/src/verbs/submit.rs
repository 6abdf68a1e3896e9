//! `stillhouse submit JOB.yaml`: sends a job to a service and shows it as `run` would.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use stillhouse_pipeline::events::{Event, Observer, Progress, StageProgress};
use stillhouse_pipeline::storage::Backoff;
use stillhouse_schemas::problems::{Problem, Problems};

use crate::failure::Failure;
use crate::job_file::JobFile;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::signals::until_signalled;
use stillhouse_service::client::{ApiRequest, Client, ClientError, ServiceOptions, StreamItem};
use stillhouse_service::model::{EventType, EventView, FieldProblem, Job, JobId, JobState, ProgressView};

const EXAMPLES: &str = "\
Examples:
  stillhouse submit job.yaml                       watch it to its end; Ctrl-C leaves it running
  stillhouse submit job.yaml --detach              print its id; later: stillhouse jobs watch ID
  stillhouse submit job.yaml --priority 10 --max-attempts 5 --time-limit-hours 48
  stillhouse submit job.yaml --append              its input has grown by files: makes the splits of these only
  STILLHOUSE_URL=https://stillhouse.example.org STILLHOUSE_TOKEN=sh_… stillhouse submit job.yaml --folder /corpora/owt";

/// Send a job to a service and watch it
///
/// Progress, summary and exit code are those of `stillhouse run`. Relative paths in the job file are relative to its folder, which the
/// service must see under the same name (the same machine, a shared file system), or to --folder.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The job file (YAML or JSON); - reads it from stdin
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    /// Print the job's id and do not wait
    #[arg(long, short)]
    detach: bool,
    /// Folder on the service's machine to which relative paths are relative [default: the job file's folder; for - the current folder]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<String>,
    /// Jobs with a higher priority start first
    #[arg(long, value_name = "N", default_value_t = 0, allow_hyphen_values = true, value_parser = clap::value_parser!(i32).range(-100..=100))]
    priority: i32,
    /// Maximum number of failed attempts [default: the limit of the service]
    #[arg(long, value_name = "N")]
    max_attempts: Option<u32>,
    /// Maximum hours of one attempt [default: the limit of the service]
    #[arg(long, value_name = "HOURS")]
    time_limit_hours: Option<f64>,
    /// Maximum size of the shards, in gigabytes (10^9 bytes) [default: the limit of the service]
    #[arg(long, value_name = "GIGABYTES")]
    output_limit_gigabytes: Option<f64>,
    /// Replace the data set of another job at the output
    #[arg(long)]
    overwrite: bool,
    /// For a finished data set whose input has new files: make splits only of the new files, and keep every shard
    #[arg(long, conflicts_with = "overwrite")]
    append: bool,
    /// Name of this submission: submitting the same job with the same name again returns the same job
    #[arg(long, value_name = "TEXT")]
    idempotency_key: Option<String>,
    /// Write one JSON event per line to stdout; with --detach, the job
    #[arg(long)]
    pub json: bool,
    /// Show errors only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    #[command(flatten)]
    service: ServiceOptions,
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        match e {
            ClientError::Usage(message) => Self::Usage(message),
            ClientError::Refused(refusal) if !refusal.problems.is_empty() => {
                Self::Configuration("the job file".into(), problems(&refusal.problems))
            }
            ClientError::Refused(ref refusal) if matches!(refusal.status, 400 | 404 | 409 | 422) => {
                Self::Usage(e.to_string())
            }
            other => Self::System(other.to_string()),
        }
    }
}

fn problems(list: &[FieldProblem]) -> Problems {
    Problems(list.iter().map(Problem::from).collect())
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let client = args.service.client()?;
    let JobFile { name, text, json, folder: own, .. } = JobFile::read(&args.job, printer)?;
    let folder = match &args.folder {
        Some(folder) => folder.clone(),
        None => absolute(&own).map_err(|e| Failure::Usage(format!("the folder of {name}: {e}")))?,
    };
    let job = send(&client, args, text, json, folder).map_err(|e| match e {
        ClientError::Refused(refusal) if !refusal.problems.is_empty() => {
            Failure::JobFile(name, problems(&refusal.problems))
        }
        other => other.into(),
    })?;
    if args.detach {
        if args.json {
            printer.json(&job)?;
        } else {
            printer.text(&format!("{}\n", job.id))?;
        }
        return Ok(());
    }
    let mode = match (args.json, args.quiet) {
        (true, _) => Mode::Json,
        (_, true) => Mode::Quiet,
        _ => Mode::Shown,
    };
    watch(&client, &job.id, mode, printer)
}

fn absolute(folder: &Path) -> std::io::Result<String> {
    Ok(folder.canonicalize()?.to_string_lossy().into_owned())
}

/// Maximum number of times a submission without an answer is sent again. The idempotency key makes that safe.
const MAX_SENDS: u32 = 4;
const BACKOFF: Backoff = Backoff { first: Duration::from_millis(500), largest: Duration::from_secs(2) };

fn send(client: &Client, args: &Args, file: String, json: bool, folder: String) -> Result<Job, ClientError> {
    let key = match &args.idempotency_key {
        Some(key) => key.clone(),
        None => {
            let random = || JobId::new().map_err(|e| ClientError::Usage(format!("no random bytes: {e}")));
            format!("{}{}", random()?, random()?)
        }
    };
    let request = ApiRequest { body: Some(file), ..ApiRequest::new("POST", "/jobs") }
        .with("folder", Some(folder))
        .with("priority", Some(args.priority).filter(|p| *p != 0))
        .with("max_attempts", args.max_attempts)
        .with("time_limit_seconds", args.time_limit_hours.map(|h| (h * 3600.0).round().max(0.0) as u64))
        .with("output_limit_bytes", args.output_limit_gigabytes.map(|g| (g * 1e9).round().max(0.0) as u64))
        .with("overwrite", Some(true).filter(|_| args.overwrite))
        .with("append", Some(true).filter(|_| args.append))
        .header("content-type", if json { "application/json" } else { "application/yaml" })
        .header("idempotency-key", key);
    let mut sends = 1;
    loop {
        match client.json(&request) {
            Err(ClientError::Connection(_)) if sends < MAX_SENDS => {
                std::thread::sleep(BACKOFF.limit(sends));
                sends += 1;
            }
            other => return other,
        }
    }
}

const DETACHED: &str = "no longer watching; the job continues: `stillhouse jobs watch ID`, `stillhouse jobs cancel ID`";

/// Shows a job until it ends. If the job fails, this command fails.
pub fn watch(client: &Client, id: &JobId, mode: Mode, printer: &Arc<Printer>) -> Result<(), Failure> {
    let shown = Arc::new(Watch::new(printer, mode));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::System(format!("cannot start threads: {e}")))?;
    let follower = Follower {
        client: client.clone(),
        id: id.clone(),
        shown: Arc::clone(&shown),
        printer: Arc::clone(printer),
        mode,
    };
    let work = async {
        let job = tokio::task::spawn_blocking(move || follower.until_over()).await;
        job.unwrap_or_else(|e| Err(Failure::System(format!("a thread stopped: {e}"))))
    };
    let followed = runtime.block_on(until_signalled(printer, || DETACHED.into(), work));
    shown.close();
    runtime.shutdown_background();
    let job = followed?;
    match job.state {
        JobState::Succeeded => {
            if mode == Mode::Shown
                && let Some(summary) = shown.summary()
            {
                printer.page(&summary)?;
            }
            Ok(())
        }
        JobState::Cancelled => {
            Err(Failure::System(format!("job {id}: {}", job.reason.unwrap_or_else(|| "cancelled".into()))))
        }
        _ => Err(failure(&job)),
    }
}

/// The failure of a job. The exit code is 2 if its file is wrong.
pub fn failure(job: &Job) -> Failure {
    match &job.failure {
        Some(failure) if !failure.problems.is_empty() => {
            Failure::Configuration(format!("job {}", job.id), problems(&failure.problems))
        }
        Some(failure) => Failure::System(format!("job {}: {}", job.id, failure.message)),
        None => Failure::System(format!(
            "job {} {}: {}",
            job.id,
            job.state,
            job.reason.as_deref().unwrap_or("no reason is known")
        )),
    }
}

struct Follower {
    client: Client,
    id: JobId,
    shown: Arc<Watch>,
    printer: Arc<Printer>,
    mode: Mode,
}

impl Follower {
    fn until_over(self) -> Result<Job, Failure> {
        self.client.follow(&format!("/jobs/{}/events", self.id), true, |followed| {
            match followed {
                StreamItem::Open => {}
                StreamItem::Event(event) => self.show(event),
                StreamItem::Note(text) => self.note(text),
            }
            Ok::<_, Failure>(())
        })?;
        Ok(self.client.json(&ApiRequest::new("GET", format!("/jobs/{}", self.id)))?)
    }

    fn show(&self, event: &EventView) {
        if event.kind == EventType::State {
            let text = |key: &str| event.data.get(key).and_then(Value::as_str);
            let reason = text("reason").map_or(String::new(), |r| format!(": {r}"));
            match text("to").unwrap_or_default() {
                // later events report these states
                "running" | "succeeded" | "failed" | "cancelled" => {}
                "queued" if text("from").is_none() => self.note(&format!("job {} is queued", self.id)),
                state => self.note(&format!("job {} is {state}{reason}", self.id)),
            }
        }
        if let Some(event) = pipeline_event(event) {
            self.shown.event(&event);
        }
    }

    fn note(&self, text: &str) {
        if self.mode == Mode::Shown {
            let mut page = Page::new();
            page.line(Line::new().with(Tone::Dim, text));
            self.printer.note(&page);
        }
    }
}

/// Converts a service event to the event that `run` emits.
fn pipeline_event(event: &EventView) -> Option<Event> {
    let name = match event.kind {
        EventType::State => return None,
        EventType::Progress => return progress(&event.data).map(Event::Progress),
        EventType::Started => "job_started",
        EventType::Finished => "job_finished",
        other => other.name(),
    };
    let mut data = event.data.clone();
    data.as_object_mut()?.insert("event".into(), json!(name));
    serde_json::from_value(data).map_err(|e| tracing::debug!("an event of kind {name}: {e}")).ok()
}

fn progress(data: &Value) -> Option<Progress> {
    let view: ProgressView = serde_json::from_value(data.clone()).ok()?;
    let stage = |s: &stillhouse_service::model::StageView| StageProgress {
        name: s.name.clone(),
        rows: s.rows,
        busy_seconds: s.seconds,
        // the service does not store it
        awaited_seconds: 0.0,
    };
    Some(Progress {
        seconds: view.seconds,
        splits_done: view.splits_done,
        splits: view.splits,
        documents: view.documents,
        text_bytes: view.text_bytes,
        tokens: view.tokens,
        sequences: view.sequences,
        teacher_tokens: view.teacher_tokens,
        teacher_seconds: view.teacher_seconds,
        extract_seconds: view.extract_seconds,
        devices: view.devices,
        device_idle_seconds: view.device_idle_seconds,
        device_blocked_seconds: view.device_blocked_seconds,
        stages: view.stages.iter().map(stage).collect(),
        bytes: view.bytes,
        ..Progress::default()
    })
}
