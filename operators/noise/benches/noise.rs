//! Measures the cost of one token on one core: the steps of an encoding, and the whole encoding.
//!
//! `throughput` is tokens per second. Logits are Zipf-like with noise: a few likely tokens and a long tail, as a
//! language model produces.

#![allow(clippy::unwrap_used)] // a benchmark may panic, like a test

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use stillhouse_noise::{
    Correction, DrawKey, Encoder, NoiseStream, Output, OutputKind, RowWriter, Softmax, StoredToken, Tolerance,
    ValueType, decode_softmax, dense_noise, exponentials, keyed_uniforms, philox_words, sample_sequential, top_k,
};

/// Rows of Zipf-like logits, and a token drawn from each.
fn rows(vocab: usize, n: usize) -> Vec<(Vec<f32>, u32)> {
    (0..n)
        .map(|row| {
            let mut uniforms = keyed_uniforms(1, "bench", row as u64, 0);
            let mut ranks: Vec<u32> = (0..vocab as u32).collect();
            uniforms.shuffle(&mut ranks);
            let sharpness = 1.2 + uniforms.next_f64();
            let logits: Vec<f32> = ranks
                .iter()
                .map(|&rank| (-sharpness * (f64::from(rank) + 1.0).ln() + 2.0 * uniforms.next_f64()) as f32)
                .collect();
            let stream = NoiseStream::new(DrawKey::new(99, 0), row as u64, 0);
            let x = sample_sequential(&logits, &stream, &mut vec![0.0; vocab]).unwrap();
            (logits, x)
        })
        .collect()
}

fn benches(c: &mut Criterion) {
    for vocab in [49_152usize, 50_257] {
        let rows = rows(vocab, 64);
        let mut group = c.benchmark_group(format!("V={vocab}"));
        group.throughput(Throughput::Elements(1));
        let mut at = 0u32;
        let mut next = || {
            at += 1;
            (&rows[at as usize % rows.len()], NoiseStream::new(DrawKey::new(42, 0), u64::from(at / 1024), at % 1024))
        };
        let mut row = vec![0f32; vocab];
        let mut words = vec![0u32; vocab.next_multiple_of(1024)];
        group.bench_function("philox", |b| {
            b.iter(|| philox_words(&next().1, black_box(&mut words)));
        });
        group.bench_function("exponentials", |b| {
            b.iter(|| exponentials(&next().1, black_box(&mut row)));
        });
        let mut softmax = Softmax::new(vocab).unwrap();
        group.bench_function("log-softmax", |b| {
            b.iter(|| {
                softmax.load(&next().0.0).unwrap();
                black_box(softmax.logsumexp())
            });
        });
        group.bench_function("dense", |b| {
            b.iter(|| {
                let ((logits, x), stream) = next();
                dense_noise(&mut softmax, logits, *x, &stream, black_box(&mut row)).unwrap()
            });
        });
        group.bench_function("top-64", |b| {
            b.iter(|| top_k(&next().0.0, 64).unwrap());
        });
        // Measures the cost of the condition: the same encoding with and without it.
        let conditions = [true, false];
        for (tolerance, condition) in [1e-2, 1e-3, 2e-4].into_iter().flat_map(|t| conditions.map(|c| (t, c))) {
            for value_type in [ValueType::F16, ValueType::F32] {
                let encoder = Encoder::new(vocab, Tolerance::new(tolerance).unwrap(), value_type).unwrap();
                let mut encoder = encoder.with_condition(condition);
                let without = if condition { "" } else { ", no condition" };
                let mut corrections = Vec::new();
                let (mut tokens, mut stored, mut unreachable, mut total) = (0usize, 0usize, 0usize, 0f64);
                group.bench_function(format!("encode {value_type} tolerance={tolerance:e}{without}"), |b| {
                    b.iter(|| {
                        let ((logits, x), stream) = next();
                        corrections.clear();
                        tokens += 1;
                        match encoder.encode(logits, *x, &stream, &mut corrections) {
                            Ok(encoded) => total += encoded.total_variation,
                            Err(_) => unreachable += 1,
                        }
                        stored += corrections.len();
                    });
                });
                println!(
                    "    {:.2} corrections per token, mean TV {:.2e}, {unreachable} of {tokens} unreachable",
                    stored as f64 / tokens as f64,
                    total / tokens as f64
                );
            }
        }
        group.bench_function("decode softmax", |b| {
            b.iter(|| {
                let ((_, x), stream) = next();
                let stored = StoredToken { token: *x, logprob: -3.0, corrections: &[] };
                decode_softmax(&stored, &stream, black_box(&mut row)).unwrap();
            });
        });
        // The output for trainers, with six corrections per token: [V] in the output's type.
        let corrections: Vec<Correction> =
            (0..6).map(|i| Correction { index: i * vocab as u32 / 6, logprob: -3.0 - i as f32 }).collect();
        let mut half = vec![half::f16::ZERO; vocab];
        let mut brain = vec![half::bf16::ZERO; vocab];
        for (name, kind, temperature) in [
            ("softmax", OutputKind::Softmax, 1.0),
            ("softmax τ=0.85", OutputKind::Softmax, 0.85),
            ("gumbel", OutputKind::Gumbel, 1.0),
            ("gaussian", OutputKind::Gaussian, 1.0),
            ("uniform", OutputKind::Uniform, 1.0),
        ] {
            let mut writer = RowWriter::new(vocab, Output::new(kind, temperature).unwrap());
            let mut row_of = |ty: &str| {
                group.bench_function(format!("replay {name} {ty}"), |b| {
                    b.iter(|| {
                        let ((_, x), stream) = next();
                        let stored = StoredToken { token: *x, logprob: -3.0, corrections: &corrections };
                        match ty {
                            "f32" => writer.replay(&stored, &stream, black_box(&mut row)).unwrap(),
                            "f16" => writer.replay(&stored, &stream, black_box(&mut half)).unwrap(),
                            _ => writer.replay(&stored, &stream, black_box(&mut brain)).unwrap(),
                        }
                    });
                });
            };
            row_of("f32");
            if name == "softmax" || name == "gumbel" {
                row_of("f16");
                row_of("bf16");
            }
        }
        group.finish();
    }
}

criterion_group! {
    name = noise;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(1))
        .warm_up_time(std::time::Duration::from_millis(300)).without_plots();
    targets = benches
}
criterion_main!(noise);
