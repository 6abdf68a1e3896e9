//! Errors of packing a weight and of computing a product.

/// Why a weight was not packed or a product not computed. Nothing was written in that case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProductError {
    /// The CPU lacks the instructions for this arithmetic.
    #[error("this CPU has no products in {got}; it has {valid}")]
    Unavailable {
        /// Name of the requested arithmetic.
        got: &'static str,
        /// Names of the arithmetics that this CPU supports.
        valid: String,
    },
    /// A matrix without rows or without columns.
    #[error("{what} is {rows} x {columns}; valid are sizes of at least 1 x 1")]
    Empty {
        /// Name of the matrix.
        what: &'static str,
        /// Number of rows.
        rows: usize,
        /// Number of columns.
        columns: usize,
    },
    /// Rows that overlap, or a matrix that extends past its slice.
    #[error(
        "{what} of {rows} rows of {columns} floats, {stride} apart, does not fit {floats} floats; \
         valid is a stride of at least {columns} and memory for the last row"
    )]
    Memory {
        /// Name of the matrix.
        what: &'static str,
        /// Number of rows.
        rows: usize,
        /// Floats in a row.
        columns: usize,
        /// Floats from one row's start to the next.
        stride: usize,
        /// Length of the slice, in floats.
        floats: usize,
    },
    /// A size that differs from the required one.
    #[error("{what} is {got}; valid is {valid}")]
    Size {
        /// Name of the size.
        what: &'static str,
        /// The value given.
        got: usize,
        /// The required value.
        valid: usize,
    },
    /// A weight with a value that is not finite, which F16 cannot scale.
    #[error("output {output} of the weight has a value that is not finite; valid for {arithmetic} are finite ones")]
    NotFinite {
        /// Index of the first such output.
        output: usize,
        /// Name of the arithmetic.
        arithmetic: &'static str,
    },
    /// The epilogue does not match the weight: [`crate::PackedWeight::gate_up`] is for `SwiGlu`,
    /// [`crate::PackedWeight::new`] for the others.
    #[error("epilogue {got} on a weight packed {packed}; valid is SwiGlu on gate_up, the others on new")]
    Pairing {
        /// The requested epilogue.
        got: &'static str,
        /// How the weight was packed: `new` or `gate_up`.
        packed: &'static str,
    },
}
