//! Benchmarks products at the sizes of SmolLM2-135M, GPT-2 and a model with 64 channels, on one thread and on rayon's
//! pool. Criterion's throughput counts floating-point operations (Gelem/s is GFLOP/s); the machine's measured peak is
//! printed as well.

#![allow(missing_docs, clippy::unwrap_used)]

mod peak;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use stillhouse_cpu::{
    Arithmetic, Epilogue, Layout, PackedWeight, Rows, RowsMut, Scratch, Threads, level_name, product,
};

/// Name, rows, outputs, inputs.
const SIZES: [(&str, usize, usize, usize); 14] = [
    ("smollm2 qkv", 256, 960, 576),
    ("smollm2 attention out", 256, 576, 576),
    ("smollm2 gate and up", 256, 3072, 576),
    ("smollm2 gate and up", 2048, 3072, 576),
    ("smollm2 down", 256, 576, 1536),
    ("smollm2 head", 160, 49_152, 576),
    ("smollm2 one token", 1, 3072, 576),
    ("smollm2 four tokens", 4, 3072, 576),
    ("smollm2 eight tokens", 8, 3072, 576),
    ("smollm2 head, one token", 1, 49_152, 576),
    ("smollm2 head, eight tokens", 8, 49_152, 576),
    ("gpt2 mlp", 256, 3072, 768),
    ("llama-1b down", 256, 2048, 8192),
    ("64 channels, head", 256, 50_257, 64),
];

fn numbers(n: usize, period: usize) -> Vec<f32> {
    (0..n).map(|i| (i % period) as f32 * 0.01 - 0.5).collect()
}

fn products(c: &mut Criterion) {
    for arithmetic in Arithmetic::ALL.into_iter().filter(|a| a.is_available()) {
        for (instructions, work) in peak::peak_loops(arithmetic) {
            let [one, all] = [1, rayon::current_num_threads()].map(|threads| peak::gflops(work, threads, 0.3));
            println!("peak of {} ({instructions}): {one:.0} GFLOP/s on one thread, {all:.0} on all", arithmetic.name());
        }
        let mut group = c.benchmark_group(format!("product {} {}", arithmetic.name(), level_name(arithmetic)));
        group.sample_size(20).measurement_time(std::time::Duration::from_millis(500));
        group.warm_up_time(std::time::Duration::from_millis(100));
        for (name, rows, outputs, inputs) in SIZES {
            let (x, weight) = (numbers(rows * inputs, 101), numbers(outputs * inputs, 97));
            let packed =
                match PackedWeight::new(&weight, outputs, inputs, Layout::Outputs { stride: inputs }, arithmetic) {
                    Ok(packed) => packed,
                    Err(e) => {
                        eprintln!("{name}: {e}");
                        continue;
                    }
                };
            let mut out = vec![0.0; rows * outputs];
            let mut scratch = Scratch::new();
            group.throughput(Throughput::Elements(2 * (rows * outputs * inputs) as u64));
            for (threads, how) in [(Threads::One, "one thread"), (Threads::Pool, "pool")] {
                group.bench_function(BenchmarkId::new(format!("{name} {rows}x{outputs}x{inputs}"), how), |b| {
                    b.iter(|| {
                        let x = Rows { data: black_box(&x), rows, stride: inputs };
                        let to = RowsMut { data: &mut out, rows, stride: outputs };
                        product(x, &packed, None, Epilogue::Store, to, threads, &mut scratch)
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
