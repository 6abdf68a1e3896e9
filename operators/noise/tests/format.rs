//! Compares the format with its reference values, and the results of all instruction levels with each other.

mod common;

use serde::Deserialize;
use stillhouse_noise::{
    Correction, DrawKey, Encoder, Level, LogitRows, NoiseError, NoiseStream, RowEncoder, Softmax, StoredToken,
    Tolerance, ValueType, decode, decode_softmax, dense_noise, exponential_from_word, exponentials, philox4x32_10,
    prior_noise, sequential_noise, total_variation_of,
};

#[derive(Deserialize)]
struct Vectors {
    philox4x32_10: Vec<KnownAnswer>,
    exponential: Vec<Exponential>,
    tokens: Vec<Token>,
}
#[derive(Deserialize)]
struct KnownAnswer {
    counter: [String; 4],
    key: [String; 2],
    words: [String; 4],
}
#[derive(Deserialize)]
struct Exponential {
    word: u32,
    e: f64,
}
#[derive(Deserialize)]
struct Token {
    vocab: usize,
    noise_seed: u64,
    draw: u32,
    sequence_id: u64,
    position: u32,
    token: u32,
    logits: serde_json::Value,
    logprob: f64,
    e0: f64,
    entries: Vec<usize>,
    e: Vec<f64>,
    logprobs: Vec<f64>,
    xi: Vec<f64>,
    corrections: Vec<(u32, f32)>,
    decoded_xi: Vec<f64>,
    total_variation: f64,
}

#[allow(clippy::unwrap_used)] // a test's helper
fn vectors() -> Vectors {
    serde_json::from_str(include_str!("../testdata/noise_vectors.json")).unwrap()
}

fn ulp_distance(got: f32, exact: f64) -> f64 {
    let at = (exact as f32).abs();
    (f64::from(got) - exact).abs() / (f64::from(f32::from_bits(at.to_bits() + 1)) - f64::from(at))
}

#[test]
fn philox_known_answers() {
    let word = |s: &String| u32::from_str_radix(s, 16).unwrap();
    let cases = vectors().philox4x32_10;
    assert_eq!(cases.len(), 3);
    for case in cases {
        let got = philox4x32_10(case.counter.each_ref().map(word), case.key.each_ref().map(word));
        assert_eq!(got, case.words.each_ref().map(word));
    }
}

#[test]
fn exponential_words() {
    for case in vectors().exponential {
        let got = exponential_from_word(case.word);
        assert!(ulp_distance(got, case.e) <= 4.0, "word {}: {got} against {}", case.word, case.e);
    }
}

#[test]
fn reference_tokens() {
    for t in vectors().tokens {
        let stream = NoiseStream::new(DrawKey::new(t.noise_seed, t.draw), t.sequence_id, t.position);
        let mut e = vec![0f32; t.vocab];
        let e0 = exponentials(&stream, &mut e);
        assert!(ulp_distance(e0, t.e0) <= 4.0);
        for (&k, &exact) in t.entries.iter().zip(&t.e) {
            assert!(ulp_distance(e[k], exact) <= 4.0, "e[{k}]: {} against {exact}", e[k]);
            assert_eq!(e[k], stream.exponential(k as u32));
        }
        let corrections: Vec<Correction> =
            t.corrections.iter().map(|&(index, logprob)| Correction { index, logprob }).collect();
        let stored = StoredToken { token: t.token, logprob: t.logprob as f32, corrections: &corrections };
        let mut xi = vec![0f32; t.vocab];
        decode(&stored, &stream, &mut xi).unwrap();
        for (&k, &exact) in t.entries.iter().zip(&t.decoded_xi) {
            assert!((f64::from(xi[k]) - exact).abs() < 2e-6 * exact.abs().max(1.0), "decoded xi[{k}]");
        }
        let Some(logits) = t.logits.as_array() else {
            continue; // the vectors omit the logits of the large rows
        };
        let logits: Vec<f32> = logits.iter().map(|l| l.as_f64().unwrap() as f32).collect();
        let row = dense_noise(&mut Softmax::new(t.vocab).unwrap(), &logits, t.token, &stream, &mut xi).unwrap();
        assert!((f64::from(row.logprob_x) - t.logprob).abs() < 1e-6);
        for (i, &k) in t.entries.iter().enumerate() {
            assert!((f64::from(xi[k]) - t.xi[i]).abs() < 2e-6 * t.xi[i].abs().max(1.0), "xi[{k}]");
            let logp = f64::from(logits[k]) - f64::from(row.logsumexp);
            assert!((logp - t.logprobs[i]).abs() < 1e-6);
        }
        let tv = total_variation_of(&logits, &stored, &stream).unwrap();
        assert!((tv - t.total_variation).abs() < 1e-7, "{tv} against {}", t.total_variation);
    }
}

/// The large rows list p only at a few entries. The posterior formula holds at these.
#[test]
fn reference_posterior_of_large_rows() {
    for t in vectors().tokens {
        for (i, &k) in t.entries.iter().enumerate() {
            let total =
                if k == t.token as usize { t.logprob.exp() * t.e0 } else { t.e[i] + t.logprobs[i].exp() * t.e0 };
            assert!((-total.ln() - t.xi[i]).abs() < 1e-9);
        }
    }
}

#[test]
fn all_levels_give_the_same_bits() {
    let levels: Vec<Level> = Level::available().into_iter().flatten().collect();
    println!("{levels:?}");
    for (case, vocab) in [2usize, 5, 63, 1000, 1024, 1025, 5003, 50_257].into_iter().enumerate() {
        for (shape, value_type) in [(1, ValueType::F16), (5, ValueType::F32), (6, ValueType::F16)] {
            let logits = common::shaped_logits(vocab, case as u64, shape);
            let stream = NoiseStream::new(DrawKey::new(3, 1), case as u64, shape);
            let x = (vocab / 3) as u32;
            let results: Vec<_> = levels
                .iter()
                .map(|&level| {
                    let tolerance = Tolerance::new(1e-3).unwrap();
                    let mut encoder = Encoder::at_level(vocab, tolerance, value_type, level).unwrap();
                    let mut corrections = Vec::new();
                    let encoded = encoder.encode(&logits, x, &stream, &mut corrections).unwrap();
                    let mut softmax = Softmax::at_level(vocab, level).unwrap();
                    let mut noise = vec![0f32; vocab];
                    let row = dense_noise(&mut softmax, &logits, x, &stream, &mut noise).unwrap();
                    let bits: Vec<u32> = noise.into_iter().map(f32::to_bits).collect();
                    (encoded.total_variation.to_bits(), format!("{encoded:?} {corrections:?} {row:?}"), bits)
                })
                .collect();
            assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "V = {vocab}, shape {shape}");
        }
    }
}

#[test]
fn certain_positions_are_prior_noise() {
    let stream = NoiseStream::new(DrawKey::new(1, 0), 2, 3);
    let (mut prior, mut decoded, mut sequential) = (vec![0f32; 300], vec![0f32; 300], vec![0f32; 300]);
    prior_noise(17, &stream, &mut prior).unwrap();
    let stored = StoredToken { token: 17, logprob: 0.0, corrections: &[] };
    decode(&stored, &stream, &mut decoded).unwrap();
    assert_eq!(prior, decoded);
    sequential_noise(&stream, &mut sequential);
    assert!((0..300).all(|k| (k == 17) != (prior[k] == sequential[k])));
    assert!((prior[17] - -stream.auxiliary_exponential().ln()).abs() < 1e-6);
}

#[test]
fn softmax_of_noise_needs_no_logarithm() {
    let logits = common::zipf_logits(2000, 1, 1.5);
    let stream = NoiseStream::new(DrawKey::new(1, 0), 2, 3);
    let mut encoder = Encoder::new(2000, Tolerance::default(), ValueType::F16).unwrap();
    for x in [0, 1999] {
        let mut corrections = Vec::new();
        let encoded = encoder.encode(&logits, x, &stream, &mut corrections).unwrap();
        let stored = StoredToken { token: x, logprob: encoded.logprob, corrections: &corrections };
        let (mut xi, mut direct) = (vec![0f32; 2000], vec![0f32; 2000]);
        decode(&stored, &stream, &mut xi).unwrap();
        decode_softmax(&stored, &stream, &mut direct).unwrap();
        let through_xi = common::softmax_of(&xi.iter().map(|&v| -f64::from(v)).collect::<Vec<_>>());
        for k in 0..2000 {
            assert!((through_xi[k] - f64::from(direct[k])).abs() < 2e-6, "{k}");
        }
    }
}

/// Several values of one entry add up, p̂_k = Σ exp(v), in every decoder of the crate.
#[test]
fn values_of_one_entry_add_up() {
    let logits = common::zipf_logits(300, 1, 1.2);
    let stream = NoiseStream::new(DrawKey::new(1, 0), 2, 3);
    let at = |index, logprob| Correction { index, logprob };
    let third = at(9, -1.0 - 3f32.ln());
    let once = [at(5, -2.5), at(9, -1.0), at(200, -7.0)];
    let thrice = [at(5, -2.5), third, third, third, at(200, -7.0)];
    let read = |corrections: &[Correction]| {
        let stored = StoredToken { token: 17, logprob: -3.0, corrections };
        let (mut xi, mut softmax) = (vec![0f32; 300], vec![0f32; 300]);
        decode(&stored, &stream, &mut xi).unwrap();
        decode_softmax(&stored, &stream, &mut softmax).unwrap();
        (xi, softmax, total_variation_of(&logits, &stored, &stream).unwrap())
    };
    let (once, thrice) = (read(&once), read(&thrice));
    for k in 0..300 {
        assert!((once.0[k] - thrice.0[k]).abs() < 1e-6 * once.0[k].abs().max(1.0));
        assert!((once.1[k] - thrice.1[k]).abs() < 1e-6);
    }
    assert!((once.2 - thrice.2).abs() < 1e-6);
}

#[test]
fn rows_are_in_order_and_do_not_depend_on_threads() {
    let (vocab, n) = (700usize, 37usize);
    let logits: Vec<f32> = (0..n).flat_map(|row| common::zipf_logits(vocab, row as u64, 1.1)).collect();
    let tokens: Vec<u32> = (0..n as u32).map(|row| row * 13 % vocab as u32).collect();
    let positions: Vec<u32> = (0..n as u32).collect();
    let sequence_ids = vec![u64::MAX - 3; n];
    let mut certain = vec![false; n];
    certain[0] = true;
    let rows = LogitRows {
        logits: &logits,
        tokens: &tokens,
        positions: &positions,
        sequence_ids: &sequence_ids,
        is_given: &certain,
    };
    let keys = DrawKey::draws(42, 3);
    let encoder = RowEncoder::new(vocab, Tolerance::new(1e-3).unwrap(), ValueType::F16).unwrap();
    let encoded = encoder.encode_rows(&rows, &keys, |_, _, _| ()).unwrap().0;
    for threads in [1, 4] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| encoder.encode_rows(&rows, &keys, |_, _, _| ())).unwrap().0, encoded);
    }
    assert_eq!((encoded.logprob.len(), encoded.counts.len(), encoded.offsets.len()), (n, 3 * n, 3 * n + 1));
    assert_eq!((encoded.logprob[0], &encoded.counts[..3]), (0.0, &[0u32, 0, 0][..]));
    assert!(encoded.max_total_variation <= 1e-3 && encoded.mean_total_variation > 0.0);
    let mut single = Encoder::new(vocab, Tolerance::new(1e-3).unwrap(), ValueType::F16).unwrap();
    for row in 1..n {
        for (draw, &key) in keys.iter().enumerate() {
            let mut corrections = Vec::new();
            let stream = NoiseStream::new(key, sequence_ids[row], positions[row]);
            let one = &logits[row * vocab..(row + 1) * vocab];
            let token = single.encode(one, tokens[row], &stream, &mut corrections).unwrap();
            assert_eq!(token.logprob, encoded.logprob[row]);
            let (indices, logprobs) = encoded.corrections(row, draw);
            assert!(corrections.iter().map(|c| c.index).eq(indices.iter().copied()));
            assert!(corrections.iter().map(|c| c.logprob).eq(logprobs.iter().copied()));
        }
    }
}

#[test]
fn errors_name_the_position() {
    let mut encoder = Encoder::new(4, Tolerance::default(), ValueType::F16).unwrap();
    let stream = NoiseStream::new(DrawKey::new(0, 0), 12, 34);
    let mut out = Vec::new();
    let error = encoder.encode(&[0.0; 4], 4, &stream, &mut out).unwrap_err();
    assert!(matches!(error, NoiseError::Token { sequence_id: 12, position: 34, token: 4, vocab: 4 }));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = encoder.encode(&[0.0, 1.0, bad, 0.0], 0, &stream, &mut out).unwrap_err();
        assert!(matches!(error, NoiseError::NonFiniteLogit { sequence_id: 12, position: 34, index: 2, .. }));
    }
    let error = encoder.encode(&[0.0; 3], 0, &stream, &mut out).unwrap_err();
    assert!(matches!(error, NoiseError::Length { got: 3, expected: 4, .. }));
    for bad in [Correction { index: 4, logprob: -1.0 }, Correction { index: 0, logprob: f32::NAN }] {
        let stored = StoredToken { token: 1, logprob: -1.0, corrections: &[bad] };
        let error = decode(&stored, &stream, &mut [0.0; 4]).unwrap_err();
        assert!(matches!(error, NoiseError::Correction { vocab: 4, .. }));
        assert!(total_variation_of(&[0.0; 4], &stored, &stream).is_err());
    }
    for bad in [0.0, -1.0, f64::NAN, 0.6, 1e-6] {
        assert!(matches!(Tolerance::new(bad), Err(NoiseError::Tolerance { .. })));
    }
    assert!(Encoder::new(0, Tolerance::default(), ValueType::F16).is_err());

    let rows = RowEncoder::new(4, Tolerance::default(), ValueType::F16).unwrap();
    let mut logits = vec![0f32; 400];
    logits[4 * 70] = f32::NAN;
    logits[4 * 30 + 1] = f32::NAN;
    let positions: Vec<u32> = (0..100).collect();
    let slice =
        LogitRows { logits: &logits, tokens: &[0; 100], positions: &positions, sequence_ids: &[5; 100], is_given: &[] };
    for _ in 0..10 {
        let error = rows.encode_rows(&slice, &DrawKey::draws(0, 1), |_, _, _| ()).unwrap_err();
        assert!(matches!(error, NoiseError::NonFiniteLogit { sequence_id: 5, position: 30, index: 1, .. }));
    }
}
