//! bf16 products with AMX, which multiplies whole tiles of 16 rows of 64 bytes.
//!
//! ```text
//!               32 outputs
//!            [ panel 16 | 16 ]      two tiles of weights per line of 64 bytes of the rows
//! 32 rows  [ 16 ] [ 0 ][ 1 ]
//!          [ 16 ] [ 2 ][ 3 ]        four tiles of sums, in registers until the last line
//! ```
//!
//! An instruction adds a line's products to a sum in the order of the inputs, whatever rows its tile holds. A strip of
//! at most 16 rows uses one row of tiles. Products of bf16 are exact in f32. On every CPU with AMX, the instruction
//! rounds its sums to nearest and treats subnormal numbers as zeros.

use crate::cpu_features::AmxBf16;
use crate::kernel::{Kernel, Tile};
use crate::memory::{LINE, Line};
use core::arch::asm;

/// Rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// The tile configuration: palette 1, eight tiles of 16 rows of 64 bytes each.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes: [u16; 16],
    rows: [u8; 16],
}

const CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};
const _: () = assert!(size_of::<Configuration>() == LINE);

/// Configures the thread's tiles for `f`.
///
/// # Safety
/// The CPU has AMX and the process may use it.
#[inline(always)]
pub(crate) unsafe fn session<R>(f: impl FnOnce() -> R) -> R {
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            // SAFETY: the contract of `session`; nothing uses the tiles afterwards.
            unsafe { asm!("tilerelease", options(nostack, nomem)) };
        }
    }
    // SAFETY: the contract of `session`; the configuration is 64 bytes and valid for palette 1.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &CONFIGURATION, options(nostack, readonly)) };
    let _release = Release;
    f()
}

/// Sets the sums of one or two rows of tiles to zero: 2 or 4 tiles.
macro_rules! zero_sums {
    (4) => {
        asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem))
    };
    (2) => {
        asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem))
    };
}
pub(crate) use zero_sums;

/// Stores the sums of one or two rows of tiles, 32 outputs apart.
macro_rules! store_sums {
    (4, $out:ident) => {
        asm!(
            "tilestored [{out} + {pair}], tmm0",
            "tilestored [{out} + {pair} + 64], tmm1",
            "tilestored [{out} + {pair} + 2048], tmm2",
            "tilestored [{out} + {pair} + 2112], tmm3",
            out = in(reg) $out,
            pair = in(reg) 128usize,
            options(nostack),
        )
    };
    (2, $out:ident) => {
        asm!(
            "tilestored [{out} + {pair}], tmm0",
            "tilestored [{out} + {pair} + 64], tmm1",
            out = in(reg) $out,
            pair = in(reg) 128usize,
            options(nostack),
        )
    };
}
pub(crate) use store_sums;

/// Defines a function that computes the sums of one or two rows of tiles with the instruction `$multiply`, and stores
/// them 32 outputs apart.
///
/// The loop over lines is Rust rather than assembly, so that prefetches are spread between the lines; issued all at
/// once, they would delay the loads. The compiler does not allocate tile registers, so each `asm!` finds what the
/// previous one left in them.
macro_rules! tiles {
    ($name:ident, $multiply:literal) => {
        /// # Safety
        /// As [`Kernel::compute_tile`] for 32 outputs in groups of 4 bytes. The caller runs it in a [`session`], and
        /// the CPU has the instruction.
        unsafe fn $name(tile: Tile) {
            let Tile { rows, lines, strip, panel, out, .. } = tile;
            // SAFETY: a line of the strip is 16 or 32 slots of 64 bytes, a line of the panel 16 rows of 128 bytes;
            // `out` has 32 rows of 128 bytes.
            unsafe {
                let (mut x, mut w) = (strip, panel);
                if rows > TILE_ROWS {
                    zero_sums!(4);
                    for line in 0..lines {
                        prefetch_line(&tile, line);
                        asm!(
                            "tileloadd tmm4, [{x} + {row}]",
                            "tileloadd tmm6, [{w} + {pair}]",
                            "tileloadd tmm7, [{w} + {pair} + 64]",
                            concat!($multiply, " tmm0, tmm4, tmm6"),
                            "tileloadd tmm5, [{x} + {row} + 1024]",
                            concat!($multiply, " tmm1, tmm4, tmm7"),
                            concat!($multiply, " tmm2, tmm5, tmm6"),
                            concat!($multiply, " tmm3, tmm5, tmm7"),
                            x = in(reg) x,
                            w = in(reg) w,
                            row = in(reg) 64usize,
                            pair = in(reg) 128usize,
                            options(nostack, readonly),
                        );
                        x = x.wrapping_add(2 * TILE_ROWS);
                        w = w.wrapping_add(32);
                    }
                    store_sums!(4, out);
                } else {
                    zero_sums!(2);
                    for line in 0..lines {
                        prefetch_line(&tile, line);
                        asm!(
                            "tileloadd tmm4, [{x} + {row}]",
                            "tileloadd tmm6, [{w} + {pair}]",
                            "tileloadd tmm7, [{w} + {pair} + 64]",
                            concat!($multiply, " tmm0, tmm4, tmm6"),
                            concat!($multiply, " tmm1, tmm4, tmm7"),
                            x = in(reg) x,
                            w = in(reg) w,
                            row = in(reg) 64usize,
                            pair = in(reg) 128usize,
                            options(nostack, readonly),
                        );
                        x = x.wrapping_add(TILE_ROWS);
                        w = w.wrapping_add(32);
                    }
                    store_sums!(2, out);
                }
            }
        }
    };
}
tiles!(tiles_bf16, "tdpbf16ps");

/// Prefetches one line's share of the memory that is read next, and of the rows that the tile is written to.
#[inline(always)]
pub(crate) fn prefetch_line(tile: &Tile, line: usize) {
    use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
    // SAFETY: a prefetch of any address is allowed, and every x86-64 CPU has the instruction.
    unsafe {
        for n in line * tile.prefetch_per_line..(line + 1) * tile.prefetch_per_line {
            _mm_prefetch::<_MM_HINT_T1>(tile.next.wrapping_add(n).cast());
        }
        if tile.write_stride > 0 {
            for row in 2 * line..tile.rows.min(2 * line + 2) {
                let to = tile.write_to.wrapping_add(row * tile.write_stride);
                _mm_prefetch::<_MM_HINT_T0>(to.cast());
                _mm_prefetch::<_MM_HINT_T0>(to.wrapping_add(16).cast());
            }
        }
    }
}

#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    // A NaN keeps its sign and becomes quiet; rounding could turn it into infinity.
    (if x.is_nan() { (bits >> 16) | 0x40 } else { rounded }) as u16
}

/// Writes a row as bf16 and pads the last line with zeros. Subnormal numbers become zeros, as the product treats them.
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16")]
fn pack_row_bf16(row: &[f32], strip: &mut [Line], line_stride: usize) {
    use core::arch::x86_64::*;
    for (numbers, line) in row.chunks(2 * TILE_ROWS).zip(strip.chunks_mut(line_stride)) {
        let mask = u32::MAX >> (2 * TILE_ROWS - numbers.len());
        let [low, high] = [mask as __mmask16, (mask >> TILE_ROWS) as __mmask16];
        // SAFETY: the masks limit the loads to the chunk's numbers.
        let (low, high) = unsafe {
            let high_numbers = numbers.as_ptr().wrapping_add(TILE_ROWS);
            (_mm512_maskz_loadu_ps(low, numbers.as_ptr()), _mm512_maskz_loadu_ps(high, high_numbers))
        };
        let both = _mm512_cvtne2ps_pbh(high, low);
        // SAFETY: a line is 64 bytes and aligned, and so is the vector.
        unsafe { _mm512_store_si512((&raw mut line[0]).cast(), core::mem::transmute::<__m512bh, __m512i>(both)) };
    }
}

impl Kernel for AmxBf16 {
    type Weight = u16;
    const HAS_FMA: bool = true;
    const ROWS: usize = 2 * TILE_ROWS;
    const OUTPUTS: usize = 32;
    const INPUTS: usize = 32;
    const GROUP: usize = 2;

    fn encode_weight(value: f32) -> u16 {
        to_bf16(value)
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        // SAFETY: `self` proves the features.
        unsafe { pack_row_bf16(row, strip, line_stride) };
        1.0
    }

    unsafe fn compute_tile(self, tile: Tile) {
        // SAFETY: `self` proves the instruction; the rest is `Kernel::compute_tile`'s contract.
        unsafe { tiles_bf16(tile) }
    }

    fn strip_stride(rows: usize) -> usize {
        rows.next_multiple_of(TILE_ROWS)
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        crate::f32_kernels::wide(self, f)
    }

    #[inline(always)]
    fn session<R>(self, f: impl FnOnce() -> R) -> R {
        // SAFETY: `self` proves AMX and the permission to use it.
        unsafe { session(f) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        for bits in (0..=u32::MAX).step_by(40_503).chain((0x3f80_0000..0x3f84_0000).step_by(7)) {
            let x = f32::from_bits(bits);
            assert_eq!(to_bf16(x), half::bf16::from_f32(x).to_bits(), "{bits:#x}");
        }
        for bits in [0x7f80_0000, 0xff80_0000, 0x7f80_0001, 0x7fff_ffff, 0xffff_ffff, 0x7f7f_ffff, 0x3f80_8000] {
            let x = f32::from_bits(bits);
            assert_eq!(to_bf16(x), half::bf16::from_f32(x).to_bits(), "{bits:#x}");
        }
    }
}
