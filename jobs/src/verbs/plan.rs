//! `stillhouse plan JOB.yaml`: what would run, without writing anything.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stillhouse_pipeline::error::PipelineError;
use stillhouse_pipeline::plan::Plan;
use stillhouse_pipeline::{job, plan};
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};

use crate::cli::Failure;
use crate::page::{Line, Page, Tone, View};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::table::Table;
use crate::units;
use crate::verbs::Threads;

const EXAMPLES: &str = "\
Examples:
  stillhouse plan job.yaml
  stillhouse plan job.yaml --json | jq .splits";

/// Show what a job would do: operators, splits, sizes; nothing is written
///
/// Makes all the checks of `run`: the job file, the input, the tokenizer, the teacher.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The job file (YAML or JSON)
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    /// Write the plan as JSON
    #[arg(long)]
    pub json: bool,
}

/// Plans it.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let watch = Watch::new(printer, if args.json { Mode::Quiet } else { Mode::Shown });
    let runtime = Threads::default().runtime()?;
    let _blocking_calls_wait_on = runtime.enter();
    let planned = job::prepare(&args.job, &watch).and_then(|p| Ok((plan::plan(&p, &watch)?, p.output_root())));
    watch.close();
    let (plan, output) = planned.map_err(|e: PipelineError| {
        let file = e.problems.is_some().then(|| args.job.display().to_string());
        Failure::Pipeline(e, file)
    })?;
    if args.json {
        printer.json(&plan)?;
    } else {
        printer.page(&render(&plan, &output, printer.view()))?;
    }
    Ok(())
}

/// Splits shown at either end of a long list.
const ENDS: usize = 4;

fn render(plan: &Plan, output: &Path, view: View) -> Page {
    let mut page = Page::new();
    page.line(Line::new().with(Tone::Strong, &plan.name).with(Tone::Dim, format!("  job {:.12}", plan.job_hash)));
    let mut facts = Table::new("ll");
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    let chain = ["read"].into_iter().chain(plan.operators.iter().map(String::as_str)).chain(["shard"]);
    fact("path", chain.collect::<Vec<_>>().join(" → "));
    fact("input", format!("{}, {} as stored", units::counted(plan.files as u64, "file"), units::bytes(plan.input_bytes)));
    fact("output", output.display().to_string());
    fact("splits", split_counts(&plan.splits));
    fact("estimate", estimate(plan));
    page.table(facts, view.width);
    if !plan.splits.is_empty() {
        page.blank();
        page.table(splits_table(&plan.splits), view.width);
    }
    page
}

fn split_counts(splits: &[SplitRecord]) -> String {
    if splits.is_empty() {
        return "known once input.sql has run".into();
    }
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for split in splits {
        *counts.entry(&split.dataset_split).or_default() += 1;
    }
    let each: Vec<String> = counts.iter().map(|(name, n)| format!("{name} {}", units::count(*n))).collect();
    format!("{} ({}); a split becomes one shard", units::count(splits.len() as u64), each.join(", "))
}

fn estimate(plan: &Plan) -> String {
    let per_token = format!("{:.1} bytes per token", plan.estimated_bytes_per_token);
    match (plan.estimated_tokens, plan.estimated_bytes) {
        (Some(tokens), Some(bytes)) => {
            format!("about {} tokens, {} ({per_token})", units::count(tokens), units::bytes(bytes))
        }
        _ => format!("{per_token}; the size of the text is not known before it is read"),
    }
}

fn splits_table(splits: &[SplitRecord]) -> Table {
    let mut table = Table::new("rlrl").header(&["split", "data set", "size", "input"]);
    let shown = |i: usize| splits.len() <= 2 * ENDS + 1 || i < ENDS || i >= splits.len() - ENDS;
    for (i, split) in splits.iter().enumerate() {
        if shown(i) {
            table.texts([
                split.split.0.to_string(),
                split.dataset_split.clone(),
                size(&split.pieces),
                input(&split.pieces),
            ]);
        } else if i == ENDS {
            let left_out = units::count((splits.len() - 2 * ENDS) as u64);
            table.texts(["…".into(), String::new(), String::new(), format!("{left_out} more")]);
        }
    }
    table
}

fn size(pieces: &[Piece]) -> String {
    let (mut bytes, mut rows) = (0, 0);
    for piece in pieces {
        match piece.range {
            Range::Bytes { start, end, .. } => bytes += end.saturating_sub(start),
            Range::Rows { start, end } => rows += end.saturating_sub(start),
        }
    }
    if rows > 0 { units::counted(rows, "row") } else { units::bytes(bytes) }
}

fn input(pieces: &[Piece]) -> String {
    let Some(first) = pieces.first() else { return String::new() };
    let (unit, start, end) = match first.range {
        Range::Bytes { start, end, .. } => ("bytes", start, end),
        Range::Rows { start, end } => ("rows", start, end),
    };
    let more = match pieces.len() {
        1 => String::new(),
        n => format!(" and {}", units::counted(n as u64 - 1, "more file")),
    };
    format!("{} {unit} {}–{}{more}", first.file, units::count(start), units::count(end))
}

#[cfg(test)]
mod tests {
    use stillhouse_schemas::ids::SplitId;

    use super::*;

    const VIEW: View = View { width: 90, colour: false };

    fn plan(splits: u32) -> Plan {
        let split = |n: u32| SplitRecord {
            split: SplitId(n),
            dataset_split: if n + 1 == splits { "validation" } else { "train" }.into(),
            pieces: vec![Piece {
                file: "corpus/prose\x1b[2J.jsonl".into(),
                range: Range::Bytes { start: u64::from(n) * 1_000_000, end: u64::from(n + 1) * 1_000_000, line: None },
            }],
        };
        Plan {
            name: "demo".into(),
            job_hash: "0123456789abcdef0123".into(),
            operators: ["clean", "tokenize", "pack", "extract"].map(String::from).to_vec(),
            files: 1,
            input_bytes: 12_345_678,
            splits: (0..splits).map(split).collect(),
            estimated_bytes_per_token: 9.14,
            estimated_tokens: Some(2_939_447),
            estimated_bytes: Some(26_866_545),
        }
    }

    #[test]
    fn a_long_plan_shows_both_ends() {
        insta::assert_snapshot!(render(&plan(42), Path::new("out/demo"), VIEW).render(false), @"");
    }

    #[test]
    fn a_query_has_no_splits_yet() {
        let plan = Plan { estimated_tokens: None, estimated_bytes: None, ..plan(0) };
        insta::assert_snapshot!(render(&plan, Path::new("out/demo"), VIEW).render(false), @"");
    }

    #[test]
    fn rows_of_several_files() {
        let piece = |file: &str| Piece { file: file.into(), range: Range::Rows { start: 0, end: 1000 } };
        let pieces = [piece("a.parquet"), piece("b.parquet")];
        assert_eq!((size(&pieces), input(&pieces)), ("2,000 rows".into(), "a.parquet rows 0–1,000 and 1 more file".into()));
    }
}
