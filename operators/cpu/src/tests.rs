//! Compares products of every level that this machine has with f64 references and with each other.

use crate::arithmetic::Level;
use crate::weight::PackedWeight;
use crate::{Arithmetic, Epilogue, Layout, ProductError, Rows, RowsMut, Scratch, Threads, product};

/// Pseudo-random numbers in (-1, 1) from `seed`, uncorrelated enough for sums.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn levels() -> Vec<(Arithmetic, Level)> {
    let all = Arithmetic::ALL.into_iter();
    all.flat_map(|arithmetic| Level::all(arithmetic).into_iter().map(move |level| (arithmetic, level))).collect()
}

/// The contiguous rows and weight of a product, with their sizes.
struct Case {
    rows: usize,
    outputs: usize,
    inputs: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
}

impl Case {
    fn new(rows: usize, outputs: usize, inputs: usize) -> Self {
        let x = noise(rows * inputs, (rows * 31 + outputs * 7 + inputs) as u64);
        let weight = noise(outputs * inputs, (rows + outputs * 3 + inputs * 5) as u64);
        Self { rows, outputs, inputs, x, weight }
    }

    fn pack(&self, arithmetic: Arithmetic, level: Level) -> PackedWeight {
        let layout = Layout::Outputs { stride: self.inputs };
        PackedWeight::with_level(&[&self.weight], self.outputs, self.inputs, layout, arithmetic, level).unwrap()
    }

    fn rows(&self) -> Rows<'_> {
        Rows { data: &self.x, rows: self.rows, stride: self.inputs }
    }

    /// Returns the exact value and the sum of its terms' magnitudes.
    fn exact(&self, r: usize, o: usize) -> (f64, f64) {
        let x = &self.x[r * self.inputs..(r + 1) * self.inputs];
        let w = &self.weight[o * self.inputs..(o + 1) * self.inputs];
        x.iter().zip(w).fold((0.0, 0.0), |(sum, size), (x, w)| {
            let term = f64::from(*x) * f64::from(*w);
            (sum + term, size + term.abs())
        })
    }

    /// Returns the largest error that rounding in this arithmetic can explain.
    ///
    /// Each term's relative error comes from the rounding of its two operands. The sum's error comes from the number of
    /// additions that a term passes through.
    fn bound(&self, arithmetic: Arithmetic, size: f64) -> f64 {
        let additions = self.inputs as f64 + 8.0;
        let sum = additions * f64::from(f32::EPSILON) * size;
        match arithmetic {
            Arithmetic::F32 => sum,
            Arithmetic::F32OfF16 => sum + 2f64.powi(-11) * size + self.inputs as f64 * 2f64.powi(-25),
            Arithmetic::F32OfBf16 => sum + 2f64.powi(-8) * size,
            // 32 additions in f16 of partial sums, each at most the sum of magnitudes.
            Arithmetic::F16 => sum + 34.0 * 2f64.powi(-11) * size + self.inputs as f64 * 2f64.powi(-20),
            Arithmetic::Bf16 => sum + 2.0 * 2f64.powi(-8) * size,
            // Three times as many additions, the omitted product, and the rest of each operand that its two parts do
            // not hold.
            Arithmetic::Bf16x3 => 3.0 * sum + 3.0 * 2f64.powi(-17) * size,
        }
    }
}

fn run(case: &Case, packed: &PackedWeight, threads: Threads) -> Vec<f32> {
    let mut out = vec![f32::NAN; case.rows * case.outputs];
    let to = RowsMut { data: &mut out, rows: case.rows, stride: case.outputs };
    product(case.rows(), packed, None, Epilogue::Store, to, threads, &mut Scratch::new()).unwrap();
    out
}

fn check(case: &Case, arithmetic: Arithmetic, level: Level) {
    let out = run(case, &case.pack(arithmetic, level), Threads::One);
    for r in 0..case.rows {
        for o in 0..case.outputs {
            let (want, size) = case.exact(r, o);
            let (got, bound) = (f64::from(out[r * case.outputs + o]), case.bound(arithmetic, size));
            assert!(
                (got - want).abs() <= bound,
                "{arithmetic:?} {} {}x{}x{}: [{r}, {o}] is {got}, not {want} +- {bound}",
                level.name(),
                case.rows,
                case.outputs,
                case.inputs
            );
        }
    }
}

#[test]
fn products_are_within_the_error_of_their_types() {
    for (arithmetic, level) in levels() {
        for rows in 1..=40 {
            check(&Case::new(rows, 37, 29), arithmetic, level);
        }
        for (rows, outputs, inputs) in
            [(1, 1, 1), (3, 129, 1), (2, 5, 2000), (17, 64, 64), (33, 100, 577), (70, 31, 1537), (5, 33, 16)]
        {
            check(&Case::new(rows, outputs, inputs), arithmetic, level);
        }
    }
}

#[test]
fn small_integers_are_exact() {
    for (arithmetic, level) in levels() {
        let mut case = Case::new(19, 70, 45);
        case.x.iter_mut().enumerate().for_each(|(i, x)| *x = (i % 7) as f32 - 3.0);
        case.weight.iter_mut().enumerate().for_each(|(i, w)| *w = (i % 5) as f32 - 2.0);
        let out = run(&case, &case.pack(arithmetic, level), Threads::One);
        for (i, got) in out.iter().enumerate() {
            assert_eq!(f64::from(*got), case.exact(i / 70, i % 70).0, "{arithmetic:?} {}", level.name());
        }
    }
}

#[test]
fn a_row_depends_neither_on_threads_nor_on_other_rows() {
    for (arithmetic, level) in levels() {
        let case = Case::new(151, 480, 580);
        let packed = case.pack(arithmetic, level);
        let whole = run(&case, &packed, Threads::One);
        for threads in [2, 3, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let got = pool.install(|| run(&case, &packed, Threads::Pool));
            assert!(got == whole, "{arithmetic:?} {} with {threads} threads", level.name());
        }
        for (first, rows) in [(0, 1), (7, 1), (9, 2), (50, 3), (60, 4), (5, 5), (3, 13), (20, 14), (100, 29), (1, 150)]
        {
            let x = Rows { data: &case.x[first * 580..], rows, stride: 580 };
            let mut out = vec![f32::NAN; rows * 480];
            let to = RowsMut { data: &mut out, rows, stride: 480 };
            product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut Scratch::new()).unwrap();
            let same = out == whole[first * 480..(first + rows) * 480];
            assert!(same, "{arithmetic:?} {}: rows {first}..{}", level.name(), first + rows);
        }
    }
}

/// Calls with few rows, which process several panels at once, return the same bits as calls with many rows. This covers
/// the end of the last group, and more than one block of sums.
#[test]
fn few_rows_are_those_of_many() {
    for (arithmetic, level) in levels() {
        for (outputs, inputs) in [(300, 1600), (513, 90), (70, 5000)] {
            let case = Case::new(20, outputs, inputs);
            let packed = case.pack(arithmetic, level);
            let whole = run(&case, &packed, Threads::One);
            for rows in 1..=5 {
                let x = Rows { data: &case.x[7 * inputs..], rows, stride: inputs };
                let mut out = vec![f32::NAN; rows * outputs];
                let to = RowsMut { data: &mut out, rows, stride: outputs };
                product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut Scratch::new()).unwrap();
                let same = out == whole[7 * outputs..(7 + rows) * outputs];
                assert!(same, "{arithmetic:?} {}: {rows} rows of {outputs} x {inputs}", level.name());
            }
        }
    }
}

#[test]
fn long_rows_summed_in_parts_are_whole() {
    for (arithmetic, level) in levels() {
        check(&Case::new(3, 70, 4500), arithmetic, level);
        let case = Case::new(75, 200, 4197);
        let packed = case.pack(arithmetic, level);
        let whole = run(&case, &packed, Threads::One);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().unwrap();
        assert!(pool.install(|| run(&case, &packed, Threads::Pool)) == whole, "{arithmetic:?} {}", level.name());
        let x = Rows { data: &case.x[11 * 4197..], rows: 1, stride: 4197 };
        let mut out = vec![f32::NAN; 200];
        let to = RowsMut { data: &mut out, rows: 1, stride: 200 };
        product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut Scratch::new()).unwrap();
        assert!(out == whole[11 * 200..12 * 200], "{arithmetic:?} {}", level.name());
    }
}

#[test]
fn a_scale_is_of_a_row_and_of_an_output() {
    // The magnitudes are outside the range of f16. F32OfF16 is excluded because its weights have no scale.
    for (arithmetic, level) in levels().into_iter().filter(|(a, _)| *a != Arithmetic::F32OfF16) {
        let mut case = Case::new(6, 40, 64);
        case.x.iter_mut().enumerate().for_each(|(i, x)| *x *= 10f32.powi((i / 64) as i32 * 4 - 12));
        case.weight.iter_mut().enumerate().for_each(|(i, w)| *w *= 10f32.powi((i / 64 % 5) as i32 * 3 - 6));
        let out = run(&case, &case.pack(arithmetic, level), Threads::One);
        for (i, got) in out.iter().enumerate() {
            let (want, size) = case.exact(i / 40, i % 40);
            assert!((f64::from(*got) - want).abs() <= 0.02 * size, "{arithmetic:?} {}: {got}, {want}", level.name());
        }
    }
}

#[test]
fn strides_layouts_and_used_scratch_change_no_bit() {
    for (arithmetic, level) in levels() {
        let (rows, outputs, inputs) = (23, 75, 131);
        let case = Case::new(rows, outputs, inputs);
        let want = run(&case, &case.pack(arithmetic, level), Threads::One);

        let mut x = vec![f32::NAN; rows * 140];
        let mut by_input = vec![f32::NAN; inputs * 80];
        for r in 0..rows {
            x[r * 140..r * 140 + inputs].copy_from_slice(&case.x[r * inputs..(r + 1) * inputs]);
        }
        for o in 0..outputs {
            for k in 0..inputs {
                by_input[k * 80 + o] = case.weight[o * inputs + k];
            }
        }
        let layout = Layout::Inputs { stride: 80 };
        let packed = PackedWeight::with_level(&[&by_input], outputs, inputs, layout, arithmetic, level).unwrap();
        let mut scratch = Scratch::new();
        let big = Case::new(64, 40, 900);
        let mut big_out = vec![0.0; 64 * 40];
        let to = RowsMut { data: &mut big_out, rows: 64, stride: 40 };
        let big_packed = big.pack(arithmetic, level);
        product(big.rows(), &big_packed, None, Epilogue::Store, to, Threads::One, &mut scratch).unwrap();

        let mut out = vec![7.0; rows * 77];
        let to = RowsMut { data: &mut out, rows, stride: 77 };
        let x = Rows { data: &x, rows, stride: 140 };
        product(x, &packed, None, Epilogue::Store, to, Threads::One, &mut scratch).unwrap();
        for (out, want) in out.chunks_exact(77).zip(want.chunks_exact(outputs)) {
            assert!(out[..outputs] == *want, "{arithmetic:?} {}", level.name());
            assert_eq!(out[outputs..], [7.0, 7.0], "{arithmetic:?}: floats between rows");
        }
    }
}

#[test]
fn epilogues_are_what_they_say() {
    use crate::elementwise::{gelu, silu};
    for (arithmetic, level) in levels() {
        let (rows, outputs, inputs) = (16, 86, 50);
        let case = Case::new(rows, outputs, inputs);
        let packed = case.pack(arithmetic, level);
        let plain = run(&case, &packed, Threads::One);
        let bias = noise(outputs, 5);
        let residual = noise(rows * outputs, 6);
        let with = |packed: &PackedWeight, bias: Option<&[f32]>, epilogue, columns: usize| {
            let mut out = residual[..rows * columns].to_vec();
            let to = RowsMut { data: &mut out, rows, stride: columns };
            product(case.rows(), packed, bias, epilogue, to, Threads::One, &mut Scratch::new()).unwrap();
            out
        };
        let stored = with(&packed, Some(&bias), Epilogue::Store, outputs);
        let added = with(&packed, Some(&bias), Epilogue::Add, outputs);
        let added_plain = with(&packed, None, Epilogue::Add, outputs);
        let curved = with(&packed, Some(&bias), Epilogue::Gelu, outputs);
        for i in 0..rows * outputs {
            let v = plain[i] + bias[i % outputs];
            assert_eq!(stored[i], v, "{arithmetic:?} {}", level.name());
            assert_eq!(added[i], residual[i] + v, "{arithmetic:?} {}", level.name());
            assert_eq!(added_plain[i], residual[i] + plain[i], "{arithmetic:?} {}", level.name());
            assert_eq!(curved[i].to_bits(), gelu(v).to_bits(), "{arithmetic:?} {}", level.name());
        }

        let half = outputs / 2;
        let (gate, up) = case.weight.split_at(half * inputs);
        let layout = Layout::Outputs { stride: inputs };
        let paired = PackedWeight::with_level(&[gate, up], half, inputs, layout, arithmetic, level).unwrap();
        assert_eq!((paired.outputs(), paired.inputs()), (outputs, inputs));
        for bias in [None, Some(bias.as_slice())] {
            let gated = with(&paired, bias, Epilogue::SwiGlu, half);
            for r in 0..rows {
                for o in 0..half {
                    let v = |o: usize| plain[r * outputs + o] + bias.map_or(0.0, |bias| bias[o]);
                    let want = silu(v(o)) * v(half + o);
                    assert_eq!(gated[r * half + o], want, "{arithmetic:?} {}", level.name());
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_not_lost() {
    for (arithmetic, level) in levels() {
        let mut case = Case::new(20, 40, 70);
        case.x[3 * 70 + 5] = f32::NAN;
        case.x[8 * 70 + 69] = f32::INFINITY;
        case.weight.iter_mut().for_each(|w| *w = w.abs() + 0.01);
        let out = run(&case, &case.pack(arithmetic, level), Threads::One);
        for (r, row) in out.chunks_exact(40).enumerate() {
            let lost = match r {
                3 => row.iter().any(|v| !v.is_nan()),
                8 => row.iter().any(|v| v.is_finite()),
                _ => row.iter().any(|v| !v.is_finite()),
            };
            assert!(!lost, "{arithmetic:?} {}: row {r} is {row:?}", level.name());
        }
    }
    let mut case = Case::new(2, 40, 20);
    case.weight[35 * 20] = f32::NAN;
    for (arithmetic, level) in levels() {
        let layout = Layout::Outputs { stride: 20 };
        match PackedWeight::with_level(&[&case.weight], 40, 20, layout, arithmetic, level) {
            Ok(packed) => assert!(run(&case, &packed, Threads::One)[40 + 35].is_nan(), "{arithmetic:?}"),
            Err(e) => assert_eq!(e, ProductError::NotFinite { output: 35, arithmetic: arithmetic.name() }),
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    let data = vec![1.0; 64];
    let new = |outputs, inputs, layout| PackedWeight::new(&data, outputs, inputs, layout, Arithmetic::F32).map(|_| ());
    assert_eq!(new(8, 8, Layout::Outputs { stride: 8 }), Ok(()));
    assert!(matches!(new(8, 9, Layout::Outputs { stride: 8 }), Err(ProductError::Memory { columns: 9, .. })));
    assert!(matches!(new(9, 8, Layout::Outputs { stride: 8 }), Err(ProductError::Memory { rows: 9, .. })));
    assert!(matches!(new(9, 8, Layout::Inputs { stride: 8 }), Err(ProductError::Memory { columns: 9, .. })));
    assert!(matches!(new(2, 2, Layout::Outputs { stride: usize::MAX }), Err(ProductError::Memory { .. })));
    assert!(matches!(new(0, 8, Layout::Outputs { stride: 8 }), Err(ProductError::Empty { rows: 0, .. })));

    let packed = PackedWeight::new(&data, 4, 8, Layout::Outputs { stride: 8 }, Arithmetic::F32).unwrap();
    let paired = PackedWeight::gate_up(&data, &data, 2, 8, Layout::Outputs { stride: 8 }, Arithmetic::F32).unwrap();
    let call = |packed: &PackedWeight, x: (usize, usize), out: (usize, usize), bias: usize, epilogue| {
        let mut to = vec![3.0; 20];
        let result = product(
            Rows { data: &data, rows: x.0, stride: x.1 },
            packed,
            Some(&data[..bias]),
            epilogue,
            RowsMut { data: &mut to, rows: out.0, stride: out.1 },
            Threads::One,
            &mut Scratch::new(),
        );
        assert!(result.is_ok() || to == [3.0; 20], "out was written before {result:?}");
        result
    };
    let store = Epilogue::Store;
    assert_eq!(call(&packed, (5, 8), (5, 4), 4, store), Ok(()));
    assert!(matches!(call(&packed, (5, 7), (5, 4), 4, store), Err(ProductError::Memory { what: "x", .. })));
    assert!(matches!(call(&packed, (9, 8), (5, 4), 4, store), Err(ProductError::Memory { what: "x", .. })));
    assert!(matches!(call(&packed, (5, 8), (5, 3), 4, store), Err(ProductError::Memory { what: "out", .. })));
    assert!(matches!(call(&packed, (6, 8), (6, 4), 4, store), Err(ProductError::Memory { what: "out", .. })));
    assert!(matches!(call(&packed, (5, 8), (4, 4), 4, store), Err(ProductError::Size { got: 4, valid: 5, .. })));
    assert!(matches!(call(&packed, (5, 8), (5, 4), 3, store), Err(ProductError::Size { got: 3, valid: 4, .. })));
    assert!(matches!(call(&packed, (0, 8), (0, 4), 4, store), Err(ProductError::Empty { what: "x", .. })));
    assert!(matches!(call(&packed, (5, 8), (5, 4), 4, Epilogue::SwiGlu), Err(ProductError::Pairing { .. })));
    assert!(matches!(call(&paired, (5, 8), (5, 4), 4, store), Err(ProductError::Pairing { .. })));
    assert_eq!(call(&paired, (5, 8), (5, 2), 4, Epilogue::SwiGlu), Ok(()));
}

#[test]
fn names_are_those_of_manifests() {
    let names = ["f32", "f32-of-f16", "f32-of-bf16", "f16", "bf16", "bf16x3"];
    assert_eq!(Arithmetic::ALL.map(Arithmetic::name), names);
    assert!(Arithmetic::F32.is_available());
    for arithmetic in Arithmetic::ALL {
        assert_eq!(crate::level_name(arithmetic) == "unavailable", !arithmetic.is_available());
        let layout = Layout::Outputs { stride: 1 };
        match PackedWeight::new(&[1.0], 1, 1, layout, arithmetic) {
            Ok(packed) => assert!(arithmetic.is_available() && packed.arithmetic() == arithmetic),
            Err(e) => assert!(!arithmetic.is_available() && e.to_string().contains("f32"), "{e}"),
        }
    }
}
