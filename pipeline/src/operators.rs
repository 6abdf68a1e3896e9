//! Which operators a job needs, with their configs resolved from job, tokenizer and teacher.

use std::collections::BTreeMap;

use stillhouse_operators::declaration::{JobFacts, SpecialIds};
pub use stillhouse_operators::declaration::{rows, rows_per_batch};
use stillhouse_operators::invariants::Limits;
use stillhouse_operators::pack::Breaks;
use stillhouse_operators::partitions::PartitionsConfig;
use stillhouse_operators::registry::{self, OperatorSpec};
use stillhouse_operators::subtokens::SubtokensConfig;
use stillhouse_operators::vocabulary::Vocabulary;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::spec::JobSpec;

/// The operators of a job, in order, each with one config for all splits.
///
/// # Errors
/// Everything that this vocabulary cannot give.
pub fn from_job(spec: &JobSpec, vocabulary: &Vocabulary, vocab_size: usize) -> Result<Vec<OperatorSpec>, Vec<Problem>> {
    registry::of_job(&JobFacts { spec, vocab_size, special_ids: SpecialIds::of(vocabulary) })
}

/// What the rows of a job must keep to, where they are written and where they are read. `special_tokens` are by role, as in the manifest.
pub fn limits(
    job: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
    split: SplitId,
) -> Limits {
    let rows = rows(job);
    let subtokens = job.subtokens.as_ref().and_then(|s| SubtokensConfig::new(vocab_size, s.length, rows).ok());
    Limits {
        vocab_size,
        length: job.pack.length as usize,
        split,
        draws: job.extract.as_ref().and_then(|e| e.noise.as_ref()).map_or(1, |n| n.draws as usize),
        topk: job.extract.as_ref().map_or(0, |e| e.topk as usize),
        subtokens: subtokens.map(|s| (s.base, s.length)),
        breaks: Breaks::of(&SpecialIds::recorded(special_tokens, job.tokenizer.special_tokens)),
        partitions: job.partitions.as_ref().map(|p| PartitionsConfig::new(p, job.seed, rows)),
    }
}
