//! Proves that the demo has the same shards on one machine and on a cluster.

use stillhouse_tests::{Scratch, corpus, repetitions, run_command, shards};

use crate::cluster::{Cluster, assert_finished, command};
use crate::demo::{self, demo_over};

/// Speeches for which CI has time: three for training and the demo's holdout of three. All 33 would take 15 minutes.
const SPEECHES: usize = 6;
const WHOLE: usize = usize::MAX;

#[test]
fn the_demo_has_the_same_shards_here_and_on_one_two_and_three_executors() {
    let scratch = Scratch::new();
    let documents = match repetitions(SPEECHES, WHOLE) {
        WHOLE => demo::corpus(),
        speeches => scratch.write("corpus.jsonl", &corpus(speeches, WHOLE)),
    };
    scratch.write("demo.yaml", &demo_over(&documents));
    scratch.stillhouse(&["run", "demo.yaml", "--quiet"]).expect(0);
    let expected = shards(&scratch.path("out"));
    assert!(expected.len() >= 2, "{expected:?}");
    let mut cluster = Cluster::start(&scratch);
    let mut executors = Vec::new();
    for n in 1..=3 {
        executors.append(&mut cluster.executors(1));
        let name = format!("on-{n}");
        let demo = demo_over(&documents).replace("path: out", &format!("path: {name}"));
        scratch.write("there.yaml", &demo);
        run_command(&mut command(&scratch, &["run", "there.yaml", "--scheduler", &cluster.address()])).expect(0);
        assert_finished(&scratch.path(&name), &expected);
    }
}
