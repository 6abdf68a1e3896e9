//! The codec's guarantee, checked by an f64 implementation that shares no code with the encoder, and its size.

mod common;

use proptest::prelude::*;
use stillhouse_noise::{
    Correction, DrawKey, Encoder, NoiseError, NoiseStream, Tolerance, ValueType, total_variation_of,
};

fn config(cases: u32) -> ProptestConfig {
    // Fixed seed: a failure of CI is a failure here.
    ProptestConfig {
        cases,
        failure_persistence: None,
        rng_seed: prop::test_runner::RngSeed::Fixed(7),
        ..Default::default()
    }
}

proptest! {
    #![proptest_config(config(600))]

    #[test]
    fn decoded_noise_is_within_tolerance(
        vocab in prop_oneof![2usize..20, 20usize..600, 600usize..5000],
        seed: u64, draw in 0u32..4, sequence_id: u64, position: u32, shape in 0u32..8,
        exponent in 2.0f64..4.0, pick in 0.0f64..1.0, likely: bool, wide: bool,
    ) {
        let logits = common::shaped_logits(vocab, seed, shape);
        let x = if likely { common::sample(&logits, pick) } else { (pick * vocab as f64) as u32 };
        let stream = NoiseStream::new(DrawKey::new(seed, draw), sequence_id, position);
        let tolerance = 10f64.powf(-exponent);
        let value_type = if wide { ValueType::F32 } else { ValueType::F16 };
        let mut encoder = Encoder::new(vocab, Tolerance::new(tolerance).unwrap(), value_type).unwrap();
        let mut corrections = Vec::new();
        match encoder.encode(&logits, x, &stream, &mut corrections) {
            Ok(encoded) => {
                let tv = common::total_variation(&logits, x, encoded.logprob, &corrections, &stream);
                prop_assert!(tv <= tolerance, "TV {} over {}", tv, tolerance);
                prop_assert!((tv - encoded.total_variation).abs() <= 2e-6, "TV {}, said {}", tv, encoded.total_variation);
                prop_assert!(corrections.windows(2).all(|c| c[0].index < c[1].index));
                prop_assert!(corrections.iter().all(|c| c.index != x && c.logprob == value_type.round(f64::from(c.logprob))));
                let stored = stillhouse_noise::StoredToken { token: x, logprob: encoded.logprob, corrections: &corrections };
                let judged = total_variation_of(&logits, &stored, &stream).unwrap();
                prop_assert!((judged - tv).abs() < 1e-9);
            }
            Err(NoiseError::ToleranceUnreachable { reached, .. }) => {
                // 16 bits leave up to 0.2 % in the weight of a token above e^-16, 0.4 % below it
                prop_assert!(!wide && tolerance < 2e-3 && reached < 4e-3, "{} unreachable: {}", tolerance, reached);
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}

/// How often 16 bits do not reach the default tolerance on language-like rows.
#[test]
fn default_tolerance_is_reachable_in_16_bits() {
    let vocab = 3000;
    let mut encoder = Encoder::new(vocab, Tolerance::default(), ValueType::F16).unwrap();
    let mut failed = 0;
    for row in 0..40u64 {
        let logits = common::zipf_logits(vocab, row, 0.8 + 0.03 * row as f64);
        for draw in 0..100 {
            let stream = NoiseStream::new(DrawKey::new(4, draw), row, 1);
            let x = common::sample(&logits, f64::from(draw) / 100.0);
            failed += usize::from(encoder.encode(&logits, x, &stream, &mut Vec::new()).is_err());
        }
    }
    assert_eq!(failed, 0, "of 4,000");
}

/// Corrections needed when they are the m most likely tokens instead (the top-k habit).
fn most_likely_needed(logits: &[f32], x: u32, logprob: f32, stream: &NoiseStream, tolerance: f64) -> usize {
    let logp = common::log_softmax(logits);
    let mut order: Vec<u32> = (0..logits.len() as u32).filter(|&k| k != x).collect();
    order.sort_by(|&a, &b| logp[b as usize].total_cmp(&logp[a as usize]));
    let all: Vec<Correction> =
        order.iter().map(|&index| Correction { index, logprob: ValueType::F32.round(logp[index as usize]) }).collect();
    let meets = |m: usize| common::total_variation(logits, x, logprob, &all[..m], stream) <= tolerance;
    let (mut low, mut high) = (0, all.len());
    while low < high {
        let middle = (low + high) / 2;
        if meets(middle) { high = middle } else { low = middle + 1 }
    }
    low
}

#[test]
fn far_fewer_corrections_than_the_most_likely_tokens() {
    let vocab = 2000;
    let mut encoder = Encoder::new(vocab, Tolerance::new(1e-3).unwrap(), ValueType::F32).unwrap();
    let (mut ours, mut habit, mut rows) = (0usize, 0usize, 0usize);
    for row in 0..60u64 {
        let logits = common::zipf_logits(vocab, row, 1.3);
        let stream = NoiseStream::new(DrawKey::new(11, 0), row, 0);
        let x = common::sample(&logits, row as f64 / 60.0);
        let mut corrections = Vec::new();
        let encoded = encoder.encode(&logits, x, &stream, &mut corrections).unwrap();
        ours += corrections.len();
        habit += most_likely_needed(&logits, x, encoded.logprob, &stream, 1e-3);
        rows += 1;
    }
    println!("mean corrections: {:.2}, by p {:.2}", ours as f64 / rows as f64, habit as f64 / rows as f64);
    assert!(habit > 10 * ours, "{ours} against {habit}");
}

/// No single correction of the set found could be left out.
#[test]
fn no_correction_is_idle() {
    let (vocab, tolerance) = (1000, 1e-3);
    let mut encoder = Encoder::new(vocab, Tolerance::new(tolerance).unwrap(), ValueType::F16).unwrap();
    let (mut idle, mut total) = (0, 0);
    for row in 0..200u64 {
        let logits = common::zipf_logits(vocab, row, 0.9);
        let stream = NoiseStream::new(DrawKey::new(12, 0), row, 0);
        let x = common::sample(&logits, row as f64 / 200.0);
        let mut corrections = Vec::new();
        let encoded = encoder.encode(&logits, x, &stream, &mut corrections).unwrap();
        for skip in 0..corrections.len() {
            let mut fewer = corrections.clone();
            fewer.remove(skip);
            total += 1;
            // below the encoder's own margin
            idle += usize::from(
                common::total_variation(&logits, x, encoded.logprob, &fewer, &stream) <= tolerance * 0.999 - 3e-6,
            );
        }
    }
    println!("{idle} of {total} corrections could be left out alone");
    assert!(idle * 50 <= total, "{idle} of {total}");
}

/// Decoded by a reader whose exponentials are four ulp off, in the worst direction for each entry.
#[test]
fn readers_four_ulp_away_stay_within_tolerance() {
    let (vocab, tolerance) = (1500, 1e-4);
    let mut encoder = Encoder::new(vocab, Tolerance::new(tolerance).unwrap(), ValueType::F32).unwrap();
    for row in 0..40u64 {
        let logits = common::zipf_logits(vocab, row, 1.0);
        let stream = NoiseStream::new(DrawKey::new(13, 0), row, 0);
        let x = common::sample(&logits, row as f64 / 40.0);
        let mut corrections = Vec::new();
        let encoded = encoder.encode(&logits, x, &stream, &mut corrections).unwrap();
        let logp = common::log_softmax(&logits);
        let exact = common::softmax_of(&common::ln_totals(|k| logp[k], vocab, x as usize, logp[x as usize], &stream));
        let mut stored = vec![f64::NEG_INFINITY; vocab];
        corrections.iter().for_each(|c| stored[c.index as usize] = f64::from(c.logprob));
        let mut ln_totals = common::ln_totals(|k| stored[k], vocab, x as usize, f64::from(encoded.logprob), &stream);
        let decoded = common::softmax_of(&ln_totals);
        for k in 0..vocab {
            let worse = if decoded[k] > exact[k] { -1.0 } else { 1.0 };
            ln_totals[k] += worse * 4.0 * 2f64.powi(-24);
        }
        let off = common::softmax_of(&ln_totals);
        let tv = exact.iter().zip(&off).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0;
        assert!(tv <= tolerance, "{tv}");
    }
}
