//! `stillhouse plan JOB.yaml`: what would run, without writing anything.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use stillhouse_pipeline::access::Access;
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
    let planned = job::prepare(&args.job, &Access::everything(), &watch)
        .and_then(|p| Ok((plan::plan(&p, &watch)?, p.output()?.to_string())));
    watch.close();
    let (plan, output) = planned.map_err(|e| Failure::of_job(e, &args.job))?;
    if args.json {
        printer.json(&plan)?;
    } else {
        printer.page(&render(&plan, &output, printer.view()))?;
    }
    Ok(())
}

/// Splits shown at either end of a long list.
const ENDS: usize = 4;

fn render(plan: &Plan, output: &str, view: View) -> Page {
    let mut page = Page::new();
    page.line(Line::new().with(Tone::Strong, &plan.name).with(Tone::Dim, format!("  job {:.12}", plan.job_hash)));
    let mut facts = Table::new("ll");
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    let chain = ["read"].into_iter().chain(plan.operators.iter().map(String::as_str)).chain(["shard"]);
    fact("path", chain.collect::<Vec<_>>().join(" → "));
    fact(
        "input",
        format!("{}, {} as stored", units::counted(plan.files as u64, "file"), units::bytes(plan.input_bytes)),
    );
    fact("output", output.to_owned());
    fact("splits", split_counts(&plan.splits));
    fact("estimate", estimate(plan));
    page.facts(facts);
    if !plan.splits.is_empty() {
        page.blank();
        page.table(splits_table(&plan.splits), view);
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
    let mut table = Table::new("rlrll").header(&["split", "data set", "size", "range", "file"]);
    let shown = |i: usize| splits.len() <= 2 * ENDS + 1 || i < ENDS || i >= splits.len() - ENDS;
    for (i, split) in splits.iter().enumerate() {
        if shown(i) {
            let name = split.dataset_split.clone();
            let (range, file) = (range(&split.pieces), file(&split.pieces));
            table.texts([split.split.0.to_string(), name, taken(split), range, file]);
        } else if i == ENDS {
            let left_out = units::count((splits.len() - 2 * ENDS) as u64);
            table.texts(["…", &format!("{left_out} more")]);
        }
    }
    table
}

/// What a split takes: all of its pieces, or of a holdout by key a share of the documents there.
fn taken(split: &SplitRecord) -> String {
    let size = size(&split.pieces);
    match split.keys {
        Some(keys) => format!("{:.2} % of {size}", 100.0 * keys.share()),
        None => size,
    }
}

fn size(pieces: &[Piece]) -> String {
    let (mut bytes, mut rows) = (0, 0);
    for piece in pieces {
        match piece.range {
            Range::Bytes { start, end, .. } => bytes += end.saturating_sub(start),
            Range::Rows { start, end } => rows += end.saturating_sub(start),
        }
    }
    match rows {
        0 => units::bytes(bytes),
        rows => units::counted(rows, "row"),
    }
}

/// Where the first piece begins and ends in its file.
fn range(pieces: &[Piece]) -> String {
    let (unit, start, end) = match pieces.first().map(|p| p.range) {
        Some(Range::Bytes { start, end, .. }) => ("bytes", start, end),
        Some(Range::Rows { start, end }) => ("rows", start, end),
        None => return String::new(),
    };
    format!("{unit} {}–{}", units::count(start), units::count(end))
}

fn file(pieces: &[Piece]) -> String {
    match pieces {
        [] => String::new(),
        [one] => one.file.clone(),
        [first, rest @ ..] => {
            format!("{} and {} after it", first.file, units::count(rest.len() as u64))
        }
    }
}

#[cfg(test)]
mod tests {
    use stillhouse_schemas::ids::SplitId;

    use super::*;

    const VIEW: View = View { width: 90, terminal: true, colour: false };

    fn plan(splits: u32) -> Plan {
        let split = |n: u32| SplitRecord {
            split: SplitId(n),
            dataset_split: if n + 1 == splits { "validation" } else { "train" }.into(),
            pieces: vec![Piece {
                file: "corpus/prose\x1b[2J.jsonl".into(),
                range: Range::Bytes { start: u64::from(n) * 1_000_000, end: u64::from(n + 1) * 1_000_000, line: None },
            }],
            keys: None,
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
        insta::assert_snapshot!(render(&plan(42), "out/demo", VIEW).render(false), @r"
        demo  job 0123456789ab
          path      read → clean → tokenize → pack → extract → shard
          input     1 file, 12.3 MB as stored
          output    out/demo
          splits    42 (train 41, validation 1); a split becomes one shard
          estimate  about 2,939,447 tokens, 26.9 MB (9.1 bytes per token)

          split  data set      size  range                        file
              0  train       1.0 MB  bytes 0–1,000,000            corpus/prose\u{1b}[2J.jsonl
              1  train       1.0 MB  bytes 1,000,000–2,000,000    corpus/prose\u{1b}[2J.jsonl
              2  train       1.0 MB  bytes 2,000,000–3,000,000    corpus/prose\u{1b}[2J.jsonl
              3  train       1.0 MB  bytes 3,000,000–4,000,000    corpus/prose\u{1b}[2J.jsonl
              …  34 more
             38  train       1.0 MB  bytes 38,000,000–39,000,000  corpus/prose\u{1b}[2J.jsonl
             39  train       1.0 MB  bytes 39,000,000–40,000,000  corpus/prose\u{1b}[2J.jsonl
             40  train       1.0 MB  bytes 40,000,000–41,000,000  corpus/prose\u{1b}[2J.jsonl
             41  validation  1.0 MB  bytes 41,000,000–42,000,000  corpus/prose\u{1b}[2J.jsonl
        ");
    }

    #[test]
    fn a_query_has_no_splits_yet() {
        let plan = Plan { estimated_tokens: None, estimated_bytes: None, ..plan(0) };
        insta::assert_snapshot!(render(&plan, "out/demo", VIEW).render(false), @r"
        demo  job 0123456789ab
          path      read → clean → tokenize → pack → extract → shard
          input     1 file, 12.3 MB as stored
          output    out/demo
          splits    known once input.sql has run
          estimate  9.1 bytes per token; the size of the text is not known before it is read
        ");
    }

    #[test]
    fn rows_of_several_files() {
        let piece = |file: &str| Piece { file: file.into(), range: Range::Rows { start: 0, end: 1000 } };
        let pieces = [piece("a.parquet"), piece("b.parquet")];
        assert_eq!(
            [size(&pieces), range(&pieces), file(&pieces)],
            ["2,000 rows", "rows 0–1,000", "a.parquet and 1 after it"]
        );
    }
}
