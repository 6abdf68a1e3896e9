//! Proves that a machine downloads weights once for all its executors: they share a cache, and a lock file decides who
//! downloads.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::json;
use stillhouse_tests::hub::Hub;
use stillhouse_tests::{byte_teacher, with};

use crate::cluster::{Cluster, assert_finished, read_log, scratch, single_machine_shards, small_job};
use crate::cluster_store::Run;

const WEIGHTS: &str = "model.safetensors";

/// Files of a cache that hold content from the hub.
fn blobs(cache: &Path) -> Vec<String> {
    let folder = cache.join("models--tests--teacher/blobs");
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn two_executors_with_one_cache_download_the_weights_once() {
    let scratch = scratch();
    let expected = single_machine_shards(&scratch, &small_job());
    let hub = Hub::start(byte_teacher());
    let job = with(small_job(), &json!({"extract": {"teacher": {"path": Hub::REFERENCE}}}));
    let mut cluster = Cluster::start(&scratch);
    // a separate cache simulates that the run is on another machine
    let (of_run, of_executors) = (scratch.path("cache-of-run"), scratch.path("cache-of-executors"));
    let mut run = Run::begin(&scratch, &cluster.job(&job, "hub"), &[], &|command| hub.environment(command, &of_run));
    run.wait_until("its own download", || hub.request_count("GET", WEIGHTS) == 1);
    assert_eq!(hub.request_count("HEAD", WEIGHTS), 1);
    // the first executor's download lasts until the second one has checked the same file (`HEAD`)
    hub.delay_download(WEIGHTS, 3);
    let with_cache = |command: &mut Command| hub.environment(command, &of_executors);
    let executors = [cluster.executor(&with_cache), cluster.executor(&with_cache)];
    run.expect_success();
    assert_finished(&scratch.path("hub"), &expected);
    assert_eq!((hub.request_count("HEAD", WEIGHTS), hub.request_count("GET", WEIGHTS)), (3, 2));
    for executor in &executors {
        assert!(read_log(&executor.log).contains("committed split="), "{}", read_log(&executor.log));
    }
    // complete files, and no partial downloads
    assert_eq!(blobs(&of_executors).len(), 3);
    assert!(blobs(&of_executors).iter().all(|name| name.len() == 64), "{:?}", blobs(&of_executors));
}
