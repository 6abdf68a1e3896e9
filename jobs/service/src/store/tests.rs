use std::time::Duration;

use super::events::Position;
use super::jobs::{self, Filter, IdempotencyKey, NewJob, QueueLimits, Submitted};
use super::tokens::{self, Scope};
use super::*;
use crate::model::{EventType, Failure, FailureKind, Job, Slot, Time};

const LIMITS: QueueLimits = QueueLimits { all: 100, per_user: 50 };

fn open() -> (tempfile::TempDir, Arc<Store>) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    (folder, store)
}

fn new(user: &str, priority: i32, slot: Slot) -> NewJob {
    let id = JobId::new().unwrap();
    NewJob {
        output: format!("/out/{id}"),
        id,
        name: "n".into(),
        user: user.into(),
        priority,
        slot,
        media_type: "application/yaml".into(),
        file: "version: 1".into(),
        folder: "/".into(),
        max_attempts: 2,
        time_limit_seconds: 10,
        output_limit_bytes: 10,
        overwrite: false,
        append: false,
    }
}

fn submit(store: &Store, user: &str, priority: i32, slot: Slot, at: i64) -> JobId {
    let new = new(user, priority, slot);
    let submitted = store.write_blocking(|t, appended| jobs::submit(t, &new, None, LIMITS, Time(at), appended));
    assert!(matches!(submitted.unwrap(), Submitted::New(_)));
    new.id
}

fn take(store: &Store, free: &[Slot], at: i64) -> Option<JobId> {
    store
        .write_blocking(|t, appended| jobs::take_next(t, free, Time(at), appended))
        .unwrap()
        .map(|task| task.job_ref.id)
}

fn end(store: &Store, id: &JobId, to: JobState, at: i64) {
    store
        .write_blocking(|t, appended| {
            let (job_ref, state) = jobs::job_ref(t, id)?;
            attempts::end(t, job_ref.seq, "x", None, Time(at))?;
            jobs::transition(t, &job_ref, state, to, Some("because"), Time(at), appended)
        })
        .unwrap();
}

fn get(store: &Store, id: &JobId) -> Job {
    store.read_blocking(|c| jobs::get_with_position(c, id)).unwrap()
}

#[test]
fn priority_goes_first_then_users_take_turns() {
    let (_folder, store) = open();
    let a: Vec<JobId> = (0..3).map(|n| submit(&store, "a", 0, Slot::Cpu, n)).collect();
    let b: Vec<JobId> = (10..13).map(|n| submit(&store, "b", 0, Slot::Cpu, n)).collect();
    let urgent = submit(&store, "a", 5, Slot::Cpu, 20);
    assert_eq!(get(&store, &urgent).queue_position, Some(1));
    assert_eq!(get(&store, &b[2]).queue_position, Some(7));
    let mut order = Vec::new();
    for n in 0..7 {
        let id = take(&store, &[Slot::Cpu], 100 + 10 * n).unwrap();
        end(&store, &id, JobState::Succeeded, 105 + 10 * n);
        order.push(id);
    }
    // a's urgent job counts for a, so b is next; then the two alternate
    let expected = [&urgent, &b[0], &a[0], &b[1], &a[1], &b[2], &a[2]];
    assert_eq!(order.iter().collect::<Vec<_>>(), expected);
    assert_eq!(take(&store, &[Slot::Cpu], 500), None);
}

#[test]
fn who_runs_nothing_goes_before_who_runs_something() {
    let (_folder, store) = open();
    let long = submit(&store, "a", 0, Slot::Cpu, 0);
    let second = submit(&store, "a", 0, Slot::Cpu, 1);
    let other = submit(&store, "b", 0, Slot::Cpu, 2);
    assert_eq!(take(&store, &[Slot::Cpu], 10), Some(long));
    assert_eq!(take(&store, &[Slot::Cpu], 11), Some(other));
    assert_eq!(take(&store, &[Slot::Cpu], 12), Some(second));
}

#[test]
fn a_job_whose_slot_is_taken_keeps_nobody_waiting() {
    let (_folder, store) = open();
    let gpu = submit(&store, "a", 50, Slot::AnyGpu, 0);
    let pinned = submit(&store, "a", 60, Slot::Gpu(1), 1);
    let cpu = submit(&store, "a", 0, Slot::Cpu, 2);
    assert_eq!(take(&store, &[], 10), None);
    assert_eq!(take(&store, &[Slot::Cpu], 10), Some(cpu));
    assert_eq!(take(&store, &[Slot::AnyGpu, Slot::Gpu(0)], 11), Some(gpu));
    assert_eq!(take(&store, &[Slot::AnyGpu, Slot::Gpu(1)], 12), Some(pinned));
}

#[test]
fn of_jobs_with_one_output_one_is_at_work() {
    let (_folder, store) = open();
    let first = submit(&store, "a", 0, Slot::Cpu, 0);
    let same = NewJob { output: get(&store, &first).output, ..new("b", 90, Slot::Cpu) };
    store.write_blocking(|t, appended| jobs::submit(t, &same, None, LIMITS, Time(1), appended)).unwrap();
    let other = submit(&store, "c", 0, Slot::Cpu, 2);
    assert_eq!(take(&store, &[Slot::Cpu], 3), Some(same.id.clone()));
    assert_eq!(take(&store, &[Slot::Cpu], 4), Some(other));
    assert_eq!(take(&store, &[Slot::Cpu], 5), None);
    end(&store, &same.id, JobState::Succeeded, 6);
    assert_eq!(take(&store, &[Slot::Cpu], 7), Some(first));
}

#[test]
fn a_failed_attempt_waits_and_is_queued_again() {
    let (_folder, store) = open();
    let id = submit(&store, "a", 0, Slot::Cpu, 0);
    take(&store, &[Slot::Cpu], 1).unwrap();
    let failure = Failure { kind: FailureKind::Machine, message: "crashed".into(), problems: Vec::new() };
    let seq = store.read_blocking(|c| jobs::job_ref(c, &id)).unwrap().0.seq;
    store.write_blocking(|t, _| attempts::fail(t, seq, &failure, Some(Time(500)))).unwrap();
    end(&store, &id, JobState::Retrying, 2);
    let job = get(&store, &id);
    assert_eq!((job.state, job.failures, job.not_before), (JobState::Retrying, 1, Some(Time(500))));
    assert_eq!(job.failure, Some(failure));
    let due = |at| {
        store
            .write_blocking(|t, appended| jobs::requeue_due(t, Time(at), Duration::from_secs(3_600), appended))
            .unwrap()
    };
    assert_eq!(due(499), Some(Time(500)));
    // after the clock is set back, no job waits longer than the longest backoff
    let set_back = 500 - 3 * 86_400_000;
    assert_eq!(due(set_back), Some(Time(set_back + 3_600_000)));
    assert_eq!(due(set_back + 3_599_999), Some(Time(set_back + 3_600_000)));
    store.write_blocking(|t, _| Ok(t.execute("UPDATE jobs SET not_before = 500", [])?)).unwrap();
    assert_eq!(get(&store, &id).state, JobState::Retrying);
    assert_eq!(due(500), None);
    assert_eq!(take(&store, &[Slot::Cpu], 501), Some(id.clone()));
    let job = get(&store, &id);
    assert_eq!((job.attempt, job.failures, job.failure, job.not_before), (2, 1, None, None));
    // a retry by hand resets the failures but continues the numbers of attempts
    end(&store, &id, JobState::Failed, 502);
    store.write_blocking(|t, appended| jobs::retry(t, &id, "ada", Time(503), appended)).unwrap();
    let job = get(&store, &id);
    assert_eq!((job.state, job.attempt, job.failures, job.finished_at), (JobState::Retrying, 2, 0, None));
    assert_eq!(job.reason.as_deref(), Some("retried by ada"));
}

#[test]
fn every_change_is_an_event_in_order() {
    let (_folder, store) = open();
    let mut watcher = store.subscribe();
    let id = submit(&store, "a", 0, Slot::Cpu, 1);
    take(&store, &[Slot::Cpu], 2).unwrap();
    store.write_blocking(|t, appended| jobs::cancel(t, &id, "bob", Time(3), appended)).unwrap();
    end(&store, &id, JobState::Cancelled, 4);
    let history = store.read_blocking(|c| events::history(c, &id, 0, 10)).unwrap();
    let states: Vec<_> = history.iter().map(|e| (e.time.0, e.data["to"].as_str().unwrap().to_owned())).collect();
    let expected = [(1, "queued"), (2, "running"), (3, "cancelling"), (4, "cancelled")];
    assert_eq!(states, expected.map(|(at, to)| (at, to.to_owned())));
    let live: Vec<_> = std::iter::from_fn(|| watcher.try_recv().ok()).map(|e| e.as_ref().clone()).collect();
    assert_eq!(live, history);
    let after = history[1].seq.unwrap();
    assert_eq!(store.read_blocking(|c| events::history(c, &id, after, 1)).unwrap(), history[2..3]);
}

#[test]
fn what_the_diagram_has_not_changes_nothing() {
    let (_folder, store) = open();
    let id = submit(&store, "a", 0, Slot::Cpu, 1);
    let wrong = store.write_blocking(|t, appended| {
        let (job_ref, state) = jobs::job_ref(t, &id)?;
        jobs::transition(t, &job_ref, state, JobState::Succeeded, None, Time(2), appended)
    });
    assert!(matches!(wrong, Err(StoreError::Inconsistent(_))), "{wrong:?}");
    assert_eq!(get(&store, &id).state, JobState::Queued);
    assert!(matches!(store.write_blocking(|t, _| jobs::delete(t, &id)), Err(StoreError::WrongState { .. })));
    let retried = store.write_blocking(|t, appended| jobs::retry(t, &id, "a", Time(2), appended));
    assert!(matches!(retried, Err(StoreError::WrongState { .. })));
}

#[test]
fn a_key_gives_one_job() {
    let (_folder, store) = open();
    let key = |request| IdempotencyKey { text: "k".into(), request: [request; 32] };
    let send = |user: &str, request| {
        let job = new(user, 0, Slot::Cpu);
        store.write_blocking(|t, appended| jobs::submit(t, &job, Some(&key(request)), LIMITS, Time(1), appended))
    };
    let Submitted::New(first) = send("a", 1).unwrap() else { panic!() };
    let Submitted::Existing(same) = send("a", 1).unwrap() else { panic!() };
    assert_eq!(same, first);
    assert!(matches!(send("a", 2), Err(StoreError::KeyReused)));
    assert!(matches!(send("b", 2).unwrap(), Submitted::New(_)), "a key is the user's own");
    // deleting a job deletes its key
    end(&store, &take(&store, &[Slot::Cpu], 2).unwrap(), JobState::Succeeded, 3);
    store.write_blocking(|t, _| jobs::delete(t, &first.id)).unwrap();
    assert!(matches!(send("a", 2).unwrap(), Submitted::New(_)));
}

#[test]
fn queues_are_bounded_for_all_and_for_each() {
    let (_folder, store) = open();
    let send = |user: &str| {
        let limits = QueueLimits { all: 3, per_user: 2 };
        let job = new(user, 0, Slot::Cpu);
        store.write_blocking(|t, appended| jobs::submit(t, &job, None, limits, Time(1), appended))
    };
    send("a").unwrap();
    send("a").unwrap();
    assert!(send("a").unwrap_err().to_string().contains("limits.queued_jobs_per_user"));
    send("b").unwrap();
    assert!(send("b").unwrap_err().to_string().contains("limits.queued_jobs)"));
    // a running job does not count as waiting
    take(&store, &[Slot::Cpu], 2).unwrap();
    send("b").unwrap();
}

#[test]
fn pages_have_no_gaps_and_no_doubles() {
    let (_folder, store) = open();
    let all: Vec<JobId> =
        (0..25).map(|n| submit(&store, if n % 5 == 0 { "b" } else { "a" }, 0, Slot::Cpu, n)).collect();
    let mut filter = Filter { limit: 10, ..Filter::default() };
    let mut seen = Vec::new();
    loop {
        let (page, next) = store.read_blocking(|c| jobs::list(c, &filter)).unwrap();
        seen.extend(page.into_iter().map(|j| j.id));
        // newer jobs do not appear on later pages
        submit(&store, "a", 0, Slot::Cpu, 100);
        filter.before = next;
        if next.is_none() {
            break;
        }
    }
    assert_eq!(seen, all.iter().rev().cloned().collect::<Vec<_>>());
    let of_b = Filter { user: Some("b".into()), states: vec![JobState::Queued], limit: 5, ..Filter::default() };
    let (page, next) = store.read_blocking(|c| jobs::list(c, &of_b)).unwrap();
    assert_eq!((page.len(), next), (5, None));
    let none = Filter { states: vec![JobState::Failed, JobState::Running], limit: 5, ..Filter::default() };
    assert!(store.read_blocking(|c| jobs::list(c, &none)).unwrap().0.is_empty());
}

#[test]
fn tokens_are_good_until_they_are_over_or_revoked() {
    let (folder, store) = open();
    let make = |over| store.write_blocking(|t, _| tokens::create(t, "ada", &[Scope::Read], over, Time(0))).unwrap();
    let (token, short) = (make(None), make(Some(Time(0).after(Duration::from_secs(1)))));
    let holder = |text: &str, at| store.read_blocking(|c| tokens::holder(c, text, Time(at))).unwrap().map(|h| h.user);
    let text = token.to_string();
    assert_eq!(holder(&text, 5), Some("ada".into()));
    let is_good = |id: &str, at| store.read_blocking(|c| tokens::is_good(c, id, Time(at))).unwrap();
    assert!(is_good(&token.id, 5) && is_good(&short.id, 999) && !is_good(&short.id, 1000) && !is_good("nobody", 5));
    assert_eq!((holder(&short.to_string(), 999), holder(&short.to_string(), 1000)), (Some("ada".into()), None));
    let other = make(None);
    let mixed = format!("sh_{}_{}", other.id, text.rsplit('_').next().unwrap());
    let longer = format!("{text}0");
    for wrong in ["", "sh_", "sh__", &text[..text.len() - 1], &longer, &mixed, &text.to_uppercase(), &text[3..]] {
        assert_eq!(holder(wrong, 5), None, "{wrong}");
    }
    assert!(store.write_blocking(|t, _| tokens::revoke(t, &token.id, Time(6))).unwrap());
    assert_eq!(holder(&text, 7), None);
    assert!(!is_good(&token.id, 7));
    assert!(!store.write_blocking(|t, _| tokens::revoke(t, "nobody", Time(6))).unwrap());
    // no file in the folder contains the secret
    drop(store);
    let secret = text.rsplit('_').next().unwrap().as_bytes();
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        assert!(!bytes.windows(secret.len()).any(|w| w == secret));
    }
}

#[test]
fn a_store_survives_and_a_newer_one_is_refused() {
    let (folder, store) = open();
    let id = submit(&store, "a", 0, Slot::Cpu, 1);
    drop(store);
    let again = Store::open(folder.path()).unwrap();
    assert_eq!(get(&again, &id).state, JobState::Queued);
    again.write_blocking(|t, _| Ok(t.pragma_update(None, "user_version", 99)?)).unwrap();
    drop(again);
    let refused = Store::open(folder.path()).err().unwrap().to_string();
    assert!(refused.contains("version 99"), "{refused}");
}

/// A store of the first version with a job in it migrates to the current version.
#[test]
fn a_store_of_an_earlier_version_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let earlier = rusqlite::Connection::open(folder.path().join(FILE)).unwrap();
    earlier.execute_batch(include_str!("001_first.sql")).unwrap();
    let sql = "INSERT INTO jobs (id, name, user, state, priority, slot, media_type, file, folder, created_at, updated_at,
                   queued_at, max_attempts, time_limit, output_limit, overwrite, output)
               VALUES ('k3v9x0m2t8qa', 'n', 'a', 'queued', 0, 'cpu', 'application/yaml', '', '/', 1, 1, 1, 1, 1, 1, 0, '/out')";
    earlier.execute(sql, []).unwrap();
    earlier.pragma_update(None, "user_version", 1).unwrap();
    drop(earlier);
    let store = Store::open(folder.path()).unwrap();
    let id: JobId = "k3v9x0m2t8qa".parse().unwrap();
    assert_eq!((get(&store, &id).state, get(&store, &id).append), (JobState::Queued, false));
    let mut grown = new("a", 5, Slot::Cpu);
    grown.append = true;
    let submitted =
        store.write_blocking(|t, appended| jobs::submit(t, &grown, None, LIMITS, Time(2), appended)).unwrap();
    assert!(matches!(submitted, Submitted::New(job) if job.append));
    let taken =
        store.write_blocking(|t, appended| jobs::take_next(t, &[Slot::Cpu], Time(3), appended)).unwrap().unwrap();
    assert!(taken.job_ref.id == grown.id && taken.append);
    let filter = Filter { limit: 1, ..Filter::default() };
    let (page, next) = store.read_blocking(|c| jobs::list(c, &filter)).unwrap();
    assert!(page[0].append && next.is_some());
}

#[test]
fn what_another_version_kept_does_not_hide_a_job() {
    let (_folder, store) = open();
    let id = submit(&store, "a", 0, Slot::Cpu, 1);
    let set = |progress: &str| {
        let sql = "UPDATE jobs SET progress = ? WHERE id = ?";
        store.write_blocking(|t, _| Ok(t.execute(sql, [progress, id.as_str()])?)).unwrap();
        get(&store, &id).progress
    };
    assert_eq!(set("{\"splits\": 3, \"of_a_newer_version\": 1}").unwrap().splits, 3);
    assert_eq!(set("\"x\""), None);
    assert_eq!(store.read_blocking(|c| jobs::list(c, &Filter { limit: 5, ..Filter::default() })).unwrap().0.len(), 1);
}

#[test]
fn equals_go_by_age_and_all_of_the_last_day_counts() {
    let (_folder, store) = open();
    let first = submit(&store, "z", 0, Slot::Cpu, 0);
    let second = submit(&store, "a", 0, Slot::Cpu, 1);
    assert_eq!(take(&store, &[Slot::Cpu], 10), Some(first.clone()), "not the first of the alphabet");
    const HOUR: i64 = 3_600_000;
    // z's job ran for 30 hours; 24 of them are in the last day although it began before
    end(&store, &first, JobState::Succeeded, 30 * HOUR);
    assert_eq!(take(&store, &[Slot::Cpu], 30 * HOUR), Some(second.clone()));
    end(&store, &second, JobState::Succeeded, 31 * HOUR);
    submit(&store, "z", 0, Slot::Cpu, 31 * HOUR);
    let of_a = submit(&store, "a", 0, Slot::Cpu, 31 * HOUR + 1);
    assert_eq!(take(&store, &[Slot::Cpu], 31 * HOUR + 2), Some(of_a));
}

#[test]
fn a_watcher_of_all_jobs_is_reported_what_it_missed_or_that_it_is_gone() {
    let (_folder, store) = open();
    let a = submit(&store, "a", 0, Slot::Cpu, 1);
    let b = submit(&store, "b", 0, Slot::Cpu, 2);
    take(&store, &[Slot::Cpu], 3).unwrap();
    store
        .write_blocking(|t, appended| {
            let (job_ref, _) = jobs::job_ref(t, &a)?;
            appended.push(events::add(t, &job_ref, EventType::Preparing, serde_json::json!({"what": "x"}), Time(4))?);
            Ok(())
        })
        .unwrap();
    end(&store, &a, JobState::Succeeded, 5);
    let changes = |user: Option<&str>, after, limit| {
        let read = store.read_blocking(|c| events::state_changes(c, user, after, limit)).unwrap();
        read.into_iter().map(|e| (e.seq.unwrap(), e.job)).collect::<Vec<_>>()
    };
    let of = |seq, job: &JobId| (seq, job.clone());
    assert_eq!(changes(None, 0, 9), [of(1, &a), of(2, &b), of(3, &a), of(5, &a)]);
    assert_eq!(changes(None, 1, 2), [of(2, &b), of(3, &a)]);
    assert_eq!(changes(Some("b"), 0, 9), [of(2, &b)]);
    let position = |after| store.read_blocking(|c| events::position(c, after)).unwrap();
    assert_eq!((position(0), position(5), position(6)), (Position::Complete, Position::Complete, Position::Unknown(5)));
    // a rolled-back event leaves no gap
    let failed: Result<()> = store.write_blocking(|t, appended| {
        let (job_ref, _) = jobs::job_ref(t, &b)?;
        appended.push(events::add(t, &job_ref, EventType::Warning, serde_json::json!({}), Time(6))?);
        Err(StoreError::Stopped)
    });
    assert!(failed.is_err());
    take(&store, &[Slot::Cpu], 7).unwrap();
    assert_eq!((changes(None, 5, 9), position(0)), (vec![of(6, &b)], Position::Complete));
    // a deleted job leaves a gap
    store.write_blocking(|t, _| jobs::delete(t, &a)).unwrap();
    assert_eq!((position(0), position(4), position(5)), (Position::Deleted, Position::Deleted, Position::Complete));
    store
        .write_blocking(|t, _| Ok(t.execute("UPDATE sqlite_sequence SET seq = 200000 WHERE name = 'events'", [])?))
        .unwrap();
    assert_eq!(position(5), Position::TooOld);
}

#[tokio::test]
async fn a_store_without_room_changes_nothing_and_goes_on_when_there_is_some() {
    let (_folder, store) = open();
    let id = submit(&store, "a", 0, Slot::Cpu, 1);
    let pages = |most: Option<i64>| {
        let writer = store.writer.lock().unwrap();
        let used: i64 = writer.query_row("PRAGMA page_count", [], |r| r.get(0)).unwrap();
        writer.query_row(&format!("PRAGMA max_page_count = {}", most.unwrap_or(used)), [], |_| Ok(())).unwrap();
    };
    let report = || {
        store.write_blocking(|t, appended| {
            let (job_ref, _) = jobs::job_ref(t, &id)?;
            let data = serde_json::json!({"what": "x".repeat(100_000)});
            appended.push(events::add(t, &job_ref, EventType::Preparing, data, Time(2))?);
            Ok(())
        })
    };
    let mut watcher = store.subscribe();
    pages(None);
    for _ in 0..2 {
        assert!(matches!(report(), Err(StoreError::DiskFull(_))));
        assert!(matches!(store.try_write().await, Err(StoreError::DiskFull(_))));
    }
    assert!(store.disk_space.is_full() && watcher.try_recv().is_err());
    assert_eq!(store.read_blocking(|c| events::history(c, &id, 0, 9)).unwrap().len(), 1);
    pages(Some(1_000_000));
    store.try_write().await.unwrap();
    report().unwrap();
    let history = store.read_blocking(|c| events::history(c, &id, 0, 9)).unwrap();
    assert_eq!((history.len(), history[1].seq), (2, Some(2)));
    assert_eq!(store.read_blocking(|c| events::position(c, 0)).unwrap(), Position::Complete);
}

#[test]
fn a_damaged_database_is_refused_and_a_clean_one_is_whole_in_its_file() {
    let (folder, store) = open();
    for n in 0..40 {
        submit(&store, "a", 0, Slot::Cpu, n);
    }
    store.write_blocking(|t, _| Ok(t.execute("UPDATE jobs SET file = hex(zeroblob(20000))", [])?)).unwrap();
    store.checkpoint().unwrap();
    // the file holds everything, and the write-ahead log is empty
    let path = folder.path().join(FILE);
    let log = folder.path().join(format!("{FILE}-wal"));
    assert_eq!(std::fs::metadata(log).map_or(0, |m| m.len()), 0);
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(&path, copy.path().join(FILE)).unwrap();
    let copied = Store::open(copy.path()).unwrap();
    assert_eq!(
        copied
            .read_blocking(|c| Ok(c.query_row("SELECT COUNT(*) FROM jobs", [], |row| row.get::<_, i64>(0))?))
            .unwrap(),
        40
    );
    drop(copied);
    // overwrite a page in the middle
    let mut bytes = std::fs::read(copy.path().join(FILE)).unwrap();
    let middle = bytes.len() / 2 / 4096 * 4096;
    bytes[middle..middle + 4096].fill(0xa5);
    std::fs::write(copy.path().join(FILE), &bytes).unwrap();
    let refused = Store::open(copy.path()).err().map(|e| e.to_string()).unwrap_or_default();
    assert!(refused.contains("is damaged") && refused.contains("replace the file by a backup"), "{refused}");
    // a store that is damaged while open detects it at the first damaged page that it reads
    assert!(!store.is_corrupt());
    std::fs::write(&path, &bytes).unwrap();
    let met = store.read_blocking(|c| {
        Ok(c.query_row("SELECT SUM(length(file)), MAX(id), MAX(user) FROM jobs", [], |_| Ok(()))?)
    });
    let scan =
        store.read_blocking(|c| Ok(c.query_row("PRAGMA integrity_check(1)", [], |row| row.get::<_, String>(0))?));
    assert!(met.is_err() || scan.as_deref().is_ok_and(|said| said != "ok"), "{met:?} {scan:?}");
    assert_eq!(store.is_corrupt(), met.is_err());
}
