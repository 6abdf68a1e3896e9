//! Tests the decoder for trainers against the format's reference values, against f64, and with damaged columns.

mod common;

use half::{bf16, f16};
use serde::Deserialize;
use stillhouse_noise::{
    Correction, DenseRow, DrawKey, Element, FloatColumn, IntegerColumn, Level, NoiseError, NoiseStream, Output,
    OutputKind, RequestedTokens, RowWriter, StoredColumns, StoredNoise, StoredToken, decode, decode_softmax,
    prior_rows, replay_rows, sequential_noise,
};

const KINDS: [OutputKind; 4] = [OutputKind::Softmax, OutputKind::Gumbel, OutputKind::Gaussian, OutputKind::Uniform];

#[allow(clippy::unwrap_used)] // a test's helper
fn output(kind: OutputKind, temperature: f64) -> Output {
    Output::new(kind, temperature).unwrap()
}

#[derive(Deserialize)]
struct Vectors {
    tokens: Vec<Token>,
}
#[derive(Deserialize)]
struct Token {
    vocab: usize,
    noise_seed: u64,
    draw: u32,
    sequence_id: u64,
    position: u32,
    token: u32,
    logprob: f64,
    entries: Vec<usize>,
    corrections: Vec<(u32, f32)>,
    decoded_xi: Vec<f64>,
}

#[test]
fn reference_tokens() {
    let vectors: Vectors = serde_json::from_str(include_str!("../testdata/noise_vectors.json")).unwrap();
    for t in vectors.tokens {
        let stream = NoiseStream::new(DrawKey::new(t.noise_seed, t.draw), t.sequence_id, t.position);
        let corrections: Vec<Correction> =
            t.corrections.iter().map(|&(index, logprob)| Correction { index, logprob }).collect();
        let stored = StoredToken { token: t.token, logprob: t.logprob as f32, corrections: &corrections };
        let mut xi = vec![0f32; t.vocab];
        RowWriter::new(t.vocab, output(OutputKind::Gumbel, 1.0)).replay(&stored, &stream, &mut xi).unwrap();
        for (&k, &exact) in t.entries.iter().zip(&t.decoded_xi) {
            assert!((f64::from(xi[k]) - exact).abs() < 2e-6 * exact.abs().max(1.0), "xi[{k}]");
        }
        let (mut decoded, mut softmax) = (vec![0f32; t.vocab], vec![0f32; t.vocab]);
        decode(&stored, &stream, &mut decoded).unwrap();
        assert_eq!(xi, decoded, "the same bits as the decoder");
        decode_softmax(&stored, &stream, &mut softmax).unwrap();
        RowWriter::new(t.vocab, output(OutputKind::Softmax, 1.0)).replay(&stored, &stream, &mut xi).unwrap();
        for (k, (a, b)) in xi.iter().zip(&softmax).enumerate() {
            assert!((a - b).abs() <= 1e-6 * b, "softmax[{k}]: {a} against {b}"); // only the order of the sum differs
        }
    }
}

/// Corrections in every block, some at the token's own entry and at block edges.
fn corrections(vocab: usize) -> Vec<Correction> {
    let mut indices: Vec<u32> =
        [0, 1, 1, 1022, 1023, 1024, 1024, 1024, vocab / 3, vocab - 1].map(|k| (k % vocab) as u32).to_vec();
    indices.sort_unstable();
    indices.into_iter().enumerate().map(|(i, index)| Correction { index, logprob: -2.0 - i as f32 }).collect()
}

#[test]
fn all_levels_and_types_agree() {
    let levels: Vec<Level> = Level::available().into_iter().flatten().collect();
    for vocab in [1usize, 3, 1023, 1024, 1025, 5003, 50_257] {
        let corrections = corrections(vocab);
        for (logprob, temperature) in [(-3.0, 1.0), (-0.01, 0.85), (-200.0, 2.5), (-900.0, 1.0), (-900.0, 0.3)] {
            for kind in KINDS {
                let temperature = if kind == OutputKind::Uniform { 1.0 } else { temperature };
                let stored = StoredToken { token: (vocab / 3) as u32, logprob, corrections: &corrections };
                let stream = NoiseStream::new(DrawKey::new(5, 1), vocab as u64, 7);
                let run = |level: Level| {
                    let mut writer = RowWriter::at_level(vocab, output(kind, temperature), level);
                    let mut single = vec![0f32; vocab];
                    writer.replay(&stored, &stream, &mut single).unwrap();
                    let (mut half, mut brain) = (vec![f16::ZERO; vocab], vec![bf16::ZERO; vocab]);
                    writer.replay(&stored, &stream, &mut half).unwrap();
                    writer.replay(&stored, &stream, &mut brain).unwrap();
                    (single, half, brain)
                };
                let first = run(levels[0]);
                for &level in &levels[1..] {
                    assert_eq!(first, run(level), "V = {vocab}, {kind:?}");
                }
                let (single, half, brain) = first;
                for k in 0..vocab {
                    assert!(single[k].is_finite(), "V = {vocab}, {kind:?}, τ = {temperature}, [{k}]");
                    assert_eq!(half[k], f16::from_f32(single[k]), "V = {vocab}, {kind:?}, [{k}]");
                    assert_eq!(brain[k], bf16::from_f32(single[k]), "V = {vocab}, {kind:?}, [{k}]");
                }
                if kind == OutputKind::Softmax {
                    let sum: f64 = single.iter().map(|&v| f64::from(v)).sum();
                    assert!((sum - 1.0).abs() < 1e-6, "{sum}");
                }
            }
        }
    }
}

/// Compares every kind and temperature with f64 arithmetic on the decoder's E.
#[test]
fn outputs_are_what_they_say() {
    let vocab = 3000;
    let corrections = corrections(vocab);
    let stored = StoredToken { token: 1000, logprob: -4.0, corrections: &corrections };
    let stream = NoiseStream::new(DrawKey::new(1, 0), 9, 3);
    let mut xi = vec![0f32; vocab];
    decode(&stored, &stream, &mut xi).unwrap();
    let row = |kind, temperature| {
        let mut row = vec![0f32; vocab];
        RowWriter::new(vocab, output(kind, temperature)).replay(&stored, &stream, &mut row).unwrap();
        row
    };
    for tau in [0.1, 0.85, 1.0, 3.0] {
        let scaled: Vec<f64> = xi.iter().map(|&v| f64::from(v) * f64::from(tau as f32)).collect();
        let max = scaled.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scaled.iter().map(|v| (v - max).exp()).sum();
        let (softmax, gumbel) = (row(OutputKind::Softmax, tau), row(OutputKind::Gumbel, tau));
        for k in 0..vocab {
            let exact = (scaled[k] - max).exp() / sum;
            assert!((f64::from(softmax[k]) - exact).abs() < 2e-5 * tau.max(1.0) * exact + 1e-26, "softmax {tau} [{k}]");
            assert!((f64::from(gumbel[k]) - scaled[k]).abs() < 1e-6 * scaled[k].abs().max(1.0), "gumbel {tau} [{k}]");
        }
    }
    let (uniform, gaussian) = (row(OutputKind::Uniform, 1.0), row(OutputKind::Gaussian, 1.0));
    for k in 0..vocab {
        let exact = (-(-f64::from(xi[k])).exp()).exp();
        assert!((f64::from(uniform[k]) - exact).abs() < 1e-6, "uniform [{k}]");
        // Checks Φ(z) = u by erfc in the nearer tail.
        let z = f64::from(gaussian[k]);
        let (got, exact) = if z > 0.0 {
            (libm::erfc(z / 2f64.sqrt()) / 2.0, -(-(-f64::from(xi[k])).exp()).exp_m1())
        } else {
            (libm::erfc(-z / 2f64.sqrt()) / 2.0, exact)
        };
        assert!((got / exact - 1.0).abs() < 1e-5 * (1.0 + z * z), "gaussian [{k}]: {z}, {got} against {exact}");
    }
}

/// Columns of three sequences with four positions and two draws, as a trainer reads them.
struct Columns {
    sequence_ids: Vec<u64>,
    tokens: Vec<i32>,
    logprobs: Vec<f32>,
    counts: Vec<u16>,
    offsets: Vec<i64>,
    indices: Vec<u16>,
    values: Vec<f16>,
}

const VOCAB: usize = 1500;

impl Columns {
    fn new() -> Self {
        let counts: Vec<u16> = (0..24).map(|i| (i * 7 % 5) as u16).collect();
        let mut offsets = vec![0i64];
        offsets.extend(counts.chunks(8).scan(0i64, |end, row| {
            *end += row.iter().map(|&c| i64::from(c)).sum::<i64>();
            Some(*end)
        }));
        let (mut indices, mut values) = (Vec::new(), Vec::new());
        for (token, &count) in counts.iter().enumerate() {
            for i in 0..count {
                indices.push((token as u16 * 13 + i / 2 * 400) % 1500);
                values.push(f16::from_f32(-1.5 - f32::from(i)));
            }
        }
        let begin = |token: usize| counts[..token].iter().map(|&c| c as usize).sum::<usize>();
        for token in 0..24 {
            indices[begin(token)..begin(token + 1)].sort_unstable();
        }
        Self {
            sequence_ids: vec![1 << 40, 3, u64::MAX],
            tokens: (0..12).map(|i| i * 101).collect(),
            logprobs: (0..12).map(|i| -(i as f32)).collect(),
            counts,
            offsets,
            indices,
            values,
        }
    }

    fn stored(&self) -> StoredColumns<'_> {
        let noise = StoredNoise::Replay {
            seed: 77,
            sequence_ids: &self.sequence_ids,
            tokens: &self.tokens,
            logprobs: &self.logprobs,
            counts: IntegerColumn::U16(&self.counts),
            offsets: &self.offsets,
            indices: IntegerColumn::U16(&self.indices),
            values: FloatColumn::F16(&self.values),
        };
        StoredColumns { rows: 3, draws: 2, length: 4, vocab: VOCAB, noise }
    }

    #[allow(clippy::unwrap_used)] // a test's helper
    fn error(&self, requested: RequestedTokens<'_>) -> String {
        let n = if let RequestedTokens::Indices(flat) = requested { flat.len() } else { 12 };
        let out = output(OutputKind::Gumbel, 1.0);
        replay_rows(&self.stored(), 0, requested, out, &mut vec![0f32; n * VOCAB]).unwrap_err().to_string()
    }
}

#[test]
fn columns_are_read_in_any_order_and_on_any_number_of_threads() {
    let columns = Columns::new();
    let gumbel = output(OutputKind::Gumbel, 1.0);
    for draw in 0..2usize {
        let mut all = vec![0f32; 12 * VOCAB];
        replay_rows(&columns.stored(), draw, RequestedTokens::All, gumbel, &mut all).unwrap();
        let key = DrawKey::new(77, draw as u32);
        let mut at = 0;
        let mut begins = Vec::new();
        for &count in &columns.counts {
            begins.push(at);
            at += count as usize;
        }
        for token in 0..12 {
            let (row, position) = (token / 4, token % 4);
            let list = (row * 2 + draw) * 4 + position;
            let corrections: Vec<Correction> = (begins[list]..begins[list] + columns.counts[list] as usize)
                .map(|i| Correction { index: columns.indices[i].into(), logprob: columns.values[i].to_f32() })
                .collect();
            let stored = StoredToken {
                token: columns.tokens[token] as u32,
                logprob: columns.logprobs[token],
                corrections: &corrections,
            };
            let mut xi = vec![0f32; VOCAB];
            decode(&stored, &NoiseStream::new(key, columns.sequence_ids[row], position as u32), &mut xi).unwrap();
            assert_eq!(xi, all[token * VOCAB..(token + 1) * VOCAB], "token {token}, draw {draw}");
        }
        let requested = [11i64, 2, 3, 0, 0, 5, 9, 8];
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut some = vec![0f32; requested.len() * VOCAB];
            pool.install(|| {
                replay_rows(&columns.stored(), draw, RequestedTokens::Indices(&requested), gumbel, &mut some)
            })
            .unwrap();
            for (got, &token) in some.chunks(VOCAB).zip(&requested) {
                assert_eq!(got, &all[token as usize * VOCAB..][..VOCAB]);
            }
        }
    }
}

#[test]
fn dense_and_prior_noise() {
    let vocab = 2100;
    let stream = NoiseStream::new(DrawKey::new(4, 2), 8, 5);
    let mut xi = vec![0f32; vocab];
    sequential_noise(&stream, &mut xi);
    for kind in KINDS {
        for tau in [1.0, 0.5] {
            let tau = if kind == OutputKind::Uniform { 1.0 } else { tau };
            let mut prior = vec![0f32; vocab];
            prior_rows(DrawKey::new(4, 2), vocab, &[8], &[5], output(kind, tau), &mut prior).unwrap();
            let mut dense = vec![0f32; vocab];
            RowWriter::new(vocab, output(kind, tau)).dense(DenseRow::F32(&xi), &mut dense).unwrap();
            for k in 0..vocab {
                assert!((prior[k] - dense[k]).abs() <= 4e-6 * dense[k].abs().max(1.0), "{kind:?} [{k}]");
            }
        }
    }
    // An unlikely token in half precision, whose e^ξ overflows.
    let halves: Vec<f16> = [0.5, 300.0, -2.0].map(f16::from_f32).to_vec();
    let columns =
        StoredColumns { rows: 1, draws: 1, length: 1, vocab: 3, noise: StoredNoise::Dense(FloatColumn::F16(&halves)) };
    for kind in KINDS {
        let mut row = [0f32; 3];
        replay_rows(&columns, 0, RequestedTokens::All, output(kind, 1.0), &mut row).unwrap();
        assert!(row.iter().all(|v| v.is_finite()), "{kind:?} {row:?}");
        let expected = match kind {
            OutputKind::Softmax | OutputKind::Uniform => 1.0,
            OutputKind::Gumbel => 300.0,
            OutputKind::Gaussian => 24.329_2, // −ln(1 − Φ(z)) = 300
        };
        assert!((row[1] - expected).abs() < 1e-2, "{kind:?} {row:?}");
    }
}

#[test]
fn a_value_too_large_for_a_half_type_is_its_largest() {
    assert_eq!(f16::from_f64_saturating(1e6), f16::MAX);
    let stored = StoredToken { token: 0, logprob: -1e5, corrections: &[] };
    let stream = NoiseStream::new(DrawKey::new(4, 2), 8, 5);
    let mut row = [f16::ZERO; 2];
    RowWriter::new(2, output(OutputKind::Gumbel, 1.0)).replay(&stored, &stream, &mut row).unwrap();
    assert_eq!(row[0], f16::MAX);
    RowWriter::new(2, output(OutputKind::Softmax, 0.9)).replay(&stored, &stream, &mut row).unwrap();
    assert_eq!(row, [f16::ONE, f16::ZERO]);
}

#[test]
fn damaged_columns_are_distinguished() {
    let good = Columns::new();
    let error = |change: &dyn Fn(&mut Columns)| {
        let mut columns = Columns::new();
        change(&mut columns);
        columns.error(RequestedTokens::All)
    };
    assert!(error(&|c| c.tokens[5] = 1500).contains("token 1500 is not below the vocabulary size 1500"));
    assert!(error(&|c| c.tokens[5] = -1).contains("sequence 3, position 1"));
    assert!(error(&|c| c.logprobs[0] = f32::NEG_INFINITY).contains("logprob is -inf"));
    assert!(error(&|c| c.values[0] = f16::NAN).contains("the correction of token"));
    assert!(error(&|c| c.indices[0] = 1500).contains("the correction of token 1500"));
    assert!(error(&|c| c.indices[3] = 1499).contains("do not ascend"), "{}", error(&|c| c.indices[3] = 1499));
    assert!(error(&|c| c.counts[2] += 1).contains("row 0: noise_count adds up to"));
    assert!(error(&|c| c.offsets[1] -= 1).contains("row 0: noise_count adds up to"));
    assert!(error(&|c| c.offsets[3] = i64::MAX).contains("row 2"));
    assert!(error(&|c| c.offsets.truncate(2)).contains("the offsets of noise_index"));
    assert!(error(&|c| c.logprobs.truncate(2)).contains("logprob holds 2 values, expected 12"));
    assert_eq!(good.error(RequestedTokens::Indices(&[0, 12])), "token 12 is out of range (0 to 11)");
    let mut out = vec![0f32; 12 * VOCAB];
    let gumbel = output(OutputKind::Gumbel, 1.0);
    let draw = replay_rows(&good.stored(), 2, RequestedTokens::All, gumbel, &mut out);
    assert_eq!(draw, Err(NoiseError::Range { what: "draw", got: 2, last: 1 }));
    let short = replay_rows(&good.stored(), 1, RequestedTokens::All, gumbel, &mut out[1..]);
    assert!(matches!(short, Err(NoiseError::Length { what: "the output", .. })));
    for (kind, temperature) in [(OutputKind::Softmax, 0.0), (OutputKind::Gumbel, f64::NAN), (OutputKind::Uniform, 0.5)]
    {
        assert!(Output::new(kind, temperature).is_err());
    }
    // Of several errors, the first row's is returned, for any order of the threads.
    let mut columns = Columns::new();
    columns.tokens[3..].fill(9999);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    let error = pool.install(|| columns.error(RequestedTokens::All));
    assert!(error.contains("sequence 1099511627776, position 3"), "{error}");
}
