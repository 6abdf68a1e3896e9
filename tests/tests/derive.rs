//! Tests new columns for a finished data set: they equal those of a run of the whole job, byte for byte.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use stillhouse_tests::s3::ADMIN;
use stillhouse_tests::seaweed::Seaweed;
use stillhouse_tests::{Scratch, byte_teacher, job, repetitions, shards, with, with_manifest};

use crate::resume::{count_shards, uniform_draws};
use crate::stores::{User, shards_in};

/// The demo's corpus in several splits, only packed.
fn packed() -> Value {
    let mut job =
        with(job(), &json!({"input": {"split_megabytes": 0.004}, "pack": {"length": 32}, "output": {"path": "out"}}));
    for key in ["extract", "subtokens", "partitions"] {
        job.as_object_mut().unwrap().remove(key);
    }
    with(job, &json!({"tokenizer": {"path": byte_teacher()}, "partitions": {"views": 1}}))
}

fn with_teacher(tolerance: f64) -> Value {
    let extract =
        json!({"teacher": {"path": byte_teacher(), "device": "cpu"}, "noise": {"tolerance": tolerance, "draws": 2}});
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
    // the source is unchanged, and the manifest names both jobs
    assert_eq!(shards(&scratch.path("out")), source);
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("views/manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["job"]["orders"]["kind"], "progressive");
    assert_eq!(manifest["derived_from"]["job"]["orders"]["kind"], "none");
    assert_eq!(manifest["derived_from"]["columns"], json!(["subtokens", "partition", "partition_t", "order", "block"]));
    let card = fs::read_to_string(scratch.path("views/README.md")).unwrap();
    assert!(card.contains("derived"), "{card}");
    scratch.stillhouse(&["verify", "views"]).expect(0);
    scratch.stillhouse(&["inspect", "views", "--row", "1"]).expect(0);

    // A second run does nothing, a lost or damaged shard gets the same bytes, a stopped run resumes.
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

    // derived from a derived data set
    let next =
        json!({"version": 1, "name": "next", "orders": {"kind": "random", "steps": 4}, "output": {"path": "next"}});
    scratch.job("next.yaml", &next);
    scratch.stillhouse(&["derive", "views", "next.yaml", "-q"]).expect(0);
    let manifest: Value = serde_json::from_slice(&fs::read(scratch.path("next/manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["derived_from"]["derived_from"]["job"]["name"], packed()["name"]);
    scratch.stillhouse(&["verify", "next"]).expect(0);
    // the ordinary verbs report that it is derived
    scratch.stillhouse(&["repair", "views", "whole.yaml"]).expect(1).says(&["stillhouse derive"]);
    scratch.job("onto.yaml", &with(whole, &json!({"output": {"path": "views"}})));
    let told = scratch.stillhouse(&["run", "onto.yaml", "--append"]).expect(2);
    told.says(&["--append", "was derived from another data set", "append to that one", "derive again"]);
}

/// Proves that `derive` accepts the whole job file with other views: settings equal to those of the data set's job do not
/// require another pass over the text.
#[test]
fn the_whole_job_file_derives_what_is_different_in_it() {
    let scratch = Scratch::with_corpus(2, 800);
    let made = with_teacher(1e-3);
    scratch.make(&made);
    let changes =
        json!({"partitions": {"views": 3}, "extract": {"noise": {"tolerance": 1e-2}}, "output": {"path": "derived"}});
    scratch.job("whole.yaml", &with(made.clone(), &changes));
    scratch.stillhouse(&["derive", "out", "whole.yaml", "-q"]).expect(0);
    scratch.job(
        "views.yaml",
        &with(json!({"version": 1, "name": made["name"]}), &with(changes, &json!({"output": {"path": "views"}}))),
    );
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("derived")), shards(&scratch.path("views")));
    // other changes are refused by field, with both values
    let others = json!({"pack": {"length": 64}, "extract": {"topk": 3}, "seed": 7, "output": {"path": "other"}});
    scratch.job("other.yaml", &with(made, &others));
    let told = scratch.stillhouse(&["derive", "out", "other.yaml"]).expect(2);
    told.says(&[
        "pack.length: cannot change",
        "got 64, the data set has 32",
        "extract.topk: cannot change",
        "seed: cannot change",
        "got 7",
        "stillhouse run",
    ]);
}

fn manifest_of(scratch: &Scratch, name: &str) -> Value {
    serde_json::from_slice(&fs::read(scratch.path(name).join("manifest.json")).unwrap()).unwrap()
}

/// Proves that later epochs of an order equal those of a run of the whole job; a schedule continues after the rows of
/// earlier epochs.
#[test]
fn later_epochs_are_derived_from_the_first() {
    let scratch = Scratch::with_corpus(4, 3000);
    scratch.make(&packed());
    let derive = |name: &str, orders: Value| {
        let job = json!({"version": 1, "name": name, "orders": orders, "output": {"path": name}});
        scratch.job("derived.yaml", &job);
        scratch.stillhouse(&["derive", "out", "derived.yaml", "-q"]).expect(0);
        scratch.stillhouse(&["verify", name]).expect(0);
        shards(&scratch.path(name))
    };
    for orders in [json!({"kind": "strided", "streams": [1, 2, 4]}), json!({"kind": "random", "steps": 5})] {
        let kind = orders["kind"].as_str().unwrap();
        let first = derive(&format!("{kind}0"), orders.clone());
        let second = with(orders.clone(), &json!({"epoch": 1}));
        let derived = derive(&format!("{kind}1"), second.clone());
        assert_ne!(first, derived, "{kind}");
        scratch
            .job("whole.yaml", &with(packed(), &json!({"orders": second, "output": {"path": format!("{kind}-run")}})));
        scratch.stillhouse(&["run", "whole.yaml", "-q"]).expect(0);
        assert_eq!(shards(&scratch.path(&format!("{kind}-run"))), derived, "{kind}");
    }
    let schedule =
        json!({"kind": "progressive", "schedule": {"i_ar_sequences": 20, "i_perm_sequences": 200, "rho_max": 9}});
    derive("schedule0", schedule.clone());
    derive("schedule2", with(schedule, &json!({"epoch": 2})));
    let (source, first, third) =
        (manifest_of(&scratch, "out"), manifest_of(&scratch, "schedule0"), manifest_of(&scratch, "schedule2"));
    let all = source["totals"]["train"]["rows"].as_u64().unwrap();
    let mut before = 0;
    for (n, shard) in source["shards"].as_array().unwrap().iter().enumerate() {
        let place = |of: &Value| of["splits"][n]["place"].clone();
        assert_eq!(place(&first), json!({"first": before, "sequences": shard["rows"]}));
        assert_eq!(place(&third), json!({"first": 2 * all + before, "sequences": shard["rows"]}));
        before += shard["rows"].as_u64().unwrap();
    }
    assert!(before == all && all > 40, "{all} rows");
    // a lost or wrong place is detected
    for (place, says) in [
        (json!({"first": 0, "sequences": 1}), "order and block differ from those that the seed gives"),
        (Value::Null, "the manifest lacks the position of its split"),
    ] {
        with_manifest(&scratch.path("schedule2"), |manifest| manifest["splits"][0]["place"] = place);
        let found = scratch.stillhouse(&["verify", "schedule2"]).expect(1);
        assert!((found.stdout + &found.stderr).contains(says), "{says}");
    }
}

/// Proves that derived columns of images equal those of a run of the whole job.
#[test]
fn columns_of_images_are_derived() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("photos/cat")).unwrap();
    for name in ["rgb.png", "grey.png", "palette.png", "444.jpg"] {
        let from = stillhouse_tests::root().join("operators/testdata/images").join(name);
        fs::copy(from, scratch.path("photos/cat").join(name)).unwrap();
    }
    let job = json!({
        "version": 1, "name": "photos", "seed": 3,
        "input": {"format": "images", "paths": ["photos"], "images": {"size": 8, "fit": "adm"}, "holdout": {"validation": {"last_documents": 1}}},
        "pack": {"length": 192, "separator": "none", "boundary": "none"}, "output": {"path": "out"}
    });
    let source = shards(&scratch.make(&job));
    assert!(source.len() > 1, "{source:?}");
    let more = json!({
        "version": 1, "name": "digits", "subtokens": {"length": 2, "filter_table": true},
        "partitions": {"level": "subtoken", "views": 2, "schedule": "polynomial"},
        "orders": {"kind": "progressive", "schedule": {"i_ar_sequences": 1, "i_perm_sequences": 4, "rho_max": 50}},
        "output": {"path": "derived"}
    });
    scratch.job("derived.yaml", &more);
    scratch.stillhouse(&["derive", "out", "derived.yaml", "-q"]).expect(0);
    scratch.job("whole.yaml", &with(job, &with(more, &json!({"output": {"path": "whole"}}))));
    scratch.stillhouse(&["run", "whole.yaml", "-q"]).expect(0);
    // The number of images per split is known before reading, so the places are equal too.
    assert_eq!(shards(&scratch.path("derived")), shards(&scratch.path("whole")));
    assert_eq!(manifest_of(&scratch, "derived")["splits"], manifest_of(&scratch, "whole")["splits"]);
    scratch.stillhouse(&["verify", "derived"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), source);
}

/// Proves that a derivation that is killed at any moment resumes with the same bytes.
#[test]
fn kills_change_no_byte_of_what_is_derived() {
    let scratch = Scratch::with_corpus(6, 3000);
    let source = shards(&scratch.make(&packed()));
    scratch.job("views.yaml", &views());
    let began = Instant::now();
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    let duration = began.elapsed();
    let out = scratch.path("views");
    let (expected, whole) = (shards(&out), fs::read(out.join("manifest.json")).unwrap());
    let (mut kills, mut midway, mut moments) = (0, 0, uniform_draws(7));
    while kills < repetitions(6, 40) {
        fs::remove_dir_all(&out).unwrap();
        let mut run = scratch.command(&["derive", "out", "views.yaml", "-q"]).stdin(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + duration.mul_f64(moments.next().unwrap());
        // every second kill comes at a random moment, the others right after a commit
        while run.try_wait().unwrap().is_none() {
            let due = if kills % 2 == 0 { Instant::now() >= deadline } else { count_shards(&out) > 0 };
            if due {
                run.kill().unwrap();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        kills += 1;
        midway += usize::from((1..expected.len()).contains(&count_shards(&out)));
        scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
        assert_eq!(shards(&out), expected);
        assert_eq!(fs::read(out.join("manifest.json")).unwrap(), whole);
    }
    assert!(midway > 0, "no kill fell between the first and the last commit");
    assert_eq!(shards(&scratch.path("out")), source);
    scratch.stillhouse(&["verify", "views"]).expect(0);
}

#[test]
fn a_bucket_derives_what_a_folder_derives() {
    let scratch = Scratch::with_corpus(4, 3000);
    scratch.make(&packed());
    scratch.job("views.yaml", &views());
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    let expected = shards(&scratch.path("views"));

    let weed = Seaweed::start();
    let s3 = weed.s3();
    weed.create_bucket("shards");
    let user = User { scratch: &scratch, endpoint: weed.endpoint().to_owned(), keys: ADMIN };
    let remote =
        |path: &str| json!({"output": {"path": path}, "storage": {"endpoint": weed.endpoint(), "path_style": true}});
    user.job(&with(packed(), &remote("s3://shards/out"))).expect(0);
    scratch.job("remote.yaml", &with(views(), &remote("s3://shards/views")));
    user.run(&["derive", "s3://shards/out", "remote.yaml"]).expect(0);
    assert_eq!(shards_in(&s3, "shards", "views"), expected);
    assert_eq!(s3.list_multipart_uploads("shards"), []);
    user.run(&["verify", "s3://shards/views"]).expect(0);
    let again = user.run(&["derive", "s3://shards/out", "remote.yaml"]).expect(0);
    assert!((again.stdout + &again.stderr).contains("was complete already"));
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
    refused(json!({"seed": 9}), 2, &["seed: cannot change"]);
    refused(json!({"extract": {"topk": 3}}), 2, &["extract.topk: cannot change"]);
    refused(json!({"pack": {"length": 64}}), 2, &["pack.length: cannot change"]);
    refused(json!({"partitions": {"level": "subtoken"}}), 2, &["partitions.level", "needs digits"]);
    refused(json!({"orders": {"kind": "strided"}}), 2, &["orders.streams"]);
    // onto itself, even with `--overwrite`
    let over = json!({"subtokens": {"length": 2}, "output": {"path": "out"}});
    let before = shards(&scratch.path("out"));
    scratch.job("over.yaml", &with(json!({"version": 1, "name": "over"}), &over));
    scratch.stillhouse(&["derive", "out", "over.yaml", "--overwrite"]).expect(2).says(&["derived from"]);
    assert_eq!(shards(&scratch.path("out")), before);
    // From a damaged data set. Its first split comes first, so that nothing is committed before the damage is found.
    let digits = json!({"subtokens": {"length": 2}, "engine": {"parallel_splits": 1}});
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
    // sorts first in the listing, but comes after the existing file in the data set
    scratch.write("in/a.jsonl", &lines[2..].join("\n"));
    for job in ["out.yaml", "whole.yaml"] {
        scratch.stillhouse(&["run", job, "--append", "-q"]).expect(0);
    }
    scratch.job("views.yaml", &views());
    scratch.stillhouse(&["derive", "out", "views.yaml", "-q"]).expect(0);
    assert_eq!(shards(&scratch.path("views")), shards(&scratch.path("whole")));
    scratch.stillhouse(&["verify", "views"]).expect(0);
}
