//! `stillhouse init [CORPUS]...`: looks at the files of a corpus and writes a job file for them.

mod proposal;

use std::fs::OpenOptions;
use std::io::{self, BufRead, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use stillhouse_operators::registry::job_format;
use stillhouse_pipeline::input_summary::{InputSummary, summarize};
use stillhouse_pipeline::units;

use self::proposal::{Choice, Given, Proposal};
use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::table::Table;
use crate::verbs::Threads;

const EXAMPLES: &str = "\
Examples:
  stillhouse init corpus/                                  looks at the files, asks, writes job.yaml
  stillhouse init 'data/*.jsonl.gz' --yes                  takes what it proposes, without questions
  stillhouse init s3://bucket/corpus --teacher hf://HuggingFaceTB/SmolLM2-135M --length 2048
  stillhouse init corpus/ --no-teacher --tokenizer tokenizer.json --job -     to stdout";

/// Look at a corpus and write a job file for it
///
/// Finds the format, compression, columns and sizes of the files, and the language of the first documents. Proposes the
/// text column, tokenizer, teacher and length with the reason for each. On a terminal it asks about each proposal;
/// elsewhere it takes them. Reads the first records of up to 8 files, and writes only the job file.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Files, folders, globs or URLs (s3://, gs://, az://, https://, hf://datasets/)
    #[arg(value_name = "CORPUS", default_value = ".")]
    corpus: Vec<String>,
    /// The job file to write; - writes it to stdout
    #[arg(long, value_name = "FILE", default_value = "job.yaml")]
    job: PathBuf,
    /// Column of the text, such as text or meta.text
    #[arg(long, value_name = "COLUMN")]
    text: Option<String>,
    /// What one document of plain text is [default: from the sizes of files and lines]
    #[arg(long, value_enum, value_name = "UNIT")]
    document: Option<DocumentUnit>,
    /// The teacher: a folder, a .gguf, or hf://org/name
    #[arg(long, value_name = "MODEL", conflicts_with = "no_teacher")]
    teacher: Option<String>,
    /// Only tokenize and pack
    #[arg(long)]
    no_teacher: bool,
    /// The tokenizer: tokenizer.json, a folder, a .gguf, or hf://org/name [default: the teacher's]
    #[arg(long, value_name = "TOKENIZER", required_if_eq("no_teacher", "true"))]
    tokenizer: Option<String>,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(4..=1_048_576))]
    length: Option<u32>,
    /// The data set that the job writes: a folder or a URL [default: a folder with the name of the job]
    #[arg(long, value_name = "OUTPUT")]
    output: Option<String>,
    /// Take what is proposed, without questions
    #[arg(long, short)]
    yes: bool,
    #[command(flatten)]
    threads: Threads,
}

/// A document of plain text.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum DocumentUnit {
    Line,
    BlankLine,
    File,
}

impl DocumentUnit {
    /// The word in the job file.
    fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::BlankLine => "blank_line",
            Self::File => "file",
        }
    }
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let to_stdout = args.job == Path::new("-");
    if !to_stdout && args.job.exists() {
        return Err(exists(&args.job));
    }
    let runtime = args.threads.runtime()?;
    let watch = Watch::new(printer, Mode::Shown);
    let summary = {
        let _blocking_calls_wait_on = runtime.enter();
        summarize(&args.corpus, Path::new("."), &watch)
    };
    watch.close();
    let summary = summary?;
    let given = Given {
        corpus: &args.corpus,
        text: args.text.clone(),
        document: args.document.map(DocumentUnit::name),
        teacher: args.teacher.clone(),
        no_teacher: args.no_teacher,
        tokenizer: args.tokenizer.clone(),
        length: args.length,
        output: args.output.clone(),
        folder: if to_stdout { None } else { args.job.parent().map(Path::to_path_buf) },
    };
    let mut proposal = Proposal::new(&summary, given)?;
    let mut page = Page::new();
    describe(&summary, &mut page);
    let asks = !args.yes && !to_stdout && io::stdin().is_terminal() && io::stderr().is_terminal();
    if asks {
        printer.note(&page);
        proposal.ask(&mut |question, choice| ask(printer, question, choice))?;
        page = Page::new();
    }
    let job = proposal.job_file();
    job_format().read(&job).map_err(|problems| Failure::JobFile("the job".into(), problems))?;
    if to_stdout {
        printer.text(&job)?;
        return Ok(());
    }
    write_new(&args.job, &job)?;
    proposals(&proposal, &mut page);
    next_steps(&args.job, &proposal, &mut page);
    printer.page(&page)?;
    Ok(())
}

fn exists(path: &Path) -> Failure {
    Failure::Usage(format!("--job: {} exists; valid: the name of a new file, or - for stdout", path.display()))
}

/// Writes a file that does not exist yet.
fn write_new(path: &Path, text: &str) -> Result<(), Failure> {
    let written =
        OpenOptions::new().write(true).create_new(true).open(path).and_then(|mut f| f.write_all(text.as_bytes()));
    written.map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists => exists(path),
        _ => Failure::System(format!("cannot write {}: {e}", path.display())),
    })
}

/// Shows a choice and reads the answer. Enter takes the proposal.
fn ask(printer: &Printer, question: &str, choice: &Choice) -> Result<Option<String>, Failure> {
    let mut page = Page::new();
    page.line(
        Line::new()
            .with(Tone::Strong, question)
            .with(Tone::Plain, format!(" [{}]", choice.value))
            .with(Tone::Dim, format!("  {}", choice.reason)),
    );
    printer.note(&page);
    let mut answer = String::new();
    let cannot = |e: io::Error| Failure::System(format!("cannot read the answer: {e}"));
    if io::stdin().lock().read_line(&mut answer).map_err(cannot)? == 0 {
        return Err(Failure::Usage("the questions were not answered; --yes takes what is proposed".into()));
    }
    let answer = answer.trim();
    Ok((!answer.is_empty()).then(|| answer.to_owned()))
}

/// Columns that are named; a table may have a hundred thousand.
const SHOWN_COLUMNS: usize = 12;

/// The first names, and the number of the others.
fn first_names(names: &[String]) -> String {
    let shown = names.get(..SHOWN_COLUMNS).unwrap_or(names).join(", ");
    match names.len().saturating_sub(SHOWN_COLUMNS) {
        0 => shown,
        more => format!("{shown} and {} more", units::count(more as u64)),
    }
}

/// Shows what the files are.
fn describe(summary: &InputSummary, page: &mut Page) {
    let mut facts = Table::new("ll").indent(0);
    let compression: Vec<&str> =
        summary.compression.keys().map(String::as_str).filter(|name| *name != "none").collect();
    let compressed = if compression.is_empty() { String::new() } else { format!(", {}", compression.join(" and ")) };
    facts.texts([
        "files",
        &format!("{}, {}{compressed}", units::counted(summary.files as u64, "file"), units::bytes(summary.bytes)),
    ]);
    facts.texts(["format", summary.format.name()]);
    for column in summary.text_columns.iter().take(SHOWN_COLUMNS) {
        let language = column
            .language()
            .map_or(String::new(), |(name, share)| format!(", {name} in {} of those recognised", units::share(share)));
        let mean = units::bytes(column.mean_bytes as u64);
        facts.texts(["column", &format!("{}: text, {mean} on average{language}", column.name)]);
    }
    if let Some(more) = summary.text_columns.len().checked_sub(SHOWN_COLUMNS).filter(|more| *more > 0) {
        facts.texts(["columns", &format!("{} more with text", units::count(more as u64))]);
    }
    if !summary.other_columns.is_empty() {
        facts.texts(["columns", &format!("{} (not text)", first_names(&summary.other_columns))]);
    }
    for (format, files) in &summary.other_files {
        facts.texts([
            "left out",
            &format!("{} of format {format}: a job reads one format", units::counted(*files as u64, "file")),
        ]);
    }
    page.facts(facts);
    page.line(Line::new().with(Tone::Dim, format!("from the first rows of the files, {} in all", summary.rows)));
}

fn proposals(proposal: &Proposal<'_>, page: &mut Page) {
    page.heading("The job");
    let mut table = Table::new("lll");
    for (name, choice) in proposal.choices() {
        table.row([
            Line::plain(name),
            Line::new().with(Tone::Strong, &choice.value),
            Line::new().with(Tone::Dim, &choice.reason),
        ]);
    }
    page.facts(table);
}

fn next_steps(job: &Path, proposal: &Proposal<'_>, page: &mut Page) {
    page.heading(&format!("{} is written", job.display()));
    for (command, why) in [
        (format!("stillhouse plan {}", job.display()), proposal.what_plan_does()),
        (format!("stillhouse plan {} --sample 3", job.display()), "prepares three documents in memory and shows them"),
        (format!("stillhouse run {}", job.display()), "makes the data set"),
    ] {
        page.line(Line::plain("  ").with(Tone::Strong, command));
        page.line(Line::plain(format!("    {why}")));
    }
}
