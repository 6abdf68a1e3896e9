//! Options of `stillhouse export --format`.

use clap::ValueEnum;
use stillhouse_datasets::export::{Conversion, Converted, Format, Identity, MegatronRun, Signal, ValueType};
use stillhouse_pipeline::units;

use crate::cli::Failure;
use crate::page::{Line, Page, Tone, View};
use crate::table::Table;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Name {
    /// Captured logits of arcee-ai/DistillKit: Parquet and the compressor's configuration
    Distillkit,
    /// Cached logits of NVIDIA/Megatron-LM: tars of iterations
    MegatronKd,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum SignalName {
    Topk,
    #[value(name = "top_p")]
    TopP,
    Samples,
    Candidates,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum TypeName {
    Float32,
    Float16,
    Bfloat16,
}

/// For another project's reader.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "The teacher's log-probabilities for another reader")]
pub(super) struct FormatArgs {
    /// Write them for this reader in place of the data set
    #[arg(long, value_enum, value_name = "READER")]
    format: Option<Name>,
    /// Which columns; else the first of these that are there
    #[arg(long, value_enum, value_name = "COLUMNS", requires = "format")]
    signal: Option<SignalName>,
    /// Type of the log-probabilities: as they are (float32), within |ln p|/2048 (float16) or |ln p|/256 (bfloat16)
    #[arg(long, value_enum, value_name = "TYPE", requires = "format")]
    dtype: Option<TypeName>,
    /// megatron-kd: --global-batch-size of the run
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    global_batch: Option<u32>,
    /// megatron-kd: --micro-batch-size of the run [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 16))]
    micro_batch: Option<u32>,
    /// megatron-kd: ranks of data parallelism [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    data_parallel: Option<u32>,
    /// megatron-kd: --seq-length of the run [default: one less than a row]
    #[arg(long, value_name = "N")]
    sequence_length: Option<u32>,
    /// megatron-kd: iterations of a file [default: 100]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    iterations_per_file: Option<u32>,
    /// megatron-kd: hash of the run, where its reader has said it
    #[arg(long, value_name = "MD5", conflicts_with = "blend")]
    hash: Option<String>,
    /// megatron-kd: a data set of the run's --data-path, with its weight where there are several; as often as there are data sets
    #[arg(long, value_name = "NAME[=WEIGHT]")]
    blend: Vec<String>,
    /// megatron-kd: --seed of the run [default: 1234]
    #[arg(long, value_name = "N", conflicts_with = "hash", allow_negative_numbers = true)]
    seed: Option<i64>,
    /// megatron-kd: --train-samples of the run, or iterations times global batch [default: what is exported]
    #[arg(long, value_name = "N", conflicts_with = "hash")]
    train_samples: Option<u64>,
}

impl FormatArgs {
    /// The conversion to make; `None` to copy the data set.
    pub fn conversion(&self) -> Result<Option<Conversion>, Failure> {
        if self.format != Some(Name::MegatronKd)
            && let Some(option) = self.of_megatron()
        {
            return Err(Failure::Usage(format!("{option} is an option of --format megatron-kd")));
        }
        let Some(format) = self.format else { return Ok(None) };
        let format = match format {
            Name::Distillkit => Format::DistillKit,
            Name::MegatronKd => Format::MegatronKd(self.run()?),
        };
        let signal = self.signal.map(|signal| match signal {
            SignalName::Topk => Signal::TopK,
            SignalName::TopP => Signal::TopP,
            SignalName::Samples => Signal::Samples,
            SignalName::Candidates => Signal::Candidates,
        });
        let dtype = match self.dtype {
            None | Some(TypeName::Float32) => ValueType::Float32,
            Some(TypeName::Float16) => ValueType::Float16,
            Some(TypeName::Bfloat16) => ValueType::Bfloat16,
        };
        Ok(Some(Conversion { format, signal, dtype }))
    }

    /// A given option that only Megatron-LM's format has.
    fn of_megatron(&self) -> Option<&'static str> {
        let given = [
            ("--global-batch", self.global_batch.is_some()),
            ("--micro-batch", self.micro_batch.is_some()),
            ("--data-parallel", self.data_parallel.is_some()),
            ("--sequence-length", self.sequence_length.is_some()),
            ("--iterations-per-file", self.iterations_per_file.is_some()),
            ("--hash", self.hash.is_some()),
            ("--blend", !self.blend.is_empty()),
            ("--seed", self.seed.is_some()),
            ("--train-samples", self.train_samples.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(option, _)| option)
    }

    fn run(&self) -> Result<MegatronRun, Failure> {
        let missing = |what: &str| Failure::Usage(format!("--format megatron-kd needs {what}"));
        let global_batch = self.global_batch.ok_or_else(|| missing("--global-batch, that of the run"))?;
        let identity = match &self.hash {
            Some(hash) => Identity::Hash(hash.clone()),
            None if self.blend.is_empty() => {
                return Err(missing(
                    "--blend (and --seed, --train-samples) or --hash: its reader takes no data but of its own run",
                ));
            }
            None => Identity::Of {
                seed: self.seed.unwrap_or(1234),
                train_samples: self.train_samples,
                blend: self.blend.iter().map(|data| weighted(data)).collect::<Result<_, _>>()?,
            },
        };
        Ok(MegatronRun {
            micro_batch: self.micro_batch.unwrap_or(1),
            global_batch,
            data_parallel: self.data_parallel.unwrap_or(1),
            sequence_length: self.sequence_length,
            iterations_per_file: self.iterations_per_file.unwrap_or(100),
            identity,
        })
    }
}

/// Parses `NAME` or `NAME=WEIGHT`.
fn weighted(data: &str) -> Result<(f64, String), Failure> {
    let Some((name, weight)) = data.rsplit_once('=') else { return Ok((1.0, data.to_owned())) };
    let weight = weight.parse::<f64>().ok().filter(|weight| weight.is_finite());
    let wrong = || {
        Failure::Usage(format!("--blend: got {data:?}, valid: NAME or NAME=WEIGHT, such as data/owt_text_document=0.7"))
    };
    Ok((weight.ok_or_else(wrong)?, name.to_owned()))
}

/// Renders the result as a page.
pub(super) fn render(done: &Converted, view: View) -> Page {
    let mut page = Page::new();
    if done.dry_run {
        let mut table = Table::new("lrl").indent(0).header(&["file", "before compression", ""]);
        for file in &done.files {
            let what = if file.there { "is there" } else { "would be made" };
            table.texts([file.name.clone(), format!("about {}", units::bytes(file.bytes)), what.to_owned()]);
        }
        page.table(table, view);
        page.blank();
    }
    let total = |there: bool| {
        let files = done.files.iter().filter(move |file| file.there == there);
        let (count, bytes) = files.fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.bytes));
        let about = if done.dry_run { "about " } else { "" };
        format!("{}, {about}{}", units::counted(count, "file"), units::bytes(bytes))
    };
    let mut facts = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: String| facts.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    fact(if done.dry_run { "to make" } else { "made" }, total(false));
    fact("there already", total(true));
    fact("entries", format!("{} of each position, from {}", done.entries, done.signal.name()));
    for (count, what) in [
        (done.left_out.rows_of_no_iteration, "rows that fill no global batch"),
        (done.left_out.rows_of_one_token, "rows of one token"),
        (done.left_out.entries_without_token, "entries whose id has no token"),
    ] {
        if count > 0 {
            fact("left out", format!("{count} {what}"));
        }
    }
    fact("place", done.destination.clone());
    if !done.dry_run {
        fact("took", format!("{:.1} s", done.seconds));
    }
    page.facts(facts);
    page
}
