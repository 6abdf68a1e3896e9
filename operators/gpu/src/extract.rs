//! Extracts columns from a slice of logits in device memory: ln p_x, noise corrections, dense noise and signals.
//!
//! ```text
//!   begin ──► tokens, positions ─► kernels/noise.cu on Stream::Extract ─► pinned memory ┐
//!   begin of the next slice …                                                          event
//!   collect ◄── columns ◄── rows that the kernels leave to the CPU (few) ◄──────────────┘
//! ```
//!
//! `stillhouse_noise` on the CPU is the specification. Its encoder also computes every row that a kernel cannot: a list
//! that does not fit, a tolerance out of reach, a logit that is not finite. So results are never approximate, and
//! errors are those of the CPU code.
//!
//! Besides the logits, a row takes about 23 KiB of device memory per draw. [`Extractor::new`] allocates all memory.

mod fallback;
mod launches;
mod signals;
mod slots;

use std::sync::Arc;

use half::f16;
use stillhouse_noise::{DrawKey, EncodedRows, Extract, ExtractionSpec, RowSignals, Signals};
pub use stillhouse_noise::{NoiseForm as Noise, ObservedTokens as Positions};

use crate::device::{Device, Event, Result, Stream};
use crate::error::GpuError;
use fallback::Fallback;
use launches::Scratch;
use slots::{SliceResults, Slot};

/// Maximum slices in flight.
pub const SLICES: usize = 2;
/// Maximum k of the top-k.
pub const MAX_TOPK: usize = 2048;
/// Maximum rows of a slice: blocks of a grid.
const MAX_ROWS: usize = 65_535;
const MAX_VOCAB: usize = (1 << 31) - 1;

/// The columns to extract.
#[derive(Debug, Clone)]
pub struct ExtractRequest {
    /// Vocabulary size V.
    pub vocab: usize,
    /// Floats between two rows of logits: V, or more if rows are padded.
    pub stride: usize,
    /// The keys of the draws; unused without noise.
    pub keys: Vec<DrawKey>,
    /// The form of the noise, if any.
    pub noise: Option<Noise>,
    /// Signals.
    pub signals: Signals,
}

/// Dense noise `[n, D, V]` in its stored type, so that a shard is written without a conversion through f32.
#[derive(Debug, Clone, PartialEq)]
pub enum Dense {
    /// f16.
    F16(Vec<f16>),
    /// f32.
    F32(Vec<f32>),
}

/// The columns of a slice of n rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Extracted {
    /// ln p_x `[n]`.
    pub logprob: Vec<f32>,
    /// Noise corrections, if requested.
    pub replay: Option<EncodedRows>,
    /// Dense noise, if requested.
    pub dense: Option<Dense>,
    /// Signals `[n]`; empty if none is requested.
    pub signals: Vec<RowSignals>,
    /// Number of rows that the CPU computed.
    pub fallbacks: u64,
}

impl ExtractRequest {
    /// The columns to extract from rows that are contiguous.
    #[must_use]
    pub fn contiguous(request: &ExtractionSpec) -> Self {
        Self::with_stride(request, request.vocab)
    }

    /// The columns to extract from rows that begin `stride` floats apart.
    #[must_use]
    pub fn with_stride(request: &ExtractionSpec, stride: usize) -> Self {
        let (keys, signals) = (request.keys.clone(), request.signals.clone());
        Self { vocab: request.vocab, stride, keys, noise: request.noise, signals }
    }

    /// The number of most likely tokens that a kernel lists per row.
    fn top_count(&self) -> usize {
        self.signals.kernels(self.vocab).iter().map(|kernel| kernel.top_entries.min(self.vocab)).max().unwrap_or(0)
    }
}

/// A slice of logits on the device, and the event after which it is complete.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSlice {
    pointer: u64,
    ready: Event,
}

impl DeviceSlice {
    /// A slice at an address that is complete after an event.
    ///
    /// # Safety
    /// The address has as many rows as the extraction will get positions. They stay unchanged until the results are
    /// collected.
    #[must_use]
    pub unsafe fn new(pointer: u64, ready: Event) -> Self {
        Self { pointer, ready }
    }
}

/// A slice in flight.
#[derive(Debug)]
#[must_use = "its slot is free again once it is collected"]
pub struct Pending {
    slot: usize,
    rows: usize,
    logits: u64,
    /// Corrections whose copy to the host is already enqueued.
    copied_corrections: usize,
    event: Event,
}

/// Extracts columns from slices of logits. Up to [`SLICES`] slices may be in flight.
#[derive(Debug)]
pub struct Extractor {
    device: Arc<dyn Device>,
    request: ExtractRequest,
    max_rows: usize,
    scratch: Scratch,
    slots: Vec<Slot>,
    fallback: Fallback,
    /// Expected corrections per list: 1.25 times the last slice's. Their copy begins before the number is known.
    expected_per_list: f64,
}

fn check_range(what: &'static str, got: usize, valid: std::ops::RangeInclusive<usize>) -> Result<()> {
    if valid.contains(&got) {
        return Ok(());
    }
    Err(GpuError::Input { what, got: got.to_string(), valid: format!("{} to {}", valid.start(), valid.end()) })
}

impl Extractor {
    /// Device bytes of an extractor, without the rounding of allocations.
    #[must_use]
    pub fn bytes(request: &ExtractRequest, max_rows: usize) -> u64 {
        Scratch::bytes(request, max_rows) + SLICES as u64 * Slot::bytes(request, max_rows)
    }

    /// Creates an extractor of slices of at most `max_rows` rows, and allocates all its memory.
    ///
    /// # Errors
    /// If the kernels do not support one of the sizes, or there is not enough memory.
    pub fn new(device: &Arc<dyn Device>, request: ExtractRequest, max_rows: usize) -> Result<Self> {
        check_range("vocabulary size", request.vocab, 1..=MAX_VOCAB)?;
        check_range("stride of the logits", request.stride, request.vocab..=usize::MAX)?;
        check_range("rows of a slice", max_rows, 1..=MAX_ROWS)?;
        check_range(
            "most likely tokens of a row (k of the top-k, most of the top-p)",
            request.top_count(),
            0..=MAX_TOPK,
        )?;
        request.signals.check_vocabulary(request.vocab)?;
        if request.noise.is_some() {
            check_range("draws", request.keys.len(), 1..=MAX_ROWS)?;
        }
        let scratch = Scratch::new(device, &request, max_rows)?;
        let slots = (0..SLICES).map(|_| Slot::new(device, &request, max_rows)).collect::<Result<Vec<_>>>()?;
        let fallback = Fallback::new(device, &request)?;
        Ok(Self { device: Arc::clone(device), request, max_rows, scratch, slots, fallback, expected_per_list: 4.0 })
    }

    /// Starts the extraction from a slice of logits `[n, V]` (f32), and returns. The device begins it after the present
    /// work of [`Stream::Pass`](crate::Stream).
    ///
    /// # Safety
    /// `logits` is the device address of that many rows. They stay unchanged until the slice is collected.
    ///
    /// # Errors
    /// If there are more than `max_rows` rows, the lists have different lengths, two slices are already in flight, or
    /// the device fails.
    pub unsafe fn begin(&mut self, logits: u64, positions: &Positions<'_>) -> Result<Pending> {
        let ready = self.device.record(Stream::Pass)?;
        // SAFETY: the caller guarantees the rows
        self.begin_slice(unsafe { DeviceSlice::new(logits, ready) }, positions)
    }

    /// As [`Extractor::begin`], for logits that are complete after a known event. Later work of the pass does not delay
    /// the extraction.
    ///
    /// # Errors
    /// As [`Extractor::begin`].
    pub fn begin_slice(&mut self, logits: DeviceSlice, positions: &Positions<'_>) -> Result<Pending> {
        let rows = positions.tokens.len();
        check_range("rows of a slice", rows, 0..=self.max_rows)?;
        check_range("positions of a slice", positions.positions.len(), rows..=rows)?;
        check_range("sequence ids of a slice", positions.sequence_ids.len(), rows..=rows)?;
        let Some(index) = self.slots.iter().position(|slot| !slot.busy) else {
            let (got, valid) = (SLICES + 1, SLICES.to_string());
            return Err(GpuError::Input { what: "slices in flight", got: got.to_string(), valid });
        };
        let slot = &mut self.slots[index];
        let copied = ((self.expected_per_list * (rows * self.scratch.draws()) as f64) as usize + 64).min(slot.capacity);
        // SAFETY: the creator of the slice guarantees its rows; all buffers hold `max_rows` rows and live as long as
        // this value
        let event = unsafe { self.scratch.launch(&self.device, &self.request, logits, positions, slot, copied)? };
        slot.busy = true;
        Ok(Pending { slot: index, rows, logits: logits.pointer, copied_corrections: copied, event })
    }

    /// Waits for a slice, computes the rows that are left to the CPU, and returns the columns.
    ///
    /// # Errors
    /// The CPU's error for the first row that has one, or if the device fails.
    pub fn collect(&mut self, pending: Pending) -> Result<Extracted> {
        let slot = &mut self.slots[pending.slot];
        slot.busy = false;
        self.device.wait(pending.event)?;
        let results = slot.results(&self.device, &self.request, pending.rows, pending.copied_corrections)?;
        let lists = (pending.rows * self.scratch.draws()).max(1) as f64;
        self.expected_per_list = 1.25 * results.total as f64 / lists;
        // SAFETY: the caller of `begin` keeps the logits until now
        unsafe { assemble(&mut self.fallback, &self.request, &results, pending.logits) }
    }
}

impl Drop for Extractor {
    fn drop(&mut self) {
        // A copy of an uncollected slice may still write to memory that is freed now. A device that fails writes none.
        if let Ok(event) = self.device.record(Stream::Extract) {
            let _ = self.device.wait(event);
        }
    }
}

impl Extract for Extractor {
    type Logits = DeviceSlice;
    type Error = GpuError;

    fn extract(
        &mut self,
        logits: &DeviceSlice,
        observed: &Positions<'_>,
    ) -> Result<stillhouse_noise::ExtractedColumns> {
        let pending = self.begin_slice(*logits, observed)?;
        let Extracted { logprob, replay, dense, signals, fallbacks } = self.collect(pending)?;
        let dense = dense.map(|dense| match dense {
            Dense::F16(values) => values.into_iter().map(f16::to_f32).collect(),
            Dense::F32(values) => values,
        });
        Ok(stillhouse_noise::ExtractedColumns { logprob, replay, dense, signals, fallbacks })
    }
}

/// Assembles the rows in order.
///
/// # Safety
/// The logits are those that [`Extractor::begin`] received.
unsafe fn assemble(
    fallback: &mut Fallback,
    request: &ExtractRequest,
    results: &SliceResults<'_>,
    logits: u64,
) -> Result<Extracted> {
    let mut out = Extracted {
        logprob: results.logprob.clone(),
        replay: None,
        dense: results.dense(),
        signals: results.signals(),
        fallbacks: 0,
    };
    let mut replay =
        matches!(request.noise, Some(Noise::Replay { .. })).then(|| slots::CorrectionLists::new(request.keys.len()));
    for row in 0..results.rows {
        if !results.needs_fallback(row) {
            if let Some(lists) = &mut replay {
                lists.push_row(results, row);
            }
            continue;
        }
        out.fallbacks += 1;
        let stride = (request.stride * size_of::<f32>()) as u64;
        // SAFETY: the row is within the slice
        unsafe {
            fallback.recompute_row(request, logits + row as u64 * stride, results, row, &mut out, replay.as_mut())?
        };
    }
    out.replay = replay.map(slots::CorrectionLists::finish);
    Ok(out)
}
