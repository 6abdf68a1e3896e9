//! The columns of a data set: names, Arrow types and shapes, shared by the writer, the reader and `verify`.
//!
//! One row is one packed sequence of L positions. D is `draws`, V the vocabulary size, k `topk`, ℓ `subtokens.length`.
//! The field metadata stores the shape under [`SHAPE`], such as `[1024,4]`; `*` marks a variable length.
//!
//! docs/FORMAT.md lists which operator adds which column, with type, shape and meaning. Its table is generated from the
//! declarations of the operators.
//!
//! With `pack.remainder: keep`, rows may be shorter than L, and lists replace fixed-size lists.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_schema::{DataType, Field};
use serde::{Deserialize, Serialize};

/// Metadata key of a column's shape.
pub const SHAPE: &str = "stillhouse.shape";
/// Version of the data set format, in the manifest and in the Parquet metadata.
pub const FORMAT_VERSION: u32 = 1;

/// Unique key of a sequence.
pub const SEQUENCE_ID: &str = "sequence_id";
/// Token ids.
pub const INPUT_IDS: &str = "input_ids";
/// False at padding positions.
pub const ATTENTION_MASK: &str = "attention_mask";
/// True where the model is trained, in conversations.
pub const LOSS_MASK: &str = "loss_mask";
/// Offsets in the row at which documents begin.
pub const DOCUMENT_OFFSETS: &str = "document_offsets";
/// Ids of the documents, in the order of the offsets.
pub const DOCUMENT_IDS: &str = "document_ids";
/// Values of columns of the input for these documents (`input.carry`).
pub const DOCUMENT_FIELDS: &str = "document_fields";
/// Class of an image.
pub const LABEL: &str = "label";
/// ln p(x_i | x_<i) under the teacher.
pub const LOGPROB: &str = "logprob";
/// Number of corrections per token.
pub const NOISE_COUNT: &str = "noise_count";
/// Vocabulary ids of the corrections.
pub const NOISE_INDEX: &str = "noise_index";
/// ln p at the corrections.
pub const NOISE_LOGPROB: &str = "noise_logprob";
/// Dense noise ξ.
pub const NOISE: &str = "noise";
/// Vocabulary ids of the top-k tokens.
pub const TOPK_INDEX: &str = "topk_index";
/// Log-probabilities of the top-k tokens.
pub const TOPK_LOGPROB: &str = "topk_logprob";
/// Log-partition functions.
pub const LOGZ: &str = "logz";
/// Hidden states of the teacher's layers.
pub const HIDDEN_STATES: &str = "hidden_states";
/// Entropy of the teacher's next-token distribution.
pub const ENTROPY: &str = "entropy";
/// ln p of the tokens in `extract.candidates`.
pub const CANDIDATE_LOGPROB: &str = "candidate_logprob";
/// Number of distinct sampled tokens per position.
pub const SAMPLED_COUNT: &str = "sampled_count";
/// Vocabulary ids of the sampled tokens.
pub const SAMPLED_INDEX: &str = "sampled_index";
/// How often each token was drawn.
pub const SAMPLED_TIMES: &str = "sampled_times";
/// Ratio p/q of each sampled token.
pub const SAMPLED_RATIO: &str = "sampled_ratio";
/// Number of tokens kept per position under `top_p`.
pub const TOP_P_COUNT: &str = "top_p_count";
/// Vocabulary ids of the kept tokens.
pub const TOP_P_INDEX: &str = "top_p_index";
/// ln p of each kept token.
pub const TOP_P_LOGPROB: &str = "top_p_logprob";
/// ln of the total probability of all other tokens.
pub const TOP_P_TAIL: &str = "top_p_tail";
/// Base-b digits of the tokens.
pub const SUBTOKENS: &str = "subtokens";
/// Group of each token, true for group 1.
pub const PARTITION: &str = "partition";
/// Time t of each view.
pub const PARTITION_T: &str = "partition_t";
/// Positions in the order of generation.
pub const ORDER: &str = "order";
/// Generation block of each token, in the order of generation.
pub const BLOCK: &str = "block";

/// Whether columns of shape [L, …] are fixed-size lists (every row has L positions) or variable-size lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowLength {
    /// Every row has exactly this many positions.
    Fixed(usize),
    /// Rows have at most this many positions (`pack.remainder: keep`).
    UpTo(usize),
}

impl RowLength {
    /// The maximum row length, L.
    pub fn length(self) -> usize {
        match self {
            RowLength::Fixed(l) | RowLength::UpTo(l) => l,
        }
    }

    /// A column with shape `[before, L, after]` per row.
    pub fn field(self, name: &str, item: DataType, before: Option<usize>, after: Option<usize>) -> Field {
        self.field_with_dimensions(name, item, before, after.as_slice())
    }

    /// Like [`field`](Self::field), with any number of dimensions after L.
    pub fn field_with_dimensions(self, name: &str, item: DataType, before: Option<usize>, after: &[usize]) -> Field {
        let length = self.length();
        let item = Arc::new(Field::new_list_field(item, false));
        let width = before.unwrap_or(1) * length * after.iter().product::<usize>();
        let (data_type, l) = match (self, i32::try_from(width)) {
            (RowLength::Fixed(_), Ok(width)) => (DataType::FixedSizeList(item, width), length.to_string()),
            (RowLength::Fixed(_), Err(_)) => (DataType::List(item), length.to_string()),
            (RowLength::UpTo(_), _) => (DataType::List(item), "*".to_owned()),
        };
        let mut shape: Vec<String> = before.into_iter().map(|n| n.to_string()).collect();
        shape.push(l);
        shape.extend(after.iter().map(usize::to_string));
        Field::new(name, data_type, false).with_metadata(shape_metadata(&shape.join(",")))
    }
}

fn shape_metadata(shape: &str) -> HashMap<String, String> {
    HashMap::from([(SHAPE.to_owned(), format!("[{shape}]"))])
}

/// Description of a column, for the table in docs/FORMAT.md and the data set card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Name.
    pub name: &'static str,
    /// Type of the values, the kind of list, and what the choice depends on.
    pub dtype: &'static str,
    /// Which jobs have the column.
    pub when: &'static str,
    /// Shape of a row, such as `[L, k]`; empty for a single value.
    pub shape: &'static str,
    /// What readers of the format can rely on; may be empty if name and shape suffice.
    pub contract: &'static str,
    /// Meaning of the column, for a reader who has only the data set.
    pub meaning: &'static str,
}

/// A column of variable-size lists.
pub fn list_field(name: &str, item: DataType) -> Field {
    Field::new(name, DataType::List(Arc::new(Field::new_list_field(item, false))), false)
        .with_metadata(shape_metadata("*"))
}

/// A fixed-size list column whose width does not depend on L.
pub fn fixed_field(name: &str, item: DataType, width: i32) -> Field {
    Field::new(name, DataType::FixedSizeList(Arc::new(Field::new_list_field(item, false)), width), false)
        .with_metadata(shape_metadata(&width.to_string()))
}

/// The column [`SEQUENCE_ID`].
pub fn sequence_id() -> Field {
    Field::new(SEQUENCE_ID, DataType::UInt64, false)
}

/// Type of a correction count. An entry has at most three values, so one byte suffices for V ≤ 85 and two for V ≤
/// 21,845. For larger V the tolerance decides. The worst case is a teacher with a uniform distribution: a token then
/// has about e_0/(tolerance·ln(V/e_0)) entries (e_0 < 23). That is 16,000 at 2e-4, and more than two bytes can count at
/// 2e-5.
pub fn noise_count_type(vocab_size: usize, tolerance: f64) -> DataType {
    match vocab_size {
        0..=85 => DataType::UInt8,
        86..=21_845 => DataType::UInt16,
        _ if tolerance >= 2e-4 => DataType::UInt16,
        _ => DataType::UInt32,
    }
}

/// Type of the vocabulary id of a correction.
pub fn noise_index_type(vocab_size: usize) -> DataType {
    if vocab_size <= 65_536 { DataType::UInt16 } else { DataType::UInt32 }
}

/// Type of a sub-token with base `base`.
pub fn subtoken_type(base: u32) -> DataType {
    if base <= 256 { DataType::UInt8 } else { DataType::UInt16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_types() {
        let f = RowLength::Fixed(8).field(NOISE_COUNT, DataType::UInt16, Some(2), None);
        assert_eq!(f.metadata()[SHAPE], "[2,8]");
        assert!(matches!(f.data_type(), DataType::FixedSizeList(_, 16)));
        let f = RowLength::Fixed(8).field_with_dimensions(HIDDEN_STATES, DataType::Float16, None, &[2, 3]);
        assert_eq!(f.metadata()[SHAPE], "[8,2,3]");
        assert!(matches!(f.data_type(), DataType::FixedSizeList(_, 48)));
        let f = RowLength::UpTo(8).field(SUBTOKENS, DataType::UInt8, None, Some(4));
        assert_eq!(f.metadata()[SHAPE], "[*,4]");
        assert!(matches!(f.data_type(), DataType::List(_)));
        let counts = [(85, 2e-5), (86, 2e-5), (21_845, 2e-5), (21_846, 2e-4), (21_846, 1.99e-4), (151_936, 1e-3)];
        let types = counts.map(|(vocab, tolerance)| noise_count_type(vocab, tolerance).to_string());
        assert_eq!(types, ["UInt8", "UInt16", "UInt16", "UInt16", "UInt32", "UInt16"]);
        assert_eq!(noise_index_type(65_536), DataType::UInt16);
        assert_eq!(noise_index_type(65_537), DataType::UInt32);
    }
}
