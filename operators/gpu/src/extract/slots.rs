//! The memory of one slice in flight: its inputs and results, on the device and on the host.

use std::sync::Arc;

use half::f16;
use stillhouse_noise::{Correction, EncodedRows, RowSignals, ValueType};

use super::signals::{SignalSlot, signal_slots};
use super::{Dense, ExtractRequest, Noise, Positions};
use crate::device::{Buffer, Device, Pinned, Result, Stream, allocated_bytes};

/// Average corrections per list that a slot has space for. Rows of a slice that exceed it are left to the CPU.
const CORRECTIONS_PER_LIST: usize = 128;
/// Flag in a list's count: the CPU must compute the row.
const FALLBACK_FLAG: u32 = 1 << 31;

/// A region of device memory with its copy on the host.
#[derive(Debug)]
pub(super) struct Mirrored {
    pub device: Buffer,
    pub host: Pinned,
}

impl Mirrored {
    pub fn new(device: &Arc<dyn Device>, bytes: usize) -> Result<Self> {
        Ok(Self { device: Buffer::new(device, bytes)?, host: Pinned::new(device, bytes)? })
    }

    /// Enqueues a copy of `range` to the host.
    ///
    /// # Safety
    /// Nothing accesses the host's copy of `range` until the stream has done this.
    pub unsafe fn fetch(&mut self, device: &Arc<dyn Device>, range: std::ops::Range<usize>) -> Result<()> {
        let (from, bytes) = (self.device.pointer() + range.start as u64, range.len());
        let to = self.host[range].as_mut_ptr();
        // SAFETY: both have this length; the caller guarantees the rest
        unsafe { device.copy_to_host(Stream::Extract, to, from, bytes) }
    }
}

/// The memory of one slice in flight.
#[derive(Debug)]
pub(super) struct Slot {
    /// Sequence ids (u64), tokens (u32), positions (u32).
    pub inputs: Mirrored,
    /// Total variations (f64) per list, ln p_x (f32) per row, counts (u32) per list.
    pub columns: Mirrored,
    /// Corrections of all lists, contiguous.
    pub corrections: Mirrored,
    pub correction_layout: CorrectionLayout,
    /// The most likely tokens of each row, then their ln p.
    pub top_tokens: Mirrored,
    /// Dense noise ξ.
    pub dense: Mirrored,
    /// One per signal.
    pub signals: Vec<SignalSlot>,
    /// Maximum corrections in `corrections`.
    pub capacity: usize,
    pub busy: bool,
    /// Lists per row: the number of draws, or 0 without noise.
    lists_per_row: usize,
}

/// The wire format of a correction: its index, then its value in the stored type.
#[derive(Debug, Clone, Copy)]
pub(super) struct CorrectionLayout {
    /// Whether the index has 16 bits, which suffices for vocabularies up to 65,536; otherwise it has 32.
    pub short_index: bool,
    pub f16_value: bool,
}

impl CorrectionLayout {
    fn for_request(request: &ExtractRequest) -> Self {
        let f16_value = matches!(request.noise, Some(Noise::Replay { value_type: ValueType::F16, .. }));
        Self { short_index: request.vocab <= 1 << 16, f16_value }
    }

    fn index_bytes(self) -> usize {
        if self.short_index { 2 } else { 4 }
    }

    pub fn bytes(self) -> usize {
        self.index_bytes() + if self.f16_value { 2 } else { 4 }
    }

    /// Decodes a correction.
    fn decode(self, bytes: &[u8]) -> (u32, f32) {
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0u32, |word, byte| (word << 8) | u32::from(*byte));
        let (index, value) = bytes.split_at(self.index_bytes());
        let value = match self.f16_value {
            true => f16::from_bits(word(value) as u16).to_f32(),
            false => f32::from_bits(word(value)),
        };
        (word(index), value)
    }
}

/// Byte offsets of the parts of a slice, from its number of rows and lists.
#[derive(Debug, Clone, Copy)]
pub(super) struct SliceLayout {
    pub rows: usize,
    pub lists: usize,
}

impl SliceLayout {
    pub fn tokens(self) -> usize {
        self.rows * 8
    }
    pub fn positions(self) -> usize {
        self.rows * 12
    }
    pub fn inputs(self) -> usize {
        self.rows * 16
    }
    pub fn logprobs(self) -> usize {
        self.lists * 8
    }
    pub fn counts(self) -> usize {
        self.lists * 8 + self.rows * 4
    }
    pub fn columns(self) -> usize {
        self.lists * 12 + self.rows * 4
    }
}

impl Slot {
    fn max_layout(request: &ExtractRequest, max_rows: usize) -> SliceLayout {
        let lists_per_row = if request.noise.is_some() { request.keys.len() } else { 0 };
        SliceLayout { rows: max_rows, lists: max_rows * lists_per_row }
    }

    /// Maximum corrections of a slice.
    fn capacity(request: &ExtractRequest, max_rows: usize) -> usize {
        match request.noise {
            Some(Noise::Replay { .. }) => Self::max_layout(request, max_rows).lists * CORRECTIONS_PER_LIST + 512,
            Some(Noise::Dense { .. }) | None => 0,
        }
    }

    /// Bytes of the inputs, the columns, the corrections, the most likely tokens and the dense noise.
    fn sizes(request: &ExtractRequest, max_rows: usize) -> [usize; 5] {
        let layout = Self::max_layout(request, max_rows);
        let dense = match request.noise {
            Some(Noise::Dense { value_type, .. }) => layout.lists * request.vocab * value_bytes(value_type),
            Some(Noise::Replay { .. }) | None => 0,
        };
        let corrections = Self::capacity(request, max_rows) * CorrectionLayout::for_request(request).bytes();
        let top_tokens = max_rows * request.top_count() * 8;
        [layout.inputs(), layout.columns(), corrections, top_tokens, dense]
    }

    /// Device bytes of a slot.
    pub fn bytes(request: &ExtractRequest, max_rows: usize) -> u64 {
        let signals = request.signals.kernels(request.vocab);
        let signals = signals.iter().map(|kernel| SignalSlot::bytes(kernel, max_rows)).sum::<u64>();
        allocated_bytes(&Self::sizes(request, max_rows)) + signals
    }

    pub fn new(device: &Arc<dyn Device>, request: &ExtractRequest, max_rows: usize) -> Result<Self> {
        let [inputs, columns, corrections, top_tokens, dense] = Self::sizes(request, max_rows);
        Ok(Self {
            inputs: Mirrored::new(device, inputs)?,
            columns: Mirrored::new(device, columns)?,
            corrections: Mirrored::new(device, corrections)?,
            correction_layout: CorrectionLayout::for_request(request),
            top_tokens: Mirrored::new(device, top_tokens)?,
            dense: Mirrored::new(device, dense)?,
            signals: signal_slots(device, request, max_rows)?,
            capacity: Self::capacity(request, max_rows),
            busy: false,
            lists_per_row: Self::max_layout(request, 1).lists,
        })
    }

    pub fn layout(&self, rows: usize) -> SliceLayout {
        SliceLayout { rows, lists: rows * self.lists_per_row }
    }

    /// Writes the inputs to the pinned memory from which they are copied.
    pub fn stage(&mut self, observed: &Positions<'_>) {
        let layout = self.layout(observed.tokens.len());
        let (sequences, rest) = self.inputs.host[..layout.inputs()].split_at_mut(layout.tokens());
        let (tokens, positions) = rest.split_at_mut(layout.positions() - layout.tokens());
        for (to, from) in sequences.as_chunks_mut::<8>().0.iter_mut().zip(observed.sequence_ids) {
            *to = from.to_ne_bytes();
        }
        for (to, from) in tokens.as_chunks_mut::<4>().0.iter_mut().zip(observed.tokens) {
            *to = from.to_ne_bytes();
        }
        for (to, from) in positions.as_chunks_mut::<4>().0.iter_mut().zip(observed.positions) {
            *to = from.to_ne_bytes();
        }
    }

    /// Reads the results on the host, and fetches corrections that were not copied yet.
    pub fn results(
        &mut self,
        device: &Arc<dyn Device>,
        request: &ExtractRequest,
        rows: usize,
        copied: usize,
    ) -> Result<SliceResults<'_>> {
        let layout = self.layout(rows);
        let columns = &self.columns.host;
        let logprob = f32s(&columns[layout.logprobs()..layout.counts()]);
        let counts = u32s(&columns[layout.counts()..layout.columns()]);
        let total_variations = f64s(&columns[..layout.logprobs()]);
        let mut offsets = Vec::with_capacity(counts.len());
        let mut total = 0;
        let replay = matches!(request.noise, Some(Noise::Replay { .. }));
        for &count in counts.iter().filter(|_| replay) {
            offsets.push(total);
            total += if count & FALLBACK_FLAG == 0 { count as usize } else { 0 };
        }
        if total.min(self.capacity) > copied {
            let correction_bytes = self.correction_layout.bytes();
            // SAFETY: the copy is waited for
            unsafe {
                self.corrections
                    .fetch(device, copied * correction_bytes..total.min(self.capacity) * correction_bytes)?
            };
            device.wait(device.record(Stream::Extract)?)?;
        }
        Ok(SliceResults {
            slot: self,
            request: request.clone(),
            rows,
            logprob,
            counts,
            total_variations,
            offsets,
            total,
        })
    }
}

pub(super) fn value_bytes(value_type: ValueType) -> usize {
    match value_type {
        ValueType::F16 => 2,
        ValueType::F32 => 4,
    }
}

pub(super) fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|b| u32::from_ne_bytes(*b)).collect()
}

pub(super) fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b)).collect()
}

fn f64s(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<8>().0.iter().map(|b| f64::from_ne_bytes(*b)).collect()
}

/// The results of a slice as the host received them.
#[derive(Debug)]
pub(super) struct SliceResults<'a> {
    slot: &'a Slot,
    request: ExtractRequest,
    pub rows: usize,
    /// ln p_x per row; NaN if the row is left to the CPU.
    pub logprob: Vec<f32>,
    counts: Vec<u32>,
    total_variations: Vec<f64>,
    offsets: Vec<usize>,
    /// Number of corrections of the slice.
    pub total: usize,
}

impl SliceResults<'_> {
    fn lists(&self, row: usize) -> std::ops::Range<usize> {
        row * self.slot.lists_per_row..(row + 1) * self.slot.lists_per_row
    }

    /// Whether the CPU must compute this row.
    pub fn needs_fallback(&self, row: usize) -> bool {
        self.logprob[row].is_nan()
            || self.lists(row).any(|list| {
                let beyond = |offset: &usize| offset + self.counts[list] as usize > self.slot.capacity;
                self.counts[list] & FALLBACK_FLAG != 0 || self.offsets.get(list).is_some_and(beyond)
            })
    }

    pub fn token(&self, row: usize) -> u32 {
        let at = self.slot.layout(self.rows).tokens() + row * 4;
        u32s(&self.slot.inputs.host[at..at + 4]).first().copied().unwrap_or(0)
    }

    pub fn position(&self, row: usize) -> u32 {
        let at = self.slot.layout(self.rows).positions() + row * 4;
        u32s(&self.slot.inputs.host[at..at + 4]).first().copied().unwrap_or(0)
    }

    pub fn sequence_id(&self, row: usize) -> u64 {
        let bytes = self.slot.inputs.host[row * 8..row * 8 + 8].as_chunks::<8>().0;
        bytes.first().copied().map(u64::from_ne_bytes).unwrap_or(0)
    }

    /// The most likely tokens of every row, as many as the kernel listed.
    fn top_tokens(&self) -> (Vec<u32>, Vec<f32>) {
        let (values, host) = (self.rows * self.request.top_count(), &self.slot.top_tokens.host);
        (u32s(&host[..values * 4]), f32s(&host[values * 4..values * 8]))
    }

    /// The signals of all rows; empty if none is requested. Those of rows left to the CPU are meaningless.
    pub fn signals(&self) -> Vec<RowSignals> {
        let signals = &self.request.signals;
        if signals.is_empty() {
            return Vec::new();
        }
        let (k, (tokens, logprobs)) = (self.request.top_count(), self.top_tokens());
        let signals_of_row = |row: usize| {
            let (top, mut columns) = (row * k..(row + 1) * k, RowSignals::new());
            for (signal, slot) in signals.iter().zip(&self.slot.signals) {
                let top = (&tokens[top.clone()], &logprobs[top.clone()]);
                signal.read_kernel_output(slot.output_of_row(row), top, &mut columns);
            }
            columns
        };
        (0..self.rows).map(signals_of_row).collect()
    }

    pub fn dense(&self) -> Option<Dense> {
        let Some(Noise::Dense { value_type, .. }) = self.request.noise else { return None };
        let values = self.rows * self.slot.lists_per_row * self.request.vocab;
        let bytes = &self.slot.dense.host[..values * value_bytes(value_type)];
        Some(match value_type {
            ValueType::F16 => Dense::F16(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_ne_bytes(*b)).collect()),
            ValueType::F32 => Dense::F32(f32s(bytes)),
        })
    }
}

/// Collects the lists of corrections, row by row.
#[derive(Debug)]
pub(super) struct CorrectionLists {
    out: EncodedRows,
    sum: f64,
}

impl CorrectionLists {
    pub fn new(draws: usize) -> Self {
        Self { out: EncodedRows { draws, offsets: vec![0], ..EncodedRows::default() }, sum: 0.0 }
    }

    /// Adds a row that the kernels computed.
    pub fn push_row(&mut self, results: &SliceResults<'_>, row: usize) {
        for list in results.lists(row) {
            let (first, count) = (results.offsets[list], results.counts[list] as usize);
            let layout = results.slot.correction_layout;
            let corrections = &results.slot.corrections.host[first * layout.bytes()..(first + count) * layout.bytes()];
            let corrections = corrections.chunks_exact(layout.bytes()).map(|bytes| layout.decode(bytes));
            corrections.for_each(|(index, logprob)| {
                self.out.indices.push(index);
                self.out.logprobs.push(logprob);
            });
            self.end_list(count, results.total_variations[list]);
        }
        self.out.logprob.push(results.logprob[row]);
    }

    /// Adds a draw that the CPU encoded. Call [`CorrectionLists::end_row`] after the last draw of a row.
    pub fn push_draw(&mut self, corrections: &[Correction], total_variation: f64) {
        self.out.indices.extend(corrections.iter().map(|c| c.index));
        self.out.logprobs.extend(corrections.iter().map(|c| c.logprob));
        self.end_list(corrections.len(), total_variation);
    }

    pub fn end_row(&mut self, logprob: f32) {
        self.out.logprob.push(logprob);
    }

    fn end_list(&mut self, count: usize, total_variation: f64) {
        self.out.counts.push(count as u32);
        self.out.offsets.push(self.out.indices.len());
        self.out.max_total_variation = self.out.max_total_variation.max(total_variation);
        self.sum += total_variation;
    }

    pub fn finish(mut self) -> EncodedRows {
        if !self.out.counts.is_empty() {
            self.out.mean_total_variation = self.sum / self.out.counts.len() as f64;
        }
        self.out
    }
}
