//! Benchmarks prefill in tokens per second: hidden states and logits of every position, as an extractor needs them.
//!
//! `nano` is a random GPT-2 with the shape of the demo's teacher (4 layers of 64, V = 50,257). If the environment sets
//! `STILLHOUSE_SMOLLM2=FILE.gguf`, that model is measured too.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::HashMap;
use std::path::Path;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use stillhouse_teacher::candle_core::{Device, Tensor, safetensors};
use stillhouse_teacher::{HostTeacher, Precision, load_on_host};

const ROWS: usize = 64;
const CONFIG: &str = r#"{"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 64, "n_head": 4,
    "n_layer": 4, "activation_function": "gelu_new"}"#;

/// Writes a GPT-2 whose weights are values of a fixed sine wave.
fn write_nano(folder: &Path) {
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        let count = shape.iter().product::<usize>();
        let values = (0..count).map(|i| ((i % 9973) as f32 * 0.37).sin() * 0.05).collect::<Vec<_>>();
        tensors.insert(name, Tensor::from_vec(values, shape, &Device::Cpu).unwrap());
    };
    add("wte.weight".into(), &[50257, 64]);
    add("wpe.weight".into(), &[1024, 64]);
    add("ln_f.weight".into(), &[64]);
    add("ln_f.bias".into(), &[64]);
    for i in 0..4 {
        let linear =
            [("attn.c_attn", 64, 192), ("attn.c_proj", 64, 64), ("mlp.c_fc", 64, 256), ("mlp.c_proj", 256, 64)];
        for (name, inputs, outputs) in linear {
            add(format!("h.{i}.{name}.weight"), &[inputs, outputs]);
            add(format!("h.{i}.{name}.bias"), &[outputs]);
        }
        for name in ["ln_1", "ln_2"] {
            add(format!("h.{i}.{name}.weight"), &[64]);
            add(format!("h.{i}.{name}.bias"), &[64]);
        }
    }
    safetensors::save(&tensors, folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), CONFIG).unwrap();
}

fn prefill(teacher: &dyn HostTeacher, tokens: &[u32], batch: usize, length: usize, logits: &mut Vec<f32>) {
    let hidden = teacher.hidden(tokens, batch, length).unwrap().flatten(0, 1).unwrap();
    for first in (0..tokens.len()).step_by(ROWS) {
        teacher.logits_into(&hidden.narrow(0, first, ROWS).unwrap(), logits).unwrap();
    }
}

fn bench(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().unwrap();
    write_nano(folder.path());
    let mut models = vec![("nano", folder.path().to_path_buf())];
    models.extend(std::env::var_os("STILLHOUSE_SMOLLM2").map(|path| ("smollm2", path.into())));
    for (name, path) in models {
        let teacher = load_on_host(&path, Precision::F32).unwrap();
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        for (batch, length) in [(4, 256), (1, 1024), (4, 1024)] {
            let tokens: Vec<u32> = (0..(batch * length) as u32).map(|i| i * 7919 % 49_000).collect();
            group.throughput(Throughput::Elements(tokens.len() as u64));
            let shape = format!("{batch}x{length}");
            group.bench_function(BenchmarkId::new("hidden", &shape), |bencher| {
                bencher.iter(|| teacher.hidden(&tokens, batch, length).unwrap());
            });
            let mut logits = Vec::new();
            group.bench_function(BenchmarkId::new("logits", &shape), |bencher| {
                bencher.iter(|| prefill(teacher.as_ref(), &tokens, batch, length, &mut logits));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
