//! `stillhouse derive DATASET JOB.yaml`: adds columns to a finished data set, without its text and teacher.

use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_datasets::dataset::Dataset;
use stillhouse_pipeline::derive::{Derivation, DeriveOptions, derive};
use stillhouse_pipeline::events::Observer;

use crate::failure::Failure;
use crate::job_file::JobFile;
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::signals::until_signalled;
use crate::verbs::{StoreOptions, Threads};

const EXAMPLES: &str = "\
Examples:
  stillhouse derive out/owt views.yaml             again: goes on where it stopped, mends what was damaged since
  stillhouse derive s3://shards/owt views.yaml     the data set is in a bucket; output.path may be another one

views.yaml says what is to be different; everything else stays as in the data set:
  version: 1
  name: owt-views
  subtokens: {length: 4}                         # these three take the place of what the data set has of them
  partitions: {views: 2, level: subtoken}
  orders: {kind: strided, streams: [1, 2, 4]}
  extract: {noise: {tolerance: 1e-2}}            # fewer corrections; only looser than it was
  output: {path: out/owt-views}";

/// Make new columns for a finished data set: sub-tokens, partitions, orders, noise at a looser tolerance
///
/// Rows and their sequence_ids stay, so the shards equal those of a run of the whole job. Needs neither the input nor the
/// teacher. The manifest of the result keeps both jobs.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder or URL of the data set
    dataset: String,
    /// The job file with the changes (YAML or JSON); - reads it from stdin
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    /// Replace the data set of another job, or of another version of this job, in the output folder
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    store: StoreOptions,
    #[command(flatten)]
    threads: Threads,
    /// Write one JSON event per line to stdout
    #[arg(long)]
    pub json: bool,
    /// Show errors only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

const RESUME: &str = "interrupted; finished shards stay: run the same command again to resume";

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let file = JobFile::read(&args.job, printer)?;
    let runtime = args.threads.requests_runtime()?;
    let mode = match (args.json, args.quiet) {
        (true, _) => Mode::Json,
        (_, true) => Mode::Quiet,
        _ => Mode::Shown,
    };
    let source = args.store.open(&args.dataset)?;
    let watch = Arc::new(Watch::new(printer, mode));
    let observer = Arc::clone(&watch) as Arc<dyn Observer>;
    let work = async {
        let dataset = Dataset::open(source).await?;
        let prepared = Derivation::prepare(dataset, &file.text, &file.folder).await.map_err(|e| file.failure(e))?;
        derive(prepared, DeriveOptions { overwrite: args.overwrite }, observer).await.map_err(|e| file.failure(e))
    };
    let result = runtime.block_on(until_signalled(printer, || RESUME.into(), work));
    watch.close();
    runtime.shutdown_background();
    result?;
    if mode == Mode::Shown
        && let Some(summary) = watch.summary()
    {
        printer.page(&summary)?;
    }
    Ok(())
}
