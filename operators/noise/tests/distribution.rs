//! Tests, with fixed seeds, the two properties that every implementation must have (METHODS.md, section 2).

mod common;

use stillhouse_noise::{
    DrawKey, NoiseStream, Softmax, dense_noise, exponentials, keyed_uniforms, sample_sequential, sequential_noise,
};

/// Kolmogorov–Smirnov statistic √n·D against a distribution function. Its 0.1 % critical value is 1.95.
fn kolmogorov_smirnov(values: &mut [f64], cdf: impl Fn(f64) -> f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len() as f64;
    let mut d = 0f64;
    for (i, &v) in values.iter().enumerate() {
        let f = cdf(v);
        d = d.max((f - i as f64 / n).abs()).max(((i + 1) as f64 / n - f).abs());
    }
    d * n.sqrt()
}

fn gumbel(xi: f64) -> f64 {
    (-(-xi).exp()).exp()
}

#[test]
fn posterior_noise_is_gumbel_and_chooses_the_observed_token() {
    let vocab = 11;
    let rows = 40_000u32;
    let mut uniforms = keyed_uniforms(21, "test-posterior", 0, 0);
    let mut softmax = Softmax::new(vocab).unwrap();
    let (mut pooled, mut at_x, mut elsewhere, mut fixed) = (vec![], vec![], vec![], vec![vec![]; vocab]);
    let mut noise = vec![0f32; vocab];
    for row in 0..rows {
        let logits: Vec<f32> = (0..vocab).map(|_| uniforms.next_f64() as f32 * 6.0).collect();
        // x comes from independent randomness, like real text.
        let x = common::sample(&logits, uniforms.next_f64()) as usize;
        let stream = NoiseStream::new(DrawKey::new(5, 0), u64::from(row / 1000), row % 1000);
        dense_noise(&mut softmax, &logits, x as u32, &stream, &mut noise).unwrap();
        let best = (0..vocab).max_by(|&a, &b| (logits[a] + noise[a]).total_cmp(&(logits[b] + noise[b]))).unwrap();
        assert_eq!(best, x, "row {row}");
        pooled.extend(noise.iter().map(|&v| f64::from(v)));
        at_x.push(f64::from(noise[x]));
        let other = (x + 1 + uniforms.below(vocab as u32 - 1) as usize) % vocab;
        elsewhere.push(f64::from(noise[other]));
        for k in 0..vocab {
            fixed[k].push(f64::from(noise[k]));
        }
    }
    let pooled = kolmogorov_smirnov(&mut pooled, gumbel);
    assert!(pooled < 1.95, "pooled: {pooled}");
    for (k, values) in fixed.iter_mut().enumerate() {
        let statistic = kolmogorov_smirnov(values, gumbel);
        assert!(statistic < 2.2, "xi[{k}]: {statistic}"); // the 0.1 % critical value for eleven tests
    }
    // Conditioned on whether the token was observed, the noise must not be Gumbel: this is the information for the
    // student.
    assert!(kolmogorov_smirnov(&mut at_x, gumbel) > 20.0);
    assert!(kolmogorov_smirnov(&mut elsewhere, gumbel) > 5.0);
}

/// Given x, l_x + ξ_x − ln Σ exp(l) = −ln e_0 is Gumbel for every x: the maximum is independent of its index.
#[test]
fn the_observed_tokens_score_is_gumbel() {
    let logits = [3.0f32, 1.0, 0.0, -40.0];
    let mut softmax = Softmax::new(4).unwrap();
    for x in 0..4u32 {
        let mut scores: Vec<f64> = (0..10_000)
            .map(|position| {
                let stream = NoiseStream::new(DrawKey::new(6, x), 0, position);
                let mut noise = [0f32; 4];
                let row = dense_noise(&mut softmax, &logits, x, &stream, &mut noise).unwrap();
                let scores: Vec<f32> = logits.iter().zip(noise).map(|(l, n)| l + n).collect();
                assert!(scores.iter().all(|&s| s <= scores[x as usize]));
                f64::from(scores[x as usize] - row.logsumexp)
            })
            .collect();
        let statistic = kolmogorov_smirnov(&mut scores, gumbel);
        assert!(statistic < 1.95, "x = {x}: {statistic}");
    }
}

#[test]
fn the_observed_token_wins_however_unlikely() {
    for shape in 0..8 {
        for seed in 0..20u64 {
            let logits = common::shaped_logits(777, seed, shape);
            let stream = NoiseStream::new(DrawKey::new(seed, shape), 3, 9);
            let x = (seed * 31) as usize % 777;
            let mut noise = vec![0f32; 777];
            dense_noise(&mut Softmax::new(777).unwrap(), &logits, x as u32, &stream, &mut noise).unwrap();
            let score = |k: usize| f64::from(logits[k]) + f64::from(noise[k]);
            assert!(noise.iter().all(|n| n.is_finite()));
            // f32 rounding of a noise value of 1,000 is 6e-5.
            let slack = 1e-6 + 2.0 * f64::from(f32::EPSILON) * f64::from(noise[x].abs());
            assert!((0..777).all(|k| score(k) <= score(x) + slack), "shape {shape}, seed {seed}");
        }
    }
}

/// Small e are the upper Gumbel tail: conditioned on e < t, e/t must still be uniform (to first order in t).
#[test]
fn tails_keep_their_precision() {
    let vocab = 1 << 16;
    let mut e = vec![0f32; vocab];
    let (mut tail, mut count) = (vec![], 0usize);
    let t = 2f64.powi(-10);
    for position in 0..200 {
        exponentials(&NoiseStream::new(DrawKey::new(8, 0), 1, position), &mut e);
        count += vocab;
        tail.extend(e.iter().map(|&v| f64::from(v)).filter(|&v| v < t).map(|v| (-v).exp_m1() / (-t).exp_m1()));
    }
    let expected = -(-t).exp_m1() * count as f64;
    assert!((tail.len() as f64 - expected).abs() < 4.0 * expected.sqrt(), "{} of {expected}", tail.len());
    assert!(tail.iter().copied().fold(1.0, f64::min) < 1e-3);
    let statistic = kolmogorov_smirnov(&mut tail, |v| v);
    assert!(statistic < 1.95, "{statistic}");
}

#[test]
fn exponentials_are_exponential_and_uncorrelated() {
    let vocab = 50_257;
    let (mut a, mut b) = (vec![0f32; vocab], vec![0f32; vocab]);
    let mut auxiliary = vec![];
    for position in 0..2000 {
        auxiliary.push(f64::from(NoiseStream::new(DrawKey::new(9, 0), 0, position).auxiliary_exponential()));
    }
    let cdf = |v: f64| -(-v).exp_m1();
    assert!(kolmogorov_smirnov(&mut auxiliary, cdf) < 1.95);
    let base = NoiseStream::new(DrawKey::new(9, 0), 0, 0);
    exponentials(&base, &mut a);
    let others = [
        NoiseStream { key: DrawKey::new(9, 1), ..base },
        NoiseStream { sequence_id: 1 << 32, ..base },
        NoiseStream { sequence_id: 1, ..base },
        NoiseStream { position: 1, ..base },
    ];
    for other in others {
        exponentials(&other, &mut b);
        let products = a.iter().zip(&b).map(|(&p, &q)| (f64::from(p) - 1.0) * (f64::from(q) - 1.0));
        let correlation = products.sum::<f64>() / vocab as f64;
        assert!(correlation.abs() < 4.0 / (vocab as f64).sqrt(), "{other:?}: {correlation}");
    }
    let mut all: Vec<f64> = a.iter().map(|&v| f64::from(v)).collect();
    assert!(kolmogorov_smirnov(&mut all, cdf) < 1.95);
}

#[test]
fn sequential_text_follows_the_teacher() {
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let logp = common::log_softmax(&logits);
    let mut counts = [0f64; 4];
    let mut noise = [0f32; 4];
    let n = 40_000;
    for position in 0..n {
        let stream = NoiseStream::new(DrawKey::new(10, 0), 0, position);
        counts[sample_sequential(&logits, &stream, &mut noise).unwrap() as usize] += 1.0;
        let mut again = [0f32; 4];
        sequential_noise(&stream, &mut again);
        assert_eq!(noise, again);
    }
    let chi2: f64 =
        (0..4).map(|k| (counts[k] / f64::from(n) - logp[k].exp()).powi(2) * f64::from(n) / logp[k].exp()).sum();
    assert!(chi2 < 16.3, "{counts:?}"); // p = 0.001 at three degrees of freedom
}
