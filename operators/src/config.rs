//! The settings of an operator, its columns and what follows from them: declared in its own file, for everybody else to read.
//!
//! The type that implements [`OperatorConfig`] is the operator's config: everything that decides what it does, resolved from the job and what
//! is known of the tokenizer and the teacher ([`JobFacts`]), and nothing that only a running program has. So the config of a finished data
//! set is made from its manifest in the same way.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use arrow::array::{ArrayRef, RecordBatch};
use arrow::datatypes::{Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use serde::Serialize;
use stillhouse_schemas::columns::Rows;
use stillhouse_schemas::manifest::SpecialToken;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::{Section, SectionKind};
use stillhouse_schemas::spec::{JobSpec, SpecialTokens};

use crate::invariants::{Broken, Limits};
use crate::operator::{Operator, OperatorError, SplitContext, extended};
use crate::vocabulary::{Role, Vocabulary};

/// Names of the files that operators may put beside the shards.
pub const SIDECAR_FILES: [&str; 2] = [crate::subtokens::PERMUTATION, crate::subtokens::FILTER_TABLE];

/// Sequences of one batch in a job without a teacher.
const ROWS_PER_BATCH: usize = 64;

/// The config of an operator, which declares everything about it; `registry::OPERATORS` names it in one line.
pub trait OperatorConfig: fmt::Debug + Clone + PartialEq + Send + Sync + 'static {
    /// Name in plans, metrics and errors.
    const NAME: &'static str;

    /// Its section of the job file, where it has one that the house does not know itself.
    const SECTION: Option<SectionKind> = None;

    /// The columns that it may add, in order.
    const COLUMNS: &'static [Column] = &[];

    /// The statistics that it may add to a shard's record, beside those that every data set has.
    const STATISTICS: &'static [StatisticKind] = &[];

    /// The config of a job; `None` where the job does not ask for the operator.
    ///
    /// # Errors
    /// When the job asks for what this vocabulary cannot give: the field with what was got and what is valid.
    fn of_job(facts: &JobFacts<'_>) -> Result<Option<Self>, Problem>;

    /// The columns that it adds for this config, among [`OperatorConfig::COLUMNS`].
    fn fields(&self) -> Vec<Field> {
        Vec::new()
    }

    /// Schema of the output, from the schema of the input.
    fn output_schema(&self, input: &Schema) -> SchemaRef {
        extended(input, self.fields())
    }

    /// Checks its columns: every row that breaks a rule goes to `broken`. `verify` asks where rows are read, debug builds where they are
    /// written.
    ///
    /// # Errors
    /// When a column is missing or has another type than the format says.
    fn check(&self, batch: &RecordBatch, limits: &Limits, broken: &mut Vec<Broken>) -> Result<(), ArrowError> {
        let _ = (batch, limits, broken);
        Ok(())
    }

    /// Files beside the shards, with their content: what decides a column and is no column. Their names are among [`SIDECAR_FILES`].
    fn sidecar_files(&self) -> Vec<(&'static str, Vec<u8>)> {
        Vec::new()
    }

    /// Estimated bytes per token of the data set with its columns, given those `before` it: for sizing splits and for `plan`.
    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        let _ = vocab_size;
        before
    }

    /// What `inspect` and the page show of the only row of a batch; `None` for nothing but its columns.
    ///
    /// # Errors
    /// When a column is missing or has another type than the format says.
    fn view(&self, row: &RecordBatch) -> Result<Option<OperatorView>, ArrowError> {
        let _ = row;
        Ok(None)
    }

    /// Makes the operator for one split.
    ///
    /// # Errors
    /// When the config cannot work with these resources.
    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError>;
}

/// A column, in words: the table of docs/FORMAT.md and the data set card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Name.
    pub name: &'static str,
    /// Type of the values and the list that they are in; what the choice depends on.
    pub dtype: &'static str,
    /// Which jobs have it.
    pub when: &'static str,
    /// Shape of a row, such as `[L, k]`; empty for one value.
    pub shape: &'static str,
    /// What a reader of the format may rely on; may be empty where name and shape say it.
    pub contract: &'static str,
    /// What it is, for somebody who has nothing but the data set.
    pub meaning: &'static str,
}

/// A statistic of an operator: [`stillhouse_schemas::manifest::Statistic`] says how two add up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatisticKind {
    /// Its key in the manifest.
    pub name: &'static str,
    /// What it counts, in words and with its unit, as `inspect` shows it.
    pub meaning: &'static str,
}

/// What is shown of a row beside its columns, on a terminal and on the page.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct OperatorView {
    /// The operator.
    pub operator: String,
    /// Facts about the row: what, and its value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub facts: Vec<(String, String)>,
    /// A text for every token; empty for none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<String>,
    /// What the page draws; facts say the same in words.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pictures: Vec<Picture>,
}

/// A picture of a row, as numbers: whoever shows it chooses size and colours.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Picture {
    /// An attention mask of the tokens in the order of generation: the n-th may see the first `sees[n]` of them.
    Mask {
        /// What it is.
        title: String,
        /// How many each sees.
        sees: Vec<u32>,
    },
    /// A share of each of the blocks that follow one another, from 0 to 1.
    Shares {
        /// What it is.
        title: String,
        /// Tokens of a block; the last one may be shorter.
        length: u32,
        /// The shares.
        values: Vec<f32>,
    },
    /// A value of every token that has one, as bars.
    Strip {
        /// What it is.
        title: String,
        /// Where a bar is empty.
        low: f32,
        /// Where it is full.
        high: f32,
        /// The values; none for a token that has none.
        values: Vec<Option<f32>>,
    },
    /// Truth values of every token, `height` of each, below one another.
    Grid {
        /// What it is.
        title: String,
        /// Values of a token.
        height: u32,
        /// `0` and `1`, those of a token together.
        cells: String,
    },
}

/// A batch with more columns: the arrays of the fields, in their order.
///
/// # Errors
/// When an array does not fit its field or the batch.
pub fn with_columns(batch: &RecordBatch, fields: Vec<Field>, arrays: Vec<ArrayRef>) -> Result<RecordBatch, ArrowError> {
    let arrays = batch.columns().iter().cloned().chain(arrays).collect();
    RecordBatch::try_new(extended(&batch.schema(), fields), arrays)
}

/// Bits that a token takes at most, log2 V: for estimates.
pub fn bits(vocab_size: usize) -> f64 {
    (vocab_size.max(2) as f64).log2()
}

/// What the config of an operator is made from: the job, and what is known of its vocabulary.
#[derive(Debug, Clone)]
pub struct JobFacts<'a> {
    /// The job.
    pub spec: &'a JobSpec,
    /// V: size of the vocabulary that ids, log-probabilities and sub-tokens are over.
    pub vocab_size: usize,
    /// The special tokens.
    pub special_ids: SpecialIds,
}

impl JobFacts<'_> {
    /// Shape of the rows.
    pub fn rows(&self) -> Rows {
        rows(self.spec)
    }

    /// The section of a type; `None` where the job has none.
    ///
    /// # Errors
    /// When it is no value of this type, as in a data set of another version of the operator.
    pub fn section<T: Section>(&self) -> Result<Option<T>, Problem> {
        self.spec.sections.get()
    }

    /// The id of the special token of a role.
    ///
    /// # Errors
    /// When none is known; `by` says what needs it.
    pub fn require(&self, role: Role, by: &str) -> Result<u32, Problem> {
        let missing = || Problem::missing(format!("tokenizer.{role}"), format!("{by} needs it, and none is known"));
        self.special_ids.id(role).ok_or_else(missing)
    }
}

/// Ids of the special tokens, and which of them text may spell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialIds {
    ids: BTreeMap<Role, u32>,
    parsed: BTreeSet<Role>,
}

impl SpecialIds {
    /// Those of a tokenizer.
    pub fn of(vocabulary: &Vocabulary) -> Self {
        let ids = |role: Role| vocabulary.special(role).map(|token| (role, token.id));
        let parsed = |role: &Role| vocabulary.parsed(*role).is_some();
        Self {
            ids: Role::ALL.into_iter().filter_map(ids).collect(),
            parsed: Role::ALL.into_iter().filter(parsed).collect(),
        }
    }

    /// Those of a finished data set, by role as in its manifest. Whether a tokenizer finds one in a text is not recorded, so each may be.
    pub fn recorded(tokens: &BTreeMap<String, SpecialToken>, mode: SpecialTokens) -> Self {
        let ids = |role: Role| tokens.get(role.name()).map(|token| (role, token.id));
        let ids: BTreeMap<Role, u32> = Role::ALL.into_iter().filter_map(ids).collect();
        let parsed = if mode == SpecialTokens::Parse { ids.keys().copied().collect() } else { BTreeSet::new() };
        Self { ids, parsed }
    }

    /// The id of a role.
    pub fn id(&self, role: Role) -> Option<u32> {
        self.ids.get(&role).copied()
    }

    /// The id of a role, where text that spells the token becomes it.
    pub fn parsed(&self, role: Role) -> Option<u32> {
        self.id(role).filter(|_| self.parsed.contains(&role))
    }
}

/// Shape of the rows of a job.
pub fn rows(spec: &JobSpec) -> Rows {
    let length = spec.pack.length as usize;
    if spec.has_short_rows() { Rows::UpTo(length) } else { Rows::Fixed(length) }
}

/// Sequences of one forward pass of the teacher, which are also one record batch.
///
/// Part of what decides the bytes of a shard: floating point may depend on the shape of a batch.
pub fn rows_per_batch(spec: &JobSpec) -> usize {
    match &spec.extract {
        Some(extract) => (extract.teacher.batch_tokens / spec.pack.length).max(1) as usize,
        None => ROWS_PER_BATCH,
    }
}
