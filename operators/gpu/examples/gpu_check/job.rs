//! The work of a job on a device: passes over batches of tokens, slices of logits, columns on the host.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;
use std::{mem, thread};

use stillhouse_gpu::extract::{DeviceSlice, ExtractRequest, Extracted, Extractor, Pending, SLICES};
use stillhouse_gpu::net::{Net, NumberFormat, RandomWeights, Shape};
use stillhouse_gpu::{Buffer, Device, GpuError, Stream, logits_stride};
use stillhouse_noise::{
    DrawKey, ExtractionSpec, NoiseForm, ObservedTokens, Signals, Tolerance, ValueType, keyed_uniforms,
};
use stillhouse_signals::TopK;

use crate::Outcome;
use crate::accuracy::tokens;
use crate::counting_device::CountingDevice;
use crate::nets::{LOGITS_STD, RopeTables};

/// Number of most likely tokens from which the observed tokens are drawn.
const LIKELY_TOKENS: usize = 64;

/// Uploads one slice of logits and extracts its columns.
pub fn extract_once(
    device: &Arc<dyn Device>,
    request: &ExtractionSpec,
    logits: &[f32],
    observed: &ObservedTokens<'_>,
) -> Outcome<Extracted> {
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_ne_bytes()).collect();
    let logits = Buffer::from_bytes(device, &bytes)?;
    let mut extractor = Extractor::new(device, ExtractRequest::contiguous(request), observed.tokens.len())?;
    // SAFETY: the buffer holds these rows until the slice is collected
    let pending = unsafe { extractor.begin(logits.pointer(), observed)? };
    Ok(extractor.collect(pending)?)
}

/// The schedule of forward pass and extraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Schedule {
    /// As in a job (`pipeline/engine/src/device.rs`): one thread computes logits, a helper extracts one slice after
    /// another.
    HelperThread,
    /// One thread with two slices in flight.
    TwoInFlight,
    /// No extraction: the logits stay on the device.
    LogitsOnly,
}

/// A batch: the input tokens, and the observed tokens with their positions.
struct Batch {
    inputs: Vec<u32>,
    offsets: Vec<u32>,
    observed: Vec<u32>,
    positions: Vec<u32>,
    sequence_ids: Vec<u64>,
}

/// The totals of some batches.
#[derive(Debug, Default, Clone, Copy)]
pub struct Run {
    pub seconds: f64,
    pub tokens: u64,
    pub corrections: u64,
    pub fallbacks: u64,
}

impl Run {
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// A net with an extractor for its logits.
pub struct Job {
    device: Arc<dyn Device>,
    counting: Arc<CountingDevice>,
    net: Net,
    extractor: Extractor,
    slices: [Buffer; SLICES],
    slice_rows: usize,
    batch: Batch,
}

/// The default codec of a job: corrections in half precision, one draw.
fn default_extraction(vocab: usize) -> Outcome<ExtractionSpec> {
    let noise = NoiseForm::Replay { tolerance: Tolerance::new(1e-3)?, value_type: ValueType::F16, condition: true };
    Ok(ExtractionSpec { vocab, keys: DrawKey::draws(1, 1), noise: Some(noise), signals: Default::default() })
}

/// Rows of a slice. A batch has at least three slices, so that slices overlap even in small batches.
fn slice_rows(vocab: usize, batch_tokens: usize) -> usize {
    stillhouse_gpu::slice_rows(vocab).min(batch_tokens.div_ceil(3))
}

impl Job {
    /// Loads a net with random weights, for batches of at most `batch_tokens` tokens.
    pub fn load(
        device: &Arc<dyn Device>,
        counting: &Arc<CountingDevice>,
        shape: &Shape,
        number_format: impl Into<NumberFormat>,
        batch_tokens: usize,
    ) -> Outcome<Self> {
        let rope_tables = RopeTables::of(shape);
        let rope = rope_tables.as_ref().map(RopeTables::rope);
        let random = RandomWeights { seed: 1, logits_std: LOGITS_STD as f32 };
        let net = Net::with_random_weights(device, *shape, number_format, rope, random, batch_tokens)?;
        let slice_rows = slice_rows(shape.vocab, batch_tokens);
        let stride = logits_stride(shape.vocab);
        let slice = || Buffer::new(device, slice_rows * stride * 4);
        let (slices, extractor) = (
            [slice()?, slice()?],
            Extractor::new(device, ExtractRequest::with_stride(&default_extraction(shape.vocab)?, stride), slice_rows)?,
        );
        let batch = Batch {
            inputs: Vec::new(),
            offsets: Vec::new(),
            observed: Vec::new(),
            positions: Vec::new(),
            sequence_ids: Vec::new(),
        };
        Ok(Self {
            device: Arc::clone(device),
            counting: Arc::clone(counting),
            net,
            extractor,
            slices,
            slice_rows,
            batch,
        })
    }

    /// Makes the batch: as many runs of this length as fit. Draws the observed tokens from the net's distribution,
    /// because the noise of tokens that a teacher does not expect is cheap.
    pub fn prepare(&mut self, length: usize) -> Outcome<()> {
        let vocab = self.net.shape().vocab;
        let runs = (self.net.max_tokens() / length).max(1);
        let count = runs * length;
        self.batch = Batch {
            inputs: tokens(7, count, vocab),
            offsets: (0..=runs).map(|run| (run * length) as u32).collect(),
            observed: vec![0; count],
            positions: (0..count).map(|i| (i % length) as u32 + 1).collect(),
            sequence_ids: (0..count).map(|i| (i / length) as u64).collect(),
        };
        let topk = LIKELY_TOKENS.min(vocab);
        let signals = Signals::new(vec![Arc::new(TopK { k: topk })]);
        let request = ExtractionSpec { vocab, keys: Vec::new(), noise: None, signals };
        let mut top_extractor =
            Extractor::new(&self.device, ExtractRequest::with_stride(&request, logits_stride(vocab)), self.slice_rows)?;
        let mut uniforms = keyed_uniforms(9, "observed tokens of a check", 0, 0);
        self.net.hidden(&self.batch.inputs, &self.batch.offsets)?;
        let mut observed = Vec::with_capacity(count);
        for rows in slices_of(count, self.slice_rows) {
            // SAFETY: the slice holds this many rows, and stays unchanged until it is collected below
            let pending = unsafe {
                self.net.logits_into(&rows, self.slices[0].pointer(), logits_stride(vocab))?;
                top_extractor.begin(self.slices[0].pointer(), &self.batch.observed_rows(&rows))?
            };
            for signals in top_extractor.collect(pending)?.signals {
                let [indices, logprobs] = signals.as_slice() else {
                    return Err("no top-k, though it was asked for".into());
                };
                let mut remaining = uniforms.next_f64();
                let drawn = indices.u32s().iter().zip(logprobs.f32s()).find(|(_, logprob)| {
                    remaining -= f64::from(**logprob).exp();
                    remaining < 0.0
                });
                observed.push(drawn.map_or_else(|| uniforms.below(vocab as u32), |(index, _)| *index));
            }
        }
        self.batch.observed = observed;
        Ok(())
    }

    /// Number of tokens in the batch.
    pub fn batch_tokens(&self) -> usize {
        self.batch.inputs.len()
    }

    /// Runs the batch `batches` times, from token ids to columns on the host.
    pub fn run(&mut self, batches: usize, schedule: Schedule) -> Outcome<Run> {
        self.counting.synchronize()?;
        let began = Instant::now();
        let mut run = Run { tokens: (batches * self.batch_tokens()) as u64, ..Run::default() };
        let (mut corrections, mut fallbacks) = (0, 0);
        self.pass(batches, schedule, &mut |columns| {
            corrections += columns.replay.map_or(0, |replay| replay.indices.len() as u64);
            fallbacks += columns.fallbacks;
        })?;
        self.counting.synchronize()?;
        run.seconds = began.elapsed().as_secs_f64();
        (run.corrections, run.fallbacks) = (corrections, fallbacks);
        Ok(run)
    }

    /// Returns all columns of the batch.
    pub fn columns(&mut self, schedule: Schedule) -> Outcome<Vec<Extracted>> {
        let mut all = Vec::new();
        self.pass(1, schedule, &mut |columns| all.push(columns))?;
        Ok(all)
    }

    fn pass(
        &mut self,
        batches: usize,
        schedule: Schedule,
        on_columns: &mut (dyn FnMut(Extracted) + Send),
    ) -> Outcome<()> {
        match schedule {
            Schedule::HelperThread => Ok(self.run_with_helper(batches, on_columns)?),
            Schedule::TwoInFlight | Schedule::LogitsOnly => self.run_single_threaded(batches, schedule, on_columns),
        }
    }

    fn run_single_threaded(
        &mut self,
        batches: usize,
        schedule: Schedule,
        on_columns: &mut (dyn FnMut(Extracted) + Send),
    ) -> Outcome<()> {
        let mut pending: VecDeque<Pending> = VecDeque::new();
        let mut slice = 0;
        let stride = logits_stride(self.net.shape().vocab);
        for _ in 0..batches {
            self.net.hidden(&self.batch.inputs, &self.batch.offsets)?;
            for rows in slices_of(self.batch_tokens(), self.slice_rows) {
                if pending.len() == SLICES
                    && let Some(oldest) = pending.pop_front()
                {
                    on_columns(self.extractor.collect(oldest)?);
                }
                let to = self.slices[slice % SLICES].pointer();
                slice += 1;
                // SAFETY: the slice holds these rows; its former contents have been collected
                unsafe {
                    self.net.logits_into(&rows, to, stride)?;
                    if schedule == Schedule::TwoInFlight {
                        pending.push_back(self.extractor.begin(to, &self.batch.observed_rows(&rows))?);
                    }
                }
            }
        }
        for slice in pending {
            on_columns(self.extractor.collect(slice)?);
        }
        Ok(())
    }

    fn run_with_helper(
        &mut self,
        batches: usize,
        on_columns: &mut (dyn FnMut(Extracted) + Send),
    ) -> Result<(), GpuError> {
        let Self { device, net, extractor, slices, slice_rows, batch, .. } = self;
        let stride = logits_stride(net.shape().vocab);
        let [first_buffer, second_buffer] = slices.each_ref().map(Buffer::pointer);
        let (to_helper, parts) = sync_channel::<(u64, DeviceSlice, Vec<u32>)>(1);
        let (return_buffer, free) = sync_channel(SLICES);
        let batch = &*batch;
        thread::scope(|scope| {
            let _ = return_buffer.send(second_buffer);
            let helper = scope.spawn(move || -> Result<(), GpuError> {
                for (pointer, slice, rows) in parts {
                    let pending = extractor.begin_slice(slice, &batch.observed_rows(&rows))?;
                    let columns = extractor.collect(pending)?;
                    // Return the buffer before processing the columns. The sender may have failed, so errors are
                    // ignored.
                    let _ = return_buffer.send(pointer);
                    on_columns(columns);
                }
                Ok(())
            });
            let mut pass = || -> Result<(), GpuError> {
                let mut to = first_buffer;
                for _ in 0..batches {
                    net.hidden(&batch.inputs, &batch.offsets)?;
                    for rows in slices_of(batch.inputs.len(), *slice_rows) {
                        // SAFETY: the slice holds these rows; its last user has returned it
                        let slice = unsafe {
                            net.logits_into(&rows, to, stride)?;
                            DeviceSlice::new(to, device.record(Stream::Pass)?)
                        };
                        // If the helper failed, it reports the error below.
                        if to_helper.send((to, slice, rows)).is_err() {
                            return Ok(());
                        }
                        let Ok(next) = free.recv() else { return Ok(()) };
                        to = next;
                    }
                }
                Ok(())
            };
            let passed = pass();
            mem::drop(to_helper);
            let fault =
                |_| GpuError::Unavailable { device: device.name().into(), message: "the helper broke down".into() };
            helper.join().map_err(fault).flatten().and(passed)
        })
    }
}

/// The row numbers of each slice in turn.
fn slices_of(count: usize, slice_rows: usize) -> impl Iterator<Item = Vec<u32>> {
    (0..count).step_by(slice_rows).map(move |first| (first as u32..(first + slice_rows).min(count) as u32).collect())
}

impl Batch {
    /// The observed tokens of contiguous rows.
    fn observed_rows(&self, rows: &[u32]) -> ObservedTokens<'_> {
        let first = rows.first().map_or(0, |row| *row as usize);
        let range = first..first + rows.len();
        ObservedTokens {
            tokens: &self.observed[range.clone()],
            positions: &self.positions[range.clone()],
            sequence_ids: &self.sequence_ids[range],
        }
    }
}
