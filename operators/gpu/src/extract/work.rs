//! The kernel launches of a slice. All slices share the memory that only launches use, because the stream runs them in
//! order.

use std::sync::Arc;

use stillhouse_noise::{Tolerance, ValueType};

use super::signals::Constants;
use super::slots::{Layout, Slot};
use super::{Asked, DeviceSlice, Noise, Positions};
use crate::device::{Arg, Buffer, Device, Event, Launch, Result, Stream, taken};

/// Threads of a block, as in kernels/noise/block.cuh.
pub(super) const THREADS: u32 = 512;
/// Bytes of a draw's key, of `RowState`, of `Found`, and of a list's values.
const KEY: usize = 8;
const ROW_STATE: usize = 24;
const FOUND: usize = 24 + 2 * 64 * 8 + 1024 * 12;
const VALUES: usize = 1024 * 8;
/// Bytes of a candidate in the shared memory of the search, and the ranges of list lengths that get a launch each.
///
/// Most lists are short, and a launch for short lists lets more of them run at once.
const CANDIDATE: u32 = 4 * 8 + 9 * 4;
const SEARCHES: [(u32, u32); 3] = [(0, 64), (65, 256), (257, 1024)];

/// Device memory that only the launches use.
#[derive(Debug)]
pub(super) struct Work {
    keys: Buffer,
    states: Buffer,
    found: Buffer,
    corrections: Buffer,
    offsets: Buffer,
    signals: Constants,
    draws: usize,
}

/// Values that all launches of a slice use.
pub(super) struct Slice<'a> {
    pub device: &'a Arc<dyn Device>,
    pub asked: &'a Asked,
    work: &'a Work,
    pub layout: Layout,
    logits: u64,
    inputs: u64,
    columns: u64,
}

/// The total variation that the encoder aims for: the tolerance less the margin for readers, as in
/// `stillhouse_noise::Tolerance`.
fn target(tolerance: Tolerance) -> f64 {
    tolerance.get() * 0.999 - 1e-6
}

impl Work {
    /// Bytes of the keys, row states, `Found` records, corrections and their offsets.
    fn sizes(asked: &Asked, most_rows: usize) -> [usize; 5] {
        let replay = if matches!(asked.noise, Some(Noise::Replay { .. })) { most_rows * asked.keys.len() } else { 0 };
        [asked.keys.len() * KEY, most_rows * ROW_STATE, replay * FOUND, replay * VALUES, replay * 4]
    }

    /// Device bytes, including the [`Constants`].
    pub fn bytes(asked: &Asked, most_rows: usize) -> u64 {
        taken(&Self::sizes(asked, most_rows)) + Constants::bytes(asked, most_rows)
    }

    pub fn new(device: &Arc<dyn Device>, asked: &Asked, most_rows: usize) -> Result<Self> {
        let [_, states, found, corrections, offsets] = Self::sizes(asked, most_rows);
        let keys: Vec<u8> = asked.keys.iter().flat_map(|key| key.words()).flat_map(u32::to_ne_bytes).collect();
        Ok(Self {
            keys: Buffer::of(device, &keys)?,
            states: Buffer::new(device, states)?,
            found: Buffer::new(device, found)?,
            corrections: Buffer::new(device, corrections)?,
            offsets: Buffer::new(device, offsets)?,
            signals: Constants::new(device, asked, most_rows)?,
            draws: if asked.noise.is_some() { asked.keys.len() } else { 0 },
        })
    }

    pub fn draws(&self) -> usize {
        self.draws
    }

    /// Launches all requested kernels and the copies to the host, including that of the first `copied` corrections.
    ///
    /// # Safety
    /// `logits` is the address of a slice. It and the slot stay valid until the returned event.
    pub unsafe fn launch(
        &self,
        device: &Arc<dyn Device>,
        asked: &Asked,
        logits: DeviceSlice,
        positions: &Positions<'_>,
        slot: &mut Slot,
        copied: usize,
    ) -> Result<Event> {
        let layout = slot.layout(positions.tokens.len());
        if layout.rows == 0 {
            return device.record(Stream::Extract);
        }
        slot.stage(positions);
        let (inputs, columns) = (slot.inputs.device.pointer(), slot.columns.device.pointer());
        let slice = Slice { device, asked, work: self, layout, logits: logits.pointer, inputs, columns };
        device.wait_in(Stream::Extract, logits.ready)?;
        // SAFETY: slot and logits stay valid until the event, as the caller guarantees; `Slot::new` and `Work::new`
        // chose the sizes
        unsafe {
            device.copy_in(Stream::Extract, inputs, slot.inputs.host.as_ptr(), layout.inputs())?;
            slice.softmax()?;
            match asked.noise {
                Some(Noise::Replay { .. }) => {
                    slice.replay(slot)?;
                    slot.pairs.fetch(device, 0..copied * slot.correction.bytes())?;
                }
                Some(Noise::Dense { value_type, condition }) => {
                    slice.dense(slot.dense.device.pointer(), value_type, condition)?;
                    let bytes = layout.lists * asked.vocab * super::slots::bytes_of(value_type);
                    slot.dense.fetch(device, 0..bytes)?;
                }
                None => {}
            }
            let k = asked.listed();
            if k > 0 {
                slice.topk(slot.topk.device.pointer(), k)?;
                slot.topk.fetch(device, 0..layout.rows * k * 8)?;
            }
            if !asked.signals.is_none() {
                slice.signals(slot, positions)?;
            }
            slot.columns.fetch(device, 0..layout.columns())?;
        }
        device.record(Stream::Extract)
    }
}

impl Slice<'_> {
    /// # Safety
    /// As [`Device::launch`].
    pub unsafe fn run(
        &self,
        kernel: &'static str,
        grid: [u32; 3],
        threads: u32,
        shared_bytes: u32,
        args: &[Arg],
    ) -> Result<()> {
        let launch = Launch { kernel, grid, block: [threads, 1, 1], shared_bytes };
        // SAFETY: the caller upholds the safety contract
        unsafe { self.device.launch(Stream::Extract, &launch, args) }
    }

    pub fn at_logits(&self) -> [Arg; 3] {
        let vocab = Arg::U32(self.asked.vocab as u32);
        [Arg::Pointer(self.logits), Arg::U64(self.asked.stride as u64), vocab]
    }

    fn tokens(&self) -> Arg {
        Arg::Pointer(self.inputs + self.layout.tokens() as u64)
    }

    /// The arguments that select a noise stream: positions, sequences, keys.
    fn stream(&self) -> [Arg; 3] {
        let positions = Arg::Pointer(self.inputs + self.layout.positions() as u64);
        [positions, Arg::Pointer(self.inputs), Arg::Pointer(self.work.keys.pointer())]
    }

    pub fn states(&self) -> Arg {
        Arg::Pointer(self.work.states.pointer())
    }

    fn logprobs(&self) -> Arg {
        Arg::Pointer(self.columns + self.layout.logprobs() as u64)
    }

    fn counts(&self) -> Arg {
        Arg::Pointer(self.columns + self.layout.counts() as u64)
    }

    pub fn constants(&self) -> &Constants {
        &self.work.signals
    }

    fn lists(&self) -> [u32; 3] {
        [self.work.draws as u32, self.layout.rows as u32, 1]
    }

    unsafe fn softmax(&self) -> Result<()> {
        let [logits, stride, vocab] = self.at_logits();
        let args = [logits, stride, vocab, self.tokens(), self.states(), self.logprobs()];
        // SAFETY: the arguments are the kernel's; the buffers hold this many rows
        unsafe { self.run("noise_softmax", [self.layout.rows as u32, 1, 1], THREADS, 0, &args) }
    }

    unsafe fn replay(&self, slot: &Slot) -> Result<()> {
        let Some(Noise::Replay { tolerance, value_type, condition }) = self.asked.noise else { return Ok(()) };
        let [logits, stride, vocab] = self.at_logits();
        let [positions, sequences, keys] = self.stream();
        let (states, logprobs, counts) = (self.states(), self.logprobs(), self.counts());
        let (target, lead) = (Arg::F64(target(tolerance)), Arg::F64(tolerance.lead()));
        let condition = Arg::U32(u32::from(condition));
        let half = Arg::U32(u32::from(value_type == ValueType::F16));
        let found = Arg::Pointer(self.work.found.pointer());
        let corrections = Arg::Pointer(self.work.corrections.pointer());
        let args = [
            logits,
            stride,
            vocab,
            self.tokens(),
            positions,
            sequences,
            keys,
            states,
            logprobs,
            target,
            lead,
            condition,
            found,
        ];
        // SAFETY: the arguments are the kernels'; the buffers hold this many rows and draws
        unsafe { self.run("noise_candidates", self.lists(), THREADS, 0, &args)? };
        for (low, high) in SEARCHES {
            let args = [
                positions,
                sequences,
                keys,
                self.tokens(),
                logits,
                stride,
                states,
                logprobs,
                found,
                target,
                lead,
                condition,
                half,
                Arg::U32(low),
                Arg::U32(high),
                counts,
                Arg::Pointer(self.columns),
                corrections,
            ];
            // SAFETY: as above
            unsafe { self.run("noise_search", self.lists(), 32, high * CANDIDATE, &args)? };
        }
        // SAFETY: as above
        unsafe { self.pack(slot) }
    }

    /// Packs the lists one after another.
    unsafe fn pack(&self, slot: &Slot) -> Result<()> {
        let corrections = Arg::Pointer(self.work.corrections.pointer());
        let (counts, offsets) = (self.counts(), Arg::Pointer(self.work.offsets.pointer()));
        let (lists, room) = (self.layout.lists as u32, slot.room.min(u32::MAX as usize) as u32);
        let [short_index, half] = [slot.correction.short_index, slot.correction.half].map(|on| Arg::U32(u32::from(on)));
        let out = Arg::Pointer(slot.pairs.device.pointer());
        let gather = [counts, offsets, corrections, Arg::U32(lists), Arg::U32(room), short_index, half, out];
        // SAFETY: the arguments are the kernels'; the buffers hold this many lists
        unsafe {
            self.run("noise_offsets", [1, 1, 1], 1024, 0, &[counts, Arg::U32(lists), offsets])?;
            self.run("noise_gather", [lists.div_ceil(8), 1, 1], 256, 0, &gather)
        }
    }

    unsafe fn dense(&self, out: u64, value_type: ValueType, condition: bool) -> Result<()> {
        let kernel = match value_type {
            ValueType::F16 => "noise_dense_f16",
            ValueType::F32 => "noise_dense_f32",
        };
        let [logits, stride, vocab] = self.at_logits();
        let [positions, sequences, keys] = self.stream();
        let (condition, out) = (Arg::U32(u32::from(condition)), Arg::Pointer(out));
        let args = [
            logits,
            stride,
            vocab,
            self.tokens(),
            positions,
            sequences,
            keys,
            self.states(),
            condition,
            out,
            self.counts(),
        ];
        // SAFETY: the arguments are the kernel's; the buffers hold this many rows and draws
        unsafe { self.run(kernel, self.lists(), THREADS, 0, &args) }
    }

    unsafe fn topk(&self, out: u64, k: usize) -> Result<()> {
        let [logits, stride, vocab] = self.at_logits();
        let values = (self.layout.rows * k * 4) as u64;
        let args =
            [logits, stride, vocab, Arg::U32(k as u32), self.states(), Arg::Pointer(out), Arg::Pointer(out + values)];
        // SAFETY: the arguments are the kernel's; the buffers hold this many rows
        unsafe { self.run("noise_topk", [self.layout.rows as u32, 1, 1], THREADS, 0, &args) }
    }
}
