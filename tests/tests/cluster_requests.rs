//! Counts the store requests of a split, from which docs/design/cluster.md ("What a large job takes") is computed.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::json;
use stillhouse_tests::proxy::{FaultPlan, FaultProxy, Request};
use stillhouse_tests::s3::{self, ADMIN};
use stillhouse_tests::with;

use crate::cluster::{Cluster, scratch};
use crate::cluster_store::{Run, SPLITS, Store, seven_splits};

/// Maximum number of small requests per split, besides the parts of its shard and the lease checks.
const MAX_REQUESTS_PER_SPLIT: usize = 8;

/// Purpose of a request, and whether it occurs once per split or periodically.
fn purpose(request: &Request) -> (&'static str, bool) {
    let (path, query) = (request.path.as_str(), request.query.as_str());
    let is = |name: &str| path.contains(name) || query.contains(name);
    match request.method.as_str() {
        _ if is("lease.json") => ("lease", false),
        _ if is("workers") => ("report", false),
        "GET" if is("list-type") => ("list", false),
        _ if is("/_stillhouse/splits/") => ("record", true),
        "PUT" if is("partNumber=") => ("part", true),
        _ if is("/data/") => ("shard", true),
        _ if is("corpus.jsonl") => ("input", true),
        _ => ("job", false),
    }
}

/// Number of requests by purpose and method.
fn count_by_purpose(requests: &[Request], of_splits: bool) -> BTreeMap<(&'static str, &str), usize> {
    let mut counted = BTreeMap::new();
    for request in requests {
        let (what, of_split) = purpose(request);
        if of_split == of_splits {
            *counted.entry((what, request.method.as_str())).or_default() += 1;
        }
    }
    counted
}

#[test]
fn a_split_asks_a_store_for_little() {
    let scratch = scratch();
    let store = Store::start(&scratch, None, &|_| {});
    let network = || FaultProxy::start(store.weed.endpoint(), FaultPlan { probability: 0.0, ..FaultPlan::default() });
    let (of_run, of_executor) = (network(), network());
    let environment_through = |network: &FaultProxy| {
        let endpoint = network.endpoint();
        move |command: &mut Command| s3::environment(command, &endpoint, ADMIN)
    };
    let mut cluster = Cluster::start(&scratch);
    let _executor = cluster.executor(&environment_through(&of_executor));
    let job = cluster.job(&seven_splits("asked"), "s3://shards/asked");
    // a long timeout, because a retry would change the counts
    let job = with(job, &json!({"storage": {"retry": {"request_timeout_seconds": 300}}}));
    Run::begin(&scratch, &job, &[], &environment_through(&of_run)).expect_success();
    store.assert_finished("asked");
    let (run, executor) = (of_run.requests(), of_executor.requests());
    for (who, requests) in [("run", &run), ("executor", &executor)] {
        println!("{who}: {:?}, beside {:?}", count_by_purpose(requests, true), count_by_purpose(requests, false));
    }
    let mut small = count_by_purpose(&executor, true);
    // each shard has one part
    assert_eq!(small.remove(&("part", "PUT")), Some(SPLITS));
    let small: usize = small.into_values().sum();
    assert!(
        small <= MAX_REQUESTS_PER_SPLIT * SPLITS,
        "{small} requests for {SPLITS} splits: {:?}",
        count_by_purpose(&executor, true)
    );
}
