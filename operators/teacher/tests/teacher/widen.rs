//! A device widens stored elements to the bits of candle's `dequantize`.

use std::borrow::Cow;
use std::sync::Arc;

use half::{bf16, f16};
use stillhouse_gpu_host::Host;
use stillhouse_teacher::candle_core::quantized::{GgmlDType, QStorage, QTensor};
use stillhouse_teacher::stillhouse_gpu::net::StorageFormat;
use stillhouse_teacher::stillhouse_gpu::net::kernels::{HeadPadding, Kernels, Widening};
use stillhouse_teacher::stillhouse_gpu::{Arg, Buffer, Device as Gpu, Element, Launch, Stream};

use super::*;

/// Types in GGUF files with candle's names, and the byte offsets of the 16-bit scales in a block.
const KINDS: [(StorageFormat, GgmlDType, &[usize]); 15] = [
    (StorageFormat::F32, GgmlDType::F32, &[]),
    (StorageFormat::F16, GgmlDType::F16, &[0]),
    (StorageFormat::Bf16, GgmlDType::BF16, &[0]),
    (StorageFormat::Q4_0, GgmlDType::Q4_0, &[0]),
    (StorageFormat::Q4_1, GgmlDType::Q4_1, &[0, 2]),
    (StorageFormat::Q5_0, GgmlDType::Q5_0, &[0]),
    (StorageFormat::Q5_1, GgmlDType::Q5_1, &[0, 2]),
    (StorageFormat::Q8_0, GgmlDType::Q8_0, &[0]),
    (StorageFormat::Q8_1, GgmlDType::Q8_1, &[0, 2]),
    (StorageFormat::Q2K, GgmlDType::Q2K, &[80, 82]),
    (StorageFormat::Q3K, GgmlDType::Q3K, &[108]),
    (StorageFormat::Q4K, GgmlDType::Q4K, &[0, 2]),
    (StorageFormat::Q5K, GgmlDType::Q5K, &[0, 2]),
    (StorageFormat::Q6K, GgmlDType::Q6K, &[208]),
    (StorageFormat::Q8K, GgmlDType::Q8K, &[]),
];

/// As f16: zero, the smallest and largest subnormal, the smallest normal, 1, the largest; -0, -1, the negative largest,
/// the negative smallest subnormal; infinity and NaN.
const SCALES: [u16; 12] =
    [0x0000, 0x0001, 0x03ff, 0x0400, 0x3c00, 0x7bff, 0x8000, 0xbc00, 0xfbff, 0x8001, 0x7c00, 0x7e00];
const BLOCKS: usize = 96;

fn random(key: u64) -> impl Iterator<Item = u8> {
    let mut state = key;
    std::iter::from_fn(move || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        Some((state >> 56) as u8)
    })
}

/// Returns blocks of random bytes. Every second block has scales from the list.
fn blocks(format: StorageFormat, scales: &[usize]) -> Vec<u8> {
    let [_, bytes] = format.block();
    let mut all: Vec<u8> = random(format.block()[1] as u64 + 7).take(BLOCKS * bytes).collect();
    for (i, block) in all.chunks_exact_mut(bytes).enumerate().step_by(2) {
        for (j, at) in scales.iter().enumerate() {
            // The two scales of a block are equal in some blocks and differ in others.
            let scale = SCALES[(i / 2 + j * (i / 24)) % SCALES.len()];
            block[*at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    all
}

/// Returns candle's widened values.
fn dequantized(kind: GgmlDType, bytes: &[u8], count: usize) -> Vec<f32> {
    let storage = QStorage::from_data(Cow::Borrowed(bytes), &Device::Cpu, kind).unwrap();
    floats(&QTensor::new(storage, (1, count)).unwrap().dequantize(&Device::Cpu).unwrap())
}

fn whole(size: usize) -> HeadPadding {
    HeadPadding { model: size, padded: size }
}

fn widened(format: StorageFormat, bytes: &[u8], element: Element, seed: u64) -> Vec<u8> {
    let device: Arc<dyn Gpu> = Arc::new(Host::new(seed));
    let [elements, size] = format.block();
    let count = bytes.len() / size * elements;
    let (from, to) =
        (Buffer::from_bytes(&device, bytes).unwrap(), Buffer::new(&device, count * element.bytes()).unwrap());
    let columns = count / 3;
    let widening = Widening {
        from: from.pointer(),
        format,
        count,
        to: to.pointer(),
        first: [0, 0],
        columns,
        padding: [whole(3), whole(columns)],
        interleaved: false,
        strides: [columns, 1],
    };
    // SAFETY: both buffers have the length of the elements
    unsafe { Kernels::new(&device, element).widen(&widening) }.unwrap();
    to.to_host(Stream::Pass).unwrap()
}

/// Returns the first element whose bits differ. Any NaN equals any other.
fn differs<const N: usize>(
    got: &[u8],
    want: &[f32],
    bits: impl Fn(f32) -> [u8; N],
    is_nan: impl Fn([u8; N]) -> bool,
) -> Option<usize> {
    assert_eq!(got.len(), want.len() * N);
    got.chunks_exact(N).zip(want).position(|(got, want)| {
        let got: [u8; N] = got.try_into().unwrap();
        if want.is_nan() { !is_nan(got) } else { got != bits(*want) }
    })
}

/// [`differs`] for elements in a type.
fn differs_in(element: Element, got: &[u8], want: &[f32]) -> Option<usize> {
    match element {
        Element::F32 => differs(got, want, f32::to_ne_bytes, |bits| f32::from_ne_bytes(bits).is_nan()),
        Element::Bf16 => {
            differs(got, want, |v| bf16::from_f32(v).to_ne_bytes(), |bits| bf16::from_ne_bytes(bits).is_nan())
        }
        Element::F16 => {
            differs(got, want, |v| f16::from_f32(v).to_ne_bytes(), |bits| f16::from_ne_bytes(bits).is_nan())
        }
    }
}

/// In each type, a NaN equals any other NaN, but neither infinity nor a number whose low byte looks like the exponent of
/// a NaN.
#[test]
fn only_a_nan_equals_a_nan() {
    let check = |element, got: &[u8], equal: bool| {
        assert_eq!(differs_in(element, got, &[f32::NAN]).is_none(), equal, "{element:?} {got:x?}");
    };
    for (bits, equal) in [(0x7fc0_0000, true), (0xff80_0001, true), (0x7f80_0000, false), (0x3f80_7f7f, false)] {
        check(Element::F32, &u32::to_ne_bytes(bits), equal);
    }
    for (bits, equal) in [(0x7fc0, true), (0xff81, true), (0x7f80, false), (0xff80, false), (0x3f7f, false)] {
        check(Element::Bf16, &u16::to_ne_bytes(bits), equal);
    }
    for (bits, equal) in [(0x7e00, true), (0xfc01, true), (0x7c00, false), (0xfc00, false), (0x3c7f, false)] {
        check(Element::F16, &u16::to_ne_bytes(bits), equal);
    }
    // The exponent byte of a NaN in f16 belongs to a large number in bf16.
    check(Element::Bf16, &u16::to_ne_bytes(0x7e00), false);
}

#[test]
fn blocks_are_widened_to_the_bits_of_candle() {
    for (format, kind, scales) in KINDS {
        let bytes = blocks(format, scales);
        let want = dequantized(kind, &bytes, BLOCKS * format.block()[0]);
        let finite = want.iter().filter(|v| v.is_finite() && **v != 0.0).count();
        assert!(finite > want.len() / 3, "{format:?}: {finite} numbers say something");
        for seed in [0, 9] {
            for element in [Element::F32, Element::Bf16, Element::F16] {
                let at = differs_in(element, &widened(format, &bytes, element, seed), &want);
                assert_eq!(at, None, "{format:?} in {element:?}");
            }
        }
    }
    let doubles: Vec<f64> =
        vec![0.0, -0.0, 1e-310, 0.1, -1e300, f64::from(f32::MAX) * (1.0 + 1e-9), 1.0 + 2f64.powi(-24)];
    let doubles: Vec<f64> = doubles.into_iter().chain((1..20).map(|i| 1.0 / f64::from(i))).chain([f64::MIN]).collect();
    let bytes: Vec<u8> = doubles.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let want: Vec<f32> = doubles.iter().map(|v| *v as f32).collect();
    let got = widened(StorageFormat::F64, &bytes, Element::F32, 1);
    assert_eq!(differs_in(Element::F32, &got, &want), None);
}

/// The comparison above detects an omitted element at the end, and subnormal scales that are treated as zeros.
#[test]
fn a_broken_kernel_is_seen() {
    for (format, kind, scales) in KINDS {
        let bytes = blocks(format, scales);
        let count = BLOCKS * format.block()[0];
        let want = dequantized(kind, &bytes, count);
        let wrong = |kernel: &'static str| {
            let device: Arc<dyn Gpu> = Arc::new(Host::new(1));
            let (from, to) = (Buffer::from_bytes(&device, &bytes).unwrap(), Buffer::new(&device, count * 4).unwrap());
            let grid = [count.div_ceil(256) as u32, 1, 1];
            let launch = Launch { kernel, grid, block: [256, 1, 1], shared_bytes: 0 };
            let number = StorageFormat::ALL.iter().position(|f| *f == format).unwrap() as u32;
            let n = count as u32;
            let head = [Arg::Pointer(from.pointer()), Arg::U32(number), Arg::U32(n), Arg::Pointer(to.pointer())];
            let sizes = [0, 0, n, 1, 1, 0, n, n, n, 1].map(Arg::U32);
            // SAFETY: the arguments are the kernel's, and both buffers have the length of the elements
            unsafe { device.launch(Stream::Pass, &launch, &[&head[..], &sizes].concat()) }.unwrap();
            differs_in(Element::F32, &to.to_host(Stream::Pass).unwrap(), &want)
        };
        assert_eq!(wrong("widen_f32"), None, "{format:?}");
        // Unwritten memory holds NaN.
        let last_is_nan = want.last().unwrap().is_nan();
        assert_eq!(wrong("broken_tail_widen_f32").is_some(), !last_is_nan, "{format:?}");
        assert!(!last_is_nan, "{format:?}");
        let has_scales = !scales.is_empty() && format.block()[0] > 1;
        assert_eq!(wrong("broken_scale_widen_f32").is_some(), has_scales, "{format:?}");
    }
}
