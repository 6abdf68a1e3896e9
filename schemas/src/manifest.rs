//! The manifest of a data set: what was made, from what, by which teacher, and the checksum of every shard.
//!
//! It holds no time, no host and no path of the machine other than the job's own, so the same job gives the same manifest.

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

/// `manifest.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the data set format; [`crate::columns::FORMAT_VERSION`].
    pub format_version: u32,
    /// The job with all defaults filled in.
    #[serde(deserialize_with = "job_of_any_version")]
    pub job: JobSpec,
    /// sha256 of everything that decides the bytes of the shards: job, tokenizer, teacher, splits.
    pub job_hash: String,
    /// The tokenizer.
    pub tokenizer: TokenizerRecord,
    /// The teacher, where the job has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<TeacherRecord>,
    /// Size of the vocabulary that log-probabilities, noise and sub-tokens are over.
    pub vocab_size: u64,
    /// Seed of the replayed noise, where there is noise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise_seed: Option<u64>,
    /// Base and length of the sub-tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subtokens: Option<SubtokenRecord>,
    /// sha256 of the further files beside the shards, by name.
    #[serde(rename = "beside", default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sidecar_files: BTreeMap<String, String>,
    /// The columns, in their order: name, Arrow type, shape.
    pub columns: Vec<ColumnRecord>,
    /// Splits of the input: what each shard was made from.
    pub splits: Vec<SplitRecord>,
    /// The files that were appended to the input after its first run, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub appended: Vec<Appended>,
    /// The shards.
    pub shards: Vec<ShardRecord>,
    /// Sums over the shards, by data set split.
    pub totals: BTreeMap<String, Totals>,
    /// Statistics over the whole data set.
    pub statistics: Statistics,
    /// Where its rows come from, where `stillhouse derive` made it of another data set; `job` is then the job that would make all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub derived_from: Option<Box<DerivedFrom>>,
}

/// The data set that another one was derived from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DerivedFrom {
    /// sha256 of its manifest.
    pub manifest_sha256: String,
    /// Its job, with all defaults filled in.
    #[serde(deserialize_with = "job_of_any_version")]
    pub job: JobSpec,
    /// Its `job_hash`.
    pub job_hash: String,
    /// Columns that were made anew or added; all others are as they were.
    pub columns: Vec<String>,
    /// Where that one was derived, too: from what.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub derived_from: Option<Box<DerivedFrom>>,
}

/// A job whose noise says nothing about `condition` was run before there was one, and promises none.
fn job_of_any_version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<JobSpec, D::Error> {
    let mut job = Value::deserialize(deserializer)?;
    if let Some(Value::Object(noise)) = job.pointer_mut("/extract/noise") {
        noise.entry("condition").or_insert(Value::Bool(false));
    }
    serde_json::from_value(job).map_err(D::Error::custom)
}

/// The tokenizer that was used.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenizerRecord {
    /// As the job names it.
    pub source: String,
    /// sha256 of the data set's `tokenizer.json`.
    pub sha256: String,
    /// Entries, added tokens included.
    pub vocab_size: u64,
    /// Special tokens by role (`bos`, `eos`, `pad`, `mask`), where known.
    pub special_tokens: BTreeMap<String, SpecialToken>,
}

/// A special token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialToken {
    /// As text.
    pub token: String,
    /// As id.
    pub id: u32,
}

/// The teacher that was used, with its arithmetic.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TeacherRecord {
    /// As the job names it.
    pub source: String,
    /// `gpt2`, `llama`, `qwen3`.
    pub architecture: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Arithmetic of the forward pass, with the instructions that its bits depend on, such as
    /// `f32 (widened from Q4_1 gguf), products and attention on x86_64 avx512`.
    pub arithmetic: String,
    /// The type of it: what the job names, or what `auto` chose. Missing where an earlier version made the data set; then the job names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dtype: Option<Dtype>,
    /// What the arithmetic costs, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<ArithmeticCost>,
    /// `cpu` or `cuda`.
    pub device: String,
    /// sha256 by file.
    pub files: BTreeMap<String, String>,
    /// The token that is put before sequences that do not begin with it.
    pub bos_token_id: u32,
}

/// How a teacher's next-token distributions differ from those in f32, over the first tokens of the input.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ArithmeticCost {
    /// Tokens that it was measured on.
    pub tokens: u64,
    /// Mean of KL(f32 ‖ this), nat.
    pub mean_kl_nats: f64,
    /// The largest, nat.
    pub max_kl_nats: f64,
    /// The largest change of the log-probability of a token, nat.
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

/// In which arithmetic a job's teacher computes, as its plan keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TeacherArithmetic {
    /// The type: what the job names, or what `auto` chose.
    pub dtype: Dtype,
    /// In words, with what the machine computes it with.
    pub arithmetic: String,
    /// What it costs, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<ArithmeticCost>,
    /// Tokens of a pass at most, on a GPU: they show in the last bits of the logits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pass_tokens: Option<u64>,
}

/// Base-b coding of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubtokenRecord {
    /// b.
    pub base: u32,
    /// ℓ.
    pub length: u32,
}

/// A column.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ColumnRecord {
    /// Name.
    pub name: String,
    /// Arrow type of the values.
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
        DataType::Boolean => "bool".into(),
        other => other.to_string().to_lowercase(),
    }
}

/// A split: the piece of the input that a shard was made from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SplitRecord {
    /// Its number; the high 32 bits of the ids of its sequences and documents.
    pub split: SplitId,
    /// `train`, `validation`.
    pub dataset_split: String,
    /// The ranges of files it reads, in order.
    pub pieces: Vec<Piece>,
    /// Which of the documents there it takes, where not all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<KeyRange>,
    /// With which append it came, counted from 1; 0 for what was there from the start.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub appended: u32,
    /// Where its sequences stand in the data set, where something depends on that (`orders.schedule`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<SequenceRange>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// Files that were appended to a finished data set; their splits come after those that were there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Appended {
    /// Hash of the job as it was before.
    pub to: String,
    /// Their names below the common folder of all files of the input, in their order.
    pub files: Vec<String>,
}

/// Documents by their key: those whose key lies from `first` to `last`, both included.
///
/// The key of a document is a hash of the seed and its text; docs/FORMAT.md has it to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRange {
    /// The seed of the keys.
    pub seed: u64,
    /// Smallest key, as 16 hexadecimal digits in JSON.
    #[serde(with = "hexadecimal")]
    pub first: u64,
    /// Largest key, likewise.
    #[serde(with = "hexadecimal")]
    pub last: u64,
}

impl KeyRange {
    /// Whether a document with this key is one of them.
    pub fn holds(&self, key: u64) -> bool {
        (self.first..=self.last).contains(&key)
    }

    /// The part of all keys that lies in the range.
    pub fn share(&self) -> f64 {
        (self.last.saturating_sub(self.first) as f64 + 1.0) / KEYS
    }
}

/// How many keys there are, 2^64.
pub const KEYS: f64 = 18_446_744_073_709_551_616.0;

/// JSON numbers above 2^53 are not exact everywhere.
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
    /// The file, as found by the job's paths.
    pub file: String,
    /// What part of it.
    pub range: Range,
}

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Range {
    /// Records that begin in these bytes of the decompressed file.
    Bytes {
        /// First byte.
        start: u64,
        /// One past the last byte.
        end: u64,
        /// Line number (from 1) at `start`, where the planner counted lines.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        line: Option<u64>,
    },
    /// Rows of a columnar file.
    Rows {
        /// First row.
        start: u64,
        /// One past the last row.
        end: u64,
    },
}

/// A shard.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Path under the data set's folder.
    pub path: String,
    /// Data set split.
    pub dataset_split: String,
    /// The split it was made from.
    pub split: SplitId,
    /// Packed sequences.
    pub rows: u64,
    /// Tokens, padding not counted.
    pub tokens: u64,
    /// Size of the file.
    pub bytes: u64,
    /// Checksum of the file.
    pub sha256: String,
    /// Its end, which says where everything else lies; without it the shard has no checksums of pages (an older version wrote it).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub footer: Option<FooterRecord>,
    /// Compressed bytes by column.
    pub column_bytes: BTreeMap<String, u64>,
    /// What was read: for each piece of its split, in order, the sha256 of the piece's records. Of a good record the number of bytes of
    /// its text (8 bytes, little-endian) and its text, of a bad one eight bytes 0xff.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub input_sha256: Vec<String>,
    /// What went in and what was seen.
    pub statistics: Statistics,
}

/// Sums over shards.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Shards.
    pub shards: u64,
    /// Packed sequences.
    pub rows: u64,
    /// Tokens, padding not counted.
    pub tokens: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Statistics of a shard or a data set; sums, so that they add up.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// Documents read.
    pub documents: u64,
    /// Records skipped, by reason. They are not among the documents.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub skipped: BTreeMap<String, u64>,
    /// Documents that gave no token: they are read, and nothing of them is in a sequence but a separator.
    #[serde(default)]
    pub empty_documents: u64,
    /// Bytes of text after cleaning.
    pub text_bytes: u64,
    /// Tokens of text, before packing.
    pub text_tokens: u64,
    /// Tokens of the remainder that were dropped.
    pub dropped_tokens: u64,
    /// Tokens that the teacher predicted.
    #[serde(default)]
    pub predicted_tokens: u64,
    /// Σ ln p over predicted tokens.
    #[serde(default)]
    pub logprob_sum: f64,
    /// Corrections, summed over tokens and draws.
    #[serde(default)]
    pub corrections: u64,
    /// Corrections per token and draw: how many tokens have 0, 1, 2–3, 4–7, … (by powers of two).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub corrections_histogram: Vec<u64>,
    /// Largest number of corrections of one token.
    #[serde(default)]
    pub corrections_max: u64,
    /// Largest total variation that the encoder left, over all tokens and draws.
    #[serde(default)]
    pub total_variation_max: f64,
    /// What operators count beside that, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub operators: BTreeMap<String, Statistic>,
}

/// A statistic of an operator: a number that says how two of it become one.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Statistic {
    /// They are added.
    Sum(u64),
    /// The largest counts.
    Max(f64),
}

impl Statistic {
    /// Both as one; of two kinds the first stays.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Sum(a), Self::Sum(b)) => Self::Sum(a + b),
            (Self::Max(a), Self::Max(b)) => Self::Max(a.max(b)),
            (one, _) => one,
        }
    }
}

impl Statistics {
    /// Adds another shard's statistics.
    pub fn add(&mut self, other: &Statistics) {
        self.documents += other.documents;
        for (reason, n) in &other.skipped {
            *self.skipped.entry(reason.clone()).or_default() += n;
        }
        self.empty_documents += other.empty_documents;
        self.text_bytes += other.text_bytes;
        self.text_tokens += other.text_tokens;
        self.dropped_tokens += other.dropped_tokens;
        self.predicted_tokens += other.predicted_tokens;
        self.logprob_sum += other.logprob_sum;
        self.corrections += other.corrections;
        if self.corrections_histogram.len() < other.corrections_histogram.len() {
            self.corrections_histogram.resize(other.corrections_histogram.len(), 0);
        }
        for (sum, n) in self.corrections_histogram.iter_mut().zip(&other.corrections_histogram) {
            *sum += n;
        }
        self.corrections_max = self.corrections_max.max(other.corrections_max);
        self.total_variation_max = self.total_variation_max.max(other.total_variation_max);
        for (name, statistic) in &other.operators {
            self.count(name, *statistic);
        }
    }

    /// Adds to a statistic of an operator.
    pub fn count(&mut self, name: &str, more: Statistic) {
        match self.operators.get_mut(name) {
            Some(sum) => *sum = sum.and(more),
            None => drop(self.operators.insert(name.to_owned(), more)),
        }
    }

    /// Records skipped, for whatever reason.
    pub fn records_skipped(&self) -> u64 {
        self.skipped.values().sum()
    }

    /// Records of the input: documents and what was skipped.
    pub fn records(&self) -> u64 {
        self.documents + self.records_skipped()
    }

    /// Counts one token's corrections.
    pub fn count_corrections(&mut self, corrections: u64) {
        let bin = (u64::BITS - corrections.leading_zeros()) as usize;
        if self.corrections_histogram.len() <= bin {
            self.corrections_histogram.resize(bin + 1, 0);
        }
        self.corrections_histogram[bin] += 1;
        self.corrections += corrections;
        self.corrections_max = self.corrections_max.max(corrections);
    }

    /// Perplexity of the text under the teacher, exp(−mean ln p).
    pub fn perplexity(&self) -> Option<f64> {
        (self.predicted_tokens > 0).then(|| (-self.logprob_sum / self.predicted_tokens as f64).exp())
    }
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
