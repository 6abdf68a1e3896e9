//! f16 products with AVX512-FP16: sums over [`F16_BLOCK_LINES`] lines in f16, which are then added up in f32.
//!
//! f16 has 11 significant bits, so a long sum would lose its small terms. Each block of 32 inputs therefore starts at
//! zero, and its sum is widened and added to the f32 tile. Powers of two, which do not round, scale rows and outputs to
//! a largest magnitude in 8..16. A block's sum then stays below 8,192 (f16 overflows at 65,504), and only values below
//! 2^-27 of a row's largest number underflow to zero.

use crate::cpu_features::Fp16;
use crate::f32_kernels::by_rows;
use crate::kernel::{Kernel, Tile, max_magnitude};
use crate::memory::Line;
use core::arch::x86_64::*;
use half::f16;

/// Lines of 16 inputs each that are summed in f16.
const F16_BLOCK_LINES: usize = 2;

impl Kernel for Fp16 {
    type Weight = u16;
    const ROWS: usize = 14;
    const OUTPUTS: usize = 64;
    /// The strip stores each f16 twice: the CPU broadcasts 32 bits for free, but 16 bits only with a shuffle.
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const SCALED: bool = true;
    const RESUME_LINES: Option<usize> = Some(F16_BLOCK_LINES);

    fn scale(max: f32) -> f32 {
        // 2^(floor(log2 max) - 3), clamped so that the reciprocal is a normal number too.
        let exponent = (max.to_bits() >> 23) as i32 - 127 - 3;
        f32::from_bits(((exponent.clamp(-100, 120) + 127) as u32) << 23)
    }

    fn encode_weight(value: f32) -> u16 {
        f16::from_f32(value).to_bits()
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        let max = max_magnitude(row);
        let scale = if max.is_finite() { Self::scale(max) } else { 1.0 };
        // SAFETY: `self` proves the features.
        unsafe { pack_row_fp16(row, 1.0 / scale, strip, line_stride) };
        scale
    }

    unsafe fn compute_tile(self, tile: Tile) {
        // SAFETY: `self` proves the features; the pointers satisfy the contract of `Kernel::compute_tile`.
        unsafe { by_rows!(tile.rows, tile_fp16(tile), 1 2 3 4 5 6 7 8 9 10 11 12 13 14) }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        crate::f32_kernels::wide(self, f)
    }
}

/// Writes `row · by` in f16, each number twice, and pads the last line with zeros.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
fn pack_row_fp16(row: &[f32], by: f32, strip: &mut [Line], line_stride: usize) {
    for (numbers, line) in row.chunks(16).zip(strip.chunks_mut(line_stride)) {
        let mask = (u32::MAX >> (32 - numbers.len())) as __mmask16;
        // SAFETY: the mask limits the load to the chunk's numbers.
        let x = unsafe { _mm512_maskz_loadu_ps(mask, numbers.as_ptr()) };
        let x = _mm512_mul_ps(x, _mm512_set1_ps(by));
        let x = _mm512_cvtepu16_epi32(_mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x));
        let twice = _mm512_or_si512(x, _mm512_slli_epi32::<16>(x));
        // SAFETY: a line is 64 bytes and aligned.
        unsafe { _mm512_store_si512((&raw mut line[0]).cast(), twice) };
    }
}

/// # Safety
/// As [`Kernel::compute_tile`], for M rows and 64 outputs.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512fp16")]
unsafe fn tile_fp16<const M: usize>(tile: Tile) {
    let Tile { lines, out, .. } = tile;
    let mut sums = [[Line::ZERO; 2]; M];
    for start in (0..lines).step_by(F16_BLOCK_LINES) {
        for line in start * tile.prefetch_per_line..(start + F16_BLOCK_LINES) * tile.prefetch_per_line {
            _mm_prefetch::<_MM_HINT_T1>(tile.next.wrapping_add(line).cast());
        }
        // SAFETY: the block's lines are below `lines`, rows are below M, and `out` has M rows of 64 floats.
        unsafe {
            let (x, w) = (tile.strip.add(start * M).cast(), tile.panel.add(start * 32).cast());
            block_fp16::<M>(x, w, F16_BLOCK_LINES.min(lines - start), &mut sums);
            for (i, [left, right]) in sums.iter().enumerate() {
                widen(left, out.add(i * 64), start == 0 && tile.overwrite);
                widen(right, out.add(i * 64 + 32), start == 0 && tile.overwrite);
            }
        }
    }
}

/// Sums a block's `lines` in f16. This is a separate function so that the compiler keeps the sums in registers; inlined
/// into the loop over blocks, it stored each sum after each addition.
///
/// # Safety
/// `strip` has `lines` readable lines of M rows, and `panel` has `lines · 16` groups of 64 outputs.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512fp16")]
unsafe fn block_fp16<const M: usize>(strip: *const i32, panel: *const u16, lines: usize, to: &mut [[Line; 2]; M]) {
    let mut sums = [[_mm512_castsi512_ph(_mm512_setzero_si512()); 2]; M];
    let (mut x, mut w) = (strip, panel);
    // SAFETY: lines stay below `lines`, rows below M, inputs below 16 and outputs below 64. Prefetched addresses may be
    // invalid.
    unsafe {
        for _ in 0..lines {
            for i in 0..M {
                _mm_prefetch::<_MM_HINT_T0>(x.wrapping_add((M + i) * 16).cast());
            }
            for k in 0..16 {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((16 + k) * 64).cast());
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((16 + k) * 64 + 32).cast());
                let weights = [0, 32].map(|half| _mm512_castsi512_ph(_mm512_load_si512(w.add(k * 64 + half).cast())));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let number = _mm512_castsi512_ph(_mm512_set1_epi32(*x.add(i * 16 + k)));
                    sums[0] = _mm512_fmadd_ph(number, weights[0], sums[0]);
                    sums[1] = _mm512_fmadd_ph(number, weights[1], sums[1]);
                }
            }
            x = x.add(M * 16);
            w = w.add(16 * 64);
        }
        for (to, sums) in to.iter_mut().zip(&sums) {
            for (to, sum) in to.iter_mut().zip(sums) {
                _mm512_store_si512((&raw mut *to).cast(), _mm512_castph_si512(*sum));
            }
        }
    }
}

/// Widens 32 sums to f32, and stores them in `to` or adds them to it.
///
/// # Safety
/// `to` has 32 floats, aligned to 64 bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512fp16")]
unsafe fn widen(sums: &Line, to: *mut f32, store: bool) {
    // SAFETY: a line is 64 bytes and aligned.
    let sums = unsafe { _mm512_load_si512((&raw const *sums).cast()) };
    let low = _mm512_cvtph_ps(_mm512_castsi512_si256(sums));
    let high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(sums));
    // SAFETY: the contract of this function.
    unsafe {
        let (low, high) = if store {
            (low, high)
        } else {
            (_mm512_add_ps(_mm512_load_ps(to), low), _mm512_add_ps(_mm512_load_ps(to.add(16)), high))
        };
        _mm512_store_ps(to, low);
        _mm512_store_ps(to.add(16), high);
    }
}
