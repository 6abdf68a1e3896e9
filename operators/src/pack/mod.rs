//! `pack`: packs token streams into sequences of L tokens.
//!
//! ```text
//!  wrap   d0 d0 d0 | d1 d1 d1 d1 d1 d1 …      documents with a separator after each, joined and cut into blocks
//!         [B d0 d0 d0 | d1 E] [B d1 d1 d1 d1 E] …    boundary bos_eos: blocks of L − 2 between BOS and EOS
//!  pad    [B d0 d0 d0 E . .] [B d1 d1 d1 d1 d1 E]     one document per row, truncated or padded
//!  best_fit  [B d0 d0 d0 | d3 | E] [B d1 d1 d1 d1 E] [B d1 | d2 d2 | E]    whole documents, where they leave the least space
//! ```
//!
//! Mode `wrap` applies MDLM's `_group_texts` (Sahoo et al. 2024) to one split of the input; MDLM applies it to a whole
//! data set split. `remainder` says what happens to the tokens that do not fill the last block: drop them, pad the row
//! or keep it short.
//!
//! | column | type and shape | content |
//! |---|---|---|
//! | `sequence_id` | uint64 | split and row number |
//! | `input_ids` | int32 \[L\] | token ids |
//! | `attention_mask` | bool \[L\] | false on padding only; present if rows of the data set may have padding |
//! | `loss_mask` | bool \[L\] | true where the model is trained; present in data sets of conversations |
//! | `document_offsets`, `document_ids` | int32, uint64 \[*\] | where documents begin, and their ids |
//!
//! The offsets begin with 0 and cut the row into segments. BOS belongs to the first document of the row, the last EOS
//! and the padding to the last, and a separator to the document before it. A row does not list documents of which it
//! has no token. Special tokens parsed from a text cut its document into several segments with the same id
//! (`segment_breaks.rs`).
//!
//! Cost: one copy of the tokens; for `best_fit` two, and a search in a tree for each document. Memory: `rows_per_batch`
//! rows and one input batch, for documents of any length; for `best_fit` also the open rows, at most 2^22 tokens and the
//! segments in them.

mod best_fit;
mod invariants;
mod pad;
mod rows;
mod segment_breaks;
mod wrap;

use std::collections::BTreeMap;
use std::sync::Arc;

use arrow::array::{BooleanArray, RecordBatch, UInt32Array, UInt64Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use arrow::error::ArrowError;
use stillhouse_schemas::columns::{self, RowLength};
use stillhouse_schemas::manifest::TRAINED_TOKENS;
use stillhouse_schemas::problems::Problem;
use stillhouse_schemas::sections::Section;
use stillhouse_schemas::spec;
use stillhouse_schemas::spec::{Boundary, PackMode, Remainder, Separator};

use crate::chat::ChatSection;
use crate::config::{Column, JobContext, OperatorConfig, SpecialIds, StatisticKind, rows_per_batch, token_id_bits};
use crate::document_pieces::{document_name, typed_column, unfinished_document};
use crate::invariants::{CheckContext, Violation};
use crate::operator::{Operator, OperatorError, SplitContext, TRAINED};
use crate::rows::ListRows;
use crate::vocabulary::Role;

pub(crate) use self::invariants::{check_ids, check_tokens};

pub use segment_breaks::SegmentBreaks;

const NAME: &str = "pack";
/// Name of the statistic of padding.
const PADDING: &str = "padding";
/// Name of the statistic of sequences of conversations that train nothing, such as a part of a long prompt.
const UNTRAINED_ROWS: &str = "untrained_sequences";
/// Name of the statistic of documents that are cut.
const CUT_DOCUMENTS: &str = "cut_documents";

/// Configuration of `pack`. Create it with [`PackConfig::new`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackConfig {
    /// How documents become rows.
    pub mode: PackMode,
    /// Tokens per sequence, L.
    pub length: usize,
    /// Token id that follows every document; `None` for no separator.
    pub separator: Option<u32>,
    /// Special tokens at both ends of a row.
    pub boundary: Boundary,
    /// First token of a row; required by boundary `bos_eos`.
    pub bos: Option<u32>,
    /// Last token of a row; required by boundary `bos_eos`.
    pub eos: Option<u32>,
    /// Padding token; required by the modes `pad` and `best_fit` and by remainder `pad`.
    pub pad: Option<u32>,
    /// Treatment of the last tokens of a split (mode `wrap`).
    pub remainder: Remainder,
    /// The same for holdouts whose rule differs from `remainder`, by name.
    pub remainder_by_holdout: BTreeMap<String, Remainder>,
    /// Special tokens in the text that cut a document into segments.
    pub segment_breaks: SegmentBreaks,
    /// Row length: fixed, or up to a maximum.
    pub rows: RowLength,
    /// Whether the data set has the column `attention_mask`.
    pub has_mask: bool,
    /// Whether the data set has the column `loss_mask`: its tokens may have the bit [`TRAINED`].
    pub has_loss_mask: bool,
    /// Rows per output batch.
    pub rows_per_batch: usize,
}

impl PackConfig {
    /// Creates the config of a job with these `pack` settings. `holdouts` holds the remainder rule of each holdout by
    /// name. `rows` and `has_mask` follow from [`spec::JobSpec::has_short_rows`] and [`spec::JobSpec::has_padding`].
    ///
    /// # Errors
    /// Returns the special token that the job needs and the tokenizer lacks, and what needs it.
    pub fn new(
        pack: &spec::Pack,
        holdouts: impl IntoIterator<Item = (String, Remainder)>,
        rows: RowLength,
        has_mask: bool,
        rows_per_batch: usize,
        special_ids: &SpecialIds,
    ) -> Result<Self, MissingToken> {
        let needed = |role, by: &'static str, needed: bool| {
            needed.then(|| special_ids.id(role).ok_or(MissingToken { role, by })).transpose()
        };
        let has_boundary = pack.boundary == Boundary::BosEos;
        let holdouts = holdouts.into_iter().filter(|(_, remainder)| *remainder != pack.remainder);
        let remainder_by_holdout: BTreeMap<String, Remainder> = holdouts.collect();
        let some_rows_are_padded = pack.mode.pads()
            || remainder_by_holdout.values().chain([&pack.remainder]).any(|remainder| *remainder == Remainder::Pad);
        Ok(Self {
            mode: pack.mode,
            length: pack.length as usize,
            separator: needed(Role::Eos, "pack.separator eos", pack.separator == Separator::Eos)?,
            boundary: pack.boundary,
            bos: needed(Role::Bos, "pack.boundary bos_eos", has_boundary)?,
            eos: needed(Role::Eos, "pack.boundary bos_eos", has_boundary)?,
            pad: needed(Role::Pad, "padding", some_rows_are_padded)?,
            remainder: pack.remainder,
            remainder_by_holdout,
            segment_breaks: SegmentBreaks::from_special_ids(special_ids),
            rows,
            has_mask,
            has_loss_mask: false,
            rows_per_batch,
        })
    }

    /// Creates the config of a job.
    ///
    /// # Errors
    /// See [`PackConfig::new`].
    pub(crate) fn resolve(context: &JobContext<'_>) -> Result<Self, Problem> {
        let spec = context.spec;
        let holdouts = spec.input.holdout.keys().map(|name| (name.clone(), spec.remainder_of(name)));
        let batch = rows_per_batch(spec);
        let made = Self::new(&spec.pack, holdouts, context.rows(), spec.has_padding(), batch, &context.special_ids);
        let config =
            made.map_err(|missing| Problem::missing(format!("tokenizer.{}", missing.role), missing.to_string()))?;
        // a conversation is one segment: the special tokens of its template are no ends of documents
        Ok(match spec.sections.contains(ChatSection::KEY) {
            true => Self { has_loss_mask: true, segment_breaks: SegmentBreaks::default(), ..config },
            false => config,
        })
    }

    /// Returns the remainder rule of a data set split: `train`, or the name of a holdout.
    pub fn remainder_of(&self, dataset_split: &str) -> Remainder {
        self.remainder_by_holdout.get(dataset_split).copied().unwrap_or(self.remainder)
    }

    /// Returns the schema of the output.
    pub fn schema(&self) -> SchemaRef {
        let mut fields = vec![columns::sequence_id(), self.rows.field(columns::INPUT_IDS, DataType::Int32, None, None)];
        if self.has_mask {
            fields.push(self.bool_field(columns::ATTENTION_MASK));
        }
        if self.has_loss_mask {
            fields.push(self.bool_field(columns::LOSS_MASK));
        }
        fields.push(columns::list_field(columns::DOCUMENT_OFFSETS, DataType::Int32));
        fields.push(columns::list_field(columns::DOCUMENT_IDS, DataType::UInt64));
        Arc::new(Schema::new(fields))
    }

    fn bool_field(&self, name: &str) -> Field {
        self.rows.field(name, DataType::Boolean, None, None)
    }

    /// Builds the operator for one split.
    ///
    /// # Errors
    /// Fails if the fields of the config contradict each other.
    pub fn build(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        let writer = rows::RowWriter::new(self, context);
        let boundary = self.boundary_tokens()?;
        let remainder = self.remainder_of(&context.dataset_split);
        let padded = self.mode.pads() || remainder == Remainder::Pad;
        if padded && !self.has_mask {
            return Err(config_error("has_mask: got false, valid: true where rows may have padding"));
        }
        if self.rows.length() != self.length {
            let got = self.rows.length();
            return Err(config_error(format!("rows: got length {got}, valid: {}, as `length`", self.length)));
        }
        if remainder == Remainder::Keep && self.mode == PackMode::Wrap && matches!(self.rows, RowLength::Fixed(_)) {
            return Err(config_error("rows: got fixed, valid: up_to where rows may be short (remainder keep)"));
        }
        let pad = if padded { Some(required("pad", self.pad)?) } else { None };
        let separator = self.separator.map(|id| int32("separator", id)).transpose()?;
        Ok(match (self.mode, pad) {
            (PackMode::Pad, Some(pad)) => Box::new(pad::Pad::new(self, boundary, separator, pad, writer)?),
            (PackMode::BestFit, Some(pad)) => Box::new(best_fit::BestFit::new(self, boundary, separator, pad, writer)?),
            _ => Box::new(wrap::Wrap::new(self, remainder, boundary, separator, pad.unwrap_or(0), writer)?),
        })
    }

    fn boundary_tokens(&self) -> Result<Option<BoundaryTokens>, OperatorError> {
        match self.boundary {
            Boundary::None => Ok(None),
            Boundary::BosEos => {
                Ok(Some(BoundaryTokens { bos: required("bos", self.bos)?, eos: required("eos", self.eos)? }))
            }
        }
    }
}

impl OperatorConfig for PackConfig {
    const NAME: &'static str = NAME;
    const COLUMNS: &'static [Column] = &[
        Column {
            name: columns::SEQUENCE_ID,
            dtype: "uint64",
            when: "always",
            shape: "",
            contract: "unique in the data set; key of all random choices of the row",
            meaning: "id of the sequence, unique in the data set; the key of all its random choices",
        },
        Column {
            name: columns::INPUT_IDS,
            dtype: "fixed list int32",
            when: "always",
            shape: "[L]",
            contract: "",
            meaning: "token ids, as in `tokenizer.json`",
        },
        Column {
            name: columns::ATTENTION_MASK,
            dtype: "fixed list bool",
            when: "modes `pad` and `best_fit`, remainder `pad`",
            shape: "[L]",
            contract: "true for a token, false for padding, which is at the end",
            meaning: "true where there is a token, false on padding, which is at the end",
        },
        Column {
            name: columns::LOSS_MASK,
            dtype: "fixed list bool",
            when: "`chat`",
            shape: "[L]",
            contract: "true where the model is trained, false on prompts and padding",
            meaning: "true where the model is trained: what the assistant says, to the end of its turn",
        },
        Column {
            name: columns::DOCUMENT_OFFSETS,
            dtype: "list int32",
            when: "always",
            shape: "[*]",
            contract: "positions where documents, or segments of one (see below), begin in the row; the first is 0",
            meaning: "positions where documents begin; the first is 0, even if the document began in an earlier row",
        },
        Column {
            name: columns::DOCUMENT_IDS,
            dtype: "list uint64",
            when: "always",
            shape: "[*]",
            contract: "one id per offset; ascending; segments of one document have the same id",
            meaning: "ids of these documents, in the order of the offsets",
        },
    ];

    const STATISTICS: &'static [StatisticKind] = &[
        StatisticKind { name: PADDING, meaning: "Positions of padding" },
        StatisticKind { name: TRAINED_TOKENS, meaning: "Tokens on which the model is trained" },
        StatisticKind { name: UNTRAINED_ROWS, meaning: "Sequences without a token on which the model is trained" },
        StatisticKind { name: CUT_DOCUMENTS, meaning: "Documents longer than a row, which are cut" },
    ];

    fn from_job(context: &JobContext<'_>) -> Result<Option<Self>, Problem> {
        // `grid` makes the rows of images and codes, and `generate` makes those of text that the teacher writes
        let spec = context.spec;
        if spec.input.is_rows() || spec.sequential().is_some() { Ok(None) } else { Self::resolve(context).map(Some) }
    }

    fn output_schema(&self, _: &Schema) -> SchemaRef {
        self.schema()
    }

    fn check(
        &self,
        batch: &RecordBatch,
        context: &CheckContext,
        violations: &mut Vec<Violation>,
    ) -> Result<(), ArrowError> {
        invariants::check(self, batch, context, violations)
    }

    fn bytes_per_token(&self, before: f64, vocab_size: usize) -> f64 {
        before + token_id_bits(vocab_size) / 8.0
    }

    fn operator(&self, context: &SplitContext) -> Result<Box<dyn Operator>, OperatorError> {
        self.build(context)
    }
}

/// The error for a special token that sequences need but neither the tokenizer nor the job defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("needed by {by}, and neither the job nor the tokenizer has one")]
pub struct MissingToken {
    /// Role of the missing token.
    pub role: Role,
    /// The setting that needs it.
    pub by: &'static str,
}

/// Special tokens at both ends of a row.
#[derive(Debug, Clone, Copy)]
struct BoundaryTokens {
    bos: i32,
    eos: i32,
}

fn config_error(message: impl Into<String>) -> OperatorError {
    OperatorError::Config { operator: NAME, message: message.into() }
}

fn required(name: &str, id: Option<u32>) -> Result<i32, OperatorError> {
    int32(name, id.ok_or_else(|| config_error(format!("{name}: got none, valid: a token id")))?)
}

fn int32(name: &str, id: u32) -> Result<i32, OperatorError> {
    i32::try_from(id).map_err(|_| config_error(format!("{name}: got {id}, valid: ids up to {}", i32::MAX)))
}

/// A piece of a tokenized document.
pub(crate) struct TokenPiece<'a> {
    pub id: u64,
    pub tokens: &'a [u32],
    pub end: bool,
}

/// Returns the pieces of a batch, in order. Only with `may_be_marked` may tokens have the bit [`TRAINED`].
pub(crate) fn token_pieces(
    batch: &RecordBatch,
    may_be_marked: bool,
) -> Result<impl Iterator<Item = TokenPiece<'_>>, OperatorError> {
    let arrow = OperatorError::arrow(NAME);
    let ids: &UInt64Array = typed_column(batch, "document_id", NAME)?;
    let ends: &BooleanArray = typed_column(batch, "end", NAME)?;
    let lists = ListRows::from_batch(batch, "tokens").map_err(&arrow)?;
    let tokens: &UInt32Array = lists.values("tokens").map_err(&arrow)?;
    let tokens: &[u32] = tokens.values();
    if !may_be_marked && tokens.iter().any(|token| token & TRAINED != 0) {
        let is_too_large = |token: &&u32| **token & TRAINED != 0;
        let found = (0..lists.len()).find_map(|i| Some((i, tokens[lists.range(i)].iter().find(is_too_large)?)));
        let (row, token) = found.unwrap_or((0, &TRAINED));
        return Err(OperatorError::Data {
            operator: NAME,
            place: document_name(ids.value(row)),
            message: format!("got token id {token}, valid: ids up to {}", i32::MAX),
        });
    }
    Ok((0..lists.len()).map(move |i| TokenPiece {
        id: ids.value(i),
        tokens: &tokens[lists.range(i)],
        end: ends.value(i),
    }))
}

/// Appends tokens, with their marks, to a row.
fn push_tokens(row: &mut Vec<i32>, tokens: &[u32]) {
    row.extend(tokens.iter().map(|token| token.cast_signed()));
}

#[cfg(test)]
mod tests;
