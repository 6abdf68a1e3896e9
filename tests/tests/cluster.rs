//! Proves that a job on a cluster makes the same bytes as on one machine, even if processes die, are suspended or come
//! late.
//!
//! Needs a program with the feature `distributed`, as all tests of the Makefile have. `make cluster-test` runs these.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::network::Host;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::server::{Ports, Server};
use stillhouse_tests::{Scratch, files, job, nano_teacher, run_command, shards, with};

use crate::resume::count_shards;
use crate::stores::{packing_job, shards_in};

pub(crate) const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// What an executor logs once it asks for work.
const READY_MESSAGE: &str = "for splits";

/// A scheduler with a changing number of executors.
pub(crate) struct Cluster<'a> {
    scratch: &'a Scratch,
    ports: Ports,
    /// The host of the scheduler, or `None` for this machine's own network.
    host: Option<Host>,
    scheduler: Server,
    started: usize,
}

impl<'a> Cluster<'a> {
    pub(crate) fn start(scratch: &'a Scratch) -> Self {
        Self::begin_at(scratch, None)
    }

    /// Starts the scheduler in its own host.
    pub(crate) fn start_on(scratch: &'a Scratch, host: &Host) -> Self {
        Self::begin_at(scratch, Some(host.clone()))
    }

    fn begin_at(scratch: &'a Scratch, host: Option<Host>) -> Self {
        let ports = Ports::reserve();
        let scheduler = start_scheduler(scratch, &ports, host.as_ref());
        Self { scratch, ports, host, scheduler, started: 0 }
    }

    pub(crate) fn address(&self) -> String {
        address(&self.ports, self.host.as_ref())
    }

    /// Kills the scheduler and restarts it on the same port.
    fn restart(&mut self) {
        self.scheduler.kill();
        self.scheduler = start_scheduler(self.scratch, &self.ports, self.host.as_ref());
    }

    pub(crate) fn executor(&mut self, set: &dyn Fn(&mut Command)) -> Executor {
        let mut executor = self.start_executor(set);
        executor.wait_for_log(READY_MESSAGE);
        executor
    }

    /// Starts an executor without waiting for it.
    pub(crate) fn start_executor(&mut self, set: &dyn Fn(&mut Command)) -> Executor {
        self.started += 1;
        let log = self.scratch.path(&format!("executor-{}.log", self.started));
        let address = self.address();
        let mut command =
            command(self.scratch, &["executor", "--scheduler", &address, "--slots", "1", "--threads", "1"]);
        set(&mut command);
        Executor { server: Server::start(command, &log), log }
    }

    pub(crate) fn executors(&mut self, n: usize) -> Vec<Executor> {
        (0..n).map(|_| self.executor(&|_| {})).collect()
    }

    /// The job with this cluster as its engine.
    pub(crate) fn job(&self, job: &Value, output: &str) -> Value {
        let engine = json!({"kind": "ballista", "scheduler": self.address()});
        with(job.clone(), &json!({"engine": engine, "output": {"path": output}}))
    }

    /// Runs a job on the cluster.
    fn run(&self, job: &Value, output: &str) -> PathBuf {
        self.scratch.job("cluster.yaml", &self.job(job, output));
        run_command(&mut command(self.scratch, &["run", "cluster.yaml"])).expect(0);
        self.scratch.path(output)
    }

    /// Starts a job on the cluster without waiting for it.
    fn begin(&self, job: &Value, output: &str) -> Child {
        self.scratch.job("cluster.yaml", &self.job(job, output));
        let mut command = command(self.scratch, &["run", "cluster.yaml"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

pub(crate) struct Executor {
    pub(crate) server: Server,
    pub(crate) log: PathBuf,
}

impl Executor {
    /// Whether the executor asks for work.
    pub(crate) fn is_ready(&self) -> bool {
        read_log(&self.log).contains(READY_MESSAGE)
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: Signals a process that this test has started.
        assert_eq!(unsafe { libc::kill(self.server.id(), signal) }, 0);
    }

    pub(crate) fn wait_for_log(&mut self, text: &str) {
        let log = self.log.clone();
        self.server.wait_until(text, || read_log(&log).contains(text));
    }
}

pub(crate) fn read_log(log: &Path) -> String {
    fs::read_to_string(log).unwrap_or_default()
}

pub(crate) fn command(scratch: &Scratch, arguments: &[&str]) -> Command {
    let mut command = scratch.command(arguments);
    command.env("STILLHOUSE_CLUSTER_TOKEN", TOKEN).env_remove("STILLHOUSE_CLUSTER_TOKEN_FILE");
    command
}

fn address(ports: &Ports, host: Option<&Host>) -> String {
    format!("{}:{}", host.map_or(Ipv4Addr::LOCALHOST, Host::address), ports.port(0))
}

/// Starts a scheduler that soon notices dead executors; a live one asks for work at least every five seconds.
fn start_scheduler(scratch: &Scratch, ports: &Ports, host: Option<&Host>) -> Server {
    let log = scratch.path("scheduler.log");
    let _ = fs::remove_file(&log);
    let mut command = command(scratch, &["scheduler", "--listen", &address(ports, host), "--dead-after", "8"]);
    if let Some(host) = host {
        host.attach(command.arg("--trusted-network"));
    }
    let mut server = Server::start(command, &log);
    server.wait_until("scheduler", || read_log(&log).contains("the scheduler listens on"));
    server
}

/// A job with a teacher and seven splits.
pub(crate) fn small_job() -> Value {
    with(job(), &json!({"input": {"split_megabytes": 0.0015, "holdout": {"validation": {"last_documents": 1}}}}))
}

pub(crate) fn scratch() -> Scratch {
    Scratch::with_corpus(7, 1300)
}

/// The shards of a job that runs on one machine.
pub(crate) fn single_machine_shards(scratch: &Scratch, job: &Value) -> BTreeMap<String, String> {
    let made = shards(&scratch.make(&with(job.clone(), &json!({"output": {"path": "alone"}}))));
    assert!(made.len() >= 6, "{made:?}");
    made
}

/// Asserts that a data set is complete and has no leftovers.
#[track_caller]
pub(crate) fn assert_finished(dataset: &Path, expected: &BTreeMap<String, String>) {
    assert_eq!(&shards(dataset), expected);
    assert!(dataset.join("_SUCCESS").exists());
    let state: Vec<PathBuf> = files(&dataset.join("_stillhouse")).into_keys().collect();
    let records = state.iter().filter(|name| name.starts_with("splits")).count();
    assert_eq!((records, state.len()), (expected.len(), expected.len() + 2), "{state:?}");
}

fn manifest_shards(dataset: &Path) -> Value {
    serde_json::from_slice::<Value>(&fs::read(dataset.join("manifest.json")).unwrap()).unwrap()["shards"].take()
}

#[test]
fn one_two_and_three_executors_make_the_bytes_of_one_machine() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &small_job());
    let mut cluster = Cluster::start(&scratch);
    let mut executors = Vec::new();
    for n in 1..=3 {
        executors.append(&mut cluster.executors(1));
        let dataset = cluster.run(&small_job(), &format!("on-{n}"));
        assert_finished(&dataset, &expected);
        assert_eq!(manifest_shards(&dataset), manifest_shards(&scratch.path("alone")));
    }
    let at_work = executors.iter().filter(|executor| read_log(&executor.log).contains("committed split=")).count();
    assert!(at_work >= 2, "only {at_work} executors made splits");
    // a damaged shard is repaired on the cluster as well
    let dataset = scratch.path("on-3");
    let name = expected.keys().next().unwrap();
    fs::write(dataset.join("data").join(name), b"damaged").unwrap();
    scratch.job("cluster.yaml", &cluster.job(&small_job(), "on-3"));
    run_command(&mut command(&scratch, &["repair", "on-3", "cluster.yaml"])).expect(0);
    assert_eq!(shards(&dataset), expected);
}

#[test]
fn a_killed_scheduler_and_a_killed_driver_are_survived_by_running_again() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &small_job());
    let mut cluster = Cluster::start(&scratch);
    let _executors = cluster.executors(2);
    let dataset = scratch.path("again");
    let wait_for = |run: &mut Child, shards: usize| {
        while count_shards(&dataset) < shards {
            assert!(run.try_wait().unwrap().is_none(), "it ended before");
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    let mut run = cluster.begin(&small_job(), "again");
    wait_for(&mut run, 1);
    cluster.restart();
    let ended = run.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("was lost: it no longer has this job") && told.contains("to resume"), "{told}");

    let mut run = cluster.begin(&small_job(), "again");
    wait_for(&mut run, 3);
    run.kill().unwrap();
    run.wait().unwrap();
    for (name, sha256) in shards(&dataset) {
        assert_eq!(expected.get(&name), Some(&sha256), "{name}");
    }
    cluster.run(&small_job(), "again");
    assert_finished(&dataset, &expected);
}

/// An executor that stops right before a commit while its hold file exists.
pub(crate) struct HeldExecutor {
    pub(crate) executor: Executor,
    hold: PathBuf,
}

impl HeldExecutor {
    fn start(cluster: &mut Cluster<'_>, set: &dyn Fn(&mut Command)) -> Self {
        Self::named(cluster, "the sleeper", set)
    }

    pub(crate) fn named(cluster: &mut Cluster<'_>, name: &str, set: &dyn Fn(&mut Command)) -> Self {
        let hold = cluster.scratch.write(&format!("hold-{}", cluster.started), "");
        let executor = cluster.executor(&|command: &mut Command| {
            command.env("STILLHOUSE_TEST_HOLD_COMMIT", &hold).args(["--name", name]);
            set(command);
        });
        Self { executor, hold }
    }

    /// Waits until the executor is about to commit; returns the split.
    pub(crate) fn wait_for_commit(&mut self) -> u32 {
        let reached = self.hold.with_extension("reached");
        self.executor.server.wait_until("its commit", || reached.exists());
        let said = read_log(&self.executor.log);
        let (_, split) = said.rsplit_once("begins split=").unwrap();
        split.split(' ').next().unwrap().parse().unwrap()
    }

    /// Lets the executor commit, now and later.
    pub(crate) fn release_commits(&self) {
        fs::remove_file(&self.hold).unwrap();
    }

    /// Waits until the executor is about to commit, then suspends it so that it no longer asks for work.
    pub(crate) fn suspend_at_commit(&mut self) -> u32 {
        let split = self.wait_for_commit();
        self.executor.signal(libc::SIGSTOP);
        split
    }

    /// Resumes the executor and waits until it has tried to commit.
    pub(crate) fn resume(&mut self, says: &str) {
        self.release_commits();
        self.executor.signal(libc::SIGCONT);
        self.executor.wait_for_log(says);
    }
}

#[test]
fn who_comes_late_on_a_disk_harms_nothing() {
    let scratch = scratch();
    let job = with(packing_job(), &json!({"input": {"split_megabytes": 0.0015}}));
    let expected = single_machine_shards(&scratch, &job);
    let mut cluster = Cluster::start(&scratch);
    // a commit after the split was given to another executor and the run has ended
    let mut late = HeldExecutor::start(&mut cluster, &|_| {});
    let run = cluster.begin(&job, "late");
    let told = scratch.path("late/_stillhouse/workers");
    // Wait for the report's final name: an executor suspended during the put would leave the temporary file.
    let is_told = || {
        let names = fs::read_dir(&told).into_iter().flatten().flatten().map(|entry| entry.path());
        let reports = names.filter(|name| name.extension().is_some_and(|ending| ending == "json"));
        let reports = reports.filter_map(|name| serde_json::from_slice::<Value>(&fs::read(name).ok()?).ok());
        // The first report only says that the executor is getting ready.
        reports.into_iter().any(|report| report["splits"].as_array().is_some_and(|splits| !splits.is_empty()))
    };
    late.executor.server.wait_until("its report", is_told);
    late.suspend_at_commit();
    let _other = cluster.executors(1);
    let ended = run.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success() && told.contains("is made by the sleeper"), "{told}");
    assert_finished(&scratch.path("late"), &expected);
    late.resume("the run that this worker works for has ended");
    assert_finished(&scratch.path("late"), &expected);
    drop(late);

    // a commit after the driver was killed and the output was given to another job
    let mut zombie = HeldExecutor::start(&mut cluster, &|_| {});
    let mut run = cluster.begin(&job, "zombie");
    zombie.suspend_at_commit();
    run.kill().unwrap();
    run.wait().unwrap();
    let other = with(job, &json!({"pack": {"length": 32}, "output": {"path": "zombie"}}));
    scratch.job("other.yaml", &other);
    scratch.stillhouse(&["run", "other.yaml", "--overwrite", "--quiet"]).expect(0);
    let before = files(&scratch.path("zombie"));
    zombie.resume("this one stops");
    assert_eq!(files(&scratch.path("zombie")), before);
}

#[test]
fn a_cluster_writes_to_a_store_and_who_comes_late_there_harms_nothing() {
    let scratch = scratch();
    let job = with(packing_job(), &json!({"input": {"split_megabytes": 0.0015}}));
    let expected = single_machine_shards(&scratch, &job);
    let weed = Seaweed::start();
    weed.create_bucket("shards");
    let s3 = weed.s3();
    let with_keys = |command: &mut Command| weed.environment(command);
    let mut cluster = Cluster::start(&scratch);
    let run = |cluster: &Cluster<'_>, job: &Value, more: &[&str]| {
        scratch.job("cluster.yaml", job);
        let mut command = command(cluster.scratch, &[&["run", "cluster.yaml"], more].concat());
        with_keys(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ends = |run: Child| {
        let ended = run.wait_with_output().unwrap();
        assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
    };
    let clean = |prefix: &str| {
        assert_eq!(shards_in(&s3, "shards", prefix), expected);
        assert_eq!(s3.list_multipart_uploads("shards"), Vec::new());
    };
    // an executor without credentials is named in the error, before anything is made
    let stranger = cluster.executors(1);
    let refused = run(&cluster, &cluster.job(&job, "s3://shards/a"), &[]).wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && told.contains("(executor ") && told.contains("credentials"), "{told}");
    drop(stranger);

    let mut late = HeldExecutor::start(&mut cluster, &with_keys);
    let running = run(&cluster, &cluster.job(&job, "s3://shards/a"), &[]);
    late.suspend_at_commit();
    let _others = [cluster.executor(&with_keys), cluster.executor(&with_keys)];
    ends(running);
    clean("a");
    late.resume("this one stops");
    clean("a");
    drop(late);

    let mut zombie = HeldExecutor::start(&mut cluster, &with_keys);
    let mut running = run(&cluster, &cluster.job(&job, "s3://shards/b"), &[]);
    zombie.suspend_at_commit();
    running.kill().unwrap();
    running.wait().unwrap();
    let other = with(job.clone(), &json!({"pack": {"length": 32}, "output": {"path": "s3://shards/b"}}));
    ends(run(&cluster, &other, &["--overwrite"]));
    let before = s3.files("shards", "b/");
    zombie.resume("this one stops");
    assert_eq!(s3.files("shards", "b/"), before);
    assert_eq!(s3.list_multipart_uploads("shards"), Vec::new());
}

#[test]
fn what_does_not_belong_together_is_refused_by_name() {
    let scratch = Scratch::with_corpus(3, 600);
    scratch.job("job.yaml", &with(packing_job(), &json!({"engine": {"kind": "ballista", "scheduler": "127.0.0.1:9"}})));
    let refused = |arguments: &[&str], token: Option<&str>, code: i32, says: &[&str]| {
        let mut command = command(&scratch, arguments);
        match token {
            Some(token) => command.env("STILLHOUSE_CLUSTER_TOKEN", token),
            None => command.env_remove("STILLHOUSE_CLUSTER_TOKEN"),
        };
        let began = Instant::now();
        run_command(&mut command).expect(code).says(says);
        assert!(began.elapsed() < Duration::from_secs(20), "{arguments:?}");
    };
    for verb in [&["run", "job.yaml"][..], &["scheduler"], &["executor"]] {
        refused(verb, None, 2, &["a cluster needs a token", "STILLHOUSE_CLUSTER_TOKEN_FILE"]);
        refused(verb, Some("short"), 2, &["has 5 characters; valid: 32 or more"]);
    }
    refused(&["run", "job.yaml"], Some(TOKEN), 1, &["no scheduler answers at 127.0.0.1:9", "stillhouse scheduler"]);
    refused(&["executor", "--scheduler", "127.0.0.1:9", "--wait", "0"], Some(TOKEN), 1, &["no scheduler answers"]);
    refused(&["executor", "--scheduler", "here"], Some(TOKEN), 2, &["--scheduler: got \"here\"; valid: host:port"]);
    refused(
        &["scheduler", "--listen", "0.0.0.0:0"],
        Some(TOKEN),
        2,
        &["--listen 0.0.0.0:0", "--tls-certificate", "--trusted-network"],
    );
    assert!(!scratch.path("out").exists());

    let mut cluster = Cluster::start(&scratch);
    let address = cluster.address();
    let other = "f".repeat(32);
    refused(&["executor", "--scheduler", &address], Some(&other), 2, &["another token than this cluster's scheduler"]);
    scratch.job("job.yaml", &cluster.job(&packing_job(), "out"));
    refused(&["run", "job.yaml"], Some(&other), 2, &["another token than this cluster's scheduler"]);
    assert!(!scratch.path("out").exists());

    // an executor applies its own rules to every job
    let allowed = scratch.path("allowed");
    fs::create_dir(&allowed).unwrap();
    let strict = cluster.executor(&|command| {
        command.arg("--allow").arg(&allowed).arg("--allow").arg(nano_teacher());
    });
    refused(&["run", "job.yaml"], Some(TOKEN), 2, &["output.path", "does not allow writing here", "(executor "]);
    assert!(!scratch.path("out").exists());
    drop(strict);
}

#[test]
fn an_executor_that_cannot_hold_a_teacher_is_passed_over() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &small_job());
    let mut cluster = Cluster::start(&scratch);
    let small = cluster.executor(&|command| {
        command.args(["--memory-megabytes", "300", "--name", "small"]);
    });
    // Alone it returns every split and logs that. None of these counts as a failure of the job.
    let mut run = cluster.begin(&small_job(), "passed");
    let began = Instant::now();
    while !read_log(&small.log).contains("the job takes") {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", read_log(&small.log));
        assert!(run.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(50));
    }
    let large = cluster.executor(&|_| {});
    let status = run.wait().unwrap();
    let told = std::io::read_to_string(run.stderr.take().unwrap()).unwrap();
    assert!(status.success(), "{told}");
    assert_finished(&scratch.path("passed"), &expected);
    assert!(told.contains("executor small passes the splits of this job on: the job takes"), "{told}");
    assert!(told.contains(", weights ") && told.contains("this executor has 300 MB"), "{told}");
    let made = |executor: &Executor| read_log(&executor.log).matches("committed split=").count();
    assert_eq!((made(&small), made(&large)), (0, expected.len()));
}

#[test]
fn a_run_tells_how_far_its_executors_are() {
    let scratch = scratch();
    let mut cluster = Cluster::start(&scratch);
    let held = HeldExecutor::start(&mut cluster, &|_| {});
    scratch.job("cluster.yaml", &cluster.job(&small_job(), "told"));
    let log = scratch.path("events.jsonl");
    let mut command = command(&scratch, &["run", "cluster.yaml", "--json"]);
    command.stdin(Stdio::null()).stdout(fs::File::create(&log).unwrap()).stderr(Stdio::null());
    let mut run = command.spawn().unwrap();
    // The executor has made a shard and waits before its commit, so its counts come only from its reports.
    let began = Instant::now();
    let told = loop {
        let events = read_log(&log);
        let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let at_work = |event: &Value| {
            let stages = event["stages"].as_array().map_or(&[][..], Vec::as_slice);
            event["splits_done"] == 0 && stages.iter().any(|stage| stage["rows"].as_u64() > Some(0))
        };
        if let Some(told) = events.rev().find(at_work) {
            break told;
        }
        assert!(run.try_wait().unwrap().is_none(), "{}", read_log(&log));
        assert!(began.elapsed() < Duration::from_secs(60), "{}", read_log(&log));
        std::thread::sleep(Duration::from_millis(50));
    };
    assert!(told["documents"].as_u64() > Some(0) && told["teacher_tokens"].as_u64() > Some(0), "{told}");
    assert_eq!(told["devices"], 1, "{told}");
    assert!(read_log(&log).contains(r#""executor":"the sleeper""#));
    fs::remove_file(&held.hold).unwrap();
    assert!(run.wait().unwrap().success(), "{}", read_log(&log));
}

#[test]
fn a_split_that_another_executor_takes_over_is_told_of_again() {
    let scratch = scratch();
    let mut cluster = Cluster::start(&scratch);
    let held = |cluster: &mut Cluster<'_>, name: &str| {
        let hold = scratch.write(&format!("hold {name}"), "");
        let executor = cluster.executor(&|command| {
            command.env("STILLHOUSE_TEST_HOLD_COMMIT", &hold).args(["--name", name]);
        });
        (executor, hold)
    };
    let (mut first, _) = held(&mut cluster, "first");
    // a job of one split
    scratch.job("cluster.yaml", &cluster.job(&packing_job(), "over"));
    let log = scratch.path("events.jsonl");
    let mut command = command(&scratch, &["run", "cluster.yaml", "--json"]);
    command.stdin(Stdio::null()).stdout(fs::File::create(&log).unwrap()).stderr(Stdio::null());
    let mut run = command.spawn().unwrap();
    let mut until_told = |name: &str| {
        let (began, told) = (Instant::now(), format!(r#""split":0,"dataset_split":"train","executor":"{name}""#));
        while !read_log(&log).contains(&told) {
            assert!(run.try_wait().unwrap().is_none(), "{}", read_log(&log));
            assert!(began.elapsed() < Duration::from_secs(60), "{told}: {}", read_log(&log));
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    until_told("first");
    first.server.kill();
    let (_second, hold) = held(&mut cluster, "second");
    until_told("second");
    assert_eq!(read_log(&log).matches("split_started").count(), 2, "{}", read_log(&log));
    fs::remove_file(hold).unwrap();
    assert!(run.wait().unwrap().success(), "{}", read_log(&log));
}
