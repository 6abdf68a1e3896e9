//! `stillhouse repair DATASET JOB.yaml`: makes what is missing or damaged in a data set again, to the same bytes.

use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_datasets::damage::Repaired;
use stillhouse_pipeline::events::Observer;
use stillhouse_pipeline::repair::repair_until;
use stillhouse_pipeline::run::Stop;
use stillhouse_pipeline::units;

use crate::failure::Failure;
use crate::job_file::JobFile;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::signals::until_stopped;
use crate::verbs::{StoreOptions, Threads};

const EXAMPLES: &str = "\
Examples:
  stillhouse verify out/demo                   says what is damaged
  stillhouse repair out/demo job.yaml          makes just that again
  stillhouse repair s3://shards/demo job.yaml  in a store, also where the job wrote somewhere else

Every shard is read and compared with its record. One that comes out with other bytes than it had is not published.";

/// Make missing or damaged shards of a data set again, with the same bytes
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder or URL of the data set
    dataset: String,
    /// The job file of the data set; - reads it from stdin
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    #[command(flatten)]
    store: StoreOptions,
    #[command(flatten)]
    threads: Threads,
    /// Write the result as JSON
    #[arg(long)]
    pub json: bool,
}

const RESUME: &str = "interrupted; repaired files stay: run the same command again to resume";

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let file = JobFile::read(&args.job, printer)?;
    let runtime = args.threads.runtime()?;
    let watch = Arc::new(Watch::new(printer, if args.json { Mode::Quiet } else { Mode::Shown }));
    let prepared = {
        let _blocking_calls_wait_on = runtime.enter();
        file.prepare(watch.as_ref())
    };
    let result = prepared.and_then(|prepared| {
        let storage = args.store.override_storage(&prepared.spec.output_storage());
        let output = args.store.output(&args.dataset, &storage)?;
        let output = output.for_shards_of(prepared.spec.output.shard_megabytes * 1e6);
        let observer: Arc<dyn Observer> = Arc::clone(&watch) as _;
        let stop = Stop::default();
        let work =
            async { repair_until(Arc::new(prepared), output, observer, &stop).await.map_err(|e| file.failure(e)) };
        runtime.block_on(until_stopped(printer, || RESUME.into(), &stop, work))
    });
    watch.close();
    runtime.shutdown_background();
    let repaired = result?;
    if args.json {
        printer.json(&repaired)?;
    } else {
        printer.page(&render(&repaired))?;
    }
    Ok(())
}

fn render(repaired: &Repaired) -> Page {
    let mut page = Page::new();
    for damage in &repaired.damages {
        page.line(Line::new().with(Tone::Strong, &damage.name).with(Tone::Plain, format!(": {}", damage.message)));
    }
    let (remade, rewritten) = (repaired.remade.len() as u64, repaired.rewritten.len() as u64);
    let checked = units::counted(repaired.checked, "shard");
    let words = match (remade, rewritten) {
        (0, 0) => format!("{checked} read: nothing is damaged"),
        _ => format!(
            "{checked} read: {} made again with the same bytes, {} written again",
            units::counted(remade, "shard"),
            units::counted(rewritten, "other file")
        ),
    };
    page.line(Line::new().with(Tone::Good, words));
    page
}
