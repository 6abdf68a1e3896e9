//! int8 products.

/// Inputs whose sum of products of 8-bit numbers fits 32 bits.
pub(crate) const MOST_INPUTS: usize = (1 << 31) / (128 * 128) - 1;
