//! What is kept of a slice of logits that lies in device memory: ln p_x, the corrections of its noise, the top-k, dense noise, other signals.
//!
//! ```text
//!   begin ──► tokens, positions ─► kernels/noise.cu on Stream::Extract ─► pinned memory ┐
//!   begin of the next slice …                                                          event
//!   collect ◄── columns ◄── the few rows that the kernels leave to the CPU ◄────────────┘
//! ```
//!
//! What `stillhouse_noise` does on the CPU is the specification, and its encoder does every row that a kernel cannot do: a list that does
//! not fit, a tolerance out of reach, a logit that is not finite. So nothing is approximate, and errors are the CPU's own.
//!
//! Beyond the logits, a row takes about 23 KiB of device memory for each draw. Nothing is allocated after [`Extractor::new`].

mod fallback;
mod signals;
mod slots;
mod work;

use std::sync::Arc;

use half::f16;
use stillhouse_noise::{DrawKey, Extract, Extraction, RowSignals, RowsEncoded, Signals};
pub use stillhouse_noise::{NoiseForm as Noise, Observed as Positions};

use crate::device::{Device, Event, Result, Stream};
use crate::error::GpuError;
use fallback::Fallback;
use slots::{Slot, Wire};
use work::Work;

/// Slices that may be in flight at once.
pub const SLICES: usize = 2;
/// The largest k of the top-k.
pub const MOST_TOPK: usize = 2048;
/// The most rows of a slice: blocks of a grid.
const MOST_ROWS: usize = 65_535;
const MOST_VOCAB: usize = (1 << 31) - 1;

/// What is kept of every row.
#[derive(Debug, Clone)]
pub struct Asked {
    /// V.
    pub vocab: usize,
    /// Floats from one row of logits to the next: V, or more where rows are padded.
    pub stride: usize,
    /// The draws' keys; not read where no noise is asked for.
    pub keys: Vec<DrawKey>,
    /// The noise, if any.
    pub noise: Option<Noise>,
    /// k of the top-k; 0 for none.
    pub topk: usize,
    /// Other signals.
    pub signals: Signals,
}

/// Dense noise `[n, D, V]` in the type it is stored in: what is written to a shard, without a detour through f32.
#[derive(Debug, Clone, PartialEq)]
pub enum Dense {
    /// 16-bit.
    F16(Vec<f16>),
    /// 32-bit.
    F32(Vec<f32>),
}

/// The columns of a slice of n rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Extracted {
    /// ln p_x `[n]`.
    pub logprob: Vec<f32>,
    /// Corrections, where they were asked for.
    pub replay: Option<RowsEncoded>,
    /// Indices and ln p of the k largest logits `[n, min(k, V)]`, where they were asked for.
    pub topk: Option<(Vec<u32>, Vec<f32>)>,
    /// Dense noise, where it was asked for.
    pub dense: Option<Dense>,
    /// Other signals `[n]`, where any were asked for.
    pub signals: Vec<RowSignals>,
    /// Rows that the CPU encoded.
    pub fallbacks: u64,
}

impl Asked {
    /// What is asked of rows that lie back to back.
    #[must_use]
    pub fn of(asked: &Extraction) -> Self {
        Self::of_rows(asked, asked.vocab)
    }

    /// What is asked of rows so many floats apart.
    #[must_use]
    pub fn of_rows(asked: &Extraction, stride: usize) -> Self {
        let (keys, signals) = (asked.keys.clone(), asked.signals.clone());
        Self { vocab: asked.vocab, stride, keys, noise: asked.noise, topk: asked.topk, signals }
    }

    /// How many of the likeliest a kernel lists: for the top-k, and for the top-p.
    fn listed(&self) -> usize {
        self.topk.max(self.signals.top_p.map_or(0, |top_p| top_p.most)).min(self.vocab)
    }
}

/// Where a slice of logits is on the device, and from when on.
#[derive(Debug, Clone, Copy)]
pub struct DeviceSlice {
    pointer: u64,
    ready: Event,
}

impl DeviceSlice {
    /// A slice that is there once a stream has come to a point.
    ///
    /// # Safety
    /// As many rows as will be observed are at this address, and stay as they are until what is made of them has come back.
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
    /// Corrections that are already on their way to the host.
    copied: usize,
    event: Event,
}

/// Takes slices of logits to columns; two may be in flight.
#[derive(Debug)]
pub struct Extractor {
    device: Arc<dyn Device>,
    asked: Asked,
    most_rows: usize,
    work: Work,
    slots: Vec<Slot>,
    fallback: Fallback,
    /// Corrections that are copied before their number is known: a little more than the last slice's, for each list.
    expected: f64,
}

fn check(what: &'static str, got: usize, valid: std::ops::RangeInclusive<usize>) -> Result<()> {
    if valid.contains(&got) {
        return Ok(());
    }
    Err(GpuError::Input { what, got: got.to_string(), valid: format!("{} to {}", valid.start(), valid.end()) })
}

impl Extractor {
    /// Bytes that an extractor takes of a device; what allocations round up comes on top.
    #[must_use]
    pub fn bytes(asked: &Asked, most_rows: usize) -> u64 {
        Work::bytes(asked, most_rows) + SLICES as u64 * Slot::bytes(asked, most_rows)
    }

    /// An extractor of slices of up to `most_rows` rows, with all the memory it will need.
    ///
    /// # Errors
    /// With sizes that the kernels do not take, or without enough memory.
    pub fn new(device: &Arc<dyn Device>, asked: Asked, most_rows: usize) -> Result<Self> {
        check("vocabulary size", asked.vocab, 1..=MOST_VOCAB)?;
        check("stride of the logits", asked.stride, asked.vocab..=usize::MAX)?;
        check("rows of a slice", most_rows, 1..=MOST_ROWS)?;
        check("k of the top-k, or most of the top-p", asked.listed(), 0..=MOST_TOPK)?;
        asked.signals.check(asked.vocab)?;
        if asked.noise.is_some() {
            check("draws", asked.keys.len(), 1..=MOST_ROWS)?;
        }
        let work = Work::new(device, &asked, most_rows)?;
        let slots = (0..SLICES).map(|_| Slot::new(device, &asked, most_rows)).collect::<Result<Vec<_>>>()?;
        let fallback = Fallback::new(device, &asked)?;
        Ok(Self { device: Arc::clone(device), asked, most_rows, work, slots, fallback, expected: 4.0 })
    }

    /// Launches the work on a slice of logits `[n, V]` (f32) and comes back. It begins when what [`Stream::Pass`](crate::Stream) has to do
    /// now is done.
    ///
    /// # Safety
    /// `logits` is the address of that many rows on this device, and they stay as they are until the slice is collected.
    ///
    /// # Errors
    /// With more rows than were announced or lists of different lengths, with two slices in flight already, or when the device fails.
    pub unsafe fn begin(&mut self, logits: u64, positions: &Positions<'_>) -> Result<Pending> {
        let ready = self.device.record(Stream::Pass)?;
        // SAFETY: as the caller says
        self.begin_slice(unsafe { DeviceSlice::new(logits, ready) }, positions)
    }

    /// The same for logits that are there at a known point: what the pass does after it is not waited for.
    ///
    /// # Errors
    /// As [`Extractor::begin`].
    pub fn begin_slice(&mut self, logits: DeviceSlice, positions: &Positions<'_>) -> Result<Pending> {
        let rows = positions.tokens.len();
        check("rows of a slice", rows, 0..=self.most_rows)?;
        check("positions of a slice", positions.positions.len(), rows..=rows)?;
        check("sequence ids of a slice", positions.sequence_ids.len(), rows..=rows)?;
        let Some(at) = self.slots.iter().position(|slot| !slot.busy) else {
            let (got, valid) = (SLICES + 1, SLICES.to_string());
            return Err(GpuError::Input { what: "slices in flight", got: got.to_string(), valid });
        };
        let slot = &mut self.slots[at];
        let copied = ((self.expected * (rows * self.work.draws()) as f64) as usize + 64).min(slot.room);
        // SAFETY: as whoever made the slice says; all buffers are for `most_rows` rows, and live as long as this value
        let event = unsafe { self.work.launch(&self.device, &self.asked, logits, positions, slot, copied)? };
        slot.busy = true;
        Ok(Pending { slot: at, rows, logits: logits.pointer, copied, event })
    }

    /// Waits for a slice, lets the CPU do the rows that are left to it, and gives the columns.
    ///
    /// # Errors
    /// The CPU's error of the first row that has one; or when the device fails.
    pub fn collect(&mut self, pending: Pending) -> Result<Extracted> {
        let slot = &mut self.slots[pending.slot];
        slot.busy = false;
        self.device.wait(pending.event)?;
        let wire = slot.wire(&self.device, &self.asked, pending.rows, pending.copied)?;
        let lists = (pending.rows * self.work.draws()).max(1) as f64;
        self.expected = 1.25 * wire.total as f64 / lists;
        // SAFETY: the logits are there until now, as the caller of `begin` said
        unsafe { assemble(&mut self.fallback, &self.asked, &wire, pending.logits) }
    }
}

impl Drop for Extractor {
    fn drop(&mut self) {
        // A slice that nobody collected may still be on its way to memory that is freed now. A device that fails is not at work.
        if let Ok(event) = self.device.record(Stream::Extract) {
            let _ = self.device.wait(event);
        }
    }
}

impl Extract for Extractor {
    type Logits = DeviceSlice;
    type Error = GpuError;

    fn extract(&mut self, logits: &DeviceSlice, observed: &Positions<'_>) -> Result<stillhouse_noise::Extracted> {
        let pending = self.begin_slice(*logits, observed)?;
        let Extracted { logprob, replay, topk, dense, signals, fallbacks } = self.collect(pending)?;
        let dense = dense.map(|dense| match dense {
            Dense::F16(values) => values.into_iter().map(f16::to_f32).collect(),
            Dense::F32(values) => values,
        });
        Ok(stillhouse_noise::Extracted { logprob, replay, dense, topk, signals, fallbacks })
    }
}

/// Puts the rows together, in their order.
///
/// # Safety
/// The logits are as [`Extractor::begin`] got them.
unsafe fn assemble(fallback: &mut Fallback, asked: &Asked, wire: &Wire<'_>, logits: u64) -> Result<Extracted> {
    let mut out = Extracted {
        logprob: wire.logprob.clone(),
        replay: None,
        topk: wire.topk(),
        dense: wire.dense(),
        signals: wire.signals(),
        fallbacks: 0,
    };
    let mut replay = matches!(asked.noise, Some(Noise::Replay { .. })).then(|| slots::Lists::new(asked.keys.len()));
    for row in 0..wire.rows {
        if !wire.left_to_cpu(row) {
            if let Some(lists) = &mut replay {
                lists.take(wire, row);
            }
            continue;
        }
        out.fallbacks += 1;
        let stride = (asked.stride * size_of::<f32>()) as u64;
        // SAFETY: the row is one of the slice
        unsafe { fallback.row(asked, logits + row as u64 * stride, wire, row, &mut out, replay.as_mut())? };
    }
    out.replay = replay.map(slots::Lists::finish);
    Ok(out)
}
