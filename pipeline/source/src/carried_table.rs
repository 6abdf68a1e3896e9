//! The values of `input.carry` by document, from the reader of a split to the operator `carry`.
//!
//! ```text
//!   reader ── add (in the order of documents) ──► [block being filled] ──► blocks, in memory up to a size, then in a file
//!                                                                              │
//!   operator `carry` ◄── of_document ── [block read last] ◄────────────────────┘
//! ```
//!
//! Documents wait between the two for as long as packing holds their tokens, and a filter may drop any number of them. So all
//! values of a split are kept. Memory: two blocks and [`MEMORY_BYTES`], plus 24 bytes per block; the rest is in a temporary file
//! (`TMPDIR`).

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::{Arc, Mutex, PoisonError};

use stillhouse_operators::operator::CarriedValues;
use stillhouse_schemas::ids::DocumentId;
use tempfile::SpooledTempFile;

/// Bytes of blocks in memory; beyond them, all blocks are in a temporary file.
const MEMORY_BYTES: usize = 8 << 20;
/// A block is full at this many documents or bytes.
const BLOCK_DOCUMENTS: usize = 64;
const BLOCK_BYTES: usize = 64 << 10;

type Values = Arc<[Option<String>]>;

/// Values of documents in ascending order of their ids.
type Block = Vec<(u64, Values)>;

/// The values of a split's documents. The reader adds to it, and the operator `carry` reads from it at the same time.
pub struct CarriedTable {
    is_mixture: bool,
    table: Mutex<Table>,
}

impl CarriedTable {
    /// Creates an empty table. In a mixture the first value of a document is the name of its table.
    pub fn new(is_mixture: bool) -> Self {
        Self { is_mixture, table: Mutex::default() }
    }

    /// Adds the values of a document. Documents come in ascending order of their ids.
    ///
    /// # Errors
    /// When the temporary file cannot be written.
    pub fn add(&self, document: DocumentId, values: Vec<Option<String>>) -> io::Result<()> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).add(document.0, values)
    }
}

impl CarriedValues for CarriedTable {
    fn of_document(&self, document: u64) -> io::Result<Option<Values>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner).get(document)
    }

    fn is_mixture(&self) -> bool {
        self.is_mixture
    }
}

impl fmt::Debug for CarriedTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CarriedTable")
    }
}

struct Table {
    filling: Block,
    filling_bytes: usize,
    /// First document, offset and length of each block in the file.
    places: Vec<(u64, u64, usize)>,
    file: SpooledTempFile,
    /// Index and content of the block that was read last.
    last_read: Option<(usize, Block)>,
}

impl Default for Table {
    fn default() -> Self {
        let file = SpooledTempFile::new(MEMORY_BYTES);
        Self { filling: Vec::new(), filling_bytes: 0, places: Vec::new(), file, last_read: None }
    }
}

impl Table {
    fn add(&mut self, document: u64, values: Vec<Option<String>>) -> io::Result<()> {
        self.filling_bytes += values.iter().map(|value| value.as_ref().map_or(0, String::len)).sum::<usize>();
        self.filling.push((document, values.into()));
        if self.filling.len() < BLOCK_DOCUMENTS && self.filling_bytes < BLOCK_BYTES {
            return Ok(());
        }
        let first = self.filling.first().map_or(document, |(first, _)| *first);
        let block: Vec<(u64, &[Option<String>])> = self.filling.iter().map(|(id, values)| (*id, &**values)).collect();
        let bytes = serde_json::to_vec(&block)?;
        let offset = self.file.seek(SeekFrom::End(0))?;
        self.file.write_all(&bytes)?;
        self.places.push((first, offset, bytes.len()));
        self.filling.clear();
        self.filling_bytes = 0;
        Ok(())
    }

    fn get(&mut self, document: u64) -> io::Result<Option<Values>> {
        if self.filling.first().is_some_and(|(first, _)| *first <= document) {
            return Ok(find(&self.filling, document));
        }
        let Some(index) = self.places.partition_point(|(first, ..)| *first <= document).checked_sub(1) else {
            return Ok(None);
        };
        if let Some((_, block)) = self.last_read.as_ref().filter(|(last, _)| *last == index) {
            return Ok(find(block, document));
        }
        let (_, offset, length) = self.places[index];
        let mut bytes = vec![0; length];
        self.file.seek(SeekFrom::Start(offset))?;
        self.file.read_exact(&mut bytes)?;
        let block: Vec<(u64, Vec<Option<String>>)> = serde_json::from_slice(&bytes)?;
        let block: Block = block.into_iter().map(|(id, values)| (id, values.into())).collect();
        let found = find(&block, document);
        self.last_read = Some((index, block));
        Ok(found)
    }
}

fn find(block: &Block, document: u64) -> Option<Values> {
    let at = block.binary_search_by_key(&document, |(id, _)| *id).ok()?;
    block.get(at).map(|(_, values)| Arc::clone(values))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(document: u64) -> Vec<Option<String>> {
        let text = (!document.is_multiple_of(7)).then(|| format!("\"é\n{document}"));
        // some are so long that one fills a block, and all together do not fit in memory
        vec![text, Some("x".repeat(if document.is_multiple_of(100) { 100_000 } else { 4000 }))]
    }

    #[test]
    fn values_are_found_while_others_are_added() {
        let table = CarriedTable::new(false);
        let expected = |document: u64| Values::from(values(document));
        for document in (0..3000).map(|n| n * 3) {
            table.add(DocumentId(document), values(document)).unwrap();
            for earlier in [document, document / 2 / 3 * 3, document.saturating_sub(300)] {
                assert_eq!(table.of_document(earlier).unwrap(), Some(expected(earlier)), "{earlier} at {document}");
            }
        }
        assert!(table.table.lock().unwrap().file.is_rolled());
        for missing in [4, 9000] {
            assert_eq!(table.of_document(missing).unwrap(), None);
        }
        assert_eq!(CarriedTable::new(false).of_document(0).unwrap(), None);
    }
}
