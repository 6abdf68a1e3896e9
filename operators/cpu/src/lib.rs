//! Matrix products of a transformer's forward pass on a CPU: f32 rows times a weight that was packed once.
//!
//! ```text
//! x [rows, inputs] f32  --pack-->  strips   \
//!                                             > register tiles -> bias, epilogue -> out [rows, outputs] f32
//! weight [outputs, inputs]  --once-->  panels /
//! ```
//!
//! | [`Arithmetic`] | products | sums | instructions, fastest first ([`level_name`]) |
//! |---|---|---|---|
//! | F32 | f32 | f32, blocks of 768 inputs | `avx512`, `avx2+fma`, `baseline` |
//! | F32OfF16, F32OfBf16 | f32; weights are rounded to 16 bits and stored in 16 bits | as F32 | as F32 |
//! | F16 | f16, rows and outputs scaled by powers of two | f16 over 32 inputs, then f32 | `avx512fp16` |
//! | Bf16 | bf16 | f32 | `amx-bf16` |
//! | Bf16x3 | f32 as the sum of two bf16, three of the four products | f32 | `amx-bf16x3` |
//!
//! Error bounds, where s is the sum of the magnitudes of a value's terms and k its number of inputs:
//!
//! - F32: at most about (768 + k/768) · 2^-24 · s.
//! - F32OfF16 and F32OfBf16: bit-identical to F32 with the rounded weights.
//! - F16: 34 · 2^-11 · s.
//! - Bf16: 2^-7 · s from rounding the operands.
//! - Bf16x3: (k · 2^-23 + 2^-16) · s.
//!
//! The bits of a result row depend on the instruction set, but not on the threads or on the other rows of the call. A
//! product allocates nothing, apart from rayon's own queues, once its buffers have grown. These are its [`Scratch`] and
//! each thread's buffer for widened panels (512 KiB at most).
//!
//! These kernels exist because no library that we measured does all of this: give a row the same bits whatever rows are
//! computed with it, use AMX, and keep weights packed in 16 bits. In f32 alone, the crate `gemm` is as fast
//! (docs/benchmarks/teachers.md). `examples/peak` and `benches/product` measure the machine's peak and these products.
//!
//! [`attention`] uses the same kernels. It packs keys and values as weights are packed: in each call, or once in a
//! [`HeadKvCache`] cache for decoding that continues a run. Its bits depend on its own instruction set
//! ([`attention_level_name`]), because its exponential differs where the CPU has fused multiply-adds.
//!
//! ```
//! use stillhouse_cpu::{Arithmetic, Epilogue, Layout, PackedWeight, Rows, RowsMut, Scratch, Threads, product};
//!
//! let weight = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]; // [3 outputs, 2 inputs]
//! let packed = PackedWeight::new(&weight, 3, 2, Layout::Outputs { stride: 2 }, Arithmetic::F32)?;
//! let x = Rows { data: &[10.0, 1.0], rows: 1, stride: 2 };
//! let mut out = [0.0; 3];
//! let to = RowsMut { data: &mut out, rows: 1, stride: 3 };
//! product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut Scratch::new())?;
//! assert_eq!(out, [12.0, 34.0, 56.0]);
//! # Ok::<(), stillhouse_cpu::ProductError>(())
//! ```

#[cfg(target_arch = "x86_64")]
mod amx;
mod arithmetic;
mod attention;
#[cfg(target_arch = "x86_64")]
mod bf16x3;
mod cpu_features;
mod elementwise;
mod error;
#[cfg(target_arch = "x86_64")]
mod f16_kernel;
mod f32_kernels;
mod kernel;
mod memory;
mod product;
#[cfg(target_arch = "x86_64")]
mod skinny_gemm;
#[cfg(test)]
mod tests;
mod weight;
mod widened_weights;

pub use arithmetic::{Arithmetic, level_name};
pub use attention::{AttentionScratch, HeadKvCache, Heads, attention, attention_level_name};
pub use error::ProductError;
pub use product::{Epilogue, Rows, RowsMut, Scratch, Threads, product};
pub use weight::{Layout, PackedWeight};
