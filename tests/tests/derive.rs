//! New columns for a finished data set: those that a run of the whole job would have made, to the byte.

use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_teacher, shards, with};

/// The demo's corpus in some splits, packed only.
fn packed() -> Value {
    let mut job =
        with(job(), &json!({"input": {"split_megabytes": 0.004}, "pack": {"length": 32}, "output": {"path": "out"}}));
    for key in ["extract", "subtokens", "partitions"] {
        job.as_object_mut().unwrap().remove(key);
    }
    with(job, &json!({"tokenizer": {"path": nano_teacher()}, "partitions": {"views": 1}}))
}

fn with_teacher(tolerance: f64) -> Value {
    let extract =
        json!({"teacher": {"path": nano_teacher(), "device": "cpu"}, "noise": {"tolerance": tolerance, "draws": 2}});
    with(packed(), &json!({"extract": extract, "tokenizer": {"path": null}}))
}

fn views() -> Value {
    json!({
        "version": 1, "name": "views", "subtokens": {"length": 4, "permutation": "shipped", "filter_table": true}, "partitions": {"views": 3, "level": "subtoken"},
        "orders": {"kind": "progressive", "schedule": {"i_ar_sequences": 4, "i_perm_sequences": 40, "rho_max": 8, "sequences_per_split": 16}},
        "output": {"path": "views"}
    })
}

#[test]
fn derived_views_are_those_of_the_whole_job() {
    let scratch = Scratch::with_corpus(4, 3000);
    let source = shards(&scratch.make(&packed()));
    assert!(source.len() > 2, "{source:?}");
    scratch.job("views.yaml", &views());
    let said = scratch.stillhouse(&["derive", "out", "views.yaml"]).expect(0);
    assert!(said.stdout.contains("sequences"), "{}", said.stdout);
    let derived = shards(&scratch.path("views"));
    let whole = with(packed(), &with(views(), &json!({"name": "whole", "output": {"path": "whole"}})));
    scratch.job("whole.yaml", &whole);
    scratch.stillhouse(&["run", "whole.yaml", "-q"]).expect(0);
    assert_eq!(derived, shards(&scratch.path("whole")));
    for beside in ["permutation.npy", "filter_table.npy", "tokenizer.json"] {
        let [of_derived, of_whole] = ["views", "whole"].map(|name| fs::read(scratch.path(name).join(beside)).unwrap());
        assert_eq!(of_derived, of_whole, "{beside}");
    }
    // the data set itself is as it was, and both jobs are told
    assert_eq!(shards(&scratch.path("out")), source);
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("views/manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["job"]["orders"]["kind"], "progressive");
    assert_eq!(manifest["derived_from"]["job"]["orders"]["kind"], "none");
    assert_eq!(manifest["derived_from"]["columns"], json!(["subtokens", "partition", "partition_t", "order", "block"]));
    let card = fs::read_to_string(scratch.path("views/README.md")).unwrap();
    assert!(card.contains("derived"), "{card}");
    scratch.stillhouse(&["verify", "views"]).expect(0);
    scratch.stillhouse(&["inspect", "views", "--row", "1"]).expect(0);

    // again: nothing; a shard that is lost or damaged: the same bytes; stopped: goes on
    let again = scratch.stillhouse(&["derive", "out", "views.yaml"]).expect(0);
    assert!((again.stdout + &again.stderr).contains("was complete already"));
    let mut names = derived.keys();
    let [lost, damaged] = [(); 2].map(|()| scratch.path("views/data").join(names.next().unwrap()));
    fs::remove_file(&lost).unwrap();
    let mut bytes = fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&damaged, bytes).unwrap();
    let found = scratch.stillhouse(&["verify", "views"]).expect(1);
    assert!((found.stdout + &found.stderr).contains("stillhouse derive"), "what mends it is told");
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("views")), derived);
    for gone in ["views/_SUCCESS", "views/manifest.json"] {
        fs::remove_file(scratch.path(gone)).unwrap();
    }
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("views")), derived);

    // derived of what was derived
    let next =
        json!({"version": 1, "name": "next", "orders": {"kind": "random", "steps": 4}, "output": {"path": "next"}});
    scratch.job("next.yaml", &next);
    scratch.stillhouse(&["derive", "views", "next.yaml", "-q"]).expect(0);
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("next/manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["derived_from"]["derived_from"]["job"]["name"], packed()["name"]);
    scratch.stillhouse(&["verify", "next"]).expect(0);
    // the ordinary verbs say whose it is
    scratch.stillhouse(&["repair", "views", "whole.yaml"]).expect(1).says(&["stillhouse derive"]);
}

#[test]
fn noise_is_stored_again_at_a_looser_tolerance() {
    let scratch = Scratch::with_corpus(2, 3000);
    scratch.make(&with_teacher(1e-3));
    let loose =
        json!({"version": 1, "name": "loose", "extract": {"noise": {"tolerance": 1e-2}}, "output": {"path": "loose"}});
    scratch.job("loose.yaml", &loose);
    scratch.stillhouse(&["derive", "out", "loose.yaml", "-q"]).expect(0);
    let verified = scratch.stillhouse(&["verify", "loose", "--teacher", "--json"]).expect(0).json();
    assert!(verified["teacher"]["noises"].as_u64() > Some(500), "{verified}");
    let corrections = |name: &str| {
        let manifest: Value =
            serde_json::from_slice(&fs::read(scratch.path(name).join("manifest.json")).unwrap()).unwrap();
        let statistics = &manifest["statistics"];
        let lists: u64 =
            statistics["corrections_histogram"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum();
        assert_eq!(lists, 2 * statistics["predicted_tokens"].as_u64().unwrap());
        statistics["corrections"].as_f64().unwrap()
    };
    scratch.job("fresh.yaml", &with(with_teacher(1e-2), &json!({"output": {"path": "fresh"}})));
    scratch.stillhouse(&["run", "fresh.yaml", "-q"]).expect(0);
    let [stored, loose, fresh] = ["out", "loose", "fresh"].map(corrections);
    assert!(loose < stored / 3.0 && loose < 1.3 * fresh, "{stored} stored, {loose} left, {fresh} by a run");
}

#[test]
fn what_cannot_be_derived_is_refused() {
    let scratch = Scratch::with_corpus(2, 3000);
    scratch.make(&with_teacher(1e-3));
    let refused = |patch: Value, code: i32, says: &[&str]| {
        let own = json!({"version": 1, "name": "new", "output": {"path": "new"}});
        scratch.job("new.yaml", &with(own, &patch));
        scratch.stillhouse(&["derive", "out", "new.yaml"]).expect(code).says(says);
        assert!(!scratch.path("new").exists(), "{patch}");
    };
    let noise = |tolerance: f64| json!({"extract": {"noise": {"tolerance": tolerance}}});
    refused(json!({}), 2, &["nothing is different"]);
    refused(json!({"partitions": {"views": 1}}), 2, &["nothing is different"]);
    refused(noise(1e-4), 2, &["extract.noise.tolerance", "got 0.0001", "stored at 0.001"]);
    refused(noise(1e-3 + 1e-7), 2, &["extract.noise.tolerance", "or more"]);
    refused(json!({"seed": 9}), 2, &["seed: stays as the data set has it"]);
    refused(json!({"extract": {"topk": 3}}), 2, &["extract.topk: stays"]);
    refused(json!({"pack": {"length": 64}}), 2, &["pack: stays"]);
    refused(json!({"partitions": {"level": "subtoken"}}), 2, &["partitions.level", "needs digits"]);
    refused(json!({"orders": {"kind": "strided"}}), 2, &["orders.streams"]);
    // over itself, also where everything may be replaced
    let over = json!({"subtokens": {"length": 2}, "output": {"path": "out"}});
    let before = shards(&scratch.path("out"));
    scratch.job("over.yaml", &with(json!({"version": 1, "name": "over"}), &over));
    scratch.stillhouse(&["derive", "out", "over.yaml", "--overwrite"]).expect(2).says(&["derived from"]);
    assert_eq!(shards(&scratch.path("out")), before);
    // of a data set that is not whole
    let digits = json!({"subtokens": {"length": 2}});
    let first = scratch.path("out/data").join(before.keys().next().unwrap());
    let bytes = fs::read(&first).unwrap();
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 3] ^= 4;
    fs::write(&first, damaged).unwrap();
    refused(digits.clone(), 1, &["sha256", "the manifest has"]);
    fs::write(&first, bytes).unwrap();
    let tokenizer = scratch.path("out/tokenizer.json");
    fs::write(&tokenizer, b"{}").unwrap();
    refused(digits.clone(), 1, &["tokenizer.json", "sha256"]);
    fs::remove_file(scratch.path("out/_SUCCESS")).unwrap();
    refused(digits, 1, &["_SUCCESS"]);
}

#[test]
fn what_was_appended_is_derived_alike() {
    let scratch = Scratch::new();
    let lines: Vec<String> = stillhouse_tests::corpus(4, 3000).lines().map(str::to_owned).collect();
    fs::create_dir(scratch.path("in")).unwrap();
    let job = with(packed(), &json!({"input": {"paths": ["in/*.jsonl"]}}));
    scratch.job("out.yaml", &job);
    scratch.job("whole.yaml", &with(job, &with(views(), &json!({"name": "whole", "output": {"path": "whole"}}))));
    scratch.write("in/b.jsonl", &lines[..2].join("\n"));
    for job in ["out.yaml", "whole.yaml"] {
        scratch.stillhouse(&["run", job, "-q"]).expect(0);
    }
    // before the first one in the listing, after it in the data set
    scratch.write("in/a.jsonl", &lines[2..].join("\n"));
    for job in ["out.yaml", "whole.yaml"] {
        scratch.stillhouse(&["run", job, "--append", "-q"]).expect(0);
    }
    scratch.job("views.yaml", &views());
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("views")), shards(&scratch.path("whole")));
    scratch.stillhouse(&["verify", "views"]).expect(0);
}
