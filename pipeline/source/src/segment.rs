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
    let mut parts: Vec<(u64, u64, u64)> = Vec::new();
    let mut first = 0;
    for group in groups.iter().filter(|group| group.rows > 0) {
        let count = group.bytes.div_ceil(target.max(1)).clamp(1, group.rows);
        let at = |i: u64| first + (u128::from(group.rows) * u128::from(i) / u128::from(count)) as u64;
        parts.extend((0..count).map(|i| (at(i), at(i + 1), group.bytes / count)));
        first += group.rows;
    }
    let weights: Vec<u64> = parts.iter().map(|part| part.2).collect();
    let joined = join_evenly(&weights, target).into_iter().filter_map(|range| {
        let parts = &parts[range];
        let ((start, ..), (_, end, _)) = (parts.first()?, parts.last()?);
        Some((*start, *end, parts.iter().map(|part| part.2).sum()))
    });
    joined.collect()
}

/// Joins neighbours into as few groups as possible of at most `target` each, and makes the heaviest of these groups as
/// light as possible. Something heavier than the target is a group of its own.
///
/// Cost: one pass over the weights for each binary digit of the target.
pub(crate) fn join_evenly(weights: &[u64], target: u64) -> Vec<std::ops::Range<usize>> {
    let fewest = groups_of(weights, target).count();
    // No smaller limit has fewer groups, so the limits with as many as the target are all above the others.
    let (mut too_small, mut limit) = (0, target);
    while limit - too_small > 1 {
        let middle = too_small + (limit - too_small) / 2;
        match groups_of(weights, middle).count() > fewest {
            true => too_small = middle,
            false => limit = middle,
        }
    }
    groups_of(weights, limit).collect()
}

/// Joins neighbours while they fit into `limit`, from the first on. No other way needs fewer groups.
fn groups_of(weights: &[u64], limit: u64) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let mut sum = *weights.get(start)?;
        let mut end = start + 1;
        while let Some(joined) = weights.get(end).and_then(|next| sum.checked_add(*next)).filter(|sum| *sum <= limit) {
            (sum, end) = (joined, end + 1);
        }
        Some(std::mem::replace(&mut start, end)..end)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sizes(weights: &[u64], target: u64) -> Vec<u64> {
        join_evenly(weights, target).into_iter().map(|range| weights[range].iter().sum()).collect()
    }

    #[test]
    fn the_last_group_is_no_remainder() {
        assert_eq!(sizes(&[10; 122], 1000), [610, 610]);
        assert_eq!(sizes(&[10; 100], 1000), [1000]);
        assert_eq!(sizes(&[10; 101], 1000), [510, 500]);
        assert_eq!(sizes(&[1, 1, 5000, 1, 1], 1000), [2, 5000, 2]);
        assert_eq!(sizes(&[0, 0, 0], 1), [0]);
        assert_eq!(sizes(&[], 1000), [0; 0]);
        assert_eq!(sizes(&[u64::MAX, u64::MAX, 1], u64::MAX), [u64::MAX, u64::MAX, 1]);
    }

    #[test]
    fn groups_of_rows_are_joined_evenly() {
        let groups = [RowGroup { rows: 100, bytes: 16 }; 75];
        let cuts = cut_rows(&groups, 1000);
        assert_eq!(cuts, [(0, 3800, 608), (3800, 7500, 592)]);
        // a group above the target is cut, and one without rows is nothing
        let cuts = cut_rows(&[RowGroup { rows: 3, bytes: 30 }, RowGroup { rows: 0, bytes: 9 }], 10);
        assert_eq!(cuts, [(0, 1, 10), (1, 2, 10), (2, 3, 10)]);
    }

    /// The fewest groups and then the lightest heaviest one, by trying all ways.
    fn best(weights: &[u64], target: u64) -> (usize, u64) {
        let cuts = weights.len() - 1;
        let ways = (0u32..1 << cuts).filter_map(|cut| {
            let mut groups = vec![vec![weights[0]]];
            for (i, weight) in weights[1..].iter().enumerate() {
                match cut >> i & 1 == 1 {
                    true => groups.push(vec![*weight]),
                    false => groups.last_mut().unwrap().push(*weight),
                }
            }
            let fits = |group: &Vec<u64>| group.len() == 1 || group.iter().sum::<u64>() <= target;
            // what is heavier than the target cannot be lighter
            let joined = groups.iter().filter(|group| group.len() > 1).map(|group| group.iter().sum());
            groups.iter().all(fits).then(|| (groups.len(), joined.max().unwrap_or(0)))
        });
        ways.min().unwrap()
    }

    proptest! {
        #[test]
        fn no_way_has_fewer_groups_or_lighter_ones(weights in prop::collection::vec(0..40u64, 1..11), target in 1..90u64) {
            let groups = join_evenly(&weights, target);
            prop_assert!(groups.iter().flat_map(Clone::clone).eq(0..weights.len()));
            let (fewest, lightest) = best(&weights, target);
            prop_assert_eq!(groups.len(), fewest);
            let joined = groups.into_iter().filter(|group| group.len() > 1).map(|group| weights[group].iter().sum::<u64>());
            let heaviest = joined.max().unwrap_or(0);
            prop_assert!(heaviest <= lightest.max(*weights.iter().max().unwrap()), "{} {}", heaviest, lightest);
        }
    }
}
