//! `stillhouse score FILE --teacher TEACHER`: computes perplexity, entropy and MAUVE of texts.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use stillhouse_pipeline::error::{ErrorKind, PipelineError};
use stillhouse_pipeline::score::{FirstToken, Mauve, MauveOptions, Mean, ScoreOptions, Scores, TextScore, score};
use stillhouse_schemas::spec::{Dtype, InputFormat, SpecialTokens, TextDocument};

use crate::failure::Failure;
use crate::page::{Line, Page, Tone};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::table::Table;
use crate::verbs::Threads;
use stillhouse_pipeline::units;

const EXAMPLES: &str = "\
Examples:
  stillhouse score samples.jsonl --teacher hf://openai-community/gpt2-large
  stillhouse score samples.jsonl --teacher gpt2-large --reference owt-validation.jsonl      and MAUVE
  stillhouse score samples.txt --teacher gpt2-large --per-text scores.jsonl                 a line for each text
  stillhouse score samples.parquet --text sample --teacher gpt2-large --json | jq .perplexity

Perplexity: exp of the mean of -ln p, over windows of --window-tokens, a new one every --stride-tokens, of which each predicts
what the one before it did not. Entropy: of the tokens of a text, nat. MAUVE: as its authors' code, from the teacher's
last hidden state; k-means begins by --seed. Errors are standard errors over texts.";

/// Score texts under a teacher: perplexity, unigram entropy, and MAUVE against other texts
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The texts: jsonl, text, csv, WARC, Parquet or Arrow; a file, a glob, or a URL (s3://…, gs://…, az://…, http(s)://…, hf://datasets/…)
    #[arg(value_name = "FILE")]
    file: String,
    /// The teacher: a folder, a .gguf, or hf://org/name@revision
    #[arg(long, value_name = "TEACHER")]
    teacher: String,
    /// Reference texts: adds MAUVE
    #[arg(long, value_name = "FILE")]
    reference: Option<String>,
    /// Format of the files [default: by their endings]
    #[arg(long, value_name = "FORMAT", value_parser = format_names())]
    format: Option<InputFormat>,
    /// Column or key of the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    text: String,
    /// For text files: the unit that is a text
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    document: Document,
    /// The tokenizer [default: the teacher's own]
    #[arg(long, value_name = "PATH")]
    tokenizer: Option<String>,
    /// Device for the teacher: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    device: String,
    /// Arithmetic of the teacher
    #[arg(long, value_enum, value_name = "TYPE", default_value_t)]
    dtype: Type,
    /// Longest context of a token, including the token
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=1_048_576))]
    window_tokens: u32,
    /// Tokens from one window to the next, at most --window-tokens [default: half of --window-tokens]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    stride_tokens: Option<u32>,
    /// Tokens of one pass of the teacher
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(2..=1_048_576))]
    batch_tokens: u32,
    /// What precedes a text: with bos its first token is predicted too, with given it is not
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    first_token: First,
    /// How a special token that is written in a text is encoded: as the token, or as its characters
    #[arg(long, value_enum, value_name = "WHAT", default_value_t)]
    special_tokens: Special,
    /// Number of texts of each side for MAUVE, from the beginning
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(2..=1_000_000), requires = "reference")]
    mauve_texts: u32,
    /// Clusters of MAUVE [default: a tenth of the texts of the smaller side]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(2..), requires = "reference")]
    mauve_clusters: Option<u32>,
    /// Seed of k-means
    #[arg(long, value_name = "N", default_value_t = 25, requires = "reference")]
    seed: u64,
    /// Write the score of every text to this file, as JSON lines
    #[arg(long, value_name = "FILE")]
    per_text: Option<PathBuf>,
    #[command(flatten)]
    threads: Threads,
    /// Write the scores as JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Document {
    #[default]
    Line,
    File,
    BlankLine,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Type {
    #[default]
    F32,
    Bf16x3,
    F16,
    Bf16,
    Fp8,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum First {
    #[default]
    Bos,
    Given,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Special {
    #[default]
    Parse,
    Text,
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let options = args.options()?;
    let runtime = args.threads.runtime()?;
    let _blocking_calls_wait_on = runtime.enter();
    let mut lines = args.per_text.as_deref().map(Lines::create).transpose()?;
    let watch = Watch::new(printer, if args.json { Mode::Quiet } else { Mode::Shown });
    let scores = score(&options, &watch, &mut |text| lines.as_mut().map_or(Ok(()), |lines| lines.write(text)));
    watch.close();
    let scores = scores?;
    lines.map_or(Ok(()), Lines::finish)?;
    if args.json {
        printer.json(&scores)?;
    } else {
        printer.page(&render(&scores))?;
    }
    Ok(())
}

/// Takes the formats whose files can be read as tables, by their names.
fn format_names() -> impl TypedValueParser<Value = InputFormat> {
    let named = |name: String| InputFormat::tables().find(|format| format.name() == name);
    PossibleValuesParser::new(InputFormat::tables().map(InputFormat::name))
        .try_map(move |name| named(name).ok_or("no such format"))
}

impl Args {
    fn options(&self) -> Result<ScoreOptions, Failure> {
        let stride_tokens = self.stride_tokens.unwrap_or(self.window_tokens / 2);
        if stride_tokens > self.window_tokens {
            return Err(Failure::Usage(format!(
                "--stride-tokens: got {stride_tokens}, valid: at most --window-tokens, {}",
                self.window_tokens
            )));
        }
        Ok(ScoreOptions {
            file: self.file.clone(),
            reference: self.reference.clone(),
            format: self.format,
            text: self.text.clone(),
            document: match self.document {
                Document::Line => TextDocument::Line,
                Document::File => TextDocument::File,
                Document::BlankLine => TextDocument::BlankLine,
            },
            teacher: self.teacher.clone(),
            tokenizer: self.tokenizer.clone(),
            device: self.device.clone(),
            dtype: match self.dtype {
                Type::F32 => Dtype::F32,
                Type::Bf16x3 => Dtype::Bf16x3,
                Type::F16 => Dtype::F16,
                Type::Bf16 => Dtype::Bf16,
                Type::Fp8 => Dtype::Fp8,
            },
            batch_tokens: self.batch_tokens,
            window_tokens: self.window_tokens,
            stride_tokens,
            first_token: match self.first_token {
                First::Bos => FirstToken::Bos,
                First::Given => FirstToken::Given,
            },
            special_tokens: match self.special_tokens {
                Special::Parse => SpecialTokens::Parse,
                Special::Text => SpecialTokens::Text,
            },
            most_texts: self.mauve_texts as usize,
            mauve: MauveOptions {
                clusters: self.mauve_clusters.map(|k| k as usize),
                seed: self.seed,
                ..MauveOptions::default()
            },
        })
    }
}

/// Writes a file with one JSON line per text.
struct Lines {
    out: BufWriter<File>,
    path: PathBuf,
}

impl Lines {
    fn create(path: &Path) -> Result<Self, Failure> {
        let file = File::create(path).map_err(|e| Failure::System(format!("--per-text: {}: {e}", path.display())))?;
        Ok(Self { out: BufWriter::new(file), path: path.to_owned() })
    }

    fn write(&mut self, text: &TextScore) -> Result<(), PipelineError> {
        let failed = |e: std::io::Error| PipelineError::caused(ErrorKind::Output, self.path.display().to_string(), e);
        serde_json::to_writer(&mut self.out, text).map_err(|e| failed(e.into()))?;
        self.out.write_all(b"\n").map_err(failed)
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.out.flush().map_err(|e| Failure::System(format!("--per-text: {}: {e}", self.path.display())))
    }
}

fn render(scores: &Scores) -> Page {
    let mut page = Page::new();
    let mut table = Table::new("lrl").indent(0);
    let mut fact = |name: &str, value: String, about: String| {
        table.row([Line::new().with(Tone::Dim, name), Line::new().with(Tone::Strong, value), Line::plain(about)]);
    };
    fact("texts", units::count(scores.texts), empty(scores.empty_texts));
    fact("tokens", units::count(scores.tokens), "predicted".into());
    fact("perplexity", number(scores.perplexity), "of all tokens".into());
    let error = |mean: &Mean| mean.standard_error.map_or_else(String::new, |e| format!("± {}, ", number(e)));
    let of_texts = &scores.text_perplexity;
    fact("", number(of_texts.mean), format!("{}mean over texts", error(of_texts)));
    fact("entropy", number(scores.entropy_nats.mean), format!("{}nat, mean over texts", error(&scores.entropy_nats)));
    if let Some(found) = &scores.mauve {
        mauve_facts(found, &mut fact);
    }
    page.facts(table);
    page.line(Line::new().with(
        Tone::Dim,
        format!(
            "{} in {}, windows of {} tokens every {}, first token {}",
            scores.teacher,
            scores.arithmetic,
            scores.window_tokens,
            scores.stride_tokens,
            match scores.first_token {
                FirstToken::Bos => "after BOS",
                FirstToken::Given => "given",
            }
        ),
    ));
    page
}

fn mauve_facts(found: &Mauve, fact: &mut impl FnMut(&str, String, String)) {
    let sides = format!(
        "{} beside {}, {} clusters in {} components",
        units::counted(found.texts, "text"),
        units::count(found.reference_texts),
        found.clusters,
        found.components
    );
    fact("MAUVE", format!("{:.4}", found.mauve), sides);
    fact("", format!("{:.4}", found.mauve_star), "smoothed".into());
    fact("frontier", format!("{:.4}", found.frontier_integral), "integral; lower is nearer".into());
}

fn empty(texts: u64) -> String {
    match texts {
        0 => String::new(),
        n => format!("and {} without a token to predict", units::count(n)),
    }
}

/// Formats with four significant digits; large whole numbers in full.
fn number(value: f64) -> String {
    match value.abs() {
        v if v >= 1e6 => format!("{value:.3e}"),
        v if v >= 1000.0 => format!("{value:.0}"),
        v if v >= 100.0 => format!("{value:.1}"),
        v if v >= 10.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
