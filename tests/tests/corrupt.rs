//! Tests that `verify` finds damage in a data set, names the place and exits with code 1.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_job, with};

/// Name of the shard; the job makes one.
const SHARD: &str = "data/train-00000-of-00001.parquet";

fn edit_manifest(dataset: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dataset.join("manifest.json");
    let mut manifest: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(path, manifest.to_string()).unwrap();
}

/// A name, a change to the data set, and what `verify` must report.
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

/// Proves that `verify` checks the noise condition if the job promised it, and otherwise only counts violations.
#[test]
fn verify_judges_the_condition_by_what_is_stored() {
    let scratch = Scratch::with_corpus(1, 600);
    let noises = |ran: &stillhouse_tests::CommandOutput| {
        let teacher = ran.json()["teacher"].clone();
        ["noises", "within_tolerance", "argmax_hits"].map(|count| teacher[count].as_u64().unwrap())
    };
    let verify = ["verify", "out", "--teacher", "--sample-batches", "1", "--json"];
    let small = |condition: bool| {
        let extract = json!({"teacher": {"batch_tokens": 128}, "noise": {"condition": condition}});
        with(nano_job(), &json!({"pack": {"length": 32}, "extract": extract}))
    };
    let dataset = scratch.make(&small(true));
    let [all, within, won] = noises(&scratch.stillhouse(&verify).expect(0));
    assert!(all > 20 && all == within && all == won, "{all} {within} {won}");
    fs::remove_dir_all(dataset).unwrap();

    let dataset = scratch.make(&small(false));
    let [all, within, won] = noises(&scratch.stillhouse(&verify).expect(0));
    assert!(all == within && won < all, "{all} {within} {won}");
    // a data set of an older version does not mention the condition and promises nothing
    edit_manifest(&dataset, |m| {
        m["job"]["extract"]["noise"].as_object_mut().unwrap().remove("condition").unwrap();
    });
    fs::write(dataset.join("_SUCCESS"), "").unwrap(); // such data sets have no checksum of the manifest either
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

/// Proves that every reader checks the checksums of files beside the shards; a damaged file is not exported.
#[test]
fn a_damaged_file_beside_the_shards_is_found_and_not_exported() {
    let scratch = Scratch::with_corpus(2, 300);
    let mut plain = job();
    for key in ["extract", "partitions"] {
        plain.as_object_mut().unwrap().remove(key);
    }
    let more = json!({
        "tokenizer": {"path": stillhouse_tests::byte_tokenizer()}, "pack": {"length": 32},
        "subtokens": {"length": 4, "permutation": "shipped", "filter_table": true}
    });
    let dataset = scratch.make(&with(plain, &more));
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.stillhouse(&["export", "out", "whole", "-q"]).expect(0);
    for name in ["tokenizer.json", "permutation.npy", "filter_table.npy", "manifest.json", "_SUCCESS", "README.md"] {
        let whole = fs::read(dataset.join(name)).unwrap();
        let mut flipped = whole.clone();
        // Flip the case of a letter, so that text stays text and JSON stays JSON.
        let middle = (flipped.len() / 2..flipped.len())
            .find(|&at| flipped[at].is_ascii_alphabetic())
            .unwrap_or(flipped.len() / 2);
        flipped[middle] ^= if flipped[middle].is_ascii_alphabetic() { 0x20 } else { 1 };
        for (how, bytes) in [("flipped", Some(&flipped[..])), ("emptied", Some(&[][..])), ("removed", None)] {
            // an empty marker is valid: an older version wrote it
            if name == "_SUCCESS" && how == "emptied" {
                continue;
            }
            match bytes {
                Some(bytes) => fs::write(dataset.join(name), bytes).unwrap(),
                None => fs::remove_file(dataset.join(name)).unwrap(),
            }
            let ran = scratch.stillhouse(&["verify", "out"]);
            assert_eq!(ran.code, Some(1), "{name} {how}: {}{}", ran.stdout, ran.stderr);
            let exported = scratch.stillhouse(&["export", "out", "copy"]);
            let said = exported.stdout.clone() + &exported.stderr;
            if name == "README.md" && how == "flipped" {
                // people edit their card, so it is exported with a warning
                assert!(exported.code == Some(0) && said.contains("README.md"), "{said}");
                fs::remove_dir_all(scratch.path("copy")).unwrap();
            } else {
                assert!(exported.code == Some(1) && said.contains(name), "{name} {how}: {said}");
                assert!(!scratch.path("copy").exists(), "{name} {how}");
            }
            if name == "tokenizer.json" {
                scratch.stillhouse(&["inspect", "out", "--row", "0"]).expect(1).says(&[name]);
            }
            fs::write(dataset.join(name), &whole).unwrap();
        }
    }
    // text below the card's checksummed part, and cards without a checksum, may be edited
    let card = fs::read_to_string(dataset.join("README.md")).unwrap();
    fs::write(dataset.join("README.md"), format!("{card}\nOur own words.\n")).unwrap();
    scratch.stillhouse(&["verify", "out"]).expect(0);
    scratch.stillhouse(&["export", "out", "copy", "-q"]).expect(0);
}

/// Proves that, on the machine that made them, the teacher's columns are checked against the format's tolerances.
#[test]
fn a_column_that_is_off_by_more_than_its_promise_is_found_with_the_teacher() {
    let scratch = Scratch::with_corpus(1, 500);
    let signals = json!({
        "logz_temperatures": [1.0], "entropy": true, "topk": 4, "samples": {"draws": 8}, "top_p": {"mass": 0.5, "most": 20}
    });
    let dataset = scratch.make(&with(job(), &json!({"pack": {"length": 32}, "extract": signals})));
    scratch.stillhouse(&["verify", "out", "--teacher"]).expect(0);
    let shard = dataset.join(SHARD);
    let whole = fs::read(&shard).unwrap();
    let manifest = fs::read(dataset.join("manifest.json")).unwrap();
    let program = "
import sys, hashlib, json, pyarrow as pa, pyarrow.parquet as pq
shard, manifest, column, change = sys.argv[1:]
table = pq.read_table(shard)
at = table.schema.get_field_index(column)
field = table.schema.field(at)
rows = table.column(column).to_pylist()
row = rows[len(rows) // 2]
n = len(row) // 2
row[n] = eval(change, {'v': row[n], 'n': n, 'row': row})
table = table.set_column(at, field, pa.array(rows, field.type))
pq.write_table(table, shard)
data = open(shard, 'rb').read()
m = json.load(open(manifest))
m['shards'][0].update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
m['shards'][0].pop('footer', None)
json.dump(m, open(manifest, 'w'))
";
    for (column, change, says) in [
        ("logprob", "v - 1e-4", "logprob is"),
        ("entropy", "v + 0.01 if v < 5 else v - 0.01", "entropy is"),
        ("logz", "v + 1e-3", "logz is"),
        (
            "topk_logprob",
            "min(v + 1e-3, row[n // 4 * 4]) if n % 4 else v + 1e-3 if v < -1e-3 else v",
            "topk_logprob of",
        ),
        ("topk_index", "v ^ 1", "topk_"),
        ("sampled_index", "v + 1", "sampled tokens differ from those that the seed gives"),
        ("top_p_tail", "v - 1e-3", "top_p_tail is"),
    ] {
        scratch.write("change.py", program);
        let mut python = std::process::Command::new(stillhouse_tests::root().join(".venv/bin/python"));
        python.arg(scratch.path("change.py")).args([&shard, &dataset.join("manifest.json")]).args([column, change]);
        stillhouse_tests::run_command(&mut python).expect(0);
        fs::write(dataset.join("_SUCCESS"), "").unwrap();
        let ran = scratch.stillhouse(&["verify", "out", "--teacher", "--sample-batches", "100"]);
        let said = ran.stdout + &ran.stderr;
        assert!(ran.code == Some(1) && said.contains(says), "{column} {change}: {said}");
        fs::write(&shard, &whole).unwrap();
        fs::write(dataset.join("manifest.json"), &manifest).unwrap();
    }
}
