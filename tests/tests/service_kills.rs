//! Kills the server with SIGKILL in the middle of jobs: nothing is lost, nothing is done twice, no byte differs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use stillhouse_tests::service::{Api, Service, WorkerProcess, eventually, freeze, signal, workers_in};
use stillhouse_tests::{corpus, repetitions, shards, with};

use crate::resume::{count_shards, uniform_draws};
use crate::service_api::{DOCUMENTS, long_job, quick_job, start, undisturbed};

/// Polls whether a job ever has two workers, across all restarts of the server.
struct DoubleWorkerWatch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<(u64, Vec<[WorkerProcess; 2]>)>>,
}

impl DoubleWorkerWatch {
    fn start(scratch: PathBuf) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (mut polls, mut doubles) = (0, Vec::new());
            while !stopped.load(Ordering::Relaxed) {
                let mut seen = BTreeMap::<String, WorkerProcess>::new();
                for worker in workers_in(&scratch) {
                    let Some(other) = seen.insert(worker.job.clone(), worker.clone()) else { continue };
                    // the first worker may have ended before the second began, within one poll
                    let now = workers_in(&scratch);
                    if now.contains(&other) && now.contains(&worker) {
                        doubles.push([other, worker]);
                    }
                }
                polls += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            (polls, doubles)
        });
        Self { stop, thread: Some(thread) }
    }

    fn assert_none(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let (polls, doubles) = self.thread.take().unwrap().join().unwrap();
        assert!(polls > 100, "{polls}");
        assert!(doubles.is_empty(), "two workers at one job: {doubles:?}");
    }
}

impl Drop for DoubleWorkerWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The states of all jobs in the database of a stopped server.
fn states(service: &Service) -> BTreeMap<String, String> {
    let database = rusqlite::Connection::open(service.data().join("service.sqlite")).unwrap();
    let mut statement = database.prepare("SELECT id, state FROM jobs").unwrap();
    let rows = statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    rows.map(Result::unwrap).collect()
}

/// Asserts that a job succeeded exactly once, that its states follow each other, and that no split was committed twice.
fn assert_history(api: &Api, id: &str) {
    let events = api.events(id);
    let steps: Vec<(&Value, &Value)> =
        events.iter().filter(|e| e["type"] == "state").map(|e| (&e["data"]["from"], &e["data"]["to"])).collect();
    assert!(steps.windows(2).all(|w| w[0].1 == w[1].0), "{steps:?}");
    assert_eq!(steps.iter().filter(|(_, to)| *to == "succeeded").count(), 1, "{steps:?}");
    assert!(
        steps.iter().all(|(_, to)| ["queued", "running", "succeeded"].contains(&to.as_str().unwrap())),
        "{steps:?}"
    );
    let runs = steps.iter().filter(|(_, to)| *to == "running").count();
    let job = api.job(id);
    assert_eq!((&job["attempt"], &job["failures"], &job["failure"]), (&json!(runs), &json!(0), &Value::Null));
    assert_eq!(job["progress"]["splits_done"], job["progress"]["splits"]);
    let committed: Vec<String> =
        events.iter().filter(|e| e["type"] == "split_committed").map(|e| e["data"]["split"].to_string()).collect();
    assert_eq!(committed.iter().collect::<BTreeSet<_>>().len(), committed.len(), "{committed:?}");
    assert!(events.windows(2).all(|w| w[0]["seq"].as_i64() < w[1]["seq"].as_i64()));
}

#[test]
fn kills_of_the_server_change_no_byte_and_lose_no_job() {
    let wanted = repetitions(6, 20);
    let mut service = Service::start(&json!({"auth": "token"}));
    service.scratch.write("corpus.jsonl", &corpus(DOCUMENTS, 1300));
    let users = ["ada", "bob", "eve"].map(|user| service.token(user, &["read", "submit"]));
    // two jobs with a teacher and one without, each of more than ten splits
    let kinds = [
        long_job(""),
        with(long_job(""), &json!({"seed": 7, "pack": {"length": 96}, "partitions": null})),
        with(quick_job(""), &json!({"pack": {"length": 128}})),
    ];
    let expected = kinds.each_ref().map(|kind| undisturbed(&service, kind));
    assert!(expected.iter().all(|shards| shards.len() > 10), "{:?}", expected.each_ref().map(BTreeMap::len));
    // ids of the submitted jobs, each with its kind and its output
    let mut jobs = BTreeMap::<String, (usize, String)>::new();
    let more = |jobs: &mut BTreeMap<String, (usize, String)>| {
        for (kind, user) in kinds.iter().enumerate().zip(&users) {
            let output = format!("out-{}", jobs.len());
            let id = user.submit(&with(kind.1.clone(), &json!({"output": {"path": output}})));
            jobs.insert(id, (kind.0, output));
        }
    };
    more(&mut jobs);
    let idle: Vec<String> = (0..2)
        .map(|n| {
            users[0].submit_with(
                "?priority=-100",
                &with(kinds[2].clone(), &json!({"output": {"path": format!("idle-{n}")}})),
            )
        })
        .collect();
    let watch = DoubleWorkerWatch::start(service.data().join("scratch"));
    let (mut mid_job, mut mid_splits) = (0, 0);
    for (kill, moment) in uniform_draws(5).take(wanted).enumerate() {
        // Keep more work queued than fits between two kills, so that the idle jobs stay idle.
        let waiting = |state: &str| {
            users[0].get(&format!("/jobs?state={state}&limit=500")).json()["jobs"].as_array().unwrap().len()
        };
        while waiting("queued") + waiting("running") < idle.len() + 8 {
            more(&mut jobs);
        }
        // Every second kill comes at a random moment, the others between two splits of a job, however slow the machine
        // is.
        match kill % 2 {
            0 => std::thread::sleep(Duration::from_secs_f64(2.0 * moment)),
            _ => eventually("a job between two of its splits", || {
                let between = |(kind, output): &(usize, String)| {
                    (1..expected[*kind].len() - 1).contains(&count_shards(&service.scratch.path(output)))
                };
                jobs.values().any(between).then_some(())
            }),
        }
        service.kill();
        let states = states(&service);
        let running: Vec<&String> = states.iter().filter(|(_, state)| *state == "running").map(|(id, _)| id).collect();
        mid_job += usize::from(!running.is_empty());
        mid_splits += usize::from(running.iter().any(|id| {
            let (kind, output) = &jobs[*id];
            (1..expected[*kind].len()).contains(&shards(&service.scratch.path(output)).len())
        }));
        for id in &idle {
            assert_eq!(states[id], "queued", "after kill {kill}");
        }
        // every visible shard has the bytes of an undisturbed run
        for (kind, output) in jobs.values() {
            for (name, sha256) in shards(&service.scratch.path(output)) {
                assert_eq!(Some(&sha256), expected[*kind].get(&name), "{output}/{name} after kill {kill}");
            }
        }
        // In half of the rounds the next server starts while workers of the last one are still running.
        if kill / 2 % 2 == 0 {
            eventually("workers without a server end", || service.workers().is_empty().then_some(()));
        }
        service.launch();
    }
    assert!(mid_job >= wanted * 3 / 4, "only {mid_job} of {wanted} kills fell into a job");
    assert!(
        mid_splits >= wanted / 3,
        "only {mid_splits} of {wanted} kills fell between the first and the last split of a job"
    );
    println!("{} jobs, {mid_job} kills in a job, {mid_splits} between two splits", jobs.len());

    let mut attempts = Vec::new();
    for (id, (kind, output)) in &jobs {
        let done = users[0].wait_for_state(id, "succeeded");
        assert_eq!(shards(&service.scratch.path(output)), expected[*kind], "{output}");
        attempts.push(done["attempt"].as_u64().unwrap());
        assert_history(&users[0], id);
    }
    assert!(attempts.iter().filter(|n| **n > 1).count() >= 2, "{attempts:?}");
    for id in &idle {
        assert_eq!(users[0].wait_for_state(id, "succeeded")["attempt"], 1);
        assert_history(&users[0], id);
    }
    let output = &jobs.values().next().unwrap().1;
    service.stillhouse(&["verify", output]).expect(0);
    watch.assert_none();
}

#[test]
fn a_worker_that_cannot_end_by_itself_is_ended_before_its_job_runs_again() {
    let mut service = start(&json!({"limits": {"cancel_seconds": 1}}));
    let expected = undisturbed(&service, &long_job(""));
    let watch = DoubleWorkerWatch::start(service.data().join("scratch"));
    let ids = ["a", "b"].map(|output| service.api.submit(&long_job(output)));
    ids.iter().for_each(|id| service.api.wait_for_split(id, 2));
    let stopped = ids.each_ref().map(|id| service.wait_for_worker(id));
    stopped.iter().for_each(|worker| freeze(worker.process));
    service.kill();
    // the closed pipe tells each to end, but a frozen process cannot
    let mut left = service.workers();
    left.sort();
    let mut both = stopped.to_vec();
    both.sort();
    assert_eq!(left, both);
    service.launch();
    assert!(!service.workers().iter().any(|worker| stopped.contains(worker)), "{:?}", service.workers());
    for (id, output) in ids.iter().zip(["a", "b"]) {
        let done = service.api.wait_for_state(id, "succeeded");
        assert_eq!((&done["attempt"], &done["failures"]), (&json!(2), &json!(0)));
        assert_eq!(shards(&service.scratch.path(output)), expected);
        assert_history(&service.api, id);
    }

    // a stopped worker cannot react to the cancellation either, and is then killed
    let cancelled = service.api.submit(&long_job("cancelled"));
    service.api.wait_for_split(&cancelled, 1);
    let worker = service.wait_for_worker(&cancelled);
    signal(worker.process, libc::SIGSTOP);
    service.api.post(&format!("/jobs/{cancelled}/cancel")).expect(202);
    service.api.wait_for_state(&cancelled, "cancelled");
    assert!(!service.workers().contains(&worker));

    // if the server is killed while it waits for that, the next one completes the cancellation
    service.configure(&json!({"limits": {"cancel_seconds": 3600}}));
    service.kill();
    service.launch();
    let id = service.api.submit(&long_job("cancelling"));
    service.api.wait_for_split(&id, 1);
    let worker = service.wait_for_worker(&id);
    freeze(worker.process);
    service.api.post(&format!("/jobs/{id}/cancel")).expect(202);
    service.kill();
    assert_eq!(service.workers(), std::slice::from_ref(&worker));
    service.launch();
    let job = service.api.job(&id);
    assert_eq!((&job["state"], &job["reason"]), (&json!("cancelled"), &json!("cancelled by local")));
    assert!(!service.workers().contains(&worker));
    watch.assert_none();
}

#[test]
fn a_job_that_takes_the_server_down_again_and_again_is_given_up() {
    let mut service = start(&json!({"limits": {"interruptions": 2}}));
    let id = service.api.submit(&long_job("out"));
    for attempt in 1..=3 {
        service.api.wait_for(&id, "at work", |job| job["state"] == "running" && job["attempt"] == attempt);
        service.kill();
        service.launch();
    }
    let failed = service.api.wait_for_state(&id, "failed");
    assert_eq!((&failed["attempt"], &failed["failures"]), (&json!(3), &json!(0)));
    assert_eq!(failed["reason"], "the service was stopped in each of 2 attempts");
    // a user can still retry
    service.api.post(&format!("/jobs/{id}/retry")).expect(202);
    service.api.wait_for_state(&id, "succeeded");
}
