//! Measures how far a net's distributions in each number format are from the CPU's (f32 weights, f64 sums), and from
//! its own in f32.

use stillhouse_gpu::net::{Architecture, Net, NumberFormat, Shape};
use stillhouse_gpu::{Buffer, Element, Stream};
use stillhouse_noise::keyed_uniforms;

use crate::conformance;
use crate::nets::{GPT2, RopeTables, TINY_SHAPES, Weights, shape};
use crate::{Check, Outcome};

/// Distances between distributions, over all rows.
#[derive(Debug, Default, Clone, Copy)]
pub struct Distance {
    /// KL(a ‖ b) in nats; mean, then maximum below.
    pub mean_kl: f64,
    pub max_kl: f64,
    /// Largest |ln p_a − ln p_b|.
    pub max_logprob_difference: f64,
}

/// The distance between rows of logits.
pub fn distance(a: &[f64], b: &[f64], vocab: usize) -> Distance {
    let mut out = Distance::default();
    let rows = a.chunks_exact(vocab).zip(b.chunks_exact(vocab));
    let count = rows.len() as f64;
    for (a, b) in rows {
        let (norm_a, norm_b) = (log_sum_exp(a), log_sum_exp(b));
        let (mut kl, mut largest) = (0.0, 0.0f64);
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (a - norm_a, b - norm_b);
            kl += a.exp() * (a - b);
            // `max` would hide a NaN.
            largest = if (a - b).abs() <= largest { largest } else { (a - b).abs() };
        }
        out.mean_kl += kl / count;
        out.max_kl = if kl <= out.max_kl { out.max_kl } else { kl };
        out.max_logprob_difference =
            if largest <= out.max_logprob_difference { out.max_logprob_difference } else { largest };
    }
    out
}

fn log_sum_exp(row: &[f64]) -> f64 {
    let largest = row.iter().copied().fold(f64::MIN, f64::max);
    largest + row.iter().map(|l| (l - largest).exp()).sum::<f64>().ln()
}

/// Random tokens from a seed.
pub fn tokens(seed: u64, count: usize, vocab: usize) -> Vec<u32> {
    let mut uniforms = keyed_uniforms(seed, "tokens of a check", 0, 0);
    (0..count).map(|_| uniforms.below(vocab as u32)).collect()
}

/// Logits of runs, computed by the device.
pub fn logits(
    check: &Check,
    shape: &Shape,
    number_format: impl Into<NumberFormat>,
    tokens: &[u32],
    offsets: &[u32],
) -> Outcome<Vec<f64>> {
    let rope_tables = RopeTables::of(shape);
    let rope = rope_tables.as_ref().map(RopeTables::rope);
    let mut weights = Weights::of(shape);
    let mut net = Net::load(&check.device, *shape, number_format, rope, &mut weights, tokens.len())?;
    let out = Buffer::new(&check.device, tokens.len() * shape.vocab * 4)?;
    net.hidden(tokens, offsets)?;
    // Even rows first: rows that are not contiguous must be gathered.
    let (even, odd): (Vec<u32>, Vec<u32>) = (0..tokens.len() as u32).partition(|row| row % 2 == 0);
    let rows = [even, odd].concat();
    // SAFETY: the buffer holds all rows
    unsafe { net.logits(&rows, out.pointer())? };
    let bytes = out.to_host(Stream::Pass)?;
    let mut logits = vec![0.0; tokens.len() * shape.vocab];
    for (row, bytes) in rows.into_iter().zip(bytes.chunks_exact(shape.vocab * 4)) {
        let to = &mut logits[row as usize * shape.vocab..][..shape.vocab];
        let values = bytes.as_chunks::<4>().0.iter().map(|value| f64::from(f32::from_ne_bytes(*value)));
        to.iter_mut().zip(values).for_each(|(to, value)| *to = value);
    }
    Ok(logits)
}

/// Runs the part `accuracy`.
pub fn run(check: &mut Check) -> Outcome<()> {
    against_the_cpu(check)?;
    against_itself(check)
}

fn against_the_cpu(check: &mut Check) -> Outcome<()> {
    let small = shape(Architecture::Gpt2, 2003, 256, 4, [4, 4, 64], 1024);
    let (name, shape, length) =
        if check.host { (TINY_SHAPES[0].0, TINY_SHAPES[0].1, 40) } else { ("GPT-2 of 4 layers, H = 256", small, 96) };
    let (tokens, offsets) = (tokens(4, length, shape.vocab), [0, length as u32]);
    let exact = conformance::exact(&shape, Element::F32, &tokens, &offsets)?;
    for number_format in
        [Element::F32, Element::Bf16, Element::F16].map(NumberFormat::Dtype).into_iter().chain([NumberFormat::Fp8])
    {
        let what = format!("{name}, L = {length}, {} against the CPU", number_format.name());
        if skip_unsupported(check, number_format, &what) {
            continue;
        }
        if !check.has_time(3.0) {
            check.report.skipped(what, "out of time");
            continue;
        }
        let got = logits(check, &shape, number_format, &tokens, &offsets)?;
        report_distance(check, &what, distance(&exact, &got, shape.vocab));
    }
    Ok(())
}

fn against_itself(check: &mut Check) -> Outcome<()> {
    let (name, shape, length) =
        if check.host { (TINY_SHAPES[0].0, TINY_SHAPES[0].1, 40) } else { ("GPT-2 124M", GPT2, 256) };
    let (tokens, offsets) = (tokens(3, length, shape.vocab), [0, length as u32]);
    let exact = logits(check, &shape, Element::F32, &tokens, &offsets)?;
    for number_format in [NumberFormat::Dtype(Element::Bf16), NumberFormat::Dtype(Element::F16), NumberFormat::Fp8] {
        let what = format!("{name}, L = {length}, {} against f32", number_format.name());
        if skip_unsupported(check, number_format, &what) {
            continue;
        }
        if !check.has_time(5.0) {
            check.report.skipped(what, "out of time");
            continue;
        }
        let got = logits(check, &shape, number_format, &tokens, &offsets)?;
        report_distance(check, &what, distance(&exact, &got, shape.vocab));
    }
    Ok(())
}

/// Whether the device lacks products in this number format; reports them as skipped.
pub fn skip_unsupported(check: &mut Check, number_format: NumberFormat, what: &str) -> bool {
    let reason = if number_format == NumberFormat::Fp8 { check.device.fp8_unsupported_reason() } else { None };
    if let Some(reason) = &reason {
        check.report.skipped(what, reason);
    }
    reason.is_some()
}

fn report_distance(check: &mut Check, what: &str, distance: Distance) {
    check.report.figure(format!("{what}: mean KL"), distance.mean_kl, "nats", "");
    check.report.figure(format!("{what}: largest KL"), distance.max_kl, "nats", "");
    check.report.figure(
        format!("{what}: largest |Δ ln p|"),
        distance.max_logprob_difference,
        "nats",
        "over all of the vocabulary",
    );
}
