//! Compares f32 products of weights in 16 bits with those of f32 panels, in turn: `widened_weights [ROWSxOUTPUTSxINPUTS
//! ..]`.
//!
//! Each round uses another copy of the weight, so that products of few rows read it from memory instead of a cache. The
//! copies take up to 96 MB. Prints medians of GFLOP/s and GB/s of f32, for one thread and for the pool. For the other
//! types, prints the speedup (the median of each round's ratio).

use std::time::Instant;
use stillhouse_cpu::{
    Arithmetic, Epilogue, Layout, PackedWeight, ProductError, Rows, RowsMut, Scratch, Threads, product,
};

const ROUNDS: usize = 31;
const BYTES: usize = 96 << 20;
const KINDS: [Arithmetic; 3] = [Arithmetic::F32, Arithmetic::F32OfF16, Arithmetic::F32OfBf16];
const SHAPES: [&str; 13] = [
    "1x576x576",
    "1x3072x576",
    "1x576x1536",
    "1x49152x576",
    "2x3072x576",
    "4x3072x576",
    "8x3072x576",
    "32x3072x576",
    "128x3072x576",
    "128x576x1536",
    "512x3072x576",
    "160x49152x576",
    "256x2048x8192",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let shapes = if arguments.is_empty() { SHAPES.map(str::to_owned).to_vec() } else { arguments };
    println!(
        "{:>20} {:>7} {:>9} {:>7} {:>7} {:>7}",
        "rows x outputs x in", "threads", "f32 GF/s", "GB/s", "f16 x", "bf16 x"
    );
    for shape in shapes {
        let sizes = shape.split('x').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let [rows, outputs, inputs] = sizes[..] else { return Err("ROWSxOUTPUTSxINPUTS".into()) };
        let numbers = |n: usize, period: usize| (0..n).map(|i| (i % period) as f32 * 0.01 - 0.5).collect::<Vec<_>>();
        let (x, weight) = (numbers(rows * inputs, 101), numbers(outputs * inputs, 97));
        let copies = (BYTES / (outputs * inputs * 4)).clamp(1, ROUNDS);
        let pack = |arithmetic| -> Result<Vec<PackedWeight>, ProductError> {
            let pack = |_| PackedWeight::new(&weight, outputs, inputs, Layout::Outputs { stride: inputs }, arithmetic);
            (0..copies).map(pack).collect()
        };
        let packed = [pack(KINDS[0])?, pack(KINDS[1])?, pack(KINDS[2])?];
        let (mut out, mut scratch) = (vec![0.0; rows * outputs], Scratch::new());
        for (threads, count) in [(Threads::One, 1), (Threads::Pool, rayon::current_num_threads())] {
            let mut found = [const { Vec::new() }; 3];
            for round in 0..ROUNDS + 2 {
                for (kind, found) in packed.iter().zip(&mut found) {
                    let x = Rows { data: &x, rows, stride: inputs };
                    let to = RowsMut { data: &mut out, rows, stride: outputs };
                    let start = Instant::now();
                    product(x, &kind[round % copies], None, Epilogue::Store, to, threads, &mut scratch)?;
                    found.push(start.elapsed().as_secs_f64());
                }
            }
            let ratio =
                |kind: usize| median(found[0].iter().zip(&found[kind]).map(|(f32, widened)| f32 / widened).collect());
            let (seconds, [f16, bf16]) = (median(found[0].clone()), [ratio(1), ratio(2)]);
            let (flops, bytes) = ((2 * rows * outputs * inputs) as f64, (4 * outputs * inputs) as f64);
            let (flops, bytes) = (flops / seconds / 1e9, bytes / seconds / 1e9);
            println!("{shape:>20} {count:>7} {flops:>9.1} {bytes:>7.1} {f16:>7.2} {bf16:>7.2}");
        }
    }
    Ok(())
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}
