//! The position of a split's sequences in the data set, for orders that change along it.

use serde::{Deserialize, Serialize};

/// The planned range of a split's sequences among those of the data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceRange {
    /// Number of sequences before the first one of the split.
    pub first: u64,
    /// Number of sequences planned for the split.
    pub sequences: u64,
}

impl SequenceRange {
    /// Returns the number of sequences before a row of the split. Rows beyond the planned ones get the value of the
    /// last planned row, so that it never decreases from split to split.
    pub fn of_row(&self, row: u64) -> u64 {
        self.first.saturating_add(row.min(self.sequences.saturating_sub(1)))
    }

    /// Returns the number of sequences before the next split.
    pub fn end(&self) -> u64 {
        self.first.saturating_add(self.sequences)
    }
}
