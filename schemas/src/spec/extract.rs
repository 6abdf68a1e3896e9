//! `extract`: the teacher, and the columns that its forward pass adds.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The teacher, and what to store of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Extract {
    /// The teacher language model.
    pub teacher: TeacherSpec,
    /// `parallel`: one forward pass over the text of the corpus. `sequential`: the teacher writes the text.
    #[serde(default)]
    pub mode: ExtractMode,
    /// With `mode: sequential`: what the teacher writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sequential: Option<Sequential>,
    /// Whether the teacher sees earlier documents of a packed sequence.
    #[serde(default)]
    pub context: TeacherContext,
    /// Posterior Gumbel noise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub noise: Option<Noise>,
    /// Number of the largest log-probabilities to store per token; 0 for none.
    #[serde(default)]
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub topk: u32,
    /// Temperatures T of the log-partitions ln Σ exp(l / T) to store per token, without duplicates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(range(min = 0.01, max = 100.0)))]
    pub logz_temperatures: Vec<f64>,
    /// Whether to store the entropy of the teacher's next-token distribution, in nat.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub entropy: bool,
    /// Token ids whose log-probability is stored at every position, without duplicates.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 4096))]
    pub candidates: Vec<u32>,
    /// Sampled logits: tokens drawn from the teacher's distribution, with counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<Samples>,
    /// The most likely tokens of each position that together hold a probability mass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<TopP>,
    /// Hidden states of some of the teacher's layers, to distil features.
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
    /// Exponent t of the proposal q ∝ p^t, from which the tokens are drawn.
    #[serde(default = "default_power")]
    #[schemars(range(min = 0.05, max = 2.0))]
    pub power: f64,
}

/// The most likely tokens up to a probability mass.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TopP {
    /// Smallest total probability of the stored tokens, unless it takes more than `most` tokens.
    #[schemars(range(min = 0.01, max = 1.0))]
    pub mass: f64,
    /// Largest number of tokens stored per position.
    #[schemars(range(min = 1, max = 65_535))]
    pub most: u32,
}

/// Hidden states. At each position, the states from which the teacher predicts the token there; they depend on the tokens before it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HiddenStates {
    /// Layers, without duplicates, as transformers counts `hidden_states`: 0 for the embeddings, k for the output of layer k, the number of
    /// layers for the input of the head, after the last norm.
    #[schemars(length(min = 1, max = 256), inner(range(min = 0, max = 65_535)))]
    pub layers: Vec<u32>,
    /// Precision of the stored values. With `f16`, a value beyond 65,504 fails the job.
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
    /// `auto`, `cpu`, `cuda` or `cuda:N`; `all` for all GPUs of the machine, or several of them: `cuda:0,cuda:1`. Each computes splits of its own.
    #[serde(default = "default_device")]
    #[schemars(regex(pattern = r"^(auto|cpu|all|cuda|cuda:[0-9]+(,cuda:[0-9]+)*)$"))]
    #[schemars(extend("x-identity" = false))]
    pub device: String,
    /// Arithmetic of the forward pass. Logits and all later values are computed in f32 or wider.
    #[serde(default)]
    pub dtype: Dtype,
    /// Largest accepted mean KL(f32 ‖ dtype) of next-token distributions, in nat, measured on the first 1,024 tokens of the input before
    /// work begins. Required for `fp8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 100.0))]
    pub max_mean_kl_nats: Option<f64>,
    /// Names of tensors in the weights that do not belong to the model, with `*` for any characters, such as `medusa_head.*` of a student
    /// whose backbone is the teacher. Each must match a tensor, but none of the model. Other tensors that the model lacks are refused.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 1000)))]
    pub ignore_tensors: Vec<String>,
    /// Tokens of one forward pass (rows × length). A pass has at least one row.
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
    /// 32-bit floats, each product computed as three of bfloat16: nearly as exact as `f32`, and faster on CPUs with AMX. Other CPUs compute `f32`.
    Bf16x3,
    /// 8-bit integers on CPUs, which earlier versions supported. Occurs only in manifests of their data sets; no job
    /// can request it.
    #[schemars(skip)]
    Int8,
    /// 8-bit floats (e4m3) in the products of layers, with a scale per output of a weight and per token; the rest is bfloat16. On Hopper GPUs.
    /// Needs `max_mean_kl_nats`.
    Fp8,
    /// The fastest of `f32`, `bf16x3`, `f16`, `bf16` on this machine that changes no log-probability of the first 1,024 tokens by more than
    /// 0.01 nat. The data set records the choice. Name a type if the result must not depend on the machine.
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

/// The source of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExtractMode {
    /// The corpus.
    #[default]
    Parallel,
    /// The teacher writes token after token: the token with the largest l + ξ, with noise ξ from the seed. Only on a CPU.
    Sequential,
}

/// How the teacher writes: one text for every document of the input, of at most `pack.length` tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Sequential {
    /// Number of tokens of each document that begin its text; 0 with `input.format: none`, which has no documents.
    #[schemars(range(min = 0, max = 1_048_574))]
    pub prompt_tokens: u32,
    /// Temperature T: the text is a sample of softmax(l / T); 0 for the most likely token at every position. Unless T is 1, the noise
    /// is not that of the teacher's own distribution.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub temperature: f64,
    /// The teacher chooses among this number of most likely tokens; 0 for all.
    #[schemars(range(min = 0, max = 4_294_967_295_u64))]
    pub top_k: u32,
    /// The teacher chooses among the fewest most likely tokens whose probabilities (at T, within `top_k`) reach this sum; 1 for all.
    #[schemars(range(min = 1e-9, max = 1.0))]
    pub top_p: f64,
    /// Where a text ends.
    pub stop: Stop,
    /// Number of texts written at once. The next text starts when one ends. Each needs memory for the keys and values of `pack.length`
    /// tokens. The shards do not depend on this number.
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
    /// After the first eos that the teacher writes, or at `pack.length`. Padding follows.
    #[default]
    Eos,
    /// At `pack.length`, even after an eos.
    Length,
}

/// The tokens that the teacher sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TeacherContext {
    /// All earlier tokens of the sequence, across documents, as in the papers.
    #[default]
    Sequence,
    /// Only earlier tokens of the same document: the teacher starts anew where a document begins.
    Document,
}

/// Posterior Gumbel noise.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Noise {
    /// How the noise is stored.
    pub codec: NoiseCodec,
    /// Largest total variation between stored and exact softmax(ξ) of every token (codec `replay`).
    #[schemars(range(min = 0.00002, max = 0.5))]
    pub tolerance: f64,
    /// Whether argmax(l + ξ) with the stored noise must be the observed token for every token and draw, as it is with exact noise.
    pub condition: bool,
    /// Number of independent noise draws per token, D.
    #[schemars(range(min = 1, max = 64))]
    pub draws: u32,
    /// Precision of the stored values. Default: f16, but f32 for `replay` with a tolerance under 0.0005.
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
    /// Replayable: a seed, and the few values that the replay does not reproduce.
    #[default]
    Replay,
    /// All of ξ, `[V]` per token: for small vocabularies and for checks.
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
