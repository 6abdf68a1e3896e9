//! Targets of widened elements, and sources that return weights as they are stored.

use std::sync::Arc;

use half::{bf16, f16};
use stillhouse_gpu::net::kernels::{HeadPadding, Kernels, Widening};
use stillhouse_gpu::net::{Net, Rope, Shape, Source, StorageFormat, StorageOrder, StoredTensor};
use stillhouse_gpu::{Buffer, Device, Element, Result, Stream};
use stillhouse_gpu_host::Host;

use crate::common::*;
use crate::nets::{RandomSource, shapes, states};
use crate::rope_tables;

/// The target index of each model element, built piece by piece: each head's first half, then its second half from
/// `padded / 2` on.
fn target_indices(padding: HeadPadding, size: usize, interleaved: bool) -> Vec<usize> {
    let HeadPadding { model, padded } = padding;
    let mut all = vec![0; size];
    for head in 0..size / model {
        let half = model.div_ceil(2);
        for at in 0..model {
            let to = if at < half { at } else { padded / 2 + at - half };
            let to = if model == padded { at } else { to };
            let stored = match (interleaved, at < half) {
                (false, _) => at,
                (true, true) => 2 * at,
                (true, false) => 2 * (at - half) + 1,
            };
            all[head * model + stored] = head * padded + to;
        }
    }
    all
}

#[test]
fn elements_go_where_the_weight_has_them() {
    let whole = |size| HeadPadding { model: size, padded: size };
    let heads = |model, padded| HeadPadding { model, padded };
    // size of the stored matrix, axes, interleaved, transposed
    let cases = [
        ([7, 33], [whole(7), whole(33)], false, false),
        ([12, 10], [heads(6, 16), whole(10)], false, false),
        ([12, 10], [heads(6, 16), whole(10)], true, false),
        ([12, 10], [heads(6, 6), whole(10)], true, false),
        ([9, 15], [whole(9), heads(5, 16)], false, false),
        ([9, 15], [whole(9), heads(5, 16)], false, true),
        ([10, 9], [heads(5, 16), whole(9)], false, true),
        ([20, 1], [heads(10, 16), whole(1)], true, false),
    ];
    for (size, padding, interleaved, is_transposed) in cases {
        let [rows, columns] = size;
        let numbers = random_values(rows as u64, rows * columns);
        let all = [0, 1].map(|i| size[i] / padding[i].model * padding[i].padded);
        let strides = if is_transposed { [1, all[0]] } else { [all[1], 1] };
        let at = [target_indices(padding[0], rows, interleaved), target_indices(padding[1], columns, false)];
        for element in ELEMENTS {
            let device = host(4);
            let (kernels, to) = (Kernels::new(&device, element), empty_buffer(&device, all[0] * all[1], element));
            unsafe { kernels.clear(to.pointer(), to.bytes()) }.unwrap();
            let mut want = vec![0.0; all[0] * all[1]];
            for (i, number) in rounded(&numbers, element).into_iter().enumerate() {
                want[at[0][i / columns] * strides[0] + at[1][i % columns] * strides[1]] = number;
            }
            // In parts that end within rows.
            for first in (0..rows * columns).step_by(13) {
                let part = &numbers[first..(first + 13).min(rows * columns)];
                let from = upload(&device, part, Element::F32);
                let widening = Widening {
                    from: from.pointer(),
                    format: StorageFormat::F32,
                    count: part.len(),
                    to: to.pointer(),
                    first: [first / columns, first % columns],
                    columns,
                    padding,
                    interleaved,
                    strides,
                };
                unsafe { kernels.widen(&widening) }.unwrap();
            }
            assert_eq!(download(&to, element), want, "{size:?} {padding:?} {interleaved} {is_transposed} {element:?}");
        }
    }
}

/// The numbers of another source, as a file of `format` stores them; in another order where the tensor allows one.
struct FileSource {
    random: RandomSource,
    format: StorageFormat,
    reordered: bool,
    bytes: Vec<u8>,
    head_dim: usize,
}

impl FileSource {
    fn rounded(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let numbers = self.random.tensor(name, shape)?;
        Ok(numbers
            .into_iter()
            .map(|v| match self.format {
                StorageFormat::Bf16 => bf16::from_f32(v).to_f32(),
                StorageFormat::F16 => f16::from_f32(v).to_f32(),
                _ => v,
            })
            .collect())
    }
}

/// The same numbers, already widened to f32.
struct F32Source(FileSource);

impl Source for F32Source {
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        self.0.rounded(name, shape)
    }
}

impl Source for FileSource {
    fn tensor(&mut self, name: &str, _: &[usize]) -> Result<Vec<f32>> {
        panic!("the numbers of {name} are asked for");
    }

    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>> {
        let mut numbers = self.rounded(name, shape)?;
        let is_conv1d = name.contains(".c_") && shape.len() == 2;
        let is_rotated = name.contains("q_proj") || name.contains("k_proj");
        let order = match (self.reordered, is_conv1d, is_rotated) {
            (true, true, _) => StorageOrder::Transposed,
            (true, _, true) => StorageOrder::Interleaved,
            _ => StorageOrder::RowMajor,
        };
        let columns = shape.get(1).copied().unwrap_or(1);
        match order {
            StorageOrder::Transposed => {
                numbers = (0..numbers.len()).map(|i| numbers[i % shape[0] * columns + i / shape[0]]).collect();
            }
            StorageOrder::Interleaved => {
                let half = self.head_dim / 2;
                let row = |r: usize| r / (2 * half) * 2 * half + r % 2 * half + r % (2 * half) / 2;
                numbers = (0..numbers.len()).map(|i| numbers[row(i / columns) * columns + i % columns]).collect();
            }
            StorageOrder::RowMajor => {}
        }
        self.bytes = match self.format {
            StorageFormat::Bf16 => numbers.iter().flat_map(|v| bf16::from_f32(*v).to_ne_bytes()).collect(),
            StorageFormat::F16 => numbers.iter().flat_map(|v| f16::from_f32(*v).to_ne_bytes()).collect(),
            _ => numbers.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        };
        Ok(StoredTensor::Bytes { bytes: &self.bytes, format: self.format, order })
    }
}

#[test]
fn stored_weights_make_the_net_of_their_numbers() {
    for shape in shapes() {
        for (element, format, reordered) in [
            (Element::Bf16, StorageFormat::Bf16, false),
            (Element::Bf16, StorageFormat::Bf16, true),
            (Element::F32, StorageFormat::F16, true),
            (Element::F16, StorageFormat::F32, true),
            (Element::F32, StorageFormat::F32, false),
        ] {
            let device = host(6);
            let file_source = || FileSource {
                random: RandomSource::new(element),
                format,
                reordered,
                bytes: Vec::new(),
                head_dim: shape.head_dim,
            };
            let [cos, sin] = rope_tables(shape.positions, shape.head_dim / 2);
            let load = |source: &mut dyn Source| {
                let rope = shape.rotates().then_some(Rope { cos: &cos, sin: &sin });
                let mut net = Net::load(&device, shape, element, rope, source, 40).unwrap();
                net.hidden(&random_below(17, 40, 41), &[0, 3, 40]).unwrap();
                states(&device, &net)
            };
            assert!(
                load(&mut file_source()) == load(&mut F32Source(file_source())),
                "{shape:?} {element:?} {format:?} {reordered}"
            );
        }
    }
}

struct WrongSizeSource(Vec<u8>);

impl Source for WrongSizeSource {
    fn tensor(&mut self, _: &str, shape: &[usize]) -> Result<Vec<f32>> {
        Ok(vec![0.0; shape.iter().product::<usize>() + 1])
    }

    fn stored(&mut self, name: &str, shape: &[usize]) -> Result<StoredTensor<'_>> {
        match self.0.len() {
            0 => self.tensor(name, shape).map(StoredTensor::F32),
            _ => Ok(StoredTensor::Bytes { bytes: &self.0, format: StorageFormat::Q4K, order: StorageOrder::RowMajor }),
        }
    }
}

#[test]
fn weights_of_another_size_are_refused() {
    let device = host(0);
    let [shape, ..] = shapes();
    let error_text = |bytes: usize| {
        Net::load(&device, shape, Element::F32, None, &mut WrongSizeSource(vec![0; bytes]), 8).unwrap_err().to_string()
    };
    let (got, valid) = ("got 1969 of wte.weight", "valid: 1968 numbers of F32 for [41, 48], whole blocks");
    assert_eq!(error_text(0), format!("size of a weight: {got}, {valid}"));
    assert!(
        error_text(7 * 144).contains("got 1008 of wte.weight, valid: 1008 bytes of Q4K"),
        "{}",
        error_text(7 * 144)
    );
}

/// A weight larger than one stage loads completely: its last rows are as correct as its first.
#[test]
fn a_weight_of_several_pieces_is_whole() {
    let [shape, ..] = shapes();
    let shape = Shape { vocab: 23_000, layers: 1, ..shape };
    // 2 MiB hold 10,922 rows of 48 numbers in f32, 21,845 in bf16.
    let tokens = [0, 10_921, 10_922, 10_923, 21_844, 21_845, 21_846, 22_999];
    for (element, format) in
        [(Element::F32, StorageFormat::F32), (Element::Bf16, StorageFormat::Bf16), (Element::F16, StorageFormat::F32)]
    {
        let load = |source: &mut dyn Source| {
            let device = host(0);
            let mut net = Net::load(&device, shape, element, None, source, 8).unwrap();
            net.hidden(&tokens, &[0, 8]).unwrap();
            values(&states(&device, &net), element)
        };
        let head_dim = shape.head_dim;
        let mut file_source =
            FileSource { random: RandomSource::new(element), format, reordered: true, bytes: Vec::new(), head_dim };
        let got = load(&mut file_source);
        let reference = crate::naive::Naive { shape, weights: &file_source.random.loaded, cos: &[], sin: &[] };
        let want = reference.hidden(&tokens);
        let error = difference(&got, &want) / largest(&want);
        assert!(
            error <= if element == Element::F32 { 1e-5 } else { 8.0 * rounding_unit(element) },
            "{element:?}: {error:e}"
        );
    }
}

/// Besides weights and workspace, loading takes two stages of 2 MiB, whatever the size of a weight.
#[test]
fn loading_takes_two_stages_of_memory() {
    let [shape, ..] = shapes();
    let shape = Shape { vocab: 60_000, layers: 1, ..shape };
    let bytes = shape.weight_bytes(Element::F32) + shape.workspace_bytes(Element::F32, 8);
    let load = |spare: u64| {
        let device: Arc<dyn Device> = Arc::new(Host::with_memory(0, bytes + spare));
        let mut source = RandomSource::new(Element::F32);
        Net::load(&device, shape, Element::F32, None, &mut source, 8).map(|_| ()).map_err(|e| e.to_string())
    };
    // A little more, because allocations are rounded up.
    load((4 << 20) + (64 << 10)).unwrap();
    assert!(load((4 << 20) - (64 << 10)).unwrap_err().contains("out of memory"));
}

#[test]
fn memory_that_is_cleared_is_zero() {
    let device = host(3);
    for bytes in [2, 254, 4098] {
        let buffer = Buffer::new(&device, bytes + 2).unwrap();
        unsafe { Kernels::new(&device, Element::F32).clear(buffer.pointer(), bytes) }.unwrap();
        let got = buffer.to_host(Stream::Pass).unwrap();
        assert!(got[..bytes].iter().all(|byte| *byte == 0) && got[bytes..] == [0xff; 2]);
    }
}
