//! Proves that a run ends correctly when messages between scheduler and executors are lost, when executors are told to
//! stop, and when its input changes.
//!
//! Needs a program with the feature `distributed`, as all tests of the Makefile have. `make cluster-test` runs these.

use std::fs;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use stillhouse_tests::server::{Ports, Server};
use stillhouse_tests::{run_command, shards, with};

use crate::append;
use crate::cluster::{
    Cluster, Executor, HeldExecutor, assert_finished, command, read_log, scratch, single_machine_shards,
};
use crate::cluster_store::Run;
use crate::stores::packing_job;

/// A connection to a server that the test can cut: data in flight is lost, and new connections fail.
struct CuttableConnection {
    address: SocketAddr,
    is_open: Arc<AtomicBool>,
    streams: Arc<Mutex<Vec<TcpStream>>>,
}

impl CuttableConnection {
    fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (is_open, streams) = (Arc::new(AtomicBool::new(true)), Arc::<Mutex<Vec<TcpStream>>>::default());
        let (open, all) = (Arc::clone(&is_open), Arc::clone(&streams));
        thread::spawn(move || {
            for caller in listener.incoming().flatten() {
                if !open.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(called) = TcpStream::connect(&server) else { continue };
                all.lock().unwrap().extend([caller.try_clone().unwrap(), called.try_clone().unwrap()]);
                let ends = [(caller.try_clone().unwrap(), called.try_clone().unwrap()), (called, caller)];
                for (mut from, mut to) in ends {
                    thread::spawn(move || {
                        let _ = io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { address, is_open, streams }
    }

    fn cut(&self) {
        self.is_open.store(false, Ordering::SeqCst);
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn reconnect(&self) {
        self.is_open.store(true, Ordering::SeqCst);
    }
}

/// A tokenizing and packing job of several splits, without a teacher.
fn job() -> Value {
    with(packing_job(), &json!({"input": {"split_megabytes": 0.0015}}))
}

fn splits_begun(executor: &Executor) -> usize {
    read_log(&executor.log).matches("begins split=").count()
}

#[test]
fn the_end_of_a_split_that_is_lost_on_its_way_does_not_hang_the_run() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &job());
    let ports = Ports::reserve();
    let address = format!("127.0.0.1:{}", ports.port(0));
    let log = scratch.path("scheduler.log");
    // with this timeout, an executor that does not ask for a while does not count as dead
    let mut scheduler =
        Server::start(command(&scratch, &["scheduler", "--listen", &address, "--dead-after", "600"]), &log);
    scheduler.wait_until("scheduler", || read_log(&log).contains("the scheduler listens on"));
    let connection = CuttableConnection::to(address.clone());
    let hold = scratch.write("hold", "");
    let executor_log = scratch.path("executor.log");
    let through = connection.address.to_string();
    let mut start = command(&scratch, &["executor", "--scheduler", &through, "--slots", "1", "--threads", "1"]);
    start.env("STILLHOUSE_TEST_HOLD_COMMIT", &hold);
    let mut executor = Server::start(start, &executor_log);
    let engine = json!({"kind": "ballista", "scheduler": address});
    let on_cluster = with(job(), &json!({"engine": engine, "output": {"path": "lost"}}));
    let run = Run::begin(&scratch, &on_cluster, &[], &|_| {});
    executor.wait_until("its commit", || hold.with_extension("reached").exists());
    connection.cut();
    fs::remove_file(&hold).unwrap();
    executor.wait_until("the commit", || read_log(&executor_log).contains("committed split="));
    // It reports the end only once. It asks 20 times a second, and no request gets through.
    thread::sleep(Duration::from_secs(1));
    connection.reconnect();
    run.expect_success();
    assert_finished(&scratch.path("lost"), &expected);
    assert!(read_log(&log).contains("1 of its tasks were lost, or their results were"), "{}", read_log(&log));
}

#[test]
fn an_input_that_changes_before_an_executor_joins_is_never_mixed_with_what_it_was() {
    let scratch = scratch();
    let before = fs::read(scratch.path("corpus.jsonl")).unwrap();
    let mut cluster = Cluster::start(&scratch);
    let mut first = HeldExecutor::named(&mut cluster, "first", &|_| {});
    let mut run = Run::begin(&scratch, &cluster.job(&job(), "mixed"), &[], &|_| {});
    first.wait_for_commit();
    // keep the length, because names and sizes are in the job's hash
    let text = String::from_utf8(before).unwrap();
    fs::write(scratch.path("corpus.jsonl"), text.replace(" the ", " The ")).unwrap();
    let second = cluster.executor(&|_| {});
    assert_ne!(run.server.wait(), Some(0), "{}", run.log_text());
    let told = run.log_text();
    assert!(told.contains("the input is another one as this machine sees it"), "{told}");
    assert!(told.contains("corpus.jsonl: ") && told.contains("; the run has "), "{told}");
    assert!(!scratch.path("mixed/_SUCCESS").exists());
    drop((first, second));
}

#[test]
fn an_executor_at_work_that_is_told_to_stop_goes_and_others_make_its_splits() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &job());
    let mut cluster = Cluster::start(&scratch);
    let hold = scratch.write("hold", "");
    let address = cluster.address();
    let mut start = command(&scratch, &["executor", "--scheduler", &address, "--slots", "2", "--threads", "2"]);
    start.env("STILLHOUSE_TEST_HOLD_COMMIT", &hold);
    let log = scratch.path("two.log");
    let mut two = Executor { server: Server::start(start, &log), log };
    let run = Run::begin(&scratch, &cluster.job(&job(), "told"), &[], &|_| {});
    let log = two.log.clone();
    two.server.wait_until("two splits", || read_log(&log).matches("begins split=").count() == 2);
    // A split is a task: both of its slots are taken, and the other executor gets all other splits.
    let other = cluster.executor(&|_| {});
    let (other_log, all) = (other.log.clone(), expected.len());
    two.server.wait_until("the others", || read_log(&other_log).matches("committed split=").count() == all - 2);
    assert_eq!(splits_begun(&two), 2);
    two.signal(libc::SIGTERM);
    assert_eq!(two.server.wait(), Some(0), "{}", read_log(&two.log));
    assert!(
        read_log(&two.log).contains("stopping: other executors make the unfinished splits"),
        "{}",
        read_log(&two.log)
    );
    run.expect_success();
    assert_finished(&scratch.path("told"), &expected);
    assert_eq!(read_log(&two.log).matches("committed split=").count(), 0);
}

#[test]
fn an_executor_for_a_device_that_is_none_does_not_start() {
    let scratch = scratch();
    let start = |device| -> Command { command(&scratch, &["executor", "--device", device]) };
    run_command(&mut start("banana")).expect(2).says(&["--device banana: ", "`banana`", "cuda:N"]);
    run_command(&mut start("cuda:99")).expect(2).says(&["--device cuda:99: "]);
}

#[test]
fn what_a_cluster_appends_is_what_one_machine_appends() {
    let scratch = append::scratch(&append::small());
    let mut cluster = Cluster::start(&scratch);
    let executors = cluster.executors(2);
    let on_cluster = cluster.job(&append::small(), "grown");
    Run::begin(&scratch, &on_cluster, &[], &|_| {}).expect_success();
    let before = shards(&scratch.path("out"));
    assert_eq!(shards(&scratch.path("grown")), before);
    append::grow(&scratch);
    scratch.stillhouse(&["run", "job.yaml", "--append", "--quiet"]).expect(0);
    Run::begin(&scratch, &on_cluster, &["--append"], &|_| {}).expect_success();
    let grown = shards(&scratch.path("out"));
    assert!(grown.len() > before.len());
    assert_eq!(shards(&scratch.path("grown")), grown);
    drop(executors);
}

#[test]
fn slots_that_the_memory_of_a_job_has_no_room_for_wait() {
    let scratch = scratch();
    let memory = json!({"engine": {"memory_megabytes": 100}, "output": {"row_group_megabytes": 32}});
    let job = with(job(), &memory);
    let expected = single_machine_shards(&scratch, &job);
    let cluster = Cluster::start(&scratch);
    let hold = scratch.write("hold", "");
    let address = cluster.address();
    let mut start = command(&scratch, &["executor", "--scheduler", &address, "--slots", "3", "--threads", "3"]);
    start.env("STILLHOUSE_TEST_HOLD_COMMIT", &hold);
    let log = scratch.path("three.log");
    let mut three = Server::start(start, &log);
    let run = Run::begin(&scratch, &cluster.job(&job, "small"), &[], &|_| {});
    three.wait_until("three splits", || read_log(&log).matches("begins split=").count() == 3);
    let reports = scratch.path("small/_stillhouse/workers");
    let at_work = || {
        let files = fs::read_dir(&reports).into_iter().flatten().flatten().map(|entry| entry.path());
        let told = files.filter_map(|file| serde_json::from_slice::<Value>(&fs::read(file).ok()?).ok());
        told.map(|report| report["splits"].as_array().map_or(0, Vec::len)).max().unwrap_or(0)
    };
    three.wait_until("its commit and its report", || hold.with_extension("reached").exists() && at_work() > 0);
    assert_eq!(at_work(), 1);
    fs::remove_file(&hold).unwrap();
    run.expect_success();
    assert_finished(&scratch.path("small"), &expected);
}
