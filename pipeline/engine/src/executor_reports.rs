//! What a run knows about the work of its executors: their commits and their latest reports.
//!
//! ```text
//!   split ─ committed ────────────────► the counts of its record
//!         ─ in progress: of several
//!           attempts the one heard of
//!           most recently ────────────► the counts of that attempt
//!         ─ lost or abandoned ────────► nothing
//! ```
//!
//! The totals of an executor do not show how far a run is: they include lost attempts, and splits that others made
//! again. Times, devices and requests are sums over all reports, because lost work took time too.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use stillhouse_base::events::Progress;
use stillhouse_output::{SplitCounts, SplitReport, WorkerReport};
use stillhouse_schemas::ids::SplitId;
use stillhouse_schemas::manifest::{ShardRecord, Statistics};

/// Time after which the attempts of a silent executor count as lost. A live executor reports every 10 seconds.
const EXECUTOR_TIMEOUT: Duration = Duration::from_secs(45);

#[derive(Debug, Default)]
pub(crate) struct ExecutorReports {
    /// Counts of the shards that executors have committed for this run.
    committed: BTreeMap<SplitId, SplitCounts>,
    /// The latest report of each executor and when it last changed. The report of a dead executor stays unchanged.
    reports: BTreeMap<String, (WorkerReport, Instant)>,
    /// The counted attempt of each split that is not committed.
    attempts: BTreeMap<SplitId, Attempt>,
    updates: u64,
}

#[derive(Debug)]
struct Attempt {
    counts: SplitCounts,
    /// The number of the last update that contained it.
    last_update: u64,
}

impl ExecutorReports {
    pub fn add_committed(&mut self, record: &ShardRecord) {
        let Statistics { documents, text_bytes, text_tokens, predicted_tokens, .. } = record.statistics;
        let counts = SplitCounts {
            documents,
            text_bytes,
            tokens: text_tokens,
            sequences: record.rows,
            teacher_tokens: predicted_tokens,
        };
        self.committed.insert(record.split, counts);
        self.attempts.remove(&record.split);
    }

    pub fn update(&mut self, reports: BTreeMap<String, WorkerReport>, now: Instant) {
        self.updates += 1;
        let mut previous = std::mem::take(&mut self.reports);
        for (name, report) in reports {
            let changed_at = match previous.remove(&name) {
                Some((unchanged, changed_at)) if unchanged == report => changed_at,
                _ => now,
            };
            self.reports.insert(name, (report, changed_at));
        }
        let mut latest: BTreeMap<SplitId, (Instant, &SplitReport)> = BTreeMap::new();
        for (report, changed_at) in self.reports.values() {
            let is_alive = now.saturating_duration_since(*changed_at) < EXECUTOR_TIMEOUT;
            for split in report.splits.iter().filter(|split| is_alive && !self.committed.contains_key(&split.split)) {
                let newer =
                    |(then, other): &(Instant, &SplitReport)| (*then, other.rows()) < (*changed_at, split.rows());
                if latest.get(&split.split).is_none_or(newer) {
                    latest.insert(split.split, (*changed_at, split));
                }
            }
        }
        let update = self.updates;
        let attempts =
            latest.into_iter().map(|(id, (_, split))| (id, Attempt { counts: split.counts, last_update: update }));
        self.attempts.extend(attempts);
        // A split that left the reports may just have been committed: keep it for one more update.
        self.attempts.retain(|_, attempt| attempt.last_update + 1 >= update);
    }

    /// Adds everything known to `progress`. Reports are up to 10 seconds old.
    pub fn add_to(&self, progress: &mut Progress) {
        let mut sum = SplitCounts {
            documents: progress.documents,
            text_bytes: progress.text_bytes,
            tokens: progress.tokens,
            sequences: progress.sequences,
            teacher_tokens: progress.teacher_tokens,
        };
        self.reports.values().for_each(|(report, _)| progress.add(&report.progress));
        self.committed.values().for_each(|counts| sum.add(counts));
        self.attempts.values().for_each(|attempt| sum.add(&attempt.counts));
        progress.documents = sum.documents;
        progress.text_bytes = sum.text_bytes;
        progress.tokens = sum.tokens;
        progress.sequences = sum.sequences;
        progress.teacher_tokens = sum.teacher_tokens;
    }

    /// Returns the splits in progress that `wanted` accepts, each with the executor that makes it. If two executors
    /// report a split, the one with more rows counts: the other one has abandoned it.
    pub fn splits_in_progress(&self, wanted: impl Fn(SplitId) -> bool) -> BTreeMap<SplitId, SplitReport> {
        let mut all: BTreeMap<SplitId, SplitReport> = BTreeMap::new();
        for (report, _) in self.reports.values() {
            for split in report.splits.iter().filter(|split| wanted(split.split)) {
                let reads = format!("{}, executor {}", split.reads, report.worker);
                let labelled = SplitReport { reads: reads.trim_start_matches(", ").to_owned(), ..split.clone() };
                match all.get(&split.split) {
                    Some(other) if other.rows() >= labelled.rows() => {}
                    _ => drop(all.insert(split.split, labelled)),
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillhouse_base::events::{StageProgress, StageStatus};

    /// A worker that has read `total` documents, `rows` of them of `split`.
    fn report(worker: &str, split: u32, rows: u64, total: u64) -> WorkerReport {
        let stages = vec![StageStatus { name: "pack".into(), rows, doing: "is at work".into() }];
        let stage = StageProgress { name: "pack".into(), rows, busy_seconds: 0.5, awaited_seconds: 0.25 };
        let counts = SplitCounts { documents: rows, tokens: 10 * rows, ..SplitCounts::default() };
        WorkerReport {
            worker: worker.into(),
            holder: None,
            splits: vec![SplitReport { split: SplitId(split), reads: "a.jsonl".into(), stages, counts }],
            cannot: None,
            told: 0,
            progress: Progress {
                documents: total,
                tokens: 10 * total,
                devices: 1,
                stages: vec![stage],
                ..Progress::default()
            },
            warnings: Vec::new(),
        }
    }

    fn record(split: u32, documents: u64) -> ShardRecord {
        let statistics = Statistics { documents, text_tokens: 10 * documents, ..Statistics::default() };
        ShardRecord {
            split: SplitId(split),
            dataset_split: "train".into(),
            path: String::new(),
            rows: documents,
            tokens: 1000,
            bytes: 1,
            sha256: String::new(),
            footer: None,
            column_bytes: BTreeMap::new(),
            input_sha256: Vec::new(),
            statistics,
        }
    }

    fn update(executors: &mut ExecutorReports, now: Instant, reports: &[WorkerReport]) -> (u64, u64) {
        executors.update(reports.iter().map(|at| (at.worker.clone(), at.clone())).collect(), now);
        counted(executors)
    }

    fn counted(executors: &ExecutorReports) -> (u64, u64) {
        let mut progress = Progress::default();
        executors.add_to(&mut progress);
        (progress.documents, progress.tokens)
    }

    #[test]
    fn what_all_have_told_is_one_progress() {
        let (mut executors, now) = (ExecutorReports::default(), Instant::now());
        update(&mut executors, now, &[report("a", 7, 30, 30), report("b", 8, 20, 20)]);
        let mut progress = Progress { splits: 9, bytes: 5, ..Progress::default() };
        executors.add_to(&mut progress);
        assert_eq!((progress.documents, progress.tokens, progress.devices), (50, 500, 2));
        assert_eq!((progress.splits, progress.bytes), (9, 5), "the run knows these itself");
        let [pack] = progress.stages.as_slice() else { panic!("{:?}", progress.stages) };
        assert_eq!((pack.rows, pack.busy_seconds), (50, 1.0));
        // Each report replaces the previous one.
        assert_eq!(update(&mut executors, now, &[report("a", 7, 31, 31), report("b", 8, 20, 20)]), (51, 510));
        executors.add_committed(&record(7, 33));
        assert_eq!(counted(&executors), (53, 530), "its record is what counts, once");
        executors.add_committed(&record(7, 33));
        assert_eq!(counted(&executors), (53, 530), "told twice");
    }

    /// Two splits hold 33 documents; one executor is killed. The count never exceeds 33.
    #[test]
    fn documents_of_lost_attempts_are_not_counted_again() {
        let (mut executors, began) = (ExecutorReports::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let killed = report("killed", 1, 13, 13);
        assert_eq!(update(&mut executors, at(0), &[killed.clone(), report("b", 2, 10, 10)]), (23, 230));
        // b finishes its split and starts the other one from the beginning; the killed executor's report stays
        // unchanged
        assert_eq!(
            update(&mut executors, at(10), &[killed.clone(), report("b", 1, 2, 22)]).0,
            2 + 10,
            "2 is not committed yet"
        );
        executors.add_committed(&record(2, 20));
        assert_eq!(counted(&executors), (22, 220));
        assert_eq!(update(&mut executors, at(20), &[killed.clone(), report("b", 1, 12, 32)]), (32, 320));
        executors.add_committed(&record(1, 13));
        assert_eq!(update(&mut executors, at(30), &[killed, report("b", 9, 0, 33)]), (33, 330));
    }

    #[test]
    fn an_attempt_of_which_nothing_is_heard_any_more_is_lost() {
        let (mut executors, began) = (ExecutorReports::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let killed = report("killed", 1, 13, 13);
        for (seconds, documents) in [(0, 13), (30, 13), (44, 13), (45, 13), (46, 0)] {
            assert_eq!(
                update(&mut executors, at(seconds), std::slice::from_ref(&killed)).0,
                documents,
                "after {seconds} s"
            );
        }
        // A slow executor is not lost: its report counter still changes.
        let slow = WorkerReport { told: 1, ..killed.clone() };
        assert_eq!(update(&mut executors, at(100), &[slow]).0, 13);
        // a live executor abandons the split
        let other = WorkerReport { splits: Vec::new(), ..killed };
        assert_eq!(update(&mut executors, at(101), std::slice::from_ref(&other)).0, 13, "may be committed by now");
        assert_eq!(update(&mut executors, at(102), &[other]).0, 0);
    }

    #[test]
    fn a_split_stands_where_the_furthest_has_it() {
        let mut executors = ExecutorReports::default();
        update(&mut executors, Instant::now(), &[report("a", 7, 5, 5), report("b", 7, 9, 9), report("c", 8, 1, 1)]);
        let splits = executors.splits_in_progress(|split| split == SplitId(7));
        assert_eq!(splits.keys().copied().collect::<Vec<_>>(), [SplitId(7)], "the other is committed");
        assert_eq!((splits[&SplitId(7)].reads.as_str(), splits[&SplitId(7)].rows()), ("a.jsonl, executor b", 9));
    }
}
