//! Blocks: runs of consecutive rows of the data set, decoded.

use std::ops::Range;

use arrow_array::RecordBatch;

use crate::cache::Weigh;
use crate::columns::RowRef;

/// Decoded rows in order: pieces, cut where a row group or shard ends.
#[derive(Debug, Default)]
pub(crate) struct Block {
    pieces: Vec<(Range<u64>, RecordBatch)>,
    bytes: usize,
}

impl Block {
    /// Adds batches of consecutive rows, the first of which begins at row `start` of the data set.
    pub fn push(&mut self, start: u64, batches: Vec<RecordBatch>) {
        let mut at = start;
        for batch in batches {
            let end = at + batch.num_rows() as u64;
            self.bytes += batch.get_array_memory_size();
            self.pieces.push((at..end, batch));
            at = end;
        }
    }

    /// A row by its number in the data set.
    pub fn row(&self, row: u64) -> Option<RowRef<'_>> {
        let (range, batch) = self.pieces.iter().find(|(range, _)| range.contains(&row))?;
        Some(RowRef { batch, row: (row - range.start) as usize })
    }
}

impl Weigh for Block {
    fn bytes(&self) -> usize {
        self.bytes
    }
}
