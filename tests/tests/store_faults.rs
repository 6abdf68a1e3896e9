//! Proves that the bytes stay the same if the store throttles, breaks connections, loses responses or dies, or if
//! machines die. A second process polls and never sees a partial shard.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::proxy::{FaultKind, FaultPlan, FaultProxy};
use stillhouse_tests::s3::{ADMIN, S3};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{Scratch, corpus, repetitions, root, shards, with};

use super::resume::uniform_draws;
use super::stores::{User, packing_job, shards_in};

/// Split size in megabytes: about 150 splits under `make soak`, about 50 otherwise.
fn split_megabytes() -> f64 {
    if repetitions(0, 1) == 1 { 0.002 } else { 0.006 }
}

/// A job of many splits, from the bucket `corpora` to a prefix of `shards`.
fn many_splits(prefix: &str) -> Value {
    with(
        packing_job(),
        &json!({
            "input": {"paths": ["s3://corpora/corpus.jsonl"], "split_megabytes": split_megabytes()},
            "output": {"path": format!("s3://shards/{prefix}")},
            "engine": {"parallel_splits": 4},
            "storage": {"retry": {
                "max_attempts": 1_000, "longest_seconds": 120, "first_backoff_milliseconds": 2,
                "largest_backoff_milliseconds": 200, "request_timeout_seconds": 10
            }}
        }),
    )
}

/// The shards of an undisturbed run over the same corpus on a disk.
fn undisturbed(scratch: &Scratch) -> BTreeMap<String, String> {
    let local = with(
        packing_job(),
        &json!({"input": {"split_megabytes": split_megabytes()}, "output": {"path": "undisturbed"}}),
    );
    let expected = shards(&scratch.make(&local));
    assert!(expected.len() >= repetitions(40, 120), "{}", expected.len());
    expected
}

/// 200 documents, each shorter than a split, so that every split has one.
fn documents() -> String {
    let mut all = String::new();
    for speech in corpus(33, 9_000).lines() {
        let speech: Value = serde_json::from_str(speech).unwrap();
        let text: Vec<char> = speech["text"].as_str().unwrap().chars().collect();
        for piece in text.chunks(1_500) {
            all += &json!({"text": piece.iter().collect::<String>()}).to_string();
            all.push('\n');
        }
    }
    all
}

fn scratch() -> Scratch {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &documents());
    scratch
}

fn server() -> Seaweed {
    let weed = Seaweed::start();
    weed.create_bucket("corpora");
    weed.create_bucket("shards");
    weed.s3().put("corpora", "corpus.jsonl", documents().as_bytes());
    weed
}

/// The second process, which polls the output.
struct Watcher {
    child: Child,
    until: PathBuf,
}

impl Watcher {
    fn start(scratch: &Scratch, weed: &Seaweed, prefix: &str) -> Self {
        let until = scratch.path(&format!("stop-{}", prefix.replace('/', "-")));
        let mut command = Command::new(root().join(".venv/bin/python"));
        weed.environment(&mut command);
        command.arg(root().join("tests/python/watch.py")).arg(format!("s3://shards/{prefix}"));
        let child = command.arg("--until").arg(&until).stdout(Stdio::piped()).spawn().unwrap();
        Self { child, until }
    }

    /// Stops the watcher and asserts that it polled often enough and saw no problem.
    fn stop(self, shards: usize) -> Value {
        fs::write(&self.until, "").unwrap();
        let out = self.child.wait_with_output().unwrap();
        let seen: Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(seen["problems"], json!([]), "{seen}");
        assert_eq!(seen["complete"], true, "{seen}");
        assert_eq!(seen["shards_seen"], shards, "{seen}");
        assert!(seen["looks"].as_u64().unwrap() >= 3, "{seen}");
        seen
    }
}

fn assert_nothing_left_over(s3: &S3, prefix: &str) {
    assert_eq!(s3.list_multipart_uploads("shards"), []);
    let state = s3.list("shards", &format!("{prefix}/_stillhouse/"));
    assert!(state.keys().all(|k| k.ends_with("plan.json") || k.contains("/splits/")), "{state:?}");
}

#[test]
fn faults_change_no_byte() {
    let scratch = scratch();
    let expected = undisturbed(&scratch);
    let weed = server();
    let proxy = FaultProxy::start(weed.endpoint(), FaultPlan { seed: 7, probability: 0.45, ..FaultPlan::default() });
    let user = User { scratch: &scratch, endpoint: proxy.endpoint(), keys: ADMIN };
    let watcher = Watcher::start(&scratch, &weed, "faulty");

    user.job(&many_splits("faulty")).expect(0);

    let fired = proxy.fired();
    let all: u64 = fired.values().sum();
    println!("{all} faults in {} requests: {fired:?}", proxy.requests().len());
    assert!(all as usize >= repetitions(150, 500), "only {all} faults fired: {fired:?}");
    for kind in FaultKind::ALL {
        assert!(fired.get(&kind).is_some_and(|n| *n as usize >= repetitions(5, 20)), "{kind:?}: {fired:?}");
    }
    let s3 = weed.s3();
    assert_eq!(shards_in(&s3, "shards", "faulty"), expected);
    assert_nothing_left_over(&s3, "faulty");
    println!("{}", watcher.stop(expected.len()));

    // a copy through the faulty proxy, and reading it back, with default backoff times
    proxy.set_plan(FaultPlan { seed: 8, probability: 0.08, ..FaultPlan::default() });
    let before: u64 = all;
    let (source, copy) = ("undisturbed", "s3://shards/copied");
    user.run(&["export", source, copy, "--quiet"]).expect(0);
    assert_eq!(shards_in(&s3, "shards", "copied"), expected);
    user.run(&["verify", copy]).expect(0);
    assert!(proxy.fired().values().sum::<u64>() > before + repetitions(15, 40) as u64);
    user.run(&["export", source, copy, "--quiet"]).expect(0);
    assert_eq!(s3.list_multipart_uploads("shards"), []);
}

#[test]
fn kills_of_the_job_and_of_the_server_change_no_byte() {
    let scratch = scratch();
    let expected = undisturbed(&scratch);
    let weed = server();
    let s3 = weed.s3();
    let mut moments = uniform_draws(11);

    // kills the program
    let wanted = repetitions(4, 10);
    let start = Instant::now();
    let job = |prefix: &str| {
        scratch.job("job.yaml", &many_splits(prefix));
        let mut command = scratch.command(&["run", "job.yaml", "--quiet"]);
        weed.environment(&mut command);
        command
    };
    assert!(job("first").status().unwrap().success());
    let duration = start.elapsed();
    let (mut kills, mut midway, mut finished) = (0, 0, 0);
    let mut watcher = Watcher::start(&scratch, &weed, "killed-0");
    while kills < wanted {
        let prefix = format!("killed-{finished}");
        // The kill comes a random time after a randomly drawn remaining commit, so that it does not depend on the
        // machine's speed.
        let committed = || s3.list("shards", &format!("{prefix}/data/")).len();
        let before = committed();
        let least = before + ((expected.len() - before) as f64 * moments.next().unwrap()) as usize;
        let while_after = (duration / expected.len() as u32).mul_f64(moments.next().unwrap());
        let mut run = job(&prefix).spawn().unwrap();
        let mut deadline = None;
        let status = loop {
            if let Some(status) = run.try_wait().unwrap() {
                break Some(status);
            }
            if deadline.is_none() && committed() >= least {
                deadline = Some(Instant::now() + while_after);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                // SIGKILL
                run.kill().unwrap();
                run.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let there = shards_in(&s3, "shards", &prefix);
        for (name, sha256) in &there {
            assert_eq!(Some(sha256), expected.get(name), "{prefix}/data/{name} after kill {kills}");
        }
        match status {
            Some(status) => {
                assert!(status.success(), "a resumed run failed: {status}");
                watcher.stop(expected.len());
                finished += 1;
                watcher = Watcher::start(&scratch, &weed, &format!("killed-{finished}"));
            }
            None => {
                kills += 1;
                midway += usize::from((1..expected.len()).contains(&there.len()));
            }
        }
    }
    let prefix = format!("killed-{finished}");
    assert!(job(&prefix).status().unwrap().success());
    assert_eq!(shards_in(&s3, "shards", &prefix), expected);
    assert_nothing_left_over(&s3, &prefix);
    watcher.stop(expected.len());
    assert!(midway >= wanted / 3, "only {midway} of {kills} kills fell between the first and the last commit");

    // kills the server: the same run waits for it
    let mut deaths = 0;
    let mut round = 0;
    while deaths < wanted {
        let prefix = format!("orphaned-{round}");
        let watcher = Watcher::start(&scratch, &weed, &prefix);
        let mut run = job(&prefix).spawn().unwrap();
        // wait for the first shard: a server that is missing when a job begins is an immediate error
        while s3.list("shards", &format!("{prefix}/data/")).is_empty() && run.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        while deaths < wanted && run.try_wait().unwrap().is_none() {
            std::thread::sleep(duration.mul_f64(moments.next().unwrap() * 0.5));
            if run.try_wait().unwrap().is_some() {
                break;
            }
            weed.kill();
            deaths += 1;
            weed.restart();
        }
        assert!(run.wait().unwrap().success(), "after {deaths} deaths of the server");
        assert_eq!(shards_in(&s3, "shards", &prefix), expected, "after {deaths} deaths of the server");
        assert_nothing_left_over(&s3, &prefix);
        println!("{deaths} deaths: {}", watcher.stop(expected.len()));
        round += 1;
    }
}
