//! int8 products: 8-bit numbers, exact sums in 32 bits, a scale for each row and each output.
//!
//! A number is its scale times an integer in -127..=127. The sums are exact, so every level returns the same bits, and
//! the error of a product is that of the two roundings: half a step of an operand times the other one, for each input.
//!
//! The instruction of AVX512-VNNI multiplies unsigned by signed numbers: rows are kept 128 higher there, and a panel
//! ends with -128 times the sum of each output's weights, which its sums start from.

#[cfg(target_arch = "x86_64")]
use crate::cpu::Vnni;
#[cfg(target_arch = "x86_64")]
use crate::float::by_rows;
use crate::kernel::{Kernel, Tile, largest, to_lines};
use crate::memory::{LINE, Line, numbers, numbers_mut};

/// Inputs whose sum of products of 8-bit numbers fits 32 bits, also while rows are 128 higher.
pub(crate) const MOST_INPUTS: usize = (i32::MAX / (255 * 127)) as usize;

/// Outputs of a panel.
pub(crate) const OUTPUTS: usize = 32;
/// Inputs of a line.
pub(crate) const INPUTS: usize = LINE;
/// Inputs that an instruction sums.
pub(crate) const GROUP: usize = 4;
/// Lines of [`seal`].
pub(crate) const SEAL: usize = OUTPUTS * size_of::<i32>() / LINE;
/// Below this all of a row's or output's numbers are taken as zeros: the reciprocal of their scale may overflow.
const SMALLEST: f32 = 1e-30;

pub(crate) fn scale(max: f32) -> f32 {
    if max < SMALLEST { 1.0 } else { max / 127.0 }
}

#[inline(always)]
pub(crate) fn encode(value: f32) -> i8 {
    // round to the nearest, ties to even, in the low bits of a float: |value| is below 128
    const ROUND: f32 = 12_582_912.0;
    (value + ROUND).to_bits() as i8
}

/// -128 times the sum of each output's weights, at the panel's end.
pub(crate) fn seal(panel: &mut [Line]) {
    let (body, seal) = panel.split_at_mut(panel.len() - SEAL);
    let mut sums = [0i32; OUTPUTS];
    for group in numbers::<i8>(body).chunks_exact(OUTPUTS * GROUP) {
        for (sum, weights) in sums.iter_mut().zip(group.chunks_exact(GROUP)) {
            *sum -= 128 * weights.iter().map(|w| i32::from(*w)).sum::<i32>();
        }
    }
    numbers_mut::<i32>(seal).copy_from_slice(&sums);
}

/// Packs a row, its numbers changed by `xor`; returns its scale, NaN for a row with a number that is not finite.
#[inline(always)]
pub(crate) fn row(row: &[f32], strip: &mut [Line], step: usize, xor: i8) -> f32 {
    let max = largest(row);
    let scale = if max.is_finite() { scale(max) } else { f32::NAN };
    let by = if max.is_finite() && max >= SMALLEST { 127.0 / max } else { 0.0 };
    to_lines(row, strip, step, |x| encode(x * by) ^ xor);
    scale
}

#[cfg(target_arch = "x86_64")]
impl Kernel for Vnni {
    type Weight = i8;
    const ROWS: usize = 14;
    const OUTPUTS: usize = OUTPUTS;
    const INPUTS: usize = INPUTS;
    const GROUP: usize = GROUP;
    const SCALED: bool = true;
    const SEAL: usize = SEAL;

    fn scale(max: f32) -> f32 {
        scale(max)
    }

    fn weight(value: f32) -> i8 {
        encode(value)
    }

    fn seal(panel: &mut [Line]) {
        seal(panel);
    }

    #[inline(always)]
    fn row(self, numbers: &[f32], strip: &mut [Line], step: usize) -> f32 {
        // -128 as a pattern of bits: the sign's
        row(numbers, strip, step, i8::MIN)
    }

    unsafe fn tile(self, tile: Tile) {
        // SAFETY: `self` proves the features; the pointers are by the contract of `Kernel::tile`.
        unsafe { by_rows!(tile.rows, tile_vnni(tile), 1 2 3 4 5 6 7 8 9 10 11 12 13 14) }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        crate::float::wide(self, f)
    }
}

/// # Safety
/// As [`Kernel::tile`], for M rows and 32 outputs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512vnni")]
unsafe fn tile_vnni<const M: usize>(tile: Tile) {
    use core::arch::x86_64::*;
    let (mut next, mut x, mut w) = (tile.next, tile.strip.cast::<i32>(), tile.panel.cast::<i32>());
    // SAFETY: lines below `lines`, rows below M, groups below 16 and outputs below 32, then the seal of 32 numbers;
    // what is prefetched need not be.
    unsafe {
        let seal = w.add(tile.lines * 16 * 32);
        let start = [0, 16].map(|half| _mm512_load_si512(seal.add(half).cast()));
        let mut sums = [start; M];
        for _ in 0..tile.lines {
            for line in 0..tile.step {
                _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line).cast());
            }
            next = next.wrapping_add(tile.step);
            for i in 0..M {
                _mm_prefetch::<_MM_HINT_T0>(x.wrapping_add((M + i) * 16).cast());
            }
            for k in 0..16 {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((16 + k) * 32).cast());
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add((16 + k) * 32 + 16).cast());
                let weights = [0, 16].map(|half| _mm512_load_si512(w.add(k * 32 + half).cast()));
                for (i, sums) in sums.iter_mut().enumerate() {
                    let number = _mm512_set1_epi32(*x.add(i * 16 + k));
                    sums[0] = _mm512_dpbusd_epi32(sums[0], number, weights[0]);
                    sums[1] = _mm512_dpbusd_epi32(sums[1], number, weights[1]);
                }
            }
            x = x.add(M * 16);
            w = w.add(16 * 32);
        }
        for (i, sums) in sums.iter().enumerate() {
            for (half, sum) in sums.iter().enumerate() {
                _mm512_store_ps(tile.out.add(i * 32 + half * 16), _mm512_cvtepi32_ps(*sum));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_rounds_to_the_nearest() {
        for i in -127_000..=127_000 {
            let x = i as f32 * 1e-3;
            assert_eq!(f32::from(encode(x)), x.round_ties_even(), "{x}");
        }
        assert_eq!((encode(127.000_05), encode(-127.000_05), encode(0.5), encode(1.5)), (127, -127, 0, 2));
    }
}
