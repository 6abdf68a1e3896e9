//! Teachers and their signal on NVIDIA GPUs.
//!
//! ```text
//!   kernels/*.cu ──► nvcc ──► CUDA ─┐
//!        └────────► c++  ──► host ──┴─► Device ─► forward pass ─► slice of logits ─► extraction ─► pinned memory
//! ```
//!
//! Logits stay where they are made: what comes back is, per token, ln p_x, the corrections of its noise, the top-k. The same kernels
//! run on the host, block after block (`stillhouse-gpu-host`), so that everything but CUDA's own calls is tested without a GPU.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod error;
pub mod extract;
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only its tests are compiled then"))]
mod machine;
pub mod net;

pub use device::{
    Arg, Buffer, Device, Element, Event, Launch, Matrix, Memory, Pinned, Product, Result, Scaled, ScaledProduct, Stream,
};
pub use error::GpuError;
#[cfg(feature = "cuda")]
pub use machine::places::folders as library_folders;

/// Floats from one row of logits to the next such that every row begins at a multiple of 32 bytes: products into rows of odd lengths (the
/// 50,257 of GPT-2) and loads out of them are slow.
#[must_use]
pub const fn logits_stride(vocab: usize) -> usize {
    vocab.next_multiple_of(8)
}
