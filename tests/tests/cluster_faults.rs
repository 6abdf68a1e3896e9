//! Proves that late, retried or speculative tasks cannot damage a data set in a store: late attempts, lost responses,
//! and suspended processes that resume.
//!
//! Executors and drivers reach the store through separate proxies, which lose responses or delay requests as long as
//! the test wants. Delays are exact to the request: a record's PUT waits in the network while another executor makes
//! the same split, and arrives afterwards.
//!
//! `cluster` tests executors that are suspended before a commit and resume after their run has ended. In these tests
//! the run continues, or another run has the output.

use std::process::Command;

use serde_json::{Value, json};
use stillhouse_tests::proxy::{FaultKind, FaultPlan, FaultProxy, HoldPoint, RequestFilter};
use stillhouse_tests::s3::{self, ADMIN};
use stillhouse_tests::{Scratch, with};

use crate::cluster::{Cluster, Executor, HeldExecutor, read_log, scratch};
use crate::cluster_store::{Run, SPLITS, Store, has_committed, last_split, seven_splits};

struct Site<'a> {
    scratch: &'a Scratch,
    cluster: Cluster<'a>,
    store: Store,
}

fn is_record(method: &str, target: &str) -> bool {
    method == "PUT" && target.contains("/_stillhouse/splits/")
}

fn is_part(method: &str, target: &str) -> bool {
    method == "PUT" && target.contains("partNumber=")
}

fn is_lease(method: &str, target: &str) -> bool {
    method == "PUT" && target.contains("/_stillhouse/lease.json")
}

fn is_completion(method: &str, target: &str) -> bool {
    method == "POST" && target.contains("uploadId=")
}

fn is_manifest(method: &str, target: &str) -> bool {
    method == "PUT" && target.ends_with("/manifest.json")
}

/// The server acts but its response is lost: `max_consecutive` times per request, then it succeeds once.
fn lost_responses(seed: u64, max_consecutive: u32, only: RequestFilter) -> FaultPlan {
    let kinds = vec![FaultKind::LostResponse, FaultKind::ResetResponse, FaultKind::False500];
    FaultPlan { seed, probability: 1.0, kinds, max_consecutive, only }
}

/// Number of requests whose response was lost.
fn count_lost_responses(proxies: &[&FaultProxy], what: RequestFilter) -> usize {
    let requests = proxies.iter().flat_map(|proxy| proxy.requests());
    let faulty = requests.filter(|r| r.fault.is_some() && what(&r.method, &format!("{}?{}", r.path, r.query)));
    faulty.count()
}

fn environment_through(proxy: &FaultProxy) -> impl Fn(&mut Command) {
    let endpoint = proxy.endpoint();
    move |command| s3::environment(command, &endpoint, ADMIN)
}

impl<'a> Site<'a> {
    fn start(scratch: &'a Scratch) -> Self {
        let store = Store::start(scratch, None, &|_| {});
        Self { scratch, cluster: Cluster::start(scratch), store }
    }

    /// A working network.
    fn network(&self) -> FaultProxy {
        FaultProxy::start(self.store.weed.endpoint(), FaultPlan { probability: 0.0, ..FaultPlan::default() })
    }

    /// The job with other retry limits, so that requests delayed in the network do not time out.
    fn job(&self, prefix: &str, attempts: u32) -> Value {
        let job = self.cluster.job(&seven_splits(prefix), &format!("s3://shards/{prefix}"));
        let retry = json!({"max_attempts": attempts, "longest_seconds": 600, "request_timeout_seconds": 300});
        with(job, &json!({"storage": {"retry": retry}}))
    }

    fn begin(&self, job: &Value, more: &[&str], set: &dyn Fn(&mut Command)) -> Run {
        Run::begin(self.scratch, job, more, set)
    }

    fn executor(&mut self, network: &FaultProxy) -> Executor {
        self.cluster.executor(&environment_through(network))
    }
}

#[test]
fn an_attempt_that_comes_late_to_a_run_at_work_is_nobodys_split() {
    let scratch = scratch();
    let mut site = Site::start(&scratch);
    let moments: [(HoldPoint, RequestFilter); 3] =
        [(HoldPoint::Request, is_part), (HoldPoint::Request, is_record), (HoldPoint::Response, is_record)];
    let networks = moments.map(|(waits, only)| {
        let network = site.network();
        network.hold(waits, only);
        network
    });
    let mut late = [&networks[0], &networks[1], &networks[2]].map(|network| site.executor(network));
    let store = site.network();
    // the run cannot end before this executor commits
    let mut last = HeldExecutor::named(&mut site.cluster, "last", &environment_through(&store));
    let mut run = site.begin(&site.job("late", 10), &[], &environment_through(&store));
    run.wait_until("requests under way", || networks.iter().all(|network| network.waiting() == 1));
    last.wait_for_commit();
    let splits = late.each_ref().map(|executor| last_split(executor).unwrap());
    late.iter().for_each(|executor| executor.signal(libc::SIGSTOP));

    let other = site.executor(&store);
    run.wait_until("its splits are made by another one", || splits.iter().all(|s| has_committed(&other, *s)));
    let (records, _) = site.store.state("late");
    assert_eq!(records.len(), SPLITS - 1);
    for (network, (executor, split)) in networks.iter().zip(late.iter_mut().zip(splits)) {
        assert!(network.waiting() == 1 && !has_committed(executor, split));
        network.release();
        executor.signal(libc::SIGCONT);
        // losing to another executor is not a failure
        executor.wait_for_log(&format!("committed split={split} "));
    }
    // Each record is still the first one's. The only open upload is that of the waiting executor.
    let (now, uploads) = site.store.state("late");
    assert_eq!((now, uploads.len()), (records, 1), "{uploads:?}");
    last.release_commits();
    run.expect_success();
    site.store.assert_finished("late");
}

#[test]
fn answers_to_conditional_writes_that_nobody_hears_change_nothing() {
    let scratch = scratch();
    let mut site = Site::start(&scratch);
    let [of_driver, of_one, of_last] = [1, 2, 3].map(|seed| {
        let network = site.network();
        let conditional = |m: &str, t: &str| is_record(m, t) || is_lease(m, t) || is_completion(m, t);
        network.set_plan(lost_responses(seed, 2, conditional));
        network
    });
    let one = site.executor(&of_one);
    let mut last = HeldExecutor::named(&mut site.cluster, "last", &environment_through(&of_last));
    let mut run = site.begin(&site.job("unheard", 10), &[], &environment_through(&of_driver));
    last.wait_for_commit();
    // the lease's creation and one renewal
    run.wait_until("a renewal", || count_lost_responses(&[&of_driver], is_lease) >= 4);
    last.release_commits();
    run.expect_success();
    site.store.assert_finished("unheard");
    assert_eq!(count_lost_responses(&[&of_one, &of_last], is_record), 2 * SPLITS);
    assert!(count_lost_responses(&[&of_one, &of_last], is_completion) >= 2 * SPLITS);

    // If every response to a record's PUT is lost, the attempt fails and the next one finds the record.
    for (seed, network) in [(4, &of_one), (5, &of_last)] {
        network.clear();
        network.set_plan(lost_responses(seed, u32::MAX, is_record));
    }
    site.begin(&site.job("never-heard", 2), &[], &environment_through(&site.network())).expect_success();
    site.store.assert_finished("never-heard");
    assert_eq!(count_lost_responses(&[&of_one, &of_last], is_record), 2 * SPLITS);
    drop((one, last));
}

#[test]
fn a_split_that_fails_each_time_ends_the_run_after_four_tries() {
    let scratch = scratch();
    let mut site = Site::start(&scratch);
    let (store, broken) = (site.network(), site.network());
    let executor = site.executor(&broken);
    let only = |m: &str, t: &str| is_record(m, t) && t.contains("/00003.json");
    broken.set_plan(FaultPlan {
        seed: 6,
        probability: 1.0,
        kinds: vec![FaultKind::Error500],
        max_consecutive: u32::MAX,
        only,
    });
    let run = site.begin(&site.job("hopeless", 2), &[], &environment_through(&store));
    run.expect_failure(&["splits/00003.json", "(split 3 has failed so 4 times here)"]);
    assert_eq!(read_log(&executor.log).matches("begins split=3 ").count(), 4, "{}", read_log(&executor.log));
    // once the store works again, the same command completes the job
    broken.set_plan(FaultPlan { probability: 0.0, ..FaultPlan::default() });
    site.begin(&site.job("hopeless", 2), &[], &environment_through(&store)).expect_success();
    site.store.assert_finished("hopeless");
}

#[test]
fn who_wakes_up_after_the_lease_has_moved_changes_nothing() {
    let scratch = scratch();
    let mut site = Site::start(&scratch);
    let [store, of_one, of_late, of_driver] = [(); 4].map(|()| site.network());
    // a driver that has checked that it holds the output, and whose manifest is in flight
    let one = site.executor(&of_one);
    of_driver.hold(HoldPoint::Request, is_manifest);
    let mut at_its_end = site.begin(&site.job("end", 10), &[], &environment_through(&of_driver));
    at_its_end.wait_until("its manifest", || of_driver.waiting() == 1);
    at_its_end.signal(libc::SIGSTOP);

    // a driver in mid-job, with an executor whose record is in flight
    of_late.hold(HoldPoint::Request, is_record);
    let mut late = site.executor(&of_late);
    let mut in_mid_job = site.begin(&site.job("middle", 10), &[], &environment_through(&store));
    in_mid_job.wait_until("a record under way", || of_late.waiting() == 1);
    let split = last_split(&late).unwrap();
    in_mid_job.wait_until("commits", || site.store.committed("middle") == SPLITS - 1);
    in_mid_job.signal(libc::SIGSTOP);

    // another job takes the first output, the same command the second one
    of_one.hold(HoldPoint::Request, is_record);
    let other = with(seven_splits("end"), &json!({"pack": {"length": 32}}));
    let other = site.begin(&other, &["--overwrite"], &environment_through(&store));
    let mut again = site.begin(&site.job("middle", 10), &[], &environment_through(&store));
    again.wait_until("a second record of the split", || of_one.waiting() == 1);
    // the record that arrives first names an upload that no longer exists
    let record = format!("middle/_stillhouse/splits/{split:05}.json");
    assert!(site.store.s3.get("shards", &record).is_none());
    of_late.release();
    again.wait_until("the late record", || site.store.s3.get("shards", &record).is_some());
    of_one.release();
    again.expect_success();
    site.store.assert_finished("middle");
    assert!(read_log(&one.log).contains("another process aborted its upload"), "{}", read_log(&one.log));
    late.wait_for_log("; this one stops");
    other.expect_success();

    let before = site.store.s3.files("shards", "");
    // the store refuses the delayed manifest
    of_driver.release();
    for sleeper in [at_its_end, in_mid_job] {
        sleeper.signal(libc::SIGCONT);
        sleeper.expect_failure(&["another run has taken this output over; this one stops"]);
    }
    assert_eq!(site.store.s3.files("shards", ""), before);
    assert_eq!(site.store.s3.list_multipart_uploads("shards"), Vec::new());
}

/// Number of splits that an executor has begun.
fn begun(executor: &Executor) -> usize {
    read_log(&executor.log).matches("begins split=").count()
}

#[test]
fn a_run_that_is_told_to_stop_calls_its_job_back_and_gives_its_output_free() {
    let scratch = scratch();
    let mut site = Site::start(&scratch);
    let store = site.network();
    let mut held = HeldExecutor::named(&mut site.cluster, "held", &environment_through(&store));
    let mut run = site.begin(&site.job("stopped", 10), &[], &environment_through(&store));
    held.wait_for_commit();
    run.signal(libc::SIGTERM);
    assert_eq!(run.server.wait(), Some(143), "{}", run.log_text());
    assert!(
        run.log_text().contains("0 of 7 splits are done and stay: run the same command again"),
        "{}",
        run.log_text()
    );
    // the lease is deleted, not left to expire
    assert!(site.store.s3.get("shards", "stopped/_stillhouse/lease.json").is_none());
    held.release_commits();
    held.executor.wait_for_log("the run that this worker works for has ended; this one stops");
    // No more tasks were handed out: the executor has since made only the next job's splits.
    site.begin(&site.job("after", 10), &[], &environment_through(&store)).expect_success();
    site.store.assert_finished("after");
    assert_eq!((begun(&held.executor), site.store.committed("stopped")), (1 + SPLITS, 0));
    site.begin(&site.job("stopped", 10), &[], &environment_through(&store)).expect_success();
    site.store.assert_finished("stopped");
}

#[test]
fn executors_of_a_killed_run_stop_when_its_lease_is_not_renewed_any_more() {
    let scratch = scratch();
    let mut site = Site::start(&scratch);
    let store = site.network();
    let mut held = HeldExecutor::named(&mut site.cluster, "held", &environment_through(&store));
    let mut run = site.begin(&site.job("killed", 10), &[], &environment_through(&store));
    held.wait_for_commit();
    run.server.kill();
    // no message ends the run, and its lease still exists
    held.executor.wait_for_log("has not renewed its lease for 35 s");
    assert!(site.store.s3.get("shards", "killed/_stillhouse/lease.json").is_some());
    held.release_commits();
    site.begin(&site.job("after", 10), &[], &environment_through(&store)).expect_success();
    site.store.assert_finished("after");
    // the split in progress is committed, and no further one was begun
    assert_eq!((begun(&held.executor), site.store.committed("killed")), (1 + SPLITS, 1));
    site.begin(&site.job("killed", 10), &[], &environment_through(&store)).expect_success();
    site.store.assert_finished("killed");
}
