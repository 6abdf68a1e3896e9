//! Runs hundreds of batches on a device (emulated by the host), from tokens to corrections, and checks for leaks: host
//! memory, device memory, pinned memory, files and threads. This file has a single test, so that nothing else allocates
//! meanwhile.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use stillhouse_gpu_host::Host;
use stillhouse_noise::{DrawKey, Extract, ExtractionSpec, NoiseForm, ObservedTokens, Signals, Tolerance, ValueType};
use stillhouse_signals::{Entropy, SampledLogits, TopK};
use stillhouse_teacher::stillhouse_gpu::extract::{ExtractRequest, Extractor};
use stillhouse_teacher::stillhouse_gpu::{Device, Stream};
use stillhouse_teacher::{LoadOptions, Logits, Precision, Runs, Teacher, gpu};

/// Counts allocated blocks and bytes that were not freed. They include the device memory and pinned memory of the
/// emulation.
struct Counting;

static BLOCKS: AtomicI64 = AtomicI64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

fn count(blocks: i64, bytes: i64) {
    BLOCKS.fetch_add(blocks, Ordering::Relaxed);
    BYTES.fetch_add(bytes, Ordering::Relaxed);
}

unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(1, layout.size() as i64);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-1, -(layout.size() as i64));
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(0, bytes as i64 - layout.size() as i64);
        unsafe { System.realloc(pointer, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Resources of a process that could leak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Resources {
    blocks: i64,
    bytes: i64,
    files: usize,
    threads: usize,
}

fn held() -> Resources {
    // Reading these directories needs memory and a file itself, the same each time.
    let entries = |folder: &str| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let (files, threads) = (entries("/proc/self/fd"), entries("/proc/self/task"));
    Resources { blocks: BLOCKS.load(Ordering::Relaxed), bytes: BYTES.load(Ordering::Relaxed), files, threads }
}

fn model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/llama-gqa")
}

/// A teacher with the buffers of a job.
struct JobBuffers {
    teacher: Box<dyn Teacher>,
    extractor: Extractor,
    buffers: [Logits; 2],
    vocab: usize,
}

const ROWS: usize = 8;

/// The batches repeat after this number.
const CYCLE: u32 = 80;

impl JobBuffers {
    fn new(device: &Arc<dyn Device>) -> Self {
        let options = LoadOptions { dtype: Precision::Bf16, batch_tokens: 256, length: 128, ..LoadOptions::default() };
        let teacher = gpu::load(&model(), device, &options).unwrap();
        let vocab = teacher.info().vocab_size;
        let tolerance = Tolerance::new(1e-3).unwrap();
        let noise = NoiseForm::Replay { tolerance, value_type: ValueType::F16, condition: true };
        let sampled = SampledLogits { draws: 4, power: 1.0, seed: 9 };
        let signals = Signals::new(vec![Arc::new(TopK { k: 2 }), Arc::new(Entropy), Arc::new(sampled)]);
        let extraction = ExtractionSpec { vocab, keys: DrawKey::draws(1, 2), noise: Some(noise), signals };
        let extractor =
            Extractor::new(device, ExtractRequest::with_stride(&extraction, vocab.next_multiple_of(8)), ROWS).unwrap();
        let buffers = [teacher.buffer().unwrap(), teacher.buffer().unwrap()];
        Self { teacher, extractor, buffers, vocab }
    }

    /// Processes a batch of runs with 10 to 35 tokens in total, and now and then a pass of maximum size. Returns the
    /// number of corrections.
    fn batch(&mut self, batch: u32) -> usize {
        let mut runs = Runs::new();
        let lengths: &[u32] =
            if batch % CYCLE == CYCLE - 1 { &[128, 100, 28] } else { &[1 + batch % 7, 8, 1 + batch % 20] };
        for (run, &length) in lengths.iter().enumerate() {
            runs.push((0..length).map(|i| (batch * 13 + run as u32 * 5 + i * i) % self.vocab as u32));
        }
        let keeps: &[usize] = if batch % 40 == 20 { &[1] } else { &[] };
        let (hidden, _) = self.teacher.pass_with_states(&runs, keeps).unwrap();
        let tokens: Vec<u32> = (0..runs.tokens().len() as u32).collect();
        let mut corrections = 0;
        // Extracts all rows only now and then, because the emulation is slow.
        let slices = if batch % CYCLE == CYCLE - 1 { 4 } else { 1 + batch as usize % 2 };
        for (slice, rows) in tokens.chunks(ROWS).take(slices).enumerate() {
            let buffer = &mut self.buffers[slice % 2];
            self.teacher.slice(&hidden, rows, buffer).unwrap();
            let Logits::Device(logits) = buffer else { panic!("not on the device") };
            let (seen, ids): (Vec<u32>, Vec<u64>) = rows.iter().map(|row| (row % 11, 7)).unzip();
            let observed = ObservedTokens { tokens: &seen, positions: rows, sequence_ids: &ids };
            // SAFETY: the buffer lives, and nothing writes to it meanwhile
            let found = self.extractor.extract(&unsafe { logits.slice() }.unwrap(), &observed).unwrap();
            assert_eq!(found.logprob.len(), rows.len());
            corrections += found.replay.unwrap().indices.len();
        }
        if batch % 40 == 39 {
            // Refused input must not leak.
            let mut strange = Runs::new();
            strange.push([self.vocab as u32]);
            assert!(self.teacher.pass(&strange).is_err());
            assert!(self.teacher.slice(&hidden, &[9999], &mut self.buffers[0]).is_err());
        }
        corrections
    }
}

#[test]
fn hundreds_of_batches_leave_nothing_over() {
    // First creates everything that is allocated once and kept: names of kernels, stacks of the emulation, the test's
    // own state.
    {
        let device: Arc<dyn Device> = Arc::new(Host::new(3));
        let mut work = JobBuffers::new(&device);
        assert!((0..3).map(|batch| work.batch(batch)).sum::<usize>() > 0);
    }
    let before = held();
    {
        let host = Arc::new(Host::new(0));
        let device: Arc<dyn Device> = host.clone();
        let mut work = JobBuffers::new(&device);
        let (mut corrections, mut after_the_first) = (0, None);
        let batches = if std::env::var_os("STILLHOUSE_SOAK").is_some() { 1000 } else { 2 * CYCLE };
        for batch in 0..batches {
            // By the second round, the memory for kept states has grown to the largest batch's need.
            corrections += work.batch(batch % CYCLE);
            if batch > CYCLE && batch % 40 == 39 {
                // Waits, because the work still in flight has a different size in every batch.
                for stream in [Stream::Pass, Stream::Extract] {
                    device.wait(device.record(stream).unwrap()).unwrap();
                }
                let held = (held(), host.allocations(), host.used(), host.used_pinned());
                assert_eq!(*after_the_first.get_or_insert(held), held, "batch {batch}");
            }
        }
        assert!(corrections > 1500, "{corrections}");
        assert!(host.faults().is_empty());
    }
    assert_eq!(held(), before, "what a teacher had is given back");

    // The check detects a leak of each kind.
    std::mem::forget(Box::new([0u64; 4]));
    let leaked = held();
    assert_eq!((leaked.blocks, leaked.bytes), (before.blocks + 1, before.bytes + 32));
    std::mem::forget(std::fs::File::open(model().join("config.json")).unwrap());
    assert_eq!(held().files, before.files + 1);
    let device: Arc<dyn Device> = Arc::new(Host::new(3));
    std::mem::forget(stillhouse_teacher::stillhouse_gpu::Buffer::new(&device, 100_000).unwrap());
    std::mem::forget(stillhouse_teacher::stillhouse_gpu::Pinned::new(&device, 100_000).unwrap());
    assert!(held().bytes > leaked.bytes + 200_000);
}
