//! `stillhouse verify DATASET`: reads a data set and checks everything that can be checked.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use stillhouse_datasets::dataset::Dataset;
use stillhouse_datasets::verify::{Distribution, Report, TeacherCheck, Verification, VerifyOptions, verify};
use stillhouse_pipeline::units;
use stillhouse_schemas::spec::Dtype;

use crate::failure::Failure;
use crate::page::{Line, Page, Tone, View};
use crate::printer::Printer;
use crate::progress::{Mode, Watch};
use crate::table::Table;
use crate::verbs::{StoreOptions, Threads};

const EXAMPLES: &str = "\
Examples:
  stillhouse verify out/demo                                   checksums, shapes, invariants of every row
  stillhouse verify out/demo --teacher                         and the noise, recomputed on a sample
  stillhouse verify out/demo --teacher --sample-batches 50     a larger sample
  stillhouse verify out/demo --teacher --report faithful       what storing costs beside what arithmetic costs, as
                                                               faithful.html and faithful.json
  stillhouse verify s3://shards/owt-noise                      in a store; every byte is read
  stillhouse verify out/demo --teacher --teacher-path ~/models/gpt2-large --device cuda

Exit code 1 when anything is wrong. Another device than the job's computes slightly different log-probabilities.";

/// Read a data set and check it: checksums, shapes, invariants, and with --teacher the noise itself
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder or URL of the data set (s3://…, gs://…, az://…)
    dataset: String,
    /// Recompute log-probabilities and noise on a sample, and check argmax(l + ξ) = x and the tolerance
    #[arg(long)]
    teacher: bool,
    /// Location of the teacher [default: the location in the job]
    #[arg(long, value_name = "PATH", requires = "teacher")]
    teacher_path: Option<PathBuf>,
    /// Device for the teacher: auto, cpu, cuda or cuda:N [default: the job's]
    #[arg(long, value_name = "DEVICE", requires = "teacher")]
    device: Option<String>,
    /// Batches to recompute, spread over the data set
    #[arg(long, value_name = "N", default_value_t = 2, requires = "teacher")]
    sample_batches: usize,
    /// Compare the stored values with the live teacher, and the live teacher with itself in other batches and in --report-dtype;
    /// write PATH.html and PATH.json
    #[arg(long, value_name = "PATH", requires = "teacher")]
    report: Option<PathBuf>,
    /// The other arithmetic of the report [default: bf16; f32 if the job's is bf16]
    #[arg(long, value_enum, value_name = "TYPE", requires = "report")]
    report_dtype: Option<Arithmetic>,
    #[command(flatten)]
    store: StoreOptions,
    #[command(flatten)]
    threads: Threads,
    /// Write the result as JSON
    #[arg(long)]
    pub json: bool,
}

impl Args {
    /// `stillhouse verify DATASET --teacher`.
    pub fn with_teacher(dataset: String) -> Self {
        Self {
            dataset,
            teacher: true,
            teacher_path: None,
            device: None,
            sample_batches: 2,
            report: None,
            report_dtype: None,
            store: StoreOptions::default(),
            threads: Threads::default(),
            json: false,
        }
    }
}

/// Runs the command.
pub fn call(args: &Args, printer: &Arc<Printer>) -> Result<(), Failure> {
    let runtime = args.threads.runtime()?;
    let output = args.store.open(&args.dataset)?;
    let watch = Watch::new(printer, if args.json { Mode::Quiet } else { Mode::Shown });
    let options = VerifyOptions {
        teacher: args.teacher,
        teacher_path: args.teacher_path.clone(),
        device: args.device.clone(),
        teacher_batches: args.sample_batches,
        report: None,
    };
    let found = runtime.block_on(async {
        let dataset = Dataset::open(output).await?;
        let of_job = dataset.manifest().job.extract.as_ref().map(|extract| extract.teacher.dtype);
        let usual = if of_job == Some(Dtype::Bf16) { Dtype::F32 } else { Dtype::Bf16 };
        let dtype = args.report_dtype.map_or(usual, Arithmetic::dtype);
        let options = VerifyOptions { report: args.report.as_ref().map(|_| dtype), ..options };
        verify(&dataset, &options, &watch).await
    });
    watch.close();
    let found = found?;
    if let (Some(path), Some(report)) = (&args.report, &found.report) {
        write(path, report).map_err(|e| Failure::System(format!("--report: {}: {e}", path.display())))?;
    }
    if args.json {
        printer.json(&found)?;
    } else {
        printer.page(&render(&found, printer.view()))?;
    }
    if found.passed() { Ok(()) } else { Err(Failure::Reported) }
}

/// Arithmetic of the report's other teacher.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Arithmetic {
    F32,
    Bf16x3,
    F16,
    Bf16,
    Fp8,
}

impl Arithmetic {
    fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16x3 => Dtype::Bf16x3,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::Bf16,
            Self::Fp8 => Dtype::Fp8,
        }
    }
}

/// Writes the report as HTML and as JSON.
fn write(path: &Path, report: &Report) -> io::Result<()> {
    let with = |ending: &str| {
        let mut name = path.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    fs::write(with(".json"), serde_json::to_string_pretty(report)? + "\n")?;
    fs::write(with(".html"), report.html())
}

fn render(found: &Verification, view: View) -> Page {
    let mut page = Page::new();
    let mut read = Table::new("ll").indent(0);
    let mut fact = |name: &str, value: String| read.row([Line::new().with(Tone::Dim, name), Line::plain(value)]);
    fact(
        "read",
        format!(
            "{}, {}, {}, {}",
            units::counted(found.shards, "shard"),
            units::counted(found.rows, "row"),
            units::counted(found.tokens, "token"),
            units::bytes(found.bytes)
        ),
    );
    if let Some(check) = &found.teacher {
        teacher_facts(check, &mut fact);
    }
    page.facts(read);
    if let Some(report) = &found.report {
        report_table(report, view, &mut page);
    }
    if found.passed() {
        page.line(Line::new().with(Tone::Good, "passed"));
        if found.has_teacher && found.teacher.is_none() {
            page.line(
                Line::new()
                    .with(Tone::Dim, "the teacher's values were not recomputed; --teacher does that for a sample"),
            );
        }
        return page;
    }
    let heading = format!("FAILED: {}", units::counted(found.fault_count, "fault"));
    page.line(Line::new().with(Tone::Bad, heading));
    for fault in &found.faults {
        page.line(Line::plain("  ").with(Tone::Strong, &fault.place).with(Tone::Plain, format!(": {}", fault.message)));
    }
    let more = found.fault_count.saturating_sub(found.faults.len() as u64);
    if more > 0 {
        page.line(Line::plain(format!("  … and {} more", units::count(more))));
    }
    if let Some(mend) = &found.mend {
        page.line(Line::plain("to make what is missing or damaged again: ").with(Tone::Strong, mend));
    }
    page
}

fn report_table(report: &Report, view: View, page: &mut Page) {
    let mut table =
        Table::new("lrrrr").header(&["beside the live teacher", "TV mean", "TV largest", "Δ ln p mean", "largest"]);
    for comparison in &report.comparisons {
        let (variation, change) = (&comparison.total_variation, &comparison.logprob_change_nats);
        let of =
            |value: fn(&Distribution) -> f64| variation.as_ref().map_or("–".to_owned(), |d| units::small(value(d)));
        table.texts([
            comparison.what.clone(),
            of(|d| d.mean),
            of(|d| d.max),
            units::small(change.mean),
            units::small(change.max),
        ]);
    }
    page.table(table, view);
}

fn teacher_facts(check: &TeacherCheck, fact: &mut impl FnMut(&str, String)) {
    fact(
        "teacher",
        format!(
            "{}, {} recomputed",
            units::counted(check.sequences, "sequence"),
            units::counted(check.tokens, "token")
        ),
    );
    fact("ln p", format!("largest difference from what is stored {}", units::small(check.logprob_difference_max)));
    if check.noises == 0 {
        return;
    }
    if check.written {
        let (hits, all) = (units::count(check.argmax_hits), units::counted(check.noises, "written token"));
        fact("argmax(l + ξ) = x", format!("{hits} of {all}, ξ replayed from the seed"));
        return;
    }
    let of_all = |count: u64| format!("{} of {}", units::count(count), units::counted(check.noises, "stored noise"));
    let promise = if check.condition { "" } else { "; the job did not ask for it (condition: false)" };
    fact("argmax(l + ξ) = x", of_all(check.argmax_hits) + promise);
    let bound = check.tolerance.map_or("the rounding of their type".to_owned(), |t| format!("the tolerance of {t:e}"));
    fact("softmax(ξ)", format!("{} within {bound}", of_all(check.within_tolerance)));
    fact(
        "total variation",
        format!(
            "largest {}, mean {}",
            units::small(check.total_variation_max),
            units::small(check.total_variation_mean)
        ),
    );
}

#[cfg(test)]
mod tests {
    use stillhouse_datasets::verify::Fault;

    use super::*;

    const PLAIN: View = View { width: 90, terminal: true, colour: false };

    fn found() -> Verification {
        Verification { shards: 3, rows: 1234, tokens: 1_263_616, bytes: 11_549_450, ..Verification::default() }
    }

    #[test]
    fn a_sound_data_set() {
        let teacher = TeacherCheck {
            sequences: 8,
            tokens: 8184,
            noises: 16_368,
            logprob_difference_max: 2.4e-7,
            within_tolerance: 16_368,
            argmax_hits: 16_368,
            condition: true,
            written: false,
            total_variation_max: 9.98e-4,
            total_variation_mean: 3.1e-4,
            tolerance: Some(1e-3),
        };
        let found = Verification { teacher: Some(teacher), has_teacher: true, ..found() };
        insta::assert_snapshot!(render(&found, PLAIN).render(false), @r"
        read               3 shards, 1,234 rows, 1,263,616 tokens, 11.5 MB
        teacher            8 sequences, 8,184 tokens recomputed
        ln p               largest difference from what is stored 2.40e-7
        argmax(l + ξ) = x  16,368 of 16,368 stored noises
        softmax(ξ)         16,368 of 16,368 stored noises within the tolerance of 1e-3
        total variation    largest 9.98e-4, mean 3.10e-4
        passed
        ");
        let unchecked = Verification { teacher: None, ..found };
        insta::assert_snapshot!(render(&unchecked, PLAIN).render(false), @r"
        read  3 shards, 1,234 rows, 1,263,616 tokens, 11.5 MB
        passed
        the teacher's values were not recomputed; --teacher does that for a sample
        ");
    }

    #[test]
    fn faults_are_listed_and_the_rest_counted() {
        let fault = |place: &str, message: &str| Fault { place: place.into(), message: message.into() };
        let found = Verification {
            fault_count: 7,
            mend: Some("stillhouse repair out/demo job.yaml".into()),
            faults: vec![
                fault("data/train-00000-of-00003.parquet", "sha256 is 01…, should be 02…"),
                fault("data/train-00001-of-00003.parquet, row 7", "token \x1b]0;x\x07 out of range"),
            ],
            ..found()
        };
        insta::assert_snapshot!(render(&found, PLAIN).render(false), @r"
        read  3 shards, 1,234 rows, 1,263,616 tokens, 11.5 MB
        FAILED: 7 faults
          data/train-00000-of-00003.parquet: sha256 is 01…, should be 02…
          data/train-00001-of-00003.parquet, row 7: token \u{1b}]0;x\u{7} out of range
          … and 5 more
        to make what is missing or damaged again: stillhouse repair out/demo job.yaml
        ");
    }
}
