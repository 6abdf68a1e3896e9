//! Errors, each with the position where it occurred and the remedy.

/// An error of the noise format.
///
/// Retrying never helps: every function of this crate is a pure function of its arguments.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoiseError {
    /// A vocabulary that no index type of the format can address.
    #[error("vocabulary size {vocab} is out of range (1 to 4294967296)")]
    Vocabulary {
        /// The size given.
        vocab: usize,
    },
    /// A tolerance that is not a total variation, or one below the error of f32 arithmetic.
    #[error("tolerance {tolerance} is out of range ({min} to {max}, a total variation)",
        min = crate::Tolerance::MIN, max = crate::Tolerance::MAX)]
    Tolerance {
        /// The tolerance given.
        tolerance: f64,
    },
    /// A buffer whose length does not match the vocabulary or the number of rows.
    #[error("{what} holds {got} values, expected {expected}")]
    Length {
        /// Name of the buffer.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length it must have.
        expected: usize,
    },
    /// The observed token is outside the vocabulary of the logits.
    #[error(
        "sequence {sequence_id}, position {position}: token {token} is not below the vocabulary size {vocab}; do the \
         tokenizer and the teacher belong together?"
    )]
    Token {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// The token.
        token: u32,
        /// Vocabulary size of the logits.
        vocab: usize,
    },
    /// A logit is NaN or infinite.
    #[error(
        "sequence {sequence_id}, position {position}: the logit of token {index} is {value}; if the teacher runs in f16, \
         try bf16 or f32"
    )]
    NonFiniteLogit {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// First vocabulary entry that is not finite.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A logit is NaN or infinite, in a function that has no position to report.
    #[error("the logit of token {index} is {value}")]
    NonFinite {
        /// First vocabulary entry that is not finite.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// The rounding of the stored values causes a larger total variation than the tolerance permits.
    #[error(
        "sequence {sequence_id}, position {position}: the noise decoded from {value_type} values has total variation \
         {reached:.3e} at best, above the tolerance {tolerance:.3e}; use a larger tolerance or 32-bit values"
    )]
    ToleranceUnreachable {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// The smallest total variation found.
        reached: f64,
        /// The requested tolerance.
        tolerance: f64,
        /// Type of the stored log-probabilities.
        value_type: crate::ValueType,
    },
    /// No stored values of an entry let the observed token win in argmax(l + ξ̂).
    #[error(
        "sequence {sequence_id}, position {position}: no {value_type} values of token {index} let the observed token win \
         in argmax(l + ξ); use 32-bit values, or condition: false"
    )]
    ConditionUnreachable {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// Vocabulary entry that would win.
        index: u32,
        /// Type of the stored values.
        value_type: crate::ValueType,
    },
    /// Dense noise beyond the largest value of the stored type.
    #[error(
        "sequence {sequence_id}, position {position}: ξ of token {index} is {value}, which {value_type} values cannot hold; \
         use 32-bit values"
    )]
    Unstorable {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// Vocabulary entry.
        index: u32,
        /// ξ of the entry.
        value: f32,
        /// Type of the stored values.
        value_type: crate::ValueType,
    },
    /// A stored correction that no encoder writes: the data are damaged, or the reader uses another vocabulary.
    #[error(
        "sequence {sequence_id}, position {position}: the correction of token {index} to ln p = {logprob} is not valid \
         (tokens below {vocab}, finite ln p)"
    )]
    Correction {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// Vocabulary entry of the correction.
        index: u32,
        /// Its stored value.
        logprob: f32,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A temperature that is not a positive finite number, or not 1 for uniform noise.
    #[error("temperature {temperature} is not valid ({})",
        if *uniform { "uniform noise has no scale: only 1" } else { "a finite number above 0" })]
    Temperature {
        /// The temperature given.
        temperature: f64,
        /// Whether the output is uniform noise.
        uniform: bool,
    },
    /// A stored ln p_x that no encoder writes.
    #[error("sequence {sequence_id}, position {position}: logprob is {logprob}, expected a finite number")]
    Logprob {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// The value.
        logprob: f32,
    },
    /// Corrections of a token that do not ascend by index. Those in shards do.
    #[error(
        "sequence {sequence_id}, position {position}: the corrections do not ascend by token ({index} after {before}); \
         do noise_index and noise_count come from the same rows?"
    )]
    Unordered {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in the sequence.
        position: u32,
        /// Vocabulary entry of the correction.
        index: u32,
        /// Entry of the preceding correction.
        before: u32,
    },
    /// A sequence whose counts of corrections do not add up to its number of corrections.
    #[error(
        "row {row}: noise_count adds up to {counted} corrections, noise_index and noise_logprob hold {stored}; do the \
         columns come from the same rows?"
    )]
    Counts {
        /// Row in the batch.
        row: usize,
        /// Sum of its counts.
        counted: i64,
        /// Number of corrections in the columns.
        stored: i64,
    },
    /// A draw, token or position that the columns do not have, or a candidate that the vocabulary does not have.
    #[error("{what} {got} is out of range (0 to {last})")]
    Range {
        /// Name of the quantity.
        what: &'static str,
        /// The number given.
        got: i64,
        /// The largest valid number.
        last: i64,
    },
}

impl NoiseError {
    /// Adds the position to an error about the row of logits alone.
    #[must_use]
    pub fn at(self, stream: &crate::NoiseStream) -> Self {
        match self {
            Self::NonFinite { index, value } => {
                Self::NonFiniteLogit { sequence_id: stream.sequence_id, position: stream.position, index, value }
            }
            other => other,
        }
    }
}
