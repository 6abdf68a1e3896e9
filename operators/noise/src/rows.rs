//! Encodes many rows at once: one teacher slice [n, V] to columns, in parallel and in a fixed order.
//!
//! A row is a predicted position. Rayon's threads encode rows in any order, and the results are collected in row order.
//! So neither results nor errors depend on the number of threads. Scratch: 12·V bytes per thread, kept in a pool.

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use crate::{Correction, DrawKey, Encoder, NoiseError, NoiseStream, Softmax, Tolerance, ValueType};

/// A slice of teacher logits with the observed tokens.
#[derive(Debug, Clone, Copy)]
pub struct LogitRows<'a> {
    /// Logits [n, V].
    pub logits: &'a [f32],
    /// Observed tokens `[n]`.
    pub tokens: &'a [u32],
    /// Positions in the packed sequence `[n]`.
    pub positions: &'a [u32],
    /// Packed sequences `[n]`.
    pub sequence_ids: &'a [u64],
    /// Mask of given or padding positions `[n]`; empty for none. These get ln p_x = 0 and no corrections, and their
    /// logits are not read.
    pub is_given: &'a [bool],
}

/// The columns of n rows and D draws. Lists are row-major: list `row·D + draw`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct EncodedRows {
    /// Number of draws D.
    pub draws: usize,
    /// ln p_x `[n]`.
    pub logprob: Vec<f32>,
    /// Number of corrections per list [n·D].
    pub counts: Vec<u32>,
    /// Index of the first correction of each list, and the end [n·D + 1].
    pub offsets: Vec<usize>,
    /// Vocabulary entries of all corrections, in ascending order within a list; an entry may occur more than once.
    pub indices: Vec<u32>,
    /// Their ln p_k, rounded to the stored type. The exponentials of several values of one entry add up to p_k.
    pub logprobs: Vec<f32>,
    /// Largest total variation of a row and draw; 0 without rows.
    pub max_total_variation: f64,
    /// Mean total variation over the predicted rows and draws; 0 if there are none.
    pub mean_total_variation: f64,
}

impl EncodedRows {
    /// Returns the indices and values of one row and draw.
    #[must_use]
    pub fn corrections(&self, row: usize, draw: usize) -> (&[u32], &[f32]) {
        let list = row * self.draws + draw;
        let range = self.offsets[list]..self.offsets[list + 1];
        (&self.indices[range.clone()], &self.logprobs[range])
    }
}

/// The results of one row, all draws.
#[derive(Default)]
struct EncodedRow {
    logprob: f32,
    counts: Vec<u32>,
    corrections: Vec<Correction>,
    total_variation: Vec<f64>,
}

/// Encodes slices of rows. Threads and calls can share one.
#[derive(Debug)]
pub struct RowEncoder {
    vocab: usize,
    tolerance: Tolerance,
    value_type: ValueType,
    condition: bool,
    pool: Mutex<Vec<Encoder>>,
}

/// An encoder borrowed from the pool; dropping it returns it.
struct BorrowedEncoder<'a> {
    encoder: Option<Encoder>,
    pool: &'a Mutex<Vec<Encoder>>,
}

impl Drop for BorrowedEncoder<'_> {
    fn drop(&mut self) {
        if let Some(encoder) = self.encoder.take() {
            self.pool.lock().unwrap_or_else(PoisonError::into_inner).push(encoder);
        }
    }
}

impl RowEncoder {
    /// Creates an encoder for rows of `vocab` logits.
    ///
    /// # Errors
    /// If `vocab` is 0 or exceeds 2^32, the largest vocabulary that an index type of the format addresses.
    pub fn new(vocab: usize, tolerance: Tolerance, value_type: ValueType) -> Result<Self, NoiseError> {
        let first = Encoder::new(vocab, tolerance, value_type)?;
        Ok(Self { vocab, tolerance, value_type, condition: true, pool: Mutex::new(vec![first]) })
    }

    /// As [`Encoder::with_condition`].
    #[must_use]
    pub fn with_condition(mut self, condition: bool) -> Self {
        self.condition = condition;
        self.pool.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
        self
    }

    fn borrow(&self) -> BorrowedEncoder<'_> {
        let encoder = self.pool.lock().unwrap_or_else(PoisonError::into_inner).pop();
        BorrowedEncoder { encoder, pool: &self.pool }
    }

    /// Encodes n rows under the keys of the draws, on rayon's current thread pool. Calls `per_row` for each row with
    /// its softmax, its logits `[V]` and its number, and returns the results `[n]`. A certain position, whose logits
    /// are not read, gets the default.
    ///
    /// # Errors
    /// Returns the error of the first failing row, or an error if a column has the wrong length.
    pub fn encode_rows<T: Default + Send>(
        &self,
        rows: &LogitRows<'_>,
        keys: &[DrawKey],
        per_row: impl Fn(&Softmax, &[f32], usize) -> T + Sync,
    ) -> Result<(EncodedRows, Vec<T>), NoiseError> {
        let n = rows.tokens.len();
        let lengths = [
            ("logits", rows.logits.len(), n * self.vocab),
            ("positions", rows.positions.len(), n),
            ("sequence ids", rows.sequence_ids.len(), n),
            ("the mask of certain positions", rows.is_given.len(), if rows.is_given.is_empty() { 0 } else { n }),
        ];
        for (what, got, expected) in lengths {
            if got != expected {
                return Err(NoiseError::Length { what, got, expected });
            }
        }
        let results: Vec<Result<(EncodedRow, T), NoiseError>> = (0..n)
            .into_par_iter()
            .map_init(|| self.borrow(), |borrowed, row| self.encode_row(borrowed, rows, row, keys, &per_row))
            .collect();
        collect_columns(results, keys.len())
    }

    fn encode_row<T: Default>(
        &self,
        borrowed: &mut BorrowedEncoder<'_>,
        rows: &LogitRows<'_>,
        row: usize,
        keys: &[DrawKey],
        per_row: impl Fn(&Softmax, &[f32], usize) -> T,
    ) -> Result<(EncodedRow, T), NoiseError> {
        if rows.is_given.get(row).copied().unwrap_or(false) {
            return Ok((EncodedRow { counts: vec![0; keys.len()], ..EncodedRow::default() }, T::default()));
        }
        let encoder = match &mut borrowed.encoder {
            Some(encoder) => encoder,
            empty => {
                let encoder = Encoder::new(self.vocab, self.tolerance, self.value_type)?;
                empty.insert(encoder.with_condition(self.condition))
            }
        };
        let logits = &rows.logits[row * self.vocab..(row + 1) * self.vocab];
        let mut result = EncodedRow::default();
        let stream = |key| NoiseStream::new(key, rows.sequence_ids[row], rows.positions[row]);
        encoder.load(logits, &stream(DrawKey::new(0, 0)))?;
        for &key in keys {
            let before = result.corrections.len();
            let encoded = encoder.encode_loaded(logits, rows.tokens[row], &stream(key), &mut result.corrections)?;
            result.counts.push((result.corrections.len() - before) as u32);
            result.logprob = encoded.logprob;
            result.total_variation.push(encoded.total_variation);
        }
        Ok((result, per_row(encoder.softmax(), logits, row)))
    }
}

fn collect_columns<T>(
    results: Vec<Result<(EncodedRow, T), NoiseError>>,
    draws: usize,
) -> Result<(EncodedRows, Vec<T>), NoiseError> {
    let mut others = Vec::with_capacity(results.len());
    let mut all = EncodedRows { draws, offsets: vec![0], ..EncodedRows::default() };
    let (mut sum, mut measured) = (0.0, 0usize);
    for result in results {
        let (row, other) = result?;
        others.push(other);
        all.logprob.push(row.logprob);
        for &count in &row.counts {
            let end = all.offsets.last().copied().unwrap_or(0) + count as usize;
            all.offsets.push(end);
        }
        all.counts.extend(&row.counts);
        all.indices.extend(row.corrections.iter().map(|c| c.index));
        all.logprobs.extend(row.corrections.iter().map(|c| c.logprob));
        for tv in row.total_variation {
            all.max_total_variation = f64::max(all.max_total_variation, tv);
            sum += tv;
            measured += 1;
        }
    }
    if measured > 0 {
        all.mean_total_variation = sum / measured as f64;
    }
    Ok((all, others))
}
