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
//! `[B, L, V]` never exists: the caller walks over the rows of the hidden states in slices of its own size, with one
//! buffer for all of them. Scores of attention exist for one block of rows at a time. On a CPU activations are f32 and the products what
//! [`Precision`] says; logits are always f32.
//!
//! A teacher on a CPU also goes on token by token ([`Decoding`]): keys and values of what a sequence has seen are kept, and logits
//! and hidden states are those of the pass over the whole of it, to the bit.
//!
//! What is guaranteed: a later token does not change an earlier hidden state, and on a CPU neither the other runs of a pass, nor the rows of
//! a slice, nor the number of threads change a bit of a row. What is not: logits differ in the last bits with the instruction set of the CPU
//! and between devices, and on a GPU with what shares a pass.
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
//!     // a row [V] for each of these tokens, where the teacher is: it predicts the token after this one
//! }
//! # Ok(())
//! # }
//! ```

mod config;
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
pub use config::{Architecture, TeacherConfig};
pub use contract::{Decoding, DeviceLogits, Hidden, Logits, OnHost, Point, Runs, Stepped, Teacher};
pub use cpu::arithmetic_on_cpu;
pub use device::{DeviceChoice, OpenGpu, Opened, Precision, devices, library_folders, provide_gpus};
pub use error::{Result, TeacherError};
pub use gguf_tokenizer::{GgufTokenizer, GgufVocabulary, gguf_tokenizer, gguf_vocabulary};
pub use load::{load, load_on_host};
pub use memory_budget::{HostBytes, host_bytes};
pub use model::{LoadOptions, check_weights, decoding_bytes};
pub use stillhouse_gpu;

/// What a teacher is, for manifests and checks.
#[derive(Debug, Clone)]
pub struct TeacherInfo {
    /// Which architecture runs it.
    pub architecture: Architecture,
    /// Columns of the logits, V.
    pub vocab_size: usize,
    /// The longest sequence that [`HostTeacher::hidden`] takes.
    pub max_positions: usize,
    /// Width of the hidden states, H.
    pub hidden_size: usize,
    /// Blocks.
    pub layers: usize,
    /// Weights, each counted once (a tied head is the embedding).
    pub parameters: u64,
    /// Begin-of-sequence token, where the model names one.
    pub bos_token_id: Option<u32>,
    /// End-of-sequence token (the first, where the model names several).
    pub eos_token_id: Option<u32>,
    /// The files that the weights came from: name and path.
    pub weights: Vec<(String, PathBuf)>,
    /// Type of weights and activations.
    pub dtype: Precision,
    /// `cpu`, or `cuda:N`.
    pub device: String,
    /// What the numbers went through, for the manifest: `f32 (widened from F32/Q4_1/Q8_0 gguf), products and attention on x86_64 avx512`.
    /// Where the bits of a pass may differ, so does this.
    pub arithmetic: String,
}

/// A causal language model on this machine's CPU; [`OnHost`] makes a [`Teacher`] of it.
pub trait HostTeacher: Send + Sync {
    /// What this teacher is.
    fn info(&self) -> &TeacherInfo;

    /// The final, normalised hidden states `[B, L, H]` of all positions, on the device; row (b, i) has seen the
    /// tokens 0..=i of sequence b and predicts token i + 1. `tokens` is `[B, L]` in row order.
    ///
    /// # Errors
    /// When the tokens do not fit the shape, the vocabulary or the context, or the device fails.
    fn hidden(&self, tokens: &[u32], batch: usize, length: usize) -> Result<Tensor>;

    /// Logits `[n, V]`, f32 on the device, of `[n, H]` hidden states (any rows of [`HostTeacher::hidden`], flattened).
    ///
    /// # Errors
    /// When the rows have another width, or the device fails.
    fn logits(&self, hidden_rows: &Tensor) -> Result<Tensor>;

    /// The same into a buffer of the caller's, which becomes n·V long. On a CPU in f32 they are computed right
    /// there: hand in the same buffer for every slice, and nothing is allocated, zeroed or copied.
    ///
    /// # Errors
    /// As [`HostTeacher::logits`].
    fn logits_into(&self, hidden_rows: &Tensor, out: &mut Vec<f32>) -> Result<()>;
}
