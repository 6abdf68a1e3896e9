//! Proves that random `kill -9` of executors during a job does not change the data set.
//!
//! ```text
//!   kill n is due at n/22 of the splits committed ─► draw one of three executors, and a delay ─► is another one ready?
//!   ─► SIGKILL, start a new one
//! ```
//!
//! The test does not wait for the new executor. It may be killed next, while it starts or before it has asked for work.
//! Its splits return when the scheduler considers it dead.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{Scratch, corpus, files, repetitions, with};

use crate::cluster::{Cluster, Executor, assert_finished, single_machine_shards, small_job};
use crate::cluster_store::Run;
use crate::resume::{count_shards, uniform_draws};
use crate::stores::shards_in;

const KILLS: usize = 20;
const EXECUTORS: usize = 3;
/// Splits per kill. Two kills' worth of splits remain at the end, during which nothing is killed.
const SPLITS_PER_KILL: usize = 2;
const KILLS_AT_THE_END: usize = 2;
/// Words per split, so that a split takes longer than a kill.
const WORDS_PER_SPLIT: usize = 1500;
/// Maximum delay of a kill after it is due.
const MAX_KILL_DELAY: Duration = Duration::from_millis(200);

/// A folder with documents for this many kills: pieces of the first speeches.
fn scratch(kills: usize) -> Scratch {
    let documents = SPLITS_PER_KILL * (kills + KILLS_AT_THE_END);
    let scratch = Scratch::new();
    let mut lines = String::new();
    let speeches = corpus(33, 60_000);
    let speeches = speeches.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let texts = speeches.map(|speech| speech["text"].as_str().unwrap().to_owned());
    let pieces = texts.flat_map(|text| {
        let words: Vec<String> = text.split(' ').map(str::to_owned).collect();
        words.chunks_exact(WORDS_PER_SPLIT).map(|words| words.join(" ")).collect::<Vec<_>>()
    });
    for (n, text) in pieces.take(documents).enumerate() {
        writeln!(lines, "{}", json!({"id": n, "text": text})).unwrap();
    }
    assert_eq!(lines.lines().count(), documents);
    scratch.write("corpus.jsonl", &lines);
    scratch
}

/// A job with a teacher and at least one split per document; a document has 8 to 9 kB.
fn job() -> Value {
    with(small_job(), &json!({"input": {"split_megabytes": 0.009}}))
}

/// Executors that are killed during a run.
struct KilledExecutors<'a, 'b> {
    cluster: &'b mut Cluster<'a>,
    set: &'b dyn Fn(&mut Command),
    executors: Vec<Executor>,
    draws: Box<dyn Iterator<Item = f64>>,
}

impl<'a, 'b> KilledExecutors<'a, 'b> {
    fn start(cluster: &'b mut Cluster<'a>, seed: u64, set: &'b dyn Fn(&mut Command)) -> Self {
        let executors = (0..EXECUTORS).map(|_| cluster.executor(set)).collect();
        Self { cluster, set, executors, draws: Box::new(uniform_draws(seed)) }
    }

    /// Kills a random executor as soon as another one is ready.
    fn kill_one(&mut self, run: &mut Run) {
        let at = (self.draws.next().unwrap() * EXECUTORS as f64) as usize;
        thread::sleep(MAX_KILL_DELAY.mul_f64(self.draws.next().unwrap()));
        let executors = &self.executors;
        let is_left = || executors.iter().enumerate().any(|(n, other)| n != at && other.is_ready());
        run.wait_until("another executor", is_left);
        self.executors[at].server.kill();
        self.executors[at] = self.cluster.start_executor(self.set);
    }

    /// Kills executors `kills` times during a run, evenly over its commits.
    fn kill_during(&mut self, run: &mut Run, kills: usize, splits: usize, committed: &dyn Fn() -> usize) {
        for n in 1..=kills {
            let due = n * splits / (kills + KILLS_AT_THE_END);
            run.wait_until("the next commit", || committed() >= due);
            self.kill_one(run);
            assert!(committed() < splits, "all is committed after {n} kills");
        }
    }
}

#[test]
fn executors_killed_many_times_during_one_job_change_no_byte() {
    let kills = repetitions(8, KILLS);
    let scratch = scratch(kills);
    let expected = single_machine_shards(&scratch, &job());
    let splits = expected.len();
    assert!(splits >= SPLITS_PER_KILL * kills, "{splits} splits");
    let mut cluster = Cluster::start(&scratch);
    let there = cluster.job(&job(), "killed");
    let dataset = scratch.path("killed");
    let as_they_are = |_: &mut Command| {};
    let mut executors = KilledExecutors::start(&mut cluster, 11, &as_they_are);
    let mut run = Run::begin(&scratch, &there, &[], &|_| {});
    executors.kill_during(&mut run, kills, splits, &|| count_shards(&dataset));
    run.expect_success();
    assert_finished(&dataset, &expected);
    assert_eq!(names(&dataset), names(&scratch.path("alone")));
}

/// All file names of a data set.
fn names(dataset: &Path) -> BTreeSet<PathBuf> {
    files(dataset).into_keys().collect()
}

#[test]
fn executors_killed_while_they_write_to_a_store_leave_nothing_there() {
    let kills = repetitions(3, KILLS);
    let scratch = scratch(kills);
    let expected = single_machine_shards(&scratch, &job());
    let splits = expected.len();
    assert!(splits >= SPLITS_PER_KILL * kills, "{splits} splits");
    let weed = Seaweed::start();
    weed.create_bucket("shards");
    let s3 = weed.s3();
    let with_keys = |command: &mut Command| weed.environment(command);
    let mut cluster = Cluster::start(&scratch);
    let there = cluster.job(&job(), "s3://shards/killed");
    let mut executors = KilledExecutors::start(&mut cluster, 12, &with_keys);
    let mut run = Run::begin(&scratch, &there, &[], &with_keys);
    executors.kill_during(&mut run, kills, splits, &|| s3.list("shards", "killed/_stillhouse/splits/").len());
    run.expect_success();
    assert_eq!(shards_in(&s3, "shards", "killed"), expected);
    assert_eq!(s3.list_multipart_uploads("shards"), Vec::new());
    // an undisturbed run leaves the same objects
    let here = with(job(), &json!({"output": {"path": "s3://shards/undisturbed"}}));
    Run::begin(&scratch, &here, &[], &with_keys).expect_success();
    let names = |prefix: &str| -> BTreeSet<String> {
        let names = s3.list("shards", &format!("{prefix}/")).into_keys();
        names.map(|name| name.strip_prefix(prefix).unwrap().to_owned()).collect()
    };
    assert_eq!(names("killed"), names("undisturbed"));
}
