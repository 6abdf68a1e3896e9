//! Tests a service that sends its jobs to a cluster: same bytes as on one machine, and events that name the executors.
//!
//! Needs a program with the feature `distributed`, as all tests of the Makefile have. `make cluster-test` runs these.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use stillhouse_tests::service::{Service, eventually};
use stillhouse_tests::{Scratch, corpus, shards, with};

use crate::cluster::{Cluster, Executor, TOKEN};
use crate::resume::count_shards;
use crate::service_api::{quick_job, undisturbed};

/// A service that uses this scheduler, with this token in a file; with `None` the file does not exist.
fn service(scheduler: &str, token: Option<&str>) -> Service {
    let mut service = Service::new(&json!({"cluster": {"scheduler": scheduler}}));
    // outside the folders that jobs may access
    let file = service.data().with_file_name("cluster-token");
    if let Some(token) = token {
        fs::write(&file, token).unwrap();
    }
    service.set_env("STILLHOUSE_CLUSTER_TOKEN_FILE", file.to_str().unwrap());
    service.launch();
    service.scratch.write("corpus.jsonl", &corpus(7, 1300));
    service
}

/// An executor that waits before its commits while a file exists.
fn start_held_executor(cluster: &mut Cluster<'_>, scratch: &Scratch, name: &str) -> (Executor, PathBuf) {
    let hold = scratch.write(&format!("hold-{name}"), "");
    let executor = cluster.executor(&|command| {
        command.env("STILLHOUSE_TEST_HOLD_COMMIT", &hold).args(["--name", name]);
    });
    (executor, hold)
}

fn executors_of(events: &[Value]) -> BTreeSet<String> {
    let begun = events.iter().filter(|event| event["type"] == "split_started");
    begun.filter_map(|event| event["data"]["executor"].as_str()).map(str::to_owned).collect()
}

#[test]
fn jobs_of_a_service_run_on_its_cluster_and_it_tells_which_executor_runs_which_split() {
    let scratch = Scratch::new();
    let mut cluster = Cluster::start(&scratch);
    let service = service(&cluster.address(), Some(TOKEN));
    let api = &service.api;
    let expected = undisturbed(&service, &quick_job("undisturbed"));
    let mut held = ["one", "two"].map(|name| start_held_executor(&mut cluster, &scratch, name));

    let id = api.submit(&quick_job("there"));
    let both = BTreeSet::from(["one".to_owned(), "two".to_owned()]);
    eventually("both executors", || (executors_of(&api.events(&id)) == both).then_some(()));
    // an executor that is about to commit when the job is cancelled finds that the run has ended, and commits nothing
    api.post(&format!("/jobs/{id}/cancel")).expect(202);
    api.wait_for_state(&id, "cancelled");
    for (executor, hold) in &mut held {
        fs::remove_file(hold).unwrap();
        executor.wait_for_log("the run that this worker works for has ended");
    }
    assert_eq!(count_shards(&service.scratch.path("there")), 0);

    api.post(&format!("/jobs/{id}/retry")).expect(202);
    api.wait_for_state(&id, "succeeded");
    assert_eq!(shards(&service.scratch.path("there")), expected);

    // a job that names an engine overrides the service's
    let here = api.submit(&with(quick_job("here"), &json!({"engine": {"kind": "local"}})));
    api.wait_for_state(&here, "succeeded");
    assert_eq!(shards(&service.scratch.path("here")), expected);
    assert_eq!(executors_of(&api.events(&here)), BTreeSet::new());

    // a follower sees the executors as well
    service.stillhouse(&["jobs", "watch", &id]).expect(0).says(&["is made by one", "is made by two"]);
    assert_token_is_hidden(&service, &id);
}

/// Asserts that users see neither the token nor the path of its file.
#[track_caller]
fn assert_token_is_hidden(service: &Service, id: &str) {
    let api = &service.api;
    let log = api.get(&format!("/jobs/{id}/logs")).expect(200).text;
    let told = [log, service.log_text(), api.job(id).to_string(), json!(api.events(id)).to_string()].concat();
    assert!(!told.contains(TOKEN) && !told.contains("cluster-token"), "{told}");
}

#[test]
fn a_cluster_that_is_not_there_or_is_another_ones_is_an_error_of_the_job() {
    let scratch = Scratch::new();
    let cluster = Cluster::start(&scratch);
    let strange = service(&cluster.address(), Some(&"f".repeat(32)));
    let id = strange.api.submit(&quick_job("out"));
    let failed = strange.api.wait_for_state(&id, "failed").to_string();
    assert!(failed.contains("another token than this cluster's scheduler"), "{failed}");

    let none = service(&cluster.address(), None);
    let id = none.api.submit(&quick_job("out"));
    let failed = none.api.wait_for_state(&id, "failed").to_string();
    let says = "cannot read the cluster's token from the file of STILLHOUSE_CLUSTER_TOKEN_FILE";
    assert!(failed.contains(says), "{failed}");
    assert_token_is_hidden(&none, &id);

    let alone = service(&cluster.address(), Some(TOKEN));
    drop(cluster);
    let id = alone.api.submit_with("?max_attempts=2", &quick_job("out"));
    let failed = alone.api.wait_for_state(&id, "failed");
    assert!(failed.to_string().contains("no scheduler answers at"), "{failed}");
    assert_eq!(failed["attempt"], 2, "it can be there later: {failed}");
    assert!(!alone.scratch.path("out").exists());
}
