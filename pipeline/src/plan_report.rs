//! The report of `stillhouse plan`: splits, operators, sizes, and what a run would find at the output. Writes nothing.

use std::collections::BTreeMap;

use datafusion::physical_plan::displayable;
use serde::Serialize;
use stillhouse_operators::registry::{bytes_per_token, excess_bytes_per_token};
use stillhouse_schemas::manifest::SplitRecord;

use crate::append;
use crate::error::{ErrorKind, PipelineError, Result};
use crate::estimates;
use crate::events::Observer;
use crate::identity::JobHash;
use crate::inputs::find_touched;
use crate::job::Prepared;
use crate::job_diff::differences;
use crate::measure::Measured;
use crate::output::Found;
use crate::plan;
use crate::plan::{all_splits, appended_splits, numbers, text_bytes};
use crate::run;
use crate::sequence_offsets::TEXT_BYTES_PER_TOKEN;
use crate::source::QueryTable;
use crate::units;

pub use crate::estimates::{IdleSteps, ScheduleOutlook};

/// A table of a mixture in a plan.
#[derive(Debug, Clone, Serialize)]
pub struct PlannedTable {
    /// Name of the table.
    pub name: String,
    /// Number of its files.
    pub files: usize,
    /// Size of its files as stored, in bytes.
    pub bytes: u64,
    /// How much of it the job asks for, in words.
    pub amount: String,
}

/// A plan, as `stillhouse plan` shows it.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    /// Name of the job.
    pub name: String,
    /// Hash of everything that decides the bytes of the shards.
    pub job_hash: String,
    /// The output folder and its present content.
    pub output: OutputStatus,
    /// Names of the operators, in order.
    pub operators: Vec<String>,
    /// How text becomes ids: the tokenizer pattern with a fast path, or why there is none.
    pub tokenizer: String,
    /// Number of input files.
    pub files: usize,
    /// Size of the input files as stored, in bytes.
    pub input_bytes: u64,
    /// Tables of a mixture; what they have of it is known once their tokens are counted ([`crate::sample`]).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mixture: Vec<PlannedTable>,
    /// The physical plan, as DataFusion shows plans.
    pub physical_plan: String,
    /// The splits; empty for a job with `input.sql` or a mixture, whose rows are unknown until they are made.
    pub splits: Vec<SplitRecord>,
    /// Estimated bytes per token of the data set, with a teacher that predicts the text well.
    pub estimated_bytes_per_token: f64,
    /// Estimated bytes per token with a teacher that predicts the text badly; equal without replayable noise.
    pub estimated_bytes_per_token_max: f64,
    /// Estimated number of tokens, if the size of the text is known.
    pub estimated_tokens: Option<u64>,
    /// The tokens as they were measured ([`crate::measure::tokens`]), from which `estimated_tokens` is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_tokens: Option<Measured>,
    /// Estimated size of the data set, in bytes.
    pub estimated_bytes: Option<u64>,
    /// Concurrent texts, if the teacher writes the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<Slots>,
    /// Expansions of `~` and variables in the job's paths, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// How the orders change over the data set, if they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleOutlook>,
    /// For jobs with sub-tokens: the share of sampling steps that change nothing, for each length, with as many steps
    /// as positions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub idle_steps: Vec<IdleSteps>,
}

impl Plan {
    /// Sets the tokens to those that were measured.
    #[must_use]
    pub fn with_measured_tokens(mut self, measured: Option<Measured>) -> Self {
        if let Some(tokens) = measured {
            self.estimated_tokens = Some(tokens.value as u64);
            self.estimated_bytes = Some((tokens.value * self.estimated_bytes_per_token) as u64);
            self.measured_tokens = measured;
        }
        self
    }
}

/// Texts that a teacher writes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Slots {
    /// Number of texts.
    pub slots: u32,
    /// Size of the keys and values kept for all of them, in bytes.
    pub bytes: u64,
}

/// The content of a job's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OutputStatus {
    /// Folder or URL.
    #[serde(rename = "place")]
    pub location: String,
    /// What a run would find.
    pub found: OutputState,
    /// Number of finished splits.
    pub splits_done: u64,
}

/// What a run would find at the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputState {
    /// Nothing: the run starts from the beginning.
    Nothing,
    /// Work of this job, which the run resumes.
    Resumable,
    /// The finished data set of this job.
    Complete,
    /// With `--append`: the finished data set of this job without its new files, which the run adds.
    Grows,
    /// The output of another job, which `--overwrite` removes.
    OtherJob,
}

/// Checks the output as a run does before it starts. Writes nothing.
///
/// # Errors
/// If the output belongs to another job (unless `overwrite`) or is not of a job, its input changed, it is not writable,
/// or another run holds it.
pub fn output_status(
    prepared: &Prepared,
    hash: &JobHash,
    overwrite: bool,
    observer: &dyn Observer,
) -> Result<OutputStatus> {
    let output = prepared.output()?;
    let look = async {
        let found = match output.inspect_with(&hash.hash, &|plan| differences(plan, hash)).await {
            Err(e) if overwrite && e.kind == ErrorKind::Usage && output.is_of_a_job().await? => None,
            found => Some(found?),
        };
        let touched = match &found {
            Some(found) => find_touched(prepared, hash, &output, found).await?,
            None => None,
        };
        let (found, splits_done) = match found {
            None => (OutputState::OtherJob, 0),
            Some(Found::Nothing) => (OutputState::Nothing, 0),
            Some(Found::Resumable { done, incomplete_uploads }) => {
                (OutputState::Resumable, done.len() + incomplete_uploads.len())
            }
            Some(Found::Complete) => (OutputState::Complete, 0),
        };
        if found != OutputState::Complete {
            output.preflight(observer).await?;
        }
        Ok::<_, PipelineError>((
            OutputStatus { location: output.to_string(), found, splits_done: splits_done as u64 },
            touched,
        ))
    };
    let (status, touched) = prepared.store.wait(look)?;
    if let Some(touched) = touched {
        touched.check(prepared, hash, &status.location, observer)?;
    }
    Ok(status)
}

/// Makes the plan of a job and runs every check that a run makes before it starts.
///
/// # Errors
/// If the input cannot be scanned, the models cannot be read, or [`output_status`] fails.
pub fn plan(prepared: &Prepared, hash: &JobHash, overwrite: bool, observer: &dyn Observer) -> Result<Plan> {
    let output = output_status(prepared, hash, overwrite, observer)?;
    let splits = match prepared.spec.input.is_staged() {
        true => Vec::new(),
        false => all_splits(prepared, hash, &plan::in_order(hash, &prepared.files), observer)?,
    };
    shown(prepared, hash, output, splits)
}

/// The plan of a job with `--append`: the existing splits and those of the new files. If there is nothing to append to
/// or nothing new, the plan of the job.
///
/// # Errors
/// See [`plan()`]; also if the output cannot be appended to.
pub fn plan_appended(prepared: &Prepared, hash: &JobHash, observer: &dyn Observer) -> Result<Plan> {
    let output = prepared.output()?;
    let growth = prepared.store.wait(append::growth(prepared, hash, &output))?;
    let Some((grown, there)) = growth.as_ref().and_then(append::Growth::grown) else {
        return plan(prepared, hash, false, observer);
    };
    // compare the existing splits with their present files, unless an unfinished append is reverted first
    let location = match growth.as_ref().and_then(append::Growth::finished) {
        Some(now) => output_status(prepared, now, false, observer)?.location,
        None => output.to_string(),
    };
    let new: Vec<stillhouse_input_files::InputFile> =
        plan::in_order(grown, &prepared.files).into_iter().skip(there.files.len()).collect();
    let splits = appended_splits(prepared, &new, (there.splits.clone(), grown.appended.len() as u32))?;
    let output = OutputStatus { location, found: OutputState::Grows, splits_done: there.splits.len() as u64 };
    shown(prepared, grown, output, splits)
}

fn shown(prepared: &Prepared, hash: &JobHash, output: OutputStatus, splits: Vec<SplitRecord>) -> Result<Plan> {
    let physical =
        run::splits::physical_plan(prepared, &prepared.files, splits.clone()).map_err(PipelineError::from_plan)?;
    let per_token = bytes_per_token(&prepared.operators, prepared.vocab_size);
    let spec = &prepared.spec;
    let schedule = estimates::schedule(spec, &splits);
    let text = text_bytes(&splits);
    let tokens = match (spec.input.row_length(), spec.input.documents) {
        (Some(length), _) => numbers(&splits, length),
        // an upper bound: texts may end earlier
        (None, Some(documents)) => Some(documents * u64::from(spec.pack.length)),
        (None, None) => (text > 0).then_some((text as f64 / TEXT_BYTES_PER_TOKEN) as u64),
    };
    Ok(Plan {
        name: prepared.spec.name.clone(),
        job_hash: hash.hash.clone(),
        output,
        operators: prepared.operators.iter().map(|o| o.name().to_owned()).collect(),
        tokenizer: match prepared.spec.input.is_rows() {
            true => "none: a number is its own token".into(),
            false => prepared.vocabulary.encoder_description(),
        },
        files: if spec.input.documents.is_some() { 0 } else { prepared.files.len() },
        input_bytes: prepared.files.iter().map(|f| f.size).sum(),
        mixture: planned_tables(prepared),
        physical_plan: displayable(physical.as_ref()).indent(false).to_string(),
        splits,
        estimated_bytes_per_token: per_token,
        estimated_bytes_per_token_max: per_token + excess_bytes_per_token(&prepared.operators, prepared.vocab_size),
        estimated_tokens: tokens,
        measured_tokens: None,
        estimated_bytes: tokens.map(|t| (t as f64 * per_token) as u64),
        schedule,
        idle_steps: estimates::idle_steps(prepared),
        slots: slots(prepared)?,
        environment: prepared.environment.clone(),
    })
}

fn planned_tables(prepared: &Prepared) -> Vec<PlannedTable> {
    let input = &prepared.spec.input;
    let has_stages = input.mixture.as_ref().is_some_and(|mixture| !mixture.stages.is_empty());
    let planned = |table: &QueryTable| {
        let asked = input.tables.get(&table.name)?;
        let amount = match (asked.weight, asked.tokens, asked.epochs) {
            (Some(weight), _, _) => format!("weight {weight}"),
            (_, Some(tokens), _) => units::counted(tokens, "token"),
            (_, _, Some(epochs)) => format!("{epochs} epochs"),
            _ if has_stages => "weights of the stages".into(),
            _ => "once".into(),
        };
        let bytes = table.files.iter().map(|file| file.size).sum();
        Some(PlannedTable { name: table.name.clone(), files: table.files.len(), bytes, amount })
    };
    prepared.tables.iter().filter(|_| input.is_mixture()).filter_map(planned).collect()
}

fn slots(prepared: &Prepared) -> Result<Option<Slots>> {
    let (Some(written), Some(teacher)) = (prepared.spec.sequential(), &prepared.teacher) else { return Ok(None) };
    let ignore = prepared.spec.extract.as_ref().map_or(&[][..], |e| &e.teacher.ignore_tensors);
    let bytes = stillhouse_teacher::decoding_bytes(&teacher.path, prepared.spec.pack.length as usize, ignore)
        .map_err(|e| PipelineError::caused(ErrorKind::Model, "teacher", e))?;
    Ok(Some(Slots { slots: written.slots, bytes: bytes * u64::from(written.slots) }))
}
