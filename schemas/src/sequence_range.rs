//! Where the sequences of a split are among those of the data set, for orders that change along it.

use serde::{Deserialize, Serialize};

/// The sequences of a split among those of the data set, as they were planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRange {
    /// The number of sequences before its first one.
    pub first: u64,
    /// The number of sequences that it was planned to have.
    pub sequences: u64,
}

impl SequenceRange {
    /// The number of sequences before a row of the split. Rows beyond the planned ones have that of the last planned one, so that it never falls.
    pub fn of_row(&self, row: u64) -> u64 {
        self.first.saturating_add(row.min(self.sequences.saturating_sub(1)))
    }

    /// The number of sequences before the next split.
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.sequences)
    }
}
