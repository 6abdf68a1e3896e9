//! f32 products of weights that stay in 16 bits, for machines without 16-bit products. They read half the memory, and
//! every bit equals that of the product with the widened weights.
//!
//! ```text
//! few strips of rows:   panel, 16 bits ── each tile widens as it loads ─────────────────────► sums
//! many strips:          panel, 16 bits ── once ──► f32 in the core's cache ── every tile ──► sums
//! ```
//!
//! Widening does not round, and a tile adds the same products in the same order either way.

use crate::kernel::{Kernel, Tile};
use crate::memory::{Line, as_numbers, as_numbers_mut};
use half::{bf16, f16};
use std::cell::Cell;

/// Weights in f32.
#[cfg(target_arch = "x86_64")]
pub(crate) const F32: u8 = 0;
/// Weights in IEEE half.
pub(crate) const F16: u8 = 1;
/// Weights in bfloat16.
pub(crate) const BF16: u8 = 2;

/// Lines of a panel of `outputs` outputs per line of 16 inputs.
#[cfg(target_arch = "x86_64")]
pub(crate) const fn depth(format: u8, outputs: usize) -> usize {
    if format == F32 { outputs } else { outputs / 2 }
}

/// A kernel of f32 products that also accepts panels of 16-bit weights.
pub(crate) trait WideningKernel: Kernel<Weight = f32> {
    /// Number of strips from which widening a panel once is cheaper than widening it in each tile.
    const WIDEN_FROM_STRIPS: usize;

    /// Like [`Kernel::compute_tile`], for a panel with weights in format `FORMAT`.
    ///
    /// # Safety
    /// As [`Kernel::compute_tile`]; the panel has the same number of weights, in 16 bits.
    unsafe fn tile_with_format<const FORMAT: u8>(self, tile: Tile);

    /// Widens weights in format `FORMAT`, as many as `to` holds. Both slices are whole lines.
    fn widen_to_f32<const FORMAT: u8>(self, from: &[u16], to: &mut [f32]);
}

/// A kernel of f32 products with weights stored as [`F16`] or [`BF16`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NarrowWeights<K, const FORMAT: u8>(pub K);

impl<K: WideningKernel, const FORMAT: u8> Kernel for NarrowWeights<K, FORMAT> {
    type Weight = u16;
    const ROWS: usize = K::ROWS;
    const OUTPUTS: usize = K::OUTPUTS;
    const INPUTS: usize = K::INPUTS;
    const GROUP: usize = K::GROUP;
    const HAS_FMA: bool = K::HAS_FMA;
    const RESUME_LINES: Option<usize> = K::RESUME_LINES;
    const WIDEN_FROM: Option<usize> = Some(K::WIDEN_FROM_STRIPS);

    fn encode_weight(value: f32) -> u16 {
        const { assert!(!K::SCALED && K::TRAILER_LINES == 0 && K::GROUP == 1 && K::INPUTS == 16) };
        if FORMAT == F16 { f16::from_f32(value).to_bits() } else { bf16::from_f32(value).to_bits() }
    }

    #[inline(always)]
    fn pack_row(self, row: &[f32], strip: &mut [Line], line_stride: usize) -> f32 {
        self.0.pack_row(row, strip, line_stride)
    }

    unsafe fn compute_tile(self, tile: Tile) {
        // SAFETY: the contract is the same, for a widened panel and for a 16-bit panel.
        unsafe { if tile.widened { self.0.compute_tile(tile) } else { self.0.tile_with_format::<FORMAT>(tile) } }
    }

    #[inline(always)]
    fn vectorised<R>(self, f: impl FnOnce() -> R) -> R {
        self.0.vectorised(f)
    }

    fn max_panels(rows: usize) -> usize {
        K::max_panels(rows)
    }

    fn widen(self, from: &[Line], to: &mut [Line]) {
        self.0.widen_to_f32::<FORMAT>(as_numbers(from), as_numbers_mut(to));
    }
}

/// Widens one weight in format `FORMAT` to f32.
#[inline(always)]
pub(crate) fn widen_weight<const FORMAT: u8>(bits: u16) -> f32 {
    let bits = u32::from(bits);
    if FORMAT == BF16 {
        return f32::from_bits(bits << 16);
    }
    // The exponent biases of f16 and f32 differ by 112. Multiplying by 2^112 corrects this exactly, for subnormal
    // numbers too. Infinity and NaN have an exponent of all ones in both formats.
    let (sign, size) = ((bits & 0x8000) << 16, bits & 0x7fff);
    let finite = (f32::from_bits(size << 13) * f32::from_bits((127 + 112) << 23)).to_bits();
    let all = if size < 0x7c00 { finite } else { (size << 13) | 0x7f80_0000 };
    f32::from_bits(all | sign)
}

/// A thread's buffer for widened panels, kept from one product to the next.
pub(crate) struct WidenedPanels(Vec<Line>);

thread_local! {
    static WIDENED_PANELS: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

impl WidenedPanels {
    /// Takes the thread's buffer, grown to at least `lines` lines of arbitrary content.
    pub(crate) fn take(lines: usize) -> Self {
        let mut buffer = WIDENED_PANELS.take();
        if buffer.len() < lines {
            buffer.resize(lines, Line::ZERO);
        }
        Self(buffer)
    }

    pub(crate) fn lines(&mut self) -> &mut [Line] {
        &mut self.0
    }
}

impl Drop for WidenedPanels {
    fn drop(&mut self) {
        WIDENED_PANELS.set(std::mem::take(&mut self.0));
    }
}

/// Loads sixteen weights as f32, starting at weight `n`.
///
/// # Safety
/// `weights` has them in format `FORMAT`, aligned to a vector if they are f32.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
pub(crate) unsafe fn load_sixteen<const FORMAT: u8>(weights: *const Line, n: usize) -> core::arch::x86_64::__m512 {
    use core::arch::x86_64::*;
    // SAFETY: the contract of this function.
    unsafe {
        if FORMAT == F32 {
            return _mm512_load_ps(weights.cast::<f32>().add(n));
        }
        let bits = _mm256_loadu_si256(weights.cast::<u16>().add(n).cast());
        if FORMAT == F16 {
            _mm512_cvtph_ps(bits)
        } else {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        }
    }
}

/// Loads eight weights as f32, starting at weight `n`.
///
/// # Safety
/// `weights` has them in format `FORMAT`, aligned to a vector if they are f32.
#[cfg(target_arch = "x86_64")]
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn load_eight<const FORMAT: u8>(weights: *const Line, n: usize) -> core::arch::x86_64::__m256 {
    use core::arch::x86_64::*;
    // SAFETY: the contract of this function.
    unsafe {
        if FORMAT == F32 {
            return _mm256_load_ps(weights.cast::<f32>().add(n));
        }
        let bits = _mm_loadu_si128(weights.cast::<u16>().add(n).cast());
        if FORMAT == F16 {
            _mm256_cvtph_ps(bits)
        } else {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::{Level, with_kernel};
    use crate::weight::PackedWeight;
    use crate::{Arithmetic, Epilogue, Layout, Rows, RowsMut, Scratch, Threads, product};
    use proptest::prelude::*;

    /// Rounds a weight to its stored format.
    type Rounds = fn(f32) -> f32;

    const BOTH: [(Arithmetic, Rounds); 2] = [
        (Arithmetic::F32OfF16, |w| f16::from_f32(w).to_f32()),
        (Arithmetic::F32OfBf16, |w| bf16::from_f32(w).to_f32()),
    ];

    /// A product of some shape, with special values among its weights.
    #[derive(Debug, Clone)]
    struct Case {
        rows: usize,
        outputs: usize,
        inputs: usize,
        seed: u32,
        /// The weights are multiplied by 2^exponent. In f16 some then become subnormal, zero or infinite.
        exponent: i32,
        epilogue: Epilogue,
        by_inputs: bool,
        threads: usize,
    }

    impl Case {
        fn numbers(&self, n: usize, which: u32) -> Vec<f32> {
            let mut state = (self.seed ^ which.wrapping_mul(0x9e37_79b9)) | 1;
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                state as i32 as f32 / 2f32.powi(31)
            };
            (0..n).map(|_| next()).collect()
        }

        /// Returns the product's bits with these weights. Every NaN maps to the same bits.
        fn bits(&self, weights: &[f32], arithmetic: Arithmetic, level: Level) -> Vec<u32> {
            let Self { rows, outputs, inputs, epilogue, .. } = *self;
            let gated = epilogue == Epilogue::SwiGlu;
            let layout = match self.by_inputs && !gated {
                true => Layout::Inputs { stride: outputs },
                false => Layout::Outputs { stride: inputs },
            };
            let (gate, up) = weights.split_at(weights.len() / 2);
            let parts = if gated { vec![gate, up] } else { vec![weights] };
            let packed = PackedWeight::with_level(&parts, outputs, inputs, layout, arithmetic, level).unwrap();
            let x = self.numbers(rows * inputs, 1);
            let bias = self.numbers(packed.outputs(), 2);
            let mut out = self.numbers(rows * outputs, 3);
            let (x, to) = (Rows { data: &x, rows, stride: inputs }, RowsMut { data: &mut out, rows, stride: outputs });
            let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads).build().unwrap();
            let mut scratch = Scratch::new();
            pool.install(|| product(x, &packed, Some(&bias), epilogue, to, Threads::Pool, &mut scratch)).unwrap();
            out.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
        }

        /// Checks that the product at every level equals that of f32 panels with the rounded weights.
        fn check(&self) {
            let parts = if self.epilogue == Epilogue::SwiGlu { 2 } else { 1 };
            let mut weights = self.numbers(parts * self.outputs * self.inputs, 0);
            weights.iter_mut().for_each(|w| *w *= 2f32.powi(self.exponent));
            let last = weights.len() - 1;
            weights[self.seed as usize % (last + 1)] = -0.0;
            weights[last] = f32::from_bits(self.seed);
            for (arithmetic, round) in BOTH {
                let rounded: Vec<f32> = weights.iter().map(|w| round(*w)).collect();
                let levels = Level::all(Arithmetic::F32).into_iter().zip(Level::all(arithmetic));
                for (wide, narrow) in levels {
                    assert_eq!(wide.name(), narrow.name());
                    let want = self.bits(&rounded, Arithmetic::F32, wide);
                    let got = self.bits(&weights, arithmetic, narrow);
                    let at = want.iter().zip(&got).position(|(want, got)| want != got);
                    assert_eq!(at, None, "{} {}: {self:?}", arithmetic.name(), narrow.name());
                }
            }
        }
    }

    const PLAIN: Case = Case {
        rows: 1,
        outputs: 1,
        inputs: 1,
        seed: 7,
        exponent: 0,
        epilogue: Epilogue::Store,
        by_inputs: false,
        threads: 1,
    };

    /// Covers the edges of tiles, panels, lines, and blocks and parts of sums, and the number of strips from which
    /// panels are widened once.
    #[test]
    fn kept_in_16_bits_a_product_has_the_bits_of_f32() {
        for rows in (1..=15).chain([24, 28, 29, 42, 43, 66, 67, 72, 73, 84, 90]) {
            Case { rows, outputs: 33, inputs: 17, ..PLAIN }.check();
        }
        for rows in 1..=5 {
            Case { rows, outputs: 32 * 15 + 1, inputs: 100, threads: 2, ..PLAIN }.check();
            Case { rows, outputs: 300, inputs: 4200, ..PLAIN }.check();
        }
        for outputs in [1, 15, 16, 17, 31, 32, 33, 63, 64, 65] {
            Case { rows: 5, outputs, inputs: 48, by_inputs: true, ..PLAIN }.check();
            Case { rows: 90, outputs, inputs: 16, epilogue: Epilogue::SwiGlu, ..PLAIN }.check();
        }
        for inputs in [1, 15, 16, 17, 767, 768, 769, 1537, 4096, 4097] {
            Case { rows: 3, outputs: 40, inputs, ..PLAIN }.check();
            Case { rows: 80, outputs: 40, inputs, threads: 2, ..PLAIN }.check();
        }
        for exponent in [-30, -24, -14, 15, 16, 17, 100] {
            Case { rows: 50, outputs: 20, inputs: 40, exponent, epilogue: Epilogue::Add, ..PLAIN }.check();
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]
        #[test]
        fn whatever_the_shape_a_product_has_the_bits_of_f32(
            rows in 1usize..100,
            outputs in 1usize..130,
            inputs in 1usize..900,
            seed in any::<u32>(),
            exponent in -30i32..18,
            epilogue in prop_oneof![Just(Epilogue::Store), Just(Epilogue::Add), Just(Epilogue::Gelu), Just(Epilogue::SwiGlu)],
            by_inputs in any::<bool>(),
            threads in 1usize..4,
        ) {
            Case { rows, outputs, inputs, seed, exponent, epilogue, by_inputs, threads }.check();
        }
    }

    fn bits_of<K: Kernel>(kernel: K) -> Vec<u32> {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        let mut from = vec![Line::ZERO; 2048];
        let mut to = vec![Line::ZERO; 4096];
        as_numbers_mut::<u16>(&mut from).copy_from_slice(&all);
        kernel.widen(&from, &mut to);
        as_numbers::<u32>(&to).to_vec()
    }

    /// Every 16-bit number widens to the right f32. A NaN stays a NaN with its sign and payload; only the payload's
    /// first bit, which marks it as quiet, may differ.
    #[test]
    fn every_level_widens_every_number() {
        for bits in 0..=u16::MAX {
            let quiet = |wide: f32, bits: u32| if wide.is_nan() { bits | 0x40_0000 } else { bits };
            let (half, brain) = (f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32());
            let (ours, ours_brain) = (widen_weight::<F16>(bits), widen_weight::<BF16>(bits));
            assert_eq!(quiet(ours, ours.to_bits()), quiet(half, half.to_bits()), "{bits:#x}");
            assert_eq!(quiet(brain, ours_brain.to_bits()), quiet(brain, brain.to_bits()), "{bits:#x}");
        }
        for (arithmetic, of) in [
            (Arithmetic::F32OfF16, widen_weight::<F16> as fn(u16) -> f32),
            (Arithmetic::F32OfBf16, widen_weight::<BF16>),
        ] {
            for level in Level::all(arithmetic) {
                let got = with_kernel!(level, kernel => bits_of(kernel));
                for (bits, got) in (0..=u16::MAX).zip(got) {
                    let (want, got) = (of(bits), f32::from_bits(got));
                    let same = want.to_bits() == got.to_bits()
                        || want.is_nan() && got.is_nan() && (want.to_bits() ^ got.to_bits()) & !0x40_0000 == 0;
                    assert!(same, "{} {}: {bits:#x} is {got}, not {want}", arithmetic.name(), level.name());
                }
            }
        }
    }
}
