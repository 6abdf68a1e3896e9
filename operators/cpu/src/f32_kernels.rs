//! f32 products: AVX-512, AVX2 with FMA, and plain Rust.
//!
//! A tile of rows x outputs stays in registers while the kernel iterates over the inputs. For each input it loads the
//! outputs' weights once, then broadcasts each row's number and adds the product to the row's sums.
//!
//! ```text
//!             32 outputs (two registers)
//! 14 rows  [ 28 sums in registers ]  +=  number of the row (broadcast) * weights (two loads)
//! ```
//!
//! The sums restart at zero every [`BLOCK_LINES`] lines and are then added to the tile. Rounding errors thus grow with
//! the block's length plus the number of blocks, not with their product.

use crate::cpu_features::Baseline;
#[cfg(target_arch = "x86_64")]
use crate::cpu_features::{AmxBf16, Avx2, Avx512, Fp16};
use crate::kernel::{BLOCK_LINES, Kernel, Tile, array_from_fn, blocks, copy_to_lines};
use crate::memory::Line;
#[cfg(target_arch = "x86_64")]
use crate::skinny_gemm::{self, several_avx2, several_avx512};
#[cfg(target_arch = "x86_64")]
use crate::widened_weights::{F32, depth, load_eight, load_sixteen};
use crate::widened_weights::{WideningKernel, widen_weight};

impl Kernel for Baseline {
    type Weight = f32;
    const ROWS: usize = 4;
    const OUTPUTS: usize = 16;
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const RESUME_LINES: Option<usize> = Some(BLOCK_LINES);

    fn encode_weight(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        copy_to_lines(row, strip, line_stride, |x| x);
        1.0
    }

    unsafe fn compute_tile(self, tile: Tile) {
        let Tile { rows, lines, strip, panel, out, .. } = tile;
        // SAFETY: the contract of `Kernel::compute_tile` for these sizes.
        let (strip, panel, out) = unsafe {
            (
                std::slice::from_raw_parts(strip.cast::<f32>(), lines * rows * 16),
                std::slice::from_raw_parts(panel.cast::<f32>(), lines * 16 * 16),
                std::slice::from_raw_parts_mut(out, rows * 16),
            )
        };
        for (row, out) in out.chunks_exact_mut(16).enumerate() {
            for (start, count, overwrite) in blocks(lines, tile.overwrite) {
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
                    *out = if overwrite { sum } else { *out + sum };
                }
            }
        }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        f()
    }
}

impl WideningKernel for Baseline {
    const WIDEN_FROM_STRIPS: usize = 2;

    unsafe fn tile_with_format<const FORMAT: u8>(self, tile: Tile) {
        let Tile { rows, lines, strip, panel, out, .. } = tile;
        // SAFETY: the contract of `WideningKernel::tile_with_format` for these sizes.
        let (strip, panel, out) = unsafe {
            (
                std::slice::from_raw_parts(strip.cast::<f32>(), lines * rows * 16),
                std::slice::from_raw_parts(panel.cast::<u16>(), lines * 16 * 16),
                std::slice::from_raw_parts_mut(out, rows * 16),
            )
        };
        for (start, count, overwrite) in blocks(lines, tile.overwrite) {
            let mut sums = [[0f32; 16]; Self::ROWS];
            let panel = panel[start * 256..(start + count) * 256].chunks_exact(256);
            let strip = strip[start * rows * 16..(start + count) * rows * 16].chunks_exact(16 * rows);
            for (line, narrow) in strip.zip(panel) {
                let mut weights = [0f32; 256];
                self.widen_to_f32::<FORMAT>(narrow, &mut weights);
                for (numbers, sums) in line.chunks_exact(16).zip(&mut sums) {
                    for (x, weights) in numbers.iter().zip(weights.chunks_exact(16)) {
                        for (sum, w) in sums.iter_mut().zip(weights) {
                            *sum += x * w;
                        }
                    }
                }
            }
            for (out, sums) in out.chunks_exact_mut(16).zip(&sums) {
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = if overwrite { *sum } else { *out + *sum };
                }
            }
        }
    }

    #[inline]
    fn widen_to_f32<const FORMAT: u8>(self, from: &[u16], to: &mut [f32]) {
        for (to, from) in to.as_chunks_mut::<16>().0.iter_mut().zip(from.as_chunks::<16>().0) {
            let from = *from;
            *to = array_from_fn(|i| widen_weight::<FORMAT>(from[i]));
        }
    }
}

#[cfg(target_arch = "x86_64")]
macro_rules! by_rows {
    ($rows:expr, $tile:ident($argument:expr), $($m:literal)*) => {
        match $rows {
            $($m => $tile::<$m>($argument),)*
            _ => debug_assert!(false, "a strip of {} rows", $rows),
        }
    };
    ($rows:expr, $tile:ident<$format:ident>($argument:expr), $($m:literal)*) => {
        match $rows {
            $($m => $tile::<$m, $format>($argument),)*
            _ => debug_assert!(false, "a strip of {} rows", $rows),
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) use by_rows;

/// Proofs that the machine has AVX-512, among other features.
///
/// # Safety
/// Values of the type exist only if the CPU has avx512f, dq, bw and vl.
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe trait Wide: Copy {}
// SAFETY: `cpu_features` makes each of these proofs only after it has detected those features.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for Avx512 {}
// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for Fp16 {}
// SAFETY: as above.
#[cfg(target_arch = "x86_64")]
unsafe impl Wide for AmxBf16 {}

/// Runs `f`, compiled for AVX-512, which includes fused multiply-adds.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(crate) fn wide<R>(_proof: impl Wide, f: impl FnOnce() -> R) -> R {
    #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
    fn compiled<R>(f: impl FnOnce() -> R) -> R {
        f()
    }
    // SAFETY: `Wide`'s contract.
    unsafe { compiled(f) }
}

#[cfg(target_arch = "x86_64")]
impl Kernel for Avx512 {
    type Weight = f32;
    const HAS_FMA: bool = true;
    const ROWS: usize = 14;
    const OUTPUTS: usize = 32;
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const RESUME_LINES: Option<usize> = Some(BLOCK_LINES);

    fn encode_weight(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        copy_to_lines(row, strip, line_stride, |x| x);
        1.0
    }

    unsafe fn compute_tile(self, tile: Tile) {
        // SAFETY: the contract is the same.
        unsafe { self.tile_with_format::<F32>(tile) }
    }

    fn max_panels(rows: usize) -> usize {
        skinny_gemm::max_panels_avx512(rows)
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        wide(self, f)
    }
}

#[cfg(target_arch = "x86_64")]
impl WideningKernel for Avx512 {
    /// Widening costs a seventh of a tile, and a tile of 16-bit weights a fifteenth more than one of f32.
    const WIDEN_FROM_STRIPS: usize = 3;

    unsafe fn tile_with_format<const FORMAT: u8>(self, tile: Tile) {
        // SAFETY: `self` proves the features; the pointers satisfy the contract of `WideningKernel::tile_with_format`.
        unsafe {
            match (tile.rows, tile.panels) {
                (_, 1) => by_rows!(tile.rows, tile_avx512<FORMAT>(tile), 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
                (1, 8) => several_avx512::<1, 8, FORMAT>(tile, Self::ROWS),
                (1, 4) => several_avx512::<1, 4, FORMAT>(tile, Self::ROWS),
                (1, 2) => several_avx512::<1, 2, FORMAT>(tile, Self::ROWS),
                (2, 4) => several_avx512::<2, 4, FORMAT>(tile, Self::ROWS),
                (2, 2) => several_avx512::<2, 2, FORMAT>(tile, Self::ROWS),
                (3, 2) => several_avx512::<3, 2, FORMAT>(tile, Self::ROWS),
                (4, 2) => several_avx512::<4, 2, FORMAT>(tile, Self::ROWS),
                (rows, panels) => debug_assert!(false, "{panels} panels of {rows} rows"),
            }
        }
    }

    fn widen_to_f32<const FORMAT: u8>(self, from: &[u16], to: &mut [f32]) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn widen<const FORMAT: u8>(from: &[u16], to: &mut [f32]) {
            use core::arch::x86_64::_mm512_storeu_ps;
            for (to, from) in to.as_chunks_mut::<16>().0.iter_mut().zip(from.as_chunks::<16>().0) {
                // SAFETY: each side has sixteen numbers.
                unsafe { _mm512_storeu_ps(to.as_mut_ptr(), load_sixteen::<FORMAT>(from.as_ptr().cast(), 0)) };
            }
        }
        // SAFETY: `self` proves the features.
        unsafe { widen::<FORMAT>(from, to) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Kernel for Avx2 {
    type Weight = f32;
    const ROWS: usize = 6;
    const OUTPUTS: usize = 16;
    const INPUTS: usize = 16;
    const GROUP: usize = 1;
    const RESUME_LINES: Option<usize> = Some(BLOCK_LINES);

    fn encode_weight(value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        copy_to_lines(row, strip, line_stride, |x| x);
        1.0
    }

    unsafe fn compute_tile(self, tile: Tile) {
        // SAFETY: the contract is the same.
        unsafe { self.tile_with_format::<F32>(tile) }
    }

    fn max_panels(rows: usize) -> usize {
        skinny_gemm::max_panels_avx2(rows)
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

#[cfg(target_arch = "x86_64")]
impl WideningKernel for Avx2 {
    /// Widening costs a third of a tile, but a tile of 16-bit weights costs hardly more than one of f32.
    const WIDEN_FROM_STRIPS: usize = 12;

    unsafe fn tile_with_format<const FORMAT: u8>(self, tile: Tile) {
        // SAFETY: `self` proves the features; the pointers satisfy the contract of `WideningKernel::tile_with_format`.
        unsafe {
            match (tile.rows, tile.panels) {
                (_, 1) => by_rows!(tile.rows, tile_avx2<FORMAT>(tile), 1 2 3 4 5 6),
                (1, 4) => several_avx2::<1, 4, FORMAT>(tile, Self::ROWS),
                (1, 2) => several_avx2::<1, 2, FORMAT>(tile, Self::ROWS),
                (2, 2) => several_avx2::<2, 2, FORMAT>(tile, Self::ROWS),
                (rows, panels) => debug_assert!(false, "{panels} panels of {rows} rows"),
            }
        }
    }

    fn widen_to_f32<const FORMAT: u8>(self, from: &[u16], to: &mut [f32]) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn widen<const FORMAT: u8>(from: &[u16], to: &mut [f32]) {
            use core::arch::x86_64::_mm256_storeu_ps;
            for (to, from) in to.as_chunks_mut::<8>().0.iter_mut().zip(from.as_chunks::<8>().0) {
                // SAFETY: each side has eight numbers.
                unsafe { _mm256_storeu_ps(to.as_mut_ptr(), load_eight::<FORMAT>(from.as_ptr().cast(), 0)) };
            }
        }
        // SAFETY: `self` proves the features.
        unsafe { widen::<FORMAT>(from, to) }
    }
}

/// Defines the tile of one panel for an instruction set. With `$ahead`, the tile also prefetches the next lines of the
/// strip and of the panel, and with f32 weights those of `tile.next`.
#[cfg(target_arch = "x86_64")]
macro_rules! tile {
    ($name:ident, $features:literal, $outputs:literal, $vector:literal, $ahead:literal, $weights:ident, $zero:ident, $set:ident, $fma:ident, $add:ident, $load:ident, $store:ident) => {
        /// # Safety
        /// As [`Kernel::compute_tile`], for M rows with weights in format `FORMAT`.
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const FORMAT: u8>(tile: Tile) {
            use core::arch::x86_64::*;
            let Tile { lines, strip, panel, out, .. } = tile;
            let depth = const { depth(FORMAT, $outputs) };
            for (start, count, overwrite) in blocks(lines, tile.overwrite) {
                let mut sums = [[$zero(); 2]; M];
                // SAFETY: lines stay below `start + count <= lines`, rows below M, inputs below 16 and outputs below those
                // of a panel. Prefetched addresses may be invalid.
                unsafe {
                    let mut x = strip.add(start * M).cast::<f32>();
                    let mut next = tile.next.wrapping_add(start * tile.prefetch_per_line);
                    let mut w = panel.add(start * depth);
                    for _ in 0..count {
                        if $ahead || FORMAT != F32 {
                            for line in 0..tile.prefetch_per_line {
                                _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line).cast());
                            }
                        }
                        next = next.wrapping_add(tile.prefetch_per_line);
                        if $ahead {
                            for i in 0..M {
                                _mm_prefetch::<_MM_HINT_T0>(x.wrapping_add((M + i) * 16).cast());
                            }
                        }
                        for k in 0..16 {
                            if $ahead {
                                for line in 0..depth / 16 {
                                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(depth + k * depth / 16 + line).cast());
                                }
                            }
                            let weights =
                                [$weights::<FORMAT>(w, k * $outputs), $weights::<FORMAT>(w, k * $outputs + $vector)];
                            for (i, sums) in sums.iter_mut().enumerate() {
                                let number = $set(*x.add(i * 16 + k));
                                sums[0] = $fma(number, weights[0], sums[0]);
                                sums[1] = $fma(number, weights[1], sums[1]);
                            }
                        }
                        x = x.add(M * 16);
                        w = w.add(depth);
                    }
                    for (i, sums) in sums.iter().enumerate() {
                        for (half, sum) in sums.iter().enumerate() {
                            let to = out.add(i * $outputs + half * $vector);
                            let sum = if overwrite { *sum } else { $add($load(to), *sum) };
                            $store(to, sum);
                        }
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
tile!(
    tile_avx512,
    "avx512f,avx512dq,avx512bw,avx512vl",
    32,
    16,
    true,
    load_sixteen,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_load_ps,
    _mm512_store_ps
);
#[cfg(target_arch = "x86_64")]
tile!(
    tile_avx2,
    "avx2,fma,f16c",
    16,
    8,
    false,
    load_eight,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_load_ps,
    _mm256_store_ps
);
