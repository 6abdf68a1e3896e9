//! Tests the demo's job file and the part of its bytes that does not depend on the processor.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use stillhouse_tests::{Scratch, root, shards};

/// `jobs/examples/demo.yaml` with this corpus and the output `out`.
pub(crate) fn demo_over(corpus: &Path) -> String {
    let text = fs::read_to_string(root().join("jobs/examples/demo.yaml")).unwrap();
    let teacher = root().join("assets/teacher-nano-gpt2");
    let places = [
        ("../../assets/corpus/sotu-small.jsonl.gz", corpus, 1),
        ("../../assets/teacher-nano-gpt2", teacher.as_path(), 2),
        ("../../demo-out/demo", Path::new("out"), 1),
    ];
    places.into_iter().fold(text, |text, (named, there, times)| {
        assert_eq!(text.matches(named).count(), times, "{named}");
        text.replace(named, there.to_str().unwrap())
    })
}

/// The demo's corpus.
pub(crate) fn corpus() -> PathBuf {
    root().join("assets/corpus/sotu-small.jsonl.gz")
}

/// Removes a section with its indented lines from a job file.
fn without(section: &str, text: &str) -> String {
    let mut inside = false;
    let keeps = |line: &&str| {
        inside = if line.starts_with(' ') { inside } else { line.starts_with(section) };
        !inside
    };
    text.lines().filter(keeps).map(|line| format!("{line}\n")).collect()
}

/// SHA-256 of every shard: covers ids, packing, digits, groups, orders, Parquet and zstd. Neither a teacher nor a
/// mathematical function affects them, so they are equal on every machine. A change of these sums changes what users
/// have: it is either intended and announced, or a bug.
const GOLDEN: [(&str, &str); 3] = [
    ("train-00000-of-00002.parquet", "7313505434ea7bb0a21cdab72c79e6e404bec8dc187a03c7b1b1aa1f89e6da86"),
    ("train-00001-of-00002.parquet", "314f89d16fe1487b5003ada1173d7f332b766efb6f4f7b36e2e9c86f15154b78"),
    ("validation-00000-of-00001.parquet", "d5d783e59564938b3c0ae55bef1b337fc4e0df34d9a6b860a37535ac0fa78031"),
];

#[test]
fn the_demo_without_its_teacher_has_the_bytes_that_it_had() {
    let scratch = Scratch::new();
    let job = without("extract:", &demo_over(&corpus()));
    let job = job + "orders: {kind: progressive, rho: 16}\n";
    scratch.write("demo.yaml", &job);
    scratch.stillhouse(&["run", "demo.yaml", "--quiet"]).expect(0);
    let made = shards(&scratch.path("out"));
    let golden = GOLDEN.map(|(name, sha256)| (name.to_owned(), sha256.to_owned()));
    assert_eq!(made, BTreeMap::from(golden));
}

#[test]
fn a_demo_over_files_that_are_not_its_own_is_refused() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("tour")).unwrap();
    scratch.write("tour/demo.yaml", "version: 1\n");
    let refused = scratch.stillhouse(&["demo", "tour"]).expect(2);
    assert!(
        refused.stderr.contains("tour/demo.yaml exists and is not of this demo; valid: a new folder"),
        "{}",
        refused.stderr
    );
    assert_eq!(fs::read_to_string(scratch.path("tour/demo.yaml")).unwrap(), "version: 1\n");
    assert_eq!(fs::read_dir(scratch.path("tour")).unwrap().count(), 1, "nothing is written into it");
}
