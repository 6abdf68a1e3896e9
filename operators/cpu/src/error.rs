//! What is wrong with a product that was asked for.

/// Why a weight was not packed or a product not computed; nothing was written then.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProductError {
    /// The CPU lacks the instructions of these types.
    #[error("this CPU has no products in {got}; it has {valid}")]
    Unavailable {
        /// Name of the types asked for.
        got: &'static str,
        /// Names of those that there are.
        valid: String,
    },
    /// A matrix without a row or without a column.
    #[error("{what} is {rows} x {columns}; valid are sizes of at least 1 x 1")]
    Empty {
        /// The matrix.
        what: &'static str,
        /// Its rows.
        rows: usize,
        /// Its columns.
        columns: usize,
    },
    /// Rows that overlap, or a matrix that reaches past its memory.
    #[error(
        "{what} of {rows} rows of {columns} floats, {stride} apart, does not fit {floats} floats; \
         valid is a stride of at least {columns} and memory for the last row"
    )]
    Memory {
        /// The matrix.
        what: &'static str,
        /// Its rows.
        rows: usize,
        /// Floats in a row.
        columns: usize,
        /// Floats from a row's start to the next one's.
        stride: usize,
        /// Floats that there are.
        floats: usize,
    },
    /// A size that differs from the one it has to equal.
    #[error("{what} is {got}; valid is {valid}")]
    Size {
        /// The size.
        what: &'static str,
        /// What was given.
        got: usize,
        /// What it has to be.
        valid: usize,
    },
    /// A weight that f16 cannot scale.
    #[error("output {output} of the weight has a value that is not finite; valid for {arithmetic} are finite ones")]
    NotFinite {
        /// The first such output.
        output: usize,
        /// Name of the types.
        arithmetic: &'static str,
    },
    /// Gate and up are paired by [`crate::Packed::gate_up`] for this epilogue, and for no other.
    #[error("epilogue {got} on a weight packed {packed}; valid is SwiGlu on gate_up, the others on new")]
    Pairing {
        /// The epilogue asked for.
        got: &'static str,
        /// How the weight was packed.
        packed: &'static str,
    },
}
