//! f32 products: AVX-512, AVX2 with FMA, and plain Rust.
//!
//! A tile of rows x outputs stays in registers while the inputs go by: for each input its outputs' weights are loaded
//! once, and each row's number is broadcast and multiplied into the row's sums.
//!
//! ```text
//!             32 outputs (two registers)
//! 14 rows  [ 28 sums in registers ]  +=  number of the row (broadcast) * weights (two loads)
//! ```
//!
//! The sums start at zero every [`BLOCK`] lines and are added to the tile there: rounding errors then grow with the
//! block's length and the number of blocks and not with the product of both.

use crate::cpu::Baseline;
#[cfg(target_arch = "x86_64")]
use crate::cpu::{AmxBf16, AmxInt8, Avx2, Avx512, Fp16, Vnni};
use crate::kernel::{Kernel, Tile, to_lines};
use crate::memory::Line;

/// Lines of 16 inputs that are summed before they are added to the tile.
const BLOCK: usize = 48;

/// Blocks of a sum over `lines`: first line, number of lines, whether it is the first.
#[inline(always)]
fn blocks(lines: usize, first: bool) -> impl Iterator<Item = (usize, usize, bool)> {
    (0..lines).step_by(BLOCK).map(move |start| (start, BLOCK.min(lines - start), start == 0 && first))
}

impl Kernel for Baseline {
    type Weight = f32;
    const ROWS: usize = 4;
    const OUTPUTS: usize = 16;
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const PAUSE: Option<usize> = Some(BLOCK);

    fn weight(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn row(self, row: &[f32], strip: &mut [Line], step: usize) -> f32 {
        to_lines(row, strip, step, |x| x);
        1.0
    }

    unsafe fn tile(self, tile: Tile) {
        let Tile { rows, lines, strip, panel, out, .. } = tile;
        // SAFETY: the contract of `Kernel::tile`, for these very sizes.
        let (strip, panel, out) = unsafe {
            (
                std::slice::from_raw_parts(strip.cast::<f32>(), lines * rows * 16),
                std::slice::from_raw_parts(panel.cast::<f32>(), lines * 16 * 16),
                std::slice::from_raw_parts_mut(out, rows * 16),
            )
        };
        for (row, out) in out.chunks_exact_mut(16).enumerate() {
            for (start, count, first) in blocks(lines, tile.first) {
                let mut sums = [0f32; 16];
                let weights = panel[start * 256..(start + count) * 256].chunks_exact(16);
                let lines = strip[start * rows * 16..(start + count) * rows * 16].chunks_exact(16 * rows);
                let numbers = lines.flat_map(|line| &line[row * 16..row * 16 + 16]);
                for (x, weights) in numbers.zip(weights) {
                    for (sum, w) in sums.iter_mut().zip(weights) {
                        *sum += x * w;
                    }
                }
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = if first { sum } else { *out + sum };
                }
            }
        }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! by_rows {
    ($rows:expr, $tile:ident $arguments:tt, $($m:literal)*) => {
        match $rows {
            $($m => $tile::<$m> $arguments,)*
            _ => debug_assert!(false, "a strip of {} rows", $rows),
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) use by_rows;

/// A proof that the machine has AVX-512 (whatever else it has).
///
/// # Safety
/// Its values exist only where the CPU has avx512f, dq, bw and vl.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe trait Wide: Copy {}
// SAFETY: `cpu` makes each of these only after asking for those features.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for Avx512 {}
// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for Fp16 {}
// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for Vnni {}
// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for AmxBf16 {}
// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for AmxInt8 {}

/// Runs `f`, compiled for AVX-512, which has fused multiply-adds.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn wide<R>(_proof: impl Wide, f: impl FnOnce() -> R) -> R {
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    fn compiled<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    // SAFETY: the proof's contract.
    unsafe { compiled(f) }
}

#[cfg(target_arch = "x86_64")]
impl Kernel for Avx512 {
    type Weight = f32;
    const FUSED: bool = true;
    const ROWS: usize = 14;
    const OUTPUTS: usize = 32;
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const PAUSE: Option<usize> = Some(BLOCK);

    fn weight(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn row(self, row: &[f32], strip: &mut [Line], step: usize) -> f32 {
        to_lines(row, strip, step, |x| x);
        1.0
    }

    unsafe fn tile(self, tile: Tile) {
        // SAFETY: `self` proves the features; the pointers are by the contract of `Kernel::tile`.
        unsafe { by_rows!(tile.rows, tile_avx512(tile), 1 2 3 4 5 6 7 8 9 10 11 12 13 14) }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        wide(self, f)
    }
}

/// # Safety
/// As [`Kernel::tile`], for M rows and 32 outputs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
unsafe fn tile_avx512<const M: usize>(tile: Tile) {
    use core::arch::x86_64::*;
    let Tile { lines, strip, panel, out, .. } = tile;
    for (start, count, first) in blocks(lines, tile.first) {
        let mut sums = [[_mm512_setzero_ps(); 2]; M];
        // SAFETY: lines below `start + count <= lines`, rows below M, inputs below 16 and outputs below 32.
        unsafe {
            let mut x = strip.add(start * M).cast::<f32>();
            let mut next = tile.next.wrapping_add(start * tile.step);
            let mut w = panel.add(start * 32).cast::<f32>();
            for _ in 0..count {
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
                    let weights = [_mm512_load_ps(w.add(k * 32)), _mm512_load_ps(w.add(k * 32 + 16))];
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let number = _mm512_set1_ps(*x.add(i * 16 + k));
                        sums[0] = _mm512_fmadd_ps(number, weights[0], sums[0]);
                        sums[1] = _mm512_fmadd_ps(number, weights[1], sums[1]);
                    }
                }
                x = x.add(M * 16);
                w = w.add(16 * 32);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (half, sum) in sums.iter().enumerate() {
                    let to = out.add(i * 32 + half * 16);
                    let sum = if first { *sum } else { _mm512_add_ps(_mm512_load_ps(to), *sum) };
                    _mm512_store_ps(to, sum);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Kernel for Avx2 {
    type Weight = f32;
    const ROWS: usize = 6;
    const OUTPUTS: usize = 16;
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const PAUSE: Option<usize> = Some(BLOCK);

    fn weight(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn row(self, row: &[f32], strip: &mut [Line], step: usize) -> f32 {
        to_lines(row, strip, step, |x| x);
        1.0
    }

    unsafe fn tile(self, tile: Tile) {
        // SAFETY: `self` proves the features; the pointers are by the contract of `Kernel::tile`.
        unsafe { by_rows!(tile.rows, tile_avx2(tile), 1 2 3 4 5 6) }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        #[target_feature(enable = "avx2")]
        fn wide<R>(f: impl FnOnce() -> R) -> R {
            f()
        }
        // SAFETY: `self` proves the features.
        unsafe { wide(f) }
    }
}

/// # Safety
/// As [`Kernel::tile`], for M rows and 16 outputs.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn tile_avx2<const M: usize>(tile: Tile) {
    use core::arch::x86_64::*;
    let Tile { lines, strip, panel, out, .. } = tile;
    for (start, count, first) in blocks(lines, tile.first) {
        let mut sums = [[_mm256_setzero_ps(); 2]; M];
        // SAFETY: lines below `start + count <= lines`, rows below M, inputs below 16 and outputs below 16.
        unsafe {
            let mut x = strip.add(start * M).cast::<f32>();
            let mut w = panel.add(start * 16).cast::<f32>();
            for _ in 0..count {
                for k in 0..16 {
                    let weights = [_mm256_load_ps(w.add(k * 16)), _mm256_load_ps(w.add(k * 16 + 8))];
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let number = _mm256_set1_ps(*x.add(i * 16 + k));
                        sums[0] = _mm256_fmadd_ps(number, weights[0], sums[0]);
                        sums[1] = _mm256_fmadd_ps(number, weights[1], sums[1]);
                    }
                }
                x = x.add(M * 16);
                w = w.add(16 * 16);
            }
            for (i, sums) in sums.iter().enumerate() {
                for (half, sum) in sums.iter().enumerate() {
                    let to = out.add(i * 16 + half * 8);
                    let sum = if first { *sum } else { _mm256_add_ps(_mm256_load_ps(to), *sum) };
                    _mm256_store_ps(to, sum);
                }
            }
        }
    }
}
