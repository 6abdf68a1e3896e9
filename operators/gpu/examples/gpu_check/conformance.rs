//! Checks every kernel against code that shares nothing with it.

#[path = "../../tests/conformance/signals.rs"]
mod signals;

use std::sync::Arc;

use std::collections::BTreeSet;

use half::f16;
use stillhouse_gpu::Element;
use stillhouse_gpu::extract::Dense;
use stillhouse_gpu::net::{Activation, Architecture, NumberFormat, Shape};
use stillhouse_noise::{
    Correction, DrawKey, Extract, ExtractionSpec, NoiseForm, NoiseStream, ObservedTokens, RowExtractor, Signal,
    Signals, StoredToken, Tolerance, ValueType, keyed_uniforms, measure_accuracy,
};
use stillhouse_signals::{Candidates, Entropy, LogPartitions, SampledLogits, TopK, TopP};

use crate::accuracy::{distance, logits, skip_unsupported, tokens};
use crate::job::extract_once;
use crate::nets::{RopeTables, Weights, shape};
use crate::{Check, Outcome, bits, reference};

/// Offsets of runs shorter and longer than a block of attention; some end within a block.
const RUNS: [u32; 6] = [0, 1, 38, 168, 233, 363];
const SMALL_RUNS: [u32; 4] = [0, 1, 38, 105];

/// Runs the part `conformance`.
pub fn run(check: &mut Check) -> Outcome<()> {
    check.counting.reset(false);
    let done = noise(check).and_then(|()| nets(check)).and_then(|()| fp8_rows(check));
    let kernels = |prefix: &str| {
        let names: BTreeSet<String> = check.counting.snapshot().calls.into_keys().collect();
        names.iter().filter(|name| name.starts_with(prefix)).count()
    };
    let (attention, noise) = (kernels("attention_"), kernels("noise_"));
    let rest = kernels("") - attention - noise - kernels("product") - kernels("copy");
    let note = format!("{noise} of the noise, {attention} of attention, {rest} others; products have many shapes");
    check.report.figure("kernels that were launched", (noise + attention + rest) as f64, "", &note);
    done.and_then(|()| bits::run(check))
}

/// Logits of all kinds: flat, peaked, with ties, with improbable tokens.
fn noise_logits(rows: usize, vocab: usize) -> (Vec<f32>, Vec<u32>) {
    let mut uniforms = keyed_uniforms(5, "logits of a check", vocab as u64, 0);
    let mut out = Vec::with_capacity(rows * vocab);
    for row in 0..rows {
        let spread = [0.0, 1.0, 4.0, 12.0, 60.0][row % 5];
        let ties = row % 7 == 3;
        out.extend((0..vocab).map(|_| {
            let normal = (0..6).map(|_| uniforms.next_f64()).sum::<f64>() - 3.0;
            let logit = (normal * spread * std::f64::consts::SQRT_2) as f32;
            if ties { logit.round() } else { logit }
        }));
    }
    let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0) as u32;
    let observed = out.chunks_exact(vocab).enumerate();
    let observed = observed.map(|(i, row)| if i % 3 == 0 { best(row) } else { uniforms.below(vocab as u32) }).collect();
    (out, observed)
}

fn noise(check: &mut Check) -> Outcome<()> {
    let sizes: &[(usize, usize)] = if check.host {
        &[(7, 1), (7, 37), (6, 1031)]
    } else {
        &[(16, 1), (64, 37), (64, 1031), (256, 50_257), (64, 128_256)]
    };
    for &(rows, vocab) in sizes {
        for (name, form, topk) in forms()? {
            let what = format!("noise {name}, n = {rows}, V = {vocab}");
            if !check.has_time(5.0) {
                check.report.unchecked(what);
                continue;
            }
            // Dense noise of a few long rows proves as much as that of many.
            let rows = if matches!(form, Some(NoiseForm::Dense { .. })) { rows.min(16) } else { rows };
            let mut signals: Vec<Arc<dyn Signal>> = Vec::new();
            if topk > 0 {
                signals.push(Arc::new(TopK { k: topk }));
            }
            if form.is_none() {
                signals.extend(every_signal(vocab));
            }
            let keys = DrawKey::draws(11, 2);
            let request = ExtractionSpec { vocab, keys, noise: form, signals: Signals::new(signals) };
            match check_noise(check, &request, rows) {
                Ok(note) => check.report.verdict(what, true, &note),
                Err(error) => check.report.verdict(what, false, &error.to_string()),
            }
        }
    }
    Ok(())
}

type Form = (&'static str, Option<NoiseForm>, usize);

fn forms() -> Outcome<Vec<Form>> {
    let replay = |tolerance, value_type, condition| -> Outcome<_> {
        Ok(Some(NoiseForm::Replay { tolerance: Tolerance::new(tolerance)?, value_type, condition }))
    };
    let dense = |value_type, condition| Some(NoiseForm::Dense { value_type, condition });
    Ok(vec![
        ("replay f16, 1e-3", replay(1e-3, ValueType::F16, true)?, 0),
        ("replay f32, 1e-2, top 5", replay(1e-2, ValueType::F32, false)?, 5),
        ("replay f16, 1e-4", replay(1e-4, ValueType::F16, true)?, 0),
        ("dense f16, top 64", dense(ValueType::F16, true), 64),
        ("dense f32", dense(ValueType::F32, false), 0),
        ("none, top 1000, other signals", None, 1000),
    ])
}

fn every_signal(vocab: usize) -> Vec<Arc<dyn Signal>> {
    vec![
        Arc::new(LogPartitions { temperatures: vec![1.0, 2.0, 0.5] }),
        Arc::new(Entropy),
        Arc::new(Candidates { tokens: vec![0, vocab as u32 - 1] }),
        Arc::new(SampledLogits { draws: 50, power: 0.8, seed: 3 }),
        Arc::new(TopP { mass: 0.95, max_entries: 256 }),
    ]
}

/// Checks that the device's columns equal the CPU's up to the last bit of f32, and that stored corrections keep the
/// tolerance.
fn check_noise(check: &Check, request: &ExtractionSpec, rows: usize) -> Outcome<String> {
    let vocab = request.vocab;
    let (logits, tokens) = noise_logits(rows, vocab);
    let positions: Vec<u32> = (0..rows as u32).map(|i| i * 3 + 1).collect();
    let sequence_ids: Vec<u64> = (0..rows as u64).map(|i| i / 3 + (1 << 33)).collect();
    let observed = ObservedTokens { tokens: &tokens, positions: &positions, sequence_ids: &sequence_ids };
    let got = extract_once(&check.device, request, &logits, &observed)?;
    let expected = RowExtractor::new(request.clone())?.extract(&logits, &observed)?;

    near("ln p_x", &got.logprob, &expected.logprob, 1)?;
    holds("rows of signals", got.signals.len() == expected.signals.len())?;
    for (row, (got, expected)) in got.signals.iter().zip(&expected.signals).enumerate() {
        signals::check_signals(&request.signals, got, expected).map_err(|e| format!("row {row}: {e}"))?;
    }
    let mut note = String::new();
    match (request.noise, &expected.dense, &expected.replay) {
        (Some(NoiseForm::Dense { .. }), Some(expected), _) => match got.dense.as_ref().ok_or("no dense noise")? {
            Dense::F32(values) => near("ξ", values, expected, 4)?,
            Dense::F16(values) => {
                let close = |(a, b): (&f16, &f32)| (a.to_f32() - b).abs() <= 2e-3 * b.abs().max(1e-3);
                holds("ξ", values.len() == expected.len() && values.iter().zip(expected).all(close))?;
            }
        },
        (Some(NoiseForm::Replay { tolerance, condition, .. }), _, Some(expected)) => {
            let replay = got.replay.as_ref().ok_or("no corrections")?;
            let (mut largest, mut same) = (0f64, 0);
            for (row, draw) in (0..rows).flat_map(|row| (0..request.keys.len()).map(move |draw| (row, draw))) {
                let list = replay.corrections(row, draw);
                same += usize::from(list == expected.corrections(row, draw));
                // The judge is slow: only some of the long rows.
                if vocab > 2000 && row % 16 != 1 {
                    continue;
                }
                let corrections = list.0.iter().zip(list.1);
                let corrections: Vec<Correction> =
                    corrections.map(|(&index, &logprob)| Correction { index, logprob }).collect();
                let stored = StoredToken { token: tokens[row], logprob: got.logprob[row], corrections: &corrections };
                let stream = NoiseStream::new(request.keys[draw], sequence_ids[row], positions[row]);
                let accuracy = measure_accuracy(&logits[row * vocab..][..vocab], &stored, &stream)?;
                largest = largest.max(accuracy.total_variation);
                holds("total variation", accuracy.total_variation <= tolerance.get())?;
                holds("the winner", !condition || accuracy.lead >= 0.9 * tolerance.lead())?;
            }
            let lists = rows * request.keys.len();
            note = format!("total variation up to {largest:.1e}, {same} of {lists} lists are the CPU's; ");
        }
        _ => {}
    }
    Ok(format!("{note}{} of {rows} rows done by the CPU", got.fallbacks))
}

fn holds(what: &str, holds: bool) -> Outcome<()> {
    if holds { Ok(()) } else { Err(format!("{what}: not as on the CPU").into()) }
}

/// Checks that values are at most `max_ulps` f32 units in the last place apart, or nearly equal in absolute terms: where
/// p_x is close to 1, ln Z itself is not more precise.
fn near(what: &str, got: &[f32], expected: &[f32], max_ulps: u32) -> Outcome<()> {
    let ordered = |v: f32| {
        let bits = v.to_bits().cast_signed();
        if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits }
    };
    let slack = if max_ulps > 1 { 1e-6 } else { 1e-15 };
    let close = |a: f32, b: f32| ordered(a).abs_diff(ordered(b)) <= max_ulps || (a - b).abs() < slack;
    match got.iter().zip(expected).position(|(a, b)| !close(*a, *b)) {
        _ if got.len() != expected.len() => {
            Err(format!("{what}: {} values, the CPU has {}", got.len(), expected.len()).into())
        }
        Some(at) => Err(format!("{what}: value {at} is {:e}, on the CPU {:e}", got[at], expected[at]).into()),
        None => Ok(()),
    }
}

/// A net, and the maximum |Δ ln p| of bf16 and f16 against f64 that the host has for it over [`RUNS`].
struct SmallNet {
    name: &'static str,
    shape: Shape,
    host: [f64; 2],
}

/// Nets that together use every kernel: each head dimension and a padded one, each activation, each scale of scores.
///
/// `STILLHOUSE_SOAK=1 gpu_check --host --part conformance` measures the host's figures again, in four minutes.
fn small_nets() -> Vec<SmallNet> {
    let llama = |dim: usize, inner: usize| shape(Architecture::Llama, 211, 96, 2, [4, 2, dim], inner);
    let unscaled = Shape {
        activation: Activation::Gelu,
        scaled: false,
        scaled_by_layer: true,
        ..shape(Architecture::Gpt2, 211, 64, 2, [2, 2, 32], 128)
    };
    let net = |name, shape, host| SmallNet { name, shape, host };
    vec![
        net("GPT-2, D = 64", shape(Architecture::Gpt2, 211, 128, 2, [2, 2, 64], 256), [0.14, 0.019]),
        net("Llama, D = 32", Shape { tied: false, ..llama(32, 160) }, [0.16, 0.021]),
        net("Qwen3, D = 16", shape(Architecture::Qwen3, 211, 96, 2, [6, 2, 16], 100), [0.21, 0.024]),
        net("GPT-2, D = 80", shape(Architecture::Gpt2, 211, 160, 1, [2, 2, 80], 320), [0.14, 0.016]),
        net("Llama, D = 48 in 64", Shape { attention_bias: true, mlp_bias: true, ..llama(48, 128) }, [0.22, 0.025]),
        net("Qwen3, D = 128", shape(Architecture::Qwen3, 211, 96, 2, [4, 1, 128], 128), [0.19, 0.034]),
        net("Llama, D = 96", llama(96, 128), [0.22, 0.025]),
        // scores that are not divided by √D are large, and so is what rounding them changes
        net("GPT-2, D = 32, GELU, scores by layer", unscaled, [0.73, 0.061]),
        net("Llama, D = 192, GeGLU", Shape { activation: Activation::GeGlu, ..llama(192, 128) }, [0.19, 0.030]),
        net("Llama, D = 256", llama(256, 128), [0.18, 0.023]),
    ]
}

impl SmallNet {
    /// The maximum |Δ ln p| of a dtype against f64, for weights rounded to that dtype. In 16 bits the device rounds where
    /// the host does, and only sums in another order: half as much again as the host has.
    fn allowed(&self, element: Element) -> f64 {
        match element {
            Element::F32 => 1e-4,
            Element::Bf16 => 1.5 * self.host[0],
            Element::F16 => 1.5 * self.host[1],
        }
    }
}

fn nets(check: &mut Check) -> Outcome<()> {
    let is_short = check.host && std::env::var_os("STILLHOUSE_SOAK").is_none();
    let (offsets, count): (&[u32], _) = if is_short { (&SMALL_RUNS, 3) } else { (&RUNS, usize::MAX) };
    for net in small_nets().iter().take(count) {
        for element in [Element::F32, Element::Bf16, Element::F16] {
            let what = format!("net {}, {}, runs of {:?}", net.name, element.name(), lengths(offsets));
            if !check.has_time(5.0) {
                check.report.unchecked(what);
                continue;
            }
            let tokens = tokens(2, offsets.last().copied().unwrap_or(0) as usize, net.shape.vocab);
            let difference = logits(check, &net.shape, element, &tokens, offsets)
                .and_then(|got| Ok(distance(&exact(&net.shape, element, &tokens, offsets)?, &got, net.shape.vocab)));
            match difference {
                Ok(difference) => {
                    let (largest, allowed) = (difference.max_logprob_difference, net.allowed(element));
                    let note =
                        format!("mean KL {:.1e}, largest |Δ ln p| {largest:.1e} of {allowed:.1e}", difference.mean_kl);
                    check.report.verdict(what, largest <= allowed, &note);
                }
                Err(error) => check.report.verdict(what, false, &error.to_string()),
            }
        }
    }
    Ok(())
}

/// Rows of a pass at which cuBLASLt changes kernels, or has no e4m3 algorithm without padding rows.
const ROWS: [u32; 6] = [1, 15, 17, 127, 256, 257];
/// Maximum mean KL of fp8 against f64, in nats: about three times that seen on the host.
const FP8_KL: f64 = 0.1;

fn fp8_rows(check: &mut Check) -> Outcome<()> {
    let shape = shape(Architecture::Llama, 211, 96, 2, [4, 2, 32], 160);
    for rows in ROWS.into_iter().take(if check.host { 3 } else { ROWS.len() }) {
        let what = format!("net Llama, fp8, a pass of {rows}");
        if skip_unsupported(check, NumberFormat::Fp8, &what) {
            return Ok(());
        }
        if !check.has_time(5.0) {
            check.report.unchecked(what);
            continue;
        }
        let (tokens, offsets) = (tokens(6, rows as usize, shape.vocab), [0, rows]);
        let difference = logits(check, &shape, NumberFormat::Fp8, &tokens, &offsets)
            .and_then(|got| Ok(distance(&exact(&shape, Element::F32, &tokens, &offsets)?, &got, shape.vocab)));
        match difference {
            Ok(difference) => check.report.verdict(
                what,
                difference.mean_kl <= FP8_KL,
                &format!("mean KL {:.1e} of {FP8_KL:.0e}", difference.mean_kl),
            ),
            Err(error) => check.report.verdict(what, false, &error.to_string()),
        }
    }
    Ok(())
}

fn lengths(offsets: &[u32]) -> Vec<u32> {
    offsets.windows(2).map(|run| run[1] - run[0]).collect()
}

/// Logits of runs, computed in f64.
pub fn exact(shape: &Shape, element: Element, tokens: &[u32], offsets: &[u32]) -> Outcome<Vec<f64>> {
    let rope_tables = RopeTables::of(shape);
    let mut weights = Weights::of(shape);
    let mut out = Vec::new();
    for run in offsets.windows(2) {
        let tokens = &tokens[run[0] as usize..run[1] as usize];
        out.extend(reference::logits(
            shape,
            element,
            rope_tables.as_ref().map(RopeTables::rope),
            &mut weights,
            tokens,
        )?);
    }
    Ok(out)
}
