//! Loads the teacher of a job: chooses its arithmetic, measures the arithmetic's cost, and places it on devices.
//!
//! ```text
//!   dtype named                     ─► load on every device
//!   dtype auto, or a bound on KL    ─► first tokens of the input ─► f32, then each candidate: speed, and distance from f32
//!                                   ─► stored in the plan ─► load on every device
//!   GPUs                            ─► tokens per pass that fit on all of them ─► stored in the plan
//! ```
//!
//! The plan stores the choice, so that a resumed run computes in the same way. The manifest stores it for `verify`.

use std::sync::Arc;

use arrow::array::{AsArray, RecordBatch};
use stillhouse_noise::ExtractionSpec;
use stillhouse_operators::extract::ExtractConfig;
use stillhouse_operators::operator::OperatorError;
use stillhouse_schemas::manifest::{ArithmeticCost, SplitRecord, TeacherArithmetic};
use stillhouse_schemas::spec::{Dtype, TeacherSpec};
use stillhouse_teacher::probe::{self, PrecisionDifference, Reference, Text};
use stillhouse_teacher::{Precision, Teacher};

use crate::engine::teacher::{TeacherLoader, load, precision, teacher_error};
use crate::error::{ErrorKind, PipelineError, Result};
use crate::events::{Event, Observer};
use crate::job::staged_input;
use crate::job::{Prepared, PreparedTeacher, chain};
use crate::source::SplitReader;
use stillhouse_input_files::{InputFile, Listing};

/// Largest change of a log-probability on the probe text that `auto` accepts, in nat.
const MAX_LOGPROB_CHANGE_NATS: f64 = 1e-2;
/// `auto` leaves f32 only for a type that is faster by this factor, so that two measurements on one machine choose
/// alike.
const MIN_SPEEDUP: f64 = 1.2;
/// Maximum number of splits searched for text to measure on.
const MAX_SPLITS: usize = 16;
/// Maximum bytes of a document used for measuring.
const MAX_DOCUMENT_BYTES: usize = 1 << 16;

/// The input of a job, as its splits read it.
#[derive(Clone, Copy)]
pub(crate) struct JobInput<'a> {
    pub splits: &'a [SplitRecord],
    pub files: &'a [InputFile],
}

/// A job's teacher, loaded on its devices.
#[derive(Default)]
pub(crate) struct LoadedTeachers {
    /// One teacher per device; empty in a job without a teacher.
    pub teachers: Vec<Arc<dyn Teacher>>,
    /// The arithmetic of all of them.
    pub arithmetic: Option<TeacherArithmetic>,
}

/// An arithmetic that is already decided, and its origin.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DecidedArithmetic<'a> {
    /// Decided by the finished splits.
    ByShards(&'a TeacherArithmetic),
    /// Decided by the run for which this process works.
    ByRun(&'a TeacherArithmetic),
}

impl<'a> DecidedArithmetic<'a> {
    fn arithmetic(self) -> &'a TeacherArithmetic {
        match self {
            Self::ByShards(arithmetic) | Self::ByRun(arithmetic) => arithmetic,
        }
    }

    /// The error of a machine with another arithmetic.
    fn mismatch_error(self, here: &str) -> PipelineError {
        let decided = &self.arithmetic().arithmetic;
        let (was, is) = match self {
            Self::ByShards(_) => ("the splits that are done were computed in", "this machine computes"),
            Self::ByRun(_) => ("the run computes in", "this executor's machine computes"),
        };
        let mut message = format!("{was} {decided}, {is} {here}");
        if here.strip_prefix(decided.as_str()).is_some_and(|rest| rest.starts_with(", ")) {
            message += " (a version before this one did not say on which instructions, so they may be others)";
        }
        let valid = match self {
            Self::ByShards(_) => "a machine that computes as the first one did, or all of it anew with --overwrite",
            Self::ByRun(_) => "executors on machines that compute as the run's own",
        };
        let error = PipelineError::new(ErrorKind::Model, format!("{message}; valid: {valid}"));
        match self {
            Self::ByShards(_) => error,
            // another executor may compute like the run
            Self::ByRun(_) => error.machine_specific(),
        }
    }
}

/// Loads the teacher onto every device that the job names, in the decided arithmetic if there is one. If every split is
/// finished only the teacher's description is needed; loading provides that too.
///
/// Cost: to measure the arithmetic, this loads the teacher once more in f32 and in each candidate, one after the other.
///
/// # Errors
/// If the teacher's files or a device are unavailable, devices or runs differ in their arithmetic, or a type costs more
/// than the job allows.
pub(crate) fn load_all(
    prepared: &Prepared,
    input: JobInput<'_>,
    decided: Option<DecidedArithmetic<'_>>,
    pending: bool,
    observer: &dyn Observer,
) -> Result<LoadedTeachers> {
    let (Some(found), Some(extract)) = (&prepared.teacher, &prepared.spec.extract) else {
        return Ok(LoadedTeachers::default());
    };
    let spec = &extract.teacher;
    let devices = stillhouse_teacher::parse_devices(&spec.device).map_err(teacher_error)?;
    let length = prepared.spec.pack.length as usize;
    let (dtype, cost) = match decided.map(DecidedArithmetic::arithmetic) {
        Some(earlier) => (earlier.dtype, earlier.cost),
        None if spec.dtype == Dtype::Auto || spec.max_mean_kl_nats.is_some() => {
            let device = devices.first().map(ToString::to_string).unwrap_or_default();
            Probe { prepared, found, spec, input, length, device: &device, observer }.choose()?
        }
        None => (spec.dtype, None),
    };
    if let Some(decided) = decided.filter(|_| pending)
        && devices.iter().all(|device| device.is_cpu())
        && let Some(precision) = precision(dtype)
    {
        // the file headers suffice: an unsuitable executor does not load the teacher, now or when it tries again
        let here =
            stillhouse_teacher::cpu_arithmetic(&found.path, precision, &spec.ignore_tensors).map_err(teacher_error)?;
        if here != decided.arithmetic().arithmetic {
            return Err(decided.mismatch_error(&here));
        }
    }
    if pending {
        observer.event(&Event::Preparing { what: format!("loading the teacher {}", found.source) });
    }
    let of_run = matches!(decided, Some(DecidedArithmetic::ByRun(_)));
    let loading = TeacherLoader { path: &found.path, spec, dtype, length, extraction: extraction(prepared)?, of_run };
    // if nothing is left to build, the earlier pass size does not matter
    let before = decided.filter(|_| pending).and_then(|decided| decided.arithmetic().pass_tokens);
    let devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
    let mut teachers = devices.iter().map(|d| loading.load(d, before)).collect::<Result<Vec<_>>>()?;
    let least = teachers.iter().map(|teacher| teacher.pass_tokens()).min().unwrap_or(usize::MAX);
    for (at, device) in devices.iter().enumerate() {
        // the bytes of a split must not depend on which device has more memory
        if teachers[at].pass_tokens() > least {
            // free the memory before loading again
            drop(teachers.remove(at));
            teachers.insert(at, loading.load(device, Some(least as u64))?);
        }
    }
    for message in teachers.iter().filter_map(|teacher| teacher.warning()) {
        observer.event(&Event::Warning { message: format!("teacher: {message}") });
    }
    // otherwise the bytes of a split would depend on its device
    let mut infos = teachers.iter().map(|teacher| teacher.info());
    let first = infos.next().map_or("", |info| &info.arithmetic);
    if let Some(other) = infos.find(|info| info.arithmetic != first) {
        let message = format!(
            "extract.teacher.device: {} computes {}, another device {first}; valid: devices of one kind",
            other.device, other.arithmetic
        );
        return Err(PipelineError::new(ErrorKind::Model, message));
    }
    if let Some(other) = decided.filter(|decided| pending && decided.arithmetic().arithmetic != first) {
        return Err(other.mismatch_error(first));
    }
    let arithmetic = match decided.map(DecidedArithmetic::arithmetic) {
        // others built all of it, perhaps on another machine
        Some(earlier) if !pending => earlier.clone(),
        _ => {
            let pass_tokens = (least != usize::MAX).then_some(least as u64);
            TeacherArithmetic { dtype, arithmetic: first.to_owned(), cost, pass_tokens }
        }
    };
    Ok(LoadedTeachers { teachers, arithmetic: Some(arithmetic) })
}

/// What a job extracts from its teacher's logits, if anything.
fn extraction(prepared: &Prepared) -> Result<Option<ExtractionSpec>> {
    let config = prepared.operators.iter().find_map(|operator| operator.config::<ExtractConfig>());
    let invalid = |e: OperatorError| PipelineError::new(ErrorKind::Usage, format!("extract: {}", chain(&e)));
    config.map(|config| config.extraction().map_err(invalid)).transpose()
}

/// The types from which `auto` chooses: those that a device computes faster than f32.
fn candidates(on_cpu: bool) -> Vec<Dtype> {
    let all = [Dtype::Bf16x3, Dtype::F16, Dtype::Bf16];
    let fast = |dtype: &Dtype| match on_cpu {
        true => precision(*dtype).is_some_and(Precision::has_cpu_instructions),
        false => *dtype != Dtype::Bf16x3,
    };
    all.into_iter().filter(fast).collect()
}

/// Measures what a job leaves open.
struct Probe<'a> {
    prepared: &'a Prepared,
    found: &'a PreparedTeacher,
    spec: &'a TeacherSpec,
    input: JobInput<'a>,
    length: usize,
    device: &'a str,
    observer: &'a dyn Observer,
}

impl Probe<'_> {
    fn choose(&self) -> Result<(Dtype, Option<ArithmeticCost>)> {
        let text = self.text()?;
        self.report(format!(
            "loading the teacher {} in f32, to measure with {} tokens",
            self.found.source,
            text.tokens()
        ));
        let teacher = self.load(Dtype::F32)?;
        let on_cpu = teacher.info().device == "cpu";
        let reference = Reference::new(text, teacher.as_ref()).map_err(teacher_error)?;
        if self.spec.dtype != Dtype::Auto {
            drop(teacher);
            return self.check_bound(&reference);
        }
        let slowest = self.seconds(&reference, teacher.as_ref())?;
        drop(teacher);
        self.choose_fastest(&reference, slowest, on_cpu)
    }

    /// The dtype that the job names, if it costs no more than the job allows.
    fn check_bound(&self, reference: &Reference) -> Result<(Dtype, Option<ArithmeticCost>)> {
        let dtype = self.spec.dtype;
        let cost = self.cost(reference, self.load(dtype)?.as_ref())?;
        let bound = self.spec.max_mean_kl_nats.unwrap_or(f64::INFINITY);
        if cost.mean_kl_nats <= bound {
            return Ok((dtype, Some(cost)));
        }
        let message = format!(
            "extract.teacher.max_mean_kl_nats: got {bound}, but {} costs {cost}; valid: a larger bound, or another dtype",
            dtype.name()
        );
        Err(PipelineError::new(ErrorKind::Model, message))
    }

    fn choose_fastest(
        &self,
        reference: &Reference,
        f32_seconds: f64,
        on_cpu: bool,
    ) -> Result<(Dtype, Option<ArithmeticCost>)> {
        let mut best = (Dtype::F32, f32_seconds / MIN_SPEEDUP, None);
        for dtype in candidates(on_cpu) {
            let teacher = self.load(dtype)?;
            let cost = self.cost(reference, teacher.as_ref())?;
            let bound = self.spec.max_mean_kl_nats.unwrap_or(f64::INFINITY);
            if cost.max_logprob_change_nats > MAX_LOGPROB_CHANGE_NATS || cost.mean_kl_nats > bound {
                self.report(format!("{} is not exact enough: {cost}", dtype.name()));
                continue;
            }
            let seconds = self.seconds(reference, teacher.as_ref())?;
            if seconds < best.1 {
                best = (dtype, seconds, Some(cost));
            }
        }
        Ok((best.0, best.2))
    }

    fn load(&self, dtype: Dtype) -> Result<Arc<dyn Teacher>> {
        load(&self.found.path, self.spec, dtype, self.length, self.device)
    }

    fn report(&self, what: String) {
        self.observer.event(&Event::Preparing { what });
    }

    fn cost(&self, reference: &Reference, teacher: &dyn Teacher) -> Result<ArithmeticCost> {
        let PrecisionDifference { tokens, mean_kl_nats, max_kl_nats, max_logprob_change_nats } =
            reference.difference(teacher).map_err(teacher_error)?;
        Ok(ArithmeticCost { tokens, mean_kl_nats, max_kl_nats, max_logprob_change_nats })
    }

    fn seconds(&self, reference: &Reference, teacher: &dyn Teacher) -> Result<f64> {
        let seconds = probe::seconds(teacher, reference.text()).map_err(teacher_error)?;
        let speed = reference.text().tokens() as f64 / seconds;
        self.report(format!("{}: {speed:.0} tokens per second", teacher.info().arithmetic));
        Ok(seconds)
    }

    /// The first tokens of the input, each sequence preceded by BOS.
    fn text(&self) -> Result<Text> {
        self.report("reading the first documents".into());
        let listing = Listing::new(Arc::new(self.input.files.to_vec()));
        let input = Arc::new(staged_input(self.prepared));
        let mut tokens = Vec::new();
        'splits: for split in self.input.splits.iter().take(MAX_SPLITS) {
            for batch in SplitReader::new(&self.prepared.store, &listing, split.clone(), Arc::clone(&input)) {
                let batch = batch.map_err(|e| PipelineError::source("the first documents", e))?;
                self.tokenize(&batch, &mut tokens)?;
                if tokens.len() >= probe::MAX_TOKENS {
                    break 'splits;
                }
            }
        }
        if tokens.is_empty() {
            let message = format!(
                "extract.teacher.dtype: the first {} splits have no token to measure with; valid: a dtype by its name, without a bound",
                self.input.splits.len().min(MAX_SPLITS)
            );
            return Err(PipelineError::new(ErrorKind::Input, message));
        }
        let longest = self.length.min(self.found.config.max_positions).max(2) - 1;
        let runs = tokens.chunks(longest).map(|run| [&[self.found.bos], run].concat()).collect::<Vec<_>>();
        Ok(Text::new(runs.iter().map(Vec::as_slice), self.found.config.vocab_size))
    }

    fn tokenize(&self, batch: &RecordBatch, tokens: &mut Vec<u32>) -> Result<()> {
        let Some(texts) = batch.column_by_name("text").and_then(|column| column.as_string_opt::<i32>()) else {
            return Ok(());
        };
        for text in texts.iter().flatten() {
            let text = &text[..text.floor_char_boundary(MAX_DOCUMENT_BYTES)];
            self.prepared
                .vocabulary
                .encode_into(text, tokens)
                .map_err(|e| PipelineError::caused(ErrorKind::Input, "the first documents", e))?;
            if tokens.len() >= probe::MAX_TOKENS {
                break;
            }
        }
        Ok(())
    }
}
