//! What a run knows of the work that other processes do for it: what they have committed, and what they have last told.

use std::collections::BTreeMap;

use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::ShardRecord;

use crate::events::Progress;
use crate::output::{AtWork, SplitAtWork};

#[derive(Debug, Default)]
pub(super) struct Elsewhere {
    /// Sums over the shards that others have committed for this run.
    documents: u64,
    sequences: u64,
    tokens: u64,
    /// What each has told last.
    reports: BTreeMap<String, AtWork>,
}

impl Elsewhere {
    pub fn committed(&mut self, record: &ShardRecord) {
        self.documents += record.statistics.documents;
        self.sequences += record.rows;
        self.tokens += record.tokens;
    }

    pub fn told(&mut self, reports: BTreeMap<String, AtWork>) {
        self.reports = reports;
    }

    /// Adds all that is known. Reports are up to ten seconds old, and what was committed may be ahead of them.
    pub fn add_to(&self, progress: &mut Progress) {
        self.reports.values().for_each(|at| progress.add(&at.progress));
        progress.documents = progress.documents.max(self.documents);
        progress.sequences = progress.sequences.max(self.sequences);
        progress.tokens = progress.tokens.max(self.tokens);
    }

    /// The splits at work that are wanted, each with the executor that makes it. Where two tell of one, the one that is further counts: the other
    /// was given up.
    pub fn at_work(&self, wanted: impl Fn(SplitId) -> bool) -> BTreeMap<SplitId, SplitAtWork> {
        let mut all: BTreeMap<SplitId, SplitAtWork> = BTreeMap::new();
        for at in self.reports.values() {
            for split in at.splits.iter().filter(|at| wanted(at.split)) {
                let reads = format!("{}, executor {}", split.reads, at.worker);
                let placed = SplitAtWork { reads: reads.trim_start_matches(", ").to_owned(), ..split.clone() };
                match all.get(&split.split) {
                    Some(other) if other.rows() >= placed.rows() => {}
                    _ => drop(all.insert(split.split, placed)),
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{StageProgress, StageStatus};

    fn report(worker: &str, split: u32, rows: u64) -> AtWork {
        let stages = vec![StageStatus { name: "pack".into(), rows, doing: "is at work".into() }];
        let stage = StageProgress { name: "pack".into(), rows, busy_seconds: 0.5, awaited_seconds: 0.25 };
        AtWork {
            worker: worker.into(),
            holder: None,
            splits: vec![SplitAtWork { split: SplitId(split), reads: "a.jsonl".into(), stages }],
            cannot: None,
            told: 0,
            progress: Progress { documents: rows, devices: 1, stages: vec![stage], ..Progress::default() },
            warnings: Vec::new(),
        }
    }

    #[test]
    fn what_all_have_told_is_one_progress() {
        let mut elsewhere = Elsewhere { documents: 40, sequences: 3, ..Elsewhere::default() };
        elsewhere.told([("1".into(), report("a", 7, 30)), ("2".into(), report("b", 8, 20))].into());
        let mut progress = Progress { splits: 9, bytes: 5, ..Progress::default() };
        elsewhere.add_to(&mut progress);
        assert_eq!((progress.documents, progress.sequences, progress.devices), (50, 3, 2));
        assert_eq!((progress.splits, progress.bytes), (9, 5), "the run knows these itself");
        let [pack] = progress.stages.as_slice() else { panic!("{:?}", progress.stages) };
        assert_eq!((pack.rows, pack.busy_seconds), (50, 1.0));
        // each report takes the place of the one before
        elsewhere.told([("1".into(), report("a", 7, 31))].into());
        let mut progress = Progress::default();
        elsewhere.add_to(&mut progress);
        assert_eq!((progress.documents, progress.devices), (40, 1), "what is committed counts");
    }

    #[test]
    fn a_split_stands_where_the_furthest_has_it() {
        let mut elsewhere = Elsewhere::default();
        let reports = [("1", report("a", 7, 5)), ("2", report("b", 7, 9)), ("3", report("c", 8, 1))];
        elsewhere.told(reports.map(|(name, at)| (name.to_owned(), at)).into());
        let at_work = elsewhere.at_work(|split| split == SplitId(7));
        assert_eq!(at_work.keys().copied().collect::<Vec<_>>(), [SplitId(7)], "the other is committed");
        assert_eq!((at_work[&SplitId(7)].reads.as_str(), at_work[&SplitId(7)].rows()), ("a.jsonl, executor b", 9));
    }
}
