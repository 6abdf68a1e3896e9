//! f32 products on bf16 tiles: each number is split into a sum of two bf16, and three of the four products are added.
//!
//! ```text
//! x = xh + xl + O(2^-18 x)      x·w = xl·wh + xh·wh + xh·wl + O(2^-16 |x·w|)
//!
//! strip, one line of 32 inputs: [ xh of 16 or 32 rows ][ xl of the same rows    ]
//! panel, the same inputs:       [ wh of 32 outputs    ][ wl of the same outputs ]   last line: whether any wl is not zero
//! ```
//!
//! A weight that bf16 holds exactly, as in most checkpoints, has wl = 0. The kernel then skips the third product, which
//! would add zeros; no bit changes. Products are exact in f32 and the instruction sums in f32 (see [`crate::amx`]).

use crate::amx::{TILE_ROWS, prefetch_line, session, store_sums, to_bf16, zero_sums};
use crate::cpu_features::AmxBf16x3;
use crate::kernel::{Kernel, Tile, copy_to_lines};
use crate::memory::{LINE, Line, as_numbers, as_numbers_mut};
use core::arch::asm;

/// Outputs in a panel.
const OUTPUTS: usize = 32;
/// Lines of weights in a panel, high and low parts, per line of a row.
const DEPTH: usize = 64;

/// Splits a number into its high and low part. A number that is not finite is entirely in the high part.
#[inline(always)]
fn split(x: f32) -> (u16, u16) {
    let high = to_bf16(x);
    let rest = x - f32::from_bits(u32::from(high) << 16);
    (high, to_bf16(if rest.is_finite() { rest } else { 0.0 }))
}

/// Multiplies the loaded tiles and adds the products to the sums.
macro_rules! multiply {
    (4) => {
        "tdpbf16ps tmm0, tmm4, tmm6
         tdpbf16ps tmm1, tmm4, tmm7
         tdpbf16ps tmm2, tmm5, tmm6
         tdpbf16ps tmm3, tmm5, tmm7"
    };
    (2) => {
        "tdpbf16ps tmm0, tmm4, tmm6
         tdpbf16ps tmm1, tmm4, tmm7"
    };
}

/// # Safety
/// As [`Kernel::compute_tile`] for [`AmxBf16x3`], in a [`session`].
unsafe fn tiles(tile: Tile) {
    let Tile { rows, lines, strip, panel, out, .. } = tile;
    // SAFETY: a line of the strip is twice 16 or 32 slots of 64 bytes, a line of the panel twice 16 rows of 128 bytes.
    // The trailer follows the panel's lines, and `out` has 32 rows of 128 bytes. The compiler does not allocate tile
    // registers, so each `asm!` finds what the previous one left in them.
    unsafe {
        let (mut x, mut w, has_low) = (strip, panel, panel.add(lines * DEPTH).cast::<u32>().read() != 0);
        if rows > TILE_ROWS {
            zero_sums!(4);
            for line in 0..lines {
                prefetch_line(&tile, line);
                asm!(
                    "tileloadd tmm4, [{x} + {row} + 2048]",
                    "tileloadd tmm5, [{x} + {row} + 3072]",
                    "tileloadd tmm6, [{w} + {pair}]",
                    "tileloadd tmm7, [{w} + {pair} + 64]",
                    multiply!(4),
                    "tileloadd tmm4, [{x} + {row}]",
                    "tileloadd tmm5, [{x} + {row} + 1024]",
                    multiply!(4),
                    x = in(reg) x,
                    w = in(reg) w,
                    row = in(reg) 64usize,
                    pair = in(reg) 128usize,
                    options(nostack, readonly),
                );
                if has_low {
                    asm!(
                        "tileloadd tmm6, [{w} + {pair} + 2048]",
                        "tileloadd tmm7, [{w} + {pair} + 2112]",
                        multiply!(4),
                        w = in(reg) w,
                        pair = in(reg) 128usize,
                        options(nostack, readonly),
                    );
                }
                x = x.wrapping_add(4 * TILE_ROWS);
                w = w.wrapping_add(DEPTH);
            }
            store_sums!(4, out);
        } else {
            zero_sums!(2);
            for line in 0..lines {
                prefetch_line(&tile, line);
                asm!(
                    "tileloadd tmm4, [{x} + {row} + 1024]",
                    "tileloadd tmm6, [{w} + {pair}]",
                    "tileloadd tmm7, [{w} + {pair} + 64]",
                    multiply!(2),
                    "tileloadd tmm4, [{x} + {row}]",
                    multiply!(2),
                    x = in(reg) x,
                    w = in(reg) w,
                    row = in(reg) 64usize,
                    pair = in(reg) 128usize,
                    options(nostack, readonly),
                );
                if has_low {
                    asm!(
                        "tileloadd tmm6, [{w} + {pair} + 2048]",
                        "tileloadd tmm7, [{w} + {pair} + 2112]",
                        multiply!(2),
                        w = in(reg) w,
                        pair = in(reg) 128usize,
                        options(nostack, readonly),
                    );
                }
                x = x.wrapping_add(2 * TILE_ROWS);
                w = w.wrapping_add(DEPTH);
            }
            store_sums!(2, out);
        }
    }
}

impl Kernel for AmxBf16x3 {
    /// The high and low part, interleaved until the panel is finished.
    type Weight = [u16; 2];
    const ROWS: usize = 2 * TILE_ROWS;
    const OUTPUTS: usize = OUTPUTS;
    const INPUTS: usize = 32;
    const GROUP: usize = 2;
    const TRAILER_LINES: usize = 1;

    fn encode_weight(value: f32) -> [u16; 2] {
        split(value).into()
    }

    /// Separates high and low parts within each line's weights, and records whether any low part is not zero.
    fn finish_panel(panel: &mut [Line]) {
        let (body, trailer) = panel.split_at_mut(panel.len() - Self::TRAILER_LINES);
        let mut has_low = false;
        for lines in body.chunks_exact_mut(DEPTH) {
            let mut separated = [Line::ZERO; DEPTH];
            let (high_parts, low_parts) = as_numbers_mut::<u16>(&mut separated).split_at_mut(DEPTH * LINE / 4);
            for ((to_high, to_low), [high, low]) in
                high_parts.iter_mut().zip(low_parts).zip(as_numbers::<[u16; 2]>(lines))
            {
                (*to_high, *to_low) = (*high, *low);
                // A low part with only the sign bit set is zero.
                has_low |= low << 1 != 0;
            }
            lines.copy_from_slice(&separated);
        }
        as_numbers_mut::<u32>(trailer)[0] = u32::from(has_low);
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        copy_to_lines(row, strip, line_stride, |x| split(x).0);
        copy_to_lines(row, &mut strip[line_stride / 2..], line_stride, |x| split(x).1);
        1.0
    }

    unsafe fn compute_tile(self, tile: Tile) {
        // SAFETY: `self` proves the instruction; the rest is `Kernel::compute_tile`'s contract.
        unsafe { tiles(tile) }
    }

    fn strip_stride(rows: usize) -> usize {
        2 * rows.next_multiple_of(TILE_ROWS)
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        crate::f32_kernels::wide(self.bf16(), f)
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
    fn the_parts_of_a_number_are_all_of_it_but_2_to_the_minus_18() {
        let value = |bits: u16| f64::from(f32::from_bits(u32::from(bits) << 16));
        for bits in (0x0800_0000..0x7f7f_0000u32).step_by(40_503) {
            for x in [f32::from_bits(bits), -f32::from_bits(bits)] {
                let (high, low) = split(x);
                let missing = (f64::from(x) - value(high) - value(low)).abs();
                assert!(missing <= f64::from(x).abs() * 2f64.powi(-17), "{x:e}: {missing:e}");
            }
        }
        assert_eq!(split(f32::INFINITY), (0x7f80, 0));
        assert!(f32::from_bits(u32::from(split(f32::NAN).0) << 16).is_nan());
        assert_eq!(split(1.5), (0x3fc0, 0));
    }
}
