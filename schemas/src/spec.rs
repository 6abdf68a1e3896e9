//! The job file, version 1: every key, typed, with its unit, bounds and default.
//!
//! The JSON Schema (`stillhouse schema`), the structural checks (see [`crate::parse`]) and the values that the pipeline
//! runs with all come from these types. Unknown keys are refused at every level.

mod extract;
mod images;
mod input;
pub mod sections;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::extract::{
    Dtype, Extract, ExtractMode, HiddenStates, Noise, NoiseCodec, NoisePrecision, Sequential, Stop, TeacherContext,
    TeacherSpec,
};
pub use self::images::{
    Background, Channels, Codes, Filter, Fit, ImageLabels, Images, Layout, Orientation, PIXEL_VALUES, Profile,
};
pub use self::input::{
    ColumnType, Compression, FILE_COLUMN, Holdout, INPUT_TABLE, Input, InputFormat, Mixture, MixtureStage, OnError,
    SOURCE_COLUMN, Source, Table, TextDocument,
};
use self::sections::Sections;

use crate::storage::Storage;

/// A batch job: from raw corpora to training shards.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(deny_unknown_fields)]
pub struct JobSpec {
    /// Version of the job file format. This program reads version 1.
    #[schemars(range(min = 1, max = 1))]
    pub version: u32,
    /// Name of the job: lower-case letters, digits, `.`, `_` and `-`.
    #[schemars(regex(pattern = r"^[a-z0-9][a-z0-9._-]{0,99}$"))]
    #[schemars(extend("x-identity" = false))]
    pub name: String,
    /// Seed of every random choice of the job (0 to 2^63 − 1).
    #[serde(default)]
    #[schemars(range(min = 0, max = 9_223_372_036_854_775_807_u64))]
    pub seed: u64,
    /// The input.
    pub input: Input,
    /// The tokenizer. Without `path` the teacher's own is used.
    #[serde(default)]
    pub tokenizer: Tokenizer,
    /// How documents become sequences of `length` tokens.
    pub pack: Pack,
    /// The teacher, and what to store of it. Without it the job is a fast tokenizer and packer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extract: Option<Extract>,
    /// The output: where the data set is written.
    pub output: Output,
    /// Options of object stores. The shards do not depend on them.
    #[serde(default, skip_serializing_if = "Storage::is_unset")]
    #[schemars(extend("x-identity" = false))]
    pub storage: Storage,
    /// The engine that runs the job. The shards do not depend on it.
    #[serde(default)]
    #[schemars(extend("x-identity" = false))]
    pub engine: Engine,
    /// Sections of operators. [`crate::parse::JobFormat`] defines which ones exist and their keys.
    #[serde(flatten)]
    #[schemars(skip)]
    pub sections: Sections,
}

/// The tokenizer and its special tokens.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Tokenizer {
    /// `tokenizer.json`, a folder that holds one, a `.gguf`, or `hf://org/name[@revision]`. Default: the teacher's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-identity" = false))]
    pub path: Option<String>,
    /// The token that begins a sequence, as text. Default: from the tokenizer's or the teacher's configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bos: Option<String>,
    /// The token that ends a document, as text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eos: Option<String>,
    /// The padding token, as text. Default: the tokenizer's, else eos.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad: Option<String>,
    /// The mask token, as text. Recorded in the manifest for trainers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mask: Option<String>,
    /// How a special token that is written in a document, such as `<|endoftext|>`, is encoded.
    pub special_tokens: SpecialTokens,
    /// Whether the tokenizer may differ from the teacher's own.
    pub differs_from_teacher: TokenizerDifference,
}

/// How a special token that is written in a document is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpecialTokens {
    /// As text: its characters are encoded as ordinary ones.
    #[default]
    Text,
    /// As the token itself. After eos and before bos a segment begins, see `document_offsets`.
    Parse,
}

/// Whether the tokenizer and the teacher may disagree on the meaning of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerDifference {
    /// The job is refused if they disagree, or if nothing shows that they agree.
    #[default]
    Refuse,
    /// The job runs. Only one thing is checked: every id has a row in the teacher's vocabulary.
    Allow,
}

/// How documents become sequences.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pack {
    /// `wrap` concatenates documents and cuts the result; `pad` gives each document its own row; `best_fit` puts whole
    /// documents into rows, each where it leaves the least space.
    #[serde(default)]
    pub mode: PackMode,
    /// Tokens per sequence, L.
    #[schemars(range(min = 2, max = 1_048_576))]
    pub length: u32,
    /// For `wrap` and `best_fit`: the token after every document.
    #[serde(default)]
    pub separator: Separator,
    /// The tokens at both ends of a sequence.
    #[serde(default)]
    pub boundary: Boundary,
    /// For `wrap`: what happens to the last tokens of a split that do not fill a sequence.
    #[serde(default)]
    pub remainder: Remainder,
}

/// How rows are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PackMode {
    /// Documents are joined and cut into blocks.
    #[default]
    Wrap,
    /// One document per row, truncated or padded.
    Pad,
    /// Whole documents in every row, each where it leaves the least space; the rest is padding. A document longer than a
    /// row fills rows of its own first.
    BestFit,
}

impl PackMode {
    /// Whether rows are filled up with padding.
    pub fn pads(self) -> bool {
        self != Self::Wrap
    }
}

/// The token after every document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Separator {
    /// The eos token.
    #[default]
    Eos,
    /// No token.
    None,
}

/// The tokens at both ends of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Boundary {
    /// BOS, length − 2 tokens, EOS (the MDLM convention).
    #[default]
    BosEos,
    /// No tokens: all `length` tokens are text.
    None,
}

/// What happens to tokens that do not fill a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Remainder {
    /// They are dropped.
    #[default]
    Drop,
    /// They become a row that is filled up with padding, where `attention_mask` is false.
    Pad,
    /// They become a shorter row. The columns of shape `[L]` are then variable-size lists.
    Keep,
}

/// Where the data set is written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Output {
    /// A folder, relative to the job file's folder, or a URL: s3://bucket/folder, gs://, az://.
    #[schemars(extend("x-identity" = false))]
    pub path: String,
    /// Options of the output's store, where they differ from `storage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-identity" = false))]
    pub storage: Option<Storage>,
    /// Facts for the data set card that the job does not contain otherwise. The shards do not depend on them.
    #[serde(default, skip_serializing_if = "Card::is_empty")]
    #[schemars(extend("x-identity" = false))]
    pub card: Card,
    /// Target size of a shard in megabytes (10^6 bytes), unless `input.split_megabytes` sets the size of splits. A split
    /// becomes one shard.
    #[serde(default = "default_shard")]
    #[schemars(range(min = 0.01, max = 100_000.0))]
    pub shard_megabytes: f64,
    /// Largest row group before compression, in megabytes (10^6 bytes).
    #[serde(default = "default_row_group")]
    #[schemars(range(min = 1, max = 100))]
    pub row_group_megabytes: u32,
    /// Level of zstd compression.
    #[serde(default = "default_zstd")]
    #[schemars(range(min = 1, max = 22))]
    pub zstd_level: i32,
}

/// Facts for the data set card that the job does not contain otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Card {
    /// License of the data set, as SPDX names it: `CC-BY-4.0`, `ODC-By-1.0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[A-Za-z0-9][A-Za-z0-9.+-]{0,63}$"))]
    pub license: Option<String>,
}

impl Card {
    /// Whether no key is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The engine that runs the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Engine {
    /// `local`: this process. `ballista`: a cluster, in a program that was built with cluster support.
    pub kind: EngineKind,
    /// Kind `ballista`: address of the scheduler (`stillhouse scheduler`), as `host:port`, or `https://host:port` with TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<String>,
    /// Kind `local`: number of splits in progress; on a cluster the slots of the executors decide it. Default: 2 with a teacher, else one per processor; fewer if `memory_megabytes` is too small for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub parallel_splits: Option<u32>,
    /// Memory of each process for its splits in progress, in megabytes (10^6 bytes). A split takes about three times `output.row_group_megabytes`. Default: no
    /// bound other than `parallel_splits`. The teacher is not included.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 16, max = 1_048_576))]
    pub memory_megabytes: Option<u32>,
    /// Memory for `input.sql` and for the sort of a mixture, in megabytes (10^6 bytes). Data beyond it is spilled to disk.
    #[schemars(range(min = 16, max = 1_048_576))]
    pub sql_memory_megabytes: u32,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            kind: EngineKind::Local,
            scheduler: None,
            parallel_splits: None,
            memory_megabytes: None,
            sql_memory_megabytes: 1024,
        }
    }
}

/// Engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EngineKind {
    /// This process.
    #[default]
    Local,
    /// A Ballista cluster.
    Ballista,
}

fn default_shard() -> f64 {
    500.0
}
fn default_row_group() -> u32 {
    100
}
fn default_zstd() -> i32 {
    3
}

impl JobSpec {
    /// Options of the input's stores.
    pub fn input_storage(&self) -> Storage {
        self.input.storage.as_ref().map_or_else(|| self.storage.clone(), |own| own.with_defaults_from(&self.storage))
    }

    /// Options of the output's store.
    pub fn output_storage(&self) -> Storage {
        self.output.storage.as_ref().map_or_else(|| self.storage.clone(), |own| own.with_defaults_from(&self.storage))
    }

    /// Rule for the remainder of a data set split (`train`, `validation`).
    pub fn remainder_of(&self, dataset_split: &str) -> Remainder {
        self.input.holdout.get(dataset_split).and_then(|h| h.remainder).unwrap_or(self.pack.remainder)
    }

    /// The remainder rules of all data set splits of the job.
    pub fn remainders(&self) -> Vec<Remainder> {
        std::iter::once(self.pack.remainder).chain(self.input.holdout.values().filter_map(|h| h.remainder)).collect()
    }

    /// Whether rows may be shorter than `pack.length`, so that columns of shape `[L]` are variable-size lists.
    pub fn has_short_rows(&self) -> bool {
        self.pack.mode == PackMode::Wrap && self.remainders().contains(&Remainder::Keep)
    }

    /// Whether rows may contain padding, so that the data set has the column `attention_mask`.
    pub fn has_padding(&self) -> bool {
        self.pack.mode.pads() || self.remainders().contains(&Remainder::Pad)
    }

    /// Options of generation; `None` if the teacher does not write the text.
    pub fn sequential(&self) -> Option<Sequential> {
        let extract = self.extract.as_ref().filter(|e| e.mode == ExtractMode::Sequential)?;
        Some(extract.sequential.clone().unwrap_or_default())
    }

    /// Whether the noise of the tokens can be replayed from a seed: it is stored, or the text was generated from it.
    pub fn has_noise(&self) -> bool {
        self.sequential().is_some() || self.extract.as_ref().is_some_and(|e| e.noise.is_some())
    }

    /// Seed of the replayed noise.
    pub fn noise_seed(&self) -> u64 {
        self.extract.as_ref().and_then(|e| e.noise.as_ref()).and_then(|n| n.seed).unwrap_or(self.seed)
    }
}
