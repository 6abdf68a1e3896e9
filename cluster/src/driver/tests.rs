use std::sync::Mutex;

use stillhouse_pipeline::events::Progress;
use stillhouse_pipeline::output::{Output, SplitCounts, SplitReport};
use stillhouse_schemas::manifest::{ShardRecord, Statistics};

use super::*;

fn report(worker: &str, warnings: &[(u64, &str)]) -> WorkerReport {
    let warning = |(number, message): &(u64, &str)| Warning { number: *number, message: (*message).to_owned() };
    WorkerReport {
        worker: worker.into(),
        holder: None,
        splits: Vec::new(),
        cannot: None,
        told: 0,
        progress: Progress::default(),
        warnings: warnings.iter().map(warning).collect(),
    }
}

fn work(folder: &std::path::Path, splits: Vec<SplitTask>) -> PendingSplits {
    let output = Output::on_disk(folder).unwrap();
    PendingSplits { splits, output, stop: Arc::default() }
}

/// The instant that long ago.
fn ago(time: Duration) -> Instant {
    Instant::now().checked_sub(time).unwrap()
}

#[test]
fn a_run_whose_splits_are_all_there_does_not_wait_for_a_scheduler_that_has_lost_an_end() {
    let folder = tempfile::tempdir().unwrap();
    let task = |was| SplitTask { split: SplitId(3), dataset_split: "train".into(), was };
    let fresh = work(folder.path(), vec![task(None)]);
    let mut commits = CommitWatcher::new(&fresh);
    commits.last_commit = ago(SETTLE_TIME);
    assert!(!commits.is_settled());
    commits.remaining.clear();
    assert!(commits.is_settled());
    commits.last_commit = Instant::now();
    assert!(!commits.is_settled());
}

#[test]
fn a_run_that_only_such_tell_of_as_cannot_make_it_ends_whoever_else_was_there_before() {
    let folder = tempfile::tempdir().unwrap();
    let work = work(folder.path(), Vec::new());
    let events = |_: DriverEvent| Ok(());
    let able = report("able", &[]);
    let unable = WorkerReport { cannot: Some("no room".into()), ..report("unable", &[]) };
    let reports = BTreeMap::from([("1".to_owned(), able), ("2".to_owned(), unable)]);
    let mut commits = CommitWatcher::new(&work);
    let mut ends = |able: Duration, passed: Duration| {
        commits.read_reports(&reports, &events).unwrap();
        commits.report_unable_executors(&reports, &events).unwrap();
        commits.last_reports.get_mut("1").unwrap().1 = ago(able);
        commits.last_unable = ago(passed);
        commits.report_unable_executors(&reports, &events).err().map(|e| (e.retryable, e.to_string()))
    };
    // another executor is still getting ready, or the last refusal is too recent
    assert_eq!(ends(Duration::ZERO, UNABLE_TIMEOUT * 2), None);
    assert_eq!(ends(UNABLE_TIMEOUT, Duration::ZERO), None);
    let (retryable, told) = ends(UNABLE_TIMEOUT, UNABLE_TIMEOUT).unwrap();
    assert!(retryable && told.contains("1 have said so") && told.contains("of executor unable: no room"), "{told}");
}

#[tokio::test]
async fn a_run_that_nobody_tells_of_ends() {
    let folder = tempfile::tempdir().unwrap();
    let work = work(folder.path(), Vec::new());
    let mut commits = CommitWatcher::new(&work);
    let events = |_: DriverEvent| Ok(());
    commits.last_listed = Instant::now() + Duration::from_hours(1);
    commits.last_remake = ago(NO_EXECUTOR_TIMEOUT);
    commits.last_commit = ago(NO_EXECUTOR_TIMEOUT / 2);
    commits.poll_if_due(&work, &events).await.unwrap();
    commits.last_commit = ago(NO_EXECUTOR_TIMEOUT);
    let error = commits.poll_if_due(&work, &events).await.unwrap_err();
    assert!(error.retryable && error.to_string().contains("within 60 minutes"), "{error}");
    commits.last_reports.insert("1".into(), (report("one", &[]), Instant::now()));
    commits.poll_if_due(&work, &events).await.unwrap();
}

#[tokio::test]
async fn a_run_that_makes_all_its_shards_again_warns_only_while_no_executor_works() {
    let folder = tempfile::tempdir().unwrap();
    let record: ShardRecord = serde_json::from_value(serde_json::json!({
        "path": "", "dataset_split": "train", "split": 3, "rows": 1, "tokens": 1, "bytes": 1, "sha256": "", "column_bytes": {},
        "statistics": Statistics::default(),
    }))
    .unwrap();
    let task = SplitTask { split: SplitId(3), dataset_split: "train".into(), was: Some(record) };
    let work = work(folder.path(), vec![task]);
    let mut commits = CommitWatcher::new(&work);
    commits.last_listed = Instant::now() + Duration::from_hours(1);
    let warned = Mutex::new(0);
    let events = |step: DriverEvent| {
        assert!(matches!(step, DriverEvent::Warning(_)), "{step:?}");
        *warned.lock().unwrap() += 1;
        Ok(())
    };
    let split =
        SplitReport { split: SplitId(3), reads: String::new(), stages: Vec::new(), counts: SplitCounts::default() };
    let at_work = WorkerReport { splits: vec![split], ..report("one", &[]) };
    commits.last_reports.insert("1".into(), (at_work, Instant::now()));
    (commits.last_commit, commits.last_remake) = (ago(NO_EXECUTOR_TIMEOUT), ago(NO_EXECUTOR_TIMEOUT));
    commits.poll_if_due(&work, &events).await.unwrap();
    assert_eq!(*warned.lock().unwrap(), 0);
    // the executor has left a moment ago
    commits.last_reports.clear();
    commits.poll_if_due(&work, &events).await.unwrap();
    assert_eq!(*warned.lock().unwrap(), 0);
    commits.last_remake = ago(FIRST_WARNING_AFTER);
    commits.poll_if_due(&work, &events).await.unwrap();
    assert_eq!(*warned.lock().unwrap(), 1);
}

#[test]
fn each_warning_of_executors_is_told_once() {
    let folder = tempfile::tempdir().unwrap();
    let work = work(folder.path(), Vec::new());
    let (mut commits, told) = (CommitWatcher::new(&work), Mutex::new(Vec::new()));
    let events = |step: DriverEvent| {
        let DriverEvent::Warning(message) = step else { panic!("{step:?}") };
        told.lock().unwrap().push(message);
        Ok(())
    };
    let mut new_warnings = |one: &[(u64, &str)], two: &[(u64, &str)]| {
        let reports = [("1".to_owned(), report("one", one)), ("2".to_owned(), report("two", two))];
        commits.report_warnings(&reports.into(), &events).unwrap();
        std::mem::take(&mut *told.lock().unwrap())
    };
    assert_eq!(new_warnings(&[(1, "a device is lost")], &[]), ["executor one: a device is lost"]);
    // a report that is read again adds nothing, and a warning of several executors is reported once
    assert!(new_warnings(&[(1, "a device is lost")], &[(1, "a device is lost")]).is_empty());
    // warnings that did not fit in a report are counted
    let said = new_warnings(&[(4, "d"), (5, "e")], &[(2, "e")]);
    assert_eq!(said, ["executor one: 2 more warnings, in its log", "executor one: d", "executor one: e"]);
}
