//! `input.format: none`: documents without a text and without a file. They are split, held out, counted and checked
//! like others.

use stillhouse_base::source_error::SourceError;
use stillhouse_input_files::{InputFile, Store};
use stillhouse_schemas::manifest::Range;
use stillhouse_schemas::spec::Input;

use super::{FileColumn, RowsFormat};
use crate::records::{Cell, Rows};
use crate::segment::{RowGroup, Segment};

/// `input.format: none`.
pub(super) struct NoFiles;

impl RowsFormat for NoFiles {
    fn endings(&self) -> &'static [&'static str] {
        &[]
    }

    fn row_groups(&self, _store: &Store, _file: &InputFile, input: &Input) -> Result<Vec<RowGroup>, SourceError> {
        let rows = input.documents.unwrap_or(0);
        // a document weighs 1, and the target of a split counts documents too
        Ok(vec![RowGroup { rows, bytes: rows }])
    }

    fn segments(&self, index: usize, groups: &[RowGroup], target: u64) -> Vec<Segment> {
        let documents = groups.iter().map(|group| group.rows).sum();
        let segment = |(start, end)| {
            let range = Range::Rows { start, end };
            Segment { file: index, range, weight: end - start, records: Some(end - start) }
        };
        ranges(documents, target).into_iter().map(segment).collect()
    }

    fn open(
        &self,
        _store: &Store,
        _file: &InputFile,
        _input: &Input,
        (next, end): (u64, u64),
    ) -> Result<Box<dyn Rows>, SourceError> {
        Ok(Box::new(EmptyDocuments { next, end }))
    }

    fn columns(&self, _store: &Store, _file: &InputFile) -> Result<Option<Vec<FileColumn>>, SourceError> {
        Ok(None)
    }
}

/// Divides documents into equal ranges of at most `max_documents`.
fn ranges(documents: u64, max_documents: u64) -> Vec<(u64, u64)> {
    let parts = documents.div_ceil(max_documents.max(1));
    let at = |i: u64| (u128::from(documents) * u128::from(i) / u128::from(parts.max(1))) as u64;
    (0..parts).map(|i| (at(i), at(i + 1))).collect()
}

/// Reads the empty documents of a range.
struct EmptyDocuments {
    next: u64,
    end: u64,
}

impl Rows for EmptyDocuments {
    fn next(&mut self) -> Result<Option<u64>, SourceError> {
        let row = (self.next < self.end).then_some(self.next);
        self.next += u64::from(row.is_some());
        Ok(row)
    }

    fn cell(&self) -> Cell<'_> {
        Some(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_all_documents_once() {
        for (documents, max_documents) in [(1, 1), (1, 100), (10, 3), (10_000, 4096), (7, 7), (3, 0)] {
            let ranges = ranges(documents, max_documents);
            assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "{documents}, {max_documents}");
            assert_eq!((ranges[0].0, ranges[ranges.len() - 1].1), (0, documents));
            assert!(ranges.iter().all(|(start, end)| start < end && end - start <= max_documents.max(1)));
        }
        assert!(ranges(0, 5).is_empty());
    }
}
