//! Checks the forward kernels on the host, and whole nets, against f64.
//!
//! Inputs are rounded to the kernel's dtype before f64 uses them. The bounds therefore measure only the arithmetic and
//! the rounding of stored values.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "forward/common.rs"]
mod common;
#[path = "forward/fp8.rs"]
mod fp8;
#[path = "forward/mutants.rs"]
mod mutants;
#[path = "forward/naive.rs"]
mod naive;
#[path = "forward/nets.rs"]
mod nets;
#[path = "forward/widen.rs"]
mod widen;

use common::*;
use stillhouse_gpu::net::kernels::{Heads, Kernels, NormParams, RopeInputs, padded_dim, query_rows, work_items};
use stillhouse_gpu::{Buffer, Element, Matrix, Product, Stream};

#[test]
fn embeddings_are_summed() {
    for (element, width) in ELEMENTS.into_iter().flat_map(|e| [(e, 7), (e, 40), (e, 264)]) {
        let device = host(1);
        let (vocab, positions, rows) = (19, 11, 23);
        let (wte, wpe) = (random_values(1, vocab * width), random_values(2, positions * width));
        let (tokens, at) = (random_below(3, rows, vocab as u32), random_below(4, rows, positions as u32));
        let buffers = [upload(&device, &wte, element), upload(&device, &wpe, element)];
        let words = [upload_u32s(&device, &tokens), upload_u32s(&device, &at)];
        let x = empty_buffer(&device, rows * width, element);
        let kernels = Kernels::new(&device, element);
        for with_positions in [true, false] {
            let wpe_at = with_positions.then(|| buffers[1].pointer());
            let words = [words[0].pointer(), words[1].pointer()];
            unsafe { kernels.embed(words, buffers[0].pointer(), wpe_at, x.pointer(), [rows, width]) }.unwrap();
            let (wte, wpe) = (rounded(&wte, element), rounded(&wpe, element));
            let want: Vec<f64> = (0..rows * width)
                .map(|i| {
                    let (row, c) = (i / width, i % width);
                    let p = if with_positions { wpe[at[row] as usize * width + c] } else { 0.0 };
                    wte[tokens[row] as usize * width + c] + p
                })
                .collect();
            assert_near("embed", &download(&x, element), &want, element, 1.0, 0.0);
        }
    }
}

#[test]
fn rows_are_gathered() {
    for (element, width) in ELEMENTS.into_iter().flat_map(|e| [(e, 7), (e, 72)]) {
        let device = host(2);
        let from = random_values(1, 30 * width);
        let rows = random_below(2, 41, 30);
        let (source, words) = (upload(&device, &from, element), upload_u32s(&device, &rows));
        let to = empty_buffer(&device, rows.len() * width, element);
        let size = [rows.len(), width];
        unsafe { Kernels::new(&device, element).gather(source.pointer(), words.pointer(), to.pointer(), size) }
            .unwrap();
        let from = rounded(&from, element);
        let want: Vec<f64> = rows.iter().flat_map(|r| from[*r as usize * width..][..width].to_vec()).collect();
        assert_eq!(download(&to, element), want);
    }
}

#[test]
fn norms_of_residual_sums_are_those_of_f64() {
    for (element, width) in ELEMENTS.into_iter().flat_map(|e| [(e, 5), (e, 64), (e, 200), (e, 2056)]) {
        let rows = 3;
        // A mean far from 0, with which a variance could cancel.
        let x: Vec<f32> = random_values(1, rows * width).iter().map(|x| x + 2.0).collect();
        let (y, w, b) = (random_values(2, rows * width), random_values(3, width), random_values(4, width));
        for (add, centred) in [(false, false), (false, true), (true, false), (true, true)] {
            let device = host(3);
            let [bx, by, bw, bb] = [&x, &y, &w, &b].map(|values| upload(&device, values, element));
            let out = empty_buffer(&device, rows * width, element);
            let scale = NormParams { weight: bw.pointer(), bias: centred.then(|| bb.pointer()), eps: 1e-5 };
            let y_at = add.then(|| by.pointer());
            let kernels = Kernels::new(&device, element);
            unsafe { kernels.add_norm(bx.pointer(), y_at, &scale, out.pointer(), [rows, width]) }.unwrap();
            let stored = download(&bx, element);
            let sums: Vec<f64> = rounded(&x, element)
                .iter()
                .zip(rounded(&y, element))
                .map(|(x, y)| if add { x + y } else { *x })
                .collect();
            assert_near("residual", &stored, &sums, element, 1.0, 0.0);
            let (w, b) = (rounded(&w, element), rounded(&b, element));
            let norm = |x: &[f64]| match centred {
                true => naive::layer_norm(x, &w, &b, 1e-5),
                false => naive::rms_norm(x, &w, 1e-5),
            };
            let want: Vec<f64> = stored.chunks_exact(width).flat_map(norm).collect();
            // One rounding of the stored value. In f32 also those of the mean and the sums, relative to numbers of size
            // 2 and more.
            let (units, scale) = if element == Element::F32 { (12.0, 1.0) } else { (1.01, 0.05) };
            assert_near("norm", &download(&out, element), &want, element, units, scale);
        }
    }
}

fn rope_tables(positions: usize, half: usize) -> [Vec<f32>; 2] {
    let angle = |i: usize| (i / half) as f64 * 10_000f64.powf(-((i % half) as f64) / half as f64);
    [f64::cos, f64::sin].map(|f| (0..positions * half).map(|i| f(angle(i)) as f32).collect())
}

#[test]
fn heads_are_normalised_and_rotated() {
    for (element, dim) in ELEMENTS.into_iter().flat_map(|e| [16, 32, 64, 80, 96, 128, 256].map(|d| (e, d))) {
        let (heads, kv, tokens, positions) = (4, 2, 7, 13);
        let width = (heads + 2 * kv) * dim;
        let (qkv, at) = (random_values(1, tokens * width), random_below(2, tokens, positions as u32));
        let [cos, sin] = rope_tables(positions, dim / 2);
        let norms = [random_values(3, dim), random_values(4, dim)];
        for normed in [false, true] {
            let device = host(4);
            let rows = upload(&device, &qkv, element);
            let tables = [&cos, &sin].map(|t| upload(&device, t, Element::F32));
            let words = upload_u32s(&device, &at);
            let weights = [&norms[0], &norms[1]].map(|w| upload(&device, w, element));
            let rotation = RopeInputs {
                cos: tables[0].pointer(),
                sin: tables[1].pointer(),
                positions: words.pointer(),
                norms: normed.then(|| [weights[0].pointer(), weights[1].pointer()]),
                eps: 1e-6,
            };
            let shape = Heads { heads, kv_heads: kv, dim, model_dim: dim };
            unsafe { Kernels::new(&device, element).rope(rows.pointer(), &rotation, &shape, tokens) }.unwrap();
            let mut want = rounded(&qkv, element);
            for (i, head) in want.chunks_exact_mut(dim).enumerate() {
                let (token, head_of) = (i / (heads + 2 * kv), i % (heads + 2 * kv));
                if head_of >= heads + kv {
                    continue;
                }
                if normed {
                    let weight = rounded(&norms[usize::from(head_of >= heads)], element);
                    head.copy_from_slice(&naive::rms_norm(head, &weight, 1e-6));
                }
                let from = at[token] as usize * dim / 2;
                let part = |t: &[f32]| rounded(&t[from..from + dim / 2], Element::F32);
                naive::rotate(head, &part(&cos), &part(&sin));
            }
            let units = if element == Element::F32 { 8.0 } else { 1.01 };
            assert_near(&format!("rope of {dim}"), &download(&rows, element), &want, element, units, 0.5);
        }
    }
}

#[test]
fn activations_are_those_of_f64() {
    for (element, inner) in ELEMENTS.into_iter().flat_map(|e| [(e, 5), (e, 64), (e, 1032)]) {
        let (device, rows) = (host(5), 3);
        // From inputs where activations are 0 to inputs where they are the identity.
        let x: Vec<f32> = random_values(1, rows * 2 * inner).iter().map(|x| 12.0 * x).collect();
        let gate_up = upload(&device, &x, element);
        let out = empty_buffer(&device, rows * inner, element);
        let kernels = Kernels::new(&device, element);
        let other = upload(&device, &x, element);
        let wide = rounded(&x, element);
        let gated = |of: fn(f64) -> f64| -> Vec<f64> {
            let row = |row: &[f64]| row[..inner].iter().zip(&row[inner..]).map(|(g, u)| of(*g) * u).collect::<Vec<_>>();
            wide.chunks_exact(2 * inner).flat_map(row).collect()
        };
        let activated = |of: fn(f64) -> f64| wide.iter().map(|x| of(*x)).collect::<Vec<_>>();
        let units = if element == Element::F32 { 16.0 } else { 1.01 };
        unsafe { kernels.swiglu(gate_up.pointer(), out.pointer(), [rows, inner]) }.unwrap();
        assert_near("swiglu", &download(&out, element), &gated(naive::silu), element, units, 1.0);
        unsafe { kernels.geglu(gate_up.pointer(), out.pointer(), [rows, inner]) }.unwrap();
        assert_near("geglu", &download(&out, element), &gated(naive::gelu_new), element, units, 1.0);
        unsafe { kernels.gelu_new(gate_up.pointer(), [rows, 2 * inner]) }.unwrap();
        assert_near("gelu_new", &download(&gate_up, element), &activated(naive::gelu_new), element, units, 1.0);
        unsafe { kernels.gelu(other.pointer(), [rows, 2 * inner]) }.unwrap();
        assert_near("gelu", &download(&other, element), &activated(naive::gelu), element, units, 1.0);
    }
}

/// The `i`-th number of a key, by the definition.
fn random_normal(key: u64, i: u64) -> f64 {
    let mut z = key.wrapping_add(i).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let sum = (0..4).map(|part| (z >> (16 * part)) & 0xffff).sum::<u64>();
    (sum as f64 - 131_070.0) / (65_536.0 / 3f64.sqrt())
}

#[test]
fn memory_is_filled_with_numbers_of_a_key() {
    // More than the threads of all blocks.
    let count = 2048 * 256 + 77;
    for element in ELEMENTS {
        let (device, key) = (host(6), u64::MAX - 5);
        let memory = empty_buffer(&device, count, element);
        unsafe { Kernels::new(&device, element).fill(memory.pointer(), count, key, [0.5, 1.0]) }.unwrap();
        let got = download(&memory, element);
        let want: Vec<f64> = (0..count as u64).map(|i| 0.5 * random_normal(key, i) + 1.0).collect();
        assert_near("fill", &got, &want, element, if element == Element::F32 { 3.0 } else { 1.01 }, 1.0);
        let mean = got.iter().sum::<f64>() / count as f64;
        let variance = got.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count as f64;
        assert!((mean - 1.0).abs() < 5e-3 && (variance - 0.25).abs() < 5e-3, "{mean}, {variance}");
    }
}

/// A product that ends in GELU equals the product followed by the kernel, apart from the rounding in between.
#[test]
fn products_end_in_gelu() {
    let (device, [m, n, k]) = (host(5), [5, 24, 40]);
    for element in [Element::Bf16, Element::F16] {
        let (x, w, b) = (random_values(1, m * k), random_values(2, n * k), random_values(3, n));
        let [x_at, w_at, b_at] = [&x, &w, &b].map(|values| upload(&device, values, element));
        let d = empty_buffer(&device, m * n, element);
        let matrix = |buffer: &Buffer, rows, columns| Matrix {
            pointer: buffer.pointer(),
            element,
            rows,
            columns,
            stride: columns,
        };
        let [x, w, b] = [&x, &w, &b].map(|values| rounded(values, element));
        for bias in [0, b_at.pointer()] {
            let (a, b_of, d_of) = (matrix(&x_at, m, k), matrix(&w_at, n, k), matrix(&d, m, n));
            let product = Product { a, b: b_of, d: d_of, bias, accumulate: false, gelu: true };
            assert!(device.fuses_gelu(&product).unwrap());
            assert!(!device.fuses_gelu(&Product { accumulate: true, ..product }).unwrap());
            unsafe { device.product(Stream::Pass, &product) }.unwrap();
            let sums = naive::linear(&x, k, &w, (bias != 0).then_some(&b));
            let want: Vec<f64> = sums.into_iter().map(naive::gelu_new).collect();
            assert_near("product and GELU", &download(&d, element), &want, element, 1.01, 0.01);
        }
        let in_f32 = Matrix { element: Element::F32, ..matrix(&d, m, n) };
        let product = Product {
            a: matrix(&x_at, m, k),
            b: matrix(&w_at, n, k),
            d: in_f32,
            bias: 0,
            accumulate: false,
            gelu: true,
        };
        assert!(!device.fuses_gelu(&product).unwrap());
    }
}

/// Attention over fused rows, on a host with this seed.
fn attend(seed: u64, element: Element, qkv: &[f32], offsets: &[u32], shape: &Heads) -> Vec<f64> {
    let device = host(seed);
    let items = work_items(offsets, query_rows(element, shape.dim));
    let words = upload_u32s(&device, items.as_flattened());
    let tokens = *offsets.last().unwrap() as usize;
    let (rows, out) = (upload(&device, qkv, element), empty_buffer(&device, tokens * shape.heads * shape.dim, element));
    let kernels = Kernels::new(&device, element);
    let (items, scale) = ([words.pointer(), items.len() as u64], 1.0 / (shape.model_dim as f64).sqrt());
    unsafe { kernels.attention(rows.pointer(), out.pointer(), items, scale, shape) }.unwrap();
    download(&out, element)
}

fn offsets(lengths: &[u32]) -> Vec<u32> {
    let mut offsets = vec![0];
    offsets.extend(lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    }));
    offsets
}

fn check_attention(dim: usize, heads: usize, kv: usize, lengths: &[u32]) {
    let offsets = offsets(lengths);
    let shape = Heads { heads, kv_heads: kv, dim, model_dim: dim };
    let width = (heads + 2 * kv) * dim;
    // Scores large enough that the softmax is not nearly uniform.
    let qkv: Vec<f32> = random_values(7, *offsets.last().unwrap() as usize * width).iter().map(|x| 2.0 * x).collect();
    for element in ELEMENTS {
        let got = attend(1, element, &qkv, &offsets, &shape);
        let rows = rounded(&qkv, element);
        let runs = offsets.windows(2).map(|run| &rows[run[0] as usize * width..run[1] as usize * width]);
        let want: Vec<f64> = runs.flat_map(|run| naive::attention(run, heads, kv, dim)).collect();
        // 16 bits: weights and stored values are rounded, and values are up to 2. f32: sums of up to 256 terms.
        let units = if element == Element::F32 { 64.0 } else { 2.0 };
        assert_near(&format!("attention of {dim}"), &got, &want, element, units, 2.0);
    }
}

#[test]
fn attention_of_runs_is_that_of_f64() {
    for dim in [16, 32] {
        check_attention(dim, 2, 2, &[1, 2, 63, 64, 65, 130]);
        check_attention(dim, 4, 1, &[65, 1, 130, 2]);
    }
}

#[test]
fn attention_with_heads_of_64_is_that_of_f64() {
    check_attention(64, 1, 1, &[1, 2, 63, 64, 65, 130]);
    check_attention(64, 4, 1, &[65, 3]);
}

#[test]
fn attention_with_heads_of_80_is_that_of_f64() {
    check_attention(80, 1, 1, &[130, 2, 64]);
    check_attention(80, 4, 1, &[65, 3]);
}

#[test]
fn attention_with_wide_heads_is_that_of_f64() {
    check_attention(128, 1, 1, &[130, 1, 63]);
    check_attention(128, 4, 1, &[65, 2]);
    for dim in [96, 192, 256] {
        check_attention(dim, 2, 1, &[66, 3]);
    }
}

#[test]
fn attention_has_the_same_bits_in_every_order_of_threads() {
    for (element, dim) in [(Element::F32, 32), (Element::Bf16, 64), (Element::F16, 128)] {
        let shape = Heads { heads: 2, kv_heads: 1, dim, model_dim: dim };
        let qkv = random_values(9, 72 * 4 * dim);
        let [first, rest @ ..] = [0, 1, 5, 99].map(|seed| attend(seed, element, &qkv, &[0, 70, 72], &shape));
        assert!(rest.iter().all(|other| *other == first), "{element:?}");
    }
}

#[test]
fn attention_of_large_scores_stays_finite() {
    // Values that f16 can hold, with scores far beyond the range of an exponential.
    let shape = Heads { heads: 1, kv_heads: 1, dim: 16, model_dim: 16 };
    let qkv: Vec<f32> = random_values(10, 70 * 48).iter().map(|x| 1000.0 * x).collect();
    for element in ELEMENTS {
        let got = attend(0, element, &qkv, &[0, 70], &shape);
        let want = naive::attention(&rounded(&qkv, element), 1, 1, 16);
        assert!(difference(&got, &want) <= 4.0 * rounding_unit(element).max(1e-5) * 1000.0, "{element:?}");
    }
}

#[test]
fn work_is_of_every_row_once_and_the_longest_comes_first() {
    let offsets = offsets(&[5, 0, 200, 64, 1, 129]);
    for rows in [32, 64, 128] {
        let items = work_items(&offsets, rows);
        let mut seen = vec![0; *offsets.last().unwrap() as usize];
        for [start, length, first, _] in &items {
            for row in *first..(*first + rows as u32).min(*length) {
                seen[(start + row) as usize] += 1;
            }
        }
        assert!(seen.iter().all(|count| *count == 1));
        let keys: Vec<u32> = items.iter().map(|[_, length, first, _]| (first + rows as u32).min(*length)).collect();
        assert!(keys.is_sorted_by(|a, b| a >= b), "{keys:?}");
    }
    assert_eq!(
        [1, 16, 20, 64, 65, 100, 112, 129, 256, 257].map(padded_dim).map(Option::unwrap_or_default),
        [16, 16, 32, 64, 80, 128, 128, 192, 256, 0]
    );
}
