//! Measures how far a net's distributions in each number format are from the CPU's (f32 weights, f64 sums), and from
//! its own in f32.

use stillhouse_gpu::net::{Kind, Net, Numbers, Shape};
use stillhouse_gpu::{Buffer, Element, Stream};
use stillhouse_noise::keyed_uniforms;

use crate::conformance;
use crate::nets::{Angles, GPT2, TINY, Weights, shape};
use crate::{Check, Outcome};

/// Distances between distributions, over all rows.
#[derive(Debug, Default, Clone, Copy)]
pub struct Distance {
    /// KL(a ‖ b) in nats; mean, then maximum below.
    pub mean_kl: f64,
    pub most_kl: f64,
    /// Largest |ln p_a − ln p_b|.
    pub most: f64,
}

/// The distance between rows of logits.
pub fn distance(a: &[f64], b: &[f64], vocab: usize) -> Distance {
    let mut out = Distance::default();
    let rows = a.chunks_exact(vocab).zip(b.chunks_exact(vocab));
    let count = rows.len() as f64;
    for (a, b) in rows {
        let (norm_a, norm_b) = (ln_sum(a), ln_sum(b));
        let (mut kl, mut most) = (0.0, 0.0f64);
        for (a, b) in a.iter().zip(b) {
            let (a, b) = (a - norm_a, b - norm_b);
            kl += a.exp() * (a - b);
            // `max` would hide a NaN.
            most = if (a - b).abs() <= most { most } else { (a - b).abs() };
        }
        out.mean_kl += kl / count;
        out.most_kl = if kl <= out.most_kl { out.most_kl } else { kl };
        out.most = if most <= out.most { out.most } else { most };
    }
    out
}

fn ln_sum(row: &[f64]) -> f64 {
    let most = row.iter().copied().fold(f64::MIN, f64::max);
    most + row.iter().map(|l| (l - most).exp()).sum::<f64>().ln()
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
    numbers: impl Into<Numbers>,
    tokens: &[u32],
    offsets: &[u32],
) -> Outcome<Vec<f64>> {
    let angles = Angles::of(shape);
    let rope = angles.as_ref().map(Angles::rope);
    let mut weights = Weights::of(shape);
    let mut net = Net::load(&check.device, *shape, numbers, rope, &mut weights, tokens.len())?;
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
    let small = shape(Kind::Gpt2, 2003, 256, 4, [4, 4, 64], 1024);
    let (name, shape, length) =
        if check.host { (TINY[0].0, TINY[0].1, 40) } else { ("GPT-2 of 4 layers, H = 256", small, 96) };
    let (tokens, offsets) = (tokens(4, length, shape.vocab), [0, length as u32]);
    let exact = conformance::exact(&shape, Element::F32, &tokens, &offsets)?;
    for numbers in [Element::F32, Element::Bf16, Element::F16].map(Numbers::Of).into_iter().chain([Numbers::Fp8]) {
        let what = format!("{name}, L = {length}, {} against the CPU", numbers.name());
        if lacks(check, numbers, &what) {
            continue;
        }
        if !check.has_time(3.0) {
            check.report.skipped(what, "out of time");
            continue;
        }
        let got = logits(check, &shape, numbers, &tokens, &offsets)?;
        figures(check, &what, distance(&exact, &got, shape.vocab));
    }
    Ok(())
}

fn against_itself(check: &mut Check) -> Outcome<()> {
    let (name, shape, length) = if check.host { (TINY[0].0, TINY[0].1, 40) } else { ("GPT-2 124M", GPT2, 256) };
    let (tokens, offsets) = (tokens(3, length, shape.vocab), [0, length as u32]);
    let exact = logits(check, &shape, Element::F32, &tokens, &offsets)?;
    for numbers in [Numbers::Of(Element::Bf16), Numbers::Of(Element::F16), Numbers::Fp8] {
        let what = format!("{name}, L = {length}, {} against f32", numbers.name());
        if lacks(check, numbers, &what) {
            continue;
        }
        if !check.has_time(5.0) {
            check.report.skipped(what, "out of time");
            continue;
        }
        let got = logits(check, &shape, numbers, &tokens, &offsets)?;
        figures(check, &what, distance(&exact, &got, shape.vocab));
    }
    Ok(())
}

/// Whether the device lacks products in these numbers; reports them as skipped.
pub fn lacks(check: &mut Check, numbers: Numbers, what: &str) -> bool {
    let why = if numbers == Numbers::Fp8 { check.device.lacks_fp8() } else { None };
    if let Some(why) = &why {
        check.report.skipped(what, why);
    }
    why.is_some()
}

fn figures(check: &mut Check, what: &str, far: Distance) {
    check.report.figure(format!("{what}: mean KL"), far.mean_kl, "nats", "");
    check.report.figure(format!("{what}: largest KL"), far.most_kl, "nats", "");
    check.report.figure(format!("{what}: largest |Δ ln p|"), far.most, "nats", "over all of the vocabulary");
}
