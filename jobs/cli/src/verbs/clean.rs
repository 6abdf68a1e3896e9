//! `stillhouse clean PLACE`: removes what an interrupted run or export left behind.

use std::sync::Arc;

use stillhouse_datasets::clean::{Cleaned, clean};
use stillhouse_pipeline::units;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::verbs::{StoreOptions, Threads};

const EXAMPLES: &str = "\
Examples:
  stillhouse clean s3://shards/owt             abort uploads that nobody will end (they cost money unseen)
  stillhouse clean s3://shards/owt --dry-run   show them
  stillhouse clean out/owt                     the same on a disk: shards that were being written

Committed shards and what is needed to go on stay. A place where a run is at work is left alone.";

/// Remove unfinished uploads and staged files that an interrupted run or export left behind
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder or URL of a data set, finished or not
    place: String,
    /// Show what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    store: StoreOptions,
    /// Write the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let output = args.store.open(&args.place)?;
    let watch = Watch::new(printer, if args.json { Mode::Quiet } else { Mode::Shown });
    let cleaned = Threads::default().runtime()?.block_on(clean(output, args.dry_run, &watch));
    watch.close();
    let cleaned = cleaned?;
    if args.json {
        printer.json(&cleaned)?;
    } else {
        printer.page(&render(&cleaned, args.dry_run))?;
    }
    Ok(())
}

fn render(cleaned: &Cleaned, dry_run: bool) -> Page {
    let mut page = Page::new();
    let all =
        cleaned.uploads.iter().map(|name| ("upload of ", name)).chain(cleaned.files.iter().map(|name| ("", name)));
    for (what, name) in all {
        page.line(Line::new().with(Tone::Dim, what).with(Tone::Plain, name));
    }
    let (uploads, files) = (cleaned.uploads.len() as u64, cleaned.files.len() as u64);
    let verb = if dry_run { "would go" } else { "gone" };
    page.line(Line::plain(format!(
        "{}, {} {verb}",
        units::counted(uploads, "unfinished upload"),
        units::counted(files, "file")
    )));
    if !cleaned.lists_uploads {
        page.line(Line::plain("this store cannot list unfinished uploads; Azure drops them after a week"));
    }
    page
}
