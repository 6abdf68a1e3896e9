//! Elementwise functions of the epilogues. Except for `exp_fused`, they use no fused multiply-adds, so every level
//! returns the same bits.

/// e^x with an error of about 2 ulp; saturates below e^-87.3 (at about 1e-38) and above e^88.
///
/// The teacher's kernels have a copy of this function; both must return the same bits.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Cody-Waite reduction: x = n ln 2 + r, e^x = 2^n e^r with a polynomial for |r| <= ln 2 / 2 (Cephes `expf`).
    const ROUND: f32 = 12_582_912.0;
    let x = x.clamp(-87.3, 88.0);
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * (355.0 / 512.0) + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 5.0e-1;
    let p = p * r * r + r + 1.0;
    // The low bits of `shifted` are n; a float-to-int conversion would not vectorise. p carries NaN through.
    f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23)) * p
}

/// e^x for x <= 0 with an error of 3 ulp; 1e-38 below e^-87.3. Uses fused multiply-adds, so only kernels that have them
/// call it.
#[inline(always)]
pub(crate) fn exp_fused(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0;
    let x = if x < -87.3 { -87.3 } else { x };
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(2.121_944_4e-4, n.mul_add(-355.0 / 512.0, x));
    let mut p = 1.398_199_9e-3f32;
    for c in [8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
        p = p.mul_add(r, c);
    }
    f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23)) * p
}

/// tanh x with an error of about 1e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp(2.0 * x))
}

/// x / (1 + e^-x).
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// GELU in the tanh approximation that GPT-2 was trained with.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    // 0.5 x (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    const TWICE: f32 = 2.0 * 0.797_884_6;
    let u = TWICE * (x + 0.044_715 * x * x * x);
    x / (1.0 + exp(-u))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -870_000..880_000 {
            let x = i as f32 * 1e-4;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 2.4e-7, "exp({x}) = {got}, not {want}");
        }
        for i in -870_000..=0 {
            let x = i as f32 * 1e-4;
            let (got, want) = (f64::from(exp_fused(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 3.6e-7, "exp({x}) = {got}, not {want}");
        }
        assert!(exp(f32::NAN).is_nan() && exp_fused(f32::NAN).is_nan() && exp_fused(f32::NEG_INFINITY) < 2e-38);
    }

    #[test]
    fn activations_equal_their_definitions() {
        for i in -2000..2000 {
            let x = f64::from(i) * 0.01;
            let silu_x = x / (1.0 + (-x).exp());
            let gelu_x = 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh());
            assert!((f64::from(silu(x as f32)) - silu_x).abs() < 1e-6 * (1.0 + x.abs()), "silu({x})");
            assert!((f64::from(gelu(x as f32)) - gelu_x).abs() < 2e-6 * (1.0 + x.abs()), "gelu({x})");
        }
    }
}
