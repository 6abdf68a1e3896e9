//! Which operators a job needs, with their configs resolved from job, tokenizer and teacher.

use std::collections::BTreeMap;

use stillhouse_operators::clean::CleanConfig;
use stillhouse_operators::extract::{ExtractConfig, NoiseConfig};
use stillhouse_operators::invariants::Limits;
use stillhouse_operators::operator::OperatorSpec;
use stillhouse_operators::pack::{Breaks, PackConfig};
use stillhouse_operators::partitions::PartitionsConfig;
use stillhouse_operators::subtokens::SubtokensConfig;
use stillhouse_operators::tokenize::TokenizeConfig;
use stillhouse_operators::vocabulary::{Role, Vocabulary};
use stillhouse_schemas::columns::Rows;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::spec::{JobSpec, Remainder};

use crate::error::{ErrorKind, PipelineError, Result};
use crate::job::PreparedTeacher;

/// Sequences of one batch in a job without a teacher.
const ROWS_PER_BATCH: usize = 64;

/// Sequences of one forward pass of the teacher, which are also one record batch.
///
/// Part of what decides the bytes of a shard: floating point may depend on the shape of a batch.
pub fn rows_per_batch(spec: &JobSpec) -> usize {
    match &spec.extract {
        Some(extract) => (extract.teacher.batch_tokens / spec.pack.length).max(1) as usize,
        None => ROWS_PER_BATCH,
    }
}

/// Shape of the rows of a job.
pub fn rows(spec: &JobSpec) -> Rows {
    let length = spec.pack.length as usize;
    if spec.has_short_rows() { Rows::UpTo(length) } else { Rows::Fixed(length) }
}

/// The operators of a job, in order. The remainder rule of `pack` is that of `train`; see [`for_split`].
///
/// # Errors
/// When a config cannot work.
pub fn from_job(
    spec: &JobSpec,
    vocabulary: &Vocabulary,
    teacher: Option<&PreparedTeacher>,
    vocab_size: usize,
) -> Result<Vec<OperatorSpec>> {
    let rows = rows(spec);
    let piece_bytes = spec.input.piece_kilobytes as usize * 1000;
    let mut operators = vec![
        OperatorSpec::Clean(CleanConfig { detokenizer: spec.clean.detokenizer, piece_bytes }),
        OperatorSpec::Tokenize(TokenizeConfig { piece_bytes }),
        OperatorSpec::Pack(pack(spec, spec.pack.remainder, vocabulary)?),
    ];
    if let (Some(extract), Some(teacher)) = (&spec.extract, teacher) {
        operators.push(OperatorSpec::Extract(ExtractConfig {
            vocab_size,
            bos: teacher.bos,
            context: extract.context,
            batch_tokens: extract.teacher.batch_tokens as usize,
            noise: extract.noise.as_ref().map(|noise| NoiseConfig {
                codec: noise.codec,
                tolerance: noise.tolerance,
                condition: noise.condition,
                draws: noise.draws,
                precision: noise.resolved_precision(),
                seed: spec.noise_seed(),
            }),
            topk: extract.topk as usize,
            rows,
        }));
    }
    if let Some(config) = &spec.subtokens {
        let config = SubtokensConfig::new(vocab_size, config.length, rows)
            .map_err(|e| PipelineError::new(ErrorKind::Usage, e.to_string()))?;
        operators.push(OperatorSpec::Subtokens(config));
    }
    if let Some(config) = &spec.partitions {
        operators.push(OperatorSpec::Partitions(PartitionsConfig::new(config, spec.seed, rows)));
    }
    Ok(operators)
}

fn pack(spec: &JobSpec, remainder: Remainder, vocabulary: &Vocabulary) -> Result<PackConfig> {
    PackConfig::new(&spec.pack, remainder, rows(spec), spec.has_padding(), rows_per_batch(spec), vocabulary)
        .map_err(|e| PipelineError::new(ErrorKind::Usage, e.to_string()))
}

/// The operators of one data set split: `train` and a holdout may differ in what happens to the remainder.
///
/// # Errors
/// As [`from_job`].
pub fn for_split(
    spec: &JobSpec,
    operators: &[OperatorSpec],
    dataset_split: &str,
    vocabulary: &Vocabulary,
) -> Result<Vec<OperatorSpec>> {
    let mut operators = operators.to_vec();
    for operator in &mut operators {
        if let OperatorSpec::Pack(config) = operator {
            *config = pack(spec, spec.remainder_of(dataset_split), vocabulary)?;
        }
    }
    Ok(operators)
}

/// What the rows of a job must keep to, where they are written and where they are read. `special_tokens` are by role, as in the manifest.
pub fn limits(
    job: &JobSpec,
    vocab_size: usize,
    special_tokens: &BTreeMap<String, SpecialToken>,
    split: SplitId,
) -> Limits {
    let rows = rows(job);
    let id = |role: Role| special_tokens.get(role.name()).map(|token| token.id);
    let subtokens = job.subtokens.as_ref().and_then(|s| SubtokensConfig::new(vocab_size, s.length, rows).ok());
    Limits {
        vocab_size,
        length: job.pack.length as usize,
        split,
        draws: job.extract.as_ref().and_then(|e| e.noise.as_ref()).map_or(1, |n| n.draws as usize),
        topk: job.extract.as_ref().map_or(0, |e| e.topk as usize),
        subtokens: subtokens.map(|s| (s.base, s.length)),
        breaks: Breaks::recorded(job.tokenizer.special_tokens, id(Role::Bos), id(Role::Eos)),
        partitions: job.partitions.as_ref().map(|p| PartitionsConfig::new(p, job.seed, rows)),
    }
}
