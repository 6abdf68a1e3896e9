//! Tests exports of log-probabilities for other readers: always the same bytes, and errors that name the problem.
//!
//! `python/tests/test_exports_kd.py` reads the files the way those readers do.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use stillhouse_tests::{Scratch, files, hex_sha256, job, with};

pub(crate) const DISTILLKIT: [&str; 2] = ["--format", "distillkit"];
pub(crate) const MEGATRON: [&str; 10] = [
    "--format",
    "megatron-kd",
    "--blend",
    "owt_text_document",
    "--global-batch",
    "4",
    "--data-parallel",
    "2",
    "--iterations-per-file",
    "2",
];

/// The files of an export, without those that only a running export needs.
fn exported(place: &Path) -> BTreeMap<PathBuf, String> {
    files(place).into_iter().filter(|(name, _)| !name.starts_with("_stillhouse")).collect()
}

fn edit(manifest: &Path, change: impl Fn(&mut Value)) {
    let mut value = serde_json::from_slice(&fs::read(manifest).unwrap()).unwrap();
    change(&mut value);
    fs::write(manifest, serde_json::to_vec(&value).unwrap()).unwrap();
}

#[test]
fn an_export_for_another_reader_is_the_same_however_it_is_made() {
    let scratch = Scratch::with_corpus(5, 2000);
    scratch.make(&with(
        job(),
        &json!({"input": {"split_megabytes": 0.002, "holdout": {"validation": {"last_documents": 1}}}, "pack": {"length": 32}}),
    ));
    let call = |place: &str, how: &[&str], more: &[&str]| {
        scratch.stillhouse(&[["export", "out", place].as_slice(), how, more].concat())
    };
    for (name, how) in [("distillkit", DISTILLKIT.as_slice()), ("megatron", MEGATRON.as_slice())] {
        let place = format!("kd/{name}");
        call(&place, how, &["--parallel", "1", "-q"]).expect(0);
        let whole = exported(&scratch.path(&place));
        assert!(whole.keys().filter(|file| file.starts_with("data")).count() > 3, "{whole:?}");
        let again = format!("{place}-again");
        let said = call(&again, how, &["--parallel", "5", "--json"]).expect(0);
        assert_eq!(exported(&scratch.path(&again)), whole);
        let events: Vec<Value> = said.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(events.first().unwrap()["event"], "export_started", "{}", said.stdout);
        let last = &events.last().unwrap()["export"];
        assert_eq!((&last["signal"], &last["entries"]), (&json!("topk"), &json!(4)));
        assert_eq!(last["files"].as_array().unwrap().len(), whole.len());

        // An interrupted export has its marker and some files; the next run makes the rest.
        let record: Value =
            serde_json::from_slice(&fs::read(scratch.path(&again).join("export.json")).unwrap()).unwrap();
        let mark = json!({"manifest_sha256": record["source"]["export_sha256"]}).to_string();
        fs::write(scratch.path(&again).join("_stillhouse/export.json"), mark).unwrap();
        let lost: Vec<&PathBuf> = whole.keys().filter(|file| file.starts_with("data")).step_by(2).collect();
        for file in lost.iter().map(|file| file.as_path()).chain(["export.json", "_SUCCESS"].map(Path::new)) {
            fs::remove_file(scratch.path(&again).join(file)).unwrap();
        }
        fs::create_dir_all(scratch.path(&again).join("_stillhouse/staging")).unwrap();
        fs::write(scratch.path(&again).join("_stillhouse/staging/data_left"), "half").unwrap();
        call(&again, how, &["--dtype", "bfloat16"]).expect(2).says(&["another unfinished export"]);
        call(&again, how, &[]).expect(0);
        assert_eq!(exported(&scratch.path(&again)), whole);
        assert!(!scratch.path(&again).join("_stillhouse/export.json").exists());
        assert!(!scratch.path(&again).join("_stillhouse/staging/data_left").exists());

        // an export is not a data set, and a data set does not overwrite it
        scratch.stillhouse(&["verify", &again]).expect(1).says(&["not a Stillhouse data set"]);
        scratch.stillhouse(&["export", "out", &again]).expect(2).says(&["not of this data set"]);
        let marker = fs::read_to_string(scratch.path(&again).join("_SUCCESS")).unwrap();
        let record = fs::read(scratch.path(&again).join("export.json")).unwrap();
        assert_eq!(marker, format!("{}  export.json\n", hex_sha256(&record)));
    }
}

#[test]
fn what_these_readers_cannot_take_is_refused_before_anything_is_written() {
    let scratch = Scratch::with_corpus(2, 900);
    let out = scratch.make(&job());
    let manifest = out.join("manifest.json");
    let whole = fs::read(&manifest).unwrap();
    let refused = |how: &[&str], parts: &[&str]| {
        scratch.stillhouse(&[["export", "out", "kd"].as_slice(), how].concat()).expect(2).says(parts);
        assert!(!scratch.path("kd").exists());
    };
    edit(&manifest, |m| m["vocab_size"] = 131_073.into());
    refused(&MEGATRON, &["vocab_size: got 131073, valid up to 131072", "17 bits"]);
    edit(&manifest, |m| m["vocab_size"] = 2_000_000.into());
    refused(&DISTILLKIT, &["vocab_size: got 2000000, valid up to 1048576"]);
    fs::write(&manifest, &whole).unwrap();
    refused(&["--format", "megatron-kd", "--blend", "a", "--global-batch", "1000"], &["fill no iteration"]);
    refused(&["--format", "distillkit", "--signal", "samples"], &["no column sampled_times", "valid: topk"]);
    refused(&["--dtype", "float16"], &["--format"]);
    refused(&["--format", "distillkit", "--blend", "a"], &["--blend is an option of --format megatron-kd"]);
    refused(&["--format", "megatron-kd", "--global-batch", "4"], &["needs --blend", "--hash"]);
    refused(&["--format", "megatron-kd", "--global-batch", "4", "--blend", "dät"], &["--blend: got \"dät\"", "--hash"]);

    // a shard with fewer rows than in the manifest, and a missing one
    edit(&manifest, |m| {
        let rows = m["shards"][0]["rows"].as_u64().unwrap();
        m["shards"][0]["rows"] = (rows + 4).into();
    });
    scratch.stillhouse(&[["export", "out", "kd"].as_slice(), &DISTILLKIT].concat()).expect(1).says(&["4 rows fewer"]);
    fs::write(&manifest, &whole).unwrap();
    let shard = fs::read_dir(out.join("data")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(&shard).unwrap();
    let name = shard.file_name().unwrap().to_str().unwrap();
    scratch.stillhouse(&[["export", "out", "kd"].as_slice(), &DISTILLKIT].concat()).expect(1).says(&[name]);
    assert!(!scratch.path("kd/_SUCCESS").exists() && !scratch.path("kd/data").exists());
}
