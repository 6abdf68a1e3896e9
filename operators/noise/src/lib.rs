//! Replayable posterior Gumbel noise: the generator, the posterior, and the codec that stores it.
//!
//! A teacher language model runs once over a corpus. At every position, its distribution p and the observed token x
//! determine one vector of posterior Gumbel noise ξ `[V]` (Gumbel distillation, Algorithm 1). Stored densely, ξ takes
//! 2·V bytes per token. This crate stores about 9 bytes: the decoder recomputes the auxiliary noise e from a
//! counter-based generator, and the file holds only what the teacher adds to e. A bound per token limits the total
//! variation between the stored and the exact softmax(ξ).
//!
//! ```text
//!  (noise_seed, draw, sequence_id, position) ─► Philox4x32-10 ─► e_0, e`[V]` ~ Exp(1)
//!                                                                    │
//!  logits `[V]` ─► p = softmax ─► E_k = e_k + p_k·e_0, E_x = p_x·e_0 ──┤ ξ = −ln E
//!                                                                    ├─► dense:  ξ `[V]`
//!                                                                    └─► replay: ln p_x, a few (k, ln p_k)
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `philox`, `math` | random words; f32 exp, ln and Exp(1) variates in vector lanes |
//! | `dispatch`, `kernels` | the passes over a row, compiled for AVX-512, AVX2 and the baseline, with equal bits |
//! | `posterior` | softmax of a row; dense, prior and sequential noise |
//! | `replay`, `decode`, `verify` | the codec: encoder, decoder, and an independent check in f64 |
//! | `dense`, `value` | dense noise in the stored type; the stored types and their rounding |
//! | `output`, `quantile`, `replay_rows` | the decoder for trainers: softmax, Gumbel, Gaussian or uniform noise of many tokens |
//! | `extract` | the interface that all devices implement for slices of logits, and its CPU implementation |
//! | `correction_pruning` | drops corrections for a looser tolerance, without the teacher |
//! | `sample` | samples the tokens of text that the teacher writes |
//! | `rows`, `topk`, `uniforms` | slices of rows in parallel, top-k, keyed uniforms for other uses |
//! | `signals` | log-partitions, entropy, given candidates, sampled logits, top-p |
//!
//! Every function is a pure function of its arguments. It returns the same bits on every machine and with any number of
//! threads.

#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod correction_pruning;
mod decode;
mod dense;
mod dispatch;
mod error;
mod extract;
mod kernels;
mod math;
mod output;
mod philox;
mod posterior;
mod quantile;
#[cfg(test)]
mod reference;
mod replay;
mod replay_rows;
mod rows;
mod sample;
mod signal;
mod topk;
mod uniforms;
mod value;
mod verify;

pub use correction_pruning::CorrectionPruner;
pub use decode::{Correction, StoredToken, decode, decode_softmax};
pub use dense::round_dense;
pub use dispatch::Level;
pub use error::NoiseError;
pub use extract::{Extract, ExtractedColumns, ExtractionSpec, NoiseForm, ObservedTokens, RowExtractor};
pub use math::exponential_from_word;
pub use output::{DenseRow, Element, Output, OutputKind, RowWriter};
pub use philox::{DrawKey, NoiseStream, philox4x32_10};
pub use posterior::{
    RowLogprobs, Softmax, dense_noise, dense_noise_of_loaded, exponentials, prior_noise, sample_sequential,
    sequential_noise,
};
pub use replay::{Encoded, Encoder, Tolerance};
pub use replay_rows::{
    FloatColumn, IntegerColumn, RequestedTokens, StoredColumns, StoredNoise, prior_rows, replay_rows,
};
pub use rows::{EncodedRows, LogitRows, RowEncoder};
pub use sample::{Sampler, Sampling};
pub use signal::{BLOCK_ENTRIES, DynPartialEq, LoadedRow, RowSignals, Signal, SignalKernel, Signals, Values};
pub use topk::{top_k, top_k_of_loaded};
pub use uniforms::{KeyedUniforms, epoch_seed, fnv1a64, keyed_uniforms, splitmix64};
pub use value::ValueType;
pub use verify::{
    NoiseAccuracy, TeacherDifference, measure_accuracy, measure_dense_accuracy, measure_difference, total_variation_of,
};

/// Writes the random words of one row of whole blocks, so that the benchmark can time the generator alone.
#[doc(hidden)]
pub fn philox_words(stream: &NoiseStream, out: &mut [u32]) {
    kernels::words(Level::detect(), stream, out);
}
