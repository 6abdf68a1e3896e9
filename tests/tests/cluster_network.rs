//! Tests a cluster whose hosts lose their connections. Scheduler, executors, driver and store each have a network
//! namespace.
//!
//! ```text
//!   cut off              until                                  then
//!   one executor         another one has made its split         its commit comes late and finds the other's record
//!   the driver           it has missed a lease renewal          the run continues
//!   the scheduler        the driver gives up waiting            the run ends with an error; the same command resumes
//! ```
//!
//! A host that is cut off has work in progress: an executor waits before a commit until a file is removed.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use stillhouse_tests::Scratch;
use stillhouse_tests::network::{Host, Network};

use crate::cluster::{Cluster, HeldExecutor, read_log, scratch};
use crate::cluster_store::{Run, SPLITS, Store, has_committed, seven_splits};
use crate::stores::shards_in;

/// A store, a scheduler and a driver, each on its own host.
struct Site<'a> {
    scratch: &'a Scratch,
    cluster: Cluster<'a>,
    store: Store,
    scheduler: Host,
    driver: Host,
    network: Network,
}

/// An executor that waits before its commits, and its host.
struct HostedExecutor {
    held: HeldExecutor,
    host: Host,
}

impl HostedExecutor {
    fn has_committed(&self, split: u32) -> bool {
        has_committed(&self.held.executor, split)
    }
}

impl<'a> Site<'a> {
    fn start(scratch: &'a Scratch) -> Option<Self> {
        let mut network = Network::start()?;
        let [store, scheduler, driver] = ["store", "scheduler", "driver"].map(|name| network.host(name));
        let store = Store::start(scratch, Some(&store), &|command| driver.attach(command));
        let cluster = Cluster::start_on(scratch, &scheduler);
        Some(Self { scratch, cluster, store, scheduler, driver, network })
    }

    fn executor(&mut self, name: &str) -> HostedExecutor {
        let host = self.network.host(name);
        let held = HeldExecutor::named(&mut self.cluster, name, &|command: &mut Command| {
            self.store.weed.environment(command);
            host.attach(command);
        });
        HostedExecutor { held, host }
    }

    fn begin(&self, prefix: &str) -> Run {
        let job = self.cluster.job(&seven_splits(prefix), &format!("s3://shards/{prefix}"));
        Run::begin(self.scratch, &job, &[], &|command| {
            self.store.weed.environment(command);
            self.driver.attach(command);
        })
    }

    #[track_caller]
    fn wait_for_commits(&self, run: &mut Run, prefix: &str, wanted: usize) {
        run.wait_until("commits", || self.store.committed(prefix) >= wanted);
    }

    /// Number of renewals of a run's lease.
    fn renewals(&self, prefix: &str) -> u64 {
        let lease = self.store.s3.get("shards", &format!("{prefix}/_stillhouse/lease.json")).unwrap();
        serde_json::from_slice::<Value>(&lease).unwrap()["renewals"].as_u64().unwrap()
    }
}

#[test]
fn an_executor_that_is_cut_off_in_mid_job_and_joined_again_harms_nothing() {
    let scratch = scratch();
    let Some(mut site) = Site::start(&scratch) else { return };
    let (mut away, mut last) = (site.executor("away"), site.executor("last"));
    let mut run = site.begin("cut");
    let split = away.held.wait_for_commit();
    // the run cannot end before this executor commits
    last.held.wait_for_commit();
    let stays = site.executor("stays");
    stays.held.release_commits();
    site.wait_for_commits(&mut run, "cut", 1);

    away.host.cut();
    // it tries to commit, and no request gets through
    away.held.release_commits();
    run.wait_until("its split is made by another one", || stays.has_committed(split));
    run.wait_until("all commits but one", || site.store.committed("cut") == SPLITS - 1);
    let (records, _) = site.store.state("cut");
    assert!(!away.has_committed(split));
    assert!(away.host.reconnect() > 0);
    // Coming second is not a failure: the record that it finds is valid for the split.
    run.wait_until("it comes late", || away.has_committed(split));
    // The record is still the first one's. The only open upload is that of the waiting executor.
    let (now, uploads) = site.store.state("cut");
    assert_eq!((now, uploads.len()), (records, 1), "{uploads:?}");
    last.held.release_commits();
    run.expect_success();
    site.store.assert_finished("cut");

    // the executor that was cut off works normally
    drop((stays, last));
    site.begin("after").expect_success();
    site.store.assert_finished("after");
    assert_eq!(read_log(&away.held.executor.log).matches("committed split=").count(), 1 + SPLITS);
}

#[test]
fn a_driver_that_is_cut_off_for_a_while_goes_on() {
    let scratch = scratch();
    let Some(mut site) = Site::start(&scratch) else { return };
    let (mut one, mut last) = (site.executor("one"), site.executor("last"));
    let mut run = site.begin("driven");
    one.held.wait_for_commit();
    last.held.wait_for_commit();
    one.held.release_commits();
    site.wait_for_commits(&mut run, "driven", 1);
    let before = site.renewals("driven");
    run.wait_until("a renewal", || site.renewals("driven") > before);

    let before = site.renewals("driven");
    site.driver.cut();
    let cut = Instant::now();
    // the executors work without the driver
    site.wait_for_commits(&mut run, "driven", SPLITS - 1);
    // A renewal starts every 5 s and times out after 5 s; a lease expires after 20 s, and so does the connection.
    std::thread::sleep(Duration::from_secs(12).saturating_sub(cut.elapsed()));
    assert_eq!(site.renewals("driven"), before);
    assert!(site.driver.reconnect() > 0);
    run.wait_until("a renewal", || site.renewals("driven") > before);
    last.held.release_commits();
    run.expect_success();
    site.store.assert_finished("driven");
}

#[test]
fn a_run_whose_scheduler_is_cut_off_ends_by_name_and_goes_on_when_started_again() {
    let scratch = scratch();
    let Some(mut site) = Site::start(&scratch) else { return };
    let (mut one, mut held) = (site.executor("one"), site.executor("held"));
    let mut run = site.begin("lost");
    one.held.wait_for_commit();
    let split = held.held.wait_for_commit();
    one.held.release_commits();
    site.wait_for_commits(&mut run, "lost", 1);

    site.scheduler.cut();
    let lost = format!("the scheduler at {} was lost: ", site.cluster.address());
    run.expect_failure(&[&lost, "run the same command again to resume"]);
    let committed = shards_in(&site.store.s3, "shards", "lost");
    assert!((1..SPLITS).contains(&committed.len()), "{committed:?}");
    assert!(site.scheduler.reconnect() > 0);

    // the executor that worked for the run notices that it has ended
    held.held.release_commits();
    held.held.executor.wait_for_log("this one stops");
    assert!(!held.has_committed(split));
    site.begin("lost").expect_success();
    site.store.assert_finished("lost");
}
