//! Tiles for few rows, which process several panels at once.
//!
//! With few rows, a kernel has few sums, each addition waits for the previous one, and every weight comes from memory.
//! Processing one panel after another saturates neither the arithmetic units nor the memory. Several panels at once
//! give the core independent sums, and more outstanding memory requests.
//!
//! ```text
//! panel p     [ line ][ line ] .. ──┐
//! panel p + 1 [ line ][ line ] .. ──┼─► sums of all panels, line by line; prefetches the line 8 KiB ahead
//! ..                                │   (past a panel's end: the line of the panel P panels further on)
//! panel p + 7 [ line ][ line ] .. ──┘
//! ```
//!
//! The sum of a row and an output has the same terms in the same order as in a tile of one panel.

use crate::kernel::{Tile, blocks};
use crate::memory::LINE;
use crate::widened_weights::{depth, load_eight, load_sixteen};

/// Prefetch distance: bytes of a panel between the line that is read and the line that is prefetched.
const PREFETCH_BYTES: usize = 8 << 10;

/// Panels per call with AVX-512: as many as sixteen registers can hold sums for.
pub(crate) const fn max_panels_avx512(rows: usize) -> usize {
    match rows {
        1 => 8,
        2 => 4,
        3 | 4 => 2,
        _ => 1,
    }
}

/// Panels per call with AVX2: as many as eight registers can hold sums for.
pub(crate) const fn max_panels_avx2(rows: usize) -> usize {
    match rows {
        1 => 4,
        2 => 2,
        _ => 1,
    }
}

/// Returns the distance, in lines, from line `n` of a panel to the line to prefetch. Past the panel's end, this is a
/// line of the panel `tile.panels` further on.
#[inline(always)]
fn prefetch_distance(n: usize, depth: usize, tile: &Tile) -> usize {
    let by = PREFETCH_BYTES / (depth * LINE);
    let next = if n + by < tile.lines { 0 } else { (tile.panels * tile.panel_stride).wrapping_sub(tile.lines * depth) };
    next.wrapping_add(by * depth)
}

macro_rules! tiles {
    ($name:ident, $features:literal, $outputs:literal, $vector:literal, $weights:ident, $zero:ident, $set:ident, $fma:ident, $add:ident, $load:ident, $store:ident) => {
        /// # Safety
        /// As [`crate::kernel::Kernel::compute_tile`], for M rows and P panels with weights in format `FORMAT`.
        #[target_feature(enable = $features)]
        pub(crate) unsafe fn $name<const M: usize, const P: usize, const FORMAT: u8>(tile: Tile, rows: usize) {
            use core::arch::x86_64::*;
            let Tile { lines, strip, panel, out, panel_stride, .. } = tile;
            let depth = const { depth(FORMAT, $outputs) };
            for (start, count, overwrite) in blocks(lines, tile.overwrite) {
                let mut sums = [[[$zero(); 2]; M]; P];
                // SAFETY: lines stay below `start + count <= lines`, rows below M, panels below P, inputs below 16 and
                // outputs below those of a panel. The panels' tiles are `rows` rows apart in `out`. Prefetched
                // addresses may be invalid.
                unsafe {
                    for n in start..start + count {
                        let (x, w) = (strip.add(n * M).cast::<f32>(), panel.add(n * depth));
                        let prefetch = w.wrapping_add(prefetch_distance(n, depth, &tile));
                        for k in 0..16 {
                            for (p, sums) in sums.iter_mut().enumerate() {
                                for line in k * depth / 16..(k + 1) * depth / 16 {
                                    _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(p * panel_stride + line).cast());
                                }
                                let w = w.add(p * panel_stride);
                                let weights = [
                                    $weights::<FORMAT>(w, k * $outputs),
                                    $weights::<FORMAT>(w, k * $outputs + $vector),
                                ];
                                for (i, sums) in sums.iter_mut().enumerate() {
                                    let number = $set(*x.add(i * 16 + k));
                                    sums[0] = $fma(number, weights[0], sums[0]);
                                    sums[1] = $fma(number, weights[1], sums[1]);
                                }
                            }
                        }
                    }
                    for (p, sums) in sums.iter().enumerate() {
                        for (i, sums) in sums.iter().enumerate() {
                            for (half, sum) in sums.iter().enumerate() {
                                let to = out.add((p * rows + i) * $outputs + half * $vector);
                                let sum = if overwrite { *sum } else { $add($load(to), *sum) };
                                $store(to, sum);
                            }
                        }
                    }
                }
            }
        }
    };
}

tiles!(
    several_avx512,
    "avx512f,avx512dq,avx512bw,avx512vl",
    32,
    16,
    load_sixteen,
    _mm512_setzero_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_load_ps,
    _mm512_store_ps
);
tiles!(
    several_avx2,
    "avx2,fma,f16c",
    16,
    8,
    load_eight,
    _mm256_setzero_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_load_ps,
    _mm256_store_ps
);
