//! What the extraction asks of a teacher, wherever it runs: hidden states of runs of tokens, and slices of logits that stay where they are made.
//!
//! ```text
//!   runs of tokens ─► hidden ─► rows of it ─► Logits::Host   [n, V] in a Vec    ─► the codec on the CPU
//!                                             Logits::Device [n, V] on a GPU    ─► its kernels; only what they found comes back
//! ```

use std::borrow::Cow;
use std::sync::Arc;

use candle_core::{CpuStorage, Storage, Tensor};
use stillhouse_gpu::extract::DeviceSlice;
use stillhouse_gpu::{Buffer, Device, Event, GpuError, Stream, logits_stride};

use crate::error::{Result, TeacherError};
use crate::{HostTeacher, TeacherInfo};

/// Stretches of tokens that the teacher sees on their own, back to back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs {
    tokens: Vec<u32>,
    /// Where each begins, and where the last one ends.
    offsets: Vec<u32>,
}

impl Runs {
    /// None so far.
    #[must_use]
    pub fn new() -> Self {
        Self { tokens: Vec::new(), offsets: vec![0] }
    }

    /// One more.
    pub fn push(&mut self, tokens: impl IntoIterator<Item = u32>) {
        self.tokens.extend(tokens);
        self.offsets.push(self.tokens.len() as u32);
    }

    /// All tokens.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where each run begins, and where the last one ends.
    #[must_use]
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    /// The runs.
    pub fn iter(&self) -> impl Iterator<Item = &[u32]> {
        self.offsets.windows(2).map(|ends| &self.tokens[ends[0] as usize..ends[1] as usize])
    }
}

/// The hidden states of runs; rows are counted as their tokens are.
#[derive(Debug)]
pub enum Hidden {
    /// `[B·L, H]`, runs padded to the longest one, L tokens.
    Host {
        /// The states.
        states: Tensor,
        /// The row that each token has.
        rows: Vec<u32>,
    },
    /// With the device, until it is asked for others.
    Device,
}

/// A slice of logits `[n, V]`, f32.
#[derive(Debug)]
pub enum Logits {
    /// In memory.
    Host(Vec<f32>),
    /// On a device.
    Device(DeviceLogits),
}

/// A slice of logits on a device.
#[derive(Debug)]
pub struct DeviceLogits {
    device: Arc<dyn Device>,
    buffer: Buffer,
    vocab_size: usize,
    rows: usize,
    ready: Option<Event>,
}

impl DeviceLogits {
    /// Room for so many rows of V logits.
    ///
    /// # Errors
    /// When the device has not so much memory.
    pub fn new(device: &Arc<dyn Device>, rows: usize, vocab_size: usize) -> std::result::Result<Self, GpuError> {
        let buffer = Buffer::new(device, rows * logits_stride(vocab_size) * size_of::<f32>())?;
        Ok(Self { device: Arc::clone(device), buffer, vocab_size, rows: 0, ready: None })
    }

    /// Floats from one row to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        logits_stride(self.vocab_size)
    }

    /// Puts rows of logits of the host here.
    ///
    /// # Errors
    /// When there is no room for so many rows, or the device fails.
    pub fn fill(&mut self, logits: &[f32]) -> std::result::Result<(), GpuError> {
        let rows = logits.len() / self.vocab_size;
        if rows > self.room() {
            let (got, valid) = (rows.to_string(), format!("at most {}", self.room()));
            return Err(GpuError::Input { what: "rows of a slice of logits", got, valid });
        }
        let mut padded = vec![0f32; rows * self.stride()];
        for (to, from) in padded.chunks_exact_mut(self.stride()).zip(logits.chunks_exact(self.vocab_size)) {
            to[..self.vocab_size].copy_from_slice(from);
        }
        let bytes = size_of_val(padded.as_slice());
        // SAFETY: there is room for so many bytes, and the copy is waited for
        unsafe { self.device.copy_in(Stream::Pass, self.buffer.pointer(), padded.as_ptr().cast(), bytes)? };
        let there = self.device.record(Stream::Pass)?;
        self.device.wait(there)?;
        self.filled(rows, there);
        Ok(())
    }

    pub(crate) fn filled(&mut self, rows: usize, ready: Event) {
        (self.rows, self.ready) = (rows, Some(ready));
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Where they are; `None` before anything was put there.
    ///
    /// # Safety
    /// This value lives, and nobody writes to it, until what is made of the slice has come back.
    #[must_use]
    pub unsafe fn slice(&self) -> Option<DeviceSlice> {
        // SAFETY: as the caller says
        self.ready.map(|ready| unsafe { DeviceSlice::new(self.buffer.pointer(), ready) })
    }

    pub(crate) fn pointer(&self) -> u64 {
        self.buffer.pointer()
    }

    /// Rows that it has room for.
    #[must_use]
    pub fn room(&self) -> usize {
        self.buffer.bytes() / (self.stride() * size_of::<f32>())
    }

    /// Lets what follows in [`Stream::Extract`] wait until they are there.
    fn wait(&self) -> std::result::Result<(), GpuError> {
        self.ready.map_or(Ok(()), |ready| self.device.wait_in(Stream::Extract, ready))
    }
}

/// A point that a device comes to.
#[derive(Debug, Clone)]
pub struct Point {
    device: Arc<dyn Device>,
    event: Event,
}

impl Point {
    /// Whether the device has come there.
    ///
    /// # Errors
    /// When it fails.
    pub fn is_there(&self) -> Result<bool> {
        Ok(self.device.is_done(self.event)?)
    }
}

impl Default for Logits {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl Logits {
    /// Waits until they are there, wherever that is.
    ///
    /// # Errors
    /// When the device fails.
    pub fn settle(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(logits) => Ok(logits.ready.map_or(Ok(()), |ready| logits.device.wait(ready))?),
        }
    }

    /// From where on they are there, where that is a device's to know.
    #[must_use]
    pub fn made(&self) -> Option<Point> {
        match self {
            Self::Host(_) => None,
            Self::Device(logits) => logits.ready.map(|event| Point { device: Arc::clone(&logits.device), event }),
        }
    }

    /// All of them in memory, copied where they are not there already: for checks, not for extraction.
    ///
    /// # Errors
    /// When the device fails.
    pub fn on_host(&self) -> Result<Cow<'_, [f32]>> {
        let logits = match self {
            Self::Host(logits) => return Ok(Cow::Borrowed(logits)),
            Self::Device(logits) => logits,
        };
        logits.wait()?;
        let mut padded = vec![0f32; logits.rows * logits.stride()];
        let (device, bytes) = (&logits.device, size_of_val(padded.as_slice()));
        // SAFETY: both are this long, and the copy is waited for
        unsafe { device.copy_out(Stream::Extract, padded.as_mut_ptr().cast(), logits.pointer(), bytes)? };
        device.wait(device.record(Stream::Extract)?)?;
        let rows = padded.chunks_exact(logits.stride());
        Ok(Cow::Owned(rows.flat_map(|row| &row[..logits.vocab_size]).copied().collect()))
    }
}

/// A causal language model that sees whole sequences.
pub trait Teacher: Send + Sync {
    /// What this teacher is.
    fn info(&self) -> &TeacherInfo;

    /// Rows of a slice of logits: as many as make good use of the device.
    fn slice_rows(&self) -> usize;

    /// Tokens of a pass at most, unless a single run has more: what there is room for.
    fn pass_tokens(&self) -> usize {
        usize::MAX
    }

    /// What whoever uses it should know of how it was loaded.
    fn warning(&self) -> Option<&str> {
        None
    }

    /// A buffer for [`Teacher::slice`], to be used again and again.
    ///
    /// # Errors
    /// When the device has not so much memory.
    fn buffer(&self) -> Result<Logits>;

    /// The final, normalised hidden states of runs; that of a token has seen its run up to there and predicts the next one.
    ///
    /// # Errors
    /// When the tokens do not fit the vocabulary or the context, or the device fails.
    fn pass(&self, runs: &Runs) -> Result<Hidden>;

    /// The same, and the hidden states `[tokens, layers, H]` of these layers, as transformers counts `hidden_states`: 0 for the embeddings, k
    /// for what layer k gives, the number of layers for the final, normalised states. That of a token has seen its run up to there.
    ///
    /// # Errors
    /// As [`Teacher::pass`]; when there is no such layer, and on a device that keeps none.
    fn pass_keeping(&self, runs: &Runs, layers: &[usize]) -> Result<(Hidden, Vec<f32>)> {
        if layers.is_empty() {
            return Ok((self.pass(runs)?, Vec::new()));
        }
        let (got, valid) = (self.info().device.clone(), "cpu".into());
        Err(TeacherError::Input { what: "device of a teacher whose hidden states are kept", got, valid })
    }

    /// Logits of tokens of the last [`Teacher::pass`], by their numbers, at most [`Teacher::slice_rows`] of them.
    ///
    /// # Errors
    /// When the buffer is another device's, or the device fails.
    fn slice(&self, hidden: &Hidden, tokens: &[u32], logits: &mut Logits) -> Result<()>;

    /// Slots for sequences of up to so many tokens that go on token by token, and whose hidden states of these layers are wanted, as
    /// [`Teacher::pass_keeping`] counts them.
    ///
    /// # Errors
    /// Where the teacher's device has none, where its positions are not those of [`Teacher::pass`], and when there is no such layer.
    fn decoding(&self, slots: usize, length: usize, layers: &[usize]) -> Result<Box<dyn Decoding + '_>> {
        let _ = (slots, length, layers);
        let (got, valid) = (self.info().device.clone(), "cpu".into());
        Err(TeacherError::Input { what: "device of a teacher that writes", got, valid })
    }
}

/// What a step gives of its slots, in their order.
#[derive(Debug, Default)]
pub struct Stepped {
    /// Logits `[n, V]` after the last token of each.
    pub logits: Vec<f32>,
    /// Its hidden states `[n, layers, H]`, of the layers that the slots were made for.
    pub states: Vec<f32>,
}

/// Sequences in slots, each of which has seen some tokens and is shown more.
///
/// Logits and states are those of [`Teacher::pass_keeping`] over the same tokens to the bit, whatever the other slots do.
pub trait Decoding: Send {
    /// Bytes that the slots take.
    fn bytes(&self) -> usize;

    /// Forgets what a slot has seen.
    fn clear(&mut self, slot: usize);

    /// Shows slots their next tokens, one at least; slots ascend.
    ///
    /// # Errors
    /// When there is no such slot, or no room in one, or a token is not of the vocabulary.
    fn step(&mut self, inputs: &[(usize, &[u32])], out: &mut Stepped) -> Result<()>;
}

/// Logits of one slice on the host: 32 MB in f32.
const SLICE_VALUES: usize = 8 << 20;

/// Rows of a slice on the host.
pub(crate) fn host_slice_rows(vocab_size: usize) -> usize {
    (SLICE_VALUES / vocab_size).clamp(8, 512)
}

/// What a tensor of the host holds, contiguous f32.
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

/// A teacher whose logits are in memory.
pub struct OnHost<T>(pub T);

impl<T: HostTeacher> Teacher for OnHost<T> {
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
            // on the right: causal attention never looks there
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
        let rows: Vec<u32> = tokens.iter().filter_map(|token| rows.get(*token as usize).copied()).collect();
        self.0.logits_into(&select(states, &rows)?, logits)
    }
}

/// Rows of the hidden states; a view where they are neighbours.
fn select(states: &Tensor, rows: &[u32]) -> Result<Tensor> {
    let first = rows.first().copied().unwrap_or(0);
    let neighbours = rows.iter().zip(first..).all(|(row, expected)| *row == expected);
    Ok(if neighbours {
        states.narrow(0, first as usize, rows.len())?
    } else {
        states.index_select(&Tensor::new(rows, states.device())?, 0)?
    })
}
