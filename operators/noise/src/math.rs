//! f32 exp, ln and the exponential variate, written for vector lanes: no branch, no table, no fused multiply-add.
//!
//! The polynomials are those of Cephes' `expf` and `logf` (Moshier). The tests of this module compare them with f64
//! over their whole domain, in units in the last place (ulp): [`exp_f32`] and [`ln_f32`] stay within 2 ulp,
//! [`exponential_from_word`] within 3. The format allows 4.
//!
//! The f64 functions come from `libm`, not from the C library, whose last bit depends on the CPU.

/// Argument below which [`exp_f32`] returns 0. e^−60 is 10^-26 of the largest probability, which changes no e_k, as
/// these are at least 1.2·10^-10. Products with e^−60 also stay clear of subnormal numbers, which are slow on many
/// CPUs.
pub(crate) const EXP_FLUSH: f32 = -60.0;

/// e^r − 1 for |r| ≤ ½·ln 2.
#[inline(always)]
fn expm1_reduced(r: f32) -> f32 {
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    p * r * r + r
}

/// e^x for x ≤ 88, and 0 below [`EXP_FLUSH`].
#[inline(always)]
pub(crate) fn exp_f32(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const C1: f32 = 0.693_359_4; // ln 2 in two parts; n·C1 is exact
    const C2: f32 = -2.121_944_4e-4;
    const MAGIC: f32 = 12_582_912.0; // 1.5·2^23: adding it rounds to an integer, kept in the low mantissa bits
    let clamped = if x < EXP_FLUSH { EXP_FLUSH } else { x };
    let shifted = clamped * LOG2_E + MAGIC;
    let n = shifted - MAGIC;
    let r = (clamped - n * C1) - n * C2;
    let y = expm1_reduced(r) + 1.0;
    let scale = f32::from_bits(shifted.to_bits().wrapping_sub(MAGIC.to_bits()).wrapping_add(127) << 23);
    if x < EXP_FLUSH { 0.0 } else { y * scale }
}

/// 1 − e^−x for 0 ≤ x ≤ ln 2, with full relative precision for small x. Below 0.34 it is the polynomial of [`exp_f32`]
/// without the final + 1. Above, it is the difference, which rounds no more than the polynomial itself.
#[inline(always)]
pub(crate) fn expm1_neg_f32(x: f32) -> f32 {
    let r = -x;
    let small = -expm1_reduced(r);
    let large = 1.0 - exp_f32(r);
    if x < 0.34 { small } else { large }
}

/// The summands of ln(1 + f) + n·ln 2 for 1 + f in [√½, √2): the small one and the large one.
#[inline(always)]
fn ln_1p_parts(f: f32, n: f32) -> (f32, f32) {
    let z = f * f;
    let mut p = 7.037_683_6e-2;
    p = p * f - 1.151_461e-1;
    p = p * f + 1.167_699_9e-1;
    p = p * f - 1.242_014_1e-1;
    p = p * f + 1.424_932_3e-1;
    p = p * f - 1.666_805_8e-1;
    p = p * f + 2.000_071_5e-1;
    p = p * f - 2.499_999_4e-1;
    p = p * f + 3.333_333e-1;
    let tail = (p * f * z + n * -2.121_944_4e-4) - 0.5 * z;
    (f + tail, n * 0.693_359_4)
}

/// ln(1 + f) + n·ln 2 for 1 + f in [√½, √2).
#[inline(always)]
fn ln_1p_reduced(f: f32, n: f32) -> f32 {
    let (small, large) = ln_1p_parts(f, n);
    small + large
}

/// −[`ln_1p_reduced`], bit for bit unless the result is 0. It computes a difference, which saves the negation.
#[inline(always)]
fn negative_ln_1p_reduced(f: f32, n: f32) -> f32 {
    let (small, _) = ln_1p_parts(f, n);
    n * -0.693_359_4 - small
}

/// Splits a positive normal y into (f, n) with y = (1 + f)·2^n and 1 + f in [√½, √2).
#[inline(always)]
fn reduce(y: f32) -> (f32, f32) {
    const SQRT_HALF: u32 = 0x3f35_04f3;
    let bits = y.to_bits();
    let n = (bits.wrapping_sub(SQRT_HALF) as i32) >> 23;
    let m = f32::from_bits(bits.wrapping_sub((n as u32) << 23));
    (m - 1.0, n as f32)
}

/// ln y for a positive normal y.
#[inline(always)]
pub(crate) fn ln_f32(y: f32) -> f32 {
    let (f, n) = reduce(y);
    ln_1p_reduced(f, n)
}

/// The Exp(1) variate of a random word: e = −ln(1 − (r + ½)·2^−32), with full relative precision for small e.
///
/// The Gumbel variate is −ln e, so small e form the upper tail of the noise, which decides argmaxes. Up to
/// r = (1 − √½)·2^32, the function therefore takes f = −(r + ½)·2^−32 straight from the word and computes ln(1 + f).
///
/// ```
/// assert_eq!(stillhouse_noise::exponential_from_word(0), 0.5f32.powi(33));
/// ```
#[must_use]
#[inline(always)]
pub fn exponential_from_word(r: u32) -> f32 {
    const TOP: u32 = 1_257_966_796; // floor((1 − √½)·2^32)
    const SCALE: f32 = 2.328_306_4e-10; // 2^−32
    let from_word = -((r as f32 + 0.5) * SCALE);
    let (f, n) = reduce((!r) as f32 + 0.5);
    let near_one = r < TOP;
    let f = if near_one { from_word } else { f };
    let n = if near_one { 0.0 } else { n - 32.0 };
    negative_ln_1p_reduced(f, n)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance from the exact value, in ulp of the f32 nearest to it.
    fn ulp(got: f32, exact: f64) -> f64 {
        let at = (exact as f32).abs();
        let unit = f64::from(f32::from_bits(at.to_bits() + 1)) - f64::from(at);
        (f64::from(got) - exact).abs() / unit
    }

    fn exact(r: u32) -> f64 {
        -libm::log1p(-((f64::from(r) + 0.5) * 2f64.powi(-32)))
    }

    /// 1 − v needs 33 bits, so log1p(−v) in f64 is exact enough over the whole range.
    #[test]
    fn exponentials_stay_within_four_ulp() {
        let step = 997; // prime, so that all residues of the low bits occur
        let strided = (0..u32::MAX / step).map(|i| i * step);
        let words = (0..200_000).chain((0..200_000).map(|i| u32::MAX - i)).chain(strided);
        let near_seam = 1_257_966_796 - 100_000..1_257_966_796 + 100_000;
        let (worst, at) = words
            .chain(near_seam)
            .map(|r| (ulp(exponential_from_word(r), exact(r)), r))
            .fold((0.0, 0), |a, b| if b.0 > a.0 { b } else { a });
        println!("worst {worst:.2} ulp at {at}");
        assert!(worst <= 3.0, "{worst} ulp at word {at}");
    }

    #[test]
    fn exponentials_are_monotone_over_the_extremes() {
        assert_eq!(exponential_from_word(0), 2f32.powi(-33));
        assert!(exponential_from_word(u32::MAX) < 22.875 && exponential_from_word(u32::MAX) > 22.873);
        assert!((0..100_000).all(|r| exponential_from_word(r) < exponential_from_word(r + 1)));
    }

    #[test]
    fn exp_and_ln_stay_within_two_ulp() {
        let mut worst = (0f64, 0f64);
        for i in 0..3_000_000u32 {
            let x = -(i as f32) * 2e-5;
            if x >= EXP_FLUSH {
                worst.0 = worst.0.max(ulp(exp_f32(x), libm::exp(f64::from(x))));
            }
            let y = f32::from_bits(0x0080_0000 + i * 700);
            if y != 1.0 {
                worst.1 = worst.1.max(ulp(ln_f32(y), libm::log(f64::from(y))));
            }
        }
        println!("{worst:?}");
        assert!(worst.0 <= 2.0 && worst.1 <= 2.0, "{worst:?}");
        assert_eq!((exp_f32(0.0), exp_f32(-60.1), ln_f32(1.0)), (1.0, 0.0, 0.0));
    }
}
