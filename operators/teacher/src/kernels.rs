//! The f32 operations that a CPU spends its time in outside of matrix products, fused and vectorised.
//!
//! Every sum runs over sixteen lanes in a fixed order and no fused multiply-add is used here, so that neither the
//! width of the machine's vectors nor the number of threads changes a bit. (The matrix products of `gemm` do choose
//! by instruction set, and do not depend on threads.) Each kernel is dispatched to the best instruction set present.
//!
//! | kernel | in | out | per element |
//! |---|---|---|---|
//! | [`swiglu`] | `[n, 2I]` gate ‖ up | `[n, I]` | one exponential |
//! | [`gelu_new`] | `[n, I]` | `[n, I]` | one exponential |
//! | [`softmax_causal`] | `[rows, keys]` scores | the same, in place | one exponential per key not in the future |

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor};
use rayon::prelude::*;

const LANES: usize = 16;
/// Rows that one task of a row-wise kernel takes: enough to hide the scheduling, few enough to share out.
const ROWS_PER_TASK: usize = 16;

/// e^x to about 2 units in the last place; saturates below e^-87.3 (to about 1e-38) and above e^88.
#[inline(always)]
fn exp(x: f32) -> f32 {
    // Cody and Waite: x = n ln 2 + r, e^x = 2^n e^r with a polynomial for |r| <= ln 2 / 2 (Cephes `expf`).
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.3, 88.0);
    let n = (x * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = x - n * (355.0 / 512.0) + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.0e-1;
    let p = p * r * r + r + 1.0;
    f32::from_bits(((n as i32 + 127) << 23) as u32) * p
}

#[inline(always)]
fn fold(xs: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [start; LANES];
    let chunks = xs.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = f(*lane, *x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, *x);
    }
    lanes.iter().fold(start, |a, b| f(a, *b))
}

/// Softmax of row r over its first `first + r + 1` scores, zeros after them; rows of `keys` scores, back to back.
pub(crate) fn softmax_causal(scores: &mut [f32], keys: usize, first: usize) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (r, row) in scores.chunks_exact_mut(keys).enumerate() {
                let (seen, future) = row.split_at_mut((first + r + 1).min(keys));
                let max = fold(seen, f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
                for x in seen.iter_mut() {
                    *x = exp(*x - max);
                }
                let scale = 1.0 / fold(seen, 0.0, |a, b| a + b);
                for x in seen.iter_mut() {
                    *x *= scale;
                }
                future.fill(0.0);
            }
        },
    );
}

struct Swiglu;
struct GeluNew;

fn swiglu_rows(src: &[f32], dst: &mut [f32], width: usize) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (src, dst) in src.chunks_exact(2 * width).zip(dst.chunks_exact_mut(width)) {
                let (gate, up) = src.split_at(width);
                for ((d, g), u) in dst.iter_mut().zip(gate).zip(up) {
                    *d = *g / (1.0 + exp(-*g)) * *u;
                }
            }
        },
    );
}

fn gelu_rows(src: &[f32], dst: &mut [f32]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            // 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3)
            const TWICE: f32 = 2.0 * 0.797_884_6;
            for (d, x) in dst.iter_mut().zip(src) {
                let u = TWICE * (*x + 0.044_715 * *x * *x * *x);
                *d = *x / (1.0 + exp(-u));
            }
        },
    );
}

impl CustomOp1 for Swiglu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (rows, twice) = layout.shape().dims2()?;
        let width = twice / 2;
        let src = contiguous(storage, layout)?;
        let mut dst = vec![0f32; rows * width];
        src.par_chunks(ROWS_PER_TASK * twice)
            .zip(dst.par_chunks_mut(ROWS_PER_TASK * width))
            .for_each(|(src, dst)| swiglu_rows(src, dst, width));
        Ok((CpuStorage::F32(dst), Shape::from((rows, width))))
    }
}

impl CustomOp1 for GeluNew {
    fn name(&self) -> &'static str {
        "gelu_new"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let src = contiguous(storage, layout)?;
        let mut dst = vec![0f32; src.len()];
        src.par_chunks(1 << 14).zip(dst.par_chunks_mut(1 << 14)).for_each(|(src, dst)| gelu_rows(src, dst));
        Ok((CpuStorage::F32(dst), layout.shape().clone()))
    }
}

fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(data), Some((start, end))) => Ok(&data[start..end]),
        _ => candle_core::bail!("expected contiguous f32"),
    }
}

/// Whether the kernels of this file apply.
pub(crate) fn applies(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32
}

/// `silu(gate) * up` of `[n, 2I]`, gate first.
pub(crate) fn swiglu(x: &Tensor) -> candle_core::Result<Tensor> {
    if applies(x) {
        return x.apply_op1_no_bwd(&Swiglu);
    }
    let width = x.dim(1)? / 2;
    let gate = x.narrow(1, 0, width)?.contiguous()?;
    gate.silu()? * x.narrow(1, width, width)?.contiguous()?
}

/// GELU with the tanh approximation, as GPT-2 was trained with.
pub(crate) fn gelu_new(x: &Tensor) -> candle_core::Result<Tensor> {
    if applies(x) { x.apply_op1_no_bwd(&GeluNew) } else { x.gelu() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 2.4e-7, "exp({x}) = {got}, not {want}");
        }
    }

    #[test]
    fn fused_activations_equal_candle_ones() -> candle_core::Result<()> {
        let x = Tensor::randn(0f32, 4.0, (7, 38), &candle_core::Device::Cpu)?;
        let worst = |a: Tensor, b: Tensor| (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
        assert!(worst(gelu_new(&x)?, x.gelu()?)? < 1e-5);
        let (gate, up) = (x.narrow(1, 0, 19)?, x.narrow(1, 19, 19)?);
        assert!(worst(swiglu(&x)?, (gate.silu()? * up)?)? < 1e-5);
        Ok(())
    }

    #[test]
    fn softmax_sees_no_future() {
        let mut scores = vec![0.5f32; 2 * 40];
        softmax_causal(&mut scores, 40, 20);
        assert_eq!(scores[20], 1.0 / 21.0);
        assert_eq!(scores[21..40], [0.0; 19]);
        assert!((scores[40..].iter().sum::<f32>() - 1.0).abs() < 1e-6);
    }
}
