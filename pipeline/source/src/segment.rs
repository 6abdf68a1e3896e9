//! Segments: ranges into which files are cut before they are grouped into splits.

use stillhouse_schemas::manifest::Range;

/// A range of a file that only the holdout cuts further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Index of the file in the listing.
    pub file: usize,
    pub range: Range,
    /// Weight in the units of the target: bytes of text, numbers of rows, or documents.
    pub weight: u64,
    /// Number of records, if known.
    pub records: Option<u64>,
}

/// Rows that are read, planned and cut as a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowGroup {
    pub rows: u64,
    /// Bytes of text, estimated from the metadata.
    pub bytes: u64,
}

/// Returns segments of about `target` bytes over groups of rows.
pub(crate) fn by_rows(file: usize, groups: &[RowGroup], target: u64) -> Vec<Segment> {
    let segment =
        |(start, end, weight)| Segment { file, range: Range::Rows { start, end }, weight, records: Some(end - start) };
    cut_rows(groups, target).into_iter().map(segment).collect()
}

/// Returns ranges of equal size, at most the target.
pub(crate) fn by_size(file: usize, size: u64, target: u64) -> Vec<Segment> {
    let parts = size.div_ceil(target);
    let at = |i: u64| (u128::from(size) * u128::from(i) / u128::from(parts)) as u64;
    (0..parts)
        .map(|i| Segment {
            file,
            range: Range::Bytes { start: at(i), end: at(i + 1), line: (i == 0).then_some(1) },
            weight: at(i + 1) - at(i),
            records: None,
        })
        .collect()
}

/// Cuts and joins groups of rows into ranges of about `target` bytes: start, end, bytes.
fn cut_rows(groups: &[RowGroup], target: u64) -> Vec<(u64, u64, u64)> {
    let mut ranges: Vec<(u64, u64, u64)> = Vec::new();
    let mut first = 0;
    for group in groups {
        let parts = group.bytes.div_ceil(target.max(1)).clamp(1, group.rows.max(1));
        for i in 0..parts {
            let at = |i: u64| first + (u128::from(group.rows) * u128::from(i) / u128::from(parts)) as u64;
            let (start, end, bytes) = (at(i), at(i + 1), group.bytes / parts);
            match ranges.last_mut() {
                Some(last) if last.2 + bytes <= target => (last.1, last.2) = (end, last.2 + bytes),
                _ if start == end => {}
                _ => ranges.push((start, end, bytes)),
            }
        }
        first += group.rows;
    }
    ranges
}
