//! The extraction from slices of a teacher's logits: the trait that every device implements, and its CPU
//! implementation.
//!
//! ```text
//!   logits [n, V] ─► Extract ─► ln p_x [n] · corrections or dense noise [n, D, …] · signals
//! ```
//!
//! Rows are independent. The CPU distributes them over rayon's threads and collects the results in row order, so no
//! result depends on the number of threads.

use rayon::prelude::*;

use crate::{
    DrawKey, EncodedRows, LoadedRow, LogitRows, NoiseError, NoiseStream, RowEncoder, RowSignals, Signals, Softmax,
    Tolerance, ValueType, dense_noise_of_loaded, round_dense,
};

/// The columns requested of every row.
#[derive(Debug, Clone, PartialEq)]
pub struct ExtractionSpec {
    /// Vocabulary size V.
    pub vocab: usize,
    /// Keys of the D draws.
    pub keys: Vec<DrawKey>,
    /// Form of the noise; `None` for no noise.
    pub noise: Option<NoiseForm>,
    /// Requested signals.
    pub signals: Signals,
}

/// Form of the extracted noise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum NoiseForm {
    /// Corrections of the codec `replay`.
    Replay {
        /// Largest total variation of the noise of a token.
        tolerance: Tolerance,
        /// Type of the stored values.
        value_type: ValueType,
        /// Whether the observed token must win in l + ξ with the stored values.
        condition: bool,
    },
    /// Dense ξ.
    Dense {
        /// Type of the stored values.
        value_type: ValueType,
        /// Whether the observed token must win in l + ξ with the stored values.
        condition: bool,
    },
}

/// The observed tokens of the rows.
#[derive(Debug, Clone, Copy)]
pub struct ObservedTokens<'a> {
    /// Tokens `[n]`.
    pub tokens: &'a [u32],
    /// Positions in the packed sequence `[n]`.
    pub positions: &'a [u32],
    /// Packed sequences `[n]`.
    pub sequence_ids: &'a [u64],
}

/// The columns extracted from n rows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ExtractedColumns {
    /// ln p_x `[n]`.
    pub logprob: Vec<f32>,
    /// Corrections, if requested.
    pub replay: Option<EncodedRows>,
    /// ξ `[n, D, V]` in values of the stored type, if requested.
    pub dense: Option<Vec<f32>>,
    /// Signals `[n]`; empty if none is requested.
    pub signals: Vec<RowSignals>,
    /// Number of rows and draws that the device left to the CPU.
    pub fallbacks: u64,
}

/// Extracts columns from slices of logits in the memory where the teacher wrote them.
pub trait Extract {
    /// A slice of logits `[n, V]`.
    type Logits: ?Sized;
    /// The error of the device.
    type Error;

    /// Extracts the requested columns of these rows.
    ///
    /// # Errors
    /// If a logit is NaN or infinite, a token is outside the vocabulary, a column has another length, the stored type
    /// cannot hold the noise, or the device fails.
    fn extract(
        &mut self,
        logits: &Self::Logits,
        observed: &ObservedTokens<'_>,
    ) -> Result<ExtractedColumns, Self::Error>;
}

/// The CPU implementation of [`Extract`].
#[derive(Debug)]
pub struct RowExtractor {
    spec: ExtractionSpec,
    encoder: Option<RowEncoder>,
}

/// The results of one row besides corrections.
#[derive(Default)]
struct RowColumns {
    logprob: f32,
    dense: Vec<f32>,
    signals: RowSignals,
}

impl RowExtractor {
    /// Creates an extractor for rows of `spec.vocab` logits.
    ///
    /// # Errors
    /// If `spec.vocab` is 0 or exceeds 2^32, or a candidate is outside the vocabulary.
    pub fn new(spec: ExtractionSpec) -> Result<Self, NoiseError> {
        Softmax::new(spec.vocab)?;
        spec.signals.check_vocabulary(spec.vocab)?;
        let encoder = match spec.noise {
            Some(NoiseForm::Replay { tolerance, value_type, condition }) => {
                Some(RowEncoder::new(spec.vocab, tolerance, value_type)?.with_condition(condition))
            }
            _ => None,
        };
        Ok(Self { spec, encoder })
    }

    /// The columns requested of every row.
    #[must_use]
    pub fn spec(&self) -> &ExtractionSpec {
        &self.spec
    }

    fn extract_row(
        &self,
        softmax: &mut Softmax,
        logits: &[f32],
        observed: &ObservedTokens<'_>,
        n: usize,
    ) -> Result<RowColumns, NoiseError> {
        let (vocab, token) = (self.spec.vocab, observed.tokens[n]);
        let stream = |key| NoiseStream::new(key, observed.sequence_ids[n], observed.positions[n]);
        softmax.load(logits).map_err(|e| e.at(&stream(DrawKey::new(0, 0))))?;
        let mut dense = Vec::new();
        if let Some(NoiseForm::Dense { value_type, condition }) = self.spec.noise {
            dense.resize(self.spec.keys.len() * vocab, 0.0);
            for (key, out) in self.spec.keys.iter().zip(dense.chunks_exact_mut(vocab)) {
                let stream = stream(*key);
                dense_noise_of_loaded(softmax, logits, token, &stream, out)?;
                round_dense(logits, token, value_type, condition, &stream, out)?;
            }
        }
        let logit = logits.get(token as usize).copied().unwrap_or(f32::NAN);
        let signals = self.row_signals(softmax, logits, observed, n);
        Ok(RowColumns { logprob: softmax.stored_logprob(logit), dense, signals })
    }

    fn row_signals(&self, softmax: &Softmax, logits: &[f32], observed: &ObservedTokens<'_>, n: usize) -> RowSignals {
        self.spec.signals.compute(&LoadedRow::new(softmax, logits, observed.sequence_ids[n], observed.positions[n]))
    }

    fn extract_rows(
        &self,
        logits: &[f32],
        observed: &ObservedTokens<'_>,
        out: &mut ExtractedColumns,
    ) -> Result<(), NoiseError> {
        let vocab = self.spec.vocab;
        let rows: Vec<Result<RowColumns, NoiseError>> = logits
            .par_chunks_exact(vocab)
            .enumerate()
            .map_init(
                || Softmax::new(vocab),
                |softmax, (n, logits)| match softmax {
                    Ok(softmax) => self.extract_row(softmax, logits, observed, n),
                    Err(e) => Err(e.clone()),
                },
            )
            .collect();
        let mut dense = Vec::new();
        out.logprob.clear();
        for row in rows {
            let row = row?;
            out.logprob.push(row.logprob);
            dense.extend(row.dense);
            out.signals.push(row.signals);
        }
        if self.spec.signals.is_empty() {
            out.signals.clear();
        }
        out.dense = matches!(self.spec.noise, Some(NoiseForm::Dense { .. })).then_some(dense);
        Ok(())
    }
}

impl Extract for RowExtractor {
    type Logits = [f32];
    type Error = NoiseError;

    fn extract(&mut self, logits: &[f32], observed: &ObservedTokens<'_>) -> Result<ExtractedColumns, NoiseError> {
        let ObservedTokens { tokens, positions, sequence_ids } = *observed;
        let n = tokens.len();
        let lengths = [
            ("logits", logits.len(), n * self.spec.vocab),
            ("positions", positions.len(), n),
            ("sequence ids", sequence_ids.len(), n),
        ];
        for (what, got, expected) in lengths {
            if got != expected {
                return Err(NoiseError::Length { what, got, expected });
            }
        }
        let mut out = ExtractedColumns::default();
        let Some(encoder) = &self.encoder else {
            self.extract_rows(logits, observed, &mut out)?;
            return Ok(out);
        };
        let rows = LogitRows { logits, tokens, positions, sequence_ids, is_given: &[] };
        let per_row = |softmax: &Softmax, logits: &[f32], n: usize| self.row_signals(softmax, logits, observed, n);
        let (encoded, signals) = encoder.encode_rows(&rows, &self.spec.keys, per_row)?;
        out.signals = if self.spec.signals.is_empty() { Vec::new() } else { signals };
        out.logprob.clone_from(&encoded.logprob);
        out.replay = Some(encoded);
        Ok(out)
    }
}
