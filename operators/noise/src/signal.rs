//! Signals: further columns that the extraction computes from the logits of each position, such as their entropy.
//!
//! This module defines the interface. The crate `stillhouse-signals` has the signals.
//!
//! ```text
//!   CPU      LoadedRow ─► Signal::compute ─────────────────────────────────────────────┐
//!   device   SignalKernel ─► launch ─► output of each row ─► Signal::read_kernel_output ─┴─► one Values per column
//! ```

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::kernels::{self, Block};
use crate::philox::BLOCK;
use crate::{NoiseError, Softmax, top_k_of_loaded};

/// Entries of a block of a row, as [`LoadedRow::sums_of_powers`] counts them.
pub const BLOCK_ENTRIES: usize = BLOCK;

/// The values that one column stores for one position.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Of a column of floats.
    F32(Vec<f32>),
    /// Of a column of counts or tokens.
    U32(Vec<u32>),
}

impl Values {
    /// The floats; empty if these are integers.
    #[must_use]
    pub fn f32s(&self) -> &[f32] {
        match self {
            Self::F32(values) => values,
            Self::U32(_) => &[],
        }
    }

    /// The integers; empty if these are floats.
    #[must_use]
    pub fn u32s(&self) -> &[u32] {
        match self {
            Self::U32(values) => values,
            Self::F32(_) => &[],
        }
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::U32(values) => values.len(),
        }
    }

    /// Whether there is no value.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The signals of one row of logits: the values of each signal's columns, signal after signal.
pub type RowSignals = Vec<Values>;

/// A signal: values computed from the logits of one position.
pub trait Signal: Debug + DynPartialEq + Send + Sync {
    /// Checks the signal's settings against the vocabulary size.
    ///
    /// # Errors
    /// Names the first setting that is out of range.
    fn check_vocabulary(&self, vocab: usize) -> Result<(), NoiseError> {
        let _ = vocab;
        Ok(())
    }

    /// Appends the values of each of its columns. The CPU's values define those of every device.
    fn compute(&self, row: &LoadedRow<'_>, columns: &mut RowSignals);

    /// The kernel that computes the signal on a device.
    fn kernel(&self, vocab: usize) -> SignalKernel;

    /// Writes the input of the kernel for one position: [`SignalKernel::input_bytes`] bytes.
    fn write_kernel_input(&self, sequence_id: u64, position: u32, input: &mut [u8]) {
        let _ = (sequence_id, position, input);
    }

    /// Appends the values of each column, from the kernel's output for one row and the row's most likely tokens with
    /// their ln p, at least [`SignalKernel::top_entries`] of them.
    fn read_kernel_output(&self, output: &[u8], top: (&[u32], &[f32]), columns: &mut RowSignals);
}

/// Equality of values whose type is erased. Every type with `PartialEq` has it.
pub trait DynPartialEq {
    /// Whether the other value has the same type and equals this one.
    fn equals(&self, other: &dyn Any) -> bool;

    /// The value as `Any`.
    fn as_any(&self) -> &dyn Any;
}

impl<T: PartialEq + 'static> DynPartialEq for T {
    fn equals(&self, other: &dyn Any) -> bool {
        other.downcast_ref::<T>() == Some(self)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl PartialEq for dyn Signal {
    fn eq(&self, other: &Self) -> bool {
        self.equals(other.as_any())
    }
}

/// A kernel of a signal. The file `operators/gpu/kernels/noise/signals.cuh` states its parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SignalKernel {
    /// Name of the function; `None` if the most likely tokens suffice.
    pub name: Option<&'static str>,
    /// Bytes that are the same for all rows.
    pub constants: Vec<u8>,
    /// A number that is the same for all rows, such as that of the constants.
    pub count: u32,
    /// Bytes of input per row.
    pub input_bytes: usize,
    /// Bytes of scratch memory per row.
    pub scratch_bytes: usize,
    /// Bytes of output per row.
    pub output_bytes: usize,
    /// Number of most likely tokens that the kernel and [`Signal::read_kernel_output`] get.
    pub top_entries: usize,
}

/// The requested signals, in the order of their columns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Signals(Vec<Arc<dyn Signal>>);

impl Signals {
    /// Requests these signals.
    #[must_use]
    pub fn new(signals: Vec<Arc<dyn Signal>>) -> Self {
        Self(signals)
    }

    /// Whether no signal is requested.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The signals.
    pub fn iter(&self) -> impl Iterator<Item = &dyn Signal> {
        self.0.iter().map(AsRef::as_ref)
    }

    /// Checks all settings against the vocabulary size.
    ///
    /// # Errors
    /// As [`Signal::check_vocabulary`].
    pub fn check_vocabulary(&self, vocab: usize) -> Result<(), NoiseError> {
        self.0.iter().try_for_each(|signal| signal.check_vocabulary(vocab))
    }

    /// Computes all signals of a row.
    #[must_use]
    pub fn compute(&self, row: &LoadedRow<'_>) -> RowSignals {
        let mut columns = RowSignals::new();
        self.0.iter().for_each(|signal| signal.compute(row, &mut columns));
        columns
    }

    /// The kernels, in the order of the signals.
    #[must_use]
    pub fn kernels(&self, vocab: usize) -> Vec<SignalKernel> {
        self.0.iter().map(|signal| signal.kernel(vocab)).collect()
    }
}

/// A row of logits `[V]` whose softmax is in memory.
#[derive(Debug, Clone, Copy)]
pub struct LoadedRow<'a> {
    softmax: &'a Softmax,
    logits: &'a [f32],
    /// Id of the sequence.
    pub sequence_id: u64,
    /// Position in the sequence.
    pub position: u32,
}

impl<'a> LoadedRow<'a> {
    /// The row that `softmax` has loaded; `logits` are the same.
    #[must_use]
    pub fn new(softmax: &'a Softmax, logits: &'a [f32], sequence_id: u64, position: u32) -> Self {
        Self { softmax, logits, sequence_id, position }
    }

    /// The logits.
    #[must_use]
    pub fn logits(&self) -> &'a [f32] {
        self.logits
    }

    /// The softmax.
    #[must_use]
    pub fn softmax(&self) -> &'a Softmax {
        self.softmax
    }

    /// ln p of a token; NaN if it is outside the vocabulary.
    #[must_use]
    pub fn logprob(&self, token: u32) -> f64 {
        self.logits.get(token as usize).map_or(f64::NAN, |logit| self.softmax.logprob(*logit))
    }

    /// The k most likely tokens with their ln p, descending, ties by lower token.
    #[must_use]
    pub fn top(&self, k: usize) -> Vec<(u32, f32)> {
        top_k_of_loaded(self.softmax, self.logits, k)
    }

    /// Σ exp((l − max l)·factor) of each block of [`BLOCK_ENTRIES`]. Terms below e^−60 count as 0; they are at most
    /// 1e-26 of the largest. Cost: an exponential per entry.
    #[must_use]
    pub fn sums_of_powers(&self, factor: f32) -> Vec<f64> {
        let mut powers = Block::ZERO;
        self.logits.chunks(BLOCK).map(|logits| self.powers(logits, factor, &mut powers)).collect()
    }

    /// Writes exp((l − max l)·factor) of the entries of one block, and 0 after the last one; returns their sum.
    pub fn powers_of_block(&self, block: usize, factor: f32, powers: &mut [f32; BLOCK_ENTRIES]) -> f64 {
        let mut aligned = Block::ZERO;
        let (first, end) = (block * BLOCK, ((block + 1) * BLOCK).min(self.logits.len()));
        let sum = self.powers(&self.logits[first..end], factor, &mut aligned);
        *powers = aligned.0;
        sum
    }

    fn powers(&self, logits: &[f32], factor: f32, powers: &mut Block) -> f64 {
        kernels::block_of_powers(self.softmax.level(), logits, self.softmax.max(), factor, powers)
    }

    /// Σ u·(max l − l) with u = exp(l − max l). Cost: a product per entry.
    #[must_use]
    pub fn sum_of_distances(&self) -> f64 {
        let mut scratch = Block::ZERO;
        let blocks = self.logits.chunks(BLOCK).zip(self.softmax.unnormalised());
        let (level, max) = (self.softmax.level(), self.softmax.max());
        blocks.map(|(logits, u)| kernels::block_of_distances(level, u, logits, max, &mut scratch)).sum()
    }

    /// Σ u over all entries but those in `tokens`, which ascend. Summed on its own, because 1 − Σ p would lose a rest
    /// of 1e-9. Cost: a sum per entry.
    #[must_use]
    pub fn sum_without(&self, tokens: &[usize]) -> f64 {
        let mut tokens = tokens.iter().peekable();
        let block_sum = |(b, u): (usize, &Block)| {
            let mut rest = None;
            while let Some(&&token) = tokens.peek()
                && token / BLOCK == b
            {
                rest.get_or_insert(*u).0[token % BLOCK] = 0.0;
                tokens.next();
            }
            kernels::block_sum(self.softmax.level(), rest.as_ref().unwrap_or(u))
        };
        self.softmax.unnormalised().iter().enumerate().map(block_sum).sum()
    }
}
