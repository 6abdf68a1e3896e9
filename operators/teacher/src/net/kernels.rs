//! Kernels of a layer other than matrix products and attention: f32, vectorised, in a fixed order.
//!
//! Every sum runs over sixteen lanes in a fixed order, without fused multiply-adds. Neither the machine's vector width
//! nor the number of threads changes a bit. Each kernel is dispatched to the best available instruction set.
//!
//! | kernel | in | out | per element |
//! |---|---|---|---|
//! | [`rms_norm`], [`layer_norm`] | a row `[H]` | `[H]` | two and three passes |
//! | [`geglu`] | `[n, 2I]` gate ‖ up | `[n, I]` | one exponential |
//! | [`gelu`] | `[n, I]` | the same, in place | one exponential |
//! | [`soft_cap`] | logits | the same, in place | one exponential |

const LANES: usize = 16;

/// e^x with an error of about 2 ulp; saturates below e^-87.3 (at about 1e-38) and above e^88.
#[inline(always)]
fn exp(x: f32) -> f32 {
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

/// tanh x with an error of about 1e-7.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exp(2.0 * x))
}

/// GELU in the tanh approximation: x (1 + tanh u) / 2 with u = sqrt(2/pi) (x + 0.044715 x^3).
#[inline(always)]
fn gelu_tanh_of(x: f32) -> f32 {
    const TWICE: f32 = 2.0 * 0.797_884_6;
    x / (1.0 + exp(-(TWICE * (x + 0.044_715 * x * x * x))))
}

/// Exact GELU, x Φ(x), with an error function accurate to 1.5e-7 (Abramowitz and Stegun 7.1.26).
#[inline(always)]
fn gelu_of(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.327_591_1 * z);
    let mut p = 1.061_405_4f32;
    p = p * t - 1.453_152_1;
    p = p * t + 1.421_413_8;
    p = p * t - 0.284_496_72;
    p = p * t + 0.254_829_6;
    let tail = 0.5 * p * t * exp(-z * z);
    x * if x > 0.0 { 1.0 - tail } else { tail }
}

#[inline(always)]
fn fold(xs: &[f32], start: f32, f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut lanes = [start; LANES];
    let chunks = xs.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *lane = f(*lane, *x);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = f(*lane, *x);
    }
    lanes
}

#[inline(always)]
fn sum(xs: &[f32]) -> f32 {
    fold(xs, 0.0, |a, b| a + b).iter().sum()
}

#[inline(always)]
fn rms_scale(x: &[f32], eps: f32) -> f32 {
    let squares: f32 = fold(x, 0.0, |a, b| a + b * b).iter().sum();
    1.0 / (squares / x.len() as f32 + eps).sqrt()
}

/// Computes `x / rms(x) · weight` for every row of `[n, H]`.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                let scale = rms_scale(x, eps);
                for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
                    *out = *x * scale * *w;
                }
            }
        },
    );
}

/// The in-place form of [`rms_norm`].
pub(crate) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let width = weight.len();
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for x in x.chunks_exact_mut(width) {
                let scale = rms_scale(x, eps);
                x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * *w);
            }
        },
    );
}

/// Computes `(x - mean(x)) / sd(x) · weight + bias` for every row of `[n, H]`.
pub(crate) fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
                let mean = sum(x) / width as f32;
                let squares: f32 = fold(x, 0.0, |a, b| a + (b - mean) * (b - mean)).iter().sum();
                let scale = 1.0 / (squares / width as f32 + eps).sqrt();
                for (((out, x), w), b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
                    *out = (*x - mean) * scale * *w + *b;
                }
            }
        },
    );
}

/// Computes `gelu(gate) ⊙ up` for rows gate ‖ up, in the tanh approximation.
pub(crate) fn geglu(src: &[f32], dst: &mut [f32], width: usize) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            for (src, dst) in src.chunks_exact(2 * width).zip(dst.chunks_exact_mut(width)) {
                let (gate, up) = src.split_at(width);
                for ((d, g), u) in dst.iter_mut().zip(gate).zip(up) {
                    *d = gelu_tanh_of(*g) * *u;
                }
            }
        },
    );
}

/// Exact GELU, in place.
pub(crate) fn gelu(x: &mut [f32]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x = gelu_of(*x)),
    );
}

/// Computes `cap · tanh(x / cap)` in place.
pub(crate) fn soft_cap(x: &mut [f32], cap: f32) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || x.iter_mut().for_each(|x| *x = cap * tanh(*x / cap)),
    );
}

/// Computes `x += y`.
pub(crate) fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += *y);
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
    }

    #[test]
    fn activations_are_those_of_their_definitions() {
        for i in -12_000..12_000 {
            let x = i as f32 * 1e-3;
            let wide = f64::from(x);
            let off = |got: f32, want: f64| (f64::from(got) - want).abs();
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide.powi(3));
            assert!(off(gelu_tanh_of(x), 0.5 * wide * (1.0 + u.tanh())) < 2e-6, "gelu_tanh({x})");
            let erf = libm_erf(wide / std::f64::consts::SQRT_2);
            assert!(off(gelu_of(x), 0.5 * wide * (1.0 + erf)) < 2e-6, "gelu({x})");
            assert!(off(tanh(x), wide.tanh()) < 3e-7, "tanh({x})");
        }
    }

    /// The error function, by its series, or by its continued fraction for |x| > 3.
    fn libm_erf(x: f64) -> f64 {
        if x.abs() > 3.0 {
            let (z, mut fraction) = (x.abs(), 0.0);
            for k in (1..60).rev() {
                fraction = f64::from(k) / 2.0 / (z + fraction);
            }
            return x.signum() * (1.0 - (-z * z).exp() / std::f64::consts::PI.sqrt() / (z + fraction));
        }
        let (mut term, mut total) = (x, x);
        for n in 1..80 {
            term *= -x * x / f64::from(n);
            total += term / f64::from(2 * n + 1);
        }
        2.0 / std::f64::consts::PI.sqrt() * total
    }

    #[test]
    fn norms_are_those_of_their_definitions() {
        let x: Vec<f32> = (0..2 * 37).map(|i| (i as f32 * 0.7).sin() * 3.0 + 0.5).collect();
        let weight: Vec<f32> = (0..37).map(|i| 1.0 + i as f32 * 0.01).collect();
        let bias: Vec<f32> = (0..37).map(|i| i as f32 * 0.1).collect();
        let (mut rms, mut layer) = (vec![f32::NAN; x.len()], vec![f32::NAN; x.len()]);
        rms_norm(&x, &weight, 1e-3, &mut rms);
        layer_norm(&x, &weight, &bias, 1e-3, &mut layer);
        for row in 0..2 {
            let of = |i: usize| f64::from(x[row * 37 + i]);
            let mean = (0..37).map(of).sum::<f64>() / 37.0;
            let square = (0..37).map(|i| of(i).powi(2)).sum::<f64>() / 37.0;
            for i in 0..37 {
                let (w, b) = (f64::from(weight[i]), f64::from(bias[i]));
                let want = of(i) / (square + 1e-3).sqrt() * w;
                assert!((f64::from(rms[row * 37 + i]) - want).abs() < 1e-5);
                let want = (of(i) - mean) / (square - mean * mean + 1e-3).sqrt() * w + b;
                assert!((f64::from(layer[row * 37 + i]) - want).abs() < 1e-5);
            }
        }
    }
}
