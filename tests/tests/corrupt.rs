//! `verify` finds what is wrong with a data set, says where, and ends with exit code 1.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, with};

/// A shard's name: the job makes one.
const SHARD: &str = "data/train-00000-of-00001.parquet";

fn edit_manifest(dataset: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dataset.join("manifest.json");
    let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(path, manifest.to_string()).unwrap();
}

/// What is done to the data set, how, and what `verify` must say of it.
type Fault<'a> = (&'a str, &'a dyn Fn(), &'a [&'a str]);

#[test]
fn verify_names_the_place_of_every_fault() {
    let scratch = Scratch::with_corpus(2, 600);
    let dataset = scratch.make(&job());
    let shard = fs::read(dataset.join(SHARD)).unwrap();
    let manifest = fs::read(dataset.join("manifest.json")).unwrap();
    let marker = dataset.join("_SUCCESS");

    let faults: [Fault<'_>; 8] = [
        (
            "a flipped byte",
            &|| {
                let mut bytes = shard.clone();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                fs::write(dataset.join(SHARD), bytes).unwrap();
            },
            &[SHARD, "sha256"],
        ),
        ("a shard cut short", &|| fs::write(dataset.join(SHARD), &shard[..shard.len() - 100]).unwrap(), &[SHARD]),
        ("a missing shard", &|| fs::remove_file(dataset.join(SHARD)).unwrap(), &[SHARD, "missing"]),
        (
            "a file too many",
            &|| fs::write(dataset.join("data/train-00001-of-00001.parquet"), &shard).unwrap(),
            &["data/train-00001-of-00001.parquet", "not in the manifest"],
        ),
        (
            "a manifest with another count",
            &|| edit_manifest(&dataset, |m| m["shards"][0]["rows"] = 1.into()),
            &[SHARD, "the manifest has 1"],
        ),
        (
            "a manifest with other statistics",
            &|| edit_manifest(&dataset, |m| m["statistics"]["documents"] = 77.into()),
            &["manifest.json", "statistics"],
        ),
        (
            "a manifest with another noise seed",
            &|| edit_manifest(&dataset, |m| m["noise_seed"] = 41.into()),
            &["manifest.json", "noise_seed is 41, the job's is 42"],
        ),
        ("no marker", &|| fs::remove_file(&marker).unwrap(), &["_SUCCESS"]),
    ];
    for (name, make, says) in faults {
        make();
        let ran = scratch.stillhouse(&["verify", "out"]).expect(1);
        let said = ran.stdout + &ran.stderr;
        for part in says {
            assert!(said.contains(part), "{name}: {part:?} is not in:\n{said}");
        }
        fs::write(dataset.join(SHARD), &shard).unwrap();
        fs::write(dataset.join("manifest.json"), &manifest).unwrap();
        fs::write(&marker, "").unwrap();
        let _ = fs::remove_file(dataset.join("data/train-00001-of-00001.parquet"));
    }
    scratch.stillhouse(&["verify", "out"]).expect(0);
}

#[test]
fn the_noise_of_another_seed_is_found_with_the_teacher() {
    let scratch = Scratch::with_corpus(2, 400);
    let dataset = scratch.make(&job());
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
    edit_manifest(&dataset, |m| {
        m["noise_seed"] = 41.into();
        m["job"]["seed"] = 41.into();
        m["job"].as_object_mut().unwrap().remove("partitions");
    });
    let ran = scratch.stillhouse(&["verify", "out", "--teacher"]).expect(1);
    assert!((ran.stdout + &ran.stderr).contains("total variation"));
}

/// The condition is a promise of the job: one that is broken is found, one that was not made is only counted.
#[test]
fn verify_judges_the_condition_by_what_is_stored() {
    let scratch = Scratch::with_corpus(1, 600);
    let noises = |ran: &stillhouse_tests::Ran| {
        let teacher = ran.json()["teacher"].clone();
        ["noises", "within_tolerance", "argmax_hits"].map(|count| teacher[count].as_u64().unwrap())
    };
    let verify = ["verify", "out", "--teacher", "--sample-batches", "1", "--json"];
    let small = |condition: bool| {
        let extract = json!({"teacher": {"batch_tokens": 128}, "noise": {"condition": condition}});
        with(job(), &json!({"pack": {"length": 32}, "extract": extract}))
    };
    let dataset = scratch.make(&small(true));
    let [all, within, won] = noises(&scratch.stillhouse(&verify).expect(0));
    assert!(all > 20 && all == within && all == won, "{all} {within} {won}");
    fs::remove_dir_all(dataset).unwrap();

    let dataset = scratch.make(&small(false));
    let [all, within, won] = noises(&scratch.stillhouse(&verify).expect(0));
    assert!(all == within && won < all, "{all} {within} {won}");
    // a data set of an older version says nothing, and promises nothing
    edit_manifest(&dataset, |m| {
        m["job"]["extract"]["noise"].as_object_mut().unwrap().remove("condition").unwrap();
    });
    fs::write(dataset.join("_SUCCESS"), "").unwrap(); // nor do they know the manifest's checksum
    let reported = scratch.stillhouse(&verify[..5]).expect(0).stdout;
    assert!(reported.contains("the job did not ask for it"), "{reported}");
    edit_manifest(&dataset, |m| m["job"]["extract"]["noise"]["condition"] = true.into());
    let reported = scratch.stillhouse(&verify[..5]).expect(1).stdout;
    assert!(reported.contains("the observed token loses in argmax(l + ξ) by"), "{reported}");
}

#[test]
fn what_is_no_data_set_is_refused() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("empty")).unwrap();
    for verb in ["inspect", "verify"] {
        scratch.stillhouse(&[verb, "empty"]).expect(1).says(&["empty", "not a Stillhouse data set"]);
        scratch.stillhouse(&[verb, "nowhere"]).expect(1).says(&["nowhere", "no such folder"]);
    }
}
