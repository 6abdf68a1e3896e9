//! Measures the cost of each signal of one token on one core, without the softmax.

#![allow(clippy::unwrap_used)] // a benchmark may panic, like a test

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use stillhouse_noise::{LoadedRow, Signal, Signals, Softmax, keyed_uniforms};
use stillhouse_signals::{Candidates, Entropy, LogPartitions, SampledLogits, TopP};

/// Zipf-like logits: a few likely tokens and a long tail, as a language model produces.
fn logits(vocab: usize) -> Vec<f32> {
    let mut uniforms = keyed_uniforms(1, "bench", 0, 0);
    let mut ranks: Vec<u32> = (0..vocab as u32).collect();
    uniforms.shuffle(&mut ranks);
    let logit = |rank: &u32| (-1.7 * (f64::from(*rank) + 1.0).ln() + 2.0 * uniforms.next_f64()) as f32;
    ranks.iter().map(logit).collect()
}

fn benches(c: &mut Criterion) {
    for vocab in [49_152usize, 50_257] {
        let logits = logits(vocab);
        let mut softmax = Softmax::new(vocab).unwrap();
        softmax.load(&logits).unwrap();
        let mut group = c.benchmark_group(format!("V={vocab}"));
        group.throughput(Throughput::Elements(1));
        let signals: [(&str, Arc<dyn Signal>); 5] = [
            ("logz at T = 1 and 2", Arc::new(LogPartitions { temperatures: vec![1.0, 2.0] })),
            ("entropy", Arc::new(Entropy)),
            ("100 candidates", Arc::new(Candidates { tokens: (0..100).collect() })),
            ("50 sampled logits", Arc::new(SampledLogits { draws: 50, power: 1.0, seed: 1 })),
            ("top-p 0.98", Arc::new(TopP { mass: 0.98, max_entries: 256 })),
        ];
        for (name, signal) in signals {
            let (signals, mut position) = (Signals::new(vec![signal]), 0);
            group.bench_function(name, |b| {
                b.iter(|| {
                    position += 1;
                    black_box(signals.compute(&LoadedRow::new(&softmax, &logits, 1, position)))
                });
            });
        }
        group.finish();
    }
}

criterion_group!(signals, benches);
criterion_main!(signals);
