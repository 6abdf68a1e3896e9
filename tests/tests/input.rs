//! Tests the input of a job from the user's side: holdouts, tables, file names and file contents.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use stillhouse_tests::{Scratch, job, nano_teacher, root, shards, with};

/// A job without a teacher.
fn plain(patch: &Value) -> Value {
    let base = json!({"extract": null, "subtokens": null, "partitions": null, "tokenizer": {"path": nano_teacher()},
        "pack": {"mode": "pad", "length": 32, "separator": "none", "boundary": "none"}});
    with(with(job(), &base), patch)
}

fn lines(range: std::ops::Range<usize>) -> String {
    range.map(|i| json!({"text": format!("document {i}")}).to_string() + "\n").collect()
}

fn manifest(scratch: &Scratch) -> Value {
    serde_json::from_str(&fs::read_to_string(scratch.path("out/manifest.json")).unwrap()).unwrap()
}

fn documents(manifest: &Value) -> BTreeMap<String, u64> {
    let mut documents = BTreeMap::new();
    for shard in manifest["shards"].as_array().unwrap() {
        let name = shard["dataset_split"].as_str().unwrap().to_owned();
        *documents.entry(name).or_default() += shard["statistics"]["documents"].as_u64().unwrap();
    }
    documents
}

#[test]
fn holdouts_by_every_rule_are_in_the_data_set() {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &(lines(0..500) + "{broken\n" + &lines(500..1000)));
    let holdout = json!({"dev": {"documents": 50}, "test": {"last_documents": 100}, "validation": {"share": 0.2}});
    let job = plain(&json!({"input": {"split_megabytes": 0.003, "on_error": "skip", "holdout": holdout}}));
    scratch.job("job.yaml", &job);
    scratch.stillhouse(&["run", "job.yaml", "--threads", "2"]).expect(0);
    let made = manifest(&scratch);
    let documents = documents(&made);
    assert_eq!((documents["dev"], documents["test"]), (50, 100));
    assert_eq!(documents.values().sum::<u64>(), 1000);
    assert!((120..240).contains(&documents["validation"]), "{documents:?}");
    assert_eq!(made["statistics"]["skipped"], json!({"broken JSON": 1}));
    let mut ids = BTreeSet::new();
    assert!(made["splits"].as_array().unwrap().iter().all(|split| ids.insert(split["split"].as_u64().unwrap())));
    scratch.stillhouse(&["verify", "out"]).expect(0);
    // the same bytes with another number of threads
    let first = shards(&scratch.path("out"));
    fs::remove_dir_all(scratch.path("out")).unwrap();
    scratch.stillhouse(&["run", "job.yaml", "--threads", "1"]).expect(0);
    assert_eq!(shards(&scratch.path("out")), first);
}

/// A WET file of a crawl: pages in three languages, each a gzip member.
fn wet_file(pages: usize) -> Vec<u8> {
    let member = |record: String| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(record.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    let info = "WARC/1.0\r\nWARC-Type: warcinfo\r\nContent-Length: 4\r\n\r\nours\r\n\r\n".to_owned();
    let page = |i: usize| {
        let text = format!("Page {i} of the crawl.\n{}\n", "Words. ".repeat(i % 9));
        let language = ["eng", "swe", "fra"][i % 3];
        format!(
            "WARC/1.0\r\nWARC-Type: conversion\r\nWARC-Target-URI: https://example.org/{i}\r\n\
             WARC-Identified-Content-Language: {language}\r\nContent-Length: {}\r\n\r\n{text}\r\n\r\n",
            text.len()
        )
    };
    std::iter::once(info).chain((0..pages).map(page)).flat_map(member).collect()
}

#[test]
fn pages_of_a_crawl_are_chosen_by_language_and_keep_their_address() {
    let scratch = Scratch::new();
    fs::write(scratch.path("a.warc.wet.gz"), wet_file(90)).unwrap();
    let all = plain(
        &json!({"input": {"format": "warc", "paths": ["*.gz"], "split_megabytes": 0.002, "carry": ["WARC-Target-URI"]}}),
    );
    let made = scratch.make(&all);
    let whole = manifest(&scratch);
    assert!(whole["splits"].as_array().unwrap().len() > 2);
    assert_eq!(documents(&whole)["train"], 90);
    scratch.stillhouse(&["verify", "out"]).expect(0);
    let shown = scratch.stillhouse(&["inspect", "out", "--document", "7"]).expect(0);
    assert!(shown.stdout.contains("https://example.org/7"), "{}", shown.stdout);
    fs::remove_dir_all(made).unwrap();

    let query = "select * from input where \"WARC-Identified-Content-Language\" = 'swe'";
    scratch.make(&with(all.clone(), &json!({"input": {"sql": query}})));
    assert_eq!(documents(&manifest(&scratch))["train"], 30);
    let shown = scratch.stillhouse(&["inspect", "out", "--document", "1"]).expect(0);
    assert!(shown.stdout.contains("https://example.org/4"), "{}", shown.stdout);

    let table = json!({"format": "warc", "paths": ["a.warc.wet.gz"], "weight": 1});
    let input =
        json!({"format": null, "paths": null, "split_megabytes": null, "tables": {"crawl": table, "again": table}});
    scratch.job("job.yaml", &with(all, &json!({"input": input, "output": {"path": "mixed"}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0).says(&["180 sequences"]);
}

#[test]
fn an_empty_holdout_is_an_error_before_the_rest_is_made() {
    let scratch = Scratch::new();
    scratch.write("corpus.jsonl", &lines(0..100));
    let job = |holdout: Value, pack: Value| plain(&json!({"input": {"holdout": holdout}, "pack": pack}));
    scratch.job("job.yaml", &job(json!({"validation": {"share": 1e-9}}), json!({})));
    for _ in 0..2 {
        scratch.stillhouse(&["run", "job.yaml"]).expect(1).says(&["input.holdout.validation: took no document"]);
        assert!(!scratch.path("out/_SUCCESS").exists());
    }
    let wrap = json!({"mode": "wrap", "length": 64, "boundary": "bos_eos", "separator": "eos"});
    scratch.job("job.yaml", &job(json!({"validation": {"last_documents": 2}}), wrap));
    let said = scratch.stillhouse(&["run", "job.yaml", "--overwrite"]).expect(1);
    said.says(&["input.holdout.validation: its 2 document(s) fill no sequence"]);
}

#[test]
fn the_example_of_a_join_in_the_documents_runs() {
    let page = fs::read_to_string(root().join("docs/job-file.md")).unwrap();
    let example = page.split("```yaml fragment\n").find(|block| block.contains("sql: |")).unwrap();
    let input = example.split("```").next().unwrap();
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("docs")).unwrap();
    scratch.write(
        "docs/0.jsonl",
        &(0..50).map(|i| json!({"id": i, "body": format!("document {i}")}).to_string() + "\n").collect::<String>(),
    );
    scratch.write(
        "labels.csv",
        &("id,quality\n".to_owned() + &(0..50).map(|i| format!("{i},{}\n", f64::from(i) / 50.0)).collect::<String>()),
    );
    let rest = format!(
        "version: 1\nname: join\ntokenizer: {{path: {:?}}}\npack: {{mode: pad, length: 32, separator: none, boundary: none}}\noutput: {{path: out}}\n",
        nano_teacher()
    );
    scratch.write("job.yaml", &(rest + input));
    scratch.stillhouse(&["plan", "job.yaml"]).expect(0);
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    // rows with a quality of at least 0.8
    assert_eq!(documents(&manifest(&scratch))["train"], 10);
}

#[cfg(unix)]
#[test]
fn names_and_contents_that_cannot_be_read_are_reported() {
    use std::os::unix::ffi::OsStrExt;
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("corpus")).unwrap();
    scratch.write("corpus/good.jsonl", &lines(0..20));
    let odd = scratch.path("corpus").join(std::ffi::OsStr::from_bytes(b"caf\xe9\n.jsonl"));
    fs::write(&odd, lines(0..1)).unwrap();
    scratch.job("job.yaml", &plain(&json!({"input": {"paths": ["corpus/g*.jsonl"]}})));
    scratch.stillhouse(&["run", "job.yaml"]).expect(0);
    scratch.job("job.yaml", &plain(&json!({"input": {"paths": ["corpus/*.jsonl"]}})));
    let said = scratch.stillhouse(&["plan", "job.yaml"]).expect(2);
    said.says(&["input.paths[0]: got \"corpus/*.jsonl\": \"corpus/caf\\xE9\\n.jsonl\" has a name that is not UTF-8"]);
    fs::remove_file(odd).unwrap();
    fs::write(scratch.path("corpus/more.jsonl"), b"\x1f\x8b\x08\x00 gzip by another name").unwrap();
    scratch.job("job.yaml", &plain(&json!({"input": {"paths": ["corpus"], "on_error": "skip"}})));
    for verb in ["plan", "run"] {
        let said = scratch.stillhouse(&[verb, "job.yaml"]).expect(2);
        said.says(&["corpus/more.jsonl: these are gzip bytes; say `compression: gzip`"]);
    }
}
