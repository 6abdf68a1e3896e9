//! `extract`: the teacher, and the columns that its forward pass adds.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the teacher adds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Extract {
    /// The teacher language model.
    pub teacher: TeacherSpec,
    /// `parallel`: one forward pass over given text. `sequential`: the teacher writes the text.
    #[serde(default)]
    pub mode: ExtractMode,
    /// With `mode: sequential`: what the teacher writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequential: Option<Sequential>,
    /// Whether the teacher sees across packed documents.
    #[serde(default)]
    pub context: TeacherContext,
    /// Posterior Gumbel noise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise: Option<Noise>,
    /// How many of the teacher's top log-probabilities to store per token; 0 for none.
    #[serde(default)]
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub topk: u32,
    /// Temperatures T of the log-partitions ln Σ exp(l / T) to store per token; a different one each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(range(min = 0.01, max = 100.0)))]
    pub logz_temperatures: Vec<f64>,
    /// Whether to store the entropy of the teacher's next-token distribution, in nat.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub entropy: bool,
    /// Token ids whose log-probability is stored at every position; a different one each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub candidates: Vec<u32>,
    /// Sampled logits: tokens drawn from the teacher's distribution, with counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<Samples>,
    /// The likeliest tokens up to a mass, so many for each position as that takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<TopP>,
    /// Hidden states of some of the teacher's layers, for the distillation of features.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hidden_states: Option<HiddenStates>,
}

/// Sampled logits (Sparse Logit Sampling, arXiv 2503.16870).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Samples {
    /// Draws per token, N, with replacement.
    #[schemars(range(min = 1, max = 65_535))]
    pub draws: u32,
    /// t of the proposal q ∝ p^t that they are drawn from.
    #[serde(default = "default_power")]
    #[schemars(range(min = 0.05, max = 2.0))]
    pub power: f64,
}

/// The likeliest tokens up to a mass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TopP {
    /// The probability that the kept ones hold together, at least, unless that takes more than `most`.
    #[schemars(range(min = 0.01, max = 1.0))]
    pub mass: f64,
    /// The most that are kept of a token.
    #[schemars(range(min = 1, max = 65_535))]
    pub most: u32,
}

/// Hidden states: at every position those that the teacher predicts its token from, which have seen the tokens before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HiddenStates {
    /// Which, as transformers counts its `hidden_states`: 0 for the embeddings, k for what layer k gives, the number of layers for what the
    /// head sees, after the last norm. A different one each.
    #[schemars(length(min = 1, max = 256), inner(range(min = 0, max = 65_535)))]
    pub layers: Vec<u32>,
    /// Precision of stored values. A value beyond 65,504 fails a job with `f16`.
    #[serde(default = "default_states_precision")]
    pub precision: NoisePrecision,
    /// Hidden size H, set once the teacher is known.
    #[serde(skip)]
    pub width: Option<u32>,
}

/// The teacher language model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TeacherSpec {
    /// A folder with config.json and safetensors, a `.gguf` file, or `hf://org/name[@revision]`.
    #[schemars(extend("x-identity" = false))]
    pub path: String,
    /// `auto`, `cpu`, `cuda` or `cuda:N`; `all` GPUs of the machine, or several of them: `cuda:0,cuda:1`. Each takes splits of its own.
    #[serde(default = "default_device")]
    #[schemars(regex(pattern = r"^(auto|cpu|all|cuda|cuda:[0-9]+(,cuda:[0-9]+)*)$"))]
    #[schemars(extend("x-identity" = false))]
    pub device: String,
    /// Arithmetic of the forward pass. Logits and everything after them are f32 and wider.
    #[serde(default)]
    pub dtype: Dtype,
    /// The largest mean KL(f32 ‖ dtype) of next-token distributions that is accepted, in nat, measured on the first 1,024 tokens of the
    /// input before work begins. Required for `fp8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 100.0))]
    pub max_mean_kl_nats: Option<f64>,
    /// Names of tensors among the weights that are no part of the model, `*` for any characters: `medusa_head.*` of a student whose backbone
    /// is the teacher. Each has to fit a tensor, and none of the model's. All other tensors that the model does not have are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1000)))]
    pub ignore_tensors: Vec<String>,
    /// Tokens of one forward pass (rows × length); at least one row is always taken.
    #[serde(default = "default_batch_tokens")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub batch_tokens: u32,
}

/// Arithmetic of the teacher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// 32-bit floats.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// 32-bit floats, each product made of three of bfloat16: nearly as exact as `f32`, faster on CPUs with AMX; elsewhere it is `f32`.
    Bf16x3,
    /// 8-bit integers on CPUs, which earlier versions supported. Occurs only in manifests of their data sets; no job
    /// can request it.
    #[schemars(skip)]
    Int8,
    /// 8-bit floats (e4m3) in the products of layers, a scale for each output of a weight and each token, the rest bfloat16; Hopper GPUs.
    /// Needs `max_mean_kl_nats`.
    Fp8,
    /// The fastest of `f32`, `bf16x3`, `f16`, `bf16` on this machine that changes no log-probability of the first 1,024 tokens by more than
    /// 0.01 nat. What was chosen is kept with the data set; to be independent of the machine, name a type.
    Auto,
}

impl Dtype {
    /// The name in job files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Bf16x3 => "bf16x3",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Auto => "auto",
        }
    }
}

/// Who writes the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExtractMode {
    /// The corpus.
    #[default]
    Parallel,
    /// The teacher, token after token: the likeliest under l + ξ, ξ being the seed's own noise. On a CPU only.
    Sequential,
}

/// What the teacher writes: a text for every document of the input, of `pack.length` tokens at most.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sequential {
    /// How many tokens of each document begin its text; 0 with `input.format: none`, which has none.
    #[schemars(range(min = 0, max = 1_048_574))]
    pub prompt_tokens: u32,
    /// T: the text is a sample of softmax(l / T); 0 for the likeliest token at every position. At another T than 1 the noise is none of the
    /// teacher's own distribution.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub temperature: f64,
    /// Only so many of the likeliest tokens are written; 0 for all.
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub top_k: u32,
    /// Only the likeliest tokens are written, the fewest whose probabilities (at T, among `top_k`) reach it; 1 for all.
    #[schemars(range(min = 1e-9, max = 1.0))]
    pub top_p: f64,
    /// Where a text ends.
    pub stop: Stop,
    /// Texts that are written at once; one that ends makes room for the next. Each takes memory for the keys and values of `pack.length`
    /// tokens. Never changes a byte of the shards.
    #[schemars(range(min = 1, max = 1024))]
    #[schemars(extend("x-identity" = false))]
    pub slots: u32,
}

impl Default for Sequential {
    fn default() -> Self {
        Self { prompt_tokens: 0, temperature: 1.0, top_k: 0, top_p: 1.0, stop: Stop::Eos, slots: 16 }
    }
}

impl Sequential {
    /// Whether the text is a sample of the teacher's own distribution, not changed by temperature, top-k or top-p.
    pub fn is_plain(&self) -> bool {
        self.temperature == 1.0 && self.top_k == 0 && self.top_p >= 1.0
    }
}

/// Where a text that the teacher writes ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Stop {
    /// With the first eos that the teacher writes, or at `pack.length`; padding follows.
    #[default]
    Eos,
    /// At `pack.length`, whatever is written before.
    Length,
}

/// What the teacher sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TeacherContext {
    /// All earlier tokens of the sequence, across documents (the papers' way).
    #[default]
    Sequence,
    /// Only the tokens of its own document: the teacher is reset where a document begins.
    Document,
}

/// Posterior Gumbel noise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Noise {
    /// How it is stored.
    pub codec: NoiseCodec,
    /// Largest total variation between stored and exact softmax(ξ), for every token (codec `replay`).
    #[schemars(range(min = 0.00002, max = 0.5))]
    pub tolerance: f64,
    /// Whether argmax(l + ξ) is the observed token for every token and draw of what is stored, as it is for exact noise.
    pub condition: bool,
    /// Independent noises per token, D.
    #[schemars(range(min = 1, max = 64))]
    pub draws: u32,
    /// Precision of stored values. Default: f16; f32 for `replay` with a tolerance under 0.0005.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<NoisePrecision>,
    /// Seed of the noise. Default: the job's `seed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_223_372_036_854_775_807_u64))]
    pub seed: Option<u64>,
}

impl Default for Noise {
    fn default() -> Self {
        Self { codec: NoiseCodec::Replay, tolerance: 1e-3, condition: true, draws: 1, precision: None, seed: None }
    }
}

impl Noise {
    /// Precision of the stored values, with the default filled in.
    pub fn resolved_precision(&self) -> NoisePrecision {
        self.precision.unwrap_or(match self.codec {
            NoiseCodec::Replay if self.tolerance < 5e-4 => NoisePrecision::F32,
            _ => NoisePrecision::F16,
        })
    }
}

/// How noise is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NoiseCodec {
    /// Replayable: a seed, and the few values that the replay gets wrong.
    #[default]
    Replay,
    /// All of ξ, `[V]` per token: for small vocabularies and for checking.
    Dense,
}

/// Precision of stored values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NoisePrecision {
    /// IEEE half precision.
    F16,
    /// 32-bit floats.
    F32,
}

fn default_device() -> String {
    "auto".into()
}
const fn default_states_precision() -> NoisePrecision {
    NoisePrecision::F16
}
fn default_power() -> f64 {
    1.0
}
fn default_batch_tokens() -> u32 {
    4096
}
