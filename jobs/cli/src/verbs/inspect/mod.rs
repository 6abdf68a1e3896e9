//! `stillhouse inspect DATASET`: shows what a data set contains, and one decoded row.

mod blueprints;
mod document;
mod dropped;
mod overview;
mod picture;
mod row;
#[cfg(test)]
mod tests;
mod values;

use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::inspect::{InspectOptions, Inspection, RowView, inspect};

use stillhouse_schemas::ids::DocumentId;

use crate::failure::Failure;
use crate::page::{Page, View};
use crate::printer::Printer;
use crate::verbs::{StoreOptions, Threads};

const EXAMPLES: &str = "\
Examples:
  stillhouse inspect out/demo                             totals, statistics, columns, the first row
  stillhouse inspect out/demo --row 17 --view 1           another row, the groups of its second view
  stillhouse inspect out/demo --position 3 40 --top 10    the noise blueprints of two tokens
  stillhouse inspect s3://shards/owt --column logprob     one column of a row in a store; nothing else is fetched
  stillhouse inspect out/web --dropped gopher_quality     documents that a rule of `filter` dropped
  stillhouse inspect out/web --document 3:17              the rows that hold record 17 of split 3
  stillhouse inspect out/demo --json | jq .row.tokens";

/// Show a data set: schema, statistics, one sequence decoded, its noise blueprint
///
/// A blueprint is the noise of one position as a student sees it: the top entries of softmax(ξ).
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder or URL of the data set (s3://…, gs://…, az://…)
    dataset: String,
    /// Row to decode, counted from 0 over all shards
    #[arg(long, value_name = "N", default_value_t = 0)]
    row: u64,
    /// View whose groups are shown, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    view: usize,
    /// Draw whose noise is shown, from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    draw: u32,
    /// Positions whose noise blueprint is shown [default: a few of interest]
    #[arg(long, value_name = "P", num_args = 1.., value_delimiter = ',')]
    position: Vec<usize>,
    /// Entries of each blueprint
    #[arg(long, value_name = "K", default_value_t = 5)]
    top: usize,
    /// Columns whose values of the row are shown, in place of everything else; only these columns are read
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',', conflicts_with_all = ["view", "draw", "position", "top"])]
    column: Vec<String>,
    /// Show samples of the documents that filters dropped, in place of everything else: for a reason, a rule, or all
    #[arg(long, value_name = "REASON", num_args = 0..=1, conflicts_with_all = ["row", "view", "draw", "position", "top", "column"])]
    dropped: Option<Option<String>>,
    /// Show a document and where its tokens lie, in place of everything else: SPLIT:RECORD, or a number of the column
    /// document_ids
    #[arg(long, value_name = "ID", value_parser = document::parse, conflicts_with_all = ["row", "view", "draw", "position", "top", "column", "dropped"])]
    document: Option<DocumentId>,
    /// With --document: the job file of the data set, to show the record of the input as well
    #[arg(long, value_name = "JOB.yaml", requires = "document")]
    job: Option<PathBuf>,
    #[command(flatten)]
    store: StoreOptions,
    /// Write everything as JSON
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// `stillhouse inspect DATASET --position P`.
    pub fn of_position(dataset: String, position: usize) -> Self {
        Self {
            dataset,
            row: 0,
            view: 0,
            draw: 0,
            position: vec![position],
            top: 5,
            column: Vec::new(),
            dropped: None,
            document: None,
            job: None,
            store: StoreOptions::default(),
            json: false,
        }
    }
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let options = InspectOptions {
        row: Some(args.row),
        view: args.view,
        draw: args.draw,
        positions: args.position.clone(),
        top: args.top,
        columns: args.column.clone(),
    };
    let output = args.store.open(&args.dataset)?;
    if let Some(reason) = &args.dropped {
        return dropped::call(output, reason.as_deref(), args.json, printer);
    }
    if let Some(id) = args.document {
        return document::call(output, id, args.job.as_deref(), args.json, printer);
    }
    let inspection = Threads::default().runtime()?.block_on(async {
        let dataset = Dataset::open(output).await?;
        inspect(&dataset, &options).await
    })?;
    if args.json {
        printer.json(&inspection)?;
    } else {
        printer.page(&render(&inspection, &options, printer.view()))?;
    }
    Ok(())
}

/// Renders one row with its blueprints.
pub fn render_row(row: &RowView, vocab_size: u64, view: View, page: &mut Page) {
    let InspectOptions { view: number, draw, .. } = InspectOptions::default();
    row::render(row, number, view, page);
    blueprints::render(&row.blueprints, draw, vocab_size, view, page);
}

fn render(inspection: &Inspection, options: &InspectOptions, view: View) -> Page {
    let mut page = Page::new();
    overview::render(inspection, view, &mut page);
    if let Some(row) = &inspection.row {
        row::render(row, options.view, view, &mut page);
        blueprints::render(&row.blueprints, options.draw, inspection.vocab_size, view, &mut page);
    }
    values::render(&inspection.values, view, &mut page);
    page
}
