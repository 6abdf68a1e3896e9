//! The teacher pass: log-probabilities, posterior Gumbel noise and top-k, from one forward pass per batch.
//!
//! | column | from | shape |
//! |---|---|---|
//! | `logprob` | ln softmax(l)\[x\], natural log | \[L\] f32 |
//! | `noise_count`, `noise_index`, `noise_logprob` | codec `replay` | \[D, L\], \[*\], \[*\] |
//! | `noise` | codec `dense`: ξ | \[D, L, V\] f16 or f32 |
//! | columns of signals: `topk_index`, `entropy`, … | see `stillhouse_signals` | |
//! | `hidden_states` | states of layers, see `hidden` | \[L, layers, H\] f16 or f32 |
//!
//! A position that the teacher does not predict (given, or padding) is certain: `logprob` is 0, there are no
//! corrections, and dense noise is prior noise.
//! Paper: Gumbel Distillation, Algorithm 1 and Theorem 4.1.
//!
//! Cost: the teacher's forward pass, H·V multiplications per token for the logits, and for noise about 40 operations
//! per vocabulary entry and draw. Memory: the hidden states of a batch, one slice of logits, and the columns of a
//! batch.

mod collect;
mod config;
mod extractor;
mod hidden;
mod invariants;
mod loosen;
pub mod pass;
mod signals;
#[cfg(test)]
mod tests;
mod view;

pub use extractor::Workspace;
pub(crate) use hidden::HiddenStatesBuilder;
pub use hidden::{HiddenConfig, StoredStates};
pub use loosen::{LOOSENED_COLUMNS, NoiseLoosener};
pub use pass::{PredictedPosition, Sequence, Slice, SliceVisitor};
pub use signals::{JobSignals, StoredSignals};
pub use stillhouse_teacher::stillhouse_gpu::extract::MAX_TOPK as MAX_TOPK_ON_GPU;

use std::sync::Arc;

use arrow::array::{BooleanArray, Int32Array, RecordBatch};
use arrow::datatypes::{DataType, Field};
use stillhouse_noise::{ExtractedColumns, NoiseError, Tolerance, ValueType, Values};
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::manifest::Statistics;
use stillhouse_schemas::spec::{NoiseCodec, NoisePrecision, TeacherContext};
use stillhouse_signals::StoredSignal;
use stillhouse_teacher::{Logits, Teacher, TeacherInfo};

use crate::operator::{Emit, Meter, Operator, OperatorError, SharedStatistics, SplitContext, extend_schema};
use crate::rows::{ListRows, sequence_ids};
use collect::Collector;
use pass::{TeacherPass, predicted};

const NAME: &str = "extract";
/// Bound on the bytes of dense noise and hidden states in memory at once. One row is always allowed.
const MAX_BUFFERED_BYTES: usize = 64 << 20;

/// Configuration of the operator.
#[derive(Debug, Clone, PartialEq)]
pub struct ExtractConfig {
    /// Vocabulary size V.
    pub vocab_size: usize,
    /// Token that the teacher sees before the first one of a run.
    pub bos: u32,
    /// Context of each prediction: the whole sequence or one document.
    pub context: TeacherContext,
    /// Tokens per forward pass.
    pub batch_tokens: usize,
    /// Noise, if any.
    pub noise: Option<NoiseConfig>,
    /// Signals.
    pub signals: JobSignals,
    /// Hidden states, if any.
    pub hidden: Option<HiddenConfig>,
    /// Row length: fixed, or up to a maximum.
    pub rows: RowLength,
}

/// Configuration of the noise.
#[derive(Debug, Clone, PartialEq)]
pub struct NoiseConfig {
    /// Encoding of the stored noise.
    pub codec: NoiseCodec,
    /// Largest total variation per token between the teacher's distribution and the stored one.
    pub tolerance: f64,
    /// Whether to guarantee that the observed token is the argmax of l + ξ with ξ as stored.
    pub condition: bool,
    /// Independent noise draws per token, D.
    pub draws: u32,
    /// Type of stored values.
    pub precision: NoisePrecision,
    /// Seed of the replayed noise.
    pub seed: u64,
}

impl NoiseConfig {
    fn arrow_type(&self) -> DataType {
        match self.precision {
            NoisePrecision::F16 => DataType::Float16,
            NoisePrecision::F32 => DataType::Float32,
        }
    }

    fn value_type(&self) -> ValueType {
        match self.precision {
            NoisePrecision::F16 => ValueType::F16,
            NoisePrecision::F32 => ValueType::F32,
        }
    }
}

impl ExtractConfig {
    /// Returns the fields of the columns that the operator adds.
    pub fn fields(&self) -> Vec<Field> {
        let mut fields = vec![self.rows.field(columns::LOGPROB, DataType::Float32, None, None)];
        if let Some(noise) = &self.noise {
            let draws = noise.draws as usize;
            match noise.codec {
                NoiseCodec::Replay => {
                    let count = columns::noise_count_type(self.vocab_size, noise.tolerance);
                    fields.push(self.rows.field(columns::NOISE_COUNT, count, Some(draws), None));
                    fields.push(columns::list_field(columns::NOISE_INDEX, columns::noise_index_type(self.vocab_size)));
                    fields.push(columns::list_field(columns::NOISE_LOGPROB, noise.arrow_type()));
                }
                NoiseCodec::Dense => {
                    let length = match self.rows {
                        RowLength::Fixed(l) => l.to_string(),
                        RowLength::UpTo(_) => "*".into(),
                    };
                    let shape = format!("[{draws},{length},{}]", self.vocab_size);
                    fields.push(
                        columns::list_field(columns::NOISE, noise.arrow_type())
                            .with_metadata([(columns::SHAPE.to_owned(), shape)].into()),
                    );
                }
            }
        }
        fields.extend(signals::fields(&self.signals, self.rows, self.vocab_size));
        fields.extend(self.hidden.iter().map(|hidden| hidden.field(self.rows)));
        fields
    }

    /// Checks that this teacher can serve this config.
    ///
    /// # Errors
    /// Fails if the teacher's vocabulary size or hidden size differs from the job's, or if the noise cannot be stored.
    pub fn check(&self, teacher: &TeacherInfo) -> Result<(), OperatorError> {
        let config = |message: String| OperatorError::Config { operator: NAME, message };
        if teacher.vocab_size != self.vocab_size {
            return Err(config(format!(
                "the teacher has {} vocabulary entries, the job {}",
                teacher.vocab_size, self.vocab_size
            )));
        }
        if let Some(hidden) = self.hidden.as_ref().filter(|hidden| hidden.width != teacher.hidden_size) {
            let (width, expected) = (teacher.hidden_size, hidden.width);
            return Err(config(format!("the teacher's hidden states are {width} wide, the job's {expected}")));
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
        Ok(())
    }

    /// Builds the operator, which runs the teacher itself.
    ///
    /// # Errors
    /// Fails without a teacher, or where [`ExtractConfig::check`] does.
    pub fn build(&self, context: &SplitContext) -> Result<Extract, OperatorError> {
        let none = || OperatorError::Config { operator: NAME, message: "needs a teacher".into() };
        let teacher = context.teacher.clone().ok_or_else(none)?;
        self.check(teacher.info())?;
        let (statistics, meter) = (context.statistics.clone(), Arc::clone(&context.meter));
        Ok(Extract {
            config: Arc::new(self.clone()),
            teacher,
            statistics,
            meter,
            logits: None,
            workspace: Workspace::default(),
        })
    }

    /// Returns the rows to process at once: a whole batch, or with dense noise or hidden states as many as fit 64 MB.
    pub fn max_rows_per_part(&self) -> usize {
        let dense = match &self.noise {
            Some(noise) if noise.codec == NoiseCodec::Dense => noise.draws as usize * self.vocab_size * 4,
            _ => 0,
        };
        let states = self.hidden.as_ref().map_or(0, |hidden| hidden.values_per_token() * 4);
        (MAX_BUFFERED_BYTES.checked_div((dense + states) * self.rows.length())).unwrap_or(usize::MAX).max(1)
    }

    /// Returns the rows of generated text to process at once. A batch stays in memory until its last text ends, so its
    /// signals and hidden states must fit 64 MB.
    pub fn max_generated_rows(&self) -> usize {
        let signals = self.signal_bytes();
        let states = self.hidden.as_ref().map_or(0, HiddenConfig::bytes_per_token);
        (MAX_BUFFERED_BYTES.checked_div((signals + states) * self.rows.length())).unwrap_or(usize::MAX).max(1)
    }

    /// Returns an upper bound on the bytes of one position's signals before they become columns.
    fn signal_bytes(&self) -> usize {
        let bytes = |signal: &Arc<dyn StoredSignal>| {
            signal.columns().len() * size_of::<Values>() + signal.max_values(self.vocab_size) * size_of::<f32>()
        };
        self.signals.iter().map(bytes).sum()
    }

    /// Returns the layers whose hidden states the job stores.
    pub fn hidden_layers(&self) -> &[usize] {
        self.hidden.as_ref().map_or(&[], |hidden| &hidden.layers)
    }
}

/// Splits a batch, in order, into parts of at most `max_rows` rows.
pub fn parts(batch: &RecordBatch, max_rows: usize) -> impl Iterator<Item = RecordBatch> + use<> {
    let (batch, rows) = (batch.clone(), batch.num_rows());
    let step = max_rows.min(rows).max(1);
    (0..rows).step_by(step).map(move |start| batch.slice(start, step.min(rows - start)))
}

/// The operator for engines in which it runs the teacher itself.
pub struct Extract {
    config: Arc<ExtractConfig>,
    teacher: Arc<dyn Teacher>,
    statistics: SharedStatistics,
    meter: Arc<dyn Meter>,
    logits: Option<Logits>,
    workspace: Workspace,
}

impl Operator for Extract {
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        for part in parts(batch, self.config.max_rows_per_part()) {
            let forward = BatchForward::new(&self.config, &part, Arc::clone(&self.meter))?;
            let mut columns = forward.columns(part)?;
            let mut logits = match self.logits.take() {
                Some(logits) => logits,
                None => self.teacher.buffer()?,
            };
            let ran = forward.run(self.teacher.as_ref(), &mut logits, &mut |slice| {
                let extracted = columns.extract(&slice, &mut self.workspace)?;
                columns.store(&slice.positions, extracted, &slice.states)?;
                Ok(slice.logits)
            });
            self.logits = Some(logits);
            ran.map_err(|error| forward.locate_non_finite(self.teacher.as_ref(), error))?;
            let (batch, statistics) = columns.finish()?;
            self.statistics.lock().add(&statistics);
            emit(batch)?;
        }
        Ok(())
    }
}

/// The half of the work on a batch that needs the teacher. [`ColumnBuilder`], the other half, may run on another thread
/// at the same time.
#[derive(Debug, Clone)]
pub struct BatchForward {
    config: Arc<ExtractConfig>,
    sequences: Arc<Vec<Sequence>>,
    meter: Arc<dyn Meter>,
}

impl BatchForward {
    /// Prepares the teacher pass over a batch of packed sequences.
    ///
    /// # Errors
    /// Fails if the batch does not hold packed sequences.
    pub fn new(config: &Arc<ExtractConfig>, batch: &RecordBatch, meter: Arc<dyn Meter>) -> Result<Self, OperatorError> {
        let sequences = Arc::new(sequences(batch).map_err(OperatorError::arrow(NAME))?);
        Ok(Self { config: Arc::clone(config), sequences, meter })
    }

    /// Creates the half that builds the columns of the same batch.
    ///
    /// # Errors
    /// Fails if noise cannot be made with this config.
    pub fn columns(&self, batch: RecordBatch) -> Result<ColumnBuilder, OperatorError> {
        let collector = Collector::new(&self.config, &self.sequences, &self.meter)?;
        Ok(ColumnBuilder { config: Arc::clone(&self.config), batch, collector })
    }

    /// Returns the meter that counts the work on the batch.
    pub fn meter(&self) -> &dyn Meter {
        self.meter.as_ref()
    }

    /// Runs the teacher over the batch and passes every predicted position to `visit` in exactly one slice. `logits` is
    /// the buffer for the first slice.
    ///
    /// # Errors
    /// Fails if the teacher or `visit` does.
    pub fn run(
        &self,
        teacher: &dyn Teacher,
        logits: &mut Logits,
        visit: &mut SliceVisitor<'_>,
    ) -> Result<(), OperatorError> {
        self.pass(teacher).run(&self.sequences, logits, visit)
    }

    /// Replaces a non-finite-logit error by one that names the position it comes from: see
    /// [`pass::TeacherPass::locate_non_finite`]. Returns other errors unchanged.
    pub fn locate_non_finite(&self, teacher: &dyn Teacher, error: OperatorError) -> OperatorError {
        self.pass(teacher).locate_non_finite(&self.sequences, error)
    }

    fn pass<'a>(&'a self, teacher: &'a dyn Teacher) -> TeacherPass<'a> {
        TeacherPass {
            teacher,
            bos: self.config.bos,
            context: self.config.context,
            batch_tokens: self.config.batch_tokens,
            hidden_layers: self.config.hidden_layers(),
            meter: self.meter.as_ref(),
        }
    }
}

/// The half of the work on a batch that builds its columns.
pub struct ColumnBuilder {
    config: Arc<ExtractConfig>,
    batch: RecordBatch,
    collector: Collector,
}

impl ColumnBuilder {
    /// Extracts the columns' values from a slice of logits. The logits are not needed afterwards.
    ///
    /// # Errors
    /// Fails if a logit is not finite, or the device fails.
    pub fn extract(&mut self, slice: &Slice, workspace: &mut Workspace) -> Result<ExtractedColumns, OperatorError> {
        self.collector.extract(slice, workspace)
    }

    /// Stores the values extracted at these positions and their hidden states `[n, layers, H]`.
    ///
    /// # Errors
    /// Fails if a value does not fit its column.
    pub fn store(
        &mut self,
        positions: &[PredictedPosition],
        extracted: ExtractedColumns,
        states: &[f32],
    ) -> Result<(), OperatorError> {
        self.collector.store(positions, extracted, states)
    }

    /// Returns the batch with its new columns, after the last slice, and the numbers to add to the split's statistics.
    ///
    /// # Errors
    /// Fails if a value does not fit its column.
    pub fn finish(self) -> Result<(RecordBatch, Statistics), OperatorError> {
        let (arrays, statistics) = self.collector.finish()?;
        let columns = self.batch.columns().iter().cloned().chain(arrays).collect();
        let schema = extend_schema(&self.batch.schema(), self.config.fields());
        Ok((RecordBatch::try_new(schema, columns).map_err(OperatorError::arrow(NAME))?, statistics))
    }
}

/// The error for a position whose hidden states cannot be stored.
pub(crate) fn hidden_state_error((sequence, position): (u64, usize), message: String) -> OperatorError {
    OperatorError::Data { operator: NAME, place: format!("sequence {sequence}, position {position}"), message }
}

pub(crate) fn noise_error(e: NoiseError) -> OperatorError {
    match e {
        NoiseError::NonFiniteLogit { sequence_id, position, index, value } => {
            OperatorError::NotFinite { sequence_id, position, token: index, value }
        }
        other => OperatorError::Data { operator: NAME, place: "noise".into(), message: other.to_string() },
    }
}

/// Reads the packed sequences of a batch.
///
/// # Errors
/// Fails if a column is missing or has another type.
pub fn sequences(batch: &RecordBatch) -> Result<Vec<Sequence>, arrow::error::ArrowError> {
    let ids = sequence_ids(batch)?;
    let tokens = ListRows::from_batch(batch, columns::INPUT_IDS)?;
    let token_values = tokens.values::<Int32Array>(columns::INPUT_IDS)?.values();
    let offsets = ListRows::from_batch(batch, columns::DOCUMENT_OFFSETS)?;
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
