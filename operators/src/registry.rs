//! The list of operators in pipeline order, one line each. Each operator declares everything else in its own file.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use arrow::array::RecordBatch;
use arrow::datatypes::{Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, SpecialToken};
use stillhouse_schemas::parse::JobFormat;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::SectionKind;
use stillhouse_schemas::sequence_range::SequenceRange;
use stillhouse_schemas::spec::JobSpec;

use crate::config::{Column, JobContext, OperatorConfig, OperatorView, SpecialIds, StatisticKind};
use crate::extract::ExtractConfig;
use crate::generate::GenerateConfig;
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext};

/// The operators of Stillhouse, in the order in which they run.
pub const OPERATORS: &[&dyn OperatorFactory] = &[
    &Factory::<crate::clean::CleanConfig>::ENTRY,
    &Factory::<crate::tokenize::TokenizeConfig>::ENTRY,
    &Factory::<crate::pack::PackConfig>::ENTRY,
    &Factory::<crate::grid::GridConfig>::ENTRY,
    &Factory::<crate::extract::ExtractConfig>::ENTRY,
    &Factory::<crate::generate::PromptsConfig>::ENTRY,
    &Factory::<crate::generate::GenerateConfig>::ENTRY,
    &Factory::<crate::subtokens::SubtokensConfig>::ENTRY,
    &Factory::<crate::partitions::PartitionsConfig>::ENTRY,
    &Factory::<crate::orders::OrdersConfig>::ENTRY,
];

/// Returns the operators of a job, in order.
///
/// # Errors
/// Returns every problem, if the job asks for something that its vocabulary does not support.
pub fn operators_for_job(context: &JobContext<'_>) -> Result<Vec<OperatorSpec>, Vec<Problem>> {
    let (specs, problems) = resolve_operators(context);
    if problems.is_empty() { Ok(specs) } else { Err(problems) }
}

/// Returns the operators whose configs can be built, in order, and the problems of the others.
pub fn resolve_operators(context: &JobContext<'_>) -> (Vec<OperatorSpec>, Vec<Problem>) {
    let (mut specs, mut problems) = (Vec::new(), Vec::new());
    for operator in operators() {
        match operator.from_job(context) {
            Ok(spec) => specs.extend(spec),
            Err(problem) => problems.push(problem),
        }
    }
    let known =
        |key: &str| operators().iter().any(|operator| operator.section().is_some_and(|section| section.key == key));
    let unknown = context.spec.sections.keys().filter(|key| !known(key));
    problems.extend(unknown.map(|key| Problem::missing(key, "is of an operator that this program does not have")));
    (specs, problems)
}

/// The config of `extract` among these operators: over given text, or over the text that the teacher writes.
pub fn extract_config(operators: &[OperatorSpec]) -> Option<&ExtractConfig> {
    operators.iter().find_map(|operator| {
        let written = || operator.config::<GenerateConfig>().map(|generate| &generate.extract);
        operator.config::<ExtractConfig>().or_else(written)
    })
}

/// The limits that the rows of a split keep. `special_tokens` are by role, as in the manifest.
pub fn check_context(
    job: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
    (split, sequence_range): (SplitId, Option<SequenceRange>),
) -> CheckContext {
    let (operators, _) = resolve_manifest(job, vocab_size, special_tokens);
    CheckContext { vocab_size, length: job.pack.length as usize, split, sequence_range, operators }
}

/// The operators that made a data set, as far as its manifest describes them, and why the others are unknown.
pub fn operators_from_manifest(manifest: &Manifest) -> (Vec<OperatorSpec>, Vec<Problem>) {
    resolve_manifest(&manifest.job, manifest.vocab_size as usize, &manifest.tokenizer.special_tokens)
}

fn resolve_manifest(
    spec: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
) -> (Vec<OperatorSpec>, Vec<Problem>) {
    let special_ids = SpecialIds::from_manifest(special_tokens, spec.tokenizer.special_tokens);
    resolve_operators(&JobContext { spec, vocab_size, special_ids })
}

static INSTALLED: OnceLock<Vec<&'static dyn OperatorFactory>> = OnceLock::new();

/// Returns all operators in the order in which they run: [`OPERATORS`], then those added by [`install`].
pub fn operators() -> &'static [&'static dyn OperatorFactory] {
    INSTALLED.get_or_init(|| OPERATORS.to_vec())
}

/// Adds operators of a program that uses these crates as a library; they run after those of the registry.
///
/// # Errors
/// Returns the names of the operators in use if [`operators`] or [`install`] was called before.
pub fn install(more: &[&'static dyn OperatorFactory]) -> Result<(), Vec<&'static str>> {
    let in_use = |_| operators().iter().map(|operator| operator.name()).collect();
    INSTALLED.set(OPERATORS.iter().chain(more).copied().collect()).map_err(in_use)
}

/// Returns the format of the job file, including the sections of all operators.
pub fn job_format() -> &'static JobFormat {
    static FORMAT: OnceLock<JobFormat> = OnceLock::new();
    FORMAT.get_or_init(|| JobFormat::new(operators().iter().filter_map(|operator| operator.section()).collect()))
}

/// Returns every column that an operator may add, in the order of a data set.
pub fn columns() -> impl Iterator<Item = &'static Column> {
    operators().iter().flat_map(|operator| operator.columns())
}

/// Looks up a statistic of an operator by name.
pub fn statistic(name: &str) -> Option<&'static StatisticKind> {
    operators().iter().flat_map(|operator| operator.statistics()).find(|statistic| statistic.name == name)
}

/// Returns the table of columns in docs/FORMAT.md, as Markdown.
pub fn columns_table() -> String {
    let mut table = String::from("| column | type | when | shape and meaning |\n|---|---|---|---|\n");
    for c in columns() {
        let parts: Vec<&str> = [c.shape, c.contract].into_iter().filter(|part| !part.is_empty()).collect();
        table += &format!("| `{}` | {} | {} | {} |\n", c.name, c.dtype, c.when, parts.join(", "));
    }
    table
}

/// Estimates the bytes per token of a data set with the columns of these operators, from measurements in BENCHMARKS.md.
pub fn bytes_per_token(operators: &[OperatorSpec], vocab_size: usize) -> f64 {
    operators.iter().fold(0.0, |before, operator| operator.0.bytes_per_token(before, vocab_size))
}

/// Type-erased access to the declarations of an [`OperatorConfig`].
pub trait OperatorFactory: fmt::Debug + Sync {
    /// Name of the operator in plans, metrics and errors.
    fn name(&self) -> &'static str;

    /// Section of the job file that the operator defines itself, if any.
    fn section(&self) -> Option<SectionKind>;

    /// Columns that the operator may add, in order.
    fn columns(&self) -> &'static [Column];

    /// Statistics that the operator may add.
    fn statistics(&self) -> &'static [StatisticKind];

    /// Returns the operator with its config for a job, or `None` if the job does not use it.
    ///
    /// # Errors
    /// See [`OperatorConfig::from_job`].
    fn from_job(&self, context: &JobContext<'_>) -> Result<Option<OperatorSpec>, Problem>;
}

/// Factory of the operator with config type `T`.
pub struct Factory<T>(PhantomData<fn() -> T>);

impl<T> Factory<T> {
    /// The value to list in the registry.
    pub const ENTRY: Self = Self(PhantomData);
}

impl<T: OperatorConfig> fmt::Debug for Factory<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::NAME)
    }
}

impl<T: OperatorConfig> OperatorFactory for Factory<T> {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn section(&self) -> Option<SectionKind> {
        T::SECTION
    }

    fn columns(&self) -> &'static [Column] {
        T::COLUMNS
    }

    fn statistics(&self) -> &'static [StatisticKind] {
        T::STATISTICS
    }

    fn from_job(&self, context: &JobContext<'_>) -> Result<Option<OperatorSpec>, Problem> {
        Ok(T::from_job(context)?.map(OperatorSpec::from))
    }
}

/// An operator with its config.
#[derive(Clone)]
pub struct OperatorSpec(Arc<dyn ErasedConfig>);

/// A config of erased type.
trait ErasedConfig: fmt::Debug + Send + Sync {
    fn name(&self) -> &'static str;
    fn output_schema(&self, input: &Schema) -> SchemaRef;
    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError>;
    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)>;
    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64;
    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError>;
    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError>;
    fn equals(&self, other: &dyn ErasedConfig) -> bool;
    fn as_any(&self) -> &dyn Any;
}

impl<T: OperatorConfig> ErasedConfig for T {
    fn name(&self) -> &'static str {
        T::NAME
    }

    fn output_schema(&self, input: &Schema) -> SchemaRef {
        OperatorConfig::output_schema(self, input)
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        OperatorConfig::check(self, batch, context, violations)
    }

    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        OperatorConfig::sidecar_files(self)
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        OperatorConfig::bytes_per_token(self, before, vocab_size)
    }

    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        OperatorConfig::view(self, row)
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        OperatorConfig::operator(self, context)
    }

    fn equals(&self, other: &dyn ErasedConfig) -> bool {
        other.as_any().downcast_ref::<T>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl OperatorSpec {
    /// Name in plans, metrics and errors.
    pub fn name(&self) -> &'static str {
        self.0.name()
    }

    /// Returns the schema of the output for this schema of the input.
    pub fn output_schema(&self, input: &Schema) -> SchemaRef {
        self.0.output_schema(input)
    }

    /// Checks the operator's columns: see [`OperatorConfig::check`].
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        self.0.check(batch, context, violations)
    }

    /// Returns the files to write beside the shards: see [`OperatorConfig::sidecar_files`].
    pub fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        self.0.sidecar_files()
    }

    /// Returns what to show of a batch's only row: see [`OperatorConfig::view`].
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    pub fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        self.0.view(row)
    }

    /// Creates the operator for one split.
    ///
    /// # Errors
    /// Fails if the config cannot work with the resources of `context`.
    pub fn build(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        self.0.operator(context)
    }

    /// Returns the config if it has type `T`.
    pub fn config<T: OperatorConfig>(&self) -> Option<&T> {
        self.0.as_any().downcast_ref()
    }
}

impl<T: OperatorConfig> From<T> for OperatorSpec {
    fn from(config: T) -> Self {
        Self(Arc::new(config))
    }
}

impl fmt::Debug for OperatorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl PartialEq for OperatorSpec {
    fn eq(&self, other: &Self) -> bool {
        self.0.equals(other.0.as_ref())
    }
}

#[cfg(test)]
mod tests;
