//! Notices that nothing moves any more, and says where everything stands.
//!
//! What moves is counted, not timed: rows out of any stage, commits, requests to stores. As long as one of the counts changes, the run is
//! alive, however slow. The watch is told the time, so a test needs none.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use stillhouse_schemas::ids::SplitId;

/// How long nothing may move before that is told.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Splits that are told of.
pub const MOST_SHOWN: usize = 8;

/// Watches counters.
#[derive(Debug)]
pub struct StallWatch {
    patience: Duration,
    moved: u64,
    since: Instant,
    /// Told again once so much time has passed without anything.
    next: Duration,
    splits: BTreeMap<SplitId, (u64, Instant)>,
}

/// Nothing has moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stall {
    /// For so long.
    pub time: Duration,
    /// The splits at work with the time since they moved, the longest still ones first.
    pub splits: Vec<(SplitId, Duration)>,
}

impl StallWatch {
    /// A watch that begins now.
    pub fn new(patience: Duration, now: Instant) -> Self {
        Self { patience, moved: 0, since: now, next: patience, splits: BTreeMap::new() }
    }

    /// Takes the counters: of the whole run, and of each split at work. Tells a stall after the patience, and again after twice the time.
    pub fn look(&mut self, now: Instant, moved: u64, splits: impl Iterator<Item = (SplitId, u64)>) -> Option<Stall> {
        let before = std::mem::take(&mut self.splits);
        for (split, rows) in splits {
            let since = before.get(&split).filter(|(was, _)| *was == rows).map_or(now, |(_, since)| *since);
            self.splits.insert(split, (rows, since));
        }
        if moved != self.moved {
            (self.moved, self.since, self.next) = (moved, now, self.patience);
            return None;
        }
        let time = now.saturating_duration_since(self.since);
        if time < self.next {
            return None;
        }
        self.next = time * 2;
        let mut splits: Vec<_> =
            self.splits.iter().map(|(split, (_, since))| (*split, now.saturating_duration_since(*since))).collect();
        splits.sort_by_key(|(split, still)| (std::cmp::Reverse(*still), *split));
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
        let mut watch = StallWatch::new(PATIENCE, began);
        let splits = |rows: u64| [(SplitId(4), 7), (SplitId(9), rows)].into_iter();
        assert_eq!(watch.look(at(1), 5, splits(1)), None);
        // slow is not still
        for second in 2..400 {
            assert_eq!(watch.look(at(second), 5 + second / 100, splits(1 + second / 100)), None);
        }
        let last = 300;
        let reported: Vec<u64> =
            (400..2000).filter(|second| watch.look(at(*second), 8, splits(4)).is_some()).map(|s| s - last).collect();
        assert_eq!(reported, [120, 240, 480, 960]);
        // it moves again, and stops again
        assert_eq!(watch.look(at(2000), 9, splits(5)), None);
        let stall = watch.look(at(2120), 9, splits(5)).unwrap();
        assert_eq!(stall.time, Duration::from_secs(120));
        assert_eq!(
            stall.splits,
            [(SplitId(4), Duration::from_secs(2119)), (SplitId(9), Duration::from_secs(120))],
            "the longest still one first"
        );
    }
}
