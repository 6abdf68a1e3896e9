//! Measures products of a forward pass against the machine's peak, in turn: `peak_share ARITHMETIC [ROWSxOUTPUTSxINPUTS
//! ..]`. Prints GFLOP/s of each shape on one thread, the peak, and the share of it.

#[path = "../benches/peak/mod.rs"]
mod peak;

use std::time::Instant;
use stillhouse_cpu::{Arithmetic, Epilogue, Layout, PackedWeight, Rows, RowsMut, Scratch, Threads, product};

const ROUNDS: usize = 40;
const SHAPES: [&str; 9] = [
    "128x960x576",
    "128x576x576",
    "128x3072x576",
    "128x576x1536",
    "64x49152x576",
    "160x49152x576",
    "2048x3072x576",
    "256x2048x8192",
    "256x192x64",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let name = arguments.first().map_or("f32", String::as_str);
    let arithmetic = Arithmetic::ALL.into_iter().find(|a| a.name() == name).ok_or("a name that Arithmetic has")?;
    let shapes: Vec<&str> =
        if arguments.len() > 1 { arguments[1..].iter().map(String::as_str).collect() } else { SHAPES.to_vec() };
    let (_, work) = *peak::peak_loops(arithmetic).first().ok_or("this machine has no such products")?;
    println!("{:>20} {:>9} {:>9} {:>6}", "rows x outputs x in", "GFLOP/s", "peak", "share");
    for shape in shapes {
        let sizes = shape.split('x').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let [rows, outputs, inputs] = sizes[..] else { return Err("ROWSxOUTPUTSxINPUTS".into()) };
        let numbers = |n: usize, period: usize| (0..n).map(|i| (i % period) as f32 * 0.01 - 0.5).collect::<Vec<_>>();
        let (x, weight) = (numbers(rows * inputs, 101), numbers(outputs * inputs, 97));
        let packed = PackedWeight::new(&weight, outputs, inputs, Layout::Outputs { stride: inputs }, arithmetic)?;
        let (mut out, mut scratch) = (vec![0.0; rows * outputs], Scratch::new());
        let mut found = Vec::new();
        let flops = 2.0 * (rows * outputs * inputs) as f64;
        let times = (2e8 / flops).ceil() as usize;
        for _ in 0..ROUNDS {
            let before = peak::gflops(work, 1, 0.0);
            let start = Instant::now();
            for _ in 0..times {
                let x = Rows { data: &x, rows, stride: inputs };
                let to = RowsMut { data: &mut out, rows, stride: outputs };
                product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut scratch)?;
            }
            let rate = flops * times as f64 / start.elapsed().as_secs_f64() / 1e9;
            let limit = f64::midpoint(before, peak::gflops(work, 1, 0.0));
            found.push((rate / limit, rate, limit));
        }
        // Sorts by share, to take the median.
        found.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (share, rate, limit) = found[found.len() / 2];
        println!("{shape:>20} {rate:>9.0} {limit:>9.0} {share:>6.2}");
    }
    Ok(())
}
