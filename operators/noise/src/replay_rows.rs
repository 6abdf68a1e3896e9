//! Decodes the noise of many tokens at once from the columns of a batch, for trainers.
//!
//! ```text
//! columns of B sequences, L positions each             requested: n tokens
//!   sequence_id [B]   input_ids, logprob [B, L]    ─►  checked, then written by rayon's threads in any order:  [n, V]
//!   noise_count [B, D, L], corrections [*]             Philox ─► E ─► softmax | Gumbel | Gaussian | uniform
//! ```
//!
//! The columns are borrowed in their stored types. The decoder looks up the corrections of the requested tokens only.
//! Memory beyond the output: 16 bytes per requested token, and 4·V bytes per thread for softmax.

use half::f16;
use rayon::prelude::*;

use crate::{Correction, DenseRow, DrawKey, Element, NoiseError, NoiseStream, Output, RowWriter, StoredToken};

/// Integers in their stored type.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // the variant names are the types
pub enum IntegerColumn<'a> {
    U8(&'a [u8]),
    U16(&'a [u16]),
    U32(&'a [u32]),
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl IntegerColumn<'_> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::U8(v) => v.len(),
            Self::U16(v) => v.len(),
            Self::U32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::I64(v) => v.len(),
        }
    }

    /// Whether the slice is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn get(&self, i: usize) -> i64 {
        match self {
            Self::U8(v) => i64::from(v[i]),
            Self::U16(v) => i64::from(v[i]),
            Self::U32(v) => i64::from(v[i]),
            Self::I32(v) => i64::from(v[i]),
            Self::I64(v) => v[i],
        }
    }

    fn sum(&self, range: std::ops::Range<usize>) -> i64 {
        match self {
            Self::U8(v) => v[range].iter().map(|&v| i64::from(v)).sum(),
            Self::U16(v) => v[range].iter().map(|&v| i64::from(v)).sum(),
            Self::U32(v) => v[range].iter().map(|&v| i64::from(v)).sum(),
            Self::I32(v) => v[range].iter().map(|&v| i64::from(v)).sum(),
            Self::I64(v) => v[range].iter().fold(0, |a, &b| a.saturating_add(b)),
        }
    }
}

/// Floating-point numbers in their stored type.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // the variant names are the types
pub enum FloatColumn<'a> {
    F16(&'a [f16]),
    F32(&'a [f32]),
}

impl<'a> FloatColumn<'a> {
    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F16(v) => v.len(),
            Self::F32(v) => v.len(),
        }
    }

    /// Whether the slice is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn get(&self, i: usize) -> f32 {
        match self {
            Self::F16(v) => v[i].to_f32(),
            Self::F32(v) => v[i],
        }
    }

    fn row(&self, first: usize, len: usize) -> DenseRow<'a> {
        match self {
            Self::F16(v) => DenseRow::F16(&v[first..first + len]),
            Self::F32(v) => DenseRow::F32(&v[first..first + len]),
        }
    }
}

/// Stored noise of a batch, by codec.
#[derive(Debug, Clone, Copy)]
pub enum StoredNoise<'a> {
    /// Codec `replay`.
    Replay {
        /// `noise_seed` of the data set.
        seed: u64,
        /// `sequence_id` `[B]`.
        sequence_ids: &'a [u64],
        /// `input_ids` [B, L].
        tokens: &'a [i32],
        /// `logprob` [B, L].
        logprobs: &'a [f32],
        /// `noise_count` [B, D, L].
        counts: IntegerColumn<'a>,
        /// Index of the first correction of each sequence, and the end [B + 1].
        offsets: &'a [i64],
        /// `noise_index` of all sequences, concatenated.
        indices: IntegerColumn<'a>,
        /// `noise_logprob` of all sequences, concatenated.
        values: FloatColumn<'a>,
    },
    /// Codec `dense`: `noise` [B, D, L, V].
    Dense(FloatColumn<'a>),
}

/// The noise columns of B sequences.
#[derive(Debug, Clone, Copy)]
pub struct StoredColumns<'a> {
    /// Number of sequences B.
    pub rows: usize,
    /// Number of draws D.
    pub draws: usize,
    /// Positions per sequence L.
    pub length: usize,
    /// Vocabulary size V.
    pub vocab: usize,
    /// The columns.
    pub noise: StoredNoise<'a>,
}

/// The requested tokens, in the order of the output.
#[derive(Debug, Clone, Copy)]
pub enum RequestedTokens<'a> {
    /// All B·L tokens.
    All,
    /// Tokens by number row·L + position.
    Indices(&'a [i64]),
}

fn check_length(what: &'static str, got: usize, expected: usize) -> Result<(), NoiseError> {
    if got == expected { Ok(()) } else { Err(NoiseError::Length { what, got, expected }) }
}

impl StoredColumns<'_> {
    fn check(&self, draw: usize) -> Result<(), NoiseError> {
        if self.vocab == 0 || self.vocab as u64 > 1 << 32 {
            return Err(NoiseError::Vocabulary { vocab: self.vocab });
        }
        if draw >= self.draws {
            return Err(NoiseError::Range { what: "draw", got: draw as i64, last: self.draws as i64 - 1 });
        }
        let tokens = self.rows * self.length;
        match self.noise {
            StoredNoise::Dense(noise) => check_length("noise", noise.len(), tokens * self.draws * self.vocab),
            StoredNoise::Replay { sequence_ids, tokens: ids, logprobs, counts, offsets, indices, values, .. } => {
                check_length("sequence_id", sequence_ids.len(), self.rows)?;
                check_length("input_ids", ids.len(), tokens)?;
                check_length("logprob", logprobs.len(), tokens)?;
                check_length("noise_count", counts.len(), tokens * self.draws)?;
                check_length("the offsets of noise_index", offsets.len(), self.rows + 1)?;
                check_length("noise_logprob", values.len(), indices.len())?;
                for (row, pair) in offsets.windows(2).enumerate() {
                    let is_valid = pair[0] >= 0 && pair[1] >= pair[0] && pair[1] <= indices.len() as i64;
                    let row_counts = row * self.draws * self.length..(row + 1) * self.draws * self.length;
                    let (counted, stored) = (counts.sum(row_counts), pair[1] - pair[0]);
                    if !is_valid || counted != stored {
                        return Err(NoiseError::Counts { row, counted, stored });
                    }
                }
                Ok(())
            }
        }
    }

    /// Returns the index range of the corrections of every requested token, for codec `replay`.
    fn correction_ranges(
        &self,
        draw: usize,
        requested: RequestedTokens<'_>,
        n: usize,
    ) -> Result<Vec<(u64, u64)>, NoiseError> {
        let StoredNoise::Replay { counts, offsets, .. } = self.noise else { return Ok(Vec::new()) };
        let mut ranges = Vec::with_capacity(n);
        // Requested tokens mostly ascend within a row, so the running sum continues from the token before.
        let (mut row, mut at, mut begin) = (usize::MAX, 0, 0);
        for i in 0..n {
            let (r, position) = self.token(requested, i);
            let before = (r * self.draws + draw) * self.length;
            if r != row || position < at {
                (row, at) = (r, 0);
                begin = offsets[r] + counts.sum(r * self.draws * self.length..before);
            }
            begin += counts.sum(before + at..before + position);
            at = position;
            let end = begin + counts.get(before + position);
            // Checks for negative counts, which could point outside the row. Non-negative counts cannot: their sums
            // match the offsets.
            if begin < offsets[r] || end < begin || end > offsets[r + 1] {
                return Err(NoiseError::Counts {
                    row: r,
                    counted: end - offsets[r],
                    stored: offsets[r + 1] - offsets[r],
                });
            }
            ranges.push((begin as u64, end as u64));
        }
        Ok(ranges)
    }

    /// Row and position of requested token i.
    fn token(&self, requested: RequestedTokens<'_>, i: usize) -> (usize, usize) {
        let flat = match requested {
            RequestedTokens::All => i,
            RequestedTokens::Indices(flat) => flat[i] as usize,
        };
        (flat / self.length, flat % self.length)
    }

    /// Writes one requested token.
    fn write<T: Element>(
        &self,
        writer: &mut RowWriter,
        corrections: &mut Vec<Correction>,
        draw: usize,
        (row, position): (usize, usize),
        range: Option<(u64, u64)>,
        out: &mut [T],
    ) -> Result<(), NoiseError> {
        let at = row * self.length + position;
        match self.noise {
            StoredNoise::Dense(noise) => {
                let first = ((row * self.draws + draw) * self.length + position) * self.vocab;
                writer.dense(noise.row(first, self.vocab), out)
            }
            StoredNoise::Replay { seed, sequence_ids, tokens, logprobs, indices, values, .. } => {
                let stream = NoiseStream::new(DrawKey::new(seed, draw as u32), sequence_ids[row], position as u32);
                let (begin, end) = range.unwrap_or_default();
                corrections.clear();
                corrections.extend((begin as usize..end as usize).map(|i| Correction {
                    index: u32::try_from(indices.get(i)).unwrap_or(u32::MAX), // `replay` reports it as an error
                    logprob: values.get(i),
                }));
                let token = tokens[at] as u32; // a negative token exceeds every vocabulary
                writer.replay(&StoredToken { token, logprob: logprobs[at], corrections }, &stream, out)
            }
        }
    }
}

/// Writes every row of `out` with `write`, one scratch per task. Of several errors, returns that of the first row.
fn write_rows<T: Element, S>(
    vocab: usize,
    out: &mut [T],
    scratch: impl Fn() -> S + Sync,
    write: impl Fn(&mut S, usize, &mut [T]) -> Result<(), NoiseError> + Sync,
) -> Result<(), NoiseError> {
    // Uses the caller's pool or this thread. Otherwise rayon would start its global pool, which does not survive a
    // fork.
    let threads = rayon::current_thread_index().map_or(1, |_| rayon::current_num_threads());
    // Enough rows per task that scratch is allocated rarely, and few enough that all threads have work.
    let rows_per_task = (out.len() / vocab / (8 * threads)).clamp(1, 64);
    let task = |(t, rows): (usize, &mut [T])| {
        let mut scratch = scratch();
        let rows = rows.chunks_exact_mut(vocab).enumerate();
        rows.map(|(i, row)| (t * rows_per_task + i, row))
            .try_for_each(|(i, row)| write(&mut scratch, i, row).map_err(|e| (i, e)))
    };
    let first_error = if threads == 1 {
        out.chunks_mut(vocab * rows_per_task).enumerate().find_map(|chunk| task(chunk).err())
    } else {
        let chunks = out.par_chunks_mut(vocab * rows_per_task).enumerate();
        chunks.filter_map(|chunk| task(chunk).err()).min_by_key(|(i, _)| *i)
    };
    first_error.map_or(Ok(()), |(_, error)| Err(error))
}

/// Writes the noise of the requested tokens under one draw to `out` [n, V].
///
/// Inside a rayon pool it uses that pool's threads. Outside it stays on the calling thread.
///
/// # Errors
/// If columns do not match each other, a token or correction is outside the vocabulary, or a requested draw or token
/// does not exist.
pub fn replay_rows<T: Element>(
    columns: &StoredColumns<'_>,
    draw: usize,
    requested: RequestedTokens<'_>,
    output: Output,
    out: &mut [T],
) -> Result<(), NoiseError> {
    columns.check(draw)?;
    let tokens = columns.rows * columns.length;
    let n = match requested {
        RequestedTokens::All => tokens,
        RequestedTokens::Indices(flat) => {
            if let Some(&got) = flat.iter().find(|&&i| i < 0 || i >= tokens as i64) {
                return Err(NoiseError::Range { what: "token", got, last: tokens as i64 - 1 });
            }
            flat.len()
        }
    };
    check_length("the output", out.len(), n * columns.vocab)?;
    let ranges = columns.correction_ranges(draw, requested, n)?;
    write_rows(
        columns.vocab,
        out,
        || (RowWriter::new(columns.vocab, output), Vec::new()),
        |(writer, corrections), i, out| {
            columns.write(writer, corrections, draw, columns.token(requested, i), ranges.get(i).copied(), out)
        },
    )
}

/// Writes prior noise ξ_k = −ln e_k of (sequence, position) pairs under one draw to `out` [n, V]. Teacher-generated
/// text was sampled with it, and a student gets it at inference.
///
/// Threads as in [`replay_rows`].
///
/// # Errors
/// If lengths do not match, or a position exceeds 32 bits.
pub fn prior_rows<T: Element>(
    key: DrawKey,
    vocab: usize,
    sequence_ids: &[u64],
    positions: &[i64],
    output: Output,
    out: &mut [T],
) -> Result<(), NoiseError> {
    if vocab == 0 || vocab as u64 > 1 << 32 {
        return Err(NoiseError::Vocabulary { vocab });
    }
    check_length("sequence_id", sequence_ids.len(), positions.len())?;
    check_length("the output", out.len(), positions.len() * vocab)?;
    if let Some(&got) = positions.iter().find(|&&p| u32::try_from(p).is_err()) {
        return Err(NoiseError::Range { what: "position", got, last: i64::from(u32::MAX) });
    }
    write_rows(
        vocab,
        out,
        || RowWriter::new(vocab, output),
        |writer, i, out| writer.prior(&NoiseStream::new(key, sequence_ids[i], positions[i] as u32), out),
    )
}
