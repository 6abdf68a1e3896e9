//! Test numbers, dtypes, uploads and downloads.

use std::cell::Cell;
use std::sync::Arc;

use half::{bf16, f16};
use stillhouse_gpu::{Arg, Buffer, Device, Element, Event, Launch, Result, Stream};
use stillhouse_gpu_host::Host;

pub const ELEMENTS: [Element; 3] = [Element::F32, Element::Bf16, Element::F16];

/// The largest relative rounding error of a dtype.
pub fn rounding_unit(element: Element) -> f64 {
    match element {
        Element::F32 => 2f64.powi(-24),
        Element::Bf16 => 2f64.powi(-8),
        Element::F16 => 2f64.powi(-11),
    }
}

/// Forwards device methods to a test device's `host`, except launches and waits, which each test device defines.
macro_rules! forward_to_host {
    () => {
        fn name(&self) -> &str {
            self.host.name()
        }
        fn model(&self) -> &str {
            self.host.model()
        }
        fn multiprocessors(&self) -> u32 {
            self.host.multiprocessors()
        }
        fn memory(&self) -> stillhouse_gpu::Result<stillhouse_gpu::Memory> {
            self.host.memory()
        }
        fn allocate(&self, bytes: usize) -> stillhouse_gpu::Result<u64> {
            self.host.allocate(bytes)
        }
        fn free(&self, pointer: u64) {
            self.host.free(pointer);
        }
        fn allocate_pinned(&self, bytes: usize) -> stillhouse_gpu::Result<*mut u8> {
            self.host.allocate_pinned(bytes)
        }
        fn free_pinned(&self, pointer: *mut u8, bytes: usize) {
            self.host.free_pinned(pointer, bytes);
        }
        unsafe fn copy_to_device(
            &self,
            stream: stillhouse_gpu::Stream,
            to: u64,
            from: *const u8,
            bytes: usize,
        ) -> stillhouse_gpu::Result<()> {
            unsafe { self.host.copy_to_device(stream, to, from, bytes) }
        }
        unsafe fn copy_to_host(
            &self,
            stream: stillhouse_gpu::Stream,
            to: *mut u8,
            from: u64,
            bytes: usize,
        ) -> stillhouse_gpu::Result<()> {
            unsafe { self.host.copy_to_host(stream, to, from, bytes) }
        }
        unsafe fn product(
            &self,
            stream: stillhouse_gpu::Stream,
            product: &stillhouse_gpu::Product,
        ) -> stillhouse_gpu::Result<()> {
            unsafe { self.host.product(stream, product) }
        }
        fn fuses_gelu(&self, product: &stillhouse_gpu::Product) -> stillhouse_gpu::Result<bool> {
            self.host.fuses_gelu(product)
        }
        fn fp8_unsupported_reason(&self) -> Option<String> {
            self.host.fp8_unsupported_reason()
        }
        unsafe fn scaled_product(
            &self,
            stream: stillhouse_gpu::Stream,
            product: &stillhouse_gpu::ScaledProduct,
        ) -> stillhouse_gpu::Result<()> {
            unsafe { self.host.scaled_product(stream, product) }
        }
        fn record(&self, stream: stillhouse_gpu::Stream) -> stillhouse_gpu::Result<stillhouse_gpu::Event> {
            self.host.record(stream)
        }
    };
}

thread_local! {
    /// The bug of the kernels in this test, and the kernels that have it.
    static MUTANT: Cell<Option<(&'static str, &'static [&'static str])>> = const { Cell::new(None) };
}

/// The host; inside [`with_mutant`], with the faulty kernels.
pub fn host(seed: u64) -> Arc<dyn Device> {
    match MUTANT.get() {
        None => Arc::new(Host::new(seed)),
        Some((prefix, kernels)) => Arc::new(MutantHost { host: Host::new(seed), prefix, kernels }),
    }
}

/// Runs a test whose hosts launch `prefix_kernel` in place of each of these kernels.
pub fn with_mutant(prefix: &'static str, kernels: &'static [&'static str], test: impl FnOnce()) {
    MUTANT.set(Some((prefix, kernels)));
    test();
    MUTANT.set(None);
}

#[derive(Debug)]
struct MutantHost {
    host: Host,
    prefix: &'static str,
    kernels: &'static [&'static str],
}

impl Device for MutantHost {
    forward_to_host!();

    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> Result<()> {
        let kernel = match self.kernels.contains(&launch.kernel) {
            true => format!("{}_{}", self.prefix, launch.kernel).leak(),
            false => launch.kernel,
        };
        unsafe { self.host.launch(stream, &Launch { kernel, ..*launch }, args) }
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        self.host.stream_wait_event(stream, event)
    }
    fn wait(&self, event: Event) -> Result<()> {
        self.host.wait(event)
    }
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Pseudo-random numbers in -1..1.
pub fn random_values(key: u64, count: usize) -> Vec<f32> {
    (0..count as u64).map(|i| (mix(mix(key) ^ i) >> 40) as f32 / (1 << 23) as f32 - 1.0).collect()
}

pub fn random_below(key: u64, count: usize, bound: u32) -> Vec<u32> {
    (0..count as u64).map(|i| (mix(mix(key) ^ i) % u64::from(bound)) as u32).collect()
}

/// Rounds to a dtype.
pub fn rounded(values: &[f32], element: Element) -> Vec<f64> {
    let round = |v: &f32| match element {
        Element::F32 => f64::from(*v),
        Element::Bf16 => bf16::from_f32(*v).to_f64(),
        Element::F16 => f16::from_f32(*v).to_f64(),
    };
    values.iter().map(round).collect()
}

pub fn upload(device: &Arc<dyn Device>, values: &[f32], element: Element) -> Buffer {
    let bytes: Vec<u8> = match element {
        Element::F32 => values.iter().flat_map(|v| v.to_ne_bytes()).collect(),
        Element::Bf16 => values.iter().flat_map(|v| bf16::from_f32(*v).to_ne_bytes()).collect(),
        Element::F16 => values.iter().flat_map(|v| f16::from_f32(*v).to_ne_bytes()).collect(),
    };
    Buffer::from_bytes(device, &bytes).unwrap()
}

pub fn upload_u32s(device: &Arc<dyn Device>, words: &[u32]) -> Buffer {
    Buffer::from_bytes(device, &words.iter().flat_map(|v| v.to_ne_bytes()).collect::<Vec<_>>()).unwrap()
}

pub fn empty_buffer(device: &Arc<dyn Device>, count: usize, element: Element) -> Buffer {
    Buffer::new(device, count * element.bytes()).unwrap()
}

pub fn values(bytes: &[u8], element: Element) -> Vec<f64> {
    match element {
        Element::F32 => bytes.chunks_exact(4).map(|b| f64::from(f32::from_ne_bytes(b.try_into().unwrap()))).collect(),
        Element::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_ne_bytes(b.try_into().unwrap()).to_f64()).collect(),
        Element::F16 => bytes.chunks_exact(2).map(|b| f16::from_ne_bytes(b.try_into().unwrap()).to_f64()).collect(),
    }
}

pub fn download(buffer: &Buffer, element: Element) -> Vec<f64> {
    values(&buffer.to_host(Stream::Pass).unwrap(), element)
}

/// The largest difference; infinite if a value is NaN.
pub fn difference(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| if g.is_finite() { (g - w).abs() } else { f64::INFINITY }).fold(0.0, f64::max)
}

pub fn largest(values: &[f64]) -> f64 {
    values.iter().map(|v| v.abs()).fold(0.0, f64::max)
}

/// Asserts that every number is within `units` roundings, relative to its size, or to `scale` if that is larger.
pub fn assert_near(what: &str, got: &[f64], want: &[f64], element: Element, units: f64, scale: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let bound = units * rounding_unit(element) * want.abs().max(scale);
        assert!((got - want).abs() <= bound, "{what} in {element:?}: number {i} is {got}, not {want} within {bound:e}");
    }
}
