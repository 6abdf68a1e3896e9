//! Gaussian noise from Gumbel noise: the standard normal quantile of the Gumbel CDF, z = Φ⁻¹(exp(−E)), ξ = −ln E.
//!
//! ```text
//! t = min(u, 1 − u),  u = exp(−E)        w = −ln(4·t·(1 − t))        |z| = (1 − 2t)·P(w)   for w < 5, Q(√w) above
//! ```
//!
//! Where u > ½, the code computes t as 1 − exp(−E) without a subtraction, so both tails keep their full precision: u
//! itself rounds to 1 for the largest ξ, which matter most. P and Q are least-squares fits with relative errors of 1e-7
//! and 4e-7 over E ≤ 46, twice the largest Exp(1) variate of a word. They have the form of Giles 2012 ("Approximating
//! the erfinv function").
//!
//! The ξ_x of an unlikely token has no bound, so [`normal_of_gumbel`] computes that single value in f64 by Newton
//! steps.

use crate::math::{exp_f32, expm1_neg_f32, ln_f32};

/// Largest E of the fit. No valid noise exceeds it.
const E_MAX: f32 = 48.0;

/// z of one E > 0 in vector lanes, within 3e-6 (relative to max(1, |z|)) of the exact value for E in [1e-10, 46].
#[inline(always)]
pub(crate) fn normal_f32(e: f32) -> f32 {
    const LN_2: f32 = std::f32::consts::LN_2;
    let e = if e > E_MAX { E_MAX } else { e };
    let upper = e < LN_2;
    let t = if upper { expm1_neg_f32(e) } else { exp_f32(-e) };
    let w = -ln_f32(4.0 * t * (1.0 - t));

    let c = w - 2.5;
    let mut p = 4.062_166_4e-8;
    p = p * c + 4.865_694_3e-7;
    p = p * c - 4.993_258_7e-6;
    p = p * c - 6.222_303_5e-6;
    p = p * c + 3.091_582e-4;
    p = p * c - 1.772_999e-3;
    p = p * c - 5.908_177_7e-3;
    p = p * c + 3.488_026_6e-1;
    p = p * c + 2.123_313_7;

    let w = if w < 0.0 { 0.0 } else { w };
    let s = w.sqrt() - 4.5;
    let mut q = TAIL_COEFFICIENTS[0];
    for &a in &TAIL_COEFFICIENTS[1..] {
        q = q * s + a;
    }

    let z = if w < 5.0 { p * (1.0 - 2.0 * t) } else { q };
    if upper { z } else { -z }
}

const TAIL_COEFFICIENTS: [f32; 10] = [
    2.938_392_4e-7,
    -2.472_087_6e-7,
    -5.981_963_6e-6,
    1.975_779_2e-5,
    -4.788_731e-5,
    1.947_344_7e-4,
    -6.187_989e-4,
    4.726_1e-4,
    1.428_689_1,
    6.144_408_7,
];

/// z of any finite ξ, in f64.
pub(crate) fn normal_of_gumbel(xi: f64) -> f64 {
    let e = libm::exp(-xi);
    let upper = e < std::f64::consts::LN_2;
    // tail = L = −ln t, with t ≤ ½. For large ξ, 1 − exp(−E) equals E to the last bit, even where E underflows.
    let tail = if !upper {
        e
    } else if xi > 40.0 {
        xi
    } else {
        -libm::log(-libm::expm1(-e))
    };
    let z = upper_quantile(tail);
    if upper { z } else { -z }
}

/// Solves −ln(1 − Φ(z)) = l for z ≥ 0 and l ≥ ln 2, by Newton's method on F(z) = −ln(1 − Φ(z)), which is convex.
fn upper_quantile(l: f64) -> f64 {
    const SQRT_2: f64 = std::f64::consts::SQRT_2;
    let ln_sqrt_tau = 0.5 * libm::log(std::f64::consts::TAU);
    let mut z = libm::sqrt(2.0 * (l - std::f64::consts::LN_2).max(0.0)); // starts above z: 1 − Φ(z) ≤ ½·exp(−z²/2)
    for _ in 0..60 {
        // Mills' ratio (1 − Φ)/φ, from erfc where erfc is a normal number, else by the continued fraction
        // z + 1/(z + 2/(z + 3/…)).
        let half_square = 0.5 * z * z;
        let mills = if z < 8.0 {
            0.5 * libm::erfc(z / SQRT_2) * libm::exp(half_square + ln_sqrt_tau)
        } else {
            1.0 / (1..=30).rev().fold(z, |below, n| z + f64::from(n) / below)
        };
        let f = half_square + ln_sqrt_tau - libm::log(mills);
        let next = (z - (f - l) * mills).max(0.0);
        if (next - z).abs() <= 1e-13 * next.max(1.0) {
            return next;
        }
        z = next;
    }
    z
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_quantiles() {
        // ξ = −ln(−ln u); z = Φ⁻¹(u)
        for (u, z) in [(0.5, 0.0), (0.975, 1.959_963_984_540_054), (0.01, -2.326_347_874_040_841)] {
            let xi = -libm::log(-libm::log(u));
            assert!((normal_of_gumbel(xi) - z).abs() < 1e-12, "{u}: {}", normal_of_gumbel(xi));
        }
        // Tail: 1 − u = e^−ξ. Checks Φ⁻¹ at 1 − 1e-20 and at 1 − 1e-300.
        assert!((normal_of_gumbel(20.0 * 10f64.ln()) - 9.262_340_089_798_408).abs() < 1e-12);
        assert!((normal_of_gumbel(300.0 * 10f64.ln()) - 37.047_096_299_361_2).abs() < 1e-10);
        for xi in [1e3, 1e5, 1e30] {
            let z = normal_of_gumbel(xi);
            assert!(z.is_finite() && (z / libm::sqrt(2.0 * xi) - 1.0).abs() < 0.01, "{xi}: {z}");
        }
    }

    #[test]
    fn vector_form_agrees_with_newton_over_the_domain() {
        let mut worst = (0f64, 0f32);
        for i in 0..400_000u32 {
            let e = (1.1e-10f64 * libm::exp(f64::from(i) * (libm::log(46.0 / 1.1e-10) / 400_000.0))) as f32;
            let exact = normal_of_gumbel(-libm::log(f64::from(e)));
            let error = (f64::from(normal_f32(e)) - exact).abs() / exact.abs().max(1.0);
            if error > worst.0 {
                worst = (error, e);
            }
        }
        println!("worst {worst:?}");
        assert!(worst.0 < 3e-6, "{worst:?}");
        assert!(normal_f32(1e30).is_finite());
    }
}
