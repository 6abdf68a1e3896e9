//! A cluster whose hosts lose each other: scheduler, executors, driver and store have a network namespace each.
//!
//! ```text
//!   cut off              as long as                             then
//!   one executor         its split was made by another one      its commit comes late, and finds that one's
//!   the driver           it misses a renewal of its lease       the run goes on
//!   the scheduler        the driver waits for it                the run ends and says so; the same command goes on
//! ```
//!
//! What is cut off has work in its hands: an executor waits before a commit until a file goes.

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::network::{Host, Network};
use stillhouse_tests::s3::S3;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{Scratch, corpus, with};

use crate::cluster::{Cluster, Held, command, said, scratch};
use crate::stores::{packing_job, shards_in};

/// A store, a scheduler and a driver, each on a host.
struct Site<'a> {
    scratch: &'a Scratch,
    cluster: Cluster<'a>,
    weed: Seaweed,
    s3: S3,
    scheduler: Host,
    driver: Host,
    network: Network,
}

/// An executor that waits before its commits, and its host.
struct Placed {
    held: Held,
    host: Host,
}

/// Seven splits, from the store and to it. A request that vanished is sent again soon.
fn seven_splits(prefix: &str) -> Value {
    let retry = json!({
        "max_attempts": 100, "longest_seconds": 300, "first_backoff_milliseconds": 20,
        "largest_backoff_milliseconds": 500, "request_timeout_seconds": 3
    });
    with(
        packing_job(),
        &json!({
            "input": {
                "paths": ["s3://corpora/corpus.jsonl"],
                "split_megabytes": 0.0015,
                "holdout": {"validation": {"last_documents": 1}}
            },
            "output": {"path": format!("s3://shards/{prefix}")},
            "storage": {"retry": retry}
        }),
    )
}

impl<'a> Site<'a> {
    /// With what a run alone makes of the job, under `alone`.
    fn start(scratch: &'a Scratch) -> Option<Self> {
        let mut network = Network::start()?;
        let [store, scheduler, driver] = ["store", "scheduler", "driver"].map(|name| network.host(name));
        let weed = Seaweed::start_on(&store);
        weed.create_bucket("corpora");
        weed.create_bucket("shards");
        let s3 = weed.s3();
        s3.put("corpora", "corpus.jsonl", corpus(7, 1300).as_bytes());
        let cluster = Cluster::start_on(scratch, &scheduler);
        let this = Self { scratch, cluster, weed, s3, scheduler, driver, network };
        let alone = this.begin(&seven_splits("alone")).wait_with_output().unwrap();
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
        assert_eq!(shards_in(&this.s3, "shards", "alone").len(), 7);
        Some(this)
    }

    fn executor(&mut self, name: &str) -> Placed {
        let host = self.network.host(name);
        let held = Held::named(&mut self.cluster, name, &|command: &mut Command| {
            self.weed.environment(command);
            host.puts(command);
        });
        Placed { held, host }
    }

    /// Begins a run on the driver's host.
    fn begin(&self, job: &Value) -> Child {
        self.scratch.job("job.yaml", job);
        let mut command = command(self.scratch, &["run", "job.yaml"]);
        self.weed.environment(&mut command);
        self.driver.puts(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn begin_on_cluster(&self, prefix: &str) -> Child {
        self.begin(&self.cluster.job(&seven_splits(prefix), &format!("s3://shards/{prefix}")))
    }

    fn committed(&self, prefix: &str) -> usize {
        self.s3.list("shards", &format!("{prefix}/_stillhouse/splits/")).len()
    }

    /// Waits for so many commits of a run.
    #[track_caller]
    fn wait_for_commits(&self, run: &mut Child, prefix: &str, wanted: usize) {
        self.wait(run, "commits", || self.committed(prefix) >= wanted);
    }

    #[track_caller]
    fn wait(&self, run: &mut Child, what: &str, is_so: impl Fn() -> bool) {
        let began = Instant::now();
        while !is_so() {
            if run.try_wait().unwrap().is_some() {
                panic!("{what}: the run has ended: {}", std::io::read_to_string(run.stderr.take().unwrap()).unwrap());
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whole, and nothing of anybody is left: the objects of a run alone and no others, and no upload.
    #[track_caller]
    fn assert_finished(&self, prefix: &str) {
        assert_eq!(shards_in(&self.s3, "shards", prefix), shards_in(&self.s3, "shards", "alone"));
        assert_eq!(self.names(prefix), self.names("alone"));
        assert_eq!(self.manifest_shards(prefix), self.manifest_shards("alone"));
        assert_eq!(self.s3.list_multipart_uploads("shards"), Vec::new());
    }

    fn names(&self, prefix: &str) -> BTreeSet<String> {
        let names = self.s3.list("shards", &format!("{prefix}/")).into_keys();
        names.map(|name| name.strip_prefix(prefix).unwrap().to_owned()).collect()
    }

    fn manifest_shards(&self, prefix: &str) -> Value {
        let manifest = self.s3.get("shards", &format!("{prefix}/manifest.json")).unwrap();
        serde_json::from_slice::<Value>(&manifest).unwrap()["shards"].take()
    }

    /// How often the lease of a run was renewed.
    fn renewals(&self, prefix: &str) -> u64 {
        let lease = self.s3.get("shards", &format!("{prefix}/_stillhouse/lease.json")).unwrap();
        serde_json::from_slice::<Value>(&lease).unwrap()["renewals"].as_u64().unwrap()
    }
}

impl Placed {
    fn has_committed(&self, split: u32) -> bool {
        said(&self.held.executor.log).contains(&format!("committed split={split} "))
    }
}

#[track_caller]
fn ends_well(run: Child) -> String {
    let Output { status, stderr, .. } = run.wait_with_output().unwrap();
    let told = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "{told}");
    told
}

#[test]
fn an_executor_that_is_cut_off_in_mid_job_and_joined_again_harms_nothing() {
    let scratch = scratch();
    let Some(mut site) = Site::start(&scratch) else { return };
    let (mut away, mut last) = (site.executor("away"), site.executor("last"));
    let mut run = site.begin_on_cluster("cut");
    let split = away.held.is_about_to_commit();
    // the run cannot end before this one commits
    last.held.is_about_to_commit();
    let stays = site.executor("stays");
    stays.held.goes_on();
    site.wait_for_commits(&mut run, "cut", 1);

    away.host.cut();
    // it tries, and nobody hears of it
    away.held.goes_on();
    site.wait(&mut run, "its split is made by another one", || stays.has_committed(split));
    assert!(!away.has_committed(split));
    assert!(away.host.join() > 0);
    // that it lost is no failure: the record that it finds is the split's
    site.wait(&mut run, "it comes late", || away.has_committed(split));
    last.held.goes_on();
    ends_well(run);
    site.assert_finished("cut");

    // and it is as good as any other
    drop((stays, last));
    ends_well(site.begin_on_cluster("after"));
    site.assert_finished("after");
    assert_eq!(said(&away.held.executor.log).matches("committed split=").count(), 1 + 7);
}

#[test]
fn a_driver_that_is_cut_off_for_a_while_goes_on() {
    let scratch = scratch();
    let Some(mut site) = Site::start(&scratch) else { return };
    let (mut one, mut last) = (site.executor("one"), site.executor("last"));
    let mut run = site.begin_on_cluster("driven");
    one.held.is_about_to_commit();
    last.held.is_about_to_commit();
    one.held.goes_on();
    site.wait_for_commits(&mut run, "driven", 1);
    let before = site.renewals("driven");
    site.wait(&mut run, "a renewal", || site.renewals("driven") > before);

    let before = site.renewals("driven");
    site.driver.cut();
    // the executors do without it
    site.wait_for_commits(&mut run, "driven", 6);
    // longer than from one renewal to the next, shorter than a lease is good for
    std::thread::sleep(Duration::from_secs(7));
    assert_eq!(site.renewals("driven"), before);
    assert!(site.driver.join() > 0);
    site.wait(&mut run, "a renewal", || site.renewals("driven") > before);
    last.held.goes_on();
    ends_well(run);
    site.assert_finished("driven");
}

#[test]
fn a_run_whose_scheduler_is_cut_off_ends_by_name_and_goes_on_when_started_again() {
    let scratch = scratch();
    let Some(mut site) = Site::start(&scratch) else { return };
    let (mut one, mut held) = (site.executor("one"), site.executor("held"));
    let mut run = site.begin_on_cluster("lost");
    one.held.is_about_to_commit();
    let split = held.held.is_about_to_commit();
    one.held.goes_on();
    site.wait_for_commits(&mut run, "lost", 1);

    site.scheduler.cut();
    let ended = run.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    let says = format!("the scheduler at {} was lost: ", site.cluster.address());
    assert!(told.contains(&says) && told.contains("run the same command again to go on"), "{told}");
    let committed: BTreeMap<String, String> = shards_in(&site.s3, "shards", "lost");
    assert!(!committed.is_empty() && committed.len() < 7, "{committed:?}");
    assert!(site.scheduler.join() > 0);

    // who was at work for it has lost its run
    held.held.goes_on();
    held.held.executor.waits_until_it_says("this one stops");
    assert!(!held.has_committed(split));
    ends_well(site.begin_on_cluster("lost"));
    site.assert_finished("lost");
    for (name, sha256) in committed {
        assert_eq!(shards_in(&site.s3, "shards", "lost").get(&name), Some(&sha256));
    }
}
