//! `stillhouse run JOB.yaml`: runs a job on this machine with progress; resumes where an earlier run stopped.

use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_pipeline::events::Observer;
use stillhouse_pipeline::run;
use stillhouse_pipeline::run::{RunOptions, RunResult, Stop};

use crate::failure::Failure;
use crate::job_file::JobFile;
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::signals::until_stopped;
use crate::verbs::{Threads, plan};
use stillhouse_pipeline::units;

const EXAMPLES: &str = "\
Examples:
  stillhouse run job.yaml                  progress bars on a terminal, log lines otherwise
  stillhouse run job.yaml                  again: goes on where it stopped, and ends with the same bytes
  stillhouse run job.yaml --check          finished already: reads every byte before it says so
  stillhouse run job.yaml --append         its input has grown by files: makes the splits of these only
  stillhouse run job.yaml -v               and what each node of the plan did: rows, bytes, time
  stillhouse run job.yaml --overwrite      the folder holds another job's data set: replace it
  stillhouse run job.yaml --json | jq -c 'select(.event == \"split_committed\")'";

/// Run a job to its end; resumes an interrupted job
///
/// Progress goes to stderr, the summary to stdout. Committed shards stay: after an interruption, the same command
/// resumes, and the data set is the same as without the interruption.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The job file (YAML or JSON); - reads it from stdin
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    /// Replace the data set of another job, or of another version of this job, in the output folder
    #[arg(long)]
    overwrite: bool,
    /// For a finished data set whose input has new files: make splits only of the new files, and keep every shard
    #[arg(long, conflicts_with = "overwrite")]
    append: bool,
    /// For a finished data set: read every byte of it before reporting that it is complete
    #[arg(long)]
    check: bool,
    /// Make the splits on the cluster of this scheduler, as `engine: {kind: ballista, …}` in the job file does; https://HOST:PORT with TLS
    #[arg(long, value_name = "HOST:PORT")]
    scheduler: Option<String>,
    #[command(flatten)]
    threads: Threads,
    /// Write one JSON event per line to stdout
    #[arg(long)]
    pub json: bool,
    /// Show errors only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
    /// Show the physical plan with the metrics of its nodes at the end
    #[arg(long, short, conflicts_with_all = ["json", "quiet"])]
    verbose: bool,
}

impl Args {
    /// `stillhouse run JOB.yaml`.
    pub fn of(job: PathBuf) -> Self {
        Self {
            job,
            overwrite: false,
            append: false,
            check: false,
            scheduler: None,
            threads: Threads::default(),
            json: false,
            quiet: false,
            verbose: false,
        }
    }
}

async fn prepare_and_run(
    file: &Arc<JobFile>,
    options: RunOptions,
    watch: &Arc<Watch>,
    stop: &Stop,
) -> Result<RunResult, Failure> {
    let (job, observer) = (Arc::clone(file), Arc::clone(watch));
    let prepared = tokio::select! {
        prepared = tokio::task::spawn_blocking(move || job.prepare(observer.as_ref())) => prepared,
        () = stop.requested() => return Err(Failure::Reported),
    };
    let prepared = prepared.map_err(|e| Failure::System(format!("a worker stopped: {e}")))??;
    let observer = Arc::clone(watch) as Arc<dyn Observer>;
    run::run_until(Arc::new(prepared), options, observer, stop).await.map_err(|e| file.failure(e))
}

fn how_to_go_on(watch: &Watch) -> String {
    match watch.splits() {
        Some((done, all)) => format!(
            "interrupted; {} of {} are done and stay: run the same command again to resume",
            units::count(done),
            units::counted(all, "split")
        ),
        None => "interrupted before the work began; run the same command again".into(),
    }
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let file = JobFile::read(&args.job, printer)?.on_cluster(args.scheduler.as_deref());
    let runtime = args.threads.requests_runtime()?;
    let mode = match (args.json, args.quiet) {
        (true, _) => Mode::Json,
        (_, true) => Mode::Quiet,
        _ => Mode::Shown,
    };
    let watch = Arc::new(Watch::new(printer, mode));
    let file = Arc::new(file);
    let options = RunOptions { overwrite: args.overwrite, check: args.check, append: args.append };
    let stop = Stop::default();
    let work = prepare_and_run(&file, options, &watch, &stop);
    let result = runtime.block_on(until_stopped(printer, || how_to_go_on(&watch), &stop, work));
    watch.close();
    // after an interruption, do not wait for running computations: nothing of them is visible before its commit
    runtime.shutdown_background();
    let ran = result?;
    if mode == Mode::Shown
        && let Some(summary) = watch.summary()
    {
        printer.page(&summary)?;
    }
    if args.verbose
        && let Some(plan) = &ran.plan
    {
        printer.page(&plan::physical(plan, ran.is_remote))?;
    }
    Ok(())
}
