//! Measures the speed of a whole job, and how its time is spent.

use std::io::{self, Write};
use std::sync::Arc;

use serde_json::json;
use stillhouse_gpu::net::kernels::Kernels;
use stillhouse_gpu::net::{NumberFormat, Shape};
use stillhouse_gpu::{Buffer, Element};

use crate::accuracy::skip_unsupported;
use crate::job::{Job, Schedule};
use crate::nets::{MEASURED_SHAPES, TINY_SHAPES, flops_per_token};
use crate::{Check, Outcome};

/// Tokens of a batch.
const BATCH_TOKENS: usize = 16_384;
const TINY_BATCH_TOKENS: usize = 48;
const LENGTHS: [usize; 2] = [1024, 4096];
const TINY_LENGTHS: [usize; 2] = [16, 24];
/// Minimum seconds of a measurement.
const MIN_SECONDS: f64 = 3.0;
/// Kernels with a smaller share of the time are not listed.
const MIN_SHARE: f64 = 0.001;

struct Plan {
    shapes: Vec<(&'static str, Shape, f64)>,
    batch: usize,
    lengths: [usize; 2],
    min_seconds: f64,
}

fn plan(host: bool) -> Plan {
    if host {
        Plan { shapes: TINY_SHAPES.to_vec(), batch: TINY_BATCH_TOKENS, lengths: TINY_LENGTHS, min_seconds: 0.0 }
    } else {
        Plan { shapes: MEASURED_SHAPES.to_vec(), batch: BATCH_TOKENS, lengths: LENGTHS, min_seconds: MIN_SECONDS }
    }
}

/// Runs the part `throughput`.
pub fn run(check: &mut Check) -> Outcome<()> {
    let plan = plan(check.host);
    for (name, shape, loading) in &plan.shapes {
        for number_format in [NumberFormat::Dtype(Element::Bf16), NumberFormat::Fp8] {
            let what = format!("{name}, {}", number_format.name());
            if skip_unsupported(check, number_format, &what) {
                continue;
            }
            if !check.has_time(loading + 10.0) {
                check.report.skipped(what, "out of time");
            } else if let Err(error) = measure_net(check, &plan, name, (shape, number_format)) {
                check.report.verdict(what, false, &error.to_string());
            }
            check.report.write()?;
        }
    }
    Ok(())
}

/// Measures one net. For fp8, the ceiling is still that of bf16, and longer runs are omitted, because attention is the
/// same.
fn measure_net(
    check: &mut Check,
    plan: &Plan,
    name: &str,
    (shape, number_format): (&Shape, NumberFormat),
) -> Outcome<()> {
    let mut job = Job::load(&check.device, &check.counting, shape, number_format, plan.batch)?;
    let weights = shape.weight_bytes(number_format);
    let lengths = if number_format == NumberFormat::Fp8 { &plan.lengths[..1] } else { &plan.lengths };
    for (i, length) in lengths.iter().copied().filter(|length| *length <= shape.positions).enumerate() {
        let what = format!("{name}, {}, L = {length}", number_format.name());
        if !check.has_time(2.0 * plan.min_seconds + 3.0) {
            check.report.skipped(what, "out of time");
            continue;
        }
        job.prepare(length)?;
        measure_job(check, plan, &mut job, &what, [flops_per_token(shape, length), weights as f64])?;
        if i == 0 {
            report_kernel_shares(check, &mut job, &format!("{name}, {}", number_format.name()))?;
        }
    }
    Ok(())
}

/// The number of batches that take about `min_seconds` seconds.
fn batches(job: &mut Job, min_seconds: f64) -> Outcome<usize> {
    job.run(1, Schedule::HelperThread)?; // warm-up: chooses algorithms, fills caches
    let once = job.run(1, Schedule::HelperThread)?.seconds;
    Ok(((min_seconds / once).ceil() as usize).clamp(2, 10_000))
}

fn measure_job(check: &mut Check, plan: &Plan, job: &mut Job, what: &str, [flops, weights]: [f64; 2]) -> Outcome<()> {
    let batches = batches(job, plan.min_seconds)?;
    check.counting.reset(false);
    let all = job.run(batches, Schedule::HelperThread)?;
    let counts = check.counting.snapshot();
    let ahead = job.run(batches, Schedule::TwoInFlight)?;
    let pass = job.run(batches, Schedule::LogitsOnly)?;
    let tokens = all.tokens as f64;
    let ceiling = check.ceiling;
    let report = &mut check.report;
    let of_ceiling = |rate: f64| {
        ceiling.map_or(String::new(), |peak| format!("{:.1} % of the products' ceiling", 100.0 * rate * flops / peak))
    };
    let note = |rate: f64, more: &str| {
        [of_ceiling(rate).as_str(), more].into_iter().filter(|s| !s.is_empty()).collect::<Vec<_>>().join(", ")
    };
    let batch = format!("{} tokens a batch", job.batch_tokens());
    report.figure(format!("{what}: ids to corrections"), all.rate(), "tokens/s", &note(all.rate(), &batch));
    report.figure(format!("{what}: two slices in flight"), ahead.rate(), "tokens/s", &note(ahead.rate(), "one thread"));
    report.figure(format!("{what}: ids to logits"), pass.rate(), "tokens/s", &note(pass.rate(), ""));
    if let Some(peak) = ceiling {
        report.figure(
            format!("{what}: share of the ceiling"),
            100.0 * all.rate() * flops / peak,
            "%",
            "ids to corrections",
        );
    }
    let share = 100.0 * (1.0 - pass.seconds / all.seconds);
    report.figure(format!("{what}: share of the noise"), share, "%", "of the whole job's time");
    report.figure(format!("{what}: to the host"), counts.to_host as f64 / tokens, "B/token", "");
    report.figure(format!("{what}: corrections"), all.corrections as f64 / tokens, "/token", "");
    let fallbacks = all.fallbacks as f64 / tokens * 1e6;
    report.figure(format!("{what}: left to the CPU"), fallbacks, "/1e6", "tokens");
    let beyond = (counts.peak_allocated as f64 - weights).max(0.0) / f64::from(1 << 20);
    report.figure(format!("{what}: peak memory beyond weights"), beyond, "MiB", "without cuBLASLt's 64");
    report.figure(format!("{what}: weights"), weights / f64::from(1 << 20), "MiB", "");
    Ok(())
}

/// Reports the time of each kernel in one batch, with no overlap between kernels.
fn report_kernel_shares(check: &mut Check, job: &mut Job, name: &str) -> Outcome<()> {
    let launch_overhead = launch_overhead(check)?;
    check.counting.reset(true);
    job.run(1, Schedule::TwoInFlight)?;
    let counts = check.counting.snapshot();
    check.counting.reset(false);
    let mut calls: Vec<(String, f64, u64, f64)> = counts
        .calls
        .into_iter()
        .map(|(kernel, calls)| {
            let seconds = (calls.seconds - calls.count as f64 * launch_overhead).max(calls.seconds * 0.01);
            (kernel, seconds, calls.count, calls.flops)
        })
        .collect();
    calls.sort_by(|a, b| b.1.total_cmp(&a.1));
    let total: f64 = calls.iter().map(|(_, seconds, ..)| seconds).sum();
    let tokens = job.batch_tokens() as f64;
    for (kernel, seconds, count, flops) in calls {
        let share = seconds / total;
        if share < MIN_SHARE && !check.host {
            continue;
        }
        let of_ceiling =
            check.ceiling.map_or(String::new(), |peak| format!(", {:.0} %", 100.0 * flops / seconds / peak));
        let rate = match flops > 0.0 {
            true => format!(", {:.0} TFLOP/s{of_ceiling}", flops / seconds / 1e12),
            false => String::new(),
        };
        let note = format!("{:.1} %, {count} launches{rate}", 100.0 * share);
        check.report.figure(format!("{name}: {kernel}"), seconds / tokens * 1e9, "ns/token", &note);
    }
    Ok(())
}

/// Seconds of launching and waiting alone: the median of 50 launches of a nearly empty kernel.
fn launch_overhead(check: &Check) -> Outcome<f64> {
    let rows = Buffer::from_bytes(&check.device, &[0; 16])?;
    let memory = Buffer::new(&check.device, 1024)?;
    let kernels = Kernels::new(&check.device, Element::F32);
    let mut seconds = Vec::new();
    for _ in 0..50 {
        check.counting.reset(true);
        // SAFETY: gathers a row of 32 elements onto itself
        unsafe { kernels.gather(memory.pointer(), rows.pointer(), memory.pointer(), [1, 32])? };
        seconds.push(check.counting.snapshot().calls.values().map(|calls| calls.seconds).sum::<f64>());
    }
    check.counting.reset(false);
    seconds.sort_by(f64::total_cmp);
    Ok(seconds[seconds.len() / 2])
}

/// Measures once per input line, until the input ends.
pub fn measure_turns(
    check: &Check,
    name: &str,
    lines: &mut dyn Iterator<Item = io::Result<String>>,
    out: &mut dyn Write,
) -> Outcome<()> {
    let plan = plan(check.host);
    let found = plan.shapes.iter().find(|(known, ..)| *known == name);
    let (_, shape, _) = found.ok_or_else(|| {
        let valid: Vec<&str> = plan.shapes.iter().map(|(name, ..)| *name).collect();
        format!("--turns: got {name}, valid: {}", valid.join(", "))
    })?;
    let mut job = Job::load(&check.device, &Arc::clone(&check.counting), shape, Element::Bf16, plan.batch)?;
    writeln!(out, "{}", json!({ "ready": name, "device": check.device.model() }))?;
    out.flush()?;
    let mut prepared = 0;
    for line in lines {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let &[length, batches] = words.as_slice() else {
            return Err(format!("a turn: got {line:?}, valid: LENGTH BATCHES").into());
        };
        let (length, batches): (usize, usize) = (length.parse()?, batches.parse()?);
        if length == 0 || length > shape.positions.min(plan.batch) || batches == 0 {
            let max_length = shape.positions.min(plan.batch);
            return Err(
                format!("a turn: got {line:?}, valid: a length of 1 to {max_length}, at least one batch").into()
            );
        }
        if prepared != length {
            job.prepare(length)?;
            job.run(1, Schedule::HelperThread)?;
            prepared = length;
        }
        let run = job.run(batches, Schedule::HelperThread)?;
        writeln!(out, "{}", json!({ "tokens": run.tokens, "seconds": run.seconds }))?;
        out.flush()?;
    }
    Ok(())
}
