//! The kernel launches of a slice. All slices share the memory that only launches use, because the stream runs them in
//! order.

use std::sync::Arc;

use stillhouse_noise::{Tolerance, ValueType};

use super::signals::SignalLaunch;
use super::slots::{SliceLayout, Slot};
use super::{DeviceSlice, ExtractRequest, Noise, Positions};
use crate::device::{Arg, Buffer, Device, Event, Launch, Result, Stream, allocated_bytes};

/// Threads of a block, as in kernels/noise/block.cuh.
pub(super) const THREADS: u32 = 512;
/// Bytes of a draw's key, of `RowState`, of `Found`, and of a list's values.
const KEY_BYTES: usize = 8;
const ROW_STATE_BYTES: usize = 24;
const FOUND_BYTES: usize = 24 + 2 * 64 * 8 + 1024 * 12;
const LIST_VALUE_BYTES: usize = 1024 * 8;
/// Bytes of a candidate in the shared memory of the search, and the ranges of list lengths that get a launch each.
///
/// Most lists are short, and a launch for short lists lets more of them run at once.
const CANDIDATE_BYTES: u32 = 4 * 8 + 9 * 4;
const SEARCH_RANGES: [(u32, u32); 3] = [(0, 64), (65, 256), (257, 1024)];

/// Device memory that only the launches use.
#[derive(Debug)]
pub(super) struct Scratch {
    keys: Buffer,
    states: Buffer,
    found: Buffer,
    corrections: Buffer,
    offsets: Buffer,
    signals: Vec<SignalLaunch>,
    draws: usize,
}

/// Values that all launches of a slice use.
pub(super) struct SliceLaunch<'a> {
    pub device: &'a Arc<dyn Device>,
    pub request: &'a ExtractRequest,
    scratch: &'a Scratch,
    pub layout: SliceLayout,
    logits: u64,
    inputs: u64,
    columns: u64,
}

/// The total variation that the encoder aims for: the tolerance less the margin for readers, as in
/// `stillhouse_noise::Tolerance`.
fn target_total_variation(tolerance: Tolerance) -> f64 {
    tolerance.get() * 0.999 - 1e-6
}

impl Scratch {
    /// Bytes of the keys, row states, `Found` records, corrections and their offsets.
    fn sizes(request: &ExtractRequest, max_rows: usize) -> [usize; 5] {
        let replay =
            if matches!(request.noise, Some(Noise::Replay { .. })) { max_rows * request.keys.len() } else { 0 };
        [
            request.keys.len() * KEY_BYTES,
            max_rows * ROW_STATE_BYTES,
            replay * FOUND_BYTES,
            replay * LIST_VALUE_BYTES,
            replay * 4,
        ]
    }

    /// Device bytes, including those of the signals.
    pub fn bytes(request: &ExtractRequest, max_rows: usize) -> u64 {
        let signals = request.signals.kernels(request.vocab);
        let signals = signals.iter().map(|kernel| SignalLaunch::bytes(kernel, max_rows)).sum::<u64>();
        allocated_bytes(&Self::sizes(request, max_rows)) + signals
    }

    pub fn new(device: &Arc<dyn Device>, request: &ExtractRequest, max_rows: usize) -> Result<Self> {
        let [_, states, found, corrections, offsets] = Self::sizes(request, max_rows);
        let keys: Vec<u8> = request.keys.iter().flat_map(|key| key.words()).flat_map(u32::to_ne_bytes).collect();
        Ok(Self {
            keys: Buffer::from_bytes(device, &keys)?,
            states: Buffer::new(device, states)?,
            found: Buffer::new(device, found)?,
            corrections: Buffer::new(device, corrections)?,
            offsets: Buffer::new(device, offsets)?,
            signals: SignalLaunch::all(device, request, max_rows)?,
            draws: if request.noise.is_some() { request.keys.len() } else { 0 },
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
        request: &ExtractRequest,
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
        let slice_launch =
            SliceLaunch { device, request, scratch: self, layout, logits: logits.pointer, inputs, columns };
        device.stream_wait_event(Stream::Extract, logits.ready)?;
        // SAFETY: slot and logits stay valid until the event, as the caller guarantees; `Slot::new` and `Scratch::new`
        // chose the sizes
        unsafe {
            device.copy_to_device(Stream::Extract, inputs, slot.inputs.host.as_ptr(), layout.inputs())?;
            slice_launch.softmax()?;
            match request.noise {
                Some(Noise::Replay { .. }) => {
                    slice_launch.replay(slot)?;
                    slot.corrections.fetch(device, 0..copied * slot.correction_layout.bytes())?;
                }
                Some(Noise::Dense { value_type, condition }) => {
                    slice_launch.dense(slot.dense.device.pointer(), value_type, condition)?;
                    let bytes = layout.lists * request.vocab * super::slots::value_bytes(value_type);
                    slot.dense.fetch(device, 0..bytes)?;
                }
                None => {}
            }
            let k = request.top_count();
            if k > 0 {
                slice_launch.topk(slot.top_tokens.device.pointer(), k)?;
                slot.top_tokens.fetch(device, 0..layout.rows * k * 8)?;
            }
            if !request.signals.is_empty() {
                slice_launch.signals(slot, positions)?;
            }
            slot.columns.fetch(device, 0..layout.columns())?;
        }
        device.record(Stream::Extract)
    }
}

impl SliceLaunch<'_> {
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

    pub fn logits_args(&self) -> [Arg; 3] {
        let vocab = Arg::U32(self.request.vocab as u32);
        [Arg::Pointer(self.logits), Arg::U64(self.request.stride as u64), vocab]
    }

    fn tokens_arg(&self) -> Arg {
        Arg::Pointer(self.inputs + self.layout.tokens() as u64)
    }

    /// The arguments that select a noise stream: positions, sequences, keys.
    fn noise_stream_args(&self) -> [Arg; 3] {
        let positions = Arg::Pointer(self.inputs + self.layout.positions() as u64);
        [positions, Arg::Pointer(self.inputs), Arg::Pointer(self.scratch.keys.pointer())]
    }

    pub fn states_arg(&self) -> Arg {
        Arg::Pointer(self.scratch.states.pointer())
    }

    fn logprobs_arg(&self) -> Arg {
        Arg::Pointer(self.columns + self.layout.logprobs() as u64)
    }

    fn counts_arg(&self) -> Arg {
        Arg::Pointer(self.columns + self.layout.counts() as u64)
    }

    pub fn signal_launches(&self) -> &[SignalLaunch] {
        &self.scratch.signals
    }

    fn list_grid(&self) -> [u32; 3] {
        [self.scratch.draws as u32, self.layout.rows as u32, 1]
    }

    unsafe fn softmax(&self) -> Result<()> {
        let [logits, stride, vocab] = self.logits_args();
        let args = [logits, stride, vocab, self.tokens_arg(), self.states_arg(), self.logprobs_arg()];
        // SAFETY: the arguments are the kernel's; the buffers hold this many rows
        unsafe { self.run("noise_softmax", [self.layout.rows as u32, 1, 1], THREADS, 0, &args) }
    }

    unsafe fn replay(&self, slot: &Slot) -> Result<()> {
        let Some(Noise::Replay { tolerance, value_type, condition }) = self.request.noise else { return Ok(()) };
        let [logits, stride, vocab] = self.logits_args();
        let [positions, sequences, keys] = self.noise_stream_args();
        let (states, logprobs, counts) = (self.states_arg(), self.logprobs_arg(), self.counts_arg());
        let (target, lead) = (Arg::F64(target_total_variation(tolerance)), Arg::F64(tolerance.lead()));
        let condition = Arg::U32(u32::from(condition));
        let half = Arg::U32(u32::from(value_type == ValueType::F16));
        let found = Arg::Pointer(self.scratch.found.pointer());
        let corrections = Arg::Pointer(self.scratch.corrections.pointer());
        let args = [
            logits,
            stride,
            vocab,
            self.tokens_arg(),
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
        unsafe { self.run("noise_candidates", self.list_grid(), THREADS, 0, &args)? };
        for (low, high) in SEARCH_RANGES {
            let args = [
                positions,
                sequences,
                keys,
                self.tokens_arg(),
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
            unsafe { self.run("noise_search", self.list_grid(), 32, high * CANDIDATE_BYTES, &args)? };
        }
        // SAFETY: as above
        unsafe { self.pack(slot) }
    }

    /// Packs the lists one after another.
    unsafe fn pack(&self, slot: &Slot) -> Result<()> {
        let corrections = Arg::Pointer(self.scratch.corrections.pointer());
        let (counts, offsets) = (self.counts_arg(), Arg::Pointer(self.scratch.offsets.pointer()));
        let (lists, capacity) = (self.layout.lists as u32, slot.capacity.min(u32::MAX as usize) as u32);
        let [short_index, half] =
            [slot.correction_layout.short_index, slot.correction_layout.f16_value].map(|on| Arg::U32(u32::from(on)));
        let out = Arg::Pointer(slot.corrections.device.pointer());
        let gather = [counts, offsets, corrections, Arg::U32(lists), Arg::U32(capacity), short_index, half, out];
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
        let [logits, stride, vocab] = self.logits_args();
        let [positions, sequences, keys] = self.noise_stream_args();
        let (condition, out) = (Arg::U32(u32::from(condition)), Arg::Pointer(out));
        let args = [
            logits,
            stride,
            vocab,
            self.tokens_arg(),
            positions,
            sequences,
            keys,
            self.states_arg(),
            condition,
            out,
            self.counts_arg(),
        ];
        // SAFETY: the arguments are the kernel's; the buffers hold this many rows and draws
        unsafe { self.run(kernel, self.list_grid(), THREADS, 0, &args) }
    }

    unsafe fn topk(&self, out: u64, k: usize) -> Result<()> {
        let [logits, stride, vocab] = self.logits_args();
        let values = (self.layout.rows * k * 4) as u64;
        let args = [
            logits,
            stride,
            vocab,
            Arg::U32(k as u32),
            self.states_arg(),
            Arg::Pointer(out),
            Arg::Pointer(out + values),
        ];
        // SAFETY: the arguments are the kernel's; the buffers hold this many rows
        unsafe { self.run("noise_topk", [self.layout.rows as u32, 1, 1], THREADS, 0, &args) }
    }
}
