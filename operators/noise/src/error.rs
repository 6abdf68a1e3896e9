//! What can go wrong, each with the position it went wrong at and what to do about it.

/// An error of the noise format.
///
/// None of these is helped by a retry: every computation here is a pure function of its arguments.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NoiseError {
    /// A vocabulary that no index type of the format can address.
    #[error("vocabulary size {vocab} is out of range (1 to 4294967296)")]
    Vocabulary {
        /// The size given.
        vocab: usize,
    },
    /// A tolerance that is no bound on a total variation, or one below the error of f32 arithmetic.
    #[error("tolerance {tolerance} is out of range ({min} to {max}, a total variation)",
        min = crate::Tolerance::MIN, max = crate::Tolerance::MAX)]
    Tolerance {
        /// The tolerance given.
        tolerance: f64,
    },
    /// A buffer whose length does not follow from the vocabulary or the number of rows.
    #[error("{what} holds {got} values, expected {expected}")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Its length.
        got: usize,
        /// The length it must have.
        expected: usize,
    },
    /// The observed token is not in the vocabulary of the logits.
    #[error(
        "sequence {sequence_id}, position {position}: token {token} is not below the vocabulary size {vocab}; do the \
         tokenizer and the teacher belong together?"
    )]
    Token {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in it.
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
        /// Position in it.
        position: u32,
        /// First vocabulary entry that is not finite.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// A logit is NaN or infinite, in a function that knows no position.
    #[error("the logit of token {index} is {value}")]
    NonFinite {
        /// First vocabulary entry that is not finite.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// Rounding of the stored values keeps the noise further from the exact one than was asked for.
    #[error(
        "sequence {sequence_id}, position {position}: the noise decoded from {value_type} values has total variation \
         {reached:.3e} at best, above the tolerance {tolerance:.3e}; use a larger tolerance or 32-bit values"
    )]
    ToleranceUnreachable {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in it.
        position: u32,
        /// The least total variation found.
        reached: f64,
        /// What was asked for.
        tolerance: f64,
        /// Type of the stored log-probabilities.
        value_type: crate::ValueType,
    },
    /// A stored correction that no encoder writes: the data are damaged, or read with another vocabulary.
    #[error(
        "sequence {sequence_id}, position {position}: the correction of token {index} to ln p = {logprob} is not valid \
         (tokens below {vocab}, finite ln p)"
    )]
    Correction {
        /// Packed sequence.
        sequence_id: u64,
        /// Position in it.
        position: u32,
        /// Vocabulary entry of the correction.
        index: u32,
        /// Its stored value.
        logprob: f32,
        /// Vocabulary size.
        vocab: usize,
    },
}
