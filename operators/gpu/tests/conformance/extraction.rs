//! Ways of extraction: by the CPU, and by the kernels on a device.

use std::sync::Arc;

use half::f16;
use stillhouse_gpu::extract::{Dense, ExtractRequest, Extracted, Extractor, Noise, Positions};
use stillhouse_gpu::{Arg, Buffer, Device, Event, GpuError, Launch, Memory, Product, Stream};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{Extract, ExtractionSpec, RowExtractor, ValueType};

/// Rows of logits with their observed tokens.
#[derive(Debug, Clone, Default)]
pub struct Slice {
    pub vocab: usize,
    pub logits: Vec<f32>,
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    pub sequence_ids: Vec<u64>,
}

impl Slice {
    pub fn new(vocab: usize) -> Self {
        Self { vocab, ..Self::default() }
    }

    pub fn push(&mut self, logits: &[f32], token: u32) {
        assert_eq!(logits.len(), self.vocab);
        let row = self.tokens.len() as u64;
        self.logits.extend(logits);
        self.tokens.push(token);
        self.positions.push(row as u32 * 7 + 3);
        self.sequence_ids.push((row << 33) + 11 + row);
    }

    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    pub fn row(&self, row: usize) -> &[f32] {
        &self.logits[row * self.vocab..(row + 1) * self.vocab]
    }

    pub fn positions(&self) -> Positions<'_> {
        Positions { tokens: &self.tokens, positions: &self.positions, sequence_ids: &self.sequence_ids }
    }
}

/// Extracts the columns of a slice; an error is its message.
pub type ExtractFn<'a> = &'a dyn Fn(&Slice, &ExtractRequest) -> Result<Extracted, String>;

/// Extraction by `stillhouse_noise` on the CPU.
pub fn on_cpu(slice: &Slice, request: &ExtractRequest) -> Result<Extracted, String> {
    cpu(slice, request).map_err(|e| GpuError::from(e).to_string())
}

fn cpu(slice: &Slice, request: &ExtractRequest) -> Result<Extracted, stillhouse_noise::NoiseError> {
    let ExtractRequest { vocab, keys, noise, signals, .. } = request.clone();
    let mut extractor = RowExtractor::new(ExtractionSpec { vocab, keys, noise, signals })?;
    let stillhouse_noise::ExtractedColumns { logprob, replay, dense, signals, fallbacks } =
        extractor.extract(&slice.logits, &slice.positions())?;
    let dense = dense.map(|values| match noise {
        Some(Noise::Dense { value_type: ValueType::F16, .. }) => {
            Dense::F16(values.into_iter().map(f16::from_f32).collect())
        }
        _ => Dense::F32(values),
    });
    Ok(Extracted { logprob, replay, dense, signals, fallbacks })
}

/// Uploads the logits; NaN pads the rows.
pub fn upload(device: &Arc<dyn Device>, slice: &Slice, stride: usize) -> Buffer {
    let mut padded = Vec::with_capacity(slice.rows() * stride * 4);
    for row in 0..slice.rows() {
        let padding = std::iter::repeat_n(f32::NAN, stride - slice.vocab);
        padded.extend(slice.row(row).iter().copied().chain(padding).flat_map(f32::to_ne_bytes));
    }
    Buffer::from_bytes(device, &padded).unwrap()
}

/// Extraction by the kernels.
pub fn on_device(device: &Arc<dyn Device>, slice: &Slice, request: &ExtractRequest) -> Result<Extracted, String> {
    let logits = upload(device, slice, request.stride);
    let mut extractor = Extractor::new(device, request.clone(), slice.rows().max(1)).map_err(|e| e.to_string())?;
    // SAFETY: the buffer holds these rows, and lives until they are collected
    let pending = unsafe { extractor.begin(logits.pointer(), &slice.positions()) }.map_err(|e| e.to_string())?;
    extractor.collect(pending).map_err(|e| e.to_string())
}

pub fn on_host(seed: u64) -> impl Fn(&Slice, &ExtractRequest) -> Result<Extracted, String> {
    let device: Arc<dyn Device> = Arc::new(Host::new(seed));
    move |slice, request| on_device(&device, slice, request)
}

/// The host with a bug in the kernels whose names begin with `kernels`: `noise_x` becomes `broken_…_x`.
#[derive(Debug)]
pub struct MutantHost {
    pub host: Host,
    pub prefix: &'static str,
    pub kernels: &'static str,
}

impl Device for MutantHost {
    fn name(&self) -> &str {
        self.prefix
    }
    fn model(&self) -> &str {
        self.prefix
    }
    fn multiprocessors(&self) -> u32 {
        self.host.multiprocessors()
    }
    fn memory(&self) -> stillhouse_gpu::Result<Memory> {
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
        stream: Stream,
        to: u64,
        from: *const u8,
        bytes: usize,
    ) -> stillhouse_gpu::Result<()> {
        unsafe { self.host.copy_to_device(stream, to, from, bytes) }
    }
    unsafe fn copy_to_host(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> stillhouse_gpu::Result<()> {
        unsafe { self.host.copy_to_host(stream, to, from, bytes) }
    }
    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> stillhouse_gpu::Result<()> {
        let kernel = match launch.kernel.starts_with(self.kernels) {
            true => launch.kernel.replace("noise_", self.prefix).leak(),
            false => launch.kernel,
        };
        unsafe { self.host.launch(stream, &Launch { kernel, ..*launch }, args) }
    }
    unsafe fn product(&self, stream: Stream, product: &Product) -> stillhouse_gpu::Result<()> {
        unsafe { self.host.product(stream, product) }
    }
    fn fuses_gelu(&self, product: &Product) -> stillhouse_gpu::Result<bool> {
        self.host.fuses_gelu(product)
    }
    fn record(&self, stream: Stream) -> stillhouse_gpu::Result<Event> {
        self.host.record(stream)
    }
    fn stream_wait_event(&self, stream: Stream, event: Event) -> stillhouse_gpu::Result<()> {
        self.host.stream_wait_event(stream, event)
    }
    fn wait(&self, event: Event) -> stillhouse_gpu::Result<()> {
        self.host.wait(event)
    }
}
