//! The columns of a data set: names, Arrow types and shapes, written once for the writer, the reader and `verify`.
//!
//! One row is one packed sequence of L positions. D is `draws`, V the vocabulary, k `topk`, ℓ `subtokens.length`.
//! Shapes are stored in the field metadata under [`SHAPE`], such as `[1024,4]`; a `*` is a length that varies.
//!
//! Which operator adds which column, with type, shape and meaning, stands in docs/FORMAT.md, whose table is made from what the operators
//! declare.
//!
//! With `pack.remainder: keep` rows may be shorter than L, and "fixed list" becomes "list".

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
/// False on padding.
pub const ATTENTION_MASK: &str = "attention_mask";
/// Where documents begin in the row.
pub const DOCUMENT_OFFSETS: &str = "document_offsets";
/// Which documents, in the order of the offsets.
pub const DOCUMENT_IDS: &str = "document_ids";
/// Class of an image.
pub const LABEL: &str = "label";
/// ln p(x_i | x_<i) under the teacher.
pub const LOGPROB: &str = "logprob";
/// Corrections of each token.
pub const NOISE_COUNT: &str = "noise_count";
/// Vocabulary entries of the corrections.
pub const NOISE_INDEX: &str = "noise_index";
/// ln p of the corrections.
pub const NOISE_LOGPROB: &str = "noise_logprob";
/// Dense ξ.
pub const NOISE: &str = "noise";
/// Top-k entries.
pub const TOPK_INDEX: &str = "topk_index";
/// Top-k log-probabilities.
pub const TOPK_LOGPROB: &str = "topk_logprob";
/// Log-partitions.
pub const LOGZ: &str = "logz";
/// Hidden states of the teacher's layers.
pub const HIDDEN_STATES: &str = "hidden_states";
/// Entropy of the teacher's distribution.
pub const ENTROPY: &str = "entropy";
/// ln p of given entries.
pub const CANDIDATE_LOGPROB: &str = "candidate_logprob";
/// Distinct sampled tokens of each position.
pub const SAMPLED_COUNT: &str = "sampled_count";
/// Which they are.
pub const SAMPLED_INDEX: &str = "sampled_index";
/// How often each was drawn.
pub const SAMPLED_TIMES: &str = "sampled_times";
/// p/q of each.
pub const SAMPLED_RATIO: &str = "sampled_ratio";
/// Entries kept of each position under `top_p`.
pub const TOP_P_COUNT: &str = "top_p_count";
/// Which they are.
pub const TOP_P_INDEX: &str = "top_p_index";
/// ln p of each.
pub const TOP_P_LOGPROB: &str = "top_p_logprob";
/// ln of what the others hold.
pub const TOP_P_TAIL: &str = "top_p_tail";
/// Base-b digits.
pub const SUBTOKENS: &str = "subtokens";
/// Group of each token, true for group 1.
pub const PARTITION: &str = "partition";
/// t of each view.
pub const PARTITION_T: &str = "partition_t";
/// Positions in the order of generation.
pub const ORDER: &str = "order";
/// Block of generation of each token, in the order of generation.
pub const BLOCK: &str = "block";

/// Whether the columns of shape [L, …] are fixed-size lists (every row has L positions) or lists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rows {
    /// Every row has exactly this many positions.
    Fixed(usize),
    /// Rows have at most this many positions (`pack.remainder: keep`).
    UpTo(usize),
}

impl Rows {
    /// The longest row, L.
    pub fn length(self) -> usize {
        match self {
            Rows::Fixed(l) | Rows::UpTo(l) => l,
        }
    }

    /// A column with `before × L × after` values per row.
    pub fn field(self, name: &str, item: DataType, before: Option<usize>, after: Option<usize>) -> Field {
        self.field_of(name, item, before, after.as_slice())
    }

    /// The same with any number of dimensions after L.
    pub fn field_of(self, name: &str, item: DataType, before: Option<usize>, after: &[usize]) -> Field {
        let length = self.length();
        let item = Arc::new(Field::new_list_field(item, false));
        let width = before.unwrap_or(1) * length * after.iter().product::<usize>();
        let (data_type, l) = match (self, i32::try_from(width)) {
            (Rows::Fixed(_), Ok(width)) => (DataType::FixedSizeList(item, width), length.to_string()),
            (Rows::Fixed(_), Err(_)) => (DataType::List(item), length.to_string()),
            (Rows::UpTo(_), _) => (DataType::List(item), "*".to_owned()),
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

/// A column of lists of any length.
pub fn list_field(name: &str, item: DataType) -> Field {
    Field::new(name, DataType::List(Arc::new(Field::new_list_field(item, false))), false)
        .with_metadata(shape_metadata("*"))
}

/// A fixed-size list column that does not depend on L.
pub fn fixed_field(name: &str, item: DataType, width: i32) -> Field {
    Field::new(name, DataType::FixedSizeList(Arc::new(Field::new_list_field(item, false)), width), false)
        .with_metadata(shape_metadata(&width.to_string()))
}

/// The column `sequence_id`.
pub fn sequence_id() -> Field {
    Field::new(SEQUENCE_ID, DataType::UInt64, false)
}

/// Type of a correction count. An entry has at most three values, so a byte is enough for V ≤ 85 and two are for
/// V ≤ 21,845. Beyond that the tolerance decides: with a teacher that knows nothing, the worst there is, a token has about
/// e_0/(tolerance·ln(V/e_0)) entries (e_0 < 23), which is 16,000 at 2e-4 and more than two bytes count at 2e-5.
pub fn noise_count_type(vocab_size: usize, tolerance: f64) -> DataType {
    match vocab_size {
        0..=85 => DataType::UInt8,
        86..=21_845 => DataType::UInt16,
        _ if tolerance >= 2e-4 => DataType::UInt16,
        _ => DataType::UInt32,
    }
}

/// Type of a correction's vocabulary entry.
pub fn noise_index_type(vocab_size: usize) -> DataType {
    if vocab_size <= 65_536 { DataType::UInt16 } else { DataType::UInt32 }
}

/// Type of a sub-token in base `b`.
pub fn subtoken_type(base: u32) -> DataType {
    if base <= 256 { DataType::UInt8 } else { DataType::UInt16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_types() {
        let f = Rows::Fixed(8).field(NOISE_COUNT, DataType::UInt16, Some(2), None);
        assert_eq!(f.metadata()[SHAPE], "[2,8]");
        assert!(matches!(f.data_type(), DataType::FixedSizeList(_, 16)));
        let f = Rows::Fixed(8).field_of(HIDDEN_STATES, DataType::Float16, None, &[2, 3]);
        assert_eq!(f.metadata()[SHAPE], "[8,2,3]");
        assert!(matches!(f.data_type(), DataType::FixedSizeList(_, 48)));
        let f = Rows::UpTo(8).field(SUBTOKENS, DataType::UInt8, None, Some(4));
        assert_eq!(f.metadata()[SHAPE], "[*,4]");
        assert!(matches!(f.data_type(), DataType::List(_)));
        let counts = [(85, 2e-5), (86, 2e-5), (21_845, 2e-5), (21_846, 2e-4), (21_846, 1.99e-4), (151_936, 1e-3)];
        let types = counts.map(|(vocab, tolerance)| noise_count_type(vocab, tolerance).to_string());
        assert_eq!(types, ["UInt8", "UInt16", "UInt16", "UInt16", "UInt32", "UInt16"]);
        assert_eq!(noise_index_type(65_536), DataType::UInt16);
        assert_eq!(noise_index_type(65_537), DataType::UInt32);
    }
}
