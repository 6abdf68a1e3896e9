//! The list of operators in pipeline order, one line each. Each operator declares everything else in its own file.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, SpecialToken};
use stillhouse_schemas::parse::JobFormat;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sequence_range::SequenceRange;
use stillhouse_schemas::spec::JobSpec;

use crate::config::{Column, JobContext, SpecialIds, StatisticKind};
use crate::extract::ExtractConfig;
use crate::generate::GenerateConfig;
use crate::invariants::CheckContext;
use crate::operator_spec::{Factory, OperatorFactory, OperatorSpec, RowChecks};

/// The operators of Stillhouse, in the order in which they run.
pub const OPERATORS: &[&dyn OperatorFactory] = &[
    &Factory::<crate::clean::CleanConfig>::ENTRY,
    &Factory::<crate::block_urls::BlockUrlsConfig>::ENTRY,
    &Factory::<crate::filter::FilterConfig>::ENTRY,
    &Factory::<crate::decontaminate::DecontaminateConfig>::ENTRY,
    &Factory::<crate::deduplicate::DeduplicateConfig>::ENTRY,
    &Factory::<crate::tokenize::TokenizeConfig>::ENTRY,
    &Factory::<crate::chat::ChatConfig>::ENTRY,
    &Factory::<crate::pack::PackConfig>::ENTRY,
    &Factory::<crate::grid::GridConfig>::ENTRY,
    &Factory::<crate::extract::ExtractConfig>::ENTRY,
    &Factory::<crate::generate::PromptsConfig>::ENTRY,
    &Factory::<crate::generate::GenerateConfig>::ENTRY,
    &Factory::<crate::carry::CarryConfig>::ENTRY,
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
        match operator.resolve(context) {
            Ok(spec) => specs.extend(spec),
            Err(problem) => problems.push(problem),
        }
    }
    let known =
        |key: &str| operators().iter().any(|operator| operator.section().is_some_and(|section| section.key == key));
    let unknown = context.spec.sections.keys().filter(|key| !known(key));
    problems.extend(unknown.map(|key| Problem::missing(key, "belongs to an operator that this program does not have")));
    (specs, problems)
}

/// The config of `extract` among these operators: over given text, or over the text that the teacher writes.
pub fn extract_config(operators: &[OperatorSpec]) -> Option<&ExtractConfig> {
    operators.iter().find_map(|operator| {
        let written = || operator.config::<GenerateConfig>().map(|generate| &generate.extract);
        operator.config::<ExtractConfig>().or_else(written)
    })
}

/// Returns the checks that the rows of a split must pass. `special_tokens` are by role, as in the manifest.
pub fn row_checks(
    job: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
    (split, sequence_range): (SplitId, Option<SequenceRange>),
) -> RowChecks {
    let (operators, _) = resolve_manifest(job, vocab_size, special_tokens);
    let context = CheckContext { vocab_size, length: job.pack.length as usize, split, sequence_range };
    RowChecks { context, operators }
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

/// Returns the names of the files that operators may write beside the shards.
pub fn sidecar_files() -> impl Iterator<Item = &'static str> {
    operators().iter().flat_map(|operator| operator.sidecar_files()).copied()
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

/// Estimates the bytes per token of a data set with the columns of these operators, from measurements in
/// docs/benchmarks/noise.md.
pub fn bytes_per_token(operators: &[OperatorSpec], vocab_size: usize) -> f64 {
    operators.iter().fold(0.0, |before, operator| operator.bytes_per_token(before, vocab_size))
}

/// Estimates by how many bytes per token a data set may exceed [`bytes_per_token`] if the teacher predicts the text badly.
pub fn excess_bytes_per_token(operators: &[OperatorSpec], vocab_size: usize) -> f64 {
    operators.iter().map(|operator| operator.excess_bytes_per_token(vocab_size)).sum()
}

#[cfg(test)]
mod tests;
