//! The interface between the extraction and a teacher on any device: hidden states of runs of tokens, and slices of
//! logits that stay in the teacher's memory.
//!
//! ```text
//!   runs of tokens ─► hidden ─► rows of it ─► Logits::Host   [n, V] in a Vec    ─► the codec on the CPU
//!                                             Logits::Device [n, V] on a GPU    ─► its kernels; only their results are copied back
//! ```

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{CpuStorage, Storage, Tensor};
use stillhouse_gpu::extract::DeviceSlice;
use stillhouse_gpu::{Buffer, Device, Event, GpuError, Stream, logits_stride};

use crate::error::{Result, TeacherError};
use crate::{HostTeacher, TeacherInfo};

/// Runs of tokens, stored back to back. A token attends only to tokens of its own run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs {
    tokens: Vec<u32>,
    /// The first token of each run, and the end of the last run.
    offsets: Vec<u32>,
}

impl Runs {
    /// Creates an empty list of runs.
    #[must_use]
    pub fn new() -> Self {
        Self { tokens: Vec::new(), offsets: vec![0] }
    }

    /// Appends a run.
    pub fn push(&mut self, tokens: impl IntoIterator<Item = u32>) {
        self.tokens.extend(tokens);
        self.offsets.push(self.tokens.len() as u32);
    }

    /// All tokens, in order.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The first token of each run, and the end of the last run.
    #[must_use]
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// Iterates over the runs.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.offsets.windows(2).map(|ends| &self.tokens[ends[0] as usize..ends[1] as usize])
    }
}

/// The hidden states of a pass. Rows are numbered by token.
#[derive(Debug)]
pub enum Hidden {
    /// States in memory, as a matrix of rows of H floats that may include padding.
    Host {
        /// The states, one row per token or padding.
        states: Tensor,
        /// The row of each token.
        rows: Vec<u32>,
    },
    /// States that the device holds until its next pass.
    Device,
}

/// A slice of f32 logits `[n, V]`.
#[derive(Debug)]
pub enum Logits {
    /// Logits in host memory.
    Host(Vec<f32>),
    /// Logits in device memory.
    Device(DeviceLogits),
}

/// A slice of logits in device memory.
#[derive(Debug)]
pub struct DeviceLogits {
    device: Arc<dyn Device>,
    buffer: Buffer,
    vocab_size: usize,
    rows: usize,
    ready: Option<Event>,
}

impl DeviceLogits {
    /// Allocates device memory for `rows` rows of V logits.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &Arc<dyn Device>, rows: usize, vocab_size: usize) -> std::result::Result<Self, GpuError> {
        let buffer = Buffer::new(device, rows * logits_stride(vocab_size) * size_of::<f32>())?;
        Ok(Self { device: Arc::clone(device), buffer, vocab_size, rows: 0, ready: None })
    }

    /// Floats from one row to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        logits_stride(self.vocab_size)
    }

    /// Copies rows of logits from the host into this slice.
    ///
    /// # Errors
    /// If there are more rows than the slice can hold, or the device fails.
    pub fn fill(&mut self, logits: &[f32]) -> std::result::Result<(), GpuError> {
        let rows = logits.len() / self.vocab_size;
        if rows > self.capacity_rows() {
            let (got, valid) = (rows.to_string(), format!("at most {}", self.capacity_rows()));
            return Err(GpuError::Input { what: "rows of a slice of logits", got, valid });
        }
        let mut padded = vec![0f32; rows * self.stride()];
        for (to, from) in padded.chunks_exact_mut(self.stride()).zip(logits.chunks_exact(self.vocab_size)) {
            to[..self.vocab_size].copy_from_slice(from);
        }
        let bytes = size_of_val(padded.as_slice());
        // SAFETY: the buffer has at least `bytes` bytes, and the copy is waited for
        unsafe { self.device.copy_to_device(Stream::Pass, self.buffer.pointer(), padded.as_ptr().cast(), bytes)? };
        let copied = self.device.record(Stream::Pass)?;
        self.device.wait(copied)?;
        self.set_rows(rows, copied);
        Ok(())
    }

    pub(crate) fn set_rows(&mut self, rows: usize, ready: Event) {
        (self.rows, self.ready) = (rows, Some(ready));
    }

    /// The device that holds the logits.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the slice for extraction, or `None` before anything was written to it.
    ///
    /// # Safety
    /// This value must stay alive, and nothing may write to it, until the results of the extraction were copied back.
    #[must_use]
    pub unsafe fn slice(&self) -> Option<DeviceSlice> {
        // SAFETY: the caller's contract
        self.ready.map(|ready| unsafe { DeviceSlice::new(self.buffer.pointer(), ready) })
    }

    pub(crate) fn pointer(&self) -> u64 {
        self.buffer.pointer()
    }

    /// Number of rows that the slice can hold.
    #[must_use]
    pub fn capacity_rows(&self) -> usize {
        self.buffer.bytes() / (self.stride() * size_of::<f32>())
    }

    /// Makes later work in [`Stream::Extract`] wait for these logits.
    fn wait_before_extract(&self) -> std::result::Result<(), GpuError> {
        self.ready.map_or(Ok(()), |ready| self.device.stream_wait_event(Stream::Extract, ready))
    }
}

/// An event in a device's queue of work.
#[derive(Debug, Clone)]
pub struct DeviceEvent {
    device: Arc<dyn Device>,
    event: Event,
}

impl DeviceEvent {
    /// Returns whether the device has reached the event.
    ///
    /// # Errors
    /// If the device fails.
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.device.is_done(self.event)?)
    }
}

impl Default for Logits {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl Logits {
    /// Waits until the logits are computed, on whatever device they are.
    ///
    /// # Errors
    /// If the device fails.
    pub fn wait(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(logits) => Ok(logits.ready.map_or(Ok(()), |ready| logits.device.wait(ready))?),
        }
    }

    /// Returns the event after which the logits are computed; `None` for logits in host memory.
    #[must_use]
    pub fn ready_event(&self) -> Option<DeviceEvent> {
        match self {
            Self::Host(_) => None,
            Self::Device(logits) => logits.ready.map(|event| DeviceEvent { device: Arc::clone(&logits.device), event }),
        }
    }

    /// Returns all logits in host memory, copied from the device if necessary. Meant for checks, not for extraction.
    ///
    /// # Errors
    /// If the device fails.
    pub fn on_host(&self) -> Result<Cow<'_, [f32]>> {
        let logits = match self {
            Self::Host(logits) => return Ok(Cow::Borrowed(logits)),
            Self::Device(logits) => logits,
        };
        logits.wait_before_extract()?;
        let mut padded = vec![0f32; logits.rows * logits.stride()];
        let (device, bytes) = (&logits.device, size_of_val(padded.as_slice()));
        // SAFETY: both sides are `bytes` long, and the copy is waited for
        unsafe { device.copy_to_host(Stream::Extract, padded.as_mut_ptr().cast(), logits.pointer(), bytes)? };
        device.wait(device.record(Stream::Extract)?)?;
        let rows = padded.chunks_exact(logits.stride());
        Ok(Cow::Owned(rows.flat_map(|row| &row[..logits.vocab_size]).copied().collect()))
    }
}

/// A causal language model that processes whole sequences.
pub trait Teacher: Send + Sync {
    /// Properties of this teacher.
    fn info(&self) -> &TeacherInfo;

    /// Number of rows in a slice of logits: enough to use the device efficiently.
    fn slice_rows(&self) -> usize;

    /// Maximum number of tokens in a pass, as memory allows. A single run may have more.
    fn pass_tokens(&self) -> usize {
        usize::MAX
    }

    /// A warning about how the teacher was loaded, for the user.
    fn warning(&self) -> Option<&str> {
        None
    }

    /// Creates a buffer for [`Teacher::slice`], to be reused for all slices.
    ///
    /// # Errors
    /// If the device is out of memory.
    fn buffer(&self) -> Result<Logits>;

    /// Returns the final, normalised hidden states of runs. A token's state has seen its run up to that token and
    /// predicts the next one.
    ///
    /// # Errors
    /// If the tokens do not match the vocabulary or the context, or the device fails.
    fn pass(&self, runs: &Runs) -> Result<Hidden>;

    /// Like [`Teacher::pass`], and also returns the hidden states `[tokens, layers, H]` of `layers`. Layers are
    /// numbered like `hidden_states` in transformers: 0 is the embeddings, k the output of layer k, and the number of
    /// layers the final, normalised states. A token's state has seen its run up to that token.
    ///
    /// # Errors
    /// As [`Teacher::pass`]; also if a layer does not exist, or the device does not support this.
    fn pass_with_states(&self, runs: &Runs, layers: &[usize]) -> Result<(Hidden, Vec<f32>)> {
        if layers.is_empty() {
            return Ok((self.pass(runs)?, Vec::new()));
        }
        let (got, valid) = (self.info().device.clone(), "cpu".into());
        Err(TeacherError::Input { what: "device of a teacher whose hidden states are kept", got, valid })
    }

    /// Computes logits of tokens of the last [`Teacher::pass`], given by index; at most [`Teacher::slice_rows`] of
    /// them.
    ///
    /// # Errors
    /// If the buffer belongs to another device, or the device fails.
    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()>;

    /// Creates slots for decoding sequences of up to `length` tokens each. Steps also return the hidden states of
    /// `layers`, numbered as in [`Teacher::pass_with_states`].
    ///
    /// # Errors
    /// If the device does not support decoding, if positions at this length are rotated differently than in
    /// [`Teacher::pass`], or if a layer does not exist.
    fn decoding(&self, slots: usize, length: usize, layers: &[usize]) -> Result<Box<dyn Decoding + '_>> {
        let _ = (slots, length, layers);
        let (got, valid) = (self.info().device.clone(), "cpu".into());
        Err(TeacherError::Input { what: "device of a teacher that writes", got, valid })
    }
}

/// The result of a decoding step, one entry per slot in the order of the inputs.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Logits `[n, V]` after the last token of each slot.
    pub logits: Vec<f32>,
    /// Hidden states `[n, layers, H]` of that token, for the layers that the slots were created with.
    pub states: Vec<f32>,
}

/// Slots of sequences that are decoded incrementally.
///
/// Logits and states are bit-identical to those of [`Teacher::pass_with_states`] over the same tokens, whatever the
/// other slots do.
pub trait Decoding: Send {
    /// Bytes that the slots occupy.
    fn bytes(&self) -> usize;

    /// Removes all tokens of a slot.
    fn clear(&mut self, slot: usize);

    /// Feeds slots their next tokens, at least one each. Slots must be in ascending order.
    ///
    /// # Errors
    /// If a slot does not exist or is full, or a token is not in the vocabulary.
    fn step(&mut self, inputs: &[(usize, &[u32])], out: &mut StepOutput) -> Result<()>;
}

/// Number of logits in a slice on the host: 32 MB in f32.
const SLICE_VALUES: usize = 8 << 20;

/// Number of rows in a slice on the host.
pub(crate) fn host_slice_rows(vocab_size: usize) -> usize {
    (SLICE_VALUES / vocab_size).clamp(8, 512)
}

/// Passes the floats of a contiguous f32 tensor in host memory to `read`.
pub(crate) fn floats<T>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) => read(&data[start..end]),
        _ => {
            let (got, valid) = (format!("{layout:?}"), "contiguous f32 in memory".into());
            Err(TeacherError::Input { what: "hidden states", got, valid })
        }
    }
}

/// Adapts a [`HostTeacher`] to a [`Teacher`] with logits in host memory.
pub struct HostTeacherAdapter<T>(pub T);

impl<T: HostTeacher> Teacher for HostTeacherAdapter<T> {
    fn info(&self) -> &TeacherInfo {
        self.0.info()
    }

    fn slice_rows(&self) -> usize {
        host_slice_rows(self.info().vocab_size)
    }

    fn buffer(&self) -> Result<Logits> {
        Ok(Logits::Host(Vec::new()))
    }

    fn pass(&self, runs: &Runs) -> Result<Hidden> {
        let length = runs.iter().map(<[u32]>::len).max().unwrap_or(0);
        let (mut padded, mut rows, mut batch) = (Vec::new(), Vec::with_capacity(runs.tokens().len()), 0);
        for run in runs.iter() {
            rows.extend((0..run.len()).map(|i| (batch * length + i) as u32));
            padded.extend_from_slice(run);
            batch += 1;
            // Pads on the right, where causal attention never looks.
            padded.resize(batch * length, run.first().copied().unwrap_or(0));
        }
        let states = self.0.hidden(&padded, batch, length)?.flatten(0, 1)?;
        Ok(Hidden::Host { states, rows })
    }

    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()> {
        let (Hidden::Host { states, rows }, Logits::Host(logits)) = (hidden, logits) else {
            let (got, valid) = ("those of a device".into(), "those of this teacher".into());
            return Err(TeacherError::Input { what: "hidden states or logits", got, valid });
        };
        check_slice(tokens, rows.len())?;
        let rows: Vec<u32> = tokens.iter().map(|token| rows[*token as usize]).collect();
        self.0.logits_into(&select(states, &rows)?, logits)
    }
}

/// Checks that the tokens of a slice are below `count`, the number of tokens of the pass.
pub(crate) fn check_slice(tokens: &[u32], count: usize) -> Result<()> {
    let Some(token) = tokens.iter().find(|token| **token as usize >= count) else { return Ok(()) };
    let (got, valid) = (token.to_string(), format!("below {count}, the tokens of the pass"));
    Err(TeacherError::Input { what: "token of a slice", got, valid })
}

/// Selects rows of the hidden states; returns a view if the rows are consecutive.
fn select(states: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let first = rows.first().copied().unwrap_or(0);
    let consecutive = rows.iter().zip(first..).all(|(row, expected)| *row == expected);
    Ok(if consecutive {
        states.narrow(0, first as usize, rows.len())?
    } else {
        states.index_select(&Tensor::new(rows, states.device())?, 0)?
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Precision;
    use crate::cpu::CpuTeacher;

    /// Tokens outside the pass are an error, so a slice always has one row per token.
    #[test]
    fn a_slice_of_tokens_outside_the_pass_is_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/llama-gqa");
        let load = || CpuTeacher::load(&path, Precision::F32, &[]).unwrap();
        let teachers: [Box<dyn Teacher>; 2] = [Box::new(load()), Box::new(HostTeacherAdapter(load()))];
        let mut runs = Runs::new();
        runs.push([3, 1, 4]);
        runs.push([1, 5]);
        for teacher in teachers {
            let (hidden, mut logits) = (teacher.pass(&runs).unwrap(), teacher.buffer().unwrap());
            teacher.slice(&hidden, &[4, 0, 2], &mut logits).unwrap();
            assert_eq!(logits.on_host().unwrap().len(), 3 * teacher.info().vocab_size);
            let error = teacher.slice(&hidden, &[0, 5], &mut logits).unwrap_err().to_string();
            assert_eq!(error, "token of a slice: got 5, valid: below 5, the tokens of the pass");
        }
    }
}
