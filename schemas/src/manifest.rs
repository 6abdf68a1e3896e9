//! The manifest of a data set: the job, the input, the teacher, and the checksum of every shard.
//!
//! It contains no time, no host and no path other than those of the job, so the same job gives the same manifest.

mod statistics;

use std::collections::BTreeMap;
use std::fmt;

use arrow_schema::{DataType, Schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::columns::SHAPE;
use crate::ids::SplitId;
use crate::pages::FooterRecord;
use crate::sequence_range::SequenceRange;
use crate::spec::{Dtype, JobSpec};

pub use statistics::{
    BAD_CONVERSATION, DROPPED_DOCUMENTS, DroppedDocument, SourceStatistics, Statistic, Statistics, TRAINED_TOKENS,
};

/// The content of `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the data set format; [`crate::columns::FORMAT_VERSION`].
    pub format_version: u32,
    /// The job with all defaults filled in.
    #[serde(deserialize_with = "job_of_any_version")]
    pub job: JobSpec,
    /// SHA-256 of everything that determines the bytes of the shards: job, tokenizer, teacher, splits.
    pub job_hash: String,
    /// The tokenizer.
    pub tokenizer: TokenizerRecord,
    /// The teacher, if the job has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherRecord>,
    /// Size of the vocabulary for log-probabilities, noise and sub-tokens.
    pub vocab_size: u64,
    /// Seed of the replayed noise, if the data set has noise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_seed: Option<u64>,
    /// Base and length of the sub-tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subtokens: Option<SubtokenRecord>,
    /// SHA-256 of the other files beside the shards, by name.
    #[serde(rename = "beside", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sidecar_files: BTreeMap<String, String>,
    /// The columns in order: name, Arrow type, shape.
    pub columns: Vec<ColumnRecord>,
    /// Splits of the input: the source of each shard.
    pub splits: Vec<SplitRecord>,
    /// Files that were appended to the input after the first run, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub appended: Vec<Appended>,
    /// The shards.
    pub shards: Vec<ShardRecord>,
    /// Totals over the shards, by data set split.
    pub totals: BTreeMap<String, Totals>,
    /// Statistics of the whole data set.
    pub statistics: Statistics,
    /// Source of the rows, if `stillhouse derive` made the data set; `job` is then the job that would make all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub derived_from: Option<Box<DerivedFrom>>,
}

/// The data set from which another one was derived.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DerivedFrom {
    /// SHA-256 of its manifest.
    pub manifest_sha256: String,
    /// Its job, with all defaults filled in.
    #[serde(deserialize_with = "job_of_any_version")]
    pub job: JobSpec,
    /// Its `job_hash`.
    pub job_hash: String,
    /// Columns that were recomputed or added; all others are unchanged.
    pub columns: Vec<String>,
    /// The source of that data set, if it was derived as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub derived_from: Option<Box<DerivedFrom>>,
}

/// Deserializes a job of any version. Noise without the key `condition` predates the key and does not guarantee it, so
/// the key becomes `false`.
fn job_of_any_version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<JobSpec, D::Error> {
    let mut job = Value::deserialize(deserializer)?;
    if let Some(Value::Object(noise)) = job.pointer_mut("/extract/noise") {
        noise.entry("condition").or_insert(Value::Bool(false));
    }
    serde_json::from_value(job).map_err(D::Error::custom)
}

/// The tokenizer that the job used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenizerRecord {
    /// Path, as the job names it.
    pub source: String,
    /// SHA-256 of the data set's `tokenizer.json`.
    pub sha256: String,
    /// Number of entries, including added tokens.
    pub vocab_size: u64,
    /// Special tokens by role (`bos`, `eos`, `pad`, `mask`), if known.
    pub special_tokens: BTreeMap<String, SpecialToken>,
}

/// A special token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialToken {
    /// The token as text.
    pub token: String,
    /// The token id.
    pub id: u32,
}

/// The teacher that the job used, and its arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TeacherRecord {
    /// Path, as the job names it.
    pub source: String,
    /// `gpt2`, `llama`, `qwen3`.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Arithmetic of the forward pass, including the instruction set that determines its bits, such as
    /// `f32 (widened from Q4_1 gguf), products and attention on x86_64 avx512`.
    pub arithmetic: String,
    /// Type of the arithmetic: named by the job, or chosen by `auto`. Absent in data sets of earlier versions, whose
    /// job names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// Error of the arithmetic, if measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<ArithmeticCost>,
    /// `cpu` or `cuda`.
    pub device: String,
    /// SHA-256 of each file.
    pub files: BTreeMap<String, String>,
    /// The token that is prepended to sequences that do not begin with it.
    pub bos_token_id: u32,
}

/// Error of a teacher's next-token distributions relative to f32, over the first tokens of the input.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ArithmeticCost {
    /// Number of tokens measured.
    pub tokens: u64,
    /// Mean of KL(f32 ‖ this arithmetic), in nat.
    pub mean_kl_nats: f64,
    /// Largest KL, in nat.
    pub max_kl_nats: f64,
    /// Largest change of a token's log-probability, in nat.
    pub max_logprob_change_nats: f64,
}

impl fmt::Display for ArithmeticCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, mean_kl_nats, max_kl_nats, max_logprob_change_nats } = self;
        write!(
            f,
            "KL from f32 {mean_kl_nats:.1e} nat (largest {max_kl_nats:.1e}), log-probabilities by up to {max_logprob_change_nats:.1e} nat, over \
             {tokens} tokens"
        )
    }
}

/// Arithmetic of a job's teacher, as recorded in the plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TeacherArithmetic {
    /// The type: named by the job, or chosen by `auto`.
    pub dtype: Dtype,
    /// Description, including the instruction set or device.
    pub arithmetic: String,
    /// Error of the arithmetic, if measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<ArithmeticCost>,
    /// Maximum tokens of a pass on a GPU. They affect the last bits of the logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_tokens: Option<u64>,
}

/// Base-b coding of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubtokenRecord {
    /// Base b.
    pub base: u32,
    /// Digits per token, ℓ.
    pub length: u32,
}

/// A column.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnRecord {
    /// Name.
    pub name: String,
    /// Arrow type of the column.
    pub data_type: String,
    /// Shape per row, such as `[1024,4]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shape: Option<String>,
}

impl ColumnRecord {
    /// The columns of a schema, in its order.
    pub fn of_schema(schema: &Schema) -> Vec<Self> {
        let record = |field: &arrow_schema::FieldRef| Self {
            name: field.name().clone(),
            data_type: type_name(field.data_type()),
            shape: field.metadata().get(SHAPE).cloned(),
        };
        schema.fields().iter().map(record).collect()
    }
}

fn type_name(data_type: &DataType) -> String {
    match data_type {
        DataType::FixedSizeList(item, n) => format!("fixed_size_list<{}>[{n}]", type_name(item.data_type())),
        DataType::List(item) => format!("list<{}>", type_name(item.data_type())),
        DataType::Struct(fields) => {
            let field = |field: &arrow_schema::FieldRef| format!("{}: {}", field.name(), type_name(field.data_type()));
            format!("struct<{}>", fields.iter().map(field).collect::<Vec<_>>().join(", "))
        }
        DataType::Boolean => "bool".into(),
        DataType::Utf8 => "string".into(),
        other => other.to_string().to_lowercase(),
    }
}

/// A split: the piece of the input that becomes one shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitRecord {
    /// Number of the split; the high 32 bits of the ids of its sequences and documents.
    pub split: SplitId,
    /// `train`, or a holdout such as `validation`.
    pub dataset_split: String,
    /// The file ranges that the split reads, in order.
    pub pieces: Vec<Piece>,
    /// The documents that the split takes from these ranges, if not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<KeyRange>,
    /// Number of the append that added the split, from 1; 0 for the original input.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub appended: u32,
    /// Position of its sequences in the data set, if the job depends on it (`orders.schedule`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<SequenceRange>,
}

fn is_zero<N: Default + PartialEq>(n: &N) -> bool {
    *n == N::default()
}

/// Files that were appended to a finished data set. Their splits follow the existing ones.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Appended {
    /// Hash of the job before the append.
    pub to: String,
    /// Names relative to the common folder of all input files, in order.
    pub files: Vec<String>,
}

/// Selects documents whose key lies from `first` to `last`, both inclusive.
///
/// The key of a document is a hash of the seed and its text; docs/FORMAT.md defines it exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRange {
    /// Seed of the keys.
    pub seed: u64,
    /// Smallest key; 16 hexadecimal digits in JSON.
    #[serde(with = "hexadecimal")]
    pub first: u64,
    /// Largest key; 16 hexadecimal digits in JSON.
    #[serde(with = "hexadecimal")]
    pub last: u64,
}

impl KeyRange {
    /// Whether the range contains a key.
    pub fn contains(&self, key: u64) -> bool {
        (self.first..=self.last).contains(&key)
    }

    /// The fraction of all keys that the range contains.
    pub fn share(&self) -> f64 {
        (self.last.saturating_sub(self.first) as f64 + 1.0) / KEYS
    }
}

/// Number of keys, 2^64.
pub const KEYS: f64 = 18_446_744_073_709_551_616.0;

/// Serializes keys as hexadecimal text: many JSON readers lose precision above 2^53.
mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(key: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&format!("{key:016x}"))
    }

    pub fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<u64, D::Error> {
        u64::from_str_radix(&String::deserialize(from)?, 16).map_err(D::Error::custom)
    }
}

/// A range of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Path of the file, as found through the job's paths.
    pub file: String,
    /// The part of the file.
    pub range: Range,
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Range {
    /// Records that begin in this byte range of the decompressed file.
    Bytes {
        /// First byte.
        start: u64,
        /// End of the range, exclusive.
        end: u64,
        /// Line number at `start`, from 1, if the planner counted lines.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        line: Option<u64>,
    },
    /// Rows of a columnar file.
    Rows {
        /// First row.
        start: u64,
        /// End of the range, exclusive.
        end: u64,
    },
}

/// A shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Path relative to the data set's folder.
    pub path: String,
    /// Data set split, such as `train`.
    pub dataset_split: String,
    /// The split that the shard was made from.
    pub split: SplitId,
    /// Number of packed sequences.
    pub rows: u64,
    /// Number of tokens, without padding.
    pub tokens: u64,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file.
    pub sha256: String,
    /// End of the file, which locates all other parts. Absent in shards of older versions, which have no page
    /// checksums.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub footer: Option<FooterRecord>,
    /// Compressed bytes of each column.
    pub column_bytes: BTreeMap<String, u64>,
    /// For each piece of the split, in order, the SHA-256 of its records. A good record contributes the length of its
    /// text in bytes (8 bytes, little-endian) and the text; a bad record contributes eight bytes 0xff.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input_sha256: Vec<String>,
    /// Statistics of the input and of the shard.
    pub statistics: Statistics,
}

/// Totals over shards.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Number of shards.
    pub shards: u64,
    /// Number of packed sequences.
    pub rows: u64,
    /// Number of tokens, without padding.
    pub tokens: u64,
    /// Bytes of all shards.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histogram_bins_are_powers_of_two() {
        let mut s = Statistics::default();
        for n in [0, 0, 1, 2, 3, 4, 7, 8] {
            s.count_corrections(n);
        }
        assert_eq!(s.corrections_histogram, [2, 1, 2, 2, 1]);
        let mut t = Statistics::default();
        t.add(&s);
        t.add(&s);
        assert_eq!((t.corrections, t.corrections_max), (50, 8));
    }

    #[test]
    fn statistics_of_operators_add_up_as_they_say() {
        let one = |sum, max| {
            let mut s = Statistics::default();
            s.count("tokens", Statistic::Sum(sum));
            s.count("longest", Statistic::Max(max));
            s
        };
        let mut all = one(3, 0.5);
        all.add(&one(4, 0.25));
        assert_eq!(all, one(7, 0.5));
        let json = serde_json::to_value(&all).unwrap();
        assert_eq!(json["operators"], serde_json::json!({"longest": {"max": 0.5}, "tokens": {"sum": 7}}));
        assert!(serde_json::to_value(Statistics::default()).unwrap().get("operators").is_none());
    }
}
