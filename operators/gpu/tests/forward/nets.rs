//! Whole nets with random weights.

use std::sync::Arc;

use stillhouse_gpu::net::{Activation, Architecture, Net, RandomWeights, Rope, Shape, Source};
use stillhouse_gpu::{Buffer, Device, Element, Result, Stream};
use stillhouse_gpu_host::Host;

use crate::common::*;
use crate::naive::{Naive, Weights};
use crate::{offsets, rope_tables};

/// Random weights, seeded by their names, recorded as the net stores them.
pub struct RandomSource {
    element: Element,
    pub loaded: Weights,
}

impl RandomSource {
    pub fn new(element: Element) -> Self {
        Self { element, loaded: Weights::new() }
    }
}

impl Source for RandomSource {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let key = name.bytes().fold(7u64, |key, b| key.wrapping_mul(0x100_0000_01b3) ^ u64::from(b));
        let count = shape.iter().product();
        let mut values = random_values(key, count);
        match shape {
            [_] if name.ends_with("weight") => values.iter_mut().for_each(|v| *v = 1.0 + 0.2 * *v),
            [_] => values.iter_mut().for_each(|v| *v *= 0.2),
            _ => values.iter_mut().for_each(|v| *v *= (3.0 / shape[shape.len() - 1] as f32).sqrt()),
        }
        assert!(self.loaded.insert(name.into(), rounded(&values, self.element)).is_none(), "{name} is asked for twice");
        Ok(values)
    }
}

/// Three architectures with all activations and score scales. Heads with and without padding; widths that are multiples
/// of a vector and widths that are not.
pub fn shapes() -> [Shape; 6] {
    let gpt2 = Shape {
        architecture: Architecture::Gpt2,
        vocab: 41,
        width: 48,
        layers: 2,
        heads: 3,
        kv_heads: 3,
        head_dim: 16,
        inner: 68,
        activation: Activation::GeluTanh,
        scaled: true,
        scaled_by_layer: false,
        eps: 1e-5,
        positions: 80,
        tied: true,
        attention_bias: false,
        mlp_bias: false,
    };
    let gelu_exact = Shape { activation: Activation::Gelu, scaled: false, scaled_by_layer: true, inner: 72, ..gpt2 };
    let llama = Shape {
        architecture: Architecture::Llama,
        heads: 4,
        kv_heads: 2,
        head_dim: 20,
        width: 36,
        eps: 1e-6,
        activation: Activation::SwiGlu,
        tied: false,
        ..gpt2
    };
    let biased =
        Shape { attention_bias: true, mlp_bias: true, head_dim: 32, heads: 2, kv_heads: 1, tied: true, ..llama };
    let qwen3 = Shape { architecture: Architecture::Qwen3, kv_heads: 1, head_dim: 32, width: 40, inner: 56, ..llama };
    let geglu = Shape { activation: Activation::GeGlu, scaled_by_layer: true, ..llama };
    [gpt2, llama, biased, qwen3, gelu_exact, geglu]
}

pub const LENGTHS: [u32; 5] = [1, 66, 2, 10, 17];

fn load(device: &Arc<dyn Device>, shape: Shape, element: Element) -> (Net, Weights) {
    let mut source = RandomSource::new(element);
    let [cos, sin] = rope_tables(shape.positions, shape.head_dim / 2);
    let rope = shape.rotates().then_some(Rope { cos: &cos, sin: &sin });
    let net = Net::load(device, shape, element, rope, &mut source, 96).unwrap();
    (net, source.loaded)
}

pub fn states(device: &Arc<dyn Device>, net: &Net) -> Vec<u8> {
    let states = net.states();
    let mut bytes = vec![0; states.rows * states.columns * states.element.bytes()];
    unsafe { device.copy_to_host(Stream::Pass, bytes.as_mut_ptr(), states.pointer, bytes.len()) }.unwrap();
    device.wait(device.record(Stream::Pass).unwrap()).unwrap();
    bytes
}

pub fn logits(device: &Arc<dyn Device>, net: &mut Net, rows: &[u32]) -> Vec<u8> {
    let to = Buffer::new(device, rows.len() * net.shape().vocab * 4).unwrap();
    unsafe { net.logits(rows, to.pointer()) }.unwrap();
    to.to_host(Stream::Pass).unwrap()
}

/// Checks hidden states and logits. The bound is relative to the largest number.
fn check(shape: Shape, element: Element, bound: f64) {
    let device = host(1);
    let (mut net, weights) = load(&device, shape, element);
    let [cos, sin] = rope_tables(shape.positions, shape.head_dim / 2).map(|t| rounded(&t, Element::F32));
    let reference = Naive { shape, weights: &weights, cos: &cos, sin: &sin };
    let offsets = offsets(&LENGTHS);
    let tokens = random_below(11, 96, shape.vocab as u32);
    net.hidden(&tokens, &offsets).unwrap();
    let runs = offsets.windows(2).map(|run| &tokens[run[0] as usize..run[1] as usize]);
    let want: Vec<f64> = runs.flat_map(|run| reference.hidden(run)).collect();
    let got = values(&states(&device, &net), element);
    let error = difference(&got, &want) / largest(&want);
    assert!(error <= bound, "{shape:?} {element:?}: hidden {error:e} away, {} units", error / rounding_unit(element));
    // From the stored states, the product is close to f64 in every dtype. The bound covers the whole forward pass.
    let want = reference.logits(&want);
    let got = values(&logits(&device, &mut net, &(0..96).collect::<Vec<_>>()), Element::F32);
    let error = difference(&got, &want) / largest(&want);
    assert!(error <= bound, "{shape:?} {element:?}: logits {error:e} away, {} units", error / rounding_unit(element));
}

#[test]
fn nets_in_f32_are_those_of_f64() {
    shapes().into_iter().for_each(|shape| check(shape, Element::F32, 1e-5));
}

// A number passes some eight roundings in each of two layers. The test looks at the worst of thousands of numbers.
#[test]
fn nets_in_bf16_are_those_of_f64_but_for_roundings() {
    shapes().into_iter().for_each(|shape| check(shape, Element::Bf16, 8.0 * rounding_unit(Element::Bf16)));
}

#[test]
fn nets_in_f16_are_those_of_f64_but_for_roundings() {
    shapes().into_iter().for_each(|shape| check(shape, Element::F16, 8.0 * rounding_unit(Element::F16)));
}

#[test]
fn runs_in_one_pass_are_those_one_by_one() {
    for (shape, element) in shapes().into_iter().zip([Element::Bf16, Element::F32, Element::F16].into_iter().cycle()) {
        let device = host(2);
        let (mut net, _) = load(&device, shape, element);
        let offsets = offsets(&LENGTHS);
        let tokens = random_below(12, 96, shape.vocab as u32);
        net.hidden(&tokens, &offsets).unwrap();
        let together = states(&device, &net);
        let rows: Vec<u32> = (0..96).collect();
        let all = logits(&device, &mut net, &rows);
        let mut separate = (Vec::new(), Vec::new());
        for run in offsets.windows(2) {
            net.hidden(&tokens[run[0] as usize..run[1] as usize], &[0, run[1] - run[0]]).unwrap();
            separate.0.extend(states(&device, &net));
            separate.1.extend(logits(&device, &mut net, &rows[..(run[1] - run[0]) as usize]));
        }
        assert!(together == separate.0 && all == separate.1, "{shape:?} {element:?}");
    }
}

#[test]
fn nets_have_the_same_bits_in_every_order_of_threads() {
    for (shape, element) in shapes().into_iter().zip([Element::F16, Element::Bf16, Element::F32].into_iter().cycle()) {
        let bits = |seed: u64| {
            let device = host(seed);
            let (mut net, _) = load(&device, shape, element);
            net.hidden(&random_below(13, 40, 41), &[0, 3, 3, 40]).unwrap();
            states(&device, &net)
        };
        let first = bits(0);
        assert!([3, 77].into_iter().all(|seed| bits(seed) == first), "{shape:?} {element:?}");
    }
}

#[test]
fn logits_are_of_the_rows_asked_for() {
    let device = host(0);
    let [_, _, _, shape, ..] = shapes();
    let (mut net, _) = load(&device, shape, Element::Bf16);
    net.hidden(&random_below(14, 60, 41), &[0, 60]).unwrap();
    let row = shape.vocab * 4;
    let all = logits(&device, &mut net, &(0..60).collect::<Vec<_>>());
    let of = |rows: &[u32]| rows.iter().flat_map(|r| all[*r as usize * row..][..row].to_vec()).collect::<Vec<u8>>();
    // More slices than uploads may be in flight: neighbours, a gap, descending rows, repeated rows.
    for rows in [&[3, 4, 5][..], &[16, 17], &[7], &[59, 3], &[2, 2, 2], &[1, 2, 4], &[], &[8, 7, 6]] {
        assert_eq!(logits(&device, &mut net, rows), of(rows), "{rows:?}");
    }
    let error = unsafe { net.logits(&[60], 0) }.unwrap_err().to_string();
    assert_eq!(error, "row of the head: got 60, valid: below 60, the tokens of the last pass");
}

#[test]
fn memory_is_what_was_said_and_none_is_asked_for_later() {
    for (shape, element) in shapes().into_iter().zip([Element::F32, Element::Bf16, Element::F16].into_iter().cycle()) {
        let host = Arc::new(Host::new(0));
        let device: Arc<dyn Device> = Arc::clone(&host) as Arc<dyn Device>;
        let (mut net, _) = load(&device, shape, element);
        assert_eq!(host.used(), shape.weight_bytes(element) + shape.workspace_bytes(element, 96), "{shape:?}");
        let to = Buffer::new(&device, 2 * shape.vocab * 4).unwrap();
        let allocations = host.allocations();
        for _ in 0..6 {
            net.hidden(&[1, 2, 3], &[0, 1, 3]).unwrap();
            unsafe { net.logits(&[2, 0], to.pointer()) }.unwrap();
        }
        assert_eq!(host.allocations(), allocations);
        drop((net, to));
        assert_eq!(host.used(), 0);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let device = host(0);
    let [gpt2, llama, ..] = shapes();
    let (mut net, _) = load(&device, gpt2, Element::F32);
    let mut error_text = |tokens: &[u32], offsets: &[u32]| net.hidden(tokens, offsets).unwrap_err().to_string();
    assert_eq!(error_text(&[0, 41], &[0, 2]), "token: got 41, valid: below 41, the size of the vocabulary");
    assert_eq!(error_text(&[0; 81], &[0, 81]), "tokens of a run: got 81, valid: at most 80");
    assert_eq!(error_text(&[0; 97], &[0, 40, 97]), "tokens of a pass: got 97, valid: at most 96");
    assert!(error_text(&[0; 4], &[0, 3, 2, 4]).starts_with("offsets of runs: got 4 "));
    assert!(error_text(&[0; 4], &[0, 3]).contains("valid: ascending, from 0 to 4"));
    assert!(error_text(&[0; 4], &[]).starts_with("offsets of runs: got 0 "));
    net.hidden(&[], &[0]).unwrap();
    assert_eq!(net.states().rows, 0);
    let mut source = RandomSource::new(Element::F32);
    let mut load =
        |shape: Shape, rope| Net::load(&device, shape, Element::F32, rope, &mut source, 8).unwrap_err().to_string();
    assert_eq!(load(llama, None), "rotary positions: got none, valid: tables of cosines and sines");
    assert!(load(Shape { head_dim: 300, ..gpt2 }, None).contains("got 300, valid: 1 to 256"));
    assert!(load(Shape { kv_heads: 3, ..llama }, None).contains("a divisor of the 4 heads"));
    let gated = load(Shape { activation: Activation::SwiGlu, ..gpt2 }, None);
    assert_eq!(gated, "activation: got SwiGlu, valid: GeluTanh, Gelu");
    assert!(load(Shape { activation: Activation::Gelu, ..llama }, None).contains("valid: SwiGlu, GeGlu"));
}

#[test]
fn made_up_nets_are_as_large_as_loaded_ones_and_their_logits_are_as_asked() {
    for (shape, element) in shapes().into_iter().filter(|s| s.head_dim != 20).zip(ELEMENTS.into_iter().cycle()) {
        let shape = Shape { vocab: 331, width: 64, ..shape };
        let logits_of = |seed: u64, key: u64| {
            let host = Arc::new(Host::new(seed));
            let device: Arc<dyn Device> = Arc::clone(&host) as Arc<dyn Device>;
            let [cos, sin] = rope_tables(shape.positions, shape.head_dim / 2);
            let rope = shape.rotates().then_some(Rope { cos: &cos, sin: &sin });
            let random = RandomWeights { seed: key, logits_std: 3.0 };
            let mut net = Net::with_random_weights(&device, shape, element, rope, random, 24).unwrap();
            assert_eq!(host.used(), shape.weight_bytes(element) + shape.workspace_bytes(element, 24), "{shape:?}");
            net.hidden(&random_below(21, 24, 331), &[0, 24]).unwrap();
            values(&logits(&device, &mut net, &(0..24).collect::<Vec<_>>()), Element::F32)
        };
        let got = logits_of(0, 1);
        let mean = got.iter().sum::<f64>() / got.len() as f64;
        let deviation = (got.iter().map(|l| (l - mean).powi(2)).sum::<f64>() / got.len() as f64).sqrt();
        assert!((2.0..4.0).contains(&deviation), "{shape:?}: {deviation}");
        assert!(got == logits_of(9, 1) && got != logits_of(0, 2), "{shape:?}");
    }
    let [_, llama, ..] = shapes();
    let [cos, sin] = rope_tables(llama.positions, llama.head_dim / 2);
    let (rope, random) = (Some(Rope { cos: &cos, sin: &sin }), RandomWeights { seed: 1, logits_std: 3.0 });
    let error_text = Net::with_random_weights(&host(0), llama, Element::F32, rope, random, 8).unwrap_err().to_string();
    assert!(error_text.contains("got 20, valid: a dimension that needs no zeros, such as 32"), "{error_text}");
}
