//! `input.format: none`: documents without a text, of no file. They are cut into splits, held out, counted and checked like any others.

use object_store::path::Path;
use stillhouse_base::file_state::FileState;
use stillhouse_base::source_error::SourceError;

use super::list::InputFile;
use super::parquet_rows::Cell;
use super::range::Rows;

/// What stands for the file in the manifest.
const NAME: &str = "none";

impl InputFile {
    /// What stands for the file of documents that have none.
    pub fn nothing() -> Self {
        Self { path: NAME.into(), location: Path::default(), size: 0, state: FileState::default() }
    }

    /// Whether there is no such file.
    pub(crate) fn is_nothing(&self) -> bool {
        self.location == Path::default()
    }
}

/// So many documents in equal ranges of at most `most`.
pub(crate) fn ranges(documents: u64, most: u64) -> Vec<(u64, u64)> {
    let parts = documents.div_ceil(most.max(1));
    let at = |i: u64| (u128::from(documents) * u128::from(i) / u128::from(parts.max(1))) as u64;
    (0..parts).map(|i| (at(i), at(i + 1))).collect()
}

/// The documents of a range.
pub(crate) struct Nothing {
    next: u64,
    end: u64,
}

impl Nothing {
    pub fn new((next, end): (u64, u64)) -> Self {
        Self { next, end }
    }
}

impl Rows for Nothing {
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
        for (documents, most) in [(1, 1), (1, 100), (10, 3), (10_000, 4096), (7, 7), (3, 0)] {
            let ranges = ranges(documents, most);
            assert!(ranges.windows(2).all(|pair| pair[0].1 == pair[1].0), "{documents}, {most}");
            assert_eq!((ranges[0].0, ranges[ranges.len() - 1].1), (0, documents));
            assert!(ranges.iter().all(|(start, end)| start < end && end - start <= most.max(1)));
        }
        assert!(ranges(0, 5).is_empty());
    }
}
