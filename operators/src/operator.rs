//! The operator interface: a transform over record batches that an engine drives.
//!
//! The pipeline's adapter (`OperatorExec`) runs any [`Operator`] inside DataFusion. It passes record batches in order
//! and keeps those that the operator passes to `emit` until the next node pulls them. What an operator emits per batch
//! must therefore be bounded by that batch; memory is then bounded by the batches in flight.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
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

use crate::vocabulary::Vocabulary;

/// Errors of operators. Retrying on the same input never helps.
#[derive(Debug, thiserror::Error)]
pub enum OperatorError {
    /// The input or output batch does not match its schema.
    #[error("{operator}: {source}")]
    Arrow {
        /// Name of the operator.
        operator: &'static str,
        /// Error from Arrow.
        source: ArrowError,
    },
    /// A configuration that cannot work; found when the operator is built.
    #[error("{operator}: {message}")]
    Config {
        /// Name of the operator.
        operator: &'static str,
        /// The value it got and what is valid.
        message: String,
    },
    /// A document or a sequence that cannot be processed.
    #[error("{operator}: {place}: {message}")]
    Data {
        /// Name of the operator.
        operator: &'static str,
        /// The document or sequence.
        place: String,
        /// The value it got and what is valid.
        message: String,
    },
    /// The teacher returned a logit that is not finite.
    #[error(
        "extract: sequence {sequence_id}, position {position}: the teacher's logit of token {token} is {value}; if the \
         teacher runs in f16, try bf16 or f32, otherwise look for NaN or infinite numbers in its weights"
    )]
    NotFinite {
        /// Id of the packed sequence.
        sequence_id: u64,
        /// First position that fails, also without the tokens after it.
        position: u32,
        /// First vocabulary entry with such a logit.
        token: usize,
        /// The logit.
        value: f32,
    },
    /// The teacher failed.
    #[error("extract: {0}")]
    Teacher(#[from] stillhouse_teacher::TeacherError),
    /// An error that ended several batches, for each of them.
    #[error("{0}")]
    Shared(Arc<OperatorError>),
    /// The consumer stopped: the job was cancelled or another stage failed.
    #[error("the next stage stopped")]
    Stopped,
}

impl OperatorError {
    /// Returns a function for `map_err` on Arrow results.
    pub fn arrow(operator: &'static str) -> impl Fn(ArrowError) -> Self {
        move |source| Self::Arrow { operator, source }
    }

    /// Returns the error itself, also where several batches share it.
    pub fn root(&self) -> &Self {
        match self {
            Self::Shared(error) => error.root(),
            error => error,
        }
    }
}

/// Receives an output batch.
pub type Emit<'a> = dyn FnMut(RecordBatch) -> Result<(), OperatorError> + 'a;

/// A transform over the batches of one split, which arrive in order.
pub trait Operator: Send {
    /// Processes an input batch and emits any number of output batches; the input's size bounds their total size.
    ///
    /// # Errors
    /// Fails if the data cannot be processed; the whole split then fails.
    fn process(&mut self, batch: &RecordBatch, emit: &mut Emit<'_>) -> Result<(), OperatorError>;

    /// Emits the remaining rows at the end of the split.
    ///
    /// # Errors
    /// See [`Operator::process`].
    fn finish(&mut self, emit: &mut Emit<'_>) -> Result<(), OperatorError> {
        let _ = emit;
        Ok(())
    }
}

pub(crate) fn extend_schema(input: &Schema, fields: Vec<Field>) -> SchemaRef {
    let all: Vec<Field> = input.fields().iter().map(|f| f.as_ref().clone()).chain(fields).collect();
    Arc::new(Schema::new_with_metadata(all, input.metadata().clone()))
}

/// Schema of document pieces: `document_id` uint64, `text` utf8, `end` bool.
///
/// A document is one row or several consecutive rows; `end` is true on its last piece. `input.piece_kilobytes` bounds
/// the size of a piece.
pub fn documents_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("document_id", DataType::UInt64, false),
        Field::new("text", DataType::Utf8, false),
        Field::new("end", DataType::Boolean, false),
    ]))
}

/// Marks a token on which the model is trained, in the column `tokens` and in rows being packed. Ids have 31 bits, so that they
/// fit the int32 of `input_ids`; all modes of packing move the mark with its token.
pub const TRAINED: u32 = 1 << 31;

/// Schema of pieces of tokenized documents: `document_id` uint64, `tokens` list uint32, `end` bool. Only tokens of
/// conversations have the bit [`TRAINED`].
pub fn tokens_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new("document_id", DataType::UInt64, false),
        Field::new("tokens", DataType::new_list(DataType::UInt32, false), false),
        Field::new("end", DataType::Boolean, false),
    ]))
}

/// Resources that the operators of a split share.
#[derive(Clone)]
pub struct SplitContext {
    /// The split.
    pub split: SplitId,
    /// Its data set split: `train`, or the name of a holdout.
    pub dataset_split: String,
    /// Indices of the split's sequences in the data set, if the plan knows them.
    pub sequence_range: Option<SequenceRange>,
    /// The tokenizer with its special tokens.
    pub vocabulary: Arc<Vocabulary>,
    /// The duplicates among the documents of the input, in a job with `deduplicate`.
    pub duplicates: Option<Arc<dyn DuplicateList>>,
    /// The values of `input.carry` of the documents read so far, in a job with it.
    pub carried: Option<Arc<dyn CarriedValues>>,
    /// The teacher, if the job has one and the operator runs it itself.
    pub teacher: Option<Arc<dyn Teacher>>,
    /// Statistics for the shard's record.
    pub statistics: SharedStatistics,
    /// Entries for the shard's footer.
    pub footer: FooterEntries,
    /// Receives live counts while the job runs.
    pub meter: Arc<dyn Meter>,
}

/// Values of columns of the input, by document.
pub trait CarriedValues: fmt::Debug + Send + Sync {
    /// Returns the values of a document, in the order of `input.carry`; `None` if it was not read.
    ///
    /// # Errors
    /// Fails if the values cannot be read.
    fn of_document(&self, document: u64) -> io::Result<Option<Arc<[Option<String>]>>>;

    /// Whether the input is a mixture: then the first value is the name of the document's table.
    fn is_mixture(&self) -> bool {
        false
    }
}

/// By what a document is a duplicate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DuplicateKind {
    /// Its text is equal.
    Exact,
    /// It is a near-duplicate.
    MinHash,
    /// Parts of it are equal to earlier ones.
    Parts,
}

impl DuplicateKind {
    /// The name: that of the option.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::MinHash => "minhash",
            Self::Parts => "parts",
        }
    }
}

/// A document that is dropped, or a part of a document that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Duplicate {
    /// The document.
    pub document: u64,
    /// The document that stays, or has the first such part.
    pub first: u64,
    /// By what it is a duplicate.
    pub kind: DuplicateKind,
    /// The part that is removed, counted from 0 over the parts of the document that are compared; `None` for all of it.
    pub part: Option<u32>,
}

/// The documents of a job that are dropped, and the parts that are removed from others.
pub trait DuplicateList: fmt::Debug + Send + Sync {
    /// Returns the duplicates among the documents of a split, in the order of documents and parts.
    ///
    /// # Errors
    /// Fails if the list cannot be read.
    fn of_split(&self, split: SplitId) -> Result<Vec<Duplicate>, OperatorError>;
}

/// A list without duplicates, for a job that is only sampled.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoDuplicates;

impl DuplicateList for NoDuplicates {
    fn of_split(&self, _: SplitId) -> Result<Vec<Duplicate>, OperatorError> {
        Ok(Vec::new())
    }
}

/// Statistics of a split, which its operators add to.
#[derive(Debug, Clone, Default)]
pub struct SharedStatistics(Arc<Mutex<Statistics>>);

impl SharedStatistics {
    /// Locks the statistics for reading or adding.
    pub fn lock(&self) -> MutexGuard<'_, Statistics> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Key-value entries of a shard's footer, which the operators of a split add. They describe the shard for a person, such
/// as samples of dropped documents; what programs need is in the shard's record. Every trainer reads the footer, so an
/// operator bounds its entry to a few kilobytes.
#[derive(Debug, Clone, Default)]
pub struct FooterEntries(Arc<Mutex<BTreeMap<&'static str, String>>>);

impl FooterEntries {
    /// Sets an entry.
    pub fn set(&self, key: &'static str, value: String) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, value);
    }

    /// Returns the entries.
    pub fn get(&self) -> BTreeMap<&'static str, String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What operators count while a job runs; for progress reports only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Measure {
    /// Documents read.
    Documents,
    /// Bytes of text read.
    TextBytes,
    /// Tokens of text produced by the tokenizer.
    Tokens,
    /// Sequences packed.
    Sequences,
    /// Positions that the teacher predicted.
    TeacherTokens,
    /// Nanoseconds in the teacher's forward pass and logits.
    TeacherNanos,
    /// Nanoseconds in the extractors.
    ExtractNanos,
    /// Nanoseconds in which a device had no batch because no split was ready.
    DeviceIdleNanos,
    /// Nanoseconds in which a device was idle because all buffers for logits waited for the extraction.
    DeviceBlockedNanos,
}

impl Measure {
    /// All measures, in order of declaration.
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

    /// Name of the metric in a plan.
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

    /// Whether the measure is a time.
    pub fn is_time(self) -> bool {
        matches!(self, Self::TeacherNanos | Self::ExtractNanos | Self::DeviceIdleNanos | Self::DeviceBlockedNanos)
    }
}

/// Receives live counts; an engine shows them as metrics of the operator's plan node.
pub trait Meter: fmt::Debug + Send + Sync {
    /// Adds to a count.
    fn add(&self, what: Measure, n: u64);

    /// Adds the nanoseconds since `began`.
    fn add_since(&self, what: Measure, began: Instant) {
        self.add(what, u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
}

/// A [`Meter`] that keeps sums.
#[derive(Debug, Default)]
pub struct Counters([AtomicU64; Measure::ALL.len()]);

impl Counters {
    /// Returns the sum so far.
    pub fn get(&self, what: Measure) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }
}

impl Meter for Counters {
    fn add(&self, what: Measure, n: u64) {
        self.0[what as usize].fetch_add(n, Ordering::Relaxed);
    }
}
