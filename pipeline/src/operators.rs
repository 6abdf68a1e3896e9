//! Which operators a job needs, with their configs resolved from job, tokenizer and teacher.

use stillhouse_operators::clean::CleanConfig;
use stillhouse_operators::extract::{ExtractConfig, NoiseConfig};
use stillhouse_operators::operator::OperatorSpec;
use stillhouse_operators::pack::PackConfig;
use stillhouse_operators::partitions::PartitionsConfig;
use stillhouse_operators::subtokens::{self, SubtokensConfig};
use stillhouse_operators::tokenize::TokenizeConfig;
use stillhouse_operators::vocabulary::{Role, Vocabulary};
use stillhouse_schemas::columns::Rows;
use stillhouse_schemas::spec::{JobSpec, Separator};

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
        OperatorSpec::Pack(PackConfig {
            mode: spec.pack.mode,
            boundary: spec.pack.boundary,
            remainder: spec.pack.remainder,
            separator: match spec.pack.separator {
                Separator::Eos => vocabulary.special(Role::Eos),
                Separator::None => None,
            },
            bos: vocabulary.special(Role::Bos),
            eos: vocabulary.special(Role::Eos),
            pad: vocabulary.special(Role::Pad),
            rows,
            has_mask: spec.has_padding(),
            rows_per_batch: rows_per_batch(spec),
        }),
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
                draws: noise.draws,
                precision: noise.resolved_precision(),
                seed: spec.noise_seed(),
            }),
            topk: extract.topk as usize,
            rows,
        }));
    }
    if let Some(config) = &spec.subtokens {
        let base = subtokens::checked_base(vocab_size as u64, config.length)
            .map_err(|e| PipelineError::new(ErrorKind::Usage, format!("subtokens.length: {e}")))?;
        operators.push(OperatorSpec::Subtokens(SubtokensConfig { base, length: config.length, rows }));
    }
    if let Some(config) = &spec.partitions {
        operators.push(OperatorSpec::Partitions(PartitionsConfig {
            views: config.views,
            schedule: config.schedule,
            power: config.power,
            sampling: config.sampling,
            eps: config.eps,
            seed: spec.seed,
            rows,
        }));
    }
    Ok(operators)
}

/// The operators of one data set split: `train` and a holdout may differ in what happens to the remainder.
pub fn for_split(spec: &JobSpec, operators: &[OperatorSpec], dataset_split: &str) -> Vec<OperatorSpec> {
    let mut operators = operators.to_vec();
    for operator in &mut operators {
        if let OperatorSpec::Pack(config) = operator {
            config.remainder = spec.remainder_of(dataset_split);
        }
    }
    operators
}
