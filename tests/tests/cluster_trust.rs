//! Proves that a cluster does not mix machines that compute differently, programs of different builds, or rows of a
//! query that ran twice; and tests what users learn about executors.
//!
//! Needs a program with the feature `distributed`, as all tests of the Makefile have. `make cluster-test` runs these.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::server::Server;
use stillhouse_tests::{Scratch, binary, files, run_command, shards, with};

use crate::cluster::{
    Cluster, Executor, HeldExecutor, assert_finished, command, read_log, scratch, single_machine_shards, small_job,
};
use crate::cluster_store::Run;
use crate::stores::{packing_job, shards_in};

fn committed_splits(executor: &Executor) -> usize {
    read_log(&executor.log).matches("committed split=").count()
}

/// Starts a run on a cluster.
fn begin(scratch: &Scratch, cluster: &Cluster<'_>, job: &Value, output: &str, more: &[&str]) -> Run {
    Run::begin(scratch, &cluster.job(job, output), more, &|_| {})
}

#[cfg(target_arch = "x86_64")]
#[test]
fn an_executor_of_another_type_of_cpu_makes_nothing_and_the_others_do() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &small_job());
    // the bytes of a machine without vector instructions
    let of_baseline = with(small_job(), &json!({"output": {"path": "baseline"}}));
    scratch.job("baseline.yaml", &of_baseline);
    let mut command = scratch.command(&["run", "baseline.yaml", "--quiet"]);
    run_command(command.env("STILLHOUSE_TEST_CPU", "baseline")).expect(0);
    assert_ne!(shards(&scratch.path("baseline")), expected, "this machine has nothing but what every machine has");

    let mut cluster = Cluster::start(&scratch);
    let mut odd = cluster.executor(&|command| {
        command.env("STILLHOUSE_TEST_CPU", "baseline").args(["--name", "odd"]);
    });
    let run = begin(&scratch, &cluster, &small_job(), "mixed", &[]);
    // alone it returns every split
    odd.wait_for_log("are passed on: the run computes in f32 ");
    let told = read_log(&scratch.path("executor-1.log"));
    assert!(told.contains("this executor's machine computes f32 ") && told.contains("x86_64 baseline"), "{told}");
    assert!(!told.contains("splits that are done"), "{told}");
    let same = cluster.executor(&|_| {});
    let log = run.log.clone();
    run.expect_success();
    assert_finished(&scratch.path("mixed"), &expected);
    assert!(
        read_log(&log).contains("executor odd passes the splits of this job on: the run computes in f32 "),
        "{}",
        read_log(&log)
    );
    assert_eq!((committed_splits(&odd), committed_splits(&same)), (0, expected.len()));

    // conversely, this machine makes nothing for a run started on such a machine
    drop(odd);
    let mut run = Run::begin(&scratch, &cluster.job(&small_job(), "odd"), &[], &|command| {
        command.env("STILLHOUSE_TEST_CPU", "baseline");
    });
    let mut same = same;
    same.wait_for_log("are passed on: the run computes in f32 ");
    run.server.kill();
    assert_eq!(committed_splits(&same), expected.len());
}

/// A copy of the program with another build name, and that name.
fn of_other_sources(scratch: &Scratch) -> (PathBuf, String) {
    let name = "0.1.0+0123456789ab";
    let mut grep = Command::new("grep");
    grep.args(["-a", "-b", "-o", "-E", r"0\.1\.0\+[0-9a-f]{12}"]).arg(binary()).env("LC_ALL", "C");
    let found = run_command(&mut grep).expect(0).stdout;
    let mut program = fs::read(binary()).unwrap();
    for line in found.lines() {
        let at: usize = line.split_once(':').unwrap().0.parse().unwrap();
        program[at..at + name.len()].copy_from_slice(name.as_bytes());
    }
    let path = scratch.path("stillhouse-of-others");
    fs::write(&path, program).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (path, name.to_owned())
}

#[test]
fn a_program_of_the_same_version_and_other_sources_is_no_part_of_a_cluster() {
    let scratch = Scratch::with_corpus(3, 600);
    let (other, name) = of_other_sources(&scratch);
    let cluster = Cluster::start(&scratch);
    scratch.job("job.yaml", &cluster.job(&packing_job(), "out"));
    for arguments in [&["executor", "--scheduler", &cluster.address()][..], &["run", "job.yaml"]] {
        let as_ours = command(&scratch, arguments);
        let mut odd = Command::new(&other);
        odd.args(as_ours.get_args()).current_dir(as_ours.get_current_dir().unwrap());
        as_ours.get_envs().for_each(|(key, value)| match value {
            Some(value) => drop(odd.env(key, value)),
            None => drop(odd.env_remove(key)),
        });
        let says = format!("the caller {name}; valid: one build throughout a cluster");
        run_command(&mut odd).expect(2).says(&["the scheduler is stillhouse 0.1.0+", &says]);
    }
    assert!(!scratch.path("out").exists());
}

#[test]
fn a_mixture_is_made_once_however_many_make_its_splits() {
    let scratch = scratch();
    let input = &packing_job()["input"];
    let table = json!({"format": input["format"], "paths": input["paths"]});
    let tables = json!({"once": table, "often": with(table.clone(), &json!({"epochs": 2.5}))});
    let input = json!({"format": null, "paths": null, "tables": tables, "split_megabytes": 0.0015});
    let job = with(packing_job(), &json!({ "input": input }));
    let expected = shards(&scratch.make(&with(job.clone(), &json!({"output": {"path": "alone"}}))));
    assert!(expected.len() > 3, "{expected:?}");
    let mut cluster = Cluster::start(&scratch);
    let executors = [cluster.executor(&|_| {}), cluster.executor(&|_| {})];
    Run::begin(&scratch, &cluster.job(&job, "rows"), &[], &|_| {}).expect_success();
    assert_finished(&scratch.path("rows"), &expected);
    for executor in executors {
        assert!(!read_log(&executor.log).contains("the mixture:"), "{}", read_log(&executor.log));
    }
}

#[test]
fn a_query_runs_once_however_many_make_its_splits() {
    let scratch = scratch();
    let sql = "SELECT text FROM input WHERE length(text) > 10 ORDER BY text";
    let job = with(packing_job(), &json!({"input": {"sql": sql, "split_megabytes": 0.0015}}));
    let expected = shards(&scratch.make(&with(job.clone(), &json!({"output": {"path": "alone"}}))));
    assert!(expected.len() > 1, "{expected:?}");
    let weed = Seaweed::start();
    weed.create_bucket("shards");
    let s3 = weed.s3();
    let mut cluster = Cluster::start(&scratch);
    // a separate home folder simulates a separate machine
    let homes: Vec<PathBuf> = (0..3).map(|n| scratch.path(&format!("home-{n}"))).collect();
    homes.iter().for_each(|home| fs::create_dir(home).unwrap());
    let at_home = |n: usize| {
        let (home, weed) = (homes[n].clone(), &weed);
        move |command: &mut Command| {
            weed.environment(command);
            command.env("HOME", &home).env_remove("XDG_CACHE_HOME");
        }
    };
    let mut first = HeldExecutor::named(&mut cluster, "first", &at_home(0));
    let second = cluster.executor(&at_home(1));
    let begin =
        |cluster: &Cluster<'_>, output: &str| Run::begin(&scratch, &cluster.job(&job, output), &[], &at_home(2));
    let mut run = begin(&cluster, "s3://shards/rows");
    first.wait_for_commit();
    let beside = || s3.list("shards", "rows/_stillhouse/input/").len();
    assert_eq!(beside(), 2, "a part, and what is noted of it");
    // a resumed run on another machine uses the existing rows
    run.signal(libc::SIGTERM);
    assert_eq!(run.server.wait(), Some(143), "{}", run.log_text());
    fs::remove_dir_all(homes[2].join(".cache")).unwrap();
    first.release_commits();
    let again = begin(&cluster, "s3://shards/rows");
    let log = again.log.clone();
    again.expect_success();
    assert!(!read_log(&log).contains("running input.sql"), "{}", read_log(&log));
    assert_eq!(shards_in(&s3, "shards", "rows"), expected);
    assert_eq!((beside(), s3.list_multipart_uploads("shards").len()), (0, 0));

    // on a shared disk
    let run = begin(&cluster, "rows");
    run.expect_success();
    assert_finished(&scratch.path("rows"), &expected);
    for (executor, home) in [(&first.executor, &homes[0]), (&second, &homes[1])] {
        assert!(!read_log(&executor.log).contains("running input.sql"), "{}", read_log(&executor.log));
        assert!(!home.join(".cache").exists());
    }
    assert!(!homes[2].join(".cache").exists());
    assert_eq!(committed_splits(&first.executor) + committed_splits(&second), 2 * expected.len());
}

#[test]
fn what_executors_warn_of_is_told_by_the_run() {
    let scratch = scratch();
    let mut cluster = Cluster::start(&scratch);
    let _executor = cluster.executor(&|command| {
        command.args(["--name", "one"]);
    });
    scratch.write("bad.jsonl", "{\"no\": 1}\n");
    let input = json!({"paths": ["corpus.jsonl", "bad.jsonl"], "on_error": "skip", "max_skipped": 0.5});
    let run = begin(&scratch, &cluster, &with(packing_job(), &json!({"input": input})), "warned", &[]);
    let log = run.log.clone();
    run.expect_success();
    let told = read_log(&log);
    let of_executor: Vec<&str> = told.lines().filter(|line| line.contains("executor one: ")).collect();
    assert_eq!(of_executor.len(), 1, "{told}");
    assert!(of_executor[0].contains("bad.jsonl: its first records are all bad"), "{told}");
}

#[test]
fn a_plan_is_analysed_here_and_one_that_executors_have_run_has_no_metrics() {
    let scratch = scratch();
    let mut cluster = Cluster::start(&scratch);
    scratch.job("job.yaml", &cluster.job(&packing_job(), "out"));
    // no executor exists
    let mut analyze = scratch.command(&["plan", "job.yaml", "--analyze"]);
    let analyzed = run_command(&mut analyze).expect(0).stdout;
    assert!(analyzed.contains("ShardSinkExec") && analyzed.contains("metrics=["), "{analyzed}");
    assert!(!scratch.path("out").exists());

    let _executor = cluster.executor(&|_| {});
    let shown = run_command(&mut command(&scratch, &["run", "job.yaml", "-v"])).expect(0).stdout;
    assert!(shown.contains("ShardSinkExec") && !shown.contains("metrics="), "{shown}");
    assert!(shown.contains("Executors have run it"), "{shown}");
}

#[test]
fn a_repair_that_sleeps_and_wakes_up_changes_nothing() {
    let scratch = scratch();
    let job = with(packing_job(), &json!({"input": {"split_megabytes": 0.0015}}));
    let dataset = scratch.make(&with(job.clone(), &json!({"output": {"path": "mended"}})));
    let expected = shards(&dataset);
    let name = expected.keys().next().unwrap();
    fs::write(dataset.join("data").join(name), b"damaged").unwrap();
    let mut cluster = Cluster::start(&scratch);
    scratch.job("cluster.yaml", &cluster.job(&job, "mended"));
    let mut zombie = HeldExecutor::named(&mut cluster, "zombie", &|_| {});
    let repair = command(&scratch, &["repair", "mended", "cluster.yaml"]);
    let mut repairing = Server::start(repair, &scratch.path("repair.log"));
    zombie.suspend_at_commit();
    repairing.kill();
    // the output now belongs to another job
    scratch.job("other.yaml", &with(job, &json!({"pack": {"length": 32}, "output": {"path": "mended"}})));
    scratch.stillhouse(&["run", "other.yaml", "--overwrite", "--quiet"]).expect(0);
    let before = files(&dataset);
    zombie.resume("this one stops");
    assert_eq!(files(&dataset), before);
}
