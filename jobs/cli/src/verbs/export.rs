//! `stillhouse export DATASET PLACE`: copies a finished data set and checks every byte, or writes its log-probabilities
//! in another format.

mod format;

use std::num::NonZeroUsize;
use std::sync::Arc;

use serde::Serialize;
use serde_json::json;
use stillhouse_datasets::export::{Converted, Export, ExportOptions, FormatOptions, convert, export};
use stillhouse_pipeline::units;
use stillhouse_schemas::storage::Storage;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone, View};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::table::Table;
use crate::verbs::signals::until_signalled;
use crate::verbs::{StoreOptions, Threads};

const EXAMPLES: &str = "\
Examples:
  stillhouse export out/owt s3://shards/owt                    to a bucket; again: goes on where it stopped
  stillhouse export out/owt s3://shards/owt --dry-run          what would be copied
  stillhouse export s3://shards/owt /mnt/scratch/owt           to a disk
  stillhouse export s3://shards/owt gs://other/owt             from store to store, through this machine
  stillhouse export out/owt s3://shards/owt --endpoint http://127.0.0.1:9000
  stillhouse export out/owt kd/owt --format distillkit --dtype float16
  stillhouse export out/owt kd/owt --format megatron-kd --global-batch 256 --data-parallel 8 --blend data/owt_text_document

A file is copied unless the destination has it with the same size and sha256. `_SUCCESS` comes last.
Where source and destination are at different endpoints, --source-endpoint names the source's.

--format writes what the teacher said of token t + 1 at t, where these readers look for it; an ln p below -1000 becomes -1000 (p is 0).
Their formats have no place for the probability of the rest: they take 1 minus the sum. Megatron-LM's samples have the order of the rows.";

/// Copy a finished data set to a store or a disk, or write its log-probabilities for another reader; resumes, and checks the sha256 of every file
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder or URL of the data set
    source: String,
    /// Folder or URL of the copy
    destination: String,
    /// Files copied concurrently
    #[arg(long, value_name = "N", default_value = "2")]
    parallel: NonZeroUsize,
    /// Show what would be copied and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Size of the parts of an upload, in megabytes (10^6 bytes)
    #[arg(long, value_name = "MB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(5..=512))]
    part_megabytes: u32,
    /// Parts of one file that are sent concurrently
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    parts_at_once: u32,
    /// Endpoint of the source, if it differs from that of the destination
    #[arg(long, value_name = "URL")]
    source_endpoint: Option<String>,
    /// Region of the source, if it differs from that of the destination
    #[arg(long, value_name = "NAME")]
    source_region: Option<String>,
    #[command(flatten)]
    format: FormatOptions,
    #[command(flatten)]
    store: StoreOptions,
    /// Write one JSON event per line to stdout, and the list of files at the end
    #[arg(long)]
    pub json: bool,
    /// Show errors only
    #[arg(long, short, conflicts_with = "json")]
    quiet: bool,
}

const RESUME: &str = "interrupted; copied files stay: run the same command again to resume";

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let conversion = args.format.conversion().map_err(Failure::Usage)?;
    let runtime = Threads::default().runtime()?;
    let mode = match (args.json, args.quiet || args.dry_run) {
        (true, _) => Mode::Json,
        (_, true) => Mode::Quiet,
        _ => Mode::Shown,
    };
    let given = args.store.storage();
    let from = Storage {
        endpoint: args.source_endpoint.clone().or_else(|| given.endpoint.clone()),
        region: args.source_region.clone().or_else(|| given.region.clone()),
        ..given.clone()
    };
    let to = Storage { part_megabytes: Some(args.part_megabytes), parts_at_once: Some(args.parts_at_once), ..given };
    let source = args.store.output(&args.source, &from)?;
    let destination = args.store.output(&args.destination, &to)?;
    let options = ExportOptions { at_once: args.parallel.get(), dry_run: args.dry_run };
    let watch = Watch::new(printer, mode);
    let work = async {
        Ok(match conversion {
            None => Done::Copied(export(source, destination, options, &watch).await?),
            Some(conversion) => Done::Converted(convert(source, destination, conversion, options, &watch).await?),
        })
    };
    let result = runtime.block_on(until_signalled(printer, || RESUME.into(), work));
    watch.close();
    runtime.shutdown_background();
    let done = result?;
    if args.json {
        printer.json_line(&json!({"event": "exported", "export": done}))?;
    } else if !args.quiet {
        let page = match &done {
            Done::Copied(done) => render(done, printer.view()),
            Done::Converted(done) => format::render(done, printer.view()),
        };
        printer.page(&page)?;
    }
    Ok(())
}

#[derive(Serialize)]
#[serde(untagged)]
enum Done {
    Copied(Export),
    Converted(Converted),
}

fn render(done: &Export, view: View) -> Page {
    let mut page = Page::new();
    if done.dry_run {
        let mut table = Table::new("lrl").indent(0).header(&["file", "size", ""]);
        for file in &done.files {
            let what = if file.there { "is there" } else { "would be copied" };
            table.texts([file.name.clone(), units::bytes(file.bytes), what.to_owned()]);
        }
        page.table(table, view);
        page.blank();
    }
    let sum = |there: bool| done.files.iter().filter(move |f| f.there == there);
    let total = |there: bool| {
        let (files, bytes) = (sum(there).count() as u64, sum(there).map(|f| f.bytes).sum());
        format!("{}, {}", units::counted(files, "file"), units::bytes(bytes))
    };
    let copied: u64 = sum(false).map(|f| f.bytes).sum();
    let mut facts = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    fact(if done.dry_run { "to copy" } else { "copied" }, total(false));
    fact("there already", total(true));
    fact("data set", done.destination.clone());
    if !done.dry_run && copied > 0 {
        let rate = units::bytes((copied as f64 / done.seconds.max(1e-3)) as u64);
        fact("took", format!("{:.1} s, {rate}/s", done.seconds));
    }
    page.facts(facts);
    page
}
