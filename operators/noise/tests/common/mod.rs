//! Helpers of the test binaries: an f64 posterior written from docs/FORMAT.md, and rows of logits.
#![allow(dead_code)] // each binary uses some of them

use stillhouse_noise::{Correction, NoiseStream, keyed_uniforms};

/// e = −ln(1 − (r + ½)·2^−32) in f64.
pub fn exact_exponential(word: u32) -> f64 {
    -(-((f64::from(word) + 0.5) * 2f64.powi(-32))).ln_1p()
}

pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::MIN, f32::max) as f64;
    let ln_z = logits.iter().map(|&l| (l as f64 - max).exp()).sum::<f64>().ln();
    logits.iter().map(|&l| l as f64 - max - ln_z).collect()
}

/// −ξ = ln E from log-probabilities `logp`; `logprob_x` replaces that of x.
pub fn ln_totals(logp: impl Fn(usize) -> f64, vocab: usize, x: usize, logprob_x: f64, s: &NoiseStream) -> Vec<f64> {
    let e0 = exact_exponential(s.auxiliary_word());
    let total = |k: usize| {
        if k == x { logprob_x + e0.ln() } else { (exact_exponential(s.word(k as u32)) + logp(k).exp() * e0).ln() }
    };
    (0..vocab).map(total).collect()
}

/// softmax(ξ) from ln E, stable for any range.
pub fn softmax_of(ln_totals: &[f64]) -> Vec<f64> {
    let min = ln_totals.iter().copied().fold(f64::INFINITY, f64::min);
    let weights: Vec<f64> = ln_totals.iter().map(|l| (min - l).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// The total variation that the guarantee bounds, from the formulas of docs/FORMAT.md alone.
pub fn total_variation(logits: &[f32], x: u32, logprob: f32, corrections: &[Correction], s: &NoiseStream) -> f64 {
    let logp = log_softmax(logits);
    let x = x as usize;
    let exact = softmax_of(&ln_totals(|k| logp[k], logits.len(), x, logp[x], s));
    let mut stored = vec![f64::NEG_INFINITY; logits.len()];
    for c in corrections {
        let sum: &mut f64 = &mut stored[c.index as usize];
        *sum = (sum.exp() + f64::from(c.logprob).exp()).ln();
    }
    let decoded = softmax_of(&ln_totals(|k| stored[k], logits.len(), x, f64::from(logprob), s));
    exact.iter().zip(&decoded).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0
}

/// Zipf-like logits: a few likely tokens and a long tail, in random order.
pub fn zipf_logits(vocab: usize, row: u64, sharpness: f64) -> Vec<f32> {
    let mut uniforms = keyed_uniforms(5, "test-logits", row, 0);
    let mut ranks: Vec<u32> = (0..vocab as u32).collect();
    uniforms.shuffle(&mut ranks);
    let logit = |rank: &u32| (-sharpness * (f64::from(*rank) + 1.0).ln() + 2.0 * uniforms.next_f64()) as f32;
    ranks.iter().map(logit).collect()
}

/// Logits of one of ten shapes: flat, peaked, huge range, ties, large offset, one certain token, excluded tokens and
/// more.
pub fn shaped_logits(vocab: usize, seed: u64, shape: u32) -> Vec<f32> {
    let mut u = keyed_uniforms(seed, "test-shape", 0, shape);
    (0..vocab)
        .map(|k| {
            let v = u.next_f64();
            (match shape {
                0 => 0.0,                                           // flat
                1 => v * 4.0,                                       // mild
                2 => v.powi(40) * 30.0,                             // peaked
                3 => v * 2000.0 - 1000.0,                           // huge range: p underflows
                4 => (v * 4.0).floor(),                             // ties
                5 => v * 10.0 - 110.0,                              // GPT-2's offset
                6 => -(v.max(1e-12).ln()).abs() * 3.0,              // exponential tail
                8 if k == vocab / 2 => 20.72 + (vocab as f64).ln(), // p = 1 − 10^-9
                8 => v,
                9 if v < 0.5 && k > 0 => f64::from(f32::MIN), // practically −∞
                9 => v * 5.0,
                _ => {
                    if v < 0.02 {
                        12.0 + v * 100.0
                    } else {
                        v
                    }
                } // a few heavy ones
            }) as f32
        })
        .collect()
}

/// A sample of softmax(logits) from one uniform.
pub fn sample(logits: &[f32], uniform: f64) -> u32 {
    let mut rest = uniform;
    let logp = log_softmax(logits);
    for (k, l) in logp.iter().enumerate() {
        rest -= l.exp();
        if rest < 0.0 {
            return k as u32;
        }
    }
    logits.len() as u32 - 1
}
