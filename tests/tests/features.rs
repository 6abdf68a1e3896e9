//! Checks that the tests of a single crate are built with the features of the whole workspace, so that no dependency is
//! compiled twice.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use stillhouse_tests::root;

type Features = BTreeSet<String>;
/// The feature sets of each package; one that build scripts use as well has two sets.
type Tree = BTreeMap<String, BTreeSet<Features>>;

fn cargo(arguments: &[&str]) -> String {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut command = Command::new(cargo);
    let out = command.args(arguments).args(["--offline", "--locked"]).current_dir(root()).output().unwrap();
    assert!(out.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn tree(selection: &[&str], edges: &str) -> Tree {
    let shown = cargo(&[&["tree", "--edges", edges, "--prefix", "none", "--format", "{p}|{f}|"], selection].concat());
    let mut tree = Tree::new();
    for line in shown.lines() {
        let mut parts = line.split('|');
        let (Some(package), Some(features)) = (parts.next(), parts.next()) else { continue };
        let package = package.trim_end_matches(" (proc-macro)").to_owned();
        let features = features.split(',').filter(|f| !f.is_empty()).map(str::to_owned).collect();
        if !package.starts_with("stillhouse") {
            tree.entry(package).or_default().insert(features);
        }
    }
    tree
}

/// Crates with so few dependencies that their tests build only those; in a clean clone they run within minutes.
const SMALL: [&str; 8] = [
    "stillhouse-schemas",
    "stillhouse-noise",
    "stillhouse-signals",
    "stillhouse-tokenizer",
    "stillhouse-filters",
    "stillhouse-dedup",
    "stillhouse-chat",
    "stillhouse-cpu",
];

/// The workspace features that a selection of packages lacks, one line per package.
fn lacking(all: &Tree, selected: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    for (package, sets) in selected {
        for set in sets.difference(&all[package]) {
            let nearest =
                all[package].iter().min_by_key(|features| features.symmetric_difference(set).count()).unwrap();
            let missing: Vec<_> = nearest.difference(set).cloned().collect();
            let alone: Vec<_> = set.difference(nearest).cloned().collect();
            lines.push(format!("{package}: lacks [{}], alone has [{}]", missing.join(", "), alone.join(", ")));
        }
    }
    lines
}

#[test]
fn the_tests_of_a_crate_and_the_program_share_what_the_workspace_builds() {
    let metadata: serde_json::Value =
        serde_json::from_str(&cargo(&["metadata", "--no-deps", "--format-version", "1"])).unwrap();
    let members: Vec<&str> =
        metadata["packages"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert!(members.contains(&"stillhouse") && members.len() > 9, "{members:?}");
    let all = tree(&["--workspace"], "normal,build,dev");
    assert!(all.len() > 300, "{} packages", all.len());
    for member in members.into_iter().filter(|member| !SMALL.contains(member)) {
        let lines = lacking(&all, &tree(&["--package", member], "normal,build,dev"));
        assert!(
            lines.is_empty(),
            "the tests of {member} compile these with other features than the workspace; run `make features`:\n{}",
            lines.join("\n")
        );
    }
    let lines = lacking(&all, &tree(&["--package", "stillhouse"], "normal,build"));
    assert!(
        lines.is_empty(),
        "the program compiles these with other features than the workspace; run `make features`:\n{}",
        lines.join("\n")
    );
}

#[test]
fn the_tests_of_a_small_crate_compile_no_data_fusion() {
    for member in SMALL {
        let tree = tree(&["--package", member], "normal,build,dev");
        let large: Vec<&String> = tree.keys().filter(|package| package.starts_with("datafusion")).collect();
        assert!(large.is_empty() && tree.len() < 250, "{member}: {} packages, {large:?}", tree.len());
    }
}

/// Proves that the feature `distributed` compiles Ballista's own crates and nothing else a second time.
#[test]
fn a_program_with_a_cluster_shares_what_the_workspace_builds() {
    let all = tree(&["--workspace"], "normal,build,dev");
    let with = ["--workspace", "--features", "stillhouse/distributed,stillhouse-cluster/distributed"];
    let with = tree(&with, "normal,build,dev");
    let own = with.keys().filter(|package| !all.contains_key(*package)).count();
    assert!((1..60).contains(&own), "{own} crates are Ballista's own");
    let shared: Tree = with.into_iter().filter(|(package, _)| all.contains_key(package)).collect();
    let lines = lacking(&all, &shared);
    assert!(
        lines.is_empty(),
        "Ballista compiles these with other features than the workspace; run `make features`:\n{}",
        lines.join("\n")
    );
}

/// A wheel has features of its own: those that decide what is read, and none that the tests of other crates have.
#[test]
fn the_package_for_trainers_has_what_it_needs_and_nothing_for_the_tests() {
    let tree = tree(&["--package", "stillhouse-python"], "normal,build");
    for (package, features) in [
        ("parquet", &["arrow", "async", "zstd"][..]),
        ("object_store", &["fs", "aws", "gcp", "azure", "http"]),
        ("serde_json", &["float_roundtrip"]),
    ] {
        let named = tree.iter().find(|(name, _)| name.starts_with(&format!("{package} v")));
        let Some((_, sets)) = named else { panic!("no {package}") };
        for feature in features {
            assert!(sets.iter().all(|set| set.contains(*feature)), "{package} lacks {feature}: {sets:?}");
        }
    }
    // these locks of a runtime do not survive a fork, and loaders of PyTorch fork
    let tokio = tree.iter().filter(|(package, _)| package.starts_with("tokio v")).flat_map(|(_, sets)| sets);
    assert!(tokio.clone().count() > 0 && tokio.clone().all(|set| !set.contains("parking_lot")));
    assert!(!tree.keys().any(|package| package.starts_with("datafusion")), "{:?}", tree.keys());
    let shown = cargo(&["tree", "--edges", "normal,build", "--prefix", "none", "--package", "stillhouse-python"]);
    assert!(!shown.lines().any(|line| line.starts_with("stillhouse-features")), "{shown}");
}
