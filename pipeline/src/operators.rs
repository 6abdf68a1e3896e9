//! Which operators a job needs, with their configs resolved from job, tokenizer and teacher.

use std::collections::BTreeMap;

use stillhouse_operators::config::{JobFacts, SpecialIds};
pub use stillhouse_operators::config::{rows, rows_per_batch};
use stillhouse_operators::extract::ExtractConfig;
use stillhouse_operators::generate::GenerateConfig;
use stillhouse_operators::invariants::Limits;
use stillhouse_operators::registry::{self, OperatorSpec};
pub use stillhouse_operators::registry::{columns_table, job_format};
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{Manifest, SpecialToken};
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sequence_range::SequenceRange;
use stillhouse_schemas::spec::{JobSpec, Permutation};

/// Fills in what operators need and the job file does not say: the numbers of a permutation, and H, the width of the teacher's states.
pub(crate) fn fill_in(spec: &mut JobSpec, numbers: Option<Permutation>, hidden_size: Option<usize>) {
    if let Some(subtokens) = &mut spec.subtokens {
        subtokens.numbers = numbers;
    }
    if let Some(states) = spec.extract.as_mut().and_then(|extract| extract.hidden_states.as_mut()) {
        states.width = hidden_size.and_then(|size| u32::try_from(size).ok());
    }
}

/// The operators of a job, in order, each with one config for all splits.
///
/// # Errors
/// Everything that this vocabulary cannot give.
pub fn from_job(spec: &JobSpec, vocabulary: &Vocabulary, vocab_size: usize) -> Result<Vec<OperatorSpec>, Vec<Problem>> {
    registry::of_job(&JobFacts { spec, vocab_size, special_ids: SpecialIds::of(vocabulary) })
}

/// What is asked of the teacher, over text that was given or that it writes.
pub(crate) fn extract_of(operators: &[OperatorSpec]) -> Option<&ExtractConfig> {
    operators.iter().find_map(|operator| {
        let written = || operator.config::<GenerateConfig>().map(|generate| &generate.extract);
        operator.config::<ExtractConfig>().or_else(written)
    })
}

/// What the rows of a job must keep to, where they are written and where they are read. `special_tokens` are by role, as in the manifest.
pub fn limits(
    job: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
    (split, place): (SplitId, Option<SequenceRange>),
) -> Limits {
    let (operators, _) = recorded(job, vocab_size, special_tokens);
    Limits { vocab_size, length: job.pack.length as usize, split, place, operators }
}

/// The operators that made a data set, as far as its manifest says enough, and why others cannot be known.
pub fn of_manifest(manifest: &Manifest) -> (Vec<OperatorSpec>, Vec<Problem>) {
    recorded(&manifest.job, manifest.vocab_size as usize, &manifest.tokenizer.special_tokens)
}

fn recorded(
    spec: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
) -> (Vec<OperatorSpec>, Vec<Problem>) {
    let special_ids = SpecialIds::recorded(special_tokens, spec.tokenizer.special_tokens);
    registry::resolved(&JobFacts { spec, vocab_size, special_ids })
}
