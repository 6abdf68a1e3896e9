//! Teacher models on NVIDIA GPUs: the forward pass, and the extraction of training signals from its logits.
//!
//! ```text
//!   kernels/*.cu ──► nvcc ──► CUDA ─┐
//!        └────────► c++  ──► host ──┴─► Device ─► forward pass ─► slice of logits ─► extraction ─► pinned memory
//! ```
//!
//! Logits stay on the device. Per token, the host gets ln p_x, the corrections of its noise and the top-k.
//! `stillhouse-gpu-host` runs the same kernels on the host, one block after another, so tests without a GPU cover
//! everything except the calls to CUDA itself.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod device;
mod error;
pub mod extract;
#[cfg(any(feature = "cuda", test))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only its tests are compiled then"))]
mod machine;
pub mod net;
mod slices;

pub use device::{
    Arg, Buffer, Device, Element, Event, Launch, Matrix, Memory, Pinned, Product, Result, ScaledMatrix, ScaledProduct,
    Stream,
};
pub use error::GpuError;
#[cfg(feature = "cuda")]
pub use machine::library_folders::folders as library_folders;
pub use slices::{logits_stride, slice_rows};
