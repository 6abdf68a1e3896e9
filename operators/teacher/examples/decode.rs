//! Measures decoding on this machine's CPU in tokens per second. Each step feeds one token to every text and computes
//! the logits of all texts, without sampling.
//!
//! ```text
//! cargo run --release -p stillhouse-teacher --example decode -- MODEL [DTYPE] [--texts 1,8,32] [--length 256]
//! ```
//!
//! The rate uses the median step of each tenth of the positions, so that other load on the machine has little effect.
//! GB/s count the weights, which a step reads once.

use std::path::Path;
use std::time::Instant;

use stillhouse_teacher::{DeviceChoice, LoadOptions, Precision, StepOutput, host_bytes, load};

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut option = |name: &str| match arguments.iter().position(|argument| argument == name) {
        Some(at) if at + 1 < arguments.len() => arguments.drain(at..at + 2).nth(1),
        _ => None,
    };
    let (texts, length) = (option("--texts").unwrap_or("1,8,32".into()), option("--length").unwrap_or("256".into()));
    let [model, rest @ ..] = arguments.as_slice() else {
        return Err("usage: decode MODEL [DTYPE] [--texts 1,8,32] [--length 256]".into());
    };
    let dtype: Precision = rest.first().map_or("f32", String::as_str).parse()?;
    let options = LoadOptions { device: DeviceChoice::Cpu, dtype, ..LoadOptions::default() };
    let teacher = load(Path::new(model), &options)?;
    let info = teacher.info();
    let table = 4 * (info.vocab_size * info.hidden_size) as u64;
    let weights = (host_bytes(Path::new(model), dtype, 1, &[])?.weights - table) as f64;
    println!(
        "{}, {} threads, {:.0} MB of weights in a step",
        info.arithmetic,
        rayon::current_num_threads(),
        weights / 1e6
    );
    println!("{:>6} {:>10} {:>14} {:>8}", "texts", "tokens/s", "median step ms", "GB/s");
    let (length, vocab, mut out) = (length.parse::<usize>()?, info.vocab_size as u32, StepOutput::default());
    for count in texts.split(',') {
        let count: usize = count.parse()?;
        let mut decoding = teacher.decoding(count, length, &[])?;
        let mut seconds = Vec::with_capacity(length);
        for position in 0..length as u32 {
            let tokens: Vec<u32> = (0..count as u32).map(|text| (position * 7919 + text * 104_729) % vocab).collect();
            let inputs: Vec<(usize, &[u32])> = tokens.chunks(1).enumerate().collect();
            let start = Instant::now();
            decoding.step(&inputs, &mut out)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        // Attention's cost grows with the text, so this takes a median per tenth, not over all steps.
        let part = |tenth: &[f64]| median(tenth.to_vec()) * tenth.len() as f64;
        let total: f64 = seconds.chunks(length.div_ceil(10)).map(part).sum();
        let rate = (count * length) as f64 / total;
        let step = total / length as f64;
        println!("{count:>6} {rate:>10.1} {:>14.2} {:>8.1}", 1e3 * step, weights / step / 1e9);
    }
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
