//! The extraction against its specification, which is what `stillhouse_noise` does on the CPU: one suite for every way to do it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "conformance/checks.rs"]
mod checks;
#[path = "../../noise/tests/common/mod.rs"]
mod common;
#[path = "conformance/ways.rs"]
mod ways;

use std::sync::Arc;

use checks::check;
use stillhouse_gpu::extract::{Asked, Extracted, Extractor, Noise};
use stillhouse_gpu::{Arg, Buffer, Device, Launch, Stream};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{DrawKey, NoiseStream, Tolerance, ValueType, exponentials};
use ways::{Broken, Slice, Way, on_cpu, on_device, on_host, upload};

fn asked(vocab: usize, noise: Option<Noise>, draws: u32, topk: usize) -> Asked {
    Asked { vocab, stride: vocab, keys: DrawKey::draws(0x5EED, draws), noise, topk }
}

fn replay(tolerance: f64, value_type: ValueType, condition: bool) -> Option<Noise> {
    Some(Noise::Replay { tolerance: Tolerance::new(tolerance).unwrap(), value_type, condition })
}

/// Rows of every shape, with tokens from likely to hardly possible.
fn mixed(vocab: usize, rows: u32, seed: u64) -> Slice {
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

/// Rows as a language model gives them.
fn teacher_like(vocab: usize, rows: u64) -> Slice {
    let mut slice = Slice::new(vocab);
    for row in 0..rows {
        let logits = common::zipf_logits(vocab, row, 1.2 + (row % 17) as f64 / 16.0);
        slice.push(&logits, common::sample(&logits, (row as f64 + 0.5) / rows as f64));
    }
    slice
}

/// Small and odd vocabularies, both types, both conditions, several tolerances and draws.
fn small_suite(way: Way<'_>) -> Result<(), String> {
    for (i, vocab) in [2usize, 3, 5, 31, 257, 1000, 1031].into_iter().enumerate() {
        let slice = mixed(vocab, 24, 100 * i as u64);
        for (j, tolerance) in [1e-3, 1e-5, 1e-4, 0.1].into_iter().enumerate() {
            let value_type = if (i + j) % 2 == 0 { ValueType::F16 } else { ValueType::F32 };
            let draws = if j == 0 { 3 } else { 1 };
            check(way, &slice, &asked(vocab, replay(tolerance, value_type, j != 2), draws, 0))
                .map_err(|e| format!("V = {vocab}: {e}"))?;
        }
    }
    Ok(())
}

#[test]
fn the_cpu_meets_its_own_specification() {
    small_suite(&on_cpu).unwrap();
}

#[test]
fn small_vocabularies_on_the_host() {
    small_suite(&on_host(0)).unwrap();
}

#[test]
fn every_schedule_gives_the_same_bytes() {
    let slice = mixed(1031, 12, 5);
    for noise in [replay(1e-4, ValueType::F16, true), Some(Noise::Dense { value_type: ValueType::F16, condition: true })] {
        let asked = asked(1031, noise, 2, 20);
        let first = on_host(0)(&slice, &asked).unwrap();
        for seed in 1..5 {
            assert!(on_host(seed)(&slice, &asked).unwrap() == first, "schedule {seed}");
        }
    }
}

/// Corrections as few as the CPU's, and few rows left to it.
fn compare(vocab: usize, rows: u64, tolerance: f64, value_type: ValueType) -> (f64, u64, Extracted) {
    let slice = teacher_like(vocab, rows);
    let asked = asked(vocab, replay(tolerance, value_type, true), 1, 0);
    let got = check(&on_host(0), &slice, &asked).unwrap();
    let of_cpu = on_cpu(&slice, &asked).unwrap().replay.unwrap().indices.len();
    let own = got.replay.as_ref().unwrap().indices.len();
    let ratio = own as f64 / of_cpu as f64;
    println!("V = {vocab}, {tolerance}, {value_type}: {own} corrections, the CPU {of_cpu} ({ratio:.3}), {} of {rows} rows left to it", got.fallbacks);
    (ratio, got.fallbacks, got)
}

#[test]
fn about_as_many_corrections_as_on_the_cpu() {
    for (tolerance, value_type) in
        [(1e-3, ValueType::F16), (1e-4, ValueType::F16), (1e-3, ValueType::F32), (1e-4, ValueType::F32)]
    {
        let (ratio, fallbacks, _) = compare(8000, 150, tolerance, value_type);
        assert!(ratio <= 1.05 && fallbacks <= 1000, "{ratio}, {fallbacks}");
    }
}

#[test]
fn a_large_vocabulary() {
    let (ratio, fallbacks, _) = compare(50_257, 8, 1e-3, ValueType::F16);
    assert!(ratio <= 1.05 && fallbacks <= 1000, "{ratio}, {fallbacks}");
}

/// For looking at, not for CI: `--run-ignored all`.
#[test]
#[ignore = "a measurement"]
fn measured_ratios() {
    for (tolerance, value_type, rows) in [(1e-3, ValueType::F16, 2000), (1e-4, ValueType::F16, 300), (1e-3, ValueType::F32, 300), (1e-4, ValueType::F32, 300), (2e-4, ValueType::F16, 300), (1e-5, ValueType::F16, 100)] {
        compare(50_257, rows, tolerance, value_type);
    }
}
