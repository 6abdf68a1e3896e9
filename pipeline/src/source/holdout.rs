//! The last N records of the input, in the order of the files, cut off for the holdout.
//!
//! Counting goes back from the end, segment by segment, and reads only the segments that are needed: those
//! whose records are not known already, and the one in which the cut lies.

use stillhouse_schemas::manifest::Range;
use stillhouse_schemas::spec::Input;

use super::error::SourceError;
use super::list::InputFile;
use super::plan::Segment;
use super::records;
use super::store::Store;

/// What comes before the last `n` records, and those records.
pub(crate) fn cut_off(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    mut segments: Vec<Segment>,
    n: u64,
    field: &str,
) -> Result<(Vec<Segment>, Vec<Segment>), SourceError> {
    let mut held = Vec::new();
    let mut left = n;
    while left > 0 {
        let Some(mut segment) = segments.pop() else { break };
        let records = count(store, files, input, &segment)?;
        segment.records = Some(records);
        if records > left {
            let (before, after) = cut(store, files, input, &segment, records - left)?;
            segments.push(before);
            held.push(after);
            left = 0;
        } else {
            left -= records;
            held.push(segment);
        }
    }
    let mut train = false;
    for segment in segments.iter().rev() {
        if count(store, files, input, segment)? > 0 {
            train = true;
            break;
        }
    }
    if left > 0 || !train {
        return Err(SourceError::Plan {
            field: field.into(),
            message: format!(
                "got {n}, but the input has {} records; valid: fewer than that, so that something is left for train",
                n - left
            ),
        });
    }
    held.reverse();
    Ok((segments, held))
}

fn bytes(range: Range) -> (u64, u64) {
    match range {
        Range::Bytes { start, end, .. } | Range::Rows { start, end } => (start, end),
    }
}

fn count(store: &Store, files: &[InputFile], input: &Input, segment: &Segment) -> Result<u64, SourceError> {
    if let Some(records) = segment.records {
        return Ok(records);
    }
    let file = &files[segment.file];
    let wrong = |e| SourceError::from_io(&file.path, e);
    let (start, end) = bytes(segment.range);
    let (mut records, _) = records::open(store, file, input, start)?;
    let mut count = 0;
    while let Some(at) = records.next().map_err(wrong)?
        && at.offset < end
    {
        count += 1;
        records.skip().map_err(wrong)?;
    }
    Ok(count)
}

/// Cuts a segment before its record of this number, counted from 0.
fn cut(
    store: &Store,
    files: &[InputFile],
    input: &Input,
    segment: &Segment,
    record: u64,
) -> Result<(Segment, Segment), SourceError> {
    let file = &files[segment.file];
    let wrong = |e| SourceError::from_io(&file.path, e);
    let (before, after) = match segment.range {
        Range::Rows { start, end } => {
            let at = start + record;
            (Range::Rows { start, end: at }, Range::Rows { start: at, end })
        }
        Range::Bytes { start, end, line } => {
            let (mut records, _) = records::open(store, file, input, start)?;
            for _ in 0..record {
                records.next().map_err(wrong)?;
                records.skip().map_err(wrong)?;
            }
            let at = records.next().map_err(wrong)?;
            let (offset, newlines) = at.map_or((end, 0), |at| (at.offset, at.newlines));
            let after = Range::Bytes { start: offset, end, line: line.map(|l| l + newlines) };
            (Range::Bytes { start, end: offset, line }, after)
        }
    };
    let (from, to) = bytes(segment.range);
    let records = segment.records.unwrap_or(record);
    let part = |range: Range, records: u64| {
        let (start, end) = bytes(range);
        let weight = u128::from(segment.weight) * u128::from(end - start) / u128::from((to - from).max(1));
        Segment { file: segment.file, range, weight: weight as u64, records: Some(records) }
    };
    Ok((part(before, record), part(after, records - record)))
}
