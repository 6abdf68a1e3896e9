//! The memory of one slice in flight: its inputs and results, on the device and on the host.

use std::sync::Arc;

use half::f16;
use stillhouse_noise::{Correction, RowSignals, RowsEncoded, ValueType};

use super::signals::SignalSlot;
use super::{Asked, Dense, Noise, Positions};
use crate::device::{Buffer, Device, Pinned, Result, Stream, taken};

/// Average corrections per list that a slot has space for. Rows of a slice that exceed it are left to the CPU.
const ROOM: usize = 128;
/// Flag in a list's count: the CPU must compute the row.
const FALL_BACK: u32 = 1 << 31;

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
        unsafe { device.copy_out(Stream::Extract, to, from, bytes) }
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
    pub pairs: Mirrored,
    pub correction: Packed,
    /// Indices, then ln p.
    pub topk: Mirrored,
    /// Dense noise ξ.
    pub dense: Mirrored,
    pub signals: SignalSlot,
    /// Maximum corrections in `pairs`.
    pub room: usize,
    pub busy: bool,
    /// Lists per row: the number of draws, or 0 without noise.
    lists_of_row: usize,
}

/// The wire format of a correction: its index, then its value in the stored type.
#[derive(Debug, Clone, Copy)]
pub(super) struct Packed {
    /// Whether the index has 16 bits, which suffices for vocabularies up to 65,536; otherwise it has 32.
    pub short_index: bool,
    pub half: bool,
}

impl Packed {
    fn of(asked: &Asked) -> Self {
        let half = matches!(asked.noise, Some(Noise::Replay { value_type: ValueType::F16, .. }));
        Self { short_index: asked.vocab <= 1 << 16, half }
    }

    fn index_bytes(self) -> usize {
        if self.short_index { 2 } else { 4 }
    }

    pub fn bytes(self) -> usize {
        self.index_bytes() + if self.half { 2 } else { 4 }
    }

    /// Decodes a correction.
    fn read(self, bytes: &[u8]) -> (u32, f32) {
        let word = |bytes: &[u8]| bytes.iter().rev().fold(0u32, |word, byte| (word << 8) | u32::from(*byte));
        let (index, value) = bytes.split_at(self.index_bytes());
        let value = match self.half {
            true => f16::from_bits(word(value) as u16).to_f32(),
            false => f32::from_bits(word(value)),
        };
        (word(index), value)
    }
}

/// Byte offsets of the parts of a slice, from its number of rows and lists.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub rows: usize,
    pub lists: usize,
}

impl Layout {
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
    fn most(asked: &Asked, most_rows: usize) -> Layout {
        let lists_of_row = if asked.noise.is_some() { asked.keys.len() } else { 0 };
        Layout { rows: most_rows, lists: most_rows * lists_of_row }
    }

    /// Maximum corrections of a slice.
    fn room(asked: &Asked, most_rows: usize) -> usize {
        match asked.noise {
            Some(Noise::Replay { .. }) => Self::most(asked, most_rows).lists * ROOM + 512,
            Some(Noise::Dense { .. }) | None => 0,
        }
    }

    /// Bytes of the inputs, the columns, the corrections, the top-k and the dense noise.
    fn sizes(asked: &Asked, most_rows: usize) -> [usize; 5] {
        let layout = Self::most(asked, most_rows);
        let dense = match asked.noise {
            Some(Noise::Dense { value_type, .. }) => layout.lists * asked.vocab * bytes_of(value_type),
            Some(Noise::Replay { .. }) | None => 0,
        };
        let pairs = Self::room(asked, most_rows) * Packed::of(asked).bytes();
        let topk = most_rows * asked.listed() * 8;
        [layout.inputs(), layout.columns(), pairs, topk, dense]
    }

    /// Device bytes of a slot.
    pub fn bytes(asked: &Asked, most_rows: usize) -> u64 {
        taken(&Self::sizes(asked, most_rows)) + taken(&SignalSlot::sizes(asked, most_rows))
    }

    pub fn new(device: &Arc<dyn Device>, asked: &Asked, most_rows: usize) -> Result<Self> {
        let [inputs, columns, pairs, topk, dense] = Self::sizes(asked, most_rows);
        Ok(Self {
            inputs: Mirrored::new(device, inputs)?,
            columns: Mirrored::new(device, columns)?,
            pairs: Mirrored::new(device, pairs)?,
            correction: Packed::of(asked),
            topk: Mirrored::new(device, topk)?,
            dense: Mirrored::new(device, dense)?,
            signals: SignalSlot::new(device, asked, most_rows)?,
            room: Self::room(asked, most_rows),
            busy: false,
            lists_of_row: Self::most(asked, 1).lists,
        })
    }

    pub fn layout(&self, rows: usize) -> Layout {
        Layout { rows, lists: rows * self.lists_of_row }
    }

    /// Writes the inputs to the pinned memory from which they are copied.
    pub fn stage(&mut self, at: &Positions<'_>) {
        let layout = self.layout(at.tokens.len());
        let (sequences, rest) = self.inputs.host[..layout.inputs()].split_at_mut(layout.tokens());
        let (tokens, positions) = rest.split_at_mut(layout.positions() - layout.tokens());
        for (to, from) in sequences.as_chunks_mut::<8>().0.iter_mut().zip(at.sequence_ids) {
            *to = from.to_ne_bytes();
        }
        for (to, from) in tokens.as_chunks_mut::<4>().0.iter_mut().zip(at.tokens) {
            *to = from.to_ne_bytes();
        }
        for (to, from) in positions.as_chunks_mut::<4>().0.iter_mut().zip(at.positions) {
            *to = from.to_ne_bytes();
        }
    }

    /// Reads the results on the host, and fetches corrections that were not copied yet.
    pub fn wire(&mut self, device: &Arc<dyn Device>, asked: &Asked, rows: usize, copied: usize) -> Result<Wire<'_>> {
        let layout = self.layout(rows);
        let columns = &self.columns.host;
        let logprob = f32s(&columns[layout.logprobs()..layout.counts()]);
        let counts = u32s(&columns[layout.counts()..layout.columns()]);
        let variations = f64s(&columns[..layout.logprobs()]);
        let mut offsets = Vec::with_capacity(counts.len());
        let mut total = 0;
        let replay = matches!(asked.noise, Some(Noise::Replay { .. }));
        for &count in counts.iter().filter(|_| replay) {
            offsets.push(total);
            total += if count & FALL_BACK == 0 { count as usize } else { 0 };
        }
        if total.min(self.room) > copied {
            let of_one = self.correction.bytes();
            // SAFETY: the copy is waited for
            unsafe { self.pairs.fetch(device, copied * of_one..total.min(self.room) * of_one)? };
            device.wait(device.record(Stream::Extract)?)?;
        }
        Ok(Wire { slot: self, asked: asked.clone(), rows, logprob, counts, variations, offsets, total })
    }
}

pub(super) fn bytes_of(value_type: ValueType) -> usize {
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
pub(super) struct Wire<'a> {
    slot: &'a Slot,
    asked: Asked,
    pub rows: usize,
    /// ln p_x per row; NaN if the row is left to the CPU.
    pub logprob: Vec<f32>,
    counts: Vec<u32>,
    variations: Vec<f64>,
    offsets: Vec<usize>,
    /// Number of corrections of the slice.
    pub total: usize,
}

impl Wire<'_> {
    fn lists(&self, row: usize) -> std::ops::Range<usize> {
        row * self.slot.lists_of_row..(row + 1) * self.slot.lists_of_row
    }

    /// Whether the CPU must compute this row.
    pub fn left_to_cpu(&self, row: usize) -> bool {
        self.logprob[row].is_nan()
            || self.lists(row).any(|list| {
                let beyond = |offset: &usize| offset + self.counts[list] as usize > self.slot.room;
                self.counts[list] & FALL_BACK != 0 || self.offsets.get(list).is_some_and(beyond)
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
    fn listed(&self) -> (Vec<u32>, Vec<f32>) {
        let (values, host) = (self.rows * self.asked.listed(), &self.slot.topk.host);
        (u32s(&host[..values * 4]), f32s(&host[values * 4..values * 8]))
    }

    pub fn topk(&self) -> Option<(Vec<u32>, Vec<f32>)> {
        let (listed, k) = (self.asked.listed(), self.asked.topk.min(self.asked.vocab));
        if k == 0 {
            return None;
        }
        let (indices, logprobs) = self.listed();
        if k == listed {
            return Some((indices, logprobs));
        }
        let firsts = |row: usize| row * listed..row * listed + k;
        Some((
            (0..self.rows).flat_map(|row| &indices[firsts(row)]).copied().collect(),
            (0..self.rows).flat_map(|row| &logprobs[firsts(row)]).copied().collect(),
        ))
    }

    pub fn signals(&self) -> Vec<RowSignals> {
        if self.asked.signals.is_none() {
            Vec::new()
        } else {
            self.slot.signals.rows(&self.asked, self.rows, self.listed())
        }
    }

    pub fn dense(&self) -> Option<Dense> {
        let Some(Noise::Dense { value_type, .. }) = self.asked.noise else { return None };
        let values = self.rows * self.slot.lists_of_row * self.asked.vocab;
        let bytes = &self.slot.dense.host[..values * bytes_of(value_type)];
        Some(match value_type {
            ValueType::F16 => Dense::F16(bytes.as_chunks::<2>().0.iter().map(|b| f16::from_ne_bytes(*b)).collect()),
            ValueType::F32 => Dense::F32(f32s(bytes)),
        })
    }
}

/// Collects the lists of corrections, row by row.
#[derive(Debug)]
pub(super) struct Lists {
    out: RowsEncoded,
    sum: f64,
}

impl Lists {
    pub fn new(draws: usize) -> Self {
        Self { out: RowsEncoded { draws, offsets: vec![0], ..RowsEncoded::default() }, sum: 0.0 }
    }

    /// Adds a row that the kernels computed.
    pub fn take(&mut self, wire: &Wire<'_>, row: usize) {
        for list in wire.lists(row) {
            let (first, count) = (wire.offsets[list], wire.counts[list] as usize);
            let packed = wire.slot.correction;
            let corrections = &wire.slot.pairs.host[first * packed.bytes()..(first + count) * packed.bytes()];
            let corrections = corrections.chunks_exact(packed.bytes()).map(|bytes| packed.read(bytes));
            corrections.for_each(|(index, logprob)| {
                self.out.indices.push(index);
                self.out.logprobs.push(logprob);
            });
            self.close(count, wire.variations[list]);
        }
        self.out.logprob.push(wire.logprob[row]);
    }

    /// Adds a draw that the CPU encoded. Call [`Lists::end_row`] after the last draw of a row.
    pub fn push(&mut self, corrections: &[Correction], total_variation: f64) {
        self.out.indices.extend(corrections.iter().map(|c| c.index));
        self.out.logprobs.extend(corrections.iter().map(|c| c.logprob));
        self.close(corrections.len(), total_variation);
    }

    pub fn end_row(&mut self, logprob: f32) {
        self.out.logprob.push(logprob);
    }

    fn close(&mut self, count: usize, total_variation: f64) {
        self.out.counts.push(count as u32);
        self.out.offsets.push(self.out.indices.len());
        self.out.max_total_variation = self.out.max_total_variation.max(total_variation);
        self.sum += total_variation;
    }

    pub fn finish(mut self) -> RowsEncoded {
        if !self.out.counts.is_empty() {
            self.out.mean_total_variation = self.sum / self.out.counts.len() as f64;
        }
        self.out
    }
}
