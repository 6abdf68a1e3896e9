//! Ways to take logits to columns: the CPU's, and the kernels' on a device.

use std::sync::Arc;

use half::f16;
use stillhouse_gpu::extract::{Asked, Dense, Extracted, Extractor, Noise, Positions};
use stillhouse_gpu::{Arg, Buffer, Device, Event, GpuError, Launch, Memory, Product, Stream};
use stillhouse_gpu_host::Host;
use stillhouse_noise::{
    NoiseStream, RowEncoder, Rows, Softmax, ValueType, dense_noise_of_loaded, round_dense, top_k_of_loaded,
};

/// Rows of logits with what was observed there.
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

/// Takes a slice to columns; an error as its text.
pub type Way<'a> = &'a dyn Fn(&Slice, &Asked) -> Result<Extracted, String>;

/// The CPU's way: what `stillhouse_noise` does.
pub fn on_cpu(slice: &Slice, asked: &Asked) -> Result<Extracted, String> {
    cpu(slice, asked).map_err(|e| GpuError::from(e).to_string())
}

fn cpu(slice: &Slice, asked: &Asked) -> Result<Extracted, stillhouse_noise::NoiseError> {
    let mut out = Extracted { logprob: Vec::new(), replay: None, topk: None, dense: None, fallbacks: 0 };
    if let Some(Noise::Replay { tolerance, value_type, condition }) = asked.noise {
        let encoder = RowEncoder::new(slice.vocab, tolerance, value_type)?.with_condition(condition);
        let Slice { logits, tokens, positions, sequence_ids, .. } = slice;
        let rows = Rows { logits, tokens, positions, sequence_ids, certain: &[] };
        out.replay = Some(encoder.encode_rows(&rows, &asked.keys)?);
    }
    let mut softmax = Softmax::new(slice.vocab)?;
    let (mut top, mut dense) = ((Vec::new(), Vec::new()), Vec::new());
    for row in 0..slice.rows() {
        let (logits, x) = (slice.row(row), slice.tokens[row]);
        let stream = |key| NoiseStream::new(key, slice.sequence_ids[row], slice.positions[row]);
        softmax.load(logits).map_err(|e| e.at(&stream(stillhouse_noise::DrawKey::new(0, 0))))?;
        out.logprob.push(softmax.stored_logprob(logits[x as usize]));
        for (index, logprob) in top_k_of_loaded(&softmax, logits, asked.topk) {
            top.0.push(index);
            top.1.push(logprob);
        }
        if let Some(Noise::Dense { value_type, condition }) = asked.noise {
            for &key in &asked.keys {
                let mut xi = vec![0.0; slice.vocab];
                dense_noise_of_loaded(&softmax, logits, x, &stream(key), &mut xi)?;
                round_dense(logits, x, value_type, condition, &stream(key), &mut xi)?;
                dense.extend(xi);
            }
        }
    }
    out.topk = (asked.topk > 0).then_some(top);
    if let Some(Noise::Dense { value_type, .. }) = asked.noise {
        out.dense = Some(match value_type {
            ValueType::F16 => Dense::F16(dense.into_iter().map(f16::from_f32).collect()),
            ValueType::F32 => Dense::F32(dense),
        });
    }
    Ok(out)
}

/// The logits in a device's memory.
pub fn upload(device: &Arc<dyn Device>, slice: &Slice, stride: usize) -> Buffer {
    let mut padded = Vec::with_capacity(slice.rows() * stride * 4);
    for row in 0..slice.rows() {
        let padding = std::iter::repeat_n(f32::NAN, stride - slice.vocab);
        padded.extend(slice.row(row).iter().copied().chain(padding).flat_map(f32::to_ne_bytes));
    }
    Buffer::of(device, &padded).unwrap()
}

/// The kernels' way.
pub fn on_device(device: &Arc<dyn Device>, slice: &Slice, asked: &Asked) -> Result<Extracted, String> {
    let logits = upload(device, slice, asked.stride);
    let mut extractor = Extractor::new(device, asked.clone(), slice.rows().max(1)).map_err(|e| e.to_string())?;
    // SAFETY: the buffer holds these rows, and lives until they are collected
    let pending = unsafe { extractor.begin(logits.pointer(), &slice.positions()) }.map_err(|e| e.to_string())?;
    extractor.collect(pending).map_err(|e| e.to_string())
}

pub fn on_host(seed: u64) -> impl Fn(&Slice, &Asked) -> Result<Extracted, String> {
    let device: Arc<dyn Device> = Arc::new(Host::new(seed));
    move |slice, asked| on_device(&device, slice, asked)
}

/// The host with kernels that have a mistake: `noise_x` is `broken_…_x`.
#[derive(Debug)]
pub struct Broken {
    pub host: Host,
    pub prefix: &'static str,
}

impl Device for Broken {
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
    unsafe fn copy_in(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> stillhouse_gpu::Result<()> {
        unsafe { self.host.copy_in(stream, to, from, bytes) }
    }
    unsafe fn copy_out(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> stillhouse_gpu::Result<()> {
        unsafe { self.host.copy_out(stream, to, from, bytes) }
    }
    unsafe fn launch(&self, stream: Stream, launch: &Launch, args: &[Arg]) -> stillhouse_gpu::Result<()> {
        let kernel: &'static str = launch.kernel.replace("noise_", self.prefix).leak();
        unsafe { self.host.launch(stream, &Launch { kernel, ..*launch }, args) }
    }
    unsafe fn product(&self, stream: Stream, product: &Product) -> stillhouse_gpu::Result<()> {
        unsafe { self.host.product(stream, product) }
    }
    fn record(&self, stream: Stream) -> stillhouse_gpu::Result<Event> {
        self.host.record(stream)
    }
    fn wait_in(&self, stream: Stream, event: Event) -> stillhouse_gpu::Result<()> {
        self.host.wait_in(stream, event)
    }
    fn wait(&self, event: Event) -> stillhouse_gpu::Result<()> {
        self.host.wait(event)
    }
}
