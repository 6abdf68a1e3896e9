//! `stillhouse run JOB.yaml`: runs a job here, with progress; goes on where an earlier run stopped.

use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_pipeline::access::Access;
use stillhouse_pipeline::events::Observer;
use stillhouse_pipeline::run::RunOptions;
use stillhouse_pipeline::{job, run};

use crate::cli::Failure;
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::Threads;

const EXAMPLES: &str = "\
Examples:
  stillhouse run job.yaml                  progress bars on a terminal, log lines otherwise
  stillhouse run job.yaml                  again: goes on where it stopped, and ends with the same bytes
  stillhouse run job.yaml --check          finished already: reads every byte before it says so
  stillhouse run job.yaml --overwrite      the folder holds another job's data set: replace it
  stillhouse run job.yaml --json | jq -c 'select(.event == \"split_committed\")'";

/// Run a job to its end; an interrupted one goes on by itself
///
/// Bars or log lines go to stderr, the summary to stdout. Every shard that is committed stays: after an
/// interruption the same command goes on, and the data set comes out the same.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The job file (YAML or JSON)
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    /// Replace the data set of another job, or of another version of this job, in the output folder
    #[arg(long)]
    overwrite: bool,
    /// Where the data set is finished already: read every byte of it before it is called complete
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    threads: Threads,
    /// Write one JSON event per line to stdout
    #[arg(long)]
    pub json: bool,
    /// Show errors only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

const RESUME: &str = "interrupted; what is committed stays: run the same command again to go on";

/// Runs it.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let runtime = args.threads.runtime()?;
    let mode = match (args.json, args.quiet) {
        (true, _) => Mode::Json,
        (_, true) => Mode::Quiet,
        _ => Mode::Shown,
    };
    let watch = Arc::new(Watch::new(printer, mode));
    let about = |e| Failure::of_job(e, &args.job);
    let prepared = {
        let _blocking_calls_wait_on = runtime.enter();
        job::prepare(&args.job, &Access::everything(), watch.as_ref())
    };
    let result = prepared.map_err(about).and_then(|prepared| {
        let observer: Arc<dyn Observer> = Arc::clone(&watch) as _;
        let options = RunOptions { overwrite: args.overwrite, check: args.check };
        runtime.block_on(async {
            tokio::select! {
                biased;
                result = run::run(Arc::new(prepared), options, observer) => result.map_err(about),
                _ = tokio::signal::ctrl_c() => Err(Failure::Interrupted(RESUME)),
                () = printer.closed() => Err(Failure::Told),
            }
        })
    });
    watch.close();
    // What still computes after an interruption is not waited for: nothing of it is visible until committed.
    runtime.shutdown_background();
    result?;
    if mode == Mode::Shown
        && let Some(summary) = watch.summary()
    {
        printer.page(&summary)?;
    }
    Ok(())
}
