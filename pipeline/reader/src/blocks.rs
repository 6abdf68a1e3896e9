//! Blocks: decoded runs of consecutive rows of the data set.

use std::ops::Range;

use arrow_array::RecordBatch;

use crate::cache::MemorySize;
use crate::columns::RowRef;

/// Decoded rows in order, as pieces that end at row group and shard boundaries.
#[derive(Debug, Default)]
pub(crate) struct Block {
    pieces: Vec<(Range<u64>, RecordBatch)>,
    bytes: usize,
}

impl Block {
    /// Appends batches of consecutive rows. The first row has number `start` in the data set.
    pub fn push(&mut self, start: u64, batches: Vec<RecordBatch>) {
        let mut at = start;
        for batch in batches {
            let end = at + batch.num_rows() as u64;
            self.bytes += batch.get_array_memory_size();
            self.pieces.push((at..end, batch));
            at = end;
        }
    }

    /// Returns a row by its number in the data set; `None` if the block does not contain it.
    pub fn row(&self, row: u64) -> Option<RowRef<'_>> {
        let (range, batch) = self.pieces.iter().find(|(range, _)| range.contains(&row))?;
        Some(RowRef { batch, row: (row - range.start) as usize })
    }
}

impl MemorySize for Block {
    fn bytes(&self) -> usize {
        self.bytes
    }
}
