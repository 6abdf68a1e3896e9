//! What an operator is: a serde config, a check, and a transform that an engine drives.
//!
//! One adapter in the pipeline (`OperatorExec`) runs any [`Operator`] inside DataFusion; an operator gets record batches
//! in order and hands record batches on through `emit`, which keeps them until they are pulled. So what it emits of one batch is bounded
//! by that batch, and memory by the batches in flight.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arrow::array::RecordBatch;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::Statistics;
use stillhouse_schemas::sequence_range::SequenceRange;
use stillhouse_teacher::Teacher;

pub use crate::registry::OperatorSpec;
use crate::vocabulary::Vocabulary;

/// What can go wrong in an operator. None of it gets better by trying again on the same input.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// The input batch or the built output is not what the schema says.
    #[error("{operator}: {source}")]
    Arrow {
        /// Which operator.
        operator: &'static str,
        /// What Arrow says.
        source: ArrowError,
    },
    /// A configuration that cannot work, found when the operator is built.
    #[error("{operator}: {message}")]
    Config {
        /// Which operator.
        operator: &'static str,
        /// What was got and what is valid.
        message: String,
    },
    /// A document or a sequence that cannot be processed.
    #[error("{operator}: {place}: {message}")]
    Data {
        /// Which operator.
        operator: &'static str,
        /// The document or the sequence.
        place: String,
        /// What was got and what is valid.
        message: String,
    },
    /// The teacher gave a logit that is no number.
    #[error(
        "extract: sequence {sequence_id}, position {position}: the teacher's logit of token {token} is {value}; if the \
         teacher runs in f16, try bf16 or f32, otherwise look for NaN or infinite numbers in its weights"
    )]
    NotFinite {
        /// Packed sequence.
        sequence_id: u64,
        /// The first position that goes wrong, also without what comes after it.
        position: u32,
        /// The first such vocabulary entry.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// The teacher failed.
    #[error("extract: {0}")]
    Teacher(#[from] stillhouse_teacher::TeacherError),
    /// The consumer is gone: the job was cancelled or another stage failed.
    #[error("the next stage stopped")]
    Stopped,
}

impl OperatorError {
    /// For `map_err` on Arrow results.
    pub fn arrow(operator: &'static str) -> impl Fn(ArrowError) -> Self {
        move |source| Self::Arrow { operator, source }
    }
}

/// Takes an output batch on.
pub type Emit<'a> = dyn FnMut(RecordBatch) -> Result<(), OperatorError> + 'a;

/// A transform over the batches of one split, driven in order.
pub trait Operator: Send {
    /// Takes one input batch and emits any number of output batches, whose size together is bounded by the input's.
    ///
    /// # Errors
    /// When the data cannot be processed; the split then fails as a whole.
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError>;

    /// Emits what is held back at the end of the split.
    ///
    /// # Errors
    /// As [`Operator::process`].
    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let _ = emit;
        Ok(())
    }
}

pub(crate) fn extended(input: &Schema, fields: Vec<Field>) -> SchemaRef {
    let all: Vec<Field> = input.fields().iter().map(|f| f.as_ref().clone()).chain(fields).collect();
    Arc::new(Schema::new_with_metadata(all, input.metadata().clone()))
}

/// Pieces of documents: `document_id` uint64, `text` utf8, `end` bool.
///
/// A document is one row or several that follow one another; `end` is true on its last piece. No piece is longer than
/// `input.piece_kilobytes`.
pub fn documents_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("document_id", DataType::UInt64, false),
        Field::new("text", DataType::Utf8, false),
        Field::new("end", DataType::Boolean, false),
    ]))
}

/// Pieces of tokenized documents: `document_id` uint64, `tokens` list uint32, `end` bool.
pub fn tokens_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("document_id", DataType::UInt64, false),
        Field::new("tokens", DataType::new_list(DataType::UInt32, false), false),
        Field::new("end", DataType::Boolean, false),
    ]))
}

/// What the operators of one split share.
#[derive(Clone)]
pub struct SplitContext {
    /// The split.
    pub split: SplitId,
    /// Its data set split: `train`, or the name of a holdout.
    pub dataset_split: String,
    /// Where its sequences stand in the data set, where the plan says it.
    pub place: Option<SequenceRange>,
    /// The tokenizer with its special tokens.
    pub vocabulary: Arc<Vocabulary>,
    /// The teacher, where the job has one and the operator is to run it itself.
    pub teacher: Option<Arc<dyn Teacher>>,
    /// Sums for the shard's record.
    pub statistics: SharedStatistics,
    /// Takes what is counted while the job runs.
    pub meter: Arc<dyn Meter>,
}

/// Statistics of a split that its operators add to.
#[derive(Debug, Clone, Default)]
pub struct SharedStatistics(Arc<Mutex<Statistics>>);

impl SharedStatistics {
    /// The statistics, for adding to or reading.
    pub fn lock(&self) -> MutexGuard<'_, Statistics> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What operators count while a job runs, for progress only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Measure {
    /// Documents read.
    Documents,
    /// Bytes of text read.
    TextBytes,
    /// Tokens of text.
    Tokens,
    /// Sequences packed.
    Sequences,
    /// Tokens that the teacher has gone over.
    TeacherTokens,
    /// Nanoseconds in the teacher's forward pass and logits.
    TeacherNanos,
    /// Nanoseconds in the extractors.
    ExtractNanos,
    /// Nanoseconds in which a device had no batch to work on: no split was ready.
    DeviceIdleNanos,
    /// Nanoseconds in which a device had no buffer for logits, and nothing else to do: it waited for the extraction.
    DeviceBlockedNanos,
}

impl Measure {
    /// All of them, in order.
    pub const ALL: [Self; 9] = [
        Self::Documents,
        Self::TextBytes,
        Self::Tokens,
        Self::Sequences,
        Self::TeacherTokens,
        Self::TeacherNanos,
        Self::ExtractNanos,
        Self::DeviceIdleNanos,
        Self::DeviceBlockedNanos,
    ];

    /// Its name among the metrics of a plan.
    pub fn name(self) -> &'static str {
        match self {
            Self::Documents => "documents",
            Self::TextBytes => "text_bytes",
            Self::Tokens => "tokens",
            Self::Sequences => "sequences",
            Self::TeacherTokens => "teacher_tokens",
            Self::TeacherNanos => "teacher_time",
            Self::ExtractNanos => "extract_time",
            Self::DeviceIdleNanos => "device_idle_time",
            Self::DeviceBlockedNanos => "device_blocked_time",
        }
    }

    /// Whether it is a time.
    pub fn is_time(self) -> bool {
        matches!(self, Self::TeacherNanos | Self::ExtractNanos | Self::DeviceIdleNanos | Self::DeviceBlockedNanos)
    }
}

/// Takes live counts; an engine shows them as metrics of the operator's node.
pub trait Meter: fmt::Debug + Send + Sync {
    /// Adds to a count.
    fn add(&self, what: Measure, n: u64);

    /// Adds the time since `began` to a count of nanoseconds.
    fn add_since(&self, what: Measure, began: Instant) {
        self.add(what, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
}

/// Sums of live counts.
#[derive(Debug, Default)]
pub struct Counters([AtomicU64; Measure::ALL.len()]);

impl Counters {
    /// The sum so far.
    pub fn get(&self, what: Measure) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }
}

impl Meter for Counters {
    fn add(&self, what: Measure, n: u64) {
        self.0[what as usize].fetch_add(n, Ordering::Relaxed);
    }
}
