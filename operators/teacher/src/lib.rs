//! Teacher language models: next-token logits for every position of packed sequences.
//!
//! ```text
//!  config.json + *.safetensors ─┐                          ┌─ cpu ── net (one forward pass for every family) ── stillhouse-cpu
//!                               ├─► families/ ─► Teacher ──┤
//!  *.gguf (widened) ────────────┘                          └─ gpu ── stillhouse-gpu
//!
//!  runs of tokens ─► hidden states [tokens, H] ─► a slice of their rows [n, H] ─► logits [n, V] f32 ─► extractors
//! ```
//!
//! The logits `[B, L, V]` never exist as a whole. The caller walks over the rows of the hidden states in slices of a
//! size it chooses, with one buffer for all of them. Attention scores exist for one block of rows at a time. On a CPU,
//! activations are f32 and products use the arithmetic of [`Precision`]. Logits are always f32.
//!
//! A teacher on a CPU also decodes token by token ([`Decoding`]) with a KV cache. Its logits and hidden states are
//! bit-identical to those of a pass over the whole sequence.
//!
//! Guaranteed: a later token does not change an earlier hidden state. On a CPU, the bits of a row are independent of
//! the other runs of a pass, the other rows of a slice, and the number of threads. Not guaranteed: the last bits of
//! logits differ between instruction sets and devices, and on a GPU with the other tokens of a pass.
//!
//! ```no_run
//! use std::path::Path;
//! use stillhouse_teacher::{LoadOptions, Runs, load};
//!
//! # fn main() -> stillhouse_teacher::Result<()> {
//! let teacher = load(Path::new("models/gpt2-large"), &LoadOptions::default())?;
//! let mut runs = Runs::new();
//! runs.push([50256, 464, 3290, 373]);
//! runs.push([50256, 1212, 318]);
//! let hidden = teacher.pass(&runs)?;
//! let mut logits = teacher.buffer()?;
//! let tokens: Vec<u32> = (0..7).collect();
//! for tokens in tokens.chunks(teacher.slice_rows()) {
//!     teacher.slice(&hidden, tokens, &mut logits)?;
//!     // one row [V] per token, in the memory of the teacher; it predicts the next token
//! }
//! # Ok(())
//! # }
//! ```

mod config;
mod config_file;
mod config_keys;
mod contract;
mod cpu;
mod device;
mod error;
mod families;
mod gguf;
mod gguf_header;
mod gguf_model;
mod gguf_sentencepiece;
mod gguf_tokenizer;
pub mod gpu;
mod load;
mod memory_budget;
mod model;
mod net;
pub mod probe;
mod weights;

use std::path::PathBuf;

use candle_core::Tensor;

pub use candle_core;
pub use config::TeacherConfig;
pub use contract::{
    Decoding, DeviceEvent, DeviceLogits, Hidden, HostTeacherAdapter, Logits, Runs, StepOutput, Teacher,
};
pub use cpu::cpu_arithmetic;
pub use device::{DeviceChoice, OpenGpu, OpenedDevice, Precision, library_folders, parse_devices, provide_gpus};
pub use error::{Result, TeacherError};
pub use families::Architecture;
pub use gguf_tokenizer::{GgufTokenizer, GgufVocabulary, gguf_tokenizer, gguf_vocabulary};
pub use load::{load, load_on_host};
pub use memory_budget::{HostBytes, host_bytes};
pub use model::{LoadOptions, check_weights, decoding_bytes};
pub use stillhouse_gpu;

/// Properties of a teacher, for manifests and checks.
#[derive(Debug, Clone)]
pub struct TeacherInfo {
    /// The architecture that runs it.
    pub architecture: Architecture,
    /// Size of the vocabulary, V: columns of the logits.
    pub vocab_size: usize,
    /// Length of the longest sequence that [`HostTeacher::hidden`] accepts.
    pub max_positions: usize,
    /// Width of the hidden states, H.
    pub hidden_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Number of weights, each counted once (a tied head is the embedding).
    pub parameters: u64,
    /// Begin-of-sequence token, if the model names one.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence token; the first if the model names several.
    pub eos_token_id: Option<u32>,
    /// Name and path of each weight file.
    pub weights: Vec<(String, PathBuf)>,
    /// Type of weights and activations.
    pub dtype: Precision,
    /// `cpu`, or `cuda:N`.
    pub device: String,
    /// How the numbers were computed, for the manifest: `f32 (widened from F32/Q4_1/Q8_0 gguf), products and attention
    /// on x86_64 avx512`. It differs wherever the bits of a pass may differ.
    pub arithmetic: String,
}

/// A causal language model on this machine's CPU. [`HostTeacherAdapter`] turns it into a [`Teacher`].
pub trait HostTeacher: Send + Sync {
    /// Properties of this teacher.
    fn info(&self) -> &TeacherInfo;

    /// Returns the final, normalised hidden states `[B, L, H]` of all positions. Row (b, i) has seen the tokens 0..=i
    /// of sequence b and predicts token i + 1. `tokens` is `[B, L]` in row order.
    ///
    /// # Errors
    /// If the tokens do not match the shape, the vocabulary or the context, or the computation fails.
    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Tensor>;

    /// Returns f32 logits `[n, V]` of `[n, H]` hidden states (any rows of [`HostTeacher::hidden`], flattened).
    ///
    /// # Errors
    /// If the rows have another width, or the computation fails.
    fn logits(&self, hidden_rows: &Tensor) -> Result<Tensor>;

    /// Like [`HostTeacher::logits`], but writes into `out`, which it resizes to n·V floats. Reusing one buffer for
    /// every slice avoids allocating, zeroing and copying.
    ///
    /// # Errors
    /// As [`HostTeacher::logits`].
    fn logits_into(&self, hidden_rows: &Tensor, out: &mut Vec<f32>) -> Result<()>;
}
