//! Ids as types. All ids are functions of the job and its input, never of time, threads or processing order.

use serde::{Deserialize, Serialize};

/// Number of a split (a fixed piece of the input) in the plan of a job, counted over all data set splits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SplitId(pub u32);

impl SplitId {
    /// Id of the `row`-th packed sequence of this split: the split in the high 32 bits, the row in the low 32 bits.
    ///
    /// A split has fewer than 2^32 rows, because the limits of the planner exclude larger shards.
    pub fn sequence(self, row: u32) -> SequenceId {
        SequenceId((u64::from(self.0) << 32) | u64::from(row))
    }

    /// Id of the `ordinal`-th record of this split, counted before bad records are skipped.
    pub fn document(self, ordinal: u32) -> DocumentId {
        DocumentId((u64::from(self.0) << 32) | u64::from(ordinal))
    }
}

/// Key of all replayed randomness of a packed sequence. Unique in the data set, and independent of the number of
/// workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SequenceId(pub u64);

/// Identifies the input record of a document: the split that read it, and its ordinal in the split.
///
/// The manifest's table of splits gives the file and the range of each split.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct DocumentId(pub u64);

impl DocumentId {
    /// Returns the split that read the document, and the ordinal of the record in that split.
    pub fn parts(self) -> (SplitId, u32) {
        (SplitId((self.0 >> 32) as u32), self.0 as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_do_not_collide_between_splits() {
        assert_eq!(SplitId(0).sequence(u32::MAX).0 + 1, SplitId(1).sequence(0).0);
        assert_eq!(SplitId(7).document(9).parts(), (SplitId(7), 9));
    }
}
