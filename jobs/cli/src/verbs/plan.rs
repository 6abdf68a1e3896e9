//! `stillhouse plan JOB.yaml`: shows what a run would do and its first documents, without writing anything.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;

use serde::Serialize;
use stillhouse_pipeline::events::Observer;
use stillhouse_pipeline::job::Prepared;
use stillhouse_pipeline::measure::{self, Measured, SampleMeasurements};
use stillhouse_pipeline::plan_report::{IdleSteps, OutputState, OutputStatus, Plan, ScheduleOutlook, Slots};
use stillhouse_pipeline::sample::{MixedTable, Sample};
use stillhouse_pipeline::{append, plan, plan_report, run, sample};
use stillhouse_schemas::manifest::{Piece, Range, SplitRecord};

use crate::failure::Failure;
use crate::job_file::JobFile;
use crate::page::{Line, Page, Tone, View};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::table::Table;
use crate::verbs::{Threads, inspect};
use stillhouse_pipeline::units;

const EXAMPLES: &str = "\
Examples:
  stillhouse plan job.yaml
  stillhouse plan job.yaml --sample 3       prepares three documents in memory, teacher and all, and shows the rows, size and time
  stillhouse plan job.yaml --analyze        prepares the first split, throws it away, and shows what each node of the plan did
  stillhouse plan job.yaml --json | jq .splits";

/// Show what a job would do: operators, splits, sizes; writes nothing
///
/// Runs all checks of `run`: the job file, one record of every file of the input (of at most 10,000 files; of 32 in
/// stores), the tokenizer, the teacher, and whether the output is writable and belongs to this job.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The job file (YAML or JSON); - reads it from stdin
    #[arg(value_name = "JOB.yaml")]
    job: PathBuf,
    /// Prepare the first N documents in memory and show their rows with noise, as the job will store them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100_000))]
    sample: Option<u64>,
    /// With --sample: price of this machine, for an estimate of the job's cost
    #[arg(long, value_name = "DOLLARS", requires = "sample", value_parser = parse_price)]
    dollars_per_hour: Option<f64>,
    /// Prepare the first split into a temporary folder, with the teacher, and show the physical plan with the metrics of its nodes
    #[arg(long)]
    analyze: bool,
    /// Plan a run with --overwrite: the output may hold another job's data set
    #[arg(long)]
    overwrite: bool,
    /// Plan a run with --append: the splits of files that are new since the data set was finished, after the existing splits
    #[arg(long, conflicts_with_all = ["overwrite", "analyze"])]
    append: bool,
    #[command(flatten)]
    threads: Threads,
    /// Write the plan as JSON
    #[arg(long)]
    pub json: bool,
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let file = JobFile::read(&args.job, printer)?;
    let watch = Arc::new(Watch::new(printer, if args.json { Mode::Quiet } else { Mode::Shown }));
    let runtime = args.threads.runtime()?;
    let _blocking_calls_wait_on = runtime.enter();
    let made = |prepared: Prepared| {
        // the process exits after this: skip freeing the memory of up to hundreds of thousands of files
        let prepared = ManuallyDrop::new(Arc::new(prepared));
        let hash = append::hash_at_output_blocking(&prepared, plan::job_hash(&prepared, watch.as_ref())?)?;
        let hash = ManuallyDrop::new(hash);
        let plan = match args.append {
            true => plan_report::plan_appended(&prepared, &hash, watch.as_ref())?,
            false => plan_report::plan(&prepared, &hash, args.overwrite, watch.as_ref())?,
        };
        let tokens = measure::tokens(&prepared, &hash, &plan.splits, watch.as_ref())?;
        let plan = plan.with_measured_tokens(tokens);
        let observer = Arc::clone(&watch) as Arc<dyn Observer>;
        let sample = |n| sample::sample(Arc::clone(&prepared), &hash, n, Arc::clone(&observer));
        let sample = args.sample.map(|n| runtime.block_on(sample(n))).transpose()?;
        let plan = match sample.as_ref().and_then(Sample::mixed_tokens) {
            Some(tokens) => plan.with_measured_tokens(Some(Measured::exact(tokens as f64))),
            None => plan,
        };
        let analyzed = match args.analyze {
            true => runtime.block_on(run::analyze(Arc::clone(&prepared), observer))?.plan,
            false => None,
        };
        Ok(Planned { plan, sample, analyzed })
    };
    let planned = file.prepare(watch.as_ref()).and_then(|prepared| made(prepared).map_err(|e| file.failure(e)));
    watch.close();
    let planned = ManuallyDrop::new(planned?);
    if args.json {
        printer.json(&*planned)?;
    } else {
        let measured = planned.sample.as_ref().and_then(|sample| sample.measured.as_ref());
        let mut page = render(&planned.plan, measured.is_some(), printer.view());
        if let Some(measured) = measured {
            render_measurements(measured, planned.plan.measured_tokens, args.dollars_per_hour, &mut page);
        }
        physical_plan(planned.analyzed.as_deref().unwrap_or(&planned.plan.physical_plan), &mut page);
        if let Some(sample) = &planned.sample {
            render_sample(sample, printer.view(), &mut page);
        }
        printer.page(&page)?;
    }
    Ok(())
}

#[derive(Debug, Serialize)]
struct Planned {
    #[serde(flatten)]
    plan: Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<Sample>,
    /// Physical plan of the first split, with the metrics of its nodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    analyzed: Option<String>,
}

fn physical_plan(plan: &str, page: &mut Page) {
    page.heading("Plan");
    for line in plan.lines() {
        page.line(Line::plain(format!("  {line}")));
    }
}

/// A page with a physical plan. A plan that executors ran has no metrics, and the page says so.
pub fn physical(plan: &str, is_remote: bool) -> Page {
    let mut page = Page::new();
    physical_plan(plan, &mut page);
    if is_remote {
        page.line(Line::plain("  ").with(Tone::Dim, EXECUTORS_RAN_IT));
    }
    page
}

const EXECUTORS_RAN_IT: &str = "Executors have run it: no metrics of its nodes are here; the last `progress` of `run --json` has the rows and the time of each stage.";

/// Number of a sample's rows to show; `--json` has all.
const SHOWN_ROWS: usize = 4;

fn render_sample(sample: &Sample, view: View, page: &mut Page) {
    let rows = sample.rows.len() as u64;
    let (begin, first) = (if rows == 1 { "begins" } else { "begin" }, units::counted(sample.documents, "document"));
    let mut said = format!("{} that {begin} in the first {first}", units::counted(rows, "sequence"));
    if sample.cut {
        said += ", which have more of them";
    }
    for (reason, n) in &sample.skipped {
        said += &format!(", {} skipped ({reason})", units::counted(*n, "record"));
    }
    for (reason, n) in &sample.dropped {
        said += &format!(", {} dropped ({reason})", units::counted(*n, "document"));
    }
    if !sample.mixture.is_empty() {
        page.heading("Mixture");
        page.facts(mixture(&sample.mixture));
    }
    page.heading("Sample");
    page.line(Line::plain("  ").with(Tone::Dim, said));
    for row in sample.rows.iter().take(SHOWN_ROWS) {
        inspect::render_row(row, sample.vocab_size, view, page);
    }
    if let Some(more) = sample.rows.len().checked_sub(SHOWN_ROWS).filter(|n| *n > 0) {
        page.blank();
        let more = format!("  … {} more; --json has them all", units::counted(more as u64, "sequence"));
        page.line(Line::new().with(Tone::Dim, more));
    }
}

/// What a mixture has of each table.
fn mixture(tables: &[MixedTable]) -> Table {
    let all: u64 = tables.iter().map(|table| table.mixed_tokens).sum();
    let mut facts = Table::new("ll");
    for table in tables {
        let share = units::share(table.mixed_tokens as f64 / all.max(1) as f64);
        let (tokens, has) = (units::counted(table.mixed_tokens, "token"), units::counted(table.tokens, "token"));
        let documents = units::counted(table.documents, "document");
        let value = format!("{share}, {tokens}: {:.2} epochs of {has} in {documents}", table.epochs);
        facts.row([Line::new().with(Tone::Dim, &table.name), Line::plain(value)]);
    }
    facts
}

fn parse_price(text: &str) -> Result<f64, String> {
    let price = text.parse::<f64>().ok().filter(|price| price.is_finite() && *price >= 0.0);
    price.ok_or_else(|| "valid: dollars, such as 2.5".into())
}

/// Shows what the sample says of the whole job: its size, its time, its cost.
fn render_measurements(
    sample: &SampleMeasurements,
    tokens: Option<Measured>,
    dollars_per_hour: Option<f64>,
    page: &mut Page,
) {
    page.heading("Measured");
    let mut facts = Table::new("ll");
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    let decimal = |value: f64| format!("{value:.1}");
    let count = |value: f64| units::count(value as u64);
    fact(
        "bytes per token",
        format!("{}, of {} tokens", interval(sample.bytes_per_token, decimal), units::count(sample.tokens)),
    );
    // splits without a teacher run side by side, so the speed of one says little
    let speed = sample.tokens_per_second.filter(|_| sample.devices > 0);
    if let Some(speed) = speed {
        let on = if sample.devices > 1 { " on each device" } else { "" };
        let of = if speed.low == speed.high { ", of one batch" } else { "" };
        fact("speed", format!("{} tokens per second{on}, with the teacher{of}", interval(speed, count)));
    }
    if let Some(tokens) = tokens {
        let bytes = tokens.times(sample.bytes_per_token);
        fact(
            "data set",
            format!("{} tokens, {}", interval(tokens, count), interval(bytes, |n| units::bytes(n as u64))),
        );
        if let Some(speed) = speed {
            let seconds = tokens.over(speed).scaled(1.0 / sample.devices as f64);
            fact("time", interval(seconds, units::clock));
            if let Some(price) = dollars_per_hour {
                let dollars = seconds.scaled(price / 3600.0);
                fact("cost", format!("{} dollars", interval(dollars, |n| format!("{n:.2}"))));
            }
        }
    }
    page.facts(facts);
    let basis = "of the first documents, and the first megabyte of a few splits; in parentheses, 95 % intervals if the rest is like them";
    page.line(Line::plain("  ").with(Tone::Dim, basis));
    if sample.bytes_per_token.relative_error() > WIDE {
        page.line(Line::plain("  ").with(Tone::Dim, "a larger --sample gives narrower intervals"));
    }
}

/// Relative error of an estimate above which `plan` advises a larger sample.
const WIDE: f64 = 0.1;

/// A value with its range, if it has one.
fn interval(of: Measured, shown: impl Fn(f64) -> String) -> String {
    let (value, low, high) = (shown(of.value), shown(of.low), shown(of.high));
    if low == high { value } else { format!("{value} ({low} to {high})") }
}

/// Number of splits to show at each end of a long list.
const SHOWN_AT_EACH_END: usize = 4;

fn render(plan: &Plan, is_measured: bool, view: View) -> Page {
    let mut page = Page::new();
    page.line(Line::new().with(Tone::Strong, &plan.name).with(Tone::Dim, format!("  job {:.12}", plan.job_hash)));
    let mut facts = Table::new("ll");
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    let chain = ["read"].into_iter().chain(plan.operators.iter().map(String::as_str)).chain(["shard"]);
    fact("path", chain.collect::<Vec<_>>().join(" → "));
    let input = match plan.files {
        0 => "no files".into(),
        files => format!("{}, {} as stored", units::counted(files as u64, "file"), units::bytes(plan.input_bytes)),
    };
    fact("input", input);
    for (n, table) in plan.mixture.iter().enumerate() {
        let files = units::counted(table.files as u64, "file");
        let of = format!("{}: {}, {files}, {}", table.name, table.amount, units::bytes(table.bytes));
        fact(if n == 0 { "mixture" } else { "" }, of);
    }
    fact("tokenizer", plan.tokenizer.clone());
    fact("output", output_status(&plan.output, plan.splits.len()));
    for (name, value) in &plan.environment {
        let name = if name == "~" { name.clone() } else { format!("${{{name}}}") };
        fact(&name, value.clone());
    }
    fact("splits", split_counts(&plan.splits));
    if !is_measured {
        fact("estimate", estimate(plan));
    }
    if let Some(schedule) = &plan.schedule {
        fact("schedule", outlook(schedule));
    }
    if !plan.idle_steps.is_empty() {
        fact("idle steps", idle_steps(&plan.idle_steps));
    }
    if let Some(Slots { slots, bytes }) = plan.slots {
        let texts = units::counted(u64::from(slots), "text");
        fact("the teacher writes", format!("{texts} at once, {} of keys and values", units::bytes(bytes)));
    }
    page.facts(facts);
    if !plan.splits.is_empty() {
        page.blank();
        page.table(splits_table(&plan.splits), view);
    }
    page
}

/// Describes how a schedule shuffles tokens over the data set.
fn outlook(schedule: &ScheduleOutlook) -> String {
    let ScheduleOutlook { sequences, first_rho, last_rho, warning } = schedule;
    let said = format!("ρ {first_rho} to {last_rho} over about {} sequences of train", units::count(*sequences));
    said + &warning.as_ref().map(|warning| format!("; warning: {warning}")).unwrap_or_default()
}

/// Lists the share of sampling steps that change nothing, by sub-tokens per token.
fn idle_steps(steps: &[IdleSteps]) -> String {
    let each = steps.iter().map(|at| {
        let mark = if at.elbow { " (elbow)" } else { "" };
        format!("ℓ {} (b {}) {}{mark}", at.length, at.base, units::share(at.ratio))
    });
    each.collect::<Vec<_>>().join(", ")
}

fn output_status(output: &OutputStatus, splits: usize) -> String {
    let OutputStatus { location, found, splits_done } = output;
    match found {
        OutputState::Nothing => location.clone(),
        OutputState::Resumable => format!(
            "{location}; a run resumes: {} of {} are done",
            units::count(*splits_done),
            units::counted(splits as u64, "split")
        ),
        OutputState::Complete => format!("{location}; the data set is complete already"),
        OutputState::Grows => format!(
            "{location}; a run with --append adds {} to the {} that are there",
            units::counted((splits as u64).saturating_sub(*splits_done), "split"),
            units::count(*splits_done)
        ),
        OutputState::OtherJob => format!("{location}; holds the output of another job, which --overwrite removes"),
    }
}

fn split_counts(splits: &[SplitRecord]) -> String {
    if splits.is_empty() {
        return "known once the rows of the input are staged".into();
    }
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for split in splits {
        *counts.entry(&split.dataset_split).or_default() += 1;
    }
    let each: Vec<String> = counts.iter().map(|(name, n)| format!("{name} {}", units::count(*n))).collect();
    format!("{} ({}); a split becomes one shard", units::count(splits.len() as u64), each.join(", "))
}

fn estimate(plan: &Plan) -> String {
    let (least, most) = (plan.estimated_bytes_per_token, plan.estimated_bytes_per_token_max);
    let per_token = match most > least {
        true => format!(
            "{least:.1} to {most:.1} bytes per token: the worse the teacher predicts the text, the more; --sample 3 measures it"
        ),
        false => format!("{least:.1} bytes per token"),
    };
    match (plan.estimated_tokens, plan.estimated_bytes) {
        (Some(tokens), Some(bytes)) => {
            let size = match most > least {
                true => format!("{} to {}", units::bytes(bytes), units::bytes((tokens as f64 * most) as u64)),
                false => units::bytes(bytes),
            };
            let shown = match plan.measured_tokens {
                Some(measured) => interval(measured, |tokens| units::count(tokens as u64)),
                None => units::count(tokens),
            };
            format!("about {shown} tokens, {size} ({per_token})")
        }
        _ => format!("{per_token}; the size of the text is not known before it is read"),
    }
}

fn splits_table(splits: &[SplitRecord]) -> Table {
    let mut table = Table::new("rlrll").header(&["split", "data set", "size", "range", "file"]);
    let shown = |i: usize| {
        splits.len() <= 2 * SHOWN_AT_EACH_END + 1 || i < SHOWN_AT_EACH_END || i >= splits.len() - SHOWN_AT_EACH_END
    };
    for (i, split) in splits.iter().enumerate() {
        if shown(i) {
            let name = split.dataset_split.clone();
            let (range, file) = (range(&split.pieces), file(&split.pieces));
            table.texts([split.split.0.to_string(), name, taken(split), range, file]);
        } else if i == SHOWN_AT_EACH_END {
            let left_out = units::count((splits.len() - 2 * SHOWN_AT_EACH_END) as u64);
            table.texts(["…", &format!("{left_out} more")]);
        }
    }
    table
}

/// Size of what a split reads: all of its pieces, or for a holdout by key a share of their documents.
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

/// Range of a split in its file. Splits of several files show none, since each file has its own.
fn range(pieces: &[Piece]) -> String {
    let [piece] = pieces else { return String::new() };
    let (unit, start, end) = match piece.range {
        Range::Bytes { start, end, .. } => ("bytes", start, end),
        Range::Rows { start, end } => ("rows", start, end),
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
            appended: 0,
            place: None,
        };
        Plan {
            name: "demo".into(),
            job_hash: "0123456789abcdef0123".into(),
            output: OutputStatus { location: "out/demo".into(), found: OutputState::Nothing, splits_done: 0 },
            operators: ["clean", "tokenize", "pack", "extract"].map(String::from).to_vec(),
            tokenizer: "GPT-2 pattern, byte-level BPE (fast)".into(),
            files: 1,
            input_bytes: 12_345_678,
            mixture: Vec::new(),
            physical_plan: "ShardSinkExec: shards=2\n  SplitsExec: splits=2".into(),
            splits: (0..splits).map(split).collect(),
            estimated_bytes_per_token: 9.14,
            estimated_bytes_per_token_max: 9.14,
            measured_tokens: None,
            estimated_tokens: Some(2_939_447),
            estimated_bytes: Some(26_866_545),
            slots: None,
            environment: BTreeMap::new(),
            schedule: None,
            idle_steps: Vec::new(),
        }
    }

    #[test]
    fn a_long_plan_shows_both_ends() {
        insta::assert_snapshot!(render(&plan(42), false, VIEW).render(false), @r"
        demo  job 0123456789ab
          path       read → clean → tokenize → pack → extract → shard
          input      1 file, 12.3 MB as stored
          tokenizer  GPT-2 pattern, byte-level BPE (fast)
          output     out/demo
          splits     42 (train 41, validation 1); a split becomes one shard
          estimate   about 2,939,447 tokens, 26.9 MB (9.1 bytes per token)

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
    fn a_teacher_that_may_predict_badly_has_a_range() {
        let plan = Plan { estimated_bytes_per_token_max: 33.2, ..plan(1) };
        let range = "26.9 MB to 97.6 MB (9.1 to 33.2 bytes per token: the worse the teacher predicts the text, the more; --sample 3 measures it)";
        assert_eq!(estimate(&plan), format!("about 2,939,447 tokens, {range}"));
    }

    #[test]
    fn a_query_has_no_splits_yet() {
        let environment = [("~", "/home/ann"), ("CORPUS", "/data/owt")].map(|(k, v)| (k.to_owned(), v.to_owned()));
        let plan = Plan { estimated_tokens: None, estimated_bytes: None, environment: environment.into(), ..plan(0) };
        insta::assert_snapshot!(render(&plan, false, VIEW).render(false), @r"
        demo  job 0123456789ab
          path       read → clean → tokenize → pack → extract → shard
          input      1 file, 12.3 MB as stored
          tokenizer  GPT-2 pattern, byte-level BPE (fast)
          output     out/demo
          ${CORPUS}  /data/owt
          ~          /home/ann
          splits     known once the rows of the input are staged
          estimate   9.1 bytes per token; the size of the text is not known before it is read
        ");
    }

    #[test]
    fn rows_of_several_files() {
        let piece = |file: &str| Piece { file: file.into(), range: Range::Rows { start: 0, end: 1000 } };
        let pieces = [piece("a.parquet"), piece("b.parquet")];
        assert_eq!([size(&pieces), range(&pieces), file(&pieces)], ["2,000 rows", "", "a.parquet and 1 after it"]);
        assert_eq!(range(&pieces[..1]), "rows 0–1,000");
    }
}
