//! Tests that the signals equal their definitions in f64, and that `check` and `compare` find values that do not.

use stillhouse_noise::{Level, Softmax, keyed_uniforms};

use super::*;

mod margin;
mod walkthrough;

const TOP_K: usize = 0;
const LOGZ: usize = 1;
const ENTROPY: usize = 2;
const CANDIDATES: usize = 3;
const SAMPLED: usize = 4;
const TOP_P: usize = 5;

/// Every signal, in the order of [`SIGNALS`].
fn all(vocab: usize) -> Vec<Arc<dyn StoredSignal>> {
    vec![
        Arc::new(TopK { k: 3.min(vocab) }),
        Arc::new(LogPartitions { temperatures: vec![1.0, 2.0, 0.5] }),
        Arc::new(Entropy),
        Arc::new(Candidates { tokens: vec![0, vocab as u32 - 1] }),
        sampled(50, 1.0),
        Arc::new(TopP { mass: 0.9, max_entries: 64 }),
    ]
}

fn sampled(draws: u32, power: f64) -> Arc<dyn StoredSignal> {
    Arc::new(SampledLogits { draws, power, seed: 3 })
}

fn loaded(logits: &[f32]) -> Softmax {
    let mut softmax = Softmax::new(logits.len()).unwrap();
    softmax.load(logits).unwrap();
    softmax
}

/// The values of each signal.
fn values(signals: &[Arc<dyn StoredSignal>], logits: &[f32], position: u32) -> Vec<RowSignals> {
    let softmax = loaded(logits);
    let row = requested(signals).compute(&LoadedRow::new(&softmax, logits, 7, position));
    let values: Vec<RowSignals> = split(signals, &row).map(|(_, values)| values.to_vec()).collect();
    assert_eq!(values.iter().map(Vec::len).sum::<usize>(), row.len());
    values
}

fn random(vocab: usize, scale: f64, seed: u64) -> Vec<f32> {
    let mut uniforms = keyed_uniforms(seed, "test", vocab as u64, 0);
    (0..vocab).map(|_| (scale * (uniforms.next_f64() + uniforms.next_f64() - 1.0)) as f32).collect()
}

/// Returns ln Σ exp(l/T) and ln p, computed in f64.
fn exact(logits: &[f32], temperature: f64) -> (f64, Vec<f64>) {
    let l: Vec<f64> = logits.iter().map(|l| f64::from(*l) / temperature).collect();
    let max = l.iter().fold(f64::MIN, |a, b| a.max(*b));
    let ln_z = l.iter().map(|l| (l - max).exp()).sum::<f64>().ln();
    (max + ln_z, l.iter().map(|l| (l - max) - ln_z).collect())
}

#[test]
fn signals_are_those_of_f64() {
    let sure = [0.0, -(1e9f64 - 1.0).ln() as f32]; // p = 1 − 1e-9
    let huge = [3e38f32, -3e38, 1e30, 3e38];
    let cases = [
        sure.to_vec(),
        huge.to_vec(),
        vec![-1e4, -1e4 + 1.0],
        vec![5.0],
        vec![0.0; 50_257],
        random(1_000, 20.0, 1),
        random(50_257, 30.0, 2),
        random(2_048, 200.0, 3),
    ];
    for logits in &cases {
        let vocab = logits.len();
        let (signals, got) = (all(vocab), values(&all(vocab), logits, 0));
        for (signal, values) in signals.iter().zip(&got) {
            let is_beyond_f32 = logits.iter().any(|l| l.abs() > 1e37);
            assert_eq!(signal.check(values, vocab).filter(|_| !is_beyond_f32), None, "V = {vocab}");
        }
        for (temperature, logz) in [1.0, 2.0, 0.5].iter().zip(f32s(&got[LOGZ], 0)) {
            let expected = exact(logits, *temperature).0;
            if expected.abs() < f64::from(f32::MAX) {
                let error = (f64::from(*logz) - expected).abs();
                assert!(error <= 1e-5 + expected.abs() * 6e-8, "V = {vocab}, T = {temperature}: {logz} {expected}");
            }
        }
        let (_, logprobs) = exact(logits, 1.0);
        let expected: f64 = -logprobs.iter().map(|l| if *l < -700.0 { 0.0 } else { l * l.exp() }).sum::<f64>();
        let entropy = f64::from(f32_of(&got[ENTROPY], 0));
        assert!((entropy - expected).abs() <= 1e-5, "V = {vocab}: {entropy} {expected}");
        for (k, logprob) in [0, vocab - 1].iter().zip(f32s(&got[CANDIDATES], 0)) {
            let expected = logprobs[*k];
            assert!((f64::from(*logprob) - expected).abs() <= 1e-6 + expected.abs() * 1.2e-7, "{logprob} {expected}");
        }
        let mut ranked: Vec<usize> = (0..vocab).collect();
        ranked.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b)));
        let (tokens, listed) = (u32s(&got[TOP_K], 0), f32s(&got[TOP_K], 1));
        assert_eq!(tokens.len(), 3.min(vocab));
        for ((token, logprob), expected) in tokens.iter().zip(listed).zip(ranked) {
            let exact = logprobs[expected];
            assert_eq!(*token as usize, expected);
            assert!((f64::from(*logprob) - exact).abs() <= 1e-6 + exact.abs() * 1.2e-7, "{logprob} {exact}");
        }
        let kept = u32s(&got[TOP_P], 1);
        let held = |n: usize| kept[..n].iter().map(|k| logprobs[*k as usize].exp()).sum::<f64>();
        let n = kept.len();
        assert!(n == 64 || held(n) >= 0.9 - 1e-6, "V = {vocab}: {}", held(n));
        assert!(n == 1 || held(n - 1) < 0.9 + 1e-6);
        let others = (0..vocab).filter(|k| kept.iter().all(|kept| *kept as usize != *k));
        let expected: f64 = others.map(|k| logprobs[k].exp()).sum();
        let tail = f32_of(&got[TOP_P], 3);
        assert!((f64::from(tail).exp() - expected).abs() <= 1e-5 * expected + 1e-24, "V = {vocab}: {tail} {expected}");
    }
    let got = values(&all(2), &sure, 0);
    let tail = f32_of(&got[TOP_P], 3);
    assert!((tail - 1e-9f32.ln()).abs() < 1e-4, "{tail}");
    assert_eq!(u32s(&got[TOP_P], 1), [0]);
}

/// Expected values: numpy 2, float64, l = [1, 2, 3, −4], `np.log(np.exp(l / T).sum())` and so on.
#[test]
fn numbers_of_numpy() {
    let mut signals = all(4);
    signals[CANDIDATES] = Arc::new(Candidates { tokens: vec![3, 1] });
    let got = values(&signals, &[1.0, 2.0, 3.0, -4.0], 0);
    let numpy = [3.408_212_401_754_417, 2.195_448_273_167_654, 6.142_932_349_279_819];
    for (got, numpy) in f32s(&got[LOGZ], 0).iter().zip(numpy) {
        assert!((f64::from(*got) - numpy).abs() < 1e-6, "{got} {numpy}");
    }
    let entropy = f32_of(&got[ENTROPY], 0);
    assert!((f64::from(entropy) - 0.836_988_263_221_596_6).abs() < 1e-6, "{entropy}");
    let candidates = f32s(&got[CANDIDATES], 0);
    assert!((candidates[0] + 7.408_212).abs() < 2e-6 && (candidates[1] + 1.408_212_4).abs() < 1e-6);
}

#[test]
fn every_level_gives_the_same_bits() {
    let logits = random(5_003, 25.0, 9);
    let mut signals = all(5_003);
    signals[SAMPLED] = sampled(200, 0.7);
    let rows = Level::available().into_iter().flatten().map(|level| {
        let mut softmax = Softmax::at_level(logits.len(), level).unwrap();
        softmax.load(&logits).unwrap();
        requested(&signals).compute(&LoadedRow::new(&softmax, &logits, 7, 2))
    });
    let rows: Vec<RowSignals> = rows.collect();
    assert!(rows.iter().all(|row| *row == rows[0]));
}

/// Over 2,000 positions with 50 draws, the mean estimate of every p is within 4 standard errors, for t = 1 and others.
#[test]
fn sampled_logits_are_unbiased() {
    let logits = random(40, 6.0, 4);
    let (_, logprobs) = exact(&logits, 1.0);
    for power in [1.0, 0.8, 1.2, 0.3] {
        let q: Vec<f64> = logprobs.iter().map(|l| (power * l).exp()).collect();
        let total: f64 = q.iter().sum();
        let mut mean = vec![0f64; logits.len()];
        for position in 0..2_000 {
            let drawn = &values(&[sampled(50, power)], &logits, position)[0];
            let (tokens, times, ratios) = (u32s(drawn, 1), u32s(drawn, 2), f32s(drawn, 3));
            assert_eq!(times.iter().sum::<u32>(), 50);
            assert!(tokens.is_sorted_by(|a, b| a < b));
            for (n, (token, times)) in tokens.iter().zip(times).enumerate() {
                let ratio = ratios.get(n).copied().unwrap_or(1.0);
                mean[*token as usize] += f64::from(*times) * f64::from(ratio) / 1e5;
            }
        }
        let chi: f64 = (0..logits.len())
            .map(|k| {
                let (p, q) = (logprobs[k].exp(), q[k] / total);
                let error = p / q * (q * (1.0 - q) / 1e5).sqrt();
                assert!((mean[k] - p).abs() < 4.0 * error, "t = {power}, entry {k}: {} {p} ± {error}", mean[k]);
                ((mean[k] - p) / error).powi(2)
            })
            .sum();
        assert!(chi > 10.0 && chi < 80.0, "t = {power}: {chi}"); // 40 entries: consistent with chance
    }
}

#[test]
fn draws_are_those_of_the_uniforms() {
    let logits = random(3_000, 10.0, 8);
    let (_, logprobs) = exact(&logits, 1.0);
    let mut uniforms = keyed_uniforms(3, "sampled_logits", 7, 5);
    let mut expected: Vec<u32> = (0..100)
        .map(|_| {
            let (u, mut sum) = (uniforms.next_f64(), 0.0);
            let at = logprobs.iter().position(|l| {
                sum += l.exp();
                sum > u
            });
            at.unwrap() as u32
        })
        .collect();
    expected.sort_unstable();
    let drawn = &values(&[sampled(100, 1.0)], &logits, 5)[0];
    let drawn = u32s(drawn, 1).iter().zip(u32s(drawn, 2));
    assert_eq!(drawn.flat_map(|(token, times)| vec![*token; *times as usize]).collect::<Vec<u32>>(), expected);
}

/// A candidate belongs to the request, not to a position.
#[test]
fn invalid_candidates_are_named_without_a_position() {
    let candidates = Candidates { tokens: vec![9, 10] };
    assert_eq!(candidates.check_vocabulary(11), Ok(()));
    let error = candidates.check_vocabulary(10).unwrap_err();
    assert_eq!(error.to_string(), "candidate 10 is out of range (0 to 9)");
}

#[test]
fn certain_positions_are_one_hot() {
    let mut signals = all(10);
    signals[CANDIDATES] = Arc::new(Candidates { tokens: vec![4, 9] });
    let (f32s, u32s) = (|values: &[f32]| Values::F32(values.to_vec()), |values: &[u32]| Values::U32(values.to_vec()));
    let expected = vec![
        u32s(&[9, 0, 1]),
        f32s(&[0.0, f32::NEG_INFINITY, f32::NEG_INFINITY]),
        f32s(&[0.0; 3]),
        f32s(&[0.0]),
        f32s(&[f32::NEG_INFINITY, 0.0]),
        u32s(&[1]),
        u32s(&[9]),
        u32s(&[50]),
        u32s(&[1]),
        u32s(&[9]),
        f32s(&[0.0]),
        f32s(&[f32::NEG_INFINITY]),
    ];
    let row = certain(&signals, 9);
    assert_eq!(row, expected);
    for (signal, values) in split(&signals, &row) {
        assert_eq!((signal.check(values, 10), signal.columns().len()), (None, values.len()), "{signal:?}");
    }
    assert_eq!(certain(&[], 3), RowSignals::new());
}

#[test]
fn kinds_describe_exactly_the_columns_of_their_signals() {
    let mut signals = all(10);
    signals[SAMPLED] = sampled(9, 0.5);
    for (kind, signal) in SIGNALS.iter().zip(&signals) {
        let described: Vec<&str> = kind.columns.iter().map(|column| column.name).collect();
        let columns: Vec<&str> = signal.columns().iter().map(|column| column.name).collect();
        assert_eq!(described, columns);
    }
    assert_eq!(SIGNALS.len(), signals.len());
}

#[test]
fn settings_of_different_signals_differ() {
    let (some, same) = (all(10), all(10));
    for (n, signal) in some.iter().enumerate() {
        let equal: Vec<bool> = same.iter().map(|other| signal == other).collect();
        assert_eq!(equal, (0..same.len()).map(|other| other == n).collect::<Vec<bool>>());
    }
    assert!(sampled(9, 0.5) != sampled(9, 0.6));
}

type Break = fn(&mut [Values]);

fn change_f32(values: &mut Values, change: impl Fn(f32) -> f32) {
    let Values::F32(values) = values else { panic!("{values:?}") };
    let last = values.len() - 1;
    values[last] = change(values[last]);
}

/// Moves one draw to the next entry.
fn move_draw(values: &mut [Values]) {
    let (Values::U32(tokens), Values::U32(times)) = (values[1].clone(), values[2].clone()) else { panic!() };
    let mut draws: Vec<u32> = tokens.iter().zip(&times).flat_map(|(token, n)| vec![*token; *n as usize]).collect();
    draws[0] += 1;
    draws.sort_unstable();
    let runs: Vec<(u32, u32)> = draws.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u32)).collect();
    let ratio = |token: &u32| tokens.iter().position(|t| t == token).map_or(1.0, |n| f32s(values, 3)[n]);
    let ratios = runs.iter().map(|(token, _)| ratio(token)).collect();
    values[3] = Values::F32(ratios);
    values[0] = Values::U32(vec![runs.len() as u32]);
    values[1] = Values::U32(runs.iter().map(|run| run.0).collect());
    values[2] = Values::U32(runs.iter().map(|run| run.1).collect());
}

#[test]
fn every_signal_that_is_not_the_teachers_is_found() {
    let logits: Vec<f32> = (0..50).map(|k| 3.0 * (k as f32 * 1.7).sin()).collect();
    let softmax = loaded(&logits);
    let row = LoadedRow::new(&softmax, &logits, 3, 2);
    let signals: Vec<Arc<dyn StoredSignal>> = vec![
        Arc::new(TopK { k: 5 }),
        Arc::new(LogPartitions { temperatures: vec![1.0, 3.0] }),
        Arc::new(Entropy),
        Arc::new(Candidates { tokens: vec![1] }),
        Arc::new(SampledLogits { draws: 64, power: 0.9, seed: 1 }),
        Arc::new(TopP { mass: 0.7, max_entries: 40 }),
    ];
    let of = |n: usize, row: &LoadedRow<'_>| {
        let mut values = RowSignals::new();
        signals[n].compute(row, &mut values);
        values
    };
    let compared = |n: usize, change: &dyn Fn(&mut [Values]), tolerances: Tolerances| {
        let (mut got, expected) = (of(n, &row), of(n, &row));
        change(&mut got);
        signals[n].compare(&got, &expected, &row, tolerances)
    };
    let (other, same) = (Tolerances::other_machine(), Tolerances::for_arithmetic(true, "cpu"));
    for tolerances in [other, Tolerances::for_arithmetic(true, "NVIDIA H100"), same] {
        (0..signals.len()).for_each(|n| assert_eq!(compared(n, &|_| {}, tolerances), None));
    }
    let broken: [(usize, &str, Break); 8] = [
        (TOP_K, "topk_logprob of", |values| change_f32(&mut values[1], |v| v - 0.01)),
        (TOP_K, "topk_index 4 is", |values| {
            // the least likely entry with its correct ln p
            let logits: Vec<f32> = (0..50).map(|k| 3.0 * (k as f32 * 1.7).sin()).collect();
            let least = (0..50).min_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            let Values::U32(tokens) = &mut values[0] else { panic!() };
            tokens[4] = least as u32;
            let logprob = loaded(&logits).logprob(logits[least]) as f32;
            change_f32(&mut values[1], |_| logprob);
        }),
        (LOGZ, "logz is", |values| change_f32(&mut values[0], |v| v + 0.01)),
        (ENTROPY, "entropy is", |values| change_f32(&mut values[0], |v| v + 0.02)),
        (CANDIDATES, "candidate_logprob is", |values| change_f32(&mut values[0], |v| v - 0.01)),
        (SAMPLED, "sampled_ratio is", |values| change_f32(&mut values[3], |v| v * 1.1)),
        (TOP_P, "top_p_logprob of", |values| change_f32(&mut values[2], |v| v - 0.01)),
        (TOP_P, "top_p_tail is", |values| change_f32(&mut values[3], |v| v + 0.1)),
    ];
    for (n, says, change) in broken {
        let said = compared(n, &change, other).unwrap_or_default();
        assert!(said.starts_with(says), "{says}: {said:?}");
    }
    // with the job's bits, the format's promises apply; they are a thousand times tighter
    let closer: [(usize, &str, Break); 9] = [
        (TOP_K, "topk_logprob of", |values| change_f32(&mut values[1], |v| v - 1e-3)),
        (LOGZ, "logz is", |values| change_f32(&mut values[0], |v| v + 3e-5)),
        (ENTROPY, "entropy is", |values| change_f32(&mut values[0], |v| v + 3e-5)),
        (CANDIDATES, "candidate_logprob is", |values| change_f32(&mut values[0], |v| v - 1e-5)),
        (SAMPLED, "1 of 64 sampled", move_draw),
        (SAMPLED, "sampled_ratio is", |values| change_f32(&mut values[3], |v| v * 1.0001)),
        (TOP_P, "top_p_logprob of", |values| change_f32(&mut values[2], |v| v - 1e-5)),
        (TOP_P, "top_p_index is", |values| {
            let Values::U32(tokens) = &mut values[1] else { panic!() };
            tokens.swap(0, 1);
            let Values::F32(logprobs) = &mut values[2] else { panic!() };
            logprobs.swap(0, 1);
        }),
        (TOP_P, "top_p_tail is", |values| change_f32(&mut values[3], |v| v + 1e-4)),
    ];
    for (n, says, change) in closer {
        assert_eq!(compared(n, &change, other), None, "{says}: as much may be the arithmetic's");
        let said = compared(n, &change, same).unwrap_or_default();
        assert!(said.starts_with(says), "{says}: {said:?}");
    }
    let elsewhere = of(SAMPLED, &LoadedRow::new(&softmax, &logits, 3, 1));
    let said = signals[SAMPLED].compare(&elsewhere, &of(SAMPLED, &row), &row, other).unwrap_or_default();
    assert!(said.contains("sampled tokens differ from those that the seed gives"), "{said}");
    let shorten = |values: &mut [Values]| {
        values[0] = Values::U32(vec![1]);
        values[1] = Values::U32(u32s(values, 1)[..1].to_vec());
        values[2] = Values::F32(f32s(values, 2)[..1].to_vec());
    };
    assert!(u32s(&of(TOP_P, &row), 1).len() > 3);
    assert!(compared(TOP_P, &shorten, other).unwrap_or_default().starts_with("top_p_count is 1"));
}
