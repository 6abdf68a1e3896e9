//! Checks the codec's guarantee with an f64 implementation that shares no code with the encoder, and the number of
//! corrections.

mod common;

use proptest::prelude::*;
use stillhouse_noise::{
    Correction, DrawKey, Encoder, NoiseStream, StoredToken, Tolerance, ValueType, exponentials, total_variation_of,
};

fn config(cases: u32) -> ProptestConfig {
    // Fixed seed, so that a failure in CI also occurs locally.
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
                prop_assert!(in_order(&corrections), "{:?}", corrections);
                prop_assert!(corrections.iter().all(|c| c.index != x && c.logprob == value_type.round(f64::from(c.logprob))));
                let stored = stillhouse_noise::StoredToken { token: x, logprob: encoded.logprob, corrections: &corrections };
                let accuracy = total_variation_of(&logits, &stored, &stream).unwrap();
                prop_assert!((accuracy - tv).abs() < 1e-9);
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }
}

/// Whether indices ascend and the values of one index descend.
fn in_order(corrections: &[Correction]) -> bool {
    corrections.is_sorted_by(|a, b| a.index < b.index || (a.index == b.index && a.logprob >= b.logprob))
}

/// For language-like rows at three tolerances, no token fails, and few tokens need several values for an entry.
#[test]
fn sixteen_bits_reach_every_tolerance() {
    let vocab = 3000;
    let tolerances = [1e-3, 2e-4, 1e-5];
    let mut encoders = tolerances.map(|t| Encoder::new(vocab, Tolerance::new(t).unwrap(), ValueType::F16).unwrap());
    let (mut tokens, mut extended, mut entries, mut further) = ([0; 3], [0; 3], [0; 3], [0; 3]);
    for row in 0..40u64 {
        let logits = common::zipf_logits(vocab, row, 0.8 + 0.03 * row as f64);
        for draw in 0..100 {
            let stream = NoiseStream::new(DrawKey::new(4, draw), row, 1);
            let x = common::sample(&logits, f64::from(draw) / 100.0);
            for (i, encoder) in encoders.iter_mut().enumerate() {
                if i == 2 && draw % 20 != 0 {
                    continue;
                }
                let mut corrections = Vec::new();
                let encoded = encoder.encode(&logits, x, &stream, &mut corrections).unwrap();
                let again = corrections.windows(2).filter(|c| c[0].index == c[1].index).count();
                tokens[i] += 1;
                extended[i] += usize::from(again > 0);
                further[i] += again;
                entries[i] += corrections.len();
                assert!(in_order(&corrections));
                if again > 0 && extended[i] <= 40 {
                    let tv = common::total_variation(&logits, x, encoded.logprob, &corrections, &stream);
                    assert!(tv <= tolerances[i], "{tv}");
                }
            }
        }
    }
    println!("{tolerances:?}: {tokens:?} tokens, with residuals {extended:?}, residuals {further:?}, of {entries:?}");
    assert!(extended[0] <= 4 && extended[1] * 10 <= tokens[1], "{extended:?}");
}

/// x and k share the mass, and ln p_k lies halfway between two 16-bit values below −16, neither of which is accurate
/// enough.
#[test]
fn two_heavy_tokens_are_reached_with_an_entry_that_occurs_twice() {
    let vocab = 3000usize;
    let mut e = vec![0f32; vocab];
    // p·e_0 for p = e^−16 must exceed e_k, so the test uses the first position with a large e_0 and a tiny e_k.
    let (stream, k) = (0u32..)
        .map(|position| NoiseStream::new(DrawKey::new(1, 0), 0, position))
        .filter(|stream| stream.auxiliary_exponential() > 6.0)
        .find_map(|stream| {
            exponentials(&stream, &mut e);
            let k = (0..vocab).min_by(|&i, &j| e[i].total_cmp(&e[j]))?;
            (e[k] < 1.2e-7).then_some((stream, k))
        })
        .unwrap();
    let x = (k + 1) % vocab;
    let e0 = f64::from(stream.auxiliary_exponential());
    let halfway = -16.0 - 1.0 / 128.0;
    let ln_z = ((vocab - 2) as f64).ln();
    let mut logits = vec![0f32; vocab];
    logits[k] = (halfway + ln_z) as f32;
    logits[x] = ((f64::exp(halfway) + f64::from(e[k]) / e0).ln() + ln_z) as f32;
    let logp = common::log_softmax(&logits);

    // One value for k, rounded to either side, and nearly exact values for all other entries.
    let single = |value: f64| -> f64 {
        let at = |j: usize| Correction { index: j as u32, logprob: if j == k { value } else { logp[j] } as f32 };
        let corrections: Vec<Correction> = (0..vocab).filter(|&j| j != x).map(at).collect();
        common::total_variation(&logits, x as u32, logp[x] as f32, &corrections, &stream)
    };
    for value in [-16.0, -16.0 - 1.0 / 64.0] {
        assert_eq!(ValueType::F16.round(value), value as f32);
        assert!(single(value) > 1.1e-3, "{}", single(value));
    }
    assert!(single(logp[k]) < 1e-6);

    for (tolerance, most) in [(1e-3, 2), (2e-4, 2), (1e-5, 3)] {
        let mut encoder = Encoder::new(vocab, Tolerance::new(tolerance).unwrap(), ValueType::F16).unwrap();
        let mut corrections = Vec::new();
        let encoded = encoder.encode(&logits, x as u32, &stream, &mut corrections).unwrap();
        let of_k: Vec<f32> = corrections.iter().filter(|c| c.index == k as u32).map(|c| c.logprob).collect();
        println!("{tolerance}: {of_k:?} of {} entries", corrections.len());
        assert!((2..=most).contains(&of_k.len()), "{of_k:?}");
        assert!(of_k.iter().all(|&v| v == ValueType::F16.round(f64::from(v))));
        assert!(in_order(&corrections));
        let sum: f64 = of_k.iter().map(|&v| f64::from(v).exp()).sum();
        assert!((sum.ln() - logp[k]).abs() < 2e-4);
        let stored = StoredToken { token: x as u32, logprob: encoded.logprob, corrections: &corrections };
        let tv = total_variation_of(&logits, &stored, &stream).unwrap();
        assert!(tv <= tolerance && (tv - encoded.total_variation).abs() < 2e-6, "{tv}");
    }
}

/// Number of corrections needed if they are the m most likely tokens instead, as in top-k distillation.
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

/// Almost no correction of the set found can be dropped on its own.
#[test]
fn no_correction_is_idle() {
    let (vocab, tolerance) = (1000, 1e-3);
    let encoder = Encoder::new(vocab, Tolerance::new(tolerance).unwrap(), ValueType::F16).unwrap();
    let mut encoder = encoder.with_condition(false); // corrections for the condition may not affect the TV
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
            // Below the encoder's own margin.
            idle += usize::from(
                common::total_variation(&logits, x, encoded.logprob, &fewer, &stream) <= tolerance * 0.999 - 3e-6,
            );
        }
    }
    println!("{idle} of {total} corrections could be left out alone");
    assert!(idle * 50 <= total, "{idle} of {total}");
}

/// The tolerance also holds for a reader whose exponentials are 4 ulp off, in the worst direction for each entry.
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
