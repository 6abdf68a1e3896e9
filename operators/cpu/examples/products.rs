//! Runs one product on fixed input several times, for a profiler that counts instructions: `products ARITHMETIC ROWS
//! OUTPUTS INPUTS TIMES`. Prints the sum of the result.

use stillhouse_cpu::{Arithmetic, Epilogue, Layout, PackedWeight, Rows, RowsMut, Scratch, Threads, product};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [arithmetic, sizes @ ..] = arguments.as_slice() else {
        return Err("ARITHMETIC ROWS OUTPUTS INPUTS TIMES".into());
    };
    let arithmetic =
        Arithmetic::ALL.into_iter().find(|a| a.name() == arithmetic).ok_or("a name that Arithmetic has")?;
    let sizes = sizes.iter().map(|size| size.parse()).collect::<Result<Vec<usize>, _>>()?;
    let [rows, outputs, inputs, times] = sizes[..] else { return Err("ROWS OUTPUTS INPUTS TIMES are missing".into()) };

    let numbers = |n: usize, period: usize| (0..n).map(|i| (i % period) as f32 * 0.01 - 0.5).collect::<Vec<_>>();
    let (x, weight) = (numbers(rows * inputs, 101), numbers(outputs * inputs, 97));
    let packed = PackedWeight::new(&weight, outputs, inputs, Layout::Outputs { stride: inputs }, arithmetic)?;
    let mut out = vec![0.0; rows * outputs];
    let mut scratch = Scratch::new();
    for _ in 0..times {
        let x = Rows { data: &x, rows, stride: inputs };
        let to = RowsMut { data: &mut out, rows, stride: outputs };
        product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut scratch)?;
    }
    println!("{}", out.iter().map(|v| f64::from(*v)).sum::<f64>());
    Ok(())
}
