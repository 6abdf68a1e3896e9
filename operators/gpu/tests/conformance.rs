//! Checks every way of extraction against its specification: `stillhouse_noise` on the CPU. One suite for all ways.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "conformance/checks.rs"]
mod checks;
#[path = "../../noise/tests/common/mod.rs"]
mod common;
#[path = "conformance/extraction.rs"]
mod extraction;
#[path = "conformance/signals.rs"]
mod signals;
#[path = "conformance/words.rs"]
mod words;

use std::sync::Arc;

use checks::check;
use extraction::{ExtractFn, MutantHost, Slice, on_cpu, on_device, on_host, upload};
use stillhouse_gpu::Device;
use stillhouse_gpu::extract::{ExtractRequest, Extractor, Noise};
use stillhouse_gpu::net::{Activation, Architecture, Net, NumberFormat, Shape, Source};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{DrawKey, Signal, Signals, Tolerance, ValueType};
use stillhouse_signals::{Candidates, Entropy, LogPartitions, SampledLogits, TopK, TopP};

fn request(vocab: usize, noise: Option<Noise>, draws: u32, topk: usize) -> ExtractRequest {
    ExtractRequest {
        vocab,
        stride: vocab,
        keys: DrawKey::draws(0x5EED, draws),
        noise,
        signals: Signals::new(top_k(topk)),
    }
}

fn top_k(k: usize) -> Vec<Arc<dyn Signal>> {
    if k == 0 { Vec::new() } else { vec![Arc::new(TopK { k })] }
}

fn replay(tolerance: f64, value_type: ValueType, condition: bool) -> Option<Noise> {
    Some(Noise::Replay { tolerance: Tolerance::new(tolerance).unwrap(), value_type, condition })
}

/// Rows of every shape, with tokens from likely to nearly impossible.
fn mixed_rows(vocab: usize, rows: u32, seed: u64) -> Slice {
    let mut slice = Slice::new(vocab);
    for i in 0..rows {
        let logits = match i % 12 {
            10 | 11 => common::zipf_logits(vocab, seed + u64::from(i), 0.8 + 0.05 * f64::from(i % 20)),
            shape => common::shaped_logits(vocab, seed + u64::from(i), shape),
        };
        let uniform = f64::from(i * 37 % 101) / 101.0;
        let token = if i % 3 == 2 { (uniform * vocab as f64) as u32 } else { common::sample(&logits, uniform) };
        slice.push(&logits, token);
    }
    slice
}

/// Rows like those of a language model.
fn teacher_like(vocab: usize, rows: u64) -> Slice {
    let mut slice = Slice::new(vocab);
    for row in 0..rows {
        let logits = common::zipf_logits(vocab, row, 1.2 + (row % 17) as f64 / 16.0);
        slice.push(&logits, common::sample(&logits, (row as f64 + 0.5) / rows as f64));
    }
    slice
}

/// Small and odd vocabularies, both value types, both conditions, several tolerances and numbers of draws.
fn small_suite(extract: ExtractFn<'_>) -> Result<(), String> {
    for (i, vocab) in [2usize, 3, 5, 31, 257, 1000, 1031].into_iter().enumerate() {
        let slice = mixed_rows(vocab, 24, 100 * i as u64);
        for (j, tolerance) in [1e-3, 1e-5, 1e-4, 0.1].into_iter().enumerate() {
            let value_type = if (i + j) % 2 == 0 { ValueType::F16 } else { ValueType::F32 };
            let draws = if j == 0 { 3 } else { 1 };
            check(extract, &slice, &request(vocab, replay(tolerance, value_type, j != 2), draws, 0))
                .map_err(|e| format!("V = {vocab}: {e}"))?;
        }
    }
    Ok(())
}

/// Ties, zeros of both signs, k beyond the vocabulary, padded rows, and rising rows, in which every entry is the
/// largest so far.
fn topk_suite(extract: ExtractFn<'_>) -> Result<(), String> {
    for (vocab, levels) in [(1usize, 3u32), (5, 2), (64, 4), (130, 1), (5000, 40), (9000, 1 << 30)] {
        let mut uniforms = stillhouse_noise::keyed_uniforms(3, "top-k", vocab as u64, 0);
        let mut slice = Slice::new(vocab);
        let ties: Vec<f32> = (0..vocab).map(|_| uniforms.below(levels) as f32 * 0.1 - 1.0).collect();
        let rising: Vec<f32> = (0..vocab).map(|k| k as f32 * 1e-3 - 2.0).collect();
        let zeros: Vec<f32> = (0..vocab).map(|k| if k % 3 == 0 { -0.0 } else { 0.0 }).collect();
        for logits in [ties, rising, zeros] {
            slice.push(&logits, 0);
        }
        for k in [1, 7, 64, 1024, 2048] {
            let request = ExtractRequest { stride: vocab + 3, ..request(vocab, None, 1, k) };
            check(extract, &slice, &request).map_err(|e| format!("V = {vocab}, k = {k}: {e}"))?;
        }
    }
    Ok(())
}

fn dense_suite(extract: ExtractFn<'_>) -> Result<(), String> {
    for vocab in [2usize, 5, 257, 1031, 5000] {
        let slice = mixed_rows(vocab, 24, 900 + vocab as u64);
        for (value_type, condition) in [(ValueType::F16, true), (ValueType::F32, true), (ValueType::F16, false)] {
            let noise = Some(Noise::Dense { value_type, condition });
            check(extract, &slice, &request(vocab, noise, 2, 0))
                .map_err(|e| format!("V = {vocab}, {value_type}: {e}"))?;
        }
    }
    Ok(())
}

fn every_signal(vocab: usize, power: f64, mass: f64, most: usize) -> Vec<Arc<dyn Signal>> {
    vec![
        Arc::new(LogPartitions { temperatures: vec![1.0, 2.0, 0.5] }),
        Arc::new(Entropy),
        Arc::new(Candidates { tokens: vec![0, vocab as u32 - 1, vocab as u32 / 2] }),
        Arc::new(SampledLogits { draws: 50, power, seed: 9 }),
        Arc::new(TopP { mass, max_entries: most }),
    ]
}

/// Rows of every shape, also near-certain ones and ties. Vocabularies below, at and above a block of sums. Signals with
/// top-k and noise, and each alone.
fn signals_suite(extract: ExtractFn<'_>) -> Result<(), String> {
    for (i, vocab) in [1usize, 2, 5, 257, 1024, 1031, 5000].into_iter().enumerate() {
        let slice = if vocab == 1 { near_certain(1) } else { mixed_rows(vocab, 24, 500 * i as u64) };
        for (power, mass, most, topk) in [(1.0, 0.9, 64, 0), (0.7, 0.999, 2048, 5), (1.5, 1.0, 3, 20)] {
            let all = Signals::new([top_k(topk), every_signal(vocab, power, mass, most)].concat());
            let noise = if topk == 5 { replay(1e-3, ValueType::F16, true) } else { None };
            let all = ExtractRequest { stride: vocab + 3, signals: all, ..request(vocab, noise, 1, 0) };
            check(extract, &slice, &all).map_err(|e| format!("V = {vocab}, power {power}: {e}"))?;
        }
        for one in every_signal(vocab, 1.0, 0.95, 100) {
            let one = ExtractRequest { signals: Signals::new(vec![one]), ..request(vocab, None, 1, 0) };
            check(extract, &slice, &one).map_err(|e| format!("V = {vocab}, {:?}: {e}", one.signals))?;
        }
    }
    Ok(())
}

/// Two rows: one with nearly all probability on one entry, one whose other entries are too small to count.
fn near_certain(vocab: usize) -> Slice {
    let mut slice = Slice::new(vocab);
    for lead in [20.0, 100.0] {
        let logits: Vec<f32> = (0..vocab).map(|k| if k == vocab / 2 { lead } else { -(k as f32) * 1e-3 }).collect();
        slice.push(&logits, vocab as u32 / 2);
    }
    slice
}

#[test]
fn other_signals_on_the_host() {
    signals_suite(&on_host(5)).unwrap();
    for vocab in [130, 3000] {
        let signals = Signals::new(every_signal(vocab, 0.8, 0.99999, 200));
        let request = ExtractRequest { signals, ..request(vocab, None, 1, 0) };
        check(&on_host(6), &near_certain(vocab), &request).unwrap();
    }
}

/// The extractor refuses a top-p beyond the kernels' limit, and candidates outside the vocabulary.
#[test]
fn signals_that_no_kernel_computes_are_refused() {
    let device: Arc<dyn Device> = Arc::new(Host::new(0));
    let refused = |signal: Arc<dyn Signal>| {
        let request = ExtractRequest { signals: Signals::new(vec![signal]), ..request(5000, None, 1, 0) };
        Extractor::new(&device, request, 4).unwrap_err().to_string()
    };
    let too_many = refused(Arc::new(TopP { mass: 0.9, max_entries: 2049 }));
    assert!(too_many.contains("most likely tokens of a row") && too_many.contains("2049"), "{too_many}");
    let outside = refused(Arc::new(Candidates { tokens: vec![1, 5000] }));
    assert!(outside.contains("5000"), "{outside}");
}

#[test]
fn topk_on_the_host() {
    topk_suite(&on_host(3)).unwrap();
}

#[test]
fn dense_noise_on_the_host() {
    dense_suite(&on_host(4)).unwrap();
}

#[test]
fn errors_are_those_of_the_cpu() {
    let vocab = 1031;
    for noise in
        [None, replay(1e-3, ValueType::F16, true), Some(Noise::Dense { value_type: ValueType::F16, condition: true })]
    {
        for (bad, at) in [(f32::NAN, 1030), (f32::NEG_INFINITY, 0), (f32::INFINITY, 513)] {
            let mut slice = mixed_rows(vocab, 6, 77);
            slice.logits[4 * vocab + at] = bad;
            slice.logits[5 * vocab] = f32::NAN;
            let error = check(&on_host(1), &slice, &request(vocab, noise, 2, 3)).unwrap_err();
            assert!(error.contains(&format!("the logit of token {at} is {bad}")), "{error}");
        }
    }
    let mut slice = mixed_rows(vocab, 4, 78);
    slice.tokens[2] = vocab as u32;
    let error = check(&on_host(1), &slice, &request(vocab, replay(1e-3, ValueType::F16, true), 2, 0)).unwrap_err();
    assert!(error.contains("token 1031 is not below the vocabulary size 1031"), "{error}");
}

/// The CPU computes flat rows of many entries at the smallest tolerance: they have more corrections than a list holds.
#[test]
fn what_the_kernels_cannot_do_the_cpu_does() {
    let vocab = 6000;
    let mut slice = Slice::new(vocab);
    let zipf = common::zipf_logits(vocab, 1, 1.5);
    for i in 0..6u32 {
        let logits = if i % 2 == 0 { vec![0.25; vocab] } else { zipf.clone() };
        slice.push(&logits, i * 7);
    }
    for value_type in [ValueType::F16, ValueType::F32] {
        let got = check(&on_host(2), &slice, &request(vocab, replay(1e-5, value_type, true), 2, 0)).unwrap();
        assert!((3..=6).contains(&got.fallbacks), "{}", got.fallbacks);
    }
}

/// A device without 8-bit products returns an error before any weight is read.
#[test]
fn a_device_without_fp8_refuses_it() {
    struct Nothing;
    impl Source for Nothing {
        fn tensor(&mut self, name: &str, _: &[usize]) -> stillhouse_gpu::Result<Vec<f32>> {
            panic!("{name} is read");
        }
    }
    let shape = Shape {
        architecture: Architecture::Gpt2,
        vocab: 8,
        width: 16,
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 16,
        inner: 16,
        activation: Activation::GeluTanh,
        scaled: true,
        scaled_by_layer: false,
        eps: 1e-5,
        positions: 4,
        tied: true,
        attention_bias: true,
        mlp_bias: true,
    };
    let mutant = MutantHost { host: Host::new(0), prefix: "broken", kernels: "noise_" };
    let device: Arc<dyn Device> = Arc::new(mutant);
    let message = Net::load(&device, shape, NumberFormat::Fp8, None, &mut Nothing, 4).unwrap_err().to_string();
    assert_eq!(message, "products in fp8: got broken, but it has no products of e4m3, valid: f32, bf16, f16");
}

/// The host receives 16 bytes per row and the corrections, with index and value as short as possible. The copy is sized
/// for 1.25 times the corrections of the slice before.
#[test]
fn few_bytes_come_to_the_host() {
    for (vocab, value_type, correction_bytes) in [
        (50_257, ValueType::F16, 4),
        (65_536, ValueType::F16, 4),
        (65_537, ValueType::F16, 6),
        (1031, ValueType::F32, 6),
        (65_537, ValueType::F32, 8),
    ] {
        let rows = 6;
        let slice = teacher_like(vocab, rows);
        let request = request(vocab, replay(1e-3, value_type, true), 1, 0);
        let host = Arc::new(Host::new(0));
        let device: Arc<dyn Device> = host.clone();
        let logits = upload(&device, &slice, vocab);
        let mut extractor = Extractor::new(&device, request, rows as usize).unwrap();
        let mut bytes = || {
            let before = host.copied_out();
            // SAFETY: the buffer holds these rows, and lives until they are collected
            let begun = unsafe { extractor.begin(logits.pointer(), &slice.positions()) }.unwrap();
            let found = extractor.collect(begun).unwrap().replay.unwrap().indices.len();
            (found as u64, host.copied_out() - before)
        };
        let (found, _) = bytes();
        let (again, copied) = bytes();
        assert_eq!(again, found);
        // The 64 extra corrections allow for more in the next slice.
        let ahead = (1.25 * found as f64) as u64 + 64;
        assert!(
            copied <= rows * 16 + ahead * correction_bytes && copied >= rows * 16 + found * correction_bytes,
            "V = {vocab}: {copied}"
        );
        println!("V = {vocab}, {value_type}: {found} corrections of {rows} rows, {copied} bytes");
    }
}

/// [`Extractor::bytes`] is exact: jobs choose their batch size by it.
#[test]
fn an_extractor_takes_as_much_memory_as_was_said() {
    let all = |noise, draws, topk, signals: Vec<Arc<dyn Signal>>| {
        let signals = Signals::new([top_k(topk), signals].concat());
        ExtractRequest { signals, stride: 264, ..request(257, noise, draws, 0) }
    };
    let dense = |value_type| Some(Noise::Dense { value_type, condition: true });
    for request in [
        all(None, 1, 0, Vec::new()),
        all(replay(1e-3, ValueType::F16, true), 1, 5, Vec::new()),
        all(replay(1e-3, ValueType::F16, true), 4, 0, every_signal(257, 1.0, 0.9, 64)),
        all(dense(ValueType::F16), 3, 0, Vec::new()),
        all(dense(ValueType::F32), 2, 300, every_signal(257, 0.7, 0.999, 300)),
    ] {
        for rows in [1, 9] {
            let host = Arc::new(Host::new(0));
            let device: Arc<dyn Device> = host.clone();
            let extractor = Extractor::new(&device, request.clone(), rows).unwrap();
            assert_eq!(Extractor::bytes(&request, rows), host.used(), "{rows} rows of {request:?}");
            drop(extractor);
            assert_eq!((host.used(), host.used_pinned()), (0, 0));
        }
    }
}

#[test]
fn slices_follow_each_other_without_allocations() {
    let host = Arc::new(Host::new(9));
    let device: Arc<dyn Device> = host.clone();
    let request = ExtractRequest { stride: 264, ..request(257, replay(1e-3, ValueType::F16, true), 2, 5) };
    let slices: Vec<Slice> = [7, 3, 7, 0].into_iter().map(|rows| mixed_rows(257, rows, 40 + u64::from(rows))).collect();
    let expected: Vec<_> = slices.iter().map(|slice| on_device(&device, slice, &request).unwrap()).collect();
    let logits: Vec<_> = slices.iter().map(|slice| upload(&device, slice, 264)).collect();
    let mut extractor = Extractor::new(&device, request, 7).unwrap();
    let before = host.allocations();
    // SAFETY: the buffers outlive the extractor's work
    let begin =
        |extractor: &mut Extractor, i: usize| unsafe { extractor.begin(logits[i].pointer(), &slices[i].positions()) };
    let mut ahead = begin(&mut extractor, 0).unwrap();
    for i in 1..4 {
        let next = begin(&mut extractor, i).unwrap();
        assert!(begin(&mut extractor, i).unwrap_err().to_string().contains("slices in flight"));
        assert!(extractor.collect(ahead).unwrap() == expected[i - 1]);
        ahead = next;
    }
    assert!(extractor.collect(ahead).unwrap() == expected[3]);
    assert_eq!(host.allocations(), before);
    let large = mixed_rows(257, 8, 1);
    // SAFETY: the extractor refuses the slice
    let refused = unsafe { extractor.begin(logits[0].pointer(), &large.positions()) };
    assert!(refused.unwrap_err().to_string().contains("rows of a slice"));
}

/// The suite detects kernels with one bug each: a sum that omits warps, a row that ends one entry early, a missing
/// barrier.
#[test]
fn the_suite_sees_mistakes() {
    for prefix in ["broken_reduction_", "broken_tail_", "broken_race_"] {
        let seen = (1..4).filter(|&seed| {
            let device: Arc<dyn Device> = Arc::new(MutantHost { host: Host::new(seed), prefix, kernels: "noise_" });
            let extract = move |slice: &Slice, request: &ExtractRequest| on_device(&device, slice, request);
            let result = small_suite(&extract);
            println!("{prefix} {seed}: {result:?}");
            result.is_err()
        });
        assert_eq!(seen.count(), 3, "{prefix}");
    }
}

/// The suite detects the same bugs in one kernel of the other signals at a time.
#[test]
fn the_suite_sees_mistakes_in_signals() {
    for (prefix, kernels) in [
        ("broken_reduction_", "noise_log_partitions"),
        ("broken_reduction_", "noise_entropy"),
        ("broken_reduction_", "noise_top_p"),
        ("broken_tail_", "noise_log_partitions"),
        ("broken_tail_", "noise_entropy"),
        ("broken_tail_", "noise_sampled_logits"),
        ("broken_tail_", "noise_top_p"),
    ] {
        let device: Arc<dyn Device> = Arc::new(MutantHost { host: Host::new(1), prefix, kernels });
        let extract = move |slice: &Slice, request: &ExtractRequest| on_device(&device, slice, request);
        let result = signals_suite(&extract);
        assert!(result.is_err(), "{prefix} in {kernels}");
        println!("{kernels} {prefix}: {result:?}");
    }
}

#[test]
fn the_cpu_meets_its_own_specification() {
    small_suite(&on_cpu).unwrap();
    topk_suite(&on_cpu).unwrap();
    dense_suite(&on_cpu).unwrap();
    signals_suite(&on_cpu).unwrap();
}

#[test]
fn small_vocabularies_on_the_host() {
    small_suite(&on_host(0)).unwrap();
}

#[test]
fn every_schedule_gives_the_same_bytes() {
    let slice = mixed_rows(1031, 12, 5);
    for noise in
        [replay(1e-4, ValueType::F16, true), Some(Noise::Dense { value_type: ValueType::F16, condition: true })]
    {
        let signals = Signals::new([top_k(20), every_signal(1031, 0.9, 0.9, 64)].concat());
        let request = ExtractRequest { signals, ..request(1031, noise, 2, 0) };
        let first = on_host(0)(&slice, &request).unwrap();
        for seed in 1..5 {
            assert!(on_host(seed)(&slice, &request).unwrap() == first, "schedule {seed}");
        }
    }
}

/// Compares the number of corrections with the CPU's, and returns the ratio and the number of rows left to the CPU.
fn compare(vocab: usize, rows: u64, tolerance: f64, value_type: ValueType) -> (f64, u64) {
    let slice = teacher_like(vocab, rows);
    let request = request(vocab, replay(tolerance, value_type, true), 1, 0);
    let got = check(&on_host(0), &slice, &request).unwrap();
    let from_cpu = on_cpu(&slice, &request).unwrap().replay.unwrap().indices.len();
    let device_count = got.replay.as_ref().unwrap().indices.len();
    let ratio = device_count as f64 / from_cpu as f64;
    println!(
        "V = {vocab}, {tolerance}, {value_type}: {device_count} corrections, the CPU {from_cpu} ({ratio:.3}), {} of {rows} rows left to it",
        got.fallbacks
    );
    (ratio, got.fallbacks)
}

#[test]
fn about_as_many_corrections_as_on_the_cpu() {
    for (tolerance, value_type) in
        [(1e-3, ValueType::F16), (1e-4, ValueType::F16), (1e-3, ValueType::F32), (1e-4, ValueType::F32)]
    {
        let (ratio, fallbacks) = compare(8000, 150, tolerance, value_type);
        assert!(ratio <= 1.05 && fallbacks == 0, "{ratio}, {fallbacks}");
    }
}

#[test]
fn large_vocabularies() {
    for (vocab, rows, tolerance) in [(50_257, 8, 1e-3), (262_144, 2, 1e-3), (151_936, 2, 1e-4), (50_257, 4, 0.5)] {
        let (ratio, fallbacks) = compare(vocab, rows, tolerance, ValueType::F16);
        assert!(ratio <= 1.05 && fallbacks == 0, "{ratio}, {fallbacks}");
    }
}

/// A measurement to read, which CI does not run: `--run-ignored all`.
#[test]
#[ignore = "a measurement"]
fn measured_ratios() {
    for (tolerance, value_type, rows) in [
        (1e-3, ValueType::F16, 2000),
        (1e-4, ValueType::F16, 300),
        (1e-3, ValueType::F32, 300),
        (1e-4, ValueType::F32, 300),
        (2e-4, ValueType::F16, 300),
        (1e-5, ValueType::F16, 100),
    ] {
        compare(50_257, rows, tolerance, value_type);
    }
}
