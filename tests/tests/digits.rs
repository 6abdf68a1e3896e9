//! Tests digits of a number other than the id (`subtokens.permutation`), and the filter table beside the shards:
//! refusal, storage, damage, repair and copies. `python/tests/test_views_stored.py` tests that they equal what the
//! package computes.

use std::fs;

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, files, nano_teacher, shards, with};

const V: usize = 50_257;

fn job() -> Value {
    json!({
        "version": 1, "name": "digits", "seed": 42,
        "input": {"format": "jsonl", "paths": ["corpus.jsonl"]},
        "tokenizer": {"path": nano_teacher()},
        "pack": {"length": 64},
        "subtokens": {"length": 4, "permutation": "numbers.json", "filter_table": true},
        "output": {"path": "out"}
    })
}

/// The ids in reverse order.
fn backwards() -> Vec<usize> {
    (0..V).rev().collect()
}

#[test]
fn what_is_no_permutation_is_refused_by_the_id() {
    let scratch = Scratch::with_corpus(1, 600);
    let refused = |numbers: &str, says: &str| {
        scratch.write("numbers.json", numbers);
        scratch.job("job.yaml", &job());
        let said = scratch.stillhouse(&["plan", "job.yaml"]).expect(2);
        assert!(said.stderr.contains("1 problem"), "{}", said.stderr);
        said.says(&["subtokens.permutation: got \"numbers.json\": ", says]);
    };
    let list = |change: fn(&mut Vec<usize>)| {
        let mut numbers = backwards();
        change(&mut numbers);
        json!(numbers).to_string()
    };
    refused(
        &list(|n| n[7] = n[3]),
        "the ids 3 and 7 both have the number 50253, and no id has 50249; valid: each number once",
    );
    refused(&list(|n| n[9] = V), "id 9 has the number 50257; valid: 0 to 50256");
    refused(&list(|n| n.truncate(V - 1)), "has 50256 numbers, and id 50256 has none; valid: one for each of 50257 ids");
    refused(&list(|n| n.push(0)), "has 50258 numbers, and the last id is 50256");
    refused("", "is not JSON");
    refused("{}", "is JSON but not a list");
    refused("[0.5]", "has 0.5 for id 0");
    let cases = [
        (json!({"permutation": "nothing.npy"}), "got \"nothing.npy\": cannot read ./nothing.npy: No such file"),
        (json!({"permutation": "."}), "is no file; valid: a .npy or .json file"),
        (json!({"permutation": "s3://bucket/numbers.npy"}), "supports only local files here"),
        (json!({"permutation": ""}), "subtokens.permutation: got \"\""),
        (
            json!({"permutation": "shipped", "length": 1}),
            "subtokens.filter_table: got true: the table of ℓ · (b + 1) · V = 1 · 50258 · 50257 has",
        ),
    ];
    for (subtokens, says) in cases {
        scratch.job("job.yaml", &with(job(), &json!({"subtokens": subtokens})));
        scratch.stillhouse(&["plan", "job.yaml"]).expect(2).says(&[says]);
    }
    assert!(!scratch.path("out").exists());
}

#[test]
fn numbers_and_table_stand_beside_the_shards_and_are_mended() {
    let scratch = Scratch::with_corpus(2, 900);
    scratch.write("numbers.json", &json!(backwards()).to_string());
    let dataset = scratch.make(&job());
    let stored = shards(&dataset);
    let all = files(&dataset);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    let npy = fs::read(dataset.join("permutation.npy")).unwrap();
    let numbers =
        npy[npy.len() - 4 * V..].chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]) as usize);
    assert_eq!(numbers.collect::<Vec<_>>(), backwards());
    assert_eq!(fs::metadata(dataset.join("filter_table.npy")).unwrap().len(), 128 + 4 * 16 * V as u64);
    // the file's content counts, not its name
    fs::rename(scratch.path("numbers.json"), scratch.path("other.json")).unwrap();
    scratch.job("job.yaml", &with(job(), &json!({"subtokens": {"permutation": "other.json"}})));
    scratch.stillhouse(&["run", "job.yaml", "--quiet"]).expect(0);
    assert_eq!(shards(&dataset), stored);
    scratch.job("ship.yaml", &with(job(), &json!({"subtokens": {"permutation": "shipped"}})));
    scratch.stillhouse(&["run", "ship.yaml"]).expect(2).says(&["subtokens.permutation.sha256"]);

    for name in ["permutation.npy", "filter_table.npy"] {
        for damage in [true, false] {
            match damage {
                true => fs::write(dataset.join(name), [&npy[..], b"x"].concat()).unwrap(),
                false => fs::remove_file(dataset.join(name)).unwrap(),
            }
            let said = scratch.stillhouse(&["verify", "out"]).expect(1);
            let told = said.stdout + &said.stderr;
            assert!(told.contains(name) && told.contains("stillhouse repair"), "{told}");
            scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&[name]);
            scratch.stillhouse(&["repair", "out", "job.yaml"]).expect(0);
            scratch.stillhouse(&["verify", "out"]).expect(0);
        }
    }
    assert_eq!(files(&dataset), all);
    scratch.stillhouse(&["export", "out", "copy"]).expect(0);
    scratch.stillhouse(&["verify", "copy"]).expect(0);
    scratch.stillhouse(&["run", "ship.yaml", "--overwrite", "--quiet"]).expect(0);
    assert_ne!(shards(&dataset), stored);
    let card = fs::read_to_string(dataset.join("README.md")).unwrap();
    assert!(card.contains("4 digits in base 15 of each id's number in `permutation.npy`"), "{card}");
    // another job in the same folder reuses none of it
    scratch.job("plain.yaml", &with(job(), &json!({"subtokens": {"permutation": null, "filter_table": null}})));
    scratch.stillhouse(&["run", "plain.yaml", "--overwrite", "--quiet"]).expect(0);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    assert!(!dataset.join("permutation.npy").exists() && !dataset.join("filter_table.npy").exists());
}

/// Proves that `verify` finds digits of the id instead of its number, even if all checksums match.
#[test]
fn digits_are_held_against_the_numbers() {
    let scratch = Scratch::with_corpus(1, 600);
    scratch.write("numbers.json", &json!(backwards()).to_string());
    let dataset = scratch.make(&job());
    let other =
        scratch.make(&with(job(), &json!({"subtokens": {"permutation": "shipped"}, "output": {"path": "other"}})));
    // copy the other data set's numbers and their manifest entries
    for name in ["permutation.npy", "filter_table.npy"] {
        fs::copy(other.join(name), dataset.join(name)).unwrap();
    }
    let manifest =
        |path: &std::path::Path| -> Value { serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap() };
    let mut forged = manifest(&dataset.join("manifest.json"));
    forged["beside"] = manifest(&other.join("manifest.json"))["beside"].clone();
    let text = serde_json::to_string_pretty(&forged).unwrap();
    fs::write(dataset.join("manifest.json"), &text).unwrap();
    fs::write(dataset.join("_SUCCESS"), format!("{}  manifest.json\n", stillhouse_tests::hex_sha256(text.as_bytes())))
        .unwrap();
    let said = scratch.stillhouse(&["verify", "out"]).expect(1);
    let told = said.stdout + &said.stderr;
    assert!(told.contains("subtokens do not decode to input_ids"), "{told}");
}
