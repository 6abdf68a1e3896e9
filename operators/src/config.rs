//! How an operator declares its settings, its columns and everything that follows from them.
//!
//! An operator's config is the type that implements [`OperatorConfig`]. It holds everything that decides the operator's
//! output, resolved from the job, the tokenizer and the teacher ([`JobContext`]). It holds nothing that exists only at
//! run time. So `verify` and others rebuild the config of a finished data set from its manifest in the same way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use serde::Serialize;
pub use stillhouse_schemas::columns::Column;
use stillhouse_schemas::columns::RowLength;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionKind};
use stillhouse_schemas::spec::{JobSpec, SpecialTokens};

use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext, extend_schema};
use crate::vocabulary::{Role, Vocabulary};

/// Sequences per batch in a job without a teacher.
const ROWS_PER_BATCH: usize = 64;

/// The config of an operator; it declares everything about the operator. `registry::OPERATORS` has one line for each.
pub trait OperatorConfig: fmt::Debug + Clone + PartialEq + Send + Sync + 'static {
    /// Name of the operator in plans, metrics and errors.
    const NAME: &'static str;

    /// Section of the job file that belongs to the operator; `None` if it has none or uses a section of `JobSpec`.
    const SECTION: Option<SectionKind> = None;

    /// Columns that the operator may add, in order.
    const COLUMNS: &'static [Column] = &[];

    /// Statistics that the operator may add to a shard's record, besides those of every data set.
    const STATISTICS: &'static [StatisticKind] = &[];

    /// Names of the files that the operator may write beside the shards.
    const SIDECAR_FILES: &'static [&'static str] = &[];

    /// Returns the config for a job, or `None` if the job does not use the operator.
    ///
    /// # Errors
    /// Fails if the job asks for something that its vocabulary does not support. The problem names the field, its value
    /// and the valid values.
    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem>;

    /// Returns the columns that this config adds, a subset of [`OperatorConfig::COLUMNS`].
    fn fields(&self) -> Vec<Field> {
        Vec::new()
    }

    /// Returns the schema of the output for this schema of the input.
    fn output_schema(&self, input: &Schema) -> SchemaRef {
        extend_schema(input, self.fields())
    }

    /// Checks the operator's columns and adds every row that breaks a rule to `violations`. `verify` calls this on the
    /// rows it reads; debug builds call it on the rows they write.
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        let _ = (batch, context, violations);
        Ok(())
    }

    /// Returns the files to write beside the shards, (name, content), for data that decides a column but is not a
    /// column. Their names are in [`OperatorConfig::SIDECAR_FILES`].
    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        Vec::new()
    }

    /// Returns, for keys of the section, the bytes that stand for them in the job's hash, in place of the file that they
    /// name: (field, bytes), such as `subtokens.permutation` and its numbers.
    fn hashed_content(&self) -> Vec<(&'static str, Arc<[u8]>)> {
        Vec::new()
    }

    /// Estimates the data set's bytes per token including these columns; `before` is the estimate without them. Split
    /// sizes and `plan` use it.
    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        let _ = vocab_size;
        before
    }

    /// Estimates by how many bytes per token the data set may exceed [`Self::bytes_per_token`], which assumes a teacher
    /// that predicts the text well. `plan` shows it.
    fn excess_bytes_per_token(&self, vocab_size: usize) -> f64 {
        let _ = vocab_size;
        0.0
    }

    /// Returns what `inspect` and the web page show of a batch's only row besides its columns; `None` for nothing.
    ///
    /// # Errors
    /// Fails if a column is missing or has another type than the format defines.
    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let _ = row;
        Ok(None)
    }

    /// Creates the operator for one split.
    ///
    /// # Errors
    /// Fails if the config cannot work with the resources of `context`.
    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError>;
}

/// A statistic that an operator adds. [`stillhouse_schemas::manifest::Statistic`] defines how two of them combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatisticKind {
    /// Key in the manifest.
    pub name: &'static str,
    /// What it counts, in words and with its unit; `inspect` shows this.
    pub meaning: &'static str,
}

/// What the terminal and the web page show of a row besides its columns.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OperatorView {
    /// Name of the operator.
    pub operator: String,
    /// Facts about the row: (name, value).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<(String, String)>,
    /// A text per token; empty for none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<String>,
    /// Charts for the web page; the facts say the same in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pictures: Vec<Chart>,
}

/// A chart of a row, as numbers. The viewer chooses size and colours.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Chart {
    /// An attention mask over the tokens in generation order: token n may attend to the first `sees[n]` of them.
    Mask {
        /// Title.
        title: String,
        /// Number of tokens that each token may attend to.
        sees: Vec<u32>,
    },
    /// A share from 0 to 1 for each of several consecutive blocks.
    Shares {
        /// Title.
        title: String,
        /// Tokens per block; the last block may be shorter.
        length: u32,
        /// Share of each block.
        values: Vec<f32>,
    },
    /// A bar per token.
    Strip {
        /// Title.
        title: String,
        /// Value of an empty bar.
        low: f32,
        /// Value of a full bar.
        high: f32,
        /// Value of each token; `None` if it has none.
        values: Vec<Option<f32>>,
    },
    /// A column of `height` truth values for each token.
    Grid {
        /// Title.
        title: String,
        /// Truth values per token.
        height: u32,
        /// The truth values as `0` and `1`, token after token.
        cells: String,
    },
}

/// Appends the columns `fields`, with their `arrays` in the same order, to a batch.
///
/// # Errors
/// Fails if an array does not match its field or the batch.
pub fn with_columns(batch: &RecordBatch, fields: Vec<Field>, arrays: Vec<ArrayRef>) -> Result<RecordBatch, ArrowError> {
    let arrays = batch.columns().iter().cloned().chain(arrays).collect();
    RecordBatch::try_new(extend_schema(&batch.schema(), fields), arrays)
}

/// Bits needed for a token id, log2 V; used in estimates.
pub fn token_id_bits(vocab_size: usize) -> f64 {
    (vocab_size.max(2) as f64).log2()
}

/// What operators build their configs from: the job, and the properties of its vocabulary.
#[derive(Debug, Clone)]
pub struct JobContext<'a> {
    /// The job.
    pub spec: &'a JobSpec,
    /// Vocabulary size V, for token ids, log-probabilities and sub-tokens.
    pub vocab_size: usize,
    /// The special tokens.
    pub special_ids: SpecialIds,
}

impl JobContext<'_> {
    /// Returns the row length of the job: fixed, or up to a maximum.
    pub fn rows(&self) -> RowLength {
        row_length(self.spec)
    }

    /// Returns the job's section of type `T`, or `None` if the job has none.
    ///
    /// # Errors
    /// Fails if the section does not parse as `T`, for example in a data set of another version of the operator.
    pub fn section<T: Section>(&self) -> Result<Option<T>, Problem> {
        self.spec.sections.get()
    }

    /// Returns the id of the special token with this role.
    ///
    /// # Errors
    /// Fails if the id is not known; the message says that `by` needs it.
    pub fn require(&self, role: Role, by: &str) -> Result<u32, Problem> {
        let missing = || {
            Problem::missing(
                format!("tokenizer.{role}"),
                format!("{by} needs it, and neither the job nor the tokenizer has one"),
            )
        };
        self.special_ids.id(role).ok_or_else(missing)
    }
}

/// Ids of the special tokens, and which of them the tokenizer may produce from text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    tokens: BTreeMap<Role, SpecialToken>,
    parsed: BTreeSet<Role>,
}

impl SpecialIds {
    /// Reads the ids of a vocabulary.
    pub fn from_vocabulary(vocabulary: &Vocabulary) -> Self {
        let token = |role: Role| vocabulary.special(role).map(|token| (role, token.clone()));
        let parsed = |role: &Role| vocabulary.parsed(*role).is_some();
        Self {
            tokens: Role::ALL.into_iter().filter_map(token).collect(),
            parsed: Role::ALL.into_iter().filter(parsed).collect(),
        }
    }

    /// Reads the ids of a finished data set from its manifest, by role. The manifest does not record which special
    /// tokens the tokenizer finds in text. So with `SpecialTokens::Parse` every token may occur.
    pub fn from_manifest(tokens: &BTreeMap<String, SpecialToken>, mode: SpecialTokens) -> Self {
        let token = |role: Role| tokens.get(role.name()).map(|token| (role, token.clone()));
        let tokens: BTreeMap<Role, SpecialToken> = Role::ALL.into_iter().filter_map(token).collect();
        let parsed = if mode == SpecialTokens::Parse { tokens.keys().copied().collect() } else { BTreeSet::new() };
        Self { tokens, parsed }
    }

    /// Returns the id of a role.
    pub fn id(&self, role: Role) -> Option<u32> {
        self.tokens.get(&role).map(|token| token.id)
    }

    /// Returns the texts of the special tokens, by the names that chat templates know: `bos_token`, ….
    pub fn template_variables(&self) -> BTreeMap<String, String> {
        self.tokens.iter().map(|(role, token)| (format!("{role}_token"), token.token.clone())).collect()
    }

    /// Returns the id of a role if text that spells the token becomes this id.
    pub fn parsed(&self, role: Role) -> Option<u32> {
        self.id(role).filter(|_| self.parsed.contains(&role))
    }
}

/// Returns the row length of a job: fixed, or up to a maximum.
pub fn row_length(spec: &JobSpec) -> RowLength {
    let length = spec.pack.length as usize;
    if spec.has_short_rows() { RowLength::UpTo(length) } else { RowLength::Fixed(length) }
}

/// Returns the sequences per forward pass of the teacher; a record batch holds as many.
///
/// This number affects the bytes of a shard, because floating-point results may depend on the shape of a batch.
pub fn rows_per_batch(spec: &JobSpec) -> usize {
    match &spec.extract {
        Some(extract) => (extract.teacher.batch_tokens / spec.pack.length).max(1) as usize,
        None => ROWS_PER_BATCH,
    }
}
