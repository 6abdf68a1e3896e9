//! Causal grouped-query attention over whole sequences, in memory that does not grow with L².
//!
//! ```text
//!                 keys 0 .............. L
//!   queries  0..b  ▓                          scores exist for one block of b query rows at a time,
//!            b..2b ▓▓                         over no more keys than the block's last row may see:
//!            ...   ▓▓▓▓                       half of the work of a full [L, L], and no [B, heads, L, L]
//! ```
//!
//! In: q `[B, L, heads, D]`, k and v `[B, L, kv_heads, D]` (views are fine on the CPU); out: `[B·L, heads·D]`.
//!
//! On a CPU in f32 a task is one block of one sequence, all heads, its scores (`b × L` floats) in the cache of
//! one core; every product within it is single-threaded, so that the number of threads changes nothing. Elsewhere the
//! same blocks are tensor operations, as many rows at once as [`MAX_SCORES`] allows, softmax in f32.

use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Shape, Tensor};
use rayon::prelude::*;

use crate::kernels;
use crate::product::{Matrix, Threads, product};

/// Query rows of a CPU task: 64 × 1,024 scores are 256 KiB.
const CPU_BLOCK: usize = 64;
/// Scores that the tensor path holds at once.
const MAX_SCORES: usize = 1 << 27;

/// The heads of a layer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CausalAttention {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl CausalAttention {
    pub(crate) fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> candle_core::Result<Tensor> {
        if kernels::applies(q) { q.apply_op3_no_bwd(k, v, self) } else { self.blocked(q, k, v, MAX_SCORES) }
    }

    fn scale(&self) -> f64 {
        1.0 / (self.head_dim as f64).sqrt()
    }

    /// The tensor path: `[B, kv_heads, group·rows, D] × [B, kv_heads, D, keys]`, block after block.
    fn blocked(&self, q: &Tensor, k: &Tensor, v: &Tensor, max_scores: usize) -> candle_core::Result<Tensor> {
        let (batch, length, heads, dim) = q.dims4()?;
        let (kv, group) = (self.kv_heads, heads / self.kv_heads);
        let (device, dtype) = (q.device(), q.dtype());
        // [B, kv, group, L, D], [B, kv, D, L], [B, kv, L, D]
        let q = (q.reshape((batch, length, kv, group, dim))? * self.scale())?.permute((0, 2, 3, 1, 4))?;
        let k = k.permute((0, 2, 3, 1))?.contiguous()?;
        let v = v.transpose(1, 2)?.contiguous()?;
        let rows = (max_scores / (batch * heads * length)).clamp(1, length);
        let mut blocks = Vec::with_capacity(length.div_ceil(rows));
        for first in (0..length).step_by(rows) {
            let rows = rows.min(length - first);
            let keys = first + rows;
            let q = q.narrow(3, first, rows)?.reshape((batch, kv, group * rows, dim))?;
            let scores = q.matmul(&k.narrow(3, 0, keys)?.contiguous()?)?.to_dtype(DType::F32)?;
            let mask: Vec<f32> = (0..rows)
                .flat_map(|r| (0..keys).map(move |c| if c > first + r { f32::NEG_INFINITY } else { 0.0 }))
                .collect();
            let mask = Tensor::from_vec(mask, (rows, keys), device)?;
            let scores = scores.reshape((batch, kv, group, rows, keys))?.broadcast_add(&mask)?;
            let p = candle_nn::ops::softmax_last_dim(&scores)?.to_dtype(dtype)?;
            let p = p.reshape((batch, kv, group * rows, keys))?;
            let out = p.matmul(&v.narrow(2, 0, keys)?.contiguous()?)?;
            blocks.push(out.reshape((batch, kv, group, rows, dim))?);
        }
        let out = Tensor::cat(&blocks, D::Minus2)?;
        out.permute((0, 3, 1, 2, 4))?.reshape((batch * length, heads * dim))
    }
}

/// A `[B, L, heads, D]` view whose last stride is 1.
struct View<'a> {
    data: &'a [f32],
    batch: usize,
    row: usize,
    head: usize,
}

impl<'a> View<'a> {
    fn new(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<Self> {
        let (CpuStorage::F32(data), [batch, row, head, 1]) = (storage, layout.stride()) else {
            candle_core::bail!("attention: expected f32 views with contiguous heads, got {layout:?}")
        };
        Ok(Self { data: &data[layout.start_offset()..], batch: *batch, row: *row, head: *head })
    }

    /// `rows` rows of `dim` from (batch, row, head) on.
    fn matrix(&self, batch: usize, row: usize, head: usize, rows: usize, dim: usize) -> Matrix<'a> {
        let start = batch * self.batch + row * self.row + head * self.head;
        Matrix { data: self.data.get(start..).unwrap_or_default(), shape: (rows, dim), strides: (self.row, 1) }
    }
}

impl CustomOp3 for CausalAttention {
    fn name(&self) -> &'static str {
        "causal-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (batch, length, heads, dim) = q_layout.shape().dims4()?;
        let kv_shape = (batch, length, self.kv_heads, dim);
        if k_layout.shape().dims4()? != kv_shape || v_layout.shape().dims4()? != kv_shape {
            candle_core::bail!("attention: keys and values must be {kv_shape:?}")
        }
        let (q, k, v) = (View::new(q, q_layout)?, View::new(k, k_layout)?, View::new(v, v_layout)?);
        let (group, width, scale) = (heads / self.kv_heads, heads * dim, self.scale() as f32);
        let mut out = vec![0f32; batch * length * width];
        // A block never crosses from one sequence into the next.
        let blocks = out.par_chunks_mut(length * width).enumerate().flat_map(|(b, sequence)| {
            sequence.par_chunks_mut(CPU_BLOCK * width).enumerate().map(move |(i, block)| (b, i * CPU_BLOCK, block))
        });
        blocks.try_for_each_init(Vec::new, |scores, (b, first, block)| {
            let rows = block.len() / width;
            let keys = first + rows;
            scores.resize(rows * keys, 0.0);
            for head in 0..heads {
                let queries = q.matrix(b, first, head, rows, dim);
                let seen = k.matrix(b, 0, head / group, keys, dim).transposed();
                product(scores, keys, scale, &queries, &seen, Threads::One)?;
                kernels::softmax_causal(scores, keys, first);
                let weights = Matrix { data: scores, shape: (rows, keys), strides: (keys, 1) };
                let values = v.matrix(b, 0, head / group, keys, dim);
                product(&mut block[head * dim..], width, 1.0, &weights, &values, Threads::One)?;
            }
            Ok::<_, candle_core::Error>(())
        })?;
        Ok((CpuStorage::F32(out), Shape::from((batch * length, width))))
    }
}
