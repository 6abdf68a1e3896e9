//! Proves that an executor without the credentials of the others ends the run, with its name, before anything is
//! committed.

use std::process::Command;

use serde_json::json;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::with;

use crate::cluster::{Cluster, HeldExecutor, scratch, single_machine_shards};
use crate::cluster_store::Run;
use crate::stores::{packing_job, shards_in};

#[test]
fn one_of_two_executors_without_credentials_is_named_and_nothing_is_committed() {
    let scratch = scratch();
    let job = with(packing_job(), &json!({"input": {"split_megabytes": 0.0015}}));
    let expected = single_machine_shards(&scratch, &job);
    let weed = Seaweed::start();
    weed.create_bucket("shards");
    let s3 = weed.s3();
    let with_keys = |command: &mut Command| weed.environment(command);
    let mut cluster = Cluster::start(&scratch);
    let there = cluster.job(&job, "s3://shards/a");
    // The executor with keys is working before the other one asks, and has not committed.
    let mut keyed = HeldExecutor::named(&mut cluster, "keyed", &with_keys);
    let mut run = Run::begin(&scratch, &there, &[], &with_keys);
    keyed.wait_for_commit();
    let keyless = cluster.executor(&|command| {
        command.args(["--name", "keyless"]);
    });
    assert!(matches!(run.server.wait(), Some(1 | 2)), "{}", run.log_text());
    assert!(
        run.log_text().contains("credentials") && run.log_text().contains("(executor keyless)"),
        "{}",
        run.log_text()
    );
    assert!(s3.list("shards", "a/_stillhouse/splits/").is_empty());
    assert!(shards_in(&s3, "shards", "a").is_empty());
    // nor does the executor with keys commit for the ended run
    keyed.release_commits();
    keyed.executor.wait_for_log("this one stops");
    assert!(s3.list("shards", "a/_stillhouse/splits/").is_empty());
    // without the keyless executor, the same command resumes
    drop(keyless);
    Run::begin(&scratch, &there, &[], &with_keys).expect_success();
    assert_eq!(shards_in(&s3, "shards", "a"), expected);
    assert_eq!(s3.list_multipart_uploads("shards"), Vec::new());
}
