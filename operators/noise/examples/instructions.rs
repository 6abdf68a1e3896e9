//! Encodes a fixed number of fixed rows, for counting instructions: unlike time, the count does not depend on other
//! load of the machine. Prints a hash of the results, so that two versions can be compared.
//!
//! ```text
//! cargo build --release -p stillhouse-noise --example instructions
//! valgrind --tool=callgrind target/release/examples/instructions 16      # less the same with 0
//! perf stat -e instructions:u target/release/examples/instructions 256
//! ```
//!
//! The first argument is the number of rows to encode (default 16), the second the step: `encode`, `softmax`, `top`.

use std::error::Error;

use stillhouse_noise::{
    DrawKey, Encoder, NoiseStream, Softmax, Tolerance, ValueType, keyed_uniforms, splitmix64, top_k,
};

const VOCAB: usize = 50_257;

/// Zipf-like logits in random order.
fn logits(row: u64) -> Vec<f32> {
    let mut uniforms = keyed_uniforms(1, "instructions", row, 0);
    let mut ranks: Vec<u32> = (0..VOCAB as u32).collect();
    uniforms.shuffle(&mut ranks);
    let sharpness = 1.2 + uniforms.next_f64();
    let logit = |rank: &u32| (-sharpness * (f64::from(*rank) + 1.0).ln() + 2.0 * uniforms.next_f64()) as f32;
    ranks.iter().map(logit).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let count: u64 = arguments.next().map_or(Ok(16), |n| n.parse())?;
    let step = arguments.next().unwrap_or_else(|| String::from("encode"));
    let rows: Vec<Vec<f32>> = (0..4).map(logits).collect();
    let likely: Vec<Vec<(u32, f32)>> = rows.iter().map(|row| top_k(row, 64)).collect::<Result<_, _>>()?;
    let mut encoder = Encoder::new(VOCAB, Tolerance::default(), ValueType::F16)?;
    let mut softmax = Softmax::new(VOCAB)?;
    let mut corrections = Vec::new();
    let mut hash = 0u64;
    for n in 0..count {
        let logits = &rows[n as usize % rows.len()];
        let bits = match step.as_str() {
            "softmax" => {
                softmax.load(logits)?;
                softmax.logsumexp().to_bits()
            }
            "top" => top_k(logits, 64)?.iter().fold(0, |sum, t| sum ^ u64::from(t.0) ^ u64::from(t.1.to_bits()) << 32),
            _ => {
                let stream = NoiseStream::new(DrawKey::new(42, 0), n, n as u32);
                let x = likely[n as usize % rows.len()][(n * n % 61) as usize].0;
                encoder.encode(logits, x, &stream, &mut corrections)?.total_variation.to_bits()
            }
        };
        hash = splitmix64(hash ^ bits);
    }
    let corrections = corrections.iter().map(|c| u64::from(c.index) << 32 | u64::from(c.logprob.to_bits()));
    let (count_of_corrections, hash) = corrections.fold((0u64, hash), |(n, hash), c| (n + 1, splitmix64(hash ^ c)));
    println!("{step}: {count} rows, {count_of_corrections} corrections, hash {hash:016x}");
    Ok(())
}
