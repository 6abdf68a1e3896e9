//! Detects that a run has stalled, and which splits have not moved.
//!
//! The watch compares counters instead of measuring speed: rows emitted by any stage, commits, and store requests.
//! While one of them changes, the run is alive, however slow. Callers pass the time, so tests need no clock.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use stillhouse_schemas::ids::SplitId;

/// Time without movement after which a stall is reported.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum number of splits in a stall report.
pub const MAX_SPLITS_SHOWN: usize = 8;

/// Detects counters that have stopped changing.
#[derive(Debug)]
pub struct StallWatch {
    timeout: Duration,
    moved: u64,
    since: Instant,
    /// Time without movement at which the next report is due.
    next_report: Duration,
    splits: BTreeMap<SplitId, (u64, Instant)>,
}

/// A stall.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stall {
    /// Time since anything moved.
    pub time: Duration,
    /// The splits in progress and the time since each moved, longest first.
    pub splits: Vec<(SplitId, Duration)>,
}

impl StallWatch {
    /// A watch that starts at `now`.
    pub fn new(timeout: Duration, now: Instant) -> Self {
        Self { timeout, moved: 0, since: now, next_report: timeout, splits: BTreeMap::new() }
    }

    /// Compares the counters of the whole run and of each split in progress. Returns a stall after the timeout, then
    /// each time the stall has lasted twice as long as at the previous report.
    pub fn observe(&mut self, now: Instant, moved: u64, splits: impl Iterator<Item = (SplitId, u64)>) -> Option<Stall> {
        let previous = std::mem::take(&mut self.splits);
        for (split, rows) in splits {
            let since = previous
                .get(&split)
                .filter(|(previous_rows, _)| *previous_rows == rows)
                .map_or(now, |(_, since)| *since);
            self.splits.insert(split, (rows, since));
        }
        if moved != self.moved {
            (self.moved, self.since, self.next_report) = (moved, now, self.timeout);
            return None;
        }
        let time = now.saturating_duration_since(self.since);
        if time < self.next_report {
            return None;
        }
        self.next_report = time * 2;
        let mut splits: Vec<_> =
            self.splits.iter().map(|(split, (_, since))| (*split, now.saturating_duration_since(*since))).collect();
        splits.sort_by_key(|(split, idle)| (std::cmp::Reverse(*idle), *split));
        Some(Stall { time, splits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_is_reported_after_the_patience_and_at_doubling_intervals() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut watch = StallWatch::new(STALL_TIMEOUT, began);
        let splits = |rows: u64| [(SplitId(4), 7), (SplitId(9), rows)].into_iter();
        assert_eq!(watch.observe(at(1), 5, splits(1)), None);
        // slow progress is not a stall
        for second in 2..400 {
            assert_eq!(watch.observe(at(second), 5 + second / 100, splits(1 + second / 100)), None);
        }
        let last = 300;
        let reported: Vec<u64> =
            (400..2000).filter(|second| watch.observe(at(*second), 8, splits(4)).is_some()).map(|s| s - last).collect();
        assert_eq!(reported, [120, 240, 480, 960]);
        // it moves again, then stops again
        assert_eq!(watch.observe(at(2000), 9, splits(5)), None);
        let stall = watch.observe(at(2120), 9, splits(5)).unwrap();
        assert_eq!(stall.time, Duration::from_secs(120));
        assert_eq!(
            stall.splits,
            [(SplitId(4), Duration::from_secs(2119)), (SplitId(9), Duration::from_secs(120))],
            "the longest still one first"
        );
    }
}
