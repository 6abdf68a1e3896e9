//! The teacher pass: log-probabilities, posterior Gumbel noise and top-k, from one forward pass per batch.
//!
//! | column | from | shape |
//! |---|---|---|
//! | `logprob` | ln softmax(l)\[x\], natural log | \[L\] f32 |
//! | `noise_count`, `noise_index`, `noise_logprob` | codec `replay` | \[D, L\], \[*\], \[*\] |
//! | `noise` | codec `dense`: ξ | \[D, L, V\] f16 or f32 |
//! | `topk_index`, `topk_logprob` | the k largest, descending | \[L, k\] |
//!
//! A position that is not predicted (given, or padding) is certain: `logprob` 0, no corrections, prior noise, and for
//! top-k the token itself with 0, other entries with −∞. Paper: Gumbel Distillation, Algorithm 1 and Theorem 4.1.
//!
//! Cost: the teacher's forward pass, H·V multiplications per token for the logits, and for noise about 40 operations
//! per vocabulary entry and draw. Memory: hidden states of a batch, one slice of logits, the columns of a batch.

mod collect;
mod declaration;
mod invariants;
pub mod pass;
#[cfg(test)]
mod tests;

pub use pass::Sequence;

use std::sync::Arc;

use arrow::array::{BooleanArray, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use serde::{Deserialize, Serialize};
use stillhouse_noise::{NoiseError, Tolerance, ValueType};
use stillhouse_schemas::columns::{self, Rows};
use stillhouse_schemas::spec::{NoiseCodec, NoisePrecision, TeacherContext};
use stillhouse_teacher::Teacher;

use crate::operator::{Counters, Emit, Operator, OperatorError, SplitContext, extended};
use crate::rows::{ListRows, sequence_ids};
use collect::Collector;
use pass::TeacherPass;

const NAME: &str = "extract";
/// Bytes of dense noise that are held at once, at least one row.
const DENSE_BYTES: usize = 64 << 20;

/// Config of the operator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ExtractConfig {
    /// V.
    pub vocab_size: usize,
    /// The token before the first one.
    pub bos: u32,
    /// What the teacher sees.
    pub context: TeacherContext,
    /// Tokens of one forward pass.
    pub batch_tokens: usize,
    /// Noise, if any.
    pub noise: Option<NoiseConfig>,
    /// k of the top-k; 0 for none.
    pub topk: usize,
    /// Shape of the rows.
    pub rows: Rows,
}

/// Config of the noise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NoiseConfig {
    /// How it is stored.
    pub codec: NoiseCodec,
    /// Largest total variation per token.
    pub tolerance: f64,
    /// Whether the observed token wins in l + ξ as it is stored.
    pub condition: bool,
    /// D.
    pub draws: u32,
    /// Type of stored values.
    pub precision: NoisePrecision,
    /// Seed of the replayed noise.
    pub seed: u64,
}

impl NoiseConfig {
    fn value_type(&self) -> DataType {
        match self.precision {
            NoisePrecision::F16 => DataType::Float16,
            NoisePrecision::F32 => DataType::Float32,
        }
    }

    fn stored(&self) -> ValueType {
        match self.precision {
            NoisePrecision::F16 => ValueType::F16,
            NoisePrecision::F32 => ValueType::F32,
        }
    }
}

impl ExtractConfig {
    /// The columns that the operator adds.
    pub fn fields(&self) -> Vec<Field> {
        let mut fields = vec![self.rows.field(columns::LOGPROB, DataType::Float32, None, None)];
        if let Some(noise) = &self.noise {
            let draws = noise.draws as usize;
            match noise.codec {
                NoiseCodec::Replay => {
                    let count = columns::noise_count_type(self.vocab_size, noise.tolerance);
                    fields.push(self.rows.field(columns::NOISE_COUNT, count, Some(draws), None));
                    fields.push(columns::list_field(columns::NOISE_INDEX, columns::noise_index_type(self.vocab_size)));
                    fields.push(columns::list_field(columns::NOISE_LOGPROB, noise.value_type()));
                }
                NoiseCodec::Dense => {
                    let length = match self.rows {
                        Rows::Fixed(l) => l.to_string(),
                        Rows::UpTo(_) => "*".into(),
                    };
                    let shape = format!("[{draws},{length},{}]", self.vocab_size);
                    fields.push(
                        columns::list_field(columns::NOISE, noise.value_type())
                            .with_metadata([(columns::SHAPE.to_owned(), shape)].into()),
                    );
                }
            }
        }
        if self.topk > 0 {
            let k = Some(self.topk);
            fields.push(self.rows.field(columns::TOPK_INDEX, DataType::Int32, None, k));
            fields.push(self.rows.field(columns::TOPK_LOGPROB, DataType::Float32, None, k));
        }
        fields
    }

    /// Makes the operator.
    ///
    /// # Errors
    /// Without a teacher, with one of another vocabulary, or with noise that cannot be stored.
    pub fn build(&self, context: &SplitContext) -> Result<Extract, OperatorError> {
        let config = |message: String| OperatorError::Config { operator: NAME, message };
        let teacher = context.teacher.clone().ok_or_else(|| config("needs a teacher".into()))?;
        if teacher.info().vocab_size != self.vocab_size {
            return Err(config(format!(
                "the teacher has {} vocabulary entries, the job {}",
                teacher.info().vocab_size,
                self.vocab_size
            )));
        }
        if let Some(noise) = &self.noise {
            Tolerance::new(noise.tolerance).map_err(|e| config(e.to_string()))?;
            let values = noise.draws as usize * self.rows.length() * self.vocab_size;
            if noise.codec == NoiseCodec::Dense && i32::try_from(values).is_err() {
                return Err(config(format!(
                    "dense noise of {values} values per row does not fit a list; use codec replay"
                )));
            }
        }
        Ok(Extract { config: self.clone(), teacher, context: context.clone() })
    }

    /// Rows that are worked on at once: all of a batch, but for dense noise only what fits [`DENSE_BYTES`].
    fn rows_at_once(&self) -> usize {
        match &self.noise {
            Some(noise) if noise.codec == NoiseCodec::Dense => {
                (DENSE_BYTES / (noise.draws as usize * self.rows.length() * self.vocab_size * 4).max(1)).max(1)
            }
            _ => usize::MAX,
        }
    }
}

/// The operator.
pub struct Extract {
    config: ExtractConfig,
    teacher: Arc<dyn Teacher>,
    context: SplitContext,
}

impl Operator for Extract {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let step = self.config.rows_at_once().min(batch.num_rows()).max(1);
        for start in (0..batch.num_rows()).step_by(step) {
            let part = batch.slice(start, step.min(batch.num_rows() - start));
            emit(self.extract(&part)?)?;
        }
        Ok(())
    }
}

impl Extract {
    fn extract(&self, batch: &RecordBatch) -> Result<RecordBatch, OperatorError> {
        let sequences = sequences(batch).map_err(OperatorError::arrow(NAME))?;
        let counters = &self.context.counters;
        let mut collector = Collector::new(&self.config, &sequences, &counters.extract_nanos)?;
        let pass = TeacherPass {
            teacher: self.teacher.as_ref(),
            bos: self.config.bos,
            context: self.config.context,
            batch_tokens: self.config.batch_tokens,
            teacher_nanos: &counters.teacher_nanos,
        };
        let ran = pass.run(&sequences, &mut |positions, logits| {
            collector.collect(positions, logits)?;
            Counters::add(&counters.teacher_tokens, positions.len() as u64);
            Ok(())
        });
        ran.map_err(|error| pass.origin(&sequences, error))?;
        let (arrays, statistics) = collector.finish()?;
        self.context.statistics.lock().add(&statistics);
        let columns = batch.columns().iter().cloned().chain(arrays).collect();
        let schema = extended(&batch.schema(), self.config.fields());
        RecordBatch::try_new(schema, columns).map_err(OperatorError::arrow(NAME))
    }
}

pub(crate) fn noise_error(e: NoiseError) -> OperatorError {
    match e {
        NoiseError::NonFiniteLogit { sequence_id, position, index, value } => {
            OperatorError::NotFinite { sequence_id, position, token: index, value }
        }
        other => OperatorError::Data { operator: NAME, place: "noise".into(), message: other.to_string() },
    }
}

/// The sequences of a batch.
///
/// # Errors
/// When a column is missing or has another type.
pub fn sequences(batch: &RecordBatch) -> Result<Vec<Sequence>, arrow::error::ArrowError> {
    let ids = sequence_ids(batch)?;
    let tokens = ListRows::of(batch, columns::INPUT_IDS)?;
    let token_values = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    let offsets = ListRows::of(batch, columns::DOCUMENT_OFFSETS)?;
    let offset_values = offsets.values::<Int32Array>(columns::DOCUMENT_OFFSETS)?.values();
    let mask = match batch.column_by_name(columns::ATTENTION_MASK) {
        Some(column) => Some(ListRows::new(columns::ATTENTION_MASK, column)?),
        None => None,
    };
    let mask_values = match &mask {
        Some(mask) => Some(mask.values::<BooleanArray>(columns::ATTENTION_MASK)?),
        None => None,
    };
    Ok((0..batch.num_rows())
        .map(|row| {
            let range = tokens.range(row);
            let valid = match (&mask, mask_values) {
                (Some(mask), Some(values)) => mask.range(row).take_while(|&i| values.value(i)).count(),
                _ => range.len(),
            };
            Sequence {
                id: ids.value(row),
                tokens: token_values[range].iter().map(|&id| id as u32).collect(),
                valid,
                offsets: offset_values[offsets.range(row)].iter().map(|&o| o as usize).collect(),
            }
        })
        .collect())
}
