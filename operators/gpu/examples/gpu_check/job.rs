//! What a job does on a device: passes over batches of tokens, slices of logits, columns on the host.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use stillhouse_gpu::extract::{Asked, Extracted, Extractor, Pending, SLICES};
use stillhouse_gpu::net::{Net, Shape};
use stillhouse_gpu::{Buffer, Device, Element, logits_stride};
use stillhouse_noise::{DrawKey, Extraction, NoiseForm, Observed, Tolerance, ValueType, keyed_uniforms};

use crate::Outcome;
use crate::accuracy::tokens;
use crate::counted::Counted;
use crate::nets::{Angles, Weights};

/// Logits of a slice, as `stillhouse-teacher` has them.
const SLICE_VALUES: usize = 32 << 20;
/// Tokens that the observed ones are drawn from.
const LIKELY: usize = 64;

/// Extracts one slice of logits of the host.
pub fn extract_once(
    device: &Arc<dyn Device>,
    asked: &Extraction,
    logits: &[f32],
    observed: &Observed<'_>,
) -> Outcome<Extracted> {
    let bytes: Vec<u8> = logits.iter().flat_map(|logit| logit.to_ne_bytes()).collect();
    let logits = Buffer::of(device, &bytes)?;
    let mut extractor = Extractor::new(device, Asked::of(asked), observed.tokens.len())?;
    // SAFETY: so many rows lie there, until the slice is collected
    let pending = unsafe { extractor.begin(logits.pointer(), observed)? };
    Ok(extractor.collect(pending)?)
}

/// A batch: what is read, what is observed.
struct Batch {
    inputs: Vec<u32>,
    offsets: Vec<u32>,
    observed: Vec<u32>,
    positions: Vec<u32>,
    sequence_ids: Vec<u64>,
}

/// What came of some batches.
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

/// A net with what is made of its logits.
pub struct Job {
    counted: Arc<Counted>,
    net: Net,
    extractor: Extractor,
    slices: [Buffer; SLICES],
    slice_rows: usize,
    batch: Batch,
}

/// The codec of a job that says nothing else: corrections in half precision, one draw.
fn usual(vocab: usize) -> Outcome<Extraction> {
    let noise = NoiseForm::Replay { tolerance: Tolerance::new(1e-3)?, value_type: ValueType::F16, condition: true };
    Ok(Extraction { vocab, keys: DrawKey::draws(1, 1), noise: Some(noise), topk: 0, signals: Default::default() })
}

/// Rows of a slice.
fn slice_rows(vocab: usize, batch_tokens: usize) -> usize {
    (SLICE_VALUES / vocab).clamp(8, 4096).min(batch_tokens)
}

impl Job {
    /// A net of made-up weights, for batches of so many tokens at most.
    pub fn load(
        device: &Arc<dyn Device>,
        counted: &Arc<Counted>,
        shape: &Shape,
        element: Element,
        batch_tokens: usize,
    ) -> Outcome<Self> {
        let angles = Angles::of(shape);
        let rope = angles.as_ref().map(Angles::rope);
        let net = Net::load(device, *shape, element, rope, &mut Weights::of(shape), batch_tokens)?;
        let slice_rows = slice_rows(shape.vocab, batch_tokens);
        let stride = logits_stride(shape.vocab);
        let slice = || Buffer::new(device, slice_rows * stride * 4);
        let (slices, extractor) =
            ([slice()?, slice()?], Extractor::new(device, Asked::of_rows(&usual(shape.vocab)?, stride), slice_rows)?);
        let batch = Batch {
            inputs: Vec::new(),
            offsets: Vec::new(),
            observed: Vec::new(),
            positions: Vec::new(),
            sequence_ids: Vec::new(),
        };
        Ok(Self { counted: Arc::clone(counted), net, extractor, slices, slice_rows, batch })
    }

    /// Makes the batch: as many runs of this length as fit, whose observed tokens are drawn from what the net expects. (Tokens drawn
    /// without it would be ones that no teacher expects, whose noise is cheap.)
    pub fn prepare(&mut self, device: &Arc<dyn Device>, length: usize) -> Outcome<()> {
        let vocab = self.net.shape().vocab;
        let runs = (self.net.most_tokens() / length).max(1);
        let count = runs * length;
        self.batch = Batch {
            inputs: tokens(7, count, vocab),
            offsets: (0..=runs).map(|run| (run * length) as u32).collect(),
            observed: vec![0; count],
            positions: (0..count).map(|i| (i % length) as u32 + 1).collect(),
            sequence_ids: (0..count).map(|i| (i / length) as u64).collect(),
        };
        let topk = LIKELY.min(vocab);
        let asked = Extraction { vocab, keys: Vec::new(), noise: None, topk, signals: Default::default() };
        let mut likely = Extractor::new(device, Asked::of_rows(&asked, logits_stride(vocab)), self.slice_rows)?;
        let mut uniforms = keyed_uniforms(9, "observed tokens of a check", 0, 0);
        self.net.hidden(&self.batch.inputs, &self.batch.offsets)?;
        let mut observed = Vec::with_capacity(count);
        for first in (0..count).step_by(self.slice_rows) {
            let rows: Vec<u32> = (first as u32..(first + self.slice_rows).min(count) as u32).collect();
            // SAFETY: a slice has this many rows, and stays until it is collected below
            let pending = unsafe {
                self.net.logits_into(&rows, self.slices[0].pointer(), logits_stride(vocab))?;
                likely.begin(self.slices[0].pointer(), &self.batch.at(first, rows.len()))?
            };
            let (indices, logprobs) = likely.collect(pending)?.topk.ok_or("no top-k, though it was asked for")?;
            for (indices, logprobs) in indices.chunks_exact(topk).zip(logprobs.chunks_exact(topk)) {
                let mut left = uniforms.next_f64();
                let drawn = indices.iter().zip(logprobs).find(|(_, logprob)| {
                    left -= f64::from(**logprob).exp();
                    left < 0.0
                });
                observed.push(drawn.map_or_else(|| uniforms.below(vocab as u32), |(index, _)| *index));
            }
        }
        self.batch.observed = observed;
        Ok(())
    }

    /// Tokens of the batch.
    pub fn batch_tokens(&self) -> usize {
        self.batch.inputs.len()
    }

    /// Passes the batch so many times, from ids to columns on the host; without noise, to logits on the device.
    pub fn run(&mut self, batches: usize, noise: bool) -> Outcome<Run> {
        self.counted.settle()?;
        let began = Instant::now();
        let mut run = Run { tokens: (batches * self.batch_tokens()) as u64, ..Run::default() };
        let mut pending: VecDeque<Pending> = VecDeque::new();
        let mut slice = 0;
        let stride = logits_stride(self.net.shape().vocab);
        for _ in 0..batches {
            self.net.hidden(&self.batch.inputs, &self.batch.offsets)?;
            for first in (0..self.batch_tokens()).step_by(self.slice_rows) {
                if pending.len() == SLICES {
                    self.collect(&mut pending, &mut run)?;
                }
                let rows: Vec<u32> =
                    (first as u32..(first + self.slice_rows).min(self.batch_tokens()) as u32).collect();
                let to = self.slices[slice % SLICES].pointer();
                slice += 1;
                // SAFETY: a slice has room for its rows; what was in it before has been collected
                unsafe {
                    self.net.logits_into(&rows, to, stride)?;
                    if noise {
                        pending.push_back(self.extractor.begin(to, &self.batch.at(first, rows.len()))?);
                    }
                }
            }
        }
        while !pending.is_empty() {
            self.collect(&mut pending, &mut run)?;
        }
        self.counted.settle()?;
        run.seconds = began.elapsed().as_secs_f64();
        Ok(run)
    }

    fn collect(&mut self, pending: &mut VecDeque<Pending>, run: &mut Run) -> Outcome<()> {
        let Some(oldest) = pending.pop_front() else { return Ok(()) };
        let columns = self.extractor.collect(oldest)?;
        run.corrections += columns.replay.map_or(0, |replay| replay.indices.len() as u64);
        run.fallbacks += columns.fallbacks;
        Ok(())
    }
}

impl Batch {
    fn at(&self, first: usize, rows: usize) -> Observed<'_> {
        let range = first..first + rows;
        Observed {
            tokens: &self.observed[range.clone()],
            positions: &self.positions[range.clone()],
            sequence_ids: &self.sequence_ids[range],
        }
    }
}
